# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
From a model and its data to a centre, a metric, a control variate and a step size.

Tuning is done once, before the chains start, and is the same for all of them:

1. **Centre** (:func:`find_center`): stochastic variational inference with NumPyro's
   ``AutoDiagonalNormal`` guide on minibatches. The variational mean exists also where the
   mode does not, as in hierarchical models.
2. **Metric** (:func:`find_metric`): the Gaussian :math:`q = N(c, L L^\\top)` that minimises
   :math:`\\mathrm{E}_q[U] - \\log |\\det L|`, by Newton steps on all data.
3. **Noise** (:func:`measure_noise`): the variance of the gradient's noise in the
   coordinates of the metric at draws of :math:`q`, with and without a control variate.
4. **Step size and friction**: what the method says these numbers ask for.
5. **Pilot** (:func:`run_pilot`): short chains, whose Stein matrix
   (:mod:`numpyro_sgmcmc.diagnostics`) must be the identity; if it is not, the step size is
   halved and the pilot repeated.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal
import optax

from numpyro_sgmcmc.covariance import Diagonal
from numpyro_sgmcmc.diagnostics import SteinReport, SteinSums, stein_report
from numpyro_sgmcmc.gradients import (
    Anchor,
    ControlVariate,
    ModelPotential,
    Potential,
    full_data_gradient,
    sub_batch_gradient,
)
from numpyro_sgmcmc.metric import (
    DenseMetric,
    DiagonalMetric,
    IdentityMetric,
    Metric,
    from_covariance,
)
from numpyro_sgmcmc.minibatch import MinibatchModel, Values, as_arrays, with_rows
from numpyro_sgmcmc.subsampling import SCHEMES, finite_population_factor

#: The metric is a full matrix up to this many parameters, diagonal above.
DENSE_BY_DEFAULT = 500

_CENTER_STARTS, _CENTER_STEPS, _LEARNING_RATE = 6, 2_000, 0.05

#: A mode matters if its potential is less than this above that of the best, and is another one
#: if there is this much more on the way.
_FAR_ABOVE, _BARRIER = 10.0, 5.0

#: Draws of the Gaussian, in pairs of opposite sign, and rows for each parameter of its Hessian.
_DRAWS, _ROWS_FOR_EACH = 8, 40
_NEWTON_STEPS = 20

_NOISE_DRAWS = 64

#: The pilot: chains, steps of each (more where steps are short), and halvings.
PILOT_CHAINS, _PILOT_STEPS, _HALVINGS = 8, 600, 5

#: In the order in which they come.
PHASES = ("centre", "metric", "noise", "pilot")


class NoiseLevel(NamedTuple):
    """
    What a method needs to know to choose its step size, in the coordinates of the metric,
    in which the curvature of the potential is about 1.

    - **mean** - mean of the variances of the gradient's noise over the coordinates.
    - **largest** - the largest of them.
    - **curvature** - the largest eigenvalue of the Hessian.
    """

    mean: float
    largest: float
    curvature: float


#: The relative error of the variances that methods with a known first-order error accept.
ACCEPTED_BIAS = 0.02


def whitened_step(noise: NoiseLevel) -> float:
    """
    The step size of a symmetric integrator: a half where the gradient has little noise, since
    a posterior is not quite Gaussian; no more than one over the standard deviation of the
    noise, and so that :math:`h^2 \\lambda \\le 1`.
    """
    return 1 / math.sqrt(max(4.0, noise.curvature, noise.largest))


