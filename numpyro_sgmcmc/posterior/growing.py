# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What all rows say at a point, of rows that keep coming: sums, to which new rows are added."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.growing import RowCount
from numpyro_sgmcmc.posterior.control_variate import Anchor
from numpyro_sgmcmc.posterior.handlers import Plate
from numpyro_sgmcmc.posterior.potential import Potential, Rows, hessian_of

#: New rows are looked at so many at a time, of which each may be evaluated at many points.
_CHUNK, _FEWEST = 1_024, 64


class SoFar(NamedTuple):
    """
    A potential of the rows that there are, from the first of these on, with what each of them
    counts: of all others the weight is zero.
    """

    base: Any
    plates: Sequence[Plate]
    first: Array
    known: RowCount

    def __call__(self, values: Any, rows: Rows, rng_key: Array, /) -> Array:
        weighted = dict(rows)
        for plate in self.plates:
            if plate.grows:
                numbers: Any = rows[plate.name]
                there = (numbers >= self.first) & (numbers < self.known.rows)
                inside = jnp.minimum(numbers, plate.size - 1)
                counts = self.known.weights(inside, jnp.result_type(float))
                weights = jnp.where(there, counts, 0)
                weighted[plate.name] = DrawnRows(inside, weights=weights)
        return self.base(values, weighted, rng_key)


def with_new_rows(
    anchor: Anchor, potential: Potential, plate: Plate, first: Array, known: RowCount
) -> Anchor:
    """
    The anchor of all rows, of one that knows those before the first of these:

    .. math:: \\nabla U_{N'}(\\hat\\theta) = \\nabla U_N(\\hat\\theta)
        - \\sum_{i = N}^{N' - 1} \\nabla \\log p(x_i \\mid \\hat\\theta),

    and likewise potential and Hessian, at a cost in proportion to the new rows. Where rows are
    forgotten what the old ones say counts :math:`2^{-(N' - N) / H}` of what it did.

    :param potential: the minibatch potential, of any number of rows.
    :param plate: the plate of the rows.
    :param first: number of the first new row.
    :param known: how many rows there are.
    """
    length = min(plate.size, max(_FEWEST, _CHUNK // plate.points))
    key = jax.random.key(0)

    def seen(start: Array, known: RowCount) -> tuple[Array, Any, Array | None]:
        rows = {plate.name: start + jnp.arange(length)}
        some: Any = SoFar(potential, (plate,), start, known)
        value, gradient = jax.value_and_grad(some)(anchor.values, rows, key)
        hessian = None
        if anchor.hessian is not None:
            hessian = hessian_of(some, anchor.values, rows, key)
        return value, gradient, hessian

    # with no row at all: the prior, which each chunk has too
    prior = seen(first, known._replace(rows=first))
    each = length / plate.size  # a chunk would stand for all rows

    def added(run: tuple[Array, Any]) -> tuple[Array, Any]:
        start, total = run
        change = jax.tree.map(lambda x, p: each * (x - p), seen(start, known), prior)
        return start + length, jax.tree.map(jnp.add, total, change)

    total = anchor.potential, anchor.gradient, anchor.hessian
    if known.half_life is not None:
        left = known.weights(first - 1, anchor.potential.dtype)
        total = jax.tree.map(lambda x, p: p + left * (x - p), total, prior)
    _, total = lax.while_loop(lambda run: run[0] < known.rows, added, (first, total))
    return Anchor(anchor.values, *total)
