# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Calibrated intervals, which cover even if the model is wrong."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax import Array
import numpy as np
from numpyro.infer import MCMC
import pandas as pd
from scipy import stats

from numpyro_sgmcmc.data.converters import MOST_OF_64_BITS, array, whole
from numpyro_sgmcmc.diagnostics._posterior_score import (
    check_draws,
    checked_target,
    constrained,
    labels_and_sites,
    positions_of,
)
from numpyro_sgmcmc.diagnostics._sandwich import RARE, Sandwich, sandwich_of
from numpyro_sgmcmc.diagnostics.runs import as_data, draws_of, flat_draws, printed
from numpyro_sgmcmc.posterior.numpyro_private import view_of
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.results.cycle_draws import kept_draws
from numpyro_sgmcmc.results.row_subset import site_shapes
from numpyro_sgmcmc.results.run_data import arguments_of

#: The most clusters for rows without clusters. More rows are summed, because sums of independent
#: rows are as informative.
_MOST_CLUSTERS = 50_000

#: Fewest draws for an interval.
_FEWEST = 100

#: p value below which rows contradict the prior.
_CONTRADICTION = 1e-6

#: Difference of a ratio of standard deviations from 1 that the verdict mentions.
_WORTH = 0.05

#: A value for each row, as an array or by plate.
_OfRows = Array | np.ndarray | Mapping[str, Any]


@printed
class Calibrated(NamedTuple):
    """
    A run with its draws stretched to intervals that cover.

    - **mcmc** - a copy of the run with these draws, for
      :func:`~numpyro_sgmcmc.to_arviz`, ``Predictive``,
      :func:`~numpyro_sgmcmc.local_draws`, ``print_summary()``; it cannot be run.
    - **run** - the original run.
    - **table** - for each entry of each variable ``sd``, ``calibrated_sd``, their ``ratio``, and
      its standard error ``ratio_error``.
    - **statistic**, **degrees**, **p_value** - results of the test that rows vary as the model
      says.
    - **clusters** - number of clusters, each of which counts as one independent observation.
    - **of_rows** - whether each row is its own cluster.
    """

    mcmc: MCMC
    run: MCMC
    table: pd.DataFrame
    statistic: float
    degrees: int
    p_value: float
    clusters: int
    of_rows: bool

    @property
    def verdict(self) -> str:
        """The verdict of the test and the table, in words."""
        what = "rows" if self.of_rows else "clusters"
        ratio, error = self.table["ratio"], self.table["ratio_error"]
        p = "p < 0.001" if self.p_value < 0.001 else f"p = {self.p_value:.2g}"
        said = (
            f"The {what} vary as the model says ({p})"
            if self.p_value > RARE
            else f"The {what} do not vary as the model says ({p})"
        )
        for name, is_so in (
            ("narrow", ratio - 2 * error > 1 + _WORTH),
            ("wide", ratio + 2 * error < 1 - _WORTH),
        ):
            if is_so.any():
                seen = ratio.where(is_so)
                worst = seen.idxmax() if name == "narrow" else seen.idxmin()
                said += (
                    f"; intervals of {is_so.sum()} of {len(ratio)} are too {name}, the most that"
                    f" of '{worst}', by a factor of {ratio[worst]:.2f} +- {error[worst]:.2f}"
                )
        if "; " not in said:
            said += ", and no interval is wrong by more than is known of it"
        return f"{said}."

    @property
    def _lines(self) -> list[str]:
        return [self.verdict]


