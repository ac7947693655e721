# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Tells data, and settings, from others."""

import hashlib
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np


def fingerprint_of(args: tuple, kwargs: dict) -> str | None:
    """Tells data from other data, without holding them; None of data that are traced."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    found = hashlib.blake2b(str(tree).encode())
    for leaf in leaves:
        if isinstance(leaf, jax.core.Tracer):
            return None
        if isinstance(leaf, jax.Array):
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            found.update(f"{leaf.dtype}{leaf.shape}".encode())
            # of an array that is spread over processes the part that is here
            here = [shard.data for shard in leaf.addressable_shards]
            for part in [leaf] if is_key or leaf.is_fully_addressable else here:
                array = np.ascontiguousarray(random.key_data(part) if is_key else part)
                found.update(array.reshape(-1).view(np.uint8).data)
        else:
            found.update(repr(leaf.tolist() if isinstance(leaf, np.ndarray) else leaf).encode())
    return found.hexdigest()


def description_of(value: Any) -> str:
    """
    Tells a setting from others, in every process alike: numbers, words and arrays by their
    values, and what else there is, functions for instance, by its name.
    """
    if isinstance(value, str | int | float | bool | None):
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
