# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
How a kernel comes to what its arguments leave out: the phases of :mod:`numpyro_sgmcmc.tuning`
with its own step in the pilot. Functions of a method, a target and what was given.
"""

from collections.abc import Callable
from functools import partial
import math
import time
from typing import TYPE_CHECKING, Any
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_sgmcmc.data.strata import Strata
from numpyro_sgmcmc.kernels.chains import axes_for
from numpyro_sgmcmc.kernels.identity import data_fingerprint, digest, other_sites
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState, StaticConfig
from numpyro_sgmcmc.kernels.transition import sample, start
from numpyro_sgmcmc.posterior.control_variate import GRADIENTS_OF_A_STEP, order_of
from numpyro_sgmcmc.posterior.initial_values import draw_from
from numpyro_sgmcmc.posterior.metric import DiagonalMetric, IdentityMetric
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.numpyro_private import shows_bars
from numpyro_sgmcmc.posterior.potential import ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian
from numpyro_sgmcmc.tuning.phases import TuningRequest, find_tuning, tuning_bar
from numpyro_sgmcmc.tuning.pilot import PILOT_CHAINS
from numpyro_sgmcmc.tuning.pilot_rhat import Halves, PilotRun, no_positions, with_position
from numpyro_sgmcmc.tuning.rare_rows import strata_by_importance
from numpyro_sgmcmc.tuning.strata import are_strata_of, given_strata
from numpyro_sgmcmc.tuning.tuning import Tuning, warn_of
from numpyro_sgmcmc.tuning.user_metric import metric_for

if TYPE_CHECKING:
    from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel

#: A sample of a method that needs very short steps is not to take forever.
_MOST_STEPS_PER_SAMPLE = 1_000

#: It is warned of draws that take so many seconds, and samples of so many steps are not begun; of
#: posteriors for whose coordinates there is no matrix, of so many.
_LONG, _FAILED, _FAILED_WITHOUT_MATRIX = 0.5, _MOST_STEPS_PER_SAMPLE, 10_000

#: They are measured by some of them.
_STEPS_TIMED = 100


def fixed_for(
    method: "SGMCMCKernel", target: Target, tuning: Tuning, steps_per_sample: int, num_warmup: Any
) -> ChainConstants:
    """What a tuning decides for all steps of all chains."""
    target, latents = target.tuned(tuning), target.model.latents
    dtype = jnp.result_type(*(x.dtype for x in latents.values()))
    sites = tuple(math.prod(latents[name].shape) for name in sorted(latents))
    layout = StaticConfig(
        steps_per_sample,
        sites,
        method.noise(target, tuning),
        method.integrator(tuning),
        target.model.facts,
        tuning.rule,
    )
    return ChainConstants(
        step_size=jnp.asarray(tuning.step_size, dtype),
        friction=None if tuning.friction is None else jnp.asarray(tuning.friction, dtype),
        metric=tuning.metric,
        variances=tuning.metric.variances(jnp.zeros(target.model.dimension, dtype)),
        warmup_steps=jnp.asarray(num_warmup * steps_per_sample, jnp.int32),
        anchor=tuning.anchor,
        data=jnp.asarray(digest(tuning.data)),
        strata=tuning.strata,
        centring=tuning.centring,
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
        and given.gradient in ("auto", "minibatch")
    ):
        step_size = given.first_step_size
        assert step_size is not None
        metric = metric_for(given.metric, target) or IdentityMetric()
        friction, strata = getattr(given, "friction", None), given_strata(given.strata, target)
        return Tuning(step_size, friction, metric, strata=strata)
    data = known_data(method, target)
    densities = method.context.densities
    if latest is not None and latest.data == data:
        if not other_sites(densities, latest.densities):
            return latest
    return found_tuning(method, target, random.key(0), data)


def known_data(method: "SGMCMCKernel", target: Target) -> str:
    """
    :raises ValueError: if the values of the data are not known.
    """
    data = data_fingerprint(target)
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
    size, metric, given = target.model.dimension, tuning.metric, method.given
    if not isinstance(metric, IdentityMetric) and len(metric.center) != size:
        raise ValueError(
            f"`tuning` was found for {len(metric.center)} unconstrained parameters, but this"
            f" model has {size}."
        )
    data, here, there = data_fingerprint(target), method.context.densities, tuning.densities
    # of other data the densities are others too
    others = other_sites(here, there) if data == tuning.data else sorted(here.keys() ^ there)
    if here and there and others:
        raise ValueError(
            "`tuning` was found for another model: the densities of"
            f" {', '.join(map(repr, others))} differ. Let the kernel tune itself, or give it the"
            " tuning of this model."
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
    if tuning.anchor is None and not tuning.strata:
        return tuning
    target = target._replace(centring=tuning.centring)
    if tuning.strata and (data != tuning.data or not are_strata_of(target, tuning.strata)):
        tuning = tuning._replace(strata=_strata_anew(method, target, tuning, data))
    if tuning.anchor is not None and (data is None or data != tuning.data):
        # any centre serves, with what these data say there
        of_order = partial(Target.anchor, order=order_of(tuning.anchor))
        anchor_at = method.context.compiled("anchor", of_order, target, order_of(tuning.anchor))
        tuning = tuning._replace(anchor=anchor_at(tuning.anchor.values), data=data)
    return tuning


def _strata_anew(
    method: "SGMCMCKernel", target: Target, tuning: Tuning, data: str | None
) -> dict[str, Strata]:
    """
    Strata of other data, or for minibatches of another size.

    :param data: tells the data from others, or None if their values are not known.
    :raises ValueError: if there cannot be any.
    """
    if data is not None and tuning.start is not None:
        gaussian = Gaussian(tuning.start, 0.0)
        return strata_by_importance(target, random.key(0), gaussian, order_of(tuning.anchor))
    if are_strata_of(target, tuning.strata):
        return tuning.strata  # unbiased for any rows
    raise ValueError(
        "`tuning` has strata of other rows, or for minibatches of another size:"
        f" {type(method).__name__} cannot make them anew inside `jit` or `vmap` of its data. Call"
        " `tune` before with data of this shape."
    )


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
    grows = method.context.grows
    # strata and coordinates of a hierarchy are those of the rows that there are
    has_none = grows or not given.can_stratify
    strata = None if given.strata == "auto" and has_none else given.strata
    # a given metric is one of the coordinates as written
    is_found = metric is None or isinstance(metric, str)
    reparametrise = given.reparametrise and is_found and not grows
    choices = TuningRequest(
        given.first_step_size,
        friction,
        metric,
        given.gradient,
        given.init_strategy,
        strata,
        reparametrise,
    )
    suggest = None if given.rates_are_given else method.suggest
    with tuning_bar(given.progress_bar and shows_bars(method)) as report:
        pilots = []

        def pilot(tuning: Tuning) -> _Pilot:
            pilots.append(_Pilot(method, target, tuning))
            return pilots[-1]

        try:
            tuning = find_tuning(target, rng_key, choices, suggest, pilot, report)
        except TypeError as error:
            if "custom_vjp" not in str(error):
                raise
            raise ValueError(
                "The tuning needs second derivatives of the density, which a function of the model"
                " does not have (it is a `jax.custom_vjp`, as `odeint` of JAX is). Use another one,"
                f" diffrax for instance; or give {type(method).__name__} its step size and"
                " friction, and gradient='minibatch'."
            ) from error
    if given.replicas is not None:
        tuning = tuning._replace(multimodal=False)  # they visit all modes
    tuning = tuning._replace(data=data, densities=method.context.densities)
    if given.step_size is not None:
        warn_of(tuning)
        return tuning
    steps = math.ceil(2 * method.relaxation_time(tuning) / tuning.step_size)
    passes = steps * target.minibatch_share * GRADIENTS_OF_A_STEP[order_of(tuning.anchor)]
    tuning = tuning._replace(
        steps_per_sample=min(steps, _MOST_STEPS_PER_SAMPLE),
        # minibatches without a control variate, if asked for, are not to be better than others
        passes_per_sample=0.0 if given.gradient == "minibatch" else passes,
    )
    warn_of(tuning)
    if pilots:
        seconds = steps * _seconds_of_a_step(pilots[-1], tuning)
        tuning = tuning._replace(seconds_per_sample=seconds)
    _check_speed(method, tuning, steps)
    return tuning


def _seconds_of_a_step(run: Callable[..., PilotRun], tuning: Tuning) -> float:
    """Measured, on one chain after the other, with a program that has been compiled."""
    start = time.monotonic()
    jax.block_until_ready(run(tuning.step_size, _STEPS_TIMED, random.key(0)))
    return (time.monotonic() - start) / (_STEPS_TIMED * PILOT_CHAINS)


def _check_speed(method: "SGMCMCKernel", tuning: Tuning, steps: int) -> None:
    """
    Warns of chains that take long to forget where they were.

    :raises ValueError: if they take so long that nothing can be expected of a run, unless a warning
        was asked for.
    """
    most = _FAILED_WITHOUT_MATRIX if isinstance(tuning.start, DiagonalMetric) else _FAILED
    # by a wide margin: the noise makes some difference everywhere
    is_for_noise = _steps_without_noise(method, tuning) <= most / 2
    has_failed = steps > most and not is_for_noise
    if not has_failed and tuning.seconds_per_sample <= _LONG:
        return
    found, site = tuning.problem, tuning.slowest
    slowest = f", and the slowest site is '{site}'" if site else ""
    seen = (
        f"with a step size of {tuning.step_size:.2g} a chain forgets where it was after {steps:,}"
        f" steps, {tuning.seconds_per_sample:.2g} s for each independent draw{slowest}"
        f"{f' ({found})' if found else ''}. "
    )
    if steps > most and is_for_noise:
        seen += (
            "The cause is the noise of the minibatches: take larger ones, or a method and a"
            " gradient for which they matter less, such as CCAdL and gradient='auto'."
        )
    else:
        seen += (
            "The usual causes are columns that nearly depend on each other: standardise them, and"
            " drop one; effects of a hierarchy that the tuning does not recognise: write them"
            " `x = numpyro.sample('x', dist.Normal(mu, tau))`; and digits that single precision"
            " does not have: `numpyro.enable_x64()`."
        )
    if not has_failed or method.given.on_failure == "warn":
        warnings.warn(f"The sampler moves slowly: {seen}", stacklevel=2)
        return
    method.context.tuning = tuning
    raise ValueError(
        f"The tuning has failed: {seen} To go on nevertheless, with"
        f" {_MOST_STEPS_PER_SAMPLE:,} steps between two samples:"
        f" `{type(method).__name__}(model, on_failure='warn')`; what was found is in"
        " `kernel.tuning`, for `tuning=`."
    )


def _steps_without_noise(method: "SGMCMCKernel", tuning: Tuning) -> float:
    """Of a sample, if minibatches had no noise and the pilot had halved the step as often."""
    if method.given.rates_are_given or tuning.noise is None:
        return math.inf
    quiet = tuning.noise._replace(mean=0.0, largest=0.0)
    step_size, friction = method.suggest(quiet)
    tuning = tuning._replace(
        noise=quiet, step_size=step_size / 2**tuning.halvings, friction=friction
    )
    return 2 * method.relaxation_time(tuning) / tuning.step_size


class _Pilot:
    """Short chains, half of whose steps are warm-up."""

    def __init__(self, method: "SGMCMCKernel", target: Target, tuning: Tuning) -> None:
        self.method, self.target, self.tuning = method, target, tuning
        self.each = method.given.steps_per_sample or 1
        self.layout = fixed_for(method, target, tuning, self.each, 0).layout
        self.program = target.compiled(partial(_short_chains, method), "pilot")

    def __call__(self, step_size: float, steps: int, rng_key: Array) -> PilotRun:
        return self.program(*self._arguments(step_size, steps, rng_key))

    def prepare(self) -> None:
        self.program.prepare(*self._arguments(self.tuning.step_size, 0, random.key(0)))

    def _arguments(self, step_size: float, steps: int, rng_key: Array) -> tuple:
        samples = -(-steps // self.each)
        fixed = fixed_for(self.method, self.target, self.tuning, self.each, samples // 2)
        # with the layout of the longest step: one program for all of them
        fixed = fixed._replace(
            step_size=jnp.asarray(step_size, fixed.step_size.dtype), layout=self.layout
        )
        return self.tuning.start, fixed, jnp.asarray(samples), rng_key


def _short_chains(
    method: "SGMCMCKernel",
    target: Target,
    gaussian: Any,
    fixed: ChainConstants,
    samples: Array,
    rng_key: Array,
) -> PilotRun:
    keys = random.split(rng_key, (3, PILOT_CHAINS))
    target = target.tuned(fixed)
    z = draw_from(gaussian, target, method.given.temperature, keys[1])

    def begin(chain_key: Array, z: Values, dynamics_key: Array) -> SGMCMCState:
        return start(method, target, fixed, z, chain_key, dynamics_key)

    def seen(halves: Halves, z: Values, k: Array) -> Halves:
        position = fixed.metric.coordinates(ravel(target.to_internal(z)))
        return with_position(halves, position, 4 * k // samples - 2, 2 * k >= samples)

    def both(seen: Callable) -> Callable:
        def sampled(k: Array, run: tuple[SGMCMCState, Halves]) -> tuple[SGMCMCState, Halves]:
            state = sample(method, target, run[0])
            return state, seen(run[1], state.z, k)

        return sampled

    none = no_positions(target.model.dimension, gaussian.center.dtype)

    def one(chain: tuple[Array, Values, Array]) -> PilotRun:
        state, halves = lax.fori_loop(0, samples, both(seen), (begin(*chain), none))
        return PilotRun(state.monitor.stein, halves, state.monitor.nonfinite_steps)

    if target.shards is None:
        # one after the other: a program for all at once takes twice as long to compile
        return lax.map(one, (keys[0], z, keys[2]))
    # devices would spend their time in waiting for each other
    axes = axes_for(method.given.refresh_every)
    chains = jax.vmap(begin, out_axes=axes)(keys[0], z, keys[2])
    several = jax.tree.map(lambda x: jnp.stack([x] * PILOT_CHAINS), none)
    of_chains = both(jax.vmap(seen, (0, 0, None)))
    state, halves = lax.fori_loop(0, samples, of_chains, (chains, several))
    return PilotRun(state.monitor.stein, halves, state.monitor.nonfinite_steps)
