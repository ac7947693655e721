# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Checks of every row before the first draw.

Rows may be invalid even if the first rows are not: one label in a million may lie outside of the
support of its site, or one code beyond the end of the array that it indexes. And a minibatch
potential is unbiased only if the term of a row in the log density does not depend on the other rows
of the minibatch. One pass over the data, without gradients, shows all of this. Invalid rows are
refused with the row and the likely cause (:mod:`.row_errors`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
from jax.experimental.multihost_utils import process_allgather
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from numpyro_sgmcmc.data.converters import in_host_memory
from numpyro_sgmcmc.data.drawn_rows import DrawnRows, counted_rows, first_of, rows_of
from numpyro_sgmcmc.data.fingerprint import fingerprint_of_program, fingerprints_of_captured
from numpyro_sgmcmc.data.row_numbers import needs_64_bits
from numpyro_sgmcmc.data.rows_on_disk import failure_of, on_disk
from numpyro_sgmcmc.data.sharding import ROWS
from numpyro_sgmcmc.posterior.checks.index_bounds import IndexedArray, watched
from numpyro_sgmcmc.posterior.checks.row_errors import (
    beyond_array,
    check_supports,
    dependent_on_number,
    dependent_on_others,
    not_finite,
    of_a_process,
    outside_support,
)
from numpyro_sgmcmc.posterior.checks.structure import check_structure
from numpyro_sgmcmc.posterior.group_handlers import with_observed
from numpyro_sgmcmc.posterior.handlers import log_density
from numpyro_sgmcmc.posterior.model import Values, unremarkable_values
from numpyro_sgmcmc.posterior.target import Target

#: Number of rows in a program, and number in the test for dependence on other rows. Up to the third
#: number of rows all go in such small numbers, to compile one program instead of two.
_CHUNK, _FEW, _QUICKLY_SEEN = 16_384, 16, 1_024

#: Number of columns of an argument whose extremes are tested, and number of sets of tested rows.
_COLUMNS, _SETS = 50, 8

#: Number of chunks in a program that tests many rows and returns only whether one is wrong.
_CHUNKS = 64

#: Change of a term, relative to its size and the usual size, that is more than rounding, and share
#: of changed terms that is no accident of a few rows.
_ROUNDING, _SHARE = 1e-3, 0.05

#: Site, and one of the subsampled plates that it is in.
Place = tuple[str, str]


class Seen(NamedTuple):
    """
    Results of an evaluation of some rows, with an entry for each row.

    - **terms** - term of the row in the log density, by site and plate.
    - **outside** - whether a counted observation is outside of its support, by site and plate.
    - **densities** - log density of all rows, by observed or latent site.
    - **beyond** - whether an index is outside of its array, for each index in the model.
    """

    terms: dict[Place, Any]
    outside: dict[Place, Any]
    densities: dict[str, Any]
    beyond: list[Any]


class BadRows(NamedTuple):
    """Invalid rows: their number, the first one, and the rows of its chunk."""

    number: int
    first: int
    among: dict[str, Any]


def check_rows(
    target: Target, whole: Target, compiled: Callable[..., Callable]
) -> dict[str, float]:
    """
    Check every row of the data, at fixed values of the latent sites.

    :param target: the model with its data, on each of the devices that they are spread over.
    :param whole: the model with all data, for messages about single rows.
    :param compiled: function that compiles a program, such as :meth:`Target.program`.
    :return: the log density of each site on some rows, which identifies the model.
    :raises ValueError: if observations lie outside of the support of their site, if indices lie
        outside of their arrays, if the density of single rows is not finite, or if the term of a
        row in the log density depends on the other rows of its minibatch. The message names site
        and rows.
    """
    # the integrand shows invalid rows of groups as well as the integral, and compiles faster
    target, whole = (x._replace(model=x.model.with_rule("point")) for x in (target, whole))
    look, values = _Look(target, compiled), unremarkable_values(target.model)
    if not target.model.plates:
        return look.densities()
    check_supports(whole)
    with ExitStack() as stack:
        for source in on_disk((target.args, target.kwargs)):
            stack.enter_context(source.hashed())
        outside, beyond, is_finite = look.over_all_rows(values)
    if not whole.is_here and (bad := [*outside.values(), *beyond.values()]):
        raise of_a_process(bad[0])
    for (site, plate), rows in outside.items():
        raise outside_support(whole, site, plate, rows)
    for k, rows in beyond.items():
        if (indexed := _used_beyond(whole, values, k, rows)) is not None:
            raise beyond_array(whole, indexed, rows)
    if not is_finite:
        for (site, plate), rows in look.never_finite(values).items():
            raise not_finite(whole, site, plate, rows)
    check_structure(target, values)
    for site, plate in look.places_that_depend_on_others(values):
        raise dependent_on_others(whole, site, plate)
    for site, plate, sizes in look.places_that_depend_on_the_number(values):
        raise dependent_on_number(whole, site, plate, sizes)
    return look.densities()


def densities_of(target: Target, compiled: Callable[..., Callable]) -> dict[str, float]:
    """
    Return the log density of each site on some rows, at two sets of values.

    It is the result of :func:`check_rows`, without a check of every row, with other values added.

    :param target: the model with its data, on each of the devices that they are spread over.
    :param compiled: function that compiles a program, such as :meth:`Target.program`.
    """
    look = _Look(target._replace(model=target.model.with_rule("point")), compiled)
    elsewhere = {f"{name} at other values": x for name, x in look.densities(-1.5).items()}
    return look.densities() | elsewhere


def program_of(target: Target) -> str:
    """
    Return the fingerprint of the model's program, for this version of JAX and NumPyro.

    It has the arrays that the density captures, which need not be among those of its values.
    """
    target = target._replace(model=target.model.with_rule("point"))
    program, data, _ = target.program(seen_of, outputs=PartitionSpec(ROWS))
    arguments = unremarkable_values(target.model), target.model.first_rows(), random.key(0)
    traced = jax.make_jaxpr(program)(data, *arguments)
    return fingerprint_of_program(traced) + fingerprints_of_captured(traced)[0]


def seen_of(target: Target, z: Values, rows: Any, rng_key: Array) -> Seen:
    """
    Evaluate the model on some rows.

    :param z: unconstrained values of the latent sites.
    :param rows: rows of each plate.
    :param rng_key: key for a density that is itself random.
    """
    results, indexed = watched(partial(_of_sites, target, z, rng_key), rows)
    terms, outside, densities = results
    return Seen(terms, outside, densities, [_beyond(x.indices, x.length, rows) for x in indexed])


def _of_sites(
    target: Target, z: Values, rng_key: Array, rows: Any
) -> tuple[dict[Place, Array], dict[Place, Array], dict[str, Array]]:
    """Return the terms, the observations outside of supports, and the densities of rows."""
    plates = {plate.name for plate in target.model.plates}
    _, sites = target.model.potential_and_sites(z, rows, rng_key, target.args, target.kwargs)
    terms, outside, densities = {}, {}, {}
    for name, site in with_observed(sites).items():
        if site["type"] != "sample":
            continue
        value, term = site["value"], log_density(site)
        densities[name] = term.sum()[None]
        for frame in (frame for frame in site["cond_indep_stack"] if frame.name in plates):
            axes = tuple(k for k in range(jnp.ndim(term)) if k - jnp.ndim(term) != frame.dim)
            terms[name, frame.name] = term.sum(axes)
            # a `numpyro.factor` has no value and is inside
            inside = site["fn"].support(value) if jnp.size(value) else jnp.ones((), bool)
            # masked observations and ones of weight 0 have a term of 0
            wrong = ~jnp.broadcast_to(inside, term.shape).astype(bool) & (term != 0)
            outside[name, frame.name] = wrong.any(axes)
    return terms, outside, densities


def _beyond(indices: Array, length: int, rows: dict[str, DrawnRows]) -> Array:
    """
    Return for each row whether its indices are outside of an array.

    If indices do not go row by row, the result is for any row. Negative indices count from the end
    if all are negative: next to others they are codes, or neighbours of the first row.
    """
    wrong = (indices < -length) | (indices >= length) | (indices < 0) & (indices >= 0).any()
    for numbers in rows.values():
        if numbers.size == len(indices):
            return wrong.reshape(numbers.size, -1).any(1)
    return jnp.full(next(iter(rows.values())).size, wrong.any())


def _looks_wrong(
    length: int, target: Target, z: Values, rng_key: Array, chunks: Array
) -> tuple[Array, Array]:
    """
    Return whether chunks of the only plate have invalid rows, and terms that are not finite.

    The result is for any device.

    :param int length: number of rows of a chunk.
    :param chunks: numbers of the chunks.
    """
    (plate,) = target.model.plates

    def of_chunk(found: tuple[Array, Array], k: Array) -> tuple[Any, None]:
        rows = counted_rows(plate.size, k, length, 0, length)
        seen = seen_of(target, z, {plate.name: rows}, rng_key)
        wrong = [jnp.any(x) for x in (*seen.outside.values(), *seen.beyond)]
        infinite = [jnp.any(~jnp.isfinite(seen.terms[place])) for place in seen.outside]
        both = (jnp.any(jnp.asarray(x)) for x in (wrong, infinite))
        return jax.tree.map(jnp.logical_or, found, tuple(both)), None

    nothing = jnp.zeros((), bool)
    flags, _ = lax.scan(of_chunk, (nothing, nothing), chunks)
    if target.shards is None:
        return flags
    return jax.tree.map(lambda x: lax.pmax(x.astype(jnp.int32), ROWS) > 0, flags)


class _Look:
    """Tests of rows by a program that evaluates some of them."""

    def __init__(self, target: Target, compiled: Callable[..., Callable]) -> None:
        self.target, self.plates = target, target.model.plates
        self.sizes = {plate.name: plate.size * target.parts for plate in self.plates}
        self.program = compiled("rows", seen_of, target, outputs=PartitionSpec(ROWS))
        self.compiled = compiled
        is_small = math.prod(plate.size for plate in self.plates) <= _QUICKLY_SEEN
        self.many, seen = self._working(_FEW if is_small else _CHUNK)
        sites = [site for site, _ in seen.terms]
        self.are_nested = len(sites) > len(set(sites))

    def _working(self, most: int) -> tuple[dict[str, int], Seen]:
        """Return numbers of rows that the model accepts, and its evaluation on the first rows."""
        each = int(most ** (1 / max(1, len(self.plates))))
        # fewer than all rows, since `numpyro.subsample` would give all rows in their own order
        lengths = {plate.name: max(1, min(plate.size - 1, each)) for plate in self.plates}
        z = unremarkable_values(self.target.model)
        try:
            return lengths, self.at(z, _first(lengths))
        except (TypeError, ValueError):
            # the model has written out the size of its minibatches
            lengths = {plate.name: plate.subsample_size for plate in self.plates}
            return lengths, self.at(z, _first(lengths))

    def densities(self, scale: float = 1.0) -> dict[str, float]:
        """
        Return the log density of each site on rows from all over the data.

        Models may differ in late rows only.
        """
        # reading scattered rows from disk takes long
        is_here = not on_disk((self.target.args, self.target.kwargs))
        rows = self.spread(self.many if is_here else self._working(_FEW)[0])
        z = jax.tree.map(lambda x: scale * x, unremarkable_values(self.target.model))
        return {name: float(x.sum()) for name, x in self.at(z, rows).densities.items()}

    def spread(self, lengths: dict[str, int]) -> dict[str, Any]:
        """Return evenly spaced rows of each plate, since the data may be sorted."""
        return {
            plate.name: rows_of(
                np.linspace(0, plate.size - 1, lengths[plate.name]).round().astype(int), plate.size
            )
            for plate in self.plates
        }

    def at(self, z: Values, rows: dict[str, DrawnRows], key: int = 0) -> Seen:
        """Evaluate the model on rows, with the results of all devices in order."""
        seen = self.run(self.program, z, rows, random.key(key))
        leaves, tree = jax.tree.flatten(seen)
        here = [x if x.is_fully_addressable else process_allgather(x, tiled=True) for x in leaves]
        return jax.tree.unflatten(tree, [np.asarray(x) for x in here])

    def run(self, program: Callable, *arguments: Any) -> Any:
        """Run a program, and raise ``UnreadableRows`` if unreadable rows made it fail."""
        try:
            return jax.block_until_ready(program(*arguments))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            # the type of the error depends on whether the program has run before
            if unreadable := failure_of((self.target.args, self.target.kwargs), error):
                raise unreadable from None
            raise

    def suspicious(self, z: Values) -> tuple[int, list[range], bool]:
        """
        Test many rows of the only plate by chunks.

        The result is the number of first rows that were tested, the stretches with invalid rows,
        and whether all terms are finite.
        """
        if len(self.plates) != 1:
            return 0, [], True
        (plate,), (length,) = self.plates, self.many.values()
        groups = plate.size // length // _CHUNKS
        if groups < 2:
            return 0, [], True
        look = self.compiled("many rows", partial(_looks_wrong, length), self.target, length)
        wrong, is_finite = [], True
        for k in range(groups):
            chunks = jnp.arange(k * _CHUNKS, (k + 1) * _CHUNKS)
            is_wrong, is_infinite = map(bool, self.run(look, z, random.key(0), chunks))
            wrong += [range(k * _CHUNKS * length, (k + 1) * _CHUNKS * length)] if is_wrong else []
            is_finite &= not is_infinite
        return groups * _CHUNKS * length, wrong, is_finite

    def chunks(
        self, first: int = 0, some: Sequence[range] = ()
    ) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
        """
        Yield chunks of rows of each plate, and masks of the rows that were in no earlier chunk.

        If a site is in several plates, all pairs of their chunks are yielded.

        :param int first: first row of the only plate.
        :param some: stretches of rows before the first row that are yielded too.
        """
        each = [
            [
                (min(k, plate.size - length), k)
                for stretch in (*some, range(first, plate.size))
                for k in range(stretch.start, stretch.stop, length)
            ]
            for plate, length in zip(self.plates, self.many.values(), strict=True)
        ]
        if not self.are_nested:
            # the last chunk is repeated, with a first new row beyond its end
            most = max(map(len, each))
            each = [x + [(x[-1][0], x[-1][0] + _CHUNK)] * (most - len(x)) for x in each]
        sizes = {plate.name: plate.size for plate in self.plates}
        for chosen in product(*each) if self.are_nested else zip(*each, strict=True):
            rows, new = {}, {}
            for (name, length), (start, first_new) in zip(self.many.items(), chosen, strict=True):
                rows[name] = rows_of(start + np.arange(length), sizes[name])
                here = start + np.arange(length) >= first_new
                new[name] = np.tile(here, self.target.parts)
            yield rows, new

    def numbers(self, plate: str, rows: dict[str, DrawnRows]) -> np.ndarray:
        """Return the numbers of a plate's rows on all devices among all rows."""
        size = next(p.size for p in self.plates if p.name == plate)
        parts = range(self.target.parts)
        return np.concatenate([rows[plate].integers + part * size for part in parts])

    def over_all_rows(self, z: Values) -> tuple[dict[Place, BadRows], dict[int, BadRows], bool]:
        """
        Test all rows for supports, indices and finite terms.

        The result is the rows outside of the support by place, the rows beyond an array by index,
        and whether the terms of all rows are finite.
        """
        outside: dict[Place, BadRows] = {}
        beyond: dict[int, BadRows] = {}
        done, stretches, is_finite = self.suspicious(z)
        for rows, new in self.chunks(done, stretches):
            seen = self.at(z, rows)
            for place, wrong in seen.outside.items():
                self._count(outside, place, wrong & new[place[1]], place[1], rows)
                is_finite &= bool(np.isfinite(seen.terms[place]).all())
            for k, wrong in enumerate(seen.beyond):
                plate = next(name for name in rows if len(new[name]) == len(wrong))
                self._count(beyond, k, wrong & new[plate], plate, rows)
        return outside, beyond, is_finite

    def _count(
        self, found: dict[Any, BadRows], key: Any, wrong: np.ndarray, plate: str, rows: Any
    ) -> None:
        if not wrong.any():
            return
        numbers = self.numbers(plate, rows)[wrong]
        before = found.get(key) or BadRows(
            0, int(numbers[0]), {**rows, plate: rows_of(numbers, self.sizes[plate])}
        )
        found[key] = before._replace(number=before.number + int(wrong.sum()))

    def never_finite(self, z: Values) -> dict[Place, BadRows]:
        """
        Return the rows whose density is not finite at any tested values.

        The tested values are ones at which the density of most rows is finite.
        """
        seen = [self._finite(jax.tree.map(lambda x, c=c: c * x, z)) for c in (1.0, 0.0, 0.01)]
        bad = {}
        for place in seen[0]:
            telling = [x[place] for x in seen if x[place].mean() > 0.5]
            never = ~np.any(telling, axis=0) if telling else np.zeros(1, bool)
            if never.any():
                bad[place] = BadRows(int(never.sum()), int(np.argmax(never)), {})
        return bad

    def _finite(self, z: Values) -> dict[Place, np.ndarray]:
        """Return by place whether the term of each row is finite."""
        finite: dict[Place, np.ndarray] = {}
        for rows, _ in self.chunks():
            for place, terms in self.at(z, rows).terms.items():
                all_rows = finite.setdefault(place, np.ones(self.sizes[place[1]], bool))
                all_rows[self.numbers(place[1], rows)] &= np.isfinite(terms)
        return finite

    def places_that_depend_on_others(self, z: Values) -> Iterator[Place]:
        """
        Yield the places at which the term of a row depends on other rows of its minibatch.

        The term is compared with the one in a minibatch of copies of the row, and with the one in
        another order of the rows.
        """
        lengths, _ = self._working(_FEW)
        places: set[Place] = set()
        for first in self._unlike_rows(lengths):
            places |= set(self._dependent(z, first))
        yield from sorted(places)

    def places_that_depend_on_the_number(
        self, z: Values
    ) -> Iterator[tuple[str, str, dict[int, float]]]:
        """
        Yield the places at which the term of a row depends on the length of its minibatch.

        Each comes with the median ratio of the terms by number of rows, which is 1 for the first.
        """
        if len(self.plates) != 1:
            return
        ((plate, length),), ((_, other),) = (self._working(n)[0].items() for n in (_FEW, 2 * _FEW))
        if other == length:
            return  # the model has written out the size of its minibatches, or there are few rows
        looks = ((length, 0), (length, 1), (other, 0))
        seen = [(n, self.at(z, _first({plate: n}), key).terms) for n, key in looks]
        for place in seen[0][1]:
            # the terms without the plate's own scale, N / n
            one, again, two = (
                n * terms[place].reshape(self.target.parts, n)[:, :length] for n, terms in seen
            )
            if not _differ(one, again) and _differ(one, two):
                yield *place, {length: 1.0, other: float(np.nanmedian(two / one))}

    def _dependent(self, z: Values, first: dict[str, DrawnRows]) -> Iterator[Place]:
        """Yield the places at which the terms of given rows depend on other rows."""
        # the values are ones at which densities are finite, so that other rows can matter
        for scale in (1.0, 0.01):
            values = jax.tree.map(lambda x, scale=scale: jnp.asarray(scale * np.asarray(x)), z)
            before = self.at(values, first)
            if all(np.isfinite(x).mean() > 0.5 for x in before.terms.values()):
                break
        again = self.at(values, first, key=1)
        for plate in self.plates:
            rows = first[plate.name].integers
            if len(rows) == 1 or plate.subsample_size == plate.size:
                continue  # the other rows cannot change
            seen = np.unique(np.linspace(0, len(rows) - 1, _FEW).round().astype(int))
            # a minibatch of copies of one row, since rare values are in no other row
            alone, turned = (
                [self.at(values, {**first, plate.name: rows_of(x, 0)}) for x in others]
                for others in ([np.full(len(rows), rows[k]) for k in seen], [rows[::-1]])
            )
            for place, terms in before.terms.items():
                if place[1] != plate.name:
                    continue
                each = terms.reshape(self.target.parts, len(rows))
                now = [x.terms[place].reshape(each.shape) for x in alone]
                own = np.stack([x[:, k] for x, k in zip(now, seen, strict=True)], axis=1)
                back = turned[0].terms[place].reshape(each.shape)[:, ::-1]
                # a density that is itself random has its randomness by position in the minibatch
                is_random = _differ(each, again.terms[place].reshape(each.shape))
                if _differ(each[:, seen], own) or (_differ(each, back) and not is_random):
                    yield place

    def _unlike_rows(self, lengths: dict[str, int]) -> Iterator[dict[str, DrawnRows]]:
        """
        Yield sets of unlike rows, which show a dependence on other rows.

        They are evenly spaced, since the data may be sorted, and have the rows with the extremes of
        each column of an argument, which may be rare.
        """
        spread, extremes = {}, {}
        arguments = jax.tree.leaves((self.target.args, self.target.kwargs))
        for plate in self.plates:
            length = lengths[plate.name]
            last = length - 1 if needs_64_bits(plate.size) else plate.size - 1
            spread[plate.name] = np.linspace(0, last, length).round().astype(int)
            numbers: list[Any] = [np.zeros(0, int)]
            for x in arguments if self.target.shards is None else ():
                if isinstance(x, jax.Array) and x.ndim and len(x) == plate.size and x.size:
                    of = np.asarray(x) if in_host_memory(x) else x
                    columns = of.reshape(len(x), -1)[:, :_COLUMNS]
                    numbers += [np.asarray(columns.argmax(0)), np.asarray(columns.argmin(0))]
            extremes[plate.name] = np.unique(np.concatenate(numbers))
        half = {name: max(1, length // 2) for name, length in lengths.items()}
        sets = max((-(-len(x) // half[name]) for name, x in extremes.items()), default=1)
        for k in range(max(1, min(sets, _SETS))):
            rows = {name: x.copy() for name, x in spread.items()}
            for name, x in extremes.items():
                some = x[k * half[name] : (k + 1) * half[name]]
                rows[name][1::2][: len(some)] = some[: len(rows[name][1::2])]
            yield {name: rows_of(x, 0) for name, x in rows.items()}


def _first(lengths: dict[str, int]) -> dict[str, DrawnRows]:
    return {name: rows_of(np.arange(length), 0) for name, length in lengths.items()}


def _differ(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether many terms differ by more than rounding."""
    both = np.isfinite(x) & np.isfinite(y)
    if not both.any():
        return False
    x, y = x[both], y[both]
    usual = np.sqrt(np.mean(x**2))
    return bool(np.mean(np.abs(x - y) > _ROUNDING * (np.abs(x) + usual)) > _SHARE)


def _used_beyond(target: Target, z: Values, k: int, bad: BadRows) -> IndexedArray | None:
    """
    Return the ``k``-th index of the model in rows where it is beyond the ends of its array.

    It is None if another value there makes no difference.
    """
    rows = first_of(bad.among, _FEW)
    function = partial(_of_sites, target, z, random.key(0))
    (terms, *_), indexed = watched(function, rows)
    (others, *_), _ = watched(function, rows, elsewhere=True)
    pairs = zip(terms.values(), others.values(), strict=True)
    matters = any(not np.array_equal(x, y, equal_nan=True) for x, y in pairs)
    return indexed[k] if matters else None
