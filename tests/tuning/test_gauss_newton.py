# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The Gauss-Newton matrix of rows is their Hessian where distributions are linear in parameters."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.handlers import mask
from numpyro.infer import MCMC, init_to_uniform
import pytest

from numpyro_sgmcmc import CCAdL
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.potential import ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.find_reparam import non_centred
from numpyro_sgmcmc.tuning.fisher import whitened_fisher
from numpyro_sgmcmc.tuning.gauss_newton import (
    has_distributions,
    uses_gauss_newton,
    whitened_gauss_newton,
    whitened_prior,
    whitened_rows,
)
from numpyro_sgmcmc.tuning.gauss_newton_check import excess
from numpyro_sgmcmc.tuning.hessians import whitened_hessian

COMPILE_QUICKLY = True

N, D = 60, 13
X = 0.3 * random.normal(random.key(0), (N, D))


class NoTree(dist.Distribution):
    """A distribution that loses its parameter when it is taken to pieces."""

    arg_constraints = {}
    support = dist.constraints.real

    def __init__(self, location):
        self.location = location
        super().__init__(jnp.shape(location), ())

    def sample(self, key, sample_shape=()):
        return self.location + random.normal(key, sample_shape + self.batch_shape)

    def log_prob(self, value):
        return -0.5 * (value - self.location) ** 2


def mixed(eta, scale):
    parts = dist.Normal(jnp.stack([eta, eta + 1], -1), scale)
    return dist.MixtureSameFamily(dist.Categorical(jnp.array([0.3, 0.7])), parts)


def laid_flat(eta, scale):
    three = jnp.stack([eta, -eta, 0 * eta], -1)
    return dist.Normal(three, scale).to_event(1)


#: Distributions of a row with a linear predictor and a scale of its own.
LAWS = {
    "normal": lambda eta, scale: dist.Normal(eta, scale),
    "logistic": lambda eta, scale: dist.Bernoulli(logits=eta),
    "probabilities": lambda eta, scale: dist.Bernoulli(probs=jax.nn.sigmoid(eta)),
    "rate": lambda eta, scale: dist.Poisson(jnp.exp(eta)),
    "trials": lambda eta, scale: dist.Binomial(7, logits=eta),
    "overdispersed": lambda eta, scale: dist.NegativeBinomial2(jnp.exp(eta), scale),
    "heavy tails": lambda eta, scale: dist.StudentT(4.0, eta, scale),
    "scale": lambda eta, scale: dist.Normal(0.0, jnp.exp(eta)),
    "positive": lambda eta, scale: dist.LogNormal(eta, scale),
    "zeros": lambda eta, scale: dist.ZeroInflatedPoisson(0.2, jnp.exp(eta)),
    "classes": lambda eta, scale: dist.Categorical(logits=jnp.stack([eta, -eta, 0 * eta], -1)),
    "transformed": lambda eta, scale: dist.TransformedDistribution(
        dist.StudentT(5.0, eta, scale), dist.transforms.ExpTransform()
    ),
    "shape": lambda eta, scale: dist.Gamma(jnp.exp(eta), scale),
    "correlated": lambda eta, scale: dist.MultivariateNormal(
        jnp.stack([eta, 2 * eta], -1), precision_matrix=jnp.array([[2.0, 0.5], [0.5, 1.0]])
    ),
    "mixture": mixed,
    "several": laid_flat,
    "truncated": lambda eta, scale: dist.TruncatedNormal(eta, scale, low=-9.0),
}


def target_of(law, y):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("rows", N, subsample_size=20) as i, mask(mask=i % 7 > 0):
            numpyro.sample("y", law(x[i] @ w, scale), obs=y[i])

    data = X, y
    return Target(read_model(model, init_to_uniform, data, {}), data, {})


def observed(law):
    return law(X @ jnp.full(D, 0.5), 0.7).sample(random.key(1))


def of_rows(target, point):
    """The Hessian of the potential of all rows, and the Gauss-Newton matrix."""
    key, rows = random.key(0), {"rows": jnp.arange(N)}
    potential = target.potential(IdentityMetric())

    def energy(x):
        return -potential.with_row_terms(target.unravel(x), rows, key)[1]["rows"].sum()

    unit = jnp.eye(len(point))
    (plate,) = target.model.plates
    found = whitened_gauss_newton(target, plate, unit, point, rows, key)
    return jax.hessian(energy)(point), found


@pytest.mark.nightly
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_it_is_the_hessian_far_from_the_mode(law):
    target = target_of(law, observed(law))
    assert has_distributions(target, *target.model.plates)
    point = ravel({"w": jnp.linspace(-1, 1, D), "scale": jnp.array(0.4)})
    hessian, found = of_rows(target, point)
    assert np.abs(hessian).max() > 1
    np.testing.assert_allclose(found, hessian, atol=2e-4 * np.abs(hessian).max())


