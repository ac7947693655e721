# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Models written otherwise than in the documents."""

from functools import partial, wraps

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from .cases import (
    BATCH,
    COUNTS,
    LABELS,
    N,
    Right,
    X,
    Y,
    case,
    coefficients,
    exact,
    exact_mean,
    full,
    logistic,
    mean_of,
    never,
    nuts,
    regression,
    rows,
)  # fmt: skip

MODELS = "model"


def on_rows(mean):
    """A regression whose predictor on a minibatch is ``mean(x, w)``."""

    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(mean(x[i], w), 1), obs=y[i])

    return model


@case(MODELS, "the plate in a helper function")
def helper(run):
    def observe(y, mean):
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(mean(i), 1), obs=y[i])

    def model(x, y):
        w = coefficients(3)
        observe(y, lambda i: x[i] @ w)

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "the plate made before and entered twice", "given tuned")
def entered_twice(run):
    def model(x, y, z):
        w = coefficients(3)
        plate = rows(N)
        with plate as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])
        with plate as i:
            numpyro.sample("z", dist.Normal(x[i] @ w, 1), obs=z[i])

    z = (X[:, 0] + np.sin(Y)).astype(np.float32)
    return run(model, X, Y, z), exact(np.concatenate([X, X]), np.concatenate([Y, z]))


@case(MODELS, "two plates of one name", "given")
def same_name(run):
    def model(x, y, z):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])
        with rows(N) as i:
            numpyro.sample("z", dist.Normal(x[i] @ w, 1), obs=z[i])

    z = (X[:, 0] + np.sin(Y)).astype(np.float32)
    return run(model, X, Y, z), exact(np.concatenate([X, X]), np.concatenate([Y, z]))


@case(MODELS, "two plates of one name and other sizes", "given")
def same_name_other_size(run):
    def model(x, y):
        w = coefficients(3)
        with rows(200) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])
        with rows(100, 20) as i:
            numpyro.sample("z", dist.Normal(x[200 + i] @ w, 1), obs=y[200 + i])

    return run(model, X, Y), exact(X[:300], Y[:300])


@case(MODELS, "two plates of one dimension, one inside the other", "given tuned")
def one_dimension(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N, dim=-1) as i, numpyro.plate("other", 2, dim=-1):
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "plate with `dim=-2`")
def dimension_two(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N, dim=-2) as i:
            numpyro.sample("y", dist.Normal((x[i] @ w)[:, None], 1), obs=y[i][:, None])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "plate with `dim=-2`, vectors of rows", "given tuned")
def dimension_two_wrong(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N, dim=-2) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "a full plate inside the subsampled one")
def nested(run):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with rows(N, dim=-2) as i, numpyro.plate("columns", 3, dim=-1):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    return run(model, X), exact_mean(X)


@case(MODELS, "`to_event(1)` over the rows", "given tuned")
def to_event(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1).to_event(1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "a factor of the sum of the rows", "given tuned")
def factor_of_sum(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.factor("y", dist.Normal(x[i] @ w, 1).log_prob(y[i]).sum())

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "a factor of the mean of the rows")
def factor_of_mean(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.factor("y", dist.Normal(x[i] @ w, 1).log_prob(y[i]).mean())

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "a factor of all rows, scaled by hand")
def factor_scaled(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            log_prob = dist.Normal(x[i] @ w, 1).log_prob(y[i])
        numpyro.factor("y", N / BATCH * log_prob.sum())

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "likelihood scaled by hand inside the plate", "tuned")
def scaled_twice(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i, numpyro.handlers.scale(scale=N / BATCH):
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y, np.full(N, N / BATCH))


@case(MODELS, "`x[i * 1]`", "given")
def arithmetic(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i * 1] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "`x[i * 1]` of an argument that is shorter", "given tuned")
def arithmetic_short(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i * 1] @ w, 1), obs=y[i])

    return never(run(model, X[: N - 100], Y))


