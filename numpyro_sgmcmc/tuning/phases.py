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

   Above 500 parameters step 1 is stochastic variational inference with NumPyro's
   ``AutoDiagonalNormal`` guide on minibatches
   (:func:`~numpyro_sgmcmc.tuning.variational.find_center`). Above 2,000 step 2 finds no full matrix
   but the directions that its variances miss
   (:func:`~numpyro_sgmcmc.tuning.low_rank.find_low_rank`), and above 20,000 there is none.

   Between the two the **coordinates** of hierarchies are chosen
   (:func:`~numpyro_sgmcmc.tuning.find_reparam.find_centring`): the search is in non-centred ones,
   what follows in those between non-centred and centred that fit.

3. **Noise** (:func:`~numpyro_sgmcmc.tuning.noise_level.measure_noise`): the variance of the
   gradient's noise in the coordinates of the metric at draws of :math:`q`, with and without a
   control variate, of second order too where that could pay; the nonlinearity and the rounding
   error of the gradient; and the largest eigenvalue of the Hessian
   (:func:`~numpyro_sgmcmc.tuning.curvature.find_curvature`).
4. **Step size and friction**: what the method says these numbers ask for.
5. **Rare rows** (:mod:`~numpyro_sgmcmc.tuning.rare_rows`): rows that few minibatches have and
   that count much in those; strata if they would make the draws wrong, and steps 3 and 4 again.
6. **Pilot** (:func:`~numpyro_sgmcmc.tuning.pilot.run_pilot`): short chains, whose Stein matrix
   (:mod:`numpyro_sgmcmc.stein`) must be the identity; if it is not, the step size is halved and
   the pilot repeated. If that does not help, the step size was not what is wrong, and is kept.
   Chains that do not agree (:func:`~numpyro_sgmcmc.tuning.pilot_rhat.r_hats`) are run up to 32
   times as long.

Of more than a million rows on disk, or over devices, steps 1 to 3 look at a sample, and all rows
are read twice, for the gradient at its centre and for the anchor near their mode
(:mod:`~numpyro_sgmcmc.tuning.subsample`).

**Example:** phases 1 to 4, one by one.

.. doctest::

    >>> import jax
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import init_to_uniform
    >>> from numpyro_sgmcmc import CCAdL
    >>> from numpyro_sgmcmc.tuning.center import search_center
    >>> from numpyro_sgmcmc.tuning.gaussian import find_metric
    >>> from numpyro_sgmcmc.posterior.model import read_model
    >>> from numpyro_sgmcmc.tuning.noise_level import measure_noise
    >>> from numpyro_sgmcmc.posterior.target import Target

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
from typing import NamedTuple

from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.row_numbers import needs_64_bits
from numpyro_sgmcmc.posterior.control_variate import (
    GRADIENTS,
    Anchor,
    order_of,
)
from numpyro_sgmcmc.posterior.handlers import Plate
from numpyro_sgmcmc.posterior.metric import (
    DenseMetric,
    DiagonalMetric,
    GaussianMetric,
    IdentityMetric,
    Metric,
)
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.center import prepare_center, search_center
from numpyro_sgmcmc.tuning.find_reparam import find_centring, non_centred
from numpyro_sgmcmc.tuning.gaussian import Gaussian, find_metric, prepare_metric
from numpyro_sgmcmc.tuning.low_rank import find_low_rank
from numpyro_sgmcmc.tuning.noise_level import (
    NoiseLevel,
    measure_noise,
    noise_with,
    prepare_noise,
)
from numpyro_sgmcmc.tuning.pilot import Pilot, run_pilot, site_of
from numpyro_sgmcmc.tuning.progress import bar
from numpyro_sgmcmc.tuning.quadrature_error import rule_of_steps
from numpyro_sgmcmc.tuning.rare_rows import TOLERABLE, error_of, find_rare_rows
from numpyro_sgmcmc.tuning.subsample import near_the_mode, point_at, sample_of, share_of
from numpyro_sgmcmc.tuning.tuning import Tuning
from numpyro_sgmcmc.tuning.variational import find_center

