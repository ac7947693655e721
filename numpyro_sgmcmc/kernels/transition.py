# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Functions from one sample of a chain to the next.

Their arguments are a method, a target and a state. The target has all facts of the model and the
data, and the state has everything else.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_sgmcmc.gradients.estimators import Evaluation
from numpyro_sgmcmc.gradients.noise_estimate import gradient_oracle
from numpyro_sgmcmc.kernels.chains import axes_of, check_traced, layout_on, placed
from numpyro_sgmcmc.kernels.cyclical import is_for_samples, steps_for_samples
from numpyro_sgmcmc.kernels.exchange import advance_with_replicas
from numpyro_sgmcmc.kernels.growth import with_rows_so_far
from numpyro_sgmcmc.kernels.identity import data_digest
from numpyro_sgmcmc.kernels.method import Method
from numpyro_sgmcmc.kernels.metropolis import tested
from numpyro_sgmcmc.kernels.moving_anchor import with_anchor_moved
from numpyro_sgmcmc.kernels.state import ChainConstants, Monitored, SGMCMCState
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.potential import Potential, ravel
from numpyro_sgmcmc.posterior.prefetch import minibatch, nothing_prefetched
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.tempered import tempered
from numpyro_sgmcmc.stein import add_to_sums, batch_is_full, center_sums, close_batch, start_sums
from numpyro_sgmcmc.tuning.tuning import Tuning

#: Steps kept free at the end of the counter: those whose rows are read ahead, and a reserve.
_ROOM = 2**16

#: Bound on twice the kinetic energy: ``_HEAT`` for each parameter plus ``_ENERGY``. Tuned steps
#: have a mean of 1 for each parameter, and at most one of 1e8 steps exceeds the bound. A chain
#: stays in place for less time if a step that is too long is undone soon.
_HEAT = 2.0
_ENERGY = 40.0


def start(
    method: Method,
    target: Target,
    fixed: ChainConstants,
    z: Values,
    chain_key: Array,
    dynamics_key: Array,
) -> SGMCMCState:
    """
    The state of one chain before its first step.

    :param fixed: the constants of the chains.
    :param z: unconstrained values of the latent sites.
    :param chain_key: random key of the chain.
    :param dynamics_key: random key of the first momentum.
    """
    flat, _ = ravel_pytree(target.tuned(fixed).to_internal(z))
    position = fixed.metric.coordinates(flat)
    count, zero = jnp.zeros((), jnp.int32), jnp.zeros((), flat.dtype)
    return SGMCMCState(
        i=count,
        z=z,
        dynamics=method.init_dynamics(dynamics_key, position, fixed),
        step_size=_step_size(method, count, fixed).astype(flat.dtype),
        monitor=Monitored(
            minibatch_potential=zero,
            nonfinite_steps=count,
            stay=count,
            longest_stay=count,
            diverging=jnp.zeros((), bool),
            configurational_temperature=zero,
            stein=start_sums(position, fixed.layout.sites),
        ),
        fixed=fixed,
        rng_key=chain_key,
        prefetched=nothing_prefetched(target),
    )


def sample(method: Method, target: Target, state: SGMCMCState) -> SGMCMCState:
    """One sample of one chain or, along a leading axis, of several."""
    several = jnp.ndim(state.i) > 0
    state = with_rows_so_far(target, _with_counter_in_range(state))
    if (passes := method.anchor_moves_every) is not None:
        state = with_anchor_moved(state, passes, target)
    axes = axes_of(state)
    one: Callable = _steps_of_a_sample
    if state.replicas is not None:
        one = partial(advance_with_replicas, _steps_of_a_sample)
    advance = partial(one, method, target)
    state = (jax.vmap(advance, (axes,), axes) if several else advance)(state)
    # a condition copies its operands, so they are kept small
    stein = lax.cond(
        batch_is_full(state.monitor.stein),
        jax.vmap(close_batch) if several else close_batch,
        lambda sums: sums,
        state.monitor.stein,
    )
    return state._replace(monitor=state.monitor._replace(stein=stein))


