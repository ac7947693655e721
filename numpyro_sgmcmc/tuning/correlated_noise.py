# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Errors of draws because noise is correlated between more parameters than its estimate shows.

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
from numpyro_sgmcmc.tuning.noise_level import ACCEPTED_BIAS
from numpyro_sgmcmc.tuning.tuning import Tuning

_DRAWS = 3  #: draws of the noise; the median of three is not that of a single rare row
_SHIFT = 0.1  #: acceptable shift of a coordinate, in posterior standard deviations


def error_of_correlations(target: Target, rng_key: Array, tuning: Tuning) -> tuple[float, float]:
    """
    Estimate the error that correlations of the noise between coordinates cause.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param tuning: the tuning before its pilot, with a friction :math:`A`.
    :return: the step size in units of :math:`A` at which a coordinate moves by 0.1 standard
        deviations, or variances fall by 2 %, as its inverse; and the cost in passes over the data.
    """
    assert tuning.friction is not None and tuning.start is not None
    unit = tuning.step_size / tuning.friction
    metric, anchor, draws, root = tuning.metric, tuning.anchor, tuning.start, math.sqrt(unit / 2)

    def run(target: Target, metric: Any, draws: Any, anchor: Any) -> tuple[Array, Array]:
        potential, whole = target.potential(metric, anchor), target.potential(metric)

        def slope(x: Array) -> Array:
            def seen(rows: Rows) -> Array:
                return minibatch_gradient(whole, rows, rng_key)(x).gradient

            return target.mean(over_all_data(seen, target.model.plates))

        def noise(x: Array, key: Array) -> Array:
            def gradient(key: Array) -> Array:
                rows_key, model_key = random.split(key)
                return minibatch_gradient(potential, target.rows(rows_key), model_key)(x).gradient

            one, other = lax.map(gradient, random.split(key))
            return root / math.sqrt(2) * (one - other)

        def changes(key: Array) -> tuple[Array, Array]:
            draw_key, noise_key, sign_key = random.split(key, 3)
            normal = random.normal(draw_key, draws.center.shape, draws.center.dtype)
            x = metric.coordinates(draws.values(normal))
            away = noise(x, noise_key)
            signed = away * random.rademacher(sign_key, away.shape, away.dtype)
            slopes = lax.map(slope, x + jnp.stack([away, -away, signed, -signed]))
            along = away @ (slopes[0] - slopes[1]) - signed @ (slopes[2] - slopes[3])
            return (slopes[0] + slopes[1] - slopes[2] - slopes[3]) / 2, along / (2 * len(away))

        return lax.map(changes, random.split(rng_key, _DRAWS))

    found = target.compiled(run, "correlated noise")(metric, draws, anchor)
    shifts, narrowings = (np.asarray(x, np.float64) for x in found)
    shift = np.abs(np.median(shifts, axis=0)).max()
    error = max(shift / _SHIFT, narrowings.mean() / ACCEPTED_BIAS) / unit
    minibatches = 2 * GRADIENTS_OF_A_STEP[order_of(anchor)] * target.minibatch_share
    return float(error) if math.isfinite(error) else 0.0, _DRAWS * (4 + minibatches)
