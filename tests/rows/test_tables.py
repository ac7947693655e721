# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Columns of tables as rows: every format has the rows that were written, or says why not."""

from datetime import date
from decimal import Decimal
import errno
import json
import os
import pickle
import sys

import jax
import jax.numpy as jnp
from kernel_table import CENTRE, KERNELS, X, Y, model
import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import feather
import pyarrow.parquet as pq
import pytest
from runs import run_mcmc

from numpyro_sgmcmc import GrowingRows, LongRun, RowsOnDisk, UnreadableRows
from numpyro_sgmcmc.data import content_hash, tables

COMPILE_QUICKLY = True

N = 300
RNG = np.random.default_rng(0)
A, B = RNG.standard_normal(N), RNG.integers(-5, 5, N).astype(np.int16)
FLAG, LISTS = RNG.random(N) < 0.3, RNG.standard_normal((N, 3)).astype(np.float32)


def table(first=0, end=N):
    """Of numbers of several types, and a column that is no number."""
    lists = pa.FixedSizeListArray.from_arrays(pa.array(LISTS[first:end].reshape(-1)), 3)
    columns = {"a": A, "b": B, "flag": FLAG}
    columns = {name: pa.array(x[first:end]) for name, x in columns.items()}
    return pa.table(columns | {"lists": lists, "text": ["x"] * (end - first)})


def parquet(path):
    pq.write_table(table(), path / "x.parquet", row_group_size=70)
    return path / "x.parquet"


def parquet_folder(path):
    """With the names and the unfinished files of Spark, and a part without rows."""
    folder = path / "x.parquet" / "all.parquet"
    (folder / "_temporary").mkdir(parents=True)
    (folder / "_temporary" / "part-0.parquet").touch()
    for k, (first, end) in enumerate([(0, 10), (10, 10), (10, N)]):
        pq.write_table(table(first, end), folder / f"part-{k}.snappy.parquet")
    return str(path / "x.parquet")


def parquet_pattern(path):
    return parquet_folder(path) + "/*/part-*.parquet"


def parquet_list(path):
    folder = parquet_folder(path) + "/all.parquet"
    return [f"{folder}/part-0.snappy.parquet", table(10, N)]


def ipc(path, kind=pa.ipc.new_file, name="x.arrow", first=0, end=N):
    with pa.OSFile(str(path / name), "wb") as sink, kind(sink, table().schema) as out:
        out.write_table(table(first, end), max_chunksize=64)
    return path / name


def ipc_stream(path):
    return ipc(path, pa.ipc.new_stream)


def compressed(path):
    feather.write_feather(table(), path / "x.feather", compression="zstd", chunksize=64)
    return path / "x.feather"


def saved_by_hugging_face(path, **state):
    """In an order that is not that of the names, with a file that belongs to nothing."""
    folder = path / "saved"
    folder.mkdir()
    files = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    ipc(folder, pa.ipc.new_stream, files[0], 0, 100)
    ipc(folder, pa.ipc.new_stream, files[1], 100, N)
    ipc(folder, pa.ipc.new_stream, "cache-1234.arrow", 0, 50)
    state = {"_data_files": [{"filename": name} for name in files], "_split": None} | state
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def in_memory(path):
    return pa.concat_tables([table(0, 120), table(120, N)])


