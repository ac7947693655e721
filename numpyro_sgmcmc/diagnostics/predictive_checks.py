# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Posterior predictive checks of all rows, by statistics of replicated data."""

import math
from typing import Any
import warnings

from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro.infer import MCMC
import pandas as pd

from numpyro_sgmcmc.data.converters import array, instance, random_key, whole
from numpyro_sgmcmc.diagnostics._predictive_mixture import of_numbers
from numpyro_sgmcmc.posterior.group_handlers import plate_axes
from numpyro_sgmcmc.posterior.handlers import without_wrappers
from numpyro_sgmcmc.results.new_rows import new_rows
from numpyro_sgmcmc.results.row_subset import chosen_site
from numpyro_sgmcmc.results.run_data import check_data

_BINARY = dist.BernoulliLogits, dist.BernoulliProbs

#: The most groups of rows, each with statistics of every replication.
_MOST_GROUPS = 10_000


def predictive_checks(
    mcmc: MCMC,
    by: Any = None,
    *,
    var_name: str | None = None,
    num_draws: int = 50,
    rng_key: Array | None = None,
) -> pd.DataFrame:
    """
    Compare statistics of the observations with those of replicated data.

    For each kept draw :math:`\\theta^{(s)}` all rows get new observations. A statistic :math:`T` of
    these is compared with that of the observations by its posterior predictive p-value [1],

    .. math:: P(T(\\tilde y) > T(y)) + \\tfrac12 P(T(\\tilde y) = T(y)),
        \\qquad \\tilde y^{(s)} \\sim p(\\tilde y \\mid z^{(s)}, \\theta^{(s)}) .

    Values near 0 and 1 show what the model does not reproduce. The p-values of a right model are
    more concentrated near one half than uniform ones, because the posterior has seen the rows: that
    of a fitted mean is near one half. With :math:`S` draws its standard error is up to
    :math:`1 / (2 \\sqrt S)`. All rows are passed once, some thousand at a time. Masked rows do not
    count.

    :param mcmc: an ``MCMC`` object after its run, of any kernel.
    :param by: the group of each row, numbers or names, for the statistics of each group.
    :param str var_name: the observed site, if the model has several.
    :param int num_draws: number of draws of each chain, evenly spaced; at most the number of draws
        of the run.
    :param rng_key: a random key.
    :return: a table with a row for each statistic, or for each statistic and group. The columns are
        the value of the observations; the mean, the 5 % and the 95 % quantile over replications;
        and the p-value. The statistics are the mean, standard deviation, minimum and maximum; for
        counts also the share of zeros and the dispersion, which is the variance over the mean; for
        binary observations the mean alone.
    :raises ValueError: if the site has classes, vectors, angles or censored values, or if ``by``
        has not one group for each row.

    **References:**

    1. *Posterior Predictive Assessment of Model Fitness via Realized Discrepancies*,
       Andrew Gelman, Xiao-Li Meng and Hal Stern (1996).

    **Example:** counts with more zeros than a Poisson law has.

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGNHT, predictive_checks

        >>> def model(y):
        ...     rate = numpyro.sample("rate", dist.Gamma(1, 1))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Poisson(rate), obs=y[i])

        >>> y = jnp.array([0, 0, 0, 4] * 250)
        >>> mcmc = MCMC(SGNHT(model, step_size=1e-3, friction=10.0), num_warmup=500,
        ...             num_samples=100, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), y)
        >>> table = predictive_checks(mcmc)
        >>> bool(table["p_value"]["zeros"] < 0.01), bool(table["p_value"]["dispersion"] < 0.01)
        (True, True)
    """
    instance("var_name", var_name, str | None, "the name of a site")
    num_draws, key = whole("num_draws", num_draws), random_key(rng_key)
    rows, observed, _ = new_rows(mcmc, None, num_draws, key)
    check_data(mcmc, "Replicate")
    name = chosen_site(observed, var_name)
    site = rows.sites[name]
    law = without_wrappers(site["fn"])
    if not of_numbers(site["fn"]) and not isinstance(law, _BINARY):
        raise ValueError(
            f"Site '{name}' has the law {type(law).__name__}: classes, angles, vectors and censored"
            " values have no mean that replications could be compared by. For classes see"
            " `predictive_scores(mcmc, ...)`. For others observe numbers, one site for each."
        )
    groups, codes, axis = _groups(by, site, name, rows.rows_of(name))
    sums = _Sums(math.prod(rows.shape) + 1, len(groups), law.support.is_discrete)
    for part in rows.predictions([name], observed=True):
        y, is_seen = part.observed
        some = codes if part.axis is None else codes[part.rows]
        own = np.expand_dims(some, [k for k in range(y.ndim) if k != axis])
        own = np.broadcast_to(own, y.shape)[is_seen]
        sums.add(np.concatenate([y[None], part.values])[:, is_seen], own)
    return _table(sums.statistics(law), None if by is None else groups)


