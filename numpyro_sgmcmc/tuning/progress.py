# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Progress bars of work before and after the chains run."""

import os

from tqdm.auto import tqdm


def bar(shown: bool, total: int, description: str, delay: float = 0.0) -> tqdm:
    """
    A progress bar that disappears at its end, hidden if NumPyro hides its own bars.

    :param float delay: seconds before the bar appears.
    """
    hidden = not shown or "CI" in os.environ or "PYTEST_XDIST_WORKER" in os.environ
    return tqdm(total=total, desc=description, leave=False, disable=hidden, delay=delay)
