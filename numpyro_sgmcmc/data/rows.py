# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Interface of the rows of a plate for samplers, for rows of any kind and place.

A kind of rows is a class. A kind that a word of ``subsampling`` selects is listed in
:data:`~numpyro_sgmcmc.data.subsampling.SCHEMES`. A kind that the rows themselves or the result of a
tuning select is listed in :func:`~numpyro_sgmcmc.data.kinds.kind_of`. Two layers wrap all kinds:
devices, which draw from their own rows (:class:`~numpyro_sgmcmc.posterior.target.Target`), and rows
that are read ahead from disk (:mod:`~numpyro_sgmcmc.posterior.prefetch`).
"""

from typing import NamedTuple

from jax import Array

from numpyro_sgmcmc.data.drawn_rows import DrawnRows


class Group(NamedTuple):
    """
    Sub-batches of one stratum, neighbours in a minibatch.

    - **start**, **stop** - number of the first sub-batch, and of the first one after the last.
    - **factor** - the finite-population factor :math:`1 - n_h / N_h`.
    """

    start: int
    stop: int
    factor: float


class Rows:
    """
    The :math:`N` rows of a plate, of which a minibatch has :math:`n`.

    - **size**, **batch_size** - :math:`N` and :math:`n`.
    - **groups** - sub-batches that show the noise, by stratum; none where rows are drawn alike.
    - **is_interchangeable** - whether a renumbered sample of the rows may stand for all rows.
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
        Draw the rows of a step, a pure function of key and step.

        :param key: random key of the chain and the plate.
        :param step: number of the step, an integer scalar.
        :return: row numbers, shape ``(n,)``, and weights, or None for the weights of
            :meth:`counts`. With the weights, the mean of :math:`N / n` times the sum over a
            minibatch is the sum over all rows.
        """
        raise NotImplementedError

    @property
    def factor(self) -> float:
        """
        The variance of a mean over a minibatch, relative to rows drawn with replacement.

        It is 0 where minibatches have no noise.
        """
        raise NotImplementedError

    def counts(self, numbers: Array) -> Array | None:
        """Return the weights of rows in the posterior, shape ``(n,)``, or None if all are 1."""
        return None

    @property
    def share(self) -> float:
        """The share of all rows in a minibatch: the cost of a step in passes."""
        return self.batch_size / self.size
