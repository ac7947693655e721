# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stratified minibatches: exact over all minibatches, their law, and when there are some."""

from functools import partial
from itertools import combinations, product
import pickle
import warnings

from exact_laws import overdamped
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
import pytest
from runs import run_mcmc, target_of

from numpyro_sgmcmc import SGLD, CCAdL, RowsOnDisk
from numpyro_sgmcmc.data.drawn_rows import DrawnRows
from numpyro_sgmcmc.data.strata import Allocation, Strata, by_importance, by_labels
from numpyro_sgmcmc.gradients.covariance import Full
from numpyro_sgmcmc.gradients.estimators import minibatch_gradient, sub_batch_gradient
from numpyro_sgmcmc.posterior.metric import DiagonalMetric, IdentityMetric
from numpyro_sgmcmc.posterior.potential import full_data_gradient
from numpyro_sgmcmc.tuning.gaussian import Gaussian
from numpyro_sgmcmc.tuning.rare_rows import error_of, find_importance, fourth_cumulant
from numpyro_sgmcmc.tuning.words import warn_of

COMPILE_QUICKLY = True

RNG = np.random.default_rng(0)
SMALL = 11
X = np.exp(RNG.standard_normal((SMALL, 3))).astype(np.float32)
Y = RNG.standard_normal(SMALL).astype(np.float32)
W = {"w": jnp.array([0.5, -1.0, 0.3])}


def regression(x, y, batch_size):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        with numpyro.handlers.scale(scale=0.5):
            numpyro.sample("y", dist.StudentT(4, x[i] @ w, 1), obs=y[i])


def in_a_second_dimension(x, y, batch_size):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    rows = numpyro.plate("rows", x.shape[0], subsample_size=batch_size, dim=-2)
    with rows as i, numpyro.plate("columns", 2, dim=-1):
        mean = (x[i] @ w)[:, None] * jnp.array([1.0, 0.5])
        numpyro.sample("y", dist.StudentT(4, mean, 1), obs=y[i][:, None])


def all_minibatches(strata):
    """Every minibatch that can be drawn, equally likely: numbers of rows, shape (k, n)."""
    order, (sizes, counts, _) = np.asarray(strata.order), vars_of(strata.allocation)
    starts = np.cumsum([0, *sizes[:-1]])
    choices = []
    for start, size, count in zip(starts, sizes, counts, strict=True):
        if count < size:
            choices.append(
                [order[[start + k for k in some]] for some in combinations(range(size), count)]
            )
        else:
            choices.append([order[start + np.minimum(np.arange(count), size - 1)]])
    return np.stack([np.concatenate(parts) for parts in product(*choices)])


def vars_of(allocation):
    return allocation.sizes, allocation.counts, allocation.sub_batch