class Tuning(NamedTuple):
    """
    What was found for a model and its data; ``kernel(model, tuning=...)`` uses it again.

    - **step_size** - step size, in units of a posterior standard deviation.
    - **friction** - friction, or None for methods that have none.
    - **metric** - the metric, in whose coordinates the sampler moves.
    - **start** - the Gaussian from which chains start, or None.
    - **anchor** - of the control variate, or None where plain minibatches are better.
    - **noise** - the noise of the gradient that is used.
    - **plain_noise** - the noise of the gradient of plain minibatches.
    - **passes** - the cost in passes over the data, by phase: gradients of all rows.
    - **halvings** - how often the pilot halved the step size.
    - **report** - the Stein matrix of the last pilot.
    - **multimodal** - whether the searches for the centre ended in different modes.
    """

    step_size: float
    friction: float | None
    metric: Metric
    start: DiagonalMetric | DenseMetric | None = None
    anchor: Anchor | None = None
    noise: NoiseLevel | None = None
    plain_noise: NoiseLevel | None = None
    passes: dict[str, float] = {}
    halvings: int = 0
    report: SteinReport | None = None
    multimodal: bool = False

    @property
    def problem(self) -> str | None:
        """What was wrong with the last pilot or the search for the centre, or None."""
        found = ["the posterior has several modes"] if self.multimodal else []
        pilot = None if self.report is None else self.report.problem()
        return "; ".join(found + ([pilot] if pilot else [])) or None

    def __str__(self) -> str:
        lines = [f"step size {self.step_size:.3g}"]
        if self.friction is not None:
            lines[0] += f", friction {self.friction:.3g}"
        lines[0] += f", {type(self.metric).__name__.removesuffix('Metric').lower()} metric"
        if self.noise is not None and self.plain_noise is not None:
            kind = "a control variate" if self.anchor is not None else "plain minibatches"
            lines.append(
                f"noise variance {self.noise.mean:.3g} with {kind}, {self.plain_noise.mean:.3g} of"
                " plain minibatches (in units of the curvature)"
            )
        if self.passes:
            phases = ", ".join(f"{name} {cost:.3g}" for name, cost in self.passes.items())
            lines.append(f"{sum(self.passes.values()):.3g} passes over the data: {phases}")
        if self.report is not None:
            lines.append(f"pilot: {self.report.problem() or self.report.summary()}")
        if self.multimodal:
            lines.append("several modes, of which the chains see one")
        return "\n".join(lines)


class Problem(NamedTuple):
    """A model with its data, and how rows are drawn."""

    view: MinibatchModel
    args: tuple
    kwargs: dict
    subsampling: str = "without_replacement"

    @classmethod
    def of(cls, view: MinibatchModel, args: tuple, kwargs: dict, subsampling: str) -> "Problem":
        args, kwargs = as_arrays((args, kwargs))
        return cls(view, args, kwargs, subsampling)

    def unravel(self, flat: Array) -> Values:
        """A flat vector as values of the latent sites."""
        zeros = {k: jnp.zeros(x.shape, x.dtype) for k, x in self.view.latents.items()}
        return ravel_pytree(zeros)[1](flat)

    def potential(self, metric: Metric, anchor: Anchor | None = None) -> Potential:
        """The minibatch potential in the coordinates of a metric."""
        plain = ModelPotential(self.view, self.unravel, metric, self.args, self.kwargs)
        return plain if anchor is None else ControlVariate(plain, anchor)

    def rows(self, rng_key: Array, step: Any = 0, scheme: str | None = None) -> dict[str, Array]:
        """The rows of a minibatch, drawn independently for each plate."""
        draw = SCHEMES[scheme or self.subsampling]
        return {
            plate.name: draw(
                random.fold_in(rng_key, k), jnp.asarray(step), plate.size, plate.subsample_size
            )
            for k, plate in enumerate(self.view.plates)
        }

    @property
    def minibatch_share(self) -> float:
        """Rows in a minibatch, as a part of all rows: the cost of a step in passes."""
        plates = self.view.plates
        return max((plate.subsample_size / plate.size for plate in plates), default=1.0)

    def compiled(self, function: Callable) -> Callable:
        """
        ``function(problem, *arguments)`` under ``jit``, with the data as arguments of the
        program and not as constants in it.
        """
        leaves, tree = jax.tree.flatten((self.args, self.kwargs))
        is_data = [isinstance(leaf, jax.Array) for leaf in leaves]

        @jax.jit
        def run(data: list[Array], *arguments: Any) -> Any:
            remaining = iter(data)
            merged = [
                next(remaining) if data_here else leaf
                for leaf, data_here in zip(leaves, is_data, strict=True)
            ]
            args, kwargs = jax.tree.unflatten(tree, merged)
            return function(self._replace(args=args, kwargs=kwargs), *arguments)

        data = [leaf for leaf, data_here in zip(leaves, is_data, strict=True) if data_here]
        return lambda *arguments: run(data, *arguments)


