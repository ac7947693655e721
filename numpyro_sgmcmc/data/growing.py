# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Rows that keep coming: padded arrays, and the number of their rows so far."""

from collections.abc import Callable, Iterator, Sequence
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.converters import array, positive, shown
from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.growing_on_disk import (
    PaddedArrayOnDisk,
    looked_at_again,
    without_rows,
)
from numpyro_sgmcmc.data.row_identity import RowIdentity, checksum, identity_of
from numpyro_sgmcmc.data.row_numbers import MOST_ROWS
from numpyro_sgmcmc.data.rows import Rows
from numpyro_sgmcmc.data.rows_on_disk import RowsOnDisk, UnreadableRows
from numpyro_sgmcmc.data.subsampling import Scheme

#: Smallest number of rows: with fewer the dependence between the drawn rows would show.
_FEWEST = 100

#: Shortest half-life: all rows together then count as the smallest number, ``1.44 * 70``.
_SHORTEST = 70

#: Smallest effective size of a minibatch where old rows are forgotten. No estimate knows the noise
#: of fewer rows.
FEWEST_COUNTED = 10

#: Capacity of an array as a multiple of its rows.
_ROOM = 2

#: Number of appends whose digests are kept. A run that knew the rows before one of these appends
#: does not read its old rows again.
_REMEMBERED = 64

#: Part of messages that names the arguments for other samplers.
_FOR_OTHERS = (
    "`*rows` are arguments for the kernels of `numpyro_sgmcmc` only. Give NUTS, `Predictive` and"
    " other samplers the present rows, `mcmc.run(rng_key, *rows.arrays)`."
)


class RowCount(NamedTuple):
    """
    Number of rows so far, and digests of the rows.

    - **rows** - number of rows :math:`N`, a scalar.
    - **counts** - numbers of first rows with a known digest, :math:`N` the last, shape (64,).
    - **digests** - digest of each of these numbers of first rows, shape (64, 2).
    - **half_life** - number of rows after which a row counts half, or None if no row is forgotten.
    """

    rows: Array
    counts: Array
    digests: Array
    half_life: Array | None = None

    @property
    def digest(self) -> Array:
        """The digest of all rows."""
        return self.digests[-1]

    def begins_with(self, rows: Array, digest: Array) -> Array:
        """Return whether the first ``rows`` rows have this digest."""
        return jnp.any((self.counts == rows) & jnp.all(self.digests == digest, axis=-1))

    def weights(self, numbers: Array, dtype: Any) -> Array:
        """Return the weights of rows by their numbers, :math:`2^{-(N - 1 - i) / H}`."""
        if self.half_life is None:
            return jnp.ones(jnp.shape(numbers), dtype)
        age = (self.rows - 1 - numbers).astype(dtype)
        return jnp.exp2(-age / self.half_life.astype(dtype))

    def counted(self, numbers: Array, dtype: Any, first: Array | int = 0) -> Array:
        """Return the weights of the present rows from ``first`` on, and 0 for all other numbers."""
        is_there = (numbers >= first) & (numbers < self.rows)
        return jnp.where(is_there, self.weights(numbers, dtype), 0)

    def worth(self, dtype: Any) -> Array:
        """Return the effective number of rows, :math:`\\sum_i 2^{-(N - 1 - i) / H}`."""
        if self.half_life is None:
            return self.rows.astype(dtype)
        rate = math.log(2) / self.half_life.astype(dtype)
        return jnp.expm1(-rate * self.rows.astype(dtype)) / jnp.expm1(-rate)


