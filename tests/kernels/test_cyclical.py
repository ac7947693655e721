# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Step sizes in cycles, and the draws that are taken from the ends of cycles."""

import warnings

import jax.numpy as jnp
from kernel_table import KERNELS, X, Y
from kernel_table import model as regression
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from runs import go_on, run_mcmc

from numpyro_sgmcmc import SGHMC, SGLD, cyclical, stein_matrix, summary, to_arviz
from numpyro_sgmcmc.kernels.cyclical import is_for_samples, steps_for_samples

ROWS, BATCH = 100, 10
DATA = np.random.default_rng(0).standard_normal(ROWS).astype(np.float32)
DATA -= DATA.mean()
#: A long step of SGLD that more than doubles the variance, and a short one.
LARGEST, SMALLEST = 1.2 / ROWS, 0.05 / ROWS


def gaussian_mean(y):
    mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
    with numpyro.plate("rows", len(y), subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def variance(h):
    """The stationary variance of SGLD times N: (2 h + h^2 v) / (2 h N - (h N)^2) N."""
    noise = ROWS**2 / BATCH * (1 - BATCH / ROWS) * DATA.var(ddof=1)
    return (2 * h + h**2 * noise) / (1 - (1 - h * ROWS) ** 2) * ROWS


def run(step_size, samples, warmup=2, chains=1, **options):
    kernel = SGLD(gaussian_mean, step_size, subsampling="without_replacement", **options)
    return run_mcmc(
        kernel,
        DATA,
        warmup=warmup,
        samples=samples,
        chains=chains,
        start={"mu": jnp.zeros(chains) if chains > 1 else 0.0},
    )


def test_the_schedule_is_that_of_the_docstring():
    step_size = cyclical(0.1, 0.02, steps=50, sampling=0.2)
    i = np.arange(200)
    k = np.minimum(i % 50, 40)
    expected = 0.02 + 0.04 * (1 + np.cos(np.pi * k / 40))
    np.testing.assert_allclose(step_size(jnp.asarray(i)), expected, rtol=1e-6)
    sampling = np.asarray(is_for_samples(step_size, jnp.asarray(i)))
    assert np.array_equal(sampling, i % 50 >= 40)
    assert is_for_samples(0.1, i) is True
    assert [steps_for_samples(step_size, n) for n in (10, 50, 100)] == [10, 10, 20]


@pytest.mark.nightly
def test_draws_have_the_law_of_the_smallest_step_and_the_others_have_not():
    step_size = cyclical(LARGEST, SMALLEST, steps=400, sampling=0.5)
    mcmc = run(step_size, 2_000, chains=4)
    found = np.asarray(mcmc.get_samples()["mu"]) * ROWS**0.5
    assert mcmc.sampler.steps_per_sample == 400 and found.shape == (8_000,)
    # samples are 400 steps apart, of which the last 200 forget exp(-10) of where they began
    error = variance(SMALLEST) * (2 / len(found)) ** 0.5
    assert abs(found.var() - variance(SMALLEST)) < 4 * error
    long = np.asarray(run(LARGEST, 2_000, steps_per_sample=20, chains=4).get_samples()["mu"])
    assert variance(LARGEST) > 2 * variance(SMALLEST)
    assert long.var() * ROWS > variance(SMALLEST) + 20 * error
    # without the steps of the same size at the end, draws would come from the middle of a fall
    stein = stein_matrix(mcmc)
    assert abs(stein.temperature - variance(SMALLEST)) < 5 * stein.error + 0.01


@pytest.mark.nightly
def test_what_is_drawn_in_the_fall_is_left_out_of_the_results():
    step_size = cyclical(LARGEST, SMALLEST, steps=40, sampling=0.5)
    mcmc = run(step_size, 40, steps_per_sample=10, warmup=4)
    sizes = np.asarray(mcmc.get_extra_fields()["step_size"])
    expected = np.arange(40) % 4 >= 2
    assert np.array_equal(sizes < SMALLEST * 1.001, expected)
    data = to_arviz(mcmc, log_likelihood=True)
    assert np.array_equal(data["posterior"]["mu"][0], mcmc.get_samples()["mu"][expected])
    assert data["log_likelihood"]["y"].sizes["draw"] == 20
    assert np.allclose(data["sample_stats"]["step_size"], SMALLEST)
    assert data.attrs["cycle_steps"] == 40
    assert mcmc.get_samples()["mu"].shape == (40,)
    # of the temperature of each sample only steps count that samples are taken from
    temperature = np.asarray(mcmc.get_extra_fields()["configurational_temperature"])
    assert np.all(temperature[~expected] == 0) and np.any(temperature[expected] != 0)
    assert int(mcmc.last_state.monitor.stein.samples) == 20
    assert int(mcmc.last_state.monitor.stein.steps) == 200


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["SGNHT", "SGMCLMC", "PSGLD"])
def test_other_kernels_take_it(name):
    step_size = cyclical(2e-3, 5e-4, steps=20)
    kernel = KERNELS[name](regression, step_size=step_size)
    mcmc = run_mcmc(kernel, X, Y, warmup=2, samples=4)
    state = mcmc.last_state
    assert int(state.i) == 120 and np.isclose(state.step_size, 5e-4)
    assert int(state.monitor.nonfinite_steps) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert to_arviz(mcmc)["posterior"].sizes["draw"] == 4


@pytest.mark.nightly
def test_a_run_goes_on_with_its_cycle_and_is_tuned_with_one():
    step_size = cyclical(LARGEST, SMALLEST, steps=40, sampling=0.5)
    whole = run(step_size, 40, steps_per_sample=10)
    first = run(step_size, 20, steps_per_sample=10)
    go_on(first, DATA)
    assert np.array_equal(first.get_samples()["mu"], whole.get_samples()["mu"][20:])
    assert to_arviz(first)["posterior"].sizes["draw"] == 10
    # in units of a metric that is found
    kernel = SGHMC(regression, cyclical(0.5, 0.1, 100), progress_bar=False)
    mcmc = run_mcmc(kernel, X, Y, warmup=2, samples=300)
    assert kernel.tuning.friction is not None and kernel.steps_per_sample == 100
    assert summary(mcmc).facts["step size"] == pytest.approx(0.1)


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match=r"`smallest=0\.2` .* more than `largest=0\.1`"):
        cyclical(0.1, 0.2, 10)
    with pytest.raises(ValueError, match="`largest` must be a positive finite number; got nan"):
        cyclical(float("nan"), 0.2, 10)
    with pytest.raises(ValueError, match="`steps` must be an integer of 2 or more; got 1"):
        cyclical(0.1, 0.01, 1)
    with pytest.raises(ValueError, match=r"`sampling` must be a number between 0 and 1; got 1\.0"):
        cyclical(0.1, 0.01, 10, 1.0)
    with pytest.raises(ValueError, match="`steps_per_sample=30` does not fit cycles of 100"):
        SGLD(gaussian_mean, cyclical(0.1, 0.01, 100), steps_per_sample=30)
    mcmc = run(cyclical(LARGEST, SMALLEST, 100), 3, steps_per_sample=5, warmup=20)
    with pytest.raises(ValueError, match="None of 3 draws is from the end of a cycle of 100"):
        to_arviz(mcmc)
