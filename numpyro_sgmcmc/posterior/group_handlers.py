# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Effect handlers for plates of groups: a record of the other sites, and given latent values."""

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from itertools import product
import math
from typing import Any, NamedTuple

from jax import Array, random
from jax.nn import log_sigmoid
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.handlers import substitute, trace, uncondition
from numpyro.primitives import Messenger

from numpyro_sgmcmc.posterior.curvature import DENSE, Form, Path
from numpyro_sgmcmc.posterior.handlers import Model, log_density, without_wrappers
from numpyro_sgmcmc.posterior.hidden_states import HiddenStates
from numpyro_sgmcmc.posterior.numpyro_private import is_scanned
from numpyro_sgmcmc.posterior.quadrature import needs_draws, points_of

#: Key of the mark on messages that ask for a random key from outside.
_ASKED = "numpyro_sgmcmc: asked"

#: Key under which a factor keeps the observed sites that it replaces.
OBSERVED = "numpyro_sgmcmc: observed"


class LocalPlate(NamedTuple):
    """
    Subsampled plate with latent sites.

    - **name** - name of the plate.
    - **continuous** - shapes of the unconstrained values of a group, by continuous site.
    - **discrete** - number of values, by discrete site outside of a ``scan``.
    - **bounded** - whether the support of a continuous site has an end, so that its distribution
      may be skewed.
    - **normal** - whether the continuous sites are normal given the observations and all other
      sites, whatever the values of those.
    - **path** - the path of the latent values; None for other groups.
    - **scanned** - the axis of the groups, by continuous site in the body of a ``scan``.
    - **states** - the discrete sites in the body of a ``scan``; None without such sites.
    """

    name: str
    continuous: tuple[tuple[str, tuple[int, ...]], ...]
    discrete: tuple[tuple[str, int], ...]
    bounded: bool = False
    normal: bool = False
    path: Path | None = None
    scanned: tuple[tuple[str, int], ...] = ()
    states: HiddenStates | None = None

    @property
    def dimension(self) -> int:
        """The number of continuous latent variables of a group."""
        return sum(math.prod(shape) for _, shape in self.continuous)

    @property
    def names(self) -> tuple[str, ...]:
        hidden = () if self.states is None else self.states.names
        return (*(name for name, _ in (*self.continuous, *self.discrete)), *hidden)

    @property
    def form(self) -> Form:
        """The form of the curvature."""
        return DENSE if self.path is None else self.path.form

    @property
    def is_drawn(self) -> bool:
        """True if the points of the integrals are drawn at random."""
        return not self.normal and needs_draws(self.dimension)

    def points(self, rule: str) -> int:
        """
        Return the number of points at which a step evaluates each group.

        In closed form each column of the Hessian counts as one.
        """
        points = 1 + self.form.columns(self.dimension)
        if not self.normal:
            points = points_of(self.dimension, rule)
        pairs = 1 if self.states is None else self.states.number**2
        return len(self.combinations) * pairs * points

    @property
    def combinations(self) -> np.ndarray:
        """The combinations of the values of the discrete sites, shape (combinations, sites)."""
        return np.array(list(product(*(range(size) for _, size in self.discrete))), np.int32)


class SeenPlate(NamedTuple):
    """Plate in an evaluation of a model: its frame, its size, and the rows of the minibatch."""

    frame: Any
    size: int
    rows: Array


class Globals(Messenger):
    """Handler that records the sites outside of groups, and hides the sites inside of groups."""

    def __init__(self, plates: Iterable[LocalPlate], hidden: frozenset[str]) -> None:
        self.names, self.hidden = {plate.name for plate in plates}, hidden
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


