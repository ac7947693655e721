# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Data of other types than arrays of single precision."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import scipy.sparse

from .cases import (
    BATCH,
    CLASSES,
    LABELS,
    RNG,
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

TYPES = "types"


@case(TYPES, "lists of lists and of numbers", "given tuned")
def lists(run):
    return run(regression_of_length, X.tolist(), Y.tolist()), exact(X, Y)


def regression_of_length(x, y, batch=BATCH):
    """Asks for lengths as lists and tables have them."""
    w = coefficients(3)
    with rows(len(x), batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])


@case(TYPES, "a list and `jnp.asarray` in the model")
def lists_converted(run):
    return run(lambda x, y: regression(jnp.asarray(x), jnp.asarray(y)), X.tolist(), Y.tolist()), (
        exact(X, Y)
    )


@case(TYPES, "a tuple of observations")
def tuples(run):
    return run(mean_of, tuple(Y.tolist())), exact_mean(Y)


@case(TYPES, "a DataFrame and a Series", "given tuned")
def frame(run):
    table = pd.DataFrame(X, columns=list("abc")).assign(y=Y)
    return run(regression_of_length, table[list("abc")], table["y"]), exact(X, Y)


@case(TYPES, "`.iloc` of a DataFrame in the model")
def iloc(run):
    def model(table):
        w = coefficients(3)
        with rows(len(table)) as i:
            x = jnp.asarray(table.iloc[i][["a", "b", "c"]].values)
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=jnp.asarray(table.iloc[i]["y"].values))

    return run(model, pd.DataFrame(X, columns=list("abc")).assign(y=Y)), exact(X, Y)


@case(TYPES, "`.values` of a DataFrame in the model")
def values(run):
    def model(table):
        w = coefficients(3)
        x, y = jnp.asarray(table[["a", "b", "c"]].values), jnp.asarray(table["y"].values)
        with rows(len(table)) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, pd.DataFrame(X, columns=list("abc")).assign(y=Y)), exact(X, Y)


@case(TYPES, "`.values[i]` of a DataFrame in the model")
def values_indexed(run):
    def model(table):
        w = coefficients(3)
        with rows(len(table)) as i:
            x, y = table[["a", "b", "c"]].values[i], table["y"].values[i]
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return run(model, pd.DataFrame(X, columns=list("abc")).assign(y=Y)), exact(X, Y)


@case(TYPES, "a dictionary of arrays")
def dictionary(run):
    def model(data):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(data["x"][i] @ w, 1), obs=data["y"][i])

    return run(model, {"x": X, "y": Y}), exact(X, Y)


@case(TYPES, "a dictionary with words beside arrays")
def dictionary_of_words(run):
    def model(data):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(data["x"][i] @ w, 1), obs=data["y"][i])

    return run(model, {"x": X, "y": Y, "names": ["a", "b", "c"]}), exact(X, Y)


