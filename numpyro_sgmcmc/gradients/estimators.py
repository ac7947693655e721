# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Gradient oracles: the minibatch gradient, and one minibatch's estimate of its noise covariance.

With :math:`g_i = \\nabla \\log p(x_i \\mid \\theta)`, a minibatch of :math:`n` of :math:`N`
rows gives :math:`\\tilde g = \\nabla \\tilde U(\\theta)` with noise of covariance

.. math:: V(\\theta) = \\operatorname{Cov}(\\tilde g) = f \\, \\frac{N^2}{n} S^2(\\theta),

where :math:`S^2` is the covariance of the :math:`g_i` with denominator :math:`N - 1` and
:math:`f = 1 - n/N` for rows drawn without replacement; with replacement :math:`f = 1`
and the denominator is :math:`N`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_sgmcmc.data.drawn_rows import drawn_rows
from numpyro_sgmcmc.data.rows import Group
from numpyro_sgmcmc.data.subsampling import sub_batches
from numpyro_sgmcmc.gradients.blocks import blocks_of
from numpyro_sgmcmc.gradients.covariance import Covariance, LowRankPlusDiagonal
from numpyro_sgmcmc.posterior.handlers import BatchRows
from numpyro_sgmcmc.posterior.potential import Potential, Rows
from numpyro_sgmcmc.posterior.target import Target

#: Numbers in the gradients of single rows that are held at once.
PER_EXAMPLE_NUMBERS = 2**24


class Evaluation(NamedTuple):
    """Evaluation of the potential by one minibatch at one position."""

    #: minibatch potential, a scalar
    potential: Array
    #: its gradient, shape (d,)
    gradient: Array
    #: estimate of the covariance V of the gradient's noise, in its representation
    #: (:mod:`numpyro_sgmcmc.gradients.covariance`), or None if the method does not need it
    noise: Any = None
    #: whether it is an estimate, and not zeros in the place of one
    has_estimate: Array | bool = True


#: Gradient oracle: function of a position, shape (d,), that returns an evaluation.
Gradient = Callable[[Array], Evaluation]


def minibatch_gradient(potential: Potential, rows: Rows, rng_key: Array) -> Gradient:
    """
    Return the oracle of the gradient of the minibatch potential.

    :param potential: the minibatch potential :math:`\\tilde U(\\theta; S)`.
    :param rows: rows :math:`S` of the minibatch, for each subsampled plate.
    :param rng_key: key for a potential that is itself random.
    :return: the oracle :math:`\\theta \\mapsto (\\tilde U, \\nabla \\tilde U)`.
    """

    def gradient(position: Array) -> Evaluation:
        value, slope = potential.value_and_gradient(potential.values(position), rows, rng_key)
        return Evaluation(value, potential.pullback(slope))

    return gradient