def sample_on_devices(method: Method, target: Target, state: SGMCMCState) -> SGMCMCState:
    """One sample, on each of the devices of the data."""
    shards = target.shards
    assert shards is not None
    check_traced(shards, state, target.args, target.kwargs)
    specs = layout_on(shards, state)
    # not cached, because a step depends on the layout
    program, data, _ = target.program(partial(sample, method), [specs], specs)
    return placed(shards, program(data, state))


def _with_counter_in_range(state: SGMCMCState) -> SGMCMCState:
    """
    The state with a counter that has room for the steps of a sample in 32 bits.

    A counter that overflowed would draw old rows and noise again.
    """
    i = state.i.ravel()[0]  # equal in all chains
    several = jnp.ndim(state.i) > 0

    def moved(counter: tuple[Array, Array]) -> tuple[Array, Array]:
        i, rng_key = counter
        next_key = jax.vmap(random.fold_in) if several else random.fold_in
        return i - 2**30, next_key(rng_key, i)

    is_last = i > 2**31 - _ROOM - state.fixed.layout.steps_per_sample
    i, rng_key = lax.cond(is_last, moved, lambda counter: counter, (state.i, state.rng_key))
    return state._replace(i=i, rng_key=rng_key)


def _steps_of_a_sample(
    method: Method, target: Target, state: SGMCMCState, temperature: Array | None = None
) -> SGMCMCState:
    """The steps of one sample of one chain, on the position as one flat vector."""
    fixed, monitor = state.fixed, state.monitor
    target = target.tuned(fixed)
    flat, position, plain = flattened(target, state)
    potential, scale = tempered(plain, temperature)
    position = position / scale
    none = jnp.zeros_like(monitor.configurational_temperature)
    # loop invariants stay out of the loop
    nothing: Any = None
    state = state._replace(
        z=position, monitor=monitor._replace(configurational_temperature=none), fixed=nothing
    )
    before = state
    body = partial(one_step, method, target, potential, fixed, _has_its_data(target, fixed))
    steps = fixed.layout.steps_per_sample
    state = body(0, state) if steps == 1 else lax.fori_loop(0, steps, body, state)
    if method.traits.metropolis_corrected:
        state = tested(method, target, fixed, before, state)
    stein = state.monitor.stein
    counted = (state.i > fixed.warmup_steps) & is_for_samples(method.step_size, state.i - 1)
    diverging = state.monitor.nonfinite_steps > monitor.nonfinite_steps
    stein = stein._replace(samples=stein.samples + counted)
    places = scale * before.z, scale * state.z
    moved = target.unravel(fixed.metric.moved(flat, *places))
    return state._replace(
        z=target.from_internal(moved),
        monitor=state.monitor._replace(diverging=diverging, stein=stein),
        fixed=fixed,
    )


def one_step(
    method: Method,
    target: Target,
    potential: Potential,
    fixed: ChainConstants,
    is_valid: Array | bool,
    number: Array | int,
    state: SGMCMCState,
) -> SGMCMCState:
    """
    One step, on the position as one flat vector.

    A step that is not finite, or whose step size is not positive, is undone and counted.

    :param is_valid: whether the data belong to the anchor of the chain.
    :param number: the number of the step in its sample.
    :param state: the state without its constants, before and after.
    """
    monitor, i = state.monitor, state.i
    # the split does not depend on the step, and compiled loops do it once
    rows_key, *keys = random.split(state.rng_key, 3)
    noise_key, model_key = (random.fold_in(key, i) for key in keys)
    rows, prefetched = minibatch(target, rows_key, i, state.prefetched)
    state = state._replace(prefetched=prefetched)
    gradient = gradient_oracle(target, potential, rows, model_key, fixed.layout.noise, number)
    step_size = _step_size(method, i, fixed).astype(state.step_size.dtype)
    before = state._replace(step_size=step_size, fixed=fixed)
    new, evaluation = method.step(before, gradient, noise_key)
    is_right = is_valid & _is_right(method, fixed, before, new)
    moved = (new.z, new.dynamics, evaluation.potential)
    stayed = (state.z, _momentum_flipped(state.dynamics), monitor.minibatch_potential)
    z, dynamics, minibatch_potential = jax.tree.map(
        lambda after, before: jnp.where(is_right, after, before), moved, stayed
    )
    watched = _watched(method, target, before, new, evaluation, is_right)
    return state._replace(
        i=i + 1,
        z=z,
        dynamics=dynamics,
        step_size=step_size,
        monitor=watched._replace(minibatch_potential=minibatch_potential),
    )


