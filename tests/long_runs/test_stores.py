# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Nothing of a store is believed unchecked, and no file outside of it is touched."""

from itertools import combinations
import os
from pathlib import Path
import shutil
import signal
import socket

import jax
from jax import random
import jax.numpy as jnp
from long_run import data, kernel
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr

from numpyro_sgmcmc import SGHMC, CCAdL, LongRun
from numpyro_sgmcmc.data.fingerprint import fingerprint_of_program
from numpyro_sgmcmc.long_runs import checkpoint, running, store
from numpyro_sgmcmc.long_runs.folder import FOLDER

COMPILE_QUICKLY = True

KEY = random.key(1)


def long_run(path, sampler=None, **changes):
    settings = {"num_warmup": 20, "num_samples": 35, "progress_bar": False}
    return LongRun(sampler or kernel(), **settings | {"store": path} | changes)


def run(mcmc):
    mcmc.run(KEY, data(), extra_fields=("z.mu",))
    return mcmc


def results(mcmc):
    found = drawn(mcmc) | {f"moments/{name}": x for name, x in mcmc.moments.items()}
    return {name: np.asarray(x) for name, x in found.items()}


def drawn(mcmc):
    found = (mcmc.get_samples(True), mcmc.get_extra_fields(True))
    return {
        f"{k}/{name}": np.asarray(x) for k, each in enumerate(found) for name, x in each.items()
    }


def are_same(one, other):
    """To the last bit; moments, which depend on how draws are divided, up to rounding."""

    def is_same(name, x, y):
        if "moments" in name and x.dtype.kind == "f":
            return np.allclose(x, y, rtol=1e-5, atol=1e-5, equal_nan=True)
        return np.array_equal(x, y, equal_nan=x.dtype.kind == "f")

    return one.keys() == other.keys() and all(is_same(k, x, other[k]) for k, x in one.items())


def files_in(folder):
    return sorted(str(x.relative_to(folder)) for x in folder.rglob("*") if not x.is_dir())


class Runs:
    """A run that was interrupted twice, and then went on to its end."""

    def __init__(self, folder):
        self.folder, self.sampler = folder / "run.zarr", kernel()
        self.older, self.unfinished = folder / "older", folder / "unfinished"
        for draws, kept in ((12, self.older), (25, self.unfinished)):
            self.interrupted_at(draws)
            shutil.copytree(self.folder, kept)
        self.mcmc = self.again()
        self.results, self.read = results(self.mcmc), self.as_read()
        self.finished = folder / "finished"
        shutil.copytree(self.folder, self.finished)

    def interrupted_at(self, draws):
        show = running.Running.show

        def interrupting(self, bar):
            show(self, bar)
            if self.draws.count == draws:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(running.Running, "show", interrupting)
            patch.setattr(running, "_SECONDS", 1e-9)  # a chunk is a sample
            with pytest.warns(UserWarning, match="interrupted"):
                self.again()

    def again(self, **changes):
        return run(long_run(self.folder, self.sampler, **changes))

    def as_read(self):
        """What any other reader of Zarr finds."""
        with xr.open_datatree(self.folder, engine="zarr", chunks=None) as tree:
            found = {name: np.asarray(x) for g in tree.subtree for name, x in _values(g)}
            attributes = {k: np.asarray(v) for k, v in tree.attrs.items() if k != "sampling_time"}
        return found | attributes

    def put_back(self, kept):
        shutil.rmtree(self.folder)
        shutil.copytree(kept, self.folder)


