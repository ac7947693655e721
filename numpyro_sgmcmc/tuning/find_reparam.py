# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The choice of coordinates for hierarchies, from the information of the rows on each effect."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.coordinates import (
    Centring,
    Coordinates,
    MixtureCoordinates,
    centred_by,
    mixtures_of,
    with_degree,
)
from numpyro_sgmcmc.posterior.hierarchy import Hierarchy, is_alone
from numpyro_sgmcmc.posterior.metric import (
    DenseMetric,
    DiagonalMetric,
    GaussianMetric,
    from_covariance,
)
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.potential import ravel
from numpyro_sgmcmc.posterior.reparam import locations_and_scales, mixture_of, scales_of
from numpyro_sgmcmc.posterior.scale_mixture import EVERY, Mixture
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian

#: Shares of an effect's precision that come from the rows: above the first the effect is centred,
#: and below the other it is non-centred.
_CENTRED, _NON_CENTRED = 0.8, 1e-3

#: Number of draws that show whether scales move together, the largest rounding error of their
#: logarithms, and the fewest effects for each of several scales.
_DRAWS, _SAME, _FOR_EACH = 16, 1e-5, 4

#: Number of points at which the signs of factors are checked.
_POINTS = 32

#: Number of further points near the origin, their distance as a part of that of the others, and a
#: factor that is tiny.
_POINTS_NEAR, _NEAR, _TINY = 16, 1 / 16, 1e-6

#: Logarithm of the largest density of a local scale minus those at the ends of its points, and the
#: largest difference of the logarithms of neighbouring scales.
_TAILS, _CLOSE = 8.0, 0.6


def non_centred(target: Target) -> Target:
    """
    The target with all of its hierarchies in non-centred coordinates, or as scale mixtures.

    A site whose factor may be positive or negative is not in a hierarchy, because a scale of zero
    would split the space.

    :param target: the model with its data, as written.
    """
    normal = np.random.default_rng(0).standard_normal((_POINTS, target.model.dimension))
    points = np.concatenate([normal, _NEAR * normal[:_POINTS_NEAR]]).astype(target.model.dtype)
    local = _local_scales(target)

    def seen(target: Target, points: Array) -> Any:
        def at(point: Array) -> Any:
            values = target.unravel(point)
            hierarchy = target.hierarchy(values)
            sites = locations_and_scales(hierarchy, values)
            fits = {k: _is_mixture(hierarchy, k, values) for k in local}
            return {name: x.factor for name, x in sites.items()}, fits

        return lax.map(at, points) if local else jax.vmap(at)(points)

    if not jax.eval_shape(partial(seen, target), points)[0]:
        return target
    factors, fits = jax.tree.map(np.asarray, target.compiled(seen)(points))
    zeros = target.unravel(jnp.zeros(target.model.dimension))
    kept = {k for k, x in factors.items() if _has_one_sign(x)}
    local = {k: scale for k, scale in local.items() if k in kept and fits[k].all()}
    centring: dict[str, Any] = {k: centred_by(zeros[k]) for k in kept - set(local.values())}
    centring |= {k: MixtureCoordinates(jnp.ones_like(zeros[k])) for k in local}
    target = target._replace(centring=dict(sorted(centring.items())))
    return with_errors(target, jnp.zeros(target.model.dimension, target.model.dtype))


def _has_one_sign(factors: np.ndarray) -> bool:
    """
    True if each factor is positive wherever it is not zero, or negative.

    The spectral density of a smooth process underflows far from the origin, and near it only if it
    is tiny all around. A factor like ``relu(a)`` is zero at some points near it, and not at others.

    :param factors: shape (points, ...), the last of which are near the origin.
    """
    is_mixed = (factors > 0).any(axis=0) & (factors < 0).any(axis=0)
    near = np.abs(factors[_POINTS:])
    is_cut = (near == 0).any(axis=0) & (near.max(axis=0) > _TINY)
    return bool(np.isfinite(factors).all() and factors.any() and not (is_mixed | is_cut).any())


