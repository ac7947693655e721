# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
What an expert would name first for a logistic regression, and where it is better: seconds to 1,000
and 10,000 effective samples of the worst parameter, everything included, and the worst errors.

    python benchmarks/alternatives.py [--cases 10000x20 rare ...] [--seconds 40]

``CCAdL(model)`` with nothing set; NUTS on all rows; a Laplace approximation by Newton's method and
BlackJAX's Pathfinder of four paths, both with importance sampling smoothed by PSIS; on all rows too
BlackJAX's ChEES with 16 chains, MCLMC (unadjusted) and adjusted MCLMC, each with its own tuning,
and nutpie. What is not installed, has not ended after three minutes, or wants more memory than
there is, has no figures. ``rare`` is a skewed posterior: 1,000 rows, five positives.

In brackets, where chance does not explain it, the worst error of a mean, in standard deviations, or
of a standard deviation, a part of it; the right ones are those of 10,000 draws around the mode with
weights, and for the skewed posterior of 40,000 draws of NUTS. Each method draws for about
``--seconds``; the time to K effective samples is that of compilation, tuning and warm-up, plus K
divided by the rate. The effective size of weighted draws is :math:`1 / \\sum w^2`.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import TimeoutError, get_context
import sys
import time
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from measure import table
import numpy as np
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import NUTS
from speed import data, logistic, timed

from numpyro_sgmcmc import CCAdL, full_data

CASES = ("rare", "10000x20", "100000x20", "1000000x20", "10000x100", "100000x100", "1000000x100")
#: Of 500 draws, for the right moments.
_BLOCKS = 20
#: Seconds after which a method is given up.
_LONGEST = 180.0


class Run(NamedTuple):
    """Seconds before the first draw and for all draws; the draws, and weights if they have any."""

    before: float
    drawing: float
    draws: np.ndarray
    weights: np.ndarray | None = None

    def size(self) -> float:
        if self.weights is not None:
            return float(1 / np.sum(self.weights**2))
        return float(np.min(effective_sample_size(self.draws)))

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        flat = self.draws.reshape(-1, self.draws.shape[-1])
        mean = np.average(flat, axis=0, weights=self.weights)
        return mean, np.sqrt(np.average((flat - mean) ** 2, axis=0, weights=self.weights))


def rare() -> tuple[Array, Array]:
    """A skewed posterior: 1,000 rows on 20 covariates, of which five are positive."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1_000, 20), np.float32)
    x[:, 0] = 1
    logits = x[:, 1] + 0.5 * x[:, 2] + rng.gumbel(size=1_000)
    y = np.zeros(1_000, np.float32)
    y[np.argsort(logits)[-5:]] = 1
    return jnp.asarray(x), jnp.asarray(y)


def log_density(x: Array, y: Array, w: Array) -> Array:
    logits = x @ w
    return jnp.sum(y * logits - jax.nn.softplus(logits)) - w @ w / 2


def elapsed(start: float) -> float:
    return time.perf_counter() - start


def smoothed(log_ratios: np.ndarray) -> np.ndarray:
    """Weights by PSIS, which add up to 1."""
    from arviz import psislw

    weights = np.exp(np.asarray(psislw(log_ratios)[0], np.float64))
    return weights / weights.sum()


def affordable(y: Array) -> int:
    """Draws of the samplers that are told a number of them."""
    return 1_000 if len(y) < 50_000 else 300 if len(y) < 500_000 else 100


def ours(x: Array, y: Array, seconds: float) -> Run:
    kernel = partial(CCAdL, logistic, progress_bar=False)
    total, drawing, w = timed(kernel, (x, y), 200, 2_000, chains=4)
    return Run(total - drawing, drawing, w)


def nuts(x: Array, y: Array, seconds: float) -> Run:
    total, drawing, w = timed(lambda: NUTS(full_data(logistic)), (x, y), 300, affordable(y))
    return Run(total - drawing, drawing, w)


def mode(x: Array, y: Array) -> tuple[np.ndarray, np.ndarray]:
    """Where the density is highest, by Newton's method, and a root of its covariance there."""
    w = np.zeros(x.shape[1])
    step = jax.jit(
        lambda x, y, w: [f(partial(log_density, x, y))(w) for f in (jax.grad, jax.hessian)]
    )
    for _ in range(20):
        slope, hessian = (np.asarray(z, np.float64) for z in step(x, y, jnp.asarray(w)))
        move = np.linalg.solve(-hessian, slope)
        w = w + move / max(1.0, np.abs(move).max())
    return w, np.linalg.cholesky(np.linalg.inv(-hessian))


