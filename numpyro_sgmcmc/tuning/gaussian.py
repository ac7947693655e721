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

from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.posterior.metric import (
    DenseMetric,
    GaussianMetric,
    IdentityMetric,
    from_covariance,
)
from numpyro_sgmcmc.posterior.potential import full_data_gradient
from numpyro_sgmcmc.posterior.target import Program, Target
from numpyro_sgmcmc.tuning.gauss_newton import (
    mean_prior,
    uses_gauss_newton,
    whitened_rows,
)
from numpyro_sgmcmc.tuning.gauss_newton_check import Comparison, compare, compared, excess
from numpyro_sgmcmc.tuning.hessians import (
    DRAWS,
    draws_of,
    evaluated,
    has_all_rows,
    normal_draws,
    whitened_hessian,
)
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

_FEW_DRAWS = 2  #: draws of the Gaussian where a pass takes long
_ROWS_FOR_EACH = 40  #: rows for each parameter of a Hessian
_NEWTON_STEPS = 20  #: the most Newton steps to the metric
_MORE_FOR_EACH = 200  #: the same of a Gauss-Newton matrix, which costs less
_MULTIPLICATIONS = 2e10  #: the most that its matrix product may take, unless there are fewer rows
_MORE_ROWS = 4  #: how many times more rows a Hessian gets where they prove to be too few

#: A Gauss-Newton step, in each coordinate, from which the next one would be shorter than
#: a tenth.
_LAST = 0.4

#: Ratio of an eigenvalue of the Hessian to the mean up to which the Gauss-Newton matrix is like it,
#: how many times it gets what it lacks, and the largest ratio after these.
_ALIKE, _CORRECTIONS, _UNLIKE = 1.5, 4, 2.5

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
    - **is_gauss_newton** - whether a Gauss-Newton matrix of the rows stood in for their Hessian.
    """

    metric: GaussianMetric
    passes: float
    curvature: float | None = None
    multimodal: bool = False
    converged: bool = True
    part: float = 1.0
    is_rough: bool = False
    flat: np.ndarray | None = None
    is_gauss_newton: bool = False


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
    Potential and gradient are of all data. Hessians are of 40 rows for each parameter, and of more
    where with these the steps do not become shorter. Groups whose latent variables are integrated
    out count once at most, and one of many rows counts for several.

    Above 12 parameters a Gauss-Newton matrix of up to 200 rows for each stands in for the Hessian
    (:mod:`~numpyro_sgmcmc.tuning.gauss_newton`), and two draws show the way until a step is shorter
    than a standard deviation. Products with the Hessian then say whether the two are alike. The
    matrix gets what it lacks along vectors whose eigenvalues are 1.5 times as large or as small as
    their mean, up to four times. If one is then 2.5 times as large or as small, the search goes on
    with Hessians.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param start: where the search starts, of independent coordinates.
    :raises ValueError: if the potential is not finite wherever the search looks.

    **References:**

    1. *The Variational Gaussian Approximation Revisited*, Manfred Opper and
       Cedric Archambeau (2009).
    """
    search, found = _Search(target, rng_key, start), start.metric
    wide = np.asarray(found.factor if isinstance(found, DenseMetric) else jnp.diag(found.scale))
    # the posterior of all rows is as much narrower
    center, factor = np.asarray(found.center), start.part**0.5 * wide
    best = search.by_gauss_newton(center, factor) if search.is_gauss_newton else None
    shortest = _LAST
    if best is None:
        search.begin_with_hessians()
        best, shortest = search.closest(center, factor), 0.1
    if best is None:
        raise ValueError(
            "Tuning found no metric: the potential is not finite near the centre that was found."
            " Give `metric=` a covariance, or reparametrise the model."
        )
    converged = has_converged(best, shortest)
    center, factor = moved(best, 1.0) if converged else (best.center, best.factor)
    factor = factor * search.usual**-0.5
    curvature = search.curvature if converged else float(np.max(np.abs(best.e)))
    return Gaussian(
        from_covariance(factor @ factor.T, center, search.dtype),
        search.passes,
        curvature,
        converged=converged,
        is_rough=start.is_rough,
        # in all of these steps it would have become wider
        flat=best.vectors[:, 0] if best.e[0] < _FLAT else None,
        is_gauss_newton=search.is_gauss_newton,
    )


