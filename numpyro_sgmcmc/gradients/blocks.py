# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Blocks of the rows of a minibatch, whose gradients show its noise."""

from collections.abc import Sequence
import math
from typing import NamedTuple

import jax
import numpy as np

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.rows import Group

#: Largest number of blocks, but for rounding and for strata, each of which needs two; and of rows
#: with those that fill up smaller blocks, relative to the rows of the minibatch.
_MOST, _MOST_ROWS = 20, 1.25


class Blocks(NamedTuple):
    """
    Blocks of neighbouring rows of a minibatch, each of one stratum.

    - **places** - numbers of the rows of each block within the minibatch, shape (B, s); a smaller
      block is filled up with its last row.
    - **weights** - relative weights of these rows, same shape, or None if all are 1. The weights
      of a block add up to :math:`s`.
    - **shares** - the part of the rows of the minibatch in each block, shape (B,).
    - **deviations** - matrix from the gradients of blocks to vectors :math:`z_k` with
      :math:`\\hat V = \\sum_k z_k z_k^\\top`, shape (K, B).
    """

    places: np.ndarray
    weights: np.ndarray | None
    shares: np.ndarray
    deviations: np.ndarray

    def of(self, rows: DrawnRows) -> DrawnRows:
        """Return the rows of each block, with leading axes of shape (B, s)."""
        shape = self.places.shape
        if self.weights is None:
            return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), rows)
        taken = jax.tree.map(lambda x: x[self.places], rows)
        weights = self.weights if taken.weights is None else self.weights * taken.weights
        return taken._replace(weights=weights)

    @property
    def rank(self) -> int:
        """The number of independent directions in the estimate of one minibatch."""
        return int(np.linalg.matrix_rank(self.deviations))


def blocks_of(strata: Sequence[Group], rows: int) -> Blocks:
    """
    Return the blocks of a minibatch.

    They are its sub-batches, or a few of them together where there are many. A minibatch with a
    prime number of rows has sub-batches of single rows. With :math:`n_h` of the :math:`n` rows in
    stratum :math:`h`, in :math:`B_h` blocks of :math:`b_k` rows,

    .. math::

        z_k = \\frac1n \\sqrt{\\frac{f_h n_h b_k}{B_h - 1}} (\\tilde g_k - \\tilde g_h) , \\qquad
        \\tilde g_h = \\frac1{n_h} \\sum_{k \\in h} b_k \\tilde g_k ,

    for which :math:`\\hat V` is unbiased whatever the sizes :math:`b_k`.

    :param strata: the sub-batches of each stratum, in order.
    :param int rows: number of rows of the minibatch, a multiple of the number of sub-batches.

    **Example:** 131 rows in blocks of 6 or 7.

    .. doctest::

        >>> from numpyro_sgmcmc.data.rows import Group
        >>> from numpyro_sgmcmc.gradients.blocks import blocks_of
        >>> blocks = blocks_of([Group(0, 131, 0.9)], 131)
        >>> blocks.places.shape, blocks.places[0].tolist(), (6 * blocks.weights[0]).tolist()
        ((19, 7), [0, 1, 2, 3, 4, 5, 5], [7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 0.0])
    """
    count = strata[-1].stop
    each = rows // count
    most = math.ceil(count / _MOST)
    choices = (_blocks(strata, each, together) for together in range(most, 0, -1))
    return next(blocks for blocks in choices if blocks.places.size <= _MOST_ROWS * rows)


def _blocks(strata: Sequence[Group], each: int, together: int) -> Blocks:
    """
    Return blocks of about equal numbers of sub-batches.

    :param int each: number of rows of a sub-batch.
    :param int together: largest number of sub-batches of a block.
    """
    count = strata[-1].stop
    rows, sizes, parts = each * count, np.empty(0, int), []
    for start, stop, factor in strata:
        own = stop - start
        number = min(own, max(math.ceil(own / together), 2 if factor > 0 else 1))
        in_block = each * np.diff(np.arange(number + 1) * own // number)
        if factor > 0:
            lengths = np.sqrt(factor * each * own * in_block / (number - 1)) / rows
            part = np.zeros((number, count))
            part[:, len(sizes) : len(sizes) + number] = np.eye(number) - in_block / (each * own)
            parts.append(lengths[:, None] * part)
        sizes = np.concatenate([sizes, in_block])
    longest = int(sizes.max())
    inside, size = np.arange(longest), sizes[:, None]
    places = np.cumsum(sizes)[:, None] - size + np.minimum(inside, size - 1)
    weights = None
    if np.ptp(sizes):
        weights = np.where(inside < size, longest / size, 0.0).astype(np.float32)
    deviations = np.concatenate(parts)[:, : len(sizes)]
    return Blocks(places, weights, sizes / rows, deviations)
