# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The file from which a run goes on: written whole or not at all, and never believed unchecked.

It has a header, the magic word, the version of the format, the length and the BLAKE2b checksum
of what follows, and then a pickle: open no checkpoint of people whose programs you would not run.
"""

from collections.abc import Mapping
import hashlib
import os
from pathlib import Path
import pickle
import struct
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

_MAGIC, VERSION = b"SGMCMCRN", 2
_HEADER = struct.Struct("<8sIQ32s")

_REMEDY = (
    "`resume=False` begins anew and keeps the store under another name; the draws in it can be"
    " opened as before."
)


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """The file with this content, in parts; whatever happens, it is the old one or the new one."""
    new = path.with_name(f"{path.name}.new")
    with open(new, "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def flush_folder(path: Path) -> None:
    """Makes sure that the names in a folder outlast a failure of the machine."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Puts a checkpoint in the place of the one before."""
    body = pickle.dumps(dict(content), protocol=pickle.HIGHEST_PROTOCOL)
    header = _HEADER.pack(_MAGIC, VERSION, len(body), _checksum(body))
    write_atomically(path, header, body)
    flush_folder(path.parent)


def load(path: Path) -> dict[str, Any]:
    """
    :raises ValueError: if it is not whole, or not a checkpoint of this version.
    """
    content = path.read_bytes()
    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        raise ValueError(f"{path} is not a checkpoint, or its start is lost. {_REMEDY}")
    _, version, length, checksum = _HEADER.unpack_from(content)
    body = memoryview(content)[_HEADER.size :]
    if version != VERSION:
        raise ValueError(
            f"The checkpoint {path} has version {version} of the format, and this is version"
            f" {VERSION}: go on with the version of numpyro_sgmcmc that wrote it. {_REMEDY}"
        )
    if len(body) != length:
        raise ValueError(
            f"The checkpoint {path} is truncated: {len(body):,} of {length:,} bytes. {_REMEDY}"
        )
    if _checksum(body) != checksum:
        raise ValueError(f"The checkpoint {path} is corrupted: its checksum differs. {_REMEDY}")
    return pickle.loads(body)


def _checksum(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=32).digest()


class Key:
    """A random key of JAX as arrays of NumPy."""

    def __init__(self, key: Any) -> None:
        self.implementation = str(random.key_impl(key))
        self.data = np.asarray(random.key_data(key))

    def key(self) -> Any:
        return random.wrap_key_data(jnp.asarray(self.data), impl=self.implementation)


def held(tree: Any) -> dict[str, Any]:
    """The leaves of a state by their paths, on the host."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found[jax.tree_util.keystr(path)] = Key(leaf) if is_key else np.array(leaf)
    return found


def restored(leaves: Mapping[str, Any], template: Any) -> Any:
    """
    The state with these leaves.

    :param template: a state of the same structure, or shapes of one.
    :raises ValueError: if it has another structure, naming where.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(template)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    if missing := set(names) ^ set(leaves):
        raise ValueError(
            "The state in the checkpoint is of another kernel or model: these are in only one of"
            f" the two: {', '.join(sorted(missing))}. {_REMEDY}"
        )
    values = []
    for name, (_, expected) in zip(names, paths, strict=True):
        found = leaves[name]
        value = found.key() if isinstance(found, Key) else np.asarray(found)
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise ValueError(
                f"The state in the checkpoint is of another kernel or model: `{name}` was"
                f" {value.dtype}{list(value.shape)} and is {expected.dtype}{list(expected.shape)}."
                f" {_REMEDY}"
            )
        several = isinstance(expected, jax.Array) and len(expected.sharding.device_set) > 1
        # the devices may be those of several processes, all of which have read the same
        places = {"out_shardings": expected.sharding} if several else {}
        values.append(jax.jit(lambda x: x, **places)(value))
    return jax.tree.unflatten(tree, values)
