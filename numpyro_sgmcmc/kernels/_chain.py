# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""From one sample of a chain to the next."""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
import math
from typing import Any
import warnings

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
from numpyro.infer.mcmc import MCMCKernel

from numpyro_sgmcmc.devices import EVERYWHERE, Shards, checked_mesh, found_shards
from numpyro_sgmcmc.gradients import Gradient, minibatch_gradient, over_devices
from numpyro_sgmcmc.kernels._arguments import StepSize, one_of, positive, whole
from numpyro_sgmcmc.kernels._reading import block_with, empty_block, rows_at
from numpyro_sgmcmc.kernels._spreading import check_spread, check_traced
from numpyro_sgmcmc.kernels._state import SGMCMCState, Step, Tuned
from numpyro_sgmcmc.minibatch import MinibatchModel, Model, Values, read_model
from numpyro_sgmcmc.potentials import Anchor, Potential, Rows, ravel
from numpyro_sgmcmc.problem import Problem
from numpyro_sgmcmc.stein import (
    add_to_sums,
    batch_is_full,
    center_sums,
    close_batch,
    start_sums,
)
from numpyro_sgmcmc.subsampling import INDEPENDENT, SCHEMES

#: The fields of a state that `MCMC` collects, or is asked for, and that are small.
_COLLECTED = (
    "i", "z", "step_size", "minibatch_potential", "nonfinite_steps", "configurational_temperature"
)  # fmt: skip


