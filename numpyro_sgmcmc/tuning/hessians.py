# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Hessian of the potential of minibatches at draws of a Gaussian, with value and gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.posterior.coordinates import mixtures_of
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.potential import Rows
from numpyro_sgmcmc.posterior.target import Program, Target
from numpyro_sgmcmc.tuning.gauss_newton import (
    curvature_of_effects,
    effects_along,
    mean_prior,
    uses_gauss_newton,
    whitened_rows,
)

DRAWS = 8  #: draws of the Gaussian, in pairs of opposite sign
_FEWER_DRAWS = 4  #: the same where a Gauss-Newton matrix stands in for Hessians
_MORE_DRAWS = 32  #: the same where effects have local scales

#: The second derivatives of a rough potential are less than this part of those between draws.
ROUGH = 0.1


class _Look(NamedTuple):
    """The arguments of the program, as of :func:`evaluated`."""

    center: Any
    factor: Any
    reach: Any
    count: Any
    hessians: Any
    part: Any


def has_all_rows(target: Target) -> bool:
    """True if a minibatch has all rows, so that no search needs another program for these."""
    return target.minibatch_share == 1 and not target.model.drawn_plates


def draws_of(target: Target, is_gauss_newton: bool) -> int:
    """The number of draws of the Gaussian."""
    if mixtures_of(target.centring):
        return _MORE_DRAWS  # the prior's part of the Hessian varies from draw to draw
    return _FEWER_DRAWS if is_gauss_newton and not has_all_rows(target) else DRAWS


