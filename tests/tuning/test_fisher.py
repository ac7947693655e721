# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The Fisher information in the place of Hessians: right models, wrong models, and the cost."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform
import pytest

from numpyro_sgmcmc import CCAdL
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.potential import hessian_of, ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning import center, gaussian
from numpyro_sgmcmc.tuning.center import search_center
from numpyro_sgmcmc.tuning.find_reparam import non_centred
from numpyro_sgmcmc.tuning.fisher import whitened_fisher
from numpyro_sgmcmc.tuning.gauss_newton import has_distributions, uses_gauss_newton, whitened_prior
from numpyro_sgmcmc.tuning.gauss_newton_check import Comparison
from numpyro_sgmcmc.tuning.gaussian import find_metric
from numpyro_sgmcmc.tuning.hessians import looks_rough

COMPILE_QUICKLY = True

N, D = 20_000, 20
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, D)).astype(np.float32)
RATES = np.exp(0.3 * X[:, 0])
#: Counts of the model; counts that vary more than it says, along one direction most; and counts
#: that vary so much more that the two matrices have little in common.
RIGHT = RNG.poisson(RATES).astype(np.float32)
SIGNS = RNG.choice([-1, 1], N)
WIDER = RNG.poisson(3 * RATES * (1 + 0.9 * SIGNS * np.minimum(1, np.abs(X[:, 1]))))
WIDER = WIDER.astype(np.float32)
WILD = RNG.poisson(RATES * np.exp(0.6 * RNG.standard_normal(N) * (1 + np.abs(X[:, 1]))))
WILD = WILD.astype(np.float32)


def counts(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=200) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(level + x[i] @ w)), obs=y[i])


def factors(x, y):
    """The same as :func:`counts`, without a distribution of the rows."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=200) as i:
        numpyro.factor("y", dist.Poisson(jnp.exp(level + x[i] @ w)).log_prob(y[i]))


def target_of(y, model=factors):
    data = jnp.asarray(X), jnp.asarray(y)
    return Target(read_model(model, init_to_uniform, data, {}), data, {})


def tuned(target):
    start = search_center(target, random.key(0), init_to_uniform)
    return find_metric(target, random.key(1), start)


def spectrum(target, found):
    """Eigenvalues of the mean Hessian of all rows in the coordinates of the metric."""
    rows = {"rows": jnp.arange(N)}
    metric, draws = found.metric, random.normal(random.key(7), (4, D + 1))

    def at(zeta):
        values = target.unravel(metric.values(zeta))
        potential = target.potential(gaussian.IdentityMetric())
        return hessian_of(potential, values, rows, random.key(0))

    hessian = np.mean([at(s * z) for z in draws for s in (1, -1)], axis=0)
    factor = np.asarray(metric.factor)
    return np.linalg.eigvalsh(factor.T @ hessian @ factor)


@pytest.mark.nightly
def test_of_a_right_model_it_is_the_hessian():
    """The information of all rows, of which each stands for itself, and the prior's precision."""
    target = target_of(RIGHT)
    values = {"level": jnp.zeros(()), "w": jnp.asarray([0.3] + [0.0] * (D - 1))}
    point, rows, unit = ravel(values), {"rows": jnp.arange(N)}, jnp.eye(D + 1)
    at = *target.model.plates, unit, point, rows, random.key(0)
    fisher = np.asarray(whitened_fisher(target, *at))
    nothing = jnp.zeros(D + 1)  # there are no coordinates that a gradient could curve
    prior = np.asarray(whitened_prior(target, unit, point, nothing, random.key(0)))
    scores = (RIGHT - RATES)[:, None] * np.column_stack([np.ones(N), X])
    scores -= scores.mean(0)
    np.testing.assert_allclose(fisher, scores.T @ scores, rtol=1e-3, atol=N * 2e-4)
    np.testing.assert_allclose(prior, np.eye(D + 1), atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "y",
    [RIGHT, WIDER, pytest.param(WILD, marks=pytest.mark.slow)],
    ids=["right", "wrong", "wild"],
)
@pytest.mark.parametrize("model", [counts, factors])
def test_metric_of_right_and_wrong_models(model, y):
    target = target_of(y, model)
    assert uses_gauss_newton(target)
    assert has_distributions(target, *target.model.plates) == (model is counts)
    found = tuned(target)
    e = spectrum(target, found)
    assert found.converged and e[0] > 0.5 and e[-1] < 2
    assert np.exp(np.log(e).mean()) == pytest.approx(1, abs=0.1)


@pytest.mark.nightly
def test_a_wrong_model_is_noticed(monkeypatch):
    """Without the products with the Hessian the metric would be that of the scores."""
    target = target_of(WIDER)
    alike = Comparison(1.0, np.zeros(0), np.zeros((0, D + 1)), 0.0)
    monkeypatch.setattr(gaussian, "compare", lambda *_: alike)
    e = spectrum(target, tuned(target))
    assert np.exp(np.log(e).mean()) < 0.7


