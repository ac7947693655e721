# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Tables of the rows of each group, as arrays that plates of groups can index."""

from typing import Any, NamedTuple, overload
import warnings

import numpy as np

from numpyro_sgmcmc.data.converters import array, whole

#: Entries for each row above which a warning is given, and entries that are few enough.
_MUCH_PADDING, _LITTLE_PADDING = 4.0, 1.5

#: Tables that a warning recommends at most: each makes the program of a step longer.
_MOST_RECOMMENDED = 8


class GroupRows(NamedTuple):
    """
    Table of the row numbers of each group.

    - **members** - row numbers of each group, shape (groups, rows in the largest); a smaller group
      is filled up with its first row.
    - **observed** - whether an entry is a row, same shape: for ``.mask(observed[g])``.
    """

    members: np.ndarray
    observed: np.ndarray


class Bucket(NamedTuple):
    """
    Table of the row numbers of groups of similar sizes.

    - **members** - as in :class:`GroupRows`, shape (groups of the table, rows in the largest).
    - **observed** - whether an entry is a row, same shape.
    - **groups** - numbers of its groups among all groups, ascending, shape (groups of the table,).
    """

    members: np.ndarray
    observed: np.ndarray
    groups: np.ndarray


@overload
def group_rows(group: Any) -> GroupRows: ...
@overload
def group_rows(group: Any, buckets: None) -> GroupRows: ...
@overload
def group_rows(group: Any, buckets: int) -> tuple[Bucket, ...]: ...
def group_rows(group: Any, buckets: int | None = None) -> GroupRows | tuple[Bucket, ...]:
    """
    Return the rows of each group, for models that subsample a plate of groups.

    A step of a sampler computes all entries of the table, padding included. With groups of very
    different sizes most time may go into padding, and a warning says so. Several tables by
    size, ``buckets``, have less padding. The division of the groups into tables has the fewest

    .. math:: \\sum_b G_b \\max_{g \\in b} m_g

    entries, for :math:`G_b` groups in table :math:`b`, and :math:`m_g` rows in group :math:`g`. The
    model has a plate and latent sites of its own for each table, in a loop.

    :param group: group number of each row, integers from 0, shape (rows,).
    :param buckets: largest number of tables. There are fewer tables if there are fewer different
        sizes. None gives one table of all groups instead of a tuple.
    :return: the table of row numbers and the mask of its entries. With ``buckets`` a tuple of such
        tables, from small groups to large ones, each with the numbers of its groups.
    :raises ValueError: if a number is negative, if a group has no rows, or if ``buckets`` is not a
        whole number from 1.

    **Example:** a plate of students, with the answers of each student inside of it.

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

    Two tables, the first of the groups 1 and 2:

    .. doctest::

        >>> few, many = group_rows([0, 1, 1, 2, 0, 0, 0], buckets=2)
        >>> few.groups.tolist(), few.members.tolist()
        ([1, 2], [[1, 2], [3, 3]])
        >>> many.groups.tolist(), many.members.tolist()
        ([0], [[0, 4, 5, 6]])
    """
    numbers = array("group", group)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not numbers.size:
        raise ValueError(
            "`group` must be a vector with the whole number of the group of each row; got dtype"
            f" {numbers.dtype} and shape {numbers.shape}. For names pass `numpy.unique(names,"
            " return_inverse=True)[1]`."
        )
    most = None if buckets is None else whole("buckets", buckets)
    sizes = np.bincount(numbers) if numbers.min() >= 0 else np.zeros(1, int)
    if not sizes.all():
        missing = (
            "some numbers are negative"
            if numbers.min() < 0
            else f"group {np.argmin(sizes)} has no rows"
        )
        raise ValueError(
            f"The groups must be numbered 0, 1, ... without a gap, but {missing}. Pass"
            " `numpy.unique(group, return_inverse=True)[1]`."
        )
    order = np.argsort(numbers, kind="stable")
    first = np.cumsum(sizes) - sizes
    tables, lower = [], 0
    for largest in _largest_of_buckets(sizes, most or 1):
        groups = np.flatnonzero((sizes > lower) & (sizes <= largest))
        observed = np.arange(largest) < sizes[groups, None]
        members = order[first[groups, None] + np.where(observed, np.arange(largest), 0)]
        tables.append(Bucket(members.astype(np.int32), observed, groups.astype(np.int32)))
        lower = largest
    _warn_of_padding(sizes, sum(table.observed.size for table in tables))
    return GroupRows(*tables[0][:2]) if most is None else tuple(tables)


def _largest_of_buckets(sizes: np.ndarray, buckets: int) -> list[int]:
    """
    Return the largest group size of each bucket, ascending, for the fewest entries.

    It is a dynamic program. The best :math:`k` buckets of the groups up to a size are the best
    :math:`k - 1` buckets of the groups up to a smaller size, and a last bucket of the rest. For
    distinct sizes :math:`s_1 < s_2 < ...`, with :math:`C_j` groups of size :math:`s_j` or less,

    .. math:: E_k(j) = \\min_{i < j} E_{k - 1}(i) + s_j (C_j - C_i) .
    """
    distinct, counts = np.unique(sizes, return_counts=True)
    up_to = np.concatenate([[0], np.cumsum(counts)])
    # entries of one bucket with all groups up to each size, from no group on
    entries = np.concatenate([[0], distinct * up_to[1:]])
    before: list[np.ndarray] = []  # for each further bucket, the end of the smaller buckets
    for _ in range(1, min(buckets, len(distinct))):
        ends = np.zeros(len(entries), int)
        fewer = np.zeros_like(entries)
        for j, size in enumerate(distinct, 1):
            totals = entries[:j] + size * (up_to[j] - up_to[:j])
            ends[j] = np.argmin(totals)
            fewer[j] = totals[ends[j]]
        before.append(ends)
        entries = fewer
    largest, end = [], len(distinct)
    for ends in reversed(before):
        largest.append(int(distinct[end - 1]))
        end = ends[end]
    return [int(distinct[end - 1]), *reversed(largest)]


def _warn_of_padding(sizes: np.ndarray, entries: int) -> None:
    """Warn of much padding, with the number of tables that would have little."""
    rows = int(sizes.sum())
    if entries / rows <= _MUCH_PADDING:
        return
    for buckets in range(2, _MOST_RECOMMENDED + 1):
        largest = np.array(_largest_of_buckets(sizes, buckets))
        fewer = int(largest[np.searchsorted(largest, sizes)].sum())
        if fewer / rows <= _LITTLE_PADDING:
            break
    warnings.warn(
        f"The largest of {len(sizes):,} groups has {sizes.max():,} rows and the median"
        f" {np.median(sizes):,.0f}, so that a step computes {entries / rows:.1f} entries for each"
        f" row. `group_rows(group, buckets={buckets})` makes {buckets} tables by size, with"
        f" {fewer / rows:.1f} entries for each row. Write a plate and latent sites for each table.",
        stacklevel=3,
    )