def _values(group):
    return [(f"{group.path}/{name}", x) for name, x in group.variables.items()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_MOST_DRAWS", 20)  # so that there are several chunks
        yield Runs(tmp_path_factory.mktemp("runs"))


def flipped(place):
    def flip(file):
        content = bytearray(file.read_bytes())
        if content:
            content[int(place * (len(content) - 1))] ^= 1
        file.write_bytes(content)

    return flip


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def a_folder(file):
    file.unlink()
    file.mkdir()


def a_pipe(file):
    file.unlink()
    os.mkfifo(file)


def a_socket(file):
    file.unlink()
    here = os.getcwd()
    os.chdir(file.parent)  # a name may have a hundred letters
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(file.name)
    finally:
        os.chdir(here)


OF_A_FILE = {
    **{f"flipped at {place}": flipped(place) for place in (0.0, 0.31, 0.64, 1.0)},
    "cut": cut,
    "empty": lambda file: file.write_bytes(b""),
    "deleted": Path.unlink,
    "a folder": a_folder,
    "a pipe": a_pipe,
    "a socket": a_socket,
}


def mutations(folder, older):
    """What may become of the files of a store, by its name."""
    names = files_in(folder)
    for name in names:
        for kind, change in OF_A_FILE.items():
            yield f"{name} {kind}", lambda name=name, change=change: change(folder / name)
        if (older / name).is_file():
            yield f"{name} of before", lambda name=name: shutil.copy(older / name, folder / name)
    for one, other in combinations([x for x in names if not x.startswith(FOLDER)], 2):
        if one.endswith("zarr.json") == other.endswith("zarr.json"):

            def exchanged(one=one, other=other):
                spare = folder.with_name("spare")
                (folder / one).rename(spare)
                (folder / other).rename(folder / one)
                spare.rename(folder / other)

            yield f"{one} and {other} exchanged", exchanged


def outcome(runs, act):
    """None if an action gives what it should; else the error, which must say enough."""
    try:
        found = act()
    except (ValueError, OSError) as error:
        text = str(error)
        assert str(runs.folder) in text, f"does not name the store: {error!r}"
        remedies = ("resume=False", "remove it", "is mended", "another path")
        assert any(x in text for x in remedies), f"does not name a remedy: {error!r}"
        return text
    assert are_same(found, runs.results), "other draws, and nothing is said"
    return None


def told_of(runs):
    """Whether a mutation is refused by whoever reads and whoever goes on, or does no harm."""

    outcome(runs, lambda: runs.results | drawn(runs.mcmc))
    told = outcome(runs, lambda: results(runs.again()))
    if told is None:  # mended, or of no importance: then for other readers too
        assert are_same(runs.as_read(), runs.read), "other readers find something else"
    return told


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kept, every",
    [
        ("finished", 173),
        ("unfinished", 331),
        pytest.param("finished", 1, marks=pytest.mark.nightly),
        pytest.param("unfinished", 7, marks=pytest.mark.nightly),
    ],
)
def test_mutations(kept, every, runs):
    """Files flipped, cut, deleted, exchanged, of before: none is believed, and none ends raw."""

    def waits(*_):
        raise TimeoutError("waits for ever")

    signal.signal(signal.SIGALRM, waits)
    wrong, refused = {}, 0
    before = getattr(runs, kept)
    runs.put_back(before)
    names = [name for name, _ in mutations(runs.folder, runs.older)]
    for name in names[::every]:
        runs.put_back(before)
        dict(mutations(runs.folder, runs.older))[name]()
        signal.alarm(60)
        try:
            refused += told_of(runs) is not None
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
        signal.alarm(0)
    print(len(names[::every]), "mutations,", refused, "refused")
    assert not wrong, "\n".join(f"{k}: {v[:600]}" for k, v in wrong.items())
    assert len(names) > 200 and refused


