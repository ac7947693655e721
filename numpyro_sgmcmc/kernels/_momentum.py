# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What the kernels with momentum and friction share."""

import math
from typing import Any, Self

from jax import Array, random

from numpyro_sgmcmc.kernels._arguments import StepSize, positive
from numpyro_sgmcmc.kernels._base import SGMCMCKernel
from numpyro_sgmcmc.kernels._state import Momentum
from numpyro_sgmcmc.minibatch import Model


class MomentumKernel(SGMCMCKernel):
    """
    Base class of the methods with momentum :math:`p` and friction :math:`A`.

    :param model: a model with NumPyro primitives.
    :param step_size: step size :math:`h`, or a schedule.
    :param float friction: friction :math:`A`, per unit of time.
    :param options: the other arguments of :class:`SGMCMCKernel`.
    """

    has_friction = True

    def __init__(
        self,
        model: Model,
        step_size: StepSize | None = None,
        friction: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, step_size, **options)
        self._friction = None if friction is None else positive("friction", friction)

    @classmethod
    def from_learning_rate(
        cls, model: Model, learning_rate: float, momentum_decay: float, **options: Any
    ) -> Self:
        """
        The kernel in the parameters of stochastic gradient descent with momentum: with the
        velocity :math:`v = h p` a step adds :math:`-\\eta \\nabla \\tilde U - \\alpha v` to it.
        These are the parameters of eq. (15) of Chen et al. (2014), and of Algorithm 2 in the
        supplement of Ding et al. (2014), where :math:`\\alpha` is the initial thermostat
        :math:`a`.

        :param model: a model with NumPyro primitives.
        :param float learning_rate: :math:`\\eta = h^2`, for a potential that is a sum over all
            data: a rate meant for the mean over the data must be divided by :math:`N`.
        :param float momentum_decay: :math:`\\alpha = h A`, one minus the momentum term.
        :param options: the other arguments of the kernel.
        :raises ValueError: if one of the two is not a positive number.
        """
        step_size = math.sqrt(positive("learning_rate", learning_rate))
        friction = positive("momentum_decay", momentum_decay) / step_size
        return cls(model, step_size, friction, **options)

    @property
    def settings(self) -> dict[str, str | int | float]:
        friction = self._friction if self.tuning is None else self.tuning.friction
        return super().settings | ({} if friction is None else {"friction": friction})

    def fresh_momentum(self, rng_key: Array, position: Array) -> Array:
        """A draw of :math:`p \\sim N(0, T I)`."""
        scale = math.sqrt(self._temperature)
        return scale * random.normal(rng_key, position.shape, position.dtype)

    def init_dynamics(self, rng_key: Array, position: Array, friction: Any) -> Any:
        return Momentum(self.fresh_momentum(rng_key, position))
