# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Coordinates of a hierarchy, in which effects do not depend on their scale.

An effect :math:`x \\sim p(\\mu, \\sigma)` of a group, with unknown location and scale, is
:math:`x = \\mu + \\sigma u`. Rows that tell much of :math:`x` make :math:`x` and :math:`\\sigma`
almost independent, so that a sampler should move :math:`x`. Rows that tell little leave :math:`u`
and :math:`\\sigma` independent. Between these cases the rows know the effect to be :math:`\\hat x`
with a precision :math:`J`. Its distribution given :math:`\\mu` and :math:`\\sigma` would then be
normal. With growing :math:`\\sigma` the mean moves from :math:`\\mu` to :math:`\\hat x`, and the
variance grows to :math:`1 / J`. The coordinate :math:`y` is standardised by this mean and variance,

.. math:: x = \\frac{\\sigma^{-2} \\mu + J \\hat x}{\\sigma^{-2} + J}
    + \\frac{c \\, y}{\\sqrt{\\sigma^{-2} + J}}
    = \\frac{(1 - \\lambda) \\mu + r^2 e}{1 - \\lambda + \\lambda r^2}
    + \\frac{\\sigma y}{\\sqrt{1 - \\lambda + \\lambda r^2}},

with the degree of centring :math:`\\lambda = J / (J + \\sigma_0^{-2})` for the scale
:math:`\\sigma_0` at the centre of the posterior, :math:`r = \\sigma / \\sigma_0`,
:math:`e = \\lambda \\hat x` and :math:`c^2 = 1 / (1 - \\lambda)`: the non-centred coordinate,
:math:`x = \\mu + \\sigma y`, for :math:`\\lambda = 0`, and a centred one,
:math:`x = \\hat x + \\sigma_0 y`, for :math:`\\lambda = 1`. For normal effects with normal rows the
coordinates are independent of the scale for every scale, and there is neither a funnel nor a bent
ridge. The latent value of the model is :math:`v = m + s u` with the location :math:`m` and scale
:math:`s` of the site: :math:`x`, or :math:`u` in hierarchies that are written non-centred. The
potential as a function of :math:`y` is

.. math:: U(v(y)) - \\log \\left| \\frac{\\partial v}{\\partial y} \\right|, \\qquad
    v = m + s \\left( \\frac{r (e - \\lambda \\mu)}{\\sigma_0 q} + \\frac{y}{\\sqrt q} \\right),
    \\qquad q = 1 - \\lambda + \\lambda r^2 .

This is a change of variables: the distribution of :math:`v` does not depend on the choice of
:math:`\\mu`, :math:`\\sigma`, :math:`\\lambda`, :math:`\\sigma_0` and :math:`e`. Location and scale
are read from the model by :mod:`~numpyro_sgmcmc.posterior.hierarchy`.

**Example:** standard effects with rows as informative as the effects' distribution for
:math:`\\sigma_0 = 4`, and estimates of 0.

.. doctest::

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import init_to_uniform
    >>> from numpyro_sgmcmc.posterior.reparam import Coordinates
    >>> from numpyro_sgmcmc.posterior.model import read_model
    >>> from numpyro_sgmcmc.posterior.target import Target

    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
    ...     tau = numpyro.sample("tau", dist.HalfNormal(1))
    ...     x = mu + tau * numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
    ...     numpyro.sample("y", dist.Normal(x, 1).to_event(1), obs=y)

    >>> y = jnp.zeros(2)
    >>> target = Target(read_model(model, init_to_uniform, (y,), {}), (y,), {})
    >>> values = {"mu": jnp.array(1.0), "tau": jnp.log(4.0), "z": jnp.array([0.0, 1.0])}
    >>> list(target.hierarchy(values).sites)
    ['z']
    >>> halfway = Coordinates(jnp.full(2, 0.5), jnp.full(2, 4.0), jnp.zeros(2))
    >>> halfway = target._replace(centring={"z": halfway})
    >>> halfway.to_internal(values)["z"].tolist()
    [0.125, 1.125]
    >>> halfway.from_internal(halfway.to_internal(values))["z"].tolist()
    [0.0, 1.0]

**References:**

1. *A General Framework for the Parametrization of Hierarchical Models*, Omiros Papaspiliopoulos,
   Gareth O. Roberts and Martin Sköld (2007): coordinates that depend on the data.
