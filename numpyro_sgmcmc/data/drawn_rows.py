# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The rows of a minibatch, and what a model sees of arrays that are on disk."""

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
    """What a model can index: ``X[i]``, ``X[i, 0]``."""

    def rows(self, index: Any) -> Array:
        """The rows of an index, an array of whole numbers of any shape, a number or a slice."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Array:
        rows, rest = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
        values = self.rows(rows)
        axes = 1 if isinstance(rows, slice) else jnp.ndim(rows)
        return values[(slice(None),) * axes + rest] if rest else values


class DrawnRows(NamedTuple):
    """
    Some rows of a plate.

    - **numbers** - their numbers, shape (n,).
    - **values** - of each :class:`RowsOnDisk` of the plate its values, shape (n, ...); nothing if
      they have not been read.
    - **weights** - how much more than an equal share each of them counts, shape (n,), or None.
    - **high** - of plates of more than 2\\ :sup:`31` rows the upper 32 bits of the numbers, shape
      (n,), or None (:mod:`~numpyro_sgmcmc.data.row_numbers`).
    - **part** - in a call back to Python, the device whose rows these are, or None.
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
        """The numbers as integers of NumPy, where they are known."""
        if self.high is None:
            return np.asarray(self.numbers)
        return as_integers(*np.broadcast_arrays(self.high, self.numbers))

    def on(self, part: Array | None) -> "DrawnRows":
        """The numbers alone, for a call back to Python."""
        return DrawnRows(self.numbers, high=self.high, part=part)


def drawn_rows(rows: Array | DrawnRows) -> DrawnRows:
    """Rows that may be given by their numbers alone."""
    return rows if isinstance(rows, DrawnRows) else DrawnRows(rows)


def far_rows(numbers: Pair) -> DrawnRows:
    """Rows of a plate of more than 2\\ :sup:`31`."""
    high, low = of_32_bits(numbers)
    return DrawnRows(low, high=high)


def counted_rows(size: int, chunk: Array, apart: int, first: int, length: int) -> DrawnRows:
    """Rows ``first + chunk * apart + (0, ..., length - 1)`` of a plate of so many."""
    if needs_64_bits(size):
        return far_rows(counted_from(chunk, apart, first, length))
    return DrawnRows(first + chunk * apart + jnp.arange(length))


def rows_of(numbers: Any, size: int) -> DrawnRows:
    """Rows with these numbers, of NumPy, of a plate of so many."""
    if not needs_64_bits(size):
        return DrawnRows(jnp.asarray(numbers, jnp.int32))
    high, low = as_pair(np.asarray(numbers, np.int64))
    return DrawnRows(low, high=high)


def first_of(rows: dict[str, DrawnRows], most: int | None = None) -> dict[str, DrawnRows]:
    """The first of some rows of each plate."""
    return jax.tree.map(lambda x: x[:most], rows)


class OfMinibatch(IndexedByRows):
    """What a model sees in the place of :class:`RowsOnDisk` when its minibatch has been read."""

    def __init__(self, source: Any, numbers: Array, values: Array) -> None:
        self._source, self._numbers, self._values = source, numbers, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def rows(self, index: Any) -> Array:
        # other rows than those of the plate have not been read
        return self._values if index is self._numbers else self._source.rows(index)


class Watched(OfMinibatch):
    """Remembers by what the model indexes it."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.indices: list[Any] = []

    def rows(self, index: Any) -> Array:
        self.indices.append(index)
        return self._source.rows(index)


class ShapeOf(OfMinibatch):
    """Stands in where only shapes matter, so that nothing is read."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def rows(self, index: Any) -> Array:
        return jnp.zeros((*jnp.shape(index), *self._source.shape[1:]), self._source.dtype)
