# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Maps on flat vectors from which the methods are composed.

The maps know no model. Position :math:`\\theta` and momentum :math:`p` have shape ``(d,)``. The
step size :math:`h` is a scalar, and the thermostat :math:`\\xi` is a scalar or has one value for
each coordinate. :math:`T` is the temperature, and the mass is the identity. A symmetric integrator
is named by its maps in order. Maps that appear twice have half of the step size: BAOAB is B(h/2)
A(h/2) O(h) A(h/2) B(h/2).
"""

from collections.abc import Callable
import math

from jax import Array, lax
import jax.numpy as jnp


def langevin(
    position: Array, gradient: Array, step_size: Array, temperature: float, noise: Array
) -> Array:
    """
    Overdamped Langevin dynamics by Euler's method, :math:`\\theta - h g + \\sqrt{2 h T} R`.

    :param noise: standard normal :math:`R`, shape ``(d,)``.
    """
    return position - step_size * gradient + jnp.sqrt(2 * step_size * temperature) * noise


def drift(position: Array, momentum: Array, step_size: Array) -> Array:
    """The map A: :math:`\\theta + h p`."""
    return position + step_size * momentum


def kick(momentum: Array, gradient: Array, step_size: Array) -> Array:
    """The map B: :math:`p - h g`."""
    return momentum - step_size * gradient


def phi(x: Array) -> Array:
    """
    The function :math:`\\phi(x) = (1 - e^{-2 x}) / (2 x)`, positive for every real :math:`x`.

    At zero :math:`\\phi(0) = 1`. Near zero it is computed by its series.
    """
    small = jnp.abs(x) < 1e-2
    safe = jnp.where(small, 1.0, x)
    series = 1 - x * (1 - x * (2 / 3 - x / 3))
    return jnp.where(small, series, -jnp.expm1(-2 * safe) / (2 * safe))


def ornstein_uhlenbeck(
    momentum: Array,
    damping: Array | float,
    diffusion: Array | float,
    step_size: Array,
    noise: Array,
) -> Array:
    """
    The map O, the exact solution of :math:`dp = -\\xi p \\, dt + \\sqrt{2 D} \\, dW`.

    It is :math:`e^{-\\xi h} p + \\sqrt{2 D h \\, \\phi(\\xi h)} \\, R`. The damping may be
    negative.

    :param damping: :math:`\\xi`, a scalar or one for each coordinate.
    :param diffusion: :math:`D`, the friction times the temperature.
    :param noise: standard normal :math:`R`, shape ``(d,)``.
    """
    x = step_size * damping
    return jnp.exp(-x) * momentum + jnp.sqrt(2 * step_size * diffusion * phi(x)) * noise


def covariance_controlled(
    momentum: Array, inverse: Callable[[Array], Array], added: Array
) -> Array:
    """
    The map O of NOGIN, which absorbs the gradient noise of its neighbouring kicks:

    .. math::

        p \\leftarrow p + R, \\quad p \\leftarrow (I + D)^{-1} p, \\quad
        p \\leftarrow (I - D) p, \\quad p \\leftarrow p + R,

    with the same :math:`R` twice, which is :math:`2 (I + D)^{-1} (p + R) - p`, and

    .. math::

        D = \\tanh(\\xi h / 2) I + \\frac{h^2}{4 T} V, \\qquad
        R \\sim N(0, T \\tanh(A h / 2) I).

    The kicks before and after have the two halves :math:`-\\tfrac h2 \\zeta`, :math:`\\zeta \\sim
    N(0, V)`, of the noise of one gradient. Together with them the map leaves :math:`N(0, T I)`
    unchanged at :math:`\\xi = A`, for any :math:`V`.

    :param inverse: :math:`x \\mapsto (I + D)^{-1} x`.
    :param added: :math:`R`, shape ``(d,)``.
    """
    return 2 * inverse(momentum + added) - momentum


def noise_controls(noise: Array, step_size: Array, damping: Array | float) -> tuple[Array, Array]:
    """
    The factors of the momentum before and after the map O of BAOAB that remove noise.

    They act along a direction in which a kick has noise:

    .. math::

        a = \\left( 1 + \\frac{4 u}{4 - h^2} - \\delta \\right)^{-1/2}, \\qquad
        b = (1 - \\delta)^{1/2}, \\qquad
        \\delta = \\frac{u}{4 - h^2} \\, \\frac{1 + 3 \\kappa}{1 + \\kappa}, \\qquad
        \\kappa = e^{-A h} a b ,

    with :math:`u = h^2 v / T`. If the curvature is 1, both the position at which the gradient is
    taken and the momentum in the middle have the variance :math:`T`. The factors solve the
    stationary covariance of the linear map for this. For another curvature :math:`\\lambda` the
    relative error of the variance is at most about :math:`u h (\\lambda - 1) / 3` with a tuned
    friction. A momentum cannot lose noise beyond :math:`\\delta = 0.9`, so this noise is not
    removed. Values of :math:`h^2` above 2 count as 2.

    :param noise: :math:`v / T`, of any shape.
    :param step_size: :math:`h`, in units of a posterior standard deviation.
    :param damping: :math:`A`, per unit of time.
    :return: :math:`a` and :math:`b`, of the shape of the noise.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.kernels.integrators import noise_controls

        >>> before, after = noise_controls(jnp.asarray(0.3), step_size=1.0, damping=0.7)
        >>> print(f"{before:.2f}, {after:.2f}")
        0.90, 0.92
    """
    u, rest = step_size**2 * noise, 4 - jnp.minimum(step_size**2, 2.0)
    decay = jnp.exp(-damping * step_size)
    kappa = decay
    for _ in range(5):  # kappa hardly depends on delta
        delta = jnp.minimum(u / rest * (1 + 3 * kappa) / (1 + kappa), 0.9)
        before, after = lax.rsqrt(1 + 4 * u / rest - delta), jnp.sqrt(1 - delta)
        kappa = decay * before * after
    return before, after


def free_flight(
    position: Array,
    momentum: Array,
    friction: float,
    temperature: float,
    step_size: Array,
    noise: Array,
) -> tuple[Array, Array]:
    """
    The map U, the exact solution of Langevin dynamics without force.

    It solves :math:`d\\theta = p \\, dt`, :math:`dp = -A p \\, dt + \\sqrt{2 A T} \\, dW`. With
    :math:`x = A h`,

    .. math::

        p' &= e^{-x} p + \\sqrt{T (1 - e^{-2 x})} \\, R_1 \\\\
        \\theta' &= \\theta + \\frac{1 - e^{-x}}{A} p
            + \\frac{\\tanh(x / 2)}{A} \\sqrt{T (1 - e^{-2 x})} \\, R_1
            + \\frac{2}{A} \\sqrt{T (x / 2 - \\tanh(x / 2))} \\, R_2 .

    :param noise: standard normal :math:`R_1, R_2`, shape ``(2, d)``.
    """
    x = friction * step_size
    y = x / 2
    kicked = jnp.sqrt(-temperature * jnp.expm1(-2 * x)) * noise[0]
    # a series for y - tanh(y), whose terms cancel in floating point for small y
    series = y**3 * (1 / 3 - y**2 * (2 / 15 - y**2 * 17 / 315))
    rest = jnp.where(y < 0.2, series, y - jnp.tanh(y))
    position = (
        position
        - jnp.expm1(-x) / friction * momentum
        + jnp.tanh(y) / friction * kicked
        + 2 / friction * jnp.sqrt(temperature * rest) * noise[1]
    )
    return position, jnp.exp(-x) * momentum + kicked


def microcanonical_kick(momentum: Array, gradient: Array, step_size: Array) -> tuple[Array, Array]:
    """
    The exact kick of microcanonical dynamics on the sphere :math:`|p|^2 = d`.

    It solves :math:`dp = -\\tfrac{d}{d-1} (I - p p^\\top / d) \\, g \\, dt` over a time :math:`h`.
    With :math:`u = p / \\sqrt d`, :math:`e = -g / |g|` and :math:`\\delta = h \\sqrt d \\, |g| / (d
    - 1)`,

    .. math::

        u' = \\frac{u + e (\\sinh \\delta + e^\\top u (\\cosh \\delta - 1))}
            {\\cosh \\delta + e^\\top u \\sinh \\delta}, \\qquad
        \\Delta K = (d - 1) \\log(\\cosh \\delta + e^\\top u \\sinh \\delta) .

    :return: the momentum, and the change :math:`\\Delta K` of the kinetic energy.
    """
    dimension = momentum.shape[0]
    root = math.sqrt(dimension)
    size = jnp.linalg.norm(gradient)
    away = -gradient / jnp.where(size > 0, size, 1.0)
    delta = step_size * root * size / (dimension - 1)
    along = away @ momentum / root
    # both sides are multiplied by 2 exp(-delta) against overflow
    decay = jnp.exp(-delta)
    rest = -jnp.expm1(-delta)
    turned = 2 * decay * momentum + root * away * rest * (1 + decay + along * rest)
    change = delta + jnp.log1p(-(1 - along) * -jnp.expm1(-2 * delta) / 2)
    return turned * root / jnp.linalg.norm(turned), (dimension - 1) * change


def euler_kick(
    momentum: Array,
    gradient: Array,
    damping: Array,
    diffusion: Array | float,
    step_size: Array,
    noise: Array,
) -> Array:
    """
    Force, damping and noise in one step of Euler's method.

    The result is :math:`p - h g - h \\Gamma p + \\sqrt{2 h D} R`.

    :param damping: the vector :math:`\\Gamma p`, for instance ``friction * momentum``.
    :param diffusion: :math:`D`, a scalar or one for each coordinate.
    :param noise: standard normal :math:`R`, shape ``(d,)``.
    """
    return momentum - step_size * (gradient + damping) + jnp.sqrt(2 * step_size * diffusion) * noise


def thermostat(
    xi: Array,
    kinetic_temperature: Array,
    step_size: Array,
    temperature: float,
    thermal_mass: float,
) -> Array:
    """
    The map D: :math:`\\xi + (h / \\mu)(p^\\top p / d - T)`, with thermal mass :math:`\\mu`.

    :param kinetic_temperature: :math:`p^\\top p / d`, of the shape of :math:`\\xi`.
    """
    return xi + step_size / thermal_mass * (kinetic_temperature - temperature)
