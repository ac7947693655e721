# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Rows that keep coming: a logistic regression with 20 parameters, whose 100,000 rows become 200,000
in 100 appends.

    python benchmarks/growing.py [--appends 100] [--draws 4000] [--picture FILE]

Seconds from an append to the first draw of the posterior of all rows, and from the same arrays to
the first draw of a run that starts anew; what a draw costs before and after; and after each tenth
append the largest z-score of a mean and of a standard deviation of the draws, over the 20
parameters, against those of importance sampling around the mode.
"""

import argparse
import sys
import time

from alternatives import reference
import jax
from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from speed import data, logistic

from numpyro_sgmcmc import CCAdL, GrowingRows, growth

FIRST, LAST, PARAMETERS = 100_000, 200_000, 20
#: Of 500 draws, for the right moments.
_BLOCKS = 60


def run_of(draws: int) -> MCMC:
    kernel = CCAdL(logistic, progress_bar=False)
    return MCMC(kernel, num_warmup=200, num_samples=draws, jit_model_args=True)


def draw(mcmc: MCMC, rows: GrowingRows, number: int) -> float:
    """So many more draws, and the seconds that they took."""
    start = time.perf_counter()
    mcmc.num_samples = number
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, *rows)
    jax.block_until_ready(mcmc.get_samples())
    return time.perf_counter() - start


def z_scores(w: np.ndarray, x: jax.Array, y: jax.Array) -> tuple[float, float]:
    mean, sd = reference(x, y, False, _BLOCKS)
    exact = 1 / (500 * _BLOCKS)  # the error of the reference
    size = effective_sample_size(w[None].astype(float))
    squares = effective_sample_size(((w - w.mean(0)) ** 2)[None].astype(float))
    of_means = (w.mean(0) - mean) / sd / np.sqrt(1 / size + exact)
    of_sds = 2 * (w.std(0) / sd - 1) / np.sqrt(2 / squares + 2 * exact)
    return float(np.max(np.abs(of_means))), float(np.max(np.abs(of_sds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--appends", type=int, default=100)
    parser.add_argument("--draws", type=int, default=4_000)
    parser.add_argument("--picture")
    options = parser.parse_args()
    x, y = (np.asarray(a) for a in data(LAST, PARAMETERS))
    each = (LAST - FIRST) // options.appends
    rows = GrowingRows(x[:FIRST], y[:FIRST])
    mcmc = run_of(1)
    start = time.perf_counter()
    mcmc.run(random.key(0), *rows)
    first = time.perf_counter() - start
    draw(mcmc, rows, options.draws)
    costs, waits, found, moments = [draw(mcmc, rows, options.draws)], [], [], []
    for k in range(1, options.appends + 1):
        start = time.perf_counter()
        rows.append(x[len(rows) :][:each], y[len(rows) :][:each])
        draw(mcmc, rows, 1)
        waits.append(time.perf_counter() - start)
        if k % max(1, options.appends // 10) == 0:
            costs.append(draw(mcmc, rows, options.draws))
            w = np.asarray(mcmc.get_samples()["w"])
            moments.append((len(rows), w.mean(0), w.std(0)))
            found.append((f"{len(rows):,}", *z_scores(w, *rows.arrays), str(growth(mcmc))))
            print(*found[-1], file=sys.stderr, flush=True)
    jax.clear_caches()
    start = time.perf_counter()
    anew = run_of(1)
    anew.run(random.key(1), *map(jnp.asarray, rows.arrays))
    again = time.perf_counter() - start
    print(table(
        ["", "seconds"],
        [
            ("the first draw of 100,000 rows, tuning and compilation included", f"{first:.1f}"),
            (f"from an append of {each:,} rows to the next draw, median (largest)",
             f"{np.median(waits):.2f} ({max(waits):.2f})"),
            ("the first draw of 200,000 rows, anew", f"{again:.1f}"),
            (f"{options.draws:,} draws before the appends", f"{costs[0]:.2f}"),
            ("after them, median of three", f"{np.median(costs[-3:]):.2f}"),
        ],
    ))  # fmt: skip
    print(table(
        ["rows", "largest z-score of a mean", "of a standard deviation", "`growth`"],
        [(n, f"{a:.1f}", f"{b:.1f}", text) for n, a, b, text in found],
    ))  # fmt: skip
    if options.picture:
        narrowing(moments, options.picture)


def narrowing(moments: list, path: str) -> None:
    """Intervals of the first parameters, as rows come."""
    import matplotlib.pyplot as plt

    rows = [n for n, *_ in moments]
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for k in range(1, 4):
        mean, sd = (np.array([m[j][k] for m in moments]) for j in (1, 2))
        (line,) = axes.plot(rows, mean, label=f"w[{k}]")
        axes.fill_between(
            rows, mean - 1.96 * sd, mean + 1.96 * sd, color=line.get_color(), alpha=0.25
        )
    axes.set(xlabel="rows", ylabel="mean and 95 % interval")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
