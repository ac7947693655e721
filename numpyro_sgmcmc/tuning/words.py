# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The texts of a tuning: its summary and its warnings."""

from collections.abc import Callable
import math
from typing import TYPE_CHECKING, Any
import warnings

from numpyro_sgmcmc.posterior.control_variate import order_of
from numpyro_sgmcmc.posterior.metric import name_of
from numpyro_sgmcmc.stein import advice
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel

if TYPE_CHECKING:
    from numpyro_sgmcmc.tuning.tuning import Tuning

_LONG_STEP = 0.3  #: step size in posterior standard deviations that needs no explanation
LIMITS = 0.5  #: squared step size times noise, or curvature, above which this limits the step

#: Names of gradients by the order of their control variate.
_KINDS = ("plain minibatches", "a control variate", "a control variate of second order")


def summary_of(tuning: "Tuning") -> str:
    """The text that ``print`` shows."""
    rates = f"step size {tuning.step_size:.3g}{_judged_step(tuning)}"
    if tuning.friction is not None:
        rates += f", friction {tuning.friction:.3g}"
    if tuning.steps_per_sample > 1:
        rates += f", {tuning.steps_per_sample} steps per sample"
    lines = [f"{rates}, {name_of(tuning.metric).replace('_', ' ')} metric"]
    if tuning.takes_all_rows:
        lines.append("noise of the gradient: none, since a step takes all rows")
    elif tuning.noise is not None and tuning.plain_noise is not None:
        lines.append(
            f"noise of the gradient: {tuning.noise.mean:.3g} times the curvature"
            f" ({_judged_noise(tuning.noise)}), with {_KINDS[order_of(tuning.anchor)]}"
        )
        if tuning.anchor is not None:
            lines[-1] += f"; {tuning.plain_noise.mean:.3g} with {_KINDS[0]}"
    lines += [f"coordinates of '{name}': {x.summary()}" for name, x in tuning.centring.items()]
    if tuning.seconds_per_sample:
        seconds = 400 * tuning.seconds_per_sample * tuning.slowness
        lines.append(f"speed: about {seconds:.2g} s for 400 effective samples of a chain")
    rows, steps = tuning.larger
    if rows > 1:
        lines.append(
            f"larger minibatches: {rows} times as many rows would need {steps} steps per sample"
        )
    if tuning.passes:
        phases = ", ".join(f"{name} {cost:.3g}" for name, cost in tuning.passes.items())
        lines.append(f"cost: {sum(tuning.passes.values()):.3g} passes over the data ({phases})")
    if tuning.report is not None:
        problem = tuning.report.problem()
        lines.append(f"pilot: {problem or f'{tuning.report.summary()} (good: it must be 1)'}")
    if tuning.is_far_from_gaussian:
        lines.append(f"far from any Gaussian{_pilot_of(tuning)}: slow directions may remain")
    if tuning.misses_a_direction:
        lines.append(f"a direction of '{tuning.slow}' that the metric misses: {_slow(tuning)}")
    if not tuning.minibatches_pay:
        lines.append(f"minibatches do not pay: {_no_gain(tuning)}")
    if tuning.multimodal:
        lines.append("several modes, of which the chains see one")
    lines += [f"strata of '{name}': {strata}" for name, strata in tuning.strata.items()]
    if tuning.has_rare_rows:
        lines.append(f"rows that few minibatches have: {_about(tuning.rare_rows_error)}")
    if tuning.integrals:
        lines.append(f"integrals over groups: off by {_shift(tuning.integrals, 1)}")
    if tuning.needs_double_precision:
        lines.append(f"rounding errors of {tuning.rounding:.2g} standard deviations")
    return "\n".join(lines)


def _judged_step(tuning: "Tuning") -> str:
    """The judgement of a tuned step size: whether it is long, and otherwise its limit."""
    if tuning.noise is None or tuning.report is None:
        return ""
    # the step size of methods without momentum is a squared length
    length = tuning.step_size if tuning.friction is not None else math.sqrt(tuning.step_size)
    if length >= _LONG_STEP:
        return " (long)"
    if tuning.halvings:
        return " (short: the pilot halved it)"
    if tuning.friction is not None and length * tuning.noise.correlated > LIMITS * tuning.friction:
        return " (short: the noise is correlated between parameters)"
    if length**2 * tuning.noise.largest > LIMITS:
        return " (short because of the noise)"
    if length**2 * tuning.noise.curvature > LIMITS:
        return " (short: the metric misses a narrow direction)"
    return " (short: far from a Gaussian)"


def _judged_noise(noise: NoiseLevel) -> str:
    return "small" if noise.mean < 0.1 else "moderate" if noise.mean < 1 else "large"


