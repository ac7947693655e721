# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Common parts of the plots: lines, markers, axes and legends."""

from typing import Any

import numpy as np

from numpyro_sgmcmc.data.converters import array, instance, positive, shown

#: A ``matplotlib.axes.Axes``. Matplotlib is imported only for drawing.
Axes = Any

#: Half width of a band in standard errors, as in the verdict of a run.
ERRORS_OF_VERDICT = 3.0

#: Drawing order of reference lines. Matplotlib draws the grid at 1.5 and other lines at 2.
ABOVE_GRID = 1.6


def single_axes(ax: Any, figsize: Any, default: tuple[float, float]) -> Axes:
    """
    The given axes, or the axes of a new figure in which nothing is cut off.

    :raises ValueError: if the axes are not single axes, or the size is invalid.
    """
    import matplotlib.pyplot as plt

    if ax is not None:
        return instance("ax", ax, plt.Axes, "axes of matplotlib, such as those of `plt.subplots`")
    figsize = default if figsize is None else array("figsize", figsize)
    if np.shape(figsize) != (2,):
        raise ValueError(f"`figsize` must be width and height in inches; got {shown(figsize)}.")
    size = tuple(positive("figsize", x) for x in figsize)
    return plt.subplots(figsize=size, layout="constrained")[1]


def legend_above(ax: Axes, columns: int, title: str | None = None) -> None:
    """A legend above the axes."""
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2, ncols=columns,
              title=title, alignment="left", frameon=False, fontsize="small")  # fmt: skip


def text_color() -> Any:
    import matplotlib

    return matplotlib.rcParams["text.color"]
