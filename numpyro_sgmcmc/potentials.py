# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The minibatch potential as a sampler sees it: a function of the coordinates of a metric, with
or without a control variate, on the rows of a minibatch or, in chunks, on all data.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
import math
from typing import Any, NamedTuple, Protocol

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_sgmcmc.devices import EVERYWHERE, Shards
from numpyro_sgmcmc.metric import IdentityMetric, Metric
from numpyro_sgmcmc.minibatch import Indices, MinibatchModel, Plate, Values
from numpyro_sgmcmc.subsampling import SCHEMES

#: A pass over all data takes so many rows at once.
_CHUNK = 16_384

#: Below this size all of a vector and what is around it is in memory.
_COPIES_ABOVE = 1_024

Rows = Indices


def ravel(values: Any) -> Array:
    """
    A tree of arrays as one flat vector, in the order of :func:`jax.flatten_util.ravel_pytree`.

    XLA makes the concatenation of large arrays with small ones a loop of masked loads over all of
    the vector, also beyond the ends of the small ones. On AMD processors a load from there, where
    there is no memory, takes hundreds of cycles even if it is masked: a step of a network took
    3.5 times as long, in some runs and not in others. Copies to places that XLA does not know when
    it compiles stay copies.

    :param values: a tree of arrays.
    :return: shape ``(d,)``.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.potentials import ravel
        >>> ravel({"b": jnp.array(3.0), "a": jnp.array([[1.0, 2.0]])}).tolist()
        [1.0, 2.0, 3.0]
    """
    leaves = jax.tree.leaves(values)
    size = sum(leaf.size for leaf in leaves)
    if len(leaves) == 1 or size < _COPIES_ABOVE or jax.default_backend() != "cpu":
        return ravel_pytree(values)[0]
    flat, start = jnp.zeros(size, jnp.result_type(*leaves)), 0
    for leaf in leaves:
        at = lax.optimization_barrier(jnp.asarray(start, jnp.int32))
        flat = lax.dynamic_update_slice(flat, leaf.ravel().astype(flat.dtype), (at,))
        start += leaf.size
    return flat


class Potential(Protocol):
    """
    The minibatch potential as a function of values, rows and random key. The values may be
    any tree of arrays: a gradient with respect to a tree is faster than one through the
    slices of a flat vector.
    """

    def values(self, position: Array, /) -> Any:
        """The values at a position, which is one flat vector."""

    def direction(self, vector: Array, /) -> Any:
        """The derivative of the values in the direction of a vector."""

    def pullback(self, gradient: Any, /) -> Array:
        """The gradient with respect to the position, of that with respect to the values."""

    def __call__(self, values: Any, rows: Rows, rng_key: Array, /) -> Array:
        """The minibatch potential, a scalar."""

    def value_and_gradient(self, values: Any, rows: Rows, rng_key: Array, /) -> tuple[Array, Any]:
        """The same, and its gradient with respect to the values, a tree like them."""

    def with_row_terms(
        self, values: Any, rows: Rows, rng_key: Array, /
    ) -> tuple[Array, dict[str, Array]]:
        """The same, and for each plate what its rows add to the log density, shape ``(n,)``."""


class ModelPotential(NamedTuple):
    """The minibatch potential of a model, as a function of the coordinates of a metric."""

    view: MinibatchModel
    unravel: Callable[[Array], Values]
    metric: Metric
    args: tuple
    kwargs: dict

    def values(self, position: Array, /) -> Values:
        return self.unravel(self.metric.values(position))

    def direction(self, vector: Array, /) -> Values:
        return self.unravel(self.metric.direction(vector))

    def pullback(self, gradient: Values, /) -> Array:
        return self.metric.pullback(ravel(gradient))

    def __call__(self, values: Values, rows: Rows, rng_key: Array, /) -> Array:
        return self.view.potential(values, rows, rng_key, self.args, self.kwargs)

    def value_and_gradient(
        self, values: Values, rows: Rows, rng_key: Array, /
    ) -> tuple[Array, Values]:
        return jax.value_and_grad(self.__call__)(values, rows, rng_key)

    def with_row_terms(
        self, values: Values, rows: Rows, rng_key: Array, /
    ) -> tuple[Array, dict[str, Array]]:
        return self.view.potential_and_row_terms(values, rows, rng_key, self.args, self.kwargs)