def _pilot_of(tuning: "Tuning") -> str:
    if tuning.r_hat is None:
        return ""
    return f": R-hat of the chains of the pilot is {tuning.r_hat:.2g}, in site '{tuning.slowest}'"


def _slow(tuning: "Tuning") -> str:
    return (
        f"the posterior is {tuning.widest:.2g} times as wide there as the metric says, and chains"
        f" are {tuning.slowness:.2g} times as slow as in other directions"
    )


def _no_gain(tuning: "Tuning") -> str:
    assert tuning.noise is not None
    return (
        f"the noise of the gradient, up to {tuning.noise.largest:.2g} times the curvature, limits"
        f" the step size to {tuning.step_size:.2g}. An independent draw takes"
        f" {tuning.steps_per_sample} steps or {tuning.passes_per_sample:.2g} passes over the data;"
        " NUTS takes 7 to 30, at half the cost of a row"
    )


def _shift(error: float, digits: int) -> str:
    """An error of the integrals in words. From 1 on its size means nothing."""
    if error < 1:
        return f"{error:.{digits}g} posterior standard deviations"
    return "one posterior standard deviation or more"


def _about(error: float) -> str:
    """A first-order error in words, which means little if it is large."""
    return f"about {error:.0%}" if error < 0.2 else "20% or more"


#: Conditions for warnings of the tuning, and their messages.
_WARNINGS: tuple[tuple[Callable[["Tuning"], Any], Callable[["Tuning"], str]], ...] = (
    (
        lambda t: t.flat,
        lambda t: (
            f"The posterior is flat in some direction of site '{t.flat}': neither the data nor its"
            " prior determine it, and its draws mean nothing. Give it a proper prior. Drop columns"
            " that depend on each other, or that separate the outcomes completely."
        ),
    ),
    (
        lambda t: t.multimodal,
        lambda t: (
            "The posterior has several modes, and the chains will see one of them: searches from"
            " different starts ended in different modes, with a barrier between. Break a symmetry"
            " of the model, use the draws for predictions only, or use `replicas=Replicas(...)`,"
            " which visit all modes."
        ),
    ),
    (
        lambda t: t.is_far_from_gaussian,
        lambda t: (
            f"The posterior is far from any Gaussian, and no metric fits it{_pilot_of(t)}. Chains"
            " may be slow in directions that a short run does not show: compare several long"
            " chains. If they differ, write effects of groups as `x = numpyro.sample('x',"
            " dist.Normal(mu, tau))`, or as `x = mu + tau * numpyro.sample('z', dist.Normal(0,"
            " 1))` with `z` used once, which get coordinates of their own. For coefficients with a"
            " scale each, the page 'Shrinkage' has the priors with such coordinates."
        ),
    ),
    (
        lambda t: t.misses_a_direction,
        lambda t: (
            f"The metric misses a direction of site '{t.slow}': {_slow(t)}. Run longer by that"
            " factor; use `metric='dense'`, if memory allows; or leave out parameters that the"
            " data cannot tell apart, such as an intercept beside an effect of each level."
        ),
    ),
    (
        lambda t: not t.minibatches_pay,
        lambda t: (
            f"Minibatches do not pay here: {_no_gain(t)}. If all rows fit into memory, use"
            " `NUTS(full_data(model))`."
        ),
    ),
    (
        lambda t: t.needs_double_precision,
        lambda t: (
            f"Rounding errors of the gradient are as large as {t.rounding:.2g} posterior standard"
            " deviations in the worst coordinate, and the draws may be off by as much. Use double"
            " precision: call `numpyro.enable_x64()` before anything else."
        ),
    ),
    (
        lambda t: t.has_rare_rows,
        lambda t: (
            "Some parameters are known from a few rows only, those of a small group or with a rare"
            " feature, and most minibatches have none of them. Their standard deviations are wrong"
            f" by {_about(t.rare_rows_error)}, which no correction of the noise removes. Use"
            " strata (subsampling='auto', with an estimate of the noise from sub-batches), or a"
            " larger `subsample_size`."
        ),
    ),
    (
        lambda t: t.has_wrong_integrals,
        lambda t: (
            "The integrals over the latent variables of groups are not exact enough: the draws are"
            f" off by as much as {_shift(t.integrals, 2)}. Use"
            " gradient='control_variate', which corrects the error at the centre, or larger"
            " minibatches; or sample some of these sites for all groups, outside of the plate."
        ),
    ),
)


def warn_of(tuning: "Tuning") -> None:
    """Warn of the problems of a tuning."""
    for is_wrong, said in _WARNINGS:
        if is_wrong(tuning):
            warnings.warn(said(tuning), stacklevel=3)
    if tuning.report is not None and (problem := tuning.report.problem()):
        warnings.warn(f"After tuning: {advice(problem)}", stacklevel=3)
