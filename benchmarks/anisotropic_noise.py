# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Noise of the gradient that is far stronger in one direction than in the other.

The posterior of the mean of 1,000 correlated Gaussian observations, with minibatches of 10. The
model has unit covariance in the likelihood where the data have not, as any misspecified
model, so that the noise of the gradient is not in proportion to the precision of the posterior:
its variance is 100 in one direction and 1 in the other. The posterior is a Gaussian with
unit variances and correlation 0.3, known exactly.

SGHMC has no estimate of the noise; SGNHT has one friction for all directions; CCAdL has the
covariance. Covariances are relative to the exact posterior along the axes of the noise.

Run with ``python benchmarks/anisotropic_noise.py --picture docs/anisotropic_noise.png``; writes
a Markdown table.
"""

import argparse

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMC, SGNHT, CCAdL

N, BATCH = 1_000, 10
STEP_SIZE, FRICTION = 0.1, 1.0
COVARIANCE = np.array([[1.0, 0.3], [0.3, 1.0]])
NOISE = np.diag([100.0, 1.0])
METHODS = {
    "SGHMC": (SGHMC, {}),
    "SGNHT": (SGNHT, {}),
    "CCAdL, Euler": (CCAdL, {"integrator": "euler"}),
    "CCAdL": (CCAdL, {}),
}


def model(x, factor):
    """Rows of precision L L' each, whatever their spread."""
    prior = dist.ImproperUniform(dist.constraints.real_vector, (), (2,))
    theta = numpyro.sample("theta", prior)
    with numpyro.plate("rows", len(x), subsample_size=BATCH) as i:
        numpyro.factor("x", -0.5 * jnp.sum(((x[i] - theta) @ factor) ** 2, -1))


def data():
    """Observations for which the gradient noise has exactly the covariance above."""
    x = np.random.default_rng(0).standard_normal((N, 2))
    x -= x.mean(0)
    x = x @ np.linalg.inv(np.linalg.cholesky(np.cov(x.T))).T
    row = np.linalg.inv(COVARIANCE) / N
    spread = np.linalg.inv(row) @ (NOISE * BATCH / (N**2 * (1 - BATCH / N))) @ np.linalg.inv(row)
    x = x @ np.linalg.cholesky(spread).T
    return jnp.asarray(x, jnp.float32), jnp.asarray(np.linalg.cholesky(row), jnp.float32)


def sample(method, options, num_samples):
    kernel = method(model, step_size=STEP_SIZE, friction=FRICTION, steps_per_sample=10, **options)
    chains = 50
    mcmc = MCMC(
        kernel,
        num_warmup=1_000,
        num_samples=num_samples,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *data(), init_params={"theta": jnp.zeros((chains, 2))})
    assert int(np.sum(mcmc.last_state.monitor.nonfinite_steps)) == 0
    return np.asarray(mcmc.get_samples(True)["theta"], float)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=2_000, help="draws of each of 50 chains")
    parser.add_argument("--picture", help="where to draw the densities")
    args = parser.parse_args()
    draws = {name: sample(*method, args.samples) for name, method in METHODS.items()}
    print(f"h = {STEP_SIZE}, A = {FRICTION}, noise of variance 100 and 1; exact: 1, 1, 0.3\n")
    print("| method | variance 1 | variance 2 | correlation |\n| --- | ---: | ---: | ---: |")
    for name, theta in draws.items():
        a, b = theta[..., 0], theta[..., 1]
        of_chains = np.stack([(a**2).mean(1), (b**2).mean(1), (a * b).mean(1)])
        (va, vb, cov), errors = of_chains.mean(1), of_chains.std(1) / len(a) ** 0.5
        print(
            f"| {name} | {va:.3f} ± {errors[0]:.3f} | {vb:.3f} ± {errors[1]:.3f}"
            f" | {cov / np.sqrt(va * vb):.3f} |"
        )
    if args.picture:
        draw(draws, args.picture)


def draw(draws, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    angle = np.linspace(0, 2 * np.pi, 200)
    circle = np.linalg.cholesky(COVARIANCE) @ np.stack([np.cos(angle), np.sin(angle)])
    figure, axes = plt.subplots(
        1, len(draws), sharex=True, sharey=True, figsize=(11, 3.6), layout="constrained"
    )
    grid = np.linspace(-5, 5, 101)
    for axis, (name, theta) in zip(axes, draws.items(), strict=True):
        flat = theta.reshape(-1, 2)
        axis.hist2d(*flat.T, bins=(grid, grid), cmap="Blues")
        for k in (1, 2):
            axis.plot(*(k * circle), color="black", linewidth=1, linestyle="--")
        axis.set_title(name, fontsize=10)
        axis.set_aspect("equal")
        axis.set_xlabel("direction of strong noise")
    axes[0].set_ylabel("direction of weak noise")
    figure.suptitle("draws, and one and two standard deviations of the exact posterior", fontsize=9)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", False)
    main()
