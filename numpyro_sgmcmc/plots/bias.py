# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The error of the variances against the step size."""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np
from numpyro.infer import MCMC
from scipy import stats
import xarray as xr

from numpyro_sgmcmc.data.converters import instance, names
from numpyro_sgmcmc.diagnostics.comparison import variance_of
from numpyro_sgmcmc.diagnostics.runs import (
    Run,
    as_data,
    draws_of,
    effective_sizes,
    flat_draws,
    group,
)
from numpyro_sgmcmc.plots._axes import (
    ABOVE_GRID,
    ERRORS,
    LINE_STYLES,
    MARKERS,
    Axes,
    given_axes,
    legend_beside,
    new_axes,
)

#: A run with a larger relative error has diverged, and is out of the picture; R-hat is never
#: exactly 1, and less than so much above it is noise.
_LARGEST_ERROR, _SMALLEST_HAT = 100.0, 1e-4


class _Errors(NamedTuple):
    """Relative errors of the variance, of each run, and what of them chance alone would give."""

    values: list[float]
    by_chance: list[float]


def plot_bias(
    runs: Sequence[Run] | Mapping[str, Run],
    reference: Run | None = None,
    var_names: str | Sequence[str] | None = None,
    axes: Sequence[Axes] | None = None,
    figsize: tuple[float, float] | None = None,
) -> np.ndarray:
    """
    The relative error of the variance of the draws against the step size.

    There are lines of slope 1 and 2; below, for the same runs, the effective sample size of the
    worst parameter and its R-hat, which mostly become better where the error becomes larger.

    Up to four errors are shown: from the Stein matrix (:mod:`numpyro_sgmcmc.stein`) that of the
    mean over the coordinates, :math:`|T_c - 1|` with the configurational temperature
    :math:`T_c`, which is 0 for methods with a thermostat, and that of the worst variance ratio;
    with a reference the root mean square over the parameters, and the worst, of

    .. math:: \\delta_i = \\frac{\\operatorname{Var} \\theta_i}
        {\\operatorname{Var}_{\\text{reference}} \\theta_i} - 1 .

    Bars are two standard errors to either side: by the effective sample sizes of
    :math:`(\\theta_i - \\bar\\theta_i)^2` in both runs, of the root mean square that of the
    errors, and of the worst of :math:`k` as many as make it as unlikely to be beyond as a
    single one beyond two. An error of less is drawn hollow: it might as well be 0. On a
    logarithmic axis such a point is not drawn below a tenth of its bar. The lines of slope 1 and
    2 go through the last point of the first error that is not hollow. Errors above 100 are those
    of runs that have diverged, and out of the picture.

    :param runs: runs of one model and method with different step sizes, in any order.
    :param reference: a run that is right, as of NUTS on ``full_data(model)``.
    :param var_names: names of the variables to compare and to take effective sample sizes of;
        None for those that are in all runs.
    :param axes: three axes; None for a new figure.
    :param figsize: width and height of a new figure in inches.
    :return: the three axes: errors, effective sample sizes, R-hat.
    :raises ValueError: if there are fewer than two step sizes, if a run does not say its own, or
        if no error is known.
    :raises TypeError: if ``runs`` is a single run.

    **Example:**

    .. doctest::

        >>> import jax
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGLD
        >>> from numpyro_sgmcmc import plot_bias

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=20) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = jax.random.normal(jax.random.key(0), (100,))
        >>> runs = []
        >>> for step_size in (1e-3, 4e-3):
        ...     mcmc = MCMC(SGLD(model, step_size=step_size), num_warmup=100, num_samples=500,
        ...                 progress_bar=False)
        ...     mcmc.run(jax.random.key(1), y)
        ...     runs.append(mcmc)
        >>> plot_bias(runs)[0].get_ylabel()
        'relative error of the variance'
    """
    data, step_sizes = _sorted_runs(runs)
    if axes is None:
        panels = new_axes(3, figsize, (10.0, 7.0), sharex=True, height_ratios=(3, 1, 1))
    else:
        panels = given_axes(axes, 3, "for errors, effective sample sizes and R-hat")
    compared = data if reference is None else [*data, as_data(reference)]
    posteriors = _compared_draws(compared, var_names)
    curves = _stein_errors(data)
    if reference is not None:
        curves |= _reference_errors(posteriors[:-1], posteriors[-1])
    curves = {label: curve for label, curve in curves.items() if np.any(np.isfinite(curve.values))}
    if not curves:
        raise ValueError(
            "No error is known: the runs have no Stein matrix, which needs a kernel of this package"
            " with independent minibatches. Give a `reference`, such as a run of NUTS on"
            " `full_data(model)`."
        )
    order = int(data[0].attrs.get("order", 0))
    _draw_errors(panels[0], np.array(step_sizes), curves, order)
    _draw_efficiency(panels[1], panels[2], step_sizes, posteriors[: len(data)])
    for ax in panels:
        _mark_step_sizes(ax, step_sizes)
    panels[-1].set_xlabel("step size")
    return panels


