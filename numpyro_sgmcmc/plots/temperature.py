# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Temperatures and thermostat over the draws."""

from collections.abc import Sequence
import math
from typing import Any

import numpy as np
import xarray as xr

from numpyro_sgmcmc.diagnostics.autocorrelation import time_of
from numpyro_sgmcmc.diagnostics.runs import Run, as_data, group
from numpyro_sgmcmc.diagnostics.temperature import chi_square_band
from numpyro_sgmcmc.plots._axes import (
    ABOVE_GRID,
    ERRORS,
    LINE_STYLES,
    Axes,
    given_axes,
    legend_beside,
    new_axes,
    text_color,
)

#: Points of a line: a picture shows no more, and matplotlib cannot fill an endless noisy line.
_POINTS = 2_000


def plot_temperature(
    run: Run, axes: Sequence[Axes] | None = None, figsize: tuple[float, float] | None = None
) -> np.ndarray:
    """
    Temperatures and thermostat over the draws.

    There is a line for each chain, in a panel for each that was collected:

    - the configurational temperature (:mod:`numpyro_sgmcmc.stein`), which is always there. That
      of one draw is noisy: the mean of the first :math:`n` draws is shown, and with several
      chains that over all of them. Of correct draws it is in the band
      :math:`1 \\pm 2 \\sigma \\sqrt{\\tau / n}` for most chains, with :math:`\\sigma` the standard
      deviation of a draw's and :math:`\\tau` its autocorrelation time;
    - the kinetic temperature of each draw, with the band in which 99 % of :math:`T \\chi^2_d / d`
      are. It says whether the momenta are right, not the draws, and with a symmetric
      integrator it is right if it is above :math:`T` by a part of the order :math:`h^2`; see
      :func:`~numpyro_sgmcmc.diagnostics.kinetic_temperature`;
    - the thermostat :math:`\\xi` of each draw, for several of them their mean and their range.
      It comes to the friction :math:`A`, a line, where all of the noise is known, and to
      :math:`A + h v / 2` where noise of variance :math:`v` is left to it.

    :param run: an ``MCMC`` object or an ArviZ object, of a run with
        ``extra_fields=("thermostat", "kinetic_temperature")`` for all panels.
    :param axes: as many axes as there are panels; None for a new figure.
    :param figsize: width and height of a new figure in inches.
    :return: the axes, an array with one for each panel.
    :raises ValueError: if nothing was collected, or if ``axes`` has another length.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGNHT
        >>> from numpyro_sgmcmc import plot_temperature

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=10) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> mcmc = MCMC(SGNHT(model, step_size=0.02, friction=10.0), num_warmup=100,
        ...             num_samples=100, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), jnp.ones(50), extra_fields=("thermostat",))
        >>> [ax.get_ylabel() for ax in plot_temperature(mcmc)]
        ['configurational\\ntemperature', 'thermostat']
    """
    data = as_data(run)
    found = _collected(data)
    if axes is None:
        panels = new_axes(len(found), figsize, (10.0, 2.5 * len(found)), sharex=True)
    else:
        panels = given_axes(axes, len(found), f"one for each of {', '.join(found)}")
    draw = {
        "configurational_temperature": _draw_configurational,
        "kinetic_temperature": _draw_kinetic,
        "thermostat": _draw_thermostat,
    }
    for ax, (name, series) in zip(panels, found.items(), strict=True):
        draw[name](ax, series, data)
        ax.margins(x=0)
        legend_beside(ax, without="" if ax is panels[0] else "chain ")
    panels[-1].set_xlabel("draw")
    return panels


def _collected(data: Any) -> dict[str, xr.DataArray]:
    """
    The series of the panels, from top to bottom.

    :raises ValueError: if there are none.
    """
    found = group(data, "sample_stats")
    names = ("configurational_temperature", "kinetic_temperature", "thermostat")
    # of minibatches that are not independent the configurational temperature is NaN
    series = {
        name: found[name].transpose("chain", "draw", ...)
        for name in names
        if found is not None and name in found and np.all(np.isfinite(found[name].values))
    }
    if not series:
        raise ValueError(
            "The run has no temperature that could be drawn among its sample statistics. Collect"
            ' some: `mcmc.run(..., extra_fields=("thermostat", "kinetic_temperature"))`, for'
            " methods that have them. The configurational temperature is collected by every"
            " kernel of this package, but not known for subsampling='epochs' or"
            " 'symmetric_sweeps'."
        )
    return series


