# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What the notebooks on the papers share: how long they run, and how they look."""

from collections.abc import Sequence
import os
import sys
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

#: Everything in a few minutes (``make notebooks QUICK=1``), to see that it runs.
QUICK = os.environ.get("NUMPYRO_SGMCMC_QUICK") == "1"

#: The colour of each method in all pictures (Okabe and Ito, for every eye). References are black;
#: MALA and CCAdL share theirs, and no picture.
COLOURS = {
    "exact": "black",
    "NUTS": "black",
    "HMC": "black",
    "SGD": "#999999",
    "SGD with momentum": "#56B4E9",
    "SGLD": "#009E73",
    "pSGLD": "#CC79A7",
    "MALA": "#0072B2",
    "SGHMC": "#D55E00",
    "SGNHT": "#E69F00",
    "CCAdL": "#0072B2",
}


def progress(runs: Sequence[T], label: str) -> "tqdm[T]":
    """One bar in text for a loop over runs, which can be read in a notebook on paper too."""
    return tqdm(runs, desc=label, file=sys.stdout, ncols=90, mininterval=0.5)
