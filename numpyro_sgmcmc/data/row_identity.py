# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The identity of rows that keep coming: a hash of their contents, which grows with them.

Each array is hashed in stretches of 8 MB from its first row on. More rows change the last stretch
and add others, so that an append costs its own rows. Rows that were read anew, copied, or appended
in other portions have the same hashes.
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
    The first rows of some arrays, and what each of them counts.

    - **rows** - their number :math:`N`.
    - **half_life** - the number of rows after which a row counts half, or None.
    - **hashes** - of the stretches of each array, shape (stretches, 16).
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
        """All of this as two numbers of 32 bits, which a compiled program compares."""
        found = hashlib.blake2b(repr((self.rows, self.half_life, self.kinds)).encode())
        for hashes in self.hashes:
            found.update(hashes.tobytes())
        return np.frombuffer(found.digest()[:8], np.uint32)

    def with_more(self, arrays: Sequence[Any]) -> "RowIdentity":
        """
        The identity of more rows.

        :param arrays: all rows, arrays of NumPy or :class:`RowsOnDisk`, of which the first are
            those of this identity.
        """
        hashes = []
        for known, each, x in zip(self.hashes, self.row_bytes, arrays, strict=True):
            first, new = hashes_from(_reader_of(x), self.rows, len(x), each)
            hashes.append(np.concatenate([known[:first], new]))
        return self._replace(rows=len(arrays[0]), hashes=tuple(hashes))

    def first_difference(self, other: "RowIdentity") -> int:
        """The first row of the first stretch, of any array, that differs from another's."""
        each = zip(self.hashes, other.hashes, self.row_bytes, strict=True)
        return min(first_difference(*one) for one in each)


def identity_of(arrays: Sequence[Any], half_life: float | None) -> RowIdentity:
    """
    :param arrays: arrays of NumPy, or :class:`RowsOnDisk`, with as many rows each.
    :param half_life: the number of rows after which a row counts half, or None.
    """
    none = np.zeros((0, 16), np.uint8)
    row_bytes = tuple(int(np.prod(x.shape[1:], dtype=int)) * x.dtype.itemsize for x in arrays)
    kinds = tuple(f"{x.dtype}{x.shape[1:]}" for x in arrays)
    nothing = RowIdentity(0, half_life, (none,) * len(kinds), kinds, row_bytes)
    return nothing.with_more(arrays)


def checksum(x: Any, place: int) -> Array:
    """
    A checksum of an argument at its place, in a compiled program too; a scalar of 32 bits.

    :param x: an array or a number.
    :param int place: its number among the arguments.
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
    # the finalizer of MurmurHash3, of each entry with its place
    x = x ^ (jnp.arange(1, len(x) + 1, dtype=jnp.uint32) * jnp.uint32(2654435761 + 2 * place))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return jnp.sum(x ^ (x >> 16), dtype=jnp.uint32)


def _reader_of(x: Any) -> Any:
    if isinstance(x, RowsOnDisk):
        return lambda first, end: x.read(np.arange(first, end))
    return lambda first, end: np.asarray(x[first:end])
