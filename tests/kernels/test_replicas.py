# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Replica exchange: the weights of modes, and exchanges that noise does not make wrong."""

from functools import partial
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from runs import run_mcmc

from numpyro_sgmcmc import (
    AMAGOLD,
    SGHMC,
    SGLD,
    SGMCLMC,
    CCAdL,
    Replicas,
    RowsOnDisk,
    summary,
    to_arviz,
)
from numpyro_sgmcmc.diagnostics.runs import effective_sizes
from numpyro_sgmcmc.kernels import exchange
from numpyro_sgmcmc.kernels.exchange import exchange_probability

COMPILE_QUICKLY = True
RNG = np.random.default_rng(0)
ROWS, BATCH, DIMENSION = 1_000, 50, 10
WEIGHTS = np.array([0.1, 0.2, 0.3, 0.4])
#: Six standard deviations from the origin, and at least six from each other.
MODES = RNG.standard_normal((4, DIMENSION))
MODES *= 6 / np.linalg.norm(MODES, axis=1, keepdims=True)
#: What the rows add cancels over all of them, and in a minibatch is noise.
SLOPES = RNG.standard_normal((ROWS, DIMENSION))
SLOPES = (0.007 * (SLOPES - SLOPES.mean(axis=0))).astype(np.float32)


def mixture(slopes, batch_size=BATCH):
    flat = dist.ImproperUniform(dist.constraints.real_vector, (), (DIMENSION,))
    x = numpyro.sample("x", flat)
    squares = jnp.sum((x - MODES) ** 2, axis=-1)
    log_density = jax.nn.logsumexp(jnp.log(WEIGHTS) - squares / 2)
    with numpyro.plate("rows", len(slopes), subsample_size=batch_size) as i:
        numpyro.factor("density", log_density / len(slopes) + slopes[i] @ x)


def gaussian(slopes, batch_size=BATCH):
    x = numpyro.sample("x", dist.Normal(0, 1).expand([DIMENSION]).to_event(1))
    with numpyro.plate("rows", len(slopes), subsample_size=batch_size) as i:
        numpyro.factor("noise", slopes[i] @ x)


def two_components(y):
    mean = numpyro.sample("mean", dist.Normal(0, 3).expand([2]).to_event(1))
    w = numpyro.sample("w", dist.Beta(2, 2))
    halves = dist.Categorical(jnp.stack([w, 1 - w]))
    with numpyro.plate("rows", len(y), subsample_size=50) as i:
        normal = dist.MixtureSameFamily(halves, dist.Normal(mean, 1))
        numpyro.sample("y", normal, obs=y[i])


def two_groups():
    left = RNG.random(400) < 0.35
    return (np.where(left, -1.5, 1.5) + RNG.standard_normal(400)).astype(np.float32)


run = partial(run_mcmc, samples=1_000, chains=4)


def weights_of(mcmc):
    """The share of each mode among the draws of each chain, shape (chains, modes)."""
    x = np.asarray(mcmc.get_samples(True)["x"])
    nearest = np.argmin(((x[:, :, None] - MODES) ** 2).sum(-1), axis=-1)
    return np.array([np.bincount(chain, minlength=4) for chain in nearest]) / x.shape[1]


@pytest.mark.parametrize(("variance", "count"), [(0.5, np.inf), (4.0, np.inf), (1.0, 40)])
def test_noisy_exchanges_are_balanced(variance, count):
    """E a(D) / E a(-D) = exp(D), which the probability without a penalty is far from."""
    number, difference = 1_000_000, 0.7
    noise = np.sqrt(variance) * RNG.standard_normal(number)
    known = variance * np.ones(number)
    if np.isfinite(count):
        known = variance * RNG.chisquare(count - 1, number) / (count - 1)

    def ratio(variances):
        there = exchange_probability(difference + noise, variances, count)
        back = exchange_probability(-difference + noise, variances, count)
        a, b = (np.asarray(x, float) for x in (there, back))
        error = np.sqrt(a.var() / a.mean() ** 2 + b.var() / b.mean() ** 2) / number**0.5
        return np.log(a.mean() / b.mean()), error

    found, error = ratio(known)
    assert abs(found - difference) < 4 * error + 2e-3
    without, error = ratio(np.zeros(number))
    assert abs(without - difference) > 20 * error
    if np.isfinite(count):
        # as if the estimate were the variance
        a, b = (np.mean(np.minimum(1, np.exp(s * difference + noise - known / 2))) for s in (1, -1))
        assert abs(np.log(a / b) - difference) > 2 * abs(found - difference)


@pytest.mark.slow
def test_replicas_have_the_law_of_their_temperature():
    kernel = SGHMC(gaussian, 0.2, 1.0, replicas=Replicas([1, 4, 16]), steps_per_sample=20)
    mcmc = run(kernel, np.zeros_like(SLOPES), samples=500)
    assert mcmc.get_extra_fields()["exchange_prob"].shape == (2_000, 2)
    state, sampled = mcmc.last_state, []
    step = jax.jit(lambda state: kernel.sample(state, (jnp.zeros_like(SLOPES),), {}))
    for _ in range(300):
        state = step(state)
        sampled.append(np.asarray(state.replicas.states.z["x"]))
    found = np.mean(np.square(sampled), axis=(0, 1, 3))  # over samples, chains, coordinates
    cold = np.var(mcmc.get_samples()["x"])
    # of some 10,000 numbers, correlated from sample to sample; OBABO's own error is h^2 / 4
    np.testing.assert_allclose([cold, *found], [1, 4, 16], rtol=0.05)


