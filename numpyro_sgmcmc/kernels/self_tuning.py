# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Choice of the tuning of a method: the given, the latest, or a new tuning."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
import math
import time
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp

from numpyro_sgmcmc.data.strata import Strata
from numpyro_sgmcmc.kernels.chains import axes_for
from numpyro_sgmcmc.kernels.identity import data_fingerprint, digest, other_sites
from numpyro_sgmcmc.kernels.kept_tuning import Kept
from numpyro_sgmcmc.kernels.method import Method
from numpyro_sgmcmc.kernels.runtime import Runtime
from numpyro_sgmcmc.kernels.state import ChainConstants, StaticConfig
from numpyro_sgmcmc.kernels.transition import sample, start
from numpyro_sgmcmc.posterior.control_variate import GRADIENTS_OF_A_STEP, order_of
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.target import Program, Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian
from numpyro_sgmcmc.tuning.phases import run_phases
from numpyro_sgmcmc.tuning.pilot import PILOT_CHAINS, pilot_steps, short_chains
from numpyro_sgmcmc.tuning.pilot_rhat import PilotRun
from numpyro_sgmcmc.tuning.progress import tuning_bar
from numpyro_sgmcmc.tuning.rare_rows import strata_by_importance
from numpyro_sgmcmc.tuning.request import TuningRequest
from numpyro_sgmcmc.tuning.speed import MOST_STEPS_PER_SAMPLE, check_speed
from numpyro_sgmcmc.tuning.strata import are_strata_of, given_strata
from numpyro_sgmcmc.tuning.tuning import Tuning
from numpyro_sgmcmc.tuning.user_metric import metric_for
from numpyro_sgmcmc.tuning.words import warn_of

#: Number of steps whose time is measured.
_STEPS_TIMED = 100

#: The time between two positions of a pilot, relative to that of a posterior standard deviation.
#: Positions that are closer say little more, and each is a change of coordinates.
_APART = 0.5

#: Steps of a pilot times parameters above which its program has all optimisations.
_LONG = 500_000

#: The largest number of doublings of a minibatch that the tuning considers.
_DOUBLINGS = 6

#: The factor of fewer steps with larger minibatches that is worth a line.
_MUCH_MORE = 2.0


def constants_for(
    method: Method, target: Target, tuning: Tuning, steps_per_sample: int, num_warmup: Any
) -> ChainConstants:
    """The constants of all chains, as a tuning decides them."""
    target, latents = target.tuned(tuning), target.model.latents
    dtype = jnp.result_type(*(x.dtype for x in latents.values()))
    sites = tuple(math.prod(latents[name].shape) for name in sorted(latents))
    noise = method.noise_estimator(target, tuning)
    if noise is not None and tuning.noise is not None:
        noise = noise.for_samples_of(steps_per_sample, target)
    layout = StaticConfig(
        steps_per_sample,
        sites,
        noise,
        method.integrator_for(tuning),
        target.model.facts,
        tuning.rule,
    )
    anchor = tuning.anchor
    if anchor is not None and method.anchor_moves_every is not None:
        anchor = anchor._replace(reach=None)  # an anchor that follows a chain is near it
    return ChainConstants(
        step_size=jnp.asarray(tuning.step_size, dtype),
        friction=None if tuning.friction is None else jnp.asarray(tuning.friction, dtype),
        metric=tuning.metric,
        variances=tuning.metric.variances(jnp.zeros(target.model.dimension, dtype)),
        warmup_steps=jnp.asarray(num_warmup * steps_per_sample, jnp.int32),
        anchor=anchor,
        data=jnp.asarray(digest(tuning.data)),
        strata=tuning.strata,
        centring=tuning.centring,
        constants=method.constants(target),
        layout=layout,
    )


