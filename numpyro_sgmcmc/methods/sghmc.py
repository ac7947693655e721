# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient Hamiltonian Monte Carlo."""

from dataclasses import dataclass
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq

from numpyro_sgmcmc.data.converters import array, one_of, shown, whole
from numpyro_sgmcmc.gradients.covariance import Covariance, Diagonal
from numpyro_sgmcmc.gradients.estimators import Evaluation, Gradient
from numpyro_sgmcmc.gradients.noise_estimate import (
    gradient_oracle,
)
from numpyro_sgmcmc.kernels.chains import axes_of
from numpyro_sgmcmc.kernels.integrators import drift, kick
from numpyro_sgmcmc.kernels.method import Begun, Traits
from numpyro_sgmcmc.kernels.momentum import Momentum, MomentumKernel, fresh_momentum
from numpyro_sgmcmc.kernels.settings import (
    check_not_matrix_free,
    checked_noise,
    recorded,
)
from numpyro_sgmcmc.kernels.splittings import SPLITTINGS, Splitting
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState, Step
from numpyro_sgmcmc.kernels.transition import flattened
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.noise_level import ACCEPTED_BIAS, NoiseLevel, whitened_step


class MomentumWithNoise(NamedTuple):
    """
    The momentum and the noise estimate of SGHMC.

    - **momentum** - momentum of every coordinate, shape (d,).
    - **noise_covariance** - :math:`\\hat V`, the covariance of the noise of the minibatch
      gradient, averaged over past steps.
    - **observations** - the number of minibatches in :math:`\\hat V`.
    - **friction_used** - the noise in the widest direction of :math:`\\hat V`, as a part of the
      noise that the friction dissipates. Above 1 the friction does not cover the noise.
    """

    momentum: Array
    noise_covariance: Any
    observations: Array
    friction_used: Array


