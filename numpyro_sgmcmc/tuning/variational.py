# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The centre of a posterior with very many parameters, by variational inference."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import optax

from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.posterior.coordinates import with_degree
from numpyro_sgmcmc.posterior.initial_values import initial_values, no_initial_values
from numpyro_sgmcmc.posterior.metric import DiagonalMetric, GaussianMetric, IdentityMetric
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.potential import Rows, over_all_data, ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.find_reparam import way_between
from numpyro_sgmcmc.tuning.gauss_newton import uses_gauss_newton
from numpyro_sgmcmc.tuning.gaussian import Gaussian, are_modes
from numpyro_sgmcmc.tuning.hessians import ROUGH, hessian_times

_STARTS = 3  #: starts of the search
_ADAM_STEPS = 1_000  #: steps of Adam
_FEWER_STEPS = 200  #: the same before effects move
_NEAR = 0.1  #: part of their first distance from their location at which effects are held
_LEARNING_RATE = 0.05  #: the first learning rate of Adam
_FIRST_SCALE = 0.01  #: the first scale of each coordinate

_DESCENTS = 2  #: descents, each in the scales that the one before has found
_STEPS = 400  #: steps of a descent
_RATES = 0.1, 0.01  #: the first and the last of its step sizes
_WIDER, _NARROWER = 16.0, 100.0  #: factors by which a descent changes a variance at most

_PROBES = 8  #: products with the Hessian of all rows that show its diagonal
_SURE = 4.0  #: standard errors at which an entry of the diagonal is as it was seen
_MINIBATCHES = 40  #: minibatches whose potential shows a barrier between two centres

_SHARE = 0.02  #: share of all rows that is enough for a step
_FEWEST = 16  #: the fewest rows or groups of a plate in a step


def find_center(target: Target, rng_key: Array, init_strategy: Callable) -> Gaussian:
    """
    Find the closest Gaussian with independent coordinates.

    It solves

    .. math::

        \\min_{c, s} \\; \\mathrm{E}_{\\theta \\sim N(c, s^2)} [U(\\theta)]
            - \\sum_j \\log s_j,

    on minibatches of 2 % of the rows at most. Three searches by 1,000 steps of Adam start at
    different points, because some models have poor local optima. In models with effects each begins
    by 200 steps that keep the effects near their location. Without these, an intercept and the
    means of columns begin with arbitrary shares of their sum, and keep them for long. If another
    search is about as good as the best one, with a barrier in between, the posterior has several
    modes. The best search goes on by two descents of 400 steps of the natural gradient
    (:func:`descended`). Eight products with the Hessian of all rows then correct the scales.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param init_strategy: initial values of the searches, a per-site initialization function.
    :raises ValueError: if the best search does not end at finite values.

    **References:**

    1. *Automatic Differentiation Variational Inference*, Alp Kucukelbir, Dustin Tran,
       Rajesh Ranganath, Andrew Gelman and David M. Blei (2017).
    """
    start_key, rows_key = random.split(rng_key)
    target = for_searches(target)
    keys, data = random.split(start_key, _STARTS), (target.args, target.kwargs)
    starts, are_finite = initial_values(target.model, keys, init_strategy, *data)
    if not are_finite:
        raise no_initial_values(target.model, keys, init_strategy, *data)

    def run(target: Target, starts: Values, rng_key: Array) -> tuple[Array, ...]:
        # with equal rows, so that the losses can be compared
        def one(start: Values) -> tuple[Array, Array]:
            if target.centring:
                start = _before_effects(target, start, random.fold_in(rng_key, _ADAM_STEPS + 1))
            return _by_adam(target, ravel(target.to_internal(start)), rng_key)

        def again(found: tuple[Array, Array], k: Array) -> tuple[tuple[Array, Array], Array]:
            metric = DiagonalMetric(*found)
            seen = descended(target, metric, random.fold_in(rng_key, k))
            narrower = jnp.clip(seen.curvatures, 1 / _WIDER, _NARROWER)
            return (seen.center, metric.scale * narrower**-0.5), seen.value

        centers, scales = target.for_each(one, starts)
        # on other minibatches than those of the searches
        fresh_key = random.fold_in(rng_key, _ADAM_STEPS)
        losses = _energies(target, fresh_key, centers, scales) - jnp.sum(jnp.log(scales), axis=-1)
        best = jnp.nanargmin(jnp.where(jnp.isfinite(losses), losses, jnp.nan))
        degrees = (0.0, 1.0) if target.centring else (0.0,)
        ways = [way_between(target, centers, best, degree) for degree in degrees]
        energies = _energies(target, rng_key, jnp.stack(ways))
        found = centers[best], scales[best]
        (center, scale), values = lax.scan(again, found, 1 + jnp.arange(_DESCENTS))
        return center, scale, values[-1], energies

    center, scale, value, energies = target.compiled(run)(starts, rows_key)
    if not all(np.all(np.isfinite(x)) for x in (center, scale, value)):
        raise ValueError(
            "Tuning found no centre: variational inference with independent coordinates did not"
            " converge (the potential is not finite). Start it near the posterior with"
            " `init_strategy=init_to_value(...)`, standardise the data, or give `step_size` and"
            " `friction` yourself."
        )
    steps = _ADAM_STEPS + (_FEWER_STEPS if target.centring else 0)
    minibatches = _STARTS * (steps + _MINIBATCHES) + _MINIBATCHES * np.asarray(energies).size
    passes = minibatches * target.minibatch_share + _DESCENTS * passes_of_descent(target)
    several = np.all([are_modes(way) for way in np.asarray(energies)], axis=0)
    curvatures = target.compiled(_curvatures)(DiagonalMetric(center, scale), rng_key)
    # differences of gradients have made them 1
    is_rough = bool(np.mean(curvatures) < ROUGH)
    if not is_rough:
        scale = scale * jnp.clip(curvatures, 1 / _WIDER, _NARROWER) ** -0.5
    return Gaussian(
        DiagonalMetric(center, scale),
        passes + 2 * _PROBES,
        multimodal=bool(several.any()),
        is_rough=is_rough,
        is_gauss_newton=uses_gauss_newton(target) and not is_rough,
    )


