# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The summary of a run: its draws, its bias and its cost."""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

import numpy as np
from numpyro.diagnostics import split_gelman_rubin
import pandas as pd
import xarray as xr

from numpyro_sgmcmc.data.converters import instance
from numpyro_sgmcmc.diagnostics.calibrated import Calibrated
from numpyro_sgmcmc.diagnostics.debiased import Debiased
from numpyro_sgmcmc.diagnostics.runs import (
    Run,
    as_data,
    draws_of,
    group,
    labels_of,
    passes_per_draw,
    printed,
)
from numpyro_sgmcmc.stein import TOLERANCE

#: Largest R-hat, and fewest effective samples of each chain, as ArviZ and Stan recommend.
_LARGEST_RHAT, _FEWEST_EFFECTIVE = 1.01, 100

#: Share of the effective samples that the tuning promised, below which the tuning was wrong. With a
#: right metric the share is at least 0.3 for any key.
_KEPT = 0.2


#: Number of entries of a variable from which on the table has only some of them; a third of these;
#: entries that never move among them; and entries whose correlations are computed at once.
_MANY_ENTRIES, _THIRD, _CONSTANT, _AT_ONCE = 1_000, 100, 10, 20_000

#: First words of verdicts, each a heading of ``docs/verdicts.md``.
_HEADINGS = ("Do not trust this run", "Doubtful", "Slower than promised", "Too short", "Not known")


@printed
class Summary(NamedTuple):
    """
    The summary of a run; printing shows all of it.

    - **table** - a row for each entry of each variable, with the columns of ``arviz.summary``, and
      ``variance_error``, the relative error of the variance by the Stein matrix. A variable with
      more than 1,000 entries has an even sample of them, and those with the largest R-hat and
      autocorrelation. ``mcse_variance_error`` is the standard error of ``variance_error``.
    - **facts** - settings and costs of the run, by name.
    - **verdict** - the verdict in words.
    """

    table: pd.DataFrame
    facts: dict[str, Any]
    verdict: str

    @property
    def _lines(self) -> list[str]:
        return [*([self.line] if self.facts else []), self.verdict]

    @property
    def line(self) -> str:
        """The facts in one line."""
        return ", ".join(f"{name} {_number(value)}" for name, value in self.facts.items())


def summary(
    run: Run,
    *,
    var_names: list[str] | None = None,
    calibrated: Calibrated | None = None,
    debiased: Debiased | None = None,
    **options: Any,
) -> Summary:
    """
    Summarise a run: ``arviz.summary`` with biases, costs and a verdict.

    ArviZ cannot know whether the draws have the right spread, or their cost. The summary has both,
    and a verdict.

    The relative error of the variance of a parameter is :math:`r_i - 1` of
    :mod:`numpyro_sgmcmc.stein`; it is for the unconstrained parameter. A site whose constraint
    removes a dimension has the mean of its parameters in each row. Deterministic sites and runs of
    other kernels have NaN. For such runs ``stein_matrix(mcmc)`` computes it anew.

    The facts are the passes over the data, of the tuning, of the run and for each effective sample
    of the slowest variable; the step size; the friction :math:`A`; the noise ratio; and the number
    of steps that were undone. The noise ratio is :math:`h v / (2 A)` with the variance :math:`v` of
    the gradient noise, or :math:`h v / 2` without momentum. It is the relative widening of the
    posterior by uncorrected noise.

    :param run: an ``MCMC`` object or an ArviZ object.
    :param var_names: names of variables; None for all.
    :param calibrated: the result of :func:`calibrated` for the run. Its standard deviations are
        then a column, ``calibrated_sd``.
    :param debiased: the result of :func:`debiased` for the run. The means and standard deviations
        without step size error are then columns, ``debiased_mean`` and ``debiased_sd``.
    :param options: other arguments of ``arviz.summary``, such as ``hdi_prob`` or ``ci_prob``.
    :return: a :class:`Summary`.
    :raises ValueError: if there are no draws, if draws are not finite, with their number, or if an
        option leaves out a column that the verdict needs.

    **Example:**

    .. doctest::

        >>> import jax
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import CCAdL, summary

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (1_000,))
        >>> kernel = CCAdL(model, step_size=5e-3, friction=30.0, steps_per_sample=10)
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=2_000, num_chains=2,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> found = summary(mcmc)
        >>> print(f"{found.facts['passes']:.0f} passes over the data")
        4200 passes over the data
        >>> print(found.verdict.split(".")[0])
        No problem found
    """
    import arviz

    data = as_data(run)
    posterior = draws_of(data, var_names)
    instance("calibrated", calibrated, Calibrated | None, "what `calibrated(mcmc)` gives")
    instance("debiased", debiased, Debiased | None, "what `debiased(mcmc)` gives")
    names = None if var_names is None else list(posterior.data_vars)
    options = {"round_to": "none"} | options
    some = {k: _some_entries(x) for k, x in posterior.data_vars.items()}
    with np.errstate(invalid="ignore", divide="ignore"):  # R-hat of values that never move
        if any(entries is not None for entries in some.values()):
            table = arviz.summary(_shortened(posterior, some), **options)
            table.index = pd.Index(
                [
                    label
                    for k, x in posterior.data_vars.items()
                    for label in labels_of(k, x, some[k])
                ]
            )
        else:
            table = arviz.summary(data, var_names=names, **options)
    missing = [name for name in ("sd", "ess_bulk", "r_hat") if name not in table]
    if missing:
        raise ValueError(
            f"The verdict needs the columns {missing} of `arviz.summary`, and the options"
            f" {options} leave them out. Remove these options, or call `arviz.summary` itself."
        )
    stein = group(data, "stein")
    errors = _variance_errors(posterior, stein, some).reindex(table.index)
    table = pd.concat([table, errors], axis=1)
    if calibrated is not None:
        table["calibrated_sd"] = calibrated.table["calibrated_sd"].reindex(table.index)
    if debiased is not None:
        table[["debiased_mean", "debiased_sd"]] = debiased.moments.reindex(table.index)
    chains, draws = posterior.sizes["chain"], posterior.sizes["draw"]
    facts = _facts(data, table, chains * draws)
    verdict = _verdict(data, table, stein, chains, draws)
    for name, entries in some.items():
        if entries is not None:
            size = posterior[name].size // (chains * draws)
            verdict += (
                f" The table has {len(entries):,} of the {size:,} entries of '{name}': an even"
                " sample, and those with the largest R-hat and autocorrelation."
            )
    return Summary(table, facts, verdict)


