# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Bayesian neural networks around the members of an ensemble, on the tables of the bde paper.

    python benchmarks/networks.py --data FOLDER [--only airfoil bikesharing] [--keys 3]

Four layers of 16 units with tanh, standard normal priors, a mean and a standard deviation for each
row; a fifth of the rows, chosen as scikit-learn's ``train_test_split(random_state=0)`` does, for
the test, everything standardised; 10 members, 1,000 draws. The scores are negative log densities of
a test row: of a normal law with the pooled mean and standard deviation, which is what bde's paper
has, and of the mixture of all draws, which is the predictive density. ``pooled``, ``mixture`` and
the root mean square error of the members where the chains start, and of the draws.
"""

import argparse
from pathlib import Path
import sys
import time

import jax
from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGMCLMC, Ensemble

MEMBERS, DRAWS = 10, 100
#: Rows of a minibatch (None: all), samples of the warm-up, steps of a sample, and of the descent.
CASES = {
    "airfoil": (None, 200, 400, 6_000),
    "bikesharing": (2_000, 400, 200, 20_000),
}


def network(x, y=None, batch_size=None, width=16, layers=4):
    signal, sizes = x, [x.shape[1], *[width] * layers, 2]
    weights = []
    for k, (a, b) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        w = numpyro.sample(f"w{k}", dist.Normal(0, 1).expand([a, b]).to_event(2))
        weights.append((w, numpyro.sample(f"b{k}", dist.Normal(0, 1).expand([b]).to_event(1))))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        signal = x[i]
        for w, b in weights[:-1]:
            signal = jnp.tanh(signal @ w + b)
        mean, scale = jnp.split(signal @ weights[-1][0] + weights[-1][1], 2, axis=-1)
        law = dist.Normal(mean[:, 0], jax.nn.softplus(scale[:, 0]) + 1e-3)
        numpyro.sample("y", law, obs=None if y is None else y[i])


def load(data, name):
    z = np.load(data / f"{name}.npz")
    x, y = z["X"].astype(float), z["y" if "y" in z else "count"].astype(float)
    order = np.random.RandomState(0).permutation(len(y))
    count = int(np.ceil(0.2 * len(y)))
    parts = order[count:], order[:count]
    (x_mean, x_sd), (y_mean, y_sd) = ((v[parts[0]].mean(0), v[parts[0]].std(0)) for v in (x, y))
    return [
        (jnp.asarray((x[k] - x_mean) / x_sd, "f4"), jnp.asarray((y[k] - y_mean) / y_sd, "f4"))
        for k in parts
    ]


@jax.jit
def predicted(draws, x):
    """Mean and standard deviation of each row by each draw, shape (draws, rows)."""

    def one(draw):
        signal = x
        last = len(draw) // 2 - 1
        for k in range(last):
            signal = jnp.tanh(signal @ draw[f"w{k}"] + draw[f"b{k}"])
        out = signal @ draw[f"w{last}"] + draw[f"b{last}"]
        return out[:, 0], jax.nn.softplus(out[:, 1]) + 1e-3

    return jax.lax.map(one, draws, batch_size=50)


def scores(draws, x, y):
    mean, sd = (np.asarray(v, np.float64) for v in predicted(draws, x))
    y = np.asarray(y, np.float64)
    center, variance = mean.mean(0), (sd**2).mean(0) + mean.var(0)
    pooled = 0.5 * np.log(2 * np.pi * variance) + (y - center) ** 2 / (2 * variance)
    each = -0.5 * ((y - mean) / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi)
    mixture = np.log(len(mean)) - np.logaddexp.reduce(each, axis=0)
    return [
        f"{pooled.mean():.4f}",
        f"{mixture.mean():.4f}",
        f"{np.sqrt(((y - center) ** 2).mean()):.4f}",
    ]


def one(data, name, key):
    (x, y), test = load(data, name)
    batch_size, warmup, steps, descent = CASES[name]

    def model(x, y):
        return network(x, y, batch_size)

    kernel = SGMCLMC(model, start=Ensemble(steps=descent), steps_per_sample=steps)
    begin = time.perf_counter()
    start = kernel.init(random.split(random.key(key), MEMBERS), warmup, None, (x, y), {})
    rows = [[name, "ensemble", *scores(start.z, *test), f"{time.perf_counter() - begin:.0f}"]]
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=DRAWS,
        num_chains=MEMBERS,
        chain_method="vectorized",
        progress_bar=False,
    )
    begin = time.perf_counter()
    mcmc.run(random.key(key), x, y)
    found = scores(mcmc.get_samples(), *test)
    size = f"SGMCLMC, steps of {kernel.tuning.step_size:.2g}"
    return [*rows, [name, size, *found, f"{time.perf_counter() - begin:.0f}"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--keys", type=int, default=1)
    options = parser.parse_args()
    rows = []
    for name in options.only:
        for key in range(options.keys):
            rows += one(options.data, name, key)
            print(*rows[-2:], sep="\n", file=sys.stderr, flush=True)
    print(table(["data", "", "pooled", "mixture", "rmse", "s"], rows))


if __name__ == "__main__":
    main()
