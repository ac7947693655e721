# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
From one sample of a chain to the next: functions of a method, a target and a state.

The method is a kernel, of which nothing is used but its step and what it was given; all that is
known of the model and the data is in the target, all else in the state.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_sgmcmc.gradients.noise_estimate import gradient_oracle
from numpyro_sgmcmc.kernels.chains import axes_of, check_traced, layout_on, placed
from numpyro_sgmcmc.kernels.cyclical import is_for_samples, steps_for_samples
from numpyro_sgmcmc.kernels.growth import with_rows_so_far
from numpyro_sgmcmc.kernels.identity import data_digest
from numpyro_sgmcmc.kernels.replicas import (
    HotReplicas,
    hot_temperatures,
    keys_of,
    with_positions_exchanged,
)
from numpyro_sgmcmc.kernels.state import ChainConstants, Monitored, SGMCMCState
from numpyro_sgmcmc.posterior.control_variate import Anchor
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.potential import Potential, ravel
from numpyro_sgmcmc.posterior.prefetch import minibatch, nothing_prefetched
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.tempered import tempered
from numpyro_sgmcmc.stein import add_to_sums, batch_is_full, center_sums, close_batch, start_sums

if TYPE_CHECKING:
    from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel


#: Steps that are looked at ahead, and some more.
_ROOM = 2**16

#: Twice the kinetic energy is at most so much for each parameter, and so much more: that of tuned
#: steps is 1 for each in the mean, and beyond this in one of 1e8 steps at most, for any number of
#: parameters. The sooner a step that is too long is undone the shorter a chain stays where it is.
_HEAT, _ENERGY = 2.0, 40.0


