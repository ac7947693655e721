# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Curvatures of the log densities of groups, as dense or as banded matrices.

A form says which entries of :math:`A = -\\nabla^2 f` may be other than zero. It computes and
factorises them, :math:`A = L L^\\top`. Only the form itself reads its matrices.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee

from numpyro_sgmcmc.posterior.banded import BandedFactor, banded_cholesky
from numpyro_sgmcmc.posterior.small_cholesky import DenseFactor, dense_cholesky

#: Log density of each group: function of a point in each, shape (n, k), with values of shape (n,).
Density = Callable[[Array], Array]

#: Largest rounding error of a product with a curvature, as a part of the entries.
_ROUNDING = 1e-3

Factor = DenseFactor | BandedFactor


class Dense(NamedTuple):
    """Form without zeros."""

    def columns(self, dimension: int) -> int:
        """Return the number of products with the Hessian that a curvature takes."""
        return dimension

    def at(self, density: Density, z: Array) -> Array:
        """Return :math:`A` of each group, shape (n, k, k)."""
        return -hessian(density, z)

    def mixed(self, share: Array, one: Array, other: Array) -> Array:
        """Return :math:`(1 - s) A + s B`, for shares :math:`1 - s` of the shape (n,)."""
        share = share[:, None, None]
        return share * one + (1 - share) * other

    def factor(self, curvature: Array, is_exact: bool = False) -> DenseFactor:
        return dense_cholesky(curvature, is_exact)

    def expected(self, density: Density, z: Array, factor: Any) -> Array:
        """Return the sum over groups of :math:`\\mathrm{tr} \\, A^{-1} \\nabla^2 f(z)`."""

        def along(v: Array) -> Array:
            first = lambda z: jax.jvp(density, (z,), (v,))[1]  # noqa: E731
            return jax.jvp(first, (z,), (v,))[1]

        return jnp.sum(jax.vmap(along, 1)(factor.inverse))


class Banded(NamedTuple):
    """
    Form of a path, each value of which depends on those next to it.

    Products with few vectors, each of which has ones at a distance of :math:`2 w + 1`, have all
    entries of the Hessian.

    - **width** - the largest distance :math:`w` of values that depend on each other given all
      others.
    """

    width: int

    def columns(self, dimension: int) -> int:
        return min(2 * self.width + 1, dimension)

    def at(self, density: Density, z: Array) -> Array:
        """Return :math:`A_{j + d, j}`, shape (k, w + 1, n)."""
        return self._read(jax.linearize(partial(slope, density), z)[1], z)

    def is_complete(self, density: Density, z: Array) -> Array:
        """
        Return whether the curvature of each group is zero outside of the band, shape (n,).

        The product of the Hessian with a vector is the product of the band.
        """
        _, along = jax.linearize(partial(slope, density), z)
        v = 2 + jnp.cos(jnp.arange(z.shape[-1], dtype=z.dtype))
        bands, product, size = (
            self._read(along, z),
            along(jnp.broadcast_to(v, z.shape)).T,
            jnp.zeros(()),
        )
        for d in range(self.width + 1):
            band = bands[: len(bands) - d, d]
            product = product.at[d:].add(band * v[: len(v) - d, None])
            if d:
                product = product.at[: len(product) - d].add(band * v[d:, None])
            size = size + jnp.max(jnp.abs(band), axis=0, initial=0)
        return jnp.max(jnp.abs(product), axis=0) < _ROUNDING * size

    def _read(self, along: Callable[[Array], Array], z: Array) -> Array:
        """Return the band of :math:`A` by products with the Hessian."""
        dimension = z.shape[-1]
        apart = self.columns(dimension)
        places = jnp.arange(dimension)
        units = (places % apart == jnp.arange(apart)[:, None]).astype(z.dtype)
        products = jax.vmap(lambda e: along(jnp.broadcast_to(e, z.shape)))(units)
        rows = places[:, None] + jnp.arange(self.width + 1)
        bands = products[places[:, None] % apart, :, jnp.minimum(rows, dimension - 1)]
        return jnp.where((rows < dimension)[..., None], -bands, 0)

    def mixed(self, share: Array, one: Array, other: Array) -> Array:
        return share * one + (1 - share) * other

    def factor(self, curvature: Array, is_exact: bool = False) -> BandedFactor:
        return banded_cholesky(curvature, is_exact)

    def expected(self, density: Density, z: Array, factor: Any) -> Array:
        # entries below the diagonal count for those above
        both = jnp.where(jnp.arange(self.width + 1) == 0, 1.0, 2.0)[:, None]
        return -jnp.sum(both * factor.covariances * self.at(density, z))


Form = Dense | Banded

#: The form of groups whose latent values may all depend on each other.
DENSE = Dense()


def band_of(density: Density, start: Array) -> tuple[tuple[int, ...], int] | None:
    """
    Return the order of latent values in which their curvature has a narrow band, and its width.

    It is the order of the values themselves, or that of Cuthill and McKee. The result is None if
    every band has more than a half of the entries, so that there is no path.

    :param density: log density of some groups, whose entries are zero or not at any point.
    :param start: a point in each group.

    **Example:** a random walk with its values in disorder.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.posterior.curvature import band_of
        >>> order = jnp.array([3, 0, 5, 7, 1, 6, 4, 2])
        >>> band_of(lambda z: -(jnp.diff(z[:, order]) ** 2).sum(1), jnp.zeros((1, 8)))
        ((2, 4, 6, 1, 7, 5, 0, 3), 1)
        >>> band_of(lambda z: -(z.sum(1) ** 2), jnp.zeros((1, 8))) is None
        True
    """
    dimension = start.shape[1]
    waves = jnp.cos(jnp.arange(start.size, dtype=start.dtype)).reshape(start.shape)
    found = [np.asarray(hessian(density, z)) for z in (start, start + 0.5 * waves)]
    is_used = (np.concatenate(found) != 0).any(axis=0)
    is_used |= is_used.T

    def width(order: np.ndarray) -> int:
        rows, columns = np.nonzero(is_used[np.ix_(order, order)])
        return int(np.abs(rows - columns).max(initial=0))

    orders = [np.arange(dimension), reverse_cuthill_mckee(csr_matrix(is_used), True)]
    best = min(orders, key=width)
    if 2 * width(best) + 1 > dimension / 2:
        return None
    return tuple(map(int, best)), width(best)


def slope(density: Density, z: Array) -> Array:
    """Return the gradient of each group, shape (n, k)."""
    return jax.grad(lambda z: density(z).sum())(z)


def hessian(density: Density, z: Array) -> Array:
    """Return the Hessian of each group, shape (n, k, k)."""
    _, along = jax.linearize(partial(slope, density), z)
    units = jnp.eye(z.shape[-1], dtype=z.dtype)
    return jax.vmap(lambda e: along(jnp.broadcast_to(e, z.shape)), out_axes=-1)(units)
