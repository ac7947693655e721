# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Numbers of rows beyond 32 bits: which rows are drawn and read, and what a model may do."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform
import pytest
from runs import run_mcmc
from small_models import mean

from numpyro_sgmcmc import SGLD, CCAdL, RowsOnDisk
from numpyro_sgmcmc.data import row_numbers
from numpyro_sgmcmc.data.row_numbers import as_integers, as_pair, counted_from, product, total
from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.kernels.runtime import Runtime
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning import subsample

COMPILE_QUICKLY = True

FAR = 5 * 10**10 + 7
SCHEME_NAMES = ["without_replacement", "with_replacement", "blocks"]


class Computed:
    """Rows that are computed from their numbers."""

    def __init__(self, rows, of=lambda i: (i % 1_000) / 100, dtype=np.float32):
        self.shape, self.dtype = (rows,), np.dtype(dtype)
        self.of, self.asked = of, []

    def __getitem__(self, rows):
        if isinstance(rows, slice):
            rows = np.arange(rows.start, rows.stop)
        self.asked.append(np.array(rows))
        return self.of(np.asarray(rows)).astype(self.dtype)


model = partial(mean, batch_size=100)


def target_of(y, scheme="without_replacement"):
    return Target(read_model(model, init_to_uniform, (y,), {}), (y,), {}, SCHEMES[scheme])


def test_arithmetic_is_that_of_64_bits():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 2**32, (2, 1_000), dtype=np.uint64)
    x[:3], y[:3] = 2**32 - 1, [2**32 - 1, 0, 1]
    found = product(jnp.asarray(x.astype(np.uint32)), jnp.asarray(y.astype(np.uint32)))
    assert np.array_equal(np.uint64(as_integers(*found)), x * y)
    numbers = rng.integers(0, 2**62, 1_000)
    assert np.array_equal(as_integers(*as_pair(numbers)), numbers)
    pair = row_numbers.Pair(*(jnp.asarray(h).view(jnp.uint32) for h in as_pair(numbers)))
    more = total(pair, jnp.asarray(y.astype(np.uint32)))
    assert np.array_equal(as_integers(*more), numbers + y.astype(np.int64))
    bound = int(np.median(numbers))
    assert np.array_equal(row_numbers.at_least(pair, bound), numbers >= bound)
    large = numbers[numbers >= bound]
    pair = row_numbers.Pair(*(jnp.asarray(h).view(jnp.uint32) for h in as_pair(large)))
    assert np.array_equal(as_integers(*row_numbers.minus(pair, bound)), large - bound)
    rows = as_integers(*counted_from(jnp.asarray(7_000_000), 16_384, 3, 5))
    assert rows.tolist() == [7_000_000 * 16_384 + 3 + k for k in range(5)]


@pytest.mark.parametrize("size", [33, 1_000, 4_099])
def test_it_is_a_permutation(size):
    for step in (0, 1):
        rows = row_numbers.without_replacement(random.key(1), step, size, size)
        assert sorted(as_integers(*rows).tolist()) == list(range(size))


@pytest.mark.one_case
@pytest.mark.parametrize("scheme", SCHEME_NAMES)
@pytest.mark.parametrize("size", [1_024, FAR])
def test_rows_are_equally_likely(scheme, size):
    """And so are pairs of them; of blocks the rows of different stretches."""
    draw = partial(SCHEMES[scheme].draw_far, random.key(0), size=size, batch_size=20)
    rows = as_integers(*jax.jit(jax.vmap(draw))(jnp.arange(4_000)))
    assert rows.min() >= 0 and rows.max() < size
    of_blocks = scheme == "blocks"
    if of_blocks:
        assert np.all((rows[:, 1::2] - rows[:, ::2]) % size == 1)
        rows = rows[:, ::2]
    if scheme != "with_replacement":
        assert all(len(set(each)) == len(each) for each in rows)
    bins = 64
    places = rows * bins // size
    pairs = places[:, 0] // 8 * 8 + places[:, 1] // 8
    for counts in (np.bincount(x, minlength=bins) for x in (places.ravel(), pairs)):
        expected = counts.sum() / bins
        chi_squared = np.sum((counts - expected) ** 2) / expected
        assert abs(chi_squared - bins + 1) < 4.5 * np.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_a_minibatch_has_the_rows_that_were_drawn(scheme):
    y = RowsOnDisk(Computed(FAR))
    target = target_of(y, scheme)
    rows = target.rows(random.key(0), 3)
    numbers = rows["rows"].integers
    assert numbers.max() > 2**33
    found = jax.jit(target.model.potential)({"mu": 1.0}, rows, random.key(0), (y,), {})
    values = (numbers % 1_000) / 100
    wanted = FAR * np.mean((values - 1) ** 2 / 2 + np.log(2 * np.pi) / 2)
    assert np.isclose(found, wanted + 0.5 * 0.01 + np.log(10) + np.log(2 * np.pi) / 2, rtol=1e-5)


