# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The search for the centre: from far away, in any units, and of several modes the best."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import init_to_uniform, init_to_value
import pytest
from runs import target_of
import small_models

from numpyro_sgmcmc import CCAdL
from numpyro_sgmcmc.posterior.metric import DiagonalMetric
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning import gaussian, hessians
from numpyro_sgmcmc.tuning.center import _Search, search_center
from numpyro_sgmcmc.tuning.find_reparam import find_centring, non_centred
from numpyro_sgmcmc.tuning.gaussian import Fit, Gaussian, find_metric
from numpyro_sgmcmc.tuning.low_rank import find_low_rank

COMPILE_QUICKLY = True

RNG = np.random.default_rng(0)
N, D = 2_000, 4
X = np.column_stack([np.ones(N), RNG.standard_normal((N, D - 1))])
NOISE = RNG.standard_normal(N)
W = np.array([0.5, -1.0, 1.0, 0.2])


def searched(model, *args, init_strategy=init_to_uniform):
    args = tuple(
        jnp.asarray(x, jnp.float32 if np.asarray(x).dtype.kind == "f" else None) for x in args
    )
    target = Target(read_model(model, init_strategy, args, {}), args, {})
    return target, search_center(target, random.key(0), init_strategy)


def linear(x, y):
    """Flat priors, and so nothing that tells how large anything is."""
    w = numpyro.sample("w", dist.ImproperUniform(constraints.real_vector, (), (x.shape[1],)))
    sigma = numpyro.sample("sigma", dist.ImproperUniform(constraints.positive, (), ()))
    with numpyro.plate("rows", len(y), subsample_size=100) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, sigma), obs=y[i])


def logistic(x, y, scale):
    w = numpyro.sample("w", dist.Normal(0, scale).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=100) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


@pytest.mark.slow
def test_raw_units():
    """Incomes on heights in inches: the posterior is 1e5 of its widths from where it starts."""
    height, noise = np.random.default_rng(1).standard_normal((2, N)) * [[4], [19_000]]
    x = np.column_stack([np.ones(N), 66 + height])
    y = -60_000 + 1_250 * x[:, 1] + noise
    target, start = searched(linear, x, y)
    found = find_metric(target, random.key(1), start)
    assert found.converged and not found.multimodal
    expected, residuals, *_ = np.linalg.lstsq(x, y, rcond=None)
    # in the order of the alphabet: sigma, w
    sds = [(2 * N) ** -0.5, *np.sqrt(np.diag(np.linalg.inv(x.T @ x)) * residuals[0] / N)]
    center = np.asarray(found.metric.center, float)
    off = np.abs(center - [np.log(residuals[0] / N) / 2, *expected]) / sds
    assert off.max() < 0.1
    scale = np.sqrt(np.asarray(found.metric.variances(found.metric.center), float))
    np.testing.assert_allclose(scale, sds, rtol=0.1)


@pytest.mark.slow
def test_a_scale_that_depends_on_covariates():
    def model(x, y):
        b, g = (numpyro.sample(k, dist.Normal(0, 5).expand([D]).to_event(1)) for k in "bg")
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(x[i] @ b, jnp.exp(x[i] @ g)), obs=y[i])

    y = X @ W + np.exp(X @ np.array([1.0, 0.4, -0.4, 0.3])) * NOISE
    target, start = searched(model, X, y)
    found = find_metric(target, random.key(1), start)
    truth = np.concatenate([W, [1.0, 0.4, -0.4, 0.3]])
    assert found.converged and np.abs(found.metric.coordinates(truth)).max() < 4


def test_units_make_no_difference():
    """Columns in other units: as many steps, to the same place to rounding."""
    scale = 2.0 ** np.array([20, -20, 7, 0])
    y = (NOISE < X @ W).astype(np.int32)
    _, here = searched(logistic, X, y, np.full(D, 10.0))
    _, there = searched(logistic, X * scale, y, 10 / scale)
    assert here.passes == there.passes
    np.testing.assert_allclose(there.metric.center * scale, here.metric.center, rtol=1e-4)
    root = there.metric.factor * scale[:, None]
    np.testing.assert_allclose(
        root @ root.T, here.metric.factor @ here.metric.factor.T, rtol=1e-3, atol=1e-7
    )


