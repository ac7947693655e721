# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Minibatches of every kind of model average to its full-data potential and gradient."""

from itertools import product
import pickle

from flax import linen, nnx
import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
from numpyro.contrib.module import random_flax_module, random_nnx_module
import numpyro.distributions as dist
from numpyro.infer import Predictive, log_likelihood
from numpyro.infer.initialization import init_to_median, init_to_uniform
from numpyro.infer.util import log_density, potential_energy
import pytest

from numpyro_sgmcmc import full_data
from numpyro_sgmcmc.posterior.checks.arguments import as_arrays
from numpyro_sgmcmc.posterior.handlers import Plate
from numpyro_sgmcmc.posterior.initial_values import initial_values
from numpyro_sgmcmc.posterior.model import read_model

COMPILE_QUICKLY = True

N, BATCH = 60, 12
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, 3)).astype(np.float32)
Y = (X[:, 0] + 0.5 * RNG.standard_normal(N) > 0).astype(np.int32)
Z = (X @ np.array([1.0, -1.0, 0.5]) + RNG.standard_normal(N)).astype(np.float32)
COUNTS = RNG.poisson(3, N)
GROUP = RNG.integers(0, 4, N)


def weights(name="w", size=3):
    return numpyro.sample(name, dist.Normal(0, 1).expand([size]).to_event(1))


def logistic(x, y, batch_size=BATCH):
    w = weights()
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def with_subsample(x, y, batch_size=BATCH):
    w = weights()
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size):
        x, y = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def with_factor(x, z):
    w = weights()
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        numpyro.factor("likelihood", -0.5 * (z[i] - x[i] @ w) ** 2)
    numpyro.factor("penalty", -jnp.abs(w).sum())


def with_scale(x, z):
    w = weights()
    with (
        numpyro.plate("rows", N, subsample_size=BATCH) as i,
        numpyro.handlers.scale(scale=0.5 + jnp.arange(N)[i] / N),
    ):
        numpyro.sample("z", dist.Normal(x[i] @ w, 1), obs=z[i])


def with_mask(x, z):
    w = weights()
    with (
        numpyro.plate("rows", N, subsample_size=BATCH) as i,
        numpyro.handlers.mask(mask=x[i, 1] > 0),
    ):
        numpyro.sample("z", dist.Normal(x[i] @ w, 1), obs=z[i])


def two_plates(x, z, counts):
    w = weights()
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        numpyro.sample("z", dist.Normal(x[i] @ w, sigma), obs=z[i])
    with numpyro.plate("events", N, subsample_size=20) as j:
        numpyro.sample("counts", dist.Poisson(jnp.exp(w[0])), obs=counts[j])


def nested_plates(table):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    rows = numpyro.plate("rows", table.shape[0], subsample_size=3, dim=-2)
    columns = numpyro.plate("columns", table.shape[1], subsample_size=4, dim=-1)
    with rows as i, columns as j:
        numpyro.sample("table", dist.Normal(mu, 1), obs=table[i[:, None], j])


def hierarchical(x, z, group):
    tau = numpyro.sample("tau", dist.HalfCauchy(1))
    with numpyro.plate("groups", 4):
        alpha = numpyro.sample("alpha", dist.Normal(0, tau))
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        numpyro.sample("z", dist.StudentT(4, alpha[group[i]] + x[i, 0], 1), obs=z[i])


def dynamic_support(z):
    top = numpyro.sample("top", dist.HalfNormal(3))
    scale = numpyro.sample("scale", dist.Uniform(0, top))
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        numpyro.sample("z", dist.Normal(0, 0.1 + scale), obs=z[i])


class Flax(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(linen.tanh(linen.Dense(4)(x)))[..., 0]


def flax_network(x, y):
    network = random_flax_module("network", Flax(), dist.Normal(0, 1), input_shape=(1, 3))
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Bernoulli(logits=network(x[i])), obs=y[i])


def nnx_network(x, y):
    module = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    network = random_nnx_module("network", module, dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Bernoulli(logits=network(x[i])[..., 0]), obs=y[i])


def randomised(x, z):
    w = weights()
    jitter = random.normal(numpyro.prng_key(), (3,))
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        numpyro.sample("z", dist.Normal(x[i] @ (w + 0.1 * jitter), 1), obs=z[i])


