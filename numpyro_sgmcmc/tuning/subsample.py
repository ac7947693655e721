# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Tuning on a sample of the rows, for data where a pass over all rows is slow.

Centre, metric and noise come from a sample of :math:`M` rows, each of which stands for :math:`N /
M` rows. The posterior of the sample has the width of the posterior of all rows, and lies
:math:`\\sqrt{N / M}` standard deviations away. One pass over all rows gives the gradient there. A
Newton step with the Hessian of the sample then removes all but a few percent of that distance. The
next pass, at the new point, gives the anchor of the control variate and the remaining distance. In
the coordinates :math:`\\theta = c + L \\zeta` of the metric the Hessian is nearly the identity, and
the distance is

.. math:: \\delta = -L^\\top \\nabla U(c) .

The sample has about this error in every direction. If too few rows of the sample determine a
direction, its Hessian and its noise are wrong there, and the step does not come near the mode. The
tuning then takes all rows.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.drawn_rows import rows_of
from numpyro_sgmcmc.data.rows_on_disk import on_disk, replaced
from numpyro_sgmcmc.data.sharding import found_shards
from numpyro_sgmcmc.posterior.control_variate import Anchor
from numpyro_sgmcmc.posterior.local_latents import Marginal
from numpyro_sgmcmc.posterior.metric import DenseMetric
from numpyro_sgmcmc.posterior.model import Values, unremarkable_values
from numpyro_sgmcmc.posterior.potential import ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian

_ROWS = 2**18  #: rows of a sample
_BYTES = 2**28  #: the most bytes of a sample
_ROWS_FOR_EACH = 200  #: the fewest rows for each parameter
_FEWEST_TIMES = 4  #: smallest ratio of all rows to sample rows

#: Number of neighbouring rows that a sample reads at once.
_STRETCH = 64

NEAR = 0.5  #: largest distance of an anchor from the mode in a coordinate, in standard deviations
_MOST_PASSES = 4  #: largest number of passes to get there

#: Largest remaining part of the distance after a Newton step, if the sample is large enough.
_SHORTENED = 0.25

_FEW = 64  #: number of rows that are compared between the sample and all rows
_SAME = 1e-3  #: relative rounding error of this comparison


