# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The Gauss-Newton matrix of the rows, in the place of the Hessian of their potential.

The searches for a centre and a metric need the mean Hessian of many rows, whose columns are as many
as there are parameters. The sum of two parts costs a few gradients instead: the Gauss-Newton matrix
of the rows, or their Fisher information (:mod:`~numpyro_sgmcmc.tuning.fisher`) where the model has
no distribution for them, and the exact Hessian of everything else.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial, reduce
from typing import Any

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.rows_on_disk import on_disk
from numpyro_sgmcmc.posterior.coordinates import (
    mixtures_of,
)
from numpyro_sgmcmc.posterior.handlers import Plate, log_density, without_wrappers
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.potential import Rows, counted, ravel
from numpyro_sgmcmc.posterior.reparam import (
    scales_of,
)
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.fisher import alone, each_once, rows_of, rows_stand_for, whitened_fisher

_FEW = 12  #: parameters up to which a Hessian costs as little
_MANY = 16  #: the most parameters of a row's distributions

#: Derivatives are taken of as many rows at once as make this many numbers.
_NUMBERS = 2**22


def uses_gauss_newton(target: Target) -> bool:
    """True if a Gauss-Newton matrix stands in for the Hessian of the rows."""
    model = target.model
    # each row is looked at by itself, which takes long where it is read from disk
    in_memory = not on_disk((target.args, target.kwargs))
    is_large = model.dimension > _FEW and not model.drawn_plates
    return is_large and in_memory and not _are_crossed(target)


def whitened_rows(target: Target, factor: Array, point: Array, rows: Rows, rng_key: Array) -> Array:
    """
    The sum over plates of the Gauss-Newton matrix, or the Fisher information, of their rows.

    All rows depend on the same effects. The derivative of these is therefore taken once, and not
    for each row.
    """
    forms = [
        whitened_gauss_newton if has_distributions(target, plate) else whitened_fisher
        for plate in target.model.plates
    ]
    if target.centring:
        point, factor = effects_along(target, point, factor)
        target = target.centred
    each = zip(forms, target.model.plates, strict=True)
    return reduce(jnp.add, (form(target, x, factor, point, rows, rng_key) for form, x in each))


def effects_along(target: Target, point: Array, factor: Array) -> tuple[Array, Array]:
    """The effects at a point, and their derivatives along the columns of a factor."""
    effects, product = jax.linearize(partial(effects_at, target), point)
    if mixtures_of(target.centring):
        diagonal, columns, alone = _by_groups(target, product, point)
        return effects, jnp.diag(diagonal).at[:, alone].set(columns) @ factor
    return effects, jax.vmap(product, 1, 1)(factor)


