# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The base class of all kernels, which meets NumPyro's contract."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Self, TypeAlias

import jax
from jax import Array
from numpyro.infer.mcmc import MCMCKernel

from numpyro_sgmcmc.data.converters import given_key, positive
from numpyro_sgmcmc.kernels import settings as arguments
from numpyro_sgmcmc.kernels.init_state import Chains, init_state
from numpyro_sgmcmc.kernels.kept_tuning import kept_for
from numpyro_sgmcmc.kernels.method import Method
from numpyro_sgmcmc.kernels.monitor import Monitor
from numpyro_sgmcmc.kernels.postprocess import constrained
from numpyro_sgmcmc.kernels.run_info import identity_of, run_info
from numpyro_sgmcmc.kernels.runtime import Runtime
from numpyro_sgmcmc.kernels.self_tuning import new_tuning
from numpyro_sgmcmc.kernels.state import SGMCMCState
from numpyro_sgmcmc.kernels.transition import sample, sample_on_devices
from numpyro_sgmcmc.posterior import numpyro_private
from numpyro_sgmcmc.posterior.checks.arguments import as_arrays
from numpyro_sgmcmc.posterior.handlers import Model, full_data
from numpyro_sgmcmc.posterior.linear_algebra import run_in_order
from numpyro_sgmcmc.posterior.local_latents import AT_ONCE, Marginal
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.tuning.tuning import Tuning


