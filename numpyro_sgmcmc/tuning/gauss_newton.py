# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The Gauss-Newton matrix of the rows, in the place of the Hessian of their potential."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.posterior.handlers import log_density, without_wrappers
from numpyro_sgmcmc.posterior.potential import Rows, counted
from numpyro_sgmcmc.posterior.target import Target

_MANY = 16  #: numbers that are given to the distributions of a row, from which there are too many

#: Derivatives are held for as many rows at once as make this many numbers.
_NUMBERS = 2**22


def whitened_gauss_newton(
    target: Target, factor: Array, point: Array, rows: Rows, rng_key: Array
) -> Array:
    """
    The Gauss-Newton matrix of the rows of a minibatch in the coordinates of a Gaussian,

    .. math:: L^\\top \\Big( \\sum_i c_i J_i^\\top H_i J_i \\Big) L, \\qquad
        J_i = \\frac{\\partial \\eta_i}{\\partial \\theta}, \\quad
        H_i = -\\nabla^2_\\eta \\log p(x_i \\mid \\eta_i) ,

    with :math:`\\eta_i(\\theta)` the numbers that the model gives to the distributions of a row,
    such as location and logarithm of the scale, and :math:`c_i` the number of rows that each stands
    for. It is the
    Hessian of the rows where these numbers are linear in the parameters, whether the model is right
    or wrong, and costs one gradient for each number of a row.

    :param target: the model with its data.
    :param factor: :math:`L`, shape ``(d, d)``.
    :param point: :math:`\\theta`, one flat vector.
    :param rows: the rows of the minibatch.
    :param rng_key: the key of the model.

    **References:**

    1. *Fast Curvature Matrix-Vector Products for Second-Order Gradient Descent*,
       Nicol N. Schraudolph (2002).
    """
    (plate,) = target.model.plates
    drawn, stands_for = rows_stand_for(target, rows)

    def of_row(row: DrawnRows) -> tuple[Array, Array]:
        alone = {plate.name: jax.tree.map(lambda x: x[None], row)}
        numbers, energy = likelihood(target, alone, rng_key)
        eta, pullback = jax.vjp(numbers, point)
        (slopes,) = jax.vmap(pullback)(jnp.eye(eta.size, dtype=eta.dtype))
        # a row alone stands for all
        return slopes @ factor, jax.hessian(energy)(eta) / plate.size

    chunk = max(1, min(drawn.size, _NUMBERS // (_MANY * len(point))))
    slopes, inner = lax.map(of_row, drawn._replace(weights=None), batch_size=chunk)
    # a rate of zero has no logarithm, and no derivative
    slopes, inner = (jnp.where(jnp.isfinite(x), x, 0.0) for x in (slopes, inner))
    weighted = jnp.einsum("i,ijk,ikd->ijd", stands_for, inner, slopes)
    return weighted.reshape(-1, len(point)).T @ slopes.reshape(-1, len(point))


def rows_stand_for(target: Target, rows: Rows) -> tuple[DrawnRows, Array]:
    """The rows of the only plate, and the number of rows that each stands for."""
    (plate,) = target.model.plates
    drawn = counted(target.kinds, rows)[plate.name]
    none = jnp.ones(drawn.size, target.model.dtype)
    weights = none if drawn.weights is None else drawn.weights
    return drawn, plate.size / drawn.size * weights


def likelihood(
    target: Target, rows: Rows, rng_key: Array
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """
    The numbers that are given to the distributions of some rows as a function of the parameters,
    one flat vector, and the potential of the rows as a function of these numbers.
    """
    (plate,) = target.model.plates
    data = counted(target.kinds, rows), rng_key, target.args, target.kwargs

    def sites_at(point: Array) -> dict[str, dict]:
        values = target.from_internal(target.unravel(point))
        sites = target.model.potential_and_sites(values, *data)[1]
        inside = {k: x for k, x in sites.items() if x["type"] == "sample" and plate.name in _of(x)}
        for name, site in inside.items():
            if isinstance(without_wrappers(site["fn"]), dist.Unit):
                raise TypeError(f"'{name}' is a factor, and no distribution")
        return inside

    def numbers(point: Array) -> Array:
        leaves, links, _ = _parameters(sites_at(point))
        return ravel_pytree([link.inv(x) for x, link in zip(leaves, links, strict=True) if link])[0]

    # shapes, and what is observed, are the same at any parameters
    sites = sites_at(jnp.zeros(target.model.dimension, target.model.dtype))
    leaves, links, tree = _parameters(sites)
    unravel = ravel_pytree([x for x, link in zip(leaves, links, strict=True) if link])[1]

    def energy(eta: Array) -> Array:
        given = iter(unravel(eta))
        each = zip(leaves, links, strict=True)
        laws = jax.tree.unflatten(tree, [link(next(given)) if link else x for x, link in each])
        terms = [jnp.sum(log_density(site | {"fn": laws[k]})) for k, site in sites.items()]
        return -jnp.sum(jnp.stack(terms))

    return numbers, energy


def _parameters(sites: dict[str, dict]) -> tuple[list[Any], list[Any], Any]:
    """
    The arrays in the distributions of sites, the transform of each from the real numbers, None
    where there is no derivative, and how the distributions are made of them.
    """
    laws = {name: site["fn"] for name, site in sites.items()}
    leaves, tree = jax.tree.flatten(laws)
    supports: dict[int, Any] = {}
    inside = list(laws.values())
    while inside:
        law = inside.pop()
        supports |= {id(getattr(law, k, None)): x for k, x in law.arg_constraints.items()}
        parts = (getattr(law, k, None) for k in law.gather_pytree_data_fields())
        inside += [x for x in parts if isinstance(x, dist.Distribution)]
    return leaves, [_link(x, supports.get(id(x))) for x in leaves], tree


def _link(leaf: Any, support: Any) -> Any:
    """The transform from the real numbers that models usually have: an exponential, a logistic."""
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
        return None
    # a support that depends on other arguments, or that mixes entries, is left as it is
    with suppress(NotImplementedError):
        if support is not None and support.event_dim == 0:
            return dist.biject_to(support)
    return dist.transforms.IdentityTransform()


def has_numbers(target: Target) -> bool:
    """True if few numbers are given to the distributions of a row, and say all of it."""
    (plate,) = target.model.plates

    def of_row(row: Array) -> tuple[Array, Array]:
        numbers, energy = likelihood(target, {plate.name: row[None]}, random.key(0))
        eta = numbers(jnp.zeros(target.model.dimension, target.model.dtype))
        return eta, energy(eta)

    # a distribution that is no tree of its parameters cannot be made again from them
    with suppress(Exception):
        return jax.eval_shape(of_row, jnp.zeros((), jnp.int32))[0].size <= _MANY
    return False


def _of(site: dict) -> list[str]:
    """The names of the plates of a site."""
    return [frame.name for frame in site["cond_indep_stack"]]
