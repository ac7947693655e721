# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Rows on disk: what a step costs, the same steps on the same rows in memory beside it, and how much
memory it takes.

    python benchmarks/disk.py [--rows 20000000] [--folder FOLDER]

Logistic regression with 100 covariates, 8 GB of them in a file that is written before and
removed after; minibatches of 500, in the loop of ``MCMC`` without a progress bar. Warm: the file
is in the page cache of the system. Cold: none of it is. Resident memory is that of a process of
its own.
"""

import argparse
from functools import partial
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time

import jax
from jax import random
import jax.numpy as jnp
from measure import interleaved, ratio, table
import numpy as np
from numpyro.infer import MCMC, init_to_value
from numpyro.util import fori_collect
from workloads import logistic

from numpyro_sgmcmc import SGHMC, CCAdL, RowsOnDisk
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.target import Target

COLUMNS, BATCH_SIZE, STEPS, ROUNDS = 100, 500, 1_000, 5
KERNELS = {
    "SGHMC": partial(SGHMC, step_size=1e-5, friction=1e3),
    "CCAdL": partial(CCAdL, step_size=1e-5, friction=1e3, noise="diagonal"),
}
SCHEMES = ("without_replacement", "blocks")


def write(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    chunk = 100_000
    found = np.lib.format.open_memmap(path, "w+", np.float32, (rows, COLUMNS))
    for first in range(0, rows, chunk):
        found[first : first + chunk] = rng.standard_normal((chunk, COLUMNS), np.float32)
    found.flush()


def outcomes(rows: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, 2, rows).astype(np.float32))


def warm(path: Path) -> None:
    """Into the page cache, as far as it goes."""
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(2**24)
        while file.readinto(buffer):
            pass


def cool(path: Path) -> None:
    """Out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


model = partial(logistic, batch_size=BATCH_SIZE)
zeros = init_to_value(values={"w": jnp.zeros(COLUMNS)})


def steps(make, scheme, data, count):
    """A program of steps that keeps every position."""
    kernel = make(model, subsampling=scheme, init_strategy=zeros)
    state = kernel.init(random.key(0), 0, None, model_args=data, model_kwargs={})

    def run(state, data):
        def step(states):
            return (kernel.sample(states[0], data, {}),)

        def kept(states):
            return states[0].z

        return fori_collect(0, count, step, (state,), transform=kept, progbar=False)

    compiled = jax.jit(run)
    return lambda: compiled(state, data)


def seconds_of(run) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def compare(path: Path, rows: int) -> None:
    y, on_disk = outcomes(rows), RowsOnDisk(path)
    in_memory = jnp.asarray(np.load(path))
    found, cold = {}, {}
    for name, make in KERNELS.items():
        programs = {
            (where, scheme): steps(make, scheme, (data, y), STEPS)
            for where, data in (("disk", on_disk), ("memory", in_memory))
            for scheme in SCHEMES
        }
        for run in programs.values():
            jax.block_until_ready(run())
        rounds = []
        for _ in range(ROUNDS):
            warm(path)  # each time, or the system may have found another use for the memory
            rounds.append({which: seconds_of(run) for which, run in programs.items()})
        found[name] = {which: np.array([x[which] for x in rounds]) for which in programs}
        for scheme in SCHEMES:
            few = steps(make, scheme, (on_disk, y), 200)
            few()
            cool(path)
            cold[name, scheme] = seconds_of(few) / 200
    lines = []
    for name, seconds in found.items():
        memory = seconds["memory", "without_replacement"]
        for scheme in SCHEMES:
            disk = seconds["disk", scheme]
            lines.append([
                f"{name}, {scheme}",
                f"{np.median(seconds['memory', scheme]) / STEPS * 1e6:.0f}",
                f"{np.median(disk) / STEPS * 1e6:.0f}",
                ratio(disk, seconds["memory", scheme]),
                ratio(disk, memory),
                f"{cold[name, scheme] * 1e6:,.0f}",
            ])  # fmt: skip
    header = [
        "kernel, rows drawn", "us a step, in memory", "on disk, warm", "ratio",
        "ratio to without_replacement in memory", "us a step, on disk, cold",
    ]  # fmt: skip
    print(table(header, lines))
    passes = {}
    for where, data in (("disk", (on_disk, y)), ("memory", (in_memory, y))):
        target = Target(read_model(model, zeros, data, {}), data, {})
        passes[where] = partial(target.compiled(Target.anchor), {"w": jnp.zeros(COLUMNS)})
    warm(path)
    seconds = interleaved(passes, 3)
    print(
        "The gradient of all data:"
        f" {np.median(seconds['memory']):.1f} s in memory, {np.median(seconds['disk']):.1f} s from"
        " disk.\n"
    )


def resident(path: Path, rows: int) -> None:
    """Samples in this process and says how much memory that took."""
    y = outcomes(rows)
    kernel = SGHMC(
        model, step_size=1e-5, friction=1e3, init_strategy=zeros, subsampling=SCHEMES[0]
    )  # fmt: skip
    mcmc = MCMC(kernel, num_warmup=500, num_samples=2_000, progress_bar=False)
    mcmc.run(random.key(0), RowsOnDisk(path), y)
    with open("/proc/self/status") as file:
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    print(f"{peak / 2**20:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--folder")
    parser.add_argument("--resident", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resident:
        return resident(options.resident, options.rows)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "x.npy"
        write(path, options.rows)
        here = [sys.executable, __file__, "--rows", str(options.rows), "--resident", str(path)]
        peak = subprocess.run(here, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        compare(path, options.rows)
        size = path.stat().st_size / 1e9
    print(f"Largest resident memory of a run on the {size:.1f} GB on disk: {peak} GiB.")


if __name__ == "__main__":
    main()
