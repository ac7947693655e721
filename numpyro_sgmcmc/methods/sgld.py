# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient Langevin dynamics."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array, random

from numpyro_sgmcmc.gradients.estimators import Gradient
from numpyro_sgmcmc.kernels.integrators import langevin
from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel
from numpyro_sgmcmc.kernels.method import Traits
from numpyro_sgmcmc.kernels.settings import checked_noise, recorded
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState, Step
from numpyro_sgmcmc.tuning.noise_level import ACCEPTED_BIAS, NoiseLevel


class Overdamped(NamedTuple):
    """The empty dynamics of Langevin dynamics without momentum."""


class OverdampedWithNoise(NamedTuple):
    """
    The noise estimate of modified SGLD.

    - **noise_covariance** - :math:`\\hat V`, the covariance of the noise of the minibatch
      gradient, averaged over past steps.
    - **observations** - the number of minibatches in :math:`\\hat V`.
    """

    noise_covariance: Any
    observations: Array


class SGLD(SGMCMCKernel):
    """
    Stochastic gradient Langevin dynamics.

    Use it to compare with published results; its draws are wider by :math:`h v / 2`.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGLD

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (1_000,))
        >>> mcmc = MCMC(SGLD(model, step_size=1e-4), num_warmup=500, num_samples=1_000,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> assert abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.05

    :param step_size: step size :math:`h`, in units of a posterior variance, or a schedule; None
        is tuned.
    :param bool modified: correct for the noise of the minibatch to first order.
    :param NoiseEstimate noise: how :math:`\\hat V` is estimated, with ``modified=True``.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **The step:**

    .. math::

        \\theta \\leftarrow \\theta - h \\nabla \\tilde U(\\theta) + \\sqrt{2 h T} \\, R,
        \\qquad R \\sim N(0, I).

    Welling and Teh write :math:`\\epsilon = 2 h`. On a Gaussian posterior with precision
    :math:`\\lambda` and gradient noise of variance :math:`v` in a direction, the variance of the
    draws is :math:`(1 + h v / 2) / (1 - h \\lambda / 2)` times the posterior's, for :math:`T = 1`
    and :math:`h \\lambda < 2`. There is no correction for the minibatch noise.

    ``modified=True`` adds less noise, by an estimate :math:`\\hat V` of the minibatch noise:
    :math:`\\sqrt{2 h T} (I - \\tfrac{h}{4 T} \\hat V) R`. The factor is then
    :math:`(1 + h^2 v^2 / 16) / (1 - h \\lambda / 2)`.

    **References:**

    1. *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, eq. (4),
       Max Welling and Yee Whye Teh (2011).
    2. *Exploration of the (Non-)Asymptotic Bias and Variance of Stochastic Gradient Langevin
       Dynamics*, modified SGLD, Sebastian J. Vollmer, Konstantinos C. Zygalakis and
       Yee Whye Teh (2016).
    """

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Method(SGMCMCKernel.Method):
        modified: bool = recorded(False)
        noise: Any = None

        def __post_init__(self) -> None:
            super().__post_init__()
            self.set(noise=checked_noise(self.noise, self.modified, "`modified=True`"))

        @property
        def traits(self) -> Traits:
            return Traits(corrects_noise=self.modified)

        def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
            # h (v + lambda) / 2 is the relative error of the variance, without v if noise is
            # corrected
            if not self.modified:
                return 2 * ACCEPTED_BIAS / (noise.largest + noise.curvature), None
            largest = 0.5 / max(noise.largest, 1e-30)
            return min(2 * ACCEPTED_BIAS / noise.curvature, largest), None

        def init_dynamics(
            self, rng_key: Array, position: Array, fixed: ChainConstants
        ) -> Overdamped | OverdampedWithNoise:
            noise = fixed.layout.noise
            return Overdamped() if noise is None else OverdampedWithNoise(*noise.start(position))

        def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
            h, temperature, dynamics = state.step_size, self.temperature, state.dynamics
            evaluation = gradient(state.z)
            normal = random.normal(rng_key, state.z.shape, state.z.dtype)
            if (noise := state.fixed.layout.noise) is not None:
                covariance = noise.current(dynamics.noise_covariance, evaluation)
                product = noise.representation.product(covariance, normal)
                normal = normal - h / (4 * temperature) * product
                average, count = dynamics
                dynamics = OverdampedWithNoise(*noise.update(average, count, evaluation))
            position = langevin(state.z, evaluation.gradient, h, temperature, normal)
            return state._replace(z=position, dynamics=dynamics), evaluation
