# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The common part of the kernels with momentum and friction."""

from dataclasses import dataclass
import math
from typing import Any, NamedTuple, Self

from jax import Array, random

from numpyro_sgmcmc.data.converters import positive
from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel
from numpyro_sgmcmc.kernels.state import ChainConstants
from numpyro_sgmcmc.posterior.handlers import Model


class Momentum(NamedTuple):
    """
    The dynamics of a method whose only extra variable is the momentum.

    - **momentum** - momentum of every coordinate, shape (d,).
    """

    momentum: Array


def fresh_momentum(rng_key: Array, position: Array, temperature: float) -> Array:
    """A draw of :math:`p \\sim N(0, T I)`."""
    return math.sqrt(temperature) * random.normal(rng_key, position.shape, position.dtype)


class MomentumKernel(SGMCMCKernel):
    """
    Base class of the methods with momentum :math:`p` and friction :math:`A`.

    :param float friction: friction :math:`A`, per unit of time; None is tuned.
    """

    @dataclass(frozen=True, eq=False)
    class Method(SGMCMCKernel.Method):
        friction: float | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.friction is not None:
                self.set(friction=positive("friction", self.friction))

        def init_dynamics(self, rng_key: Array, position: Array, fixed: ChainConstants) -> Any:
            return Momentum(fresh_momentum(rng_key, position, self.temperature))

    @classmethod
    def from_learning_rate(
        cls, model: Model, learning_rate: float, momentum_decay: float, **options: Any
    ) -> Self:
        """
        Make the kernel from the parameters of stochastic gradient descent with momentum.

        With the velocity :math:`v = h p` a step adds :math:`-\\eta \\nabla \\tilde U - \\alpha v`
        to the velocity. These are the parameters of eq. (15) of Chen et al. (2014), and of
        Algorithm 2 in the supplement of Ding et al. (2014), where :math:`\\alpha` is the initial
        thermostat :math:`a`.

        :param model: a model with NumPyro primitives.
        :param float learning_rate: :math:`\\eta = h^2`, for a potential that is a sum over all
            data. Divide a rate for the mean over the data by :math:`N`.
        :param float momentum_decay: :math:`\\alpha = h A`, one minus the momentum term.
        :param options: the other arguments of the kernel.
        :raises ValueError: if one of the two is not a positive number.
        """
        step_size = math.sqrt(positive("learning_rate", learning_rate))
        friction = positive("momentum_decay", momentum_decay) / step_size
        return cls(model, step_size, friction, **options)