def _is_right(
    method: Method, fixed: ChainConstants, before: SGMCMCState, after: SGMCMCState
) -> Array | bool:
    """True if a step is finite, with a plausible momentum and a positive step size."""
    # The sum is finite only if all entries are. Squares could overflow earlier.
    finite = jnp.isfinite(sum(jnp.sum(x) for x in jax.tree.leaves((after.z, after.dynamics))))
    if method.step_size is None or isinstance(method.tuning, Tuning):
        is_warmup = before.i < fixed.warmup_steps
        finite = finite & (is_warmup | _energy_is_plausible(after, method.temperature))
    if callable(method.step_size):
        finite = finite & (before.step_size > 0)
    return finite


def _watched(
    method: Method,
    target: Target,
    before: SGMCMCState,
    after: SGMCMCState,
    evaluation: Evaluation,
    is_right: Array | bool,
) -> Monitored:
    """The monitor after a step, with the pair of position and gradient in the Stein matrix."""
    monitor, fixed, i = before.monitor, before.fixed, before.i
    warmup = fixed.warmup_steps
    settled = (i >= warmup // 2) & (i < warmup)
    # the noise of dependent minibatches is correlated with the position, and positions that are
    # tested later have another law
    judged = target.scheme.independent and not method.traits.metropolis_corrected
    stein, share = add_to_sums(
        center_sums(monitor.stein, before.z, jnp.where(settled, i - warmup // 2 + 1, 0)),
        after.z if method.gradient_at_end(fixed.layout.integrator) else before.z,
        evaluation.gradient,
        is_right & (i >= warmup) & is_for_samples(method.step_size, i) & judged,
        method.temperature,
        fixed.layout.sites,
        fixed.metric.direction,
        fixed.variances,
    )
    steps = steps_for_samples(method.step_size, fixed.layout.steps_per_sample)
    share = share / steps if judged else jnp.full_like(share, jnp.nan)
    stay = jnp.where(is_right, 0, monitor.stay + 1)
    return monitor._replace(
        nonfinite_steps=monitor.nonfinite_steps + ~jnp.asarray(is_right),
        stay=stay,
        longest_stay=jnp.maximum(monitor.longest_stay, stay),
        configurational_temperature=monitor.configurational_temperature + share,
        stein=stein,
    )


def _energy_is_plausible(state: SGMCMCState, temperature: float) -> Array | bool:
    """
    True if the kinetic energy has a plausible value.

    Far out the curvature may be greater than anywhere that the tuning has looked, and a step may be
    too long there. Such steps lead further and further away. An undone step with a reversed
    momentum leads back.
    """
    momentum = getattr(state.dynamics, "momentum", None)
    if momentum is None:
        return True
    most = temperature * (_HEAT * momentum.shape[0] + _ENERGY)
    return jnp.sum(momentum**2) < most


def _has_its_data(target: Target, fixed: ChainConstants) -> Array | bool:
    """True if the data belong to the anchor, or if this cannot be known."""
    if fixed.known is not None:
        return True  # the anchor has moved to these data before the first step
    if fixed.anchor is None or (here := data_digest(target)) is None:
        return True
    return jnp.array_equal(fixed.data, here) | ~jnp.any(fixed.data)


def flattened(target: Target, state: SGMCMCState) -> tuple[Array, Array, Potential]:
    """The values of one chain as one vector, its position, and the potential function."""
    metric, flat = state.fixed.metric, ravel(target.to_internal(state.z))
    potential = target.potential(metric, state.fixed.anchor)
    return flat, metric.coordinates(flat), potential


def _step_size(method: Method, i: Array, fixed: ChainConstants) -> Array:
    size = method.step_size
    return jnp.asarray(size(i) if callable(size) else fixed.step_size)


def _momentum_flipped(dynamics: Any) -> Any:
    """The dynamics with the momentum reversed, so that an undone step does not repeat itself."""
    if "momentum" not in getattr(dynamics, "_fields", ()):
        return dynamics
    return dynamics._replace(momentum=-dynamics.momentum)
