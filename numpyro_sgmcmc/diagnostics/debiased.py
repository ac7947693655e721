# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Expectations without step size error, and the bias of a run as a number."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
import pandas as pd
import xarray as xr

from numpyro_sgmcmc.data.converters import array, random_key, share, whole
from numpyro_sgmcmc.diagnostics._coupled_chains import CHAINS, Levels, coupled
from numpyro_sgmcmc.diagnostics._posterior_score import (
    check_draws,
    check_moves,
    constrained,
    exact_target,
    labels_and_sites,
    positions_of,
)
from numpyro_sgmcmc.diagnostics.runs import (
    Functions,
    as_data,
    draws_of,
    effective_sizes,
    flat_draws,
    printed,
    values_of,
)
from numpyro_sgmcmc.posterior.metric import (
    DenseMetric,
    DiagonalMetric,
    LowRankMetric,
    Metric,
    from_covariance,
)
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.results.cycle_draws import kept_draws
from numpyro_sgmcmc.results.facts import variable_name
from numpyro_sgmcmc.results.run_data import arguments_of

#: The fewest draws of a run, the fewest draws of each coupled chain, and the most draws by default.
_FEWEST, _FEWEST_OF_CHAIN, _MOST = 100, 32, 100_000

#: Explanation of an error about chains that do not agree.
_NOT_DRAWS = (
    "Coupled chains start at draws of the run, and these are not yet draws of its posterior, which"
    " may have several modes, or none. Run longer."
)

#: Largest number of parameters for which the covariance of the draws is the metric.
_DENSE = 300

#: Standard errors beyond which the run is off.
_ERRORS = 4.0

#: Half the distance, in probability, of two quantiles that give the density between them.
_BESIDE = 0.05


@printed
class Debiased(NamedTuple):
    """
    The result of :func:`debiased`: expectations without step size error.

    - **table** - a row for each expectation: ``debiased``, its value without step size error, and
      its standard error ``error``; ``run``, the value of the run; ``bias``, the bias of the run,
      and ``bias_error``, its standard error, which includes the errors of both.
    - **step_size** - the longer of the two step sizes, in units of a posterior standard deviation.
    - **effective** - effective number of independent draws of the coupled chains, for the least
      known expectation.
    - **passes** - cost in passes over the data.
    - **scale** - the standard deviation of the quantity whose mean is in each row of the table.
    """

    table: pd.DataFrame
    step_size: float
    effective: float
    passes: float
    scale: pd.Series

    @property
    def moments(self) -> pd.DataFrame:
        """
        Means and standard deviations by entry of each variable, in the form of :func:`summary`.

        :raises ValueError: if only functions of the draws were requested.
        """
        values, columns = self.table["debiased"], {}
        for column, words in (("debiased_mean", "mean of "), ("debiased_sd", "variance of ")):
            some = values[values.index.str.startswith(words)]
            columns[column] = some.set_axis(some.index.str.removeprefix(words))
        if columns["debiased_mean"].empty:
            raise ValueError(
                "The table of `debiased` has means of `functions`, and none of the variables. Call"
                " `debiased` without `functions` for the summary."
            )
        return pd.DataFrame(columns | {"debiased_sd": np.sqrt(columns["debiased_sd"])})

    @property
    def verdict(self) -> str:
        """The verdict of the table on the run, in words."""
        if self.effective < 2 * CHAINS:
            return (
                f"Nothing is known: {CHAINS} coupled chains count as {self.effective:.0f}"
                " independent draws. They have stayed in parts of the posterior, of which the run"
                " then has said how much each counts, or wander where there is none, or more draws"
                " are needed, `num_draws=`."
            )
        bias, error = (self.table[name] / self.scale for name in ("bias", "bias_error"))
        far = bias.abs() > _ERRORS * error
        if not far.any():
            return (
                "No bias of the run is seen: an error of"
                f" {2 * error.max():.2g} standard deviations would have been."
            )
        seen = bias.where(far).abs()
        worst = seen.idxmax()
        return (
            f"The run is off in {far.sum()} of {len(bias)} expectations, the most in the {worst},"
            f" by {bias[worst]:+.3f} +- {error[worst]:.3f} standard deviations of what that is the"
            " mean of. The column `debiased` has the values without that."
        )

    @property
    def line(self) -> str:
        """The cost in one line."""
        return (
            f"coupled chains with steps of {self.step_size:g} and {self.step_size / 2:g} standard"
            f" deviations, {self.passes:,.0f} passes, {self.effective:,.0f} effective draws"
        )

    @property
    def _lines(self) -> list[str]:
        return [self.line, self.verdict]