def tuning_for(method: Method, runtime: Runtime, target: Target, kept: Kept, bar: bool) -> Tuning:
    """
    The given tuning, the latest or the kept one if it is for these data, or a new one.

    :param kept: the tunings in the folder of the method.
    :param bool bar: whether a progress bar is shown.
    """
    if isinstance(method.tuning, Tuning):
        return _adopted(method, runtime, target, method.tuning)
    if (
        method.rates_are_given
        and not isinstance(method.metric, str)
        and method.oracle in ("auto", "minibatch")
    ):
        step_size = method.first_step_size
        assert step_size is not None
        metric = metric_for(method.metric, target) or IdentityMetric()
        strata = given_strata(method.strata, target)
        return Tuning(step_size, getattr(method, "friction", None), metric, strata=strata)
    latest = runtime.tuning
    if latest is not None and latest.data == _known_data(runtime, target):
        if not other_sites(runtime.densities, latest.densities):
            return latest
    if kept.tuning is not None:
        warn_of(kept.tuning)
        return kept.tuning
    return new_tuning(method, runtime, target, kept, random.key(0), bar)


def _known_data(runtime: Runtime, target: Target) -> str:
    """
    The fingerprint of the data of a tuning.

    :raises ValueError: if the values of the data are not known.
    """
    data = data_fingerprint(target)
    if data is None:
        raise ValueError(
            f"{runtime.name} cannot tune itself inside `jit` or `vmap` of its data. Call `tune`"
            " first, and pass its result as `tuning=`."
        )
    return data


def _adopted(method: Method, runtime: Runtime, target: Target, tuning: Tuning) -> Tuning:
    """
    Check a given tuning against the model and the method, and adopt it.

    :raises ValueError: if the tuning is of another model or method.
    """
    size, metric = target.model.dimension, tuning.metric
    if not isinstance(metric, IdentityMetric) and len(metric.center) != size:
        raise ValueError(
            f"`tuning` was found for {len(metric.center)} unconstrained parameters, but this model"
            f" has {size}. Let the kernel tune itself, or give it the tuning of this model."
        )
    data, here, there = data_fingerprint(target), runtime.densities, tuning.densities
    # densities can be compared on equal data only
    others = other_sites(here, there) if data == tuning.data else sorted(here.keys() ^ there)
    if here and there and others:
        raise ValueError(
            "`tuning` was found for another model: the densities of"
            f" {', '.join(map(repr, others))} differ. Let the kernel tune itself, or give it the"
            " tuning of this model."
        )
    tuning = tuning._replace(
        step_size=method.first_step_size or tuning.step_size,
        friction=getattr(method, "friction", None) or tuning.friction,
    )
    if hasattr(method, "friction") and tuning.friction is None:
        raise ValueError(
            f"`tuning` has no friction, which {runtime.name} needs. Call the `tune` of this"
            " kernel, or give `friction`."
        )
    has_noise = any(target.factors.values())
    if method.first_step_size is None and has_noise and tuning.takes_all_rows:
        raise ValueError(
            "`tuning` was found with all rows in each step, and this run has minibatches, for whose"
            " noise its step size is too long. Let the kernel tune itself, or give it a tuning of"
            " minibatches of this size."
        )
    if tuning.anchor is None and not tuning.strata:
        return tuning
    target = target._replace(centring=tuning.centring)
    if tuning.strata and (data != tuning.data or not are_strata_of(target, tuning.strata)):
        tuning = tuning._replace(strata=_strata_anew(runtime.name, target, tuning, data))
    if tuning.anchor is not None and (data is None or data != tuning.data):
        # any centre serves, with the gradients of these data at it
        of_order = partial(Target.anchor, order=order_of(tuning.anchor))
        anchor_at = runtime.compiled("anchor", of_order, target, order_of(tuning.anchor))
        anchor = anchor_at(tuning.anchor.values)._replace(reach=tuning.anchor.reach)
        tuning = tuning._replace(anchor=anchor, data=data)
    return tuning