class SGHMC(MomentumKernel):
    """
    Stochastic gradient Hamiltonian Monte Carlo: Langevin dynamics with friction :math:`A`.

    Use it if the noise of the minibatches is small or known.

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

    :param step_size: step size :math:`h`, in units of a posterior standard deviation, or a
        schedule; None is tuned.
    :param float friction: friction :math:`A`, per unit of time; None is tuned.
    :param str integrator: ``"aboba"``, ``"baoab"``, ``"obabo"``, the others in
        :mod:`numpyro_sgmcmc.kernels.splittings`, or ``"euler"``.
    :param noise_variance: :math:`\\hat V`, in the coordinates of the metric: a number; for each
        latent site an array that broadcasts to its unconstrained shape; or ``"estimated"`` from the
        minibatches. In the last case the kernel refuses to start if the friction does not cover the
        noise. If the noise exceeds the friction later in a direction, no noise is added there, the
        field ``friction_used`` is above 1, and ``to_arviz`` warns.
    :param NoiseEstimate noise: how :math:`\\hat V` is estimated, with
        ``noise_variance="estimated"``.
    :param int resample_momentum: number of steps between new draws of the momentum; None for no new
        draws.
    :param str subsampling: how rows are drawn; see :class:`SGMCMCKernel`. With
        ``noise_variance``, ``"without_replacement"`` or ``"with_replacement"``.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **The step.** With ``integrator="aboba"``, the default, and :math:`c = e^{-A h}` a step is

    .. math::

        \\theta &\\leftarrow \\theta + \\tfrac h2 p \\\\
        p &\\leftarrow p - \\tfrac h2 \\nabla \\tilde U(\\theta) \\\\
        p &\\leftarrow c p + \\sqrt{(1 - c^2) T - \\tfrac{h^2}{4} (1 + c)^2 \\hat V} \\, R,
            \\qquad R \\sim N(0, I) \\\\
        p &\\leftarrow p - \\tfrac h2 \\nabla \\tilde U(\\theta) \\\\
        \\theta &\\leftarrow \\theta + \\tfrac h2 p,

    with one gradient. ``"baoab"`` and ``"obabo"`` have these maps in the order of their letters.
    They are written from one drift to the next, so that each step needs one gradient. ``"euler"``
    is the step of the paper,

    .. math::

        \\theta &\\leftarrow \\theta + h p \\\\
        p &\\leftarrow p - h \\nabla \\tilde U(\\theta) - h A p
            + \\sqrt{2 h (A T - \\hat B)} \\, R, \\qquad \\hat B = h \\hat V / 2 .

    :math:`\\hat V` is an estimate of the covariance of the gradient noise, zero if no estimate is
    given. On a Gaussian posterior with precision :math:`\\lambda` and gradient noise of variance
    :math:`v` in a direction, without :math:`\\hat V` and for :math:`T = 1`, the variance of the
    draws is the posterior's times

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

    **References:**

    1. *Stochastic Gradient Hamiltonian Monte Carlo*, Algorithm 2 and eq. (15),
       Tianqi Chen, Emily B. Fox and Carlos Guestrin (2014).
    2. *Rational Construction of Stochastic Numerical Methods for Molecular Sampling*, the
       splittings, Benedict Leimkuhler and Charles Matthews (2013).
    """

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Method(MomentumKernel.Method):
        integrator: str = recorded("aboba")
        noise_variance: float | dict[str, Any] | str = 0.0
        noise: Any = None
        resample_momentum: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.resample_momentum is not None:
                every = whole("resample_momentum", self.resample_momentum)
                self.set(resample_momentum=every)
            one_of("integrator", self.integrator, ("euler", *SPLITTINGS))
            remedy = "`noise_variance='estimated'`"
            noise = checked_noise(self.noise, self.estimates, remedy)
            self.set(noise=noise)
            if self.estimates:
                one_of("noise_variance", self.noise_variance, ("estimated",))
                splitting = self.splitting
                if splitting and not splitting.gradient_before_middle:
                    check_not_matrix_free(noise, self.integrator, "aboba")
                return
            given: Any = self.noise_variance
            # a value of each site may have any shape
            is_tree = isinstance(given, dict)
            given = given if is_tree else array("noise_variance", given)
            variances = jax.tree.map(lambda x: array("noise_variance", x), given)
            for x in jax.tree.leaves(variances):
                known = x.dtype.kind in "iuf" and (is_tree or x.ndim == 0)
                if not known or not np.all((x >= 0) & (x < np.inf)):
                    raise ValueError(
                        "`noise_variance` must be a number, a dict with an array for each latent"
                        " site, finite and not negative, or 'estimated'; got"
                        f" {shown(self.noise_variance)}."
                    )
            self.set(noise_variance=variances)

        @property
        def estimates(self) -> bool:
            """True if the noise is estimated from the minibatches."""
            return isinstance(self.noise_variance, str)

        @property
        def splitting(self) -> Splitting | None:
            """The splitting around the Ornstein-Uhlenbeck map; None is Euler's method."""
            return SPLITTINGS.get(self.integrator)

        @property
        def traits(self) -> Traits:
            variances = [] if self.estimates else jax.tree.leaves(self.noise_variance)
            corrects = self.estimates or any(np.any(v > 0) for v in variances)
            return Traits(self.splitting is None or self.splitting.gradient_at_end, corrects)

        @property
        def default_fields(self) -> tuple[str, ...]:
            return (*super().default_fields, *(["friction_used"] if self.estimates else []))

        def constants(self, target: Target) -> Any:
            """The given variance of the noise, a scalar or for each entry of the flat position."""
            if self.estimates:
                return ()
            return jnp.asarray(_flat_noise_variance(self.noise_variance, target))

        def check(self, begun: Begun) -> None:
            target, _, fixed, state = begun
            if fixed is None or self.estimates != (state is not None):
                return
            if state is None:
                variance, what = np.asarray(fixed.constants), "`noise_variance` of {:.4g}"
            else:
                variance = np.asarray(target.compiled(_noise_at_start)(state))
                what = "The noise of the gradient at the initial values, of variance {:.4g},"
            rates = float(np.asarray(fixed.step_size)), float(np.asarray(fixed.friction))
            _check_friction(self, float(variance.max()), *rates, what)

        def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
            friction = 1.0
            # h v / (2 A) is the relative error of the variance, or the noise that the friction must
            # cover
            accepted = 0.25 if self.estimates else ACCEPTED_BIAS
            largest = 2 * accepted * friction / max(noise.largest, 1e-30)
            return min(whitened_step(noise), largest), friction

        def init_dynamics(
            self, rng_key: Array, position: Array, fixed: ChainConstants
        ) -> Momentum | MomentumWithNoise:
            momentum = fresh_momentum(rng_key, position, self.temperature)
            if (noise := fixed.layout.noise) is None:
                return Momentum(momentum)
            zero = jnp.zeros((), position.dtype)
            average, count = noise.start(position)
            return MomentumWithNoise(momentum, average, count, zero)

        def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
            h, fixed, dynamics = state.step_size, state.fixed, state.dynamics
            noise, p = fixed.layout.noise, dynamics.momentum
            if self.resample_momentum is not None:
                rng_key, momentum_key = random.split(rng_key)
                fresh = fresh_momentum(momentum_key, p, self.temperature)
                p = jnp.where(state.i % self.resample_momentum == 0, fresh, p)
            normal = random.normal(rng_key, p.shape, p.dtype)

            def added(evaluation: Evaluation | None) -> tuple[Array, Array]:
                """The noise to add, and the part of it that gradient noise replaces."""
                kept, taken = _balance(self, h, fixed.friction)
                representation: Covariance = Diagonal()
                covariance = jnp.asarray(fixed.constants, p.dtype) if noise is None else None
                if noise is not None:
                    representation, covariance = noise.representation, dynamics.noise_covariance
                    if evaluation is not None:
                        covariance = noise.current(covariance, evaluation)
                used = representation.largest(covariance, normal) * taken / kept
                root = representation.apply(
                    covariance, lambda v: jnp.sqrt(jnp.maximum(kept - taken * v, 0.0)), normal
                )
                return root, used

            def middle(p: Array, evaluation: Evaluation | None) -> tuple[Array, Array]:
                """The map O, with its noise reduced by the noise of the gradient."""
                root, used = added(evaluation)
                return jnp.exp(-fixed.friction * h) * p + root, used

            if (splitting := self.splitting) is not None:
                position, p, used, evaluation = splitting.step(state.z, p, gradient, h, middle)
            else:
                position = drift(state.z, p, h)
                evaluation = gradient(position)
                root, used = added(evaluation)
                p = kick(p, evaluation.gradient + fixed.friction * p, h) + root
            if noise is None:
                return state._replace(z=position, dynamics=Momentum(p)), evaluation
            average, count = noise.update(
                dynamics.noise_covariance, dynamics.observations, evaluation
            )
            after = MomentumWithNoise(p, average, count, used)
            return state._replace(z=position, dynamics=after), evaluation


