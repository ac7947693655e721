# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The error of the integrals over latent variables of groups, and its effect on the posterior."""

import math

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.potential import (
    Rows,
    full_data_gradient,
    over_all_data,
    ravel,
    rows_in,
)
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian

_DIRECTIONS = 4  #: largest number of directions in which standard deviations are compared
_POWER_STEPS = 3  #: power steps to the direction of the largest change, for more parameters

#: Values whose groups are compared, and the fewest groups of a plate: of groups with many values
#: the integrals are the more exact, and fewer groups show their error.
_VALUES, _FEWEST_GROUPS = 40_960, 64

#: Largest shift of the draws by a rule with few nodes, in standard deviations.
_ENOUGH = 0.02

#: Smallest share of the draws that count, below which they do not show their error. Random walks of
#: 100 to 200 values have 0.6 to 0.99 with Poisson, binary and Student's t rows. Of steps with
#: Student's t distribution of three degrees, whose integrals are wrong, it is 0.42.
_FEWEST = 0.45

#: Smallest part of a precision that is kept.
_LEAST_PRECISION = 0.05


def rule_of_steps(
    target: Target, rng_key: Array, gaussian: Gaussian, controlled: bool
) -> tuple[str, float, float]:
    """
    The quadrature rule of the steps: the smallest one that is good enough, or the largest.

    Parameters are the parameters of :func:`error_of_integrals`.

    :return: the rule, its error in standard deviations, and the cost in passes over the data. The
        error is 1 at least where few of the draws of an integral count.
    """
    few, step = (target._replace(model=target.model.with_rule(rule)) for rule in ("few", "step"))
    cost, draws_count = 0.0, True
    if step.model.drawn_plates:
        cost += max(rows_in(plate) / plate.size for plate in step.model.sketch.plates)
        draws_count = share_of_draws(step, gaussian) >= _FEWEST
    if draws_count and few.model.plates != step.model.plates:
        error, more = error_of_integrals(few, rng_key, gaussian, controlled)
        cost += more
        if error <= _ENOUGH:
            return "few", error, cost
    error, more = error_of_integrals(step, rng_key, gaussian, controlled)
    return "step", error if draws_count else max(error, 1.0), cost + more


def share_of_draws(target: Target, gaussian: Gaussian) -> float:
    """
    The share of the draws of integrals that count, the mean of groups at the centre.

    Where latent values have heavy tails, or their density has kinks, a few draws have most of the
    weight. All rules then have the same error, so that a difference of rules does not show it.

    :param target: a model with latent sites inside of subsampled plates.
    :param gaussian: an approximation of the posterior.
    :return: the least of all plates whose integrals are drawn.
    """
    view = target.model.with_rule("weights")
    # a row of one device counts for those of all
    sizes = {plate.name: plate.size * float(view.parts) for plate in view.drawn_plates}

    def run(target: Target, center: Array) -> dict[str, Array]:
        here = target._replace(model=view)
        potential, values = here.potential(IdentityMetric()), here.unravel(center)

        def of_chunk(rows: Rows) -> dict[str, Array]:
            terms = potential.with_row_terms(values, rows, random.key(0))[1]
            return {name: jnp.sum(terms[name]) / size for name, size in sizes.items()}

        return target.mean(over_all_data(of_chunk, view.sketch.plates))

    return min(map(float, target.compiled(run)(gaussian.metric.center).values()))


