# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Covariance-controlled adaptive Langevin thermostat."""

import math
from typing import Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp

from numpyro_sgmcmc.covariance import FEW_LANCZOS_STEPS, LANCZOS_STEPS
from numpyro_sgmcmc.gradients import Gradient
from numpyro_sgmcmc.integrators import (
    covariance_controlled,
    drift,
    euler_kick,
    kick,
    ornstein_uhlenbeck,
    thermostat,
)
from numpyro_sgmcmc.kernels._arguments import StepSize, one_of, positive
from numpyro_sgmcmc.kernels._momentum import MomentumKernel
from numpyro_sgmcmc.kernels._noise import NoiseEstimate, NoiseSettings
from numpyro_sgmcmc.kernels._state import SGMCMCState, Step
from numpyro_sgmcmc.minibatch import MinibatchModel, Model
from numpyro_sgmcmc.noise import NoiseLevel, euler_step, whitened_step
from numpyro_sgmcmc.potentials import Potential, Rows


class CovarianceControlled(NamedTuple):
    """
    - **momentum** - momentum of every coordinate, shape (d,).
    - **thermostat** - :math:`\\xi`, the friction that the thermostat has come to, a scalar.
    - **noise_covariance** - :math:`\\hat V`, the covariance of the noise of the minibatch
      gradient, averaged over past steps: its diagonal, shape (d,), all of it, (d, d), a
      :class:`~numpyro_sgmcmc.covariance.LowRankPlusDiagonal`, or nothing if matrix-free.
    - **observations** - the number of minibatches that :math:`\\hat V` has seen.
    """

    momentum: Array
    thermostat: Array
    noise_covariance: Any
    observations: Array