def mixture(y):
    w = numpyro.sample("w", dist.Beta(5, 5))
    mu = numpyro.sample("mu", dist.Normal(0, 5).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=100) as i:
        parts = dist.Categorical(probs=jnp.stack([w, 1 - w]))
        numpyro.sample("y", dist.MixtureSameFamily(parts, dist.Normal(mu, 1)), obs=y[i])


def classes(y):
    mu = numpyro.sample("mu", dist.Normal(0, 5).expand([2]).to_event(1))
    with numpyro.plate("groups", len(y), subsample_size=20) as g:
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        with numpyro.plate("members", y.shape[1]):
            numpyro.sample("y", dist.Normal(mu[k], 1), obs=y[g].T)


def groups_of(centred):
    def model(g, y):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfNormal(2))
        with numpyro.plate("groups", 30):
            if centred:
                a = numpyro.sample("a", dist.Normal(mu, tau))
            else:
                a = mu + tau * numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(a[g[i]], 1), obs=y[i])

    return model


@pytest.mark.slow
def test_several_modes():
    y = np.where(X[:, 1] < -0.5, -2.0, 2.0) + NOISE
    target, start = searched(mixture, y)
    assert start.multimodal
    found = find_metric(target, random.key(1), start)
    mu = np.sort(target.unravel(found.metric.center)["mu"])
    np.testing.assert_allclose(mu, [-2, 2], atol=0.3)


@pytest.mark.slow
def test_classes_of_large_groups_have_several_modes():
    """Searches start from several points also where a group takes many evaluations."""
    y = np.where(X[:100, 1:2] < 0, -1.0, 1.0) + NOISE[: 100 * 20].reshape(100, 20)
    assert searched(classes, y)[1].multimodal


@pytest.mark.nightly
@pytest.mark.parametrize("centred", [True, False])
def test_a_hierarchy_has_one(centred):
    """Its density is highest where the groups do not differ; few draws come from there."""
    group = np.arange(N) % 30
    y = 1 + 0.5 * NOISE[:30][group] + np.roll(NOISE, 100)
    target, start = searched(groups_of(centred), group, y)
    assert not start.multimodal
    found = find_metric(target, random.key(1), start)
    tau = np.exp(target.unravel(found.metric.center)["tau"])
    assert found.converged and 0.3 < tau < 0.8


@pytest.mark.slow
def test_starts_where_it_is_told():
    """Of two modes that which is near, and with it the others of the searches."""
    y = np.where(X[:, 1] < -0.5, -2.0, 2.0) + NOISE
    for mu in ([-2.0, 2.0], [2.0, -2.0]):
        init = init_to_value(values={"mu": jnp.array(mu), "w": jnp.array(0.5)})
        target, start = searched(mixture, y, init_strategy=init)
        assert not start.multimodal
        assert np.all(np.sign(target.unravel(start.metric.center)["mu"]) == np.sign(mu))


@pytest.mark.nightly
def test_nowhere_finite():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        numpyro.factor("nowhere", jnp.where(mu > 1e6, 0.0, -jnp.inf))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    with pytest.raises(ValueError, match="nowhere"):
        CCAdL(model).tune(random.key(0), X[:, 1].astype(np.float32))


