# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient Fisher scoring."""

from typing import Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp

from numpyro_sgmcmc.gradients import Gradient
from numpyro_sgmcmc.kernels._arguments import StepSize
from numpyro_sgmcmc.kernels._base import SGMCMCKernel
from numpyro_sgmcmc.kernels._noise import NoiseEstimate, NoiseSettings
from numpyro_sgmcmc.kernels._state import SGMCMCState, Step
from numpyro_sgmcmc.minibatch import MinibatchModel, Model
from numpyro_sgmcmc.noise import ACCEPTED_BIAS, NoiseLevel
from numpyro_sgmcmc.potentials import Potential, Rows


class Scored(NamedTuple):
    """
    - **score_covariance** - :math:`\\hat M`, the Fisher information of all data plus the
      covariance of the gradient's noise, averaged over past steps.
    - **observations** - the number of minibatches that it has seen.
    """

    score_covariance: Any
    observations: Array


class SGFS(SGMCMCKernel):
    """
    Stochastic gradient Fisher scoring.

    Langevin dynamics are preconditioned so that the noise of the minibatch takes the place of
    the noise that would have to be added.

    .. math::

        \\theta \\leftarrow \\theta - 2 \\left( \\hat M + \\frac{2}{h} I \\right)^{-1}
            \\left( \\nabla \\tilde U(\\theta) + \\sqrt{\\frac{2 T}{h}} \\, R \\right),
            \\qquad R \\sim N(0, I),

    where :math:`\\hat M` is a running average of :math:`N \\hat I + \\hat V / T`: the empirical
    Fisher information of all rows and the covariance of the gradient's noise, both from the
    spread of the gradients in a minibatch. For small :math:`h` this is SGLD; for large
    :math:`h` nothing is added to the minibatch's own noise.

    Where the posterior is Gaussian and its precision is :math:`N \\hat I`, as it is in a
    well-specified model with many rows, the law is exact for every :math:`h`.
    Where that does not hold, or if the diagonal is all that is held and directions are
    correlated, it is not, however small the step.

    :param model: a model with NumPyro primitives; see :class:`SGMCMCKernel`. At least one
        plate must have a ``subsample_size``.
    :param step_size: step size :math:`h`, in units of a posterior variance, or a schedule; None
        is tuned. In the paper's letters :math:`B = I` and :math:`\\epsilon = 2 h`.
    :param str covariance: how :math:`\\hat M` is held; see :class:`CCAdL`.
    :param str estimator: how it is observed; see :class:`CCAdL`.
    :param window: number of steps over which it is averaged; see :class:`CCAdL`.
    :param int rank: leading directions held by ``covariance="low_rank"``.
    :param float temperature: temperature :math:`T`.
    :param str subsampling: ``"without_replacement"`` or ``"with_replacement"``.
    :param int steps_per_sample: number of steps between two samples; None is 1 if the step size
        is given, and else tuned.
    :param init_strategy: a per-site initialization function of NumPyro.
    :param options: ``metric``, ``gradient``, ``refresh_every``, ``tuning``, ``mesh`` and
        ``progress_bar``; see :class:`SGMCMCKernel`.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **References:**

    1. *Bayesian Posterior Sampling via Stochastic Gradient Fisher Scoring*,
       Sungjin Ahn, Anoop Korattikara and Max Welling (2012).

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGFS

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (1_000,))
        >>> kernel = SGFS(model, step_size=1e-3)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=1_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> assert abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.05
    """

    corrects_noise = True

    def __init__(
        self,
        model: Model,
        step_size: StepSize | None = None,
        *,
        covariance: str | None = None,
        estimator: str = "sub_batches",
        window: float | None = None,
        rank: int = 20,
        **options: Any,
    ) -> None:
        super().__init__(model, step_size, **options)
        self._noise_settings = NoiseSettings.checked(covariance, estimator, window, rank)

    @property
    def _noise(self) -> NoiseEstimate:
        return self._with_information(self._initialised)

    def _with_information(self, view: MinibatchModel) -> NoiseEstimate:
        """The estimate of N I + V / T: that of V, with n / N added to the factors."""
        noise = self._noise_settings.on(view, self._subsampling, self._level)
        factors = {
            plate.name: plate.subsample_size / plate.size
            + noise.factors[plate.name] / self._temperature
            for plate in view.plates
        }
        return noise._replace(factors=factors)

    def check_model(self, view: MinibatchModel, step_size: float, friction: float | None) -> None:
        self._with_information(view)

    def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
        # as for SGLD with the noise corrected: the Fisher information is one of the curvatures
        return 2 * ACCEPTED_BIAS / noise.curvature, None

    def init_dynamics(self, rng_key: Array, position: Array, friction: Any) -> Scored:
        return Scored(*self._noise.start(position))

    def gradient(self, potential: Potential, rows: Rows, rng_key: Array) -> Gradient:
        return self._noise.oracle(self, potential, rows, rng_key)

    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        h, noise, (average, count) = state.step_size, self._noise, state.dynamics
        observed = gradient(state.z)
        information = noise.current(average, observed)
        normal = random.normal(rng_key, state.z.shape, state.z.dtype)
        force = observed.gradient + jnp.sqrt(2 * self._temperature / h) * normal
        position = state.z - noise.held.apply(information, lambda m: 2 / (m + 2 / h), force)
        return state._replace(
            z=position, dynamics=Scored(*noise.update(average, count, observed))
        ), observed
