# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Scores of the pooled predictions of a run on held-out rows."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro.handlers import seed
from numpyro.infer import MCMC
import pandas as pd
import xarray as xr

from numpyro_sgmcmc.data.converters import instance, random_key
from numpyro_sgmcmc.diagnostics._predictive_mixture import of_numbers, pooled, sites_at
from numpyro_sgmcmc.diagnostics._proper_scores import scores_of, standard_error
from numpyro_sgmcmc.diagnostics.runs import printed
from numpyro_sgmcmc.posterior.checks.arguments import checked_arrays
from numpyro_sgmcmc.posterior.handlers import Model, full_data
from numpyro_sgmcmc.posterior.local_latents import MARGINAL
from numpyro_sgmcmc.results.cycle_draws import kept_draws
from numpyro_sgmcmc.results.facts import variable_name
from numpyro_sgmcmc.results.row_subset import chosen_site, site_shapes, subsampled_plates


@printed
class PredictiveScores(NamedTuple):
    """
    Scores of the predictions of a run; printing shows the table and the facts.

    - **table** - a row for each score, with the columns ``score``; ``se``, its standard error for
      independent rows; and ``by_chance``, for the two calibration errors: their mean for this
      number of rows if the predictive law were perfectly calibrated.
    - **pointwise** - an ``xarray.Dataset`` over the plates of the site, in double precision:
      ``observed``, ``log_predictive_density`` and, for numbers, ``mean``, ``error`` (the mean minus
      the value), ``crps`` and ``pit``; for classes ``most_probable``, ``confidence`` (its
      probability), ``error`` (1 where it is wrong) and ``brier``.
    - **facts** - the site, the numbers of rows, of draws and of predictive draws, by name.
    """

    table: pd.DataFrame
    pointwise: xr.Dataset
    facts: dict[str, Any]

    def minus(self, other: "PredictiveScores") -> pd.DataFrame:
        """
        The differences of the scores from the scores of another run on these rows.

        Their standard errors are for paired rows. They are smaller than the errors of the two runs
        suggest, because a row that is hard to predict is usually hard for both.

        :param other: scores of these rows by another run.
        :return: a table with the columns ``difference`` and ``se``.
        :raises ValueError: if the rows differ.
        """
        ours, others = self.pointwise["observed"].values, other.pointwise["observed"].values
        where = f"site '{self.facts['site']}' and site '{other.facts['site']}'"
        if ours.shape != others.shape:
            raise ValueError(
                f"Differences need the same rows, but {where} have observations of shapes"
                f" {ours.shape} and {others.shape}. Call `predictive_scores` with the same rows."
            )
        if (differs := ours != others).any():
            raise ValueError(
                f"Differences need the same rows, but {np.count_nonzero(differs):,} of"
                f" {differs.size:,} observations of {where} differ; the first are"
                f" {ours[differs][0]:.6g} and {others[differs][0]:.6g}. Call `predictive_scores`"
                " with the same rows, in the same order."
            )
        ours, others = scores_of(self.pointwise), scores_of(other.pointwise)
        common = [name for name in ours if name in others]
        rows = {
            name: (
                ours[name].value - others[name].value,
                standard_error(ours[name].influence - others[name].influence),
            )
            for name in common
        }
        return pd.DataFrame.from_dict(rows, orient="index", columns=["difference", "se"])

    @property
    def _lines(self) -> list[str]:
        return [self.line]

    @property
    def line(self) -> str:
        """The facts in one line."""
        return ", ".join(
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
            for name, value in self.facts.items()
        )