def _balance(method: "SGHMC.Method", h: Any, friction: Any) -> tuple[Any, Any]:
    """
    The noise variance that friction dissipates, and the factor of the gradient noise variance.

    The variance of the noise to add is the first number minus the second number times the variance
    of the gradient noise.
    """
    if method.splitting is None:
        return 2 * h * friction * method.temperature, h**2
    xp = jnp if isinstance(h, Array) else np
    kept = -method.temperature * xp.expm1(-2 * friction * h)
    return kept, h**2 / 4 * (1 + xp.exp(-friction * h)) ** 2


def _check_friction(
    method: "SGHMC.Method", variance: float, step_size: float, friction: float, what: str
) -> None:
    """
    Check that the friction dissipates gradient noise of this variance.

    :raises ValueError: if the noise adds more than the friction dissipates.
    """
    kept, taken = _balance(method, step_size, friction)
    if variance * taken <= kept * (1 + 1e-6):  # the tolerance accepts the remedy itself
        return
    h, temperature = step_size, method.temperature

    def excess(h: float) -> float:
        kept, taken = _balance(method, h, friction)
        return float(variance * taken - kept)

    smaller = brentq(excess, 1e-8 * h, h)
    if method.splitting is None:
        needed = h * variance / (2 * temperature)
    else:
        part = h**2 * variance / (4 * temperature)
        needed = 2 / h * np.arctanh(part) if part < 1 else np.inf
    elsewhere = ", `init_strategy` to start nearer to the posterior" if method.estimates else ""
    more = f"a friction of at least {needed:.4g}, or " if needed < np.inf else ""
    raise ValueError(
        f"{what.format(variance)} is more than friction={friction:.4g} can dissipate at"
        f" step_size={h:.4g}, which is {kept / taken:.4g}. Use {more}a step size of at most"
        f" {smaller:.4g}{elsewhere}, or CCAdL, which has no such limit."
    )


def _noise_at_start(target: Target, state: SGMCMCState) -> Array:
    """The largest variance of the gradient noise at the initial values of all chains."""

    def one(state: SGMCMCState) -> Array:
        here = target.tuned(state.fixed)
        _, position, potential = flattened(target, state)
        noise = state.fixed.layout.noise
        assert noise is not None
        steps = 1_000 if noise.window == math.inf else int(noise.window)

        def observe(key: Array) -> Evaluation:
            rows_key, model_key = random.split(key)
            rows = here.rows(rows_key)
            return gradient_oracle(here, potential, rows, model_key, noise)(position)

        def seen(running: tuple[Any, Array], key: Array) -> tuple[Any, None]:
            return noise.update(*running, observe(key)), None

        keys = random.split(state.rng_key, steps)
        first = keys[0]
        (average, _), _ = lax.scan(seen, noise.start(position), keys[1:])
        probe = random.normal(first, position.shape, position.dtype)
        return noise.representation.largest(noise.current(average, observe(first)), probe)

    if jnp.ndim(state.i) == 0:
        return one(state)
    return jnp.max(jax.vmap(one, (axes_of(state),))(state))


def _flat_noise_variance(given: Any, target: Target) -> np.ndarray:
    """The given noise variance, as a scalar or for each entry of the flat position."""
    if not isinstance(given, dict):
        return given
    latents = target.model.latents
    if set(given) != set(latents):
        raise ValueError(
            f"`noise_variance` must have an entry for each latent site {sorted(latents)}; got"
            f" {sorted(given)}."
        )
    for name, latent in latents.items():
        try:
            np.broadcast_to(given[name], latent.shape)
        except ValueError as error:
            raise ValueError(
                f"`noise_variance['{name}']` has shape {np.shape(given[name])}, but the"
                f" unconstrained value of site '{name}' has shape {latent.shape}."
            ) from error
    # the flat position has the sites in the order of their names
    return np.concatenate(
        [np.broadcast_to(given[k], latents[k].shape).ravel() for k in sorted(given)]
    )
