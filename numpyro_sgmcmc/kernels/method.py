# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A method: a value, made of its arguments, with its equations as pure functions."""

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


class Traits(NamedTuple):
    """
    Properties of a method with its arguments, whatever the model.

    - **gradient_at_end** - whether the position that goes with the gradient in the Stein matrix
      is that of the end of the step. It is that of the start for methods that take the gradient
      there, and for those that take it between two half drifts.
    - **corrects_noise** - whether it corrects for the noise of independent minibatches.
    - **metropolis_corrected** - whether a sample is tested on all rows (:meth:`Method.accept`).
    - **has_energy_error** - whether its dynamics has the field ``kinetic_energy``, which with the
      potential is conserved by exact steps.
    """

    gradient_at_end: bool = False
    corrects_noise: bool = False
    metropolis_corrected: bool = False
    has_energy_error: bool = False


@dataclass(frozen=True, eq=False)
class Method(Settings, ABC):
    """
    Base class of the methods: their arguments, and what is to be computed from them.

    A method adds arguments of its own as fields, and its dynamics, :meth:`init_dynamics` and
    :meth:`step`. With :meth:`suggest` its step size is tuned. It knows no device, no program, no
    data and no tuning: what a function needs of these is among the function's arguments.
    """

    @abstractmethod
    def init_dynamics(self, rng_key: Array, position: Array, fixed: ChainConstants) -> Any:
        """
        The initial value of what the method keeps besides the position.

        :param rng_key: a single random key.
        :param position: initial position, shape ``(d,)``.
        :param fixed: what was decided before the chains start, the friction among it.
        :return: a ``NamedTuple`` of arrays.
        """

    @abstractmethod
    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        """
        One step, a pure function of its arguments.

        :param state: the state; its ``z`` is the position, a vector of shape ``(d,)``, and
            its ``step_size`` the step size of this step.
        :param gradient: oracle of the gradient, on a new minibatch at each step.
        :param rng_key: a single random key.
        :return: the state with new ``z`` and ``dynamics``, and the evaluation of the gradient.
        """

    def accept(
        self, before: SGMCMCState, after: SGMCMCState, change: Array, rng_key: Array
    ) -> SGMCMCState:
        """
        The state after a sample that is tested on all rows, of methods whose traits say so.

        :param before: the state before its steps, with the position as ``z``.
        :param after: the state after them, likewise.
        :param change: of the potential of all rows, from one position to the other; infinite if a
            step was undone.
        :param rng_key: a single random key.
        """
        raise NotImplementedError(f"{self.name} has no test of a sample.")

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
            f"{self.name} does not say which step size it needs (it has no `suggest`): give"
            " `step_size`."
        )

    def relaxation_time(self, tuning: Tuning) -> float:
        """The time in which a chain forgets where it was."""
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
        """The word for the integrator, which may depend on what was found."""
        return str(getattr(self, "integrator", ""))

    def gradient_at_end(self, integrator: str) -> bool:
        """Whether the gradient is that of the end of the step (:class:`Traits`)."""
        return self.traits.gradient_at_end

    def noise_estimator(self, target: Target, tuning: Tuning) -> RunningCovariance | None:
        """The estimate of the covariance of the gradient's noise, for methods that need it."""
        estimate = getattr(self, "noise", None)
        return None if estimate is None else estimate.resolved(target, largest_of(tuning.noise))

    def constants(self, target: Target) -> Any:
        """Arrays that a step needs and that depend on the model alone, for ``state.fixed``."""
        return ()

    def check(
        self,
        target: Target,
        num_warmup: int,
        fixed: ChainConstants | None = None,
        state: SGMCMCState | None = None,
    ) -> None:
        """
        Looks at the model alone, then at what is fixed too, and at the states of the chains where
        their values are known: each as soon as it is there.

        :raises ValueError: if the method cannot run on this model, or needs another warm-up.
        """

    @property
    def default_fields(self) -> tuple[str, ...]:
        """Fields of the state that are collected of each sample without being asked for."""
        asked = ["step_size"] if isinstance(self.step_size, Cyclical) else []
        asked += [] if self.replicas is None else ["exchange_prob"]
        return ("z", "diverging", "configurational_temperature", *asked)