def predictive_scores(
    mcmc: MCMC | tuple[Model, Mapping[str, Any]],
    *args: Any,
    var_name: str | None = None,
    rng_key: Array | None = None,
    **kwargs: Any,
) -> PredictiveScores:
    """
    Score the pooled predictions of a run on held-out observations.

    The predictive law of a row is the mixture of its laws at all :math:`S` draws of all chains.
    Its log density

    .. math:: \\log p(y_i) = \\log \\frac{1}{S} \\sum_{s=1}^{S} p(y_i \\mid \\theta_s)

    is summed draw by draw on some rows at a time, so that memory grows neither with draws times
    rows nor with the classes of all rows. Every row counts, whatever the ``subsample_size``. If the
    plate has no ``subsample_size``, all rows are evaluated together, with fewer predictive draws if
    there are very many rows.

    For **classes** (Bernoulli and categorical laws) with pooled probabilities :math:`\\bar p_{ik}`
    there are also the error rate of the most probable class; the Brier score
    :math:`\\sum_k (\\bar p_{ik} - 1[y_i = k])^2`; and the expected calibration error [2], from the
    confidences :math:`c_i = \\max_k \\bar p_{ik}` in 15 bins :math:`b` of equal width,

    .. math:: \\mathrm{ECE} = \\frac{1}{N} \\sum_b \\Big| \\sum_{i \\in b}
        \\left( 1[\\text{class } i \\text{ is right}] - c_i \\right) \\Big| .

    For **numbers** there are the root mean square error of the predictive mean; the continuous
    ranked probability score [1] by its fair estimator from :math:`M` predictive draws
    :math:`Y_m`,

    .. math:: \\mathrm{CRPS}_i = \\frac{1}{M} \\sum_m |Y_m - y_i|
        - \\frac{1}{2 M (M - 1)} \\sum_{m, m'} |Y_m - Y_{m'}| ;

    the probability integral transform :math:`u_i = P(Y_i \\le y_i)`; and the calibration error, the
    mean over the levels 0.05, 0.10, ..., 0.95 of the absolute difference between a level and the
    share of the rows inside of their central interval of this level, where :math:`|2 u_i - 1|` is
    at most the level. Each draw of the run gives one predictive draw. With more than 1,000 draws
    only 1,000 evenly spaced ones do, and with fewer draws, as for an ensemble, each gives several,
    up to 1,000 in all. The mean and :math:`u_i` come from the ``mean`` and the ``cdf`` of the
    distribution if it has them, and otherwise from the predictive draws. For **counts**, and for
    other laws in which a single value has a probability, :math:`u_i` is randomised,
    :math:`P(Y_i < y_i) + V_i P(Y_i = y_i)` with uniform :math:`V_i`. It is uniform if the counts
    are calibrated. If a law has no mean, the root mean square error is NaN. Angles, censored values
    and vectors have the log density only.

    Large log densities are good, and small values of all other scores are good. Standard errors are
    for independent rows, by the delta method for scores that are not means. They do not include the
    randomness of the draws. Calibration alone does not show good predictions, because one law for
    all rows is calibrated too. Good predictions also have a high density.

    :param mcmc: an ``MCMC`` object after its run, of any kernel; or a model and its values, as
        ``(model, samples)``, with a leading axis for the draws. The draws may be members of an
        ensemble or a single optimum.
    :param args: arguments of the model with the held-out rows and their observations, as in
        ``mcmc.run(key, *args)``. There may be fewer rows than the ``subsample_size``.
    :param str var_name: the observed site, if the model has several.
    :param rng_key: random key of the predictive draws and the randomised transform.
    :param kwargs: keyword arguments of the model.
    :return: a :class:`~numpyro_sgmcmc.diagnostics.PredictiveScores`.
    :raises ValueError: if there are no draws or they are not finite, if the site is not observed,
        or if rows have latent sites, which are not known for new rows.
    :raises TypeError: if ``mcmc`` is neither of these.

    **References:**

    1. *Strictly Proper Scoring Rules, Prediction, and Estimation*,
       Tilmann Gneiting and Adrian Raftery (2007).
    2. *On Calibration of Modern Neural Networks*,
       Chuan Guo, Geoff Pleiss, Yu Sun and Kilian Weinberger (2017).

    **Example:**

    .. doctest::

        >>> import jax
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGNHT, predictive_scores

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (1_000,))
        >>> mcmc = MCMC(SGNHT(model, step_size=1e-2, friction=20.0, steps_per_sample=10),
        ...             num_warmup=100, num_samples=300, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y[:800])
        >>> found = predictive_scores(mcmc, y[800:])
        >>> print(f"{found.table['score']['rmse']:.1f}")
        1.0
        >>> found.pointwise["pit"].sizes["rows"]
        200
        >>> without_learning = predictive_scores((model, {"mu": jax.numpy.zeros(1)}), y[800:])
        >>> bool(found.minus(without_learning)["difference"]["log_predictive_density"] > 3)
        True
    """
    model, samples = _model_and_samples(mcmc)
    key = random_key(rng_key)
    args, kwargs = checked_arrays(model, args, kwargs)
    count = _check_samples(samples)
    draws = {name: jnp.asarray(x) for name, x in samples.items()}
    sites = site_shapes(seed(model, random.key(0)), draws, args, kwargs, sites_at, axes=1)
    name = _observed_site(sites, samples, var_name)
    _check_latents(sites, samples, name)
    latents = {k: x for k, x in draws.items() if k in sites and sites[k]["type"] == "sample"}
    arrays, classes, predictive = pooled(model, latents, count, args, kwargs, sites, name, key)
    _check_found(arrays, classes, name, of_numbers(sites[name]["fn"]))
    pointwise = _pointwise(arrays, sites[name], name, key)
    rows = pointwise["log_predictive_density"].size
    facts = {"site": name, "rows": rows, "draws": count}
    if predictive:
        facts["predictive draws"] = predictive
    values = {
        score: (x.value, standard_error(x.influence), x.by_chance)
        for score, x in scores_of(pointwise).items()
    }
    columns = ["score", "se", "by_chance"]
    table = pd.DataFrame.from_dict(values, orient="index", columns=columns)
    return PredictiveScores(table, pointwise, facts)


