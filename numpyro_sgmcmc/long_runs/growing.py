# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What a store knows of rows that keep coming, and whether they are still there."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.fingerprint import fingerprint_of
from numpyro_sgmcmc.data.growing import known_of, replaced, without_room
from numpyro_sgmcmc.data.rows_on_disk import on_disk
from numpyro_sgmcmc.data.seen import Seen

Arguments = tuple[tuple, dict]


class RowsOfRun(NamedTuple):
    """
    Rows that keep coming, as a run knows them.

    - **begun** - how many there were when it was begun, of which its tuning is.
    - **rows**, **version** - as of :class:`~numpyro_sgmcmc.data.growing.Known`.
    - **content** - tells these rows from others.
    - **first** - the first draw of each chain that is of the posterior of all of them.
    """

    begun: int
    rows: int
    version: int
    content: str
    first: int

    def as_begun(self, arguments: Arguments) -> Arguments:
        """The arguments of a run with the rows that there were when it was begun."""
        return _of_first_rows(arguments, self.begun, self.version)

    def as_known(self, arguments: Arguments) -> Arguments:
        """The arguments of a run with its own name for the rows."""
        known = known_of(arguments)
        assert known is not None
        return _of_first_rows(arguments, int(known.rows), self.version)

    def gone_on(self, arguments: Arguments, draws: int) -> "RowsOfRun":
        """
        What is known of the rows that there are now.

        :param draws: how many there are of each chain.
        """
        now = rows_of_run(self.as_known(arguments))
        assert now is not None
        first = draws if now.rows > self.rows else self.first
        return now._replace(begun=self.begun, first=first)


def rows_of_run(arguments: Arguments) -> RowsOfRun | None:
    """Of a run that is begun with these arguments; None if their rows do not keep coming."""
    known = known_of(arguments)
    if known is None:
        return None
    return RowsOfRun(int(known.rows), int(known.rows), int(known.version), _content(arguments), 0)


def check_rows(path: Any, arguments: Arguments, before: RowsOfRun | None, seen: list[Seen]) -> None:
    """
    :param path: of the store.
    :param before: the rows that it knows.
    :param seen: what it has seen of those on disk.
    :raises ValueError: if these are not the first ones of those that there are.
    """
    known, remedy = known_of(arguments), "or begin anew with `resume=False`"
    if (known is None) != (before is None):
        now, then = "a `GrowingRows`", "arrays"
        now, then = (now, then) if before is None else (then, now)
        raise ValueError(
            f"The store {path} was begun with {then}, and this run is one of {now}: give it what it"
            f" was begun with, {remedy}."
        )
    if known is None or before is None:
        return
    if known.rows < before.rows:
        raise ValueError(
            f"The store {path} knows {before.rows:,} rows, and there are {int(known.rows):,}: rows"
            " that a run knows must be there when it goes on, in their order. Put them back,"
            f" {remedy}: a store does not go on when rows were removed."
        )
    first = _of_first_rows(arguments, before.rows, before.version)
    for rows, one in zip(on_disk(without_room(first)), seen, strict=False):
        rows.remember(one)  # so that they need not all be read again
    if _content(first) != before.content:
        raise ValueError(
            f"Of the {before.rows:,} rows that the store {path} knows some are others now, in"
            f" another order, or forgotten after another `half_life`: put them back, {remedy}."
        )


def _content(arguments: Arguments) -> str:
    """Tells the rows that there are, and what they count, from others."""
    known = known_of(arguments)
    half_life = None if known is None or known.half_life is None else float(known.half_life)
    return f"{fingerprint_of(*without_room(arguments))} {half_life}"


def _of_first_rows(arguments: Arguments, rows: int, version: int) -> Arguments:
    counts = {"rows": jnp.asarray(np.int32(rows)), "version": jnp.asarray(np.int32(version))}
    return replaced(lambda x: x._replace(known=x.known._replace(**counts)), arguments)
