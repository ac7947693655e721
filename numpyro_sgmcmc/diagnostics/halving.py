# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The bias of expectations, from a second run with half the step size."""

from collections.abc import Mapping
from typing import Any

from jax import Array, random
import numpy as np
from numpyro.infer import MCMC
import pandas as pd
import xarray as xr

from numpyro_sgmcmc.data.converters import random_key, whole
from numpyro_sgmcmc.diagnostics._scores import check_rows_of
from numpyro_sgmcmc.diagnostics.runs import (
    Functions,
    Run,
    as_data,
    draws_of,
    effective_sizes,
    flat_draws,
    values_of,
)
from numpyro_sgmcmc.results.inference_data import arguments_of
from numpyro_sgmcmc.results.run_data import check_data
from numpyro_sgmcmc.target.host import has_traced_arguments


def step_halving(
    run: Run,
    halved: Run | None = None,
    *,
    functions: Functions | None = None,
    var_names: list[str] | None = None,
    order: int | None = None,
    rng_key: Array | None = None,
) -> pd.DataFrame:
    """
    How far expectations are from their values at step size zero, from a second run.

    By Richardson's extrapolation from step sizes :math:`h` and :math:`h / 2`, where the error is of
    order :math:`k` in :math:`h`,

    .. math::

        \\mathrm{bias}_h(f) \\approx \\frac{2^k}{2^k - 1}
            \\left( \\bar f_h - \\bar f_{h/2} \\right),
        \\qquad \\bar f_0 \\approx \\bar f_h - \\mathrm{bias}_h(f) .

    Whatever the cause of the error, and for any expectation; the Stein matrix sees only the
    spread. The price is a second run, and the difference of two noisy means.

    :param run: a run at step size :math:`h`.
    :param halved: the same with :math:`h / 2`; None runs it, with twice as many steps between
        two samples, from an ``MCMC`` object of a kernel of this package with a constant step size.
    :param functions: from the values of one draw, by name, to scalars or arrays, by name; None
        is the mean and the variance of every entry.
    :param var_names: names of variables, for those; None for all.
    :param int order: :math:`k`; None is what the kernel says: 1 for Euler's method and where
        the noise of the gradient is not corrected for, 2 for symmetric integrators.
    :param rng_key: random key of the second run.
    :return: a table with a row for each expectation: ``estimate`` (at :math:`h`), ``halved``,
        ``bias``, ``bias_error`` (its Monte-Carlo standard error, by effective sample size) and
        ``extrapolated``.
    :raises ValueError: if the runs do not belong together, with their step sizes.

    **Example:** at 4 % of the largest stable step size the variance of SGLD is 4 % too large.

    .. doctest::

        >>> import jax
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGLD, step_halving

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = jax.random.normal(jax.random.key(0), (100,))
        >>> kernel = SGLD(model, step_size=0.0008, steps_per_sample=20)
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=5_000, num_chains=4,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> table = step_halving(mcmc)
        >>> row = table.loc["variance of mu"]
        >>> bool(abs(row.extrapolated - 0.01) < 4 * row.bias_error)  # the posterior's
        True
    """
    key = random.key(1) if rng_key is None else random_key(rng_key)
    order = None if order is None else whole("order", order)
    if functions is not None:
        values_of(functions, draws_of(as_data(run), var_names))  # before another run
    if halved is None:
        halved = _run_again(run, key)
    coarse, fine = as_data(run), as_data(halved)
    _check_pair(coarse.attrs, fine.attrs)
    if order is None:
        order = int(coarse.attrs.get("order", 1))
    factor = 2**order / (2**order - 1)
    draws = [draws_of(data, var_names) for data in (coarse, fine)]
    first, second = (
        _moments(x, draws[0]) if functions is None else _with_errors(*values_of(functions, x))
        for x in draws
    )
    bias = factor * (first.estimate - second.estimate)
    return pd.DataFrame(
        {
            "estimate": first.estimate,
            "halved": second.estimate,
            "bias": bias,
            "bias_error": factor * np.hypot(first.error, second.error),
            "extrapolated": first.estimate - bias,
        }
    )


def _run_again(run: Run, rng_key: Array) -> MCMC:
    """The same run with half the step size and twice as many steps."""
    kernel: Any = getattr(run, "sampler", None)
    if not hasattr(kernel, "with_step_size"):
        raise ValueError(
            "A second run with half the step size needs an `MCMC` object of a kernel of this"
            " package; otherwise run it yourself, and give it as `halved`."
        )
    settings = kernel.settings
    if "step_size" not in settings:
        raise ValueError(
            "A schedule of step sizes has no half: run it with half of each yourself, and give"
            " that as `halved`."
        )
    again = MCMC(
        kernel.with_step_size(
            float(settings["step_size"]) / 2, 2 * int(settings["steps_per_sample"])
        ),
        num_warmup=run.num_warmup,
        num_samples=run.num_samples,
        num_chains=run.num_chains,
        thinning=run.thinning,
        chain_method=run.chain_method,
        progress_bar=run.progress_bar,
        jit_model_args=has_traced_arguments(run),
    )
    check_rows_of(run)
    args, kwargs = arguments_of(run)
    check_data(run, "Halve the steps of")
    again.run(rng_key, *args, **kwargs)
    return again


def _check_pair(coarse: Mapping[str, Any], fine: Mapping[str, Any]) -> None:
    if "step_size" not in coarse or "step_size" not in fine:
        return
    ratio = float(fine["step_size"]) / float(coarse["step_size"])
    if not 0.499 < ratio < 0.501:
        raise ValueError(
            f"`halved` must have half the step size: {coarse['step_size']:.4g} and"
            f" {fine['step_size']:.4g} differ by a factor of {ratio:.3g}."
        )


def _moments(posterior: xr.Dataset, about: xr.Dataset) -> pd.DataFrame:
    """Means, and variances about the means of one of the runs."""
    values, labels = flat_draws(posterior)
    center, found = flat_draws(about)
    if found != labels:
        raise ValueError(f"The runs have other variables: {found[:5]} and {labels[:5]}, ...")
    squares = (values - center.mean(axis=(0, 1))) ** 2
    names = [f"mean of {x}" for x in labels] + [f"variance of {x}" for x in labels]
    return _with_errors(np.concatenate([values, squares], axis=-1), names)


def _with_errors(values: np.ndarray, labels: list[str]) -> pd.DataFrame:
    error = values.std(axis=(0, 1)) / np.sqrt(effective_sizes(values))
    return pd.DataFrame({"estimate": values.mean(axis=(0, 1)), "error": error}, index=labels)
