# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Checks of latent sites inside of subsampled plates, which have to be integrated out."""

from collections.abc import Iterable, Mapping
import math

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to
from numpyro.distributions.transforms import IdentityTransform, IndependentTransform
from numpyro.handlers import seed, substitute, trace
from numpyro.ops.provenance import eval_provenance

from numpyro_sgmcmc.posterior.group_handlers import LocalPlate, group_axis
from numpyro_sgmcmc.posterior.handlers import Model, Plate, given_rows, is_masked, without_wrappers
from numpyro_sgmcmc.posterior.hidden_states import HiddenSite, HiddenStates
from numpyro_sgmcmc.posterior.local_latents import MOST_ON_A_PATH, Marginal
from numpyro_sgmcmc.posterior.numpyro_private import is_scanned
from numpyro_sgmcmc.posterior.quadrature import MOST_DIMENSIONS

#: Largest number of combinations of discrete values of a group.
MOST_COMBINATIONS = 1_000

_OUTSIDE = (
    "sample them for all groups outside of the plate, `z = numpyro.sample(...)` under a plate"
    " without `subsample_size`, and use `z[g]` inside."
)


def without_local_latents(
    model: Model, sites: Mapping[str, dict], plates: Iterable[Plate], args: tuple, kwargs: dict
) -> Model:
    """
    Return the model itself, or its :class:`Marginal` if subsampled plates have latent sites.

    :param sites: a trace of the model on the first rows of its plates.
    :param plates: plates with a ``subsample_size``.
    :raises ValueError: if the latent sites cannot be integrated out, group by group.
    """
    plates = tuple(plates)
    subsampled = {plate.name: plate for plate in plates if plate.subsample_size < plate.size}
    inside: dict[str, list[dict]] = {}
    plates_of: dict[str, list[Plate]] = {}
    for site in sites.values():
        if site["type"] == "sample" and not site["is_observed"]:
            names = [f.name for f in site["cond_indep_stack"] if f.name in subsampled]
            if names:
                inside.setdefault(names[0], []).append(site)
                plates_of[site["name"]] = [subsampled[name] for name in names]
    if not inside:
        return model
    where = {name: of_site[0].name for name, of_site in plates_of.items()}
    labels = _dependence(model, sites, plates, where, args, kwargs)
    needs = {
        name: (frozenset().union(*labels.get(name, [])) & set(where)) - {name} for name in sites
    }
    # this check is first, since it finds the likely cause of other errors
    _check_used(sites, where, needs)
    for name, of_site in plates_of.items():
        _check_local(sites[name], of_site)
    local_plates = []
    for name, local in inside.items():
        continuous, discrete, bounded, scanned, hidden_sites = [], [], False, [], []
        for site in local:
            if site["fn"].support.is_discrete and is_scanned(site):
                hidden_sites.append(_hidden_site(site, name))
            elif site["fn"].support.is_discrete:
                discrete.append((site["name"], len(site["fn"].enumerate_support(expand=False))))
            else:
                if is_scanned(site):
                    _check_scanned(site, name)
                    scanned.append((site["name"], group_axis(site, name)))
                transform = biject_to(site["fn"].support)
                shape = list(transform.inverse_shape(site["fn"].shape()))
                while isinstance(transform, IndependentTransform):
                    transform = transform.base_transform
                bounded = bounded or not isinstance(transform, IdentityTransform)
                del shape[group_axis(site, name)]
                continuous.append((site["name"], tuple(shape)))
        of_plate = LocalPlate(name, tuple(continuous), tuple(discrete), bounded)
        states = _hidden_states(hidden_sites, name)
        if hidden_sites and scanned:
            raise ValueError(
                f"The subsampled plate '{name}' has continuous ('{scanned[0][0]}') and discrete"
                f" ('{hidden_sites[0].name}') latent sites in a `scan`. Their density has a mode"
                " for each path of states, and the integrals would miss most of them. Have"
                " continuous effects of a group outside of the `scan`, or states alone."
            )
        local_plates.append(of_plate._replace(scanned=tuple(scanned), states=states))
        _check_combinations(local_plates[-1])
    hidden = _check_dependents(sites, subsampled, where, labels, needs)
    return Marginal(model, tuple(local_plates), hidden)


