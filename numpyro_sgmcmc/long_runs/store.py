# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Draws in a Zarr store (version 3 of the format) that can be read at any moment.

zarr-python would show a longer array before its new chunks are there, and one variable before the
others. So chunks go to disk at once, and metadata wait in memory for :meth:`Store.publish`, which
writes those of the arrays and last those of the root, which repeat all shapes. Each file is flushed
and replaced as a whole, so a reader of the root's ("consolidated") metadata sees all variables with
the same number of complete draws, whatever happens. Each chunk ends in its CRC-32C checksum,
which every reader of Zarr compares.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
import json
import math
from pathlib import Path
from typing import Any
import warnings

import numpy as np
import xarray as xr

from numpyro_sgmcmc.long_runs.files import flush_folder, write_atomically

try:
    import zarr
    from zarr.abc.buffer import Buffer, BufferPrototype
    from zarr.abc.store import ByteRequest
    from zarr.buffer import cpu
    from zarr.codecs import Crc32cCodec
    from zarr.storage import LocalStore, MemoryStore, WrapperStore
except ImportError as error:
    raise ImportError(
        "`LongRun(store=...)` writes with zarr 3.1.6 or later: pip install 'numpyro_sgmcmc[zarr]'."
    ) from error

#: Bytes of a chunk, and the fewest and the most draws in it, as far as the other one allows.
_CHUNK_BYTES, _FEWEST_DRAWS, _MOST_DRAWS = 1 << 20, 64, 8_192

_METADATA = "zarr.json"


