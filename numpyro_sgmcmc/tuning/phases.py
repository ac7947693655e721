# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
From a model and its data to a centre, a metric, a control variate and a step size.

Tuning is done once, before the chains start, and is the same for all of them:

1. **Centre** (:func:`~numpyro_sgmcmc.tuning.center.search_center`): the Gaussian
   :math:`q = N(c, L L^\\top)` that minimises :math:`\\mathrm{E}_q[U] - \\log |\\det L|`, with
   :math:`U` of a part of the rows, by Newton steps; on few rows from several starts, then on
   more. Its centre exists also where the mode does not, as in hierarchical models, and units
   make no difference. Above 12 parameters a Gauss-Newton matrix stands in for the Hessian of the
   rows (:mod:`~numpyro_sgmcmc.tuning.gauss_newton`).
2. **Metric** (:func:`~numpyro_sgmcmc.tuning.gaussian.find_metric`): the same on all data.

   Above 500 parameters step 1 is stochastic variational inference with independent coordinates
   (:func:`~numpyro_sgmcmc.tuning.variational.find_center`). Above 2,000 step 2 finds no full matrix
   but the directions that its variances miss
   (:func:`~numpyro_sgmcmc.tuning.low_rank.find_low_rank`), and above 200,000 there is none.

   Between the two the **coordinates** of hierarchies are chosen
   (:func:`~numpyro_sgmcmc.tuning.find_reparam.find_centring`): the search is in non-centred ones,
   what follows in those between non-centred and centred that fit.

3. **Noise** (:func:`~numpyro_sgmcmc.tuning.noise_level.measure_noise`): the variance of the
   gradient's noise in the coordinates of the metric at draws of :math:`q`, with and without a
   control variate, of second order too where that could pay; the nonlinearity and the rounding
   error of the gradient; and the largest eigenvalue of the Hessian
   (:func:`~numpyro_sgmcmc.tuning.curvature.find_curvature`).
4. **Step size and friction**: what the method says these numbers ask for, with the smallest rule
   of integrals over groups that is good enough
   (:func:`~numpyro_sgmcmc.tuning.quadrature_error.rule_of_steps`).
5. **Rare rows** (:mod:`~numpyro_sgmcmc.tuning.rare_rows`): rows that few minibatches have and
   that count much in those; strata if they would make the draws wrong, and steps 3 and 4 again.
6. **Correlated noise** (:mod:`~numpyro_sgmcmc.tuning.correlated_noise`): for CCAdL above 500
   parameters, the errors of the draws from noise whose correlations are not estimated, and from
   gradients at wider positions; a shorter step if they are large.
7. **Pilot** (:func:`~numpyro_sgmcmc.tuning.pilot.run_pilot`): short chains, whose Stein matrix
   (:mod:`numpyro_sgmcmc.stein`) must be the identity; if it is not, the step size is halved and
   the pilot repeated. If that does not help, the step size was not what is wrong, and is kept.
   Chains that do not agree (:func:`~numpyro_sgmcmc.tuning.pilot_rhat.r_hats`) are run up to 32
   times as long, while this helps.

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
    >>> step_size, friction = CCAdL(model).method.suggest(noise.controlled)
    >>> print(f"step size {step_size:.1f}, friction {friction:.1f}")
    step size 1.0, friction 0.7
