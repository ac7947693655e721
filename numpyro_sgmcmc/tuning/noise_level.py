# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The noise of the gradient in the coordinates of a metric, and the step sizes it allows."""

from collections.abc import Sequence
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.gradients.covariance import Diagonal
from numpyro_sgmcmc.gradients.estimators import sub_batch_gradient
from numpyro_sgmcmc.posterior.control_variate import GRADIENTS_OF_A_STEP, Anchor, order_of
from numpyro_sgmcmc.posterior.metric import GaussianMetric, Metric
from numpyro_sgmcmc.posterior.model import MinibatchModel
from numpyro_sgmcmc.posterior.potential import rows_in
from numpyro_sgmcmc.posterior.target import Program, Target
from numpyro_sgmcmc.tuning.curvature import find_curvature
from numpyro_sgmcmc.tuning.gaussian import Gaussian

_NOISE_DRAWS = 64  #: draws at which the noise is measured
_LINES = 8  #: lines along which the gradient of all data is looked at
_SHORT = 0.01  #: scale on which a gradient is linear, but for its rounding errors

#: Parameters above which the largest noise of one is less what may be chance, and how many standard
#: errors that is.
_MANY, _SURE = 500, 2.0

#: Distance from typical draws within which the whole control variate is used, in standard
#: deviations.
_BEYOND = 5.0

#: The noise of a control variate grows with the distance from its anchor: where it is too large for
#: the step it drives chains further out. Half of the draws are so much further than the others, in
#: standard deviations.
_FAR = 2.0


class NoiseLevel(NamedTuple):
    """
    The noise of the gradient in the coordinates of the metric, for the choice of a step size.

    The curvature of the potential is about 1 in these coordinates.

    - **mean** - mean of the variances of the gradient's noise over the coordinates.
    - **largest** - the largest of them, also in the tails.
    - **curvature** - the largest eigenvalue of the Hessian.
    - **nonlinearity** - how much, relative to itself, the gradient of all data deviates from a
      linear function within the posterior, in the worst coordinate; 0 for a Gaussian.
    - **correlated** - :math:`1 / r`, with the largest ratio :math:`r` of step size and friction at
      which correlations of the noise between parameters do not matter
      (:mod:`~numpyro_sgmcmc.tuning.correlated_noise`); 0 if they were not measured.
    - **widened** - the largest shift of a coordinate in units of the relative change of all
      variances, where gradients are taken at wider positions than the draws; 0 if not measured.
    """

    mean: float
    largest: float
    curvature: float
    nonlinearity: float
    correlated: float = 0.0
    widened: float = 0.0

    def times(self, part: float) -> "NoiseLevel":
        """A part of the noise, as with more rows in a minibatch."""
        return self._replace(
            mean=part * self.mean, largest=part * self.largest, correlated=part * self.correlated
        )


#: The relative error of the variances that methods with a known first-order error accept.
ACCEPTED_BIAS = 0.02

#: The shift of a coordinate of the metric, in standard deviations, that many effects may cause.
ACCEPTED_SHIFT = 0.1

#: A centred hierarchy with nu = 0.19 had means off by 0.13 standard deviations at h = 1, and one
#: with nu = 0.67 the standard deviation of its scale 9 % too small at h = 0.31, and right at 0.19.
_SHORTENING = 20.0

#: Noise whose variance is not the same everywhere is not taken out everywhere. At nu = 0.9 and
#: h^2 v = 0.5 and 0.7 a standard deviation was 0.82 and 0.78 of what it should be.
_UNEVEN = 6.0

#: The steps are not shortened further than to 0.05 for the nonlinearity alone.
_MOST_SHORTENING = 400.0


