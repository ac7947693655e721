# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Goals of 200,000 football matches between 2,000 teams, with an attack and a defence of each team,
simulated, against NUTS on all matches.

    python benchmarks/matches.py [--draws 500]

Each match has two rows of the design. Every team is on both sides, so that no effect can be local.
"""

import argparse
import time

from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import CCAdL, full_data

TEAMS, MATCHES = 2_000, 200_000
SCALES = ("sd_attack", "sd_defence")


def model(home, away, goals, teams):
    level = numpyro.sample("level", dist.Normal(0, 1))
    at_home = numpyro.sample("at_home", dist.Normal(0, 1))
    one, other = (numpyro.sample(name, dist.HalfNormal(1)) for name in SCALES)
    with numpyro.plate("teams", teams):
        attack = numpyro.sample("attack", dist.Normal(0, one))
        defence = numpyro.sample("defence", dist.Normal(0, other))
    with numpyro.plate("matches", len(home), subsample_size=2_000) as i:
        rates = jnp.stack(
            [
                level + at_home + attack[home[i]] - defence[away[i]],
                level + attack[away[i]] - defence[home[i]],
            ],
            axis=-1,
        )
        numpyro.sample("goals", dist.Poisson(jnp.exp(rates)).to_event(1), obs=goals[i])


def simulated(rng):
    home = rng.integers(TEAMS, size=MATCHES)
    away = (home + rng.integers(1, TEAMS, size=MATCHES)) % TEAMS
    attack, defence = 0.3 * rng.standard_normal(TEAMS), 0.2 * rng.standard_normal(TEAMS)
    rates = [0.3 + attack[home] - defence[away], 0.1 + attack[away] - defence[home]]
    goals = rng.poisson(np.exp(np.stack(rates, 1)))
    return *(jnp.asarray(x, jnp.int32) for x in (home, away)), jnp.asarray(goals, jnp.float32)


def draws_of(kernel, data, draws, warmup):
    start = time.perf_counter()
    setting = {"num_chains": 2, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, **setting)
    mcmc.run(random.key(1), *data, TEAMS)
    found = {k: np.asarray(x) for k, x in mcmc.get_samples(group_by_chain=True).items()}
    names = ("level", "at_home", *SCALES, "attack", "defence")
    flat = np.concatenate([found[k].reshape(2, draws, -1) for k in names], -1)
    return flat, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--draws", type=int, default=500, help="of each of two chains")
    parser.add_argument("--draws-of-nuts", type=int, default=300)
    options = parser.parse_args()
    data = simulated(np.random.default_rng(0))
    kernel = CCAdL(model, progress_bar=False)
    start = time.perf_counter()
    passes = sum(kernel.tune(random.key(0), *data, TEAMS).passes.values())
    tuned = time.perf_counter() - start
    own, seconds = draws_of(kernel, data, options.draws, options.draws // 5)
    exact, of_nuts = draws_of(NUTS(full_data(model)), data, options.draws_of_nuts, 300)
    sizes, others = effective_sample_size(own), effective_sample_size(exact)
    mean, sd = exact.mean((0, 1)), exact.std((0, 1))
    z = (own.mean((0, 1)) - mean) / sd / np.sqrt(1 / sizes + 1 / others)
    heads = ["kernel", "seconds", "least ESS", "largest R-hat"]
    rows = [
        [
            f"CCAdL, after {passes:,.0f} passes in {tuned:.0f} s",
            f"{seconds:.0f}",
            *judged(own, sizes),
        ],
        ["NUTS", f"{of_nuts:.0f}", *judged(exact, others)],
    ]
    print(table(heads, rows))
    print(
        f"z-scores of the means: of level, home and scales {np.round(z[:4], 1)}, of {len(z) - 4:,}"
        f" effects rms {np.sqrt(np.mean(z[4:] ** 2)):.2f}, largest {np.abs(z[4:]).max():.1f}."
        f" Ratios of standard deviations: {np.round(own.std((0, 1))[:4] / sd[:4], 2)}, of effects"
        f" {np.mean(own.std((0, 1))[4:] / sd[4:]):.3f}."
    )


def judged(draws, sizes):
    return f"{sizes.min():,.0f}", f"{split_gelman_rubin(draws).max():.2f}"


if __name__ == "__main__":
    main()
