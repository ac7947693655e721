# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A Gaussian for thousands of parameters: variances, and the few directions that they miss."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.metric import (
    DenseMetric,
    DiagonalMetric,
    LowRankMetric,
)
from numpyro_sgmcmc.posterior.potential import ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import ROUGH, Gaussian
from numpyro_sgmcmc.tuning.variational import (
    descended,
    for_searches,
    hessian_product,
    passes_of_descent,
)

_PRODUCTS = 16  #: products with the Hessian in a round, beside those of given directions
_ROUNDS = 8  #: the most rounds
_COLUMNS = 64  #: the most directions of the metric
_FEW = 16  #: entries of a site, or of one of its axes, that have a direction each
_MOST_SHARED = 48  #: the most directions of all sites

_FAR = 2.0  #: factor beyond which an eigenvalue is far from 1
_ROUND = 4.0  #: factor beyond which one asks for another round
_ERROR = 0.3  #: largest relative error of an eigenvalue that is known
_FLAT = 1e-6  #: part of the largest eigenvalue below which one is as good as none

_MOST_PASSES = 200.0  #: passes over the data after which no round is begun


def find_low_rank(target: Target, rng_key: Array, start: Gaussian) -> Gaussian:
    """
    A Gaussian whose precision is that of the posterior along a few directions, and that of
    independent coordinates else. Its factor is

    .. math:: L = S \\, (I + V \\operatorname{diag}(r - 1) V^\\top) ,

    with scales :math:`s` of the parameters from the search before. Each round begins with a descent
    (:func:`~numpyro_sgmcmc.tuning.variational.descended`) to the centre. Then it looks at the
    Hessian in the coordinates at hand, :math:`A = L^\\top \\nabla^2 U(c) L`, by Rayleigh and Ritz
    in the space of

    - the sums of each site and of the slices of its short axes (in the first round),
    - :math:`v, A v, \\dots, A^{15} v` with a random :math:`v`.

    Eigenvalues below a half and above 2 give new directions, which the next round does not see
    again. Rounds end when all are between a quarter and 4, or after 200 passes. The
    intercept of crossed effects and the sums of their groups, say, are known much less than each
    effect given all others.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param start: where the search starts.
    :return: centre, scales and directions in the units of the unconstrained parameters; a diagonal
        metric where no eigenvalue is far from 1, or where second derivatives say nothing.
    :raises ValueError: if the potential is not finite there.

    **References:**

    1. *An Iteration Method for the Solution of the Eigenvalue Problem of Linear Differential and
       Integral Operators*, Cornelius Lanczos (1950).

    **Example:** a sum that is known much less than any of its terms.

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import init_to_uniform
        >>> from numpyro_sgmcmc.posterior.metric import DiagonalMetric
        >>> from numpyro_sgmcmc.posterior.model import read_model
        >>> from numpyro_sgmcmc.posterior.target import Target
        >>> from numpyro_sgmcmc.tuning.gaussian import Gaussian
        >>> from numpyro_sgmcmc.tuning.low_rank import find_low_rank

        >>> def model(y):
        ...     x = numpyro.sample("x", dist.Normal(0, 1).expand([99]).to_event(1))
        ...     with numpyro.plate("rows", len(y), subsample_size=10) as i:
        ...         numpyro.sample("y", dist.Normal(jnp.sum(x), 1), obs=y[i])

        >>> y = jnp.zeros(100)
        >>> target = Target(read_model(model, init_to_uniform, (y,), {}), (y,), {})
        >>> start = Gaussian(DiagonalMetric(jnp.ones(99), jnp.ones(99)), 0.0)
        >>> found = find_low_rank(target, jax.random.key(0), start).metric
        >>> found.vectors.shape[1], bool(abs(found.center).max() < 0.1)
        (1, True)
        >>> print(f"{found.roots[0]:.4f} is about {(1 + 99 * 100) ** -0.5:.4f}")
        0.0100 is about 0.0100
    """
    metric, target = start.metric, for_searches(target)
    if isinstance(metric, DenseMetric):
        metric = DiagonalMetric(metric.center, jnp.sum(metric.inverse**2, axis=0) ** -0.5)
    dimension, dtype = len(metric.center), metric.scale.dtype
    none = jnp.zeros((dimension, _COLUMNS), dtype), jnp.ones(_COLUMNS, dtype)
    # the posterior of all rows is narrower than that of a part
    scale, shared = start.part**0.5 * metric.scale, _shared_directions(target)
    metric = LowRankMetric(metric.center, scale, *none)
    descend = target.compiled(partial(descended, controlled=_is_controlled(target)))
    look, passes = target.compiled(_looked), 0.0
    is_round, ends = False, (1.0, 1.0)
    for done in range(_ROUNDS):
        key = random.fold_in(rng_key, done)
        found = descend(metric, key)
        metric = metric._replace(center=found.center)
        passes += passes_of_descent(target, _is_controlled(target))
        if is_round or passes > _MOST_PASSES:
            break
        space = look(metric, shared, key, np.int32(len(shared) if done else 0))
        passes += 2 * (1 + len(space.basis) - (len(shared) if done else 0))
        if not np.all(np.isfinite(space.images)):
            raise ValueError(
                "Tuning found no metric: the potential is not finite near the centre that was"
                " found. Give `metric=` variances, or reparametrise the model."
            )
        if start.is_rough or space.trace < ROUGH * found.curvatures.sum():
            # second derivatives say nothing of the directions
            start = start._replace(is_rough=True)
            break
        vectors, e, ends = _far(space)
        is_round = 1 / _ROUND < ends[0] and ends[1] < _ROUND
        metric = _with_directions(metric, vectors, e)
    is_used = np.asarray(metric.roots) != 1
    narrowed = metric._replace(vectors=metric.vectors[:, is_used], roots=metric.roots[is_used])
    return start._replace(
        metric=narrowed if is_used.any() else DiagonalMetric(metric.center, metric.scale),
        passes=passes,
        curvature=min(ends[1], _FAR) if is_round else None,
        converged=is_round or start.is_rough,
    )


