# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
From a model and its data to a centre, a metric, a control variate and a step size.

Tuning is done once, before the chains start, and is the same for all of them:

1. **Centre** (:func:`~numpyro_sgmcmc.tuning.center.search_center`): the Gaussian
   :math:`q = N(c, L L^\\top)` that minimises :math:`\\mathrm{E}_q[U] - \\log |\\det L|`, with
   :math:`U` of a part of the rows, by Newton steps; on few rows from several starts, then on
   more. Its centre exists also where the mode does not, as in hierarchical models, and units
   make no difference.
2. **Metric** (:func:`~numpyro_sgmcmc.tuning.gaussian.find_metric`): the same on all data.

   Above 500 parameters steps 1 and 2 are stochastic variational inference with NumPyro's
   ``AutoDiagonalNormal`` guide on minibatches
   (:func:`~numpyro_sgmcmc.tuning.gaussian.find_center`).
3. **Noise** (:func:`~numpyro_sgmcmc.tuning.noise_level.measure_noise`): the variance of the
   gradient's noise in the coordinates of the metric at draws of :math:`q`, with and without a
   control variate; the nonlinearity and the rounding error of the gradient; and the largest
   eigenvalue of the Hessian (:func:`~numpyro_sgmcmc.tuning.gaussian.find_curvature`).
4. **Step size and friction**: what the method says these numbers ask for.
5. **Pilot**: short chains, whose Stein matrix (:mod:`numpyro_sgmcmc.stein`) must be the
   identity; if it is not, the step size is halved and the pilot repeated. If that does not
   help, the step size was not what is wrong, and is kept.

**Example:** phases 1 to 4, one by one.

.. doctest::

    >>> import jax
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import init_to_uniform
    >>> from numpyro_sgmcmc import CCAdL
    >>> from numpyro_sgmcmc.tuning.center import search_center
from numpyro_sgmcmc.tuning.gaussian import find_center, find_metric
    >>> from numpyro_sgmcmc.target.model import read_model
    >>> from numpyro_sgmcmc.tuning.noise_level import measure_noise
    >>> from numpyro_sgmcmc.target.target import Target

    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
    >>> target = Target(read_model(model, init_to_uniform, (y,), {}), (y,), {})
    >>> keys = jax.random.split(jax.random.key(1), 3)
    >>> start = search_center(target, keys[0], init_to_uniform)
    >>> gaussian = find_metric(target, keys[1], start)
    >>> print(f"mu is about {gaussian.metric.center[0]:.1f} +- {gaussian.metric.factor[0, 0]:.2f}")
    mu is about 3.0 +- 0.01
    >>> noise = measure_noise(target, keys[2], gaussian, gaussian.metric, controlled=True)
    >>> noise.controlled.mean < noise.plain.mean / 1_000
    True
    >>> CCAdL(model).suggest(noise.controlled)
    (1.0, 0.7)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
import os
from typing import NamedTuple
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from numpyro_sgmcmc.data.importance import SamplingDesign
from numpyro_sgmcmc.stein import SteinReport, SteinSums, advice, stein_report
from numpyro_sgmcmc.target.control_variate import Anchor
from numpyro_sgmcmc.target.metric import DenseMetric, DiagonalMetric, IdentityMetric, Metric
from numpyro_sgmcmc.target.target import Target
from numpyro_sgmcmc.tuning.center import search_center
from numpyro_sgmcmc.tuning.gaussian import find_center, find_metric
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel, measure_noise
from numpyro_sgmcmc.tuning.rare_rows import MUCH_ERROR, RareRows, error_of, find_rare_rows

#: The metric is a full matrix up to this many parameters, diagonal above.
DENSE_BY_DEFAULT = 500

#: The pilot: chains, the fewest and the most steps of each, and halvings.
PILOT_CHAINS, _PILOT_STEPS, _MOST_PILOT_STEPS, _HALVINGS = 8, 600, 40_000, 5

