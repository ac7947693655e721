# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Tuning on a sample of the rows, where a pass over all of them is long.

Centre, metric and noise are those of a sample of :math:`M` rows, each of which stands for
:math:`N / M`: its posterior is as narrow as that of all rows, and lies :math:`\\sqrt{N / M}` of its
standard deviations away. One pass over all rows then gives the gradient there, and a Newton step
with the Hessian of the sample leads to within a few percent of that distance. The next pass, at
this point, is the anchor of the control variate, and says how far it still is: in the coordinates
:math:`\\theta = c + L \\zeta` of the metric, in which the Hessian is nearly the identity, by

.. math:: \\delta = -L^\\top \\nabla U(c) .

Every direction is off by about as much in the sample, and so one of which too few of its rows say
something, and in which its Hessian and its noise are wrong, shows: the step does not come near.
Then all rows are looked at.
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
_FEWEST_TIMES = 4  #: how many times more rows there must be, for a sample to be taken

#: It is made of stretches of so many neighbours, which are read at once.
_STRETCH = 64

NEAR = 0.5  #: the farthest that an anchor is from the mode in a coordinate, in standard deviations
_MOST_PASSES = 4  #: the most passes to come there

#: A Newton step with the Hessian of a sample that is large enough leaves no more of the way.
_SHORTENED = 0.25

_FEW = 64  #: rows that are compared with themselves among all others
_SAME = 1e-3  #: the rounding errors of that


def sample_of(target: Target) -> Target | None:
    """
    The model with a sample of the rows, in memory; None if all rows are to be looked at: where they
    are in the memory of one device, or not many more, or what they say of a parameter could hang on
    other rows.

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
    """The rows of a sample, as a part of all."""
    (plate,) = sample.model.plates
    assert plate.of is not None
    return plate.size / plate.of


def _with(target: Target, numbers: np.ndarray) -> Target:
    """The model with these rows, of each device, in the place of all."""
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
    """Whether some rows of the sample contribute what they do among all rows."""
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
            return False  # a model that has written out a number of rows
        looks.append([np.asarray(x, np.float64) for x in (energy, terms[plate.name])])
    size = np.abs(looks[0][0]) + np.nansum(np.abs(looks[0][1]))
    return not any(
        np.nanmax(np.abs(x - y)) > _SAME * size / n
        for (x, y), n in zip(zip(*looks, strict=True), (1, len(first)), strict=True)
    )


class Point(NamedTuple):
    """
    All rows at the centre of a Gaussian.

    - **gaussian** - whose centre it is.
    - **anchor** - what they say there.
    - **slope** - :math:`L^\\top \\nabla U`, shape (d,).
    """

    gaussian: Gaussian
    anchor: Anchor
    slope: np.ndarray

    @property
    def distance(self) -> float:
        """From the mode, in standard deviations along the worst coordinate."""
        return float(np.max(np.abs(self.slope)))

    @property
    def at_the_mode(self) -> Gaussian:
        """The Gaussian after a Newton step."""
        metric = self.gaussian.metric
        assert isinstance(metric, DenseMetric)
        center = np.asarray(metric.center, np.float64) - np.asarray(metric.factor) @ self.slope
        moved = metric._replace(center=jnp.asarray(center, metric.center.dtype))
        return self.gaussian._replace(metric=moved)


def point_at(target: Target, gaussian: Gaussian, order: int = 1) -> Point:
    """
    One pass over all rows.

    :param target: the model with all of its data.
    :param gaussian: at whose centre.
    :param int order: of the anchor.
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
    From a first point, by a Newton step or a few, to one that is near the mode.

    :param target: the model with all of its data.
    :param start: the first point.
    :param int order: of the anchor.
    :return: the point, or None if there is none, and the number of passes.
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
