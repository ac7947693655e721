# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Minibatch potentials for samplers, as functions of the coordinates of a metric.

They may have a control variate, and are evaluated on the rows of a minibatch or, in chunks, on all
data.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
import math
from typing import Any, NamedTuple, Protocol

import jax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_sgmcmc.data.drawn_rows import DrawnRows, counted_rows, drawn_rows
from numpyro_sgmcmc.data.rows import Rows as Kind
from numpyro_sgmcmc.posterior.coordinates import Centring, centred
from numpyro_sgmcmc.posterior.handlers import Indices, Plate
from numpyro_sgmcmc.posterior.hierarchy import hierarchy_of
from numpyro_sgmcmc.posterior.metric import Metric
from numpyro_sgmcmc.posterior.model import MinibatchModel, Values
from numpyro_sgmcmc.posterior.reparam import Written, from_internal

#: Largest number of likelihood evaluations in a chunk of a pass over all data, and its smallest
#: number of rows.
_CHUNK, _FEWEST = 16_384, 64

#: Number of chunks of groups above which they are larger, since each adds up a whole gradient.
_MOST_CHUNKS = 512

#: Number of columns of a Hessian that are computed at once.
_COLUMNS = 32

#: Size of a vector above which concatenation goes by copies: below it, the memory around the vector
#: exists.
_COPIES_ABOVE = 1_024

Rows = Indices


def ravel(values: Any) -> Array:
    """
    Return a tree of arrays as one flat vector.

    The order is the one of :func:`jax.flatten_util.ravel_pytree`.

    XLA turns the concatenation of large arrays with small ones into a loop of masked loads over the
    whole vector, also beyond the ends of the small ones. On AMD processors a masked load from a
    place without memory takes hundreds of cycles: a step of a network took 3.5 times as long, in
    some runs and not in others. Copies to places that XLA does not know at compilation stay copies.

    :param values: a tree of arrays.
    :return: shape ``(d,)``.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.posterior.potential import ravel
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
    Interface of a minibatch potential, a function of values, rows and random key.

    The values may be any tree of arrays: a gradient with respect to a tree is faster than one
    through the slices of a flat vector.
    """

    def values(self, position: Array, /) -> Any:
        """Return the values at a position, which is one flat vector."""

    def direction(self, vector: Array, /) -> Any:
        """Return the derivative of the values in the direction of a vector."""

    def pullback(self, gradient: Any, /) -> Array:
        """Return the gradient in the position from the gradient in the values."""

    def __call__(self, values: Any, rows: Rows, rng_key: Array, /) -> Array:
        """Return the minibatch potential, a scalar."""

    def value_and_gradient(self, values: Any, rows: Rows, rng_key: Array, /) -> tuple[Array, Any]:
        """Return the minibatch potential, and its gradient as a tree like the values."""

    def with_row_terms(
        self, values: Any, rows: Rows, rng_key: Array, /
    ) -> tuple[Array, dict[str, Array]]:
        """Return the minibatch potential, and the log density of each row by plate, ``(n,)``."""

    @property
    def group_plates(self) -> frozenset[str]:
        """The plates of groups, to which the potential adds a term each."""

    def of_groups(self, name: str | None, /) -> "Potential":
        """Return the potential with the groups of one plate only, or of none."""


