# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
What one step would move and compute on many devices: a calculation, checked on this machine.

    python benchmarks/scale.py [--only check clusters]

A step of a device that holds :math:`N / P` rows reads :math:`n / P` of them in random places,
passes about twenty times over vectors of the :math:`d` parameters, computes :math:`4 n d / P`
operations and takes part in one all-reduce of the gradient and the diagonal of its noise. ``check``
measures the rates of this machine and compares what they say of a step with the step; ``clusters``
puts in the rates of a data centre, which are assumed and not measured.
"""

import argparse
from functools import partial
import math
from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from measure import interleaved, table
import numpy as np
from workloads import logistic, logistic_data

from numpyro_sgmcmc import CCAdL

PARTS = ("check", "clusters")

#: Vectors of the length of the parameters that a step reads or writes: values, momentum, noise,
#: random numbers, gradient, metric, sums for the Stein matrix.
VECTORS = 20
#: Of these the ones that are kept, with the anchor of a control variate.
KEPT = 11
#: Rows of larger models are not as long as their parameters are many: images, text.
LONGEST_ROW = 1_000
#: Passes over all data of a tuning, and steps for an effective sample with a control variate.
TUNING_PASSES, STEPS_FOR_ONE = 3, 8


class Rates(NamedTuple):
    """
    - **memory** - bytes a second that a device streams.
    - **rows** - bytes a second of rows in random places.
    - **operations** - floating point operations a second.
    - **step** - seconds of a step besides, for drawing the rows and calling the parts of a program.
    - **latency** - seconds of an all-reduce of nothing between two.
    - **network** - bytes a second between two devices.
    - **disk** - bytes a second from disk, for a device.
    """

    memory: float
    rows: float
    operations: float
    step: float
    latency: float
    network: float
    disk: float


#: A device of a data centre, as its makers describe them: 3 TB/s of memory, of which half is
#: reached by rows, 60 Tflop/s in single precision, of which a half; 8 devices share a network of
#: 400 Gbit/s; 10 microseconds for each of the stages of an all-reduce; 1 GB/s from disk.
ASSUMED = Rates(3e12, 1.5e12, 3e13, 50e-6, 10e-6, 6e9, 1e9)


def step(rates: Rates, d: int, n: int, devices: int) -> dict[str, float]:
    """Seconds of the parts of a step."""
    row, each, message = 4 * min(d, LONGEST_ROW), n / devices, 0.0
    if devices > 1:
        message = 2 * math.ceil(math.log2(devices)) * rates.latency
        message += 2 * (devices - 1) / devices * 2 * 4 * d / rates.network
    return {
        "rows": each * row / rates.rows + 4 * each * d / rates.operations,
        "vectors": VECTORS * 4 * d / rates.memory,
        "message": message,
        "calls": rates.step,
    }


def measured_rates() -> Rates:
    """The rates of this machine, of one device."""
    long = jnp.ones(50_000_000)
    table_of_rows = jnp.ones((1_000_000, 100))
    square = jnp.ones((500, 100))

    @jax.jit
    def gather(x, key):
        def body(i, total):
            rows = random.randint(random.fold_in(key, i), (500,), 0, len(x))
            return total + x[rows].sum(0)

        return lax.fori_loop(0, 200, body, jnp.zeros(x.shape[1]))

    @jax.jit
    def products(x):
        # as a minibatch of a linear model has them
        return lax.fori_loop(0, 1_000, lambda _, w: x.T @ (x @ w) * 1e-6, jnp.ones(x.shape[1]))

    seconds = interleaved(
        {
            "memory": lambda: jax.jit(lambda x: 2.0 * x)(long),
            "rows": lambda: gather(table_of_rows, random.key(0)),
            "operations": lambda: products(square),
            "step": small_step(),
        },
        9,
    )
    found = {name: float(np.median(x)) for name, x in seconds.items()}
    return Rates(
        2 * long.nbytes / found["memory"],
        200 * 500 * 400 / found["rows"],
        1_000 * 4 * square.size / found["operations"],
        found["step"] / 1_000,
        math.nan, math.nan, math.nan,
    )  # fmt: skip


def steps_of(size: int, d: int, n: int, count: int):
    data = logistic_data(size, d)
    kernel = CCAdL(
        partial(logistic, batch_size=n), step_size=1e-4, friction=10.0, noise="diagonal",
        steps_per_sample=count,
    )  # fmt: skip
    state = kernel.init(random.key(0), 0, None, data, {})
    program = jax.jit(lambda state, data: kernel.sample(state, data, {}))
    return lambda: program(state, data)


def small_step():
    """Of so few rows and parameters that only what is besides them counts."""
    return steps_of(1_000, 2, 10, 1_000)


def check() -> str:
    rates = measured_rates()
    lines = []
    for size, d, n, count in (
        (1_000_000, 100, 500, 400), (1_000_000, 100, 20_000, 20), (50_000, 2_000, 2_000, 20),
        (2_000, 100_000, 10, 50),
    ):  # fmt: skip
        seconds = interleaved({"step": steps_of(size, d, n, count)}, 5)["step"]
        measured = float(np.median(seconds)) / count
        parts = step(rates, d, n, 1)
        told = [f"{1e6 * parts[name]:,.0f}" for name in ("rows", "vectors", "calls")]
        total = sum(parts.values())
        lines.append(
            [f"{size:,}", f"{d:,}", f"{n:,}", *told, f"{1e6 * total:,.0f}",
             f"{1e6 * measured:,.0f}", f"{measured / total:.2f}"]
        )  # fmt: skip
    header = ["N", "d", "n", "rows, us", "vectors", "calls", "calculated", "measured", "ratio"]
    said = (
        f"Rates of this machine: memory {rates.memory / 1e9:.0f} GB/s, rows in random places"
        f" {rates.rows / 1e9:.1f} GB/s, {rates.operations / 1e9:.0f} Gflop/s,"
        f" {1e6 * rates.step:.1f} us a step besides."
    )
    return f"Measured. {said}\n\n{table(header, lines)}"


def clusters() -> str:
    lines = []
    for size, d, n, devices in (
        (10**9, 100, 10**4, 1), (10**9, 100, 10**4, 8), (10**9, 1_000, 10**5, 64),
        (10**10, 1_000, 10**5, 256), (10**12, 100, 10**6, 1_024), (10**12, 1_000, 10**6, 4_096),
        (10**9, 10**6, 10**4, 64), (10**9, 10**8, 10**4, 256), (10**9, 10**9, 10**4, 1_024),
    ):  # fmt: skip
        parts = step(ASSUMED, d, n, devices)
        total = sum(parts.values())
        row = 4 * min(d, LONGEST_ROW)
        whole = size / devices * row / ASSUMED.disk
        held = KEPT * 4 * d + size / devices * row
        worst = max(parts, key=lambda name: parts[name])
        lines.append(
            [f"{size:.0e}", f"{d:.0e}", f"{n:.0e}", f"{devices:,}", f"{held / 1e9:,.1f}",
             *[f"{1e3 * parts[name]:,.2f}" for name in ("rows", "vectors", "message")],
             f"{1e3 * total:,.2f}", worst, f"{TUNING_PASSES * whole / 3600:,.2f}",
             f"{3600 / (STEPS_FOR_ONE * total):,.0f}", f"{3600 / (size / n * total):,.2g}"]
        )  # fmt: skip
    header = [
        "N", "d", "n", "devices", "GB on each", "rows, ms", "vectors", "message", "a step", "most",
        "tuning, hours", "ESS an hour, control variate", "without",
    ]  # fmt: skip
    return f"Calculated, with assumed rates.\n\n{table(header, lines)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    for part in options.only:
        print({"check": check, "clusters": clusters}[part]())


if __name__ == "__main__":
    main()
