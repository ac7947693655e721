# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Draws in a Zarr store (version 3 of the format) that can be read at any moment.

Draws are appended in three steps: the chunks of the arrays, then the shape of each array, and last
the metadata of the root, which repeat all shapes. Each file is replaced as a whole, so a reader of
the root's ("consolidated") metadata sees all variables with the same number of complete draws,
whatever happens. zarr-python does it in the order shape, chunks and does not flush files, so the
files are written here; chunks are plain arrays in little-endian order.
"""

from collections.abc import Iterator, Mapping
import json
import math
from pathlib import Path
import shutil
import struct
from typing import Any

import numpy as np

from numpyro_sgmcmc.long_runs.checkpoint import flush_folder, write_atomically

#: Bytes of a chunk, and the fewest and the most draws in it, as far as the other one allows.
_CHUNK_BYTES, _FEWEST_DRAWS, _MOST_DRAWS = 1 << 20, 64, 8_192

_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}]
_CODECS_OF_WORDS = [{"name": "vlen-utf8"}]


class Store:
    """
    A store in a folder.

    :param path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        root = path / "zarr.json"
        content = json.loads(root.read_text()) if root.exists() else None
        #: metadata of the groups and arrays by their path in the store
        self.nodes: dict[str, dict] = {}
        self.attributes: dict[str, Any] = {}
        if content is not None:
            self.attributes = content["attributes"]
            self.nodes = content.get("consolidated_metadata", {}).get("metadata", {})

    def create(self, groups: Mapping[str, Mapping[str, dict]]) -> None:
        """
        Begins a store without draws.

        :param groups: metadata of arrays, made by :func:`variable`, by group and name.
        """
        for group, arrays in groups.items():
            self.nodes[group] = _group({})
            self.nodes |= {f"{group}/{name}": node for name, node in arrays.items()}
        for path, node in self.nodes.items():
            (self.path / path).mkdir(parents=True, exist_ok=True)
            _write_json(self.path / path / "zarr.json", node)
        self.publish(0)

    def append(self, start: int, values: Mapping[str, np.ndarray]) -> None:
        """
        Writes draws after the first ``start`` ones, which no reader sees before
        :meth:`publish`.

        :param values: for each array over draws, by its path, its new values.
        """
        for name, array in values.items():
            node = self.nodes[name]
            axis, array = node["dimension_names"].index("draw"), array.astype(node["data_type"])
            chunks = node["chunk_grid"]["configuration"]["chunk_shape"]
            length, stop = chunks[axis], start + array.shape[axis]
            for index, places in _grid(array.shape, chunks, axis):
                for k in range(start // length, -(-stop // length)):
                    file = self._chunk(name, (*index[:axis], k, *index[axis:]))
                    first, last = max(start, k * length), min(stop, (k + 1) * length)
                    content = np.zeros(chunks, array.dtype)
                    if first > k * length:
                        content = _content(file, content)
                    here = slice(first - start, last - start)
                    there = slice(first - k * length, last - k * length)
                    part = array[(*places[:axis], here, *places[axis:])]
                    inside = [slice(0, n) for n in part.shape]
                    inside[axis] = there
                    content[tuple(inside)] = part
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(file, _bytes(content))

    def publish(self, draws: int) -> None:
        """Shows readers this many draws: those that have been appended, or fewer."""
        for name, node in self.nodes.items():
            if (names := node.get("dimension_names")) and "draw" in names:
                node["shape"][names.index("draw")] = draws
                _write_json(self.path / name / "zarr.json", node)
        self._write_root()

    def write(self, group: str, arrays: Mapping[str, tuple[list[str], np.ndarray]]) -> None:
        """
        Writes a group of arrays that do not grow, or puts it in the place of an older one.

        :param arrays: names of dimensions and values by name.
        """
        self.nodes[group] = _group({})
        for name, (dims, values) in arrays.items():
            path = f"{group}/{name}"
            self.nodes[path] = _array(values.shape, values.dtype, values.shape, dims)
            file = self._chunk(path, (0,) * values.ndim)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, _words(values) if values.dtype.kind == "U" else _bytes(values))
            _write_json(self.path / path / "zarr.json", self.nodes[path])
        _write_json(self.path / group / "zarr.json", self.nodes[group])

    @property
    def draws(self) -> int:
        """Number of draws that readers see."""
        for node in self.nodes.values():
            if (names := node.get("dimension_names")) and "draw" in names:
                return node["shape"][names.index("draw")]
        return 0

    def read(self, name: str) -> np.ndarray:
        """All values of an array."""
        node = self.nodes[name]
        shape, dtype = node["shape"], np.dtype(node["data_type"])
        chunks = node["chunk_grid"]["configuration"]["chunk_shape"]
        found = np.empty(shape, dtype)
        for index, places in _grid(shape, chunks):
            content = _content(self._chunk(name, index), np.empty(chunks, dtype))
            found[places] = content[tuple(slice(0, n) for n in found[places].shape)]
        return found

    def _chunk(self, name: str, index: tuple[int, ...]) -> Path:
        return (self.path / name / "c").joinpath(*map(str, index))

    def _write_root(self) -> None:
        # zarr-python wants the same entry, without nodes, of the groups inside, and groups first
        groups, nodes = {}, {}
        for path, node in sorted(self.nodes.items()):
            if node["node_type"] == "group":
                groups[path] = node | _consolidated({})
            else:
                nodes[path] = node
        _write_json(
            self.path / "zarr.json", _group(self.attributes) | _consolidated(groups | nodes)
        )
        flush_folder(self.path)