def _local_scales(target: Target) -> dict[str, str | None]:
    """The sites of local scales by effect, on which no other site depends; None for mixtures."""
    model, found = target.model, {}

    def read(target: Target, values: Values) -> Array:
        data = values, model.first_rows(), random.key(0), target.args, target.kwargs
        hierarchy = target.hierarchy(values)
        for name, scale in hierarchy.local.items():
            if is_alone(model, data, name, scale.name, bool(hierarchy.sites[name].steps)):
                found[name] = scale.name
        return jnp.zeros(())

    program, data, _ = target.program(read)
    jax.eval_shape(program, data, model.latents)
    scales = list(found.values())
    return {k: scale for k, scale in found.items() if scale is None or scales.count(scale) == 1}


def _is_mixture(hierarchy: Hierarchy, name: str, values: Values) -> Array:
    """
    True if effects have the distributions of a mixture that the coordinates serve.

    The scale of each depends on its own local scale, and its location on none. The points of the
    local scale reach into both of its tails, they are close together, and coordinates grow with
    effects, whatever their standard error.
    """
    at = mixture_of(hierarchy, name, values)
    all_, mixture = at.mixture(1), at.mixture(EVERY)
    if at.name is None:
        return _is_increasing(mixture, at.location.dtype)
    shape = at.location.shape
    k = np.random.default_rng(0).integers(len(at.points), size=(1, *shape))
    around = at.around(jnp.take_along_axis(at.points, k, 0)[0])
    factors = jax.vmap(at.around)(at.points).factor
    fits = jnp.allclose(
        jnp.log(around.scale), jnp.take_along_axis(all_.log_scales, k, 0)[0], atol=1e-3
    )
    fits &= jnp.allclose(around.location, at.location)
    fits &= jnp.all(factors > 0) | jnp.all(factors < 0)
    peak = jnp.max(at.log_weights, axis=0)
    fits &= jnp.all(at.log_weights[0] < peak - _TAILS) & jnp.all(at.log_weights[-1] < peak - _TAILS)
    fits &= jnp.max(jnp.abs(jnp.diff(mixture.log_scales, axis=0))) < _CLOSE
    return fits & _is_increasing(mixture, at.location.dtype)


def _is_increasing(mixture: Mixture, dtype: Any) -> Array:
    """True if coordinates grow with effects, whatever their standard error."""

    def slope(away: Array) -> Array:
        errors, distances = mixture.log_mean + away[0], mixture.log_mean + away[1]
        return jnp.min(mixture.with_slope(errors, distances)[1])

    away = np.stack(np.meshgrid(np.arange(-9.0, 10, 3), np.arange(-12.0, 13, 1)), -1)
    slopes = lax.map(slope, jnp.asarray(away.reshape(-1, 2), dtype))
    return jnp.all(slopes > 0)


def with_errors(target: Target, point: Array, part: float = 1.0) -> Target:
    """
    The target with the standard errors of effects with a local scale.

    They are :math:`J^{-1/2}`, with :math:`J` the second derivative of the potential of the rows of
    a minibatch.

    :param point: a point in the coordinates of the target.
    :param float part: the part of the rows whose standard errors they are.
    """
    names = mixtures_of(target.centring)
    if not names:
        return target

    def run(target: Target, point: Array) -> dict[str, Array]:
        effects = target.written(target.unravel(point)).effects
        potential, rows = target.whole_potential, target.rows(random.key(0))

        def energy(part: Values) -> Array:
            _, terms = potential.with_row_terms(effects | part, rows, random.key(0))
            return -sum((jnp.sum(x) for x in terms.values()), jnp.zeros(()))

        part = {k: effects[k] for k in names}
        flat, unravel = ravel_pytree(part)
        slope = jax.grad(lambda x: energy(unravel(x)))

        def second(k: Array) -> Array:
            unit = (jnp.arange(flat.size) == k).astype(flat.dtype)
            return jax.jvp(slope, (flat,), (unit,))[1][k]

        return unravel(target.mean(lax.map(second, jnp.arange(flat.size))))

    found = target.compiled(run, "errors")(point)
    centring = dict(target.centring)
    for name in names:
        known = jnp.where(found[name] > 0, found[name], jnp.nan)
        typical = jnp.nan_to_num(jnp.nanmedian(known), nan=1.0)
        centring[name] = MixtureCoordinates((part * jnp.where(known > 0, known, typical)) ** -0.5)
    return target._replace(centring=centring)