def _model_and_samples(mcmc: Any) -> tuple[Model, dict[str, Any]]:
    """
    The model and the draws of a run, or of a pair of both.

    :raises TypeError: if the argument has no model and draws.
    :raises ValueError: if there was no run.
    """
    if isinstance(mcmc, MCMC):
        if mcmc.last_state is None:
            raise ValueError("The `MCMC` object has no draws yet: call `mcmc.run(...)` first.")
        return full_data(mcmc.sampler.model), _samples(mcmc)
    if isinstance(mcmc, tuple) and len(mcmc) == 2:
        model, samples = mcmc
        if callable(model) and isinstance(samples, Mapping):
            return full_data(model), dict(samples)
    raise TypeError(
        "`mcmc` must be an `MCMC` object after its run, or a pair of a model and a dict of its"
        f" values, `(model, samples)`; got a {type(mcmc).__name__}."
    )


def _samples(mcmc: MCMC) -> dict[str, Any]:
    """The draws of all chains, one chain after the other."""
    return dict(kept_draws(mcmc).get_samples())


def _check_samples(samples: Mapping[str, Any]) -> int:
    """
    The number of draws, after a check of the samples.

    :raises ValueError: if the number is zero or unclear, or if draws are not finite.
    """
    sizes = {name: np.shape(x)[:1] for name, x in samples.items()}
    counts = set(sizes.values())
    if len(counts) != 1 or counts & {(), (0,)}:
        raise ValueError(
            "The values of every site need one leading axis for the draws, of the same length"
            f" above zero; the lengths are {sizes}. Write a single value as `x[None]`."
        )
    bad = {name: int(np.sum(~np.isfinite(np.asarray(x)))) for name, x in samples.items()}
    if any(bad.values()):
        said = ", ".join(f"{number:,} of '{name}'" for name, number in bad.items() if number)
        raise ValueError(
            f"The draws have values that are not finite: {said}. Run again with a smaller step"
            " size; or leave these draws out, and give `(model, samples)` instead of the run."
        )
    return int(counts.pop()[0])


def _observed_site(
    sites: Mapping[str, dict], samples: Mapping[str, Any], var_name: str | None
) -> str:
    """The observed site; raise ``ValueError`` if the name is not an observed site."""
    of_model = {k: s for k, s in sites.items() if s["type"] == "sample"}
    # the site of `numpyro.factor` has no predictions
    observed = [
        k for k, s in of_model.items() if s["is_observed"] and type(s["fn"]).__name__ != "Unit"
    ]
    unknown = [k for k, s in of_model.items() if not s["is_observed"] and k not in samples]
    if not observed and (local := [k for k in of_model if k.endswith(MARGINAL)]):
        plate = local[0].removesuffix(MARGINAL)
        raise ValueError(
            f"The groups of plate '{plate}' have latent variables that are integrated out, so that"
            f" single rows have no predictive distribution. Score whole groups, site '{local[0]}',"
            " by `loo(mcmc)` or `to_arviz(mcmc, log_likelihood=True)`. For rows of new groups"
            " score the model itself with draws of its effects, `(model, samples)`."
        )
    instance("var_name", var_name, str | None, "the name of a site")
    if var_name in unknown or not observed:
        which = f"'{var_name}'" if var_name in unknown else f"any of {unknown or list(of_model)}"
        raise ValueError(
            f"With these arguments the model has no observed value of {which}. Pass the"
            " observations of the rows that were held out, as in `mcmc.run(key, X, y)`."
        )
    return chosen_site(observed, var_name)


