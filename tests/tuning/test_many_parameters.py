# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The centre and the metric of more parameters than a matrix is made for."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform
import pytest
from runs import target_of

from numpyro_sgmcmc import NoiseEstimate
from numpyro_sgmcmc.posterior.coordinates import centred
from numpyro_sgmcmc.posterior.metric import DiagonalMetric, LowRankMetric
from numpyro_sgmcmc.stein import start_sums
from numpyro_sgmcmc.tuning import low_rank, variational
from numpyro_sgmcmc.tuning.find_reparam import find_centring, non_centred
from numpyro_sgmcmc.tuning.gaussian import Gaussian
from numpyro_sgmcmc.tuning.low_rank import find_low_rank
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel, noise_with
from numpyro_sgmcmc.tuning.pilot import run_pilot
from numpyro_sgmcmc.tuning.pilot_rhat import Halves, PilotRun, beyond_chance, r_hats
from numpyro_sgmcmc.tuning.tuning import Tuning
from numpyro_sgmcmc.tuning.variational import find_center

GROUPS, EACH, TAU = 300, 20, 0.5


def effects(group, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    a = numpyro.sample("a", dist.Normal(0, tau).expand([GROUPS]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=200) as i:
        numpyro.sample("y", dist.Normal(a[group[i]], 1), obs=y[i])


@pytest.fixture(scope="module")
def searched():
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(GROUPS), EACH)
    truth = TAU * rng.standard_normal(GROUPS)
    y = jnp.asarray(truth[group] + rng.standard_normal(len(group)), jnp.float32)
    target = non_centred(target_of(effects, jnp.asarray(group), y))
    target = target._replace(centring=centred(target.centring))
    return target, find_center(target, random.key(0), init_to_uniform), y


@pytest.mark.slow
def test_the_scale_of_a_hierarchy(searched):
    """The marginal posterior of the scale is known to 6 %, and its mode is near the truth."""
    target, found, y = searched
    written = target.written(target.unravel(found.metric.center))
    means = np.asarray(y).reshape(GROUPS, EACH).mean(1)
    expected = np.sqrt(max(means.var() - 1 / EACH, 0))
    assert abs(float(written.values["tau"]) - np.log(expected)) < 0.2
    assert not found.multimodal


def test_conditional_standard_deviations(searched):
    target, found, _ = searched
    tau = float(jnp.exp(target.written(target.unravel(found.metric.center)).values["tau"]))
    scales = np.asarray(target.unravel(found.metric.scale)["a"])
    # 8 products with random signs: errors from what other parameters add
    assert np.allclose(scales, (EACH + tau**-2) ** -0.5, rtol=0.15)


def test_coordinates_of_the_centre(searched):
    """The same effects in all coordinates, which the search moves through."""
    target, found, y = searched
    there, moved = find_centring(target, found)
    degree = np.asarray(there.centring["a"].degree)
    assert np.all(degree > 0.6)  # 20 rows of variance 1, and effects of variance 1 / 4
    a = there.written(there.unravel(moved.metric.center)).effects["a"]
    means = np.asarray(y).reshape(GROUPS, EACH).mean(1)
    shrunk = means * EACH / (EACH + TAU**-2)
    # minibatches: their noise of half a standard deviation at most
    assert np.sqrt(np.mean((a - shrunk) ** 2)) < 0.5 * (EACH + TAU**-2) ** -0.5


@pytest.mark.nightly
@pytest.mark.parametrize("is_controlled", [True, False])
def test_noise_of_many_effects_does_not_widen_their_scale(monkeypatch, is_controlled):
    """0.25 % of the rows in a minibatch. Plain minibatches make the scale far too large."""
    groups, each = 1_000, 80
    monkeypatch.setattr(variational, "_is_controlled", lambda target: is_controlled)
    monkeypatch.setattr(variational, "_STARTS", 1)
    rng, group = np.random.default_rng(0), np.repeat(np.arange(groups), each)
    logits = TAU * rng.standard_normal(groups)[group] - 2
    y = jnp.asarray(rng.random(len(group)) < 1 / (1 + np.exp(-logits)), jnp.float32)

    def model(group, y):
        level = numpyro.sample("level", dist.Normal(0, 3))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("groups", groups):
            a = numpyro.sample("a", dist.Normal(0, tau))
        with numpyro.plate("rows", len(y), subsample_size=200) as i:
            numpyro.sample("y", dist.Bernoulli(logits=level + a[group[i]]), obs=y[i])

    target = non_centred(target_of(model, jnp.asarray(group), y))
    target = target._replace(centring=centred(target.centring))
    found = find_center(target, random.key(0), init_to_uniform)
    log_tau = float(target.written(target.unravel(found.metric.center)).values["tau"])
    # the posterior knows the logarithm of the scale to 0.04
    assert (abs(log_tau - np.log(TAU)) < 0.2) == is_controlled


def test_random_errors_of_the_diagonal_are_shrunk():
    """Neighbours that are correlated, one entry that all others disturb, and three narrow ones."""
    size, others = 600, np.arange(3, 599)
    hessian = np.eye(size) + 0.4 * (np.eye(size, k=1) + np.eye(size, k=-1))
    hessian[-1, :-1] = hessian[:-1, -1] = 0.1
    hessian[:3] *= 50**0.5
    hessian[:, :3] *= 50**0.5
    hessian = jnp.asarray(hessian, jnp.float32)

    def quadratic():
        x = numpyro.sample("x", dist.Normal(0, 1e4).expand([size]).to_event(1))
        numpyro.factor("quadratic", -x @ hessian @ x / 2)

    metric = DiagonalMetric(jnp.zeros(size), jnp.ones(size))
    for seed in range(3):
        key = random.key(seed)
        found = np.asarray(variational._curvatures(target_of(quadratic), metric, key))
        assert np.abs(found[others] - 1).max() < 0.4 and np.abs(found[:3] / 50 - 1).max() < 0.5
        assert abs(found[-1] - 1) < 1
        assert np.std(found[others]) < 0.08  # eight signs alone have errors of 0.2


@pytest.mark.nightly
def test_rows_without_second_derivatives():
    """Absolute residuals: the scales are those of the gradients, and no matrix of the rows."""
    columns, rows = 501, 6_000
    x = np.random.default_rng(0).choice([-1.0, 1.0], (rows, columns)).astype(np.float32)
    y = np.random.default_rng(1).laplace(size=rows).astype(np.float32)

    def medians(x, y):
        w = numpyro.sample("w", dist.Normal(0, 5).expand([columns]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=200) as i:
            numpyro.sample("y", dist.Laplace(x[i] @ w, 1), obs=y[i])

    target = target_of(medians, jnp.asarray(x), jnp.asarray(y))
    found = find_center(target, random.key(0), init_to_uniform)
    assert found.is_rough and not found.is_gauss_newton
    # a unit of information for each row
    assert 0.8 < np.median(found.metric.scale) * rows**0.5 < 1.5


COLUMNS, LEVELS, ROWS = 6, 40, 4_000


def categorical(columns, y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([LEVELS, COLUMNS]).to_event(2))
    with numpyro.plate("rows", len(y), subsample_size=200) as i:
        mean = mu + w[columns[i], jnp.arange(COLUMNS)].sum(-1)
        numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])


