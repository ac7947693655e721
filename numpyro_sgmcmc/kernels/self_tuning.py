# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
How a kernel comes to what its arguments leave out: the phases of :mod:`numpyro_sgmcmc.tuning`
with its own step in the pilot. Functions of a method, a target and what was given.
"""

from collections.abc import Callable
from functools import partial
import math
from typing import TYPE_CHECKING, Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_sgmcmc.data.fingerprint import fingerprint_of
from numpyro_sgmcmc.kernels.chains import with_chains
from numpyro_sgmcmc.kernels.state import Fixed, Layout, SGMCMCState
from numpyro_sgmcmc.kernels.transition import sample, start
from numpyro_sgmcmc.stein import SteinSums
from numpyro_sgmcmc.target.initial_values import draw_from
from numpyro_sgmcmc.target.metric import IdentityMetric
from numpyro_sgmcmc.target.model import Values
from numpyro_sgmcmc.target.target import Target
from numpyro_sgmcmc.tuning.given import metric_for
from numpyro_sgmcmc.tuning.tuning import (
    PILOT_CHAINS,
    Choices,
    Tuning,
    find_tuning,
    tuning_bar,
    warn_of,
)

if TYPE_CHECKING:
    from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel

#: A sample of a method that needs very short steps is not to take forever.
_MOST_STEPS_PER_SAMPLE = 1_000


def fixed_for(
    method: "SGMCMCKernel", target: Target, tuning: Tuning, steps_per_sample: int, num_warmup: Any
) -> Fixed:
    """What a tuning decides for all steps of all chains."""
    latents = target.view.latents
    dtype = jnp.result_type(*(x.dtype for x in latents.values()))
    sites = tuple(math.prod(latents[name].shape) for name in sorted(latents))
    layout = Layout(steps_per_sample, sites, method.noise(target, tuning))
    return Fixed(
        step_size=jnp.asarray(tuning.step_size, dtype),
        friction=None if tuning.friction is None else jnp.asarray(tuning.friction, dtype),
        metric=tuning.metric,
        variances=tuning.metric.variances(jnp.zeros(target.view.dimension, dtype)),
        warmup_steps=jnp.asarray(num_warmup * steps_per_sample, jnp.int32),
        anchor=tuning.anchor,
        constants=method.constants(target),
        layout=layout,
    )


def tuning_for(method: "SGMCMCKernel", target: Target) -> Tuning:
    """The tuning that was given, that was found before for the same data, or a new one."""
    given, latest = method.given, method.tuning
    if given.tuning is not None:
        return _adopted(method, target, given.tuning)
    if (
        given.rates_are_given
        and not isinstance(given.metric, str)
        and given.gradient != "control_variate"
    ):
        step_size = given.first_step_size
        assert step_size is not None
        metric = metric_for(given.metric, target) or IdentityMetric()
        return Tuning(step_size, getattr(given, "friction", None), metric)
    data = known_data(method, target)
    if latest is not None and latest.data == data:
        return latest
    return found_tuning(method, target, random.key(0), data)


def known_data(method: "SGMCMCKernel", target: Target) -> str:
    """
    :raises ValueError: if the values of the data are not known.
    """
    data = fingerprint_of(target.args, target.kwargs)
    if data is None:
        raise ValueError(
            f"{type(method).__name__} cannot tune itself inside `jit` or `vmap` of its data."
            " Call `tune` before, and pass `tuning=`."
        )
    return data


def _adopted(method: "SGMCMCKernel", target: Target, tuning: Tuning) -> Tuning:
    """
    :raises ValueError: if the tuning is of another model or method.
    """
    size, metric, given = target.view.dimension, tuning.metric, method.given
    if not isinstance(metric, IdentityMetric) and len(metric.center) != size:
        raise ValueError(
            f"`tuning` was found for {len(metric.center)} unconstrained parameters, but this"
            f" model has {size}."
        )
    tuning = tuning._replace(
        step_size=given.first_step_size or tuning.step_size,
        friction=getattr(given, "friction", None) or tuning.friction,
    )
    if hasattr(given, "friction") and tuning.friction is None:
        raise ValueError(
            f"`tuning` has no friction, which {type(method).__name__} needs: call its own `tune`,"
            " or give `friction`."
        )
    if tuning.anchor is None:
        return tuning
    data = fingerprint_of(target.args, target.kwargs)
    if data is None or data != tuning.data:
        # any centre serves, with what these data say there
        anchor_at = method.context.compiled("anchor", Target.anchor, target)
        tuning = tuning._replace(anchor=anchor_at(tuning.anchor.values), data=data)
    return tuning


def found_tuning(method: "SGMCMCKernel", target: Target, rng_key: Array, data: str) -> Tuning:
    """
    Runs the phases of the tuning behind a progress bar.

    :param data: tells the data from others.
    """
    given = method.given
    metric = metric_for(given.metric, target)
    if metric is None and given.rates_are_given:
        metric = IdentityMetric()
    friction = getattr(given, "friction", None)
    choices = Choices(given.first_step_size, friction, metric, given.gradient, given.init_strategy)
    suggest = None if given.rates_are_given else method.suggest
    with tuning_bar(given.progress_bar) as report:
        pilot = partial(_pilot, method, target)
        tuning = find_tuning(target, rng_key, choices, suggest, pilot, report)
    warn_of(tuning)
    if given.step_size is None:
        steps = math.ceil(2 * method.relaxation_time(tuning) / tuning.step_size)
        tuning = tuning._replace(steps_per_sample=min(steps, _MOST_STEPS_PER_SAMPLE))
    return tuning._replace(data=data)


def _pilot(
    method: "SGMCMCKernel", target: Target, tuning: Tuning
) -> Callable[[float, int, Array], SteinSums]:
    """Short chains, half of whose steps are warm-up."""
    each = method.given.steps_per_sample or 1
    gaussian = tuning.start
    assert gaussian is not None
    layout = fixed_for(method, target, tuning, each, 0).layout

    def run(
        target: Target,
        gaussian: Any,
        fixed: Fixed,
        samples: Array,
        rng_key: Array,
    ) -> SteinSums:
        keys = random.split(rng_key, (3, PILOT_CHAINS))
        z = draw_from(gaussian, target, method.given.temperature, keys[1])

        def begin(chain_key: Array, z: Values, dynamics_key: Array) -> SGMCMCState:
            return start(method, target, fixed, z, chain_key, dynamics_key)

        def sampled(_: Any, state: SGMCMCState) -> SGMCMCState:
            return sample(method, target, state)

        def one(chain: tuple[Array, Values, Array]) -> SteinSums:
            return lax.fori_loop(0, samples, sampled, begin(*chain)).monitor.stein

        if target.shards is None:
            # one after the other: a program for all at once takes twice as long to compile
            return lax.map(one, (keys[0], z, keys[2]))
        # devices would spend their time in waiting for each other
        chains = jax.vmap(begin, out_axes=with_chains(0, None, None))(keys[0], z, keys[2])
        return lax.fori_loop(0, samples, sampled, chains).monitor.stein

    compiled = target.compiled(run)

    def pilot(step_size: float, steps: int, rng_key: Array) -> SteinSums:
        samples = -(-steps // each)
        fixed = fixed_for(method, target, tuning, each, samples // 2)
        # with the layout of the longest step: one program for all of them
        fixed = fixed._replace(
            step_size=jnp.asarray(step_size, fixed.step_size.dtype), layout=layout
        )
        return compiled(gaussian, fixed, jnp.asarray(samples), rng_key)

    return pilot
