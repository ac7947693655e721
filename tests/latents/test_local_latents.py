# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Latent sites inside of subsampled plates, integrated out: against the marginal model."""

import collections
from dataclasses import replace
from functools import partial
import importlib
import itertools
import math
import os
import warnings
import weakref

from generations import arviz_marks
import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.special import betaln, gammaln
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import Predictive, init_to_median, init_to_uniform
from numpyro.infer.util import potential_energy
import pytest
from runs import run_mcmc, target_of
from scipy import stats
import xarray as xr

from numpyro_sgmcmc import (
    SGHMC,
    CCAdL,
    RowsOnDisk,
    full_data,
    group_rows,
    local_draws,
    to_arviz,
)
from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.diagnostics._sandwich import _weighted
from numpyro_sgmcmc.diagnostics.comparison import variance_of
from numpyro_sgmcmc.diagnostics.runs import effective_sizes
from numpyro_sgmcmc.gradients.covariance import Diagonal
from numpyro_sgmcmc.gradients.estimators import sub_batch_gradient
from numpyro_sgmcmc.posterior import potential, quadrature, small_cholesky
from numpyro_sgmcmc.posterior.handlers import Plate
from numpyro_sgmcmc.posterior.local_latents import Marginal
from numpyro_sgmcmc.posterior.metric import DiagonalMetric, IdentityMetric, from_covariance
from numpyro_sgmcmc.posterior.model import read_model, unremarkable_values
from numpyro_sgmcmc.posterior.potential import over_all_data, rows_in
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.tempered import Tempered
from numpyro_sgmcmc.results.draws_on_disk import on_disk
from numpyro_sgmcmc.tuning.center import search_center
from numpyro_sgmcmc.tuning.gaussian import Gaussian, find_metric
from numpyro_sgmcmc.tuning.hessians import whitened_hessian
from numpyro_sgmcmc.tuning.quadrature_error import error_of_integrals, rule_of_steps
from numpyro_sgmcmc.tuning.tuning import Tuning
from numpyro_sgmcmc.tuning.words import warn_of

ARVIZ, *pytestmark = arviz_marks("The draws do not have the law", "The log likelihood is that of")

#: Most of the time goes into compiling.
COMPILE_QUICKLY = True

GROUPS, ROWS = 60, 4
RNG = np.random.default_rng(0)
EFFECTS = RNG.standard_normal((GROUPS, 5))
Y = jnp.asarray(1 + EFFECTS[:, :1] + RNG.standard_normal((GROUPS, ROWS)))
BINARY = RNG.random((GROUPS, ROWS)) < 1 / (1 + np.exp(-1 - 1.5 * EFFECTS[:, :1]))
BINARY = jnp.asarray(BINARY, jnp.int32)
COUNTS = jnp.asarray(RNG.poisson(np.exp(EFFECTS[:, 0])))
X = jnp.asarray(RNG.standard_normal((GROUPS, ROWS, 5)))


def globals_():
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    return mu, numpyro.sample("tau", dist.HalfNormal(1))


def groups(y, batch):
    return numpyro.plate("groups", len(y), subsample_size=batch)


# --- models with latent sites, and the same ones without


def intercepts(y, batch=10):
    mu, tau = globals_()
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with groups(y, batch) as g:
        a = numpyro.sample("a", dist.Normal(mu, tau))
        with numpyro.plate("members", y.shape[1]):
            numpyro.sample("y", dist.Normal(a, sigma), obs=y[g].T)


def intercepts_marginal(y):
    mu, tau = globals_()
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    cov = sigma**2 * jnp.eye(ROWS) + tau**2
    numpyro.sample("y", dist.MultivariateNormal(mu * jnp.ones(ROWS), cov), obs=y)


def by_hand(y, batch=10):
    """Standard effects, a site of shape (2,), and groups in the second dimension."""
    mu, tau = globals_()
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("groups", len(y), subsample_size=batch, dim=-2) as g:
        z = numpyro.sample("z", dist.Normal(0, jnp.ones(2)).to_event(1))
        a = numpyro.deterministic("a", mu + tau * z[..., 0] * 0.6 + tau * z[..., 1] * 0.8)
        with numpyro.plate("members", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(a, sigma), obs=y[g])


def slopes(dimension):
    below = np.tril(RNG.standard_normal((dimension, dimension)), -1)
    factor = jnp.asarray(below) + 2 * jnp.eye(dimension)

    def model(y, batch=10):
        mu, tau = globals_()
        with groups(y, batch) as g:
            prior = dist.MultivariateNormal(mu * jnp.ones(dimension), scale_tril=tau * factor)
            b = numpyro.sample("b", prior)
            with numpyro.plate("members", ROWS):
                mean = jnp.einsum("gmk,gk->mg", X[g][..., :dimension], b)
                numpyro.sample("y", dist.Normal(mean, 0.5), obs=y[g].T)

    def marginal(y):
        mu, tau = globals_()
        x = X[..., :dimension]
        cov = 0.25 * jnp.eye(ROWS) + tau**2 * x @ factor @ factor.T @ jnp.swapaxes(x, 1, 2)
        numpyro.sample("y", dist.MultivariateNormal(mu * x.sum(-1), cov), obs=y)

    return model, marginal


def mixture(y, batch=10):
    mu, tau = globals_()
    with groups(y, batch) as g:
        k = numpyro.sample("k", dist.Categorical(jnp.array([0.2, 0.3, 0.5])))
        numpyro.sample("y", dist.Normal(mu + jnp.array([-1.0, 0.0, 2.0])[k], tau), obs=y[g, 0])


def mixture_marginal(y):
    mu, tau = globals_()
    weights = dist.Categorical(jnp.array([0.2, 0.3, 0.5]))
    parts = dist.Normal(mu + jnp.array([-1.0, 0.0, 2.0]), tau)
    numpyro.sample("y", dist.MixtureSameFamily(weights, parts), obs=y[:, 0])


def mixture_of_intercepts(y, batch=10):
    """Two discrete sites and a continuous one in each group."""
    mu, tau = globals_()
    with groups(y, batch) as g:
        k = numpyro.sample("k", dist.Bernoulli(0.3))
        j = numpyro.sample("j", dist.Categorical(jnp.array([0.5, 0.5])))
        a = numpyro.sample("a", dist.Normal(mu + 3.0 * k - j, tau))
        with numpyro.plate("members", y.shape[1]):
            numpyro.sample("y", dist.Normal(a, 1.0), obs=y[g].T)


def mixture_of_intercepts_marginal(y):
    mu, tau = globals_()
    weights = dist.Categorical(jnp.array([0.35, 0.35, 0.15, 0.15]))
    locations = (mu + jnp.array([0.0, -1.0, 3.0, 2.0]))[:, None] * jnp.ones(ROWS)
    parts = dist.MultivariateNormal(locations, jnp.eye(ROWS) + tau**2)
    numpyro.sample("y", dist.MixtureSameFamily(weights, parts), obs=y)


def gamma_poisson(y, batch=10):
    mu, tau = globals_()
    with groups(y, batch) as g:
        rate = numpyro.sample("rate", dist.Gamma(2.0 + tau, jnp.exp(-mu)))
        numpyro.sample("y", dist.Poisson(rate), obs=y[g])


def negative_binomial(y):
    mu, tau = globals_()
    numpyro.sample("y", dist.GammaPoisson(2.0 + tau, jnp.exp(-mu)), obs=y)


def two_plates(y, batch=10):
    mu, tau = globals_()
    with groups(y, batch) as g:
        a = numpyro.sample("a", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y[g, 0])
    with numpyro.plate("others", 30, subsample_size=7) as h:
        b = numpyro.sample("b", dist.Normal(0, tau))
        numpyro.sample("x", dist.Normal(b, 1.0), obs=y[:30, 1][h])


