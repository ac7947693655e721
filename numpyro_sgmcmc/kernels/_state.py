# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The state of a chain, and what it holds."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgmcmc.gradients import Observation
from numpyro_sgmcmc.kernels._reading import Block
from numpyro_sgmcmc.metric import Metric
from numpyro_sgmcmc.potentials import Anchor
from numpyro_sgmcmc.stein import SteinSums
from numpyro_sgmcmc.warmup import Tuning


@jax.tree_util.register_static
@dataclass(frozen=True)
class Steps:
    """A number of steps that is part of the program: with another one JAX traces anew."""

    count: int


class Tuned(NamedTuple):
    """
    What the tuning found, or what was given; the same for all chains.

    - **step_size** - step size, unless a schedule gives it.
    - **friction** - friction, or None for methods that have none.
    - **metric** - the metric in whose coordinates the chain moves.
    - **steps** - number of steps between two samples.
    """

    step_size: Array
    friction: Array | None
    metric: Metric
    steps: Steps

    @classmethod
    def of(cls, tuning: Tuning, dtype: Any) -> "Tuned":
        """As arrays of the data type of the position."""
        friction = None if tuning.friction is None else jnp.asarray(tuning.friction, dtype)
        step_size = jnp.asarray(tuning.step_size, dtype)
        return cls(step_size, friction, tuning.metric, Steps(tuning.steps_per_sample))


class SGMCMCState(NamedTuple):
    """
    State of a chain. Each field, and each field of ``dynamics`` by its own name, can be
    collected with ``mcmc.run(..., extra_fields=("step_size", "thermostat"))``, and so can
    ``kinetic_temperature`` for methods with momentum.

    - **i** - number of steps taken, warm-up included.
    - **z** - unconstrained values of the latent sites.
    - **dynamics** - what the method keeps besides the position, for instance the momentum.
    - **step_size** - step size of the latest step.
    - **minibatch_potential** - the minibatch potential at the latest gradient, a noisy
      estimate of the potential that is not of use for comparing draws; 0 before the first.
    - **nonfinite_steps** - number of steps undone because they were not finite.
    - **warmup_steps** - number of steps of the warm-up, after which nothing adapts.
    - **configurational_temperature** - the latest sample's share of the mean of the diagonal
      of the Stein matrix (:mod:`numpyro_sgmcmc.stein`): its mean over the draws is 1
      if they are as wide as the posterior; 0 in the warm-up, and NaN where minibatches are
      not independent, which this cannot judge.
    - **stein** - running sums for the Stein matrix.
    - **anchor** - of the control variate, or None.
    - **tuned** - step size, friction and metric.
    - **block** - minibatches of the next steps that have been read from disk, or None.
    - **rng_key** - random key of the chain; step ``i`` uses ``fold_in`` of ``i`` and keys split
      from it.
    """

    i: Array
    z: Any
    dynamics: Any
    step_size: Array
    minibatch_potential: Array
    nonfinite_steps: Array
    warmup_steps: Array
    configurational_temperature: Array
    stein: SteinSums
    anchor: Anchor | None
    tuned: Tuned
    block: Block | None
    rng_key: Array

    @property
    def friction(self) -> Any:
        """Friction :math:`A`, given or tuned."""
        return self.tuned.friction

    @property
    def kinetic_temperature(self) -> Array:
        """:math:`p^\\top p / d` at the end of the step, for methods with momentum."""
        return jnp.mean(self.momentum**2, axis=-1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dynamics, name)

    def __getitem__(self, key: Any) -> Any:
        # NumPyro looks a field up by name where no attribute has it: say what there is.
        if isinstance(key, str):
            fields = [*self._fields, *self.dynamics._fields]
            fields += ["kinetic_temperature"] if "momentum" in fields else []
            raise ValueError(f"The state has no field '{key}'; it has {', '.join(fields)}.")
        return tuple.__getitem__(self, key)


class Momentum(NamedTuple):
    """
    - **momentum** - momentum of every coordinate, shape (d,).
    """

    momentum: Array


#: A step of a method: the new state and what the gradient oracle said.
Step = tuple[SGMCMCState, Observation]
