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
place of all sites of the plate. A group is a row for every sampler. Discrete sites are summed over.
Continuous sites are integrated by :func:`~numpyro_sgmcmc.posterior.quadrature.log_integral`, and
in closed form if they are normal given all else.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
from jax.nn import log_sigmoid, logsumexp
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.handlers import block, trace, uncondition
from numpyro.primitives import Messenger

from numpyro_sgmcmc.posterior.checks.arguments import as_arrays
from numpyro_sgmcmc.posterior.handlers import Model, Plate, log_density, without_wrappers
from numpyro_sgmcmc.posterior.polynomial import degree
from numpyro_sgmcmc.posterior.quadrature import (
    draws_of,
    log_integral,
    needs_draws,
    normal_draws_of,
    normal_log_integral,
    points_of,
)

#: Ending of the name of a plate's factor.
MARGINAL = ", marginal"

#: Number of groups whose integrals are computed together when a model is evaluated on all groups.
AT_ONCE = 2_048

#: Key of the mark on messages that ask for a random key from outside.
_ASKED = "numpyro_sgmcmc: asked"

#: Key under which a factor keeps the observed sites that it replaces.
_OBSERVED = "numpyro_sgmcmc: observed"


class LocalPlate(NamedTuple):
    """
    Subsampled plate with latent sites.

    - **name** - name of the plate.
    - **continuous** - shapes of the unconstrained values of a group, by continuous site.
    - **discrete** - number of values, by discrete site.
    - **bounded** - whether the support of a continuous site has an end, so that its distribution
      may be skewed.
    - **normal** - whether the continuous sites are normal given the observations and all other
      sites, whatever the values of those.
    """

    name: str
    continuous: tuple[tuple[str, tuple[int, ...]], ...]
    discrete: tuple[tuple[str, int], ...]
    bounded: bool = False
    normal: bool = False

    @property
    def dimension(self) -> int:
        """The number of continuous latent variables of a group."""
        return sum(math.prod(shape) for _, shape in self.continuous)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in (*self.continuous, *self.discrete))

    @property
    def is_drawn(self) -> bool:
        """True if the points of the integrals are drawn at random."""
        return not self.normal and needs_draws(self.dimension)

    def points(self, rule: str) -> int:
        """
        Return the number of points at which a step evaluates each group.

        In closed form each column of the Hessian counts as one.
        """
        points = 1 + self.dimension if self.normal else points_of(self.dimension, rule)
        return len(self.combinations) * points

    @property
    def combinations(self) -> np.ndarray:
        """The combinations of the values of the discrete sites, shape (combinations, sites)."""
        return np.array(list(product(*(range(size) for _, size in self.discrete))), np.int32)


