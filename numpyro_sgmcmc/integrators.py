# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The maps from which the methods are composed, on flat vectors.

They know no model: position :math:`\\theta` and momentum :math:`p` have shape ``(d,)``, the
step size :math:`h` and the thermostat :math:`\\xi` are scalars, :math:`T` is the temperature,
the mass is the identity.
"""

from jax import Array
import jax.numpy as jnp


def langevin(
    position: Array, gradient: Array, step_size: Array, temperature: float, noise: Array
) -> Array:
    """
    Overdamped Langevin dynamics by Euler's method:
    :math:`\\theta - h g + \\sqrt{2 h T} R`.

    :param noise: standard normal :math:`R`, shape ``(d,)``.
    """
    return position - step_size * gradient + jnp.sqrt(2 * step_size * temperature) * noise


def drift(position: Array, momentum: Array, step_size: Array) -> Array:
    """The map A: :math:`\\theta + h p`."""
    return position + step_size * momentum


def euler_kick(
    momentum: Array,
    gradient: Array,
    damping: Array,
    diffusion: Array | float,
    step_size: Array,
    noise: Array,
) -> Array:
    """
    Force, damping and noise in one step of Euler's method:
    :math:`p - h g - h \\Gamma p + \\sqrt{2 h D} R`.

    :param damping: the vector :math:`\\Gamma p`, for instance ``friction * momentum``.
    :param diffusion: :math:`D`, a scalar or one for each coordinate.
    :param noise: standard normal :math:`R`, shape ``(d,)``.
    """
    return momentum - step_size * (gradient + damping) + jnp.sqrt(2 * step_size * diffusion) * noise


def thermostat(
    xi: Array, momentum: Array, step_size: Array, temperature: float, thermal_mass: float
) -> Array:
    """The map D: :math:`\\xi + (h / \\mu)(p^\\top p / d - T)`, with thermal mass :math:`\\mu`."""
    return xi + step_size / thermal_mass * (jnp.mean(momentum**2) - temperature)
