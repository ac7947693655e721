# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The curvature of the potential and the gradients of the rows at the centre of a posterior."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import scipy.stats

from numpyro_sgmcmc.data.drawn_rows import DrawnRows, drawn_rows
from numpyro_sgmcmc.posterior.handlers import Plate
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.potential import (
    Rows,
    full_data_expansion,
    over_all_data,
    ravel,
)
from numpyro_sgmcmc.posterior.target import Target

#: Number of directions in one look at the rows.
_COLUMNS = 32

#: The most Newton steps to the centre of weighted rows, and its tolerance in standard deviations.
_NEWTON_STEPS, _NEAR = 20, 0.01

#: Eigenvalue of a Hessian with unit diagonal below which single precision cannot resolve it.
_SINGULAR = 1e-6

#: Number of clusters for each parameter below which their covariance is shrunk.
_FEW = 10

#: p value below which a model counts as wrong.
RARE = 0.01

#: Slope of the prior that matters, in posterior standard deviations.
_MATTERS = 0.5

#: Cosine above which a direction counts as the direction of a parameter.
_SAME = 0.999

#: Number of clusters for each parameter that a test of all parameters needs.
_FOR_ALL = 20


class Sandwich(NamedTuple):
    """
    The parts of a sandwich covariance at the centre of a posterior.

    They are the curvature :math:`J` of the potential, :math:`J^{-1} = L L^\\top`, and the
    contributions of clusters of rows to gradient and curvature.

    - **center** - :math:`\\hat\\theta`, unconstrained, shape ``(d,)``.
    - **factor** - :math:`L`.
    - **scores** - scores of each cluster, minus their mean, shape ``(G, d)``,
      :math:`s_g = L^\\top \\sum_{i \\in g} w_i \\nabla \\ell_i`.
    - **bends** - likewise, :math:`b_{gj} = -\\sum_{i \\in g} w_i v_j^\\top \\nabla^2 \\ell_i v_j`,
      in the direction :math:`v_j = J^{-1} e_j / (J^{-1})_{jj}^{1/2}`, which isolates parameter
      :math:`j`.
    - **prior** - :math:`L^\\top J_0 L`, with :math:`J_0` the curvature of the prior.
    - **pull** - :math:`L^\\top \\nabla \\log p(\\hat\\theta)`, the slope of the prior.
    - **correction** - factor for few clusters, :math:`\\frac{G}{G - 1} \\frac{N - 1}{N - d}`.
    - **unseen** - the part of the population that is not in the data.
    """

    center: np.ndarray
    factor: np.ndarray
    scores: np.ndarray
    bends: np.ndarray
    prior: np.ndarray
    pull: np.ndarray
    correction: float
    unseen: float

    @property
    def contradiction(self) -> np.ndarray:
        """
        The distance of prior and rows for each parameter, in standard errors of the rows.

        It is the slope of the prior over the square root of the sum of squared scores. It is zero
        if the prior moves the draws by less than half a standard deviation: for a parameter that
        the rows hardly know, any slope is many of their errors.
        """
        errors = np.linalg.norm(self.scores @ self.marginal, axis=0)
        slope = np.abs(self.pull @ self.marginal)
        return np.where(slope < _MATTERS, 0.0, slope / np.maximum(errors, np.finfo(float).tiny))

    @property
    def meat(self) -> np.ndarray:
        """
        The middle matrix :math:`L^\\top (I + J_0) L` of the sandwich.

        Here :math:`I` is the covariance of the sum of all scores. The curvature :math:`J_0` of the
        prior counts as if it came from rows that follow the model. With few clusters for each
        parameter :math:`I` is shrunk towards a multiple of the identity by the rule of Ledoit and
        Wolf (2004).
        """
        z, (count, dimension) = self.scores, self.scores.shape
        covariance = z.T @ z
        if count < _FEW * dimension:
            mean = np.trace(covariance) / dimension
            apart = np.sum((covariance - mean * np.eye(dimension)) ** 2)
            each = np.sum(z**2, axis=1)
            noise = np.sum(each**2) - np.sum(covariance**2) / count
            part = 1.0 if apart == 0 else min(1.0, noise / apart)
            covariance = part * mean * np.eye(dimension) + (1 - part) * covariance
        return self.correction * self.unseen * covariance + self.prior

    @property
    def stretch(self) -> np.ndarray:
        """The map :math:`A = L S^{1/2} L^{-1}` with the matrix :math:`S` of :attr:`meat`."""
        values, vectors = np.linalg.eigh(self.meat)
        root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
        return self.factor @ root @ np.linalg.inv(self.factor)

    @property
    def marginal(self) -> np.ndarray:
        """The vectors :math:`L^{-1} v_j` of the parameters, in columns of length one."""
        return self.factor.T / np.linalg.norm(self.factor, axis=1)

    def error_of(self, direction: np.ndarray) -> np.ndarray:
        """
        The standard error of the ratio of a calibrated standard deviation to the plain one.

        Both are of :math:`b^\\top \\theta`, and clusters contribute to both. For a parameter the
        error comes from :math:`(v_j^\\top \\nabla \\ell_g)^2 - r_j^2 b_{gj}` with the ratio
        :math:`r_j`. For other directions the curvature is not known by cluster, and its error is
        left out. If the model is right, the part explained by the scores is removed, because the
        centre makes up for it.

        :param direction: :math:`b`, shape ``(d, k)`` for several.
        """
        along = self.factor.T @ direction
        along = along / np.maximum(np.linalg.norm(along, axis=0), np.finfo(float).tiny)
        squares = (self.scores @ along) ** 2
        ratio = np.sqrt(np.maximum(np.sum(along * (self.meat @ along), axis=0), 0.0))
        cosine = np.abs(self.marginal.T @ along)
        nearest, is_parameter = cosine.argmax(axis=0), cosine.max(axis=0) > _SAME
        excess = squares - ratio**2 * self.bends[:, nearest]
        if self.test()[2] > RARE:
            excess = self._without_scores(excess)
        squares = np.where(is_parameter, excess, squares)
        spread = squares.std(axis=0, ddof=1) * len(squares) ** 0.5
        return spread / np.maximum(2 * ratio, np.finfo(float).tiny)

    def _without_scores(self, values: np.ndarray) -> np.ndarray:
        """The residual of a regression on the scores, which determine the centre."""
        known, *_ = np.linalg.lstsq(self.scores, values, rcond=None)
        return values - values.mean(axis=0) - self.scores @ known

    def test(self) -> tuple[float, int, float]:
        """
        White's test that :math:`I = J - J_0`, in the direction of each parameter.

        If clusters are few, the test takes the sum over the parameters. With :math:`t_{gj} =
        v_j^\\top \\nabla \\ell_g`, :math:`T_j = \\sum_g t_{gj}^2`, :math:`B_j = \\sum_g b_{gj}`,
        and :math:`m_{gj} = t_{gj}^2 / T_j - b_{gj} / B_j` without the part explained by the scores,

        .. math:: r^\\top \\Big( \\frac{G}{G - d - 1} \\sum_g m_g m_g^\\top \\Big)^{-1} r, \\qquad
            r_j = \\log \\frac{T_j}{B_j} ,

        in logarithms, because the error of :math:`T_j` is in proportion to :math:`T_j`.

        :return: the statistic, its degrees of freedom, and the p value of Fisher's F, which
            approaches a chi-square for many clusters.
        """
        count, dimension = self.scores.shape
        squares, bends = (self.scores @ self.marginal) ** 2, self.bends
        if count < _FOR_ALL * dimension:
            squares, bends = (x.sum(axis=1, keepdims=True) for x in (squares, bends))
        tiny = np.finfo(float).tiny
        whole, curved = (np.maximum(x.sum(axis=0), tiny) for x in (squares, bends))
        excess = self._without_scores(squares / whole - bends / curved)
        ratio = np.log(whole / curved)
        degrees, left = excess.shape[1], count - dimension - 1
        covariance = count / left * excess.T @ excess
        statistic = float(ratio @ np.linalg.pinv(covariance) @ ratio)
        return statistic, degrees, float(scipy.stats.f.sf(statistic / degrees, degrees, left))


