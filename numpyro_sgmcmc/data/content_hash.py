# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Content hashes of rows, which detect changes mostly without a second reading.

All rows are read once, in stretches of 8 MB, and the hash of each stretch is kept. Later, a file
with unchanged size, times and place on the disk counts as unchanged if the hashes of a few
stretches agree. Every test takes other stretches. A file that was copied, restored or touched is
read again as a whole, since only the content counts.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import hashlib
import os
from threading import Lock
import time
from typing import Any, NamedTuple

from jax.experimental.multihost_utils import process_allgather
import numpy as np

#: Bytes of a stretch, and the number of stretches compared in a test. Smaller files are compared
#: whole.
_STRETCH_BYTES, _LOOKED_AT = 2**23, 4

#: Nanoseconds after which a change shows in the times of a file: writes through a memory map to
#: a page that waits for the disk, up to half a minute, do not show.
_SETTLED = 40 * 10**9

#: Function that reads the rows from a first number up to an end.
Reader = Callable[[int, int], np.ndarray]


def of_all_processes(digest: np.ndarray) -> np.ndarray:
    """Return the digests of all processes, which have to ask for them together."""
    # this thread may be tracing a program, and JAX refuses communication while it does
    with ThreadPoolExecutor(1) as outside:
        return np.asarray(outside.submit(process_allgather, digest).result())


class Version(NamedTuple):
    """
    Version of a file: the numbers of the file system that change with its content.

    - **inode** - number of the file on the disk.
    - **size** - size in bytes.
    - **modified** - time of the last change of the content, in nanoseconds.
    - **changed** - time of the last change of content or status, which no user can set.
    """

    inode: int
    size: int
    modified: int
    changed: int


class ContentHash(NamedTuple):
    """
    Hashes of rows that have been read, with the version of their file.

    - **version** - version of the file before the reading, or None if the source has no version.
    - **is_settled** - whether every later change shows in the version.
    - **hashes** - hash of each stretch, shape (stretches, 16).
    """

    version: Version | None
    is_settled: bool
    hashes: np.ndarray


def version_of(status: os.stat_result) -> Version:
    return Version(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Hashing:
    """
    Accumulator of the hashes of rows that are read for another purpose.

    Stretches come in order or, from several threads, several at once.

    :param int rows: number of rows.
    :param int row_bytes: bytes of a row.
    :param version: version of the file before the reading.
    """

    def __init__(self, rows: int, row_bytes: int, version: Version | None) -> None:
        self._rows, self._each = rows, _rows_of_stretch(row_bytes)
        self._version, self._is_settled = version, _is_settled(version)
        self._begun: dict[int, tuple[int, Any]] = {}
        self._found: dict[int, bytes] = {}
        self._lock = Lock()

    def add(self, first: int, values: np.ndarray) -> None:
        """Add neighbouring rows; only rows that continue a known stretch count."""
        with self._lock:
            for k in range(first // self._each, (first + len(values) - 1) // self._each + 1):
                begin, end = k * self._each, min((k + 1) * self._each, self._rows)
                following, hasher = self._begun.get(k, (begin, None))
                last = min(first + len(values), end)
                if k in self._found or not first <= following < last:
                    continue
                hasher = hashlib.blake2b(digest_size=16) if hasher is None else hasher
                hasher.update(_bytes_of(values[following - first : last - first]))
                self._begun[k] = last, hasher
                if last == end:
                    self._found[k] = self._begun.pop(k)[1].digest()

    @property
    def seen(self) -> ContentHash | None:
        """The hashes of all rows, or None if some were not read."""
        count = -(-self._rows // self._each)
        if len(self._found) < count:
            return None
        hashes = b"".join(self._found[k] for k in range(count))
        return ContentHash(self._version, self._is_settled, _as_rows(hashes))


def seen_of(read: Reader, rows: int, row_bytes: int, version: Version | None) -> ContentHash:
    """
    Read all rows and return their hashes.

    :param read: function that reads rows.
    :param int rows: number of rows.
    :param int row_bytes: bytes of a row.
    :param version: version of the file before the reading.
    """
    is_settled = _is_settled(version)
    return ContentHash(version, is_settled, hashes_from(read, 0, rows, row_bytes)[1])


def seen_as(version: Version | None, hashes: np.ndarray) -> ContentHash:
    """Return the record of rows whose hashes are known."""
    return ContentHash(version, _is_settled(version), hashes)


def hashes_from(read: Reader, first: int, rows: int, row_bytes: int) -> tuple[int, np.ndarray]:
    """
    Return the hashes of the stretches from a first row on, as in :class:`ContentHash`.

    :return: the number of the first stretch, and the hash of each stretch.
    """
    each = _rows_of_stretch(row_bytes)
    stretches = range(first // each, -(-rows // each))
    with ThreadPoolExecutor(2) as pool:
        hashes = list(pool.map(lambda k: _hash(read, k, each, rows), stretches))
    return stretches.start, _as_rows(b"".join(hashes))


def first_difference(here: np.ndarray, there: np.ndarray, row_bytes: int) -> int:
    """Return the first row of the first stretch whose hash differs."""
    length = min(len(here), len(there))
    differs = np.any(here[:length] != there[:length], axis=1)
    return int(np.argmax(np.append(differs, True))) * _rows_of_stretch(row_bytes)


def is_unchanged(read: Reader, rows: int, row_bytes: int, seen: ContentHash) -> bool:
    """Return whether a few stretches have their former hashes; each call takes other stretches."""
    each = _rows_of_stretch(row_bytes)
    count = len(seen.hashes)
    some = np.random.default_rng().choice(count, min(count, _LOOKED_AT), replace=False)
    return all(_hash(read, int(k), each, rows) == seen.hashes[k].tobytes() for k in some)


def _is_settled(version: Version | None) -> bool:
    # a source without times counts as settled at once
    since = 0 if version is None else max(version.modified, version.changed)
    return time.time_ns() - since > _SETTLED


def _as_rows(hashes: bytes) -> np.ndarray:
    return np.frombuffer(hashes, np.uint8).reshape(-1, 16)


def _bytes_of(values: np.ndarray) -> Any:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _rows_of_stretch(row_bytes: int) -> int:
    return max(1, _STRETCH_BYTES // max(1, row_bytes))


def _hash(read: Reader, stretch: int, each: int, rows: int) -> bytes:
    values = read(stretch * each, min(rows, (stretch + 1) * each))
    return hashlib.blake2b(_bytes_of(values), digest_size=16).digest()