def _strata_anew(name: str, target: Target, tuning: Tuning, data: str | None) -> dict[str, Strata]:
    """
    New strata for other data or another minibatch size.

    :param data: the fingerprint of the data, or None if their values are not known.
    :raises ValueError: if strata are not possible.
    """
    if data is not None and tuning.start is not None:
        gaussian = Gaussian(tuning.start, 0.0)
        return strata_by_importance(target, random.key(0), gaussian, order_of(tuning.anchor))
    if are_strata_of(target, tuning.strata):
        return tuning.strata  # the strata are unbiased for any rows
    raise ValueError(
        f"`tuning` has strata of other rows, or for another minibatch size, and {name} cannot make"
        " new ones inside `jit` or `vmap` of its data. Call `tune` first, with data of this shape."
    )


def new_tuning(
    method: Method, runtime: Runtime, target: Target, kept: Kept, rng_key: Array, bar: bool
) -> Tuning:
    """
    Run the phases of the tuning behind a progress bar.

    :param kept: the tunings in the folder of the method, to which the new one is added.
    :param bool bar: whether the bar is shown.
    :raises TuningFailed: if samples would take too many steps.
    """
    data = _known_data(runtime, target)
    pilots: list[_Pilot] = []

    def pilot(tuning: Tuning) -> _Pilot:
        pilots.append(_Pilot(method, target, tuning))
        return pilots[-1]

    suggest = None if method.rates_are_given else method.suggest
    request = _request(method, target, runtime.grows, kept.near)
    with tuning_bar(method.progress_bar and bar) as report, _explained(runtime.name):
        tuning = run_phases(target, rng_key, request, suggest, pilot, report)
    if method.replicas is not None:
        tuning = tuning._replace(multimodal=False)  # replicas visit all modes
    tuning = tuning._replace(data=data, densities=runtime.densities)
    if method.step_size is not None:
        warn_of(tuning)
        kept.keep(tuning)
        return tuning
    steps = math.ceil(2 * method.relaxation_time(tuning) / tuning.step_size)
    passes = steps * target.minibatch_share * GRADIENTS_OF_A_STEP[order_of(tuning.anchor)]
    tuning = tuning._replace(
        steps_per_sample=min(steps, MOST_STEPS_PER_SAMPLE),
        # no comparison with other gradients if the user asked for plain minibatches
        passes_per_sample=0.0 if method.oracle == "minibatch" else passes,
        larger=_larger_minibatches(method, target, tuning),
    )
    warn_of(tuning)
    if pilots:
        seconds = steps * pilots[-1].seconds_of_a_step()
        tuning = tuning._replace(seconds_per_sample=seconds)
    without_noise = _steps_with(method, tuning, 0.0)
    check_speed(runtime.name, tuning, steps, without_noise, method.on_failure)
    kept.keep(tuning)
    return tuning


def _request(method: Method, target: Target, grows: bool, near: Tuning | None) -> TuningRequest:
    """The request for a tuning: the missing arguments of a method and the given ones."""
    metric = metric_for(method.metric, target)
    if metric is None and method.rates_are_given:
        metric = IdentityMetric()
    # strata and coordinates of a hierarchy would fit the first rows only
    has_none = grows or not method.can_stratify
    # a given metric applies to the coordinates as written
    is_found = metric is None or isinstance(metric, str)
    return TuningRequest(
        method.first_step_size,
        getattr(method, "friction", None),
        metric,
        method.oracle,
        method.init_strategy,
        None if isinstance(method.strata, str) and has_none else method.strata,
        method.reparametrise and is_found and not grows,
        near,
    )


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """
    Explain a missing second derivative of the density.

    :raises ValueError: if the density has no second derivatives.
    """
    try:
        yield
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise ValueError(
            "The tuning needs second derivatives of the density, and a function of the model has"
            " none (a `jax.custom_vjp`, such as `odeint` of JAX). Use another function, for"
            f" instance of diffrax; or give {name} its step size and friction, and"
            " gradient='minibatch'."
        ) from error