class RowsSoFar(Rows):
    """
    Rows that keep coming, in a plate with room for more.

    :param int size: number of rows that there is room for.
    :param int batch_size: number of rows of a minibatch.
    :param scheme: scheme that draws the rows.
    :param known: number of rows so far.
    :param dtype: data type of the weights.
    """

    is_interchangeable = False

    def __init__(
        self, size: int, batch_size: int, scheme: Scheme, known: RowCount, dtype: Any
    ) -> None:
        self.size, self.batch_size, self.scheme = size, batch_size, scheme
        self.known, self.dtype = known, dtype

    def draw(self, key: Array, step: Array) -> DrawnRows:
        count, size = self.known.rows, self.batch_size
        assert self.scheme.draw_so_far is not None
        # fewer rows than a minibatch are all drawn once; the remaining places get weight 0
        numbers = self.scheme.draw_so_far(key, step, jnp.maximum(count, size), size)
        is_there, numbers = numbers < count, jnp.minimum(numbers, count - 1)
        share = (jnp.maximum(count, size) / self.size).astype(self.dtype)
        weights = share * self.known.weights(numbers, self.dtype)
        return DrawnRows(numbers, weights=jnp.where(is_there, weights, 0))

    @property
    def factor(self) -> float:
        return float(self.scheme.factor(self.size, self.batch_size))

    @property
    def factor_so_far(self) -> Array:  # type: ignore[override]
        factor = self.scheme.factor(self.known.rows.astype(self.dtype), self.batch_size)
        return jnp.maximum(jnp.asarray(factor), 0)

    def counts(self, numbers: Array) -> Array:
        return self.known.counted(numbers, self.dtype)


class PaddedArray(NamedTuple):
    """
    Array with room for more rows, an argument of a model.

    - **values** - the rows, padded with copies of some rows, shape (capacity, ...).
    - **known** - number of rows so far.
    - **place** - number of this array in the holder.
    """

    values: Array | PaddedArrayOnDisk
    known: RowCount
    place: Array

    def on_host(self) -> Any:
        """Return the present rows, with no program compiled for their number."""
        return _on_host(self.values, int(self.known.rows))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"A `GrowingRows` is no array, and has no `{name}`. {_FOR_OTHERS}")

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int | slice):
            return tuple.__getitem__(self, index)
        raise TypeError(
            f"A `GrowingRows` is no array, and row numbers cannot index it. {_FOR_OTHERS}"
        )


