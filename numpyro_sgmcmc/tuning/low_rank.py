# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A Gaussian for thousands of parameters: variances, and the few directions that they miss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.metric import (
    DenseMetric,
    DiagonalMetric,
    IdentityMetric,
    LowRankMetric,
)
from numpyro_sgmcmc.posterior.potential import Rows, over_all_data, ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian
from numpyro_sgmcmc.tuning.hessians import ROUGH
from numpyro_sgmcmc.tuning.variational import (
    descended,
    for_searches,
    hessian_product,
    passes_of_descent,
)

_PRODUCTS = 16  #: products with the Hessian in a round, beside those of given directions
_RESIDUALS = 8  #: products of residuals at once
_EXTENSIONS = 6  #: how often a round adds residuals at most
_UNLIKE = 0.1  #: part of a residual, in units of its length, that is unlike the other residuals
_ROUNDS = 8  #: the most rounds
_SETTLING = 3  #: the most descents before the first round
_COLUMNS = 64  #: the most directions of the metric
_FEW = 16  #: entries of a site, or of one of its axes, that have a direction each
_MOST_SHARED = 48  #: the most directions of all sites

_FAR = 2.0  #: factor beyond which an eigenvalue is far from 1
_ROUND = 4.0  #: factor beyond which one asks for another round
_ERROR = 0.3  #: largest relative error of an eigenvalue that is known
_LEAST = 1 / 16  #: the least factor of a curvature by which a descent changes a scale
_NARROWINGS = 5  #: how often a direction becomes narrower at most
_WIDE = 4.0  #: factor of a width beyond which the potential is looked at further out
_FLAT = 1e-6  #: part of the largest eigenvalue below which one is as good as none

_MOST_PASSES = 250.0  #: passes over the data after which no round is begun


def find_low_rank(target: Target, rng_key: Array, start: Gaussian) -> Gaussian:
    """
    A Gaussian whose precision is that of the posterior along a few directions, and that of
    independent coordinates else. Its factor is

    .. math:: L = S \\, (I + V \\operatorname{diag}(r - 1) V^\\top) ,

    with scales :math:`s` of the parameters from the search before. The coordinates of hierarchies
    have changed since, and with them the scales of parameters of short sites. Up to three descents
    (:func:`~numpyro_sgmcmc.tuning.variational.descended`) correct these. Each later round begins
    with one descent to the centre. A round looks at the Hessian in the coordinates at hand,
    :math:`A = L^\\top \\nabla^2 U(c) L`, by Rayleigh and Ritz in the space of

    - the sums of each site and of the slices of its short axes (in the first round),
    - :math:`v, A v, \\dots, A^{15} v` with a random :math:`v`,
    - the residuals :math:`A u - \\lambda u` of eigenvectors with a large error and an eigenvalue
      far from 1, and images of the last of them. A round adds these up to six times (Davidson).

    Eigenvalues below a half and above 2 give new directions, which the next round does not see
    again. Directions much wider than the scales end where the potential rises. Rounds end when all
    eigenvalues are between a quarter and 4, or after 250 passes. The intercept of crossed effects
    and the sums of their groups, say, are known much less than each effect given all others.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param start: where the search starts.
    :return: centre, scales and directions in the units of the unconstrained parameters; a diagonal
        metric where no eigenvalue is far from 1, or where second derivatives say nothing.
    :raises ValueError: if the potential is not finite there.

    **References:**

    1. *An Iteration Method for the Solution of the Eigenvalue Problem of Linear Differential and
       Integral Operators*, Cornelius Lanczos (1950).
    2. *The Iterative Calculation of a Few of the Lowest Eigenvalues and Corresponding Eigenvectors
       of Large Real-Symmetric Matrices*, Ernest R. Davidson (1975), without a preconditioner.

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
    look, passes = _Look(target, metric, len(shared)), 0.0
    descend, secants = target.compiled(descended), target.compiled(_secants)
    is_round, has_walls, ends = False, False, (1.0, 1.0)
    for done in range(_ROUNDS):
        key = random.fold_in(rng_key, done)
        most = 1 if done else _SETTLING
        metric, curvatures, descents = _settled(target, descend, metric, key, most)
        passes += descents * passes_of_descent(target)
        if is_round or passes > _MOST_PASSES:
            break
        space = look.begun(metric, shared[:0] if done else shared, key)
        passes += 2 + 2 * space.size
        if not np.all(np.isfinite(space.images)):
            raise ValueError(
                "Tuning found no metric: the potential is not finite near the centre that was"
                " found. Give `metric=` variances, or reparametrise the model."
            )
        if start.is_rough or space.trace < ROUGH * curvatures.sum():
            # second derivatives say nothing of the directions
            start = start._replace(is_rough=True)
            break
        pairs = _far(space)
        for _ in range(_EXTENSIONS):
            if not len(pairs.residuals) or passes > _MOST_PASSES:
                break
            before = space.size
            space = look.extended(metric, space, pairs.residuals, key)
            passes += 2 * (space.size - before)
            pairs = _far(space)
        ends = pairs.ends
        is_round = 1 / _ROUND < ends[0] and ends[1] < _ROUND
        metric = _with_directions(metric, pairs.vectors, pairs.eigenvalues)
        had_walls, (metric, has_walls, looked) = has_walls, _narrowed(secants, metric, key)
        passes += looked
        if had_walls and has_walls:  # which have no curvature at the centre, and would come back
            break
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
    - **size** - the number of vectors that were looked at.
    - **trace** - an estimate of its trace.
    """

    basis: Array
    images: Array
    size: int
    trace: Array


