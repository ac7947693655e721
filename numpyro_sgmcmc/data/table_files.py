# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Files of tables: which of a folder are one table, and which columns are rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
import json
import os
from pathlib import Path
import re
from typing import Any, NamedTuple

import numpy as np

from numpyro_sgmcmc.data.converters import names
from numpyro_sgmcmc.data.sources import UnreadableRows

#: Endings of the files of tables.
_PARQUET, _ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")

#: Number of column names in a message.
_LISTED = 20

#: Remedies for columns without numbers, by a pattern of the beginning of their type.
_REMEDIES = {
    "(large_)?(string|binary)": "Store codes in its place, `pandas.factorize(frame['{0}'])[0]`. A"
    " code must mean the same in every file: of several files take one list for all,"
    " `pyarrow.compute.index_in(table['{0}'], pyarrow.array(words))`.",
    "dictionary": "Store its codes in its place, `frame['{0}'].cat.codes`. A code must mean the"
    " same in every file.",
    "date|time": "Store a number of days in its place, `table['{0}'].cast('date32').cast('int32')`,"
    " or of seconds.",
    "decimal": "Store it as `table['{0}'].cast('float64')`, or as 'int64' if it is a code.",
    "(large_)?list": "Store lists of one length, `table['{0}'].cast(pyarrow.list_("
    "pyarrow.float32(), 768))`, or a column for each number.",
    "": "Store columns of numbers in its place.",
}


class Columns(NamedTuple):
    """
    Columns of a table that are the rows.

    - **names** - names of the columns.
    - **dtypes** - data types of their numbers.
    - **shape** - shape of a row.
    """

    names: list[str]
    dtypes: list[np.dtype]
    shape: tuple[int, ...]

    def values(self, batch: Any, first: int, source: str) -> list[np.ndarray]:
        """
        Return the columns of a batch, without a copy where Arrow needs none.

        :param first: number of the first row of the batch.
        :param source: name of the source.
        :raises ValueError: if a value is missing.
        """
        found = []
        for name in self.names:
            column, width = batch.column(name), 1
            if column.null_count == 0 and hasattr(column.type, "list_size"):
                column, width = column.flatten(), column.type.list_size
            if column.null_count:
                missing = column.is_null().to_numpy(zero_copy_only=False)
                raise ValueError(
                    f"Column '{name}' of {source} has missing values, the first in row"
                    f" {first + int(np.argmax(missing)) // width:,}. Drop such rows,"
                    f" `frame.dropna(subset=['{name}'])`; or put any finite value there, and mask"
                    " the site with `numpyro.handlers.mask`."
                )
            found.append(column.to_numpy(zero_copy_only=False))
        return found

    def fill(self, out: np.ndarray, values: list[np.ndarray]) -> None:
        """Write columns into an array of rows."""
        if len(values) > 1:
            for k, column in enumerate(values):
                out[:, k] = column
        else:
            out[...] = values[0].reshape(out.shape)


def files_of(given: Any) -> list[Any]:
    """Return the files of the table in a folder, or the object itself if it is no such folder."""
    if not isinstance(given, str | Path) or not os.path.isdir(given):
        return [given]
    folder = Path(given)
    splits, state = folder / "dataset_dict.json", folder / "state.json"
    if splits.is_file():
        listed = json.loads(splits.read_text())["splits"]
        raise ValueError(
            f"'{folder}' has the parts {', '.join(map(repr, listed))}. Give the folder of one,"
            f" '{folder / listed[0]}'."
        )
    if state.is_file() and (saved := json.loads(state.read_text())).get("_data_files"):
        if chosen := [name for name in saved if "indices" in name and saved[name]]:
            raise ValueError(
                f"'{folder}' is a selection of the rows of its files, by '{chosen[0]}' of"
                " 'state.json'. Save the selected rows alone,"
                " `dataset.flatten_indices().save_to_disk(...)`."
            )
        return [folder / one["filename"] for one in saved["_data_files"]]
    versions = [*folder.glob("_delta_log"), *folder.glob("metadata/*.metadata.json")]
    if versions or (folder / "dataset_info.json").is_file():
        raise ValueError(
            f"'{folder}' has files that may not belong to its present rows: it is a cache of"
            " Hugging Face or a table with versions. Save the rows, `dataset.save_to_disk(...)`;"
            " or give the list of the files, such as `DeltaTable(...).file_uris()`."
        )
    # names that begin with a dot or an underscore are of unfinished files and of lists of files
    paths = (path for path in folder.rglob("*") if is_file(path) and path.is_file())
    named = [path.relative_to(folder).as_posix() for path in paths]
    found = sorted(folder / name for name in named if not re.search("(^|/)[._]", name))
    if len({path.suffix.lower() in _PARQUET for path in found}) > 1:
        raise ValueError(
            f"'{folder}' has files of Parquet and of Arrow, {len(found):,} together. Give one kind,"
            f" '{folder / '*.parquet'}'."
        )
    return found or [given]


