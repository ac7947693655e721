# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Sampling methods as values: their arguments, and their equations as pure functions."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array

from numpyro_sgmcmc.gradients.estimators import Gradient
from numpyro_sgmcmc.gradients.noise_estimate import RunningCovariance
from numpyro_sgmcmc.kernels.cyclical import Cyclical
from numpyro_sgmcmc.kernels.settings import Settings
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState, Step
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel, largest_of
from numpyro_sgmcmc.tuning.tuning import Tuning


class Begun(NamedTuple):
    """
    A run before its first step, as far as it is known.

    - **target** - the model with its data.
    - **num_warmup** - number of samples of the warm-up.
    - **fixed** - the constants of the chains, or None before the tuning.
    - **state** - the states of the chains, or None before they are made.
    """

    target: Target
    num_warmup: int
    fixed: ChainConstants | None = None
    state: SGMCMCState | None = None


class Traits(NamedTuple):
    """
    Properties of a method with its arguments, whatever the model.

    - **gradient_at_end** - whether the Stein matrix pairs the gradient with the position at the end
      of the step. It pairs it with the position at the start for methods that take the gradient
      there, or between two half drifts.
    - **corrects_noise** - whether the method corrects for the noise of independent minibatches.
    - **metropolis_corrected** - whether a sample is tested on all rows (:meth:`Method.accept`).
    - **has_energy_error** - whether the dynamics has the field ``kinetic_energy``. Exact steps
      conserve its sum with the potential.
    """

    gradient_at_end: bool = False
    corrects_noise: bool = False
    metropolis_corrected: bool = False
    has_energy_error: bool = False


@dataclass(frozen=True, eq=False)
class Method(Settings, ABC):
    """
    Base class of the methods: their arguments, and the quantities computed from them.

    A method adds its own arguments as fields, and its dynamics, :meth:`init_dynamics` and
    :meth:`step`. The tuning sets the step size by :meth:`suggest`. A method knows no device, no
    program, no data and no tuning. Functions get these as arguments.
    """

    @abstractmethod
    def init_dynamics(self, rng_key: Array, position: Array, fixed: ChainConstants) -> Any:
        """
        The initial value of the method's variables besides the position.

        :param rng_key: a single random key.
        :param position: initial position, shape ``(d,)``.
        :param fixed: the constants of the chains, the friction among them.
        :return: a ``NamedTuple`` of arrays.
        """

    @abstractmethod
    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        """
        One step, a pure function of its arguments.

        :param state: the state. Its ``z`` is the position, a vector of shape ``(d,)``, and its
            ``step_size`` is the step size of this step.
        :param gradient: the gradient oracle, on a new minibatch at each step.
        :param rng_key: a single random key.
        :return: the state with new ``z`` and ``dynamics``, and the evaluation of the gradient.
        """

    def accept(
        self, before: SGMCMCState, after: SGMCMCState, change: Array, rng_key: Array
    ) -> SGMCMCState:
        """
        The state after a Metropolis test on all rows, for methods with this trait.

        :param before: the state before the steps of the sample, with the position as ``z``.
        :param after: the state after them, likewise.
        :param change: change of the potential of all rows between the two positions; infinite if a
            step was undone.
        :param rng_key: a single random key.
        """
        raise NotImplementedError(f"{self.name} has no Metropolis test: define `accept`.")

    @property
    def name(self) -> str:
        """The name of the kernel in which the method is defined."""
        return type(self).__qualname__.removesuffix(".Method").rpartition(".")[2]

    @property
    def traits(self) -> Traits:
        """Properties of the method with these arguments."""
        return Traits()

    def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
        """
        Step size and friction for coordinates in which the curvature is 1.

        :param noise: the noise of the gradient in these coordinates.
        :return: a step size, and a friction or None.
        """
        raise ValueError(
            f"{self.name} cannot propose a step size, because it has no `suggest`. Give"
            " `step_size`."
        )

    def relaxation_time(self, tuning: Tuning) -> float:
        """The relaxation time, after which a chain has forgotten its position."""
        return tuning.relaxation_time

    def samples_every(self, tuning: Tuning | None, dimension: int | None) -> int:
        """
        The number of steps between two samples, given or tuned.

        :param dimension: number of parameters of the model, or None before it has been read.
        """
        if self.steps_per_sample is not None:
            return self.steps_per_sample
        if isinstance(self.step_size, Cyclical):
            return self.step_size.steps
        return 1 if self.step_size is not None or tuning is None else tuning.steps_per_sample

    def integrator_for(self, tuning: Tuning) -> str:
        """The name of the integrator, which may depend on the tuning."""
        return str(getattr(self, "integrator", ""))

    def gradient_at_end(self, integrator: str) -> bool:
        """True if the gradient is taken at the end of the step (:class:`Traits`)."""
        return self.traits.gradient_at_end

    def noise_estimator(self, target: Target, tuning: Tuning) -> RunningCovariance | None:
        """The estimator of the covariance of the gradient noise, for methods that need it."""
        estimate = getattr(self, "noise", None)
        return None if estimate is None else estimate.resolved(target, largest_of(tuning.noise))

    def constants(self, target: Target) -> Any:
        """Arrays for ``state.fixed`` that a step needs and that depend on the model alone."""
        return ()

    def check(self, begun: Begun) -> None:
        """
        Check a run that begins, three times: each time more of it is known.

        :param begun: the model, then the constants too, then the states of the chains too.
        :raises ValueError: if the method cannot run on this model, or needs another warm-up.
        """

    @property
    def default_fields(self) -> tuple[str, ...]:
        """The state fields that are collected of each sample by default."""
        asked = ["step_size"] if isinstance(self.step_size, Cyclical) else []
        asked += [] if self.replicas is None else ["exchange_prob"]
        return ("z", "diverging", "configurational_temperature", *asked)
