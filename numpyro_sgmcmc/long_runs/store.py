# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
A Zarr store of draws (version 3 of the format) that can be read at any moment.

zarr-python would show a longer array before its new chunks exist, and one variable before the
others. So chunks go to disk at once, and metadata wait in memory for :meth:`Store.publish`. It
writes the metadata of the arrays and then the metadata of the root, which repeat all shapes. Each
file is flushed and replaced as a whole. So a reader of the root's ("consolidated") metadata always
sees all variables with an equal number of complete draws. Each chunk ends in its CRC-32C checksum,
which every reader of Zarr compares. The checksum shows that a chunk is complete, but not that it is
the right one. So the checkpoint also keeps a manifest of the draws in each place.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import product
import json
import math
import os
from pathlib import Path
from typing import Any
import warnings
from zlib import crc32

import numpy as np
import xarray as xr

from numpyro_sgmcmc.data.files import flush_folder, plain, read, write_atomically

try:
    import zarr
    from zarr.abc.buffer import Buffer, BufferPrototype
    from zarr.abc.store import ByteRequest
    from zarr.buffer import cpu
    from zarr.codecs import Crc32cCodec
    from zarr.storage import MemoryStore, WrapperStore
except ImportError as error:
    raise ImportError(
        "`LongRun(store=...)` writes with zarr 3.1.6 or later: pip install 'numpyro_sgmcmc[zarr]'."
    ) from error

#: Bytes of a chunk, and the fewest and the most draws in it, as far as these agree.
_CHUNK_BYTES, _FEWEST_DRAWS, _MOST_DRAWS = 1 << 20, 64, 8_192

_METADATA = "zarr.json"

#: Number of damaged files that an error names.
_NAMED = 5

#: Checksums of the values in each chunk of an array, by its path. They run draw by draw over the
#: existing draws, so that new draws do not need the earlier ones.
Manifest = dict[str, np.ndarray]


class _Held(WrapperStore[MemoryStore]):
    """
    A folder whose metadata are held in memory.

    Nothing in it is deleted, because a reader may need it.

    :param root: the metadata of the root, which repeat all others; None for a new store.
    :param bool is_read: whether a missing file counts as lost, and not as a new one.
    """

    def __init__(self, folder: Path, root: bytes | None = None, is_read: bool = False) -> None:
        self.metadata: dict[str, Buffer] = {}
        super().__init__(MemoryStore(self.metadata))
        self._folder, self._is_read = folder, is_read
        if root is not None:
            files = _separated(root)
            self.metadata |= {k: cpu.Buffer.from_bytes(x) for k, x in files.items()}

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        return await asyncio.to_thread(self.get_sync, key, prototype=prototype)

    async def set(self, key: str, value: Buffer) -> None:
        await asyncio.to_thread(self.set_sync, key, value)

    # some versions of zarr call these two in the place of the two above; chunks are read as a
    # whole, because they end in their checksum
    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, **options: Any
    ) -> Buffer | None:
        if key.endswith(_METADATA):
            return self.metadata.get(key)
        content = self.on_disk(key)
        buffer = (prototype or cpu.buffer_prototype).buffer
        return None if content is None else buffer.from_bytes(content)

    def on_disk(self, key: str) -> bytes | None:
        """The content of a file of the folder, or None for a new file."""
        try:
            return read(self._folder / key)
        except FileNotFoundError:
            if self._is_read:
                raise
            return None

    def set_sync(self, key: str, value: Buffer) -> None:
        if key.endswith(_METADATA):
            self.metadata[key] = value
        else:
            self.write(key, value)

    def write(self, key: str, value: Buffer) -> None:
        """Write a file into the folder."""
        file = self._folder / key
        plain(file).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, value.as_numpy_array().data)


