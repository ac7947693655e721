# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The file from which a run goes on: written whole or not at all, and never believed unchecked.

It has a header, the magic word, the version of the format, the length and the BLAKE2b checksum
of what follows; then the length of some JSON, the JSON, which describes values and arrays
(:mod:`numpyro_sgmcmc.long_runs.records`), and the arrays, byte by byte. Reading it runs nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
import hashlib
import json
import math
from pathlib import Path
import struct
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.content_hash import ContentHash
from numpyro_sgmcmc.long_runs.effective_size import ThinnedDraws
from numpyro_sgmcmc.long_runs.files import flush_folder, read, write_atomically
from numpyro_sgmcmc.long_runs.growing import RowsOfRun
from numpyro_sgmcmc.long_runs.moments import Moments
from numpyro_sgmcmc.long_runs.records import as_words, from_words, is_of_type, kinds_in
from numpyro_sgmcmc.tuning.tuning import Tuning

#: Up to version 2 the file was a pickle, which can run any program when it is read.
_MAGIC, VERSION = b"SGMCMCRN", 4
_HEADER, _LENGTH = struct.Struct("<8sIQ32s"), struct.Struct("<Q")

REMEDY = (
    "`resume=False` begins anew and keeps the store under another name; the draws in it can be"
    " opened as before."
)


class Key(NamedTuple):
    """
    A random key of JAX.

    - **implementation** - its name.
    - **data** - the numbers of the key.
    """

    implementation: str
    data: np.ndarray

    def key(self) -> Any:
        return random.wrap_key_data(jnp.asarray(self.data), impl=self.implementation)


#: What a checkpoint has, besides numbers, words and arrays.
_KINDS = kinds_in(Key, Moments, ThinnedDraws, RowsOfRun, ContentHash, Tuning)

#: What the checkpoint of a run has: what makes it this run, the draws of each chain, the state, the
#: tuning, what it has seen of rows on disk and knows of those that keep coming; samples taken,
#: moments, draws that are monitored, and seconds; and of the store its metadata and its checksums.
_FIELDS: dict[str, Any] = {
    "about": dict[str, str | float | bool | dict[str, str]], "draws": int,
    "leaves": dict[str, np.ndarray | Key], "tuning": Any, "rows": list[ContentHash | None],
    "known": RowsOfRun | None, "done": int, "moments": Moments, "monitored": ThinnedDraws | None,
    "seconds": float, "metadata": str, "manifest": dict[str, np.ndarray],
}  # fmt: skip


def save(path: Path, content: Mapping[str, Any]) -> None:
    """
    Puts a checkpoint in the place of the one before.

    :raises TypeError: if there is something in it that is not data.
    """
    arrays: list[np.ndarray] = []
    words = as_words(content, arrays, _KINDS)
    shapes = [{"dtype": str(x.dtype), "shape": x.shape} for x in arrays]
    text = json.dumps({"content": words, "arrays": shapes}).encode()
    body: list[bytes | memoryview] = [_LENGTH.pack(len(text)), text, *map(_bytes_of, arrays)]
    length = sum(map(len, body))
    write_atomically(path, _HEADER.pack(_MAGIC, VERSION, length, _checksum(*body)), *body)
    flush_folder(path.parent)


def load(path: Path) -> dict[str, Any]:
    """
    :raises ValueError: if it is not whole, or not a checkpoint of this version.
    """
    try:
        content = read(path)
    except OSError as error:
        raise ValueError(f"The checkpoint {path} cannot be read: {error}. {REMEDY}") from error
    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        raise ValueError(f"{path} is not a checkpoint, or its start is lost. {REMEDY}")
    _, version, length, checksum = _HEADER.unpack_from(content)
    body = memoryview(content)[_HEADER.size :]
    if version != VERSION:
        why = ", a pickle, which could run any program and is not opened" if version < 3 else ""
        raise ValueError(
            f"The checkpoint {path} has version {version} of the format{why}; this is version"
            f" {VERSION}. Go on with the version of numpyro_sgmcmc that wrote it. {REMEDY}"
        )
    if len(body) != length:
        raise ValueError(
            f"The checkpoint {path} is truncated: {len(body):,} of {length:,} bytes. {REMEDY}"
        )
    if _checksum(body) != checksum:
        raise ValueError(f"The checkpoint {path} is corrupted: its checksum differs. {REMEDY}")
    with understood(path):
        try:
            return _content_of(body)
        except ValueError as error:
            raise TypeError(error) from error


