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

from numpyro_sgmcmc.posterior.banded import (
    BandedFactor,
    Bands,
    BorderedFactor,
    banded_cholesky,
    bordered_cholesky,
)
from numpyro_sgmcmc.posterior.small_cholesky import DenseFactor, dense_cholesky

#: Log density of each group: function of a point in each, shape (n, k), with values of shape (n,).
Density = Callable[[Array], Array]

#: Largest rounding error of a product with a curvature, as a part of the entries.
_ROUNDING = 1e-3

#: Largest number of values of a border.
_MOST_LAST = 8

Factor = DenseFactor | BandedFactor | BorderedFactor


class Dense(NamedTuple):
    """Form without zeros."""

    def columns(self, dimension: int) -> int:
        """Return the number of products with the Hessian that a curvature takes."""
        return dimension

    def at(self, density: Density, z: Array) -> Array:
        """Return :math:`A` of each group, shape (n, k, k)."""
        return -hessian(density, z)

    def mixed(self, share: Array, one: Any, other: Any) -> Array:
        """Return :math:`(1 - s) A + s B`, for shares :math:`1 - s` of the shape (n,)."""
        share = share[:, None, None]
        return share * one + (1 - share) * other

    def factor(self, curvature: Any, is_exact: bool = False) -> DenseFactor:
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
    - **border** - the number of values that come last, and may depend on all.
    """

    width: int
    border: int = 0

    def columns(self, dimension: int) -> int:
        return min(2 * self.width + 1, dimension - self.border) + self.border

    def at(self, density: Density, z: Array) -> Bands:
        """Return :math:`A` of each group."""
        return self._read(jax.linearize(partial(slope, density), z)[1], z)

    def is_complete(self, density: Density, z: Array) -> Array:
        """
        Return whether the curvature of each group is zero outside of the band, shape (n,).

        The product of the Hessian with a vector is the product of the band.
        """
        _, along = jax.linearize(partial(slope, density), z)
        v = 2 + jnp.cos(jnp.arange(z.shape[-1], dtype=z.dtype))
        bands, across, _ = self._read(along, z)
        length = len(bands)
        product = along(jnp.broadcast_to(v, z.shape)).T[:length]
        v, last = v[:length, None], v[length:, None, None]
        product = product + jnp.sum(last * across, axis=0).T
        size = jnp.zeros(())
        for d in range(self.width + 1):
            band = bands[: length - d, d]
            product = product.at[d:].add(band * v[: length - d])
            if d:
                product = product.at[: length - d].add(band * v[d:])
            size = size + jnp.max(jnp.abs(band), axis=0, initial=0)
        return jnp.max(jnp.abs(product), axis=0) < _ROUNDING * size

    def _read(self, along: Callable[[Array], Array], z: Array) -> Bands:
        """Return :math:`A` by products with the Hessian."""
        dimension = z.shape[-1]
        length = dimension - self.border
        apart = self.columns(dimension) - self.border
        places = jnp.arange(dimension)
        colors = jnp.where(places < length, places % apart, apart + places - length)
        units = (colors == jnp.arange(apart + self.border)[:, None]).astype(z.dtype)
        products = -jax.vmap(lambda e: along(jnp.broadcast_to(e, z.shape)))(units)
        rows = places[:length, None] + jnp.arange(self.width + 1)
        bands = products[colors[:length, None], :, jnp.minimum(rows, length - 1)]
        across, corner = jnp.split(products[apart:], [length], axis=-1)
        bands = jnp.where((rows < length)[..., None], bands, 0)
        return Bands(bands, across, jnp.moveaxis(corner, 0, 1))

    def mixed(self, share: Array, one: Any, other: Any) -> Bands:
        return one.mixed(share, other)

    def factor(self, curvature: Any, is_exact: bool = False) -> BandedFactor | BorderedFactor:
        if not self.border:
            return banded_cholesky(curvature.bands, is_exact)
        return bordered_cholesky(curvature, is_exact)

    def expected(self, density: Density, z: Array, factor: Any) -> Array:
        found, covariances = self.at(density, z), factor.covariances
        # entries below the diagonal count for those above
        both = jnp.where(jnp.arange(self.width + 1) == 0, 1.0, 2.0)[:, None]
        if not self.border:
            return -jnp.sum(both * covariances * found.bands)
        factors = Bands(both, jnp.array(2.0), jnp.array(1.0))
        parts = jax.tree.map(lambda a, x, y: jnp.sum(a * x * y), factors, covariances, found)
        return -sum(parts)


Form = Dense | Banded

#: The form of groups whose latent values may all depend on each other.
DENSE = Dense()


class Path(NamedTuple):
    """
    A path of the latent values of a group.

    - **order** - their order, in which the curvature has a narrow band.
    - **form** - its form.
    """

    order: tuple[int, ...]
    form: Banded


def path_of(density: Density, start: Array) -> Path | None:
    """
    Return the path of the latent values of groups, or None if their curvature has no narrow band.

    Values that depend on more than half of all values are the border, which has eight at most. The
    order of the others is their own, or that of Cuthill and McKee.

    :param density: log density of some groups, whose entries are zero or not at any point.
    :param start: a point in each group.

    **Example:** a random walk with its values in disorder, and an intercept.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.posterior.curvature import path_of
        >>> order = jnp.array([3, 0, 5, 7, 1, 6, 4, 2])
        >>> path_of(lambda z: -(jnp.diff(z[:, order]) ** 2).sum(1), jnp.zeros((1, 8)))
        Path(order=(2, 4, 6, 1, 7, 5, 0, 3), form=Banded(width=1, border=0))
        >>> rows = lambda z: -((z[:, :1] + z[:, 1:]) ** 2).sum(1)
        >>> path_of(lambda z: rows(z) - (jnp.diff(z[:, 1:]) ** 2).sum(1), jnp.zeros((1, 9)))
        Path(order=(1, 2, 3, 4, 5, 6, 7, 8, 0), form=Banded(width=1, border=1))
        >>> path_of(lambda z: -(z.sum(1) ** 2), jnp.zeros((1, 8))) is None
        True
    """
    dimension = start.shape[1]
    waves = jnp.cos(jnp.arange(start.size, dtype=start.dtype)).reshape(start.shape)
    found = [np.asarray(hessian(density, z)) for z in (start, start + 0.5 * waves)]
    is_used = (np.concatenate(found) != 0).any(axis=0)
    is_used |= is_used.T
    is_last = is_used.sum(axis=0) > dimension / 2
    first, border = np.flatnonzero(~is_last), np.flatnonzero(is_last)
    if not len(first) or len(border) > _MOST_LAST:
        return None
    is_used = is_used[np.ix_(first, first)]

    def width(order: np.ndarray) -> int:
        rows, columns = np.nonzero(is_used[np.ix_(order, order)])
        return int(np.abs(rows - columns).max(initial=0))

    orders = [np.arange(len(first)), reverse_cuthill_mckee(csr_matrix(is_used), True)]
    best = min(orders, key=width)
    form = Banded(width(best), len(border))
    if form.columns(dimension) > dimension / 2:
        return None
    return Path(tuple(map(int, np.concatenate([first[best], border]))), form)


def slope(density: Density, z: Array) -> Array:
    """Return the gradient of each group, shape (n, k)."""
    return jax.grad(lambda z: density(z).sum())(z)


def hessian(density: Density, z: Array) -> Array:
    """Return the Hessian of each group, shape (n, k, k)."""
    _, along = jax.linearize(partial(slope, density), z)
    units = jnp.eye(z.shape[-1], dtype=z.dtype)
    return jax.vmap(lambda e: along(jnp.broadcast_to(e, z.shape)), out_axes=-1)(units)
