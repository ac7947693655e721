# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The exact law of a scale near zero, whose logarithm has a flat tail far from any anchor."""

from jax import random
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_sgmcmc import CCAdL
from numpyro_sgmcmc.posterior import control_variate

GROUPS, CHAINS = 4_000, 64


def effects(y):
    """Effects of scale s and noise of scale 1, summed."""
    s = numpyro.sample("s", dist.HalfNormal(2))
    with numpyro.plate("groups", GROUPS, subsample_size=40) as i:
        numpyro.sample("y", dist.Normal(0, (1 + s**2) ** 0.5), obs=y[i])


def data(scale):
    y = np.random.default_rng(3).normal(size=GROUPS)
    return (y * np.sqrt((1 + scale**2) * GROUPS / np.sum(y**2))).astype(np.float32)


def exact(y):
    """A grid of log s, and the probabilities of its points."""
    grid = np.linspace(-9, 1, 20_001)
    variance = 1 + np.exp(2 * grid)
    log_density = -0.5 * (GROUPS * np.log(variance) + np.sum(y.astype(float) ** 2) / variance)
    log_density += grid - np.exp(2 * grid) / 8
    weights = np.exp(log_density - log_density.max())
    return grid, weights / weights.sum()


def law(scale):
    """The ratio of standard deviations, and how often draws lie below some exact quantiles."""
    y = data(scale)
    grid, weights = exact(y)
    sd = np.sqrt(weights @ grid**2 - (weights @ grid) ** 2)
    kernel = CCAdL(effects, progress_bar=False)
    kernel.tune(random.key(0), y)
    options = {"chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=100, num_samples=1_500, num_chains=CHAINS, **options)
    mcmc.run(random.key(1), y)
    x = np.log(np.asarray(mcmc.get_samples(group_by_chain=True)["s"]))
    bounds = grid[np.searchsorted(np.cumsum(weights), [1e-3, 1e-2])]
    return x.std() / sd, [(x < bound).mean() for bound in bounds]


@pytest.mark.parametrize("scale", [0.35, 0.45])
def test_chains_do_not_stay_in_the_tail(scale):
    ratio, (rarest, rare) = law(scale)
    assert 0.95 < ratio < 1.05
    assert rarest < 3e-3 and 0.007 < rare < 0.014


def test_a_whole_control_variate_drives_them_there(monkeypatch):
    monkeypatch.setattr(control_variate, "_MOST_BOUNDED", 0)
    ratio, (rarest, _) = law(0.35)
    assert ratio > 1.3 and rarest > 0.01