def mixture(z):
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(2)))
    means = numpyro.sample("means", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        components = dist.MixtureSameFamily(dist.Categorical(p), dist.Normal(means, 1))
        numpyro.sample("z", components, obs=z[i])


def multivariate(x):
    factor = numpyro.sample("factor", dist.LKJCholesky(3, 1.0))
    with numpyro.plate("rows", N, subsample_size=BATCH):
        batch = numpyro.subsample(x, event_dim=1)
        numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(3), scale_tril=factor), obs=batch)


def series(x):
    """A plate of series outside of a scan over time."""
    phi = numpyro.sample("phi", dist.Normal(0, 1))
    rows = numpyro.plate("rows", N, subsample_size=BATCH)
    with rows as i:
        batch = x[i]

    def step(previous, current):
        with rows:
            numpyro.sample("x", dist.Normal(phi * previous, 1), obs=current)
        return current, None

    scan(step, jnp.zeros(batch.shape[0]), batch.T)


def exposures(x, counts):
    w = weights()
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        rate = jnp.exp(x[i] @ w) * (1 + jnp.arange(N)[i] / N)
        numpyro.deterministic("rate", rate)
        numpyro.sample("counts", dist.Poisson(rate), obs=counts[i])


def no_plate(x, y):
    numpyro.sample("y", dist.Bernoulli(logits=x @ weights()).to_event(1), obs=y)


TABLE = RNG.standard_normal((12, 8)).astype(np.float32)
MODELS = [
    (logistic, (X, Y)),
    (with_subsample, (X, Y)),
    (with_factor, (X, Z)),
    (with_scale, (X, Z)),
    (with_mask, (X, Z)),
    (two_plates, (X, Z, COUNTS)),
    (nested_plates, (TABLE,)),
    (hierarchical, (X, Z, GROUP)),
    (dynamic_support, (Z,)),
    (flax_network, (X, Y)),
    (nnx_network, (X, Y)),
    (randomised, (X, Z)),
    (mixture, (Z,)),
    (multivariate, (X,)),
    (series, (X,)),
    (exposures, (X, COUNTS)),
    (no_plate, (X, Y)),
]
each_model = pytest.mark.parametrize(
    ("model", "args"), MODELS, ids=[model.__name__ for model, _ in MODELS]
)


def read(model, args):
    args = as_arrays(args)
    seen = read_model(model, init_to_uniform, args, {})
    z, found = initial_values(seen, random.key(3), init_to_uniform, args, {})
    assert found
    return seen, z, args


@pytest.mark.one_case
@each_model
def test_initial_values_are_no_data(model, args):
    """The fingerprint of what a model captures, by which a run knows its data."""
    args = as_arrays(args)
    captured = read_model(model, init_to_uniform, args, {}).captured
    assert read_model(model, init_to_median, args, {}).captured == captured


def partition(seen):
    """Every minibatch of a shuffled partition of each plate; all combinations of several."""
    batches, rng = [], np.random.default_rng(1)
    for plate in seen.plates:
        order = rng.permutation(plate.size).reshape(-1, plate.subsample_size)
        batches.append([(plate.name, jnp.asarray(rows)) for rows in order])
    return [dict(combination) for combination in product(*batches)]


def relative_error(found, expected):
    found, expected = ravel_pytree(found)[0], ravel_pytree(expected)[0]
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


@pytest.mark.one_case
@each_model
def test_partition_averages_to_the_full_potential(model, args):
    seen, z, args = read(model, args)
    everything = {plate.name: jnp.arange(plate.size) for plate in seen.plates}
    key = random.key(7)
    value_and_grad = jax.jit(
        jax.value_and_grad(lambda z, rows: seen.potential(z, rows, key, args, {}))
    )
    full = value_and_grad(z, everything)
    batches = [value_and_grad(z, rows) for rows in partition(seen)]
    mean = jax.tree.map(lambda *x: jnp.mean(jnp.stack(x), 0), *batches)
    assert relative_error(mean[0], full[0]) < 1e-5
    assert relative_error(mean[1], full[1]) < 1e-5
    if seen.plates:
        assert relative_error(batches[0][1], full[1]) > 1e-3  # the batches do differ


@pytest.mark.one_case
@each_model
def test_full_potential_is_that_of_numpyro(model, args):
    seen, z, args = read(model, args)
    if model is randomised:
        pytest.skip("its potential is random")
    rows = {plate.name: jnp.arange(plate.size) for plate in seen.plates}
    found = seen.potential(z, rows, random.key(0), args, {})
    expected = potential_energy(full_data(seen.model), args, {}, z)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.one_case
