# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The state of a chain: what a step changes, what it does not, and what is watched."""

from collections.abc import Hashable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgmcmc.data.strata import Strata
from numpyro_sgmcmc.gradients.estimators import Evaluation
from numpyro_sgmcmc.kernels.replicas import HotReplicas
from numpyro_sgmcmc.posterior.control_variate import Anchor
from numpyro_sgmcmc.posterior.metric import Metric
from numpyro_sgmcmc.posterior.prefetch import Prefetched
from numpyro_sgmcmc.posterior.reparam import Coordinates
from numpyro_sgmcmc.stein import SteinSums

#: Fields by the names that they, or their like, have in other kernels.
_MEANT = {
    "potential_energy": "minibatch_potential",
    "energy": "minibatch_potential",
    "hamiltonian": "minibatch_potential",
    "lp": "minibatch_potential",
    "adapt_state.step_size": "step_size",
    "learning_rate": "step_size",
    "divergences": "diverging",
    "r": "momentum",
    "xi": "thermostat",
}


@jax.tree_util.register_static
@dataclass(frozen=True)
class StaticConfig:
    """
    Facts that are part of the compiled program: with others JAX traces anew.

    - **steps_per_sample** - number of steps between two samples.
    - **sites** - number of parameters of each latent site, in the order of their names.
    - **noise** - how the covariance of the gradient's noise is estimated, a
      :class:`~numpyro_sgmcmc.gradients.noise_estimate.RunningCovariance`, or None.
    - **integrator** - the word for the integrator, of methods that have several.
    - **model** - facts of the model, what it has from elsewhere than its arguments among them.
    - **rule** - of integrals over latent variables of groups
      (:func:`~numpyro_sgmcmc.posterior.quadrature.log_integral`).
    """

    steps_per_sample: int
    sites: tuple[int, ...]
    noise: Any = None
    integrator: str = ""
    model: Hashable = None
    rule: str = "step"


class RowProgress(NamedTuple):
    """
    Which rows the chains know, where they keep coming.

    - **rows**, **digest** - as of :class:`~numpyro_sgmcmc.data.growing.RowCount`.
    - **before** - how many there were before the latest change.
    - **shift** - how far it has moved the mode, in the coordinates and as a part of what chance
      explains, :math:`(N' / N - 1)^{-1/2} L'^{-1} (m' - m)`, shape (d,): standard normal numbers if
      new rows have the law of the old ones and that is the model's. NaN where it is not known.
    - **worth** - as how many rows those count together that the metric is of.
    """

    rows: Array
    digest: Array
    before: Array
    shift: Array
    worth: Array


class ChainConstants(NamedTuple):
    """
    What was decided before the chains started: the same for every step, and for every chain unless
    each has a metric of its own, around members of an ensemble.

    - **step_size** - step size, unless a schedule gives it.
    - **friction** - friction :math:`A`, or None for methods that have none.
    - **metric** - the metric in whose coordinates the chain moves.
    - **variances** - the diagonal of :math:`L L^\\top` of the metric, shape (d,).
    - **warmup_steps** - number of steps of the warm-up, after which nothing adapts.
    - **anchor** - of the control variate, or None; one for each chain if it moves.
    - **data** - tells the data of the anchor from others, shape (4,).
    - **strata** - of the rows by plate, where rows are not drawn alike.
    - **centring** - the coordinates of hierarchies, those of the metric and the anchor.
    - **constants** - what the method has decided for this model.
    - **layout** - facts that are part of the program.
    - **known** - which rows the chains know, where they keep coming; or None.
    """

    step_size: Array
    friction: Any
    metric: Metric
    variances: Array
    warmup_steps: Array
    anchor: Anchor | None
    data: Array
    strata: dict[str, Strata]
    centring: dict[str, Coordinates]
    constants: Any
    layout: StaticConfig
    known: RowProgress | None = None

    @property
    def rule(self) -> str:
        return self.layout.rule


