# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Long runs give the draws of ``MCMC``, and lose none of them whatever happens."""

import errno
import fcntl
from functools import partial
import io
import json
import os
from pathlib import Path
import pickle
import random as python_random
import re
import signal
import socket
import subprocess
import sys
import time
from typing import NamedTuple

from generations import FIRST_GENERATION, arviz_marks
import jax
from jax import random
import jax.numpy as jnp
from long_run import data, kernel, model
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
import pytest
import xarray as xr
import zarr

from numpyro_sgmcmc import SGHMC, CCAdL, LongRun, full_data, summary, to_arviz
from numpyro_sgmcmc.long_runs import checkpoint, driver, effective_size, moments, running, store
from numpyro_sgmcmc.long_runs.folder import FOLDER, RunFolder
from numpyro_sgmcmc.long_runs.program import Program
from numpyro_sgmcmc.posterior.control_variate import Anchor
from numpyro_sgmcmc.posterior.metric import DiagonalMetric
from numpyro_sgmcmc.tuning.tuning import Tuning

COMPILE_QUICKLY = True

# of the tests themselves only those that read the draws by ArviZ
ARVIZ, *pytestmark = arviz_marks("The draws do not have the law")

KEY = random.key(1)
SETTINGS = {"num_warmup": 20, "num_samples": 110, "thinning": 3, "progress_bar": False}


def same(one, other):
    """Whether two trees are equal to the last bit; the keys of chains aside."""
    one, other = (jax.tree.leaves(jax.tree.map(as_numbers, tree)) for tree in (one, other))
    return len(one) == len(other) and all(
        np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in zip(one, other, strict=True)
    )