class Store:
    """A Zarr store of draws in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        with self._metadata_named():
            self._held = _Held(self.path, self._root_on_disk if self._exists else None)

    def create(self, groups: Mapping[str, Mapping[str, dict]], **attributes: Any) -> None:
        """
        Make a store without draws.

        :param groups: the arrays, in the form of :func:`variable`, by group and name.
        """
        root = zarr.create_group(self._held, overwrite=True, attributes=attributes)
        for group, arrays in groups.items():
            for name, settings in arrays.items():
                root.create_array(f"{group}/{name}", **settings)

    def append(self, start: int, values: Mapping[str, np.ndarray], manifest: Manifest) -> Manifest:
        """
        Write draws after the first ``start`` ones; readers see them after :meth:`publish`.

        :param values: new values of each array over draws, by path.
        :return: the manifest with the new draws.
        :raises ValueError: if a file of the store is incomplete.
        """
        sums = dict(manifest)
        for name, array in values.items():
            place, axis = self._growing[name]
            array = array.astype(place.dtype)
            _resize(place, axis, start + array.shape[axis])
            try:
                place[(slice(None),) * axis + (slice(start, None),)] = array
            except ValueError as error:
                raise self._damage([f"draws cannot be added to `{name}`, {error}"]) from error
            sums[name] = _checksums(sums[name], start, array, place.chunks, axis)
        return sums

    def publish(self, draws: int) -> None:
        """Show this many draws to readers; at most the number of appended draws."""
        for array, axis in self._growing.values():
            _resize(array, axis, draws)
        with warnings.catch_warnings():
            # consolidated metadata are not in the specification yet, but all known readers have
            # them
            warnings.filterwarnings("ignore", "Consolidated metadata is currently not part")
            zarr.consolidate_metadata(self._held)
        for key in sorted(self._held.metadata, key=_METADATA.__eq__):  # the root comes last
            value = self._held.metadata[key]
            if self._held.on_disk(key) != value.to_bytes():
                self._held.write(key, value)
        flush_folder(self.path)

    def write(self, group: str, dataset: xr.Dataset) -> None:
        """Write arrays of fixed size into a group, or replace older ones."""
        # the specification of Zarr has no words of fixed length
        words = {k: x.astype(object) for k, x in dataset.variables.items() if x.dtype.kind == "U"}
        new = [
            k for k in dataset.variables if f"{group}/{k}/{_METADATA}" not in self._held.metadata
        ]
        dataset.assign_coords(words).to_zarr(
            self._held, group=group, mode="a", consolidated=False, write_empty_chunks=True,
            encoding={name: {"compressors": [Crc32cCodec()]} for name in new},
        )  # fmt: skip

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes to the store."""
        self._root.attrs.update(attributes)

    @property
    def draws(self) -> int:
        """The number of draws that readers see."""
        arrays = _growing_in(self._seen) if self._exists else {}
        return next((x.shape[axis] for x, axis in arrays.values()), 0)

    @property
    def nodes(self) -> list[str]:
        """The paths of the groups and arrays that readers see."""
        return [name for name, _ in self._seen.members(max_depth=None)]

    @property
    def metadata(self) -> str:
        """All metadata, as published last."""
        return self._held.metadata[_METADATA].to_bytes().decode()

    @property
    def manifest(self) -> Manifest:
        """The manifest of the draws that readers see, and of the coordinates."""
        return {
            name: _checksums(np.zeros((0,) * x.ndim), 0, np.asarray(x[...]), x.chunks, _axis_of(x))
            for name, x in _arrays_in(self._seen).items()
        }

    def read(self, name: str, manifest: Manifest | None = None, draws: int = 0) -> np.ndarray:
        """
        Read all values of an array that readers see.

        :param manifest: the manifest of the expected values.
        :param int draws: the number of expected draws.
        :raises ValueError: if values differ, or a file of the store is lost or incomplete.
        """
        with self._metadata_named():
            array: Any = self._seen[name]
            axis = _axis_of(array)
            stop = array.shape[axis] if manifest is None or "draw" not in _dims_of(array) else draws
            expected = None if manifest is None else manifest[name]
            values = np.empty((*array.shape[:axis], stop, *array.shape[axis + 1 :]), array.dtype)
        if damaged := list(_damaged(name, array, expected, stop, values)):
            raise self._damage(damaged)
        return values

    def check(self, manifest: Manifest, draws: int) -> None:
        """
        Read and check all draws, a chunk at a time.

        :param manifest: the manifest of the expected values.
        :param int draws: the number of expected draws.
        :raises ValueError: if values differ, or a file of the store is lost or incomplete, naming
            file and draws.
        """
        arrays = _arrays_in(self._seen)
        names = {name for name in arrays if name.split("/")[0] != "moments"}
        damaged = [
            f"only one of the store and the checkpoint has `{k}`" for k in names ^ manifest.keys()
        ]
        for name in sorted(names & manifest.keys()):
            array = arrays[name]
            stop = draws if "draw" in _dims_of(array) else array.shape[0]
            damaged += _damaged(name, array, manifest[name], stop)
        if damaged:
            raise self._damage(damaged)

    def go_on(self, metadata: str) -> None:
        """
        Go on from the metadata in a checkpoint.

        :param metadata: the metadata of the store at the checkpoint.
        :raises ValueError: if the present metadata are lost, incomplete or different.
        :raises TypeError: if the checkpoint has no metadata.
        """
        try:
            there = _described(metadata.encode())
        except Exception as error:
            raise TypeError(f"its `metadata` do not describe a store ({error!r})") from error
        with self._metadata_named():
            here = _described(self._root_on_disk)
            zarr.open_group(
                _Held(self.path, self._root_on_disk),
                mode="r+",
                zarr_format=3,
                use_consolidated=True,
            )
            if others := sorted(k for k in here.keys() | there if here.get(k) != there.get(k)):
                raise ValueError(f"its entries {', '.join(others)} have changed since the run")
        self._held = _Held(self.path, metadata.encode())

    @property
    def _exists(self) -> bool:
        return os.path.lexists(self.path / _METADATA)

    @property
    def _root_on_disk(self) -> bytes:
        return read(self.path / _METADATA)

    @property
    def _seen(self) -> zarr.Group:
        with self._metadata_named():
            held = _Held(self.path, self._root_on_disk, is_read=True)
            return zarr.open_group(held, mode="r+", zarr_format=3, use_consolidated=True)

    @contextmanager
    def _metadata_named(self) -> Iterator[None]:
        """
        Context that turns errors of zarr from changed metadata into one error.

        :raises ValueError: in the place of any error of zarr from changed metadata.
        """
        file = self.path / _METADATA
        try:
            yield
        except Exception as error:
            cause = f"is damaged ({type(error).__name__}: {error})" if self._exists else "is lost"
            raise ValueError(
                f"{file}, which describes the store, {cause}, because something else has written"
                " into the store or removed it. Put the file back, or begin anew with"
                " `resume=False`, which keeps the store under another name. Its groups open one by"
                f" one, for instance with `xarray.open_zarr('{self.path / 'posterior'}',"
                " consolidated=False)`."
            ) from error

    def _damage(self, files: list[str]) -> ValueError:
        more = f"; and {len(files) - _NAMED:,} more" if len(files) > _NAMED else ""
        return ValueError(
            f"The store {self.path} is damaged: {'; '.join(files[:_NAMED])}{more}. Something else"
            " has written into the store, or the disk fails, and none of it is used. Put the files"
            " back, or begin anew with `resume=False`, which keeps the store under another name."
        )

    @cached_property
    def _growing(self) -> dict[str, tuple[Any, int]]:
        # a missing file counts as lost from now on
        with zarr.config.set({"array.write_empty_chunks": True}):
            return _growing_in(self._root)

    @property
    def _root(self) -> zarr.Group:
        return zarr.open_group(self._held, mode="r+", use_consolidated=False)


