# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The tuning of a model with a covariance for each row, whose factorisations wait for each other for
ever if they are not in order: ``test_linear_algebra.py`` starts it with two threads.
"""

from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_median

from numpyro_sgmcmc.posterior.metric import DiagonalMetric
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian, find_metric
from numpyro_sgmcmc.tuning.noise_level import measure_noise

ROWS, SIZE = 2_000, 8
A = random.normal(random.key(0), (ROWS, SIZE, SIZE)) / SIZE
DATA = (A @ A.mT, 0.7 * random.normal(random.key(1), (ROWS, SIZE)))


def model(covariance, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([SIZE]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    with numpyro.plate("rows", ROWS, subsample_size=200) as i:
        V = covariance[i] + s * jnp.eye(SIZE)
        numpyro.sample("y", dist.MultivariateNormal(mu, V), obs=y[i])


if __name__ == "__main__":
    target = Target(read_model(model, init_to_median, DATA, {}), DATA, {})
    start = Gaussian(DiagonalMetric(jnp.zeros(SIZE + 1), jnp.full(SIZE + 1, 0.02)), 0.0)
    found = find_metric(target, random.key(2), start)
    noise = measure_noise(target, random.key(3), found, found.metric, controlled=True)
    assert found.converged and noise.controlled.mean < noise.plain.mean / 10
