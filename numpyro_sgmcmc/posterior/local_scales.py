# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Local scales of a model: sites whose entries are a scale of one effect each, and nothing else."""

from contextlib import suppress
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro.distributions import biject_to

from numpyro_sgmcmc.posterior.handlers import is_masked, without_wrappers
from numpyro_sgmcmc.posterior.scale_mixture import POINTS

#: Logarithms of a scale among which those with a density are found.
_WIDE_STEP = 0.05
_WIDE = np.arange(-25.0, 25.01, _WIDE_STEP)

#: Logarithm of the largest density minus that of the points farthest out.
_DROP = 13.5


class LocalScale(NamedTuple):
    """
    Local scale of a site.

    - **name** - the site of the scale, or None if the distribution of the effect is a mixture.
    - **points**, **log_weights** - variables of the program: logarithms of the scale at equal
      distances, and their log density, both of the shape ``(K, ...)``; or the logarithms of the
      scales of a mixture, and of their weights.
    """

    name: str | None
    points: Any
    log_weights: Any

    @property
    def variables(self) -> list[Any]:
        return [self.points, self.log_weights]


def law_of_scale(fn: Any, value: Array) -> tuple[Array, Array] | None:
    """
    Return logarithms of a site of positive values, and their log density, or None.

    They have all but about :math:`10^{-6}` of the probability on either side.

    :param fn: distribution of the site.
    :param value: unconstrained value of the site.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp, numpyro.distributions as dist
        >>> from numpyro_sgmcmc.posterior.local_scales import law_of_scale
        >>> points, log_weights = law_of_scale(dist.HalfCauchy(1.0).expand([3]), jnp.zeros(3))
        >>> print(f"{points[0, 0]:.1f} to {points[-1, 0]:.1f}, {log_weights.shape}")
        -14.2 to 14.2, (297, 3)
        >>> law_of_scale(dist.Normal(0.0, 1.0), jnp.zeros(())) is None
        True
    """
    inner = without_wrappers(fn)
    if not value.ndim or inner.event_dim or not _is_logarithm(inner.support):
        return None

    def log_density(logarithms: Array) -> Array:
        return inner.log_prob(jnp.exp(logarithms)) + logarithms

    column = (-1,) + (1,) * value.ndim
    wide = jnp.asarray(_WIDE, value.dtype).reshape(column)
    density = lax.stop_gradient(log_density(wide))
    density = jnp.where(jnp.isfinite(density), density, -jnp.inf)
    is_inside = density > jnp.max(density, axis=0) - _DROP
    low = jnp.min(jnp.where(is_inside, wide, jnp.inf), axis=0) - _WIDE_STEP
    high = jnp.max(jnp.where(is_inside, wide, -jnp.inf), axis=0) + _WIDE_STEP
    points = low + (high - low) * jnp.linspace(0.0, 1.0, POINTS, dtype=value.dtype).reshape(column)
    shape = POINTS, *value.shape
    return jnp.broadcast_to(points, shape), jnp.broadcast_to(log_density(points), shape)


def mixture_of_site(fn: Any, value: Array) -> tuple[Array, Array, Array] | None:
    """
    Return the location of a mixture of normal distributions around it, or None.

    It comes with the logarithms of scales and weights, of the shape ``(K, ...)``.

    :param fn: distribution of the site.
    :param value: unconstrained value of the site.

    **Example:** spike and slab.

    .. doctest::

        >>> import jax.numpy as jnp, numpyro.distributions as dist
        >>> from numpyro_sgmcmc.posterior.local_scales import mixture_of_site
        >>> parts = dist.Normal(0.0, jnp.array([0.01, 1.0]))
        >>> fn = dist.MixtureSameFamily(dist.Categorical(probs=jnp.array([0.9, 0.1])), parts)
        >>> location, log_scales, log_weights = mixture_of_site(fn.expand([3]), jnp.zeros(3))
        >>> location.shape, (100 * jnp.exp(log_scales[:, 0])).round().tolist()
        ((3,), [1.0, 100.0])
    """
    inner = without_wrappers(fn)
    if isinstance(inner, dist.MixtureGeneral):
        parts = inner.component_distributions
        if not all(type(part) is dist.Normal for part in parts):
            return None
        location, others = parts[0].loc, [part.loc for part in parts[1:]]
        scales = jnp.stack([jnp.broadcast_to(x.scale, x.batch_shape) for x in parts], -1)
    elif isinstance(inner, dist.MixtureSameFamily):
        parts = inner.component_distribution
        if type(parts) is not dist.Normal:
            return None
        location, scales = jnp.asarray(parts.loc)[..., 0], parts.scale
        others = [] if parts.loc.shape[-1] == 1 else [parts.loc]
        location = location if not others else parts.loc[..., :1]
    else:
        return None
    # locations that are traced may differ
    if not all(_are_equal(location, x) for x in others):
        return None
    number, logits = inner.mixture_size, inner.mixing_distribution.logits
    scales, logits = (
        jnp.moveaxis(jnp.broadcast_to(x, (*value.shape, number)), -1, 0) for x in (scales, logits)
    )
    return (
        jnp.broadcast_to(location, value.shape),
        jnp.log(scales),
        jax.nn.log_softmax(logits, axis=0),
    )


def _are_equal(one: Any, other: Any) -> bool:
    """Return True if arrays are known to be equal, with broadcasting."""
    if one is other:
        return True
    is_known = not any(isinstance(x, jax.core.Tracer) for x in (one, other))
    return is_known and bool(np.all(np.asarray(one) == np.asarray(other)))


def _is_logarithm(support: Any) -> bool:
    """Return True if the unconstrained value is the logarithm of the value."""
    # a bound that is traced has an error of its own
    with suppress(NotImplementedError, TypeError), jax.ensure_compile_time_eval():
        found = np.asarray(biject_to(support)(np.array([0.0, 1.0], np.float32)))
        return bool(np.allclose(found, [1.0, np.e]))
    return False


def is_plain(site: dict) -> bool:
    """Return True for a sample site that counts once and has no mask."""
    return site["type"] == "sample" and site["scale"] is None and not is_masked(site["fn"])
