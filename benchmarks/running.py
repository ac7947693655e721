# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
What a run costs besides its steps: the progress bar, a second ``run()``, the time to the first
sample in a new process, chains side by side, and memory.

    python benchmarks/running.py [--only bar second first changed chains devices processes memory]

The time to the first sample and the memory are measured in processes of their own, the time
after a program of JAX has run. NUTS runs on ``full_data(model)``. Memory is the largest resident
size after a run less that before it, with the data in memory.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
import inspect
import json
import os
import subprocess
import sys
from tempfile import TemporaryDirectory
import time
from typing import Any
import warnings

from blocks import fori_collect_in_blocks
import jax
from jax import random
import jax.numpy as jnp
from measure import interleaved, ratio, table
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
import numpyro.infer.mcmc
from step_cost import FRICTION, bound, collected, started
from workloads import Workload, logistic, logistic_data, logistic_potential, workloads

from numpyro_sgmcmc import SGHMC, CCAdL, LongRun, full_data

PARTS = ("bar", "second", "first", "changed", "chains", "devices", "processes", "memory")


def sghmc(workload: Workload, steps_per_sample: int = 1) -> Callable:
    return partial(
        SGHMC,
        step_size=workload.step_size,
        friction=FRICTION,
        integrator="euler",
        steps_per_sample=steps_per_sample,
    )


#: The environment variable with a folder of tunings.
TUNINGS = "NUMPYRO_SGMCMC_TUNINGS"


def started_workloads() -> list[Workload]:
    """The workloads whose first sample is timed; NUTS takes minutes for the network."""
    more = [
        Workload(
            f"logistic, N = {size:,}, d = 20, n = 500",
            logistic, logistic_potential, logistic_data(size, 20), 500, 1e-3, 4_000,
        )
        for size in (1_000, 100_000)
    ]  # fmt: skip
    return [*workloads()[:2], *more]


def samplers(workload: Workload) -> dict[str, Callable]:
    model, folder = bound(workload), os.environ.get(TUNINGS)
    kept = {"CCAdL, tuning kept": lambda: CCAdL(model, tuning=folder, progress_bar=False)}
    return {
        "NUTS": lambda: NUTS(full_data(model)),
        "SGHMC, step size given": lambda: sghmc(workload)(model),
        "CCAdL, step size given": lambda: CCAdL(
            model, workload.step_size, FRICTION, noise="diagonal"
        ),
        "CCAdL, tuned": lambda: CCAdL(model, progress_bar=False),
    } | (kept if folder else {})


def finished(mcmc: MCMC, key: int, data: tuple) -> None:
    mcmc.run(random.key(key), *data)
    jax.block_until_ready(mcmc.get_samples())