def condition(find):
    """Of the exact precision in the coordinates of a metric, and the distance from the mean."""
    rng = np.random.default_rng(1)
    share = 1 / np.arange(1, LEVELS + 1)
    columns = rng.choice(LEVELS, (ROWS, COLUMNS), p=share / share.sum())
    x = np.zeros((ROWS, 1 + LEVELS * COLUMNS))
    x[:, 0] = 1
    for k in range(COLUMNS):
        x[np.arange(ROWS), 1 + columns[:, k] * COLUMNS + k] = 1
    y = x @ rng.standard_normal(x.shape[1]) + rng.standard_normal(ROWS)
    precision = x.T @ x + np.diag([0.01, *np.ones(LEVELS * COLUMNS)])
    mean = np.linalg.solve(precision, x.T @ y)
    target = target_of(categorical, jnp.asarray(columns), jnp.asarray(y, jnp.float32))
    sds = np.diag(precision) ** -0.5
    # each for itself, with errors, and not at the centre
    center = mean + sds * rng.standard_normal(len(sds))
    scale = sds * np.exp(0.1 * rng.standard_normal(len(sds)))
    alone = DiagonalMetric(jnp.asarray(center, jnp.float32), jnp.asarray(scale, jnp.float32))
    metric = find(target, alone)
    factor = np.asarray(jax.vmap(metric.direction, 1, 1)(jnp.eye(len(sds))), float)
    e = np.linalg.eigvalsh(factor.T @ precision @ factor)
    off = np.linalg.solve(factor, np.asarray(metric.center, float) - mean)
    return e[-1] / e[0], np.abs(off).max()


