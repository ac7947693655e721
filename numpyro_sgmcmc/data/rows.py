# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
What a sampler knows of the rows of a plate, whatever they are and wherever they lie.

A kind of rows is a class. One that a word of ``subsampling`` selects has its line in
:data:`~numpyro_sgmcmc.data.subsampling.SCHEMES`; one that is known by what the rows are, or by
what a tuning has found, has it in :func:`~numpyro_sgmcmc.data.kinds.kind_of`. Devices, which draw
from their own rows, and rows that are read ahead from disk are around all of them
(:class:`~numpyro_sgmcmc.posterior.target.Target`, :mod:`~numpyro_sgmcmc.posterior.prefetch`).
"""

from typing import NamedTuple

from jax import Array

from numpyro_sgmcmc.data.drawn_rows import DrawnRows


class Group(NamedTuple):
    """
    Sub-batches of one stratum, neighbours in a minibatch.

    - **start**, **stop** - the first of them, and the first of the next ones.
    - **factor** - the finite-population factor :math:`1 - n_h / N_h`.
    """

    start: int
    stop: int
    factor: float


class Rows:
    """
    The :math:`N` rows of a plate, of which a minibatch has :math:`n`.

    - **size**, **batch_size** - :math:`N` and :math:`n`.
    - **groups** - the sub-batches that show the noise, by stratum; none where rows are drawn alike.
    - **is_interchangeable** - whether a sample of the rows, numbered anew, may stand for all.
    - **factor_so_far** - the finite-population factor where the number of rows is an array, or
      None.
    """

    size: int
    batch_size: int
    groups: tuple[Group, ...] = ()
    is_interchangeable: bool = True
    factor_so_far: Array | None = None

    def draw(self, key: Array, step: Array) -> DrawnRows:
        """
        The rows of a step, a pure function.

        :param key: random key of the chain and the plate.
        :param step: number of the step, an integer scalar.
        :return: their numbers, shape ``(n,)``; and, unless they count what :meth:`counts` says,
            their weights, with which :math:`N / n` times the sum over a minibatch is in the mean
            the sum over all rows.
        """
        raise NotImplementedError

    @property
    def factor(self) -> float:
        """The variance of a mean over a minibatch, relative to rows drawn with replacement; 0 where
        minibatches have no noise."""
        raise NotImplementedError

    def counts(self, numbers: Array) -> Array | None:
        """How often rows count in the posterior, shape ``(n,)``; None if each counts once."""
        return None

    @property
    def share(self) -> float:
        """The rows in a minibatch, as a part of all: the cost of a step in passes."""
        return self.batch_size / self.size
