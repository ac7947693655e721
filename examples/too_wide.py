# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A run that R-hat and effective sample sizes find perfect, and that is far too wide."""

import warnings

warnings.filterwarnings("ignore", category=FutureWarning)  # ArviZ 0.23 announces ArviZ 1.0

from jax import random
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMC, CCAdL, summary


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=500) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def run(kernel, *data):
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=2_000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(2), *data)
    print(f"\n{type(kernel).__name__}\n{summary(mcmc)}")


x = random.normal(random.key(0), (100_000, 3))
y = (x[:, 0] + random.logistic(random.key(1), (100_000,)) > 0).astype(int)

run(SGHMC(model, step_size=3e-3, friction=100.0, steps_per_sample=10), x, y)
run(CCAdL(model, progress_bar=False), x, y)
