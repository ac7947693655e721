# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A Gaussian for thousands of parameters: variances, and the few directions that they miss."""

from typing import NamedTuple

from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.metric import (
    DenseMetric,
    DiagonalMetric,
    IdentityMetric,
    LowRankMetric,
)
from numpyro_sgmcmc.posterior.potential import Rows, full_data_gradient, over_all_data, ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import DRAWS, Gaussian, hessian_times, looks_rough, normal_draws
from numpyro_sgmcmc.tuning.lanczos import lanczos

_PRODUCTS = 40  #: products with the Hessian in a round
_ROUNDS = 8  #: the most rounds

_FAR = 1.5  #: factor beyond which an eigenvalue is far from 1
_RESIDUAL = 0.1  #: part of an eigenvalue that its vector may leave, for it to be known
_FLAT = 1e-6  #: part of the largest eigenvalue below which one is as good as none

#: What is added to the gradient, as a part of its length.
_AWAY = 1e-3

#: After two rounds no more are begun when they have cost so many times what the search before has.
_COST = 2.0

#: A step in each direction below which the search has come to its end, in standard deviations.
_NEAR = 0.1


def find_low_rank(target: Target, rng_key: Array, start: Gaussian) -> Gaussian:
    """
    A Gaussian whose precision is that of the posterior along the directions that belong to many
    parameters, and of independent coordinates else. With scales :math:`s` of the parameters, those
    of variational inference, and the Hessian :math:`A = S \\, \\nabla^2 U(c) \\, S` in these units,
    the eigenvectors :math:`V` of :math:`A` with eigenvalues :math:`e` far from 1 give

    .. math:: L = S \\, (I + V \\operatorname{diag}(e^{-1/2} - 1) V^\\top) .

    They are found by Lanczos's method, with 40 products :math:`A v` on all data, from the mean
    gradient :math:`g` at draws of the Gaussian, so that the same vectors give the Newton step
    :math:`-A^{-1} g` of the centre; and again from where it leads, until that is shorter than 0.1
    standard deviations in all directions, or until that has cost twice what the search before has.
    The intercept of crossed effects and the means of thousands of their groups, say, are known
    together much less than each for itself: two or three directions.

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
    found = start.metric
    if isinstance(found, DenseMetric):
        found = DiagonalMetric(found.center, jnp.sum(found.inverse**2, axis=0) ** -0.5)
    scale, products = found.scale, min(_PRODUCTS, len(found.center))

    def seen(target: Target, metric: LowRankMetric) -> tuple[Array, tuple[Array, ...]]:
        draw_key, away_key, model_key = random.split(rng_key, 3)
        potential, plates = target.potential(IdentityMetric()), target.model.plates

        def whole(point: Array) -> tuple[Array, Array]:
            values = target.unravel(point)
            value, gradient = full_data_gradient(potential, plates, values, model_key)
            return value, ravel(gradient)

        draws = normal_draws(draw_key, len(scale), scale.dtype)
        values, gradients = lax.map(lambda x: whole(metric.values(x)), draws)
        values, gradients = target.mean((values, scale * gradients))
        value, gradient = values.mean(), gradients.mean(0)

        def times_hessian(vector: Array) -> Array:
            def product(rows: Rows) -> Array:
                def at(point: Array) -> Array:
                    return potential(target.unravel(point), rows, model_key)

                return hessian_times((scale * vector)[:, None], at, metric.center)[:, 0]

            return scale * target.mean(over_all_data(product, plates))

        # a little of every direction, since a gradient may have nothing of one of them
        size = jnp.maximum(jnp.linalg.norm(gradient), jnp.finfo(gradient.dtype).tiny)
        away = random.normal(away_key, gradient.shape, gradient.dtype)
        begin = gradient + _AWAY * size * away / jnp.linalg.norm(away)
        # of a mean over draws, whose variance is that of one divided by the many parameters
        is_rough = looks_rough(draws, gradients, draws[0] @ times_hessian(draws[0]))
        return is_rough, (value, gradient, *lanczos(times_hessian, begin, products))

    looked, error = target.compiled(seen), float(jnp.finfo(scale.dtype).eps)
    best, passes, length = None, 0.0, 1.0
    # with as many columns as there may be directions: one program for all rounds
    vectors = jnp.zeros((len(scale), products), scale.dtype)
    metric = LowRankMetric(found.center, scale, vectors, jnp.ones(products, scale.dtype))
    for done in range(_ROUNDS):
        is_rough, seen_here = looked(metric)
        value, *krylov = (np.asarray(x, np.float64) for x in seen_here)
        passes += DRAWS + 2 * (products + 1)
        if best is None and (start.is_rough or is_rough):
            # second derivatives say nothing of the directions
            found = DiagonalMetric(found.center, scale)
            return start._replace(metric=found, passes=passes, curvature=None, is_rough=True)
        if np.isfinite(value) and all(np.all(np.isfinite(x)) for x in krylov):
            # up to a constant, since the scales stay
            objective = float(value) - float(jnp.sum(jnp.log(metric.roots)))
            if best is None or objective <= best.objective + 0.1 + 4 * error * abs(objective):
                best = _seen_at(metric, objective, *krylov)
                length = min(1.0, 2 * length)
                if best.has_converged or (done and passes > _COST * start.passes):
                    break
            else:
                length /= 4
        elif best is None:
            raise ValueError(
                "Tuning found no metric: the potential is not finite near the centre that was"
                " found. Give `metric=` variances, or reparametrise the model."
            )
        else:
            length /= 4
        step = scale * jnp.asarray(length * best.step, scale.dtype)
        metric = best.metric._replace(center=best.metric.center + step)
    assert best is not None
    known = np.asarray(best.metric.roots) != 1
    narrowed = best.metric._replace(
        vectors=best.metric.vectors[:, known], roots=best.metric.roots[known]
    )
    return start._replace(
        metric=narrowed if known.any() else DiagonalMetric(narrowed.center, scale),
        passes=passes,
        curvature=None,
        converged=best.has_converged,
    )


class _Best(NamedTuple):
    """A metric, what is to be minimised there, and the step in units of the scales."""

    metric: LowRankMetric
    objective: float
    step: np.ndarray
    has_converged: bool


def _seen_at(
    metric: LowRankMetric,
    objective: float,
    gradient: np.ndarray,
    basis: np.ndarray,
    diagonal: np.ndarray,
    beside: np.ndarray,
) -> _Best:
    """With the directions that the Krylov space shows."""
    ends = np.flatnonzero(beside == 0)
    number = int(ends[0]) + 1 if len(ends) else len(diagonal)
    diagonal, between = diagonal[:number], beside[: number - 1]
    e, w = np.linalg.eigh(np.diag(diagonal) + np.diag(between, 1) + np.diag(between, -1))
    vectors = basis[:number].T @ w
    along = vectors.T @ gradient
    floor = _FLAT * float(np.max(np.abs(e)))
    sizes = np.maximum(np.abs(e), floor)
    is_known = beside[number - 1] * np.abs(w[-1]) < _RESIDUAL * sizes
    is_far = ((e > _FAR) | (e < 1 / _FAR)) & (e > floor) & is_known
    columns, roots = np.zeros(metric.vectors.shape), np.ones(metric.roots.shape)
    columns[:, :number][:, is_far] = vectors[:, is_far]
    roots[:number][is_far] = e[is_far] ** -0.5
    found = metric._replace(
        vectors=jnp.asarray(columns, metric.scale.dtype),
        roots=jnp.asarray(roots, metric.scale.dtype),
    )
    is_near = np.all(np.abs(along) / np.sqrt(sizes) < _NEAR) and np.all(e > 0)
    return _Best(found, objective, -vectors @ (along / sizes), bool(is_near))
