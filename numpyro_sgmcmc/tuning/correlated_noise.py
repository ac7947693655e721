# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Errors of draws from noise whose correlations between parameters are not estimated.

The noise of a minibatch has a covariance :math:`V`. Of many parameters the estimate
:math:`\\hat V` shows the variances, and few directions at most. One row kicks the effects of all of
its factors together, so that their noise is correlated. A step of size :math:`h` with friction
:math:`A` then adds, in coordinates of curvature 1,

.. math:: \\Delta = \\frac{h}{2 A} \\, (V - \\operatorname{diag} V)

to the covariance of the draws, to first order in :math:`h`. Effects become too narrow, in the mean
by :math:`\\tfrac1d \\operatorname{tr}(\\nabla^2 U \\, \\Delta)` of their variance, since the draws
of effects of the same rows are positively correlated. The scale of :math:`m` effects adds up
:math:`m` such errors, and moves by the mean change of its gradient. Both are differences of
gradients of all rows: with noise :math:`g \\sim V` of minibatches, :math:`s^2 = h / (2 A)` and the
same noise :math:`\\bar g = \\epsilon \\odot g` with random signs, whose covariance is diagonal,

.. math::

    b &= \\tfrac12 \\mathrm{E} \\big[ \\nabla U(x + s g) + \\nabla U(x - s g)
        - \\nabla U(x + s \\bar g) - \\nabla U(x - s \\bar g) \\big] , \\\\
    n &= \\tfrac{s}{2 d} \\mathrm{E} \\big[ g^\\top (\\nabla U(x + s g) - \\nabla U(x - s g))
        - \\bar g^\\top (\\nabla U(x + s \\bar g) - \\nabla U(x - s \\bar g)) \\big] .

The signs cancel the random errors of all that does not depend on the correlations.

NOGIN takes gradients where positions are wider than the draws by :math:`h^2 / 4`. The scale of many
effects adds this up too, and a coordinate moves by :math:`\\tfrac{h^2}{4} w`. With draws :math:`x`
about the centre

.. math:: w = \\mathrm{E} \\left[ \\frac{\\nabla U(\\sqrt{1 + \\delta} x)
    + \\nabla U(-\\sqrt{1 + \\delta} x) - \\nabla U(x) - \\nabla U(-x)}{2 \\delta} \\right] .
