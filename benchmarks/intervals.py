# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
How often intervals of 95 % cover where the model is wrong: of the posterior, and calibrated.

    python benchmarks/intervals.py [overdispersed] [clustered] [heteroscedastic] [tails] [weights]
        [right] [--simulations 500]

Of each simulation new data, a new tuning and a new run of ``CCAdL(model)`` with nothing set. What
is to be covered is what the estimate would be with all data in the world.

    python benchmarks/intervals.py sandwich
    python benchmarks/intervals.py flights --data FOLDER [--picture FILE]
    python benchmarks/intervals.py cost

compare the standard deviations with those of `statsmodels` (`pip install statsmodels`) and of a
bootstrap of clusters, have intervals of flights by rows, aircraft and days, and time it with a
million rows.
"""

import argparse
import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import sys  # noqa: E402
import time  # noqa: E402
from typing import NamedTuple  # noqa: E402
import warnings  # noqa: E402

import jax  # noqa: E402
from jax import random  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from measure import table  # noqa: E402
import numpy as np  # noqa: E402
import numpyro  # noqa: E402
import numpyro.distributions as dist  # noqa: E402
from numpyro.infer import MCMC  # noqa: E402
from scipy.special import ndtr  # noqa: E402

from numpyro_sgmcmc import CCAdL, calibrated, plot_calibrated  # noqa: E402

ROWS, CLUSTER = 2_000, 20
SLOPES = np.array([0.5, -0.4, 0.3])


def coefficients(x):
    return numpyro.sample("b", dist.Normal(0, 5).expand([x.shape[1]]).to_event(1))


def poisson(x, y):
    b = coefficients(x)
    with numpyro.plate("rows", len(y), subsample_size=200) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(x[i] @ b)), obs=y[i])


def logistic(x, y):
    b = coefficients(x)
    with numpyro.plate("rows", len(y), subsample_size=200) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ b), obs=y[i])


def linear(x, y):
    b, sigma = coefficients(x), numpyro.sample("sigma", dist.HalfNormal(5))
    with numpyro.plate("rows", len(y), subsample_size=200) as i:
        numpyro.sample("y", dist.Normal(x[i] @ b, sigma), obs=y[i])


class Data(NamedTuple):
    """Columns and outcomes, what is to be covered, and the arguments of ``calibrated``."""

    x: np.ndarray
    y: np.ndarray
    truth: np.ndarray
    options: dict = {}


def design(rng, rows=ROWS):
    x = rng.standard_normal((rows, 3))
    x[:, 0] = 1
    return x


def overdispersed(rng):
    """Counts with a factor of their own, of variance 0.5."""
    x = design(rng)
    return Data(x, rng.poisson(np.exp(x @ SLOPES) * rng.gamma(2, 0.5, ROWS)), SLOPES)


def clustered(rng):
    """A latent correlation of 0.2 within clusters of 20 rows, and a column of each cluster."""
    group = np.repeat(np.arange(ROWS // CLUSTER), CLUSTER)
    x = design(rng)
    x[:, 1] = rng.standard_normal(ROWS // CLUSTER)[group]
    # of a normal copula: each row for itself has the law of the model
    effect = 0.2**0.5 * rng.standard_normal(ROWS // CLUSTER)[group]
    uniform = ndtr(effect + 0.8**0.5 * rng.standard_normal(ROWS))
    y = np.log(uniform / (1 - uniform)) < x @ SLOPES
    return Data(x, y, SLOPES, {"clusters": group})


def heteroscedastic(rng):
    """A standard deviation that grows with a column."""
    x = design(rng)
    return Data(x, x @ SLOPES + np.exp(x[:, 1] / 1.5) * rng.standard_normal(ROWS), SLOPES)


def tails(rng):
    """Errors of Student's t with 5 degrees of freedom: their standard deviation is (5 / 3)^1/2."""
    x = design(rng)
    return Data(x, x @ SLOPES + rng.standard_t(5, ROWS), np.append(SLOPES, (5 / 3) ** 0.5))


def weights(rng):
    """A population of which those with large outcomes are seen more often."""
    x = design(rng, 150 * ROWS)
    y = x @ SLOPES + rng.standard_normal(len(x))
    odds = np.exp(0.7 * y)
    # nobody has an outcome above 6
    seen = np.flatnonzero(rng.random(len(x)) < odds / np.exp(0.7 * 6))[:ROWS]
    return Data(x[seen], y[seen], SLOPES, {"weights": 1 / odds[seen]})


def right(rng):
    x = design(rng)
    return Data(x, rng.random(ROWS) < 1 / (1 + np.exp(-x @ SLOPES)), SLOPES)