def error_of_integrals(
    target: Target, rng_key: Array, gaussian: Gaussian, controlled: bool
) -> tuple[float, float]:
    """
    The shift of the posterior by the quadrature rule of a step, in standard deviations.

    The shift is of the mean or of a standard deviation, each in the worst direction. With

    .. math::

        e(\\zeta) = L^\\top \\left( \\nabla U(c + L \\zeta) - \\nabla U_r(c + L \\zeta) \\right)

    for a more accurate rule :math:`r` (:func:`~numpyro_sgmcmc.posterior.quadrature.log_integral`).
    With a control variate :math:`e - e(0)` replaces :math:`e`, because an anchor computes the
    gradient at the centre with many more points. Let the posterior be :math:`N(0, I)`. The Gaussian
    :math:`N(m, (I + J)^{-1})` that is closest to the sampled law has to first order in :math:`e`

    .. math::

        J = \\mathrm{E} \\, \\nabla e(\\zeta) = \\mathrm{E} \\, e(\\zeta) \\zeta^\\top , \\qquad
        m = -(I + J)^{-1} \\, \\mathrm{E} \\, e(\\zeta) , \\qquad \\zeta \\sim N(0, I) ,

    and the error is the largest of :math:`|m|` and :math:`|(1 + \\lambda)^{-1/2} - 1|` over the
    eigenvalues :math:`\\lambda` of :math:`(J + J^\\top) / 2`. The mean comes from the even part of
    :math:`e` in :math:`\\zeta`, and the matrix from the odd part. Both are evaluated at the pairs
    :math:`\\pm \\sqrt d \\, q_i` with orthonormal :math:`q_i`. For more than four parameters there
    are four of these directions. Power steps with differences then give the largest eigenvalue, and
    :math:`m` is :math:`-\\mathrm{E} \\, e`.

    :param target: a model with latent sites inside of subsampled plates.
    :param rng_key: a random key.
    :param gaussian: an approximation of the posterior.
    :param bool controlled: whether the gradient has a control variate.
    :return: the error, and the cost in passes over the data.
    """
    view = target.model
    check = view.with_rule("check")
    if check.plates == view.plates and not view.drawn_plates:
        return 0.0, 0.0  # nothing to integrate, or only sums
    start = gaussian.metric
    dimension = start.center.shape[0]
    count = min(dimension, _DIRECTIONS)
    plates = check.sketch.plates  # equal chunks for both rules
    if not view.drawn_plates:
        most = [max(_FEWEST_GROUPS, _VALUES // plate.members) for plate in plates]
        plates = tuple(
            plate._replace(seen=min(plate.seen or plate.size, number))
            for plate, number in zip(plates, most, strict=True)
        )

    def errors(target: Target, directions: Array) -> tuple[Array, Array]:
        rules = [target._replace(model=view) for view in (target.model, check)]

        def wrong(zeta: Array) -> Array:
            values = target.unravel(start.values(zeta))
            step, right = (
                full_data_gradient(x.potential(IdentityMetric()), plates, values, random.key(0))[1]
                for x in rules
            )
            return start.pullback(ravel(jax.tree.map(jnp.subtract, step, right)))

        def power_step(direction: Array, _: None) -> tuple[Array, Array]:
            ends = lax.map(wrong, jnp.stack([direction, -direction]))
            change = target.mean(ends[0] - ends[1]) / 2
            size = jnp.linalg.norm(change)
            sign = jnp.sign(change @ direction)
            return change / jnp.maximum(size, 1e-30), jnp.where(sign < 0, -size, size)

        radius = math.sqrt(dimension)
        points = radius * jnp.concatenate([directions, -directions])
        if controlled:
            points = jnp.concatenate([points, jnp.zeros_like(points[:1])])
        means = target.mean(lax.map(wrong, points))
        ends = means[:count], means[count : 2 * count]
        mean = ((ends[0] + ends[1]) / 2).mean(0)
        if controlled:
            mean = mean - means[-1]
        changes = (ends[0] - ends[1]) / (2 * radius)
        if count == dimension:
            matrix = changes.T @ directions
            matrix = (matrix + matrix.T) / 2
            return mean, matrix
        sizes = jnp.linalg.norm(changes, axis=1)
        first = changes[sizes.argmax()] / jnp.maximum(sizes.max(), 1e-30)
        _, powers = lax.scan(power_step, first, None, length=_POWER_STEPS)
        return mean, powers

    normal = random.normal(rng_key, (dimension, count), start.center.dtype)
    directions = jnp.asarray(np.linalg.qr(np.asarray(normal))[0].T)
    mean, change = (np.asarray(x, float) for x in target.compiled(errors)(directions))
    seen = max(rows_in(plate) / plate.size for plate in plates)
    points = 2 * count + controlled + (0 if change.ndim > 1 else 2 * _POWER_STEPS)
    return _largest_shift(mean, change), 2.0 * points * seen


def _largest_shift(mean: np.ndarray, change: np.ndarray) -> float:
    """
    The largest shift by a mean error, and a matrix :math:`J` or some of its eigenvalues.

    It is infinite if any of them is not finite.
    """
    if not (np.isfinite(mean).all() and np.isfinite(change).all()):
        return math.inf
    values = change
    if change.ndim > 1:
        values, vectors = np.linalg.eigh(change)
        mean = (vectors.T @ mean) / np.maximum(1 + values, _LEAST_PRECISION)
    ratios = np.maximum(1 + values, _LEAST_PRECISION) ** -0.5
    return float(max(np.linalg.norm(mean), np.abs(ratios - 1).max()))
