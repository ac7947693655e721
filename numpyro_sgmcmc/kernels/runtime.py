# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The read model, devices, programs and tuning of a kernel, remade in each process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any
import warnings
import weakref

import jax

from numpyro_sgmcmc.data.growing import growing_in, padded, row_count_of, trimmed
from numpyro_sgmcmc.data.rows_on_disk import on_disk
from numpyro_sgmcmc.data.sharding import EVERYWHERE, Shards, found_shards
from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.kernels.method import Method
from numpyro_sgmcmc.posterior.checks.all_rows import check_rows
from numpyro_sgmcmc.posterior.checks.arguments import checked_arrays
from numpyro_sgmcmc.posterior.checks.devices import check_spread
from numpyro_sgmcmc.posterior.checks.run import Asked, check_run
from numpyro_sgmcmc.posterior.control_variate import GRADIENTS_OF_A_STEP
from numpyro_sgmcmc.posterior.model import MinibatchModel, read_model
from numpyro_sgmcmc.posterior.numpyro_private import free_loops
from numpyro_sgmcmc.posterior.target import Program, Quick, Target
from numpyro_sgmcmc.tuning.tuning import Tuning, TuningFailed

#: Number of kernels whose compiled programs are kept. JAX and NumPyro keep every kernel that has
#: run, and thousands of programs exhaust the memory maps of a process, where XLA crashes.
_MOST_KERNELS = 4

#: Those that have read a model, the latest last.
_latest: "list[weakref.ref[Runtime]]" = []


