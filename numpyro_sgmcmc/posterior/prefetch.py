# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The minibatches of the next steps of a chain, read from disk before the steps need them."""

from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.custom_batching import custom_vmap
import jax.numpy as jnp

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.row_numbers import needs_64_bits
from numpyro_sgmcmc.data.rows_on_disk import RowsOnDisk, on_disk, read_ahead
from numpyro_sgmcmc.posterior.target import Target

#: A block holds the minibatches of so many steps, or fewer of so many bytes together.
_MOST_STEPS, _MOST_BYTES = 64, 2**23


class Prefetched(NamedTuple):
    """
    Minibatches of K successive steps.

    - **start** - the first of these steps; negative if nothing has been read.
    - **rows** - by plate, the numbers of the rows, shape (K, n), and their values, (K, n, ...).
    - **part** - of rows that are spread over devices the part that they are of: a state that comes
      back from elsewhere, of a :class:`~numpyro_sgmcmc.LongRun` for one, has those of one device.
    """

    start: Array
    rows: dict[str, DrawnRows]
    part: Array


def nothing_prefetched(target: Target) -> Prefetched | None:
    """A block that holds nothing yet; None if no argument of the model is on disk."""
    sources = _by_plate(target)
    if not sources:
        return None
    sizes = {plate.name: plate.subsample_size for plate in target.model.plates}
    far = {plate.name for plate in target.model.plates if needs_64_bits(plate.size)}
    each = sum(sizes[name] * x.row_bytes for name, found in sources.items() for x in found)
    steps = max(1, min(_MOST_STEPS, _MOST_BYTES // max(each, 1)))
    rows = {}
    for name, found in sources.items():
        zero = jnp.zeros((steps, sizes[name]), jnp.int32)
        values = tuple(jnp.zeros((*zero.shape, *x.shape[1:]), x.dtype) for x in found)
        rows[name] = DrawnRows(zero, values, high=zero if name in far else None)
    return Prefetched(jnp.full((), -1, jnp.int32), rows, jnp.zeros((), jnp.int32))


def prefetched_with(i: Array, rows_key: Array, block: Prefetched, target: Target) -> Prefetched:
    """
    The block that holds step ``i``: this one or, if it does not, a new one that begins with it.

    :param i: number of the step of one chain.
    :param rows_key: key of the rows of this chain.
    :param block: the block of this chain.
    :param target: the model with its data.
    """
    sources = _by_plate(target)
    steps = next(iter(block.rows.values())).numbers.shape[-2]
    # arrays of the program that draws the rows, as arguments: a rule for `vmap` has no others
    facts = target.known, dict(target.strata)

    def part_here() -> Array | None:
        return None if target.shards is None else target.shards.part

    def numbers(facts: Any, rows_key: Array, start: Array) -> dict[str, DrawnRows]:
        known, strata = facts

        def at(k: Array) -> dict[str, DrawnRows]:
            rows = target._replace(known=known, strata=strata).rows(rows_key, start + k)
            return {name: rows[name]._replace(weights=None) for name in sources}

        return jax.vmap(at)(jnp.arange(steps))

    def filled(facts: Any, rows_key: Array, start: Array, chains: bool) -> Prefetched:
        drawn = jax.vmap(numbers) if chains else numbers
        now, following = (drawn(facts, rows_key, k) for k in (start, start + steps))
        part = part_here()
        requests = [
            (source, now[name].on(part), following[name].on(part))
            for name, found in sources.items()
            for source in found
        ]
        values = iter(read_ahead(requests))
        rows = {
            name: now[name]._replace(values=tuple(next(values) for _ in found))
            for name, found in sources.items()
        }
        nowhere = jnp.zeros_like(start)
        return Prefetched(start, rows, nowhere if part is None else nowhere + part)

    def kept_or_filled(
        block: Prefetched, facts: Any, rows_key: Array, i: Array, chains: bool
    ) -> Prefetched:
        def is_needed(passed: tuple[Prefetched, Array]) -> Array:
            start, part = passed[0].start, part_here()
            is_of_another = False if part is None else passed[0].part != part
            return jnp.any((start < 0) | (i < start) | (i >= start + steps) | is_of_another)

        def read(passed: tuple[Prefetched, Array]) -> tuple[Prefetched, Array]:
            # without the count, XLA would read before the loop, whether or not there is need to
            _, count = passed
            return filled(facts, rows_key, i + count, chains), count + 1

        # a loop of one pass or none keeps the block where it is; a condition would copy it
        return lax.while_loop(is_needed, read, (block, jnp.zeros_like(i)))[0]

    @custom_vmap
    def one(block: Prefetched, facts: Any, rows_key: Array, i: Array) -> Prefetched:
        return kept_or_filled(block, facts, rows_key, i, chains=False)

    @one.def_vmap
    def several(axis_size: int, in_batched: Any, *given: Any) -> tuple[Prefetched, Any]:
        # chains are at the same step, and their rows are read together
        def of_chains(x: Array, is_batched: bool) -> Array:
            return x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))

        block, facts, rows_key, i = jax.tree.map(of_chains, given, tuple(in_batched))
        found = kept_or_filled(block, facts, rows_key, i, chains=True)
        return found, jax.tree.map(lambda _: True, found)

    return one(block, facts, rows_key, i)


def minibatch(
    target: Target, rows_key: Array, i: Array, block: Prefetched | None
) -> tuple[dict[str, DrawnRows], Prefetched | None]:
    """The rows of a step, with their values if they are on disk, and the block that holds these."""
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
    """What the steps need from disk, by plate."""
    found: dict[str, list[RowsOnDisk]] = {}
    sources = on_disk((target.args, target.kwargs))
    for source, plate in zip(sources, target.model.on_disk, strict=True):
        if plate is not None:
            found.setdefault(plate, []).append(source)
    return found
