# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Data of other shapes than rows by columns, and minibatches of odd sizes."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from .cases import (
    BATCH,
    LABELS,
    N,
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

SHAPES = "shapes"


@case(SHAPES, "observations (N, 1)", "given tuned")
def column(run):
    return run(regression, X, Y[:, None]), exact(X, Y)


@case(SHAPES, "observations (1, N)")
def row(run):
    return run(regression, X, Y[None]), exact(X, Y)


@case(SHAPES, "labels (N, 1)")
def label_column(run):
    return run(logistic, X, LABELS[:, None]), nuts(full(logistic), X, LABELS)


@case(SHAPES, "predictors (N, 1) and `w * x[i]`")
def product_of_column(run):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(w * x[i], 1), obs=y[i])

    found = exact(X[:, :1], Y)
    return run(model, X[:, :1], Y), found._replace(
        mean={"w": found.mean["w"][0]}, sd={"w": found.sd["w"][0]}
    )


@case(SHAPES, "coefficients (3, 1): `x[i] @ w`")
def column_of_coefficients(run):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 1]).to_event(2))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(SHAPES, "coefficients (3, 1) and observations (N, 1)")
def both_columns(run):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 1]).to_event(2))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y[:, None]), exact(X, Y)


@case(SHAPES, "coefficients (3, 1), observations (N, 1), `to_event(1)`", "given tuned")
def both_columns_of_events(run):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 1]).to_event(2))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1).to_event(1), obs=y[i])

    return run(model, X, Y[:, None]), exact(X, Y)


@case(SHAPES, "transposed predictors")
def transposed(run):
    return run(regression, X.T, Y), exact(X, Y)


@case(SHAPES, "transposed predictors, `w @ x[:, i]`")
def transposed_in_the_model(run):
    def model(x, y):
        w = coefficients(3)
        with rows(x.shape[1]) as i:
            numpyro.sample("y", dist.Normal(w @ x[:, i], 1), obs=y[i])

    return run(model, X.T, Y), exact(X, Y)


@case(SHAPES, "plate over the columns by mistake, `x.shape[1]`")
def plate_over_columns(run):
    def model(x, y):
        w = coefficients(3)
        with rows(x.shape[1], 2) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(SHAPES, "no rows")
def empty(run):
    return never(run(regression, X[:0], Y[:0]))


@case(SHAPES, "no rows, the batch cut to them")
def empty_cut(run):
    return never(run(partial(regression, batch=min(BATCH, 0)), X[:0], Y[:0]))


@case(SHAPES, "no columns")
def no_columns(run):
    return never(run(regression, X[:, :0], Y))


@case(SHAPES, "one row")
def one_row(run):
    return run(partial(mean_of, batch=1), Y[:1]), exact_mean(Y[:1])


@case(SHAPES, "minibatches of one row", "given tuned")
def of_one(run):
    settings = {"settings": {"steps_per_sample": 250}, "step_size": 1e-6}
    more = settings if run.__name__ == "given" else {}
    return run(partial(regression, batch=1), X, Y, **more), exact(X, Y)


@case(SHAPES, "minibatches of all rows", "given tuned")
def of_all(run):
    return run(partial(regression, batch=N), X, Y), exact(X, Y)


@case(SHAPES, "minibatches of all rows but one", "given tuned")
def of_almost_all(run):
    return run(partial(regression, batch=N - 1), X, Y), exact(X, Y)


@case(SHAPES, "`subsample_size` as a NumPy integer")
def numpy_size(run):
    return run(partial(regression, batch=np.int64(BATCH)), X, Y), exact(X, Y)


@case(SHAPES, "`subsample_size` as a share, 0.1")
def share(run):
    return run(partial(regression, batch=0.1), X, Y), exact(X, Y)


@case(SHAPES, "`subsample_size=len(y) / 8`, a float")
def float_size(run):
    return run(partial(regression, batch=N / 8), X, Y), exact(X, Y)


@case(SHAPES, "`subsample_size` as an array of JAX")
def array_size(run):
    return run(lambda x, y: regression(x, y, jnp.array(BATCH)), X, Y), exact(X, Y)


@case(SHAPES, "`subsample_size` as an argument of `run`", "given tuned")
def size_argument(run):
    return run(regression, X, Y, batch=BATCH), exact(X, Y)


@case(SHAPES, "sizes of the plate as an array, `jnp.shape(y)[0]` of an array")
def array_of_sizes(run):
    def model(x, y):
        w = coefficients(3)
        with rows(jnp.array(x.shape)[0]) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(SHAPES, "a vector of observations for each row")
def vectors(run):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1).expand([3]).to_event(1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])

    return run(model, X), exact(np.tile(np.eye(3), (N, 1)), X.reshape(-1), name="mu")


@case(SHAPES, "a vector of observations for each row, without `to_event`")
def vectors_without_events(run):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1).expand([3]).to_event(1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    return run(model, X), exact(np.tile(np.eye(3), (N, 1)), X.reshape(-1), name="mu")


@case(SHAPES, "as many columns as rows in a minibatch, without `to_event`", "given tuned")
def square(run):
    y = np.random.default_rng(3).standard_normal((N, 50)).astype(np.float32)

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1).expand([50]).to_event(1))
        with rows(N, 50) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    more = {"step_size": 1e-5} if run.__name__ == "given" else {}
    return run(model, y, **more), exact(np.tile(np.eye(50), (N, 1)), y.reshape(-1), name="mu")


@case(SHAPES, "three dimensions of predictors, flattened in the model")
def pictures(run):
    def model(x, y):
        w = coefficients(4)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i].reshape(BATCH, -1) @ w, 1), obs=y[i])

    x = np.random.default_rng(4).standard_normal((N, 2, 2)).astype(np.float32)
    return run(model, x, Y), exact(x.reshape(N, 4), Y)


@case(SHAPES, "`reshape(-1)` that mixes rows and columns")
def mixing(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            mean = (x[i] * w).reshape(3, -1).sum(0)
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    return run(model, X, Y), exact(X, Y)


@case(SHAPES, "duplicate columns", "tuned")
def duplicates(run):
    x = np.column_stack([X, X[:, 0]])
    return run(regression, x, Y), exact(x, Y)


@case(SHAPES, "a constant column beside a constant", "tuned")
def constants(run):
    x = np.column_stack([np.ones((N, 2)), X]).astype(np.float32)
    return run(regression, x, Y), exact(x, Y)


@case(SHAPES, "more columns than rows", "tuned")
def wide(run):
    x = np.random.default_rng(5).standard_normal((200, 300)).astype(np.float32)
    y = x[:, 0] + Y[:200]
    return run(regression, x, y), exact(x, y)


@case(SHAPES, "a column of scale 1e6", "tuned")
def large(run):
    x = X * np.float32([1.0, 1e3, 1e6])
    y = X @ np.float32([1.0, -1.0, 0.5]) + Y
    return run(regression, x, y), exact(x, y)


@case(SHAPES, "all labels the same", "tuned")
def one_class(run):
    return run(logistic, X, np.ones(N, np.int32)), nuts(full(logistic), X, np.ones(N, np.int32))


@case(SHAPES, "labels that are separated", "tuned")
def separated(run):
    y = (X[:, 0] > 0).astype(np.int32)
    return run(logistic, X, y), nuts(full(logistic), X, y)
