# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Which rows belong to each group, as an array that a plate of the groups can index."""

from typing import Any, NamedTuple
import warnings

import numpy as np

#: Of so many entries for each row something is said.
_MUCH_PADDING = 4.0


class GroupRows(NamedTuple):
    """
    - **members** - the numbers of the rows of each group, shape (groups, rows in the largest);
      where a group has fewer, its first row again.
    - **observed** - whether an entry is a row, of the same shape: for ``.mask(observed[g])``.
    """

    members: np.ndarray
    observed: np.ndarray


def group_rows(group: Any) -> GroupRows:
    """
    The rows of each group, for models whose subsampled plate is that of the groups.

    A step of a sampler computes all entries, those that are no rows too: with groups of very
    different sizes most of its time may go into these, which a warning then says.

    :param group: of each row the number of its group, integers from 0, shape (rows,).
    :return: the table of rows, and which of its entries are rows.
    :raises ValueError: if a number is negative, or a group has no rows.

    **Example:** students, and all that is known of each inside of the plate.

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_sgmcmc import group_rows

        >>> def model(y, members, observed):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     tau = numpyro.sample("tau", dist.HalfNormal(1))
        ...     with numpyro.plate("students", len(members), subsample_size=2) as g:
        ...         ability = numpyro.sample("ability", dist.Normal(mu, tau))
        ...         with numpyro.plate("answers", members.shape[1]):
        ...             row = members[g].T
        ...             right = dist.Bernoulli(logits=ability).expand(row.shape)
        ...             numpyro.sample("y", right.mask(observed[g].T), obs=y[row])

        >>> members, observed = group_rows([0, 1, 1, 2, 0, 0])
        >>> members.tolist()
        [[0, 4, 5], [1, 2, 1], [3, 3, 3]]
        >>> observed.sum(1).tolist()
        [3, 2, 1]
    """
    numbers = np.asarray(group)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not numbers.size:
        raise ValueError(
            "`group` must be whole numbers, one for each row, and has the shape"
            f" {numbers.shape} and the dtype {numbers.dtype}: `numpy.unique(names,"
            " return_inverse=True)[1]` makes numbers of names."
        )
    sizes = np.bincount(numbers) if numbers.min() >= 0 else np.zeros(1, int)
    if not sizes.all():
        missing = "negative ones" if numbers.min() < 0 else f"no rows of {np.argmin(sizes)}"
        raise ValueError(
            f"The numbers of the groups must be 0, 1, ... without a gap, and there are {missing}:"
            " `numpy.unique(group, return_inverse=True)[1]` numbers those that there are."
        )
    order = np.argsort(numbers, kind="stable")
    first = np.cumsum(sizes) - sizes
    observed = np.arange(sizes.max()) < sizes[:, None]
    members = order[first[:, None] + np.where(observed, np.arange(sizes.max()), 0)]
    if (padding := observed.size / len(numbers)) > _MUCH_PADDING:
        warnings.warn(
            f"The largest of {len(sizes):,} groups has {sizes.max():,} rows and the median"
            f" {np.median(sizes):,.0f}: a step computes {padding:.1f} entries for each row. Split"
            " the groups by size into two tables, and give each a plate and sites of its own.",
            stacklevel=2,
        )
    return GroupRows(members.astype(np.int32), observed)
