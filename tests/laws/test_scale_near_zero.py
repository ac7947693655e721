# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The exact law of a scale near zero, whose logarithm has a flat tail far from any anchor."""

from jax import random
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest
from scipy import stats

from numpyro_sgmcmc import CCAdL
from numpyro_sgmcmc.tuning import phases
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel

GROUPS, CHAINS = 4_000, 128


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
    """
    The ratio of standard deviations, and how often draws lie below the exact quantile of 1 %.

    :return: for both the estimate and its standard error, from the differences of chains.
    """
    y = data(scale)
    grid, weights = exact(y)
    mean = weights @ grid
    sd = np.sqrt(weights @ grid**2 - mean**2)
    kernel = CCAdL(effects, progress_bar=False)
    kernel.tune(random.key(0), y)
    options = {"chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=100, num_samples=1_500, num_chains=CHAINS, **options)
    mcmc.run(random.key(1), y)
    x = np.log(np.asarray(mcmc.get_samples(group_by_chain=True)["s"]))
    squares = ((x - mean) ** 2).mean(1) / sd**2
    ratio = np.sqrt(squares.mean())
    below = (x < grid[np.searchsorted(np.cumsum(weights), 0.01)]).mean(1)
    errors = squares.std() / (2 * ratio), below.std()
    return (ratio, errors[0] / CHAINS**0.5), (below.mean(), errors[1] / CHAINS**0.5)


@pytest.mark.nightly
@pytest.mark.parametrize("scale", [0.35, pytest.param(0.45, marks=pytest.mark.slow)])
def test_chains_do_not_stay_in_the_tail(scale):
    """The tail has no more and no less than that of a law that is wrong by 5 %."""
    (ratio, error), (below, error_below) = law(scale)
    assert error < 0.01 and abs(ratio - 1) < 0.05 + 2 * error
    narrow, wide = stats.norm.cdf(stats.norm.ppf(0.01) / np.array([0.95, 1.05]))
    assert error_below < 0.001
    assert narrow - 2 * error_below < below < wide + 2 * error_below


@pytest.mark.nightly
def test_a_whole_control_variate_drives_them_there(monkeypatch):
    monkeypatch.setattr(phases, "reach_of", lambda *_: None)
    (ratio, error), _ = law(0.35)
    assert ratio > 1.05 + 2 * error


@pytest.mark.parametrize("order", [1, 2])
def test_the_reach_is_where_minibatches_have_four_times_the_noise(order):
    """Nearer, plain minibatches would throw chains out, whose steps are too long for them."""
    plain, controlled = (NoiseLevel(v, v, 1.0, 0.0) for v in (22.2, 1e-4))
    reach = phases.reach_of(10, order, plain, controlled)
    assert controlled.mean * (reach**2 / 10) ** order == pytest.approx(plain.mean / 4)
    assert phases.reach_of(9, order, plain, plain) == 8
    assert phases.reach_of(501, order, plain, controlled) is None


@pytest.mark.nightly
@pytest.mark.parametrize("metric", [None, "diagonal"])
def test_the_reach_is_in_standard_deviations_of_the_posterior(metric):
    tuning = CCAdL(effects, metric=metric, progress_bar=False).tune(random.key(0), data(0.45))
    assert (tuning.anchor.reach is None) == (metric == "diagonal")


def schools(school, y):
    """Normal means of eight schools with 625 pupils each, non-centred."""
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        mean = mu + tau * numpyro.sample("z", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(200))
    with numpyro.plate("pupils", len(y), subsample_size=200) as i:
        numpyro.sample("y", dist.Normal(mean[school[i]], sigma), obs=y[i])


@pytest.mark.nightly
@pytest.mark.parametrize("is_right", [True, False])
def test_plain_noise_does_not_throw_chains_out(monkeypatch, is_right):
    """
    The expansion is good where the scale is near zero, ten standard deviations away.

    Plain minibatches have hundreds of times the noise, and steps are too long for them. A reach of
    sqrt(d) + 5 throws 6 of 32 chains out.
    """
    if not is_right:
        monkeypatch.setattr(phases, "reach_of", lambda dimension, *_: dimension**0.5 + 5)
    rng = np.random.default_rng(1)
    school = np.repeat(np.arange(8), 625)
    y = (4 + 5 * rng.standard_normal(8))[school] + 100 * rng.standard_normal(5_000)
    options = {"chain_method": "vectorized", "progress_bar": False}
    kernel = CCAdL(schools, progress_bar=False)
    mcmc = MCMC(kernel, num_warmup=100, num_samples=1_500, num_chains=32, **options)
    mcmc.run(random.key(1), school, y.astype(np.float32))
    # nearly normal, with a standard deviation of sigma / sqrt(2 N): 48,000 draws are within 5
    away = np.abs(np.asarray(mcmc.get_samples()["sigma"]) - y.std()) * 10_000**0.5 / y.std()
    assert (away.max() < 7) == is_right
