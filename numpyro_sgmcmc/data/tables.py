# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Tables whose columns are rows, in memory and in files.

A Parquet file has no places for its rows, and the numbers of a row of an Arrow file lie far apart.
The columns of a file are decoded once, a few megabytes at a time, into a temporary file in which
rows follow each other. The temporary file has no name and disappears with its object, or with the
process. Another process decodes the file again, and knows the rows by their contents.
"""

from collections.abc import Sequence
from functools import cached_property
import math
import os
from pathlib import Path
import tempfile
from threading import Lock
from typing import Any
import weakref

import numpy as np

from numpyro_sgmcmc.data.content_hash import Version, version_of
from numpyro_sgmcmc.data.sources import File, Source, UnreadableRows, opened
from numpyro_sgmcmc.data.table_files import (
    Columns,
    batches_of,
    columns_of,
    files_of,
    is_file,
    name_of,
)

#: Bytes that are decoded at once.
_DECODED_BYTES = 2**22

#: Lock of the decoding, which two threads may begin at once.
_DECODING = Lock()


class _Table(Source):
    """Source of columns of a table in memory."""

    def __init__(self, table: Any, columns: Columns, name: str) -> None:
        self._table, self._columns, self.name = table.select([*{*columns.names}]), columns, name
        self.shape, self.dtype = (table.num_rows, *columns.shape), np.result_type(*columns.dtypes)
        first = 0
        for batch in self._table.to_batches():
            columns.values(batch, first, name)
            first += batch.num_rows

    def read_into(self, out: np.ndarray, numbers: np.ndarray) -> None:
        if np.all(np.diff(numbers) == 1):
            part = self._table.slice(int(numbers[0]), len(numbers))
        else:
            part = self._table.take(numbers)
        first = 0
        for batch in part.to_batches():
            end = first + batch.num_rows
            self._columns.fill(out[first:end], self._columns.values(batch, first, self.name))
            first = end


class _Copy:
    """Temporary file without a name, which the files of a table share."""

    @cached_property
    def file(self) -> Any:
        made = tempfile.TemporaryFile()
        weakref.finalize(self, made.close)
        return made

    @property
    def descriptor(self) -> int:
        return self.file.fileno()

    def __reduce__(self) -> Any:
        return _Copy, ()


class _Decoded(File):
    """
    Source of columns of a file, decoded once into a temporary file.

    :param path: path of the file.
    :param columns: the columns.
    :param copy: the temporary file.
    """

    def __init__(self, path: Path, columns: Columns, copy: _Copy) -> None:
        self.path, self.name, self._columns, self._copy = str(path), f"'{path}'", columns, copy
        self.dtype, self._found = np.result_type(*columns.dtypes), self._status()
        self._row_bytes = math.prod(columns.shape) * self.dtype.itemsize
        self.shape, self._is_decoded = (self._decode(), *columns.shape), True

    def _decode(self) -> int:
        """Decode the file, and return the number of its rows."""
        self._offset, rows = self._copy.file.seek(0, os.SEEK_END), 0
        each = max(1, _DECODED_BYTES // max(1, self._row_bytes))
        for batch in batches_of(self.path, self._columns.names, each):
            out = np.empty((batch.num_rows, *self._columns.shape), self.dtype)
            self._columns.fill(out, self._columns.values(batch, rows, self.name))
            rows += len(out)
            try:
                self._copy.file.write(out.data)
                self._copy.file.flush()
            except OSError as error:
                raise UnreadableRows(
                    f"{self.name} cannot be decoded into a temporary file in"
                    f" '{tempfile.gettempdir()}' ({error.strerror}, at row {rows:,} of"
                    f" {self._row_bytes:,} bytes each). Make room, or set the environment variable"
                    " TMPDIR to another folder."
                ) from error
        return rows

    def _opened(self) -> Any:
        if self._is_decoded:
            return self._copy
        with _DECODING:
            if not self._is_decoded and (rows := self._decode()) != self.shape[0]:
                raise UnreadableRows(
                    f"{self.name} had {self.shape[0]:,} rows when it was opened, and now has"
                    f" {rows:,}. Put the old file back, or begin another run with the new one."
                )
            self._is_decoded = True
        return self._copy

    def _check(self, descriptor: int, first: int) -> None:
        """Check nothing: no other program can change the temporary file."""

    def version(self) -> Version:
        return version_of(self._found)

    @property
    def is_replaced(self) -> bool:
        try:
            return version_of(os.stat(self.path))[:3] != version_of(self._found)[:3]
        except OSError:
            return False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"_is_decoded": False})


def sources_of(given: Sequence[Any], columns: str | Sequence[str] | None) -> list[Source]:
    """
    Return the sources of some objects; a folder of a table has one for each file.

    :param columns: name or names of the columns that are the rows, or None.
    :raises ValueError: if a table has no such columns, or if they are not numbers.
    """
    parts = [part for one in given for part in files_of(one)]
    wanted = [columns_of(part, columns) for part in parts]
    first = wanted[0]
    for part, found in zip(parts, wanted, strict=True):
        if found and first and found.dtypes != first.dtypes:
            k = [a != b for a, b in zip(found.dtypes, first.dtypes, strict=True)].index(True)
            raise ValueError(
                f"Column '{found.names[k]}' has type {found.dtypes[k]} in {name_of(part)}, and"
                f" {first.dtypes[k]} in {name_of(parts[0])}. Files are parts of one table: write"
                " all of them with the same types."
            )
    copy = _Copy()
    return [_source(part, one, copy) for part, one in zip(parts, wanted, strict=True)]


def _source(part: Any, columns: Columns | None, copy: _Copy) -> Source:
    if columns is None:
        return opened(part)
    if not is_file(part):
        return _Table(part, columns, name_of(part))
    return _Decoded(Path(part), columns, copy)
