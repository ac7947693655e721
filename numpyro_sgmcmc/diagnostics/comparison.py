# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Comparison of runs with a reference, side by side."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from numpyro_sgmcmc.data.converters import truth, whole
from numpyro_sgmcmc.diagnostics._posterior_score import RunModel, scores_of
from numpyro_sgmcmc.diagnostics.discrepancy import discrepancy_of
from numpyro_sgmcmc.diagnostics.runs import Run, as_data, draws_of, effective_sizes, flat_draws

#: Numbers of random directions and of quantiles of the sliced Wasserstein distance.
_DIRECTIONS, _QUANTILES = 100, 512


class Moments(NamedTuple):
    """
    Marginal moments of the numbers of a run, each of shape (numbers,).

    - **mean** - mean.
    - **sd** - standard deviation.
    - **mean_size** - effective sample size for the mean.
    - **sd_error** - relative standard error of the standard deviation.
    - **labels** - labels as in ``arviz.summary``.
    """

    mean: np.ndarray
    sd: np.ndarray
    mean_size: np.ndarray
    sd_error: np.ndarray
    labels: list[str]


def moments(run: Run, *, var_names: list[str] | None = None) -> Moments:
    """
    The marginal moments of a run, with their errors.

    :func:`compare` needs only these of a reference, so keep them if the reference took long.

    :param run: an ``MCMC`` object or an ArviZ object.
    :param var_names: names of variables; None for all.
    :raises ValueError: if there are no draws, if they are not finite, or if all of them are
        constant.

    **Example:**

    .. doctest::

        >>> import arviz as az, numpy as np
        >>> from numpyro_sgmcmc import moments

        >>> draws = {"x": np.random.default_rng(0).standard_normal((4, 2_000, 3))}
        >>> first = int(az.__version__.split(".")[0]) < 1
        >>> found = moments(az.from_dict(draws) if first else az.from_dict({"posterior": draws}))
        >>> found.sd.round(1).tolist(), found.labels
        ([1.0, 1.0, 1.0], ['x[0]', 'x[1]', 'x[2]'])
    """
    return moments_of(*flat_draws(draws_of(as_data(run), var_names)))


def moments_of(draws: np.ndarray, labels: list[str]) -> Moments:
    """
    The moments of draws with labels.

    :param draws: shape ``(chains, draws, numbers)``.
    :param labels: labels of the numbers. Constant numbers are left out.
    """
    # a Cholesky factor, for instance, has entries that are constant up to rounding
    varies = np.ptp(draws, axis=(0, 1)) > 1e-6 * np.max(np.abs(draws), axis=(0, 1))
    draws = draws[..., varies]
    labels = [label for label, kept in zip(labels, varies, strict=True) if kept]
    if not labels:
        raise ValueError(
            "No variable of this run ever moves, so that there is nothing to compare. Reduce the"
            " step size, or start elsewhere."
        )
    variance, error = variance_of(draws)
    mean, sd = draws.mean(axis=(0, 1)), np.sqrt(variance)
    return Moments(mean, sd, effective_sizes(draws), error / 2, labels)


