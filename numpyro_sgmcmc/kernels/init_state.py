# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The states of the chains before their first step, of one chain or of several at once."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from numpyro.util import is_prng_key

from numpyro_sgmcmc.data.converters import given_key
from numpyro_sgmcmc.data.growing import row_count_of
from numpyro_sgmcmc.data.sharding import found_shards
from numpyro_sgmcmc.kernels.chains import axes_for, check_chains, placed, with_chains
from numpyro_sgmcmc.kernels.ensemble_start import members_for, members_tuning, with_metrics
from numpyro_sgmcmc.kernels.growth import check_growth
from numpyro_sgmcmc.kernels.replicas import check_replicas
from numpyro_sgmcmc.kernels.self_tuning import fixed_for, tuning_for
from numpyro_sgmcmc.kernels.settings import check_schedule
from numpyro_sgmcmc.kernels.state import ChainConstants, RowProgress, SGMCMCState
from numpyro_sgmcmc.kernels.transition import start, with_replicas
from numpyro_sgmcmc.posterior.checks.arguments import as_arrays
from numpyro_sgmcmc.posterior.initial_values import (
    check_initial_values,
    draw_from,
    initial_values,
    no_initial_values,
)
from numpyro_sgmcmc.posterior.metric import DiagonalMetric, IdentityMetric
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.tuning import Tuning

if TYPE_CHECKING:
    from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel


#: The counter of the steps, when it is full, goes on from beyond this.
_MOST_WARMUP_STEPS = 2**29


def initialised(
    method: "SGMCMCKernel",
    args: tuple,
    kwargs: dict,
    rng_key: Array,
    num_warmup: int,
    init_params: Values | None,
) -> SGMCMCState:
    """
    Reads the model, tunes the kernel if it is to be tuned, and gives the states of the chains.

    :raises ValueError: if the method, the model, the data and the chains do not go together.
    """
    rng_key = given_key(rng_key, chains=None)
    given, context = method.given, method.context
    growing = args, kwargs
    args, kwargs = context.trimmed(method.given.model, args, kwargs)
    # chains that are traced all at once are not to trace the tuning too
    traced = isinstance(rng_key, jax.core.Tracer)
    if (shards := found_shards(given.mesh, args, kwargs)) is not None:
        check_chains(shards, 1 if is_prng_key(rng_key) else rng_key.shape[0], traced)
    context.read(method, args, kwargs)
    method.monitor.begin(num_warmup)
    target = context.target(given, args, kwargs)
    with jax.ensure_compile_time_eval() if traced else nullcontext():
        context.check_rows(target)
    method.check(target, num_warmup)
    check_replicas(method, target)
    metric: IdentityMetric | DiagonalMetric = IdentityMetric()
    if given.start is not None and init_params is None:
        init_params, metric = members_for(method, target, rng_key)
    elif given.start is not None and given.metric is not None:
        raise ValueError(
            "metric='diagonal' with start='ensemble' is found in the descents, and there are none"
            " with `init_params`: leave out either of them."
        )
    with jax.ensure_compile_time_eval() if traced else nullcontext():
        if given.start is not None and init_params is not None:
            single = is_prng_key(rng_key)
            tuning = members_tuning(method, target, init_params, metric, single)
        else:
            tuning = tuning_for(method, target)
        context.tuning = tuning
        _check_schedule(given.step_size, num_warmup * method.steps_per_sample)
        fixed = fixed_for(method, target, tuning, method.steps_per_sample, num_warmup)
    context.known |= {tuning.data}
    if (known := row_count_of(growing)) is not None:
        check_growth(context.kernel, target.tuned(tuning), given, *growing)
        dtype = target.model.dtype
        nothing, worth = jnp.zeros(target.model.dimension, dtype), known.rows.astype(dtype)
        # the tuning forgets nothing: the first sample then begins with what each row counts
        digest = known.digest if known.half_life is None else jnp.zeros_like(known.digest)
        fixed = fixed._replace(known=RowProgress(known.rows, digest, known.rows, nothing, worth))
    method.check(target, num_warmup, fixed)
    own = with_metrics(fixed, metric)
    state = initial_state(method, args, kwargs, rng_key, own, tuning, init_params)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
        method.check(target, num_warmup, fixed, state)
    return state


