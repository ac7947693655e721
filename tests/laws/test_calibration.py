# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Simulation-based calibration (Talts et al. 2018): with parameters drawn from the prior and data
drawn given them, the rank of the parameters among draws of their posterior is uniform. Of the
kernels as they come, through ``MCMC``, for all simulated data in one program.
"""

from functools import cache, partial
from itertools import product

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, Predictive, log_likelihood
import pytest
from scipy import stats

from numpyro_sgmcmc import PSGLD, SGFS, SGHMC, SGLD, SGNHT, SMSUBU, CCAdL, full_data

N, BATCH = 240, 60
SIMULATIONS, WARMUP, DRAWS = 256, 10, 63

#: From one draw to the next, so that they are about independent; whole sweeps of SMSUBU.
STEPS = {SGLD: 64, PSGLD: 64, SGFS: 64, SGHMC: 24, SGNHT: 40, CCAdL: 16, SMSUBU: 24}

#: Widens the law of the ranks by less than 1 %.
LARGEST_AUTOCORRELATION = 0.2

#: Of the test: location, width, skewness and tails.
ORDER = 4

#: For 49 comparisons; the statistic exceeds the quantile of its limit twice as often, so that
#: right samplers fail once in a thousand times.
ALPHA = 1e-5

X = jnp.stack([jnp.ones(N), 0.5 + random.normal(random.key(0), (N,))], 1)


# The priors are about twice as wide as the posteriors, so that one tuning serves all data.


def linear(y=None):
    w = numpyro.sample("w", dist.Normal(0, 0.15).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0, 0.1))
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, scale), obs=None if y is None else y[i])


def poisson(y=None):
    w = numpyro.sample("w", dist.Normal(jnp.array([-0.5, 0.0]), 0.15).to_event(1))
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(X[i] @ w)), obs=None if y is None else y[i])


@cache
def simulated(model):
    """Parameters from the prior with data, and data of the mean of the parameters."""
    parameters = Predictive(full_data(model), num_samples=SIMULATIONS)(random.key(0))
    data = parameters.pop("y")
    mean = {name: values.mean(0, keepdims=True) for name, values in parameters.items()}
    return parameters, data, Predictive(full_data(model), mean)(random.key(1))["y"][0]


def true_and_drawn(kernel, model, **options):
    """
    Parameters and log likelihood, the true ones and, after them, those of draws of the
    posterior. Shape (simulations, 1 + draws, quantities).
    """
    parameters, data, typical = simulated(model)
    # a kernel cannot tune itself to data that are traced
    tuning = kernel(model, progress_bar=False).tune(random.key(2), typical)

    @jax.jit
    @jax.vmap
    def run(key, true, y):
        mcmc = MCMC(
            kernel(model, tuning=tuning, progress_bar=False, **options),
            num_warmup=WARMUP,
            num_samples=DRAWS,
            progress_bar=False,
        )
        mcmc.run(key, y)
        values = jax.tree.map(
            lambda first, others: jnp.concatenate([first[None], others]), true, mcmc.get_samples()
        )
        # sees errors of all parameters at once
        likelihood = log_likelihood(full_data(model), values, y)["y"].sum(1)
        columns = jnp.column_stack([*jax.tree.leaves(values), likelihood])
        return columns, mcmc.last_state.monitor.nonfinite_steps

    values, undone = run(random.split(random.key(3), SIMULATIONS), parameters, data)
    # by a kernel that was tuned to other data: too few to move a rank
    steps = SIMULATIONS * (WARMUP + DRAWS) * options["steps_per_sample"]
    assert np.sum(undone) < 3e-5 * steps
    values = np.asarray(values, float)
    assert np.all(np.abs(autocorrelation(values[:, 1:])) < LARGEST_AUTOCORRELATION)
    return values


def autocorrelation(draws):
    """Of one draw and the next, in the mean over the simulations."""
    draws = draws - draws.mean(1, keepdims=True)
    return (draws[:, 1:] * draws[:, :-1]).sum((0, 1)) / (draws**2).sum((0, 1))


def p_values(values):
    """Neyman's smooth test that the ranks of the true values are uniform."""
    ranks = (values[:, 1:] < values[:, :1]).sum(1)
    # orthogonal polynomials on the possible ranks
    basis, _ = np.linalg.qr(np.vander(np.linspace(-1, 1, DRAWS + 1), ORDER + 1, increasing=True))
    scores = basis[ranks, 1:].sum(0) * np.sqrt((DRAWS + 1) / SIMULATIONS)
    return stats.chi2.sf((scores**2).sum(-1), ORDER)


@pytest.mark.nightly
@pytest.mark.parametrize(("kernel", "model"), list(product(STEPS, (linear, poisson))))
def test_ranks_are_uniform(kernel, model):
    values = true_and_drawn(kernel, model, steps_per_sample=STEPS[kernel])
    assert np.all(p_values(values) > ALPHA)


@pytest.mark.nightly
def test_ranks_of_draws_that_are_too_wide():
    """By 30 %: the noise of plain minibatches has a variance of 2.5, and widens by h v / (2 A)."""
    options = {"step_size": 0.3, "friction": 0.6, "steps_per_sample": 48}
    values = true_and_drawn(partial(SGHMC, gradient="minibatch"), linear, **options)
    *_, of_likelihood = p_values(values)
    assert of_likelihood < ALPHA
