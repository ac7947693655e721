# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient Hamiltonian Monte Carlo."""

from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq

from numpyro_sgmcmc.covariance import Covariance, Diagonal
from numpyro_sgmcmc.gradients import Gradient, Observation
from numpyro_sgmcmc.integrators import drift, kick
from numpyro_sgmcmc.kernels._arguments import StepSize, one_of, whole
from numpyro_sgmcmc.kernels._momentum import MomentumKernel
from numpyro_sgmcmc.kernels._noise import NoiseEstimate, NoiseSettings
from numpyro_sgmcmc.kernels._state import Momentum, SGMCMCState, Step
from numpyro_sgmcmc.minibatch import MinibatchModel, Model
from numpyro_sgmcmc.noise import ACCEPTED_BIAS, NoiseLevel, whitened_step
from numpyro_sgmcmc.potentials import Potential, Rows
from numpyro_sgmcmc.problem import Problem

#: The part of a step's drift that comes before its kicks.
_DRIFT_BEFORE = {"aboba": 0.5, "obabo": 1.0}


class MomentumWithNoise(NamedTuple):
    """
    - **momentum** - momentum of every coordinate, shape (d,).
    - **noise_covariance** - :math:`\\hat V`, the covariance of the noise of the minibatch
      gradient, averaged over past steps.
    - **observations** - the number of minibatches that :math:`\\hat V` has seen.
    - **friction_used** - the part of what the friction dissipates that :math:`\\hat V` takes
      in its widest direction; above 1 the friction does not cover it.
    """

    momentum: Array
    noise_covariance: Any
    observations: Array
    friction_used: Array


