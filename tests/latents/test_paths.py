# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Paths of latent values in groups, integrated out: banded factors, recognition, and exact laws."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform, init_to_value, log_likelihood
from numpyro.infer.util import potential_energy
import pytest
from runs import run_mcmc, target_of
from scipy.stats import kstest, norm

from numpyro_sgmcmc import CCAdL, full_data, local_draws
from numpyro_sgmcmc.posterior import banded, curvature, local_latents, quadrature
from numpyro_sgmcmc.posterior.banded import banded_cholesky
from numpyro_sgmcmc.posterior.curvature import DENSE, Banded
from numpyro_sgmcmc.posterior.metric import IdentityMetric, from_covariance
from numpyro_sgmcmc.posterior.model import read_model, unremarkable_values
from numpyro_sgmcmc.tuning import quadrature_error
from numpyro_sgmcmc.tuning.gaussian import Gaussian
from numpyro_sgmcmc.tuning.quadrature_error import rule_of_steps, share_of_draws

SERIES, TIMES = 200, 40
RNG = np.random.default_rng(0)
LEVELS = np.cumsum(0.3 * RNG.standard_normal((SERIES, TIMES)), axis=1)
Y = jnp.asarray(LEVELS + 0.5 * RNG.standard_normal((SERIES, TIMES)), jnp.float32)
COUNTS = jnp.asarray(RNG.poisson(np.exp(0.5 + LEVELS)), jnp.float32)


# --- factors of banded matrices


def matrices(width, size=9, number=3, seed=0):
    """Banded positive definite matrices, and their bands."""
    rng = np.random.default_rng(seed)
    lower = np.tril(rng.standard_normal((number, size, size))) + 2 * np.eye(size)
    i, j = np.indices((size, size))
    lower *= i - j <= width
    dense = lower @ lower.swapaxes(1, 2)
    bands = np.zeros((size, width + 1, number))
    for d in range(width + 1):
        bands[: size - d, d] = np.diagonal(dense, -d, 1, 2).T
    return dense, jnp.asarray(bands, jnp.float32)


@pytest.mark.one_case
@pytest.mark.parametrize("width", [0, 1, 2, 5, 8])
def test_factors_of_banded_matrices(width):
    dense, bands = matrices(width)
    factor = banded_cholesky(bands, True)
    inverse = np.linalg.inv(np.linalg.cholesky(dense))
    x = np.random.default_rng(1).standard_normal((4, *dense.shape[:2]))
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
    close(factor.towards(jnp.asarray(x)), np.einsum("nij,snj->sni", inverse, x))
    close(factor.away(jnp.asarray(x)), np.einsum("nji,snj->sni", inverse, x))
    close(factor.log_determinant, -np.linalg.slogdet(dense)[1] / 2)
    covariances = np.linalg.inv(dense)
    for d in range(width + 1):
        found = np.asarray(factor.covariances)[: dense.shape[1] - d, d].T
        close(found, np.diagonal(covariances, -d, 1, 2), atol=1e-3 * np.abs(covariances).max())


def test_pivots_that_are_not_positive():
    bands = jnp.array([1.0, -4.0, 1.0])[:, None, None]
    assert np.isnan(banded_cholesky(bands, True).log_determinant).all()
    np.testing.assert_allclose(banded_cholesky(bands).columns.ravel(), [1, 2, 1])


def log_density(z):
    """Neighbours, second neighbours, and a skewed density of each value."""
    steps = jnp.diff(z, axis=1, prepend=0.0)
    bends = jnp.diff(steps, axis=1)
    return -(steps**2).sum(1) - 0.3 * (bends**2).sum(1) - jnp.exp(z).sum(1) + z.sum(1)


def path(density, z):
    return curvature.path_of(curvature.pattern_of(density, z))


@pytest.mark.nightly
def test_curvatures_equal_the_dense_ones():
    z = random.normal(random.key(0), (3, 12))
    assert path(log_density, z) == (tuple(range(12)), Banded(2))
    forms = [DENSE, Banded(2)]
    compare_forms(log_density, z, forms)


def with_border(z):
    """Two values on which all others depend, in different ways."""
    return log_density(z[:, :-2]) - (jnp.cosh(z[:, :-2] + z[:, -2:-1] - z[:, -1:])).sum(1)


