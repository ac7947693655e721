# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Long samples of many parameters, whose noise is estimated in every fourth step."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_sgmcmc import CCAdL, Tuning
from numpyro_sgmcmc.gradients import noise_estimate
from numpyro_sgmcmc.gradients.noise_estimate import RunningCovariance
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel

GROUPS, VISITS, D, CHAINS = 100, 2, 6, 64
RNG = np.random.default_rng(0)
X = RNG.standard_normal((GROUPS, VISITS, D)).astype(np.float32)
Y = (X.sum(-1) + RNG.normal(0, 2, (GROUPS, 1)) + RNG.normal(0, 1, (GROUPS, VISITS))).astype(
    np.float32
)


def visits(x, y):
    """Two tables of groups with an effect each, whose two normal rows then have a covariance."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    for k, (own_x, own_y) in enumerate(zip(jnp.split(x, 2), jnp.split(y, 2), strict=True)):
        with numpyro.plate(f"groups {k}", GROUPS // 2, subsample_size=5, dim=-2) as i:
            effect = numpyro.sample(f"effect {k}", dist.Normal(0, 2))
            with numpyro.plate(f"visits {k}", VISITS, dim=-1):
                numpyro.sample(f"y {k}", dist.Normal(own_x[i] @ w + effect, 1), obs=own_y[i])


def exact_law():
    """Mean and precision of the weights."""
    inverse = np.linalg.inv(np.eye(VISITS) + 4 * np.ones((VISITS, VISITS)))
    precision = np.eye(D) + np.einsum("gvi,vu,guj->ij", X, inverse, X)
    return np.linalg.solve(precision, np.einsum("gvi,vu,gu->i", X, inverse, Y)), precision


def ratio_of_variances():
    """That of all coordinates to the exact one, with the standard error over chains."""
    kernel = CCAdL(visits, gradient="minibatch", progress_bar=False)
    kernel.tune(random.key(0), X, Y)
    options = {"chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=50, num_samples=120, num_chains=CHAINS, **options)
    mcmc.run(random.key(1), X, Y)
    assert mcmc.last_state.fixed.layout.noise.every == 4
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], float)
    mean, precision = exact_law()
    whitened = (draws - mean) @ np.linalg.cholesky(precision)
    each = (whitened**2).mean((1, 2))
    return each.mean(), each.std(ddof=1) / CHAINS**0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Minibatches do not pay")
def test_exact_law(monkeypatch):
    """It is wrong if the zeros of other steps are part of the average."""
    monkeypatch.setattr(noise_estimate, "_MANY", D - 1)
    found, error = ratio_of_variances()
    assert error < 0.01 and abs(found - 1) < 3 * error
    monkeypatch.setattr(RunningCovariance, "update", RunningCovariance._updated)
    wrong, error = ratio_of_variances()
    assert wrong - 1 > 5 * error


def kernel_with(steps, **options):
    tuning = Tuning(1e-3, 1.0, IdentityMetric(), noise=NoiseLevel(1.0, 1.0, 1.0, 0.0))
    options |= {"tuning": tuning, "steps_per_sample": steps, "gradient": "minibatch"}
    return CCAdL(visits, **options)


def seen_of(steps):
    """The steps from one estimate to the next, and the number of branches of two chains."""
    kernel = kernel_with(steps)
    state = kernel.init(random.split(random.key(0), 2), 0, None, (X, Y), {})
    traced = jax.make_jaxpr(lambda x: kernel.sample(x, (X, Y), {}))(state)
    return state.fixed.layout.noise.every, str(traced).count(" cond[")


@pytest.mark.nightly
@pytest.mark.parametrize("covariance", ["full", "diagonal", "low_rank"])
def test_one_estimate_in_four_steps(covariance, monkeypatch):
    """Those of the first, fifth, ninth and thirteenth step, and no zeros."""
    monkeypatch.setattr(noise_estimate, "_MANY", D - 1)
    kernel = kernel_with(16, noise=covariance)
    state = kernel.init(random.key(0), 0, None, (X, Y), {})
    after = kernel.sample(state, (X, Y), {}).dynamics
    assert after.observations == 4
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(after.noise_covariance))


@pytest.mark.slow
def test_steps_without_an_estimate(monkeypatch):
    """In all chains alike, so that `vmap` does not take both branches."""
    every, usual = seen_of(16)
    assert every == 1
    monkeypatch.setattr(noise_estimate, "_MANY", D - 1)
    assert seen_of(15) == (1, usual)
    assert seen_of(16) == (4, usual + 2)