@case(TYPES, "Categorical of pandas for groups")
def categorical(run):
    return run(groups, Y, pd.Series(pd.Categorical(list("abcd") * (N // 4)))), exact_groups()


@case(TYPES, "codes of a Categorical, int8")
def codes(run):
    codes = np.asarray(pd.Categorical(list("abcd") * (N // 4)).codes)
    return run(groups, Y, codes), exact_groups()


@case(TYPES, "names of groups as strings")
def strings(run):
    return run(groups, Y, np.array(list("abcd") * (N // 4))), exact_groups()


@case(TYPES, "groups that are floats")
def float_groups(run):
    return run(groups, Y, np.tile(np.arange(4.0), N // 4)), exact_groups()


def groups(y, group):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([4]).to_event(1))
    with rows(N) as i:
        numpyro.sample("y", dist.Normal(a[group[i]], 1), obs=y[i])


def exact_groups():
    return exact(np.tile(np.eye(4), (N // 4, 1)), Y, name="a")


@case(TYPES, "nullable Int64 with a missing value")
def nullable_missing(run):
    y = pd.Series(LABELS, dtype="Int64")
    y[3] = pd.NA
    return never(run(logistic, X, y.to_numpy()))


@case(TYPES, "nullable Int64, complete")
def nullable(run):
    y = pd.Series(LABELS, dtype="Int64")
    return run(regression_labels, X, y), nuts(full(logistic), X, LABELS)


def regression_labels(x, y):
    w = coefficients(3)
    with rows(len(x)) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


@case(TYPES, "object array of numbers")
def objects(run):
    return run(regression, X.astype(object), Y.astype(object)), exact(X, Y)


@case(TYPES, "object array of rows")
def ragged(run):
    x = np.empty(N, object)
    x[:] = list(X)
    return run(regression_of_length, x, Y), exact(X, Y)


@case(TYPES, "structured array")
def structured(run):
    table = np.zeros(N, [("a", "f4"), ("b", "f4"), ("c", "f4"), ("y", "f4")])
    for k, name in enumerate("abc"):
        table[name] = X[:, k]
    table["y"] = Y

    def model(t):
        w = coefficients(3)
        with rows(len(t)) as i:
            t = t[i]
            mean = t["a"] * w[0] + t["b"] * w[1] + t["c"] * w[2]
            numpyro.sample("y", dist.Normal(mean, 1), obs=t["y"])

    return run(model, table), exact(X, Y)


@case(TYPES, "dates")
def dates(run):
    when = np.datetime64("2020-01-01") + np.arange(N).astype("timedelta64[D]")
    return never(run(mean_of, when))


@case(TYPES, "dates in a column of a DataFrame")
def date_column(run):
    table = pd.DataFrame({"y": Y, "day": pd.date_range("2020-01-01", periods=N)})

    def model(table):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with rows(len(table)) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=jnp.asarray(table.to_numpy())[i, 0])

    return run(model, table), exact_mean(Y)


@case(TYPES, "masked array with masked values", "given tuned")
def masked(run):
    y = np.ma.masked_array(Y.copy(), mask=np.arange(N) < 100)
    y.data[:100] = 1000.0  # what a file has for "missing"
    keep = np.arange(N) >= 100
    return run(regression, X, y), exact(X[keep], Y[keep])


@case(TYPES, "sparse matrix")
def sparse(run):
    return run(regression, scipy.sparse.csr_matrix(X), Y), exact(X, Y)


@case(TYPES, "half precision", "given tuned")
def half(run):
    x = X.astype(np.float16)
    return run(regression, x, Y.astype(np.float16)), exact(x, Y.astype(np.float16))


@case(TYPES, "bfloat16")
def bfloat(run):
    x, y = jnp.asarray(X, jnp.bfloat16), jnp.asarray(Y, jnp.bfloat16)
    return run(regression, x, y), exact(np.asarray(x, float), np.asarray(y, float))


@case(TYPES, "double precision without x64")
def double(run):
    return run(regression, X.astype(np.float64), Y.astype(np.float64)), exact(X, Y)


@case(TYPES, "truth values as labels")
def truth(run):
    return run(logistic, X, LABELS.astype(bool)), nuts(full(logistic), X, LABELS)


@case(TYPES, "truth values as predictors")
def truth_predictors(run):
    x = X > 0
    return run(regression, x, Y), exact(x, Y)


@case(TYPES, "labels 0.0 and 1.0")
def float_labels(run):
    return run(logistic, X, LABELS.astype(np.float32)), nuts(full(logistic), X, LABELS)


@case(TYPES, "unsigned bytes as labels, Categorical")
def bytes_labels(run):
    return run(classes, X, CLASSES.astype(np.uint8)), nuts(full(classes), X, CLASSES)


def classes(x, y, batch=BATCH):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 3]).to_event(2))
    with rows(N, batch) as i:
        numpyro.sample("y", dist.Categorical(logits=x[i] @ w), obs=y[i])


@case(TYPES, "floats as labels, Categorical", "given tuned")
def float_classes(run):
    return run(classes, X, CLASSES.astype(np.float32)), nuts(full(classes), X, CLASSES)


@case(TYPES, "one-hot labels, Categorical")
def one_hot(run):
    return run(classes, X, np.eye(3, dtype=np.int32)[CLASSES]), nuts(full(classes), X, CLASSES)


@case(TYPES, "one-hot labels, Multinomial")
def multinomial(run):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 3]).to_event(2))
        with rows(N) as i:
            numpyro.sample("y", dist.Multinomial(logits=x[i] @ w), obs=y[i])

    return run(model, X, np.eye(3, dtype=np.int32)[CLASSES]), nuts(full(classes), X, CLASSES)


@case(TYPES, "complex numbers")
def complex_numbers(run):
    return run(regression, X.astype(np.complex64), Y), exact(X, Y)


@case(TYPES, "a number of no dimensions as data")
def scalar(run):
    return never(run(mean_of, np.float32(3.0)))


@case(TYPES, "Fortran order")
def fortran(run):
    return run(regression, np.asfortranarray(X), Y), exact(X, Y)


@case(TYPES, "read-only")
def read_only(run):
    x = X.copy()
    x.flags.writeable = False
    return run(regression, x, Y), exact(X, Y)


@case(TYPES, "negative strides")
def negative_strides(run):
    return run(regression, X[::-1], Y[::-1]), exact(X, Y)


@case(TYPES, "a matrix of NumPy's old class")
def old_matrix(run):
    return run(regression, np.asmatrix(X), Y), exact(X, Y)


@case(TYPES, "big-endian", "given tuned")
def big_endian(run):
    return run(regression, X.astype(">f4"), Y.astype(">f4")), exact(X, Y)


@case(TYPES, "int64 beyond 2^31", "given tuned")
def wide_integers(run):
    x = np.column_stack([np.ones(N), RNG.integers(3_000_000_000, 3_000_100_000, N)])
    y = (x[:, 1] - 3_000_050_000) / 30_000 + Y

    def model(x, y):
        w = coefficients(2)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(w[0] + w[1] * (x[i] - 3.00005e9) / 3e4, 1), obs=y[i])

    scaled = np.column_stack([np.ones(N), (x[:, 1] - 3.00005e9) / 3e4])
    return run(model, x[:, 1].astype(np.int64), y.astype(np.float32)), exact(scaled, y)


@case(TYPES, "uint64 beyond 2^32 as identities of groups")
def wide_identities(run):
    identities = np.uint64(2**40) + np.tile(np.arange(4, dtype=np.uint64), N // 4)

    def model(y, group):
        a = numpyro.sample("a", dist.Normal(0, 1).expand([4]).to_event(1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(a[(group[i] % 4).astype(int)], 1), obs=y[i])

    return run(model, Y, identities), exact_groups()


@case(TYPES, "times in seconds since 1970, single precision", "tuned")
def timestamps(run):
    when = (1_700_000_000 + 60 * np.arange(N)).astype(np.float64)
    z = (when - when.mean()) / when.std()
    y = (z + Y).astype(np.float32)

    def model(t, y):
        w = coefficients(2)
        with rows(N) as i:
            t = (t - t.mean()) / t.std()
            numpyro.sample("y", dist.Normal(w[0] + w[1] * t[i], 1), obs=y[i])

    return run(model, when, y), exact(np.column_stack([np.ones(N), z]), y)


@case(TYPES, "integers as observations of a Normal")
def integer_observations(run):
    y = np.round(Y).astype(np.int64)
    return run(regression, X, y), exact(X, y)


@case(TYPES, "None where data should be")
def nothing(run):
    return never(run(regression, X, None))


@case(TYPES, "arguments in the wrong order")
def swapped(run):
    return never(run(regression, Y, X))


@case(TYPES, "a JAX array on another platform's name, `jax.device_put`")
def placed(run):
    return run(regression, jax.device_put(X, jax.devices()[0]), Y), exact(X, Y)


@case(TYPES, "a memory-mapped file")
def memory_map(run):
    import tempfile

    path = tempfile.mkdtemp() + "/x.npy"
    np.save(path, X)
    return run(regression, np.load(path, mmap_mode="r"), Y), exact(X, Y)


@case(TYPES, "an h5py dataset")
def hdf5(run):
    import tempfile

    import h5py

    file = h5py.File(tempfile.mkdtemp() + "/x.h5", "w")
    return run(regression, file.create_dataset("x", data=X), Y), exact(X, Y)


@case(TYPES, "an xarray DataArray", "given tuned")
def labelled(run):
    import xarray

    return run(regression, xarray.DataArray(X), xarray.DataArray(Y)), exact(X, Y)


@case(TYPES, "an Arrow table")
def arrow(run):
    import pyarrow

    table = pyarrow.table({"y": Y})
    return run(mean_of, table["y"]), exact_mean(Y)
