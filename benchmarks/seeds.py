# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
How often a run that is right is said to be wrong: fifty tunings of ``CCAdL(model)``, each with a
key and data of its own, and a run of four chains after each.

    python benchmarks/seeds.py [--seeds 50]
"""

import argparse
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_sgmcmc import CCAdL
from numpyro_sgmcmc.stein import stein_report


def model(x, y, batch_size=100):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--seeds", type=int, default=50)
    seeds = parser.parse_args().seeds
    warned, temperatures, halvings = 0, [], 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        d = int(rng.integers(2, 30))
        x = jnp.asarray(rng.standard_normal((5_000, d)), jnp.float32)
        y = jnp.asarray(rng.random(5_000) < 1 / (1 + np.exp(-x[:, 0])), jnp.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tuning = CCAdL(model, progress_bar=False).tune(random.key(seed), x, y)
            mcmc = MCMC(
                CCAdL(model, tuning=tuning),
                num_warmup=500,
                num_samples=2_000,
                num_chains=4,
                chain_method="vectorized",
                progress_bar=False,
            )
            mcmc.run(random.key(seed), x, y)
            jax.block_until_ready(mcmc.last_state)
        report = stein_report(mcmc.last_state.monitor.stein)
        problem = report.problem() or "; ".join(str(w.message)[:100] for w in caught)
        warned += bool(problem)
        halvings += tuning.halvings
        temperatures.append((report.temperature - 1) / report.error)
        print(f"{seed:3d} d={d:2d} h={tuning.step_size:.3f} {problem or 'silent'}", flush=True)
        jax.clear_caches()
    print(
        f"{warned} of {seeds} warn; {halvings} halvings of the step size; the temperatures are"
        f" {np.mean(temperatures):.2f} +- {np.std(temperatures):.2f} standard errors from 1"
    )


if __name__ == "__main__":
    main()
