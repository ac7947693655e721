# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Tunings in files, and folders of them: found for their model and data, and for no others."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
from jax import random
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform, init_to_value
import optax
import pytest
from runs import run_mcmc
from small_models import linear, means

from numpyro_sgmcmc import SGHMC, SGLD, CCAdL, GrowingRows, Tuning
from numpyro_sgmcmc.data.archive import Archive
from numpyro_sgmcmc.data.fingerprint import description_of, fingerprint_of, fingerprint_of_code
from numpyro_sgmcmc.kernels import runtime, self_tuning
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.tuning import tuning as of_tuning


def data(seed=0, size=2_000, shift=0.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 3)).astype(np.float32)
    return x, (x @ [1.0, 0.5, 0.0] + shift + rng.normal(size=size)).astype(np.float32)


def hierarchy(group, y, batch_size=50):
    """Effects with a scale, which have coordinates of their own."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    with numpyro.plate("groups", 10):
        effect = numpyro.sample("effect", dist.Normal(mu, sd))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(effect[group[i]], 1), obs=y[i])


def grouped():
    rng = np.random.default_rng(1)
    group = rng.integers(10, size=1_000)
    return group, (rng.normal(size=10)[group] + rng.normal(size=1_000)).astype(np.float32)


def rare(x, y):
    """A column that few rows have, for which rows are drawn in strata."""
    w = numpyro.sample("w", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=50) as i:
        numpyro.sample("y", dist.Bernoulli(logits=w[0] + w[1] * x[i]), obs=y[i])


def few():
    rng = np.random.default_rng(2)
    x = (rng.random(4_000) < 0.005).astype(np.float32)
    return x, (rng.random(4_000) < 1 / (1 + np.exp(-x))).astype(np.float32)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kernel, arguments, part",
    [
        (CCAdL(partial(linear, batch_size=50), progress_bar=False), data(), "anchor"),
        (SGLD(partial(linear, batch_size=50), progress_bar=False), data(), "report"),
        (CCAdL(linear, metric="diagonal", progress_bar=False), data(), "noise"),
        (CCAdL(hierarchy, progress_bar=False), grouped(), "centring"),
        (CCAdL(rare, subsampling=few()[0].astype(int), progress_bar=False), few(), "strata"),
    ],
    ids=["ccadl", "sgld", "diagonal", "hierarchy", "rare"],
)
def test_a_file_has_all_of_a_tuning(kernel, arguments, part, tmp_path):
    found = kernel.tune(random.key(0), *arguments)
    assert getattr(found, part)
    found.save(tmp_path / "tuning.npz")
    read = Tuning.load(str(tmp_path / "tuning.npz"))
    leaves, tree = jax.tree.flatten(found)
    others, same = jax.tree.flatten(read)
    assert tree == same and str(read) == str(found)
    for one, other in zip(leaves, others, strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(one, other)
    given = ({"metric": None, "tuning": t} for t in (found, read))
    method = kernel.method
    first, second = (run_mcmc(type(kernel)(method.model, **x), *arguments) for x in given)
    for name, draws in first.get_samples().items():
        np.testing.assert_array_equal(draws, second.get_samples()[name])


def forbidden(*args, **options):
    raise AssertionError("it was to be found in the folder")


def tuned(folder, arguments, model=linear, kernel=CCAdL, **options):
    """A run of a new kernel with a folder of tunings."""
    kernel = kernel(partial(model, batch_size=50), tuning=folder, progress_bar=False, **options)
    return run_mcmc(kernel, *arguments)


@pytest.mark.slow
def test_a_kept_tuning_is_used(tmp_path, monkeypatch):
    first = tuned(tmp_path / "new" / "folder", data())
    (file,) = (tmp_path / "new" / "folder").iterdir()
    monkeypatch.setattr(self_tuning, "run_phases", forbidden)
    monkeypatch.setattr(runtime, "check_rows", forbidden)
    second = tuned(str(file.parent), data())
    np.testing.assert_array_equal(first.get_samples()["w"], second.get_samples()["w"])
    assert second.sampler.tuning.densities == first.sampler.tuning.densities
    with pytest.raises(AssertionError, match="found in the folder"):
        second.sampler.tune(random.key(1), *data())  # asked for, it is a new one


@pytest.mark.nightly
@pytest.mark.parametrize(
    "change",
    [
        {"model": partial(linear, prior=1.5)},
        {"gradient": "minibatch"},
        {"temperature": 1.1},
        {"kernel": SGHMC},
        {"arguments": data(size=1_999)},
        {"arguments": data(seed=1)},
        {"arguments": (data()[0], np.append(data()[1][:-1], np.float32(0.1)))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_no_other_run_uses_it(change, tmp_path, monkeypatch):
    tuned(tmp_path, data())
    monkeypatch.setattr(self_tuning, "run_phases", forbidden)
    with pytest.raises(AssertionError, match="found in the folder"):
        tuned(**{"folder": tmp_path, "arguments": data()} | change)


class Weighted(dist.Normal):
    """A normal distribution whose density has an array that its values do not show."""

    def __init__(self, weights):
        super().__init__(0.0, np.ones(3, np.float32))
        self.weights = weights

    def log_prob(self, value):
        return self.weights * super().log_prob(value)


def captures(name, value):
    """A model of three means that captures an array, a key or a bound."""

    def model(y, batch_size):
        prior = Weighted(value if name == "density" else np.ones(3, np.float32))
        if name == "bound":
            prior = dist.ImproperUniform(dist.constraints.interval(-value, value), (3,), ())
        w = numpyro.sample("w", prior.to_event(1) if name != "bound" else prior)
        if name == "key":
            w = w + random.normal(value, (3,))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            law = dist.Normal(w, 1).to_event(1)
            with numpyro.handlers.mask(mask=value[0] > 1 if name == "mask" else True):
                numpyro.sample("y", law, obs=y[i])

    return model


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, one, other",
    [
        ("density", np.ones(3, "f4"), np.array([1, 1, 9], "f4")),
        ("bound", np.full(3, 9, "f4"), np.full(3, 8, "f4")),
        ("key", random.key(0), random.key(1)),
        ("mask", np.ones(3, "f4"), np.full(3, 2, "f4")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_captured_values_belong_to_a_model(name, one, other, tmp_path, monkeypatch):
    y = (np.random.default_rng(0).normal(size=(500, 3)).astype("f4"),)
    tuned(tmp_path, y, captures(name, one))
    monkeypatch.setattr(self_tuning, "run_phases", forbidden)
    tuned(tmp_path, y, captures(name, one))
    with pytest.raises(AssertionError, match="found in the folder"):
        tuned(tmp_path, y, captures(name, other))


def method_of(step):
    class Method(CCAdL.Method):
        def suggest(self, noise):
            return step, 1.0

    return Method


def decaying(rate):
    return lambda step: 0.1 * rate**step


class Initial:
    """Initial values of an own class that refers to itself."""

    def __init__(self, value):
        self.value, self.own = value, self

    def __call__(self, site=None):
        return self.value


def in_turn(last):
    return partial(max, 1.0, 2.0, last)


@pytest.mark.parametrize(
    "made, values",
    [
        (lambda x: init_to_value(values={"w": x}), (1.0, 2.0)),
        (lambda x: init_to_uniform(radius=x), (1.0, 2.0)),
        (decaying, (0.5, 0.4)),
        (lambda x: optax.exponential_decay(0.1, 100, x), (0.5, 0.4)),
        (in_turn, (1.0, 2.0)),
        (Initial, (0.1, 0.2)),
        (method_of, (0.1, 0.2)),
    ],
    ids=["values", "radius", "schedule", "optax", "again", "class", "method"],
)
def test_functions_are_known_by_what_they_do(made, values):
    one, again, other = (fingerprint_of_code(made(x)) for x in (values[0], *values))
    assert one == again != other


def test_numbers_and_names_are_kept_apart():
    assert fingerprint_of((1, 23), {}) != fingerprint_of((12, 3), {})
    assert description_of({"a": np.ones(2)}) != description_of({"b": np.ones(2)})


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*cannot be used")
def test_a_file_under_another_name_is_not_used(tmp_path, monkeypatch):
    tuned(tmp_path / "one", data())
    tuned(tmp_path / "two", data(), partial(linear, prior=1.5))
    tuned(tmp_path / "three", data(seed=1))
    (own,), (prior,), (other,) = (list((tmp_path / x).iterdir()) for x in ("one", "two", "three"))
    right = Tuning.load(own)
    monkeypatch.setattr(self_tuning, "run_phases", forbidden)
    narrow = right.start._replace(center=right.start.center[:1])
    for wrong in (Tuning.load(prior), Tuning.load(other), right._replace(start=narrow)):
        wrong.save(own)
        with (
            pytest.warns(UserWarning, match="another model or of other data|number of parameters"),
            pytest.raises(AssertionError, match="found in the folder"),
        ):
            tuned(tmp_path / "one", data())
    with pytest.raises(ValueError, match="step size is nan"):
        right._replace(step_size=float("nan")).save(own)
        Tuning.load(own)


@pytest.mark.nightly
def test_rows_in_memory_and_rows_that_keep_coming(tmp_path):
    x, y = grouped()
    tuned(tmp_path, (x, y), hierarchy)
    rows = GrowingRows(x, y)
    tuned(tmp_path, rows, hierarchy)
    assert len(list(tmp_path.iterdir())) == 2


def test_several_write_at_once(tmp_path):
    found = Tuning(0.1, 1.0, IdentityMetric())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: found.save(tmp_path / "one.npz"), range(40)))
    assert Tuning.load(tmp_path / "one.npz").step_size == 0.1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.nightly
def test_a_link_that_leads_nowhere(tmp_path):
    tuned(tmp_path, data())
    (file,) = tmp_path.iterdir()
    (tmp_path / f"{file.name[:33]}0.npz").symlink_to(tmp_path / "gone")
    tuned(tmp_path, data(seed=1))


@pytest.mark.nightly
def test_other_data_start_at_its_centre(tmp_path):
    def moved(by):
        return (3 + by + np.random.default_rng(int(by)).normal(size=(2_000, 3)).astype("f4"),)

    prior = partial(means, prior=1e5)
    tuned(tmp_path, moved(0.0), prior)
    for shift in (0.05, 1e4):
        there, alone = (tuned(x, moved(shift), prior).sampler.tuning for x in (tmp_path, None))
        spread = alone.start.factor[0, 0]
        np.testing.assert_allclose(there.start.center, alone.start.center, atol=0.2 * spread)
        np.testing.assert_allclose(there.start.factor, alone.start.factor, atol=0.05 * spread)
        if shift < 1:
            assert there.passes["centre"] < 0.5 * alone.passes["centre"]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.nightly
def test_rows_that_keep_coming(tmp_path):
    x, y = data()
    rows = GrowingRows(x[:1_500], y[:1_500])
    first, second = (tuned(tmp_path, rows) for _ in range(2))
    np.testing.assert_array_equal(first.get_samples()["w"], second.get_samples()["w"])


@pytest.mark.nightly
def test_its_warnings_are_heard_again(tmp_path):
    tuned(tmp_path, data())
    (file,) = tmp_path.iterdir()
    Tuning.load(file)._replace(multimodal=True).save(file)
    with pytest.warns(UserWarning, match="several modes"):
        tuned(tmp_path, data())


def damaged(content):
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    return [bytes(flipped), content[:-10], b"", b"PK", b"{}", b"\x80\x04K\x01."]


@pytest.mark.nightly
def test_damaged_files_are_not_used(tmp_path):
    right = tuned(tmp_path, data()).sampler.tuning
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    older = Archive("tuning", 0, of_tuning._FILE.kinds, "")
    older.save(tmp_path / "old", {"tuning": right})
    older._replace(version=of_tuning._FILE.version).save(tmp_path / "other", {"tuning": 3})
    contents = [*damaged(whole), *((tmp_path / name).read_bytes() for name in ("old", "other"))]
    kernel = CCAdL(partial(linear, batch_size=50), tuning=tmp_path, progress_bar=False)
    for content in contents:
        file.write_bytes(content)
        with pytest.raises(ValueError, match="Tune the kernel again"):
            Tuning.load(file)
    with pytest.warns(UserWarning, match="tunes itself, since a kept tuning cannot be used"):
        run_mcmc(kernel, *data())
    assert Tuning.load(file).step_size == right.step_size


@pytest.mark.nightly
def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="was not written to .*the next one tunes itself"):
        tuned(tmp_path / "file" / "folder", data())
    with pytest.raises(ValueError, match="must be a folder, and .* is a file. Give `tuning=Tuning"):
        CCAdL(linear, tuning=tmp_path / "file")
