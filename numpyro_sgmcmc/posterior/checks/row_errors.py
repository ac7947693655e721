# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Errors of invalid rows, with the rows, the likely cause and a remedy."""

from typing import Any

from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.distribution import validation_enabled
from numpyro.ops.provenance import eval_provenance

from numpyro_sgmcmc.posterior.checks.arguments import named_arrays
from numpyro_sgmcmc.posterior.checks.index_bounds import IndexedArray
from numpyro_sgmcmc.posterior.group_handlers import with_observed
from numpyro_sgmcmc.posterior.handlers import Indices, without_wrappers
from numpyro_sgmcmc.posterior.local_latents import MARGINAL
from numpyro_sgmcmc.posterior.model import unremarkable_values
from numpyro_sgmcmc.posterior.target import Target

_REMEDY = (
    "Correct or drop these rows; or give them any value in the support, and mask them, `with"
    " numpyro.handlers.mask(mask=is_known[i]):`."
)


def _sites(target: Target, rows: Indices, z: Any = None) -> dict[str, dict]:
    z = unremarkable_values(target.model) if z is None else z
    with validation_enabled(False):
        data = target.args, target.kwargs
        return with_observed(target.model.potential_and_sites(z, rows, random.key(0), *data)[1])


def check_supports(target: Target) -> None:
    """Raise ``ValueError`` if the support of observations depends on latent sites."""
    plates = {plate.name for plate in target.model.plates}

    def inside(**z: Array) -> dict[str, Array]:
        sites = _sites(target, target.model.first_rows(), z)
        return {
            # zeros replace the observations, since missing observations may be latent
            name: jnp.asarray(site["fn"].support(jnp.zeros_like(site["value"])))
            for name, site in sites.items()
            if site["type"] == "sample"
            and plates & {frame.name for frame in site["cond_indep_stack"]}
            and jnp.size(site["value"])
        }

    for name, latents in eval_provenance(inside, **unremarkable_values(target.model)).items():
        if latents:
            raise ValueError(
                f"The support of site '{name}' depends on latent sites"
                f" ({', '.join(sorted(latents))}), and draws would leave it, because few"
                " minibatches have the rows at its bounds. Use a density that falls off smoothly,"
                " write the bound as a prior from all rows, or sample all rows by NUTS."
            )


def _named(fn: Any) -> str:
    name = type(without_wrappers(fn)).__name__
    for ending in ("Logits", "Probs"):
        name = name.removesuffix(ending)
    return name


def _of_all(target: Target, plate: str) -> str:
    # the model may be the one of a single device
    size = next(p.size for p in target.model.plates if p.name == plate)
    return f"{size:,} rows of plate '{plate}'"


def outside_support(target: Target, name: str, plate: str, bad: Any) -> ValueError:
    """Return the error of observations outside of the support of their site."""
    site = _sites(target, bad.among)[name]
    value = np.asarray(site["value"])
    inside = np.asarray(site["fn"].support(site["value"]))
    event = value.ndim - inside.ndim
    shown = (
        value[~inside.astype(bool)] if value.shape[: value.ndim - event] == inside.shape else value
    )
    cause = _cause(without_wrappers(site["fn"]), shown) if event == 0 else ""
    first = shown.ravel()[0].item() if event == 0 else shown.reshape(-1, *value.shape[-event:])[0]
    return ValueError(
        f"Observations of site '{name}' ({_named(site['fn'])}) are outside of its support in"
        f" {bad.number:,} of {_of_all(target, plate)}, the first in row {bad.first}: {first}."
        f" {cause}{_REMEDY}"
    )


def of_a_process(bad: Any) -> ValueError:
    """Return the error of invalid rows, the first of which may be on another process."""
    return ValueError(
        f"{bad.number:,} rows are invalid for this model: observations are outside of the support"
        f" of their site, or codes beyond the end of an array. The first is row {bad.first:,} in"
        " the order of the devices; run its process alone, without a mesh, to see the cause."
        f" {_REMEDY}"
    )


def _cause(fn: Any, values: np.ndarray) -> str:
    """Return the likely cause of values outside of a support, as text."""
    support, low, high = fn.support, values.min(), values.max()
    if np.isnan(values).any():
        return "NaN marks missing values. "
    if not fn.support.is_discrete:
        if (values == 0).any():
            return f"A {_named(fn)} has no density at 0: model zeros by another site. "
        if low < 0:
            return f"A {_named(fn)} has no negative values. "
        return f"Values go up to {high:.6g}: rescale them if they should be smaller. "
    if (values % 1 != 0).any():
        return (
            f"A {_named(fn)} takes whole numbers; for averaged or soft labels write the density"
            " yourself, `numpyro.factor`. "
        )
    last = _last(support)
    if last is not None and high == last + 1 and low >= 0:
        if isinstance(fn, dist.BinomialLogits | dist.BinomialProbs):
            return "There are more successes than trials. "
        return f"Labels count from 0 to {last} here: subtract 1 if yours count from 1. "
    if low == -1:
        return "-1 often stands for a missing label. "
    if low < 0:
        return "Counts and labels are not negative. "
    if isinstance(fn, dist.BinomialLogits | dist.BinomialProbs):
        return "There are more successes than trials. "
    return "" if last is None else f"Labels count from 0 to {last} here. "


