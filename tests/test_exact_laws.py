# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The stationary law of each method, through the whole pipeline: a NumPyro model with a
subsampled plate, run by ``MCMC``.

With observations :math:`x_i \\sim N(\\theta, s^2)` the gradient noise does not depend on
:math:`\\theta`: its covariance is :math:`(N^2/n)(1 - n/N) S_x^2 / s^4`, and the law of every
discretisation is known exactly (``exact_laws.py``).
"""

from functools import partial
import math

import exact_laws
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_sgmcmc import SGHMC, SGLD, SGNHT, CCAdL
from numpyro_sgmcmc.integrators import euler_kick
from numpyro_sgmcmc.kernels._base import Momentum, MomentumKernel

N, BATCH, NOISE = 100, 10, 4.0
FRICTION = 1.0
#: So heavy that the thermostat is constant, as the closed forms assume.
HEAVY = 100.0


class ExplicitEuler(MomentumKernel):
    """SGHMC as several libraries have it, with the gradient at the position before the drift."""

    def step(self, state, gradient, rng_key):
        h, p = state.step_size, state.momentum
        observed = gradient(state.z)
        noise = random.normal(rng_key, p.shape, p.dtype)
        position = state.z + h * p
        p = euler_kick(p, observed.gradient, self._friction * p, self._friction, h, noise)
        return state._replace(z=position, dynamics=Momentum(p))


def gaussian_mean(x, precision_factor):
    """x_i ~ N(theta, Lambda_1^-1), with an improper flat prior and Lambda_1 = L L'."""
    size = x.shape[1]
    prior = dist.ImproperUniform(dist.constraints.real_vector, (), (size,))
    theta = numpyro.sample("theta", prior)
    with numpyro.plate("rows", x.shape[0], subsample_size=BATCH) as i:
        residual = (x[i] - theta) @ precision_factor
        numpyro.factor("x", -0.5 * jnp.sum(residual**2, -1))


def data(precision, noise, subsampling="without_replacement"):
    """
    Observations, and the factor of the precision of one of them, for which the posterior has
    mean zero and the given precision and the minibatch gradient the given noise covariance.
    """
    size = len(precision)
    x = np.random.default_rng(0).standard_normal((N, size))
    x -= x.mean(0)
    if size <= 2:
        x = x @ np.linalg.inv(np.linalg.cholesky(np.cov(x.T, ddof=1).reshape(size, size))).T
    else:
        x /= x.std(0, ddof=1)
    one = precision / N
    factor = 1 - BATCH / N if subsampling == "without_replacement" else 1 - 1 / N
    covariance = noise * BATCH / (N**2 * factor)
    back = np.linalg.inv(one)
    x = x @ np.linalg.cholesky(back @ covariance @ back).T
    return jnp.asarray(x, jnp.float32), jnp.asarray(np.linalg.cholesky(one), jnp.float32)


def z_score(series, expected):
    """How many standard errors a mean is off, and the standard error relative to the mean."""
    error = series.std() / effective_sample_size(series) ** 0.5
    return (series.mean() - expected) / error, error / abs(expected)


def directions_variance(kernel, x, factor, dimension=500, num_samples=8_000):
    """Time series of the mean square of many independent coordinates with the same law."""
    mcmc = MCMC(kernel, num_warmup=1_000, num_samples=num_samples, progress_bar=False)
    start = {"theta": jnp.zeros(dimension)}
    mcmc.run(random.key(1), x, factor, init_params=start)
    assert mcmc.last_state.nonfinite_steps == 0
    return (np.asarray(mcmc.get_samples(True)["theta"], float) ** 2).mean(-1)


def scalar_law(name, h):
    """The closed forms of one direction, as printed: precision 1, friction 1, noise 4."""
    a, v = h * FRICTION, NOISE
    if name.startswith("SGLD"):
        return (1 + h * v / 2) / (1 - h / 2)
    if name == "SGHMC" or name == "SGHMC explicit":
        return (1 + h**2 * v / 2 / a) / (1 - h**2 / (2 * (2 - a)))
    if name == "SGHMC corrected":
        return 1 / (1 - h**2 / (2 * (2 - a)))
    one = np.eye(1)
    control = v * one if name.startswith("CCAdL") else 0.0
    return exact_laws.thermostatted(one, v * one, h, FRICTION, control)[0].item()


METHODS = {
    "SGLD": SGLD,
    "SGLD with replacement": partial(SGLD, subsampling="with_replacement"),
    "SGHMC": partial(SGHMC, friction=FRICTION),
    "SGHMC corrected": partial(SGHMC, friction=FRICTION, noise_variance=NOISE),
    "SGNHT": partial(SGNHT, friction=FRICTION, thermal_mass=HEAVY),
    "CCAdL": partial(CCAdL, friction=FRICTION, thermal_mass=HEAVY),
    "CCAdL all steps": partial(CCAdL, friction=FRICTION, thermal_mass=HEAVY, window=math.inf),
}
#: Two step sizes at which the bias is at least 5 %, where the method has one with this noise.
STEP_SIZES = {"SGHMC corrected": (0.45, 0.5)}


def measure(name, method, h):
    subsampling = "with_replacement" if "with replacement" in name else "without_replacement"
    dimension = 500
    one = np.eye(dimension)
    x, factor = data(one, NOISE * one, subsampling)
    kernel = method(gaussian_mean, step_size=h, steps_per_sample=4)
    return z_score(directions_variance(kernel, x, factor), scalar_law(name, h))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("which", [0, 1])
