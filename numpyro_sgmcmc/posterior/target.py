# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Targets: models with their data, the drawing of their rows, and their compiled programs."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
import math
import os
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_sgmcmc.data.data_leaves import separated_data
from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.growing import RowCount
from numpyro_sgmcmc.data.kinds import kind_of
from numpyro_sgmcmc.data.rows import Group, Rows
from numpyro_sgmcmc.data.rows_on_disk import on_disk
from numpyro_sgmcmc.data.sharding import EVERYWHERE, Shards
from numpyro_sgmcmc.data.strata import Strata
from numpyro_sgmcmc.data.subsampling import SCHEMES, Scheme
from numpyro_sgmcmc.posterior.control_variate import Anchor, ControlVariate
from numpyro_sgmcmc.posterior.coordinates import Centring, centred
from numpyro_sgmcmc.posterior.fusions import WITHOUT_FAULTY_FUSIONS
from numpyro_sgmcmc.posterior.hierarchy import Hierarchy, hierarchy_of
from numpyro_sgmcmc.posterior.linear_algebra import in_order
from numpyro_sgmcmc.posterior.metric import IdentityMetric, Metric
from numpyro_sgmcmc.posterior.model import MinibatchModel, Values
from numpyro_sgmcmc.posterior.potential import (
    ModelPotential,
    Potential,
    counted,
    full_data_expansion,
    full_data_gradient,
    over_all_data,
    ravel,
)
from numpyro_sgmcmc.posterior.reparam import (
    Written,
    drawn_from_internal,
    from_internal,
    to_internal,
)


