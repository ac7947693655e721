# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Stratified minibatches: each stratum of the rows has its own number of places.

A minibatch has :math:`n_h` of the :math:`N_h` rows of stratum :math:`h`, drawn without
replacement, each with the weight :math:`N_h / n_h`. The gradient of the minibatch is unbiased for
any strata, with noise of covariance

.. math:: V = \\sum_h \\frac{N_h^2}{n_h} \\left(1 - \\frac{n_h}{N_h}\\right) S_h^2 ,

where :math:`S_h^2` is the covariance of the gradients of the rows within the stratum. A stratum
with :math:`n_h = N_h` is taken whole and has no noise.

**References:**

1. *Sampling Techniques*, William G. Cochran (1977), chapters 5 and 5A.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.rows import Group, Rows
from numpyro_sgmcmc.data.subsampling import permute, sub_batches


@jax.tree_util.register_static
@dataclass(frozen=True)
class Allocation:
    """
    Allocation of the places of a minibatch to strata: static, a part of the compiled program.

    A minibatch consists of sub-batches of equal size, each of rows of one stratum, so that their
    gradients show the noise within the strata. A stratum that is taken whole is filled up with
    rows of weight zero.

    - **sizes** - number of rows of each stratum :math:`N_h`.
    - **counts** - number of places of each stratum in a minibatch, multiples of ``sub_batch``:
      :math:`n_h < N_h`, or at least :math:`N_h` if the stratum is taken whole.
    - **sub_batch** - number of rows of a sub-batch.
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    sub_batch: int

    @property
    def size(self) -> int:
        """The number of rows :math:`N`."""
        return sum(self.sizes)

    @property
    def batch_size(self) -> int:
        """The number of places in a minibatch :math:`n`."""
        return sum(self.counts)

    @cached_property
    def weights(self) -> np.ndarray:
        """
        The relative weights of the rows of a minibatch, shape ``(n,)``.

        A weight is :math:`N_h / n_h` relative to the :math:`N / n` of an equal share.
        """
        parts = []
        for size, count in zip(self.sizes, self.counts, strict=True):
            drawn = min(size, count)
            weight = size / drawn * self.batch_size / self.size
            parts.append(np.where(np.arange(count) < drawn, weight, 0.0))
        return np.concatenate(parts)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The sub-batches of each stratum."""
        stops = np.cumsum(self.counts) // self.sub_batch
        starts = [0, *stops[:-1].tolist()]
        factors = [max(0.0, 1 - n / size) for n, size in zip(self.counts, self.sizes, strict=True)]
        return tuple(map(Group, starts, stops.tolist(), factors))

    @property
    def factor(self) -> float:
        """The largest finite-population factor; 0 if all rows are taken."""
        return max(group.factor for group in self.groups)


class Strata(NamedTuple):
    """
    Strata of the rows of a plate.

    - **order** - numbers of all rows, sorted by stratum, ``int32``, shape ``(N,)``.
    - **allocation** - sizes of the strata, and their places in a minibatch.
    """

    order: Array
    allocation: Allocation

    def __str__(self) -> str:
        allocation, words = self.allocation, []
        pairs = list(zip(allocation.sizes, allocation.counts, strict=True))
        whole = [size for size, count in pairs if count >= size]
        drawn = [(count, size) for size, count in pairs if count < size]
        if whole:
            words.append(f"{sum(whole):,} rows in every minibatch")
        words += [f"{count:,} of {size:,}" for count, size in drawn]
        return ", ".join(words)

    @property
    def row_weights(self) -> np.ndarray:
        """The number of rows that each row represents in a minibatch, shape ``(N,)``."""
        sizes, counts = self.allocation.sizes, self.allocation.counts
        each = [max(1.0, size / count) for size, count in zip(sizes, counts, strict=True)]
        weights = np.empty(self.allocation.size)
        weights[np.asarray(self.order)] = np.repeat(each, sizes)
        return weights

    @property
    def weights(self) -> Array:
        """The relative weights of the places of a minibatch, shape ``(n,)``."""
        return jnp.asarray(self.allocation.weights, jnp.result_type(float))

    def draw(self, key: Array, step: Array) -> Array:
        """
        Draw the rows of a minibatch, stratum by stratum, independently at each step.

        :param key: random key of the chain and the plate.
        :param step: number of the step, an integer scalar.
        :return: ``int32`` array of shape ``(n,)``.
        """
        sizes, counts = self.allocation.sizes, self.allocation.counts
        keys = random.split(random.fold_in(key, step), len(sizes))
        parts, start = [], 0
        for stratum_key, size, count in zip(keys, sizes, counts, strict=True):
            if count < size:
                positions = permute(stratum_key, jnp.arange(count), size)
            else:
                positions = jnp.minimum(jnp.arange(count), size - 1)
            parts.append(start + positions)
            start += size
        return self.order.at[jnp.concatenate(parts)].get(mode="promise_in_bounds")


class Stratified(Rows):
    """Rows in strata, each with its own number of places in a minibatch."""

    def __init__(self, strata: Strata) -> None:
        self.strata, allocation = strata, strata.allocation
        self.size, self.batch_size = allocation.size, allocation.batch_size
        self.groups = allocation.groups

    @property
    def factor(self) -> float:
        return self.strata.allocation.factor

    def draw(self, key: Array, step: Array) -> DrawnRows:
        return DrawnRows(self.strata.draw(key, step), weights=self.strata.weights)


#: Smallest number of sub-batches of a stratum that is not taken whole: two show a spread.
_FEWEST_OF_A_STRATUM = 2

