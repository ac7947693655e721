# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Anchors of control variates of second order, and whether one pays."""

from collections.abc import Callable
from functools import partial, reduce
import math

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_sgmcmc.posterior.control_variate import GRADIENTS, GRADIENTS_OF_A_STEP, Anchor
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.potential import Rows, over_all_data, ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gauss_newton import (
    has_distributions,
    uses_gauss_newton,
    whitened_gauss_newton,
    whitened_prior,
)
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel

DENSE_BY_DEFAULT = 2_000  #: the most parameters whose Hessian or metric is a full matrix

#: A step with a control variate of second order takes at most so many times as long as with one of
#: first order.
DEARER = 2.0

#: Independent draws within which a control variate of second order must save its passes.
_DRAWS = 4_000

#: Passes that a Gauss-Newton matrix of all rows and its comparison with the Hessian take.
_PASSES = 8.0

#: Largest difference of two products that are the same but for rounding errors, relative to the
#: root mean square of their entries.
_SAME = 5e-3

#: Numbers that are held for the rows of a chunk.
_NUMBERS = 2**20


def worth_of_expansion(
    target: Target, gradient: str, steps: Callable[[NoiseLevel], float], noise: NoiseLevel
) -> float:
    """
    The passes that a control variate of second order may cost.

    :param target: the model with its data.
    :param str gradient: one of :data:`~numpyro_sgmcmc.posterior.control_variate.GRADIENTS`, or
        ``"auto"``.
    :param steps: the number of steps between independent draws, for a level of noise.
    :param noise: the noise of the gradient with a control variate of first order.
    :return: infinity where it is asked for, and zero where there is none.
    :raises ValueError: if it is asked for, and there is none.
    """
    asked = gradient == GRADIENTS[2]
    dimension, drawn = target.model.dimension, target.model.drawn_plates
    if drawn or dimension > DENSE_BY_DEFAULT:
        if not asked:
            return 0.0
        reason = (
            f"integrals of plate '{drawn[0].name}' are drawn, whose second derivatives are noise"
            if drawn
            else f"the model has {dimension:,} parameters, and no more than {DENSE_BY_DEFAULT:,}"
            " are held as a matrix"
        )
        raise ValueError(
            f"gradient='{GRADIENTS[2]}' needs the Hessian of all data at the centre, but {reason}:"
            f" use gradient='{GRADIENTS[1]}'."
        )
    if asked or gradient != "auto":
        return math.inf if asked else 0.0
    # with given rates there are as many steps with any noise
    without = noise._replace(mean=0.0, largest=0.0)
    saved = steps(noise) - DEARER * steps(without)
    return _DRAWS * saved * GRADIENTS_OF_A_STEP[1] * target.minibatch_share


def expanded(target: Target, anchor: Anchor, worth: float) -> tuple[Anchor | None, float]:
    """
    The anchor with the Hessian of all rows, where it costs no more than it is worth.

    :param target: the model with its data.
    :param anchor: of first order.
    :param float worth: as of :func:`worth_of_expansion`.
    :return: the anchor or None, and the cost in passes.
    """
    cost, dimension = 0.0, target.model.dimension
    if worth > _PASSES and _is_quick(target):
        hessian, error = target.compiled(_by_gauss_newton)(anchor)
        cost += _PASSES
        if error < _SAME:
            return anchor._replace(hessian=hessian), cost
    if worth > 2 * dimension:
        further = target.compiled(partial(Target.anchor, order=2))(anchor.values)
        return further, cost + 2.0 * dimension
    return None, cost


def _is_quick(target: Target) -> bool:
    if target.shards is not None or not uses_gauss_newton(target):
        return False
    return all(has_distributions(target, plate) for plate in target.model.plates)


def _by_gauss_newton(target: Target, anchor: Anchor) -> tuple[Array, Array]:
    """The Gauss-Newton matrix of all rows, and how far it is from the Hessian."""
    here, point, key = target.centred, ravel(anchor.values), random.key(0)
    unit, potential = jnp.eye(len(point), dtype=point.dtype), here.potential(IdentityMetric())
    # a row takes as much memory as it has derivatives, and chunks are of fewer rows
    points = math.ceil(len(point) * 2**14 / _NUMBERS)
    plates = [plate._replace(points=points) for plate in target.model.plates]

    def matrix(rows: Rows) -> Array:
        each = (whitened_gauss_newton(here, x, unit, point, rows, key) for x in plates)
        return reduce(jnp.add, each)

    hessian = over_all_data(matrix, plates)
    hessian = hessian + whitened_prior(here, unit, point, ravel(anchor.gradient), key)
    hessian = (hessian + hessian.T) / 2
    scale = jnp.abs(jnp.diagonal(hessian)) ** -0.5
    vectors = scale * random.normal(key, (2, len(point)), point.dtype)

    def products(rows: Rows) -> Array:
        def slope(x: Array) -> Array:
            return ravel(jax.grad(potential)(here.unravel(x), rows, key))

        return lax.map(jax.linearize(slope, point)[1], vectors)

    right = scale * over_all_data(products, target.model.plates)
    off = scale * (vectors @ hessian) - right
    return hessian, jnp.max(jnp.abs(off)) / jnp.sqrt(jnp.mean(right**2))