@case(MODELS, "indices from 1: `x[i - 1]`")
def shifted(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i - 1] @ w, 1), obs=y[i - 1])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "indices from 1: `x[i + 1]`, the last one beyond the end")
def beyond(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i + 1] @ w, 1), obs=y[i + 1])

    run(model, X, Y)
    return "WRONG, SILENT: the last row is counted twice"


@case(MODELS, "the previous observation: `y[i]`, `y[i + 1]`", "given tuned")
def autoregression(run):
    def model(y, batch=BATCH):
        phi = numpyro.sample("phi", dist.Normal(0, 1))
        with rows(len(y) - 1, batch) as i:
            numpyro.sample("y", dist.Normal(phi * y[i], 1), obs=y[i + 1])

    found = exact(Y[:-1, None], Y[1:], name="phi")
    return run(model, Y), found._replace(
        mean={"phi": found.mean["phi"][0]}, sd={"phi": found.sd["phi"][0]}
    )


@case(MODELS, "minus the mean of the minibatch", "given tuned")
def minus_mean(run):
    return run(on_rows(lambda x, w: (x - x.mean(0)) @ w), X + 1, Y), exact(X - X.mean(0), Y)


@case(MODELS, "softmax over the rows", "given tuned")
def softmax(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            p = jax.nn.softmax(x[i] @ w, axis=0)
            numpyro.sample("y", dist.Poisson(BATCH * p), obs=y[i])

    def right(x, y):
        w = coefficients(3)
        p = jax.nn.softmax(x @ w, axis=0)
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Poisson(N * p), obs=y)

    return run(model, X, COUNTS), nuts(right, X, COUNTS)


@case(MODELS, "batch normalisation by hand", "given tuned")
def batch_norm(run):
    def mean(x, w):
        x = x * w
        return ((x - x.mean(0)) / x.std(0)).sum(-1) * w[0]

    def right(x, y):
        numpyro.sample("y", dist.Normal(mean(x, coefficients()), 1), obs=y)

    return run(on_rows(mean), 2 * X + 1, Y), nuts(right, 2 * X + 1, Y)


@case(MODELS, "cumulative sum over the rows")
def cumsum(run):
    return run(on_rows(lambda x, w: jnp.cumsum(x @ w) / 10), X, Y), exact(
        np.cumsum(X, axis=0) / 10, Y
    )


@case(MODELS, "sorted rows of the minibatch", "given")
def sorted_rows(run):
    return run(on_rows(lambda x, w: jnp.sort(x, axis=0) @ w), X, Y), exact(np.sort(X, axis=0), Y)


@case(MODELS, "`jnp.roll` of the minibatch")
def rolled(run):
    return run(on_rows(lambda x, w: jnp.roll(x, 1, axis=0) @ w), X, Y), exact(
        np.roll(X, 1, axis=0), Y
    )


@case(MODELS, "attention between rows", "given")
def attention(run):
    run(on_rows(lambda x, w: jax.nn.softmax((x * w) @ x.T, axis=-1) @ x @ w), X, Y)
    return "WRONG, SILENT: rows see each other"


@case(MODELS, "a Gaussian process over the rows of a minibatch", "given tuned")
def process(run):
    def model(x, y):
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        with rows(N) as i:
            d = x[i, None, 0] - x[None, i, 0]
            kernel = jnp.exp(-((d / scale) ** 2) / 2) + jnp.eye(BATCH)
            numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(BATCH), kernel), obs=y[i])

    run(model, X, Y, **({"step_size": 1e-4} if run.__name__ == "given" else {}))
    return "WRONG, SILENT: rows see each other"


@case(MODELS, "dropout with one fixed key", "given")
def dropout(run):
    def mean(x, w):
        return (x * random.bernoulli(random.key(0), 0.5, x.shape)) @ w

    run(on_rows(mean), X, Y)
    return "WRONG, SILENT: the mask belongs to other rows at every step"


@case(MODELS, "dropout with `numpyro.prng_key()`", "given tuned")
def dropout_with_key(run):
    def mean(x, w):
        return (x * random.bernoulli(numpyro.prng_key(), 0.5, x.shape)) @ w

    run(on_rows(mean), X, Y)
    return "WRONG, SILENT: not a likelihood"