class _Pairs(NamedTuple):
    """
    Eigenvectors with eigenvalues far from 1, as far as a space shows them.

    - **vectors**, **eigenvalues** - those with a small error, shapes (d, k) and (k,).
    - **residuals** - an orthonormal basis of the residuals of those with a large error, where
      residuals are not alike, shape (j, d).
    - **ends** - the ends of the spectrum.
    """

    vectors: np.ndarray
    eigenvalues: np.ndarray
    residuals: np.ndarray
    ends: tuple[float, float]


class _Look:
    """Products with the Hessian, by one program."""

    def __init__(self, target: Target, metric: LowRankMetric, shared: int) -> None:
        self.program = target.compiled(_looked)
        self.dimension, self.dtype = len(metric.center), metric.center.dtype
        self.products = min(_PRODUCTS, self.dimension)
        self.most = shared + self.products + _RESIDUALS * _EXTENSIONS
        self.given = max(shared + 1, _RESIDUALS)

    def begun(self, metric: LowRankMetric, directions: Array, key: Array) -> _Space:
        """The space of directions of the parameters, a random vector and its images."""
        zeros = jnp.zeros((self.most, self.dimension), self.dtype)
        given = jax.vmap(lambda x: metric.coordinates(metric.center + x))(directions)
        given = jnp.concatenate([given, random.normal(key, (1, self.dimension), self.dtype)])
        empty, products = _Space(zeros, zeros, 0, zeros[0, 0]), len(directions) + self.products
        return self._more(metric, empty, given, products, key)

    def extended(
        self, metric: LowRankMetric, space: _Space, vectors: np.ndarray, key: Array
    ) -> _Space:
        """A space with more vectors, and with images of the last of them."""
        return self._more(metric, space, vectors, _RESIDUALS, key)

    def _more(
        self, metric: LowRankMetric, space: _Space, given: Any, products: int, key: Array
    ) -> _Space:
        number = np.int32(len(given))
        given = jnp.pad(jnp.asarray(given, self.dtype), ((0, self.given - len(given)), (0, 0)))
        arrays = space.basis, space.images, np.int32(space.size), space.trace
        found = self.program(metric, *arrays, given, number, np.int32(products), key)
        return _Space(found[0], found[1], space.size + products, found[2])


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


def _settled(
    target: Target, descend: Callable, metric: LowRankMetric, rng_key: Array, most: int
) -> tuple[LowRankMetric, Array, int]:
    """
    The metric after descents, with corrected scales of the parameters of short sites. With the
    scales of before, the mean and the scale of many effects hardly move.

    :param most: the most descents.
    :return: the metric, the diagonal of the Hessian in its coordinates, and the number of descents.
    """
    zeros = target.unravel(jnp.zeros(target.model.dimension))
    is_short = ravel({k: jnp.full_like(x, x.size <= _FEW) for k, x in zeros.items()}) > 0
    for done in range(1, most + 1):
        found = descend(metric, random.fold_in(rng_key, done))
        metric = metric._replace(center=found.center)
        e = jnp.where(is_short & jnp.isfinite(found.curvatures), found.curvatures, 1.0)
        if done == most or bool(jnp.all((e > 1 / _FAR) & (e < _FAR))):
            break
        metric = metric._replace(scale=metric.scale * jnp.clip(e, _LEAST, 1 / _LEAST) ** -0.5)
    return metric, found.curvatures, done