def _steps_with(method: Method, tuning: Tuning, part: float) -> float:
    """Steps of a sample with a part of the noise, if the pilot had the same halvings."""
    if method.rates_are_given or tuning.noise is None:
        return math.inf
    noise = tuning.noise.times(part)
    step_size, friction = method.suggest(noise)
    tuning = tuning._replace(
        noise=noise,
        step_size=step_size / 2**tuning.halvings,
        friction=getattr(method, "friction", None) or friction,
    )
    return 2 * method.relaxation_time(tuning) / tuning.step_size


def _larger_minibatches(method: Method, target: Target, tuning: Tuning) -> tuple[int, int]:
    """
    Return a factor of the number of rows in a minibatch, and the steps of a sample with it.

    The number of steps is within 25 % of the fewest, for minibatches of up to a quarter of all
    rows. The factor is 1 if the steps are not at least halved.
    """
    shares = (rows.share for name, rows in target.kinds.items() if target.factors[name] > 0)
    most = 0.25 / max(shares, default=1.0)
    factors = [2**k for k in range(_DOUBLINGS + 1) if k == 0 or 2**k <= most]
    steps = [_steps_with(method, tuning, 1 / factor) for factor in factors]
    factor, fewer = next(x for x in zip(factors, steps, strict=True) if x[1] <= 1.25 * min(steps))
    return (factor, math.ceil(fewer)) if steps[0] >= _MUCH_MORE * fewer else (1, 1)


class _Pilot:
    """Short chains of a method, half of whose steps are warm-up."""

    def __init__(self, method: Method, target: Target, tuning: Tuning) -> None:
        self.method, self.target, self.tuning = method, target, tuning
        few = int(_APART * tuning.width / tuning.step_size)
        self.each = method.steps_per_sample or max(1, few)
        self.layout = constants_for(method, target, tuning, self.each, 0).layout
        self.program = target.compiled(partial(_short_chains, method), "pilot")
        self.latest = self.program

    def __call__(self, step_size: float, steps: int, rng_key: Array) -> PilotRun:
        self.latest = self._program_for(steps)
        return self.latest(*self._arguments(step_size, steps, rng_key))

    def prepare(self) -> None:
        tuning = self.tuning
        assert tuning.noise is not None
        steps, _ = pilot_steps(tuning.noise, tuning.step_size / tuning.width)
        arguments = self._arguments(tuning.step_size, 0, random.key(0))
        self._program_for(steps).prepare(*arguments)

    def seconds_of_a_step(self) -> float:
        """The measured seconds of a step, chain by chain, of the program that ran last."""
        arguments = self._arguments(self.tuning.step_size, _STEPS_TIMED, random.key(0))
        start = time.monotonic()
        jax.block_until_ready(self.latest(*arguments))
        return (time.monotonic() - start) / (_STEPS_TIMED * PILOT_CHAINS)

    def _program_for(self, steps: int) -> Program:
        is_long = steps * self.target.model.dimension > _LONG
        return self.program.optimised if is_long else self.program

    def _arguments(self, step_size: float, steps: int, rng_key: Array) -> tuple:
        samples = -(-steps // self.each)
        fixed = constants_for(self.method, self.target, self.tuning, self.each, samples // 2)
        # the layout of the longest step gives one program for all steps
        fixed = fixed._replace(
            step_size=jnp.asarray(step_size, fixed.step_size.dtype), layout=self.layout
        )
        return self.tuning.start, fixed, jnp.asarray(samples), rng_key


def _short_chains(
    method: Method,
    target: Target,
    gaussian: Any,
    fixed: ChainConstants,
    samples: Array,
    rng_key: Array,
) -> PilotRun:
    target = target.tuned(fixed)
    begin, advance = partial(start, method, target, fixed), partial(sample, method, target)
    axes = axes_for(method.anchor_moves_every)
    law = gaussian, method.temperature, fixed.metric
    return short_chains(begin, advance, axes, target, *law, samples, rng_key)