class Anchor(NamedTuple):
    """
    A point at which the potential of all data is known, for :class:`ControlVariate`.

    - **values** - unconstrained values :math:`\\hat\\theta` of the latent sites.
    - **potential** - :math:`U(\\hat\\theta)`, a scalar.
    - **gradient** - :math:`\\nabla U(\\hat\\theta)`, a tree like ``values``.
    """

    values: Any
    potential: Array
    gradient: Any


class ControlVariate(NamedTuple):
    """
    A minibatch potential with less noise: what the minibatch says near the anchor
    :math:`\\hat\\theta`, to first order, is replaced by what all data say,

    .. math::

        \\tilde U_{cv}(\\theta; S) = \\tilde U(\\theta; S)
            - \\left[ \\tilde U(\\hat\\theta; S)
                + \\nabla \\tilde U(\\hat\\theta; S)^\\top (\\theta - \\hat\\theta) \\right]
            + \\left[ U(\\hat\\theta)
                + \\nabla U(\\hat\\theta)^\\top (\\theta - \\hat\\theta) \\right] .

    Its gradient is the control variate estimate
    :math:`\\nabla U(\\hat\\theta) + \\nabla \\tilde U(\\theta; S) - \\nabla \\tilde
    U(\\hat\\theta; S)` of Baker et al. (2019), unbiased for any anchor. Its noise has a
    standard deviation in proportion to :math:`\\| \\theta - \\hat\\theta \\|` and no noise
    at all where the log-likelihood is quadratic. It is itself a potential: whatever estimates
    the noise of a gradient estimates the noise of this one.

    **References:**

    1. *Control variates for stochastic gradient MCMC*, Jack Baker, Paul Fearnhead,
       Emily B. Fox and Christopher Nemeth (2019).

    **Example:** for a quadratic log likelihood any minibatch says what all data say.

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import init_to_uniform
        >>> from numpyro_sgmcmc.metric import IdentityMetric
        >>> from numpyro_sgmcmc.minibatch import read_model
        >>> from numpyro_sgmcmc.potentials import Problem

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = jnp.arange(1_000.0) / 1_000
        >>> problem = Problem(read_model(model, init_to_uniform, (y,), {}), (y,), {})
        >>> anchor = problem.anchor({"mu": jnp.array(0.0)})  # a pass over the data
        >>> plain = problem.potential(IdentityMetric())
        >>> controlled = problem.potential(IdentityMetric(), anchor)
        >>> for rows in (jnp.arange(100), jnp.arange(900, 1_000)):
        ...     slopes = [
        ...         jax.grad(potential)({"mu": 0.5}, {"rows": rows}, jax.random.key(0))["mu"]
        ...         for potential in (plain, controlled)
        ...     ]
        ...     print([round(float(slope)) for slope in slopes])
        [451, 1]
        [-449, 1]
    """

    base: Potential
    anchor: Anchor

    def values(self, position: Array, /) -> Any:
        return self.base.values(position)

    def direction(self, vector: Array, /) -> Any:
        return self.base.direction(vector)

    def pullback(self, gradient: Any, /) -> Array:
        return self.base.pullback(gradient)

    def __call__(self, values: Any, rows: Rows, rng_key: Array, /) -> Array:
        at = self.base(values, rows, rng_key)
        return at - self._expansion(lambda x: self.base(x, rows, rng_key), values)

    def value_and_gradient(self, values: Any, rows: Rows, rng_key: Array, /) -> tuple[Array, Any]:
        # two gradients; by differentiating the expansion it would be another half of one
        energy, gradient = self.base.value_and_gradient(values, rows, rng_key)
        anchored = self.base.value_and_gradient(self.anchor.values, rows, rng_key)
        controlled = jax.tree.map(
            lambda g, g_at, g_all: g - g_at + g_all, gradient, anchored[1], self.anchor.gradient
        )
        slope = self._slope(anchored[1], values)
        return energy - anchored[0] - slope + self._known(values), controlled

    def with_row_terms(
        self, values: Any, rows: Rows, rng_key: Array, /
    ) -> tuple[Array, dict[str, Array]]:
        def both(x: Any) -> tuple[Array, dict[str, Array]]:
            return self.base.with_row_terms(x, rows, rng_key)

        energy, terms = both(values)
        (at, terms_at), (slope, terms_slope) = jax.jvp(
            both, (self.anchor.values,), (self._from_anchor(values),)
        )
        terms = {name: terms[name] - terms_at[name] - terms_slope[name] for name in terms}
        return energy - at - slope + self._known(values), terms

    def _expansion(self, potential: Callable[[Any], Array], values: Any) -> Array:
        """The expansion of a minibatch less that of all data."""
        at, slope = jax.jvp(potential, (self.anchor.values,), (self._from_anchor(values),))
        return at + slope - self._known(values)

    def _from_anchor(self, values: Any) -> Any:
        return jax.tree.map(jnp.subtract, values, self.anchor.values)

    def _known(self, values: Any) -> Array:
        """The expansion of all data."""
        return self.anchor.potential + self._slope(self.anchor.gradient, values)

    def _slope(self, gradient: Any, values: Any) -> Array:
        """What a gradient at the anchor says of the values."""
        products = jax.tree.map(lambda g, x: jnp.sum(g * x), gradient, self._from_anchor(values))
        return jax.tree.reduce(jnp.add, products)


