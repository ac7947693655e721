# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The rows of a minibatch, and the stand-ins for arrays on disk that a model indexes."""

from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.row_numbers import (
    Pair,
    as_integers,
    as_pair,
    counted_from,
    needs_64_bits,
    of_32_bits,
)


class IndexedByRows:
    """Base class of rows that a model can index: ``X[i]``, ``X[i, 0]``."""

    def rows(self, index: Any) -> Array:
        """Return the rows of an index: an array of integers of any shape, a number or a slice."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Array:
        rows, rest = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
        values = self.rows(rows)
        axes = 1 if isinstance(rows, slice) else jnp.ndim(rows)
        return values[(slice(None),) * axes + rest] if rest else values


class DrawnRows(NamedTuple):
    """
    Rows of a plate that were drawn for a minibatch.

    - **numbers** - row numbers, shape (n,).
    - **values** - values of each :class:`RowsOnDisk` of the plate, shape (n, ...); empty before
      they have been read.
    - **weights** - weight of each row relative to an equal share, shape (n,), or None.
    - **high** - upper 32 bits of the row numbers in plates of more than 2\\ :sup:`31` rows, shape
      (n,), or None (:mod:`~numpyro_sgmcmc.data.row_numbers`).
    - **part** - the device that holds these rows, in a call back to Python, or None.
    """

    numbers: Array
    values: tuple[Array, ...] = ()
    weights: Array | None = None
    high: Array | None = None
    part: Array | None = None

    @property
    def size(self) -> int:
        return self.numbers.shape[0]

    @property
    def integers(self) -> np.ndarray:
        """The row numbers as integers of NumPy, outside of traced programs."""
        if self.high is None:
            return np.asarray(self.numbers)
        return as_integers(*np.broadcast_arrays(self.high, self.numbers))

    def on(self, part: Array | None) -> "DrawnRows":
        """Return the row numbers alone, for a call back to Python."""
        return DrawnRows(self.numbers, high=self.high, part=part)


def drawn_rows(rows: Array | DrawnRows) -> DrawnRows:
    """Return rows that may be given by their numbers alone as :class:`DrawnRows`."""
    return rows if isinstance(rows, DrawnRows) else DrawnRows(rows)


def far_rows(numbers: Pair) -> DrawnRows:
    """Return rows of a plate that has more than 2\\ :sup:`31` rows."""
    high, low = of_32_bits(numbers)
    return DrawnRows(low, high=high)


def counted_rows(size: int, chunk: Array, apart: int, first: int, length: int) -> DrawnRows:
    """Return rows ``first + chunk * apart + (0, ..., length - 1)`` of a plate of ``size`` rows."""
    if needs_64_bits(size):
        return far_rows(counted_from(chunk, apart, first, length))
    return DrawnRows(first + chunk * apart + jnp.arange(length))


def rows_of(numbers: Any, size: int) -> DrawnRows:
    """Return the rows with these NumPy numbers in a plate of ``size`` rows."""
    if not needs_64_bits(size):
        return DrawnRows(jnp.asarray(numbers, jnp.int32))
    high, low = as_pair(np.asarray(numbers, np.int64))
    return DrawnRows(low, high=high)


def first_of(rows: dict[str, DrawnRows], most: int | None = None) -> dict[str, DrawnRows]:
    """Return the first of the given rows of each plate."""
    return jax.tree.map(lambda x: x[:most], rows)


class OfMinibatch(IndexedByRows):
    """Stand-in for :class:`RowsOnDisk` in a model whose minibatch has been read."""

    def __init__(self, source: Any, numbers: Array, values: Array) -> None:
        self._source, self._numbers, self._values = source, numbers, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def rows(self, index: Any) -> Array:
        # only the rows of the plate have been read
        return self._values if index is self._numbers else self._source.rows(index)


class Watched(OfMinibatch):
    """Stand-in for :class:`RowsOnDisk` that records the indices used by the model."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.indices: list[Any] = []

    def rows(self, index: Any) -> Array:
        self.indices.append(index)
        return self._source.rows(index)


class ShapeOf(OfMinibatch):
    """Stand-in for :class:`RowsOnDisk` that has a shape and reads nothing."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def rows(self, index: Any) -> Array:
        return jnp.zeros((*jnp.shape(index), *self._source.shape[1:]), self._source.dtype)
