# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Linear regression whose posterior and evidence are known."""

from functools import cache

import numpy as np

_RNG = np.random.default_rng(4)
X = _RNG.standard_normal((2_000, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -1.0, 0.5]) + _RNG.standard_normal(2_000)).astype(np.float32)


@cache
def exact():
    """Mean, standard deviations and logarithm of the evidence of ``linear``."""
    x, y = X.astype(np.float64), Y.astype(np.float64)
    covariance = np.linalg.inv(x.T @ x + np.eye(3))
    mean = covariance @ (x.T @ y)
    log_det = np.linalg.slogdet(covariance)[1]
    square = y @ y - mean @ np.linalg.solve(covariance, mean)
    return mean, np.sqrt(np.diag(covariance)), (log_det - square - 2_000 * np.log(2 * np.pi)) / 2
