# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
A NumPyro model seen through its subsampled plates.

The potential of the whole data set is
:math:`U(z) = -\\log p(z) - \\sum_{i=1}^{N} \\log p(x_i \\mid z)`, with :math:`z` the
unconstrained values of the latent sites and the Jacobian of the transforms counted in
:math:`p(z)`. Evaluated on the rows :math:`S` of a minibatch of :math:`n` rows it is

.. math:: \\tilde U(z; S) = -\\log p(z) - \\frac{N}{n} \\sum_{i \\in S} \\log p(x_i \\mid z),

whose average over the minibatches of a partition, or over random minibatches, is
:math:`U(z)`. :func:`read_model` reads a model once and refuses those for which this
cannot hold; :class:`MinibatchModel` then evaluates it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
import math
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to
from numpyro.distributions.distribution import validation_enabled
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import compute_log_probs, constrain_fn, potential_energy, unconstrain_fn
from numpyro.primitives import Messenger

from numpyro_sgmcmc.data.rows_on_disk import OfMinibatch, ReadRows, Watched, on_disk, replaced
from numpyro_sgmcmc.target.model_checks import check_data, check_lengths, check_plate, check_sites

Model = Callable[..., Any]
#: Unconstrained values of the latent sites, by name.
Values = dict[str, Array]
#: The rows of a minibatch of one plate: their numbers, or what has been read of them, too.
BatchRows = Array | ReadRows
#: Rows of the minibatch for each subsampled plate, by name of the plate.
Indices = Mapping[str, BatchRows]

#: Only ``numpyro.prng_key`` and control flow around it are to be seeded in a potential: a
#: seeded latent site that is missing from the values would silently be drawn anew.
NOT_SEEDED = ["sample", "plate"]

#: What JAX raises where Python needs a value that is traced,
_NEEDS_A_VALUE = (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError)
#: and what to do.
_VALUE_NEEDED = (
    "The model needs the value of an argument in Python, for a `subsample_size`, an `if` or"
    " `int(y.max())`. Arrays are traced, and with `MCMC(jit_model_args=True)` every argument is:"
    " compute the value before, and bind it, `functools.partial(model, classes=...)`."
)


class Plate(NamedTuple):
    """A plate with a ``subsample_size``."""

    #: name of the plate
    name: str
    #: number of rows N
    size: int
    #: number of rows in a minibatch n
    subsample_size: int


class _choose_rows(Messenger):
    """Sets the indices of every plate that has a ``subsample_size``."""

    def rows(self, plate: Plate) -> Array:
        raise NotImplementedError

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["args"][1] is not None:
            size, subsample_size = msg["args"]
            rows = self.rows(Plate(msg["name"], size, subsample_size))
            # Both, or the plate warns that its indices have another length than declared.
            msg["value"], msg["args"] = rows, (size, rows.shape[0])


class full_data(_choose_rows):
    """
    Effect handler under which every subsampled plate of a model is complete.

    Its indices are :math:`0, \\ldots, N - 1`, and its sites are not scaled.

    ``Predictive`` and ``log_likelihood`` see all rows of ``full_data(model)``, in their
    order; of the model itself they would see one random minibatch. The wrapped model can
    be pickled if the model can.

    :param fn: a model with NumPyro primitives. May be left out to use the handler as a
        context manager.
    :raises UnreadableRows: on evaluation, if rows on disk cannot be read.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import log_likelihood
        >>> from numpyro_sgmcmc import full_data

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with numpyro.plate("rows", len(y), subsample_size=10) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> draws = {"mu": jnp.zeros(3)}
        >>> log_likelihood(full_data(model), draws, jnp.ones(50))["y"].shape
        (3, 50)
    """

    def rows(self, plate: Plate) -> Array:
        # concrete also while something traces the model: NumPy data can be indexed by them
        with jax.ensure_compile_time_eval():
            return jnp.arange(plate.size)


class first_rows_of(_choose_rows):
    """
    Takes the first rows of every plate, so that nothing is drawn at a cost of O(N).

    :param taken: is told what was taken, by name of the plate.
    """

    def __init__(self, fn: Model, taken: dict[str, Array] | None = None) -> None:
        self.taken = taken
        super().__init__(fn)

    def rows(self, plate: Plate) -> Array:
        check_plate(*plate)
        rows = jnp.arange(plate.subsample_size)
        if self.taken is not None:
            self.taken[plate.name] = rows
        return rows


