# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Checkpoints, from which a run goes on: archives of its state, its draws and its identity."""

from collections.abc import Mapping
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.archive import Archive
from numpyro_sgmcmc.data.content_hash import ContentHash
from numpyro_sgmcmc.data.records import is_of_type, kinds_in
from numpyro_sgmcmc.long_runs.effective_size import ThinnedDraws
from numpyro_sgmcmc.long_runs.growing import RowsOfRun
from numpyro_sgmcmc.long_runs.moments import Moments
from numpyro_sgmcmc.tuning.tuning import Tuning

VERSION = 7

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


_KINDS = kinds_in(Key, Moments, ThinnedDraws, RowsOfRun, ContentHash, Tuning)

#: The file of a checkpoint.
CHECKPOINT = Archive("checkpoint", VERSION, _KINDS, REMEDY)

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


def load_run(path: Path) -> dict[str, Any]:
    """
    Read the content of the checkpoint of a run.

    :raises ValueError: if the file is invalid, or a field of a run is missing or has another type.
    """
    content = CHECKPOINT.load(path)
    with CHECKPOINT.understood(path):
        if names := sorted(_FIELDS.keys() ^ content.keys()):
            raise TypeError(f"its fields {', '.join(names)} are missing or unknown")
        for name, kind in _FIELDS.items():
            if not is_of_type(content[name], kind):
                raise TypeError(f"its `{name}` has another type than in a run")
        least = min(content["draws"], content["done"], content["seconds"])
        if not 0 <= least <= max(content["done"], content["seconds"]) < math.inf:
            raise TypeError("its numbers of draws, samples and seconds are impossible")
    return content


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