def variance_of(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    The variance of each number, and its relative standard error; NaN for constants.

    :param draws: shape ``(chains, draws, numbers)``.
    """
    squares = (draws - draws.mean(axis=(0, 1))) ** 2
    variance = squares.mean(axis=(0, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return variance, squares.std(axis=(0, 1)) / np.sqrt(effective_sizes(squares)) / variance


def compare(
    runs: Run | dict[str, Run],
    reference: Run | Moments,
    *,
    var_names: list[str] | None = None,
    discrepancy: bool = False,
    draws: int = 2_000,
    model: Callable | None = None,
    model_args: tuple = (),
    model_kwargs: dict | None = None,
) -> pd.DataFrame:
    """
    Compare runs with a reference whose law is right, such as a long run of NUTS.

    The errors are in units of the standard deviations of the reference, beside the Monte-Carlo
    errors of both. With means :math:`m`, standard deviations :math:`s` and effective sample sizes
    :math:`n`, with an index zero for the reference, each number has

    .. math::

        \\frac{m - m_0}{s_0} \\pm \\left( \\frac1{n_0} + \\frac{s^2}{s_0^2 n} \\right)^{1/2},
        \\qquad \\frac{s}{s_0} \\left( 1 \\pm ( \\epsilon_0^2 + \\epsilon^2 )^{1/2} \\right),

    where :math:`\\epsilon` is the relative standard error of :math:`s`, from the effective sample
    size of :math:`(x - m)^2`.

    :param runs: ``MCMC`` or ArviZ objects, by name; or one object, which gets the name of its
        algorithm.
    :param reference: a run, or the :func:`moments` of one.
    :param var_names: names of variables; None for all.
    :param bool discrepancy: whether to compute the :func:`kernel_stein_discrepancy` of each
        run, all with the covariance of the reference; needs the model: give ``MCMC`` objects, or
        ``model`` and its arguments.
    :param int draws: number of draws for the discrepancy.
    :param model: the model, for ArviZ objects.
    :param tuple model_args: its arguments.
    :param dict model_kwargs: its keyword arguments.
    :return: a table with a row for each run:

        - ``mean_error``, ``mean_error_se``: the largest error of a mean, in standard deviations
          of the reference, and its standard error;
        - ``sd_ratio``, ``sd_ratio_se``: the ratio of standard deviations that is farthest from
          1;
        - ``mean_z``, ``sd_z``: root mean squares of all errors in units of their standard errors,
          about 1 if all errors are chance;
        - ``wasserstein``: the sliced 2-Wasserstein distance of the standardised draws, the root
          mean square distance of the projections on 100 directions, and ``wasserstein_floor``, the
          distance between the two halves of the reference;
        - ``ksd_squared``, ``ksd_error``: the discrepancy, if it was requested;
        - ``ess``: the smallest effective sample size, for means.
    :raises ValueError: if the variables of two runs differ.

    **References:**

    1. *Sliced and Radon Wasserstein Barycenters of Measures*, Nicolas Bonneel, Julien Rabin,
       Gabriel Peyre and Hanspeter Pfister (2015).

    **Example:**

    .. doctest::

        >>> import arviz as az, numpy as np
        >>> from numpyro_sgmcmc import compare

        >>> def normal(scale, seed):
        ...     draws = {"x": scale * np.random.default_rng(seed).standard_normal((4, 2_000, 3))}
        ...     first = int(az.__version__.split(".")[0]) < 1
        ...     return az.from_dict(draws) if first else az.from_dict({"posterior": draws})

        >>> table = compare({"right": normal(1, 1), "wide": normal(1.3, 2)}, normal(1, 0))
        >>> table["sd_ratio"].round(1).tolist()
        [1.0, 1.3]
        >>> table["sd_z"].round().tolist()[1] > 10
        True
    """
    discrepancy, draws = truth("discrepancy", discrepancy), whole("draws", draws, least=2)
    if not isinstance(runs, dict):  # ArviZ objects are mappings too
        runs = {str(as_data(runs).attrs.get("algorithm", "run")): runs}
    run_model = RunModel(model, model_args, model_kwargs).or_of(reference, *runs.values())
    data = {name: as_data(run) for name, run in runs.items()}
    covariance, kept, floor = None, None, math.nan
    if isinstance(reference, Moments):
        right = reference
    else:
        right_data = as_data(reference)
        kept, right = _standardised(right_data, var_names)
        half = len(kept) // 2
        floor = sliced_wasserstein(kept[:half], kept[half:])
        if discrepancy:
            every = scores_of(right_data, run_model, draws).positions
            covariance = np.atleast_2d(np.cov(every.reshape(-1, every.shape[-1]), rowvar=False))
    rows = {}
    for name, run in data.items():
        values, run_moments = _standardised(run, var_names, right)
        row = errors_of(run_moments, right, name)
        if kept is not None:
            row |= {"wasserstein": sliced_wasserstein(values, kept), "wasserstein_floor": floor}
        if discrepancy:
            ksd = discrepancy_of(scores_of(run, run_model, draws), covariance)
            row |= {"ksd_squared": ksd.squared, "ksd_error": ksd.error}
        rows[name] = row | {"ess": float(run_moments.mean_size.min())}
    return pd.DataFrame.from_dict(rows, orient="index")


def _standardised(
    data: Any, var_names: list[str] | None, right: Moments | None = None
) -> tuple[np.ndarray, Moments]:
    """
    Draws in units of the reference, shape ``(draws, numbers)``, and their moments.

    The rows go draw by draw through all chains. The reference is in its own units.
    """
    values, labels = flat_draws(draws_of(data, var_names))
    run_moments = moments_of(values, labels)
    unit = right or run_moments
    if run_moments.labels != unit.labels:
        return values, run_moments  # :func:`errors_of` raises the error
    moving = values[..., np.isin(labels, unit.labels)]
    scaled = (moving - unit.mean) / unit.sd
    return scaled.swapaxes(0, 1).reshape(-1, len(unit.labels)), run_moments


def errors_of(found: Moments, right: Moments, name: str = "the run") -> dict[str, float]:
    """The errors of some moments against the right ones."""
    if found.labels != right.labels:
        only = sorted(set(found.labels) ^ set(right.labels))
        raise ValueError(
            f"'{name}' and the reference differ in their variables: {only[:5]}"
            + (" and more" if len(only) > 5 else "")
            + (
                " are in only one of the two, or move in only one. Choose common variables with"
                " `var_names`."
            )
        )
    error = (found.mean - right.mean) / right.sd
    error_se = np.sqrt(1 / right.mean_size + (found.sd / right.sd) ** 2 / found.mean_size)
    ratio = found.sd / right.sd
    ratio_se = ratio * np.hypot(right.sd_error, found.sd_error)
    mean, sd = int(np.argmax(np.abs(error))), int(np.argmax(np.abs(np.log(ratio))))
    return {
        "mean_error": float(abs(error[mean])),
        "mean_error_se": float(error_se[mean]),
        "sd_ratio": float(ratio[sd]),
        "sd_ratio_se": float(ratio_se[sd]),
        "mean_z": float(np.sqrt(np.mean((error / error_se) ** 2))),
        "sd_z": float(np.sqrt(np.mean(((ratio - 1) / ratio_se) ** 2))),
    }


def sliced_wasserstein(one: np.ndarray, two: np.ndarray) -> float:
    """
    The sliced 2-Wasserstein distance between draws, shapes ``(draws, numbers)``.

    It has 100 fixed random directions.
    """
    normal = np.random.default_rng(0).standard_normal((_DIRECTIONS, one.shape[-1]))
    directions = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    levels = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    quantiles = [np.quantile(x @ directions.T, levels, axis=0) for x in (one, two)]
    return math.sqrt(float(np.mean((quantiles[0] - quantiles[1]) ** 2)))