class GrowingRows:
    """
    Rows that keep coming, for a posterior that goes on instead of starting anew.

    Unpacked, the arrays are arguments of a model, ``mcmc.run(rng_key, *rows)``. The model writes
    its plate as for arrays, ``numpyro.plate("rows", y.shape[0], subsample_size=...)``. After
    :meth:`append` or :meth:`remove` a run continued from ``mcmc.post_warmup_state`` samples exactly
    the posterior of all present rows. Minibatches are drawn from all rows. The control variate
    covers all rows, and reads the new rows once. The coordinates become narrower by
    :math:`\\sqrt{N / N'}` and move with the mode, and the chain moves with them.

    The number of rows is a variable of the compiled programs. Nothing is compiled again until the
    room is used up, which then doubles. This needs ``jit_model_args=True`` and a progress bar:
    without a bar NumPyro compiles its loop again for each run.

    :param arrays: arrays of NumPy or JAX, or :class:`RowsOnDisk`, with equal numbers of rows, at
        least 100. All rows on disk are read once.
    :param float half_life: number of rows :math:`H` after which a row counts half, at least 70. The
        posterior is then

        .. math:: p(\\theta) \\prod_{i=0}^{N-1} p(y_i \\mid \\theta)^{2^{-(N - 1 - i) / H}} ,

        the posterior of about :math:`1.44 H` rows, for parameters that drift. None forgets nothing.
        Rows older than ten half-lives count next to nothing, but are drawn as often as the others:
        ``remove`` them now and then. A minibatch must count as 10 rows.
    :raises ValueError: if the numbers of rows differ, are too small or too large, or if entries are
        not finite.
    :raises UnreadableRows: if rows on disk cannot be read, or are not finite.

    **Example:**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import CCAdL, GrowingRows

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", y.shape[0], subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (20_000,))
        >>> rows = GrowingRows(y[:10_000])
        >>> kernel = CCAdL(model, progress_bar=False)
        >>> mcmc = MCMC(
        ...     kernel, num_warmup=200, num_samples=2_000, progress_bar=False, jit_model_args=True
        ... )
        >>> mcmc.run(jax.random.key(1), *rows)
        >>> before = mcmc.get_samples()["mu"].std()

        >>> rows.append(y[10_000:])
        >>> mcmc.post_warmup_state = mcmc.last_state
        >>> mcmc.run(mcmc.last_state.rng_key, *rows)
        >>> mu = mcmc.get_samples()["mu"]
        >>> print(abs(mu.mean() - y.mean()) * 20_000**0.5 < 0.1)
        True
        >>> print(1.27 < before / mu.std() < 1.56)  # the root of 2, within 10 %
        True
    """

    def __init__(self, *arrays: Any, half_life: float | None = None) -> None:
        if not arrays:
            raise ValueError(
                "`GrowingRows` needs at least one array of rows, an argument of the model."
            )
        self.half_life = _checked_half_life(half_life)
        checked = _checked(arrays, None)
        self.count = len(checked[0])
        if self.count < _FEWEST:
            raise ValueError(
                f"`GrowingRows` needs at least {_FEWEST} rows to begin with; got {self.count}."
                " Wait for more rows, or sample these with NUTS."
            )
        self._arrays = tuple(_with_room(x, _capacity_for(self.count)) for x in checked)
        #: rows on disk at the latest look at their sources
        self._sources = [x if isinstance(x, RowsOnDisk) else None for x in checked]
        #: parts of the rows on disk as they came, each with the number of the array of its source,
        #: or None if it was appended
        self._parts: list[tuple[int | None, RowsOnDisk]] = [
            (k, x) for k, x in enumerate(self._sources) if x is not None
        ]
        self._remembered: list[RowIdentity] = []
        self._remember(identity_of(checked, self.half_life))

    def _on_host(self) -> list[Any]:
        return [_on_host(values, self.count) for values in self._arrays]

    def _remember(self, identity: RowIdentity) -> None:
        self._remembered = [*self._remembered, identity][-_REMEMBERED:]

    @property
    def identity(self) -> RowIdentity:
        """The identity of the rows: a hash of their contents."""
        return self._remembered[-1]

    def __len__(self) -> int:
        return self.count

    @property
    def capacity(self) -> int:
        """The number of rows that there is room for."""
        return self._arrays[0].shape[0]

    def __iter__(self) -> Iterator[PaddedArray]:
        known = known_by(self._remembered)
        return (PaddedArray(x, known, jnp.int32(k)) for k, x in enumerate(self._arrays))

    @property
    def arrays(self) -> tuple[Array | RowsOnDisk, ...]:
        """The present rows as arrays, for ``Predictive`` and other samplers."""
        return tuple(_first(values, self.count) for values in self._arrays)

    def append(self, *arrays: Any) -> None:
        """
        Append new rows to every array.

        :param arrays: new rows of each array, equally many, in the order of the arrays of the
            holder. For rows on disk, :class:`RowsOnDisk` of the new rows, which are read once.
        :raises ValueError: if a shape or type differs, or if entries are not finite. The rows stay
            unchanged then.
        :raises UnreadableRows: if rows on disk cannot be read, or are not finite. The rows stay
            unchanged then.
        """
        new = _checked(arrays, self._arrays)
        if len(new[0]):
            self._check_unchanged([part for _, part in self._parts])
            self._add(new, in_sources=False)

    def _add(self, found: list[Any], in_sources: bool) -> None:
        count = self.count + len(found[0])
        held = self._arrays
        if count > self.capacity:
            held = tuple(_with_room(x, _capacity_for(count)) for x in self.arrays)
        self._arrays = tuple(
            _appended(values, new, self.count) for values, new in zip(held, found, strict=True)
        )
        self.count = count
        for k, x in enumerate(found):
            if isinstance(x, RowsOnDisk):
                self._parts.append((k if in_sources else None, x))
        self._remember(self.identity.with_more(self._on_host()))
        for x, hashes in zip(self._arrays, self.identity.hashes, strict=True):
            if isinstance(x, PaddedArrayOnDisk):
                x.reader.know(hashes)

    def _check_unchanged(self, parts: Sequence[RowsOnDisk]) -> None:
        """Raise ``UnreadableRows`` if rows on disk have been edited since they were read."""
        for part in parts:
            if not part.is_as(part):
                raise UnreadableRows(
                    f"{part!r} has been edited since it was read. Make a new `GrowingRows`; a run"
                    " that continues with it reads all rows once."
                )

    def refresh(self) -> int:
        """
        Append the rows that have come to the sources on disk since the last look.

        New rows are new files of a pattern, ``RowsOnDisk("X-*.npy")``, whose names come after the
        known names, or new rows of an array of Zarr or HDF5.

        :return: the number of new rows.
        :raises ValueError: if an array is in memory, if one source has more new rows than another,
            if the known rows are no longer the first rows, or if their values have changed. The
            rows stay unchanged then. For this test files with unchanged size and times are not
            read, unless the times are of the last 40 seconds. Other files and arrays of Zarr are
            read.
        :raises UnreadableRows: if the new rows cannot be read, or are not finite.
        """
        in_memory = [k for k, x in enumerate(self._sources) if x is None]
        if in_memory:
            raise ValueError(
                f"Array {in_memory[0]} of the rows is in memory, where `refresh` finds no new"
                " rows. Add rows with `append`."
            )
        sources = [x for x in self._sources if x is not None]
        parts = [[part for j, part in self._parts if j == k] for k in range(len(sources))]
        looked = list(map(looked_at_again, sources, parts))
        lengths = [0 if new is None else len(new) for _, new in looked]
        if other := [k for k, length in enumerate(lengths) if length != lengths[0]]:
            raise ValueError(
                f"Array 0 has {lengths[0]:,} new rows, but array {other[0]} has"
                f" {lengths[other[0]]:,}. Wait until the files of all arrays are complete."
            )
        if lengths[0]:
            # parts within the sources have been compared already
            self._check_unchanged([part for k, part in self._parts if k is None])
            news = tuple(new for _, new in looked if new is not None)
            self._add(_checked(news, self._arrays), in_sources=True)
            self._sources = [now for now, _ in looked]
        return lengths[0]

    def remove(self, where: Any) -> None:
        """
        Remove rows.

        The sums over all rows are then computed again, by a pass over the rows.

        :param where: the rows to remove, truth values of shape ``(N,)``.
        :raises ValueError: if it has another shape or type, or leaves too few rows.
        """
        where = array("where", where)
        if where.dtype != bool or where.shape != (self.count,):
            raise ValueError(
                f"`remove` takes truth values for the {self.count:,} rows, shape ({self.count},);"
                f" got {where.dtype} of shape {where.shape}."
            )
        left = np.flatnonzero(~where)
        if len(left) < _FEWEST:
            raise ValueError(
                f"`remove` would leave {len(left)} rows, and a `GrowingRows` needs at least"
                f" {_FEWEST}. Remove fewer rows."
            )
        if len(left) < self.count:
            self._arrays = tuple(_left(values, self.count, left) for values in self._arrays)
            self.count, self._remembered = len(left), []
            self._remember(identity_of(self._on_host(), self.half_life))

    def __repr__(self) -> str:
        shapes = ", ".join(f"{x.dtype}{[self.count, *x.shape[1:]]}" for x in self._arrays)
        half_life = "" if self.half_life is None else f", half_life={self.half_life:g}"
        return f"GrowingRows({shapes}, room for {self.capacity:,}{half_life})"


