# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Row numbers beyond 2\\ :sup:`31`, which JAX does not have without ``jax_enable_x64``.

A row number :math:`2^{32} \\cdot \\text{high} + \\text{low}` is a pair of 32-bit halves, ``high``
and ``low``. Programs compute with ``uint32``, and return ``int32`` with equal bits, the type of
other row numbers.
"""

from collections.abc import Callable
from math import isqrt
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

#: Largest number of rows of a plate whose row numbers are single integers.
MOST_ROWS = 2**31 - 1

#: Rounds of the network. With six, pairs of rows are visibly dependent up to size 100, with eight
#: up to 20.
_ROUNDS = 8


def needs_64_bits(size: int) -> bool:
    """Return whether the row numbers of a plate of this size need pairs."""
    return size > MOST_ROWS


class Pair(NamedTuple):
    """Numbers of 64 bits, as two arrays of their halves with one shape."""

    high: Array
    low: Array


def product(x: Array, y: Array) -> Pair:
    """Return the 64-bit product of two numbers of 32 bits, by the halves of each."""
    x, y = jnp.asarray(x, jnp.uint32), jnp.asarray(y, jnp.uint32)
    x_high, x_low, y_high, y_low = x >> 16, x & 0xFFFF, y >> 16, y & 0xFFFF
    low = x_low * y_low
    first = x_high * y_low + (low >> 16)
    second = x_low * y_high + (first & 0xFFFF)
    return Pair(x_high * y_high + (first >> 16) + (second >> 16), x * y)


def total(x: Pair, y: Array | Pair) -> Pair:
    """Return the sum of two numbers, modulo 2\\ :sup:`64`."""
    other = y if isinstance(y, Pair) else Pair(jnp.uint32(0), jnp.asarray(y, jnp.uint32))
    low = x.low + other.low
    return Pair(x.high + other.high + (low < x.low).astype(jnp.uint32), low)


def at_least(x: Pair, bound: int) -> Array:
    """Return whether numbers are as large as a bound."""
    high, low = map(jnp.uint32, divmod(bound, 2**32))
    return (x.high > high) | ((x.high == high) & (x.low >= low))


def minus(x: Pair, number: int) -> Pair:
    """Return the difference of 64-bit numbers and a number that is no larger."""
    high, low = map(jnp.uint32, divmod(number, 2**32))
    return Pair(x.high - high - (x.low < low).astype(jnp.uint32), x.low - low)


def counted_from(chunk: Array, apart: int, first: int, length: int) -> Pair:
    """Return rows ``first + chunk * apart + (0, ..., length - 1)`` of a traced chunk."""
    start = total(product(chunk, jnp.uint32(apart)), _pair_of(first))
    return total(Pair(*(x[None] for x in start)), jnp.arange(length, dtype=jnp.uint32))


def without_replacement(key: Array, step: Array, size: int, batch_size: int) -> Pair:
    """
    Draw ``batch_size`` distinct rows out of ``size``, independently at each step.

    A Feistel network permutes the cells :math:`(l, r)` of a rectangle with sides of about
    :math:`\\sqrt N`. Cell :math:`(l, r)` is row :math:`l b + r`.

    :param key: random key of the chain and the plate.
    :param step: number of the step, an integer scalar.
    :param int size: number of rows :math:`N`, at most 2\\ :sup:`62`.
    :param int batch_size: number of rows drawn.

    **Example:**

    .. doctest::

        >>> import jax
        >>> from numpyro_sgmcmc.data.row_numbers import as_integers, without_replacement
        >>> rows = as_integers(*without_replacement(jax.random.key(0), 7, 10**11, 1_000))
        >>> len(set(rows.tolist())), bool(4.8e10 < rows.mean() < 5.2e10)
        (1000, True)
    """
    return _permuted(random.fold_in(key, step), jnp.arange(batch_size, dtype=jnp.uint32), size)


def with_replacement(key: Array, step: Array, size: int, batch_size: int) -> Pair:
    """Draw ``batch_size`` rows, each uniform and independent of the others."""
    return _uniform(random.fold_in(key, step), (batch_size,), size)


def blocks(key: Array, step: Array, size: int, batch_size: int, count: int) -> Pair:
    """
    Draw stretches of neighbouring rows, like :func:`~numpyro_sgmcmc.data.subsampling.blocks`.

    :param int count: number of stretches.
    """
    length = batch_size // count
    first_key, stretches_key = random.split(random.fold_in(key, step))
    first = _uniform(first_key, (), size)
    stretches = _permuted(stretches_key, jnp.arange(count, dtype=jnp.uint32), size // length)
    # the sum cannot overflow: there are at most 2**62 rows, and few of them in a stretch
    within = product(stretches.low, jnp.uint32(length))
    within = within._replace(high=within.high + stretches.high * jnp.uint32(length))
    starts = total(within, Pair(*(x[None] for x in first)))
    starts = Pair(*(x[:, None] for x in starts))
    rows = total(starts, jnp.arange(length, dtype=jnp.uint32))
    is_beyond, back = at_least(rows, size), minus(rows, size)
    return Pair(*(jnp.where(is_beyond, b, x).ravel() for b, x in zip(back, rows, strict=True)))


def of_32_bits(rows: Pair) -> Pair:
    """Return the halves as ``int32`` with equal bits."""
    return Pair(*(lax.bitcast_convert_type(x, jnp.int32) for x in rows))


def as_integers(high: Any, low: Any) -> np.ndarray:
    """Return the numbers as 64-bit integers of NumPy."""
    halves = [np.asarray(x).astype(np.uint32).astype(np.int64) for x in (high, low)]
    return (halves[0] << 32) | halves[1]


def as_pair(numbers: np.ndarray) -> Pair:
    """Return 64-bit integers of NumPy as pairs of 32-bit halves."""
    halves = (numbers >> 32, numbers & 0xFFFFFFFF)
    return Pair(*(jnp.asarray(x.astype(np.uint32).view(np.int32)) for x in halves))


def _pair_of(number: int) -> Pair:
    return Pair(*map(jnp.uint32, divmod(number, 2**32)))


def _sides(size: int) -> tuple[int, int]:
    """Return the sides of a rectangle with at least ``size`` cells and less than a column more."""
    width = isqrt(size - 1) + 1
    return -(-size // width), width


def _is_outside(left: Array, right: Array, size: int, width: int) -> Array:
    row, column = map(jnp.uint32, divmod(size, width))
    return (left > row) | ((left == row) & (right >= column))


def _mix(x: Array, a: Array, b: Array) -> Array:
    """Return a keyed 32-bit integer hash: two multiplications, each followed by a shift."""
    x = (x ^ a) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 15)) * (b | 1)
    return x ^ (x >> 16)


def network(
    key: Array, sides: tuple[Any, Any], below: Callable[[Array, Any], Array]
) -> Callable[[Array, Array], tuple[Array, Array]]:
    """
    Return a keyed permutation of the cells :math:`(l, r)` of an :math:`a \\times b` rectangle.

    A round is :math:`l \\leftarrow l + F_k(r) \\bmod a`. The halves are exchanged between rounds.

    :param sides: :math:`a` and :math:`b`.
    :param below: :math:`\\lfloor x a / 2^{32} \\rfloor` of 32 random bits :math:`x` and a side.
    """
    rounds = random.bits(key, (_ROUNDS, 2), jnp.uint32)

    def walk(left: Array, right: Array) -> tuple[Array, Array]:
        a, b = sides
        for first, second in rounds:
            left = left + below(_mix(right, first, second), a)
            left = jnp.where(left >= a, left - a, left)
            left, right, a, b = right, left, b, a
        return left, right

    return walk


def _permuted(key: Array, positions: Array, size: int) -> Pair:
    """Return the images of positions under the key's permutation of all rows."""
    height, width = _sides(size)
    sides = jnp.uint32(height), jnp.uint32(width)
    walk = network(key, sides, lambda x, bound: product(x, bound).high)

    def again(now: tuple[tuple[Array, Array], Array]) -> tuple[tuple[Array, Array], Array]:
        place, outside = now
        moved = walk(*place)
        place = jnp.where(outside, moved[0], place[0]), jnp.where(outside, moved[1], place[1])
        return place, _is_outside(*place, size, width)

    begin = positions // jnp.uint32(width), positions % jnp.uint32(width)
    outside = jnp.ones(positions.shape, bool)
    (left, right), _ = lax.while_loop(lambda now: jnp.any(now[1]), again, (begin, outside))
    rows = total(product(left, jnp.uint32(width)), right)
    return lax.optimization_barrier(rows)


def _uniform(key: Array, shape: tuple[int, ...], size: int) -> Pair:
    """Draw independent rows, by rejection of cells of a rectangle beyond the last row."""
    height, width = _sides(size)

    def drawn(key: Array) -> tuple[Array, Array]:
        keys = random.split(key)
        left = random.randint(keys[0], shape, 0, height, jnp.int32)
        right = random.randint(keys[1], shape, 0, width, jnp.int32)
        return left.astype(jnp.uint32), right.astype(jnp.uint32)

    def again(tried: tuple[Array, tuple[Array, Array]]) -> tuple[Array, tuple[Array, Array]]:
        (count, place), outside = tried, _is_outside(*tried[1], size, width)
        new = drawn(random.fold_in(key, count))
        return count + 1, jax.tree.map(lambda n, x: jnp.where(outside, n, x), new, place)

    _, (left, right) = lax.while_loop(
        lambda tried: jnp.any(_is_outside(*tried[1], size, width)),
        again,
        (jnp.uint32(1), drawn(random.fold_in(key, 0))),
    )
    return total(product(left, jnp.uint32(width)), right)
