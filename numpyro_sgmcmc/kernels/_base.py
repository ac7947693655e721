# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What every kernel shares: NumPyro's contract, met once."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from functools import partial
import math
from typing import Any, Self
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.sharding import Mesh
from numpyro.infer.initialization import init_to_uniform
from numpyro.util import is_prng_key

from numpyro_sgmcmc.devices import found_shards
from numpyro_sgmcmc.fingerprint import description_of
from numpyro_sgmcmc.kernels._arguments import StepSize, fingerprint_of, positive, whole
from numpyro_sgmcmc.kernels._judging import NOTHING_WRITTEN, Judging
from numpyro_sgmcmc.kernels._spreading import check_chains
from numpyro_sgmcmc.kernels._state import SGMCMCState, Tuned
from numpyro_sgmcmc.kernels._tuning import SelfTuning
from numpyro_sgmcmc.minibatch import MinibatchModel, Model, Values, as_arrays, full_data
from numpyro_sgmcmc.problem import Problem
from numpyro_sgmcmc.starts import check_initial_values, initial_values, no_initial_values
from numpyro_sgmcmc.warmup import Tuning

#: What a kernel finds or counts, and is not part of what it was told.
_NOT_SETTINGS = frozenset(
    ("_model", "_view", "_programs", "_tuning", "_progress_bar", "_mesh", "_shards")
    + ("_diagnostics", "_calls", "_has_warned", "_is_judged_outside")
)


