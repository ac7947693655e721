# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Steps of a chain and its replicas at higher temperatures, and exchanges between them."""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_sgmcmc.data.rows_on_disk import on_disk
from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.kernels.method import Method
from numpyro_sgmcmc.kernels.replicas import HotReplicas, Replicas
from numpyro_sgmcmc.kernels.state import SGMCMCState
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.potential import Rows, over_all_data, ravel
from numpyro_sgmcmc.posterior.target import Target

#: Numbers that are folded into the key of a chain. The steps of the chain split the key in three.
_EXCHANGE_KEY = 3
_FIRST_KEY = 4


def check_replicas(method: Method, name: str, target: Target) -> None:
    """
    Check that the method and the data can have replicas.

    :raises ValueError: if the method or the data rule out replicas.
    """
    if method.replicas is None:
        return
    if method.traits.metropolis_corrected:
        raise ValueError(
            f"{name} with `replicas` is not possible, because its Metropolis test is for a single"
            " temperature. Use CCAdL or SGHMC."
        )
    known = getattr(method, "noise_variance", None)
    if known is not None and not isinstance(known, str) and jnp.any(ravel(known) != 0):
        raise ValueError(
            f"{name} with `replicas` cannot use a given `noise_variance`, because the noise"
            " differs between temperatures. Use noise_variance='estimated'."
        )
    if target.shards is not None or target.known is not None:
        raise ValueError(
            "`replicas` cannot be used with rows that are spread over devices, or with a"
            " `GrowingRows`. Use arrays on one device."
        )
    if on_disk((target.args, target.kwargs)):
        raise ValueError(
            "`replicas` cannot be used with rows on disk, because each replica would read its own"
            " rows. Load the arrays into memory."
        )


def with_replicas(
    method: Method, state: SGMCMCState, begin: Callable[[Array, Array], SGMCMCState]
) -> SGMCMCState:
    """
    The state of one chain before its first step, with its replicas if it has some.

    :param begin: a function from two keys to the state of another chain at the same position.
    """
    if (replicas := method.replicas) is None:
        return state
    count = len(replicas.temperatures) - 1

    def one(rng_key: Array) -> SGMCMCState:
        keys = random.split(rng_key)
        nothing: Any = None
        return begin(*keys)._replace(fixed=nothing)

    states = jax.vmap(one)(keys_of(state.rng_key, count))
    none = jnp.zeros(count, state.step_size.dtype)
    return state._replace(replicas=HotReplicas(states, none))


def advance_with_replicas(
    advance: Callable, method: Method, target: Target, state: SGMCMCState
) -> SGMCMCState:
    """
    One sample of one chain and of its replicas.

    :param advance: a function that takes one sample of a chain without replicas, at a temperature.
    """
    target, hot = target.tuned(state.fixed), state.replicas
    assert hot is not None
    new = advance(method, target, state._replace(replicas=None))
    keys = keys_of(state.rng_key, len(hot.exchange_prob))

    def advanced(replica: SGMCMCState, rng_key: Array, temperature: Array) -> SGMCMCState:
        replica = replica._replace(i=state.i, rng_key=rng_key, fixed=state.fixed)
        moved = advance(method, target, replica, temperature)
        nothing: Any = None
        return moved._replace(fixed=nothing)

    temperatures = hot_temperatures(method.replicas, target.model.dtype)
    states = jax.vmap(advanced)(hot.states, keys, temperatures)
    return with_positions_exchanged(method, target, new, hot._replace(states=states))


def hot_temperatures(replicas: Replicas, dtype: Any) -> Array:
    """The temperatures of the replicas, :math:`T_2, \\dots, T_K`."""
    return jnp.asarray(replicas.temperatures[1:], dtype)


def keys_of(rng_key: Array, count: int) -> Array:
    """The random keys of the replicas, made from the key of the chain."""
    return jax.vmap(lambda k: random.fold_in(rng_key, k))(_FIRST_KEY + jnp.arange(count))


