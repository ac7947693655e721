# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient Hamiltonian Monte Carlo."""

from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.gradients import Gradient
from numpyro_sgmcmc.integrators import drift, euler_kick
from numpyro_sgmcmc.kernels._base import (
    Momentum,
    MomentumKernel,
    SGMCMCState,
    StepSize,
    one_of,
    whole,
)
from numpyro_sgmcmc.minibatch import MinibatchModel, Model


class SGHMC(MomentumKernel):
    """
    Stochastic gradient Hamiltonian Monte Carlo: Langevin dynamics with friction :math:`A`.

    .. math::

        \\theta &\\leftarrow \\theta + h p \\\\
        p &\\leftarrow p - h \\nabla \\tilde U(\\theta) - h A p
            + \\sqrt{2 h (A T - \\hat B)} \\, R,
            \\qquad \\hat B = h \\hat V / 2, \\quad R \\sim N(0, I).

    :math:`\\hat V` is an estimate of the variance of the minibatch gradient, zero if none is
    given. On a Gaussian posterior with precision :math:`\\lambda` and gradient noise of
    variance :math:`v` in a direction, the variance of the draws is, for :math:`T = 1`,

    .. math::

        \\frac{1 + (h^2 v / 2 - h \\hat B) / \\alpha}{1 - h^2 \\lambda / (2 (2 - \\alpha))},
        \\qquad \\alpha = h A,

    times the posterior's: without :math:`\\hat V` too wide by about :math:`h v / (2 A)`.

    :param model: a model with NumPyro primitives; see :class:`SGMCMCKernel`.
    :param step_size: step size :math:`h`, in units of a posterior standard deviation, or a
        schedule.
    :param float friction: friction :math:`A`, per unit of time.
    :param noise_variance: :math:`\\hat V`, a number, or for each latent site an array that
        broadcasts to its unconstrained shape. :math:`A T` must not be less than
        :math:`h \\hat V / 2`.
    :param int resample_momentum: draw a new momentum every so many steps; never if None.
    :param float temperature: temperature :math:`T`.
    :param str integrator: ``"euler"``, the steps above.
    :param str subsampling: ``"without_replacement"``, ``"with_replacement"`` or ``"epochs"``
        (the last not together with ``noise_variance``).
    :param int steps_per_sample: number of steps between two samples.
    :param init_strategy: a per-site initialization function of NumPyro.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **References:**

    1. *Stochastic Gradient Hamiltonian Monte Carlo*, Algorithm 2 and eq. (15),
       Tianqi Chen, Emily B. Fox and Carlos Guestrin (2014).

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGHMC

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (1_000,))
        >>> kernel = SGHMC(model, step_size=2e-3, friction=50.0)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=1_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> assert abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.05
    """

    def __init__(
        self,
        model: Model,
        step_size: StepSize,
        friction: float,
        *,
        noise_variance: float | dict[str, Any] = 0.0,
        resample_momentum: int | None = None,
        integrator: str = "euler",
        **options: Any,
    ) -> None:
        super().__init__(model, step_size, friction, **options)
        self._resample_momentum = (
            None if resample_momentum is None else whole("resample_momentum", resample_momentum)
        )
        self._integrator = one_of("integrator", integrator, ("euler",))
        if not isinstance(noise_variance, dict) and np.ndim(noise_variance) > 0:
            raise ValueError(
                "`noise_variance` must be a number, or a dict with an array for each latent site;"
                f" got an array of shape {np.shape(noise_variance)}."
            )
        self._noise_variance = jax.tree.map(np.asarray, noise_variance)
        values = jax.tree.leaves(self._noise_variance)
        if not all(np.all(np.isfinite(v)) and np.all(v >= 0) for v in values):
            raise ValueError(
                f"`noise_variance` must be finite and not negative; got {noise_variance}."
            )
        self.corrects_noise = any(np.any(v > 0) for v in values)

    def check_model(self, view: MinibatchModel, step_size: float, dimension: int) -> None:
        super().check_model(view, step_size, dimension)
        variance = float(np.max(self._flat_noise_variance(view)))
        most = 2 * self._friction * self._temperature / step_size
        if variance > most:
            raise ValueError(
                f"`noise_variance` of {variance:.4g} is more than friction={self._friction:.4g} can"
                f" dissipate at step_size={step_size:.4g}, which is 2 A T / h = {most:.4g}. Use a"
                f" friction of at least {step_size * variance / (2 * self._temperature):.4g}, or a"
                f" step size of at most {2 * self._friction * self._temperature / variance:.4g}."
            )

    def _flat_noise_variance(self, view: MinibatchModel) -> np.ndarray:
        """A scalar, or the estimate for each entry of the flat position."""
        given = self._noise_variance
        if not isinstance(given, dict):
            return given
        if set(given) != set(view.latents):
            raise ValueError(
                f"`noise_variance` must have an entry for each latent site {sorted(view.latents)};"
                f" found {sorted(given)}."
            )
        for name, latent in view.latents.items():
            try:
                np.broadcast_to(given[name], latent.shape)
            except ValueError as error:
                raise ValueError(
                    f"`noise_variance['{name}']` has shape {np.shape(given[name])}, but the"
                    f" unconstrained value of site '{name}' has shape {latent.shape}."
                ) from error
        # the flat position has the sites in the order of their names
        return np.concatenate(
            [np.broadcast_to(given[k], view.latents[k].shape).ravel() for k in sorted(given)]
        )

    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> SGMCMCState:
        h, p = state.step_size, state.dynamics.momentum
        if self._resample_momentum is not None:
            rng_key, momentum_key = random.split(rng_key)
            fresh = self.fresh_momentum(momentum_key, p)
            p = jnp.where(state.i % self._resample_momentum == 0, fresh, p)
        variance = jnp.asarray(self._flat_noise_variance(self._initialised), p.dtype)
        diffusion = self._friction * self._temperature - h * variance / 2
        position = drift(state.z, p, h)
        observed = gradient(position)
        noise = random.normal(rng_key, p.shape, p.dtype)
        p = euler_kick(p, observed.gradient, self._friction * p, diffusion, h, noise)
        return state._replace(
            z=position, dynamics=Momentum(p), minibatch_potential=observed.potential
        )
