# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Rows to predict, some thousand at a time, with the draws of their groups."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, trace, uncondition
from numpyro.infer import MCMC
from numpyro.primitives import Messenger

from numpyro_sgmcmc.data.converters import array
from numpyro_sgmcmc.posterior.checks.arguments import checked_arrays
from numpyro_sgmcmc.posterior.group_handlers import group_axis, with_observed
from numpyro_sgmcmc.posterior.handlers import Model, full_data
from numpyro_sgmcmc.posterior.numpyro_private import is_seen
from numpyro_sgmcmc.results.cycle_draws import kept_draws
from numpyro_sgmcmc.results.group_draws import CHUNK, GroupDraws, thinned
from numpyro_sgmcmc.results.inference_data import arguments_of, marginal_of
from numpyro_sgmcmc.results.parts import compiled, waiting_bar
from numpyro_sgmcmc.results.row_subset import (
    at_rows,
    chunked_axis,
    site_shapes,
    subsampled_plates,
)
from numpyro_sgmcmc.results.run_data import check_data

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
        axes = {name: chunked_axis(self.sites, name) for name in names}
        for plate in dict.fromkeys(None if at is None else at[0] for at in axes.values()):
            own = {k: at and at[1] for k, at in axes.items() if plate == (at and at[0])}
            size = 1 if plate is None else self.sites[plate]["args"][0]
            each = sum(math.prod(jnp.shape(self.sites[name]["value"])) for name in own) // size
            length = min(size, CHUNK if plate in self.local else MOST_ROWS)
            length = max(1, min(length, _CHUNK_VALUES // (math.prod(self.shape) * max(1, each))))
            program = None
            with waiting_bar(size, f"predictions of {', '.join(own)}") as seen:
                for first in range(0, size, length):
                    # copies of the last row give the last part the length of the others
                    rows = np.minimum(np.arange(first, first + length), size - 1)
                    given = self._given(plate, rows, random.fold_in(self.key, first))
                    if program is None:
                        program = compiled(self._program(plate, own, observed), *given)
                    count = min(length, size - first)
                    predicted, found = jax.device_get(program(*given))
                    for name, axis in own.items():
                        here = found and tuple(x[:count] for x in found[name])
                        some = slice(first, first + count)
                        yield Part(name, axis, some, predicted[name][:, :count], here)
                    seen.update(count)

    def _given(self, plate: str | None, rows: np.ndarray, key: Array) -> tuple:
        """The rows, and the draws, keys and numbers of members for them."""
        key, of_groups_key = random.split(key)
        keys = random.split(key, math.prod(self.shape))
        draws = dict(self.draws)
        known = {k: x[rows] if k == plate else x for k, x in self.known.items()}
        if plate in self.local and self.of_groups is not None:
            parts = replace(self.of_groups, key=of_groups_key)
            found = parts.in_memory(plate, np.maximum(known[plate], 0))
            for name in self.local[plate]:
                axis = group_axis(self.sites[name], plate)
                draws[name] = jnp.moveaxis(jnp.asarray(found[name]), 2, 2 + axis)
            known[plate] = np.where(known[plate] >= 0, np.arange(len(rows)), -1)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), draws)
        return jnp.asarray(rows), flat, keys, {k: jnp.asarray(x) for k, x in known.items()}

    def _program(self, plate: str | None, axes: Mapping[str, int | None], observed: bool) -> Any:
        """The function of what is given to predictions and observations, with rows first."""
        plates = subsampled_plates(self.sites)
        around = {f.name for name in axes for f in self.sites[name]["cond_indep_stack"]}
        # rows of other plates make no difference, but a plate cannot be empty
        others = {p.name: np.zeros(1, int) for p in plates if p.name not in around}

        def rows_first(name: str, x: Array) -> Array:
            axis = axes[name]
            return x[None] if axis is None else jnp.moveaxis(x, axis, 0)

        def values(rows: Array, draws: dict, keys: Array, known: dict) -> tuple[dict, Any]:
            of_rows = others if plate is None else others | {plate: rows}
            model = uncondition(at_rows(self.model, plates, of_rows))
            known = {k: x[:1] if k in others else x for k, x in known.items()}

            def sites(draw_and_key: tuple[dict, Array]) -> dict[str, dict]:
                draw, key = draw_and_key
                with _Posterior(draw, known):
                    return trace(seed(model, key)).get_trace(*self.args, **self.kwargs)

            def predicted(draw_and_key: tuple[dict, Array]) -> dict[str, Array]:
                found = sites(draw_and_key)
                return {k: rows_first(k, found[k]["value"]) for k in axes}

            seen = None
            if observed:
                found = sites(jax.tree.map(lambda x: x[0], (draws, keys)))
                seen = {
                    k: (rows_first(k, found[k]["infer"]["obs"]), rows_first(k, is_seen(found[k])))
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
    new = site_shapes(uncondition(full_data(model)), {}, args, kwargs)
    chosen = _outputs(new, draws, with_observed(old), wanted)
    local = {} if marginal is None else {p.name: p.names for p in marginal.plates if p.name in new}
    sizes = {name: old[name]["args"][0] for name in local}
    known = _known(known_groups, new, draws, sizes, given is None)
    of_groups = None
    if marginal is not None and any(np.any(known[name] >= 0) for name in local):
        check_data(mcmc, "Draw the groups of")
        of_groups = GroupDraws(marginal.draws, subsampled_plates(old), draws, key, *run)
    latents = {k: x for k, x in draws.items() if k in new and new[k]["type"] == "sample"}
    return NewRows(model, args, kwargs, new, latents, known, local, of_groups, key), chosen, numbers


class _Posterior(Messenger):
    """
    Handler that gives latent sites their draws, and members of plates without a draw their prior.

    :param draw: values by site.
    :param known: number in these values of each member of a plate, or -1.
    """

    def __init__(self, draw: Mapping[str, Array], known: Mapping[str, Array]) -> None:
        self.draw, self.known = draw, known
        super().__init__(None)

    def _plates(self, msg: dict[str, Any]) -> list[str] | None:
        """The plates of a site whose members are chosen; None if the site has no draw."""
        if msg["type"] != "sample" or msg["is_observed"] or msg["name"] not in self.draw:
            return None
        return [frame.name for frame in msg["cond_indep_stack"] if frame.name in self.known]

    def process_message(self, msg: dict[str, Any]) -> None:
        if self._plates(msg) == []:
            msg["value"] = self.draw[msg["name"]]

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if not (plates := self._plates(msg)):
            return
        value, is_known = self.draw[msg["name"]], jnp.asarray(True)
        for plate in plates:
            axis, numbers = group_axis(msg, plate), self.known[plate]
            value = jnp.take(value, jnp.maximum(numbers, 0), axis=axis)
            is_known &= jnp.expand_dims(numbers >= 0, [k for k in range(value.ndim) if k != axis])
        msg["value"] = jnp.where(is_known, value, msg["value"])


def _outputs(
    new: Mapping[str, dict], draws: Mapping[str, Any], old: Mapping[str, dict], wanted: Any
) -> list[str]:
    """The sites to predict."""
    kinds = "sample", "deterministic"
    possible = [k for k, site in new.items() if site["type"] in kinds and k not in draws]
    observed = [k for k in possible if k in old and old[k].get("is_observed")]
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
    shapes: dict[str, dict[int, str]] = {}  # by plate and size in the run, a site
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
            shapes.setdefault(plate, {})[shape[axis]] = name
    known_sizes = {k: max(x) for k, x in shapes.items()} | dict(sizes)
    if isinstance(groups, str) and groups == "new":
        groups = {name: np.full(new[name]["args"][0], -1) for name in known_sizes}
    elif groups is None:
        groups = {}
    elif not isinstance(groups, Mapping):
        if len(known_sizes) != 1:
            raise ValueError(
                f"`groups` must name the plate of the groups, since {len(known_sizes)} plates have"
                f" latent sites: {sorted(known_sizes)}. Write `groups={{'name': numbers}}`."
            )
        groups = dict.fromkeys(known_sizes, groups)
    if unknown := sorted(set(groups) - set(known_sizes)):
        raise ValueError(
            f"`groups` names {unknown}, but the plates with latent sites are {sorted(known_sizes)}."
        )
    known = {}
    for plate, size in known_sizes.items():
        now = new[plate]["args"][0]
        if plate in groups:
            known[plate] = _checked_numbers(groups[plate], plate, now, size)
        elif (plate in sizes and not are_same) or now != size:
            latent = "effects that the run integrates out" if plate in sizes else "latent sites"
            raise ValueError(
                f"Plate '{plate}' has {latent}, {size:,} members in the run and {now:,} with these"
                f" arguments. Say which they are, `known_groups={{'{plate}': numbers}}`, with the"
                " number in the run of each, or -1 for a new one."
            )
        else:
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