class Monitored(NamedTuple):
    """
    What a chain tells of itself.

    - **minibatch_potential** - the minibatch potential at the latest gradient, a noisy
      estimate of the potential that is not of use for comparing draws; 0 before the first.
    - **nonfinite_steps** - number of steps undone because they were not finite or, of a tuned
      kernel, led to a momentum that does not occur.
    - **stay** - number of steps undone since the latest that was not.
    - **longest_stay** - the largest such number so far.
    - **diverging** - whether a step of the latest sample was.
    - **configurational_temperature** - the latest sample's share of the mean of the diagonal
      of the Stein matrix (:mod:`numpyro_sgmcmc.stein`): its mean over the draws is 1
      if they are as wide as the posterior; 0 in the warm-up, and NaN where minibatches are
      not independent, which this cannot judge.
    - **stein** - running sums for the Stein matrix.
    """

    minibatch_potential: Array
    nonfinite_steps: Array
    stay: Array
    longest_stay: Array
    diverging: Array
    configurational_temperature: Array
    stein: SteinSums


class SGMCMCState(NamedTuple):
    """
    State of a chain. Each field, and each field of ``dynamics`` and ``monitor`` by its own name,
    can be collected with ``mcmc.run(..., extra_fields=("step_size", "thermostat"))``, and so can
    ``kinetic_temperature`` for methods with momentum.

    - **i** - number of steps taken, warm-up included; after :math:`2^{31}` of them it goes on from
      :math:`2^{30}`, with another key.
    - **z** - unconstrained values of the latent sites; within a step the position, a vector of
      shape (d,) in the coordinates of the metric.
    - **dynamics** - what the method keeps besides the position, for instance the momentum.
    - **step_size** - step size of the latest step.
    - **monitor** - what the chain tells of itself, a :class:`Monitored`.
    - **fixed** - what was decided before the chains started, a :class:`ChainConstants`.
    - **rng_key** - random key of the chain; step ``i`` uses ``fold_in`` of ``i`` and keys split
      from it.
    - **prefetched** - minibatches of the next steps that have been read from disk, or None.
    - **replicas** - the chain's replicas at higher temperatures, or None.
    """

    i: Array
    z: Any
    dynamics: Any
    step_size: Array
    monitor: Monitored
    fixed: ChainConstants
    rng_key: Array
    prefetched: Prefetched | None = None
    replicas: HotReplicas | None = None

    def __getitem__(self, key: Any) -> Any:
        """A part of the state by its name, as NumPyro looks up what it is to collect."""
        if not isinstance(key, str):
            return tuple.__getitem__(self, key)
        named = zip(getattr(self.dynamics, "_fields", ()), self.dynamics, strict=True)
        parts = self.monitor._asdict() | dict(named)
        if self.replicas is not None:
            parts["exchange_prob"] = self.replicas.exchange_prob
        if key in parts:
            return parts[key]
        if key == "kinetic_temperature" and "momentum" in parts:
            return jnp.mean(parts["momentum"] ** 2, axis=-1)
        meant = _MEANT.get(key) or next(iter(get_close_matches(key, self.names, 1)), None)
        hint = f"Perhaps '{meant}' is meant. " if meant in self.names else ""
        raise ValueError(
            f"The state has no field '{key}'. {hint}It has {', '.join(self.names)}. Run again with"
            " other `extra_fields`: what was tuned is kept."
        )

    @property
    def names(self) -> list[str]:
        """What can be collected and is a number, or an array of numbers, in each sample."""
        names = ["z", "step_size", *getattr(self.dynamics, "_fields", ())]
        names += [name for name in self.monitor._fields if name != "stein"]
        names += [] if self.replicas is None else ["exchange_prob"]
        return names + (["kinetic_temperature"] if "momentum" in names else [])


#: A step of a method: the new state and the evaluation of the gradient.
Step = tuple[SGMCMCState, Evaluation]