class ModelPotential(NamedTuple):
    """Minibatch potential of a model, as a function of the coordinates of a metric."""

    model: MinibatchModel
    unravel: Callable[[Array], Values]
    metric: Metric
    args: tuple
    kwargs: dict
    #: coordinates of hierarchies by site, between centred and non-centred
    centring: Centring = {}
    #: rows by plate; rows of a plate without an entry count once each
    kinds: Mapping[str, Kind] = {}

    def values(self, position: Array, /) -> Values:
        return self.unravel(self.metric.values(position))

    def direction(self, vector: Array, /) -> Values:
        return self.unravel(self.metric.direction(vector))

    def pullback(self, gradient: Values, /) -> Array:
        return self.metric.pullback(ravel(gradient))

    def __call__(self, values: Values, rows: Rows, rng_key: Array, /) -> Array:
        return self.with_effects(values, rows, rng_key)[0]

    @property
    def group_plates(self) -> frozenset[str]:
        return frozenset(plate.name for plate in self.model.local_plates)

    def of_groups(self, name: str | None, /) -> "ModelPotential":
        return self._replace(model=self.model.of_groups(name))

    @property
    def centred(self) -> "ModelPotential":
        """The potential as a function of effects."""
        return self._replace(centring=centred(self.centring))

    def with_effects(self, values: Values, rows: Rows, rng_key: Array, /) -> tuple[Array, Values]:
        """Return the potential, and the effects at the values."""
        rows = counted(self.kinds, rows)
        data = rows, rng_key, self.args, self.kwargs
        if not self.centring:
            return self.model.potential(values, *data), values
        written = self._written(values, rows, rng_key)
        return self.model.potential(written.values, *data) - written.log_det, written.effects

    def effects(self, values: Values, rows: Rows, rng_key: Array, /) -> Values:
        """Return the effects at the values."""
        return self._written(values, rows, rng_key).effects if self.centring else values

    def value_and_gradient(
        self, values: Values, rows: Rows, rng_key: Array, /
    ) -> tuple[Array, Values]:
        energy, _, pullback = self.with_pullback(values, rows, rng_key)
        return energy, pullback(None)

    def with_pullback(
        self, values: Values, rows: Rows, rng_key: Array, /
    ) -> tuple[Array, Values, Callable[[Values | None], Values]]:
        """
        Return the potential, the effects, and the pullback to the gradient of the potential.

        The pullback takes the gradient in the effects of a function that is added to the potential,
        or None. The derivatives of the coordinates are computed once for all blocks of rows.
        """
        rows = counted(self.kinds, rows)
        data = rows, rng_key, self.args, self.kwargs
        if not self.centring:
            energy, slope = jax.value_and_grad(self.model.potential)(values, *data)
            added = partial(jax.tree.map, jnp.add, slope)
            return energy, values, lambda more: slope if more is None else added(more)
        hierarchy = hierarchy_of(self.model, values, *data)

        def written(values: Values) -> Written:
            return from_internal(hierarchy, self.centring, values, for_gradients=True)

        def moved(values: Values) -> tuple[Values, Values]:
            return written(values)[::2]

        (model_values, effects), by_values = jax.vjp(moved, values)
        log_det, widening = jax.value_and_grad(lambda x: written(x).log_det)(values)
        energy, slope = jax.value_and_grad(self.model.potential)(model_values, *data)

        def gradient(more: Values | None) -> Values:
            none = jax.tree.map(jnp.zeros_like, effects)
            (pulled,) = by_values((slope, none if more is None else more))
            return jax.tree.map(jnp.subtract, pulled, widening)

        return energy - log_det, effects, gradient

    def with_row_terms(
        self, values: Values, rows: Rows, rng_key: Array, /
    ) -> tuple[Array, dict[str, Array]]:
        rows = counted(self.kinds, rows)
        data = rows, rng_key, self.args, self.kwargs
        if not self.centring:
            return self.model.potential_and_row_terms(values, *data)
        written = self._written(values, rows, rng_key)
        energy, terms = self.model.potential_and_row_terms(written.values, *data)
        return energy - written.log_det, terms

    def _written(self, values: Values, rows: Rows, rng_key: Array) -> Written:
        hierarchy = hierarchy_of(self.model, values, rows, rng_key, self.args, self.kwargs)
        return from_internal(hierarchy, self.centring, values)


def counted(kinds: Mapping[str, Kind], rows: Rows) -> dict[str, DrawnRows]:
    """Return rows with the weights of their plate, unless they have weights or all are 1."""
    result = {name: drawn_rows(x) for name, x in rows.items()}
    for name, x in result.items():
        if name in kinds and x.weights is None:
            result[name] = x._replace(weights=kinds[name].counts(x.numbers))
    return result


