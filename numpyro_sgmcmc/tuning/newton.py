# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Newton steps to the Gaussian :math:`N(c, L L^\\top)` that is closest to a posterior, which minimises

.. math:: f(c, L) = \\frac1S \\sum_s U(c + L \\zeta_s) - \\log |\\det L| .

With the mean gradient :math:`g` and the mean Hessian :math:`V \\operatorname{diag}(e) V^\\top` in
the coordinates of the current :math:`L`,

.. math::

    c \\leftarrow c - t \\, L V \\operatorname{diag}(1 / \\max(|e|, 0.04)) V^\\top g, \\qquad
    L \\leftarrow L V \\operatorname{diag}(\\max(e, -\\tfrac1{16} e, \\tfrac14)^{-t / 2}) V^\\top ,

shorter (:math:`t < 1`) where :math:`f` would rise, and no longer than the radius of a sphere that
holds the Gaussian, which grows fourfold with every advance, until every entry of :math:`e` is
within a factor of 2 of 1 and the step is shorter than 0.1 in each coordinate. Where the potential
curves downward the Gaussian doubles its width; if steeply, it is too wide for what it sees to be
true of its middle, and becomes narrower.

**References:**

1. *The Variational Gaussian Approximation Revisited*, Manfred Opper and Cedric Archambeau (2009).
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp
import numpy as np


class Fit(NamedTuple):
    """A Gaussian, what is to be minimised there, its error, gradient, and Hessian."""

    center: np.ndarray
    factor: np.ndarray
    objective: float
    error: float
    gradient: np.ndarray
    e: np.ndarray
    vectors: np.ndarray


def fit_of(center: np.ndarray, factor: np.ndarray, found: Any, dtype: Any) -> Fit | None:
    """
    A Gaussian with what a program has found there, or None if that is not finite.

    :param found: the mean potential, its gradient and its Hessian in the coordinates.
    """
    value, gradient, hessian = (np.asarray(x, np.float64) for x in found)
    if not all(np.all(np.isfinite(x)) for x in (value, gradient, hessian)):
        return None
    e, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    objective = float(value) - float(np.linalg.slogdet(factor)[1])
    # the potential of many rows is a sum with an error of its own
    error = 0.1 + 4 * float(jnp.finfo(dtype).eps) * abs(float(value))
    return Fit(center, factor, objective, error, gradient, e, vectors)


def closest_gaussian(
    fitted: Callable[[np.ndarray, np.ndarray], Fit | None],
    center: np.ndarray | Array,
    factor: np.ndarray | Array,
    steps: int,
    shortest: float = 0.1,
) -> Fit | None:
    """
    Newton steps until they are short, or until there have been so many.

    :param fitted: what is seen of a Gaussian with this centre and this factor.
    :param float shortest: the length of a step in each coordinate at which the search ends.
    :return: the last of those that were an advance, if any.
    """
    center, factor = np.asarray(center, np.float64), np.asarray(factor, np.float64)
    best, length, reach = None, 1.0, 1.0
    for _ in range(steps):
        found = fitted(center, factor)
        if found is not None and (best is None or found.objective <= best.objective + found.error):
            best, length, reach = found, min(1.0, 2 * length), 4 * reach
            if has_converged(best, shortest):
                # the last step is short: nothing can be wrong with it
                return best
        elif best is None:  # the draws reach too far
            factor = factor / 4
            continue
        elif reach > 1:
            reach /= 16
        else:
            length /= 4
        reach = max(1.0, min(reach, 4 * distance_of(best)))
        center, factor = moved(best, length, reach)
    return best


def has_converged(fit: Fit, shortest: float = 0.1) -> bool:
    """True if the Gaussian has about the right width and the next step is shorter than this."""
    return bool(np.max(np.abs(_newton_step(fit))) < shortest) and is_near(fit)


def is_near(fit: Fit) -> bool:
    """True if the Gaussian has about the right width."""
    return bool(np.all((fit.e > 0.5) & (fit.e < 2)))


def _newton_step(fit: Fit) -> np.ndarray:
    """In the coordinates of the fit."""
    return -fit.vectors @ ((fit.vectors.T @ fit.gradient) / np.clip(np.abs(fit.e), 0.04, None))


def distance_of(fit: Fit) -> float:
    """The length of the Newton step, in radii of a sphere that holds the Gaussian."""
    step = _newton_step(fit)
    return float(np.linalg.norm(step)) / (3 * math.sqrt(len(step)) + 3)


def moved(fit: Fit, length: float, reach: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """The centre and the factor after a part of the Newton step, of so many radii at most."""
    sizes = np.maximum(fit.e, -fit.e / 16)
    scale = np.maximum(sizes, 0.25) ** (-length / 2)
    step = length * min(1.0, reach / max(distance_of(fit), 1e-30)) * _newton_step(fit)
    return fit.center + fit.factor @ step, fit.factor @ ((fit.vectors * scale) @ fit.vectors.T)
