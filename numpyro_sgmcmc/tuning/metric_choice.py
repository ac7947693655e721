# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Choice of the search for the metric, by the request and the number of parameters."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.metric import (
    DenseMetric,
    DiagonalMetric,
    GaussianMetric,
    IdentityMetric,
    Metric,
)
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.expansion import DENSE_BY_DEFAULT
from numpyro_sgmcmc.tuning.gaussian import find_metric, prepare_metric
from numpyro_sgmcmc.tuning.hessians import prepare_evaluated
from numpyro_sgmcmc.tuning.low_rank import find_low_rank
from numpyro_sgmcmc.tuning.noise_level import prepare_noise
from numpyro_sgmcmc.tuning.request import TuningRequest

NEWTON = 500  #: the most parameters whose centre Newton's method finds
LOW_RANK_BY_DEFAULT = 200_000  #: the most whose metric has a low rank; it is diagonal above


def metric_search(metric: Metric | str | None, dimension: int) -> Callable | None:
    """Return the search for the metric, or None if the variances of the first search serve."""
    if metric == "dense" or (dimension <= DENSE_BY_DEFAULT and metric != "low_rank"):
        return find_metric
    if metric == "low_rank" or dimension <= LOW_RANK_BY_DEFAULT:
        return find_low_rank
    return None


def chosen_metric(metric: Metric | str | None, found: GaussianMetric) -> Metric:
    """Return the metric with the centre that the search has found."""
    if metric == "diagonal":
        # the marginal standard deviations
        return DiagonalMetric(found.center, jnp.sqrt(found.variances(found.center)))
    if metric is None or isinstance(metric, str):
        return found
    return metric if isinstance(metric, IdentityMetric) else metric._replace(center=found.center)


def prepare_search(target: Target, request: TuningRequest, controls: bool) -> None:
    """Compile the programs of the search, and of the measurement of noise, beside other work."""
    if target.model.dimension <= NEWTON:
        prepare_evaluated(target)
    if metric_search(request.metric, target.model.dimension) is not find_metric:
        return
    prepare_metric(target)
    if request.metric in (None, "dense"):
        dimension, dtype = target.model.dimension, target.model.dtype
        shapes = (dimension,), (dimension, dimension), (dimension, dimension)
        metric = DenseMetric(*(jnp.asarray(np.zeros(shape, dtype)) for shape in shapes))
        prepare_noise(target, metric, controls)
