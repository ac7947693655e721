# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Langevin dynamics on minibatches with one test on all rows for each sample: AMAGOLD."""

from dataclasses import dataclass
from typing import NamedTuple

from jax import Array, random
import jax.numpy as jnp

from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.gradients.estimators import Gradient
from numpyro_sgmcmc.kernels.integrators import drift
from numpyro_sgmcmc.kernels.method import Begun, Traits
from numpyro_sgmcmc.kernels.momentum import MomentumKernel, fresh_momentum
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState, Step
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel, whitened_step
from numpyro_sgmcmc.tuning.tuning import Tuning


class MomentumAndWork(NamedTuple):
    """
    The momentum of AMAGOLD and the work since the latest test.

    - **momentum** - momentum of every coordinate, shape (d,).
    - **work** - the work :math:`\\rho` of the noisy forces since the latest sample.
    - **accept_prob** - the probability with which the latest sample was accepted.
    """

    momentum: Array
    work: Array
    accept_prob: Array


class AMAGOLD(MomentumKernel):
    """
    Langevin dynamics on minibatches with a test on all rows for each sample: exact at any step.

    Use it if all rows can be afforded now and then, and the noise of a path is small.

    **Example:** a step size at which the variance would be a quarter too large.

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import AMAGOLD

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (1_000,))
        >>> kernel = AMAGOLD(model, step_size=0.01, friction=30.0, steps_per_sample=5)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=5_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> mu = mcmc.get_samples()["mu"]
        >>> bool(abs(mu.std() * 1_000**0.5 - 1) < 0.1)
        True

    :param model: a model with NumPyro primitives; see :class:`SGMCMCKernel`.
    :param float step_size: step size :math:`h`, in units of a posterior standard deviation; None
        is tuned. It cannot be a schedule.
    :param float friction: friction :math:`A`, per unit of time; None is tuned.
    :param int steps_per_sample: number of steps :math:`T` in a sample. None is as many as a path
        needs to forget its start, but no more than :math:`1 / (h^2 \\operatorname{tr} V)`, at which
        about six of ten samples are accepted.
    :raises ValueError: if an argument or the model cannot be used, naming it and the remedy.

    **The step.** It is amortised Metropolis-adjusted stochastic gradient second-order Langevin
    dynamics. A sample is :math:`T` steps of a symmetric splitting, each on a minibatch of its own,

    .. math::

        \\theta &\\leftarrow \\theta + \\tfrac h2 p \\\\
        p' &= \\frac{(1 - \\tfrac{hA}{2}) p - h \\nabla \\tilde U(\\theta) + \\eta}
            {1 + \\tfrac{hA}{2}}, \\qquad \\eta \\sim N(0, 2 h A T_0 I) \\\\
        \\rho &\\leftarrow \\rho + \\tfrac h2 \\nabla \\tilde U(\\theta)^\\top (p + p') \\\\
        \\theta &\\leftarrow \\theta + \\tfrac h2 p', \\qquad p \\leftarrow p' ,

    at temperature :math:`T_0`, and one test on all rows: from :math:`\\theta_0` the sample
    :math:`\\theta_T` is accepted with probability

    .. math:: \\min\\{1, \\exp([U(\\theta_0) - U(\\theta_T) + \\rho] / T_0)\\},

    and otherwise the chain stays at :math:`\\theta_0`, with its momentum reversed. A path and its
    reverse have the same minibatches, so neither the step size nor the noise of the gradient leaves
    an error. Each sample costs two evaluations of the potential on all rows. Long paths with much
    noise are rarely accepted: the probability falls like
    :math:`\\exp(-\\tfrac12 T h^2 \\operatorname{tr} V)`. ``accept_prob`` is collected with each
    draw. If its mean is below a half, reduce ``step_size`` or ``steps_per_sample``, or take larger
    minibatches.

    **References:**

    1. *AMAGOLD: Amortized Metropolis Adjustment for Efficient Stochastic Gradient MCMC*,
       Ruqi Zhang, A. Feder Cooper and Christopher De Sa (2020), Algorithm 2.
    """

    @dataclass(frozen=True, eq=False)
    class Method(MomentumKernel.Method):
        def __post_init__(self) -> None:
            super().__post_init__()
            if callable(self.step_size):
                raise ValueError(
                    "AMAGOLD needs a constant `step_size`, because a path and its reverse must"
                    " have the same. It has no step-size error that a schedule could reduce."
                )

        @property
        def traits(self) -> Traits:
            return Traits(metropolis_corrected=True)

        def samples_every(self, tuning: Tuning | None, dimension: int | None) -> int:
            steps = super().samples_every(tuning, dimension)
            if self.steps_per_sample is not None or dimension is None:
                return steps
            if tuning is None or tuning.noise is None:
                return steps
            noise = tuning.step_size**2 * tuning.noise.mean * dimension
            return max(1, min(steps, int(1 / max(noise, 1e-9))))

        @property
        def default_fields(self) -> tuple[str, ...]:
            return (*super().default_fields, "accept_prob")

        def check(self, begun: Begun) -> None:
            if not SCHEMES[self.scheme].independent:
                raise ValueError(
                    f"AMAGOLD with subsampling='{self.scheme}' would not be exact, because the"
                    " minibatches of a path must be independent. Use"
                    " subsampling='without_replacement'."
                )

        def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
            return whitened_step(noise), 1.0

        def init_dynamics(
            self, rng_key: Array, position: Array, fixed: ChainConstants
        ) -> MomentumAndWork:
            none = jnp.zeros((), position.dtype)
            momentum = fresh_momentum(rng_key, position, self.temperature)
            return MomentumAndWork(momentum, none, none)

        def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
            h, p = state.step_size, state.dynamics.momentum
            half = h * state.fixed.friction / 2
            scale = jnp.sqrt(4 * half * self.temperature)
            position = drift(state.z, p, h / 2)
            evaluation = gradient(position)
            added = scale * random.normal(rng_key, p.shape, p.dtype)
            new = ((1 - half) * p - h * evaluation.gradient + added) / (1 + half)
            work = state.dynamics.work + h / 2 * evaluation.gradient @ (p + new)
            position = drift(position, new, h / 2)
            dynamics = state.dynamics._replace(momentum=new, work=work)
            return state._replace(z=position, dynamics=dynamics), evaluation

        def accept(
            self, before: SGMCMCState, after: SGMCMCState, change: Array, rng_key: Array
        ) -> SGMCMCState:
            ratio = (after.dynamics.work - change) / self.temperature
            probability = jnp.where(jnp.isnan(ratio), 0.0, jnp.exp(jnp.minimum(ratio, 0.0)))
            is_accepted = random.uniform(rng_key, dtype=probability.dtype) < probability
            momentum = jnp.where(is_accepted, after.dynamics.momentum, -before.dynamics.momentum)
            none = jnp.zeros_like(probability)
            return after._replace(
                z=jnp.where(is_accepted, after.z, before.z),
                dynamics=MomentumAndWork(momentum, none, probability),
            )