@numpyro_private.asked_whether_it_is_initialised
class SGMCMCKernel(MCMCKernel):
    """
    Base class of the kernels of this package.

    NumPyro calls the kernel. The kernel owns a method, which is a value
    (:class:`~numpyro_sgmcmc.kernels.method.Method`). It also owns a runtime, with the model as read
    and the compiled programs, and the monitor of the run. A new kernel is a class with a
    ``Method``, whose fields are the arguments of the kernel. Arguments that are left out are tuned
    before the chains start, to one value for all chains; see :mod:`numpyro_sgmcmc.tuning.phases`.

    :raises ValueError: if an argument has no meaning, here or when ``MCMC`` initialises the
        chain with a model or with data that minibatches cannot serve.

    **Example:**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGMCMCKernel

        >>> class Descent(SGMCMCKernel):
        ...     class Method(SGMCMCKernel.Method):
        ...         def init_dynamics(self, rng_key, position, fixed):
        ...             return ()  # nothing besides the position
        ...         def step(self, state, gradient, rng_key):
        ...             evaluation = gradient(state.z)
        ...             position = state.z - state.step_size * evaluation.gradient
        ...             return state._replace(z=position), evaluation

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

    #: The method, a frozen dataclass of the arguments of the kernel.
    Method: TypeAlias = Method
    sample_field = "z"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if outside := {"step", "init_dynamics", "suggest"} & vars(cls).keys():
            raise TypeError(
                f"{cls.__name__} defines {', '.join(sorted(outside))} outside of its method. Write"
                " it in `class Method(SGMCMCKernel.Method)`, inside of the kernel."
            )
        _document(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        made: type[Any] = self.Method
        self.method: Method = arguments.bound(name, made, args, kwargs)
        self.runtime, self.monitor = Runtime(name), Monitor()

    def __reduce__(self) -> tuple:
        # devices and programs are remade in another process, and the tuning is kept
        return _restored, (type(self), self.method, self.runtime)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.method.as_given})"

    @property
    def model(self) -> Model:
        """
        The model on its full data, for ArviZ and other readers of a kernel's model.

        It is :class:`~numpyro_sgmcmc.full_data` of the model that the kernel was given. After a run
        with latent variables of groups it leaves these variables out, because the draws do not have
        them (:class:`~numpyro_sgmcmc.posterior.local_latents.Marginal`).
        """
        read = self.runtime.model
        if read is not None and isinstance(read.model, Marginal):
            return full_data(replace(read.model, at_once=AT_ONCE))
        return full_data(self.method.model)

    @property
    def default_fields(self) -> tuple[str, ...]:
        return self.method.default_fields

    @property
    def tuning(self) -> Tuning | None:
        """The tuning of the latest run, or None before it."""
        return self.runtime.tuning

    @tuning.setter
    def tuning(self, tuning: Tuning) -> None:
        self.runtime.tuning = tuning

    @property
    def steps_per_sample(self) -> int:
        """The number of steps between two samples, given or tuned."""
        return self.runtime.samples_every(self.method)

    @property
    def run_info(self) -> dict[str, str | int | float]:
        """The method, its settings and the tuning as words and numbers, for a record of the run."""
        return run_info(self.method, self.runtime)

    @property
    def settings(self) -> NoReturn:
        raise AttributeError(
            "`kernel.settings` is now `kernel.run_info`, a record in words and numbers; the"
            " arguments of the kernel are in `kernel.method`."
        )

    def identity(self, args: tuple, kwargs: dict, samples: int = 1) -> dict[str, Any]:
        """
        The facts that determine the law of a run, for comparing runs in different processes.

        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :param int samples: number of samples, warm-up included, over which step size schedules are
            compared.
        """
        args, kwargs = self.runtime.trimmed(self.method.model, args, kwargs)
        target = self.runtime.read(self.method, args, kwargs)
        return identity_of(self.method, self.runtime, target, samples * self.steps_per_sample)

    def tune(self, rng_key: Array, *args: Any, **kwargs: Any) -> Tuning:
        """
        Find centre, metric, control variate, step size and friction.

        See :mod:`numpyro_sgmcmc.tuning.phases`. ``MCMC`` calls this itself if something is to be
        tuned. It uses ``jax.random.key(0)``, so that the values do not depend on the key of the run
        or the chain method.

        :param rng_key: a random key.
        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :return: the tuning. Runs of this kernel with these data use it, unless the kernel has a
            ``tuning``, a ``start``, or a step size and all other rates. Other kernels of this class
            take it as ``tuning=``.
        :raises ValueError: if the search for a centre or a metric fails, with a remedy.

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
            step size 1 (long), friction 0.7, 4 steps per sample, dense metric
        """
        rng_key = given_key(rng_key)
        args, kwargs = self.runtime.trimmed(self.method.model, args, kwargs)
        target = self.runtime.read(self.method, args, kwargs)
        self.runtime.check_rows(target)
        with self.runtime.tuning_kept_on_failure():
            shown = numpyro_private.shows_bars(self)
            kept = kept_for(self.method, self.runtime, target)
            tuning = new_tuning(self.method, self.runtime, target, kept, rng_key, shown)
        if self.method.start is None:
            self.runtime.tuning = tuning
        return tuning

    def with_step_size(self, step_size: float, steps_per_sample: int | None = None) -> Self:
        """
        A copy of the kernel with another step size, and the old metric and friction.

        The control variate stays too.

        :param float step_size: step size :math:`h`.
        :param int steps_per_sample: new number of steps between two samples; None keeps the old
            one.
        """
        step_size = positive("step_size", step_size)
        each = self.steps_per_sample if steps_per_sample is None else steps_per_sample
        values: dict[str, Any] = {"step_size": step_size, "steps_per_sample": each}
        tuning = self.tuning
        if tuning is not None:
            tuning = tuning._replace(step_size=step_size)
            values |= {"tuning": tuning, "metric": None, "subsampling": self.method.scheme}
            if self.method.strata is not None:
                values["subsampling"] = "auto"
        runtime = self.runtime.with_tuning(tuning)
        return _restored(type(self), self.method.with_values(**values), runtime)

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Values | None,
        model_args: tuple,
        model_kwargs: dict,
    ) -> SGMCMCState:
        self.monitor.begin(num_warmup)
        runtime, shown = self.runtime, numpyro_private.shows_bars(self)
        # a kernel has one runtime, even in two threads
        with runtime.lock, runtime.said_once((model_args, model_kwargs)):
            with runtime.tuning_kept_on_failure():
                chains = Chains(rng_key, num_warmup, init_params, shown)
                return init_state(self.method, runtime, model_args, model_kwargs, chains)

    def sample(self, state: SGMCMCState, model_args: tuple, model_kwargs: dict) -> SGMCMCState:
        args, kwargs = as_arrays((model_args, model_kwargs))
        target = self.runtime.target(self.method, args, kwargs)
        if target.shards is not None:
            return sample_on_devices(self.method, target, state)
        one = partial(sample, self.method, target)
        if not isinstance(state.i, jax.core.Tracer):
            return one(state)  # operation by operation
        return run_in_order(*jax.make_jaxpr(one, return_shape=True)(state), state)

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict) -> Callable[[Values], Values]:
        args, kwargs = as_arrays((model_args, model_kwargs))
        return constrained(self.method, self.runtime, args, kwargs)

    def get_diagnostics_str(self, state: SGMCMCState) -> str:
        runtime = self.runtime
        return self.monitor.text(state, runtime.seconds_of_a_sample(self.method), runtime.data)


def _document(kernel: type[SGMCMCKernel]) -> None:
    """Put all arguments of a kernel into its signature and its docstring."""
    kernel.__signature__ = signature = arguments.signature_of(kernel.Method)
    if kernel.__doc__:
        known = [base.__doc__ or "" for base in (*kernel.__mro__[1:], *kernel.Method.__mro__)]
        kernel.__doc__ = arguments.with_inherited_parameters(kernel.__doc__, known, signature)


def _restored(kernel: type[SGMCMCKernel], method: Method, runtime: Runtime) -> SGMCMCKernel:
    """Remake a kernel from arguments that were checked before."""
    new = object.__new__(kernel)
    new.method, new.runtime, new.monitor = method, runtime, Monitor()
    return new


_document(SGMCMCKernel)