def over_all_data(function: Callable[[Rows], Any], plates: Sequence[Plate]) -> Any:
    """
    Return the mean of a function of rows over a partition of all rows into chunks.

    With chunks :math:`S_k` of :math:`n_k` rows, or all pairs of chunks of several plates, it is

    .. math:: \\bar f = \\sum_k \\frac{n_k}{N} f(S_k) .

    For the minibatch potential, and for its linear functions, this is the value on all data. Groups
    with latent variables interact with no row of another plate. Chunks of several plates of groups
    are therefore taken together, the first with the first, and not in all pairs.

    :param function: function of any number of rows of each plate that returns a tree of arrays.
    :param plates: the subsampled plates.
    :return: a tree with the structure of the function's result.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.posterior.handlers import Plate
        >>> from numpyro_sgmcmc.posterior.potential import over_all_data

        >>> y = jnp.arange(5.0)
        >>> plate = Plate("rows", size=5, subsample_size=2)
        >>> float(over_all_data(lambda rows: y[rows["rows"].numbers].mean(), [plate]))
        2.0
    """
    total = None
    groups = [plate for plate in plates if plate.is_group]
    together = groups if len(groups) > 1 else []
    axes = [_chunks(plate) for plate in plates if plate not in together]
    axes += [[_joint_chunks(together)]] if together else []
    # each plate has a part of whole chunks, and a rest
    for parts in product(*axes):
        count = math.prod(part.number for part in parts)
        weight = math.prod(part.weight for part in parts)

        @jax.jit  # traced once, for shapes and for the loop
        def weighted(k: Array, parts: Any = parts, weight: float = weight) -> Any:
            rows: dict[str, DrawnRows] = {}
            for part in parts:
                k, chunk = k // part.number, k % part.number
                rows |= part.rows(chunk)
            return jax.tree.map(lambda x: weight * x, function(rows))

        def added(total: Any, k: Array, weighted: Any = weighted) -> Any:
            return jax.tree.map(jnp.add, total, weighted(k)), None

        if total is None:
            shapes = jax.eval_shape(weighted, jax.ShapeDtypeStruct((), jnp.int32))
            total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = lax.scan(added, total, jnp.arange(count))
    return total


class _Chunks(NamedTuple):
    """
    Chunks of equal size, of one plate or of several.

    - **number** - number of chunks.
    - **weight** - weight of a chunk in the mean.
    - **rows** - function from the number of a chunk to its rows by plate.
    """

    number: int
    weight: float
    rows: Callable[[Array], dict[str, DrawnRows]]


def _chunks(plate: Plate) -> list[_Chunks]:
    """Return the whole chunks of a plate, and the rest."""
    found = []
    for start, count, length, apart in _parts(plate):

        def rows(k: Array, at: Any = (apart, start, length)) -> dict[str, DrawnRows]:
            return {plate.name: counted_rows(plate.size, k, *at)}

        found.append(_Chunks(count, length / rows_in(plate), rows))
    return found


