# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Scores of predictive laws from quantities of each row, with the influence of each row."""

from typing import NamedTuple

import numpy as np
import xarray as xr

#: Levels of the central intervals whose coverage is checked, and bins of the confidence.
_LEVELS, _BINS = np.arange(1, 20) / 20, 15


class Score(NamedTuple):
    """
    A score with its influence function and its value by chance.

    - **value** - the score.
    - **influence** - influence of each row, with mean zero; or the scores of the rows if the score
      is a mean.
    - **by_chance** - the mean score of a perfectly calibrated law.
    """

    value: float
    influence: np.ndarray
    by_chance: float = np.nan


def scores_of(pointwise: xr.Dataset) -> dict[str, Score]:
    """The scores by name, from the quantities of the rows."""
    x = {str(name): np.ravel(values.values) for name, values in pointwise.items()}

    def mean(name: str) -> Score:
        return Score(float(np.mean(x[name])), x[name])

    scores = {"log_predictive_density": mean("log_predictive_density")}
    if "confidence" in x:
        scores |= {"error_rate": mean("error"), "brier": mean("brier")}
        scores["expected_calibration_error"] = _of_confidence(x["confidence"], 1 - x["error"])
    elif "error" in x:
        square = x["error"] ** 2
        rmse = float(np.sqrt(np.mean(square)))
        scores["rmse"] = Score(rmse, (square - np.mean(square)) / (2 * rmse or 1.0))
    if "crps" in x:
        scores["crps"] = mean("crps")
    if "pit" in x:
        scores["calibration_error"] = _of_intervals(x["pit"])
    return scores


def _of_confidence(confidence: np.ndarray, right: np.ndarray) -> Score:
    bins = np.clip(np.ceil(confidence * _BINS).astype(int) - 1, 0, _BINS - 1)
    away = right - confidence
    signs = np.sign(np.bincount(bins, away, _BINS))[bins]
    variance = np.bincount(bins, confidence * (1 - confidence), _BINS)
    by_chance = float(np.sum(np.sqrt(2 / np.pi * variance)) / confidence.size)
    return Score(float(np.mean(signs * away)), signs * away, by_chance)


def _of_intervals(pit: np.ndarray) -> Score:
    # the first level whose interval covers the row; intervals of higher levels cover it too
    first = np.searchsorted(_LEVELS, np.abs(2 * pit - 1))
    covered = np.cumsum(np.bincount(first, minlength=_LEVELS.size + 1))[:-1] / pit.size
    signs = np.sign(covered - _LEVELS)
    # sums over the levels from the first one on, whose intervals cover the row
    sums = np.append(np.cumsum(signs[::-1])[::-1], 0.0)
    by_chance = float(np.mean(np.sqrt(2 * _LEVELS * (1 - _LEVELS) / (np.pi * pit.size))))
    influence = (sums[first] - np.sum(signs * _LEVELS)) / _LEVELS.size
    return Score(float(np.mean(influence)), influence, by_chance)


def standard_error(influence: np.ndarray) -> float:
    if influence.size < 2:
        return float("nan")
    with np.errstate(invalid="ignore"):  # for rows with probability zero
        return float(np.std(influence, ddof=1) / np.sqrt(influence.size))
