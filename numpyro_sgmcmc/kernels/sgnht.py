# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient Nosé-Hoover thermostat."""

from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.gradients import Gradient
from numpyro_sgmcmc.integrators import (
    drift,
    euler_kick,
    kick,
    ornstein_uhlenbeck,
    thermostat,
)
from numpyro_sgmcmc.kernels._arguments import StepSize, one_of, positive
from numpyro_sgmcmc.kernels._momentum import MomentumKernel
from numpyro_sgmcmc.kernels._state import SGMCMCState, Step
from numpyro_sgmcmc.minibatch import Model
from numpyro_sgmcmc.noise import NoiseLevel, euler_step, whitened_step


class Thermostatted(NamedTuple):
    """
    - **momentum** - momentum of every coordinate, shape (d,).
    - **thermostat** - :math:`\\xi`, the friction that the thermostat has come to: a scalar,
      one for each coordinate, shape (d,), or one for each site in the order of their names.
    """

    momentum: Array
    thermostat: Array


class SGNHT(MomentumKernel):
    """
    Stochastic gradient Nosé-Hoover thermostat.

    The friction :math:`\\xi` of Langevin dynamics adapts until the kinetic temperature is
    :math:`T`, and so takes up noise of the gradient that has the same variance in every
    direction.

    With ``integrator="badodab"``, the default, a step is, from one kick to the next,

    .. math::

        \\theta &\\leftarrow \\theta + \\tfrac h2 p \\\\
        \\xi &\\leftarrow \\xi + \\frac{h}{2 \\mu} \\left( \\frac{p^\\top p}{d} - T \\right) \\\\
        p &\\leftarrow e^{-\\xi h} p + \\sqrt{2 A T h \\, \\phi(\\xi h)} \\, R, \\qquad
            \\phi(x) = \\frac{1 - e^{-2 x}}{2 x}, \\quad R \\sim N(0, I) \\\\
        \\xi &\\leftarrow \\xi + \\frac{h}{2 \\mu} \\left( \\frac{p^\\top p}{d} - T \\right) \\\\
        \\theta &\\leftarrow \\theta + \\tfrac h2 p \\\\
        p &\\leftarrow p - h \\nabla \\tilde U(\\theta),

    and with ``"euler"``, the step of the paper,

    .. math::

        p &\\leftarrow p - h \\nabla \\tilde U(\\theta) - h \\xi p + \\sqrt{2 h A T} \\, R \\\\
        \\theta &\\leftarrow \\theta + h p \\\\
        \\xi &\\leftarrow \\xi + \\frac{h}{\\mu} \\left( \\frac{p^\\top p}{d} - T \\right).

    With gradient noise of one variance :math:`v` and a large thermal mass,
    :math:`\\xi \\approx A + h v / 2`, and the variance of the draws is
    :math:`1 - (h^2 v / 4) \\tanh(\\xi h / 2) / (1 - h^2 \\lambda / 4)` times the posterior's, of
    third order in :math:`h`; by Euler's method :math:`1 - h \\xi / 2`. Where :math:`v` differs
    between directions, only the mean of the kinetic energies is right and the directions are
    not, at any step size. A thermostat for each coordinate or each site helps where the
    difference is between these.

    :param model: a model with NumPyro primitives; see :class:`SGMCMCKernel`.
    :param step_size: step size :math:`h`, in units of a posterior standard deviation, or a
        schedule; None is tuned.
    :param float friction: :math:`A`, the strength of the added noise and the initial
        friction :math:`\\xi_0`, per unit of time; None is tuned.
    :param str integrator: ``"badodab"`` or ``"euler"``.
    :param str thermostats: ``"one"``, or one for each ``"site"`` or ``"coordinate"``, which
        sees the kinetic energy of its own coordinates.
    :param float thermal_mass: :math:`\\mu`; larger is slower to adapt and fluctuates less. The
        papers have 1 in this convention (their :math:`\\mu = d`).
    :param float temperature: temperature :math:`T`.
    :param str subsampling: how rows are drawn; see :class:`SGMCMCKernel`.
    :param int steps_per_sample: number of steps between two samples; None is 1 if the step size
        is given, and else tuned.
    :param init_strategy: a per-site initialization function of NumPyro.
    :param options: ``metric``, ``gradient``, ``refresh_every``, ``tuning``, ``mesh`` and
        ``progress_bar``; see :class:`SGMCMCKernel`.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **References:**

    1. *Bayesian Sampling Using Stochastic Gradient Thermostats*, Algorithm 2 of the
       supplement with :math:`u = h p`, :math:`\\eta = h^2`, :math:`\\alpha = h \\xi`,
       Nan Ding, Youhan Fang, Ryan Babbush, Changyou Chen, Robert D. Skeel and
       Hartmut Neven (2014).
    2. *Adaptive Thermostats for Noisy Gradient Systems*, the BADODAB splitting,
       Benedict Leimkuhler and Xiaocheng Shang (2016).

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGNHT

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (1_000,))
        >>> kernel = SGNHT(model, step_size=2e-3, friction=50.0)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=1_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y, extra_fields=("thermostat",))
        >>> assert abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.05
    """

    def __init__(
        self,
        model: Model,
        step_size: StepSize | None = None,
        friction: float | None = None,
        *,
        integrator: str = "badodab",
        thermostats: str = "one",
        thermal_mass: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(model, step_size, friction, **options)
        self._integrator = one_of("integrator", integrator, ("euler", "badodab"))
        self._thermostats = one_of("thermostats", thermostats, ("one", "site", "coordinate"))
        self._thermal_mass = positive("thermal_mass", thermal_mass)

    @property
    def order(self) -> int:
        return 1 if self._integrator == "euler" else 2

    @property
    def settings(self) -> dict[str, str | int | float]:
        own: dict[str, str | int | float] = {
            "integrator": self._integrator,
            "thermostats": self._thermostats,
        }
        return super().settings | own

    @property
    def gradient_at_end(self) -> bool:
        return self._integrator == "badodab"

    def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
        friction = 0.5
        if self._integrator == "badodab":
            return whitened_step(noise), friction
        return euler_step(noise, friction), friction

    def init_dynamics(self, rng_key: Array, position: Array, friction: Any) -> Thermostatted:
        sites = len(self._initialised.latents)
        shape = {"one": (), "site": (sites,), "coordinate": position.shape}[self._thermostats]
        momentum = self.fresh_momentum(rng_key, position)
        return Thermostatted(momentum, jnp.full(shape, friction, position.dtype))

    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        method = {"euler": self._euler, "badodab": self._badodab}
        return method[self._integrator](state, gradient, rng_key)

    def _euler(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        h, (p, xi) = state.step_size, state.dynamics
        observed = gradient(state.z)
        noise = random.normal(rng_key, p.shape, p.dtype)
        damping, diffusion = self._for_coordinates(xi) * p, state.friction * self._temperature
        p = euler_kick(p, observed.gradient, damping, diffusion, h, noise)
        position = drift(state.z, p, h)
        return state._replace(
            z=position, dynamics=Thermostatted(p, self._adapted(xi, p, h))
        ), observed

    def _badodab(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        h, (p, xi) = state.step_size, state.dynamics
        position = drift(state.z, p, h / 2)
        xi = self._adapted(xi, p, h / 2)
        noise = random.normal(rng_key, p.shape, p.dtype)
        damping, diffusion = self._for_coordinates(xi), state.friction * self._temperature
        p = ornstein_uhlenbeck(p, damping, diffusion, h, noise)
        xi = self._adapted(xi, p, h / 2)
        position = drift(position, p, h / 2)
        observed = gradient(position)
        p = kick(p, observed.gradient, h)
        return state._replace(z=position, dynamics=Thermostatted(p, xi)), observed

    def _adapted(self, xi: Array, p: Array, step_size: Array) -> Array:
        energy = p**2
        if self._thermostats == "one":
            energy = jnp.mean(energy)
        elif self._thermostats == "site":
            sites = self._site_of()
            energy = jax.ops.segment_sum(energy, sites, len(xi)) / np.bincount(sites)
        return thermostat(xi, energy, step_size, self._temperature, self._thermal_mass)

    def _for_coordinates(self, xi: Array) -> Array:
        return xi[self._site_of()] if self._thermostats == "site" else xi
