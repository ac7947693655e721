# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Scale-adapted stochastic gradient Hamiltonian Monte Carlo, for neural networks."""

from dataclasses import dataclass
from typing import NamedTuple

from jax import Array, random
import jax.numpy as jnp

from numpyro_sgmcmc.data.converters import positive
from numpyro_sgmcmc.gradients.estimators import Gradient
from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel
from numpyro_sgmcmc.kernels.method import Begun
from numpyro_sgmcmc.kernels.momentum import fresh_momentum
from numpyro_sgmcmc.kernels.settings import StepSize, recorded
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState, Step

#: Smallest mean square of a gradient, for parameters without an effect.
_SMALLEST = 1e-8


class ScaleAdapted(NamedTuple):
    """
    The momentum and the gradient averages of the scale-adapted kernel.

    - **momentum** - momentum :math:`p` of every coordinate, shape (d,).
    - **window** - :math:`\\tau`, the number of steps in the averages, shape (d,).
    - **mean_gradient** - :math:`\\bar g`, average of the gradient, shape (d,).
    - **mean_square** - :math:`\\hat V`, average of the squared gradient, shape (d,).
    """

    momentum: Array
    window: Array
    mean_gradient: Array
    mean_square: Array


class ApproximateScaleAdaptedSGHMC(SGMCMCKernel):
    """
    SGHMC for neural networks, with scales from the size of the gradients; approximate.

    Use it for predictions of neural networks; it does not claim the posterior.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import ApproximateScaleAdaptedSGHMC

        >>> def model(x, y):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([10]).to_event(1))
        ...     v = numpyro.sample("v", dist.Normal(0, 1).expand([10]).to_event(1))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(jnp.tanh(x[i, None] * w) @ v, 0.1), obs=y[i])

        >>> x = jnp.linspace(-2, 2, 1_000)
        >>> y = jnp.tanh(2 * x) + 0.1 * jax.random.normal(jax.random.key(0), (1_000,))
        >>> kernel = ApproximateScaleAdaptedSGHMC(model)
        >>> mcmc = MCMC(kernel, num_warmup=3_000, num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), x, y)
        >>> draws = mcmc.get_samples()
        >>> fit = (jnp.tanh(x[:, None, None] * draws["w"]) * draws["v"]).sum(-1).mean(1)
        >>> assert jnp.abs(fit - jnp.tanh(2 * x)).max() < 0.1

    :param step_size: step size :math:`h`, or a schedule.
    :param float momentum_decay: :math:`\\alpha`.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **The step.** The warm-up learns the scales, and step sizes need no tuning. The distance of the
    draws from the posterior is not known, and minibatch noise is not corrected. Use the kernel for
    predictions, with several chains, and check the predictions on held-out data.

    With :math:`\\alpha = h A` and, elementwise, :math:`s = \\hat V^{-1/4}`

    .. math::

        p &\\leftarrow (1 - \\alpha) p - h s \\nabla \\tilde U(\\theta)
            + \\sqrt{2 \\alpha T} \\, R, \\qquad R \\sim N(0, I) \\\\
        \\theta &\\leftarrow \\theta + h s p

    which is Euler's method of :class:`SGHMC` with mass matrix :math:`\\hat V^{1/2}`. In the
    warm-up, and frozen afterwards, elementwise with :math:`r = 1 / (\\tau + 1)`

    .. math::

        \\tau &\\leftarrow \\tau (1 - \\bar g^2 / \\hat V) + 1 \\\\
        \\bar g &\\leftarrow \\bar g + r (\\nabla \\tilde U - \\bar g) \\\\
        \\hat V &\\leftarrow \\hat V + r ((\\nabla \\tilde U)^2 - \\hat V)

    The paper's velocity is :math:`v = h s p`, its :math:`\\epsilon` is :math:`h`, its
    :math:`\\epsilon \\hat V^{-1/2} C` is :math:`\\alpha`. It subtracts :math:`\\epsilon^4` from the
    variance of the added noise of :math:`v`, as if all of :math:`\\hat V` were gradient noise. For
    potentials that are sums over many data no noise would be left, so this kernel does not subtract
    it.

    **References:**

    1. *Bayesian Optimization with Robust Bayesian Neural Networks*, eqs. (8)-(10),
       Jost Tobias Springenberg, Aaron Klein, Stefan Falkner and Frank Hutter (2016).
    """

    @dataclass(frozen=True, eq=False)
    class Method(SGMCMCKernel.Method):
        step_size: StepSize | None = 0.01
        momentum_decay: float = recorded(0.05)

        def __post_init__(self) -> None:
            super().__post_init__()
            self.set(momentum_decay=positive("momentum_decay", self.momentum_decay))

        def check(self, begun: Begun) -> None:
            if begun.num_warmup == 0:
                raise ValueError(
                    "ApproximateScaleAdaptedSGHMC finds its scales in the warm-up, but"
                    " num_warmup=0. Use a warm-up of some thousand steps."
                )

        def init_dynamics(
            self, rng_key: Array, position: Array, fixed: ChainConstants
        ) -> ScaleAdapted:
            one = jnp.ones_like(position)
            momentum = fresh_momentum(rng_key, position, self.temperature)
            return ScaleAdapted(momentum, one, jnp.zeros_like(position), one)

        def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
            h, (p, window, mean, square) = state.step_size, state.dynamics
            evaluation = gradient(state.z)
            g = evaluation.gradient
            adapts = state.i < state.fixed.warmup_steps
            rate = jnp.where(adapts, 1 / (window + 1), 0.0)
            window = jnp.where(adapts, window * (1 - mean**2 / square) + 1, window)
            mean, square = mean + rate * (g - mean), square + rate * (g**2 - square)
            scale = jnp.maximum(square, _SMALLEST) ** -0.25
            noise = random.normal(rng_key, p.shape, p.dtype)
            alpha = self.momentum_decay
            p = (1 - alpha) * p - h * scale * g + jnp.sqrt(2 * alpha * self.temperature) * noise
            position = state.z + h * scale * p
            return state._replace(
                z=position, dynamics=ScaleAdapted(p, window, mean, square)
            ), evaluation
