# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A run in progress: its chunks of draws, display, files and end."""

from collections.abc import Callable
import math
import time
from typing import Any, NamedTuple
import warnings

import jax
import numpy as np
from numpyro.infer import MCMC
from tqdm.auto import tqdm

from numpyro_sgmcmc.data.rows_on_disk import failure_of, on_disk
from numpyro_sgmcmc.long_runs.draws import Draws
from numpyro_sgmcmc.long_runs.effective_size import ThinnedDraws, least_size, places
from numpyro_sgmcmc.long_runs.effective_size import with_draws as monitored_with
from numpyro_sgmcmc.long_runs.folder import RunFolder, of_all_processes, together
from numpyro_sgmcmc.long_runs.growing import RowsOfRun
from numpyro_sgmcmc.long_runs.interrupts import first_interrupt_waits
from numpyro_sgmcmc.long_runs.moments import Moments, summary_of
from numpyro_sgmcmc.long_runs.moments import with_draws as moments_with
from numpyro_sgmcmc.long_runs.program import Program, joined
from numpyro_sgmcmc.posterior.numpyro_private import arguments
from numpyro_sgmcmc.results.facts import attributes, stein_of

#: Seconds that a call of the program should take, and the most bytes of draws that wait for
#: writing.
_SECONDS, _WAITING_BYTES = 0.5, 32_000_000

#: Number of draws before targets are first checked, and the growth factor to the next check. Checks
#: take at most a small part of the time.
_FEWEST_DRAWS, _GROWTH, _SHARE = 64, 1.3, 0.05

#: Reasons to stop, by number.
_REASONS = ("", "max_time", "target_ess", "target_mcse", "interrupt")


class Limits(NamedTuple):
    """
    The limits at which a run stops early, and the interval of checkpoints; None is never.

    - **max_time** - seconds of this call.
    - **target_ess** - smallest bulk effective sample size.
    - **target_mcse** - largest Monte-Carlo standard error, in posterior standard deviations.
    - **checkpoint_every** - seconds between checkpoints.
    """

    max_time: float | None
    target_ess: float | None
    target_mcse: float | None
    checkpoint_every: float


class Progress(NamedTuple):
    """
    The progress of a run.

    - **done** - number of samples taken, warm-up included.
    - **states** - states of the chains.
    - **moments** - moments of all draws.
    - **monitored** - draws of a few parameters.
    - **seconds** - duration so far, in all processes.
    """

    done: int
    states: list
    moments: Moments
    monitored: ThinnedDraws | None
    seconds: float


def restored_progress(found: dict[str, Any], begun: Progress, kept: int, numbers: int) -> Progress:
    """
    The progress of the run of a checkpoint.

    :param begun: the progress of a run that begins.
    :param int kept: number of draws of each chain in these samples.
    :param int numbers: number of monitored values.
    :raises TypeError: if the progress does not fit this run.
    """
    moments, monitored = found["moments"], found["monitored"]

    def described(moments: Moments) -> Any:
        return jax.tree.map(lambda x: (np.shape(x), np.asarray(x).dtype), moments)

    shape = (len(next(iter(begun.moments.mean.values()))), numbers)
    is_alike = monitored is None or monitored.kept.shape[::2] == shape and monitored.stride > 0
    if described(moments) != described(begun.moments) or not is_alike:
        raise TypeError("its moments, or monitored draws, are of other sites or chains")
    if found["draws"] != kept:
        raise TypeError(f"its {found['done']:,} samples do not give {found['draws']:,} draws")
    return begun._replace(**{k: found[k] for k in ("done", "moments", "monitored", "seconds")})