"""

import math
from typing import Any

from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.gradients.estimators import minibatch_gradient
from numpyro_sgmcmc.posterior.control_variate import GRADIENTS_OF_A_STEP, order_of
from numpyro_sgmcmc.posterior.potential import Rows, over_all_data
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.noise_level import ACCEPTED_BIAS, ACCEPTED_SHIFT
from numpyro_sgmcmc.tuning.tuning import Tuning

_DRAWS = 3  #: draws of the noise
_MINIBATCHES = 8  #: minibatches whose noise is added up in a draw; the kick of one may be large
_SURE = 2.0  #: standard errors that a shift must exceed; a single large one of three does not
_WIDER = 0.25  #: relative change of variances that shows w
_SHORTER = 0.1  #: factor of the kicks' variance if gradients are not finite
_LITTLE = 0.005  #: product of the noise and h / A below which correlations do not matter


def error_of_correlations(
    target: Target, rng_key: Array, tuning: Tuning
) -> tuple[float, float, float]:
    """
    Estimate two errors of the draws: from correlations of the noise between coordinates, and from
    gradients at wider positions.

    It is an upper bound where the estimate of the noise shows some directions, and where the
    friction for the noise is large.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param tuning: the tuning before its pilot, with a friction :math:`A`.
    :return: :math:`1 / r`, with the largest ratio :math:`r = h / A` at which no coordinate of the
        metric moves by more than 0.1, and variances fall by less than 2 % in the mean; the largest
        :math:`|w|`; and the cost in passes over the data. The former two are 0 if there is little
        noise, or if gradients are not finite.

    **Example:** rows of two columns kick both weights together, and rows of one column do not.

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import init_to_uniform
        >>> from numpyro_sgmcmc.posterior.metric import DiagonalMetric
        >>> from numpyro_sgmcmc.posterior.model import read_model
        >>> from numpyro_sgmcmc.posterior.target import Target
        >>> from numpyro_sgmcmc.tuning.correlated_noise import error_of_correlations
        >>> from numpyro_sgmcmc.tuning.noise_level import NoiseLevel
        >>> from numpyro_sgmcmc.tuning.tuning import Tuning

        >>> def model(x, y):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     with numpyro.plate("rows", len(y), subsample_size=10) as i:
        ...         numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

        >>> def error(x):
        ...     data = x, jax.random.normal(jax.random.key(0), (len(x),))
        ...     target = Target(read_model(model, init_to_uniform, data, {}), data, {})
        ...     metric = DiagonalMetric(jnp.zeros(2), jnp.full(2, len(x) ** -0.5))
        ...     tuning = Tuning(0.1, 1.0, metric, metric, noise=NoiseLevel(10.0, 10.0, 1.0, 0.0))
        ...     return error_of_correlations(target, jax.random.key(1), tuning)[0]

        >>> error(jnp.ones((500, 2))) > 100 * error(jnp.tile(jnp.eye(2), (250, 1)))
        True
    """
    noise, friction = tuning.noise, tuning.friction
    assert noise is not None and friction is not None and tuning.start is not None
    ratio = tuning.step_size / friction
    if ratio * noise.mean < _LITTLE:
        return 0.0, 0.0, 0.0
    program, passes = target.compiled(_changes, "correlated noise"), 0.0
    minibatches = _MINIBATCHES * GRADIENTS_OF_A_STEP[order_of(tuning.anchor)]
    for part in (1.0, _SHORTER):
        root = jnp.asarray(math.sqrt(part * ratio / 2), tuning.start.center.dtype)
        found = program(rng_key, root, tuning.metric, tuning.start, tuning.anchor)
        passes += _DRAWS * (8 + minibatches * target.minibatch_share)
        shifts, narrowings, wider = (np.asarray(x, np.float64) for x in found)
        if np.all(np.isfinite(shifts)) and np.all(np.isfinite(narrowings)):
            shift = _largest(shifts) / ACCEPTED_SHIFT
            worst = max(shift, narrowings.mean() / ACCEPTED_BIAS, 0.0) / part
            is_known = np.all(np.isfinite(wider))
            return float(worst / ratio), max(_largest(wider), 0.0) if is_known else 0.0, passes
    return 0.0, 0.0, passes


def _largest(shifts: np.ndarray) -> float:
    """The largest shift of a coordinate, less what may be chance."""
    error = shifts.std(axis=0, ddof=1) / math.sqrt(len(shifts))
    # of three draws the error itself is not known well
    error = np.maximum(error, np.median(error))
    return float(np.max(np.abs(shifts.mean(axis=0)) - _SURE * error))


def _changes(
    target: Target, rng_key: Array, root: Array, metric: Any, draws: Any, anchor: Any
) -> tuple[Array, Array, Array]:
    """The shifts b of all coordinates, the narrowing n, and the shifts w, from each draw."""
    sketch = target._replace(model=target.model.sketch)
    potential, whole = target.potential(metric, anchor), sketch.potential(metric)

    def slope(x: Array) -> Array:
        def seen(rows: Rows) -> Array:
            return minibatch_gradient(whole, rows, target.own(rng_key))(x).gradient

        return target.mean(over_all_data(seen, sketch.model.plates))

    def noise(x: Array, key: Array) -> Array:
        def gradient(key: Array) -> Array:
            rows_key, model_key = random.split(key)
            oracle = minibatch_gradient(potential, target.rows(rows_key), target.own(model_key))
            return target.mean(oracle(x).gradient)

        # as many of each sign, so that the gradient itself cancels
        signs = jnp.where(jnp.arange(_MINIBATCHES) % 2, 1.0, -1.0).astype(x.dtype)
        gradients = lax.map(gradient, random.split(key, _MINIBATCHES))
        return root / math.sqrt(_MINIBATCHES) * signs @ gradients

    def changes(key: Array) -> tuple[Array, Array, Array]:
        draw_key, noise_key, sign_key = random.split(key, 3)
        normal = random.normal(draw_key, draws.center.shape, draws.center.dtype)
        x = metric.coordinates(draws.values(normal))
        away = noise(x, noise_key)
        signed = away * random.rademacher(sign_key, away.shape, away.dtype)
        wide = (1 + _WIDER) ** 0.5
        ends = jnp.stack([wide * normal, -wide * normal, normal, -normal])
        ends = lax.map(lambda z: metric.coordinates(draws.values(z)), ends)
        kicked = x + jnp.stack([away, -away, signed, -signed])
        slopes = lax.map(slope, jnp.concatenate([kicked, ends]))
        along = away @ (slopes[0] - slopes[1]) - signed @ (slopes[2] - slopes[3])
        shift = (slopes[0] + slopes[1] - slopes[2] - slopes[3]) / 2
        wider = (slopes[4] + slopes[5] - slopes[6] - slopes[7]) / (2 * _WIDER)
        return shift, along / (2 * len(away)), wider

    return lax.map(changes, random.split(rng_key, _DRAWS))
