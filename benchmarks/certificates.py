# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
What a certificate takes and says: of logistic regressions of several sizes, and of three skewed
posteriors, against a long run of NUTS.

    python benchmarks/certificates.py [--only large skewed]

For each posterior the seconds of ``certify(mcmc)``, the first time in a process and again, the
shape of the tail of the weights and as how many independent draws a thousand of them count. ``run``
and ``certificate`` are how far the means and standard deviations of the run and of the weighted
draws are off, in standard deviations of the posterior, in the worst parameter; for skewed
posteriors against NUTS, with the error of the reference in brackets.
"""

import argparse
import time

from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import CCAdL, certify, full_data

SIZES = ((100_000, 20), (1_000_000, 20), (20_000, 100))
DRAWS, REFERENCE = 4_000, 40_000
PARTS = ("large", "skewed")


def logistic(x, y, batch_size=500):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    size = min(batch_size, x.shape[0])
    with numpyro.plate("rows", x.shape[0], subsample_size=size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def gamma_shape(y, batch_size=25):
    shape = numpyro.sample("shape", dist.LogNormal(0, 2))
    rate = numpyro.sample("rate", dist.LogNormal(0, 2))
    with numpyro.plate("rows", y.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Gamma(shape, rate), obs=y[i])


def small_variance(y, batch_size=50):
    """Groups whose means hardly differ: the scale is near zero."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", y.shape[0], subsample_size=batch_size) as i:
        # the mean of ten rows of a group, whose own level is integrated out
        numpyro.sample("y", dist.Normal(mu, jnp.sqrt(tau**2 + 0.1)), obs=y[i])


def skewed():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 3)).astype(np.float32)
    x[:, 0] = 1
    rare = (x @ np.array([-4.5, 0.5, 0.5]) + rng.logistic(size=500) > 0).astype(np.float32)
    return {
        f"rare events, {rare.sum():.0f} of 500 rows": (logistic, (x, rare)),
        "shape of a gamma law, 50 rows": (gamma_shape, (rng.gamma(0.5, size=50),)),
        "scale of 200 groups near zero": (
            small_variance, (0.33 * rng.standard_normal(200),),
        ),
    }  # fmt: skip


def large():
    rng = np.random.default_rng(0)
    for rows, size in SIZES:
        x = rng.standard_normal((rows, size), np.float32)
        y = (x[:, 0] + rng.logistic(size=rows) > 0).astype(np.float32)
        yield f"logistic, {rows:,} rows, {size} parameters", (logistic, (x, y))


def run_of(kernel, args, draws, **options):
    mcmc = MCMC(kernel, num_warmup=500, num_samples=draws, progress_bar=False, **options)
    mcmc.run(random.key(0), *args)
    return mcmc


def moments(draws, weights=None):
    """Means and standard deviations of all entries."""
    found = []
    for x in draws.values():
        flat = np.asarray(x, np.float64).reshape(len(x), -1)
        mean = np.average(flat, axis=0, weights=weights)
        found.append((mean, np.sqrt(np.average((flat - mean) ** 2, axis=0, weights=weights))))
    return tuple(np.concatenate(x) for x in zip(*found, strict=True))


def away(found, reference):
    """The largest error of a mean and of a standard deviation, in standard deviations."""
    (mean, sd), (right, scale) = found, reference
    return np.max(np.abs([(mean - right) / scale, sd / scale - 1]), axis=1)


def line(name, model, args, with_reference):
    mcmc = run_of(CCAdL(model, progress_bar=False), args, DRAWS)
    seconds = []
    for key in range(2):
        start = time.perf_counter()
        found = certify(mcmc, rng_key=random.key(key))
        seconds.append(time.perf_counter() - start)
    row = [name, f"{seconds[0]:.1f}", f"{seconds[1]:.1f}", f"{found.k_hat:.2f}"]
    row += [f"{found.effective:,.0f}"]
    if not with_reference:
        off = found.table["shift"].abs().max(), (found.table["ratio"] - 1).abs().max()
        errors = found.table["shift_error"].max(), found.table["ratio_error"].max()
        return [*row, *(f"{x:.3f} ({e:.3f})" for x, e in zip(off, errors, strict=True))]
    nuts = run_of(NUTS(full_data(model)), tuple(map(jnp.asarray, args)), REFERENCE)
    whole = nuts.get_samples()
    halves = [
        moments({k: x[part] for k, x in whole.items()})
        for part in (slice(0, None, 2), slice(1, None, 2))
    ]
    own = away(*halves) / 2
    of_run = away(moments(mcmc.get_samples()), moments(whole))
    many = certify(mcmc, 20_000)
    corrected = away(moments({k: many.draws[k] for k in whole}, many.weights), moments(whole))
    return [
        *row,
        *(f"{x:.3f} ({e:.3f})" for x, e in zip(of_run, own, strict=True)),
        *(f"{x:.3f} ({e:.3f})" for x, e in zip(corrected, own, strict=True)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument(
        "--only", nargs="+", choices=("large", "skewed"), default=("large", "skewed")
    )
    options = parser.parse_args()
    header = ["posterior", "s, the first time", "s, again", "k-hat", "effective"]
    if "large" in options.only:
        rows = [line(name, model, args, False) for name, (model, args) in large()]
        names = ["run: mean off by (se)", "sd off by (se)"]
        print(table([*header, *names], rows), flush=True)
    if "skewed" in options.only:
        rows = [line(name, model, args, True) for name, (model, args) in skewed().items()]
        names = ["run: mean", "run: sd", "certificate of 20,000: mean", "sd"]
        print("\n" + table([*header, *names], rows), flush=True)


if __name__ == "__main__":
    main()
