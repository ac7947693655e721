# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The Fisher information of the rows, in the place of the Hessian of their potential."""

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.rows_on_disk import on_disk
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.potential import Rows, ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gauss_newton import has_numbers, rows_stand_for, whitened_gauss_newton

_FEW = 12  #: parameters up to which a Hessian costs as little

#: Scores are held for as many rows at once as make this many numbers.
_NUMBERS = 2**22


def whitened_rows(target: Target, factor: Array, point: Array, rows: Rows, rng_key: Array) -> Array:
    """
    What stands in for the Hessian of the rows of a minibatch, in the coordinates of a Gaussian: the
    Gauss-Newton matrix (:mod:`~numpyro_sgmcmc.tuning.gauss_newton`), or their Fisher information.
    """
    form = whitened_gauss_newton if has_numbers(target) else whitened_fisher
    return form(target, factor, point, rows, rng_key)


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
        return ravel(slope) @ factor / plate.size

    chunk = max(1, min(drawn.size, _NUMBERS // len(point)))
    scores = lax.map(score, drawn._replace(weights=None), batch_size=chunk)
    scores = scores - stands_for @ scores / stands_for.sum()
    return (scores * stands_for[:, None]).T @ scores


def whitened_prior(
    target: Target, factor: Array, point: Array, gradient: Array, rng_key: Array
) -> Array:
    """
    The part of the Hessian that is not the rows' own, in the coordinates of a Gaussian,

    .. math:: L^\\top \\Big( \\nabla^2 U_0 + \\sum_k \\frac{\\partial \\ell}{\\partial x_k}
        \\nabla^2 x_k \\Big) L ,

    with :math:`U_0` the prior's potential, :math:`\\ell` that of the rows and :math:`x` the effects
    of hierarchies. In effects the Fisher information of the rows stands in for their Hessian. Other
    coordinates are curved, which is exact here.

    :param target: the model with its data.
    :param factor: :math:`L`, shape ``(d, d)``.
    :param point: :math:`\\theta`, one flat vector.
    :param gradient: of the potential there, a flat vector.
    :param rng_key: the key of the model.
    """
    potential = target.potential(IdentityMetric())
    rows = {name: x[:1] for name, x in target.model.first_rows().items()}

    def prior(x: Array) -> Array:
        energy, terms = potential.with_row_terms(target.unravel(x), rows, rng_key)
        return energy + sum(jnp.sum(term) for term in terms.values())

    def from_effects(x: Array) -> Array:
        return ravel(target.to_internal(target.centred.from_internal(target.unravel(x))))

    curved = prior
    if target.centring:
        _, pullback = jax.vjp(from_effects, effects_at(target, point))
        (slope,) = pullback(gradient - jax.grad(prior)(point))

        def curved(x: Array) -> Array:
            return prior(x) + slope @ effects_at(target, x)

    _, product = jax.linearize(jax.grad(curved), point)
    return factor.T @ jax.vmap(product, 1, 1)(factor)


def effects_at(target: Target, point: Array) -> Array:
    """The effects of hierarchies, and what is no effect, as one flat vector."""
    return ravel(target.written(target.unravel(point)).effects)


def mean_prior(
    target: Target, factor: Array, points: Array, gradients: Array, rng_key: Array
) -> Array:
    """The mean of :func:`whitened_prior` over some points, shape ``(S, d)``, as of gradients."""

    def at(pair: tuple[Array, Array]) -> Array:
        return whitened_prior(target, factor, *pair, rng_key)

    return lax.map(at, (points, gradients)).mean(0)


def uses_fisher(target: Target) -> bool:
    """True if the Fisher information of the rows stands in for their Hessian."""
    model = target.model
    # each row is looked at by itself, which takes long where it is read from disk
    in_memory = not on_disk((target.args, target.kwargs))
    has_rows = len(model.plates) == 1 and not model.drawn_plates
    return has_rows and in_memory and model.dimension > _FEW
