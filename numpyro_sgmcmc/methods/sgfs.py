# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient Fisher scoring."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp

from numpyro_sgmcmc.gradients.estimators import Gradient
from numpyro_sgmcmc.gradients.noise_estimate import RunningCovariance
from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel
from numpyro_sgmcmc.kernels.method import Traits
from numpyro_sgmcmc.kernels.settings import checked_noise
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState, Step
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.noise_level import ACCEPTED_BIAS, NoiseLevel, largest_of
from numpyro_sgmcmc.tuning.tuning import Tuning


class Scored(NamedTuple):
    """
    The Fisher information estimate of SGFS.

    - **score_covariance** - :math:`\\hat M`, the Fisher information of all data plus the
      covariance of the gradient's noise, averaged over past steps.
    - **observations** - the number of minibatches in the average.
    """

    score_covariance: Any
    observations: Array


class SGFS(SGMCMCKernel):
    """
    Stochastic gradient Fisher scoring.

    Use it for posteriors close to a Gaussian, in well-specified models.

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

    :param step_size: step size :math:`h`, in units of a posterior variance, or a schedule; None
        is tuned. In the paper's letters :math:`B = I` and :math:`\\epsilon = 2 h`.
    :param NoiseEstimate noise: how :math:`\\hat M` is estimated.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **The step.** A preconditioner shapes Langevin dynamics so that minibatch noise replaces the
    added noise.

    .. math::

        \\theta \\leftarrow \\theta - 2 \\left( \\hat M + \\frac{2}{h} I \\right)^{-1}
            \\left( \\nabla \\tilde U(\\theta) + \\sqrt{\\frac{2 T}{h}} \\, R \\right),
            \\qquad R \\sim N(0, I),

    where :math:`\\hat M` is a running average of :math:`N \\hat I + \\hat V / T`: the empirical
    Fisher information of all rows and the covariance of the gradient's noise, both from the spread
    of the gradients in a minibatch. For small :math:`h` this is SGLD. For large :math:`h` the only
    noise is the noise of the minibatch.

    Where the posterior is Gaussian and its precision is :math:`N \\hat I`, as it is in a
    well-specified model with many rows, the law is exact for every :math:`h`. For other posteriors
    it is not exact, however small the step. With a diagonal :math:`\\hat M` and correlated
    directions it is not exact either.

    **References:**

    1. *Bayesian Posterior Sampling via Stochastic Gradient Fisher Scoring*,
       Sungjin Ahn, Anoop Korattikara and Max Welling (2012).
    """

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Method(SGMCMCKernel.Method):
        noise: Any = None

        def __post_init__(self) -> None:
            super().__post_init__()
            self.set(noise=checked_noise(self.noise))
            if isinstance(self.strata, dict):
                raise ValueError(
                    "SGFS estimates the Fisher information from rows with equal probabilities, and"
                    " strata have unequal probabilities. Leave `subsampling` out, or use another"
                    " kernel, such as CCAdL."
                )

        @property
        def can_stratify(self) -> bool:
            return False

        @property
        def traits(self) -> Traits:
            return Traits(corrects_noise=True)

        def noise_estimator(self, target: Target, tuning: Tuning) -> RunningCovariance | None:
            """The estimator of N I + V / T: the one of V, with n / N added to the factors."""
            assert self.noise is not None
            noise = self.noise.resolved(target, largest_of(tuning.noise))
            shares = {
                plate.name: plate.subsample_size / plate.size for plate in target.model.plates
            }
            factors = tuple(
                (name, shares[name] + factor / self.temperature) for name, factor in noise.factors
            )
            return replace(noise, factors=factors)

        def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
            # the step of SGLD with corrected noise, because the Fisher information acts as a
            # curvature
            return 2 * ACCEPTED_BIAS / noise.curvature, None

        def init_dynamics(self, rng_key: Array, position: Array, fixed: ChainConstants) -> Scored:
            return Scored(*fixed.layout.noise.start(position))

        def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
            h, noise, (average, count) = state.step_size, state.fixed.layout.noise, state.dynamics
            evaluation = gradient(state.z)
            information = noise.current(average, evaluation)
            normal = random.normal(rng_key, state.z.shape, state.z.dtype)
            force = evaluation.gradient + jnp.sqrt(2 * self.temperature / h) * normal
            inverse = noise.representation.apply(information, lambda m: 2 / (m + 2 / h), force)
            dynamics = Scored(*noise.update(average, count, evaluation))
            return state._replace(z=state.z - inverse, dynamics=dynamics), evaluation