#: The first stratum whole; whole and filled up with a row of weight zero; no stratum whole.
ALLOCATIONS = [
    Allocation((2, 4, 5), (2, 2, 2), 1),
    Allocation((1, 5, 5), (2, 4, 4), 2),
    Allocation((5, 6), (2, 4), 1),
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model", [regression, pytest.param(in_a_second_dimension, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    "allocation",
    [ALLOCATIONS[0], *(pytest.param(x, marks=pytest.mark.nightly) for x in ALLOCATIONS[1:])],
)
def test_over_all_minibatches(model, allocation):
    """The mean of the gradient, its covariance, and the mean of its estimate: no chance in it."""
    strata = Strata(jnp.asarray(RNG.permutation(SMALL), jnp.int32), allocation)
    target = target_of(model, jnp.asarray(X), jnp.asarray(Y), allocation.batch_size)
    potential, key = target.potential(IdentityMetric()), random.key(0)
    position = W["w"]

    def observed(numbers):
        rows = {"rows": DrawnRows(numbers, weights=strata.weights)}
        plain = minibatch_gradient(potential, rows, key)(position)
        factors, groups = {"rows": allocation.factor}, {"rows": allocation.groups}
        held = sub_batch_gradient(potential, rows, key, factors, Full(3), groups)(position)
        energy, terms = potential.with_row_terms(W, rows, key)
        return plain, held, energy, terms["rows"].sum()

    # sub-batches are pieces of a random order, so that every split of the rows must be met
    minibatches = all_minibatches(strata)
    if allocation.sub_batch > 1:
        minibatches = np.concatenate([shuffled(minibatches, allocation, k) for k in range(400)])
    plain, held, energy, terms = jax.vmap(observed)(jnp.asarray(minibatches))
    whole, gradient = full_data_gradient(potential, target.model.plates, W, key)
    np.testing.assert_allclose(plain.potential.mean(), whole, rtol=1e-5)
    np.testing.assert_allclose(plain.gradient.mean(0), gradient["w"], rtol=1e-4)
    np.testing.assert_allclose(held.gradient, plain.gradient, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(energy, plain.potential, rtol=1e-5)
    prior = -dist.Normal(0, 1).log_prob(position).sum()
    np.testing.assert_allclose(prior - terms, energy, rtol=1e-5)

    covariance = np.cov(np.asarray(plain.gradient, float).T, bias=True)
    of_rows = jax.vmap(lambda i: -SMALL * row_gradient(potential, i) / SMALL)(jnp.arange(SMALL))
    np.testing.assert_allclose(
        covariance, formula(np.asarray(of_rows), strata), rtol=1e-3, atol=1e-3
    )
    tolerance = 1e-3 if allocation.sub_batch == 1 else 0.03
    estimated = np.asarray(held.noise).mean(0)
    np.testing.assert_allclose(
        estimated, covariance, rtol=tolerance, atol=tolerance * covariance.max()
    )


def row_gradient(potential, i):
    """The gradient of what one row adds to the log density."""

    def term(w):
        return potential.with_row_terms({"w": w}, {"rows": i[None]}, random.key(0))[1]["rows"][0]

    return jax.grad(term)(W["w"]) / SMALL


def shuffled(minibatches, allocation, seed):
    """With the rows of every drawn stratum in another order."""
    rng, parts, start = np.random.default_rng(seed), [], 0
    for size, count in zip(allocation.sizes, allocation.counts, strict=True):
        part = minibatches[:, start : start + count]
        parts.append(rng.permuted(part, axis=1) if count < size else part)
        start += count
    return np.concatenate(parts, axis=1)


def formula(gradients, strata):
    """sum_h N_h^2 / n_h (1 - n_h / N_h) S_h^2."""
    total, start = 0.0, 0
    for size, count in zip(strata.allocation.sizes, strata.allocation.counts, strict=True):
        rows = np.asarray(strata.order)[start : start + size]
        start += size
        if count < size:
            total += size**2 / count * (1 - count / size) * np.cov(gradients[rows].T)
    return total


def test_draws_are_of_their_strata():
    """Rows taken whole are always there; of the others every pair of a stratum equally often."""
    strata = by_labels(np.arange(200) % 40 == 0, 60)
    sizes, counts, _ = vars_of(strata.allocation)
    assert (sizes, sum(counts)) == ((5, 195), 60)
    steps = 20_000
    rows = np.asarray(jax.jit(jax.vmap(partial(strata.draw, random.key(3))))(jnp.arange(steps)))
    whole = rows[:, : counts[0]]
    assert np.all(np.sort(whole[:, :5]) == np.arange(0, 200, 40))
    drawn = rows[:, counts[0] :]
    assert np.all(drawn % 40 > 0) and np.all(np.diff(np.sort(drawn), axis=1) > 0)
    seen = np.bincount(drawn.ravel(), minlength=200)[np.arange(200) % 40 > 0]
    share = counts[1] / sizes[1]
    z = (seen - steps * share) / np.sqrt(steps * share * (1 - share))
    assert np.abs(z).max() < 4 and abs(z.std() - 1) < 4 / np.sqrt(2 * len(z))


def test_importance():
    """The most important rows whole, and no row more than twice as heavy as without strata."""
    importance = np.exp(2 * RNG.standard_normal(5_000))
    strata = by_importance(importance, 200)
    allocation, weights = strata.allocation, strata.row_weights
    first = allocation.sizes[0]
    assert allocation.counts[0] == first and allocation.batch_size == 200
    assert set(np.asarray(strata.order)[:first]) == set(np.argsort(-importance)[:first])
    assert np.all(np.diff(weights[np.argsort(-importance)]) >= 0)
    rest = (5_000 - first) / (200 - first)
    assert weights.max() <= 2.05 * rest  # places are whole numbers
    squares = importance**2
    best = np.sum(importance[weights > 1]) ** 2 / (200 - first) - np.sum(squares[weights > 1])
    assert best < np.sum(squares * (weights - 1)) < 2 * best


@pytest.mark.parametrize("importance", [np.zeros(1_000), np.ones(1_000), np.eye(1, 1_000)[0]])
@pytest.mark.parametrize("batch_size", [2, 97, 100, 999])
def test_any_importance(importance, batch_size):
    allocation = by_importance(importance, batch_size).allocation
    assert allocation.size == 1_000 and allocation.batch_size == batch_size
    np.testing.assert_allclose(allocation.weights.mean(), 1)


def test_places_by_importance():
    """Of given strata: half of the places by size, half by importance; small ones whole."""
    labels = np.repeat([7, 2, 5, 0], [3, 900, 90, 7])
    equal = by_labels(labels, 200)
    assert equal.allocation.sizes == (10, 900, 90)
    assert equal.allocation.counts == (20, 140, 40)
    importance = np.where(labels == 5, 10.0, 1.0)
    neyman = by_labels(labels, 200, importance)
    assert neyman.allocation.sizes == (10, 900, 90) or neyman.allocation.sizes == (100, 900)
    assert neyman.allocation.batch_size == 200


# --- the law of a Gaussian mean, whose noise is the same everywhere

N, BATCH, D = 600, 60, 200


def gaussian_mean(x, precision):
    prior = dist.ImproperUniform(dist.constraints.real_vector, (), (D,))
    theta = numpyro.sample("theta", prior)
    with numpyro.plate("rows", N, subsample_size=BATCH) as i:
        numpyro.factor("x", -0.5 * precision * jnp.sum((x[i] - theta) ** 2, -1))


def law_of(kernel, x, num_samples=3_000):
    """The variance of the draws, the mean over coordinates, and its standard error."""
    mcmc = run_mcmc(
        kernel,
        x,
        1.0 / N,
        key=1,
        warmup=num_samples // 4,
        samples=num_samples,
        start={"theta": jnp.asarray(x.mean(0))},
    )
    squares = (np.asarray(mcmc.get_samples(True)["theta"], float) - x.mean(0)) ** 2
    errors = squares.std((0, 1)) / np.sqrt(effective_sample_size(squares))
    return squares.mean(), np.sqrt(np.mean(errors**2) / D), mcmc


@pytest.fixture(scope="module")
def uneven():
    """Rows of three spreads in a random order, and their strata."""
    labels = np.random.default_rng(5).permutation(np.repeat([0, 1, 2], [400, 190, 10]))
    spread = np.array([2.0, 10.0, 60.0])[labels]
    x = np.random.default_rng(6).standard_normal((N, D)) * spread[:, None]
    return np.asarray(x, np.float32), labels


def known_noise(x, strata):
    """The mean variance of the noise over the coordinates, by the formula."""
    return np.mean(np.diag(formula(x / N, strata)))


@pytest.mark.slow
def test_law_with_strata(uneven):
    x, labels = uneven
    strata = by_labels(labels, BATCH)
    v = known_noise(x, strata)
    assert v < 0.5 * (1 - BATCH / N) * x.var(0).mean() / BATCH
    expected = overdamped(np.eye(1), v * np.eye(1), 0.5)[0, 0]
    found, error, _ = law_of(SGLD(gaussian_mean, 0.5, subsampling=labels), x)
    assert error < 0.01 * expected
    assert abs(found - expected) < 3.5 * error
    plain, error, _ = law_of(SGLD(gaussian_mean, 0.5), x)
    assert plain - expected > 10 * error
    # corrected for by an estimate from within the strata
    kernel = CCAdL(gaussian_mean, 0.5, 1.0, subsampling=labels, noise="diagonal")
    found, error, _ = law_of(kernel, x)
    assert error < 0.01 and abs(found - 1) < 3.5 * error


@pytest.mark.nightly
def test_forgotten_weights_are_noticed(uneven, monkeypatch):
    x, labels = uneven
    monkeypatch.setattr(Strata, "weights", jnp.ones(BATCH))
    kernel = SGLD(gaussian_mean, 0.5, subsampling=labels)
    mcmc = run_mcmc(
        kernel,
        x,
        1.0 / N,
        key=1,
        warmup=500,
        samples=1_500,
        start={"theta": jnp.asarray(x.mean(0))},
    )
    mean = np.asarray(mcmc.get_samples()["theta"], float).mean(0)
    assert np.mean((mean - x.mean(0)) ** 2) > 0.05


# --- which rows


@pytest.mark.nightly
def test_fourth_cumulant_of_a_regression():
    """The gradients of a linear regression are known."""
    rng = np.random.default_rng(2)
    size, n = 400, 40
    x = rng.standard_normal((size, 2))
    x[:3] *= 20
    y = rng.standard_normal(size)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", size, subsample_size=n) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    target = target_of(model, jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))
    center, scale = np.array([0.3, -0.2]), np.array([0.05, 0.02])
    metric = DiagonalMetric(jnp.asarray(center, jnp.float32), jnp.asarray(scale, jnp.float32))
    gaussian = Gaussian(metric, 0.0)
    plainly, controlled, further = (
        find_importance(target, random.key(0), gaussian, order).sizes for order in (0, 1, 2)
    )
    residual = y - x @ center
    # to leading order: exact for the part that is even, and with eight pairs of draws
    np.testing.assert_allclose(
        plainly["rows"], np.linalg.norm(x * scale * residual[:, None], axis=1), rtol=1.0
    )
    even = np.linalg.norm(x * scale, axis=1) ** 2
    np.testing.assert_allclose(controlled["rows"], even, rtol=0.7, atol=1e-4)
    # a quadratic log density is its own expansion, up to rounding
    assert np.max(further["rows"]) < 1e-3 * np.max(even)
    weights = {"rows": np.full(size, size / n)}
    options = target, random.key(0), gaussian, metric
    plain = fourth_cumulant(*options, 0, plainly, weights)
    a = x * scale * residual[:, None]  # at the centre, where the Gaussian is narrow
    w = size / n
    along = a @ (a / np.linalg.norm(a, axis=1)[:, None]).T
    exact = np.max((w**3 - w**2) * np.sum(along**4, axis=0))
    assert 0.5 * exact < plain < 3 * exact
    assert 0 < fourth_cumulant(*options, 1, controlled, weights) < plain
    assert fourth_cumulant(*options, 2, controlled, weights) < 1e-6 * plain
    none = {"rows": np.where(np.arange(size) < 3, 1.0, w)}
    assert fourth_cumulant(*options, 0, plainly, none) < 0.02 * plain


@pytest.mark.parametrize("friction", [0.7, 2.5])
def test_kurtosis_of_shots(friction):
    """The cumulants of order four of a linear equation, from the equations that they obey."""
    # d/dt of k40, k31, k22, k13, k04 for x' = p, p' = -x - A p, of which the last one is fed
    a = friction
    matrix = np.array(
        [
            [0, 4, 0, 0, 0],
            [-1, -a, 3, 0, 0],
            [0, -2, -2 * a, 2, 0],
            [0, 0, -3, -3 * a, 1],
            [0, 0, 0, -4, -4 * a],
        ]
    )
    step_size, cumulant = 0.1, 50.0
    expected = np.linalg.solve(matrix, [0, 0, 0, 0, -(step_size**3) * cumulant])[0]
    found = 6 * error_of(cumulant, 1.0, step_size, friction)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


GROUPS = np.array([3, 5, 12, 3_980, 4_000])


def hierarchical(group, y, batch_size=100):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("groups", len(GROUPS)):
        a = numpyro.sample("a", dist.Normal(mu, 2))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=a[group[i]]), obs=y[i])


