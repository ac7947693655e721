# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Cholesky factors of many banded matrices at once, one for each path of a group.

The latent values of a path depend on those of the times just before. Their precision matrix
:math:`A` is banded, :math:`A_{ij} = 0` for :math:`|i - j| > w`, and so is its factor
:math:`A = L L^\\top`. All operations take a time in proportion to the length of the path. They go
through the columns of :math:`L` one by one, for all groups at once.

All values of a path may depend on a few others, such as an intercept. These come last, as a border
of the matrix,

.. math:: A = \\begin{pmatrix} B & C^\\top \\\\ C & D \\end{pmatrix} , \\qquad
    L = \\begin{pmatrix} L_B & 0 \\\\ W & L_S \\end{pmatrix} , \\qquad
    W = C L_B^{-\\top} , \\quad L_S L_S^\\top = D - W W^\\top .
"""

from functools import partial
from typing import NamedTuple

from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgmcmc.posterior.small_cholesky import DenseFactor, dense_cholesky

#: Sums of products without the rounding to few bits that accelerators do by default.
_einsum = partial(jnp.einsum, precision="highest")

#: Smallest pivot in rounding errors of its value before elimination, and how many times as large a
#: negative pivot is more than a rounding error.
_ROUNDING, _CLEARLY = 4.0, 100.0


class BandedFactor(NamedTuple):
    """
    Cholesky factors of banded matrices.

    - **columns** - :math:`L_{j + d, j}` for :math:`d = 0, \\dots, w`, shape (k, w + 1, n). Entries
      below the last row are zero.
    """

    columns: Array

    def towards(self, gradient: Array) -> Array:
        """Return :math:`L^{-1} g`, shape (..., n, k)."""
        rows = jnp.moveaxis(gradient, -1, 0)
        rest = jnp.zeros((self.columns.shape[1] - 1, *rows.shape[1:]), rows.dtype)

        def one(rest: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
            g, column = at
            # what earlier values take from this row and the next ones
            x = (g - rest[0] if len(rest) else g) / column[0]
            ahead = jnp.concatenate([rest[1:], jnp.zeros_like(rest[:1])])
            return ahead + _times(column[1:], x), x

        _, x = lax.scan(one, rest, (rows, self.columns))
        return jnp.moveaxis(x, 0, -1)

    def away(self, x: Array) -> Array:
        """Return :math:`L^{-\\top} x`, shape (..., n, k)."""
        rows = jnp.moveaxis(x, -1, 0)
        later = jnp.zeros((self.columns.shape[1] - 1, *rows.shape[1:]), rows.dtype)

        def one(later: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
            b, column = at
            taken = [column[d + 1] * later[d] for d in range(len(later))]
            z = (b - sum(taken)) / column[0]
            return jnp.concatenate([z[None], later])[: len(later)], z

        _, z = lax.scan(one, later, (rows, self.columns), reverse=True)
        return jnp.moveaxis(z, 0, -1)

    @property
    def log_determinant(self) -> Array:
        """:math:`-\\log \\det L`, shape (n,)."""
        return -jnp.sum(jnp.log(self.columns[:, 0]), axis=0)

    @property
    def covariances(self) -> Array:
        """
        The entries of :math:`A^{-1}` in the band of :math:`A`.

        From :math:`A^{-1} = L^{-\\top} L^{-1}` follow the entries of a column from those of later
        columns,

        .. math:: \\Sigma_{ij} = \\frac{1}{L_{jj}} \\Big( \\frac{\\delta_{ij}}{L_{jj}}
            - \\sum_{d = 1}^w L_{j + d, j} \\Sigma_{j + d, i} \\Big), \\qquad i \\ge j .

        :return: :math:`\\Sigma_{j + d, j}`, shape (k, w + 1, n).
        """
        width = self.columns.shape[1] - 1
        shape = width, width, self.columns.shape[2]

        def one(later: Array, column: Array) -> tuple[Array, Array]:
            """The covariances of the next values give those with this value."""
            with_later = -jnp.sum(column[1:, None] * later, axis=0) / column[0]
            own = (1 / column[0] - jnp.sum(column[1:] * with_later, axis=0)) / column[0]
            found = jnp.concatenate([own[None], with_later])
            block = jnp.concatenate([with_later[:, None], later], axis=1)
            block = jnp.concatenate([found[None], block], axis=0)
            return block[:width, :width], found

        # values after the last one do not exist: their column has zeros
        _, found = lax.scan(one, jnp.zeros(shape, self.columns.dtype), self.columns, reverse=True)
        return found


class Bands(NamedTuple):
    """
    Entries of matrices with a band and a border.

    - **bands** - :math:`B_{j + d, j}` for :math:`d = 0, \\dots, w`, shape (k, w + 1, n).
    - **across** - :math:`C`, shape (b, n, k).
    - **corner** - :math:`D`, shape (n, b, b).
    """

    bands: Array
    across: Array
    corner: Array

    def mixed(self, share: Array, other: "Bands") -> "Bands":
        """Return :math:`(1 - s) A + s B`, for shares :math:`1 - s` of the shape (n,)."""
        shares = share, share[:, None], share[:, None, None]
        parts = zip(shares, self, other, strict=True)
        return Bands(*(part * x + (1 - part) * y for part, x, y in parts))


class BorderedFactor(NamedTuple):
    """
    Cholesky factors of banded matrices with a border.

    - **path** - :math:`L_B`.
    - **across** - :math:`W`, shape (b, n, k).
    - **corner** - :math:`L_S`.
    """

    path: BandedFactor
    across: Array
    corner: DenseFactor

    def towards(self, gradient: Array) -> Array:
        """Return :math:`L^{-1} g`, shape (..., n, k + b)."""
        first, last = self._split(gradient)
        first = self.path.towards(first)
        last = self.corner.towards(last - _einsum("bnk,...nk->...nb", self.across, first))
        return jnp.concatenate([first, last], axis=-1)

    def away(self, x: Array) -> Array:
        """Return :math:`L^{-\\top} x`, shape (..., n, k + b)."""
        first, last = self._split(x)
        last = self.corner.away(last)
        first = self.path.away(first - _einsum("bnk,...nb->...nk", self.across, last))
        return jnp.concatenate([first, last], axis=-1)

    @property
    def log_determinant(self) -> Array:
        """:math:`-\\log \\det L`, shape (n,)."""
        return self.path.log_determinant + self.corner.log_determinant

    @property
    def covariances(self) -> Bands:
        """
        The entries of :math:`A^{-1}` where :math:`A` has some,

        .. math:: A^{-1} = \\begin{pmatrix} B^{-1} + Z^\\top \\Sigma Z & -Z^\\top \\Sigma \\\\
            -\\Sigma Z & \\Sigma \\end{pmatrix} , \\qquad
            Z = W L_B^{-1} , \\quad \\Sigma = (L_S L_S^\\top)^{-1} .
        """
        corner = _einsum("nij,nik->njk", self.corner.inverse, self.corner.inverse)
        with_path = self.path.away(self.across)
        across = -_einsum("nbc,cnk->bnk", corner, with_path)
        bands, more = self.path.covariances, []
        for d in range(bands.shape[1]):
            length = with_path.shape[-1] - d
            part = -jnp.sum(with_path[..., d:] * across[..., :length], axis=0)
            more.append(jnp.pad(part, ((0, 0), (0, d))).T)
        return Bands(bands + jnp.stack(more, axis=1), across, corner)

    def _split(self, x: Array) -> list[Array]:
        return jnp.split(x, [self.across.shape[-1]], axis=-1)


def bordered_cholesky(matrices: Bands, is_exact: bool = False) -> BorderedFactor:
    """Factorise banded matrices with a border, as :func:`banded_cholesky`."""
    path = banded_cholesky(matrices.bands, is_exact)
    across = path.towards(matrices.across)
    rest = matrices.corner - _einsum("bnk,cnk->nbc", across, across)
    return BorderedFactor(path, across, dense_cholesky(rest, is_exact))


def banded_cholesky(bands: Array, is_exact: bool = False) -> BandedFactor:
    """
    Factorise banded matrices.

    :param bands: :math:`A_{j + d, j}` for :math:`d = 0, \\dots, w`, shape (k, w + 1, n).
    :param bool is_exact: whether a pivot that is clearly negative makes the result NaN. Otherwise,
        for the search of a mode, it counts with its absolute value.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.posterior.banded import banded_cholesky
        >>> bands = jnp.array([[2.0, -1.0], [2.0, -1.0], [2.0, 0.0]])[..., None]
        >>> factor = banded_cholesky(bands)
        >>> print(f"{jnp.exp(-2 * factor.log_determinant[0]):.3f}")
        4.000
        >>> factor.covariances[:, 0, 0].round(2).tolist()
        [0.75, 1.0, 0.75]
    """
    width = bands.shape[1] - 1
    least = _ROUNDING * float(jnp.finfo(bands.dtype).eps)

    def one(window: Array, band: Array) -> tuple[Array, Array]:
        """Eliminate a value from the next ones; ``window`` is what earlier ones took from them."""
        column = band - window[:, 0]
        smallest = least * jnp.abs(band[0]) + jnp.finfo(bands.dtype).tiny
        pivot = column[0]
        clearly = -_CLEARLY * smallest
        pivot = jnp.where(pivot > clearly, pivot, jnp.nan) if is_exact else jnp.abs(pivot)
        root = jnp.sqrt(jnp.maximum(pivot, smallest))
        column = (column / root).at[0].set(root)
        window = window + column[:, None] * column
        return jnp.pad(window[1:, 1:], ((0, 1), (0, 1), (0, 0))), column

    start = jnp.zeros((width + 1, width + 1, bands.shape[2]), bands.dtype)
    return BandedFactor(lax.scan(one, start, bands)[1])


def _times(column: Array, x: Array) -> Array:
    """Return the products of a column with values, one for each row."""
    shape = column.shape[0], *(1,) * (x.ndim - 1), column.shape[1]
    return column.reshape(shape) * x
