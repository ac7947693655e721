# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What every kernel shares: NumPyro's contract, met once."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self, TypeAlias

import jax
from jax import Array
from numpyro.infer.mcmc import MCMCKernel

from numpyro_sgmcmc.data.converters import given_key, positive
from numpyro_sgmcmc.gradients.estimators import Gradient
from numpyro_sgmcmc.gradients.noise_estimate import RunningCovariance
from numpyro_sgmcmc.kernels import settings as arguments
from numpyro_sgmcmc.kernels.cyclical import Cyclical
from numpyro_sgmcmc.kernels.init_state import initialised
from numpyro_sgmcmc.kernels.monitor import Monitor
from numpyro_sgmcmc.kernels.postprocess import constrained
from numpyro_sgmcmc.kernels.record import identity_of, record_of
from numpyro_sgmcmc.kernels.runtime import Context
from numpyro_sgmcmc.kernels.self_tuning import found_tuning, known_data
from numpyro_sgmcmc.kernels.state import ChainConstants, SGMCMCState, Step
from numpyro_sgmcmc.kernels.transition import sample, sample_on_devices
from numpyro_sgmcmc.posterior import numpyro_private
from numpyro_sgmcmc.posterior.checks.arguments import as_arrays
from numpyro_sgmcmc.posterior.handlers import Model, full_data
from numpyro_sgmcmc.posterior.linear_algebra import run_in_order
from numpyro_sgmcmc.posterior.local_latents import AT_ONCE, Marginal
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel
from numpyro_sgmcmc.tuning.tuning import Tuning


class Traits(NamedTuple):
    """
    What is known of a method with its arguments, whatever the model.

    - **order** - order in the step size of the error of expectations; 1 where nothing better is
      known.
    - **gradient_at_end** - whether the position that goes with the gradient in the Stein matrix
      is that of the end of the step. It is that of the start for methods that take the gradient
      there, and for those that take it between two half drifts.
    - **corrects_noise** - whether it corrects for the noise of independent minibatches.
    - **has_energy_error** - whether its dynamics has the field ``kinetic_energy``, which with the
      potential is conserved by exact steps.
    - **tested** - whether a sample is tested on all rows (:meth:`SGMCMCKernel.test`).
    """

    order: int = 1
    gradient_at_end: bool = False
    corrects_noise: bool = False
    tested: bool = False
    has_energy_error: bool = False


