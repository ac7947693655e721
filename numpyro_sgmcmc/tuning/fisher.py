# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The Fisher information of rows whose model has no distribution for them."""

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.potential import Rows, counted, ravel
from numpyro_sgmcmc.posterior.target import Target

#: Scores are held for as many rows at once as make this many numbers.
_NUMBERS = 2**22


def whitened_fisher(
    target: Target, factor: Array, point: Array, rows: Rows, rng_key: Array
) -> Array:
    """
    The Fisher information of the rows of a minibatch in the coordinates of a Gaussian,

    .. math:: L^\\top \\Big( \\sum_i c_i (s_i - \\bar s)(s_i - \\bar s)^\\top \\Big) L, \\qquad
        s_i = \\nabla \\log p(x_i \\mid \\theta) ,

    with :math:`c_i` the number of rows that each stands for. In a model that is nearly right it is
    the Hessian of the rows within a small factor. It costs one gradient of each row, whatever the
    number of parameters.

    :param target: the model with its data.
    :param factor: :math:`L`, shape ``(d, d)``.
    :param point: :math:`\\theta`, one flat vector.
    :param rows: the rows of the minibatch.
    :param rng_key: the key of the model.

    **References:**

    1. *Estimation and Inference in Nonlinear Structural Models*, Ernst Berndt, Bronwyn Hall,
       Robert Hall and Jerry Hausman (1974).
    """
    potential, values = target.potential(IdentityMetric()), target.unravel(point)
    drawn, stands_for = rows_stand_for(target, rows)
    (plate,) = target.model.plates

    def score(row: DrawnRows) -> Array:
        alone = {plate.name: jax.tree.map(lambda x: x[None], row)}
        # of a single row that stands for all, and of the prior, which the mean takes out
        slope = jax.grad(potential)(values, alone, rng_key)
        return ravel(slope) @ factor / rows_of(target)

    chunk = max(1, min(drawn.size, _NUMBERS // len(point)))
    scores = lax.map(score, each_once(drawn), batch_size=chunk)
    scores = scores - stands_for @ scores / stands_for.sum()
    return (scores * stands_for[:, None]).T @ scores


def rows_stand_for(target: Target, rows: Rows) -> tuple[DrawnRows, Array]:
    """The rows of the only plate, and the number of rows that each stands for."""
    (plate,) = target.model.plates
    drawn = counted(target.kinds, rows)[plate.name]
    none = jnp.ones(drawn.size, target.model.dtype)
    weights = none if drawn.weights is None else drawn.weights
    return drawn, rows_of(target) / drawn.size * weights


def rows_of(target: Target) -> float:
    """The number of rows that a row alone stands for: those of all devices, or of all data."""
    (plate,) = target.model.plates
    return float(plate.size * target.model.parts)


def each_once(drawn: DrawnRows) -> DrawnRows:
    """The rows without their weights."""
    return drawn._replace(weights=jnp.ones(drawn.size))