2. *Automatic Reparameterisation of Probabilistic Programs*, Maria I. Gorinova, Dave Moore and
   Matthew D. Hoffman (2020): :math:`y = \\lambda \\mu + \\sigma^\\lambda u`, which is as wide for
   every :math:`\\sigma` near :math:`\\sigma_0` only, and whose mean moves with :math:`\\sigma`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.hierarchy import Hierarchy, Site
from numpyro_sgmcmc.posterior.jaxpr import evaluate, value_of
from numpyro_sgmcmc.posterior.local_scales import LocalScale
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.scale_mixture import (
    EVERY,
    Mixture,
    coordinate_of_scale,
    likely_scale,
    scale_at,
)

#: The smallest distance of an effect from its location, in standard deviations.
_NEAREST = 1e-12

#: The smallest scale of an effect in its coordinates, whose inverse cube does not overflow. Factors
#: of the model may be smaller, and underflow, like a spectral density.
_SMALLEST = 1e-12

#: The same, relative to the location, so that the effect minus its location keeps digits.
_RESOLVED = 1e-5


class Coordinates(NamedTuple):
    """
    Coordinates of a site, by arrays of the shape of its values.

    - **degree** - the degree of centring :math:`\\lambda`.
    - **scale** - :math:`\\sigma_0`.
    - **estimate** - :math:`e = \\lambda \\hat x`.
    """

    degree: Array
    scale: Array
    estimate: Array

    def centred_by(self, degree: Any) -> "Coordinates":
        """Return coordinates with a degree of centring, with scale 1 and estimate 0."""
        return centred_by(jnp.full_like(self.degree, degree))

    def spread(self, scale: Array) -> Array:
        """Return :math:`q`."""
        return 1 - self.degree + self.degree * (scale / self.scale) ** 2

    def summary(self) -> str:
        low, middle, high = np.quantile(np.asarray(self.degree), [0, 0.5, 1])
        range_ = f"centred by {low:.2f} to {high:.2f}, median {middle:.2f}"
        return f"{range_} (0 is non-centred)"


class MixtureCoordinates(NamedTuple):
    """
    Coordinates of a site and its local scale, see :mod:`~numpyro_sgmcmc.posterior.scale_mixture`.

    - **error** - the standard error :math:`s` of each effect, of the shape of its values.
    """

    error: Array

    def centred_by(self, degree: Any) -> "MixtureCoordinates":
        """Return the same, because they are neither centred nor non-centred."""
        return self

    def summary(self) -> str:
        low, high = (f(np.asarray(self.error)) for f in (np.min, np.max))
        return f"a mixture over its scales, for standard errors of {low:.3g} to {high:.3g}"


AnyCoordinates = Coordinates | MixtureCoordinates

#: Coordinates by site.
Centring = Mapping[str, AnyCoordinates]


def centred_by(degree: Array) -> Coordinates:
    """Return coordinates with a degree of centring, with scale 1 and estimate 0."""
    return Coordinates(degree, jnp.ones_like(degree), jnp.zeros_like(degree))


def centred(centring: Centring) -> Centring:
    """Return the coordinates of sites that equal their effects, :math:`y = x`."""
    return {name: centred_by(jnp.ones_like(there[0])) for name, there in centring.items()}


def scales_of(hierarchy: Hierarchy, centring: Centring) -> list[str]:
    """Return the names of the sites of local scales."""
    return [hierarchy.local[name].name for name in mixtures_of(centring)]


def mixtures_of(centring: Centring) -> list[str]:
    """Return the names of the sites with a local scale."""
    return [name for name, there in centring.items() if isinstance(there, MixtureCoordinates)]


def with_degree(centring: Centring, degree: Any) -> Centring:
    """Return coordinates with a degree of centring; of scale mixtures the same."""
    return {name: there.centred_by(degree) for name, there in centring.items()}


class Written(NamedTuple):
    """
    Values of the model for values in the coordinates.

    - **values** - the unconstrained values of the model, :math:`v`. A local scale has one that is
      likely given its effect, of which the potential minus the log determinant is independent.
    - **log_det** - :math:`\\log |\\partial v / \\partial y|`.
    - **effects** - :math:`x`, in which the log-likelihood bends the least; values of other sites.
    - **effects_log_det** - :math:`\\log |\\partial x / \\partial y|`.
    """

    values: Values
    log_det: Array
    effects: Values
    effects_log_det: Array


