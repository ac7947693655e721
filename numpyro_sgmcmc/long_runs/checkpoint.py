# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Checkpoint files, from which a run goes on; written atomically and checked when read.

A checkpoint is an ``.npz`` archive of NumPy, not compressed and read with ``allow_pickle=False``.
It has arrays, each with a CRC-32, and a member ``words`` of JSON for everything else
(:mod:`numpyro_sgmcmc.long_runs.records`). Reading it runs no code.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
import io
import json
import math
from pathlib import Path
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

VERSION = 7

#: First bytes of a checkpoint, first bytes up to version 4, and the version after them.
_MAGIC, _OLD_MAGIC = b"PK", b"SGMCMCRN"

REMEDY = (
    "`resume=False` begins anew and keeps the store under another name, and its draws can still be"
    " opened."
)


class Key(NamedTuple):
    """
    A random key of JAX.

    - **implementation** - the name of the implementation.
    - **data** - the numbers of the key.
    """

    implementation: str
    data: np.ndarray

    def key(self) -> Any:
        return random.wrap_key_data(jnp.asarray(self.data), impl=self.implementation)


#: Types in a checkpoint, besides numbers, words and arrays.
_KINDS = kinds_in(Key, Moments, ThinnedDraws, RowsOfRun, ContentHash, Tuning)

#: Fields of the checkpoint of a run and their types: the identity of the run, the number of draws
#: of each chain, the state, the tuning, the records of rows on disk and of growing rows, the number
#: of samples, the moments, the monitored draws, the seconds, and the metadata and checksums of the
#: store.
_FIELDS: dict[str, Any] = {
    "about": dict[str, str | float | bool | dict[str, str]], "draws": int,
    "leaves": dict[str, np.ndarray | Key], "tuning": Any, "rows": list[ContentHash | None],
    "known": RowsOfRun | None, "done": int, "moments": Moments, "monitored": ThinnedDraws | None,
    "seconds": float, "metadata": str, "manifest": dict[str, np.ndarray],
}  # fmt: skip


def save(path: Path, content: Mapping[str, Any]) -> None:
    """
    Write a checkpoint in the place of the previous one.

    :raises TypeError: if the content has anything that is not data.
    """
    arrays: list[np.ndarray] = []
    words = {"version": VERSION, "content": as_words(content, arrays, _KINDS)}
    words["types"] = [str(x.dtype) for x in arrays]
    text, file = np.frombuffer(json.dumps(words).encode(), np.uint8), io.BytesIO()
    np.savez(file, *map(_of_numpy, arrays), words=text)
    write_atomically(path, file.getbuffer())
    flush_folder(path.parent)


def load(path: Path) -> dict[str, Any]:
    """
    Read the content of a checkpoint.

    :raises ValueError: if the file is incomplete, or of another version.
    """
    try:
        content = read(path)
    except OSError as error:
        raise ValueError(f"The checkpoint {path} cannot be read: {error}. {REMEDY}") from error
    if content.startswith(_OLD_MAGIC):
        start = len(_OLD_MAGIC)
        raise _of_version(path, int.from_bytes(content[start : start + 4], "little"))
    if not content.startswith(_MAGIC):
        raise ValueError(f"{path} is not a checkpoint, or its beginning is lost. {REMEDY}")
    try:
        words, arrays = _members_of(content)
    except Exception as error:  # archives with other content raise many kinds of errors
        raise ValueError(
            f"The checkpoint {path} is truncated or corrupted"
            f" ({type(error).__name__}: {error}). {REMEDY}"
        ) from error
    with understood(path):
        if (version := words["version"]) != VERSION:
            raise _of_version(path, version)
        try:
            arrays = [x.view(of) for x, of in zip(arrays, words["types"], strict=True)]
            record = from_words(words["content"], arrays, _KINDS)
        except ValueError as error:
            raise TypeError(error) from error
        if not isinstance(record, dict):
            raise TypeError("it has no named fields")
    return record


