# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
NumPyro's private names, all that are used and nowhere else.

``tests/posterior/test_host.py`` has a test for each of them, which notices when NumPyro changes
it.
"""

from collections.abc import Callable, Mapping
from copy import copy
import inspect
from types import SimpleNamespace
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from numpyro.infer import MCMC

from numpyro_sgmcmc.data.growing import row_count_of, trimmed


def asked_whether_it_is_initialised(kernel: Any) -> Any:
    """Decorates a kernel whose ``runtime`` knows whether its ``init`` has read a model."""
    # `MCMC` calls `init` again at each run, and throws the state away, where this is None
    kernel._sample_fn = property(lambda self: self.runtime.model if self.runtime.is_here else None)
    return kernel


def is_initialised(kernel: Any) -> bool:
    """Whether a kernel, of this package or another, has been initialised in this process."""
    return getattr(kernel, "_sample_fn", None) is not None


def shows_bars(kernel: Any) -> bool:
    """
    Whether the ``MCMC`` object that has called this kernel shows a progress bar; True where none
    has. A kernel is not told, and so this looks for the object among the callers.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, MCMC) and caller.sampler is kernel:
            return bool(caller.progress_bar)
        frame = frame.f_back
    return True


def arguments(mcmc: MCMC) -> tuple[tuple, dict]:
    """The arguments of the model in the latest run."""
    return trimmed((mcmc._args, mcmc._kwargs))


def half_life_of(mcmc: MCMC) -> float | None:
    """After how many rows one counts half in the latest run; None if no row is forgotten."""
    known = row_count_of((mcmc._args, mcmc._kwargs))
    return None if known is None or known.half_life is None else float(known.half_life)


def has_traced_arguments(mcmc: MCMC) -> bool:
    """Whether it was made with ``jit_model_args=True``."""
    return mcmc._jit_model_args


def view_of(
    mcmc: MCMC,
    model: Callable,
    values: Mapping[str, Any],
    args: tuple,
    kwargs: dict,
    settings: Mapping[str, Any] = {},
) -> MCMC:
    """
    A copy of a run with another model, other values of the samples and other arguments, for
    ArviZ, which is given nothing else. The copy cannot be run.

    :param settings: of a kernel in the place of its own.
    """
    view = copy(mcmc)
    # ArviZ takes the number of leapfrog steps for the trees of NUTS
    depth = getattr(mcmc.sampler, "_max_tree_depth", None)
    view.sampler = SimpleNamespace(
        model=model, run_info=dict(settings), tuning=None, _max_tree_depth=depth
    )
    view._args, view._kwargs = args, kwargs
    view._states = mcmc._states | {mcmc._sample_field: dict(values)}
    view._states_flat = None
    return view


def with_draws(mcmc: MCMC, chosen: Any) -> MCMC:
    """A copy of a run with some of its draws, by their numbers. The copy cannot be run."""
    view = copy(mcmc)
    view._states = jax.tree.map(lambda x: x[:, chosen], dict(mcmc._states))
    view._states_flat = None
    return view


class HostedRun(MCMC):
    """``MCMC`` for a subclass that has a loop of its own and keeps the draws elsewhere."""

    def stored_draws(self) -> dict[str, Any] | None:
        """What was collected, by field, shape ``(chains, draws, ...)``; None of no run."""
        raise NotImplementedError

    def begin(self, args: tuple, kwargs: dict) -> None:
        """A run of the model with these arguments."""
        self._args, self._kwargs = args, kwargs
        self._states = self._states_flat = None

    def end(self, state: Any) -> None:
        """The run has ended in this state."""
        self._last_state = state
        self._set_collection_params()

    @property
    def only_warms_up(self) -> bool:
        """Whether the run is that of ``warmup()``."""
        return self._collection_params["phase"] == "warmup"

    @property
    def warmup_bounds(self) -> tuple[int, int]:
        """After how many samples of the warm-up they are kept, and after how many it ends."""
        return self._collection_params["lower"], self._collection_params["upper"]

    @property
    def fields(self) -> tuple[str, tuple[str, ...]]:
        """The field of the sample, and those that are collected besides."""
        return self._sample_field, tuple(self._default_fields)

    @property
    def _states(self) -> Any:
        # what `MCMC` keeps in memory is read when it is asked for
        given = self.__dict__.get("_given_states")
        return self.stored_draws() if given is None else given

    @_states.setter
    def _states(self, states: Any) -> None:
        self.__dict__["_given_states"] = states

    def _get_states_flat(self) -> Any:
        states = self._states if self._states_flat is None else None
        if states is None:
            return self._states_flat

        def flat(x: Array) -> Array:
            return jnp.reshape(x, (-1, *x.shape[2:]))

        return jax.tree.map(flat, states)