def columns_of(part: Any, columns: str | Sequence[str] | None) -> Columns | None:
    """Return the columns of a table that are the rows, or None for what is no table."""
    package = type(part).__module__.partition(".")[0]
    if package in ("pandas", "polars", "datasets"):
        raise TypeError(
            f"A {type(part).__name__} of {package} is not on disk. Give the model its columns as an"
            " array, `frame[['a', 'b']].to_numpy()`; or give `RowsOnDisk` the file or folder that"
            " holds it, with `columns=['a', 'b']`."
        )
    is_path = is_file(part)
    if not is_path and not (hasattr(part, "column_names") and hasattr(part, "schema")):
        if columns is None:
            return None
        name = name_of(part) if isinstance(part, str | Path) else f"a {type(part).__name__}"
        raise ValueError(
            f"`columns` chooses columns of a table, and {name} is an array or no table. Leave"
            " `columns` out, and choose in the model, `X[i][:, [0, 2]]`."
        )
    chosen = None if columns is None else names("columns", columns)
    schema, name = _schema(part) if is_path else part.schema, name_of(part)
    listed = ", ".join(map(repr, schema.names[:_LISTED]))
    listed += f" and {len(schema.names) - _LISTED:,} more" if len(schema.names) > _LISTED else ""
    if chosen is None and is_path:
        raise ValueError(
            f"{name} is a table. Name the columns that are the rows, `columns=['a', 'b']`, or one"
            f" for a vector, `columns='y'`. It has {listed}."
        )
    kinds: list[np.dtype] = []
    shape: tuple[int, ...] = ()
    chosen = schema.names if chosen is None else chosen
    for column in chosen:
        if (count := schema.names.count(column)) != 1:
            found = f"{count} columns" if count else "no column"
            raise ValueError(f"{name} has {found} '{column}'. It has {listed}.")
        given = kind = schema.field(column).type
        if hasattr(kind, "list_size"):
            kind, shape = kind.value_type, (kind.list_size,)
        try:
            kinds.append(np.dtype(kind.to_pandas_dtype()))
        except NotImplementedError:
            kinds.append(np.dtype(object))
        if kinds[-1].kind not in "biuf":
            remedy = next(x for pattern, x in _REMEDIES.items() if re.match(pattern, str(given)))
            raise ValueError(
                f"Column '{column}' of {name} has type {given}, and rows are numbers."
                f" {remedy.format(column)}"
            )
    if shape and not isinstance(columns, str):
        raise ValueError(
            f"A column of {name} has lists of {shape[0]:,} numbers. Give it by itself, by one name:"
            f" `columns='{chosen[0]}'`."
        )
    shape = shape if isinstance(columns, str) else (len(chosen),)
    return Columns(list(chosen), kinds, shape)


def _schema(path: str | Path) -> Any:
    """Return the names and types of the columns of a file."""
    if not os.path.isfile(path):
        raise UnreadableRows(
            f"'{path}' cannot be opened: no file has this path. Give the path of a file or folder"
            " of Parquet or Arrow."
        )
    with reading(path):
        if not _is_parquet(path):
            return _arrow(path)[0]
        file, folders = _parquet(path)
        schema = file.schema_arrow
        for name in folders:
            schema = schema.append(_pyarrow(path).field(name, "int64"))
        return schema


def batches_of(path: str, chosen: list[str], rows: int) -> Iterator[Any]:
    """Read batches of rows, none of which stays in memory."""
    with reading(path):
        if not _is_parquet(path):
            for batch in _arrow(path)[1]:
                yield from (batch.slice(k, rows) for k in range(0, len(batch), rows))
            return
        file, folders = _parquet(path)
        stored = [name for name in chosen if name not in folders]
        for batch in file.iter_batches(rows, columns=stored, use_threads=False):
            yield _pyarrow(path).record_batch(
                {
                    name: np.full(batch.num_rows, folders[name], np.int64)
                    if name in folders
                    else batch.column(name)
                    for name in chosen
                }
            )


def _parquet(path: str | Path) -> tuple[Any, dict[str, int]]:
    """Open a Parquet file, and return the numbers in the names of its folders, ``year=2013``."""
    # other options keep whole groups of rows in memory
    file = _pyarrow(path).parquet.ParquetFile(path, buffer_size=2**16, pre_buffer=False)
    parts = [part.partition("=") for part in Path(path).parts[:-1]]
    numbers = {name: int(value) for name, _, value in parts if value.isdecimal()}
    return file, {k: x for k, x in numbers.items() if k not in file.schema_arrow.names}


def _arrow(path: str | Path) -> tuple[Any, Any]:
    """Return the names and types of an Arrow file, and its batches."""
    arrow = _pyarrow(path)
    memory = arrow.memory_map(str(path))
    is_stream = memory.read(6) != b"ARROW1"
    memory.seek(0)
    if is_stream:
        stream = arrow.ipc.open_stream(memory)
        return stream.schema, stream
    file = arrow.ipc.open_file(memory)
    return file.schema, map(file.get_batch, range(file.num_record_batches))


def is_file(part: Any) -> bool:
    return isinstance(part, str | Path) and Path(part).suffix.lower() in (*_PARQUET, *_ARROW)


def name_of(part: Any) -> str:
    if isinstance(part, str | Path):
        return f"'{part}'"
    return f"a table of columns {', '.join(part.column_names[:_LISTED])}"


def _is_parquet(path: str | Path) -> bool:
    return Path(path).suffix.lower() in _PARQUET


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Name a file in the errors of its reading."""
    try:
        yield
    except UnreadableRows:
        raise
    except (_pyarrow(path).ArrowException, OSError) as error:
        raise UnreadableRows(
            f"'{path}' has {os.path.getsize(path):,} bytes and cannot be read as a table"
            f" ({str(error).splitlines()[0]}). Write it again, or give another file."
        ) from error


def _pyarrow(path: str | Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f"'{path}' is read by the package pyarrow, which is not installed,"
            " `pip install pyarrow`."
        ) from error
    return pyarrow
