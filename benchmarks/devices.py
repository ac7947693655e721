# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
What a step costs with the rows spread over devices: two processes against one, eight virtual
devices in one process against one, and one all-reduce between two processes.

    python benchmarks/devices.py [--rounds 7] [--only processes virtual message]

Every process computes with one thread (``NPROC=1``), also where there is one process; the virtual
devices share all cores. No process is tied to a core: it could then not receive while it computes,
and a message would take a tick of the scheduler, 4 ms. Processes talk over the loopback interface
(gloo). The minibatch is the same in total. Each time is the median over the rounds, with quartiles.
"""

import argparse
from itertools import product
import json
import os
import socket
import subprocess
import sys

PARTS = ("processes", "virtual", "message")

#: Rows, parameters, rows of a minibatch, and steps that are timed together.
SIZES = ((200_000, 100, 500, 400), (200_000, 100, 20_000, 50), (200_000, 100, 100_000, 20))

#: Numbers in a message, and how often it is sent.
MESSAGES = ((100, 200), (100_000, 50), (1_000_000, 10))


def child(task: dict) -> None:
    """One process of some: prints the seconds of each round."""
    if task["threads"]:
        os.environ["NPROC"] = str(task["threads"])
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={task['devices']}"
    import jax

    if task["processes"] > 1:
        where = f"localhost:{task['port']}"
        jax.distributed.initialize(where, task["processes"], task["process"])
    from measure import interleaved

    programs = {"message": messages, "step": steps}[task["what"]](task)
    seconds = interleaved(programs, task["rounds"])
    if task["process"] == 0:
        print(json.dumps({name: list(each) for name, each in seconds.items()}))


def steps(task: dict) -> dict:
    """Programs of some steps of SGHMC on logistic regression."""
    from functools import partial

    import jax
    from jax import random
    from jax.sharding import Mesh
    import numpy as np
    from workloads import logistic

    from numpyro_sgmcmc import SGHMC, spread_rows

    rows, parameters, batch, count = task["size"]
    here = rows // task["processes"]
    rng = np.random.default_rng(task["process"])
    x = rng.standard_normal((here, parameters), np.float32)
    y = rng.integers(0, 2, here)
    programs = {}
    for devices in task["meshes"]:
        mesh = data = None
        if devices:
            mesh = Mesh(np.array(jax.devices()[:devices]), ("rows",))
            data = spread_rows(mesh, x, y)
        else:
            data = jax.device_put((x, y))
        model = partial(logistic, batch_size=batch)
        kernel = SGHMC(model, 1e-3, 10.0, steps_per_sample=count)
        state = kernel.init(random.key(0), 0, None, data, {})
        program = jax.jit(lambda state, data, kernel=kernel: kernel.sample(state, data, {}))
        programs[str(devices)] = partial(program, state, data)
    return programs


def messages(task: dict) -> dict:
    """Programs that send as many numbers, one message after the other."""
    from functools import partial

    import jax
    from jax import lax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec
    import numpy as np

    mesh = jax.make_mesh((task["processes"],), ("rows",))
    programs = {}
    for (size, count), dtype in product(MESSAGES, (jnp.float32, jnp.bfloat16)):

        def one(x, count=count, dtype=dtype):
            def sent(_, x):
                found = lax.psum(x.astype(dtype), "rows")
                return found.astype(jnp.float32) / task["processes"]

            return lax.fori_loop(0, count, sent, x)

        everywhere = PartitionSpec()
        program = jax.jit(
            jax.shard_map(
                one, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
            )
        )
        name = f"{size} {jnp.dtype(dtype).name}"
        programs[name] = partial(program, np.ones(size, np.float32))
    return programs


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def run(what: str, rounds: int, processes: int = 1, threads: int = 1, **task) -> dict:
    """Seconds of the programs of processes that are started together."""
    port = free_port()
    shared = {"what": what, "rounds": rounds, "processes": processes, "port": port, "devices": 1}
    shared |= task | {"threads": threads}
    started = []
    for process in range(processes):
        each = json.dumps(shared | {"process": process})
        command = [sys.executable, __file__, "--child", each]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate() for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(outputs[0][1] or outputs[-1][1])
    # gloo writes to standard output too
    return json.loads(outputs[0][0].strip().splitlines()[-1])


def in_words(rows: int, parameters: int, batch: int, _: int) -> list[str]:
    return [f"{rows:,}", f"{parameters:,}", f"{batch:,}"]


def median(seconds: list[float], count: int) -> str:
    import numpy as np

    low, middle, high = 1e6 * np.quantile(seconds, (0.25, 0.5, 0.75)) / count
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def of_processes(rounds: int) -> str:
    from measure import table
    import numpy as np

    rows = []
    for size in SIZES:
        one, two = (
            run("step", rounds, processes, size=size, meshes=[processes])[str(processes)]
            for processes in (1, 2)
        )
        faster = np.median(one) / np.median(two)
        each = [median(one, size[-1]), median(two, size[-1])]
        rows.append([*in_words(*size), *each, f"{faster:.2f}", f"{100 * faster / 2:.0f} %"])
    header = ["N", "d", "n", "us a step, 1 process", "2 processes", "times as fast", "efficiency"]
    return table(header, rows)


def of_virtual_devices(rounds: int) -> str:
    from measure import ratio, table
    import numpy as np

    rows = []
    for whole, parameters, batch, count in SIZES:
        size = whole, parameters, -(-batch // 8) * 8, count  # a multiple of the devices
        found = run("step", rounds, size=size, meshes=[0, 1, 8], devices=8, threads=0)
        each = [median(found[name], size[-1]) for name in ("0", "1", "8")]
        against = ratio(np.array(found["8"]), np.array(found["0"]))
        rows.append([*in_words(*size), *each, against])
    header = ["N", "d", "n", "us a step, no mesh", "mesh of 1", "mesh of 8", "8 to no mesh"]
    return table(header, rows)


def of_messages(rounds: int) -> str:
    from measure import table
    import numpy as np

    found = run("message", rounds, 2)
    rows = []
    for size, count in MESSAGES:
        whole, half = (found[f"{size} {name}"] for name in ("float32", "bfloat16"))
        rate = f"{4 * size * count / np.median(whole) / 2**20:,.1f}"
        rows.append([f"{size:,}", median(whole, count), rate, median(half, count)])
    return table(["numbers", "us, of 4 bytes", "MiB a second", "us, as bfloat16"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return
    parts = {
        "processes": ("Two processes, one thread each", of_processes),
        "virtual": ("Eight virtual devices in one process, on all cores", of_virtual_devices),
        "message": ("One all-reduce between two processes", of_messages),
    }
    for name in options.only:
        title, measured = parts[name]
        print(f"{title}\n\n{measured(options.rounds)}", flush=True)


if __name__ == "__main__":
    main()