def _check_local(site: dict, plates: list[Plate]) -> None:
    """Raise ``ValueError`` if a latent site cannot be integrated out of its plates."""
    name, plate = site["name"], plates[0].name
    if len(plates) > 1:
        raise ValueError(
            f"Latent site '{name}' is inside two subsampled plates, '{plate}' and"
            f" '{plates[1].name}', so that its values cannot be integrated out group by group."
            " Leave the `subsample_size` of the inner plate out, or sample the site for all rows"
            " outside of both."
        )
    if site["fn"].support.is_discrete:
        kind = type(without_wrappers(site["fn"])).__name__
        if site["fn"].event_dim:
            raise ValueError(
                f"Latent site '{name}' in plate '{plate}' is discrete ({kind}) and has several"
                " values in each group. Write each value as a site of its own, without `to_event`."
            )
        try:
            site["fn"].enumerate_support(expand=False)
        except NotImplementedError as error:
            raise ValueError(
                f"Latent site '{name}' in plate '{plate}' is discrete ({kind}) and has infinitely"
                " many values, which cannot be summed over. Write the sum into the likelihood, as"
                " `numpyro.distributions.NegativeBinomial2` does for a `Poisson` with a `Gamma`"
                " rate; or truncate it, with a `Categorical`."
            ) from error
        times = site["fn"].batch_shape[0] if is_scanned(site) else 1
        has_several = math.prod(site["fn"].batch_shape) > plates[0].subsample_size * times
        if has_several and is_scanned(site):
            raise ValueError(
                f"Latent site '{name}' in plate '{plate}' has several states at each time of a"
                " group. Write one `Categorical` of their combinations; or give each a group of its"
                " own, if they are independent."
            )
        if has_several:
            raise ValueError(
                f"Latent site '{name}' in plate '{plate}' is discrete ({kind}) and has several"
                " values in each group, so that a step would sum over all their combinations. Sum"
                " over each value separately in the likelihood,"
                " `numpyro.distributions.MixtureSameFamily(weights, components)`."
            )


def _hidden_site(site: dict, plate: str) -> HiddenSite:
    """Return the facts of a discrete site in the body of a ``scan``, or raise ``ValueError``."""
    fn = site["fn"]
    if is_masked(fn):
        raise ValueError(
            f"The discrete site '{site['name']}' of the subsampled plate '{plate}' is in a `scan`"
            " and has a mask. A masked state would count as one of equal states, and cut"
            " the chain. Put `numpyro.handlers.mask` around the observed sites alone."
        )
    values = np.asarray(fn.enumerate_support(expand=False)).ravel()
    return HiddenSite(site["name"], tuple(values.tolist()), fn.batch_shape, group_axis(site, plate))


def _hidden_states(sites: list[HiddenSite], plate: str) -> HiddenStates | None:
    """Return the states of a group, or raise ``ValueError`` if their times differ."""
    lengths = {site.name: site.shape[0] for site in sites}
    if len(set(lengths.values())) > 1:
        given = ", ".join(f"'{name}' of {length}" for name, length in lengths.items())
        raise ValueError(
            f"The subsampled plate '{plate}' has discrete sites in loops of different lengths"
            f" ({given}), and their states cannot be summed over together. Use one `scan` of the"
            " longer length with a mask of the rows that are missing; or give each loop a plate"
            " with a name of its own."
        )
    return HiddenStates(tuple(sites), next(iter(lengths.values()))) if sites else None


def _check_scanned(site: dict, plate: str) -> None:
    """Raise ``ValueError`` if a continuous site in a ``scan`` has a bounded support."""
    transform = biject_to(site["fn"].support)
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    if not isinstance(transform, IdentityTransform):
        raise ValueError(
            f"Latent site '{site['name']}' of the subsampled plate '{plate}' is in a `scan`, and"
            " its values have a bound. Write them as transformed real values, such as the"
            " exponential of a normal site; or without `scan`."
        )


def _check_combinations(plate: LocalPlate) -> None:
    """Raise ``ValueError`` if there are too many combinations of discrete values in each group."""
    number, values = math.prod(size for _, size in plate.discrete), "discrete values"
    if plate.states is not None:
        number, values = number * plate.states.number**2, f"{values} and pairs of hidden states"
    if number > MOST_COMBINATIONS:
        raise ValueError(
            f"Each group of the subsampled plate '{plate.name}' has {number:,} combinations of"
            f" {values}, and at most {MOST_COMBINATIONS:,} can be summed over ({_quoted(plate)})."
            " Write a chain of states with `scan`, which sums over pairs of neighbours; or sum over"
            " the values in the likelihood."
        )


def check_dimensions(marginal: Marginal) -> None:
    """Raise ``ValueError`` if there are too many continuous latent variables in each group."""
    for plate in marginal.plates:
        if plate.dimension > (MOST_DIMENSIONS if plate.path is None else MOST_ON_A_PATH):
            raise ValueError(
                f"Each group of the subsampled plate '{plate.name}' has {plate.dimension} latent"
                f" variables, and at most {MOST_DIMENSIONS} can be integrated out"
                f" ({_quoted(plate)}), or {MOST_ON_A_PATH:,} of a path, in which each depends on"
                " the few before it alone. Write a path with its values as a site, such as a"
                " `GaussianRandomWalk`, and not as the `cumsum` of innovations."
                f" Otherwise {_OUTSIDE}"
            )


def _quoted(plate: LocalPlate) -> str:
    return ", ".join(f"'{name}'" for name in plate.names)