def bar(rounds: int) -> str:
    """
    A sample under a progress bar against one in NumPyro's own loop without, what that is for an
    effective sample of the worst parameter, and a sample under a bar whose calls are blocks of
    samples, a change to NumPyro (``python benchmarks/blocks.py``).
    """
    rows, one_by_one = [], numpyro.infer.mcmc.fori_collect
    for workload in [of_the_readme(), *workloads()]:
        chains = 4 if "README" in workload.name else 1
        tried = {}
        if chains == 1:
            tried = {f"SGHMC, {k}": sghmc(workload, k) for k in (1, 10, 100)}
        if workload.steps >= 1_000:  # the pilot of the network takes minutes
            tuning = CCAdL(bound(workload), progress_bar=False).tune(random.key(0), *workload.data)
            tried |= {
                f"CCAdL, tuned, {k or 'default'}": partial(CCAdL, tuning=tuning, steps_per_sample=k)
                for k in (1, None, 20)
            }
        for name, make in tried.items():
            kernel, _ = started(make, workload)
            count = kernel.steps_per_sample
            samples = max(20, 1_000 if "tuned" in name else workload.steps // count)
            several = workload._replace(steps=samples)
            mcmc = MCMC(
                kernel, num_warmup=0, num_samples=samples,
                num_chains=chains, chain_method="vectorized",
            )  # fmt: skip
            finished(mcmc, 0, workload.data)
            mcmc.post_warmup_state = mcmc.last_state

            def under(loop: Callable, mcmc=mcmc, workload=workload) -> None:
                numpyro.infer.mcmc.fori_collect = loop
                finished(mcmc, 1, workload.data)

            programs = {
                "off": collected(make, several, chains),
                "on": partial(under, one_by_one),
                "blocks": partial(under, fori_collect_in_blocks()),
            }
            seconds = interleaved(programs, rounds)
            numpyro.infer.mcmc.fori_collect = one_by_one
            off, on = (np.median(seconds[which]) for which in ("off", "on"))
            found = [f"{1e6 * off / samples:.0f}", f"{1e6 * on / samples:.0f}"]
            found += [ratio(seconds[which], seconds["off"]) for which in ("on", "blocks")]
            found += ["", ""]
            if "tuned" in name:
                size = least_size(mcmc)
                found[-2:] = [f"{size / off:,.0f}", f"{size / on:,.0f}"]
            jax.clear_caches()  # thousands of programs exhaust the memory maps of a process
            rows.append([workload.name, name, count, *found])
    header = ["", "kernel", "steps_per_sample", "us a sample, bar off", "on", "ratio"]
    return table([*header, "of blocks", "ESS a second, bar off", "on"], rows)


def of_the_readme() -> Workload:
    """The example of the README, with its four vectorized chains."""
    x = random.normal(random.key(1), (100_000, 5))
    y = (x[:, 0] + random.logistic(random.key(2), (100_000,)) > 0).astype(int)
    name = "README's example, 4 chains"
    return Workload(name, logistic, logistic_potential, (x, y), 500, 1e-3, 4_000)


def least_size(mcmc: MCMC) -> float:
    """The effective sample size of the worst parameter."""
    draws = jax.tree.leaves(mcmc.get_samples(group_by_chain=True))
    return min(float(np.min(effective_sample_size(np.asarray(x, float)))) for x in draws)


def second(rounds: int) -> str:
    """A second ``run()`` of the same object, with ten samples after ten of warm-up."""
    rows = []
    ways = [
        ("MCMC", True, False), ("MCMC", True, True), ("MCMC", False, True), ("LongRun", False, "")
    ]  # fmt: skip
    for workload in workloads()[:2]:
        others = tuple(jnp.roll(x, 1, axis=0) for x in workload.data)
        for name, make in samplers(workload).items():
            if name == "CCAdL, tuned":
                continue
            for way, shown, jit_model_args in ways:
                options: dict[str, Any] = {"progress_bar": shown}
                if way == "MCMC":
                    options["jit_model_args"] = jit_model_args
                made: Any = {"MCMC": MCMC, "LongRun": LongRun}[way]
                mcmc = made(make(), num_warmup=10, num_samples=10, **options)
                finished(mcmc, 0, workload.data)
                seconds: dict[str, list[float]] = {"same": [], "other": [], "resumed": []}
                cases = [("same", workload.data)]
                if jit_model_args is not False:  # else data are constants of the program
                    cases.append(("other", others))
                for k in range(rounds):
                    for case, data in cases:
                        start = time.perf_counter()
                        finished(mcmc, k, data)
                        seconds[case].append(time.perf_counter() - start)
                    mcmc.post_warmup_state = mcmc.last_state
                    start = time.perf_counter()
                    finished(mcmc, k, cases[-1][1])
                    seconds["resumed"].append(time.perf_counter() - start)
                    mcmc.post_warmup_state = None
                words = [f"{1e3 * np.median(s):.0f}" if s else "" for s in seconds.values()]
                jax.clear_caches()  # thousands of programs exhaust the memory maps of a process
                state = "on" if shown else "off"
                rows.append([workload.name, name, way, state, jit_model_args, *words])
    header = ["", "sampler", "", "bar", "jit_model_args"]
    return table([*header, "again, ms", "other data, ms", "resumed, ms"], rows)


def alone(*arguments: object, **environment: str) -> dict:
    """Runs a part of this file in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--part", *map(str, arguments)],
        env=os.environ | environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def first(rounds: int) -> str:
    """
    The time to the first sample without warm-up, and in a process that finds the programs of
    another one in JAX's compilation cache.
    """
    rows = []
    for k, workload in enumerate(started_workloads()):
        with TemporaryDirectory() as folder, TemporaryDirectory() as os.environ[TUNINGS]:
            names = list(samplers(workload))
            kept = {
                "JAX_COMPILATION_CACHE_DIR": folder,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            for name in names:
                alone("first", k, name, **kept)  # it fills the folders
            seconds = [  # every one in a new process
                [
                    [alone("first", k, name, **how)["seconds"] for how in ({}, kept)]
                    for name in names
                ]
                for _ in range(min(rounds, 5))
            ]
        found = np.moveaxis(np.array(seconds), 0, -1)
        for name, (cold, again) in zip(names, found, strict=True):
            row = [workload.name, name]
            for each, nuts in ((cold, found[0, 0]), (again, found[0, 1])):
                row += [f"{np.median(each):.1f}", ratio(each, nuts)]
            rows.append(row)
    header = ["", "sampler", "seconds", "ratio to NUTS", "with kept programs", "ratio to NUTS"]
    return table(header, rows)


def changed(rounds: int) -> str:
    """The time to the first sample of a model with another prior, later in the same process."""
    rows = []
    for k, workload in enumerate(started_workloads()):
        if "d = 20" not in workload.name:
            continue
        names = "NUTS", "CCAdL, step size given", "CCAdL, tuned"
        found = np.array([
            [alone("changed", k, name)["seconds"] for name in names] for _ in range(min(rounds, 5))
        ]).T  # fmt: skip
        for name, seconds in zip(names, found, strict=True):
            cells = f"{np.median(seconds):.1f}", ratio(seconds, found[0])
            rows.append([workload.name, name, *cells])
    return table(["", "sampler", "seconds", "ratio to NUTS"], rows)


def chains(rounds: int) -> str:
    """Vectorized chains: the cost of a step of one of them."""
    rows = []
    for workload in workloads():
        programs, counts = {}, (1, 4, 16, 64)
        for count in counts:
            kernel, _ = started(sghmc(workload), workload)
            steps = max(5, workload.steps // count)
            keys = random.split(random.key(0), count) if count > 1 else random.key(0)
            state = kernel.init(keys, 0, None, model_args=workload.data, model_kwargs={})

            def run(state, data, kernel=kernel, steps=steps):
                def step(state, _):
                    state = kernel.sample(state, data, {})
                    return state, state.z

                return jax.lax.scan(step, state, length=steps)[1]

            programs[str(count)] = partial(jax.jit(run), state, workload.data)
        seconds = interleaved(programs, rounds)
        each = {c: seconds[str(c)] / (c * max(5, workload.steps // c)) for c in counts}
        rows += [
            [workload.name, c, f"{1e6 * np.median(each[c]):.1f}", ratio(each[c], each[1])]
            for c in counts
        ]
    return table(["", "chains", "us for each step of a chain", "ratio to one"], rows)


def devices(rounds: int) -> str:
    """
    Chains on host devices, as many on each, against the same chains on one: one after the other
    where a device has one, else vectorized.
    """
    rows = []
    for k, workload in enumerate(workloads()):
        for count, chains in ((2, 2), (2, 16), (8, 8)):
            flags = f"--xla_force_host_platform_device_count={count}"
            flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
            found = alone(
                "devices", k, rounds, chains // count, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"
            )
            several, one = (np.array(found[which]) for which in ("several", "one"))
            rows.append([workload.name, count, chains, ratio(several, one)])
    return table(["", "devices", "chains", "time to that on one device"], rows)


def processes(_: int) -> str:
    """
    Two processes with a chain each at the same time, against one alone: the time of a step of
    each, and with ``NPROC=1``, one thread of XLA for each process.
    """
    rows = []
    for k, workload in enumerate(workloads()):
        found = [
            together(count, "process", k, **environment)
            for count, environment in ((1, {}), (2, {}), (2, {"NPROC": "1"}))
        ]
        times = [1e6 * np.mean([each["seconds"] for each in one]) for one in found]
        rows.append([workload.name, *(f"{t:.1f}" for t in times)])
    return table(["", "one process, us a step", "two", "two, NPROC=1"], rows)


def together(count: int, *arguments: object, **environment: str) -> list[dict]:
    """What :func:`alone` does, several times at once."""
    with ThreadPoolExecutor(count) as pool:
        begin = time.time() + 20  # when all have compiled
        runs = [pool.submit(alone, *arguments, begin, **environment) for _ in range(count)]
        return [run.result() for run in runs]


def memory(_: int) -> str:
    """The memory of a run."""
    rows = []
    for size, samples in ((10_000, 20_000), (1_000_000, 20_000)):
        for jit_model_args in (True, False):
            found = alone("memory", size, samples, int(jit_model_args))
            rows.append([f"{size:,}", jit_model_args] + [f"{found[k]:.0f}" for k in
                        ("data", "samples", "added", "allowed")])  # fmt: skip
    header = ["N", "jit_model_args", "data, MB", "kept samples, MB", "added by the run, MB"]
    return table([*header, "2 x samples + 300 MB"], rows)


def resident(field: str) -> float:
    """Resident memory of this process in MB, now or at its peak."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))


def on_devices(workload: Workload, rounds: int, each: int) -> dict:
    """Seconds of ``each`` chains on each of the devices, and of all of them on one."""
    kernel, _ = started(sghmc(workload), workload)
    count, steps = jax.device_count(), max(5, workload.steps // each)
    keys = random.split(random.key(0), (count, each))

    def state_of(keys):
        return kernel.init(keys, 0, None, model_args=workload.data, model_kwargs={})

    def run(state, data):
        def step(state, _):
            state = kernel.sample(state, data, {})
            return state, state.z

        return jax.lax.scan(step, state, length=steps)[1]

    program, split = jax.jit(run), jax.pmap(run)
    parts = [state_of(some if each > 1 else some[0]) for some in keys]
    alone_on_one = parts if each == 1 else [state_of(keys.ravel())]
    # in the memory of their device before, as NumPyro has them
    place = jax.pmap(lambda tree: tree)
    states = place(jax.tree.map(lambda *x: jnp.stack(x), *parts))
    data = place(jax.tree.map(lambda x: jnp.stack([x] * count), workload.data))
    programs = {
        "several": lambda: split(states, data),
        "one": lambda: [program(state, workload.data) for state in alone_on_one],
    }
    return {where: found.tolist() for where, found in interleaved(programs, rounds).items()}


def for_a_while(program: Callable, begin: float) -> float:
    """Median seconds of a program that is run for five seconds from some time on."""
    jax.block_until_ready(program())
    if time.time() > begin:
        raise RuntimeError("The program was not compiled in time.")
    time.sleep(begin - time.time())
    seconds = []
    while time.time() < begin + 5:
        start = time.perf_counter()
        jax.block_until_ready(program())
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def to_the_first_sample(workload: Workload, name: str) -> float:
    """Seconds to the first sample of one of the samplers, without warm-up."""
    make = samplers(workload)[name]
    start = time.perf_counter()
    finished(MCMC(make(), num_warmup=0, num_samples=1, progress_bar=False), 0, workload.data)
    return time.perf_counter() - start


def part(name: str, *arguments: str) -> dict:
    """What runs in a process of its own."""
    jax.block_until_ready(jax.jit(jnp.sum)(jnp.ones(3)))
    if name == "first":
        workload = started_workloads()[int(arguments[0])]
        return {"seconds": to_the_first_sample(workload, arguments[1])}
    if name == "changed":
        workload = started_workloads()[int(arguments[0])]
        for scale in (1.0, 2.0):
            other = workload._replace(model=partial(workload.model, scale=scale))
            seconds = to_the_first_sample(other, arguments[1])
        return {"seconds": seconds}
    if name == "process":
        workload = workloads()[int(arguments[0])]
        seconds = for_a_while(collected(sghmc(workload), workload), float(arguments[1]))
        return {"seconds": seconds / workload.steps}
    if name == "devices":
        index, rounds, each = map(int, arguments)
        return on_devices(workloads()[index], rounds, each)
    size, samples, jit_model_args = map(int, arguments)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((size, 100), np.float32))
    data = x, jnp.asarray((x[:, 0] > 0).astype(jnp.float32))
    workload = Workload("", logistic, logistic_potential, data, 500, 1e-3, samples)
    jax.block_until_ready(data)
    del rng
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from here
    before = resident("VmRSS")
    mcmc = MCMC(
        sghmc(workload)(bound(workload)), num_warmup=0, num_samples=samples,
        progress_bar=False, jit_model_args=bool(jit_model_args),
    )  # fmt: skip
    finished(mcmc, 0, data)
    after = resident("VmHWM")
    kept = samples * 100 * 4 / 2**20
    return {
        "data": sum(x.nbytes for x in data) / 2**20, "samples": kept,
        "added": after - before, "allowed": 2 * kept + 300,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.part:
        print(json.dumps(part(*options.part)))
        return
    for name in options.only:
        function = globals()[name]
        print(f"{inspect.getdoc(function)}\n\n{function(options.rounds)}", flush=True)


if __name__ == "__main__":
    main()
