# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Reading of NumPyro models, and their minibatch potential.

The potential of the whole data set is
:math:`U(z) = -\\log p(z) - \\sum_{i=1}^{N} \\log p(x_i \\mid z)`, with :math:`z` the
unconstrained values of the latent sites and the Jacobian of the transforms counted in
:math:`p(z)`. Evaluated on the rows :math:`S` of a minibatch of :math:`n` rows it is

.. math:: \\tilde U(z; S) = -\\log p(z) - \\frac{N}{n} \\sum_{i \\in S} \\log p(x_i \\mid z),

whose average over the minibatches of a partition, or over random minibatches, is
:math:`U(z)`. :func:`read_model` reads a model once, and refuses models for which this
cannot hold. :class:`MinibatchModel` then evaluates it.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from fractions import Fraction
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.distributions.distribution import validation_enabled
from numpyro.handlers import seed, trace
from numpyro.infer.util import compute_log_probs, constrain_fn, potential_energy, unconstrain_fn

from numpyro_sgmcmc.data.drawn_rows import OfMinibatch, drawn_rows
from numpyro_sgmcmc.data.rows_on_disk import on_disk, replaced
from numpyro_sgmcmc.posterior.checks.arguments import check_data
from numpyro_sgmcmc.posterior.checks.exceptions import explained, one_at_a_time
from numpyro_sgmcmc.posterior.checks.sites import CHECKS
from numpyro_sgmcmc.posterior.curvature import Path
from numpyro_sgmcmc.posterior.group_handlers import LocalPlate
from numpyro_sgmcmc.posterior.handlers import (
    Indices,
    Model,
    Plate,
    given_rows,
    log_density,
)
from numpyro_sgmcmc.posterior.hidden_states import HiddenStates
from numpyro_sgmcmc.posterior.local_latents import Marginal
from numpyro_sgmcmc.posterior.reading import reading_of

#: Unconstrained values of the latent sites, by name.
Values = dict[str, Array]

#: Number of groups in passes over a part, if their latent variables are integrated out.
_SKETCHED = 4_096

#: Types of sites that are not seeded in a potential. Only ``numpyro.prng_key`` and control flow
#: around it are seeded: a seeded latent site without a value would silently be drawn anew.
NOT_SEEDED = ["sample", "plate"]


def with_rows(view: "MinibatchModel") -> Model:
    """Return the model as a function with the rows of the minibatch as first argument."""

    def model(rows: Indices, *args: Any, **kwargs: Any) -> Any:
        return given_rows(view.model, view.plates, rows, view.parts)(*args, **kwargs)

    return model