class _Seen(NamedTuple):
    """The potential of all rows at a point: value, gradient, Hessian and the prior's Hessian."""

    center: np.ndarray
    value: np.ndarray
    slope: np.ndarray
    hessian: np.ndarray
    prior: np.ndarray

    @property
    def is_finite(self) -> bool:
        return all(np.all(np.isfinite(x)) for x in self)

    @property
    def factor(self) -> tuple[np.ndarray, float]:
        """The factor :math:`L` from absolute eigenvalues, and the smallest scaled eigenvalue."""
        scale = np.sqrt(np.maximum(np.abs(np.diag(self.hessian)), np.finfo(float).tiny))
        values, vectors = np.linalg.eigh(self.hessian / np.outer(scale, scale))
        sizes = np.maximum(np.abs(values), _SINGULAR)
        return (vectors / np.sqrt(sizes)) @ vectors.T / scale[:, None], float(values[0])

    @property
    def far(self) -> float:
        """The length of a Newton step, in standard deviations."""
        return float(np.linalg.norm(self.factor[0].T @ self.slope))


def _mode_from(start: _Seen, seen: Callable[[np.ndarray], _Seen]) -> _Seen:
    """
    The mode by Newton steps along absolute eigenvalues, shortened by four if they lead up.

    :raises ValueError: if the steps do not converge.
    """
    best, part = start, 1.0
    for _ in range(_NEWTON_STEPS):
        if best.far < _NEAR and best.factor[1] > _SINGULAR:
            return best
        factor, _ = best.factor
        step = part * factor @ (factor.T @ best.slope)
        there = seen((best.center - step).astype(best.center.dtype))
        # within the rounding error of a sum over all rows
        if there.is_finite and there.value <= best.value + 1e-6 * abs(best.value):
            best, part = there, 1.0
        else:
            part /= 4
    raise ValueError(
        f"The mode of the weighted posterior was not found in {_NEWTON_STEPS} Newton steps from"
        " the mean of the draws. Sample the posterior with the weights instead,"
        " `numpyro.handlers.scale(scale=w[i])` around the observed site."
    )