def _groups(
    by: Any, site: dict, name: str, chunked: tuple[str, int] | None
) -> tuple[Any, np.ndarray, int]:
    """The groups, the number of that of each row, and the axis of the rows in a part of a site."""
    axes = plate_axes(site) if chunked is None else dict([chunked])
    sizes = {plate: jnp.shape(site["value"])[axis] for plate, axis in axes.items()}
    if by is None:
        return [None], np.zeros(1 if chunked is None else sizes[chunked[0]], int), 0
    given = np.ravel(by) if np.ndim(by) == 2 and np.shape(by)[1] == 1 else array("by", by)
    plates = [plate for plate, size in sizes.items() if given.shape == (size,)]
    if len(plates) != 1:
        said = " or ".join(f"{size:,} rows of plate '{plate}'" for plate, size in sizes.items())
        raise ValueError(
            f"`by` must have the group of each of the {said or 'rows of a plate'}, in which site"
            f" '{name}' is; got shape {given.shape}."
            + (" Give one of the plates a `subsample_size`." if len(plates) > 1 else "")
        )
    codes, groups = pd.factorize(given, sort=True)
    if (missing := np.flatnonzero(codes < 0)).size:
        raise ValueError(
            f"`by` has no group for {missing.size:,} rows, the first is row {missing[0]:,}. Give"
            " them one, such as 'unknown'."
        )
    if len(groups) > _MOST_GROUPS:
        raise ValueError(
            f"`by` has {len(groups):,} groups, more than {_MOST_GROUPS:,}. Cut numbers into"
            " intervals, `pandas.qcut(x, 10)`."
        )
    # the rows of a part come first; a site that is one part has one more axis
    return groups, codes, 0 if chunked is not None else 1 + axes[plates[0]]


class _Sums:
    """
    Sums over rows of the observations, first, and of each replication, by group.

    :param size: the number of replications and one.
    :param is_exact: whether values are whole numbers, whose sums have no error.
    """

    def __init__(self, size: int, groups: int, is_exact: bool) -> None:
        self.origin: float | None = 0.0 if is_exact else None
        self.count, self.first, self.second, self.zeros = np.zeros((4, size, groups))
        self.least, self.largest = np.multiply.outer([np.inf, -np.inf], np.ones((size, groups)))

    def add(self, values: np.ndarray, own: np.ndarray) -> None:
        """Add values, shape (size, number), of these groups."""
        if not own.size:
            return
        order = np.argsort(own, kind="stable")
        here, starts = np.unique(own[order], return_index=True)
        values = values[:, order].astype(np.float64)
        if self.origin is None:
            self.origin = float(values[0].mean())
        # far from the origin squares would lose their digits
        moved = values - self.origin

        def total(x: np.ndarray) -> np.ndarray:
            return np.add.reduceat(x, starts, axis=1)

        self.count[:, here] += np.diff([*starts, own.size])
        self.first[:, here] += total(moved)
        self.second[:, here] += total(moved**2)
        self.zeros[:, here] += total(values == 0)
        for kept, extreme in ((self.least, np.minimum), (self.largest, np.maximum)):
            kept[:, here] = extreme(kept[:, here], extreme.reduceat(values, starts, axis=1))

    def statistics(self, law: Any) -> dict[str, np.ndarray]:
        """The statistics of the observations, first, and of each replication, by group."""
        with np.errstate(divide="ignore", invalid="ignore"):  # a group may have no rows
            shift = self.first / self.count
            mean = (self.origin or 0.0) + shift
            if isinstance(law, _BINARY):
                return {"mean": mean}
            variance = np.maximum(self.second / self.count - shift**2, 0.0)
            found = {"mean": mean, "sd": variance**0.5}
            found |= {"minimum": self.least, "maximum": self.largest}
            if law.support.is_discrete:
                found |= {"zeros": self.zeros / self.count, "dispersion": variance / mean}
        return {k: np.where(np.isfinite(x), x, np.nan) for k, x in found.items()}


def _table(statistics: dict[str, np.ndarray], groups: np.ndarray | None) -> pd.DataFrame:
    columns = []
    for x in statistics.values():
        y, replicated = x[0], x[1:]
        # a statistic may be undefined, such as the dispersion of zeros
        is_known = np.isfinite(y) & np.isfinite(replicated)
        with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
            warnings.filterwarnings("ignore", "Mean of empty slice|All-NaN slice")
            low, high = np.nanquantile(replicated, [0.05, 0.95], axis=0)
            mean = np.nanmean(replicated, axis=0)
            tail = np.sum(is_known & (replicated > y), 0) + np.sum(replicated == y, 0) / 2
            columns.append([y, mean, low, high, tail / is_known.sum(0)])
    if groups is None:
        index = pd.Index(list(statistics), name="statistic")
    else:
        index = pd.MultiIndex.from_product([list(statistics), groups], names=["statistic", "group"])
    names = ["observed", "replicated", "5%", "95%", "p_value"]
    return pd.DataFrame(np.concatenate(columns, axis=1).T, index, names)
