# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Wall time to 1,000 and to 10,000 effective samples of the worst parameter, everything included:
``CCAdL(model)`` with nothing else set, NUTS, and HMCECS with a Taylor proxy, on logistic
regressions with 20 and 100 parameters.

    python benchmarks/speed.py [--sizes 10000 100000 1000000] [--parameters 20 100]

Each method runs once, for long enough to know its rate; the time to K effective samples is that
of compilation, tuning and warm-up, plus K divided by the rate. HMCECS is given the mode.
"""

import argparse
import time
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import HMCECS, MCMC, NUTS

from numpyro_sgmcmc import CCAdL, full_data


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
    draws; the second run of the same object has no compilation left, except what NumPyro
    compiles anew for each run, which is measured by a run of one draw and taken off.
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

    def again(count):
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.num_samples = count
        mcmc._set_collection_params()
        start = time.perf_counter()
        mcmc.run(random.key(1), *args)
        jax.block_until_ready(mcmc.get_samples())
        return time.perf_counter() - start

    sampling = max(again(draws) - again(1), 1e-9)
    return total, sampling, w


def report(name, total, sampling, w, exact=None):
    ess = effective_sample_size(w).min()
    before, rate = total - sampling, ess / sampling
    line = f"  {name:14s} before the first draw {before:6.1f} s, then {rate:8.1f} a second"
    line += "".join(f", {k:6d}: {before + k / rate:8.1f} s" for k in (1_000, 10_000))
    if exact is not None:
        mean, sd = exact
        worst = w.std((0, 1)) / sd
        line += f"; mean {np.max(np.abs(w.mean((0, 1)) - mean) / sd):.3f} sd"
        line += f" [{worst.min():.3f}, {worst.max():.3f}]"
    print(line, flush=True)
    return before + 10_000 / rate


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--parameters", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--nuts-draws", type=int, default=300)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="There are not enough devices")
    for parameters in options.parameters:
        for size in options.sizes:
            args = data(size, parameters)
            print(f"N = {size:,}, d = {parameters}", flush=True)
            found = timed(lambda: CCAdL(logistic, progress_bar=False), args, 500, 8_000, chains=4)
            w = found[2]
            exact = w.mean((0, 1)), w.std((0, 1))
            tuned = report("CCAdL(model)", *found)
            jax.clear_caches()
            found = timed(lambda: NUTS(full_data(logistic)), args, 300, options.nuts_draws)
            nuts = report("NUTS", *found, exact)
            print(f"  to 10,000: {nuts / tuned:.1f} times as fast as NUTS", flush=True)
            jax.clear_caches()
            proxy = HMCECS.taylor_proxy({"w": jnp.asarray(exact[0], jnp.float32)})

            def hmcecs(proxy=proxy):
                return HMCECS(NUTS(logistic), num_blocks=10, proxy=proxy)

            try:
                report("HMCECS", *timed(hmcecs, args, 300, 1_000), exact)
            except Exception as error:  # it needs the Hessian of every row
                print(f"  HMCECS: {type(error).__name__}: {str(error)[:100]}", flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    main()
