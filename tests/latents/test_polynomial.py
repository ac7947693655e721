# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Degrees of functions, and groups whose latent variables are normal given all else."""

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

from numpyro_sgmcmc.posterior.model import read_model, unremarkable_values
from numpyro_sgmcmc.posterior.normal_groups import normal_draws_of, normal_log_integral
from numpyro_sgmcmc.posterior.polynomial import degree

Z = jnp.zeros((3, 2))
FACTOR = jnp.array([[1.0, 0.0], [0.5, 2.0]])
IS_SEEN = jnp.array([True, False, True])

POLYNOMIALS = {
    "constant": (lambda z: dist.Normal(0, 1).log_prob(jnp.ones(3)), 0),
    "linear": (lambda z: jnp.concatenate([z[::-1], 2 * z.T[:, :2]]) - 1, 1),
    "normal": (lambda z: dist.Normal(0, 1).log_prob(z), 2),
    "masked": (lambda z: dist.Normal(z[:, 0], 2).mask(IS_SEEN).log_prob(1.0), 2),
    "indexed": (lambda z: dist.Normal(z[jnp.array([0, 0, 1])], 2).log_prob(1.0), 2),
    "correlated": (lambda z: dist.MultivariateNormal(0.0, scale_tril=FACTOR).log_prob(z), 2),
    "slopes": (lambda z: dist.Normal(z @ FACTOR, 1).to_event(1).log_prob(Z), 2),
    "random walk": (lambda z: dist.GaussianRandomWalk(1.0, 2).log_prob(z), 2),
    "chosen by a constant": (lambda z: jnp.where(IS_SEEN, z[:, 0] ** 2, z[:, 1]), 2),
    "product": (lambda z: z[:, 0] * z[:, 1], 2),
    "cubic": (lambda z: z * z**2, 3),
    "Student's t": (lambda z: dist.StudentT(4.0, z).log_prob(1.0), math.inf),
    "scale": (lambda z: dist.Normal(0, 1 + z).log_prob(1.0), math.inf),
    "Laplace": (lambda z: dist.Laplace(z).log_prob(1.0), math.inf),
    "binary": (lambda z: dist.Bernoulli(logits=z).log_prob(1.0), math.inf),
    "step": (lambda z: jnp.where(z > 0, 1.0, 0.0), math.inf),
    "rounded": (lambda z: z.astype(int) * 1.0, math.inf),
    "half of a line": (lambda z: jnp.maximum(z, 0.0), math.inf),
    "index": (lambda z: jnp.arange(3.0)[z.astype(int)], math.inf),
    "truncated": (lambda z: dist.TruncatedNormal(0.0, 1.0, low=0.0).log_prob(z), math.inf),
}


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_degrees(name):
    function, expected = POLYNOMIALS[name]
    assert degree(function, Z) == degree(jax.jit(function), Z) == expected


Y = jnp.asarray(np.random.default_rng(0).standard_normal((12, 4)), jnp.float32)


def groups_of(latent, likelihood):
    def model(y):
        numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("groups", len(y), subsample_size=5) as g:
            a = latent()
            with numpyro.plate("members", y.shape[1]):
                numpyro.sample("y", likelihood(a), obs=y[g].T)

    return model


def normal():
    return numpyro.sample("a", dist.Normal(0, 1))


KINDS = {
    "normal": (normal, lambda a: dist.Normal(a, 1), True),
    "slopes": (
        lambda: numpyro.sample("a", dist.MultivariateNormal(jnp.zeros(4), jnp.eye(4))).T,
        lambda a: dist.Normal(a, 1),
        True,
    ),
    "standard effects": (normal, lambda a: dist.Normal(1 + 3 * a, 1), True),
    "robust": (normal, lambda a: dist.StudentT(4, a, 1), False),
    "robust effects": (lambda: numpyro.sample("a", dist.Cauchy(0, 1)), dist.Normal, False),
    "own scale": (normal, lambda a: dist.Normal(0, jnp.exp(a)), False),
    "positive": (lambda: numpyro.sample("a", dist.LogNormal(0, 1)), dist.Normal, False),
}


@pytest.mark.one_case
@pytest.mark.parametrize("kind", KINDS)
def test_normal_groups_are_found(kind):
    latent, likelihood, expected = KINDS[kind]
    view = read_model(groups_of(latent, likelihood), init_to_uniform, (Y,), {})
    (plate,) = view.model.plates
    assert plate.normal == expected
    assert (view.plates[0].points == 1 + plate.dimension) == expected
    assert not (expected and view.drawn_plates)


