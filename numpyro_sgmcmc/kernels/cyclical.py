# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Cyclical step sizes: long steps that lead to other modes, and short ones that give samples."""

from dataclasses import dataclass
import math
from typing import Any

from jax import Array
import jax.numpy as jnp

from numpyro_sgmcmc.data.converters import positive, share, whole


@dataclass(frozen=True)
class Cyclical:
    """
    The schedule that :func:`cyclical` gives.

    - **largest**, **smallest** - step sizes at the begin of a cycle and in its sampling part.
    - **steps** - number of steps in a cycle.
    - **sampling_steps** - number of steps at the end of a cycle that give samples.
    """

    largest: float
    smallest: float
    steps: int
    sampling_steps: int

    def __call__(self, i: Array) -> Array:
        share = (i % self.steps) / (self.steps - self.sampling_steps)
        fall = (1 + jnp.cos(math.pi * share)) / 2
        falling = self.smallest + (self.largest - self.smallest) * fall
        return jnp.where(self.is_sampling(i), self.smallest, falling)

    def is_sampling(self, i: Array) -> Array:
        """True if step :math:`i` is one of the sampling steps."""
        return i % self.steps >= self.steps - self.sampling_steps

    def check(self, steps_per_sample: int) -> None:
        """
        Check that samples and cycles have lengths that fit.

        :raises ValueError: if a sample would have steps both inside and outside of the sampling
            part of a cycle.
        """
        whole = steps_per_sample % self.steps == 0
        parts = self.steps % steps_per_sample == 0 and self.sampling_steps % steps_per_sample == 0
        if not (whole or parts):
            raise ValueError(
                f"`steps_per_sample={steps_per_sample:,}` does not fit cycles of {self.steps:,}"
                f" steps with {self.sampling_steps:,} steps for samples: it must divide both"
                " numbers, or be a multiple of the first. Leave it out for one sample at the end"
                " of each cycle."
            )


def cyclical(largest: float, smallest: float, steps: int, sampling: float = 0.25) -> Cyclical:
    """
    A cyclical step size, for posteriors with several modes: ``step_size=cyclical(...)``.

    Each cycle has :math:`P` steps. It begins with the largest step size, with which a chain leaves
    its mode. The step size falls along half a cosine. The last :math:`S` steps have the smallest
    step size,

    .. math:: h_i = h_{\\min} + \\tfrac12 (h_{\\max} - h_{\\min})
        \\left( 1 + \\cos \\frac{\\pi \\, \\min(i \\bmod P, \\; P - S)}{P - S} \\right) .

    Draws come from the last steps only. These steps have one size, so that within a mode the draws
    have the law of the smallest step size. A sample is a whole cycle, unless ``steps_per_sample``
    says otherwise. If a cycle has several samples, ``to_arviz`` and the diagnostics leave out the
    samples with a falling step size. ``mcmc.get_samples()`` and ``arviz.from_numpyro`` know nothing
    of cycles and have all samples.

    The weights of the modes need not be right. A chain visits a mode as often as the width of its
    basin at the largest step size says, and not as often as its probability says. For right weights
    use ``replicas`` (:class:`~numpyro_sgmcmc.Replicas`). The cycles are counted from the first step
    of the warm-up.

    The published schedule falls until the end of the cycle, so that its draws come from steps of
    several sizes.

    :param float largest: :math:`h_{\\max}`, in units of the metric.
    :param float smallest: :math:`h_{\\min}`, a step size that is right within a mode.
    :param int steps: :math:`P`, the steps of a cycle.
    :param float sampling: :math:`S / P`, the part of a cycle that gives samples.
    :return: a function of the number of steps, for the argument ``step_size`` of a kernel.
    :raises ValueError: if an argument has no meaning, naming it.

    **References:**

    1. *Cyclical Stochastic Gradient MCMC for Bayesian Deep Learning*,
       Ruqi Zhang, Chunyuan Li, Jianyi Zhang, Changyou Chen and Andrew Gordon Wilson (2020).

    **Example:**

    .. doctest::

        >>> from numpyro_sgmcmc import cyclical
        >>> step_size = cyclical(0.1, 0.01, steps=100, sampling=0.2)
        >>> [round(float(step_size(i)), 3) for i in (0, 40, 80, 99, 100)]
        [0.1, 0.055, 0.01, 0.01, 0.1]
    """
    largest, smallest = positive("largest", largest), positive("smallest", smallest)
    steps, sampling = whole("steps", steps, least=2), share("sampling", sampling)
    if smallest > largest:
        raise ValueError(
            f"`smallest={smallest:g}` of a cyclical step size is more than `largest={largest:g}`."
        )
    last = min(max(1, round(sampling * steps)), steps - 1)
    return Cyclical(largest, smallest, steps, last)


def is_for_samples(step_size: Any, i: Array) -> Array | bool:
    """True if a step gives samples; always true for schedules without cycles."""
    return step_size.is_sampling(i) if isinstance(step_size, Cyclical) else True


def steps_for_samples(step_size: Any, steps_per_sample: int) -> int:
    """The number of sampling steps in a sample."""
    if not isinstance(step_size, Cyclical) or steps_per_sample < step_size.steps:
        return steps_per_sample
    return steps_per_sample // step_size.steps * step_size.sampling_steps