class Gaussian(NamedTuple):
    """
    An approximation of the posterior of the unconstrained parameters.

    - **metric** - centre :math:`c` and factor :math:`L`.
    - **curvature** - the largest eigenvalue of the Hessian in its coordinates.
    - **passes** - the cost in passes over the data.
    - **multimodal** - whether searches from different starts ended in different modes.
    """

    metric: DiagonalMetric | DenseMetric
    curvature: float
    passes: float
    multimodal: bool = False


def find_center(problem: Problem, rng_key: Array, init_strategy: Callable) -> Gaussian:
    """
    The Gaussian with independent coordinates that is closest to the posterior in the sense
    of variational inference,

    .. math::

        \\min_{c, s} \\; \\mathrm{E}_{\\theta \\sim N(c, s^2)} [U(\\theta)]
            - \\sum_j \\log s_j,

    by 2,000 steps of Adam on minibatches, with a learning rate that falls from 0.05 to 0: the
    best of six searches from different starts, since some models have poor local optima.

    :param problem: the model with its data.
    :param rng_key: a random key.
    :param init_strategy: where the search starts, a per-site initialization function."""
    schedule = optax.cosine_decay_schedule(_LEARNING_RATE, _CENTER_STEPS)

    def run(problem: Problem, rng_key: Array) -> tuple[Array, ...]:
        start_key, rows_key = random.split(rng_key)

        def one(init_key: Array) -> tuple[Array, Array, Array]:
            # all in one program: of itself, `svi.init` compiles many small ones
            guide = AutoDiagonalNormal(
                with_rows(problem.view), init_loc_fn=init_strategy, init_scale=0.01
            )
            svi = SVI(with_rows(problem.view), guide, optax.adam(schedule), Trace_ELBO())

            def step(state: Any, i: Array) -> tuple[Any, Array]:
                rows = problem.rows(rows_key, i)
                return svi.update(state, rows, *problem.args, **problem.kwargs)

            state = svi.init(init_key, problem.rows(rows_key), *problem.args, **problem.kwargs)
            state, losses = lax.scan(step, state, jnp.arange(_CENTER_STEPS))
            posterior = guide.get_posterior(svi.get_params(state))
            return posterior.loc, posterior.scale, losses[-_CENTER_STEPS // 10 :].mean()

        # with the same rows, so that the losses can be compared
        centers, scales, losses = lax.map(one, random.split(start_key, _CENTER_STARTS))
        best = jnp.nanargmin(jnp.where(jnp.isfinite(losses), losses, jnp.nan))
        energies = _energies_between(problem, centers, best)
        return centers[best], scales[best], losses[best], energies

    center, scale, loss, energies = problem.compiled(run)(rng_key)
    if not (np.all(np.isfinite(center)) and np.isfinite(loss)):
        raise ValueError(
            "Tuning found no centre: variational inference with an AutoDiagonalNormal guide did not"
            " converge (the loss is not finite). Start it near the posterior with"
            " `init_strategy=init_to_value(...)`, standardise the data, or give `step_size` and"
            " `friction` yourself."
        )
    passes = _CENTER_STARTS * (_CENTER_STEPS * problem.minibatch_share + 5)
    several = _are_modes(np.asarray(energies))
    return Gaussian(DiagonalMetric(center, scale), math.nan, passes, several)


def _energies_between(problem: Problem, centers: Array, best: Array) -> Array:
    """The potential of all data on the way from the best centre to each of the others."""
    potential, view = problem.potential(IdentityMetric()), problem.view

    def at(point: Array) -> Array:
        return full_data_gradient(potential, view.plates, problem.unravel(point), random.key(0))[0]

    way = jnp.linspace(0, 1, 5)[:, None, None]
    points = centers[best] + way * (centers - centers[best])
    return lax.map(at, points.reshape(-1, points.shape[-1])).reshape(5, -1)


def _are_modes(energies: np.ndarray) -> bool:
    """Whether one of the other centres is as good as the best one, with a barrier between."""
    higher = energies[-1] - energies[0]
    barrier = energies[1:-1].max(axis=0) - np.maximum(energies[0], energies[-1])
    return bool(np.any((higher < _FAR_ABOVE) & (barrier > _BARRIER)))


def find_metric(problem: Problem, rng_key: Array, start: Gaussian) -> Gaussian:
    """
    The Gaussian closest to the posterior, :math:`q = N(c, L L^\\top)` with a full matrix.
    With fixed normal draws :math:`\\zeta_s` in pairs of opposite sign,

    .. math::

        f(c, L) = \\frac1S \\sum_s U(c + L \\zeta_s) - \\log |\\det L|

    is minimised by Newton steps in the coordinates of the current :math:`L`: with the mean
    gradient :math:`g` and the mean Hessian :math:`H = V \\operatorname{diag}(e) V^\\top` there,

    .. math::

        c \\leftarrow c - t \\, L V \\operatorname{diag}(1 / |e|) V^\\top g, \\qquad
        L \\leftarrow L V \\operatorname{diag}(|e|^{-t / 2}) V^\\top,

    shorter (:math:`t < 1`) where :math:`f` would rise. Potential and gradient are of all
    data, the Hessian of 40 rows for each parameter.

    :param problem: the model with its data.
    :param rng_key: a random key.
    :param start: where the search starts, of independent coordinates.
    """
    assert isinstance(start.metric, DiagonalMetric)
    view = problem.view
    dimension, dtype = view.dimension, start.metric.center.dtype
    draw_key, rows_key, model_key = random.split(rng_key, 3)
    half = random.normal(draw_key, (_DRAWS // 2, dimension), dtype)
    draws = jnp.concatenate([half, -half])
    share = problem.minibatch_share
    smallest = min((plate.subsample_size for plate in view.plates), default=1)
    minibatches = max(_DRAWS, math.ceil(_ROWS_FOR_EACH * dimension / smallest))
    if not view.plates:
        minibatches = _DRAWS

    def evaluate(problem: Problem, center: Array, factor: Array) -> tuple[Array, Array, Array]:
        potential = problem.potential(IdentityMetric())
        points = center + draws @ factor.T

        def whole(point: Array) -> tuple[Array, Array]:
            value, gradient = full_data_gradient(
                potential, view.plates, problem.unravel(point), model_key
            )
            return value, ravel_pytree(gradient)[0]

        values, gradients = jax.vmap(whole)(points)

        def columns(total: Array, k: Array) -> tuple[Array, None]:
            rows = problem.rows(rows_key, k, "epochs")

            def gradient(point: Array) -> Array:
                return jax.grad(
                    lambda x: potential(problem.unravel(x), rows, random.fold_in(model_key, k))
                )(point)

            _, product = jax.linearize(gradient, points[k % _DRAWS])
            return total + jax.vmap(product, 1, 1)(factor), None

        total, _ = lax.scan(columns, jnp.zeros_like(factor), jnp.arange(minibatches))
        return values.mean(), gradients.mean(0) @ factor, factor.T @ total / minibatches

    evaluated = problem.compiled(evaluate)
    center = np.asarray(start.metric.center, np.float64)
    factor = np.diag(np.asarray(start.metric.scale, np.float64))
    best, passes, length = None, 0.0, 1.0
    trial = (center, factor)
    for _ in range(_NEWTON_STEPS):
        found = evaluated(*(jnp.asarray(x, dtype) for x in trial))
        value, gradient, hessian = (np.asarray(x, np.float64) for x in found)
        # a Hessian-vector product counts as two gradients
        passes += _DRAWS + 2 * dimension * minibatches * share
        finite = (
            np.isfinite(value) and np.all(np.isfinite(gradient)) and np.all(np.isfinite(hessian))
        )
        objective = float(value) - float(np.linalg.slogdet(trial[1])[1]) if finite else math.inf
        # the potential of many rows is a sum with an error of its own
        slack = 0.1 + 4 * jnp.finfo(dtype).eps * abs(float(value)) if finite else 0.0
        if finite and (best is None or objective <= best[0] + slack):
            e, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
            best = (objective, *trial, gradient, e, vectors)
            step = _newton_step(gradient, e, vectors)
            if (
                length == 1.0
                and np.max(np.abs(step)) < 0.1
                and np.max(np.abs(np.log(np.abs(e)))) < 0.7
            ):
                break
            length = min(1.0, 2 * length)
        elif best is None:  # the draws reach too far
            factor = factor / 4
            trial = (center, factor)
            continue
        else:
            length /= 4
        trial = _moved(best, length)
    if best is None:
        raise ValueError(
            "Tuning found no metric: the potential is not finite near the centre that variational"
            " inference found. Give `metric=` a covariance, or reparametrise the model."
        )
    # the last Newton step is not evaluated: it is shorter than a tenth of a standard deviation
    center, factor = _moved(best, length)
    metric = from_covariance(factor @ factor.T, center, dtype)
    curvature = float(np.max(np.abs(best[4]))) if length < 1 else 1.0
    return Gaussian(metric, curvature, passes)


def _newton_step(gradient: np.ndarray, e: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """In the current coordinates, and no longer than a sphere that holds the Gaussian."""
    step = -vectors @ ((vectors.T @ gradient) / np.clip(np.abs(e), 0.04, None))
    longest = 3 * math.sqrt(len(step)) + 3
    return step * min(1.0, longest / max(float(np.linalg.norm(step)), 1e-30))


def _moved(best: tuple, length: float) -> tuple[np.ndarray, np.ndarray]:
    """The centre and the factor after a part of the Newton step."""
    _, center, factor, gradient, e, vectors = best
    scale = np.clip(np.abs(e), 0.04, None) ** (-length / 2)
    moved = center + length * factor @ _newton_step(gradient, e, vectors)
    return moved, factor @ ((vectors * scale) @ vectors.T)


def anchor_at(potential: Potential, view: MinibatchModel, values: Values) -> Anchor:
    """The anchor at some values, inside a compiled program."""
    return Anchor(values, *full_data_gradient(potential, view.plates, values, random.key(0)))


def measure_noise(
    problem: Problem, rng_key: Array, gaussian: Gaussian, metric: Metric, controlled: bool
) -> tuple[NoiseLevel, NoiseLevel | None, Anchor | None]:
    """
    The variance of the gradient's noise in the coordinates of a metric, the mean over 64
    draws of the Gaussian: of plain minibatches, and with a control variate whose anchor is the
    centre, which takes a pass over all data.

    :param problem: the model with its data.
    :param rng_key: a random key.
    :param gaussian: an approximation of the posterior.
    :param metric: the metric of the sampler.
    :param bool controlled: whether to look at a control variate.
    :return: the noise of plain minibatches, and with the control variate, and its anchor.
    """
    factors = {
        plate.name: finite_population_factor(problem.subsampling, plate.size, plate.subsample_size)
        for plate in problem.view.plates
    }

    def run(problem: Problem, draws: DiagonalMetric | DenseMetric, metric: Metric) -> Any:
        center, anchor = draws.center, None
        kinds = [problem.potential(metric)]
        if controlled:
            plain = problem.potential(IdentityMetric())
            anchor = anchor_at(plain, problem.view, problem.unravel(center))
            kinds.append(problem.potential(metric, anchor))

        def one(total: Any, key: Array) -> Any:
            point_key, rows_key, model_key = random.split(key, 3)
            normal = random.normal(point_key, center.shape, center.dtype)
            point = metric.coordinates(draws.values(normal))
            rows = problem.rows(rows_key)
            seen = [
                sub_batch_gradient(kind, rows, model_key, factors, Diagonal())(point).noise
                for kind in kinds
            ]
            return jax.tree.map(jnp.add, total, seen), None

        zeros = [jnp.zeros_like(center) for _ in kinds]
        total, _ = lax.scan(one, zeros, random.split(rng_key, _NOISE_DRAWS))
        return [variances / _NOISE_DRAWS for variances in total], anchor

    variances, anchor = problem.compiled(run)(gaussian.metric, metric)
    curvature = gaussian.curvature * _stretch(gaussian.metric, metric)
    levels = [NoiseLevel(float(v.mean()), float(v.max()), curvature) for v in variances]
    return levels[0], levels[1] if controlled else None, anchor


def _stretch(gaussian: DiagonalMetric | DenseMetric, metric: Metric) -> float:
    """The largest eigenvalue of the precision of the Gaussian in the coordinates of a metric."""
    if metric is gaussian:
        return 1.0
    size, dtype = gaussian.center.shape[0], gaussian.center.dtype
    if isinstance(gaussian, DiagonalMetric) and not isinstance(metric, DenseMetric):
        return float(jnp.max(jnp.square(metric.direction(jnp.ones(size, dtype)) / gaussian.scale)))

    def column(unit: Array) -> Array:
        return gaussian.coordinates(gaussian.center + metric.direction(unit))

    matrix = np.asarray(jax.vmap(column)(jnp.eye(size, dtype=dtype)), np.float64)
    return float(np.linalg.norm(matrix, 2) ** 2)


class Choices(NamedTuple):
    """
    What is to be found, and what is given.

    - **step_size**, **friction** - given values, or None.
    - **metric** - a given metric, ``"diagonal"``, ``"dense"``, or None for what suits the
      number of parameters.
    - **gradient** - ``"auto"``, ``"minibatch"`` or ``"control_variate"``.
    - **init_strategy** - where the search for the centre starts.
    """

    step_size: float | None
    friction: float | None
    metric: Metric | str | None
    gradient: str
    init_strategy: Callable


#: From the noise of the gradient to step size and friction (None if the method has none).
Suggestion = Callable[[NoiseLevel], tuple[float, float | None]]

#: From a tuning to a function that runs short chains with a step size and a key.
Pilot = Callable[[Tuning], Callable[[float, Array], SteinSums]]


def find_tuning(
    problem: Problem,
    rng_key: Array,
    choices: Choices,
    suggest: Suggestion,
    pilot: Pilot,
    report: Callable[[str], None] = lambda phase: None,
) -> Tuning:
    """
    All phases, one after the other.

    :param problem: the model with its data.
    :param rng_key: a random key.
    :param choices: what is to be found.
    :param suggest: the method's step size and friction for a level of noise.
    :param pilot: how to run the method.
    :param report: is told the name of each phase when it begins.
    """
    center_key, metric_key, noise_key, pilot_key = random.split(rng_key, 4)
    passes: dict[str, float] = {}
    report("centre")
    gaussian = find_center(problem, center_key, choices.init_strategy)
    passes["centre"], multimodal = gaussian.passes, gaussian.multimodal
    if problem.view.dimension <= DENSE_BY_DEFAULT or choices.metric == "dense":
        report("metric")
        gaussian = find_metric(problem, metric_key, gaussian)
        passes["metric"] = gaussian.passes
    metric = _chosen(choices.metric, gaussian.metric)
    report("noise")
    controls = choices.gradient != "minibatch" and bool(problem.view.plates)
    plain, controlled, anchor = measure_noise(problem, noise_key, gaussian, metric, controls)
    passes["noise"] = controls + _NOISE_DRAWS * problem.minibatch_share * (3 if controls else 1)
    noise = plain
    if controlled is not None:
        if choices.gradient == "control_variate" or controlled.mean < plain.mean / 2:
            noise = controlled
        else:
            anchor = None
    step_size, friction = suggest(noise)
    tuning = Tuning(
        choices.step_size or step_size,
        choices.friction or friction,
        metric,
        gaussian.metric,
        anchor,
        noise,
        plain,
        passes,
        multimodal=multimodal,
    )
    if choices.step_size is not None:
        return tuning
    report("pilot")
    run = pilot(tuning)
    length = pilot_steps(noise)
    for halvings in range(_HALVINGS + 1):
        found = stein_report(run(tuning.step_size, random.fold_in(pilot_key, halvings)))
        passes["pilot"] = (
            (halvings + 1)
            * PILOT_CHAINS
            * length
            * problem.minibatch_share
            * (1 if anchor is None else 2)
        )
        tuning = tuning._replace(halvings=halvings, report=found)
        if found is None or found.problem() is None or halvings == _HALVINGS:
            return tuning
        tuning = tuning._replace(step_size=tuning.step_size / 2)
    return tuning


def pilot_steps(noise: NoiseLevel) -> int:
    """Steps of each chain of a pilot: independent draws take more where there is more noise."""
    return int(_PILOT_STEPS * min(max(1.0, noise.mean / 4), 10.0))


def _chosen(metric: Metric | str | None, found: DiagonalMetric | DenseMetric) -> Metric:
    """The metric with the centre that was found."""
    if metric == "diagonal" and isinstance(found, DenseMetric):
        # the marginal standard deviations
        return DiagonalMetric(found.center, jnp.sqrt(jnp.sum(found.factor**2, axis=1)))
    if metric is None or isinstance(metric, str):
        return found
    return metric if isinstance(metric, IdentityMetric) else metric._replace(center=found.center)
