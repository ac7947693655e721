# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Covariance-controlled adaptive Langevin thermostat."""

from dataclasses import dataclass
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp

from numpyro_sgmcmc.data.converters import one_of, positive
from numpyro_sgmcmc.gradients.covariance import FEW_LANCZOS_STEPS, LANCZOS_STEPS
from numpyro_sgmcmc.gradients.estimators import Evaluation, Gradient
from numpyro_sgmcmc.gradients.noise_estimate import RunningCovariance
from numpyro_sgmcmc.kernels.integrators import (
    covariance_controlled,
    drift,
    euler_kick,
    noise_controls,
    ornstein_uhlenbeck,
    thermostat,
)
from numpyro_sgmcmc.kernels.method import Traits
from numpyro_sgmcmc.kernels.momentum import MomentumKernel, fresh_momentum
from numpyro_sgmcmc.kernels.settings import (
    check_not_matrix_free,
    checked_noise,
    recorded,
)
from numpyro_sgmcmc.kernels.splittings import SPLITTINGS, Splitting
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState, Step
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.noise_level import (
    ACCEPTED_SHIFT,
    NoiseLevel,
    euler_step,
    largest_of,
    whitened_step,
)
from numpyro_sgmcmc.tuning.tuning import Tuning

#: Integrators of this method that other methods lack.
_OWN = ("euler", "symmetric", "nogin")

#: Largest noise, :math:`h^2 v`, that the symmetric integrator removes from the momentum: in one
#: direction (the bound of a tuned step, and rounding), and in the mean of the directions. With a
#: mean of 0.65 and 400 parameters each pilot halved the step, while no pilot did with NOGIN.
_MOST_NOISE = 1.001
_MOST_IN_THE_MEAN = 0.3
#: Largest product of the noise and the excess curvature in the metric. A third of it is the
#: relative error of a variance.
_ACCEPTED = 0.1
#: Largest nonlinearity for the symmetric integrator, with noise and with hardly any, and the noise
#: that counts as hardly any. In the neck of a funnel an undone step with a reversed momentum leads
#: back only if the gradient is taken between two half drifts. With the gradient at the end, chains
#: stood still there, at nu = 0.22, h^2 v = 0.09 and 0.5.
_NO_FUNNEL = 0.15
_NO_FUNNEL_IF_QUIET = 0.3
_QUIET = 0.05


def _splitting_of(integrator: str) -> Splitting | None:
    """The splitting around the control and the thermostat; None is Euler's method."""
    names = {"auto": "aboba", "nogin": "aboba", "symmetric": "baoab"}
    return SPLITTINGS.get(names.get(integrator, integrator))


class CovarianceControlled(NamedTuple):
    """
    The momentum, the thermostat and the noise estimate of CCAdL.

    - **momentum** - momentum of every coordinate, shape (d,).
    - **thermostat** - :math:`\\xi`, the current friction of the thermostat, a scalar.
    - **noise_covariance** - :math:`\\hat V`, the covariance of the noise of the minibatch gradient,
      averaged over past steps: its diagonal, shape (d,), the full matrix, (d, d), a
      :class:`~numpyro_sgmcmc.gradients.covariance.LowRankPlusDiagonal`, or empty if matrix-free.
    - **observations** - the number of minibatches in :math:`\\hat V`.
    """

    momentum: Array
    thermostat: Array
    noise_covariance: Any
    observations: Array


