# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Subsets of the rows of a run: the model, its draws and its likelihood on these rows."""

from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import log_likelihood

from numpyro_sgmcmc.data.converters import array, shown
from numpyro_sgmcmc.data.drawn_rows import ShapeOf
from numpyro_sgmcmc.data.rows_on_disk import on_disk, replaced
from numpyro_sgmcmc.posterior.group_handlers import plate_axes, with_observed
from numpyro_sgmcmc.posterior.handlers import Plate, given_rows
from numpyro_sgmcmc.posterior.model import NOT_SEEDED
from numpyro_sgmcmc.results.parts import compiled

#: Number of rows that are kept with the draws, for data on disk.
ROWS_FROM_DISK = 1_000

#: A choice of rows: their number, or a list of row numbers.
Selection = int | Array | np.ndarray


def full_sites(model: Callable, draws: dict, args: tuple, kwargs: dict) -> dict[str, dict]:
    """
    The sites of the model on its full data, with sites that group factors replace.

    Observations have their values, from a program without anything that they do not need. All other
    sites have shapes only.
    """
    sites = with_observed(site_shapes(model, draws, args, kwargs))
    observed = [
        name
        for name, site in sites.items()
        if site["type"] == "sample" and site["is_observed"] and site["value"] is not None
    ]

    def values(first: dict) -> dict[str, Array]:
        sites = with_observed(sites_of(model, first, args, kwargs))
        return {name: jnp.asarray(sites[name]["value"]) for name in observed}

    first = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), draws)
    known = compiled(values, first)(first)
    return {k: site | {"value": known[k]} if k in known else site for k, site in sites.items()}


def site_shapes(
    model: Callable,
    draws: Mapping[str, Any],
    args: tuple,
    kwargs: dict,
    sites_at: Callable | None = None,
    axes: int = 2,
) -> dict[str, dict]:
    """
    The sites with their shapes; values are not computed and must not be used.

    :param sites_at: function from a draw to the sites of the model, or None for a trace.
    :param int axes: number of leading axes of the draws for chains and draws.
    """
    sites: dict[str, dict] = {}

    def read(draws: dict) -> None:
        draw = {name: x[(0,) * axes] for name, x in draws.items()}
        sites.update((sites_at or sites_of)(model, draw, args, kwargs))

    args, kwargs = replaced((args, kwargs), [ShapeOf(x) for x in on_disk((args, kwargs))])
    jax.eval_shape(read, dict(draws))
    return sites


def chosen_site(observed: list[str], var_name: str | None) -> str:
    """
    The observed site with this name, or the only observed site.

    :raises ValueError: if no site has this name, or if there are several sites and no name.
    """
    if var_name is None and len(observed) == 1:
        return observed[0]
    if var_name not in observed:
        example = f", for instance `var_name={observed[0]!r}`" if observed else ""
        raise ValueError(
            f"`var_name={var_name!r}` is none of the {len(observed)} observed sites, {observed}."
            f" Choose one{example}."
        )
    return var_name


def sites_of(model: Callable, draw: dict, args: tuple, kwargs: dict) -> dict[str, dict]:
    """The sites of the model at a draw."""
    return trace(substitute(seed(model, random.key(0)), data=draw)).get_trace(*args, **kwargs)


def subsampled_plates(sites: Mapping[str, dict]) -> tuple[Plate, ...]:
    return tuple(
        Plate(name, *site["args"])
        for name, site in sites.items()
        if site["type"] == "plate" and site["args"][1] is not None
    )


def chunked_axis(
    sites: Mapping[str, dict], name: str, preferred: Container[str] = ()
) -> tuple[str, int] | None:
    """
    The subsampled plate that divides the rows of a site, with its axis.

    :param preferred: plates that come before other subsampled plates.
    """
    plates = {plate.name for plate in subsampled_plates(sites)}
    axes = [(plate, axis) for plate, axis in plate_axes(sites[name]).items() if plate in plates]
    return min(axes, key=lambda at: at[0] not in preferred, default=None)


def keep_rows(
    model: Callable,
    draws: dict,
    args: tuple,
    kwargs: dict,
    rows: Selection | Mapping[str, Selection] | None,
    rng_key: Array,
) -> tuple[Callable, dict, dict[str, np.ndarray]]:
    """
    Model and draws with the chosen rows as all data, and the row numbers by plate.

    For data on disk some rows are chosen by default.
    """
    if rows is None and not on_disk((args, kwargs)):
        return model, draws, {}
    sites = site_shapes(model, draws, args, kwargs)
    plates = subsampled_plates(sites)
    if rows is None:
        rows = {plate.name: min(ROWS_FROM_DISK, plate.size) for plate in plates}
    chosen = choose_rows(rows, plates, rng_key)
    # the samples need this too, because NUTS may have sites inside the plates
    return at_rows(model, plates, chosen), of_rows(draws, sites, chosen), chosen


