# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Where rows on disk come from: a file, something that can be indexed, a table."""

from abc import ABC, abstractmethod
from itertools import repeat
import math
import mmap
import os
from pathlib import Path
from typing import Any
import weakref

import jax
import numpy as np

from numpyro_sgmcmc.data.seen import Version, version_of

#: More bytes than this are not read into one array: whoever asks for them wants all the rows.
MOST_BYTES = 2**31

#: Stretches of neighbouring rows of fewer bytes are read into bytes of their own, which takes
#: Python less time than reading them into their places; joining longer ones would take longer.
_SHORT_STRETCH = 2_048

#: The beginning of every .npy file.
_MAGIC = b"\x93NUMPY"

#: Bytes of a header that are compared; those of numbers are 128 long.
_MOST_HEADER = 4_096

#: So many places in a file are asked whether they are in memory.
_ASKED = 16


class UnreadableRows(OSError):
    """Rows that cannot be read, or whose values cannot be data."""


class Source(ABC):
    """Where rows come from."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    #: whether the rows can change without a trace, since they are an array of this process
    is_in_memory = False
    #: whether there may be more of them by now
    grows = False

    @property
    def shards(self) -> "tuple[Source, ...]":
        """What it consists of, one after the other."""
        return (self,)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The rows of each shard."""
        return tuple(shard.shape[0] for shard in self.shards)

    def version(self) -> Version | None:
        """What is another one when the rows have changed, or None where nothing tells."""
        return None

    @property
    def is_replaced(self) -> bool:
        """Whether its name is that of another file by now."""
        return False

    @abstractmethod
    def read_into(self, found: np.ndarray, numbers: np.ndarray) -> None:
        """
        :param found: where to put the rows, shape ``(n, ...)``, of the data type of the device.
        :param numbers: their numbers, in this order.
        """


