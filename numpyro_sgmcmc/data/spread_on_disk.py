# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Rows on disk that are spread over devices, each of which reads its own part."""

from collections.abc import Iterator
from contextlib import contextmanager
import hashlib
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from numpyro_sgmcmc.data.content_hash import ContentHash, of_all_processes
from numpyro_sgmcmc.data.drawn_rows import DrawnRows, IndexedByRows
from numpyro_sgmcmc.data.rows_on_disk import RowsOnDisk, UnreadableRows


@jax.tree_util.register_static
class SpreadRowsOnDisk(RowsOnDisk):
    """
    Rows on disk spread over devices, the result of :func:`~numpyro_sgmcmc.spread_rows`.

    :param held: the rows of this process. Each of its devices reads an equal part.
    :param mesh: the devices.
    :param axis: name of the axis of the mesh over which rows are spread.
    """

    def __init__(self, held: RowsOnDisk, mesh: Mesh, axis: str) -> None:
        devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
        devices = devices.reshape(len(devices), -1)
        here = [part for part, row in enumerate(devices) if _is_here(row)]
        self._held, self.mesh, self.axis = held, mesh, axis
        self.parts, self.each = len(devices), len(held) // len(here)
        self._places = {part: k * self.each for k, part in enumerate(here)}
        self._digests: dict[str, str] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.each * self.parts, *self._held.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return self._held.dtype

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        # each process has compared its own shards already
        return (len(self),)

    @property
    def first_part(self) -> int:
        """The number of the first part that this process holds."""
        return min(self._places)

    @property
    def is_whole(self) -> bool:
        """True if this process holds all rows."""
        return len(self._places) == self.parts

    @property
    def failure(self) -> UnreadableRows | None:  # type: ignore[override]
        return self._held.failure

    @property
    def digest(self) -> str:
        """The digest of all rows, equal in all processes, which have to ask for it together."""
        own = self._held.digest
        if own not in self._digests:
            digests = np.frombuffer(bytes.fromhex(own), np.uint8)
            if not self.is_whole:
                digests = of_all_processes(digests)
            parts = f"{self.parts}".encode()
            self._digests = {own: hashlib.blake2b(parts + digests.tobytes()).hexdigest()}
        return self._digests[own]

    @property
    def seen(self) -> ContentHash | None:
        return self._held.seen

    @contextmanager
    def hashed(self) -> Iterator[None]:
        with self._held.hashed():
            yield

    def remember(self, seen: ContentHash | None) -> None:
        self._held.remember(seen)

    @property
    def reader(self) -> RowsOnDisk:
        return self._held

    def places(self, rows: DrawnRows) -> np.ndarray:
        numbers = super().places(rows)
        if rows.part is None:
            return numbers
        # all entries under `vmap` are of one part
        return numbers.astype(np.int64) + self._places[int(np.ravel(rows.part)[0])]

    def read(self, numbers: Any) -> np.ndarray:
        """
        Read rows by their numbers among the rows of this process.

        They equal the numbers among all rows if this process holds all rows. The method is for use
        outside of the program of a device.
        """
        return self._held.read(numbers)

    def sampled(self, numbers: np.ndarray) -> Array:
        """Return some rows of each device, in the memory of the device."""
        each = [self._held.read(numbers + first) for first in self._places.values()]
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axis))
        return jax.make_array_from_process_local_data(sharding, np.concatenate(each))

    def on_each(self, parts: Any) -> IndexedByRows:
        return OnDevice(self) if parts == self.parts else self

    def __repr__(self) -> str:
        return f"{self._held!r}, spread over {self.parts} devices"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{self!r} cannot be pickled, because its devices belong to this process. Pickle the"
            " `RowsOnDisk`, and spread it again."
        )


class OnDevice(IndexedByRows):
    """Stand-in for spread rows in the program of a device: the device's own rows."""

    def __init__(self, source: SpreadRowsOnDisk) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return self._source.each

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), *self._source.shape[1:]

    @property
    def size(self) -> int:
        return self._source.size // self._source.parts

    def rows(self, index: Any) -> Array:
        rows = np.arange(*index.indices(len(self))) if isinstance(index, slice) else index
        return self.drawn(DrawnRows(jnp.asarray(rows)))

    def drawn(self, rows: DrawnRows) -> Array:
        try:
            part = lax.axis_index(self._source.axis)
        except NameError:  # outside of the program of a device, in a trace for shapes
            part = jnp.asarray(self._source.first_part)
        return self._source.drawn(rows, part)


def _is_here(devices: np.ndarray) -> bool:
    return any(device.process_index == jax.process_index() for device in devices)
