# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What is latent in the groups of a run, drawn after it."""

from collections.abc import Iterator, Mapping
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import block, seed, substitute
from numpyro.infer import MCMC
import xarray as xr

from numpyro_sgmcmc.results.draws_on_disk import in_memory, on_disk
from numpyro_sgmcmc.results.facts import variable_name
from numpyro_sgmcmc.results.inference_data import MAX_VALUES, arguments_of
from numpyro_sgmcmc.results.kept_draws import kept_draws
from numpyro_sgmcmc.results.kept_rows import (
    Selection,
    choose_rows,
    site_shapes,
    subsampled_plates,
)
from numpyro_sgmcmc.target.handlers import Plate, given_rows
from numpyro_sgmcmc.target.local_latents import Marginal

#: Groups whose values are drawn at once, and about how many values of them: 32 MB in float32.
_CHUNK, _CHUNK_VALUES = 2_000, 2**23


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

    For draws :math:`\\theta^{(s)}` of the run they are draws of the conditional law of each group,

    .. math:: z_g^{(s)} \\sim p(z_g \\mid y_g, \\theta^{(s)}) ,

    and both together are draws of the joint posterior. Each is made by a chain of its own around
    the mode of its group (:func:`~numpyro_sgmcmc.target.inner_rules.draws_of`); deterministic sites
    that depend on them are computed of them.

    :param mcmc: an ``MCMC`` object after its run.
    :param groups: how many groups, drawn at random, or their numbers, or a dict of either by the
        name of the plate; all if None.
    :param int num_draws: for how many draws of each chain, evenly spaced; at most as many as there
        are.
    :param store: path of a Zarr store that the draws are written to, some thousand groups at a
        time, for instance ``"draws.zarr"``; None keeps them in memory. The draws are the same. The
        folder has another name, with ``unfinished`` in it, until it has all of them.
    :param rng_key: a random key.
    :param int max_values: largest number of values that the result may have in memory; with a
        ``store`` there is no limit.
    :return: variables of shape ``(chain, draw, plate, ...)``, with the numbers of draws and groups
        as coordinates; those of a ``store`` are read when they are used, and
        ``xarray.open_zarr("draws.zarr", chunks=None)`` opens them again.
    :raises ValueError: if the model has no latent sites inside of subsampled plates, if there are
        no such groups, if the result would be too large, or if there are files in the place of the
        store.
    :raises ImportError: if there is a ``store``, and zarr is not installed.

    **Example:** normal effects, known as well as their prior and one row say it.

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
    marginal = getattr(mcmc.sampler.model, "fn", None)
    if not isinstance(marginal, Marginal):
        raise ValueError(
            "The model has no latent sites inside of subsampled plates: all of them are in"
            " `mcmc.get_samples()`."
        )
    draws = kept_draws(mcmc).get_samples(group_by_chain=True)
    chains, length = next(iter(draws.values())).shape[:2]
    numbers = np.unique(np.linspace(0, length - 1, min(num_draws, length)).round().astype(int))
    kept = {name: jnp.asarray(x[:, numbers]) for name, x in draws.items()}
    key = random.key(0) if rng_key is None else rng_key
    plates = subsampled_plates(site_shapes(mcmc.sampler.model, draws, args, kwargs))
    local = {plate.name for plate in marginal.plates}
    if groups is None:
        groups = {p.name: np.arange(p.size) for p in plates if p.name in local}
    chosen = choose_rows(groups, tuple(p for p in plates if p.name in local), key, "groups")

    def some_draws(kept: dict[str, Array], keys: Array, rows: dict[str, Array]) -> dict[str, Any]:
        def one(draw_and_key: tuple[dict[str, Array], Array]) -> dict[str, Any]:
            draw, key = draw_and_key
            model_key, key = random.split(key)
            given = given_rows(marginal.draws, plates, rows)
            with block(), seed(rng_seed=model_key), substitute(data=draw):
                return given(key, args, kwargs)

        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (kept, keys))
        found = lax.map(one, flat)
        return jax.tree.map(lambda x: x.reshape(*keys.shape[:2], *x.shape[1:]), found)

    parts = _Parts(jax.jit(some_draws), kept, key, plates)
    shapes = {name: parts.shapes(name, len(rows)) for name, rows in chosen.items() if name in local}
    if store is None:
        _check_size([x.shape for found in shapes.values() for x in found.values()], max_values)
    coords = {"chain": np.arange(chains), "draw": numbers}
    coords |= {variable_name(name): chosen[name] for name in shapes}
    variables: dict[str, Any] = {}
    with in_memory() if store is None else on_disk(Path(store)) as create:
        for plate, found in shapes.items():
            arrays = {}
            for name, x in found.items():
                site = variable_name(name)
                rest = [f"{site}_dim_{j}" for j in range(x.ndim - 3)]
                dims = ["chain", "draw", variable_name(plate), *rest]
                part = (chains, parts.draws_of(found), min(_CHUNK, x.shape[2]), *x.shape[3:])
                arrays[name] = create(site, x.shape, x.dtype, dims, part)
                variables[site] = dims, arrays[name]
            for here, values in parts.of(plate, np.asarray(chosen[plate]), found):
                for name, array in arrays.items():
                    array[here] = values[name]
        if store is not None:
            for name, coordinate in coords.items():
                shape = coordinate.shape
                create(name, shape, coordinate.dtype, [name], shape)[...] = coordinate
    if store is not None:
        return xr.open_zarr(Path(store), chunks=None)
    return xr.Dataset(variables, coords)