class AllGiven(Messenger):
    """
    Handler that sets all latent values of a model, for the log densities of its groups.

    :param states: numbers of the hidden states of each group, shape (n, T).
    """

    def __init__(
        self,
        model: Model,
        plate: LocalPlate,
        seen: Globals,
        values: Mapping[str, Any],
        z: Array,
        classes: Array,
        states: Array | None = None,
    ) -> None:
        self.model, self.plate, self.seen, self.values = model, plate, seen, values
        self.states = states
        self.names = seen.names
        if plate.path is not None:
            z = z[:, np.argsort(plate.path.order)]
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
        unconstrained = jnp.moveaxis(self._part(name), 0, group_axis(msg, self.plate.name))
        value, self.log_dets[name] = constrained(msg["fn"], unconstrained)
        return value

    def _part(self, name: str) -> Array:
        """Return the unconstrained values of a site, groups along the first axis."""
        shape, start = self.shapes[name], self.start[name]
        return self.z[:, start : start + math.prod(shape)].reshape(len(self.z), *shape)

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

    @property
    def _given_model(self) -> Model:
        """The model with the values of sites in a ``scan``, whose body no other handler sees."""
        data = {name: jnp.moveaxis(self._part(name), 0, axis) for name, axis in self.plate.scanned}
        if self.plate.states is not None and self.states is not None:
            data |= self.plate.states.values(self.states)
        return substitute(self.model, data=data) if data else self.model

    def sites(self, args: tuple, kwargs: dict) -> dict[str, dict]:
        with trace() as recorded, self:
            self._given_model(*args, **kwargs)
        return recorded

    def replicated_sites(self, rng_key: Array, args: tuple, kwargs: dict) -> dict[str, dict]:
        """Return the observed sites with newly drawn values."""
        self.rng_key = rng_key
        with trace() as recorded, self:
            uncondition(self._given_model)(*args, **kwargs)
        return recorded

    def log_densities(self, args: tuple, kwargs: dict, names: Iterable[str] | None = None) -> Array:
        """Return the log density of each group, of all its sites or of the named sites."""
        total = jnp.zeros(len(self.z))
        for _, term, axis in self._terms(args, kwargs, names):
            total = total + term.sum([k for k in range(term.ndim) if k != axis])
        return total

    def log_densities_by_time(
        self, length: int, args: tuple, kwargs: dict, names: Iterable[str] | None = None
    ) -> tuple[Array, Array]:
        """Return the log densities in a ``scan``, shape (length, n), and all others, shape (n,)."""
        by_time, rest = jnp.zeros((length, len(self.z))), jnp.zeros(len(self.z))
        for site, term, axis in self._terms(args, kwargs, names):
            if is_scanned(site) and len(term) == length:
                by_time += term.sum([k for k in range(1, term.ndim) if k != axis])
            else:
                rest += term.sum([k for k in range(term.ndim) if k != axis])
        return by_time, rest

    def _terms(
        self, args: tuple, kwargs: dict, names: Iterable[str] | None
    ) -> Iterator[tuple[dict, Array, int]]:
        """Return the sites of the groups with their log densities, and the axis of the groups."""
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
                yield site, term, term.ndim + frame.dim


class inside(Messenger):
    """Handler that adds the frame of a closed plate, and the sites that its factor replaces."""

    def __init__(self, seen: SeenPlate, observed: dict[str, dict]) -> None:
        self.seen, self.observed = seen, observed
        super().__init__(None)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample":
            msg["infer"] = {**msg["infer"], OBSERVED: self.observed}
            msg["cond_indep_stack"].append(self.seen.frame)
            if (share := len(self.seen.rows) / self.seen.size) != 1:
                msg["scale"] = (1.0 if msg["scale"] is None else msg["scale"]) / share


def with_observed(sites: Mapping[str, dict]) -> dict[str, dict]:
    """Return the sites of a trace, with the observed sites that factors of groups replace."""
    result = dict(sites)
    for site in sites.values():
        result |= site.get("infer", {}).get(OBSERVED, {})
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


def plate_axes(site: dict) -> dict[str, int]:
    """Return the axis of each plate in a sample or deterministic site, for plates that have one."""
    frames = site["cond_indep_stack"]
    if site["type"] == "sample":
        shape = site["fn"].batch_shape
    else:
        # plates come first in a value of more axes, after the times of a `scan`, and last in one of
        # fewer
        shape = jnp.shape(site["value"])
        shape = shape[: is_scanned(site) + max((-frame.dim for frame in frames), default=0)]
    axes = {frame.name: (len(shape) + frame.dim, frame.size) for frame in frames}
    return {name: k for name, (k, size) in axes.items() if k >= 0 and shape[k] == size}
