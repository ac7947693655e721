# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Expectations without the error of a step size: whether they are right, whether their standard
errors are, and what they cost.

    python benchmarks/debiased.py [--only right errors steps cost suite] [--picture PATH]
                                  [--data FOLDER --cache FOLDER --word WORD]

``right``: means and variances of three skewed posteriors of two or three parameters, of
``benchmarks/certificates.py``, against numerical integration. ``errors``: the same with other keys,
for runs and for chains; the z-scores should have a standard deviation of 1. ``steps``: the tuned
step size, and 2, 3 and 4 times it. ``cost``: gradients for the same standard error of the mean, and
seconds. ``suite``: the posteriors of ``benchmarks/suite.py`` against its runs of NUTS.
"""

import argparse
from pathlib import Path
import sys
import time
import warnings

from certificates import logistic, skewed
import jax
from jax import random
import jax.numpy as jnp
import matplotlib
from measure import table
import numpy as np
from numpyro.infer import MCMC
from numpyro.infer.util import initialize_model

from numpyro_sgmcmc import SGHMC, CCAdL, debiased, full_data

matplotlib.use("Agg")

PARTS = ("right", "errors", "steps", "cost")
DRAWS, KEYS, POINTS, WIDTH = 4_000, 50, 81, 9.0


def run_of(kernel, args, draws=DRAWS, key=0, chains=4):
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=draws // chains,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(key), *args)
    return mcmc


def integrated(model, args, mcmc):
    """Means and variances by a grid in the unconstrained parameters, as wide as the draws say."""
    args = tuple(map(jnp.asarray, args))
    info = initialize_model(random.key(0), full_data(model), model_args=args)
    names = list(mcmc.get_samples())
    start = info.param_info.z

    # latent sites of these models are positive or real
    draws = {k: np.asarray(x, np.float64) for k, x in mcmc.get_samples().items()}
    free = [np.log(draws[k]) if k in POSITIVE else draws[k] for k in names]
    flat = np.concatenate([x.reshape(len(x), -1) for x in free], axis=1)
    center, factor = flat.mean(0), np.linalg.cholesky(np.cov(flat.T))
    axis = np.linspace(-WIDTH, WIDTH, POINTS)
    grid = np.stack(np.meshgrid(*[axis] * flat.shape[1], indexing="ij"), -1)
    points = center + grid.reshape(-1, flat.shape[1]) @ factor.T

    def potential(x):
        values, first = {}, 0
        for k in names:
            size = start[k].size
            values[k] = x[first : first + size].reshape(start[k].shape)
            first += size
        return info.potential_fn(values)

    energies = np.asarray(jax.jit(lambda x: jax.lax.map(potential, x, batch_size=256))(points))
    weights = np.exp(np.nanmin(energies) - np.where(np.isfinite(energies), energies, np.inf))
    weights /= weights.sum()
    first, columns = 0, []
    for k in names:
        size = start[k].size
        x = points[:, first : first + size]
        columns.append(np.exp(x) if k in POSITIVE else x)
        first += size
    values = np.concatenate(columns, axis=1)
    mean = weights @ values
    return np.concatenate([mean, weights @ (values - mean) ** 2])


POSITIVE = ("shape", "rate", "tau")


def right():
    rows = []
    for name, (model, args) in skewed().items():
        mcmc = run_of(CCAdL(model, progress_bar=False), args)
        exact = integrated(model, args, mcmc)
        found = debiased(mcmc, num_draws=100_000)
        run = np.abs(found.table["run"] - exact) / found.scale
        off = np.abs(found.table["debiased"] - exact) / found.scale
        z = np.abs(found.table["debiased"] - exact) / found.table["error"]
        rows.append(
            [name, found.step_size, f"{run.max():.3f}", f"{off.max():.4f}"]
            + [f"{(found.table['error'] / found.scale).max():.4f}", f"{z.max():.1f}"]
        )
    header = ["posterior", "step size", "the run is off by", "debiased, off by", "its error", "z"]
    print(table(header, rows))


def errors():
    rows = []
    for name, (model, args) in skewed().items():
        exact, scores = None, []
        for key in range(KEYS):
            jax.clear_caches()  # memory for programs is finite
            mcmc = run_of(CCAdL(model, progress_bar=False), args, key=key)
            exact = integrated(model, args, mcmc) if exact is None else exact
            found = debiased(mcmc, rng_key=random.key(key)).table
            scores.append((found["debiased"] - exact) / found["error"])
        scores = np.array(scores)
        half = scores.shape[1] // 2
        cells = [f"{x.std():.2f}, {x.mean():+.2f}" for x in (scores[:, :half], scores[:, half:])]
        rows.append([name, scores.size, *cells])
    print(table(["posterior", "z-scores", "of means: sd, mean", "of variances: sd, mean"], rows))


def steps(picture):
    name, (model, args) = next(iter(skewed().items()))
    tuning = CCAdL(model, progress_bar=False).tune(random.key(0), *args)
    own = tuning.step_size
    rows, shown, exact = [], [], None
    for factor in (1, 2, 3, 4):
        # OBABO, whose error of the variance is h^2 / (4 - h^2) for a Gaussian
        kernel = SGHMC(
            model, tuning=tuning, step_size=factor * own, integrator="obabo", steps_per_sample=4
        )
        mcmc = run_of(kernel, args, 400_000)
        if exact is None:
            exact = integrated(model, args, mcmc)
        found = debiased(mcmc, rng_key=random.key(factor))
        off = [(found.table[k] - exact) / found.scale for k in ("run", "debiased")]
        bias_error = found.table["bias_error"] / found.scale
        worst = "variance of w[0]"
        shown.append((factor * own, *[x[worst] for x in off], bias_error[worst]))
        rows.append(
            [f"{factor * own:.2f}", f"{off[0][worst]:+.3f}"]
            + [f"{(found.table['bias'] / found.scale)[worst]:+.3f} ± {bias_error[worst]:.3f}"]
            + [f"{off[1][worst]:+.3f} ± {(found.table['error'] / found.scale)[worst]:.3f}"]
        )
    print(f"Variance of `w[0]`, {name}, in standard deviations of what it is the mean of:\n")
    print(table(["step size of the run", "it is off by", "bias says", "debiased, off by"], rows))
    if picture:
        drawn(picture, shown)


def drawn(path, shown):
    import matplotlib.pyplot as plt

    # the last is near the end of stability
    h, run, corrected, error = np.array(shown[:-1]).T
    fig, axis = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
    axis.axhline(0, color="0.8", linewidth=1)
    grid = np.linspace(0, h[-1] * 1.05, 100)
    axis.plot(grid, run[1] * (grid / h[1]) ** 2, color="C1", linewidth=1, linestyle=":")
    axis.errorbar(h, run, 2 * error, fmt="o", color="C1", label="the run, and a parabola")
    axis.errorbar(h, corrected, 2 * error, fmt="o", color="C0", label="debiased")
    axis.set(xlabel="step size of the run", ylabel="error of a variance, in sd")
    axis.spines[["right", "top"]].set_visible(False)
    axis.legend(frameon=False)
    fig.savefig(path, dpi=110)


def large():
    rng = np.random.default_rng(0)
    for rows, size in ((10_000, 20), (100_000, 20), (20_000, 100)):
        x = rng.standard_normal((rows, size), np.float32)
        y = (x[:, 0] + rng.logistic(size=rows) > 0).astype(np.float32)
        yield f"logistic, {rows:,} rows, {size} parameters", (logistic, (x, y))


def cost():
    rows = []
    for name, (model, args) in [*large(), *skewed().items()]:
        args = tuple(map(jnp.asarray, args))
        kernel = CCAdL(model, progress_bar=False)
        mcmc = run_of(kernel, args)
        seconds, start = [], time.perf_counter()
        again = run_of(CCAdL(model, tuning=kernel.tuning, progress_bar=False), args)
        jax.block_until_ready(again.get_samples())
        seconds.append(time.perf_counter() - start)
        for key in range(2):
            start = time.perf_counter()
            found = debiased(mcmc, num_draws=2 * DRAWS, rng_key=random.key(key))
            seconds.append(time.perf_counter() - start)
        own = error_of_run(mcmc, found)
        passes = (500 * 4 + DRAWS) * mcmc.sampler.run_info["passes_per_sample"]
        half = len(found.table) // 2
        parts = [slice(half), slice(half, None)]
        variance = (found.table["error"] / own) ** 2
        ratios = [f"{np.median(variance.iloc[k]) * found.passes / passes:.2f}" for k in parts]
        rows.append([name, found.step_size, *ratios, *(f"{x:.1f}" for x in seconds)])
    header = ["posterior", "step size", "cost of means", "of variances"]
    print(table([*header, "s: run", "debiased, the first time", "again"], rows))


def error_of_run(mcmc, found):
    return np.sqrt(np.maximum(found.table["bias_error"] ** 2 - found.table["error"] ** 2, 0.0))


def suite(data, cache, word):
    from models import cases
    from suite import reference

    rows = []
    for name, load in cases(data).items():
        if name.startswith("network") or word not in name:
            continue
        case = load()
        nuts, _ = reference(name, case, cache)
        jax.clear_caches()
        mcmc = run_of(CCAdL(case.model, progress_bar=False), case.args, 8_000)

        def numbers(draw, nuts=nuts):
            x = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(dict(draw))])
            x = x[np.asarray(nuts.labels, int)]  # of those that move
            standard = (x - nuts.mean) / nuts.sd
            return {"mean": standard, "square": standard**2}

        start = time.perf_counter()
        found = debiased(mcmc, numbers, num_draws=32_000)
        seconds = time.perf_counter() - start
        half = len(nuts.mean)
        other = np.concatenate([1 / np.sqrt(nuts.mean_size), 2 * nuts.sd_error])
        right = np.concatenate([np.zeros(half), np.ones(half)])
        moves = found.scale > 0
        z = ((found.table["debiased"] - right) / np.hypot(found.table["error"], other))[moves]
        cells = [found.step_size]
        for part in (z.iloc[: moves.iloc[:half].sum()], z.iloc[moves.iloc[:half].sum() :]):
            cells += [f"{np.sqrt((part**2).mean()):.2f}", f"{part.abs().max():.1f}"]
        rows.append([name, half, *cells, f"{seconds:.0f}"])
        print(rows[-1], file=sys.stderr, flush=True)
    header = ["posterior", "parameters", "step size", "means: rms z", "largest"]
    print(table([*header, "squares: rms z", "largest", "s"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", nargs="+", choices=(*PARTS, "suite"), default=PARTS)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--word", default="", help="in the names of the posteriors of the suite")
    options = parser.parse_args()
    for part in options.only:
        given = {"steps": (options.picture,), "suite": (options.data, options.cache, options.word)}
        globals()[part](*given.get(part, ()))
        print(flush=True)


if __name__ == "__main__":
    main()