#: Number of strata by importance, besides the one that is taken whole. A fourth would reduce the
#: noise by a tenth. Each stratum costs a step two microseconds.
_STRATA = 3


def by_importance(importance: np.ndarray, batch_size: int) -> Strata:
    """
    Return strata of rows of similar importance, so that minibatches have little noise.

    The most important rows are taken whole. The other rows are divided into three strata with equal
    numbers of places in a minibatch. The probability of a row is in proportion to
    :math:`r_i + \\bar r` for its importance :math:`r_i`. Half of the places go by importance, which
    is the allocation of Neyman (1934). Half go in equal shares, so that the weight of a row at most
    doubles compared to no strata. The number of rows taken whole is the one for which the variance

    .. math:: \\sum_h N_h \\left( \\frac{1}{p_h} - 1 \\right) \\overline{r_h^2},
        \\qquad p_h = n_h / N_h,

    is smallest.

    :param importance: :math:`r_i \\ge 0`, root mean square of the noise of each row, shape
        ``(N,)``.
    :param int batch_size: number of rows of a minibatch :math:`n < N`.

    **References:**

    1. *On the Two Different Aspects of the Representative Method*, Jerzy Neyman (1934).

    **Example:** ten rows of a thousand are a hundred times as important.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_sgmcmc.data.strata import by_importance
        >>> print(by_importance(np.where(np.arange(1_000) < 10, 100.0, 1.0), batch_size=100))
        10 rows in every minibatch, 30 of 330, 30 of 330, 30 of 330
    """
    size, total = len(importance), sub_batches(batch_size)
    each = batch_size // total
    order = np.argsort(-importance, kind="stable")
    sorted_importance = importance[order].astype(np.float64)
    sums, squares = (np.cumsum(np.append(0.0, sorted_importance**k)) for k in (1, 2))
    numbers = np.arange(size + 1)
    best, smallest = None, np.inf
    for whole in range(total - _FEWEST_OF_A_STRATUM + 1):
        first, places = whole * each, total - whole
        shares, left = (numbers - first) / (size - first), sums[-1] - sums[first]
        if left > 0:
            shares = (shares + (sums - sums[first]) / left) / 2
        count = min(_STRATA, places // _FEWEST_OF_A_STRATUM)
        stops = np.arange(1, count + 1) * places // count
        bounds = np.searchsorted(shares, stops[:-1] / places)
        bounds = np.concatenate([[first], bounds, [size]])
        sizes, counts = np.diff(bounds), np.diff(stops, prepend=0) * each
        if np.any(sizes <= counts):
            continue
        weights = sizes / counts
        variance = np.sum((weights - 1) * np.diff(squares[bounds]))
        if variance < smallest:
            smallest = variance
            best = [first] * (first > 0) + sizes.tolist(), [first] * (first > 0) + counts.tolist()
    assert best is not None
    allocation = Allocation(tuple(best[0]), tuple(best[1]), each)
    return Strata(jnp.asarray(order, jnp.int32), allocation)


def by_labels(
    labels: np.ndarray,
    batch_size: int,
    importance: np.ndarray | None = None,
    where: str = "The plate",
) -> Strata:
    """
    Return the strata of rows by their labels.

    Places in a minibatch are allocated by the number of rows of a stratum. If the importance of the
    rows is known, half of the places are allocated by its sum over the stratum, as in
    :func:`by_importance`. A stratum has at least two sub-batches, and is taken whole if it has no
    more rows than places.

    :param labels: stratum number of each row, shape ``(N,)``.
    :param int batch_size: number of rows of a minibatch.
    :param importance: :math:`r_i` of each row, shape ``(N,)``, or None.
    :param str where: name of the plate in errors.
    :raises ValueError: if a minibatch cannot hold all strata.
    """
    _, stratum, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    total = sub_batches(batch_size)
    each = batch_size // total
    shares = sizes / len(labels)
    if importance is not None and importance.sum() > 0:
        shares = (shares + np.bincount(stratum, importance) / importance.sum()) / 2
    whole = np.zeros(len(sizes), bool)
    while True:
        first = -(-int(sizes[whole].sum()) // each)
        drawn = np.flatnonzero(~whole)
        if first + _FEWEST_OF_A_STRATUM * len(drawn) > total:
            raise ValueError(
                f"{where} has {len(sizes)} strata, too many for minibatches of {batch_size} rows"
                f" in {total} sub-batches of {each}. Each stratum needs {_FEWEST_OF_A_STRATUM}"
                f" sub-batches; small strata, which are taken whole, need {first} together. Merge"
                " strata, or use a larger `subsample_size`."
            )
        counts = each * _apportioned(shares[drawn], total - first)
        small = sizes[drawn] <= counts
        if not np.any(small):
            break
        whole[drawn[small]] = True
    taken = [int(sizes[whole].sum())] * bool(whole.any())
    places = [first * each] * bool(whole.any())
    allocation = Allocation((*taken, *sizes[drawn].tolist()), (*places, *counts.tolist()), each)
    rank = np.where(whole, -1, np.arange(len(sizes)))
    order = np.argsort(rank[stratum], kind="stable")
    return Strata(jnp.asarray(order, jnp.int32), allocation)


def _apportioned(shares: np.ndarray, places: int) -> np.ndarray:
    """Apportion places to shares by the method of Webster, at least two to each share."""
    counts = np.full(len(shares), _FEWEST_OF_A_STRATUM)
    for _ in range(places - counts.sum() if len(shares) else 0):
        counts[np.argmax(shares / (counts + 0.5))] += 1
    return counts
