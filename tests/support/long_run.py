# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
A long run in a process of its own, for tests that kill it.

    python tests/support/long_run.py STORE NUM_SAMPLES [hang=FILE:COUNT] [process=K:PORT]
        [fail=CHUNK] [seconds=SECONDS] [flush=0] [resume=0] [rows=memory] [rows=FOLDER]
        [count=ROWS]

``hang=checkpoint:3`` stops for ever in the middle of the third checkpoint, with half of it written;
``process=1:12345`` is the second one of two processes; ``fail=20`` fails in the 20th chunk, and
``seconds=0.002`` is how long a chunk takes; ``flush=0`` leaves it to the system when files go to
the disk, which only a failure of the machine would show; ``resume=0`` begins anew; ``rows=`` are
rows that keep coming, the first ``count`` of them in memory or all files of a folder.
"""

import os
from pathlib import Path
import sys
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from small_models import means as model

from numpyro_sgmcmc import SGHMC, GrowingRows, LongRun, RowsOnDisk
from numpyro_sgmcmc.data import archive
from numpyro_sgmcmc.long_runs import running, store


def data():
    # by NumPy: what JAX compiles with other options may differ in the last bit
    return jnp.asarray(1 + np.random.default_rng(0).standard_normal((100, 3)), jnp.float32)


def growing(place: str, count: int) -> GrowingRows:
    if place != "memory":
        return GrowingRows(RowsOnDisk(f"{place}/*.npy"))
    rows = 1 + np.random.default_rng(0).standard_normal((1_000, 3), np.float32)
    return GrowingRows(rows[:count])


def kernel(**settings):
    return SGHMC(model, step_size=0.005, friction=20.0, progress_bar=False, **settings)


def hang_in(name: str, count: int) -> None:
    """Makes one of the writes of a file hang half way, for the parent to kill it there."""
    write, seen = archive.write_atomically, 0

    def stopping(path: Path, *parts) -> None:
        nonlocal seen
        seen += path.name == name
        if seen == count:
            content = b"".join(parts)
            path.with_name(f"{path.name}.new").write_bytes(content[: len(content) // 2])
            print("hangs", flush=True)
            time.sleep(1_000)
        write(path, *parts)

    archive.write_atomically = store.write_atomically = stopping


def fail_in(count: int) -> None:
    """Makes a chunk fail."""
    chunk, seen = running.Running.chunk, 0

    def failing(self, samples: int) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            print("fails", flush=True)
            raise OSError("row 17 of rows.bin cannot be read")
        chunk(self, samples)

    running.Running.chunk = failing


def main() -> None:
    folder, num_samples, *options = sys.argv[1:]
    running._SECONDS, resume = 0.01, True  # many chunks in a short time
    place, count, settings = None, 0, {}
    for option in options:
        name, value = option.split("=")
        if name == "hang":
            file, count = value.split(":")
            hang_in(file, int(count))
        elif name == "fail":
            fail_in(int(value))
        elif name == "seconds":
            running._SECONDS = float(value)
        elif name == "flush":
            os.fsync = lambda file: None
        elif name == "resume":
            resume = False
        elif name == "rows":
            place, settings = value, {"gradient": "control_variate"}
        elif name == "count":
            count = int(value)
        else:
            index, port = map(int, value.split(":"))
            jax.distributed.initialize(
                f"localhost:{port}", 2, index,
                heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10,
            )  # fmt: skip
    mcmc = LongRun(
        kernel(**settings), num_warmup=300, num_samples=int(num_samples), num_chains=2, thinning=2,
        chain_method="vectorized", store=folder, resume=resume, checkpoint_every=1e-9,
        progress_bar=False,
    )  # fmt: skip
    print("begins", flush=True)
    rows = (data(),) if place is None else growing(place, count)
    mcmc.run(random.key(1), *rows, extra_fields=("z.mu",))
    print("done", mcmc.stopped, flush=True)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_compilation_cache_dir", os.environ.get("LONG_RUN_CACHE"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    main()