#: A pilot that is not much longer than the memory of a chain, which is of the order of 1 in
#: time, would find draws too narrow.
_PILOT_TIME = 40.0

#: In the order in which they come.
PHASES = ("centre", "metric", "noise", "pilot")

#: Gradients that deviate more than this from linear ones belong to posteriors whose shape no
#: metric fits, such as funnels, bananas and neural networks.
_FAR_FROM_GAUSSIAN = 0.6

#: Rounding errors that a user should hear of, in posterior standard deviations.
_MUCH_ROUNDING = 0.05


class Tuning(NamedTuple):
    """
    What was found for a model and its data; ``kernel(model, tuning=...)`` uses it again.

    - **step_size** - step size, in units of a posterior standard deviation.
    - **friction** - friction, or None for methods that have none.
    - **metric** - the metric, in whose coordinates the sampler moves.
    - **start** - the Gaussian from which chains start, or None.
    - **anchor** - of the control variate, or None where plain minibatches are better.
    - **noise** - the noise of the gradient that is used.
    - **plain_noise** - the noise of the gradient of plain minibatches.
    - **passes** - the cost in passes over the data, by phase: gradients of all rows.
    - **rounding** - the rounding error of the gradient of all data, which shifts the draws by as
      many posterior standard deviations at worst.
    - **halvings** - how often the pilot halved the step size.
    - **report** - the Stein matrix of the pilot with this step size.
    - **multimodal** - whether the searches for the centre ended in different modes.
    - **converged** - whether the search for the metric has converged; where the posterior is
      far from any Gaussian it does not.
    - **data** - tells the data of the anchor from others.
    - **densities** - log density of each site at fixed values, which tells the model from others.
    - **steps_per_sample** - number of steps after which a chain has forgotten most of where it
      was, with a step size that was tuned; else 1.
    - **seconds_per_sample** - what that takes, measured where these steps are many.
    - **strata** - of the rows by plate, or their probabilities, where rows are not drawn alike.
    - **fourth_cumulant** - of the gradient's noise, what rows that few minibatches have add to it
      in the worst direction, or a bound of it (:mod:`numpyro_sgmcmc.tuning.rare_rows`).
    """

    step_size: float
    friction: float | None
    metric: Metric
    start: DiagonalMetric | DenseMetric | None = None
    anchor: Anchor | None = None
    noise: NoiseLevel | None = None
    plain_noise: NoiseLevel | None = None
    passes: dict[str, float] = {}
    rounding: float = 0.0
    halvings: int = 0
    report: SteinReport | None = None
    multimodal: bool = False
    converged: bool = True
    data: str | None = None
    densities: dict[str, float] = {}
    steps_per_sample: int = 1
    seconds_per_sample: float = 0.0
    strata: dict[str, SamplingDesign] = {}
    fourth_cumulant: float = 0.0

    @property
    def width(self) -> float:
        """About the largest posterior standard deviation in the coordinates of the metric."""
        metric, start = self.metric, self.start
        if start is None or metric is start:
            return 1.0
        normal = random.normal(random.key(0), (100, *start.center.shape), start.center.dtype)
        coordinates = jax.vmap(lambda x: metric.coordinates(start.values(x)))(normal)
        return float(jnp.std(coordinates, axis=0).max())

    @property
    def relaxation_time(self) -> float:
        """
        The time in which a chain forgets where it was: :math:`w^2` if the posterior is :math:`w`
        wide in the coordinates of the metric, and with momentum and friction :math:`A` the larger
        one of :math:`A w^2` and :math:`2 w`.

        **Example:** in the posterior's own metric little friction leaves a chain to its inertia.

        .. doctest::

            >>> from numpyro_sgmcmc.target.metric import IdentityMetric
            >>> from numpyro_sgmcmc.tuning.tuning import Tuning
            >>> [Tuning(0.5, A, IdentityMetric()).relaxation_time for A in (None, 0.7, 5.0)]
            [1.0, 2.0, 5.0]
        """
        width = self.width
        return width**2 if self.friction is None else max(2 * width, self.friction * width**2)

    @property
    def is_far_from_gaussian(self) -> bool:
        """Whether the metric is no more than a rough guess."""
        if self.noise is None or not isinstance(self.start, DenseMetric):
            return False  # a Gaussian of independent coordinates says little about others
        return self.noise.nonlinearity > _FAR_FROM_GAUSSIAN or not self.converged

    @property
    def rare_rows_error(self) -> float:
        """How wrong rows that few minibatches have make standard deviations, at worst about."""
        if self.noise is None:
            return 0.0
        rates = self.step_size, self.friction
        return error_of(self.fourth_cumulant, self.noise.nonlinearity, *rates)

    @property
    def has_rare_rows(self) -> bool:
        """Whether minibatches have rows that count much too seldom."""
        return self.rare_rows_error > MUCH_ERROR

    @property
    def needs_double_precision(self) -> bool:
        """Whether rounding errors of the gradient are large enough to be seen in the draws."""
        return self.rounding > _MUCH_ROUNDING

    @property
    def problem(self) -> str | None:
        """What was wrong with the pilot or the searches, or None."""
        found = ["the posterior has several modes"] if self.multimodal else []
        found += ["the posterior is far from any Gaussian"] if self.is_far_from_gaussian else []
        found += ["the gradient is rounded off"] if self.needs_double_precision else []
        found += ["few minibatches have rows that count much"] if self.has_rare_rows else []
        pilot = None if self.report is None else self.report.problem()
        return "; ".join(found + ([pilot] if pilot else [])) or None

    def __str__(self) -> str:
        lines = [f"step size {self.step_size:.3g}"]
        if self.friction is not None:
            lines[0] += f", friction {self.friction:.3g}"
        if self.steps_per_sample > 1:
            lines[0] += f", {self.steps_per_sample} steps per sample"
        lines[0] += f", {type(self.metric).__name__.removesuffix('Metric').lower()} metric"
        if self.noise is not None and self.plain_noise is not None:
            kind = "a control variate" if self.anchor is not None else "plain minibatches"
            lines.append(
                f"noise variance {self.noise.mean:.3g} with {kind}, {self.plain_noise.mean:.3g} of"
                " plain minibatches (in units of the curvature)"
            )
        if self.seconds_per_sample:
            lines.append(f"{self.seconds_per_sample:.2g} s for each independent draw of a chain")
        if self.passes:
            phases = ", ".join(f"{name} {cost:.3g}" for name, cost in self.passes.items())
            lines.append(f"{sum(self.passes.values()):.3g} passes over the data: {phases}")
        if self.report is not None:
            lines.append(f"pilot: {self.report.problem() or self.report.summary()}")
        if self.is_far_from_gaussian:
            lines.append("far from any Gaussian: slow directions may remain")
        if self.multimodal:
            lines.append("several modes, of which the chains see one")
        designs = self.strata.items()
        lines += [f"{design.kind} of '{name}': {design}" for name, design in designs]
        if self.has_rare_rows:
            lines.append(f"rows that few minibatches have: {_about(self.rare_rows_error)}")
        if self.needs_double_precision:
            lines.append(f"rounding errors of {self.rounding:.2g} standard deviations")
        return "\n".join(lines)


