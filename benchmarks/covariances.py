# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Coverage of intervals for the covariance parameters of a generalised linear mixed model, over data
sets and tunings with keys of their own.

    python benchmarks/covariances.py [--runs 200] [--first 0] [--nuts]

Each of 1,000 subjects has ten binary outcomes, and a random intercept and slope that are
correlated. SGLD diverges for such parameters, and "cannot be reliably used" (Baek and Berchuck,
2026, arXiv:2604.26029). The design is one of this package, since that of the paper is another. With
``--nuts`` each posterior is sampled by NUTS too, with the effects of all subjects as parameters.
"""

import argparse
import sys
import time

import jax
from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import CCAdL

SUBJECTS, VISITS = 1_000, 10
TRUTH = {
    "intercept": -0.5,
    "slope": 0.5,
    "sd of intercepts": 1.0,
    "sd of slopes": 0.7,
    "correlation": 0.3,
}


def model(time, y):
    mean = numpyro.sample("mean", dist.Normal(0, 3).expand([2]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(2).expand([2]).to_event(1))
    cholesky = numpyro.sample("cholesky", dist.LKJCholesky(2, 1))
    with numpyro.plate("subjects", len(y), subsample_size=50) as i:
        law = dist.MultivariateNormal(mean, scale_tril=sd[:, None] * cholesky)
        line = numpyro.sample("line", law)
        with numpyro.plate("visits", VISITS):
            logits = line[..., 0] + line[..., 1] * time[:, None]
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i].T)


def simulated(rng):
    intercept, slope, one, other, correlation = TRUTH.values()
    covariance = [[one**2, correlation * one * other], [correlation * one * other, other**2]]
    line = rng.multivariate_normal([intercept, slope], covariance, SUBJECTS)
    time = np.linspace(-1, 1, VISITS)
    logits = line[:, :1] + line[:, 1:] * time
    y = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
    return jnp.asarray(time, jnp.float32), jnp.asarray(y, jnp.float32)


def draws_of(seed):
    """Draws of each parameter, shape (chains, draws), and whether the tuning warns."""
    data = simulated(np.random.default_rng(seed))
    kernel = CCAdL(model, progress_bar=False)
    found = kernel.tune(random.key(seed), *data)
    setting = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=100, num_samples=500, jit_model_args=True, **setting)
    mcmc.run(random.key(1_000 + seed), *data)
    return columns_of(mcmc), found.problem


def columns_of(mcmc):
    """Draws of each parameter, shape (chains, draws)."""
    x = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    columns = *np.moveaxis(x["mean"], -1, 0), *np.moveaxis(x["sd"], -1, 0), x["cholesky"][..., 1, 0]
    return dict(zip(TRUTH, columns, strict=True))


def non_centred(time, y):
    """The model for NUTS, with the same law."""
    mean = numpyro.sample("mean", dist.Normal(0, 3).expand([2]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(2).expand([2]).to_event(1))
    cholesky = numpyro.sample("cholesky", dist.LKJCholesky(2, 1))
    normal = numpyro.sample("normal", dist.Normal(0, 1).expand([len(y), 2]).to_event(2))
    line = mean + normal @ (sd[:, None] * cholesky).T
    numpyro.sample("y", dist.Bernoulli(logits=line[:, :1] + line[:, 1:] * time), obs=y)


def by_nuts(seed):
    """The lines of the table for one data set, from draws of NUTS."""
    setting = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(NUTS(non_centred), num_warmup=500, num_samples=1_500, **setting)
    mcmc.run(random.key(seed), *simulated(np.random.default_rng(seed)))
    draws = columns_of(mcmc)
    return [line(draws[name], truth) for name, truth in TRUTH.items()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--nuts", action="store_true", help="run NUTS too")
    options = parser.parse_args()
    found, nuts, warned = [], [], 0
    for seed in range(options.first, options.first + options.runs):
        start = time.perf_counter()
        draws, problem = draws_of(seed)
        found.append([line(draws[name], truth) for name, truth in TRUTH.items()])
        nuts += [by_nuts(seed)] if options.nuts else []
        warned += problem is not None
        print(seed, problem or "", f"{time.perf_counter() - start:.1f} s", file=sys.stderr)
        jax.clear_caches()  # thousands of programs exhaust the memory maps of a process
    print(f"{report(found)}\n{options.runs} runs, {warned} with a warning.")
    if nuts:
        # the z-scores of NUTS and of this package, for each parameter
        apart = np.array(found, float)[..., 1] - np.array(nuts, float)[..., 1]
        print(f"By NUTS:\n{report(nuts)}\nLargest difference of z: {np.abs(apart).max():.2f}.")


def report(found):
    """The table of all runs."""
    held, z, sizes = np.moveaxis(np.array(found, float), -1, 0)
    rows = [
        [
            name,
            f"{100 * held[:, k].mean():.1f}",
            f"{z[:, k].mean():+.2f}",
            f"{z[:, k].std():.2f}",
            f"{sizes[:, k].min():,.0f}",
        ]
        for k, name in enumerate(TRUTH)
    ]
    heads = "parameter", "95 % intervals that hold it, %", "mean of z", "sd of z", "least ESS"
    return table(heads, rows)


def line(draws, truth):
    """Whether an interval holds the truth, the z-score of the mean, and effective samples."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return low < truth < high, (draws.mean() - truth) / draws.std(), effective_sample_size(draws)


if __name__ == "__main__":
    main()
