# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Kinetic Langevin dynamics by UBU with symmetric minibatch sweeps."""

from dataclasses import dataclass

from jax import Array, random

from numpyro_sgmcmc.gradients.estimators import Gradient
from numpyro_sgmcmc.kernels.integrators import free_flight, kick
from numpyro_sgmcmc.kernels.method import Traits
from numpyro_sgmcmc.kernels.momentum import Momentum, MomentumKernel
from numpyro_sgmcmc.kernels.settings import recorded
from numpyro_sgmcmc.kernels.state import SGMCMCState, Step
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel, whitened_step


class SMSUBU(MomentumKernel):
    """
    Symmetric minibatch splitting with the UBU integrator.

    Use it for short steps through several passes over the data, if the noise cannot be
    estimated.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SMSUBU

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (1_000,))
        >>> kernel = SMSUBU(model, step_size=2e-3, friction=50.0)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=1_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> assert abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.05

    :param model: a model with NumPyro primitives; see :class:`SGMCMCKernel`. At least one
        plate must have a ``subsample_size``, and it must divide the size of the plate.
    :param step_size: step size :math:`h`, in units of a posterior standard deviation, or a
        schedule; None is tuned.
    :param float friction: friction :math:`A`, per unit of time; None is tuned.
    :param str subsampling: the subsampling scheme; the method has only ``"symmetric_sweeps"``.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **The step.** The minibatches of Langevin dynamics with friction :math:`A` go forward and
    backward through a random partition of the rows, so that their noise cancels to second order in
    the step size.

    .. math::

        (\\theta, p) &\\leftarrow U_{h/2}(\\theta, p) \\\\
        p &\\leftarrow p - h \\nabla \\tilde U(\\theta) \\\\
        (\\theta, p) &\\leftarrow U_{h/2}(\\theta, p),

    with :math:`U_t` the exact solution of the dynamics without force over a time :math:`t`,
    see :func:`~numpyro_sgmcmc.kernels.integrators.free_flight`. A sweep has :math:`2 N / n` steps;
    draws from the middle of a sweep carry more of the noise than those from its end.

    The method estimates and corrects nothing. It is for data for which several passes are
    affordable, and for :math:`h N / n` up to a posterior standard deviation. Beyond that the noise
    no longer cancels, and :class:`CCAdL` is the better choice.

    **References:**

    1. *Sampling from Bayesian Neural Network Posteriors with Symmetric Minibatch Splitting
       Langevin Dynamics*, Daniel Paulin, Peter A. Whalley, Neil K. Chada and
       Benedict Leimkuhler (2024).
    """

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Method(MomentumKernel.Method):
        subsampling: str = recorded("symmetric_sweeps")

        @property
        def traits(self) -> Traits:
            return Traits()

        def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
            # the noise cancels if a sweep is short
            return whitened_step(noise), 1.0

        def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
            h, p = state.step_size, state.dynamics.momentum
            noise = random.normal(rng_key, (2, 2, *p.shape), p.dtype)
            friction, temperature = state.fixed.friction, self.temperature
            position, p = free_flight(state.z, p, friction, temperature, h / 2, noise[0])
            evaluation = gradient(position)
            p = kick(p, evaluation.gradient, h)
            position, p = free_flight(position, p, friction, temperature, h / 2, noise[1])
            return state._replace(z=position, dynamics=Momentum(p)), evaluation