def _narrowed(
    secants: Callable, metric: LowRankMetric, rng_key: Array
) -> tuple[LowRankMetric, bool, float]:
    """
    A metric whose wide directions end where the potential rises.

    At the centre the logarithm of a scale near zero has no curvature, and hardly any width is too
    large. The gradients of all rows at both ends :math:`\\pm v` of a direction show the curvature
    in between,

    .. math:: q = \\tfrac12 v \\cdot (\\nabla U(v) - \\nabla U(-v)) .

    While :math:`q > 2` it divides the width by :math:`q^{1/4}`, which ends a quartic potential at
    once.

    :param secants: the program of :func:`_secants`.
    :return: the metric, whether it has changed, and the passes over the data.
    """
    wide, passes = np.flatnonzero(np.asarray(metric.roots) > _WIDE), 0.0
    has_walls, most = False, _WIDE**8
    for _ in range(_NARROWINGS):
        if not wide.size:
            break
        order = jnp.asarray(np.pad(wide, (0, len(metric.roots) - wide.size)))
        q = np.asarray(secants(metric, order, np.int32(wide.size), rng_key), np.float64)
        q = np.nan_to_num(q, nan=most, posinf=most)[: wide.size]
        passes += 2.0 * wide.size
        wide, q = wide[q > _FAR], np.minimum(q[q > _FAR], most)
        has_walls |= bool(wide.size)
        roots = metric.roots.at[wide].divide(jnp.asarray(q**0.25, metric.roots.dtype))
        metric = metric._replace(roots=roots)
    return metric, has_walls, passes


def _secants(
    target: Target, metric: LowRankMetric, order: Array, count: Array, rng_key: Array
) -> Array:
    """The curvature between the ends of some directions of a metric, shape (k,)."""
    potential, plates = target.potential(IdentityMetric()), target.model.plates

    def at(x: Array) -> Array:
        def seen(rows: Rows) -> Array:
            slope = jax.grad(lambda point: potential(target.unravel(point), rows, rng_key))
            return slope(metric.values(x))

        return metric.pullback(target.mean(over_all_data(seen, plates)))

    def one(k: Array, found: Array) -> Array:
        v = metric.vectors[:, order[k]]
        return found.at[k].set(v @ (at(v) - at(-v)) / 2)

    return lax.fori_loop(0, count, one, jnp.zeros_like(metric.roots))


def _looked(
    target: Target,
    metric: LowRankMetric,
    basis: Array,
    images: Array,
    size: Array,
    trace: Array,
    given: Array,
    number: Array,
    products: Array,
    rng_key: Array,
) -> tuple[Array, Array, Array]:
    """
    Add given vectors to an orthonormal basis, and then images of the last vector.

    :param size: number of vectors in the basis so far.
    :param number: number of given vectors that count.
    :param products: number of vectors that are added.
    """
    model_key, sign_key = random.split(rng_key)
    product = hessian_product(target, metric, model_key)

    def one(k: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        basis, images = found
        j = k - size
        vector = jnp.where(j < number, given[jnp.minimum(j, len(given) - 1)], images[k - 1])
        length = jnp.linalg.norm(vector)
        for _ in range(2):
            vector = vector - basis.T @ (basis @ vector)
        left = jnp.linalg.norm(vector)
        # what is left of a vector in the space of those before is a rounding error
        vector = jnp.where(left > _FLAT**0.5 * length, vector / left, 0.0)
        return basis.at[k].set(vector), images.at[k].set(product(vector))

    def estimate() -> Array:
        signs = random.rademacher(sign_key, metric.scale.shape, metric.scale.dtype)
        return signs @ product(signs)

    trace = lax.cond(size == 0, estimate, lambda: trace)
    return *lax.fori_loop(size, size + products, one, (basis, images)), trace


def _far(space: _Space) -> _Pairs:
    """The eigenvectors whose eigenvalues are far from 1, by Rayleigh and Ritz."""
    basis, images = (np.asarray(x, np.float64) for x in space[:2])
    is_there = np.any(basis != 0, axis=1)
    basis, images = basis[is_there], images[is_there]
    matrix = basis @ images.T
    e, w = np.linalg.eigh((matrix + matrix.T) / 2)
    vectors = basis.T @ w
    residuals = images.T @ w - vectors * e
    left = np.sum(residuals**2, axis=0)
    floor = _FLAT * float(np.max(np.abs(e)))
    # by Kato and Temple, where other eigenvalues are about 1
    is_known = (left < _ERROR * np.abs(e) * np.abs(e - 1)) & (e > floor)
    is_far = (e > _FAR) | (e < 1 / _FAR)
    chosen, others = is_far & is_known, np.flatnonzero(is_far & ~is_known & (e > floor))
    farthest = others[np.argsort(-np.abs(np.log(e[others])))][:_RESIDUALS]
    # in the space of the images of one vector all residuals are parallel
    lengths = np.linalg.norm(residuals[:, farthest], axis=0)
    unlike = np.linalg.svd(residuals[:, farthest] / lengths, full_matrices=False)
    begin = unlike.U[:, unlike.S > _UNLIKE].T
    return _Pairs(vectors[:, chosen], e[chosen], begin, (float(e[0]), float(e[-1])))


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