def _dependence(
    model: Model,
    sites: Mapping[str, dict],
    plates: tuple[Plate, ...],
    where: Mapping[str, str],
    args: tuple,
    kwargs: dict,
) -> dict[str, list]:
    """
    Return the dependences of each site, and of the support of each observed site.

    They are dependences on the rows of plates, and on the latent sites inside of plates.

    :param where: plate of each latent site inside of a plate.
    """
    latents = {k: s["value"] for k, s in sites.items() if s["type"] == "sample"}
    latents = {k: x for k, x in latents.items() if not sites[k]["is_observed"]}

    def outputs(**inputs: Array) -> dict[str, list]:
        rows = {p.name: inputs[f"plate {p.name}"] for p in plates}
        values = {name: inputs[name] for name in where}
        at = given_rows(model, plates, rows)
        at = substitute(seed(at, random.key(0)), data={**latents, **values})
        traced = trace(at).get_trace(*args, **kwargs)
        arrays = {
            name: [
                jnp.asarray(x)
                for x in jax.tree.leaves((site["value"], site.get("fn")))
                if isinstance(x, (jax.Array, float, int))
            ]
            for name, site in traced.items()
            if site["type"] in ("sample", "deterministic")
        }
        supports = {
            f"support of {name}": [jnp.asarray(site["fn"].support(jnp.zeros_like(site["value"])))]
            for name, site in traced.items()
            if site["type"] == "sample" and site["is_observed"] and jnp.size(site["value"])
        }
        return arrays | supports

    rows = {f"plate {p.name}": jnp.arange(p.subsample_size) for p in plates}
    return eval_provenance(outputs, **rows, **{name: latents[name] for name in where})


def _check_used(
    sites: Mapping[str, dict], where: Mapping[str, str], needs: Mapping[str, frozenset[str]]
) -> None:
    """
    Check that observed sites depend on each latent site of a plate.

    :raises ValueError: if no observed site depends on a latent site, directly or by other sites, or
        if some values of a latent site are observed.
    """
    for name in (name for name in where if name.endswith("_unobserved")):
        raise ValueError(
            f"Site '{name.removesuffix('_unobserved')}' has an `obs_mask` inside the subsampled"
            f" plate '{where[name]}', which makes a latent value for each row of the minibatch. Use"
            " `numpyro.handlers.mask` on the observed site instead."
        )
    used = {
        k for n, s in sites.items() if s["type"] == "sample" and s["is_observed"] for k in needs[n]
    }
    while more := {k for name in used for k in needs[name]} - used:
        used |= more
    if unused := sorted(set(where) - used):
        raise ValueError(
            f"Site '{unused[0]}' in the subsampled plate '{where[unused[0]]}' has no observations:"
            " its `obs` is None, and no observed site depends on it. Pass its observations to"
            " `mcmc.run(key, ...)`, or leave the site out."
        )


def _check_dependents(
    sites: Mapping[str, dict],
    subsampled: Mapping[str, Plate],
    where: Mapping[str, str],
    labels: Mapping[str, list],
    needs: Mapping[str, frozenset[str]],
) -> frozenset[str]:
    """
    Check the sites that depend on latent sites of plates.

    :return: deterministic sites that depend on latent sites of plates.
    :raises ValueError: if another site depends on them that is not inside of the plate, or is in
        another subsampled plate.
    """
    hidden = set()
    for name, site in sites.items():
        all_needs = frozenset().union(*labels.get(name, []))
        if site["type"] == "deterministic" and needs[name]:
            hidden.add(name)
        if site["type"] != "sample":
            continue
        frames = [f.name for f in site["cond_indep_stack"] if f.name in subsampled]
        bounds = frozenset().union(*labels.get(f"support of {name}", [])) & set(where)
        if bounds:
            raise ValueError(
                f"The support of site '{name}' depends on latent sites"
                f" ({', '.join(sorted(bounds))}) of its group, and the nodes of a quadrature miss"
                " the edge of such a density. Use a density that falls off smoothly."
            )
        for local in sorted(needs[name]):
            if where[local] not in frames:
                raise ValueError(
                    f"Site '{name}' depends on the latent site '{local}' of the subsampled plate"
                    f" '{where[local]}' but stands outside of the plate, so that groups outside of"
                    f" the minibatch would be missing. Move '{name}' into the plate; or sample"
                    f" '{local}' for all {subsampled[where[local]].size:,} groups, outside of the"
                    " plate."
                )
        others = [p for p in subsampled if f"plate {p}" in all_needs and p not in frames]
        if (frames and others) and set(frames) & set(where.values()):
            raise ValueError(
                f"Site '{name}' in plate '{frames[0]}' depends on the minibatch of plate"
                f" '{others[0]}' but stands outside of that plate. Use the indices of"
                f" '{frames[0]}'."
            )
        if len(frames) > 1 and set(frames) & set(where.values()):
            raise ValueError(
                f"Site '{name}' is inside the subsampled plates {' and '.join(map(repr, frames))},"
                " and one plate has latent sites, whose integral needs all rows of a group. Leave"
                f" the `subsample_size` of '{frames[-1]}' out. For crossed effects sample one kind"
                " for all groups, outside of its plate."
            )
    return frozenset(hidden)
