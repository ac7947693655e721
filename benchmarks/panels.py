# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Panels of time series with a latent path each, by ``CCAdL(model)`` and NUTS on all paths.

    python benchmarks/panels.py [counts] [robust] [binary] [hidden] [many] [length]
    python benchmarks/panels.py bikes --data FOLDER [--picture FILE]

``counts`` has 500 series of 40 counts whose log rate is an autoregression. ``robust`` has 200
series with levels that move and rows with Student's t distribution, ``binary`` binary rows, and
``hidden`` two hidden states. ``bikes`` has hourly hires of bicycles, a series for each hour of the
week, and forecasts eight weeks. NUTS sums over hidden states by the forward recursion. ``many`` has
50,000 series of 100 counts with three covariates, without NUTS, several times. ``length`` has the
seconds of a gradient by the length and by the number of the series.
"""

import argparse
from functools import partial
from pathlib import Path
import sys
import time
from typing import Any, NamedTuple
import warnings

import jax
from jax import lax, random
from jax.nn import logsumexp
import jax.numpy as jnp
from measure import interleaved, table
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_median, init_to_uniform
from scipy.stats import ks_2samp

from numpyro_sgmcmc import CCAdL, full_data, local_draws
from numpyro_sgmcmc.diagnostics.comparison import variance_of
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.target import Target

#: Series, times, and series of a minibatch.
CASES = {
    "counts": (500, 40, 50),
    "robust": (200, 40, 50),
    "binary": (200, 40, 50),
    "hidden": (500, 40, 50),
    "bikes": (168, 105, 24),
}

#: Weeks that are forecast, and series in the picture, by hour of the week from Saturday on.
AHEAD, SHOWN = 8, {"Saturday, 14:00": 14, "Monday, 8:00": 56, "Wednesday, 3:00": 99}

#: Series, times and series of a minibatch, covariates, simulations, and series with known levels.
MANY, COLUMNS, REPEATS, SEEN = (50_000, 100, 100), 3, 3, 500

TRUTH = {"mu": 0.5, "tau": 0.3, "phi": 0.8, "scale": 0.5}
TRUTH_OF_MANY = {"mu": 0.5, "tau": 0.15, "slopes": np.array([0.3, -0.2, 0.1], np.float32)}


def path(name: str, phi, tau, times: int, is_site: bool):
    """
    An autoregression of order one, or a random walk for phi = 1.

    :param bool is_site: whether its values are a site, and not its innovations, by which NUTS has
        ten times as many effective samples.
    """
    if not is_site:
        z = numpyro.sample(f"{name}, innovations", dist.Normal().expand([times]).to_event(1))
        apart = jnp.arange(times)[:, None] - jnp.arange(times)
        return numpyro.deterministic(name, tau * z @ jnp.where(apart < 0, 0.0, phi**apart).T)
    if isinstance(phi, float):
        return numpyro.sample(name, dist.GaussianRandomWalk(tau, num_steps=times))
    x = numpyro.sample(name, dist.ImproperUniform(dist.constraints.real_vector, (), (times,)))
    before = jnp.concatenate([jnp.zeros_like(x[..., :1]), x[..., :-1]], axis=-1)
    numpyro.factor(f"{name}, steps", dist.Normal(phi * before, tau).log_prob(x).sum(-1))
    return x


def panel_of(rows, has_phi: bool = False, has_scale: bool = False):
    """A model of a panel, with the distribution of its rows."""

    def model(y, batch=None):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        phi = numpyro.sample("phi", dist.Uniform(0, 1)) if has_phi else 1.0
        scale = numpyro.sample("scale", dist.HalfNormal(1)) if has_scale else 1.0
        with numpyro.plate("series", len(y), subsample_size=batch) as i:
            x = mu + path("x", phi, tau, y.shape[1], batch is not None)
            numpyro.sample("y", rows(x, scale).to_event(1), obs=y[i])

    return model


def hidden(y, batch=None):
    """Counts with a rate for each of two states."""
    stay = numpyro.sample("stay", dist.Beta(4, 2).expand([2]).to_event(1))
    ordered = dist.transforms.OrderedTransform()
    first = dist.Normal(0, 2).expand([2]).to_event(1)
    log_rates = numpyro.sample("log_rates", dist.TransformedDistribution(first, ordered))
    moves = jnp.stack([jnp.stack([stay[0], 1 - stay[0]]), jnp.stack([1 - stay[1], stay[1]])])
    series = numpyro.plate("series", len(y), subsample_size=batch)
    if batch is None:
        rows = dist.Poisson(jnp.exp(log_rates)).log_prob(y[..., None])

        def forward(before, row):
            return logsumexp(before[..., None] + jnp.log(moves), axis=1) + row, None

        last, _ = lax.scan(forward, jnp.log(0.5) + rows[:, 0], rows.swapaxes(0, 1)[1:])
        with series:
            numpyro.factor("y", logsumexp(last, axis=1))
        return
    with series as i:
        rows = y[i].T

    def step(carry, row):
        state, is_first = carry
        with series:
            p = jnp.where(is_first, 0.5, moves[state])
            state = numpyro.sample("state", dist.Categorical(p))
            numpyro.sample("y", dist.Poisson(jnp.exp(log_rates)[state]), obs=row)
        return (state, False), None

    scan(step, (jnp.zeros(rows.shape[1], int), True), rows)


def bikes(y, x, seen, batch=None):
    """Hires by hour of the week: a level that moves from week to week, and weather."""
    mu = numpyro.sample("mu", dist.Normal(4, 2))
    spread = numpyro.sample("spread", dist.HalfNormal(2))
    tau = numpyro.sample("tau", dist.HalfNormal(0.5))
    concentration = numpyro.sample("concentration", dist.LogNormal(2, 1))
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    with numpyro.plate("series", len(y), subsample_size=batch) as i:
        start = numpyro.sample("start", dist.Normal(mu, spread))
        level = path("x", 1.0, tau, y.shape[1], batch is not None)
        log_rate = start[:, None] + level + x[i] @ slopes
        law = dist.NegativeBinomial2(jnp.exp(log_rate), concentration)
        numpyro.sample("y", law.mask(seen[i]).to_event(1), obs=y[i])


def hires(folder: str) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Counts by hour of the week and week, weather, and whether there is a count."""
    found = np.load(Path(folder) / "bikesharing.npz", allow_pickle=False)
    columns = dict(zip(found["columns"].tolist(), found["X"].T, strict=True))
    day = np.cumsum(np.diff(columns["weekday"], prepend=columns["weekday"][0]) != 0)
    series, week = (day % 7 * 24 + columns["hr"]).astype(int), day // 7
    weather = np.stack(
        [
            (columns["temp"] - 0.5) / 0.2,
            (columns["hum"] - 0.6) / 0.2,
            (columns["windspeed"] - 0.2) / 0.1,
            columns["weathersit"] >= 3,
            columns["holiday"],
        ],
        axis=-1,
    )
    shape = CASES["bikes"][:2]
    y, x, seen = np.zeros(shape), np.zeros((*shape, weather.shape[1])), np.zeros(shape, bool)
    y[series, week], x[series, week], seen[series, week] = found["count"], weather, True
    return jnp.asarray(y, jnp.float32), jnp.asarray(x, jnp.float32), seen


