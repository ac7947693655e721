# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Models on real data for `benchmarks/suite.py`, each as a user would write it."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

ROWS = 20_000


class Case(NamedTuple):
    """A model, its arguments, and what of its draws is compared (None: all latent sites)."""

    model: object
    args: tuple
    compared: object = None


def standardized(x):
    x = np.asarray(x, np.float64)
    x = x[:, x.std(axis=0) > 0]
    return (x - x.mean(axis=0)) / x.std(axis=0)


def with_intercept(x):
    return jnp.asarray(np.column_stack([np.ones(len(x)), x]), jnp.float32)


def some_rows(count):
    return np.random.default_rng(0).permutation(count)[:ROWS]


def logistic(x, y, batch_size=500):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def softmax(x, y, classes, batch_size=500):
    shape = [x.shape[1], classes - 1]
    w = numpyro.sample("w", dist.Normal(0, 1).expand(shape).to_event(2))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        logits = jnp.pad(x[i] @ w, ((0, 0), (1, 0)))
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y[i])


def linear(x, y, batch_size=500):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, sigma), obs=y[i])


def student_t(x, y, batch_size=500):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    freedom = numpyro.sample("freedom", dist.Gamma(2, 0.1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.StudentT(freedom, x[i] @ w, sigma), obs=y[i])


def poisson(x, y, batch_size=500):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(x[i] @ w)), obs=y[i])


def centered(group, y, groups, batch_size=500):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("groups", groups):
        effect = numpyro.sample("effect", dist.Normal(mean, spread))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=effect[group[i]]), obs=y[i])


def noncentered(group, y, groups, batch_size=500):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("groups", groups):
        effect = numpyro.sample("standard_effect", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        logits = (mean + spread * effect)[group[i]]
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])


def mixture(y, components, batch_size=500):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(components)))
    prior = dist.Normal(0, 2).expand([components]).to_event(1)
    ordered = dist.transforms.OrderedTransform()
    means = numpyro.sample("means", dist.TransformedDistribution(prior, ordered))
    scales = numpyro.sample("scales", dist.HalfNormal(1).expand([components]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        parts = dist.Normal(means, scales)
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights), parts), obs=y[i])


def correlated(x, batch_size=500):
    d = x.shape[1]
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([d]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([d]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(d, concentration=1.0))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        factor = scale[:, None] * root
        numpyro.sample("x", dist.MultivariateNormal(mean, scale_tril=factor), obs=x[i])


def network(x, y, hidden=10, batch_size=500):
    d = x.shape[1]
    w1 = numpyro.sample("w1", dist.Normal(0, 1).expand([d, hidden]).to_event(2))
    b1 = numpyro.sample("b1", dist.Normal(0, 1).expand([hidden]).to_event(1))
    w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([hidden]).to_event(1))
    b2 = numpyro.sample("b2", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        mean = jnp.tanh(x[i] @ w1 + b1) @ w2 + b2
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y[i])


def _predictions(x):
    def of(draw):
        return {"mean": jnp.tanh(x @ draw["w1"] + draw["b1"]) @ draw["w2"] + draw["b2"]}

    return jax.vmap(of)


def cases(data: Path) -> dict[str, object]:
    """Functions that load a case, by its name."""

    def load(name):
        return np.load(data / f"{name}.npz", allow_pickle=False)

    def mnist():
        z = load("mnist")
        k = np.isin(z["train_y"], [7, 9])
        pixels = z["train_x"][k].reshape(-1, 784) / 255
        projection = np.random.default_rng(0).standard_normal((784, 99))
        y = jnp.asarray(z["train_y"][k] == 9, jnp.float32)
        return Case(logistic, (with_intercept(standardized(pixels @ projection)), y))

    def a9a():
        z = load("a9a")
        y = jnp.asarray(z["train_y"] > 0, jnp.float32)
        return Case(logistic, (with_intercept(z["train_x"][:, :122]), y))

    def covtype():
        z = load("covtype")
        k = some_rows(len(z["y"]))
        x = with_intercept(standardized(z["x"][k, :10]))
        return Case(softmax, (x, jnp.asarray(z["y"][k] - 1, jnp.int32), 7))

    def letter():
        z = load("letter")
        return Case(
            softmax, (with_intercept(standardized(z["x"])), jnp.asarray(z["y"], jnp.int32), 26)
        )

    def protein():
        z = load("casp")
        k = some_rows(len(z["y"]))
        y = z["y"][k]
        return standardized(z["x"][k]), jnp.asarray((y - y.mean()) / y.std(), jnp.float32)

    def groups():
        z = load("movielens_1m")
        # as many ratings of each of 60 films as there are, of 20,000 in all
        films, counts = np.unique(z["item"], return_counts=True)
        chosen = films[np.argsort(-counts)[40:1000:16]]
        k = np.flatnonzero(np.isin(z["item"], chosen))
        k = np.random.default_rng(0).permutation(k)[:ROWS]
        group = jnp.asarray(np.searchsorted(np.sort(chosen), z["item"][k]), jnp.int32)
        return group, jnp.asarray(z["rating"][k] >= 4, jnp.float32), len(chosen)

    def counts():
        z = load("movielens_1m")
        # how many films each user rated in the first half of the numbers, given the second
        users = np.arange(1, z["user"].max() + 1)
        half = z["item"] % 2 == 0
        y = np.bincount(z["user"][half], minlength=users[-1] + 1)[1:]
        rest = np.bincount(z["user"][~half], minlength=users[-1] + 1)[1:]
        mean = np.bincount(z["user"], z["rating"], minlength=users[-1] + 1)[1:] / (y + rest)
        x = standardized(np.column_stack([np.log1p(rest), mean, np.log1p(rest) ** 2, mean**2]))
        return with_intercept(x), jnp.asarray(y, jnp.float32)

    def net():
        x, y = protein()
        x, y = jnp.asarray(x[:5_000], jnp.float32), y[:5_000]
        return Case(network, (x, y), _predictions(x[:200]))

    return {
        "logistic, MNIST 7 v 9": mnist,
        "logistic, a9a": a9a,
        "softmax, covtype": covtype,
        "softmax, letter": letter,
        "linear, casp": lambda: Case(linear, (with_intercept(protein()[0]), protein()[1])),
        "Student-t, casp": lambda: Case(student_t, (with_intercept(protein()[0]), protein()[1])),
        "Poisson, MovieLens": lambda: Case(poisson, counts()),
        "hierarchical centred": lambda: Case(centered, groups()),
        "hierarchical non-centred": lambda: Case(noncentered, groups()),
        "mixture, casp": lambda: Case(mixture, (protein()[1], 3)),
        "LKJ, casp": lambda: Case(correlated, (jnp.asarray(protein()[0][:, :5], jnp.float32),)),
        "network, casp": net,
    }
