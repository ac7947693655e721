# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A model with its data: how its rows are drawn, and the programs that compute with it."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
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
    Centring,
    Written,
    centred,
    from_internal,
    to_internal,
)


class Target(NamedTuple):
    """
    A model with its data, and the scheme by which rows are drawn. If the data are spread over
    devices, the model is that of one of them, and what is asked of it is computed on all.
    """

    model: MinibatchModel
    args: tuple
    kwargs: dict
    scheme: Scheme = SCHEMES["without_replacement"]
    #: how the data lie on the devices, or None if they are not spread
    shards: Shards | None = None
    #: strata of the rows by plate, where rows are not drawn alike
    strata: Mapping[str, Strata] = {}
    #: the coordinates of hierarchies, by site
    centring: Centring = {}
    #: how many rows there are so far, where they keep coming; or None
    known: RowCount | None = None
    #: compiled programs by name, which serve other data of the same shapes too; or None
    programs: dict[Any, "Quick"] | None = None

    @property
    def parts(self) -> int:
        """The number of devices that the rows are spread over."""
        return 1 if self.shards is None else self.shards.parts

    @property
    def is_here(self) -> bool:
        """Whether this process can read all rows that are on disk."""
        return all(source.is_whole for source in on_disk((self.args, self.kwargs)))

    def mean(self, tree: Any) -> Any:
        """The mean over the devices that hold other rows; arrays stay as they are without."""
        if self.shards is None:
            return tree
        # one vector, and so one message
        return ravel_pytree(tree)[1](self.shards.mean(ravel(tree)))

    def for_each(self, function: Callable, entries: Any) -> Any:
        """
        The function of every entry along a leading axis: one after the other, which compiles in
        half the time, or at once on devices, which would spend their time waiting for each other.
        """
        return lax.map(function, entries) if self.shards is None else jax.vmap(function)(entries)

    def own(self, rng_key: Array) -> Array:
        """A random key for each of the devices that hold other rows."""
        return rng_key if self.shards is None else self.shards.own(rng_key)

    def unravel(self, flat: Array) -> Values:
        """A flat vector as values of the latent sites."""
        zeros = {k: jnp.zeros(x.shape, x.dtype) for k, x in self.model.latents.items()}
        return ravel_pytree(zeros)[1](flat)

    def potential(self, metric: Metric, anchor: Anchor | None = None) -> Potential:
        """The minibatch potential in the coordinates of a metric."""
        data = self.args, self.kwargs, self.centring, self.kinds
        plain = ModelPotential(self.model, self.unravel, metric, *data)
        return plain if anchor is None else ControlVariate(plain, anchor)

    def tuned(self, found: Any) -> "Target":
        """With the strata, the coordinates and the rule of a tuning, or of what is fixed."""
        view = self.model.with_rule(found.rule)
        return self._replace(model=view, strata=found.strata, centring=found.centring)

    def from_internal(self, values: Values) -> Values:
        """Unconstrained values of the latent sites, of values in the coordinates."""
        return self.written(values).values

    def written(self, values: Values) -> Written:
        """The same, and effects, of values in the coordinates."""
        if not self.centring:
            none = jnp.zeros(())
            return Written(values, none, values, none)
        return from_internal(self.hierarchy(values), self.centring, values)

    @property
    def centred(self) -> "Target":
        """The same in centred coordinates, those of effects."""
        return self._replace(centring=centred(self.centring))

    def from_effects(self, values: Values, gradient: Values) -> Values:
        """
        The gradient of the potential with respect to values in the coordinates.

        :param values: in the coordinates.
        :param gradient: with respect to effects, there.
        """
        if not self.centring:
            return gradient

        def moved(values: Values) -> tuple[Values, Array]:
            return self.written(values)[2:]

        (_, log_det), pullback = jax.vjp(moved, values)
        return pullback((gradient, -jnp.ones_like(log_det)))[0]

    def to_internal(self, values: Values) -> Values:
        """The inverse of :meth:`from_internal`."""
        return (
            to_internal(self.hierarchy(values), self.centring, values) if self.centring else values
        )

    def hierarchy(self, values: Values) -> Hierarchy:
        """Of the model, whose coordinates can be chosen."""
        rows = self.model.first_rows()
        return hierarchy_of(self.model, values, rows, random.key(0), self.args, self.kwargs)

    def anchor(self, effects: Values, order: int = 1) -> Anchor:
        """
        The anchor at some effects, by one pass over all data, with as many gradients as there are
        parameters for an expansion to second order. Integrals over latent variables of groups are
        more exact there than in a step: what these get wrong cancels between position and anchor.
        """
        return self._replace(model=self.model.with_rule("fine")).expansion(effects, order)

    @property
    def whole_potential(self) -> Potential:
        """As a function of effects, for passes over all rows."""
        return self.centred.potential(IdentityMetric())

    def expansion(self, effects: Values, order: int = 1) -> Anchor:
        """The same with integrals as they are in a step."""
        # groups of other devices, which have the same numbers, are to have other draws
        data = self.whole_potential, self.model.plates, effects, self.own(random.key(0))
        if order > 1:
            return Anchor(effects, *self.mean(full_data_expansion(*data)))
        value, slope = self.mean(full_data_gradient(*data))
        return Anchor(effects, value, slope)

    def change(self, metric: Metric, before: Array, after: Array) -> Array:
        """
        How much larger the potential of all rows is at one position than at another: chunk by
        chunk, as the difference of large sums would lose its digits.
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
        """The rows of a minibatch, drawn independently for each plate."""
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
        """The same where the number of rows is an array."""
        found = {name: rows.factor_so_far for name, rows in self.kinds.items()}
        return {name: factor for name, factor in found.items() if factor is not None}

    @property
    def groups(self) -> dict[str, tuple[Group, ...]]:
        """The sub-batches that show the noise, by stratum, where rows are not drawn alike."""
        return {name: rows.groups for name, rows in self.kinds.items() if rows.groups}

    @property
    def minibatch_share(self) -> float:
        """Rows in a minibatch, as a part of all rows: the cost of a step in passes."""
        return max((rows.share for rows in self.kinds.values()), default=1.0)

    @property
    def effective_batch_size(self) -> float:
        """
        As how many rows a minibatch counts: the fewest of a plate, those with latent variables that
        are integrated out taken together.
        """
        groups = self.model.local_plates
        worth = [float(p.subsample_size) for p in self.model.plates if p not in groups]
        worth += [sum(p.subsample_size * p.worth for p in groups)] if groups else []
        return min(worth, default=math.inf) * self.parts

    def program(
        self, function: Callable, inputs: Any = EVERYWHERE, outputs: Any = EVERYWHERE
    ) -> tuple["Quick", list[Array], Any]:
        """
        ``function(target, *arguments)`` under ``jit``, with the data as arguments of the
        program and not as constants in it; on all devices that the data are spread over.

        :param inputs: how each of the arguments lies on these devices.
        :param outputs: how the result does.
        :return: the program, of the data and the arguments; the data; and what else the target
            is made of, which tells targets that differ in their data alone from others.
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

        # what JAX's log of compilations says
        named = function.func if isinstance(function, partial) else function
        run.__name__ = getattr(named, "__qualname__", "run")
        if (shards := self.shards) is None:
            return Quick(run), data, rest
        specs = shards.of_leaves(rest.is_data)

        def everywhere(data: list[Array], *arguments: Any) -> Any:
            each = inputs if isinstance(inputs, list) else [inputs] * len(arguments)
            return shards.on_each(run, (specs, *each), outputs)(data, *arguments)

        return Quick(everywhere), data, (rest, shards)

    def compiled(
        self, function: Callable, name: str = "", *facts: Any, outputs: Any = EVERYWHERE
    ) -> "Program":
        """
        The :meth:`program` of a function, of its arguments besides the target.

        :param str name: under which it is kept for other data of the same shapes; what is kept must
            depend on nothing else that is not among its arguments or the facts.
        :param facts: what else it depends on.
        """
        program, data, rest = self.program(function, outputs=outputs)
        if name and self.programs is not None:
            key = name, self.model.facts, self.scheme, rest, facts
            with suppress(TypeError):  # an argument of the model that cannot be told from others
                program = self.programs.setdefault(key, program)
        return Program(program, data)