def variable(shape: tuple[int, ...], dtype: Any, dims: list[str], num_draws: int) -> dict:
    """
    Metadata of an array that grows along the dimension ``draw``, the first or the second.

    Chunks hold all chains and at least 64 draws, and so of a large site only a block of its
    values: to look at a few parameters little is read.

    :param shape: shape of one draw with all chains; of the draw itself ``()``.
    :param dims: names of the dimensions, with ``draw``.
    :param int num_draws: how many draws there are to be.
    """
    dtype = _stored(dtype)
    axis = dims.index("draw")
    block, most = list(shape), _CHUNK_BYTES // (_FEWEST_DRAWS * dtype.itemsize)
    for k in range(axis, len(block)):
        if math.prod(block) > most:
            block[k] = max(1, most // max(1, math.prod(block) // block[k]))
    draws = max(1, _CHUNK_BYTES // (max(1, math.prod(block)) * dtype.itemsize))
    draws = min(draws, _MOST_DRAWS, max(_FEWEST_DRAWS, num_draws))
    whole, chunks = list(shape), block
    whole.insert(axis, 0)
    chunks.insert(axis, draws)
    return _array(whole, dtype, [max(1, n) for n in chunks], dims)


def _array(shape: Any, dtype: Any, chunks: Any, dims: list[str]) -> dict:
    dtype = np.dtype(dtype)
    fill: Any = {"b": False, "f": 0.0, "U": ""}.get(dtype.kind, 0)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(map(int, shape)),
        "data_type": "string" if dtype.kind == "U" else dtype.name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [max(1, int(n)) for n in chunks]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": _CODECS_OF_WORDS if dtype.kind == "U" else _CODECS,
        "attributes": {},
        "dimension_names": list(dims),
    }


def _group(attributes: dict) -> dict:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def _consolidated(nodes: dict) -> dict:
    inside = {"kind": "inline", "must_understand": False, "metadata": nodes}
    return {"consolidated_metadata": inside}


def _stored(dtype: Any) -> np.dtype:
    """The data type in the store: Zarr knows those of NumPy only."""
    dtype = np.dtype(dtype)
    return dtype if dtype.kind in "biuf" else np.dtype(np.float32)


def _grid(shape: Any, chunks: Any, left_out: int | None = None) -> Iterator[tuple[tuple, tuple]]:
    """Of every chunk the index and the place in the array, without one of the axes."""
    axes = [k for k in range(len(shape)) if k != left_out]
    counts = [-(-shape[k] // chunks[k]) for k in axes]
    for index in np.ndindex(*counts):
        yield (
            index,
            tuple(
                slice(i * chunks[k], min(shape[k], (i + 1) * chunks[k]))
                for i, k in zip(index, axes, strict=True)
            ),
        )


def _content(file: Path, like: np.ndarray) -> np.ndarray:
    """
    :raises ValueError: if the file is not whole.
    """
    found = np.fromfile(file, like.dtype.newbyteorder("<"))
    if found.size != like.size:
        raise ValueError(
            f"The file {file} of the store has {found.size:,} values where {like.size:,} belong:"
            " something else has written into the store. Begin anew with `resume=False`."
        )
    return found.astype(like.dtype, copy=False).reshape(like.shape)


def _bytes(values: np.ndarray) -> memoryview:
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


def _words(values: np.ndarray) -> bytes:
    """Their number, and each with its length before it."""
    words = [word.encode() for word in values.ravel().tolist()]
    found = [struct.pack("<I", len(words))]
    return b"".join(found + [struct.pack("<I", len(word)) + word for word in words])


def _write_json(path: Path, content: dict) -> None:
    # there are no infinite numbers in JSON
    text = json.dumps(content, allow_nan=False)
    write_atomically(path, text.encode())


def put_aside(path: Path) -> Path:
    """Renames a store to the first free of ``NAME.1``, ``NAME.2``, ..."""
    k = 1
    while (new := path.with_name(f"{path.name}.{k}")).exists():
        k += 1
    shutil.move(path, new)
    return new