def two_plates_marginal(y):
    mu, tau = globals_()
    scale = jnp.sqrt(1 + tau**2)
    numpyro.sample("y", dist.Normal(mu, scale), obs=y[:, 0])
    numpyro.sample("x", dist.Normal(0, scale), obs=y[:30, 1])


def series(y, batch=10):
    """A level of each series, used in two scans, one of which has random numbers of its own."""
    mu, tau = globals_()
    rows = groups(y, batch)
    with rows as g:
        level = numpyro.sample("level", dist.Normal(mu, tau))
        own = y[g]

    def body(before, now):
        with rows:
            numpyro.sample("y", dist.Normal(level + 0.5 * before, 1), obs=now)
        return now, None

    def other(before, now):
        with rows:
            numpyro.sample("x", dist.Normal(level, 2), obs=now + 0 * random.normal(before))
        return numpyro.prng_key(), None

    scan(body, own[:, 0], own[:, 1:].T)
    scan(other, numpyro.prng_key(), own.T)


def series_marginal(y):
    mu, tau = globals_()
    parts = jnp.concatenate([y[:, 1:] - 0.5 * y[:, :-1], y], axis=1)
    noise = jnp.where(jnp.arange(2 * ROWS - 1) < ROWS - 1, 1.0, 4.0)
    cov = jnp.diag(noise) + tau**2
    mean = mu * jnp.ones(2 * ROWS - 1)
    numpyro.sample("y", dist.MultivariateNormal(mean, cov), obs=parts)


CASES = {
    "intercepts": (intercepts, intercepts_marginal, Y),
    "series": (series, series_marginal, Y),
    "standard effects, by hand": (by_hand, intercepts_marginal, Y),
    "two slopes": (*slopes(2), Y),
    "three slopes": (*slopes(3), Y),
    "a mixture": (mixture, mixture_marginal, Y),
    "a mixture of intercepts": (mixture_of_intercepts, mixture_of_intercepts_marginal, Y),
    "a positive site": (gamma_poisson, negative_binomial, COUNTS),
    "two plates": (two_plates, two_plates_marginal, Y),
}

NIGHTLY = (
    "series",
    "a mixture of intercepts",
    "three slopes",
    "standard effects, by hand",
    "two slopes",
    "a positive site",
    "two plates",
)


def marked(case):
    return pytest.param(case, marks=pytest.mark.nightly if case in NIGHTLY else ())


def flat_potential(model, y, parts=1, rule="step"):
    """The mean over a partition of the groups into minibatches, of a flat vector."""
    view = read_model(model, init_to_uniform, (y,), {}).with_rule(rule)
    zeros = unremarkable_values(view)

    rows = {p.name: jnp.arange(p.size).reshape(-1, parts).T for p in view.plates}
    keys = random.split(random.key(0), parts)

    def potential(x):
        z = ravel_pytree(zeros)[1](x)
        # a program for one of them
        one = lambda part: view.potential(z, *part, (y,), {})  # noqa: E731
        return jax.lax.map(one, (rows, keys)).mean()

    return potential, ravel_pytree(zeros)[0]


def derivatives(f, x):
    return jax.jit(lambda x: (f(x), jax.grad(f)(x), jax.hessian(f)(x)))(x)


def errors(found, expected):
    """Relative to the largest entry: of the value, the gradient and the second derivatives."""
    pairs = zip(found, expected, strict=True)
    return [float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs]


@pytest.mark.nightly
@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_the_marginal(case):
    """The minibatch potential averages to the exact marginal one, with its derivatives."""
    model, marginal, y = CASES[case]
    parts = 1 if case == "two plates" else 3
    # the nodes of a step leave 4e-4 where the rows know a sum of two effects only
    rule = "fine" if case == "standard effects, by hand" else "step"
    potential, x = flat_potential(model, y, parts, rule)
    unflat = ravel_pytree(unremarkable_values(read_model(model, init_to_uniform, (y,), {})))[1]
    expected = derivatives(lambda x: potential_energy(marginal, (y,), {}, unflat(x)), x)
    # up to rounding
    assert max(errors(derivatives(potential, x), expected)) < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", [64, 24 * 5, 17 * 5])
def test_a_pass_over_two_plates_of_groups(chunk, monkeypatch):
    """It is one program, whose chunks have rows of both plates, each row once."""
    monkeypatch.setattr(potential, "_CHUNK", chunk)
    monkeypatch.setattr(potential, "_FEWEST", 4)
    view = read_model(two_plates, init_to_uniform, (Y,), {}).with_rule("few")
    z, traced = unremarkable_values(view), []

    def of_rows(rows):
        traced.append(sum(x.size for x in rows.values()))
        energy = view.potential(z, rows, random.key(0), (Y,), {})
        numbers = {p.name: jnp.zeros(p.size).at[rows[p.name].numbers] for p in view.plates}
        weights = {k: 1.0 if x.weights is None else x.weights for k, x in rows.items()}
        # each row N / n times in n rows, in the mean over chunks
        return energy, {k: at.add(weights[k]) / rows[k].size for k, at in numbers.items()}

    energy, times = over_all_data(of_rows, view.plates)
    expected = potential_energy(two_plates_marginal, (Y,), {}, z)
    np.testing.assert_allclose(energy, expected, rtol=1e-5)
    for plate in view.plates:
        np.testing.assert_allclose(times[plate.name], 1 / plate.size, rtol=1e-6)
    assert len(set(traced)) == 1 and len(traced) <= 2
    # a part of the groups, evenly spaced
    some = [plate._replace(seen=16) for plate in view.plates]
    _, times = over_all_data(of_rows, some)
    for plate in some:
        assert 4 <= np.count_nonzero(times[plate.name]) <= plate.size
        np.testing.assert_allclose(times[plate.name].sum(), 1, rtol=1e-6)


def by_item(y, subsample_size=None):
    mu, tau = globals_()
    easiness = numpyro.sample("easiness", dist.Normal(0, 1).expand([ROWS]).to_event(1))
    with numpyro.plate("groups", len(y), subsample_size=10, dim=-1) as g:
        a = numpyro.sample("a", dist.Normal(mu, tau))
        with numpyro.plate("items", ROWS, subsample_size=subsample_size, dim=-2) as j:
            at = jnp.arange(ROWS) if j is None else j
            numpyro.sample("y", dist.Normal(a + easiness[at][:, None], 1.0), obs=y[g].T[at])


@pytest.mark.nightly
def test_a_complete_plate_inside_of_groups():
    """With a `subsample_size` of all of its rows a plate is what it is without."""
    energies = []
    for size in (None, ROWS):
        view = read_model(partial(by_item, subsample_size=size), init_to_uniform, (Y,), {})
        rows = view.first_rows() | {"groups": jnp.arange(5, 15)}
        z = unremarkable_values(view)
        energies.append(view.potential(z, rows, random.key(0), (Y,), {}))
    np.testing.assert_allclose(*energies, rtol=1e-6)


def test_weights_of_groups_are_kept_in_chunks_that_are_filled_up():
    rows = {"groups": DrawnRows(jnp.array([2, 2]), weights=jnp.array([1.5, 0.0]))}
    found = _weighted(rows, {"groups": jnp.array([1.0, 1.0, 4.0])})
    np.testing.assert_array_equal(found["groups"].weights, [6.0, 0.0])


