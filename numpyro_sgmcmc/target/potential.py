# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The minibatch potential as a sampler sees it: a function of the coordinates of a metric, with
or without a control variate, on the rows of a minibatch or, in chunks, on all data.
"""

from collections.abc import Callable, Sequence
from itertools import product
import math
from typing import Any, NamedTuple, Protocol

import jax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_sgmcmc.target.metric import Metric
from numpyro_sgmcmc.target.model import Indices, MinibatchModel, Plate, Values

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
        >>> from numpyro_sgmcmc.target.potential import ravel
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
        both = jax.value_and_grad(self.view.potential)
        return both(values, rows, rng_key, self.args, self.kwargs)

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
        >>> from numpyro_sgmcmc.target.metric import IdentityMetric
        >>> from numpyro_sgmcmc.target.model import read_model
        >>> from numpyro_sgmcmc.target.target import Target

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = jnp.arange(1_000.0) / 1_000
        >>> target = Target(read_model(model, init_to_uniform, (y,), {}), (y,), {})
        >>> anchor = target.anchor({"mu": jnp.array(0.0)})  # a pass over the data
        >>> plain = target.potential(IdentityMetric())
        >>> controlled = target.potential(IdentityMetric(), anchor)
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
        >>> from numpyro_sgmcmc.target.model import Plate
        >>> from numpyro_sgmcmc.target.potential import over_all_data

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
