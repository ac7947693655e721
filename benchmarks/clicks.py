# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
A click log: two million rows with ten categorical columns of 50 to 50,000 levels, 88,861
parameters, simulated.

    python benchmarks/clicks.py [--rows 2_000_000] [--draws 250]

Frequencies of levels follow Zipf's law. All effects are sampled, with a scale for each column. The
intercept is known much less than its sum with the means of the columns.
"""

import argparse
import resource
import time

from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_sgmcmc import CCAdL

LEVELS = 50_000, 20_000, 10_000, 5_000, 2_000, 1_000, 500, 200, 100, 50
SCALE = 0.5  #: standard deviation of the true effects of each column
SHARE = 0.008  #: of the rows in a minibatch
COMPARED = 2_000  #: effects whose intervals are compared with the truth


def model(level, y):
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([len(LEVELS)]).to_event(1))
    with numpyro.plate("levels", sum(LEVELS)):
        law = dist.Normal(0, scale[np.repeat(np.arange(len(LEVELS)), LEVELS)])
        effect = numpyro.sample("effect", law)
    with numpyro.plate("rows", len(y), subsample_size=int(SHARE * len(y))) as i:
        logits = intercept + effect[level[i]].sum(-1)
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])


def simulated(rng, rows):
    shares = (1 / np.arange(1, levels + 1) for levels in LEVELS)
    drawn = [rng.choice(len(share), rows, p=share / share.sum()) for share in shares]
    level = np.stack(drawn, 1) + np.cumsum([0, *LEVELS[:-1]])
    effects = SCALE * rng.standard_normal(sum(LEVELS))
    y = rng.random(rows) < 1 / (1 + np.exp(1 - effects[level].sum(1)))
    return jnp.asarray(level, jnp.int32), jnp.asarray(y, jnp.float32), effects


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--draws", type=int, default=250, help="of each of two chains")
    options = parser.parse_args()
    level, y, truth = simulated(np.random.default_rng(0), options.rows)
    start = time.perf_counter()
    kernel = CCAdL(model, progress_bar=False)
    passes = sum(kernel.tune(random.key(0), level, y).passes.values())
    tuned = time.perf_counter()
    setting = {"num_chains": 2, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=options.draws // 5, num_samples=options.draws, **setting)
    mcmc.run(random.key(1), level, y)
    draws = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    done = time.perf_counter()
    rows = []
    # the shift of the intercept by the means of the effects that were drawn
    ends = np.cumsum([0, *LEVELS])
    columns = np.split(truth, ends[1:-1])
    rows.append(line("intercept", draws["intercept"], sum(x.mean() for x in columns) - 1))
    for k, levels in enumerate(LEVELS):
        title = f"scale of {levels:,} levels"
        rows.append(line(title, draws["scale"][..., k], columns[k].std()))
    heads = "parameter", "of the effects drawn", "mean", "sd", "effective samples", "R-hat"
    print(table(heads, rows))
    chosen = np.random.default_rng(1).choice(len(truth), COMPARED, replace=False)
    some = draws["effect"][..., chosen]
    low, high = np.quantile(some.reshape(-1, COMPARED), [0.025, 0.975], axis=0)
    held = np.mean((low < truth[chosen]) & (truth[chosen] < high))
    sizes = np.quantile(effective_sample_size(some), [0.01, 0.5])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{100 * held:.1f} % of {COMPARED:,} effects are in their 95 % intervals. They have"
        f" {sizes[0]:.0f} effective samples (first percentile) and {sizes[1]:.0f} (median).\n"
        f"Tuning took {tuned - start:.0f} s ({passes:,.0f} passes) and the draws"
        f" {done - tuned:.0f} s, in {memory:.1f} GB."
    )


def line(title, draws, truth):
    size, r_hat = effective_sample_size(draws), split_gelman_rubin(draws)
    figures = f"{truth:.3f}", f"{draws.mean():.3f}", f"{draws.std():.3f}"
    return [title, *figures, f"{size:,.0f}", f"{r_hat:.2f}"]


if __name__ == "__main__":
    main()