class CCAdL(MomentumKernel):
    """
    Covariance-controlled adaptive Langevin thermostat: the default kernel, ``CCAdL(model)``.

    It is exact for Gaussian posteriors whatever the noise of the minibatches, takes long steps, and
    tunes all that is not given.

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
        >>> kernel = CCAdL(model, progress_bar=False)
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=1_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> assert abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.05

    :param model: a model with NumPyro primitives; see :class:`SGMCMCKernel`. At least one
        plate must have a ``subsample_size``.
    :param step_size: step size :math:`h`, in units of a posterior standard deviation, or a
        schedule; None is tuned.
    :param float friction: :math:`A`, the strength of the added noise and the initial
        thermostat :math:`\\xi_0`, per unit of time; None is tuned.
    :param str integrator: ``"auto"``; ``"symmetric"``; ``"nogin"``; another of the splittings in
        :mod:`numpyro_sgmcmc.kernels.splittings`, with the same middle but for
        :math:`a = b = \\exp(-\\tfrac{h^2}{4 T} \\hat V)`; or ``"euler"``.
    :param float thermal_mass: :math:`\\mu`; larger is slower to adapt and fluctuates less. The
        paper has 1 in this convention (its :math:`\\mu = d`). None is 10, and more for fewer
        than 100 parameters, :math:`1000 / d`; ``math.inf`` is a constant friction.
    :param NoiseEstimate noise: how :math:`\\hat V` is represented, observed and averaged.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **The step.** The kernel estimates the covariance :math:`\\hat V` of the gradient noise, which
    may depend on the position and on the direction. A separate friction dissipates this noise. A
    thermostat :math:`\\xi` takes up the rest.

    With ``integrator="symmetric"`` a step is, written from one drift to the next,

    .. math::

        \\theta &\\leftarrow \\theta + \\tfrac h2 p \\\\
        p &\\leftarrow a(\\hat V) \\, p \\\\
        \\xi &\\leftarrow \\xi + \\frac{h}{2 \\mu} \\left( \\frac{p^\\top p}{d} - T \\right) \\\\
        p &\\leftarrow e^{-\\xi h} p
            + \\sqrt{2 A T h \\, \\phi(\\xi h)} \\, R, \\qquad R \\sim N(0, I) \\\\
        \\xi &\\leftarrow \\xi + \\frac{h}{2 \\mu} \\left( \\frac{p^\\top p}{d} - T \\right) \\\\
        p &\\leftarrow b(\\hat V) \\, p \\\\
        \\theta &\\leftarrow \\theta + \\tfrac h2 p \\\\
        p &\\leftarrow p - h \\nabla \\tilde U(\\theta) ,

    with :math:`a` and :math:`b` of
    :func:`~numpyro_sgmcmc.kernels.integrators.noise_controls` and :math:`\\phi` of
    :func:`~numpyro_sgmcmc.kernels.integrators.phi`. With :math:`\\hat V = V` the step is exact for
    a Gaussian posterior in its metric, for any noise in any direction. If the curvature
    :math:`\\lambda` is not 1, the relative error of a variance is at most about :math:`h^3 v
    (\\lambda - 1) / (3 T)`. The gradient is taken at the draws.

    With ``integrator="nogin"`` a step is

    .. math::

        \\theta &\\leftarrow \\theta + \\tfrac h2 p \\\\
        p &\\leftarrow p - \\tfrac h2 \\nabla \\tilde U(\\theta) \\\\
        \\xi &\\leftarrow \\xi + \\frac{h}{\\mu} \\left( \\frac{p^\\top p
            - \\tfrac{h^2}{4} \\operatorname{tr} \\hat V}{d} - T \\right) \\\\
        p &\\leftarrow (I - D) (I + D)^{-1} (p + R) + R \\\\
        p &\\leftarrow p - \\tfrac h2 \\nabla \\tilde U(\\theta) \\\\
        \\theta &\\leftarrow \\theta + \\tfrac h2 p

    with one gradient, one :math:`R \\sim N(0, T \\tanh(A h / 2) I)` used twice, and
    :math:`D = \\tanh(\\xi h / 2) I + \\tfrac{h^2}{4 T} \\hat V`. With :math:`\\hat V = V` the step
    is exact for a Gaussian posterior in any metric, for any noise in any direction, up to
    :math:`h^2 \\lambda < 4`. The gradient is taken half a drift from the draws, where the positions
    are wider by :math:`h^2 / 4`. For other posteriors this matters: :math:`d` effects together move
    their common scale by about :math:`h^2 d / (4 \\sqrt{2 N})` of its standard deviation. Above 500
    parameters the tuning takes steps at which this is about a tenth, unless there is little noise.

    For posteriors that are not Gaussian both have an error of second order in :math:`h`. The
    default, ``"auto"``, is ``"symmetric"`` for a tuned step with little noise: :math:`h^2 v` is at
    most :math:`T` in each direction, or :math:`T / (10 (\\lambda - 1))` if that is less, and at
    most :math:`0.3 \\, T` in the mean. It is ``"nogin"`` for more noise, for posteriors that look
    like a funnel, and without tuning.

    ``"euler"`` is the step of the paper,

    .. math::

        \\theta &\\leftarrow \\theta + h p \\\\
        p &\\leftarrow p - h \\nabla \\tilde U(\\theta) - \\frac{h^2}{2 T} \\hat V_{t-1} p
            - h \\xi p + \\sqrt{2 h A T} \\, R, \\qquad R \\sim N(0, I) \\\\
        \\xi &\\leftarrow \\xi + \\frac{h}{\\mu} \\left( \\frac{p^\\top p}{d} - T \\right),

    which is stable for :math:`h^2 v < 4`. In a direction with gradient noise of variance :math:`v`
    the draws have :math:`1 - (h \\xi + h^2 v / 2) / 2` times the posterior's variance, times the
    kinetic temperature of that direction. The thermostat keeps the mean of these temperatures at
    :math:`T`.

    In each step :math:`\\hat V` is the average over past minibatches,

    .. math::

        \\hat V_t = (1 - \\kappa_t) \\hat V_{t-1} + \\kappa_t V(\\theta),
            \\qquad \\kappa_t = \\max(1 / t, 1 / \\text{window}),

    used one step later than in the paper, because the estimate from a minibatch is correlated with
    the noise of its gradient. The diagonal alone is not enough if the noise is correlated between
    parameters, as in most regressions. Some directions of the posterior are then too wide and
    others too narrow, and the mean kinetic energy does not show it. Above 500 parameters the tuning
    takes steps with which this error is small
    (:mod:`~numpyro_sgmcmc.tuning.correlated_noise`).

    **References:**

    1. *Covariance-Controlled Adaptive Langevin Thermostat for Large-Scale Bayesian
       Sampling*, Algorithm 1 and eqs. (17)-(19),
       Xiaocheng Shang, Zhanxing Zhu, Benedict Leimkuhler and Amos J. Storkey (2015).
    2. *Langevin Markov Chain Monte Carlo with stochastic gradients*, the NOGIN scheme,
       Charles Matthews and Jonathan Weare (2018).
    """

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Method(MomentumKernel.Method):
        integrator: str = recorded("auto")
        thermal_mass: float | None = None
        noise: Any = None

        def __post_init__(self) -> None:
            super().__post_init__()
            one_of("integrator", self.integrator, ("auto", *_OWN, *SPLITTINGS))
            if self.thermal_mass is not None:
                mass = positive("thermal_mass", self.thermal_mass, infinite=True)
                self.set(thermal_mass=mass)
            noise = checked_noise(self.noise)
            self.set(noise=noise)
            splitting = _splitting_of(self.integrator)
            if splitting and not splitting.gradient_before_middle:
                check_not_matrix_free(noise, self.integrator, "nogin")

        @property
        def traits(self) -> Traits:
            return Traits(self.gradient_at_end(self.integrator), corrects_noise=True)

        @property
        def _shows_all_noise(self) -> bool:
            return self.noise is not None and self.noise.covariance in ("full", "matrix_free")

        def integrator_for(self, tuning: Tuning) -> str:
            noise, level = self.noise, tuning.noise
            if self.integrator != "auto":
                return self.integrator
            if level is None or (noise is not None and noise.covariance == "matrix_free"):
                return "nogin"
            return "symmetric" if self._is_symmetric(level, tuning.step_size) else "nogin"

        def _is_symmetric(self, level: NoiseLevel, step_size: float) -> bool:
            """True if the symmetric integrator is the better one."""
            is_silent = step_size**2 * level.largest <= _QUIET * self.temperature
            bent = _NO_FUNNEL_IF_QUIET if is_silent else _NO_FUNNEL
            return step_size <= self._longest_symmetric(level) and level.nonlinearity < bent

        def _longest_symmetric(self, level: NoiseLevel) -> float:
            """The longest step with little noise for the symmetric integrator."""
            most = min(_MOST_NOISE, _ACCEPTED / max(level.curvature - 1, _ACCEPTED / 2))
            unit = max(level.largest / most, level.mean / _MOST_IN_THE_MEAN)
            return math.inf if unit == 0 else math.sqrt(self.temperature / unit)

        def gradient_at_end(self, integrator: str) -> bool:
            splitting = _splitting_of(integrator)
            return splitting is None or splitting.gradient_at_end

        def noise_estimator(self, target: Target, tuning: Tuning) -> RunningCovariance | None:
            assert self.noise is not None
            level = largest_of(tuning.noise)
            # D is small if the noise has limited the step
            short = level is not None and tuning.step_size**2 * level <= 1.001 * self.temperature
            steps = FEW_LANCZOS_STEPS if short else LANCZOS_STEPS
            return self.noise.resolved(target, level, steps)

        def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
            if _splitting_of(self.integrator) is None:
                friction = 0.5
                return euler_step(noise, friction), friction
            # the estimate of V has an error and is an average over positions; the rest of the noise
            # widens a direction by up to h v / (2 A)
            longest = 1.0 if self.integrator in ("auto", "nogin") else 0.5
            step_size = whitened_step(noise, longest)
            friction = min(max(0.7, 2.5 * step_size * noise.largest), 2.5)
            if noise.correlated > 0 and not self._shows_all_noise:
                taken = min(self.temperature, 1.0) * (self.friction or friction)
                step_size = min(step_size, taken / noise.correlated)
            if noise.widened > 0 and self.integrator in ("auto", "nogin"):
                shift = noise.widened * math.sqrt(self.temperature)
                symmetric = min(step_size, self._longest_symmetric(noise))
                if self.integrator == "nogin" or not self._is_symmetric(noise, symmetric):
                    symmetric = 0.0
                step_size = min(step_size, max(2 * math.sqrt(ACCEPTED_SHIFT / shift), symmetric))
            return step_size, friction

        def init_dynamics(
            self, rng_key: Array, position: Array, fixed: ChainConstants
        ) -> CovarianceControlled:
            momentum = fresh_momentum(rng_key, position, self.temperature)
            xi = jnp.asarray(fixed.friction, position.dtype)
            return CovarianceControlled(momentum, xi, *fixed.layout.noise.start(position))

        def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
            h, fixed = state.step_size, state.fixed
            noise, integrator = fixed.layout.noise, fixed.layout.integrator
            p, xi, average, count = state.dynamics
            splitting = _splitting_of(integrator)
            if splitting is not None:
                inner = self._nogin if integrator == "nogin" else self._middle
                maps = partial(inner, state, splitting, rng_key)
                position, p, xi, evaluation = splitting.step(state.z, p, gradient, h, maps)
            else:
                position = drift(state.z, p, h)
                evaluation = gradient(position)
                product = noise.representation.product(noise.current(average, evaluation), p)
                damping = h / (2 * self.temperature) * product + xi * p
                normal = random.normal(rng_key, p.shape, p.dtype)
                diffusion = fixed.friction * self.temperature
                p = euler_kick(p, evaluation.gradient, damping, diffusion, h, normal)
                xi = self._adapted(xi, jnp.mean(p**2), h, p.shape[0])
            dynamics = CovarianceControlled(p, xi, *noise.update(average, count, evaluation))
            return state._replace(z=position, dynamics=dynamics), evaluation

        def _adapted(self, xi: Array, energy: Array, step_size: Array, dimension: int) -> Array:
            """The thermostat after the map D."""
            # fluctuations of the thermostat are 1 / sqrt(mu d), too large for few parameters
            mass = self.thermal_mass or 10 * max(1.0, 100 / dimension)
            return thermostat(xi, energy, step_size, self.temperature, mass)

        def _middle(
            self,
            state: SGMCMCState,
            splitting: Splitting,
            rng_key: Array,
            p: Array,
            evaluation: Evaluation | None,
        ) -> tuple[Array, Array]:
            """The middle C D(h/2) O D(h/2) C, on momentum and added noise side by side."""
            h, friction, noise = state.step_size, state.fixed.friction, state.fixed.layout.noise
            xi, average = state.dynamics.thermostat, state.dynamics.noise_covariance

            def controls(v: Array) -> tuple[Array, Array]:
                """The maps C on either side of the middle, for eigenvalues of the covariance."""
                if splitting is SPLITTINGS["baoab"]:
                    return noise_controls(v / self.temperature, h, friction)
                half = jnp.exp(-(h**2) * v / (4 * self.temperature))
                return half, half

            covariance = average if evaluation is None else noise.current(average, evaluation)
            normal = random.normal(rng_key, p.shape, p.dtype)
            both = jax.vmap(partial(noise.representation.on, covariance))(jnp.stack([p, normal]))
            of_momentum, of_noise = (jax.tree.map(lambda x, k=k: x[k], both) for k in range(2))
            p = of_momentum.apply(lambda v: controls(v)[0])
            half = self._adapted(xi, jnp.mean(p**2), h / 2, p.shape[0])
            moved = partial(
                ornstein_uhlenbeck,
                damping=half,
                diffusion=friction * self.temperature,
                step_size=h,
            )
            energy = jnp.mean(moved(p, noise=normal) ** 2)
            whole = self._adapted(half, energy, h / 2, p.shape[0])
            p = of_momentum.apply(lambda v: math.prod(controls(v)))
            return moved(p, noise=of_noise.apply(lambda v: controls(v)[1])), whole

        def _nogin(
            self,
            state: SGMCMCState,
            splitting: Splitting,
            rng_key: Array,
            p: Array,
            evaluation: Evaluation | None,
        ) -> tuple[Array, Array]:
            """The middle of NOGIN: the map D, then the map O of NOGIN."""
            assert evaluation is not None
            h, noise, here = state.step_size, state.fixed.layout.noise, state.dynamics.thermostat
            noise_key, probe_key = random.split(rng_key)
            covariance = noise.current(state.dynamics.noise_covariance, evaluation)
            if self.thermal_mass != math.inf:
                # the kinetic energy has noise of half a kick, which is not heat
                probe = random.normal(probe_key, p.shape, p.dtype)
                added = h**2 / 4 * noise.representation.trace(covariance, probe) / p.shape[0]
                here = self._adapted(here, jnp.mean(p**2) - added, h, p.shape[0])

            def inverse(x: Array) -> Array:
                damping = jnp.tanh(here * h / 2)
                return noise.representation.apply(
                    covariance, lambda v: 1 / (1 + damping + h**2 * v / (4 * self.temperature)), x
                )

            scale = jnp.sqrt(self.temperature * jnp.tanh(state.fixed.friction * h / 2))
            normal = random.normal(noise_key, p.shape, p.dtype)
            return covariance_controlled(p, inverse, scale * normal), here