# over 26 keys the logarithms of the ratios had a standard deviation of 0.12
@pytest.mark.nightly
@pytest.mark.parametrize("find, most", [(find_metric, 1.5), (find_low_rank, 2.5)])
def test_a_rough_likelihood(find, most, monkeypatch):
    """
    Absolute residuals have no second derivatives, and yet the posterior has a width; that of low
    rank leaves it at the first look of the search.
    """

    def medians(x, y):
        w = numpyro.sample("w", dist.Normal(0, 5).expand([D]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Laplace(x[i] @ w, 1), obs=y[i])

    y = X @ W + np.random.default_rng(2).laplace(size=N)
    # the information of a row on its median is one over the squared scale
    expected = np.sqrt(np.diag(np.linalg.inv(X.T @ X)))

    def widths():
        target, start = searched(medians, X, y)
        found = find(target, random.key(1), start)
        return np.sqrt(np.asarray(found.metric.variances(found.metric.center), float))

    assert (np.abs(np.log(widths() / expected)) < np.log(most)).all()
    monkeypatch.setattr(hessians, "looks_rough", lambda *_: jnp.array(False))
    assert (widths() > 3 * expected).any()  # as if the rows said nothing


@pytest.mark.nightly
def test_scales_start_within_reach():
    """The curvature of a prior in the logarithm of a scale is no width of it, and has no units."""

    def model(y):
        means = numpyro.sample("means", dist.Normal(0, 1e6).expand([2]).to_event(1))
        unknown = numpyro.sample("scales", dist.HalfNormal(50).expand([2]).to_event(1))
        a = numpyro.sample("a", dist.Normal(0, jnp.sum(unknown)).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(means[0] + a[0], 1e4), obs=y[i])

    target = non_centred(target_of(model, jnp.zeros(N)))
    starts = _Search(target, random.key(0)).starts(random.key(1), init_to_uniform, 1)
    zero, *others = (target.unravel(x) for x, _ in starts)
    assert len(others) == 5 and all(np.all(x == 0) for x in zero.values())
    reach = {k: np.abs([x[k] for x in others]).max() for k in zero}
    assert 1 < reach["scales"] < 2 * 4 and 1e4 < reach["means"] < 1e7


@pytest.mark.nightly
def test_a_hierarchy_in_raw_units():
    """Growth of rats: effects around 240 and 90; searches begin at zero, with scales of 1."""
    rats, each = 40, 50
    rng = np.random.default_rng(1)
    rat, day = np.repeat(np.arange(rats), each), rng.uniform(-1, 1, rats * each)
    a, b = 240 + 14 * rng.standard_normal(rats), 90 + 7 * rng.standard_normal(rats)
    y = a[rat] + b[rat] * day + 6 * rng.standard_normal(rats * each)

    def growth(rat, day, y):
        prior = dist.Normal(jnp.array([200.0, 50.0]), 100)
        mean = numpyro.sample("mean", prior.to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(50).expand([2]).to_event(1))
        with numpyro.plate("rats", rats):
            a = numpyro.sample("a", dist.Normal(mean[0], scale[0]))
            b = numpyro.sample("b", dist.Normal(mean[1], scale[1]))
        sigma = numpyro.sample("sigma", dist.HalfNormal(20))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(a[rat[i]] + b[rat[i]] * day[i], sigma), obs=y[i])

    args = tuple(map(jnp.asarray, (rat, np.float32(day), np.float32(y))))
    target = non_centred(target_of(growth, *args))
    for key in (2, 3):
        start = search_center(target, random.key(key), init_to_uniform)
        there, start = find_centring(target, start)
        found = find_metric(there, random.key(key), start)
        assert found.converged
        values = target.unravel(found.metric.center)
        expected = {"mean": [240, 90], "scale": np.log([14, 7]), "sigma": np.log(6)}
        errors = {"mean": [2.2, 1.1], "scale": 0.12, "sigma": 0.02}
        for name, x in expected.items():
            # of 2,000 rows, and effects of 40 rats
            assert (np.abs(values[name] - np.array(x)) < 4 * np.array(errors[name])).all()