@pytest.mark.nightly
def test_a_direction_with_twice_the_hessian_is_mended():
    """A mean whose rows vary twice as much as the model says; all have the same posterior sd."""
    column = jnp.arange(N) % D
    y = RNG.standard_normal(N) * np.where(column == 0, 2**0.5, 1)

    def model(y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with numpyro.plate("rows", N, subsample_size=200) as i:
            numpyro.factor("y", dist.Normal(w[column[i]], 1).log_prob(y[i]))

    data = (jnp.asarray(y, jnp.float32),)
    found = tuned(Target(read_model(model, init_to_uniform, data, {}), data, {}))
    assert found.is_gauss_newton
    sd = np.linalg.norm(np.asarray(found.metric.factor), axis=1)
    # 800 rows are compared, 40 of them with this mean: a standard error of 0.11 of its logarithm
    np.testing.assert_allclose(np.log(sd * (N / D + 1) ** 0.5), 0, atol=0.25)


def effects(group, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    x = numpyro.sample("x", dist.Normal(mu, tau).expand([GROUPS]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=500) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[group[i]]), obs=y[i])


GROUPS = 60


def target_of_effects():
    """Groups of 1 to 2,000 rows, in non-centred coordinates."""
    rng = np.random.default_rng(1)
    sizes = np.geomspace(1, 2_000, GROUPS).astype(int)
    group = np.repeat(np.arange(GROUPS), sizes)
    logits = (-1 + 0.5 * rng.standard_normal(GROUPS))[group]
    y = (rng.random(len(group)) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    data = jnp.asarray(group), jnp.asarray(y)
    target = Target(read_model(effects, init_to_uniform, data, {}), data, {})
    return non_centred(target), len(y)


@pytest.mark.nightly
def test_the_curvature_of_coordinates_is_exact():
    """With the rows' own curvature it adds up to the Hessian; the prior's alone does not."""
    target, number = target_of_effects()
    values = {"mu": jnp.array(-1.0), "tau": jnp.log(0.5), "x": jnp.linspace(-1, 1, GROUPS)}
    point, unit, rows = ravel(values), jnp.eye(GROUPS + 2), {"rows": jnp.arange(number)}
    potential = target.potential(gaussian.IdentityMetric())
    hessian = np.asarray(hessian_of(potential, values, rows, random.key(0)))
    gradient = ravel(jax.grad(potential)(values, rows, random.key(0)))
    rest = np.asarray(whitened_prior(target, unit, point, gradient, random.key(0)))

    # the rows' own, by hand: groups with sums of p (1 - p), and the derivative of their effects
    p = 1 / (1 + np.exp(-(-1.0 + 0.5 * np.asarray(values["x"]))))
    counts = np.bincount(np.asarray(target.args[0]), minlength=GROUPS)
    into = jax.jacobian(lambda x: target.written(target.unravel(x)).effects["x"])(point)
    own = np.asarray(into).T @ np.diag(counts * p * (1 - p)) @ np.asarray(into)
    scale = np.abs(hessian).max()
    np.testing.assert_allclose(rest + own, hessian, atol=1e-5 * scale)
    straight = target._replace(centring={})
    prior = np.asarray(whitened_prior(straight, unit, point, gradient, random.key(0)))
    assert np.abs(prior + own - hessian).max() > 1e-2 * scale


@pytest.mark.nightly
def test_effects_that_few_rows_know(monkeypatch):
    """Gauss-Newton steps end at the metric of Newton steps, for a fifth of the passes."""
    target, _ = target_of_effects()
    found = tuned(target)
    assert found.converged and found.is_gauss_newton
    monkeypatch.setattr(center, "uses_gauss_newton", lambda _: False)
    hessians = tuned(target)
    assert hessians.converged and not hessians.is_gauss_newton
    assert found.passes < hessians.passes / 5
    away = np.linalg.solve(hessians.metric.factor, found.metric.center - hessians.metric.center)
    assert np.abs(away).max() < 0.5
    between = np.linalg.solve(hessians.metric.factor, found.metric.factor)
    sizes = np.linalg.svd(between, compute_uv=False)
    assert 0.7 < sizes[-1] and sizes[0] < 1.4


def test_indefinite_is_not_rough():
    """Far from the mode of heavy tails the trace of the Hessian is negative, and not near zero."""
    draws = jnp.concatenate([jnp.eye(4), -jnp.eye(4)])
    slopes = 10 * draws
    assert looks_rough(draws, slopes, jnp.zeros((4, 4)))
    assert not looks_rough(draws, slopes, jnp.diag(jnp.array([2.0, 2.0, 2.0, -300.0])))


@pytest.mark.nightly
def test_heavy_tails_keep_to_gauss_newton_steps():
    def heavy(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(2))
        nu = numpyro.sample("nu", dist.Gamma(2, 0.1))
        with numpyro.plate("rows", len(y), subsample_size=200) as i:
            numpyro.sample("y", dist.StudentT(nu, x[i] @ w, scale), obs=y[i])

    y = X[:, 0] + RNG.standard_t(4, N).astype(np.float32)
    found = tuned(target_of(y, heavy))
    assert found.converged and found.is_gauss_newton and not found.is_rough
    assert found.passes < 60


@pytest.mark.nightly
def test_passes_do_not_grow_with_the_parameters():
    def logistic(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=200) as i:
            numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])

    passes = []
    for size in (20, 60):
        x = jax.random.normal(random.key(size), (N, size))
        y = (random.uniform(random.key(1), (N,)) < jax.nn.sigmoid(x[:, 0])).astype(jnp.float32)
        tuning = CCAdL(logistic, progress_bar=False).tune(random.key(0), x, y)
        passes.append(tuning.passes["centre"] + tuning.passes["metric"])
    assert passes[1] < 1.5 * passes[0] < 60
