# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The Metropolis test of a sample on all rows, for methods that are exact by it."""

from jax import random
import jax.numpy as jnp

from numpyro_sgmcmc.kernels.method import Method
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState
from numpyro_sgmcmc.posterior.target import Target


def tested(
    method: Method,
    target: Target,
    fixed: ChainConstants,
    before: SGMCMCState,
    after: SGMCMCState,
) -> SGMCMCState:
    """The state after the Metropolis test of a sample: the new one or the old one."""
    change = target.change(fixed.metric, before.z, after.z)
    is_whole = after.monitor.nonfinite_steps == before.monitor.nonfinite_steps
    noise_key = random.split(after.rng_key, 3)[1]
    # no step uses this key
    key = random.fold_in(random.fold_in(noise_key, after.i), 1)
    return method.accept(before, after, jnp.where(is_whole, change, jnp.inf), key)