def _checked(arrays: tuple, held: tuple | None) -> list[Any]:
    """
    Return arrays of rows after checks of their shapes, types and contents.

    :param held: the arrays to which the rows are to be added, or None.
    :raises ValueError: if the arrays cannot be rows, or do not fit the arrays of the holder.
    :raises UnreadableRows: if rows on disk cannot be read.
    """
    if held is not None and len(arrays) != len(held):
        raise ValueError(
            f"The `GrowingRows` has {len(held)} arrays; got {len(arrays)}. Give new rows for each"
            " array, in the same order."
        )
    for k, x in enumerate(arrays):
        if isinstance(x, np.ma.MaskedArray):
            raise ValueError(
                f"Array {k} of the rows is a masked array, and its mask would be lost. Leave"
                " masked rows out; or give the mask as another array, for"
                " `numpyro.handlers.mask(mask=...)` in the model."
            )
    rows = [x if isinstance(x, RowsOnDisk) else array("arrays", x) for x in arrays]
    for k, x in enumerate(rows):
        if x.dtype.kind not in "biuf" or not x.ndim:
            raise ValueError(
                f"Array {k} must have rows of numbers or truth values; got {x.dtype} of shape"
                f" {x.shape}."
            )
        if len(x) != len(rows[0]):
            raise ValueError(
                f"Array {k} has {len(x):,} rows, but array 0 has {len(rows[0]):,}. All arrays need"
                " equal numbers of rows."
            )
        if held is not None:
            _check_alike(k, x, held[k])
    for k, x in enumerate(rows):
        _check_content(k, x)
    return [x if isinstance(x, RowsOnDisk) else _as_kept(x) for x in rows]


