# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Long runs: what a sample costs besides its steps, memory and speed of runs to disk, and runs that
are killed.

    python benchmarks/long_runs.py [--only overhead disk kills] [--folder FOLDER]

Each run to disk has a process of its own, with its resident memory noted every 0.2 seconds. The
killed run is that of ``tests/support/long_run.py``, a checkpoint after every chunk: ten times it is
killed at a random moment after the first new draws, and ten times in the middle of a file, with
half of it written. The folder, by default one for temporary files, must have room for 5 GB, which
are removed.
"""

import argparse
from functools import partial
import json
import os
from pathlib import Path
import random as python_random
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import jax
from jax import random
from measure import ratio, table
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from running import resident, sghmc
from step_cost import bound
from workloads import workloads

from numpyro_sgmcmc import SGHMC, LongRun
from numpyro_sgmcmc.long_runs.store import Store

PARTS = ("overhead", "disk", "kills")

CHILD = Path(__file__).parent.parent / "tests" / "support" / "long_run.py"


def normal(y):
    """The mean of a normal distribution."""
    mu = numpyro.sample("mu", dist.Normal(0, 10).expand([y.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])


def sampler(steps_per_sample: int = 1) -> SGHMC:
    return SGHMC(normal, step_size=0.01, friction=50.0, steps_per_sample=steps_per_sample)


def rows(dimension: int) -> jax.Array:
    return random.normal(random.key(0), (20, dimension))


def overhead(rounds: int, folder: Path) -> str:
    """A sample of SGHMC, from runs of two lengths, so that compilation does not count."""
    found = []
    for workload in workloads()[:2]:
        kernel = sghmc(workload)(bound(workload))
        short, long = 10 * workload.steps, 80 * workload.steps

        def seconds(make, count, kernel=kernel, data=workload.data):
            mcmc = make(kernel, num_warmup=0, num_samples=count, progress_bar=False)
            start = time.perf_counter()
            mcmc.run(random.key(0), *data)
            return time.perf_counter() - start

        to_disk = partial(LongRun, store=folder / "run.zarr", resume=False)
        # as in a `LongRun`, data are arguments of the program and not constants in it
        plain = partial(MCMC, jit_model_args=True)
        ways = {"MCMC": plain, "LongRun": LongRun, "to disk": to_disk}
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, make in ways.items():
                taken[name].append(seconds(make, long) - seconds(make, short))
        alone = np.array(taken["MCMC"])
        each = [f"{np.median(x) / (long - short) * 1e6:.1f}" for x in taken.values()]
        ratios = [ratio(np.array(taken[name]), alone) for name in ways if name != "MCMC"]
        found.append([workload.name, *each, *ratios])
    header = ["", "us a sample: MCMC", "LongRun", "with a store", "LongRun / MCMC"]
    return table([*header, "with a store / MCMC"], found)


def disk(_: int, folder: Path) -> str:
    """Runs to disk, in processes of their own."""
    found = []
    for dimension, draws, block in ((100, 1_000_000, 10), (100_000, 10_000, 1_000)):
        done = subprocess.run(
            [sys.executable, __file__, "--part", "disk", str(dimension), str(draws), str(block)]
            + ["--folder", str(folder)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        said = json.loads(done.stdout.splitlines()[-1])
        found.append(
            [f"{draws:,}", f"{dimension:,}", f"{said['megabytes']:,.0f}", f"{said['seconds']:.0f}"]
            + [f"{said[name]:.0f}" for name in ("early", "late", "peak")]
            + [f"{said['ess_seconds']:.1f} ({block:,})"]
        )
    header = ["draws", "parameters", "MB on disk", "seconds", "resident MB at a tenth"]
    return table([*header, "at the end", "at most", "ESS of a block, seconds (size)"], found)


def to_disk(dimension: int, draws: int, block: int, folder: Path) -> dict:
    import arviz as az
    import xarray as xr

    store = folder / "run.zarr"
    mcmc = LongRun(
        sampler(), num_warmup=100, num_samples=draws, store=store, progress_bar=False
    )  # fmt: skip
    noted: list[tuple[int, float]] = []
    ended = threading.Event()

    def note() -> None:
        while not ended.wait(0.2):
            noted.append((mcmc._draws.count if mcmc._draws else 0, resident("VmRSS")))

    thread = threading.Thread(target=note)
    thread.start()
    start = time.perf_counter()
    mcmc.run(random.key(1), rows(dimension))
    seconds = time.perf_counter() - start
    ended.set()
    thread.join()
    drawing = [memory for count, memory in noted if count > 0.1 * draws]
    start = time.perf_counter()
    with xr.open_datatree(store, engine="zarr", chunks=None) as tree:
        assert dict(tree["posterior"].sizes) == {"chain": 1, "draw": draws, "mu_dim_0": dimension}
        part = tree["posterior"].to_dataset().isel(mu_dim_0=slice(block)).load()
    assert np.isfinite(az.ess(part)["mu"]).all()
    ess_seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    shutil.rmtree(store)
    return {
        "megabytes": size / 1e6,
        "seconds": seconds,
        "early": drawing[0],
        "late": drawing[-1],
        "peak": max(drawing),
        "ess_seconds": ess_seconds,
    }


def kills(_: int, folder: Path) -> str:
    """Twenty kills of one run, and what is lost by them."""
    environment = os.environ | {"LONG_RUN_CACHE": str(folder / "cache")}
    rng = python_random.Random(0)

    def child(store: str, *options: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(CHILD), str(folder / store), "400000", *options],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip

    def waits_for(process: subprocess.Popen, word: str) -> bool:
        return any(line.startswith(word) for line in process.stdout)

    def draws() -> int:
        return Store(folder / "killed.zarr").draws

    with child("whole.zarr") as process:
        assert waits_for(process, "done")
    files = ("checkpoint", "zarr.json", "0")  # of the checkpoint, of metadata, of draws
    counts, seen = {"random moments": 0, "checkpoint": 0, "zarr.json": 0, "0": 0}, [0]
    for k in range(20):
        where = files[k // 2 % 3] if k % 2 else None
        options = [f"hang={where}:{rng.randint(2, 30)}"] if where else []
        with child("killed.zarr", *options) as process:
            assert waits_for(process, "hangs" if where else "begins"), "the run has ended before"
            while not where and process.poll() is None and draws() == seen[-1]:
                time.sleep(0.01)
            time.sleep(0 if where else 0.5 * rng.random())
            assert process.poll() is None, "the run has ended before"
            process.kill()
        counts[where or "random moments"] += 1
        seen.append(draws())
    with child("killed.zarr") as process:
        assert waits_for(process, "done")
    one, other = (Store(folder / name) for name in ("whole.zarr", "killed.zarr"))
    names = [name for name in one.nodes if "/" in name and not name.startswith("moments")]
    same = all(one.read(name).tobytes() == other.read(name).tobytes() for name in names)
    numbers = other.read("posterior/draw")
    lost = len(set(range(200_000)) - set(numbers.tolist()))
    doubled = len(numbers) - len(set(numbers.tolist()))
    header = ["killed at random moments", "in a checkpoint", "in metadata", "in a chunk of draws"]
    return table(
        [*header, "draws at the kills", "draws lost", "doubled", "same bits"],
        [[*counts.values(), f"{seen[1]:,} to {seen[-1]:,}", lost, doubled, same]],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(to_disk(*map(int, options.part[1:]), options.folder)))
        return
    for part in options.only:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(f"{globals()[part].__doc__.strip()}\n")
            print(globals()[part](options.rounds, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
