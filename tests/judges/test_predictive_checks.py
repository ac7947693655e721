# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Statistics of the observations against those of replicated data."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_value
import pandas as pd
import pytest
from runs import run_mcmc, with_draws
from scipy import stats

from numpyro_sgmcmc import SGHMC, group_rows, predictive_checks
from numpyro_sgmcmc.results import new_rows

COMPILE_QUICKLY = True

RNG = np.random.default_rng(2)
N = 600


def counts(y, seen=None):
    rate = numpyro.sample("rate", dist.Gamma(1, 0.1))
    with numpyro.plate("rows", len(y), subsample_size=50) as i:
        law = dist.Poisson(rate)
        numpyro.sample("y", law if seen is None else law.mask(seen[i]), obs=y[i])


def normals(y, mean):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", len(y), subsample_size=50) as i:
        numpyro.sample("y", dist.Normal(mean + mu, 1), obs=y[i])


def drawn(y, *args):
    """A run with draws of the posterior of a rate, with little of its prior."""
    return with_draws(counts, (y, *args), {"rate": RNG.gamma(y.sum(), 1 / len(y), (2, 100))})


def expected(y):
    return [y.mean(), y.std(), y.min(), y.max(), (y == 0).mean(), y.var() / y.mean()]


NAMES = ["mean", "sd", "minimum", "maximum", "zeros", "dispersion"]


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", [7, 10_000])
def test_statistics_of_a_right_and_of_a_wrong_model(monkeypatch, chunk):
    monkeypatch.setattr(new_rows, "MOST_ROWS", chunk)
    right = predictive_checks(drawn(RNG.poisson(3.0, N)))
    assert right.index.tolist() == NAMES
    assert right["p_value"].between(0.01, 0.99).all()
    y = RNG.negative_binomial(2, 2 / 5, N)  # the same mean, a larger variance
    table = predictive_checks(drawn(y))
    assert np.allclose(table["observed"], expected(y), rtol=1e-5)
    assert np.allclose(table["replicated"][["mean", "dispersion"]], [y.mean(), 1], rtol=0.02)
    assert table["p_value"][["sd", "zeros", "dispersion"]].max() < 0.01
    assert 0.2 < table["p_value"]["mean"] < 0.8
    assert (table["5%"] <= table["95%"]).all()


def test_groups():
    group = np.array(["north", "south", "west"])[RNG.integers(0, 3, N)]
    y = RNG.poisson(np.where(group == "south", 4.0, 2.0))
    table = predictive_checks(drawn(y), by=group)
    by_hand = pd.Series(y).groupby(group).agg(["mean", "max"])
    assert np.allclose(table["observed"]["mean"], by_hand["mean"], rtol=1e-5)
    assert np.allclose(table["observed"]["maximum"], by_hand["max"])
    p = table["p_value"]["mean"]
    assert p["south"] < 0.01 and p["north"] > 0.99 and p["west"] > 0.99


def test_masked_rows_do_not_count():
    y = RNG.poisson(3.0, N)
    seen = RNG.random(N) < 0.5
    table = predictive_checks(drawn(np.where(seen, y, 1_000), seen))
    assert np.allclose(table["observed"], expected(y[seen]), rtol=1e-5)


def test_digits_far_from_zero():
    y = (4_000 + RNG.normal(size=N)).astype(np.float32)
    run = with_draws(normals, (y, 4_000.0), {"mu": np.zeros((1, 50))})
    table = predictive_checks(run)
    assert list(table.index) == NAMES[:4]
    assert np.isclose(table["observed"]["sd"], y.astype(float).std(), rtol=1e-6)
    assert 0.01 < table["p_value"]["sd"] < 0.99


def binary(y):
    p = numpyro.sample("p", dist.Beta(1, 1))
    with numpyro.plate("rows", len(y), subsample_size=10) as i:
        numpyro.sample("y", dist.Bernoulli(p), obs=y[i])


def classes(y):
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("rows", len(y), subsample_size=50) as i:
        numpyro.sample("y", dist.Categorical(p), obs=y[i])