@dataclass(frozen=True)
class Marginal:
    """
    Model without the latent sites of its subsampled plates, which are integrated out.

    It is a function like the model itself, with a ``numpyro.factor`` for each of these plates.

    - **model** - the model as it was written.
    - **plates** - the plates with latent sites.
    - **hidden** - deterministic sites that depend on latent sites of plates.
    - **rule** - rule of the integrals (:func:`~numpyro_sgmcmc.posterior.quadrature.log_integral`).
      ``"point"`` replaces them by the integrand at a point of each group, ``"none"`` by zeros.
    - **at_once** - number of groups whose integrals are computed together; all if None.
    - **left_out** - plates whose integrals are replaced by zeros.

    **Example:** a normal mean of normal means.

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.util import log_density
        >>> from numpyro_sgmcmc.posterior.local_latents import LocalPlate, Marginal

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
        seen = Globals(self)
        with seen:
            result = self.model(*args, **kwargs)
        for plate in self.plates:
            terms = jnp.zeros(seen.plates[plate.name].frame.size, seen.dtype)
            if self.rule != "none" and plate.name not in self.left_out:
                terms = self._log_densities(plate, seen, args, kwargs)
            shape = (-1, *(1,) * (-seen.plates[plate.name].frame.dim - 1))
            with _inside(seen.plates[plate.name], seen.observed[plate.name]):
                numpyro.factor(plate.name + MARGINAL, terms.reshape(shape))
        return result

    def _log_densities(
        self, plate: LocalPlate, seen: "Globals", args: tuple, kwargs: dict
    ) -> Array:
        """Return the marginal log density of the observations of each group, shape (n,)."""

        def of_some(rows: Array) -> Array:
            integrals = self.log_integrals(plate, seen.at(plate.name, rows), args, kwargs)[0]
            return logsumexp(integrals, axis=0)

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
            observed = sites[plate.name + MARGINAL]["infer"][_OBSERVED]
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
        seen = Globals(self)
        with seen:
            self.model(*args, **kwargs)

        def is_normal(plate: LocalPlate) -> bool:
            start, density = self._densities(plate, seen, args, kwargs)
            classes = jnp.asarray(plate.combinations)[0]
            return degree(partial(density, seen.values, classes), start) == 2

        plates = [p._replace(normal=p.dimension > 0 and is_normal(p)) for p in self.plates]
        return replace(self, plates=tuple(plates))

    def _densities(
        self, plate: LocalPlate, seen: "Globals", args: tuple, kwargs: dict
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

        def density(
            values: Mapping[str, Any], classes: Array, z: Array, names: Iterable[str] | None = None
        ) -> Array:
            with block():
                given = _AllGiven(self, plate, seen, values, z, classes)
                return given.log_densities(args, kwargs, names)

        return start, density

    def log_integrals(
        self, plate: LocalPlate, seen: "Globals", args: tuple, kwargs: dict
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
                return normal_log_integral(own, start)
            held, latent = partial(density, fixed, classes), partial(own, names=plate.names)
            return log_integral(own, held, latent, start, keys, self.rule)

        classes = jnp.asarray(plate.combinations)
        if self.rule == "point":
            # points differ between groups, so that a dependence on other groups shows
            rows = seen.plates[plate.name].rows
            point = jnp.cos(start + rows[:, None].astype(seen.dtype))
            some = classes[rows % len(classes)].T
            return density(seen.values, some, point)[None], partial(density, seen.values), start
        integrals = integral(classes[0])[None] if len(classes) == 1 else jax.vmap(integral)(classes)
        return integrals, partial(density, seen.values), start

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
        seen = Globals(self)
        drawn: dict[str, dict[str, Array]] = {}
        with seen:
            self.model(*args, **kwargs)
        for plate in self.plates:
            z_key, class_key = random.split(random.fold_in(rng_key, len(drawn)))
            integrals, density, z = self.log_integrals(plate, seen, args, kwargs)
            chosen = jnp.zeros(len(z), int)
            if len(integrals) > 1:
                chosen = random.categorical(class_key, integrals, axis=0)
            classes = jnp.asarray(plate.combinations)[chosen].T
            if plate.dimension:
                draws = normal_draws_of if plate.normal else draws_of
                z = draws(partial(density, classes), z, z_key)
            with block():
                given = _AllGiven(self, plate, seen, seen.values, z, classes)
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
        frames = [f for f in site["cond_indep_stack"] if f.name == plate.name]
        axes = [jnp.ndim(site["value"]) + f.dim for f in frames]
        sizes = [f.size for f in frames]
        return next(
            (k for k, n in zip(axes, sizes, strict=True) if k >= 0 and site["value"].shape[k] == n),
            None,
        )


def _keys(rows: Array) -> Array:
    """Return a random key for each group, which does not depend on the minibatch."""
    return jax.vmap(random.fold_in, (None, 0))(numpyro.prng_key(), rows)


class SeenPlate(NamedTuple):
    """Plate in an evaluation of a model: its frame, its size, and the rows of the minibatch."""

    frame: Any
    size: int
    rows: Array


class Globals(Messenger):
    """Handler that records the sites outside of groups, and hides the sites inside of groups."""

    def __init__(self, marginal: Marginal) -> None:
        self.names = {plate.name for plate in marginal.plates}
        self.hidden = marginal.hidden
        #: values by site, of all kinds of sites that have a value
        self.values: dict[str, Any] = {}
        self.keys: list[Any] = []
        self.plates: dict[str, SeenPlate] = {}
        #: observed sites by plate, at some values of the latent sites
        self.observed: dict[str, dict[str, dict]] = {name: {} for name in self.names}
        #: size and rows of the minibatch, by plate with a ``subsample_size``
        self.rows: dict[str, tuple[int, Array]] = {}
        self.dtype = jnp.result_type(float)
        super().__init__(None)

    def at(self, plate: str, rows: Array) -> "Globals":
        """Return the record with some of the rows of a plate."""
        some = copy(self)
        here = self.plates[plate]
        frame = here.frame._replace(size=len(rows))
        some.plates = self.plates | {plate: here._replace(frame=frame, rows=rows)}
        some.rows = self.rows | {plate: (here.size, rows)}
        return some

    def replicable(self, plate: LocalPlate) -> list[str]:
        """Return the observed sites of a plate that can be drawn, without ``numpyro.factor``."""
        observed = self.observed[plate.name].items()
        return [
            k for k, site in observed if not isinstance(without_wrappers(site["fn"]), dist.Unit)
        ]

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "deterministic":
            msg["stop"] = msg["name"] in self.hidden
        # the body of a `scan` has keys of its own
        if msg["type"] in ("prng_key", "control_flow") and msg["kwargs"]["rng_key"] is None:
            msg[_ASKED] = True
        if msg["type"] != "sample":
            return
        for frame in msg["cond_indep_stack"]:
            if frame.name in self.names:
                self.plates[frame.name] = SeenPlate(frame, *self.rows[frame.name])
                msg["stop"] = True
                if msg["value"] is None:
                    msg["value"] = some_value(msg["fn"])

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        kind = msg["type"]
        if kind == "plate" and msg["args"][1] is not None:
            self.rows[msg["name"]] = msg["args"][0], msg["value"]
        elif _ASKED in msg:
            self.keys.append(msg["value"] if kind == "prng_key" else msg["kwargs"]["rng_key"])
        elif kind == "sample" and (plate := self._plate_of(msg)) is not None:
            if msg["is_observed"]:
                self.observed[plate][msg["name"]] = dict(msg)
        elif kind in ("param", "mutable", "sample"):
            self.values[msg["name"]] = msg["value"]

    def _plate_of(self, msg: dict[str, Any]) -> str | None:
        frames = msg["cond_indep_stack"]
        return next((frame.name for frame in frames if frame.name in self.names), None)


class _AllGiven(Messenger):
    """Handler that sets all latent values of a model, for the log densities of its groups."""

    def __init__(
        self,
        marginal: Marginal,
        plate: LocalPlate,
        seen: Globals,
        values: Mapping[str, Any],
        z: Array,
        classes: Array,
    ) -> None:
        self.model, self.plate, self.seen, self.values = marginal.model, plate, seen, values
        self.names = {local.name for local in marginal.plates}
        self.z, self.start = z, {}
        start = 0
        for name, shape in plate.continuous:
            self.start[name] = start
            start += math.prod(shape)
        self.shapes = dict(plate.continuous)
        self.classes = dict(zip((k for k, _ in plate.discrete), classes, strict=True))
        self.keys = iter(seen.keys)
        #: random key of new observations
        self.rng_key = random.key(0)
        self.log_dets: dict[str, Array] = {}
        super().__init__(None)

    def process_message(self, msg: dict[str, Any]) -> None:
        kind, name = msg["type"], msg.get("name", "")
        if kind == "plate" and name in self.seen.rows:
            rows = self.seen.rows[name][1]
            # rows of other plates make no difference to this plate, but for a complete one inside
            is_inside = name not in self.names and len(rows) == msg["args"][0]
            is_seen = name == self.plate.name or is_inside
            msg["value"] = rows if is_seen else jnp.zeros_like(rows)
            # both are set, since the plate warns of indices of another length than declared
            msg["args"] = (msg["args"][0], len(rows))
        elif kind == "prng_key" and msg["kwargs"]["rng_key"] is None:
            msg["value"] = next(self.keys, None)
        elif kind == "control_flow" and msg["kwargs"]["rng_key"] is None:
            # without a key `block` would ask for one, which the model did not have
            msg["kwargs"]["rng_key"] = next(self.keys, None)
        elif kind in ("param", "mutable") and name in self.values:
            msg["value"] = self.values[name]
        elif kind == "sample" and msg["value"] is None:
            if msg["infer"].get("was_observed"):
                self.rng_key, own = random.split(self.rng_key)
                msg["value"] = msg["fn"].sample(own)
            elif name in self.shapes:
                msg["value"] = self._continuous(name, msg)
            elif name in self.classes:
                msg["value"] = self._discrete(name, msg)
            elif any(frame.name in self.names for frame in msg["cond_indep_stack"]):
                msg["value"] = some_value(msg["fn"])
            else:
                msg["value"] = self.values[name]

    def _continuous(self, name: str, msg: dict[str, Any]) -> Array:
        shape, start = self.shapes[name], self.start[name]
        own = self.z[:, start : start + math.prod(shape)].reshape(len(self.z), *shape)
        unconstrained = jnp.moveaxis(own, 0, group_axis(msg, self.plate.name))
        value, self.log_dets[name] = constrained(msg["fn"], unconstrained)
        return value

    def _discrete(self, name: str, msg: dict[str, Any]) -> Array:
        fn, chosen = msg["fn"], self.classes[name]
        support = fn.enumerate_support(expand=False)
        support = support.reshape(len(support), *fn.event_shape)
        values = support[chosen]
        if jnp.ndim(chosen):
            # the value differs between groups
            axis, axes = group_axis(msg, self.plate.name), len(fn.batch_shape)
            values = values.reshape(
                *(len(chosen) if k == axis else 1 for k in range(axes)), *fn.event_shape
            )
        return jnp.broadcast_to(values, fn.shape())

    def sites(self, args: tuple, kwargs: dict) -> dict[str, dict]:
        with trace() as recorded, self:
            self.model(*args, **kwargs)
        return recorded

    def replicated_sites(self, rng_key: Array, args: tuple, kwargs: dict) -> dict[str, dict]:
        """Return the observed sites with newly drawn values."""
        self.rng_key = rng_key
        with trace() as recorded, self:
            uncondition(self.model)(*args, **kwargs)
        return recorded

    def log_densities(self, args: tuple, kwargs: dict, names: Iterable[str] | None = None) -> Array:
        """Return the log density of each group, of all its sites or of the named sites."""
        total = jnp.zeros(len(self.z))
        for name, site in self.sites(args, kwargs).items():
            is_term = site["type"] == "sample" and (names is None or name in names)
            frames = site["cond_indep_stack"] if is_term else []
            for frame in frames:
                if frame.name != self.plate.name:
                    continue
                seen = self.seen.plates[frame.name]
                term = log_density(site) * (len(seen.rows) / seen.size)
                if name in self.log_dets:
                    log_det = self.log_dets[name]
                    term = term + log_det.reshape(log_det.shape + (1,) * (term.ndim - log_det.ndim))
                axis = term.ndim + frame.dim
                total = total + term.sum([k for k in range(term.ndim) if k != axis])
        return total


class _inside(Messenger):
    """Handler that adds the frame of a closed plate, and the sites that its factor replaces."""

    def __init__(self, seen: SeenPlate, observed: dict[str, dict]) -> None:
        self.seen, self.observed = seen, observed
        super().__init__(None)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample":
            msg["infer"] = {**msg["infer"], _OBSERVED: self.observed}
            msg["cond_indep_stack"].append(self.seen.frame)
            if (share := len(self.seen.rows) / self.seen.size) != 1:
                msg["scale"] = (1.0 if msg["scale"] is None else msg["scale"]) / share


def with_observed(sites: Mapping[str, dict]) -> dict[str, dict]:
    """Return the sites of a trace, with the observed sites that factors of groups replace."""
    result = dict(sites)
    for site in sites.values():
        result |= site.get("infer", {}).get(_OBSERVED, {})
    return result


def some_value(fn: Any) -> Array:
    """Return a value of a latent site without a random key."""
    if fn.support.is_discrete:
        return jnp.broadcast_to(fn.enumerate_support(expand=False)[0], fn.shape())
    transform = biject_to(fn.support)
    return transform(jnp.zeros(transform.inverse_shape(fn.shape())))


def constrained(fn: Any, z: Array) -> tuple[Array, Array]:
    """
    Return a value from an unconstrained one, and the log determinant of the transform.

    A Beta, Gamma or Dirichlet distribution of small shapes has much of its mass where values are
    rounded to a bound of its support, in single precision between :math:`1 - 10^{-7}` and 1. The
    log determinant includes the part of the log density that is lost there.
    """
    transform, law = biject_to(fn.support), without_wrappers(fn)
    value = transform(z)
    if not isinstance(law, dist.Gamma | dist.Beta | dist.Dirichlet):
        return value, transform.log_abs_det_jacobian(z, value)
    value = jnp.maximum(value, jnp.finfo(value.dtype).tiny)
    log_value = jnp.log(value)
    if isinstance(law, dist.Gamma):
        lost = (law.concentration - 1) * (z - log_value)
    elif isinstance(law, dist.Beta):
        lost = (law.concentration1 - 1) * (log_sigmoid(z) - log_value)
        lost = lost + (law.concentration0 - 1) * (log_sigmoid(-z) - jnp.log1p(-value))
    else:
        parts = z - jnp.log(z.shape[-1] - jnp.arange(z.shape[-1]))
        none = jnp.zeros_like(z[..., :1])
        own = jnp.concatenate([log_sigmoid(parts), none], -1)
        before = jnp.concatenate([none, jnp.cumsum(log_sigmoid(-parts), -1)], -1)
        less = own + before - log_value
        # the determinant has the logarithms of all but the last
        lost = ((law.concentration - 1) * less).sum(-1) + less[..., :-1].sum(-1)
    outer = len(fn.event_shape) - len(law.event_shape)
    return value, transform.log_abs_det_jacobian(z, value) + lost.sum(tuple(range(-outer, 0)))


def group_axis(msg: dict[str, Any], plate: str) -> int:
    """Return the axis of the groups in the values of a site."""
    (dim,) = (frame.dim for frame in msg["cond_indep_stack"] if frame.name == plate)
    return len(msg["fn"].batch_shape) + dim
