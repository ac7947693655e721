# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Rows to predict, some thousand at a time, with the draws of their groups."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
import math
from typing import Any, NamedTuple
import zlib

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro.handlers import seed, substitute, trace, uncondition
from numpyro.infer import MCMC
from numpyro.primitives import Messenger

from numpyro_sgmcmc.data.converters import array
from numpyro_sgmcmc.posterior.checks.arguments import checked_arrays
from numpyro_sgmcmc.posterior.checks.exceptions import explained
from numpyro_sgmcmc.posterior.group_handlers import group_axis, with_observed
from numpyro_sgmcmc.posterior.handlers import Model, full_data, without_wrappers
from numpyro_sgmcmc.posterior.numpyro_private import is_scanned, is_seen
from numpyro_sgmcmc.results.cycle_draws import kept_draws
from numpyro_sgmcmc.results.group_draws import CHUNK, GroupDraws, thinned
from numpyro_sgmcmc.results.parts import compiled, waiting_bar
from numpyro_sgmcmc.results.row_subset import (
    at_rows,
    chunked_axis,
    site_shapes,
    subsampled_plates,
)
from numpyro_sgmcmc.results.run_data import arguments_of, check_data, marginal_of

#: Largest number of rows that are predicted at once, and approximate number of their values: 32 MB
#: in float32.
MOST_ROWS, _CHUNK_VALUES = 10_000, 2**23


class Part(NamedTuple):
    """
    Predictions of a site for some of its rows.

    - **axis** - the axis of the rows in the site, or None if it has none and counts as one row.
    - **rows** - numbers of the rows.
    - **values** - shape (draws, rows, ...).
    - **observed** - the observation of each row, and whether it is not masked, or None.
    """

    name: str
    axis: int | None
    rows: slice
    values: np.ndarray
    observed: Any