class given_rows(_choose_rows):
    """
    Takes the given rows; their number may differ from the ``subsample_size``. If ``parts`` devices
    hold as many parts of the rows, sites are scaled as if this part stood for all.
    """

    def __init__(
        self, fn: Model, plates: tuple[Plate, ...], indices: Indices, parts: int = 1
    ) -> None:
        self.sizes = {plate.name: plate.size for plate in plates}
        self.indices = {name: numbers_of(rows) for name, rows in indices.items()}
        self.parts = parts
        #: what the scale that the plate gives to its sites lacks
        self.missing: dict[str, float] = {}
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        super().process_message(msg)
        if msg["type"] == "sample":
            for frame in msg["cond_indep_stack"]:
                if (factor := self.missing.get(frame.name, 1.0)) != 1.0:
                    msg["scale"] = factor * (1.0 if msg["scale"] is None else msg["scale"])

    def rows(self, plate: Plate) -> Array:
        here = self.sizes.get(plate.name)
        # the size may be that of the rows that are here, or a number that was written out
        if here is None or plate.size not in (here, here * self.parts):
            raise ValueError(
                f"Plate '{plate.name}' has size {plate.size}, but had size {here} when the"
                " sampler was initialised. Call"
                " `mcmc.warmup` again, or use a new `MCMC` object, for data of another length."
            )
        self.missing[plate.name] = here * self.parts / plate.size
        return self.indices[plate.name]


def with_rows(view: "MinibatchModel") -> Model:
    """The model as a function whose first argument is the rows of the minibatch."""

    def model(rows: Indices, *args: Any, **kwargs: Any) -> Any:
        return given_rows(view.model, view.plates, rows, view.parts)(*args, **kwargs)

    return model


def numbers_of(rows: BatchRows) -> Array:
    """The numbers of the rows of a minibatch."""
    return rows.numbers if isinstance(rows, ReadRows) else rows


def count_of(rows: BatchRows) -> int:
    """The number of the rows of a minibatch."""
    return numbers_of(rows).shape[0]


def as_arrays(tree: Any) -> Any:
    """NumPy arrays among the leaves of ``tree`` as JAX arrays, which traced indices can index."""
    return jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) and x.dtype.kind in "biuf" else x,
        tree,
    )