@case(MODELS, "`np.log` of an argument")
def numpy_function(run):
    def model(x, y):
        w = coefficients(3)
        x = np.log(x)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, np.exp(X), Y), exact(X, Y)


@case(MODELS, "`np.log` inside the plate")
def numpy_function_inside(run):
    return run(on_rows(lambda x, w: np.log(x) @ w), np.exp(X), Y), exact(X, Y)


@case(MODELS, "`np.unique` of an argument", "given tuned")
def unique(run):
    def model(y, group):
        count = len(np.unique(group))
        a = numpyro.sample("a", dist.Normal(0, 1).expand([count]).to_event(1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(a[group[i]], 1), obs=y[i])

    group = np.arange(N) % 4
    return run(model, Y, group), exact(np.eye(4)[group], Y, name="a")


@case(MODELS, "`int(group.max()) + 1` groups", "given tuned")
def count_of_groups(run):
    def model(y, group):
        a = numpyro.sample("a", dist.Normal(0, 1).expand([int(group.max()) + 1]).to_event(1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(a[group[i]], 1), obs=y[i])

    group = np.arange(N) % 4
    return run(model, Y, group), exact(np.eye(4)[group], Y, name="a")


@case(MODELS, "`np.mean(y)` in a prior")
def numpy_mean(run):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(np.mean(y), 1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    found = exact_mean(Y - Y.mean())
    return run(model, Y), found._replace(mean={"mu": found.mean["mu"] + Y.mean()})


@case(MODELS, "`float(y.std())` in a prior", "given")
def float_of(run):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, float(y.std()) * 0 + 1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    return run(model, Y), exact_mean(Y)


@case(MODELS, "`if` on a value of the data")
def if_on_data(run):
    def model(x, y):
        if y.mean() > 100:
            y = y / 100
        regression(x, y)

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "`if` on a latent value")
def if_on_latent(run):
    def model(x, y):
        w = coefficients(3)
        if w[0] > 0:
            x = x * 1.0
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "`assert` on a value of the minibatch")
def assertion(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            assert (y[i] > -1e6).all()
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "`print` in the model")
def printing(run):
    def model(x, y):
        print("shapes", x.shape, y.shape)
        regression(x, y)

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "a loop over the rows of the minibatch", "given")
def loop(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N, 5) as i:
            mean = jnp.stack([x[k] @ w for k in i])
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    more = {"step_size": 4e-6, "settings": {"steps_per_sample": 125}}
    return run(model, X, Y, **(more if run.__name__ == "given" else {})), exact(X, Y)


@case(MODELS, "a counter in the global state", "given")
def counter(run):
    calls = []

    def model(x, y):
        calls.append(len(calls))
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "random numbers of NumPy in the model")
def numpy_random(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            noise = np.random.standard_normal(BATCH)
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i] + noise)

    run(model, X, Y)
    return "WRONG, SILENT: the same numbers at every step for other rows"


@case(MODELS, "data in a closure, JAX", "given tuned")
def closure(run):
    x, y = jnp.asarray(X), jnp.asarray(Y)
    return run(lambda: regression(x, y)), exact(X, Y)


@case(MODELS, "data in a closure, NumPy", "given tuned")
def numpy_closure(run):
    return run(lambda: regression(X, Y)), exact(X, Y)


@case(MODELS, "data in a closure, `numpyro.subsample`", "given")
def subsample_closure(run):
    def model():
        w = coefficients(3)
        with rows(N):
            x, y = numpyro.subsample(X, event_dim=1), numpyro.subsample(Y, event_dim=0)
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return run(model), exact(X, Y)


@case(MODELS, "a model that returns things", "given")
def returning(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])
            return {"rows": x[i], "w": w, "text": "done"}

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "arguments with defaults that are data", "given")
def default_data(run):
    def model(x=X, y=Y):
        regression(jnp.asarray(x), jnp.asarray(y))

    return run(model), exact(X, Y)


