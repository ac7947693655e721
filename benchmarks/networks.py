# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Bayesian neural networks around the members of an ensemble, on the tables of the bde paper.

    python benchmarks/networks.py --data FOLDER [--only airfoil bikesharing] [--select]

Four layers of 16 units, standard normal priors, a mean and a standard deviation for each row; a
fifth of the rows, chosen as scikit-learn's ``train_test_split(random_state=0)`` does, for the test,
everything standardised; 10 members, 1,000 draws. The scores are negative log densities of a test
row: of a normal law with the pooled mean and standard deviation, which is what bde's paper has, and
of the mixture of all draws, which is the predictive density; the root mean square error; and all of
them for the members where the chains start. ``--select`` compares the settings in ``TRIED`` on a
fifth of the training rows, with a key that is none of the table's.
"""

import argparse
from functools import partial
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

MEMBERS, DRAWS, SELECTION_KEY = 10, 100, 100
#: Samples of the warm-up, steps of a sample, and of the descent.
CASES = {"airfoil": (200, 400, 6_000), "bikesharing": (400, 200, 20_000)}
#: Units, rows of a minibatch (None: all), the variance of the energy in a step, and the metric.
TRIED = {
    "airfoil": [("tanh", None, 0.5, None), ("relu", None, 0.5, None), ("tanh", None, 0.1, None)],
    "bikesharing": [("tanh", 1_000, 0.5, None), ("tanh", 2_000, 0.5, None)],
}
#: What ``--select`` found.
CHOSEN = {"airfoil": ("tanh", None, 0.1, None), "bikesharing": ("tanh", 2_000, 0.5, None)}
UNITS = {"tanh": jnp.tanh, "relu": jax.nn.relu}


def network(units, x, y=None, batch_size=None, width=16, layers=4):
    signal, sizes = x, [x.shape[1], *[width] * layers, 2]
    weights = []
    for k, (a, b) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        w = numpyro.sample(f"w{k}", dist.Normal(0, 1).expand([a, b]).to_event(2))
        weights.append((w, numpyro.sample(f"b{k}", dist.Normal(0, 1).expand([b]).to_event(1))))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        signal = x[i]
        for w, b in weights[:-1]:
            signal = units(signal @ w + b)
        mean, scale = jnp.split(signal @ weights[-1][0] + weights[-1][1], 2, axis=-1)
        law = dist.Normal(mean[:, 0], jax.nn.softplus(scale[:, 0]) + 1e-3)
        numpyro.sample("y", law, obs=None if y is None else y[i])


def load(data, name, select=False):
    """Training and test rows; of a selection both are from the training rows."""
    z = np.load(data / f"{name}.npz")
    x, y = z["X"].astype(float), z["y" if "y" in z else "count"].astype(float)
    order = np.random.RandomState(0).permutation(len(y))
    count = int(np.ceil(0.2 * len(y)))
    parts = order[count:], order[:count]
    if select:
        parts = parts[0][len(parts[0]) // 5 :], parts[0][: len(parts[0]) // 5]
    (x_mean, x_sd), (y_mean, y_sd) = ((v[parts[0]].mean(0), v[parts[0]].std(0)) for v in (x, y))
    return [
        (jnp.asarray((x[k] - x_mean) / x_sd, "f4"), jnp.asarray((y[k] - y_mean) / y_sd, "f4"))
        for k in parts
    ]


@partial(jax.jit, static_argnums=2)
def predicted(draws, x, units):
    """Mean and standard deviation of each row by each draw, shape (draws, rows)."""

    def one(draw):
        signal = x
        last = len(draw) // 2 - 1
        for k in range(last):
            signal = units(signal @ draw[f"w{k}"] + draw[f"b{k}"])
        out = signal @ draw[f"w{last}"] + draw[f"b{last}"]
        return out[:, 0], jax.nn.softplus(out[:, 1]) + 1e-3

    return jax.lax.map(one, draws, batch_size=50)


def scores(units, draws, x, y):
    mean, sd = (np.asarray(v, np.float64) for v in predicted(draws, x, units))
    y = np.asarray(y, np.float64)
    center, variance = mean.mean(0), (sd**2).mean(0) + mean.var(0)
    pooled = 0.5 * np.log(2 * np.pi * variance) + (y - center) ** 2 / (2 * variance)
    each = -0.5 * ((y - mean) / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi)
    mixture = np.log(len(mean)) - np.logaddexp.reduce(each, axis=0)
    return [float(v) for v in (pooled.mean(), mixture.mean(), ((y - center) ** 2).mean() ** 0.5)]


def one(data, name, key, settings, select=False):
    """Scores and seconds of the members, and of the draws around them."""
    (x, y), test = load(data, name, select)
    warmup, steps, descent = CASES[name]
    kind, batch_size, variance, metric = settings
    units = UNITS[kind]

    def model(x, y):
        return network(units, x, y, batch_size)

    start = Ensemble(steps=descent, energy_variance=variance)
    kernel = SGMCLMC(model, start=start, metric=metric, steps_per_sample=steps)
    begin = time.perf_counter()
    members = kernel.init(random.split(random.key(key), MEMBERS), warmup, None, (x, y), {}).z
    alone = [*scores(units, members, *test), time.perf_counter() - begin]
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
    found = [*scores(units, mcmc.get_samples(), *test), time.perf_counter() - begin]
    return {"ensemble": alone, "SGMCLMC": found}


def shown(name, runs):
    """Rows of the table: means and standard errors over the keys."""
    for method in runs[0]:
        values = np.array([run[method] for run in runs])
        errors = values.std(0, ddof=1) / len(runs) ** 0.5 if len(runs) > 1 else 0 * values[0]
        cells = [f"{m:.4f} ± {e:.4f}" for m, e in zip(values.mean(0)[:3], errors[:3], strict=True)]
        yield [name, method, *cells, f"{values[:, 3].mean():.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--keys", type=int, default=5)
    parser.add_argument("--select", action="store_true", help="choose settings, no test rows")
    options = parser.parse_args()
    rows = []
    for name in options.only:
        if options.select:
            for settings in TRIED[name]:
                found = one(options.data, name, SELECTION_KEY, settings, select=True)
                print(name, settings, found, flush=True)
            continue
        runs = []
        for key in range(options.keys):
            runs.append(one(options.data, name, key, CHOSEN[name]))
            print(name, key, runs[-1], file=sys.stderr, flush=True)
        rows += shown(name, runs)
    if rows:
        print(table(["data", "", "pooled", "mixture", "rmse", "s"], rows))


if __name__ == "__main__":
    main()
