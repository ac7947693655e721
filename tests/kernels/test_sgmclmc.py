# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Microcanonical dynamics: its flow is exact, its law the posterior's, whatever turns it alike."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
import pytest
from runs import run_mcmc
from scipy.integrate import solve_ivp
from small_models import mean, means

from numpyro_sgmcmc import SGMCLMC, summary
from numpyro_sgmcmc.diagnostics.runs import effective_sizes
from numpyro_sgmcmc.kernels.integrators import microcanonical_kick

COMPILE_QUICKLY = True
D, N = 4, 400


def test_the_kick_solves_its_equation():
    rng = np.random.default_rng(0)
    g = 5 * rng.standard_normal(D)
    p = rng.standard_normal(D)
    p *= np.sqrt(D) / np.linalg.norm(p)

    def field(t, state):
        p = state[:D]
        return np.append(-D / (D - 1) * (g - p * (p @ g) / D), -p @ g)

    with jax.enable_x64(True):
        arrays = jnp.asarray(p), jnp.asarray(g)
        for h in (0.3, 2.0, -0.5):
            right = solve_ivp(field, (0, h), np.append(p, 0.0), rtol=1e-10, atol=1e-12).y[:, -1]
            momentum, energy = microcanonical_kick(*arrays, jnp.asarray(h))
            np.testing.assert_allclose(momentum, right[:D], atol=1e-8)
            # the kinetic energy rises by the work of the force
            np.testing.assert_allclose(energy, right[D], atol=1e-8)
        # neither overflow nor a division by zero
        for g in (1e100 * arrays[1], 0 * arrays[1]):
            momentum, energy = microcanonical_kick(arrays[0], g, jnp.asarray(0.1))
            assert np.isfinite(momentum).all() and np.isfinite(energy)
            np.testing.assert_allclose(jnp.linalg.norm(momentum), np.sqrt(D))


def variances(kernel, y, draws=20_000, **options):
    """Of the posterior, and their standard errors, relative to the right ones."""
    mcmc = run_mcmc(kernel, y, warmup=300, samples=draws, chains=4, **options)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], np.float64)
    right = 1 / (N + 0.01)
    squares = (draws - draws.mean((0, 1))) ** 2
    error = squares.std((0, 1)) / np.sqrt(effective_sizes(squares))
    center = np.asarray(y).sum(0) * right
    shift = np.abs(draws.mean((0, 1)) - center) / np.sqrt(right)
    assert np.all(shift < 0.05)
    return squares.mean((0, 1)) / right, error / right, mcmc


def data(scale=1.0):
    y = np.random.default_rng(1).standard_normal((N, D)).astype(np.float32)
    y = (y - y.mean(0)) / y.std(0)
    return y * np.asarray(scale, np.float32)


def kernel_of(h, batch_size=N, friction=1.0, **options):
    unit = N**-0.5
    return SGMCLMC(
        partial(means, batch_size=batch_size),
        step_size=h * unit,
        friction=friction / unit,
        steps_per_sample=max(1, round(1 / h)),
        **options,
    )


@pytest.mark.nightly
def test_the_law_is_the_posterior_and_its_error_of_second_order():
    y, errors = data(), []
    for h in (0.25, 0.5, 1.0):
        ratio, error, _ = variances(kernel_of(h), y)
        errors.append((np.mean(ratio) - 1, np.sqrt(np.mean(error**2) / D)))
    (small, se), (middle, _), (large, _) = errors
    assert abs(small) < 0.03 and se < 0.01
    assert abs(large) > 8 * se and 2.5 < large / middle < 6


@pytest.mark.nightly
def test_noise_that_prefers_no_direction_does_no_harm():
    # h v / (2 A) is about a fifth, by which other methods are too wide
    y = data()
    ratio, error, _ = variances(kernel_of(0.1, batch_size=80), y)
    assert np.all(np.abs(ratio - 1) < 4 * error + 0.01)


@pytest.mark.nightly
def test_of_other_noise_so_much_less_is_added():
    y = data([1.5, 1.0, 0.5, 0.5])
    off, error, _ = variances(kernel_of(0.1, batch_size=80), y)
    assert off[0] - 1 > 8 * error[0]
    ratio, error, mcmc = variances(kernel_of(0.1, 80, noise="full"), y)
    assert np.all(np.abs(ratio - 1) < 4 * error + 0.015)
    assert 0 < float(mcmc.get_extra_fields()["friction_used"].mean()) < 1


@pytest.mark.nightly
def test_a_tuned_run_is_right():
    y = data()
    kernel = SGMCLMC(partial(means, batch_size=80), noise="full", progress_bar=False)
    ratio, error, mcmc = variances(kernel, y, draws=5_000)
    assert np.all(np.abs(ratio - 1) < 4 * error + 0.02)
    assert summary(mcmc).verdict.startswith("No problem found")


@pytest.mark.nightly
def test_the_energy_is_conserved_without_friction():
    y = data()
    kernel = kernel_of(0.02, friction=1e-6)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=200, progress_bar=False)
    start = {"mu": jnp.full(D, 0.1)}
    mcmc.run(random.key(0), y, extra_fields=("kinetic_energy", "momentum"), init_params=start)
    mu = np.asarray(mcmc.get_samples()["mu"], np.float64)
    potential = (N + 0.01) / 2 * ((mu - np.asarray(y).sum(0) / (N + 0.01)) ** 2).sum(1)
    energy = potential + mcmc.get_extra_fields()["kinetic_energy"]
    assert np.ptp(energy) < 0.02 * np.ptp(potential)
    norm = np.linalg.norm(mcmc.get_extra_fields()["momentum"], axis=1)
    np.testing.assert_allclose(norm, np.sqrt(D), rtol=1e-5)


def test_a_single_parameter_is_refused():
    with pytest.raises(ValueError, match="has a single parameter"):
        run_mcmc(SGMCLMC(mean, step_size=0.1, friction=1.0), data()[:, 0])
