# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Regressions with a regularised horseshoe, by ``CCAdL(model)`` against NUTS and a Gibbs sampler.

    python benchmarks/shrinkage.py [linear] [logistic] [wide] [--picture FILE]

``linear`` and ``logistic`` have 200 columns and 50,000 rows, ``wide`` is linear with 1,000 columns
and 100,000 rows. Ten coefficients are not zero. The reference of ``linear`` is NUTS, with the sums
of squares and products of the rows, and that of the others a Gibbs sampler. NUTS has a quadratic
log-likelihood of logistic rows, which serves to count its steps. Its seconds are those of as many
gradients of all rows.
"""

import argparse
import time
from typing import Any, NamedTuple
import warnings

import jax
from jax import random
import jax.numpy as jnp
from measure import interleaved, table
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_median
from scipy.linalg import cho_factor, cho_solve, solve_triangular

from numpyro_sgmcmc import CCAdL
from numpyro_sgmcmc.diagnostics.comparison import variance_of

#: Columns and rows of each case, and the rows of a minibatch.
CASES = {
    "linear": (200, 50_000, 500),
    "logistic": (200, 50_000, 500),
    "wide": (1_000, 100_000, 1_000),
}

#: Samples of each chain of NUTS, after 500 of its warm-up.
SAMPLES = {"linear": 1_000, "logistic": 1_000, "wide": 200}

SIGNALS = 10

#: A coefficient is included if its size is larger.
INCLUDED = 0.1


class Rows(NamedTuple):
    x: Any
    y: Any


def simulated(name: str) -> tuple[Rows, np.ndarray]:
    """Rows, whose neighbouring columns have a correlation of 0.5, and the coefficients."""
    columns, rows, _ = CASES[name]
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((rows, columns + 1), np.float32)
    x = (noise[:, :-1] + noise[:, 1:]) / 2**0.5
    w = np.zeros(columns, np.float32)
    where = np.linspace(0, columns - 1, SIGNALS).astype(int)
    w[where] = np.geomspace(0.02, 0.5, SIGNALS) * (-1) ** np.arange(SIGNALS)
    linear = x @ w
    y = (
        linear + rng.logistic(size=rows) > 0
        if name == "logistic"
        else linear + rng.normal(size=rows)
    )
    return Rows(jnp.asarray(x), jnp.asarray(y, jnp.float32)), w


def global_scale(name: str) -> float:
    """The scale of tau by Piironen and Vehtari (2017)."""
    columns, rows, _ = CASES[name]
    return SIGNALS / (columns - SIGNALS) / rows**0.5


def coefficients(columns: int, tau_scale: float) -> jax.Array:
    tau = numpyro.sample("tau", dist.HalfCauchy(tau_scale))
    slab = numpyro.sample("slab", dist.InverseGamma(2, 2))
    with numpyro.plate("columns", columns):
        scale = tau * numpyro.sample("local", dist.HalfCauchy(1))
        z = numpyro.sample("z", dist.Normal(0, 1))
    return numpyro.deterministic("w", z * scale * jnp.sqrt(slab / (slab + scale**2)))


def model(rows: Rows, name: str, batch: int | None = None) -> None:
    w = coefficients(rows.x.shape[1], global_scale(name))
    sd = None if name == "logistic" else numpyro.sample("sd", dist.HalfNormal(2))
    with numpyro.plate("rows", len(rows.y), subsample_size=batch) as i:
        linear = rows.x[i] @ w
        law = dist.Bernoulli(logits=linear) if sd is None else dist.Normal(linear, sd)
        numpyro.sample("y", law, obs=rows.y[i])


def sums_of(rows: Rows) -> tuple[np.ndarray, np.ndarray, float]:
    """Products of columns, products with the outcomes, and the sum of their squares."""
    columns = rows.x.shape[1]
    products, with_y, squares = np.zeros((columns, columns)), np.zeros(columns), 0.0
    for part in np.array_split(np.arange(len(rows.y)), 20):
        x, y = np.asarray(rows.x[part], float), np.asarray(rows.y[part], float)
        products, with_y, squares = products + x.T @ x, with_y + x.T @ y, squares + y @ y
    return products, with_y, squares


def expansion(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Precision and mode of the likelihood, for a standard deviation of 1, and squares there."""
    if name != "logistic":
        products, with_y, squares = sums_of(rows)
        mode = np.linalg.solve(products, with_y)
        return products, mode, squares - with_y @ mode
    x, y = np.asarray(rows.x, float), np.asarray(rows.y, float)
    mode = np.zeros(x.shape[1])
    for _ in range(10):
        p = 1 / (1 + np.exp(-x @ mode))
        precision = (x * (p * (1 - p))[:, None]).T @ x
        mode = mode + np.linalg.solve(precision, x.T @ (y - p))
    return precision, mode, 0.0


