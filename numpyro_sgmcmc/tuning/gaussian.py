# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Gaussian approximations of a posterior: where it is, and how wide in which direction."""

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.drawn_rows import drawn_rows
from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.posterior.metric import (
    DenseMetric,
    GaussianMetric,
    IdentityMetric,
    from_covariance,
)
from numpyro_sgmcmc.posterior.potential import Rows, full_data_gradient
from numpyro_sgmcmc.posterior.target import Program, Target
from numpyro_sgmcmc.tuning.newton import (
    Fit,
    closest_gaussian,
    distance_of,
    fit_of,
    has_converged,
    is_near,
    moved,
)

FAR_ABOVE = 10.0  #: potential above the best mode at which another one does not matter
_BARRIER = 5.0  #: potential on the way between two points that are different modes

DRAWS = 8  #: draws of the Gaussian, in pairs of opposite sign
_FEW_DRAWS = 2  #: the same where a pass takes long
_ROWS_FOR_EACH = 40  #: rows for each parameter of a Hessian
_NEWTON_STEPS = 20  #: the most Newton steps to the metric
_MORE_ROWS = 4  #: how many times more rows a Hessian gets where they prove to be too few

#: The second derivatives of a rough potential are less than this part of those between draws.
_ROUGH = 0.1

#: An eigenvalue of the Hessian in the coordinates of the Gaussian that is none.
_FLAT = 0.05


class Gaussian(NamedTuple):
    """
    An approximation of the posterior of the unconstrained parameters.

    - **metric** - centre :math:`c` and factor :math:`L`.
    - **passes** - the cost in passes over the data.
    - **curvature** - the largest eigenvalue of the Hessian in its coordinates, or None where
      none was made.
    - **multimodal** - whether searches from different starts ended in different modes.
    - **converged** - whether the search ended where it should.
    - **part** - of which part of the rows the posterior is.
    - **is_rough** - whether second derivatives say nothing of its shape.
    - **flat** - a direction in its coordinates along which nothing changes, or None.
    """

    metric: GaussianMetric
    passes: float
    curvature: float | None = None
    multimodal: bool = False
    converged: bool = True
    part: float = 1.0
    is_rough: bool = False
    flat: np.ndarray | None = None


def are_modes(energies: np.ndarray) -> np.ndarray:
    """Which of the other centres are as good as the first one, with a barrier between."""
    higher = energies[-1] - energies[0]
    barrier = energies[1:-1].max(axis=0) - np.maximum(energies[0], energies[-1])
    return (higher < FAR_ABOVE) & (barrier > _BARRIER)