@pytest.fixture(scope="module")
def grouped():
    group = np.random.default_rng(0).permutation(np.repeat(np.arange(5), GROUPS))
    probability = np.array([1.0, 1.0, 0.9, 0.4, 0.6])[group]
    y = np.random.default_rng(1).random(len(group)) < probability
    return jnp.asarray(group), jnp.asarray(y, jnp.int32)


@pytest.fixture(scope="module")
def tuned(grouped):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CCAdL(hierarchical, progress_bar=False).tune(random.key(0), *grouped)


def exact_sds(grouped):
    """By a grid over the mean and, given it, over each of the intercepts."""
    group, y = map(np.asarray, grouped)
    ones = np.bincount(group, y, 5)
    mu, a = np.linspace(-9, 9, 361), np.linspace(-14, 14, 4_001)
    log_prior = -((a[:, None] - mu) ** 2) / 8
    weights, moments = -(mu**2) / 8, []
    for k in range(5):
        log_p = log_prior + (ones[k] * a - GROUPS[k] * np.logaddexp(0, a))[:, None]
        p = np.exp(log_p - log_p.max())
        weights = weights + np.log(p.sum(0)) + log_p.max()
        moments.append([(a @ p) / p.sum(0), (a**2 @ p) / p.sum(0)])
    w = np.exp(weights - weights.max())
    first, second = np.moveaxis(np.array(moments) @ (w / w.sum()), 0, -1)
    return np.sqrt(second - first**2)