def test_searches_keep_complete_plates_and_plates_that_may_interact():
    def sizes(*plates):
        view = read_model(two_plates, init_to_uniform, (Y,), {})._replace(plates=plates)
        return [p.subsample_size for p in view.with_small_minibatches(0.02, 16).plates]

    of_groups = (
        Plate("groups", 10_000, 500, is_group=True),
        Plate("others", 600, 600, is_group=True),
    )
    assert sizes(*of_groups) == [200, 600]
    assert sizes(Plate("rows", 10_000, 500)) == [200]
    assert sizes(Plate("rows", 1_000, 20), Plate("columns", 10_000, 500)) == [20, 500]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["plain", "controlled", "tempered"])
def test_sub_batches_of_two_plates_of_groups(kind, monkeypatch):
    """Those of one plate leave out the other; potential, gradient and noise are the same."""
    target = target_of(two_plates, Y)
    metric, rows = IdentityMetric(), target.rows(random.key(1))
    z = unremarkable_values(target.model)
    anchor = target.anchor(jax.tree.map(lambda x: x + 0.1, z)) if kind == "controlled" else None
    energy = target.potential(metric, anchor)
    if kind == "tempered":
        energy = Tempered(energy, jnp.asarray(2.0))
    at = energy, rows, random.key(2), target.factors, Diagonal()
    x = ravel_pytree(z)[0]
    found = jax.jit(lambda x: sub_batch_gradient(*at)(x))(x)
    monkeypatch.setattr(potential.ModelPotential, "group_plates", frozenset())
    expected = jax.jit(lambda x: sub_batch_gradient(*at)(x))(x)
    # up to rounding
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4), found, expected)


@pytest.mark.nightly
def test_series_of_groups():
    """Keys of a `scan`, and those in its body, are none that the model has asked for outside."""
    potential, x = flat_potential(series, Y, 1)
    unflat = ravel_pytree(unremarkable_values(read_model(series, init_to_uniform, (Y,), {})))[1]
    expected = float(potential_energy(series_marginal, (Y,), {}, unflat(x)))
    assert float(jax.jit(potential)(x)) == pytest.approx(expected, rel=1e-5)


def logistic(y, batch=10):
    mu, tau = globals_()
    with groups(y, batch) as g:
        a = numpyro.sample("a", dist.Normal(mu, 2 * tau))
        with numpyro.plate("members", y.shape[1]):
            numpyro.sample("y", dist.Bernoulli(logits=a), obs=y[g].T)


@pytest.mark.nightly
def test_the_nodes_are_enough(monkeypatch):
    """Binary rows, against a grid; a Laplace approximation is not enough."""
    potential, x = flat_potential(logistic, BINARY)

    def by_grid(x):
        z = {"mu": x[0], "tau": x[1]}
        tau = jnp.exp(z["tau"])
        grid = jnp.linspace(-12, 12, 2_001)
        a = z["mu"] + 2 * tau * grid
        terms = dist.Bernoulli(logits=a).log_prob(BINARY[..., None]).sum(1)
        terms = terms + dist.Normal(0, 1).log_prob(grid) + jnp.log(grid[1] - grid[0])
        priors = dist.Normal(0, 2).log_prob(z["mu"]) + dist.HalfNormal(1).log_prob(tau) + z["tau"]
        return -priors - jax.nn.logsumexp(terms, axis=-1).sum()

    expected = derivatives(by_grid, x)

    def worst():
        found = derivatives(flat_potential(logistic, BINARY)[0], x)
        # in posterior standard deviations
        shift = jnp.linalg.solve(expected[2], found[1] - expected[1])
        return float(jnp.abs(shift * jnp.sqrt(jnp.diag(expected[2]))).max())

    assert worst() < 0.01
    monkeypatch.setitem(quadrature._NODES, "step", (3, 3))
    assert worst() > 0.1


@pytest.mark.nightly
def test_the_tuning_knows_what_the_rule_gets_wrong(monkeypatch):
    """In posterior standard deviations; a control variate leaves what changes around its anchor."""
    view = read_model(logistic, init_to_uniform, (BINARY,), {})
    x, precision = flat_potential(logistic, BINARY)[1], 80.0
    start = Gaussian(DiagonalMetric(x, jnp.full(2, precision**-0.5)), 0.0)

    def error(controlled):
        # another function, since the program of this one is kept
        rule = view.with_rule("few")
        target = Target(rule._replace(model=replace(rule.model)), (BINARY,), {})
        return error_of_integrals(target, random.key(0), start, controlled)[0]

    assert error(False) < 0.15
    monkeypatch.setitem(quadrature._NODES, "few", (2, 2))
    assert error(False) > 0.2
    assert error(True) < error(False) / 2
    wrong = Tuning(1.0, 1.0, IdentityMetric(), integrals=0.3)
    assert "off by 0.3 posterior standard deviations" in str(wrong)
    with pytest.warns(UserWarning, match="integrals .* off by as much as 0.3 posterior"):
        warn_of(wrong)


def log_gamma(a, z):
    """A Gamma variable's logarithm, whose law has an exponential tail to one side."""
    return a * z - jnp.exp(z), gammaln(a)


def logit_beta(a, z, b=0.3):
    return a * jax.nn.log_sigmoid(z) + b * jax.nn.log_sigmoid(-z), betaln(a, b)


def log_variance(a, z):
    """Of a normal row with an exponential variance, that is a Laplace variable's."""
    rest = -jnp.exp(z) / 2 - a**2 / 2 * jnp.exp(-z) - 0.5 * math.log(8 * math.pi)
    return z / 2 + rest, -jnp.abs(a) - math.log(2)


@pytest.mark.one_case
@pytest.mark.parametrize("law", [log_gamma, logit_beta, log_variance])
def test_skewed_integrals(law):
    """Against closed forms, with their derivatives: of shapes much less and much more than 1."""
    a = jnp.array([0.1, 0.3, 1.0, 3.0, 30.0])

    def found(a, rule):
        own, fixed = (lambda z, a=a: law(a, z[:, 0])[0] for a in (a, jax.lax.stop_gradient(a)))
        start = jnp.full((len(a), 1), 0.01)
        return quadrature.log_integral(own, fixed, own, start, None, rule)

    def all_of(a):
        by_rules = [jnp.stack(jax.jvp(lambda a: found(a, k), *both)) for k in ("step", "fine")]
        return jnp.stack(by_rules) - jnp.stack(jax.jvp(lambda a: law(a, a)[1], *both))

    both = (a,), (jnp.ones(5),)
    (step, step_slope), (fine, fine_slope) = jnp.abs(jax.jit(all_of)(a))
    assert (step < 1e-3).all() and (step_slope < 0.03).all()
    assert (fine < 3e-5).all() and (fine_slope < 3e-5).all()


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [0.1, 20.0])
def test_draws_of_skewed_variables(shape):
    """Logarithms of Gamma variables, alone and beside a normal one: their tails are reached."""
    number = 4_000
    first = lambda z: density(z[:, 0])  # noqa: E731
    one = jax.jit(lambda key: quadrature.draws_of(first, first, start[:, :1], key))
    both = lambda z: density(z[:, 0]) - (z[:, 1] - 0.5 * z[:, 0]) ** 2 / 2  # noqa: E731
    two = jax.jit(lambda key: quadrature.draws_of(both, both, start, key))
    density = lambda z: shape * z - jnp.exp(z)  # noqa: E731
    start = jnp.full((number, 2), 0.1)
    for z in (one(random.key(1)), two(random.key(2))):
        uniform = stats.loggamma.cdf(np.asarray(z[:, 0], float), shape)
        assert stats.kstest(uniform, "uniform").pvalue > 0.001
        moved = np.asarray(z[:, 0], float) + 0.2 * stats.loggamma.std(shape)
        assert stats.kstest(stats.loggamma.cdf(moved, shape), "uniform").pvalue < 0.001
    rest = np.asarray(z[:, 1] - 0.5 * z[:, 0], float)
    assert stats.kstest(rest, "norm").pvalue > 0.001


