# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Checks of models on devices, each of which sees its own rows only."""

from fractions import Fraction

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.rows_on_disk import on_disk, replaced
from numpyro_sgmcmc.data.sharding import ROWS, Shards
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.target import Target

#: Difference, relative to the largest term, above rounding errors and below the errors of a model
#: that depends on the rows of a device, such as their mean.
_SAME = 1e-4

#: Number of rows of a process that are tested among more of its rows.
_FEW = 64


def check_spread(whole: Target, shards: Shards) -> None:
    """
    Check that the terms of rows are equal on a device and among all rows.

    :param whole: the model with all of its data.
    :raises ValueError: if the terms of a device's rows depend on rows that it does not see.
    """
    view, parts = whole.model, shards.parts
    leaves = jax.tree.leaves((whole.args, whole.kwargs))
    sizes = {leaf.shape[0] for leaf, here in zip(leaves, shards.spread, strict=True) if here}
    sizes |= {len(source) for source in on_disk((whole.args, whole.kwargs))}
    if len(sizes) > 1:
        raise ValueError(
            "The arrays that are spread over devices have different numbers of rows:"
            f" {', '.join(f'{size:,}' for size in sorted(sizes))}. Spread the arrays of the"
            " subsampled plate only, and pass the others to the model without `spread_rows`."
        )
    (size,) = sizes
    if not view.plates:
        raise ValueError(
            f"The data are spread over {parts} devices, which needs minibatches, but no plate of"
            f" the model has a `subsample_size`. Write `numpyro.plate(name, {size},"
            f" subsample_size=...)` around the data; subsample_size={size} takes all rows."
        )
    for plate in view.plates:
        if plate.size != size:
            raise ValueError(
                f"Plate '{plate.name}' has a `subsample_size` and {plate.size:,} rows, but the"
                f" arrays that are spread over devices have {size:,}. Only their rows can be"
                " subsampled: leave the `subsample_size` of this plate out."
            )
        if plate.subsample_size % parts:
            near = max(parts, round(plate.subsample_size / parts) * parts)
            raise ValueError(
                f"Plate '{plate.name}' has subsample_size={plate.subsample_size}, which cannot be"
                f" divided evenly among {parts} devices. Use {near}."
            )
    try:
        each = whole._replace(model=view.on_each(parts), shards=shards)
        alike = _are_alike(whole, each) if whole.is_here else _first_are_alike(whole)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"The model cannot be evaluated on the rows of one of {parts} devices: {error}."
            f" {_REMEDY}{_not_spread(whole, shards, size)}"
        ) from error
    if not alike:
        raise ValueError(
            "The log density of rows on one device differs from the log density of the same rows"
            f" among all {size:,}. {_REMEDY}{_not_spread(whole, shards, size)}"
        )


_REMEDY = (
    "A device sees its own rows only. Index all data by the plate, and take the size of the plate"
    " from the data, `X.shape[0]`. Compute means and numbers of all rows before the run, and pass"
    " them as arguments."
)


def _not_spread(whole: Target, shards: Shards, size: int) -> str:
    """Return the advice on unspread arrays whose number of rows equals that of spread ones."""
    arguments = {"args": whole.args, "kwargs": whole.kwargs}
    leaves, _ = jax.tree_util.tree_flatten_with_path(arguments)
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for (path, leaf), here in zip(leaves, shards.spread, strict=True)
        if isinstance(leaf, jax.Array) and leaf.shape[:1] == (size,) and not here
    ]
    if not names:
        return ""
    return (
        f" The arrays {', '.join(names)} have {size:,} rows too and are not spread: use"
        " `spread_rows` for all."
    )


def _some_values(target: Target) -> Values:
    latents = target.model.latents
    keys = random.split(random.key(0), len(latents))
    return {
        name: random.uniform(key, latent.shape, latent.dtype, -1, 1)
        for key, (name, latent) in zip(keys, latents.items(), strict=True)
    }


