# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Metrics, guides and tunings from the user, checked and fitted to a model."""

from os import PathLike
from pathlib import Path
from typing import Any

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import numpy as np

from numpyro_sgmcmc.data.converters import array, instance, one_of, shown
from numpyro_sgmcmc.posterior.control_variate import GRADIENTS, order_of
from numpyro_sgmcmc.posterior.metric import IdentityMetric, Metric, from_covariance
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.expansion import DENSE_BY_DEFAULT
from numpyro_sgmcmc.tuning.tuning import Tuning


def checked_metric(metric: Any) -> Any:
    """
    Check the argument ``metric`` of a kernel.

    :raises ValueError: if the argument is no metric.
    """
    is_guide = isinstance(metric, tuple) and hasattr(next(iter(metric), None), "sample_posterior")
    if metric is None or (is_guide and len(metric) == 2):
        return metric
    if isinstance(metric, str):
        one_of("metric", metric, ("identity", "diagonal", "low_rank", "dense"))
        return IdentityMetric() if metric == "identity" else metric
    values = array("metric", metric)
    if isinstance(metric, tuple) or values.dtype.kind not in "iuf" or values.ndim not in (1, 2):
        raise ValueError(
            "`metric` must be an array of variances or a covariance matrix, a pair (guide, params),"
            f" 'diagonal', 'low_rank', 'dense' or 'identity'; got {shown(metric)}."
        )
    return values


def checked_tuning(tuning: Any, metric: Any, gradient: str, strata: Any) -> Tuning | Path | None:
    """
    Check the argument ``tuning`` of a kernel.

    :return: the tuning, the absolute path of a folder of tunings, or None.
    :raises ValueError: if the argument is no tuning, or if another argument contradicts it.
    """
    if tuning is None:
        return None
    if isinstance(tuning, str | PathLike):
        folder = Path(tuning).expanduser().resolve()
        if folder.exists() and not folder.is_dir():
            raise ValueError(
                f"`tuning` must be a folder, and {folder} is a file. Give"
                f" `tuning=Tuning.load({str(tuning)!r})`, or the path of a folder."
            )
        return folder
    instance("tuning", tuning, Tuning, "the result of `kernel.tune(...)`, or a folder of tunings")
    if metric is not None:
        raise ValueError("`tuning` has a metric already. Give `metric` to the kernel that tunes.")
    kind = GRADIENTS[order_of(tuning.anchor)]
    if gradient not in ("auto", kind):
        raise ValueError(
            f"`tuning` was found for gradient='{kind}'. Tune a kernel with gradient='{gradient}'."
        )
    if not isinstance(strata, str) and (strata is not None or tuning.strata):
        kind = "with strata" if tuning.strata else "without strata"
        raise ValueError(
            f"`tuning` was found {kind}, and the run draws its rows in the same way. Give"
            " `subsampling` to the kernel that tunes."
        )
    return tuning


def metric_for(metric: Any, target: Target) -> Any:
    """
    A given metric for a model; names and None stay as they are.

    :raises ValueError: if the metric does not fit the model.
    """
    if metric is None or isinstance(metric, str | IdentityMetric):
        return metric
    view = target.model
    size, dtype = view.dimension, next(iter(view.latents.values())).dtype
    if isinstance(metric, tuple):
        guide, params = metric
        return _metric_of_guide(guide, params, target, dtype)
    if metric.shape not in ((size,), (size, size)):
        raise ValueError(
            f"`metric` has shape {metric.shape}, but the model has {size} unconstrained"
            f" parameters. Use variances, shape ({size},), or a covariance, ({size}, {size})."
        )
    return from_covariance(metric, np.zeros(size), dtype)


def _metric_of_guide(guide: Any, params: Any, target: Target, dtype: Any) -> Metric:
    """The metric with the mean and the covariance of draws of a fitted guide."""
    view = target.model
    count = 1_000 + 20 * view.dimension
    draws = guide.sample_posterior(random.key(0), params, sample_shape=(count,))
    draws = {name: draws[name] for name in view.latents}

    def flat(values: Any) -> Any:
        return ravel_pytree(view.unconstrain(values, target.args, target.kwargs))[0]

    z = np.asarray(jax.vmap(flat)(draws), np.float64)
    covariance = np.var(z, axis=0)
    if view.dimension <= DENSE_BY_DEFAULT:
        covariance = np.cov(z.T).reshape(view.dimension, view.dimension)
    return from_covariance(covariance, z.mean(axis=0), dtype)