CASES = {
    "overdispersed": (poisson, overdispersed),
    "clustered": (logistic, clustered),
    "heteroscedastic": (linear, heteroscedastic),
    "tails": (linear, tails),
    "weights": (linear, weights),
    "right": (logistic, right),
}


def two_chains(model, warmup, samples):
    return MCMC(
        CCAdL(model, progress_bar=False),
        num_warmup=warmup,
        num_samples=samples,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,
    )


def sandwich(seed, replications=1_000):
    """Standard deviations by the clusters of the second case, by three ways."""
    import statsmodels.api as sm

    rng = np.random.default_rng(seed)
    x, y, _, options = clustered(rng)
    group = options["clusters"]
    kernel = CCAdL(logistic, progress_bar=False)
    mcmc = MCMC(kernel, num_warmup=200, num_samples=20_000, progress_bar=False)
    mcmc.run(random.key(seed), jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))
    found = calibrated(mcmc, clusters=group).table["calibrated_sd"].to_numpy()
    logit = sm.GLM(y, x, family=sm.families.Binomial())
    theirs = logit.fit(cov_type="cluster", cov_kwds={"groups": group}).bse
    again = []
    for _ in range(replications):
        chosen = rng.integers(0, ROWS // CLUSTER, ROWS // CLUSTER)
        rows = (chosen[:, None] * CLUSTER + np.arange(CLUSTER)).ravel()
        again.append(sm.GLM(y[rows], x[rows], family=sm.families.Binomial()).fit().params)
    lines = {
        "`calibrated`": found,
        "`statsmodels`, `cov_type='cluster'`": theirs,
        f"bootstrap of clusters, {replications:,}": np.std(again, axis=0),
    }
    return [(name, *(f"{sd:.4f}" for sd in sds)) for name, sds in lines.items()]


def delays(codes, late):
    total = numpyro.sample("intercept", dist.Normal(-1, 1))
    names = {"hour": 19, "carrier": 16, "origin": 3}
    effects = {}
    for name, size in names.items():
        # against the first of each kind
        others = numpyro.sample(f"{name}_", dist.Normal(0, 1).expand([size - 1]).to_event(1))
        effects[name] = numpyro.deterministic(name, jnp.pad(others, (1, 0)))
    with numpyro.plate("flights", len(late), subsample_size=1_000) as i:
        logits = total + sum(effects[name][codes[name][i]] for name in names)
        numpyro.sample("late", dist.Bernoulli(logits=logits), obs=late[i])


def flights(folder, picture):
    """Standard deviations by what flights have in common, and a picture of those by days."""
    with np.load(Path(folder) / "flights.npz", allow_pickle=False) as file:
        found = {name: file[name] for name in file.files if name != "meta"}
    codes = {"hour": np.unique(found["dep_hour"], return_inverse=True)[1]}
    codes |= {name: found[name].astype(np.int32) for name in ("carrier", "origin")}
    codes = {name: jnp.asarray(x, jnp.int32) for name, x in codes.items()}
    late = jnp.asarray(found["arr_delay"] > 15, jnp.float32)
    mcmc = two_chains(delays, 100, 1_000)
    mcmc.run(random.key(0), codes, late)
    hours, names = np.unique(found["dep_hour"]), found["carriers"]
    day = 31 * found["month"].astype(int) + found["day"]
    runs = [calibrated(mcmc, clusters=x) for x in (None, found["tail"], day)]
    shown = {
        "at 7": f"hour[{np.searchsorted(hours, 7)}]",
        "at 19": f"hour[{np.searchsorted(hours, 19)}]",
        "United": f"carrier[{list(names).index('UA')}]",
        "Southwest": f"carrier[{list(names).index('WN')}]",
        "LaGuardia": f"origin[{list(found['origins']).index('LGA')}]",
    }
    sds = [f"{runs[0].table['sd'][label]:.3f}" for label in shown.values()]
    lines = [("posterior, sd", "", *sds)]
    for what, run in zip(("flights", "aircraft", "days"), runs, strict=True):
        ratios = (run.table.loc[label] for label in shown.values())
        cells = (f"{x['ratio']:.2f} ± {x['ratio_error']:.2f}" for x in ratios)
        number = len(late) if run.of_rows else run.clusters
        lines.append((f"times, clusters: {what}", f"{number:,}", *cells))
        print(run.verdict, file=sys.stderr, flush=True)
    if picture:
        ax = plot_calibrated(runs[-1], var_names=["carrier", "origin"])
        codes_of = {"carrier": names, "origin": found["origins"]}
        labels = [text.get_text() for text in ax.get_yticklabels()]
        parts = [label.rstrip("]").split("[") for label in labels]
        ax.set_yticks(ax.get_yticks(), [codes_of[name][int(k)] for name, k in parts])
        ax.figure.savefig(picture, dpi=70)
    return ["", "number", *shown], lines


def cost(rows=1_000_000, columns=50):
    """Seconds of two passes, and of one gradient on all rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns), np.float32)
    y = (rng.random(rows) < 1 / (1 + np.exp(-x[:, 0]))).astype(np.float32)
    data = jnp.asarray(x), jnp.asarray(y)
    mcmc = MCMC(
        CCAdL(logistic, progress_bar=False), num_warmup=50, num_samples=200, progress_bar=False
    )
    start = time.perf_counter()
    mcmc.run(random.key(0), *data)
    jax.block_until_ready(mcmc.get_samples())
    first, seconds = time.perf_counter() - start, []
    for _ in range(2):
        start = time.perf_counter()
        calibrated(mcmc)
        seconds.append(time.perf_counter() - start)

    def whole(b, x, y):
        logits = x @ b
        return jnp.sum(jnp.logaddexp(0.0, logits) - y * logits)

    gradient, b = jax.jit(jax.grad(whole)), jnp.zeros(columns)
    jax.block_until_ready(gradient(b, *data))
    start = time.perf_counter()
    for _ in range(10):
        jax.block_until_ready(gradient(b, *data))
    each = (time.perf_counter() - start) / 10
    passes = sum(mcmc.sampler.tuning.passes.values())
    return [
        ("run, with tuning and compilation", f"{first:.1f} s", f"{passes:,.0f} to tune"),
        ("`calibrated`, with compilation", f"{seconds[1]:.1f} s", "2 passes"),
        (f"the same, in gradients of {each:.2f} s", f"{seconds[1] / each:,.0f}", ""),
    ]


def parameters(mcmc, count):
    draws = mcmc.get_samples()
    columns = np.column_stack([draws["b"], *([draws["sigma"]] if "sigma" in draws else [])])
    return columns[:, :count]


def line_of(name, simulations, seed):
    model, simulated = CASES[name]
    mcmc = two_chains(model, 50, 500)
    rng = np.random.default_rng(seed)
    hits, ratios, rejected, start = [], [], 0, time.perf_counter()
    for k in range(simulations):
        data = simulated(rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arrays = (jnp.asarray(a, jnp.float32) for a in (data.x, data.y))
            mcmc.run(random.key(seed + k), *arrays)
            found = calibrated(mcmc, **data.options)
        one = []
        for run in (mcmc, found.mcmc):
            low, high = np.quantile(parameters(run, len(data.truth)), [0.025, 0.975], axis=0)
            one.append((low <= data.truth) & (data.truth <= high))
        hits.append(one)
        kept = found.table["ratio"].to_numpy()[: len(data.truth)]
        ratios.append(kept)
        rejected += found.p_value < 0.05
        if (k + 1) % 50 == 0:
            # hundreds of programs are more than a process may have
            jax.clear_caches()
            said = np.mean(hits, axis=0).round(3).tolist()
            seconds = (time.perf_counter() - start) / (k + 1)
            print(f"{name}: {k + 1}, {said}, {seconds:.2f} s each", file=sys.stderr, flush=True)
    plain, ours = np.mean(hits, axis=0)
    error = (0.95 * 0.05 / simulations) ** 0.5
    return (
        name, str(simulations), " ".join(f"{x:.1%}" for x in plain),
        " ".join(f"{x:.1%}" for x in ours), f"{error:.1%}",
        " ".join(f"{x:.2f}" for x in np.mean(ratios, axis=0)),
        " ".join(f"{x:.2f}" for x in np.std(ratios, axis=0)),
        f"{rejected / simulations:.1%}",
    )  # fmt: skip


HEADER = [
    "data", "simulations", "posterior", "calibrated", "error", "ratio of sds",
    "their spread", "test rejects at 5 %",
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--data", help="folder of the real data")
    parser.add_argument("--picture", help="where that of flights is to be")
    parser.add_argument("--simulations", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tables = {
        "sandwich": lambda: (["", "b[0]", "b[1]", "b[2]"], sandwich(options.seed)),
        "flights": lambda: flights(options.data, options.picture),
        "cost": lambda: (["1,000,000 rows, 50 parameters", "", ""], cost()),
    }
    if options.names[0] in tables:
        print(table(*tables[options.names[0]]()))
        return
    lines = []
    for name in options.names:
        lines.append(line_of(name, options.simulations, options.seed))
        print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
    print(table(HEADER, lines))


if __name__ == "__main__":
    main()