def _check_latents(sites: Mapping[str, dict], samples: Mapping[str, Any], name: str) -> None:
    """
    Check that the draws suffice for predictions.

    :raises ValueError: if draws of a latent site are missing, or rows are masked.
    """
    divided = {plate.name for plate in subsampled_plates(sites)}
    plates = {frame.name for frame in sites[name]["cond_indep_stack"]}
    for latent, site in sites.items():
        if site["type"] != "sample" or site["is_observed"]:
            continue
        inside = {frame.name for frame in site["cond_indep_stack"]}
        # a value for each row, and not for a group of rows
        local = bool(inside & plates & divided) or bool(plates) and plates <= inside
        if local or (inside and latent not in samples):
            where = f"plate '{sorted(inside & plates or inside)[0]}'"
            raise ValueError(
                f"Site '{latent}' is latent in {where}, and its draws apply only to the rows or"
                f" groups of the run, not to site '{name}' here. Write a likelihood that"
                " integrates it out, such as `MixtureSameFamily`, or a normal law with both"
                " variances."
            )
        if latent not in samples:
            raise ValueError(
                f"The model has the latent site '{latent}', but the draws have only"
                f" {sorted(samples)}. Give draws of this site too, or a model without it."
            )
    fn = sites[name]["fn"]
    while fn is not None:
        if isinstance(fn, dist.MaskedDistribution):
            raise ValueError(
                f"Site '{name}' is masked, and a masked row would count as predicted with"
                " certainty. Leave masked rows out of the arguments, and remove the mask."
            )
        fn = getattr(fn, "base_dist", None)


def _check_found(arrays: Mapping[str, np.ndarray], classes: int, name: str, numbers: bool) -> None:
    """
    Check the observations and their densities.

    :raises ValueError: if observations are not numbers, or classes that do not exist, or if the
        model gives no density.
    """
    y, log_density = arrays["observed"], arrays["log_predictive_density"]
    if classes:
        bad = ~np.isin(y, np.arange(classes))
        what = f"are not among its classes: code them from 0 to {classes - 1}"
    else:
        bad, what = ~np.isfinite(y), "are not finite: leave these rows out"
    if not bad.any() and np.isnan(log_density).any():
        bad = np.isnan(log_density)
        what = "have a log density that is not a number: look at the arguments of these rows"
    if bad.any():
        index = tuple(int(k) for k in np.argwhere(bad)[0])
        raise ValueError(
            f"{np.count_nonzero(bad):,} of {bad.size:,} observations of site '{name}' {what}. The"
            f" first is {y[index]} at index {index}."
        )


def _pointwise(arrays: dict[str, np.ndarray], site: dict, name: str, rng_key: Array) -> xr.Dataset:
    """The arrays over the plates of the site, with the probability integral transform."""
    arrays = {k: x if x.dtype.kind in "iub" else x.astype(np.float64) for k, x in arrays.items()}
    log_density = arrays["log_predictive_density"]
    if "below" in arrays:
        seed = np.ravel(np.asarray(random.key_data(rng_key)))
        uniform = np.random.default_rng(seed).random(log_density.shape)
        below, at = arrays.pop("below"), arrays.pop("at")
        arrays["pit"] = np.clip(below + uniform * at, 0, 1)
        if "error" in arrays:
            arrays["mean"] = arrays["observed"] + arrays["error"]
    variable, ndim = variable_name(name), log_density.ndim
    plates = {ndim + frame.dim: frame.name for frame in site["cond_indep_stack"]}
    dims = [
        plates.get(k, f"{variable}_dim_{k}") for k in range(max(x.ndim for x in arrays.values()))
    ]
    return xr.Dataset({k: (dims[: x.ndim], x) for k, x in sorted(arrays.items())})
