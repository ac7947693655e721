# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Every row is looked at before anything is drawn: what is refused, and what is not."""

import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform
import pytest

from numpyro_sgmcmc import RowsOnDisk
from numpyro_sgmcmc.posterior.checks.all_rows import check_rows
from numpyro_sgmcmc.posterior.checks.arguments import as_arrays, checked_arrays
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.target import Target

COMPILE_QUICKLY = True

N = 400
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, 3)).astype(np.float32)
REAL = RNG.standard_normal(N).astype(np.float32)
BINARY = (X[:, 0] > 0).astype(np.int32)
GROUP = RNG.integers(0, 3, N)


def one_row(values, k, value):
    return np.where(np.arange(N) == k, value, values)


def model_of(likelihood, size=N, batch_size=50):
    """Three coefficients, and what is done with them and the rows ``i`` of a minibatch."""

    def model(*args):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", size, subsample_size=batch_size) as i:
            likelihood(w, i, *args)

    return model


def look(model, *args, **kwargs):
    args, kwargs = as_arrays((args, kwargs))
    target = Target(read_model(model, init_to_uniform, args, kwargs), args, kwargs)
    check_rows(target, target, lambda _, function, target, outputs: target.compiled(function))


def observed(fn, value, **kwargs):
    numpyro.sample("y", fn, obs=value, **kwargs)


def logistic(w, i, y):
    observed(dist.Bernoulli(logits=X_[i] @ w), y[i])


X_ = jnp.asarray(X)


def classes(w, i, y):
    observed(dist.Categorical(logits=X_[i] * w), y[i])


def masked_classes(w, i, y):
    observed(dist.Categorical(logits=X_[i] * w).mask((y[i] >= 0) & (y[i] < 3)), y[i])


def counted(w, i, y):
    observed(dist.Binomial(5, logits=X_[i] @ w), y[i])


def gamma(w, i, y):
    observed(dist.Gamma(2.0, jnp.exp(X_[i] @ w)), y[i])


def beta(w, i, y):
    observed(dist.Beta(jnp.exp(w[0]), jnp.exp(w[1])), y[i])


def simplex(w, i, y):
    observed(dist.Dirichlet(jnp.exp(w)), y[i])


def normal(w, i, x, y):
    observed(dist.Normal(x[i] @ w, 1), y[i])


def uniform(w, i, y):
    observed(dist.Uniform(0, jnp.exp(w[0])), y[i])


def logarithm(w, i, x, y):
    observed(dist.Normal(jnp.log(x[i, 0]) * w[0], 1), y[i])


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("likelihood", "values", "message"),
    [
        (logistic, BINARY + 1, r"\(Bernoulli\).* in \d+ of 400 rows .* subtract 1"),
        (
            logistic,
            one_row(BINARY, 377, 7),
            "in 1 of 400 rows of plate 'rows', the first in row 377: 7",
        ),
        (logistic, 0.1 + 0.8 * BINARY, "soft labels"),
        (classes, one_row(GROUP, 9, -1), "first in row 9: -1. -1 often stands for a missing label"),
        (classes, GROUP + 1, "Labels count from 0 to 2 here: subtract 1"),
        (counted, one_row(GROUP, 5, 6), r"\(Binomial\).*more successes than trials"),
        (gamma, np.maximum(REAL, 0), "A Gamma has no density at 0"),
        (gamma, REAL, "A Gamma has no negative values"),
        (beta, np.abs(REAL), r"\(Beta\).*Values go up to"),
        (simplex, np.abs(X), r"\(Dirichlet\) are outside of its support in 400 of 400"),
    ],
)
def test_observations_outside_the_support(likelihood, values, message):
    with pytest.raises(ValueError, match=message):
        look(model_of(likelihood), values)


def test_what_is_masked_may_be_outside():
    for value in (-1, 99):
        look(model_of(masked_classes), one_row(GROUP, 9, value))