SOURCES = [
    parquet, parquet_folder, parquet_pattern, parquet_list, ipc, ipc_stream, compressed,
    saved_by_hugging_face, in_memory,
]  # fmt: skip
NUMBERS = [
    np.arange(N), np.arange(50, 170), np.array([7]), np.array([5, 5, 4]), RNG.integers(0, N, 250),
    RNG.integers(0, N, (3, 5)), np.arange(N)[::-1],
]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
def test_columns_are_those_that_were_written(source, tmp_path):
    given = source(tmp_path)
    for columns, rows in (
        ("a", A), ("b", B), ("flag", FLAG), ("lists", LISTS), (["a"], A[:, None]),
        (["b", "a"], np.stack([B, A], 1)), (("b", "flag"), np.stack([B, FLAG], 1)),
    ):  # fmt: skip
        x = RowsOnDisk(given, columns)
        assert x.shape == rows.shape and x.dtype == jax.dtypes.canonicalize_dtype(rows.dtype)
        expected = rows.astype(x.dtype)
        for numbers in NUMBERS:
            assert np.array_equal(x.read(numbers), expected[numbers]), columns
        assert np.array_equal(jax.jit(lambda i, x=x: x[i])(jnp.arange(9)), expected[:9])
        np.save(tmp_path / "x.npy", rows)
        assert x.digest == RowsOnDisk(tmp_path / "x.npy").digest
        assert np.array_equal(pickle.loads(pickle.dumps(x)).read(NUMBERS[4]), expected[NUMBERS[4]])


def test_numbers_in_the_names_of_folders(tmp_path):
    for year in (2013, 2014):
        (tmp_path / f"year={year}" / "carrier=AA").mkdir(parents=True)
        part = pa.table({"a": [float(year)] * 3})
        pq.write_table(part, tmp_path / f"year={year}" / "carrier=AA" / "x.parquet")
    x = RowsOnDisk(tmp_path, ["year", "a"])
    assert np.array_equal(x[:], np.repeat([2013.0, 2014], 3)[:, None] * np.ones(2))
    assert np.array_equal(RowsOnDisk(tmp_path / "year=*", "year")[:], [2013] * 3 + [2014] * 3)


def saved(path):
    """The data of a regression, as arguments of its model."""
    columns = {f"x{k}": column for k, column in enumerate(X.T)}
    pq.write_table(pa.table(columns), path / "x.parquet", row_group_size=30)
    feather.write_feather(pa.table({"y": Y}), path / "y.arrow", compression="uncompressed")
    return RowsOnDisk(path / "x.parquet", list(columns)), RowsOnDisk(path / "y.arrow", "y")


def drawn(x, y, samples, **options):
    kernel = KERNELS["SGLD"](model, init_strategy=CENTRE)
    return run_mcmc(kernel, x, y, warmup=5, samples=samples, **options).get_samples()["w"]


@pytest.mark.nightly
def test_draws_are_those_in_memory(tmp_path):
    assert np.array_equal(drawn(*saved(tmp_path), 40), drawn(X, Y, 40))


@pytest.mark.nightly
def test_a_long_run_goes_on_with_other_objects(tmp_path):
    for samples in (10, 40):
        again = saved(tmp_path)
        found = drawn(*again, samples, sampler=LongRun, store=tmp_path / "run.zarr")
    assert np.array_equal(found, drawn(X, Y, 40))


def text_of(values, kind=None):
    return pa.table({"a": [1.0, 2, 3], "wrong": pa.array(values, kind)})


