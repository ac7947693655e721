# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Latent variables of groups, integrated out.

A latent site inside a subsampled plate belongs to a group, and every step has other groups. The
posterior of the other, global parameters does not need its values: with :math:`z_g` for the latent
variables of group :math:`g`,

.. math:: p(\\theta \\mid y) \\propto p(\\theta) \\prod_g p(y_g \\mid \\theta), \\qquad
    p(y_g \\mid \\theta) = \\int p(y_g \\mid z_g, \\theta) \\, p(z_g \\mid \\theta) \\, dz_g ,

and :class:`Marginal` is the model with a factor :math:`p(y_g \\mid \\theta)` for each group in the
place of all sites of the plate. A group is a row for every sampler. Discrete sites are summed over,
those in the body of a ``scan`` as states of a Markov chain
(:mod:`~numpyro_sgmcmc.posterior.hidden_states`).
Continuous sites are integrated in closed form if they are normal given all else
(:mod:`~numpyro_sgmcmc.posterior.normal_groups`), and else by quadrature or draws
(:mod:`~numpyro_sgmcmc.posterior.quadrature`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import Array, lax, random
from jax.nn import logsumexp
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.handlers import block

from numpyro_sgmcmc.posterior.checks.arguments import as_arrays
from numpyro_sgmcmc.posterior.curvature import Banded, path_of, pattern_of
from numpyro_sgmcmc.posterior.group_handlers import (
    OBSERVED,
    AllGiven,
    Globals,
    LocalPlate,
    group_axis,
    inside,
    plate_axes,
)
from numpyro_sgmcmc.posterior.handlers import Model, Plate
from numpyro_sgmcmc.posterior.hidden_states import Terms, draw_states, is_a_chain, log_sum
from numpyro_sgmcmc.posterior.normal_groups import normal_draws_of, normal_log_integral
from numpyro_sgmcmc.posterior.polynomial import degree
from numpyro_sgmcmc.posterior.quadrature import MOST_DIMENSIONS, draws_of, log_integral

#: Ending of the name of a plate's factor.
MARGINAL = ", marginal"

#: Number of groups whose Hessians show which latent values depend on each other.
SEEN = 8

#: Largest number of latent values of a path.
MOST_ON_A_PATH = 1_000

#: Number of groups whose integrals are computed together when a model is evaluated on all groups.
AT_ONCE = 2_048


@dataclass(frozen=True)
class Marginal:
    """
    Model without the latent sites of its subsampled plates, which are integrated out.

    It is a function like the model itself, with a ``numpyro.factor`` for each of these plates.

    - **model** - the model as it was written.
    - **plates** - the plates with latent sites.
    - **hidden** - deterministic sites that depend on latent sites of plates.
    - **rule** - rule of the integrals (:func:`~numpyro_sgmcmc.posterior.quadrature.log_integral`).
      ``"point"`` replaces them by the integrand at a point of each group, ``"none"`` by zeros, and
      ``"structure"`` by 1 for each group that has no path like those of the first groups, or whose
      states are no Markov chain.
    - **at_once** - number of groups whose integrals are computed together; all if None.
    - **left_out** - plates whose integrals are replaced by zeros.

    **Example:** a normal mean of normal means.

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.util import log_density
        >>> from numpyro_sgmcmc.posterior.group_handlers import LocalPlate
        >>> from numpyro_sgmcmc.posterior.local_latents import Marginal

        >>> def model(y):
        ...     with numpyro.plate("groups", len(y), subsample_size=2) as g:
        ...         a = numpyro.sample("a", dist.Normal(0, 1))
        ...         numpyro.sample("y", dist.Normal(a, 1), obs=y[g])

        >>> marginal = Marginal(model, (LocalPlate("groups", (("a", ()),), ()),), frozenset())
        >>> y = jnp.ones(2)
        >>> value, sites = log_density(marginal, (y,), {}, {})
        >>> list(sites), bool(jnp.allclose(value, dist.Normal(0, 2**0.5).log_prob(y).sum()))
        (['groups', 'groups, marginal'], True)
    """

    model: Model
    plates: tuple[LocalPlate, ...]
    hidden: frozenset[str]
    rule: str = "step"
    at_once: int | None = None
    left_out: frozenset[str] = frozenset()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.at_once is not None:
            args, kwargs = as_arrays((args, kwargs))  # NumPy arrays cannot be indexed in a program
        seen = Globals(self.plates, self.hidden)
        with seen:
            result = self.model(*args, **kwargs)
        for plate in self.plates:
            terms = jnp.zeros(seen.plates[plate.name].frame.size, seen.dtype)
            if self.rule != "none" and plate.name not in self.left_out:
                terms = self._log_densities(plate, seen, args, kwargs)
            shape = (-1, *(1,) * (-seen.plates[plate.name].frame.dim - 1))
            with inside(seen.plates[plate.name], seen.observed[plate.name]):
                numpyro.factor(plate.name + MARGINAL, terms.reshape(shape))
        return result

    def _log_densities(self, plate: LocalPlate, seen: Globals, args: tuple, kwargs: dict) -> Array:
        """Return the marginal log density of the observations of each group, shape (n,)."""

        def of_some(rows: Array) -> Array:
            integrals = self.log_integrals(plate, seen.at(plate.name, rows), args, kwargs)[0]
            return integrals.min(axis=0) if self.rule == "weights" else logsumexp(integrals, axis=0)

        rows = seen.plates[plate.name].rows
        if self.at_once is None:
            return of_some(rows)
        number = len(rows)
        length = min(self.at_once, number)
        # the last part is filled up with the last row
        some = jnp.minimum(jnp.arange(-(-number // length) * length), number - 1)
        return lax.map(of_some, rows[some].reshape(-1, length)).reshape(-1)[:number]

    def with_points(self, plates: Iterable[Plate]) -> tuple[Plate, ...]:
        """Return plates with the number of points at which each group is evaluated."""
        points = {plate.name: plate.points(self.rule) for plate in self.plates}
        return tuple(plate._replace(points=points.get(plate.name, 1)) for plate in plates)

    def with_members(self, plates: Sequence[Plate], sites: Mapping[str, dict]) -> tuple[Plate, ...]:
        """Return plates with the facts of their groups, and the number of values of a group."""
        counts, sizes = {}, {p.name: p.subsample_size for p in plates}
        for plate in self.plates:
            observed = sites[plate.name + MARGINAL]["infer"][OBSERVED]
            counts[plate.name] = sum(jnp.size(site["value"]) for site in observed.values())
        members = {name: max(1, count // sizes[name]) for name, count in counts.items()}
        return tuple(
            p._replace(members=members[p.name], is_group=True) if p.name in members else p
            for p in plates
        )

    @property
    def __wrapped__(self) -> Model:
        """The model as it was written, for ``inspect.signature``."""
        return self.model

    def with_normal_groups(self, *args: Any, **kwargs: Any) -> "Marginal":
        """Return the model with the plates marked whose latent sites are normal given all else."""
        seen = self._seen(args, kwargs)

        def is_normal(plate: LocalPlate) -> bool:
            start, density = self._densities(plate, seen, args, kwargs)
            classes = jnp.asarray(plate.combinations)[0]
            return degree(partial(density, seen.values, classes), start) == 2

        plates = [p._replace(normal=p.dimension > 0 and is_normal(p)) for p in self.plates]
        return replace(self, plates=tuple(plates))

    @property
    def has_long_groups(self) -> bool:
        """True if some groups have so many latent values that these must form a path."""
        return any(MOST_DIMENSIONS < p.dimension <= MOST_ON_A_PATH for p in self.plates)

    def patterns(self, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """
        Return which latent values of a group depend on each other, by plate of long groups.

        It is the union over some groups, and over the values of discrete sites.
        """
        seen, found = self._seen(args, kwargs), {}
        for plate in self.plates:
            if not MOST_DIMENSIONS < plate.dimension <= MOST_ON_A_PATH:
                continue
            few = seen.at(plate.name, seen.plates[plate.name].rows[:SEEN])
            start, density = self._densities(plate, few, args, kwargs)
            found[plate.name] = np.any(
                [
                    pattern_of(partial(density, few.values, jnp.asarray(classes)), start)
                    for classes in plate.combinations
                ],
                axis=0,
            )
        return found

    def with_paths(self, patterns: Iterable[Mapping[str, np.ndarray]]) -> "Marginal":
        """Return the model with the paths of its groups, by :meth:`patterns` at several values."""
        together: dict[str, np.ndarray] = {}
        for found in patterns:
            together |= {k: x | together.get(k, x) for k, x in found.items()}
        plates = (
            p._replace(path=path_of(together[p.name])) if p.name in together else p
            for p in self.plates
        )
        return replace(self, plates=tuple(plates))

    def _seen(self, args: tuple, kwargs: dict) -> Globals:
        seen = Globals(self.plates, self.hidden)
        with seen:
            self.model(*args, **kwargs)
        return seen

    def _densities(
        self, plate: LocalPlate, seen: Globals, args: tuple, kwargs: dict
    ) -> tuple[Array, Callable[..., Array]]:
        """
        Return the joint log density of each group, and a point.

        :return: the point, shape (n, k); and the log density as a function of the global values,
            the numbers of the discrete values, the continuous values and the names of sites.
        """
        # not zero: `Bernoulli(logits=0.0)` of NumPyro has a gradient without its observation
        near_zero = 0.01 * jnp.cos(1.0 + jnp.arange(plate.dimension, dtype=seen.dtype))
        size = seen.plates[plate.name].frame.size
        start = jnp.broadcast_to(near_zero, (size, plate.dimension))
        by_time = self._by_time(plate, seen, args, kwargs)

        def density(
            values: Mapping[str, Any], classes: Array, z: Array, names: Iterable[str] | None = None
        ) -> Array:
            if plate.states is not None:
                return log_sum(by_time(values, classes, z, names), plate.states, len(z))
            with block():
                given = AllGiven(self.model, plate, seen, values, z, classes)
                return given.log_densities(args, kwargs, names)

        return start, density

    def _by_time(
        self, plate: LocalPlate, seen: Globals, args: tuple, kwargs: dict
    ) -> Callable[..., Terms]:
        """
        Return the joint log density of each group as a function of its hidden states, by time.

        :return: the function, as a function of the arguments of that of :meth:`_densities`.
        """

        def given(
            values: Mapping[str, Any], classes: Array, z: Array, names: Iterable[str] | None = None
        ) -> Terms:
            def terms(states: Array) -> tuple[Array, Array]:
                with block():
                    all_given = AllGiven(self.model, plate, seen, values, z, classes, states)
                    return all_given.log_densities_by_time(states.shape[1], args, kwargs, names)

            return terms

        return given

    def log_integrals(
        self, plate: LocalPlate, seen: Globals, args: tuple, kwargs: dict
    ) -> tuple[Array, Callable[[Array, Array], Array], Array]:
        """
        Return the log integrals over the continuous sites for each value of the discrete sites.

        :return: the log integrals, shape (combinations, n); the joint log density of each group as
            a function of the numbers of the discrete values and of the continuous values, shape
            (n, k); and a point, shape (n, k).
        """
        start, density = self._densities(plate, seen, args, kwargs)
        fixed = jax.tree.map(lax.stop_gradient, seen.values)
        keys = _keys(seen.plates[plate.name].rows) if plate.is_drawn else None

        def integral(classes: Array) -> Array:
            own = partial(density, seen.values, classes)
            if not plate.dimension:
                return own(start)
            if plate.normal:
                return normal_log_integral(own, start, plate.form)
            held, latent = partial(density, fixed, classes), partial(own, names=plate.names)
            return log_integral(own, held, latent, start, keys, self.rule, plate.form)

        classes = jnp.asarray(plate.combinations)
        if self.rule == "structure":
            return self._differs(plate, seen, args, kwargs)[None], density, start
        if self.rule == "point":
            # points differ between groups, so that a dependence on other groups shows
            rows = seen.plates[plate.name].rows
            point = jnp.cos(start + rows[:, None].astype(seen.dtype))
            some = classes[rows % len(classes)].T
            return density(seen.values, some, point)[None], partial(density, seen.values), start
        integrals = integral(classes[0])[None] if len(classes) == 1 else jax.vmap(integral)(classes)
        return integrals, partial(density, seen.values), start

    def _differs(self, plate: LocalPlate, seen: Globals, args: tuple, kwargs: dict) -> Array:
        """
        Return 1 for each group of another structure than that of its plate, and 0 for others.

        A latent value depends on others than those of a path, or a factor on the states of more
        than two times.
        """
        start, density = self._densities(plate, seen, args, kwargs)
        by_time = self._by_time(plate, seen, args, kwargs)
        form, rows = plate.form, seen.plates[plate.name].rows
        point = jnp.cos(start + rows[:, None].astype(seen.dtype))

        def is_right(classes: Array) -> Array:
            result = jnp.ones(len(start), bool)
            if isinstance(form, Banded):
                result &= form.is_complete(partial(density, seen.values, classes), point)
            if plate.states is not None:
                terms = by_time(seen.values, classes, point)
                result &= is_a_chain(terms, plate.states, len(start), random.key(0))
            return result

        found = lax.map(is_right, jnp.asarray(plate.combinations))
        return 1.0 - jnp.all(found, axis=0).astype(seen.dtype)

    def draws(self, rng_key: Array, args: tuple, kwargs: dict) -> dict[str, dict[str, Array]]:
        """
        Draw the latent sites of the groups of a minibatch, given the values of all other sites.

        They are draws of :math:`p(z_g \\mid y_g, \\theta)`, with the deterministic sites that
        depend on them.

        :return: by plate and site, groups along the first axis.
        """
        return self._drawn(rng_key, args, kwargs, replicated=False)

    def replicates(self, rng_key: Array, args: tuple, kwargs: dict) -> dict[str, dict[str, Array]]:
        """
        Draw new observations of the groups of a minibatch.

        They are draws of :math:`p(\\tilde y_g \\mid z_g, \\theta)` at draws of
        :math:`p(z_g \\mid y_g, \\theta)`.

        :return: by plate and observed site, groups along the first axis.
        """
        return self._drawn(rng_key, args, kwargs, replicated=True)

    def _drawn(
        self, rng_key: Array, args: tuple, kwargs: dict, replicated: bool
    ) -> dict[str, dict[str, Array]]:
        """Draw latent values or new observations of the groups, by plate and site."""
        seen = self._seen(args, kwargs)
        drawn: dict[str, dict[str, Array]] = {}
        for plate in self.plates:
            z_key, class_key = random.split(random.fold_in(rng_key, len(drawn)))
            integrals, density, z = self.log_integrals(plate, seen, args, kwargs)
            chosen = jnp.zeros(len(z), int)
            if len(integrals) > 1:
                chosen = random.categorical(class_key, integrals, axis=0)
            classes = jnp.asarray(plate.combinations)[chosen].T
            if plate.dimension:
                own = partial(density, classes)
                if plate.normal:
                    z = normal_draws_of(own, z, z_key, plate.form)
                else:
                    z = draws_of(own, partial(own, names=plate.names), z, z_key, plate.form)
            states = None
            if plate.states is not None:
                terms = self._by_time(plate, seen, args, kwargs)(seen.values, classes, z)
                states = draw_states(terms, plate.states, len(z), random.fold_in(z_key, 2))
            with block():
                given = AllGiven(self.model, plate, seen, seen.values, z, classes, states)
                if replicated:
                    sites = given.replicated_sites(random.fold_in(z_key, 1), args, kwargs)
                    names = seen.replicable(plate)
                    axes = {name: group_axis(sites[name], plate.name) for name in names}
                else:
                    sites = given.sites(args, kwargs)
                    all_axes = {k: self._axis_of(plate, k, site) for k, site in sites.items()}
                    axes = {name: axis for name, axis in all_axes.items() if axis is not None}
            drawn[plate.name] = {
                name: jnp.moveaxis(sites[name]["value"], axis, 0) for name, axis in axes.items()
            }
        return drawn

    def _axis_of(self, plate: LocalPlate, name: str, site: dict) -> int | None:
        """Return the axis of the groups in a site, or None if the site does not depend on them."""
        if site["type"] == "sample" and name in plate.names:
            return group_axis(site, plate.name)
        if site["type"] != "deterministic" or name not in self.hidden:
            return None
        return plate_axes(site).get(plate.name)


def _keys(rows: Array) -> Array:
    """Return a random key for each group, which does not depend on the minibatch."""
    key = numpyro.prng_key()
    if key is None:  # a model that is not seeded, as in `numpyro.infer.log_likelihood`
        key = random.key(0)
    return jax.vmap(random.fold_in, (None, 0))(key, rows)
