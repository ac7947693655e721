# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The state of a chain: variables that a step changes, constants, and monitored values."""

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
from numpyro_sgmcmc.posterior.coordinates import AnyCoordinates
from numpyro_sgmcmc.posterior.metric import Metric
from numpyro_sgmcmc.posterior.prefetch import Prefetched
from numpyro_sgmcmc.stein import SteinSums

#: Fields by the names of similar fields in other kernels.
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
    Static facts of the compiled program, for which JAX traces anew when they change.

    - **steps_per_sample** - number of steps between two samples.
    - **sites** - number of parameters of each latent site, in the order of their names.
    - **noise** - estimator of the covariance of the gradient noise, a
      :class:`~numpyro_sgmcmc.gradients.noise_estimate.RunningCovariance`, or None.
    - **integrator** - the name of the integrator, for methods with several.
    - **model** - facts of the model, captured arrays included.
    - **rule** - quadrature rule of integrals over latent variables of groups
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
    The rows that the chains know, for data with growing rows.

    - **rows**, **digest** - fields of :class:`~numpyro_sgmcmc.data.growing.RowCount`.
    - **before** - number of rows before the latest change.
    - **shift** - shift of the mode by this change, in the coordinates and in units of its standard
      deviation, :math:`(N' / N - 1)^{-1/2} L'^{-1} (m' - m)`, shape (d,). These are standard normal
      numbers if old and new rows have the law of the model. NaN where it is not known.
    - **worth** - total weight, in rows, of the rows behind the metric.
    """

    rows: Array
    digest: Array
    before: Array
    shift: Array
    worth: Array


class ChainConstants(NamedTuple):
    """
    The constants of the chains, decided before they start.

    All steps share them. All chains share them too, unless each chain has its own metric, around a
    member of an ensemble.

    - **step_size** - step size, unless a schedule gives it.
    - **friction** - friction :math:`A`, or None for methods that have none.
    - **metric** - the metric in whose coordinates the chain moves.
    - **variances** - the diagonal of :math:`L L^\\top` of the metric, shape (d,).
    - **warmup_steps** - number of steps of the warm-up, after which nothing adapts.
    - **anchor** - the anchor of the control variate, or None; one for each chain if it moves.
    - **data** - digest of the data of the anchor, shape (4,).
    - **strata** - strata of the rows by plate, or none.
    - **centring** - the coordinates of hierarchies, used by the metric and the anchor.
    - **constants** - constants of the method for this model.
    - **layout** - static facts of the compiled program.
    - **known** - the rows that the chains know, for growing rows; or None.
    """

    step_size: Array
    friction: Any
    metric: Metric
    variances: Array
    warmup_steps: Array
    anchor: Anchor | None
    data: Array
    strata: dict[str, Strata]
    centring: dict[str, AnyCoordinates]
    constants: Any
    layout: StaticConfig
    known: RowProgress | None = None

    @property
    def rule(self) -> str:
        return self.layout.rule


class Monitored(NamedTuple):
    """
    The monitored values of a chain.

    - **minibatch_potential** - the minibatch potential at the latest gradient; 0 before the first.
      It is too noisy for comparing draws.
    - **nonfinite_steps** - number of steps undone because they were not finite or, for a tuned
      kernel, led to an implausible momentum.
    - **stay** - number of undone steps since the latest valid one.
    - **longest_stay** - the largest value of ``stay`` so far.
    - **diverging** - whether a step of the latest sample was undone.
    - **configurational_temperature** - the latest sample's share of the mean of the diagonal of the
      Stein matrix (:mod:`numpyro_sgmcmc.stein`). Its mean over the draws is 1 if they are as wide
      as the posterior. It is 0 in the warm-up, and NaN if minibatches are not independent.
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
    The state of a chain.

    Each field can be collected with ``mcmc.run(..., extra_fields=("step_size", "thermostat"))``.
    Fields of ``dynamics`` and ``monitor`` can be collected by their own names. Methods with
    momentum also have ``kinetic_temperature``.

    - **i** - number of steps taken, warm-up included. After :math:`2^{31}` steps it goes on from
      :math:`2^{30}`, with another key.
    - **z** - unconstrained values of the latent sites. Within a step it is the position, a vector
      of shape (d,) in the coordinates of the metric.
    - **dynamics** - the method's variables besides the position, for instance the momentum.
    - **step_size** - step size of the latest step.
    - **monitor** - the monitored values, a :class:`Monitored`.
    - **fixed** - the constants of the chains, a :class:`ChainConstants`.
    - **rng_key** - random key of the chain. Step ``i`` uses ``fold_in`` of ``i`` and splits of the
      result.
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
        """A field of the state by its name, as NumPyro looks up collected fields."""
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
        hint = f"Perhaps you mean '{meant}'. " if meant in self.names else ""
        raise ValueError(
            f"The state has no field '{key}'. {hint}It has {', '.join(self.names)}. Run again with"
            " other `extra_fields`; the tuning is kept."
        )

    @property
    def names(self) -> list[str]:
        """The names of all fields that can be collected as numbers or arrays in each sample."""
        names = ["z", "step_size", *getattr(self.dynamics, "_fields", ())]
        names += [name for name in self.monitor._fields if name != "stein"]
        names += [] if self.replicas is None else ["exchange_prob"]
        return names + (["kinetic_temperature"] if "momentum" in names else [])


#: A step of a method: the new state and the evaluation of the gradient.
Step = tuple[SGMCMCState, Evaluation]