class Choices(NamedTuple):
    """
    What is to be found, and what is given.

    - **step_size**, **friction** - given values, or None.
    - **metric** - a given metric, ``"diagonal"``, ``"dense"``, or None for what suits the
      number of parameters.
    - **gradient** - ``"auto"``, ``"minibatch"`` or ``"control_variate"``.
    - **init_strategy** - where the search for the centre starts.
    - **strata** - numbers of strata by plate, ``"auto"``, or None.
    """

    step_size: float | None
    friction: float | None
    metric: Metric | str | None
    gradient: str
    init_strategy: Callable
    strata: Mapping[str, np.ndarray] | str | None = "auto"


#: From the noise of the gradient to step size and friction (None if the method has none).
Suggestion = Callable[[NoiseLevel], tuple[float, float | None]]

#: From a tuning, without a report, to a function that runs short chains with a step size, a
#: number of steps and a key.
Pilot = Callable[[Tuning], Callable[[float, int, Array], SteinSums]]


def find_tuning(
    target: Target,
    rng_key: Array,
    choices: Choices,
    suggest: Suggestion | None,
    pilot: Pilot,
    report: Callable[[str], None] = lambda phase: None,
) -> Tuning:
    """
    All phases, one after the other.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param choices: what is to be found.
    :param suggest: the method's step size and friction for a level of noise; None if both are
        given.
    :param pilot: how to run the method.
    :param report: is told the name of each phase when it begins.
    """
    keys = (random.fold_in(rng_key, k) for k in range(5))
    center_key, metric_key, noise_key, pilot_key, rare_key = keys
    passes: dict[str, float] = {}
    report("centre")
    is_dense = target.view.dimension <= DENSE_BY_DEFAULT or choices.metric == "dense"
    find = search_center if is_dense else find_center
    gaussian = find(target, center_key, choices.init_strategy)
    passes["centre"], multimodal = gaussian.passes, gaussian.multimodal
    if is_dense:
        report("metric")
        gaussian = find_metric(target, metric_key, gaussian)
        passes["metric"] = gaussian.passes
    metric = _chosen(choices.metric, gaussian.metric)
    report("noise")
    controls = choices.gradient != "minibatch" and bool(target.view.plates)
    measured = measure_noise(target, noise_key, gaussian, metric, controls)
    plain, controlled, anchor, rounding, passes["noise"] = measured
    noise = plain
    if controlled is not None:
        if choices.gradient == "control_variate" or controlled.mean < plain.mean / 2:
            noise = controlled
        else:
            anchor = None
    step_size, friction = _rates(choices, suggest, noise)
    controls, rare = anchor is not None, RareRows()
    is_noisy = target.scheme.independent and any(target.factors.values())
    if is_noisy and target.shards is None:
        error = partial(
            error_of, nonlinearity=noise.nonlinearity, step_size=step_size, friction=friction
        )
        rare = find_rare_rows(target, rare_key, gaussian, metric, controls, choices.strata, error)
        passes["rare rows"] = rare.passes
    if rare.strata:
        target = target._replace(strata=rare.strata)
        measured = measure_noise(target, noise_key, gaussian, metric, controls)
        passes["noise"] += measured.passes
        noise = measured.controlled or measured.plain
        step_size, friction = _rates(choices, suggest, noise)
    tuning = Tuning(
        step_size,
        friction,
        metric,
        gaussian.metric,
        anchor,
        noise,
        plain,
        passes,
        rounding,
        multimodal=multimodal,
        converged=gaussian.converged,
        strata=rare.strata,
        fourth_cumulant=rare.fourth_cumulant,
    )
    if choices.step_size is not None:
        return tuning
    report("pilot")
    run = pilot(tuning)
    cost = PILOT_CHAINS * (1 if anchor is None else 2) * target.minibatch_share
    width = tuning.width
    passes["pilot"] = 0.0
    reports: list[SteinReport] = []
    for halvings in range(_HALVINGS + 1):
        step_size = tuning.step_size / 2**halvings
        steps, is_long_enough = pilot_steps(noise, step_size / width)
        found = stein_report(run(step_size, steps, random.fold_in(pilot_key, halvings)))
        passes["pilot"] += steps * cost
        if found is None or found.problem() is None:
            return tuning._replace(step_size=step_size, halvings=halvings, report=found)
        reports.append(found)
        if not is_long_enough or (halvings >= 2 and _is_no_better(found, reports[0])):
            break
    # whatever is wrong, it is not the step size
    return tuning._replace(report=reports[0])


