# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The spectrum of the gradient's noise."""

import math

import numpy as np
from numpyro.infer import MCMC
import xarray as xr

from numpyro_sgmcmc.diagnostics.noise_spectrum import gradient_noise
from numpyro_sgmcmc.plots._axes import (
    Axes,
    legend_above,
    single_axes,
    text_color,
)


def plot_noise_spectrum(
    noise: MCMC | xr.Dataset, ax: Axes | None = None, figsize: tuple[float, float] | None = None
) -> Axes:
    """
    The eigenvalues of the covariance of the gradient's noise by their rank.

    Beside them are their mean, and the size at which the noise is as large as what the method
    itself has to set against it; see :func:`gradient_noise`. Directions above that line, diamonds,
    spread too widely unless the method knows the covariance of its noise; so do, less, those not
    far below it.

    :param noise: an ``MCMC`` object of a kernel of this package, or what
        :func:`gradient_noise` gives.
    :param ax: axes to draw into; None for a new figure.
    :param figsize: width and height of a new figure in inches.
    :return: the axes.
    :raises ValueError: as :func:`gradient_noise`.

    **Example:**

    .. doctest::

        >>> import numpy as np, xarray as xr
        >>> from numpyro_sgmcmc import plot_noise_spectrum

        >>> values = 1.0 / np.arange(1, 21) ** 2
        >>> noise = xr.Dataset(
        ...     {"eigenvalue": ("rank", values)},
        ...     {"rank": np.arange(1, 21)},
        ...     {"mean": values.mean(), "balance": 0.1, "balance_with": "friction"},
        ... )
        >>> plot_noise_spectrum(noise).get_ylabel()
        "variance of the gradient's noise"
    """
    from matplotlib.ticker import MaxNLocator

    if not isinstance(noise, xr.Dataset):
        noise = gradient_noise(noise)
    ax = single_axes(ax, figsize, (8.0, 5.0))
    values, rank = noise["eigenvalue"].values, noise["rank"].values
    balance = noise.attrs.get("balance", math.inf)
    positive, beyond = values > 0, values > balance
    if np.any(positive):
        ax.set_yscale("log")
    else:
        positive = np.ones_like(positive)
    below = positive & ~beyond
    size = 5.0 if len(values) <= 100 else 3.0
    if np.any(below):
        ax.plot(rank[below], values[below], "o", color="C0", markersize=size,
                markerfacecolor=ax.get_facecolor(), label="eigenvalues")  # fmt: skip
    if np.any(beyond):
        label = f"above the line: {beyond.sum():,} of {len(values):,} ({beyond.mean():.0%})"
        ax.plot(rank[beyond], values[beyond], "D", color="C1", markersize=size, label=label)
    mean = noise.attrs["mean"]
    ax.axhline(mean, color=text_color(), linestyle=":", label=f"mean {_rounded(mean)}")
    if math.isfinite(balance):
        label = f"as large as {noise.attrs['balance_with']}, {_rounded(balance)}"
        ax.axhline(balance, color="gray", linestyle="--", label=label)
    if not np.all(positive):
        ax.plot([], [], " ", label=f"not drawn: {np.sum(~positive):,} that are 0")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set(xlabel="rank", ylabel="variance of the gradient's noise")
    legend_above(ax, 2)
    return ax


def _rounded(value: float) -> str:
    """To three digits, with commas."""
    return f"{float(f'{value:.3g}'):,g}"
