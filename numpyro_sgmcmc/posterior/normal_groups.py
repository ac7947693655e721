# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Latent variables of groups that are normal given all else: their integrals, and draws."""

import math

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_sgmcmc.posterior.curvature import DENSE, Density, Factor, Form, slope


def normal_log_integral(density: Density, start: Array, form: Form = DENSE) -> Array:
    """
    Return :math:`\\log \\int e^{f(z)} dz` of each group for a quadratic :math:`f`.

    The integral is exact up to rounding, and so are its first and second derivatives:

    .. math:: \\log \\int e^{f(z)} \\, dz = f(z) + \\tfrac12 |L^{-1} \\nabla f(z)|^2
        + \\tfrac k2 \\log 2 \\pi - \\log \\det L .

    It holds at any :math:`z`. Rounding errors are smallest near the mode, where it is evaluated.

    It is NaN where :math:`f` clearly has no maximum.

    :param density: :math:`f` of all groups, a function of shape (n, k) with values of shape (n,).
        No group depends on another.
    :param start: any point in each group, shape (n, k).
    :param form: the form of the curvature of :math:`f`. Banded curvatures make the integral the
        likelihood of a Kalman filter.
    :return: the log integrals, shape (n,).

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.posterior.normal_groups import normal_log_integral

        >>> density = lambda z: -((z - 100.0) ** 2)[:, 0]
        >>> found = normal_log_integral(density, jnp.zeros((2, 1)))
        >>> bool(jnp.allclose(found, 0.5 * jnp.log(jnp.pi), atol=1e-5))
        True
    """
    factor = _exact_factor(density, start, form)
    held = lax.stop_gradient(factor)
    mode = lax.stop_gradient(_newton_step(density, start, held))
    value, pullback = jax.vjp(density, mode)
    (gradient,) = pullback(jnp.ones_like(value))
    # zero up to rounding, with the second derivatives that come from the mode
    gain = 0.5 * jnp.sum(held.towards(gradient) ** 2, axis=-1)
    constant = 0.5 * start.shape[1] * math.log(2 * math.pi)
    return value + gain + constant + factor.log_determinant


def normal_draws_of(density: Density, start: Array, rng_key: Array, form: Form = DENSE) -> Array:
    """
    Draw the latent variables of each group, given all else.

    .. math:: z = \\hat z + L^{-\\top} \\varepsilon , \\qquad \\varepsilon \\sim N(0, I) .

    Parameters are as in :func:`normal_log_integral`.

    :param rng_key: a random key.
    :return: draws, shape (n, k).
    """
    factor = _exact_factor(density, start, form)
    mode = _newton_step(density, _newton_step(density, start, factor), factor)
    return mode + factor.away(random.normal(rng_key, start.shape, start.dtype))


def _exact_factor(density: Density, z: Array, form: Form) -> Factor:
    # the rounding of sums of products to few bits would make near-singular matrices indefinite
    with jax.default_matmul_precision("highest"):
        return form.factor(form.at(density, z), True)


def _newton_step(density: Density, z: Array, factor: Factor) -> Array:
    return z + factor.away(factor.towards(slope(density, z)))