def _rates(
    choices: Choices, suggest: Suggestion | None, noise: NoiseLevel
) -> tuple[float, float | None]:
    """Step size and friction: those given, and what a level of noise asks for."""
    step_size, friction = choices.step_size, choices.friction
    if suggest is not None:
        suggested = suggest(noise)
        step_size, friction = step_size or suggested[0], friction or suggested[1]
    assert step_size is not None
    return step_size, friction


def _is_no_better(found: SteinReport, first: SteinReport) -> bool:
    """Whether steps of a quarter of the length or less have left a wrong temperature wrong."""
    before, now = abs(first.temperature - 1), abs(found.temperature - 1)
    return before > 3 * first.error and now > 0.75 * before


def pilot_steps(noise: NoiseLevel, step_size: float) -> tuple[int, bool]:
    """
    The steps of each chain of a pilot: independent draws take more of them where there is more
    noise and where they are short.

    :param noise: the noise of the gradient.
    :param float step_size: in units of the largest posterior standard deviation.
    :return: their number, and whether they are enough for a verdict.
    """
    needed = _PILOT_TIME / step_size
    fewest = _PILOT_STEPS * min(max(1.0, noise.mean / 4), 10.0)
    return int(min(max(fewest, needed), _MOST_PILOT_STEPS)), needed <= _MOST_PILOT_STEPS