@pytest.mark.nightly
# groups of three rows, all alike, are
@pytest.mark.filterwarnings(
    "ignore:The posterior is far from any Gaussian", "ignore:Minibatches do not pay"
)
def test_small_groups(grouped, tuned):
    """Right with the strata that the tuning finds; without, steps must be short."""
    whole = tuned.strata["rows"].allocation
    order = np.asarray(tuned.strata["rows"].order)[: whole.sizes[0]]
    assert np.isin(np.flatnonzero(np.asarray(grouped[0]) < 2), order).all()
    assert "rows in every minibatch" in str(tuned) and not tuned.has_rare_rows
    kernel = CCAdL(hierarchical, tuning=tuned, steps_per_sample=tuned.steps_per_sample)
    mcmc = run_mcmc(kernel, *grouped, key=1, warmup=300, samples=2_500, chains=4)
    a = np.asarray(mcmc.get_samples(True)["a"], float)
    squares = (a - a.mean((0, 1))) ** 2
    error = squares.std((0, 1)) / np.sqrt(effective_sample_size(squares)) / squares.mean((0, 1)) / 2
    ratio = a.std((0, 1)) / exact_sds(grouped)
    assert error.max() < 0.02
    assert np.all(np.abs(ratio - 1) < 0.02 + 3 * error)
    plain = CCAdL(hierarchical, subsampling="without_replacement", progress_bar=False)
    plain = plain.tune(random.key(0), *grouped)
    # their noise in the tails makes steps short enough for the draws to be right; with others
    assert plain.step_size < tuned.step_size / 2 and not plain.has_rare_rows and not plain.strata
    longer = plain._replace(step_size=tuned.step_size)
    with pytest.warns(UserWarning, match="most minibatches have none of them"):
        warn_of(longer)
    assert "few minibatches have rows that count much" in longer.problem


