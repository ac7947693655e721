# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The choice of coordinates for hierarchies, from the information of the rows on each effect."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.metric import (
    DenseMetric,
    DiagonalMetric,
    GaussianMetric,
    from_covariance,
)
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.potential import ravel
from numpyro_sgmcmc.posterior.reparam import (
    Centring,
    Coordinates,
    centred_by,
    locations_and_scales,
)
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian

#: Share of an effect's precision that comes from the rows, above which the effect is centred.
_CENTRED = 0.8

#: Number of points at which the signs of factors are checked.
_POINTS = 32


def non_centred(target: Target) -> Target:
    """
    The target with all of its hierarchies in non-centred coordinates.

    A site whose factor may be positive or negative is not in a hierarchy, because a scale of zero
    would split the space.

    :param target: the model with its data, as written.
    """

    def factors(target: Target, points: Array) -> dict[str, Array]:
        def at(point: Array) -> dict[str, Array]:
            values = target.unravel(point)
            sites = locations_and_scales(target.hierarchy(values), values)
            return {name: x.factor for name, x in sites.items()}

        return jax.vmap(at)(points)

    normal = np.random.default_rng(0).standard_normal((_POINTS, target.model.dimension))
    points = normal.astype(target.model.dtype)
    if not jax.eval_shape(partial(factors, target), points):
        return target
    factor_values = {k: np.asarray(x) for k, x in target.compiled(factors)(points).items()}
    zeros = target.unravel(jnp.zeros(target.model.dimension))
    kept = [
        k for k, x in factor_values.items() if np.all((x > 0).all(axis=0) | (x < 0).all(axis=0))
    ]
    return target._replace(centring={name: centred_by(zeros[name]) for name in kept})


def find_centring(target: Target, gaussian: Gaussian) -> tuple[Target, Gaussian]:
    """
    Find the coordinates that suit the hierarchies of a target, and move a Gaussian into them.

    See :mod:`numpyro_sgmcmc.posterior.reparam`. The information of the rows on an effect, given all
    else, is its precision in the Gaussian minus the precision of its own law. The entry of
    :math:`u` in the diagonal of the precision is :math:`1 + J \\sigma_0^2`. With :math:`x_0`,
    :math:`\\mu_0` and :math:`\\sigma_0` at the centre

    .. math:: \\lambda = \\frac{J}{J + \\sigma_0^{-2}}, \\qquad
        e = \\lambda \\hat x = x_0 - (1 - \\lambda) \\mu_0,

    so that the centre is at :math:`y = 0`. Values of :math:`\\lambda` above 0.8 become 1.
    Otherwise, with few well-known effects at a fixed :math:`y`, the posterior is nearly constant
    for all small :math:`\\sigma`, far above its value at the centre, and the search for a Gaussian
    gets lost there.

    :param target: the model with its data, in any coordinates of this kind.
    :param gaussian: an approximation of the posterior in these coordinates, of all rows or of a
        part.

    **References:**

    1. *A General Framework for the Parametrization of Hierarchical Models*, Omiros
       Papaspiliopoulos, Gareth O. Roberts and Martin Sköld (2007): for a known scale, location and
       effects of a Gaussian model are independent with this :math:`\\lambda`.

    **Example:** three effects, about which the rows say nothing, about as much as the prior, and
    nearly all.

    .. doctest::

        >>> import jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import init_to_uniform
        >>> from numpyro_sgmcmc.posterior.metric import from_covariance
        >>> from numpyro_sgmcmc.posterior.model import read_model
        >>> from numpyro_sgmcmc.posterior.target import Target
        >>> from numpyro_sgmcmc.tuning.find_reparam import find_centring, non_centred
        >>> from numpyro_sgmcmc.tuning.gaussian import Gaussian

        >>> def model(y):
        ...     tau = numpyro.sample("tau", dist.HalfNormal(1))
        ...     x = numpyro.sample("x", dist.Normal(0, tau).expand([3]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(x, jnp.array([1e3, 1.0, 0.1])).to_event(1), obs=y)

        >>> y = jnp.zeros(3)
        >>> target = non_centred(Target(read_model(model, init_to_uniform, (y,), {}), (y,), {}))
        >>> precisions = np.diag([1.0, 1.0, 2.0, 100.0])  # of log tau and of u
        >>> gaussian = Gaussian(from_covariance(np.linalg.inv(precisions), np.zeros(4), float), 0.0)
        >>> find_centring(target, gaussian)[0].centring["x"].degree.round(1).tolist()
        [0.0, 0.5, 1.0]
    """
    if not target.centring:
        return target, gaussian
    metric = gaussian.metric
    if isinstance(metric, DenseMetric):
        precisions = jnp.sum(metric.inverse**2, axis=0)
    else:
        precisions = metric.scale**-2
    centring = _fitting(target, metric.center, target.unravel(precisions), gaussian.part)
    moved = _moved(target, centring, metric)
    return target._replace(centring=centring), gaussian._replace(metric=moved)


