# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Access to NumPyro's private names, all of which are used here and nowhere else.

``tests/posterior/test_host.py`` has a test for each name, which notices when a version of NumPyro
changes it.
"""

from collections.abc import Callable, Mapping
from copy import copy
import inspect
from types import SimpleNamespace
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpyro
from numpyro.distributions import ExpandedDistribution, Independent, MaskedDistribution
from numpyro.infer import MCMC

from numpyro_sgmcmc.data.growing import row_count_of, trimmed


def asked_whether_it_is_initialised(kernel: Any) -> Any:
    """Decorate a kernel class whose ``runtime`` knows whether its ``init`` has read a model."""
    # `MCMC` calls `init` again at each run, and throws the state away, if this is None
    kernel._sample_fn = property(lambda self: self.runtime.model if self.runtime.is_here else None)
    return kernel


def is_initialised(kernel: Any) -> bool:
    """Return whether a kernel of any package has been initialised in this process."""
    return getattr(kernel, "_sample_fn", None) is not None


def shows_bars(kernel: Any) -> bool:
    """
    Return whether the ``MCMC`` object that called this kernel shows a progress bar.

    It is True if no ``MCMC`` object called it. A kernel is not told, so the object is searched
    among the callers.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, MCMC) and caller.sampler is kernel:
            return bool(caller.progress_bar)
        frame = frame.f_back
    return True


def free_loops() -> None:
    """
    Free the programs of all runs without a progress bar.

    ``MCMC`` compiles its loop anew for each of these, and JAX keeps the programs of thousands.
    """
    loop = getattr(numpyro.util, "_fori_collect_loop", None)
    if loop is not None:
        # JAX finds the programs by these arguments
        program: Any = jax.jit(loop, static_argnums=(0, 1), donate_argnums=3)
        program.clear_cache()


def arguments(mcmc: MCMC) -> tuple[tuple, dict]:
    """Return the arguments of the model in the latest run."""
    return trimmed((mcmc._args, mcmc._kwargs))


def half_life_of(mcmc: MCMC) -> float | None:
    """Return the half-life of rows in the latest run, or None if no row is forgotten."""
    known = row_count_of((mcmc._args, mcmc._kwargs))
    return None if known is None or known.half_life is None else float(known.half_life)


def has_traced_arguments(mcmc: MCMC) -> bool:
    """Return whether an ``MCMC`` object was made with ``jit_model_args=True``."""
    return mcmc._jit_model_args


def is_seen(site: dict[str, Any]) -> Array:
    """Return which values of an observed site are not masked, in the shape of the site."""
    fn, shape = site["fn"], site["fn"].shape()
    seen = jnp.ones(shape, bool)
    while isinstance(fn, ExpandedDistribution | Independent | MaskedDistribution):
        if isinstance(fn, MaskedDistribution):
            mask = jnp.broadcast_to(fn._mask, fn.batch_shape)
            seen &= jnp.broadcast_to(mask.reshape(*mask.shape, *(1,) * fn.event_dim), shape)
        fn = fn.base_dist
    return seen


def view_of(
    mcmc: MCMC,
    model: Callable,
    values: Mapping[str, Any],
    args: tuple,
    kwargs: dict,
    settings: Mapping[str, Any] = {},
) -> MCMC:
    """
    Return a copy of a run for ArviZ, with another model, other samples and other arguments.

    The copy cannot be run.

    :param settings: settings in the place of the kernel's own.
    """
    view = copy(mcmc)
    # ArviZ takes the number of leapfrog steps for the depth of a NUTS tree
    depth = getattr(mcmc.sampler, "_max_tree_depth", None)
    view.sampler = SimpleNamespace(
        model=model, run_info=dict(settings), tuning=None, _max_tree_depth=depth
    )
    view._args, view._kwargs = args, kwargs
    view._states = mcmc._states | {mcmc._sample_field: dict(values)}
    view._states_flat = None
    return view


def with_draws(mcmc: MCMC, chosen: Any) -> MCMC:
    """Return a copy of a run with some of its draws, by their numbers, which cannot be run."""
    view = copy(mcmc)
    view._states = jax.tree.map(lambda x: x[:, chosen], dict(mcmc._states))
    view._states_flat = None
    return view


class HostedRun(MCMC):
    """Base class of ``MCMC`` subclasses with a loop of their own and draws kept elsewhere."""

    def stored_draws(self) -> dict[str, Any] | None:
        """Return the collected draws by field, shape ``(chains, draws, ...)``, or None."""
        raise NotImplementedError

    def begin(self, args: tuple, kwargs: dict) -> None:
        """Begin a run of the model with these arguments."""
        self._args, self._kwargs = args, kwargs
        self._states = self._states_flat = None

    def end(self, state: Any) -> None:
        """End a run in this state."""
        self._last_state = state
        self._set_collection_params()

    @property
    def only_warms_up(self) -> bool:
        """True if the run is one of ``warmup()``."""
        return self._collection_params["phase"] == "warmup"

    @property
    def warmup_bounds(self) -> tuple[int, int]:
        """The numbers of samples after which samples of the warm-up are kept, and it ends."""
        return self._collection_params["lower"], self._collection_params["upper"]

    @property
    def fields(self) -> tuple[str, tuple[str, ...]]:
        """The field of the sample, and the other fields that are collected."""
        return self._sample_field, tuple(self._default_fields)

    @property
    def _states(self) -> Any:
        # draws that `MCMC` keeps in memory are read on demand
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


def is_scanned(site: dict) -> bool:
    """Return True for a site in the body of a ``scan``, which NumPyro records after the loop."""
    # no public part of a site says so: its values are set before any handler sees it
    return "_control_flow_done" in site
