# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The states of chains before their first step, for one chain or several at once."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from numpyro.util import is_prng_key

from numpyro_sgmcmc.data.converters import given_key
from numpyro_sgmcmc.data.sharding import found_shards
from numpyro_sgmcmc.kernels.chains import axes_for, check_chains, placed, with_chains
from numpyro_sgmcmc.kernels.ensemble_start import chain_starts, members_tuning, with_metrics
from numpyro_sgmcmc.kernels.exchange import check_replicas, with_replicas
from numpyro_sgmcmc.kernels.growth import with_row_progress
from numpyro_sgmcmc.kernels.kept_tuning import kept_for
from numpyro_sgmcmc.kernels.method import Begun, Method
from numpyro_sgmcmc.kernels.runtime import Runtime
from numpyro_sgmcmc.kernels.self_tuning import constants_for, tuning_for
from numpyro_sgmcmc.kernels.settings import check_schedule
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState
from numpyro_sgmcmc.kernels.transition import start
from numpyro_sgmcmc.posterior.checks.arguments import as_arrays
from numpyro_sgmcmc.posterior.initial_values import (
    check_initial_values,
    draw_from,
    initial_values,
    no_initial_values,
)
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.tuning import Tuning

#: Bound on the warm-up: a full counter of steps goes on from a number above it.
_MOST_WARMUP_STEPS = 2**29


class Chains(NamedTuple):
    """
    The arguments of ``MCMC`` for the chains that begin.

    - **rng_key** - the random key of one chain, or a batch of keys.
    - **num_warmup** - number of samples of the warm-up.
    - **init_params** - unconstrained values of the latent sites from the user, or None.
    - **shows_bars** - whether progress bars are shown.
    """

    rng_key: Array
    num_warmup: int
    init_params: Values | None = None
    shows_bars: bool = False


def init_state(
    method: Method, runtime: Runtime, args: tuple, kwargs: dict, chains: Chains
) -> SGMCMCState:
    """
    Read the model, tune the kernel if needed, and return the states of the chains.

    :raises ValueError: if method, model, data and chains do not fit each other.
    """
    rng_key, num_warmup = given_key(chains.rng_key, chains=None), chains.num_warmup
    growing = args, kwargs
    args, kwargs = runtime.trimmed(method.model, args, kwargs)
    # the tuning must run now, even if the chains are being traced
    traced = isinstance(rng_key, jax.core.Tracer)
    at_once = jax.ensure_compile_time_eval if traced else nullcontext
    if (shards := found_shards(args, kwargs)) is not None:
        check_chains(shards, 1 if is_prng_key(rng_key) else rng_key.shape[0], traced)
    target = runtime.read(method, args, kwargs)
    with at_once():
        kept = kept_for(method, runtime, target)
        runtime.check_rows(target, kept.tuning)
    method.check(Begun(target, num_warmup))
    check_replicas(method, runtime.name, target)
    starts = chain_starts(method, runtime, target, rng_key, chains.init_params, chains.shows_bars)
    with at_once():
        if method.start is not None:
            tuning = members_tuning(method, runtime, target, starts, is_prng_key(rng_key))
        else:
            tuning = tuning_for(method, runtime, target, kept, chains.shows_bars)
        runtime.tuning = tuning
        steps = runtime.samples_every(method)
        _check_schedule(method.step_size, num_warmup * steps)
        fixed = constants_for(method, target, tuning, steps, num_warmup)
    runtime.known |= {tuning.data}
    fixed = with_row_progress(method, runtime.name, target.tuned(tuning), fixed, growing)
    method.check(Begun(target, num_warmup, fixed))
    own = with_metrics(fixed, starts.metric)
    state = _states(method, runtime, target, rng_key, own, tuning, starts.values)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
        method.check(Begun(target, num_warmup, fixed, state))
    return state


def _check_schedule(step_size: Any, warmup_steps: int) -> None:
    """
    Check the length of the warm-up and the step size schedule.

    :raises ValueError: if there are too many steps, or a schedule fails before the first sample.
    """
    if warmup_steps >= _MOST_WARMUP_STEPS:
        raise ValueError(
            f"The warm-up has {warmup_steps:,} steps, and must have fewer than"
            f" {_MOST_WARMUP_STEPS:,}. Reduce `num_warmup` or `steps_per_sample`."
        )
    if callable(step_size):
        check_schedule(step_size, warmup_steps + 1)


def _states(
    method: Method,
    runtime: Runtime,
    target: Target,
    rng_key: Array,
    fixed: ChainConstants,
    tuning: Tuning,
    init_params: Values | None,
) -> SGMCMCState:
    """
    The state of one chain or, for a batch of keys, of several.

    :param fixed: the constants of the chains.
    :param tuning: gives the initial values, if the user does not.
    :param init_params: unconstrained values of the latent sites from the user, or None.
    :raises ValueError: if there are no valid initial values.
    """
    several = not is_prng_key(rng_key)
    whole = runtime.whole(method, target.args, target.kwargs)

    def of_chains(function: Callable, **axes: Any) -> Callable:
        return jax.vmap(function, **axes) if several else function

    if init_params is not None:
        z = as_arrays(init_params)

        def potential(target: Target, z: Values) -> Array:
            where = target.model.first_rows(), random.key(0), target.args, target.kwargs
            return of_chains(lambda z: target.model.potential(z, *where))(z)

        program = runtime.compiled("potential", potential, whole, several)
        check_initial_values(whole.model, z, rng_key.shape[0] if several else None, program)
    elif tuning.start is None:
        keys = of_chains(lambda key: random.split(key, 3)[0])(rng_key)
        z = _found_values(method, runtime, whole, keys)
    else:
        z = None  # the program below draws it from the Gaussian

    def begin(
        target: Target, keys: Array, z: Values | None, fixed: ChainConstants, gaussian: Any
    ) -> SGMCMCState:
        start_key, *others = of_chains(lambda key: tuple(random.split(key, 3)))(keys)
        if z is None:
            z = draw_from(gaussian, target.tuned(fixed), method.temperature, start_key)
        # Values, of a prior for instance, may have a weak dtype, which must not change in a loop.
        z = jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), z)
        axes = axes_for(method.anchor_moves_every)
        own = several and jnp.ndim(fixed.step_size) > 0
        if own:
            axes = with_chains(0, 0, 0)

        def one(z: Values, fixed: ChainConstants, *keys: Array) -> SGMCMCState:
            begin = partial(start, method, target, fixed, z)
            return with_replicas(method, begin(*keys), begin)

        if not several:
            return one(z, fixed, *others)
        within = 0, 0 if own else None, *(0 for _ in others)
        return jax.vmap(one, within, axes)(z, fixed, *others)

    # the constants are arguments of the program, and the layout is a part of it
    program = runtime.compiled("begin", begin, target, several, method.anchor_moves_every is None)
    state = program(rng_key, z, fixed, tuning.start)
    return state if runtime.shards is None else placed(runtime.shards, state)


def _found_values(method: Method, runtime: Runtime, target: Target, keys: Array) -> Values:
    """
    Initial values from the strategy of the kernel, for one key or a batch of keys.

    :raises ValueError: if the density was finite at none of the values tried.
    """
    strategy = method.init_strategy

    def find(target: Target, keys: Array) -> tuple[Values, Array]:
        return initial_values(target.model, keys, strategy, target.args, target.kwargs)

    z, finite = runtime.compiled("find", find, target)(keys)
    if not isinstance(finite, jax.core.Tracer) and not finite:
        raise no_initial_values(target.model, keys, strategy, target.args, target.kwargs)
    return z
