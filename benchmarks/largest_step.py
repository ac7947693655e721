# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The largest usable step size: logistic regression on MNIST, 7 against 9.

12,214 images, their pixels in [0, 1] projected onto 100 random directions, centred and scaled
by one number to unit variance; prior N(0, I), minibatches of 500 rows without replacement. The
reference is NUTS on all rows. A step size is usable if the standard deviation of every one of
the 100 weights is within 5 % of the reference. A weight counts as outside only if it is so by
two standard errors, or if the median weight is; the errors are smallest for the largest steps.

Step sizes are multiples of the standard deviation of the narrowest direction of the posterior,
the friction a multiple of its inverse, the same for all methods. Chains start at the mode.

Run with ``python benchmarks/largest_step.py --data mnist.npz --picture docs/largest_step.png``;
the file has ``train_x`` and ``train_y``. Writes a Markdown table. It takes the better part of
an hour: ``--methods`` does a part of it.
"""

import argparse
from functools import partial
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import SGNHT, CCAdL, full_data
from numpyro_sgmcmc.diagnostics.comparison import moments_of

DIMENSION, BATCH, CHAINS = 100, 500, 8
METHODS = {
    "CCAdL nogin": partial(CCAdL),
    "CCAdL symmetric": partial(CCAdL, integrator="symmetric"),
    "CCAdL euler": partial(CCAdL, integrator="euler"),
    "SGNHT badodab": partial(SGNHT),
    "SGNHT euler": partial(SGNHT, integrator="euler"),
}
#: Where to start looking, close to the answer, to save time.
START = {
    "CCAdL nogin": 1.4142,
    "CCAdL symmetric": 0.5,
    "CCAdL euler": 0.125,
    "SGNHT badodab": 0.125,
    "SGNHT euler": 0.0625,
}
#: Multiples of the narrowest standard deviation, a factor of the square root of 2 apart.
GRID = [round(2 ** (k / 2), 4) for k in range(-12, 3)]


def load(path):
    """Rows and labels of the digits 7 and 9."""
    file = np.load(path)
    chosen = np.isin(file["train_y"], (7, 9))
    pixels = file["train_x"][chosen].reshape(-1, 784) / 255
    x = pixels @ np.random.default_rng(0).standard_normal((784, DIMENSION))
    x -= x.mean(0)
    return (x / x.std()).astype(np.float32), (file["train_y"][chosen] == 9).astype(np.int32)


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([DIMENSION]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def mode(x, y):
    """The mode, and the covariance of the Gaussian there, by Newton's method."""
    w = np.zeros(DIMENSION)
    for _ in range(20):
        p = 1 / (1 + np.exp(-x @ w))
        hessian = np.eye(DIMENSION) + (x * (p * (1 - p))[:, None]).T @ x
        w -= np.linalg.solve(hessian, w + x.T @ (p - y))
    return w, np.linalg.inv(hessian)


def reference(x, y, num_samples):
    kernel = NUTS(full_data(model), dense_mass=True)
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=num_samples,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), x, y)
    return np.asarray(mcmc.get_samples(True)["w"], float)


def spread(draws):
    """Standard deviation of each weight, and its relative standard error."""
    found = moments_of(draws, [str(k) for k in range(draws.shape[-1])])
    return found.sd, found.sd_error


def measure(method, h, friction, x, y, start, steps):
    samples = 2_000
    between = max(1, steps // (CHAINS * samples))
    kernel = method(model, step_size=h, friction=friction, steps_per_sample=between)
    mcmc = MCMC(
        kernel,
        num_warmup=samples // 4,
        num_samples=samples,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    begin = time.perf_counter()
    mcmc.run(random.key(1), x, y, init_params={"w": jnp.tile(start, (CHAINS, 1))})
    draws = np.asarray(mcmc.get_samples(True)["w"], float)
    return draws, int(np.sum(mcmc.last_state.monitor.nonfinite_steps)), time.perf_counter() - begin


def outside(ratio, error):
    """The largest deviation of a weight, and whether one, or the median one, is outside of 5 %."""
    off = np.abs(ratio - 1)
    return np.max(off), np.any(off > 0.05 + 2 * error) or abs(np.median(ratio) - 1) > 0.05


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="an .npz file with train_x and train_y")
    parser.add_argument("--friction", type=float, nargs="+", default=[1.0])
    parser.add_argument("--steps", type=int, default=2_000_000, help="steps at h = 1 and less")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--picture", help="where to draw the deviations")
    args = parser.parse_args()
    x, y = load(args.data)
    start, covariance = mode(x.astype(float), y)
    narrowest = np.sqrt(np.linalg.eigvalsh(covariance)[0])
    x, y, start = jnp.asarray(x), jnp.asarray(y), jnp.asarray(start, jnp.float32)
    exact, exact_error = spread(reference(x, y, 5_000))
    print(f"narrowest standard deviation {narrowest:.4f}; NUTS to {exact_error.max():.1%}\n")
    print("| friction | method | h | median sd | largest deviation | error | steps | s |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    curves, largest = {}, {}
    for friction in args.friction:
        for name in args.methods:
            method = METHODS[name]
            curve, below, failed = curves.setdefault((friction, name), []), None, None
            # from where the first errors show, down to a usable step or up to the first unusable
            k = GRID.index(START[name])
            while 0 <= k < len(GRID) and (below is None or failed is None):
                h = GRID[k]
                steps = int(args.steps * min(10, max(1, 0.5 / h)))
                draws, undone, seconds = measure(
                    method, h * narrowest, friction / narrowest, x, y, start, steps
                )
                found, error = spread(draws)
                ratio, error = found / exact, np.hypot(error, exact_error)
                deviation, bad = outside(ratio, error)
                bad = bad or undone > 0
                curve.append((h, np.median(ratio), deviation))
                print(
                    f"| {friction} | {name} | {h:.3f} | {np.median(ratio):.3f} | {deviation:.3f}"
                    f" | {error.max():.3f} | {steps:,} | {seconds:.0f} |",
                    flush=True,
                )
                if bad:
                    failed, k = k, k - 1
                else:
                    below, k = k, k + 1
            largest[friction, name] = 0.0 if below is None else GRID[below]
    print("\n| friction |", " | ".join(args.methods), "|\n| ---: |" + " ---: |" * len(args.methods))
    for friction in args.friction:
        cells = (f"{largest[friction, name]:.3f}" for name in args.methods)
        print(f"| {friction} | " + " | ".join(cells) + " |")
    if args.picture:
        draw(curves, args.friction, args.picture)


def draw(curves, frictions, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(frictions), sharey=True, figsize=(9, 3.6), squeeze=False)
    for axis, friction in zip(axes[0], frictions, strict=True):
        axis.axhspan(0.95, 1.05, color="0.9", label="within 5 %")
        for name in (name for name in METHODS if (friction, name) in curves):
            h, ratio, _ = zip(*sorted(curves[friction, name]), strict=True)
            axis.plot(h, ratio, marker="o", label=name)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0.6, 1.2)
        axis.set_xlabel("step size / narrowest standard deviation")
        axis.set_title(f"friction {friction} / narrowest standard deviation", fontsize=10)
    axes[0, 0].set_ylabel("median sd / sd of NUTS")
    axes[0, -1].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", False)
    main()
