# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Checks of rows on disk: lengths that do not fit their plate, and unusable row numbers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.row_numbers import MOST_ROWS, needs_64_bits
from numpyro_sgmcmc.posterior.reading import Reading


def check_lengths(reading: Reading) -> None:
    """
    Check the numbers of rows of arguments on disk.

    :raises ValueError: if an argument on disk has more or fewer rows than the plate that indexes
        it, or if the lengths of its shards differ from another array with equally many shards.
    """
    sizes = {plate.name: plate.size for plate in reading.plates}
    sharded: dict[tuple[str, int], Any] = {}
    for plate, source in zip(reading.plate_of_source, reading.sources, strict=True):
        if plate is not None and len(source) != sizes[plate]:
            raise ValueError(
                f"Plate '{plate}' has size {sizes[plate]:,}, but its indices are used on"
                f" {source!r}, which has {len(source):,} rows. Make the two lengths equal."
            )
        if plate is None:
            continue
        other = sharded.setdefault((plate, len(source.shard_lengths)), source)
        for k, pair in enumerate(zip(source.shard_lengths, other.shard_lengths, strict=True)):
            if pair[0] != pair[1]:
                raise ValueError(
                    f"Shard {k} of {source!r} has {pair[0]:,} rows, but shard {k} of {other!r} has"
                    f" {pair[1]:,}, so that rows of the same number would not belong together."
                    " Check whether one of the files is truncated, or from another day."
                )


def check_far(reading: Reading) -> None:
    """
    Check that row numbers of more than 32 bits only index arguments on disk.

    :raises ValueError: if a model uses such row numbers in any other way.
    """
    far = [plate for plate in reading.plates if needs_64_bits(plate.size)]
    if not far or not reading.sources:
        return
    own = list(reading.taken.values())
    others = [i for some in reading.indices for i in some if not any(i is rows for rows in own)]
    first = {p.name: np.arange(p.subsample_size) for p in reading.plates}
    # other row numbers, whose remainders differ too
    later = {name: (7_919 * rows + 104_729) % MOST_ROWS for name, rows in first.items()}
    first, later = (jax.tree.map(jnp.asarray, rows) for rows in (first, later))
    same = jax.tree.map(
        partial(np.array_equal, equal_nan=True),
        reading.densities(first),
        reading.densities(later),
    )
    if others or not jax.tree.all(same):
        plate = far[0]
        raise ValueError(
            f"Plate '{plate.name}' has {plate.size:,} rows, more than 32 bits can number, and the"
            " model uses its indices for more than to index rows on disk, `X[i]`. Put on disk too"
            " whatever depends on the number of a row, such as its group."
        )