@pytest.mark.nightly
def test_columns_whose_sums_are_alike():
    """Each column adds up to the intercept: six directions that the rows hardly know."""

    def found(target, alone):
        return find_low_rank(target, random.key(0), Gaussian(alone, 0.0)).metric

    ratio, off = condition(found)
    assert ratio < 6 and off < 0.5
    assert condition(lambda target, alone: alone)[0] > 100


SIZES = 900, 30, 20, 20, 10, 10


def ragged(level, y):
    """Columns with many and with few levels in one vector."""
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([len(SIZES)]).to_event(1))
    scale = tau[np.repeat(np.arange(len(SIZES)), SIZES)]
    w = numpyro.sample("w", dist.Normal(0, scale).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=400) as i:
        numpyro.sample("y", dist.Normal(mu + w[level[i]].sum(-1), 1), obs=y[i])


@pytest.fixture(scope="module")
def crossed():
    """A target, and mean and standard deviation of its intercept for the true scales."""
    rng = np.random.default_rng(2)
    begins = np.cumsum([0, *SIZES])
    shares = (1 / np.arange(1, size + 1) for size in SIZES)
    drawn = [rng.choice(len(s), 40_000, p=s / s.sum()) for s in shares]
    level = np.stack(drawn, 1) + begins[:-1]
    x = np.zeros((len(level), 1 + begins[-1]), np.float32)
    x[:, 0] = 1
    x[np.arange(len(x))[:, None], 1 + level] = 1
    y = x @ np.array([4.0, *0.5 * rng.standard_normal(begins[-1])]) + rng.standard_normal(len(x))
    covariance = np.linalg.inv(x.T @ x + np.diag([0.01, *np.full(begins[-1], 4.0)]))
    mean = covariance @ (x.T @ y)
    target = non_centred(target_of(ragged, jnp.asarray(level), jnp.asarray(y, jnp.float32)))
    target = target._replace(centring=centred(target.centring))
    return target, mean[0], covariance[0, 0] ** 0.5


@pytest.mark.nightly
def test_the_shares_of_an_intercept_and_of_columns(crossed, monkeypatch):
    """The rows know the sum of an intercept and of the means of columns, and not its terms."""
    target, mean, sd = crossed

    def off():
        found = find_center(target, random.key(0), init_to_uniform)
        return abs(float(found.metric.center[0]) - mean) / sd

    waiting = off()
    monkeypatch.setattr(variational, "_before_effects", lambda target, start, rng_key: start)
    assert waiting < 1 and off() > 2 * waiting