@pytest.mark.nightly
def test_noise_of_the_exchange_does_not_heat_the_chain(monkeypatch):
    noisy = 7 * SLOPES  # of a minibatch the variance of the gradient is 45

    def variance():
        # steps without noise to speak of: it is all in the exchanges
        replicas = Replicas([1, 1.5], minibatches=1)
        kernel = CCAdL(gaussian, 0.02, 1.0, replicas=replicas, steps_per_sample=50)
        mcmc = run(kernel, noisy, samples=3_000)
        x = np.asarray(mcmc.get_samples(True)["x"], float)
        probability = np.asarray(mcmc.get_extra_fields()["exchange_prob"])
        size = effective_sizes(x**2).sum()
        return x.var(), (2 / size) ** 0.5, probability.mean()

    right, error, _ = variance()
    assert abs(right - 1) < 4 * error + 0.01

    def without_penalty(difference, variance, count):
        return exchange_probability(difference, 0 * variance, count)

    monkeypatch.setattr(exchange, "exchange_probability", without_penalty)
    wrong, error, _ = variance()
    assert wrong > 1 + 8 * error


@pytest.mark.nightly
def test_weights_of_modes():
    replicas = Replicas(np.geomspace(1, 20, 6))
    options = {"noise": "full", "steps_per_sample": 20}
    mcmc = run(CCAdL(mixture, 0.3, 1.0, replicas=replicas, **options), SLOPES, samples=5_000)
    weights = weights_of(mcmc)
    assert np.abs(weights.mean(axis=0) - WEIGHTS).max() < 0.05, weights
    table = summary(mcmc).table
    assert table["r_hat"].max() < 1.05
    # within a mode the law is what it is without replicas
    x = np.asarray(mcmc.get_samples()["x"])
    away = x - MODES[np.argmin(((x[:, None] - MODES) ** 2).sum(-1), axis=-1)]
    assert abs(away.var() - 1) < 0.03
    alone = run(CCAdL(mixture, 0.3, 1.0, **options), SLOPES, samples=300)
    off = np.abs(weights_of(alone) - WEIGHTS).max(axis=1)
    assert np.all(off > 0.3), off


@pytest.mark.nightly
def test_a_tuning_warns_of_several_modes_only_where_chains_see_one():
    y, options = two_groups(), {"gradient": "minibatch", "progress_bar": False}
    with pytest.warns(UserWarning, match="The posterior has several modes, .*`replicas=Replicas"):
        assert CCAdL(two_components, **options).tune(random.key(0), y).multimodal
    kernel = CCAdL(two_components, replicas=Replicas([1, 10, 100]), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuning = kernel.tune(random.key(0), y)
    assert not tuning.problem and tuning.steps_per_sample > 1


@pytest.mark.nightly
def test_what_is_collected_and_said():
    kernel = SGMCLMC(gaussian, 0.2, 1.0, replicas=Replicas([1, 3, 9]), steps_per_sample=5)
    mcmc = run(kernel, SLOPES, samples=20, warmup=2, chains=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = to_arviz(mcmc)
    assert data["posterior"]["x"].shape == (2, 20, DIMENSION)
    assert data["sample_stats"]["exchange_prob"].shape == (2, 20, 2)
    # five gradients at each temperature, and half as much for each of ten potentials
    each = 3 * BATCH / ROWS
    assert kernel.run_info["passes_per_sample"] == pytest.approx(5 * each + 10 * each / 2)
    assert data.attrs["temperatures"] == "1, 3, 9"
    far = SGLD(gaussian, 0.1, replicas=Replicas([1, 1e6]), steps_per_sample=5)
    mcmc = run(far, SLOPES, samples=100, warmup=200)
    with pytest.warns(UserWarning, match=r"exchanged in 0\.\d% .* temperatures 1 and 1e\+06"):
        to_arviz(mcmc)


def test_what_has_no_meaning_is_refused(tmp_path):
    for wrong in ([1], [2, 4], [1, 4, 3], 5, ["a"], [1, np.inf]):
        with pytest.raises(ValueError, match="`temperatures` of replicas must rise from 1"):
            Replicas(wrong)
    with pytest.raises(ValueError, match="`minibatches` must be"):
        Replicas([1, 2], minibatches=0)
    with pytest.raises(ValueError, match="`replicas` must be a `Replicas`"):
        SGLD(gaussian, 0.1, replicas=[1, 2])
    replicas = Replicas([1, 2])
    with pytest.raises(ValueError, match="AMAGOLD with `replicas` is not possible"):
        run(AMAGOLD(gaussian, 0.1, 1.0, replicas=replicas), SLOPES, samples=1)
    with pytest.raises(ValueError, match="Use noise_variance='estimated'"):
        kernel = SGHMC(gaussian, 0.1, 1.0, noise_variance=1.0, replicas=replicas)
        run(kernel, SLOPES, samples=1)
    np.save(tmp_path / "slopes.npy", SLOPES)
    with pytest.raises(ValueError, match="`replicas` cannot be used with rows on disk"):
        run(SGLD(gaussian, 0.1, replicas=replicas), RowsOnDisk(tmp_path / "slopes.npy"), samples=1)
