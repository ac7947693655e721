# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What the arguments of a kernel may be, and what a kernel shows while it tunes itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import math
import os
from typing import Any

import jax
from jax import Array, random
from jax.flatten_util import ravel_pytree
import numpy as np
from tqdm.auto import tqdm

from numpyro_sgmcmc.fingerprint import fingerprint_of as fingerprint_of
from numpyro_sgmcmc.metric import IdentityMetric, Metric, from_covariance
from numpyro_sgmcmc.minibatch import MinibatchModel
from numpyro_sgmcmc.warmup import DENSE_BY_DEFAULT, PHASES, Tuning

#: A positive number, or a function of the number of steps taken, such as an optax schedule.
StepSize = float | Callable[[Array], Array | float]


def positive(name: str, value: Any) -> float:
    """
    :raises ValueError: if ``value`` is not a positive finite number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool | str) or not (math.isfinite(number) and number > 0):
        raise ValueError(f"`{name}` must be a positive finite number; got {value!r}.")
    return number


def whole(name: str, value: Any) -> int:
    """
    :raises ValueError: if ``value`` is not a positive integer.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer; got {value!r}.")
    return value


def one_of(name: str, value: Any, options: Any) -> str:
    """
    :raises ValueError: if ``value`` is not among ``options``, which the message lists.
    """
    if value not in options:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, options))}; got {value!r}.")
    return value


def checked_metric(metric: Any) -> Any:
    """
    :raises ValueError: if it is not of a kind that can be a metric.
    """
    if metric is None or isinstance(metric, tuple):
        return metric
    if isinstance(metric, str):
        one_of("metric", metric, ("identity", "diagonal", "dense"))
        return IdentityMetric() if metric == "identity" else metric
    found = np.asarray(metric)
    if found.dtype.kind not in "iuf" or found.ndim not in (1, 2):
        raise ValueError(
            "`metric` must be an array of variances or a covariance matrix, a pair (guide, params),"
            f" 'diagonal', 'dense' or 'identity'; got {metric!r}."
        )
    return found


def checked_tuning(tuning: Any, metric: Any, gradient: str) -> Tuning | None:
    """
    :raises ValueError: if it is not one, or if another argument contradicts it.
    """
    if tuning is None:
        return None
    if not isinstance(tuning, Tuning):
        raise ValueError(f"`tuning` must be the result of `kernel.tune(...)`; got {tuning!r}.")
    if metric is not None:
        raise ValueError("`tuning` has a metric already: give `metric` to the kernel that tunes.")
    found = "minibatch" if tuning.anchor is None else "control_variate"
    if gradient not in ("auto", found):
        raise ValueError(
            f"`tuning` was found for gradient='{found}': tune a kernel with gradient='{gradient}'."
        )
    return tuning


def metric_of_guide(
    guide: Any, params: Any, view: MinibatchModel, args: tuple, kwargs: dict, dtype: Any
) -> Metric:
    """The metric with the mean and the covariance of draws of a fitted guide."""
    count = 1_000 + 20 * view.dimension
    draws = guide.sample_posterior(random.key(0), params, sample_shape=(count,))
    draws = {name: draws[name] for name in view.latents}
    flat = jax.vmap(lambda values: ravel_pytree(view.unconstrain(values, args, kwargs))[0])(draws)
    z = np.asarray(flat, np.float64)
    covariance = np.var(z, axis=0)
    if view.dimension <= DENSE_BY_DEFAULT:
        covariance = np.cov(z.T).reshape(view.dimension, view.dimension)
    return from_covariance(covariance, z.mean(axis=0), dtype)


@contextmanager
def tuning_bar(shown: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar of the phases, which disappears when they are done."""
    # as NumPyro's own
    hidden = not shown or "CI" in os.environ or "PYTEST_XDIST_WORKER" in os.environ
    with tqdm(total=len(PHASES), desc="tuning", leave=False, disable=hidden) as bar:

        def report(phase: str) -> None:
            bar.set_description(f"tuning: {phase}")
            bar.n = PHASES.index(phase)
            bar.refresh()

        yield report