def evaluated(
    target: Target,
    rng_key: Array,
    is_rough: bool,
    is_gauss_newton: bool,
    center: Any,
    factor: np.ndarray,
    *,
    count: int,
    hessians: int,
    reach: float = 1.0,
    part: float = 1.0,
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """
    The mean potential of minibatches at draws of a Gaussian, its gradient :math:`L^\\top g` and
    its Hessian :math:`L^\\top H L`, and whether the potential looks rough. One program serves all
    arguments after the first four.

    :param target: the model with its data.
    :param rng_key: a random key, of rows and draws.
    :param bool is_rough: as for :func:`hessian_times`.
    :param bool is_gauss_newton: whether a Gauss-Newton matrix stands in for the Hessian of the
        rows.
    :param center: of the Gaussian, shape ``(d,)``.
    :param factor: :math:`L`, shape ``(d, d)``.
    :param int count: the number of minibatches.
    :param int hessians: the number of draws at which each of them has a Hessian.
    :param float reach: the distance of draws from the centre, in standard deviations of the
        Gaussian: 1, or 0.
    :param float part: how often each row counts.
    """
    dtype = target.model.dtype
    numbers = (np.asarray(x, dtype) for x in (center, factor, reach, part))
    center, factor, reach_, part_ = numbers
    look = _Look(center, factor, reach_, np.int32(count), np.int32(hessians), part_)
    program = _program(target, is_rough, is_gauss_newton)
    return jax.tree.map(np.asarray, program(rng_key, look))


def prepare_evaluated(target: Target) -> None:
    """Compiles the program of :func:`evaluated` beside what is done next."""
    dimension, dtype = target.model.dimension, target.model.dtype
    numbers = (np.zeros(shape, dtype) for shape in (dimension, (dimension, dimension), (), ()))
    center, factor, reach, part = numbers
    look = _Look(center, factor, reach, np.int32(0), np.int32(0), part)
    _program(target, False, uses_gauss_newton(target)).prepare(random.key(0), look)


def _program(target: Target, is_rough: bool, is_gauss_newton: bool) -> Program:
    facts = is_rough, is_gauss_newton
    return target.compiled(partial(_evaluated, *facts), "center", *facts)


def _evaluated(
    is_rough: bool, is_gauss_newton: bool, target: Target, rng_key: Array, look: _Look
) -> tuple[tuple[Array, Array, Array], Array]:
    potential, factor = _potential(target, rng_key), look.factor
    number = draws_of(target, is_gauss_newton)
    draws = normal_draws(rng_key, len(factor), factor.dtype, number)
    points = look.center + look.reach * draws @ factor.T

    def seen(rows: Any, k: Array) -> tuple[Array, Array, Array]:
        values, gradients = jax.vmap(jax.value_and_grad(potential), (0, None))(points, rows)

        def added(j: Array, total: Array) -> Array:
            # at one of the draws for each minibatch, and at all draws where these are few
            point = points[(j + look.hessians * k) % len(points)]
            return total + curvature(target, factor, point, rows, rng_key)

        hessian = lax.fori_loop(0, look.hessians, added, jnp.zeros_like(factor))
        return values.mean(), gradients, hessian / look.hessians

    curvature: Callable = partial(whitened_hessian, is_rough=is_rough)
    if is_gauss_newton:
        curvature = whitened_rows
    value, gradients, hessian = _mean(target, rng_key, look.count, seen, look.part)
    if is_gauss_newton:
        hessian = hessian + mean_prior(target, factor, points, gradients, rng_key)
    gradients = gradients @ factor
    return (value, gradients.mean(0), hessian), looks_rough(draws, gradients, hessian)


def _rows(
    target: Target, rng_key: Array, count: Array, k: Array, part: Any
) -> dict[str, DrawnRows]:
    """The ``k``-th of so many minibatches; in the mean each row counts once, or this part."""
    in_epochs = target._replace(scheme=SCHEMES["epochs"], strata={})
    drawn, found = in_epochs.rows(rng_key, k), {}
    for plate in target.model.plates:
        rows, n = drawn[plate.name], plate.subsample_size
        # of a sample each row counts once, too
        weight = part * jnp.minimum(1.0, count * n / float(plate.of or plate.size))
        weights = jnp.full(rows.numbers.shape, weight, target.model.dtype)
        if (counts := target.kinds[plate.name].counts(rows.numbers)) is not None:
            weights = weights * counts
        found[plate.name] = rows._replace(weights=weights)
    return found


def _potential(target: Target, rng_key: Array) -> Callable[[Array, Any], Array]:
    potential = target.potential(IdentityMetric())
    return lambda point, rows: potential(target.unravel(point), rows, rng_key)


def _mean(
    target: Target,
    rng_key: Array,
    count: Array,
    function: Callable[[Any, Array], Any],
    part: Any = 1.0,
) -> Any:
    """The mean of a function of a minibatch over a number of minibatches."""

    @jax.jit  # traced once, for shapes and for the loop
    def at(k: Array) -> Any:
        return function(_rows(target, rng_key, count, k, part), k)

    def added(k: Array, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, at(k))

    shapes = jax.eval_shape(at, 0)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total = lax.fori_loop(0, count, added, zeros)
    return target.mean(jax.tree.map(lambda x: x / count, total))


def energies_at(target: Target, rng_key: Array, points: Array, count: Array) -> Array:
    """The mean potential of minibatches at given points, shape (points,)."""
    potential = _potential(target, rng_key)

    def seen(rows: Any, _: Array) -> Array:
        return lax.map(lambda x: potential(x, rows), points)

    return _mean(target, rng_key, count, seen)


def normal_draws(rng_key: Array, dimension: int, dtype: Any, number: int = DRAWS) -> Array:
    """The draws :math:`\\zeta_s`, shape ``(8, d)`` or of another number."""
    half = random.normal(rng_key, (number // 2, dimension), dtype)
    return jnp.concatenate([half, -half])


def hessian_times(
    factor: Array, potential: Callable[[Array], Array], point: Array, is_rough: bool = False
) -> Array:
    """
    :math:`\\nabla^2 U(\\theta) L`, column by column, shape ``(d, d)``; of a rough potential, whose
    second derivatives say nothing of its shape, differences of gradients on the scale of the
    posterior,

    .. math:: \\nabla U(\\theta + \\tfrac12 L e_j) - \\nabla U(\\theta - \\tfrac12 L e_j) .
    """
    slope = jax.grad(potential)
    if is_rough:
        return jax.vmap(lambda v: slope(point + v / 2) - slope(point - v / 2), 1, 1)(factor)
    _, product = jax.linearize(slope, point)
    return jax.vmap(product, 1, 1)(factor)


def whitened_hessian(
    target: Target,
    factor: Array,
    point: Array,
    rows: Rows,
    rng_key: Array,
    is_rough: bool = False,
) -> Array:
    """
    :math:`L^\\top \\nabla^2 \\tilde U(\\theta) L` of a minibatch.

    :param target: the model with its data.
    :param factor: :math:`L`, shape ``(d, d)``.
    :param point: :math:`\\theta`, one flat vector.
    :param rows: the rows of the minibatch.
    :param rng_key: the key of the model.
    :param bool is_rough: as for :func:`hessian_times`.
    """
    # the rows' part is the quicker in effects, and their curvature is the same for all rows
    by_effects = not is_rough and bool(mixtures_of(target.centring))
    here = target.centred if by_effects else target

    def potential(x: Array) -> Array:
        return here.potential(IdentityMetric())(target.unravel(x), rows, rng_key)

    if not by_effects:
        return factor.T @ hessian_times(factor, potential, point, is_rough)
    effects, columns = effects_along(target, point, factor)
    found = columns.T @ hessian_times(columns, potential, effects)
    return found + curvature_of_effects(target, factor, point, jax.grad(potential)(effects))


def looks_rough(draws: Array, gradients: Array, hessian: Array) -> Array:
    """
    True if gradients change much more between draws than the Hessian says.

    Gradients of absolute values do. The mean :math:`\\mathrm{E} \\, \\zeta^\\top g(\\zeta)` is the
    trace of a right Hessian. Absolute values are summed, since entries of the diagonal may be
    large and negative far from a mode.

    :param draws: :math:`\\zeta_s`, shape ``(8, d)``.
    :param gradients: there, in the coordinates, shape ``(8, d)``.
    :param hessian: the mean Hessian in the coordinates, shape ``(d, d)``.
    """
    return jnp.abs(jnp.diagonal(hessian)).sum() < ROUGH * jnp.sum(draws * gradients) / len(draws)