class CCAdL(MomentumKernel):
    """
    Covariance-controlled adaptive Langevin thermostat.

    An estimate :math:`\\hat V` of the covariance of the gradient's noise, which may depend on the
    position and on the direction, is dissipated by a friction of its own; a thermostat :math:`\\xi`
    takes up what is left.

    With ``integrator="nogin"``, the default, a step is

    .. math::

        \\theta &\\leftarrow \\theta + \\tfrac h2 p \\\\
        p &\\leftarrow p - \\tfrac h2 \\nabla \\tilde U(\\theta) \\\\
        \\xi &\\leftarrow \\xi + \\frac{h}{\\mu} \\left( \\frac{p^\\top p
            - \\tfrac{h^2}{4} \\operatorname{tr} \\hat V}{d} - T \\right) \\\\
        p &\\leftarrow (I - D) (I + D)^{-1} (p + R) + R \\\\
        p &\\leftarrow p - \\tfrac h2 \\nabla \\tilde U(\\theta) \\\\
        \\theta &\\leftarrow \\theta + \\tfrac h2 p

    with one gradient, the same :math:`R \\sim N(0, T \\tanh(A h / 2) I)` twice, and
    :math:`D = \\tanh(\\xi h / 2) I + \\tfrac{h^2}{4 T} \\hat V`. With :math:`\\hat V = V` it
    is exact for a Gaussian posterior, whatever the noise and its direction, up to
    :math:`h^2 \\lambda < 4`; for others the error is of second order in :math:`h`.

    ``"symmetric"`` is BACDODCAB, written from one drift to the next: the control C,
    :math:`p \\leftarrow \\exp(-\\tfrac{h^2}{4 T} \\hat V) p`, on either side of the thermostat D
    and the exact Ornstein-Uhlenbeck map O, with an error of second order. ``"euler"`` is the
    step of the paper,

    .. math::

        \\theta &\\leftarrow \\theta + h p \\\\
        p &\\leftarrow p - h \\nabla \\tilde U(\\theta) - \\frac{h^2}{2 T} \\hat V_{t-1} p
            - h \\xi p + \\sqrt{2 h A T} \\, R, \\qquad R \\sim N(0, I) \\\\
        \\xi &\\leftarrow \\xi + \\frac{h}{\\mu} \\left( \\frac{p^\\top p}{d} - T \\right),

    stable for :math:`h^2 v < 4`, whose draws have :math:`1 - (h \\xi + h^2 v / 2) / 2` times the
    posterior's variance in a direction with gradient noise of variance :math:`v`, times the
    kinetic temperature of that direction, of which the thermostat makes the mean :math:`T`.

    In each of them :math:`\\hat V` is the average of what past minibatches have shown,

    .. math::

        \\hat V_t = (1 - \\kappa_t) \\hat V_{t-1} + \\kappa_t V(\\theta),
            \\qquad \\kappa_t = \\max(1 / t, 1 / \\text{window}),

    used one step later than in the paper, since what a minibatch shows is correlated with
    the noise of its own gradient. The diagonal alone is not enough where the noise is
    correlated between parameters, as it is in most regressions: some directions of the
    posterior then come out too wide and others too narrow, which the mean kinetic energy
    does not show.

    :param model: a model with NumPyro primitives; see :class:`SGMCMCKernel`. At least one
        plate must have a ``subsample_size``.
    :param step_size: step size :math:`h`, in units of a posterior standard deviation, or a
        schedule; None is tuned.
    :param float friction: :math:`A`, the strength of the added noise and the initial
        thermostat :math:`\\xi_0`, per unit of time; None is tuned.
    :param str integrator: ``"nogin"``, ``"symmetric"`` or ``"euler"``.
    :param float thermal_mass: :math:`\\mu`; larger is slower to adapt and fluctuates less. The
        paper has 1 in this convention (its :math:`\\mu = d`). None is 10, and more for fewer
        than 100 parameters, :math:`1000 / d`; ``math.inf`` is a constant friction.
    :param str covariance: how :math:`\\hat V` is held: ``"diagonal"``; ``"full"``, at most 1,000
        parameters; ``"low_rank"``, the leading directions and the diagonal; or
        ``"matrix_free"``, products only, with :math:`V(\\theta)` at the current position from
        an independent minibatch and nothing averaged. None is ``"full"`` for up to 100
        parameters; above, ``"diagonal"``, and ``"low_rank"`` if the tuning has measured more
        than a little noise. See below.
    :param str estimator: how it is observed: ``"sub_batches"``, ``"two_cotangents"`` or
        ``"per_example"``; see :mod:`numpyro_sgmcmc.gradients`.
    :param window: number of steps over which it is averaged; ``math.inf`` for all steps
        since the start, as in the paper. None is enough for an error of the average that
        widens the draws by less than a per cent: 100 steps for the diagonal, more in
        proportion to the number of parameters for the full matrix.
    :param int rank: number of leading directions for ``covariance="low_rank"``.
    :param float temperature: temperature :math:`T`.
    :param str subsampling: ``"without_replacement"`` or ``"with_replacement"``.
    :param int steps_per_sample: number of steps between two samples; None is 1 if the step size
        is given, and else tuned.
    :param init_strategy: a per-site initialization function of NumPyro.
    :param options: ``metric``, ``gradient``, ``refresh_every``, ``tuning``, ``mesh`` and
        ``progress_bar``; see :class:`SGMCMCKernel`.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **References:**

    1. *Covariance-Controlled Adaptive Langevin Thermostat for Large-Scale Bayesian
       Sampling*, Algorithm 1 and eqs. (17)-(19),
       Xiaocheng Shang, Zhanxing Zhu, Benedict Leimkuhler and Amos J. Storkey (2015).
    2. *Langevin Markov Chain Monte Carlo with stochastic gradients*, the NOGIN scheme,
       Charles Matthews and Jonathan Weare (2018).

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import CCAdL

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (1_000,))
        >>> kernel = CCAdL(model, step_size=2e-3, friction=50.0)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=1_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> assert abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.05
    """

    corrects_noise = True

    def __init__(
        self,
        model: Model,
        step_size: StepSize | None = None,
        friction: float | None = None,
        *,
        integrator: str = "nogin",
        thermal_mass: float | None = None,
        covariance: str | None = None,
        estimator: str = "sub_batches",
        window: float | None = None,
        rank: int = 20,
        **options: Any,
    ) -> None:
        super().__init__(model, step_size, friction, **options)
        self._integrator = one_of("integrator", integrator, ("euler", "symmetric", "nogin"))
        fixed = thermal_mass is None or thermal_mass == math.inf
        self._given_mass = thermal_mass if fixed else positive("thermal_mass", thermal_mass)
        self._noise_settings = NoiseSettings.checked(covariance, estimator, window, rank)
        if covariance == "matrix_free" and integrator == "symmetric":
            raise ValueError(
                "integrator='symmetric' needs the covariance before the gradient, which"
                " covariance='matrix_free' does not hold; use integrator='nogin'."
            )

    @property
    def order(self) -> int:
        return 1 if self._integrator == "euler" else 2

    @property
    def settings(self) -> dict[str, str | int | float]:
        found = super().settings | {"integrator": self._integrator}
        return found | ({} if self._view is None else {"covariance": self._noise.covariance})

    @property
    def _thermal_mass(self) -> float:
        # the thermostat fluctuates by 1 / sqrt(mu d), which few parameters would feel
        automatic = 10 * max(1.0, 100 / self._initialised.dimension)
        return automatic if self._given_mass is None else self._given_mass

    @property
    def _noise(self) -> NoiseEstimate:
        tuning, steps = self._tuning, LANCZOS_STEPS
        if tuning is not None and tuning.noise is not None:
            # D is small where the step is as short as the noise asks for
            is_short = tuning.step_size**2 * tuning.noise.largest <= 1.001 * self._temperature
            steps = FEW_LANCZOS_STEPS if is_short else LANCZOS_STEPS
        return self._noise_settings.on(self._initialised, self._subsampling, self._level, steps)

    def check_model(self, view: MinibatchModel, step_size: float, friction: float | None) -> None:
        self._noise_settings.on(view, self._subsampling, self._level)

    @property
    def gradient_at_end(self) -> bool:
        return self._integrator != "nogin"

    def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
        if self._integrator == "euler":
            friction = 0.5
            return euler_step(noise, friction), friction
        # V is known with an error and for the average position: what is left of the noise
        # widens a direction by up to h v / (2 A)
        step_size = whitened_step(noise, longest=1.0 if self._integrator == "nogin" else 0.5)
        return step_size, min(max(0.7, 2.5 * step_size * noise.largest), 2.5)

    def init_dynamics(self, rng_key: Array, position: Array, friction: Any) -> CovarianceControlled:
        xi = jnp.asarray(friction, position.dtype)
        momentum = self.fresh_momentum(rng_key, position)
        return CovarianceControlled(momentum, xi, *self._noise.start(position))

    def gradient(self, potential: Potential, rows: Rows, rng_key: Array) -> Gradient:
        return self._noise.oracle(self, potential, rows, rng_key)

    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        method = {"euler": self._euler, "symmetric": self._symmetric, "nogin": self._nogin}
        return method[self._integrator](state, gradient, rng_key)

    def _euler(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        h, temperature, noise = state.step_size, self._temperature, self._noise
        p, xi, average, count = state.dynamics
        position = drift(state.z, p, h)
        observed = gradient(position)
        control = noise.held.product(noise.current(average, observed), p)
        damping = h / (2 * temperature) * control + xi * p
        normal = random.normal(rng_key, p.shape, p.dtype)
        p = euler_kick(p, observed.gradient, damping, state.friction * temperature, h, normal)
        xi = thermostat(xi, jnp.mean(p**2), h, temperature, self._thermal_mass)
        dynamics = CovarianceControlled(p, xi, *noise.update(average, count, observed))
        return state._replace(z=position, dynamics=dynamics), observed

    def _symmetric(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        h, temperature, noise = state.step_size, self._temperature, self._noise
        p, xi, average, count = state.dynamics

        def control(p: Array) -> Array:
            return noise.held.apply(average, lambda v: jnp.exp(-(h**2) * v / (4 * temperature)), p)

        position = drift(state.z, p, h / 2)
        p = control(p)
        xi = thermostat(xi, jnp.mean(p**2), h / 2, temperature, self._thermal_mass)
        normal = random.normal(rng_key, p.shape, p.dtype)
        p = ornstein_uhlenbeck(p, xi, state.friction * temperature, h, normal)
        xi = thermostat(xi, jnp.mean(p**2), h / 2, temperature, self._thermal_mass)
        p = control(p)
        position = drift(position, p, h / 2)
        observed = gradient(position)
        p = kick(p, observed.gradient, h)
        dynamics = CovarianceControlled(p, xi, *noise.update(average, count, observed))
        return state._replace(z=position, dynamics=dynamics), observed

    def _nogin(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        h, temperature, noise = state.step_size, self._temperature, self._noise
        p, xi, average, count = state.dynamics
        noise_key, probe_key = random.split(rng_key)
        position = drift(state.z, p, h / 2)
        observed = gradient(position)
        covariance = noise.current(average, observed)
        p = kick(p, observed.gradient, h / 2)
        if self._thermal_mass < math.inf:
            # what half a kick's noise has added to the kinetic energy is not heat
            probe = random.normal(probe_key, p.shape, p.dtype)
            added = h**2 / 4 * noise.held.trace(covariance, probe) / p.shape[0]
            xi = thermostat(xi, jnp.mean(p**2) - added, h, temperature, self._thermal_mass)
        scale = jnp.sqrt(temperature * jnp.tanh(state.friction * h / 2))

        def inverse(x: Array) -> Array:
            def function(v: Array) -> Array:
                return 1 / (1 + jnp.tanh(xi * h / 2) + h**2 * v / (4 * temperature))

            return noise.held.apply(covariance, function, x)

        normal = random.normal(noise_key, p.shape, p.dtype)
        p = covariance_controlled(p, inverse, scale * normal)
        p = kick(p, observed.gradient, h / 2)
        position = drift(position, p, h / 2)
        dynamics = CovarianceControlled(p, xi, *noise.update(average, count, observed))
        return state._replace(z=position, dynamics=dynamics), observed
