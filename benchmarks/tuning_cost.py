# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Passes over 100,000 rows before the first draw of ``CCAdL(model)``, and its promise of speed.

    python benchmarks/tuning_cost.py [--only WORD ...]

Minibatches have 500 rows. The ten categorical columns have 200,000 rows and minibatches of 1,000,
and of 8,000 with 100,000 levels. Frequencies of levels follow Zipf's law. The promise is the time
of 400 effective samples of one chain. The time that came is that of the site with the fewest
effective samples, in a run of up to 1,000 samples or a minute. Of a site it is the first
percentile, since among thousands of estimates some are small by chance.
"""

import argparse
import time

import jax
from jax import random
import jax.numpy as jnp
from measure import seconds_of_draws, table
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_sgmcmc import CCAdL

ROWS = 100_000
ASKED = 400  #: effective samples whose time is compared
PHASES = ("centre", "metric", "noise", "rare rows", "pilot")


def logistic(rng, columns):
    x = rng.standard_normal((ROWS, columns), np.float32)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([columns]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=500) as i:
            numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])

    return model, (x, coins(rng, x[:, 0]))


def student(rng, columns):
    x = rng.standard_normal((ROWS, columns), np.float32)
    y = x[:, 0] + rng.standard_t(4, ROWS)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([columns]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(2))
        nu = numpyro.sample("nu", dist.Gamma(2, 0.1))
        with numpyro.plate("rows", len(y), subsample_size=500) as i:
            numpyro.sample("y", dist.StudentT(nu, x[i] @ w, scale), obs=y[i])

    return model, (x, y)


def effects(rng, groups):
    group, x = rng.integers(groups, size=ROWS), rng.standard_normal((ROWS, 3), np.float32)
    logits = 0.7 * rng.standard_normal(groups)[group] + x[:, 0] - 0.5

    def model(group, x, y):
        mu, tau = numpyro.sample("mu", dist.Normal(0, 2)), numpyro.sample("tau", dist.HalfNormal(1))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("groups", groups):
            a = numpyro.sample("a", dist.Normal(mu, tau))
        with numpyro.plate("rows", len(y), subsample_size=500) as i:
            numpyro.sample("y", dist.Bernoulli(logits=a[group[i]] + x[i] @ b), obs=y[i])

    return model, (group, x, coins(rng, logits))


def categorical(rng, levels, columns=10, rows=200_000):
    batch = 1_000 if levels < 10_000 else 8_000
    share = 1 / np.arange(1, levels + 1)
    level = rng.choice(levels, (rows, columns), p=share / share.sum())
    logits = 0.5 * rng.standard_normal((levels, columns))[level, np.arange(columns)].sum(1) - 1

    def model(level, y):
        a = numpyro.sample("a", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1).expand([columns]).to_event(1))
        with numpyro.plate("columns", columns, dim=-1), numpyro.plate("levels", levels, dim=-2):
            u = numpyro.sample("u", dist.Normal(0, tau))
        with numpyro.plate("rows", len(y), subsample_size=batch) as i:
            logits = a + u[level[i], jnp.arange(columns)].sum(-1)
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])

    return model, (level, coins(rng, logits))


def coins(rng, logits):
    return rng.random(len(logits)) < 1 / (1 + np.exp(-logits))


CASES = {
    "logistic regression, 20 columns": (logistic, 20),
    "logistic regression, 100": (logistic, 100),
    "logistic regression, 300": (logistic, 300),
    "Student's t regression, 20": (student, 20),
    "Student's t regression, 100": (student, 100),
    "logistic, effects of 100 groups": (effects, 100),
    "effects of 400": (effects, 400),
    "effects of 2,000": (effects, 2_000),
    "effects of 20,000": (effects, 20_000),
    "ten categorical columns, 2,000 levels": (categorical, 200),
    "ten categorical columns, 20,000": (categorical, 2_000),
    "ten categorical columns, 100,000": (categorical, 10_000),
}


def seconds_to(size, model, data, tuning):
    """Seconds of one chain to an effective sample size of the slowest site."""
    draws = int(np.clip(60 / tuning.seconds_per_sample, 100, 1_000))
    kernel = CCAdL(model, tuning=tuning, progress_bar=False)
    mcmc = MCMC(kernel, num_warmup=draws // 5, num_samples=draws, progress_bar=False)
    mcmc.run(random.key(1), *data)
    samples = mcmc.get_samples(group_by_chain=True).values()
    sizes = (effective_sample_size(np.asarray(x)) for x in samples)
    came = min(float(np.quantile(x, 0.01)) for x in sizes)
    return size / came * seconds_of_draws(mcmc, data, draws, rounds=1)


def line(title):
    make, size = CASES[title]
    model, data = make(np.random.default_rng(0), size)
    data = tuple(jnp.asarray(x, jnp.int32 if x.dtype.kind == "i" else jnp.float32) for x in data)
    start = time.process_time()
    found = CCAdL(model, progress_bar=False).tune(random.key(0), *data)
    seconds = time.process_time() - start
    promised = ASKED * found.seconds_per_sample * found.slowness
    came = seconds_to(ASKED, model, data, found)
    jax.clear_caches()
    passes = [found.passes.get(phase, 0.0) for phase in PHASES]
    cost = *(f"{x:,.0f}" for x in passes), f"{sum(passes):,.0f}", f"{seconds:.0f}"
    return [title, *cost, f"{promised:.2g}", f"{came:.2g}", found.problem or ""]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", nargs="*", default=[], help="words in the titles")
    words = parser.parse_args().only
    chosen = [x for x in CASES if not words or any(word in x for word in words)]
    header = ["model", *PHASES, "all", "CPU seconds", "promised, s", "came, s", "said"]
    print(table(header, [line(title) for title in chosen]))


if __name__ == "__main__":
    main()