def test_a_curved_ridge_is_no_mode():
    """The same effects by a large scale and by a small one: a way between them is straight."""

    def effects(y):
        tau = numpyro.sample("tau", dist.HalfNormal(5))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([5]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(tau * z, 0.1).to_event(1), obs=y[i])

    y = jnp.asarray(1 + 0.1 * np.random.default_rng(3).standard_normal((100, 5)), jnp.float32)
    target = non_centred(target_of(effects, y))
    centers = [np.array([np.log(t), *np.full(5, 1 / t)]) for t in (0.8, 3.0)]
    fits = [Fit(x, np.eye(6), 0.0, 0.0, np.zeros(6), np.ones(6), np.eye(6)) for x in centers]

    def modes(target):
        return _Search(target, random.key(0)).modes(fits[0], fits[1:], 10)

    assert modes(target._replace(centring={})) == fits[1:]
    assert modes(target) == []


@pytest.mark.nightly
def test_few_directions_of_many_parameters():
    """Crossed effects, of which the means are known together much less than each for itself."""
    first, second, number = 60, 30, 3_000
    rng = np.random.default_rng(4)
    i, j = rng.integers(first, size=number), rng.integers(second, size=number)
    y = 1 + rng.standard_normal(first)[i] + rng.standard_normal(second)[j]
    y += rng.standard_normal(number)

    def crossed(i, j, y):
        a = numpyro.sample("a", dist.Normal(0, 1).expand([first]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([second]).to_event(1))
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", len(y), subsample_size=100) as k:
            numpyro.sample("y", dist.Normal(mu + a[i[k]] + b[j[k]], 1), obs=y[k])

    args = jnp.asarray(i), jnp.asarray(j), jnp.asarray(y, jnp.float32)
    target = target_of(crossed, *args)
    x = np.zeros((number, first + second + 1))
    x[np.arange(number), i] = x[np.arange(number), first + j] = x[:, -1] = 1
    precision = x.T @ x + np.diag([1.0] * (first + second) + [0.01])
    covariance = np.linalg.inv(precision)
    expected, sds = covariance @ x.T @ y, np.sqrt(np.diag(covariance))
    # where mean-field inference would be: each for itself, and not yet at the centre
    alone = DiagonalMetric(*(jnp.asarray(x, jnp.float32) for x in (
        expected + sds * rng.standard_normal(len(sds)), np.diag(precision) ** -0.5
    )))  # fmt: skip

    def checked(metric):
        off = np.abs(np.asarray(metric.center) - expected) / sds
        ratios = np.sqrt(np.asarray(metric.variances(metric.center))) / sds
        factor = np.asarray(jax.vmap(metric.direction, 1, 1)(jnp.eye(len(sds))), float)
        e = np.linalg.eigvalsh(factor.T @ precision @ factor)
        return off.max() < 0.2 and np.all(np.abs(np.log(ratios)) < 0.1) and e[-1] < 3 * e[0]

    found = find_low_rank(target, random.key(0), Gaussian(alone, 0.0))
    assert found.converged and found.metric.vectors.shape[1] < 20
    assert checked(found.metric)
    assert not checked(alone)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [3, 20])
def test_with_all_rows_the_metric_has_the_program_of_the_centre(columns, compiled, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1_000, columns)).astype(np.float32)
    y = rng.random(1_000) < 1 / (1 + np.exp(-x[:, 0]))
    model = partial(small_models.logistic, batch_size=1_000)
    target = target_of(model, jnp.asarray(x), jnp.asarray(y, jnp.float32)).keeping_programs()
    start = search_center(target, random.key(0), init_to_uniform)
    before = len(compiled)
    found = find_metric(target, random.key(1), start)
    # products with the Hessian show what a Gauss-Newton matrix lacks
    assert len(compiled) - before <= (0 if columns == 3 else 3)
    monkeypatch.setattr(gaussian, "has_all_rows", lambda target: False)
    other = find_metric(target, random.key(1), start)
    assert found.converged and other.converged
    # the length of a step at which a search ends
    away = other.metric.coordinates(found.metric.center)
    assert np.abs(away).max() < 0.1
    ratios = np.linalg.svd(other.metric.inverse @ found.metric.factor)[1]
    np.testing.assert_allclose(ratios, 1, atol=0.1)
