# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Checks of models whose minibatches would give a wrong answer in silence.

NumPyro accepts many models whose minibatch potential does not average to the potential
of the data: an index that clamps at the end of a shorter array, an observed site outside
its plate, a minibatch passed in as an argument. Each is detected here once, before any
sampling, and named in the error together with the remedy.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
import math
from typing import Any
import warnings

import jax
from jax import Array, random
from jax.extend.core import Literal
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.distributions.distribution import validation_enabled
from numpyro.handlers import block, seed, trace
from numpyro.primitives import Messenger

from numpyro_sgmcmc.data.fingerprint import fingerprints_of_captured
from numpyro_sgmcmc.posterior.checks.arguments import named_arrays
from numpyro_sgmcmc.posterior.checks.disk import check_far, check_lengths
from numpyro_sgmcmc.posterior.checks.exceptions import explained
from numpyro_sgmcmc.posterior.group_handlers import with_observed
from numpyro_sgmcmc.posterior.handlers import first_rows_of, without_wrappers
from numpyro_sgmcmc.posterior.reading import Reading

#: Operations between ``x[i]`` and the gather that do not change the row numbers.
_SAME_INDEX = ("broadcast_in_dim", "reshape", "convert_element_type", "squeeze", "copy")

_INDEX = "`with numpyro.plate(...) as i: ... X[i]` or `numpyro.subsample(X, event_dim=...)`"


def _warn_about_constants(reading: Reading) -> None:
    """Warn of sites that an optimiser would move and a sampler of the posterior does not."""
    sites = reading.sites
    for name, site in sites.items():
        sampled = any(k.startswith(f"{name.removesuffix('$params')}/") for k in sites)
        if site["type"] == "param" and not sampled or site["type"] == "mutable":
            warnings.warn(
                f"Site '{name}' is a `numpyro.{site['type']}`: it stays at its initial value."
                " Give it a prior with `numpyro.sample` (for a neural network,"
                " `random_flax_module` or `random_nnx_module`) to have it sampled.",
                stacklevel=3,
            )


def _check_hidden(reading: Reading) -> None:
    """Raise ``ValueError`` if ``numpyro.handlers.block`` hides sites of a model."""
    layer, args, kwargs = reading.model, reading.args, reading.kwargs
    while isinstance(layer, Messenger) and layer.fn is not None:
        if isinstance(layer, block):
            with jax.ensure_compile_time_eval(), explained(reading.model, args, kwargs):
                drawn = [_drawn_by(layer.fn, k, args, kwargs) for k in (0, 1)]
            for name, site in drawn[0].items():
                if site["type"] in ("sample", "plate") and layer.hide_fn(site):
                    _check_hidden_site(name, site, drawn[1][name]["value"])
        layer = layer.fn


def _drawn_by(model: Callable, k: int, args: tuple, kwargs: dict) -> dict[str, dict]:
    with validation_enabled(False):
        return trace(seed(first_rows_of(model), random.key(k))).get_trace(*args, **kwargs)


def _check_hidden_site(name: str, site: dict, again: Any) -> None:
    """
    Raise ``ValueError`` if the hidden site is a plate, observed, or random.

    :param again: the value of the site with another random key.
    """
    if site["type"] == "plate":
        if site["args"][1] is not None:
            raise ValueError(
                f"Plate '{name}' is hidden by `numpyro.handlers.block`, so that its rows cannot be"
                " set. Leave the handler out."
            )
    elif site["is_observed"]:
        raise ValueError(
            f"Observed site '{name}' is hidden by `numpyro.handlers.block`, so that the draws"
            " would be from the prior. Leave the handler out."
        )
    elif not jnp.array_equal(site["value"], again):
        raise ValueError(
            f"Latent site '{name}' is hidden by `numpyro.handlers.block`, so that every step would"
            " draw it from its prior. Leave the handler out, and choose sites among the draws; or"
            f" fix it, `numpyro.handlers.substitute(model, data={{'{name}': ...}})`."
        )


def _check_each_site(reading: Reading) -> None:
    for name, site in reading.sites.items():
        if site["type"] == "sample":
            if not site["is_observed"]:
                _check_latent(name, site)
            _check_scale(name, site, reading.subsampled)
            _check_control_flow(name, site, reading.sites)