MODELS: dict[str, Any] = {
    "hidden": hidden,
    "bikes": bikes,
    "counts": panel_of(lambda x, _: dist.Poisson(jnp.exp(x)), has_phi=True),
    "robust": panel_of(lambda x, scale: dist.StudentT(4, x, scale), has_scale=True),
    "binary": panel_of(lambda x, _: dist.Bernoulli(logits=x)),
}


def simulated(name: str, seed: int = 0) -> jax.Array:
    series, times, _ = CASES[name]
    rng = np.random.default_rng(seed)
    if name == "hidden":
        states = [rng.random(series) < 0.5]
        for _ in range(times - 1):
            changes = rng.random(series) < np.where(states[-1], 0.3, 0.1)
            states.append(states[-1] ^ changes)
        y = rng.poisson(np.where(np.stack(states, axis=1), 3.0, 1.0))
        return jnp.asarray(y, jnp.float32)
    phi = TRUTH["phi"] if name == "counts" else 1.0
    x, levels = np.zeros(series), []
    for _ in range(times):
        x = phi * x + TRUTH["tau"] * rng.standard_normal(series)
        levels.append(x)
    x = TRUTH["mu"] + np.stack(levels, axis=1)
    if name == "counts":
        y = rng.poisson(np.exp(x))
    elif name == "robust":
        y = x + TRUTH["scale"] * rng.standard_t(4, size=x.shape)
    else:
        y = rng.random(x.shape) < 1 / (1 + np.exp(-x))
    return jnp.asarray(y, jnp.float32)


def run(
    kernel, args: tuple, chains: int, warmup: int = 500, samples: int = 1_000
) -> tuple[MCMC, float]:
    """A run, and its seconds."""
    start = time.perf_counter()
    options = {"num_chains": chains, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=samples, **options)
    mcmc.run(random.key(1), *args)
    jax.block_until_ready(mcmc.get_samples())
    return mcmc, time.perf_counter() - start


