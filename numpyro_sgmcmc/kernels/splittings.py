# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Symmetric splittings of Langevin dynamics with one gradient a step.

A splitting has the drift A, the kick B and any map O of the momentum in its middle. It is named by
its maps in order, where maps that appear twice take half a step each. Splittings that begin with a
kick are written from one drift to the next, so that one gradient serves both kicks.

A splitting knows neither model nor method. The map in its middle is an argument: an
Ornstein-Uhlenbeck map, with or without thermostats around it, or the map of NOGIN. A new splitting
is a function here and a line in :data:`SPLITTINGS`. :class:`~numpyro_sgmcmc.SGHMC`,
:class:`~numpyro_sgmcmc.SGNHT` and :class:`~numpyro_sgmcmc.CCAdL` then have it.

**References:**

1. *Rational Construction of Stochastic Numerical Methods for Molecular Sampling*,
   Benedict Leimkuhler and Charles Matthews (2013).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jax import Array

from numpyro_sgmcmc.gradients.estimators import Evaluation, Gradient
from numpyro_sgmcmc.kernels.integrators import drift, kick

#: The map O: from the momentum and the evaluation of the gradient (None if there is none yet) to
#: the new momentum and the method's other variables.
Middle = Callable[[Array, Evaluation | None], tuple[Array, Any]]

#: The position, the momentum, the method's other variables, and the evaluation of the gradient.
Moved = tuple[Array, Array, Any, Evaluation]


def kicks_around(
    position: Array, momentum: Array, gradient: Gradient, h: Array, middle: Middle, before: float
) -> Moved:
    """
    The splitting A(b h) B(h/2) O B(h/2) A((1 - b) h), with the gradient between the drifts:

    .. math::

        \\theta &\\leftarrow \\theta + b h p \\\\
        p &\\leftarrow p - \\tfrac h2 \\nabla \\tilde U(\\theta) \\\\
        p &\\leftarrow O(p) \\\\
        p &\\leftarrow p - \\tfrac h2 \\nabla \\tilde U(\\theta) \\\\
        \\theta &\\leftarrow \\theta + (1 - b) h p .

    It is ABOBA for :math:`b = 1/2` and OBABO, from one drift to the next, for :math:`b = 1`.

    :param before: :math:`b`, the part of the drift that comes before the gradient.
    """
    position = drift(position, momentum, before * h)
    evaluation = gradient(position)
    momentum = kick(momentum, evaluation.gradient, h / 2)
    momentum, kept = middle(momentum, evaluation)
    momentum = kick(momentum, evaluation.gradient, h / 2)
    position = drift(position, momentum, (1 - before) * h)
    return position, momentum, kept, evaluation


def drifts_around(
    position: Array, momentum: Array, gradient: Gradient, h: Array, middle: Middle
) -> Moved:
    """
    The splitting A(h/2) O A(h/2) B(h), which is BAOAB from one drift to the next:

    .. math::

        \\theta &\\leftarrow \\theta + \\tfrac h2 p \\\\
        p &\\leftarrow O(p) \\\\
        \\theta &\\leftarrow \\theta + \\tfrac h2 p \\\\
        p &\\leftarrow p - h \\nabla \\tilde U(\\theta) .
    """
    position = drift(position, momentum, h / 2)
    momentum, kept = middle(momentum, None)
    position = drift(position, momentum, h / 2)
    evaluation = gradient(position)
    return position, kick(momentum, evaluation.gradient, h), kept, evaluation


class Splitting(NamedTuple):
    """
    A splitting with its properties.

    - **step** - function from position, momentum, gradient oracle, step size and middle to
      :data:`Moved`.
    - **gradient_at_end** - whether the gradient is taken at the position where the step ends.
    - **gradient_before_middle** - whether the middle map gets the evaluation of the gradient.
    """

    step: Callable[[Array, Array, Gradient, Array, Middle], Moved]
    gradient_at_end: bool
    gradient_before_middle: bool


SPLITTINGS: dict[str, Splitting] = {
    "aboba": Splitting(partial(kicks_around, before=0.5), False, True),
    "baoab": Splitting(drifts_around, True, False),
    "obabo": Splitting(partial(kicks_around, before=1.0), True, True),
}
