# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Schemes that draw the rows of a minibatch inside a step.

The cost does not depend on the number of rows :math:`N`.

Every scheme is a pure function ``draw(key, step, size, batch_size)`` that returns an
``int32`` array of shape ``(batch_size,)`` with values in ``[0, size)``. The stream of
minibatches is a function of the key and the step alone, so that it can be replayed,
resumed, or computed ahead of the sampler. No scheme keeps a state.

Rows are drawn without replacement through a keyed bijection of ``{0, ..., size - 1}``,
evaluated only at the requested positions: a Feistel network on a rectangle of at least
``size`` cells, repeated on positions that fall outside ("cycle walking").

**References:**

1. *Ciphers with Arbitrary Finite Domains*, section 4,
   John Black and Phillip Rogaway (2002).
"""

from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_sgmcmc.data import row_numbers
from numpyro_sgmcmc.data.drawn_rows import DrawnRows, far_rows
from numpyro_sgmcmc.data.row_numbers import Pair, network
from numpyro_sgmcmc.data.rows import Rows

#: Smallest number of sub-batches: fewer make a noisier estimate, more make a dearer gradient.
_FEWEST_SUB_BATCHES = 10

#: Largest number of rows for a plain shuffle; above 64 it would cost more than the network.
_SHUFFLE_BELOW = 32


def _below(x: Array, bound: Any) -> Array:
    """Map 32 random bits to ``[0, bound)`` for ``bound <= 2**16``: floor(x bound / 2**32)."""
    high, low = x >> 16, x & 0xFFFF
    return (high * bound + ((low * bound) >> 16)) >> 16


def _rectangle(size: int) -> tuple[int, int]:
    """Return the sides of a nearly square rectangle of few more than ``size`` cells."""
    root = isqrt(size - 1) + 1
    sides = ((a, -(-size // a)) for a in range(root, min(root + root // 2, 2**16) + 1))
    return min(sides, key=lambda side: side[0] * side[1])


# under `jit` it is traced and lowered once, instead of in each program that draws rows
@partial(jax.jit, static_argnames="size")
def permute(key: Array, positions: Array, size: int) -> Array:
    """
    Return the images of ``positions`` under the key's permutation of ``{0, ..., size - 1}``.

    A position :math:`x = l\\,b + r` on an :math:`a \\times b` rectangle goes through
    rounds :math:`l \\leftarrow l + F_k(r) \\bmod a`, with the halves exchanged between
    rounds. Positions that leave ``[0, size)`` are mapped again until they return.

    :param key: random key; batches of keys go through :func:`jax.vmap`.
    :param positions: integers in ``[0, size)``, any shape.
    :param int size: number of elements permuted, at most ``2**31 - 1``.
    :return: ``int32`` array of the shape of ``positions``, distinct where these are.
    """
    if size <= _SHUFFLE_BELOW:
        return random.permutation(key, jnp.arange(size, dtype=jnp.int32))[positions]
    return _permuted(key, positions, size, _rectangle(size))


def _permuted(key: Array, positions: Array, size: Any, sides: tuple[Any, Any]) -> Array:
    """Return :func:`permute` by the network on a rectangle with these sides."""
    of_cells = network(key, sides, _below)

    def walk(x: Array) -> Array:
        left, right = of_cells(x // sides[1], x % sides[1])
        return left * sides[1] + right

    # All rounds are in the loop. The rounds of the first walk outside of it would double the
    # program, and without a loop XLA writes them out anew for every use of the rows.
    def again(now: tuple[Array, Array]) -> tuple[Array, Array]:
        x, is_outside = now
        x = jnp.where(is_outside, walk(x), x)
        return x, x >= size

    begin = positions.astype(jnp.uint32), jnp.ones(positions.shape, bool)
    image, _ = lax.while_loop(lambda now: jnp.any(now[1]), again, begin)
    return lax.optimization_barrier(image.astype(jnp.int32))


def without_replacement(key: Array, step: Array, size: int, batch_size: int) -> Array:
    """
    Draw ``batch_size`` distinct rows, independently at each step.

    Above 32 rows the keyed bijection replaces a shuffle. Every ordered pair of rows is equally
    likely as far as tests can tell, so that a sum over the rows has the mean and the covariance of
    a shuffle. Larger subsets are not claimed to be uniform.

    :param key: random key of the chain and the plate.
    :param step: number of the step, an integer scalar.
    :param int size: number of rows :math:`N`.
    :param int batch_size: number of rows drawn :math:`n \\le N`.
    :return: ``int32`` array of shape ``(batch_size,)``.

    **Example:**

    .. doctest::

        >>> import jax
        >>> from numpyro_sgmcmc.data.subsampling import without_replacement
        >>> rows = without_replacement(jax.random.key(0), 7, size=1_000_000, batch_size=5)
        >>> len(set(rows.tolist()))
        5
    """
    if batch_size == size:
        return jnp.arange(size, dtype=jnp.int32)
    return permute(random.fold_in(key, step), jnp.arange(batch_size), size)


def without_replacement_so_far(key: Array, step: Array, size: Array, batch_size: int) -> Array:
    """
    Draw distinct rows of a plate whose number of rows is a traced array.

    It is :func:`without_replacement` for at least 100 rows, and at least ``batch_size`` rows.
    """
    count = size.astype(jnp.uint32)
    # at most the last row of the rectangle is beyond the end
    width = jnp.ceil(jnp.sqrt(count.astype(jnp.float32))).astype(jnp.uint32)
    sides = (count + width - 1) // width, width
    return _permuted(random.fold_in(key, step), jnp.arange(batch_size), count, sides)


def with_replacement(key: Array, step: Array, size: Any, batch_size: int) -> Array:
    """
    Draw ``batch_size`` rows, each uniform on ``[0, size)`` and independent of the others.

    Parameters and result are as in :func:`without_replacement`.
    """
    return random.randint(random.fold_in(key, step), (batch_size,), 0, size, jnp.int32)


def epochs(key: Array, step: Array, size: int, batch_size: int) -> Array:
    """
    Draw rows in shuffled epochs: each row exactly once in every ``size`` rows drawn.

    The steps read one endless stream of rows, ``batch_size`` at a time. Its ``e``-th
    stretch of ``size`` rows is a permutation that belongs to ``e``. A minibatch that
    straddles two stretches takes rows from both, so ``batch_size`` need not divide
    ``size``.

    Parameters and result are as in :func:`without_replacement`. Minibatches of one
    epoch are anti-correlated: the noise of the gradient is smaller than the noise of
    independent minibatches and must not be corrected for as if they were.
    """
    if batch_size == size:
        return jnp.arange(size, dtype=jnp.int32)
    step = jnp.asarray(step, jnp.uint32)
    cycle, step = step // size, step % size
    epoch, start = _multiply_divmod(step, batch_size, size)
    epoch = epoch + cycle * jnp.uint32(batch_size)
    position = start + jnp.arange(batch_size, dtype=jnp.uint32)
    later = position >= size
    position = jnp.where(later, position - size, position)
    # one program serves both epochs
    keys = jax.vmap(random.fold_in, (None, 0))(key, epoch + jnp.arange(2, dtype=jnp.uint32))
    this, following = jax.vmap(permute, (0, None, None))(keys, position, size)
    return jnp.where(later, following, this)


def symmetric_sweeps(key: Array, step: Array, size: int, batch_size: int) -> Array:
    """
    Draw rows in symmetric sweeps, forward and backward through a random partition.

    With :math:`m = N / n` minibatches, a sweep has the steps :math:`1, \\dots, m, m, \\dots, 1`.
    Each sweep has a new partition. The noises of the gradient in a sweep cancel to second order in
    the step size (Paulin et al., 2024).

    Parameters and result are as in :func:`without_replacement`; ``batch_size`` must divide
    ``size``. The noise must not be corrected for as if minibatches were independent.

    :raises ValueError: if the rows cannot be divided into minibatches of this size.
    """
    if size % batch_size:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - batch_size))
        raise ValueError(
            f"Symmetric sweeps need a `subsample_size` that divides the {size} rows of the plate,"
            f" and {batch_size} does not. Use {nearest}, the nearest one that does."
        )
    if batch_size == size:
        return jnp.arange(size, dtype=jnp.int32)
    batches = size // batch_size
    sweep, turn = jnp.divmod(jnp.asarray(step, jnp.uint32), jnp.uint32(2 * batches))
    batch = jnp.where(turn < batches, turn, 2 * batches - 1 - turn)
    positions = batch * jnp.uint32(batch_size) + jnp.arange(batch_size, dtype=jnp.uint32)
    return permute(random.fold_in(key, sweep), positions, size)


def blocks(key: Array, step: Array, size: int, batch_size: int) -> Array:
    """
    Draw contiguous blocks of neighbouring rows, independently at each step.

    There are :math:`m` stretches of :math:`n / m` rows, with :math:`m` as in :func:`sub_batches`.
    The rows are a circle that is cut at a random place into stretches of this length, and
    :math:`m` stretches are drawn without replacement. All rows are equally likely, whether or not
    the length divides :math:`N`.

    Reading neighbouring rows costs a disk or a memory much less than reading scattered rows. If
    neighbouring rows are no more alike than others, the noise of the gradient is that of
    :func:`without_replacement`. If they are alike, as in sorted data, the noise is larger by up to
    the length of a stretch: shuffle the rows once.

    Parameters and result are as in :func:`without_replacement`. The noise must be estimated
    from whole stretches (:func:`~numpyro_sgmcmc.gradients.estimators.sub_batch_gradient`).

    **References:**

    1. *Sampling Techniques*, William G. Cochran (1977), chapter 9.

    **Example:**

    .. doctest::

        >>> import jax
        >>> from numpyro_sgmcmc.data.subsampling import blocks
        >>> rows = blocks(jax.random.key(0), 7, size=1_000_000, batch_size=30)
        >>> (rows.reshape(10, 3) - rows[::3, None]).tolist()[:2]
        [[0, 1, 2], [0, 1, 2]]
    """
    if batch_size == size:
        return jnp.arange(size, dtype=jnp.int32)
    count = sub_batches(batch_size)
    length = batch_size // count
    first_key, stretches_key = random.split(random.fold_in(key, step))
    first = random.randint(first_key, (), 0, size, jnp.int32).astype(jnp.uint32)
    stretches = permute(stretches_key, jnp.arange(count), size // length).astype(jnp.uint32)
    rows = first + (stretches[:, None] * length + jnp.arange(length, dtype=jnp.uint32)).ravel()
    return jnp.where(rows >= size, rows - size, rows).astype(jnp.int32)


def _far_blocks(key: Array, step: Array, size: int, batch_size: int) -> Pair:
    return row_numbers.blocks(key, step, size, batch_size, sub_batches(batch_size))


def sub_batches(batch_size: int) -> int:
    """
    Return the number of sub-batches of a minibatch.

    It is the smallest divisor of ``batch_size`` that is at least 10, or ``batch_size`` itself if it
    is smaller.

    :raises ValueError: if there is a single row, which shows no spread.
    """
    if batch_size < 2:
        raise ValueError(
            "The noise of the gradient cannot be estimated from minibatches of one row. Use a"
            " `subsample_size` of at least 2 for each of the devices that rows are spread over."
        )
    fewest = min(_FEWEST_SUB_BATCHES, batch_size)
    return next(m for m in range(fewest, batch_size + 1) if batch_size % m == 0)


def _multiply_divmod(x: Array, factor: int, divisor: int) -> tuple[Array, Array]:
    """Return ``divmod(x * factor, divisor)`` for ``x < divisor < 2**31`` in 32 bits."""
    quotient, remainder = jnp.uint32(0), jnp.uint32(0)
    for bit in f"{factor:b}":
        quotient, remainder = 2 * quotient, 2 * remainder
        carry = remainder >= divisor
        quotient, remainder = quotient + carry, remainder - carry * jnp.uint32(divisor)
        if bit == "1":
            remainder = remainder + x
            carry = remainder >= divisor
            quotient, remainder = quotient + carry, remainder - carry * jnp.uint32(divisor)
    return quotient, remainder


class DrawnAlike(Rows):
    """Rows that a scheme draws with equal probabilities."""

    def __init__(self, scheme: "Scheme", size: int, batch_size: int) -> None:
        self.scheme, self.size, self.batch_size = scheme, size, batch_size

    def draw(self, key: Array, step: Array) -> DrawnRows:
        return DrawnRows(self.scheme.draw(key, step, self.size, self.batch_size))

    @property
    def factor(self) -> float:
        return float(self.scheme.factor(self.size, self.batch_size))


class FarRows(DrawnAlike):
    """Rows of a plate of more than 2\\ :sup:`31` rows, with row numbers in pairs."""

    def draw(self, key: Array, step: Array) -> DrawnRows:
        assert self.scheme.draw_far is not None
        return far_rows(self.scheme.draw_far(key, step, self.size, self.batch_size))


class Scheme(NamedTuple):
    """
    Scheme of subsampling: its functions and its properties.

    - **draw** - the function that draws the rows of a step.
    - **independent** - whether the minibatches of different steps are independent, so that the
      noise of their gradients can be estimated and corrected for.
    - **distinct** - whether no row is drawn twice into a minibatch.
    - **blocks** - whether neighbouring rows are drawn together, so that the noise must be
      estimated from whole blocks.
    - **draw_so_far** - ``draw`` for a number of rows that is an array, or None.
    - **draw_far** - ``draw`` for more than 2\\ :sup:`31` rows, or None.
    - **kind** - the class of the rows, a special one if rows differ in probability or weight.
    """

    draw: Callable[[Array, Array, int, int], Array]
    independent: bool = True
    distinct: bool = True
    blocks: bool = False
    draw_so_far: Callable[[Array, Array, Array, int], Array] | None = None
    draw_far: Callable[[Array, Array, int, int], Pair] | None = None
    kind: Callable[["Scheme", int, int], Rows] = DrawnAlike

    def rows(self, size: int, batch_size: int) -> Rows:
        """Return the rows of a plate that this scheme draws."""
        kind = FarRows if row_numbers.needs_64_bits(size) else self.kind
        return kind(self, size, batch_size)

    def factor(self, size: Any, batch_size: int) -> Any:
        """
        Return the variance of a mean over a minibatch, relative to rows drawn with replacement.

        It is :math:`1 - n / N` if rows or blocks of rows are drawn without replacement, and 1
        otherwise. It is 1 for minibatches that are not independent, whose noise is never corrected
        for.

        It goes with the sample variance that has :math:`n - 1` in its denominator.
        """
        return 1.0 - batch_size / size if self.distinct and self.independent else 1.0


#: Schemes by the word that selects them.
SCHEMES: dict[str, Scheme] = {
    "without_replacement": Scheme(
        without_replacement,
        draw_so_far=without_replacement_so_far,
        draw_far=row_numbers.without_replacement,
    ),
    "with_replacement": Scheme(
        with_replacement,
        distinct=False,
        draw_so_far=with_replacement,
        draw_far=row_numbers.with_replacement,
    ),
    "epochs": Scheme(epochs, independent=False),
    "symmetric_sweeps": Scheme(symmetric_sweeps, independent=False),
    "blocks": Scheme(blocks, blocks=True, draw_far=_far_blocks),
}
