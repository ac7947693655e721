# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Sources of rows on disk: files of arrays, and indexable objects."""

from abc import ABC, abstractmethod
from collections import deque
import errno
from itertools import repeat
import math
import mmap
import os
from pathlib import Path
import stat
from typing import Any
import weakref

import jax
import numpy as np

from numpyro_sgmcmc.data.content_hash import Version, version_of
from numpyro_sgmcmc.data.converters import is_sparse

#: Bytes that are read into one array at most: larger requests are for all rows.
MOST_BYTES = 2**31

#: Bytes below which a stretch of neighbouring rows is read into bytes of its own. This takes Python
#: less time than reading it into its place. For longer stretches the joining would take longer.
_SHORT_STRETCH = 2_048

#: First bytes of every ``.npy`` file.
_MAGIC = b"\x93NUMPY"

#: Bytes of a header that are compared; headers of arrays of numbers have 128.
_MOST_HEADER = 4_096

#: Number of places in a file that are tested for being in memory.
_ASKED = 16


_PUT_BACK = "Put the file back, or make a `RowsOnDisk` of its new path."

#: Largest number of files that stay open.
_MOST_OPEN = 128

#: Files that were opened last, the latest at the end.
_LAST_OPENED: "deque[weakref.ref[File]]" = deque()


class UnreadableRows(OSError):
    """Rows that cannot be read, or whose values cannot be data."""


class Source(ABC):
    """Interface of a source of rows."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    #: True if the rows are an array of this process, which can change without a trace
    is_in_memory = False
    #: True if the source may have new rows by now
    grows = False

    @property
    def shards(self) -> "tuple[Source, ...]":
        """The shards of the source, in order."""
        return (self,)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of rows of each shard."""
        return tuple(shard.shape[0] for shard in self.shards)

    def version(self) -> Version | None:
        """Return a version that changes with the rows, or None if the source has none."""
        return None

    @property
    def is_replaced(self) -> bool:
        """True if the name of the source now belongs to another file."""
        return False

    @abstractmethod
    def read_into(self, out: np.ndarray, numbers: np.ndarray) -> None:
        """
        Read rows into an array.

        :param out: destination of the rows, shape ``(n, ...)``, with the data type of the device.
        :param numbers: row numbers, in the order of the destination.
        """


def opened(source: Any) -> Source:
    """Return the source of an object, or raise ``TypeError`` if the object has no rows."""
    if isinstance(source, Source):
        return source
    if np.ma.is_masked(source):
        raise ValueError(
            f"The source is a masked array with {np.ma.count_masked(source):,} masked entries, and"
            " its mask would be lost. Fill it, `x.filled(0)`, and mask the site with"
            " `numpyro.handlers.mask`."
        )
    if is_sparse(source):
        raise TypeError(
            f"{type(source).__name__} is a sparse matrix, whose rows cannot be read. Give"
            " `.todense()`; or give the column numbers and the values of each row, padded, as two"
            " arrays of shape (N, k)."
        )
    if isinstance(source, str | Path):
        if not str(source).endswith(".npy"):
            raise ValueError(
                f"'{source}' is not a .npy, .parquet or .arrow file, nor a folder of tables. Open"
                " it, and give the array or table of the rows: `numpy.memmap(path, dtype, mode='r',"
                " shape=...)`, `h5py.File(path)['X']`, `zarr.open(path)['X']` or a table of"
                " `pyarrow`."
            )
        source = _mapped(source)
    is_file = isinstance(source, np.memmap) and source.filename and source.flags.c_contiguous
    # changes in a map of mode "c" are not in the file
    if is_file and source.mode != "c" and hasattr(os, "preadv"):
        return File(source)
    if not (hasattr(source, "shape") and hasattr(source, "dtype")):
        raise TypeError(
            f"{type(source).__name__} has no rows to read. Give an object with `shape`, `dtype`"
            " and row indexing, such as `numpy.memmap`, `h5py.Dataset` or `zarr.Array`."
        )
    return _Indexed(source)


def _mapped(path: str | Path) -> np.memmap:
    """Map a file, or raise ``UnreadableRows`` if it is not a whole ``.npy`` file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
            raise OSError(errno.EINVAL, "it is a folder, a pipe or a device")
        return np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        remedy = "Give the path of a .npy file that can be read."
        raise _unopened(f"'{path}'", error, remedy) from error
    except ValueError as error:
        cause = f"has {os.path.getsize(path):,} bytes and is not a complete .npy file of numbers"
        cause += f" ({error})"
        remedy = "Write it again with `numpy.save`."
    raise UnreadableRows(f"'{path}' {cause}. {remedy}")


def _unopened(name: str, error: OSError, remedy: str) -> UnreadableRows:
    """Return the error of a file that cannot be opened."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "Close other files, or raise the number that may be open, `ulimit -n`."
    return UnreadableRows(f"{name} cannot be opened ({error.strerror}). {remedy}")


