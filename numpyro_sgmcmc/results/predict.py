# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Predictions for new rows: draws, or means and quantiles."""

from collections.abc import Mapping, Sequence
import math
from pathlib import Path
from typing import Any

from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
import xarray as xr

from numpyro_sgmcmc.data.converters import (
    MOST_OF_64_BITS,
    names,
    path,
    random_key,
    share,
    whole,
)
from numpyro_sgmcmc.results.draws_on_disk import in_memory, on_disk
from numpyro_sgmcmc.results.facts import plate_dims, variable_name
from numpyro_sgmcmc.results.inference_data import MAX_VALUES
from numpyro_sgmcmc.results.new_rows import new_rows


def predict(
    mcmc: MCMC,
    *args: Any,
    known_groups: Any = None,
    var_names: str | Sequence[str] | None = None,
    quantiles: Sequence[float] | None = None,
    num_draws: int = 100,
    store: str | Path | None = None,
    rng_key: Array | None = None,
    max_values: int = MAX_VALUES,
    **kwargs: Any,
) -> xr.Dataset:
    """
    Draws of the predictive distribution for new rows, or their means and quantiles.

    For each draw :math:`\\theta^{(s)}` of the run it draws an observation of each new row,

    .. math:: \\tilde y_i^{(s)} \\sim p(\\tilde y_i \\mid z_{g(i)}^{(s)}, \\theta^{(s)}), \\qquad
        z_g^{(s)} \\sim \\begin{cases} p(z_g \\mid y_g, \\theta^{(s)}) & \\text{known group} \\\\
        p(z_g \\mid \\theta^{(s)}) & \\text{new group,} \\end{cases}

    where :math:`z_g` are the latent sites of a group, if there are any. Every row of the arguments
    counts, whatever the ``subsample_size``. Observations among the arguments are ignored.

    Rows of a subsampled plate are predicted some thousand at a time. With ``quantiles`` only the
    mean, standard deviation and quantiles of each row are kept, so that memory does not grow with
    the draws. Calls for other sites or another number of draws have other random numbers, even with
    the same key.

    :param mcmc: an ``MCMC`` object after its run, of any kernel.
    :param args: arguments of the model with the new rows. The model needs
        ``obs=None if y is None else y[i]`` if the observations are left out.
    :param known_groups: number in the run of each group of the new rows, where -1 is a new group; a
        single -1, if all are new; or a dict of either by the name of the plate of the groups. It
        is required for effects that the run integrates out, or that are inside of the plate of the
        rows. Other groups are taken to be those of the run if their number is the same.
    :param var_names: sample or deterministic sites to predict; None for all observed sites.
    :param quantiles: levels between 0 and 1, for instance ``[0.05, 0.5, 0.95]``. The result then
        has the mean, the standard deviation and these quantiles over all draws.
    :param int num_draws: number of draws of each chain, evenly spaced; at most the number of draws
        of the run.
    :param store: path of a Zarr store that the draws are written to; None keeps them in memory.
        The draws do not depend on this choice.
    :param rng_key: a random key.
    :param int max_values: largest number of values of a result in memory.
    :param kwargs: keyword arguments of the model.
    :return: variables of shape ``(chain, draw, plate, ...)``, or with ``quantiles``
        ``(statistic, plate, ...)``, where the coordinate ``statistic`` is ``"mean"``, ``"sd"`` and
        the levels, such as ``"0.05"``.
    :raises ValueError: if groups are not known, if there are no such sites, or if the result would
        be too large.
    :raises ImportError: if there is a ``store``, and zarr is not installed.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGNHT, predict

        >>> def model(x, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(x), subsample_size=10) as i:
        ...         law = dist.Normal(slope * x[i], 0.1)
        ...         numpyro.sample("y", law, obs=None if y is None else y[i])

        >>> x = jnp.linspace(0, 1, 100)
        >>> mcmc = MCMC(SGNHT(model, step_size=1e-3, friction=10.0), num_warmup=500,
        ...             num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, 2 * x)
        >>> found = predict(mcmc, jnp.array([0.5, 2.0]), quantiles=[0.05, 0.95])["y"]
        >>> found.dims, found.sel(statistic="mean").values.round(1).tolist()
        (('statistic', 'rows'), [1.0, 4.0])
    """
    num_draws, key = whole("num_draws", num_draws), random_key(rng_key)
    max_values = whole("max_values", max_values, most=MOST_OF_64_BITS)
    folder = None if store is None else path("store", store)
    wanted = None if var_names is None else names("var_names", var_names)
    levels = None
    if quantiles is not None:
        levels = list(dict.fromkeys(share("quantiles", float(q)) for q in np.ravel(quantiles)))
    if levels is not None and folder is not None:
        raise ValueError(
            "`store` is for draws. Leave it out: means and quantiles of the rows stay in memory."
        )
    rows, chosen, numbers = new_rows(mcmc, (args, kwargs), num_draws, key, known_groups, wanted)
    if levels is None:
        coords = {"chain": np.arange(rows.shape[0]), "draw": numbers}
    else:
        coords = {"statistic": np.array(["mean", "sd", *map(str, levels)])}
    shapes = {k: (*map(len, coords.values()), *jnp.shape(rows.sites[k]["value"])) for k in chosen}
    if folder is None:
        all_draws = {
            k: (rows.shape if rows.rows_of(k) is None else shape[:1]) + shape[1:]
            for k, shape in shapes.items()
        }
        _check_size(shapes if levels is None else all_draws, max_values)
    plates, variables = plate_dims(rows.sites), {}
    with in_memory() if folder is None else on_disk(folder) as create:
        for name, shape in shapes.items():
            variable = variable_name(name)
            dims = [*coords, *plates.get(variable, [])]
            dims += [f"{variable}_dim_{j}" for j in range(len(shape) - len(dims))]
            dtype = rows.sites[name]["value"].dtype
            if levels is not None and dtype != np.float32:
                dtype = np.float64
            chunks, at = list(shape), rows.rows_of(name)
            if at is not None:
                chunks[len(coords) + at[1]] = rows.length(at[0], [name])
            variables[variable] = dims, create(variable, shape, dtype, dims, tuple(chunks))
        for part in rows.predictions(chosen):
            if levels is None:
                values = part.values.reshape(*rows.shape, *part.values.shape[1:])
            else:
                values = _summary(part.values, levels)
            variable, head = variables[variable_name(part.name)][1], len(coords)
            if part.axis is None:
                variable[...] = values.squeeze(head)
            else:
                here = (slice(None),) * (head + part.axis) + (part.rows,)
                variable[here] = np.moveaxis(values, head, head + part.axis)
        if folder is not None:
            for name, x in coords.items():
                create(name, x.shape, x.dtype, [name], x.shape)[...] = x
    return xr.Dataset(variables, coords) if folder is None else xr.open_zarr(folder, chunks=None)


def _summary(values: np.ndarray, levels: Sequence[float]) -> np.ndarray:
    """Mean, standard deviation and quantiles over the first axis."""
    exact: Any = values if values.dtype == np.float32 else values.astype(np.float64)
    moments = exact.mean(0, dtype=np.float64), exact.std(0, dtype=np.float64)
    return np.stack([*moments, *np.quantile(exact, levels, axis=0)])


def _check_size(shapes: Mapping[str, tuple[int, ...]], max_values: int) -> None:
    """Raise ``ValueError`` if the result does not fit into memory."""
    if (values := sum(map(math.prod, shapes.values()))) > max_values:
        raise ValueError(
            f"`predict` would have {values:,} values, more than max_values={max_values:,}. Keep"
            " means and quantiles, `quantiles=[0.05, 0.5, 0.95]`; write the draws to disk,"
            ' `store="predictions.zarr"`; or ask for fewer, `num_draws=50`. With enough memory (4'
            " bytes for each value) raise `max_values`."
        )
