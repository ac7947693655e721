# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Coordinates of effects with a scale each, such as those of a horseshoe.

An effect :math:`x \\sim N(\\mu, \\sigma(\\lambda))` with a local scale :math:`\\lambda` of its own
has two funnels: one of :math:`\\lambda`, and one of the global scales in :math:`\\sigma`. The local
scale is integrated out by the trapezoidal rule in its logarithm, which leaves a mixture of normal
distributions,

.. math:: p(x) = \\sum_k w_k \\, N(x; \\mu, \\sigma_k), \\qquad
    t(x) = \\Phi^{-1}\\Big( \\int_{-\\infty}^x p \\Big) .

The coordinate :math:`t` is standard normal where rows tell nothing of :math:`x`. Where they tell it
with a standard error :math:`s` the effect itself is the better one. The coordinate is a blend,

.. math:: y = t + u + \\frac{\\kappa r t - u}{1 + u^2}, \\qquad
    u = \\frac{x - \\mu}{s}, \\quad r = \\frac{\\sigma_0}{s}, \\quad
    \\kappa = \\frac{1.27}{1 + 1.15 \\log (1 + r)},

with the geometric mean :math:`\\sigma_0` of the scales. Near zero it is a multiple of :math:`t`,
whose density has no pole, unlike :math:`p`. A local scale has the coordinate :math:`v` with
:math:`\\Phi(v) = P(\\lambda' \\le \\lambda \\mid x)`, which is standard normal and independent.

The potential :math:`U` of the model is evaluated at any local scale :math:`\\lambda`, with its
prior density :math:`\\pi` in the logarithm of the scale,

.. math:: U(x, \\lambda) + \\log N(x; \\mu, \\sigma(\\lambda)) + \\log \\pi(\\lambda) - \\log p(x)
    + \\log \\frac{\\partial y}{\\partial x} + \\frac{v^2}{2} .