def sub_batch_gradient(
    potential: Potential,
    rows: Rows,
    rng_key: Array,
    factors: Mapping[str, float],
    representation: Covariance,
    groups: Mapping[str, Sequence[Group]] = {},
) -> Gradient:
    """
    Return the oracle of the gradient and its noise covariance from sub-batches.

    The estimate comes from the spread of the gradients of :math:`m` sub-batches of equal size:

    .. math::

        \\tilde g = \\frac1m \\sum_{k=1}^{m} \\tilde g_k, \\qquad
        \\hat V = \\frac{f}{m} \\, \\frac{1}{m-1}
            \\sum_{k=1}^{m} (\\tilde g_k - \\tilde g)(\\tilde g_k - \\tilde g)^\\top .

    :math:`\\hat V` is unbiased. The noise of several plates is estimated one plate at a
    time, with the full minibatch of the others, and added up. Rows of nested plates
    interact, and the noise of the interaction is counted once for each plate. Groups of several
    plates do not interact, and their sub-batches leave the other plates out.

    In stratified minibatches each sub-batch is of one stratum, and the spread is the spread within
    the strata: with :math:`m_h` sub-batches of mean :math:`\\tilde g_h` in stratum :math:`h`,

    .. math::

        \\hat V = \\frac{1}{m^2} \\sum_h f_h \\frac{m_h}{m_h - 1}
            \\sum_{k \\in h} (\\tilde g_k - \\tilde g_h)(\\tilde g_k - \\tilde g_h)^\\top .

    Many sub-batches are taken together in blocks (:mod:`~numpyro_sgmcmc.gradients.blocks`).

    :param potential: the minibatch potential.
    :param rows: rows of the minibatch for each subsampled plate.
    :param rng_key: key for a potential that is itself random; each sub-batch gets its own key.
    :param factors: the finite-population factor :math:`f` for each plate. A plate with factor 0
        has no noise, and :math:`\\hat V = 0`.
    :param representation: the representation of :math:`\\hat V`.
    :param groups: the sub-batches of each stratum, for plates with stratified minibatches.
    :return: the oracle :math:`\\theta \\mapsto (\\tilde U, \\nabla \\tilde U, \\hat V)`, at the
        cost of one gradient, with memory for :math:`m` gradients for each plate.
    """

    def gradient(position: Array) -> Evaluation:
        samples, parts, names = [], [], _noisy(rows, factors)
        is_sum = len(names) == len(rows) > 1 and potential.group_plates.issuperset(rows)
        for name in names:
            own = potential.of_groups(name) if is_sum else potential
            batch = drawn_rows(rows[name])
            # without strata the factor may be traced, and is no part of the blocks
            factor = 1.0 if name in groups else factors[name]
            strata = groups.get(name) or (Group(0, sub_batches(batch.size), 1.0),)
            blocks = blocks_of(strata, batch.size)
            potentials, gradients = jax.vmap(_on_rows_of(name, own, position, rows))(
                blocks.of(batch), random.split(rng_key, len(blocks.places))
            )
            shares, deviations = (
                jnp.asarray(x, gradients.dtype) for x in (blocks.shares, blocks.deviations)
            )
            mean = jnp.matmul(shares, gradients, precision="highest")
            own_samples = jnp.matmul(deviations, gradients - mean, precision="highest")
            samples.append(jnp.sqrt(factor) * own_samples)
            parts.append(Evaluation(jnp.sum(shares * potentials), mean))
        if not parts:
            nothing = representation.zeros(position.shape[0], position.dtype)
            return minibatch_gradient(potential, rows, rng_key)(position)._replace(noise=nothing)
        noise = representation.outer(jnp.concatenate(samples))
        if not is_sum:
            # the sub-batches of every plate average to one minibatch gradient
            return parts[-1]._replace(noise=noise)
        # each part has the prior, which counts once
        prior = minibatch_gradient(potential.of_groups(None), rows, rng_key)(position)
        value, slope = jax.tree.map(
            lambda one, *x: sum(x) - (len(x) - 1) * one, prior[:2], *(x[:2] for x in parts)
        )
        return Evaluation(value, slope, noise)

    return gradient


