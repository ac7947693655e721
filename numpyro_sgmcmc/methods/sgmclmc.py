# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient microcanonical Langevin Monte Carlo."""

from dataclasses import dataclass
import math
from typing import Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp

from numpyro_sgmcmc.gradients.covariance import Covariance
from numpyro_sgmcmc.gradients.estimators import Evaluation, Gradient
from numpyro_sgmcmc.kernels.integrators import drift, microcanonical_kick
from numpyro_sgmcmc.kernels.method import Begun, Traits
from numpyro_sgmcmc.kernels.momentum import MomentumKernel, fresh_momentum
from numpyro_sgmcmc.kernels.settings import checked_noise
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState, Step
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel, whitened_step


class MomentumOnSphere(NamedTuple):
    """
    The momentum of constant norm, its energy and the noise estimate of SGMCLMC.

    - **momentum** - momentum of every coordinate, shape (d,), of norm :math:`\\sqrt d`.
    - **kinetic_energy** - the change of the energy by the gradients since the start. Exact dynamics
      without refreshment would conserve its sum with the potential.
    - **noise_covariance**, **observations**, **friction_used** - fields of
      :class:`~numpyro_sgmcmc.methods.sghmc.MomentumWithNoise`; empty and 0 without a noise
      estimate.
    """

    momentum: Array
    kinetic_energy: Array
    noise_covariance: Any
    observations: Array
    friction_used: Array


