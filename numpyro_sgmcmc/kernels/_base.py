# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What every kernel shares: NumPyro's contract, met once."""

from abc import abstractmethod
from collections.abc import Callable
import math
import time
from typing import Any, NamedTuple, Self
import warnings

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_sgmcmc.gradients import Gradient, Potential, Rows, minibatch_gradient
from numpyro_sgmcmc.minibatch import (
    MinibatchModel,
    Model,
    Values,
    as_arrays,
    full_data,
    read_model,
)
from numpyro_sgmcmc.subsampling import INDEPENDENT, SCHEMES

#: A positive number, or a function of the number of steps taken, such as an optax schedule.
StepSize = float | Callable[[Array], Array | float]

#: Formatting values that live on the device waits for them: not more often than this.
_SECONDS_BETWEEN_DIAGNOSTICS = 0.5


class SGMCMCState(NamedTuple):
    """
    State of a chain. Each field, and each field of ``dynamics`` by its own name, can be
    collected with ``mcmc.run(..., extra_fields=("step_size", "thermostat"))``, and so can
    ``kinetic_temperature`` for methods with momentum.

    - **i** - number of steps taken, warm-up included.
    - **z** - unconstrained values of the latent sites.
    - **dynamics** - what the method keeps besides the position, for instance the momentum.
    - **step_size** - step size of the latest step.
    - **minibatch_potential** - the minibatch potential at the latest gradient, a noisy
      estimate of the potential that is not of use for comparing draws; 0 before the first.
    - **nonfinite_steps** - number of steps undone because they were not finite.
    - **warmup_steps** - number of steps of the warm-up, after which nothing adapts.
    - **rng_key** - random key of the chain; step ``i`` uses ``fold_in`` of it and ``i``.
    """

    i: Array
    z: Any
    dynamics: Any
    step_size: Array
    minibatch_potential: Array
    nonfinite_steps: Array
    warmup_steps: Array
    rng_key: Array

    @property
    def kinetic_temperature(self) -> Array:
        """:math:`p^\\top p / d` at the end of the step, for methods with momentum."""
        return jnp.mean(self.momentum**2, axis=-1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dynamics, name)

    def __getitem__(self, key: Any) -> Any:
        # NumPyro looks a field up by name where no attribute has it: say what there is.
        if isinstance(key, str):
            fields = [*self._fields, *self.dynamics._fields]
            fields += ["kinetic_temperature"] if "momentum" in fields else []
            raise ValueError(f"The state has no field '{key}'; it has {', '.join(fields)}.")
        return tuple.__getitem__(self, key)


class Momentum(NamedTuple):
    """
    - **momentum** - momentum of every coordinate, shape (d,).
    """

    momentum: Array


