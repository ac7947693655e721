# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The kinetic and the configurational temperature of a run."""

from typing import NamedTuple

import numpy as np
from scipy import stats

from numpyro_sgmcmc.diagnostics.runs import Run, as_data, effective_sizes, group


class Temperature(NamedTuple):
    """
    A temperature of a run, in units of the temperature of its target.

    - **mean** - the mean over all draws.
    - **error** - the standard error of the mean, by effective sample size.
    - **band** - the interval that should have 99 % of the draws, or NaN if it is not known.
    - **inside** - the share of the draws in the band, or NaN.
    """

    mean: float
    error: float
    band: tuple[float, float]
    inside: float


def kinetic_temperature(run: Run) -> Temperature:
    """
    The kinetic temperature of a run, from its momenta.

    For each draw it is :math:`p^\\top p / d`, with momenta :math:`p \\sim N(0, T I)`:

    .. math:: \\frac{d}{T} \\, \\frac{p^\\top p}{d} \\sim \\chi^2_d .

    It tests the momenta and not the draws. A thermostat makes its mean right whatever the noise. At
    the end of a step a symmetric integrator has the temperature :math:`1 / (1 - h^2 \\lambda / 4)`
    in a direction of curvature :math:`\\lambda`, although the positions are exact.

    :param run: a run with ``extra_fields=("kinetic_temperature",)``, of a method with momentum.
    :raises ValueError: if the run has not collected it.

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
    values, attributes = _collected(run, "kinetic_temperature")
    values, d = values / float(attributes.get("temperature", 1.0)), attributes.get("dimension")
    low, high = stats.chi2.ppf([0.005, 0.995], d) / d if d else (np.nan, np.nan)
    inside = float(np.mean((values > low) & (values < high))) if d else np.nan
    return Temperature(*_mean(values), (float(low), float(high)), inside)


def configurational_temperature(run: Run) -> Temperature:
    """
    The configurational temperature (:mod:`numpyro_sgmcmc.stein`) of a run.

    It comes from the share of each draw.

    The mean is 1 for correct draws. The share of a single draw has no known law.

    :param run: a run of a kernel of this package.
    :raises ValueError: if the run has not collected it, or if minibatches are not independent.

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
    values, _ = _collected(run, "configurational_temperature")
    if np.any(np.isnan(values)):
        raise ValueError(
            "The configurational temperature needs independent minibatches, and the minibatches of"
            " subsampling='epochs' and 'symmetric_sweeps' are not. Run with"
            " subsampling='without_replacement'."
        )
    return Temperature(*_mean(values), (np.nan, np.nan), np.nan)


def _collected(run: Run, name: str) -> tuple[np.ndarray, dict]:
    """A sample statistic, shape (chains, draws), and the attributes of the run."""
    data = as_data(run)
    sample_stats = group(data, "sample_stats")
    if sample_stats is None or name not in sample_stats:
        raise ValueError(
            f"The run has no `{name}` among its sample statistics. Collect it with"
            f" `mcmc.run(..., extra_fields=('{name}',))`; it exists for the kernels of this package"
            + (" with momentum." if name.startswith("kinetic") else ".")
        )
    return sample_stats[name].transpose("chain", "draw").values.astype(np.float64), data.attrs


def _mean(values: np.ndarray) -> tuple[float, float]:
    """The mean of all draws, and its standard error."""
    error = values.std() / np.sqrt(effective_sizes(values[..., None])[0])
    return float(values.mean()), float(error)