@pytest.mark.nightly
def test_curvatures_with_a_border():
    z = random.normal(random.key(1), (3, 14))
    assert path(with_border, z) == (tuple(range(14)), Banded(2, 2))
    compare_forms(lambda z: with_border(z) - (z[:, -2:] ** 2).sum(1), z, [DENSE, Banded(2, 2)])


def compare_forms(density, z, forms):
    """Products, determinants, the contraction of third derivatives, and complete forms."""
    found = []
    for form in forms:
        factor = form.factor(form.mixed(jnp.full(len(z), 0.3), *2 * [form.at(density, z)]))
        covariance = factor.away(factor.towards(z))
        third = jax.grad(lambda x, form=form, factor=factor: form.expected(density, x, factor))(z)
        draws = jnp.stack([z, 2 * z])
        for move in (factor.away, factor.towards):
            np.testing.assert_allclose(move(draws)[0], move(z), rtol=1e-5, atol=1e-6)
        found.append((covariance, factor.log_determinant, third))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3 * np.abs(one).max())
    form = forms[-1]
    assert form.is_complete(density, z).all()
    assert not form.is_complete(lambda z: density(z) - z[:, 0] * z[:, 5], z).any()


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["step", "check"])
def test_integrals_equal_the_dense_ones(rule):
    """With the same draws they differ by the order of the values in them, and by their noise."""
    start, keys = jnp.zeros((400, 12)), random.split(random.key(0), 400)
    found = {
        form: quadrature.log_integral(
            log_density, log_density, lambda z: -(z**2).sum(1), start, keys, rule, form
        )
        for form in (DENSE, Banded(2))
    }
    means = [float(x.mean()) for x in found.values()]
    error = max(float(x.std()) for x in found.values()) / 20
    assert abs(means[0] - means[1]) < 4 * error * 2**0.5
    assert error < 0.005


# --- what is recognised


def walk(tau, times):
    return numpyro.sample("x", dist.GaussianRandomWalk(tau, num_steps=times))


def with_slope(tau, times):
    """A level whose slope moves, by a state of two numbers."""
    moves = jnp.array([[1.0, 1.0], [0.0, 1.0]])
    state = dist.GaussianStateSpace(times, moves, scale_tril=jnp.diag(jnp.array([1.0, 0.2])) * tau)
    return numpyro.sample("x", state)[..., 0]


def two_walks(tau, times):
    return walk(tau, times) + numpyro.sample("z", dist.GaussianRandomWalk(0.1, num_steps=times))


def one_by_one(tau, times):
    """An autoregression of order two, value by value."""
    x = [jnp.zeros(()), jnp.zeros(())]
    for t in range(times):
        mean = 0.5 * x[-1] + 0.2 * x[-2]
        x.append(numpyro.sample(f"x{t}", dist.Normal(mean, tau)))
    return jnp.stack(x[2:], axis=-1)


def with_mean(tau, times):
    """A walk around a level of its own, which depends on all values."""
    level = numpyro.sample("level", dist.Normal(0, 1))
    return level[..., None] + walk(tau, times)


def sums(tau, times):
    z = numpyro.sample("z", dist.Normal(jnp.zeros(times), 1).to_event(1))
    return tau * jnp.cumsum(z, axis=-1)


def model_of(path, times=TIMES, rows="normal"):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1)) if rows == "normal" else 1.0
        with numpyro.plate("series", len(y), subsample_size=20) as i:
            x = mu + path(tau, times)
            law = dist.Poisson(jnp.exp(x)) if rows == "counts" else dist.Normal(x, sigma)
            numpyro.sample("y", law.to_event(1), obs=y[i, :times])

    return model


def plate_of(model, *data):
    (plate,) = read_model(model, init_to_uniform, data, {}).model.plates
    return plate


@pytest.fixture
def short(monkeypatch):
    """Paths of more than eight values, whose programs compile sooner than those of long ones."""
    monkeypatch.setattr(local_latents, "MOST_DIMENSIONS", 8)


def with_few_rows(tau, times):
    """An intercept of which less than half of the values tell."""
    level = numpyro.sample("level", dist.Normal(0, 1))
    return walk(tau, times) + level[..., None] * (jnp.arange(times) < 0.4 * times)