def laplace(x: Array, y: Array, seconds: float) -> Run:
    start = time.perf_counter()
    center, root = (jnp.asarray(z, jnp.float32) for z in mode(x, y))
    normal = dist.MultivariateNormal(center, scale_tril=root)

    @jax.jit
    def drawn(x, y, key):
        w = normal.sample(key, (100,))
        return w, lax.map(partial(log_density, x, y), w) - normal.log_prob(w)

    jax.block_until_ready(drawn(x, y, random.key(1)))
    before, start, found = elapsed(start), time.perf_counter(), []
    while elapsed(start) < seconds / 2 and len(found) < 100:
        found.append(jax.tree.map(np.asarray, drawn(x, y, random.key(2 + len(found)))))
    draws, ratios = (np.concatenate(parts).astype(np.float64) for parts in zip(*found, strict=True))
    weights = smoothed(ratios)
    return Run(before, elapsed(start), draws, weights)


def pathfinder(x: Array, y: Array, seconds: float) -> Run:
    from blackjax.vi.multipathfinder import multi_approximate

    starts = random.normal(random.key(0), (4, x.shape[1]))

    @partial(jax.jit, static_argnums=3)
    def run(x, y, key, count):
        state, _ = multi_approximate(key, partial(log_density, x, y), starts, count, maxiter=100)
        return state.samples, state.logp - state.logq

    # of few draws, to know what more of them cost
    few, many = 50, 500 if len(y) < 500_000 else 100
    begin, found = time.perf_counter(), {}
    for count in (few, many):
        jax.block_until_ready(run(x, y, random.key(1), count))
        start = time.perf_counter()
        found[count] = jax.block_until_ready(run(x, y, random.key(1), count))
        found[count] = (elapsed(start), found[count])
        if count == few:
            before = elapsed(begin) - found[few][0]
    samples, ratios = found[many][1]
    each = max((found[many][0] - found[few][0]) / (many - few) / 4, 1e-7)
    draws = np.asarray(samples, np.float64).reshape(-1, x.shape[1])
    weights = smoothed(np.asarray(ratios, np.float64).ravel())
    return Run(before, each * len(draws), draws, weights)


def in_time(
    step: Callable, state: object, args: tuple, start: float, seconds: float, block: int
) -> Run:
    """
    Blocks of steps until the time is up.

    :param step: from data, state and key to the state and a position for each chain.
    :param start: when the method began, whose tuning has given the state.
    """
    jax.block_until_ready(state)
    tuned = elapsed(start)

    @jax.jit
    def several(args, state, key):
        return lax.scan(lambda state, key: step(*args, state, key), state, random.split(key, block))

    start = time.perf_counter()
    jax.block_until_ready(several(args, state, random.key(8)))
    compiling, start, found = elapsed(start), time.perf_counter(), []
    while not found or elapsed(start) < seconds:
        state, positions = several(args, state, random.key(9 + len(found)))
        found.append(np.asarray(positions, np.float64))
    drawing = elapsed(start)
    draws = np.concatenate(found)
    draws = draws[:, None] if draws.ndim == 2 else draws
    # what the first call took beyond its steps
    compiling -= drawing / len(found)
    return Run(tuned + compiling, drawing, np.swapaxes(draws, 0, 1))


def chees(x: Array, y: Array, seconds: float) -> Run:
    import blackjax
    import optax

    start, chains = time.perf_counter(), 16
    positions = 0.1 * random.normal(random.key(0), (chains, x.shape[1]))
    density = partial(log_density, x, y)
    warmup = blackjax.chees_adaptation(density, chains, mass_matrix_estimation="diagonal")
    (state, found), _ = warmup.run(random.key(1), positions, 0.1, optax.adam(0.02), 400)
    build = blackjax.mcmc.dynamic_hmc.build_kernel
    kernel = build(
        **{name: found.pop(name) for name in ("next_random_arg_fn", "integration_steps_fn")}
    )

    def step(x, y, state, key):
        one = partial(kernel, logdensity_fn=partial(log_density, x, y), **found)
        state, _ = jax.vmap(one)(random.split(key, chains), state)
        return state, state.position

    return in_time(step, state, (x, y), start, seconds, 20)


