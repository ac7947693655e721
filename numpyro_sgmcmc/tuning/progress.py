# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Progress bars of what happens before and after the chains run."""

import os

from tqdm.auto import tqdm


def bar(shown: bool, total: int, description: str, delay: float = 0.0) -> tqdm:
    """
    A progress bar that disappears when it is done, hidden where NumPyro hides its own.

    :param float delay: seconds before it is shown.
    """
    hidden = not shown or "CI" in os.environ or "PYTEST_XDIST_WORKER" in os.environ
    return tqdm(total=total, desc=description, leave=False, disable=hidden, delay=delay)