def _check_schedule(step_size: Any, warmup_steps: int) -> None:
    """
    :raises ValueError: if there are too many steps, or a schedule fails before the first sample.
    """
    if warmup_steps >= _MOST_WARMUP_STEPS:
        raise ValueError(
            f"The warm-up has {warmup_steps:,} steps, of which there can be"
            f" {_MOST_WARMUP_STEPS:,}: reduce `num_warmup` or `steps_per_sample`."
        )
    if callable(step_size):
        check_schedule(step_size, warmup_steps + 1)


def initial_state(
    method: "SGMCMCKernel",
    args: tuple,
    kwargs: dict,
    rng_key: Array,
    fixed: ChainConstants,
    tuning: Tuning,
    init_params: Values | None,
) -> SGMCMCState:
    """
    The state of one chain or, for a batch of keys, of several.

    :param fixed: what was decided before the chains start.
    :param tuning: says where they start, if the user does not.
    :param init_params: unconstrained values of the latent sites from the user, or None.
    :raises ValueError: if there is no place where a chain can start.
    """
    given, context, several = method.given, method.context, not is_prng_key(rng_key)
    whole = context.whole(given, args, kwargs)

    def of_chains(function: Callable, **axes: Any) -> Callable:
        return jax.vmap(function, **axes) if several else function

    if init_params is not None:
        z = as_arrays(init_params)

        def potential(target: Target, z: Values) -> Array:
            where = target.model.first_rows(), random.key(0), target.args, target.kwargs
            return of_chains(lambda z: target.model.potential(z, *where))(z)

        program = context.compiled("potential", potential, whole, several)
        check_initial_values(whole.model, z, rng_key.shape[0] if several else None, program)
    elif tuning.start is None:
        keys = of_chains(lambda key: random.split(key, 3)[0])(rng_key)
        z = _found_values(method, whole, keys)
    else:
        z = None  # a draw of the Gaussian, in the program that follows

    def begin(
        target: Target, keys: Array, z: Values | None, fixed: ChainConstants, gaussian: Any
    ) -> SGMCMCState:
        start_key, *others = of_chains(lambda key: tuple(random.split(key, 3)))(keys)
        if z is None:
            z = draw_from(gaussian, target.tuned(fixed), given.temperature, start_key)
        # Values of a prior, say, may have a weak dtype; in a loop it must not change.
        z = jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), z)
        axes = axes_for(given.refresh_every)
        own = several and jnp.ndim(fixed.step_size) > 0
        if own:
            axes = with_chains(0, 0, 0)

        def one(z: Values, fixed: ChainConstants, *keys: Array) -> SGMCMCState:
            return with_replicas(method, target, start(method, target, fixed, z, *keys))

        if not several:
            return one(z, fixed, *others)
        within = 0, 0 if own else None, *(0 for _ in others)
        return jax.vmap(one, within, axes)(z, fixed, *others)

    target = context.target(given, args, kwargs)
    # what is fixed is an argument of the program, and the layout is a part of it
    program = context.compiled("begin", begin, target, several, given.refresh_every is None)
    state = program(rng_key, z, fixed, tuning.start)
    return state if context.shards is None else placed(context.shards, state)


def _found_values(method: "SGMCMCKernel", target: Target, keys: Array) -> Values:
    """
    Where chains start that are not told to, for a key or for each of a batch of keys.

    :raises ValueError: if there is no such place.
    """
    strategy = method.given.init_strategy

    def find(target: Target, keys: Array) -> tuple[Values, Array]:
        return initial_values(target.model, keys, strategy, target.args, target.kwargs)

    z, finite = method.context.compiled("find", find, target)(keys)
    if not isinstance(finite, jax.core.Tracer) and not finite:
        raise no_initial_values(target.model, keys, strategy, target.args, target.kwargs)
    return z
