# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of the latent variables of groups, made after the run."""

from collections.abc import Mapping
import math
from pathlib import Path
from typing import Any

from jax import Array
import numpy as np
from numpyro.infer import MCMC
import xarray as xr

from numpyro_sgmcmc.data.converters import MOST_OF_64_BITS, path, random_key, whole
from numpyro_sgmcmc.results.cycle_draws import kept_draws
from numpyro_sgmcmc.results.draws_on_disk import in_memory, on_disk
from numpyro_sgmcmc.results.facts import variable_name
from numpyro_sgmcmc.results.group_draws import CHUNK, GroupDraws, thinned
from numpyro_sgmcmc.results.inference_data import MAX_VALUES
from numpyro_sgmcmc.results.row_subset import (
    Selection,
    choose_rows,
    site_shapes,
    subsampled_plates,
)
from numpyro_sgmcmc.results.run_data import arguments_of, check_data, marginal_of


def local_draws(
    mcmc: MCMC,
    groups: Selection | Mapping[str, Selection] | None = None,
    *,
    num_draws: int = 100,
    store: str | Path | None = None,
    rng_key: Array | None = None,
    max_values: int = MAX_VALUES,
) -> xr.Dataset:
    """
    Draws of the latent sites inside of subsampled plates, which a run integrates out.

    For each draw :math:`\\theta^{(s)}` of the run it draws from the conditional law of each group,

    .. math:: z_g^{(s)} \\sim p(z_g \\mid y_g, \\theta^{(s)}) ,

    and both together are draws of the joint posterior. Each draw is made by independent proposals
    for its group (:func:`~numpyro_sgmcmc.posterior.quadrature.draws_of`). Deterministic sites that
    depend on these draws are computed from them.

    :param mcmc: an ``MCMC`` object after its run.
    :param groups: the number of groups, drawn at random; or their numbers; or a dict of either by
        the name of the plate; None for all.
    :param int num_draws: number of draws of each chain, evenly spaced; at most the number of draws
        of the run.
    :param store: path of a Zarr store that the draws are written to, some thousand groups at a
        time, for instance ``"draws.zarr"``; None keeps them in memory. The draws do not depend on
        this choice. The folder has another name, with ``unfinished`` in it, until it is complete.
    :param rng_key: a random key.
    :param int max_values: largest number of values of a result in memory. With a ``store`` there is
        no limit.
    :return: variables of shape ``(chain, draw, plate, ...)``, with the numbers of draws and groups
        as coordinates. Variables of a ``store`` are read when they are used, and
        ``xarray.open_zarr("draws.zarr", chunks=None)`` opens them again.
    :raises ValueError: if the model has no latent sites inside of subsampled plates, if the groups
        do not exist, if the result would be too large, or if the folder of the store has files.
    :raises ImportError: if there is a ``store``, and zarr is not installed.

    **Example:** normal effects, each known from its prior and one row.

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import CCAdL, local_draws

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with numpyro.plate("groups", len(y), subsample_size=100) as g:
        ...         a = numpyro.sample("a", dist.Normal(mu, 1))
        ...         numpyro.sample("y", dist.Normal(a, 1), obs=y[g])

        >>> y = jax.random.normal(jax.random.key(0), (1_000,))
        >>> kernel = CCAdL(model, step_size=0.02, friction=20.0)
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> found = local_draws(mcmc, groups=[3, 14], num_draws=500)["a"]
        >>> found.dims, found.coords["groups"].values.tolist()
        (('chain', 'draw', 'groups'), [3, 14])
        >>> bool(abs(found.std("draw") - 0.5**0.5).max() < 0.1)
        True
    """
    args, kwargs = arguments_of(mcmc)
    num_draws, key = whole("num_draws", num_draws), random_key(rng_key)
    max_values = whole("max_values", max_values, most=MOST_OF_64_BITS)
    folder = None if store is None else path("store", store)
    marginal = marginal_of(mcmc)
    if marginal is None:
        raise ValueError(
            "The model has no latent sites inside of subsampled plates. All latent sites are in"
            " `mcmc.get_samples()`."
        )
    check_data(mcmc, "Draw the groups of")
    draws = kept_draws(mcmc).get_samples(group_by_chain=True)
    numbers, kept = thinned(draws, num_draws)
    plates = subsampled_plates(site_shapes(mcmc.sampler.model, draws, args, kwargs))
    local = {plate.name for plate in marginal.plates}
    if groups is None:
        groups = {p.name: np.arange(p.size) for p in plates if p.name in local}
    chosen = choose_rows(groups, tuple(p for p in plates if p.name in local), key, "groups")
    parts = GroupDraws(marginal.draws, plates, kept, key, args, kwargs)
    shapes = {name: parts.shapes(name, len(rows)) for name, rows in chosen.items() if name in local}
    if folder is None:
        _check_size([x.shape for sites in shapes.values() for x in sites.values()], max_values)
    chains = parts.shape[0]
    coords = {"chain": np.arange(chains), "draw": numbers}
    coords |= {variable_name(name): chosen[name] for name in shapes}
    variables: dict[str, Any] = {}
    with in_memory() if folder is None else on_disk(folder) as create:
        for plate, sites in shapes.items():
            arrays = {}
            for name, x in sites.items():
                site = variable_name(name)
                rest = [f"{site}_dim_{j}" for j in range(x.ndim - 3)]
                dims = ["chain", "draw", variable_name(plate), *rest]
                part = (chains, parts.draws_of(sites), min(CHUNK, x.shape[2]), *x.shape[3:])
                arrays[name] = create(site, x.shape, x.dtype, dims, part)
                variables[site] = dims, arrays[name]
            for here, values in parts.of(plate, np.asarray(chosen[plate]), sites):
                for name, array in arrays.items():
                    array[here] = values[name]
        if folder is not None:
            for name, coordinate in coords.items():
                shape = coordinate.shape
                create(name, shape, coordinate.dtype, [name], shape)[...] = coordinate
    if folder is not None:
        return xr.open_zarr(folder, chunks=None)
    return xr.Dataset(variables, coords)


def _check_size(shapes: list[tuple[int, ...]], max_values: int) -> None:
    """Raise ``ValueError`` if the result does not fit into memory."""
    values = sum(map(math.prod, shapes))
    if values > max_values:
        chains, draws, groups = max(shapes, key=math.prod)[:3]
        raise ValueError(
            f"`local_draws` would have {values:,} values, of {groups:,} groups for {draws:,} draws"
            f" of each of {chains} chains, more than max_values={max_values:,}. Write them to"
            ' disk, `store="draws.zarr"`, or ask for fewer groups, `groups=2_000`, or draws,'
            " `num_draws=50`. With enough memory (4 bytes for each value) raise `max_values`."
        )