def over_all_data(function: Callable[[Rows], Any], plates: Sequence[Plate]) -> Any:
    """
    The mean of a function of the rows over a partition of all rows into chunks
    :math:`S_k` of :math:`n_k` rows, for several plates over all pairs of their chunks,

    .. math:: \\bar f = \\sum_k \\frac{n_k}{N} f(S_k) .

    Of the minibatch potential, and of what is linear in it, this is the value on all data.

    :param function: rows of each plate, of any number, to a tree of arrays.
    :param plates: the subsampled plates.
    :return: a tree like what the function gives.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.minibatch import Plate
        >>> from numpyro_sgmcmc.potentials import over_all_data

        >>> y = jnp.arange(5.0)
        >>> plate = Plate("rows", size=5, subsample_size=2)
        >>> float(over_all_data(lambda rows: y[rows["rows"]].mean(), [plate]))
        2.0
    """
    total = None
    # of each plate the rows that make whole chunks, and the rest
    for parts in product(*(_parts(plate.size) for plate in plates)):
        count = math.prod(count for _, count, _ in parts)
        weight = math.prod(
            length / plate.size for plate, (_, _, length) in zip(plates, parts, strict=True)
        )

        def weighted(k: Array, parts: Any = parts, weight: float = weight) -> Any:
            rows = {}
            for plate, (start, chunks, length) in zip(plates, parts, strict=True):
                k, chunk = k // chunks, k % chunks
                rows[plate.name] = start + chunk * length + jnp.arange(length)
            return jax.tree.map(lambda x: weight * x, function(rows))

        def added(total: Any, k: Array, weighted: Any = weighted) -> Any:
            return jax.tree.map(jnp.add, total, weighted(k)), None

        if total is None:
            shapes = jax.eval_shape(weighted, jnp.asarray(0))
            total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = lax.scan(added, total, jnp.arange(count))
    return total


def full_data_gradient(
    potential: Potential, plates: Sequence[Plate], values: Any, rng_key: Array
) -> tuple[Array, Any]:
    """
    The potential of all data and its gradient, by one pass over the data in chunks.

    :param potential: the minibatch potential, of any number of rows.
    :param plates: the subsampled plates.
    :param values: values of the latent sites.
    :param rng_key: key for a potential that is itself random.
    :return: a scalar, and a tree like ``values``.
    """
    return over_all_data(lambda rows: jax.value_and_grad(potential)(values, rows, rng_key), plates)