LARGE = 2**31
WRONG = {
    "a null": (text_of([1, None, 3]), "Column 'wrong' of .* missing values, the first in row 1. D"),
    "nothing": (text_of([None] * 3), "has type null, and rows are numbers"),
    "text": (text_of(list("xyz")), r"has type string.*factorize\(frame\['wrong'\].*in every file"),
    "bytes": (text_of([b"x"] * 3), "has type binary.*factorize"),
    "categories": (text_of(pa.array(list("xyx")).dictionary_encode()), "type dictionary<.*codes"),
    "dates": (text_of([date(2020, 1, 1)] * 3), r"type date32\[day\].*cast\('int32'\)"),
    "times": (text_of(np.array([1, 2, 3], "M8[ns]")), r"type timestamp\[ns\].* or of seconds"),
    "decimals": (text_of([Decimal("1.5")] * 3), r"type decimal128.*cast\('float64'\)"),
    "lists": (text_of([[1.0], [1, 2], []]), r"type list<\w+: double>.*lists of one length"),
    "records": (text_of([{"u": 1}] * 3), "type struct<.*Store columns of numbers"),
    "lists of text": (text_of([["x"]] * 3, pa.list_(pa.string(), 1)), "type fixed_size_list<"),
    "lists of lists": (
        text_of([[[1.0]]] * 3, pa.list_(pa.list_(pa.float32(), 1), 1)), "type fixed_size_list<"
    ),
    "lists among others": (
        text_of([[1.0, 2]] * 3, pa.list_(pa.float32(), 2)), "lists of 2 numbers. Give it by itself"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_columns_that_are_no_numbers(kind, tmp_path):
    given, message = WRONG[kind]
    pq.write_table(given, tmp_path / "x.parquet")
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as f, pa.ipc.new_file(f, given.schema) as out:
        out.write_table(given)
    for source in (given, tmp_path / "x.parquet", tmp_path / "x.arrow"):
        with pytest.raises(ValueError, match=message):
            RowsOnDisk(source, ["a", "wrong"])
        assert np.array_equal(RowsOnDisk(source, "a")[:], [1, 2, 3])


def test_a_null_is_counted_from_the_first_row(tmp_path):
    values = pa.array([1.0] * 200, pa.float64()).to_pylist()
    values[130] = None
    pairs = pa.array([[1.0, v] for v in values], pa.list_(pa.float64(), 2))
    given = pa.table({"a": values, "pairs": pairs})
    pq.write_table(given, tmp_path / "x.parquet", row_group_size=50)
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as f, pa.ipc.new_file(f, given.schema) as out:
        out.write_table(given, max_chunksize=50)
    for source in (given, tmp_path / "x.parquet", tmp_path / "x.arrow"):
        for columns in ("a", "pairs", ["a"]):
            with pytest.raises(ValueError, match="first in row 130"):
                RowsOnDisk(source, columns)


def test_values_that_cannot_be_data_are_named(tmp_path):
    given = pa.table({"a": [1.0, 2, 3], "b": [1.0, np.nan, 3], "id": [1, 2, LARGE]})
    pq.write_table(given, tmp_path / "x.parquet")
    with pytest.raises(UnreadableRows, match="Row 1 of .*x.parquet.* has nan in column 'b'"):
        RowsOnDisk(tmp_path / "x.parquet", ["a", "b"])[:]
    with pytest.raises(UnreadableRows, match=f"Row 2 of .* has {LARGE:,} at position 0. JAX keeps"):
        RowsOnDisk(tmp_path / "x.parquet", "id")[:]


def long_names(path):
    pq.write_table(pa.table({f"x{k}": [1.0] for k in range(30)}), path / "x.parquet")
    return path / "x.parquet"


def of_two_types(path):
    for name, kind in (("a", pa.int64()), ("b", pa.float64())):
        pq.write_table(pa.table({"a": pa.array([1], kind)}), path / f"{name}.parquet")
    return path


def of_both_formats(path):
    return parquet(path) and ipc(path) and path


def of_splits(path):
    (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return path


def of_versions(path):
    (path / "_delta_log").mkdir()
    return parquet(path) and path


def cache_of_hugging_face(path):
    (path / "dataset_info.json").write_text("{}")
    return ipc(path) and path


@pytest.mark.parametrize(
    ("source", "columns", "message"),
    [
        (parquet, None, r"x.parquet' is a table. Name the columns.*It has 'a', 'b', 'flag'"),
        (parquet, "z", "x.parquet' has no column 'z'. It has 'a', 'b', 'flag', 'lists', 'text'"),
        (long_names, "z", "'x19' and 10 more"),
        (parquet, [], "`columns` is empty"),
        (parquet, 3, "`columns` must be a name or a list of names; got 3"),
        (of_two_types, "a", "Column 'a' has type float64 in '.*b.parquet', and int64 in '.*a.parq"),
        (of_both_formats, "a", "has files of Parquet and of Arrow, 2 together"),
        (of_splits, "a", "has the parts 'train', 'test'. Give the folder of one, '.*train'"),
        (of_versions, "a", "files that may not belong to its present rows"),
        (cache_of_hugging_face, "a", "it is a cache of Hugging Face.*save_to_disk"),
        (lambda path: path, "a", "`columns` chooses columns of a table, and '.*' is an array"),
        (lambda path: "x.npy", "a", "and 'x.npy' is an array or no table. Leave `columns` out"),
        (lambda path: A, "a", "and a ndarray is an array or no table"),
        (lambda path: "x.csv", None, "is not a .npy, .parquet or .arrow file"),
        (lambda path: saved_by_hugging_face(path, _indices_files=[{"filename": "indices.arrow"}]),
         "a", "is a selection of the rows of its files, by '_indices_files'.*flatten_indices"),
    ],
)  # fmt: skip
def test_what_is_no_table_of_rows(source, columns, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        RowsOnDisk(source(tmp_path), columns)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_files_that_cannot_be_read(ending, tmp_path, monkeypatch):
    path = tmp_path / f"x.{ending}"
    with pytest.raises(UnreadableRows, match=f"x.{ending}' cannot be opened: no file has this"):
        RowsOnDisk(path, "a")
    for content in (b"", b"a,b\n1,2\n" * 20, (parquet if ending == "parquet" else ipc)(tmp_path)):
        content = content if isinstance(content, bytes) else content.read_bytes()[:2_000]
        path.write_bytes(content)
        with pytest.raises(UnreadableRows, match=f"has {len(content):,} bytes and cannot be read"):
            RowsOnDisk(path, "a")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match="is read by the package pyarrow, which is not installed"):
        RowsOnDisk(path, "a")


def test_no_room_for_the_temporary_file(tmp_path, monkeypatch):
    class Full:
        file = open(os.devnull, "rb")  # which cannot be written to

    monkeypatch.setattr(tables, "_Copy", Full)
    Full.file.close()
    path = parquet(tmp_path)

    class Disk:
        def seek(self, *_):
            return 0

        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Full.file = Disk()
    with pytest.raises(
        UnreadableRows, match=r"x.parquet' cannot be decoded .*No space left.*TMPDI"
    ):
        RowsOnDisk(path, "a")


def test_files_that_are_written_again(tmp_path, monkeypatch):
    """Decoded rows stay as they were, and another run needs another object."""
    monkeypatch.setattr(content_hash, "_SETTLED", 0)
    x, y = RowsOnDisk(parquet(tmp_path), "a"), RowsOnDisk(ipc(tmp_path), "a")
    kept, digest = pickle.dumps(x), x.digest
    assert y.digest == digest
    pq.write_table(table(0, 200), tmp_path / "x.parquet")
    assert np.array_equal(x.read(np.arange(N)), A.astype(np.float32))
    with pytest.raises(UnreadableRows, match=r"x.parquet' has been replaced by another file"):
        _ = x.digest
    with pytest.raises(UnreadableRows, match="had 300 rows when it was opened, and now has 200"):
        pickle.loads(kept).read([1])
    assert RowsOnDisk(tmp_path / "x.parquet", "a").digest != digest
    (tmp_path / "x.parquet").unlink()
    assert x.digest == digest


def test_files_that_keep_coming(tmp_path):
    pq.write_table(table(0, 100), tmp_path / "a.parquet")
    rows = GrowingRows(RowsOnDisk(tmp_path, "a"))
    assert rows.refresh() == 0
    pq.write_table(table(100, N), tmp_path / "b.parquet")
    assert rows.refresh() == 200
    assert np.array_equal(rows.arrays[0].read(np.arange(N)), A.astype(np.float32))


@pytest.mark.parametrize("frame", [pd.DataFrame({"a": A}), pd.Series(A)])
def test_frames_are_not_on_disk(frame):
    for columns in ("a", None):
        with pytest.raises(TypeError, match=r"of pandas is not on disk.*\]\].to_numpy\(\)`"):
            RowsOnDisk(frame, columns)