def sandwich_of(
    target: Target,
    center: np.ndarray,
    clusters: Mapping[str, np.ndarray],
    weights: Mapping[str, np.ndarray],
    unseen: float,
) -> Sandwich:
    """
    Compute the sandwich by two passes over all rows, for the curvature and for the rows.

    With weights the centre first moves to the mode of the weighted posterior, by a pass for each
    Newton step.

    :param center: the unconstrained centre, shape ``(d,)``.
    :param clusters: the number of the cluster of each row, by plate.
    :param weights: weights of the rows of some plates.
    :param float unseen: the part of the population that is not in the data.
    :raises ValueError: if the curvature is not positive or not finite.
    """
    known = {name: jnp.asarray(w, target.model.dtype) for name, w in weights.items()}
    look = target.compiled(_curvature)

    def seen(center: np.ndarray) -> _Seen:
        return _Seen(center, *(np.asarray(x, np.float64) for x in look(jnp.asarray(center), known)))

    here = seen(center)
    if not here.is_finite:
        raise ValueError(
            "The Hessian of the potential at the mean of the draws is not finite: some draws are"
            " in a place that the model does not allow. Look at the draws before you calibrate"
            " them."
        )
    if weights:
        here = _mode_from(here, seen)
    factor, smallest = here.factor
    if smallest <= _SINGULAR:
        raise ValueError(
            "The potential is not convex at the mean of the draws: the smallest eigenvalue of its"
            f" scaled Hessian is {smallest:.3g}. The posterior has several modes, or a direction"
            " that neither rows nor prior determine. The sandwich needs one mode."
        )
    if (far := here.far) > 1 + 2 * len(center) ** 0.5:
        raise ValueError(
            f"The mean of the draws is {far:,.3g} standard deviations from the point of zero"
            " gradient of all data. The draws are from another posterior, or its curvature does"
            " not give its width. Look at the run before you calibrate it."
        )
    center, prior = here.center, here.prior
    number = 1 + max(int(x.max()) for x in clusters.values())
    look_at_rows = target.compiled(_of_clusters(number))
    labels = {name: jnp.asarray(x, jnp.int32) for name, x in clusters.items()}
    alone = factor @ factor.T / np.linalg.norm(factor, axis=1)
    columns = (jnp.asarray(x, target.model.dtype) for x in (factor, alone))
    sums = look_at_rows(jnp.asarray(center), *columns, labels, known)
    scores, bends = (np.asarray(x, np.float64) for x in sums)
    rows, size = sum(plate.size for plate in target.model.plates), len(center)
    correction = number / (number - 1) * (rows - 1) / (rows - size)
    prior = factor.T @ prior @ factor
    pull = -factor.T @ here.slope - scores.sum(axis=0)
    scores = scores - scores.mean(axis=0)
    return Sandwich(center, factor, scores, bends, prior, pull, correction, unseen)