def sum_of_two(y):
    """Two effects of which a row knows the sum only."""
    sigma = numpyro.sample("sigma", dist.LogNormal(0, 1))
    with numpyro.plate("groups", len(y), subsample_size=5) as g:
        a = numpyro.sample("a", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("members", y.shape[1]):
            numpyro.sample("y", dist.Normal(a.sum(-1), sigma), obs=y[g].T)


YEARS = np.arange(2_000, 2_020, dtype=np.float32)


def trend(y):
    """A trend by the year, whose intercept is that of the year 0."""
    sigma = numpyro.sample("sigma", dist.LogNormal(0, 1))
    with numpyro.plate("groups", len(y), subsample_size=5) as g:
        a = numpyro.sample("a", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("members", y.shape[1], dim=-2):
            mean = a[..., 0] + YEARS[:, None] * a[..., 1] / 2_000
            numpyro.sample("y", dist.Normal(mean, sigma), obs=y[g].T)


CORRELATED = {
    "sum of two": (sum_of_two, np.ones((3, 2)), 0.005),
    "trend": (trend, np.stack([np.ones(20), YEARS / 2_000], axis=1), 0.01),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["trend", pytest.param("sum of two", marks=pytest.mark.nightly)])
def test_strongly_correlated_effects(name):
    """Value, slope and curvature in log sigma, against the law of the rows in double precision."""
    model, design, sigma = CORRELATED[name]
    rng = np.random.default_rng(1)
    effects = rng.standard_normal((40, 2)) @ design.T
    y = (effects + sigma * rng.standard_normal((40, len(design)))).astype(np.float32)
    view = read_model(model, init_to_uniform, (jnp.asarray(y),), {})
    assert view.model.plates[0].normal
    rows = {"groups": jnp.arange(40)}

    def found(x):
        return view.potential({"sigma": x}, rows, random.key(0), (jnp.asarray(y),), {})

    def exact(x):
        cov = design @ design.T + np.exp(2 * x) * np.eye(len(design))
        logs = np.linalg.slogdet(cov)[1] + len(design) * np.log(2 * np.pi)
        squares = np.einsum("ni,ij,nj->", y.astype(float), np.linalg.inv(cov), y.astype(float))
        return 0.5 * (40 * logs + squares) + 0.5 * x**2 + 0.5 * np.log(2 * np.pi)

    x, step = np.log(sigma), 0.01
    values = [exact(x + k * step) for k in (-1, 0, 1)]
    curvature = (values[2] - 2 * values[1] + values[0]) / step**2
    # units in which the posterior of log sigma has the standard deviation 1
    unit = curvature**0.5
    assert abs(found(x) - values[1]) < 0.05 * unit
    assert abs(jax.grad(found)(x) - (values[2] - values[0]) / (2 * step)) < 0.05 * unit
    assert abs(jax.grad(jax.grad(found))(x) / curvature - 1) < 0.01


def test_no_maximum():
    """The integral does not exist."""
    density = lambda z: (z**2)[:, 0]  # noqa: E731
    assert jnp.isnan(normal_log_integral(density, jnp.zeros((1, 1)))).all()


@jax.custom_jvp
def held(z):
    return z


held.defjvp(lambda primals, tangents: (primals[0], 0.0 * tangents[0]))


def test_derivatives_of_its_own():
    assert degree(lambda z: dist.Normal(0, 1).log_prob(held(z)), Z) == math.inf


@pytest.mark.nightly
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_far_from_the_start(shift):
    """Rounding does not grow with the distance of the data from zero."""
    view = read_model(groups_of(normal, lambda a: dist.Normal(a + shift, 1)), init_to_uniform,
                      (Y + shift,), {})  # fmt: skip
    zeros = unremarkable_values(view)

    def gradient(y):
        f = lambda z: view.potential(z, view.first_rows(), random.key(0), (y,), {})  # noqa: E731
        return ravel_pytree(jax.value_and_grad(f)(zeros))[0]

    at_zero = read_model(groups_of(normal, lambda a: dist.Normal(a, 1)), init_to_uniform, (Y,), {})
    f = lambda z: at_zero.potential(z, at_zero.first_rows(), random.key(0), (Y,), {})  # noqa: E731
    expected = ravel_pytree(jax.value_and_grad(f)(zeros))[0]
    # rows at 10,000 are themselves rounded to a thousandth
    assert jnp.allclose(gradient(Y + shift), expected, rtol=2e-3 if shift else 1e-5)


def test_draws_of_normal_densities():
    """Means and covariances of correlated densities."""
    precision = jnp.linalg.inv(FACTOR @ FACTOR.T)
    center = jnp.array([30.0, -20.0])
    density = lambda z: -0.5 * jnp.einsum("ni,ij,nj->n", z - center, precision, z - center)  # noqa: E731
    draws = normal_draws_of(density, jnp.zeros((20_000, 2)), random.key(0))
    error = jnp.linalg.norm(FACTOR, axis=1) / 20_000**0.5
    assert (jnp.abs(draws.mean(0) - center) < 4 * error).all()
    covariance = jnp.cov(draws.T)
    assert jnp.allclose(covariance, FACTOR @ FACTOR.T, atol=4 * 5 * 2**0.5 / 20_000**0.5)
