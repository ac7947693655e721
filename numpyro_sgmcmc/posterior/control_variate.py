# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Control variates: minibatch potentials with less noise, by an expansion of all data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_sgmcmc.posterior.potential import ModelPotential, Rows, ravel

#: Words for gradients by the order of the replaced expansion, and the cost of a step with each in
#: gradients of its minibatch: a product with the Hessian counts as two.
GRADIENTS = ("minibatch", "control_variate", "second_order_control_variate")
GRADIENTS_OF_A_STEP = (1, 2, 4)


class Anchor(NamedTuple):
    """
    Anchor of a :class:`ControlVariate`: a point at which the potential of all data is known.

    - **values** - unconstrained values :math:`\\hat\\theta` of the latent sites. Hierarchies have
      effects here (:mod:`~numpyro_sgmcmc.posterior.reparam`) in any coordinates of the sampler.
    - **potential** - :math:`U(\\hat\\theta)`, a scalar.
    - **gradient** - :math:`\\nabla U(\\hat\\theta)`, a tree like ``values``.
    - **hessian** - :math:`\\nabla^2 U(\\hat\\theta)`, shape ``(d, d)`` in the order of
      :func:`jax.flatten_util.ravel_pytree`; None for an expansion to first order.
    - **reach** - :math:`R`, the distance from the metric's centre up to which the whole control
      variate is used, in its coordinates; None for all of them.
    """

    values: Any
    potential: Array
    gradient: Any
    hessian: Array | None = None
    reach: Array | None = None


def order_of(anchor: Anchor | None) -> int:
    """Return the order of the expansion that is replaced in a minibatch: 0, 1 or 2."""
    if anchor is None:
        return 0
    return 1 if anchor.hessian is None else 2


