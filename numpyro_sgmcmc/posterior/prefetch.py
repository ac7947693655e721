# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Prefetching of the next minibatches of a chain from disk."""

from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.custom_batching import custom_vmap
import jax.numpy as jnp

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.row_numbers import needs_64_bits
from numpyro_sgmcmc.data.rows_on_disk import RowsOnDisk, on_disk, read_ahead
from numpyro_sgmcmc.posterior.target import Target

#: Largest number of steps whose minibatches are in a block, and its largest number of bytes.
_MOST_STEPS, _MOST_BYTES = 64, 2**23


class Prefetched(NamedTuple):
    """
    Block of the minibatches of K successive steps.

    - **start** - number of the first step; negative if nothing has been read.
    - **rows** - by plate, the row numbers, shape (K, n), and their values, shape (K, n, ...).
    - **part** - number of the part of the rows if rows are spread over devices. A state that comes
      back from elsewhere, of a :class:`~numpyro_sgmcmc.LongRun` for one, has the rows of one
      device.
    """

    start: Array
    rows: dict[str, DrawnRows]
    part: Array


def nothing_prefetched(target: Target) -> Prefetched | None:
    """Return an empty block, or None if no argument of the model is on disk."""
    sources = _by_plate(target)
    if not sources:
        return None
    sizes = {plate.name: plate.subsample_size for plate in target.model.plates}
    far = {plate.name for plate in target.model.plates if needs_64_bits(plate.size)}
    each = sum(sizes[name] * x.row_bytes for name, arrays in sources.items() for x in arrays)
    steps = max(1, min(_MOST_STEPS, _MOST_BYTES // max(each, 1)))
    rows = {}
    for name, arrays in sources.items():
        zero = jnp.zeros((steps, sizes[name]), jnp.int32)
        values = tuple(jnp.zeros((*zero.shape, *x.shape[1:]), x.dtype) for x in arrays)
        rows[name] = DrawnRows(zero, values, high=zero if name in far else None)
    return Prefetched(jnp.full((), -1, jnp.int32), rows, jnp.zeros((), jnp.int32))


class _Ahead:
    """Drawing and reading of the minibatches of successive steps of one chain or several."""

    def __init__(self, target: Target, steps: int) -> None:
        self.target, self.steps, self.sources = target, steps, _by_plate(target)

    @property
    def part(self) -> Array | None:
        return None if self.target.shards is None else self.target.shards.part

    def numbers(self, facts: Any, rows_key: Array, start: Array) -> dict[str, DrawnRows]:
        known, strata = facts

        def at(k: Array) -> dict[str, DrawnRows]:
            here = self.target._replace(known=known, strata=strata)
            rows = here.rows(rows_key, start + k)
            return {name: rows[name]._replace(weights=None) for name in self.sources}

        return jax.vmap(at)(jnp.arange(self.steps))

    def filled(self, facts: Any, rows_key: Array, start: Array, chains: bool) -> Prefetched:
        """Return a block that begins with this step."""
        drawn = jax.vmap(self.numbers) if chains else self.numbers
        now, following = (drawn(facts, rows_key, k) for k in (start, start + self.steps))
        part = self.part
        requests = [
            (source, now[name].on(part), following[name].on(part))
            for name, arrays in self.sources.items()
            for source in arrays
        ]
        values = iter(read_ahead(requests))
        rows = {
            name: now[name]._replace(values=tuple(next(values) for _ in arrays))
            for name, arrays in self.sources.items()
        }
        nowhere = jnp.zeros_like(start)
        return Prefetched(start, rows, nowhere if part is None else nowhere + part)

    def kept_or_filled(
        self, block: Prefetched, facts: Any, rows_key: Array, i: Array, chains: bool
    ) -> Prefetched:
        """Return the block if it has the step, or a new one."""

        def is_needed(passed: tuple[Prefetched, Array]) -> Array:
            start, part = passed[0].start, self.part
            is_of_another = False if part is None else passed[0].part != part
            return jnp.any((start < 0) | (i < start) | (i >= start + self.steps) | is_of_another)

        def read(passed: tuple[Prefetched, Array]) -> tuple[Prefetched, Array]:
            # without the count, XLA would read before the loop in every step
            _, count = passed
            return self.filled(facts, rows_key, i + count, chains), count + 1

        # a loop of one pass or none keeps the block where it is; a condition would copy it
        return lax.while_loop(is_needed, read, (block, jnp.zeros_like(i)))[0]


def prefetched_with(i: Array, rows_key: Array, block: Prefetched, target: Target) -> Prefetched:
    """
    Return a block that holds step ``i`` of a chain.

    It is the given block or, if that does not hold the step, a new one that begins with it.
    """
    ahead = _Ahead(target, next(iter(block.rows.values())).numbers.shape[-2])

    @custom_vmap
    def one(block: Prefetched, facts: Any, rows_key: Array, i: Array) -> Prefetched:
        return ahead.kept_or_filled(block, facts, rows_key, i, chains=False)

    @one.def_vmap
    def several(axis_size: int, in_batched: Any, *given: Any) -> tuple[Prefetched, Any]:
        # all chains are at one step, and their rows are read together
        def of_chains(x: Array, is_batched: bool) -> Array:
            return x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))

        block, facts, rows_key, i = jax.tree.map(of_chains, given, tuple(in_batched))
        filled = ahead.kept_or_filled(block, facts, rows_key, i, chains=True)
        return filled, jax.tree.map(lambda _: True, filled)

    # arrays of the program that draws rows are arguments: a rule for `vmap` captures no others
    return one(block, (target.known, dict(target.strata)), rows_key, i)


def minibatch(
    target: Target, rows_key: Array, i: Array, block: Prefetched | None
) -> tuple[dict[str, DrawnRows], Prefetched | None]:
    """Return the rows of a step, with values of rows on disk, and the block that holds them."""
    drawn = target.rows(rows_key, i)
    if block is None:
        return drawn, None
    block = prefetched_with(i, rows_key, block, target)
    start = block.start
    read = jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, i - start, keepdims=False), block.rows
    )
    weighted = {name: x._replace(weights=drawn[name].weights) for name, x in read.items()}
    return {**drawn, **weighted}, block


def _by_plate(target: Target) -> dict[str, list[RowsOnDisk]]:
    """Return the arguments on disk that steps read, by plate."""
    by_plate: dict[str, list[RowsOnDisk]] = {}
    sources = on_disk((target.args, target.kwargs))
    for source, plate in zip(sources, target.model.on_disk, strict=True):
        if plate is not None:
            by_plate.setdefault(plate, []).append(source)
    return by_plate