def for_searches(target: Target) -> Target:
    """The model whose minibatches have no more rows than a step of these searches needs."""
    forgets = target.known is not None and target.known.half_life is not None
    if target.strata or forgets:  # these need minibatches of the size that was asked for
        return target
    model = target.model.with_small_minibatches(_SHARE, _FEWEST)
    if model.plates == target.model.plates:
        return target
    return target._replace(model=model, scheme=SCHEMES["without_replacement"])


def _before_effects(target: Target, start: Values, rng_key: Array) -> Values:
    """Values after a search that does not move effects, with effects near their location."""
    zeros = {k: jnp.zeros_like(there[0]) for k, there in target.centring.items()}
    outer = target._replace(centring=with_degree(target.centring, 0.0))
    values = outer.to_internal(start)
    values |= {k: _NEAR * values[k] for k in zeros}
    moves = ravel({k: jnp.ones_like(x) for k, x in values.items()} | zeros)
    center, _ = _by_adam(outer, ravel(values), rng_key, _FEWER_STEPS, moves)
    return outer.from_internal(outer.unravel(center))


def _by_adam(
    target: Target, center: Array, rng_key: Array, steps: int = _ADAM_STEPS, moves: Any = 1.0
) -> tuple[Array, Array]:
    """
    Centre and scales after stochastic steps of Adam.

    :param moves: 1 for coordinates that move, 0 for others.
    """
    potential = target.potential(IdentityMetric())
    optimizer = optax.adam(optax.cosine_decay_schedule(_LEARNING_RATE, steps))

    def step(k: Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
        found, memory = state
        rows_key, draw_key, model_key = random.split(random.fold_in(rng_key, k), 3)
        rows, draw = target.rows(rows_key), random.normal(draw_key, center.shape, center.dtype)

        def loss(found: tuple[Array, Array]) -> Array:
            point = found[0] + moves * jnp.exp(found[1]) * draw
            return potential(target.unravel(point), rows, model_key) - jnp.sum(found[1])

        gradient = target.mean(jax.grad(loss)(found))
        gradient = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0.0), gradient)
        (change, widening), memory = optimizer.update(gradient, memory)
        return optax.apply_updates(found, (moves * change, widening)), memory

    begin = center, jnp.full_like(center, np.log(_FIRST_SCALE))
    (center, logs), _ = lax.fori_loop(0, steps, step, (begin, optimizer.init(begin)))
    return center, jnp.exp(logs)


class Descent(NamedTuple):
    """
    The means over the second half of a descent.

    - **center** - the centre, in units of the parameters, shape (d,).
    - **curvatures** - the diagonal of the Hessian in the coordinates of the metric, shape (d,).
    - **value** - the potential.
    """

    center: Array
    curvatures: Array
    value: Array


