# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Progress bars of work before and after the chains run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import os

from tqdm.auto import tqdm

#: Passes over the rows that few models need.
_MANY_PASSES = 300.0

#: The phases of a tuning by the names that its bar shows.
_PHASES = ("centre", "metric", "noise", "pilot")


def bar(shown: bool, total: int, description: str, delay: float = 0.0) -> tqdm:
    """
    A progress bar that disappears at its end, hidden if NumPyro hides its own bars.

    :param float delay: seconds before the bar appears.
    """
    hidden = not shown or "CI" in os.environ or "PYTEST_XDIST_WORKER" in os.environ
    return tqdm(total=total, desc=description, leave=False, disable=hidden, delay=delay)


@contextmanager
def tuning_bar(shown: bool) -> Iterator[Callable[[str, float], None]]:
    """A progress bar of the phases and their passes, which disappears when they are done."""
    with bar(shown, len(_PHASES), "tuning") as seen:

        def report(phase: str, spent: float) -> None:
            so_far = f", after {spent:,.0f} passes" if spent else ""
            unusual = " (unusually many)" if spent > _MANY_PASSES else ""
            seen.set_description(f"tuning: {phase}{so_far}{unusual}")
            seen.n = _PHASES.index(phase)
            seen.refresh()

        yield report
