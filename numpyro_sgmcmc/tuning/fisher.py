# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The Fisher information of the rows, in the place of the Hessian of their potential."""

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.rows_on_disk import on_disk
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.potential import Rows, counted, ravel
from numpyro_sgmcmc.posterior.target import Target

_FEW = 12  #: parameters up to which a Hessian costs as little

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
    (plate,) = target.model.plates
    drawn = counted(target.kinds, rows)[plate.name]
    weights = jnp.ones(drawn.size, factor.dtype) if drawn.weights is None else drawn.weights

    def score(row: DrawnRows) -> Array:
        alone = {plate.name: jax.tree.map(lambda x: x[None], row)}
        # of a single row that stands for all, and of the prior, which the mean takes out
        slope = jax.grad(potential)(values, alone, rng_key)
        return ravel(slope) @ factor / plate.size

    chunk = max(1, min(drawn.size, _NUMBERS // len(point)))
    scores = lax.map(score, drawn._replace(weights=None), batch_size=chunk)
    stands_for = plate.size / drawn.size * weights
    scores = scores - stands_for @ scores / stands_for.sum()
    return (scores * stands_for[:, None]).T @ scores


def whitened_prior(target: Target, factor: Array, point: Array, rng_key: Array) -> Array:
    """
    The Hessian of what no row adds to the potential, in the coordinates of a Gaussian.

    :param factor: :math:`L`, shape ``(d, d)``.
    :param point: :math:`\\theta`, one flat vector.
    """
    potential = target.potential(IdentityMetric())
    rows = {name: x[:1] for name, x in target.model.first_rows().items()}

    def prior(x: Array) -> Array:
        energy, terms = potential.with_row_terms(target.unravel(x), rows, rng_key)
        return energy + sum(jnp.sum(term) for term in terms.values())

    _, product = jax.linearize(jax.grad(prior), point)
    return factor.T @ jax.vmap(product, 1, 1)(factor)


def mean_prior(target: Target, factor: Array, points: Array, rng_key: Array) -> Array:
    """The mean of :func:`whitened_prior` over some points, shape ``(S, d)``."""
    return lax.map(lambda x: whitened_prior(target, factor, x, rng_key), points).mean(0)


def uses_fisher(target: Target) -> bool:
    """True if the Fisher information of the rows stands in for their Hessian."""
    model = target.model
    # each row is looked at by itself, which takes long where it is read from disk
    in_memory = not on_disk((target.args, target.kwargs))
    has_rows = len(model.plates) == 1 and not model.drawn_plates
    return has_rows and in_memory and model.dimension > _FEW
