# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What is latent in the groups of a run, drawn after it."""

from collections.abc import Mapping
import math
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import block, seed, substitute
from numpyro.infer import MCMC
import xarray as xr

from numpyro_sgmcmc.results.facts import variable_name
from numpyro_sgmcmc.results.inference_data import MAX_VALUES, arguments_of, check_size
from numpyro_sgmcmc.results.kept_rows import (
    Selection,
    choose_rows,
    site_shapes,
    subsampled_plates,
)
from numpyro_sgmcmc.target.handlers import given_rows
from numpyro_sgmcmc.target.local_latents import Marginal

#: Groups whose values are drawn at once.
_CHUNK = 2_000


def local_draws(
    mcmc: MCMC,
    groups: Selection | Mapping[str, Selection] | None = None,
    *,
    num_draws: int = 100,
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
    :param rng_key: a random key.
    :param int max_values: largest number of values that the result may have.
    :return: variables of shape ``(chain, draw, plate, ...)``, with the numbers of draws and groups
        as coordinates.
    :raises ValueError: if the model has no latent sites inside of subsampled plates, if there are
        no such groups, or if the result would be too large.

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
    draws = mcmc.get_samples(group_by_chain=True)
    chains, length = next(iter(draws.values())).shape[:2]
    numbers = np.unique(np.linspace(0, length - 1, min(num_draws, length)).round().astype(int))
    kept = {name: jnp.asarray(x[:, numbers]) for name, x in draws.items()}
    key = random.key(0) if rng_key is None else rng_key
    plates = subsampled_plates(site_shapes(mcmc.sampler.model, draws, args, kwargs))
    local = {plate.name: plate for plate in marginal.plates}
    if groups is None:
        groups = {p.name: np.arange(p.size) for p in plates if p.name in local}
    chosen = choose_rows(groups, plates, key)

    def all_draws(kept: dict[str, Array], key: Array, rows: dict[str, Array]) -> dict[str, Any]:
        def one(draw_and_key: tuple[dict[str, Array], Array]) -> dict[str, Any]:
            draw, key = draw_and_key
            model_key, key = random.split(key)
            given = given_rows(marginal.draws, plates, rows)
            with block(), seed(rng_seed=model_key), substitute(data=draw):
                return given(key, args, kwargs)

        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)
        found = lax.map(one, (flat, random.split(key, chains * len(numbers))))
        return jax.tree.map(lambda x: x.reshape(chains, len(numbers), *x.shape[1:]), found)

    compiled = jax.jit(all_draws)
    variables: dict[str, Any] = {}
    coords: dict[str, Any] = {"chain": np.arange(chains), "draw": numbers}
    for k, plate in enumerate(plates):
        if plate.name not in chosen or plate.name not in local:
            continue
        rows = np.asarray(chosen[plate.name])
        each = max(1, math.prod(np.shape(rows)) * local[plate.name].dimension)
        check_size("local_draws", mcmc, each * len(numbers) // length, max_values)
        parts = []
        for start in range(0, len(rows), _CHUNK):
            here = {p.name: np.zeros(1, int) for p in plates}  # a row of each of the others
            here[plate.name] = rows[start : start + _CHUNK]
            chunk_key = random.fold_in(random.fold_in(key, k), start)
            parts.append(jax.device_get(compiled(kept, chunk_key, here)[plate.name]))
        coords[plate.name] = rows
        for name in parts[0]:
            values = np.concatenate([part[name] for part in parts], axis=2)
            rest = [f"{variable_name(name)}_dim_{j}" for j in range(values.ndim - 3)]
            variables[variable_name(name)] = ["chain", "draw", plate.name, *rest], values
    return xr.Dataset(variables, coords)
