# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
What one step costs: each kernel against the same step written by hand in one ``lax.scan``,
on logistic regression, and its growth with the number of rows.

Everything is measured in one process, interleaved, as the median of several rounds; every
position is kept. Run with ``python benchmarks/step_cost.py``; writes a Markdown table.
"""

import argparse
from functools import partial
import platform
import time

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_sgmcmc import SGHMC, SGLD, SGNHT, CCAdL
from numpyro_sgmcmc.subsampling import without_replacement

STEP_SIZE, FRICTION = 1e-3, 10.0
MOMENTUM = {"step_size": STEP_SIZE, "friction": FRICTION}
#: A friction that covers the noise of the gradient.
STRONG = {"step_size": STEP_SIZE, "friction": 1_000.0}
BY_HAND = ("SGLD", "SGHMC", "SGNHT")


def model(x, y, batch_size):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def by_hand(method, steps, batch_size, key, w, x, y):
    """The methods as somebody would write them for this model, on bare arrays."""
    n, h, a = x.shape[0], STEP_SIZE, FRICTION

    def gradient(w, rows):
        def potential(w):
            logits = x[rows] @ w
            likelihood = jnp.sum(y[rows] * logits - jax.nn.softplus(logits))
            return 0.5 * w @ w - n / batch_size * likelihood

        return jax.grad(potential)(w)

    def step(carry, i):
        w, p, xi = carry
        rows_key, noise_key = random.split(random.fold_in(key, i))
        rows = without_replacement(rows_key, i, n, batch_size)
        noise = random.normal(noise_key, w.shape)
        if method == "SGLD":
            w = w - h * h * gradient(w, rows) + jnp.sqrt(2 * h * h) * noise
        elif method == "SGHMC":
            w = w + h * p
            p = p - h * gradient(w, rows) - h * a * p + jnp.sqrt(2 * h * a) * noise
        else:
            p = p - h * gradient(w, rows) - h * xi * p + jnp.sqrt(2 * h * a) * noise
            w = w + h * p
            xi = xi + h * (jnp.mean(p**2) - 1)
        return (w, p, xi), w

    start = (w, random.normal(key, w.shape), jnp.float32(a))
    return lax.scan(step, start, jnp.arange(steps))[1]


def data(rows, columns):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns), np.float32)
    y = (x[:, 0] + rng.standard_normal(rows, np.float32) > 0).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(y)


def medians(programs, rounds):
    """Median seconds of each program, all of them in turn in every round."""
    for run in programs.values():
        jax.block_until_ready(run())
    seconds = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(s)) for name, s in seconds.items()}


KERNELS = {
    "SGLD": partial(SGLD, step_size=STEP_SIZE**2),
    "SGHMC": partial(SGHMC, integrator="euler", **MOMENTUM),
    "SGNHT": partial(SGNHT, integrator="euler", **MOMENTUM),
    "SGHMC aboba": partial(SGHMC, **MOMENTUM),
    "SGNHT badodab": partial(SGNHT, **MOMENTUM),
    "CCAdL euler": partial(CCAdL, integrator="euler", covariance="diagonal", **MOMENTUM),
    "CCAdL euler full": partial(CCAdL, integrator="euler", covariance="full", **MOMENTUM),
    "CCAdL": partial(CCAdL, **MOMENTUM),
    "CCAdL diagonal": partial(CCAdL, covariance="diagonal", **MOMENTUM),
    "CCAdL low rank": partial(CCAdL, covariance="low_rank", **MOMENTUM),
    "CCAdL matrix free": partial(CCAdL, covariance="matrix_free", **MOMENTUM),
    "SGHMC estimated": partial(SGHMC, noise_variance="estimated", covariance="diagonal", **STRONG),
}


def kernel_program(name, x, y, batch_size, steps):
    bound = partial(model, batch_size=batch_size)
    kernel = KERNELS[name](bound)
    state = kernel.init(random.key(0), 0, None, model_args=(x, y), model_kwargs={})

    def steps_of(state, x, y):
        def step(state, _):
            state = kernel.sample(state, (x, y), {})
            return state, state.z["w"]

        return lax.scan(step, state, length=steps)[1]

    program = jax.jit(steps_of)
    return lambda: program(state, x, y)


def hand_program(method, x, y, batch_size, steps):
    program = jax.jit(partial(by_hand, method, steps, batch_size))
    w = jnp.zeros(x.shape[1])
    return lambda: program(random.key(0), w, x, y)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--largest", type=int, default=10_000_000, help="most rows")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, JAX {jax.__version__}, {jax.devices()[0]}\n")

    x, y = data(12_214, 100)
    programs = {}
    for name in KERNELS:
        programs[name] = kernel_program(name, x, y, 500, options.steps)
        if name in BY_HAND:
            programs[f"{name} by hand"] = hand_program(name, x, y, 500, options.steps)
    seconds = medians(programs, options.rounds)
    print("Logistic regression, N = 12,214, d = 100, n = 500\n")
    print("| kernel | us a step | against | us a step | ratio |\n| --- " + "| ---: " * 4 + "|")
    for name in KERNELS:
        own = seconds[name] / options.steps * 1e6
        against = f"{name} by hand" if f"{name} by hand" in seconds else "SGHMC"
        other = seconds[against] / options.steps * 1e6
        print(f"| {name} | {own:.1f} | {against} | {other:.1f} | {own / other:.2f} |")

    print("\nGrowth with the number of rows, SGHMC, d = 20, n = 500\n")
    sizes = [s for s in (10**4, 10**5, 10**6, 10**7) if s <= options.largest]
    programs = {s: kernel_program("SGHMC", *data(s, 20), 500, options.steps) for s in sizes}
    seconds = medians(programs, options.rounds)
    print("| N | us a step | ratio to 1e4 |\n| ---: | ---: | ---: |")
    for size in sizes:
        own = seconds[size] / options.steps * 1e6
        print(f"| {size:,} | {own:.1f} | {seconds[size] / seconds[sizes[0]]:.2f} |")


if __name__ == "__main__":
    main()