"""

from collections.abc import Callable
from functools import partial
import math
import warnings

from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.row_numbers import needs_64_bits
from numpyro_sgmcmc.posterior.control_variate import order_of
from numpyro_sgmcmc.posterior.coordinates import mixtures_of, with_degree
from numpyro_sgmcmc.posterior.handlers import Plate
from numpyro_sgmcmc.posterior.metric import DenseMetric, GaussianMetric, IdentityMetric, Metric
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.center import search_center, search_errors, search_near
from numpyro_sgmcmc.tuning.correlated_noise import error_of_correlations
from numpyro_sgmcmc.tuning.expansion import DEARER, expanded, worth_of_expansion
from numpyro_sgmcmc.tuning.find_reparam import find_centring, non_centred
from numpyro_sgmcmc.tuning.gaussian import Gaussian, find_metric
from numpyro_sgmcmc.tuning.metric_choice import (
    NEWTON,
    chosen_metric,
    metric_search,
    prepare_search,
)
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel, measure_noise, noise_with, reach_of
from numpyro_sgmcmc.tuning.pilot import Pilot, run_pilot, site_of
from numpyro_sgmcmc.tuning.quadrature_error import rule_of_steps
from numpyro_sgmcmc.tuning.rare_rows import TOLERABLE, error_of, find_rare_rows
from numpyro_sgmcmc.tuning.request import Known, Search, Suggestion, TuningRequest
from numpyro_sgmcmc.tuning.subsample import near_the_mode, point_at, sample_of, share_of
from numpyro_sgmcmc.tuning.tuning import Tuning
from numpyro_sgmcmc.tuning.variational import find_center

#: Gradients of NUTS's warm-up, of 1,000 trees with ten steps each, and the most rows for which
#: they take less time than so many passes of the tuning.
_PASSES_OF_NUTS, _ROWS_OF_NUTS = 10_000.0, 10_000


class _UnlikeItsSample(Exception):
    """The sample of the rows has led elsewhere than all rows do."""


def run_phases(
    target: Target,
    rng_key: Array,
    request: TuningRequest,
    suggest: Suggestion | None,
    pilot: Callable[[Tuning], Pilot],
    report: Callable[[str, float], None] = lambda phase, spent: None,
) -> Tuning:
    """
    All phases, one after the other; again without a sample of the rows if that misleads.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param request: what is to be found.
    :param suggest: as of :class:`Search`.
    :param pilot: as of :class:`Search`.
    :param report: as of :class:`Search`.
    """
    search = Search(request, suggest, pilot, report, rng_key)
    known = _begin(search, target)
    try:
        for phase in _PHASES:
            known = phase(search, known)
    except _UnlikeItsSample as unlike:
        search = search._replace(from_sample=False)
        known = _begin(search, target)
        for phase in _PHASES:
            known = phase(search, known)
        return known.tuning._replace(passes={"sample": unlike.args[0]} | known.tuning.passes)
    return known.tuning


def _begin(search: Search, target: Target) -> Known:
    """
    The rows that are looked at, in coordinates in which hierarchies have no funnels.

    :raises ValueError: if there are too many rows to be looked at again and again.
    """
    request, dimension = search.request, target.model.dimension
    search.report("centre", 0.0)
    if request.reparametrise:
        target = non_centred(target)
    target = target._replace(model=target.model.with_rule(target.model.search_rule))
    is_small = dimension <= NEWTON and metric_search(request.metric, dimension) is find_metric
    sample = None
    if search.from_sample and is_small:
        sample = sample_of(target) if request.strata in (None, "auto") else None
    for plate in target.model.plates:
        if sample is None and needs_64_bits(plate.size):
            raise ValueError(_cannot_be_tuned(plate, search.from_sample))
    if sample is None:
        return Known(target, target, 1.0, {})
    return Known(target, sample, share_of(sample), {}, is_sample=True)


def _find_center(search: Search, known: Known) -> Known:
    """The centre, and the coordinates of hierarchies."""
    seen, request = known.seen, search.request
    prepare_search(seen, request, _controls(search, known))
    find: Callable[..., Gaussian]
    at, gaussian, find = seen, None, search_center
    if seen.model.dimension > NEWTON:
        # effects are independent given their scale, as variational inference takes them to be
        find, at = find_center, seen._replace(centring=with_degree(seen.centring, 1.0))
    elif (near := request.near) is not None and isinstance(near.start, DenseMetric):
        there = seen._replace(centring=near.centring)
        gaussian = search_near(there, search.key(0), near.start)
        known = known.after("centre", known.share * gaussian.passes)
        if gaussian.converged:
            at, gaussian = there, gaussian._replace(multimodal=near.multimodal, passes=0.0)
        else:
            gaussian = None
    if gaussian is None and find is search_center and mixtures_of(at.centring):
        at, begin, cost = search_errors(at, search.key(0), request.init_strategy)
        known = known.after("centre", known.share * cost)
        gaussian = search_center(at, search.key(0), request.init_strategy, begin)
    if gaussian is None:
        gaussian = find(at, search.key(0), request.init_strategy)
    gaussian = gaussian._replace(part=known.share * gaussian.part)
    known = known._replace(
        tuning=Tuning(1.0, None, IdentityMetric(), multimodal=gaussian.multimodal)
    )
    seen, gaussian = find_centring(at, gaussian)
    return known.after("centre", known.share * gaussian.passes, seen=seen, gaussian=gaussian)


def _find_shape(search: Search, known: Known) -> Known:
    """The metric: a matrix, a low rank, or the variances of the first search."""
    seen, gaussian = known.seen, known.gaussian
    shaped = metric_search(search.request.metric, seen.model.dimension)
    if shaped is not None:
        search.report("metric", known.spent)
        gaussian = shaped(seen, search.key(1), gaussian)
        known = known.after("metric", known.share * gaussian.passes)
        if isinstance(gaussian.metric, DenseMetric):
            # of all rows, and not of a part of them
            seen, gaussian = find_centring(seen, gaussian)
    target = known.target._replace(centring=seen.centring)
    known = known._replace(target=target, seen=seen, gaussian=gaussian)
    if known.is_sample:
        first = point_at(target, gaussian)
        known = known.after("all rows", 1.0, first=first, gaussian=first.at_the_mode)
    return known._replace(metric=chosen_metric(search.request.metric, known.gaussian.metric))


def _compare_with_nuts(search: Search, known: Known) -> Known:
    """Warn that NUTS is likely to be quicker, where few rows have taken many passes."""
    model = known.target.model
    rows = max((plate.size * known.target.parts for plate in model.plates), default=0)
    # a group may have any number of rows
    has_groups = any(plate.is_group for plate in model.plates)
    if known.spent > _PASSES_OF_NUTS and 0 < rows <= _ROWS_OF_NUTS and not has_groups:
        warnings.warn(
            f"NUTS is likely to be quicker here: the tuning has taken {known.spent:,.0f} passes"
            f" over {rows:,} rows, about a hundred are usual, and it goes on. For"
            f" {_ROWS_OF_NUTS:,} rows or fewer use `NUTS(full_data(model))`.",
            stacklevel=2,
        )
    return known


def _find_noise(search: Search, known: Known) -> Known:
    """The noise of the gradient, and whether a control variate takes it out."""
    request = search.request
    search.report("noise", known.spent)
    at = known.gaussian, known.metric, _controls(search, known)
    measured = measure_noise(known.seen, search.key(2), *at)
    plain, controlled, anchor, rounding, cost, widest = measured
    noise = plain
    if controlled is not None:
        if request.gradient != "auto" or controlled.mean < plain.mean / 2:
            noise = controlled
        else:
            anchor = None
    tuning = known.tuning._replace(plain_noise=plain, rounding=rounding)
    if widest is not None:
        slow = site_of(known.target, np.abs(widest))
        tuning = tuning._replace(widest=float(np.linalg.norm(widest)), slow=slow)
    found = {"noise": noise, "anchor": anchor, "tuning": tuning}
    return known.after("noise", known.share * cost, **found)


def _find_expansion(search: Search, known: Known) -> Known:
    """A control variate of second order, where it is asked for or pays."""
    request, noise, anchor = search.request, known.noise, known.anchor
    steps_with = partial(_steps, search, known.metric, known.gaussian.metric)
    if anchor is None:
        return known
    worth = worth_of_expansion(known.seen, request.gradient, steps_with, noise)
    if known.is_sample and worth <= 2 * known.seen.model.dimension:
        return known  # the Hessian of all rows is still to come, column by column
    further, cost = expanded(known.seen, anchor, worth)
    if further is not None:
        at = search.key(2), known.gaussian, known.metric, further, noise
        level, more = noise_with(known.seen, *at)
        cost += more
        if request.gradient != "auto" or steps_with(noise) > DEARER * steps_with(level):
            anchor, noise = further, level
    return known.after("noise", known.share * cost, anchor=anchor, noise=noise)


def _find_mode_of_all_rows(search: Search, known: Known) -> Known:
    """
    The centre and the anchor of all rows, after a search on a sample.

    :raises _UnlikeItsSample: if the sample has led elsewhere.
    """
    if not known.is_sample:
        return known
    point, cost = near_the_mode(known.target, known.first, order_of(known.anchor))
    known = known.after("all rows", cost)
    if point is None:
        raise _UnlikeItsSample(known.spent)
    return known._replace(
        gaussian=point.at_the_mode,
        anchor=None if known.anchor is None else point.anchor,
        metric=chosen_metric(search.request.metric, point.at_the_mode.metric),
    )


def _find_rates(search: Search, known: Known) -> Known:
    """The integrals over latent variables of groups, the step size and the friction."""
    gaussian, anchor, noise = known.gaussian, known.anchor, known.noise
    # the reach is a distance in standard deviations, which other metrics do not have
    if anchor is not None and known.metric is gaussian.metric:
        plain = known.tuning.plain_noise
        far = reach_of(known.target.model.dimension, order_of(anchor), plain, noise)
        anchor = anchor._replace(reach=None if far is None else jnp.asarray(far))
    at = search.key(4), gaussian, anchor is not None
    rule, integrals, cost = rule_of_steps(known.target, *at)
    target = known.target._replace(model=known.target.model.with_rule(rule))
    if rule == "few" and target.model.drawn_plates:
        # fewer draws have more noise
        noise, more = noise_with(target, search.key(2), gaussian, known.metric, anchor, noise)
        cost += more
    step_size, friction = search.rates(noise)
    tuning = known.tuning._replace(
        step_size=step_size,
        friction=friction,
        metric=known.metric,
        start=gaussian.metric,
        anchor=anchor,
        noise=noise,
        converged=gaussian.converged,
        flat="" if gaussian.flat is None else site_of(target, gaussian.flat**2),
        centring=dict(target.centring),
        integrals=integrals,
        rule=rule,
    )
    if search.request.step_size is None:
        # as it is if no rows prove to be rare
        search.pilot(tuning).prepare()
    return known.after("noise", cost, target=target, noise=noise, tuning=tuning)


def _find_strata(search: Search, known: Known) -> Known:
    """Rows that few minibatches have, and strata where they would make the draws wrong."""
    target, gaussian, noise = known.target, known.gaussian, known.noise
    is_noisy = target.scheme.independent and any(target.factors.values())
    if not is_noisy or target.shards is not None:
        return known
    longest, _ = search.rates(noise.times(0.0))
    error = partial(
        error_of,
        nonlinearity=noise.nonlinearity,
        step_size=longest,
        friction=known.tuning.friction,
    )
    strata = search.request.strata
    at = search.key(4), gaussian, known.metric, order_of(known.anchor)
    if known.is_sample:
        rare = find_rare_rows(known.seen, *at, None, error)
        known = known.after("rare rows", known.share * rare.passes)
    if not known.is_sample or (strata is not None and error(rare.fourth_cumulant) > TOLERABLE):
        rare = find_rare_rows(target, *at, strata, error)
        known = known.after("rare rows", rare.passes)
    tuning = known.tuning._replace(strata=rare.strata, fourth_cumulant=rare.fourth_cumulant)
    if not tuning.strata:
        return known._replace(tuning=tuning)
    target = target._replace(strata=tuning.strata)
    at_anchor = gaussian, known.metric, known.anchor, noise
    noise, cost = noise_with(target, search.key(2), *at_anchor)
    step_size, friction = search.rates(noise)
    tuning = tuning._replace(step_size=step_size, friction=friction, noise=noise)
    return known.after("noise", cost, target=target, noise=noise, tuning=tuning)


def _find_correlations(search: Search, known: Known) -> Known:
    """Correlations of the noise between more parameters than an estimate of it shows."""
    target, noise = known.target, known.noise
    limit, _ = search.rates(noise._replace(correlated=math.inf, widened=math.inf))
    if target.model.dimension <= NEWTON or limit >= known.tuning.step_size:
        return known
    error, widened, cost = error_of_correlations(target, search.key(5), known.tuning)
    noise = noise._replace(correlated=error, widened=widened)
    step_size, _ = search.rates(noise)
    tuning = known.tuning._replace(step_size=step_size, noise=noise)
    return known.after("noise", cost, noise=noise, tuning=tuning)


def _fly(search: Search, known: Known) -> Known:
    """Short chains with the step size that was found, where it was not given."""
    tuning = known.tuning._replace(passes=known.passes)
    if search.request.step_size is None:
        search.report("pilot", known.spent)
        tuning = run_pilot(known.target, search.key(3), tuning, search.pilot(tuning))
    return known._replace(tuning=tuning)


#: In the order in which they are run.
_PHASES = (
    _find_center,
    _find_shape,
    _compare_with_nuts,
    _find_noise,
    _find_expansion,
    _find_mode_of_all_rows,
    _find_rates,
    _find_strata,
    _find_correlations,
    _fly,
)


def _controls(search: Search, known: Known) -> bool:
    """True if the tuning looks at a control variate."""
    return search.request.gradient != "minibatch" and bool(known.seen.model.plates)


def _cannot_be_tuned(plate: Plate, from_sample: bool) -> str:
    """The message for more rows than can be looked at again and again."""
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


def _steps(search: Search, metric: Metric, start: GaussianMetric, noise: NoiseLevel) -> float:
    """The number of steps in which a chain forgets where it was, with a level of noise."""
    step_size, friction = search.rates(noise)
    return Tuning(step_size, friction, metric, start).relaxation_time / step_size