def sample_of(target: Target) -> Target | None:
    """
    The model with a sample of the rows in memory, or None if the tuning should take all rows.

    It is None if the rows are in the memory of one device, if there are not many more rows than in
    a sample, or if the contribution of a row may depend on other rows.

    :param target: the model with its data.
    """
    view = target.model
    sources = on_disk((target.args, target.kwargs))
    if target.shards is None and not sources:
        return None
    if len(view.plates) != 1 or isinstance(view.model, Marginal):
        return None
    if not all(rows.is_interchangeable for rows in target.kinds.values()):
        return None
    (plate,) = view.plates
    bytes_of_a_row = max((source.row_bytes for source in sources), default=4)
    rows = min(_ROWS, _BYTES // bytes_of_a_row) // target.parts
    rows = max(rows, 2 * plate.subsample_size) // _STRETCH * _STRETCH
    is_enough = rows * target.parts >= _ROWS_FOR_EACH * view.dimension
    if not is_enough or plate.size < _FEWEST_TIMES * rows:
        return None
    starts = np.random.default_rng(0).choice(plate.size // _STRETCH, rows // _STRETCH, False)
    numbers = (np.sort(starts)[:, None] * _STRETCH + np.arange(_STRETCH)).ravel()
    sample = _with(target, numbers)
    return sample if _are_alike(target, sample, numbers) else None


def share_of(sample: Target) -> float:
    """The share of the rows in a sample."""
    (plate,) = sample.model.plates
    assert plate.of is not None
    return plate.size / plate.of


def _with(target: Target, numbers: np.ndarray) -> Target:
    """The model with these rows of each device in the place of all rows."""
    view, shards, arguments = target.model, target.shards, (target.args, target.kwargs)
    (plate,) = view.plates
    read = [
        source.sampled(numbers) if place == plate.name else source
        for source, place in zip(on_disk(arguments), view.on_disk, strict=True)
    ]
    leaves, tree = jax.tree.flatten(arguments)
    for k, leaf in enumerate(leaves):
        if shards is not None and shards.spread[k]:
            leaves[k] = shards.taken(leaf, numbers)
        elif shards is None and isinstance(leaf, Array) and leaf.shape[:1] == (plate.size,):
            leaves[k] = leaf[numbers]
    args, kwargs = replaced(jax.tree.unflatten(tree, leaves), read)
    left = tuple(place for place in view.on_disk if place != plate.name)
    row_shards = None if shards is None else found_shards(args, kwargs)
    new = view.sampled(len(numbers), left)
    return target._replace(model=new, args=args, kwargs=kwargs, shards=row_shards)


def _are_alike(target: Target, sample: Target, numbers: np.ndarray) -> bool:
    """True if some rows of the sample contribute as they do among all rows."""
    (plate,) = target.model.plates
    first = numbers[:_FEW]

    def run(target: Target, z: Values, rows: Any) -> Any:
        data = {plate.name: rows}, random.key(0), target.args, target.kwargs
        return target.mean(target.model.potential_and_row_terms(z, *data))

    z, looks = unremarkable_values(target.model), []
    for one, rows in ((target, first), (sample, np.arange(len(first)))):
        size = one.model.plates[0].size
        try:
            energy, terms = one.compiled(run)(z, rows_of(rows, size))
        except (TypeError, ValueError):
            return False  # a model with a fixed number of rows
        looks.append([np.asarray(x, np.float64) for x in (energy, terms[plate.name])])
    size = np.abs(looks[0][0]) + np.nansum(np.abs(looks[0][1]))
    return not any(
        np.nanmax(np.abs(x - y)) > _SAME * size / n
        for (x, y), n in zip(zip(*looks, strict=True), (1, len(first)), strict=True)
    )


class Point(NamedTuple):
    """
    The contributions of all rows at the centre of a Gaussian.

    - **gaussian** - the Gaussian with this centre.
    - **anchor** - the anchor at the centre.
    - **slope** - :math:`L^\\top \\nabla U`, shape (d,).
    """

    gaussian: Gaussian
    anchor: Anchor
    slope: np.ndarray

    @property
    def distance(self) -> float:
        """The distance from the mode, in standard deviations along the worst coordinate."""
        return float(np.max(np.abs(self.slope)))

    @property
    def at_the_mode(self) -> Gaussian:
        """The Gaussian moved by a Newton step."""
        metric = self.gaussian.metric
        assert isinstance(metric, DenseMetric)
        center = np.asarray(metric.center, np.float64) - np.asarray(metric.factor) @ self.slope
        moved = metric._replace(center=jnp.asarray(center, metric.center.dtype))
        return self.gaussian._replace(metric=moved)


def point_at(target: Target, gaussian: Gaussian, order: int = 1) -> Point:
    """
    Evaluate all rows at the centre of a Gaussian, by one pass.

    :param target: the model with all of its data.
    :param gaussian: the Gaussian.
    :param int order: the order of the anchor.
    """
    program = target.compiled(partial(_at_center, order), "all rows", order)
    anchor, slope = program(gaussian.metric)
    return Point(gaussian, anchor, np.asarray(slope, np.float64))


def _at_center(order: int, target: Target, metric: DenseMetric) -> tuple[Anchor, Array]:
    values = target.unravel(metric.center)
    anchor = target.anchor(target.written(values).effects, order)
    return anchor, metric.pullback(ravel(target.from_effects(values, anchor.gradient)))


def near_the_mode(target: Target, start: Point, order: int) -> tuple[Point | None, int]:
    """
    Move a point near the mode by Newton steps.

    :param target: the model with all of its data.
    :param start: the first point.
    :param int order: the order of the anchor.
    :return: the point, or None if the steps fail, and the number of passes.
    """
    before = start
    for passes in range(1, _MOST_PASSES + 1):
        point = point_at(target, before.at_the_mode, order)
        has_failed = point.distance > _SHORTENED * max(before.distance, NEAR / _SHORTENED)
        if has_failed or not np.all(np.isfinite(point.slope)):
            return None, passes
        if point.distance <= NEAR:
            return point, passes
        before = point
    return None, _MOST_PASSES
