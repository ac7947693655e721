# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What every kernel shares: NumPyro's contract, met once."""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
import math
import time
from typing import Any, NamedTuple, Self
import warnings

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_sgmcmc.diagnostics import (
    SteinSums,
    add_to_sums,
    advice,
    batch_is_full,
    batches_are_full,
    center_sums,
    close_batch,
    start_sums,
    stein_report,
)
from numpyro_sgmcmc.gradients import (
    Anchor,
    Gradient,
    Observation,
    Potential,
    Rows,
    minibatch_gradient,
)
from numpyro_sgmcmc.kernels._arguments import (
    checked_metric,
    fingerprint_of,
    metric_of_guide,
    one_of,
    positive,
    tuning_bar,
    whole,
)
from numpyro_sgmcmc.metric import IdentityMetric, Metric, from_covariance
from numpyro_sgmcmc.minibatch import (
    MinibatchModel,
    Model,
    Values,
    as_arrays,
    full_data,
    read_model,
)
from numpyro_sgmcmc.subsampling import INDEPENDENT, SCHEMES
from numpyro_sgmcmc.warmup import (
    PILOT_CHAINS,
    Choices,
    NoiseLevel,
    Problem,
    Tuning,
    anchor_at,
    find_tuning,
    pilot_steps,
)

#: A positive number, or a function of the number of steps taken, such as an optax schedule.
StepSize = float | Callable[[Array], Array | float]

#: Formatting values that live on the device waits for them: not more often than this.
_SECONDS_BETWEEN_DIAGNOSTICS = 0.5

#: A run is judged several times before its end, and then not before so many samples.
_ERRORS_BEFORE_THE_END, _FEWEST_SAMPLES = 4.0, 500


