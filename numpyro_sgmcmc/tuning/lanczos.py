# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Lanczos's method for a symmetric matrix of which only products are known."""

from collections.abc import Callable

from jax import Array, lax
import jax.numpy as jnp

#: The part of an image below which what is left of it is a rounding error.
_FLAT = 1e-6


def lanczos(
    product: Callable[[Array], Array], start: Array, number: int, steps: Array | int | None = None
) -> tuple[Array, Array, Array]:
    """
    An orthonormal basis :math:`q_1, \\dots, q_m` of :math:`v, A v, \\dots, A^{m - 1} v`, in which
    a symmetric matrix is tridiagonal,

    .. math:: A q_k = \\beta_{k - 1} q_{k - 1} + \\alpha_k q_k + \\beta_k q_{k + 1} .

    Each vector is made orthogonal to all before, twice, since rounding errors would let the first
    ones come again.

    :param product: :math:`x \\mapsto A x`.
    :param start: :math:`v`, shape (d,).
    :param int number: :math:`m`.
    :param steps: vectors after which to stop, :math:`m` if None. What comes after is zero.
    :return: the basis, shape (m, d); :math:`\\alpha`, shape (m,); and :math:`\\beta`, shape (m,),
        the last one that by which :math:`A q_m` leaves the space. Where the space ends before, it
        is zero there.

    **References:**

    1. *An Iteration Method for the Solution of the Eigenvalue Problem of Linear Differential and
       Integral Operators*, Cornelius Lanczos (1950).

    **Example:** the eigenvalues 1 and 4 of a matrix of any size end the space after two vectors.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.tuning.lanczos import lanczos
        >>> e = jnp.array([1.0, 1.0, 1.0, 4.0])
        >>> basis, diagonal, beside = lanczos(lambda x: e * x, jnp.ones(4), 3)
        >>> matrix = jnp.diag(diagonal) + jnp.diag(beside[:-1], 1) + jnp.diag(beside[:-1], -1)
        >>> jnp.linalg.eigvalsh(matrix[:2, :2]).round(4).tolist(), float(beside[1])
        ([1.0, 4.0], 0.0)
    """

    def one(k: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        basis, diagonal, beside, vector = found
        basis = basis.at[k].set(vector)
        image = product(vector)
        diagonal = diagonal.at[k].set(vector @ image)
        rest = image
        for _ in range(2):
            rest = rest - basis.T @ (basis @ rest)
        length = jnp.linalg.norm(rest)
        goes_on = length > _FLAT**0.5 * jnp.linalg.norm(image)
        beside = beside.at[k].set(jnp.where(goes_on, length, 0.0))
        return basis, diagonal, beside, jnp.where(goes_on, rest / length, 0.0)

    zeros = jnp.zeros(number, start.dtype)
    state = (
        jnp.zeros((number, len(start)), start.dtype),
        zeros,
        zeros,
        start / jnp.linalg.norm(start),
    )
    return lax.fori_loop(0, number if steps is None else steps, one, state)[:3]
