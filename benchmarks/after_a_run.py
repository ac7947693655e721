# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Seconds and memory of what follows a run: comparison, checks, predictions and summaries.

    python benchmarks/after_a_run.py [--rows 1000000] [--groups 20000 1000000]

Each line is measured in a process of its own, from the run to the result, with the compilation.
Memory is the increase of the largest resident memory. Runs are short, because the values of the
draws make no difference.
"""

import argparse
import json
from pathlib import Path
import subprocess
import sys
import time

CHAINS, DRAWS, COLUMNS = 4, 500, 20


def regression(student):
    """A model of rows whose noise is normal or has heavier tails."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(X), subsample_size=1_000) as i:
            law = dist.StudentT(6.0, X[i] @ w, 1.0) if student else dist.Normal(X[i] @ w, 1.0)
            numpyro.sample("y", law, obs=None if y is None else jnp.asarray(y)[i])

    return model


def effects(y, groups, per_group):
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    with numpyro.plate("groups", groups):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=1_000) as i:
        numpyro.sample("y", dist.Normal(a[i // per_group], 1), obs=jnp.asarray(y)[i])


def drawn(model, *args, draws=DRAWS, chains=CHAINS):
    """A run without a tuning."""
    from jax import random
    from numpyro.infer import MCMC

    from numpyro_sgmcmc import SGLD

    setting = {"num_chains": chains, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(SGLD(model, step_size=1e-7), num_warmup=0, num_samples=draws, **setting)
    mcmc.run(random.key(0), *args)
    return mcmc


def child(what: str, size: int) -> None:
    """Prints seconds and gigabytes of one line."""
    import resource
    import warnings

    import arviz as az
    import jax
    import numpy as np

    from numpyro_sgmcmc import loo, predict, predictive_checks, summary, to_arviz

    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    if what == "summary":
        y = rng.normal(size=4 * size).astype(np.float32)
        draws = DRAWS if size < 100_000 else 100
        runs = [drawn(effects, y, size, 4, draws=draws, chains=2)]
    else:
        X = rng.normal(size=(size, COLUMNS)).astype(np.float32)
        y = (X[:, 0] + rng.standard_t(6, size)).astype(np.float32)
        models = map(regression, (False, True) if what == "compare" else (False,))
        runs = [drawn(model, X, y) for model in models]
    jax.block_until_ready([run.get_samples() for run in runs])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    match what:
        case "compare":
            az.compare({str(k): loo(run) for k, run in enumerate(runs)})
        case "loo":
            loo(runs[0])
        case "predictive_checks":
            predictive_checks(runs[0], num_draws=50)
        case "predict":
            predict(runs[0], X, quantiles=[0.05, 0.5, 0.95], num_draws=50)
        case "total":
            to_arviz(runs[0], log_likelihood="total", log_prior=True, constant_data=False)
        case "summary":
            summary(runs[0])
    seconds = time.perf_counter() - start
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    print(json.dumps([seconds, more]))


def main() -> None:
    from measure import table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--groups", type=int, nargs="*", default=[20_000, 1_000_000])
    options = parser.parse_args()
    rows, some = f"{options.rows:,} rows", f"{options.rows // 50:,} rows"
    lines = {
        f"`az.compare` of two models by `loo`, {rows}": ("compare", options.rows),
        f"`loo`, {some}": ("loo", options.rows // 50),
        f"`predictive_checks`, {rows}, 200 draws": ("predictive_checks", options.rows),
        f"`predict` with quantiles, {rows}, 200 draws": ("predict", options.rows),
        f"the log likelihood as a total, {rows}": ("total", options.rows),
    }
    lines |= {f"`summary` of {n:,} effects": ("summary", n) for n in options.groups}
    found = []
    for title, (what, size) in lines.items():
        command = [sys.executable, Path(__file__).name, "--child", what, str(size)]
        done = subprocess.run(
            command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True
        )
        seconds, more = json.loads(done.stdout.strip().splitlines()[-1])
        found.append([title, f"{seconds:.1f}", f"{max(more, 0):.2f}"])
        print(title, seconds, more, file=sys.stderr, flush=True)
    print(table(["after a run", "seconds", "memory, GB"], found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]))
    else:
        main()
