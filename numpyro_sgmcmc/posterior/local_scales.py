# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Local scales of a model: sites whose entries are a scale of one effect each, and nothing else."""

from contextlib import suppress
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import Literal
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro.distributions import biject_to

from numpyro_sgmcmc.posterior.handlers import without_wrappers
from numpyro_sgmcmc.posterior.scale_mixture import POINTS

#: Logarithms of a scale among which its distribution is found, and a log density that is none.
_WIDE, _FAR = np.arange(-25.0, 25.1, 0.5), 1e30

#: Differences to the largest log density, beyond which there are no points.
_LOWER, _UPPER = 8.5, 13.5


class LocalScale(NamedTuple):
    """
    Local scale of a site.

    - **name** - the site of the scale.
    - **points**, **log_weights** - variables of the program: logarithms of the scale at equal
      distances, and their log density, both of the shape ``(K, ...)``.
    """

    name: str
    points: Any
    log_weights: Any

    @property
    def variables(self) -> list[Any]:
        return [self.points, self.log_weights]


def law_of_scale(fn: Any, value: Array) -> tuple[Array, Array] | None:
    """
    Return logarithms of a site of positive values, and their log density, or None.

    They reach as far as all but :math:`10^{-4}` of the probability in the lower tail, where scales
    do not matter, and :math:`10^{-6}` in the upper one.

    :param fn: distribution of the site.
    :param value: unconstrained value of the site.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp, numpyro.distributions as dist
        >>> from numpyro_sgmcmc.posterior.local_scales import law_of_scale
        >>> points, log_weights = law_of_scale(dist.HalfCauchy(1.0).expand([3]), jnp.zeros(3))
        >>> points[0].tolist(), points[-1].tolist(), log_weights.shape
        ([-9.0, -9.0, -9.0], [14.0, 14.0, 14.0], (225, 3))
        >>> law_of_scale(dist.Normal(0.0, 1.0), jnp.zeros(())) is None
        True
    """
    inner = without_wrappers(fn)
    if not value.ndim or inner.event_dim or _is_masked(fn) or not _is_logarithm(inner.support):
        return None

    def log_density(logarithms: Array) -> Array:
        found = inner.log_prob(jnp.exp(logarithms)) + logarithms
        return jnp.where(jnp.isfinite(found), found, -_FAR)

    column = (-1,) + (1,) * value.ndim
    wide = jnp.asarray(_WIDE, value.dtype).reshape(column)
    density = log_density(wide)
    center = jnp.sum(wide * jax.nn.softmax(density, axis=0), axis=0)
    drop = jnp.max(density, axis=0) - density
    # whole numbers, so that the points move with the law and do not jump
    low = jnp.round(jnp.min(jnp.where(drop < _LOWER, wide, _FAR), axis=0) - center)
    high = jnp.round(jnp.max(jnp.where(drop < _UPPER, wide, -_FAR), axis=0) - center)
    shares = jnp.linspace(0.0, 1.0, POINTS, dtype=value.dtype).reshape(column)
    points = center + low + (high - low) * shares
    shape = POINTS, *value.shape
    return jnp.broadcast_to(points, shape), jnp.broadcast_to(log_density(points), shape)


def _is_logarithm(support: Any) -> bool:
    """Return True if the unconstrained value is the logarithm of the value."""
    # a bound that is traced has an error of its own
    with suppress(NotImplementedError, TypeError), jax.ensure_compile_time_eval():
        found = np.asarray(biject_to(support)(np.array([0.0, 1.0], np.float32)))
        return bool(np.allclose(found, [1.0, np.e]))
    return False


def _is_masked(fn: Any) -> bool:
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return isinstance(fn, dist.MaskedDistribution)


def reached_by(program: Any, variable: Any, but: Any) -> set[Any]:
    """
    Return the variables of a program that depend on an argument.

    :param variable: the argument.
    :param but: variables that are taken not to depend on it.
    """
    reached = {variable}
    for equation in program.eqns:
        if any(not isinstance(x, Literal) and x in reached for x in equation.invars):
            reached.update(x for x in equation.outvars if x not in but)
    return reached
