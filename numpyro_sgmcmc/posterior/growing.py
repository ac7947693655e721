# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Updates of the anchor for rows that keep coming: new rows are added to its sums."""

from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.growing import RowCount
from numpyro_sgmcmc.posterior.control_variate import Anchor
from numpyro_sgmcmc.posterior.potential import hessian_of
from numpyro_sgmcmc.posterior.target import Target

#: Largest number of likelihood evaluations in a chunk of new rows, and its smallest number of rows.
_CHUNK, _FEWEST = 1_024, 64


def with_new_rows(target: Target, anchor: Anchor, first: Array) -> Anchor:
    """
    Return the anchor of all rows from the anchor of the rows before the new ones.

    The new rows are added to the sums,

    .. math:: \\nabla U_{N'}(\\hat\\theta) = \\nabla U_N(\\hat\\theta)
        - \\sum_{i = N}^{N' - 1} \\nabla \\log p(x_i \\mid \\hat\\theta),

    for the gradient, and likewise for potential and Hessian. The cost is in proportion to the new
    rows. If rows are forgotten, the sum over the old rows is multiplied by
    :math:`2^{-(N' - N) / H}`.

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

    # a chunk without rows gives the prior, which is subtracted from each chunk
    prior = seen(first, known._replace(rows=first))
    each = length / plate.size  # the potential scales a chunk to all rows

    def added(run: tuple[Array, Any]) -> tuple[Array, Any]:
        start, total = run
        change = jax.tree.map(lambda x, p: each * (x - p), seen(start, known), prior)
        return start + length, jax.tree.map(jnp.add, total, change)

    total = anchor.potential, anchor.gradient, anchor.hessian
    if known.half_life is not None:
        left = known.weights(first - 1, anchor.potential.dtype)
        total = jax.tree.map(lambda x, p: p + left * (x - p), total, prior)
    _, total = lax.while_loop(lambda run: run[0] < known.rows, added, (first, total))
    return Anchor(anchor.values, *total, reach=anchor.reach)
