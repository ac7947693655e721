# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Representations of the covariance :math:`V` of the gradient's noise, and functions of :math:`V`.

A representation is an object without data. The covariance itself is an array or a tuple of
arrays, and is part of the state of a chain. Functions :math:`f(V)` that the integrators need, such
as the inverse and the exponential, are applied to a vector by a few steps of the Lanczos process,
which needs only products :math:`V p`. For the diagonal they are exact.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
import math
from typing import Any, NamedTuple, Protocol

import jax
from jax import Array, lax
import jax.numpy as jnp

#: Function of a real number that is applied to the eigenvalues of the covariance.
Function = Callable[[Array], Array]

#: Largest dimension of a full covariance: it takes memory d^2 for each chain and time d^2 for each
#: step.
MAX_FULL_DIMENSION = 1_000

#: Rows of the largest matrix whose eigenvectors LAPACK finds in one thread on a CPU. Several
#: threads spin after a call, and take the cores from the gradient: a step took 1.8 times as long.
_ROWS_OF_ONE_THREAD = 64

#: Steps of the Lanczos process: relative error of an inverse 3e-3 at condition number 25.
LANCZOS_STEPS = 16

#: Steps of the Lanczos process if every diagonal entry is at most a quarter of the term that is
#: added to the covariance: relative error of the inverse 1e-4.
FEW_LANCZOS_STEPS = 6


class Covariance:
    """Representation of a covariance of :math:`d` coordinates, an object without data."""

    #: number of steps of the Lanczos process
    lanczos_steps: int

    @property
    def freedom(self) -> int:
        """The number of parameters beyond the diagonal for each coordinate."""
        return 0

    @abstractmethod
    def zeros(self, dimension: int, dtype: Any) -> Any:
        """Return the covariance 0."""

    @abstractmethod
    def outer(self, samples: Array) -> Any:
        """
        Return the covariance :math:`\\sum_k z_k z_k^\\top`.

        :param samples: :math:`z_k`, shape ``(k, d)``.
        """

    def add(self, keep: Array | float, first: Any, weight: Array | float, second: Any) -> Any:
        """Return ``keep * first + weight * second``."""
        return jax.tree.map(lambda a, b: keep * a + weight * b, first, second)

    @abstractmethod
    def product(self, covariance: Any, vector: Array) -> Array:
        """Return :math:`V p`, shape ``(d,)``."""

    @abstractmethod
    def trace(self, covariance: Any, probe: Array) -> Array:
        """
        Return the trace of :math:`V`.

        :param probe: a standard normal vector, for an unbiased estimate if only products with
            :math:`V` are available.
        """

    def on(self, covariance: Any, vector: Array) -> "OnVector":
        """Return :math:`V` with one vector :math:`p`, for several functions of :math:`V`."""
        return _lanczos(self, covariance, vector)

    def apply(self, covariance: Any, function: Function, vector: Array) -> Array:
        """Return :math:`f(V) p`, shape ``(d,)``."""
        return self.on(covariance, vector).apply(function)

    def largest(self, covariance: Any, vector: Array) -> Array:
        """Return the largest eigenvalue in the Krylov space of ``vector``."""
        return jnp.max(_lanczos(self, covariance, vector).eigenvalues)


@dataclass(frozen=True)
class Diagonal(Covariance):
    """Representation by the variance of every coordinate, shape ``(d,)``."""

    def zeros(self, dimension: int, dtype: Any) -> Array:
        return jnp.zeros((dimension,), dtype)

    def outer(self, samples: Array) -> Array:
        return column_sums(samples**2)

    def product(self, covariance: Array, vector: Array) -> Array:
        return covariance * vector

    def trace(self, covariance: Array, probe: Array) -> Array:
        return jnp.sum(covariance)

    def on(self, covariance: Array, vector: Array) -> "OnVector":
        return _Entries(covariance, vector)

    def largest(self, covariance: Array, vector: Array) -> Array:
        return jnp.max(covariance)


@dataclass(frozen=True)
class Full(Covariance):
    """
    Representation by the full matrix, shape ``(d, d)``.

    :param int dimension: :math:`d`.
    :param int lanczos_steps: steps of the Lanczos process for a function of the covariance.
    """

    dimension: int
    lanczos_steps: int = LANCZOS_STEPS

    @property
    def freedom(self) -> int:
        return self.dimension

    def zeros(self, dimension: int, dtype: Any) -> Array:
        return jnp.zeros((dimension, dimension), dtype)

    def outer(self, samples: Array) -> Array:
        return samples.T @ samples

    def product(self, covariance: Array, vector: Array) -> Array:
        return covariance @ vector

    def trace(self, covariance: Array, probe: Array) -> Array:
        return jnp.trace(covariance)


class LowRankPlusDiagonal(NamedTuple):
    """
    Covariance :math:`V = F^\\top F + \\operatorname{diag}(s)`.

    - **factors** - :math:`F`, shape (r, d), the leading directions.
    - **diagonal** - :math:`s`, shape (d,), the variance outside of the leading directions.
    """

    factors: Array
    diagonal: Array