def mclmc(x: Array, y: Array, seconds: float, adjusted: bool = False) -> Run:
    import blackjax

    start = time.perf_counter()
    density = partial(log_density, x, y)
    steps = 5_000 if len(y) < 500_000 else 1_000
    origin = jnp.zeros(x.shape[1])
    if adjusted:
        kernel = blackjax.mcmc.adjusted_mclmc_dynamic.build_kernel(
            integration_steps_fn=lambda key, mean: jnp.ceil(
                random.uniform(key) * (2 * mean - 1)
            ).astype(int)
        )
        state = blackjax.mcmc.adjusted_mclmc_dynamic.init(origin, density, random.key(0))
        state, found, _ = blackjax.adjusted_mclmc_find_L_and_step_size(
            kernel, density, steps, state, random.key(1), target=0.65
        )

        def step(x, y, state, key):
            state, _ = kernel(
                key, state, partial(log_density, x, y), found.step_size,
                inverse_mass_matrix=found.inverse_mass_matrix,
                integration_steps_params=(found.L / found.step_size,),
            )  # fmt: skip
            return state, state.position

    else:
        kernel = blackjax.mcmc.mclmc.build_kernel()
        state = blackjax.mcmc.mclmc.init(origin, density, random.key(0))
        state, found, _ = blackjax.mclmc_find_L_and_step_size(
            kernel, steps, state, random.key(1), density
        )

        def step(x, y, state, key):
            state, _ = kernel(
                key, state, partial(log_density, x, y),
                found.inverse_mass_matrix, found.L, found.step_size,
            )  # fmt: skip
            return state, state.position

    return in_time(step, state, (x, y), start, seconds, 100)


def nutpie(x: Array, y: Array, seconds: float) -> Run:
    from nutpie import sample
    from nutpie.compiled_pyfunc import from_pyfunc

    size, start = x.shape[1], time.perf_counter()
    value_and_grad = jax.jit(jax.value_and_grad(log_density, argnums=2))

    def make_density():
        def density(w):
            value, gradient = value_and_grad(x, y, jnp.asarray(w, jnp.float32))
            return float(value), np.asarray(gradient, np.float64)

        return density

    def make_expanded(*seeds):
        return lambda w: {"w": np.asarray(w, np.float64)}

    model = from_pyfunc(
        size, make_density, make_expanded, [np.dtype("float64")], [(size,)], ["w"],
        make_initial_point_fn=lambda seed: np.zeros(size),
    )  # fmt: skip
    options = {"chains": 1, "cores": 1, "progress_bar": False, "seed": 0}
    found = sample(model, tune=300, draws=affordable(y), save_warmup=True, **options)
    total = elapsed(start)
    w = found.posterior["w"].values
    taken = [
        float(group["n_steps"].values.sum()) for group in (found.warmup_sample_stats,
                                                           found.sample_stats)
    ]  # fmt: skip
    drawing = total * taken[1] / sum(taken)
    return Run(total - drawing, drawing, np.asarray(w, np.float64))


METHODS = {
    "CCAdL(model)": ours,
    "NUTS": nuts,
    "nutpie": nutpie,
    "Laplace, PSIS": laplace,
    "Pathfinder, PSIS": pathfinder,
    "ChEES": chees,
    "MCLMC": mclmc,
    "adjusted MCLMC": partial(mclmc, adjusted=True),
}


