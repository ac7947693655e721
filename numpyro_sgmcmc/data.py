# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Rows that live outside of device memory, of which a model sees those of its minibatch.

:class:`RowsOnDisk` wraps a file or whatever else has rows. In a compiled program ``X[i]`` is a
call back to Python, which reads the rows ``i``; that serves wherever a model is evaluated. The
steps of a sampler do not wait for it: the minibatches to come are a function of the random key
and the number of the step, and so a kernel asks for those of many steps at once
(:func:`read_ahead`) and says, while it works on them, which ones it will ask for next. A thread
reads these in the meantime.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property
import hashlib
from itertools import repeat
import math
import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol
import weakref

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

#: More bytes than this are not read into one array: whoever asks for them wants all the rows.
_MOST_BYTES = 2**31

#: Stretches of neighbouring rows of fewer bytes are read into bytes of their own, which takes
#: Python less time than reading them into their places; joining longer ones would take longer.
_SHORT_STRETCH = 2_048

#: Requests that are read ahead, of each source: one or two for each chain on its own device.
_MOST_REQUESTS = 32


class UnreadableRows(OSError):
    """Rows that cannot be read, or whose values cannot be data."""


@jax.tree_util.register_static
class RowsOnDisk:
    """
    An array whose rows stay where they are until a minibatch needs them: an argument of a model
    in the place of an array, which indexes it by the indices of the plate.

    Rows are read in the order of the minibatches: those of one step for each of thousands of
    neighbours on the disk, unless ``subsampling="clusters"`` of the kernel takes stretches of
    neighbouring rows, which is many times faster.

    :param source: a ``numpy.memmap``, which is read without being mapped, so that resident memory
        stays what it is; the path of a ``.npy`` file; a dataset of HDF5 (``h5py``), an array of
        Zarr, a table of Arrow (``pyarrow``, columns of numbers; of a Parquet file convert it to
        the Arrow IPC format first, which can be read by rows); or any object with ``shape``,
        ``dtype`` and row indexing ``source[numbers]``. Shape :math:`(N, \\ldots)`, of numbers or
        truth values; 64 bits become 32 unless JAX has them enabled.
    :raises TypeError: if the source has no shape or data type.
    :raises ValueError: if its rows are not numbers.
    :raises UnreadableRows: on reading, if the source has changed or ends early, or if a row has
        entries that are NaN or infinite; it says which.

    **Example:**

    .. doctest::

        >>> import jax, numpy as np, tempfile
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import CCAdL, RowsOnDisk

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", y.shape[0], subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> path = f"{tempfile.mkdtemp()}/y.npy"
        >>> np.save(path, 3 + np.random.default_rng(0).standard_normal(100_000, np.float32))
        >>> kernel = CCAdL(model, subsampling="clusters")
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), RowsOnDisk(path))
        >>> print(f"{mcmc.get_samples()['mu'].mean():.2f}")
        3.00
    """

    def __init__(self, source: Any) -> None:
        self._source = _opened(source)
        #: why the latest rows could not be read
        self.failure: UnreadableRows | None = None
        self._requests: OrderedDict[bytes, Future] = OrderedDict()
        found = np.dtype(self._source.dtype)
        if found.kind not in "biuf" or not self._source.shape or not self._source.shape[0]:
            raise ValueError(
                f"{self._source.name} has dtype {found} and shape {tuple(self._source.shape)}; rows"
                " must be numbers or truth values, and there must be some. Convert strings to"
                " numbers of categories before."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """:math:`(N, \\ldots)`."""
        return tuple(self._source.shape)

    @property
    def dtype(self) -> np.dtype:
        """Data type of the rows on the device."""
        return jax.dtypes.canonicalize_dtype(self._source.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the device."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @cached_property
    def digest(self) -> str:
        """Tells these rows from others: of their shape and the content of 64 of them."""
        some = np.unique(np.linspace(0, len(self) - 1, 64).astype(np.int64))
        found = hashlib.blake2b(f"{self.shape}{self.dtype}".encode())
        found.update(np.ascontiguousarray(self.read(some)).tobytes())
        return found.hexdigest()

    def __repr__(self) -> str:
        return f"RowsOnDisk({self._source.name}, shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, index: Any) -> Array:
        """Rows by their numbers, an array of whole numbers of any shape, a number or a slice."""
        rows, rest = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
        if isinstance(rows, slice):
            rows = np.arange(len(self))[rows]
        numbers = rows if isinstance(rows, jax.Array) else np.asarray(rows)
        if numbers.dtype.kind not in "iu":
            raise TypeError(
                f"{self!r} is indexed by numbers of rows, such as the indices of a plate; got"
                f" {index!r}."
            )
        if numbers.size * self.row_bytes > _MOST_BYTES and not _is_traced(numbers):
            raise ValueError(
                f"{numbers.size:,} rows of {self!r} are {numbers.size * self.row_bytes:,} bytes,"
                " which are not read at once. Ask for some of them, `to_arviz(mcmc, rows=2_000)`"
                " or `X[:2_000]`."
            )
        if isinstance(numbers, jax.Array):
            shape = jax.ShapeDtypeStruct((*numbers.shape, *self.shape[1:]), self.dtype)
            # one read for all that is mapped over
            values = jax.pure_callback(self.read, shape, numbers, vmap_method="expand_dims")
        else:
            values = jnp.asarray(self.read(numbers))
        return values[(slice(None),) * numbers.ndim + rest] if rest else values

    def __iter__(self) -> Iterator[Array]:
        raise TypeError(f"{self!r} is not read row by row: index it, `X[i]`.")

    def read(self, numbers: Any) -> np.ndarray:
        """
        :param numbers: numbers of rows, any shape.
        :return: the rows, shape ``(*numbers.shape, ...)``.
        :raises UnreadableRows: if one of them cannot be read.
        """
        numbers = np.asarray(numbers)
        try:
            found = self._checked(numbers.reshape(-1).astype(np.int64))
        except UnreadableRows as error:
            self.failure = error
            raise
        return found.reshape(*numbers.shape, *self.shape[1:])

    def _checked(self, flat: np.ndarray) -> np.ndarray:
        outside = flat[(flat < 0) | (flat >= len(self))]
        if outside.size:
            raise UnreadableRows(f"{self!r} has no row {outside[0]:,}.")
        found = np.empty((len(flat), *self.shape[1:]), self.dtype)
        each = max(1, self._source.most_bytes // max(1, self.row_bytes))
        for k in range(0, len(flat), each):
            numbers, part = flat[k : k + each], found[k : k + each]
            self._source.read_into(part, numbers)
            if part.dtype.kind == "f":
                with np.errstate(over="ignore", invalid="ignore"):
                    total = np.sum(part)
                if not np.isfinite(total):
                    self._refuse_nonfinite(numbers, part.reshape(len(part), -1))
        return found

    def _refuse_nonfinite(self, numbers: np.ndarray, found: np.ndarray) -> None:
        """
        :raises UnreadableRows: unless it was only the sum that was too large.
        """
        where = np.argwhere(~np.isfinite(found))
        if len(where):
            row, column = where[0]
            raise UnreadableRows(
                f"Row {numbers[row]:,} of {self!r} has {found[row, column]} at position {column}:"
                " drop such rows, or put any finite value there and mask the site with"
                " `numpyro.handlers.mask`."
            )

    def request(self, numbers: np.ndarray) -> Future:
        """Begins to read rows, or finds that it has been asked for them before."""
        key = numbers.tobytes()
        found = self._requests.pop(key, None)
        if found is None:
            found = _readers().submit(self.read, numbers)
        self._requests[key] = found
        while len(self._requests) > _MOST_REQUESTS:
            self._requests.popitem(last=False)
        return found

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Rows that were asked for by :meth:`request`, or are read now."""
        try:
            return self.request(numbers).result()
        finally:
            self._requests.pop(numbers.tobytes(), None)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_requests": OrderedDict()}


class ReadRows(NamedTuple):
    """
    Rows of a plate whose values have been read.

    - **numbers** - their numbers, shape (n,).
    - **values** - of each :class:`RowsOnDisk` of the plate its values, shape (n, ...).
    """

    numbers: Array
    values: tuple[Array, ...]


class OfMinibatch:
    """What a model sees in the place of :class:`RowsOnDisk` when its minibatch has been read."""

    def __init__(self, source: RowsOnDisk, numbers: Array, values: Array) -> None:
        self._source, self._numbers, self._values = source, numbers, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Array:
        rows, rest = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
        # other rows than those of the plate have not been read
        values = self._values if rows is self._numbers else self._source[rows]
        return values[(slice(None), *rest)] if rest else values


class Watched(OfMinibatch):
    """Remembers by what the model indexes it."""

    def __init__(self, source: RowsOnDisk) -> None:
        self._source = source
        self.indices: list[Any] = []

    def __getitem__(self, index: Any) -> Array:
        self.indices.append(index[0] if isinstance(index, tuple) else index)
        return self._source[index]


class ShapeOf(OfMinibatch):
    """Stands in where only shapes matter, so that nothing is read."""

    def __init__(self, source: RowsOnDisk) -> None:
        self._source = source

    def __getitem__(self, index: Any) -> Array:
        rows, rest = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
        values = jnp.zeros((*jnp.shape(rows), *self._source.shape[1:]), self._source.dtype)
        return values[(slice(None), *rest)] if rest else values


def on_disk(arguments: Any) -> list[RowsOnDisk]:
    """The arguments of a model that are on disk."""
    leaves = jax.tree.leaves(arguments, is_leaf=_is_on_disk)
    return [leaf for leaf in leaves if _is_on_disk(leaf)]


def failure_of(arguments: Any) -> UnreadableRows | None:
    """Why a program with these arguments has failed, if it was for rows that cannot be read."""
    return next((source.failure for source in on_disk(arguments) if source.failure), None)


def replaced(arguments: Any, others: Sequence[Any]) -> Any:
    """The arguments with others in the places of those :func:`on_disk`."""
    remaining = iter(others)
    return jax.tree.map(
        lambda leaf: next(remaining) if _is_on_disk(leaf) else leaf,
        arguments,
        is_leaf=_is_on_disk,
    )


def read_ahead(
    requests: Sequence[tuple[RowsOnDisk, Array, Array]],
) -> tuple[Array, ...]:
    """
    Reads rows in one call back to Python, while a thread begins to read those that will be asked
    for next.

    :param requests: for each source the numbers of the rows, and of those that follow.
    :return: the rows of each source, shape ``(*numbers.shape, ...)``.
    """
    sources = [source for source, _, _ in requests]

    def read(now: list[Any], following: list[Any]) -> list[np.ndarray]:
        wanted = [np.asarray(x) for x in now]
        for source, numbers in zip(sources, wanted, strict=True):
            source.request(numbers)
        for source, numbers in zip(sources, following, strict=True):
            source.request(np.asarray(numbers))
        return [source.take(numbers) for source, numbers in zip(sources, wanted, strict=True)]

    shapes = [
        jax.ShapeDtypeStruct((*numbers.shape, *source.shape[1:]), source.dtype)
        for source, numbers, _ in requests
    ]
    now, following = ([x[k] for x in requests] for k in (1, 2))
    return tuple(jax.pure_callback(read, shapes, now, following))


def _is_on_disk(leaf: Any) -> bool:
    return isinstance(leaf, RowsOnDisk)


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="rows on disk")


class _Source(Protocol):
    """Where rows come from."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    #: what is best read at once, in bytes
    most_bytes: int

    def read_into(self, found: np.ndarray, numbers: np.ndarray) -> None:
        """
        :param found: where to put the rows, shape ``(n, ...)``, of the data type of the device.
        :param numbers: their numbers, in this order.
        """


def _opened(source: Any) -> _Source:
    """
    :raises TypeError: if it has no rows.
    """
    if isinstance(source, str | Path):
        if not str(source).endswith(".npy"):
            raise ValueError(
                f"'{source}' is not a .npy file: open it, and pass what has the rows, such as"
                " `numpy.memmap(path, dtype, mode='r', shape=...)`, `h5py.File(path)['X']`,"
                " `zarr.open(path)['X']` or a table of `pyarrow`."
            )
        source = np.load(source, mmap_mode="r")
    if isinstance(source, np.memmap) and source.filename and source.flags.c_contiguous:
        return _File(source)
    if hasattr(source, "column_names") and hasattr(source, "take"):
        return _Table(source)
    if not (hasattr(source, "shape") and hasattr(source, "dtype")):
        raise TypeError(
            f"{type(source).__name__} has no rows to read: it needs `shape`, `dtype` and row"
            " indexing, as `numpy.memmap`, `h5py.Dataset` and `zarr.Array` have them."
        )
    return _Indexed(source)


class _File:
    """A memory map, read by position: pages that are mapped would count as resident memory."""

    #: so that what is read is still in the cache of the processor when it is checked
    most_bytes = 2**18

    def __init__(self, mapped: np.memmap) -> None:
        self.path, self.shape, self.dtype = str(mapped.filename), mapped.shape, mapped.dtype
        self.name = f"'{self.path}'"
        self._row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        # a view of a map remembers the offset of the whole of it
        whole = mapped._mmap  # type: ignore[attr-defined]
        first = np.frombuffer(whole, np.uint8).ctypes.data
        self._offset = mapped.ctypes.data - first
        self._offset += mapped.offset - mapped.offset % mmap.ALLOCATIONGRANULARITY
        self._open()
        self._bytes = os.fstat(self._descriptor).st_size

    def _open(self) -> None:
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise UnreadableRows(f"{self.name} cannot be opened: {error.strerror}.") from error
        weakref.finalize(self, os.close, self._descriptor)

    def __getstate__(self) -> dict[str, Any]:
        return {k: x for k, x in self.__dict__.items() if k != "_descriptor"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def read_into(self, found: np.ndarray, numbers: np.ndarray) -> None:
        size = os.fstat(self._descriptor).st_size
        if size != self._bytes:
            rows = max(0, size - self._offset) // self._row_bytes
            raise UnreadableRows(
                f"Row {numbers[0]:,} of {self.name} is not read: the file had {self._bytes:,} bytes"
                f" when it was opened ({self.shape[0]:,} rows of {self._row_bytes:,}) and has"
                f" {size:,} now, the first {rows:,} rows. Put the file back as it was, or begin"
                " another run with it."
            )
        starts = np.concatenate([[0], np.flatnonzero(np.diff(numbers) != 1) + 1])
        lengths = np.diff(starts, append=len(numbers)) * self._row_bytes
        places = (self._offset + numbers[starts] * self._row_bytes).tolist()
        try:
            if lengths.mean() < _SHORT_STRETCH:
                parts = map(os.pread, repeat(self._descriptor), lengths.tolist(), places)
                found[...] = np.frombuffer(b"".join(parts), self.dtype).reshape(found.shape)
                return
            values = found if found.dtype == self.dtype else np.empty(found.shape, self.dtype)
            buffer: Any = memoryview(values.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
            for start, length, place in zip(starts, lengths, places, strict=True):
                done, begin = 0, start * self._row_bytes
                while done < length:
                    part = buffer[begin + done : begin + length]
                    count = os.preadv(self._descriptor, [part], place + done)
                    if not count:
                        raise OSError("the file ends there")
                    done += count
            if values is not found:
                found[...] = values
        except (OSError, ValueError) as error:
            raise UnreadableRows(
                f"Rows of {self.name} between {numbers.min():,} and {numbers.max():,} cannot be"
                f" read: {error}."
            ) from error


class _Indexed:
    """Anything that can be indexed by rows."""

    most_bytes = _MOST_BYTES

    def __init__(self, source: Any) -> None:
        self._held, self.shape, self.dtype = source, tuple(source.shape), np.dtype(source.dtype)
        file = getattr(getattr(source, "file", None), "filename", None)
        named = f"{source!r}" if file is None else f"{source!r} of '{file}'"
        self.name = f"an array of {type(source).__name__}" if _is_in_memory(source) else named
        # HDF5 and Zarr want numbers that increase
        self._index = getattr(source, "oindex", source)

    def read_into(self, found: np.ndarray, numbers: np.ndarray) -> None:
        found[...] = self._read(numbers)

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        if _is_in_memory(self._held):
            return np.take(self._held, numbers, axis=0)
        if tuple(self._held.shape) != self.shape or np.dtype(self._held.dtype) != self.dtype:
            raise UnreadableRows(
                f"{self.name} had shape {self.shape} and dtype {self.dtype} when it was opened and"
                f" has {tuple(self._held.shape)} and {self._held.dtype} now. Put it back as it was,"
                " or begin another run with it."
            )
        wanted, order = np.unique(numbers, return_inverse=True)
        try:
            if wanted[-1] - wanted[0] == len(wanted) - 1:  # a slice is much faster
                found = np.asarray(self._held[int(wanted[0]) : int(wanted[-1]) + 1])
            else:
                found = np.asarray(self._index[wanted])
        except Exception as error:
            raise UnreadableRows(
                f"Rows of {self.name} between {wanted[0]:,} and {wanted[-1]:,} cannot be read:"
                f" {type(error).__name__}: {error}"
            ) from error
        if found.shape != (len(wanted), *self.shape[1:]):
            raise UnreadableRows(
                f"{len(wanted):,} rows of {self.name}, between {wanted[0]:,} and {wanted[-1]:,},"
                f" came with shape {found.shape} instead of {(len(wanted), *self.shape[1:])}."
            )
        return found if len(wanted) == len(numbers) and _increases(numbers) else found[order]


class _Table:
    """A table of Arrow, whose columns are numbers."""

    most_bytes = _MOST_BYTES

    def __init__(self, table: Any) -> None:
        self._table = table
        self.shape: tuple[int, ...] = (table.num_rows, table.num_columns)
        kinds = [column.type.to_pandas_dtype() for column in table.columns]
        self.dtype = np.result_type(*kinds)
        self.name = f"a table of columns {', '.join(table.column_names)}"
        if missing := [
            n for n, c in zip(table.column_names, table.columns, strict=True) if c.null_count
        ]:
            raise ValueError(
                f"Column '{missing[0]}' of {self.name} has missing values: fill or drop them."
            )

    def read_into(self, found: np.ndarray, numbers: np.ndarray) -> None:
        if numbers[-1] - numbers[0] == len(numbers) - 1 and _increases(numbers):
            part = self._table.slice(int(numbers[0]), len(numbers))
        else:
            part = self._table.take(numbers)
        for k, column in enumerate(part.columns):
            found[:, k] = column


def _is_in_memory(source: Any) -> bool:
    return isinstance(source, np.ndarray | jax.Array)


def _increases(numbers: np.ndarray) -> bool:
    return bool(np.all(np.diff(numbers) > 0))
