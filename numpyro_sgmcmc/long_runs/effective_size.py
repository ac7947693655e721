# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Draws of a few parameters, spread over the run, from which the effective size is monitored.

If the draws become too many, every other one is dropped. The kept draws have about the effective
sample size of all draws, as long as that is several times smaller than the number of kept draws.
Their effective sample size is never much larger.
"""

from typing import Any, NamedTuple

import numpy as np
import xarray as xr

#: The most monitored numbers, and the most kept values.
_NUMBERS, _VALUES = 100, 2_000_000

#: Ratio of the number of kept draws to the largest effective sample size that they can show.
_SPARE = 4


class ThinnedDraws(NamedTuple):
    """
    Thinned draws of the monitored numbers.

    - **kept** - shape (chains, kept draws, numbers).
    - **stride** - number of draws from one kept draw to the next.
    - **seen** - number of draws of each chain so far.
    """

    kept: np.ndarray
    stride: int
    seen: int


def places(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """
    The monitored entries of every site: all entries of up to 100, or equally many of each site.
    """
    sizes = {name: int(np.prod(shape)) for name, shape in sorted(shapes.items())}
    if sum(sizes.values()) <= _NUMBERS:
        return {name: np.arange(size) for name, size in sizes.items()}
    entries, left = {}, _NUMBERS
    for k, name in enumerate(sorted(sizes, key=lambda name: sizes[name])):
        count = min(sizes[name], max(1, left // (len(sizes) - k)))
        entries[name] = np.unique(np.linspace(0, sizes[name] - 1, count).astype(int))
        left = max(0, left - count)
    return entries


def with_draws(
    monitored: ThinnedDraws | None,
    draws: dict[str, np.ndarray],
    where: dict[str, np.ndarray],
    target: float = 0.0,
) -> ThinnedDraws:
    """
    Add new draws to the monitored ones.

    :param draws: shape (chains, draws, ...) by site.
    :param where: :func:`places`.
    :param float target: effective sample size that the kept draws must be able to show.
    """
    columns = []
    for name in sorted(where):
        x = draws[name]
        columns.append(x.reshape(*x.shape[:2], -1)[:, :, where[name]].astype(np.float32))
    new = np.concatenate(columns, axis=-1)
    chains, count, numbers = new.shape
    if monitored is None:
        monitored = ThinnedDraws(np.zeros((chains, 0, numbers), np.float32), 1, 0)
    kept, stride, seen = monitored
    kept = np.concatenate([kept, new[:, -seen % stride :: stride]], axis=1)
    most = max(_VALUES // max(1, chains * numbers), _SPARE * target / chains, 100)
    while kept.shape[1] > 2 * most:
        kept, stride = kept[:, ::2].copy(), 2 * stride
    return ThinnedDraws(kept, stride, seen + count)


def least_size(monitored: ThinnedDraws, method: str) -> float:
    """
    The smallest effective sample size of the monitored numbers; NaN if it is not known.

    :param str method: of ``arviz.ess``.
    """
    import arviz

    if monitored.kept.shape[1] < 8:
        return float("nan")
    numbers: Any = xr.Dataset({"number": (("chain", "draw", "index"), monitored.kept)})
    with np.errstate(invalid="ignore", divide="ignore"):  # for values that never move
        sizes = arviz.ess(numbers, method=method)["number"].values
    return float(np.nanmin(sizes)) if np.isfinite(sizes).any() else float("nan")