@contextmanager
def tuning_bar(shown: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar of the phases, which disappears when they are done."""
    # as NumPyro's own
    hidden = not shown or "CI" in os.environ or "PYTEST_XDIST_WORKER" in os.environ
    with tqdm(total=len(PHASES), desc="tuning", leave=False, disable=hidden) as bar:

        def report(phase: str) -> None:
            bar.set_description(f"tuning: {phase}")
            bar.n = PHASES.index(phase)
            bar.refresh()

        yield report


def warn_of(tuning: Tuning) -> None:
    """Says what the tuning has found to be wrong."""
    if tuning.multimodal:
        warnings.warn(
            "The posterior has several modes (searches from different starts ended in"
            " different ones, with a barrier between): the chains will see one of them. Break a"
            " symmetry of the model, or take the draws for predictions only.",
            stacklevel=3,
        )
    if tuning.is_far_from_gaussian:
        warnings.warn(
            "The posterior is far from any Gaussian, and no metric fits it. Chains may be slow"
            " in directions that a short run does not show: compare several long ones, and"
            " reparametrise the model (a centred or a non-centred hierarchy) if they differ.",
            stacklevel=3,
        )
    if tuning.needs_double_precision:
        warnings.warn(
            f"Rounding errors of the gradient are as large as {tuning.rounding:.2g} posterior"
            " standard deviations in the worst coordinate, and the draws may be off by as much."
            " Use double precision: call `numpyro.enable_x64()` before anything else.",
            stacklevel=3,
        )
    if tuning.has_rare_rows:
        warnings.warn(
            "Some parameters are known from a few rows only, those of a small group or with a rare"
            " feature, and most minibatches have none of them: their standard deviations are wrong"
            f" by {_about(tuning.rare_rows_error)}, which no correction of the noise removes. Use"
            " strata (`strata='auto'`, with subsampling='without_replacement' and an estimate of"
            " the noise from sub-batches), or a larger `subsample_size`.",
            stacklevel=3,
        )
    if tuning.report is not None and (problem := tuning.report.problem()):
        warnings.warn(f"After tuning: {advice(problem)}", stacklevel=3)


def _about(error: float) -> str:
    """An error of first order, which means little where it is large."""
    return f"about {error:.0%}" if error < 0.2 else "20% or more"


def _chosen(metric: Metric | str | None, found: DiagonalMetric | DenseMetric) -> Metric:
    """The metric with the centre that was found."""
    if metric == "diagonal" and isinstance(found, DenseMetric):
        # the marginal standard deviations
        return DiagonalMetric(found.center, jnp.sqrt(jnp.sum(found.factor**2, axis=1)))
    if metric is None or isinstance(metric, str):
        return found
    return metric if isinstance(metric, IdentityMetric) else metric._replace(center=found.center)