def test_a_second_site_in_another_plate():
    """Its plate is inside that of the rows, and its entries count twice."""

    def model(x, y, z):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("rows", N, subsample_size=20, dim=-1) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, scale), obs=y[i])
            with numpyro.plate("questions", 3, dim=-2), numpyro.handlers.scale(scale=2.0):
                bias = jnp.array([[-1.0], [0.0], [1.0]])
                numpyro.sample("z", dist.Bernoulli(logits=x[i] @ w + bias), obs=z[:, i])

    y = observed(LAWS["normal"])
    z = (random.uniform(random.key(3), (3, N)) < 0.4).astype(jnp.float32)
    data = X, y, z
    target = Target(read_model(model, init_to_uniform, data, {}), data, {})
    assert has_distributions(target, *target.model.plates)
    point = ravel({"w": jnp.linspace(-1, 1, D), "scale": jnp.array(0.4)})
    hessian, found = of_rows(target, point)
    np.testing.assert_allclose(found, hessian, atol=2e-4 * np.abs(hessian).max())


@pytest.mark.nightly
def test_what_is_not_linear_is_seen_by_the_product():
    """The product of the comparison is the difference to the Hessian."""

    def bent(eta, scale):
        return dist.Normal(jnp.tanh(3 * eta), scale)

    target = target_of(bent, observed(bent))
    point = ravel({"w": jnp.linspace(-1, 1, D), "scale": jnp.array(0.4)})
    hessian, found = of_rows(target, point)
    assert np.abs(found - hessian).max() > 0.05 * np.abs(hessian).max()
    vector, unit = random.normal(random.key(2), point.shape), jnp.eye(len(point))
    rest = excess(target, unit, point, {"rows": jnp.arange(N)}, random.key(0), vector)
    scale = np.abs(hessian @ vector).max()
    np.testing.assert_allclose(rest, (hessian - found) @ vector, atol=1e-4 * scale)


def test_models_whose_rows_have_no_such_distributions():
    """Factors, distributions that are no trees, and too many parameters of a row."""
    y = observed(LAWS["normal"])

    def factor(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with numpyro.plate("rows", N, subsample_size=20) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])
            numpyro.factor("more", -((x[i] @ w) ** 2))

    def has_laws(target):
        return has_distributions(target, *target.model.plates)

    assert not has_laws(Target(read_model(factor, init_to_uniform, (X, y), {}), (X, y), {}))
    assert not has_laws(target_of(lambda eta, scale: NoTree(eta), y))

    def wide(eta, scale):
        return dist.Normal(jnp.stack([eta] * 30, -1), scale).to_event(1)

    assert not has_laws(target_of(wide, observed(wide)))


def hierarchy():
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    return tau * numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))


def horseshoe():
    local = numpyro.sample("local", dist.HalfCauchy(1).expand([D]).to_event(1))
    return local * hierarchy()


@pytest.mark.one_case
@pytest.mark.parametrize("coefficients", [hierarchy, horseshoe])
@pytest.mark.parametrize("has_law", [True, False])
def test_coordinates_of_hierarchies(coefficients, has_law):
    """The derivatives of effects, taken once, give the same matrix as those of each row."""

    def model(x, y):
        w = coefficients()
        with numpyro.plate("rows", N, subsample_size=20) as i:
            law = dist.Normal(x[i] @ w, 0.5)
            if has_law:
                numpyro.sample("y", law, obs=y[i])
            else:
                numpyro.factor("y", law.log_prob(y[i]))

    data = X, observed(LAWS["normal"])
    target = non_centred(Target(read_model(model, init_to_uniform, data, {}), data, {}))
    assert target.centring
    size = target.model.dimension
    factor, point = random.normal(random.key(2), (size, size)), jnp.cos(jnp.arange(1.0, size + 1))
    at = factor, point, {"rows": jnp.arange(N)}, random.key(0)
    direct = whitened_gauss_newton if has_law else whitened_fisher
    found, expected = whitened_rows(target, *at), direct(target, *target.model.plates, *at)
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max())


