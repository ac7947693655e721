# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Rows on disk: draws are those of the same rows in memory; what cannot be read is named."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
import errno
from functools import partial
import os
from pathlib import Path
import pickle
import resource
import shutil
import socket
from unittest.mock import Mock

import h5py
import jax
from jax import lax, random
import jax.numpy as jnp
from kernel_table import CENTRE, KERNELS, X, Y, model, tuning
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest
from runs import run_mcmc

from numpyro_sgmcmc import (
    SGLD,
    CCAdL,
    GrowingRows,
    LongRun,
    NoiseEstimate,
    RowsOnDisk,
    UnreadableRows,
    to_arviz,
)
from numpyro_sgmcmc.data import content_hash, sources
from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.rows_on_disk import read_ahead
from numpyro_sgmcmc.kernels.identity import data_fingerprint

COMPILE_QUICKLY = True

ROWS = np.random.default_rng(0).standard_normal((300, 4)).astype(np.float32)


def npy(path, rows):
    np.save(path / "x.npy", rows)
    return RowsOnDisk(path / "x.npy")


def view_of_a_map(path, rows):
    """Not at the beginning of the file, nor at that of the map."""
    with open(path / "x.raw", "wb") as file:
        file.write(b"header " * 1_000 + rows[:10].tobytes() + rows.tobytes())
    mapped = np.memmap(path / "x.raw", rows.dtype, "r", offset=7_000, shape=(310, *rows.shape[1:]))
    return RowsOnDisk(mapped[10:])


def hdf5(path, rows):
    with h5py.File(path / "x.h5", "w") as file:
        file["x"] = rows
    return RowsOnDisk(h5py.File(path / "x.h5")["x"])


def zarr(path, rows):
    import zarr

    made = zarr.create_array(path / "x.zarr", shape=rows.shape, chunks=(50, 4), dtype=rows.dtype)
    made[:] = rows
    return RowsOnDisk(zarr.open_array(path / "x.zarr", mode="r"))