def late(change=None, rows=250):
    """Models that differ in later rows only, or in what they make of them."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", len(y), subsample_size=20) as i:
            mean = mu if change is None else change(mu, i)
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    return SGHMC(model, step_size=0.001, friction=20.0, progress_bar=False)


LATE = {
    "a shift of later rows": lambda mu, i: mu + 2.0 * (i >= 250),
    "a shift of very few rows": lambda mu, i: mu + 2.0 * (i == 377),
    "far from here only": lambda mu, i: mu + jnp.where(mu > 40.0, 1.0, 0.0),
    "another number": lambda mu, i: mu + 1e-7 * (i >= 250),
    "another scale of late rows": lambda mu, i: mu * jnp.where(i > 450, 1.001, 1.0),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun") / "run.zarr"
    y = jnp.asarray(np.random.default_rng(0).standard_normal(500), jnp.float32)
    long_run(folder, late()).run(KEY, y)
    return folder, y


@pytest.mark.nightly
@pytest.mark.parametrize("change", LATE)
def test_another_model_of_later_rows_is_refused(change, begun):
    folder, y = begun
    with pytest.raises(ValueError, match="holds another run: .*different program of the model"):
        long_run(folder, late(LATE[change]), num_samples=70).run(KEY, y)


def test_the_density_of_later_rows_tells_models_apart(begun):
    """By itself, as of other versions of JAX the programs are not compared."""
    folder, y = begun
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpyro, "__version__", "another")
        with pytest.raises(ValueError, match="another run: log density of 'y.*") as caught:
            long_run(folder, late(LATE["a shift of later rows"]), num_samples=70).run(KEY, y)
        assert "program" not in str(caught.value)
        again = long_run(folder, late(), num_samples=40)
        again.run(KEY, y)
    assert again.num_samples == 40


@pytest.mark.parametrize(
    "name, said",
    [
        (
            "posterior/mu/c/0/0/0 of before",
            "`posterior/mu/c/0/0/0` .draws 0 to 19 of each chain.: differs",
        ),
        ("posterior/mu/c/0/0/0 and posterior/mu/c/0/1/0 exchanged", "draws 20 to 34 of each chain"),
        ("posterior/chain/c/0 deleted", "`posterior/chain/c/0` .coordinates.: FileNotFoundError"),
        (
            "posterior/mu/c/0/1/0 a pipe",
            "draws 20 to 34 of each chain.*it is not a file: remove it",
        ),
        (f"{FOLDER}/lock a pipe", "cannot be written: it is not a file: remove it"),
        (f"{FOLDER}/checkpoint a socket", "cannot be read: .*it is not a file: remove it"),
        ("moments/mu/zarr.json a pipe", "cannot be written: it is not a file: remove it"),
    ],
)
def test_what_does_not_fit_is_named(name, said, runs):
    runs.put_back(runs.finished)
    dict(mutations(runs.folder, runs.older))[name]()
    with pytest.raises((ValueError, OSError), match=said):
        runs.again()
    if name.startswith("posterior/mu"):
        with pytest.raises(ValueError, match=said):
            runs.mcmc.get_samples()


def test_two_sites_exchanged(tmp_path):
    written = store.Store(tmp_path)
    node = store.variable((2, 3), np.float32, ["chain", "draw", "d"], 100)
    written.create({"posterior": {"x": node, "y": node}})
    written.publish(0)
    x = np.random.default_rng(0).standard_normal((2, 2, 70, 3)).astype(np.float32)
    manifest = written.append(0, {"posterior/x": x[0], "posterior/y": x[1]}, written.manifest)
    written.publish(70)
    written.check(manifest, 70)
    one, other, spare = (tmp_path / "posterior" / name for name in ("x", "y", "z"))
    one.rename(spare), other.rename(one), spare.rename(other)
    with pytest.raises(ValueError, match="posterior/x/c/0/0/0` .draws 0 to .*`posterior/y/c/0/0"):
        store.Store(tmp_path).check(manifest, 70)
    with pytest.raises(ValueError, match="differs from what the run wrote.*none of it is used"):
        store.Store(tmp_path).read("posterior/x", manifest, 70)


LINKED = (
    f"{FOLDER}/lock", f"{FOLDER}/checkpoint.new", "zarr.json.new", "posterior/mu/c/0/1/0.new",
    "posterior/mu/c/0/1/0", FOLDER, "posterior/mu/c",
)  # fmt: skip
MORE_LINKED = (
    f"{FOLDER}/lock.new", f"{FOLDER}/checkpoint", "zarr.json", "posterior/mu/zarr.json.new",
    "posterior/draw/c/1.new", "moments/mu/c/0/0", "moments/mu/c/0/0.new", "posterior", "moments",
)  # fmt: skip
FOLDERS = (FOLDER, "posterior/mu/c", "posterior", "moments")


@pytest.mark.parametrize("resume", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name", [*LINKED, *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE_LINKED)]
)
def test_links_are_not_followed(name, resume, runs, tmp_path):
    """What they lead to is neither read, nor emptied, written over or renamed."""
    runs.put_back(runs.unfinished)
    file, outside = runs.folder / name, tmp_path / "of value"
    if name in FOLDERS:
        shutil.move(file, outside)
    else:
        outside.write_text("of value")
        file.unlink(missing_ok=True)
    file.symlink_to(outside)
    before = {x: (tmp_path / x).read_bytes() for x in files_in(tmp_path)}
    told = outcome(runs, lambda: results(runs.again(resume=resume)))
    assert {x: (tmp_path / x).read_bytes() for x in files_in(tmp_path)} == before
    is_looked_at = resume and name != f"{FOLDER}/lock.new" or name in (FOLDER, f"{FOLDER}/lock")
    assert (told is not None) == is_looked_at
    shutil.rmtree(f"{runs.folder}.1", ignore_errors=True)


def test_a_lock_is_not_emptied(runs):
    runs.put_back(runs.finished)
    (runs.folder / FOLDER / "lock").write_text("of value")
    assert are_same(results(runs.again()), runs.results)
    assert (runs.folder / FOLDER / "lock").read_text() == "of value"


@pytest.mark.parametrize("path", ["", b"run.zarr", 3, True, ["run.zarr"]])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(ValueError, match="`store` must be a path"):
        long_run(path, resume=False)


@pytest.mark.parametrize("kind", ["here", "folder", "hidden", "linked", "file", "pipe", "socket"])
def test_what_is_no_store_is_not_renamed(kind, tmp_path, monkeypatch):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "letter.txt").write_text("of value")
    if kind == "hidden":
        (path / FOLDER).mkdir()
    elif kind == "linked":
        (tmp_path / "other" / FOLDER).mkdir(parents=True)
        (tmp_path / "other" / FOLDER / "lock").write_text("")
        (path / FOLDER).symlink_to(tmp_path / "other" / FOLDER)
    elif kind == "here":
        monkeypatch.chdir(path)
        path = "."
    elif kind != "folder":
        path = path / "letter.txt"
        {"file": Path.touch, "pipe": a_pipe, "socket": a_socket}[kind](path)
    before = sorted(tmp_path.rglob("*"))
    for resume in (False, True):
        with pytest.raises(ValueError, match="and not a store of `LongRun`.*Nothing there is ren"):
            run(long_run(path, resume=resume))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("resume", [False, True])
def test_an_empty_folder_becomes_a_store(resume, tmp_path):
    run(long_run(tmp_path, resume=resume))
    assert (
        store.Store(tmp_path).draws == 35 and not tmp_path.with_name(f"{tmp_path.name}.1").exists()
    )


@pytest.mark.parametrize(
    "seconds", [-1, -1e-9, np.nan, np.inf, -np.inf, "10", None, True, [10], 1j, np.ones(1)]
)
def test_seconds_between_checkpoints(seconds):
    with pytest.raises(
        ValueError, match="`checkpoint_every` must be a positive finite number or zero"
    ):
        long_run(None, checkpoint_every=seconds)


@pytest.mark.parametrize("seconds", [1, 1e-9, np.float32(2.5), np.int64(3)])
def test_numbers_of_numpy_are_numbers(seconds):
    long_run(None, checkpoint_every=seconds)


OTHERS = [None, True, -1, 2**70, 1.5, float("nan"), "x", [], [1], {}, {"x": 1}, (1,),
          np.zeros((2, 2)), np.arange(3)]  # fmt: skip


def others_of(content, path=()):
    """Contents of a checkpoint without one of its parts, or with another one in its place."""
    for name in content:
        without = {k: x for k, x in content.items() if k != name}
        yield (*path, name, "missing"), without
        value = content[name]
        others = list(OTHERS)
        if isinstance(value, np.ndarray):
            others += [value[None], value.astype("c8"), np.ravel(value)[:0]]
        if hasattr(value, "_asdict"):
            fields = type(value)._fields
            others += [value._replace(**{k: x}) for k in fields for x in OTHERS[::3]]
        for k, other in enumerate(others):
            yield (*path, name, k), content | {name: other}
        if isinstance(value, dict):
            for words, changed in others_of(value, (*path, name)):
                yield words, content | {name: changed}
    yield (*path, "more"), content | {"more": 1}


@pytest.mark.nightly
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), 97])
def test_checkpoints_of_other_content(every, runs):
    """With a right checksum, as another program would write them: a sentence, or no harm."""
    wrong, told = {}, 0
    file = runs.folder / FOLDER / "checkpoint"
    runs.put_back(runs.finished)
    content = checkpoint.CHECKPOINT.load(file)
    for words, changed in list(others_of(content))[::every]:
        runs.put_back(runs.finished)
        checkpoint.CHECKPOINT.save(file, changed)
        try:
            told += outcome(runs, lambda: results(runs.again())) is not None
        except Exception as error:
            wrong[words] = f"{type(error).__name__}: {error}"
    assert not wrong, "\n".join(f"{k}: {v[:400]}" for k, v in wrong.items())
    assert told


@pytest.mark.nightly
def test_a_store_of_rows_that_are_not_drawn_alike(tmp_path):
    """What the tuning has found of them goes to the checkpoint, and comes back."""
    y = jnp.asarray(np.random.default_rng(0).standard_normal(2_000), jnp.float32)
    strata = np.arange(2_000) % 2

    def drawn(path, samples):
        sampler = CCAdL(late().method.model, subsampling=strata, progress_bar=False)
        mcmc = long_run(path, sampler, num_samples=samples)
        mcmc.run(KEY, y)
        return mcmc.get_samples()["mu"]

    drawn(tmp_path / "run.zarr", 20)
    assert np.array_equal(drawn(tmp_path / "run.zarr", 40), drawn(None, 40))


def test_numbers_that_a_program_has_from_elsewhere_are_of_it():
    def at(k):
        return fingerprint_of_program(jax.make_jaxpr(lambda x: x.at[k].add(1.0))(jnp.zeros(5)))

    for kind in (int, np.int32, jnp.int32):
        assert at(kind(3)) == at(kind(3)) != at(kind(4))


def test_a_store_at_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert long_run("~/run.zarr")._path == tmp_path / "run.zarr"
