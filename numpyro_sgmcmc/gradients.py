# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Gradient oracles: the gradient of the minibatch potential, and what one minibatch tells
about the covariance of its noise.

With :math:`g_i = \\nabla \\log p(x_i \\mid \\theta)`, a minibatch of :math:`n` of :math:`N`
rows gives :math:`\\tilde g = \\nabla \\tilde U(\\theta)` with noise of covariance

.. math:: V(\\theta) = \\operatorname{Cov}(\\tilde g) = f \\, \\frac{N^2}{n} S^2(\\theta),

where :math:`S^2` is the covariance of the :math:`g_i` with denominator :math:`N - 1` and
:math:`f = 1 - n/N` for rows drawn without replacement; with replacement :math:`f = 1`
and the denominator is :math:`N`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp

#: The minibatch potential as a function of position, rows and random key.
Potential = Callable[[Array, Mapping[str, Array], Array], Array]

#: Fewer sub-batches make a noisier estimate, more make the gradient dearer.
_FEWEST_SUB_BATCHES = 10


class Observation(NamedTuple):
    """What one minibatch says at one position."""

    #: minibatch potential, a scalar
    potential: Array
    #: its gradient, shape (d,)
    gradient: Array
    #: estimate of the covariance V of the gradient's noise: shape (d,) for its diagonal,
    #: (d, d) for all of it, None where the method does not ask for one
    noise: Array | None = None


#: A gradient oracle: position, shape (d,), to observation.
Gradient = Callable[[Array], Observation]


def minibatch_gradient(potential: Potential, rows: Mapping[str, Array], rng_key: Array) -> Gradient:
    """
    The gradient of the minibatch potential.

    :param potential: the minibatch potential :math:`\\tilde U(\\theta; S)`.
    :param rows: rows :math:`S` of the minibatch, for each subsampled plate.
    :param rng_key: key for a potential that is itself random.
    :return: the oracle :math:`\\theta \\mapsto (\\tilde U, \\nabla \\tilde U)`.
    """

    def gradient(position: Array) -> Observation:
        return Observation(*jax.value_and_grad(potential)(position, rows, rng_key))

    return gradient


def sub_batch_gradient(
    potential: Potential,
    rows: Mapping[str, Array],
    rng_key: Array,
    factors: Mapping[str, float],
    covariance: str,
) -> Gradient:
    """
    The gradient of the minibatch potential with an estimate of the covariance of its
    noise, from the spread of the gradients of :math:`m` sub-batches of equal size:

    .. math::

        \\tilde g = \\frac1m \\sum_{k=1}^{m} \\tilde g_k, \\qquad
        \\hat V = \\frac{f}{m} \\, \\frac{1}{m-1}
            \\sum_{k=1}^{m} (\\tilde g_k - \\tilde g)(\\tilde g_k - \\tilde g)^\\top .

    :math:`\\hat V` is unbiased. With :math:`m = n` it is the empirical covariance of the
    gradients of the single rows, eq. (19) of Shang et al. (2015) times :math:`f N^2 / n`.
    The noise of several plates is estimated one plate at a time, with the full minibatch
    of the others, and added up; rows of nested plates interact, and that part is counted
    once for each plate.

    :param potential: the minibatch potential.
    :param rows: rows of the minibatch for each subsampled plate.
    :param rng_key: key for a potential that is itself random; each sub-batch gets its own.
    :param factors: the finite-population factor :math:`f` for each plate; where it is 0
        there is no noise to estimate and :math:`\\hat V = 0`.
    :param covariance: ``"diagonal"`` or ``"full"``.
    :return: the oracle :math:`\\theta \\mapsto (\\tilde U, \\nabla \\tilde U, \\hat V)`, at the
        cost of one gradient and memory for :math:`m` of them for each plate.
    """
    noisy = [name for name in rows if factors[name] > 0]

    def gradient(position: Array) -> Observation:
        size = position.shape[0]
        noise = jnp.zeros((size,) if covariance == "diagonal" else (size, size), position.dtype)
        if not noisy:
            observed = minibatch_gradient(potential, rows, rng_key)(position)
            return observed._replace(noise=noise)
        potentials, gradients = jnp.zeros(()), jnp.zeros_like(position)
        for name in noisy:
            count = sub_batches(rows[name].shape[0])
            batches = rows[name].reshape(count, -1)

            def at(batch: Array, key: Array, name: str = name) -> tuple[Array, Array]:
                return jax.value_and_grad(potential)(position, {**rows, name: batch}, key)

            potentials, gradients = jax.vmap(at)(batches, random.split(rng_key, count))
            spread = gradients - gradients.mean(0)
            scale = factors[name] / (count * (count - 1))
            outer = jnp.sum(spread**2, 0) if covariance == "diagonal" else spread.T @ spread
            noise += scale * outer
        # each plate's sub-batches average to the same minibatch gradient
        return Observation(potentials.mean(), gradients.mean(0), noise)

    return gradient


def sub_batches(batch_size: int) -> int:
    """
    The number of sub-batches of a minibatch: the smallest divisor of ``batch_size`` that is
    at least 10, or ``batch_size`` itself if it is smaller.

    :raises ValueError: if there is a single row, which shows no spread.
    """
    if batch_size < 2:
        raise ValueError(
            "The noise of the gradient cannot be estimated from minibatches of one row; use a"
            " `subsample_size` of at least 2."
        )
    fewest = min(_FEWEST_SUB_BATCHES, batch_size)
    return next(m for m in range(fewest, batch_size + 1) if batch_size % m == 0)
