# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient Langevin dynamics."""

from typing import NamedTuple

from jax import Array, random

from numpyro_sgmcmc.gradients import Gradient
from numpyro_sgmcmc.integrators import langevin
from numpyro_sgmcmc.kernels._base import SGMCMCKernel, SGMCMCState


class Overdamped(NamedTuple):
    """Langevin dynamics without momentum keep nothing besides the position."""


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

    :param model: a model with NumPyro primitives; see :class:`SGMCMCKernel`.
    :param step_size: step size :math:`h`, in units of a posterior variance, or a schedule.
    :param float temperature: temperature :math:`T`.
    :param str subsampling: ``"without_replacement"``, ``"with_replacement"`` or ``"epochs"``.
    :param int steps_per_sample: number of steps between two samples.
    :param init_strategy: a per-site initialization function of NumPyro.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **References:**

    1. *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, eq. (4),
       Max Welling and Yee Whye Teh (2011).

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

    def init_dynamics(self, rng_key: Array, position: Array) -> Overdamped:
        return Overdamped()

    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> SGMCMCState:
        observed = gradient(state.z)
        noise = random.normal(rng_key, state.z.shape, state.z.dtype)
        position = langevin(state.z, observed.gradient, state.step_size, self._temperature, noise)
        return state._replace(z=position, minibatch_potential=observed.potential)