def test_stationary_variance(name, which):
    h = STEP_SIZES.get(name, (0.1, 0.2))[which]
    assert abs(scalar_law(name, h) - 1) > 0.05
    z, error = measure(name, METHODS[name], h)
    assert error < 0.01
    assert abs(z) < 3


@pytest.mark.slow
def test_negative_control():
    """Explicit Euler is found out, at both step sizes, by the test that the others pass."""
    for h in (0.1, 0.2):
        z, error = measure("SGHMC explicit", partial(ExplicitEuler, friction=FRICTION), h)
        assert error < 0.01
        assert abs(z) > 10


@pytest.mark.parametrize("h", [0.05, 0.1, 0.2])
def test_closed_forms_solve_the_lyapunov_equation(h):
    one = np.eye(1)
    noise, friction = NOISE * one, FRICTION * one
    assert exact_laws.sgld(one, noise, h) == pytest.approx(scalar_law("SGLD", h))
    sghmc, _ = exact_laws.drift_then_kick(one, noise, h, friction, friction)
    assert sghmc == pytest.approx(scalar_law("SGHMC", h))
    corrected = friction - h * noise / 4 * 2
    found, _ = exact_laws.drift_then_kick(one, noise, h, friction, corrected)
    assert found == pytest.approx(scalar_law("SGHMC corrected", h))
    variance, xi = exact_laws.thermostatted(one, noise, h, FRICTION)
    assert variance == pytest.approx(1 - h * xi / 2)
    variance, xi = exact_laws.thermostatted(one, noise, h, FRICTION, noise)
    assert variance == pytest.approx(1 - (h * xi + h**2 * NOISE / 2) / 2)


# Two directions in which the precision and the noise do not commute.
PRECISION = np.linalg.inv([[1.0, 0.9], [0.9, 1.0]])
NOISE_2 = np.diag([4.0, 1.0])
PLANE = {
    "SGLD": (SGLD, exact_laws.sgld(PRECISION, NOISE_2, 0.1)),
    "SGHMC": (
        partial(SGHMC, friction=1.5),
        exact_laws.drift_then_kick(PRECISION, NOISE_2, 0.1, 1.5 * np.eye(2), 1.5 * np.eye(2))[0],
    ),
    "SGHMC corrected": (
        partial(SGHMC, friction=1.5, noise_variance={"theta": [4.0, 1.0]}),
        exact_laws.drift_then_kick(
            PRECISION, NOISE_2, 0.1, 1.5 * np.eye(2), 1.5 * np.eye(2) - 0.05 * NOISE_2
        )[0],
    ),
    "SGNHT": (
        partial(SGNHT, friction=1.5, thermal_mass=HEAVY),
        exact_laws.thermostatted(PRECISION, NOISE_2, 0.1, 1.5)[0],
    ),
    "CCAdL": (
        partial(CCAdL, friction=1.5, thermal_mass=HEAVY, covariance="full", window=math.inf),
        exact_laws.thermostatted(PRECISION, NOISE_2, 0.1, 1.5, NOISE_2)[0],
    ),
}


def test_published_references():
    """The entries (1, 1), (1, 2), (2, 2) that other work has for this case."""
    upper = np.triu_indices(2)
    np.testing.assert_allclose(PLANE["SGLD"][1][upper], [1.22513514, 0.98513514, 1.19513514])
    np.testing.assert_allclose(PLANE["SGHMC"][1][upper], [1.08977318, 0.97496142, 1.08283484])
    np.testing.assert_allclose(
        PLANE["SGHMC corrected"][1][upper], [1.00274217, 0.89996439, 1.00274217], rtol=1e-7
    )


def plane_moments(kernel, chains=400, num_samples=2_500):
    """Time series, over chains, of the three second moments."""
    x, factor = data(PRECISION, NOISE_2)
    mcmc = MCMC(
        kernel,
        num_warmup=1_000,
        num_samples=num_samples,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = {"theta": jnp.zeros((chains, 2))}
    mcmc.run(random.key(2), x, factor, init_params=start)
    theta = np.asarray(mcmc.get_samples(True)["theta"], float)
    return [(theta[..., j] * theta[..., k]) for j, k in ((0, 0), (0, 1), (1, 1))]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANE)
def test_stationary_covariance_of_noncommuting_noise(name):
    method, covariance = PLANE[name]
    kernel = method(gaussian_mean, step_size=0.1, steps_per_sample=4)
    for series, expected in zip(plane_moments(kernel), covariance[np.triu_indices(2)], strict=True):
        means = series.mean(1)  # of independent chains
        error = means.std(ddof=1) / len(means) ** 0.5
        assert error < 0.01 * expected
        assert abs(means.mean() - expected) < 3 * error


@pytest.mark.slow
def test_temperature():
    """At temperature T the covariance is T times that of noise V / T."""
    temperature, h = 0.25, 0.1
    dimension = 500
    one = np.eye(dimension)
    x, factor = data(one, temperature * NOISE * one)
    for name in ("SGLD", "SGHMC", "SGNHT", "CCAdL"):
        kernel = METHODS[name](
            gaussian_mean, step_size=h, steps_per_sample=4, temperature=temperature
        )
        series = directions_variance(kernel, x, factor) / temperature
        z, error = z_score(series, scalar_law(name, h))
        assert error < 0.01 and abs(z) < 3, name