def from_internal(hierarchy: Hierarchy, centring: Centring, values: Values) -> Written:
    """
    Return :math:`v(y)` and :math:`x(y)`, site by site.

    :param hierarchy: hierarchy of the model at these values.
    :param centring: coordinates by site.
    :param values: values in the coordinates :math:`y`.
    """
    log_det, effects, effects_log_det = jnp.zeros(()), dict(values), jnp.zeros(())

    def moved(there: Coordinates, name: str, y: Array, around: Around) -> Array:
        nonlocal log_det, effects_log_det
        narrower = -jnp.log(there.spread(around.scale)) / 2
        log_det += jnp.sum(jnp.log(around.own_scale) + narrower)
        effects_log_det += jnp.sum(jnp.log(around.scale) + narrower)
        units = around.units(y, there)
        effects[name] = around.location + around.scale * units
        return around.own_location + around.own_scale * units

    def with_scale(
        log_error: Array, name: str, y: Array, v: Array, at: LocalAround
    ) -> tuple[Array, Array]:
        nonlocal log_det, effects_log_det
        mixture = at.mixture(EVERY)
        far = mixture.log_distance(log_error, y)
        logarithm, log_weight = at.likely(lax.stop_gradient(far))
        around = at.around(logarithm)
        x, units = at.effect(far, y), _signed(jnp.exp(far - jnp.log(around.scale)), y)
        joint = log_weight - jnp.log(around.scale) - units**2 / 2
        slope = mixture.with_slope(log_error, far)[1]
        changed = mixture.log_density(far) - jnp.log(slope) + far - v**2 / 2 - joint
        log_det += jnp.sum(changed + jnp.log(around.own_scale / around.scale))
        effects_log_det += jnp.sum(changed)
        effects[name], effects[at.name] = x, logarithm
        return around.own_location + around.own_scale * units, logarithm

    written = _evaluated(hierarchy, centring, values, (moved, with_scale), from_internal=False)
    return Written(written, log_det, effects, effects_log_det)


def drawn_from_internal(hierarchy: Hierarchy, centring: Centring, values: Values) -> Values:
    """
    Return :math:`v(y)` with the local scales that belong to their coordinates.

    Parameters are as in :func:`from_internal`.
    """

    def moved(there: Coordinates, name: str, y: Array, around: Around) -> Array:
        return around.own_location + around.own_scale * around.units(y, there)

    def with_scale(
        log_error: Array, name: str, y: Array, v: Array, at: LocalAround
    ) -> tuple[Array, Array]:
        far = at.mixture(EVERY).log_distance(log_error, y)
        logarithm = scale_at(at.mixture(1), at.points, far, v)
        around = at.around(logarithm)
        units = _signed(jnp.exp(far - jnp.log(around.scale)), y)
        return around.own_location + around.own_scale * units, logarithm

    return _evaluated(hierarchy, centring, values, (moved, with_scale), from_internal=False)


def to_internal(hierarchy: Hierarchy, centring: Centring, values: Values) -> Values:
    """
    Return :math:`y(v)`, the inverse of :func:`drawn_from_internal`.

    The coordinates of local scales have no derivatives.

    :param hierarchy: hierarchy of the model at these values.
    :param centring: coordinates by site.
    :param values: unconstrained values :math:`v`.
    :return: values in the coordinates :math:`y`.
    """

    def moved(there: Coordinates, name: str, v: Array, around: Around) -> Array:
        return around.coordinate(v, there)

    def with_scale(
        log_error: Array, name: str, z: Array, logarithm: Array, at: LocalAround
    ) -> tuple[Array, Array]:
        around = at.around(logarithm)
        units = (z - around.own_location) / around.own_scale
        far = jnp.log(jnp.maximum(jnp.abs(units), _NEAREST)) + jnp.log(around.scale)
        v = coordinate_of_scale(at.mixture(1), at.points, far, logarithm)
        y = at.mixture(EVERY).coordinate(log_error, far)
        return _signed(y, units), lax.stop_gradient(v)

    return _evaluated(hierarchy, centring, values, (moved, with_scale), from_internal=True)