def calibrated(
    mcmc: MCMC,
    clusters: _OfRows | None = None,
    weights: _OfRows | None = None,
    *,
    population: int | None = None,
) -> Calibrated:
    """
    Stretch the draws of a run to intervals that cover even if the model is wrong.

    The posterior of a wrong model has the wrong width. It counts each row as one independent
    observation that varies as the likelihood says. The true variance of an estimate, from one data
    set to another, is the sandwich

    .. math:: J^{-1} (I + J_0) J^{-1}, \\qquad J = \\nabla^2 U(\\hat\\theta), \\qquad
        I = \\sum_g \\Big( \\sum_{i \\in g} w_i \\nabla \\ell_i(\\hat\\theta) \\Big)
            \\Big( \\sum_{i \\in g} w_i \\nabla \\ell_i(\\hat\\theta) \\Big)^\\top ,

    with independent clusters :math:`g` of rows (single rows by default), and the factor :math:`G /
    (G - 1) \\cdot (N - 1) / (N - d)` for few clusters. The curvature :math:`J_0` of the prior
    counts as if it came from data, so that parameters that only the prior knows keep their width.
    The draws are mapped, in unconstrained space, by

    .. math:: \\theta' = \\hat\\theta + A (\\theta - \\hat\\theta), \\qquad
        A J^{-1} A^\\top = J^{-1} (I + J_0) J^{-1} .

    The result is not a posterior. It has the frequentist width around the centre of the posterior.
    If the model is right, :math:`I = J - J_0`, and nothing changes. Calibration does not help if
    the model estimates the wrong quantity. If effects of clusters are parameters of the model, each
    effect is known from its own cluster only, and the model already accounts for the common part of
    the rows in a cluster. Calibrate such a model by rows, or a model without the effects by
    clusters.

    The cost is two passes over the data. The pass for :math:`J` has a gradient for each parameter.
    With ``weights`` there is one more pass for each Newton step.

    :param mcmc: an ``MCMC`` object after its run, of any kernel, whose model has a plate with a
        ``subsample_size``.
    :param clusters: the cluster of each row, numbers or names, shape :math:`(N,)`; for several
        plates a dict by plate. If latent sites of groups are integrated out, each group is one row.
        None makes each row a cluster.
    :param weights: survey weights of the rows, for a run without weights; for several plates a dict
        by plate. They are in proportion to one over the probability that a row is in the data. They
        are scaled to a mean of 1, and the centre of the draws moves to the mode of the weighted
        posterior. A model with its own weights (``numpyro.handlers.scale``) needs none here.
    :param int population: number of rows, or clusters if they are given, in the population from
        which the data were drawn without replacement. The factor of :math:`I` is then one minus the
        sampled part.
    :return: a :class:`Calibrated`.
    :raises ValueError: if there are fewer than 100 draws, or fewer clusters than parameters, if the
        posterior has no single mode with a curvature, if prior and rows contradict each other, or
        if an argument does not fit the data.

    **References:**

    1. *Maximum Likelihood Estimation of Misspecified Models*, Halbert White (1982).
    2. *Uncertainty Estimation for Pseudo-Bayesian Inference Under Complex Sampling*,
       Matthew Williams and Terrance Savitsky (2021).
    3. *Statistical Inference with Stochastic Gradient Algorithms*, Jeffrey Negrea, Jun Yang,
       Haoyue Feng, Daniel Roy and Jonathan Huggins (2022).

    **Example:** counts with three times the variance of a Poisson law.

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpy as np
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import CCAdL, calibrated

        >>> def model(y):
        ...     rate = numpyro.sample("rate", dist.LogNormal(0, 2))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Poisson(rate), obs=y[i])

        >>> y = jnp.asarray(np.random.default_rng(0).negative_binomial(2, 1 / 3, 2_000))
        >>> kernel = CCAdL(model, progress_bar=False)
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=1_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), y)
        >>> found = calibrated(mcmc)
        >>> bool(abs(found.table["ratio"]["rate"] - (y.var() / y.mean()) ** 0.5) < 0.05)
        True
        >>> found.p_value < 0.001
        True
        >>> sd = found.mcmc.get_samples()["rate"].std()
        >>> bool(abs(sd / np.asarray(y).std() * 2_000**0.5 - 1) < 0.1)
        True
    """
    args, kwargs = arguments_of(mcmc)
    mcmc = kept_draws(mcmc)
    draws = mcmc.get_samples(group_by_chain=True)
    target = _checked_target(mcmc, draws, args, kwargs)
    positions = positions_of(target, draws)
    one_mode = "The sandwich needs one mode; there may be several, or the run was too short."
    check_draws(positions, "`calibrated`", _FEWEST, one_mode)
    labels, number, of_rows = _clusters_of(clusters, target)
    dimension = positions.shape[-1]
    if number <= dimension:
        raise ValueError(
            f"{number:,} clusters are too few to estimate the covariance of the gradients of"
            f" {dimension:,} parameters. Take smaller clusters, or a model with fewer parameters."
        )
    unseen = _unseen(population, number if not of_rows else _rows(target))
    known = _weights_of(weights, target)
    flat = positions.reshape(-1, dimension)
    center = flat.mean(axis=0)
    sandwich = sandwich_of(target, center, labels, known, unseen)
    _check_prior(sandwich, target)
    moved = sandwich.center + (flat - center) @ sandwich.stretch.T
    values = constrained(target, moved.reshape(positions.shape))
    values = {name: values.get(name, x) for name, x in draws.items()}
    settings = dict(getattr(mcmc.sampler, "run_info", {})) | {"calibrated": "sandwich"}
    settings.setdefault("algorithm", type(mcmc.sampler).__name__)
    view = view_of(mcmc, mcmc.sampler.model, values, args, kwargs, settings)
    return Calibrated(
        view,
        mcmc,
        _table(mcmc, view, flat, sandwich),
        *sandwich.test(),
        number,
        of_rows,
    )


