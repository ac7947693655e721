# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""How a kernel comes to what its arguments leave out."""

from collections.abc import Callable
from functools import partial
import math
from typing import Any
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.util import is_prng_key

from numpyro_sgmcmc.kernels._arguments import (
    StepSize,
    checked_metric,
    checked_tuning,
    fingerprint_of,
    metric_of_guide,
    one_of,
    tuning_bar,
)
from numpyro_sgmcmc.kernels._chain import Chain
from numpyro_sgmcmc.kernels._state import SGMCMCState, Tuned
from numpyro_sgmcmc.metric import DenseMetric, DiagonalMetric, IdentityMetric, from_covariance
from numpyro_sgmcmc.minibatch import Model, Values, as_arrays
from numpyro_sgmcmc.noise import NoiseLevel
from numpyro_sgmcmc.potentials import Anchor
from numpyro_sgmcmc.problem import Problem
from numpyro_sgmcmc.stein import SteinSums, advice
from numpyro_sgmcmc.warmup import PILOT_CHAINS, Choices, Tuning, find_tuning

#: A sample of a method that needs very short steps is not to take forever.
_MOST_STEPS_PER_SAMPLE = 1_000


class SelfTuning(Chain):
    """The part of a kernel that tunes it; see :mod:`numpyro_sgmcmc.warmup`."""

    #: Whether the method has a friction, given or tuned.
    has_friction: bool = False

    def __init__(
        self,
        model: Model,
        step_size: StepSize | None,
        *,
        metric: Any,
        gradient: str,
        tuning: Tuning | None,
        progress_bar: bool,
        **chain: Any,
    ) -> None:
        super().__init__(model, step_size, **chain)
        self._friction: float | None = None
        self._metric = checked_metric(metric)
        self._gradient_kind = one_of("gradient", gradient, ("auto", "minibatch", "control_variate"))
        if self._refresh_every is not None and gradient != "control_variate":
            raise ValueError(
                "`refresh_every` moves the anchor of a control variate: it needs"
                f" gradient='control_variate', but gradient={gradient!r}."
            )
        self._given_tuning = checked_tuning(tuning, metric, gradient)
        self._progress_bar = progress_bar
        #: The latest tuning.
        self._tuning: Tuning | None = None

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

    def memory(self, tuning: Tuning) -> float:
        """
        The time in which a chain forgets where it was: :math:`w^2` if the posterior is :math:`w`
        wide in the coordinates of the metric, and with momentum and friction :math:`A` the larger
        one of :math:`A w^2` and :math:`2 w`.

        :param tuning: the metric, the friction and the Gaussian that the tuning found.

        **Example:** in the posterior's own metric little friction leaves a chain to its inertia.

        .. doctest::

            >>> from numpyro_sgmcmc import CCAdL
            >>> from numpyro_sgmcmc.metric import IdentityMetric
            >>> from numpyro_sgmcmc.warmup import Tuning
            >>> kernel = CCAdL(lambda: None)
            >>> [kernel.memory(Tuning(0.5, friction, IdentityMetric())) for friction in (0.7, 5.0)]
            [2.0, 5.0]
        """
        width = tuning.width
        if tuning.friction is None:
            return width**2
        return max(2 * width, tuning.friction * width**2)

    @property
    def steps_per_sample(self) -> int:
        """Number of steps between two samples, given or tuned."""
        if self._steps_per_sample is not None:
            return self._steps_per_sample
        if self._step_size is not None or self._tuning is None:
            return 1
        return self._tuning.steps_per_sample

    @property
    def tuning(self) -> Tuning | None:
        """What the latest run was tuned to, or None before it."""
        return self._tuning

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
        :raises ValueError: if no centre or no metric is found, with what to do.

        **Example:**

        .. doctest::

            >>> import jax
            >>> import numpyro, numpyro.distributions as dist
            >>> from numpyro_sgmcmc import CCAdL

            >>> def model(y):
            ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
            ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
            ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

            >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
            >>> tuning = CCAdL(model, progress_bar=False).tune(jax.random.key(1), y)
            >>> print(str(tuning).splitlines()[0])
            step size 1, friction 0.7, 4 steps per sample, dense metric
            >>> kernel = CCAdL(model, tuning=tuning)
        """
        args, kwargs = as_arrays((args, kwargs))
        self._read(args, kwargs)
        return self._find_tuning(rng_key, args, kwargs, self._known_data(args, kwargs))

    @property
    def _level(self) -> NoiseLevel | None:
        """The noise of the gradient in the coordinates of the metric, where it was measured."""
        return None if self._tuning is None else self._tuning.noise

    @property
    def _given_step_size(self) -> float | None:
        """The step size of the first step, if it is given."""
        if not callable(self._step_size):
            return self._step_size
        with jax.ensure_compile_time_eval():
            step_size = float(self._step_size(jnp.asarray(0)))
        if not (math.isfinite(step_size) and step_size > 0):
            raise ValueError(
                f"The step size schedule gives {step_size} at step 0; it must be positive."
            )
        return step_size

    @property
    def _rates_are_given(self) -> bool:
        """Whether step size and friction are given."""
        return self._step_size is not None and not (self.has_friction and self._friction is None)

    def _tuning_for(self, args: tuple, kwargs: dict) -> Tuning:
        """The tuning that was given, that was found before for the same data, or a new one."""
        if self._given_tuning is not None:
            self._tuning = self._adopted(self._given_tuning, args, kwargs)
        elif (
            self._rates_are_given
            and not isinstance(self._metric, str)
            and self._gradient_kind != "control_variate"
        ):
            step_size = self._given_step_size
            assert step_size is not None
            metric = self._given_metric(args, kwargs) or IdentityMetric()
            self._tuning = Tuning(step_size, self._friction, metric)
        else:
            data = self._known_data(args, kwargs)
            if self._tuning is None or self._tuning.data != data:
                self._tuning = self._find_tuning(random.key(0), args, kwargs, data)
        return self._tuning._replace(steps_per_sample=self.steps_per_sample)

    def _known_data(self, args: tuple, kwargs: dict) -> str:
        """
        :raises ValueError: if the values of the data are not known.
        """
        data = fingerprint_of(args, kwargs)
        if data is None:
            raise ValueError(
                f"{type(self).__name__} cannot tune itself inside `jit` or `vmap` of its data."
                " Call `tune` before, and pass `tuning=`."
            )
        return data

    def _adopted(self, given: Tuning, args: tuple, kwargs: dict) -> Tuning:
        """
        :raises ValueError: if the tuning is of another model or method.
        """
        size, metric = self._problem(args, kwargs).view.dimension, given.metric
        if not isinstance(metric, IdentityMetric) and len(metric.center) != size:
            raise ValueError(
                f"`tuning` was found for {len(metric.center)} unconstrained parameters, but this"
                f" model has {size}."
            )
        given = given._replace(
            step_size=self._given_step_size or given.step_size,
            friction=self._friction or given.friction,
        )
        if self.has_friction and given.friction is None:
            raise ValueError(
                f"`tuning` has no friction, which {type(self).__name__} needs: call its own `tune`,"
                " or give `friction`."
            )
        if given.anchor is None:
            return given
        data = fingerprint_of(args, kwargs)
        if data is None or data != given.data:
            # any centre serves, with what these data say there
            problem = self._problem(args, kwargs)
            anchor = self._compiled("anchor", Problem.anchor, problem)(given.anchor.values)
            given = given._replace(anchor=anchor, data=data)
        return given

    def _find_tuning(self, rng_key: Array, args: tuple, kwargs: dict, data: str) -> Tuning:
        """Runs the phases of the tuning behind a progress bar."""
        metric = self._metric if isinstance(self._metric, str) else self._given_metric(args, kwargs)
        if metric is None and self._rates_are_given:
            metric = IdentityMetric()
        choices = Choices(
            self._given_step_size, self._friction, metric, self._gradient_kind, self._init_strategy
        )
        problem = self._problem(args, kwargs)
        suggest = None if self._rates_are_given else self.suggest
        with tuning_bar(self._progress_bar) as report:
            tuning = find_tuning(
                problem, rng_key, choices, suggest, partial(self._pilot, problem), report
            )
        _warn_of(tuning)
        if self._step_size is None:
            steps = math.ceil(2 * self.memory(tuning) / tuning.step_size)
            tuning = tuning._replace(steps_per_sample=min(steps, _MOST_STEPS_PER_SAMPLE))
        return tuning._replace(data=data)

    def _given_metric(self, args: tuple, kwargs: dict) -> Any:
        """
        :raises ValueError: if the metric does not fit the model.
        """
        given, view = self._metric, self._problem(args, kwargs).view
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

    def _pilot(self, problem: Problem, tuning: Tuning) -> Callable[[float, int, Array], SteinSums]:
        """Short chains, half of whose steps are warm-up."""
        assert tuning.start is not None
        self._tuning = tuning  # how a method holds its noise depends on the level of it

        def run(
            problem: Problem,
            gaussian: Any,
            anchor: Anchor | None,
            tuned: Tuned,
            samples: Array,
            rng_key: Array,
        ) -> SteinSums:
            keys = random.split(rng_key, (3, PILOT_CHAINS))
            z = self._draw_starts(problem, gaussian, keys[1])
            start = partial(
                self._start, problem=problem, tuned=tuned, anchor=anchor, num_warmup=samples // 2
            )

            def sampled(_: Any, state: SGMCMCState) -> SGMCMCState:
                return self._sample(state, problem.args, problem.kwargs)

            def one(start_of: tuple[Array, Values, Array]) -> SteinSums:
                return lax.fori_loop(0, samples, sampled, start(*start_of)).stein

            if problem.shards is None:
                # one after the other: a program for all at once takes twice as long to compile
                return lax.map(one, (keys[0], z, keys[2]))
            # devices would spend their time in waiting for each other
            chains = jax.vmap(start, out_axes=self._axes(0, None))(keys[0], z, keys[2])
            return lax.fori_loop(0, samples, sampled, chains).stein

        compiled, dtype = problem.compiled(run), tuning.start.center.dtype

        def pilot(step_size: float, steps: int, rng_key: Array) -> SteinSums:
            each = self._steps_per_sample or 1
            choice = tuning._replace(step_size=step_size, steps_per_sample=each)
            tuned, samples = Tuned.of(choice, dtype), jnp.asarray(-(-steps // each))
            return compiled(tuning.start, tuning.anchor, tuned, samples, rng_key)

        return pilot

    def _draw_starts(
        self, problem: Problem, gaussian: DiagonalMetric | DenseMetric, rng_key: Array
    ) -> Values:
        """
        A draw of the Gaussian that the tuning found, or its centre where that cannot start,
        for a key or for each of a batch of keys.
        """
        view = problem.view

        def draw(rng_key: Array) -> Values:
            normal = random.normal(rng_key, gaussian.center.shape, gaussian.center.dtype)
            drawn = problem.unravel(gaussian.values(math.sqrt(self._temperature) * normal))
            rows, key = view.first_rows(), random.key(0)
            energy = problem.mean(view.potential(drawn, rows, key, problem.args, problem.kwargs))
            center = problem.unravel(gaussian.center)
            return jax.tree.map(lambda x, y: jnp.where(jnp.isfinite(energy), x, y), drawn, center)

        return draw(rng_key) if is_prng_key(rng_key) else jax.vmap(draw)(rng_key)


def _warn_of(tuning: Tuning) -> None:
    """Says what the tuning has found to be wrong."""
    if tuning.multimodal:
        warnings.warn(
            "The posterior has several modes (searches from different starts ended in"
            " different ones, with a barrier between): the chains will see one of them. Break a"
            " symmetry of the model, or take the draws for predictions only.",
            stacklevel=3,
        )
    if tuning.is_far_from_gaussian:
        warnings.warn(
            "The posterior is far from any Gaussian, and no metric fits it. Chains may be slow"
            " in directions that a short run does not show: compare several long ones, and"
            " reparametrise the model (a centred or a non-centred hierarchy) if they differ.",
            stacklevel=3,
        )
    if tuning.needs_double_precision:
        warnings.warn(
            f"Rounding errors of the gradient are as large as {tuning.rounding:.2g} posterior"
            " standard deviations in the worst coordinate, and the draws may be off by as much."
            " Use double precision: call `numpyro.enable_x64()` before anything else.",
            stacklevel=3,
        )
    if tuning.report is not None and (problem_found := tuning.report.problem()):
        warnings.warn(f"After tuning: {advice(problem_found)}", stacklevel=3)