class _Space(NamedTuple):
    """
    The Hessian at the centre of a metric, in its coordinates.

    - **basis** - orthonormal vectors, or zeros, shape (m, d).
    - **images** - their products with the Hessian, shape (m, d).
    - **trace** - an estimate of its trace.
    """

    basis: Array
    images: Array
    trace: Array


def _is_controlled(target: Target) -> bool:
    """True if a minibatch gradient can have a control variate."""
    return bool(target.model.plates)


def _shared_directions(target: Target) -> Array:
    """
    The directions in which many parameters move alike: each site, each slice of its short axes, and
    each parameter of short sites, shape (k, d).
    """
    zeros = target.unravel(jnp.zeros(target.model.dimension))
    found = []
    for name, x in zeros.items():
        masks = [np.ones(x.shape)]
        for axis, size in enumerate(x.shape):
            if 1 < size <= _FEW:
                rest = [1] * x.ndim
                rest[axis] = size
                masks += [np.broadcast_to(row.reshape(rest), x.shape) for row in np.eye(size)]
        found += [ravel(zeros | {name: jnp.asarray(mask, x.dtype)}) for mask in masks]
    # those of the most parameters first
    found.sort(key=lambda direction: -float(jnp.sum(direction)))
    return jnp.stack(found[:_MOST_SHARED])