class _Held(WrapperStore[MemoryStore]):
    """
    A folder whose metadata are held in memory. Nothing in it is deleted: a reader may need it.

    :param folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.metadata: dict[str, Buffer] = {}
        super().__init__(MemoryStore(self.metadata))
        self._folder, self._disk = folder, LocalStore(folder)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        return await self._place(key).get(key, prototype, byte_range)

    async def set(self, key: str, value: Buffer) -> None:
        await asyncio.to_thread(self.set_sync, key, value)

    # some versions of zarr call these two in the place of the two above
    def get_sync(self, key: str, **options: Any) -> Buffer | None:
        return self._place(key).get_sync(key, **options)

    def set_sync(self, key: str, value: Buffer) -> None:
        if key.endswith(_METADATA):
            self.metadata[key] = value
        else:
            self.write(key, value)

    def write(self, key: str, value: Buffer) -> None:
        """Puts a file into the folder."""
        file = self._folder / key
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, value.as_numpy_array().data)

    def _place(self, key: str) -> MemoryStore | LocalStore:
        return self._store if key.endswith(_METADATA) else self._disk


class Store:
    """
    A store in a folder.

    :param path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = _Held(path)
        if self._exists:
            with self._metadata_named():
                found = _separated((path / _METADATA).read_bytes())
                self._held.metadata |= {k: cpu.Buffer.from_bytes(x) for k, x in found.items()}

    def create(self, groups: Mapping[str, Mapping[str, dict]], **attributes: Any) -> None:
        """
        Begins a store without draws.

        :param groups: the arrays, as :func:`variable` describes them, by group and name.
        :param attributes: attributes of the store.
        """
        root = zarr.create_group(self._held, overwrite=True, attributes=attributes)
        for group, arrays in groups.items():
            for name, settings in arrays.items():
                root.create_array(f"{group}/{name}", **settings)

    def append(self, start: int, values: Mapping[str, np.ndarray]) -> None:
        """
        Writes draws after the first ``start`` ones, which no reader sees before
        :meth:`publish`.

        :param values: for each array over draws, by its path, its new values.
        :raises ValueError: if a file of the store is not whole.
        """
        for name, array in values.items():
            place, axis = self._growing[name]
            _resize(place, axis, start + array.shape[axis])
            with _damage_named(self.path, name):
                place[(slice(None),) * axis + (slice(start, None),)] = array.astype(place.dtype)

    def publish(self, draws: int) -> None:
        """Shows readers this many draws: those that have been appended, or fewer."""
        for array, axis in self._growing.values():
            _resize(array, axis, draws)
        with warnings.catch_warnings():
            # that they are not in the specification yet; all readers that we know of have them
            warnings.filterwarnings("ignore", "Consolidated metadata is currently not part")
            zarr.consolidate_metadata(self._held)
        for key in sorted(self._held.metadata, key=_METADATA.__eq__):  # the root's last
            file, value = self.path / key, self._held.metadata[key]
            if not file.exists() or file.read_bytes() != value.to_bytes():
                self._held.write(key, value)
        flush_folder(self.path)

    def write(self, group: str, dataset: xr.Dataset) -> None:
        """Writes arrays that do not grow into a group, or puts them in the place of older ones."""
        # words of fixed length are not in the specification of Zarr
        words = {k: x.astype(object) for k, x in dataset.variables.items() if x.dtype.kind == "U"}
        new = [
            k for k in dataset.variables if f"{group}/{k}/{_METADATA}" not in self._held.metadata
        ]
        dataset.assign_coords(words).to_zarr(
            self._held, group=group, mode="a", consolidated=False, write_empty_chunks=True,
            encoding={name: {"compressors": [Crc32cCodec()]} for name in new},
        )  # fmt: skip

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Adds attributes of the store."""
        self._root.attrs.update(attributes)

    @property
    def draws(self) -> int:
        """Number of draws that readers see."""
        arrays = _growing_in(self._seen) if self._exists else {}
        return next((x.shape[axis] for x, axis in arrays.values()), 0)

    @property
    def nodes(self) -> list[str]:
        """Paths of the groups and arrays that readers see."""
        return [name for name, _ in self._seen.members(max_depth=None)]

    def read(self, name: str) -> np.ndarray:
        """
        All values of an array that readers see.

        :raises ValueError: if a file of the store is lost or not whole.
        """
        array: Any = self._seen[name]
        with _damage_named(self.path, name):
            _check_files(array)
            return array[...]

    def check(self) -> None:
        """
        Reads all draws, a chunk at a time.

        :raises ValueError: if a file of the store is lost or not whole, naming it.
        """
        for name, (array, _) in _growing_in(self._seen).items():
            with _damage_named(self.path, name):
                _check_files(array)
            for block in np.ndindex(array.cdata_shape):
                with _damage_named(self.path, f"{name}/{'/'.join(map(str, ('c', *block)))}"):
                    array.get_block_selection(block)

    def check_metadata(self) -> None:
        """
        :raises ValueError: if they are lost or not whole.
        """
        _growing_in(self._seen)

    @property
    def _exists(self) -> bool:
        return (self.path / _METADATA).exists()

    @property
    def _seen(self) -> zarr.Group:
        with self._metadata_named():
            return zarr.open_group(self.path, mode="r", use_consolidated=True)

    @contextmanager
    def _metadata_named(self) -> Iterator[None]:
        """
        :raises ValueError: instead of whatever zarr raises where metadata are not as it wrote them.
        """
        file = self.path / _METADATA
        try:
            yield
        except Exception as error:
            cause = f"is damaged ({type(error).__name__}: {error})" if file.exists() else "is lost"
            raise ValueError(
                f"{file}, which describes the store, {cause}. Something else has written into the"
                " store, or removed it. Put the file back, or begin anew with `resume=False`, which"
                " keeps the store under another name; its groups open one by one, for instance with"
                f" `xarray.open_zarr('{self.path / 'posterior'}', consolidated=False)`."
            ) from error

    @cached_property
    def _growing(self) -> dict[str, tuple[Any, int]]:
        # so that a file that is not there is one that was lost
        with zarr.config.set({"array.write_empty_chunks": True}):
            return _growing_in(self._root)

    @property
    def _root(self) -> zarr.Group:
        return zarr.open_group(self._held, mode="r+", use_consolidated=False)


def variable(shape: tuple[int, ...], dtype: Any, dims: list[str], num_draws: int) -> dict[str, Any]:
    """
    An array that grows along the dimension ``draw``, the first or the second, as
    ``zarr.create_array`` wants it.

    Chunks hold all chains and at least 64 draws, and so of a large site only a block of its
    values: to look at a few parameters little is read.

    :param shape: shape of one draw with all chains; of the draw itself ``()``.
    :param dims: names of the dimensions, with ``draw``.
    :param int num_draws: how many draws there are to be.
    """
    dtype = np.dtype(dtype)
    # Zarr knows the data types of NumPy only
    dtype = dtype if dtype.kind in "biuf" else np.dtype(np.float32)
    axis = dims.index("draw")
    block, most = list(shape), _CHUNK_BYTES // (_FEWEST_DRAWS * dtype.itemsize)
    for k in range(axis, len(block)):
        if math.prod(block) > most:
            block[k] = max(1, most // max(1, math.prod(block) // block[k]))
    draws = max(1, _CHUNK_BYTES // (max(1, math.prod(block)) * dtype.itemsize))
    draws = min(draws, _MOST_DRAWS, max(_FEWEST_DRAWS, num_draws))
    return {
        "shape": (*shape[:axis], 0, *shape[axis:]),
        "chunks": tuple(max(1, n) for n in (*block[:axis], draws, *block[axis:])),
        "dtype": dtype,
        "dimension_names": dims,
        # a tenth of the size would be saved for twice the processor time: draws are noise
        "compressors": [Crc32cCodec()],
    }


def _growing_in(root: zarr.Group) -> dict[str, tuple[Any, int]]:
    """The arrays over draws by their path, and which of the axes that is."""
    arrays = {k: x for k, x in root.members(max_depth=None) if isinstance(x, zarr.Array)}
    dims = {k: getattr(x.metadata, "dimension_names", None) or () for k, x in arrays.items()}
    return {k: (x, dims[k].index("draw")) for k, x in arrays.items() if "draw" in dims[k]}


def _separated(root: bytes) -> dict[str, bytes]:
    """
    The metadata of each node by file, from those of the root, which repeat all the others: a file
    that is lost is written again.
    """
    found = {_METADATA: root}
    for name, node in json.loads(root)["consolidated_metadata"]["metadata"].items():
        own = {key: value for key, value in node.items() if key != "consolidated_metadata"}
        found[f"{name}/{_METADATA}"] = json.dumps(own).encode()
    return found


def _check_files(array: Any) -> None:
    """
    :raises ValueError: if some are lost, of which zarr would make zeros.
    """
    if lost := array.nchunks - array.nchunks_initialized:
        raise ValueError(f"{lost:,} of {array.nchunks:,} files are lost")


def _resize(array: zarr.Array, axis: int, draws: int) -> None:
    array.resize((*array.shape[:axis], draws, *array.shape[axis + 1 :]))


@contextmanager
def _damage_named(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"`{name}` in the store {path} is damaged: {error}. Something else has written into the"
            " store, or the disk fails. Put the file back, or begin anew with `resume=False`, which"
            " keeps the store under another name."
        ) from error
