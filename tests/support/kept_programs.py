# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
A tuned run in a process of its own, what ``test_kept_programs.py`` starts as ``python
kept_programs.py bar-or-not``: prints how many programs JAX's compilation cache had, how many it had
not, and the sum of the draws.
"""

import os
import sys
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from known_posterior import X, Y, model  # noqa: E402
from numpyro.infer import MCMC  # noqa: E402

from numpyro_sgmcmc import CCAdL  # noqa: E402

seen: list[str] = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.split("/")[-1]))

mcmc = MCMC(
    CCAdL(model),
    num_warmup=10,
    num_samples=50,
    num_chains=2,
    chain_method="vectorized",
    progress_bar=sys.argv[1] == "bar",
    jit_model_args=True,
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    mcmc.run(jax.random.key(0), jnp.asarray(X), jnp.asarray(Y))
draws = sum(float(x.sum()) for x in jax.tree.leaves(mcmc.get_samples()))
print(seen.count("cache_hits"), seen.count("cache_misses"), draws)
