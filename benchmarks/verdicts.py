# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Runs of which nobody knows how they end: each in a process with a limit, and its verdict."""

from collections.abc import Callable, Iterator
import multiprocessing
import multiprocessing.connection
import os
import time
from typing import Any, NamedTuple
import warnings

from jax._src import xla_bridge
import numpy as np

from numpyro_sgmcmc.diagnostics.comparison import variance_of
from numpyro_sgmcmc.diagnostics.runs import effective_sizes

#: Standard errors beyond which a moment is wrong.
TOO_FAR = 4.0

#: Draws of a chain below which only the mean says something.
FEWEST = 10

#: Seconds after which a process that has had no more of a processor waits for what never comes.
IDLE = 60.0

#: Warnings of other packages about themselves.
NOT_OURS = (DeprecationWarning, FutureWarning, PendingDeprecationWarning, ImportWarning)


class Right(NamedTuple):
    """
    Means and standard deviations, by name, and their standard errors: of means, and of standard
    deviations relative to them. Both are zero of what is exact.
    """

    mean: dict[str, np.ndarray]
    sd: dict[str, np.ndarray]
    mean_error: dict[str, np.ndarray] = {}
    sd_error: dict[str, np.ndarray] = {}


def moments_of(draws: dict[str, Any]) -> Right:
    """Of draws of shape (chains, draws, ...)."""
    mean, sd, mean_error, sd_error = {}, {}, {}, {}
    for name, values in draws.items():
        values = np.asarray(values, np.float64)
        flat = values.reshape(*values.shape[:2], -1)
        variance, error = variance_of(flat)
        mean[name], sd[name] = flat.mean((0, 1)), np.sqrt(variance)
        with np.errstate(all="ignore"):
            mean_error[name] = sd[name] / np.sqrt(np.maximum(effective_sizes(flat), 1.0))
        sd_error[name] = error / 2
    return Right(mean, sd, mean_error, sd_error)


def worst_error(draws: dict[str, Any], right: Right) -> tuple[float, str]:
    """The largest error of a mean or a standard deviation, in standard errors, in words."""
    worst = (0.0, "nothing to compare")
    for name in right.mean:
        if name not in draws:
            return np.inf, f"'{name}' is missing"
        if not np.isfinite(np.asarray(draws[name])).all():
            return np.inf, f"'{name}' is not finite"
    found = moments_of({name: draws[name] for name in right.mean})
    for name in right.mean:
        m0, sd0 = np.reshape(right.mean[name], -1), np.reshape(right.sd[name], -1)
        m, sd = found.mean[name], found.sd[name]
        if m.shape != m0.shape:
            return np.inf, f"'{name}' has {m.size} values, which should be {m0.size}"
        with np.errstate(all="ignore"):
            # of draws that do not move the size of the sample is unknown: at least one
            error = np.maximum(np.nan_to_num(found.mean_error[name]), sd0 / np.sqrt(m.size * 1e6))
            of_mean = (m - m0) / np.hypot(error, right.mean_error.get(name, 0))
            error = np.nan_to_num(found.sd_error[name], nan=1.0)
            of_sd = (sd / sd0 - 1) / np.hypot(np.maximum(error, 1e-3), right.sd_error.get(name, 0))
        if np.shape(draws[name])[1] < FEWEST:
            of_mean, of_sd = (m - m0) / sd0, np.zeros_like(sd0)
        of_mean, of_sd = (
            np.where(sd0 > 0, np.nan_to_num(np.abs(z), nan=np.inf), 0.0) for z in (of_mean, of_sd)
        )
        k, j = int(np.argmax(of_mean)), int(np.argmax(of_sd))
        off, ratio = abs(m[k] - m0[k]) / sd0[k], sd[j] / sd0[j]
        said = (
            (of_mean[k], f"mean of {name}[{k}] off by {off:.2g} sd, {of_mean[k]:.1f} se"),
            (of_sd[j], f"sd of {name}[{j}] is {ratio:.2f} of the right one, {of_sd[j]:.1f} se"),
        )
        worst = max(worst, *said, key=lambda error: error[0])
    return worst


def verdict_of(
    function: Callable[[], Any], worst: Callable = worst_error, most: float = TOO_FAR
) -> tuple[str, str]:
    """
    What becomes of a run, in a word, and what was said.

    :param function: gives the draws and the right moments, or a verdict and an explanation with
        a colon between.
    :param worst: of draws and right moments: how large the worst error is, and where.
    :param float most: what is still right.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome = function()
        except BaseException as error:
            return "raised", f"{type(error).__name__}: {error}"
    ours = (str(w.message) for w in caught if not issubclass(w.category, NOT_OURS))
    said = "; ".join(dict.fromkeys(ours))
    if isinstance(outcome, str):
        verdict, _, explanation = outcome.partition(": ")
        if said and verdict.startswith("WRONG"):
            return "wrong, warned", f"{explanation}; {said}"
        return verdict, explanation or said
    draws, right = outcome
    draws = draws if isinstance(draws, dict) else draws.get_samples(group_by_chain=True)
    z, where = worst(draws, right)
    if z <= most:
        return ("right, warned", f"{where}; {said}") if said else ("right", where)
    return ("wrong, warned", f"{where}; {said}") if said else ("WRONG, SILENT", where)


def cpu_seconds(pid: int) -> float:
    """What a process has had: others may keep the machine busy."""
    with open(f"/proc/{pid}/stat") as stat:
        ticks = stat.read().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _child(function: Callable, item: Any, connection: Any) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    connection.send(function(item))
    connection.close()
    os._exit(0)  # threads that a case has left behind are not waited for


def each_in_a_process(
    function: Callable[[Any], tuple], items: list, processes: int, limit: float
) -> Iterator[tuple[Any, tuple, float]]:
    """
    Of each item, as it ends: the item, what the function gave, and seconds.

    :param float limit: seconds of a processor. A process that has had none for a minute is ended
        as well; others may keep the machine busy meanwhile.
    """
    assert not xla_bridge.backends_are_initialized(), "threads of JAX do not survive a fork"
    fork = multiprocessing.get_context("fork")  # so that nothing is imported twice
    waiting, running = list(items), {}
    while waiting or running:
        while waiting and len(running) < processes:
            here, there = fork.Pipe(duplex=False)
            process = fork.Process(target=_child, args=(function, waiting[0], there))
            process.start()
            there.close()
            running[process] = _Running(waiting.pop(0), here, time.perf_counter())
        multiprocessing.connection.wait([run.connection for run in running.values()], timeout=0.5)
        for process, run in list(running.items()):
            if run.connection.poll():
                try:
                    found = run.connection.recv()
                except EOFError:
                    found = ("CRASH", "the process died")
            elif (used := run.used(process.pid)) > limit or run.idle() > IDLE:
                found = (
                    "HANG",
                    f"not done after {run.seconds():.0f} s, {used:.0f} s of a processor",
                )
            else:
                continue
            process.kill()
            process.join()
            del running[process]
            yield run.item, found, run.seconds()


class _Running:
    """An item that runs in a process."""

    def __init__(self, item: Any, connection: Any, start: float) -> None:
        self.item, self.connection, self.start = item, connection, start
        self.last_used, self.last_change = 0.0, start

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def used(self, pid: int) -> float:
        used = cpu_seconds(pid)
        if used > self.last_used + 0.05:
            self.last_used, self.last_change = used, time.perf_counter()
        return used

    def idle(self) -> float:
        return time.perf_counter() - self.last_change