class Chain(MCMCKernel):
    """The part of a kernel that reads the model and moves a chain, or several, through it."""

    #: Methods that correct for the noise of independent minibatches cannot use epochs.
    corrects_noise: bool = False

    def __init__(
        self,
        model: Model,
        step_size: StepSize | None,
        *,
        temperature: float,
        subsampling: str,
        steps_per_sample: int | None,
        refresh_every: float | None,
        init_strategy: Callable,
        mesh: Mesh | None,
    ) -> None:
        if not callable(model):
            raise ValueError(
                f"{type(self).__name__} needs a model, a function with NumPyro primitives; got"
                f" {model!r}."
            )
        self._model = model
        given = callable(step_size) or step_size is None
        self._step_size = step_size if given else positive("step_size", step_size)
        self._temperature = positive("temperature", temperature)
        self._subsampling = one_of("subsampling", subsampling, SCHEMES)
        self._steps_per_sample = (
            None if steps_per_sample is None else whole("steps_per_sample", steps_per_sample)
        )
        self._refresh_every = (
            None if refresh_every is None else positive("refresh_every", refresh_every)
        )
        self._init_strategy = init_strategy
        self._mesh = checked_mesh(mesh)
        #: Static facts of the model and the data, found in `init`, the same for every chain.
        self._view: MinibatchModel | None = None
        #: How the data lie on devices, if they are spread.
        self._shards: Shards | None = None
        #: Programs for any data with these facts.
        self._programs: dict[Any, Callable] = {}

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

    def gradient_of_all(self, potential: Potential, rows: Rows, rng_key: Array) -> Gradient:
        """The oracle :meth:`gradient` of the devices that the rows are spread over, together."""
        problem, sign_key = self._problem((), {}), random.fold_in(rng_key, 2)
        gradient = self.gradient(potential, rows, problem.own(rng_key))
        return over_devices(gradient, problem, problem.own(sign_key))

    def draw_rows(self, rng_key: Array, step: Array) -> dict[str, Array]:
        """The rows of a minibatch, drawn independently for each plate."""
        return self._problem((), {}).rows(rng_key, step)

    def _read(self, args: tuple, kwargs: dict) -> MinibatchModel:
        """
        Reads the model, and keeps what it has read.

        :raises ValueError: if the method cannot serve the model, or minibatches cannot.
        """
        self._shards = found_shards(self._mesh, args, kwargs)
        view = read_model(self._model, self._init_strategy, args, kwargs)
        if view != self._view:
            self._view, self._programs = view, {}
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
        if self._shards is not None:
            check_spread(self._whole(args, kwargs), self._shards)
        return view

    @property
    def _initialised(self) -> MinibatchModel:
        """The model as a device sees it."""
        if self._view is None:
            raise RuntimeError(f"Call `{type(self).__name__}.init` first.")
        return self._view if self._shards is None else self._view.on_each(self._shards.parts)

    def _problem(self, args: tuple, kwargs: dict) -> Problem:
        """The model with these data, on each of the devices that they are spread over."""
        return Problem(self._initialised, args, kwargs, self._subsampling, self._shards)

    def _whole(self, args: tuple, kwargs: dict) -> Problem:
        """The model with all data, of which no more than a few rows should be looked at."""
        view = self._initialised if self._view is None else self._view
        return Problem(view, args, kwargs, self._subsampling)

    def _compiled(self, name: str, function: Callable, problem: Problem, *facts: Any) -> Callable:
        """
        ``function(problem, *arguments)`` under ``jit``, compiled once for all data of one shape.

        :param facts: what else the function depends on, besides the model and its arguments.
        """
        program, data, rest = problem.program(function)
        with suppress(TypeError):  # an argument of the model that cannot be told from others
            program = self._programs.setdefault((name, rest, facts), program)
        return partial(program, data)

    def _start(
        self,
        rng_key: Array,
        z: Values,
        dynamics_key: Array,
        *,
        problem: Problem,
        tuned: Tuned,
        anchor: Anchor | None,
        num_warmup: Any,
    ) -> SGMCMCState:
        """The state of one chain before its first step."""
        flat, _ = ravel_pytree(z)
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
            warmup_steps=count + num_warmup * tuned.steps.count,
            configurational_temperature=zero,
            stein=start_sums(position, tuned.metric.variances(position), self._site_of()),
            anchor=anchor,
            tuned=tuned,
            block=empty_block(problem),
            rng_key=rng_key,
        )

    @staticmethod
    def _axes(chains: Any, tuned: Any) -> Any:
        """What is to be said of each field of a state: all chains have the same tuning."""
        axes: dict[str, Any] = dict.fromkeys(SGMCMCState._fields, chains)
        return SGMCMCState(**(axes | {"tuned": tuned}))

    def _site_of(self) -> np.ndarray:
        """For each entry of the flat position the number of its site."""
        latents = self._initialised.latents
        sizes = [math.prod(latents[name].shape) for name in sorted(latents)]
        return np.repeat(np.arange(len(sizes)), sizes)

    def _sample_everywhere(self, state: SGMCMCState, args: tuple, kwargs: dict) -> SGMCMCState:
        """One sample, on each of the devices that the data are spread over."""
        if self._shards is None:
            return self._sample(state, args, kwargs)
        check_traced(self._shards, state, args, kwargs)
        specs = self._on_devices(state)

        def sample(problem: Problem, state: SGMCMCState) -> SGMCMCState:
            return self._sample(state, problem.args, problem.kwargs)

        # not kept: what a step is depends on the tuning
        program, data, _ = self._problem(args, kwargs).program(sample, [specs], specs)
        return self._placed(program(data, state))

    def _placed(self, state: SGMCMCState) -> SGMCMCState:
        """The state as it lies on the devices between samples."""
        assert self._shards is not None
        specs = self._on_devices(state)
        if self._shards.processes > 1 and isinstance(specs, SGMCMCState):
            # what NumPyro collects is to be seen by every process, whichever has the chain
            specs = SGMCMCState(**(specs._asdict() | dict.fromkeys(_COLLECTED, EVERYWHERE)))
        elif isinstance(state.i, jax.core.Tracer):
            return state
        return self._shards.place(state, specs)

    def _on_devices(self, state: SGMCMCState) -> Any:
        """How a state lies on the devices."""
        assert self._shards is not None
        if jnp.ndim(state.i) == 0:
            return EVERYWHERE
        chains = self._shards.of_chains
        tuned = chains if jnp.ndim(state.tuned.step_size) else EVERYWHERE
        return self._axes(chains, tuned)

    def _sample(self, state: SGMCMCState, args: tuple, kwargs: dict) -> SGMCMCState:
        """One sample of one chain or, along a leading axis, of several."""
        chains = jnp.ndim(state.i) > 0
        axes = self._axes(0, 0 if jnp.ndim(state.tuned.step_size) else None)
        if self._refresh_every is not None:
            state = self._refreshed(state, self._refresh_every, self._problem(args, kwargs))
        advance = partial(self._advance, args=args, kwargs=kwargs)
        state = (jax.vmap(advance, (axes,), axes) if chains else advance)(state)
        # what goes through a condition is copied: no more than it needs
        stein = lax.cond(
            batch_is_full(state.stein),
            jax.vmap(close_batch) if chains else close_batch,
            lambda sums: sums,
            state.stein,
        )
        return state._replace(stein=stein)

    def _refreshed(self, state: SGMCMCState, passes: float, problem: Problem) -> SGMCMCState:
        """The anchor moved to the position, if it is time to."""
        move = jax.vmap(problem.anchor) if jnp.ndim(state.i) > 0 else problem.anchor
        steps = state.tuned.steps.count
        every = max(1, round(passes / (problem.minibatch_share * steps)))
        i = state.i.ravel()[0]  # the same in all chains
        anchor = lax.cond(
            ((i // steps) % every == 0) & (i > 0),
            lambda z, _: move(z),
            lambda _, anchor: anchor,
            state.z,
            state.anchor,
        )
        return state._replace(anchor=anchor)

    def _advance(self, state: SGMCMCState, args: tuple, kwargs: dict) -> SGMCMCState:
        """The steps of one sample of one chain, on the position as one flat vector."""
        flat, position, potential = self.flattened(state, args, kwargs)
        _, unravel = ravel_pytree(state.z)

        def body(_: int, state: SGMCMCState) -> SGMCMCState:
            return self._guarded_step(state, potential, self._problem(args, kwargs))

        state = state._replace(
            z=position,
            configurational_temperature=jnp.zeros_like(state.configurational_temperature),
        )
        steps = state.tuned.steps.count
        state = body(0, state) if steps == 1 else lax.fori_loop(0, steps, body, state)
        counted = state.i > state.warmup_steps
        stein = state.stein._replace(samples=state.stein.samples + counted)
        z = unravel(state.tuned.metric.moved(flat, position, state.z))
        return state._replace(z=z, stein=stein)

    def _guarded_step(
        self, state: SGMCMCState, potential: Potential, problem: Problem
    ) -> SGMCMCState:
        """One step, undone and counted if it is not finite."""
        # the split is the same at each step, and compiled loops do it once
        rows_key, *keys = random.split(state.rng_key, 3)
        noise_key, model_key = (random.fold_in(key, state.i) for key in keys)
        rows: Rows = self.draw_rows(rows_key, state.i)
        if state.block is not None:
            block = block_with(state.i, rows_key, state.block, problem, self.draw_rows)
            state = state._replace(block=block)
            rows = {**rows, **rows_at(block, state.i)}
        step_size = self._step_size_at(state.i, state.tuned.step_size)
        step_size = jnp.asarray(step_size, state.step_size.dtype)
        new, observed = self.step(
            state._replace(step_size=step_size),
            self.gradient_of_all(potential, rows, model_key),
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
            state.tuned.metric.direction,
        )
        return state._replace(
            i=state.i + 1,
            z=z,
            dynamics=dynamics,
            step_size=step_size,
            minibatch_potential=minibatch_potential,
            nonfinite_steps=state.nonfinite_steps + ~finite,
            configurational_temperature=state.configurational_temperature
            + (share / state.tuned.steps.count if judged else math.nan),
            stein=stein,
        )

    def _step_size_at(self, i: Array, tuned: Any) -> Any:
        return self._step_size(i) if callable(self._step_size) else tuned

    def flattened(
        self, state: SGMCMCState, args: tuple, kwargs: dict
    ) -> tuple[Array, Array, Potential]:
        """The values of one chain as one vector, the position, and the potential there."""
        metric, flat = state.tuned.metric, ravel(state.z)
        potential = self._problem(args, kwargs).potential(metric, state.anchor)
        return flat, metric.coordinates(flat), potential


def _turned(dynamics: Any) -> Any:
    """With the momentum reversed: else a step that is undone would lead to the same place."""
    if "momentum" not in getattr(dynamics, "_fields", ()):
        return dynamics
    return dynamics._replace(momentum=-dynamics.momentum)