def per_example_gradient(
    potential: Potential,
    rows: Rows,
    rng_key: Array,
    factors: Mapping[str, float],
    representation: Covariance,
) -> Gradient:
    """
    Return the oracle of the gradient and its noise covariance from single rows.

    It is :func:`sub_batch_gradient` with a sub-batch for each row, :math:`m = n`: the empirical
    covariance of the gradients of the single rows, eq. (19) of Shang et al. (2015) times
    :math:`f N^2 / n`. It is the least noisy and the most expensive estimate.

    Gradients are computed for chunks of rows, of at most 2\\ :sup:`24` numbers together (64 MiB in
    single precision) or of a single row, for any :math:`n`.

    Parameters and result are as in :func:`sub_batch_gradient`. A random potential has equal
    randomness for all rows.
    """

    def gradient(position: Array) -> Evaluation:
        evaluation = minibatch_gradient(potential, rows, rng_key)(position)
        noise = representation.zeros(position.shape[0], position.dtype)
        chunk = max(1, PER_EXAMPLE_NUMBERS // position.shape[0])
        for name in _noisy(rows, factors):
            count = rows[name].size
            on_rows = _on_rows_of(name, potential, position, rows)
            scale = jnp.sqrt(factors[name] / (count * (count - 1)))

            def added(total: Any, batch: Any, on_rows: Any = on_rows, scale: Any = scale) -> Any:
                _, gradients = jax.vmap(lambda row: on_rows(_shaped(row, (1,), 0), rng_key))(batch)
                one = representation.outer((gradients - evaluation.gradient) * scale)
                return representation.add(1.0, total, 1.0, one), None

            whole = count // chunk * chunk
            parts = slice(whole), slice(whole, None)
            first, rest = (jax.tree.map(lambda x, p=p: x[p], rows[name]) for p in parts)
            noise, _ = lax.scan(added, noise, _shaped(first, (-1, chunk)))
            if whole < count:
                noise, _ = added(noise, rest)
        return evaluation._replace(noise=noise)

    return gradient


def two_cotangent_gradient(
    potential: Potential,
    rows: Rows,
    rng_key: Array,
    factors: Mapping[str, float],
    representation: Covariance,
) -> Gradient:
    """
    Return the oracle of the gradient and its noise covariance from two cotangents.

    One forward pass gives the gradient of the minibatch potential and a vector :math:`z` with the
    covariance of its noise, by random signs :math:`s_i = \\pm 1` for cotangents of the
    contributions :math:`t_i = (N / n) \\ell_i` of the rows:

    .. math::

        z = \\sqrt{\\frac{f n}{n - 1}} \\sum_{i=1}^{n} (s_i - \\bar s) \\nabla t_i,
        \\qquad \\hat V = z z^\\top .

    :math:`\\hat V` is unbiased. It has rank one and needs a long average. The signs of several
    plates are independent.

    Parameters are as in :func:`sub_batch_gradient`.

    :return: the oracle, at the cost of one forward and two backward passes, with memory for
        two gradients.
    """

    def gradient(position: Array) -> Evaluation:
        (energy, terms), pullback = jax.vjp(
            lambda x: potential.with_row_terms(x, rows, rng_key), potential.values(position)
        )
        signs = {name: jnp.zeros_like(term) for name, term in terms.items()}
        for k, name in enumerate(_noisy(rows, factors)):
            count = rows[name].size
            sign = _signs(random.fold_in(rng_key, k), count).astype(terms[name].dtype)
            scale = jnp.sqrt(factors[name] * count / (count - 1))
            signs[name] = scale * (sign - sign.mean())
        none = jax.tree.map(jnp.zeros_like, signs)
        zero, one = jnp.zeros_like(energy), jnp.ones_like(energy)
        cotangents = jax.tree.map(lambda *x: jnp.stack(x), (one, none), (zero, signs))
        both = jax.vmap(lambda cotangent: potential.pullback(*pullback(cotangent)))(cotangents)
        return Evaluation(energy, both[0], representation.outer(both[1:]))

    return gradient


def product_gradient(
    potential: Potential,
    rows: Rows,
    rng_key: Array,
    factors: Mapping[str, float],
    others: Rows,
) -> Gradient:
    """
    Return the oracle of the gradient and products with its noise covariance.

    The covariance is a function :math:`p \\mapsto \\hat V p` at the position of the gradient. It
    comes from the rows of another minibatch, independent of the noise of the gradient. With
    :math:`J` the Jacobian of the vector :math:`t` of contributions :math:`(N / n) \\ell_i` of these
    rows to the log density,

    .. math::

        \\hat V p = \\frac{f n}{n - 1} J^\\top (q - \\bar q), \\qquad q = J p,

    at the cost of one forward-mode and one reverse-mode derivative, with memory for a few
    gradients.

    :param others: rows of the other minibatch for each subsampled plate.

    The other parameters are as in :func:`sub_batch_gradient`.
    """

    def gradient(position: Array) -> Evaluation:
        evaluation = minibatch_gradient(potential, rows, rng_key)(position)
        _, forward = jax.linearize(
            lambda x: potential.with_row_terms(x, others, rng_key)[1], potential.values(position)
        )
        backward = jax.linear_transpose(forward, potential.values(position))

        def product(vector: Array) -> Array:
            terms = forward(potential.direction(vector))
            for name, term in terms.items():
                count = term.shape[0]
                factor = factors[name] * count / (count - 1) if _has_noise(factors[name]) else 0.0
                terms[name] = factor * (term - term.mean())
            return potential.pullback(*backward(terms))

        return evaluation._replace(noise=product)

    return gradient


def over_devices(gradient: Gradient, target: Target, rng_key: Array) -> Gradient:
    """
    Return the oracle over all devices from the oracle of each device on its own rows.

    With :math:`\\hat V_p` for the noise of device :math:`p`, whose rows are drawn independently of
    the rows of other devices,

    .. math::

        \\tilde g = \\frac1P \\sum_p \\tilde g_p, \\qquad
        \\hat V = \\frac{1}{P^2} \\sum_p \\hat V_p .

    The cost is one all-reduce. A covariance represented by its products takes another all-reduce
    for each product. Factors of :math:`\\hat V_p = F_p^\\top F_p + \\operatorname{diag}(s_p)` are
    averaged with random signs, :math:`F = \\frac1P \\sum_p \\operatorname{diag}(\\pm 1) F_p`: the
    mean is as large as the factor of a single device, and :math:`F^\\top F` is unbiased.

    :param gradient: the oracle of this device.
    :param target: the model with its layout on devices. Without devices the oracle is unchanged.
    :param rng_key: key for the signs, different on each device.
    """
    if target.shards is None:
        return gradient

    def everywhere(position: Array) -> Evaluation:
        seen = gradient(position)
        if callable(seen.noise):
            here = seen.noise

            def product(vector: Array) -> Array:
                return target.mean(here(vector)) / target.parts

            potential, slope = target.mean((seen.potential, seen.gradient))
            return Evaluation(potential, slope, product)
        noise = seen.noise
        if isinstance(noise, LowRankPlusDiagonal):
            signs = random.rademacher(rng_key, (len(noise.factors), 1), noise.factors.dtype)
            noise = LowRankPlusDiagonal(signs * noise.factors, noise.diagonal / target.parts)
        else:
            noise = jax.tree.map(lambda x: x / target.parts, noise)
        potential, slope, noise = target.mean((seen.potential, seen.gradient, noise))
        return Evaluation(potential, slope, noise, seen.has_estimate)

    return everywhere


#: Estimators of the noise covariance that can be averaged, by the word that selects them.
ESTIMATORS: dict[str, Callable[..., Gradient]] = {
    "sub_batches": sub_batch_gradient,
    "two_cotangents": two_cotangent_gradient,
    "per_example": per_example_gradient,
}


def _noisy(rows: Rows, factors: Mapping[str, float]) -> list[str]:
    return [name for name in rows if _has_noise(factors[name])]


def _has_noise(factor: Any) -> bool:
    # the number of rows that keep coming is traced, and so is the factor
    return isinstance(factor, Array) or factor > 0


def _signs(rng_key: Array, count: int) -> Array:
    """Draw random signs, 32 of each random word: a word for each sign would cost a gradient."""
    words = random.bits(rng_key, (-(-count // 32), 1), jnp.uint32)
    bits = (words >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return 1 - 2 * bits.ravel()[:count].astype(jnp.int32)


def _shaped(rows: BatchRows, shape: tuple[int, ...], axes: int = 1) -> BatchRows:
    """Return rows with another shape in the place of the first axes."""
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[axes:]), rows)


def _on_rows_of(
    name: str, potential: Potential, position: Array, rows: Rows
) -> Callable[[BatchRows, Array], tuple[Array, Array]]:
    """Return the function for potential and gradient with other rows of one plate."""

    values = potential.values(position)

    def at(batch: BatchRows, key: Array) -> tuple[Array, Array]:
        value, slope = potential.value_and_gradient(values, {**rows, name: batch}, key)
        return value, potential.pullback(slope)

    return at