def of_two_plates(has_effects):
    """Measured rows, and groups of choices, with an effect each that is integrated out or none."""

    def model(x, y, z):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("rows", N, subsample_size=20, dim=-1) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, scale), obs=y[i])
        with numpyro.plate("groups", N // 3, subsample_size=10, dim=-2) as g:
            effect = numpyro.sample("effect", dist.Normal(0, scale)) if has_effects else 0.0
            with numpyro.plate("choices", 3, dim=-1) as k:
                row = 3 * g[:, None] + k
                numpyro.sample("z", dist.Bernoulli(logits=x[row] @ w + effect), obs=z[row])

    data = X, observed(LAWS["normal"]), observed(LAWS["logistic"])
    return Target(read_model(model, init_to_uniform, data, {}), data, {})


@pytest.mark.parametrize("has_effects", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_each_plate_adds_its_own_matrix(has_effects):
    """With the prior's part, and what it lacks for groups, the sum is the Hessian of all data."""
    target = of_two_plates(has_effects)
    assert uses_gauss_newton(target)
    point, key = ravel({"w": jnp.linspace(-1, 1, D), "scale": jnp.array(0.4)}), random.key(0)
    rows = {"rows": jnp.arange(N), "groups": jnp.arange(N // 3)}
    unit, vector = jnp.eye(len(point)), random.normal(random.key(2), point.shape)
    potential = target.potential(IdentityMetric())
    gradient, product = jax.jvp(
        jax.grad(lambda x: potential(target.unravel(x), rows, key)), (point,), (vector,)
    )
    found = whitened_rows(target, unit, point, rows, key)
    prior = whitened_prior(target, unit, point, gradient, key)
    rest = excess(target, unit, point, rows, key, vector) if has_effects else 0.0
    scale = np.abs(product).max()
    np.testing.assert_allclose((found + prior) @ vector + rest, product, atol=2e-4 * scale)
    # a part, and not all, is of the measured rows
    measured = whitened_gauss_newton(target, target.model.plates[0], unit, point, rows, key)
    assert np.linalg.eigvalsh(found - measured)[-1] > 1
    assert np.abs(rest).max() < 0.5 * scale


def test_rows_that_cross_have_hessians():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with numpyro.plate("users", N, subsample_size=20, dim=-2) as i:
            with numpyro.plate("items", N, subsample_size=20, dim=-1) as j:
                law = dist.Normal((x[i] @ w)[:, None] * (x[j] @ w), 1)
                numpyro.sample("y", law, obs=y[i[:, None], j])

    data = X, jnp.zeros((N, N))
    target = Target(read_model(model, init_to_uniform, data, {}), data, {})
    assert not uses_gauss_newton(target)


@pytest.mark.nightly
def test_two_tables_are_tuned_in_few_passes():
    """Hessians at each step took 462 for 13 parameters; the law is that of both tables in one."""

    def model(tables):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        for name, (x, y) in tables.items():
            with numpyro.plate(name, len(y), subsample_size=len(y) // 20) as i:
                numpyro.sample(f"y of {name}", dist.Normal(x[i] @ w, 1), obs=y[i])

    x = np.random.default_rng(0).normal(size=(6_000, D)).astype(np.float32)
    y = (x.sum(1) + np.random.default_rng(1).normal(size=6_000)).astype(np.float32)
    tables = {"first": (x[:4_000], y[:4_000]), "second": (x[4_000:], y[4_000:])}
    kernel = CCAdL(model, progress_bar=False)
    mcmc = MCMC(kernel, num_warmup=200, num_samples=4_000, progress_bar=False)
    mcmc.run(random.key(0), jax.tree.map(jnp.asarray, tables))
    passes = kernel.tuning.passes
    assert passes["centre"] + passes["metric"] < 200
    covariance = np.linalg.inv(x.T @ x + np.eye(D))
    draws = np.asarray(mcmc.get_samples()["w"], np.float64)
    z = (draws - covariance @ x.T @ y) / np.sqrt(np.diag(covariance))
    # of each mean and each variance, in standard errors
    for terms in z, z**2 - 1:
        error = terms.std(0) * effective_sample_size(terms[None]) ** -0.5
        assert np.abs(terms.mean(0) / error).max() < 4
        assert error.max() < 0.05


@pytest.mark.nightly
def test_hessians_in_coordinates_of_scale_mixtures():
    """By effects they are those of the potential in the coordinates."""

    def model(x, y):
        w = horseshoe()
        with numpyro.plate("rows", N, subsample_size=20) as i:
            numpyro.sample("y", dist.StudentT(4.0, x[i] @ w, 0.5), obs=y[i])

    data = X, observed(LAWS["heavy tails"])
    target = non_centred(Target(read_model(model, init_to_uniform, data, {}), data, {}))
    size, rows, key = target.model.dimension, {"rows": jnp.arange(N)}, random.key(0)
    factor, point = random.normal(random.key(2), (size, size)), jnp.cos(jnp.arange(1.0, size + 1))
    potential = target.potential(IdentityMetric())

    def energy(x):
        return potential(target.unravel(x), rows, key)

    expected = factor.T @ jax.hessian(energy)(point) @ factor
    found = whitened_hessian(target, factor, point, rows, key)
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max())
