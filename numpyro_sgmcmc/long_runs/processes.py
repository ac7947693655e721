# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Several processes that take part in one run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

#: The reasons to stop, by number.
_REASONS = ("", "max_time", "target_ess", "target_mcse", "interrupt")


def agreed(reason: str, count: int) -> tuple[str, int]:
    """
    What all processes do next: what the first says, unless one of them is to stop.

    :param reason: why this process is to stop, or an empty word.
    :param count: how many samples it would take.
    """
    if jax.process_count() == 1:
        return reason, count
    from jax.experimental.multihost_utils import process_allgather

    mine = np.array([_REASONS.index(reason), count])
    everyone = np.asarray(process_allgather(mine)).reshape(-1, 2)
    return _REASONS[int(everyone[:, 0].max())], int(everyone[0, 1])


@contextmanager
def watched(path: Path | None) -> Iterator[None]:
    """Placeholder."""
    yield