def _draw_configurational(ax: Axes, series: xr.DataArray, data: Any) -> None:
    values = series.values.astype(np.float64)
    chains, draws = values.shape
    count = np.arange(1, draws + 1)
    means = np.cumsum(values, axis=1) / count
    x, kept = _drawn(draws)
    time = float(time_of(series.to_dataset(name="series"))["series"])
    half = ERRORS * values.std() * np.sqrt(time / count)
    _draw_chains(ax, x, means[:, kept], linewidth=1.5)
    if math.isfinite(time):
        label = "correct draws\n(2 standard errors)"
        ax.fill_between(x, 1 - half[kept], 1 + half[kept], color="gray", alpha=0.25, linewidth=0,
                        zorder=0, label=label)  # fmt: skip
    overall = means.mean(axis=0)
    if chains > 1:
        ax.plot(x, overall[kept], color=text_color(), linewidth=2.5, label="mean of the chains")
    ax.axhline(1.0, color="gray", linestyle="--", linewidth=1, zorder=ABOVE_GRID)
    # the first few means are anywhere
    settled = np.append(means[:, draws // 20 :], [1.0])
    margin = max(0.5 * np.ptp(settled), 1.2 * half[-1] if math.isfinite(time) else 0.0, 1e-3)
    ax.set_ylim(settled.min() - margin, settled.max() + margin)
    ax.set_ylabel("configurational\ntemperature")


def _draw_kinetic(ax: Axes, series: xr.DataArray, data: Any) -> None:
    values = series.values.astype(np.float64)
    target = float(data.attrs.get("temperature", 1.0))
    low, high = (target * edge for edge in chi_square_band(data))
    x, kept = _drawn(values.shape[1])
    _draw_chains(ax, x, values[:, kept], linewidth=0.7, alpha=0.6)
    if math.isfinite(low):
        ax.axhspan(low, high, color="gray", alpha=0.25, linewidth=0, zorder=0,
                   label="99 % of draws")  # fmt: skip
    ax.axhline(target, color="gray", linestyle="--", linewidth=1, zorder=ABOVE_GRID)
    ax.axhline(values.mean(), color=text_color(), linewidth=1.5, label=f"mean {values.mean():.3g}")
    ax.set_ylabel("kinetic\ntemperature")


def _draw_thermostat(ax: Axes, series: xr.DataArray, data: Any) -> None:
    several = series.ndim > 2
    values = series.values.astype(np.float64).reshape(*series.shape[:2], -1)
    x, kept = _drawn(values.shape[1])
    values = values[:, kept]
    _draw_chains(ax, x, values.mean(axis=2), linewidth=1.0, alpha=0.8)
    if several:
        ends = values.min(axis=(0, 2)), values.max(axis=(0, 2))
        ax.fill_between(x, *ends, color="gray", alpha=0.25, linewidth=0, zorder=0,
                        label="range of all")  # fmt: skip
    if "friction" in data.attrs:
        friction = float(data.attrs["friction"])
        label = f"friction {friction:.3g}"
        ax.axhline(friction, color="gray", linestyle="--", linewidth=1.5, label=label)
    ax.set_ylabel("thermostat\n(mean of several)" if several else "thermostat")


def _drawn(draws: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the draws that are drawn, counted from 0, as x and as an index."""
    kept = np.unique(np.linspace(0, draws - 1, min(draws, _POINTS)).astype(int))
    return kept, kept


def _draw_chains(ax: Axes, x: np.ndarray, values: np.ndarray, **options: Any) -> None:
    """A line for each chain, named if there are few."""
    for k, chain in enumerate(values):
        label = f"chain {k}" if len(values) <= 4 else None
        style = LINE_STYLES[k % len(LINE_STYLES)]
        ax.plot(x, chain, color=f"C{k % 10}", linestyle=style, label=label, **options)
