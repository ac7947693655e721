# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Comparison of the Gauss-Newton matrix of the rows with their Hessian."""

from collections.abc import Callable
from functools import partial, reduce
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.handlers import Plate
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.potential import Rows
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.fisher import rows_stand_for
from numpyro_sgmcmc.tuning.gauss_newton import effects_at, has_distributions, likelihood
from numpyro_sgmcmc.tuning.lanczos import lanczos

PRODUCTS = 10  #: products with the Hessian for a comparison
_CURVED = 1.5  #: ratio of an eigenvalue to the mean that is no error of few rows

#: Gradients that a product takes.
_GRADIENTS = 4.0

#: Lanczos's method on the rows of a random key, from a vector, for so many steps.
Products = Callable[[Array, Array, int], tuple[Array, Array, Array]]


class Comparison(NamedTuple):
    """
    Eigenvalues of the Hessian in coordinates in which what stands in for it is the identity.

    - **usual** - their mean along a random vector.
    - **far** - those that are far from it, shape ``(k,)``.
    - **vectors** - the unit vectors of these, shape ``(k, d)``.
    - **gradients** - the cost, in gradients of the rows that are compared.
    """

    usual: float
    far: np.ndarray
    vectors: np.ndarray
    gradients: float

    @property
    def curvature(self) -> float:
        """The largest eigenvalue as a multiple of the mean, 1 if none is far from it."""
        return max(1.0, float(np.max(self.far / self.usual, initial=0.0)))

    @property
    def missing(self) -> np.ndarray:
        """The rest of the Hessian, as far as it is known, shape ``(d, d)``."""
        return (self.vectors.T * (self.far / self.usual - 1)) @ self.vectors

    def is_alike(self, ratio: float) -> bool:
        """True if the eigenvalues are at most so many times as large or small as their mean."""
        low, high = self.usual / ratio, self.usual * ratio
        return 0 < self.usual < math.inf and bool(np.all((self.far > low) & (self.far < high)))


def compare(products: Products, rng_key: Array, dimension: int, dtype: Any) -> Comparison:
    """
    Compare the Gauss-Newton matrix of the rows with their Hessian.

    The first vectors of Lanczos's method fit the noise of few rows. An eigenvalue that is far from
    the mean is therefore looked at again, along its vector on other rows.

    :param products: Lanczos's method for :math:`I + L^\\top (H - F) L`, of :func:`excess`.
    :param rng_key: a random key.
    :param int dimension: the number of parameters.
    :param dtype: of the parameters.
    """
    first_key, second_key = (random.fold_in(rng_key, k) for k in range(2))
    # by NumPy: of JAX it would be one more program to compile
    generator = np.random.default_rng(np.asarray(random.key_data(rng_key)))
    start = jnp.asarray(generator.standard_normal(dimension), dtype)
    ends = products(first_key, start, PRODUCTS)
    basis, diagonal, beside = (np.asarray(x, np.float64) for x in ends)
    if not (np.all(np.isfinite(diagonal)) and np.all(np.isfinite(beside))):
        none = np.zeros((0, dimension))
        return Comparison(math.nan, none[:, 0], none, _GRADIENTS * PRODUCTS)
    number = int(np.argmax(beside == 0)) + 1 if np.any(beside == 0) else len(diagonal)
    between = beside[: number - 1]
    matrix = np.diag(diagonal[:number]) + np.diag(between, 1) + np.diag(between, -1)
    e, vectors = np.linalg.eigh(matrix)
    usual = float(diagonal[0])
    vectors = (vectors.T @ basis[:number])[(e > _CURVED * usual) | (e < usual / _CURVED)]
    again = [products(second_key, jnp.asarray(v, dtype), 1)[1][0] for v in vectors]
    return Comparison(
        usual, np.asarray(again, np.float64), vectors, _GRADIENTS * (PRODUCTS + len(again))
    )


def compared(product: Callable[[Array], Array], start: Array, steps: Array) -> Any:
    """Lanczos's method for the identity and a further product."""
    return lanczos(lambda x: x + product(x), start, min(PRODUCTS, len(start)), steps)


def excess(
    target: Target, factor: Array, point: Array, rows: Rows, rng_key: Array, vector: Array
) -> Array:
    """
    The product of a vector with the Hessian of the rows less what stands in for it,

    .. math:: L^\\top \\big( -\\sum_i c_i \\nabla^2 \\log p(x_i \\mid \\theta) - F \\big) L \\, v ,

    with :math:`F` of :func:`~numpyro_sgmcmc.tuning.gauss_newton.whitened_rows`. Effects are
    taken to be linear in the coordinates of hierarchies.

    :param target: the model with its data.
    :param factor: :math:`L`, shape ``(d, d)``.
    :param point: :math:`\\theta`, one flat vector.
    :param rows: the rows of a minibatch.
    :param rng_key: the key of the model.
    :param vector: :math:`v`, shape ``(d,)``.
    """
    start, derivative = jax.linearize(partial(effects_at, target), point)

    def at(x: Array) -> Array:
        return start + derivative(factor @ x)

    plates = target.model.plates
    return reduce(jnp.add, (_excess(target, x, at, rows, rng_key, vector) for x in plates))


def _excess(
    target: Target,
    plate: Plate,
    at: Callable[[Array], Array],
    rows: Rows,
    rng_key: Array,
    vector: Array,
) -> Array:
    """The product of :func:`excess` for the rows of one plate."""
    here, zero = target.centred, jnp.zeros_like(vector)
    potential = here.potential(IdentityMetric()).of_groups(plate.name)
    drawn, stands_for = rows_stand_for(target, plate, rows)
    rows = {**rows, plate.name: drawn}

    def terms(x: Array) -> Array:
        return potential.with_row_terms(target.unravel(at(x)), rows, rng_key)[1][plate.name]

    if has_distributions(target, plate):
        numbers, energy = likelihood(here, plate, rows, rng_key)
        eta, along = jax.linearize(lambda x: numbers(at(x)), zero)
        inner = jax.jvp(jax.grad(energy), (eta,), (along(vector),))[1]
    else:
        _, along = jax.linearize(terms, zero)
        slopes = along(vector)
        each = jnp.where(stands_for > 0, slopes / stands_for, 0.0)
        inner = each - slopes.sum() / stands_for.sum()
    (instead,) = jax.linear_transpose(along, zero)(inner)
    return -jax.jvp(jax.grad(lambda x: terms(x).sum()), (zero,), (vector,))[1] - instead