@pytest.mark.nightly
def test_the_scale_of_effects_of_few_rows():
    """
    A scale is known less well than with effects held fixed, as which it was found.

    Three descents bring it back from eight standard deviations off better than one.
    """
    groups = 3_000

    def model(y):
        tau = numpyro.sample("tau", dist.HalfNormal(10))
        a = numpyro.sample("a", dist.Normal(0, tau).expand([groups]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=300) as i:
            numpyro.sample("y", dist.Normal(a[i % groups], 1), obs=y[i])

    rng = np.random.default_rng(3)
    effects = 0.25 * rng.standard_normal(groups)
    y = effects[np.arange(2 * groups) % groups] + rng.standard_normal(2 * groups)
    # the variance of the mean of a group is tau^2 + 1 / 2
    variance = np.mean(y.reshape(2, groups).mean(0) ** 2)
    mode = np.log(variance - 0.5) / 2
    sd = variance * (2 / groups) ** 0.5 / (2 * (variance - 0.5))
    target = non_centred(target_of(model, jnp.asarray(y, jnp.float32)))
    first = target._replace(centring=centred(target.centring))
    target, start = find_centring(first, find_center(first, random.key(0), init_to_uniform))
    alone = start.metric
    tau = target.model.dimension - 1
    metric = LowRankMetric(
        alone.center.at[tau].set(mode + 8 * sd),
        alone.scale,
        jnp.zeros((tau + 1, 1)),
        jnp.ones(1),
    )

    def settled(most):
        descend = target.compiled(variational.descended)
        found, _, _ = low_rank._settled(target, descend, metric, random.key(1), most)
        return abs(float(found.center[tau]) - mode) / sd, float(found.scale[tau]) / sd

    off, width = settled(3)
    assert off < 1 and 0.7 < width < 1.4
    assert settled(1)[0] > off and settled(1)[1] < 0.5 * width


def test_directions_without_curvature_at_the_centre():
    """Walls of a quartic and of an exponential, and a normal law that is as wide as it seems."""

    def model(y):
        flat = dist.ImproperUniform(dist.constraints.real_vector, (), (3,))
        x = numpyro.sample("x", flat)
        numpyro.factor("walls", -0.25 * x[0] ** 4 - 2 * jnp.cosh(x[1]) - x[2] ** 2 / 800)
        with numpyro.plate("rows", len(y), subsample_size=10):
            numpyro.sample("y", dist.Normal(0, 1), obs=numpyro.subsample(y, event_dim=0))

    metric = LowRankMetric(jnp.zeros(3), jnp.ones(3), jnp.eye(3), jnp.array([50.0, 50.0, 20.0]))
    secants = target_of(model, jnp.zeros(100)).compiled(low_rank._secants)
    found, has_walls, passes = low_rank._narrowed(secants, metric, random.key(0))
    quartic, exponential, normal = np.asarray(found.roots)
    assert 0.7 < quartic < 1.4 and 0.4 < exponential < 1.4 and normal == 20
    assert has_walls and passes > 2 * 3


def test_a_part_of_the_rows():
    """The Gaussian of an eighth of the rows is as much too wide."""

    def found(target, alone):
        few = alone._replace(scale=8**0.5 * alone.scale)
        return find_low_rank(target, random.key(0), Gaussian(few, 0.0, part=1 / 8)).metric

    assert condition(found)[0] < 6


@pytest.mark.nightly
def test_fewer_parameters_than_directions():
    """Rounds that leave out the directions of the first one look at others, up to all."""

    def model(y):
        w = numpyro.sample("w", dist.Normal(0, 10).expand([4]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(w @ jnp.array([1.0, 10.0, 100.0, 1.0]), 1), obs=y[i])

    target = target_of(model, jnp.zeros(1_000))
    start = Gaussian(DiagonalMetric(jnp.ones(4), jnp.full(4, 1e-3)), 0.0)
    metric = find_low_rank(target, random.key(0), start).metric
    normal = np.array([1.0, 10.0, 100.0, 1.0])
    precision = 1_000 * np.outer(normal, normal) + np.eye(4) / 100
    factor = np.asarray(jax.vmap(metric.direction, 1, 1)(jnp.eye(4)), float)
    # rounds end when no eigenvalue is above 4
    assert np.linalg.eigvalsh(factor.T @ precision @ factor)[-1] < 4


@pytest.mark.nightly
def test_directions_of_all_rounds(monkeypatch):
    """Without the sums of sites, rounds find what is left by what they did not see before."""

    def found(target, alone):
        return find_low_rank(target, random.key(0), Gaussian(alone, 0.0)).metric

    monkeypatch.setattr(low_rank, "_MOST_SHARED", 1)
    monkeypatch.setattr(low_rank, "_MOST_PASSES", 1_000.0)
    monkeypatch.setattr(low_rank, "_ROUNDS", 1)
    first = condition(found)[0]
    monkeypatch.setattr(low_rank, "_ROUNDS", 10)
    assert condition(found)[0] < 6 < first


@pytest.mark.nightly
@pytest.mark.parametrize("extensions", [6, 0])
def test_slow_directions_that_no_sum_is_close_to(monkeypatch, extensions):
    """
    Eight scales move 400 effects each by unlike amounts. Correlations spread the spectrum.

    Without residuals four of the eight directions are missing, with a condition of 3,000.
    """
    monkeypatch.setattr(low_rank, "_EXTENSIONS", extensions)
    amounts = np.exp(np.random.default_rng(0).standard_normal((8, 400)))
    amounts *= 20 / np.linalg.norm(amounts, axis=1, keepdims=True)
    correlated = 0.5 ** np.abs(np.subtract.outer(np.arange(400), np.arange(400)))
    moved = -(amounts[:, :, None] * np.eye(8)[:, None, :]).reshape(3_200, 8)
    all_effects = np.kron(np.eye(8), correlated)
    both = np.concatenate([moved, np.eye(3_200)], axis=1)
    precision = both.T @ all_effects @ both + 1e-4 * np.eye(3_208)
    precision[:8, :8] += np.eye(8)
    shared, spread = jnp.asarray(amounts, jnp.float32), jnp.asarray(correlated, jnp.float32)

    def model(y):
        a = numpyro.sample("a", dist.Normal(0, 1).expand([8]).to_event(1))
        x = numpyro.sample("x", dist.Normal(0, 100).expand([8, 400]).to_event(2))
        away = x - a[:, None] * shared
        numpyro.factor("effects", -0.5 * jnp.sum(away * (away @ spread)))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(0, 1), obs=y[i])

    alone = DiagonalMetric(jnp.zeros(3_208), jnp.asarray(np.diag(precision) ** -0.5, jnp.float32))
    target = target_of(model, jnp.zeros(10_000))
    found = find_low_rank(target, random.key(0), Gaussian(alone, 0.0))
    vectors, excess = (np.asarray(x) for x in (found.metric.vectors, found.metric.roots - 1))
    factor = np.asarray(found.metric.scale)[:, None] * (
        np.eye(3_208) + (vectors * excess) @ vectors.T
    )
    e = np.linalg.eigvalsh(factor.T @ precision @ factor)
    assert found.converged == (extensions > 0)
    assert (e[-1] / e[0] < 16) == (extensions > 0)


@pytest.mark.parametrize("slow", [False, True])
def test_the_largest_of_many_r_hats_is_large_by_chance(slow):
    """Eight chains, each half of which stays at five independent positions for long."""
    size, stay = 100_000, 50
    x = np.random.default_rng(0).standard_normal((8, 2, 5, size))
    if slow:
        x[..., 7] = 0.3 * x[..., 7] + 2 * np.arange(8)[:, None, None] / 7
    counts = np.full((8, 2), 5.0 * stay)
    found = r_hats(Halves(counts, stay * x.sum(2), stay * (x**2).sum(2)))
    assert found.max() > 1.5  # what the tuning takes for chains that do not mix
    judged = beyond_chance(found, 16, np.full(size, size))
    assert (judged.max() > 1.5) == slow
    if slow:
        assert np.argmax(judged) == 7


@pytest.mark.parametrize("again", [7, 8])
def test_r_hats_are_confirmed_by_other_chains(again):
    """A coordinate is slow if it is slow in the chains of two pilots."""

    def model(y):
        numpyro.sample("a", dist.Normal(0, 1))
        numpyro.sample("x", dist.Normal(0, 1).expand([599]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=10):
            numpyro.sample("y", dist.Normal(0, 1), obs=numpyro.subsample(y, event_dim=0))

    asked = []

    def pilot(step_size, steps, rng_key):
        slow = again if asked else 7
        asked.append(steps)
        x = np.random.default_rng(len(asked)).standard_normal((8, 2, 20, 600))
        x[..., slow] = 0.3 * x[..., slow] + 2 * np.arange(8)[:, None, None] / 7
        halves = Halves(np.full((8, 2), 20.0), x.sum(2), (x**2).sum(2))
        return PilotRun(start_sums(jnp.zeros(600), (600,)), halves)

    metric = DiagonalMetric(jnp.zeros(600), jnp.ones(600))
    tuning = Tuning(1.0, None, metric, metric, noise=NoiseLevel(0.0, 0.0, 1.0, 0.0))
    found = run_pilot(target_of(model, jnp.zeros(100)), random.key(0), tuning, pilot)
    assert len(asked) == 2 and found.slowest == "x"
    assert (found.r_hat > 1.5) == (again == 7)


def test_r_hats_that_chance_does_not_explain():
    few, many = np.full(1_000, 1.12), np.full(1_000, 1_000)
    few[0] = 1.45
    assert beyond_chance(few, 16, many)[0] == 1.12
    # a scale is one of a few scales, and not of all effects
    assert beyond_chance(few, 16, np.where(np.arange(1_000) == 0, 3, 1_000))[0] == 1.45
    # where the usual coordinate does not mix, none of them does
    assert beyond_chance(few + 0.1, 16, many)[0] == pytest.approx(1.55)
    assert beyond_chance(np.append(few, np.inf), 16, np.full(1_001, 1_001))[-1] == np.inf


@pytest.mark.nightly
def test_the_best_of_three_searches_goes_on(monkeypatch):
    """Searches that stay where they start, and descents that hardly move."""
    ends = []

    def stays(target, center, rng_key):
        jax.debug.callback(lambda x: ends.append(np.asarray(x)), center)
        return center, jnp.full_like(center, 0.01)

    monkeypatch.setattr(variational, "_by_adam", stays)
    monkeypatch.setattr(variational, "_STEPS", 2)
    monkeypatch.setattr(variational, "_RATES", (1e-6, 1e-6))

    def model(y):
        x = numpyro.sample("x", dist.Normal(0, 1).expand([600]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(x[0], 1), obs=y[i])

    found = find_center(target_of(model, jnp.zeros(100)), random.key(0), init_to_uniform)
    jax.effects_barrier()
    potentials = [np.sum(x**2) / 2 + 50 * x[0] ** 2 for x in ends]
    assert len(ends) == 3 and np.ptp(potentials) > 1
    assert np.allclose(found.metric.center, ends[np.argmin(potentials)], atol=1e-3)


@pytest.mark.parametrize("size", [20_000, 20_001])
def test_noise_of_many_parameters_is_diagonal(size):
    def model(y):
        x = numpyro.sample("x", dist.Normal(0, 1).expand([size]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(x[0], 1), obs=y[i])

    resolved = NoiseEstimate().resolved(target_of(model, jnp.zeros(100)), 1.0)
    assert resolved.covariance == ("low_rank" if size == 20_000 else "diagonal")


def test_the_largest_noise_of_many_effects_of_few_rows():
    """Some of them have several rows in few minibatches, which is chance."""
    levels, each, share = 2_000, 3, 0.01
    level = jnp.repeat(jnp.arange(levels), each)

    def model(y):
        x = numpyro.sample("x", dist.Normal(0, 1).expand([levels]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=int(share * len(y))) as i:
            numpyro.sample("y", dist.Normal(x[level[i]], 1), obs=y[i])

    target = target_of(model, jnp.zeros(levels * each))
    metric = DiagonalMetric(jnp.zeros(levels), jnp.full(levels, (1 + each) ** -0.5))
    anchor = target.anchor({"x": metric.center})
    before = NoiseLevel(0.0, 0.0, 1.0, 0.0)
    found, _ = noise_with(target, random.key(0), Gaussian(metric, 0.0), metric, anchor, before)
    # of all effects alike
    expected = (1 / share - 1) / each * (each / (1 + each)) ** 2
    assert abs(found.mean / expected - 1) < 0.1
    assert 0.4 < found.largest / expected < 2
