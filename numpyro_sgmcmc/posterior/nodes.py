# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Nodes and weights of integrals over one or two latent variables of groups.

A rule of few nodes is Gauss-Hermite quadrature. It is exact for densities close to a normal one,
and with any number of nodes it misses the tail of a skewed density: the logarithm of a Gamma
variable of shape 0.1 without a count has a density that falls as :math:`e^{-0.1 |z|}` to one side,
and the integral by 31 nodes is too small by 3 %. A rule of more nodes is the trapezoidal rule, at
equal distances of :math:`u \\in [-1, 1]`, in each dimension

.. math::

    x(u) = \\frac{R + l}{2 \\sinh b \\cosh a} \\left[ \\sinh(a + b u) - \\sinh a \\right] , \\qquad
    w_k / \\phi(x_k) = \\frac{2 x'(u_k)}{m - 1} , \\qquad
    \\tanh a \\tanh \\tfrac b2 = \\frac{R - l}{R + l} , \\qquad
    \\frac{\\sinh b}b = \\frac{R + l}{2 \\sqrt{2 K}} ,

from :math:`-l` to :math:`R`, where :math:`f` is :math:`K = 8 + m / 2` below its mode. For a normal
density the nodes are at equal distances. For tails that fall exponentially they form a double
exponential rule. Eleven nodes are as accurate for these tails as for a normal density. If one side
is much longer, the last two equations may contradict each other, and :math:`b` is as large as the
first of the two requires.

**References:**

1. *A note on Gauss-Hermite quadrature*, Qing Liu and Donald A. Pierce (1994).
2. *Double Exponential Formulas for Numerical Integration*, Hidetosi Takahasi and
   Masatake Mori (1974).
"""

from itertools import product
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.curvature import Density

#: Nodes in each dimension, for one and two dimensions, by rule: in a step where few Gauss-Hermite
#: nodes are enough, in other steps, and in a pass over all groups for an anchor. In three
#: dimensions 7 nodes in each would be ten times as many points as draws.
_NODES = {"few": (5, 5), "step": (11, 9), "fine": (31, 17)}

#: Fall of the log density from the mode to the outermost nodes, to which each node adds one half.
_FALL = 8.0
#: Largest number of secants in the search for the last nodes, and the tolerance of the logarithms.
_SECANTS, _ABOUT = 12, 0.2
#: Largest tanh of `a`, largest skewness of a density, smallest `b`, and number of steps for `b`.
_TO_ONE_SIDE, _MOST_SKEWED, _LEAST_BEND, _BENDS = 0.995, 0.999, 0.1, 10


def nodes_of(dimension: int, rule: str) -> int:
    """Return the number of nodes in each of one or two dimensions."""
    return _NODES.get(rule, _NODES["fine"])[dimension - 1]


class Mesh(NamedTuple):
    """
    Map :math:`x(u)` of the nodes of an integral.

    It has :math:`a`, :math:`b` and the factor before the brackets, each of shape (k, n) for k axes
    of n groups.
    """

    a: Array
    b: Array
    scale: Array

    def at(self, u: Array) -> tuple[Array, Array]:
        """Return :math:`x(u)` and :math:`\\log x'(u)`, in the shape of ``u``, (..., k, n)."""
        bent = self.a + self.b * u
        x = self.scale * (jnp.sinh(bent) - jnp.sinh(self.a))
        return x, jnp.log(self.scale * self.b * jnp.cosh(bent))


def mesh_of(density: Density, mode: Array, factor: Any, number: int) -> Mesh:
    """
    Return the map for nodes that reach as far as a skewed density.

    :param mode: modes, shape (n, k).
    :param factor: :math:`L` at the modes, of dense curvatures.
    :param number: number of nodes in each dimension.
    """
    fall = _FALL + number / 2
    right, left = jnp.split(reaches(density, mode, factor, fall), 2)
    width, skewness = right + left, (right - left) / (right + left)
    wider = jnp.maximum(width / (2 * math.sqrt(2 * fall)), 1.0)
    b = jnp.sqrt(6 * jnp.log(wider)) + _LEAST_BEND
    b = lax.fori_loop(0, _BENDS, lambda _, b: jnp.arcsinh(wider * b), b)
    most = jnp.minimum(jnp.abs(skewness) / _TO_ONE_SIDE, _MOST_SKEWED)
    b = jnp.maximum(jnp.maximum(b, 2 * jnp.arctanh(most)), _LEAST_BEND)
    a = jnp.arctanh(jnp.clip(skewness / jnp.tanh(b / 2), -_TO_ONE_SIDE, _TO_ONE_SIDE))
    return Mesh(a, b, width / (2 * jnp.sinh(b) * jnp.cosh(a)))


def spread(density: Density, mode: Array, factor: Any, number: int) -> tuple[Array, Array]:
    """
    Return the nodes :math:`x(u_k)` of an integral, and the logarithms of their weights.

    Parameters are as in :func:`mesh_of`.

    :return: nodes, shape (number ** k, n, k), and log weights, shape (number ** k, n).
    """
    u = jnp.linspace(-1.0, 1.0, number, dtype=mode.dtype)[:, None, None]
    x, log_slopes = mesh_of(density, mode, factor, number).at(u)
    # all combinations of the nodes of each dimension
    axes = np.arange(mode.shape[1])
    each = np.array(list(product(range(number), repeat=len(axes))))
    log_weights = math.log(2 / (number - 1)) + log_slopes
    return jnp.moveaxis(x[each, axes], 1, 2), jnp.sum(log_weights[each, axes], 1)


def reaches(density: Density, mode: Array, factor: Any, fall: float) -> Array:
    """
    Return the distances from the mode at which the log density has fallen by ``fall``.

    They are along each axis of the curvature, shape (2 k, n), first in one direction and then in
    the other. The search takes secants of the logarithms within a bracket. A power needs one
    secant. A point where the density is NaN is too far.
    """
    axes = jnp.moveaxis(factor.inverse, 1, 0)
    axes = jnp.concatenate([axes, -axes])
    top = density(mode)

    def fallen(t: Array) -> Array:
        drop = top - jax.vmap(density)(mode + t[..., None] * axes)
        return jnp.where(jnp.isfinite(drop), jnp.maximum(drop, 1e-6), jnp.inf)

    def goes_on(search: tuple) -> Array:
        count, *_, is_found = search
        return (count < _SECANTS) & ~jnp.all(is_found)

    def one(search: tuple) -> tuple:
        count, t, before, power, least, most, _ = search
        now = fallen(t)
        is_found = jnp.abs(jnp.log(now / fall)) < _ABOUT
        is_within = now <= fall
        least, most = jnp.where(is_within, t, least), jnp.where(is_within, most, t)
        slope = jnp.log(now / before[1]) / jnp.log(t / before[0])
        power = jnp.where(jnp.isfinite(slope), jnp.clip(slope, 0.5, 30.0), power)
        there = t * jnp.clip((fall / now) ** (1 / power), 0.125, 8.0)
        middle = jnp.where(jnp.isfinite(most), (least + most) / 2, 2 * t)
        there = jnp.where((there > least) & (there < most), there, middle)
        before = jnp.where(is_found, before, jnp.stack([t, now]))
        return count + 1, jnp.where(is_found, t, there), before, power, least, most, is_found

    t = jnp.full(axes.shape[:2], math.sqrt(2 * fall), mode.dtype)
    none, far = jnp.zeros_like(t), jnp.full_like(t, jnp.inf)
    begin = 0, t, jnp.stack([1 + none, 0.5 + none]), 2 + none, none, far, none > 0
    _, t, _, _, least, _, is_found = lax.while_loop(goes_on, one, begin)
    return jnp.where(is_found | (least == 0), t, least)


def gauss_hermite(number: int, dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Return Gauss-Hermite nodes and log weights for means over standard normal variables.

    They are all combinations of the nodes of one dimension.

    :return: nodes, shape (number ** dimension, dimension), and log weights, shape
        (number ** dimension,).

    **Example:** polynomials are exact up to the degree :math:`2 m - 1`.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_sgmcmc.posterior.quadrature import gauss_hermite
        >>> x, log_weights = gauss_hermite(3, 2)
        >>> round(float(np.sum(np.exp(log_weights) * x[:, 0] ** 4 * x[:, 1] ** 2)), 6)
        3.0
    """
    x, w = np.polynomial.hermite_e.hermegauss(number)
    log_weights = np.log(w / w.sum())
    nodes = np.array(list(product(x, repeat=dimension)))
    return nodes, np.array([sum(c) for c in product(log_weights, repeat=dimension)])