def _last(support: Any) -> int | None:
    if support is constraints.boolean:
        return 1
    bound = getattr(support, "upper_bound", None)
    return None if bound is None else int(np.max(bound))


def not_finite(target: Target, name: str, plate: str, bad: Any) -> ValueError:
    """Return the error of rows whose density is not finite."""
    rows = {p.name: jnp.zeros(1, int) for p in target.model.plates} | {
        plate: jnp.array([bad.first])
    }
    site = _sites(target, rows)[name]
    value = np.asarray(site["value"])
    seen = f", with the observation {value.ravel()[0]:.6g}" if value.size == 1 else ""
    return ValueError(
        f"The log density of site '{name}' ({_named(site['fn'])}) is not finite in {bad.number:,}"
        f" of {_of_all(target, plate)}, at all values that were tried; the first is row"
        f" {bad.first}{seen}. Look in the model for a division by zero, the logarithm of a number"
        f" that is not positive, or an infinite value. {_REMEDY}"
    )


def beyond_array(target: Target, indexed: IndexedArray, bad: Any) -> ValueError:
    """Return the error of an array that some rows index beyond its ends."""
    arrays = named_arrays(target.model.model, target.args, target.kwargs)
    names = {id(x): f"argument '{name}'" for name, x in arrays}
    array, length, index = indexed
    wrong = index[(index < 0) | (index >= length)]
    return ValueError(
        f"The model indexes {names.get(id(array), 'an array')} of shape {array.shape} with"
        f" {int(wrong.ravel()[0])} in row {bad.first}, and beyond its ends in {bad.number:,} rows"
        f" in all; its indices go from 0 to {length - 1}. JAX would take another entry in silence."
        " Let codes count from 0, with an entry for each code; for neighbours at an end write"
        " `jnp.clip(i + 1, 0, last)` or `(i - 1) % length`."
    )


def dependent_on_number(
    target: Target, name: str, plate: str, sizes: dict[int, float]
) -> ValueError:
    """Return the error of a site whose terms depend on the number of rows of the minibatch."""
    (length, _), (other, ratio) = sizes.items()
    return ValueError(
        f"The log density of a row of site '{name}' in plate '{plate}' depends on the number of"
        f" rows in the minibatch: in a minibatch of {other} rows it is {ratio:.3g} times its value"
        f" in one of {length}. The plate itself scales a minibatch to all rows. Leave out factors"
        " such as `N / len(i)` or `1 / len(i)`."
    )


def dependent_on_others(target: Target, name: str, plate: str) -> ValueError:
    """Return the error of a site whose terms depend on other rows of the minibatch."""
    rows = target.model.first_rows()
    site = _sites(target, rows)[name]
    count = len(rows[plate])
    fn = site["fn"]
    begin = f"Site '{name}' in plate '{plate}'"
    if name.endswith(MARGINAL):
        return ValueError(
            f"The likelihood of a group of plate '{plate}' depends on the other groups of the"
            " minibatch, so that minibatches are biased. The usual cause is a mean or a sum over"
            " the groups of the minibatch: compute it for data from all groups before the run, and"
            " pass it as an argument. Latent variables of a group may depend on its own data, and"
            " on parameters outside of the plate, only."
        )
    factor = getattr(without_wrappers(fn), "log_factor", None)
    if factor is not None and count not in jnp.shape(factor):
        return ValueError(
            f"{begin} is a sum over the minibatch, which the plate counts once for each of its"
            f" {count} rows. Give `numpyro.factor('{name}', ...)` the vector of the terms of the"
            f" rows, shape ({count},), instead of its sum."
        )
    if count in fn.event_shape:
        return ValueError(
            f"{begin} has the rows in its event shape {fn.event_shape}, so that the plate counts"
            f" the log density of all {count} rows once for each row. Leave out `.to_event(...)`"
            " for the rows, which the plate declares."
        )
    if factor is not None:
        return ValueError(
            f"{begin} has rows whose log density depends on the other rows of their minibatch, so"
            " that minibatches are biased. A partial likelihood (Cox) needs the risk set among all"
            " rows: model a parametric or piecewise constant hazard instead,"
            " `dist.Poisson(exposure * hazard)` for the events in each interval. For sets of rows,"
            " as in a matched study, give the plate one row for each set; else use NUTS."
        )
    return ValueError(
        f"{begin} has rows whose log density depends on the other rows of their minibatch, or on"
        " the order of the rows, so that minibatches are biased. Compute means, softmaxes, sums"
        " and differences of rows from all rows before the run, `mean = X.mean(0)`, and pass them"
        " as arguments. In a network replace batch normalisation by `LayerNorm` or constants, and"
        " leave dropout out, `deterministic=True`: the prior stands for it."
    )