def variable(shape: tuple[int, ...], dtype: Any, dims: list[str], num_draws: int) -> dict[str, Any]:
    """
    The description of an array over draws, in the form that ``zarr.create_array`` takes.

    The array grows along the dimension ``draw``, its first or second one.

    A chunk has all chains and at least 64 draws. For a large site it has only a block of the
    values, so that reading a few parameters reads few bytes.

    :param shape: shape of one draw with all chains; ``()`` for the coordinate ``draw``.
    :param dims: names of the dimensions, with ``draw``.
    :param int num_draws: the expected number of draws.
    """
    dtype = np.dtype(dtype)
    # Zarr has only the data types of NumPy
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
        # compression of draws would save a tenth of the size and double the processor time
        "compressors": [Crc32cCodec()],
    }


def _arrays_in(root: zarr.Group) -> dict[str, Any]:
    return {k: x for k, x in root.members(max_depth=None) if isinstance(x, zarr.Array)}


def _dims_of(array: Any) -> tuple[str | None, ...]:
    return getattr(array.metadata, "dimension_names", None) or ()


def _axis_of(array: Any) -> int:
    """The axis of the draws, or the first axis."""
    dims = _dims_of(array)
    return dims.index("draw") if "draw" in dims else 0


def _growing_in(root: zarr.Group) -> dict[str, tuple[Any, int]]:
    """The arrays over draws, by path, with the axis of the draws."""
    return {k: (x, _axis_of(x)) for k, x in _arrays_in(root).items() if "draw" in _dims_of(x)}


