# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient Nosé-Hoover thermostat."""

from dataclasses import dataclass
from typing import NamedTuple

from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.converters import one_of, positive
from numpyro_sgmcmc.gradients.estimators import Evaluation, Gradient
from numpyro_sgmcmc.kernels.integrators import drift, euler_kick, ornstein_uhlenbeck, thermostat
from numpyro_sgmcmc.kernels.method import Traits
from numpyro_sgmcmc.kernels.momentum import MomentumKernel, fresh_momentum
from numpyro_sgmcmc.kernels.settings import recorded
from numpyro_sgmcmc.kernels.splittings import SPLITTINGS, Splitting
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState, Step
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel, euler_step, whitened_step


class Thermostatted(NamedTuple):
    """
    The momentum and the thermostats of SGNHT.

    - **momentum** - momentum of every coordinate, shape (d,).
    - **thermostat** - :math:`\\xi`, the current friction: a scalar, one for each coordinate, shape
      (d,), or one for each site in the order of their names.
    """

    momentum: Array
    thermostat: Array


class SGNHT(MomentumKernel):
    """
    Stochastic gradient Nosé-Hoover thermostat.

    Use it for a cheaper step than that of :class:`CCAdL`, if the noise has the same variance in
    every direction.

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

    :param step_size: step size :math:`h`, in units of a posterior standard deviation, or a
        schedule; None is tuned.
    :param float friction: :math:`A`, the strength of the added noise and the initial
        friction :math:`\\xi_0`, per unit of time; None is tuned.
    :param str integrator: ``"badodab"``, or another of the splittings in
        :mod:`numpyro_sgmcmc.kernels.splittings` with D O D in its middle, or ``"euler"``.
    :param str thermostats: ``"one"``, or one for each ``"site"`` or ``"coordinate"``. Each sees the
        kinetic energy of its own coordinates.
    :param float thermal_mass: :math:`\\mu`; a larger one adapts more slowly and fluctuates less.
        The papers have 1 in this convention (their :math:`\\mu = d`).
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **The step.** The friction :math:`\\xi` of Langevin dynamics adapts until the kinetic
    temperature is :math:`T`. It takes up gradient noise that has one variance in all directions.

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
    third order in :math:`h`; by Euler's method :math:`1 - h \\xi / 2`. If :math:`v` differs between
    directions, only the mean of the kinetic energies is right, and single directions are wrong at
    any step size. A thermostat for each coordinate or each site helps if the noise differs between
    them.

    **References:**

    1. *Bayesian Sampling Using Stochastic Gradient Thermostats*, Algorithm 2 of the
       supplement with :math:`u = h p`, :math:`\\eta = h^2`, :math:`\\alpha = h \\xi`,
       Nan Ding, Youhan Fang, Ryan Babbush, Changyou Chen, Robert D. Skeel and
       Hartmut Neven (2014).
    2. *Adaptive Thermostats for Noisy Gradient Systems*, the BADODAB splitting,
       Benedict Leimkuhler and Xiaocheng Shang (2016).
    """

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Method(MomentumKernel.Method):
        integrator: str = recorded("badodab")
        thermostats: str = recorded("one")
        thermal_mass: float = 1.0

        def __post_init__(self) -> None:
            super().__post_init__()
            one_of("integrator", self.integrator, ("euler", "badodab", *SPLITTINGS))
            one_of("thermostats", self.thermostats, ("one", "site", "coordinate"))
            self.set(thermal_mass=positive("thermal_mass", self.thermal_mass))

        @property
        def splitting(self) -> Splitting | None:
            """The splitting around D O D; None is Euler's method."""
            return SPLITTINGS.get("baoab" if self.integrator == "badodab" else self.integrator)

        @property
        def traits(self) -> Traits:
            splitting = self.splitting
            return Traits() if splitting is None else Traits(splitting.gradient_at_end)

        def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
            friction = 0.5
            if self.splitting is None:
                return euler_step(noise, friction), friction
            return whitened_step(noise), friction

        def init_dynamics(
            self, rng_key: Array, position: Array, fixed: ChainConstants
        ) -> Thermostatted:
            sites = len(fixed.layout.sites)
            shape = {"one": (), "site": (sites,), "coordinate": position.shape}[self.thermostats]
            momentum = fresh_momentum(rng_key, position, self.temperature)
            return Thermostatted(momentum, jnp.full(shape, fixed.friction, position.dtype))

        def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
            h, (p, xi), sites = state.step_size, state.dynamics, state.fixed.layout.sites
            diffusion = state.fixed.friction * self.temperature
            normal = random.normal(rng_key, p.shape, p.dtype)

            def adapted(xi: Array, p: Array, step_size: Array) -> Array:
                """The thermostats after the map D."""
                energy = _kinetic_temperature(p, self.thermostats, sites)
                return thermostat(xi, energy, step_size, self.temperature, self.thermal_mass)

            def damping(xi: Array) -> Array:
                return jnp.repeat(xi, np.array(sites)) if self.thermostats == "site" else xi

            def middle(p: Array, _: Evaluation | None) -> tuple[Array, Array]:
                """The middle D(h/2) O D(h/2) of a splitting."""
                half = adapted(xi, p, h / 2)
                p = ornstein_uhlenbeck(p, damping(half), diffusion, h, normal)
                return p, adapted(half, p, h / 2)

            if (splitting := self.splitting) is not None:
                position, p, xi, evaluation = splitting.step(state.z, p, gradient, h, middle)
            else:
                evaluation = gradient(state.z)
                p = euler_kick(p, evaluation.gradient, damping(xi) * p, diffusion, h, normal)
                position = drift(state.z, p, h)
                xi = adapted(xi, p, h)
            return state._replace(z=position, dynamics=Thermostatted(p, xi)), evaluation


def _kinetic_temperature(p: Array, thermostats: str, sites: tuple[int, ...]) -> Array:
    """The kinetic temperature that each thermostat sees."""
    energy = p**2
    if thermostats == "coordinate":
        return energy
    if thermostats == "one":
        return jnp.mean(energy)
    return jnp.stack([jnp.mean(x) for x in jnp.split(energy, np.cumsum(sites)[:-1])])