@pytest.mark.nightly
def test_kept_with_the_kernel(grouped, tuned):
    """In copies, pickles and records, and made anew for other data."""
    kernel = CCAdL(hierarchical, tuning=tuned)
    run_mcmc(kernel, *grouped, warmup=5, samples=5)
    assert kernel.run_info["strata"] == str(tuned.strata["rows"])
    other = pickle.loads(pickle.dumps(kernel)).with_step_size(0.1)
    again = run_mcmc(other, *grouped, warmup=5, samples=5)
    assert again.last_state.fixed.strata["rows"].allocation == tuned.strata["rows"].allocation
    group, y = grouped
    turned = run_mcmc(kernel, group[::-1], y[::-1], warmup=5, samples=5)
    strata = turned.last_state.fixed.strata["rows"]
    whole = np.asarray(strata.order)[: strata.allocation.sizes[0]]
    assert np.isin(np.flatnonzero(np.asarray(group[::-1]) < 2), whole).all()


@pytest.mark.nightly
def test_several_plates(uneven):
    """Each has strata of its own."""
    x, labels = uneven

    def model(x, z):
        theta = numpyro.sample("theta", dist.Normal(0, 10).expand([D]).to_event(1))
        for name, y, n in (("rows", x, BATCH), ("others", z, 10)):
            with numpyro.plate(name, len(y), subsample_size=n) as i:
                numpyro.sample(f"y of {name}", dist.Normal(theta, 20).to_event(1), obs=y[i])

    strata = {"rows": labels, "others": np.arange(40) % 2}
    mcmc = run_mcmc(SGLD(model, 1e-3, subsampling=strata), x, x[:40], warmup=5, samples=5)
    found = mcmc.last_state.fixed.strata
    sizes = {name: (one.allocation.sizes, one.allocation.batch_size) for name, one in found.items()}
    assert sizes == {"rows": ((10, 400, 190), BATCH), "others": ((20, 20), 10)}


@pytest.mark.nightly
def test_rows_from_disk(uneven, tmp_path):
    x, labels = uneven
    np.save(tmp_path / "x.npy", x)
    draws = []
    for rows in (x, RowsOnDisk(tmp_path / "x.npy")):
        kernel = CCAdL(gaussian_mean, 0.5, 1.0, subsampling={"rows": labels}, noise="diagonal")
        mcmc = run_mcmc(
            kernel, rows, 1.0 / N, key=1, warmup=10, samples=30, start={"theta": jnp.zeros(D)}
        )
        draws.append(np.asarray(mcmc.get_samples()["theta"]))
    np.testing.assert_allclose(*draws, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_nothing_is_said_of_ordinary_rows():
    y = 3 + random.normal(random.key(0), (10_000,))

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuning = CCAdL(model, progress_bar=False).tune(random.key(1), y)
    assert not tuning.strata and tuning.rare_rows_error < 1e-3 and "strata" not in str(tuning)
