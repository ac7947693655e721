# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Importance minibatches: exact over all minibatches, the law of a draw, and that of a chain."""

from itertools import product
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest
from scipy.stats import chi2
from test_strata import SMALL, W, X, Y, in_a_second_dimension, regression, row_gradient, target_of

from numpyro_sgmcmc import SGLD, CCAdL, RowsOnDisk, gradient_noise
from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.importance import Probabilities, probabilities_of
from numpyro_sgmcmc.gradients.covariance import Full
from numpyro_sgmcmc.gradients.estimators import minibatch_gradient, sub_batch_gradient
from numpyro_sgmcmc.target.metric import IdentityMetric
from numpyro_sgmcmc.target.potential import full_data_gradient

COMPILE_QUICKLY = True

RNG = np.random.default_rng(0)
TICKETS = 2**32


def tickets_of(found):
    """How many of the 2**32 tickets each row has."""
    return np.diff(np.asarray(found.last, np.int64), prepend=-1)


# --- one draw


@pytest.mark.parametrize("size", [1, 2, 11, 1_000, 1_000_000])
@pytest.mark.parametrize("kind", ["equal", "none", "one", "lognormal"])
def test_tickets(size, kind):
    """Whole numbers in proportion to the probabilities, and weights that are exactly theirs."""
    importance = {
        "equal": np.ones(size, np.float32),
        "none": np.zeros(size, np.float32),
        "one": np.eye(1, size, size // 2, np.float32)[0],
        "lognormal": np.exp(2 * RNG.standard_normal(size)).astype(np.float32),
    }[kind]
    found = probabilities_of(importance, 10)
    tickets, wide = tickets_of(found), importance.astype(float)
    expected = np.full(size, 1 / size)
    if wide.sum() > 0:
        expected = (wide / wide.sum() + 1 / size) / 2
    assert tickets.sum() == TICKETS and np.all(np.abs(tickets - TICKETS * expected) <= 1)
    exact = TICKETS / (size * tickets)
    np.testing.assert_allclose(found.weights, exact, rtol=1e-7)
    assert exact.max() <= 2 * (1 + 2 * size / TICKETS)
    # the first and the last ticket of every row are its own
    ends = np.cumsum(tickets)
    for ticket in (ends - tickets, ends - 1):
        rows = jax.jit(found.rows_of)(jnp.asarray(ticket.astype(np.uint32)))
        assert rows.dtype == jnp.int32 and np.array_equal(rows, np.arange(size))
    drawn = RNG.integers(0, TICKETS, 100_000)
    rows = found.rows_of(jnp.asarray(drawn.astype(np.uint32)))
    np.testing.assert_array_equal(rows, np.searchsorted(ends, drawn, side="right"))


def test_draws_are_of_their_probabilities():
    """Each row as often as it is to be, and pairs of draws of a minibatch independent."""
    found = probabilities_of(np.arange(20.0) ** 3, 3)
    steps = 40_000
    rows = jax.jit(jax.vmap(lambda step: found.draw(random.key(3), step)))(jnp.arange(steps))
    q = tickets_of(found) / TICKETS
    seen = np.bincount(np.ravel(rows), minlength=20)
    statistic = np.sum((seen - 3 * steps * q) ** 2 / (3 * steps * q))
    assert 1e-4 < chi2.sf(statistic, 19) < 1 - 1e-4
    pairs = np.bincount(np.asarray(rows)[:, 0] * 20 + np.asarray(rows)[:, 1], minlength=400)
    expected = steps * np.outer(q, q).ravel()
    statistic = np.sum((pairs - expected) ** 2 / expected)
    assert 1e-4 < chi2.sf(statistic, 399) < 1 - 1e-4
    assert np.array_equal(rows[7], found.draw(random.key(3), 7))


# --- one minibatch


@pytest.mark.parametrize(
    "model", [regression, pytest.param(in_a_second_dimension, marks=pytest.mark.nightly)]
)
def test_over_all_minibatches(model):
    """The mean of the gradient, its covariance, and the mean of its estimate: no chance in it."""
    n = 3
    found = probabilities_of(np.exp(RNG.standard_normal(SMALL)), n)
    target = target_of(model, jnp.asarray(X), jnp.asarray(Y), n)
    potential, key, position = target.potential(IdentityMetric()), random.key(0), W["w"]
    factors, groups = {"rows": found.allocation.factor}, {"rows": found.allocation.groups}

    def observed(numbers):
        rows = {"rows": DrawnRows(numbers, weights=found.weights_of(numbers))}
        plain = minibatch_gradient(potential, rows, key)(position)
        held = sub_batch_gradient(potential, rows, key, factors, Full(3), groups)(position)
        return plain, held

    minibatches = np.array(list(product(range(SMALL), repeat=n)), np.int32)
    q = tickets_of(found) / TICKETS
    probability = q[minibatches].prod(axis=1)
    plain, held = jax.tree.map(
        lambda x: np.asarray(x, float), jax.vmap(observed)(jnp.asarray(minibatches))
    )
    whole, gradient = full_data_gradient(potential, target.view.plates, W, key)
    np.testing.assert_allclose(probability @ plain.potential, whole, rtol=1e-5)
    mean = probability @ plain.gradient
    np.testing.assert_allclose(mean, gradient["w"], rtol=1e-4)
    np.testing.assert_allclose(held.gradient, plain.gradient, rtol=1e-4, atol=1e-4)

    off = plain.gradient - mean
    covariance = (probability[:, None] * off).T @ off
    rows = np.asarray(jax.vmap(lambda i: row_gradient(potential, i))(jnp.arange(SMALL)), float)
    total = rows.sum(axis=0)
    formula = ((rows / q[:, None]).T @ rows - np.outer(total, total)) / n
    np.testing.assert_allclose(covariance, formula, rtol=1e-3, atol=1e-3 * formula.max())
    estimated = np.tensordot(probability, held.noise, 1)
    np.testing.assert_allclose(estimated, covariance, rtol=1e-3, atol=1e-3 * formula.max())


# --- the law of a chain

N, BATCH, D = 600, 60, 50


def gaussian_mean(x, precision, batch_size=BATCH):
    prior = dist.ImproperUniform(dist.constraints.real_vector, (), (D,))
    theta = numpyro.sample("theta", prior)
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        numpyro.factor("x", -0.5 * precision * jnp.sum((x[i] - theta) ** 2, -1))


@pytest.fixture(scope="module")
def uneven():
    """Rows of three spreads in a random order."""
    spread = np.random.default_rng(5).permutation(np.repeat([2.0, 10.0, 60.0], [400, 190, 10]))
    x = np.random.default_rng(6).standard_normal((N, D)) * spread[:, None]
    return np.asarray(x, np.float32)


def kernel_of(method, *args, **kwargs):
    return method(
        gaussian_mean, *args, subsampling="importance", gradient="minibatch", progress_bar=False,
        **kwargs,
    )  # fmt: skip


def law_of(kernel, x, num_samples=6_000):
    """The variance of the draws, the mean over coordinates, its standard error, and the mean."""
    mcmc = MCMC(kernel, num_warmup=num_samples // 4, num_samples=num_samples, progress_bar=False)
    mcmc.run(random.key(1), x, 1.0 / N, init_params={"theta": jnp.asarray(x.mean(0))})
    off = np.asarray(mcmc.get_samples(True)["theta"], float) - x.mean(0)
    squares = off**2
    errors = squares.std((0, 1)) / np.sqrt(effective_sample_size(squares))
    return squares.mean(), np.sqrt(np.mean(errors**2) / D), off.mean((0, 1))


def sgld_variance(x, found, h):
    """
    Of theta <- theta - h (s theta - b) + sqrt(2 h) z, where s is the mean of the weights in a
    minibatch and b that of the weighted rows: noise that also depends on theta.
    """
    q = tickets_of(found) / TICKETS
    weights = 1 / (N * q)
    variance_of_s = (np.sum(q * weights**2) - 1) / BATCH
    off = x.astype(float) - x.mean(0, float)
    variance_of_b = np.sum((q * weights**2)[:, None] * off**2, axis=0).mean() / BATCH
    return (h**2 * variance_of_b + 2 * h) / (2 * h - h**2 * (1 + variance_of_s)), variance_of_b


@pytest.mark.slow
def test_law(uneven):
    """SGLD has the variance that its noise makes, and CCAdL that of the posterior."""
    x, h = uneven, 0.5
    kernel = kernel_of(SGLD, h)
    found, error, _ = law_of(kernel, x)
    drawn = kernel.tuning.strata["rows"]
    assert isinstance(drawn, Probabilities)
    expected, noise = sgld_variance(x, drawn, h)
    alike = x.var(0).mean() / BATCH
    assert noise < 0.5 * alike
    assert error < 0.01 * expected and abs(found - expected) < 3.5 * error
    # corrected for by an estimate from the weighted rows
    found, error, _ = law_of(kernel_of(CCAdL, h, 1.0, covariance="diagonal"), x)
    assert error < 0.02 and abs(found - 1) < 3.5 * error


@pytest.mark.nightly
def test_forgotten_weights_are_noticed(uneven, monkeypatch):
    monkeypatch.setattr(Probabilities, "weights_of", lambda self, rows: jnp.ones(BATCH))
    _, _, mean = law_of(kernel_of(CCAdL, 0.5, 1.0, covariance="diagonal"), uneven, 1_500)
    assert np.mean(mean**2) > 0.2


# --- with a kernel


@pytest.mark.nightly
def test_kept_with_the_kernel(uneven):
    """In texts, records, copies and pickles, made anew for other data, refused for others."""
    kernel = kernel_of(CCAdL)
    tuning = kernel.tune(random.key(0), uneven, 1.0 / N)
    drawn = tuning.strata["rows"]
    assert f"probabilities of 'rows': {drawn}" in str(tuning)
    mcmc = MCMC(kernel_of(CCAdL, tuning=tuning), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(random.key(0), uneven, 1.0 / N)
    assert mcmc.sampler.settings["probabilities"] == str(drawn)
    assert np.all(np.isfinite(gradient_noise(mcmc)["eigenvalue"]))
    other = pickle.loads(pickle.dumps(mcmc.sampler)).with_step_size(0.1)
    again = MCMC(other, num_warmup=5, num_samples=5, progress_bar=False)
    again.run(random.key(0), uneven, 1.0 / N)
    np.testing.assert_array_equal(again.last_state.fixed.strata["rows"].last, drawn.last)
    turned = MCMC(kernel_of(CCAdL, tuning=tuning), num_warmup=5, num_samples=5, progress_bar=False)
    turned.run(random.key(0), uneven[::-1].copy(), 1.0 / N)
    anew = turned.last_state.fixed.strata["rows"]
    wide = np.argsort(-np.sum(uneven[::-1] ** 2, axis=1))[:10]
    assert set(np.argsort(np.asarray(anew.weights))[:10]) == set(wide)
    with pytest.raises(ValueError, match="found with subsampling='importance'"):
        alike = MCMC(CCAdL(gaussian_mean, tuning=tuning), num_warmup=1, num_samples=1)
        alike.run(random.key(0), uneven, 1.0 / N)


def test_all_rows(uneven):
    """A minibatch of all rows is all rows."""
    mcmc = MCMC(kernel_of(SGLD, 0.1), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(random.key(0), uneven, 1.0 / N, N)
    assert not mcmc.last_state.fixed.strata
    again = MCMC(mcmc.sampler.with_step_size(0.05), num_warmup=5, num_samples=5, progress_bar=False)
    again.run(random.key(0), uneven, 1.0 / N, N)


@pytest.mark.nightly
def test_several_plates(uneven):
    """Each has probabilities of its own."""

    def model(x, z):
        theta = numpyro.sample("theta", dist.Normal(0, 10).expand([D]).to_event(1))
        for name, y, n in (("rows", x, BATCH), ("others", z, 10)):
            with numpyro.plate(name, len(y), subsample_size=n) as i:
                numpyro.sample(f"y of {name}", dist.Normal(theta, 20).to_event(1), obs=y[i])

    kernel = CCAdL(model, 0.01, 1.0, subsampling="importance", progress_bar=False)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(random.key(0), uneven, uneven[:40])
    found = kernel.tuning.strata
    sizes = {name: (one.allocation.size, one.allocation.batch_size) for name, one in found.items()}
    assert sizes == {"rows": (N, BATCH), "others": (40, 10)}
    assert all(len(one.weights) == one.allocation.size for one in found.values())


@pytest.mark.nightly
def test_rows_from_disk(uneven, tmp_path):
    np.save(tmp_path / "x.npy", uneven)
    draws = []
    for rows in (uneven, RowsOnDisk(tmp_path / "x.npy")):
        kernel = kernel_of(CCAdL, 0.5, 1.0, covariance="diagonal")
        mcmc = MCMC(kernel, num_warmup=10, num_samples=30, progress_bar=False)
        mcmc.run(random.key(1), rows, 1.0 / N, init_params={"theta": jnp.zeros(D)})
        draws.append(np.asarray(mcmc.get_samples()["theta"]))
    np.testing.assert_allclose(*draws, rtol=1e-3, atol=1e-3)
