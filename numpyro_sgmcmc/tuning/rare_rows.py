# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Rows that few minibatches have and that count much in those that do.

In a plain minibatch of :math:`n` of :math:`N` rows each stands for :math:`w = N / n` of them. Where
a direction of the posterior is known from a few rows only, from a group of four or from a feature
that one row of a thousand has, most minibatches have none of these rows, and the others kick the
chain: noise that is far from Gaussian, and no method corrects for more than its covariance.

With the gradients :math:`a_i = L^\\top \\nabla \\ell_i` of the rows in the coordinates of the
metric, less their expansion at the anchor if there is a control variate, the noise of the gradient
has in a direction :math:`u` the fourth cumulant
:math:`Q(u) \\le \\sum_i (w_i^3 - w_i^2) (u \\cdot a_i)^4`.
Where the potential is :math:`x^2 / 2`, the cumulants of order four of position and momentum of
:math:`\\dot x = p`, :math:`\\dot p = -x - A p` + shots obey linear equations, from which a chain
with friction :math:`A` and steps :math:`h` has draws of excess kurtosis

.. math:: \\kappa = \\frac{h^3 Q}{4 A (4/3 + A^2)} ,

and :math:`h^3 Q / 4` without momentum, while their variance is right. It no longer is where the
potential is :math:`x^2 / 2 + c x^4 / 4`: since :math:`\\mathrm{E} [x \\, U'(x)] = 1` holds for any
noise of the right covariance, the variance is off by :math:`c \\kappa`. The nonlinearity of
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

_PAIRS = 8  #: pairs of opposite draws of the Gaussian at which rows are looked at
_FEW_PAIRS = 2  #: the same where integrals over groups are drawn, and a look takes long
_WIDTH = 1.5  #: their spread: what a row does at a few places is not to miss what it does at others

#: Of so many rows, those that kick the hardest, the gradients are looked at one by one.
_MOST_ROWS = 1_000

TOLERABLE = 0.02  #: relative error of a standard deviation beyond which strata are made
MUCH_ERROR = 0.05  #: and beyond which the tuning warns where there cannot be any


class Importance(NamedTuple):
    """
    - **sizes** - by plate, the root mean square :math:`|a_i|` of each row, shape (N,).
    - **passes** - the cost in passes over the data.
    """

    sizes: dict[str, np.ndarray]
    passes: float


def find_importance(target: Target, rng_key: Array, gaussian: Gaussian, order: int) -> Importance:
    """
    How much noise each row makes in the coordinates of a Gaussian :math:`N(c, L L^\\top)`, from
    what it adds to the log density, :math:`\\ell_i`, at pairs of opposite draws: with
    :math:`\\ell_i^\\pm = \\ell_i(c \\pm L \\zeta)`,

    .. math::

        |a_i|^2 \\approx \\tfrac14 \\mathrm{E} (\\ell_i^+ - \\ell_i^-)^2, \\qquad
        |a_i|^2 \\approx \\tfrac13 \\mathrm{E} (\\ell_i^+ + \\ell_i^- - 2 \\ell_i(c))^2, \\qquad
        |a_i|^2 \\approx \\tfrac95 \\mathrm{E} \\left( \\tfrac12 (\\ell_i^+ - \\ell_i^-)
            - \\nabla \\ell_i(c)^\\top L \\zeta \\right)^2

    with plain minibatches and with a control variate of first and of second order, to leading
    order in :math:`\\zeta`.

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
        potential, others = _potential(target, draws.center, order), target.rows(rows_key)

        def of_rows(plate: Plate, rows: Array) -> Array:
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
    # the potential alone costs less than half of a gradient
    return Importance(sizes, (1 + (3 if order == 2 else 2) * pairs) / 2)


def _potential(target: Target, center: Array, order: int) -> Potential:
    """
    The potential, whose rows add what a control variate leaves of them: where coordinates do not
    bend, an expansion around the centre in these is the same, and costs less.
    """
    if not target.centring or order == 0:
        return target.potential(IdentityMetric())
    effects = target.written(target.unravel(center)).effects
    none = jax.tree.map(jnp.zeros_like, effects)
    hessian = jnp.zeros(2 * center.shape, center.dtype) if order == 2 else None
    # what all data say of it is the same for all rows
    anchor = Anchor(effects, jnp.zeros((), center.dtype), none, hessian)
    return target.potential(IdentityMetric(), anchor)


def _mean_square(found: Array) -> Array:
    """Over the first axis, of what is finite."""
    return jnp.mean(jnp.where(jnp.isfinite(found), found, 0.0) ** 2, axis=0)


def _spread_normal(rng_key: Array, like: Array, number: int = _PAIRS) -> Array:
    """
    Normal vectors, shape (number, d): each coordinate has in them, of eight, every eighth of its
    law, with random signs (McKay, Beckman and Conover, 1979), so that none is seen near its centre
    alone.
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
    The largest fourth cumulant of the gradient's noise in the coordinates of a metric, the mean
    over draws of the Gaussian: in the directions of the gradients of the rows that kick the
    hardest, at most 1,000 of them,

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
    """That of the rows of one plate."""
    most = max(1, min(_MOST_ROWS, plate.size, PER_EXAMPLE_NUMBERS // target.model.dimension))
    hardest = np.argpartition(-weights * importance, most - 1)[:most]

    def run(target: Target, draws: Any, metric: Metric, rows: Array, w: Array) -> Array:
        normal_key, rows_key, model_key = random.split(rng_key, 3)
        normal = _spread_normal(normal_key, draws.center)
        potential, others = _potential(target, draws.center, order), target.rows(rows_key)

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
            products = a @ a.T
            lengths = jnp.sqrt(jnp.maximum(jnp.diag(products), jnp.finfo(a.dtype).tiny))
            along = products / lengths
            along = jnp.where(jnp.isfinite(along), along, 0.0)
            return total + (w**3 - w**2) @ along**4, None

        points = jax.vmap(draws.values)(jnp.concatenate([normal, -normal]))
        total, _ = lax.scan(seen, jnp.zeros_like(w), points)
        return jnp.max(total) / len(points)

    rows = jnp.asarray(hardest, jnp.int32)
    w = jnp.asarray(weights[hardest], gaussian.metric.center.dtype)
    return float(target.compiled(run)(gaussian.metric, metric, rows, w))


class RareRows(NamedTuple):
    """
    - **strata** - of the rows by plate, where rows are not drawn alike.
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
    Looks for rows that few minibatches have, and for strata of which minibatches have enough.

    :param target: the model with its data, or with a sample of them.
    :param rng_key: a random key.
    :param gaussian: an approximation of the posterior.
    :param metric: the metric of the sampler.
    :param int order: of the control variate, 0 for none.
    :param strata: those that were given, ``"auto"`` to have them made where plain minibatches make
        standard deviations wrong by 2 %, or None.
    :param error: from a fourth cumulant of the noise to the error of the standard deviations, with
        the step size that there would be without noise: strata make longer steps possible.
    """
    key, others = random.split(rng_key)
    importance, passes = find_importance(target, key, gaussian, order)
    # of a sample a row stands for so many
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
    """The strata of like rows, in any case. Parameters are those of :func:`find_rare_rows`."""
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
    The relative error of standard deviations in the worst direction, :math:`\\nu \\kappa / 6`, as
    far as it is of first order.

    :param float fourth_cumulant: :math:`Q`.
    :param float nonlinearity: :math:`\\nu`; no more than 1 is made of it.
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
