# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Whether rows are still those that were read, which mostly need not be read again for it.

All rows are read once, in stretches of 8 MB, and of each stretch a hash is kept. Later, a file
whose size, times and place on the disk are the same is taken for the same if a few stretches are,
other ones each time. Whatever has been copied, restored or touched is read again as a whole: what
counts is what the rows are.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import hashlib
import os
from threading import Lock
import time
from typing import Any, NamedTuple

import numpy as np

#: Bytes of a stretch, and how many of them are looked at; where there are no more, it is all.
_STRETCH_BYTES, _LOOKED_AT = 2**23, 4

#: Nanoseconds after which a change shows in the times of a file: writes through a memory map to
#: a page that waits for the disk, up to half a minute, do not show.
_SETTLED = 40 * 10**9

#: Rows from a first one up to another.
Reader = Callable[[int, int], np.ndarray]


class Version(NamedTuple):
    """
    What changes with a file.

    - **inode** - its number on the disk.
    - **size** - in bytes.
    - **modified** - when its content changed, in nanoseconds.
    - **changed** - when something about it changed, which nobody can set.
    """

    inode: int
    size: int
    modified: int
    changed: int


class ContentHash(NamedTuple):
    """
    What is kept of rows that have been read.

    - **version** - of their file before that, or None where nothing tells.
    - **is_settled** - whether every later change shows in the version.
    - **hashes** - of each stretch, shape (stretches, 16).
    """

    version: Version | None
    is_settled: bool
    hashes: np.ndarray


def version_of(status: os.stat_result) -> Version:
    return Version(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Hashing:
    """
    The hashes of rows that are read for another reason, one stretch after the other or, from
    several threads, several at once.

    :param int rows: how many there are.
    :param int row_bytes: bytes of a row.
    :param version: of their file, found before.
    """

    def __init__(self, rows: int, row_bytes: int, version: Version | None) -> None:
        self._rows, self._each = rows, _rows_of_stretch(row_bytes)
        self._version, self._is_settled = version, _is_settled(version)
        self._begun: dict[int, tuple[int, Any]] = {}
        self._found: dict[int, bytes] = {}
        self._lock = Lock()

    def add(self, first: int, values: np.ndarray) -> None:
        """Neighbouring rows, of which those that follow what is known already count."""
        with self._lock:
            for k in range(first // self._each, (first + len(values) - 1) // self._each + 1):
                begin, end = k * self._each, min((k + 1) * self._each, self._rows)
                following, found = self._begun.get(k, (begin, None))
                last = min(first + len(values), end)
                if k in self._found or not first <= following < last:
                    continue
                found = hashlib.blake2b(digest_size=16) if found is None else found
                found.update(_bytes_of(values[following - first : last - first]))
                self._begun[k] = last, found
                if last == end:
                    self._found[k] = self._begun.pop(k)[1].digest()

    @property
    def seen(self) -> ContentHash | None:
        """What is kept of the rows; None if some were not read."""
        count = -(-self._rows // self._each)
        if len(self._found) < count:
            return None
        hashes = b"".join(self._found[k] for k in range(count))
        return ContentHash(self._version, self._is_settled, _as_rows(hashes))


def seen_of(read: Reader, rows: int, row_bytes: int, version: Version | None) -> ContentHash:
    """
    Reads all rows.

    :param read: how.
    :param int rows: how many there are.
    :param int row_bytes: bytes of a row.
    :param version: of the file, found before.
    """
    is_settled = _is_settled(version)
    return ContentHash(version, is_settled, hashes_from(read, 0, rows, row_bytes)[1])


def seen_as(version: Version | None, hashes: np.ndarray) -> ContentHash:
    """The same of rows whose hashes are known."""
    return ContentHash(version, _is_settled(version), hashes)


def hashes_from(read: Reader, first: int, rows: int, row_bytes: int) -> tuple[int, np.ndarray]:
    """
    Hashes of the stretches that rows from this one on are in, as :class:`ContentHash` has them.

    :return: the number of the first stretch, and the hash of each.
    """
    each = _rows_of_stretch(row_bytes)
    stretches = range(first // each, -(-rows // each))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda k: _hash(read, k, each, rows), stretches))
    return stretches.start, _as_rows(b"".join(found))


def first_difference(here: np.ndarray, there: np.ndarray, row_bytes: int) -> int:
    """The first row of the first stretch whose hash is another one."""
    length = min(len(here), len(there))
    differs = np.any(here[:length] != there[:length], axis=1)
    return int(np.argmax(np.append(differs, True))) * _rows_of_stretch(row_bytes)


def is_unchanged(read: Reader, rows: int, row_bytes: int, seen: ContentHash) -> bool:
    """Whether a few stretches are, each time other ones."""
    each = _rows_of_stretch(row_bytes)
    count = len(seen.hashes)
    some = np.random.default_rng().choice(count, min(count, _LOOKED_AT), replace=False)
    return all(_hash(read, int(k), each, rows) == seen.hashes[k].tobytes() for k in some)


def _is_settled(version: Version | None) -> bool:
    # of what has no times there is nothing to wait for
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
