# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The plot of the eigenvalues of the Stein matrix by site."""

from collections.abc import Sequence
import math
from typing import Any

import numpy as np
from scipy import stats
import xarray as xr

from numpyro_sgmcmc.data.converters import names
from numpyro_sgmcmc.diagnostics.runs import Run, as_data, group
from numpyro_sgmcmc.plots._axes import (
    ABOVE_GRID,
    ERRORS_OF_VERDICT,
    Axes,
    legend_above,
    single_axes,
)
from numpyro_sgmcmc.stein import FEWEST_BATCHES

#: Largest height of the figure and the height around the rows, in inches.
_HIGHEST, _AROUND_ROWS = 30.0, 1.5


def plot_stein(
    run: Run,
    var_names: str | Sequence[str] | None = None,
    ax: Axes | None = None,
    figsize: tuple[float, float] | None = None,
) -> Axes:
    """
    Plot the eigenvalues of the Stein matrix (:mod:`numpyro_sgmcmc.stein`) of each latent site.

    The eigenvalues go from the smallest to the largest. For a Gaussian posterior they are the
    ratios of the variances of the draws to the right variances. They are 1 for correct draws, up to
    the noise of a finite run. For a site of :math:`k` parameters this noise spreads them over the
    band

    .. math:: 1 \\pm \\left( 1.5 \\sqrt{2 (k - 1)} \\, \\bar\\sigma + 3 \\bar\\sigma_s \\right) ,

    with :math:`\\bar\\sigma` the median of the standard errors of all variance ratios, and
    :math:`\\bar\\sigma_s` the median for the site. Diamonds are beyond the band. The verdict of
    ``to_arviz`` applies this rule to the matrix of all sites, and is silent up to 10 %.

    Above 100 parameters there are no eigenvalues. The plot then has the variance ratios :math:`r_i`
    of a site, from the best known to the least known, and above 1,000 parameters one ratio for each
    site. Their band is

    .. math:: 1 \\pm q \\, \\sigma_i / \\min(\\max(r_i, 0.1), 1) ,

    with the quantile :math:`q` of Student's t distribution for the most extreme of all ratios, as
    in the verdict.

    :param run: an ``MCMC`` object or an ArviZ object.
    :param var_names: names of latent sites; None for all.
    :param ax: axes to draw into; None for a new figure.
    :param figsize: width and height of a new figure in inches.
    :return: the axes.
    :raises ValueError: if the run has kept no Stein matrix, or if a name is unknown.

    **Example:**

    .. doctest::

        >>> import jax
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGHMC
        >>> from numpyro_sgmcmc import plot_stein

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10).expand([5]).to_event(1))
        ...     with numpyro.plate("rows", len(y), subsample_size=20) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])

        >>> y = jax.random.normal(jax.random.key(0), (100, 5))
        >>> mcmc = MCMC(SGHMC(model, step_size=0.05, friction=5.0), num_warmup=200,
        ...             num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> ax = plot_stein(mcmc)
        >>> ax.get_xlabel()
        'eigenvalue of the Stein matrix'
    """
    stein = _stein_of(as_data(run))
    label, values, half = _values_and_band(stein)
    site_of = stein["site"].values.astype(str)
    sites = _chosen(list(dict.fromkeys(site_of.tolist())), var_names)
    blocks = [np.flatnonzero(site_of == site) for site in sites]
    # the best known ratios come first; eigenvalues of a site have nearly equal errors, and keep
    # their order
    blocks = [block[np.argsort(half[block], kind="stable")] for block in blocks]
    # sites with many parameters need more room
    row = max(0.2 + 0.05 * min(max(map(len, blocks)), 8), _label_height())
    height = min(max(_AROUND_ROWS + row * len(sites), 2.5), _HIGHEST)
    ax = single_axes(ax, figsize, (8.0, height))
    ax.axvline(1.0, color="gray", linestyle="--", linewidth=1, zorder=ABOVE_GRID)
    known = bool(np.all(np.isfinite(half)))
    places = [k + _beside_each_other(len(block)) for k, block in enumerate(blocks)]
    for place, block in zip(places, blocks, strict=True) if known else ():
        _fill_band(ax, place, half[block], "correct draws" if place is places[0] else None)
    place, chosen = np.concatenate(places), np.concatenate(blocks)
    _draw_values(ax, values[chosen], place, half[chosen] if known else None)
    _name_rows(ax, sites)
    ax.set_xlabel(label)
    legend_above(ax, 3, _temperature_in_words(stein))
    return ax