def _joint_chunks(plates: Sequence[Plate]) -> _Chunks:
    """
    Return chunks with rows of all plates, as many as the plate with the most chunks needs.

    The last chunk of a plate is filled up with rows of weight 0.
    """
    count = max(sum(part[1] for part in _parts(plate)) for plate in plates)

    def rows(k: Array) -> dict[str, DrawnRows]:
        found = {}
        for plate in plates:
            seen = min(plate.seen or plate.size, plate.size)
            length = -(-seen // count)
            if seen < plate.size:
                apart = (plate.size - length) // max(1, count - 1)
                found[plate.name] = DrawnRows(k * apart + jnp.arange(length))
                continue
            numbers = k * length + jnp.arange(length)
            weights = jnp.where(numbers < plate.size, count * length / plate.size, 0.0)
            found[plate.name] = DrawnRows(jnp.minimum(numbers, plate.size - 1), weights=weights)
        return found

    return _Chunks(count, 1 / count, rows)


def rows_in(plate: Plate) -> int:
    """Return the number of rows in a pass."""
    return sum(count * length for _, count, length, _ in _parts(plate))


def full_data_gradient(
    potential: Potential, plates: Sequence[Plate], values: Any, rng_key: Array
) -> tuple[Array, Any]:
    """
    Return the potential of all data and its gradient, by one pass over the data in chunks.

    :param potential: the minibatch potential, of any number of rows.
    :param plates: the subsampled plates.
    :param values: values of the latent sites.
    :param rng_key: key for a potential that is itself random.
    :return: a scalar, and a tree like ``values``.
    """
    return over_all_data(lambda rows: jax.value_and_grad(potential)(values, rows, rng_key), plates)


def full_data_expansion(
    potential: Potential, plates: Sequence[Plate], values: Any, rng_key: Array
) -> tuple[Array, Any, Array]:
    """
    Return the potential of all data, its gradient and its Hessian, by one pass over the data.

    The Hessian is computed column by column. Parameters are as in :func:`full_data_gradient`.

    :return: a scalar, a tree like ``values``, and a matrix, shape ``(d, d)``, in the order of
        :func:`ravel`.
    """

    def of_chunk(rows: Rows) -> tuple[Array, Any, Array]:
        value, slope = jax.value_and_grad(potential)(values, rows, rng_key)
        return value, slope, hessian_of(potential, values, rows, rng_key)

    return over_all_data(of_chunk, plates)


def hessian_of(potential: Potential, values: Any, rows: Rows, rng_key: Array) -> Array:
    """Return the Hessian of the potential of some rows, column by column, shape ``(d, d)``."""
    flat, unravel = ravel_pytree(values)

    def slope(x: Array) -> Array:
        return ravel(jax.grad(potential)(unravel(x), rows, rng_key))

    _, product = jax.linearize(slope, flat)
    columns = jnp.eye(flat.shape[0], dtype=flat.dtype)
    hessian = lax.map(product, columns, batch_size=_COLUMNS)
    return (hessian + hessian.T) / 2


def of_all_rows(function: Callable[[Array], Any], plate: Plate) -> Any:
    """
    Return the values of a function for each row, by one pass over all rows in chunks.

    :param function: function of row numbers, shape (n,), that returns a tree of arrays with n
        entries each.
    :param plate: the plate.
    :return: a tree with the structure of the function's result, with N entries each.
    """
    parts = []
    for start, count, length, _ in _parts(plate._replace(seen=None)):

        def chunk(first: Array, length: int = length) -> Any:
            return function(first + jnp.arange(length))

        values = lax.map(chunk, start + length * jnp.arange(count))
        parts.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), values))
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _parts(plate: Plate) -> list[tuple[int, int, int, int]]:
    """
    Return the layout of the whole chunks of a plate and of the rest.

    A layout has the first row, the number of chunks, the rows of each, and the distance of chunks.
    """
    size, evaluations = plate.size, plate.points
    if plate.is_group:  # of many values each, which fall out of the cache in larger chunks
        evaluations *= plate.members
    fewest = max(_FEWEST, size // _MOST_CHUNKS if plate.is_group else 0)
    count = -(-size // min(_CHUNK, max(fewest, _CHUNK // evaluations)))
    # chunks without a rest are preferred: a rest of another length needs one more program
    count = next((k for k in range(count, 2 * count) if size % k == 0), count)
    length = size // count
    whole = size // length
    if plate.seen is not None and plate.seen < size:
        length = min(length, max(_FEWEST, plate.seen // 8))
        whole = size // length
        some = max(1, min(whole, plate.seen // length))
        return [(0, some, length, (size - length) // max(1, some - 1))]
    parts = [(0, whole, length, length)]
    done = whole * length
    return parts if done == size else [*parts, (done, 1, size - done, size - done)]