class SGHMC(MomentumKernel):
    """
    Stochastic gradient Hamiltonian Monte Carlo: Langevin dynamics with friction :math:`A`.

    With ``integrator="aboba"``, the default, and :math:`c = e^{-A h}` a step is

    .. math::

        \\theta &\\leftarrow \\theta + \\tfrac h2 p \\\\
        p &\\leftarrow p - \\tfrac h2 \\nabla \\tilde U(\\theta) \\\\
        p &\\leftarrow c p + \\sqrt{(1 - c^2) T - \\tfrac{h^2}{4} (1 + c)^2 \\hat V} \\, R,
            \\qquad R \\sim N(0, I) \\\\
        p &\\leftarrow p - \\tfrac h2 \\nabla \\tilde U(\\theta) \\\\
        \\theta &\\leftarrow \\theta + \\tfrac h2 p,

    with one gradient. ``"baoab"`` and ``"obabo"`` have the same maps in the order of their
    letters, written from one drift to the next, so that they too need one gradient a step.
    ``"euler"`` is the step of the paper,

    .. math::

        \\theta &\\leftarrow \\theta + h p \\\\
        p &\\leftarrow p - h \\nabla \\tilde U(\\theta) - h A p
            + \\sqrt{2 h (A T - \\hat B)} \\, R, \\qquad \\hat B = h \\hat V / 2 .

    :math:`\\hat V` is an estimate of the covariance of the gradient's noise, zero if none is
    given. On a Gaussian posterior with precision :math:`\\lambda` and gradient noise of
    variance :math:`v` in a direction, without :math:`\\hat V` and for :math:`T = 1`, the
    variance of the draws is the posterior's times

    =========  ==============================================================================
    aboba      :math:`1 + h^2 v / (4 \\tau)`, with :math:`\\tau = \\tanh(A h / 2)`
    baoab      :math:`1 + h^2 v / (4 \\tau) / (1 - h^2 \\lambda / 4)`
    obabo      :math:`(1 + h^2 v / (4 \\tau)) / (1 - h^2 \\lambda / 4)`
    euler      :math:`(1 + h v / (2 A)) / (1 - h^2 \\lambda / (2 (2 - h A)))`
    =========  ==============================================================================

    All are too wide by about :math:`h v / (2 A)`. With :math:`\\hat V = V`, ABOBA is exact, and
    the others lose the terms in :math:`v` to leading order. The friction must cover the
    noise: :math:`h^2 \\hat V / 4 \\le T \\tau`, for Euler's method
    :math:`h \\hat V / 2 \\le A T`, in every direction.

    :param model: a model with NumPyro primitives; see :class:`SGMCMCKernel`.
    :param step_size: step size :math:`h`, in units of a posterior standard deviation, or a
        schedule; None is tuned.
    :param float friction: friction :math:`A`, per unit of time; None is tuned.
    :param str integrator: ``"aboba"``, ``"baoab"``, ``"obabo"`` or ``"euler"``.
    :param noise_variance: :math:`\\hat V`, in the coordinates of the metric: a number; for each
        latent site an array that broadcasts to its unconstrained shape; or ``"estimated"``
        from the minibatches. In the last case the kernel refuses to start where the friction
        does not cover the noise, and where it does not later, no noise is added in that
        direction: the field ``friction_used`` is then above 1, and ``to_arviz`` warns.
    :param str covariance: how :math:`\\hat V` is held; see :class:`CCAdL`.
    :param str estimator: how it is observed; see :class:`CCAdL`.
    :param window: number of steps over which it is averaged; see :class:`CCAdL`.
    :param int rank: leading directions held by ``covariance="low_rank"``.
    :param int resample_momentum: draw a new momentum every so many steps; never if None.
    :param float temperature: temperature :math:`T`.
    :param str subsampling: how rows are drawn; see :class:`SGMCMCKernel`. With
        ``noise_variance``, ``"without_replacement"`` or ``"with_replacement"``.
    :param int steps_per_sample: number of steps between two samples; None is 1 if the step size
        is given, and else tuned.
    :param init_strategy: a per-site initialization function of NumPyro.
    :param options: ``metric``, ``gradient``, ``refresh_every``, ``tuning``, ``mesh`` and
        ``progress_bar``; see :class:`SGMCMCKernel`.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **References:**

    1. *Stochastic Gradient Hamiltonian Monte Carlo*, Algorithm 2 and eq. (15),
       Tianqi Chen, Emily B. Fox and Carlos Guestrin (2014).
    2. *Rational Construction of Stochastic Numerical Methods for Molecular Sampling*, the
       splittings, Benedict Leimkuhler and Charles Matthews (2013).

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
        step_size: StepSize | None = None,
        friction: float | None = None,
        *,
        integrator: str = "aboba",
        noise_variance: float | dict[str, Any] | str = 0.0,
        covariance: str | None = None,
        estimator: str = "sub_batches",
        window: float | None = None,
        rank: int = 20,
        resample_momentum: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, step_size, friction, **options)
        self._resample_momentum = (
            None if resample_momentum is None else whole("resample_momentum", resample_momentum)
        )
        self._integrator = one_of("integrator", integrator, ("euler", *_DRIFT_BEFORE, "baoab"))
        self._estimates = isinstance(noise_variance, str)
        self._noise_settings = NoiseSettings.checked(covariance, estimator, window, rank)
        if self._estimates:
            one_of("noise_variance", noise_variance, ("estimated",))
            noise_variance = 0.0
            if covariance == "matrix_free" and integrator == "baoab":
                raise ValueError(
                    "integrator='baoab' needs the covariance before the gradient, which"
                    " covariance='matrix_free' does not hold; use integrator='aboba'."
                )
        if not isinstance(noise_variance, dict) and np.ndim(noise_variance) > 0:
            raise ValueError(
                "`noise_variance` must be a number, a dict with an array for each latent site, or"
                f" 'estimated'; got an array of shape {np.shape(noise_variance)}."
            )
        self._noise_variance = jax.tree.map(np.asarray, noise_variance)
        values = jax.tree.leaves(self._noise_variance)
        if not all(np.all(np.isfinite(v)) and np.all(v >= 0) for v in values):
            raise ValueError(
                f"`noise_variance` must be finite and not negative; got {noise_variance}."
            )
        self.corrects_noise = self._estimates or any(np.any(v > 0) for v in values)

    @property
    def default_fields(self) -> tuple[str, ...]:
        return (*super().default_fields, *(["friction_used"] if self._estimates else []))

    def warnings(self, state: SGMCMCState) -> str:
        text = super().warnings(state)
        if self._estimates and (used := float(np.max(state.friction_used))) > 1:
            text += f", NOISE OF THE GRADIENT {used:.2g} TIMES WHAT THE FRICTION DISSIPATES"
        return text

    @property
    def order(self) -> int:
        return 2 if self._integrator != "euler" and self.corrects_noise else 1

    @property
    def settings(self) -> dict[str, str | int | float]:
        return super().settings | {"integrator": self._integrator}

    @property
    def _noise(self) -> NoiseEstimate:
        return self._noise_settings.on(self._initialised, self._subsampling, self._level)

    def check_model(self, view: MinibatchModel, step_size: float, friction: float | None) -> None:
        if self._estimates:
            self._noise_settings.on(view, self._subsampling, self._level)
            return
        assert friction is not None
        variance = float(np.max(self._flat_noise_variance(view)))
        self._check_friction(variance, step_size, friction, "`noise_variance` of {:.4g}")

    def check_start(self, state: SGMCMCState, args: tuple, kwargs: dict) -> None:
        if self._estimates:
            axes = self._axes(0, 0 if jnp.ndim(state.friction) else None)

            def found(problem: Problem, state: SGMCMCState) -> Array:
                one = partial(self._noise_at_start, args=problem.args, kwargs=problem.kwargs)
                return jnp.max((jax.vmap(one, (axes,)) if jnp.ndim(state.i) else one)(state))

            largest = float(self._problem(args, kwargs).compiled(found)(state))
            what = "The noise of the gradient at the initial values, of variance {:.4g},"
            friction = float(jnp.max(state.friction))
            self._check_friction(largest, float(jnp.max(state.step_size)), friction, what)

    def _check_friction(
        self, variance: float, step_size: float, friction: float, what: str
    ) -> None:
        """
        :raises ValueError: if the friction dissipates less than noise of this variance adds.
        """
        kept, taken = self._balance(step_size, friction)
        if variance * taken <= kept * (1 + 1e-9):  # so that the remedy itself is accepted
            return
        h, temperature = step_size, self._temperature

        def excess(h: float) -> float:
            kept, taken = self._balance(h, friction)
            return float(variance * taken - kept)

        smaller = brentq(excess, 1e-8 * h, h)
        if self._integrator == "euler":
            needed = h * variance / (2 * temperature)
        else:
            part = h**2 * variance / (4 * temperature)
            needed = 2 / h * np.arctanh(part) if part < 1 else np.inf
        elsewhere = ", `init_strategy` to start nearer to the posterior" if self._estimates else ""
        more = f"a friction of at least {needed:.4g}, or " if needed < np.inf else ""
        raise ValueError(
            f"{what.format(variance)} is more than friction={friction:.4g} can dissipate at"
            f" step_size={h:.4g}, which is {kept / taken:.4g}. Use {more}a step size of at most"
            f" {smaller:.4g}{elsewhere}, or CCAdL, which has no such limit."
        )

    def _balance(self, h: Any, friction: Any) -> tuple[Any, Any]:
        """
        The variance of the noise to add is the first of these numbers less the second times
        the variance of the gradient's noise.
        """
        if self._integrator == "euler":
            return 2 * h * friction * self._temperature, h**2
        xp = jnp if isinstance(h, Array) else np
        kept = -self._temperature * xp.expm1(-2 * friction * h)
        return kept, h**2 / 4 * (1 + xp.exp(-friction * h)) ** 2

    def _noise_at_start(self, state: SGMCMCState, args: tuple, kwargs: dict) -> Array:
        """The largest variance of the gradient's noise of one chain at its initial values."""
        _, position, potential = self.flattened(state, args, kwargs)
        noise = self._noise
        steps = 1_000 if noise.window == math.inf else int(noise.window)

        def observe(key: Array) -> Observation:
            rows_key, model_key = random.split(key)
            rows = self.draw_rows(rows_key, jnp.zeros((), jnp.int32))
            return self.gradient_of_all(potential, rows, model_key)(position)

        def seen(running: tuple[Any, Array], key: Array) -> tuple[Any, None]:
            return noise.update(*running, observe(key)), None

        keys = random.split(state.rng_key, steps)
        first = keys[0]
        (average, _), _ = lax.scan(seen, noise.start(position), keys[1:])
        probe = random.normal(first, position.shape, position.dtype)
        return noise.held.largest(noise.current(average, observe(first)), probe)

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

    @property
    def gradient_at_end(self) -> bool:
        return self._integrator != "aboba"

    def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
        friction = 1.0
        # h v / (2 A) is the relative error of the variance, or what the friction has to cover
        accepted = 0.25 if self._estimates else ACCEPTED_BIAS
        largest = 2 * accepted * friction / max(noise.largest, 1e-30)
        return min(whitened_step(noise), largest), friction

    def init_dynamics(
        self, rng_key: Array, position: Array, friction: Any
    ) -> Momentum | MomentumWithNoise:
        momentum = self.fresh_momentum(rng_key, position)
        if not self._estimates:
            return Momentum(momentum)
        zero = jnp.zeros((), position.dtype)
        return MomentumWithNoise(momentum, *self._noise.start(position), zero)

    def gradient(self, potential: Potential, rows: Rows, rng_key: Array) -> Gradient:
        if not self._estimates:
            return super().gradient(potential, rows, rng_key)
        return self._noise.oracle(self, potential, rows, rng_key)

    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        p = state.dynamics.momentum
        if self._resample_momentum is not None:
            rng_key, momentum_key = random.split(rng_key)
            fresh = self.fresh_momentum(momentum_key, p)
            p = jnp.where(state.i % self._resample_momentum == 0, fresh, p)
        state = state._replace(dynamics=state.dynamics._replace(momentum=p))
        normal = random.normal(rng_key, p.shape, p.dtype)
        method = {"euler": self._euler, "baoab": self._baoab}
        state, observed = method.get(self._integrator, self._kicks_around)(state, gradient, normal)
        if self._estimates:
            _, average, count, _ = dynamics = state.dynamics
            average, count = self._noise.update(average, count, observed)
            state = state._replace(
                dynamics=dynamics._replace(noise_covariance=average, observations=count)
            )
        return state, observed

    def _euler(self, state: SGMCMCState, gradient: Gradient, normal: Array) -> Step:
        h, p = state.step_size, state.dynamics.momentum
        position = drift(state.z, p, h)
        observed = gradient(position)
        added, used = self._added_noise(state, observed, normal)
        p = kick(p, observed.gradient + state.friction * p, h) + added
        return self._moved(state, position, p, used), observed

    def _baoab(self, state: SGMCMCState, gradient: Gradient, normal: Array) -> Step:
        h, p = state.step_size, state.dynamics.momentum
        position = drift(state.z, p, h / 2)
        added, used = self._added_noise(state, None, normal)
        p = jnp.exp(-state.friction * h) * p + added
        position = drift(position, p, h / 2)
        observed = gradient(position)
        p = kick(p, observed.gradient, h)
        return self._moved(state, position, p, used), observed

    def _kicks_around(self, state: SGMCMCState, gradient: Gradient, normal: Array) -> Step:
        h, p = state.step_size, state.dynamics.momentum
        before = _DRIFT_BEFORE[self._integrator]
        position = drift(state.z, p, before * h)
        observed = gradient(position)
        p = kick(p, observed.gradient, h / 2)
        added, used = self._added_noise(state, observed, normal)
        p = jnp.exp(-state.friction * h) * p + added
        p = kick(p, observed.gradient, h / 2)
        position = drift(position, p, (1 - before) * h)
        return self._moved(state, position, p, used), observed

    def _added_noise(
        self, state: SGMCMCState, observed: Observation | None, normal: Array
    ) -> tuple[Array, Array]:
        """The noise to add, and the part of it that the noise of the gradient stands in for."""
        kept, taken = self._balance(state.step_size, state.friction)
        held: Covariance = Diagonal()
        covariance = jnp.asarray(self._flat_noise_variance(self._initialised), normal.dtype)
        if self._estimates:
            held, covariance = self._noise.held, state.dynamics.noise_covariance
            if observed is not None:
                covariance = self._noise.current(covariance, observed)

        def root(v: Array) -> Array:
            return jnp.sqrt(jnp.maximum(kept - taken * v, 0.0))

        used = held.largest(covariance, normal) * taken / kept
        return held.apply(covariance, root, normal), used

    def _moved(self, state: SGMCMCState, position: Array, p: Array, used: Array) -> SGMCMCState:
        dynamics = state.dynamics._replace(momentum=p)
        if self._estimates:
            dynamics = dynamics._replace(friction_used=used)
        return state._replace(z=position, dynamics=dynamics)
