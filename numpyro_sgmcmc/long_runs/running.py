# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A run on its way: what it draws, shows, writes and decides, chunk by chunk."""

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

#: What a call of the program is to take, and the bytes of draws that wait to be written.
_SECONDS, _WAITING_BYTES = 0.5, 32_000_000

#: Targets are looked at after so many draws, and then whenever there are so many times more,
#: as long as that takes no more than a small part of the time.
_FEWEST_DRAWS, _GROWTH, _SHARE = 64, 1.3, 0.05

#: The reasons to stop, by number.
_REASONS = ("", "max_time", "target_ess", "target_mcse", "interrupt")


class Limits(NamedTuple):
    """
    When a run stops before its end, and how often it is written; None is never.

    - **max_time** - after so many seconds of this call.
    - **target_ess** - at this smallest bulk effective sample size.
    - **target_mcse** - at this largest Monte-Carlo standard error, in posterior standard
      deviations.
    - **checkpoint_every** - seconds between checkpoints.
    """

    max_time: float | None
    target_ess: float | None
    target_mcse: float | None
    checkpoint_every: float


class Progress(NamedTuple):
    """
    How far a run has come.

    - **done** - samples taken, warm-up included.
    - **states** - states of the chains.
    - **moments** - of all draws.
    - **monitored** - draws of a few parameters.
    - **seconds** - that it took so far, in all processes.
    """

    done: int
    states: list
    moments: Moments
    monitored: ThinnedDraws | None
    seconds: float


def restored_progress(found: dict[str, Any], begun: Progress, kept: int, numbers: int) -> Progress:
    """
    How far the run of a checkpoint has come.

    :param begun: a run that begins.
    :param int kept: draws of each chain of so many samples.
    :param int numbers: how many are monitored.
    :raises TypeError: if it is not that of this run.
    """
    moments, monitored = found["moments"], found["monitored"]

    def described(moments: Moments) -> Any:
        return jax.tree.map(lambda x: (np.shape(x), np.asarray(x).dtype), moments)

    shape = (len(next(iter(begun.moments.mean.values()))), numbers)
    is_alike = monitored is None or monitored.kept.shape[::2] == shape and monitored.stride > 0
    if described(moments) != described(begun.moments) or not is_alike:
        raise TypeError("its moments, or monitored draws, are of other sites or chains")
    if found["draws"] != kept:
        raise TypeError(f"{found['done']:,} samples are not {found['draws']:,} draws")
    return begun._replace(**{k: found[k] for k in ("done", "moments", "monitored", "seconds")})


class Running:
    """A run on its way; what it shows, writes and decides."""

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
        #: seconds for a call without samples, for a sample, and samples of the latest call
        self.call, self.each, self.latest = 0.0, 0.0, 1
        #: after how many draws, and when, the targets are looked at next
        self.look, self.look_after = _FEWEST_DRAWS, 0.0
        self.judged = 0

    def advance(self) -> str | None:
        """Draws until the end, or gives the reason to stop before."""
        mcmc = self.mcmc
        if self.progress.done < self.total:
            self.commit()  # what the tuning has found is not to be lost
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
        """About so many samples, by one call of the program."""
        progress, thinning = self.progress, self.mcmc.thinning
        left = self.skipped - progress.done
        if left > 0:
            number, kept = min(count, left), 0
        else:
            # of the way from one draw to the next
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
            # not what the failed call did, and everything before it
            self.commit()
            if unreadable := failure_of(arguments(self.mcmc), error):
                raise unreadable from error
            raise
        took = time.perf_counter() - start
        # what a call costs by itself says nothing of longer ones
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
        """How many samples the next call is to take."""
        left = self.total - self.progress.done
        if not self.each:
            return 1
        seconds = _SECONDS
        if self.limits.max_time is not None:
            seconds = min(seconds, self.limits.max_time - (time.monotonic() - self.begin))
        return max(1, min(left, int(seconds / self.each), 10 * self.latest))

    @property
    def target_size(self) -> float:
        """The effective sample size that is asked for, whatever it is of."""
        mcse = self.limits.target_mcse
        return max(self.limits.target_ess or 0.0, 0.0 if mcse is None else mcse**-2)

    def reason(self, interrupted: Callable[[], bool]) -> str:
        """Why to stop now, or an empty word."""
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
        """The progress bar, and what the kernel says of the draws."""
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
        kept = "" if self.folder.path is None else " The same script goes on where it was."
        warnings.warn(
            f"The run was interrupted after {self.progress.done:,} of {self.total:,} samples, which"
            f" are kept.{kept}",
            stacklevel=4,
        )

    def commit(self) -> None:
        """Writes what has been drawn, in an order in which nothing is lost or seen in part."""
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
        """The facts of the run go to the store."""
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
            together()  # so that all of them can read


def _agreed(reason: str, count: int) -> tuple[str, int]:
    """
    What all processes do next: what the first says, unless one of them is to stop.

    :param reason: why this process is to stop, or an empty word.
    :param count: how many samples it would take.
    """
    if jax.process_count() == 1:
        return reason, count
    everyone = of_all_processes([_REASONS.index(reason), count])
    return _REASONS[int(everyone[:, 0].max())], int(everyone[0, 1])


def _diagnostics(kernel: Any, state: Any) -> str:
    if hasattr(kernel, "monitor") or not np.ndim(getattr(state, "i", 0)):
        return kernel.get_diagnostics_str(state)
    return ""
