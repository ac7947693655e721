# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Posteriors with several modes whose weights are known: one step size, cycles of them, and replicas.

    python benchmarks/modes.py [--only mixture labels rings]

``mixture``: four normal modes in ten dimensions, 6.7 to 11 standard deviations apart, with weights
0.1 to 0.4, and rows that add noise to every minibatch. ``labels``: a mixture of two normals, of 400
rows, whose labels can be exchanged. ``rings``: radii of two rings, of 10,000 points as in the
report on them, whose labels can be exchanged too, with modes 200 standard deviations apart. Four
chains start in different modes. ``weights`` is the largest error of the weight of a mode, in all
chains together, ``one chain`` the largest in a single one, and ``visits`` how often a chain goes
from one mode to another.
"""

import argparse
import sys
import time
import warnings

import jax
from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_sgmcmc import CCAdL, Replicas, cyclical, summary
from numpyro_sgmcmc.results.cycle_draws import kept_draws

CHAINS = 4
RNG = np.random.default_rng(0)
WEIGHTS = np.array([0.1, 0.2, 0.3, 0.4])
MODES = RNG.standard_normal((4, 10))
MODES *= 6 / np.linalg.norm(MODES, axis=1, keepdims=True)


def four_modes(slopes):
    flat = dist.ImproperUniform(dist.constraints.real_vector, (), (10,))
    x = numpyro.sample("x", flat)
    squares = jnp.sum((x - MODES) ** 2, axis=-1)
    log_density = jax.nn.logsumexp(jnp.log(WEIGHTS) - squares / 2)
    with numpyro.plate("rows", len(slopes), subsample_size=50) as i:
        numpyro.factor("density", log_density / len(slopes) + slopes[i] @ x)


def two_normals(y):
    x = numpyro.sample("x", dist.Normal(0, 3).expand([2]).to_event(1))
    w = numpyro.sample("w", dist.Beta(2, 2))
    halves = dist.Categorical(jnp.stack([w, 1 - w]))
    with numpyro.plate("rows", len(y), subsample_size=50) as i:
        numpyro.sample("y", dist.MixtureSameFamily(halves, dist.Normal(x, 1)), obs=y[i])


def two_rings(norms):
    x = numpyro.sample("x", dist.Normal(0, 10).expand([2]).to_event(1))
    halves = dist.Categorical(probs=jnp.full(2, 0.5))
    with numpyro.plate("rows", len(norms), subsample_size=100) as i:
        mixture = dist.MixtureSameFamily(halves, dist.Normal(x, 0.3))
        numpyro.sample("norm", mixture, obs=norms[i])


def cases():
    slopes = RNG.standard_normal((1_000, 10))
    slopes = 0.007 * (slopes - slopes.mean(axis=0))
    left = RNG.random(400) < 0.35
    y = np.where(left, -1.5, 1.5) + RNG.standard_normal(400)
    ring = RNG.integers(2, size=10_000)
    norms = np.array([1.0, 2.0])[ring] + 0.3 * RNG.standard_normal(10_000)
    exact = np.array([0.5, 0.5])
    # one of the four chains begins with the labels the other way round
    starts = [[[-2.0, 2.0]] * 3 + [[2.0, -2.0]], [[0.0, 3.0]] * 3 + [[3.0, 0.0]]]
    # model, data, weights, starts, step size, longest of a cycle, friction, temperatures
    return {
        "mixture": (four_modes, slopes, WEIGHTS, MODES, 0.3, 1.5, 1.0, np.geomspace(1, 20, 6)),
        "labels": (two_normals, y, exact, starts[0], 0.03, 0.15, 5.0, np.geomspace(1, 100, 10)),
        "rings": (two_rings, norms, exact, starts[1], 2e-3, 1e-2, 60.0, np.geomspace(1, 6e3, 24)),
    }


def labels_of(name, x):
    """The mode of each draw, shape (chains, draws)."""
    if name == "mixture":
        return np.argmin(((x[:, :, None] - MODES) ** 2).sum(-1), axis=-1)
    return (x[..., 0] > x[..., 1]).astype(int)


def one(name, method, case, samples):
    model, data, weights, starts, h, longest, friction, temperatures = case
    options = {"covariance": "full", "steps_per_sample": 20}
    if method == "cycles":
        h, options["steps_per_sample"] = cyclical(longest, h, steps=200), None
        samples //= 10
    elif method == "replicas":
        options["replicas"] = Replicas(temperatures)
    kernel = CCAdL(model, h, friction, **options)
    mcmc = MCMC(
        kernel,
        num_warmup=samples // 10,
        num_samples=samples,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = {"x": jnp.asarray(starts, jnp.float32)}
    if name == "labels":
        start["w"] = jnp.zeros(CHAINS)
    begin = time.perf_counter()
    mcmc.run(random.key(0), jnp.asarray(data, jnp.float32), init_params=start)
    seconds = time.perf_counter() - begin
    labels = labels_of(name, np.asarray(kept_draws(mcmc).get_samples(True)["x"]))
    found = np.array([np.bincount(c, minlength=len(weights)) for c in labels]) / labels.shape[1]
    visits = np.count_nonzero(np.diff(labels, axis=1), axis=1).mean()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rhat = summary(mcmc).table["r_hat"].max()
    pooled, single = np.abs(found.mean(axis=0) - weights).max(), np.abs(found - weights).max()
    return [name, method, f"{pooled:.3f}", f"{single:.3f}", f"{visits:.0f}", f"{rhat:.2f}",
            f"{seconds:.0f}"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--samples", type=int, default=10_000)
    options = parser.parse_args()
    rows = []
    for name, case in cases().items():
        if options.only is None or name in options.only:
            for method in ("one step size", "cycles", "replicas"):
                rows.append(one(name, method, case, options.samples))
                print(rows[-1], file=sys.stderr, flush=True)
    print(table(["posterior", "", "weights", "one chain", "visits", "R-hat", "s"], rows))


if __name__ == "__main__":
    main()