def _rows(target: Target) -> int:
    return sum(plate.size for plate in target.model.plates)


def _checked_target(mcmc: MCMC, draws: Mapping[str, Any], args: tuple, kwargs: dict) -> Target:
    """
    The model with its data, checked for gradients of single rows.

    :raises ValueError: if rows have no gradients of their own.
    """
    target = checked_target(mcmc, args, kwargs, "Calibrate")
    names = {plate.name for plate in target.model.plates}
    if not names:
        raise ValueError(
            "The model has no plate with a `subsample_size`, so that its rows are unknown. Put the"
            " rows into `with numpyro.plate('rows', N, subsample_size=n) as i:`."
        )
    if drawn := target.model.drawn_plates:
        raise ValueError(
            f"The latent variables of plate '{drawn[0].name}' are integrated out by random draws,"
            " whose second derivatives are noise. Calibrate runs with at most two latent numbers"
            " in a group, or with normal ones."
        )
    sites = site_shapes(mcmc.sampler.model, dict(draws), args, kwargs)
    for name, site in sites.items():
        frames = [f.name for f in site.get("cond_indep_stack", ()) if f.name in names]
        if site["type"] == "sample" and len(frames) > 1:
            raise ValueError(
                f"Site '{name}' is inside of several subsampled plates ({', '.join(frames)}), so"
                " that the gradients of its rows are not independent. Give only one of these"
                " plates a `subsample_size`."
            )
    return target._replace(model=target.model.with_rule("fine"))


def _check_prior(sandwich: Sandwich, target: Target) -> None:
    """
    Check that prior and rows do not contradict each other.

    :raises ValueError: if the rows would have a parameter where the prior rules it out, for
        instance beyond a bound. No interval of these draws covers such a value.
    """
    away = sandwich.contradiction
    k, (count, dimension) = int(np.argmax(away)), sandwich.scores.shape
    if 2 * dimension * stats.t.sf(away[k], count - 1) < _CONTRADICTION:
        label = labels_and_sites(target)[0][k]
        raise ValueError(
            f"Prior and rows contradict each other: the rows alone put '{label}' {away[k]:.1f}"
            " standard errors away from the draws, where the prior or a bound keeps it. No"
            " interval around the draws covers such a value. Widen the prior, move its bound, or"
            " correct the rows."
        )


