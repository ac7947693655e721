# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Metrics: linear maps between unconstrained parameters and the coordinates of a sampler.

The unconstrained parameters :math:`\\theta` and the coordinates :math:`\\phi` are related by

.. math:: \\theta = c + L \\phi, \\qquad \\nabla_\\phi U = L^\\top \\nabla_\\theta U .

With :math:`L L^\\top` the covariance of the posterior and :math:`c` its centre, the
coordinates have mean 0 and covariance :math:`I`. A step size is then in units of a posterior
standard deviation in every direction. The distribution of :math:`\\theta` does not depend on the
metric, but the speed of a sampler does.
"""

from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp
import numpy as np


class IdentityMetric(NamedTuple):
    """Metric :math:`\\theta = \\phi`: the coordinates are the unconstrained parameters."""

    def values(self, coordinates: Array) -> Array:
        """Return :math:`\\theta = c + L \\phi`."""
        return coordinates

    def coordinates(self, values: Array) -> Array:
        """Return :math:`\\phi = L^{-1} (\\theta - c)`."""
        return values

    def moved(self, values: Array, before: Array, after: Array) -> Array:
        """Return :math:`\\theta + L (\\phi' - \\phi)`, exactly :math:`\\theta` if nothing moves."""
        return after

    def direction(self, coordinates: Array) -> Array:
        """Return :math:`L \\phi`."""
        return coordinates

    def pullback(self, gradient: Array) -> Array:
        """Return the gradient :math:`L^\\top g` with respect to the coordinates."""
        return gradient

    def variances(self, coordinates: Array) -> Array:
        """Return the diagonal of :math:`L L^\\top`, in the shape of the coordinates."""
        return jnp.ones_like(coordinates)

    def narrowed(self, scale: Array, shift: Array) -> "IdentityMetric":
        """
        Return the metric with centre :math:`c + \\Delta` and factor :math:`s L`.

        The identity metric has no centre, and stays unchanged.
        """
        return self


class DiagonalMetric(NamedTuple):
    """
    Metric with a diagonal factor.

    - **center** - :math:`c`, shape (d,).
    - **scale** - the diagonal of :math:`L`, shape (d,).
    """

    center: Array
    scale: Array

    def values(self, coordinates: Array) -> Array:
        return self.center + self.scale * coordinates

    def coordinates(self, values: Array) -> Array:
        return (values - self.center) / self.scale

    def moved(self, values: Array, before: Array, after: Array) -> Array:
        return values + self.direction(after - before)

    def direction(self, coordinates: Array) -> Array:
        return self.scale * coordinates

    def pullback(self, gradient: Array) -> Array:
        return self.scale * gradient

    def variances(self, coordinates: Array) -> Array:
        return self.scale**2

    def narrowed(self, scale: Array, shift: Array) -> "DiagonalMetric":
        return DiagonalMetric(self.center + shift, scale * self.scale)


class DenseMetric(NamedTuple):
    """
    Metric with a dense factor.

    - **center** - :math:`c`, shape (d,).
    - **factor** - :math:`L`, shape (d, d).
    - **inverse** - :math:`L^{-1}`, shape (d, d).
    """

    center: Array
    factor: Array
    inverse: Array

    def values(self, coordinates: Array) -> Array:
        return self.center + self.factor @ coordinates

    def coordinates(self, values: Array) -> Array:
        return self.inverse @ (values - self.center)

    def moved(self, values: Array, before: Array, after: Array) -> Array:
        return values + self.direction(after - before)

    def direction(self, coordinates: Array) -> Array:
        return self.factor @ coordinates

    def pullback(self, gradient: Array) -> Array:
        return gradient @ self.factor

    def variances(self, coordinates: Array) -> Array:
        return jnp.sum(self.factor**2, axis=1)

    def narrowed(self, scale: Array, shift: Array) -> "DenseMetric":
        return DenseMetric(self.center + shift, scale * self.factor, self.inverse / scale)


class LowRankMetric(NamedTuple):
    """
    Metric with a diagonal factor and a few directions of many parameters.

    The factor is
    :math:`L = \\operatorname{diag}(s) \\, (I + V \\operatorname{diag}(r - 1) V^\\top)`, with
    :math:`k` orthonormal columns in :math:`V`, at a cost of :math:`d k`.

    - **center** - :math:`c`, shape (d,).
    - **scale** - :math:`s`, shape (d,).
    - **vectors** - :math:`V`, shape (d, k).
    - **roots** - :math:`r`, the standard deviations along these directions, shape (k,).
    """

    center: Array
    scale: Array
    vectors: Array
    roots: Array

    def values(self, coordinates: Array) -> Array:
        return self.center + self.direction(coordinates)

    def coordinates(self, values: Array) -> Array:
        return self._stretched((values - self.center) / self.scale, 1 / self.roots)

    def moved(self, values: Array, before: Array, after: Array) -> Array:
        return values + self.direction(after - before)

    def direction(self, coordinates: Array) -> Array:
        return self.scale * self._stretched(coordinates, self.roots)

    def pullback(self, gradient: Array) -> Array:
        return self._stretched(self.scale * gradient, self.roots)

    def variances(self, coordinates: Array) -> Array:
        return self.scale**2 * (1 + self.vectors**2 @ (self.roots**2 - 1))

    def narrowed(self, scale: Array, shift: Array) -> "LowRankMetric":
        return self._replace(center=self.center + shift, scale=scale * self.scale)

    def _stretched(self, x: Array, roots: Array) -> Array:
        return x + self.vectors @ ((roots - 1) * (self.vectors.T @ x))


#: Metrics with a centre, each of which defines a Gaussian.
GaussianMetric = DiagonalMetric | DenseMetric | LowRankMetric

Metric = IdentityMetric | GaussianMetric

_NAMES = {
    IdentityMetric: "identity",
    DiagonalMetric: "diagonal",
    LowRankMetric: "low_rank",
    DenseMetric: "dense",
}


def name_of(metric: Metric) -> str:
    """Return the word for a metric in the argument ``metric``."""
    return _NAMES[type(metric)]


def from_covariance(
    covariance: np.ndarray, center: np.ndarray, dtype: Any
) -> DiagonalMetric | DenseMetric:
    """
    Return the metric in which a distribution with this covariance has covariance :math:`I`.

    The factor :math:`L` is the symmetric root, so that each coordinate belongs to its parameter as
    far as correlation allows.

    :param covariance: variances, shape ``(d,)``, or a matrix, shape ``(d, d)``.
    :param center: :math:`c`, shape ``(d,)``.
    :param dtype: data type of the result; the roots are taken in double precision.
    :raises ValueError: if the covariance is not positive definite.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_sgmcmc.posterior.metric import from_covariance

        >>> metric = from_covariance(np.array([4.0, 0.25]), np.array([1.0, 0.0]), np.float32)
        >>> metric.values(np.ones(2, np.float32)).tolist()  # one standard deviation from 1 and 0
        [3.0, 0.5]
    """
    covariance = np.asarray(covariance, np.float64)
    variances = covariance if covariance.ndim == 1 else np.diag(covariance)
    smallest = np.min(variances)
    if np.all(np.isfinite(covariance)) and smallest > 0:
        scale = np.sqrt(variances)
        middle = jnp.asarray(center, dtype)
        if covariance.ndim == 1:
            return DiagonalMetric(middle, jnp.asarray(scale, dtype))
        # the root of the correlations is taken, since parameters may have any units
        eigenvalues, vectors = np.linalg.eigh(covariance / np.outer(scale, scale))
        smallest = eigenvalues[0]
        if smallest > 0:
            root = np.sqrt(eigenvalues)
            factor = scale[:, None] * ((vectors * root) @ vectors.T)
            inverse = ((vectors / root) @ vectors.T) / scale
            return DenseMetric(middle, jnp.asarray(factor, dtype), jnp.asarray(inverse, dtype))
    what = "variance" if not smallest > 0 and covariance.ndim == 1 else "eigenvalue"
    raise ValueError(
        "`metric` must be a positive definite covariance of the unconstrained parameters, but its"
        f" smallest {what} is {smallest:.4g}."
    )