@numpyro_private.asked_whether_it_is_initialised
class SGMCMCKernel(MCMCKernel):
    """
    Base class of the kernels of this package.

    A method adds its dynamics, :meth:`init_dynamics` and :meth:`step`, as pure functions, and
    arguments of its own in a subclass of :class:`Settings`. What is left out is tuned before the
    chains start, the same for all of them; see :mod:`numpyro_sgmcmc.tuning.phases`.

    :raises ValueError: if an argument has no meaning, here or when ``MCMC`` initialises the
        chain with a model or with data that minibatches cannot serve.

    **Example:**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGMCMCKernel

        >>> class Descent(SGMCMCKernel):
        ...     def init_dynamics(self, rng_key, position, fixed):
        ...         return ()  # nothing besides the position
        ...     def step(self, state, gradient, rng_key):
        ...         evaluation = gradient(state.z)
        ...         position = state.z - state.step_size * evaluation.gradient
        ...         return state._replace(z=position), evaluation

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (1_000,))
        >>> mcmc = MCMC(Descent(model, 1e-4), num_warmup=100, num_samples=10, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> bool(abs(mcmc.get_samples()["mu"][-1] - y.mean()) < 0.05)
        True
    """

    #: The arguments of the kernel, a frozen dataclass; a method extends it.
    Settings: TypeAlias = arguments.Settings
    sample_field = "z"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _document(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = arguments.bound(type(self), self.Settings, args, kwargs)
        self.context = Context(type(self).__name__)
        self.monitor = Monitor()

    def __reduce__(self) -> tuple:
        # devices and programs are those of this process; a tuning is not to be found again
        given = self.given.with_values(mesh=None)
        return _restored, (type(self), given, self.context)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.given.as_given})"

    @abstractmethod
    def init_dynamics(self, rng_key: Array, position: Array, fixed: ChainConstants) -> Any:
        """
        What the method keeps besides the position.

        :param rng_key: a single random key.
        :param position: initial position, shape ``(d,)``.
        :param fixed: what was decided before the chains start, the friction among it.
        :return: a ``NamedTuple`` of arrays.
        """

    @abstractmethod
    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        """
        One step of the method, a pure function of its arguments.

        :param state: the state; its ``z`` is the position, a vector of shape ``(d,)``, and
            its ``step_size`` the step size of this step.
        :param gradient: oracle of the gradient, on a new minibatch at each step.
        :param rng_key: a single random key.
        :return: the state with new ``z`` and ``dynamics``, and the evaluation of the gradient.
        """

    def test(
        self, before: SGMCMCState, after: SGMCMCState, change: Array, rng_key: Array
    ) -> SGMCMCState:
        """
        The state after a sample that is tested on all rows, of methods whose traits say so.

        :param before: the state before its steps, with the position as ``z``.
        :param after: the state after them, likewise.
        :param change: of the potential of all rows, from one position to the other; infinite if a
            step was undone.
        :param rng_key: a single random key.
        """
        raise NotImplementedError(f"{type(self).__name__} has no test of a sample.")

    @property
    def traits(self) -> Traits:
        """What is known of the method with these arguments."""
        return Traits()

    def integrator(self, tuning: Tuning) -> str:
        """The word for the integrator, which may depend on what was found."""
        return str(getattr(self.given, "integrator", ""))

    def gradient_at_end(self, integrator: str) -> bool:
        """Whether the gradient is that of the end of the step (:class:`Traits`)."""
        return self.traits.gradient_at_end

    def noise(self, target: Target, tuning: Tuning) -> RunningCovariance | None:
        """How the covariance of the gradient's noise is estimated, for methods that need it."""
        return None

    def constants(self, target: Target) -> Any:
        """Arrays that a step needs and that depend on the model alone, for ``state.fixed``."""
        return ()

    def suggest(self, noise: NoiseLevel) -> tuple[float, float | None]:
        """
        Step size and friction for coordinates in which the curvature is 1.

        :param noise: the noise of the gradient in these coordinates.
        :return: a step size, and a friction or None.
        """
        raise ValueError(
            f"{type(self).__name__} does not say which step size it needs (it has no method"
            " `suggest`): give `step_size`."
        )

    def relaxation_time(self, tuning: Tuning) -> float:
        """The time in which a chain forgets where it was: that of the tuning, in most methods."""
        return tuning.relaxation_time

    def check(
        self,
        target: Target,
        num_warmup: int,
        fixed: ChainConstants | None = None,
        state: SGMCMCState | None = None,
    ) -> None:
        """
        Called in ``init`` as soon as there is more to look at: with the model alone, with what is
        fixed, and with the states of the chains where their values are known.

        :raises ValueError: if the method cannot run on this model, or needs another warm-up.
        """

    @property
    def model(self) -> Model:
        """
        The model on its full data, for ArviZ and whatever else reads the model of a kernel:
        :class:`~numpyro_sgmcmc.full_data` of the model that the kernel was given. After a run whose
        groups had latent variables of their own it is without these, which are no part of the draws
        (:class:`~numpyro_sgmcmc.posterior.local_latents.Marginal`).
        """
        read = self.context.model
        if read is not None and isinstance(read.model, Marginal):
            return full_data(replace(read.model, at_once=AT_ONCE))
        return full_data(self.given.model)

    @property
    def default_fields(self) -> tuple[str, ...]:
        """What is collected of each sample without being asked for."""
        asked = ["step_size"] if isinstance(self.given.step_size, Cyclical) else []
        asked += [] if self.given.replicas is None else ["exchange_prob"]
        return ("z", "diverging", "configurational_temperature", *asked)

    @property
    def tuning(self) -> Tuning | None:
        """What the latest run was tuned to, or None before it."""
        return self.context.tuning

    @tuning.setter
    def tuning(self, tuning: Tuning) -> None:
        self.context.tuning = tuning

    @property
    def steps_per_sample(self) -> int:
        """Number of steps between two samples, given or tuned."""
        given, tuning = self.given, self.tuning
        if given.steps_per_sample is not None:
            return given.steps_per_sample
        if isinstance(given.step_size, Cyclical):
            return given.step_size.steps
        return 1 if given.step_size is not None or tuning is None else tuning.steps_per_sample

    @property
    def settings(self) -> dict[str, str | int | float]:
        """Settings of the kernel, as words and numbers, for a record of the run."""
        return record_of(self)

    def identity(self, args: tuple, kwargs: dict, samples: int = 1) -> dict[str, Any]:
        """
        What the law of a run depends on, for telling a run from others also in another process.

        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :param int samples: number of samples, warm-up included, over which step size schedules are
            compared.
        """
        args, kwargs = self.context.trimmed(self.given.model, args, kwargs)
        self.context.read(self, args, kwargs)
        target = self.context.target(self.given, args, kwargs)
        return identity_of(self, target, samples * self.steps_per_sample)

    def tune(self, rng_key: Array, *args: Any, **kwargs: Any) -> Tuning:
        """
        Finds centre, metric, control variate, step size and friction; see
        :mod:`numpyro_sgmcmc.tuning.phases`. ``MCMC`` does this by itself when something is to be
        tuned, with ``jax.random.key(0)``: whatever the key of the run and the chain method,
        the values are the same.

        :param rng_key: a random key.
        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :return: the tuning, for ``tuning=`` of a kernel of the same class, and to look at.
        :raises ValueError: if no centre or no metric is found, with what to do.

        **Example:**

        .. doctest::

            >>> import jax, numpyro, numpyro.distributions as dist
            >>> from numpyro_sgmcmc import CCAdL

            >>> def model(y):
            ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
            ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
            ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

            >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
            >>> tuning = CCAdL(model, progress_bar=False).tune(jax.random.key(1), y)
            >>> print(str(tuning).splitlines()[0])
            step size 1, friction 0.7, 4 steps per sample, dense metric
        """
        rng_key = given_key(rng_key)
        args, kwargs = self.context.trimmed(self.given.model, args, kwargs)
        self.context.read(self, args, kwargs)
        target = self.context.target(self.given, args, kwargs)
        self.context.check_rows(target)
        return found_tuning(self, target, rng_key, known_data(self, target))

    def with_step_size(self, step_size: float, steps_per_sample: int | None = None) -> Self:
        """
        The same kernel, metric, friction and control variate, with another step size.

        :param float step_size: step size :math:`h`.
        :param int steps_per_sample: number of steps between two samples, if that is to be
            another one too.
        """
        step_size = positive("step_size", step_size)
        each = self.steps_per_sample if steps_per_sample is None else steps_per_sample
        values: dict[str, Any] = {"step_size": step_size, "steps_per_sample": each}
        tuning = self.tuning
        if tuning is not None:
            tuning = tuning._replace(step_size=step_size)
            values |= {"tuning": tuning, "metric": None, "strata": "auto"}
        context = Context(self.context.kernel, tuning)
        context.model, context.shards = self.context.model, self.context.shards
        return _restored(type(self), self.given.with_values(**values), context)

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Values | None,
        model_args: tuple,
        model_kwargs: dict,
    ) -> SGMCMCState:
        # a kernel in two threads has one context
        with self.context.lock, self.context.said_once((model_args, model_kwargs)):
            return initialised(self, model_args, model_kwargs, rng_key, num_warmup, init_params)

    def sample(self, state: SGMCMCState, model_args: tuple, model_kwargs: dict) -> SGMCMCState:
        args, kwargs = as_arrays((model_args, model_kwargs))
        target = self.context.target(self.given, args, kwargs)
        if target.shards is not None:
            return sample_on_devices(self, target, state)
        one = partial(sample, self, target)
        if not isinstance(state.i, jax.core.Tracer):
            return one(state)  # operation by operation
        return run_in_order(*jax.make_jaxpr(one, return_shape=True)(state), state)

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict) -> Callable[[Values], Values]:
        args, kwargs = as_arrays((model_args, model_kwargs))
        return constrained(self, args, kwargs)

    def get_diagnostics_str(self, state: SGMCMCState) -> str:
        return self.monitor.text(state, self._seconds_of_a_sample, self.context.data)

    @property
    def _seconds_of_a_sample(self) -> float:
        tuning = self.tuning
        if tuning is None or self.given.step_size is not None:
            return 0.0
        return tuning.seconds_per_sample * self.steps_per_sample / tuning.steps_per_sample


def _document(kernel: type[SGMCMCKernel]) -> None:
    """All arguments in the signature of a kernel, and all described in its docstring."""
    kernel.__signature__ = signature = arguments.signature_of(kernel.Settings)
    if kernel.__doc__:
        known = [base.__doc__ or "" for base in (*kernel.__mro__[1:], *kernel.Settings.__mro__)]
        kernel.__doc__ = arguments.with_inherited_parameters(kernel.__doc__, known, signature)


def _restored(
    kernel: type[SGMCMCKernel], given: arguments.Settings, context: Context
) -> SGMCMCKernel:
    """A kernel with settings that were checked before."""
    new = object.__new__(kernel)
    new.given, new.context, new.monitor = given, context, Monitor()
    return new


_document(SGMCMCKernel)  # type: ignore[type-abstract]
