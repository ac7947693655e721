# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient Langevin dynamics."""

from typing import Any, NamedTuple

from jax import Array, random

from numpyro_sgmcmc.gradients import Gradient
from numpyro_sgmcmc.integrators import langevin
from numpyro_sgmcmc.kernels._arguments import StepSize
from numpyro_sgmcmc.kernels._base import SGMCMCKernel
from numpyro_sgmcmc.kernels._noise import NoiseEstimate, NoiseSettings
from numpyro_sgmcmc.kernels._state import SGMCMCState, Step
from numpyro_sgmcmc.minibatch import MinibatchModel, Model
from numpyro_sgmcmc.noise import ACCEPTED_BIAS, NoiseLevel
from numpyro_sgmcmc.potentials import Potential, Rows


class Overdamped(NamedTuple):
    """Langevin dynamics without momentum keep nothing besides the position."""


class OverdampedWithNoise(NamedTuple):
    """
    - **noise_covariance** - :math:`\\hat V`, the covariance of the noise of the minibatch
      gradient, averaged over past steps.
    - **observations** - the number of minibatches that :math:`\\hat V` has seen.
    """

    noise_covariance: Any
    observations: Array


class SGLD(SGMCMCKernel):
    """
    Stochastic gradient Langevin dynamics.

    .. math::

        \\theta \\leftarrow \\theta - h \\nabla \\tilde U(\\theta) + \\sqrt{2 h T} \\, R,
        \\qquad R \\sim N(0, I).

    Welling and Teh write :math:`\\epsilon = 2 h`. On a Gaussian posterior with precision
    :math:`\\lambda` and gradient noise of variance :math:`v` in a direction, the variance of
    the draws is :math:`(1 + h v / 2) / (1 - h \\lambda / 2)` times the posterior's, for
    :math:`T = 1` and :math:`h \\lambda < 2`: the noise of the minibatch is not corrected for.

    ``modified=True`` adds less noise, by an estimate :math:`\\hat V` of what the minibatch
    adds: :math:`\\sqrt{2 h T} (I - \\tfrac{h}{4 T} \\hat V) R`. The factor is then
    :math:`(1 + h^2 v^2 / 16) / (1 - h \\lambda / 2)`.

    :param model: a model with NumPyro primitives; see :class:`SGMCMCKernel`.
    :param step_size: step size :math:`h`, in units of a posterior variance, or a schedule; None
        is tuned.
    :param bool modified: correct for the noise of the minibatch to first order.
    :param str covariance: how :math:`\\hat V` is held; see :class:`CCAdL`.
    :param str estimator: how it is observed; see :class:`CCAdL`.
    :param window: number of steps over which it is averaged; see :class:`CCAdL`.
    :param int rank: leading directions held by ``covariance="low_rank"``.
    :param float temperature: temperature :math:`T`.
    :param str subsampling: how rows are drawn; see :class:`SGMCMCKernel`.
    :param int steps_per_sample: number of steps between two samples; None is 1 if the step size
        is given, and else tuned.
    :param init_strategy: a per-site initialization function of NumPyro.
    :param options: ``metric``, ``gradient``, ``refresh_every``, ``tuning``, ``mesh`` and
        ``progress_bar``; see :class:`SGMCMCKernel`.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **References:**

    1. *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, eq. (4),
       Max Welling and Yee Whye Teh (2011).
    2. *Exploration of the (Non-)Asymptotic Bias and Variance of Stochastic Gradient Langevin
       Dynamics*, modified SGLD, Sebastian J. Vollmer, Konstantinos C. Zygalakis and
       Yee Whye Teh (2016).

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
    """

    def __init__(
        self,
        model: Model,
        step_size: StepSize | None = None,
        *,
        modified: bool = False,
        covariance: str | None = None,
        estimator: str = "sub_batches",
        window: float | None = None,
        rank: int = 20,
        **options: Any,
    ) -> None:
        super().__init__(model, step_size, **options)
        self.corrects_noise = bool(modified)
        self._noise_settings = NoiseSettings.checked(covariance, estimator, window, rank)

    @property
    def settings(self) -> dict[str, str | int | float]:
        return super().settings | {"modified": self.corrects_noise}

    @property
    def _noise(self) -> NoiseEstimate:
        return self._noise_settings.on(self._initialised, self._subsampling, self._level)

    def check_model(self, view: MinibatchModel, step_size: float, friction: float | None) -> None:
        if self.corrects_noise:
            self._noise_settings.on(view, self._subsampling, self._level)

    def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
        # h (v + lambda) / 2 is the relative error of the variance, less v if it is corrected
        if not self.corrects_noise:
            return 2 * ACCEPTED_BIAS / (noise.largest + noise.curvature), None
        largest = 0.5 / max(noise.largest, 1e-30)
        return min(2 * ACCEPTED_BIAS / noise.curvature, largest), None

    def init_dynamics(
        self, rng_key: Array, position: Array, friction: Any
    ) -> Overdamped | OverdampedWithNoise:
        if not self.corrects_noise:
            return Overdamped()
        return OverdampedWithNoise(*self._noise.start(position))

    def gradient(self, potential: Potential, rows: Rows, rng_key: Array) -> Gradient:
        if not self.corrects_noise:
            return super().gradient(potential, rows, rng_key)
        return self._noise.oracle(self, potential, rows, rng_key)

    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        h, temperature, dynamics = state.step_size, self._temperature, state.dynamics
        observed = gradient(state.z)
        normal = random.normal(rng_key, state.z.shape, state.z.dtype)
        if self.corrects_noise:
            covariance = self._noise.current(dynamics.noise_covariance, observed)
            normal = normal - h / (4 * temperature) * self._noise.held.product(covariance, normal)
            dynamics = OverdampedWithNoise(
                *self._noise.update(dynamics.noise_covariance, dynamics.observations, observed)
            )
        position = langevin(state.z, observed.gradient, h, temperature, normal)
        return state._replace(z=position, dynamics=dynamics), observed
