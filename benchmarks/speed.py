# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Wall time to 1,000 and to 10,000 effective samples of the worst parameter, everything included:
``CCAdL(model)`` with nothing else set, NUTS, HMCECS with a Taylor proxy and, where it is
installed, BlackJAX's SGLD, SGHMC and SGNHT, on logistic regressions with 20 and 100 parameters.

    python benchmarks/speed.py [--sizes 10000 100000 1000000] [--parameters 20 100]

Each method runs once, for long enough to know its rate; the time to K effective samples is that
of compilation, tuning and warm-up, plus K divided by the rate. HMCECS is given the mode.
BlackJAX is given the posterior mean to start from, and of a grid of step sizes, a factor of 2
apart, the fastest one whose standard deviations are all within 5 % and two standard errors; if
there is none, the one with the smallest error. The search for it is not counted.
"""

import argparse
import time
import warnings

import jax
from jax import random
import jax.numpy as jnp
from measure import seconds_of_draws
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import HMCECS, MCMC, NUTS

from numpyro_sgmcmc import CCAdL, full_data

HEADER = (
    "N", "d", "sampler", "seconds before the first draw", "ESS a second, then",
    "seconds to 1,000 ESS", "to 10,000", "worst mean, sd", "sd ratios",
)  # fmt: skip


def logistic(x, y, batch_size=500):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size):
        batch = numpyro.subsample(x, event_dim=1)
        numpyro.sample("y", dist.Bernoulli(logits=batch @ w), obs=numpyro.subsample(y, event_dim=0))


def data(size, parameters):
    """Correlated covariates with an intercept."""
    rng = np.random.default_rng(0)
    mix = np.eye(parameters) + 0.5 * rng.standard_normal((parameters, parameters)) / parameters**0.5
    x = rng.standard_normal((size, parameters), np.float32) @ mix.astype(np.float32)
    x[:, 0] = 1
    w = rng.standard_normal(parameters).astype(np.float32) / parameters**0.5
    y = rng.random(size) < 1 / (1 + np.exp(-x @ w))
    return jnp.asarray(x), jnp.asarray(y, jnp.float32)


def timed(make, args, warmup, draws, chains=1):
    """
    Seconds before the first draw (tuning, compilation, warm-up), seconds for the draws, and the
    draws.
    """
    start = time.perf_counter()
    mcmc = MCMC(
        make(),
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method="vectorized" if chains > 1 else "parallel",
        progress_bar=False,
        jit_model_args=True,
    )
    mcmc.run(random.key(0), *args)
    w = np.asarray(jax.block_until_ready(mcmc.get_samples(True)["w"]), np.float64)
    total = time.perf_counter() - start

    return total, seconds_of_draws(mcmc, args, draws), w


def blackjax_runs(x, y, exact, batch_size=500, steps=40_000):
    """Of each method of BlackJAX the best run: seconds in all, for the draws, and the draws."""
    import blackjax
    from blackjax.sgmcmc.gradients import grad_estimator

    size, d = x.shape
    start, covariance = jnp.asarray(exact[0], jnp.float32), exact[2]
    scale = float(np.linalg.eigvalsh(covariance)[0]) ** 0.5
    gradient = grad_estimator(
        lambda w: -0.5 * jnp.sum(w**2),
        lambda w, row: row[1] * (row[0] @ w) - jnp.logaddexp(0.0, row[0] @ w),
        size,
    )
    methods = {
        "SGLD": (blackjax.sgld(gradient), 1, scale**2),
        "SGHMC": (blackjax.sghmc(gradient, alpha=1 / scale), 10, scale),
        "SGNHT": (blackjax.sgnht(gradient, alpha=1 / scale), 1, scale),
    }
    for name, (method, gradients, unit) in methods.items():

        @jax.jit
        def run(x, y, h, method=method, name=name, gradients=gradients):
            def step(state, key):
                rows_key, key = random.split(key)
                rows = random.randint(rows_key, (batch_size,), 0, size)
                state = method.step(key, state, (x[rows], y[rows]), h)
                return state, state.position if name == "SGNHT" else state

            state = method.init(start, random.key(0)) if name == "SGNHT" else method.init(start)
            return jax.lax.scan(step, state, random.split(random.key(1), steps // gradients))[1]

        draws, total, compiling = best_of_grid(
            lambda h, run=run: jax.block_until_ready(run(x, y, jnp.float32(h))), unit, exact
        )
        yield f"BlackJAX {name}", (compiling + total, total, draws)


def best_of_grid(run, unit, exact):
    """
    Of the steps of ``unit`` times powers of 2 the fastest one whose standard deviations are all
    within 5 % and two standard errors, or else the one with the smallest error: its draws, its
    seconds, and those that only the first run took.
    """
    best = None
    for k in range(9):
        h = unit * 2.0 ** (k - 11)
        begin = time.perf_counter()
        w = np.asarray(run(h), np.float64)[None]
        total = time.perf_counter() - begin
        if k == 0:
            begin = time.perf_counter()
            run(h)
            compiling = total - (time.perf_counter() - begin)
            total -= compiling
        if not np.all(np.isfinite(w)):
            break
        ess = effective_sample_size(w)
        ratio = w.std((0, 1)) / exact[1]
        error = float(np.max(np.abs(ratio - 1) - 2 / np.sqrt(2 * ess)))
        found = (error < 0.05, ess.min() / total if error < 0.05 else -error, w, total)
        if best is None or found[:2] > best[:2]:
            best = found
    return best[2], best[3], compiling


def report(case, name, total, sampling, w, exact=None):
    """Prints a row of the table, and gives the time to 10,000 effective samples."""
    ess = effective_sample_size(w).min()
    before, rate = total - sampling, ess / sampling
    times = [before + count / rate for count in (1_000, 10_000)]
    cells = [*case, name, f"{before:.1f}", f"{rate:,.1f}", *(f"{t:,.1f}" for t in times)]
    if exact is not None:
        mean, sd, _ = exact
        ratio = w.std((0, 1)) / sd
        cells += [f"{np.max(np.abs(w.mean((0, 1)) - mean) / sd):.3f}"]
        cells += [f"{ratio.min():.3f} to {ratio.max():.3f}"]
    else:
        cells += ["", ""]
    print("| " + " | ".join(cells) + " |", flush=True)
    return times[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--parameters", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--nuts-draws", type=int, default=300)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    faster = []
    print("| " + " | ".join(HEADER) + " |\n| ---: | ---: | --- |" + " ---: |" * (len(HEADER) - 3))
    for parameters in options.parameters:
        for size in options.sizes:
            args = data(size, parameters)
            case = f"{size:,}", f"{parameters}"
            found = timed(lambda: CCAdL(logistic, progress_bar=False), args, 200, 2_000, chains=4)
            w = found[2]
            exact = w.mean((0, 1)), w.std((0, 1)), np.cov(w.reshape(-1, parameters).T)
            tuned = report(case, "CCAdL(model)", *found)
            jax.clear_caches()
            found = timed(lambda: NUTS(full_data(logistic)), args, 300, options.nuts_draws)
            nuts = report(case, "NUTS", *found, exact)
            faster.append(f"N = {size:,}, d = {parameters}: {nuts / tuned:.1f}")
            jax.clear_caches()
            proxy = HMCECS.taylor_proxy({"w": jnp.asarray(exact[0], jnp.float32)})

            def hmcecs(proxy=proxy):
                return HMCECS(NUTS(logistic), num_blocks=10, proxy=proxy)

            try:
                report(case, "HMCECS", *timed(hmcecs, args, 300, 1_000), exact)
            except Exception as error:  # it needs the Hessian of every row
                print(f"| {size:,} | {parameters} | HMCECS, {type(error).__name__} |", flush=True)
            jax.clear_caches()
            try:
                for name, run in blackjax_runs(*args, exact):
                    report(case, name, *run, exact)
            except ImportError:
                print(f"| {size:,} | {parameters} | BlackJAX is not installed |")
            jax.clear_caches()
    print(f"\nTimes as fast as NUTS to 10,000 effective samples: {'; '.join(faster)}.")


if __name__ == "__main__":
    main()
