# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from numpyro_sgmcmc.data.subsampling import (
    SCHEMES,
    _multiply_divmod,
    blocks,
    epochs,
    permute,
    symmetric_sweeps,
    with_replacement,
    without_replacement,
)

COMPILE_QUICKLY = True


def draws(scheme, size, batch_size, steps, key=0):
    draw = jax.vmap(lambda k: scheme(random.key(key), k, size, batch_size))
    return np.asarray(jax.jit(draw)(jnp.arange(steps)))


@pytest.mark.parametrize("size", [1, 2, 3, 31, 33, 37, 100, 1000, 4999, 12_214])
def test_permute_is_a_bijection(size):
    image = permute(random.key(size), jnp.arange(size), size)
    assert image.dtype == jnp.int32
    assert sorted(image.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [10**7 + 19, 2**31 - 1])
def test_permute_of_many_rows_stays_inside(size):
    positions = jnp.concatenate([jnp.arange(1000), size - 1 - jnp.arange(1000)])
    image = np.asarray(permute(random.key(1), positions, size))
    assert image.min() >= 0 and image.max() < size
    assert len(set(image.tolist())) == 2000
    assert abs(image.mean() / size - 0.5) < 4 * (1 / 12 / 2000) ** 0.5


@pytest.mark.parametrize("size", [7, 37, 400])
def test_pairs_of_rows_are_uniform(size):
    """Every ordered pair of distinct rows is equally likely, which fixes the noise covariance."""
    steps = 400_000
    rows = draws(without_replacement, size, 2, steps)
    counts = np.zeros((size, size))
    np.add.at(counts, (rows[:, 0], rows[:, 1]), 1)
    assert np.trace(counts) == 0
    expected = steps / (size * (size - 1))
    off = ~np.eye(size, dtype=bool)
    statistic = ((counts[off] - expected) ** 2 / expected).sum()
    freedom = size * (size - 1) - 1
    assert 1e-4 < chi2.sf(statistic, freedom) < 1 - 1e-4


@pytest.mark.one_case
@pytest.mark.parametrize("scheme", ["without_replacement", "with_replacement"])
@pytest.mark.parametrize(("size", "batch_size"), [(20, 5), (1000, 100), (200, 140)])
def test_variance_of_a_minibatch_mean(scheme, size, batch_size):
    """The finite-population factor describes the draws: also for an ordered, skewed population."""
    x = np.exp(np.linspace(-2, 2, size))
    steps = 40_000
    means = x[draws(SCHEMES[scheme].draw, size, batch_size, steps)].mean(1)
    ddof = 1 if scheme == "without_replacement" else 0
    expected = SCHEMES[scheme].factor(size, batch_size) * x.var(ddof=ddof) / batch_size
    error = (2 / steps) ** 0.5
    assert abs(means.var() / expected - 1) < 4 * error
    assert abs(means.mean() - x.mean()) < 4 * (expected / steps) ** 0.5


@pytest.mark.parametrize(("size", "batch_size"), [(200, 40), (203, 40), (47, 22), (37, 5)])
def test_blocks(size, batch_size):
    """
    Stretches of neighbours that do not overlap; every row is equally likely, also where their
    length does not divide the number of rows; the variance of a mean is that between stretches.
    """
    steps, count = 40_000, min(batch_size, 11 if batch_size == 22 else 10)
    length = batch_size // count
    rows = draws(blocks, size, batch_size, steps)
    stretches = rows.reshape(steps, count, length)
    assert np.all((stretches - stretches[..., :1]) % size == np.arange(length))
    assert all(len(set(batch)) == batch_size for batch in rows[:1_000].tolist())
    seen = np.bincount(rows.ravel(), minlength=size)
    expected = steps * batch_size / size
    assert np.abs(seen - expected).max() < 4.5 * (expected * length) ** 0.5
    x = np.exp(np.linspace(-2, 2, size))
    means = x[rows].mean(1)
    if size % length == 0:
        between = [np.roll(x, -k).reshape(-1, length).mean(1).var(ddof=1) for k in range(length)]
        factor = SCHEMES["blocks"].factor(size, batch_size)
        variance = factor * np.mean(between) / count
        assert abs(means.var() / variance - 1) < 4 * (2 / steps) ** 0.5
    assert abs(means.mean() - x.mean()) < 4 * means.std() / steps**0.5


@pytest.mark.parametrize(("size", "batch_size"), [(12, 4), (37, 10), (50, 7), (40, 23), (100, 99)])
def test_epochs_see_every_row_once(size, batch_size):
    stream = draws(epochs, size, batch_size, 5 * size).ravel()
    passes = stream[: len(stream) // size * size].reshape(-1, size)
    assert np.all(np.sort(passes, 1) == np.arange(size))
    assert len({tuple(p) for p in passes.tolist()}) == len(passes)


def test_epochs_do_not_overflow():
    """After 4e9 steps of 500 rows the stream is still made of whole passes."""
    size, batch_size, start = 10_007, 500, 4_000_000_000
    steps = start + np.arange(3 * size // batch_size + 2, dtype=np.int64)
    draw = jax.vmap(lambda k: epochs(random.key(0), k, size, batch_size))
    stream = np.asarray(draw(jnp.asarray(steps, jnp.uint32))).ravel()
    skip = size - int(start) * batch_size % size
    passes = stream[skip : skip + 2 * size].reshape(2, size)
    assert np.all(np.sort(passes, 1) == np.arange(size))


def test_multiply_divmod():
    rng = np.random.default_rng(0)
    for _ in range(50):
        divisor = int(rng.integers(2, 2**31 - 1))
        x, factor = int(rng.integers(divisor)), int(rng.integers(1, divisor + 1))
        quotient, remainder = _multiply_divmod(jnp.uint32(x), factor, divisor)
        assert (int(quotient), int(remainder)) == (
            x * factor // divisor % 2**32,
            x * factor % divisor,
        )


@pytest.mark.one_case
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stream_is_a_function_of_key_and_step(scheme):
    draw = SCHEMES[scheme].draw
    first = draws(draw, 1000, 10, 20)
    assert np.array_equal(first[7], draw(random.key(0), 7, 1000, 10))
    assert not np.array_equal(first[7], first[8])
    assert not np.array_equal(first, draws(draw, 1000, 10, 20, key=1))


def test_a_full_minibatch_keeps_its_order():
    """`numpyro.subsample` ignores a permutation of full length, while `y[i]` honours it."""
    for draw in (without_replacement, epochs):
        assert np.array_equal(draw(random.key(0), 3, 10, 10), np.arange(10))
    assert len(set(with_replacement(random.key(0), 3, 10, 10).tolist())) < 10


@pytest.mark.parametrize(("size", "batch_size"), [(60, 10), (1_000, 250)])
def test_sweeps_go_forward_and_backward(size, batch_size):
    """A random partition in some order, the same backwards, then another."""
    count = size // batch_size
    rows = draws(symmetric_sweeps, size, batch_size, 4 * count)
    for sweep in np.split(rows, 2):
        forward, backward = np.split(sweep, 2)
        assert sorted(forward.ravel().tolist()) == list(range(size))
        assert np.array_equal(backward, forward[::-1])
    assert not np.array_equal(rows[: 2 * count], rows[2 * count :])