def as_numbers(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(random.key_data(x) if is_key else x)


def results(mcmc):
    return mcmc.get_samples(True), mcmc.get_extra_fields(True), mcmc.last_state


def full_nuts():
    return NUTS(full_data(model))


def long_run(path=None, sampler=None, **changes):
    settings = SETTINGS | {"checkpoint_every": 1e-9, "store": path} | changes
    return LongRun(sampler or kernel(), **settings)


def run(mcmc, y=None, key=KEY, **options):
    mcmc.run(key, data() if y is None else y, **options)
    return mcmc


@pytest.fixture(scope="module")
def whole():
    """A run without interruption."""
    return run(long_run(num_chains=2, chain_method="vectorized"))


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run that was interrupted, and the folder of its store."""
    folder = tmp_path / "run.zarr"
    monkeypatch.setattr(running, "_SECONDS", 1e-9)  # a chunk is a sample
    interrupt_after(monkeypatch, 60)
    mcmc = long_run(folder, num_chains=2, chain_method="vectorized")
    with pytest.warns(UserWarning, match="interrupted after .* The same script continues"):
        run(mcmc)
    monkeypatch.undo()
    return mcmc, folder


def interrupt_after(monkeypatch, chunks):
    """Ctrl-C after some chunks."""
    show, seen = running.Running.show, []

    def interrupted(self, bar):
        seen.append(show(self, bar))
        if len(seen) == chunks:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(running.Running, "show", interrupted)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method",
    [
        pytest.param("single", marks=pytest.mark.nightly),
        pytest.param("sequential", marks=pytest.mark.nightly),
        "vectorized",
        pytest.param("parallel", marks=pytest.mark.nightly),
    ],
)
def test_draws_of_mcmc(method, tmp_path):
    chains = {"num_chains": 1 if method == "single" else 3}
    chains["chain_method"] = "parallel" if method == "single" else method
    fields = ("z.mu", "dynamics.momentum")
    start = {"mu": jnp.zeros((3, 3))} if method == "vectorized" else None
    plain = MCMC(kernel(), **SETTINGS | chains)
    run(plain, extra_fields=fields, init_params=start)
    mcmc = run(long_run(tmp_path / "run.zarr", **chains), extra_fields=fields, init_params=start)
    if method == "parallel":  # NumPyro's own differ by rounding from its sequential ones
        for x, y in zip(*map(jax.tree.leaves, (results(mcmc)[0], results(plain)[0])), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
    else:
        assert same(results(mcmc), results(plain))
    assert mcmc.num_samples == 110 and mcmc.get_samples()["mu"].shape[1:] == (3,)
    assert mcmc.stopped is None


@pytest.mark.nightly
def test_sites_left_out_are_in_the_moments(tmp_path):
    def two(y):
        numpyro.sample("tau", dist.HalfNormal(1.0))
        model(y)

    settings = {"num_samples": 2_000, "thinning": 1, "num_chains": 2, "chain_method": "sequential"}
    sampler = SGHMC(two, step_size=0.005, friction=20.0)
    everything = run(long_run(sampler=sampler, **settings))
    mcmc = run(
        long_run(tmp_path / "run.zarr", sampler, rank=2, **settings), extra_fields=("~z.mu",)
    )
    assert set(mcmc.get_samples()) == {"tau"}
    draws = {k: np.asarray(x, float) for k, x in everything.get_samples().items()}
    stored = xr.open_datatree(tmp_path / "run.zarr", engine="zarr")["moments"]
    for found in (mcmc.moments, stored):
        for name, x in draws.items():
            np.testing.assert_allclose(found[name].sel(statistic="mean"), x.mean(0), rtol=1e-12)
            np.testing.assert_allclose(found[name].sel(statistic="sd"), x.std(0, ddof=1))
    assert float(stored["mu"].sel(statistic="r_hat").max()) < 1.2


def test_covariance_of_low_rank():
    """A covariance of two directions and small noise is found, whatever the chunks."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(2, 30)) * np.array([[3.0], [1.0]])
    x = rng.normal(size=(3, 600, 2)) @ directions + 1e-4 * rng.normal(size=(3, 600, 30))
    found = moments.no_moments({"x": (30,)}, 3, 4)
    for chunk in np.split(x, [1, 7, 300, 301], axis=1):
        found = moments.with_draws(found, {"x": chunk})
    factors = moments.summary_of(found, {})["x_factors"].values
    inside = x - x.mean(axis=1, keepdims=True)
    covariance = np.einsum("cmi,cmj->ij", inside, inside) / (3 * 599)
    np.testing.assert_allclose(factors.T @ factors, covariance, atol=1e-6)


def test_one_program_without_data_in_it():
    mcmc = long_run()
    programs = []
    compile_ = driver.Program.compile

    def noted(self):
        programs.append(self)
        compile_(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver.Program, "compile", noted)
        run(mcmc)
    (program,) = programs
    assert program._run._cache_size() == 1
    count = np.int32(1)
    text = program._run.lower(program._data, mcmc.last_state, count, count).as_text()
    constants = [line for line in text.splitlines() if "stablehlo.constant" in line]
    assert constants and not any("tensor<100x3xf32>" in line for line in constants)
    assert "tensor<100x3xf32>" in text


@pytest.mark.slow
@ARVIZ
@pytest.mark.parametrize("seconds", [pytest.param(1e-9, marks=pytest.mark.nightly), 0.001])
def test_resumed_run_is_the_same(seconds, stopped, whole, monkeypatch):
    mcmc, folder = stopped
    assert mcmc.stopped == "interrupt"
    count = mcmc.get_samples(True)["mu"].shape[1]
    assert mcmc.num_samples == 3 * count < 110
    assert same(mcmc.get_samples(True)["mu"], whole.get_samples(True)["mu"][:, :count])
    assert to_arviz(mcmc)["posterior"].sizes["draw"] == count
    monkeypatch.setattr(running, "_SECONDS", seconds)  # other chunks
    resumed = run(long_run(folder, num_chains=2, chain_method="vectorized"))
    assert same(results(resumed), results(whole))
    xr.testing.assert_allclose(resumed.moments, whole.moments, rtol=1e-12)


@pytest.mark.nightly
def test_finished_run_is_read_and_extended(tmp_path, monkeypatch):
    folder = tmp_path / "run.zarr"
    first = run(long_run(folder))
    chunks = []
    chunk = running.Running.chunk
    monkeypatch.setattr(running.Running, "chunk", lambda *x: chunks.append(chunk(*x)))
    again = run(long_run(folder))
    assert not chunks and same(results(again), results(first))
    longer = run(long_run(folder, num_samples=140))
    assert chunks and same(results(longer), results(run(long_run(num_samples=140))))
    with pytest.raises(
        ValueError, match="already has 46 draws of each chain, more than num_samples=20"
    ):
        run(long_run(folder, num_samples=62))


@pytest.mark.nightly
def test_begin_anew_keeps_the_old(tmp_path):
    folder = tmp_path / "run.zarr"
    run(long_run(folder))
    run(long_run(folder, resume=False), key=random.key(7))
    old, new = (store.Store(tmp_path / name) for name in ("run.zarr.1", "run.zarr"))
    assert old.draws == new.draws == 36
    assert not np.array_equal(old.read("posterior/mu"), new.read("posterior/mu"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("of value")
    with pytest.raises(ValueError, match="not a store of `LongRun`"):
        run(long_run(tmp_path / "other"))


other_prior = partial(model, prior=9.0)


FOREIGN = {
    "num_warmup is 30 and was 20": ({"num_warmup": 30}, {}),
    "thinning is 2 and was 3": ({"thinning": 2}, {}),
    "different random key": ({}, {"key": random.key(2)}),
    "different data": ({}, {"y": data() + 1}),
    "latent sites is mu: float32.4.": ({}, {"y": jnp.ones((100, 4))}),
    "num_chains is 3 and was 1": ({"num_chains": 3, "chain_method": "vectorized"}, {}),
    "kernel's step_size is 0.006 and was 0.005": (
        {"sampler": SGHMC(model, step_size=0.006, friction=20.0)}, {},
    ),
    "kernel is NUTS and was SGHMC": ({"sampler": NUTS(full_data(model))}, {}),
    "log density of 'mu' is": ({"sampler": SGHMC(other_prior, step_size=0.005, friction=20.0)}, {}),
    "extra_fields is z.mu and was": ({}, {"extra_fields": ("z.mu",)}),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run.zarr"
    run(long_run(folder))
    return folder


@pytest.mark.parametrize("said", FOREIGN)
def test_other_run_is_refused(said, finished):
    changes, options = FOREIGN[said]
    if "latent" in said:
        changes = {"sampler": SGHMC(model, step_size=0.005, friction=20.0)}
    before = store.Store(finished).read("posterior/mu")
    with pytest.raises(ValueError, match=f"holds another run: .*{said}.*`resume=False`"):
        run(long_run(finished, **changes), **options)
    assert np.array_equal(store.Store(finished).read("posterior/mu"), before)


@pytest.mark.nightly
def test_another_schedule_is_refused(tmp_path):
    """Told apart by its values over the whole run, and not at a few steps of it."""

    def once_smaller(at):
        schedule = lambda i: jnp.where(i == at, 0.004, 0.005)  # noqa: E731
        return SGHMC(model, step_size=schedule, friction=20.0)

    run(long_run(tmp_path / "run.zarr", once_smaller(57)))
    with pytest.raises(ValueError, match="holds another run: different kernel's step_size"):
        run(long_run(tmp_path / "run.zarr", once_smaller(58)))
    # beyond the end of the first run it was not asked for
    extended = long_run(tmp_path / "run.zarr", once_smaller(57), num_samples=218)
    run(extended)
    assert extended.num_samples == 218


def test_damaged_checkpoint_is_refused(tmp_path):
    folder = tmp_path / "run.zarr"
    run(long_run(folder))
    file = folder / FOLDER / "checkpoint"
    content = file.read_bytes()
    flipped, now = bytearray(content), checkpoint.VERSION
    flipped[len(content) // 2] ^= 1
    for damaged, said in (
        (bytes(flipped), "is truncated or corrupted .*checksum of its member"),
        (content[:-10], "is truncated or corrupted .*not a zip file"),
        (
            archive(version=now + 1),
            rf"has version {now + 1} of the format; this is version {now}\.",
        ),
        (b"", "is not a checkpoint"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=said):
            run(long_run(folder))
    file.unlink()
    with pytest.raises(ValueError, match="36 draws, but its checkpoint .* is lost"):
        run(long_run(folder))
    file.write_bytes(content)
    store.Store(folder).publish(30)
    with pytest.raises(ValueError, match="has 30 draws .* checkpoint has 36"):
        run(long_run(folder))


@pytest.mark.nightly
@pytest.mark.parametrize("sampler", [kernel, lambda: CCAdL(model, progress_bar=False), full_nuts])
def test_a_second_run_has_the_program_of_the_first(sampler, monkeypatch):
    def made(sampler, **options):
        settings = {"num_warmup": 20, "num_samples": 30, "progress_bar": False, "num_chains": 2}
        return LongRun(sampler, chain_method="vectorized", **settings | options)

    traced, drawn = [], Program._drawn
    monkeypatch.setattr(Program, "_drawn", lambda *x: traced.append(x[0]) or drawn(*x))
    mcmc, others = made(sampler()), 1 + data()
    mcmc.run(random.key(0), data())
    mcmc.run(random.key(1), others)
    assert len(traced) == 1
    alone = made(sampler())
    alone.run(random.key(1), others)
    np.testing.assert_array_equal(mcmc.get_samples()["mu"], alone.get_samples()["mu"])
    if sampler is not full_nuts:  # which cannot be traced again by NumPyro
        mcmc.run(random.key(1), others[:-1])  # data of another shape
        mcmc.thinning = 3
        mcmc.run(random.key(1), others)
        assert len(traced) == 4


@pytest.mark.parametrize("resume", [True, False])
def test_one_writer(resume, tmp_path):
    with RunFolder(tmp_path / "run.zarr", True):
        with pytest.raises(ValueError, match="Another process is writing"):
            run(long_run(tmp_path / "run.zarr", resume=resume))
        assert os.listdir(tmp_path) == ["run.zarr"]


def test_store_that_another_process_puts_aside_just_now(tmp_path, monkeypatch):
    """Between the opening of the lock and its being held the folder gets another name."""
    folder, flock = tmp_path / "run.zarr", fcntl.flock
    with RunFolder(folder, True):
        pass

    def late(*arguments):
        folder.rename(tmp_path / "run.zarr.1")
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ValueError, match="Another process is writing"):
        with RunFolder(folder, False):
            pass


def test_file_system_without_locks(tmp_path, monkeypatch):
    def refused(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.warns(UserWarning, match="cannot lock .*run.zarr.* no other run writes into"):
        with RunFolder(tmp_path / "run.zarr", True):
            pass


@pytest.mark.slow
def test_stops(tmp_path):
    settings = {"num_samples": 10_000_000, "thinning": 1, "num_warmup": 100}
    start = time.monotonic()
    # compilation is in the budget, but there is one chunk at least
    mcmc = run(long_run(tmp_path / "run.zarr", max_time=3.0, checkpoint_every=10, **settings))
    assert mcmc.stopped == "max_time" and 3 < time.monotonic() - start < 30
    mcmc = run(long_run(target_ess=300.0, num_chains=2, chain_method="vectorized", **settings))
    assert mcmc.stopped == "target_ess"
    sizes = summary(mcmc).table["ess_bulk"].astype(float)
    # a run looks whenever it is 1.3 times as long, and chunks may be longer
    assert 300 <= sizes.min() < 30_000
    mcmc = run(long_run(target_mcse=0.05, **settings))
    assert mcmc.stopped == "target_mcse"
    with pytest.raises(ValueError, match="`target_ess` must be a positive number; got 0"):
        long_run(target_ess=0)


@pytest.mark.nightly
def test_failing_program_keeps_what_was_drawn(tmp_path):
    folder, broken = tmp_path / "run.zarr", [True]
    calls = []

    def read(rows, y):
        calls.append(1)
        if broken[0] and len(calls) > 100:
            raise OSError("row 17 of rows.bin cannot be read")
        return np.asarray(y)[np.asarray(rows)]

    def reading(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10).expand([3]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            rows = jax.pure_callback(read, jax.ShapeDtypeStruct((*i.shape, 3), y.dtype), i, y)
            numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=rows)

    def mcmc():
        calls.clear()
        return long_run(folder, SGHMC(reading, step_size=0.005, friction=20.0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_SECONDS", 1e-9)
        # which of the two depends on when the program finds out
        errors = (ValueError, jax.errors.JaxRuntimeError)
        with pytest.raises(errors, match="row 17 of rows.bin"):
            run(mcmc())
    kept = store.Store(folder).draws
    assert 0 < kept < 36
    broken[0] = False
    resumed = run(mcmc())
    plain = run(MCMC(kernel(), **SETTINGS))
    assert same(resumed.get_samples()["mu"][:kept], plain.get_samples()["mu"][:kept])
    assert resumed.get_samples()["mu"].shape == (36, 3)


@pytest.mark.one_case
@pytest.mark.parametrize("shape", [(), (3,), (40, 7), (300_000,)])
def test_store_is_zarr(shape, tmp_path):
    """What is appended in blocks, cut back and appended again is what zarr-python reads."""
    rng = np.random.default_rng(0)
    draws = 20 if len(shape) == 1 and shape[0] > 1_000 else 9_000
    values = rng.normal(size=(2, draws, *shape)).astype(np.float32)
    dims = ["chain", "draw", *(f"d{k}" for k in range(len(shape)))]
    # of a run that was killed before its first checkpoint
    store.Store(tmp_path).create({"posterior": {"x": store.variable((), bool, ["draw"], 7)}})
    written = store.Store(tmp_path)
    node = store.variable((2, *shape), np.float32, dims, draws)
    number = store.variable((), np.int64, ["draw"], draws)
    written.create({"posterior": {"x": node, "draw": number}})
    written.publish(seen := 0)
    manifest = begun = written.manifest
    for start, stop, shown in ((0, 1, 1), (1, 8, 8), (8, draws - 3, 5), (5, draws, draws)):
        new = {"posterior/x": values[:, start:stop], "posterior/draw": np.arange(start, stop)}
        appended = written.append(start, new, manifest)
        # not published yet, they are in none of the metadata
        metadata = zarr.open_group(tmp_path, mode="r", use_consolidated=False)
        assert metadata["posterior/x"].shape == (2, seen, *shape)
        written.publish(shown)
        found = zarr.open_group(tmp_path, mode="r")["posterior"]
        assert np.array_equal(found["x"][:], values[:, :shown])
        assert found["draw"].shape == (seen := shown,)
        manifest = written.append(0, {k: written.read(k) for k in begun}, begun)
        assert shown != stop or all(np.array_equal(appended[k], x) for k, x in manifest.items())
        written.publish(shown)
        written.check(manifest, shown)
    assert np.array_equal(store.Store(tmp_path).read("posterior/x"), values)
    chunk = node["chunks"]
    assert np.prod(chunk) * 4 <= 1 << 20 and (chunk[1] >= 64 or chunk[1] >= draws or shape)


@pytest.mark.parametrize("damaged, said", [(b"0123", "checksum"), (None, "No such file")])
def test_damaged_draws_are_named(damaged, said, tmp_path):
    """Draws that something else has cut off or removed are an error, and not zeros."""
    written = store.Store(tmp_path)
    written.create({"posterior": {"x": store.variable((2,), np.float32, ["chain", "draw"], 9)}})
    written.publish(0)
    written.append(0, {"posterior/x": np.ones((2, 5), np.float32)}, written.manifest)
    written.publish(5)
    (file,) = (tmp_path / "posterior" / "x" / "c").rglob("0/0")
    file.unlink() if damaged is None else file.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf"is damaged: `posterior/x.*draws 0 to 4 .*{said}"):
        store.Store(tmp_path).read("posterior/x")


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def moments_of(folder):
    return next(file for file in (folder / "moments" / "mu" / "c").rglob("*") if file.is_file())


@ARVIZ
def test_a_flipped_bit_of_the_draws_is_noticed(tmp_path):
    """By the run that has them, by one that goes on, and by other readers of Zarr."""
    folder = tmp_path / "run.zarr"
    mcmc = run(long_run(folder))
    chunk = folder / "posterior" / "mu" / "c" / "0" / "0" / "0"
    flip(chunk, 17)
    for read in (mcmc.get_samples, lambda: to_arviz(mcmc)):
        with pytest.raises(ValueError, match="is damaged: `posterior/mu.*checksum.*"):
            read()
    for samples in (110, 140):
        said = "run.zarr is damaged: `posterior/mu/c/0/0/0` .draws 0 to 35 .*checksum.*Put the file"
        with pytest.raises(ValueError, match=said):
            run(long_run(folder, num_samples=samples))
    flip(moments_of(folder), 3)
    for group in ("posterior", "moments"):
        with pytest.raises(ValueError, match="checksum"):
            xr.open_datatree(folder, engine="zarr", chunks=None)[group]["mu"].load()
    flip(chunk, 17)
    assert same(results(run(long_run(folder))), results(mcmc))


@pytest.mark.one_case
@pytest.mark.parametrize(
    "content, said",
    [
        (None, "zarr.json, which describes the store, is lost"),
        (b"", r"is damaged \(JSONDecodeError"),
        (b"[1, 2]", r"is damaged \(TypeError"),
        (b'{"zarr_format": 3, "node_type": "group"}', r"is damaged \(KeyError"),
    ],
)
def test_damaged_metadata_are_named(content, said, finished):
    file = finished / "zarr.json"
    before = file.read_bytes()
    try:
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(ValueError, match=f"{said}.*Put the file back, or begin anew"):
            run(long_run(finished))
        # what the error says of the draws is true
        with xr.open_zarr(finished / "posterior", consolidated=False) as posterior:
            assert posterior["mu"].shape == (1, 36, 3)
    finally:
        file.write_bytes(before)
    assert run(long_run(finished)).get_samples()["mu"].shape == (36, 3)


@pytest.mark.nightly
def test_lost_metadata_of_a_part_are_written_again(stopped, whole):
    _, folder = stopped
    parts = [folder / name / "zarr.json" for name in ("posterior", "posterior/mu", "moments")]
    expected = [json.loads(file.read_text()) for file in parts]
    parts[0].unlink()
    parts[1].write_text("{")
    parts[2].unlink()
    resumed = run(long_run(folder, num_chains=2, chain_method="vectorized"))
    assert same(results(resumed), results(whole))
    found = [json.loads(file.read_text()) for file in parts]
    expected[1]["shape"][1] = expected[2]["attributes"]["draws"] = 36
    assert found == expected


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["0", "zarr.json", "checkpoint"])
def test_full_disk(name, tmp_path, monkeypatch, whole):
    """Nothing that was drawn is lost, and the run goes on when there is room."""
    folder, count = tmp_path / "run.zarr", [0]
    settings = {"num_chains": 2, "chain_method": "vectorized"}
    replace = os.replace

    def full(new, file):
        count[0] += Path(file).name == name
        if count[0] > 30 and Path(file).name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(new))
        replace(new, file)

    mcmc = long_run(folder, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", full)
        patch.setattr(running, "_SECONDS", 1e-9)
        said = "store .*run.zarr cannot be written: No space .* bytes free .*same script continues"
        with pytest.raises(OSError, match=said) as caught:
            run(mcmc)
    assert caught.value.errno == errno.ENOSPC
    assert not list(folder.rglob("*.new"))
    kept = mcmc.get_samples(True)["mu"]
    assert kept.shape[1] * 3 == mcmc.num_samples > 0
    assert same(kept, whole.get_samples(True)["mu"][:, : kept.shape[1]])
    assert same(results(run(long_run(folder, **settings))), results(whole))


def test_store_that_disappears(tmp_path, monkeypatch):
    folder, seen = tmp_path / "run.zarr", []
    show = running.Running.show

    def removing(self, bar):
        seen.append(show(self, bar))
        if len(seen) == 50:
            folder.rename(tmp_path / "elsewhere")

    monkeypatch.setattr(running.Running, "show", removing)
    monkeypatch.setattr(running, "_SECONDS", 1e-9)
    mcmc = long_run(folder)
    with pytest.raises(FileNotFoundError, match="run.zarr was removed, renamed or replaced"):
        run(mcmc)
    assert os.listdir(tmp_path) == ["elsewhere"]
    with pytest.raises(ValueError, match="zarr.json, which describes the store, is lost"):
        mcmc.get_samples()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_path_of_something_else(kind, tmp_path):
    path = tmp_path / "run.zarr"
    if kind == "file":
        path.write_text("of value")
    else:
        path.mkdir()
        (path / "letter.txt").write_text("of value")
    with pytest.raises(
        ValueError, match="is a file, or a folder of other files, and not a store of `LongRun`"
    ):
        run(long_run(path))
    assert kind == "folder" or path.read_text() == "of value"


class Attack:
    """What a pickle can do to whoever opens it."""

    def __reduce__(self):
        return os.mkdir, ("attacked",)


def archive(*arrays, **changes):
    """A checkpoint that is whole, as a faulty or a hostile program would write it."""
    words = {"version": checkpoint.VERSION, "content": {"mapping": {}}, "types": []} | changes
    file = io.BytesIO()
    np.savez(file, *arrays, words=np.frombuffer(json.dumps(words).encode(), np.uint8))
    return file.getvalue()


def test_a_checkpoint_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body, file = pickle.dumps(Attack()), tmp_path / "checkpoint"
    of_objects = archive(np.array([Attack()]), types=["O"])
    for content in (body, of_objects):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="`resume=False`"):
            checkpoint.CHECKPOINT.load(file)
        assert not Path("attacked").exists()
    pickle.loads(body)  # it would have
    assert Path("attacked").exists()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"types": ["O"]}, "Cannot change data-type"),
        ({"types": []}, "argument 2 is shorter"),
        ({"content": {"record": ["Popen", {"args": "ls"}]}}, "this version does not write .*Popen"),
        ({"content": {"record": ["Monitored", {"kept": 1}]}}, "this version does not write"),
        ({"content": {"array": 7}}, "this version does not write"),
        ({"content": [[]]}, "it has no named fields"),
    ],
)
def test_a_checkpoint_that_says_something_else(change, said, tmp_path):
    (tmp_path / "checkpoint").write_bytes(archive(np.zeros(1), **{"types": ["float64"]} | change))
    with pytest.raises(ValueError, match=f"written by something else: .*{said}"):
        checkpoint.CHECKPOINT.load(tmp_path / "checkpoint")


def test_no_bit_of_a_checkpoint_changes_in_silence(tmp_path):
    """Of each byte one, in members, headers and the directory: refused, or nothing is changed."""
    file = tmp_path / "checkpoint"
    leaves = {"mu": np.arange(6.0).reshape(2, 3), "key": checkpoint.Key("rbg", np.arange(4))}
    checkpoint.CHECKPOINT.save(file, {"leaves": leaves, "draws": 3, "scale": jnp.bfloat16(0.5)})
    whole, content, refused = checkpoint.CHECKPOINT.load(file), file.read_bytes(), 0
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        try:
            equal = jax.tree.map(np.array_equal, checkpoint.CHECKPOINT.load(file), whole)
            assert jax.tree.all(equal), place
        except ValueError as error:
            assert f"{file}" in str(error) and "resume=False" in str(error)
            refused += 1
    assert refused > 0.5 * len(content)


def test_what_a_checkpoint_holds(tmp_path):
    """To the last bit: keys of both kinds, every type of numbers, what a tuning has."""
    arrays = {
        str(np.dtype(dtype)): np.arange(6).astype(dtype).reshape(2, 3)
        for dtype in (bool, np.int8, np.uint64, np.float16, np.float64, np.complex64,
                      jnp.bfloat16, jnp.float8_e4m3fn)
    }  # fmt: skip
    state = (
        {"typed": random.split(random.key(3, impl="rbg"), 2), "legacy": random.PRNGKey(3)},
        [jnp.float32(jnp.nan), jnp.zeros((0, 4)), jnp.asarray(arrays["bfloat16"])],
    )
    center, number = np.array([1 / 3, np.inf]), np.float64(0.1)
    tuning = Tuning(number, None, DiagonalMetric(center, -center), passes={"noise": 1e-300},
                    anchor=Anchor({"w": center}, center[0], {"w": center}))  # fmt: skip
    content = {"leaves": checkpoint.held(state), "tuning": tuning, "words": (True, [1, "ä"]),
               **arrays, "count": np.int64(2**62)}  # fmt: skip
    checkpoint.CHECKPOINT.save(tmp_path / "checkpoint", content)
    found = checkpoint.CHECKPOINT.load(tmp_path / "checkpoint")
    assert same(checkpoint.restored(tmp_path, found.pop("leaves"), state), state)
    assert found["tuning"] == tuning._replace(
        metric=found["tuning"].metric, anchor=found["tuning"].anchor
    )
    assert same(found["tuning"].metric, tuning.metric) and type(found["tuning"].step_size) is float
    assert same(found["tuning"].anchor.values, tuning.anchor.values)
    assert found["words"] == (True, [1, "ä"]) and found["count"] == 2**62
    for name, x in arrays.items():
        assert found[name].dtype == x.dtype and np.array_equal(found[name], x)
    with pytest.raises(TypeError, match="function cannot be stored in a file"):
        checkpoint.CHECKPOINT.save(tmp_path / "checkpoint", {"words": same})
    assert checkpoint.CHECKPOINT.load(tmp_path / "checkpoint")["count"] == 2**62


class Found(NamedTuple):
    """Of a kernel that somebody else wrote."""

    value: float


@pytest.mark.parametrize("tuning", [object(), Found(1.0), [{1: 2}]])
def test_what_could_not_be_read_is_not_written(tuning, tmp_path):
    with RunFolder(tmp_path / "run.zarr", True) as folder:
        with pytest.raises(
            ValueError,
            match="checkpoint in .* cannot be written: .* cannot be stored .* `tuning` and",
        ):
            folder.save({}, state=jnp.zeros(3), tuning=tuning)


def test_store_behind_a_link(tmp_path):
    """Its folder is renamed, and not the link."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run.zarr").symlink_to(tmp_path / "disk" / "here")
    for resume in (True, False):
        with RunFolder(tmp_path / "run.zarr", resume) as folder:
            assert folder.writes
    assert sorted(os.listdir(tmp_path / "disk")) == ["here", "here.1"]
    assert (tmp_path / "run.zarr").is_symlink()


def test_nothing_is_unpickled():
    for file in Path(driver.__file__).parents[1].rglob("*.py"):
        found = re.findall("import pickle|pickle.load|allow_pickle=True", file.read_text())
        assert not found, (file, found)


def test_missing_zarr_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    monkeypatch.delitem(sys.modules, store.__name__)
    assert long_run().stopped is None
    with pytest.raises(ImportError, match=r"pip install 'numpyro_sgmcmc\[zarr\]'"):
        long_run(tmp_path / "run.zarr")


@pytest.mark.nightly
@ARVIZ
def test_opens_in_arviz(tmp_path):
    import arviz as az

    def plates(y):
        with numpyro.plate("groups", 3):
            mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])

    sampler = SGHMC(plates, step_size=0.005, friction=20.0)
    mcmc = run(long_run(tmp_path / "run.zarr", sampler, num_chains=2, chain_method="sequential"))
    if FIRST_GENERATION:
        tree = xr.open_datatree(tmp_path / "run.zarr", engine="zarr")
        found = az.InferenceData.from_datatree(tree)
    else:
        found = az.from_zarr(tmp_path / "run.zarr")
    expected = to_arviz(mcmc)
    for group in ("posterior", "sample_stats"):
        for name, x in expected[group].data_vars.items():
            assert found[group][name].dims == x.dims
            assert np.array_equal(found[group][name], x, equal_nan=True)
    assert found["posterior"]["mu"].dims == ("chain", "draw", "groups")
    assert found.attrs["algorithm"] == "SGHMC" and found.attrs["thinning"] == 3
    assert az.ess(found)["mu"].shape == (3,)
    assert az.from_numpyro(mcmc, log_likelihood=False)["posterior"].sizes["draw"] == 36
    assert "mu[0]" in summary(mcmc).table.index


@pytest.mark.nightly
def test_warmup_then_run(tmp_path):
    plain, mcmc = MCMC(kernel(), **SETTINGS), long_run(tmp_path / "run.zarr")
    for each in (plain, mcmc):
        each.warmup(KEY, data())
        run(each, key=random.key(3))
    assert same(results(mcmc), results(plain))
    again = pickle.loads(pickle.dumps(mcmc))
    assert same(again.get_samples(), plain.get_samples())


def test_monitored_draws_are_few():
    """Of a long run every so many draws are kept, and their size is that of all."""
    rng = np.random.default_rng(0)
    x = np.zeros((2, 60_000, 150))
    noise = rng.normal(size=x.shape)
    for k in range(1, x.shape[1]):
        x[:, k] = 0.98 * x[:, k - 1] + noise[:, k]  # an effective draw in 99
    where = effective_size.places({"x": (150,)})
    assert len(where["x"]) == 100
    found = None
    for chunk in np.split(x, [3, 1_000, 30_001], axis=1):
        found = effective_size.with_draws(found, {"x": chunk}, where)
    assert found.kept.shape[1] <= 20_000 and found.seen == 60_000
    assert np.array_equal(found.kept[:, :, 0], x[:, :: found.stride, 0].astype(np.float32))
    assert 600 < effective_size.least_size(found, "bulk") < 1_212


def test_warns_of_another_law():
    """The verdict of the kernel reaches the user: in this run the noise is not corrected for."""
    settings = SETTINGS | {"num_samples": 6_000, "num_chains": 2, "chain_method": "vectorized"}
    with pytest.warns(UserWarning, match="The draws do not have the law of the posterior"):
        run(long_run(sampler=SGHMC(model, step_size=0.03, friction=5.0), **settings))


def test_callable_chain_method_is_refused():
    with pytest.raises(ValueError, match="`chain_method` must be one of 'sequential'"):
        long_run(chain_method=jax.vmap)


@pytest.mark.nightly
def test_resumed_run_is_not_tuned_again(tmp_path, monkeypatch, request):
    # without optimisations the two loops differ in the last bit
    jax.config.update("jax_disable_most_optimizations", False)
    request.addfinalizer(lambda: jax.config.update("jax_disable_most_optimizations", True))
    folder = tmp_path / "run.zarr"
    settings = {"num_chains": 2, "chain_method": "vectorized", "thinning": 1}
    wholly = run(MCMC(CCAdL(model, progress_bar=False), **SETTINGS | settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_SECONDS", 1e-9)
        interrupt_after(patch, 60)
        with pytest.warns(UserWarning, match="interrupted"):
            run(long_run(folder, CCAdL(model, progress_bar=False), **settings))
    monkeypatch.setattr("numpyro_sgmcmc.kernels.self_tuning.new_tuning", None)
    resumed = run(long_run(folder, CCAdL(model, progress_bar=False), **settings))
    assert same(results(resumed), results(wholly))
    assert resumed.sampler.tuning.steps_per_sample == wholly.sampler.tuning.steps_per_sample


CHILD = Path(__file__).parents[1] / "support" / "long_run.py"


class Child(subprocess.Popen):
    """A process that does not outlive the test."""

    def __exit__(self, *error):
        self.kill()
        super().__exit__(*error)


def child(folder, *options, cache, samples=20_000, **pipes):
    return Child(
        [sys.executable, CHILD, folder, str(samples), "flush=0", *options],
        stdout=subprocess.PIPE, text=True,
        env=os.environ | {"LONG_RUN_CACHE": str(cache), "XLA_FLAGS": ""}, **pipes,
    )  # fmt: skip


def waits_for(process, word):
    for line in process.stdout:
        if line.startswith(word):
            return True
    return False


@pytest.mark.nightly
def test_kills(tmp_path):
    """Killed at random moments and in the middle of writes, a run loses and doubles nothing."""
    settings = {"cache": tmp_path / "cache", "samples": 60_000}
    with child(tmp_path / "whole.zarr", **settings) as whole:
        assert waits_for(whole, "done") and whole.wait() == 0
    folder, draws, rng = tmp_path / "killed.zarr", [0], python_random.Random(0)
    for option in ("", "hang=checkpoint:3", "", "hang=zarr.json:20", "hang=0:30"):
        options = ["seconds=0.002", option] if option else ["seconds=0.002"]
        with child(folder, *options, **settings) as process:
            assert waits_for(process, "hangs" if option else "begins")
            while not option and process.poll() is None and store.Store(folder).draws == draws[-1]:
                time.sleep(0.01)
            time.sleep(0 if option else 0.1 * rng.random())
            assert process.poll() is None, "the run has ended before"
            process.kill()
        draws.append(store.Store(folder).draws)
    assert len(set(draws)) > 2, draws
    with child(folder, **settings) as process:
        assert waits_for(process, "done") and process.wait() == 0
    one, other = (store.Store(tmp_path / name) for name in ("whole.zarr", "killed.zarr"))
    for name in one.nodes:
        if "/" in name and not name.startswith("moments"):
            x, y = one.read(name), other.read(name)
            assert np.array_equal(x, y, equal_nan=x.dtype.kind == "f"), name
    assert np.array_equal(one.read("posterior/draw"), np.arange(30_000))


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_kills_of_a_run_whose_rows_keep_coming(place, tmp_path):
    """Ten times, before and after rows have come: the draws are those of an unbroken run."""
    y = 1 + np.random.default_rng(0).standard_normal((1_000, 3), np.float32)
    rng, rows = python_random.Random(1), tmp_path / "rows"
    rows.mkdir()
    draws = 0
    for k, (first, count) in enumerate(((0, 300), (300, 500))):
        np.save(rows / f"{k}.npy", y[first:count])
        options = [f"rows={rows if place == 'disk' else place}", f"count={count}"]
        settings = {"cache": tmp_path / "cache", "samples": 20_000 * (k + 1)}
        with child(tmp_path / "whole.zarr", *options, **settings) as whole:
            assert waits_for(whole, "done") and whole.wait() == 0
        folder, kills = tmp_path / "killed.zarr", 0
        while kills < 5:
            with child(folder, *options, "seconds=0.002", **settings) as process:
                assert waits_for(process, "begins")
                while process.poll() is None and stored(folder) <= draws:
                    time.sleep(0.01)
                time.sleep(0.1 * rng.random())
                assert process.poll() is None, "the run has ended before"
                process.kill()
            draws, kills = stored(folder), kills + 1
        with child(folder, *options, **settings) as process:
            assert waits_for(process, "done") and process.wait() == 0
        draws = stored(folder)
        assert draws == 10_000 * (k + 1)
        one, other = (store.Store(tmp_path / name) for name in ("whole.zarr", "killed.zarr"))
        for name in ("posterior/mu", "sample_stats/rows", "sample_stats/diverging"):
            np.testing.assert_array_equal(one.read(name), other.read(name), name)
    assert set(np.unique(one.read("sample_stats/rows"))) == {300, 500}


def stored(folder):
    """The draws that a store has, of which there may be none yet."""
    return store.Store(folder).draws if (folder / "zarr.json").exists() else 0


@pytest.mark.nightly
def test_reader_sees_complete_draws(tmp_path):
    """Another process reads while the run writes: all variables have the same, complete draws."""
    seen = []
    with child(tmp_path / "run.zarr", cache=tmp_path / "cache") as process:
        waits_for(process, "begins")
        while process.poll() is None:
            time.sleep(0.1)
            if not (tmp_path / "run.zarr" / "zarr.json").exists():
                continue
            with xr.open_datatree(tmp_path / "run.zarr", engine="zarr", chunks=None) as tree:
                posterior, stats = tree["posterior"].load(), tree["sample_stats"].load()
            count = posterior.sizes["draw"]
            assert stats.sizes["draw"] == count
            assert np.array_equal(posterior["draw"], np.arange(count))
            # what has not been written is zero
            assert np.all(posterior["mu"] != 0) and np.all(stats["z.mu"] != 0)
            assert np.array_equal(posterior["mu"], stats["z.mu"])
            seen.append(count)
    assert process.returncode == 0 and len(set(seen)) > 3


@pytest.mark.nightly
@pytest.mark.parametrize("failing", [True, False])
def test_a_process_that_fails_or_dies_ends_the_others(failing, tmp_path):
    """By JAX, within the seconds that `jax.distributed.initialize` was given."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    folder, settings = tmp_path / "run.zarr", {"cache": tmp_path / "cache", "samples": 10_000_000}
    fails = ["fail=40"] if failing else []
    with (
        child(folder, f"process=0:{port}", stderr=subprocess.PIPE, **settings) as first,
        child(folder, f"process=1:{port}", *fails, stderr=subprocess.PIPE, **settings) as second,
    ):
        if not failing:
            while not stored(folder):
                time.sleep(0.1)
            second.kill()
        _, errors = second.communicate(timeout=120)
        assert ("OSError: row 17 of rows.bin cannot be read" in errors) == failing
        assert first.wait(timeout=60) != 0
    kept = store.Store(folder).draws
    assert checkpoint.CHECKPOINT.load(folder / FOLDER / "checkpoint")["draws"] == kept > 0
