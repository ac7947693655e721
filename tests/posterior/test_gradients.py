# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

import math

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform
import pytest

from numpyro_sgmcmc.data.drawn_rows import drawn_rows
from numpyro_sgmcmc.data.subsampling import SCHEMES, sub_batches
from numpyro_sgmcmc.gradients.covariance import Diagonal, Full, LowRank
from numpyro_sgmcmc.gradients.estimators import (
    ESTIMATORS,
    minibatch_gradient,
    per_example_gradient,
    product_gradient,
)
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.potential import ravel
from numpyro_sgmcmc.posterior.target import Target

COMPILE_QUICKLY = True

SIZES = {"rows": 60, "columns": 40}
BATCHES = {"rows": 20, "columns": 12}
DATA = {
    name: np.exp(np.random.default_rng(k).standard_normal((size, 3))).astype(np.float32)
    for k, (name, size) in enumerate(SIZES.items())
}


class TwoPlates:
    """Two plates, each with the gradient ``x_i`` times a function of the position."""

    group_plates = frozenset()

    def values(self, position):
        return position

    direction = pullback = values

    def __call__(self, position, rows, rng_key):
        return self.with_row_terms(position, rows, rng_key)[0]

    def value_and_gradient(self, position, rows, rng_key):
        return jax.value_and_grad(self.__call__)(position, rows, rng_key)

    def with_row_terms(self, position, rows, rng_key):
        numbers = {name: drawn_rows(x).numbers for name, x in rows.items()}
        terms = {
            name: -SIZES[name] / len(index) * (jnp.asarray(DATA[name])[index] @ position**2)
            for name, index in numbers.items()
        }
        return 0.5 * jnp.sum(position**2) - sum(jnp.sum(t) for t in terms.values()), terms


potential = TwoPlates()
POSITION = jnp.array([1.0, -0.5, 0.3])


def draw(scheme, key, names, batches=BATCHES):
    return {
        name: SCHEMES[scheme].draw(random.fold_in(key, k), 0, SIZES[name], batches[name])
        for k, name in enumerate(names)
    }


def exact_covariance(scheme, names):
    """Covariance of the minibatch gradient from all rows, plates added up."""
    total = np.zeros((3, 3))
    for name in names:
        size, n = SIZES[name], BATCHES[name]
        per_row = DATA[name] * 2 * np.asarray(POSITION)
        ddof = 1 if scheme == "without_replacement" else 0
        factor = 1 - n / size if scheme == "without_replacement" else 1
        total += factor * size**2 / n * np.cov(per_row.T, ddof=ddof)
    return total


FACTORS = {
    scheme: {k: SCHEMES[scheme].factor(SIZES[k], BATCHES[k]) for k in SIZES} for scheme in SCHEMES
}
HELD = {"diagonal": Diagonal(), "full": Full(3)}