class MinibatchModel(NamedTuple):
    """
    Static facts of a model and its data, and the functions of the model that a sampler needs.

    It is made by :func:`read_model`. The functions are pure, can be traced, and take the arguments
    of the model last, so that data are never held.
    """

    #: the model, with the values of its ``param`` and ``mutable`` sites filled in
    model: Model
    #: the plates that have a ``subsample_size``, in the order of the model
    plates: tuple[Plate, ...]
    #: unconstrained shape and dtype of every latent site
    latents: dict[str, jax.ShapeDtypeStruct]
    #: deterministic sites whose value depends on the rows of the minibatch
    minibatch_dependent: frozenset[str]
    #: plate whose rows index each argument on disk, or None
    on_disk: tuple[str | None, ...] = ()
    #: fingerprint of the arrays that the model captures besides its arguments
    captured: str = ""
    #: fingerprint of the numbers that the model captures besides its arguments, in this process
    numbers: str = ""
    #: number of parts of all rows, one of which the model sees: the number of devices that rows
    #: are spread over, or all rows divided by the rows of a sample
    parts: int | Fraction = 1

    def on_each(self, parts: int) -> "MinibatchModel":
        """Return the model on one of ``parts`` devices, with its part of rows and minibatch."""
        plates = (
            plate._replace(size=plate.size // parts, subsample_size=plate.subsample_size // parts)
            for plate in self.plates
        )
        return self._replace(plates=tuple(plates), parts=parts)

    def padded(self, size: int) -> "MinibatchModel":
        """Return the model with room for ``size`` rows, the first of which are present."""
        plates = (plate._replace(size=size) for plate in self.plates)
        return self._replace(plates=tuple(plates))

    def sampled(self, rows: int, on_disk: tuple[str | None, ...]) -> "MinibatchModel":
        """
        Return the model of a sample of the rows of its plate, which stand for all.

        :param rows: number of rows of the sample.
        :param on_disk: the attribute for the arguments that are still on disk.
        """
        (plate,) = self.plates
        sample = plate._replace(
            size=rows, of=plate.size, subsample_size=min(plate.subsample_size, rows)
        )
        parts = self.parts * Fraction(plate.size, rows)
        return self._replace(plates=(sample,), parts=parts, on_disk=on_disk)

    def with_all_rows(self, most: float) -> "MinibatchModel":
        """
        Return the model with all rows in a minibatch, where they are few in all plates.

        :param most: the largest number of rows, in minibatches.
        """
        if any(plate.size > most * plate.subsample_size for plate in self.plates):
            return self
        plates = (plate._replace(subsample_size=plate.size) for plate in self.plates)
        return self._replace(plates=tuple(plates))

    def with_small_minibatches(self, share: float, least: int) -> "MinibatchModel":
        """
        Return the model with smaller minibatches, where they have more rows than a search needs.

        Complete plates, and plates whose rows may interact, are left as they are.

        :param share: share of the rows of a plate.
        :param least: the fewest rows, unless the minibatch has fewer.
        """

        def smaller(plate: Plate) -> Plate:
            if plate.subsample_size == plate.size:
                return plate
            rows = min(plate.subsample_size, max(least, math.ceil(share * plate.size)))
            return plate._replace(subsample_size=rows)

        if len(self.plates) > 1 and not all(plate.is_group for plate in self.plates):
            return self
        return self._replace(plates=tuple(map(smaller, self.plates)))

    @property
    def dimension(self) -> int:
        """The number of unconstrained parameters."""
        return sum(math.prod(latent.shape) for latent in self.latents.values())

    @property
    def dtype(self) -> Any:
        """The data type of a flat vector of the latent sites."""
        return jnp.result_type(*(x.dtype for x in self.latents.values()))

    @property
    def facts(self) -> Hashable:
        """The facts that a program depends on besides the model and the arrays among arguments."""
        latents = tuple((name, x.shape, x.dtype) for name, x in sorted(self.latents.items()))
        return self.plates, latents, self.on_disk, self.captured, self.numbers, self.parts

    def with_rule(self, rule: str) -> "MinibatchModel":
        """Return the model with another rule for integrals over latent variables of groups."""
        if not isinstance(self.model, Marginal):
            return self
        model = replace(self.model, rule=rule)
        return self._replace(model=model, plates=model.with_points(self.plates))

    def of_groups(self, name: str | None) -> "MinibatchModel":
        """Return the model with the groups of one plate only, or of none."""
        if not isinstance(self.model, Marginal):
            return self
        left_out = frozenset(plate.name for plate in self._local) - {name}
        return self._replace(model=replace(self.model, left_out=left_out))

    @property
    def search_rule(self) -> str:
        """
        The rule of the integrals in searches for the posterior.

        Few nodes would lead searches many standard deviations astray if latent variables are
        skewed. Whether few draws are enough is not known there.
        """
        return "step" if any(plate.bounded or plate.is_drawn for plate in self._local) else "few"

    @property
    def _local(self) -> tuple[LocalPlate, ...]:
        return self.model.plates if isinstance(self.model, Marginal) else ()

    @property
    def local_plates(self) -> tuple[Plate, ...]:
        """The plates of groups whose latent variables are integrated out."""
        names = {plate.name for plate in self._local}
        return tuple(plate for plate in self.plates if plate.name in names)

    @property
    def has_classes(self) -> bool:
        """True if discrete latent variables of groups are summed over."""
        return any(plate.discrete or plate.states for plate in self._local)

    @property
    def paths(self) -> dict[str, Path]:
        """The paths of groups, by plate."""
        return {plate.name: plate.path for plate in self._local if plate.path is not None}

    @property
    def hidden_states(self) -> dict[str, HiddenStates]:
        """The states of groups that are summed over, by plate."""
        return {plate.name: plate.states for plate in self._local if plate.states is not None}

    @property
    def drawn_plates(self) -> tuple[Plate, ...]:
        """The plates of groups whose latent variables are integrated out by draws."""
        names = {plate.name for plate in self._local if plate.is_drawn}
        return tuple(plate for plate in self.plates if plate.name in names)

    @property
    def sketch(self) -> "MinibatchModel":
        """
        The model with passes over some thousand groups only, where these are enough.

        Without latent variables of groups it is the model itself.
        """
        if not isinstance(self.model, Marginal):
            return self
        seen = tuple(p._replace(seen=math.ceil(_SKETCHED / p.worth)) for p in self.plates)
        return self._replace(plates=seen)

    def first_rows(self) -> dict[str, Array]:
        """Return the first rows of each plate, a minibatch without a random key."""
        return {plate.name: jnp.arange(plate.subsample_size) for plate in self.plates}

    def _at(self, indices: Indices, rng_key: Array) -> Model:
        model = given_rows(self.model, self.plates, indices, self.parts)
        return seed(model, rng_key, hide_types=NOT_SEEDED)

    def _read(self, indices: Indices, arguments: tuple[tuple, dict]) -> tuple[tuple, dict]:
        """Return the arguments with prefetched rows in the place of arguments on disk."""
        sources = on_disk(arguments)
        if not sources:
            return arguments
        drawn = {name: drawn_rows(rows) for name, rows in indices.items()}
        values = {name: iter(rows.values) for name, rows in drawn.items()}
        seen: list[Any] = []
        for whole, plate in zip(sources, self.on_disk, strict=True):
            source: Any = whole.on_each(self.parts)
            if plate is not None and plate in drawn:
                rows = drawn[plate]
                if rows.values:
                    source = OfMinibatch(source, rows.numbers, next(values[plate]))
                elif rows.high is not None:
                    # the indices in the model have the lower half of each number only
                    source = OfMinibatch(source, rows.numbers, source.drawn(rows))
            seen.append(source)
        return replaced(arguments, seen)

    def prepared(
        self, indices: Indices, rng_key: Array, args: tuple, kwargs: dict
    ) -> tuple[Model, tuple[tuple, dict]]:
        """Return the model and its arguments for a minibatch, in a form that NumPyro traces."""
        return self._at(indices, rng_key), self._read(indices, (args, kwargs))

    def potential(
        self, z: Values, indices: Indices, rng_key: Array, args: tuple, kwargs: dict
    ) -> Array:
        """
        Return the minibatch potential :math:`\\tilde U(z; S)`.

        :param z: unconstrained values of the latent sites.
        :param indices: rows of each subsampled plate, integer arrays of any length.
        :param rng_key: key for the ``numpyro.prng_key()`` statements of the model. A likelihood
            that is itself a random estimate gets new randomness with each key.
        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :return: a scalar.
        :raises ValueError: if an argument that the model needs in Python is traced.
        """
        model, arguments = self._at(indices, rng_key), self._read(indices, (args, kwargs))
        with explained(self.model, args, kwargs):
            return potential_energy(model, *arguments, z)

    def potential_and_sites(
        self, z: Values, indices: Indices, rng_key: Array, args: tuple, kwargs: dict
    ) -> tuple[Array, dict[str, dict]]:
        """
        Return the minibatch potential, and the sites of the model as in a trace of NumPyro.

        Parameters are as in :meth:`potential`.
        """
        sites: dict[str, dict] = {}

        def recorded(*args: Any, **kwargs: Any) -> None:
            sites.update(trace(self._at(indices, rng_key)).get_trace(*args, **kwargs))

        # The potential of NumPyro substitutes the values and adds the Jacobian factors.
        # A recording inside of it sees the sites with both.
        with explained(self.model, args, kwargs):
            energy = potential_energy(recorded, *self._read(indices, (args, kwargs)), z)
        return energy, sites

    def potential_and_row_terms(
        self, z: Values, indices: Indices, rng_key: Array, args: tuple, kwargs: dict
    ) -> tuple[Array, dict[str, Array]]:
        """
        Return the minibatch potential and the contribution of each row.

        A single trace of the model gives

        .. math:: -\\tilde U(z; S) = \\text{prior} + \\sum_i t_i, \\qquad
            t_i = \\frac{N}{n} \\ell_i.

        A site inside several subsampled plates counts for each of them: the terms of one plate
        hold the sum over the rows of the others. Parameters are as in :meth:`potential`.

        :return: the potential, a scalar, and for each plate the vector :math:`t` of shape
            :math:`(n,)`.
        """
        energy, sites = self.potential_and_sites(z, indices, rng_key, args, kwargs)
        # a list, whose order is that of any other process, whose programs are kept
        names = [plate.name for plate in self.plates]
        terms = {name: jnp.zeros(indices[name].size) for name in names}
        for site in sites.values():
            frames = site["cond_indep_stack"] if site["type"] == "sample" else []
            frames = [frame for frame in frames if frame.name in names]
            if not frames:
                continue
            term = log_density(site)
            for frame in frames:
                axis = jnp.ndim(term) + frame.dim
                others = tuple(k for k in range(jnp.ndim(term)) if k != axis)
                terms[frame.name] += jnp.sum(term, axis=others)
        return energy, terms

    def constrain(self, z: Values, args: tuple, kwargs: dict) -> Values:
        """
        Return the values of the latent sites on their supports, and of deterministic sites.

        The deterministic sites are the ones that do not depend on the minibatch. Parameters are as
        in :meth:`potential`.

        The model is replayed, so that supports may depend on other sites. Under ``jit`` parts that
        the result does not need, the likelihood above all, are not computed.
        """
        model = self._at(self.first_rows(), random.key(0))
        # an invalid draw, such as one with an underflowed scale, must not end the run
        with one_at_a_time, validation_enabled(False):
            values = constrain_fn(model, args, kwargs, z, return_deterministic=True)
        return {k: v for k, v in values.items() if k not in self.minibatch_dependent}

    def log_densities(self, z: Values, args: tuple, kwargs: dict) -> dict[str, Array]:
        """
        Return the log density of every site at the first rows of the data.

        Parameters are as in :meth:`potential`.
        """
        model = self._at(self.first_rows(), random.key(0))
        with one_at_a_time, validation_enabled(False):
            values = constrain_fn(model, args, kwargs, z)
            return compute_log_probs(model, args, kwargs, values)[0]

    def unconstrain(self, values: Values, args: tuple, kwargs: dict) -> Values:
        """
        Return unconstrained values of the latent sites of one draw.

        It is the inverse of :meth:`constrain`.
        """
        model = self._at(self.first_rows(), random.key(0))
        latents = {name: values[name] for name in self.latents}
        with one_at_a_time:
            return unconstrain_fn(model, args, kwargs, latents)


def unremarkable_values(view: MinibatchModel) -> Values:
    """Return unconstrained values without special ones, at which different models differ."""
    waves = {k: np.cos(1.0 + np.arange(math.prod(x.shape))) for k, x in view.latents.items()}
    return {
        k: jnp.asarray((waves[k] / 2).reshape(x.shape), x.dtype) for k, x in view.latents.items()
    }


def read_model(model: Model, init_strategy: Callable, args: tuple, kwargs: dict) -> MinibatchModel:
    """
    Read a model and its arguments once, for its subsampled plates and latent sites.

    Models whose minibatches are not unbiased are refused (:data:`~.checks.sites.CHECKS`). The
    result does not depend on a random key or on the chain.

    :param model: a model with NumPyro primitives.
    :param init_strategy: NumPyro's initialisation strategy, for the shapes of the latent
        sites; sites with an improper prior need one that does not draw from the prior.
    :param args: arguments of the model; arrays must be JAX arrays.
    :param kwargs: keyword arguments of the model.
    :raises ValueError: if a model is refused. The message names the site, plate or argument, and
        the remedy.
    """
    check_data(model, args, kwargs)
    reading = reading_of(model, init_strategy, args, kwargs)
    for check in CHECKS:
        check(reading)
    return MinibatchModel(
        reading.fixed,
        reading.plates,
        reading.latents,
        reading.minibatch_dependent,
        reading.plate_of_source,
        *reading.captured,
    )
