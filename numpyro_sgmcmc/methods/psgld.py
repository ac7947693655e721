# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient Langevin dynamics with the RMSprop preconditioner."""

from dataclasses import dataclass
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_sgmcmc.data.converters import positive, whole
from numpyro_sgmcmc.gradients.estimators import Gradient
from numpyro_sgmcmc.kernels.integrators import langevin
from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel
from numpyro_sgmcmc.kernels.method import Begun
from numpyro_sgmcmc.kernels.settings import recorded
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState, Step
from numpyro_sgmcmc.tuning.noise_level import ACCEPTED_BIAS, NoiseLevel
from numpyro_sgmcmc.tuning.tuning import Tuning


class Preconditioned(NamedTuple):
    """
    The preconditioner of PSGLD.

    - **mean_square** - :math:`w`, the average of the squares of past gradients, shape (d,).
    - **observations** - the number of gradients in the average.
    """

    mean_square: Array
    observations: Array


class PSGLD(SGMCMCKernel):
    """
    Preconditioned stochastic gradient Langevin dynamics.

    Use it to compare with published results.

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

    :param step_size: step size :math:`h`, in units of a posterior variance times a gradient,
        or a schedule; None is tuned.
    :param float damping: lower bound on the scale, for vanishing gradients, in units of the
        gradient.
    :param int window: number of steps over which squares are averaged.
    :param bool frozen: keep the preconditioner constant after the warm-up.
    :param bool gamma_term: add :math:`\\Gamma`, at the cost of :math:`d` gradients a step.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **The step.** It is SGLD in coordinates that are scaled by the size of their gradients, as in
    RMSprop.

    .. math::

        w_t &= (1 - \\kappa_t) w_{t-1} + \\kappa_t \\nabla \\tilde U(\\theta)^2,
            \\qquad G_t = \\frac{1}{\\text{damping} + \\sqrt{w_t}} \\\\
        \\theta &\\leftarrow \\theta - h \\left( G_t \\nabla \\tilde U(\\theta)
            - T \\, \\Gamma_t \\right) + \\sqrt{2 h T G_t} \\, R, \\qquad R \\sim N(0, I),

    all elementwise, with :math:`\\kappa_t = \\max(1/t, 1/\\text{window})`. After the warm-up
    :math:`w` is constant and :math:`\\Gamma = 0` is exact. The law is the law of SGLD with step
    size :math:`h G_i` in coordinate :math:`i`: on a Gaussian posterior with precision
    :math:`\\lambda` and gradient noise of variance
    :math:`v` in that coordinate the variance of the draws is
    :math:`(1 + h G_i v / 2) / (1 - h G_i \\lambda / 2)` times the posterior's.

    With ``frozen=False`` the preconditioner goes on following the position. The term
    :math:`\\Gamma_i = \\partial G_{t,i} / \\partial \\theta_i` corrects for this:

    .. math::

        \\Gamma_i = - G_i^2 \\, \\frac{\\kappa_t}{\\sqrt{w_i}} \\,
            \\partial_i \\tilde U \\; \\partial_i^2 \\tilde U .

    The experiments of the paper leave the term out. ``gamma_term=True`` adds it, with the exact
    diagonal of the Hessian from :math:`d` forward derivatives of the gradient in each step.

    Li et al. divide the gradient by :math:`N`: their :math:`\\epsilon_t` is :math:`2 h / N`
    and their :math:`\\lambda` is :math:`\\text{damping} / N` here.

    **References:**

    1. *Preconditioned Stochastic Gradient Langevin Dynamics for Deep Neural Networks*,
       Algorithm 1 and eqs. (4)-(6), Chunyuan Li, Changyou Chen, David Carlson and
       Lawrence Carin (2016).
    """

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Method(SGMCMCKernel.Method):
        damping: float = 1e-3
        window: int = 100
        frozen: bool = recorded(True)
        gamma_term: bool = recorded(False)

        def __post_init__(self) -> None:
            super().__post_init__()
            self.set(
                damping=positive("damping", self.damping),
                window=whole("window", self.window),
            )
            if self.frozen and self.gamma_term:
                raise ValueError(
                    "`gamma_term` corrects for a preconditioner that changes with the position,"
                    " and with frozen=True it is constant and the term is zero. Use frozen=False."
                )

        def check(self, begun: Begun) -> None:
            if self.frozen and begun.num_warmup == 0:
                raise ValueError(
                    "PSGLD finds its preconditioner in the warm-up, but num_warmup=0. Use a"
                    " warm-up, or frozen=False."
                )

        def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
            return 2 * ACCEPTED_BIAS / (noise.largest + noise.curvature) * _scale(noise), None

        def relaxation_time(self, tuning: Tuning) -> float:
            return super().relaxation_time(tuning) * (
                1.0 if tuning.noise is None else _scale(tuning.noise)
            )

        def init_dynamics(
            self, rng_key: Array, position: Array, fixed: ChainConstants
        ) -> Preconditioned:
            return Preconditioned(jnp.zeros_like(position), jnp.zeros((), jnp.int32))

        def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
            h, (before, count) = state.step_size, state.dynamics
            adapts = (state.i < state.fixed.warmup_steps) | (not self.frozen)
            count = count + adapts
            kappa = adapts / jnp.clip(count, 1, self.window).astype(before.dtype)
            evaluation = gradient(state.z)
            mean_square = before + kappa * (evaluation.gradient**2 - before)
            root = jnp.sqrt(mean_square)
            scale = 1 / (self.damping + root)
            force = evaluation.gradient
            if self.gamma_term:
                curvature = _hessian_diagonal(lambda x: gradient(x).gradient, state.z)
                slope = kappa * force * curvature / jnp.maximum(root, jnp.finfo(root.dtype).tiny)
                force = force + self.temperature * scale * slope
            noise = random.normal(rng_key, state.z.shape, state.z.dtype)
            # Langevin dynamics with step size h G in each coordinate
            position = langevin(state.z, force, h * scale, self.temperature, noise)
            return state._replace(
                z=position, dynamics=Preconditioned(mean_square, count)
            ), evaluation


def _hessian_diagonal(gradient: Any, position: Array) -> Array:
    """
    The diagonal of the Hessian by forward derivatives of the gradient, coordinate by coordinate.
    """
    _, forward = jax.linearize(gradient, position)
    size = position.shape[0]

    def second(k: Array) -> Array:
        return forward(jnp.zeros_like(position).at[k].set(1.0))[k]

    return lax.map(second, jnp.arange(size), batch_size=min(size, 64))


def _scale(noise: NoiseLevel) -> float:
    """The scale :math:`1 / G`: the root mean square of the gradient, from curvature and noise."""
    return math.sqrt(noise.curvature + noise.mean)
