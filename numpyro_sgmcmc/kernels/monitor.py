# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What a run says of itself while it goes on: text for a progress bar, and a warning."""

import math
import time
import warnings

import numpy as np

from numpyro_sgmcmc.kernels.identity import check_state
from numpyro_sgmcmc.kernels.state import SGMCMCState
from numpyro_sgmcmc.stein import SteinReport, advice, problem_of_undone_steps, stein_report

#: Looking at values that live on the device waits for them: not more often than this.
_SECONDS_BETWEEN_TEXTS = 0.5
#: After such a pause the run may be another one, on other data.
_SECONDS_BETWEEN_RUNS = 0.02

#: Under a progress bar a run is first judged at this sample, and then whenever it has doubled.
_FEWEST_CALLS = 64

_LONG = 30.0  #: seconds of a run before it says that it takes longer than the tuning measured
_MUCH_LONGER = 4.0  #: how many times longer, for that
#: A wait between two samples counts for so many samples at most, or for a second: it may be that of
#: a user between two runs.
_LONGEST_WAIT = 20

_ERRORS_BEFORE_THE_END = 4.0  #: standard errors of a bias, of a run that is judged several times
_FEWEST_SAMPLES = 500  #: samples before a run is judged


class Monitor:
    """
    The online checks of a run: it looks at states, between the programs that make them.

    Nothing of it is in a compiled loop. A loop in Python, that of ``MCMC`` under a progress bar,
    of :class:`~numpyro_sgmcmc.LongRun` or of the tuning, calls it; where there is none, the sums
    in the state are judged at the end, by ``summary`` and ``to_arviz``.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self, num_warmup: int = 0) -> None:
        """A run begins."""
        self._written, self._text = -math.inf, ""
        self._calls = -num_warmup  # of the progress bar; the warm-up ends at 0
        self._has_warned = False
        self._before, self._taken, self._texts = math.inf, 0.0, 0

    def judge(self, state: SGMCMCState) -> None:
        """Warns, once a run, if the draws so far have another law than the posterior."""
        if not self._has_warned:
            self._warns_of(stein_report(state.monitor.stein))

    def text(self, state: SGMCMCState, seconds: float = 0.0, data: str | None = None) -> str:
        """
        What a progress bar is to say, of one chain or as the mean of several.

        :param float seconds: those that the tuning expects of a sample of one chain, if known.
        :param data: tells the data of the run from others, or None if they are not known.
        :raises ValueError: if the state has the anchor of other data.
        """
        self._calls += 1
        self._texts += 1
        now, each = time.monotonic(), seconds * np.size(state.step_size)
        waited = max(now - self._before, 0.0)
        self._taken += min(waited, max(1.0, _LONGEST_WAIT * each))
        self._before = now
        if waited > _SECONDS_BETWEEN_RUNS or not self._text:
            check_state(state, data)
        due = self._calls >= _FEWEST_CALLS and self._calls.bit_count() == 1  # 64, 128, ...
        if due or now - self._written > _SECONDS_BETWEEN_TEXTS:
            monitored = state.monitor
            self._text = f"step size {float(np.mean(state.step_size)):.2e}"
            report = stein_report(monitored.stein)
            if report is not None:
                self._text += f", {report.summary()}"
            potential = float(np.mean(monitored.minibatch_potential))
            self._text += f", minibatch potential {potential:.4g}"
            undone = int(np.sum(monitored.nonfinite_steps))
            if not np.all(np.asarray(state.step_size) > 0):
                self._text += f", {undone} STEPS UNDONE: the step size schedule is not positive"
            elif problem_of_undone_steps(state):
                self._text += f", {undone} NON-FINITE STEPS UNDONE: reduce the step size"
            elif undone:
                self._text += f", {undone} steps undone in passing"
            used = getattr(state.dynamics, "friction_used", None)
            if used is not None and (worst := float(np.max(used))) > 1:
                self._text += (
                    f", NOISE OF THE GRADIENT {worst:.2g} TIMES WHAT THE FRICTION DISSIPATES"
                )
            if self._warns_of(report):
                self._text += ", BIASED"
            taken, expected = self._taken, each * self._texts
            if seconds and taken > max(_LONG, _MUCH_LONGER * expected):
                self._text += f", {taken / expected:.0f} TIMES AS LONG AS AFTER THE TUNING"
            self._written = time.monotonic()
        return self._text

    def _warns_of(self, found: SteinReport | None) -> bool:
        if found is None or found.samples < _FEWEST_SAMPLES:
            return False
        problem = found.problem(_ERRORS_BEFORE_THE_END)
        if problem and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"After {found.samples} samples: {advice(problem)}", stacklevel=4)
        return problem is not None