class Target(NamedTuple):
    """
    Model with its data and the scheme that draws rows.

    If the data are spread over devices, the model is the one of a single device, and computations
    run on all devices.
    """

    model: MinibatchModel
    args: tuple
    kwargs: dict
    scheme: Scheme = SCHEMES["without_replacement"]
    #: layout of the data on devices, or None if they are not spread
    shards: Shards | None = None
    #: strata by plate, for plates with stratified minibatches
    strata: Mapping[str, Strata] = {}
    #: coordinates of hierarchies by site
    centring: Centring = {}
    #: number of rows so far if rows keep coming, or None
    known: RowCount | None = None
    #: compiled programs by name, which also serve other data of equal shapes, or None
    programs: dict[Any, "Quick"] | None = None

    @property
    def parts(self) -> int:
        """The number of devices that the rows are spread over."""
        return 1 if self.shards is None else self.shards.parts

    @property
    def is_here(self) -> bool:
        """True if this process can read all rows that are on disk."""
        return all(source.is_whole for source in on_disk((self.args, self.kwargs)))

    def mean(self, tree: Any) -> Any:
        """Return the mean over the devices that hold other rows, or the tree without devices."""
        if self.shards is None:
            return tree
        # one vector needs one message
        return ravel_pytree(tree)[1](self.shards.mean(ravel(tree)))

    def for_each(self, function: Callable, entries: Any) -> Any:
        """
        Apply a function to every entry along a leading axis.

        The entries go one after the other, which compiles in half the time. With several devices
        they go at once, since devices would otherwise spend their time waiting for each other.
        """
        return lax.map(function, entries) if self.shards is None else jax.vmap(function)(entries)

    def own(self, rng_key: Array) -> Array:
        """Return a random key of its own for each device that holds other rows."""
        return rng_key if self.shards is None else self.shards.own(rng_key)

    def unravel(self, flat: Array) -> Values:
        """Return a flat vector as values of the latent sites."""
        zeros = {k: jnp.zeros(x.shape, x.dtype) for k, x in self.model.latents.items()}
        return ravel_pytree(zeros)[1](flat)

    def potential(self, metric: Metric, anchor: Anchor | None = None) -> Potential:
        """Return the minibatch potential in the coordinates of a metric."""
        data = self.args, self.kwargs, self.centring, self.kinds
        plain = ModelPotential(self.model, self.unravel, metric, *data)
        return plain if anchor is None else ControlVariate(plain, anchor)

    def tuned(self, found: Any) -> "Target":
        """Return the target with strata, coordinates and integration rule of a tuning."""
        view = self.model.with_rule(found.rule)
        return self._replace(model=view, strata=found.strata, centring=found.centring)

    def from_internal(self, values: Values) -> Values:
        """Return unconstrained values of the latent sites from values in the coordinates."""
        if not self.centring:
            return values
        return drawn_from_internal(self.hierarchy(values), self.centring, values)

    def written(self, values: Values) -> Written:
        """Return unconstrained values and effects from values in the coordinates."""
        if not self.centring:
            none = jnp.zeros(())
            return Written(values, none, values, none)
        return from_internal(self.hierarchy(values), self.centring, values)

    @property
    def centred(self) -> "Target":
        """The target in centred coordinates, the effects."""
        return self._replace(centring=centred(self.centring))

    def from_effects(self, values: Values, gradient: Values) -> Values:
        """
        Return the gradient in the coordinates from the gradient in the effects.

        :param values: values in the coordinates.
        :param gradient: gradient of the potential with respect to the effects at these values.
        """
        if not self.centring:
            return gradient

        def moved(values: Values) -> tuple[Values, Array]:
            return self.written(values)[2:]

        (_, log_det), pullback = jax.vjp(moved, values)
        return pullback((gradient, -jnp.ones_like(log_det)))[0]

    def to_internal(self, values: Values) -> Values:
        """Return values in the coordinates, the inverse of :meth:`from_internal`."""
        return (
            to_internal(self.hierarchy(values), self.centring, values) if self.centring else values
        )

    def hierarchy(self, values: Values) -> Hierarchy:
        """Return the hierarchy of the model, whose coordinates can be chosen."""
        rows = self.model.first_rows()
        return hierarchy_of(self.model, values, rows, random.key(0), self.args, self.kwargs)

    def anchor(self, effects: Values, order: int = 1) -> Anchor:
        """
        Return the anchor at given effects, by one pass over all data.

        An expansion to second order takes a gradient for each parameter. Integrals over latent
        variables of groups are more exact here than in a step: the errors of a step cancel between
        position and anchor.
        """
        return self._replace(model=self.model.with_rule("fine")).expansion(effects, order)

    @property
    def whole_potential(self) -> Potential:
        """The potential as a function of effects, for passes over all rows."""
        return self.centred.potential(IdentityMetric())

    def expansion(self, effects: Values, order: int = 1) -> Anchor:
        """Return the anchor at given effects, with the integrals of a step."""
        # groups with equal numbers on different devices must have different draws
        data = self.whole_potential, self.model.plates, effects, self.own(random.key(0))
        if order > 1:
            return Anchor(effects, *self.mean(full_data_expansion(*data)))
        value, slope = self.mean(full_data_gradient(*data))
        return Anchor(effects, value, slope)

    def change(self, metric: Metric, before: Array, after: Array) -> Array:
        """
        Return the change of the potential of all rows between two positions.

        It is summed chunk by chunk, since the difference of large sums would lose its digits.
        """
        fine = self._replace(model=self.model.with_rule("fine"))
        potential, key = fine.potential(metric), self.own(random.key(0))

        def of_chunk(rows: Any) -> Array:
            here, there = (potential(potential.values(x), rows, key) for x in (after, before))
            return here - there

        return self.mean(over_all_data(of_chunk, self.model.plates))

    @property
    def kinds(self) -> dict[str, Rows]:
        """The rows of each plate."""
        return {
            plate.name: kind_of(
                plate.size,
                plate.subsample_size,
                self.scheme,
                self.strata.get(plate.name),
                self.known,
                self.model.dtype,
            )
            for plate in self.model.plates
        }

    def rows(self, rng_key: Array, step: Any = 0) -> dict[str, DrawnRows]:
        """Draw the rows of a minibatch, independently for each plate."""
        rng_key, step, kinds = self.own(rng_key), jnp.asarray(step), self.kinds
        each = enumerate(kinds.items())
        drawn = {name: rows.draw(random.fold_in(rng_key, k), step) for k, (name, rows) in each}
        return counted(kinds, drawn)

    @property
    def factors(self) -> dict[str, float]:
        """The finite-population factor of each plate; 0 where its minibatches have no noise."""
        return {name: rows.factor for name, rows in self.kinds.items()}

    @property
    def factors_so_far(self) -> dict[str, Array]:
        """The finite-population factors of plates whose number of rows is an array."""
        factors = {name: rows.factor_so_far for name, rows in self.kinds.items()}
        return {name: factor for name, factor in factors.items() if factor is not None}

    @property
    def groups(self) -> dict[str, tuple[Group, ...]]:
        """The sub-batches that show the noise, by stratum, where rows are not drawn alike."""
        return {name: rows.groups for name, rows in self.kinds.items() if rows.groups}

    @property
    def minibatch_share(self) -> float:
        """
        The share of all rows in a minibatch: the cost of a step in passes.

        Plates count by the values that they observe.
        """
        kinds = self.kinds
        values = {plate.name: plate.size * plate.members for plate in self.model.plates}
        shares = (kinds[name].share * number for name, number in values.items())
        return sum(shares) / sum(values.values()) if values else 1.0

    @property
    def largest_share(self) -> float:
        """The largest share of the rows of a plate in a minibatch."""
        return max((rows.share for rows in self.kinds.values()), default=1.0)

    @property
    def effective_batch_size(self) -> float:
        """
        The number of rows that a minibatch counts as, the smallest of all plates.

        Plates with latent variables that are integrated out are taken together.
        """
        groups = self.model.local_plates
        worth = [float(p.subsample_size) for p in self.model.plates if p not in groups]
        worth += [sum(p.subsample_size * p.worth for p in groups)] if groups else []
        return min(worth, default=math.inf) * self.parts

    def program(
        self, function: Callable, inputs: Any = EVERYWHERE, outputs: Any = EVERYWHERE
    ) -> tuple["Quick", list[Array], Any]:
        """
        Return ``function(target, *arguments)`` under ``jit``, with the data as arguments.

        The data are no constants of the program. It runs on all devices that the data are spread
        over.

        :param inputs: partition of each argument on these devices.
        :param outputs: partition of the result.
        :return: the program, a function of the data and the arguments; the data; and the other
            parts of the target, which are equal for targets that differ in their data alone.
        """
        given = self.args, self.kwargs, dict(self.strata), dict(self.centring), self.known
        data, rest = separated_data(given)
        nothing: dict[str, Any] = {"strata": {}, "centring": {}, "known": None, "programs": None}
        empty = self._replace(args=(), kwargs={}, **nothing)

        def run(data: list[Array], *arguments: Any) -> Any:
            args, kwargs, strata, centring, known = rest.with_data(data)
            here = empty._replace(
                args=args, kwargs=kwargs, strata=strata, centring=centring, known=known
            )
            return in_order(partial(function, here))(*arguments)

        # the name in JAX's log of compilations
        named = function.func if isinstance(function, partial) else function
        run.__name__ = getattr(named, "__qualname__", "run")
        if (shards := self.shards) is None:
            return Quick(run), data, rest
        specs = shards.of_leaves(rest.is_data)

        def everywhere(data: list[Array], *arguments: Any) -> Any:
            each = inputs if isinstance(inputs, list) else [inputs] * len(arguments)
            return shards.on_each(run, (specs, *each), outputs)(data, *arguments)

        return Quick(everywhere), data, (rest, shards)

    def keeping_programs(self) -> "Target":
        """The target with a place for its compiled programs."""
        return self if self.programs is not None else self._replace(programs={})

    def compiled(
        self, function: Callable, name: str = "", *facts: Any, outputs: Any = EVERYWHERE
    ) -> "Program":
        """
        Return the :meth:`program` of a function with its data bound.

        :param str name: name under which the program is kept for other data of equal shapes. A kept
            program must depend on its arguments and the facts only.
        :param facts: other facts that the program depends on.
        """
        program, data, rest = self.program(function, outputs=outputs)
        if name and self.programs is not None:
            key = name, self.model.facts, self.scheme, rest, facts
            with suppress(TypeError):  # arguments of the model that are not hashable
                program = self.programs.setdefault(key, program)
        return Program(program, data)


