# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Twelve models on real data by ``CCAdL(model)`` with nothing else set, against long runs of NUTS.

    python benchmarks/suite.py --data FOLDER --cache FOLDER [--only WORD] [--draws 20000]

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
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import CCAdL, full_data
from numpyro_sgmcmc.diagnostics import stein_report

WARMUP, CHAINS = 1_000, 4


def compared(case, samples):
    """All numbers that are compared, shape (chains, draws, numbers)."""
    if case.compared is not None:
        samples = jax.vmap(case.compared)(samples)
    leaves = [np.asarray(x) for x in jax.tree.leaves(samples)]
    flat = [x.reshape(*x.shape[:2], -1) for x in leaves]
    return np.concatenate(flat, axis=-1).astype(np.float64)


def moments(case, mcmc):
    draws = compared(case, mcmc.get_samples(group_by_chain=True))
    # sites with a constraint, such as a Cholesky factor, have constant entries
    varies = draws.std(axis=(0, 1)) > 1e-6
    draws = draws[..., varies]
    ess = effective_sample_size(draws)
    mean, sd = draws.mean(axis=(0, 1)), draws.std(axis=(0, 1))
    # the standard error of a standard deviation, relative to it
    squares = (draws - mean) ** 2
    error = squares.std(axis=(0, 1)) / effective_sample_size(squares) ** 0.5 / (2 * sd**2)
    rhat = split_gelman_rubin(draws)
    return {"mean": mean, "sd": sd, "ess": ess, "sd_error": error, "rhat": rhat}


def reference(name, case, cache):
    path = cache / f"{name.replace(' ', '_').replace(',', '')}.npz"
    if not path.exists():
        # energies of 20,000 rows in single precision have errors that NUTS takes for rejections
        with jax.enable_x64(True):
            np.savez(path, **run_nuts(case))
    return dict(np.load(path))


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
    return moments(case, mcmc) | {"seconds": time.perf_counter() - start}


def one(name, case, cache, draws):
    nuts = reference(name, case, cache)
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
    found = moments(case, mcmc)
    report = stein_report(mcmc.last_state.stein)
    tuning = mcmc.sampler.tuning
    rows = mcmc.sampler._view.plates[0]
    passes = (WARMUP + draws) * CHAINS * rows.subsample_size / rows.size
    passes *= 1 if tuning.anchor is None else 2
    error = np.abs(found["mean"] - nuts["mean"]) / nuts["sd"]
    ratio = found["sd"] / nuts["sd"]
    # both runs have an error of their own
    mean_error = np.sqrt(1 / nuts["ess"] + 1 / found["ess"])
    sd_error = np.hypot(nuts["sd_error"], found["sd_error"])
    worst = np.argmax(np.abs(ratio - 1))
    print(
        f"{name:26s} d={len(ratio):4d} h={tuning.step_size:5.3f} v={tuning.noise.mean:7.3g}"
        f" {'cv   ' if tuning.anchor is not None else 'plain'}"
        f" mean {error.max():6.3f} (se {mean_error[np.argmax(error)]:.3f})"
        f" sd {ratio[worst]:6.3f} (se {sd_error[worst]:.3f},"
        f" z rms {np.sqrt(np.mean(((ratio - 1) / sd_error) ** 2)):.2f})"
        f" ess {found['ess'].min():6.0f} ({nuts['ess'].min():5.0f} NUTS, R-hat"
        f" {nuts['rhat'].max():.3f}), {found['ess'].min() / seconds:5.1f} a second"
        f" {found['ess'].min() / passes:5.2f} a pass; {seconds:5.1f} s"
        f" ({float(nuts['seconds']):6.1f} NUTS)"
        f" passes {sum(tuning.passes.values()):6.0f} + {passes:5.0f}"
        f" T {report.temperature:.3f} [{report.diagonal.min():.2f}, {report.diagonal.max():.2f}]"
        f" {'WARNS: ' + (report.problem() or '') if report.problem() or caught else 'silent'}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--reference-only", action="store_true")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    for name, load in cases(options.data).items():
        if options.only in name:
            case = load()
            if options.reference_only:
                nuts = reference(name, case, options.cache)
                print(
                    name, float(nuts["seconds"]), nuts["ess"].min(), nuts["rhat"].max(), flush=True
                )
                jax.clear_caches()
            else:
                one(name, case, options.cache, options.draws)


if __name__ == "__main__":
    main()