def model_of_sums(rows: Rows, name: str, precision, mode, squares) -> None:
    """The model with the expansion of its likelihood, which is exact for linear rows."""
    w = coefficients(len(mode), global_scale(name))
    sd = 1.0 if name == "logistic" else numpyro.sample("sd", dist.HalfNormal(2))
    away = w - mode
    sum_of_squares = squares + away @ precision @ away
    numpyro.factor("y", -len(rows.y) * jnp.log(sd) - sum_of_squares / 2 / sd**2)


def nuts(rows: Rows, name: str, samples: int) -> tuple[dict[str, np.ndarray], float]:
    """Draws of NUTS by chain, and its seconds on all rows for a chain."""
    quadratic = [jnp.asarray(x, jnp.float32) for x in expansion(rows, name)]
    # from far out chains stay in a mode of wide scales
    kernel = NUTS(model_of_sums, target_accept_prob=0.95, init_strategy=init_to_median)
    options = {"num_chains": 4, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=500, num_samples=samples, **options)
    mcmc.run(random.key(2), rows, name, *quadratic, extra_fields=("num_steps",))
    draws = {k: np.asarray(v, float) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    steps = float(np.mean(mcmc.get_extra_fields()["num_steps"])) * (500 + samples)
    print(f"NUTS: {steps / (500 + samples):.0f} steps per sample", flush=True)
    return draws, 4 * steps * seconds_of_a_gradient(rows, name)


def seconds_of_a_gradient(rows: Rows, name: str) -> float:
    values = {"w": jnp.zeros(rows.x.shape[1]), "sd": jnp.ones(())}

    @jax.jit
    def gradient(values, rows):
        def energy(values):
            linear = rows.x @ values["w"]
            law = dist.Normal(linear, values["sd"])
            if name == "logistic":
                law = dist.Bernoulli(logits=linear)
            return -law.log_prob(rows.y).sum()

        return jax.grad(energy)(values)

    return float(np.median(interleaved({"one": lambda: gradient(values, rows)}, 20)["one"]))


def gibbs(rows: Rows, name: str, samples: int, seed: int = 0) -> dict[str, np.ndarray]:
    """
    Draws of a Gibbs sampler, of one chain.

    It draws the scales of the coefficients from their distribution given the coefficients, on a
    grid; the coefficients from a normal distribution given their scales; and tau, the slab and
    the rows' standard deviation by Metropolis steps, the first two with the scales integrated out.
    Coefficients of logistic rows are proposals, accepted by the likelihood of all rows.
    """
    products, mode, squares = expansion(rows, name)
    with_y, is_linear = products @ mode, name != "logistic"
    x, y = np.asarray(rows.x), np.asarray(rows.y)
    count, columns = len(rows.y), len(with_y)
    rng = np.random.default_rng(seed)

    def missing(w: np.ndarray) -> float:
        """The log-likelihood without its expansion."""
        linear = x @ w.astype(np.float32)
        away = w - mode
        terms = y * linear - np.logaddexp(0, linear)
        return float(terms.sum(dtype=float)) + away @ products @ away / 2

    grid = np.arange(-12.0, 16.0, 0.1)[:, None]
    log_prior = grid - np.log1p(np.exp(2 * grid))
    w, accepted, left = mode, 0, 0.0 if is_linear else missing(mode)
    log_tau, log_slab, log_sd = np.log(global_scale(name)), 0.0, 0.0
    kept: dict[str, list] = {"w": [], "tau": [], "slab": [], "sd": []}

    def log_joint(log_tau: float, log_slab: float) -> np.ndarray:
        """Of local scales on the grid and coefficients, shape (grid, columns)."""
        scale = np.exp(log_tau + grid)
        variance = 1 / (1 / scale**2 + np.exp(-log_slab))
        return log_prior - np.log(variance) / 2 - w**2 / variance / 2

    def log_scales(log_tau: float, log_slab: float) -> float:
        """Log density of tau and the slab given the coefficients."""
        joint = log_joint(log_tau, log_slab)
        peak = joint.max(axis=0)
        total = np.sum(peak + np.log(np.exp(joint - peak).sum(axis=0)))
        tau = log_tau - np.log1p(np.exp(2 * (log_tau - np.log(global_scale(name)))))
        return total + tau - 2 * log_slab - 2 * np.exp(-log_slab)

    def log_rows(log_sd: float, residual: float) -> float:
        return log_sd - np.exp(2 * log_sd) / 8 - count * log_sd - residual / 2 * np.exp(-2 * log_sd)

    for k in range(samples + samples // 10):
        # coefficients
        joint = log_joint(log_tau, log_slab)
        share = np.exp(joint - joint.max(axis=0))
        below = np.cumsum(share, axis=0)
        chosen = (below < below[-1] * rng.random(columns)).sum(axis=0)
        # a grid point stands for its cell
        at = grid[chosen, 0] + 0.1 * (rng.random(columns) - 0.5)
        variance = 1 / (np.exp(-2 * (log_tau + at)) + np.exp(-log_slab))
        precision = products * np.exp(-2 * log_sd)
        precision[np.diag_indices(columns)] += 1 / variance
        factor = cho_factor(precision, lower=True, overwrite_a=True, check_finite=False)
        mean = cho_solve(factor, with_y * np.exp(-2 * log_sd), check_finite=False)
        new_w = mean + solve_triangular(
            factor[0], rng.standard_normal(columns), lower=True, trans=1, check_finite=False
        )
        new_left = 0.0 if is_linear else missing(new_w)
        if np.log(rng.random()) < new_left - left:
            w, left, accepted = new_w, new_left, accepted + 1
        # tau and slab
        now = log_scales(log_tau, log_slab)
        for size in (0.3, 1.0, 0.1):
            new = log_tau + size * rng.normal(), log_slab + size * rng.normal()
            then = log_scales(*new)
            if np.log(rng.random()) < then - now:
                (log_tau, log_slab), now = new, then
        # standard deviation of the rows
        residual = squares + (w - mode) @ products @ (w - mode)
        for _ in range(3 if is_linear else 0):
            new_sd = log_sd + 2 * rng.normal() / (2 * count) ** 0.5
            if np.log(rng.random()) < log_rows(new_sd, residual) - log_rows(log_sd, residual):
                log_sd = new_sd
        if k >= samples // 10:
            kept["w"].append(w)
            for site, value in (("tau", log_tau), ("slab", log_slab), ("sd", log_sd)):
                kept[site].append(np.exp(value))
    print(f"Gibbs: {accepted / 1.1 / samples:.2f} of the proposals accepted", flush=True)
    return {site: np.asarray(x)[None] for site, x in kept.items()}


def ours(rows: Rows, name: str) -> tuple[dict[str, np.ndarray], float, list[str]]:
    """Draws by chain, seconds, and warnings."""
    batch = CASES[name][2]
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = CCAdL(lambda rows: model(rows, name, batch), progress_bar=False)
        options = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
        mcmc = MCMC(kernel, num_warmup=500, num_samples=1_000, **options)
        mcmc.run(random.key(1), rows)
        draws = {k: np.asarray(v, float) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    print(kernel.tuning, flush=True)
    return draws, time.perf_counter() - start, [str(w.message) for w in caught]


def compared(name: str) -> tuple[list[object], dict, dict, np.ndarray]:
    """The line of a table, draws of both, and the coefficients."""
    rows, w = simulated(name)
    found, seconds, caught = ours(rows, name)
    for text in caught:
        print(text, flush=True)
    theirs, reference = nuts(rows, name, SAMPLES[name])
    right = theirs if name == "linear" else gibbs(rows, name, 10_000)
    off, ratios, sizes = [], [], []
    for site in ("w", "tau", "slab"):
        both = [x[site] if site == "w" else np.log(x[site])[..., None] for x in (found, right)]
        means, sds, ess = zip(*map(moments, both), strict=True)
        error = np.hypot(sds[0] / ess[0] ** 0.5, sds[1] / ess[1] ** 0.5)
        off.append((means[0] - means[1]) / error)
        ratios.append(sds[0] / sds[1])
        sizes.append([x.min() for x in ess])
    (one, of_one), (other, of_other) = variance_of(found["w"]), variance_of(right["w"])
    errors = np.abs(one - other) / np.hypot(of_one * one, of_other * other)
    print(f"variances: {np.sqrt(np.mean(errors**2)):.1f}, {errors.max():.1f} se (rms, largest)")
    included = [(np.abs(x["w"]) > INCLUDED).mean((0, 1)) for x in (found, right)]
    least = np.min(sizes, axis=0)
    if theirs is not right:
        least[1] = min(
            moments(theirs["w"])[2].min(), *map(size_of, (theirs["tau"], theirs["slab"]))
        )
    speed = (least[0] / seconds) / (least[1] / reference)
    line = [
        name,
        f"{len(rows.y):,} x {len(w):,}",
        f"{np.sqrt(np.mean(off[0] ** 2)):.2f}, {np.abs(off[0]).max():.1f}",
        f"{off[1][0]:.1f}, {off[2][0]:.1f}",
        f"{ratios[0].min():.2f} to {ratios[0].max():.2f}",
        f"{ratios[1][0]:.2f}, {ratios[2][0]:.2f}",
        f"{np.abs(included[0] - included[1]).max():.3f}",
        f"{least[0]:,.0f} in {seconds:,.0f} s",
        f"{least[1]:,.0f} in {reference:,.0f} s",
        f"{speed:.1f}",
        str(len(caught)),
    ]
    return line, found, right, w


def moments(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means, standard deviations, and effective sample sizes, shape (values,) each."""
    variance, _ = variance_of(draws)
    return draws.mean((0, 1)), np.sqrt(variance), np.atleast_1d(effective_sample_size(draws))


def size_of(draws: np.ndarray) -> float:
    return float(effective_sample_size(np.log(draws)))


def draw(draws: np.ndarray, w: np.ndarray, file: str) -> None:
    """True coefficients, posterior means and 90 % intervals."""
    import matplotlib.pyplot as plt

    low, high = np.quantile(draws, [0.05, 0.95], axis=0)
    columns = np.arange(len(w))
    figure, ax = plt.subplots(figsize=(9, 3.2), layout="constrained")
    ax.vlines(columns, low, high, color="tab:blue", linewidth=1.5, label="90 % interval")
    ax.plot(columns, draws.mean(0), ".", color="tab:blue", markersize=3, label="mean")
    here = np.flatnonzero(w)
    ax.plot(here, w[here], "kx", markersize=5, label="true value, if not zero")
    ax.set(xlabel="column", ylabel="coefficient")
    ax.set_yscale("symlog", linthresh=0.02)
    figure.legend(frameon=False, ncols=3, loc="outside upper center")
    figure.savefig(file, dpi=70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--picture", help="where the picture of the first case is to be")
    options = parser.parse_args()
    lines = []
    for name in options.names:
        line, found, _, w = compared(name)
        lines.append(line)
        if options.picture and len(lines) == 1:
            draw(found["w"].reshape(-1, len(w)), w, options.picture)
    heads = [
        "case", "rows x columns", "coefficients: means, se, rms and largest",
        "log tau, log slab: means, se", "ratios of sds", "of log tau, log slab",
        "largest difference of P(\\|w\\| > 0.1)", "least ESS", "least ESS of NUTS",
        "ESS a second, ours over NUTS", "warnings",
    ]  # fmt: skip
    print(table(heads, lines))


if __name__ == "__main__":
    main()