def find_centring(target: Target, gaussian: Gaussian) -> tuple[Target, Gaussian]:
    """
    Find the coordinates that suit the hierarchies of a target, and move a Gaussian into them.

    See :mod:`numpyro_sgmcmc.posterior.reparam`. The information of the rows on an effect, given all
    else, is its precision in the Gaussian minus the precision of its own law. The entry of
    :math:`u` in the diagonal of the precision is :math:`1 + J \\sigma_0^2`. With :math:`x_0`,
    :math:`\\mu_0` and :math:`\\sigma_0` at the centre

    .. math:: \\lambda = \\frac{J}{J + \\sigma_0^{-2}}, \\qquad
        e = \\lambda \\hat x = x_0 - (1 - \\lambda) \\mu_0,

    so that the centre is at :math:`y = 0`. Values of :math:`\\lambda` below 0.001 become 0, and
    those above 0.8 become 1 where effects share a scale. Otherwise, with few well-known effects at
    a fixed :math:`y`, the posterior is nearly constant for all small :math:`\\sigma`, far above its
    value at the centre, and the search for a Gaussian gets lost there. Where each effect has a
    scale of its own, as with the spectral density of a process, some scales become small while
    others do not. Centred effects then have necks, in which chains stay.

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
    centring = dict(with_errors(target, metric.center).centring)
    centring |= _fitting(target, metric, target.unravel(precisions), gaussian.part)
    moved = _moved(target, centring, metric)
    return target._replace(centring=centring), gaussian._replace(metric=moved)


def _fitting(target: Target, metric: GaussianMetric, precisions: Values, part: float) -> Centring:
    """
    The coordinates in which effects and their scales are independent.

    :param metric: the Gaussian, in the coordinates of the target.
    :param precisions: the precision of each value given all others.
    :param part: the part of the rows behind the Gaussian.
    """

    def run(target: Target, metric: GaussianMetric) -> tuple[Values, Values, Values]:
        """Effects, locations and scales at the centre and at draws."""

        def at(point: Array) -> tuple[Values, Values, Values]:
            written = target.written(target.unravel(point))
            sites = locations_and_scales(target.hierarchy(written.values), written.values)
            locations = {name: around.location for name, around in sites.items()}
            return written.effects, locations, {name: x.scale for name, x in sites.items()}

        center, key = metric.center, random.key(0)
        normal = random.normal(key, (_DRAWS, *center.shape), center.dtype)
        return lax.map(at, jnp.concatenate([center[None], jax.vmap(metric.values)(normal)]))

    effects, locations, scales = target.compiled(run, "coordinates")(metric)
    coordinates = {}
    for name, there in target.centring.items():
        if not isinstance(there, Coordinates):
            continue
        scale = scales[name][0]
        known = jnp.maximum(precisions[name] * there.spread(scale) - 1, 0.0) / part
        degree = known / (1 + known)
        is_centred = (degree >= _CENTRED) & _is_shared(np.asarray(scales[name][1:]))
        degree = jnp.where(is_centred, 1.0, jnp.where(degree > _NON_CENTRED, degree, 0.0))
        estimate = effects[name][0] - (1 - degree) * locations[name][0]
        coordinates[name] = Coordinates(
            degree,
            jnp.where(degree > 0, scale, 1.0),
            jnp.where(degree > 0, estimate, 0.0),
        )
    return coordinates


def _is_shared(scales: np.ndarray) -> bool:
    """
    True if effects share their scale, or a few scales.

    Effects of a process have a scale each, or in pairs.

    :param scales: at some draws, shape (draws, ...).
    """
    finite = np.clip(np.nan_to_num(scales).astype(float), 1e-30, 1e30)
    logarithms = np.log(finite).reshape(len(scales), -1)
    moves = logarithms - logarithms.mean(axis=0)
    moves = moves[:, np.abs(moves).max(axis=0) > _SAME]
    marks = np.sort(np.random.default_rng(0).standard_normal(len(moves)) @ moves)
    distinct = 1 + np.sum(np.diff(marks) > _SAME)
    return bool(distinct <= max(1, scales[0].size / _FOR_EACH))


def between(target: Target, there: Target, point: Array) -> Array:
    """
    A point in the coordinates of another target.

    :param target: the target of the coordinates of the point.
    :param there: the target with other coordinates.
    """
    values = target.unravel(point)
    result = there.to_internal(target.written(values).values)
    # the coordinates of local scales are the same
    names = scales_of(target.hierarchy(values), target.centring)
    return ravel_pytree(result | {name: values[name] for name in names})[0]


def _moved(target: Target, centring: Centring, metric: GaussianMetric) -> GaussianMetric:
    """The Gaussian in other coordinates, to first order around its centre."""

    def run(target: Target, centring: Centring, center: Array, factor: Array) -> Any:
        at = partial(between, target, target._replace(centring=centring))

        if factor.ndim == 2:
            product = jax.linearize(at, center)[1]
            return at(center), jax.vmap(product, 1, 1)(factor)
        derivative = jnp.zeros_like(center)
        numbers = _independent(target, center)
        for k in range(numbers.max() + 1):
            entries = numbers == k
            own = jax.jvp(at, (center,), (entries.astype(center.dtype),))[1]
            derivative = jnp.where(entries, own, derivative)
        return at(center), derivative * factor

    moved = target.compiled(run, "moved")
    if isinstance(metric, DiagonalMetric):
        return DiagonalMetric(*moved(centring, metric.center, metric.scale))
    center, factor = (np.asarray(x, float) for x in moved(centring, *metric[:2]))
    return from_covariance(factor @ factor.T, center, metric.center.dtype)


def _independent(target: Target, center: Array) -> np.ndarray:
    """
    A number of each coordinate, such that coordinates of the same number are independent.

    Effects of a site are independent of each other, but for those of a group by a matrix.
    """
    sites, numbers, count = target.hierarchy(target.unravel(center)).sites, [], 0
    for name, latent in sorted(target.model.latents.items()):
        axes = [step.axes for step in sites[name].steps if step.axes] if name in sites else []
        own = np.zeros(latent.shape, int)
        if axes and name in target.centring:
            own = np.indices(latent.shape)[axes[0][0]]
        numbers.append(own.ravel() + count)
        count = numbers[-1].max(initial=count - 1) + 1
    return np.concatenate(numbers)


def way_between(target: Target, centers: Array, best: Any, degree: Any) -> Array:
    """
    Five points on the way from one centre to each, shape (5, k, d).

    The way is straight in coordinates with a degree of centring.

    :param centers: shape (k, d).
    :param best: index of the centre where the ways begin.
    :param degree: the degree of centring.
    """
    there = target._replace(centring=with_degree(target.centring, degree))

    def carried(here: Target, there: Target) -> Callable[[Array], Array]:
        def one(x: Array) -> Array:
            return ravel(there.to_internal(here.from_internal(here.unravel(x))))

        return jax.vmap(one)

    ends = carried(target, there)(centers)
    points = ends[best] + jnp.linspace(0, 1, 5)[:, None, None] * (ends - ends[best])
    return carried(there, target)(points.reshape(-1, points.shape[-1])).reshape(points.shape)