PATHS = {
    "walk": (walk, 20, 1, 0),
    "state": (with_slope, 15, 2, 0),
    "two walks": (two_walks, 15, 2, 0),
    "one by one": (one_by_one, 12, 2, 0),
    "with a mean": (with_mean, 20, 1, 1),
    "few rows": (with_few_rows, 20, 1, 1),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PATHS)
def test_what_is_recognised(name, short):
    path, times, width, border = PATHS[name]
    plate = plate_of(model_of(path, times), Y)
    assert plate.path is not None and plate.path.form == Banded(width, border)
    assert plate.normal and plate.points("step") == 2 + 2 * width + border


@pytest.mark.nightly
def test_long_paths_are_recognised():
    plate = plate_of(model_of(walk, TIMES, "counts"), COUNTS)
    assert plate.path.form == Banded(1) and not plate.normal
    # without a path up to 30 values may all depend on each other
    assert plate_of(model_of(walk, 30), Y).path is None


@pytest.mark.parametrize(
    ("path", "times", "message"),
    [
        (sums, 40, "'series' has 40 latent variables.*not as the `cumsum` of innovations"),
        (walk, 1_001, "1001 latent variables, and at most 30.*or 1,000 of a path"),
    ],
)
def test_what_is_refused(path, times, message):
    y = jnp.zeros((SERIES, times))
    with pytest.raises(ValueError, match=message):
        plate_of(model_of(path, times), y)


def autoregression(phi, x):
    before = jnp.concatenate([jnp.zeros_like(x[..., :1]), x[..., :-1]], axis=-1)
    numpyro.factor("steps", dist.Normal(phi * before, 0.5).log_prob(x).sum(-1))


def real(times=TIMES):
    return numpyro.sample("x", dist.ImproperUniform(dist.constraints.real_vector, (), (times,)))


def test_initial_values_may_be_special():
    """With a coefficient of zero the values do not depend on each other."""

    def model(y):
        phi = numpyro.sample("phi", dist.Uniform(-1, 1))
        with numpyro.plate("series", len(y), subsample_size=20) as i:
            x = real()
            autoregression(phi, x)
            numpyro.sample("y", dist.Normal(x, 0.5).to_event(1), obs=y[i])

    start = init_to_value(values={"phi": 0.0})
    (plate,) = read_model(model, start, (Y,), {}).model.plates
    assert plate.path.form == Banded(1)


@pytest.mark.nightly
def test_classes_may_have_other_paths():
    def model(y):
        phi = numpyro.sample("phi", dist.Uniform(-1, 1))
        with numpyro.plate("series", len(y), subsample_size=20) as i:
            moves = numpyro.sample("moves", dist.Bernoulli(0.5))
            x = real()
            autoregression((moves * phi)[..., None], x)
            numpyro.sample("y", dist.Normal(x, 0.5).to_event(1), obs=y[i])

    assert plate_of(model, Y).path.form == Banded(1)


def neighbours(y, before):
    """A walk from the values with given numbers, one of which is known almost exactly."""
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("series", len(y), subsample_size=20) as i:
        x = real()
        there = jnp.take_along_axis(x, before[i], axis=-1)
        numpyro.factor("first", dist.Normal(0, 1e-3).log_prob(x[..., 0]))
        numpyro.factor("steps", dist.Normal(there, tau).log_prob(x)[..., 1:].sum(-1))
        numpyro.sample("y", dist.Normal(x, 0.5).to_event(1), obs=y[i])


@pytest.mark.one_case
@pytest.mark.parametrize(("groups", "value"), [(1, 3), (180, 3), (1, 19), (60, 24), (1, None)])
def test_groups_whose_paths_have_other_neighbours(groups, value):
    """Those of the first groups would give them wrong integrals."""
    before = np.tile(np.arange(-1, TIMES - 1), (SERIES, 1))
    before[:, 0] = 0
    if value is not None:
        before[-groups:, 30] = value
    kernel = CCAdL(neighbours, step_size=0.01, friction=10.0)
    data = Y, jnp.asarray(before)
    if value is None:
        kernel.init(random.key(0), 0, None, data, {})
        return
    with pytest.raises(ValueError, match=f"'series', {groups} in all, .* first 8 groups"):
        kernel.init(random.key(0), 0, None, data, {})


