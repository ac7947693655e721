# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Identity of rows that keep coming: a hash of their contents, which grows with them.

Each array is hashed in stretches of 8 MB from its first row on. New rows change the last stretch
and add others, so that an append costs its own rows. Rows that were read anew, copied, or appended
in other portions have equal hashes.
"""

from collections.abc import Sequence
import hashlib
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.content_hash import first_difference, hashes_from
from numpyro_sgmcmc.data.rows_on_disk import RowsOnDisk


class RowIdentity(NamedTuple):
    """
    Identity of the first rows of some arrays and of their weights.

    - **rows** - number of rows :math:`N`.
    - **half_life** - number of rows after which a row counts half, or None.
    - **hashes** - hashes of the stretches of each array, shape (stretches, 16).
    - **kinds** - type and shape of a row of each array.
    - **row_bytes** - bytes of a row of each array.
    """

    rows: int
    half_life: float | None
    hashes: tuple[np.ndarray, ...]
    kinds: tuple[str, ...]
    row_bytes: tuple[int, ...]

    @property
    def digest(self) -> np.ndarray:
        """The identity as two numbers of 32 bits, which a compiled program compares."""
        hasher = hashlib.blake2b(repr((self.rows, self.half_life, self.kinds)).encode())
        for hashes in self.hashes:
            hasher.update(hashes.tobytes())
        return np.frombuffer(hasher.digest()[:8], np.uint32)

    def with_more(self, arrays: Sequence[Any]) -> "RowIdentity":
        """
        Return the identity after more rows have come.

        :param arrays: all rows, arrays of NumPy or :class:`RowsOnDisk`. The first rows are the rows
            of this identity.
        """
        hashes = []
        for known, each, x in zip(self.hashes, self.row_bytes, arrays, strict=True):
            first, new = hashes_from(_reader_of(x), self.rows, len(x), each)
            hashes.append(np.concatenate([known[:first], new]))
        return self._replace(rows=len(arrays[0]), hashes=tuple(hashes))

    def first_difference(self, other: "RowIdentity") -> int:
        """Return the first row of the first stretch of any array that differs from the other's."""
        each = zip(self.hashes, other.hashes, self.row_bytes, strict=True)
        return min(first_difference(*one) for one in each)


def identity_of(arrays: Sequence[Any], half_life: float | None) -> RowIdentity:
    """
    Return the identity of the rows of some arrays.

    :param arrays: arrays of NumPy, or :class:`RowsOnDisk`, with equal numbers of rows.
    :param half_life: number of rows after which a row counts half, or None.
    """
    none = np.zeros((0, 16), np.uint8)
    row_bytes = tuple(int(np.prod(x.shape[1:], dtype=int)) * x.dtype.itemsize for x in arrays)
    kinds = tuple(f"{x.dtype}{x.shape[1:]}" for x in arrays)
    nothing = RowIdentity(0, half_life, (none,) * len(kinds), kinds, row_bytes)
    return nothing.with_more(arrays)


def checksum(x: Any, place: int) -> Array:
    """
    Return a 32-bit checksum of an argument at its place, also in a compiled program.

    :param x: an array or a number.
    :param int place: number of the argument among all arguments.
    """
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.dtype != bool:
        bits = min(x.dtype.itemsize, 4) * 8
        x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
    x = x.astype(jnp.uint32).ravel()
    # the finalizer of MurmurHash3 for each entry, combined with its position
    x = x ^ (jnp.arange(1, len(x) + 1, dtype=jnp.uint32) * jnp.uint32(2654435761 + 2 * place))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return jnp.sum(x ^ (x >> 16), dtype=jnp.uint32)


def _reader_of(x: Any) -> Any:
    if isinstance(x, RowsOnDisk):
        return lambda first, end: x.read(np.arange(first, end))
    return lambda first, end: np.asarray(x[first:end])