def start(
    method: "SGMCMCKernel",
    target: Target,
    fixed: ChainConstants,
    z: Values,
    chain_key: Array,
    dynamics_key: Array,
) -> SGMCMCState:
    """
    The state of one chain before its first step.

    :param fixed: what was decided before the chains start.
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


def with_replicas(method: "SGMCMCKernel", target: Target, state: SGMCMCState) -> SGMCMCState:
    """The state of one chain before its first step, and of its replicas, where it has some."""
    if (replicas := method.given.replicas) is None:
        return state
    count = len(replicas.temperatures) - 1

    def one(rng_key: Array) -> SGMCMCState:
        keys = random.split(rng_key)
        nothing: Any = None
        return start(method, target, state.fixed, state.z, *keys)._replace(fixed=nothing)

    states = jax.vmap(one)(keys_of(state.rng_key, count))
    none = jnp.zeros(count, state.step_size.dtype)
    return state._replace(replicas=HotReplicas(states, none))


def sample(method: "SGMCMCKernel", target: Target, state: SGMCMCState) -> SGMCMCState:
    """One sample of one chain or, along a leading axis, of several."""
    several = jnp.ndim(state.i) > 0
    state = with_rows_so_far(target, _with_counter_in_range(state))
    if (passes := method.given.refresh_every) is not None:
        state = _with_anchor_moved(state, passes, target)
    axes = axes_of(state)
    one = _steps_of_a_sample if state.replicas is None else _advance_with_replicas
    advance = partial(one, method, target)
    state = (jax.vmap(advance, (axes,), axes) if several else advance)(state)
    # what goes through a condition is copied: no more than it needs
    stein = lax.cond(
        batch_is_full(state.monitor.stein),
        jax.vmap(close_batch) if several else close_batch,
        lambda sums: sums,
        state.monitor.stein,
    )
    return state._replace(monitor=state.monitor._replace(stein=stein))


def sample_on_devices(method: "SGMCMCKernel", target: Target, state: SGMCMCState) -> SGMCMCState:
    """One sample, on each of the devices that the data are spread over."""
    shards = target.shards
    assert shards is not None
    check_traced(shards, state, target.args, target.kwargs)
    specs = layout_on(shards, state)
    # not kept: what a step is depends on the layout
    program, data, _ = target.program(partial(sample, method), [specs], specs)
    return placed(shards, program(data, state))


def _with_counter_in_range(state: SGMCMCState) -> SGMCMCState:
    """
    The state with room for the steps of a sample in 32 bits: a counter that came to its end would
    draw the same rows and noise again.
    """
    i = state.i.ravel()[0]  # the same in all chains
    several = jnp.ndim(state.i) > 0

    def moved(counter: tuple[Array, Array]) -> tuple[Array, Array]:
        i, rng_key = counter
        next_key = jax.vmap(random.fold_in) if several else random.fold_in
        return i - 2**30, next_key(rng_key, i)

    is_last = i > 2**31 - _ROOM - state.fixed.layout.steps_per_sample
    i, rng_key = lax.cond(is_last, moved, lambda counter: counter, (state.i, state.rng_key))
    return state._replace(i=i, rng_key=rng_key)


def _with_anchor_moved(state: SGMCMCState, passes: float, target: Target) -> SGMCMCState:
    """The anchor moved to the position, if it is time to."""
    centring = state.fixed.centring

    def move(z: Values, centring: Any) -> Anchor:
        here = target._replace(centring=centring)
        return here.anchor(here.centred.to_internal(z))

    if jnp.ndim(state.i) > 0:
        move = jax.vmap(move, (0, axes_of(state).fixed.centring))
    steps = state.fixed.layout.steps_per_sample
    every = max(1, round(passes / (target.minibatch_share * steps)))
    i = state.i.ravel()[0]  # the same in all chains
    anchor = lax.cond(
        ((i // steps) % every == 0) & (i > 0),
        lambda z, _: move(z, centring),
        lambda _, anchor: anchor,
        state.z,
        state.fixed.anchor,
    )
    return state._replace(fixed=state.fixed._replace(anchor=anchor))


def _advance_with_replicas(
    method: "SGMCMCKernel", target: Target, state: SGMCMCState
) -> SGMCMCState:
    """One sample of one chain and of its replicas."""
    target, hot = target.tuned(state.fixed), state.replicas
    assert hot is not None
    new = _steps_of_a_sample(method, target, state._replace(replicas=None))
    keys = keys_of(state.rng_key, len(hot.exchange_prob))

    def advanced(replica: SGMCMCState, rng_key: Array, temperature: Array) -> SGMCMCState:
        replica = replica._replace(i=state.i, rng_key=rng_key, fixed=state.fixed)
        moved = _steps_of_a_sample(method, target, replica, temperature)
        nothing: Any = None
        return moved._replace(fixed=nothing)

    temperatures = hot_temperatures(method.given.replicas, target.model.dtype)
    states = jax.vmap(advanced)(hot.states, keys, temperatures)
    return with_positions_exchanged(method, target, new, hot._replace(states=states))


def _steps_of_a_sample(
    method: "SGMCMCKernel", target: Target, state: SGMCMCState, temperature: Array | None = None
) -> SGMCMCState:
    """The steps of one sample of one chain, on the position as one flat vector."""
    fixed, monitor = state.fixed, state.monitor
    target = target.tuned(fixed)
    flat, position, plain = flattened(target, state)
    potential, scale = tempered(plain, temperature)
    position = position / scale
    none = jnp.zeros_like(monitor.configurational_temperature)
    # what is the same for every step stays out of the loop
    nothing: Any = None
    state = state._replace(
        z=position, monitor=monitor._replace(configurational_temperature=none), fixed=nothing
    )
    before = state
    body = partial(one_step, method, target, potential, fixed, _has_its_data(target, fixed))
    steps = fixed.layout.steps_per_sample
    state = body(0, state) if steps == 1 else lax.fori_loop(0, steps, body, state)
    if method.traits.tested:
        state = _tested(method, target, fixed, before, state)
    stein = state.monitor.stein
    counted = (state.i > fixed.warmup_steps) & is_for_samples(method.given.step_size, state.i - 1)
    diverging = state.monitor.nonfinite_steps > monitor.nonfinite_steps
    stein = stein._replace(samples=stein.samples + counted)
    places = scale * before.z, scale * state.z
    moved = target.unravel(fixed.metric.moved(flat, *places))
    return state._replace(
        z=target.from_internal(moved),
        monitor=state.monitor._replace(diverging=diverging, stein=stein),
        fixed=fixed,
    )


def _tested(
    method: "SGMCMCKernel",
    target: Target,
    fixed: ChainConstants,
    before: SGMCMCState,
    after: SGMCMCState,
) -> SGMCMCState:
    """What the method makes of the steps of a sample, by the potential of all rows."""
    change = target.change(fixed.metric, before.z, after.z)
    is_whole = after.monitor.nonfinite_steps == before.monitor.nonfinite_steps
    noise_key = random.split(after.rng_key, 3)[1]
    # no step has this key
    key = random.fold_in(random.fold_in(noise_key, after.i), 1)
    return method.test(before, after, jnp.where(is_whole, change, jnp.inf), key)


def one_step(
    method: "SGMCMCKernel",
    target: Target,
    potential: Potential,
    fixed: ChainConstants,
    is_valid: Array | bool,
    _: Any,
    state: SGMCMCState,
) -> SGMCMCState:
    """
    One step, on the position as one flat vector; undone and counted if it is not finite, or its
    step size not positive.

    :param is_valid: whether there is a right step at all.
    :param state: without what is fixed, before and after.
    """
    monitor, i, given = state.monitor, state.i, method.given
    # the split is the same at each step, and compiled loops do it once
    rows_key, *keys = random.split(state.rng_key, 3)
    noise_key, model_key = (random.fold_in(key, i) for key in keys)
    rows, prefetched = minibatch(target, rows_key, i, state.prefetched)
    state = state._replace(prefetched=prefetched)
    gradient = gradient_oracle(target, potential, rows, model_key, fixed.layout.noise)
    step_size = _step_size(method, i, fixed).astype(state.step_size.dtype)
    before = state._replace(step_size=step_size, fixed=fixed)
    new, evaluation = method.step(before, gradient, noise_key)
    # The sum is not finite if any entry is not; squares could overflow before.
    finite = jnp.isfinite(sum(jnp.sum(x) for x in jax.tree.leaves((new.z, new.dynamics))))
    finite = finite & is_valid
    if given.step_size is None or given.tuning is not None:
        finite = finite & ((i < fixed.warmup_steps) | _energy_is_plausible(new, given.temperature))
    if callable(given.step_size):
        finite = finite & (step_size > 0)
    moved = (new.z, new.dynamics, evaluation.potential)
    stayed = (state.z, _momentum_flipped(state.dynamics), monitor.minibatch_potential)
    z, dynamics, minibatch_potential = jax.tree.map(
        lambda after, before: jnp.where(finite, after, before), moved, stayed
    )
    warmup = fixed.warmup_steps
    settled = (i >= warmup // 2) & (i < warmup)
    # the noise of minibatches that are not independent is correlated with the position, and
    # positions that are tested later have another law
    judged = target.scheme.independent and not method.traits.tested
    stein, share = add_to_sums(
        center_sums(monitor.stein, state.z, jnp.where(settled, i - warmup // 2 + 1, 0)),
        new.z if method.gradient_at_end(fixed.layout.integrator) else state.z,
        evaluation.gradient,
        finite & (i >= warmup) & is_for_samples(given.step_size, i) & judged,
        given.temperature,
        fixed.layout.sites,
        fixed.metric.direction,
        fixed.variances,
    )
    steps = steps_for_samples(given.step_size, fixed.layout.steps_per_sample)
    share = share / steps if judged else jnp.full_like(share, jnp.nan)
    stay = jnp.where(finite, 0, monitor.stay + 1)
    return state._replace(
        i=i + 1,
        z=z,
        dynamics=dynamics,
        step_size=step_size,
        monitor=Monitored(
            minibatch_potential=minibatch_potential,
            nonfinite_steps=monitor.nonfinite_steps + ~finite,
            stay=stay,
            longest_stay=jnp.maximum(monitor.longest_stay, stay),
            diverging=monitor.diverging,
            configurational_temperature=monitor.configurational_temperature + share,
            stein=stein,
        ),
    )


def _energy_is_plausible(state: SGMCMCState, temperature: float) -> Array | bool:
    """
    Whether a momentum is one that occurs. A step that is too long for a place far out, where the
    curvature is greater than anywhere that the tuning has looked, leads further and further away;
    undone, with the momentum reversed, it leads back.
    """
    momentum = getattr(state.dynamics, "momentum", None)
    if momentum is None:
        return True
    most = temperature * (_HEAT * momentum.shape[0] + _ENERGY)
    return jnp.sum(momentum**2) < most


def _has_its_data(target: Target, fixed: ChainConstants) -> Array | bool:
    """Whether the data are those of the anchor, if that can be known."""
    if fixed.known is not None:
        return True  # to which it has moved before the first step
    if fixed.anchor is None or (here := data_digest(target)) is None:
        return True
    return jnp.array_equal(fixed.data, here) | ~jnp.any(fixed.data)


def flattened(target: Target, state: SGMCMCState) -> tuple[Array, Array, Potential]:
    """The values of one chain as one vector, the position, and the potential there."""
    metric, flat = state.fixed.metric, ravel(target.to_internal(state.z))
    potential = target.potential(metric, state.fixed.anchor)
    return flat, metric.coordinates(flat), potential


def _step_size(method: "SGMCMCKernel", i: Array, fixed: ChainConstants) -> Array:
    given = method.given.step_size
    return jnp.asarray(given(i) if callable(given) else fixed.step_size)


def _momentum_flipped(dynamics: Any) -> Any:
    """With the momentum reversed: else a step that is undone would lead to the same place."""
    if "momentum" not in getattr(dynamics, "_fields", ()):
        return dynamics
    return dynamics._replace(momentum=-dynamics.momentum)