class _Parts(NamedTuple):
    """
    The draws of a plate, of some draws of the run and some groups at a time.

    - **program** - of draws, keys and groups.
    - **kept** - the draws of the run, shape (chains, draws, ...).
    - **key** - a random key.
    - **plates** - the subsampled plates of the model.
    """

    program: Any
    kept: dict[str, Array]
    key: Array
    plates: tuple[Plate, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """The number of chains and of draws."""
        chains, draws = next(iter(self.kept.values())).shape[:2]
        return chains, draws

    def shapes(self, plate: str, groups: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What there will be of so many groups of a plate, by site."""
        keys = random.split(self.key, self.shape)
        found = jax.eval_shape(self.program, self.kept, keys, self._rows(plate, np.zeros(1, int)))
        return {
            name: jax.ShapeDtypeStruct((*x.shape[:2], groups, *x.shape[3:]), x.dtype)
            for name, x in found[plate].items()
        }

    def draws_of(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int:
        """The number of draws of each chain in a part."""
        chains, draws = self.shape
        each = sum(math.prod(x.shape[3:]) * min(_CHUNK, x.shape[2]) for x in shapes.values())
        most = max(1, _CHUNK_VALUES // (chains * max(1, each)))
        return math.ceil(draws / math.ceil(draws / most))  # as equal ones as there can be

    def of(
        self, plate: str, rows: np.ndarray, shapes: Mapping[str, jax.ShapeDtypeStruct]
    ) -> Iterator[tuple[tuple[slice, slice, slice], dict[str, np.ndarray]]]:
        """
        :param rows: the numbers of the groups.
        :param shapes: of what there will be of them.
        :return: which chains, draws and groups these are, and the values of each site.
        """
        k = [p.name for p in self.plates].index(plate)
        each = self.draws_of(shapes)
        for first in range(0, len(rows), _CHUNK):
            here = self._rows(plate, rows[first : first + _CHUNK])
            chunk_key = random.fold_in(random.fold_in(self.key, k), first)
            keys = random.split(chunk_key, self.shape)
            for start in range(0, self.shape[1], each):
                some = slice(start, start + each)
                kept, some_keys = jax.tree.map(lambda x, some=some: x[:, some], (self.kept, keys))
                values = jax.device_get(self.program(kept, some_keys, here)[plate])
                yield (slice(None), some, slice(first, first + len(here[plate]))), values

    def _rows(self, plate: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        """These groups, and a row of each of the other plates."""
        return {p.name: np.zeros(1, int) for p in self.plates} | {plate: rows}


def _check_size(shapes: list[tuple[int, ...]], max_values: int) -> None:
    """
    :raises ValueError: if the result does not fit into memory.
    """
    values = sum(map(math.prod, shapes))
    if values > max_values:
        chains, draws, groups = max(shapes, key=math.prod)[:3]
        raise ValueError(
            f"`local_draws` would have {values:,} values, of {groups:,} groups for {draws:,} draws"
            f" of each of {chains} chains, more than max_values={max_values:,}. Write them to disk,"
            ' `store="draws.zarr"`; ask for some groups, `groups=2_000`, or for fewer draws,'
            " `num_draws=50`; or raise `max_values` if the memory is there (4 bytes each)."
        )
