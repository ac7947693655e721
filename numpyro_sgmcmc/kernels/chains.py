# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Several chains: their shared fields, and the layout of their states on devices."""

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_sgmcmc.data.sharding import EVERYWHERE, Shards
from numpyro_sgmcmc.kernels.state import ChainConstants, Monitored, SGMCMCState

#: Small fields that `MCMC` collects or may be asked for.
_COLLECTED = ("i", "z", "step_size")


def axes_of(state: SGMCMCState) -> SGMCMCState:
    """The :func:`jax.vmap` axes of a state of several chains, which share their constants."""
    shared = jnp.ndim(state.fixed.step_size) == 0
    # each chain has its own anchor if anchors move
    anchor_is_shared = shared and not _has_chains(state.fixed.anchor)
    return with_chains(0, None if shared else 0, None if anchor_is_shared else 0)


def axes_for(refresh_every: float | None) -> SGMCMCState:
    """The :func:`jax.vmap` axes of several new chains, each with its own anchor if anchors move."""
    return with_chains(0, None, None if refresh_every is None else 0)


def with_chains(chains: Any, fixed: Any, anchor: Any) -> SGMCMCState:
    """A state with one value in all fields, another in its constants, and a third in the anchor."""
    fields: dict[str, Any] = dict.fromkeys(SGMCMCState._fields, chains)
    constants = dict.fromkeys(ChainConstants._fields, fixed) | {"anchor": anchor}
    return SGMCMCState(**(fields | {"fixed": ChainConstants(**constants)}))


def _has_chains(anchor: Any) -> bool:
    return anchor is not None and jnp.ndim(anchor.potential) > 0


def layout_on(shards: Shards, state: SGMCMCState) -> Any:
    """The layout of a state on the devices."""
    if jnp.ndim(state.i) == 0:
        return EVERYWHERE
    chains = shards.of_chains
    axes = axes_of(state)
    places = [
        chains if axis == 0 else EVERYWHERE for axis in (axes.fixed.step_size, axes.fixed.anchor)
    ]
    return with_chains(chains, *places)


def placed(shards: Shards, state: SGMCMCState) -> SGMCMCState:
    """The state as it lies on the devices between samples."""
    specs = layout_on(shards, state)
    if shards.processes > 1 and isinstance(specs, SGMCMCState):
        # every process needs the fields that NumPyro collects, whichever process has the chain
        collected: dict[str, Any] = dict.fromkeys(_COLLECTED, EVERYWHERE)
        watched: dict[str, Any] = dict.fromkeys(Monitored._fields, EVERYWHERE)
        watched["stein"] = shards.of_chains
        specs = specs._replace(**collected, monitor=Monitored(**watched))
    elif isinstance(state.i, jax.core.Tracer):
        return state
    return shards.place(state, specs)


def check_chains(shards: Shards, chains: int, traced: bool) -> None:
    """
    Check that this number of chains can be laid over the devices.

    :raises ValueError: if the number of chains does not fit the devices, or the chains use the
        devices in another way.
    """
    if traced:
        raise ValueError(
            "The data are spread over devices, and chain_method='parallel' or a function such as"
            " `jax.vmap` would use these devices for chains. Use chain_method='vectorized'."
        )
    if chains % shards.chains:
        raise ValueError(
            f"The mesh has {shards.chains} parts for chains, and the number of chains in one"
            f" program is {chains}, no multiple. Use chain_method='vectorized' with a multiple of"
            f" {shards.chains} for `num_chains`, or a mesh without 'chains'."
        )


def check_traced(shards: Shards, state: SGMCMCState, args: tuple, kwargs: dict) -> None:
    """
    Check that data on several devices do not become constants of a compiled program.

    :raises ValueError: if each device would get all data as constants of its program.
    """
    spread = zip(jax.tree.leaves((args, kwargs)), shards.spread, strict=True)
    if isinstance(state.i, jax.core.Tracer) and any(
        here and not isinstance(leaf, jax.core.Tracer) for leaf, here in spread
    ):
        raise ValueError(
            "The data are spread over devices, but every device would get a copy of all rows in"
            " its program. Use `MCMC(..., jit_model_args=True)`, and bind arguments that Python"
            " needs, `functools.partial(model, batch_size=...)`."
        )