class Quick:
    """
    Function under ``jit``, for programs that run for less time than their compilation.

    :param bool is_quick: whether the compilation is quick, which makes steps up to four times as
        slow.
    """

    def __init__(self, function: Callable, is_quick: bool = True) -> None:
        # compiler options apply to whole programs, and not to a part of another program
        self._function, self._inner = function, jax.jit(function)
        options = _quick_compilation() if is_quick else {}
        self._outer = jax.jit(function, compiler_options=options) if options else self._inner
        self._pending: Future | None = None

    def __call__(self, *arguments: Any) -> Any:
        if (pending := self._pending) is not None:
            self._pending = None
            wait([pending])
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))
        return (self._inner if traced else self._outer)(*arguments)

    @cached_property
    def optimised(self) -> "Quick":
        """The function with all optimisations, for programs that run longer than they compile."""
        return Quick(self._function, is_quick=False)

    def prepare(self, *arguments: Any) -> None:
        """
        Compile the program in another thread, for arguments like these.

        A later call takes the compiled program, since JAX keeps it with the lowered one.
        """
        if (os.cpu_count() or 1) == 1 or self._pending is not None:
            return
        # errors are raised by the later call; models are traced by one thread at a time
        with suppress(Exception):
            self._pending = _beside().submit(self._outer.lower(*arguments).compile)


@dataclass(frozen=True, eq=False)
class Program:
    """Program with its data."""

    run: Quick
    data: list[Array]

    def __call__(self, *arguments: Any) -> Any:
        return self.run(self.data, *arguments)

    @property
    def optimised(self) -> "Program":
        """The program with all optimisations, for runs that are longer than its compilation."""
        return Program(self.run.optimised, self.data)

    def prepare(self, *arguments: Any) -> None:
        """Compile the program in another thread, like :meth:`Quick.prepare`."""
        self.run.prepare(self.data, *arguments)


@cache
def _beside() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "compilation")


@cache
def _quick_compilation() -> dict[str, Any]:
    """
    Return options of XLA that shorten compilation by a half.

    Options that this version does not know are left out.
    """
    options: dict[str, Any] = {
        "xla_backend_optimization_level": 1,
        "xla_cpu_use_fusion_emitters": False,
    }
    options = {**options, **WITHOUT_FAULTY_FUSIONS}
    if jax.default_backend() != "cpu":
        return {}

    def is_known(option: dict[str, Any]) -> bool:
        try:
            jax.jit(lambda x: x, compiler_options=option).lower(0.0).compile()
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: value for name, value in options.items() if is_known({name: value})}
