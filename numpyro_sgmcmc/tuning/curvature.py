# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""How well a metric fits: where a posterior is the narrowest and the widest in its coordinates."""

from collections.abc import Callable
import math

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.metric import GaussianMetric, Metric
from numpyro_sgmcmc.posterior.potential import Potential, Rows, over_all_data
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian
from numpyro_sgmcmc.tuning.lanczos import lanczos

#: Products with the Hessian.
_PRODUCTS = 20

#: A direction so much wider than 1 is looked at again, on its own scale.
_WIDE = 1.5


def find_curvature(
    target: Target, rng_key: Array, gaussian: Gaussian, metric: Metric
) -> tuple[float, np.ndarray | None, float]:
    """
    The largest eigenvalue of the Hessian in the coordinates of a metric, and the direction in which
    the posterior is the widest, which chains explore the slowest: of that which made the Gaussian
    or, where none was made, by Lanczos's method with 20 products of the Hessian of all data at the
    centre, :math:`L^\\top \\nabla^2 U(c) L`. Its smallest eigenvalue :math:`e` is at most
    that which is found, so that the posterior is at least :math:`e^{-1/2}` wide; less where the
    gradients at both ends of this direction say so.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param gaussian: an approximation of the posterior.
    :param metric: the metric.
    :return: the eigenvalue; the direction, as long as the posterior is wide, or None if none is
        wider than it should be; and the cost in passes over the data.

    **References:**

    1. *Estimating the Largest Eigenvalue by the Power and Lanczos Algorithms with a Random
       Start*, Jacek Kuczynski and Henryk Wozniakowski (1992).
    """
    found = gaussian.metric
    if gaussian.curvature is not None:
        if metric is found:
            return gaussian.curvature, None, 0.0
        precision = _precision(found, metric)
        e, vectors = np.linalg.eigh(precision)
        return gaussian.curvature * float(e[-1]), _direction(float(e[0]), vectors[:, 0]), 0.0

    def of_all(target: Target, seen: Callable[[Potential, Rows], Array]) -> Array:
        potential = target.potential(metric)
        return target.mean(over_all_data(lambda rows: seen(potential, rows), target.model.plates))

    def gradient(potential: Potential, rows: Rows, x: Array) -> Array:
        return potential.pullback(jax.grad(potential)(potential.values(x), rows, random.key(0)))

    def run(target: Target, center: Array) -> tuple[Array, Array, Array]:
        point = metric.coordinates(center)

        def product(vector: Array) -> Array:
            def seen(potential: Potential, rows: Rows) -> Array:
                return jax.jvp(lambda x: gradient(potential, rows, x), (point,), (vector,))[1]

            return of_all(target, seen)

        start = random.normal(rng_key, point.shape, point.dtype)
        return lanczos(product, start, min(_PRODUCTS, len(point)))

    def ends(target: Target, center: Array, away: Array) -> Array:
        point = metric.coordinates(center)

        def at(x: Array) -> Array:
            return of_all(target, lambda potential, rows: gradient(potential, rows, x))

        slopes = lax.map(at, jnp.stack([point + away, point - away]))
        return (slopes[0] - slopes[1]) @ away / 2

    seen = target.compiled(run)(found.center)
    basis, diagonal, beside = (np.asarray(x, np.float64) for x in seen)
    # a multiplication by the Hessian counts as two gradients
    passes = 2.0 * len(diagonal)
    if not all(np.all(np.isfinite(x)) for x in (diagonal, beside)):
        return math.inf, None, passes
    last = np.flatnonzero(beside == 0)
    number = int(last[0]) + 1 if len(last) else len(diagonal)
    between = beside[: number - 1]
    e, w = np.linalg.eigh(np.diag(diagonal[:number]) + np.diag(between, 1) + np.diag(between, -1))
    widest = _direction(float(e[0]), basis[:number].T @ w[:, 0])
    if widest is not None:
        # twice of what it costs at most to go there: of a Gaussian it is 1
        away = jnp.asarray(widest, found.center.dtype)
        energy = float(target.compiled(ends)(found.center, away))
        passes += 2.0
        widest = widest / math.sqrt(max(energy, 1.0)) if math.isfinite(energy) else None
    return float(e[-1]), widest, passes


def _direction(eigenvalue: float, vector: np.ndarray) -> np.ndarray | None:
    """As long as the posterior is wide, if it is wider than in the mean over directions."""
    if not 0 < eigenvalue < _WIDE**-2:
        return None  # where nothing bends upwards the Hessian does not tell how wide it is
    return np.asarray(vector / math.sqrt(eigenvalue))


def _precision(gaussian: GaussianMetric, metric: Metric) -> np.ndarray:
    """The precision of the Gaussian in the coordinates of a metric."""

    def column(unit: Array) -> Array:
        return gaussian.coordinates(gaussian.center + metric.direction(unit))

    unit = jnp.eye(gaussian.center.shape[0], dtype=gaussian.center.dtype)
    root = np.asarray(jax.vmap(column)(unit), np.float64)
    return root @ root.T