def _as_kept(x: np.ndarray) -> np.ndarray:
    """Return the array in the data type that JAX keeps it in."""
    with np.errstate(over="ignore"):
        return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)


def _checked_half_life(half_life: Any) -> float | None:
    """Raise ``ValueError`` if a half-life is no number of rows, or too short."""
    if half_life is None:
        return None
    checked = positive("half_life", half_life)
    if not _SHORTEST <= checked <= MOST_ROWS:
        raise ValueError(
            f"`half_life` must be from {_SHORTEST} to {MOST_ROWS:,} rows, or None to forget"
            f" nothing; got {shown(half_life)}. With {_SHORTEST} all rows together count as"
            f" {_FEWEST}."
        )
    return float(np.float32(checked))


def _check_alike(k: int, x: Any, there: Any) -> None:
    """Raise ``ValueError`` if the shape or type of new rows differs from the present rows."""
    if isinstance(x, RowsOnDisk) != isinstance(there, RowsOnDisk):
        here, before = ("on disk", "in memory")[:: -1 if isinstance(there, RowsOnDisk) else 1]
        raise ValueError(
            f"New rows of array {k} are {here}, but its present rows are {before}. Append"
            f" {'`RowsOnDisk(...)`' if before == 'on disk' else 'arrays'}."
        )
    if x.shape[1:] != there.shape[1:]:
        raise ValueError(
            f"New rows of array {k} have shape {x.shape[1:]}, but its present rows have shape"
            f" {there.shape[1:]}."
        )
    if jax.dtypes.canonicalize_dtype(x.dtype) != there.dtype:
        raise ValueError(
            f"New rows of array {k} have dtype {x.dtype}, but its present rows have {there.dtype}."
            f" Convert them, `.astype({str(there.dtype)!r})`."
        )


def _check_content(k: int, x: Any) -> None:
    """
    Check that all entries of an array of rows are finite.

    :raises ValueError: if an entry is not finite, or has too many digits.
    :raises UnreadableRows: if rows on disk cannot be read, or are not finite.
    """
    if isinstance(x, RowsOnDisk):
        _ = x.digest  # reads and checks every row
        return
    kept = _as_kept(x)
    if not np.all(np.isfinite(kept)):
        where = tuple(np.argwhere(~np.isfinite(kept))[0])
        large = f" in {kept.dtype} (it is {x[where]})" if np.isfinite(x[where]) else ""
        raise ValueError(
            f"Row {where[0]:,} of array {k} has an entry that is not finite{large}. Leave such"
            " rows out; or put any finite value there, and mask the site with"
            " `numpyro.handlers.mask`."
        )
    if x.dtype.kind in "iu" and not np.array_equal(kept, x):
        raise ValueError(
            f"Array {k} has whole numbers that JAX would cut to 32 bits. Call"
            " `numpyro.enable_x64()` before anything else, or store codes from 0."
        )


def _capacity_for(count: int) -> int:
    """Raise ``ValueError`` if there are more rows than their numbers can count."""
    if count >= MOST_ROWS:
        raise ValueError(
            f"`GrowingRows` needs fewer than {MOST_ROWS:,} rows; got {count:,}. Begin a run with"
            " all of these rows as `RowsOnDisk`."
        )
    return min(_ROOM * count, MOST_ROWS)


