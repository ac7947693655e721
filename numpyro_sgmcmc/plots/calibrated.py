# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The plot of posterior intervals beside calibrated ones."""

import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc.data.converters import instance, share
from numpyro_sgmcmc.diagnostics.calibrated import Calibrated
from numpyro_sgmcmc.diagnostics.runs import as_data, draws_of, flat_draws
from numpyro_sgmcmc.plots._axes import Axes, legend_above, single_axes, text_color

#: Largest number of readable lines.
_MOST = 60


def plot_calibrated(
    found: Calibrated,
    *,
    var_names: list[str] | None = None,
    probability: float = 0.95,
    ax: Axes | None = None,
    figsize: tuple[float, float] | None = None,
) -> Axes:
    """
    Plot posterior intervals beside calibrated ones.

    For each entry a broad line shows the posterior interval and a thin line with ends the
    calibrated one. The axis is in posterior standard deviations from the posterior mean.

    :param found: the result of :func:`~numpyro_sgmcmc.calibrated`.
    :param var_names: names of variables; None for all. With more than 60 entries the plot has the
        entries whose intervals differ most.
    :param float probability: probability of the intervals, which lie between quantiles.
    :param ax: axes to draw into; None for a new figure.
    :param figsize: width and height of a new figure in inches.
    :return: the axes.
    :raises ValueError: if a variable does not exist.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_sgmcmc import calibrated, plot_calibrated

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> mcmc = MCMC(NUTS(model), num_warmup=200, num_samples=200, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), 3 * jax.random.normal(jax.random.key(1), (100,)))
        >>> ax = plot_calibrated(calibrated(mcmc))
        >>> ax.get_xlabel()
        'posterior standard deviations from the posterior mean'
    """
    instance("found", found, Calibrated, "what `calibrated(mcmc)` gives")
    probability = share("probability", probability)
    plain, labels = _flat(found.run, var_names)
    moved, _ = _flat(found.mcmc, var_names)
    ratio = found.table["ratio"].reindex(labels).to_numpy()
    order = np.arange(len(labels))
    if len(labels) > _MOST:
        order = np.sort(np.argsort(-np.abs(np.log(np.nan_to_num(ratio, nan=1.0))))[:_MOST])
    ax = single_axes(ax, figsize, (8.0, 1.2 + 0.3 * len(order)))
    mean, sd = plain.mean(axis=0), plain.std(axis=0)
    ends = [(1 - probability) / 2, (1 + probability) / 2]
    places = np.arange(len(order))[::-1]
    for draws, style in (
        (plain, {"linewidth": 7.0, "color": "C0", "alpha": 0.5, "label": "posterior"}),
        (moved, {"linewidth": 1.6, "color": text_color(), "label": "calibrated"}),
    ):
        low, high = (np.quantile(draws, ends, axis=0) - mean) / np.where(sd > 0, sd, 1.0)
        ax.hlines(places, low[order], high[order], **style)
        if draws is moved:
            both = np.concatenate([low[order], high[order]])
            ax.plot(both, np.tile(places, 2), "|", color=text_color(), markersize=9.0)
    ax.set_yticks(places, [labels[k] for k in order])
    ax.set(xlabel="posterior standard deviations from the posterior mean")
    ax.set_ylim(-0.7, len(order) - 0.3)
    legend_above(ax, 2, f"intervals of {probability:.0%}")
    return ax


def _flat(run: MCMC, var_names: list[str] | None) -> tuple[np.ndarray, list[str]]:
    draws, labels = flat_draws(draws_of(as_data(run), var_names))
    return draws.reshape(-1, draws.shape[-1]), labels
