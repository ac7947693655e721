# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
What the diagnostics cost, what they see, and how often they are wrong.

    python benchmarks/diagnostics.py [--only cost|verdicts|step_sizes] [--picture FILE]
"""

import argparse
import time
import warnings

import arviz as az
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import xarray as xr

from numpyro_sgmcmc import SGLD, CCAdL, kernel_stein_discrepancy, summary, to_arviz
from numpyro_sgmcmc.stein import stein_report

N, BATCH = 400, 100
PRECISION = N + 0.01

RUNS, CHAINS = 200, 4


def gaussian_mean(y, batch_size=BATCH):
    mu = numpyro.sample("mu", dist.Normal(0, 10).expand([y.shape[1]]).to_event(1))
    with numpyro.plate("rows", y.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])


def data(dimension, noise=2.0):
    """Data whose gradient noise has this variance in units of the precision, and no other."""
    y = np.random.default_rng(3).standard_normal((N, dimension))
    y = (y - y.mean(0)) / y.std(0, ddof=1)
    scale = np.sqrt(noise * PRECISION / (N**2 / BATCH * (1 - BATCH / N)))
    return jnp.asarray(scale * y, jnp.float32)


def run(kernel, y, num_samples, chains, num_warmup=500, key=0):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(key), y)
        jax.block_until_ready(mcmc.last_state)
    return mcmc


def seconds(function, repeats=3):
    """The first time, with compilation, and the median of the others."""
    taken = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return taken[0], float(np.median(taken[1:]))


def cost():
    """4 chains of 10,000 draws of 100 parameters; logistic regression with 10,000 rows."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((10_000, 100)), jnp.float32)
    y = jnp.asarray(rng.random(10_000) < 1 / (1 + np.exp(-np.asarray(x)[:, 0])), jnp.float32)

    def logistic(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([100]).to_event(1))
        with numpyro.plate("rows", x.shape[0], subsample_size=500) as i:
            numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])

    kernel = CCAdL(logistic, 0.01, 30.0)
    mcmc = MCMC(
        kernel,
        num_warmup=1_000,
        num_samples=10_000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), x, y)
    stored = to_arviz(mcmc)
    print("| what | first time | again |\n| --- | ---: | ---: |")
    tried = {
        "`summary(mcmc)`, 4 x 10,000 draws x 100 parameters": lambda: summary(mcmc),
        "`summary` of the stored draws": lambda: summary(stored),
        "`arviz.summary` of them": lambda: az.summary(stored),
        "`kernel_stein_discrepancy(mcmc)`, 2,000 draws, scores on 10,000 rows": lambda: (
            kernel_stein_discrepancy(mcmc, scores="full")
        ),
        '`kernel_stein_discrepancy(mcmc, scores="minibatch")`, n = 500': lambda: (
            kernel_stein_discrepancy(mcmc, scores="minibatch")
        ),
    }
    for name, function in tried.items():
        first, again = seconds(function)
        print(f"| {name} | {first:.1f} s | {again:.1f} s |", flush=True)


def verdicts():
    """How often a run is said to be wrong: of right ones, and of some that are not."""
    print(
        "| sampler | parameters | variances | effective samples | said to be wrong |\n"
        "| --- | ---: | ---: | ---: | ---: |"
    )
    h, friction = 0.5 / PRECISION**0.5, PRECISION**0.5
    for dimension in (1, 5, 20):
        right = CCAdL(gaussian_mean, h, friction, thermal_mass=np.inf, steps_per_sample=5)
        # (1 + h v / 2) / (1 - h / 2) = 1.1 with v = 2, in units of the precision
        wide = SGLD(gaussian_mean, 0.1 / (1 + 1.1 / 2) / PRECISION, steps_per_sample=20)
        for name, kernel, draws in (("CCAdL", right, 700), ("SGLD", wide, 900)):
            y = data(dimension)
            mcmc = run(kernel, y, draws, RUNS * CHAINS)
            wrong = 0
            for k in range(RUNS):
                chains = slice(CHAINS * k, CHAINS * (k + 1))
                sums = jax.tree.map(
                    lambda x, chains=chains: x[chains], mcmc.last_state.monitor.stein
                )
                wrong += stein_report(sums).problem() is not None
            values = np.asarray(mcmc.get_samples(True)["mu"], float)
            some = values.reshape(RUNS, CHAINS, draws, dimension)[:20]
            sizes = [
                az.ess(xr.Dataset({"x": (("chain", "draw", "k"), x)}), method="mean")["x"].values
                for x in some
            ]
            ratio = np.mean(values**2) * PRECISION
            print(
                f"| {name} | {dimension} | {ratio:.3f} | {np.median(sizes):,.0f} |"
                f" {wrong} of {RUNS} |",
                flush=True,
            )


def step_sizes(picture):
    """SGLD from small steps to large ones: the discrepancy, and the effective samples."""
    y, sizes = data(3), (0.05, 0.1, 0.2, 0.5, 1.0)
    print(
        "| step size | sd ratio | effective samples | R-hat | discrepancy | Stein |\n"
        "| ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    rows = []
    for scaled in sizes:
        mcmc = run(SGLD(gaussian_mean, scaled / PRECISION, steps_per_sample=2), y, 2_000, 4, 1_000)
        found = kernel_stein_discrepancy(mcmc, covariance=np.full(3, 1 / PRECISION))
        table = summary(mcmc).table
        report = stein_report(mcmc.last_state.monitor.stein)
        ratio = float(np.std(mcmc.get_samples()["mu"])) * PRECISION**0.5
        rows.append((found.value, table["ess_bulk"].min(), table["r_hat"].max()))
        print(
            f"| {scaled:g} | {ratio:.2f} | {rows[-1][1]:,.0f} | {rows[-1][2]:.3f} |"
            f" {found.value:.3f} | {report.temperature:.2f} ± {report.error:.2f} |",
            flush=True,
        )
    if picture:
        draw(sizes, np.array(rows), picture)


def draw(sizes, rows, picture):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    left.loglog(sizes, rows[:, 0], "o-", color="C0")
    left.set(ylabel="kernel Stein discrepancy", title="The discrepancy grows with the error")
    left.set_yticks(ticks := (0.03, 0.1, 0.3), [f"{x:g}" for x in ticks])
    right.semilogx(sizes, rows[:, 1], "s--", color="C1")
    right.set(ylabel="effective samples of 8,000", title="Effective samples grow with it too")
    for axis in (left, right):
        axis.set_xlabel("step size of SGLD (of the largest stable: 2)")
        axis.set_xticks(sizes, [f"{x:g}" for x in sizes])
        axis.minorticks_off()
    figure.savefig(picture, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", choices=("cost", "verdicts", "step_sizes"))
    parser.add_argument("--picture")
    options = parser.parse_args()
    for name, part in (
        ("cost", cost),
        ("verdicts", verdicts),
        ("step_sizes", lambda: step_sizes(options.picture)),
    ):
        if options.only in (None, name):
            part()
            print(flush=True)


if __name__ == "__main__":
    main()