def _parts(size: int) -> list[tuple[int, int, int]]:
    """First row, number of chunks and rows of each: of the whole chunks and of the rest."""
    count = -(-size // _CHUNK)
    length = size // count
    whole = [(0, size // length, length)]
    done = size // length * length
    return whole if done == size else [*whole, (done, 1, size - done)]


class Problem(NamedTuple):
    """
    A model with its data, and how rows are drawn. If the data are spread over devices, the
    model is that of one of them, and what is asked of it is computed on all.
    """

    view: MinibatchModel
    args: tuple
    kwargs: dict
    subsampling: str = "without_replacement"
    #: how the data lie on the devices, or None if they are not spread
    shards: Shards | None = None

    @property
    def parts(self) -> int:
        """The number of devices that the rows are spread over."""
        return 1 if self.shards is None else self.shards.parts

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
        zeros = {k: jnp.zeros(x.shape, x.dtype) for k, x in self.view.latents.items()}
        return ravel_pytree(zeros)[1](flat)

    def potential(self, metric: Metric, anchor: Anchor | None = None) -> Potential:
        """The minibatch potential in the coordinates of a metric."""
        plain = ModelPotential(self.view, self.unravel, metric, self.args, self.kwargs)
        return plain if anchor is None else ControlVariate(plain, anchor)

    def anchor(self, values: Values) -> Anchor:
        """The anchor at some values, by one pass over all data."""
        potential, key = self.potential(IdentityMetric()), random.key(0)
        whole = full_data_gradient(potential, self.view.plates, values, key)
        return Anchor(values, *self.mean(whole))

    def rows(self, rng_key: Array, step: Any = 0, scheme: str | None = None) -> dict[str, Array]:
        """The rows of a minibatch, drawn independently for each plate."""
        draw, rng_key = SCHEMES[scheme or self.subsampling], self.own(rng_key)
        return {
            plate.name: draw(
                random.fold_in(rng_key, k), jnp.asarray(step), plate.size, plate.subsample_size
            )
            for k, plate in enumerate(self.view.plates)
        }

    @property
    def minibatch_share(self) -> float:
        """Rows in a minibatch, as a part of all rows: the cost of a step in passes."""
        plates = self.view.plates
        return max((plate.subsample_size / plate.size for plate in plates), default=1.0)

    def program(
        self, function: Callable, inputs: Any = EVERYWHERE, outputs: Any = EVERYWHERE
    ) -> tuple[Callable, list[Array], Any]:
        """
        ``function(problem, *arguments)`` under ``jit``, with the data as arguments of the
        program and not as constants in it; on all devices that the data are spread over.

        :param inputs: how each of the arguments lies on these devices.
        :param outputs: how the result does.
        :return: the program, of the data and the arguments; the data; and what else the problem
            is made of, which tells problems that differ in their data alone from others.
        """
        leaves, tree = jax.tree.flatten((self.args, self.kwargs))
        is_data = [isinstance(leaf, jax.Array) for leaf in leaves]
        data = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        others = tuple(None if isinstance(leaf, jax.Array) else leaf for leaf in leaves)
        empty = self._replace(args=(), kwargs={})

        def run(data: list[Array], *arguments: Any) -> Any:
            remaining = iter(data)
            merged = [
                next(remaining) if data_here else leaf
                for leaf, data_here in zip(others, is_data, strict=True)
            ]
            args, kwargs = jax.tree.unflatten(tree, merged)
            return function(empty._replace(args=args, kwargs=kwargs), *arguments)

        if (shards := self.shards) is None:
            return compiled_quickly(run), data, (tree, others)
        specs = shards.of_leaves(is_data)

        def everywhere(data: list[Array], *arguments: Any) -> Any:
            each = inputs if isinstance(inputs, list) else [inputs] * len(arguments)
            return shards.on_each(run, (specs, *each), outputs)(data, *arguments)

        return compiled_quickly(everywhere), data, (tree, others, shards)

    def compiled(self, function: Callable) -> Callable:
        """The :meth:`program` of a function, of its arguments besides the problem."""
        program, data, _ = self.program(function)
        return partial(program, data)


def compiled_quickly(function: Callable) -> Callable:
    """
    A function under ``jit``, for programs that run for less time than it takes to compile them.
    """
    # options are for programs of their own, and not for a part of another
    inner, outer = jax.jit(function), jax.jit(function, compiler_options=_quick_compilation())

    def called(*arguments: Any) -> Any:
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))
        return (inner if traced else outer)(*arguments)

    return called


@cache
def _quick_compilation() -> dict[str, Any]:
    """
    Options of XLA that shorten compilation by a half, without those that this version does not
    know.
    """
    options = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}
    if jax.default_backend() != "cpu":
        return {}

    def is_known(option: dict[str, Any]) -> bool:
        try:
            jax.jit(lambda x: x, compiler_options=option).lower(0.0).compile()
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: value for name, value in options.items() if is_known({name: value})}
