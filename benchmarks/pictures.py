# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The picture of the documentation of the diagnostics: a hierarchical regression by SGHMC that is too
wide in some directions.

    python benchmarks/pictures.py --folder docs
"""

import argparse
from pathlib import Path

from jax import random
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from PIL import Image

from numpyro_sgmcmc import SGHMC, plot_stein

matplotlib.use("Agg")

ROWS, GROUPS = 20_000, 12


def model(x, group, y, batch_size=200):
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("groups", GROUPS):
        effect = numpyro.sample("effect", dist.Normal(intercept, spread))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        logits = x[i] @ w + effect[group[i]]
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])


def data():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 4)) * [1.0, 1.0, 1.0, 3.0]
    group = rng.integers(0, GROUPS, ROWS)
    logits = x @ [0.5, -0.5, 0.0, 0.2] + 0.5 * rng.standard_normal(GROUPS)[group]
    y = rng.random(ROWS) < 1 / (1 + np.exp(-logits))
    return jnp.asarray(x, jnp.float32), jnp.asarray(group), jnp.asarray(y, jnp.float32)


def run(kernel, data):
    mcmc = MCMC(
        kernel,
        num_warmup=1_000,
        num_samples=2_000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *data)
    return mcmc


def save(axes, path):
    np.ravel(np.asarray(axes, object))[0].figure.savefig(path, dpi=80)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)  # a third of the size
    print(path, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    folder = parser.parse_args().folder
    rows = data()
    options = {"gradient": "minibatch", "metric": "dense", "progress_bar": False}
    tuning = SGHMC(model, **options).tune(random.key(1), *rows)
    wide = run(SGHMC(model, step_size=0.15, friction=0.7, tuning=tuning, steps_per_sample=10), rows)
    save(plot_stein(wide), folder / "plot_stein.png")


if __name__ == "__main__":
    main()