#: Where a posterior is, is found by Newton's method up to so many parameters, and the metric is a
#: full matrix up to so many, one of low rank up to so many, and diagonal above.
NEWTON, DENSE_BY_DEFAULT, LOW_RANK_BY_DEFAULT = 500, 2_000, 20_000

#: A step with a control variate of second order takes at most so many times as long as with one of
#: first order.
_DEARER = 2.0

#: In the order in which they come.
PHASES = ("centre", "metric", "noise", "pilot")


class TuningRequest(NamedTuple):
    """
    What is to be found, and what is given.

    - **step_size**, **friction** - given values, or None.
    - **metric** - a given metric, ``"diagonal"``, ``"low_rank"``, ``"dense"``, or None for what
      suits the number of parameters.
    - **gradient** - ``"auto"``, or one of
      :data:`~numpyro_sgmcmc.posterior.control_variate.GRADIENTS`.
    - **init_strategy** - where the search for the centre starts.
    - **strata** - numbers of strata by plate, ``"auto"``, or None.
    - **reparametrise** - whether hierarchies are sampled in coordinates of their own.
    """

    step_size: float | None
    friction: float | None
    metric: Metric | str | None
    gradient: str
    init_strategy: Callable
    strata: Mapping[str, np.ndarray] | str | None = "auto"
    reparametrise: bool = True


#: From the noise of the gradient to step size and friction (None if the method has none).
Suggestion = Callable[[NoiseLevel], tuple[float, float | None]]