def _weighted(rows: Rows, weights: Mapping[str, Array]) -> Rows:
    weighted = dict(rows)
    for name, w in weights.items():
        seen = drawn_rows(rows[name])
        # rows that fill up a chunk have weight 0
        own = w[seen.numbers] if seen.weights is None else w[seen.numbers] * seen.weights
        weighted[name] = DrawnRows(seen.numbers, weights=own)
    return weighted


def _curvature(target: Target, center: Array, weights: Mapping[str, Array]) -> list[Array]:
    """The potential of all rows with gradient and Hessian, and the Hessian of the prior."""
    potential = target.potential(IdentityMetric())

    def with_weights(values: Any, rows: Rows, rng_key: Array) -> Array:
        return potential(values, _weighted(rows, weights), rng_key)

    nothing = {
        name: DrawnRows(rows, weights=jnp.zeros(len(rows), center.dtype))
        for name, rows in target.model.first_rows().items()
    }

    def without_rows(x: Array) -> Array:
        return potential(target.unravel(x), nothing, random.key(0))

    data: Any = with_weights, target.model.plates, target.unravel(center), random.key(0)
    value, slope, hessian = full_data_expansion(*data)
    return [value, ravel(slope), hessian, jax.hessian(without_rows)(center)]


def _of_clusters(number: int) -> Any:
    """Sums of the rows' contributions along each direction, by cluster."""

    def run(
        target: Target,
        center: Array,
        factor: Array,
        alone: Array,
        clusters: Mapping[str, Array],
        weights: Mapping[str, Array],
    ) -> tuple[Array, Array]:
        potential, first = target.potential(IdentityMetric()), target.model.first_rows()

        def of_plate(plate: Plate) -> tuple[Array, Array]:
            def of_rows(rows: Rows) -> tuple[Array, Array]:
                drawn = drawn_rows(rows[plate.name])
                here = _weighted({**first, plate.name: drawn}, weights)

                def terms(x: Array) -> Array:
                    row_terms = potential.with_row_terms(target.unravel(x), here, random.key(0))[1]
                    return row_terms[plate.name]

                def slope(direction: Array, x: Array) -> Array:
                    return jax.jvp(terms, (x,), (direction,))[1]

                def along(directions: tuple[Array, Array]) -> tuple[Array, Array]:
                    column, v = directions
                    return slope(column, center), jax.jvp(partial(slope, v), (center,), (v,))[1]

                sums = lax.map(along, (factor.T, alone.T), batch_size=_COLUMNS)
                # a term stands for N / n rows, and the n rows are n / N of all
                none = jnp.zeros((number, len(center)), center.dtype)
                z, b = (none.at[clusters[plate.name][drawn.numbers]].add(x.T) for x in sums)
                return z, -b

            return over_all_data(of_rows, [plate])

        sums = [of_plate(plate) for plate in target.model.plates]
        return jax.tree.map(lambda *x: sum(x), *sums)

    return run