def _check_scale(name: str, site: dict, subsampled: Mapping[str, Any]) -> None:
    scale = site["scale"]
    if scale is None or jnp.ndim(scale) > 0 or isinstance(scale, jax.core.Tracer):
        return
    plates = [subsampled[frame.name] for frame in _frames(site, subsampled)]
    factors = [plate.size / plate.subsample_size for plate in plates]
    for plate, once in zip(plates, factors, strict=True):
        if once > 1 and math.isclose(float(scale), once * math.prod(factors), rel_tol=1e-4):
            factor = f"{plate.size}/{plate.subsample_size}"
            raise ValueError(
                f"Site '{name}' is scaled by {factor} twice: by plate '{plate.name}' itself, and"
                " by `numpyro.handlers.scale`. Leave the handler out."
            )


def _frames(site: dict, plates: Iterable[str]) -> list[Any]:
    return [frame for frame in site["cond_indep_stack"] if frame.name in plates]


def _check_latent(name: str, site: dict) -> None:
    if site["fn"].support.is_discrete:
        kind = type(without_wrappers(site["fn"])).__name__
        raise ValueError(
            f"Latent site '{name}' is discrete ({kind}) and has no gradient. Sum over its values"
            " in the likelihood, for a mixture or a class of each row by"
            " `numpyro.distributions.MixtureSameFamily(weights, components)`. In a plate whose"
            " `subsample_size` is less than its size the step sums over it for each group, and over"
            " states in a `scan` whose body enters the plate."
        )
    shape = jnp.shape(site["value"])
    if 0 in biject_to(site["fn"].support).inverse_shape(shape):
        raise ValueError(
            f"Latent site '{name}' has nothing to sample: its shape is {shape}, and its support"
            f" {site['fn'].support}. Leave out a site without entries; write a site with a single"
            f" possible value as `numpyro.deterministic('{name}', ...)`."
        )
    if isinstance(site["fn"], dist.Delta):
        raise ValueError(
            f"Latent site '{name}' has a Delta distribution. Use `numpyro.deterministic('{name}',"
            " value)` instead."
        )


def _check_control_flow(name: str, site: dict, sites: Mapping[str, dict]) -> None:
    hidden = [f.name for f in site["cond_indep_stack"] if f.name not in sites]
    if hidden and site["scale"] is not None:
        raise ValueError(
            f"Site '{name}' is in plate '{hidden[0]}', which is subsampled inside `scan` or"
            " `cond`, so that every step would see the same rows. Make the plate outside, `rows ="
            " numpyro.plate(...)`, and index the data before the `scan`, `with rows as i:`. Write"
            " `with rows:` in its body."
        )


def _check_broadcast(reading: Reading) -> None:
    """
    Check that no broadcast compares observations with the parameters of other rows.

    :raises ValueError: if the rows of a minibatch are in an undeclared dimension too, as with
        observations of shape (N, 1): each would be compared with the parameters of every row. The
        check uses shapes, since rows of equal values could hide the error.
    """
    sites, subsampled = with_observed(reading.sites), reading.subsampled
    suspects = [
        (name, frame.name)
        for name, site in sites.items()
        if site["type"] == "sample"
        for frame in _frames(site, subsampled)
        if 1 < frame.size in _undeclared(site)
    ]
    if not suspects:
        return
    # another number of rows changes the dimension of rows, and no other one of equal length
    sizes = {k: p.subsample_size - 1 or p.subsample_size + 1 for k, p in subsampled.items()}
    fewer: dict[str, dict] = {}

    def read(rows: dict[str, Array]) -> None:
        fewer.update(with_observed(reading.given(rows, reading.args, reading.kwargs)))

    try:
        jax.eval_shape(read, {k: jax.ShapeDtypeStruct((n,), jnp.int32) for k, n in sizes.items()})
    except (TypeError, ValueError):
        return  # the model has written out the size of its minibatches
    for name, plate in suspects:
        count = subsampled[plate].subsample_size
        lengths = zip(_undeclared(sites[name]), _undeclared(fewer[name]), strict=False)
        if (count, sizes[plate]) not in lengths:
            continue
        site = sites[name]
        raise ValueError(
            f"Site '{name}' has the batch shape {_batch_shape(site)} in plate '{plate}', whose"
            f" minibatch has {count} rows: every observation would be compared with the parameters"
            f" of every row. Observations of shape {jnp.shape(site['value'])} were broadcast"
            f" against parameters of shape {_own_batch_shape(site['fn'])}. Give both the shape"
            f" ({count},), `y[i, 0]` or `y[i].squeeze(-1)`; or declare the dimension,"
            " `.to_event(1)` or another plate."
        )


