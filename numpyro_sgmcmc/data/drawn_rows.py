# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What is known of the rows of a minibatch, and what a model sees of arrays that are on disk."""

from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp


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
    Rows of a plate of which more is known than their numbers.

    - **numbers** - their numbers, shape (n,).
    - **values** - of each :class:`RowsOnDisk` of the plate its values, shape (n, ...); nothing if
      they have not been read.
    - **weights** - how much more than an equal share each of them counts, shape (n,), or None.
    - **high** - of plates of more than 2\\ :sup:`31` rows the upper 32 bits of the numbers, shape
      (n,), or None (:mod:`~numpyro_sgmcmc.data.row_numbers`).
    """

    numbers: Array
    values: tuple[Array, ...] = ()
    weights: Array | None = None
    high: Array | None = None


class Numbers(NamedTuple):
    """
    - **low**, **high** - the numbers, or their halves.
    - **part** - of rows that are spread over devices on which of these, or None.
    """

    low: Any
    high: Any = None
    part: Any = None


def numbers_in(rows: DrawnRows, part: Array | None = None) -> Numbers:
    """What a call back to Python is told of rows."""
    return Numbers(rows.numbers, rows.high, part)


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