@pytest.mark.nightly
def test_kinds_of_observations():
    y = RNG.integers(0, 2, N)
    run = with_draws(binary, (y,), {"p": np.full((1, 20), 0.5)})
    table = predictive_checks(run)
    assert table.index.tolist() == ["mean"] and 0 < table["p_value"]["mean"] < 1
    for by, match in (
        ([1, 2, 3], "each of the 600 rows of plate 'rows', in .*'y' is; got shape .3,."),
        ([None] + ["a"] * (N - 1), "no group for 1 rows, the first is row 0"),
    ):
        with pytest.raises(ValueError, match=match):
            predictive_checks(run, by=by)
    frame = pd.DataFrame({"half": np.arange(N) < 300})
    for by in (frame, frame["half"]):
        assert len(predictive_checks(run, by=by)) == 2
    run = with_draws(classes, (y,), {"p": np.full((1, 20, 3), 1 / 3)})
    with pytest.raises(ValueError, match="Site 'y' has the law Categorical.*: classes"):
        predictive_checks(run)


@pytest.mark.parametrize(
    "law",
    [
        dist.VonMises(3.1, 50),
        dist.RightCensoredDistribution(dist.Exponential(0.1), jnp.ones(N, bool)),
        dist.Multinomial(3, jnp.full(3, 1 / 3)),
    ],
    ids=lambda law: type(law).__name__,
)
def test_values_without_a_mean_are_refused(law):
    def model(y):
        numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", N):
            numpyro.sample("y", law, obs=y)

    y = np.ones((N, *law.event_shape), np.float32)
    with pytest.raises(ValueError, match=f"has the law {type(law).__name__}"):
        predictive_checks(with_draws(model, (y,), {"mu": np.zeros((1, 5))}))


def complete(y):
    rate = numpyro.sample("rate", dist.Gamma(1, 0.1))
    numpyro.factor("penalty", -rate)
    with numpyro.plate("rows", y.shape[1]), numpyro.plate("times", y.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def test_groups_without_minibatches():
    y = RNG.poisson(3.0, (4, 30))
    run = with_draws(complete, (y,), {"rate": np.full((1, 50), 3.0)})
    by_row = predictive_checks(run, by=np.arange(30) % 2)
    assert np.allclose(by_row["observed"]["mean"], [y[:, ::2].mean(), y[:, 1::2].mean()])
    by_time = predictive_checks(run, by=list("abca"))
    assert np.allclose(by_time["observed"]["mean"]["a"], y[[0, 3]].mean())


def test_statistics_that_are_not_defined():
    """Of zeros, and of a group without rows."""
    y = np.repeat([0, 3], N // 2)
    seen = np.arange(N) < N - 10
    group = np.where(seen, y > 0, 2)
    table = predictive_checks(drawn(y, seen), by=group)
    assert np.isnan(table["p_value"]["dispersion"][0])
    assert table["p_value"].xs(2, level="group").isna().all()
    assert table["p_value"]["mean"][[0, 1]].notna().all()


@pytest.mark.nightly
def test_ties_do_not_depend_on_the_order():
    y = np.array([0, 0, 1, 1, 1] * 4)
    exact = stats.binom(20, 0.6)
    right = exact.sf(12) + exact.pmf(12) / 2
    for _ in range(3):
        run = with_draws(binary, (RNG.permutation(y),), {"p": np.full((1, 400), 0.6)})
        table = predictive_checks(run, num_draws=400)
        assert table["observed"]["mean"] == 0.6
        assert abs(table["p_value"]["mean"] - right) < 4 * 0.5 / 400**0.5


def hidden(members, observed, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1e-3))
    with numpyro.plate("groups", len(members), subsample_size=10) as g:
        a = numpyro.sample("a", dist.Normal(mu, 3))
        with numpyro.plate("within", members.shape[1]):
            law = dist.Normal(a, 1).expand(members[g].T.shape).mask(observed[g].T)
            numpyro.sample("y", law, obs=y[members[g].T])


@pytest.mark.nightly
def test_effects_that_are_integrated_out():
    group = np.repeat(np.arange(60), 1 + np.arange(60) % 4)
    effect = 3 * RNG.normal(size=60)
    y = (effect[group] + RNG.normal(size=len(group))).astype(np.float32)
    start = init_to_value(values={"mu": 0.0})
    kernel = SGHMC(hidden, step_size=1e-5, friction=10.0, init_strategy=start)
    run = run_mcmc(kernel, *group_rows(group), y, warmup=0, samples=100)
    table = predictive_checks(run)
    assert np.allclose(table["observed"], expected(y)[:4], rtol=1e-4)
    # groups are replicated at their own effects: the mean of all moves by rows alone
    width = table["95%"]["mean"] - table["5%"]["mean"]
    assert 0.7 < width / (2 * 1.645 * (2 / len(y)) ** 0.5) < 1.3
    assert table["p_value"].between(0.01, 0.99).all()