def whitened_step(noise: NoiseLevel, longest: float = 0.5) -> float:
    """
    The step size of a symmetric integrator,

    .. math:: h^{-2} = \\max(h_0^{-2}, \\; \\min(20 \\nu (1 + 2 \\nu), 400), \\; \\lambda,
        \\; v (1 + 6 \\min(\\nu, 1)^2)) ,

    with the largest variance :math:`v` of the noise. The error of methods that are exact for
    Gaussians is in proportion to :math:`h^2 \\nu` for a small nonlinearity :math:`\\nu`. The
    curvature :math:`\\lambda` asks for :math:`h^2 \\lambda \\le 1`, and the noise for
    :math:`h^2 v \\le 1`, or less where the posterior is no Gaussian and the noise differs between
    places.

    :param noise: the noise of the gradient.
    :param float longest: :math:`h_0`, a half for methods that are not exact for Gaussians.
    """
    nu = noise.nonlinearity
    bends = min(_SHORTENING * nu * (1 + 2 * nu), _MOST_SHORTENING)
    uneven = 1 + _UNEVEN * min(nu, 1.0) ** 2
    return 1 / math.sqrt(max(longest**-2, bends, noise.curvature, uneven * noise.largest))


def euler_step(noise: NoiseLevel, friction: float) -> float:
    """
    The step size of Euler's method with a thermostat: where the relative error of the
    variances, :math:`h (A + h v / 2) / 2`, is the accepted one.
    """
    root = math.sqrt(friction**2 + 4 * ACCEPTED_BIAS * noise.largest)
    return min(whitened_step(noise), 4 * ACCEPTED_BIAS / (friction + root))


class MeasuredNoise(NamedTuple):
    """
    - **plain** - the noise of the gradient of plain minibatches.
    - **controlled** - with a control variate, or None if that was not asked for.
    - **anchor** - of the control variate, or None.
    - **rounding** - :math:`\\rho`.
    - **passes** - the cost in passes over the data.
    - **widest** - the direction in which the posterior is much wider than the metric says, as long
      as it is wide, or None.
    """

    plain: NoiseLevel
    controlled: NoiseLevel | None
    anchor: Anchor | None
    rounding: float
    passes: float
    widest: np.ndarray | None = None


def measure_noise(
    target: Target, rng_key: Array, gaussian: Gaussian, metric: Metric, controlled: bool
) -> MeasuredNoise:
    """
    The variance of the gradient's noise in the coordinates of a metric, the mean over 32
    draws of the Gaussian, and for the largest also over 32 that are two standard deviations further
    out, :math:`(1 + 2 / \\sqrt d) \\zeta`: of plain minibatches, and with a control variate whose
    anchor is the centre. The largest of more than 500 is less what may be chance. With it the
    nonlinearity :math:`\\nu` of the gradient of all data and its rounding error :math:`\\rho`,
    from second differences along draws :math:`\\zeta` of :math:`N(0, I)`, which begin at the
    centre or at other draws :math:`\\beta`,

    .. math::

        s_j(\\beta, \\zeta) &= g_j(\\beta + \\zeta) - 2 g_j(\\beta + \\zeta / 2) + g_j(\\beta),
            \\qquad g(\\zeta) = L^\\top \\nabla U(c + L \\zeta) \\\\
        \\rho^2 &= \\max_j \\tfrac16 \\mathrm{E} \\, s_j(\\beta, \\zeta / 100)^2 \\\\
        \\nu^2 &= \\tfrac32 \\max_j \\frac{\\operatorname{Var} s_j(0, \\zeta)
            - \\tfrac53 \\mathrm{E} \\, s_j(\\beta, \\zeta / 100)^2}
            {\\mathrm{E} \\| g(\\zeta) - g(0) \\|^2 / d} .

    The variance and not the mean square: where each of many effects adds a little to the gradient
    of their scale, the sum is nearly the same everywhere, and moves the centre only. Rounding
    errors add :math:`5 \\rho_j^2` to it, since :math:`g(0)` is common to all lines; twice as much
    is left out, for both are known from few lines.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param gaussian: an approximation of the posterior.
    :param metric: the metric of the sampler.
    :param bool controlled: whether to look at a control variate.
    """
    variances, anchor, errors = _noise_program(target, controlled)(rng_key, gaussian.metric, metric)
    nonlinearity, rounding = (float(x) if math.isfinite(x) else math.inf for x in errors)
    curvature_key = random.fold_in(rng_key, 2)
    curvature, widest, cost = find_curvature(target, curvature_key, gaussian, metric)
    levels = [
        NoiseLevel(float(mean), float(largest), curvature, nonlinearity)
        for mean, largest in variances
    ]
    minibatches = _NOISE_DRAWS * (sum(GRADIENTS_OF_A_STEP[:2]) if controlled else 1)
    points = 1 + 4 * _LINES
    passes = points * _share(target.model.sketch) + minibatches * target.minibatch_share + cost
    if target.model.sketch is not target.model:
        passes += 1  # the anchor of all rows
    if controlled:
        return MeasuredNoise(levels[0], levels[1], anchor, rounding, passes, widest)
    return MeasuredNoise(levels[0], None, None, rounding, passes, widest)


