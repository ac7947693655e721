# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The anchor of a control variate that follows the chain."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_sgmcmc.kernels.chains import axes_of
from numpyro_sgmcmc.kernels.state import SGMCMCState
from numpyro_sgmcmc.posterior.control_variate import Anchor
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.target import Target


def with_anchor_moved(state: SGMCMCState, passes: float, target: Target) -> SGMCMCState:
    """The state with the anchor moved to the position, if a move is due."""
    centring = state.fixed.centring

    def move(z: Values, centring: Any) -> Anchor:
        here = target._replace(centring=centring)
        return here.anchor(here.centred.to_internal(z))

    if jnp.ndim(state.i) > 0:
        move = jax.vmap(move, (0, axes_of(state).fixed.centring))
    steps = state.fixed.layout.steps_per_sample
    every = max(1, round(passes / (target.minibatch_share * steps)))
    i = state.i.ravel()[0]  # equal in all chains
    anchor = lax.cond(
        ((i // steps) % every == 0) & (i > 0),
        lambda z, _: move(z, centring),
        lambda _, anchor: anchor,
        state.z,
        state.fixed.anchor,
    )
    return state._replace(fixed=state.fixed._replace(anchor=anchor))
