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
from jax import Array, lax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee

from numpyro_sgmcmc.posterior.banded import Bands, BorderedFactor, bordered_cholesky
from numpyro_sgmcmc.posterior.small_cholesky import DenseFactor, dense_cholesky

#: Log density of each group: function of a point in each, shape (n, k), with values of shape (n,).
Density = Callable[[Array], Array]

#: Largest rounding error of an entry of a product with a curvature, as a part of its terms, and
#: number of products.
_ROUNDING, _PROBES = 1e-3, 2

#: Largest number of values of a border, and largest width of a band.
_MOST_LAST, _WIDEST = 8, 32

Factor = DenseFactor | BorderedFactor


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

        Products of the Hessian with random vectors are then products of the band.
        """
        _, along = jax.linearize(partial(slope, density), z)
        bands, across, _ = self._read(along, z)
        length, found = len(bands), jnp.ones(len(z), bool)
        # fixed: the same groups pass in every run
        for v in np.random.default_rng(0).standard_normal((_PROBES, z.shape[-1])):
            probe = jnp.asarray(v, z.dtype)
            rest = along(jnp.broadcast_to(probe, z.shape)).T[:length]
            first, last = probe[:length, None], probe[length:, None, None]
            rest = rest + jnp.sum(last * across, axis=0).T
            size = jnp.sum(jnp.abs(last * across), axis=0).T
            for d in range(self.width + 1):
                band = bands[: length - d, d]
                rest = rest.at[d:].add(band * first[: length - d])
                size = size.at[d:].add(jnp.abs(band * first[: length - d]))
                if d:
                    rest = rest.at[: length - d].add(band * first[d:])
                    size = size.at[: length - d].add(jnp.abs(band * first[d:]))
            # not a comparison that is true for NaN
            found &= ~jnp.any(jnp.abs(rest) > _ROUNDING * size, axis=0)
        return found

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

    def factor(self, curvature: Any, is_exact: bool = False) -> BorderedFactor:
        return bordered_cholesky(curvature, is_exact)

    def expected(self, density: Density, z: Array, factor: Any) -> Array:
        # entries below the diagonal count for those above
        both = jnp.where(jnp.arange(self.width + 1) == 0, 1.0, 2.0)[:, None]
        factors = Bands(both, jnp.array(2.0), jnp.array(1.0))
        entries = factors, factor.covariances, self.at(density, z)
        return -sum(jax.tree.map(lambda a, x, y: jnp.sum(a * x * y), *entries))


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


def pattern_of(density: Density, start: Array) -> np.ndarray:
    """
    Return which latent values depend on each other, given all others, in some groups.

    :param density: log density of the groups.
    :param start: a point in each group.
    :return: shape (k, k).
    """
    waves = jnp.cos(jnp.arange(start.size, dtype=start.dtype)).reshape(start.shape)
    points = jnp.stack([start, start + 0.5 * waves])
    # one program: operation by operation it would take seconds to compile
    found = jax.jit(lambda points: lax.map(partial(hessian, density), points))(points)
    is_used = (np.asarray(found) != 0).any(axis=(0, 1))
    return is_used | is_used.T


def path_of(is_used: np.ndarray) -> Path | None:
    """
    Return the path of the latent values of groups, or None if their curvature has no narrow band.

    Values that depend on most others are the border. The order of the others is their own, or that
    of Cuthill and McKee. Of all borders of up to eight values, the one is taken by which a
    curvature has the fewest columns.

    :param is_used: which values depend on each other, of :func:`pattern_of`.

    **Example:** a random walk with its values in disorder, and an intercept.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.posterior.curvature import path_of, pattern_of
        >>> order = jnp.array([3, 0, 5, 7, 1, 6, 4, 2])
        >>> path_of(pattern_of(lambda z: -(jnp.diff(z[:, order]) ** 2).sum(1), jnp.zeros((1, 8))))
        Path(order=(2, 4, 6, 1, 7, 5, 0, 3), form=Banded(width=1, border=0))
        >>> walk = lambda z: -(jnp.diff(z[:, 1:]) ** 2).sum(1)
        >>> rows = lambda z: -((z[:, :1] + z[:, 1:]) ** 2).sum(1)
        >>> path_of(pattern_of(lambda z: rows(z) + walk(z), jnp.zeros((1, 9))))
        Path(order=(1, 2, 3, 4, 5, 6, 7, 8, 0), form=Banded(width=1, border=1))
        >>> path_of(pattern_of(lambda z: -(z.sum(1) ** 2), jnp.zeros((1, 8)))) is None
        True
    """
    dimension = len(is_used)
    by_number = np.argsort(-is_used.sum(axis=0), kind="stable")
    found = []
    for number in range(min(_MOST_LAST, dimension - 1) + 1):
        first, border = np.sort(by_number[number:]), np.sort(by_number[:number])
        part = is_used[np.ix_(first, first)]
        orders = [np.arange(len(first)), reverse_cuthill_mckee(csr_matrix(part), True)]
        widths = [_width(part[np.ix_(order, order)]) for order in orders]
        order = first[orders[int(np.argmin(widths))]]
        form = Banded(min(widths), number)
        found.append(Path(tuple(map(int, np.concatenate([order, border]))), form))
    best = min(found, key=lambda path: path.form.columns(dimension))
    is_narrow = best.form.width <= _WIDEST and best.form.columns(dimension) < dimension
    return best if is_narrow else None


def _width(is_used: np.ndarray) -> int:
    rows, columns = np.nonzero(is_used)
    return int(np.abs(rows - columns).max(initial=0))


def slope(density: Density, z: Array) -> Array:
    """Return the gradient of each group, shape (n, k)."""
    return jax.grad(lambda z: density(z).sum())(z)


def hessian(density: Density, z: Array) -> Array:
    """Return the Hessian of each group, shape (n, k, k)."""
    _, along = jax.linearize(partial(slope, density), z)
    units = jnp.eye(z.shape[-1], dtype=z.dtype)
    return jax.vmap(lambda e: along(jnp.broadcast_to(e, z.shape)), out_axes=-1)(units)