class Running:
    """A run in progress, with its display, files and decisions."""

    def __init__(
        self,
        mcmc: MCMC,
        limits: Limits,
        folder: RunFolder,
        about: dict[str, Any],
        program: Program,
        draws: Draws,
        progress: Progress,
        *,
        total: int,
        skipped: int,
        dims: dict[str, list[str]],
        begin: float,
        rows: RowsOfRun | None,
    ) -> None:
        self.rows = rows
        self.mcmc, self.limits, self.folder = mcmc, limits, folder
        self.about, self.program = about, program
        self.draws, self.progress, self.dims = draws, progress, dims
        self.total, self.skipped, self.begin = total, skipped, begin
        self.before = progress.seconds
        self.where = places({k: x.shape for k, x in draws.sites_of(program.shapes).items()})
        self.committed = -math.inf
        #: seconds for a call without samples and for a sample, and samples of the latest call
        self.call, self.each, self.latest = 0.0, 0.0, 1
        #: number of draws and time of the next check of targets
        self.look, self.look_after = _FEWEST_DRAWS, 0.0
        self.judged = 0

    def advance(self) -> str | None:
        """Draw until the end, or return the reason for an early stop."""
        mcmc = self.mcmc
        if self.progress.done < self.total:
            self.commit()  # the tuning must not get lost
            self.program.compile()
            start = time.perf_counter()
            self.program(self.progress.states, 0, 1)
            self.call = time.perf_counter() - start
        hidden = not mcmc.progress_bar or jax.process_index() > 0
        done = self.progress.done
        with (
            first_interrupt_waits() as interrupted,
            tqdm(total=self.total, initial=done, unit="sample", disable=hidden) as bar,
        ):
            while self.progress.done < self.total:
                reason, count = _agreed(self.reason(interrupted), self.planned())
                if reason:
                    if reason == "interrupt":
                        self.say_interrupted()
                    return reason
                self.chunk(count)
                self.show(bar)
        return None

    def chunk(self, count: int) -> None:
        """Take about this many samples, by one call of the program."""
        progress, thinning = self.progress, self.mcmc.thinning
        left = self.skipped - progress.done
        if left > 0:
            number, kept = min(count, left), 0
        else:
            # samples since the latest draw
            gone = -left % thinning
            number = min(count, thinning - gone)
            kept = int(number == thinning - gone)
            if gone == 0 and kept:
                kept = min(count // thinning, self.program.capacity)
                number = kept * thinning
        single = thinning == 1
        segments, steps = (number, 1) if single else (max(1, kept), number // max(1, kept))
        start = time.perf_counter()
        try:
            states, draws = self.program(progress.states, segments, steps)
        except BaseException as error:
            # everything before the failed call is kept
            self.commit()
            if unreadable := failure_of(arguments(self.mcmc), error):
                raise unreadable from error
            raise
        took = time.perf_counter() - start
        # the fixed cost of a call says nothing about longer calls
        self.each, self.latest = max(took - self.call, 0.1 * took) / number, number
        moments, monitored = progress.moments, progress.monitored
        if kept:
            sites = self.draws.sites_of(draws)
            moments = moments_with(moments, sites)
            monitored = monitored_with(monitored, sites, self.where, self.target_size)
            self.draws.add(draws)
        seconds = self.before + time.monotonic() - self.begin
        self.progress = Progress(progress.done + number, states, moments, monitored, seconds)
        due = time.monotonic() - self.committed >= self.limits.checkpoint_every
        if due or self.draws.waiting_bytes > _WAITING_BYTES:
            self.commit()

    def planned(self) -> int:
        """The number of samples of the next call."""
        left = self.total - self.progress.done
        if not self.each:
            return 1
        seconds = _SECONDS
        if self.limits.max_time is not None:
            seconds = min(seconds, self.limits.max_time - (time.monotonic() - self.begin))
        return max(1, min(left, int(seconds / self.each), 10 * self.latest))

    @property
    def target_size(self) -> float:
        """The requested effective sample size, in the bulk or for means."""
        mcse = self.limits.target_mcse
        return max(self.limits.target_ess or 0.0, 0.0 if mcse is None else mcse**-2)

    def reason(self, interrupted: Callable[[], bool]) -> str:
        """The reason to stop now, or an empty word."""
        limits, progress = self.limits, self.progress
        if interrupted():
            return "interrupt"
        now = time.monotonic()
        if limits.max_time is not None and self.each and now - self.begin >= limits.max_time:
            return "max_time"
        draws, monitored = self.draws.count, progress.monitored
        if not self.target_size or monitored is None or draws < self.look or now < self.look_after:
            return ""
        word, ess, mcse = "", limits.target_ess, limits.target_mcse
        if ess is not None and least_size(monitored, "bulk") >= ess:
            word = "target_ess"
        elif mcse is not None and least_size(monitored, "mean") >= mcse**-2:
            word = "target_mcse"
        took = time.monotonic() - now
        self.look, self.look_after = int(_GROWTH * draws), now + took + took / _SHARE
        return word

    def show(self, bar: tqdm) -> None:
        """Show the progress bar with the kernel's text about the draws."""
        done = self.progress.done
        bar.set_description("warmup" if done <= self.skipped else "sample", refresh=False)
        kernel = self.mcmc.sampler
        if not bar.disable:
            state = self.progress.states[0]
            bar.set_postfix_str(_diagnostics(kernel, state), refresh=False)
        bar.update(done - bar.n)
        if self.draws.count >= 2 * self.judged or done == self.total:
            self.judged = max(self.draws.count, 1)
            if hasattr(kernel, "monitor"):
                kernel.monitor.judge(joined(self.progress.states))

    def say_interrupted(self) -> None:
        kept = "" if self.folder.path is None else " The same script continues from there."
        warnings.warn(
            f"The run was interrupted after {self.progress.done:,} of {self.total:,} samples,"
            f" which are kept.{kept}",
            stacklevel=4,
        )

    def commit(self) -> None:
        """Write the draws, in an order in which nothing is lost or visible in part."""
        self.committed = time.monotonic()
        if self.folder.path is None:
            return
        progress = self.progress
        if not self.folder.writes:
            self.draws.forget()
            return
        moments = summary_of(progress.moments, self.dims) if progress.moments.draws else None
        with self.folder.writing():
            self.draws.write(self.folder, moments)
            self.folder.save(
                self.about,
                draws=self.draws.count,
                state=joined(progress.states),
                tuning=getattr(self.mcmc.sampler, "tuning", None),
                rows=[rows.seen for rows in on_disk(arguments(self.mcmc))],
                known=self.rows,
                metadata=self.folder.store.metadata,
                manifest=self.draws.manifest,
                **{k: v for k, v in progress._asdict().items() if k != "states"},
            )

    def finish(self) -> None:
        """Write the facts of the run to the store."""
        if self.folder.writes:
            stein = stein_of(self.mcmc)
            facts = attributes(self.mcmc, stein, self.progress.seconds)
            self.folder.store.describe(
                {
                    name: value.item() if isinstance(value, np.generic) else value
                    for name, value in facts.items()
                    if not isinstance(value, float | np.floating) or math.isfinite(value)
                }
            )
        if self.folder.path is not None:
            self.commit()
            together()  # all processes must be able to read


def _agreed(reason: str, count: int) -> tuple[str, int]:
    """
    The next action of all processes: that of the first, unless one of them must stop.

    :param reason: the reason of this process to stop, or an empty word.
    :param count: the number of samples that it would take.
    """
    if jax.process_count() == 1:
        return reason, count
    everyone = of_all_processes([_REASONS.index(reason), count])
    return _REASONS[int(everyone[:, 0].max())], int(everyone[0, 1])


def _diagnostics(kernel: Any, state: Any) -> str:
    if hasattr(kernel, "monitor") or not np.ndim(getattr(state, "i", 0)):
        return kernel.get_diagnostics_str(state)
    return ""
