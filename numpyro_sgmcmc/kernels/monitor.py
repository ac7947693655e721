# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Text for the progress bar during a run, and warnings about the run so far."""

import math
import time
import warnings

import numpy as np

from numpyro_sgmcmc.kernels.identity import check_state
from numpyro_sgmcmc.kernels.state import SGMCMCState
from numpyro_sgmcmc.stein import SteinReport, advice, problem_of_undone_steps, stein_report

#: Seconds between two looks, because each one waits for the values on the device.
_SECONDS_BETWEEN_TEXTS = 0.5
#: Seconds of a pause after which the run may be another one, on other data.
_SECONDS_BETWEEN_RUNS = 0.02

#: Sample at which a run under a progress bar is first judged; then at each doubling.
_FEWEST_CALLS = 64

_LONG = 30.0  #: seconds of a run before the warning that it is slower than the tuning measured
_MUCH_LONGER = 4.0  #: ratio of the times for this warning
#: Longest wait between two samples that counts, in samples or one second: a longer one may be a
#: user's pause between two runs.
_LONGEST_WAIT = 20

_ERRORS_BEFORE_THE_END = 4.0  #: threshold of a bias, in standard errors
_FEWEST_SAMPLES = 500  #: fewest samples of a run that is judged


class Monitor:
    """
    The online checks of a run, which look at states between compiled programs.

    No part of the monitor is in a compiled loop. A Python loop calls it: the loop of ``MCMC`` under
    a progress bar, of :class:`~numpyro_sgmcmc.LongRun` or of the tuning. Without such a loop
    ``summary`` and ``to_arviz`` judge the sums in the state at the end.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self, num_warmup: int = 0) -> None:
        """Start the checks of a new run."""
        self._written, self._text = -math.inf, ""
        self._calls = -num_warmup  # calls of the progress bar; the warm-up ends at 0
        self._has_warned = False
        self._before, self._taken, self._texts = math.inf, 0.0, 0

    def judge(self, state: SGMCMCState) -> None:
        """Warn, once a run, if the law of the draws so far differs from the posterior."""
        if not self._has_warned:
            self._warns_of(stein_report(state.monitor.stein))

    def text(self, state: SGMCMCState, seconds: float = 0.0, data: str | None = None) -> str:
        """
        The text of the progress bar, for one chain or as the mean of several.

        :param float seconds: the time for a sample of one chain that the tuning expects, if known.
        :param data: the fingerprint of the data of the run, or None if they are not known.
        :raises ValueError: if the anchor of the state belongs to other data.
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