@dataclass(frozen=True)
class NewRows:
    """
    Rows to predict, with what the run knows of them.

    - **sites** - the sites of the model on all of them.
    - **draws** - draws of its latent sites, shape (chains, draws, ...).
    - **known** - numbers in the run of the members of plates, -1 for new ones.
    - **local** - sites by plate that the run integrates out.
    - **of_groups** - draws of these sites for groups of the run, or None if all groups are new.
    """

    model: Model
    args: tuple
    kwargs: dict
    sites: dict[str, dict]
    draws: dict[str, Array]
    known: dict[str, np.ndarray]
    local: dict[str, tuple[str, ...]]
    of_groups: GroupDraws | None
    key: Array

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of chains and draws."""
        chains, draws = next(iter(self.draws.values())).shape[:2]
        return chains, draws

    def predictions(self, names: Sequence[str], observed: bool = False) -> Iterator[Part]:
        """
        Predict sites part by part.

        :param observed: whether to return the observations of the rows too.
        """
        axes = {name: self.rows_of(name) for name in names}
        for plate in dict.fromkeys(None if at is None else at[0] for at in axes.values()):
            own = {k: at and at[1] for k, at in axes.items() if plate == (at and at[0])}
            size = 1 if plate is None else self.sites[plate]["args"][0]
            length, program, shapes = self.length(plate, list(own)), None, None
            if plate in self.local and self.of_groups is not None:
                shapes = self.of_groups.shapes(plate, length)
            with waiting_bar(size, f"predictions of {', '.join(own)}") as seen:
                for first in range(0, size, length):
                    # copies of the last row give the last part the length of the others
                    rows = np.minimum(np.arange(first, first + length), size - 1)
                    given = self._given(plate, rows, first, shapes)
                    if program is None:
                        program = compiled(self._program(plate, own, observed), *given)
                    count = min(length, size - first)
                    predicted, found = jax.device_get(program(*given))
                    for name, axis in own.items():
                        here = found and tuple(x[:count] for x in found[name])
                        some = slice(first, first + count)
                        yield Part(name, axis, some, predicted[name][:, :count], here)
                    seen.update(count)

    def rows_of(self, name: str) -> tuple[str, int] | None:
        """The plate that divides the rows of a site, with its axis."""
        return chunked_axis(self.sites, name, preferred=self.local)

    @staticmethod
    def _plates_of(site: dict) -> set[str]:
        return {frame.name for frame in site.get("cond_indep_stack", ())}

    def length(self, plate: str | None, names: Sequence[str]) -> int:
        """The number of rows that are predicted at once."""
        size = 1 if plate is None else self.sites[plate]["args"][0]
        each = sum(math.prod(jnp.shape(self.sites[name]["value"])) for name in names) // size
        most = min(size, CHUNK if plate in self.local else MOST_ROWS)
        return max(1, min(most, _CHUNK_VALUES // (math.prod(self.shape) * max(1, each))))

    def _given(self, plate: str | None, rows: np.ndarray, first: int, shapes: Any) -> tuple:
        """The rows, and the draws, keys and numbers of members for them."""
        # what is common to all parts has the same key in all of them
        common = random.split(self.key, math.prod(self.shape))
        own = jax.vmap(random.fold_in, (0, None))(common, 1 + first)
        draws = dict(self.draws)
        known = {k: x[rows] if k == plate else x for k, x in self.known.items()}
        if shapes is not None and plate is not None and self.of_groups is not None:
            parts = replace(self.of_groups, key=random.fold_in(self.of_groups.key, first))
            found = parts.in_memory(plate, np.maximum(known[plate], 0), shapes)
            for name in self.local[plate]:
                axis = group_axis(self.sites[name], plate)
                draws[name] = jnp.moveaxis(jnp.asarray(found[name]), 2, 2 + axis)
            known[plate] = np.where(known[plate] >= 0, np.arange(len(rows)), -1)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), draws)
        known = {k: jnp.asarray(x) for k, x in known.items()}
        return jnp.asarray(rows), flat, (common, own), known

    def _program(self, plate: str | None, axes: Mapping[str, int | None], observed: bool) -> Any:
        """The function of what is given to predictions and observations, with rows first."""
        plates = subsampled_plates(self.sites)
        around = {f.name for name in axes for f in self.sites[name]["cond_indep_stack"]}
        # rows of other plates make no difference, but a plate cannot be empty
        others = {p.name: np.zeros(1, int) for p in plates if p.name not in around}

        def observation(name: str, site: dict) -> Array:
            if (value := site["infer"].get("obs")) is None:
                raise ValueError(f"Site '{name}' has no observations outside of a `scan`.")
            return jnp.broadcast_to(value, site["fn"].shape())

        def rows_first(name: str, x: Array) -> Array:
            axis = axes[name]
            return x[None] if axis is None else jnp.moveaxis(x, axis, 0)

        are_new = {k for k, x in self.known.items() if np.any(x < 0)}
        # sites inside of a `scan` take no other handler's values
        given = {
            name
            for name, site in self.sites.items()
            if (is_scanned(site) or not self._plates_of(site) & self.known.keys())
            and not self._plates_of(site) & are_new
        }

        def values(rows: Array, draws: dict, keys: Any, known: dict) -> tuple[dict, Any]:
            of_rows = others if plate is None else others | {plate: rows}
            model = uncondition(at_rows(self.model, plates, of_rows))
            known = {k: x[:1] if k in others else x for k, x in known.items()}

            def sites(draw_and_keys: tuple[dict, Any]) -> dict[str, dict]:
                draw, (common, own) = draw_and_keys
                chosen = {k: _members(self.sites[k], draw[k], known) for k in given & draw.keys()}
                of_draw = substitute(model, data=chosen)
                with _Posterior(draw, known, are_new, plate, common, own):
                    return trace(seed(of_draw, own)).get_trace(*self.args, **self.kwargs)

            def predicted(draw_and_keys: tuple[dict, Any]) -> dict[str, Array]:
                found = sites(draw_and_keys)
                return {k: rows_first(k, found[k]["value"]) for k in axes}

            seen = None
            if observed:
                found = sites(jax.tree.map(lambda x: x[0], (draws, keys)))
                seen = {
                    k: (rows_first(k, observation(k, found[k])), rows_first(k, is_seen(found[k])))
                    for k in axes
                }
            return lax.map(predicted, (draws, keys)), seen

        return values


def new_rows(
    mcmc: MCMC,
    given: tuple[tuple, dict] | None,
    num_draws: int,
    key: Array,
    known_groups: Any = None,
    wanted: list[str] | None = None,
) -> tuple[NewRows, list[str], np.ndarray]:
    """
    The rows of some arguments, the sites to predict, and the numbers of the kept draws.

    :param given: arguments of the model; None for those of the run, all of whose groups are known.
    """
    run = arguments_of(mcmc)
    numbers, draws = thinned(kept_draws(mcmc).get_samples(group_by_chain=True), num_draws)
    marginal = marginal_of(mcmc)
    model: Any = mcmc.sampler.model if marginal is None else marginal.model
    args, kwargs = run if given is None else checked_arrays(model, *given)
    old = site_shapes(mcmc.sampler.model, draws, *run)
    with explained(model, args, kwargs):
        new = site_shapes(uncondition(full_data(model)), draws, args, kwargs, _sites_at)
    chosen = _outputs(new, draws, with_observed(old), wanted)
    local = {} if marginal is None else {p.name: p.names for p in marginal.plates if p.name in new}
    sizes = {name: old[name]["args"][0] for name in local}
    known = _known(known_groups, new, draws, sizes, given is None)
    key, of_groups_key = random.split(key)
    of_groups = None
    if marginal is not None and any(np.any(known[name] >= 0) for name in local):
        check_data(mcmc, "Draw the groups of")
        plates = subsampled_plates(old)
        of_groups = GroupDraws(marginal.draws, plates, draws, of_groups_key, *run)
    latents = {k: x for k, x in draws.items() if k in new and new[k]["type"] == "sample"}
    return NewRows(model, args, kwargs, new, latents, known, local, of_groups, key), chosen, numbers


def _members(site: dict, value: Array, known: Mapping[str, Array]) -> Array:
    """The values of a site for members of its plates, by their numbers; some value for new ones."""
    for frame in site["cond_indep_stack"]:
        if frame.name in known:
            numbers = jnp.maximum(known[frame.name], 0)
            value = jnp.take(value, numbers, axis=group_axis(site, frame.name))
    return value


class _Posterior(Messenger):
    """
    Handler that gives latent sites their draws, and members of plates without a draw their prior.

    :param draw: values by site.
    :param known: number in these values of each member of a plate, or -1.
    :param are_new: plates some of whose members have no draw.
    :param plate: the plate of the rows of this part.
    :param common: random key of the sites outside of it, the same for all parts.
    :param own: random key of the sites inside of it.
    """

    def __init__(
        self,
        draw: Mapping[str, Array],
        known: Mapping[str, Array],
        are_new: set[str],
        plate: str | None,
        common: Array,
        own: Array,
    ) -> None:
        self.draw, self.known, self.are_new = draw, known, are_new
        self.plate, self.common, self.own = plate, common, own
        super().__init__(None)

    def _value(self, msg: dict[str, Any]) -> tuple[Array, Array | None]:
        """The draw of a site, and which of its members have one; None if all have."""
        value, are_known = _members(msg, self.draw[msg["name"]], self.known), None
        for frame in msg["cond_indep_stack"]:
            if frame.name in self.are_new:
                others = [k for k in range(value.ndim) if k != group_axis(msg, frame.name)]
                here = jnp.expand_dims(self.known[frame.name] >= 0, others)
                are_known = here if are_known is None else are_known & here
        return value, are_known

    def _has_draw(self, msg: dict[str, Any]) -> bool:
        return msg["type"] == "sample" and not msg["is_observed"] and msg["name"] in self.draw

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample":
            return
        if msg["value"] is not None:
            some = [f.name for f in msg["cond_indep_stack"] if f.name in self.are_new]
            if some and self._has_draw(msg):
                raise ValueError(
                    f"Site '{msg['name']}' is inside of a `scan`, which takes values of all groups"
                    f" of plate '{some[0]}' or of none. Predict for known and for new groups one"
                    " after the other."
                )
            return
        if self._has_draw(msg):
            value, are_known = self._value(msg)
            if are_known is None:
                msg["value"] = value
                return
        is_inside = any(frame.name == self.plate for frame in msg["cond_indep_stack"])
        key = self.own if is_inside else self.common
        msg["kwargs"]["rng_key"] = random.fold_in(key, zlib.crc32(msg["name"].encode()))

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if self._has_draw(msg) and not is_scanned(msg):
            value, are_known = self._value(msg)
            if are_known is not None:
                msg["value"] = jnp.where(are_known, value, msg["value"])


def _sites_at(model: Model, draw: dict, args: tuple, kwargs: dict) -> dict[str, dict]:
    """The sites of the model, with the values of a draw where they have the right shape."""

    def given(site: dict) -> Array | None:
        value = draw.get(site["name"]) if site["type"] == "sample" else None
        return value if value is not None and jnp.shape(value) == site["fn"].shape() else None

    return trace(substitute(seed(model, random.key(0)), substitute_fn=given)).get_trace(
        *args, **kwargs
    )


def _outputs(
    new: Mapping[str, dict], draws: Mapping[str, Any], old: Mapping[str, dict], wanted: Any
) -> list[str]:
    """The sites to predict."""
    kinds = "sample", "deterministic"
    possible = [
        k
        for k, site in new.items()
        if site["type"] in kinds and not (k in draws and site["type"] == "sample")
    ]
    observed = [
        k
        for k in possible
        if k in old
        and old[k].get("is_observed")
        and not isinstance(without_wrappers(new[k]["fn"]), dist.Unit)
    ]
    if wanted is None and not observed:
        raise ValueError(
            "With these arguments the model has none of the observed sites of the run. Write"
            " `numpyro.sample('y', ..., obs=None if y is None else y[i])`, so that the site exists"
            " without observations."
        )
    if missing := [name for name in wanted or () if name not in possible]:
        raise ValueError(
            f"`var_names` has {missing}, which the model with these arguments does not predict. It"
            f" predicts {possible}."
        )
    return wanted or observed


def _known(
    groups: Any,
    new: Mapping[str, dict],
    draws: Mapping[str, Array],
    sizes: Mapping[str, int],
    are_same: bool,
) -> dict[str, np.ndarray]:
    """
    The numbers in the run of the members of plates, where they are not all of the run in order.

    :param sizes: the number of groups in the run, by plate with sites that are integrated out.
    :param are_same: whether the rows are those of the run.
    """
    # the members of each plate, in the run and with these arguments
    known_sizes, here = dict(sizes), {k: int(new[k]["args"][0]) for k in sizes}
    for name, x in draws.items():
        site = new.get(name, {"type": None})
        if site["type"] != "sample":
            continue
        shape, now = x.shape[2:], jnp.shape(site["value"])
        axes = {f.name: group_axis(site, f.name) for f in site["cond_indep_stack"]}
        apart = [k for k in range(len(now)) if k not in axes.values()]
        if len(shape) != len(now) or any(shape[k] != now[k] for k in apart):
            raise ValueError(
                f"Site '{name}' has shape {now} with these arguments, and had shape {shape} in the"
                " run. New rows need as many columns as the rows of the run."
            )
        for plate, axis in axes.items():
            known_sizes[plate], here[plate] = shape[axis], now[axis]
    if groups is None:
        groups = {}
    elif not isinstance(groups, Mapping):
        numbers = array("known_groups", groups)
        if not known_sizes or (numbers.ndim and len(known_sizes) > 1):
            names = f"plates {sorted(known_sizes)} have" if known_sizes else "no plate has"
            raise ValueError(
                f"`known_groups` is for the plate of the groups, and {names} latent sites."
                + (" Write `known_groups={'name': numbers}`." if known_sizes else " Leave it out.")
            )
        groups = dict.fromkeys(known_sizes, numbers)
    if unknown := sorted(set(groups) - set(known_sizes)):
        raise ValueError(
            f"`known_groups` names {unknown}, but the plates with latent sites are"
            f" {sorted(known_sizes)}."
        )
    known = {}
    for plate, size in known_sizes.items():
        count = here[plate]
        # rows of another call are other rows, also if there are as many; a plate inside of a `scan`
        # is no site
        is_row = plate in sizes or (plate in new and new[plate]["args"][1] is not None)
        if plate in groups:
            known[plate] = _checked_numbers(groups[plate], plate, count, size)
            values, counts = np.unique(known[plate], return_counts=True)
            if plate in sizes and (again := values[(counts > 1) & (values >= 0)]).size:
                raise ValueError(
                    f"Group {again[0]} of the run is given {counts[values == again[0]][0]} times in"
                    f" plate '{plate}', and would have an effect of its own each time. Put all of"
                    " its rows into one group of the new rows."
                )
        elif (is_row and not are_same) or count != size:
            latent = "effects that the run integrates out" if plate in sizes else "latent sites"
            raise ValueError(
                f"Plate '{plate}' has {latent}, {size:,} members in the run and {count:,} with"
                f" these arguments. Say which they are, `known_groups={{'{plate}': numbers}}`, with"
                " the number in the run of each, or -1 for a new one."
            )
        elif is_row:
            known[plate] = np.arange(size)
    return known


def _checked_numbers(numbers: Any, plate: str, now: int, size: int) -> np.ndarray:
    x = array(f"known_groups['{plate}']", numbers)
    if x.ndim == 0 and x == -1:
        x = np.full(now, -1)
    if x.dtype.kind not in "iu" or x.shape != (now,):
        raise ValueError(
            f"The groups of plate '{plate}' must be a vector of {now:,} numbers from 0 to"
            f" {size - 1:,}, or -1 for a new group; got dtype {x.dtype} and shape {x.shape}."
        )
    if (outside := x[(x < -1) | (x >= size)]).size:
        raise ValueError(
            f"{outside.size:,} of the {now:,} groups of plate '{plate}' are out of range, the first"
            f" is {outside[0]}. The run has the groups 0 to {size - 1:,}. A new group is -1."
        )
    return x.astype(int)