class SGMCLMC(MomentumKernel):
    """
    Stochastic gradient microcanonical Langevin Monte Carlo: a momentum of constant norm.

    Use it for neural networks, around the members of an ensemble.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGMCLMC

        >>> def model(x, y):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

        >>> x = jax.random.normal(jax.random.key(0), (1_000, 3))
        >>> y = x @ jnp.array([1.0, -1.0, 0.5])
        >>> kernel = SGMCLMC(model, step_size=2e-3, friction=50.0)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=1_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), x, y)
        >>> bool(abs(mcmc.get_samples()["w"][:, 0].mean() - 1) < 0.05)
        True

    :param model: a model with NumPyro primitives; see :class:`SGMCMCKernel`.
    :param step_size: step size :math:`h`, in units of a posterior standard deviation, or a
        schedule; the length of a step is :math:`\\sqrt d \\, h`. None is tuned.
    :param float friction: friction :math:`A`, per unit of time: a chain forgets its momentum over a
        length of :math:`\\sqrt d / A`. None is tuned.
    :param NoiseEstimate noise: the estimator of :math:`\\hat V`; None for no correction.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **The step.** The momentum moves on the sphere :math:`|p|^2 = d`, and Brownian motion on the
    sphere refreshes it. A step is

    .. math::

        \\theta &\\leftarrow \\theta + \\tfrac h2 p \\\\
        p &\\leftarrow B_{h/2}(p, \\nabla \\tilde U(\\theta) / T) \\\\
        p &\\leftarrow B_1(p, R), \\qquad R \\sim N \\left( 0,
            2 A h \\tfrac{(d - 1)^2}{d^2} I - \\tfrac{h^2}{T^2} \\hat V \\right) \\\\
        p &\\leftarrow B_{h/2}(p, \\nabla \\tilde U(\\theta) / T) \\\\
        \\theta &\\leftarrow \\theta + \\tfrac h2 p,

    with the exact solution :math:`B_t` of
    :math:`dp = -\\tfrac{d}{d - 1} (I - p p^\\top / d) \\, g \\, dt`, see
    :func:`~numpyro_sgmcmc.kernels.integrators.microcanonical_kick`. The refreshment is a kick by a
    random force, and gradient noise is a random force too. Apart from the error of the step size
    :math:`\\theta` has the law of the posterior, for any friction :math:`A` and any random force
    without a preferred direction. Gradient noise that is equal in all directions therefore does no
    harm. For other noise, estimated by ``noise=``, the kernel adds less noise in each direction, so
    that the total has no preferred direction. Gradients that are too large for the step turn the
    momentum and do not lengthen it. So steps in strongly curved places, as in networks, do not end
    the run, but they have an error. The variance of the energy in a step measures this error.

    It needs two parameters at least, and is meant for many.

    **References:**

    1. *Microcanonical Hamiltonian Monte Carlo*, Jakob Robnik, G. Bruno De Luca, Eva Silverstein
       and Uros Seljak (2023), and *Fluctuation without dissipation: Microcanonical Langevin Monte
       Carlo*, Jakob Robnik and Uros Seljak (2023).
    2. *SMILE*, Emanuel Sommer et al. (2026), for minibatches, and for the harm of noise that
       differs between directions.
    """

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Method(MomentumKernel.Method):
        noise: Any = None

        def __post_init__(self) -> None:
            super().__post_init__()
            self.set(noise=checked_noise(self.noise, self.noise is not None))

        @property
        def traits(self) -> Traits:
            return Traits(corrects_noise=self.noise is not None, has_energy_error=True)

        @property
        def default_fields(self) -> tuple[str, ...]:
            used = ["friction_used"] if self.noise is not None else []
            return (*super().default_fields, *used)

        def check(self, begun: Begun) -> None:
            if begun.target.model.dimension < 2:
                raise ValueError(
                    "SGMCLMC turns a momentum of constant norm, which needs two parameters or"
                    " more, and the model has a single parameter. Use CCAdL or SGHMC."
                )

        def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
            friction = 1.0
            # noise must turn the momentum by less than the friction does
            largest = 2 * 0.25 * friction / max(noise.largest, 1e-30)
            return min(whitened_step(noise) / 2, largest), friction

        def init_dynamics(
            self, rng_key: Array, position: Array, fixed: ChainConstants
        ) -> MomentumOnSphere:
            momentum = on_sphere(fresh_momentum(rng_key, position, 1.0))
            zero = jnp.zeros((), position.dtype)
            average, count = (), jnp.zeros((), jnp.int32)
            if (noise := fixed.layout.noise) is not None:
                average, count = noise.start(position)
            return MomentumOnSphere(momentum, zero, average, count, zero)

        def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
            h, fixed, dynamics = state.step_size, state.fixed, state.dynamics
            temperature, noise = self.temperature, fixed.layout.noise
            position = drift(state.z, dynamics.momentum, h / 2)
            evaluation = gradient(position)
            slope = evaluation.gradient / temperature
            momentum, first = microcanonical_kick(dynamics.momentum, slope, h / 2)
            normal = random.normal(rng_key, momentum.shape, momentum.dtype)
            force, used = _random_force(fixed, dynamics, evaluation, h, temperature, normal)
            momentum, _ = microcanonical_kick(momentum, force, jnp.ones_like(h))
            momentum, second = microcanonical_kick(momentum, slope, h / 2)
            position = drift(position, momentum, h / 2)
            average, count = dynamics.noise_covariance, dynamics.observations
            if noise is not None:
                average, count = noise.update(average, count, evaluation)
            kinetic = dynamics.kinetic_energy + first + second
            after = MomentumOnSphere(momentum, kinetic, average, count, used)
            return state._replace(z=position, dynamics=after), evaluation


def on_sphere(momentum: Array) -> Array:
    """The momentum scaled to the sphere, :math:`\\sqrt d \\, p / |p|`."""
    return momentum * math.sqrt(momentum.shape[0]) / jnp.linalg.norm(momentum)


def _random_force(
    fixed: ChainConstants,
    dynamics: MomentumOnSphere,
    evaluation: Evaluation,
    h: Array,
    temperature: float,
    normal: Array,
) -> tuple[Array, Array]:
    """The random force :math:`R`, and the part of it that gradient noise replaces."""
    dimension = normal.shape[0]
    kept = 2 * fixed.friction * h * ((dimension - 1) / dimension) ** 2
    if (noise := fixed.layout.noise) is None:
        return jnp.sqrt(kept) * normal, jnp.zeros_like(kept)
    taken = (h / temperature) ** 2
    held: Covariance = noise.representation
    covariance = noise.current(dynamics.noise_covariance, evaluation)
    force = held.apply(covariance, lambda v: jnp.sqrt(jnp.maximum(kept - taken * v, 0.0)), normal)
    return force, held.largest(covariance, normal) * taken / kept