def _some_entries(x: xr.DataArray) -> np.ndarray | None:
    """
    Numbers of the entries of a large variable that stand in the table; None for all entries.

    ArviZ takes milliseconds for each. Those with the largest R-hat, and with the largest
    correlation of successive draws, are among them.
    """
    values = x.values.reshape(*x.shape[:2], -1)
    size = values.shape[-1]
    if size <= _MANY_ENTRIES:
        return None
    chosen = [np.linspace(0, size - 1, _THIRD).astype(int)]
    parts = [values[..., k : k + _AT_ONCE] for k in range(0, size, _AT_ONCE)]
    measures = [_successive, split_gelman_rubin] if x.shape[1] >= 4 else []
    with np.errstate(invalid="ignore", divide="ignore"):
        for measure in measures:
            found = np.concatenate([measure(part.astype(np.float64)) for part in parts])
            slowest = np.argsort(-np.nan_to_num(found, nan=-np.inf), kind="stable")
            # of values that never move some are enough
            chosen += [slowest[:_THIRD], np.flatnonzero(np.isnan(found))[:_CONSTANT]]
    return np.unique(np.concatenate(chosen))


def _successive(x: np.ndarray) -> np.ndarray:
    """The correlation of successive draws, shape (chains, draws, entries), about a common mean."""
    apart = x - x.mean((0, 1))
    return (apart[:, 1:] * apart[:, :-1]).sum((0, 1)) / (apart**2).sum((0, 1))


def _shortened(posterior: xr.Dataset, some: Mapping[Any, np.ndarray | None]) -> Any:
    """The draws with some entries of large variables."""
    import arviz

    values = {}
    for name, x in posterior.data_vars.items():
        own = some[name]
        flat = x.values.reshape(*x.shape[:2], -1)
        values[str(name)] = x.values if own is None else flat[..., own]
    if int(arviz.__version__.split(".")[0]) < 1:
        return arviz.from_dict(values)
    return arviz.from_dict({"posterior": values})


def _variance_errors(
    posterior: xr.Dataset, stein: xr.Dataset | None, some: Mapping[Any, np.ndarray | None]
) -> pd.DataFrame:
    """The variance error and its standard error for each row of the table."""
    rows, labels = [], []
    for name, x in posterior.data_vars.items():
        entries = math.prod(x.shape[2:])
        own = some[name]
        chosen = np.arange(entries) if own is None else own
        labels += labels_of(str(name), x, chosen)
        of_site = None if stein is None else stein.isel(parameter=stein["site"].values == name)
        if of_site is None or not of_site.sizes["parameter"]:
            rows.append(np.full((len(chosen), 2), np.nan))
            continue
        values = np.column_stack([of_site["variance_ratio"] - 1, of_site["variance_ratio_error"]])
        if len(values) != entries:
            error = np.sqrt(np.mean(values[:, 1] ** 2))
            values = np.tile([values[:, 0].mean(), error], (entries, 1))
        rows.append(values[chosen])
    columns = ["variance_error", "mcse_variance_error"]
    return pd.DataFrame(np.concatenate(rows), index=labels, columns=columns)