def find_tuning(
    target: Target,
    rng_key: Array,
    choices: TuningRequest,
    suggest: Suggestion | None,
    pilot: Callable[[Tuning], Pilot],
    report: Callable[[str], None] = lambda phase: None,
    from_sample: bool = True,
) -> Tuning:
    """
    All phases, one after the other.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param choices: what is to be found.
    :param suggest: the method's step size and friction for a level of noise; None if both are
        given.
    :param pilot: from a tuning, without a report, to its pilot.
    :param report: is told the name of each phase when it begins.
    :param bool from_sample: whether a sample of the rows may do for what needs no more.
    """
    keys = (random.fold_in(rng_key, k) for k in range(5))
    center_key, metric_key, noise_key, pilot_key, rare_key = keys
    passes: dict[str, float] = {}
    report("centre")
    find = search_center if target.model.dimension <= NEWTON else find_center
    if choices.reparametrise:
        target = non_centred(target)
    target = target._replace(model=target.model.with_rule(target.model.search_rule))
    controls = choices.gradient != "minibatch" and bool(target.model.plates)
    shaped = _shape_of(choices.metric, target.model.dimension)
    sample = None
    if from_sample and find is search_center and shaped is find_metric:
        sample = sample_of(target) if choices.strata in (None, "auto") else None
    for plate in target.model.plates:
        if sample is None and needs_64_bits(plate.size):
            raise ValueError(_cannot_be_tuned(plate, from_sample))
    # what is looked at, and how many of its rows there are to a row
    seen, share = (target, 1.0) if sample is None else (sample, share_of(sample))
    _prepare(seen, choices, controls)
    gaussian = find(seen, center_key, choices.init_strategy)
    gaussian = gaussian._replace(part=share * gaussian.part)
    multimodal = gaussian.multimodal
    seen, gaussian = find_centring(seen, gaussian)
    passes["centre"] = share * gaussian.passes
    if shaped is not None:
        report("metric")
        gaussian = shaped(seen, metric_key, gaussian)
        passes["metric"] = share * gaussian.passes
        if isinstance(gaussian.metric, DenseMetric):
            # of all rows, and not of a part of them
            seen, gaussian = find_centring(seen, gaussian)
    target = target._replace(centring=seen.centring)
    if sample is not None:
        first = point_at(target, gaussian)
        gaussian = first.at_the_mode
        passes["all rows"] = 1.0
    metric = _chosen(choices.metric, gaussian.metric)
    report("noise")
    measured = measure_noise(seen, noise_key, gaussian, metric, controls)
    plain, controlled, anchor, rounding, cost, widest = measured
    passes["noise"] = share * cost
    noise = plain
    if controlled is not None:
        if choices.gradient != "auto" or controlled.mean < plain.mean / 2:
            noise = controlled
        else:
            anchor = None
    steps_with = partial(_steps, choices, suggest, metric, gaussian.metric)
    if anchor is not None and _may_be_expanded(seen, choices, steps_with, noise):
        further, level, cost = _expanded(seen, noise_key, gaussian, metric, anchor, noise)
        passes["noise"] += share * cost
        if choices.gradient != "auto" or steps_with(noise) > _DEARER * steps_with(level):
            anchor, noise = further, level
    if sample is not None:
        point, cost = near_the_mode(target, first, order_of(anchor))
        passes["all rows"] += cost
        if point is None:
            again = target, rng_key, choices, suggest, pilot, report
            found = find_tuning(*again, from_sample=False)
            spent = sum(passes.values())
            return found._replace(passes={"sample": spent} | found.passes)
        gaussian, anchor = point.at_the_mode, None if anchor is None else point.anchor
        metric = _chosen(choices.metric, gaussian.metric)
    rule, integrals, cost = rule_of_steps(target, rare_key, gaussian, anchor is not None)
    target = target._replace(model=target.model.with_rule(rule))
    passes["noise"] += cost
    step_size, friction = _rates(choices, suggest, noise)
    tuning = Tuning(
        step_size,
        friction,
        metric,
        gaussian.metric,
        anchor,
        noise,
        plain,
        rounding=rounding,
        multimodal=multimodal,
        converged=gaussian.converged,
        flat="" if gaussian.flat is None else site_of(target, gaussian.flat**2),
        centring=dict(target.centring),
        integrals=integrals,
        rule=rule,
    )
    if widest is not None:
        tuning = tuning._replace(
            widest=float(np.linalg.norm(widest)), slow=site_of(target, np.abs(widest))
        )
    if choices.step_size is None:
        # as it is if no rows prove to be rare
        pilot(tuning).prepare()
    is_noisy = target.scheme.independent and any(target.factors.values())
    if is_noisy and target.shards is None:
        longest, _ = _rates(choices, suggest, noise._replace(mean=0.0, largest=0.0))
        error = partial(
            error_of, nonlinearity=noise.nonlinearity, step_size=longest, friction=friction
        )
        order, strata = order_of(anchor), choices.strata
        at = rare_key, gaussian, metric, order
        if sample is not None:
            rare = find_rare_rows(seen, *at, None, error)
            passes["rare rows"] = share * rare.passes
        if sample is None or (strata is not None and error(rare.fourth_cumulant) > TOLERABLE):
            rare = find_rare_rows(target, *at, strata, error)
            passes["rare rows"] = passes.get("rare rows", 0.0) + rare.passes
        tuning = tuning._replace(strata=rare.strata, fourth_cumulant=rare.fourth_cumulant)
    if tuning.strata:
        target = target._replace(strata=tuning.strata)
        noise, cost = noise_with(target, noise_key, gaussian, metric, anchor, noise)
        passes["noise"] += cost
        step_size, friction = _rates(choices, suggest, noise)
        tuning = tuning._replace(step_size=step_size, friction=friction, noise=noise)
    tuning = tuning._replace(passes=passes)
    if choices.step_size is not None:
        return tuning
    report("pilot")
    return run_pilot(target, pilot_key, tuning, pilot(tuning))


def _cannot_be_tuned(plate: Plate, from_sample: bool) -> str:
    """What is said of more rows than can be looked at again and again."""
    cause = (
        "they are tuned from a sample, which takes one subsampled plate, at most"
        f" {NEWTON} parameters, a model in which a row says the same whatever other rows there"
        " are, and no `metric` or `strata` of your own"
        if from_sample
        else "the sample that they were to be tuned from is not like all of them, since few rows"
        " say something of a parameter. Leave it out, or give it a prior that says more"
    )
    return (
        f"Plate '{plate.name}' has {plate.size:,} rows, more than can be looked at again and"
        f" again: {cause}. Or give `step_size` and `gradient='minibatch'`."
    )