# --- exact integrals


def marginal(y):
    """The local level with normal rows: the rows of a series are jointly normal."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    times = jnp.arange(1, TIMES + 1)
    covariance = tau**2 * jnp.minimum(times, times[:, None]) + sigma**2 * jnp.eye(TIMES)
    numpyro.sample("y", dist.MultivariateNormal(mu * jnp.ones(TIMES), covariance), obs=y)


@pytest.mark.nightly
@pytest.mark.parametrize("name", PATHS)
def test_integrals_are_those_of_dense_curvatures(name, monkeypatch):
    path, times, *_ = PATHS[name]
    found = []
    for most in (30, 8):
        monkeypatch.setattr(local_latents, "MOST_DIMENSIONS", most)
        target = target_of(model_of(path, times), Y)
        assert (target.model.model.plates[0].path is None) == (most == 30)
        values, rows = unremarkable_values(target.model), {"series": jnp.arange(SERIES)}
        energy = jax.value_and_grad(target.potential(IdentityMetric()))
        found.append(jax.jit(energy)(values, rows, random.key(0)))
    (one, slope), (other, other_slope) = found
    np.testing.assert_allclose(one, other, rtol=1e-4)
    for k in slope:
        np.testing.assert_allclose(slope[k], other_slope[k], rtol=1e-3, atol=1e-3 * abs(one))


def in_a_scan(y, law=dist.Normal):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    series = numpyro.plate("series", len(y), subsample_size=20)
    with series as i:
        seen = y[i, :12].T

    def step(x, row):
        with series:
            x = numpyro.sample("x", law(x, tau))
            numpyro.sample("y", dist.Normal(mu + x, sigma), obs=row)
        return x, None

    scan(step, jnp.zeros(seen.shape[1]), seen)


@pytest.mark.nightly
def test_values_in_a_scan(short):
    models = in_a_scan, model_of(walk, 12)
    targets = [target_of(model, Y) for model in models]
    values, rows = unremarkable_values(targets[0].model), {"series": jnp.arange(SERIES)}
    found = [
        jax.jit(jax.value_and_grad(target.potential(IdentityMetric())))(values, rows, random.key(0))
        for target in targets
    ]
    (plate,) = targets[0].model.model.plates
    assert plate.path.form == Banded(1) and plate.normal
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3), *found)
    with pytest.raises(ValueError, match="'x' of the subsampled plate 'series' is in a `scan`"):
        plate_of(partial(in_a_scan, law=lambda x, tau: dist.LogNormal(x, tau)), Y)


@pytest.mark.nightly
@pytest.mark.parametrize("tau", [-5.0, -1.0, 1.0])
def test_normal_paths_are_integrated_exactly(tau):
    """Potential and its first two derivatives."""
    target = target_of(model_of(walk), Y)
    rows = {"series": jnp.arange(SERIES)}
    x = jnp.array([0.3, -0.5, tau])

    def found(x):
        return target.potential(IdentityMetric())(target.unravel(x), rows, random.key(0))

    def expected(x):
        return potential_energy(marginal, (Y,), {}, target.unravel(x))

    for derivative in (lambda f: f, jax.grad, jax.hessian):
        one, other = (np.asarray(jax.jit(derivative(f))(x)) for f in (found, expected))
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3 * np.abs(other).max())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("law", "expected"),
    [(dist.Normal, True), (dist.Laplace, False), (partial(dist.StudentT, 3.0), False)],
)
def test_whether_draws_count(law, expected):
    """Eight draws are enough, but not of steps with kinks or heavy tails."""

    def model(y):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("series", len(y), subsample_size=20) as i:
            x = real()
            before = jnp.concatenate([jnp.zeros_like(x[..., :1]), x[..., :-1]], axis=-1)
            numpyro.factor("steps", law(before, tau).log_prob(x).sum(-1))
            numpyro.sample("y", dist.Poisson(jnp.exp(0.5 + x)).to_event(1), obs=y[i])

    center = np.log([0.3])
    gaussian = Gaussian(from_covariance(1e-4 * np.eye(1), center, jnp.float32), 0.0)
    target = target_of(model, COUNTS)
    assert (share_of_draws(target, gaussian) > quadrature_error._FEWEST) == expected
    rule, error, _ = rule_of_steps(target, random.key(0), gaussian, True)
    assert rule == ("few" if expected else "step")
    assert error < 0.02 if expected else error >= 1


def rotated(y):
    """Rows times the eigenvectors of the covariances of a walk, these covariances, and times 1."""
    times = np.arange(1, TIMES + 1)
    variances, vectors = np.linalg.eigh(np.minimum.outer(times, times).astype(float))
    return np.asarray(y, float) @ vectors, variances, vectors.sum(0)


def exact_moments():
    """Means and standard deviations of mu, tau and sigma, on a grid, with mu integrated out."""
    y, variances, ones = rotated(Y)
    tau, sigma = np.meshgrid(np.linspace(0.24, 0.36, 121), np.linspace(0.44, 0.56, 121))
    v = tau[..., None] ** 2 * variances + sigma[..., None] ** 2
    precision = 1 / 4 + SERIES * (ones**2 / v).sum(-1)
    mean = (ones * y.sum(0) / v).sum(-1) / precision
    log_p = -SERIES / 2 * np.log(v).sum(-1) - ((y**2).sum(0) / v).sum(-1) / 2
    log_p += precision * mean**2 / 2 - np.log(precision) / 2 - (tau**2 + sigma**2) / 2
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    first = [(p * x).sum() for x in (mean, tau, sigma)]
    second = [(p * x).sum() for x in (mean**2 + 1 / precision, tau**2, sigma**2)]
    return np.array(first), np.sqrt(np.array(second) - np.square(first))


@pytest.fixture(scope="module")
def run():
    kernel = CCAdL(model_of(walk), progress_bar=False)
    return run_mcmc(kernel, Y, warmup=300, samples=2_000, chains=4)


def defects(run):
    found = run.get_samples(group_by_chain=True)
    draws = np.stack([np.asarray(found[k], float) for k in ("mu", "tau", "sigma")], axis=-1)
    mean, sd = exact_moments()
    size = effective_sample_size(draws)
    return (draws.mean((0, 1)) - mean) / (sd / size**0.5), draws.std((0, 1)) / sd, size


@pytest.mark.nightly
def test_law_of_a_local_level(run):
    error, ratio, size = defects(run)
    assert size.min() > 1_000
    assert np.abs(error).max() < 4 and (np.abs(ratio - 1) < 4 / (2 * size) ** 0.5).all()


def with_mask(y, seen):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("series", len(y), subsample_size=20) as i:
        level = numpyro.sample("level", dist.GaussianRandomWalk(tau, num_steps=y.shape[1]))
        rows = dist.Normal(mu + level, 0.5).mask(seen[i]).to_event(1)
        numpyro.sample("y", rows, obs=y[i])


def log_predictive_density(mu, tau, y):
    """The log density of the last value of each series given those before, by a Kalman filter."""
    mean, variance, terms = 0.0, 0.0, 0.0
    for row in (y - mu).T:
        variance = variance + tau**2
        terms = norm.logpdf(row, mean, np.sqrt(variance + 0.25))
        gain = variance / (variance + 0.25)
        mean, variance = mean + gain * (row - mean), variance * (1 - gain)
    return terms


@pytest.mark.slow
def test_one_step_ahead():
    """Differences of log densities are one-step-ahead scores; those of another time are not."""
    seen = np.ones((SERIES, TIMES), bool)
    kernel = CCAdL(with_mask, step_size=0.01, friction=10.0)
    mcmc = run_mcmc(kernel, Y, jnp.asarray(seen), warmup=0, samples=5)
    draws, times = mcmc.get_samples(), np.arange(TIMES)

    def until(t):
        rows = jnp.asarray(seen & (times < t))
        return log_likelihood(mcmc.sampler.model, draws, Y, rows)["series, marginal"]

    expected = [
        log_predictive_density(mu, tau, np.asarray(Y[:, :20]))
        for mu, tau in zip(np.asarray(draws["mu"]), np.asarray(draws["tau"]), strict=True)
    ]
    np.testing.assert_allclose(until(20) - until(19), expected, rtol=1e-3, atol=1e-3)
    assert np.abs(until(21) - until(20) - np.array(expected)).max() > 0.1


@pytest.mark.nightly
def test_log_likelihood_of_counts(monkeypatch):
    """Integrals by 32 draws, of a model that has no key, against those by 1,024."""
    model = read_model(model_of(walk, TIMES, "counts"), init_to_uniform, (COUNTS,), {}).model
    draws = {"mu": jnp.array([0.5, 0.5, 0.5]), "tau": jnp.array([0.3, 0.3, 0.4])}

    def found():
        return log_likelihood(full_data(model), draws, COUNTS)["series, marginal"]

    one, same, other = np.asarray(found())
    np.testing.assert_array_equal(one, same)
    monkeypatch.setattr(quadrature, "_DRAWS", 1_024)
    exact = np.asarray(found()[0])

    def errors(values):
        return (values - exact).mean() / (values - exact).std() * len(exact) ** 0.5

    assert (one - exact).std() < 0.1 and abs(errors(one)) < 4 < abs(errors(other))


@pytest.mark.slow
def test_draws_of_normal_paths(run):
    """Given the other sites the levels of a series are jointly normal."""
    found = local_draws(run, [3], num_draws=500, rng_key=random.key(5))["x"]
    globals_ = run.get_samples(group_by_chain=True)
    taken = np.asarray(found.coords["draw"])
    mu, tau, sigma = (np.asarray(globals_[k])[:, taken] for k in ("mu", "tau", "sigma"))
    y, variances, ones = rotated(Y[3:4])
    tau, sigma, mu = (x[..., None] for x in (tau, sigma, mu))
    variance = 1 / (1 / (tau**2 * variances) + 1 / sigma**2)
    mean = variance * (y[0] - mu * ones) / sigma**2
    vectors = rotated(np.eye(TIMES))[0]
    units = (found.values[:, :, 0] @ vectors - mean) / variance**0.5
    for k in (0, 10, TIMES - 1):
        assert kstest(units[..., k].ravel(), norm.cdf).pvalue > 1e-3


@pytest.mark.nightly
def test_a_wrong_determinant_has_another_law(monkeypatch):
    right = banded.BandedFactor.log_determinant
    wrong = property(lambda factor: 0.9 * right.fget(factor))
    monkeypatch.setattr(banded.BandedFactor, "log_determinant", wrong)
    kernel = CCAdL(model_of(walk), progress_bar=False)
    error, _, _ = defects(run_mcmc(kernel, Y, warmup=300, samples=1_000, chains=2))
    assert np.abs(error).max() > 10


@pytest.mark.nightly
def test_draws_of_paths_of_counts():
    """Those of one series, given all else, against importance weights of many draws."""
    mu, tau, y = 0.5, 0.3, COUNTS[:1]

    def latent(z):
        return dist.GaussianRandomWalk(tau, num_steps=TIMES).log_prob(z)

    def density(z):
        return latent(z) + dist.Poisson(jnp.exp(mu + z)).log_prob(y).sum(1)

    start, form = jnp.zeros((1, TIMES)), Banded(1)
    number = 2_000
    one = jax.jit(lambda key: quadrature.draws_of(density, latent, start, key, form)[0])
    draws = np.asarray(jax.lax.map(one, random.split(random.key(0), number)))
    mode, factor = quadrature.find_modes(density, start, form)
    x = random.normal(random.key(1), (100_000, 1, TIMES))
    z = mode + factor.away(1.1 * x)
    log_weights = jax.vmap(density)(z)[:, 0] + 0.5 * jnp.sum(x**2, (1, 2))
    weights = np.asarray(jax.nn.softmax(log_weights), float)
    z, size = np.asarray(z[:, 0], float), 1 / np.sum(weights**2)
    assert size > 5_000
    for t in (0, 15, TIMES - 1):
        order = np.argsort(z[:, t])
        cdf = np.cumsum(weights[order])
        values = np.interp(draws[:, t], z[order, t], cdf)
        assert kstest(values, "uniform").pvalue > 1e-3
        wrong = np.interp(draws[:, t] + 0.3 * draws[:, t].std(), z[order, t], cdf)
        assert kstest(wrong, "uniform").pvalue < 1e-3