class Quick:
    """
    A function under ``jit``, for programs that run for less time than it takes to compile them.
    """

    def __init__(self, function: Callable) -> None:
        # options are for programs of their own, and not for a part of another
        self._inner = jax.jit(function)
        self._outer = jax.jit(function, compiler_options=_quick_compilation())
        self._pending: Future | None = None

    def __call__(self, *arguments: Any) -> Any:
        if (pending := self._pending) is not None:
            self._pending = None
            wait([pending])
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))
        return (self._inner if traced else self._outer)(*arguments)

    def prepare(self, *arguments: Any) -> None:
        """
        Compiles beside what is done next, for arguments like these. A call then finds the program,
        since JAX keeps what it has lowered together with what that was compiled to.
        """
        if (os.cpu_count() or 1) == 1 or self._pending is not None:
            return
        # whatever is wrong is said where it is used; models are traced by one thread at a time
        with suppress(Exception):
            self._pending = _beside().submit(self._outer.lower(*arguments).compile)


@dataclass(frozen=True, eq=False)
class Program:
    """A program with the data that it is for."""

    run: Quick
    data: list[Array]

    def __call__(self, *arguments: Any) -> Any:
        return self.run(self.data, *arguments)

    def prepare(self, *arguments: Any) -> None:
        """As :meth:`Quick.prepare`."""
        self.run.prepare(self.data, *arguments)


@cache
def _beside() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "compilation")


@cache
def _quick_compilation() -> dict[str, Any]:
    """
    Options of XLA that shorten compilation by a half, without those that this version does not
    know.
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