def test_a_support_that_depends_on_latent_sites():
    with pytest.raises(ValueError, match=r"support of site 'y' depends on latent sites \(w\)"):
        look(model_of(uniform), np.abs(REAL) + 0.1)


def test_missing_values_may_be_latent():
    """It is the bounds that must not depend on them."""

    def imputed(w, i, y):
        observed(dist.Normal(w[0], 1), jnp.where(i < 3, w[2], y[i]))

    look(model_of(imputed), REAL)


def test_a_row_without_a_finite_density():
    x = np.abs(X)
    x[377] = 0
    with pytest.raises(ValueError, match="'y' .*not finite in 1 of 400 .* first is row 377"):
        look(model_of(logarithm), x, REAL)
    with pytest.raises(ValueError, match="first in row 377: nan. NaN marks missing"):
        look(model_of(lambda w, i: observed(dist.Normal(w[0], 1), y_with_nan[i])))


y_with_nan = jnp.asarray(one_row(REAL, 377, np.nan))


def coupled(function):
    return lambda w, i, x, y: observed(dist.Normal(function(x[i], w, i), 1), y[i])


def softmax(x, w, i):
    return jax.nn.softmax(x @ w)


def batch_normalisation(x, w, i):
    return (x - x.mean(0)) / x.std(0) @ w


def random_walk(x, w, i):
    return jnp.cumsum(x @ w)


def previous(x, w, i):
    return jnp.roll(x @ w, 1)


def by_position(x, w, i):
    return jnp.linspace(0, 1, len(i)) * (x @ w)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "function", [softmax, batch_normalisation, random_walk, previous, by_position]
)
@pytest.mark.parametrize("batch_size", [2, 50, N - 1])
def test_rows_that_depend_on_others(function, batch_size):
    with pytest.raises(ValueError, match="depends on the other rows of their minibatch"):
        look(model_of(coupled(function), batch_size=batch_size), X, REAL)


def test_rows_that_are_counted_more_than_once():
    with pytest.raises(ValueError, match=r"batch shape \(50, 50\).*`y\[i, 0\]`"):
        look(model_of(normal), X, REAL[:, None])
    summed = model_of(
        lambda w, i, x, y: numpyro.factor("f", dist.Normal(x[i] @ w, 1).log_prob(y[i]).sum())
    )
    with pytest.raises(ValueError, match=r"vector of the terms of the rows, shape \(50,\)"):
        look(summed, X, REAL)
    event = model_of(lambda w, i, x, y: observed(dist.Normal(x[i] @ w, 1).to_event(1), y[i]))
    with pytest.raises(ValueError, match=r"event shape \(50,\).*Leave out"):
        look(event, X, REAL)


def terms_of(x, y, w, i):
    return dist.Normal(x[i] @ w, 1).log_prob(y[i])


@pytest.mark.parametrize(
    ("terms", "ratio"),
    [
        (lambda w, i, x, y: terms_of(x, y, w, i) * N / len(i), r"0\.5"),
        (lambda w, i, x, y: terms_of(x, y, w, i) / len(i), r"0\.5"),
        (lambda w, i, x, y: terms_of(x, y, w, i) * len(i) ** 0.5, r"1\.41"),
        (lambda w, i, x, y: terms_of(x, y, w, i) - jnp.log(len(i)), ""),
        (lambda w, i, x, y: dist.Normal(x[i] @ w, len(i) ** -0.5).log_prob(y[i]), ""),
    ],
)
def test_rows_that_depend_on_the_size_of_the_minibatch(terms, ratio):
    model = model_of(lambda w, i, x, y: numpyro.factor("f", terms(w, i, x, y)))
    with pytest.raises(ValueError, match=rf"32 rows it is {ratio}.* in one of 16\. The plate"):
        look(model, X, REAL)
    look(model_of(lambda w, i, x, y: numpyro.factor("f", terms_of(x, y, w, i))), X, REAL)


def scaled_twice(w, i, x, y):
    with handlers.scale(scale=N / 50):
        normal(w, i, x, y)