@pytest.mark.nightly
def test_where_a_bound_is_near():
    """Where single precision has no number between most of a Beta law and its bound."""

    def model(y):
        b = numpyro.sample("b", dist.LogNormal(0, 1))
        with groups(y, 10) as g:
            p = numpyro.sample("p", dist.Beta(1.0, 0.1 * b))
            numpyro.sample("y", dist.Bernoulli(p), obs=y[g])

    y = jnp.ones(60)
    view = read_model(model, init_to_uniform, (y,), {})
    at = view.first_rows(), random.key(0), (y,), {}
    value = jax.jit(lambda b: view.potential({"b": b}, *at))(jnp.zeros(()))
    prior = dist.LogNormal(0, 1).log_prob(1.0)
    assert abs(float(-value - prior) - 60 * math.log(1 / 1.1)) < 0.05


@pytest.mark.nightly
def test_few_nodes_where_they_are_enough():
    """Of effects with a standard deviation of 7 they are not, of 1 they are."""
    target = target_of(logistic, BINARY)
    x = flat_potential(logistic, BINARY)[1]

    def chosen(center):
        start = Gaussian(DiagonalMetric(center, jnp.full(2, 0.1)), 0.0)
        return rule_of_steps(target, random.key(0), start, True)

    rule, error, cost = chosen(x.at[1].add(-1.0))
    assert rule == "few" and 1e-5 < error < 0.02
    rule, error, more = chosen(x.at[1].add(1.0))
    assert rule == "step" and error < 1e-3 and more > cost


@pytest.mark.nightly
def test_a_group_of_many_rows_counts_for_several():
    def worth(rows, batches):
        def model(y):
            mu = numpyro.sample("mu", dist.Normal(0, 1))
            for k, (table, batch) in enumerate(zip(y, batches, strict=True)):
                with numpyro.plate(f"groups {k}", len(table), subsample_size=batch) as g:
                    a = numpyro.sample(f"a {k}", dist.Normal(mu, 1))
                    with numpyro.plate(f"members {k}", table.shape[1]):
                        numpyro.sample(f"y {k}", dist.Normal(a, 1), obs=table[g].T)

        y = [jnp.zeros((12, n)) for n in rows]
        view = read_model(model, init_to_uniform, (y,), {})
        assert [plate.members for plate in view.plates] == list(rows)
        return Target(view, (y,), {}).effective_batch_size

    assert worth([1], [3]) == worth([10], [3]) == 3
    assert worth([20], [3]) == 6 and worth([50], [3]) == worth([500], [3]) == 15
    # tables of the same groups are taken together
    assert worth([10, 30], [3, 2]) == 9


def bundles(y, batch=6):
    """The effects of :func:`logistic`, five of them in each group."""
    mu, tau = globals_()
    with groups(y, batch) as g:
        a = numpyro.sample("a", dist.Normal(mu, 2 * tau).expand([5]).to_event(1))
        logits = jnp.broadcast_to(a[..., None], y[g].shape)
        numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(2), obs=y[g])


def of_draws(seed, keys=400, rows=range(12), scale=1.0):
    """
    Gradients and second derivatives by the draws of so many keys, and exact ones, for effects with
    this standard deviation.
    """
    exact, x = flat_potential(logistic, BINARY)
    x = x.at[1].set(math.log(scale / 2))
    y = BINARY.reshape(12, 5, ROWS)
    view = read_model(bundles, init_to_uniform, (y,), {})
    unflat, rows = ravel_pytree(unremarkable_values(view))[1], {"groups": jnp.asarray(rows)}

    def one(key):
        f = lambda x: view.potential(unflat(x), rows, key, (y,), {})  # noqa: E731
        return jax.grad(f)(x), jax.hessian(f)(x)

    found = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=100))(
        random.split(random.key(seed), keys)
    )
    return found, derivatives(exact, x)[1:]


def shift_of_many(gradients, exact):
    """By how much 10,000 groups would move in the mean, in posterior standard deviations; error."""
    gradient, precision = exact
    many = (10_000 / 12) ** 0.5 / jnp.sqrt(jnp.diag(precision))
    shifts = many * (gradients - gradient)
    return shifts.mean(0), shifts.std(0) / len(shifts) ** 0.5


@pytest.mark.nightly
def test_draws_for_many_dimensions(monkeypatch):
    """Against quadrature of each effect by itself; draws that are held fixed are not enough."""
    (gradients, hessians), exact = of_draws(0)
    shift, error = shift_of_many(gradients, exact)
    assert (jnp.abs(shift) < 0.2 + 4 * error).all()
    assert (error < 0.1).all()
    # draws that groups have in common would have as much noise as one group, times their number
    spreads = [of_draws(1, rows=[g])[0][0].std(0) for g in (0, 5)]
    assert (gradients.std(0) < 0.5 * jnp.max(jnp.stack(spreads), axis=0)).all()
    factor = jnp.linalg.inv(jnp.linalg.cholesky(exact[1]))
    curvature = jnp.linalg.eigvalsh(factor @ hessians.mean(0) @ factor.T)
    assert (jnp.abs(curvature - 1) < 0.05).all()

    away = quadrature.away
    held = lambda *both: jax.lax.stop_gradient(away(*both))  # noqa: E731
    monkeypatch.setattr(quadrature, "away", held)
    (gradients, hessians), _ = of_draws(0)
    shift, error_held = shift_of_many(gradients, exact)
    assert jnp.abs(shift).max() > 0.2 + 4 * error_held.max()
    assert (error_held > 3 * error).all()
    assert jnp.linalg.eigvalsh(factor @ hessians.mean(0) @ factor.T).max() > 1.05


@pytest.mark.nightly
def test_draws_of_skewed_effects(monkeypatch):
    """Effects of which the rows say little, with tails as wide as their prior."""
    (gradients, _), exact = of_draws(0, scale=2.0)
    shift, error = shift_of_many(gradients, exact)
    assert (jnp.abs(shift) < 0.2 + 4 * error).all()
    monkeypatch.setattr(quadrature, "_TOWARDS_MEAN", 0.0)
    (gradients, _), _ = of_draws(0, scale=2.0)
    at_mode, error_at_mode = shift_of_many(gradients, exact)
    assert jnp.abs(at_mode).max() > 0.2
    assert error_at_mode.max() > 1.5 * error.max()


def many_bundles(number=1_000, scale=1.0):
    """A target of :func:`bundles` at the truth, and the exact precision there."""
    rng = np.random.default_rng(3)
    a = scale * rng.standard_normal((number, 5, 1))
    y = jnp.asarray(rng.random((number, 5, ROWS)) < 1 / (1 + np.exp(-a)), jnp.float32)
    view = read_model(bundles, init_to_uniform, (y, 50), {})
    x = jnp.array([0.0, math.log(scale / 2)])
    exact = flat_potential(logistic, y.reshape(-1, ROWS), number)[0]
    return Target(view, (y, 50), {}), x, derivatives(exact, x)[2]


