# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Cholesky factors of many small matrices at once, one for each group."""

from functools import partial
from typing import NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

#: Largest number of columns of a matrix that is factorised whole; larger ones go in two halves.
_COLUMNS = 11

#: Smallest pivot as a part of its value before elimination.
_PIVOT = 1e-3

#: Sums of products without the rounding to few bits that accelerators do by default.
_einsum = partial(jnp.einsum, precision="highest")


class DenseFactor(NamedTuple):
    """
    Cholesky factors of small matrices.

    - **inverse** - :math:`L^{-1}`, shape (n, k, k).
    """

    inverse: Array

    def towards(self, gradient: Array) -> Array:
        """Return :math:`L^{-1} g`, shape (..., n, k)."""
        return _einsum("nij,...nj->...ni", self.inverse, gradient)

    def away(self, x: Array) -> Array:
        """Return :math:`L^{-\\top} x`, shape (..., n, k)."""
        points = jnp.broadcast_to(x, (*x.shape[:-2], *self.inverse.shape[:2]))
        return _einsum("nji,...nj->...ni", self.inverse, points)

    @property
    def log_determinant(self) -> Array:
        """:math:`-\\log \\det L`, shape (n,)."""
        return jnp.sum(jnp.log(jnp.diagonal(self.inverse, axis1=-2, axis2=-1)), -1)


def dense_cholesky(matrices: Array, is_exact: bool = False) -> DenseFactor:
    """Factorise matrices by :func:`inverse_cholesky`."""
    return DenseFactor(inverse_cholesky(matrices, is_exact))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def inverse_cholesky(matrices: Array, is_exact: bool = False) -> Array:
    """
    Return :math:`V = L^{-1}` of :math:`A = L L^\\top`, shape (n, k, k), for all groups at once.

    Calls of LAPACK for each group could wait for each other for ever. For the search of a mode,
    pivots that are not positive count with their absolute values, and pivots that are small beside
    their diagonal entry are larger. If ``is_exact``, only rounding errors are made up for, and the
    result is NaN for matrices that are clearly not positive definite. The derivative is

    .. math:: dV = -\\Phi(V \\, dA \\, V^\\top) V ,

    with :math:`\\Phi` the lower triangle and half of the diagonal.

    **References:**

    1. *Differentiation of the Cholesky decomposition*, Iain Murray (2016), equation 8.
    """
    diagonal = jnp.abs(jnp.diagonal(matrices, axis1=1, axis2=2))
    return _by_halves(matrices, diagonal, is_exact)


@inverse_cholesky.defjvp
def _(is_exact: bool, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = inverse_cholesky(*primals, is_exact)
    moved = _einsum("nij,njk,nlk->nil", inverse, *tangents, inverse)
    size = moved.shape[-1]
    part = jnp.tril(moved) * (1 - 0.5 * jnp.eye(size, dtype=moved.dtype))
    return inverse, -_einsum("nij,njk->nik", part, inverse)


def _by_halves(matrices: Array, diagonal: Array, is_exact: bool) -> Array:
    """
    Return the inverse factor from those of smaller matrices.

    :param diagonal: sizes of the diagonal before elimination, shape (n, k).
    """
    size = matrices.shape[-1]
    if not size:
        return matrices
    if size <= _COLUMNS:
        return _by_columns(matrices, diagonal, is_exact)
    half = size // 2
    first = _by_halves(matrices[:, :half, :half], diagonal[:, :half], is_exact)
    below = _einsum("nij,nkj->nik", matrices[:, half:, :half], first)
    rest = matrices[:, half:, half:] - _einsum("nij,nkj->nik", below, below)
    second = _by_halves(rest, diagonal[:, half:], is_exact)
    corner = -_einsum("nij,njk,nkl->nil", second, below, first)
    upper = jnp.pad(first, ((0, 0), (0, 0), (0, size - half)))
    return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=2)], axis=1)


def _by_columns(matrices: Array, diagonal: Array, is_exact: bool) -> Array:
    """Return the inverse factor by elimination beside a unit matrix, with groups as last axis."""
    size = matrices.shape[-1]
    units = jnp.broadcast_to(
        jnp.eye(size, dtype=matrices.dtype)[..., None], (size, *matrices.T.shape[1:])
    )
    smallest = jnp.finfo(matrices.dtype).tiny ** 0.5
    coarse = _PIVOT * diagonal.T + smallest
    fine = size * float(jnp.finfo(matrices.dtype).eps) * diagonal.T + smallest
    least = fine if is_exact else coarse

    def eliminated(j: Array, both: Array) -> Array:
        pivot = both[j, j]
        kept = jnp.where(pivot > -coarse[j], pivot, jnp.nan) if is_exact else jnp.abs(pivot)
        root = jnp.sqrt(jnp.maximum(kept, least[j]))
        row = both[j] / root
        below = (jnp.arange(size) > j)[:, None]
        factors = jnp.where(below, both[:, j] / root, 0.0)
        return (both - factors[:, None] * row).at[j].set(row)

    both = jnp.concatenate([jnp.moveaxis(matrices, 0, -1), units], axis=1)
    return jnp.moveaxis(lax.fori_loop(0, size, eliminated, both)[:, size:], -1, 0)
