# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A Gaussian posterior with constant gradient noise, sampled, and what is said of its variance."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_sgmcmc.kernels.integrators import euler_kick
from numpyro_sgmcmc.kernels.momentum import Momentum, MomentumKernel
from numpyro_sgmcmc.stein import stein_report

N, BATCH, NOISE = 100, 10, 4.0


class ExplicitEuler(MomentumKernel):
    """SGHMC as several libraries have it, with the gradient at the position before the drift."""

    class Method(MomentumKernel.Method):
        def step(self, state, gradient, rng_key):
            h, p, friction = state.step_size, state.dynamics.momentum, state.fixed.friction
            evaluation = gradient(state.z)
            noise = random.normal(rng_key, p.shape, p.dtype)
            position = state.z + h * p
            p = euler_kick(p, evaluation.gradient, friction * p, friction, h, noise)
            return state._replace(z=position, dynamics=Momentum(p)), evaluation

        def suggest(self, noise):
            return 0.1, 1.0


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


#: Of some two hundred comparisons none is to be off by chance; 5 % are five standard errors.
Z = 3.5


def z_score(series, expected):
    """How many standard errors a mean is off, and the standard error relative to the mean."""
    error = series.std() / effective_sample_size(series) ** 0.5
    return (series.mean() - expected) / error, error / abs(expected)


def sampled(kernel, x, factor, num_samples=4_000):
    """The squares of many independent coordinates, at each draw, and the Stein matrix."""
    mcmc = MCMC(kernel, num_warmup=num_samples // 4, num_samples=num_samples, progress_bar=False)
    start = {"theta": jnp.zeros(x.shape[1])}
    mcmc.run(random.key(1), x, factor, init_params=start)
    assert mcmc.last_state.monitor.nonfinite_steps == 0
    draws = np.asarray(mcmc.get_samples(True)["theta"], float)
    return draws**2, stein_report(mcmc.last_state.monitor.stein)