def _fitting(target: Target, center: Array, precisions: Values, part: float) -> Centring:
    """
    The coordinates in which effects and their scales are independent.

    :param center: the centre of the Gaussian, in the coordinates of the target.
    :param precisions: the precision of each value given all others.
    :param part: the part of the rows behind the Gaussian.
    """

    def run(target: Target, center: Array, precisions: Values, part: Array) -> Centring:
        written = target.written(target.unravel(center))
        hierarchy = target.hierarchy(written.values)
        coordinates = {}
        for name, around in locations_and_scales(hierarchy, written.values).items():
            if name not in target.centring:
                continue
            spread = around.spread(target.centring[name])
            known = jnp.maximum(precisions[name] * spread - 1, 0.0) / part
            degree = known / (1 + known)
            degree = jnp.where(degree < _CENTRED, degree, 1.0)
            estimate = written.effects[name] - (1 - degree) * around.location
            coordinates[name] = Coordinates(degree, around.scale, estimate)
        return coordinates

    part_ = jnp.asarray(part, center.dtype)
    return target.compiled(run, "coordinates")(center, precisions, part_)


def _moved(target: Target, centring: Centring, metric: GaussianMetric) -> GaussianMetric:
    """The Gaussian in other coordinates, to first order around its centre."""

    def run(target: Target, centring: Centring, center: Array, factor: Array) -> Any:
        def at(point: Array) -> Array:
            written = target.from_internal(target.unravel(point))
            return ravel_pytree(target._replace(centring=centring).to_internal(written))[0]

        if factor.ndim == 2:
            product = jax.linearize(at, center)[1]
            return at(center), jax.vmap(product, 1, 1)(factor)
        # effects of a site are independent of each other
        derivative, start = jnp.zeros_like(center), 0
        for name in sorted(target.model.latents):
            size = target.model.latents[name].size
            entries = (jnp.arange(len(center)) >= start) & (jnp.arange(len(center)) < start + size)
            own = jax.jvp(at, (center,), (entries.astype(center.dtype),))[1]
            derivative, start = jnp.where(entries, own, derivative), start + size
        return at(center), derivative * factor

    moved = target.compiled(run, "moved")
    if isinstance(metric, DiagonalMetric):
        return DiagonalMetric(*moved(centring, metric.center, metric.scale))
    center, factor = (np.asarray(x, float) for x in moved(centring, *metric[:2]))
    return from_covariance(factor @ factor.T, center, metric.center.dtype)


def way_between(target: Target, centers: Array, best: Any, degree: Any) -> Array:
    """
    Five points on the way from one centre to each, shape (5, k, d).

    The way is straight in coordinates with a degree of centring.

    :param centers: shape (k, d).
    :param best: index of the centre where the ways begin.
    :param degree: the degree of centring.
    """
    values = target.unravel(centers[0])
    centring = {k: centred_by(jnp.full_like(values[k], degree)) for k in target.centring}
    there = target._replace(centring=centring)

    def carried(here: Target, there: Target) -> Callable[[Array], Array]:
        def one(x: Array) -> Array:
            return ravel(there.to_internal(here.from_internal(here.unravel(x))))

        return jax.vmap(one)

    ends = carried(target, there)(centers)
    points = ends[best] + jnp.linspace(0, 1, 5)[:, None, None] * (ends - ends[best])
    return carried(there, target)(points.reshape(-1, points.shape[-1])).reshape(points.shape)