class _Search:
    """Newton steps to the Gaussian closest to a posterior, and their cost."""

    def __init__(self, target: Target, rng_key: Array, start: Gaussian) -> None:
        self.target = target = target.keeping_programs()  # many steps of one program
        self.rng_key, self.is_rough = rng_key, start.is_rough
        self.dimension, self.dtype = target.model.dimension, start.metric.center.dtype
        minibatches = math.ceil(_ROWS_FOR_EACH * self.dimension / target.effective_batch_size)
        if any(plate.is_group for plate in target.model.plates):
            # groups are few and each costs as much as all of its rows: none of them twice
            epoch = max(plate.size / plate.subsample_size for plate in target.model.plates)
            minibatches = min(minibatches, math.ceil(epoch))
        self.few = max(DRAWS, minibatches)
        self.is_gauss_newton = start.is_gauss_newton
        self.all = math.ceil(1 / target.minibatch_share)
        self.minibatches = self.few
        if self.is_gauss_newton:
            more = min(_MORE_FOR_EACH, _MULTIPLICATIONS / self.dimension**3) / _ROWS_FOR_EACH
            self.minibatches = max(self.few, min(math.ceil(more * self.few), self.all))
        self.passes, self.before, self.draws = 0.0, math.inf, draws_in(target)
        self.usual, self.curvature = 1.0, 1.0
        self.missing = np.zeros((self.dimension, self.dimension))

    def fitted(self, center: np.ndarray, factor: np.ndarray) -> Fit | None:
        """The potential, its gradient and its Hessian, or what stands in for it, at a Gaussian."""
        facts, draws = (self.is_rough, self.is_gauss_newton), self.draws
        if has_all_rows(self.target):
            draws = draws_of(self.target, self.is_gauss_newton)
            hessians = self.minibatches = min(self.minibatches, draws)
            at = self.target, self.rng_key, *facts, center, factor
            (value, gradient, hessian), _ = evaluated(*at, count=1, hessians=hessians)
        else:
            there = (np.asarray(x, self.dtype) for x in (center, factor))
            numbers = np.int32(self.minibatches), np.int32(self.draws // 2)
            program = _metric_program(self.target, *facts)
            value, gradient, hessian = program(self.rng_key, *there, *numbers)
        hessian = np.asarray(hessian, np.float64) + factor.T @ self.missing @ factor
        fit = fit_of(center, factor, (value, gradient, hessian), self.dtype)
        # a Hessian-vector product counts as two gradients
        columns = 1 if self.is_gauss_newton else 2 * self.dimension
        self.passes += draws + columns * self.minibatches * self.target.minibatch_share
        if fit is not None:
            # steps that do not become shorter: these rows are not like all rows
            if is_near(fit) and distance_of(fit) > self.before / 2:
                self.minibatches = max(
                    self.minibatches, min(_MORE_ROWS * self.minibatches, self.all)
                )
            self.before = distance_of(fit)
        return fit

    def closest(self, center: Any, factor: Any, shortest: float = 0.1) -> Fit | None:
        """Newton steps from a Gaussian, to the last of them that was an advance."""
        return closest_gaussian(self.fitted, center, factor, _NEWTON_STEPS, shortest)

    def by_gauss_newton(self, center: np.ndarray, factor: np.ndarray) -> Fit | None:
        """The Gaussian by Gauss-Newton steps, or None where these are not like Newton steps."""
        # two draws show the way, and more of them the end of it
        self.draws = 2
        if (first := self.closest(center, factor, 1.0)) is None:
            return None
        is_near = has_converged(first, 1.0)
        center, factor = moved(first, 1.0) if is_near else (first.center, first.factor)
        self.draws, self.before = draws_in(self.target), math.inf
        best = self.closest(center, factor, _LAST)
        if best is None or not has_converged(best, _LAST):
            return None
        likeness = self.compared(best)
        for _ in range(_CORRECTIONS):
            if likeness.is_alike(_ALIKE):
                break
            if not likeness.is_alike(math.inf):
                return None
            inverse = np.linalg.inv(best.factor)
            self.missing = self.missing + inverse.T @ likeness.missing @ inverse
            best = self.closest(best.center, best.factor, _LAST)
            if best is None or not has_converged(best, _LAST):
                return None
            likeness = self.compared(best)
        self.usual, self.curvature = likeness.usual, likeness.curvature
        return best if likeness.is_alike(_UNLIKE) else None

    def compared(self, fit: Fit) -> Comparison:
        """Comparison of the Gauss-Newton matrix, with what it lacked so far, with the Hessian."""
        arrays = fit.center, fit.factor, fit.factor.T @ self.missing @ fit.factor
        there = [np.asarray(x, self.dtype) for x in arrays]
        program = self.target.compiled(_products, "products")

        def products(key: Array, start: Array, steps: int) -> Any:
            return program(self.rng_key, key, *there, np.int32(self.few), start, np.int32(steps))

        likeness = compare(products, self.rng_key, self.dimension, self.dtype)
        self.passes += likeness.gradients * self.few * self.target.minibatch_share
        return likeness

    def begin_with_hessians(self) -> None:
        """Hessians from here on."""
        self.is_gauss_newton, self.minibatches, self.missing = False, self.few, 0 * self.missing
        self.before, self.draws = math.inf, draws_in(self.target)


def prepare_metric(target: Target) -> None:
    """Compiles the program of :func:`find_metric`, if it has one, beside what is done next."""
    if has_all_rows(target):
        return
    dimension, dtype = target.model.dimension, target.model.dtype
    center, factor = np.zeros(dimension, dtype), np.zeros((dimension, dimension), dtype)
    _metric_program(target, False, uses_gauss_newton(target)).prepare(
        random.key(0), center, factor, np.int32(0), np.int32(1)
    )


def draws_in(target: Target) -> int:
    """At how many draws of the Gaussian all data are looked at."""
    return _FEW_DRAWS if target.model.drawn_plates else DRAWS


def _metric_program(target: Target, is_rough: bool, is_gauss_newton: bool) -> Program:
    """The mean potential of all data, its gradient and its Hessian, for :func:`find_metric`."""
    facts = is_rough, is_gauss_newton
    return target.compiled(partial(_evaluated, *facts), "metric", *facts)


def _evaluated(
    is_rough: bool,
    is_gauss_newton: bool,
    target: Target,
    rng_key: Array,
    center: Array,
    factor: Array,
    minibatches: Array,
    pairs: Array,
) -> tuple[Array, Array, Array]:
    draw_key, rows_key, model_key = random.split(rng_key, 3)
    potential, number = target.potential(IdentityMetric()), draws_in(target)
    draws = normal_draws(draw_key, len(center), center.dtype, number)
    # neighbours have opposite signs
    draws = draws.reshape(2, -1, len(center)).swapaxes(0, 1).reshape(number, -1)
    points = center + draws @ factor.T

    def whole(point: Array) -> tuple[Array, Array]:
        value, gradient = full_data_gradient(
            potential, target.model.plates, target.unravel(point), model_key
        )
        return value, ravel_pytree(gradient)[0]

    def added(k: Array, total: Any) -> Any:
        two = lax.dynamic_slice_in_dim(points, 2 * k, 2)
        values, gradients = jax.vmap(whole)(two)
        there = values.mean(0), gradients.mean(0), jnp.zeros_like(factor)
        if is_gauss_newton:
            there = *there[:2], mean_prior(target, factor, two, gradients, model_key)
        return jax.tree.map(lambda x, y: x + y / pairs, total, there)

    none = jnp.zeros((), center.dtype), jnp.zeros_like(center), jnp.zeros_like(factor)
    value, gradient, prior = lax.fori_loop(0, pairs, added, none)
    in_epochs = target._replace(scheme=SCHEMES["epochs"])

    def columns(k: Array, total: Array) -> Array:
        rows, key = in_epochs.rows(rows_key, k), random.fold_in(model_key, k)
        point = points[k % (2 * pairs)]
        return total + curvature(target, factor, point, rows, key)

    curvature: Callable = partial(whitened_hessian, is_rough=is_rough)
    if is_gauss_newton:
        curvature = whitened_rows
    total = lax.fori_loop(0, minibatches, columns, jnp.zeros_like(factor))
    value, gradient, hessian = target.mean((value, gradient, prior + total / minibatches))
    return value, gradient @ factor, hessian


def _products(
    target: Target,
    rng_key: Array,
    rows_key: Array,
    center: Array,
    factor: Array,
    missing: Array,
    minibatches: Array,
    start: Array,
    steps: Array,
) -> tuple[Array, Array, Array]:
    """
    Comparison of Hessian and Gauss-Newton matrix of some minibatches, each at one draw of a
    Gaussian.
    """
    draw_key, model_key = random.split(rng_key)
    number = draws_in(target)
    points = center + normal_draws(draw_key, len(center), center.dtype, number) @ factor.T
    in_epochs = target._replace(scheme=SCHEMES["epochs"])

    def product(vector: Array) -> Array:
        def added(k: Array, total: Array) -> Array:
            rows, key = in_epochs.rows(rows_key, k), random.fold_in(model_key, k)
            return total + excess(target, factor, points[k % number], rows, key, vector)

        total = lax.fori_loop(0, minibatches, added, jnp.zeros_like(vector))
        return target.mean(total) / minibatches - missing @ vector

    return compared(product, start, steps)