def _members_of(content: bytes) -> tuple[Any, list[np.ndarray]]:
    """
    The words and the arrays of an archive.

    :raises Exception: of many kinds, if the archive is incomplete.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        # with another shape in its header an array would be read in part, without its checksum
        if (name := file.zip.testzip()) is not None:
            raise ValueError(f"the checksum of its member {name} differs")
        arrays = [file[f"arr_{k}"] for k in range(len(file.files) - 1)]
        return json.loads(file["words"].tobytes()), arrays


def _of_numpy(array: np.ndarray) -> np.ndarray:
    """The array, or its bytes if its type, such as bfloat16, is not one of NumPy."""
    array = np.asarray(array, order="C")
    return array if array.dtype.isbuiltin == 1 else array.view(f"V{array.itemsize}")


def _of_version(path: Path, version: Any) -> ValueError:
    return ValueError(
        f"The checkpoint {path} has version {version} of the format; this is version {VERSION}. Go"
        f" on with the version of numpyro_sgmcmc that wrote it. {REMEDY}"
    )


def load_run(path: Path) -> dict[str, Any]:
    """
    Read the content of the checkpoint of a run.

    :raises ValueError: if the file is invalid, or a field of a run is missing or has another type.
    """
    content = load(path)
    with understood(path):
        if names := sorted(_FIELDS.keys() ^ content.keys()):
            raise TypeError(f"its fields {', '.join(names)} are missing or unknown")
        for name, kind in _FIELDS.items():
            if not is_of_type(content[name], kind):
                raise TypeError(f"its `{name}` has another type than in a run")
        least = min(content["draws"], content["done"], content["seconds"])
        if not 0 <= least <= max(content["done"], content["seconds"]) < math.inf:
            raise TypeError("its numbers of draws, samples and seconds are impossible")
    return content


@contextmanager
def understood(path: Path | None) -> Iterator[None]:
    """
    Context that turns any error from invalid content of a checkpoint into a ``ValueError``.

    The checksum of the checkpoint is right here, but its content need not be.

    :raises ValueError: in the place of errors from other content.
    """
    try:
        yield
    except (TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"The checkpoint {path} was written by something else:"
            f" {error if isinstance(error, TypeError) else repr(error)}. {REMEDY}"
        ) from error


def held(tree: Any) -> dict[str, Any]:
    """The leaves of a state by their paths, on the host."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        leaves[jax.tree_util.keystr(path)] = _key_of(leaf) if is_key else np.array(leaf)
    return leaves


def restored(path: Path, leaves: Mapping[str, Any], template: Any) -> Any:
    """
    Rebuild a state from the leaves of a checkpoint.

    :param template: a state with the expected structure, or its shapes.
    :raises ValueError: if the structures differ, with the place.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(template)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    begin = f"The state in the checkpoint {path} is of another kernel or model"
    if missing := set(names) ^ set(leaves):
        raise ValueError(f"{begin}: only one of the two has {', '.join(sorted(missing))}. {REMEDY}")
    values = []
    for name, (_, expected) in zip(names, paths, strict=True):
        leaf_on_host = leaves[name]
        try:
            value = (
                leaf_on_host.key() if isinstance(leaf_on_host, Key) else np.asarray(leaf_on_host)
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"{begin}: `{name}` is no random key: {error}. {REMEDY}") from error
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise ValueError(
                f"{begin}: `{name}` was {value.dtype}{list(value.shape)} and is"
                f" {expected.dtype}{list(expected.shape)}. {REMEDY}"
            )
        several = isinstance(expected, jax.Array) and len(expected.sharding.device_set) > 1
        # the devices may belong to several processes, which have all read equal values
        places = {"out_shardings": expected.sharding} if several else {}
        values.append(jax.jit(lambda x: x, **places)(value))
    return jax.tree.unflatten(tree, values)


def _key_of(key: Any) -> Key:
    return Key(str(random.key_impl(key)), np.asarray(random.key_data(key)))
