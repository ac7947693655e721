# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Table 1 of Shang et al. (2015): the posterior of the mean and the precision of a Gaussian.

100 observations, minibatches of 10 drawn with replacement, Normal-Gamma prior. The model is
written in the paper's own space, with the precision unconstrained, since the step sizes and
frictions of the paper mean nothing after a change of variables.

The paper's observations are not published, and with friction 10 the autocorrelation times go
with the inverse square of their sample variance. Here they have mean 0 and a variance of 0.975:
one number, chosen by hand from a coarse scan so that the six times at h = 0.001 come close to
the paper's; with standardised data, a variance of 0.99, two of them are 10 and 11 % off. The
other columns are predictions. A sample of 100 has a variance of 1 ± 0.14.

- Autocorrelation time of ``mu + gamma``: 1 plus twice the sum of the autocorrelations up to
  the first below 0.05, the definition that reproduces the paper's numbers at h = 0.001; mean
  over chains, and the standard deviation of a single chain like the paper's.
- RMSE of the density on 100 points over four posterior standard deviations each way, mean of
  the two parameters: the paper does not define its own, so that only ratios compare.
- Variances relative to the exact posterior, of each parameter and their mean, with standard
  errors over chains, and the effective temperature ``1 + h V / (2 A)`` of SGHMC without a
  noise estimate, for the noise variance ``V`` of the gradient in the direction of mu.

Run with ``python benchmarks/normal_gamma.py``; writes a Markdown table.
"""

import argparse
from functools import partial
import math

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from scipy import stats

from numpyro_sgmcmc import SGHMC, SGNHT, CCAdL

N, BATCH = 100, 10
SETTINGS = [(0.001, 1.0), (0.001, 10.0), (0.01, 1.0), (0.01, 10.0)]
METHODS = {
    "SGHMC": partial(SGHMC, integrator="euler"),
    "SGNHT": partial(SGNHT, integrator="euler"),
    "CCAdL": partial(
        CCAdL, integrator="euler", covariance="full", window=math.inf, thermal_mass=1.0
    ),
}
#: (RMSE, autocorrelation time) as printed
PAPER = {
    "SGHMC": [(0.0148, 236.12), (0.0029, 333.04), (0.0531, 29.78), (0.0132, 39.33)],
    "SGNHT": [(0.0037, 238.32), (0.0035, 406.71), (0.0044, 26.71), (0.0043, 55.00)],
    "CCAdL": [(0.0034, 238.06), (0.0031, 402.45), (0.0021, 26.71), (0.0035, 54.43)],
}


def model(x):
    """p(mu, gamma) = N(mu | 0, 1 / gamma) Gamma(gamma | 1, 1): gamma is a precision."""
    mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
    gamma = numpyro.sample("gamma", dist.ImproperUniform(dist.constraints.real, (), ()))
    numpyro.factor("prior", 0.5 * jnp.log(gamma) - 0.5 * gamma * mu**2 - gamma)
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        numpyro.factor("likelihood", 0.5 * jnp.log(gamma) - 0.5 * gamma * (x[i] - mu) ** 2)


def posterior(x):
    """Exact marginals of mu (a scaled t) and gamma (a Gamma)."""
    mean = x.mean()
    alpha, kappa = 1 + N / 2, N + 1
    beta = 1 + ((x - mean) ** 2).sum() / 2 + N * mean**2 / (2 * kappa)
    scale = np.sqrt(beta / (alpha * kappa))
    return {
        "mu": stats.t(2 * alpha, N * mean / kappa, scale),
        "gamma": stats.gamma(alpha, scale=1 / beta),
    }


def autocorrelation_time(x):
    """1 + 2 sum rho_k, up to the first rho_k below 0.05."""
    x = x - x.mean()
    power = np.abs(np.fft.rfft(x, 2 * len(x))) ** 2
    rho = np.fft.irfft(power)[: len(x)]
    rho /= rho[0]
    return 1 + 2 * rho[1 : np.argmax(rho < 0.05)].sum()


def density_error(draws, exact):
    grid = exact.mean() + exact.std() * np.linspace(-4, 4, 100)
    edges = np.append(grid - (grid[1] - grid[0]) / 2, grid[-1] + (grid[1] - grid[0]) / 2)
    found = np.histogram(draws, edges)[0] / draws.size / (grid[1] - grid[0])
    return np.sqrt(np.mean((found - exact.pdf(grid)) ** 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000, help="per chain, as the paper")
    parser.add_argument("--chains", type=int, default=8)
    parser.add_argument("--variance", type=float, default=0.975, help="of the observations")
    options = parser.parse_args()
    x = np.random.default_rng(2015).standard_normal(N)
    x = (x - x.mean()) / x.std() * options.variance**0.5
    exact = posterior(x)
    data = jnp.asarray(x, jnp.float32)
    start = {k: jnp.full(options.chains, law.mean()) for k, law in exact.items()}
    noise = N**2 / BATCH * x.var() * (exact["gamma"].mean() ** 2 + exact["gamma"].var())
    print(
        "| h | A | method | time | paper | ratio | RMSE | paper | var mu | var gamma | mean |"
        " 1 + hV/2A | undone |\n|" + " ---: |" * 13
    )
    for k, (h, friction) in enumerate(SETTINGS):
        for name, method in METHODS.items():
            kernel = method(model, step_size=h, friction=friction, subsampling="with_replacement")
            mcmc = MCMC(
                kernel,
                num_warmup=20_000,
                num_samples=options.samples,
                num_chains=options.chains,
                chain_method="vectorized",
                progress_bar=False,
            )
            mcmc.run(random.key(k), data, init_params=start)
            draws = jax.tree.map(np.asarray, mcmc.get_samples(group_by_chain=True))
            times = [autocorrelation_time(c) for c in draws["mu"] + draws["gamma"]]
            errors = np.mean([density_error(draws[p], exact[p]) for p in exact])
            ratios = [draws[p].var(1) / exact[p].var() for p in exact]
            ratios.append((ratios[0] + ratios[1]) / 2)
            cells = [
                f"{h}", f"{friction:g}", name,
                f"{np.mean(times):.1f} ± {np.std(times, ddof=1):.1f}", f"{PAPER[name][k][1]:.1f}",
                f"{np.mean(times) / PAPER[name][k][1]:.2f}",
                f"{errors:.4f}", f"{PAPER[name][k][0]:.4f}",
                *(f"{r.mean():.3f} ± {r.std(ddof=1) / len(r) ** 0.5:.3f}" for r in ratios),
                f"{1 + h * noise / (2 * friction):.2f}" if name == "SGHMC" else "",
                f"{int(mcmc.last_state.nonfinite_steps.sum())}",
            ]  # fmt: skip
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