class SGMCMCKernel(Judging, SelfTuning):
    """
    Base class of the kernels of this package.

    A method adds its dynamics, :meth:`init_dynamics` and :meth:`step`, as pure functions.

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
    :param str gradient: ``"minibatch"``; ``"control_variate"``, less noise for a dearer step,
        after a pass over all data (:class:`~numpyro_sgmcmc.potentials.ControlVariate`); or
        ``"auto"``, a control variate if something is tuned and it at least halves the noise.
    :param float refresh_every: move the anchor of the control variate to the current position
        every so many passes over the data; it stays at the centre if None.
    :param Tuning tuning: the result of :meth:`tune`, instead of tuning anew: its metric, and
        its control variate, whose anchor is made anew where the data are others.
    :param float temperature: the target is :math:`\\propto \\exp(-U / T)`; 1 is the posterior.
    :param str subsampling: how the rows of a minibatch are drawn: ``"without_replacement"``
        within a minibatch and independently of other minibatches, ``"with_replacement"``,
        ``"epochs"``, in shuffled passes over the data, ``"symmetric_sweeps"``, forward
        and backward through random partitions of them, or ``"clusters"``, stretches of neighbouring
        rows, which are read from disk much faster (:func:`~numpyro_sgmcmc.subsampling.clusters`).
    :param int steps_per_sample: number of steps between two samples that NumPyro's
        ``MCMC`` sees; ``num_warmup``, ``num_samples`` and ``thinning`` count samples. None is 1 if
        the step size is given, and else as many as a chain needs to forget most of where it was,
        :meth:`memory` twice: samples are then almost independent, as those of NUTS.
    :param init_strategy: a per-site initialization function of NumPyro.
    :param bool progress_bar: whether to show the phases of the tuning.
    :param mesh: devices over which the rows of the data are spread
        (:func:`~numpyro_sgmcmc.spread_rows`); None is the mesh over which they are, if any.
    :raises ValueError: if an argument has no meaning, here or when ``MCMC`` initialises the
        chain with a model or with data that minibatches cannot serve.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGMCMCKernel

        >>> class Descent(SGMCMCKernel):
        ...     def init_dynamics(self, rng_key, position, friction):
        ...         return ()  # nothing besides the position
        ...
        ...     def step(self, state, gradient, rng_key):
        ...         observed = gradient(state.z)
        ...         position = state.z - state.step_size * observed.gradient
        ...         return state._replace(z=position), observed

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (1_000,))
        >>> mcmc = MCMC(Descent(model, step_size=1e-4), num_warmup=100, num_samples=10,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> bool(abs(mcmc.get_samples()["mu"][-1] - y.mean()) < 0.05)
        True
    """

    sample_field = "z"

    @property
    def order(self) -> int:
        """Order in the step size of the error of expectations; 1 where nothing better is known."""
        return 1

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
        steps_per_sample: int | None = None,
        init_strategy: Callable = init_to_uniform,
        progress_bar: bool = True,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(
            model,
            step_size,
            metric=metric,
            gradient=gradient,
            refresh_every=refresh_every,
            tuning=tuning,
            temperature=temperature,
            subsampling=subsampling,
            steps_per_sample=steps_per_sample,
            init_strategy=init_strategy,
            progress_bar=progress_bar,
            mesh=mesh,
        )
        self._start_judging()

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
            "steps_per_sample": self.steps_per_sample,
            "order": self.order,
        }
        if (tuning := self.tuning) is not None:
            if not callable(self._step_size):
                found["step_size"] = tuning.step_size
            found["metric"] = type(tuning.metric).__name__.removesuffix("Metric").lower()
            found["gradient"] = "minibatch" if tuning.anchor is None else "control_variate"
            if tuning.passes:
                found["tuning_passes"] = sum(tuning.passes.values())
            if tuning.noise is not None:
                found["noise_variance"] = tuning.noise.mean
        if self._view is not None:
            found["passes_per_sample"] = self.passes_per_sample
            for plate in self._view.plates:
                found[f"batch_size_{plate.name}"] = plate.subsample_size
        return found

    def identity(self, args: tuple, kwargs: dict) -> dict[str, str | float]:
        """
        What the law of a run depends on, for telling a run from others also in another process:
        the class of the kernel, its settings, the shapes of the latent sites, the density of every
        site at some values of them and the first rows, and a fingerprint of the data.

        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        """
        args, kwargs = as_arrays((args, kwargs))
        view = self._read(args, kwargs)
        found: dict[str, str | float] = {"kernel": type(self).__name__}
        for name, value in sorted(vars(self).items()):
            if name not in _NOT_SETTINGS:
                found[f"kernel's {name.strip('_')}"] = description_of(value)
        if callable(self._step_size):
            sizes = [float(self._step_size(jnp.asarray(i))) for i in (0, 10, 1_000, 100_000)]
            found["kernel's step_size"] = description_of(sizes)
        latents = sorted(view.latents.items())
        found["latent sites"] = ", ".join(f"{k}: {x.dtype}{list(x.shape)}" for k, x in latents)

        def densities(problem: Problem, z: Values) -> dict[str, Array]:
            return problem.view.log_densities(z, problem.args, problem.kwargs)

        # no special values: a prior with another width must make a difference
        z = {k: jnp.cos(1.0 + jnp.arange(math.prod(x.shape))).reshape(x.shape) for k, x in latents}
        z = {k: (z[k] / 2).astype(x.dtype) for k, x in latents}
        program = self._compiled("densities", densities, self._problem(args, kwargs))
        found |= {f"log density of '{k}'": float(x) for k, x in program(z).items()}
        found["data"] = fingerprint_of(args, kwargs) or ""
        # other devices draw other rows
        found["mesh"] = str(dict(self._shards.mesh.shape)) if self._shards else "none"
        return found

    def adopt_tuning(self, tuning: Tuning) -> None:
        """
        Takes what this kernel found in another process, on the same data, instead of tuning anew.

        :param tuning: :attr:`tuning` of the other kernel.
        """
        self._tuning = tuning

    @property
    def passes_per_sample(self) -> float:
        """
        What a sample costs, in passes over all data: a step is one gradient of its minibatch,
        or two with a control variate, whose anchor costs a pass where it moves.
        """
        rows = self.steps_per_sample * self._problem((), {}).minibatch_share
        controlled = self._tuning is not None and self._tuning.anchor is not None
        refreshed = 0 if self._refresh_every is None else 1 / self._refresh_every
        return rows * ((2 if controlled else 1) + refreshed)

    def with_step_size(self, step_size: float, steps_per_sample: int | None = None) -> Self:
        """
        The same kernel, with the same metric, friction and control variate, and another step
        size.

        :param float step_size: step size :math:`h`.
        :param int steps_per_sample: number of steps between two samples, if that is to be
            another one too.
        """
        new = copy(self)
        # which a copy, like a pickle, does not have
        new._view, new._mesh, new._shards = self._view, self._mesh, self._shards
        new._step_size = positive("step_size", step_size)
        each = self.steps_per_sample if steps_per_sample is None else steps_per_sample
        new._steps_per_sample = whole("steps_per_sample", each)
        if self._tuning is not None:
            new._given_tuning = new._tuning = self._tuning._replace(step_size=new._step_size)
        return new

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Values | None,
        model_args: tuple,
        model_kwargs: dict,
    ) -> SGMCMCState:
        args, kwargs = as_arrays((model_args, model_kwargs))
        # chains that are traced all at once are not to trace the tuning too
        traced = isinstance(rng_key, jax.core.Tracer)
        batched = not is_prng_key(rng_key)
        if (shards := found_shards(self._mesh, args, kwargs)) is not None:
            check_chains(shards, rng_key.shape[0] if batched else 1, traced)
        view = self._read(args, kwargs)
        self._start_judging(num_warmup)
        self.check_warmup(num_warmup)
        with jax.ensure_compile_time_eval() if traced else nullcontext():
            tuning = self._tuning_for(args, kwargs)
        self.check_model(
            self._initialised, self._given_step_size or tuning.step_size, tuning.friction
        )
        problem = self._whole(args, kwargs)

        def of_chains(function: Callable, **axes: Any) -> Callable:
            return jax.vmap(function, **axes) if batched else function

        if init_params is not None:
            z = as_arrays(init_params)

            def potential(problem: Problem, z: Values) -> Array:
                where = problem.view.first_rows(), random.key(0), problem.args, problem.kwargs
                return of_chains(lambda z: problem.view.potential(z, *where))(z)

            chains = rng_key.shape[0] if batched else None
            program = self._compiled("potential", potential, problem, batched)
            check_initial_values(view, z, chains, program)
        elif tuning.start is None:
            z = self._found_values(problem, of_chains(lambda key: random.split(key, 3)[0])(rng_key))
        else:
            z = None  # a draw of the Gaussian, in the program that follows
        dtype = jnp.result_type(*jax.tree.leaves(z or tuning.start))

        def start(
            problem: Problem, keys: Array, z: Values | None, tuned: Tuned, anchor: Any,
            gaussian: Any, num_warmup: Any,
        ) -> SGMCMCState:  # fmt: skip
            start_key, *others = of_chains(lambda key: tuple(random.split(key, 3)))(keys)
            if z is None:
                z = self._draw_starts(problem, gaussian, start_key)
            # Values of a prior, say, may have a weak dtype; in a loop it must not change.
            z = jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), z)

            start = partial(
                self._start, problem=problem, tuned=tuned, anchor=anchor, num_warmup=num_warmup
            )

            def one(z: Values, chain_key: Array, dynamics_key: Array) -> SGMCMCState:
                return start(chain_key, z, dynamics_key)

            return of_chains(one, out_axes=self._axes(0, None))(z, *others)

        each = self._problem(args, kwargs)
        program = self._compiled("start", start, each, batched, self._level)
        tuned = Tuned.of(tuning, dtype)
        state = program(rng_key, z, tuned, tuning.anchor, tuning.start, num_warmup)
        if self._shards is not None:
            state = self._placed(state)
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
            self.check_start(state, args, kwargs)
        return state

    def _found_values(self, problem: Problem, keys: Array) -> Values:
        """
        Where chains start that are not told to, for a key or for each of a batch of keys.

        :raises ValueError: if there is no such place.
        """

        def find(problem: Problem, keys: Array) -> tuple[Values, Array]:
            strategy = self._init_strategy
            return initial_values(problem.view, keys, strategy, problem.args, problem.kwargs)

        z, found = self._compiled("find", find, problem)(keys)
        if not isinstance(found, jax.core.Tracer) and not found:
            where = self._init_strategy, problem.args, problem.kwargs
            raise no_initial_values(problem.view, keys, *where)
        return z

    @property
    def _sample_fn(self) -> MinibatchModel | None:
        # NumPyro asks for this name to see whether `init` has been called.
        return self._view

    def sample(self, state: SGMCMCState, model_args: tuple, model_kwargs: dict) -> SGMCMCState:
        state = self._sample_everywhere(state, *as_arrays((model_args, model_kwargs)))
        shards = self._shards
        # one device would call Python, and the others send it the sums of their chains, or wait
        apart = shards is not None and (shards.processes > 1 or shards.chains > 1)
        return state if apart else self._judged(state)

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict) -> Callable[[Values], Values]:
        view = self._initialised
        args, kwargs = as_arrays((model_args, model_kwargs))
        self._check_same_data(args, kwargs)
        if view.minibatch_dependent:
            names = ", ".join(f"'{name}'" for name in sorted(view.minibatch_dependent))
            warnings.warn(
                f"Deterministic sites {names} depend on the minibatch and are not collected. For"
                " their values on all data use `Predictive(full_data(model), mcmc.get_samples())`.",
                stacklevel=2,
            )

        def constrain(problem: Problem, z: Values) -> Values:
            return problem.view.constrain(z, problem.args, problem.kwargs)

        return self._compiled("constrain", constrain, self._whole(args, kwargs))

    def _check_same_data(self, args: tuple, kwargs: dict) -> None:
        """
        :raises ValueError: if a run goes on with other data than those of its anchor.
        """
        if self._tuning is None or self._tuning.anchor is None:
            return
        data = fingerprint_of(args, kwargs)
        if data is not None and data != self._tuning.data:
            raise ValueError(
                "The control variate of this run belongs to other data: the run cannot go on with"
                " these. Set `mcmc.post_warmup_state = None`, or use a new `MCMC`; with"
                " `tuning=kernel.tuning` a new kernel need not tune itself again."
            )

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_view"] = None  # of data that are not in the pickle; `init` makes it anew
        state["_mesh"] = state["_shards"] = None  # devices of this process; the data know theirs
        state["_programs"] = {}
        state["_diagnostics"] = NOTHING_WRITTEN
        return state
