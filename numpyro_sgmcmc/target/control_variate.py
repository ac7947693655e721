# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A minibatch potential whose gradient has less noise, by what all data say at a point."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgmcmc.target.potential import Potential, Rows


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