This is a change of variables: the joint distribution of effects and local scales does not depend on
the choice of :math:`s`.
"""

from typing import NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.special import erfc, logsumexp, ndtr, ndtri
import numpy as np

#: Number of points of a local scale. The trapezoidal rule takes one of so many, with an error of
#: 1e-4 of the density of a horseshoe.
POINTS, EVERY = 297, 4

#: Logarithms of numbers of standard deviations beyond which there is no probability, and beyond
#: which powers would not be finite.
_BEYOND, _FAR = 3.0, 20.0

#: The smallest probability of a tail, and the smallest distance of a coordinate from zero.
_TAIL, _NEAR = 1e-24, 1e-5

#: Newton steps of an inverse, and points of the table in which they begin.
_STEPS, _POINTS = 4, np.linspace(-14.0, 18.0, 64)

_LOG_2_PI = np.log(2 * np.pi)


class Mixture(NamedTuple):
    """
    Distributions of the distances :math:`|x - \\mu|` of effects, given global scales.

    All that depends on distances takes their logarithms, whose derivatives are numbers without
    units.

    - **log_weights** - :math:`\\log w_k`, shape ``(K, ...)``.
    - **log_scales** - :math:`\\log \\sigma_k`, shape ``(K, ...)``.
    """

    log_weights: Array
    log_scales: Array

    @property
    def normalised(self) -> "Mixture":
        """The mixture with weights whose sum is 1."""
        total = logsumexp(self.log_weights, axis=0)
        return self._replace(log_weights=self.log_weights - total)

    @property
    def log_mean(self) -> Array:
        """The logarithm of the geometric mean of the scales, :math:`\\log \\sigma_0`."""
        return jnp.sum(jnp.exp(self.log_weights) * self.log_scales, axis=0)

    def units(self, log_distance: Array, far: float = _FAR) -> Array:
        """Return distances in standard deviations."""
        return jnp.exp(jnp.minimum(log_distance - self.log_scales, far))

    def log_terms(self, log_distance: Array) -> Array:
        """Return :math:`\\log w_k N(x; \\mu, \\sigma_k)`."""
        squares = self.units(log_distance) ** 2
        return self.log_weights - self.log_scales - (squares + _LOG_2_PI) / 2

    def log_density(self, log_distance: Array) -> Array:
        """Return :math:`\\log p(x)`."""
        return logsumexp(self.log_terms(log_distance), axis=0)

    def probit(self, log_distance: Array) -> Array:
        """Return :math:`t`."""
        units = self.units(log_distance, _BEYOND) / 2**0.5
        return _probit(jnp.sum(jnp.exp(self.log_weights) * erfc(units), axis=0) / 2)

    def coordinate(self, log_error: Array, log_distance: Array) -> Array:
        """
        Return :math:`|y|`.

        :param log_error: :math:`\\log s`.
        :param log_distance: :math:`\\log |x - \\mu|`.
        """
        u = jnp.exp(log_distance - log_error)
        return _blend(self.probit(log_distance), u, jnp.exp(self.log_mean - log_error))

    def with_slope(self, log_error: Array, log_distance: Array) -> tuple[Array, Array]:
        """Return :math:`|y|` and its derivative with respect to the logarithm of the distance."""
        return jax.jvp(
            lambda x: self.coordinate(log_error, x), (log_distance,), (jnp.ones_like(log_distance),)
        )

    def log_distance(self, log_error: Array, y: Array) -> Array:
        """Return :math:`\\log |x - \\mu|`, the inverse of :meth:`coordinate`."""
        return _inverse(self, log_error, jnp.maximum(jnp.abs(y), _NEAR))


def _blend(t: Array, u: Array, r: Array) -> Array:
    kappa = 1.27 / (1 + 1.15 * jnp.log1p(r))
    return t + u + (kappa * r * t - u) / (1 + u**2)


@jax.custom_jvp
def _probit(outside: Array) -> Array:
    """Return :math:`t` for :math:`1 - \\Phi(t)`, which is not more than a half."""
    return -ndtri(jnp.clip(outside, _TAIL, 0.5))


@_probit.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    t = _probit(*primals)
    return t, -tangents[0] * (2 * np.pi) ** 0.5 * jnp.exp(t**2 / 2)


@jax.custom_jvp
def _inverse(mixture: Mixture, log_error: Array, y: Array) -> Array:
    """Newton steps of :math:`\\log y` in the logarithm of the distance."""
    log_mean, log_y = mixture.log_mean, jnp.log(y)
    # a table for the mean of all effects, in units of their scales
    log_weights, log_scales = (
        x.reshape(len(x), -1).mean(axis=1, keepdims=True)
        for x in (mixture.log_weights, mixture.log_scales - log_mean)
    )
    points = jnp.asarray(_POINTS, y.dtype)
    t = Mixture(log_weights, log_scales).normalised.probit(points)
    t, distances = (x.reshape((-1,) + (1,) * y.ndim) for x in (t, jnp.exp(points)))
    r = jnp.exp(log_mean - log_error)
    table = jnp.log(_blend(t, distances * r, r))
    k = jnp.clip(jnp.sum(table < log_y, axis=0), 1, len(points) - 1)[None]
    low, high = (jnp.take_along_axis(table, j, 0)[0] for j in (k - 1, k))
    part = jnp.clip((log_y - low) / jnp.maximum(high - low, 1e-6), -1.0, 2.0)
    start = points[k[0] - 1] + part * (points[1] - points[0]) + log_mean

    def step(_: int, log_distance: Array) -> Array:
        found, slope = mixture.with_slope(log_error, log_distance)
        return log_distance + jnp.clip((log_y - jnp.log(found)) * found / slope, -2.0, 2.0)

    return lax.fori_loop(0, _STEPS, step, start)


@_inverse.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    mixture, log_error, _ = primals
    log_distance = _inverse(*primals)
    _, moved = jax.jvp(
        lambda mixture, error: mixture.coordinate(error, log_distance), primals[:2], tangents[:2]
    )
    return log_distance, (tangents[2] - moved) / mixture.with_slope(log_error, log_distance)[1]


def likely_scale(mixture: Mixture, log_distance: Array) -> Array:
    """Return the number of the point nearest to the mean of :math:`\\log \\lambda` given x."""
    shares = jax.nn.softmax(mixture.log_terms(log_distance), axis=0)
    numbers = jnp.arange(len(shares)).reshape((-1,) + (1,) * log_distance.ndim)
    return jnp.round(jnp.sum(numbers * shares, axis=0)).astype(jnp.int32)


def scale_at(mixture: Mixture, points: Array, log_distance: Array, v: Array) -> Array:
    """
    Return :math:`\\log \\lambda` for the coordinate :math:`v`.

    :param points: the logarithms of local scales of the mixture.
    """
    shares = jax.nn.softmax(mixture.log_terms(log_distance), axis=0)
    below, wanted = jnp.cumsum(shares, axis=0), ndtr(v)
    k = jnp.clip(jnp.sum(below < wanted, axis=0), 0, len(points) - 1)[None]
    share, upper = (jnp.take_along_axis(x, k, 0)[0] for x in (shares, below))
    part = jnp.clip((wanted - (upper - share)) / jnp.maximum(share, 1e-30), 0.0, 1.0)
    return points[0] + (points[1] - points[0]) * (k[0] + part - 0.5)


def coordinate_of_scale(
    mixture: Mixture, points: Array, log_distance: Array, logarithm: Array
) -> Array:
    """Return :math:`v`, the inverse of :func:`scale_at`."""
    shares = jax.nn.softmax(mixture.log_terms(log_distance), axis=0)
    below, cells = jnp.cumsum(shares, axis=0), (logarithm - points[0]) / (points[1] - points[0])
    k = jnp.clip(jnp.round(cells), 0, len(points) - 1).astype(jnp.int32)
    share, upper = (jnp.take_along_axis(x, k[None], 0)[0] for x in (shares, below))
    probability = upper - share + share * jnp.clip(cells - k + 0.5, 0.0, 1.0)
    return ndtri(jnp.clip(probability, 1e-6, 1 - 1e-6))
