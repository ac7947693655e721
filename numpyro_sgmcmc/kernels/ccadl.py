# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Covariance-controlled adaptive Langevin thermostat."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp

from numpyro_sgmcmc.gradients import Gradient, sub_batch_gradient, sub_batches
from numpyro_sgmcmc.integrators import drift, euler_kick, thermostat
from numpyro_sgmcmc.kernels._base import (
    MomentumKernel,
    SGMCMCState,
    StepSize,
    one_of,
    positive,
    whole,
)
from numpyro_sgmcmc.minibatch import MinibatchModel, Model
from numpyro_sgmcmc.subsampling import finite_population_factor

#: The full covariance takes memory d^2 for each chain and time d^2 for each step.
MAX_FULL_DIMENSION = 1_000


class CovarianceControlled(NamedTuple):
    """
    - **momentum** - momentum of every coordinate, shape (d,).
    - **thermostat** - :math:`\\xi`, the friction that the thermostat has come to, a scalar.
    - **noise_covariance** - :math:`\\hat V`, the covariance of the noise of the minibatch
      gradient, averaged over past steps: its diagonal, shape (d,), or all of it, (d, d).
    - **observations** - the number of minibatches that :math:`\\hat V` has seen.
    """

    momentum: Array
    thermostat: Array
    noise_covariance: Array
    observations: Array


class CCAdL(MomentumKernel):
    """
    Covariance-controlled adaptive Langevin thermostat: an estimate :math:`\\hat V` of the
    covariance of the gradient's noise, which may depend on the position and on the
    direction, is dissipated by a friction of its own; the thermostat :math:`\\xi` takes up
    what is left.

    .. math::

        \\theta &\\leftarrow \\theta + h p \\\\
        p &\\leftarrow p - h \\nabla \\tilde U(\\theta) - \\frac{h^2}{2 T} \\hat V_{t-1} p
            - h \\xi p + \\sqrt{2 h A T} \\, R, \\qquad R \\sim N(0, I) \\\\
        \\xi &\\leftarrow \\xi + \\frac{h}{\\mu} \\left( \\frac{p^\\top p}{d} - T \\right) \\\\
        \\hat V_t &= (1 - \\kappa_t) \\hat V_{t-1} + \\kappa_t V(\\theta),
            \\qquad \\kappa_t = \\max(1 / t, 1 / \\text{window}).

    :math:`V(\\theta)` is what the current minibatch shows of the covariance: the spread of the
    gradients of its sub-batches times the finite-population factor of the way its rows were
    drawn, see :func:`~numpyro_sgmcmc.gradients.sub_batch_gradient`. It enters
    :math:`\\hat V` after it has been used, one step later than in the paper, since it is
    correlated with the noise of the same minibatch.

    With :math:`\\hat V = V` and a large thermal mass the variance of the draws is
    :math:`1 - (h \\xi + h^2 v / 2) / 2` times the posterior's in a direction with gradient
    noise of variance :math:`v`: too small by the error of Euler's method.

    :param model: a model with NumPyro primitives; see :class:`SGMCMCKernel`. At least one
        plate must have a ``subsample_size``.
    :param step_size: step size :math:`h`, in units of a posterior standard deviation, or a
        schedule. Stable for :math:`h^2 v < 4`.
    :param float friction: :math:`A`, the strength of the added noise and the initial
        thermostat :math:`\\xi_0`, per unit of time.
    :param str covariance: ``"diagonal"`` (memory and time in proportion to the number of
        parameters) or ``"full"`` (in proportion to its square; at most 1,000 parameters).
    :param int window: number of steps over which :math:`\\hat V` is averaged; None for all
        steps since the start, as in the paper.
    :param float thermal_mass: :math:`\\mu`; larger is slower to adapt and fluctuates less. The
        paper has 1 in this convention (its :math:`\\mu = d`).
    :param float temperature: temperature :math:`T`.
    :param str integrator: ``"euler"``, the steps above.
    :param str subsampling: ``"without_replacement"`` or ``"with_replacement"``.
    :param int steps_per_sample: number of steps between two samples.
    :param init_strategy: a per-site initialization function of NumPyro.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **References:**

    1. *Covariance-Controlled Adaptive Langevin Thermostat for Large-Scale Bayesian
       Sampling*, Algorithm 1 and eqs. (17)-(19),
       Xiaocheng Shang, Zhanxing Zhu, Benedict Leimkuhler and Amos J. Storkey (2015).

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
        step_size: StepSize,
        friction: float,
        *,
        covariance: str = "diagonal",
        window: int | None = 100,
        thermal_mass: float = 1.0,
        integrator: str = "euler",
        **options: Any,
    ) -> None:
        super().__init__(model, step_size, friction, **options)
        self._covariance = one_of("covariance", covariance, ("diagonal", "full"))
        self._window = None if window is None else whole("window", window)
        self._thermal_mass = positive("thermal_mass", thermal_mass)
        self._integrator = one_of("integrator", integrator, ("euler",))

    @property
    def settings(self) -> dict[str, str | int | float]:
        return super().settings | {"covariance": self._covariance}

    def check_model(self, view: MinibatchModel, step_size: float, dimension: int) -> None:
        for plate in view.plates:
            if plate.subsample_size < plate.size:
                sub_batches(plate.subsample_size)
        if self._covariance == "full" and dimension > MAX_FULL_DIMENSION:
            raise ValueError(
                f"covariance='full' is for at most {MAX_FULL_DIMENSION:,} parameters, but the model"
                f" has {dimension:,}; use covariance='diagonal'."
            )

    def init_dynamics(self, rng_key: Array, position: Array) -> CovarianceControlled:
        (d,) = position.shape
        return CovarianceControlled(
            momentum=self.fresh_momentum(rng_key, position),
            thermostat=jnp.asarray(self._friction, position.dtype),
            noise_covariance=jnp.zeros(
                (d,) if self._covariance == "diagonal" else (d, d), position.dtype
            ),
            observations=jnp.zeros((), jnp.int32),
        )

    def gradient(self, potential: Callable, rows: dict[str, Array], rng_key: Array) -> Gradient:
        factors = {
            plate.name: finite_population_factor(
                self._subsampling, plate.size, plate.subsample_size
            )
            for plate in self._initialised.plates
        }
        return sub_batch_gradient(potential, rows, rng_key, factors, self._covariance)

    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> SGMCMCState:
        h, temperature = state.step_size, self._temperature
        p, xi, covariance, count = state.dynamics
        position = drift(state.z, p, h)
        observed = gradient(position)
        control = covariance * p if self._covariance == "diagonal" else covariance @ p
        damping = h / (2 * temperature) * control + xi * p
        noise = random.normal(rng_key, p.shape, p.dtype)
        p = euler_kick(p, observed.gradient, damping, self._friction * temperature, h, noise)
        xi = thermostat(xi, p, h, temperature, self._thermal_mass)
        count = count + 1
        kappa = 1 / jnp.minimum(count, self._window or count).astype(p.dtype)
        covariance = covariance + kappa * (observed.noise - covariance)
        return state._replace(
            z=position,
            dynamics=CovarianceControlled(p, xi, covariance, count),
            minibatch_potential=observed.potential,
        )
