# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What the benchmarks share: the machine in words, timing side by side, tables."""

from collections.abc import Callable, Iterable, Mapping
from datetime import date
from operator import attrgetter
import os
import platform
import time

import jax
import numpy as np
import numpyro
from numpyro.infer import MCMC
from numpyro.util import fori_collect


def machine() -> str:
    """Machine, versions and date, for the line under a table."""
    model = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        model = names[0] if names else model
    device = jax.devices()[0]
    where = f"{os.cpu_count()} cores, {model}" if device.platform == "cpu" else device.device_kind
    return (
        f"Python {platform.python_version()}, JAX {jax.__version__}, NumPyro"
        f" {numpyro.__version__}, {where}, {date.today()}."
    )


def interleaved(
    programs: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, np.ndarray]:
    """Seconds of each program in each round; every round runs all of them in turn."""
    for run in programs.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            start = clock()
            jax.block_until_ready(run())
            seconds[name].append(clock() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def more_draws(mcmc: MCMC, args: tuple, draws: int) -> Callable[[], object]:
    """
    The program of some more draws after a run, compiled at its first call: NumPyro's loop without
    a progress bar, which ``run`` would compile anew each time.
    """
    kernel = mcmc.sampler
    values = attrgetter(kernel.sample_field)

    def more(state, args):
        def sample(states):
            return (kernel.sample(states[0], args, {}),)

        kept = {"transform": lambda states: values(states[0]), "progbar": False}
        return fori_collect(0, draws, sample, (state,), **kept)

    program = jax.jit(more)
    return lambda: program(mcmc.last_state, args)


def seconds_of_draws(
    mcmc: MCMC,
    args: tuple,
    draws: int,
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds for more draws after a run, compiled before: the median of some rounds."""
    found = interleaved({"draws": more_draws(mcmc, args, draws)}, rounds, clock)
    return float(np.median(found["draws"]))


def ratio(one: np.ndarray, other: np.ndarray) -> str:
    """
    The median over the rounds of the ratio within a round, and its quartiles: what slows the
    machine down for a while slows both.
    """
    low, middle, high = np.quantile(one / other, [0.25, 0.5, 0.75])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table, numbers to the right."""
    header = list(header)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"
