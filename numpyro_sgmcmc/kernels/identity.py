# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Tests of whether a tuning or a state belongs to this model and these data."""

import math

import numpy as np

from numpyro_sgmcmc.data.fingerprint import fingerprint_of
from numpyro_sgmcmc.kernels.state import SGMCMCState
from numpyro_sgmcmc.posterior.target import Target

#: Relative difference of log densities beyond rounding: it shows another model.
_SAME = 1e-4

DATA_CHANGED = (
    "The control variate of this run belongs to other data, so that the run cannot continue with"
    " these. Set `mcmc.post_warmup_state = None`, or use a new `MCMC`. With `tuning=kernel.tuning`"
    " a new kernel need not tune itself again."
)


def data_fingerprint(target: Target) -> str | None:
    """A fingerprint of the data, captured arrays of the model included; None for traced data."""
    data = fingerprint_of(target.args, target.kwargs)
    return None if data is None else data + target.model.captured


def digest(data: str | None) -> np.ndarray:
    """The digest of a data fingerprint as numbers, shape (4,); zeros for unknown data."""
    return np.array([int((data or "")[k : k + 8] or "0", 16) for k in (0, 8, 128, 136)], np.uint32)


def data_digest(target: Target) -> np.ndarray | None:
    """The digest of the data of a target, or None if they are traced."""
    data = data_fingerprint(target)
    return None if data is None else digest(data)


def check_state(state: SGMCMCState, data: str | None) -> None:
    """
    Check that the anchor of a state belongs to the data of the run.

    :param data: the fingerprint of the data of the run, or None if they are not known.
    :raises ValueError: if the anchor of the state belongs to other data.
    """
    if data is not None and state.fixed.anchor is not None:
        known = np.reshape(state.fixed.data, (-1, 4))[0]
        if known.any() and not np.array_equal(known, digest(data)):
            raise ValueError(DATA_CHANGED)


def other_sites(here: dict[str, float], there: dict[str, float]) -> list[str]:
    """Names of sites with differing log densities; none if one of the models is not known."""
    if not here or not there:
        return []
    return [name for name in sorted(here.keys() | there) if not _same(here, there, name)]


def _same(here: dict[str, float], there: dict[str, float], name: str) -> bool:
    if name not in here or name not in there:
        return False
    x, y = here[name], there[name]
    return math.isclose(x, y, rel_tol=_SAME, abs_tol=_SAME) or (math.isnan(x) and math.isnan(y))
