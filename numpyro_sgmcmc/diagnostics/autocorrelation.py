# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The integrated autocorrelation time."""

from typing import Any

import xarray as xr

from numpyro_sgmcmc.data.converters import one_of
from numpyro_sgmcmc.diagnostics.runs import Run, as_data, draws_of, passes_per_draw

_UNITS = ("draws", "steps", "passes")


def autocorrelation_time(
    run: Run, *, var_names: list[str] | None = None, unit: str = "draws"
) -> xr.Dataset:
    """
    The integrated autocorrelation time of each parameter.

    It is

    .. math:: \\tau = 1 + 2 \\sum_{t \\ge 1} \\rho_t ,

    by Geyer's initial monotone sequence over all chains, each split in halves, as in
    ``arviz.ess(method="mean")``: :math:`\\tau` draws are worth one independent draw for the mean
    of that parameter.

    :param run: an ``MCMC`` object or an ArviZ object.
    :param var_names: names of variables; None for all.
    :param str unit: ``"draws"``, as they are kept; ``"steps"`` of the sampler; or ``"passes"``
        over the data. The last two need a run of this package, or one of NUTS with
        ``extra_fields=("num_steps",)``.
    :return: a dataset with a variable for each of the run; NaN where nothing moves.
    :raises ValueError: if there are no draws, if they are not finite, or if the unit is unknown.

    **References:**

    1. *Practical Markov Chain Monte Carlo*, section 3.3, Charles J. Geyer (1992).

    **Example:** an autoregression that remembers 0.9 of itself.

    .. doctest::

        >>> import arviz as az, numpy as np
        >>> from scipy.signal import lfilter
        >>> from numpyro_sgmcmc import autocorrelation_time

        >>> noise = np.random.default_rng(0).standard_normal((4, 50_000))
        >>> draws = {"x": lfilter([1.0], [1.0, -0.9], noise)}
        >>> first = int(az.__version__.split(".")[0]) < 1
        >>> data = az.from_dict(draws) if first else az.from_dict({"posterior": draws})
        >>> time = float(autocorrelation_time(data)["x"])
        >>> abs(time - (1 + 0.9) / (1 - 0.9)) < 1
        True
    """
    data = as_data(run)
    return time_of(draws_of(data, var_names)) * _draw_in(unit, data)


def time_of(posterior: xr.Dataset) -> xr.Dataset:
    """The time of each variable, in draws."""
    import arviz

    size = posterior.sizes["chain"] * posterior.sizes["draw"]
    varies = posterior.max(("chain", "draw")) > posterior.min(("chain", "draw"))
    return (size / arviz.ess(posterior, method="mean")).where(varies)


def _draw_in(unit: str, data: Any) -> float:
    """A draw in this unit."""
    one_of("unit", unit, _UNITS)
    if unit == "draws":
        return 1.0
    if unit == "steps" and "steps_per_sample" in data.attrs:
        return float(data.attrs["steps_per_sample"]) * float(data.attrs.get("thinning", 1))
    passes = passes_per_draw(data)  # of NUTS a step is a pass
    if passes is None:
        raise ValueError(
            f"The run does not say how many {unit} a draw takes: that is known for the kernels"
            " of this package, and for NUTS with `mcmc.run(..., extra_fields=('num_steps',))`."
            " Use unit='draws'."
        )
    return passes
