# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The Fisher information of rows whose model has no distribution for them."""

from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.posterior.handlers import Plate
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.potential import Rows, counted, ravel
from numpyro_sgmcmc.posterior.target import Target

#: Scores are held for as many rows at once as make this many numbers.
_NUMBERS = 2**22


def whitened_fisher(
    target: Target, plate: Plate, factor: Array, point: Array, rows: Rows, rng_key: Array
) -> Array:
    """
    The Fisher information of the rows of a plate in the coordinates of a Gaussian,

    .. math:: L^\\top \\Big( \\sum_i c_i (s_i - \\bar s)(s_i - \\bar s)^\\top \\Big) L, \\qquad
        s_i = \\nabla \\log p(x_i \\mid \\theta) ,

    with :math:`c_i` the number of rows that each stands for. In a model that is nearly right it is
    the Hessian of the rows within a small factor. It costs one gradient of each row, whatever the
    number of parameters.

    :param target: the model with its data.
    :param plate: the plate.
    :param factor: :math:`L`, shape ``(d, d)``.
    :param point: :math:`\\theta`, one flat vector.
    :param rows: the rows of the minibatch.
    :param rng_key: the key of the model.

    **References:**

    1. *Estimation and Inference in Nonlinear Structural Models*, Ernst Berndt, Bronwyn Hall,
       Robert Hall and Jerry Hausman (1974).
    """
    potential = target.potential(IdentityMetric()).of_groups(plate.name)
    values = target.unravel(point)
    drawn, stands_for = rows_stand_for(target, plate, rows)

    def score(row: DrawnRows) -> Array:
        def term(values: Any) -> Array:
            rows = alone(target, plate, row)
            return potential.with_row_terms(values, rows, rng_key)[1][plate.name].sum()

        return ravel(jax.grad(term)(values)) @ factor / rows_of(target, plate)

    chunk = max(1, min(drawn.size, _NUMBERS // len(point)))
    scores = lax.map(score, each_once(drawn), batch_size=chunk)
    scores = scores - stands_for @ scores / stands_for.sum()
    return (scores * stands_for[:, None]).T @ scores


def rows_stand_for(target: Target, plate: Plate, rows: Rows) -> tuple[DrawnRows, Array]:
    """The rows of a plate, and the number of rows that each stands for."""
    drawn = counted(target.kinds, rows)[plate.name]
    none = jnp.ones(drawn.size, target.model.dtype)
    weights = none if drawn.weights is None else drawn.weights
    return drawn, rows_of(target, plate) / drawn.size * weights


def rows_of(target: Target, plate: Plate) -> float:
    """The number of rows that a row alone stands for: those of all devices, or of all data."""
    return float(plate.size * target.model.parts)


def alone(target: Target, plate: Plate, row: Any) -> Rows:
    """A minibatch of one row of a plate. Other plates have their first row, which has no effect."""
    first = {name: rows[:1] for name, rows in target.model.first_rows().items()}
    return first | {plate.name: jax.tree.map(lambda x: x[None], row)}


def each_once(drawn: DrawnRows) -> DrawnRows:
    """The rows without their weights."""
    return drawn._replace(weights=jnp.ones(drawn.size))