def _with_room(rows: Any, capacity: int) -> Any:
    if isinstance(rows, RowsOnDisk):
        return PaddedArrayOnDisk(rows, capacity)
    # the padding must be real rows: a model may not be defined at zeros
    numbers = np.resize(np.arange(len(rows)), capacity)
    return jnp.asarray(rows)[numbers]


def _appended(values: Any, new: Any, first: int) -> Any:
    """Return a padded array with new rows written into its room."""
    if isinstance(values, PaddedArrayOnDisk):
        values.append(new)
        return values
    return _written(values, new, np.int32(first))


def _first(values: Any, count: int) -> Any:
    """Return the first rows of a padded array."""
    return values.first(count) if isinstance(values, PaddedArrayOnDisk) else values[:count]


def _on_host(values: Any, count: int) -> Any:
    """Return the first rows on the host, with no program compiled for their number."""
    return _first(values if isinstance(values, RowsOnDisk) else np.asarray(values), count)


def _left(values: Any, count: int, left: np.ndarray) -> Any:
    """Return a padded array with the remaining rows alone, with its room if it is in memory."""
    if isinstance(values, PaddedArrayOnDisk):
        return PaddedArrayOnDisk(without_rows(values.first(count), left), len(values))
    # the capacity stays, so that no program is compiled again
    return values[jnp.asarray(np.resize(left, len(values)))]


@jax.jit
def _written(values: Array, new: Array, first: Array) -> Array:
    start: list[Any] = [first, *(0,) * (new.ndim - 1)]
    return lax.dynamic_update_slice(values, new.astype(values.dtype), start)


def known_by(identities: Sequence[RowIdentity]) -> RowCount:
    """Return the number of rows of the last identity, with the digests of the ones before."""
    now = identities[-1]
    filled = [identities[0]] * (_REMEMBERED - len(identities)) + [*identities]
    half_life = None if now.half_life is None else jnp.asarray(now.half_life, jnp.float32)
    counts = jnp.asarray([one.rows for one in filled], jnp.int32)
    digests = jnp.asarray(np.stack([one.digest for one in filled]))
    return RowCount(counts[-1], counts, digests, half_life)


def row_count_of(arguments: Any) -> RowCount | None:
    """
    Return the number of rows so far of a model's arguments, or None if no argument is growing.

    The digests cover all arguments: the rows, the place of each array, and all other arguments, on
    which the log density of a row may depend.
    """
    growing = growing_in(arguments)
    if not growing:
        return None
    known, others = growing[0].known, jax.tree.leaves(replaced(lambda x: x.place, arguments))
    sums = [checksum(x, k) for k, x in enumerate(others) if not isinstance(x, str | None)]
    first = jnp.sum(jnp.stack(sums), dtype=jnp.uint32)
    return known._replace(digests=known.digests.at[:, 0].add(first))


def growing_in(arguments: Any) -> list[PaddedArray]:
    """Return the arguments of a model that are growing."""
    return [x for x in jax.tree.leaves(arguments, is_leaf=_is_growing) if _is_growing(x)]


def padded(arguments: Any) -> Any:
    """Return the arguments with padded arrays in the place of rows that keep coming."""
    return replaced(lambda x: x.values, arguments)


def trimmed(arguments: Any) -> Any:
    """
    Return the arguments with the present rows as arrays.

    :raises ValueError: if the arrays are of several holders.
    """
    if len({np.asarray(x.known.digest).tobytes() for x in growing_in(arguments)}) > 1:
        raise ValueError(
            "The model gets rows of several `GrowingRows`. Put all arrays that grow into one"
            " `GrowingRows`."
        )
    return replaced(lambda x: _first(x.values, int(x.known.rows)), arguments)


def replaced(function: Callable[[PaddedArray], Any], arguments: Any) -> Any:
    """Return the arguments with the result of a function in the place of rows that keep coming."""
    return jax.tree.map(
        lambda x: function(x) if _is_growing(x) else x, arguments, is_leaf=_is_growing
    )


def _is_growing(x: Any) -> bool:
    return isinstance(x, PaddedArray)
