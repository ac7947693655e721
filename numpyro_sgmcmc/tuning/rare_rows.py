# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Rows that few minibatches have and that dominate those minibatches.

In a plain minibatch of :math:`n` of :math:`N` rows each row stands for :math:`w = N / n` rows. Some
directions of the posterior are known from a few rows only, for instance from a group of four or
from a feature of one row in a thousand. Most minibatches have none of these rows, and the other
minibatches kick the chain. This noise is far from Gaussian, and methods correct for its covariance
only.

Let :math:`a_i = L^\\top \\nabla \\ell_i` be the gradients of the rows in the coordinates of the
metric, minus their expansion at the anchor if there is a control variate. The gradient noise in a
direction :math:`u` has the fourth cumulant
:math:`Q(u) \\le \\sum_i (w_i^3 - w_i^2) (u \\cdot a_i)^4`.
Where the potential is :math:`x^2 / 2`, the cumulants of order four of position and momentum of
:math:`\\dot x = p`, :math:`\\dot p = -x - A p` + shots obey linear equations, from which a chain
with friction :math:`A` and steps :math:`h` has draws of excess kurtosis

.. math:: \\kappa = \\frac{h^3 Q}{4 A (4/3 + A^2)} ,

and :math:`h^3 Q / 4` without momentum, while their variance is right. For the potential :math:`x^2
/ 2 + c x^4 / 4` the variance is wrong too. Because :math:`\\mathrm{E} [x \\, U'(x)] = 1` holds for
any noise of the right covariance, its error is :math:`c \\kappa`. The nonlinearity of
:class:`~numpyro_sgmcmc.tuning.noise_level.NoiseLevel` is :math:`\\nu = 2.9 \\, c` here, so that
standard deviations are wrong by about :math:`\\nu \\kappa / 6`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.scipy.special import ndtri
import numpy as np

from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.strata import Strata, by_importance
from numpyro_sgmcmc.gradients.estimators import PER_EXAMPLE_NUMBERS
from numpyro_sgmcmc.posterior.control_variate import Anchor
from numpyro_sgmcmc.posterior.handlers import Plate
from numpyro_sgmcmc.posterior.metric import IdentityMetric, Metric
from numpyro_sgmcmc.posterior.potential import Potential, of_all_rows, ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian
from numpyro_sgmcmc.tuning.strata import given_strata

_PAIRS = 8  #: pairs of opposite draws of the Gaussian at which rows are evaluated
_FEW_PAIRS = 2  #: number of pairs if integrals over groups make an evaluation slow
_WIDTH = 1.5  #: spread of the draws, so that a few points do not miss the effect of a row elsewhere

#: Number of rows with the strongest kicks whose gradients are evaluated one by one.
_MOST_ROWS = 1_000
#: Number of multiplications of these gradients with each other beyond which directions are fewer.
_MULTIPLICATIONS = 2e10

TOLERABLE = 0.02  #: relative error of a standard deviation beyond which strata are made
MUCH_ERROR = 0.05  #: relative error beyond which the tuning warns if strata are not possible


class Importance(NamedTuple):
    """
    The contribution of each row to the gradient noise.

    - **sizes** - by plate, the root mean square :math:`|a_i|` of each row, shape (N,).
    - **passes** - the cost in passes over the data.
    """

    sizes: dict[str, np.ndarray]
    passes: float