def opened(source: Any) -> Source:
    """
    :raises TypeError: if it has no rows.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, str | Path):
        if not str(source).endswith(".npy"):
            raise ValueError(
                f"'{source}' is not a .npy file: open it, and pass what has the rows, such as"
                " `numpy.memmap(path, dtype, mode='r', shape=...)`, `h5py.File(path)['X']`,"
                " `zarr.open(path)['X']` or a table of `pyarrow`."
            )
        source = _mapped(source)
    is_file = isinstance(source, np.memmap) and source.filename and source.flags.c_contiguous
    # what is changed in a map of mode "c" is not in the file
    if is_file and source.mode != "c" and hasattr(os, "preadv"):
        return _File(source)
    if hasattr(source, "column_names") and hasattr(source, "take"):
        return _Table(source)
    if not (hasattr(source, "shape") and hasattr(source, "dtype")):
        raise TypeError(
            f"{type(source).__name__} has no rows to read: it needs `shape`, `dtype` and row"
            " indexing, as `numpy.memmap`, `h5py.Dataset` and `zarr.Array` have them."
        )
    return _Indexed(source)


def _mapped(path: str | Path) -> np.memmap:
    """
    :raises UnreadableRows: if it is not a whole ``.npy`` file.
    """
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        cause = f"cannot be opened ({error.strerror})"
        remedy = "Give the path of a .npy file that can be read."
    except ValueError as error:
        cause = f"has {os.path.getsize(path):,} bytes and is not a whole .npy file of numbers"
        cause += f" ({error})"
        remedy = "Write it again with `numpy.save`."
    raise UnreadableRows(f"'{path}' {cause}. {remedy}")


class _File(Source):
    """A memory map, read by position: pages that are mapped would count as resident memory."""

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
        header = os.pread(self._descriptor, min(mapped.offset, _MOST_HEADER), 0)
        self._header = header if header.startswith(_MAGIC) else b""

    def _open(self) -> None:
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise UnreadableRows(
                f"{self.name} cannot be opened ({error.strerror}). Put the file back, or wrap it"
                " where it is now."
            ) from error
        weakref.finalize(self, os.close, self._descriptor)

    def __getstate__(self) -> dict[str, Any]:
        return {k: x for k, x in self.__dict__.items() if k != "_descriptor"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def version(self) -> Version:
        return version_of(os.fstat(self._descriptor))

    @property
    def is_replaced(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:  # what has no name any more can still be read
            return False

    def _check(self, first: int) -> None:
        """
        :param int first: a row that is wanted.
        :raises UnreadableRows: if the file has another size or header than when it was opened.
        """
        size = os.fstat(self._descriptor).st_size
        header = os.pread(self._descriptor, len(self._header), 0)
        if header != self._header and size >= len(self._header):
            raise UnreadableRows(
                f"{self.name} has been rewritten since it was opened: its header was"
                f" {_described(self._header)} and is {_described(header)}. Put the file back as it"
                " was, or begin another run with it."
            )
        if size != self._bytes:
            rows = max(0, size - self._offset) // self._row_bytes
            raise UnreadableRows(
                f"Row {first:,} of {self.name} is not read: the file had {self._bytes:,} bytes"
                f" when it was opened ({self.shape[0]:,} rows of {self._row_bytes:,}) and has"
                f" {size:,} now, the first {rows:,} rows. Put the file back as it was, or begin"
                " another run with it."
            )

    def read_into(self, found: np.ndarray, numbers: np.ndarray) -> None:
        self._check(numbers[0])
        starts = np.concatenate([[0], np.flatnonzero(np.diff(numbers) != 1) + 1])
        lengths = (np.diff(starts, append=len(numbers)) * self._row_bytes).tolist()
        places = (self._offset + numbers[starts] * self._row_bytes).tolist()
        if self._is_elsewhere(places):
            for place, length in zip(places, lengths, strict=True):
                os.posix_fadvise(self._descriptor, place, length, os.POSIX_FADV_WILLNEED)
        if sum(lengths) < _SHORT_STRETCH * len(lengths):
            parts = map(os.pread, repeat(self._descriptor), lengths, places)
            found[...] = np.frombuffer(b"".join(parts), self.dtype).reshape(found.shape)
            return
        values = found if found.dtype == self.dtype else np.empty(found.shape, self.dtype)
        buffer: Any = memoryview(values.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        begin = 0
        for length, place in zip(lengths, places, strict=True):
            end = begin + length
            while begin < end:
                count = os.preadv(self._descriptor, [buffer[begin:end]], place)
                if not count:
                    raise OSError("the file ends there")
                begin, place = begin + count, place + count
        if values is not found:
            found[...] = values

    def _is_elsewhere(self, places: list[int]) -> bool:
        """Whether some of these places are not in memory: the system can fetch them at once."""
        if not hasattr(os, "RWF_NOWAIT"):
            return False
        try:
            for place in places[:: 1 + len(places) // _ASKED]:
                os.preadv(self._descriptor, [bytearray(1)], place, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError:  # some file systems do not tell
            return False
        return False


class _Indexed(Source):
    """Anything that can be indexed by rows."""

    _bytes = 0

    def __init__(self, source: Any) -> None:
        self._held, self.shape, self.dtype = source, tuple(source.shape), np.dtype(source.dtype)
        file = getattr(getattr(source, "file", None), "filename", None)
        named = f"{source!r}" if file is None else f"{source!r} of '{file}'"
        self.name = f"an array of {type(source).__name__}" if _is_in_memory(source) else named
        self.is_in_memory = _is_in_memory(source)
        self._file = source.filename if isinstance(source, np.memmap) else file
        self._bytes = self._file_bytes()
        # HDF5 and Zarr want numbers that increase
        self._index = getattr(source, "oindex", source)

    def version(self) -> Version | None:
        if self.is_in_memory or self._file is None:
            return None
        try:
            return version_of(os.stat(self._file))
        except (OSError, TypeError, ValueError):  # not a file of the system
            return None

    def _file_bytes(self) -> int:
        """Of the file of a map; where it ends, a look at the map would end the process."""
        if not (self.is_in_memory and self._file):
            return 0
        try:
            return os.stat(self._file).st_size
        except OSError:  # what has no name any more stays what it is
            return self._bytes

    def read_into(self, found: np.ndarray, numbers: np.ndarray) -> None:
        if self.is_in_memory:
            if (now := self._file_bytes()) < self._bytes:
                raise UnreadableRows(
                    f"{self.name} is a map of '{self._file}', which had {self._bytes:,} bytes when"
                    f" it was opened and has {now:,} now. Put the file back as it was, or begin"
                    " another run with it."
                )
            found[...] = np.take(self._held, numbers, axis=0)
            return
        shape = tuple(self._held.shape)
        if self.grows and shape[0] > self.shape[0]:
            shape = self.shape[0], *shape[1:]
        if shape != self.shape or np.dtype(self._held.dtype) != self.dtype:
            raise UnreadableRows(
                f"{self.name} had shape {self.shape} and dtype {self.dtype} when it was opened and"
                f" has {tuple(self._held.shape)} and {self._held.dtype} now. Put it back as it was,"
                " or begin another run with it."
            )
        wanted, order = np.unique(numbers, return_inverse=True)
        if wanted[-1] - wanted[0] == len(wanted) - 1:  # a slice is much faster
            values = np.asarray(self._held[int(wanted[0]) : int(wanted[-1]) + 1])
        else:
            values = np.asarray(self._index[wanted])
        if values.shape != (len(wanted), *self.shape[1:]):
            raise UnreadableRows(
                f"{len(wanted):,} rows of {self.name}, between {wanted[0]:,} and {wanted[-1]:,},"
                f" came with shape {values.shape} instead of {(len(wanted), *self.shape[1:])}."
            )
        found[...] = values if len(values) == len(order) and _increases(numbers) else values[order]


class _Table(Source):
    """A table of Arrow, whose columns are numbers."""

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


def _described(header: bytes) -> str:
    """What a header of a ``.npy`` file says."""
    return header[10:].decode("latin1").strip() if header.startswith(_MAGIC) else "of another kind"


def _is_in_memory(source: Any) -> bool:
    return isinstance(source, np.ndarray | jax.Array)


def _increases(numbers: np.ndarray) -> bool:
    return bool(np.all(np.diff(numbers) > 0))