def descended(target: Target, metric: GaussianMetric, rng_key: Array) -> Descent:
    """
    Steps of the stochastic natural gradient of a Gaussian :math:`N(c, L L^\\top)`,

    .. math:: x \\leftarrow x - \\epsilon_k \\,
        \\tfrac12 \\left( g(x + \\zeta_k) + g(x - \\zeta_k) \\right) , \\qquad
        \\theta = c + L x,

    no entry of which is longer than 1. Gradients of minibatches have a control variate with its
    anchor at :math:`c`. The noise of plain minibatches spreads many effects, and makes their scale
    several times too large. The differences of the gradients show the diagonal of the mean Hessian,

    .. math:: \\mathrm{E} \\big[ \\zeta_j \\, \\tfrac12 (g_j(x + \\zeta) - g_j(x - \\zeta)) \\big] .

    :param target: the model with its data.
    :param metric: centre :math:`c` and factor :math:`L`.
    :param rng_key: a random key.

    **References:**

    1. *The Variational Gaussian Approximation Revisited*, Manfred Opper and
       Cedric Archambeau (2009).
    """
    anchor = None
    if _is_controlled(target):
        anchor = target.anchor(target.written(target.unravel(metric.center)).effects)
    potential, (first, last) = target.potential(metric, anchor), _RATES

    def at(x: Array, rows: Rows, key: Array) -> tuple[Array, Array]:
        value, gradient = potential.value_and_gradient(potential.values(x), rows, key)
        return value, potential.pullback(gradient)

    def step(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        x, *totals = state
        rows_key, draw_key, model_key = random.split(random.fold_in(rng_key, k), 3)
        rows, draw = target.rows(rows_key), random.normal(draw_key, x.shape, x.dtype)
        # one after the other, which compiles in half the time
        both = lax.map(lambda end: at(end, rows, model_key), jnp.stack([x + draw, x - draw]))
        (value, other_value), (gradient, other) = target.mean(both)
        rate = 1 / (1 / first + (1 / last - 1 / first) * k / _STEPS)
        x = x - jnp.clip(jnp.nan_to_num(rate * (gradient + other) / 2), -1.0, 1.0)
        seen = x, draw * (gradient - other) / 2, (value + other_value) / 2
        is_late = 2 * k >= _STEPS
        return x, *(t + jnp.where(is_late, s, 0.0) for t, s in zip(totals, seen, strict=True))

    zeros, zero = jnp.zeros_like(metric.center), jnp.zeros((), metric.center.dtype)
    _, *totals = lax.fori_loop(0, _STEPS, step, (zeros, zeros, zeros, zero))
    x, curvatures, value = (2 * total / _STEPS for total in totals)
    return Descent(metric.values(x), curvatures, value)


def passes_of_descent(target: Target) -> float:
    """The cost of a descent in passes over the data."""
    points = 2 * _STEPS * target.minibatch_share
    return 1 + 2 * points if _is_controlled(target) else points


def _is_controlled(target: Target) -> bool:
    """True if minibatches have noise, which a control variate takes out."""
    return any(target.factors.values())


def hessian_product(
    target: Target, metric: GaussianMetric, rng_key: Array
) -> Callable[[Array], Array]:
    r"""
    The function :math:`v \mapsto L^\top \nabla^2 U(c) L v`, with all rows.

    :param target: the model with its data.
    :param metric: centre :math:`c` and factor :math:`L`.
    :param rng_key: the key of the model.
    """
    potential, plates = target.potential(IdentityMetric()), target.model.plates

    def product(vector: Array) -> Array:
        def seen(rows: Rows) -> Array:
            def at(point: Array) -> Array:
                return potential(target.unravel(point), rows, rng_key)

            return hessian_times(metric.direction(vector)[:, None], at, metric.center)[:, 0]

        return metric.pullback(target.mean(over_all_data(seen, plates)))

    return product


def _curvatures(target: Target, metric: DiagonalMetric, rng_key: Array) -> Array:
    r"""
    The diagonal of the Hessian in the coordinates of a metric, :math:`\mathrm{E}[v \odot A v]`
    with random signs :math:`v`. Entries whose distance from 1 may be the random error of few signs
    are shrunk towards 1.
    """
    product = hessian_product(target, metric, rng_key)
    shape, dtype = (_PROBES, *metric.center.shape), metric.center.dtype
    signs = random.rademacher(random.fold_in(rng_key, 1), shape, dtype)
    seen = lax.map(lambda v: v * product(v), signs)
    away, variance = seen.mean(0) - 1, seen.var(0) / (_PROBES - 1)
    # of eight signs the error itself is not known well
    error = jnp.maximum(variance, jnp.median(variance))
    is_far = away**2 > _SURE**2 * error
    spread = jnp.maximum(jnp.mean(away**2 - error, where=~is_far), 0.0)
    known = spread / jnp.maximum(spread + error, jnp.finfo(dtype).tiny)
    return 1 + jnp.where(is_far, 1.0, known) * away


def _energies(target: Target, rng_key: Array, points: Array, scales: Any = 0.0) -> Array:
    """
    The potential at some points, by the same minibatches and draws.

    :param points: shape (..., d).
    :param scales: of the normal draws around each point, of the same shape.
    """
    potential, at = target.potential(IdentityMetric()), points.reshape(-1, points.shape[-1])
    spread = jnp.broadcast_to(scales, points.shape).reshape(at.shape)

    def seen(k: Array) -> Array:
        rows_key, draw_key = random.split(random.fold_in(rng_key, k))
        rows, draw = target.rows(rows_key), random.normal(draw_key, at.shape[1:], at.dtype)
        return lax.map(lambda x: potential(target.unravel(x), rows, rng_key), at + spread * draw)

    values = lax.map(seen, jnp.arange(_MINIBATCHES)).mean(0)
    return target.mean(values).reshape(points.shape[:-1])
