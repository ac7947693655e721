# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Rows in shards, of which each process reads its own: more of them than 32 bits can number, and
files that go on after a kill.

    python benchmarks/shards.py [--only computed kills] [--rows 1e8 1e10] [--processes 4]
        [--gigabytes 2] [--folder FOLDER]

``computed``: the mean of a normal distribution with a known scale, whose rows are computed from
their numbers. Its posterior is known: the error of the mean of 1,000 draws in standard errors,
their standard deviation as a part of the right one with its standard error, how often each row was
read before the first draw, and the largest resident memory of a process.

``kills``: logistic regression with 100 parameters on four files of so many gigabytes, two for each
of two processes that write one store. One of them is killed at ten random moments, the other with
it, and both begin again; the draws are compared, bit for bit, with those of a run that was left
alone.
"""

import argparse
import json
from pathlib import Path
import random as python_random
import shutil
import subprocess
import sys
import tempfile
import time

from devices import free_port
from measure import table
import numpy as np

PARTS = ("computed", "kills")
DRAWS, BATCH, PARAMETERS, KILLS = 1_000, 2_000, 100, 10


class Computed:
    """Rows with mean 3 and variance 1, from a hash of their numbers."""

    dtype = np.dtype(np.float32)

    def __init__(self, rows: int, first: int) -> None:
        self.shape, self.first, self.read = (rows,), np.uint64(first), 0

    def __getitem__(self, rows) -> np.ndarray:
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else np.asarray(rows)
        self.read += len(numbers)
        numbers = numbers.astype(np.uint64) + self.first
        numbers *= np.uint64(0x9E3779B97F4A7C15)
        numbers >>= np.uint64(40)
        return (numbers.astype(np.float32) * np.float32(2**-24) - 0.5) * np.float32(12**0.5) + 3


def mean_of(y):
    import numpyro
    import numpyro.distributions as dist

    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", y.shape[0], subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def logistic(x, y):
    import numpyro
    import numpyro.distributions as dist

    w = numpyro.sample("w", dist.Normal(0, 1).expand([PARAMETERS]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def child(task: dict) -> None:
    """One of the processes."""
    import jax

    index, count = task["process"], task["processes"]
    jax.distributed.initialize(
        f"localhost:{task['port']}", count, index, heartbeat_timeout_seconds=20
    )
    from jax import random
    from numpyro.infer import MCMC

    from numpyro_sgmcmc import CCAdL, LongRun, RowsOnDisk, spread_rows

    mesh = jax.make_mesh((count,), ("rows",))
    if task["what"] == "kills":
        x, y = (RowsOnDisk(f"{task['folder']}/{name}-{index}-*.npy") for name in "xy")
        run = LongRun(
            CCAdL(logistic, progress_bar=False), num_warmup=100, num_samples=6_000,
            jit_model_args=True, progress_bar=False, store=task["store"], checkpoint_every=1.0,
        )  # fmt: skip
        print("begins", flush=True)
        run.run(random.key(0), *spread_rows(mesh, x, y))
        print("done", flush=True)
        return
    each = task["rows"] // count
    source = Computed(each, index * each)
    y = spread_rows(mesh, RowsOnDisk(source))
    start = time.perf_counter()
    kernel = CCAdL(mean_of, progress_bar=False)
    mcmc = MCMC(
        kernel, num_warmup=200, num_samples=1, jit_model_args=True, progress_bar=False
    )  # fmt: skip
    mcmc.warmup(random.key(0), y)
    found = {"tuning": time.perf_counter() - start, "read": source.read / each}
    mcmc.num_samples = DRAWS
    mcmc.run(mcmc.post_warmup_state.rng_key, y)
    draws = np.asarray(mcmc.get_samples()["mu"], float)
    found |= {"seconds": time.perf_counter() - start, "draws": draws.tolist()}
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    found["memory"] = float(status.split()[0]) / 1e6
    if index == 0:
        print(json.dumps(found), flush=True)


def started(task: dict, processes: int) -> list[subprocess.Popen]:
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, __file__,
             "--child", json.dumps(task | {"process": k, "processes": processes, "port": port})],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for k in range(processes)
    ]  # fmt: skip


def finished(children: list[subprocess.Popen], killed: bool = False) -> list[str]:
    """
    What they printed.

    :raises RuntimeError: if one has failed and nobody killed it.
    """
    told = [each.communicate() for each in children]
    for each, (_, error) in zip(children, told, strict=True):
        if each.returncode and not killed:
            raise RuntimeError(error[-2_000:])
    return [text for text, _ in told]


def computed(options: argparse.Namespace) -> str:
    from numpyro.diagnostics import effective_sample_size

    lines = []
    for number in options.rows:
        rows = int(float(number)) // options.processes * options.processes
        children = started({"what": "computed", "rows": rows}, options.processes)
        found = json.loads(finished(children)[0].splitlines()[-1])
        # the rows of a hash of consecutive numbers have their mean to far less than its error
        z = (np.asarray(found["draws"]) - 3) * np.sqrt(rows + 0.01)
        size = float(effective_sample_size(z[None]))
        lines.append([
            f"{rows:,}", f"{rows // options.processes / 2**31:.2f}",
            f"{z.mean() * np.sqrt(size):+.1f}",
            f"{z.std():.3f} +- {1 / np.sqrt(2 * size):.3f}", f"{found['read']:.2f}",
            f"{found['tuning']:.0f}", f"{found['seconds'] - found['tuning']:.0f}",
            f"{found['memory']:.2f}",
        ])  # fmt: skip
    header = [
        "rows", "of a process, in 2^31", "mean, in se", "sd", "reads of a row",
        "s to the first draw", f"s for {DRAWS:,}", "GB",
    ]  # fmt: skip
    return table(header, lines)


def written(folder: Path, gigabytes: float) -> int:
    """Four shards of rows and outcomes, two for each process."""
    rows = int(gigabytes * 1e9 / 4 / PARAMETERS)
    truth = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32) / 10
    for k in range(4):
        rng = np.random.default_rng(k + 1)
        shape = rows, PARAMETERS
        name = f"{k // 2}-{k % 2}.npy"
        x = np.lib.format.open_memmap(folder / f"x-{name}", "w+", np.float32, shape)
        y = np.empty(rows, np.float32)
        for first in range(0, rows, 100_000):
            part = slice(first, first + 100_000)
            x[part] = rng.standard_normal(x[part].shape, np.float32)
            y[part] = x[part] @ truth + rng.logistic(size=len(y[part])) > 0
        x.flush()
        np.save(folder / f"y-{name}", y)
    return 4 * rows


def sampled_since(store: Path, start: float) -> float:
    """The time at which the tuning is over, and is in the checkpoint."""
    checkpoint = store / ".long_run" / "checkpoint"
    while not (checkpoint.exists() and checkpoint.stat().st_mtime > start):
        time.sleep(0.1)
    return time.time()


def kills(options: argparse.Namespace) -> str:
    import zarr

    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        rows = written(folder, options.gigabytes)
        rng, moments = python_random.Random(0), []

        def begun(store: str) -> list[subprocess.Popen]:
            return started({"what": "kills", "folder": str(folder), "store": store}, 2)

        start = time.perf_counter()
        finished(begun(str(folder / "whole.zarr")))
        alone = time.perf_counter() - start
        done = False
        while not done:
            children, killed = begun(str(folder / "killed.zarr")), False
            if len(moments) < KILLS:
                start = time.time()
                begun_at = start + rng.uniform(1, 60)  # while it starts
                if len(moments) % 2:  # while it samples
                    begun_at = sampled_since(folder / "killed.zarr", start) + rng.uniform(0, 15)
                time.sleep(max(0.0, begun_at - time.time()))
                moment = time.time() - start
                killed = all(each.poll() is None for each in children)
                if killed:
                    moments.append(moment)
                    children[rng.randrange(2)].kill()
                    for each in children:
                        each.kill()
            finished(children, killed)
            done = not killed
        draws = [
            zarr.open(folder / f"{name}.zarr")["posterior/w"][:] for name in ("whole", "killed")
        ]
        same = np.array_equal(*draws)
        return (
            f"{rows:,} rows of {PARAMETERS} numbers in four files of {options.gigabytes:g} GB: left"
            f" alone {alone:.0f} s; killed after {', '.join(f'{s:.0f}' for s in moments)} s:"
            f" {draws[1].shape[1]:,} draws, {'the same bit for bit' if same else 'OTHERS'}"
        )
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", nargs="+", default=["1e8", "1e10"])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return
    for part in options.only:
        print({"computed": computed, "kills": kills}[part](options), flush=True)


if __name__ == "__main__":
    main()
