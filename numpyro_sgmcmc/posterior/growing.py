# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What all rows say at a point, of rows that keep coming: sums, to which new rows are added."""

from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.growing import RowCount
from numpyro_sgmcmc.posterior.control_variate import Anchor
from numpyro_sgmcmc.posterior.potential import hessian_of
from numpyro_sgmcmc.posterior.target import Target

#: New rows are looked at so many at a time, of which each may be evaluated at many points.
_CHUNK, _FEWEST = 1_024, 64


def with_new_rows(target: Target, anchor: Anchor, first: Array) -> Anchor:
    """
    The anchor of all rows, of one that knows those before the first of these:

    .. math:: \\nabla U_{N'}(\\hat\\theta) = \\nabla U_N(\\hat\\theta)
        - \\sum_{i = N}^{N' - 1} \\nabla \\log p(x_i \\mid \\hat\\theta),

    and likewise potential and Hessian, at a cost in proportion to the new rows. Where rows are
    forgotten what the old ones say counts :math:`2^{-(N' - N) / H}` of what it did.

    :param target: the model with all rows.
    :param first: number of the first new row.
    """
    fine = target._replace(model=target.model.with_rule("fine"))
    potential, (plate,), known = fine.whole_potential, target.model.plates, target.known
    assert known is not None
    length = min(plate.size, max(_FEWEST, _CHUNK // plate.points))
    key = jax.random.key(0)

    def seen(start: Array, known: RowCount) -> tuple[Array, Any, Array | None]:
        numbers = start + jnp.arange(length)
        weights = known.counted(numbers, jnp.result_type(float), start)
        rows = {plate.name: DrawnRows(jnp.minimum(numbers, plate.size - 1), weights=weights)}
        value, gradient = jax.value_and_grad(potential)(anchor.values, rows, key)
        hessian = None
        if anchor.hessian is not None:
            hessian = hessian_of(potential, anchor.values, rows, key)
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