@dataclass(frozen=True)
class LowRank(Covariance):
    """
    Representation by the leading directions and the remaining variance of every coordinate.

    The covariance is a :class:`LowRankPlusDiagonal`. The sum of two is cut to the leading
    directions again, in parts if the second has many. The rest goes to the diagonal, so that the
    diagonal of :math:`V` is always exact.

    :param int rank: number of leading directions.
    :param int lanczos_steps: steps of the Lanczos process for a function of the covariance.
    """

    rank: int
    lanczos_steps: int = LANCZOS_STEPS

    @property
    def freedom(self) -> int:
        return self.rank

    def zeros(self, dimension: int, dtype: Any) -> LowRankPlusDiagonal:
        return LowRankPlusDiagonal(
            jnp.zeros((self.rank, dimension), dtype), jnp.zeros((dimension,), dtype)
        )

    def outer(self, samples: Array) -> LowRankPlusDiagonal:
        return LowRankPlusDiagonal(samples, jnp.zeros_like(samples[0]))

    def add(
        self,
        keep: Array | float,
        first: LowRankPlusDiagonal,
        weight: Array | float,
        second: LowRankPlusDiagonal,
    ) -> LowRankPlusDiagonal:
        diagonal = keep * first.diagonal + weight * second.diagonal
        total = LowRankPlusDiagonal(jnp.sqrt(keep) * first.factors, diagonal)
        rows = jnp.sqrt(weight) * second.factors
        parts = math.ceil(len(rows) / max(_ROWS_OF_ONE_THREAD - self.rank, self.rank))
        for part in jnp.array_split(rows, parts):
            total = self._with_rows(total, part)
        return total

    def _with_rows(self, covariance: LowRankPlusDiagonal, added: Array) -> LowRankPlusDiagonal:
        rows = jnp.concatenate([covariance.factors, added])
        if len(rows) <= self.rank:
            return covariance._replace(factors=rows)
        _, directions = jnp.linalg.eigh(jnp.matmul(rows, rows.T, precision="highest"))
        leading = jnp.matmul(directions[:, -self.rank :].T, rows, precision="highest")
        # a rotation keeps the sum of squares, and rounding must not leave a negative variance
        rest = column_sums(rows**2) - column_sums(leading**2)
        return LowRankPlusDiagonal(leading, jnp.maximum(covariance.diagonal + rest, 0))

    def product(self, covariance: LowRankPlusDiagonal, vector: Array) -> Array:
        factors, diagonal = covariance
        return (factors @ vector) @ factors + diagonal * vector

    def trace(self, covariance: LowRankPlusDiagonal, probe: Array) -> Array:
        return jnp.sum(covariance.factors**2) + jnp.sum(covariance.diagonal)


@dataclass(frozen=True)
class MatrixFree(Covariance):
    """
    Representation by the product :math:`p \\mapsto V p`, a function.

    No matrix is held, and nothing is averaged. A product costs one or two gradients.
    """

    lanczos_steps: int = 5

    def zeros(self, dimension: int, dtype: Any) -> tuple[()]:
        return ()

    def product(self, covariance: Callable[[Array], Array], vector: Array) -> Array:
        return covariance(vector)

    def trace(self, covariance: Callable[[Array], Array], probe: Array) -> Array:
        return probe @ covariance(probe)


def column_sums(matrix: Array) -> Array:
    """Return the sum over the first axis, by a product: XLA's reduction is several times slower."""
    return jnp.matmul(jnp.ones(matrix.shape[0], matrix.dtype), matrix, precision="highest")


class OnVector(Protocol):
    """Covariance :math:`V` and vector :math:`p`, for products :math:`f(V) p`."""

    def apply(self, function: Function) -> Array:
        """Return :math:`f(V) p`, shape ``(d,)``."""


class _Entries(NamedTuple):
    """Diagonal covariance and a vector, both of shape (d,)."""

    variances: Array
    vector: Array

    def apply(self, function: Function) -> Array:
        return function(self.variances) * self.vector


class _Lanczos(NamedTuple):
    """
    Covariance on the Krylov space spanned by :math:`p, V p, V^2 p, \\dots`.

    - **basis** - an orthonormal basis, shape (k, d), with its first vector along :math:`p`.
    - **eigenvalues** - eigenvalues of :math:`V` on that space, shape (k,).
    - **eigenvectors** - eigenvectors in the basis, shape (k, k).
    - **norm** - :math:`|p|`.
    """

    basis: Array
    eigenvalues: Array
    eigenvectors: Array
    norm: Array

    def apply(self, function: Function) -> Array:
        weights = self.eigenvectors @ (function(self.eigenvalues) * self.eigenvectors[0])
        return self.norm * (weights @ self.basis)


def _lanczos(representation: Covariance, covariance: Any, vector: Array) -> _Lanczos:
    """Run the Lanczos process, Golub and Van Loan, *Matrix Computations*, section 10.1."""
    norm = jnp.linalg.norm(vector)
    tiny = jnp.finfo(vector.dtype).tiny
    steps = min(representation.lanczos_steps, vector.shape[0])

    def advance(carry: tuple[Array, Array, Array], _: None) -> tuple[Any, Any]:
        here, before, coupling = carry
        image = representation.product(covariance, here) - coupling * before
        diagonal = here @ image
        image = image - diagonal * here
        following = jnp.linalg.norm(image)
        # only rounding errors remain once the space is invariant
        ended = following <= 1e-5 * (jnp.abs(diagonal) + coupling) + tiny
        following = jnp.where(ended, 0.0, following)
        there = jnp.where(ended, 0.0, image / jnp.where(ended, 1.0, following))
        return (there, here, following), (here, diagonal, following)

    start = (vector / jnp.maximum(norm, tiny), jnp.zeros_like(vector), jnp.zeros_like(norm))
    _, (basis, diagonal, coupling) = lax.scan(advance, start, length=steps)
    matrix = jnp.diag(diagonal) + jnp.diag(coupling[:-1], 1) + jnp.diag(coupling[:-1], -1)
    eigenvalues, eigenvectors = jnp.linalg.eigh(matrix)
    return _Lanczos(basis, eigenvalues, eigenvectors, norm)