class MinibatchModel(NamedTuple):
    """
    What is static about a model and its data, made by :func:`read_model`, and the
    functions of the model that a sampler needs. All of them are pure, can be traced, and
    take the arguments of the model last, so that data are never held.
    """

    #: the model, with the values of its ``param`` and ``mutable`` sites filled in
    model: Model
    #: the plates that have a ``subsample_size``, in the order of the model
    plates: tuple[Plate, ...]
    #: unconstrained shape and dtype of every latent site
    latents: dict[str, jax.ShapeDtypeStruct]
    #: deterministic sites whose value depends on the rows of the minibatch
    minibatch_dependent: frozenset[str]
    #: of each argument that is on disk the plate by whose rows it is indexed, or None
    on_disk: tuple[str | None, ...] = ()
    #: the number of devices that the rows are spread over, of which the model sees one's part
    parts: int = 1

    def on_each(self, parts: int) -> "MinibatchModel":
        """The model on one of so many devices, with its part of the rows and of the minibatch."""
        plates = (
            Plate(name, size // parts, subsample_size // parts)
            for name, size, subsample_size in self.plates
        )
        return self._replace(plates=tuple(plates), parts=parts)

    @property
    def dimension(self) -> int:
        """Number of unconstrained parameters."""
        return sum(math.prod(latent.shape) for latent in self.latents.values())

    def first_rows(self) -> dict[str, Array]:
        """The first rows of each plate, a minibatch that needs no key."""
        return {plate.name: jnp.arange(plate.subsample_size) for plate in self.plates}

    def _at(self, indices: Indices, rng_key: Array) -> Model:
        model = given_rows(self.model, self.plates, indices, self.parts)
        return seed(model, rng_key, hide_types=NOT_SEEDED)

    def _read(self, indices: Indices, arguments: tuple[tuple, dict]) -> tuple[tuple, dict]:
        """The arguments, with what has been read of them in the place of what is on disk."""
        sources = on_disk(arguments)
        if not sources:
            return arguments
        values = {name: iter(x.values) for name, x in indices.items() if isinstance(x, ReadRows)}
        seen = [
            OfMinibatch(source, numbers_of(indices[plate]), next(values[plate]))
            if plate in values
            else source
            for source, plate in zip(sources, self.on_disk, strict=True)
        ]
        return replaced(arguments, seen)

    def potential(
        self, z: Values, indices: Indices, rng_key: Array, args: tuple, kwargs: dict
    ) -> Array:
        """
        The minibatch potential :math:`\\tilde U(z; S)`.

        :param z: unconstrained values of the latent sites.
        :param indices: rows of each subsampled plate, integer arrays of any length.
        :param rng_key: key for the ``numpyro.prng_key()`` statements of the model; a
            likelihood that is itself a random estimate gets new randomness with each key.
        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :return: a scalar.
        :raises ValueError: if an argument that the model needs in Python is traced.
        """
        model, arguments = self._at(indices, rng_key), self._read(indices, (args, kwargs))
        with _traced_values_explained():
            return potential_energy(model, *arguments, z)

    def potential_and_row_terms(
        self, z: Values, indices: Indices, rng_key: Array, args: tuple, kwargs: dict
    ) -> tuple[Array, dict[str, Array]]:
        """
        The minibatch potential and what each row of the minibatch contributes to it, from a
        single trace of the model:

        .. math:: -\\tilde U(z; S) = \\text{prior} + \\sum_i t_i, \\qquad
            t_i = \\frac{N}{n} \\ell_i.

        A site inside several subsampled plates counts for each of them: the terms of one
        hold the sum over the rows of the others. Parameters are those of :meth:`potential`.

        :return: the potential, a scalar, and for each plate the vector :math:`t` of shape
            :math:`(n,)`.
        """
        sites: dict[str, dict] = {}

        def recorded(*args: Any, **kwargs: Any) -> None:
            sites.update(trace(self._at(indices, rng_key)).get_trace(*args, **kwargs))

        # The potential of NumPyro substitutes the values and adds the Jacobian factors;
        # recording inside it sees the sites with both.
        with _traced_values_explained():
            energy = potential_energy(recorded, *self._read(indices, (args, kwargs)), z)
        names = {plate.name for plate in self.plates}
        terms = {name: jnp.zeros(count_of(indices[name])) for name in names}
        for site in sites.values():
            frames = site["cond_indep_stack"] if site["type"] == "sample" else []
            frames = [frame for frame in frames if frame.name in names]
            if not frames:
                continue
            term = (
                site["fn"].log_prob(site["value"], site["intermediates"])
                if site["intermediates"]
                else site["fn"].log_prob(site["value"])
            )
            term = term if site["scale"] is None else site["scale"] * term
            for frame in frames:
                axis = jnp.ndim(term) + frame.dim
                others = tuple(k for k in range(jnp.ndim(term)) if k != axis)
                terms[frame.name] += jnp.sum(term, axis=others)
        return energy, terms

    def constrain(self, z: Values, args: tuple, kwargs: dict) -> Values:
        """
        Values of the latent sites on their supports, and of those deterministic sites that
        do not depend on the minibatch. Parameters are those of :meth:`potential`.

        The model is replayed, so that supports may depend on other sites; under ``jit``
        whatever the result does not need, the likelihood above all, is not computed.
        """
        model = self._at(self.first_rows(), random.key(0))
        # a draw whose scale has underflowed, say, is to be seen and not to end the run
        with validation_enabled(False):
            values = constrain_fn(model, args, kwargs, z, return_deterministic=True)
        return {k: v for k, v in values.items() if k not in self.minibatch_dependent}

    def log_densities(self, z: Values, args: tuple, kwargs: dict) -> dict[str, Array]:
        """
        The log density of every site, at some values of the latent ones and the first rows of the
        data. Parameters are those of :meth:`potential`.
        """
        model = self._at(self.first_rows(), random.key(0))
        with validation_enabled(False):
            values = constrain_fn(model, args, kwargs, z)
            return compute_log_probs(model, args, kwargs, values)[0]

    def unconstrain(self, values: Values, args: tuple, kwargs: dict) -> Values:
        """
        Unconstrained values of the latent sites of one draw; the inverse of
        :meth:`constrain`.
        """
        model = self._at(self.first_rows(), random.key(0))
        latents = {name: values[name] for name in self.latents}
        return unconstrain_fn(model, args, kwargs, latents)


@contextmanager
def _traced_values_explained() -> Iterator[None]:
    """
    :raises ValueError: with a remedy, where a traced argument is needed in Python.
    """
    try:
        yield
    except _NEEDS_A_VALUE as error:
        raise ValueError(_VALUE_NEEDED) from error


def read_model(model: Model, init_strategy: Callable, args: tuple, kwargs: dict) -> MinibatchModel:
    """
    Reads a model and its arguments once: finds the subsampled plates and the latent sites
    and checks that minibatches of the model are unbiased.

    Nothing of what is read depends on a random key or on the chain.

    :param model: a model with NumPyro primitives.
    :param init_strategy: NumPyro's initialisation strategy, for the shapes of the latent
        sites; sites with an improper prior need one that does not draw from the prior.
    :param args: arguments of the model; arrays must be JAX arrays.
    :param kwargs: keyword arguments of the model.
    :raises ValueError: naming the site, plate or argument, and what to do about it.
    """
    check_data(model, args, kwargs)
    taken: dict[str, Array] = {}
    watched = [Watched(source) for source in on_disk((args, kwargs))]
    with jax.ensure_compile_time_eval():
        start = substitute(
            seed(first_rows_of(model, taken), random.key(0)), substitute_fn=init_strategy
        )
        seen_args, seen_kwargs = replaced((args, kwargs), watched)
        try:
            sites = trace(start).get_trace(*seen_args, **seen_kwargs)
        except TypeError as error:
            if not watched:
                raise
            named = ", ".join(map(repr, on_disk((args, kwargs))))
            raise TypeError(
                f"{named}: rows on disk can only be indexed, by the indices of the plate,"
                " `with numpyro.plate(...) as i: ... X[i]`; `numpyro.subsample` and operations on"
                f" the whole array need one in memory. The model raised: {error}"
            ) from error
        except ValueError as error:
            if "invalid shape of numpyro.subsample" in str(error):
                raise ValueError(
                    f"{error}. The data must have as many rows as the plate, in the dimension that"
                    " `event_dim` leaves to it: make the two lengths equal."
                ) from error
            if "broadcast" not in str(error):
                raise
            raise ValueError(
                f"The model cannot be evaluated on a minibatch: {error}. Under a subsampled"
                " plate every array must have the length of the minibatch: index it with the"
                " plate's indices, `with numpyro.plate(...) as i: ... X[i]`, or use"
                " `numpyro.subsample(X, event_dim=...)`."
            ) from error
    plates = tuple(
        Plate(name, site["args"][0], site["args"][1])
        for name, site in sites.items()
        if site["type"] == "plate" and site["args"][1] is not None
    )
    constants = {k: s["value"] for k, s in sites.items() if s["type"] in ("param", "mutable")}
    _warn_about_constants(sites)
    fixed = substitute(model, data=constants) if constants else model
    latents = {k: s for k, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}

    def given(rows: Indices, args: tuple, kwargs: dict) -> dict[str, dict]:
        values = {k: lax.stop_gradient(s["value"]) for k, s in latents.items()}
        at = substitute(given_rows(fixed, plates, rows), data=values)
        try:
            return trace(seed(at, random.key(0))).get_trace(*args, **kwargs)
        except _NEEDS_A_VALUE as error:
            raise ValueError(_VALUE_NEEDED) from error

    plate_of = tuple(_plate_of(source, taken) for source in watched)
    check_lengths(plates, plate_of, on_disk((args, kwargs)))
    dependent = check_sites(model, sites, plates, given, args, kwargs)
    with jax.ensure_compile_time_eval():
        unconstrained = {
            k: biject_to(s["fn"].support).inv(jnp.asarray(s["value"])) for k, s in latents.items()
        }
    shapes = {k: jax.ShapeDtypeStruct(jnp.shape(v), v.dtype) for k, v in unconstrained.items()}
    return MinibatchModel(fixed, plates, shapes, dependent, plate_of)


def _plate_of(source: Watched, taken: Mapping[str, Array]) -> str | None:
    """The plate by whose indices the model has indexed it first."""
    return next((k for i in source.indices for k, rows in taken.items() if i is rows), None)


def _warn_about_constants(sites: dict[str, dict]) -> None:
    """Warns of sites that an optimiser would move and a sampler of the posterior does not."""
    for name, site in sites.items():
        sampled = any(k.startswith(f"{name.removesuffix('$params')}/") for k in sites)
        if site["type"] == "param" and not sampled or site["type"] == "mutable":
            warnings.warn(
                f"Site '{name}' is a `numpyro.{site['type']}`: it stays at its initial value."
                " Give it a prior with `numpyro.sample` (for a neural network,"
                " `random_flax_module` or `random_nnx_module`) to have it sampled.",
                stacklevel=2,
            )