def debiased(
    mcmc: MCMC,
    functions: Functions | None = None,
    *,
    var_names: list[str] | None = None,
    quantiles: Sequence[float] = (),
    num_draws: int | None = None,
    rng_key: Array | None = None,
) -> Debiased:
    """
    Estimate expectations without step size error, and the bias of a run.

    Pairs of chains start at draws of the run, one at a step size :math:`h` and one at :math:`h /
    2`. A pair has one Brownian path and equal minibatches, so that its difference has a small part
    of the variance of one chain. The error of the chains is of second order, and

    .. math::

        E f = E f_h + \\tfrac43 \\, E [f_{h/2} - f_h] + O(h^3) ,

    where the first term comes from long chains, and the second from short pairs. With minibatches a
    part of the second order remains, from the third moments of their noise, which are equal at both
    step sizes. The step size is searched from 1 downwards, in units of a posterior standard
    deviation. It is the first at which three conditions hold: the variance of the difference is at
    most a twentieth of the variance of a chain; the difference itself is at most a twentieth of a
    standard deviation; and a step can remove the noise of a minibatch. The method and the step size
    of the run play no role, so that this serves runs of any kernel, even with an error of first
    order. Gradients are on minibatches of the size in the run, or on all rows up to 2,000 rows.

    The bias of the run is its mean minus the debiased mean, with the standard error of both. Chains
    that start at draws of the run cannot know of modes that the run has missed.

    :param mcmc: an ``MCMC`` object after its run, of any kernel, with 100 draws or more.
    :param functions: function from the values of one draw, by name, to scalars or arrays, by name,
        whose means are estimated; None is the mean and the variance of every entry.
    :param var_names: names of variables for these means and variances; None for all.
    :param quantiles: probabilities of additional quantiles, such as ``(0.05, 0.95)``.
    :param int num_draws: number of draws at the longer step size, of all chains together, each of
        which is worth about one effective draw; None is the number of draws of the run, at most
        100,000.
    :param rng_key: random key; None is ``jax.random.key(0)``.
    :return: a :class:`Debiased`.
    :raises ValueError: if there are too few draws, if the draws are not from a posterior on these
        data, or if chains of different step sizes do not stay together.

    **References:**

    1. *Unbiased Kinetic Langevin Monte Carlo with Inexact Gradients*, Neil K. Chada, Benedict
       Leimkuhler, Daniel Paulin and Peter A. Whalley (2023), for the coupling. The variance of
       their differences falls fast enough for an infinite series of levels only if minibatch noise
       does not dominate. Here there are two levels.
    2. *Multilevel Monte Carlo Path Simulation*, Michael B. Giles (2008).

    **Example:** the variance of SGLD at a tenth of the largest stable step size is a ninth too
    large.

    .. doctest::

        >>> import jax
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGLD, debiased

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = jax.random.normal(jax.random.key(0), (100,))
        >>> kernel = SGLD(model, step_size=0.002, steps_per_sample=10)
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=5_000, num_chains=4,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> row = debiased(mcmc).table.loc["variance of mu"]
        >>> bool(abs(row.debiased - 0.01) < 4 * row.error)  # the posterior's
        True
        >>> bool(row.bias > 4 * row.bias_error)
        True
    """
    args, kwargs = arguments_of(mcmc)
    quantiles = [share("quantiles", p) for p in np.atleast_1d(array("quantiles", quantiles))]
    if num_draws is not None:
        num_draws = whole("num_draws", num_draws, least=_FEWEST)
    key = random_key(rng_key)
    posterior = draws_of(as_data(mcmc), var_names)
    if functions is not None:
        values_of(functions, posterior)  # an early check, before the slow part
    draws = kept_draws(mcmc).get_samples(group_by_chain=True)
    target = exact_target(mcmc, args, kwargs, "Debias")
    positions = positions_of(target, draws).astype(np.float64)
    check_draws(positions, "`debiased`", _FEWEST, _NOT_DRAWS)
    check_moves(positions.reshape(-1, positions.shape[-1]), labels_and_sites(target)[0])
    target, metric, anchor, coordinates = _coordinates(mcmc, target, positions)
    flat = coordinates.reshape(-1, coordinates.shape[-1])
    starts = flat[np.linspace(0, len(flat) - 1, CHAINS).round().astype(int)]
    asked = min(len(flat), _MOST) if num_draws is None else num_draws
    each = max(_FEWEST_OF_CHAIN, -(-asked // CHAINS))
    levels = coupled(target, metric, anchor, starts, each, key)
    coarse, fine = (_values(target, metric, x, posterior) for x in levels[:2])
    if functions is None:
        table, scale = _moments(posterior, coarse, fine)
    else:
        table, scale = _means(functions, posterior, coarse, fine)
    parts = [(table, scale), *(_quantiles(p, posterior, coarse, fine) for p in quantiles)]
    table, scale = (pd.concat(x) for x in zip(*parts, strict=True))
    effective = float(((scale / table["error"]) ** 2).min())
    return Debiased(table, levels.step_size, effective, _passes(levels, target), scale)


def _coordinates(
    mcmc: MCMC, target: Target, positions: np.ndarray
) -> tuple[Target, Metric, Any, np.ndarray]:
    """
    The target in the coordinates of the tuning, its metric, the anchor and the positions.

    The positions of the draws have the shape (chains, draws, d). Without a tuning the draws give
    the metric.
    """
    fixed: Any = getattr(mcmc.last_state, "fixed", None)
    metric = getattr(fixed, "metric", None)
    flat = positions.reshape(-1, positions.shape[-1])
    if isinstance(metric, DiagonalMetric | DenseMetric | LowRankMetric):
        target, anchor = target.tuned(fixed), fixed.anchor
        if anchor is not None and jnp.ndim(anchor.potential) > 0:
            anchor = jax.tree.map(lambda x: x[0], anchor)  # the anchor of the first chain
    else:
        d = flat.shape[-1]
        dense = d <= _DENSE and len(flat) > 10 * d
        covariance = np.atleast_2d(np.cov(flat.T)) if dense else flat.var(axis=0)
        center = flat.mean(axis=0)
        metric = from_covariance(covariance, center, target.model.dtype)
        center = jnp.asarray(center, target.model.dtype)
        anchor = target.compiled(lambda target, x: target.anchor(target.unravel(x)))(center)

    def run(target: Target, metric: Metric, flat: Array) -> Array:
        def one(x: Array) -> Array:
            return metric.coordinates(ravel_pytree(target.to_internal(target.unravel(x)))[0])

        return jax.vmap(one)(flat)

    coordinates = target.compiled(run)(metric, jnp.asarray(flat, target.model.dtype))
    return target, metric, anchor, np.asarray(coordinates, np.float64).reshape(positions.shape)


def _values(
    target: Target, metric: Metric, coordinates: np.ndarray, posterior: xr.Dataset
) -> xr.Dataset:
    """The variables of the run at positions in the coordinates, shape (chains, draws, d)."""

    def run(target: Target, metric: Metric, coordinates: Array) -> Array:
        def one(x: Array) -> Array:
            return ravel_pytree(target.from_internal(target.unravel(metric.values(x))))[0]

        return jax.vmap(jax.vmap(one))(coordinates)

    dtype = target.model.dtype
    positions = target.compiled(run)(metric, jnp.asarray(coordinates, dtype))
    values = {variable_name(k): x for k, x in constrained(target, np.asarray(positions)).items()}
    # names and coordinates of the run
    like = {str(name): x.transpose("chain", "draw", ...) for name, x in posterior.items()}
    return xr.Dataset(
        {
            name: xr.DataArray(
                values[name],
                dims=x.dims,
                coords={k: c for k, c in x.coords.items() if k not in ("chain", "draw")},
            )
            for name, x in like.items()
            if name in values
        }
    )


def _passes(levels: Levels, target: Target) -> float:
    each = 1.0 if levels.on_all_rows else target.minibatch_share
    return levels.gradients * each


class _Expectation(NamedTuple):
    value: np.ndarray
    error: np.ndarray


def _extrapolated(coarse: np.ndarray, fine: np.ndarray) -> _Expectation:
    """Extrapolated means of both levels, for values of shape (chains, draws, numbers)."""
    pairs = fine.shape[1]
    difference = (fine - coarse[:, :pairs]).mean(axis=1)
    each = coarse.mean(axis=1) + 4 / 3 * difference
    return _Expectation(each.mean(axis=0), each.std(axis=0, ddof=1) / np.sqrt(len(each)))


def _of_run(values: np.ndarray) -> _Expectation:
    error = values.std(axis=(0, 1)) / np.sqrt(effective_sizes(values))
    return _Expectation(values.mean(axis=(0, 1)), error)


def _table(
    names: list[str], run: _Expectation, found: _Expectation, scale: np.ndarray
) -> tuple[pd.DataFrame, pd.Series]:
    table = pd.DataFrame(
        {
            "debiased": found.value,
            "error": found.error,
            "run": run.value,
            "bias": run.value - found.value,
            "bias_error": np.hypot(run.error, found.error),
        },
        index=names,
    )
    return table, pd.Series(scale, index=names)


def _moments(
    posterior: xr.Dataset, coarse: xr.Dataset, fine: xr.Dataset
) -> tuple[pd.DataFrame, pd.Series]:
    """Means and variances of every entry."""
    own, labels = flat_draws(posterior[list(coarse.data_vars)])
    one, other = (flat_draws(x)[0] for x in (coarse, fine))
    center = _extrapolated(one, other).value
    # squares about the mean of each, whose error has only an effect of second order
    values = [np.concatenate([x, (x - c) ** 2], axis=-1) for x, c in (
        (own, own.mean(axis=(0, 1))), (one, center), (other, center),
    )]  # fmt: skip
    names = [f"mean of {x}" for x in labels] + [f"variance of {x}" for x in labels]
    scale = values[1].std(axis=(0, 1))
    return _table(names, _of_run(values[0]), _extrapolated(*values[1:]), scale)


def _means(
    functions: Functions, posterior: xr.Dataset, coarse: xr.Dataset, fine: xr.Dataset
) -> tuple[pd.DataFrame, pd.Series]:
    """Means of functions of the draws."""
    values = [values_of(functions, x) for x in (posterior, coarse, fine)]
    own, one, other = (flat for flat, _ in values)
    scale = one.std(axis=(0, 1))
    return _table(values[0][1], _of_run(own), _extrapolated(one, other), scale)


def _quantiles(
    probability: float, posterior: xr.Dataset, coarse: xr.Dataset, fine: xr.Dataset
) -> tuple[pd.DataFrame, pd.Series]:
    """
    Quantiles of every entry, :math:`q - (F_0 - p) / f`.

    Here :math:`q` is the coarse quantile, :math:`F_0` the debiased probability below it and
    :math:`f` the density there.
    """
    own, labels = flat_draws(posterior[list(coarse.data_vars)])
    one, other = (flat_draws(x)[0] for x in (coarse, fine))

    def found(values: np.ndarray, expectation: Callable[[np.ndarray], _Expectation]) -> Any:
        beside = min(_BESIDE, probability / 2, (1 - probability) / 2)
        below, at, above = np.quantile(
            values, [probability - beside, probability, probability + beside], axis=(0, 1)
        )
        slope = (above - below) / (2 * beside)
        share = expectation(at)
        return _Expectation(at - slope * (share.value - probability), slope * share.error), slope

    run, _ = found(own, lambda at: _of_run((own <= at) * 1.0))
    debiased, slope = found(one, lambda at: _extrapolated((one <= at) * 1.0, (other <= at) * 1.0))
    names = [f"{probability:.4g} quantile of {x}" for x in labels]
    scale = slope * np.sqrt(probability * (1 - probability))
    return _table(names, run, debiased, scale)
