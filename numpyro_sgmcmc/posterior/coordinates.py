# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Coordinates of an effect, and its location and scale by the operations of a model on its value.

The notation is that of :mod:`~numpyro_sgmcmc.posterior.reparam`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.hierarchy import Site
from numpyro_sgmcmc.posterior.jaxpr import value_of

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


def mixtures_of(centring: Centring) -> list[str]:
    """Return the names of the sites with a local scale."""
    return [name for name, there in centring.items() if isinstance(there, MixtureCoordinates)]


def with_degree(centring: Centring, degree: Any) -> Centring:
    """Return coordinates with a degree of centring; of scale mixtures the same."""
    return {name: there.centred_by(degree) for name, there in centring.items()}


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


def around_of(known: Mapping[Any, Any], site: Site, like: Array) -> Around:
    """
    Return the locations and scales of a site.

    :param known: variables of the program of the hierarchy, and their values.
    :param like: values of the site.
    """
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