class Tuned(NamedTuple):
    """
    What the tuning found, or what was given; the same for all chains.

    - **step_size** - step size, unless a schedule gives it.
    - **friction** - friction, or None for methods that have none.
    - **metric** - the metric in whose coordinates the chain moves.
    """

    step_size: Array
    friction: Array | None
    metric: Metric


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
    - **configurational_temperature** - the latest sample's share of the mean of the diagonal
      of the Stein matrix (:mod:`numpyro_sgmcmc.diagnostics`): its mean over the draws is 1
      if they are as wide as the posterior; 0 in the warm-up, and NaN where minibatches are
      not independent, which this cannot judge.
    - **stein** - running sums for the Stein matrix.
    - **anchor** - of the control variate, or None.
    - **tuned** - step size, friction and metric.
    - **rng_key** - random key of the chain; step ``i`` uses ``fold_in`` of it and ``i``.
    """

    i: Array
    z: Any
    dynamics: Any
    step_size: Array
    minibatch_potential: Array
    nonfinite_steps: Array
    warmup_steps: Array
    configurational_temperature: Array
    stein: SteinSums
    anchor: Anchor | None
    tuned: Tuned
    rng_key: Array

    @property
    def friction(self) -> Any:
        """Friction :math:`A`, given or tuned."""
        return self.tuned.friction

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


#: A step of a method: the new state and what the gradient oracle said.
Step = tuple[SGMCMCState, Observation]


class SGMCMCKernel(MCMCKernel):
    """
    Base class of the kernels of this package: a method adds its dynamics,
    :meth:`init_dynamics` and :meth:`step`, as pure functions.

    What is left out is tuned before the chains start, the same for all of them; see
    :mod:`numpyro_sgmcmc.warmup`.

    :param model: a model with NumPyro primitives. The plates that have a
        ``subsample_size`` say what a minibatch is; without any, every step uses all data.
    :param step_size: step size :math:`h`, a positive number or a function of the number
        of steps taken (warm-up included), such as an ``optax`` schedule; None is tuned. It is
        in units of the metric: with a tuned one, of a posterior standard deviation.
    :param metric: the covariance of the posterior of the unconstrained parameters, as far as
        it is known, in whose coordinates the sampler moves: an array of variances, shape
        ``(d,)``, or a matrix, ``(d, d)``; a fitted autoguide and its parameters,
        ``(guide, params)``; ``"diagonal"`` or ``"dense"`` to have it tuned; ``"identity"``. None
        is tuned if the step size or the friction is, a matrix up to 500 parameters, and else
        the identity.
    :param str gradient: ``"minibatch"``; ``"control_variate"``, less noise for twice the cost,
        after a pass over all data (:class:`~numpyro_sgmcmc.gradients.ControlVariate`); or
        ``"auto"``, a control variate if something is tuned and it at least halves the noise.
    :param float refresh_every: move the anchor of the control variate to the current position
        every so many passes over the data; it stays at the centre if None.
    :param Tuning tuning: the result of :meth:`tune`, instead of tuning anew.
    :param float temperature: the target is :math:`\\propto \\exp(-U / T)`; 1 is the posterior.
    :param str subsampling: how the rows of a minibatch are drawn: ``"without_replacement"``
        within a minibatch and independently of other minibatches, ``"with_replacement"``,
        ``"epochs"``, in shuffled passes over the data, or ``"symmetric_sweeps"``, forward
        and backward through random partitions of them.
    :param int steps_per_sample: number of steps between two samples that NumPyro's
        ``MCMC`` sees. ``num_warmup``, ``num_samples`` and ``thinning`` count samples.
    :param init_strategy: a per-site initialization function of NumPyro.
    :param bool progress_bar: whether to show the phases of the tuning.
    :raises ValueError: if an argument has no meaning, here or when ``MCMC`` initialises the
        chain with a model or with data that minibatches cannot serve.
    """

    #: Methods that correct for the noise of independent minibatches cannot use epochs.
    corrects_noise: bool = False

    sample_field = "z"

    def __init__(
        self,
        model: Model,
        step_size: StepSize | None = None,
        *,
        metric: Any = None,
        gradient: str = "auto",
        refresh_every: float | None = None,
        tuning: Tuning | None = None,
        temperature: float = 1.0,
        subsampling: str = "without_replacement",
        steps_per_sample: int = 1,
        init_strategy: Callable = init_to_uniform,
        progress_bar: bool = True,
    ) -> None:
        if not callable(model):
            raise ValueError(
                f"{type(self).__name__} needs a model, a function with NumPyro primitives; got"
                f" {model!r}."
            )
        self._model = model
        given = callable(step_size) or step_size is None
        self._step_size = step_size if given else positive("step_size", step_size)
        self._friction: float | None = None
        self._metric = checked_metric(metric)
        self._gradient_kind = one_of("gradient", gradient, ("auto", "minibatch", "control_variate"))
        self._refresh_every = (
            None if refresh_every is None else positive("refresh_every", refresh_every)
        )
        if refresh_every is not None and gradient != "control_variate":
            raise ValueError(
                "`refresh_every` moves the anchor of a control variate: it needs"
                f" gradient='control_variate', but gradient={gradient!r}."
            )
        if tuning is not None and not isinstance(tuning, Tuning):
            raise ValueError(f"`tuning` must be the result of `kernel.tune(...)`; got {tuning!r}.")
        self._given_tuning = tuning
        self._temperature = positive("temperature", temperature)
        self._subsampling = one_of("subsampling", subsampling, SCHEMES)
        self._steps_per_sample = whole("steps_per_sample", steps_per_sample)
        self._init_strategy = init_strategy
        self._progress_bar = progress_bar
        # Static facts of the model and the data, found in `init`, the same for every chain.
        self._view: MinibatchModel | None = None
        # The latest tuning, with what tells its data from others.
        self._tuned: tuple[Any, Tuning] | None = None
        self._diagnostics = (-math.inf, "")
        self._has_warned = False

    @abstractmethod
    def init_dynamics(self, rng_key: Array, position: Array, friction: Any) -> Any:
        """
        What the method keeps besides the position.

        :param rng_key: a single random key.
        :param position: initial position, shape ``(d,)``.
        :param friction: friction, given or tuned; None for methods that have none.
        :return: a ``NamedTuple`` of arrays.
        """

    @abstractmethod
    def step(self, state: SGMCMCState, gradient: Gradient, rng_key: Array) -> Step:
        """
        One step of the method.

        :param state: the state; its ``z`` is the position, a vector of shape ``(d,)``, and
            its ``step_size`` the step size of this step.
        :param gradient: oracle of the gradient, on a new minibatch at each step.
        :param rng_key: a single random key.
        :return: the state with new ``z`` and ``dynamics``, and the observation of the gradient.
        """

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

    @property
    def gradient_at_end(self) -> bool:
        """
        Whether the position that goes with the gradient in the Stein matrix is that of the
        end of the step. It is that of the start for methods that take the gradient there, and
        for those that take it between two half drifts.
        """
        return False

    def gradient(self, potential: Potential, rows: Rows, rng_key: Array) -> Gradient:
        """The oracle for :meth:`step`; methods that need more than a gradient override it."""
        return minibatch_gradient(potential, rows, rng_key)

    def draw_rows(self, rng_key: Array, step: Array) -> dict[str, Array]:
        """The rows of a minibatch, drawn independently for each plate."""
        return self._problem((), {}).rows(rng_key, step)

    def _problem(self, args: tuple, kwargs: dict) -> Problem:
        return Problem(self._initialised, args, kwargs, self._subsampling)

    def check_model(self, view: MinibatchModel, step_size: float, friction: float | None) -> None:
        """Called once in ``init``: raises if the method cannot run on this model."""

    def check_warmup(self, num_warmup: int) -> None:
        """Called once in ``init``: raises if the method needs another length of warm-up."""

    def check_start(self, state: SGMCMCState, args: tuple, kwargs: dict) -> None:
        """Called in ``init`` with a state whose values are known: raises if it cannot run."""

    @property
    def default_fields(self) -> tuple[str, ...]:
        return ("z", "nonfinite_steps", "configurational_temperature")

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
        if (tuning := self.tuning) is not None:
            found["step_size"] = tuning.step_size
            found["metric"] = type(tuning.metric).__name__.removesuffix("Metric").lower()
            found["gradient"] = "minibatch" if tuning.anchor is None else "control_variate"
            if tuning.passes:
                found["tuning_passes"] = sum(tuning.passes.values())
        if callable(self._step_size):
            found.pop("step_size", None)
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
        self._has_warned = False
        self._check(view)
        self.check_warmup(num_warmup)
        # chains that are traced all at once are not to trace the tuning too
        traced = isinstance(rng_key, jax.core.Tracer)
        with jax.ensure_compile_time_eval() if traced else nullcontext():
            tuning = self._tuning_for(args, kwargs)
        with jax.ensure_compile_time_eval():
            step_size = float(self._step_size_at(jnp.asarray(0), tuning.step_size))
        if not (math.isfinite(step_size) and step_size > 0):
            raise ValueError(
                f"The step size schedule gives {step_size} at step 0; it must be positive."
            )
        self.check_model(view, step_size, tuning.friction)
        batched = not is_prng_key(rng_key)
        split = (
            jax.vmap(lambda key: random.split(key, 3)) if batched else lambda k: random.split(k, 3)
        )
        keys = jnp.moveaxis(split(rng_key), int(batched), 0)
        if init_params is not None:
            z = as_arrays(init_params)
            view.check_initial_values(z, rng_key.shape[0] if batched else None, args, kwargs)
        elif tuning.start is not None:
            # in one program: one operation after the other each would be one
            drawn = self._problem(args, kwargs).compiled(
                lambda problem, keys: self._draw_starts(problem, tuning, keys)
            )
            z = drawn(keys[0])
        else:
            z = view.initial_values(keys[0], self._init_strategy, args, kwargs)
        # Values of a prior, say, may have a weak dtype; in a loop it must not change.
        z = jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), z)
        start = partial(self._start, tuning=tuning, num_warmup=num_warmup)
        axes = self._axes(0, None)
        state = jax.jit(jax.vmap(start, out_axes=axes) if batched else start)(keys[1], z, keys[2])
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
            self.check_start(state, args, kwargs)
        return state

    def _start(
        self, rng_key: Array, z: Values, dynamics_key: Array, *, tuning: Tuning, num_warmup: int
    ) -> SGMCMCState:
        """The state of one chain before its first step."""
        flat, _ = ravel_pytree(z)
        tuned = Tuned(
            jnp.asarray(tuning.step_size, flat.dtype),
            None if tuning.friction is None else jnp.asarray(tuning.friction, flat.dtype),
            tuning.metric,
        )
        position = tuned.metric.coordinates(flat)
        step_size = self._step_size_at(jnp.asarray(0), tuned.step_size)
        count, zero = jnp.zeros((), jnp.int32), jnp.zeros((), flat.dtype)
        return SGMCMCState(
            i=count,
            z=z,
            dynamics=self.init_dynamics(dynamics_key, position, tuned.friction),
            step_size=jnp.asarray(step_size, flat.dtype),
            minibatch_potential=zero,
            nonfinite_steps=count,
            warmup_steps=count + num_warmup * self._steps_per_sample,
            configurational_temperature=zero,
            stein=start_sums(position, self._site_of()),
            anchor=tuning.anchor,
            tuned=tuned,
            rng_key=rng_key,
        )

    def _draw_starts(self, problem: Problem, tuning: Tuning, rng_key: Array) -> Values:
        """
        A draw of the Gaussian that the tuning found, or its centre where that cannot start,
        for a key or for each of a batch of keys.
        """
        gaussian, view = tuning.start, problem.view
        assert gaussian is not None

        def draw(rng_key: Array) -> Values:
            normal = random.normal(rng_key, gaussian.center.shape, gaussian.center.dtype)
            drawn = problem.unravel(gaussian.values(math.sqrt(self._temperature) * normal))
            rows, key = view.first_rows(), random.key(0)
            energy = view.potential(drawn, rows, key, problem.args, problem.kwargs)
            center = problem.unravel(gaussian.center)
            return jax.tree.map(lambda x, y: jnp.where(jnp.isfinite(energy), x, y), drawn, center)

        return draw(rng_key) if is_prng_key(rng_key) else jax.vmap(draw)(rng_key)

    @staticmethod
    def _axes(chains: int | None, tuned: int | None) -> Any:
        """Axes of a state for `vmap`: all chains have the same tuning."""
        axes: dict[str, Any] = dict.fromkeys(SGMCMCState._fields, chains)
        return SGMCMCState(**(axes | {"tuned": tuned}))

    def _site_of(self) -> np.ndarray:
        """For each entry of the flat position the number of its site."""
        latents = self._initialised.latents
        sizes = [math.prod(latents[name].shape) for name in sorted(latents)]
        return np.repeat(np.arange(len(sizes)), sizes)

    def tune(self, rng_key: Array, *args: Any, **kwargs: Any) -> Tuning:
        """
        Finds centre, metric, control variate, step size and friction; see
        :mod:`numpyro_sgmcmc.warmup`. ``MCMC`` does this by itself when something is to be
        tuned, with ``jax.random.key(0)``: whatever the key of the run and the chain method,
        the values are the same.

        :param rng_key: a random key.
        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :return: the tuning, for ``tuning=`` of a kernel of the same class, and to look at.
        """
        args, kwargs = as_arrays((args, kwargs))
        self._view = read_model(self._model, self._init_strategy, args, kwargs)
        self._check(self._view)
        return self._find_tuning(rng_key, args, kwargs)

    @property
    def _is_complete(self) -> bool:
        """Whether nothing is left to be tuned."""
        return (
            self._step_size is not None
            and not isinstance(self._metric, str)
            and self._gradient_kind != "control_variate"
        )

    def _tuning_for(self, args: tuple, kwargs: dict) -> Tuning:
        """The tuning that was given, that was found before for the same data, or a new one."""
        number = None if callable(self._step_size) else self._step_size
        if self._given_tuning is not None:
            given = self._given_tuning
            tuning = given._replace(
                step_size=number or given.step_size, friction=self._friction or given.friction
            )
        elif self._is_complete:
            metric = self._given_metric(args, kwargs)
            return self._keep(
                None, Tuning(number or math.nan, self._friction, metric or IdentityMetric())
            )
        else:
            fingerprint = fingerprint_of(type(self).__name__, args, kwargs)
            if self._tuned is not None and self._tuned[0] == fingerprint:
                return self._tuned[1]
            tuning = self._find_tuning(random.key(0), args, kwargs)
            return self._keep(fingerprint, tuning)
        return self._keep(None, tuning)

    @property
    def tuning(self) -> Tuning | None:
        """What the latest run was tuned to, or None before it."""
        return None if self._tuned is None else self._tuned[1]

    @property
    def _level(self) -> NoiseLevel | None:
        """The noise of the gradient in the coordinates of the metric, where it was measured."""
        return None if self.tuning is None else self.tuning.noise

    def _keep(self, fingerprint: Any, tuning: Tuning) -> Tuning:
        self._tuned = (fingerprint, tuning)
        return tuning

    def _find_tuning(self, rng_key: Array, args: tuple, kwargs: dict) -> Tuning:
        """Runs the phases of the tuning behind a progress bar."""
        number = None if callable(self._step_size) else self._step_size
        metric = self._metric if isinstance(self._metric, str) else self._given_metric(args, kwargs)
        if metric is None and number is not None and self._friction_is_known:
            metric = IdentityMetric()
        choices = Choices(number, self._friction, metric, self._gradient_kind, self._init_strategy)
        problem = self._problem(args, kwargs)
        with tuning_bar(self._progress_bar) as report:
            tuning = find_tuning(
                problem, rng_key, choices, self.suggest, partial(self._pilot, problem), report
            )
        if tuning.multimodal:
            warnings.warn(
                "The posterior has several modes (searches from different starts ended in"
                " different ones, with a barrier between): the chains will see one of them. Break a"
                " symmetry of the model, or take the draws for predictions only.",
                stacklevel=2,
            )
        if tuning.report is not None and (problem_found := tuning.report.problem()):
            warnings.warn(f"After tuning: {advice(problem_found)}", stacklevel=2)
        return tuning

    @property
    def _friction_is_known(self) -> bool:
        return True

    def _given_metric(self, args: tuple, kwargs: dict) -> Any:
        """
        :raises ValueError: if the metric does not fit the model.
        """
        given, view = self._metric, self._initialised
        if given is None or isinstance(given, str | IdentityMetric):
            return given
        size, dtype = view.dimension, next(iter(view.latents.values())).dtype
        if isinstance(given, tuple):
            guide, params = given
            return metric_of_guide(guide, params, view, args, kwargs, dtype)
        if given.shape not in ((size,), (size, size)):
            raise ValueError(
                f"`metric` has shape {given.shape}, but the model has {size} unconstrained"
                f" parameters: use variances, shape ({size},), or a covariance, ({size}, {size})."
            )
        return from_covariance(given, np.zeros(size), dtype)

    def _pilot(self, problem: Problem, tuning: Tuning) -> Callable[[float, Array], SteinSums]:
        """Short chains, all at once, half of whose steps are warm-up."""
        self._keep(None, tuning)
        assert tuning.noise is not None
        samples = -(-pilot_steps(tuning.noise) // self._steps_per_sample)

        def run(problem: Problem, step_size: Any, tuning: Tuning, rng_key: Array) -> SteinSums:
            args, kwargs = problem.args, problem.kwargs
            keys = random.split(rng_key, (3, PILOT_CHAINS))
            z = self._draw_starts(problem, tuning, keys[1])
            start = partial(
                self._start, tuning=tuning._replace(step_size=step_size), num_warmup=samples // 2
            )

            def one(start_of: tuple[Array, Values, Array]) -> SteinSums:
                last, _ = lax.scan(
                    lambda state, _: (self._sample(state, args, kwargs), None),
                    start(*start_of),
                    length=samples,
                )
                return last.stein

            # one after the other: a program for all at once takes twice as long to compile
            return lax.map(one, (keys[0], z, keys[2]))

        compiled = problem.compiled(run)
        arrays = tuning._replace(passes={"": 0.0}, noise=None, plain_noise=None, report=None)
        return lambda step_size, rng_key: compiled(step_size, arrays, rng_key)

    def _check(self, view: MinibatchModel) -> None:
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

    @property
    def _sample_fn(self) -> MinibatchModel | None:
        # NumPyro asks for this name to see whether `init` has been called.
        return self._view

    def sample(self, state: SGMCMCState, model_args: tuple, model_kwargs: dict) -> SGMCMCState:
        args, kwargs = as_arrays((model_args, model_kwargs))
        before, state = state, self._sample(state, args, kwargs)

        def judge(sums: SteinSums) -> None:
            jax.debug.callback(self._judge, sums)

        # at 64, 128, ... samples; the same number in all chains
        due = batches_are_full(
            _of_first_chain(before.stein)._replace(samples=_first(state.stein.samples))
        )
        lax.cond(due & (_first(state.stein.samples) > 0), judge, lambda sums: None, state.stein)
        return state

    def _sample(self, state: SGMCMCState, args: tuple, kwargs: dict) -> SGMCMCState:
        """One sample of one chain or, along a leading axis, of several."""
        chains = jnp.ndim(state.i) > 0
        axes = self._axes(0, 0 if jnp.ndim(state.tuned.step_size) else None)
        if self._refresh_every is not None:
            share = self._problem(args, kwargs).minibatch_share * self._steps_per_sample
            every = max(1, round(self._refresh_every / share))
            due = (_first(state.i) // self._steps_per_sample) % every == 0
            refresh = partial(self._refreshed, args=args, kwargs=kwargs)
            anchor = lax.cond(
                due & (_first(state.i) > 0),
                lambda z, _: (jax.vmap(refresh) if chains else refresh)(z),
                lambda _, anchor: anchor,
                state.z,
                state.anchor,
            )
            state = state._replace(anchor=anchor)
        advance = partial(self._advance, args=args, kwargs=kwargs)
        state = (jax.vmap(advance, (axes,), axes) if chains else advance)(state)
        # what goes through a condition is copied: no more than it needs
        stein = lax.cond(
            batch_is_full(_of_first_chain(state.stein)),
            jax.vmap(close_batch) if chains else close_batch,
            lambda sums: sums,
            state.stein,
        )
        return state._replace(stein=stein)

    def _refreshed(self, z: Values, args: tuple, kwargs: dict) -> Anchor:
        """The anchor at the current position."""
        potential = self._problem(args, kwargs).potential(IdentityMetric())
        return anchor_at(potential, self._initialised, z)

    def _advance(self, state: SGMCMCState, args: tuple, kwargs: dict) -> SGMCMCState:
        """``steps_per_sample`` steps of one chain, on the position as one flat vector."""
        position, potential = self.flattened(state, args, kwargs)
        flat, unravel = ravel_pytree(state.z)

        def body(_: int, state: SGMCMCState) -> SGMCMCState:
            return self._guarded_step(state, potential)

        state = state._replace(
            z=position,
            configurational_temperature=jnp.zeros_like(state.configurational_temperature),
        )
        if self._steps_per_sample == 1:
            state = body(0, state)
        else:
            state = lax.fori_loop(0, self._steps_per_sample, body, state)
        counted = state.i > state.warmup_steps
        stein = state.stein._replace(samples=state.stein.samples + counted)
        z = unravel(state.tuned.metric.moved(flat, position, state.z))
        return state._replace(z=z, stein=stein)

    def _guarded_step(self, state: SGMCMCState, potential: Potential) -> SGMCMCState:
        """One step, undone and counted if it is not finite."""
        rows_key, step_key = random.split(state.rng_key)
        noise_key, model_key = random.split(random.fold_in(step_key, state.i))
        rows = self.draw_rows(rows_key, state.i)
        step_size = self._step_size_at(state.i, state.tuned.step_size)
        step_size = jnp.asarray(step_size, state.step_size.dtype)
        new, observed = self.step(
            state._replace(step_size=step_size),
            self.gradient(potential, rows, model_key),
            noise_key,
        )
        # The sum is not finite if any entry is not; squares could overflow before.
        finite = jnp.isfinite(sum(jnp.sum(x) for x in jax.tree.leaves((new.z, new.dynamics))))
        moved = (new.z, new.dynamics, observed.potential)
        stayed = (state.z, _turned(state.dynamics), state.minibatch_potential)
        z, dynamics, minibatch_potential = jax.tree.map(
            lambda after, before: jnp.where(finite, after, before), moved, stayed
        )
        warmup = state.warmup_steps
        settled = (state.i >= warmup // 2) & (state.i < warmup)
        # the noise of minibatches that are not independent is correlated with the position
        judged = self._subsampling in INDEPENDENT
        stein, share = add_to_sums(
            center_sums(state.stein, state.z, settled),
            new.z if self.gradient_at_end else state.z,
            observed.gradient,
            finite & (state.i >= warmup) & judged,
            self._temperature,
            self._site_of(),
        )
        return state._replace(
            i=state.i + 1,
            z=z,
            dynamics=dynamics,
            step_size=step_size,
            minibatch_potential=minibatch_potential,
            nonfinite_steps=state.nonfinite_steps + ~finite,
            configurational_temperature=state.configurational_temperature
            + (share / self._steps_per_sample if judged else math.nan),
            stein=stein,
        )

    def _step_size_at(self, i: Array, tuned: Any) -> Any:
        return self._step_size(i) if callable(self._step_size) else tuned

    def flattened(self, state: SGMCMCState, args: tuple, kwargs: dict) -> tuple[Array, Potential]:
        """The position of one chain as one vector, and the potential there."""
        metric = state.tuned.metric
        flat, _ = ravel_pytree(state.z)
        potential = self._problem(args, kwargs).potential(metric, state.anchor)
        return metric.coordinates(flat), potential

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
            found = stein_report(state.stein)
            if found is not None:
                text += f", {found.summary()}"
            text += f", minibatch potential {float(state.minibatch_potential):.4g}"
            text += self.warnings(state)
            self._diagnostics = (time.monotonic(), text)
        return text

    def warnings(self, state: SGMCMCState) -> str:
        """What the progress bar is to say of a state that cannot be trusted."""
        undone = int(state.nonfinite_steps)
        text = f", {undone} NON-FINITE STEPS UNDONE: reduce the step size" if undone else ""
        found = stein_report(state.stein)
        if found is not None and found.problem(_ERRORS_BEFORE_THE_END):
            text += ", NOT THE LAW OF THE POSTERIOR"
        return text

    def _judge(self, sums: SteinSums) -> None:
        """Warns, once a run, of draws that have another law than the posterior."""
        found = stein_report(sums)
        if found is None or found.samples < _FEWEST_SAMPLES or self._has_warned:
            return
        if problem := found.problem(_ERRORS_BEFORE_THE_END):
            self._has_warned = True
            warnings.warn(f"After {found.samples} samples: {advice(problem)}", stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_view"] = None  # of data that are not in the pickle; `init` makes it anew
        state["_diagnostics"] = (-math.inf, "")
        return state


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

    def __init__(
        self,
        model: Model,
        step_size: StepSize | None = None,
        friction: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, step_size, **options)
        self._friction = None if friction is None else positive("friction", friction)

    @property
    def _is_complete(self) -> bool:
        return super()._is_complete and self._friction_is_known

    @property
    def _friction_is_known(self) -> bool:
        return self._friction is not None

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
        friction = self._friction if self.tuning is None else self.tuning.friction
        return super().settings | ({} if friction is None else {"friction": friction})

    def fresh_momentum(self, rng_key: Array, position: Array) -> Array:
        """A draw of :math:`p \\sim N(0, T I)`."""
        scale = math.sqrt(self._temperature)
        return scale * random.normal(rng_key, position.shape, position.dtype)

    def init_dynamics(self, rng_key: Array, position: Array, friction: Any) -> Any:
        return Momentum(self.fresh_momentum(rng_key, position))


def _first(x: Array) -> Array:
    """The value in the first chain, of a number that is the same in all of them."""
    return x.ravel()[0]


def _of_first_chain(sums: SteinSums) -> SteinSums:
    return sums._replace(samples=_first(sums.samples), length=_first(sums.length))