def _stein_of(data: Any) -> xr.Dataset:
    """
    The Stein matrix in the results of a run.

    :raises ValueError: if the run has none.
    """
    stein = group(data, "stein")
    if stein is None or not stein.sizes.get("parameter"):
        raise ValueError(
            "The run has no group `stein`, which needs a kernel of this package, independent"
            " minibatches (subsampling='without_replacement' or 'with_replacement') and some"
            " finite steps. Make the ArviZ object with `to_arviz(mcmc)`."
        )
    return stein


def _chosen(sites: list[str], var_names: str | Sequence[str] | None) -> list[str]:
    """
    The chosen latent sites.

    :raises ValueError: if no site has a given name.
    """
    if var_names is None:
        return sites
    chosen = names("var_names", var_names)
    if unknown := [name for name in chosen if name not in sites]:
        raise ValueError(
            f"`var_names` has {unknown}, which are no latent sites; the latent sites are {sites}."
        )
    return chosen


def _values_and_band(stein: xr.Dataset) -> tuple[str, np.ndarray, np.ndarray]:
    """The axis label, the values to draw, and the half width of the band around 1."""
    errors = stein["variance_ratio_error"].values
    if "eigenvalue" in stein:
        site_of = stein["site"].values
        medians = {site: np.median(errors[site_of == site]) for site in set(site_of)}
        spread = stein["eigenvalue_spread"].values
        half = 1.5 * spread + ERRORS_OF_VERDICT * np.array([medians[site] for site in site_of])
        return "eigenvalue of the Stein matrix", stein["eigenvalue"].values, half
    ratios = stein["variance_ratio"].values
    tail = stats.norm.sf(ERRORS_OF_VERDICT) / ratios.size
    half = stats.t.isf(tail, FEWEST_BATCHES - 1) * errors / np.clip(ratios, 0.1, 1.0)
    return "variance ratio (no eigenvalues above 100 parameters)", ratios, half


def _beside_each_other(count: int) -> np.ndarray:
    """The positions of this many points in their row."""
    return (np.arange(count) - (count - 1) / 2) * 0.8 / count


def _fill_band(ax: Axes, place: np.ndarray, half: np.ndarray, label: str | None) -> None:
    """Fill the band of each point, over the height of the point."""
    slot = 0.4 / len(place)
    edges = np.ravel(place[:, None] + [-slot, slot])
    half = np.repeat(half, 2)
    ax.fill_betweenx(edges, 1 - half, 1 + half, color="C0", alpha=0.2, linewidth=0, label=label)


def _draw_values(ax: Axes, values: np.ndarray, place: np.ndarray, half: np.ndarray | None) -> None:
    """Draw circles for values inside of the band and diamonds for values outside."""
    size = 5.0 if len(values) <= 100 else 3.0
    beyond = np.zeros(len(values), bool) if half is None else np.abs(values - 1) > half
    if not np.all(beyond):
        label = "no band yet" if half is None else f"within: {np.sum(~beyond):,}"
        ax.plot(values[~beyond], place[~beyond], "o", color="C0", markersize=size,
                markerfacecolor=ax.get_facecolor(), label=label)  # fmt: skip
    if np.any(beyond):
        label = f"beyond: {np.sum(beyond):,}"
        ax.plot(values[beyond], place[beyond], "D", color="C1", markersize=size, label=label)


def _name_rows(ax: Axes, names: list[str]) -> None:
    """Label the rows from top to bottom, leaving out names if there is no room."""
    ax.set_ylim(len(names) - 0.5, -0.5)
    inches = ax.get_window_extent().height / ax.figure.dpi
    every = max(1, math.ceil(0.8 * len(names) * _label_height() / inches))
    ax.set_yticks(range(0, len(names), every), [_shortened(name) for name in names[::every]])
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.locator_params(axis="x", nbins=7)
    ax.spines[["left", "right", "top"]].set_visible(False)


def _label_height() -> float:
    """The height of a row label, in inches."""
    import matplotlib
    from matplotlib.font_manager import FontProperties

    font = FontProperties(size=matplotlib.rcParams["ytick.labelsize"])
    return 1.5 * font.get_size_in_points() / 72


def _shortened(name: str, longest: int = 32) -> str:
    """A long name without its middle, because the ends tell names apart."""
    half = longest // 2
    return name if len(name) <= longest else f"{name[: half - 1]}…{name[-half:]}"


def _temperature_in_words(stein: xr.Dataset) -> str:
    temperature, error = stein.attrs["temperature"], stein.attrs["temperature_error"]
    known = f"± {error:.2g}" if math.isfinite(error) else "(too few samples for an error)"
    return f"configurational temperature {temperature:.3g} {known}"