def at_rows(
    model: Callable, plates: tuple[Plate, ...], chosen: Mapping[str, np.ndarray | Array]
) -> Callable:
    """The model on the chosen rows, and on all rows of the other plates."""
    indices = {
        plate.name: jnp.asarray(chosen.get(plate.name, np.arange(plate.size))) for plate in plates
    }
    return given_rows(model, plates, indices)


def of_rows(
    values: Mapping[str, Array], sites: Mapping[str, dict], chosen: Mapping[str, np.ndarray | Array]
) -> dict[str, Array]:
    """Values of the chosen rows for sites inside of plates; leading axes are for the draws."""
    subset = dict(values)
    for name in values.keys() & sites.keys():
        axes = len(jnp.shape(sites[name]["value"]))
        for plate, axis in plate_axes(sites[name]).items():
            if plate in chosen:
                subset[name] = jnp.take(subset[name], chosen[plate], axis=axis - axes)
    return subset


def choose_rows(
    rows: Selection | Mapping[str, Selection],
    plates: tuple[Plate, ...],
    rng_key: Array,
    argument: str = "rows",
) -> dict[str, np.ndarray]:
    """The numbers of the rows to keep, for each plate."""
    sizes = {plate.name: plate.size for plate in plates}
    known = ", ".join(f"'{name}' ({size:,} rows)" for name, size in sizes.items())
    if not plates:
        raise ValueError(
            f"`{argument}={shown(rows)}` chooses from the plates that have a `subsample_size`, but"
            " the model has none. Give the plate of the data a `subsample_size`, or leave"
            f" `{argument}` out."
        )
    if not isinstance(rows, Mapping):
        rows = array(argument, rows)
        if len(plates) > 1 and np.ndim(rows) > 0:
            raise ValueError(
                f"`{argument}` holds row numbers, but the model has several subsampled plates:"
                f" {known}. Name the plate, `{argument}={{'{plates[0].name}': ...}}`."
            )
        rows = dict.fromkeys(sizes, rows)
    if unknown := sorted(set(rows) - set(sizes)):
        raise ValueError(
            f"`{argument}` names {unknown}, but the subsampled plates"
            f"{' with latent sites' if argument == 'groups' else ' of the model'} are {known}."
        )
    return {
        name: row_numbers(f"plate '{name}'", chosen, sizes[name], rng_key)
        for name, chosen in rows.items()
    }


def row_numbers(where: str, rows: Selection, size: int, rng_key: Array) -> np.ndarray:
    """The row numbers, checked, or this many rows drawn at random."""
    numbers = array(where, rows)
    if numbers.dtype.kind not in "iu" or numbers.ndim > 1 or numbers.size == 0:
        raise ValueError(
            f"The rows of {where} must be a number of rows, or a vector of row numbers from 0 to"
            f" {size - 1:,}; got dtype {numbers.dtype} and shape {numbers.shape}. For a mask give"
            " `np.flatnonzero(mask)`."
        )
    if numbers.ndim == 0:
        if not 1 <= numbers <= size:
            raise ValueError(
                f"{numbers:,} rows of {where} were requested, and it has {size:,}. Ask for 1 to"
                f" {size:,} rows."
            )
        # the seed has the size and not the name, because plates of one size mostly have equal rows
        seed = np.append(np.ravel(random.key_data(rng_key)), size)
        chosen = np.random.default_rng(seed).choice(size, int(numbers), replace=False)
        return np.sort(chosen)
    outside = numbers[(numbers < 0) | (numbers >= size)]
    if outside.size:
        raise ValueError(
            f"{outside.size:,} of the {numbers.size:,} row numbers of {where} are out of range,"
            f" the first is {outside[0]}. They go from 0 to {size - 1:,}."
        )
    values, counts = np.unique(numbers, return_counts=True)
    if values.size < numbers.size:
        raise ValueError(
            f"Row {values[counts > 1][0]} of {where} is chosen {counts[counts > 1][0]} times, and"
            f" {numbers.size - values.size:,} of the {numbers.size:,} row numbers are repeated."
            " Give each row once, `np.unique(rows)`."
        )
    return numbers.astype(int)


def log_likelihood_of(
    model: Callable, draw: Mapping[str, Array], args: tuple, kwargs: dict
) -> dict[str, Array]:
    """The log likelihood of every observation at a draw."""
    return log_likelihood(seeded(model), draw, *args, batch_ndims=0, **kwargs)


def seeded(model: Callable) -> Callable:
    """A model with a key for the ``numpyro.prng_key`` of a random likelihood."""

    def with_key(*args: Any, **kwargs: Any) -> Any:
        return seed(model, random.key(0), hide_types=NOT_SEEDED)(*args, **kwargs)

    return with_key