class ControlVariate(NamedTuple):
    """
    Minibatch potential with less noise, by an expansion around an anchor.

    The minibatch's expansion around the anchor :math:`\\hat\\theta`, to first or second order, is
    replaced by the expansion of all data,

    .. math::

        \\tilde U_{cv}(\\theta; S) &= \\tilde U(\\theta; S) - \\tilde T(\\theta; S)
            + T(\\theta), \\\\
        T(\\theta) &= U(\\hat\\theta) + \\nabla U(\\hat\\theta)^\\top \\delta
            + \\left[ \\tfrac12 \\delta^\\top \\nabla^2 U(\\hat\\theta) \\, \\delta \\right],
            \\qquad \\delta = \\theta - \\hat\\theta,

    with :math:`\\tilde T` the expansion of the minibatch, and the term in brackets if the anchor
    has a Hessian. Its gradient is the control variate estimate
    :math:`\\nabla U(\\hat\\theta) + \\nabla \\tilde U(\\theta; S) - \\nabla \\tilde
    U(\\hat\\theta; S)` of Baker et al. (2019), with the Hessian

    .. math::

        \\nabla \\tilde U(\\theta; S)
            - \\left[ \\nabla \\tilde U(\\hat\\theta; S)
                + \\nabla^2 \\tilde U(\\hat\\theta; S) \\, \\delta \\right]
            + \\nabla U(\\hat\\theta) + \\nabla^2 U(\\hat\\theta) \\, \\delta ,

    the expansion of Bierkens, Fearnhead and Roberts (2019) and Quiroz et al. (2019). It is unbiased
    for any anchor. The standard deviation of its noise is in proportion to
    :math:`\\| \\delta \\|`, or to :math:`\\| \\delta \\|^2` with the Hessian. There is no noise at
    all if the log-likelihood is quadratic with one Hessian for all rows, or, with the Hessian, if
    it is quadratic.

    The log-likelihood of a hierarchy depends on the effects, and bends much less in effects than in
    coordinates that scale them. The expansion is therefore in effects, and its gradient is pulled
    back to the coordinates of the sampler.

    Far from the anchor an expansion says nothing of a row, and its noise drives chains further out.
    The logarithm of a scale, whose likelihood is flat towards zero, went twenty standard deviations
    away. With coordinates :math:`x` of a metric, a step therefore takes the part

    .. math:: a(\\theta) = \\min \\Big( 1, \\frac{R}{|x|} \\Big)^4, \\qquad
        \\nabla \\tilde U(\\theta; S) - a(\\theta) \\,
        \\nabla_\\theta [ \\tilde T(\\theta; S) - T(\\theta) ],

    of the control variate. The gradient is unbiased for any :math:`a`. The tuning finds the reach
    :math:`R`, beyond which plain minibatches soon have less noise
    (:func:`~numpyro_sgmcmc.tuning.noise_level.reach_of`).

    A step costs two gradients of its minibatch, or about four with the Hessian. The control variate
    is itself a potential, so that every estimator of gradient noise also estimates its noise.

    **References:**

    1. *Control variates for stochastic gradient MCMC*, Jack Baker, Paul Fearnhead,
       Emily B. Fox and Christopher Nemeth (2019).
    2. *The Zig-Zag Process and Super-Efficient Sampling for Bayesian Analysis of Big Data*,
       Joris Bierkens, Paul Fearnhead and Gareth Roberts (2019).
    3. *Speeding Up MCMC by Efficient Data Subsampling*, Matias Quiroz, Robert Kohn,
       Mattias Villani and Minh-Ngoc Tran (2019): its proxies by parameter expansion.

    **Example:** for a quadratic log likelihood any minibatch gives the gradient of all data.

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import init_to_uniform
        >>> from numpyro_sgmcmc.posterior.metric import IdentityMetric
        >>> from numpyro_sgmcmc.posterior.model import read_model
        >>> from numpyro_sgmcmc.posterior.target import Target

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

    base: ModelPotential
    anchor: Anchor

    def values(self, position: Array, /) -> Any:
        return self.base.values(position)

    def direction(self, vector: Array, /) -> Any:
        return self.base.direction(vector)

    def pullback(self, gradient: Any, /) -> Array:
        return self.base.pullback(gradient)

    def __call__(self, values: Any, rows: Rows, rng_key: Array, /) -> Array:
        energy, effects = self.base.with_effects(values, rows, rng_key)
        away = self._from_anchor(effects)
        at = self._expanded(lambda x: self.base.centred(x, rows, rng_key), away)
        return energy - self._part(values) * (at - self._known(away)[0])

    def value_and_gradient(self, values: Any, rows: Rows, rng_key: Array, /) -> tuple[Array, Any]:
        # differentiating the expansion would cost half a gradient more
        energy, effects, pullback = self.base.with_pullback(values, rows, rng_key)
        away = self._from_anchor(effects)

        def anchored(x: Any) -> tuple[Array, Any]:
            return self.base.centred.value_and_gradient(x, rows, rng_key)

        if self.anchor.hessian is None:
            at, slope = anchored(self.anchor.values)
            rise = _dot(slope, away)
        else:
            (at, slope), (rise, bend) = jax.jvp(anchored, (self.anchor.values,), (away,))
            slope = jax.tree.map(jnp.add, slope, bend)
            rise += _dot(bend, away) / 2
        known, known_slope = self._known(away)
        part = self._part(values)
        more = jax.tree.map(lambda k, s: part * (k - s), known_slope, slope)
        energy = energy - part * (at + rise - known)
        return energy, pullback(more)

    def with_row_terms(
        self, values: Any, rows: Rows, rng_key: Array, /
    ) -> tuple[Array, dict[str, Array]]:
        def both(x: Any) -> tuple[Array, dict[str, Array]]:
            return self.base.centred.with_row_terms(x, rows, rng_key)

        energy, terms = self.base.with_row_terms(values, rows, rng_key)
        away = self._from_anchor(self.base.effects(values, rows, rng_key))
        at, known, part = self._expanded(both, away), self._known(away)[0], self._part(values)
        terms = jax.tree.map(lambda t, a: t - part * a, terms, at[1])
        return energy - part * (at[0] - known), terms

    @property
    def group_plates(self) -> frozenset[str]:
        return self.base.group_plates

    def of_groups(self, name: str | None, /) -> "ControlVariate":
        return self._replace(base=self.base.of_groups(name))

    def _expanded(self, function: Callable[[Any], Any], away: Any) -> Any:
        """Return the expansion of a function around the anchor."""

        def slope(x: Any) -> tuple[Any, Any]:
            return jax.jvp(function, (x,), (away,))

        if self.anchor.hessian is None:
            return jax.tree.map(jnp.add, *slope(self.anchor.values))
        (at, rise), (_, bend) = jax.jvp(slope, (self.anchor.values,), (away,))
        return jax.tree.map(lambda a, r, b: a + r + b / 2, at, rise, bend)

    def _part(self, values: Any) -> Array | float:
        """Return the part :math:`a` of the control variate at some values."""
        if self.anchor.reach is None:
            return 1.0
        x = lax.stop_gradient(self.base.metric.coordinates(ravel(values)))
        reach = self.anchor.reach**2
        return (reach / jnp.maximum(jnp.sum(x**2), reach)) ** 2

    def _from_anchor(self, effects: Any) -> Any:
        return jax.tree.map(jnp.subtract, effects, self.anchor.values)

    def _known(self, away: Any) -> tuple[Array, Any]:
        """Return the expansion of all data, and its gradient."""
        slope, value = self.anchor.gradient, self.anchor.potential
        if self.anchor.hessian is not None:
            flat, unravel = ravel_pytree(away)
            bend = unravel(jnp.matmul(self.anchor.hessian, flat, precision="highest"))
            slope = jax.tree.map(jnp.add, slope, bend)
            value -= _dot(bend, away) / 2
        return value + _dot(slope, away), slope


def _dot(gradient: Any, away: Any) -> Array:
    """Return the inner product of a gradient and a displacement."""
    products = jax.tree.map(lambda g, x: jnp.sum(g * x), gradient, away)
    return jax.tree.reduce(jnp.add, products)