def _facts(data: Any, table: pd.DataFrame, draws: int) -> dict[str, Any]:
    attrs, facts = data.attrs, {}
    stats = group(data, "sample_stats")
    passes, each = attrs.get("passes"), passes_per_draw(data)
    if passes is None and each is not None:
        passes = each * draws
    if passes is not None:
        facts["passes"] = float(passes)
    if "tuning_passes" in attrs:
        facts["passes of the tuning"] = float(attrs["tuning_passes"])
    if passes is not None and table["ess_bulk"].min() > 0:
        facts["passes per effective sample"] = float(passes) / float(table["ess_bulk"].min())
    step_size, friction = attrs.get("step_size"), attrs.get("friction")
    if step_size is None and stats is not None and "step_size" in stats:
        step_size = float(stats["step_size"].mean())
    if step_size is not None:
        facts["step size"] = float(step_size)
    if friction is not None:
        facts["friction"] = float(friction)
    if step_size is not None and "noise_variance" in attrs:
        ratio = float(step_size) * float(attrs["noise_variance"]) / 2
        facts["noise ratio"] = ratio / float(friction if friction is not None else 1.0)
    if "nonfinite_steps" in attrs:
        facts["non-finite steps"] = int(attrs["nonfinite_steps"])
    if stats is not None and "diverging" in stats:
        facts["divergences"] = int(stats["diverging"].sum())
    return facts


def _verdict(
    data: Any, table: pd.DataFrame, stein: xr.Dataset | None, chains: int, draws: int
) -> str:
    attrs = data.attrs
    wrong, unknown, short = [], [], ""
    if attrs.get("undone_steps_problem"):
        cause = "not finite, or an impossible momentum"
        wrong.append(f"{attrs['undone_steps_problem']}: {cause}")
    if attrs.get("verdict"):
        wrong.append(f"the draws do not have the law of the posterior: {attrs['verdict']}")
    if stein is None:
        unknown.append(
            "whether the law is right (the run has no Stein matrix: `stein_matrix(mcmc)` tells of"
            " the spread, `kernel_stein_discrepancy(mcmc)` of the location too)"
        )
    elif not np.isfinite(stein.attrs["temperature_error"]):
        unknown.append(
            f"whether the spread is right ({int(stein.attrs['samples']):,} draws are too few for"
            " the Stein matrix)"
        )
    moves = table["sd"] > 0
    if not moves.all():
        constant = _some(table.index[~moves])
        unknown.append(f"whether {constant} should be constant")
    rhat, size = table["r_hat"][moves], table["ess_bulk"][moves]
    if not moves.any():
        wrong.append("nothing ever moved")
    elif chains < 2:
        unknown.append("whether chains agree (there is one)")
    elif rhat.max() > _LARGEST_RHAT:
        slow = _some(rhat.index[rhat > _LARGEST_RHAT])
        wrong.append(f"the chains have not mixed: R-hat is up to {rhat.max():.3f}, in {slow}")
    if moves.any() and size.min() < _FEWEST_EFFECTIVE * chains:
        short = f"{size.min():.0f} effective samples of '{size.idxmin()}' are few: run longer"
    said = []
    if wrong:
        said.append("Do not trust this run: " + "; ".join(wrong) + ".")
    if attrs.get("tuning_problem"):
        said.append(f"Doubtful: the tuning found that {attrs['tuning_problem']}.")
    if moves.any():
        said += _slower_than_promised(attrs, size, chains * draws)
    if short:
        said.append(f"Too short: {short}.")
    if not said:
        said.append("No problem found in what is known." if unknown else "No problem found.")
        if stein is not None and np.isfinite(stein.attrs["temperature_error"]):
            # chance may hide an error beyond the threshold of the verdict
            error = float(stein.attrs["temperature_error"])
            seen = max(TOLERANCE, 3 * error) + 2 * error
            said.append(f"An error of {seen:.0%} of all variances would have been seen.")
    if unknown:
        said.append("Not known: " + "; ".join(unknown) + ".")
    headings = [sentence.partition(":")[0] for sentence in said]
    anchors = [f"#{x.lower().replace(' ', '-')}" for x in headings if x in _HEADINGS]
    if anchors:
        said.append(f"What to do: docs/verdicts.md{', '.join(anchors)}.")
    return " ".join(said)


def _slower_than_promised(attrs: Any, size: pd.Series, draws: int) -> list[str]:
    """The verdict on effective samples below the promise of the tuning."""
    thinning = float(attrs.get("thinning", 1))
    each = thinning * float(attrs.get("promised_per_sample", 0))
    promised, came = draws * min(1.0, each), float(size.min())
    if promised < _FEWEST_EFFECTIVE or came > _KEPT * promised:
        return []
    seconds = draws * thinning * float(attrs.get("seconds_per_sample", 0))
    return [
        f"Slower than promised: the tuning promised {promised:,.0f} effective samples in"
        f" {seconds:.2g} s of chains one by one, and {came:,.0f} of '{size.idxmin()}' came. The"
        " metric misses a direction of it, or the posterior is far from any Gaussian."
    ]


def _some(names: pd.Index) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} others"


def _number(value: Any) -> str:
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