def _described(root: bytes) -> dict[str, Any]:
    """
    The constant part of the root's metadata of every node.

    It leaves out the number of draws and the moments.
    """
    nodes = json.loads(root)["consolidated_metadata"]["metadata"]
    for node in nodes.values():
        node.pop("consolidated_metadata", None)
        if "draw" in (dims := node.get("dimension_names") or []):
            node["shape"][dims.index("draw")] = 0
    return {name: node for name, node in nodes.items() if name.split("/")[0] != "moments"}


def _separated(root: bytes) -> dict[str, bytes]:
    """
    The metadata of each node by file, from the metadata of the root.

    The root repeats all others, so that a lost file can be written again.
    """
    files = {_METADATA: root}
    for name, node in json.loads(root)["consolidated_metadata"]["metadata"].items():
        own = {key: value for key, value in node.items() if key != "consolidated_metadata"}
        files[f"{name}/{_METADATA}"] = json.dumps(own).encode()
    return files


def _resize(array: zarr.Array, axis: int, draws: int) -> None:
    array.resize((*array.shape[:axis], draws, *array.shape[axis + 1 :]))


def _checksums(
    before: np.ndarray, start: int, values: np.ndarray, chunks: tuple[int, ...], axis: int
) -> np.ndarray:
    """
    The checksums of an array with new values after the first ``start`` ones along an axis.

    :param before: the checksums before the new values.
    """
    shape = list(values.shape)
    shape[axis] += start
    blocks = [range(-(-n // chunk)) for n, chunk in zip(shape, chunks, strict=True)]
    sums = np.zeros(tuple(map(len, blocks)), np.uint32)
    sums[tuple(map(slice, before.shape))] = before
    blocks[axis] = blocks[axis][start // chunks[axis] :]
    for block in product(*blocks):
        place = _place(block, chunks)
        place[axis] = slice(max(0, place[axis].start - start), place[axis].stop - start)
        sums[block] = _checksum(values[tuple(place)], axis, int(sums[block]))
    return sums


def _place(block: tuple[int, ...], chunks: tuple[int, ...]) -> list[slice]:
    """The slices of a chunk in its array."""
    return [slice(k * n, (k + 1) * n) for k, n in zip(block, chunks, strict=True)]


def _checksum(values: np.ndarray, axis: int, before: int = 0) -> int:
    return crc32(np.moveaxis(values, axis, 0).tobytes(), before)


def _damaged(
    name: str,
    array: Any,
    expected: np.ndarray | None,
    stop: int,
    values: np.ndarray | None = None,
) -> Iterator[str]:
    """
    Descriptions of the lost, incomplete or wrong files of an array, with the draws in them.

    :param expected: the checksums of the array, if they are known.
    :param int stop: the number of draws behind the checksums.
    :param values: an array that receives the values, or None.
    """
    axis, chunks = _axis_of(array), array.chunks
    has_draws = "draw" in _dims_of(array)
    grid = [-(-n // chunk) for n, chunk in zip(array.shape, chunks, strict=True)]
    grid[axis] = -(-stop // chunks[axis])
    if array.shape[axis] < stop or expected is not None and expected.shape != tuple(grid):
        yield f"`{name}` has shape {array.shape}, which does not fit {stop:,} draws"
        return
    for block in np.ndindex(*grid):
        place = _place(block, chunks)
        first, last = place[axis].start, min(place[axis].stop, stop)
        place[axis] = slice(first, last)
        try:
            part = np.asarray(array[tuple(place)])
            cause = "differs from what the run wrote"
            is_right = expected is None or _checksum(part, axis) == expected[block]
        except Exception as error:  # files with other content raise many kinds of errors
            is_right, cause = False, f"{type(error).__name__}: {error}"
        if not is_right:
            lost = f"draws {first:,} to {last - 1:,} of each chain" if has_draws else "coordinates"
            yield f"`{name}/{'/'.join(map(str, ('c', *block)))}` ({lost}): {cause}"
        elif values is not None:
            values[tuple(place)] = part