def _first_are_alike(whole: Target) -> bool:
    """
    Return whether the first rows of this process have equal terms with and without other rows.

    It is the test if no process holds all rows. The number of other rows is the number of first
    rows.

    :raises ValueError: if other arrays are in the memory of devices.
    """
    sources, view = on_disk((whole.args, whole.kwargs)), whole.model
    for leaf in jax.tree.leaves((whole.args, whole.kwargs)):
        if isinstance(leaf, Array) and not leaf.is_fully_addressable:
            raise ValueError(
                "In several processes the rows must be all on disk, or all in the memory of"
                " devices, but one array is in memory. Wrap it, `RowsOnDisk(array)`, and spread"
                " the result"
            )
    few = min(_FEW, *(len(source.reader) // 2 for source in sources))
    if few == 0:
        return True

    def among(count: int) -> tuple[Array, dict[str, Array]]:
        (size,) = {plate.size for plate in view.plates}
        plates = tuple(plate._replace(size=count) for plate in view.plates)
        here = view._replace(plates=plates, on_disk=(), parts=Fraction(size, count))
        read = [jnp.asarray(source.reader.read(np.arange(count))) for source in sources]
        args, kwargs = replaced((whole.args, whole.kwargs), read)
        rows = {plate.name: jnp.arange(few) for plate in plates}
        data = rows, random.key(0), args, kwargs
        return jax.jit(here.potential_and_row_terms)(_some_values(whole), *data)

    (energy, terms), (others_energy, others) = among(2 * few), among(few)
    size = jnp.abs(energy) + sum(jnp.sum(jnp.abs(term)) for term in terms.values())
    off = [jnp.abs(energy - others_energy)]
    off += [few * jnp.nanmax(jnp.abs(terms[name] - others[name])) for name in terms]
    return not np.any(np.asarray(jnp.stack(off)) > _SAME * np.asarray(size))


def _are_alike(whole: Target, each: Target) -> bool:
    """
    Return whether the first rows of every device have equal terms there and among all rows.

    The prior must be equal too. The test is at some values of the latent sites.
    """
    z = _some_values(whole)
    shards = each.shards
    assert shards is not None

    def among_all(target: Target, z: Values, rng_key: Array) -> tuple[Array, dict[str, Array]]:
        view, where = target.model, (rng_key, target.args, target.kwargs)
        starts = {plate.name: plate.size // shards.parts for plate in view.plates}
        rows = {
            name: (np.arange(shards.parts)[:, None] * starts[name] + first).ravel()
            for name, first in each.model.first_rows().items()
        }
        return view.potential_and_row_terms(z, jax.tree.map(jnp.asarray, rows), *where)

    def deviation(
        target: Target, z: Values, rng_key: Array, energy: Array, terms: dict[str, Array]
    ) -> Array:
        where = rng_key, target.args, target.kwargs
        here, own_terms = target.model.potential_and_row_terms(z, target.model.first_rows(), *where)
        worst = []
        for name, term in terms.items():
            # the scale is N / n for a row among all rows, and N / (n / P) on its device
            wanted = shards.parts * term.reshape(shards.parts, -1)[lax.axis_index(ROWS)]
            off = jnp.abs(own_terms[name] - wanted) / jnp.max(jnp.abs(term))
            worst.append(jnp.nanmax(off, initial=0.0) / shards.parts)
        size = jnp.abs(energy) + sum(jnp.sum(jnp.abs(term)) for term in terms.values())
        others = [
            e + sum(map(jnp.sum, t.values())) for e, t in ((here, own_terms), (energy, terms))
        ]
        worst.append(jnp.abs(others[0] - others[1]) / size)
        return lax.pmax(jnp.stack(worst), ROWS)

    seen, again = (whole.compiled(among_all)(z, random.key(k)) for k in (0, 1))
    if any(
        map(np.any, jax.tree.leaves(jax.tree.map(lambda a, b: np.asarray(a != b), seen, again)))
    ):
        return True  # a likelihood that is a random estimate cannot be compared
    deviations = np.asarray(each.compiled(deviation)(z, random.key(0), *seen))
    return not np.any(deviations > _SAME)  # NaN is in both, or a later check refuses it