@case(MODELS, "keyword arguments alone")
def keywords(run):
    def model(*, x, y):
        regression(x, y)

    return run(model, x=X, y=Y), exact(X, Y)


@case(MODELS, "`functools.partial` with data")
def partial_data(run):
    return run(partial(regression, jnp.asarray(X), jnp.asarray(Y))), exact(X, Y)


@case(MODELS, "a class with `__call__`")
def callable_class(run):
    class Model:
        def __init__(self, batch):
            self.batch = batch

        def __call__(self, x, y):
            regression(x, y, self.batch)

    return run(Model(BATCH), X, Y), exact(X, Y)


@case(MODELS, "a bound method, data in `self`")
def method(run):
    class Model:
        def __init__(self):
            self.x, self.y = jnp.asarray(X), jnp.asarray(Y)

        def model(self):
            regression(self.x, self.y)

    return run(Model().model), exact(X, Y)


@case(MODELS, "a class in the place of its instance")
def class_itself(run):
    class Model:
        def __call__(self, x, y):
            regression(x, y)

    return run(Model, X, Y), exact(X, Y)


@case(MODELS, "decorated with `jax.jit`", "given")
def jitted(run):
    return run(jax.jit(regression, static_argnums=2), X, Y), exact(X, Y)


@case(MODELS, "decorated by a wrapper", "given")
def wrapper(run):
    @wraps(regression)
    def model(*args, **kwargs):
        return regression(*args, **kwargs)

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "a generator: `yield` by mistake")
def generator(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            yield numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "called by mistake: `SGLD(model(x, y))`")
def called(run):
    with numpyro.handlers.seed(rng_seed=0):
        return run(regression(X, Y), X, Y), exact(X, Y)


@case(MODELS, "no parameters at all", "given tuned")
def no_parameters(run):
    def model(x, y):
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i].sum(-1), 1), obs=y[i])

    run(model, X, Y)
    return "WRONG, SILENT: sampled nothing"


@case(MODELS, "a latent site of size 0 beside another", "given tuned")
def size_zero(run):
    def model(x, y):
        w = coefficients(3)
        numpyro.sample("none", dist.Normal(0, 1).expand([0]).to_event(1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "`Dirichlet(ones(1))` beside another", "given tuned")
def no_freedom(run):
    def model(x, y):
        w = coefficients(3)
        numpyro.sample("p", dist.Dirichlet(jnp.ones(1)))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "`Dirichlet(ones(1))` alone", "given tuned")
def no_freedom_alone(run):
    def model(y):
        p = numpyro.sample("p", dist.Dirichlet(jnp.ones(1)))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(p[0], 1), obs=y[i])

    run(model, Y)
    return "right: sampled one point"


@case(MODELS, "latent sites with names of fields", "given tuned")
def field_names(run):
    def model(x, y):
        names = ("z", "step_size", "diverging")
        w = jnp.stack([numpyro.sample(k, dist.Normal(0, 1)) for k in names])
        numpyro.deterministic("w", w)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "site names with slashes, spaces and accents")
def odd_names(run):
    def model(x, y):
        names = ("a/b", "le coût", "")
        w = jnp.stack([numpyro.sample(k, dist.Normal(0, 1)) for k in names])
        numpyro.deterministic("w", w)
        with numpyro.plate("the rows", N, subsample_size=BATCH) as i:
            numpyro.sample("y obs", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "latent and observed sites of one name")
def one_name(run):
    def model(x, y):
        w = numpyro.sample("y", dist.Normal(0, 1).expand([3]).to_event(1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y, name="y")


@case(MODELS, "a plate with the name of a site")
def plate_named_like_site(run):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("w", N, subsample_size=BATCH) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "priors inside the plate, of one value", "given")
def prior_inside(run):
    def model(x, y):
        with rows(N) as i:
            w = coefficients(3)
            numpyro.sample("y", dist.Normal((x[i] * w).sum(-1), 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "no `obs`", "given tuned")
def unobserved(run):
    def model(x):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1))

    return never(run(model, X))