def _batch_shape(site: dict) -> tuple[int, ...]:
    """Return the shape of a site's log density, or its batch shape if the values do not fit."""
    value, of_law = jnp.shape(site["value"]), site["fn"].batch_shape
    shape = value[: max(0, len(value) - site["fn"].event_dim)]
    with suppress(ValueError):
        return jnp.broadcast_shapes(of_law, shape) if math.prod(value) else of_law
    return of_law


def _undeclared(site: dict) -> list[int]:
    """Return the lengths of the dimensions of a site's density that no plate declares."""
    shape, declared = _batch_shape(site), {frame.dim for frame in site["cond_indep_stack"]}
    return [n for k, n in enumerate(shape) if k - len(shape) not in declared]


def _check_dependence(reading: Reading) -> None:
    for name, site in reading.sites.items():
        if site["type"] == "sample":
            _check_dependence_of(name, site, reading.subsampled, *reading.dependence[name])


def _check_dependence_of(
    name: str,
    site: dict,
    subsampled: Mapping[str, Any],
    value: frozenset[str],
    distribution: frozenset[str],
) -> None:
    frames = {frame.name: frame for frame in _frames(site, subsampled)}
    used = (value | distribution) & set(subsampled)
    kind = "Observed" if site["is_observed"] else "Latent"
    for plate in sorted(used - set(frames)):
        p = subsampled[plate]
        raise ValueError(
            f"{kind} site '{name}' depends on the minibatch of plate '{plate}' but stands outside"
            f" the plate, so that it would not be scaled by {p.size}/{p.subsample_size}. Move it"
            " into the `with numpyro.plate(...)` block."
        )
    for plate, frame in frames.items():
        p = subsampled[plate]
        _check_length(name, site, frame, p.size)
        if plate not in used:
            raise ValueError(
                f"Site '{name}' is inside plate '{plate}' but does not use its indices, so that"
                " every step would see the same data. If the model gets minibatches (as for SVI),"
                f" give it the full data of {p.size} rows instead. Index them: {_INDEX}."
            )
        for part, labels, length in (
            ("observations", value, _length(jnp.shape(site["value"]), frame, site)),
            ("distribution", distribution, _length(_own_batch_shape(site["fn"]), frame)),
        ):
            if "" in labels and plate not in labels and length == p.subsample_size > 1:
                raise ValueError(
                    f"The {part} of site '{name}' in plate '{plate}' come from the arguments of the"
                    " model without the plate's indices, so that rows of different data would be"
                    f" combined. Index them: {_INDEX}."
                )


def _own_batch_shape(fn: Any) -> tuple[int, ...]:
    """Return the batch shape of a distribution before plates have expanded it."""
    return fn.base_dist.batch_shape if isinstance(fn, dist.ExpandedDistribution) else fn.batch_shape


def _length(shape: tuple[int, ...], frame: Any, site: dict | None = None) -> int:
    """Return the length along a plate's dimension, which is 1 if the array broadcasts."""
    axis = frame.dim - (site["fn"].event_dim if site is not None else 0)
    return shape[axis] if len(shape) >= -axis else 1


def _check_length(name: str, site: dict, frame: Any, size: int) -> None:
    shape = jnp.shape(site["value"])
    length = _length(shape, frame, site)
    if length in (1, frame.size):
        return
    begin = f"The observations of site '{name}'"
    if len(shape) > 1 and shape[0] == frame.size != size:
        raise ValueError(
            f"{begin} have the shape {shape} in plate '{frame.name}', whose minibatch has"
            f" {frame.size} rows, but a {type(without_wrappers(site['fn'])).__name__} of this"
            " shape has one entry for each row. Give classes as numbers, `y.argmax(-1)`, and not"
            " as indicators. Declare a vector for each row by `.to_event(1)`, or by another plate"
            " with dim=-2."
        )
    indexed = "not indexed by the plate" if length == size else "of another length"
    raise ValueError(
        f"{begin} are {indexed}: they have {length} rows, and the minibatch of plate"
        f" '{frame.name}' has {frame.size}. Use {_INDEX}. Observe data in the model, and not by"
        " `numpyro.handlers.condition`, which takes the values of a minibatch."
    )


