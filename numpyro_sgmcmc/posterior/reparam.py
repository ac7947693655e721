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
    >>> from numpyro_sgmcmc.posterior.coordinates import Coordinates
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
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_sgmcmc.posterior.coordinates import (
    Around,
    Centring,
    Coordinates,
    MixtureCoordinates,
    around_of,
    centred_by,
    mixtures_of,
)
from numpyro_sgmcmc.posterior.hierarchy import Hierarchy
from numpyro_sgmcmc.posterior.jaxpr import evaluate, needed_by, value_of
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

#: The largest number of values above a mixture for which effects have derivatives of their own.
_FEW = 8


def scales_of(hierarchy: Hierarchy, centring: Centring) -> list[str]:
    """Return the names of the sites of local scales."""
    scales = [hierarchy.local[name].name for name in mixtures_of(centring)]
    return [name for name in scales if name is not None]


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


def from_internal(
    hierarchy: Hierarchy, centring: Centring, values: Values, for_gradients: bool = False
) -> Written:
    """
    Return :math:`v(y)` and :math:`x(y)`, site by site.

    :param hierarchy: hierarchy of the model at these values.
    :param centring: coordinates by site.
    :param values: values in the coordinates :math:`y`.
    :param bool for_gradients: whether many products with the Jacobian are to cost little more than
        one. Derivatives of second order cost more then.
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
        far = (at if for_gradients else mixture).log_distance(log_error, y)
        logarithm, log_weight = at.likely(lax.stop_gradient(far))
        around = at.around(logarithm)
        x, units = at.effect(far, y), _signed(jnp.exp(far - jnp.log(around.scale)), y)
        changed = far - jnp.log(mixture.with_slope(log_error, far)[1])
        if at.name is not None:
            joint = log_weight - jnp.log(around.scale) - units**2 / 2
            changed += mixture.log_density(far) - v**2 / 2 - joint
        log_det += jnp.sum(changed + jnp.log(around.own_scale / around.scale))
        effects_log_det += jnp.sum(changed)
        effects.update({name: x} if at.name is None else {name: x, at.name: logarithm})
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
        logarithm = v if at.name is None else scale_at(at.mixture(1), at.points, far, v)
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
        v = logarithm
        if at.name is not None:
            v = coordinate_of_scale(at.mixture(1), at.points, far, logarithm)
        y = at.mixture(EVERY).coordinate(log_error, far)
        return _signed(y, units), lax.stop_gradient(v)

    return _evaluated(hierarchy, centring, values, (moved, with_scale), from_internal=True)


class LocalAround(NamedTuple):
    """
    Distributions of an effect with a local scale, or of one whose distribution is a mixture.

    - **name** - the site of the local scale, or None.
    - **points** - logarithms of the local scale.
    - **location** - :math:`\\mu`, of the shape of the effects.
    - **log_weights** - the log density of these logarithms.
    - **around** - locations and scales for logarithms of the local scale.
    - **mixture** - the mixture over local scales, at one of so many points.
    - **above** - the values of other sites that the mixture depends on.
    - **given** - the same for other values of these sites.
    """

    name: str | None
    points: Array
    location: Array
    log_weights: Array
    around: Callable[[Array], Around]
    mixture: Callable[[int], Mixture]
    above: tuple[Array, ...]
    given: "Callable[[tuple[Array, ...]], LocalAround]"

    def log_distance(self, log_error: Array, y: Array) -> Array:
        """
        Return :meth:`Mixture.log_distance` with derivatives that are a few numbers for each effect.

        Products with these are quick. Products with those of the mixture pass through all points.
        """
        flat, unravel = ravel_pytree(self.above)
        if flat.size > _FEW:
            return self.mixture(EVERY).log_distance(log_error, y)

        def mixture(flat: Array) -> Mixture:
            return self.given(unravel(flat)).mixture(EVERY)

        @jax.custom_jvp
        def distance(flat: Array, y: Array) -> Array:
            return mixture(flat).log_distance(log_error, y)

        @distance.defjvp
        def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
            flat, y = primals
            far = distance(flat, y)
            slope = mixture(flat).with_slope(log_error, far)[1]
            by_above = jax.jacfwd(lambda x: mixture(x).coordinate(log_error, far))(flat)
            moved = jnp.sum(by_above * tangents[0], axis=-1)
            return far, (jnp.sign(y) * tangents[1] - moved) / slope

        return distance(flat, y)

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
            scale, log_error = hierarchy.local[name].name, jnp.log(there.error)
            at = _local_around(hierarchy, name, known, values[name])
            if scale is None:
                none = jnp.zeros_like(values[name])
                result[name], _ = moved[1](log_error, name, values[name], none, at)
            else:
                both = values[name], values[scale]
                result[name], result[scale] = moved[1](log_error, name, *both, at)
                if not from_internal:
                    known[arguments[scale]] = result[scale]
        else:
            evaluate(program, known, site.variables)
            around = around_of(known, site, values[name])
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
    hierarchy: Hierarchy, name: str, known: Mapping[Any, Any], like: Array
) -> LocalAround:
    """
    Return the distributions of an effect with a local scale.

    :param known: values of the arguments of the program.
    :param like: values of the effect.
    """
    program, site, local = hierarchy.program, hierarchy.sites[name], hierarchy.local[name]
    constants = dict(zip(program.constvars, hierarchy.constants, strict=True))
    argument = None if local.name is None else program.invars[hierarchy.names.index(local.name)]
    needed = needed_by(program, [*local.variables, *site.variables])
    above = [x for x in program.invars if x in needed and x is not argument]

    def given(values: tuple[Array, ...]) -> LocalAround:
        known = constants | dict(zip(above, values, strict=True))
        evaluate(program, known, local.variables)
        points, log_weights = (value_of(known, x) for x in local.variables)

        def around(logarithm: Array) -> Around:
            here = known if argument is None else known | {argument: logarithm}
            evaluate(program, here, site.variables)
            return around_of(here, site, like)

        def mixture(every: int) -> Mixture:
            if argument is None:
                return Mixture(log_weights, points + jnp.log(around(points).scale)).normalised
            chosen = points[::every]
            scales = jnp.broadcast_to(jax.vmap(around)(chosen).scale, chosen.shape)
            return Mixture(log_weights[::every], jnp.log(scales)).normalised

        location = jnp.broadcast_to(around(points[0]).location, like.shape)
        own = local.name, points, location, log_weights, around, mixture
        return LocalAround(*own, values, given)

    return given(tuple(known[x] for x in above))
