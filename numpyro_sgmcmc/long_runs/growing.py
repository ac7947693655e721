# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The growing rows of a store, and tests of whether they are unchanged."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.content_hash import ContentHash
from numpyro_sgmcmc.data.growing import growing_in, known_by, replaced, row_count_of, trimmed
from numpyro_sgmcmc.data.row_identity import RowIdentity, identity_of
from numpyro_sgmcmc.data.rows_on_disk import on_disk

Arguments = tuple[tuple, dict]


class RowsOfRun(NamedTuple):
    """
    The growing rows that a run knows.

    - **begun** - number of rows at the begin of the run, which its tuning has seen.
    - **identity** - fingerprint of the rows and their weights.
    - **first** - the first draw of each chain from the posterior of all rows.
    """

    begun: int
    identity: RowIdentity
    first: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.identity.rows

    def is_as(self, other: "RowsOfRun | None") -> bool:
        """True if another run has these rows, with equal weights."""
        return other is not None and np.array_equal(self.identity.digest, other.identity.digest)

    def as_begun(self, arguments: Arguments) -> Arguments:
        """The arguments of a run with the rows at its begin."""
        return _of_first_rows(arguments, self.begun)

    def as_known(self, arguments: Arguments) -> Arguments:
        """The arguments of a run, with a record that their first rows are these."""
        now = _identity_of(arguments)
        return replaced(lambda x: x._replace(known=known_by([self.identity, now])), arguments)

    def gone_on(self, arguments: Arguments, draws: int) -> "RowsOfRun":
        """
        The record of the present rows.

        :param draws: the number of draws of each chain.
        """
        now = _identity_of(arguments)
        first = draws if now.rows > self.rows else self.first
        return RowsOfRun(self.begun, now, first)


def rows_of_run(arguments: Arguments) -> RowsOfRun | None:
    """The rows of a run that begins with these arguments; None without growing rows."""
    known = row_count_of(arguments)
    if known is None:
        return None
    return RowsOfRun(int(known.rows), _identity_of(arguments), 0)


def check_rows(
    path: Any, arguments: Arguments, before: RowsOfRun | None, seen: list[ContentHash]
) -> None:
    """
    Check that the present rows begin with the rows of the store.

    :param before: the rows that the store knows.
    :param seen: the records of rows on disk.
    :raises ValueError: if the present rows do not begin with the known rows.
    """
    known, remedy = row_count_of(arguments), "or begin anew with `resume=False`"
    if (known is None) != (before is None):
        now, then = "a `GrowingRows`", "arrays"
        now, then = (now, then) if before is None else (then, now)
        raise ValueError(
            f"The store {path} was begun with {then}, but this run has {now}. Give it {then}"
            f" again, {remedy}."
        )
    if known is None or before is None:
        return
    if known.rows < before.rows:
        raise ValueError(
            f"The store {path} has draws from {before.rows:,} rows, but this run has"
            f" {int(known.rows):,} rows. A store cannot continue after rows were removed. Put them"
            f" back in their order, {remedy}."
        )
    first = _of_first_rows(arguments, before.rows)
    for rows, one in zip(on_disk(trimmed(first)), seen, strict=False):
        rows.remember(one)  # rows that were read need not be read again
    here, there = _identity_of(first), before.identity
    if here.half_life != there.half_life:
        raise ValueError(
            f"The store {path} was begun with `half_life={there.half_life}`, but these rows have"
            f" `half_life={here.half_life}`. A store cannot continue with other weights of rows."
            f" Give the `GrowingRows` the former half-life, {remedy}."
        )
    if here.kinds != there.kinds or np.any(here.digest != there.digest):
        differs = here.first_difference(there) if here.kinds == there.kinds else 0
        raise ValueError(
            f"The {before.rows:,} rows of the store {path} have changed, in values or order, at row"
            f" {differs:,} or later. Put the old rows back, {remedy}."
        )


def _identity_of(arguments: Arguments) -> RowIdentity:
    """The fingerprint of the present rows and their weights."""
    known = row_count_of(arguments)
    assert known is not None
    half_life = None if known.half_life is None else float(known.half_life)
    return identity_of([x.on_host() for x in growing_in(arguments)], half_life)


def _of_first_rows(arguments: Arguments, rows: int) -> Arguments:
    count = jnp.asarray(np.int32(rows))
    return replaced(lambda x: x._replace(known=x.known._replace(rows=count)), arguments)