def _sorted_runs(runs: Sequence[Run] | Mapping[str, Run]) -> tuple[list[Any], list[float]]:
    """
    The runs by their step size, and these.

    :raises ValueError: if a run does not say it, or if there is only one.
    :raises TypeError: if it is a single run.
    """
    if isinstance(runs, MCMC | xr.DataTree) or hasattr(runs, "posterior"):
        raise TypeError(
            "`runs` is a single run, but must be a list or a dict of runs that differ in their step"
            " size: `plot_bias([first, second])`."
        )
    instance("runs", runs, list | tuple | Mapping, "a list or a dict of runs")
    named = runs if isinstance(runs, Mapping) else dict(enumerate(runs))
    found = []
    for name, run in named.items():
        data: Any = as_data(run)
        if "step_size" not in data.attrs:
            raise ValueError(
                f"Run {name!r} does not say its step size (it has no attribute `step_size`): it"
                " has a schedule, or is not of this package. Leave it out, or set"
                " `data.attrs['step_size']`."
            )
        found.append((float(data.attrs["step_size"]), data))
    found.sort(key=lambda pair: pair[0])
    step_sizes = [step_size for step_size, _ in found]
    if len(set(step_sizes)) < 2:
        raise ValueError(
            f"The runs have the step sizes {step_sizes}: to compare errors there must be two"
            " different ones at least. Make another run with `kernel.with_step_size(...)`."
        )
    return [data for _, data in found], step_sizes


def _compared_draws(
    runs: list[Any], var_names: str | Sequence[str] | None
) -> list[tuple[np.ndarray, list[str]]]:
    """
    The draws of the same numbers in each run, with their labels.

    :raises ValueError: if there are none, or if their shapes differ.
    """
    if var_names is not None:
        common = names("var_names", var_names)
    else:
        groups = [group(data, "posterior") for data in runs]
        common = [
            str(name)
            for name in groups[0].data_vars  # type: ignore[union-attr]
            if all(posterior is not None and name in posterior for posterior in groups)
        ]
    if not common:
        raise ValueError("The runs have no variable in common.")
    draws = [flat_draws(draws_of(data, common)) for data in runs]
    sizes = [values.shape[2] for values, _ in draws]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"The variables {common} have {sizes} numbers in these runs, the reference last: they"
            " must be of the same model and data."
        )
    return draws


def _stein_errors(runs: list[Any]) -> dict[str, _Errors]:
    """The errors that each run knows of itself, NaN where it does not."""
    mean, worst = _Errors([], []), _Errors([], [])
    for data in runs:
        stein = group(data, "stein")
        temperature = temperature_error = ratio = ratio_error = math.nan
        if stein is not None:
            temperature = abs(stein.attrs["temperature"] - 1)
            temperature_error = ERRORS * stein.attrs["temperature_error"]
            errors = stein["variance_ratio"].values - 1
            ratio, ratio_error = _worst(errors, stein["variance_ratio_error"].values)
        mean.values.append(temperature)
        mean.by_chance.append(temperature_error)
        worst.values.append(ratio)
        worst.by_chance.append(ratio_error)
    return {"Stein matrix, mean": mean, "Stein matrix, worst": worst}


def _reference_errors(
    draws: list[tuple[np.ndarray, list[str]]], reference: tuple[np.ndarray, list[str]]
) -> dict[str, _Errors]:
    """The errors of the variances against those of the reference."""
    mean, worst = _Errors([], []), _Errors([], [])
    right, right_error = variance_of(reference[0])
    for values, _ in draws:
        variance, error = variance_of(values)
        varies = (right > 0) & (variance > 0)
        off = variance[varies] / right[varies] - 1
        errors = (1 + off) * np.hypot(error, right_error)[varies]
        count = len(off) or math.nan
        mean.values.append(math.sqrt(np.sum(off**2) / count))
        # by the triangle inequality no more than this is due to chance
        mean.by_chance.append(ERRORS * math.sqrt(np.sum(errors**2) / count))
        for found, number in zip(worst, _worst(off, errors), strict=True):
            found.append(number)
    return {"reference, root mean square": mean, "reference, worst": worst}


def _worst(errors: np.ndarray, standard_errors: np.ndarray) -> tuple[float, float]:
    """The largest of the errors, and what chance would give the largest of so many."""
    if not errors.size:
        return math.nan, math.nan
    worst = int(np.argmax(np.abs(errors)))
    quantile = stats.norm.isf(stats.norm.sf(ERRORS) / errors.size)
    return float(abs(errors[worst])), float(quantile * standard_errors[worst])


