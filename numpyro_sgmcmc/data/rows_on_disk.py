# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Rows outside of device memory, from which a model reads its minibatches.

:class:`RowsOnDisk` wraps a file or any other source of rows. In a compiled program ``X[i]`` is a
call back to Python, which reads the rows ``i``. This works in every evaluation of a model. The
steps of a sampler do not wait for it: future minibatches are a function of the random key and the
number of the step. A kernel requests the minibatches of many steps at once (:func:`read_ahead`)
and announces its next request, which a thread reads in the meantime.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from glob import glob, has_magic
import hashlib
import math
from pathlib import Path
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.concatenated import Joined
from numpyro_sgmcmc.data.content_hash import (
    ContentHash,
    Hashing,
    Reader,
    is_unchanged,
    seen_as,
    seen_of,
)
from numpyro_sgmcmc.data.drawn_rows import DrawnRows, IndexedByRows
from numpyro_sgmcmc.data.sources import MOST_BYTES, Source, UnreadableRows
from numpyro_sgmcmc.data.tables import sources_of

#: Largest number of pending requests of a source: one or two for each chain on its own device.
_MOST_REQUESTS = 32


@jax.tree_util.register_static
class RowsOnDisk(IndexedByRows):
    """
    Array on disk, whose rows are read when a minibatch needs them.

    It is an argument of a model in the place of an array. The model indexes it by the indices of
    the plate.

    A minibatch of :math:`n` rows in random places takes :math:`n` small reads. With
    ``subsampling="blocks"`` of the kernel it has about ten stretches of neighbouring rows, which
    are read many times faster.

    :param source: the rows, shape :math:`(N, \\ldots)`, numbers or truth values. Values of 64 bits
        become 32 bits unless JAX has 64 bits enabled. A source is one of

        - the path of a ``.npy`` file;
        - a ``numpy.memmap``, which is read without being mapped, so that resident memory does not
          grow;
        - a dataset of HDF5 (``h5py``) or an array of Zarr;
        - a file of Parquet or Arrow, a folder of them, a data set that Hugging Face's
          ``save_to_disk`` has written, or a ``pyarrow.Table``, with ``columns``. This takes the
          package ``pyarrow``. A file is decoded once into a temporary file without a name, of which
          the environment variable ``TMPDIR`` sets the folder. It has the size of the chosen columns
          and disappears with the object;
        - any object with ``shape``, ``dtype`` and row indexing ``source[numbers]``;
        - for a data set in shards, a list of these sources or a pattern of files,
          ``"flights/X-*.npy"``, in the order of their names. The shards are one array, and row
          numbers go through all of them.

    :param columns: columns of a table that are the rows: a list of names, shape
        (N, columns); or one name, shape (N,), or (N, length) for a column of lists of one length.
        Several columns have one data type, in which integers and truth values among numbers of
        floating point are such numbers. Give codes of groups a ``RowsOnDisk`` of their own.
    :raises TypeError: if the source has no shape or data type.
    :raises ValueError: if its rows are not numbers, if values of a table are missing, if it has no
        such columns, or if shards differ in columns or data type.
    :raises UnreadableRows: if a file is missing, a folder, empty, cut off or not of the format of
        its name. On reading, if the source has changed or ends early, or if a row has entries that
        are NaN or infinite. The message names the file or row.

    The rows must not change while a run uses them. A kernel that tunes itself or has a control
    variate, and a :class:`~numpyro_sgmcmc.LongRun`, read all rows once in a process, so that
    other rows are never taken for these. Before the next run, a file with unchanged size, times
    and place on the disk counts as unchanged if four stretches of 8 MB are unchanged. Every test
    takes other stretches. A file that was copied, restored or touched is read again, and counts as
    unchanged if its rows are. A change during a run ends the run if the times of the file show it.
    Four kinds of changes are not noticed:

    - changes of rows that no tuning and no :class:`~numpyro_sgmcmc.LongRun` has read, during a
      plain run with a given step size;
    - changes outside of these stretches in a source that is neither a file nor in memory, such as
      an array of Zarr, as long as the same object wraps it;
    - changes of a file of a table, until the next run asks for them: a run goes on with the rows
      that were decoded;
    - changes in memory during a run. A memory map with ``mode="c"`` is an array in memory: its
      own values are read instead of the values of the file.

    **Example:**

    .. doctest::

        >>> import jax, numpy as np, tempfile
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGLD, RowsOnDisk

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", y.shape[0], subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> path = f"{tempfile.mkdtemp()}/y.npy"
        >>> np.save(path, 3 + np.random.default_rng(0).standard_normal(100_000, np.float32))
        >>> kernel = SGLD(model, step_size=1e-6, subsampling="blocks")
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), RowsOnDisk(path))
        >>> print(f"{mcmc.get_samples()['mu'].mean():.2f}")
        3.00
    """

    def __init__(self, source: Any, columns: str | Sequence[str] | None = None) -> None:
        #: the source and its columns as the user gave them
        self.given, self.columns = source, columns
        self._source = _opened(source, columns)
        #: the error of the latest rows that could not be read
        self.failure: UnreadableRows | None = None
        self._requests: OrderedDict[bytes, Future] = OrderedDict()
        self._seen: ContentHash | None = None
        self._hashing: Hashing | None = None
        dtype = np.dtype(self._source.dtype)
        if dtype.kind not in "biuf" or not self._source.shape or not self._source.shape[0]:
            raise ValueError(
                "`RowsOnDisk` needs at least one row of numbers or truth values; got"
                f" {self._source.name}, with dtype {dtype} and shape {tuple(self._source.shape)}."
                " Convert strings to codes first, `numpy.unique(x, return_inverse=True)[1]`."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all rows, :math:`(N, \\ldots)`."""
        return tuple(self._source.shape)

    @property
    def dtype(self) -> np.dtype:
        """The data type of the rows on the device."""
        return jax.dtypes.canonicalize_dtype(self._source.dtype.newbyteorder("="))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def shards(self) -> tuple[Source, ...]:
        """The shards of the source; a single file is one shard."""
        return self._source.shards

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """The number of rows of each shard."""
        return self._source.lengths

    @property
    def row_bytes(self) -> int:
        """The bytes of a row on the device."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def digest(self) -> str:
        """
        The digest of shape, type and present content of the rows.

        :raises UnreadableRows: if the rows cannot be read.
        """
        source, seen = self._source, self._seen
        if source.is_replaced:
            raise UnreadableRows(
                f"{source.name} has been replaced by another file since it was opened. Begin"
                " another run with a `RowsOnDisk` of the new file."
            )
        if seen is None or not self._are_as(seen):
            seen = self._seen = seen_of(*self._all, source.version())
        hasher = hashlib.blake2b(f"{self.shape}{self.dtype}".encode())
        hasher.update(seen.hashes.tobytes())
        return hasher.hexdigest()

    @contextmanager
    def hashed(self) -> Iterator[None]:
        """
        Hash the rows that are read within this context.

        If all rows are read in it, they need not be read again for the :attr:`digest`.
        """
        if self._seen is None:
            version = self._source.version()
            self._hashing = Hashing(len(self), self.row_bytes, version)
        try:
            yield
        finally:
            if self._hashing is not None:
                self._seen, self._hashing = self._hashing.seen, None

    def _are_as(self, seen: ContentHash) -> bool:
        """Return whether the rows are unchanged since a reading, by a test of some stretches."""
        known = seen.is_settled and seen.version == self._source.version()
        return known and not self._source.is_in_memory and is_unchanged(*self._all, seen)

    def know(self, hashes: np.ndarray) -> None:
        """Set the hashes of all rows to known ones."""
        self._seen = seen_as(self._source.version(), hashes)

    def is_as(self, other: "RowsOnDisk") -> bool:
        """
        Return whether these rows have the values that other rows had when they were read.

        The rows are read for it, unless both are in one file and the file is unchanged.
        """
        then, version = other._seen, self._source.version()
        if then is None:
            return False
        if then.is_settled and version is not None and then.version == version:
            return True
        now = self._seen = seen_of(*self._all, version)
        return np.array_equal(now.hashes, then.hashes)

    @property
    def seen(self) -> ContentHash | None:
        """The hashes of all rows, for another process, or None if they have no version."""
        return None if self._source.version() is None else self._seen

    def remember(self, seen: ContentHash | None) -> None:
        """Take over the hashes of another process if the version of the file agrees."""
        if seen is not None and seen.version == self._source.version():
            self._seen = seen

    @property
    def _all(self) -> tuple[Reader, int, int]:
        def read(first: int, end: int) -> np.ndarray:
            return self._checked(np.arange(first, end))

        return read, len(self), self.row_bytes

    def __repr__(self) -> str:
        return f"RowsOnDisk({self._source.name}, shape={self.shape}, dtype={self.dtype})"

    def rows(self, index: Any) -> Array:
        rows = np.arange(*index.indices(len(self))) if isinstance(index, slice) else index
        numbers = rows if isinstance(rows, jax.Array) else np.asarray(rows)
        if numbers.dtype.kind not in "iu":
            raise TypeError(
                f"{self!r} needs row numbers as an index, such as the indices of a plate; got"
                f" {index!r}."
            )
        if numbers.size * self.row_bytes > MOST_BYTES and not _is_traced(numbers):
            raise ValueError(
                f"{numbers.size:,} rows of {self!r} are {numbers.size * self.row_bytes:,} bytes,"
                " too many to read at once. Ask for fewer rows, `to_arviz(mcmc, rows=2_000)` or"
                " `X[:2_000]`."
            )
        if isinstance(numbers, jax.Array):
            return self.drawn(DrawnRows(numbers))
        return jnp.asarray(self.read(numbers))

    def drawn(self, rows: DrawnRows, part: Array | None = None) -> Array:
        """
        Return rows of a plate in a program, by a call back to Python.

        Under ``vmap`` one read serves all entries.

        :param part: number of this device if the rows are spread over devices, or None.
        """
        given, numbers = rows.on(part), rows.numbers
        shape = jax.ShapeDtypeStruct((*numbers.shape, *self.shape[1:]), self.dtype)
        if rows.high is None and part is None:
            return jax.pure_callback(self.read, shape, numbers, vmap_method="expand_dims")
        return jax.pure_callback(self._read_places, shape, given, vmap_method="expand_dims")

    def sampled(self, numbers: np.ndarray) -> Array:
        """Return some rows in the memory of the device."""
        return jnp.asarray(self.read(numbers))

    def _read_places(self, rows: DrawnRows) -> np.ndarray:
        return self.reader.read(self.places(rows))

    @property
    def is_whole(self) -> bool:
        """True if this process holds all rows."""
        return True

    def on_each(self, parts: Any) -> IndexedByRows:
        """Return the stand-in for these rows in the program of one of several devices."""
        return self

    @property
    def reader(self) -> "RowsOnDisk":
        """The holder of the rows that this process reads."""
        return self

    def places(self, rows: DrawnRows) -> np.ndarray:
        """Return the row numbers of a program as row numbers of the :attr:`reader`."""
        return rows.integers

    def __iter__(self) -> Iterator[Array]:
        raise TypeError(f"{self!r} cannot be iterated over. Index it, `X[i]`.")

    def read(self, numbers: Any) -> np.ndarray:
        """
        Read rows by their numbers.

        :param numbers: row numbers, any shape.
        :return: the rows, shape ``(*numbers.shape, ...)``.
        :raises UnreadableRows: if a row cannot be read.
        """
        numbers = np.asarray(numbers)
        flat = numbers.reshape(-1).astype(np.int64)
        try:
            rows = self._checked(flat)
        except UnreadableRows as error:
            self.failure = error
            raise
        if self._hashing is not None and np.all(np.diff(flat) == 1):
            self._hashing.add(int(flat[0]), rows)
        return rows.reshape(*numbers.shape, *self.shape[1:])

    def _checked(self, flat: np.ndarray) -> np.ndarray:
        outside = flat[(flat < 0) | (flat >= len(self))]
        if outside.size:
            raise UnreadableRows(f"{self!r} has no row {outside[0]:,}.")
        rows = np.empty((len(flat), *self.shape[1:]), self.dtype)
        each = max(1, MOST_BYTES // max(1, self.row_bytes))
        for k in range(0, len(flat), each):
            numbers, part = flat[k : k + each], rows[k : k + each]
            # integers of 64 bits are checked before they lose their upper halves
            read = np.empty(part.shape, self._whole) if self._whole is not None else part
            try:
                self._source.read_into(read, numbers)
            except UnreadableRows:
                raise
            except Exception as error:
                raise UnreadableRows(
                    f"Rows of {self._source.name} between {numbers.min():,} and"
                    f" {numbers.max():,} cannot be read: {type(error).__name__}: {error}"
                ) from error
            if self._whole is not None:
                self._refuse_large(numbers, read.reshape(len(read), -1))
                part[...] = read
            if part.dtype.kind == "f":
                with np.errstate(over="ignore", invalid="ignore"):
                    total = np.sum(part)
                if not np.isfinite(total):
                    self._refuse_nonfinite(numbers, part.reshape(len(part), -1))
        return rows

    @property
    def _whole(self) -> np.dtype | None:
        """The dtype of integers that JAX narrows to 32 bits, or None."""
        kept = np.dtype(self._source.dtype).newbyteorder("=")
        return kept if kept.kind in "iu" and kept.itemsize > self.dtype.itemsize else None

    def _refuse_large(self, numbers: np.ndarray, found: np.ndarray) -> None:
        """Raise ``UnreadableRows`` if integers do not fit into the dtype that JAX keeps."""
        limits = np.iinfo(self.dtype)
        where = np.argwhere((found < limits.min) | (found > limits.max))
        if len(where):
            row, column = where[0]
            raise UnreadableRows(
                f"Row {numbers[row]:,} of {self!r} has {found[row, column]:,}"
                f" {self._place(column)}. JAX keeps 32 bits, and would turn numbers beyond"
                f" {limits.max:,} into others. Call `numpyro.enable_x64()` before anything else,"
                " or store codes from 0."
            )

    def _place(self, position: Any) -> str:
        """Return a text about a position in a row, which may be a column with a name."""
        if self.columns is None or isinstance(self.columns, str):
            return f"at position {position}"
        return f"in column '{self.columns[position]}'"

    def _refuse_nonfinite(self, numbers: np.ndarray, found: np.ndarray) -> None:
        """Raise `UnreadableRows` if an entry is not finite, and not only the sum of all."""
        where = np.argwhere(~np.isfinite(found))
        if len(where):
            row, column = where[0]
            raise UnreadableRows(
                f"Row {numbers[row]:,} of {self!r} has {found[row, column]} {self._place(column)}."
                " Drop such rows; or put any finite value there, and mask the site with"
                " `numpyro.handlers.mask`."
            )

    def _read_in_run(self, numbers: np.ndarray) -> np.ndarray:
        """Read rows, and raise `UnreadableRows` if the source has changed during the run."""
        rows, seen, version = self.read(numbers), self._seen, self._source.version()
        if seen is None or version == seen.version:
            return rows
        now = seen_of(*self._all, version)
        if not np.array_equal(now.hashes, seen.hashes):
            self.failure = UnreadableRows(
                f"{self._source.name} has been edited since the run began, so that earlier and"
                " later draws would have different data. Begin another run with a new"
                " `RowsOnDisk`."
            )
            raise self.failure
        self._seen = now
        return rows

    def request(self, numbers: np.ndarray) -> Future:
        """Begin to read rows, or return the pending request for them."""
        key = numbers.tobytes()
        pending = self._requests.pop(key, None)
        if pending is None:
            pending = _readers().submit(self._read_in_run, numbers)
        self._requests[key] = pending
        while len(self._requests) > _MOST_REQUESTS:
            self._requests.popitem(last=False)
        return pending

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Return rows that :meth:`request` has read, or read them now."""
        try:
            return self.request(numbers).result()
        finally:
            self._requests.pop(numbers.tobytes(), None)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_requests": OrderedDict(), "_hashing": None}


def on_disk(arguments: Any) -> list[RowsOnDisk]:
    """Return the arguments of a model that are on disk."""
    leaves = jax.tree.leaves(arguments, is_leaf=_is_on_disk)
    return [leaf for leaf in leaves if _is_on_disk(leaf)]


def failure_of(arguments: Any, error: BaseException) -> UnreadableRows | None:
    """Return the error of unreadable rows that made a program fail, or None."""
    failures = [source.failure for source in on_disk(arguments)]
    # JAX repeats the text of an error raised in a call back
    return next((one for one in failures if one and str(one) in str(error)), None)


def replaced(arguments: Any, others: Sequence[Any]) -> Any:
    """Return the arguments with substitutes for the arguments :func:`on_disk`."""
    remaining = iter(others)
    return jax.tree.map(
        lambda leaf: next(remaining) if _is_on_disk(leaf) else leaf,
        arguments,
        is_leaf=_is_on_disk,
    )


def read_ahead(
    requests: Sequence[tuple[RowsOnDisk, DrawnRows, DrawnRows]],
) -> tuple[Array, ...]:
    """
    Read rows in one call back to Python, while a thread begins to read the next ones.

    :param requests: for each source the row numbers, and the row numbers of the next request.
    :return: the rows of each source, shape ``(*numbers.shape, ...)``.
    """
    sources = [source for source, _, _ in requests]

    def read(now: list[Any], following: list[Any]) -> list[np.ndarray]:
        wanted = [(x.reader, x.places(rows)) for x, rows in zip(sources, now, strict=True)]
        for reader, numbers in wanted:
            reader.request(numbers)
        values = [reader.take(numbers) for reader, numbers in wanted]
        for source, rows in zip(sources, following, strict=True):
            source.reader.request(source.places(rows))
        return values

    shapes = [
        jax.ShapeDtypeStruct((*rows.numbers.shape, *source.shape[1:]), source.dtype)
        for source, rows, _ in requests
    ]
    now, following = ([x[k] for x in requests] for k in (1, 2))
    return tuple(jax.pure_callback(read, shapes, now, following))


def _opened(source: Any, columns: str | Sequence[str] | None) -> Source:
    """
    Return the source of rows: a single one, or the shards of a pattern, a list or a folder.

    :raises UnreadableRows: if there are no shards.
    """
    is_list = isinstance(source, list | tuple)
    shards = source if is_list and not any(isinstance(x, float | int) for x in source) else None
    if isinstance(source, str | Path) and has_magic(str(source)) and not Path(source).exists():
        shards = sorted(glob(str(source), recursive=True))
    if shards is None:
        found = sources_of([source], columns)
        return found[0] if len(found) == 1 else Joined(found)
    if not shards:
        raise UnreadableRows(
            f"No file matches the pattern '{source}'."
            if isinstance(source, str | Path)
            else "The list of shards is empty."
        )
    return Joined(sources_of(shards, columns))


def _is_on_disk(leaf: Any) -> bool:
    return isinstance(leaf, RowsOnDisk)


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="rows on disk")