def moments(mcmc: MCMC, names: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means, standard deviations and effective sample sizes of sites, one after the other."""
    found = mcmc.get_samples(group_by_chain=True)
    parts = [np.asarray(found[k], float).reshape(*found[k].shape[:2], -1) for k in names]
    draws = np.concatenate(parts, axis=-1)
    return draws.mean((0, 1)), np.sqrt(variance_of(draws)[0]), effective_sample_size(draws)


class Ours(NamedTuple):
    """A run, its seconds, and the number of warnings."""

    mcmc: MCMC
    seconds: float
    warnings: int


def sampled(name: str, args: tuple) -> Ours:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = CCAdL(partial(MODELS[name], batch=CASES[name][2]), progress_bar=False)
        mcmc, seconds = run(kernel, args, chains=4)
    print(kernel.tuning, *(w.message for w in caught), sep="\n", file=sys.stderr)
    return Ours(mcmc, seconds, len(caught))


def compared(name: str, args: tuple, found: Ours) -> list[object]:
    """The line of a table."""
    (series, times, _), ours = CASES[name], found.mcmc
    nuts = NUTS(full_data(MODELS[name]), init_strategy=init_to_median)
    theirs, reference = run(nuts, args, chains=2)
    names = sorted(ours.get_samples())
    (mean, sd, size), (right, right_sd, right_size) = (moments(x, names) for x in (ours, theirs))
    off = (mean - right) / np.hypot(sd / size**0.5, right_sd / right_size**0.5)
    least = "-"
    if name != "hidden":
        least = f"{least_p(ours, theirs, series, times):.2g}"
    return [
        name,
        f"{series:,} x {times}",
        f"{np.abs(off).max():.1f}",
        f"{(sd / right_sd).min():.2f} to {(sd / right_sd).max():.2f}",
        least,
        f"{size.min():,.0f} in {found.seconds:.0f} s",
        f"{right_size.min():,.0f} in {reference:.0f} s",
        str(found.warnings),
    ]


def least_p(ours: MCMC, theirs: MCMC, series: int, times: int) -> float:
    """The least p-value of 100 laws of latent values, times 100."""
    chosen = np.random.default_rng(1).choice(series, 50, replace=False)
    paths = local_draws(ours, chosen, num_draws=250, rng_key=random.key(2))["x"]
    ends = np.asarray(theirs.get_samples()["x"]).reshape(-1, series, times)[:, chosen]
    tests = [
        ks_2samp(paths.values.reshape(1_000, 50, times)[:, j, t], ends[::4, j, t]).pvalue
        for j in range(50)
        for t in (times // 2, times - 1)
    ]
    return min(tests) * len(tests)


def forecasts(run: MCMC, x: jax.Array, y: jax.Array, is_hour: np.ndarray, picture: str) -> None:
    """Print the coverage of forecast intervals, and draw some series."""
    import matplotlib.pyplot as plt

    drawn = local_draws(run, num_draws=100, rng_key=random.key(3))
    taken = np.asarray(drawn.coords["draw"])
    samples = run.get_samples(group_by_chain=True)
    slopes, concentration = (np.asarray(samples[k])[:, taken] for k in ("slopes", "concentration"))
    log_rate = drawn["x"].values + drawn["start"].values[..., None]
    log_rate = log_rate + np.einsum("cdk,stk->cdst", slopes, np.asarray(x))
    law = dist.NegativeBinomial2(np.exp(log_rate), concentration[..., None, None])
    counts = np.asarray(law.sample(random.key(4)))
    low, high = np.quantile(counts, [0.05, 0.95], axis=(0, 1))
    inside = ((y >= low) & (y <= high))[:, -AHEAD:][is_hour[:, -AHEAD:]]
    print(
        f"{np.mean(inside):.3f} of {inside.size:,} later hires in their 90 % intervals",
        file=sys.stderr,
    )
    figure, axes = plt.subplots(1, len(SHOWN), figsize=(9, 2.6), layout="constrained")
    weeks = np.arange(y.shape[1])
    for ax, (title, k) in zip(axes, SHOWN.items(), strict=True):
        ax.fill_between(weeks, low[k], high[k], color="tab:blue", alpha=0.25, linewidth=0)
        ax.plot(weeks, np.exp(log_rate[:, :, k]).mean((0, 1)), color="tab:blue", linewidth=1)
        ax.plot(weeks[is_hour[k]], y[k][is_hour[k]], "k.", markersize=3)
        ax.axvline(len(weeks) - AHEAD - 0.5, color="tab:red", linewidth=1)
        ax.set(title=title, xlabel="week")
    axes[0].set_ylabel("hires in an hour")
    figure.savefig(picture, dpi=70)


def counts_with_covariates(y, x, batch):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([COLUMNS]).to_event(1))
    with numpyro.plate("series", len(y), subsample_size=batch) as i:
        level = mu + path("level", 1.0, tau, y.shape[1], True) + x[i] @ slopes
        numpyro.sample("y", dist.Poisson(jnp.exp(level)).to_event(1), obs=y[i])


def many_simulated(series: int, times: int, seed: int) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Counts, covariates and levels."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((series, times, COLUMNS), np.float32)
    walk = np.cumsum(TRUTH_OF_MANY["tau"] * rng.standard_normal((series, times)), axis=1)
    y = rng.poisson(np.exp(TRUTH_OF_MANY["mu"] + walk + x @ TRUTH_OF_MANY["slopes"]))
    return jnp.asarray(y, jnp.float32), jnp.asarray(x), walk


def many(seed: int) -> list[object]:
    """The line of a table."""
    series, times, batch = MANY
    *data, levels = many_simulated(series, times, seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = CCAdL(lambda y, x: counts_with_covariates(y, x, batch), progress_bar=False)
        mcmc, seconds = run(kernel, tuple(data), chains=2, warmup=200, samples=400)
    print(kernel.tuning, *(w.message for w in caught), sep="\n", file=sys.stderr)
    names = list(TRUTH_OF_MANY)
    mean, sd, size = moments(mcmc, names)
    truth = np.concatenate([np.ravel(TRUTH_OF_MANY[k]) for k in names])
    away = (mean - truth) / sd
    drawn = local_draws(mcmc, SEEN, num_draws=200, rng_key=random.key(2))["level"]
    low, high = np.quantile(drawn.values, [0.025, 0.975], axis=(0, 1))
    right = levels[drawn.coords["series"].values]
    return [
        seed,
        f"{size.min():,.0f}",
        f"{seconds:.0f}",
        ", ".join(f"{x:.1f}" for x in away),
        f"{np.mean((low <= right) & (right <= high)):.3f}",
        str(len(caught)),
    ]


def gradient_of(series: int, times: int, batch: int):
    """A function without arguments, of the gradient of a minibatch."""
    y, x, _ = many_simulated(series, times, 0)

    def model(y, x):
        return counts_with_covariates(y, x, batch)

    target = Target(read_model(model, init_to_uniform, (y, x), {}), (y, x), {})
    rows = target.rows(random.key(0))
    point = target.unravel(jnp.array([0.5, 0.3, -0.2, 0.1, np.log(0.15)]))

    def slope(target, point, rows):
        potential = target.potential(IdentityMetric())
        return jax.grad(lambda x: potential(x, rows, random.key(0)))(point)

    program = target.compiled(slope, "gradient")
    return lambda: program(point, rows)


def lengths() -> list[list[object]]:
    cases = [(500, n, 100) for n in (25, 50, 100, 200)]
    cases += [(n, 100, 100) for n in (5_000, 50_000)]
    programs = {str(case): gradient_of(*case) for case in cases}
    seconds = {k: float(np.median(v)) for k, v in interleaved(programs, 20).items()}
    lines = []
    for case in cases:
        own = seconds[str(case)]
        ratio = own / seconds[str((500, 100, 100))]
        lines.append([f"{case[0]:,}", case[1], f"{1e3 * own:.1f}", f"{ratio:.2f}"])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("names", nargs="*", default=["counts", "length"])
    parser.add_argument("--data", help="folder of the real data, for bikes")
    parser.add_argument("--picture", default="panels.png", help="where the picture is to be")
    options = parser.parse_args()
    names = options.names
    lines = []
    for name in (name for name in names if name in CASES):
        if name == "bikes":
            y, x, is_hour = hires(options.data)
            args: tuple = y, x, jnp.asarray(is_hour).at[:, -AHEAD:].set(False)
        else:
            args = (simulated(name),)
        found = sampled(name, args)
        if name == "bikes":
            forecasts(found.mcmc, x, y, is_hour, options.picture)
        lines.append(compared(name, args, found))
        print(*lines[-1], file=sys.stderr)
    if lines:
        heads = [
            "case", "series x times", "means of all sites, largest se", "ratios of sds",
            "latent values, 100 x least p", "least ESS", "least ESS of NUTS", "warnings",
        ]  # fmt: skip
        print(table(heads, lines))
    if "many" in names:
        lines = []
        for seed in range(REPEATS):
            lines.append(many(seed))
            print(*lines[-1], file=sys.stderr)
        heads = [
            "seed", "least ESS", "seconds", "means less truth, in sds",
            "levels in their 95 % intervals", "warnings",
        ]  # fmt: skip
        print(table(heads, lines))
    if "length" in names:
        print(table(["series", "times", "ms of a gradient", "ratio"], lengths()))


if __name__ == "__main__":
    main()
