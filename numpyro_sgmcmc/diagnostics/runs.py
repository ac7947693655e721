# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A run as the diagnostics take it: an ``MCMC`` object or an ArviZ object, checked once."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any
import warnings

import jax
from jax import Array
import numpy as np
from numpyro.infer import MCMC
import pandas as pd
import xarray as xr

from numpyro_sgmcmc.data.converters import instance, names
from numpyro_sgmcmc.results.facts import variable_name
from numpyro_sgmcmc.results.inference_data import to_arviz

#: An ``MCMC`` object after its run, of any kernel, or an ArviZ object.
Run = Any

#: A function from the values of one draw, by name, to scalars or arrays, by name.
Functions = Callable[[Mapping[str, Array]], Mapping[str, Array]]


#: Formats of numbers by column of a table.
_FORMATS = {
    "r_hat": "{:.3f}",
    "ess_bulk": "{:.0f}",
    "ess_tail": "{:.0f}",
    "variance_error": "{:+.3f}",
    "mcse_variance_error": "{:.3f}",
}


def as_data(run: Run) -> Any:
    """
    The ArviZ object of a run: an ``arviz.InferenceData`` or an ``xarray.DataTree``.

    :raises ValueError: if there are no draws.
    :raises TypeError: if the run is neither.
    """
    if isinstance(run, MCMC):
        with warnings.catch_warnings():
            # the diagnostic itself gives this warning
            warnings.simplefilter("ignore")
            run = to_arviz(run, constant_data=False)
    try:
        posterior = group(run, "posterior")
    except (AttributeError, TypeError):
        posterior = None
    if posterior is None:
        raise TypeError(
            "A run must be an `MCMC` object after its run, or an ArviZ object with a posterior"
            f" group, such as `to_arviz(mcmc)`; got {_described(run)}."
        )
    if not posterior.data_vars or not posterior.sizes.get("draw"):
        raise ValueError(
            "The run has no draws: its posterior group has"
            f" {dict(posterior.sizes) or 'no variables'}."
        )
    return run


def group(data: Any, name: str) -> xr.Dataset | None:
    """A group of an ArviZ object, of either generation, or None."""
    if isinstance(data, xr.DataTree):
        return data[name].to_dataset() if name in data.children else None
    return data[name] if name in data.groups() else None


def draws_of(data: Any, var_names: str | Sequence[str] | None = None) -> xr.Dataset:
    """
    The draws of the chosen variables.

    :raises ValueError: if a name is unknown, or if draws are not finite, with the number of such
        draws.
    """
    posterior = group(data, "posterior")
    assert posterior is not None
    if var_names is not None:
        var_names = [variable_name(name) for name in names("var_names", var_names)]
        unknown = [name for name in var_names if name not in posterior]
        if unknown:
            raise ValueError(
                f"`var_names` has {unknown}, which are no variables of the posterior; it has"
                f" {sorted(posterior.data_vars)}."
            )
        posterior = posterior[var_names]
    bad = {
        name: int(np.sum(~np.isfinite(x.values)))
        for name, x in posterior.data_vars.items()
        if x.dtype.kind == "f" and not np.all(np.isfinite(x.values))
    }
    if bad:
        counts = ", ".join(f"{count:,} of '{name}'" for name, count in bad.items())
        raise ValueError(
            f"The draws have values that are not finite: {counts}. Effective sample sizes and"
            " R-hat do not notice infinite values. Choose the other variables with `var_names`, or"
            " run again with a smaller step size."
        )
    return posterior


def _described(run: Any) -> str:
    return f"a {type(run).__name__}" + (
        " without a posterior group" if hasattr(run, "groups") else ""
    )


def flat_draws(posterior: xr.Dataset) -> tuple[np.ndarray, list[str]]:
    """
    All numbers of each draw, shape ``(chains, draws, numbers)``, and their labels.

    The numbers have double precision. The labels are the labels of ``arviz.summary``.
    """
    columns, labels = [], []
    for name, x in posterior.data_vars.items():
        values = x.transpose("chain", "draw", ...).values.astype(np.float64)
        columns.append(values.reshape(*values.shape[:2], -1))
        labels += labels_of(str(name), x)
    return np.concatenate(columns, axis=-1), labels