@pytest.mark.one_case
@pytest.mark.parametrize("names", [("rows",), ("rows", "columns")])
@pytest.mark.parametrize("scheme", ["without_replacement", "with_replacement"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("covariance", HELD)
def test_noise_estimate_is_unbiased(scheme, names, covariance, estimator):
    @jax.jit
    @jax.vmap
    def observe(key):
        rows = draw(scheme, key, names)
        oracle = ESTIMATORS[estimator](potential, rows, key, FACTORS[scheme], HELD[covariance])
        return oracle(POSITION), minibatch_gradient(potential, rows, key)(POSITION)

    observed, plain = observe(random.split(random.key(0), 20_000))
    np.testing.assert_allclose(observed.gradient, plain.gradient, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(observed.potential, plain.potential, rtol=1e-5)
    exact = exact_covariance(scheme, names)
    exact = np.diag(exact) if covariance == "diagonal" else exact
    noise = np.asarray(observed.noise)
    error = noise.std(0) / len(noise) ** 0.5
    assert error.max() < 0.02 * exact.max()
    assert np.all(np.abs(noise.mean(0) - exact) < 3 * error)
    # the covariance that is estimated is the one the gradients have
    found = np.cov(np.asarray(plain.gradient).T)
    np.testing.assert_allclose(
        np.diag(found) if covariance == "diagonal" else found,
        exact,
        rtol=0.1,
        atol=0.03 * exact.max(),
    )


@pytest.mark.parametrize("scheme", ["without_replacement", "with_replacement"])
def test_products_with_the_covariance_are_unbiased(scheme):
    vector = jnp.array([1.0, -2.0, 0.5])

    @jax.jit
    @jax.vmap
    def observe(key):
        keys, names = random.split(key), tuple(SIZES)
        rows, others = draw(scheme, keys[0], names), draw(scheme, keys[1], names)
        oracle = product_gradient(potential, rows, key, FACTORS[scheme], others)
        observed = oracle(POSITION)
        plain = minibatch_gradient(potential, rows, key)(POSITION)
        return observed.gradient - plain.gradient, observed.noise(vector)

    off, found = jax.tree.map(np.asarray, observe(random.split(random.key(0), 20_000)))
    assert np.all(off == 0)
    error = found.std(0) / len(found) ** 0.5
    exact = exact_covariance(scheme, tuple(SIZES)) @ np.asarray(vector)
    assert np.all(np.abs(found.mean(0) - exact) < 3 * error)
    assert error.max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "product"])
def test_all_rows_have_no_noise(estimator):
    rows = {name: jnp.arange(size) for name, size in SIZES.items()}
    factors = {k: SCHEMES["without_replacement"].factor(n, n) for k, n in SIZES.items()}
    plain = minibatch_gradient(potential, rows, random.key(0))(POSITION)
    if estimator == "product":
        oracle = product_gradient(potential, rows, random.key(0), factors, rows)
        noise = oracle(POSITION).noise(POSITION)
    else:
        oracle = ESTIMATORS[estimator](potential, rows, random.key(0), factors, Full(3))
        noise = oracle(POSITION).noise
    assert np.all(np.asarray(noise) == 0)
    np.testing.assert_allclose(oracle(POSITION).gradient, plain.gradient, rtol=1e-6)


@pytest.mark.parametrize("numbers", [3, 9, 21, 1_000])
@pytest.mark.parametrize("covariance", ["full", "low_rank"])
def test_single_rows_give_the_estimate_of_the_paper(covariance, numbers, monkeypatch):
    """One row at a time, in chunks with a rest, or at once: eq. (19) of Shang et al. f N^2/n."""
    monkeypatch.setattr("numpyro_sgmcmc.gradients.estimators.PER_EXAMPLE_NUMBERS", numbers)
    rows = {"rows": jnp.array([3, 14, 15, 9, 26, 5, 35])}
    factor = 1 - 7 / 60
    held = Full(3) if covariance == "full" else LowRank(3)
    oracle = per_example_gradient(potential, rows, random.key(0), {"rows": factor}, held)
    per_row = DATA["rows"][np.asarray(rows["rows"])] * 2 * np.asarray(POSITION)
    expected = factor * 60**2 / 7 * np.cov(per_row.T)
    found = oracle(POSITION).noise
    found = (
        found if covariance == "full" else jax.vmap(lambda v: held.product(found, v))(jnp.eye(3))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize(("n", "m"), [(2, 2), (7, 7), (10, 10), (13, 13), (64, 16), (500, 10)])
def test_sub_batches(n, m):
    assert sub_batches(n) == m


def test_one_row_shows_no_spread():
    with pytest.raises(ValueError, match="at least 2"):
        sub_batches(1)


@pytest.mark.parametrize("size", [3, 2_000])
def test_ravel(size):
    """The vector of ``ravel_pytree``, whichever way it is made."""
    tree = {"b": jnp.arange(3.0), "a": -jnp.ones(()), "w": jnp.arange(1.0 * size).reshape(1, -1)}
    chains = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), tree)
    np.testing.assert_array_equal(jax.jit(ravel)(tree), ravel_pytree(tree)[0])
    np.testing.assert_array_equal(jax.vmap(ravel)(chains)[1], 2 * ravel(tree))


def counts(x, y):
    """Poisson regression, whose gradients are not linear."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=500) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(x[i] @ w)), obs=y[i])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1_000_000, pytest.param(10_000_000, marks=pytest.mark.nightly)])
def test_single_precision_of_many_rows(size):
    """
    Of so many rows: sums over all of them, and the differences of a control variate a posterior
    standard deviation away, in units of the standard deviation that the gradient has in draws.
    """
    rng = np.random.default_rng(0)
    x = np.stack([np.ones(size, np.float32), rng.standard_normal(size, np.float32)], axis=1)
    y = rng.poisson(np.exp(x @ [1.0, 0.3])).astype(np.float32)
    model = counts, init_to_uniform, (jnp.asarray(x), jnp.asarray(y)), {}
    target = Target(read_model(*model), *model[2:])
    center = np.array([1.0, 0.3])
    away = center + np.array([1.0, -1.0]) / np.sqrt(size)

    def exact(w, i=slice(None)):
        w, x64, y64 = np.float32(w).astype(float), x[i].astype(float), y[i].astype(float)
        rate = np.exp(x64 @ w)
        terms = rate - y64 * (x64 @ w)
        return terms, w + size / len(y64) * (x64.T @ (rate - y64))

    anchor = jax.jit(lambda w: target.anchor({"w": w}))(jnp.asarray(center, jnp.float32))
    terms, gradient = exact(center)
    unit = np.sqrt(size * np.exp(1.0))
    assert np.all(np.abs(anchor.gradient["w"] - gradient) < 0.01 * unit)
    constant = np.sum(
        np.vectorize(math.lgamma)(np.arange(200) + 1) * np.bincount(y.astype(int), minlength=200)
    )
    value = terms.sum() + constant + np.sum(center**2) / 2 + np.log(2 * np.pi)
    assert abs(anchor.potential / value - 1) < 1e-6
    one_after_the_other = np.cumsum(terms, dtype=np.float32)[-1]
    assert abs(one_after_the_other / terms.sum() - 1) > 1e-5  # what there is to get wrong

    rows = {"rows": jnp.asarray(rng.choice(size, 500, replace=False))}
    controlled = target.potential(IdentityMetric(), anchor)
    there = jnp.asarray(away, jnp.float32)
    found = controlled.value_and_gradient({"w": there}, rows, random.key(0))[1]["w"]
    i = np.asarray(rows["rows"])
    right = gradient + exact(away, i)[1] - exact(center, i)[1]
    assert np.all(np.abs(found - right) < 0.01 * unit)
