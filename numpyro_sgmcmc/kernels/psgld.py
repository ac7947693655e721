# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient Langevin dynamics with the RMSprop preconditioner."""

import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_sgmcmc.gradients import Gradient
from numpyro_sgmcmc.integrators import langevin
from numpyro_sgmcmc.kernels._arguments import StepSize, positive, whole
from numpyro_sgmcmc.kernels._base import SGMCMCKernel
from numpyro_sgmcmc.kernels._state import SGMCMCState, Step
from numpyro_sgmcmc.minibatch import Model
from numpyro_sgmcmc.noise import ACCEPTED_BIAS, NoiseLevel
from numpyro_sgmcmc.warmup import Tuning


class Preconditioned(NamedTuple):
    """
    - **mean_square** - :math:`w`, the average of the squares of past gradients, shape (d,).
    - **observations** - the number of gradients in it.
    """

    mean_square: Array
    observations: Array


class PSGLD(SGMCMCKernel):
    """
    Preconditioned stochastic gradient Langevin dynamics.

    It is SGLD in coordinates that are scaled by the size of their gradients, as in RMSprop.

    .. math::

        w_t &= (1 - \\kappa_t) w_{t-1} + \\kappa_t \\nabla \\tilde U(\\theta)^2,
            \\qquad G_t = \\frac{1}{\\text{damping} + \\sqrt{w_t}} \\\\
        \\theta &\\leftarrow \\theta - h \\left( G_t \\nabla \\tilde U(\\theta)
            - T \\, \\Gamma_t \\right) + \\sqrt{2 h T G_t} \\, R, \\qquad R \\sim N(0, I),

    all elementwise, with :math:`\\kappa_t = \\max(1/t, 1/\\text{window})`. After the warm-up
    :math:`w` stays as it is, :math:`\\Gamma = 0` is exact, and the law is that of SGLD with
    step size :math:`h G_i` in coordinate :math:`i`:
    on a Gaussian posterior with precision :math:`\\lambda` and gradient noise of variance
    :math:`v` in that coordinate the variance of the draws is
    :math:`(1 + h G_i v / 2) / (1 - h G_i \\lambda / 2)` times the posterior's.

    With ``frozen=False`` the preconditioner goes on to follow the position and
    :math:`\\Gamma_i = \\partial G_{t,i} / \\partial \\theta_i` has to make up for it:

    .. math::

        \\Gamma_i = - G_i^2 \\, \\frac{\\kappa_t}{\\sqrt{w_i}} \\,
            \\partial_i \\tilde U \\; \\partial_i^2 \\tilde U .

    The paper leaves it out in its experiments; ``gamma_term=True`` has it, with the exact
    diagonal of the Hessian from :math:`d` forward derivatives of the gradient in each step.

    Li et al. divide the gradient by :math:`N`: their :math:`\\epsilon_t` is :math:`2 h / N`
    and their :math:`\\lambda` is :math:`\\text{damping} / N` here.

    :param model: a model with NumPyro primitives; see :class:`SGMCMCKernel`.
    :param step_size: step size :math:`h`, in units of a posterior variance times a gradient,
        or a schedule; None is tuned.
    :param float damping: keeps :math:`G` finite where the gradients vanish, in units of the
        gradient.
    :param int window: number of steps over which squares are averaged.
    :param bool frozen: keep the preconditioner after the warm-up as it is then.
    :param bool gamma_term: add :math:`\\Gamma`, at the cost of :math:`d` gradients a step.
    :param float temperature: temperature :math:`T`.
    :param str subsampling: how rows are drawn; see :class:`SGMCMCKernel`.
    :param int steps_per_sample: number of steps between two samples; None is 1 if the step size
        is given, and else tuned.
    :param init_strategy: a per-site initialization function of NumPyro.
    :param options: ``metric``, ``gradient``, ``refresh_every``, ``tuning``, ``mesh`` and
        ``progress_bar``; see :class:`SGMCMCKernel`.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **References:**

    1. *Preconditioned Stochastic Gradient Langevin Dynamics for Deep Neural Networks*,
       Algorithm 1 and eqs. (4)-(6), Chunyuan Li, Changyou Chen, David Carlson and
       Lawrence Carin (2016).

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import PSGLD

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (1_000,))
        >>> kernel = PSGLD(model, step_size=0.01)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=1_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> assert abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.05
    """

    def __init__(
        self,
        model: Model,
        step_size: StepSize | None = None,
        *,
        damping: float = 1e-3,
        window: int = 100,
        frozen: bool = True,
        gamma_term: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, step_size, **options)
        self._damping = positive("damping", damping)
        self._window = whole("window", window)
        self._frozen = bool(frozen)
        self._gamma_term = bool(gamma_term)
        if self._frozen and self._gamma_term:
            raise ValueError(
                "`gamma_term` makes up for a preconditioner that follows the position; with"
                " frozen=True it is constant and the term is zero. Use frozen=False."
            )

    @property
    def settings(self) -> dict[str, str | int | float]:
        return super().settings | {"frozen": self._frozen, "gamma_term": self._gamma_term}

    def check_warmup(self, num_warmup: int) -> None:
        if self._frozen and num_warmup == 0:
            raise ValueError(
                "PSGLD finds its preconditioner in the warm-up, but num_warmup=0. Use a warm-up,"
                " or frozen=False."
            )

    def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
        return 2 * ACCEPTED_BIAS / (noise.largest + noise.curvature) * _scale(noise), None

    def memory(self, tuning: Tuning) -> float:
        return super().memory(tuning) * (1.0 if tuning.noise is None else _scale(tuning.noise))

    def init_dynamics(self, rng_key: Array, position: Array, friction: Any) -> Preconditioned:
        return Preconditioned(jnp.zeros_like(position), jnp.zeros((), jnp.int32))

    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        h, (before, count) = state.step_size, state.dynamics
        adapts = (state.i < state.warmup_steps) | (not self._frozen)
        count = count + adapts
        kappa = adapts / jnp.clip(count, 1, self._window).astype(before.dtype)
        observed = gradient(state.z)
        mean_square = before + kappa * (observed.gradient**2 - before)
        root = jnp.sqrt(mean_square)
        scale = 1 / (self._damping + root)
        force = observed.gradient
        if self._gamma_term:
            curvature = _hessian_diagonal(lambda x: gradient(x).gradient, state.z)
            slope = kappa * force * curvature / jnp.maximum(root, jnp.finfo(root.dtype).tiny)
            force = force + self._temperature * scale * slope
        noise = random.normal(rng_key, state.z.shape, state.z.dtype)
        # elementwise, Langevin dynamics with step size h G
        position = langevin(state.z, force, h * scale, self._temperature, noise)
        return state._replace(z=position, dynamics=Preconditioned(mean_square, count)), observed


def _hessian_diagonal(gradient: Any, position: Array) -> Array:
    """Second derivatives by forward derivatives of the gradient, one coordinate at a time."""
    _, forward = jax.linearize(gradient, position)
    size = position.shape[0]

    def second(k: Array) -> Array:
        return forward(jnp.zeros_like(position).at[k].set(1.0))[k]

    return lax.map(second, jnp.arange(size), batch_size=min(size, 64))


def _scale(noise: NoiseLevel) -> float:
    """One over :math:`G`: the root of the mean square of the gradient, curvature and noise."""
    return math.sqrt(noise.curvature + noise.mean)