def arrow(path, rows):
    import pyarrow as pa

    table = pa.table({f"x{k}": column for k, column in enumerate(rows.T)})
    with pa.OSFile(str(path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    return RowsOnDisk(pa.ipc.open_file(pa.memory_map(str(path / "x.arrow"))).read_all())


def in_memory(path, rows):
    return RowsOnDisk(rows)


def shards(path, rows):
    for k, part in enumerate((rows[:100], rows[100:101], rows[101:])):
        np.save(path / f"shard-{k}.npy", part)
    return RowsOnDisk(str(path / "shard-*.npy"))


def shards_of_a_list(path, rows):
    np.save(path / "first.npy", rows[:150])
    return RowsOnDisk([path / "first.npy", rows[150:]])


SOURCES = [npy, view_of_a_map, hdf5, zarr, arrow, in_memory, shards, shards_of_a_list]


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
def test_rows_are_those_of_the_source(source, tmp_path):
    x = source(tmp_path, ROWS)
    assert x.shape == ROWS.shape and len(x) == 300 and x.ndim == 2 and x.size == 1_200
    rng = np.random.default_rng(1)
    stretches = np.concatenate([np.arange(k, k + 20) for k in (200, 10, 100)])
    for numbers in (
        rng.integers(0, 300, 250), np.arange(300), np.arange(20, 50), stretches, stretches[::-1],
        np.array([7]), rng.integers(0, 300, (3, 5)), np.array([5, 5, 4]),
    ):  # fmt: skip
        assert np.array_equal(x.read(numbers), ROWS[numbers])
        assert np.array_equal(jax.jit(lambda i: x[i])(jnp.asarray(numbers)), ROWS[numbers])
    assert np.array_equal(x[3], ROWS[3]) and np.array_equal(x[:7], ROWS[:7])
    assert np.array_equal(x[jnp.arange(4), 1], ROWS[:4, 1])
    assert np.array_equal(jax.vmap(lambda i: x[i])(numbers), ROWS[numbers])
    twin = npy(tmp_path, ROWS)
    assert x.digest == twin.digest != npy(tmp_path, ROWS + 1).digest


def test_rows_that_are_not_in_memory_are_fetched_at_once(tmp_path, monkeypatch):
    x, (preadv, fetched) = npy(tmp_path, np.arange(50_000.0).reshape(500, 100)), (os.preadv, [])

    def of_a_cold_file(*arguments):
        if arguments[3:]:
            raise BlockingIOError
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", of_a_cold_file)
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: fetched.append(arguments[1:3]))
    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    stretches = np.concatenate([np.arange(k, k + 40) for k in (200, 30, 100)])
    for numbers, count in ((np.array([7, 400, 8]), 3), (stretches, 3)):
        fetched.clear()
        assert np.array_equal(x.read(numbers)[:, 0], 100 * numbers)
        assert len(fetched) == count and sum(size for _, size in fetched) == 800 * len(numbers)


def test_data_types(tmp_path):
    for dtype, on_device in (
        (np.float64, np.float32), (np.int64, np.int32), (np.uint8, np.uint8), (">f4", np.float32),
    ):  # fmt: skip
        x = npy(tmp_path, np.arange(6).astype(dtype))
        assert x.dtype == on_device and x[jnp.arange(2)].dtype == on_device
        assert np.array_equal(jax.jit(lambda i: x[i])(jnp.arange(2, 6)), np.arange(2, 6))


def test_pickled_rows_are_read(tmp_path):
    x = pickle.loads(pickle.dumps(npy(tmp_path, ROWS)))
    assert np.array_equal(x.read(np.arange(5)), ROWS[:5])


def drawn(name, x, y=Y, **options):
    kernel = KERNELS[name](model, **({"init_strategy": CENTRE} | options.pop("kernel", {})))
    options = {"warmup": 70, "samples": 80} | options
    return run_mcmc(kernel, x, y, **options)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGHMC estimated", {"chains": 2}),
        pytest.param("CCAdL matrix free", {"progress_bar": True}, marks=pytest.mark.nightly),
        ("CCAdL tuned", {"kernel": {"steps_per_sample": 3}, "jit_model_args": True}),
        pytest.param(
            "SGLD", {"kernel": {"subsampling": "epochs"}, "chains": 2,
                     "chain_method": "parallel"}, marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_draws_are_those_in_memory(name, options, tmp_path):
    """Of more steps than are read at once; the outcomes too are on disk in one of them."""
    x = npy(tmp_path, X)
    np.save(tmp_path / "y.npy", Y)
    y = RowsOnDisk(tmp_path / "y.npy") if name == "SGHMC estimated" else Y
    here, there = drawn(name, X, Y, **options), drawn(name, x, y, **options)
    for site, draws in here.get_samples().items():
        assert np.array_equal(draws, there.get_samples()[site]), site


@pytest.mark.nightly
def test_tuning_is_that_in_memory(tmp_path):
    found = CCAdL(model, progress_bar=False).tune(random.key(0), npy(tmp_path, X), Y)
    assert found.step_size == tuning().step_size
    for one, other in zip(jax.tree.leaves(found[2:5]), jax.tree.leaves(tuning()[2:5]), strict=True):
        assert np.array_equal(one, other)


def test_reads_are_ahead_of_the_steps(tmp_path, monkeypatch):
    """
    Each row is read once, and not by the step that needs it: a read in the loop, which XLA is free
    to move, would be one for each step.
    """
    read, x = [], npy(tmp_path, X)
    monkeypatch.setattr(
        RowsOnDisk, "read", lambda self, i: read.append(np.size(i)) or take(self, i)
    )
    kernel = SGLD(model, step_size=1e-4, init_strategy=CENTRE)
    state = kernel.init(random.key(0), 0, None, (x, jnp.asarray(Y)), {})
    read.clear()
    steps = 64 * 5
    run = jax.jit(
        lambda state: lax.fori_loop(
            0, steps, lambda _, state: kernel.sample(state, (x, jnp.asarray(Y)), {}), state
        )
    )
    jax.block_until_ready(run(state))
    assert set(read) == {64 * 20} and 5 <= len(read) <= 6


take = RowsOnDisk.read


def test_what_was_not_foreseen_is_read_too(tmp_path):
    x = npy(tmp_path, ROWS)
    first, second = jnp.array([3, 1]), jnp.array([[4, 299]])
    read = jax.jit(lambda a, b: read_ahead([(x, DrawnRows(a), DrawnRows(b))])[0])
    for numbers in (first, second.ravel(), first):
        assert np.array_equal(read(numbers, first), ROWS[numbers])


class Elsewhere:
    """Rows that another program changes."""

    dtype, shape = np.dtype(np.float32), (300, 4)

    def __getitem__(self, rows):
        if self.shape[0] == 299:
            raise OSError("the network is down")
        return ROWS[rows]


def test_what_cannot_be_read_is_named(tmp_path):
    x = npy(tmp_path, ROWS)
    with pytest.raises(UnreadableRows, match=r"has no row 300"):
        x.read([2, 300])
    os.truncate(tmp_path / "x.npy", 128 + 16 * 100 + 3)
    with pytest.raises(
        UnreadableRows, match=r"Row 250 of '.*x.npy' cannot be read.* first 100 rows"
    ):
        x.read([250])
    poisoned = ROWS.copy()
    poisoned[7, 2] = np.nan
    y = npy(tmp_path, poisoned)
    y.read(np.arange(7))
    with pytest.raises(UnreadableRows, match=r"Row 7 of .*x.npy.* has nan at position 2\. Drop"):
        y.read(np.arange(9))
    large = np.full((300, 4), 3e38, np.float32)  # whose sum overflows
    assert np.array_equal(npy(tmp_path, large).read([1]), large[:1])
    source = Elsewhere()
    other = RowsOnDisk(source)
    other.read([1])
    source.shape = (301, 4)
    with pytest.raises(UnreadableRows, match=r"had shape \(300, 4\).* now has \(301, 4\)"):
        other.read([1])
    source.shape, source.dtype = (300, 4), np.dtype(np.int8)
    with pytest.raises(UnreadableRows, match=r"dtype float32.* now has .* and int8\."):
        other.read([1])
    down = Elsewhere()
    down.shape = (299, 4)
    with pytest.raises(UnreadableRows, match=r"between 3 and 4 cannot be read: OSError: the netwo"):
        RowsOnDisk(down).read([3, 4])


def without(path):
    pass


def bound(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # a longer name would not do


FILES = {
    "missing": (without, r"cannot be opened \(No such file or directory\). Give the path"),
    "a folder": (lambda path: path.mkdir(), r"cannot be opened \(it is a folder"),
    "a pipe": (os.mkfifo, r"cannot be opened \(it is a folder, a pipe or a device"),
    "a link to a pipe": (
        lambda path: os.mkfifo(path.parent / "p") or path.symlink_to(path.parent / "p"),
        "cannot be opened .* a pipe",
    ),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "cannot be opened .* or a device"),
    "a socket": (bound, r"cannot be opened \(it is a folder, a pipe or"),
    "empty": (lambda path: path.touch(), "has 0 bytes and is not a complete .npy file .* got 0"),
    "cut off": (
        lambda path: np.save(path, ROWS) or os.truncate(path, 1_000),
        "has 1,000 bytes and is not a complete .npy file .*greater than file size.* Write it again",
    ),
    "cut off in its header": (
        lambda path: np.save(path, ROWS) or os.truncate(path, 100), "has 100 bytes and is not"
    ),
    "of text": (lambda path: path.write_text("a,b\n1,2\n" * 20), "has 160 bytes .*magic string"),
    "of pickles": (
        lambda path: np.save(path, np.array([{}, None]), allow_pickle=True), "has .* Python objects"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_file_of_rows(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write, said = FILES[kind]
    write(tmp_path / "x.npy")
    with pytest.raises(UnreadableRows, match=f"'.*x.npy' {said}"):
        RowsOnDisk(tmp_path / "x.npy")


def edit(path, row, change=1.0):
    """Changes a row of a file in its place."""
    mapped = np.load(path, mmap_mode="r+")
    mapped[row] += change
    mapped.flush()


@pytest.fixture
def short_stretches(monkeypatch):
    """So that 300 rows are many, and a file is believed as soon as it is written."""
    monkeypatch.setattr(content_hash, "_STRETCH_BYTES", 5 * 16)
    monkeypatch.setattr(content_hash, "_SETTLED", 0)
    rng = np.random.default_rng(0)
    monkeypatch.setattr(np.random, "default_rng", lambda: rng)
    read, checked = [], RowsOnDisk._checked
    monkeypatch.setattr(
        RowsOnDisk, "_checked", lambda self, i: read.extend(i.tolist()) or checked(self, i)
    )
    return read


def test_digest_is_of_all_rows(tmp_path, short_stretches):
    path = tmp_path / "x.npy"
    x = npy(tmp_path, ROWS)
    digest = x.digest
    assert sorted(short_stretches) == list(range(300))
    for row in (0, 37, 299):
        edit(path, row)
        assert x.digest != digest == npy(tmp_path, ROWS).digest
        x = RowsOnDisk(path)
    # whatever else is said of the file
    (tmp_path / "copied").mkdir()
    twin = shutil.copy(path, tmp_path / "copied")
    os.utime(path, ns=(5, 5))
    assert x.digest == RowsOnDisk(path).digest == RowsOnDisk(twin).digest == digest


def test_what_has_not_changed_is_read_in_part(tmp_path, short_stretches):
    x, looked_at = npy(tmp_path, ROWS), []
    digest = x.digest
    for _ in range(3):
        short_stretches.clear()
        assert x.digest == digest and len(short_stretches) == 4 * 5
        looked_at.append(sorted(short_stretches))
    assert looked_at[0] != looked_at[1] != looked_at[2]
    # the size is the same, and the time is put back
    status = os.stat(tmp_path / "x.npy")
    edit(tmp_path / "x.npy", 37)
    os.utime(tmp_path / "x.npy", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert x.digest != digest


def test_what_has_no_times_is_looked_at_again(short_stretches):
    """A change of one row in sixty stretches, four of which are looked at each time."""
    rows = ROWS.copy()
    source = Elsewhere()
    source.__class__ = type("Rows", (), {
        "dtype": rows.dtype, "shape": rows.shape, "__getitem__": lambda self, i: rows[i]
    })  # fmt: skip
    x = RowsOnDisk(source)
    digest = x.digest
    rows[37] += 1
    assert any(x.digest != digest for _ in range(100))


def test_a_fresh_file_is_read_again(tmp_path, short_stretches, monkeypatch):
    """Writes to a page that waits for the disk do not change the times of its file."""
    monkeypatch.setattr(content_hash, "_SETTLED", 40 * 10**9)
    x = npy(tmp_path, ROWS)
    for _ in range(2):
        short_stretches.clear()
        assert x.digest and len(short_stretches) == 300


def test_a_change_during_a_run_is_noticed(tmp_path):
    x, path = npy(tmp_path, ROWS), tmp_path / "x.npy"
    assert x.digest
    os.utime(path)
    assert np.array_equal(x.take(np.array([3])), ROWS[3:4])
    edit(path, 200)
    with pytest.raises(UnreadableRows, match="x.npy' has been edited since the run began, so that"):
        x.take(np.array([3]))
    assert x.digest  # of another run
    x.take(np.array([3]))


def test_a_file_that_is_written_again(tmp_path):
    x, path = npy(tmp_path, ROWS), tmp_path / "x.npy"
    np.save(path, np.ones((300, 4), np.int32))
    said = r"rewritten since .* header was .*'<f4'.*300, 4.* is now .*'<i4'.*Put the old file back"
    with pytest.raises(UnreadableRows, match=said):
        x.read([3])
    x = npy(tmp_path, ROWS)
    path.write_bytes(b"0" * path.stat().st_size)
    with pytest.raises(UnreadableRows, match="its header was .* and is now of another kind"):
        x.read([3])


def test_a_file_in_the_place_of_another(tmp_path):
    """Its rows are still there; another run would not be of those that the name has now."""
    x = npy(tmp_path, ROWS)
    np.save(tmp_path / "new.npy", ROWS + 1)
    os.replace(tmp_path / "new.npy", tmp_path / "x.npy")
    assert np.array_equal(x.read([3]), ROWS[3:4])
    with pytest.raises(UnreadableRows, match="x.npy' has been replaced by another file"):
        assert x.digest


def test_a_pipe_in_the_place_of_a_file_that_was_closed(tmp_path, monkeypatch):
    """It is not waited for, and other rows are not taken for those that were there."""
    monkeypatch.setattr(sources, "_MOST_OPEN", 1)
    x, other = npy(tmp_path, ROWS), tmp_path / "other.npy"
    for make, said in (
        (os.mkfifo, "x.npy' has been replaced by another file since it was opened"),
        (lambda path: np.save(path, ROWS + 1), "x.npy' has been replaced by another file"),
        (lambda path: None, "x.npy' cannot be opened .* Put the file back"),
    ):
        np.save(other, ROWS)
        RowsOnDisk(other).read([0])  # closes the first
        (tmp_path / "x.npy").rename(tmp_path / "kept.npy")
        make(tmp_path / "x.npy")
        with pytest.raises(UnreadableRows, match=said):
            x.read([3])
        (tmp_path / "kept.npy").rename(tmp_path / "x.npy")
        assert np.array_equal(x.read([3]), ROWS[3:4])


@contextmanager
def few_descriptors(more):
    """No more than these may be opened besides those that are open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors there")
def test_more_shards_than_files_that_may_be_open(tmp_path):
    for k in range(400):
        np.save(tmp_path / f"X-{k:03}.npy", ROWS[3 * (k % 100) :][:3] + k)
    with few_descriptors(200):
        x = RowsOnDisk(str(tmp_path / "X-*.npy"))
        rows = np.random.default_rng(0).permutation(1_200)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(x.read, np.split(rows, 24)))
        copy = pickle.loads(pickle.dumps(x))
        assert np.array_equal(copy.read(rows[:50]), x.read(rows[:50])) and copy.digest == x.digest
    right = np.concatenate([ROWS[3 * (k % 100) :][:3] + k for k in range(400)])
    assert np.array_equal(np.concatenate(found), right[rows])


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors there")
def test_more_refreshes_than_files_that_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_MOST_OPEN", 10)
    np.save(tmp_path / "X-000.npy", ROWS)
    with few_descriptors(40):
        rows = GrowingRows(RowsOnDisk(str(tmp_path / "X-*.npy")))
        for k in range(1, 60):
            np.save(tmp_path / f"X-{k:03}.npy", ROWS[:2] + k)
            assert rows.refresh() == 2
    assert np.array_equal(rows.arrays[0].read([300, 417]), [ROWS[0] + 1, ROWS[1] + 59])


def test_what_may_not_be_open_is_said(tmp_path, monkeypatch):
    npy(tmp_path, ROWS)
    full = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(np.lib.format, "open_memmap", Mock(side_effect=full))
    with pytest.raises(UnreadableRows, match="Too many open files.* Close other files, or raise"):
        RowsOnDisk(tmp_path / "x.npy")


def test_masked_rows_are_refused():
    hidden = np.ma.masked_array(ROWS, np.arange(300)[:, None] == 7 * np.ones(4))
    with pytest.raises(ValueError, match="a masked array with 4 masked entries.* Fill it"):
        RowsOnDisk(hidden)


def test_a_map_that_is_a_copy(tmp_path):
    """Its own values are read, of which those of the file know nothing."""
    npy(tmp_path, ROWS)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="c")
    x = RowsOnDisk(mapped)
    digest = x.digest
    mapped[37] = 7
    assert np.array_equal(x.read([36, 37]), [ROWS[36], np.full(4, 7)])
    assert x.digest != digest
    os.truncate(tmp_path / "x.npy", 1_000)  # to look beyond would end the process
    with pytest.raises(UnreadableRows, match="x.npy', which had 4,928 bytes .* now has 1,000"):
        x.read([299])


@pytest.mark.slow
def test_tuning_of_rows_that_were_edited(tmp_path, monkeypatch):
    found, self_tuning = [], "numpyro_sgmcmc.kernels.self_tuning"
    monkeypatch.setattr(
        f"{self_tuning}.new_tuning",
        lambda method, runtime, target, *rest: (
            found.append(data_fingerprint(target)) or tuning()._replace(data=found[-1])
        ),
    )
    kernel, path = CCAdL(model), tmp_path / "x.npy"
    x = npy(tmp_path, X)
    for runs, row in ((1, None), (1, None), (2, 37)):
        if row is not None:
            edit(path, row)
        kernel.init(random.key(0), 0, None, (x, jnp.asarray(Y)), {})
        assert len(found) == runs


@pytest.mark.nightly
def test_a_long_run_on_rows_that_were_restored(tmp_path, short_stretches, monkeypatch):
    """What counts is what they are; unchanged, they are not all read again."""
    passes = []
    monkeypatch.setattr(
        "numpyro_sgmcmc.data.rows_on_disk.seen_of",
        lambda *of: passes.append(of) or content_hash.seen_of(*of),
    )

    def run_on(path, num_samples):
        mcmc = run_mcmc(
            KERNELS["SGLD"](model, init_strategy=CENTRE),
            RowsOnDisk(path),
            Y,
            sampler=LongRun,
            warmup=5,
            samples=num_samples,
            store=tmp_path / "run.zarr",
        )
        return mcmc.get_samples()["w"]

    path = tmp_path / "x.npy"
    whole = drawn("SGLD", X, warmup=5, samples=40).get_samples()["w"]
    np.save(path, X)
    assert np.array_equal(run_on(path, 10), whole[:10])
    assert len(passes) == 1
    assert np.array_equal(run_on(path, 20), whole[:20])
    assert len(passes) == 1
    os.utime(shutil.copy(path, tmp_path / "restored.npy"), ns=(5, 5))
    assert np.array_equal(run_on(tmp_path / "restored.npy", 40), whole)
    assert len(passes) == 2
    edit(path, 37, 1e-3)
    with pytest.raises(ValueError, match="holds another run: different data"):
        run_on(path, 40)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (
            np.array(["a", "b"]),
            ValueError,
            "numbers or truth values; got an array of type ndarray, with dtype <U1",
        ),
        (np.zeros((0, 3)), ValueError, "needs at least one row"),
        ([1.0, 2.0], TypeError, "list has no rows to read.* with `shape`, `dtype`"),
        (
            "x.csv",
            ValueError,
            "'x.csv' is not a .npy, .parquet or .arrow file, nor a folder of tables. Open it",
        ),
    ],
)
def test_what_has_no_rows(source, error, message):
    with pytest.raises(error, match=message):
        RowsOnDisk(source)


def test_a_missing_value_of_a_table():
    import pyarrow as pa

    with pytest.raises(ValueError, match="Column 'b' of .* missing values"):
        RowsOnDisk(pa.table({"a": [1.0, 2.0], "b": [1.0, None]}))


def test_other_uses_are_refused(tmp_path, monkeypatch):
    x = npy(tmp_path, ROWS)
    with pytest.raises(TypeError, match="needs row numbers as an index"):
        x[ROWS[:, 0] > 0]
    with pytest.raises(TypeError, match="cannot be iterated over"):
        list(x)
    monkeypatch.setattr("numpyro_sgmcmc.data.rows_on_disk.MOST_BYTES", 1_000)
    with pytest.raises(ValueError, match=r"300 rows .* are 4,800 bytes, too many to read at once"):
        x[:]

    def subsampled(x):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x), subsample_size=10):
            numpyro.sample("y", dist.Normal(w, 1), obs=numpyro.subsample(x, event_dim=1)[:, 0])

    kernel = SGLD(subsampled, step_size=1e-4)
    with pytest.raises(TypeError, match=r"x.npy.* can only be indexed by the plate"):
        kernel.init(random.key(0), 0, None, (x,), {})

    def shorter(x):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", 200, subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(w, 1), obs=x[i, 0])

    with pytest.raises(
        ValueError, match=r"has size 200, but its indices are used on .*, which has 300 rows"
    ):
        SGLD(shorter, step_size=1e-4).init(random.key(0), 0, None, (x,), {})


def test_a_run_ends_where_a_row_cannot_be_read(tmp_path):
    poisoned = X.copy()
    poisoned[70] = np.inf
    kernel = SGLD(model, step_size=1e-4, init_strategy=CENTRE)
    mcmc = MCMC(kernel, num_warmup=100, num_samples=100, progress_bar=False)
    with pytest.raises(UnreadableRows, match=r"Row 70 of .*x.npy"):
        mcmc.run(random.key(0), npy(tmp_path, poisoned), Y)


class Failing:
    """Rows of which some are there for a while only."""

    dtype, shape = X.dtype, X.shape

    def __init__(self, reads):
        self.left = reads

    def __getitem__(self, rows):
        self.left -= 1
        if self.left < 0:
            raise OSError("the disk does not answer")
        return X[rows]


@pytest.mark.nightly
def test_a_long_run_goes_on_when_the_disk_is_back(tmp_path):
    """With everything drawn before, and to the draws that there would have been."""
    whole = drawn("SGLD", X, samples=30_000).get_samples()["w"]

    def long_run():
        return LongRun(
            KERNELS["SGLD"](model, init_strategy=CENTRE), num_warmup=70, num_samples=30_000,
            store=tmp_path / "run.zarr", progress_bar=False,
        )  # fmt: skip

    mcmc = long_run()
    with pytest.raises(UnreadableRows, match=r"Rows of .* cannot be read: OSError: the disk does"):
        mcmc.run(random.key(0), RowsOnDisk(Failing(200)), Y)
    kept = mcmc.get_samples()["w"]
    assert 100 < len(kept) < 30_000 and np.array_equal(kept, whole[: len(kept)])
    mcmc = long_run()
    mcmc.run(random.key(0), RowsOnDisk(Failing(10**6)), Y)
    assert np.array_equal(mcmc.get_samples()["w"], whole)


@pytest.mark.nightly
@pytest.mark.arviz
@pytest.mark.filterwarnings("ignore")
def test_arviz_reads_some_of_the_rows(tmp_path, monkeypatch):
    """Also where they are not asked for: never all of them."""
    x = npy(tmp_path, X)
    mcmc = drawn("SGLD", x, warmup=5, samples=5)
    monkeypatch.setattr("numpyro_sgmcmc.results.row_subset.ROWS_FROM_DISK", 7)
    monkeypatch.setattr("numpyro_sgmcmc.data.rows_on_disk.MOST_BYTES", 8 * x.row_bytes)
    assert to_arviz(mcmc)["observed_data"]["y"].shape == (7,)
    data = to_arviz(mcmc, rows=[3, 5], log_likelihood=True)
    assert data["log_likelihood"]["y"].shape == (1, 5, 2)
    assert np.array_equal(data["observed_data"]["y"], Y[[3, 5]])


def gaussian_mean(x, batch_size, precision):
    theta = numpyro.sample("theta", dist.ImproperUniform(dist.constraints.real, (), ()))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        numpyro.factor("x", -0.5 * precision * (x[i] - theta) ** 2)


def noise_of_blocks(x, batch_size, precision):
    """The variance of the gradient, over all places of the cut and draws of stretches."""
    length, size = batch_size // 10, len(x)
    variances = []
    for first in range(length):
        means = np.roll(x, -first).reshape(-1, length).mean(1)
        variances.append((1 - batch_size / size) * means.var(ddof=1) / 10)
    return (size * precision) ** 2 * np.mean(variances)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:After .* samples. The draws do not have the law")
@pytest.mark.parametrize("kernel", ["SGLD", "CCAdL"])
def test_exact_law_of_blocks(kernel, tmp_path):
    """
    Rows of which neighbours are alike: noise twice that of single rows. SGLD is too wide by the
    noise of its stretches, h v / 2, and CCAdL with an estimate of it is exact.
    """
    size, batch_size = 400, 40
    rng = np.random.default_rng(0)
    x = np.repeat(rng.standard_normal(size // 4), 4) + 0.5 * rng.standard_normal(size)
    x = ((x - x.mean()) / x.std(ddof=1)).astype(np.float32)
    precision = 1 / size  # of the posterior: 1
    single = size**2 * precision**2 * (1 - batch_size / size) / batch_size
    x *= np.sqrt(1 / single)
    noise = noise_of_blocks(x.astype(float), batch_size, precision)
    assert noise > 2
    np.save(tmp_path / "x.npy", x)
    h = 0.3
    make = {
        "SGLD": partial(SGLD, step_size=h),
        "CCAdL": partial(
            CCAdL, step_size=h, friction=1.0, noise=NoiseEstimate("full", window=10_000)
        ),
    }[kernel]
    expected = (1 + h * noise / 2) / (1 - h / 2) if kernel == "SGLD" else 1.0
    wrong = (1 + h / 2) / (1 - h / 2)
    mcmc = run_mcmc(
        make(gaussian_mean, subsampling="blocks", steps_per_sample=5),
        RowsOnDisk(tmp_path / "x.npy"),
        batch_size,
        precision,
        key=1,
        warmup=4_000,
        samples=20_000,
        chains=4,
    )
    squares = np.asarray(mcmc.get_samples(True)["theta"], float) ** 2
    error = squares.std() / effective_sample_size(squares) ** 0.5
    assert error < 0.012 * expected
    assert abs(squares.mean() - expected) < 3.5 * error
    if kernel == "SGLD":  # as if the rows of a stretch were independent
        assert abs(squares.mean() - wrong) > 5 * error


@pytest.mark.parametrize(
    "noise", [(None, "two_cotangents"), (None, "per_example"), ("matrix_free",)]
)
def test_estimates_from_single_rows_are_refused_for_blocks(noise):
    noise = NoiseEstimate(*noise)
    kernel = CCAdL(model, step_size=3e-3, friction=30.0, subsampling="blocks", noise=noise)
    with pytest.raises(ValueError, match=r"subsampling='blocks' needs .*estimator='sub_batches'"):
        kernel.init(random.key(0), 0, None, (X, Y), {})


def test_integers_beyond_32_bits(tmp_path):
    codes = np.arange(100, dtype=np.int64)
    np.save(tmp_path / "codes.npy", codes)
    assert RowsOnDisk(tmp_path / "codes.npy")[np.arange(3)].tolist() == [0, 1, 2]
    codes[77] = 2**31
    np.save(tmp_path / "codes.npy", codes)
    with pytest.raises(UnreadableRows, match=r"Row 77 of .* has 2,147,483,648 .*enable_x64"):
        RowsOnDisk(tmp_path / "codes.npy")[np.arange(100)]