def _clusters_of(clusters: Any, target: Target) -> tuple[dict[str, np.ndarray], int, bool]:
    """
    Cluster numbers of all rows by plate, the number of clusters, and whether they are rows.

    :raises ValueError: if the clusters do not fit the rows.
    """
    plates, labels_of_rows, number = target.model.plates, {}, 0
    given = {} if clusters is None else _by_plate("clusters", clusters, target)
    if given:
        labels = [given[plate.name] for plate in plates if plate.name in given]
        for name, x in given.items():
            if (unknown := pd.isnull(x)).any():
                raise ValueError(
                    f"`clusters` of plate '{name}' are missing for {int(unknown.sum()):,} rows,"
                    f" the first is row {int(np.argmax(unknown)):,}. Give each of these rows a"
                    " cluster of its own, or leave them out of the data."
                )
        flat, names = pd.factorize(np.concatenate(labels))
        ends = np.cumsum([len(x) for x in labels])[:-1]
        labels_of_rows = dict(zip(given, np.split(flat, ends), strict=True))
        number = len(names)
        if number < 2:
            raise ValueError(
                f"`clusters` has a single cluster, {names[0]}, which does not show how clusters"
                " vary. Give at least two."
            )
    for plate in plates:
        if plate.name not in labels_of_rows:
            many = min(plate.size, _MOST_CLUSTERS)
            labels_of_rows[plate.name] = number + np.arange(plate.size) % many
            number += many
    return labels_of_rows, number, not given


def _weights_of(weights: Any, target: Target) -> dict[str, np.ndarray]:
    """The weights by plate, with mean 1; raise ``ValueError`` if they are not positive."""
    if weights is None:
        return {}
    relative = {}
    for name, x in _by_plate("weights", weights, target).items():
        if x.dtype.kind not in "biuf":
            raise ValueError(f"`weights` must be positive numbers; got {x.dtype}.")
        x = x.astype(np.float64)
        bad = ~np.isfinite(x) | (x <= 0)
        if bad.any():
            k = int(np.argmax(bad))
            raise ValueError(
                f"`weights` must be positive numbers, and {int(bad.sum()):,} are not; the first is"
                f" {x[k]} in row {k}. Leave rows of weight zero out of the data."
            )
        relative[name] = x / x.mean()
    return relative


def _by_plate(what: str, given: Any, target: Target) -> dict[str, Any]:
    """An argument as a dict by plate; raise ``ValueError`` if it does not fit the plates."""
    plates = {plate.name: plate.size for plate in target.model.plates}
    if not isinstance(given, Mapping):
        if len(plates) > 1:
            raise ValueError(
                f"The model has the subsampled plates {sorted(plates)}. Give `{what}` as a dict by"
                " plate."
            )
        given = dict.fromkeys(plates, given)
    if unknown := sorted(set(given) - set(plates)):
        raise ValueError(
            f"`{what}` names the plates {unknown}, but the subsampled plates are {sorted(plates)}."
        )
    given = {name: array(f"{what}[{name!r}]", x) for name, x in given.items()}
    for name, x in given.items():
        if np.shape(x) != (plates[name],):
            raise ValueError(
                f"`{what}` of plate '{name}' has the shape {np.shape(x)}, but the plate has"
                f" {plates[name]:,} rows. Give one value for each row."
            )
    return {name: given[name] for name in plates if name in given}


def _unseen(population: int | None, number: int) -> float:
    """The unseen part of the population; raise ``ValueError`` if the data are larger."""
    if population is None:
        return 1.0
    population = whole("population", population, most=MOST_OF_64_BITS)
    if population < number:
        raise ValueError(
            f"`population` is {population:,}, but the data alone have {number:,} rows or clusters."
            " Give the number in the population."
        )
    return 1 - number / population


def _table(mcmc: MCMC, view: MCMC, flat: np.ndarray, sandwich: Sandwich) -> pd.DataFrame:
    """Standard deviations before and after, by entry of each variable."""
    before, labels = flat_draws(draws_of(as_data(mcmc)))
    after, _ = flat_draws(draws_of(as_data(view)))
    before, after = (x.reshape(-1, x.shape[-1]) for x in (before, after))
    sd, calibrated_sd = before.std(axis=0), after.std(axis=0)
    away = flat.astype(np.float64) - flat.mean(axis=0)
    direction, *_ = np.linalg.lstsq(away, before - before.mean(axis=0), rcond=None)
    moves = sd > 0
    ratio = np.divide(calibrated_sd, sd, where=moves, out=np.full_like(sd, np.nan))
    error = np.where(moves, sandwich.error_of(direction), np.nan)
    return pd.DataFrame(
        {"sd": sd, "calibrated_sd": calibrated_sd, "ratio": ratio, "ratio_error": error},
        index=labels,
    )