def load_run(path: Path) -> dict[str, Any]:
    """
    The same of a run.

    :raises ValueError: also if something of a run is not there, or is of another kind.
    """
    found = load(path)
    with understood(path):
        if names := sorted(_FIELDS.keys() ^ found.keys()):
            raise TypeError(f"of a run it lacks, or has besides, {', '.join(names)}")
        for name, kind in _FIELDS.items():
            if not is_of_type(found[name], kind):
                raise TypeError(f"its `{name}` is not what a run has there")
        least = min(found["draws"], found["done"], found["seconds"])
        if not 0 <= least <= max(found["done"], found["seconds"]) < math.inf:
            raise TypeError("its numbers of draws, samples and seconds are not those of a run")
    return found


@contextmanager
def understood(path: Path | None) -> Iterator[None]:
    """
    Within it a checkpoint is used whose checksum is right, and whose content may not be.

    :raises ValueError: instead of whatever content of another kind ends in.
    """
    try:
        yield
    except (TypeError, LookupError, ArithmeticError, RecursionError, struct.error) as error:
        raise ValueError(
            f"The checkpoint {path} was written by something else:"
            f" {error if isinstance(error, TypeError) else repr(error)}. {REMEDY}"
        ) from error


def _content_of(body: memoryview) -> dict[str, Any]:
    """
    :raises ValueError: or another error, if it is not as :func:`save` writes it.
    """
    (length,) = _LENGTH.unpack_from(body)
    begin = _LENGTH.size + length
    text = json.loads(bytes(body[_LENGTH.size : begin]))
    arrays = []
    for described in text["arrays"]:
        dtype, shape = np.dtype(str(described["dtype"])), tuple(described["shape"])
        end = begin + math.prod(shape) * dtype.itemsize
        if dtype.hasobject or not 0 <= begin <= end <= len(body):
            raise ValueError(f"no array of {dtype} and shape {shape} is there")
        # a copy, at an address that suits its type
        arrays.append(np.frombuffer(body[begin:end], dtype).reshape(shape).copy())
        begin = end
    found = from_words(text["content"], arrays, _KINDS)
    if not isinstance(found, dict):
        raise ValueError("it has no names")
    return found


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _checksum(*parts: bytes | memoryview) -> bytes:
    found = hashlib.blake2b(digest_size=32)
    for part in parts:
        found.update(part)
    return found.digest()


def held(tree: Any) -> dict[str, Any]:
    """The leaves of a state by their paths, on the host."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found[jax.tree_util.keystr(path)] = _key_of(leaf) if is_key else np.array(leaf)
    return found


def restored(path: Path, leaves: Mapping[str, Any], template: Any) -> Any:
    """
    The state with these leaves.

    :param path: of the checkpoint that they are from.
    :param template: a state of the same structure, or shapes of one.
    :raises ValueError: if it has another structure, naming where.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(template)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    begin = f"The state in the checkpoint {path} is of another kernel or model"
    if missing := set(names) ^ set(leaves):
        raise ValueError(
            f"{begin}: these are in only one of the two: {', '.join(sorted(missing))}. {REMEDY}"
        )
    values = []
    for name, (_, expected) in zip(names, paths, strict=True):
        found = leaves[name]
        try:
            value = found.key() if isinstance(found, Key) else np.asarray(found)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{begin}: `{name}` is no random key: {error}. {REMEDY}") from error
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise ValueError(
                f"{begin}: `{name}` was {value.dtype}{list(value.shape)} and is"
                f" {expected.dtype}{list(expected.shape)}. {REMEDY}"
            )
        several = isinstance(expected, jax.Array) and len(expected.sharding.device_set) > 1
        # the devices may be those of several processes, all of which have read the same
        places = {"out_shardings": expected.sharding} if several else {}
        values.append(jax.jit(lambda x: x, **places)(value))
    return jax.tree.unflatten(tree, values)


def _key_of(key: Any) -> Key:
    return Key(str(random.key_impl(key)), np.asarray(random.key_data(key)))
