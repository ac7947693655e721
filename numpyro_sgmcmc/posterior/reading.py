# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Readings of NumPyro models: traces on the first rows of plates, for checks and samplers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
import math
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to
from numpyro.distributions.distribution import validation_enabled
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import init_to_uniform
from numpyro.ops.provenance import eval_provenance

from numpyro_sgmcmc.data.drawn_rows import ShapeOf, Watched
from numpyro_sgmcmc.data.fingerprint import fingerprints_of_captured
from numpyro_sgmcmc.data.rows_on_disk import RowsOnDisk, on_disk, replaced
from numpyro_sgmcmc.posterior.checks.exceptions import explained
from numpyro_sgmcmc.posterior.checks.latents import check_dimensions, without_local_latents
from numpyro_sgmcmc.posterior.handlers import Model, Plate, first_rows_of, given_rows, log_density
from numpyro_sgmcmc.posterior.local_latents import Marginal


@dataclass(frozen=True)
class Reading:
    """
    Reading of a model and its arguments, with the facts of a trace.

    - **model** - the model as the user wrote it.
    - **fixed** - the model with the values of its ``param`` and ``mutable`` sites, and without the
      latent variables of groups, which are integrated out.
    - **args**, **kwargs** - arguments of the model.
    - **sites** - sites of ``fixed`` on the first rows of its plates.
    - **plates** - plates with a ``subsample_size``.
    - **taken** - the first rows of each plate.
    - **indices** - indices that the model used for each argument on disk.
    """

    model: Model
    fixed: Model
    args: tuple
    kwargs: dict
    sites: dict[str, dict]
    plates: tuple[Plate, ...]
    taken: dict[str, Array]
    indices: tuple[list[Any], ...]

    def given(
        self,
        rows: Mapping[str, Array],
        args: tuple,
        kwargs: dict,
        values: Mapping[str, Array] | None = None,
    ) -> dict[str, dict]:
        """Return the sites for given rows of each plate, given arguments and latent values."""
        latent = {k: lax.stop_gradient(v) for k, v in (values or self._initial).items()}
        at = substitute(given_rows(self.fixed, self.plates, rows), data=latent)
        with explained(self.model, args, kwargs):
            return trace(seed(at, random.key(0))).get_trace(*args, **kwargs)

    @property
    def _latent_sites(self) -> dict[str, dict]:
        sites = self.sites.items()
        return {k: s for k, s in sites if s["type"] == "sample" and not s["is_observed"]}

    @property
    def _initial(self) -> dict[str, Array]:
        """The initial value of every latent site."""
        return {k: jnp.asarray(s["value"]) for k, s in self._latent_sites.items()}

    @cached_property
    def latents(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The unconstrained shape and dtype of every latent site."""
        with jax.ensure_compile_time_eval():
            values = {
                k: biject_to(s["fn"].support).inv(jnp.asarray(s["value"]))
                for k, s in self._latent_sites.items()
            }
        return {k: jax.ShapeDtypeStruct(jnp.shape(v), v.dtype) for k, v in values.items()}

    @property
    def rows(self) -> dict[str, Array]:
        """The rows of a minibatch."""
        return {plate.name: jnp.arange(plate.subsample_size) for plate in self.plates}

    @property
    def subsampled(self) -> dict[str, Plate]:
        """The plates whose minibatches have fewer rows than the plate."""
        return {p.name: p for p in self.plates if p.subsample_size < p.size}

    @property
    def sources(self) -> list[RowsOnDisk]:
        """The arguments that are on disk."""
        return on_disk((self.args, self.kwargs))

    @property
    def plate_of_source(self) -> tuple[str | None, ...]:
        """The plate whose indices first indexed each argument on disk, or None."""
        return tuple(
            next((k for i in used for k, rows in self.taken.items() if i is rows), None)
            for used in self.indices
        )

    def densities(self, rows: Mapping[str, Array]) -> dict[str, Array]:
        """Return the log densities of rows by their numbers, with values of 0 for rows on disk."""
        empty = [ShapeOf(source) for source in self.sources]
        seen = self.given(rows, *replaced((self.args, self.kwargs), empty))
        return {k: log_density(site) for k, site in seen.items() if site["type"] == "sample"}

    def traced(self) -> Any:
        """
        Trace the program of all values and distributions of the model.

        Its inputs are rows, arrays among the arguments, and latent values. As constants these
        would be captured, and the fingerprints would depend on the initial values.
        """
        leaves, tree = jax.tree.flatten((self.args, self.kwargs))
        positions = [k for k, x in enumerate(leaves) if isinstance(x, jax.Array)]

        def values(rows: dict[str, Array], arrays: list[Array], latent: dict) -> list[Array]:
            filled = dict(enumerate(leaves)) | dict(zip(positions, arrays, strict=True))
            args, kwargs = jax.tree.unflatten(tree, list(filled.values()))
            sites = self.given(rows, args, kwargs, latent)
            return [
                x
                for s in sites.values()
                if s["type"] in ("sample", "deterministic")
                for x in arrays_of((s["value"], s["fn"] if s["type"] == "sample" else ()))
            ]

        # a new function avoids JAX's cache of traces
        arrays = [leaves[k] for k in positions]
        return jax.make_jaxpr(lambda *inputs: values(*inputs))(self.rows, arrays, self._initial)

    @cached_property
    def program(self) -> Any:
        """The program of all values and distributions of the model, traced once."""
        return self.traced()

    @cached_property
    def captured(self) -> tuple[str, str]:
        """The fingerprints of arrays and numbers that the model captures besides its arguments."""
        return fingerprints_of_captured(self.program)

    @cached_property
    def dependence(self) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
        """The plates, and `""` for arguments, that each site's value and distribution depend on."""
        leaves, tree = jax.tree.flatten((self.args, self.kwargs))
        arrays = {f"data {k}": x for k, x in enumerate(leaves) if isinstance(x, jax.Array)}

        def outputs(**inputs: Array) -> dict[str, tuple[list, list]]:
            filled = [inputs.get(f"data {k}", x) for k, x in enumerate(leaves)]
            indices = {name: inputs[f"plate {name}"] for name in self.rows}
            sites = self.given(indices, *jax.tree.unflatten(tree, filled))
            return {
                name: (arrays_of(s["value"]), arrays_of(s["fn"]) if s["type"] == "sample" else [])
                for name, s in sites.items()
                if s["type"] in ("sample", "deterministic")
            }

        rows = {f"plate {k}": v for k, v in self.rows.items()}
        provenance = eval_provenance(outputs, **arrays, **rows)

        def merge(labels: list[frozenset[str]]) -> frozenset[str]:
            union = frozenset().union(*labels)
            plates = (k.removeprefix("plate ") if k.startswith("plate ") else "" for k in union)
            return frozenset(plates)

        is_pair = lambda x: isinstance(x, tuple)  # noqa: E731
        return jax.tree.map(
            lambda pair: (merge(pair[0]), merge(pair[1])), provenance, is_leaf=is_pair
        )

    @property
    def minibatch_dependent(self) -> frozenset[str]:
        """The deterministic sites whose value depends on the rows of the minibatch."""
        return frozenset(
            name
            for name, site in self.sites.items()
            if site["type"] == "deterministic" and self.dependence[name][0] & set(self.subsampled)
        )


def reading_of(model: Model, init_strategy: Callable, args: tuple, kwargs: dict) -> Reading:
    """
    Trace a model on the first rows of its plates.

    Parameters are as in :func:`~numpyro_sgmcmc.posterior.model.read_model`.

    :raises ValueError: if the model cannot be evaluated there, or latent variables of groups cannot
        be integrated out.
    """
    initial = _checked_initial(init_strategy)
    taken: dict[str, Array] = {}
    watched = [Watched(source) for source in on_disk((args, kwargs))]

    def started(model: Model) -> Model:
        return substitute(seed(first_rows_of(model, taken), random.key(0)), substitute_fn=initial)

    def traced(model: Model) -> dict[str, dict]:
        return trace(started(model)).get_trace(*seen_args, **seen_kwargs)

    with jax.ensure_compile_time_eval():
        seen_args, seen_kwargs = replaced((args, kwargs), watched)
        # a later check looks for invalid values in all rows, and names the first row
        with explained(model, args, kwargs), validation_enabled(False):
            sites = traced(model)
            plates = tuple(
                Plate(name, site["args"][0], site["args"][1])
                for name, site in sites.items()
                if site["type"] == "plate" and site["args"][1] is not None
            )
            names = ("param", "mutable")
            constants = {k: s["value"] for k, s in sites.items() if s["type"] in names}
            fixed = substitute(model, data=constants) if constants else model
            fixed = without_local_latents(fixed, sites, plates, seen_args, seen_kwargs)
            if isinstance(fixed, Marginal):
                fixed = started(fixed.with_normal_groups)(*seen_args, **seen_kwargs)
                fixed = fixed.with_paths(
                    substitute(
                        seed(first_rows_of(fixed.patterns, taken), random.key(0)),
                        # initial values may be special, such as a coefficient of zero
                        substitute_fn=partial(_by_numpy, frequency=frequency),
                    )(*seen_args, **seen_kwargs)
                    for frequency in ((1.0, 2.0) if fixed.has_long_groups else ())
                )
                check_dimensions(fixed)
                # constants are equal in all traces
                sites = traced(replace(fixed, rule="none"))
                plates = fixed.with_points(fixed.with_members(plates, sites))
    indices = tuple(source.indices for source in watched)
    return Reading(model, fixed, args, kwargs, sites, plates, taken, indices)


def _checked_initial(init_strategy: Callable) -> Callable:
    """
    Return an initialisation strategy that checks its values.

    :raises ValueError: on evaluation, if its values have another shape, or are not finite.
    """

    if init_strategy is init_to_uniform:
        init_strategy = _by_numpy

    def initial(site: dict) -> Any:
        if _is_endless(site):
            # the site is refused later, and a draw would take seconds to compile
            return jnp.zeros(site["fn"].shape(), jnp.int32)
        value = init_strategy(site)
        if value is None or site["type"] != "sample":
            return value
        if (shape := jnp.shape(value)) != site["fn"].shape():
            raise ValueError(
                f"The initial value of site '{site['name']}' has the shape {shape}, but its"
                f" distribution has the shape {site['fn'].shape()}. Give values of that shape,"
                " `init_to_value(values=...)`."
            )
        if not isinstance(value, jax.core.Tracer) and not np.all(np.isfinite(value)):
            raise ValueError(
                f"The initial value of site '{site['name']}' is not finite. Give finite values,"
                " `init_to_value(values=...)`."
            )
        return jnp.asarray(value)  # the rows of a minibatch cannot be indices of NumPy's arrays

    return initial


def _by_numpy(site: dict, frequency: float = 1.0) -> Any:
    """Return values as of ``init_to_uniform``, without a program for each shape."""
    if site["type"] != "sample" or site["is_observed"] or site["fn"].support.is_discrete:
        return None
    try:
        transform = biject_to(site["fn"].support)
    except NotImplementedError:
        return init_to_uniform(site)  # its error says which site
    shape = transform.inverse_shape(site["fn"].shape())
    values = np.cos(frequency * (1.0 + np.arange(math.prod(shape)))).reshape(shape)
    return transform(jnp.asarray(values, jnp.result_type(float)))


def arrays_of(tree: Any) -> list[Array]:
    """Return the arrays and numbers of a tree as arrays."""
    return [jnp.asarray(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | float | int)]


def _is_endless(site: dict) -> bool:
    """Return whether a site is latent and discrete, with infinitely many values."""
    if site["type"] != "sample" or site["is_observed"] or not site["fn"].support.is_discrete:
        return False
    return not site["fn"].has_enumerate_support
