# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Chains that start at members of an ensemble, and their step size."""

from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer.initialization import init_to_uniform
from numpyro.util import is_prng_key

from numpyro_sgmcmc.gradients.noise_estimate import gradient_oracle
from numpyro_sgmcmc.kernels.identity import data_fingerprint
from numpyro_sgmcmc.kernels.method import Method
from numpyro_sgmcmc.kernels.runtime import Runtime
from numpyro_sgmcmc.kernels.self_tuning import constants_for
from numpyro_sgmcmc.kernels.state import ChainConstants
from numpyro_sgmcmc.kernels.transition import flattened, start
from numpyro_sgmcmc.posterior.checks.arguments import checked_arrays
from numpyro_sgmcmc.posterior.initial_values import initial_values, no_initial_values
from numpyro_sgmcmc.posterior.metric import DiagonalMetric, IdentityMetric
from numpyro_sgmcmc.posterior.model import Values, read_model
from numpyro_sgmcmc.posterior.potential import ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.ensemble import find_members
from numpyro_sgmcmc.tuning.tuning import Tuning

#: Radius around zero of the default initial values. With NumPyro's radius of 2 the units of a
#: network saturate.
_RADIUS = 0.3

_TRIED = 4  #: number of members at which step sizes are tried
_LEFT_OUT = 100  #: number of steps before the energy is measured
_LOOKED_AT = 50  #: number of steps at which the energy is measured

#: Step sizes from 1/4 downwards, each 2^(-1/2) of the one before.
_SIZES = 2.0 ** -np.arange(2, 16, 0.5)

#: Variance of the energy in a step for each parameter, without a metric and with one.
_ENERGY_VARIANCE = 0.1
_ENERGY_VARIANCE_WITH_METRIC = 5e-4

_FRICTION = 2.0  #: friction of members, if none is given
_STEPS_PER_SAMPLE = 100  #: steps of a sample of members, if no number is given


class ChainStarts(NamedTuple):
    """
    Initial values of chains, with their metrics.

    - **values** - unconstrained initial values, or None if the tuning gives them.
    - **metric** - the metric of each chain, with a leading axis if the values have one. It is the
      identity if chains have no metrics of their own.
    """

    values: Values | None
    metric: IdentityMetric | DiagonalMetric = IdentityMetric()


def chain_starts(
    method: Method,
    runtime: Runtime,
    target: Target,
    rng_key: Array,
    given: Values | None,
    bar: bool,
) -> ChainStarts:
    """
    Initial values for one key or a batch of keys: the given ones or members of an ensemble.

    :param bool bar: whether a progress bar is shown.
    :raises ValueError: if chains are traced, or no member ends at finite values.
    """
    ensemble = method.start
    if ensemble is None:
        return ChainStarts(given)
    if given is not None:
        if method.metric is not None:
            raise ValueError(
                "metric='diagonal' with start='ensemble' is tuned in the descents, and"
                " `init_params` replaces the descents. Leave out one of the two."
            )
        return ChainStarts(given)
    if isinstance(rng_key, jax.core.Tracer):
        raise ValueError(
            "start='ensemble' cannot be used with traced random keys, as of"
            " chain_method='parallel'. Use chain_method='vectorized' or 'sequential'."
        )
    single = is_prng_key(rng_key)
    keys = rng_key[None] if single else rng_key
    start_keys, rows_keys = (jax.vmap(lambda k, j=j: random.fold_in(k, j))(keys) for j in (1, 2))
    strategy = method.init_strategy
    if strategy is init_to_uniform:
        strategy = init_to_uniform(radius=_RADIUS)
    starts, finite = initial_values(target.model, start_keys, strategy, target.args, target.kwargs)
    if not finite:
        raise no_initial_values(target.model, start_keys, strategy, target.args, target.kwargs)
    held, compiled = _held_out(method, runtime), runtime.compiled
    with_curvature = method.metric is not None
    if with_curvature and target.largest_share >= 1:
        raise ValueError(
            "metric='diagonal' with start='ensemble' is tuned from the gradients of minibatches,"
            " but each minibatch here has all rows. Give the plate a smaller `subsample_size`, or"
            " leave out `metric`."
        )
    asked = held, with_curvature, method.progress_bar and bar
    members = find_members(target, starts, rows_keys, ensemble, compiled, *asked)
    metric: IdentityMetric | DiagonalMetric = IdentityMetric()
    if with_curvature:
        center, curvature = jax.vmap(ravel)(members.values), jax.vmap(ravel)(members.curvatures)
        flat = curvature <= 0
        metric = DiagonalMetric(center, jnp.where(flat, 1.0, jnp.where(flat, 1, curvature) ** -0.5))
    starts_of_chains = ChainStarts(members.values, metric)
    return jax.tree.map(lambda x: x[0], starts_of_chains) if single else starts_of_chains


def with_metrics(fixed: ChainConstants, metric: IdentityMetric | DiagonalMetric) -> ChainConstants:
    """The constants of the chains, one set for each chain if each has its own metric."""
    if isinstance(metric, IdentityMetric):
        return fixed
    if metric.scale.ndim > 1:
        chains = len(metric.scale)
        fixed = jax.tree.map(lambda x: jnp.broadcast_to(x, (chains, *jnp.shape(x))), fixed)
    return fixed._replace(metric=metric, variances=metric.scale**2)


