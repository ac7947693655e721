# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The kinetic and the configurational temperature of a run."""

import math
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
import xarray as xr

from numpyro_sgmcmc.diagnostics.runs import Run, as_data, effective_sizes, group

#: Share of single draws within the band.
BAND = 0.99


class Temperature(NamedTuple):
    """
    A temperature of a run, in units of the temperature of its target.

    - **mean** - its mean over all draws.
    - **error** - the standard error of the mean, by effective sample size.
    - **band** - where 99 % of the single draws should be, or NaN where that is not known.
    - **inside** - the share of the draws that are there.
    """

    mean: float
    error: float
    band: tuple[float, float]
    inside: float


def kinetic_temperature(run: Run) -> Temperature:
    """
    The kinetic temperature.

    Of each draw it is :math:`p^\\top p / d`, with momenta :math:`p \\sim N(0, T I)`:

    .. math:: \\frac{d}{T} \\, \\frac{p^\\top p}{d} \\sim \\chi^2_d .

    It says whether the momenta are right, not the draws: a thermostat makes its mean right
    whatever the noise, and at the end of a step a symmetric integrator has
    :math:`1 / (1 - h^2 \\lambda / 4)` in a direction of curvature :math:`\\lambda` while the
    positions are exact.

    :param run: a run with ``extra_fields=("kinetic_temperature",)``, of a method with momentum.
    :raises ValueError: if it was not collected.

    **References:**

    1. *Molecular Dynamics*, section 6.1.5, Ben Leimkuhler and Charles Matthews (2015).

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGNHT, kinetic_temperature

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10).expand([20]).to_event(1))
        ...     with numpyro.plate("rows", len(y), subsample_size=10) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])

        >>> kernel = SGNHT(model, step_size=0.04, friction=5.0)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=4_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), jnp.ones((50, 20)), extra_fields=("kinetic_temperature",))
        >>> found = kinetic_temperature(mcmc)
        >>> print(f"{found.mean:.1f}, {found.inside:.2f} of the draws inside of the band")
        1.0, 0.99 of the draws inside of the band
    """
    data = as_data(run)
    target = float(data.attrs.get("temperature", 1.0))
    return temperature_of(_series(data, "kinetic_temperature") / target, *chi_square_band(data))


def configurational_temperature(run: Run) -> Temperature:
    """
    The configurational temperature (:mod:`numpyro_sgmcmc.stein`), from the share of each draw.

    Its mean is 1 for correct draws. A single draw's share has no known law.

    :param run: a run of a kernel of this package.
    :raises ValueError: if it was not collected, or where minibatches are not independent.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGHMC, configurational_temperature

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10).expand([20]).to_event(1))
        ...     with numpyro.plate("rows", len(y), subsample_size=10) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])

        >>> mcmc = MCMC(SGHMC(model, step_size=0.04, friction=5.0), num_warmup=200,
        ...             num_samples=1_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), jnp.ones((50, 20)))
        >>> found = configurational_temperature(mcmc)
        >>> abs(found.mean - 1) < 4 * found.error
        True
    """
    series = _series(as_data(run), "configurational_temperature")
    if np.any(np.isnan(series)):
        raise ValueError(
            "The configurational temperature is not known for minibatches that are not independent"
            " (subsampling='epochs' or 'symmetric_sweeps')."
        )
    return temperature_of(series, math.nan, math.nan)


def chi_square_band(data: Any) -> tuple[float, float]:
    """Where 99 % of the kinetic temperatures should be, for the parameters of this run."""
    if "dimension" not in data.attrs:
        return math.nan, math.nan
    size = int(data.attrs["dimension"])
    tail = (1 - BAND) / 2
    return (
        float(stats.chi2.ppf(tail, size) / size),
        float(stats.chi2.isf(tail, size) / size),
    )


def temperature_of(series: xr.DataArray, low: float, high: float) -> Temperature:
    """The summary of a series, shape (chain, draw)."""
    values = series.transpose("chain", "draw").values.astype(np.float64)
    error = float(values.std() / np.sqrt(effective_sizes(values[..., None])[0]))
    inside = float(np.mean((values > low) & (values < high))) if math.isfinite(low) else math.nan
    return Temperature(float(values.mean()), error, (low, high), inside)


def _series(data: Any, name: str) -> xr.DataArray:
    found = group(data, "sample_stats")
    if found is None or name not in found:
        raise ValueError(
            f"The run has no `{name}` among its sample statistics. Collect it with"
            f" `mcmc.run(..., extra_fields=('{name}',))`; it exists for the kernels of this package"
            + (" with momentum." if name.startswith("kinetic") else ".")
        )
    return found[name]