def find_metric(target: Target, rng_key: Array, start: Gaussian) -> Gaussian:
    """
    The Gaussian closest to the posterior, :math:`q = N(c, L L^\\top)` with a full matrix.
    With fixed normal draws :math:`\\zeta_s` in pairs of opposite sign,

    .. math::

        f(c, L) = \\frac1S \\sum_s U(c + L \\zeta_s) - \\log |\\det L|

    is minimised by the steps of :mod:`~numpyro_sgmcmc.tuning.newton`.
    Potential and gradient are of all data, the Hessian of 40 rows for each parameter, or of more
    where with these the steps do not become shorter; of groups whose latent variables are
    integrated out, of each once at most, and one of many rows counts for several.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param start: where the search starts, of independent coordinates.
    :raises ValueError: if the potential is not finite wherever the search looks.

    **References:**

    1. *The Variational Gaussian Approximation Revisited*, Manfred Opper and
       Cedric Archambeau (2009).
    """
    view = target.model
    dimension, dtype = view.dimension, start.metric.center.dtype
    minibatches = math.ceil(_ROWS_FOR_EACH * dimension / target.effective_batch_size)
    if any(plate.points > 1 for plate in view.plates):
        # groups are few and each costs as much as all of its rows: none of them twice
        epoch = max(plate.size / plate.subsample_size for plate in view.plates)
        minibatches = min(minibatches, math.ceil(epoch))
    minibatches = max(DRAWS, minibatches)
    number, compiled = draws_in(target), _metric_program(target, start.is_rough)

    passes, before = 0.0, math.inf

    def fitted(center: np.ndarray, factor: np.ndarray) -> Fit | None:
        nonlocal minibatches, passes, before
        there = (np.asarray(x, dtype) for x in (center, factor))
        found = compiled(rng_key, *there, np.int32(minibatches))
        # a Hessian-vector product counts as two gradients
        passes += number + 2 * dimension * minibatches * target.minibatch_share
        fit = fit_of(center, factor, found, dtype)
        if fit is not None:
            # steps that do not become shorter: these rows are not like all rows
            if is_near(fit) and distance_of(fit) > before / 2:
                minibatches = min(_MORE_ROWS * minibatches, math.ceil(1 / target.minibatch_share))
            before = distance_of(fit)
        return fit

    found = start.metric
    factor = np.asarray(found.factor if isinstance(found, DenseMetric) else jnp.diag(found.scale))
    best = closest_gaussian(fitted, found.center, factor, _NEWTON_STEPS)
    if best is None:
        raise ValueError(
            "Tuning found no metric: the potential is not finite near the centre that was found."
            " Give `metric=` a covariance, or reparametrise the model."
        )
    converged = has_converged(best)
    center, factor = moved(best, 1.0) if converged else (best.center, best.factor)
    metric = from_covariance(factor @ factor.T, center, dtype)
    curvature = 1.0 if converged else float(np.max(np.abs(best.e)))
    # in all of these steps it would have become wider
    flat = best.vectors[:, 0] if best.e[0] < _FLAT else None
    return Gaussian(
        metric, passes, curvature, converged=converged, is_rough=start.is_rough, flat=flat
    )


def prepare_metric(target: Target) -> None:
    """Compiles the program of :func:`find_metric` beside what is done next."""
    dimension, dtype = target.model.dimension, target.model.dtype
    center, factor = np.zeros(dimension, dtype), np.zeros((dimension, dimension), dtype)
    _metric_program(target, False).prepare(random.key(0), center, factor, np.int32(0))


def draws_in(target: Target) -> int:
    """At how many draws of the Gaussian all data are looked at."""
    return _FEW_DRAWS if target.model.drawn_plates else DRAWS


def _metric_program(target: Target, is_rough: bool) -> Program:
    """The mean potential of all data, its gradient and its Hessian, for :func:`find_metric`."""
    return target.compiled(partial(_evaluated, is_rough), "metric", is_rough)


def _evaluated(
    is_rough: bool,
    target: Target,
    rng_key: Array,
    center: Array,
    factor: Array,
    minibatches: Array,
) -> tuple[Array, Array, Array]:
    draw_key, rows_key, model_key = random.split(rng_key, 3)
    potential, number = target.potential(IdentityMetric()), draws_in(target)
    draws = normal_draws(draw_key, len(center), center.dtype, number)
    points = center + draws @ factor.T

    def whole(point: Array) -> tuple[Array, Array]:
        value, gradient = full_data_gradient(
            potential, target.model.plates, target.unravel(point), model_key
        )
        return value, ravel_pytree(gradient)[0]

    values, gradients = jax.vmap(whole)(points)
    in_epochs = target._replace(scheme=SCHEMES["epochs"])

    def columns(k: Array, total: Array) -> Array:
        rows, key = in_epochs.rows(rows_key, k), random.fold_in(model_key, k)
        point = points[k % number]
        return total + whitened_hessian(target, factor, point, rows, key, is_rough)

    total = lax.fori_loop(0, minibatches, columns, jnp.zeros_like(factor))
    values, gradients, total = target.mean((values, gradients, total))
    return values.mean(), gradients.mean(0) @ factor, total / minibatches


