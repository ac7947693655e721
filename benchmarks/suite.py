# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Twelve models on real data by ``CCAdL(model)`` with nothing else set, against long runs of NUTS.

    python benchmarks/suite.py --data FOLDER --cache FOLDER [--only WORD] [--draws 5000]

The folder of data holds mnist.npz, a9a.npz, covtype.npz, letter.npz, casp.npz and
movielens_1m.npz; the runs of NUTS are kept in the cache, since they take an hour.
"""

import argparse
from pathlib import Path
import time
import warnings

import jax
from jax import random
from models import cases
import numpy as np
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import CCAdL, full_data
from numpyro_sgmcmc.diagnostics.comparison import Moments, errors_of, moments_of
from numpyro_sgmcmc.stein import stein_report

WARMUP, CHAINS = 500, 4
HEADER = (
    "model", "rows", "parameters", "worst mean, sd", "worst sd ratio", "rms z", "least ESS",
    "a second", "a pass", "passes to tune", "seconds", "of NUTS", "verdict",
)  # fmt: skip


def compared(case, samples):
    """All numbers that are compared, shape (chains, draws, numbers)."""
    if case.compared is not None:
        samples = jax.vmap(case.compared)(samples)
    leaves = [np.asarray(x) for x in jax.tree.leaves(samples)]
    flat = [x.reshape(*x.shape[:2], -1) for x in leaves]
    return np.concatenate(flat, axis=-1).astype(np.float64)


def flat(case, mcmc):
    """All numbers that are compared and their labels."""
    draws = compared(case, mcmc.get_samples(group_by_chain=True))
    return draws, [str(k) for k in range(draws.shape[-1])]


def reference(name, case, cache):
    path = cache / f"{name.replace(' ', '_').replace(',', '')}.npz"
    if not path.exists():
        # energies of 20,000 rows in single precision have errors that NUTS takes for rejections
        with jax.enable_x64(True):
            np.savez(path, **run_nuts(case))
    kept = np.load(path)
    found = Moments(*(kept[name] for name in Moments._fields))
    return found._replace(labels=kept["labels"].tolist()), kept


def run_nuts(case):
    # NUTS is exact with any mass matrix: with a good one the reference takes minutes
    tuning = CCAdL(case.model, progress_bar=False).tune(random.key(2), *case.args)
    metric = tuning.metric
    # from twice as wide as the posterior, and not so far away that a chain is lost
    starting = CCAdL(case.model, tuning=tuning, temperature=4.0)
    keys = random.split(random.key(3), 2)
    starts = starting.init(keys, 1, None, case.args, {}).z
    start = time.perf_counter()
    mcmc = MCMC(
        NUTS(
            full_data(case.model),
            inverse_mass_matrix=metric.factor @ metric.factor.T,
            dense_mass=True,
            # its own, shrunk to a thousandth of the identity, is wrong for posteriors so narrow
            adapt_mass_matrix=False,
            max_tree_depth=8,
        ),
        num_warmup=1_000,
        num_samples=5_000,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(random.key(1), *case.args, init_params=starts)
    draws, labels = flat(case, mcmc)
    found = moments_of(draws, labels)._asdict()
    return found | {"rhat": split_gelman_rubin(draws), "seconds": time.perf_counter() - start}


def one(name, case, cache, draws):
    right, nuts = reference(name, case, cache)
    jax.clear_caches()
    mcmc = MCMC(
        CCAdL(case.model, progress_bar=False),
        num_warmup=WARMUP,
        num_samples=draws,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mcmc.run(random.key(0), *case.args)
        jax.block_until_ready(mcmc.get_samples())
    seconds = time.perf_counter() - start
    found = moments_of(*flat(case, mcmc))
    errors = errors_of(found, right, name)
    report = stein_report(mcmc.last_state.monitor.stein)
    tuning = mcmc.sampler.tuning
    passes = (WARMUP + draws) * CHAINS * mcmc.sampler.run_info["passes_per_sample"]
    worst = float(np.nanmax(nuts["rhat"]))
    ess = found.mean_size.min()
    cells = [name, f"{len(case.args[0]):,}", len(found.mean)]
    if worst < 1.05:
        cells += [
            f"{errors['mean_error']:.3f} ± {errors['mean_error_se']:.3f}",
            f"{errors['sd_ratio']:.3f} ± {errors['sd_ratio_se']:.3f}",
            f"{errors['sd_z']:.2f}",
        ]
    else:
        cells += [f"R-hat of NUTS {worst:.2f}", "", ""]
    warned = "; ".join(str(warning.message).split(":")[0].split(".")[0] for warning in caught)
    cells += [f"{ess:,.0f}", f"{ess / seconds:,.0f}", f"{ess / passes:.1f}"]
    cells += [f"{sum(tuning.passes.values()):,.0f}", f"{seconds:.0f}", f"{nuts['seconds']:.0f}"]
    print("| " + " | ".join(map(str, [*cells, report.problem() or warned or "silent"])) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--draws", type=int, default=5_000)
    parser.add_argument("--reference-only", action="store_true")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" + " ---: |" * (len(HEADER) - 2) + " --- |")
    for name, load in cases(options.data).items():
        if options.only in name:
            case = load()
            if options.reference_only:
                right, nuts = reference(name, case, options.cache)
                worst = np.nanmax(nuts["rhat"])
                print(name, float(nuts["seconds"]), right.mean_size.min(), worst, flush=True)
                jax.clear_caches()
            else:
                one(name, case, options.cache, options.draws)


if __name__ == "__main__":
    main()
