# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What the pictures share: lines, markers, axes and legends."""

from typing import Any

import numpy as np

from numpyro_sgmcmc.data.converters import array, instance, positive, shown

#: A ``matplotlib.axes.Axes``, which is imported when something is drawn.
Axes = Any

#: Standard errors to either side of a band, and of the verdict of a run.
ERRORS, ERRORS_OF_VERDICT = 2.0, 3.0

LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")

#: Lines to compare with: matplotlib draws the grid at 1.5 and other lines at 2.
ABOVE_GRID = 1.6


def new_axes(count: int, figsize: Any, default: tuple[float, float], **options: Any) -> np.ndarray:
    """
    Axes below each other in a new figure in which nothing is cut off.

    :raises ValueError: if its size is none.
    """
    import matplotlib.pyplot as plt

    figsize = default if figsize is None else array("figsize", figsize)
    if np.shape(figsize) != (2,):
        raise ValueError(f"`figsize` must be width and height in inches; got {shown(figsize)}.")
    figsize = tuple(positive("figsize", x) for x in figsize)
    _, axes = plt.subplots(count, figsize=figsize, layout="constrained", squeeze=False, **options)
    return axes[:, 0]


def given_axes(axes: Any, count: int, what: str) -> np.ndarray:
    """
    :raises ValueError: if it is another number of axes.
    """
    from matplotlib.axes import Axes as Drawn

    found = np.ravel(array("axes", axes).astype(object))
    for ax in found:
        instance("axes", ax, Drawn, "axes of matplotlib, such as those of `plt.subplots`")
    if len(found) != count:
        raise ValueError(f"`axes` has {len(found)} axes, but {count} are needed: {what}.")
    return found


def single_axes(ax: Any, figsize: Any, default: tuple[float, float]) -> Axes:
    """The axes that were given, or else those of a new figure."""
    given = new_axes(1, figsize, default) if ax is None else given_axes(ax, 1, "a single one")
    return given[0]


def legend_beside(ax: Axes, without: str = "") -> None:
    """A legend to the right, without the entries that begin with a word."""
    handles, labels = ax.get_legend_handles_labels()
    kept = [k for k, label in enumerate(labels) if not (without and label.startswith(without))]
    # only a layout engine makes room outside of the axes
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
    place = {} if ax.figure.get_layout_engine() is None else beside
    if kept:
        ax.legend([handles[k] for k in kept], [labels[k] for k in kept], fontsize="small", **place)


def legend_above(ax: Axes, columns: int, title: str | None = None) -> None:
    """A legend that is in the way of nothing."""
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2, ncols=columns,
              title=title, alignment="left", frameon=False, fontsize="small")  # fmt: skip


def text_color() -> Any:
    import matplotlib

    return matplotlib.rcParams["text.color"]