def _draw_errors(
    ax: Axes, step_sizes: np.ndarray, curves: Mapping[str, _Errors], order: int
) -> None:
    lowest, highest, clear = math.inf, 0.0, None
    for k, (label, curve) in enumerate(curves.items()):
        values, half = np.array(curve.values), np.array(curve.by_chance)
        half[~np.isfinite(half)] = math.nan  # of a run too short to know it
        is_zero = ~(values > half)
        if clear is None and not np.all(is_zero):
            last = np.flatnonzero(~is_zero)[-1]
            clear = step_sizes[last], values[last]
        values = np.where(is_zero, np.fmax(values, half / 10), values)
        # beside each other, so that no bar hides another
        place = (k - (len(curves) - 1) / 2) * 0.012
        x = step_sizes * (step_sizes[-1] / step_sizes[0]) ** place
        color, marker = f"C{k}", MARKERS[k]
        ax.plot(x, values, color=color, marker=marker, linestyle=LINE_STYLES[k], label=label)
        ax.plot(x[is_zero], values[is_zero], color=color, marker=marker, linestyle="",
                markerfacecolor=ax.get_facecolor(), zorder=3)  # fmt: skip
        ends = np.fmax(values - half, values / 1_000), np.fmax(values + half, values)
        ax.vlines(x, *ends, color=color, linewidth=1)
        lowest = min(lowest, np.nanmin(values))
        highest = max(highest, np.nanmax(ends[1]))
    ax.plot([], [], marker="o", linestyle="", color="gray", markerfacecolor=ax.get_facecolor(),
            label="hollow: might be 0")  # fmt: skip
    if clear is not None:
        _draw_slopes(ax, step_sizes, *clear, order)
    ax.set(xscale="log", ylabel="relative error of the variance")
    _set_log_scale(ax, lowest, min(highest, _LARGEST_ERROR))
    legend_beside(ax)


def _draw_slopes(
    ax: Axes, step_sizes: np.ndarray, step_size: float, error: float, order: int
) -> None:
    """Lines in proportion to the step size and to its square, through a point."""
    for slope, style in ((1, (0, (5, 5))), (2, (0, (1, 4)))):
        line = error * (step_sizes / step_size) ** slope
        label = f"slope {slope}" + (", the order of the method" if slope == order else "")
        ax.plot(step_sizes, line, color="gray", linestyle=style, linewidth=1.2, label=label,
                zorder=ABOVE_GRID)  # fmt: skip


def _draw_efficiency(
    sizes: Axes, chains: Axes, step_sizes: list[float], draws: list[tuple[np.ndarray, list[str]]]
) -> None:
    """Effective sample sizes in the first axes, R-hat in the second."""
    shares = [
        float(np.fmin.reduce(effective_sizes(x, "bulk"))) / (x.shape[0] * x.shape[1])
        for x, _ in draws
    ]
    sizes.plot(step_sizes, shares, "C0o-")
    sizes.set(xscale="log", ylabel="ESS / draws\n(worst)")
    _set_log_scale(sizes, min(shares), max(shares))
    chains.set(xscale="log", ylabel="R-hat - 1\n(worst)")
    if any(len(x) < 2 for x, _ in draws):
        chains.set_yticks([])
        chains.annotate("not known: a single chain", (0.5, 0.5), xycoords="axes fraction",
                        ha="center", va="center")  # fmt: skip
        return
    hats = np.array([_worst_hat(x) for x, _ in draws])
    chains.plot(step_sizes, np.maximum(hats - 1, _SMALLEST_HAT), "C0o-")
    chains.axhline(0.01, color="gray", linestyle="--", linewidth=1, zorder=ABOVE_GRID)
    drawn = np.clip(np.append(hats[np.isfinite(hats)] - 1, 0.01), _SMALLEST_HAT, _LARGEST_ERROR)
    _set_log_scale(chains, drawn.min(), drawn.max())


def _worst_hat(draws: np.ndarray) -> float:
    """NaN where nothing moves."""
    import arviz

    numbers = xr.Dataset({"number": (("chain", "draw", "index"), draws)})
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.fmax.reduce(arviz.rhat(numbers)["number"].values))


def _set_log_scale(ax: Axes, low: float, high: float) -> None:
    """A logarithmic axis with a few ticks, in plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_yscale("log")
    ax.set_ylim(low / 2, high * 2)
    between = (1.0, 2.0, 5.0) if high < 10 * low else (1.0,)
    ax.yaxis.set_major_locator(LogLocator(subs=between, numticks=8))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _mark_step_sizes(ax: Axes, step_sizes: list[float]) -> None:
    """Ticks at the step sizes that there are, without those too close to the one before."""
    from matplotlib.ticker import NullLocator

    logs = np.log(sorted(set(step_sizes)))
    closest = 0.08 * (logs[-1] - logs[0])
    kept = [logs[0]]
    for place in logs[1:]:
        if place - kept[-1] >= closest:
            kept.append(place)
    ax.set_xticks(np.exp(kept), [f"{math.exp(place):.3g}" for place in kept])
    ax.xaxis.set_minor_locator(NullLocator())
