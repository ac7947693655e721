# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Linear regression whose posterior and evidence are known."""

from functools import cache

import numpy as np
import numpyro
import numpyro.distributions as dist

_RNG = np.random.default_rng(4)
X = _RNG.standard_normal((2_000, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -1.0, 0.5]) + _RNG.standard_normal(2_000)).astype(np.float32)


def linear(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=100) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])


@cache
def exact():
    """Mean, standard deviations and logarithm of the evidence of ``linear``."""
    x, y = X.astype(np.float64), Y.astype(np.float64)
    covariance = np.linalg.inv(x.T @ x + np.eye(3))
    mean = covariance @ (x.T @ y)
    log_det = np.linalg.slogdet(covariance)[1]
    square = y @ y - mean @ np.linalg.solve(covariance, mean)
    return mean, np.sqrt(np.diag(covariance)), (log_det - square - 2_000 * np.log(2 * np.pi)) / 2