def _held_out(method: Method, runtime: Runtime) -> Target | None:
    """
    The model with the held-out rows.

    :raises ValueError: if the model has no rows here, or other parameters than in the run.
    """
    ensemble, known = method.start, runtime.model
    assert ensemble is not None and known is not None
    if ensemble.held_out is None:
        return None
    args, kwargs = checked_arrays(method.model, ensemble.held_out, {})
    try:
        view = read_model(method.model, method.init_strategy, args, kwargs)
    except ValueError as error:
        raise ValueError(
            f"The model cannot be read with the arguments `held_out` of the ensemble: {error} If"
            " these have fewer rows than a minibatch, write `subsample_size=min(batch_size,"
            " len(y))`."
        ) from error
    here, there = ({name: x.shape for name, x in model.latents.items()} for model in (view, known))
    if here != there:
        raise ValueError(
            f"The model has the parameters {here} with the arguments `held_out` of the ensemble,"
            f" but {there} with the arguments of the run. Give held-out rows with the same"
            " columns."
        )
    if not view.plates:
        raise ValueError(
            "No plate of the model has a `subsample_size` with the arguments `held_out` of the"
            " ensemble, so that its rows are unknown. Give the plate of the rows a"
            " `subsample_size`."
        )
    return Target(view, args, kwargs)


def members_tuning(
    method: Method, runtime: Runtime, target: Target, starts: ChainStarts, single: bool
) -> Tuning:
    """
    Step size and friction for chains that start at members, in the coordinates of each.

    The step size is the largest one at which the variance of the energy in a step, for each
    parameter, is no more than that of the ensemble.

    :raises ValueError: if the method does not know its energy, or no step size is small enough.
    """
    ensemble, data, latest = method.start, data_fingerprint(target), runtime.tuning
    if latest is not None and latest.data == data:
        return latest
    friction = getattr(method, "friction", None) or _FRICTION
    every = method.steps_per_sample or _STEPS_PER_SAMPLE
    first = method.first_step_size or float(_SIZES[0])
    tuning = Tuning(first, friction, IdentityMetric(), steps_per_sample=every, data=data or "")
    if method.step_size is not None:
        return tuning
    if not method.traits.has_energy_error:
        raise ValueError(
            f"{runtime.name} with start='ensemble' needs `step_size` and `friction`. Give both, or"
            " use SGMCLMC, which tunes them by the variance of its energy."
        )
    fixed = constants_for(method, target, tuning, 1, 0)
    members = jax.tree.map(lambda x: x[None] if single else x[:_TRIED], tuple(starts))

    def run(target: Target, fixed: ChainConstants, members: Any, sizes: Array) -> Array:
        def at(h: Array) -> Array:
            def one(member: tuple[Values, Any], key: Array) -> Array:
                z, metric = member
                own = with_metrics(fixed, metric)
                return _energy_variance(method, target, own, z, h, key)

            keys = random.split(random.key(0), len(jax.tree.leaves(members)[0]))
            return jnp.median(jax.vmap(one)(members, keys))

        return lax.map(at, sizes)

    program = runtime.compiled("energy", run, target)
    variances = np.asarray(program(fixed, members, jnp.asarray(_SIZES, target.model.dtype)))
    assert ensemble is not None
    usual = _ENERGY_VARIANCE if method.metric is None else _ENERGY_VARIANCE_WITH_METRIC
    most = ensemble.energy_variance or usual
    fine = np.flatnonzero(variances <= most)
    if not len(fine):
        raise ValueError(
            "The variance of the energy at the members of the ensemble is"
            f" {np.nanmin(variances):.3g} for each parameter even in a step of {_SIZES[-1]:.1g},"
            f" and may be at most {most:g}. Use larger minibatches, or give"
            " `start=Ensemble(energy_variance=...)` or `step_size`."
        )
    return tuning._replace(step_size=float(_SIZES[fine[0]]))


def _energy_variance(
    method: Method, target: Target, fixed: ChainConstants, z: Values, h: Array, key: Array
) -> Array:
    """The mean square change of the energy in a step on its minibatch, for each parameter."""
    keys = random.split(key, 3)
    state = start(method, target, fixed, z, keys[0], keys[1])
    _, position, potential = flattened(target, state)
    state = state._replace(z=position, step_size=h.astype(position.dtype))

    def step(k: Array, run: tuple[Any, Array]) -> tuple[Any, Array]:
        state, total = run
        rows, own = target.rows(keys[2], k), random.fold_in(keys[2], k)
        gradient = gradient_oracle(target, potential, rows, own, fixed.layout.noise)
        new, _ = method.step(state, gradient, own)

        def energy(state: Any) -> Array:
            value = target.mean(potential(potential.values(state.z), rows, own))
            return value + state.dynamics.kinetic_energy

        change = energy(new) - energy(state)
        return new, total + jnp.where(k >= _LEFT_OUT, change**2, 0.0)

    none = jnp.zeros((), position.dtype)
    _, total = lax.fori_loop(0, _LEFT_OUT + _LOOKED_AT, step, (state, none))
    return total / _LOOKED_AT / position.shape[0]