def test_steps_read_the_rows_that_were_drawn(monkeypatch):
    """Through `MCMC`, two chains, read ahead of the steps."""
    monkeypatch.setattr(Runtime, "check_rows", lambda self, target, kept: None)
    source = Computed(FAR)
    y = RowsOnDisk(source)
    kernel = SGLD(model, step_size=1e-13, gradient="minibatch", init_strategy=init_to_uniform)
    mcmc = run_mcmc(kernel, y, warmup=0, samples=70, chains=2)
    keys = [random.split(key, 3)[0] for key in mcmc.last_state.rng_key]
    asked = {row for rows in source.asked for row in rows.tolist()}
    target = target_of(y)
    drawn = jax.jit(lambda key, step: target.rows(key, step)["rows"])
    for chain in range(2):
        for step in range(70):
            assert set(drawn(keys[chain], step).integers.tolist()) <= asked
    assert np.isfinite(mcmc.get_samples()["mu"]).all()


def test_all_rows_are_seen_once(monkeypatch):
    """A pass over rows that have pairs of numbers says what one over rows in memory says."""
    y = np.random.default_rng(0).standard_normal(50_001).astype(np.float32)
    whole = target_of(jnp.asarray(y)).anchor({"mu": jnp.asarray(0.3)}, order=2)
    monkeypatch.setattr(row_numbers, "MOST_ROWS", 1_000)
    far = target_of(RowsOnDisk(y)).anchor({"mu": jnp.asarray(0.3)}, order=2)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), far, whole)


def grouped(y, group, batch_size=100):
    mu = numpyro.sample("mu", dist.Normal(0, 10).expand([10]).to_event(1))
    with numpyro.plate("rows", y.shape[0], subsample_size=batch_size) as i:
        which = i % 10 if group is None else group[i]
        numpyro.sample("y", dist.Normal(mu[which], 1), obs=y[i])


def test_numbers_are_for_what_is_on_disk_only():
    y = RowsOnDisk(Computed(FAR))
    with pytest.raises(ValueError, match="50,000,000,007 rows, more than 32 bits.*Put on disk too"):
        read_model(grouped, init_to_uniform, (y, None), {})
    group = RowsOnDisk(Computed(FAR, lambda i: i % 10, np.int32))
    read_model(grouped, init_to_uniform, (y, group), {})
    with pytest.raises(ValueError, match="more than 32 bits"):
        read_model(lambda y: model(Shifted(y)), init_to_uniform, (y,), {})


class Shifted:
    def __init__(self, y):
        self.shape, self._y = y.shape, y

    def __getitem__(self, i):
        return self._y[i + 1]


def test_schemes_that_have_no_such_numbers_are_refused():
    with pytest.raises(ValueError, match=r"'epochs' can number at most 2,147,483,647\. Use one of"):
        kernel = SGLD(model, step_size=1e-13, subsampling="epochs")
        kernel.init(random.key(0), 0, None, (RowsOnDisk(Computed(FAR)),), {})


@pytest.mark.nightly
def test_the_law_is_that_of_all_rows(monkeypatch):
    """Tuned, on rows that have pairs of numbers: the posterior of a Gaussian mean is known."""
    monkeypatch.setattr(row_numbers, "MOST_ROWS", 1_000)
    monkeypatch.setattr(subsample, "_ROWS", 640)
    y = 3 + np.random.default_rng(1).standard_normal(60_000).astype(np.float32)
    kernel = CCAdL(model, progress_bar=False)
    mcmc = run_mcmc(kernel, RowsOnDisk(y), warmup=200, samples=4_000)
    mu = np.asarray(mcmc.get_samples()["mu"], float)
    z = (mu - y.mean(dtype=float)) * np.sqrt(len(y))
    size = float(numpyro.diagnostics.effective_sample_size(z[None]))
    assert abs(z.mean()) < 4 / np.sqrt(size) and abs(z.std() - 1) < 4 / np.sqrt(2 * size)