class _Open:
    """Open file, which is closed when nothing refers to this object."""

    def __init__(self, path: str) -> None:
        # a name that now belongs to a pipe must not block
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def status(self) -> os.stat_result:
        return os.fstat(self.descriptor)


class File(Source):
    """
    Source of a memory map, read by position: mapped pages would count as resident memory.

    A process may have about a thousand open files, so that only the last opened ones stay open.
    """

    _open: _Open | None = None

    def __init__(self, mapped: np.memmap) -> None:
        self.path, self.shape, self.dtype = str(mapped.filename), mapped.shape, mapped.dtype
        self.name = f"'{self.path}'"
        self._row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        # a view of a map keeps the offset of the whole map
        whole = mapped._mmap  # type: ignore[attr-defined]
        first = np.frombuffer(whole, np.uint8).ctypes.data
        self._offset = mapped.ctypes.data - first
        self._offset += mapped.offset - mapped.offset % mmap.ALLOCATIONGRANULARITY
        self._found = self._status()
        self._bytes = self._found.st_size
        header = os.pread(self._opened().descriptor, min(mapped.offset, _MOST_HEADER), 0)
        self._header = header if header.startswith(_MAGIC) else b""

    def _status(self) -> os.stat_result:
        """Return the status of the open file, or else of the file with its name."""
        held = self._open
        try:
            return os.stat(self.path) if held is None else held.status
        except OSError as error:
            raise _unopened(self.name, error, _PUT_BACK) from error

    def _opened(self) -> _Open:
        """Open the file, or raise ``UnreadableRows`` if it is missing."""
        held = self._open
        if held is None:
            try:
                held = _Open(self.path)
            except OSError as error:
                raise _unopened(self.name, error, _PUT_BACK) from error
            if not os.path.samestat(held.status, self._found):
                raise self._replaced()
            self._open = held
            _LAST_OPENED.append(weakref.ref(self))
            while len(_LAST_OPENED) > _MOST_OPEN:
                if (other := _LAST_OPENED.popleft()()) is not None:
                    other._open = None  # closed after its last read
        return held

    def _replaced(self) -> UnreadableRows:
        return UnreadableRows(
            f"{self.name} has been replaced by another file since it was opened. Begin another run"
            " with a `RowsOnDisk` of the new file."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {k: x for k, x in self.__dict__.items() if k != "_open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._found = self._status()  # device and inode differ on another machine

    def version(self) -> Version:
        return version_of(self._status())

    @property
    def is_replaced(self) -> bool:
        try:
            return not os.path.samestat(self._found, os.stat(self.path))
        except OSError:  # a deleted file can still be read while it is open
            return False

    def _check(self, descriptor: int, first: int) -> None:
        """
        Check that an open file has its former size and header.

        :param int first: number of a requested row.
        :raises UnreadableRows: if size or header have changed since the file was opened.
        """
        size = os.fstat(descriptor).st_size
        header = os.pread(descriptor, len(self._header), 0)
        if header != self._header and size >= len(self._header):
            raise UnreadableRows(
                f"{self.name} has been rewritten since it was opened: its header was"
                f" {_described(self._header)} and is now {_described(header)}. Put the old file"
                " back, or begin another run with the new one."
            )
        if size != self._bytes:
            rows = max(0, size - self._offset) // self._row_bytes
            raise UnreadableRows(
                f"Row {first:,} of {self.name} cannot be read. The file had {self._bytes:,} bytes"
                f" when it was opened ({self.shape[0]:,} rows of {self._row_bytes:,} bytes), and"
                f" now has {size:,} bytes, the first {rows:,} rows. Put the old file back, or begin"
                " another run with the new one."
            )

    def read_into(self, out: np.ndarray, numbers: np.ndarray) -> None:
        held = self._opened()  # stays open here even if other threads open files
        descriptor = held.descriptor
        self._check(descriptor, numbers[0])
        starts = np.concatenate([[0], np.flatnonzero(np.diff(numbers) != 1) + 1])
        lengths = (np.diff(starts, append=len(numbers)) * self._row_bytes).tolist()
        places = (self._offset + numbers[starts] * self._row_bytes).tolist()
        if _is_elsewhere(descriptor, places):
            for place, length in zip(places, lengths, strict=True):
                os.posix_fadvise(descriptor, place, length, os.POSIX_FADV_WILLNEED)
        if sum(lengths) < _SHORT_STRETCH * len(lengths):
            parts = map(os.pread, repeat(descriptor), lengths, places)
            out[...] = np.frombuffer(b"".join(parts), self.dtype).reshape(out.shape)
            return
        values = out if out.dtype == self.dtype else np.empty(out.shape, self.dtype)
        buffer: Any = memoryview(values.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        begin = 0
        for length, place in zip(lengths, places, strict=True):
            end = begin + length
            while begin < end:
                count = os.preadv(descriptor, [buffer[begin:end]], place)
                if not count:
                    raise OSError("the file ends before them")
                begin, place = begin + count, place + count
        if values is not out:
            out[...] = values


def _is_elsewhere(descriptor: int, places: list[int]) -> bool:
    """Return whether some places are not in memory, so that the system can fetch them at once."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        for place in places[:: 1 + len(places) // _ASKED]:
            os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:  # some file systems do not support the question
        return False
    return False


class _Indexed(Source):
    """Source of any object that can be indexed by rows."""

    _bytes = 0

    def __init__(self, source: Any) -> None:
        self._held, self.shape, self.dtype = source, tuple(source.shape), np.dtype(source.dtype)
        file = getattr(getattr(source, "file", None), "filename", None)
        named = f"{source!r}" if file is None else f"{source!r} of '{file}'"
        self.name = f"an array of type {type(source).__name__}" if _is_in_memory(source) else named
        self.is_in_memory = _is_in_memory(source)
        self._file = source.filename if isinstance(source, np.memmap) else file
        self._bytes = self._file_bytes()
        # HDF5 and Zarr need increasing row numbers
        self._index = getattr(source, "oindex", source)

    def version(self) -> Version | None:
        if self.is_in_memory or self._file is None:
            return None
        try:
            return version_of(os.stat(self._file))
        except (OSError, TypeError, ValueError):  # not a file of the system
            return None

    def _file_bytes(self) -> int:
        """Return the size of the file of a map: reading a map beyond it would end the process."""
        if not (self.is_in_memory and self._file):
            return 0
        try:
            return os.stat(self._file).st_size
        except OSError:  # a deleted file does not change
            return self._bytes

    def read_into(self, out: np.ndarray, numbers: np.ndarray) -> None:
        if self.is_in_memory:
            if (now := self._file_bytes()) < self._bytes:
                raise UnreadableRows(
                    f"{self.name} is a map of '{self._file}', which had {self._bytes:,} bytes when"
                    f" it was opened and now has {now:,}. Put the old file back, or begin another"
                    " run with the new one."
                )
            out[...] = np.take(self._held, numbers, axis=0)
            return
        shape = tuple(self._held.shape)
        if self.grows and shape[0] > self.shape[0]:
            shape = self.shape[0], *shape[1:]
        if shape != self.shape or np.dtype(self._held.dtype) != self.dtype:
            raise UnreadableRows(
                f"{self.name} had shape {self.shape} and dtype {self.dtype} when it was opened,"
                f" and now has {tuple(self._held.shape)} and {self._held.dtype}. Put the old array"
                " back, or begin another run with the new one."
            )
        wanted, order = np.unique(numbers, return_inverse=True)
        if wanted[-1] - wanted[0] == len(wanted) - 1:  # a slice is much faster
            values = np.asarray(self._held[int(wanted[0]) : int(wanted[-1]) + 1])
        else:
            values = np.asarray(self._index[wanted])
        if values.shape != (len(wanted), *self.shape[1:]):
            raise UnreadableRows(
                f"{self.name} gave an array of shape {values.shape} for {len(wanted):,} rows"
                f" between {wanted[0]:,} and {wanted[-1]:,}, instead of"
                f" {(len(wanted), *self.shape[1:])}."
            )
        out[...] = values if len(values) == len(order) and _increases(numbers) else values[order]


def _described(header: bytes) -> str:
    """Return the content of the header of a ``.npy`` file as text."""
    return header[10:].decode("latin1").strip() if header.startswith(_MAGIC) else "of another kind"


def _is_in_memory(source: Any) -> bool:
    return isinstance(source, np.ndarray | jax.Array)


def _increases(numbers: np.ndarray) -> bool:
    return bool(np.all(np.diff(numbers) > 0))
