# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Potentials at a temperature, in coordinates in which one step size serves all temperatures."""

from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgmcmc.posterior.potential import Potential, Rows


class Tempered(NamedTuple):
    """
    Potential at temperature :math:`T`, as a function of positions divided by :math:`\\sqrt T`.

    .. math:: U_T(\\phi) = U(\\sqrt T \\, \\phi) / T .

    Its curvature equals the curvature of :math:`U`, and its gradient noise has the covariance
    :math:`V / T`. A good step size and friction at one temperature is good at all others.
    """

    potential: Any
    temperature: Array

    def values(self, position: Array, /) -> Any:
        return self.potential.values(self.scale * position)

    def direction(self, vector: Array, /) -> Any:
        return self.potential.direction(self.scale * vector)

    def pullback(self, gradient: Any, /) -> Array:
        return self.scale * self.potential.pullback(gradient)

    def __call__(self, values: Any, rows: Rows, rng_key: Array, /) -> Array:
        return self.potential(values, rows, rng_key) / self.temperature

    def value_and_gradient(self, values: Any, rows: Rows, rng_key: Array, /) -> tuple[Array, Any]:
        both = self.potential.value_and_gradient(values, rows, rng_key)
        return self._divided(both)

    def with_row_terms(
        self, values: Any, rows: Rows, rng_key: Array, /
    ) -> tuple[Array, dict[str, Array]]:
        return self._divided(self.potential.with_row_terms(values, rows, rng_key))

    @property
    def group_plates(self) -> frozenset[str]:
        return self.potential.group_plates

    def of_groups(self, name: str | None, /) -> "Tempered":
        return self._replace(potential=self.potential.of_groups(name))

    @property
    def scale(self) -> Array:
        """The factor :math:`\\sqrt T` from a position to a position of the base potential."""
        return jnp.sqrt(self.temperature)

    def _divided(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: x / self.temperature, tree)


def tempered(potential: Potential, temperature: Array | None) -> tuple[Potential, Array | float]:
    """Return the potential at a temperature, or unchanged, and the scale of its positions."""
    if temperature is None:
        return potential, 1.0
    result = Tempered(potential, temperature)
    return result, result.scale
