# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Tells data, and settings, from others."""

from dataclasses import is_dataclass
import hashlib
from typing import Any

import jax
from jax import Array, random
from jax.experimental.multihost_utils import process_allgather
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.rows_on_disk import RowsOnDisk


def fingerprint_of(args: tuple, kwargs: dict) -> str | None:
    """
    Tells data from other data, without holding them, in every process alike; None of data that
    are traced. Of rows on disk a part is looked at.
    """
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, RowsOnDisk))
    found = hashlib.blake2b(str(tree).encode())
    for leaf in leaves:
        if isinstance(leaf, jax.core.Tracer):
            return None
        if isinstance(leaf, jax.Array):
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            found.update(f"{leaf.dtype}{leaf.shape}".encode())
            for part in _parts_here(random.key_data(leaf) if is_key else leaf):
                found.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        elif isinstance(leaf, RowsOnDisk):
            found.update(leaf.digest.encode())
        else:
            found.update(repr(leaf.tolist() if isinstance(leaf, np.ndarray) else leaf).encode())
    if all(leaf.is_fully_addressable for leaf in leaves if isinstance(leaf, jax.Array)):
        return found.hexdigest()
    # every process has seen what it holds, and all are to come to the same answer
    digests = process_allgather(np.frombuffer(found.digest(), np.uint8))
    return hashlib.blake2b(digests.tobytes()).hexdigest()


def _parts_here(array: Array) -> list[Array]:
    """The array, or what this process holds of it, each part once."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return [array]
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    seen = {str(shard.index): shard.data for shard in reversed(shards)}
    return [seen[index] for index in sorted(seen)]


def description_of(value: Any) -> str:
    """
    Tells a setting from others, in every process alike: numbers, words and arrays by their
    values, and what else there is, functions for instance, by its name.
    """
    if isinstance(value, str | int | float | bool | None) or is_dataclass(value):
        return repr(value)
    leaves = [
        leaf if isinstance(leaf, str | int | float | bool | np.ndarray | jax.Array) else _name(leaf)
        for leaf in jax.tree.leaves(value)
    ]
    if callable(value):
        return _name(value)
    return fingerprint_of((leaves,), {}) or ""


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