def find_importance(target: Target, rng_key: Array, gaussian: Gaussian, order: int) -> Importance:
    """
    Estimate the noise of each row in the coordinates of a Gaussian :math:`N(c, L L^\\top)`.

    It comes from the contributions :math:`\\ell_i` of the rows to the log density at pairs of
    opposite draws. With :math:`\\ell_i^\\pm = \\ell_i(c \\pm L \\zeta)`,

    .. math::

        |a_i|^2 \\approx \\tfrac14 \\mathrm{E} (\\ell_i^+ - \\ell_i^-)^2, \\qquad
        |a_i|^2 \\approx \\tfrac13 \\mathrm{E} (\\ell_i^+ + \\ell_i^- - 2 \\ell_i(c))^2, \\qquad
        |a_i|^2 \\approx \\tfrac95 \\mathrm{E} \\left( \\tfrac12 (\\ell_i^+ - \\ell_i^-)
            - \\nabla \\ell_i(c)^\\top L \\zeta \\right)^2

    for plain minibatches and for control variates of first and of second order, to leading order in
    :math:`\\zeta`.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param gaussian: an approximation of the posterior.
    :param int order: of the control variate, 0 for none.
    """

    pairs = _FEW_PAIRS if target.model.drawn_plates else _PAIRS

    def run(target: Target, rng_key: Array, draws: Any) -> dict[str, Array]:
        normal_key, rows_key, model_key = random.split(rng_key, 3)
        normal = _WIDTH * _spread_normal(normal_key, draws.center, pairs)
        points = jnp.concatenate([jnp.zeros_like(normal[:1]), normal, -normal])
        points = jax.vmap(draws.values)(points)
        others = target.rows(rows_key)

        def of_rows(plate: Plate, rows: Array) -> Array:
            potential = _potential(target, draws.center, order, plate)
            share = rows.shape[0] / float(plate.size * target.model.parts)

            def terms(point: Array) -> Array:
                values, batch = target.unravel(point), {**others, plate.name: DrawnRows(rows)}
                return share * potential.with_row_terms(values, batch, model_key)[1][plate.name]

            def slope(point: Array) -> Array:
                return jax.jvp(terms, (points[0],), (point - points[0],))[1]

            changes = lax.map(terms, points)
            center, above, below = changes[0], changes[1 : pairs + 1], changes[pairs + 1 :]
            if order == 0:
                return _mean_square((above - below) / (2 * _WIDTH))
            if order == 1:
                return _mean_square((above + below - 2 * center) / (3**0.5 * _WIDTH**2))
            cubic = (above - below) / 2 - lax.map(slope, points[1 : pairs + 1])
            return _mean_square(1.8**0.5 / _WIDTH**3 * cubic)

        plates = target.model.plates
        return {plate.name: of_all_rows(partial(of_rows, plate), plate) for plate in plates}

    mean_squares = target.compiled(run, "importance", order)(rng_key, gaussian.metric)
    sizes = {name: np.sqrt(np.asarray(squares)) for name, squares in mean_squares.items()}
    # a potential costs less than half of a gradient
    return Importance(sizes, (1 + (3 if order == 2 else 2) * pairs) / 2)


def _potential(target: Target, center: Array, order: int, plate: Plate) -> Potential:
    """
    The potential of the rows of a plate, for their terms; other tables of groups are left out.

    The terms have their expansion by a control variate taken off.
    """
    potential = _expanded(target, center, order)
    is_sum = potential.group_plates.issuperset(p.name for p in target.model.plates)
    return potential.of_groups(plate.name) if is_sum else potential


def _expanded(target: Target, center: Array, order: int) -> Potential:
    """
    The potential, with the rows' terms minus their expansion by a control variate.

    In linear coordinates an expansion around the centre in these coordinates is equal and costs
    less.
    """
    if not target.centring or order == 0:
        return target.potential(IdentityMetric())
    effects = target.written(target.unravel(center)).effects
    none = jax.tree.map(jnp.zeros_like, effects)
    hessian = jnp.zeros(2 * center.shape, center.dtype) if order == 2 else None
    # zeros replace the sums over all data, which are equal for all rows
    anchor = Anchor(effects, jnp.zeros((), center.dtype), none, hessian)
    return target.potential(IdentityMetric(), anchor)


def _mean_square(found: Array) -> Array:
    """The mean square over the first axis, of finite entries."""
    return jnp.mean(jnp.where(jnp.isfinite(found), found, 0.0) ** 2, axis=0)