def test_rows_that_are_scaled_twice():
    with pytest.raises(ValueError, match="scaled by 400/50 twice"):
        look(model_of(scaled_twice), X, REAL)


def test_two_plates_scale_a_site_by_both():
    """With equal shares that is the square of one, which is no fault."""

    def crossed(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        users = numpyro.plate("users", N, subsample_size=50, dim=-2)
        with users as i, numpyro.plate("items", N, subsample_size=50, dim=-1) as j:
            numpyro.sample("y", dist.Normal(w * x[i][:, :1], 1), obs=y[j] + y[i][:, None])

    look(crossed, X, REAL)

    def thrice(x, y):
        with handlers.scale(scale=N / 50):
            crossed(x, y)

    with pytest.raises(ValueError, match="scaled by 400/50 twice"):
        look(thrice, X, REAL)


def indexed(index):
    return lambda w, i, y, g: observed(dist.Normal(w[index(i, g)], 1), y[i])


def test_codes_beyond_an_array():
    by_group = model_of(indexed(lambda i, g: g[i]))
    look(by_group, REAL, GROUP)
    for code, row in ((3, 377), (-1, 5)):
        with pytest.raises(ValueError, match=rf"\(3,\) with {code} in row {row}, .* in 1 rows"):
            look(by_group, REAL, one_row(GROUP, row, code))
    unused = model_of(
        lambda w, i, y, g: observed(dist.Normal(jnp.where(g[i] < 3, w[g[i]], 0.0), 1), y[i])
    )
    look(unused, REAL, one_row(GROUP, 377, 3))


def test_computed_indices_beyond_an_argument():
    moved = model_of(lambda w, i, x, y: observed(dist.Normal(x[i * 1] @ w, 1), y[i]))
    look(moved, X, REAL)
    with pytest.raises(ValueError, match=r"argument 'args\[0\]' .* with 350 in row 350"):
        look(moved, X[:350], REAL)


def lagged(w, i, y):
    observed(dist.Normal(w[0] * y[i] + w[1] * y[i + 1], 1), y[i + 2])


def previous_of(w, i, y):
    observed(dist.Normal(w[0] * jnp.where(i > 0, y[i - 1], 0.0), 1), y[i])


def from_the_end(w, i, y):
    observed(dist.Normal(w[0] * y[-i - 1], 1), y[i])


def test_neighbours():
    look(model_of(lagged, size=N - 2), REAL)
    with pytest.raises(ValueError, match="with 400 in row 399"):
        look(model_of(lagged), REAL)
    look(model_of(previous_of), REAL)
    look(model_of(from_the_end), REAL)


def test_few_rows_by_subsample():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", 12, subsample_size=4) as i:
            observed(dist.Normal(numpyro.subsample(x, event_dim=1) @ w, 1), y[i])

    look(model, X[:12], REAL[:12])


def test_random_densities_are_not_refused():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", N, subsample_size=50) as i:
            noise = random.normal(numpyro.prng_key(), (len(i),))
            observed(dist.Normal(x[i] @ w + noise, 1), y[i])

    look(model, X, REAL)


def test_a_minibatch_size_that_is_written_out():
    written = model_of(lambda w, i, x, y: observed(dist.Normal(x[i] @ w + jnp.zeros(50), 1), y[i]))
    look(written, X, REAL)
    with pytest.raises(ValueError, match="first in row 377: 7"):
        look(
            model_of(lambda w, i, y: observed(dist.Bernoulli(logits=jnp.zeros(50) + w[0]), y[i])),
            one_row(BINARY, 377, 7),
        )


def two_plates(nested):
    def model(y, u, v):
        a = numpyro.sample("a", dist.Normal(0, 1))
        users = numpyro.plate("users", 30, subsample_size=7, dim=-2)
        items = numpyro.plate("items", 40, subsample_size=9, dim=-1)
        if nested:
            with users as i, items as j:
                observed(dist.Bernoulli(logits=a), y[i][:, j])
        else:
            with users as i:
                observed(dist.Bernoulli(logits=a), u[i][:, None])
            with items as j:
                numpyro.sample("v", dist.Bernoulli(logits=a), obs=v[j])

    return model


@pytest.mark.parametrize("nested", [True, False])
def test_several_plates(nested):
    y, u, v = np.zeros((30, 40), int), np.zeros(30, int), np.zeros(40, int)
    look(two_plates(nested), y, u, v)
    y[29, 39] = v[39] = 2
    with pytest.raises(ValueError, match="1 of 40 rows of plate 'items', the first in row 39"):
        look(two_plates(nested), y, u, v)


def test_rows_on_disk(tmp_path):
    np.save(tmp_path / "y.npy", one_row(BINARY, 377, 7))
    with pytest.raises(ValueError, match="first in row 377: 7"):
        look(model_of(logistic), RowsOnDisk(tmp_path / "y.npy"))


def test_more_rows_than_are_looked_at_together(monkeypatch):
    monkeypatch.setattr("numpyro_sgmcmc.posterior.checks.all_rows._CHUNK", 64)
    look(model_of(logistic), BINARY)
    with pytest.raises(ValueError, match="in 2 of 400 rows .* first in row 130: 7"):
        look(model_of(logistic), one_row(one_row(BINARY, 399, 7), 130, 7))


def test_digits_that_single_precision_does_not_have():
    seconds = np.column_stack([X[:, :2], 1.7e9 + np.arange(N)])
    with pytest.warns(UserWarning, match="'x' of the model loses digits in column 2"):
        checked_arrays(lambda x: None, (seconds,), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        centred = np.column_stack([np.full(N, 0.1), seconds - seconds.mean(0)])
        checked_arrays(lambda x: None, (centred,), {})


# --- whatever shapes and rows may hide

MANY = 400
COVARIATE = np.random.default_rng(3).standard_normal(MANY).astype(np.float32)
#: Sorted, and mostly zero.
LATE = (np.arange(MANY) > 390).astype(np.float32)


def one_plate(likelihood, batch=20):
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", MANY, subsample_size=batch) as i:
            likelihood(b, x[i], y[i])

    return model


def seen(site, law, y):
    numpyro.sample(site, law, obs=y)


def scores(b, x):
    return dist.Categorical(logits=(b * x)[:, None, None] * jnp.arange(3.0))


IN_A_COLUMN = {
    "rare counts": lambda b, x, y: seen("y", dist.Poisson(jnp.exp(b * x)), y[:, None]),
    "labels of one kind": lambda b, x, y: seen("y", dist.Bernoulli(logits=b * x), 0 * y[:, None]),
    "parameters in a column": lambda b, x, y: seen("y", dist.Poisson(jnp.exp(b * x[:, None])), y),
    "a mask in a column": lambda b, x, y: seen(
        "y", dist.Normal(b + 0 * x, 1).mask(y[:, None] > 2), x
    ),
    "scores in a column": lambda b, x, y: seen("y", scores(b, x), y.astype(int)),
}


@pytest.mark.parametrize("name", IN_A_COLUMN)
def test_rows_in_two_dimensions_are_seen_by_their_shapes(name):
    with pytest.raises(ValueError, match=r"batch shape \(20, 20\).*every observation would be"):
        look(one_plate(IN_A_COLUMN[name]), COVARIATE, LATE)


def test_columns_as_many_as_rows_of_a_minibatch():
    """They are other data, and their number stays the same with another number of rows."""

    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", MANY, subsample_size=20) as i:
            numpyro.sample("y", dist.Normal(b, 1), obs=y[i].T)

    wide = np.random.default_rng(0).standard_normal((MANY, 20)).astype(np.float32)
    look(model, wide)


HIDDEN = {
    "the mean of a rare feature": lambda b, x, y: seen("y", dist.Normal(b * (y - y.mean()), 1), x),
    "the largest label": lambda b, x, y: seen("y", dist.Normal(b, 1 + y.max()), x),
    "the number of positives": lambda b, x, y: seen("y", dist.Normal(b, 1 + (y > 0).sum()), x),
    "the least of all, of two": lambda b, x, y: seen("y", dist.Normal(b, 2 + y.min()), x),
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("turned", [False, True])
def test_rare_values_show_what_depends_on_them(name, turned):
    """The first rows are alike, or all but the first."""
    y = -LATE if "least" in name else LATE
    with pytest.raises(ValueError, match="depends on the other rows|other rows of the minibatch"):
        look(one_plate(HIDDEN[name]), COVARIATE, y[::-1].copy() if turned else y)


FORGOTTEN = {
    "counts": dist.Poisson(1.0),
    "trials of their own": dist.NegativeBinomial2(1.0, 2.0),
    "vectors": dist.MultivariateNormal(jnp.zeros(40), jnp.eye(40)),
    "many labels": dist.Bernoulli(0.5).expand([20, 30]).to_event(1),
    "numbers": dist.Normal(0.0, 1.0),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_observation_is_named_first(name):
    with pytest.raises(ValueError, match="'y' in .* has no observations: its `obs` is None"):
        look(one_plate(lambda b, x, y: seen("y", FORGOTTEN[name], None)), COVARIATE, LATE)


def test_a_rare_value_in_any_column():
    x = np.random.default_rng(1).standard_normal((MANY, 12)).astype(np.float32)
    x[:, 7] = np.arange(MANY) == 237

    def centred(b, x, y):
        seen("y", dist.Normal(b * (x[:, 7] - x[:, 7].mean()), 1), y)

    with pytest.raises(ValueError, match="other rows of their minibatch"):
        look(one_plate(centred), x, LATE)
    look(one_plate(lambda b, x, y: seen("y", dist.Normal(b * x[:, 7], 1), y)), x, LATE)


DATA_CHANGED = {
    "as many columns as rows, and one less": ((19, 20), 20, lambda y: jnp.moveaxis(y, 0, -1), -1),
    "pairs, and minibatches of two": ((1, 2), 2, lambda y: y, -3),
}


@pytest.mark.parametrize("name", DATA_CHANGED)
def test_dimensions_of_other_data(name):
    shape, batch, moved, dim = DATA_CHANGED[name]

    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", MANY, subsample_size=batch, dim=dim) as i:
            numpyro.sample("y", dist.Normal(b, 1), obs=moved(y[i]))

    look(model, np.random.default_rng(0).standard_normal((MANY, *shape)).astype(np.float32))


def grouped(first, second, size=40, batch=10):
    """A plate beside one with latent sites, and what its observations have for a mean."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("big", 3, subsample_size=first) as i:
            numpyro.sample("x", dist.Normal(mu, 1), obs=y[:3][i])
        with numpyro.plate("groups", size, subsample_size=batch) as i:
            second(mu, y[i])

    return model


def effects(mu, y):
    a = numpyro.sample("a", dist.Normal(mu, 1))
    numpyro.sample("y", dist.Normal(a, 0.5), obs=y)


@pytest.mark.parametrize("first, batch", [(3, 10), (2, 10), (3, 40), (2, 40)])
def test_plates_whose_minibatch_is_whole(first, batch):
    """Beside others, with latent sites and without."""
    look(grouped(first, effects, batch=batch), REAL[:40])


def centred_classes(mu, y):
    c = numpyro.sample("c", dist.Bernoulli(0.5))
    numpyro.sample("y", dist.Normal(mu * (c - c.mean()), 1), obs=y)


def centred_effects(mu, y):
    a = numpyro.sample("a", dist.Normal(mu, 1))
    numpyro.sample("y", dist.Normal(a - a.mean(), 1), obs=y)


@pytest.mark.parametrize("coupled", [centred_classes, centred_effects])
def test_latent_variables_of_groups_do_not_depend_on_others(coupled):
    with pytest.raises(ValueError, match="likelihood of a group of plate 'groups' depends|'y' in"):
        look(grouped(2, coupled), REAL[:40])