def _looked(
    target: Target, metric: LowRankMetric, shared: Array, rng_key: Array, known: Array
) -> _Space:
    """
    The Hessian in some directions of the parameters, and in those that a random vector leads to.

    :param shared: the directions.
    :param known: how many of them are left out.
    """
    model_key, away_key, sign_key = random.split(rng_key, 3)
    product = hessian_product(target, metric, model_key)
    dimension, dtype = metric.scale.shape[0], metric.scale.dtype
    first = jax.vmap(lambda x: metric.coordinates(metric.center + x))(shared)
    away = random.normal(away_key, (1, dimension), dtype)
    number = len(shared) + min(_PRODUCTS, dimension)
    basis, images = _space(product, jnp.concatenate([first, away]), number, known)
    signs = random.rademacher(sign_key, (dimension,), dtype)
    return _Space(basis, images, signs @ product(signs))


def _space(
    product: Callable[[Array], Array], given: Array, number: int, known: Array
) -> tuple[Array, Array]:
    """
    An orthonormal basis of some vectors and of the images of the last of them, and its images.

    :param product: :math:`x \\mapsto A x`.
    :param given: the vectors, shape (k, d).
    :param int number: number of vectors in the basis, m.
    :param known: how many of the given vectors are left out; as many are zero at the end.
    :return: shapes (m, d) and (m, d).
    """

    def one(k: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        basis, images = found
        is_given = k + known < len(given)
        vector = jnp.where(is_given, given[jnp.minimum(k + known, len(given) - 1)], images[k - 1])
        length = jnp.linalg.norm(vector)
        for _ in range(2):
            vector = vector - basis.T @ (basis @ vector)
        left = jnp.linalg.norm(vector)
        # what is left of a vector in the space of those before is a rounding error
        vector = jnp.where(left > _FLAT**0.5 * length, vector / left, 0.0)
        return basis.at[k].set(vector), images.at[k].set(product(vector))

    zeros = jnp.zeros((number, given.shape[1]), given.dtype)
    return lax.fori_loop(0, number - known, one, (zeros, zeros))


def _far(space: _Space) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """
    The known eigenvectors whose eigenvalues are far from 1, these, and the ends of the spectrum.
    """
    basis, images = (np.asarray(x, np.float64) for x in space[:2])
    is_there = np.any(basis != 0, axis=1)
    basis, images = basis[is_there], images[is_there]
    matrix = basis @ images.T
    e, w = np.linalg.eigh((matrix + matrix.T) / 2)
    vectors = basis.T @ w
    left = np.sum((images.T @ w - vectors * e) ** 2, axis=0)
    floor = _FLAT * float(np.max(np.abs(e)))
    # by Kato and Temple, where other eigenvalues are about 1
    is_known = left < _ERROR * np.abs(e) * np.abs(e - 1)
    chosen = ((e > _FAR) | (e < 1 / _FAR)) & (e > floor) & is_known
    return vectors[:, chosen], e[chosen], (float(e[0]), float(e[-1]))


def _with_directions(metric: LowRankMetric, vectors: np.ndarray, e: np.ndarray) -> LowRankMetric:
    """
    A metric with the covariance

    .. math:: L \\, (I + U \\operatorname{diag}(1 / e - 1) U^\\top) L^\\top .

    :param vectors: :math:`U`, orthonormal, shape (d, k).
    :param e: eigenvalues of the precision in the coordinates of the metric, shape (k,).
    """
    before, roots = (np.asarray(x, np.float64) for x in (metric.vectors, metric.roots))
    columns = np.concatenate(
        [before, vectors + before @ ((roots - 1)[:, None] * (before.T @ vectors))], axis=1
    )
    basis, triangle = np.linalg.qr(columns)
    excess = np.concatenate([roots**2 - 1, 1 / e - 1])
    more, w = np.linalg.eigh((triangle * excess) @ triangle.T)
    logs = np.log1p(np.maximum(more, _FLAT - 1))
    chosen = np.argsort(-np.abs(logs))[: metric.roots.shape[0]]
    dtype = metric.scale.dtype
    return metric._replace(
        vectors=jnp.asarray(basis @ w[:, chosen], dtype),
        roots=jnp.asarray(np.exp(logs[chosen] / 2), dtype),
    )
