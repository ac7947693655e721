# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Rows on disk that keep coming: new files, or a longer array."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from numpyro_sgmcmc.data.concatenated import Joined
from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.rows_on_disk import RowsOnDisk, UnreadableRows
from numpyro_sgmcmc.data.sources import Source


class SomeRows(Source):
    """
    Source of some rows of another source.

    :param source: the source that has the rows.
    :param rows: row numbers, shape (n,), or a range of them.
    """

    def __init__(self, source: Source, rows: np.ndarray | range) -> None:
        self._source, self._rows = source, rows
        self.shape = len(rows), *source.shape[1:]
        self.dtype, self.is_in_memory = source.dtype, source.is_in_memory
        self.name = f"{len(rows):,} rows of {source.name}"

    @property
    def is_replaced(self) -> bool:
        return self._source.is_replaced

    def read_into(self, found: np.ndarray, numbers: np.ndarray) -> None:
        rows = self._rows
        there = numbers + rows.start if isinstance(rows, range) else rows[numbers]
        self._source.read_into(found, there)


@jax.tree_util.register_static
class PaddedArrayOnDisk(RowsOnDisk):
    """
    Rows on disk with room for more: beyond the last row the first rows are repeated.

    :param rows: the present rows.
    :param int capacity: number of rows that there is room for.
    """

    def __init__(self, rows: RowsOnDisk, capacity: int) -> None:
        self._held, self._capacity = rows, capacity
        #: the first rows by their number, for runs that began with this number
        self._firsts = {len(rows): rows}
        _let_grow(rows)

    def append(self, rows: RowsOnDisk) -> None:
        """Append rows; the present rows stay unchanged."""
        self._held = RowsOnDisk([*self._held.shards, *rows.shards])
        self._firsts[len(self._held)] = self._held
        _let_grow(rows)

    def first(self, count: int) -> RowsOnDisk:
        """Return the first rows, always one object for each number of rows."""
        if count not in self._firsts:
            self._firsts[count] = _between(self._held, 0, count)
        return self._firsts[count]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._capacity, *self._held.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return self._held.dtype

    @property
    def failure(self) -> UnreadableRows | None:  # type: ignore[override]
        return self._held.failure

    @property
    def reader(self) -> RowsOnDisk:
        return self._held

    def places(self, rows: DrawnRows) -> np.ndarray:
        return super().places(rows) % len(self._held)

    def read(self, numbers: Any) -> np.ndarray:
        return self._held.read(np.asarray(numbers) % len(self._held))

    def __repr__(self) -> str:
        return f"{self._held!r}, with room for {self._capacity:,}"

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


def looked_at_again(
    before: RowsOnDisk, parts: Sequence[RowsOnDisk]
) -> tuple[RowsOnDisk, RowsOnDisk | None]:
    """
    Return the present rows of a source, and the new rows among them or None.

    :param before: the former rows of the source.
    :param parts: the former rows in the parts in which they came, each of which has been read.
    :raises ValueError: if the known rows are no longer the first rows of the source.
    """
    given: Any = before.given
    # an array of Zarr keeps the shape that it had when it was opened
    given = type(given).open(given.store_path) if hasattr(given, "store_path") else given
    now = RowsOnDisk(given, before.columns)
    _check_order(before, now)
    _check_content(parts, now)
    return now, _between(now, len(before), len(now)) if len(now) > len(before) else None


def without_rows(rows: RowsOnDisk, left: np.ndarray) -> RowsOnDisk:
    """
    Return the rows that stay after a removal.

    :param left: numbers of the rows that stay, which are kept in memory.
    """
    shards = rows.shards
    return RowsOnDisk(SomeRows(shards[0] if len(shards) == 1 else Joined(shards), left))


def _let_grow(rows: RowsOnDisk) -> None:
    for shard in rows.shards:
        shard.grows = True


def _between(rows: RowsOnDisk, first: int, end: int) -> RowsOnDisk:
    """Return a stretch of the rows, as whole shards if possible."""
    sources: list[Source] = []
    begin = 0
    for shard in rows.shards:
        stop = begin + shard.shape[0]
        low, high = max(first, begin), min(end, stop)
        if low < high:
            part = SomeRows(shard, range(low - begin, high - begin))
            sources.append(shard if (low, high) == (begin, stop) else part)
        begin = stop
    return RowsOnDisk(sources[0] if len(sources) == 1 else sources)


def _check_order(before: RowsOnDisk, now: RowsOnDisk) -> None:
    """Raise ``ValueError`` if the known rows are no longer the first rows."""
    for k, old in enumerate(before.shards):
        new = now.shards[k] if k < len(now.shards) else None
        is_file = hasattr(old, "path")
        is_same = new is not None and getattr(new, "path", None) == getattr(old, "path", None)
        if is_same and new is not None:
            longer = new.shape[0] - old.shape[0]
            is_last = k == len(before.shards) - 1
            is_same = longer == 0 or (longer > 0 and is_last and not is_file)
        if not is_same:
            present = "is gone" if new is None else f"is now {new.name} with {new.shape[0]:,} rows"
            raise ValueError(
                f"{old.name} had {old.shape[0]:,} rows when it was read, and {present}. Known rows"
                " must stay unchanged. New rows must follow them, in files with later names, or"
                " appended to an array of Zarr or HDF5."
            )


def _check_content(parts: Sequence[RowsOnDisk], now: RowsOnDisk) -> None:
    """
    Check that the known rows have their former values.

    :raises ValueError: if the values of known rows have changed. Files that may have changed are
        read again.
    """
    begin = 0
    for part in parts:
        again = _between(now, begin, begin + len(part))
        if not again.is_as(part):
            raise ValueError(
                f"Rows {begin:,} to {begin + len(part) - 1:,} of {now!r} have changed since they"
                " were read, in values or order. Put the old rows back; or make a new"
                " `GrowingRows`, and a run that continues with it reads all rows once."
            )
        begin += len(part)