def whitened_gauss_newton(
    target: Target, plate: Plate, factor: Array, point: Array, rows: Rows, rng_key: Array
) -> Array:
    """
    The Gauss-Newton matrix of the rows of a plate in the coordinates of a Gaussian,

    .. math:: L^\\top \\Big( \\sum_i c_i J_i^\\top H_i J_i \\Big) L, \\qquad
        J_i = \\frac{\\partial \\eta_i}{\\partial \\theta}, \\quad
        H_i = -\\nabla^2_\\eta \\log p(x_i \\mid \\eta_i) ,

    with :math:`\\eta_i(\\theta)` the parameters of the distributions of a row, such as location and
    logarithm of the scale, and :math:`c_i` the number of rows that each stands
    for. It is the Hessian where :math:`\\eta_i` is linear, whether the model is right or wrong. It
    costs one gradient for each entry of :math:`\\eta_i`.

    :param target: the model with its data.
    :param plate: the plate.
    :param factor: :math:`L`, shape ``(d, d)``.
    :param point: :math:`\\theta`, one flat vector.
    :param rows: the rows of the minibatch.
    :param rng_key: the key of the model.

    **Example:** the matrix of a regression with unit scale is :math:`X^\\top X`.

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import init_to_uniform
        >>> from numpyro_sgmcmc.posterior.model import read_model
        >>> from numpyro_sgmcmc.posterior.target import Target
        >>> from numpyro_sgmcmc.tuning.gauss_newton import whitened_gauss_newton

        >>> def model(x, y):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     with numpyro.plate("rows", len(y), subsample_size=2) as i:
        ...         numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

        >>> data = jnp.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), jnp.zeros(3)
        >>> target = Target(read_model(model, init_to_uniform, data, {}), data, {})
        >>> (plate,), rows = target.model.plates, {"rows": jnp.arange(3)}
        >>> at = plate, jnp.eye(2), jnp.zeros(2), rows, jax.random.key(0)
        >>> whitened_gauss_newton(target, *at).round().astype(int).tolist()
        [[3, 3], [3, 5]]

    **References:**

    1. *Fast Curvature Matrix-Vector Products for Second-Order Gradient Descent*,
       Nicol N. Schraudolph (2002).
    """
    drawn, stands_for = rows_stand_for(target, plate, rows)

    def of_row(row: DrawnRows) -> tuple[Array, Array]:
        numbers, energy = likelihood(target, plate, alone(target, plate, row), rng_key)
        eta, pullback = jax.vjp(numbers, point)
        (slopes,) = jax.vmap(pullback)(jnp.eye(eta.size, dtype=eta.dtype))
        return slopes @ factor, jax.hessian(energy)(eta) / rows_of(target, plate)

    chunk = max(1, min(drawn.size, _NUMBERS // (_MANY * len(point))))
    slopes, inner = lax.map(of_row, each_once(drawn), batch_size=chunk)
    weighted = jnp.einsum("i,ijk,ikd->ijd", stands_for, inner, slopes)
    return weighted.reshape(-1, len(point)).T @ slopes.reshape(-1, len(point))


def whitened_prior(
    target: Target, factor: Array | None, point: Array, gradient: Array, rng_key: Array
) -> Array:
    """
    The part of the Hessian that is not the rows' own, in the coordinates of a Gaussian,

    .. math:: L^\\top \\Big( \\nabla^2 U_0 + \\sum_k \\frac{\\partial \\ell}{\\partial x_k}
        \\nabla^2 x_k \\Big) L ,

    with :math:`U_0` the prior's potential, :math:`\\ell` that of the rows and :math:`x` the effects
    of hierarchies. The rows' own part is the Gauss-Newton matrix, which takes effects to be linear
    in the coordinates. This one has their curvature.

    :param target: the model with its data.
    :param factor: :math:`L`, shape ``(d, d)``, or None for the identity.
    :param point: :math:`\\theta`, one flat vector.
    :param gradient: of the potential there, a flat vector.
    :param rng_key: the key of the model.
    """
    # groups are left out, and the terms of other rows are taken out
    potential = target.potential(IdentityMetric()).of_groups(None)
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
    if mixtures_of(target.centring):
        hessian = _symmetric_by_groups(target, product, point)
        return hessian if factor is None else factor.T @ hessian @ factor
    if factor is None:
        return jax.vmap(product)(jnp.eye(len(point), dtype=point.dtype))
    return factor.T @ jax.vmap(product, 1, 1)(factor)


def curvature_of_effects(target: Target, factor: Array, point: Array, slope: Array) -> Array:
    """
    The part of a Hessian that comes from the curvature of effects with local scales,

    .. math:: L^\\top \\nabla^2 \\Big( s^\\top x - \\log \\Big| \\frac{\\partial x}{\\partial y}
        \\Big| \\Big) L .

    :param target: the model with its data.
    :param factor: :math:`L`, shape ``(d, d)``.
    :param point: :math:`y`, one flat vector.
    :param slope: :math:`s`, the gradient of the potential in the effects.
    """

    def curved(y: Array) -> Array:
        written = target.written(target.unravel(y))
        return slope @ ravel(written.effects) - written.effects_log_det

    _, product = jax.linearize(jax.grad(curved), point)
    return factor.T @ _symmetric_by_groups(target, product, point) @ factor


def _symmetric_by_groups(target: Target, product: Callable[[Array], Array], point: Array) -> Array:
    """The symmetric matrix of a product, in which effects with local scales are independent."""
    diagonal, columns, alone = _by_groups(target, product, point)
    return jnp.diag(diagonal).at[:, alone].set(columns).at[alone].set(columns.T)


def _by_groups(
    target: Target, product: Callable[[Array], Array], point: Array
) -> tuple[Array, Array, np.ndarray]:
    """
    A matrix in which effects with local scales are independent.

    The product with the sum of the unit vectors of all effects has the diagonal of their block, so
    that a thousand of them cost no more than one.

    :param product: the product of the matrix and a vector.
    :return: the diagonal, zero for other parameters; the columns of other parameters; and their
        numbers.
    """
    hierarchy = target.hierarchy(target.unravel(point))
    groups = mixtures_of(target.centring) + scales_of(hierarchy, target.centring)
    latents = target.model.latents
    site = np.concatenate([np.full(latents[name].size, name) for name in sorted(latents)])
    alone = np.flatnonzero(~np.isin(site, groups))
    together = np.array([site == name for name in groups], float)
    products = jax.vmap(product)(
        jnp.asarray(np.concatenate([together, np.eye(len(point))[alone]]), point.dtype)
    )
    diagonal = jnp.sum(together * products[: len(groups)], axis=0)
    return diagonal, products[len(groups) :].T, alone


def mean_prior(
    target: Target, factor: Array, points: Array, gradients: Array, rng_key: Array
) -> Array:
    """The mean of :func:`whitened_prior` over some points, shape ``(S, d)``, as of gradients."""

    # a product with the factor takes longer than a Hessian of independent effects
    each = None if mixtures_of(target.centring) else factor

    def at(pair: tuple[Array, Array]) -> Array:
        return whitened_prior(target, each, *pair, rng_key)

    mean = lax.map(at, (points, gradients)).mean(0)
    return mean if each is factor else factor.T @ mean @ factor


def effects_at(target: Target, point: Array) -> Array:
    """The effects of hierarchies, and what is no effect, as one flat vector."""
    return ravel(target.written(target.unravel(point)).effects)


def likelihood(
    target: Target, plate: Plate, rows: Rows, rng_key: Array
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """
    The likelihood of some rows of a plate in two parts.

    :return: :math:`\\eta(\\theta)`, one flat vector for all rows, and their potential at
        :math:`\\eta`.
    :raises TypeError: if a factor stands in the place of a distribution.
    """
    model = target.model.of_groups(plate.name)
    data = counted(target.kinds, rows), rng_key, target.args, target.kwargs

    def sites_at(point: Array) -> dict[str, dict]:
        values = target.written(target.unravel(point)).values
        sites = model.potential_and_sites(values, *data)[1]
        inside = {k: x for k, x in sites.items() if x["type"] == "sample" and plate.name in _of(x)}
        for name, site in inside.items():
            if isinstance(without_wrappers(site["fn"]), dist.Unit):
                raise TypeError(f"'{name}' is a factor and has no distribution")
        return inside

    def numbers(point: Array) -> Array:
        leaves, links, _ = _parameters(sites_at(point))
        each = zip(leaves, links, strict=True)
        return ravel_pytree([_unconstrained(link, x) for x, link in each if link])[0]

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
    The parameters of the distributions of sites.

    :return: the arrays; the transform of each from the real numbers, None for integers; and the
        structure that makes distributions of arrays.
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
    """The transform from the real numbers to a support, such as an exponential."""
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
        return None
    # a support that depends on other parameters or that couples entries has none
    with suppress(NotImplementedError):
        if support is not None and support.event_dim == 0:
            return dist.biject_to(support)
    return dist.transforms.IdentityTransform()


def _unconstrained(link: Any, leaf: Any) -> Array:
    """The real number of a parameter; that of another one, which is constant, at a bound."""
    is_inside = jnp.isfinite(link.inv(leaf))
    return link.inv(jnp.where(is_inside, leaf, link(jnp.zeros_like(leaf))))


def has_distributions(target: Target, plate: Plate) -> bool:
    """True if each row of a plate has distributions with few parameters."""

    def of_row(row: Array) -> tuple[Array, Array]:
        numbers, energy = likelihood(target, plate, alone(target, plate, row), random.key(0))
        eta = numbers(jnp.zeros(target.model.dimension, target.model.dtype))
        return eta, energy(eta)

    # distributions of users need not be trees of their parameters
    with suppress(Exception):
        return jax.eval_shape(of_row, jnp.zeros((), jnp.int32))[0].size <= _MANY
    return False


def _are_crossed(target: Target) -> bool:
    """True if rows of two plates have a site together, which groups never have."""
    names = {plate.name for plate in target.model.plates if not plate.is_group}
    if len(names) < 2:
        return False
    crossed: list[str] = []

    def look(point: Array) -> Array:
        data = target.model.first_rows(), random.key(0), target.args, target.kwargs
        energy, sites = target.model.potential_and_sites(target.unravel(point), *data)
        crossed.extend(name for name, x in sites.items() if len(names.intersection(_of(x))) > 1)
        return energy

    jax.eval_shape(look, jnp.zeros(target.model.dimension, target.model.dtype))
    return bool(crossed)


def _of(site: dict) -> list[str]:
    """The names of the plates of a site."""
    return [frame.name for frame in site.get("cond_indep_stack", ())]