def _spread_normal(rng_key: Array, like: Array, number: int = _PAIRS) -> Array:
    """
    Evenly spread normal vectors, shape (number, d).

    In eight vectors each coordinate has a value from each eighth of its law, with random signs
    (McKay, Beckman and Conover, 1979), so that no coordinate stays near its centre.
    """
    place_key, sign_key = random.split(rng_key)
    shape = (number, *like.shape)
    places = jnp.broadcast_to(jnp.arange(number)[:, None], shape)
    places = random.permutation(place_key, places, axis=0, independent=True)
    sizes = ndtri(0.5 + (places + 0.5) / (2 * number))
    return random.rademacher(sign_key, shape, like.dtype) * sizes.astype(like.dtype)


def fourth_cumulant(
    target: Target,
    rng_key: Array,
    gaussian: Gaussian,
    metric: Metric,
    order: int,
    importance: dict[str, np.ndarray],
    weights: dict[str, np.ndarray],
) -> float:
    """
    The largest fourth cumulant of the gradient noise in the coordinates of a metric.

    It is a mean over draws of the Gaussian. The rows are the 1,000 with the strongest kicks. The
    directions are their gradients, and fewer of these in many dimensions,

    .. math:: \\max_k \\mathrm{E} \\sum_i (w_i^3 - w_i^2) \\frac{(a_k \\cdot a_i)^4}{|a_k|^4} .

    :param target: the model with its data.
    :param rng_key: a random key.
    :param gaussian: an approximation of the posterior.
    :param metric: the metric of the sampler.
    :param int order: of the control variate, 0 for none.
    :param importance: by plate, :math:`|a_i|` of each row.
    :param weights: by plate, the weight :math:`w_i` of each row in a minibatch that has it.
    """
    options = target, rng_key, gaussian, metric, order
    return max(
        _fourth_cumulant_of(*options, plate, importance[plate.name], weights[plate.name])
        for plate in target.model.plates
    )


