# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What a run says of itself while it goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
import inspect
import math
import time
import warnings

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np
from numpyro.util import fori_collect

from numpyro_sgmcmc.kernels._state import SGMCMCState
from numpyro_sgmcmc.stein import (
    Estimates,
    SteinReport,
    SteinSums,
    advice,
    estimates_at_pairs,
    has_paired_batches,
    report_of_estimates,
    stein_report,
)

#: Formatting values that live on the device waits for them: not more often than this.
_SECONDS_BETWEEN_DIAGNOSTICS = 0.5

#: Under a progress bar a run is first judged at this sample, and then whenever it has doubled.
_FEWEST_CALLS = 64

#: A run is judged several times before its end, and then not before so many samples.
_ERRORS_BEFORE_THE_END, _FEWEST_SAMPLES = 4.0, 500

#: When something was last written into the progress bar, and what.
NOTHING_WRITTEN = (-math.inf, "")


class Judging:
    """
    The part of a kernel that warns, while chains run, of draws that have another law than the
    posterior, and writes into the progress bar.
    """

    def _start_judging(self, num_warmup: int = 0) -> None:
        self._diagnostics = NOTHING_WRITTEN
        self._calls = -num_warmup  # of the progress bar; the warm-up ends at 0
        self._has_warned = False
        self._is_judged_outside = False

    @contextmanager
    def judged_outside(self) -> Iterator[None]:
        """Samples that are traced within it are for a loop that calls :meth:`judge` itself."""
        self._is_judged_outside = True
        try:
            yield
        finally:
            self._is_judged_outside = False

    def judge(self, state: SGMCMCState) -> None:
        """Warns, once a run, if the draws so far have another law than the posterior."""
        if not self._has_warned:
            self._warns_of(stein_report(state.stein))

    def _judged(self, state: SGMCMCState) -> SGMCMCState:
        """The state as it is, in a program that judges the run at 64, 128, ... samples."""
        if self._is_judged_outside:
            return state
        loop, sums = _loop_of_numpyro(), state.stein
        if loop == "bar" and jnp.ndim(state.i) == 0:
            return state  # which `get_diagnostics_str` judges
        due = has_paired_batches(sums)
        if loop == "compiled":
            # a callback with an effect makes every step slower by a microsecond; one with a result
            # does not, and would wait for ever in a queue of programs that Python calls
            length = lax.cond(due, self._judged_length, lambda sums: sums.length, sums)
            return state._replace(stein=sums._replace(length=length))

        def judge(sums: SteinSums) -> None:
            # under `vmap` both branches run
            jax.debug.callback(self._judge, has_paired_batches(sums), estimates_at_pairs(sums))

        lax.cond(due, judge, lambda _: None, sums)
        return state

    def _judged_length(self, sums: SteinSums) -> Array:
        """The length of the batches as it is, after a callback that judges the run."""

        def judge(due: Array, found: Estimates, length: Array) -> Array:
            self._judge(due, found)
            return length

        shape = jax.ShapeDtypeStruct(sums.length.shape, sums.length.dtype)
        found = has_paired_batches(sums), estimates_at_pairs(sums), sums.length
        return jax.pure_callback(judge, shape, *found, vmap_method="sequential")

    def _judge(self, due: Array, found: Estimates) -> None:
        """What a compiled loop calls."""
        if not self._has_warned and np.all(due):
            self._warns_of(report_of_estimates(found))

    def get_diagnostics_str(self, state: SGMCMCState) -> str:
        written, text = self._diagnostics
        self._calls += 1
        due = self._calls >= _FEWEST_CALLS and self._calls.bit_count() == 1  # 64, 128, ...
        if due or time.monotonic() - written > _SECONDS_BETWEEN_DIAGNOSTICS:
            # of one chain, or the mean of several
            text = f"step size {float(np.mean(state.step_size)):.2e}"
            found = stein_report(state.stein)
            if found is not None:
                text += f", {found.summary()}"
            text += f", minibatch potential {float(np.mean(state.minibatch_potential)):.4g}"
            text += self.warnings(state)
            if self._warns_of(found):
                text += ", NOT THE LAW OF THE POSTERIOR"
            self._diagnostics = (time.monotonic(), text)
        return text

    def warnings(self, state: SGMCMCState) -> str:
        """What the progress bar is to say of a state that cannot be trusted."""
        undone = int(np.sum(state.nonfinite_steps))
        return f", {undone} NON-FINITE STEPS UNDONE: reduce the step size" if undone else ""

    def _warns_of(self, found: SteinReport | None) -> bool:
        """Warns, once a run, of draws that have another law than the posterior."""
        if found is None or found.samples < _FEWEST_SAMPLES:
            return False
        problem = found.problem(_ERRORS_BEFORE_THE_END)
        if problem and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"After {found.samples} samples: {advice(problem)}", stacklevel=3)
        return problem is not None


def _loop_of_numpyro() -> str | None:
    """
    The loop of NumPyro that traces a sample: ``"bar"``, in Python, under a progress bar;
    ``"compiled"``; or None where none does, as in a loop of the user's own.

    A callback in the program that the loop under a bar calls makes every call slower by 0.6 ms.
    NumPyro shows the diagnostics of a single chain there, so that none is needed.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not fori_collect.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    # a kernel is not told which loop it is in; several chains on devices have a compiled one
    seen = frame.f_locals
    return "bar" if seen["progbar"] and seen.get("num_chains", 1) == 1 else "compiled"
