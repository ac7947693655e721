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

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jax import Array
from jax.extend.core import Literal
import jax.numpy as jnp

from numpyro_sgmcmc.posterior.hierarchy import Hierarchy
from numpyro_sgmcmc.posterior.jaxpr import results_of
from numpyro_sgmcmc.posterior.model import Values


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


#: Coordinates by site.
Centring = Mapping[str, Coordinates]


def centred_by(degree: Array) -> Coordinates:
    """Return coordinates with a degree of centring, with scale 1 and estimate 0."""
    return Coordinates(degree, jnp.ones_like(degree), jnp.zeros_like(degree))


def centred(centring: Centring) -> Centring:
    """Return the coordinates of sites that equal their effects, :math:`y = x`."""
    return {name: centred_by(jnp.ones_like(there.degree)) for name, there in centring.items()}


class Written(NamedTuple):
    """
    Values of the model for values in the coordinates.

    - **values** - the unconstrained values of the model, :math:`v`.
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

    def moved(name: str, y: Array, around: Around) -> Array:
        nonlocal log_det, effects_log_det
        there = centring[name]
        narrower = -jnp.log(around.spread(there)) / 2
        log_det += jnp.sum(jnp.log(around.own_scale) + narrower)
        effects_log_det += jnp.sum(jnp.log(around.scale) + narrower)
        units = around.units(y, there)
        effects[name] = around.location + around.scale * units
        return around.own_location + around.own_scale * units

    written = _evaluated(hierarchy, centring, values, moved, from_internal=False)
    return Written(written, log_det, effects, effects_log_det)


def to_internal(hierarchy: Hierarchy, centring: Centring, values: Values) -> Values:
    """
    Return :math:`y(v)`, the inverse of :func:`from_internal`.

    :param hierarchy: hierarchy of the model at these values.
    :param centring: coordinates by site.
    :param values: unconstrained values :math:`v`.
    :return: values in the coordinates :math:`y`.
    """

    def moved(name: str, v: Array, around: Around) -> Array:
        return around.coordinate(v, centring[name])

    return _evaluated(hierarchy, centring, values, moved, from_internal=True)


class Around(NamedTuple):
    """
    Locations and scales of a site and of its effect.

    - **own_location**, **own_scale** - :math:`m` and :math:`s` of the latent value.
    - **location**, **scale** - :math:`\\mu` and :math:`\\sigma` of the effect :math:`x`.
    - **factor** - factor by which the model multiplies the value. A factor that may be positive or
      negative is no scale.
    """

    own_location: Array
    own_scale: Array
    location: Array
    scale: Array
    factor: Array

    def spread(self, there: Coordinates) -> Array:
        """Return :math:`q`."""
        return 1 - there.degree + there.degree * (self.scale / there.scale) ** 2

    def units(self, y: Array, there: Coordinates) -> Array:
        """Return :math:`u(y)`."""
        return self._moved(there) + y / jnp.sqrt(self.spread(there))

    def coordinate(self, v: Array, there: Coordinates) -> Array:
        """Return :math:`y(v)`."""
        units = (v - self.own_location) / self.own_scale
        return jnp.sqrt(self.spread(there)) * (units - self._moved(there))

    def _moved(self, there: Coordinates) -> Array:
        """Return :math:`u` at :math:`y = 0`."""
        far = there.estimate - there.degree * self.location
        return self.scale * far / (there.scale**2 * self.spread(there))


def locations_and_scales(hierarchy: Hierarchy, values: Values) -> dict[str, Around]:
    """
    Return the locations and scales of each site.

    :param values: unconstrained values :math:`v`.
    """
    result: dict[str, Around] = {}

    def seen(name: str, v: Array, around: Around) -> Array:
        result[name] = around
        return v

    everything = {name: centred_by(jnp.zeros(())) for name in hierarchy.sites}
    _evaluated(hierarchy, everything, values, seen, from_internal=True)
    return result


def _evaluated(
    hierarchy: Hierarchy,
    centring: Centring,
    values: Values,
    moved: Callable[[str, Array, Around], Array],
    from_internal: bool,
) -> Values:
    """
    Return the moved values of all sites, one after the other.

    :param from_internal: whether other sites depend on the given value instead of the moved one.
    """
    program, result = hierarchy.program, dict(values)
    known = dict(zip(program.constvars, hierarchy.constants, strict=True))
    arguments = dict(zip(hierarchy.names, program.invars, strict=True))
    known |= {arguments[name]: values[name] for name in hierarchy.names}

    def value(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else known[variable]

    for name, site in hierarchy.sites.items():
        if name not in centring:
            continue
        for equation in _missing(program, known, site.variables):
            results = results_of(equation, [value(x) for x in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        shift, factor = jnp.zeros_like(values[name]), jnp.ones_like(values[name])
        for kind, variable in site.steps:
            shift, factor = _STEPS[kind](
                shift, factor, None if variable is None else value(variable)
            )
        own_location, own_scale = value(site.location), value(site.scale)
        sign = jnp.where(factor < 0, -1.0, 1.0)
        around = Around(
            own_location,
            own_scale,
            sign * shift + jnp.abs(factor) * own_location,
            jnp.abs(factor) * own_scale,
            factor,
        )
        result[name] = moved(name, values[name], around)
        if not from_internal:
            known[arguments[name]] = result[name]
    return result


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


def _missing(program: Any, known: Mapping[Any, Any], variables: Iterable[Any]) -> list[Any]:
    """Return the operations that are still needed for some variables, in their order."""
    wanted = {x for x in variables if not isinstance(x, Literal) and x not in known}
    missing = []
    for equation in reversed(program.eqns):
        if wanted.intersection(equation.outvars):
            missing.append(equation)
            inputs = (x for x in equation.invars if not isinstance(x, Literal))
            wanted.update(x for x in inputs if x not in known)
    return missing[::-1]