def values_of(functions: Functions, posterior: xr.Dataset) -> tuple[np.ndarray, list[str]]:
    """
    The values of functions of each draw, shape ``(chains, draws, numbers)``, and their labels.
    """
    instance("functions", functions, Callable, "a function of the values of one draw, by name")
    draws = {str(k): x.transpose("chain", "draw", ...).values for k, x in posterior.items()}
    try:
        values = jax.vmap(jax.vmap(lambda draw: dict(functions(draw))))(draws)
        wrong = [f"'{name}'" for name, x in values.items() if not np.all(np.isfinite(x))]
    except Exception as error:
        raise ValueError(
            "`functions` must map the values of one draw, a dict by name, to a dict of numbers or"
            f" arrays, by operations of JAX. It raised {type(error).__name__}: {error}"
        ) from error
    if wrong or not values:
        what = f"values that are not finite for {', '.join(wrong)}" if wrong else "nothing"
        raise ValueError(f"`functions` must give finite numbers to average; it gives {what}.")
    dataset = xr.Dataset(
        {
            name: (
                ("chain", "draw", *(f"{name}_{k}" for k in range(np.ndim(x) - 2))),
                np.asarray(x),
            )
            for name, x in values.items()
        }
    )
    return flat_draws(dataset)


def labels_of(name: str, x: xr.DataArray, entries: np.ndarray | None = None) -> list[str]:
    """The labels of all entries of a variable, or of some, as in ``arviz.summary``."""
    dims = [dim for dim in x.dims if dim not in ("chain", "draw")]
    if not dims:
        return [name]
    # a dimension without coordinates has numbers as labels
    known = [list(x.coords[d].values) if d in x.coords else list(range(x.sizes[d])) for d in dims]
    shape = [len(values) for values in known]
    numbers = np.arange(math.prod(shape)) if entries is None else entries
    return [
        f"{name}[{', '.join(str(values[k]) for values, k in zip(known, index, strict=True))}]"
        for index in zip(*np.unravel_index(numbers, shape), strict=True)
    ]


def effective_sizes(draws: np.ndarray, method: str = "mean") -> np.ndarray:
    """
    The effective sample size of each number.

    :param draws: shape ``(chains, draws, numbers)``.
    :param str method: the method of ``arviz.ess``.
    """
    import arviz

    numbers = xr.Dataset({"number": (("chain", "draw", "index"), draws)})
    with np.errstate(invalid="ignore", divide="ignore"):  # for values that never move
        return arviz.ess(numbers, method=method)["number"].values


def printed(kind: type) -> type:
    """Make a class of results show its table and its ``_lines``, in consoles and notebooks."""

    def as_text(self: Any) -> str:
        return "\n".join([_shown(self.table).to_string(), "", *self._lines])

    def as_page(self: Any) -> str:
        return f"{_shown(self.table).to_html()}<p>{'<br>'.join(self._lines)}</p>"

    added: Any = kind
    added.__str__ = added.__repr__ = as_text
    added._repr_html_ = as_page
    return kind


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    """A table with its numbers rounded for display."""
    shown = table.astype(object)
    for column in table:
        form = _FORMATS.get(str(column), "{:#.4g}")
        shown[column] = [
            "-" if math.isnan(x) else form.format(x).removesuffix(".")
            for x in table[column].astype(float)
        ]
    return shown


def passes_per_draw(data: Any) -> float | None:
    """Passes over all data from one draw to the next, or None if not known."""
    thinning = float(data.attrs.get("thinning", 1))
    if "passes_per_sample" in data.attrs:
        return thinning * float(data.attrs["passes_per_sample"])
    stats = group(data, "sample_stats")
    if stats is not None and "n_steps" in stats:
        # a leapfrog step of NUTS is a gradient on all data; JAX would average in single precision
        return thinning * float(np.mean(np.asarray(stats["n_steps"])))
    return None