def reference(
    x: Array, y: Array, is_skewed: bool, blocks: int = _BLOCKS
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation: importance sampling, or a long run of NUTS if it is skewed."""
    if is_skewed:
        draws = timed(lambda: NUTS(full_data(logistic)), (x, y), 1_000, 40_000)[2]
        return Run(0.0, 0.0, draws).moments()
    w, root = mode(x, y)
    center, root = (jnp.asarray(z, jnp.float32) for z in (w, root))
    at_center = x @ center

    @jax.jit
    def drawn(x, y, at_center, key):
        away = dist.MultivariateNormal(jnp.zeros_like(center), scale_tril=root)

        def ratio(moved):
            # differences of each row: the sum over all is rounded too much
            change = x @ moved
            rows = y * change - (jax.nn.softplus(at_center + change) - jax.nn.softplus(at_center))
            return jnp.sum(rows) - (2 * center + moved) @ moved / 2 - away.log_prob(moved)

        moved = away.sample(key, (500,))
        return moved, lax.map(ratio, moved)

    parts = [
        jax.tree.map(np.asarray, drawn(x, y, at_center, random.key(100 + k))) for k in range(blocks)
    ]
    moved, ratios = (np.concatenate(z).astype(np.float64) for z in zip(*parts, strict=True))
    run = Run(0.0, 0.0, moved, smoothed(ratios))
    assert run.size() > 250 * blocks
    mean, sd = run.moments()
    return mean + w, sd


class Result(NamedTuple):
    """Seconds to 1,000 and to 10,000 effective samples, and the errors of the draws."""

    run: Run
    times: tuple[float, float]
    mean: float
    ratios: tuple[float, float]

    @property
    def excess(self) -> float:
        """The worst error beyond what chance explains: of a mean in sd, or of a part of an sd."""
        # the reference has an error of its own
        chance = 4 * np.sqrt(1 / self.run.size() + 1 / (500 * _BLOCKS))
        away = max(1 - self.ratios[0], self.ratios[1] - 1)
        return max(self.mean - chance, away - chance / np.sqrt(2))

    def __str__(self) -> str:
        shown = " / ".join(f"{t:,.1f}" if t < 100 else f"{t:,.0f}" for t in self.times)
        worst = max(self.mean, 1 - self.ratios[0], self.ratios[1] - 1)
        return shown if self.excess < 0 else f"{shown} ({worst:.2f})"


def rows_of(case: str) -> tuple[Array, Array]:
    return rare() if case == "rare" else data(*map(int, case.split("x")))


def reference_of(case: str) -> tuple[np.ndarray, np.ndarray]:
    return reference(*rows_of(case), case == "rare")


def run_of(case: str, name: str, seconds: float) -> Run:
    warnings.filterwarnings("ignore")
    return METHODS[name](*jax.block_until_ready(rows_of(case)), seconds)


def apart(function: Callable) -> Any:
    """What a function gives in a process of its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function).get(_LONGEST)


def results_of(case: str, names: list[str], seconds: float) -> Iterator[tuple[str, Result | None]]:
    """Of each method that is installed, and that ends; each in a process of its own."""
    mean, sd = apart(partial(reference_of, case))
    for name in names:
        try:
            run = apart(partial(run_of, case, name, seconds))
        except (ImportError, TimeoutError, jax.errors.JaxRuntimeError):
            yield name, None
            continue
        rate, (found, spread) = run.size() / run.drawing, run.moments()
        ratios = spread / sd
        yield (
            name,
            Result(
                run,
                (run.before + 1_000 / rate, run.before + 10_000 / rate),
                float(np.max(np.abs(found - mean) / sd)),
                (float(ratios.min()), float(ratios.max())),
            ),
        )


def title(case: str) -> str:
    if case == "rare":
        return "1,000 rows, 5 positive, 20 parameters"
    rows, parameters = map(int, case.split("x"))
    return f"{rows:,} rows, {parameters} parameters"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    cells: dict[str, list[str]] = {name: [name] for name in options.methods}
    for case in options.cases:
        for name, result in results_of(case, options.methods, options.seconds):
            cells[name].append("none" if result is None else str(result))
            print(
                f"{title(case)}: {name}: {cells[name][-1]};"
                + ("" if result is None else
                   f" {result.run.before:.1f} s before the first draw, {result.run.size():,.0f}"
                   f" effective draws in {result.run.drawing:.1f} s, worst mean off by"
                   f" {result.mean:.3f} sd, sds {result.ratios[0]:.2f} to {result.ratios[1]:.2f}"),
                file=sys.stderr, flush=True,
            )  # fmt: skip
    print(table(["", *map(title, options.cases)], cells.values()))


if __name__ == "__main__":
    main()
