# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Rows that keep coming: a run that goes on is one of the posterior of all rows, and of nothing else.
"""

from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
import itertools
import os
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, init_to_uniform
import pytest
from runs import go_on, run_mcmc
from small_models import linear
import xarray as xr

from numpyro_sgmcmc import (
    SGHMC,
    SGLD,
    CCAdL,
    Ensemble,
    GrowingRows,
    LongRun,
    NoiseEstimate,
    RowsOnDisk,
    calibrated,
    certify,
    growth,
    stein_matrix,
    to_arviz,
)
from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.growing import RowCount, padded, row_count_of, trimmed
from numpyro_sgmcmc.data.rows_on_disk import UnreadableRows
from numpyro_sgmcmc.data.subsampling import without_replacement_so_far
from numpyro_sgmcmc.gradients.estimators import product_gradient
from numpyro_sgmcmc.gradients.noise_estimate import gradient_oracle
from numpyro_sgmcmc.kernels import growth as going_on
from numpyro_sgmcmc.posterior.control_variate import Anchor
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.potential import hessian_of
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.expansion import _by_gauss_newton

COMPILE_QUICKLY = True
BATCH = 100
_RNG = np.random.default_rng(2)
ALL = 40_000
X = _RNG.standard_normal((ALL, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -1.0, 0.5]) + _RNG.standard_normal(ALL)).astype(np.float32)


def exact(x, y):
    """Mean and covariance of the posterior of ``linear``."""
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    covariance = np.linalg.inv(x.T @ x + np.eye(3))
    return covariance @ (x.T @ y), covariance


def logistic(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=BATCH):
        batch = numpyro.subsample(x, event_dim=1)
        logits = batch @ w
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=numpyro.subsample(y, event_dim=0))


def intercepts(y):
    """Groups, whose own level is integrated out."""
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("groups", y.shape[0], subsample_size=BATCH) as g:
        a = numpyro.sample("a", dist.Normal(mu, 1))
        with numpyro.plate("members", y.shape[1], dim=-2):
            numpyro.sample("y", dist.Normal(a, 1), obs=y[g].T)


def begun(kernel, rows, samples=1_000, warmup=300, chains=1):
    options = {"samples": samples, "warmup": warmup, "chains": chains}
    return run_mcmc(kernel, *rows, jit_model_args=True, **options)


@cache
def tuned():
    """What is found of the first 1,000 rows."""
    kernel = CCAdL(linear, subsampling="without_replacement", progress_bar=False)
    return kernel.tune(random.key(0), X[:1_000], Y[:1_000])


def away(mcmc, rows):
    """Means and variances of the draws against the exact ones, in standard errors."""
    mean, covariance = exact(*rows.arrays)
    w = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], np.float64)
    size = numpyro.diagnostics.effective_sample_size(w)
    flat, sd = w.reshape(-1, 3), np.sqrt(np.diag(covariance))
    of_means = (flat.mean(0) - mean) / sd * np.sqrt(size)
    size = numpyro.diagnostics.effective_sample_size((w - mean) ** 2)
    of_variances = (flat.var(0) / sd**2 - 1) / np.sqrt(2 / size)
    return np.concatenate([of_means, of_variances])


@pytest.mark.slow
@pytest.mark.parametrize("chains", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_run_that_goes_on_has_the_law_of_all_rows(chains, monkeypatch):
    ends = [2_000, 2_300, 3_900, 9_000, 20_000]  # within the room, and twice beyond it
    rows = GrowingRows(X[: ends[0]], Y[: ends[0]])
    mcmc = begun(CCAdL(linear, progress_bar=False), rows, 2_000 // chains, chains=chains)
    assert np.all(np.abs(away(mcmc, rows)) < 4)
    for start, end in itertools.pairwise(ends):
        rows.append(X[start:end], Y[start:end])
        go_on(mcmc, *rows)
        assert len(rows) == end
        assert np.all(np.abs(away(mcmc, rows)) < 4), end
        report = growth(mcmc)
        assert (report.rows, report.new) == (end, end - start)
        assert report.problem is None, str(report)
    assert to_arviz(mcmc).attrs["rows"] == ends[-1]

    # the other half of them away: that of the rows that are left
    rows.remove(np.arange(len(rows)) % 2 == 0)
    np.testing.assert_array_equal(rows.arrays[1], Y[1:20_000:2])
    go_on(mcmc, *rows)
    assert np.all(np.abs(away(mcmc, rows)) < 4)
    assert growth(mcmc).new == -10_000

    # the test sees an anchor that does not know the rows that have come
    rows.append(X[20_000:30_000], Y[20_000:30_000])
    monkeypatch.setattr(going_on, "with_new_rows", lambda target, anchor, first: anchor)
    monkeypatch.setattr(going_on, "_FAR", np.inf)
    kernel = CCAdL(linear, tuning=mcmc.sampler.tuning, progress_bar=False)
    options = {"num_chains": mcmc.num_chains, "chain_method": "vectorized"}
    other = MCMC(
        kernel, num_warmup=0, num_samples=2_000, progress_bar=False, jit_model_args=True, **options
    )
    other.sampler.runtime.__dict__.update(mcmc.sampler.runtime.__dict__, programs={})
    other.post_warmup_state = mcmc.last_state
    other.run(random.key(3), *rows)
    assert np.max(np.abs(away(other, rows))) > 8


@pytest.mark.parametrize("count", [100, 101, 4_095, 4_096, 4_097, 1_000_003])
def test_rows_so_far_are_drawn_alike(count):
    draw = jax.jit(without_replacement_so_far, static_argnums=3)
    found = [
        np.asarray(draw(random.key(1), jnp.asarray(k), jnp.asarray(count), 50)) for k in range(400)
    ]
    assert all(len(set(rows)) == 50 for rows in found)
    everything = np.concatenate(found)
    assert everything.min() >= 0
    assert everything.max() < count
    # uniform over tenths of the rows: chi-squared with nine degrees of freedom
    seen = np.bincount(everything * 10 // count, minlength=10)
    sizes = np.diff([-(-k * count // 10) for k in range(11)]) / count
    assert np.sum((seen - 20_000 * sizes) ** 2 / (20_000 * sizes)) < 27.9


def grown_target(model, rows):
    """The model with the rows of a holder, in their room."""
    plain = rows.arrays
    view = read_model(model, init_to_uniform, plain, {})
    growing = tuple(rows)
    known = row_count_of(growing)
    return (
        Target(view, plain, {}),
        Target(view.padded(rows.capacity), padded(growing), {}, known=known),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("model", [logistic, pytest.param(intercepts, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("half_life", [None, 700.0])
def test_sums_of_old_rows_and_new_ones(model, half_life):
    order = 2  # of the first order are parts of it
    if model is logistic:
        data = X[:5_000], (Y[:5_000] > 0).astype(np.float32)
    else:
        data = (Y[:15_000].reshape(5_000, 3),)
    rows = GrowingRows(*(x[:1_300] for x in data), half_life=half_life)
    rows.append(*(x[1_300:1_700] for x in data))  # in the room
    plain, growing = grown_target(model, rows)
    zeros = jnp.zeros(plain.model.dimension) + 0.3
    effects = plain.unravel(zeros)

    def close(found, expected, tolerance=2e-5):
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            scale = np.max(np.abs(y)) + 1e-6
            np.testing.assert_allclose(x, y, atol=tolerance * scale)

    def summed(target, count):
        """All rows at once, with what each of them counts."""
        ages = count - 1 - np.arange(count)
        counts = np.ones(count) if half_life is None else 0.5 ** (ages / half_life)
        name = target.model.plates[0].name
        drawn = {name: DrawnRows(jnp.arange(count), weights=jnp.asarray(counts, jnp.float32))}
        centred = target._replace(model=target.model.with_rule("fine")).centred
        potential = centred.potential(going_on.IdentityMetric())
        value, slope = jax.value_and_grad(potential)(effects, drawn, random.key(0))
        return Anchor(effects, value, slope, hessian_of(potential, effects, drawn, random.key(0)))

    expected = jax.jit(lambda: summed(plain, 1_700))()
    close(jax.jit(lambda: growing.anchor(effects, order))(), expected)
    if model is logistic:  # each row counts once there, and not squared
        by_gauss_newton = jax.jit(lambda: _by_gauss_newton(growing, growing.anchor(effects)))
        close(by_gauss_newton()[0], expected.hessian)
    first_rows = tuple(jnp.asarray(x[:1_300]) for x in data)
    first = Target(
        read_model(model, init_to_uniform, first_rows, {}),
        first_rows,
        {},
    )
    before = jax.jit(lambda: summed(first, 1_300))()
    close(jax.jit(lambda: going_on.with_new_rows(growing, before, jnp.asarray(1_300)))(), expected)
    # and a minibatch is, in the mean, all of them
    potential = growing.potential(going_on.IdentityMetric())
    slope = jax.jit(lambda key: jax.grad(potential)(effects, growing.rows(key), random.key(0)))
    slopes = jax.vmap(slope)(random.split(random.key(0), 4_000))
    for name, values in slopes.items():
        error = np.std(values, axis=0) / 4_000**0.5
        away = np.abs(np.mean(values, axis=0) - expected.gradient[name])
        assert np.all(away < 4.5 * error + 1e-3)


@pytest.mark.parametrize("covariance, estimator", [
    ("full", "sub_batches"), ("full", "per_example"), ("diagonal", "two_cotangents"),
    ("matrix_free", None),
])  # fmt: skip
def test_the_noise_is_that_of_the_rows_that_there_are(covariance, estimator):
    rows = GrowingRows(X[:500], Y[:500])
    plain, growing = grown_target(linear, rows)
    noise = NoiseEstimate(covariance, estimator).resolved(plain)
    # as it was resolved when there were other rows
    before = replace(noise, factors=(("rows", 0.5),))
    numbers, weight = jnp.arange(7, 7 + BATCH), len(rows) / rows.capacity
    drawn = DrawnRows(numbers, weights=jnp.full(BATCH, weight))

    def seen(target, drawn, noise):
        potential, rows = target.potential(going_on.IdentityMetric()), {"rows": drawn}
        at = jnp.array([0.5, -0.5, 0.2])
        if covariance == "matrix_free":
            factors = dict(noise.factors) | target.factors_so_far
            found = product_gradient(potential, rows, random.key(1), factors, rows)(at)
            return found.gradient, found.noise(at)
        found = gradient_oracle(target, potential, rows, random.key(1), noise)(at)
        return found.gradient, found.noise

    for x, y in zip(
        jax.tree.leaves(jax.jit(lambda: seen(growing, drawn, before))()),
        jax.tree.leaves(jax.jit(lambda: seen(plain, numbers, noise))()),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.max(np.abs(y)))


@pytest.mark.nightly
def test_rows_that_are_forgotten():
    half_life, ends = 3_000.0, (4_000, 6_000, 11_000)

    def exactly(end, half_life):
        """Mean and standard deviations, each row with what it counts."""
        x, y = X[:end].astype(np.float64), Y[:end].astype(np.float64)
        counts = 0.5 ** ((end - 1 - np.arange(end)) / half_life)
        covariance = np.linalg.inv((x * counts[:, None]).T @ x + np.eye(3))
        return covariance @ (x.T @ (counts * y)), np.sqrt(np.diag(covariance))

    rows = GrowingRows(X[: ends[0]], Y[: ends[0]], half_life=half_life)
    mcmc = begun(CCAdL(linear, progress_bar=False), rows, 2_000)
    for start, end in itertools.pairwise((ends[0], *ends)):
        if end > start:
            rows.append(X[start:end], Y[start:end])
        go_on(mcmc, *rows)
        w = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], np.float64)
        size = numpyro.diagnostics.effective_sample_size(w)
        of_squares = numpyro.diagnostics.effective_sample_size((w - w.mean((0, 1))) ** 2)

        def worst(half_life, end=end, w=w, size=size, of_squares=of_squares):
            mean, sd = exactly(end, half_life)
            means = (w.mean((0, 1)) - mean) / sd * np.sqrt(size)
            variances = (w.var((0, 1)) / sd**2 - 1) / np.sqrt(2 / of_squares)
            return np.max(np.abs([means, variances]))

        assert worst(half_life) < 4
        assert worst(1.5 * half_life) > 6
        assert growth(mcmc).problem is None, str(growth(mcmc))


@pytest.mark.nightly
@pytest.mark.parametrize("judge", [certify, calibrated, stein_matrix])
def test_what_is_forgotten_is_not_judged_by_all_rows(judge):
    mcmc = begun(SGLD(linear, 1e-5), GrowingRows(X[:1_000], Y[:1_000], half_life=300), 200, 5)
    with pytest.raises(ValueError, match="counts half after 300 others"):
        judge(mcmc)


@pytest.mark.nightly
def test_nothing_is_compiled_again_within_the_room():
    compiled = []

    def seen(event, duration, **facts):
        # without a bar NumPyro compiles its own loop for each run
        if "backend_compile" in event and "_fori_collect_loop" not in facts["fun_name"]:
            compiled.append(facts["fun_name"])

    rows = GrowingRows(X[:1_000], Y[:1_000])
    kernel = CCAdL(linear, tuning=tuned(), progress_bar=False)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=5, jit_model_args=True)
    mcmc.run(random.key(0), *rows)
    for k in range(2):
        rows.append(X[1_000 + 100 * k :][:100], Y[1_000 + 100 * k :][:100])
        go_on(mcmc, *rows)
    # JAX has no public way to take a listener away
    jax.monitoring.register_event_duration_secs_listener(seen)
    rows.append(X[1_200:1_300], Y[1_200:1_300])
    go_on(mcmc, *rows)
    assert not compiled
    # the test sees programs that are
    rows.append(X[:5_000], Y[:5_000])
    go_on(mcmc, *rows)
    assert compiled
    assert int(mcmc.last_state.fixed.known.rows) == 6_300


@pytest.mark.nightly
def test_rows_of_another_law_are_noticed():
    def told(shift):
        rows = GrowingRows(X[:4_000], Y[:4_000])
        mcmc = begun(CCAdL(linear, progress_bar=False), rows, 500)
        rows.append(X[4_000:5_000], Y[4_000:5_000] + shift * X[4_000:5_000, 0])
        go_on(mcmc, *rows)
        return growth(mcmc)

    assert told(0.0).problem is None
    found = told(0.3)
    assert "old and new rows disagree: 1,000 rows" in found.problem
    assert found.p_value < 1e-6
    assert "4,000" not in str(found)
    assert str(found).startswith("5,000 rows, 1,000 of them new")


def corrected(rows):
    """The first day again, and another second one."""
    again = GrowingRows(X[:1_000], Y[:1_000])
    again.append(X[1_000:1_200], -Y[1_000:1_200])
    return again


def copied_before(rows):
    copy = deepcopy(GrowingRows(X[:1_000], Y[:1_000]))
    copy.append(X[3_000:3_200], Y[3_000:3_200])
    return copy


def exchanged(rows):
    """As many rows, of which some were removed and others have come."""
    rows.remove(np.arange(1_200) % 6 == 5)
    rows.append(X[4_000:4_200], 3 - Y[4_000:4_200])
    return rows


def edited(rows):
    y = Y[:1_200].copy()
    y[500] += 100
    return GrowingRows(X[:1_200], y)


def in_another_order(rows):
    return GrowingRows(X[1_199::-1], -Y[:1_200])


def more_after_an_edit(rows):
    y = Y[:1_500].copy()
    y[0] -= 100
    return GrowingRows(X[:1_500], y)


def fewer(rows):
    return GrowingRows(X[:1_000], Y[:1_000])


def others(rows):
    return GrowingRows(X[5_000:7_000], Y[5_000:7_000])


def with_another_half_life(rows):
    again = GrowingRows(X[:1_000], Y[:1_000], half_life=300)
    again.append(X[1_000:1_200], Y[1_000:1_200])
    return again


OTHER_ROWS = [
    copied_before, exchanged, edited, in_another_order, more_after_an_edit, fewer,
    others, with_another_half_life,
]  # fmt: skip


def run_of_two_days():
    rows = GrowingRows(X[:1_000], Y[:1_000])
    mcmc = begun(CCAdL(linear, tuning=tuned(), progress_bar=False), rows, 20, 20)
    rows.append(X[1_000:1_200], Y[1_000:1_200])
    go_on(mcmc, *rows)
    return mcmc, rows


def off(mcmc, rows):
    """How far the gradient of the anchor is from that of all rows there, over its size."""
    anchor = mcmc.last_state.fixed.anchor
    x, y, w = (np.asarray(a, np.float64) for a in (*rows.arrays, anchor.values["w"]))
    age = len(y) - 1 - np.arange(len(y))
    counts = np.ones(len(y)) if rows.half_life is None else 2 ** (-age / rows.half_life)
    slope = (counts * (x @ w - y)) @ x + w
    return np.max(np.abs(np.asarray(anchor.gradient["w"]) - slope)) / len(y) ** 0.5


@pytest.mark.nightly
@pytest.mark.parametrize(
    "other", [corrected, *(pytest.param(x, marks=pytest.mark.slow) for x in OTHER_ROWS)]
)
def test_other_rows_are_not_taken_for_known_ones(other, monkeypatch):
    mcmc, rows = run_of_two_days()
    state, there = mcmc.last_state, other(rows)
    go_on(mcmc, *there)
    assert off(mcmc, there) < 0.01
    assert int(mcmc.last_state.fixed.known.rows) == len(there)
    if other is not corrected:
        return
    # the test sees a run that takes them for the same ones
    monkeypatch.setattr(RowCount, "begins_with", lambda known, rows, digest: jnp.array(True))
    mcmc = begun(CCAdL(linear, tuning=tuned(), progress_bar=False), rows, 20, 20)
    mcmc.post_warmup_state = state
    mcmc.run(random.key(1), *there)
    assert off(mcmc, there) > 1


@pytest.mark.slow
def test_rows_that_were_read_anew_are_the_same():
    """Nothing is read again for them, and the draws go on; their room may be another one."""
    mcmc, rows = run_of_two_days()
    state = mcmc.last_state
    go_on(mcmc, *rows)
    expected = mcmc.get_samples()["w"]
    again = [
        GrowingRows(X[:1_200], Y[:1_200]),
        deepcopy(rows),
        pickle.loads(pickle.dumps(rows)),
        GrowingRows(np.asarray(X[:1_200], np.float64), jnp.asarray(Y[:1_200])),
    ]
    for other in again:
        assert np.array_equal(other.identity.digest, rows.identity.digest)
        mcmc.post_warmup_state = state
        mcmc.run(state.rng_key, *other)
        np.testing.assert_allclose(mcmc.get_samples()["w"], expected, rtol=2e-5)
        assert int(mcmc.last_state.fixed.known.before) == 1_000


def about(a, b, shift=0.0):
    m = numpyro.sample("m", dist.Normal(0, 10).expand([2]).to_event(1))
    with numpyro.plate("rows", a.shape[0], subsample_size=BATCH) as i:
        numpyro.sample("a", dist.Normal(m[0] - shift, 1), obs=a[i])
        numpyro.sample("b", dist.Normal(m[1], 2), obs=b[i])


CHANGED = {
    "exchanged": (lambda a, b: ((b, a), {}), lambda x, y: (y, x)),
    "one of them twice": (lambda a, b: ((a, a), {}), lambda x, y: (x, x)),
    "by other names": (lambda a, b: ((), {"a": b, "b": a}), lambda x, y: (y, x)),
    "another number": (lambda a, b: ((a, b, 3.0), {}), lambda x, y: (x + 3, y)),
    "another array": (lambda a, b: ((a, b, np.float32(-2.0)), {}), lambda x, y: (x - 2, y)),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("change", "jit"), [*((change, True) for change in CHANGED), ("another array", False)]
)
def test_arguments_are_known_by_their_places_and_values(change, jit):
    """Of the same holder: which array is which, and all that is given besides."""
    x, y = X[:1_000, 0], 5 + Y[:1_000]
    rows = GrowingRows(x, y)
    kernel = CCAdL(about, progress_bar=False)
    mcmc = run_mcmc(kernel, *rows, warmup=50, samples=500, jit_model_args=jit)
    args, kwargs = CHANGED[change][0](*rows)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, *args, **kwargs)
    means = [np.mean(z) for z in CHANGED[change][1](x, y)]
    draws = np.asarray(mcmc.get_samples()["m"])
    np.testing.assert_allclose(draws.mean(0), means, atol=0.03)
    np.testing.assert_allclose(draws.std(0) * 1_000**0.5, [1, 2], rtol=0.3)


def test_a_hash_of_rows_grows_with_them():
    def identity(*ends, half_life=None):
        rows = GrowingRows(X[: ends[0]], Y[: ends[0]], half_life=half_life)
        for start, end in itertools.pairwise(ends):
            rows.append(X[start:end], Y[start:end])
        return rows.identity

    all_at_once = identity(30_000)
    for ends in ((100, 30_000), (29_999, 30_000), (1_000, 1_001, 1_002, 20_000, 30_000)):
        np.testing.assert_array_equal(identity(*ends).digest, all_at_once.digest)
    assert np.any(identity(29_999).digest != all_at_once.digest)
    assert np.any(identity(30_000, half_life=700).digest != all_at_once.digest)
    # the first stretch of 8 MB that differs
    wide = np.zeros((3_000, 1_024), np.float32)
    other = wide.copy()
    other[2_500, 7] = 1
    first = GrowingRows(wide).identity.first_difference(GrowingRows(other).identity)
    assert first == 2_048


@pytest.mark.nightly
def test_fewer_rows_than_a_minibatch():
    rows, model = GrowingRows(X[:1_000], Y[:1_000]), partial(linear, batch_size=600)
    mcmc = begun(CCAdL(model, tuning=tuned(), progress_bar=False), rows, 2_000, 100)
    rows.remove(np.arange(1_000) >= 150)
    go_on(mcmc, *rows)
    assert np.all(np.abs(away(mcmc, rows)) < 4)
    # and each step sees every row once
    known = row_count_of(tuple(rows))
    view = read_model(model, init_to_uniform, (jnp.asarray(X[:1_000]), jnp.asarray(Y[:1_000])), {})
    target = Target(view.padded(rows.capacity), padded(tuple(rows)), {}, known=known)
    drawn = target.rows(random.key(3))["rows"]
    counts = np.bincount(np.asarray(drawn.numbers), np.asarray(drawn.weights), minlength=150)
    np.testing.assert_allclose(counts, 600 / rows.capacity, rtol=1e-6)


@pytest.mark.nightly
def test_methods_without_a_control_variate_go_on_too():
    rows = GrowingRows(X[:1_000], Y[:1_000])
    for kernel in (
        SGLD(linear, 1e-5, subsampling="with_replacement"),
        SGHMC(linear, 1e-3, 5.0, metric=np.eye(3) / 1_000),
    ):
        mcmc = begun(kernel, rows, 20, 20)
        rows.append(X[1_000:1_100], Y[1_000:1_100])
        go_on(mcmc, *rows)
        known = mcmc.last_state.fixed.known
        assert int(known.rows) == len(rows)
        assert np.all(np.isnan(known.shift))
        assert np.isnan(growth(mcmc).surprise)
    # coordinates of a posterior of more rows are narrower
    narrower = mcmc.last_state.fixed.metric.factor / np.sqrt(1e-3)
    np.testing.assert_allclose(narrower, np.eye(3) * np.sqrt(1_100 / 1_200), rtol=1e-5)


@pytest.mark.nightly
def test_metrics_at_members_of_an_ensemble_get_narrower_too():
    rows = GrowingRows(X[:1_000], Y[:1_000])
    start = Ensemble(steps=500, learning_rate=0.02)
    mcmc = begun(SGHMC(linear, 0.01, 5.0, start=start, metric="diagonal"), rows, 20, 20, chains=2)
    before = np.asarray(mcmc.last_state.fixed.metric.scale)
    assert before.shape == (2, 3) and np.ptp(before, axis=0).min() > 0
    rows.append(X[1_000:1_500], Y[1_000:1_500])
    go_on(mcmc, *rows)
    after = np.asarray(mcmc.last_state.fixed.metric.scale)
    np.testing.assert_allclose(after / before, np.sqrt(1_000 / 1_500), rtol=1e-5)


@pytest.mark.nightly
def test_a_minibatch_of_which_few_rows_count():
    rows = GrowingRows(X[:5_000], Y[:5_000], half_life=80)
    kernel = SGHMC(linear, 1e-3, 5.0)
    with pytest.raises(
        ValueError, match=r"5,000 rows count as 116, and a minibatch of 100 as 2\.3"
    ):
        begun(kernel, rows, 5, 5)
    rows.remove(np.arange(5_000) < 4_200)
    mcmc = begun(kernel, rows, 20, 20)
    assert "a minibatch counts as" not in str(growth(mcmc))
    rows.append(X[5_000:9_000], Y[5_000:9_000])
    go_on(mcmc, *rows)
    assert "a minibatch counts as 2.4 rows, and at least 10 are needed" in growth(mcmc).problem


BAD_ROWS = {
    "another width": (
        ((X[:10, :2], Y[:10]),),
        r"array 0 have shape \(2,\), but its present rows have shape \(3,\)",
    ),
    "another type": (
        ((X[:10], np.arange(10)),),
        "array 1 have dtype int64, but its present rows have float32",
    ),
    "another length": (((X[:10], Y[:9]),), "Array 1 has 9 rows, but array 0 has 10"),
    "not a number": (
        ((X[:2], np.array([0.0, np.nan], np.float32)),),
        "Row 1 of array 1 has an entry that is not finite",
    ),
    "too large for 32 bits": (
        ((X[:2], np.array([0.0, 1e300])),),
        r"Row 1 of array 1 has an entry that is not finite in float32 \(it is 1e\+300\)",
    ),
    "masked": (((X[:2], np.ma.masked_less(Y[:2], 100)),), "Array 1 of the rows is a masked array"),
    "one array": (((X[:10],),), "The `GrowingRows` has 2 arrays; got 1"),
    "long codes": (((np.array([2**40]),),), "whole numbers that JAX would cut to 32 bits"),
    "words": (((X[:2], np.array(["a", "b"])),), "must have rows of numbers"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_cannot_be_appended(case):
    ((arrays,), told) = BAD_ROWS[case]
    held = (X[:1_000], Y[:1_000]) if case != "long codes" else (np.arange(1_000),)
    rows = GrowingRows(*held)
    before = rows.arrays
    with pytest.raises(ValueError, match=told):
        rows.append(*arrays)
    assert len(rows) == 1_000
    for x, y in zip(before, rows.arrays, strict=True):
        np.testing.assert_array_equal(x, y)


def test_holders_that_cannot_be():
    with pytest.raises(ValueError, match="needs at least 100 rows to begin with; got 99"):
        GrowingRows(X[:99])
    with pytest.raises(ValueError, match="needs at least one array"):
        GrowingRows()
    rows = GrowingRows(X[:1_000], Y[:1_000])
    with pytest.raises(ValueError, match=r"truth values for the 1,000 rows"):
        rows.remove([3, 4])
    with pytest.raises(ValueError, match="would leave 50 rows"):
        rows.remove(np.arange(1_000) >= 50)
    assert repr(rows) == "GrowingRows(float32[1000, 3], float32[1000], room for 2,000)"
    for half_life in (0, 0.5, 1, 69, -100, np.inf, np.nan, 1e39, 10**20, True, "100", [100]):
        with pytest.raises(ValueError, match="`half_life` must be"):
            GrowingRows(X[:1_000], half_life=half_life)


def centred(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Normal((x[i] - x.mean(0)) @ w, 1), obs=y[i])


def by_number(x, y):
    w = numpyro.sample("w", dist.Normal(0, 100 / x.shape[0]).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])


def of_all(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


BAD_RUNS = {
    "a mean of all rows": (centred, {}, "log density of rows at site 'y' depends on the other"),
    "a scale by their number": (by_number, {}, "log density of rows at site 'w' depends"),
    "a plate of all": (of_all, {}, "needs exactly one plate with a `subsample_size`"),
    "epochs": (linear, {"subsampling": "epochs"}, "subsampling='epochs', which needs a fixed"),
    "refresh": (
        linear,
        {"gradient": ("control_variate", 1)},
        "with this `gradient`, which is for a fixed",
    ),
}


@pytest.mark.one_case
@pytest.mark.filterwarnings("ignore:No plate of the model")
@pytest.mark.parametrize("case", BAD_RUNS)
def test_runs_that_cannot_go_on(case):
    model, options, told = BAD_RUNS[case]
    rows = GrowingRows(X[:1_000], Y[:1_000])
    kernel = SGHMC(model, 1e-3, 5.0, **options)
    with pytest.raises(ValueError, match=told):
        begun(kernel, rows, 5, 5)


@pytest.mark.nightly
def test_what_does_not_go_together():
    rows = GrowingRows(X[:1_000], Y[:1_000])
    mcmc = begun(SGLD(linear, 1e-5), rows, 5, 5)
    mcmc.post_warmup_state = mcmc.last_state
    with pytest.raises(
        ValueError, match="was begun with a `GrowingRows`, and cannot continue with arrays"
    ):
        mcmc.run(random.key(1), X[:1_000], Y[:1_000])
    mcmc = begun(SGLD(linear, 1e-5), (X[:1_000], Y[:1_000]), 5, 5)
    with pytest.raises(ValueError, match="has no `GrowingRows`"):
        growth(mcmc)
    with pytest.raises(ValueError, match=r"1,000 rows, shape \(1000,\), and is not in the"):
        begun(SGLD(linear, 1e-5), (next(iter(rows)), Y[:1_000]), 5, 5)
    others = GrowingRows(-Y[:1_000])
    with pytest.raises(ValueError, match="rows of several `GrowingRows`"):
        begun(SGLD(linear, 1e-5), (next(iter(rows)), *others), 5, 5)


def written(folder, *ends):
    """Files of the rows up to each of these, and how many there are."""
    start = len(list(folder.glob("y-*.npy")))
    for k, (first, end) in enumerate(itertools.pairwise(ends), start):
        np.save(folder / f"x-{k}.npy", X[first:end])
        np.save(folder / f"y-{k}.npy", Y[first:end])
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("chains", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_rows_on_disk_that_keep_coming_are_as_in_memory(chains, tmp_path):
    written(tmp_path, 0, 600, 1_000)
    on_disk = GrowingRows(*(RowsOnDisk(str(tmp_path / f"{name}-*.npy")) for name in "xy"))
    in_memory = GrowingRows(X[:1_000], Y[:1_000])
    both, kernel = (in_memory, on_disk), partial(CCAdL, linear, tuning=tuned(), progress_bar=False)
    runs = [begun(kernel(), rows, 30, 20, chains) for rows in both]

    def same(first=False):
        for mcmc, rows in zip(runs, both, strict=True):
            if not first:
                go_on(mcmc, *rows)
        expected, found = (mcmc.get_samples()["w"] for mcmc in runs)
        np.testing.assert_allclose(found, expected, rtol=2e-5)
        assert int(np.ravel(runs[1].last_state.fixed.known.rows)[0]) == len(in_memory)

    same(first=True)
    assert on_disk.refresh() == 0
    written(tmp_path, 1_000, 1_300, 1_400)
    assert on_disk.refresh() == 400
    in_memory.append(X[1_000:1_400], Y[1_000:1_400])
    same()
    if chains == 1:
        return
    where = np.arange(1_400) % 7 == 3
    for rows in (in_memory, on_disk):
        rows.remove(where)
    same()
    others = tmp_path / "others"
    others.mkdir()
    written(others, 1_400, 3_000)
    in_memory.append(X[1_400:3_000], Y[1_400:3_000])  # beyond the room
    on_disk.append(*(RowsOnDisk(others / f"{name}-0.npy") for name in "xy"))
    same()
    for x, y in zip(on_disk.arrays, in_memory.arrays, strict=True):
        np.testing.assert_array_equal(x[:], y)


def test_an_array_of_zarr_that_is_appended_to(tmp_path):
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(tmp_path / "y.zarr", shape=(500,), chunks=(100,), dtype="f4")
    array[:] = Y[:500]
    rows = GrowingRows(RowsOnDisk(zarr.open_array(tmp_path / "y.zarr", mode="r")))
    array.append(Y[500:700])  # by another process, as far as the holder knows
    before = next(iter(rows))
    assert rows.refresh() == 200
    np.testing.assert_array_equal(rows.arrays[0][:], Y[:700])
    # what was unpacked before is what it was
    np.testing.assert_array_equal(trimmed(((before,), {}))[0][0][:], Y[:500])
    array.resize((400,))
    with pytest.raises(ValueError, match="is now .* with 400 rows. Known rows must stay"):
        rows.refresh()


def test_rows_on_disk_that_cannot_come(tmp_path):
    folder = written(tmp_path, 0, 500, 700)
    rows = GrowingRows(*(RowsOnDisk(str(folder / f"{name}-*.npy")) for name in "xy"))

    def refused(told, action, error=ValueError):
        with pytest.raises(error, match=told):
            action()
        assert len(rows) == 700
        np.testing.assert_array_equal(rows.arrays[1][:], Y[:700])

    np.save(folder / "x-2.npy", X[700:900])
    refused("Array 0 has 200 new rows, but array 1 has 0. Wait", rows.refresh)
    np.save(folder / "y-2.npy", np.full(200, np.nan, np.float32))
    refused("Row 0 of .*y-2.npy.* has nan", rows.refresh, UnreadableRows)
    np.save(folder / "y-0a.npy", Y[:50])
    np.save(folder / "x-0a.npy", X[:50])
    refused(
        r"x-1.npy' had 200 rows when it was read, and is now .*x-0a.npy' with 50 rows", rows.refresh
    )
    mixed = RowsOnDisk(folder / "x-2.npy"), Y[:200]
    told = "New rows of array 1 are in memory, but its present rows are on disk"
    refused(told, lambda: rows.append(*mixed))
    with pytest.raises(ValueError, match="Array 0 of the rows is in memory, where `refresh`"):
        GrowingRows(X[:200], Y[:200]).refresh()
    with pytest.raises(
        ValueError, match=r"are on disk, but its present rows are in memory\. Append arrays"
    ):
        GrowingRows(X[:200]).append(RowsOnDisk(folder / "x-2.npy"))


def replaced(folder):
    np.save(folder / "new.npy", Y[2_000:2_500])
    os.replace(folder / "new.npy", folder / "y-0.npy")


def swapped(folder):
    for name in "xy":
        (folder / f"{name}-0.npy").rename(folder / "kept.npy")
        (folder / f"{name}-1.npy").rename(folder / f"{name}-0.npy")
        (folder / "kept.npy").rename(folder / f"{name}-1.npy")


def edited_in_place(folder):
    np.load(folder / "x-1.npy", mmap_mode="r+")[3, 1] += 1


def linked_to_another(folder):
    (folder / "y-1.npy").unlink()
    np.save(folder / "other.npy", Y[3_000:3_500])
    (folder / "y-1.npy").symlink_to(folder / "other.npy")


def old_times(folder):
    """With the size and the time of last change that the file had."""
    status = (folder / "y-0.npy").stat()
    np.save(folder / "y-0.npy", -Y[:500])
    os.utime(folder / "y-0.npy", ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("when", [pytest.param("at once", marks=pytest.mark.slow), "settled"])
@pytest.mark.parametrize(
    "change", [replaced, swapped, edited_in_place, linked_to_another, old_times]
)
def test_files_that_were_read_are_not_others_when_more_come(change, when, tmp_path, monkeypatch):
    if when == "settled":  # as if they had been written long ago
        monkeypatch.setattr("numpyro_sgmcmc.data.content_hash._SETTLED", -(10**9))
    written(tmp_path, 0, 500, 1_000)
    rows = GrowingRows(*(RowsOnDisk(str(tmp_path / f"{name}-*.npy")) for name in "xy"))
    digest = rows.identity.digest
    for name in "xy":  # the same contents are the same rows
        np.save(tmp_path / "again.npy", np.load(tmp_path / f"{name}-0.npy"))
        os.replace(tmp_path / "again.npy", tmp_path / f"{name}-0.npy")
    written(tmp_path, 1_000, 1_100)
    assert rows.refresh() == 100
    assert rows.refresh() == 0
    same = GrowingRows(X[:1_100], Y[:1_100]).identity
    np.testing.assert_array_equal(rows.identity.digest, same.digest)
    assert np.any(rows.identity.digest != digest)
    change(tmp_path)
    written(tmp_path, 1_100, 1_200)
    with pytest.raises(ValueError, match=r"Rows 0 to 999 of .* have changed since they were read"):
        rows.refresh()
    assert len(rows) == 1_100


@pytest.mark.parametrize("change", [edited_in_place, old_times])
def test_files_that_were_read_are_not_others_when_some_are_appended(change, tmp_path):
    written(tmp_path, 0, 500, 1_000)
    rows = GrowingRows(*(RowsOnDisk(str(tmp_path / f"{name}-*.npy")) for name in "xy"))
    change(tmp_path)
    others = tmp_path / "others"
    others.mkdir()
    written(others, 1_000, 1_100)
    new = [RowsOnDisk(others / f"{name}-0.npy") for name in "xy"]
    with pytest.raises(UnreadableRows, match="has been edited since it was read"):
        rows.append(*new)
    assert len(rows) == 1_000


def long_run(path, samples, **options):
    return LongRun(
        CCAdL(linear, progress_bar=False, tuning=None), num_warmup=50, num_samples=samples,
        store=path, progress_bar=False, **options,
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_store_goes_on_when_rows_have_come(place, tmp_path):
    folder, ends = tmp_path, (1_000, 1_500, 2_600)

    def rows_up_to(end):
        if place == "memory":
            return GrowingRows(X[:end], Y[:end])
        return GrowingRows(*(RowsOnDisk(str(folder / f"{name}-*.npy")) for name in "xy"))

    # in one process a holder that grows, and in others a new one each time
    grows = None
    for k, (start, end) in enumerate(itertools.pairwise((0, *ends)), 1):
        if place == "disk":
            written(folder, start, end)
        if grows is None:
            grows = rows_up_to(end)
            one = long_run(folder / "one.zarr", 30)
        elif place == "disk":
            grows.refresh()
        else:
            grows.append(X[start:end], Y[start:end])
        one.num_samples = 30 * k
        one.run(random.key(1), *grows)
        other = long_run(folder / "other.zarr", 30 * k)
        other.run(random.key(1), *rows_up_to(end))
        # up to rounding: the room is another one
        np.testing.assert_allclose(other.get_samples()["w"], one.get_samples()["w"], rtol=1e-5)
        assert other.first_draw == one.first_draw == 30 * (k - 1)
        assert int(other.last_state.fixed.known.rows) == end
        assert growth(other).rows == end
    store = xr.open_zarr(folder / "other.zarr", group="sample_stats", consolidated=False)
    np.testing.assert_array_equal(store["rows"], np.repeat(ends, 30))
    for stats in (other.get_extra_fields(), to_arviz(other)["sample_stats"]):
        np.testing.assert_array_equal(np.ravel(stats["rows"]), np.repeat(ends, 30))
    with pytest.raises(ValueError, match="The first 60 draws of each chain are from fewer rows"):
        certify(other)
    # moments are of the draws that know all rows
    mean = one.moments["w"].sel(statistic="mean")
    np.testing.assert_allclose(mean, one.get_samples()["w"][60:].mean(0), rtol=1e-4)
    # what has been drawn stays, without rows to come
    again = long_run(folder / "one.zarr", 90)
    again.run(random.key(1), *rows_up_to(ends[-1]))
    assert again.first_draw == 60

    def refused(told, *rows):
        with pytest.raises(ValueError, match=told):
            long_run(folder / "one.zarr", 120).run(random.key(1), *rows)
        assert long_run(folder / "one.zarr", 90).stopped is None

    refused("has draws from 2,600 rows, but this run has 2,000", *GrowingRows(X[:2_000], Y[:2_000]))
    others = Y[:2_700].copy()
    others[2_000] += 1
    refused(
        "The 2,600 rows of the store .* have changed, in values or order, at row 0 or later",
        *GrowingRows(X[:2_700], others),
    )
    refused("was begun with a `GrowingRows`, but this run has arrays", X[:2_600], Y[:2_600])