class Around(NamedTuple):
    """
    Locations and scales of a site and of its effect.

    - **own_location**, **own_scale** - :math:`m` and :math:`s` of the latent value.
    - **location**, **scale** - :math:`\\mu` and :math:`\\sigma` of the effect :math:`x`.
    - **factor** - factor by which the model multiplies the value. A factor that may be positive or
      negative is no scale.
    - **below** - by how much the location of an effect grows with the values :math:`u` of those
      before it in its group, shape (..., k, k), or None.
    - **axis** - the axis of the effects of a group.
    """

    own_location: Array
    own_scale: Array
    location: Array
    scale: Array
    factor: Array
    below: Array | None = None
    axis: int = -1

    def given(self, units: Array) -> "Around":
        """Return those given the values :math:`u` of the effects before each."""
        if self.below is None:
            return self
        moved = _by_group(self.below, units, self.axis)
        return self._replace(location=self.location + moved)

    def units(self, y: Array, there: Coordinates) -> Array:
        """Return :math:`u(y)`."""
        return self._moved(there) + y / jnp.sqrt(there.spread(self.scale))

    def coordinate(self, v: Array, there: Coordinates) -> Array:
        """Return :math:`y(v)`."""
        units = (v - self.own_location) / self.own_scale
        return jnp.sqrt(there.spread(self.scale)) * (units - self._moved(there))

    def _moved(self, there: Coordinates) -> Array:
        """Return :math:`u` at :math:`y = 0`."""
        far = there.estimate - there.degree * self.location
        ratio = self.scale / there.scale
        return far / there.scale / ((1 - there.degree) / ratio + there.degree * ratio)


class LocalAround(NamedTuple):
    """
    Distributions of an effect with a local scale.

    - **name** - the site of the local scale.
    - **points** - logarithms of the local scale.
    - **location** - :math:`\\mu`, of the shape of the effects.
    - **log_weights** - the log density of these logarithms.
    - **around** - locations and scales for logarithms of the local scale.
    - **mixture** - the mixture over local scales, at one of so many points.
    """

    name: str
    points: Array
    location: Array
    log_weights: Array
    around: Callable[[Array], Around]
    mixture: Callable[[int], Mixture]

    def effect(self, log_distance: Array, y: Array) -> Array:
        """Return :math:`x`."""
        return self.location + _signed(jnp.exp(log_distance), y)

    def likely(self, log_distance: Array) -> tuple[Array, Array]:
        """Return the logarithm of a scale that is likely given effects, and its log density."""
        k = EVERY * likely_scale(self.mixture(EVERY), log_distance)
        return jnp.take_along_axis(self.points, k[None], 0)[0], jnp.take_along_axis(
            self.log_weights, k[None], 0
        )[0]


def _signed(distance: Array, y: Array) -> Array:
    return jnp.where(y < 0, -1.0, 1.0) * distance


def locations_and_scales(hierarchy: Hierarchy, values: Values) -> dict[str, Around]:
    """
    Return the locations and scales of each site.

    :param values: unconstrained values :math:`v`.
    """
    result: dict[str, Around] = {}

    def seen(there: Coordinates, name: str, v: Array, around: Around) -> Array:
        result[name] = around
        return v

    everything = {name: centred_by(jnp.zeros(())) for name in hierarchy.sites}
    _evaluated(hierarchy, everything, values, (seen, None), from_internal=True)
    return result


def mixture_of(hierarchy: Hierarchy, name: str, values: Values) -> LocalAround:
    """
    Return the distributions of an effect with a local scale.

    :param values: unconstrained values :math:`v`.
    """
    result = []

    def seen(
        log_error: Array, name: str, z: Array, logarithm: Array, at: LocalAround
    ) -> tuple[Array, Array]:
        result.append(at)
        return z, logarithm

    there = {name: MixtureCoordinates(jnp.ones(()))}
    _evaluated(hierarchy, there, values, (None, seen), from_internal=True)
    return result[0]


def _evaluated(
    hierarchy: Hierarchy,
    centring: Centring,
    values: Values,
    moved: tuple[Any, Any],
    from_internal: bool,
) -> Values:
    """
    Return the moved values of all sites, one after the other.

    :param moved: functions that move the value of a site, and that of a site and its local scale.
    :param from_internal: whether other sites depend on the given value instead of the moved one.
    """
    program, result = hierarchy.program, dict(values)
    known = dict(zip(program.constvars, hierarchy.constants, strict=True))
    arguments = dict(zip(hierarchy.names, program.invars, strict=True))
    known |= {arguments[name]: values[name] for name in hierarchy.names}

    for name, site in hierarchy.sites.items():
        if (there := centring.get(name)) is None:
            continue
        if isinstance(there, MixtureCoordinates):
            local = hierarchy.local[name]
            evaluate(program, known, local.variables)
            at = _local_around(program, known, site, local, arguments[local.name], values[name])
            given = values[name], values[local.name]
            both = moved[1](jnp.log(there.error), name, *given, at)
            result[name], result[local.name] = both
            if not from_internal:
                known[arguments[local.name]] = result[local.name]
        else:
            evaluate(program, known, site.variables)
            around = _around(known, site, values[name])
            if around.below is not None:
                around = _given_others(around, there, values[name], from_internal)
            result[name] = moved[0](there, name, values[name], around)
        if not from_internal:
            known[arguments[name]] = result[name]
    return result