def with_positions_exchanged(method: Method, target: Target, state: Any, hot: HotReplicas) -> Any:
    """
    The state of a chain after an exchange with its replicas.

    :param state: the state of the chain, without replicas.
    :param hot: the states of its replicas.
    """
    replicas: Replicas = method.replicas
    key = random.fold_in(random.fold_in(state.rng_key, _EXCHANGE_KEY), state.i)
    rows_key, accept_key = random.split(key)
    z = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), state.z, hot.states.z)
    difference, variance, count = _potential_differences(target, z, replicas.minibatches, rows_key)
    cold = 1 / jnp.asarray(replicas.temperatures, difference.dtype) / method.temperature
    slope = cold[:-1] - cold[1:]
    probability = exchange_probability(slope * difference, slope**2 * variance, count)
    pairs = len(replicas.temperatures) - 1
    accepted = random.uniform(accept_key, (pairs,), probability.dtype) < probability
    # even and odd pairs take turns, so that no position is in two pairs
    turn = state.i // state.fixed.layout.steps_per_sample % 2
    accepted = accepted & (jnp.arange(pairs) % 2 == turn)
    order = jnp.arange(pairs + 1)
    step = jnp.concatenate([accepted.astype(order.dtype), jnp.zeros(1, order.dtype)])
    order = order + step - jnp.roll(step, 1)
    z = jax.tree.map(lambda x: x[order], z)
    states = hot.states._replace(z=jax.tree.map(lambda x: x[1:], z))
    first = jax.tree.map(lambda x: x[0], z)
    return state._replace(z=first, replicas=HotReplicas(states, probability))


def exchange_probability(difference: Array, variance: Array, count: Any) -> Array:
    """
    The probability of an exchange, :math:`\\min \\{1, \\exp(\\tilde\\Delta - u)\\}`.

    :param difference: :math:`\\tilde\\Delta`.
    :param variance: :math:`s^2`, the estimate of its variance.
    :param count: :math:`n`, the number of rows behind the estimate; infinite for the true variance.
    """
    penalty = (
        variance / 2
        + variance**2 / (4 * (count + 1))
        + variance**3 / (3 * (count + 1) * (count + 3))
    )
    ratio = difference - penalty
    return jnp.where(jnp.isnan(ratio), 0.0, jnp.exp(jnp.minimum(ratio, 0.0)))


def _potential_differences(
    target: Target, z: Values, minibatches: int, rng_key: Array
) -> tuple[Array, Array, float]:
    """
    Potential differences between neighbours of K positions, with variances and row count.

    Each difference is the potential at a position minus the potential at the next one. The variance
    is that of its error. The number of rows says how well the variance is known.

    :param z: unconstrained values, with a leading axis for the positions.
    """
    potential = target.potential(IdentityMetric())
    # rows of independent minibatches, whose spread gives the variance
    potential = target.potential(IdentityMetric())
    target = target._replace(scheme=SCHEMES["without_replacement"])
    factors = target.factors
    values = jax.vmap(lambda z: potential.values(ravel(target.to_internal(z))))(z)
    if target.strata or minibatches * target.largest_share >= 1:

        def of_chunk(rows: Rows) -> Array:
            return -jnp.diff(jax.vmap(lambda x: potential(x, rows, rng_key))(values))

        difference = over_all_data(of_chunk, target.model.plates)
        return difference, jnp.zeros_like(difference), math.inf

    def of_minibatch(total: Any, k: Array) -> tuple[Any, None]:
        own = random.fold_in(rng_key, k)
        rows = target.rows(own)
        energies, terms = jax.vmap(lambda x: potential.with_row_terms(x, rows, own))(values)
        difference, variance = -jnp.diff(energies), jnp.zeros(len(energies) - 1, energies.dtype)
        for name, term in terms.items():
            count, each = rows[name].size, -jnp.diff(term, axis=0)
            # variance of a sum of independent draws, with the factor of a finite population
            variance += factors[name] * count * jnp.var(each, axis=1, ddof=1)
        return jax.tree.map(jnp.add, total, (difference, variance)), None

    pairs = len(jax.tree.leaves(z)[0]) - 1
    none = jnp.zeros(pairs, target.model.dtype)
    (difference, variance), _ = lax.scan(of_minibatch, (none, none), jnp.arange(minibatches))
    rows = minibatches * min(plate.subsample_size for plate in target.model.plates)
    return difference / minibatches, variance / minibatches**2, rows
