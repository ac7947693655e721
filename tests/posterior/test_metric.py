# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The map between parameters and coordinates."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc.posterior.metric import IdentityMetric, LowRankMetric, from_covariance, name_of

RNG = np.random.default_rng(0)
ROOT = RNG.standard_normal((4, 4)) * np.array([1e-4, 1.0, 30.0, 1e3])[:, None]
COVARIANCE = ROOT @ ROOT.T
CENTER = np.array([1.0, -2.0, 3.0, 500.0])
METRICS = {
    "identity": IdentityMetric(),
    "diagonal": from_covariance(np.diag(COVARIANCE), CENTER, jnp.float32),
    "low_rank": LowRankMetric(
        jnp.asarray(CENTER, jnp.float32),
        jnp.sqrt(jnp.diag(jnp.asarray(COVARIANCE, jnp.float32))),
        jnp.asarray(np.linalg.qr(RNG.standard_normal((4, 2)))[0], jnp.float32),
        jnp.array([0.1, 5.0]),
    ),
    "dense": from_covariance(COVARIANCE, CENTER, jnp.float32),
}


@pytest.mark.parametrize("name", METRICS)
def test_maps_belong_together(name):
    metric = METRICS[name]
    coordinates = random.normal(random.key(0), (4,))
    step = random.normal(random.key(1), (4,))
    values = metric.values(coordinates)
    np.testing.assert_allclose(metric.coordinates(values), coordinates, atol=1e-2)
    _, tangent = jax.jvp(metric.values, (coordinates,), (step,))
    np.testing.assert_allclose(metric.direction(step), tangent, rtol=1e-4)
    _, pullback = jax.vjp(metric.values, coordinates)
    np.testing.assert_allclose(metric.pullback(values), pullback(values)[0], rtol=1e-4)
    moved = metric.moved(values, coordinates, coordinates + step)
    np.testing.assert_allclose(moved, metric.values(coordinates + step), rtol=1e-5, atol=1e-3)
    factor = jax.vmap(metric.direction, 1, 1)(jnp.eye(4))
    variances = metric.variances(jnp.zeros(4))
    np.testing.assert_allclose(variances, jnp.diag(factor @ factor.T), rtol=1e-4)
    assert name_of(metric) == name
    if name != "identity":
        # a step that is undone leaves every digit as it was
        assert np.array_equal(metric.moved(values, coordinates, coordinates), values)


def test_coordinates_have_unit_covariance():
    dense, diagonal = METRICS["dense"], METRICS["diagonal"]
    factor = np.asarray(dense.factor, float)
    np.testing.assert_allclose(factor @ factor.T / COVARIANCE, 1, rtol=1e-4)
    np.testing.assert_allclose(diagonal.scale**2, np.diag(COVARIANCE), rtol=1e-5)
    # of uncorrelated parameters each has its own coordinate
    alone = from_covariance(np.diag([4.0, 9.0]), np.zeros(2), jnp.float32)
    np.testing.assert_allclose(alone.factor, np.diag([2.0, 3.0]))


@pytest.mark.parametrize(
    ("covariance", "what"),
    [
        (np.array([1.0, 0.0]), "variance is 0"),
        (np.array([[1.0, 2.0], [2.0, 1.0]]), "eigenvalue is -1"),
        (np.array([1.0, np.nan]), "variance is nan"),
    ],
)
def test_not_a_covariance(covariance, what):
    with pytest.raises(ValueError, match=f"positive definite covariance .* {what}"):
        from_covariance(covariance, np.zeros(2), jnp.float32)
