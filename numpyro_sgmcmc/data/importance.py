# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Importance minibatches: rows drawn the more often, the more noise they would make.

The :math:`n` rows of a minibatch are drawn independently, with replacement, row :math:`i` with
probability :math:`q_i`, and each has the weight :math:`1 / (n q_i)`. The gradient of the minibatch
is unbiased, whatever the probabilities are, with noise of covariance

.. math:: V = \\frac1n \\left( \\sum_i \\frac{g_i g_i^\\top}{q_i} - g g^\\top \\right) ,

where :math:`g_i` is the gradient of a row and :math:`g = \\sum_i g_i`.

**References:**

1. *On the Theory of Sampling from Finite Populations*, Morris H. Hansen and William N. Hurwitz
   (1943).
2. *Stochastic Optimization with Importance Sampling for Regularized Loss Minimization*, Peilin
   Zhao and Tong Zhang (2015).
3. *On Generating Random Variates from an Empirical Distribution*, Hui-Chuan Chen and Yoshinori
   Asau (1974).
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.strata import Group, Strata
from numpyro_sgmcmc.data.subsampling import sub_batches

#: A row is drawn by 32 random bits, so that probabilities are multiples of one over this number.
_TICKETS = 2**32


@jax.tree_util.register_static
@dataclass(frozen=True)
class Draws:
    """
    Rows of a minibatch that are drawn independently: static, a part of the compiled program.

    - **size** - the number of rows :math:`N`.
    - **batch_size** - the number of rows of a minibatch :math:`n`.
    """

    size: int
    batch_size: int

    @property
    def groups(self) -> tuple[Group, ...]:
        """All sub-batches: rows that are drawn independently are of one kind."""
        return (Group(0, sub_batches(self.batch_size), self.factor),)

    @property
    def factor(self) -> float:
        """The finite-population factor: 1, of rows drawn with replacement."""
        return 1.0


class Probabilities(NamedTuple):
    """
    With what probability each row of a plate is drawn: of :math:`2^{32}` tickets row :math:`i` has
    so many of its own, and a draw is a ticket. Weights are those of the numbers of tickets, so that
    there is no rounding in the law of a draw.

    Tickets come in blocks of a power of two, no more than any row has, so that a block is of one
    row or of two, and whose a ticket is takes one comparison (Chen and Asau, 1974).

    - **owners** - the row of the first ticket of each block, ``int32``.
    - **last** - the last ticket of each row, ``uint32``, shape ``(N,)``.
    - **weights** - :math:`1 / (N q_i)`, relative to an equal share, shape ``(N,)``.
    - **allocation** - how many rows there are, and how many are drawn.
    """

    owners: Array
    last: Array
    weights: Array
    allocation: Draws

    def __str__(self) -> str:
        weights = np.asarray(self.weights)
        least, most = 1 / weights.max(), 1 / weights.min()
        return f"{least:.3g} to {most:.3g} times an equal share"

    @property
    def kind(self) -> str:
        """What this is called in a record."""
        return "probabilities"

    @property
    def row_weights(self) -> np.ndarray:
        """
        For each row how many rows it stands for in a minibatch that has it, shape ``(N,)``; 1 for
        those that are drawn about once or more often.
        """
        share = self.allocation.size / self.allocation.batch_size
        return np.maximum(1.0, share * np.asarray(self.weights, np.float64))

    def weights_of(self, rows: Array) -> Array:
        """The relative weights of the rows of a minibatch, shape ``(n,)``."""
        return self.weights.at[rows].get(mode="promise_in_bounds")

    def rows_of(self, tickets: Array) -> Array:
        """Whose tickets these are, ``int32`` of the shape of the ``uint32`` tickets."""
        block = tickets >> (33 - len(self.owners).bit_length())
        row = self.owners.at[block].get(mode="promise_in_bounds")
        return row + (tickets > self.last.at[row].get(mode="promise_in_bounds"))

    def draw(self, key: Array, step: Array) -> Array:
        """
        The rows of a minibatch, independently of each other and at each step.

        :param key: random key of the chain and the plate.
        :param step: number of the step, an integer scalar.
        :return: ``int32`` array of shape ``(n,)``.
        """
        shape = (self.allocation.batch_size,)
        return self.rows_of(random.bits(random.fold_in(key, step), shape, jnp.uint32))


#: How the rows of a plate are drawn that are not drawn alike.
SamplingDesign = Strata | Probabilities


def probabilities_of(importance: np.ndarray, batch_size: int) -> Probabilities:
    """
    Probabilities for rows of this importance, so that minibatches have little noise: half in
    proportion to it, and half in equal shares,

    .. math:: q_i = \\frac12 \\left( \\frac{r_i}{\\sum_j r_j} + \\frac1N \\right) ,

    so that no row counts more than twice what it would if rows were drawn alike.

    :param importance: :math:`r_i \\ge 0`, the root mean square of the noise that a row would make,
        shape ``(N,)``.
    :param int batch_size: the number of rows of a minibatch :math:`n`.

    **Example:** ten rows of a thousand are a hundred times as important.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_sgmcmc.data.importance import probabilities_of
        >>> print(probabilities_of(np.where(np.arange(1_000) < 10, 100.0, 1.0), batch_size=100))
        0.751 to 25.6 times an equal share
    """
    size = len(importance)
    shares = np.full(size, 1 / size)
    if (total := importance.sum(dtype=np.float64)) > 0:
        shares = (shares + importance / total) / 2
    tickets = _rounded(shares * _TICKETS)
    last = np.cumsum(tickets) - 1
    # the number of a block has a bit at least
    of_block = 2 ** min(int(tickets.min()).bit_length() - 1, 31)
    begun = last // of_block + 1
    owners = np.repeat(np.arange(size), np.diff(begun, prepend=0))
    return Probabilities(
        jnp.asarray(owners, jnp.int32),
        jnp.asarray(last.astype(np.uint32)),
        jnp.asarray(_TICKETS / (size * tickets), jnp.result_type(float)),
        Draws(size, batch_size),
    )


def _rounded(quotas: np.ndarray) -> np.ndarray:
    """Whole numbers of the same sum, by the method of largest remainders."""
    counts = np.floor(quotas).astype(np.int64)
    left = _TICKETS - int(counts.sum())
    counts[np.argsort(counts - quotas, kind="stable")[:left]] += 1
    return counts