def normal_draws(rng_key: Array, dimension: int, dtype: Any, number: int = DRAWS) -> Array:
    """The draws :math:`\\zeta_s`, shape ``(8, d)`` or of another number."""
    half = random.normal(rng_key, (number // 2, dimension), dtype)
    return jnp.concatenate([half, -half])


def hessian_times(
    factor: Array, potential: Callable[[Array], Array], point: Array, is_rough: bool = False
) -> Array:
    """
    :math:`\\nabla^2 U(\\theta) L`, column by column, shape ``(d, d)``; of a rough potential, whose
    second derivatives say nothing of its shape, differences of gradients on the scale of the
    posterior,

    .. math:: \\nabla U(\\theta + \\tfrac12 L e_j) - \\nabla U(\\theta - \\tfrac12 L e_j) .
    """
    slope = jax.grad(potential)
    if is_rough:
        return jax.vmap(lambda v: slope(point + v / 2) - slope(point - v / 2), 1, 1)(factor)
    _, product = jax.linearize(slope, point)
    return jax.vmap(product, 1, 1)(factor)


def whitened_hessian(
    target: Target,
    factor: Array,
    point: Array,
    rows: Rows,
    rng_key: Array,
    is_rough: bool = False,
) -> Array:
    """
    :math:`L^\\top \\nabla^2 \\tilde U(\\theta) L` of a minibatch. Of groups whose latent variables
    are integrated out by draws the second derivatives have much more noise than the first ones, and
    are replaced by those that they have in expectation,

    .. math:: \\sum_g c_g (s_g - \\bar s)(s_g - \\bar s)^\\top ,
        \\qquad s_g = \\nabla \\log p(y_g \\mid \\theta) ,

    with :math:`c_g` the number of groups that each stands for.

    :param target: the model with its data.
    :param factor: :math:`L`, shape ``(d, d)``.
    :param point: :math:`\\theta`, one flat vector.
    :param rows: the rows of the minibatch.
    :param rng_key: the key of the model.
    :param bool is_rough: as for :func:`hessian_times`.

    **References:**

    1. *Estimation and Inference in Nonlinear Structural Models*, Ernst Berndt, Bronwyn Hall,
       Robert Hall and Jerry Hausman (1974).
    """
    drawn = target.model.drawn_plates
    smooth = target._replace(model=target.model.with_rule("none")) if drawn else target

    def potential(x: Array) -> Array:
        values = target.unravel(x)
        return smooth.potential(IdentityMetric())(values, rows, rng_key)

    found = factor.T @ hessian_times(factor, potential, point, is_rough)
    if not drawn:
        return found

    def terms(x: Array) -> dict[str, Array]:
        values = target.unravel(x)
        _, found = target.potential(IdentityMetric()).with_row_terms(values, rows, rng_key)
        return {plate.name: found[plate.name] for plate in drawn}

    _, along = jax.linearize(terms, point)
    for plate in drawn:
        scores = jax.vmap(along, 1, 1)(factor)[plate.name]
        # each is multiplied by the number of rows that it stands for
        weights = drawn_rows(rows[plate.name]).weights
        counts = plate.size / len(scores) * (jnp.ones(len(scores)) if weights is None else weights)
        scores = scores - scores.mean(axis=0)
        found = found + (scores / counts[:, None]).T @ scores
    return found


def looks_rough(draws: Array, gradients: Array, trace: Array) -> Array:
    """
    True if gradients change much more between draws than the Hessian says.

    Gradients of absolute values do. The mean :math:`\\mathrm{E} \\, \\zeta^\\top g(\\zeta)` is the
    trace of a right Hessian.

    :param draws: :math:`\\zeta_s`, shape ``(8, d)``.
    :param gradients: there, in the coordinates, shape ``(8, d)``.
    :param trace: of the mean Hessian in the coordinates.
    """
    return trace < _ROUGH * jnp.sum(draws * gradients) / len(draws)