def _check_gathers(reading: Reading) -> None:
    """
    Check the lengths of arrays that the rows of plates index.

    :raises ValueError: if a plate's indices are used on an array of another length, where JAX
        clamps them.
    """
    arrays = named_arrays(reading.model, reading.args, reading.kwargs)
    names = {id(x): name for name, x in arrays}
    leaves = jax.tree.leaves((reading.args, reading.kwargs))
    jaxpr, ordered = reading.program.jaxpr, sorted(reading.rows)
    tags = dict(zip(jaxpr.invars, ordered, strict=False))
    found_names = [names.get(id(x), "") for x in leaves if isinstance(x, jax.Array)]
    arguments = dict(zip(jaxpr.invars[len(ordered) :], found_names, strict=False))
    sizes = {p.name: p.size for p in reading.plates}
    gathers = _gathers(jaxpr, tags, arguments)
    neighbours = {argument for plate, *_, argument in gathers if plate is None and argument}
    for plate, length, shape, argument in gathers:
        # `y[i]` and `y[i + 1]` together use every row
        if (
            plate is None
            or length == sizes[plate]
            or length > sizes[plate]
            and argument in neighbours
        ):
            continue
        what = f"argument '{argument}'" if argument else "an array"
        raise ValueError(
            f"Plate '{plate}' has size {sizes[plate]}, but its indices are used on {what} of shape"
            f" {shape}, which has {length} rows. Rows beyond the end would be replaced by the last"
            " one, and rows beyond the plate never used. Make the two lengths equal."
        )


def _check_is_the_same(reading: Reading) -> None:
    if fingerprints_of_captured(reading.traced()) != reading.captured:
        raise ValueError(
            "The model changes between evaluations: it draws random numbers by NumPy or Python, or"
            " changes the values that it reads. A compiled program would use the numbers of the"
            " first evaluation in every step. Draw them before the run and pass them as an"
            " argument, or draw them in the model with `numpyro.prng_key()`."
        )


def _gathers(
    jaxpr: Any, tags: dict[Any, str], arguments: dict[Any, str]
) -> list[tuple[str | None, int, tuple[int, ...], str]]:
    """
    Return every place where an array is indexed by the rows of a plate.

    A place has the plate, or None if the index is computed from rows, the length of the indexed
    axis, the shape of the array, and the name of the argument.

    ``tags`` gives the plate of each variable that is the rows of a plate. The tags follow the rows
    through the operations that JAX puts between ``x[i]`` and the gather. A computed index loses its
    tag.
    """
    # The layout of equations in a jaxpr is not a stable interface of JAX, but it is the only place
    # with the lengths of indexed arrays. `test_model_checks` notices a change.
    gathers: list[tuple[str | None, int, tuple[int, ...], str]] = []
    shifted: set[Any] = set()
    computed: set[Any] = set(tags)

    def tag(variable: Any) -> str | None:
        return None if isinstance(variable, Literal) else tags.get(variable)

    def is_moved(variable: Any) -> bool:
        return not isinstance(variable, Literal) and variable in shifted

    for eqn in jaxpr.eqns:
        name, inputs, plates = eqn.primitive.name, eqn.invars, [tag(v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr")
        depends = [not isinstance(v, Literal) and v in computed for v in inputs]
        if any(depends):
            computed |= set(eqn.outvars)
        if name == "gather" and depends[1]:
            shape = inputs[0].aval.shape
            for axis in eqn.params["dimension_numbers"].start_index_map[:1]:
                argument = "" if isinstance(inputs[0], Literal) else arguments.get(inputs[0], "")
                gathers.append((plates[1], shape[axis], shape, argument))
        elif name == "add" and any(plates):
            # JAX adds the length of the axis for negative indices, and then selects the index
            shifted.add(eqn.outvars[0])
        elif name == "select_n" and any(plates[1:]):
            if all(p or is_moved(v) for v, p in zip(inputs[1:], plates[1:], strict=True)):
                tags[eqn.outvars[0]] = next(filter(None, plates[1:]))
        elif name in _SAME_INDEX and plates[0] is not None:
            tags[eqn.outvars[0]] = plates[0]
        elif name in ("jit", "pjit", "closed_call") and inner is not None:
            inner = getattr(inner, "jaxpr", inner)
            inner_tags = {own: p for own, p in zip(inner.invars, plates, strict=True) if p}
            inner_arguments = {
                own: arguments[v]
                for v, own in zip(inputs, inner.invars, strict=True)
                if not isinstance(v, Literal) and v in arguments
            }
            gathers += _gathers(inner, inner_tags, inner_arguments)
            for outer, own in zip(eqn.outvars, inner.outvars, strict=True):
                if not isinstance(own, Literal) and own in inner_tags:
                    tags[outer] = inner_tags[own]
    return gathers


#: Checks of a model as it was read, in their order.
CHECKS: list[Callable[[Reading], None]] = [
    _warn_about_constants,
    _check_hidden,
    check_lengths,
    check_far,
    _check_each_site,
    _check_broadcast,
    _check_gathers,
    _check_is_the_same,
    _check_dependence,
]
