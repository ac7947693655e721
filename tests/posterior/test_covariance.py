# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Every way to hold a covariance against the matrix itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc.gradients.covariance import (
    FEW_LANCZOS_STEPS,
    Diagonal,
    Full,
    LowRank,
    MatrixFree,
)
from numpyro_sgmcmc.kernels.integrators import phi

COMPILE_QUICKLY = True

D = 12
RNG = np.random.default_rng(0)
SAMPLES = jnp.asarray(RNG.standard_normal((30, D)) * np.linspace(0.1, 1.0, D), jnp.float32)
VECTOR = jnp.asarray(RNG.standard_normal(D), jnp.float32)
HELD = {
    "diagonal": Diagonal(),
    "full": Full(D),
    "low_rank": LowRank(D),
    "matrix_free": MatrixFree(),
}
FUNCTIONS = {
    "inverse": lambda v: 1 / (1.2 + 0.25 * v),
    "exponential": lambda v: jnp.exp(-0.3 * v),
    "root": lambda v: jnp.sqrt(jnp.maximum(1.0 - 0.01 * v, 0.0)),
}


def matrix(name, samples=SAMPLES):
    full = np.asarray(samples.T @ samples, float)
    return np.diag(np.diag(full)) if name == "diagonal" else full


def hold(name):
    if name == "matrix_free":
        return lambda p: SAMPLES.T @ (SAMPLES @ p)
    return HELD[name].outer(SAMPLES)


@pytest.mark.parametrize("name", HELD)
def test_products_and_traces(name):
    covariance = hold(name)
    found = HELD[name].product(covariance, VECTOR)
    np.testing.assert_allclose(found, matrix(name) @ VECTOR, rtol=1e-4, atol=1e-4)
    probes = jax.random.normal(jax.random.key(0), (4_000, D))
    traces = jax.vmap(lambda r: HELD[name].trace(covariance, r))(probes)
    error = np.std(traces) / 4_000**0.5
    assert abs(traces.mean() - np.trace(matrix(name))) < 3 * error + 1e-3


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", HELD)
def test_functions_of_the_covariance(name, function):
    eigenvalues, vectors = np.linalg.eigh(matrix(name))
    f = FUNCTIONS[function]
    expected = vectors @ (np.asarray(f(eigenvalues)) * (vectors.T @ np.asarray(VECTOR)))
    found = jax.jit(lambda p: HELD[name].apply(hold(name), f, p))(VECTOR)
    # five products are all that is spent where each costs a gradient
    tolerance = 2e-2 if name == "matrix_free" else 1e-4
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max())


def test_ill_conditioned_inverse():
    """Condition number 25: the error of Krylov methods is at most 2 (4 / 6)^16, 3e-3."""
    vectors, _ = np.linalg.qr(RNG.standard_normal((200, 200)))
    covariance = jnp.asarray(vectors @ np.diag(np.linspace(0, 96, 200)) @ vectors.T, jnp.float32)
    right = jnp.asarray(RNG.standard_normal(200), jnp.float32)
    found = Full(200).apply(covariance, lambda v: 1 / (1 + 0.25 * v), right)
    expected = np.linalg.solve(np.eye(200) + 0.25 * np.asarray(covariance), np.asarray(right))
    assert np.linalg.norm(found - expected) < 3e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("spectrum", ["flat", "powers", "geometric", "three directions"])
def test_few_steps_for_short_ones(spectrum):
    """No entry of h^2 V / 4 above a quarter: an error of 1e-4 for spectra of any shape."""
    values = {
        "flat": np.linspace(0.5, 1.0, 100),
        "powers": np.arange(1.0, 101.0) ** -2,
        "geometric": np.geomspace(1e-2, 1.0, 100),
        "three directions": np.repeat([1.0, 1e-3], [3, 97]),
    }[spectrum]
    vectors, _ = np.linalg.qr(RNG.standard_normal((100, 100)))
    covariance = (vectors * values) @ vectors.T
    covariance *= 0.25 / covariance.diagonal().max()
    right = RNG.standard_normal(100)
    expected = np.linalg.solve(np.eye(100) + covariance, right)

    def error(held):
        found = held.apply(
            jnp.asarray(covariance, jnp.float32), lambda v: 1 / (1 + v), jnp.asarray(right)
        )
        return np.linalg.norm(found - expected) / np.linalg.norm(expected)

    assert error(Full(100, FEW_LANCZOS_STEPS)) < 1e-4
    if spectrum != "three directions":
        assert error(Full(100, 2)) > 1e-3  # the negative control


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["full", "low_rank", "matrix_free"])
@pytest.mark.parametrize("vector", [jnp.zeros(D), jnp.eye(D)[0]])
def test_nothing_divides_by_zero(name, vector):
    """No covariance, no vector, or a vector that is an eigenvector."""
    nothing = (lambda p: 0 * p) if name == "matrix_free" else HELD[name].zeros(D, jnp.float32)
    for covariance in (nothing, hold(name)):
        assert np.all(np.isfinite(HELD[name].apply(covariance, FUNCTIONS["inverse"], vector)))
    found = HELD[name].apply(nothing, FUNCTIONS["inverse"], vector)
    np.testing.assert_allclose(found, vector / 1.2, rtol=1e-5)