def prepare_noise(target: Target, metric: Metric, controlled: bool) -> None:
    """
    Compiles the program of :func:`measure_noise` beside what is done next.

    :param metric: of the kind of both metrics.
    """
    _noise_program(target, controlled).prepare(random.key(0), metric, metric)


def _noise_program(target: Target, controlled: bool) -> Program:
    return target.compiled(partial(_measured, controlled), "noise", controlled)


def _measured(
    controlled: bool, target: Target, rng_key: Array, draws: GaussianMetric, metric: Metric
) -> Any:
    """The variances, the anchor, nonlinearity and rounding error, for :func:`measure_noise`."""
    center = draws.center
    line_key = random.fold_in(rng_key, 1)
    ends = random.normal(line_key, (_LINES, *center.shape), center.dtype)
    # at draws: a centre may lie where nothing is rounded, at zero for one
    bases = jnp.concatenate([jnp.zeros_like(ends), ends])
    lines = jnp.concatenate([ends, _SHORT * jnp.roll(ends, 1, axis=0)])
    points = jnp.concatenate([bases[:1], bases + lines / 2, bases + lines])
    sketch = target._replace(model=target.model.sketch)
    values = jax.vmap(lambda x: target.unravel(draws.values(x)))(points)
    anchors = lax.map(sketch.expansion, jax.vmap(lambda x: target.written(x).effects)(values))
    anchor = jax.tree.map(lambda x: x[0], anchors)
    if sketch.model is not target.model:
        anchor = target.anchor(anchor.values)
    gradients = jax.vmap(target.from_effects)(values, anchors.gradient)
    slopes = jax.vmap(lambda x: draws.pullback(ravel_pytree(x)[0]))(gradients)
    middle, last = slopes[1 : len(lines) + 1], slopes[len(lines) + 1 :]
    at_center = jnp.broadcast_to(slopes[:1], ends.shape)
    first = jnp.concatenate([at_center, last[:_LINES]])
    seconds = last - 2 * middle + first
    rounded = (seconds[_LINES:] ** 2).mean(axis=0)
    # what is alike in all directions moves the centre, and bends nothing
    spread = jnp.var(seconds[:_LINES], axis=0, ddof=1)
    bent = 1.5 * jnp.maximum(spread - 5 / 3 * rounded, 0.0)
    usual = jnp.mean((last - first)[:_LINES] ** 2)
    nonlinearity = jnp.sqrt(jnp.max(bent) / usual)
    # of fewer rows, each of which counts more often
    rounding = jnp.sqrt(_share(sketch.model) * jnp.max(rounded) / 6)
    anchors = (None, anchor) if controlled else (None,)
    variances = _variances(target, rng_key, draws, metric, anchors)
    return variances, anchor, (nonlinearity, rounding)


def _share(model: MinibatchModel) -> float:
    """The share of all rows in a pass."""
    return math.prod(rows_in(p) / (p.of or p.size) for p in model.plates)


def noise_with(
    target: Target,
    rng_key: Array,
    gaussian: Gaussian,
    metric: Metric,
    anchor: Anchor | None,
    before: NoiseLevel,
) -> tuple[NoiseLevel, float]:
    """
    The noise of the gradient at the same places with another anchor, or rows drawn in another way.

    :param anchor: of the control variate, or None.
    :param before: what was measured of the posterior.
    :return: its level, and the cost in passes over the data.

    The other parameters are those of :func:`measure_noise`.
    """

    def run(target: Target, draws: GaussianMetric, metric: Metric, anchor: Anchor | None) -> Any:
        return _variances(target, rng_key, draws, metric, (anchor,))[0]

    mean, largest = map(float, target.compiled(run)(gaussian.metric, metric, anchor))
    gradients = GRADIENTS_OF_A_STEP[order_of(anchor)]
    passes = _NOISE_DRAWS * gradients * target.minibatch_share
    return before._replace(mean=mean, largest=largest), passes