@pytest.mark.nightly
def test_no_search_for_modes_ends_where_it_starts():
    """As one at logits of zero would, where the gradient of NumPyro's Bernoulli law is wrong."""
    assert jax.grad(lambda z: dist.Bernoulli(logits=z).log_prob(0.0))(0.0) == 0.0  # not -0.5
    target, x, _ = many_bundles(60)
    rows = {"groups": jnp.arange(60)}

    def terms(key):
        values, potential = target.unravel(x), target.potential(IdentityMetric())
        return potential.with_row_terms(values, rows, key)[1]["groups"]

    assert (jax.lax.map(terms, random.split(random.key(0), 8)).std(0) < 0.1).all()


@pytest.mark.nightly
def test_curvature_by_draws():
    """That of the exact marginal, up to the noise of so many groups; the prior as it is."""
    target, x, precision = many_bundles()
    factor = jnp.linalg.inv(jnp.linalg.cholesky(precision)).T
    rows = {"groups": jnp.arange(1_000)}
    found = whitened_hessian(target, factor, x, rows, random.key(0))
    assert jnp.abs(found - jnp.eye(2)).max() < 4 * (2 / 1_000) ** 0.5 + 0.02
    weights = DrawnRows(jnp.arange(1_000), weights=jnp.full(1_000, 1e-6))
    prior = whitened_hessian(target, jnp.eye(2), x, {"groups": weights}, random.key(0))
    expected = derivatives(
        lambda x: potential_energy(globals_, (), {}, {"mu": x[0], "tau": x[1]}), x
    )
    assert errors([prior], [expected[2]])[0] < 0.01