class SGMCMCKernel(MCMCKernel):
    """
    Base class of the kernels of this package: a method adds its dynamics,
    :meth:`init_dynamics` and :meth:`step`, as pure functions.

    :param model: a model with NumPyro primitives. The plates that have a
        ``subsample_size`` say what a minibatch is; without any, every step uses all data.
    :param step_size: step size :math:`h`, a positive number or a function of the number
        of steps taken (warm-up included), such as an ``optax`` schedule.
    :param float temperature: the target is :math:`\\propto \\exp(-U / T)`; 1 is the posterior.
    :param str subsampling: how the rows of a minibatch are drawn: ``"without_replacement"``
        within a minibatch and independently of other minibatches, ``"with_replacement"``,
        ``"epochs"``, in shuffled passes over the data, or ``"symmetric_sweeps"``, forward
        and backward through random partitions of them.
    :param int steps_per_sample: number of steps between two samples that NumPyro's
        ``MCMC`` sees. ``num_warmup``, ``num_samples`` and ``thinning`` count samples.
    :param init_strategy: a per-site initialization function of NumPyro.
    :raises ValueError: if an argument has no meaning, here or when ``MCMC`` initialises the
        chain with a model or with data that minibatches cannot serve.
    """

    #: Methods that correct for the noise of independent minibatches cannot use epochs.
    corrects_noise: bool = False

    sample_field = "z"

    def __init__(
        self,
        model: Model,
        step_size: StepSize,
        *,
        temperature: float = 1.0,
        subsampling: str = "without_replacement",
        steps_per_sample: int = 1,
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        if not callable(model):
            raise ValueError(
                f"{type(self).__name__} needs a model, a function with NumPyro primitives; got"
                f" {model!r}."
            )
        self._model = model
        self._step_size = step_size if callable(step_size) else positive("step_size", step_size)
        self._temperature = positive("temperature", temperature)
        self._subsampling = one_of("subsampling", subsampling, SCHEMES)
        self._steps_per_sample = whole("steps_per_sample", steps_per_sample)
        self._init_strategy = init_strategy
        # Static facts of the model and the data, found in `init`, the same for every chain.
        self._view: MinibatchModel | None = None
        self._diagnostics = (-math.inf, "")

    @abstractmethod
    def init_dynamics(self, rng_key: Array, position: Array) -> Any:
        """
        What the method keeps besides the position.

        :param rng_key: a single random key.
        :param position: initial position, shape ``(d,)``.
        :return: a ``NamedTuple`` of arrays.
        """

    @abstractmethod
    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> SGMCMCState:
        """
        One step of the method.

        :param state: the state; its ``z`` is the position, a vector of shape ``(d,)``, and
            its ``step_size`` the step size of this step.
        :param gradient: oracle of the gradient, on a new minibatch at each step.
        :param rng_key: a single random key.
        :return: the state with new ``z``, ``dynamics`` and ``minibatch_potential``.
        """

    def gradient(self, potential: Potential, rows: Rows, rng_key: Array) -> Gradient:
        """The oracle for :meth:`step`; methods that need more than a gradient override it."""
        return minibatch_gradient(potential, rows, rng_key)

    def draw_rows(self, rng_key: Array, step: Array) -> dict[str, Array]:
        """The rows of a minibatch, drawn independently for each plate."""
        draw = SCHEMES[self._subsampling]
        return {
            plate.name: draw(random.fold_in(rng_key, k), step, plate.size, plate.subsample_size)
            for k, plate in enumerate(self._initialised.plates)
        }

    def check_model(self, view: MinibatchModel, step_size: float) -> None:
        """Called once in ``init``: raises if the method cannot run on this model."""

    def check_warmup(self, num_warmup: int) -> None:
        """Called once in ``init``: raises if the method needs another length of warm-up."""

    def check_start(self, state: SGMCMCState, args: tuple, kwargs: dict) -> None:
        """Called in ``init`` with a state whose values are known: raises if it cannot run."""

    @property
    def default_fields(self) -> tuple[str, ...]:
        return ("z", "nonfinite_steps")

    @property
    def model(self) -> Model:
        """
        The model on its full data, for ArviZ and whatever else reads the model of a kernel:
        :class:`~numpyro_sgmcmc.full_data` of the model that the kernel was given.
        """
        return full_data(self._model)

    @property
    def settings(self) -> dict[str, str | int | float]:
        """Settings of the kernel, as words and numbers, for a record of the run."""
        found: dict[str, str | int | float] = {
            "algorithm": type(self).__name__,
            "temperature": self._temperature,
            "subsampling": self._subsampling,
            "steps_per_sample": self._steps_per_sample,
        }
        if not callable(self._step_size):
            found["step_size"] = self._step_size
        for plate in self._view.plates if self._view is not None else ():
            found[f"batch_size_{plate.name}"] = plate.subsample_size
        return found

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Values | None,
        model_args: tuple,
        model_kwargs: dict,
    ) -> SGMCMCState:
        args, kwargs = as_arrays((model_args, model_kwargs))
        self._view = view = read_model(self._model, self._init_strategy, args, kwargs)
        batched = not is_prng_key(rng_key)
        split = (
            jax.vmap(lambda key: random.split(key, 3)) if batched else lambda k: random.split(k, 3)
        )
        keys = jnp.moveaxis(split(rng_key), int(batched), 0)
        if init_params is None:
            z = view.initial_values(keys[0], self._init_strategy, args, kwargs)
        else:
            z = as_arrays(init_params)
            view.check_initial_values(z, rng_key.shape[0] if batched else None, args, kwargs)
        with jax.ensure_compile_time_eval():
            step_size = float(self._step_size_at(jnp.asarray(0)))
        if not (math.isfinite(step_size) and step_size > 0):
            raise ValueError(
                f"The step size schedule gives {step_size} at step 0; it must be positive."
            )
        self._check(view, step_size)
        self.check_warmup(num_warmup)

        def start(rng_key: Array, z: Values, dynamics_key: Array) -> SGMCMCState:
            position, _ = ravel_pytree(z)
            count = jnp.zeros((), jnp.int32)
            return SGMCMCState(
                i=count,
                z=z,
                dynamics=self.init_dynamics(dynamics_key, position),
                step_size=jnp.asarray(step_size, position.dtype),
                minibatch_potential=jnp.zeros((), position.dtype),
                nonfinite_steps=count,
                warmup_steps=count + num_warmup * self._steps_per_sample,
                rng_key=rng_key,
            )

        # Values of a prior, say, may have a weak dtype; in a loop it must not change.
        z = jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), z)
        state = (jax.vmap(start) if batched else start)(keys[1], z, keys[2])
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
            self.check_start(state, args, kwargs)
        return state

    def _check(self, view: MinibatchModel, step_size: float) -> None:
        name = type(self).__name__
        if self.corrects_noise and self._subsampling not in INDEPENDENT:
            raise ValueError(
                f"{name} with subsampling='{self._subsampling}' would correct for noise that is not"
                " there: minibatches of one pass over the data are anti-correlated. Use"
                " subsampling='without_replacement'."
            )
        if not view.plates and (self.corrects_noise or self._subsampling not in INDEPENDENT):
            raise ValueError(
                f"{name} with subsampling='{self._subsampling}' needs minibatches, but no plate of"
                " the model has a `subsample_size`: write `numpyro.plate(name, size,"
                " subsample_size=...)` around the data, or use another kernel."
            )
        if not view.plates:
            warnings.warn(
                "No plate of the model has a `subsample_size`: every step uses the gradient on all"
                " data.",
                stacklevel=2,
            )
        if view.dimension == 0:
            raise ValueError("The model has no latent sites: there is nothing to sample.")
        self.check_model(view, step_size)

    @property
    def _sample_fn(self) -> MinibatchModel | None:
        # NumPyro asks for this name to see whether `init` has been called.
        return self._view

    def sample(self, state: SGMCMCState, model_args: tuple, model_kwargs: dict) -> SGMCMCState:
        args, kwargs = as_arrays((model_args, model_kwargs))

        def advance(chain: SGMCMCState) -> SGMCMCState:
            return self._advance(chain, args, kwargs)

        return (jax.vmap(advance) if jnp.ndim(state.i) else advance)(state)

    def _advance(self, state: SGMCMCState, args: tuple, kwargs: dict) -> SGMCMCState:
        """``steps_per_sample`` steps of one chain, on the position as one flat vector."""
        position, potential = self.flattened(state.z, args, kwargs)

        def body(_: int, state: SGMCMCState) -> SGMCMCState:
            return self._guarded_step(state, potential)

        state = state._replace(z=position)
        if self._steps_per_sample == 1:
            state = body(0, state)
        else:
            state = lax.fori_loop(0, self._steps_per_sample, body, state)
        return state._replace(z=potential.values(state.z))

    def _guarded_step(self, state: SGMCMCState, potential: Potential) -> SGMCMCState:
        """One step, undone and counted if it is not finite."""
        rows_key, step_key = random.split(state.rng_key)
        noise_key, model_key = random.split(random.fold_in(step_key, state.i))
        rows = self.draw_rows(rows_key, state.i)
        step_size = jnp.asarray(self._step_size_at(state.i), state.step_size.dtype)
        new = self.step(
            state._replace(step_size=step_size),
            self.gradient(potential, rows, model_key),
            noise_key,
        )
        # The sum is not finite if any entry is not; squares could overflow before.
        finite = jnp.isfinite(sum(jnp.sum(x) for x in jax.tree.leaves((new.z, new.dynamics))))
        moved = (new.z, new.dynamics, new.minibatch_potential)
        stayed = (state.z, _turned(state.dynamics), state.minibatch_potential)
        z, dynamics, minibatch_potential = jax.tree.map(
            lambda after, before: jnp.where(finite, after, before), moved, stayed
        )
        return state._replace(
            i=state.i + 1,
            z=z,
            dynamics=dynamics,
            step_size=step_size,
            minibatch_potential=minibatch_potential,
            nonfinite_steps=state.nonfinite_steps + ~finite,
        )

    def _step_size_at(self, i: Array) -> Any:
        return self._step_size(i) if callable(self._step_size) else self._step_size

    def flattened(self, z: Values, args: tuple, kwargs: dict) -> tuple[Array, Potential]:
        """Values of one chain as one vector, and the potential there."""
        position, unravel = ravel_pytree(z)
        return position, _BoundPotential(self._initialised, unravel, args, kwargs)

    @property
    def _initialised(self) -> MinibatchModel:
        if self._view is None:
            raise RuntimeError(f"Call `{type(self).__name__}.init` first.")
        return self._view

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict) -> Callable[[Values], Values]:
        view = self._initialised
        args, kwargs = as_arrays((model_args, model_kwargs))
        if view.minibatch_dependent:
            names = ", ".join(f"'{name}'" for name in sorted(view.minibatch_dependent))
            warnings.warn(
                f"Deterministic sites {names} depend on the minibatch and are not collected. For"
                " their values on all data use `Predictive(full_data(model), mcmc.get_samples())`.",
                stacklevel=2,
            )
        return lambda z: view.constrain(z, args, kwargs)

    def get_diagnostics_str(self, state: SGMCMCState) -> str:
        written, text = self._diagnostics
        if time.monotonic() - written > _SECONDS_BETWEEN_DIAGNOSTICS:
            text = f"step size {float(state.step_size):.2e}"
            if "momentum" in state.dynamics._fields:
                text += f", kinetic temperature {float(state.kinetic_temperature):.2f}"
            text += f", minibatch potential {float(state.minibatch_potential):.4g}"
            text += self.warnings(state)
            self._diagnostics = (time.monotonic(), text)
        return text

    def warnings(self, state: SGMCMCState) -> str:
        """What the progress bar is to say of a state that cannot be trusted."""
        undone = int(state.nonfinite_steps)
        return f", {undone} NON-FINITE STEPS UNDONE: reduce the step size" if undone else ""

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_view"] = None  # of data that are not in the pickle; `init` makes it anew
        state["_diagnostics"] = (-math.inf, "")
        return state