def _given_others(around: Around, there: Coordinates, values: Array, from_internal: bool) -> Around:
    """Locations of effects given those before them in their group; parameters as above."""
    units = (values - around.own_location) / around.own_scale
    if not from_internal:
        units = jnp.zeros_like(values)
        for _ in range(values.shape[around.axis] - 1):
            units = around.given(units).units(values, there)
    return around.given(units)


def _local_around(
    program: Any,
    known: Mapping[Any, Any],
    site: Site,
    local: LocalScale,
    argument: Any,
    like: Array,
) -> LocalAround:
    points, log_weights = (value_of(known, x) for x in local.variables)
    # nothing but the effect depends on the local scale
    others = {x: value for x, value in known.items() if x is not argument}

    def around(logarithm: Array) -> Around:
        here = others | {argument: logarithm}
        evaluate(program, here, site.variables)
        return _around(here, site, like)

    def mixture(every: int) -> Mixture:
        chosen = points[::every]
        scales = jnp.broadcast_to(jax.vmap(around)(chosen).scale, chosen.shape)
        return Mixture(log_weights[::every], jnp.log(scales)).normalised

    location = jnp.broadcast_to(around(points[0]).location, points[0].shape)
    return LocalAround(local.name, points, location, log_weights, around, mixture)


def _around(known: Mapping[Any, Any], site: Site, like: Array) -> Around:
    shift, factor = jnp.zeros_like(like), jnp.ones_like(like)
    inner, matrix, axis = factor, None, -1
    for kind, variable, _, axes in site.steps:
        operand: Any = None if variable is None else value_of(known, variable)
        if axes is None:
            shift, factor = _STEPS[kind](shift, factor, operand)
        else:
            axis, matrix = axes[0], jnp.moveaxis(operand, axes[1], 1)
            shift = _by_group(matrix, shift, axis)
            inner, factor = factor, jnp.ones_like(like)
    own_location, own_scale = value_of(known, site.location), value_of(known, site.scale)
    moved, below = factor * own_location, None
    if matrix is not None:
        # x = shift + product (m + s u)
        factor, inner, scales = (
            jnp.moveaxis(jnp.broadcast_to(x, like.shape), axis, -1)
            for x in (factor, inner, own_scale)
        )
        product = factor[..., None] * matrix * inner[..., None, :]
        moved = _by_group(product, jnp.broadcast_to(own_location, like.shape), axis)
        below = jnp.tril(product, -1) * scales[..., None, :]
        # without an order of effects there are no locations given those before
        has_order = jnp.all(jnp.triu(matrix, 1) == 0)
        factor = jnp.where(has_order, jnp.diagonal(product, axis1=-2, axis2=-1), jnp.nan)
        below *= jnp.where(factor < 0, -1.0, 1.0)[..., None]
        factor = jnp.moveaxis(factor, -1, axis)
    location = jnp.where(factor < 0, -1.0, 1.0) * (shift + moved)
    return Around(
        own_location,
        own_scale,
        location,
        jnp.maximum(jnp.abs(factor) * own_scale, _SMALLEST + _RESOLVED * jnp.abs(location)),
        factor,
        below,
        axis,
    )


def _by_group(matrix: Array, values: Array, axis: int) -> Array:
    """Multiply the values of each group, which are along an axis, by a matrix."""
    last = jnp.moveaxis(values, axis, -1)
    return jnp.moveaxis(jnp.sum(matrix * last[..., None, :], axis=-1), -1, axis)


#: Effect of an operation on :math:`x = a + b v`: the new :math:`a` and :math:`b`, by operation.
_STEPS: dict[str, Callable[[Any, Any, Any], tuple[Any, Any]]] = {
    "mul": lambda a, b, x: (a * x, b * x),
    "rmul": lambda a, b, x: (a * x, b * x),
    "div": lambda a, b, x: (a / x, b / x),
    "add": lambda a, b, x: (a + x, b),
    "radd": lambda a, b, x: (a + x, b),
    "sub": lambda a, b, x: (a - x, b),
    "rsub": lambda a, b, x: (x - a, -b),
    "neg": lambda a, b, _: (-a, -b),
}