class Runtime:
    """
    Static facts of the model and the data, shared by all chains.

    - **name** - the name of the kernel, for errors.
    - **model** - the model as read for the latest data, or None before.
    - **is_here** - whether the model was read in this process, and not before pickling.
    - **shards** - the layout of the data on devices, if they are spread.
    - **programs** - compiled programs for any data with these facts.
    - **tuning** - the latest tuning.
    - **data**, **known** - fingerprints of the data of the latest run, and of all data that chains
      were started on.
    - **grows** - whether the latest data have growing rows.
    - **lock** - held while chains are started.
    - **densities** - log densities by site at fixed values, which identify the model.
    """

    def __init__(self, name: str, tuning: Tuning | None = None) -> None:
        self.name = name
        self.model: MinibatchModel | None = None
        self.is_here = False
        self._models: dict[Any, MinibatchModel] = {}
        self.shards: Shards | None = None
        self.programs: dict[Any, Quick] = {}
        self.tuning = tuning
        self.densities: dict[str, float] = {}
        self.data: str | None = None
        self.known: set[str | None] = set()
        self.grows = False
        self.lock = RLock()
        self._said: set[Any] = set()

    def __getstate__(self) -> dict[str, Any]:
        """The part of a runtime that a copied or pickled run needs; devices and programs stay."""
        kept = "name", "model", "tuning", "densities", "data", "known", "grows"
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__init__(kept["name"])  # type: ignore[misc]
        vars(self).update(kept)

    def with_tuning(self, tuning: Tuning | None) -> "Runtime":
        """A copy with another tuning of the model, on the same devices."""
        new = Runtime(self.name, tuning)
        new.model, new.shards = self.model, self.shards
        return new

    def samples_every(self, method: Method) -> int:
        """The number of steps between two samples."""
        return method.samples_every(
            self.tuning, None if self.model is None else self.model.dimension
        )

    def seconds_of_a_sample(self, method: Method) -> float:
        """The expected seconds for a sample of one chain, from the tuning; 0 if not known."""
        tuning = self.tuning
        if tuning is None or method.step_size is not None:
            return 0.0
        return tuning.seconds_per_sample * self.samples_every(method) / tuning.steps_per_sample

    @contextmanager
    def tuning_kept_on_failure(self) -> Iterator[None]:
        """Keep the tuning of a :class:`TuningFailed` for the user."""
        try:
            yield
        except TuningFailed as failed:
            self.tuning = failed.tuning
            raise

    @contextmanager
    def said_once(self, data: Any) -> Iterator[None]:
        """Warn only once for each data set, although ``MCMC`` begins each chain anew."""
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                yield
        finally:
            own = tuple(map(id, jax.tree.leaves(data)))
            for one in heard:
                if (said := (str(one.message), own)) not in self._said:
                    self._said.add(said)
                    warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)

    def trimmed(self, model: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments as checked arrays, with the existing rows of growing data."""
        self.grows = bool(growing_in((args, kwargs)))
        return checked_arrays(model, *trimmed((args, kwargs)))

    def read(self, method: Method, args: tuple, kwargs: dict) -> Target:
        """
        Read the model and keep the result.

        :raises ValueError: if the method or minibatches cannot serve the model.
        """
        name = self.name
        self.shards = found_shards(args, kwargs)
        model = read_model(method.model, method.init_strategy, args, kwargs)
        if method.may_take_all_rows and not (self.grows or self.shards or on_disk((args, kwargs))):
            # a control variate evaluates as many
            model = model.with_all_rows(GRADIENTS_OF_A_STEP[1])
        self.is_here = True
        if model != self.model:
            self.model, self.programs = model, {}
        self._models[_shapes((args, kwargs))] = model
        _free_older(self)
        parts = 1 if self.shards is None else self.shards.parts
        check_run(Asked(name, method.traits.corrects_noise, method.scheme, model, parts))
        if self.shards is not None:
            check_spread(self.whole(method, args, kwargs), self.shards)
        return self.target(method, args, kwargs)

    def whole(self, method: Method, args: tuple, kwargs: dict) -> Target:
        """
        The model with all data; callers should look at a few rows only.

        :raises RuntimeError: if no model has been read.
        """
        if self.model is None:
            raise RuntimeError(f"Call `{self.name}.init` first.")
        # another `MCMC` may have given other data to this kernel in the meantime
        model = self._models.get(_shapes((args, kwargs)), self.model)
        known = row_count_of((args, kwargs))
        if known is not None:
            room = growing_in((args, kwargs))[0].values.shape[0]
            model, (args, kwargs) = model.padded(room), padded((args, kwargs))
        scheme = SCHEMES[method.scheme]
        return Target(model, args, kwargs, scheme, known=known, programs=self.programs)

    def target(self, method: Method, args: tuple = (), kwargs: dict | None = None) -> Target:
        """The model with these data, on all devices of the data."""
        whole = self.whole(method, args, kwargs or {})
        if self.shards is None:
            return whole
        return whole._replace(model=whole.model.on_each(self.shards.parts), shards=self.shards)

    def check_rows(self, target: Target, kept: Tuning | None = None) -> None:
        """
        Check all rows of the data, unless their values are not known.

        :param kept: the tuning of a run with these data, whose rows were checked; or None.
        :raises ValueError: naming site and row, if minibatches cannot serve them.
        """
        if any(
            isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((target.args, target.kwargs))
        ):
            return
        if kept is not None:
            self.densities = kept.densities
            return
        assert self.model is not None
        whole = target._replace(model=self.model, shards=None)
        self.densities = check_rows(target, whole, self.compiled)

    def compiled(
        self, name: str, function: Callable, target: Target, *facts: Any, outputs: Any = EVERYWHERE
    ) -> Program:
        """
        A ``function(target, *arguments)`` under ``jit``, compiled once for all data of one shape.

        :param facts: other facts on which the function depends.
        :param outputs: the layout of the result on the devices of the data.
        """
        kept = target._replace(programs=self.programs)
        return kept.compiled(function, name, *facts, outputs=outputs)


def _free_older(runtime: Runtime) -> None:
    """Free the programs of all kernels but the latest, which compile them again if needed."""
    global _latest
    others = [other for other in _latest if other() not in (None, runtime)]
    _latest = [*others, weakref.ref(runtime)]
    for other in _latest[:-_MOST_KERNELS]:
        if (older := other()) is not None and older.programs:
            older.programs.clear()
            free_loops()
    _latest = _latest[-_MOST_KERNELS:]


def _shapes(tree: Any) -> Any:
    """The static part of the arguments of a model."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = tuple((x.shape, x.dtype) for x in leaves if isinstance(x, jax.Array))
    # words and truth values choose between models
    return structure, arrays, tuple(x for x in leaves if isinstance(x, bool | str))