@pytest.mark.parametrize("name", ["diagonal", "full", "low_rank"])
def test_averages(name):
    """The average of two covariances, and the largest eigenvalue of it."""
    held, (first, second) = HELD[name], np.split(SAMPLES, 2)
    found = held.add(0.75, held.outer(first), 0.25, held.outer(second))
    expected = 0.75 * matrix(name, first) + 0.25 * matrix(name, second)
    products = jax.vmap(lambda v: held.product(found, v))(jnp.eye(D))
    np.testing.assert_allclose(products, expected, rtol=1e-4, atol=1e-4)
    largest = held.largest(found, VECTOR)
    np.testing.assert_allclose(largest, np.linalg.eigvalsh(expected)[-1], rtol=1e-3)


@pytest.mark.parametrize("samples", [4, 150])
def test_low_rank_keeps_the_diagonal_and_the_leading_directions(samples):
    """An average over time with three wide directions and rank 3, and none that is missing."""
    held, rng = LowRank(3), np.random.default_rng(1)
    wide = np.linalg.qr(rng.standard_normal((D, 3)))[0] * np.array([6.0, 5.0, 4.0])
    average, exact = held.zeros(D, jnp.float32), np.zeros((D, D))
    add = jax.jit(held.add)
    for t in range(1, 400):
        z = rng.standard_normal((samples, 3)) @ wide.T + 0.3 * rng.standard_normal((samples, D))
        average = add(1 - 1 / t, average, 1 / t, held.outer(jnp.asarray(z, jnp.float32)))
        exact += (z.T @ z - exact) / t
    found = np.asarray(jax.vmap(lambda v: held.product(average, v))(jnp.eye(D)))
    np.testing.assert_allclose(np.diag(found), np.diag(exact), rtol=1e-3)
    assert np.linalg.norm(found - exact) < 0.03 * np.linalg.norm(exact)
    assert np.linalg.norm(np.diag(np.diag(exact)) - exact) > 0.3 * np.linalg.norm(exact)


@pytest.mark.parametrize("rank, samples", [(20, 25), (20, 54), (40, 200), (80, 10)])
def test_matrices_of_one_thread(rank, samples, monkeypatch):
    """Threads of LAPACK that spin between steps take the cores from the gradient."""
    eigh, sizes = jnp.linalg.eigh, []
    monkeypatch.setattr(jnp.linalg, "eigh", lambda x: sizes.append(len(x)) or eigh(x))
    held = LowRank(rank)
    held.add(0.9, held.zeros(500, jnp.float32), 0.1, held.outer(jnp.ones((samples, 500))))
    assert sizes and max(sizes) <= max(64, 2 * rank)


def test_phi():
    """Positive and smooth, for negative arguments and through zero, with its derivative."""
    x = np.concatenate([-np.geomspace(1e-8, 20, 60), [0.0], np.geomspace(1e-8, 20, 60)])
    exact = np.ones_like(x)
    exact[x != 0] = -np.expm1(-2 * x[x != 0]) / (2 * x[x != 0])
    np.testing.assert_allclose(phi(jnp.asarray(x, jnp.float32)), exact, rtol=2e-6)
    slopes = jax.vmap(jax.grad(phi))(jnp.array([-1e-3, 0.0, 1e-3]))
    np.testing.assert_allclose(slopes, -1 + 4 / 3 * np.array([-1e-3, 0.0, 1e-3]), rtol=1e-4)