def _fourth_cumulant_of(
    target: Target,
    rng_key: Array,
    gaussian: Gaussian,
    metric: Metric,
    order: int,
    plate: Plate,
    importance: np.ndarray,
    weights: np.ndarray,
) -> float:
    """The fourth cumulant from the rows of one plate."""
    most = max(1, min(_MOST_ROWS, plate.size, PER_EXAMPLE_NUMBERS // target.model.dimension))
    kicks = weights * importance
    hardest = np.argpartition(-kicks, most - 1)[:most]
    hardest = hardest[np.argsort(-kicks[hardest])]
    of_a_direction = 2 * _PAIRS * most * target.model.dimension
    directions = max(1, min(most, int(_MULTIPLICATIONS / of_a_direction)))

    def run(
        target: Target, rng_key: Array, draws: Any, metric: Metric, rows: Array, w: Array
    ) -> Array:
        normal_key, rows_key, model_key = random.split(rng_key, 3)
        normal = _spread_normal(normal_key, draws.center)
        potential = _potential(target, draws.center, order, plate)
        others = target.rows(rows_key)

        def gradient(point: Array, row: Array) -> Array:
            def term(values: Any) -> Array:
                batch = {**others, plate.name: DrawnRows(row[None])}
                return potential.with_row_terms(values, batch, model_key)[1][plate.name][0]

            slope = jax.grad(term)(target.unravel(point))
            return metric.pullback(ravel(slope)) / float(plate.size * target.model.parts)

        def of_rows(point: Array) -> Array:
            return jax.vmap(gradient, (None, 0))(point, rows)

        center = of_rows(draws.center) if order else 0.0

        def seen(total: Array, point: Array) -> tuple[Array, None]:
            a = of_rows(point) - center
            if order == 2:
                a -= jax.jvp(of_rows, (draws.center,), (point - draws.center,))[1]
            first = a[:directions]
            squares = jnp.maximum(jnp.sum(first**2, axis=1), jnp.finfo(a.dtype).tiny)
            along = a @ first.T / jnp.sqrt(squares)
            along = jnp.where(jnp.isfinite(along), along, 0.0)
            return total + (w**3 - w**2) @ along**4, None

        points = jax.vmap(draws.values)(jnp.concatenate([normal, -normal]))
        total, _ = lax.scan(seen, jnp.zeros_like(w[:directions]), points)
        return jnp.max(total) / len(points)

    rows = jnp.asarray(hardest, jnp.int32)
    w = jnp.asarray(weights[hardest], gaussian.metric.center.dtype)
    program = target.compiled(run, "fourth cumulant", order, plate)
    return float(program(rng_key, gaussian.metric, metric, rows, w))


class RareRows(NamedTuple):
    """
    The rare rows of a model, with their strata.

    - **strata** - strata of the rows by plate, if rows are drawn within strata.
    - **fourth_cumulant** - :math:`Q` in the worst direction, or a bound that is small enough.
    - **passes** - the cost in passes over the data.
    """

    strata: dict[str, Strata] = {}
    fourth_cumulant: float = 0.0
    passes: float = 0.0


def find_rare_rows(
    target: Target,
    rng_key: Array,
    gaussian: Gaussian,
    metric: Metric,
    order: int,
    strata: Any,
    error: Callable[[float], float],
) -> RareRows:
    """
    Look for rare rows that dominate minibatches, and make strata against them.

    :param target: the model with its data, or with a sample of the rows.
    :param rng_key: a random key.
    :param gaussian: an approximation of the posterior.
    :param metric: the metric of the sampler.
    :param int order: of the control variate, 0 for none.
    :param strata: given strata; ``"auto"`` for strata if plain minibatches make standard deviations
        wrong by 2 %; or None.
    :param error: function from a fourth cumulant of the noise to the error of the standard
        deviations. Its step size is the step size without noise, because strata permit longer
        steps.
    """
    key, others = random.split(rng_key)
    importance, passes = find_importance(target, key, gaussian, order)
    # rows of the data for each row of a sample
    each = float(target.model.parts)

    def cumulant(strata: Mapping[str, Strata]) -> float:
        weights = {
            plate.name: strata[plate.name].row_weights
            if plate.name in strata
            else np.full(plate.size, each * plate.size / plate.subsample_size)
            for plate in target.model.plates
        }
        bound = max(
            each * float(np.max(weights[name] * r) ** 2 * np.sum(weights[name] * r**2))
            for name, r in importance.items()
        )
        if error(bound) < TOLERABLE:
            return bound
        looked_at = target, others, gaussian, metric, order
        return each * fourth_cumulant(*looked_at, importance, weights)

    chosen = given_strata(strata, target, importance)
    largest = cumulant(chosen)
    if isinstance(strata, str) and error(largest) > TOLERABLE:
        chosen = _by_importance(target, importance)
        largest = cumulant(chosen)
    return RareRows(chosen, largest, passes)


def strata_by_importance(
    target: Target, rng_key: Array, gaussian: Gaussian, order: int
) -> dict[str, Strata]:
    """
    Make strata of rows with similar importance, in any case.

    The parameters are the parameters of :func:`find_rare_rows`.
    """
    return _by_importance(target, find_importance(target, rng_key, gaussian, order).sizes)


def _by_importance(target: Target, importance: dict[str, np.ndarray]) -> dict[str, Strata]:
    return {
        plate.name: by_importance(importance[plate.name], plate.subsample_size)
        for plate in target.model.plates
        if target.factors[plate.name] > 0
    }


def error_of(
    fourth_cumulant: float, nonlinearity: float, step_size: float, friction: float | None
) -> float:
    """
    The relative error of standard deviations in the worst direction, :math:`\\nu \\kappa / 6`.

    It is the error of first order.

    :param float fourth_cumulant: :math:`Q`.
    :param float nonlinearity: :math:`\\nu`; larger values count as 1.
    :param float step_size: :math:`h`.
    :param float friction: :math:`A`, or None for methods without momentum.

    **Example:**

    .. doctest::

        >>> from numpyro_sgmcmc.tuning.rare_rows import error_of
        >>> print(f"{error_of(5e4, nonlinearity=0.5, step_size=0.1, friction=2.5):.2f}")
        0.05
    """
    damping = 1.0 if friction is None else friction * (4 / 3 + friction**2)
    return min(nonlinearity, 1.0) * step_size**3 * fourth_cumulant / (4 * damping) / 6