def _prepare(target: Target, choices: TuningRequest, controls: bool) -> None:
    """Compiles the search beside the tracing of what comes next, and that beside the search."""
    if target.model.dimension <= NEWTON:
        prepare_center(target)
    if _shape_of(choices.metric, target.model.dimension) is not find_metric:
        return
    prepare_metric(target)
    if choices.metric in (None, "dense"):
        dimension, dtype = target.model.dimension, target.model.dtype
        shapes = (dimension,), (dimension, dimension), (dimension, dimension)
        metric = DenseMetric(*(jnp.asarray(np.zeros(shape, dtype)) for shape in shapes))
        prepare_noise(target, metric, controls)


def _rates(
    choices: TuningRequest, suggest: Suggestion | None, noise: NoiseLevel
) -> tuple[float, float | None]:
    """Step size and friction: those given, and what a level of noise asks for."""
    step_size, friction = choices.step_size, choices.friction
    if suggest is not None:
        suggested = suggest(noise)
        step_size, friction = step_size or suggested[0], friction or suggested[1]
    assert step_size is not None
    return step_size, friction


def _steps(
    choices: TuningRequest,
    suggest: Suggestion | None,
    metric: Metric,
    start: GaussianMetric,
    noise: NoiseLevel,
) -> float:
    """After how many steps a chain forgets where it was, with a level of noise."""
    step_size, friction = _rates(choices, suggest, noise)
    return Tuning(step_size, friction, metric, start).relaxation_time / step_size


def _may_be_expanded(
    target: Target, choices: TuningRequest, steps: Callable[[NoiseLevel], float], noise: NoiseLevel
) -> bool:
    """
    Whether a control variate of second order is asked for, or could pay.

    :raises ValueError: if it is asked for, and there is none.
    """
    asked = choices.gradient == GRADIENTS[2]
    dimension, drawn = target.model.dimension, target.model.drawn_plates
    if drawn or dimension > DENSE_BY_DEFAULT:
        if not asked:
            return False
        reason = (
            f"integrals of plate '{drawn[0].name}' are drawn, whose second derivatives are noise"
            if drawn
            else f"the model has {dimension:,} parameters, and no more than {DENSE_BY_DEFAULT:,}"
            " are held as a matrix"
        )
        raise ValueError(
            f"gradient='{GRADIENTS[2]}' needs the Hessian of all data at the centre, but {reason}:"
            f" use gradient='{GRADIENTS[1]}'."
        )
    # with given rates there are as many steps with any noise
    without = noise._replace(mean=0.0, largest=0.0)
    return asked or (choices.gradient == "auto" and steps(noise) > _DEARER * steps(without))


def _expanded(
    target: Target,
    rng_key: Array,
    gaussian: Gaussian,
    metric: Metric,
    anchor: Anchor,
    noise: NoiseLevel,
) -> tuple[Anchor, NoiseLevel, float]:
    """The anchor with a Hessian, the level of noise with it, and the cost in passes."""
    further = target.compiled(partial(Target.anchor, order=2))(anchor.values)
    level, cost = noise_with(target, rng_key, gaussian, metric, further, noise)
    return further, level, cost + 2.0 * target.model.dimension


@contextmanager
def tuning_bar(shown: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar of the phases, which disappears when they are done."""
    with bar(shown, len(PHASES), "tuning") as seen:

        def report(phase: str) -> None:
            seen.set_description(f"tuning: {phase}")
            seen.n = PHASES.index(phase)
            seen.refresh()

        yield report


def _shape_of(metric: Metric | str | None, dimension: int) -> Callable | None:
    """What finds the Gaussian of a posterior, or None where it is that of the first search."""
    if metric == "dense" or (dimension <= DENSE_BY_DEFAULT and metric != "low_rank"):
        return find_metric
    if metric == "low_rank" or dimension <= LOW_RANK_BY_DEFAULT:
        return find_low_rank
    return None


def _chosen(metric: Metric | str | None, found: GaussianMetric) -> Metric:
    """The metric with the centre that was found."""
    if metric == "diagonal":
        # the marginal standard deviations
        return DiagonalMetric(found.center, jnp.sqrt(found.variances(found.center)))
    if metric is None or isinstance(metric, str):
        return found
    return metric if isinstance(metric, IdentityMetric) else metric._replace(center=found.center)
