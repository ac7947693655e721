# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Concatenation of the rows of several sources, the shards of a data set."""

from collections.abc import Sequence
import hashlib

import numpy as np

from numpyro_sgmcmc.data.content_hash import Version
from numpyro_sgmcmc.data.sources import Source


class Joined(Source):
    """
    Source of several shards, whose row numbers go through all of them in order.

    :param shards: the sources of the shards.
    :raises ValueError: if their rows differ in shape or data type.
    """

    def __init__(self, shards: Sequence[Source]) -> None:
        first = shards[0]
        for k, shard in enumerate(shards):
            if (shard.shape[1:], shard.dtype) != (first.shape[1:], first.dtype):
                raise ValueError(
                    f"Shard {k}, {shard.name}, has rows of shape {shard.shape[1:]} and dtype"
                    f" {shard.dtype}, but the first shard, {first.name}, has {first.shape[1:]} and"
                    f" {first.dtype}. Shards are parts of one array: give all of them the same"
                    " columns and dtype."
                )
        self._shards = tuple(shards)
        self._ends = np.cumsum([shard.shape[0] for shard in shards], dtype=np.int64)
        self.shape = int(self._ends[-1]), *first.shape[1:]
        self.dtype = first.dtype
        self.name = f"{len(shards)} shards from {first.name} to {shards[-1].name}"
        self.is_in_memory = any(shard.is_in_memory for shard in shards)

    @property
    def shards(self) -> tuple[Source, ...]:
        return self._shards

    def version(self) -> Version | None:
        versions = [shard.version() for shard in self._shards]
        known = [version for version in versions if version is not None]
        if len(known) < len(versions):
            return None
        digest = hashlib.blake2b(repr(known).encode(), digest_size=8).digest()
        return Version(
            int.from_bytes(digest, "little"),
            sum(version.size for version in known),
            max(version.modified for version in known),
            max(version.changed for version in known),
        )

    @property
    def is_replaced(self) -> bool:
        return any(shard.is_replaced for shard in self._shards)

    def read_into(self, found: np.ndarray, numbers: np.ndarray) -> None:
        where = np.searchsorted(self._ends, numbers, side="right")
        wanted = np.unique(where)
        for k in wanted.tolist():
            begin = int(self._ends[k]) - self._shards[k].shape[0]
            if len(wanted) == 1:
                self._shards[k].read_into(found, numbers - begin)
                return
            here = where == k
            part = np.empty((int(here.sum()), *found.shape[1:]), found.dtype)
            self._shards[k].read_into(part, numbers[here] - begin)
            found[here] = part
