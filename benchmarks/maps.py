# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Effects of areas like those of their neighbours (BYM2), by ``CCAdL(model)`` and NUTS on all rows.

    python benchmarks/maps.py [counts] [persons] [many] [--picture FILE]

``counts`` has a count and an exposure for each of 400 areas, and ``many`` for each of 3,000.
``persons`` has 100,000 persons in 400 areas, each with a covariate and a binary outcome.
"""

import argparse
import time
from typing import NamedTuple
import warnings

import jax
from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_median
from scipy.special import expit

from numpyro_sgmcmc import CCAdL
from numpyro_sgmcmc.diagnostics.comparison import variance_of

GLOBALS = ("intercept", "slope", "sd", "rho")


class Areas(NamedTuple):
    """
    The eigenvectors of a map.

    - **vectors** - shape (areas, areas).
    - **variances** - of their weights, such that an area has a variance of 1 in the geometric mean.
    """

    vectors: np.ndarray
    variances: np.ndarray


def areas_of(neighbours: np.ndarray, count: int) -> Areas:
    """
    The eigenvectors of a connected map.

    :param neighbours: pairs of neighbours, shape (pairs, 2).
    :param int count: the number of areas.
    """
    graph = np.zeros((count, count))
    graph[neighbours[:, 0], neighbours[:, 1]] = graph[neighbours[:, 1], neighbours[:, 0]] = -1
    np.fill_diagonal(graph, -graph.sum(axis=1))
    values, vectors = np.linalg.eigh(graph)
    assert values[1] > 1e-9, "the map has several parts"
    variances = np.append(0, 1 / values[1:])
    variances /= np.exp(np.log(vectors**2 @ variances).mean())
    return Areas(vectors.astype(np.float32), variances.astype(np.float32))


def lattice(rows: int, columns: int) -> np.ndarray:
    """Pairs of neighbours of a lattice."""
    area = np.arange(rows * columns).reshape(rows, columns)
    pairs = (area[1:], area[:-1]), (area[:, 1:], area[:, :-1])
    return np.concatenate([np.stack([x.ravel() for x in pair], axis=1) for pair in pairs])


def model(data, areas, batch=None):
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    rho = numpyro.sample("rho", dist.Beta(0.5, 0.5))
    scales = sd * jnp.sqrt(1 - rho + rho * areas.variances)
    with numpyro.plate("weights", len(scales)):
        weight = scales * numpyro.sample("weight", dist.Normal(0, 1))
    effect = numpyro.deterministic("effect", areas.vectors @ weight)
    with numpyro.plate("rows", len(data["y"]), subsample_size=batch) as i:
        linear = intercept + slope * data["x"][i] + effect[data["area"][i]]
        if "exposure" in data:
            law = dist.Poisson(data["exposure"][i] * jnp.exp(linear))
        else:
            law = dist.Bernoulli(logits=linear)
        numpyro.sample("y", law, obs=data["y"][i])


def simulated(areas: Areas, persons: int | None, seed: int = 0) -> tuple[dict, np.ndarray]:
    """Data, and the effects of areas."""
    rng = np.random.default_rng(seed)
    count = len(areas.variances)
    effect = areas.vectors @ (0.5 * np.sqrt(0.3 + 0.7 * areas.variances) * rng.normal(size=count))
    area = np.arange(count) if persons is None else rng.integers(count, size=persons)
    x = rng.normal(size=len(area))
    data = {"area": area, "x": x.astype(np.float32)}
    linear = 0.3 * x + effect[area]
    if persons is None:
        exposure = np.exp(rng.normal(2, 1, size=count))
        data |= {"exposure": exposure, "y": rng.poisson(exposure * np.exp(linear - 0.2))}
    else:
        data["y"] = rng.random(persons) < expit(linear - 1)
    floats = {k: np.asarray(v, np.float32) for k, v in data.items() if k != "area"}
    return jax.tree.map(jnp.asarray, data | floats), effect


#: Rows and columns of the lattice, persons, and rows of a minibatch.
CASES = {
    "counts": ((20, 20), None, None),
    "persons": ((20, 20), 100_000, 500),
    "many": ((50, 60), None, None),
}


def run(kernel, data, areas, samples: int) -> tuple[dict[str, np.ndarray], float]:
    """Draws by chain, and seconds."""
    start = time.perf_counter()
    options = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=500, num_samples=samples, **options)
    mcmc.run(random.key(1), data, areas)
    found = mcmc.get_samples(group_by_chain=True)
    draws = {k: np.asarray(found[k], float) for k in (*GLOBALS, "effect")}
    return draws, time.perf_counter() - start


def compared(name: str) -> tuple[list[str], np.ndarray, dict, np.ndarray]:
    """The line of a table; mean effects, data and true effects."""
    shape, persons, batch = CASES[name]
    areas = areas_of(lattice(*shape), shape[0] * shape[1])
    data, effect = simulated(areas, persons)

    def bound(data, areas):
        return model(data, areas, batch or len(data["y"]))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = CCAdL(bound, progress_bar=False)
        ours, seconds = run(kernel, data, areas, 1_000)
    # from far out the rates of counts overflow, where chains of NUTS stay
    nuts = NUTS(model, target_accept_prob=0.9, init_strategy=init_to_median)
    theirs, reference = run(nuts, data, areas, 1_000)
    off, shifts, ratios, sizes = [], [], [], []
    for site in (*GLOBALS, "effect"):
        moments = []
        for draws in (ours[site], theirs[site]):
            flat = draws.reshape(*draws.shape[:2], -1)
            variance, _ = variance_of(flat)
            size = np.atleast_1d(effective_sample_size(flat))
            moments.append((flat.mean((0, 1)), np.sqrt(variance), size))
        (mean, sd, size), (other, other_sd, other_size) = moments
        off.append((mean - other) / np.hypot(sd / size**0.5, other_sd / other_size**0.5))
        shifts.append((mean - other) / other_sd)
        ratios.append(sd / other_sd)
        sizes.append((size.min(), other_size.min()))
    of_globals, shift = (np.abs(np.concatenate(x[:-1])).max() for x in (off, shifts))
    least = np.min(sizes, axis=0)
    line = [
        name,
        f"{len(areas.variances):,}",
        f"{len(data['y']):,}",
        f"{of_globals:.1f}, {shift:.2f}",
        f"{np.min(ratios[:-1]):.2f} to {np.max(ratios[:-1]):.2f}",
        f"{np.sqrt(np.mean(off[-1] ** 2)):.2f}, {np.abs(off[-1]).max():.1f}",
        f"{np.mean(ratios[-1]):.3f}",
        f"{least[0]:,.0f} in {seconds:.0f} s",
        f"{least[1]:,.0f} in {reference:.0f} s",
        str(len(caught)),
    ]
    return line, ours["effect"].mean((0, 1)), data, effect


def draw(shape: tuple[int, int], mean: np.ndarray, data: dict, effect: np.ndarray, file: str):
    """The raw rates of a map, the posterior means of effects, and the truth."""
    import matplotlib.pyplot as plt

    y, area = np.asarray(data["y"]), np.asarray(data["area"])
    exposure = np.asarray(data.get("exposure", np.ones_like(y)))
    rate = np.bincount(area, y) / np.bincount(area, exposure)
    raw = np.log(np.maximum(rate, 0.05)) - np.log(y.sum() / exposure.sum())
    titles = "log of observed / expected", "posterior mean", "true effect"
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
    for ax, values, title in zip(axes, (raw, mean, effect), titles, strict=True):
        image = ax.imshow(values.reshape(shape), vmin=-1.5, vmax=1.5, cmap="RdBu_r")
        ax.set(title=title, xticks=[], yticks=[])
    figure.colorbar(image, ax=axes, shrink=0.8)
    figure.savefig(file, dpi=70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("names", nargs="*", default=["counts", "persons"])
    parser.add_argument("--picture", help="where the map of the first case is to be")
    options = parser.parse_args()
    lines = []
    for name in options.names:
        line, *found = compared(name)
        lines.append(line)
        if options.picture and len(lines) == 1:
            draw(CASES[name][0], *found, options.picture)
    heads = [
        "case", "areas", "rows", "globals: means, se and sd", "ratios of sds",
        "effects: means, se, rms and largest", "mean ratio of sds", "least ESS",
        "least ESS of NUTS", "warnings",
    ]  # fmt: skip
    print(table(heads, lines))


if __name__ == "__main__":
    main()