@pytest.mark.nightly
def test_metric_where_the_model_is_wrong():
    """Groups react to an event in opposite ways, and scores vary more than the curvature says."""

    def model(event, y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("groups", len(y), subsample_size=30) as g:
            z = numpyro.sample("z", dist.Normal(0, 0.3).expand([3]).to_event(1))
            rates = jnp.exp(2 + z[:, [0, 1, 2, 0, 1, 2]] + slope * event)
            numpyro.sample("y", dist.Poisson(rates).to_event(1), obs=y[g])

    rng, event = np.random.default_rng(0), jnp.array([1.0, 0, 0, 0, 0, 0])
    reaction = rng.choice([-1.5, 1.5], (120, 1)) * np.asarray(event)
    z = np.tile(0.3 * rng.standard_normal((120, 3)), 2)
    y = jnp.asarray(rng.poisson(np.exp(2 + z + reaction)), jnp.float32)
    target = target_of(model, event, y)
    keys = random.split(random.key(0))
    found = find_metric(target, keys[1], search_center(target, keys[0], init_to_uniform))
    potential, rows = target.potential(IdentityMetric()), {"groups": jnp.arange(120)}

    def slope(x):
        return jax.grad(lambda x: potential({"slope": x}, rows, random.key(0)))(x)

    center, h = found.metric.center[0], 0.02
    change = jax.jit(lambda x: slope(x + h) - slope(x - h))(center)
    sd = (2 * h / change) ** 0.5
    assert abs(found.metric.factor[0, 0] / sd - 1) < 0.05
    assert abs(jax.jit(slope)(center)) * sd < 0.1


@pytest.mark.nightly
def test_the_tuning_knows_how_wrong_draws_are(monkeypatch):
    """From the draws of a step and their halves."""
    target, x, precision = many_bundles(400, 5.0)
    metric = from_covariance(np.linalg.inv(precision), np.asarray(x), x.dtype)
    at = random.key(0), Gaussian(metric, 0.0), True

    def error(draws):
        monkeypatch.setattr(quadrature, "_DRAWS", draws)
        return error_of_integrals(target, *at)[0]

    assert error(8) > 0.1
    assert error(32) < 0.05
    assert rule_of_steps(target, *at)[0] == "step"


@pytest.mark.parametrize("members, most", [(100, 81), (1_000, 64)])
def test_chunks_of_large_groups_have_fewer_groups(members, most):
    """Their values stay in the cache; and of very many groups there are not many chunks."""
    sizes = []

    def counted(rows):
        sizes.append(rows["groups"].numbers.size)
        return jnp.zeros(())

    plate = Plate("groups", 10_000, 10, points=2, members=members, is_group=True)
    over_all_data(counted, [plate])
    assert most / 2 < max(sizes) <= most
    over_all_data(counted, [plate._replace(size=1_000_000)])
    assert 1_000 < max(sizes) < 2_000


def test_a_pass_over_some_rows():
    y = jnp.arange(1_000.0)
    plate = Plate("rows", 1_000, 10, points=100, seen=256)
    rows = over_all_data(lambda rows: jnp.zeros(1_000).at[rows["rows"].numbers].set(1.0), [plate])
    assert rows_in(plate) == jnp.sum(rows > 0) == 256
    # from the first to the last, in the mean of what a chunk says
    mean = over_all_data(lambda rows: y[rows["rows"].numbers].mean(), [plate])
    assert abs(mean - y.mean()) < 150


def test_the_logarithm_of_a_mean_of_few_draws():
    """Is too small; by how much, the parts of the draws say."""
    logs = 0.7 * random.normal(random.key(0), (32, 20_000)) - 0.7**2 / 2
    plain = jax.nn.logsumexp(logs, axis=0) - jnp.log(32)
    found = quadrature.jackknife(logs - jnp.log(32))
    error = 4 * float(found.std()) / 20_000**0.5
    assert abs(float(found.mean())) < error + 0.001
    assert float(plain.mean()) < -0.005


@pytest.mark.nightly
def test_many_normal_effects():
    """Five in each group, in closed form: value, gradient, second derivatives."""
    model, marginal = slopes(5)
    view = read_model(model, init_to_uniform, (Y,), {})
    x, unflat = ravel_pytree(unremarkable_values(view))
    expected = derivatives(lambda x: potential_energy(marginal, (Y,), {}, unflat(x)), x)
    found = derivatives(flat_potential(model, Y)[0], x)
    assert max(errors(found, expected)) < 1e-3


@pytest.mark.nightly
def test_factors_of_small_matrices():
    a = RNG.standard_normal((7, 5, 5))
    a = a @ np.swapaxes(a, 1, 2) + np.eye(5)
    found = np.asarray(small_cholesky.inverse_cholesky(jnp.asarray(a)))
    np.testing.assert_allclose(found, np.linalg.inv(np.linalg.cholesky(a)), rtol=2e-3, atol=2e-4)
    # of more than eleven columns, by halves: a pivot counts beside the entry before elimination
    near = (jnp.eye(12) + 1e8)[None].astype(jnp.float32)
    assert jnp.isfinite(small_cholesky.inverse_cholesky(near, True)).all()
    # a saddle has a scale in every direction
    saddle = small_cholesky.inverse_cholesky(jnp.diag(jnp.array([4.0, -4.0, 0.0]))[None])
    np.testing.assert_allclose(np.diagonal(saddle[0])[:2], 0.5)
    assert np.isfinite(saddle).all()


@pytest.mark.parametrize("start", [0.0, 500.0])
def test_modes_are_found_from_afar(start):
    """With steps that would lead downward made shorter."""
    centers = jnp.array([[-3.0], [0.0], [40.0]])
    density = lambda z: dist.StudentT(3.0, centers, 1.0).log_prob(z)[:, 0]  # noqa: E731
    modes, factor = quadrature.find_modes(density, jnp.full((3, 1), start))
    np.testing.assert_allclose(modes, centers, atol=0.05)
    np.testing.assert_allclose(factor.inverse[:, 0, 0], 0.75**0.5, rtol=0.05)


# --- through MCMC


def sampled(model, *data, samples=2_000, **options):
    kernel = CCAdL(model, progress_bar=False, **options)
    return run_mcmc(kernel, *data, warmup=500, samples=samples, chains=4)


N = 1_000
MANY = jnp.asarray(1 + 0.5 * RNG.standard_normal((N, 1)) + RNG.standard_normal((N, ROWS)))


def unknown_mean_and_scale(y, batch=50):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with groups(y, batch) as g:
        a = numpyro.sample("a", dist.Normal(mu, tau))
        numpyro.deterministic("twice", 2 * a)
        with numpyro.plate("members", y.shape[1]):
            numpyro.sample("y", dist.Normal(a, 1.0), obs=y[g].T)


@pytest.fixture(scope="module")
def run():
    return sampled(unknown_mean_and_scale, MANY)


def grid_moments(y):
    """Of mu and tau, by a grid: means of groups are normal, with variance tau^2 + 1 / m."""
    means = np.asarray(y, float).mean(1)
    mu = np.linspace(means.mean() - 0.2, means.mean() + 0.2, 401)[:, None]
    tau = np.linspace(0.2, 0.8, 401)
    variance = tau**2 + 1 / y.shape[1]
    squares = ((means - means.mean()) ** 2).sum() + len(means) * (means.mean() - mu) ** 2
    terms = -0.5 * squares / variance - 0.5 * len(means) * np.log(variance)
    weights = np.exp((terms := terms - tau**2 / 2 - mu**2 / 200) - terms.max())
    weights /= weights.sum()
    found = {}
    for name, x in {"mu": mu, "tau": tau}.items():
        mean = (weights * x).sum()
        found[name] = mean, np.sqrt((weights * (x - mean) ** 2).sum())
    return found


@pytest.mark.slow
def test_exact_law(run):
    """A linear mixed model: no groups in the draws, whose law is that of a grid."""
    draws = run.get_samples(group_by_chain=True)
    assert set(draws) == {"mu", "tau"}
    for name, (mean, sd) in grid_moments(MANY).items():
        x = np.asarray(draws[name], float)[..., None]
        variance, error = variance_of(x)
        size = effective_sizes(x)
        assert size > 2_000
        assert abs(x.mean() - mean) / sd < 3.5 / size**0.5 + 0.02
        assert abs(variance**0.5 / sd - 1) < 3.5 * error / 2 + 0.02
    # with the effects of other groups it would be another law
    other = grid_moments(MANY[: N // 2])
    assert abs(other["mu"][1] / grid_moments(MANY)["mu"][1] - 1) > 0.2


@pytest.mark.slow
def test_draws_of_groups(run):
    """Against the normal conditional law of each, over the draws of the run."""
    chosen = np.array([5, 7, 900])
    found = local_draws(run, chosen, num_draws=500)
    assert found["a"].dims == ("chain", "draw", "groups")
    assert found["a"].shape == (4, 500, 3) and set(found) == {"a", "twice"}
    np.testing.assert_allclose(found["twice"], 2 * found["a"], rtol=1e-5)
    draws = run.get_samples(group_by_chain=True)
    mu, tau = (np.asarray(draws[k], float)[:, found["draw"].values] for k in ("mu", "tau"))
    for g in chosen:
        precision = tau**-2 + ROWS
        mean = (mu / tau**2 + float(MANY[g].sum())) / precision
        uniform = stats.norm.cdf(found["a"].sel(groups=g), mean, precision**-0.5)
        assert stats.kstest(uniform.ravel(), "uniform").pvalue > 0.001
        assert stats.kstest(uniform.ravel() * 0.93, "uniform").pvalue < 0.001
    assert local_draws(run, 2, num_draws=3)["a"].shape == (4, 3, 2)


@pytest.mark.nightly
def test_groups_on_disk(tmp_path, monkeypatch):
    """The draws are those in memory, with the groups of many steps read at once."""
    counts, read = collections.Counter(), RowsOnDisk.read

    def counted(source, numbers):
        counts[np.shape(numbers)] += 1
        return read(source, numbers)

    monkeypatch.setattr(RowsOnDisk, "read", counted)
    np.save(tmp_path / "y.npy", np.asarray(Y))
    found = []
    for y in (Y, RowsOnDisk(tmp_path / "y.npy")):
        view = read_model(intercepts, init_to_uniform, (y,), {})
        anchor = Target(view, (y,), {}).anchor(unremarkable_values(view))
        tuning = Tuning(1e-3, 1.0, IdentityMetric(), anchor=anchor)
        kernel = SGHMC(intercepts, tuning=tuning, init_strategy=init_to_median)
        counts.clear()
        mcmc = run_mcmc(kernel, y, warmup=0, samples=130)
        found.append(mcmc.get_samples() | dict(local_draws(mcmc, [3, 4], num_draws=5)))
    assert all(np.array_equal(found[0][name], found[1][name]) for name in ("mu", "tau", "a"))
    assert len(np.unique(found[0]["mu"])) > 100
    # a few at the beginning, and not one for each step or for each of its integrals
    assert counts[(64, 10)] >= 3 and counts[(10,)] < 30


# --- draws of groups that go to disk


def effects_and_classes(y, batch=10):
    """An effect, a class, and what depends on both."""
    mu, tau = globals_()
    with groups(y, batch) as g:
        k = numpyro.sample("k", dist.Bernoulli(0.3))
        b = numpyro.sample("model/b", dist.Normal(mu, tau).expand([1]).to_event(1))
        a = numpyro.deterministic("a", b[..., 0] + 2.0 * k)
        with numpyro.plate("members", y.shape[1]):
            numpyro.sample("y", dist.Normal(a, 1.0), obs=y[g].T)


@pytest.fixture(scope="module")
def few():
    kernel = CCAdL(effects_and_classes, 0.05, 10.0)
    return run_mcmc(kernel, Y, warmup=5, samples=20, chains=2)


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of 20 groups, and of four draws of each of two chains."""
    local, parts = (
        importlib.import_module(f"numpyro_sgmcmc.results.{name}")
        for name in ("local_draws", "group_draws")
    )
    monkeypatch.setattr(local, "CHUNK", 20)
    monkeypatch.setattr(parts, "CHUNK", 20)
    monkeypatch.setattr(parts, "_CHUNK_VALUES", 2 * 20 * 4 * 3)
    return parts


@pytest.mark.nightly
def test_draws_on_disk(few, small_parts, tmp_path):
    """Those in memory, bit for bit, whatever there is room for."""
    groups = np.arange(50)  # not a multiple of those of a part, as eleven draws are not
    here = local_draws(few, groups, num_draws=11, rng_key=random.key(1))
    folder = tmp_path / "of" / "groups.zarr"
    there = local_draws(
        few, groups, num_draws=11, rng_key=random.key(1), store=folder, max_values=1
    )
    assert not any(x._in_memory for x in (v.variable for v in there.data_vars.values()))
    assert set(there) == {"k", "model.b", "a"} and here["model.b"].shape == (2, 11, 50, 1)
    for found in (there, xr.open_zarr(folder, chunks=None)):
        xr.testing.assert_identical(found.load(), here)
        assert {k: x.dtype for k, x in found.items()} == {k: x.dtype for k, x in here.items()}
    assert len(np.unique(here["a"])) == here["a"].size
    assert os.listdir(tmp_path / "of") == ["groups.zarr"]
    # another key has other draws
    other = local_draws(few, groups, num_draws=11, rng_key=random.key(2))
    assert not (other["a"] == here["a"]).any()


@pytest.mark.nightly
def test_a_part_is_held(few, small_parts, tmp_path, monkeypatch):
    """Of all draws at a time, when they go to disk."""
    most, held, get = 2 * 20 * 4 * 3, [], jax.device_get

    def counted(tree):
        values = jax.tree.map(np.array, get(tree))
        alive[:] = [x for x in alive if x() is not None]
        alive.extend(weakref.ref(x) for x in jax.tree.leaves(values))
        held.append(sum(x().size for x in alive))
        return values

    alive = []
    monkeypatch.setattr(small_parts.jax, "device_get", counted)
    found = local_draws(few, num_draws=20, store=tmp_path / "draws.zarr")
    total = sum(x.size for x in found.values())
    assert len(held) == 3 * 5 and total == 2 * 20 * GROUPS * 3
    # a part, and the one before, which is still in its loop
    assert max(held) <= 2 * most < total / 4


@pytest.mark.nightly
def test_a_store_is_whole_or_not_there(few, small_parts, tmp_path, monkeypatch):
    """Also where the process ends without a word."""
    folder, get, count = tmp_path / "draws.zarr", jax.device_get, itertools.count()

    def interrupted(tree):
        if next(count) == 4:
            raise KeyboardInterrupt
        return get(tree)

    with monkeypatch.context() as here:
        here.setattr(small_parts.jax, "device_get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            local_draws(few, num_draws=20, store=folder)
        assert not os.listdir(tmp_path)
        count = itertools.count()
        here.setattr("shutil.rmtree", lambda *_, **__: None)  # killed before it cleans up
        with pytest.raises(KeyboardInterrupt):
            local_draws(few, num_draws=20, store=folder)
        (left,) = os.listdir(tmp_path)
        assert left.startswith("draws.zarr.unfinished-")
    folder.mkdir()  # an empty one is no obstacle
    assert local_draws(few, num_draws=2, store=folder)["a"].shape == (2, 2, GROUPS)
    assert sorted(os.listdir(tmp_path)) == ["draws.zarr", left]


def test_what_is_there_is_kept(tmp_path):
    file, folder = tmp_path / "file.zarr", tmp_path / "folder.zarr"
    file.write_text("mine")
    folder.mkdir()
    (folder / "mine").touch()
    (link := tmp_path / "link.zarr").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    stores = ((file, "is a file"), (folder, "has files in it"), (link, "is a link"))
    for store, what in stores:
        with pytest.raises(ValueError, match=f"{store} {what}, and is not overwritten"):
            with on_disk(store):
                raise AssertionError("nothing is to be computed")
    assert file.read_text() == "mine" and os.listdir(folder) == ["mine"]


@pytest.mark.slow
def test_too_many_draws_for_memory(few):
    with pytest.raises(
        ValueError, match=r"7,200 values, of 60 groups for 20 .*`store=\"draws.zarr"
    ):
        local_draws(few, max_values=7_199)
    with pytest.raises(ValueError, match=r"`groups` names \['rows'\], but .* 'groups' \(60 rows\)"):
        local_draws(few, groups={"rows": 3})


@ARVIZ
@pytest.mark.slow
def test_results_by_group(run):
    """The likelihood is that of groups; what would be drawn of rows is of new groups."""
    data = to_arviz(run, log_likelihood=True, rows=[3, 30])
    assert data["log_likelihood"]["groups, marginal"].dims == ("chain", "draw", "groups")
    draws = {k: x[:5] for k, x in run.get_samples().items()}
    found = Predictive(full_data(unknown_mean_and_scale), draws)(random.key(0), MANY)
    assert found["a"].shape == (5, N)


@pytest.mark.filterwarnings("ignore:Minibatches do not pay")  # of 20 groups among 60
@pytest.mark.nightly
def test_draws_of_classes():
    """Discrete sites, given the continuous ones."""
    mcmc = sampled(mixture_of_intercepts, Y, samples=300)
    found = local_draws(mcmc, num_draws=300)
    assert found["k"].shape == (4, 300, GROUPS) and set(np.unique(found["k"])) == {0, 1}
    draws = mcmc.get_samples(group_by_chain=True)
    mu, tau = (np.asarray(draws[k], float)[..., None] for k in ("mu", "tau"))
    means, variance = np.asarray(Y.mean(1), float), tau**2 + 1 / ROWS
    parts = {
        (k, j): w / 2 * stats.norm.pdf(means, mu + 3 * k - j, variance**0.5)
        for k, w in ((0, 0.7), (1, 0.3))
        for j in (0, 1)
    }
    total = sum(parts.values())
    for name, p in {
        "k": (parts[1, 0] + parts[1, 1]) / total,
        "j": (parts[0, 1] + parts[1, 1]) / total,
    }.items():
        off = found[name].values.mean((0, 1)) - p.mean((0, 1))
        assert (np.abs(off) < 4.5 * np.sqrt((p * (1 - p)).mean((0, 1)) / 1_200) + 1e-6).all()


# --- what cannot be right


def outside(y, batch=10):
    mu, tau = globals_()
    with groups(y, batch) as g:
        a = numpyro.sample("a", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y[g, 0])
    numpyro.sample("total", dist.Normal(a.sum(), 1.0), obs=0.0)


def crossed(y, batch=10):
    mu, tau = globals_()
    rows = numpyro.plate("groups", len(y), subsample_size=batch, dim=-2)
    columns = numpyro.plate("columns", y.shape[1], subsample_size=2, dim=-1)
    with rows:
        a = numpyro.sample("a", dist.Normal(mu, tau))
    with columns:
        b = numpyro.sample("b", dist.Normal(0, tau))
    with rows as g, columns as h:
        numpyro.sample("y", dist.Normal(a + b, 1.0), obs=y[g[:, None], h])


def within_two(y, batch=10):
    mu, tau = globals_()
    with numpyro.plate("groups", len(y), subsample_size=batch, dim=-2) as g:
        with numpyro.plate("columns", y.shape[1], subsample_size=2) as h:
            a = numpyro.sample("a", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(a, 1.0), obs=y[g[:, None], h])


def too_many(y, batch=10):
    mu, tau = globals_()
    with groups(y, batch) as g:
        a = numpyro.sample("a", dist.Normal(mu, tau).expand([31]).to_event(1))
        numpyro.sample("y", dist.Normal(a.sum(-1), 1.0), obs=y[g, 0])


def endless(y, batch=10):
    mu, tau = globals_()
    with groups(y, batch) as g:
        k = numpyro.sample("k", dist.Poisson(jnp.exp(mu)))
        numpyro.sample("y", dist.Normal(k, tau), obs=y[g, 0])


def classes_of_members(y, batch=10):
    mu, tau = globals_()
    with groups(y, batch) as g, numpyro.plate("members", y.shape[1], dim=-2):
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(mu + k, tau), obs=y[g].T)


def nothing_else(y, batch=10):
    with groups(y, batch) as g:
        a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y[g, 0])


def other_groups(y, batch=10):
    mu, tau = globals_()
    with groups(y, batch) as g:
        a = numpyro.sample("a", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(a - a.mean(), 1.0), obs=y[g, 0])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (outside, "'total' depends on the latent site 'a' .* stands outside"),
        (crossed, "'y' is inside the subsampled plates .* has latent sites"),
        (within_two, "'a' is inside two subsampled plates, 'groups' and 'columns'|'columns' and"),
        (too_many, "has 31 latent variables, and at most 30"),
        (endless, r"'k' in plate 'groups' is discrete \(Poisson\) and has infinitely many values"),
        (classes_of_members, "'k' in plate 'groups' is discrete .* several values in each group"),
        (nothing_else, "All latent sites .* inside of the subsampled plate 'groups'"),
        (other_groups, "a group of plate 'groups' depends on the other groups of the minibatch"),
    ],
)
def test_refused(model, message):
    with pytest.raises(ValueError, match=message):
        CCAdL(model, progress_bar=False).tune(random.key(0), Y)


def bounded(y, batch=10):
    mu, tau = globals_()
    with groups(y, batch) as g:
        a = numpyro.sample("a", dist.LogNormal(mu, tau))
        numpyro.sample("y", dist.Uniform(0, a), obs=y[g, 0])


@pytest.mark.parametrize(
    ("model", "y", "message"),
    [
        (bounded, jnp.abs(Y), r"support of site 'y' depends .* \(a\)"),
        pytest.param(logistic, BINARY.at[7, 2].set(2), r"'y'.*row 7.*", marks=pytest.mark.nightly),
        (intercepts, Y.at[7, 2].set(jnp.nan), r"1 entries that are NaN"),
    ],
)
def test_rows_of_groups_are_looked_at(model, y, message):
    with pytest.raises(ValueError, match=message):
        CCAdL(model, progress_bar=False).tune(random.key(0), y)


def test_nothing_to_draw():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with groups(y, 10) as g:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[g, 0])

    mcmc = run_mcmc(CCAdL(model, 0.1, 1.0), Y, warmup=1, samples=2)
    with pytest.raises(ValueError, match="no latent sites inside of subsampled plates"):
        local_draws(mcmc)


def test_all_groups_in_a_minibatch():
    """Without minibatches they are latent sites like others."""
    view = read_model(lambda y: intercepts(y, GROUPS), init_to_uniform, (Y,), {})
    assert "a" in view.latents and not isinstance(view.model, Marginal)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ([0.0, 1.0], "got dtype float64 and shape"),
        ([[0], [1]], r"shape \(2, 1\)"),
        ([0, 2], "without a gap, but group 1 has no rows"),
        ([0, -1], "without a gap, but some numbers are negative"),
    ],
)
def test_numbers_of_groups(group, message):
    with pytest.raises(ValueError, match=message):
        group_rows(group)


def test_padding_is_told():
    group = np.repeat(np.arange(101), [100] + [1] * 100)
    with pytest.warns(UserWarning, match=r"largest of 101 groups has 100 rows .* 50.5 entries"):
        members, observed = group_rows(group)
    assert members.shape == (101, 100) and observed.sum() == 200
    # the remedy, which is silent
    with pytest.warns(UserWarning, match=r"buckets=2\)` makes 2 tables by size, with 1.0 entries"):
        group_rows(group, buckets=1)
    assert [len(b.groups) for b in group_rows(group, buckets=2)] == [100, 1]


# --- tables by size


def least_entries(sizes, buckets):
    """Of all ways to put the groups, in the order of their size, into so many tables."""
    ordered = np.sort(sizes)
    found = []
    for number in range(buckets):
        for ends in itertools.combinations(range(1, len(sizes)), number):
            parts = np.split(ordered, ends)
            found.append(sum(part.max() * len(part) for part in parts))
    return min(found)


@pytest.mark.parametrize("buckets", [1, 2, 3, 4, 20])
def test_tables_by_size(buckets):
    """Each row once, in the table of its group; no other tables have fewer entries."""
    rng = np.random.default_rng(buckets)
    for _ in range(20):
        sizes = 1 + rng.geometric(0.1, rng.integers(1, 9))
        group = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The largest of .* groups")
            tables = group_rows(group, buckets=buckets)
        assert len(tables) == min(buckets, len(np.unique(sizes)))
        entries = sum(table.members.size for table in tables)
        assert entries == least_entries(sizes, min(buckets, len(sizes)))
        rows = np.concatenate([table.members[table.observed] for table in tables])
        np.testing.assert_array_equal(np.sort(rows), np.arange(len(group)))
        groups = np.concatenate([table.groups for table in tables])
        np.testing.assert_array_equal(np.sort(groups), np.arange(len(sizes)))
        for table in tables:
            # what pads a group is of the group too
            assert (group[table.members] == table.groups[:, None]).all()
            np.testing.assert_array_equal(table.observed.sum(1), sizes[table.groups])


@pytest.mark.parametrize("buckets", [0, -1, 1.5, True, "2", [1]])
def test_numbers_of_tables(buckets):
    with pytest.raises(ValueError, match="`buckets` must be a positive integer"):
        group_rows([0, 1], buckets=buckets)


SIZES = np.random.default_rng(5).permutation(np.repeat([1, 2, 3, 12], [18, 10, 6, 6]))
OF_GROUP = np.random.default_rng(6).permutation(np.repeat(np.arange(40), SIZES))
RAGGED = jnp.asarray(np.random.default_rng(7).standard_normal(len(OF_GROUP)) + OF_GROUP / 20)


def ragged(y, tables, batch=3):
    """Normal rows of groups of several sizes, in as many plates as there are tables."""
    mu, tau = globals_()
    for k, table in enumerate(tables):
        members, observed = table[:2]
        with numpyro.plate(f"groups {k}", len(members), subsample_size=batch) as g:
            a = numpyro.sample(f"a {k}", dist.Normal(mu, tau))
            with numpyro.plate(f"members {k}", members.shape[1]):
                row = members[g].T
                law = dist.Normal(jnp.broadcast_to(a, row.shape), 1.0)
                numpyro.sample(f"y {k}", law.mask(observed[g].T), obs=y[row])


def ragged_marginal(y):
    """Without any table: of each group the law of all its rows."""
    mu, tau = globals_()
    same = OF_GROUP[:, None] == OF_GROUP
    cov = jnp.eye(len(y)) + tau**2 * same
    numpyro.sample("y", dist.MultivariateNormal(mu * jnp.ones(len(y)), cov), obs=y)


@pytest.mark.nightly
@pytest.mark.parametrize("buckets", [1, 2])
def test_the_marginal_of_tables(buckets):
    """However many there are, of all groups it is the same."""
    tables = jax.tree.map(jnp.asarray, group_rows(OF_GROUP, buckets=buckets))
    view = read_model(ragged, init_to_uniform, (RAGGED, tables), {})
    x, unflat = ravel_pytree(unremarkable_values(view))
    rows = {p.name: jnp.arange(p.size) for p in view.plates}
    where = rows, random.key(0), (RAGGED, tables), {}
    found = derivatives(lambda x: view.potential(unflat(x), *where), x)
    expected = derivatives(lambda x: potential_energy(ragged_marginal, (RAGGED,), {}, unflat(x)), x)
    assert max(errors(found, expected)) < 1e-4


@pytest.mark.nightly
def test_draws_of_tables():
    """The effects of both tables, by the numbers of all groups, against their normal law."""
    tables = group_rows(OF_GROUP, buckets=2)
    mcmc = run_mcmc(
        CCAdL(ragged, 0.05, 10.0), RAGGED, jax.tree.map(jnp.asarray, tables), warmup=50, samples=500
    )
    found = local_draws(mcmc, num_draws=500)
    draws = mcmc.get_samples(group_by_chain=True)
    mu, tau = (np.asarray(draws[k], float)[:, found["draw"].values, None] for k in ("mu", "tau"))
    precision = tau**-2 + SIZES
    means = (mu / tau**2 + np.bincount(OF_GROUP, RAGGED)) / precision
    for k, table in enumerate(tables):
        values = found[f"a {k}"].sel({f"groups {k}": np.arange(len(table.groups))})
        z = (values - means[..., table.groups]) * np.sqrt(precision[..., table.groups])
        assert (np.abs(z.mean("draw")) < 4.5 / 500**0.5).all()
        assert (np.abs((z**2).mean("draw") - 1) < 4.5 * (2 / 500) ** 0.5).all()
        # of groups in another order they are not
        other = values - means[..., table.groups[::-1]]
        assert (np.abs(other.mean("draw")) > 0.5).any()