@case(MODELS, "no plate at all", "given tuned")
def no_plate(run):
    def model(x, y):
        w = coefficients(3)
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    more = {"step_size": 2e-5} if run.__name__ == "given" else {}
    return run(model, X, Y, **more), exact(X, Y)


@case(MODELS, "a plate without `subsample_size`", "given tuned")
def full_plate(run):
    return run(partial(regression, batch=None), X, Y), exact(X, Y)


@case(MODELS, "rows chosen by hand with a key of one's own")
def by_hand(run):
    def model(x, y):
        w = coefficients(3)
        i = random.choice(random.key(0), N, (BATCH,), replace=False)
        with numpyro.handlers.scale(scale=N / BATCH):
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(MODELS, "a latent site of each group inside a plate of groups that is subsampled")
def subsampled_groups(run):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("groups", 40, subsample_size=10) as g:
            a = numpyro.sample("a", dist.Normal(mu, 1))
            with numpyro.plate("members", 10, dim=-2):
                numpyro.sample("y", dist.Normal(a, 1), obs=y.reshape(10, 40)[:, g])

    def right(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("groups", 40):
            a = numpyro.sample("a", dist.Normal(mu, 1))
            with numpyro.plate("members", 10, dim=-2):
                numpyro.sample("y", dist.Normal(a, 1), obs=y.reshape(10, 40))

    return run(model, Y), nuts(right, Y, names=["mu"])


@case(MODELS, "an integer prior: `Poisson` latent")
def integer_latent(run):
    def model(y):
        k = numpyro.sample("k", dist.Poisson(3.0))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(k, 1), obs=y[i])

    return never(run(model, Y))


@case(MODELS, "enumerated classes of rows, `infer={'enumerate': 'parallel'}`", "given tuned")
def enumerated(run):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.0, 1.0]), 1).to_event(1))
        with rows(N) as i:
            k = numpyro.sample("k", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Normal(mu[k], 1), obs=y[i])

    def right(y):
        mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.0, 1.0]), 1).to_event(1))
        mixture = dist.MixtureSameFamily(dist.Categorical(jnp.full(2, 0.5)), dist.Normal(mu, 1))
        with numpyro.plate("rows", N):
            numpyro.sample("y", mixture, obs=y)

    return run(model, Y), nuts(right, Y)


@case(MODELS, "improper prior, `ImproperUniform`", "given tuned")
def improper(run):
    def model(y):
        mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    return run(model, Y), Right({"mu": Y.mean()}, {"mu": np.float64(1 / np.sqrt(N))})


@case(MODELS, "a deterministic site of rows")
def deterministic(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            mean = numpyro.deterministic("mean", x[i] @ w)
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    mcmc = run(model, X, Y)
    if "mean" in mcmc.get_samples():
        return "WRONG, SILENT: 'mean' is among the draws"
    return mcmc, exact(X, Y)


@case(MODELS, "dataclass of arrays as argument", "given")
def dataclass_argument(run):
    from dataclasses import dataclass

    @dataclass
    class Data:
        x: np.ndarray
        y: np.ndarray

    return run(lambda data: regression(data.x, data.y), Data(X, Y)), exact(X, Y)


@case(MODELS, "words as arguments, `family='logit'`")
def words(run):
    def model(x, y, family):
        w = coefficients(3)
        with rows(N) as i:
            link = {"logit": lambda m: dist.Bernoulli(logits=m)}[family]
            numpyro.sample("y", link(x[i] @ w), obs=y[i])

    return run(model, X, LABELS, family="logit"), nuts(full(logistic), X, LABELS)


@case(MODELS, "`obs=y` where `y` is None for a missing argument", "given tuned")
def y_is_none(run):
    def model(x, y=None):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=None if y is None else y[i])

    run(model, X)
    return "WRONG, SILENT: sampled without data"


@case(MODELS, "mean of numbers given `y.T`-like view of a table", "given")
def view(run):
    table = np.stack([Y, Y]).T
    return run(mean_of, table[:, 0]), exact_mean(Y)