def _variances(
    target: Target,
    rng_key: Array,
    draws: GaussianMetric,
    metric: Metric,
    anchors: Sequence[Anchor | None],
) -> list[tuple[Array, Array]]:
    """The mean and the largest variance of the noise with each of some anchors."""
    factors, groups, center = target.factors, target.groups, draws.center
    kinds = [target.potential(metric, anchor) for anchor in anchors]

    def one(totals: Any, look: tuple[Array, Array]) -> Any:
        key, is_far = look
        point_key, rows_key, model_key = random.split(key, 3)
        radius = 1 + is_far * _FAR / math.sqrt(len(center))
        normal = radius * random.normal(point_key, center.shape, center.dtype)
        point = metric.coordinates(draws.values(normal))
        rows = target.rows(rows_key)
        seen = [
            sub_batch_gradient(kind, rows, model_key, factors, Diagonal(), groups)(point).noise
            for kind in kinds
        ]
        seen = [jnp.stack([x, x**2]) for x in seen]
        return jax.tree.map(lambda total, x: total.at[is_far].add(x), totals, seen), None

    # near the centre, and further out
    zeros = [jnp.zeros((2, 2, *center.shape), center.dtype) for _ in kinds]
    count = _NOISE_DRAWS // 2
    keys = random.split(random.fold_in(rng_key, 0), _NOISE_DRAWS)
    totals, _ = lax.scan(one, zeros, (keys, jnp.arange(_NOISE_DRAWS) // count))
    means = [x / count for x in target.mean(totals)]
    found = [(near[0].mean(), _largest(near, tails, target.parts)) for near, tails in means]
    # the noise of a mean over devices, whose noises are independent
    return [(mean / target.parts, largest / target.parts) for mean, largest in found]


def _largest(near: Array, tails: Array, parts: int) -> Array:
    """
    The largest variance of a coordinate.

    Few minibatches have a row that says something of one of many parameters. Of thousands of such
    coordinates some have several of these rows by chance: the largest of 2,400 was 200 from 64
    minibatches, 28 from 1,024, and was in truth about 9. Many parameters have nearly the same noise
    in the tails, and of the mean of all minibatches two standard errors are taken off.

    :param near: means of the variances and of their squares near the centre, shape (2, d).
    :param tails: the same further out.
    :param parts: number of devices whose minibatches are in the means.
    """
    if near.shape[1] <= _MANY:
        return jnp.maximum(near[0].max(), tails[0].max())
    mean, square = (near + tails) / 2
    error = jnp.sqrt(jnp.maximum(square - mean**2, 0.0) / (_NOISE_DRAWS * parts - 1))
    error = jnp.where(jnp.isfinite(error), error, 0.0)
    return jnp.maximum(jnp.max(mean - _SURE * error), near[0].mean())


def reach_of(dimension: int, order: int, plain: NoiseLevel, controlled: NoiseLevel) -> float | None:
    """
    The distance up to which the whole control variate is used,

    .. math:: R = \\max \\Big( \\sqrt d + 5, \\;
        \\sqrt d \\, \\Big( \\frac{v}{4 v_{cv}} \\Big)^{1 / 2k} \\Big).

    The variance :math:`v_{cv}` of the noise with an expansion to order :math:`k` grows with the
    power :math:`2 k` of the distance. At :math:`R` it is a quarter of the one of plain minibatches,
    :math:`v`, which does not grow.

    :param int dimension: :math:`d`.
    :param int order: :math:`k`.
    :param plain: the noise of plain minibatches.
    :param controlled: the noise with a control variate.
    :return: None above 500 parameters, whose distance does not show how far one of them is.
    """
    if dimension > _MANY:
        return None
    ratio = plain.mean / max(4 * controlled.mean, 1e-30)
    typical = math.sqrt(dimension)
    return max(typical + _BEYOND, typical * ratio ** (1 / (2 * order)))


def largest_of(noise: NoiseLevel | None) -> float | None:
    """The largest variance of the noise, where it has been measured."""
    return None if noise is None else noise.largest