class _BoundPotential(NamedTuple):
    """The minibatch potential of the unconstrained values of the sites."""

    view: MinibatchModel
    values: Callable[[Array], Values]
    args: tuple
    kwargs: dict

    def __call__(self, values: Values, rows: Rows, rng_key: Array, /) -> Array:
        return self.view.potential(values, rows, rng_key, self.args, self.kwargs)

    def with_row_terms(
        self, values: Values, rows: Rows, rng_key: Array, /
    ) -> tuple[Array, dict[str, Array]]:
        return self.view.potential_and_row_terms(values, rows, rng_key, self.args, self.kwargs)


def _turned(dynamics: Any) -> Any:
    """With the momentum reversed: else a step that is undone would lead to the same place."""
    if "momentum" not in dynamics._fields:
        return dynamics
    return dynamics._replace(momentum=-dynamics.momentum)


class MomentumKernel(SGMCMCKernel):
    """
    Base class of the methods with momentum :math:`p` and friction :math:`A`.

    :param model: a model with NumPyro primitives.
    :param step_size: step size :math:`h`, or a schedule.
    :param float friction: friction :math:`A`, per unit of time.
    :param options: the other arguments of :class:`SGMCMCKernel`.
    """

    def __init__(self, model: Model, step_size: StepSize, friction: float, **options: Any) -> None:
        super().__init__(model, step_size, **options)
        self._friction = positive("friction", friction)

    @classmethod
    def from_learning_rate(
        cls, model: Model, learning_rate: float, momentum_decay: float, **options: Any
    ) -> Self:
        """
        The kernel in the parameters of stochastic gradient descent with momentum: with the
        velocity :math:`v = h p` a step adds :math:`-\\eta \\nabla \\tilde U - \\alpha v` to it.
        These are the parameters of eq. (15) of Chen et al. (2014), and of Algorithm 2 in the
        supplement of Ding et al. (2014), where :math:`\\alpha` is the initial thermostat
        :math:`a`.

        :param model: a model with NumPyro primitives.
        :param float learning_rate: :math:`\\eta = h^2`, for a potential that is a sum over all
            data: a rate meant for the mean over the data must be divided by :math:`N`.
        :param float momentum_decay: :math:`\\alpha = h A`, one minus the momentum term.
        :param options: the other arguments of the kernel.
        :raises ValueError: if one of the two is not a positive number.
        """
        step_size = math.sqrt(positive("learning_rate", learning_rate))
        friction = positive("momentum_decay", momentum_decay) / step_size
        return cls(model, step_size, friction, **options)

    @property
    def settings(self) -> dict[str, str | int | float]:
        return super().settings | {"friction": self._friction}

    def fresh_momentum(self, rng_key: Array, position: Array) -> Array:
        """A draw of :math:`p \\sim N(0, T I)`."""
        scale = math.sqrt(self._temperature)
        return scale * random.normal(rng_key, position.shape, position.dtype)

    def init_dynamics(self, rng_key: Array, position: Array) -> Any:
        return Momentum(self.fresh_momentum(rng_key, position))


def positive(name: str, value: Any) -> float:
    """
    :raises ValueError: if ``value`` is not a positive finite number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool | str) or not (math.isfinite(number) and number > 0):
        raise ValueError(f"`{name}` must be a positive finite number; got {value!r}.")
    return number


def whole(name: str, value: Any) -> int:
    """
    :raises ValueError: if ``value`` is not a positive integer.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer; got {value!r}.")
    return value


def one_of(name: str, value: Any, options: Any) -> str:
    """
    :raises ValueError: if ``value`` is not among ``options``, which the message lists.
    """
    if value not in options:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, options))}; got {value!r}.")
    return value
