# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
A run with 21 latent numbers in each group, whose factorisations wait for each other for ever if
they are batches for LAPACK that are not in order: ``test_linear_algebra.py`` starts it with two
threads. With ``correlated`` the law of the effects itself has a factorisation.
"""

from functools import partial
import sys

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, init_to_median

from numpyro_sgmcmc import CCAdL
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.model import read_model, unremarkable_values
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.tuning import Tuning

GROUPS, ROWS, SIZE = 200, 5, 21
X = random.normal(random.key(0), (GROUPS, ROWS, SIZE))
Y = (X.sum(-1) > 0).astype(jnp.float32)


def model(x, y, correlated=False):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(0.5))
    with numpyro.plate("groups", GROUPS, subsample_size=20) as g:
        if correlated:
            covariance = tau**2 * (0.7 * jnp.eye(SIZE) + 0.3)
            law = dist.MultivariateNormal(mu * jnp.ones(SIZE), covariance)
        else:
            law = dist.Normal(mu, tau).expand([SIZE]).to_event(1)
        effects = numpyro.sample("effects", law)
        with numpyro.plate("rows", ROWS):
            logits = jnp.einsum("gmk,gk->mg", x[g], effects)
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[g].T)


def kernel_of(correlated=False, method=CCAdL):
    """With a control variate, whose anchor is another point at which the integrals are done."""
    written, data = partial(model, correlated=correlated), (X, Y)
    view = read_model(written, init_to_median, data, {})
    anchor = Target(view, data, {}).expansion(unremarkable_values(view))
    return method(written, tuning=Tuning(1e-3, 1.0, IdentityMetric(), anchor=anchor))


if __name__ == "__main__":
    mcmc = MCMC(
        kernel_of("correlated" in sys.argv),
        num_warmup=5,
        num_samples=20,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), X, Y)
    assert all(np.isfinite(draws).all() for draws in mcmc.get_samples().values())