@each_model
def test_row_terms_are_what_the_rows_add_to_the_potential(model, args):
    """Taking one row twice as often as another moves the potential by its term."""
    seen, z, args = read(model, args)
    rows, key = (partition(seen) or [{}])[0], random.key(7)
    both = jax.jit(lambda z, rows: seen.potential_and_row_terms(z, rows, key, args, {}))
    energy, terms = both(z, rows)
    np.testing.assert_allclose(energy, seen.potential(z, rows, key, args, {}), rtol=1e-5)
    for plate in seen.plates:
        assert terms[plate.name].shape == (plate.subsample_size,)
        if model is randomised:
            continue
        twice = rows[plate.name].at[0].set(rows[plate.name][1])
        moved, _ = both(z, {**rows, plate.name: twice})
        expected = terms[plate.name][0] - terms[plate.name][1]
        np.testing.assert_allclose(moved - energy, expected, rtol=1e-3, atol=1e-5 * abs(energy))


def test_split_holds_one_term_for_each_row():
    seen, z, args = read(logistic, (X, Y))
    rows = jnp.array([3, 14, 15, 9])
    _, terms = seen.potential_and_row_terms(z, {"rows": rows}, random.key(0), args, {})
    logits = X[np.asarray(rows)] @ np.asarray(z["w"])
    expected = dist.Bernoulli(logits=logits).log_prob(Y[np.asarray(rows)])
    np.testing.assert_allclose(terms["rows"], len(X) / 4 * expected, rtol=1e-5)


def test_scale_and_mask_reach_the_rows():
    """The plate's own scale is in the terms, and so are the user's weights."""
    seen, z, args = read(with_scale, (X, Z))
    _, terms = seen.potential_and_row_terms(
        z, {"rows": jnp.array([0, 59])}, random.key(0), args, {}
    )
    plain = dist.Normal(X[[0, 59]] @ np.asarray(z["w"]), 1).log_prob(Z[[0, 59]])
    np.testing.assert_allclose(
        terms["rows"] / plain, len(X) / 2 * np.array([0.5, 0.5 + 59 / 60]), rtol=1e-5
    )


def test_randomised_likelihood_follows_the_key():
    seen, z, args = read(randomised, (X, Z))
    rows = {"rows": jnp.arange(BATCH)}
    values = [float(seen.potential(z, rows, random.key(k), args, {})) for k in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


def test_constrain_leaves_out_what_depends_on_the_minibatch():
    def model(x, z):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        numpyro.deterministic("precision", scale**-2)
        with numpyro.plate("rows", N, subsample_size=BATCH) as i:
            mean = numpyro.deterministic("mean", x[i, 0] * scale)
            numpyro.sample("z", dist.Normal(mean, 1), obs=z[i])
        numpyro.deterministic("average", mean.mean())

    seen, z, args = read(model, (X, Z))
    assert seen.minibatch_dependent == {"mean", "average"}
    values = seen.constrain({"scale": jnp.array(0.3)}, args, {})
    assert set(values) == {"scale", "precision"}
    np.testing.assert_allclose(values["precision"], np.exp(-0.6), rtol=1e-5)


def test_constrain_follows_dynamic_supports():
    seen, _, args = read(dynamic_support, (Z,))
    values = seen.constrain({"top": jnp.array(1.0), "scale": jnp.array(0.0)}, args, {})
    np.testing.assert_allclose(values["scale"], np.e / 2, rtol=1e-5)


@pytest.mark.parametrize("model", [logistic, with_subsample])
def test_full_data_is_the_model_without_subsampling(model):
    args = as_arrays((X, Y))
    draws = {"w": random.normal(random.key(0), (5, 3))}
    one = {"w": draws["w"][0]}
    view = pickle.loads(pickle.dumps(full_data(model)))
    assert log_density(view, args, {}, one)[0] == log_density(model, (*args, N), {}, one)[0]
    terms = log_likelihood(view, draws, *args)["y"]
    np.testing.assert_array_equal(terms, log_likelihood(model, draws, *args, N)["y"])
    assert terms.shape == (5, N)
    found = Predictive(view, draws)(random.key(1), *args)["y"]
    assert found.shape == (5, N)
    with full_data():
        assert log_density(model, args, {}, one)[0] == log_density(view, args, {}, one)[0]


def test_no_cost_of_order_n():
    """Reading a model does not draw rows, whose cost in NumPyro grows with N."""

    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", 2**31 - 1, subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=jnp.sin(i.astype(jnp.float32)))

    seen = read_model(model, init_to_uniform, (), {})
    assert seen.plates == (Plate("rows", 2**31 - 1, 10),)
