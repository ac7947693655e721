# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Hidden Markov chains of groups: exact sums, laws, draws of states, and what is refused."""

from functools import partial
from itertools import product

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.handlers import seed, trace
import pytest
from runs import run_mcmc, target_of

from numpyro_sgmcmc import CCAdL, local_draws, loo, predict, predictive_checks, to_arviz
from numpyro_sgmcmc.posterior.checks.structure import check_structure
from numpyro_sgmcmc.posterior.group_handlers import plate_axes
from numpyro_sgmcmc.posterior.hidden_states import HiddenSite, HiddenStates, draw_states
from numpyro_sgmcmc.posterior.metric import IdentityMetric

SERIES, TIMES = 300, 7
RNG = np.random.default_rng(0)


def simulated(series=SERIES, times=TIMES):
    states = np.zeros((series, times), int)
    states[:, 0] = RNG.random(series) < 0.5
    for t in range(1, times):
        stays = RNG.random(series) < np.where(states[:, t - 1] == 1, 0.7, 0.9)
        states[:, t] = np.where(stays, states[:, t - 1], 1 - states[:, t - 1])
    return jnp.asarray(1.5 * states + RNG.standard_normal((series, times)), jnp.float32)


Y = simulated()


def by_number(p):
    return numpyro.sample("state", dist.Categorical(probs=p))


def hmm(y, state_of=by_number, batch=30):
    """Two states, of which the second adds ``height`` to a row."""
    stay = numpyro.sample("stay", dist.Beta(2, 2).expand([2]).to_event(1))
    height = numpyro.sample("height", dist.HalfNormal(2))
    matrix = jnp.stack([jnp.stack([stay[0], 1 - stay[0]]), jnp.stack([1 - stay[1], stay[1]])])
    series = numpyro.plate("series", len(y), subsample_size=batch)
    with series as i:
        rows = y[i].T

    def step(carry, row):
        before, is_first = carry
        with series:
            state = state_of(jnp.where(is_first, 0.5, matrix[before]))
            numpyro.sample("y", dist.Normal(height * state, 1), obs=row)
        return (state, False), None

    scan(step, (jnp.zeros(rows.shape[1], int), True), rows)


def enumerated(y, stay, height):
    """The log density of each series, by all paths of states."""
    matrix = np.array([[stay[0], 1 - stay[0]], [1 - stay[1], stay[1]]])
    y, total = np.asarray(y, float), []
    for path in product(range(2), repeat=y.shape[1]):
        moves = np.log(matrix[path[:-1], path[1:]]).sum() + np.log(0.5)
        rows = -((y - height * np.array(path)) ** 2) / 2 - np.log(2 * np.pi) / 2
        total.append(moves + rows.sum(1))
    return np.logaddexp.reduce(total, axis=0)


def densities(model, y, values):
    """The log density of each series by the package, and the model."""
    target = target_of(model, y)
    rows = {"series": jnp.arange(len(y))}
    potential = target.potential(IdentityMetric())
    _, terms = jax.jit(potential.with_row_terms)(values, rows, random.key(0))
    return np.asarray(terms["series"]), target.model


@pytest.mark.nightly
@pytest.mark.parametrize("height", [0.5, 3.0])
@pytest.mark.parametrize("times", [1, 2, 7])
def test_sums_over_all_paths(height, times):
    values = {"stay": jnp.array([2.0, -0.5]), "height": jnp.log(height)}
    found, model = densities(hmm, Y[:, :times], values)
    assert model.model.plates[0].states.length == times
    stay = 1 / (1 + np.exp(-np.array([2.0, -0.5])))
    np.testing.assert_allclose(found, enumerated(Y[:, :times], stay, height), rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_gradients_and_curvatures():
    """Derivatives of the sum against finite differences of the enumerated one."""
    target = target_of(hmm, Y)
    rows = {"series": jnp.arange(SERIES)}
    x = np.array([np.log(1.5), 1.2, 0.3])

    def found(x):
        values = {"height": x[0], "stay": x[1:]}
        potential = target.potential(IdentityMetric())
        return potential.with_row_terms(values, rows, random.key(0))[1]["series"].sum()

    def expected(x):
        return enumerated(Y, 1 / (1 + np.exp(-x[1:])), np.exp(x[0])).sum()

    def slope(f, x, size=1e-4):
        return np.array([(f(x + e) - f(x - e)) / 2 / size for e in size * np.eye(3)])

    here = jnp.asarray(x, jnp.float32)
    np.testing.assert_allclose(jax.jit(jax.grad(found))(here), slope(expected, x), rtol=2e-3)
    curvature = slope(lambda x: slope(expected, x), x, 1e-3)
    np.testing.assert_allclose(
        jax.jit(jax.hessian(found))(here), curvature, rtol=1e-2, atol=1e-2 * abs(curvature).max()
    )


# --- kinds of states


def by_chance(p):
    return numpyro.sample("state", dist.Bernoulli(p[..., 1]))


def by_two_sites(p):
    """The second state, or the first, is the sum of two variables."""
    one = numpyro.sample("one", dist.DiscreteUniform(3, 4)) - 3
    other = numpyro.sample("other", dist.Bernoulli(jnp.where(one == 1, p[..., 0], p[..., 1])))
    return jnp.abs(one - other)


@pytest.mark.one_case
@pytest.mark.parametrize(("state_of", "number"), [(by_chance, 2), (by_two_sites, 4)])
def test_kinds_of_states(state_of, number):
    values = {"stay": jnp.array([2.0, -0.5]), "height": jnp.log(1.5)}
    expected, _ = densities(hmm, Y, values)
    found, model = densities(partial(hmm, state_of=state_of), Y, values)
    assert model.model.plates[0].states.number == number
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def chain(state_of):
    """A model of states that are drawn by a function of the state before."""

    def model(y):
        height = numpyro.sample("height", dist.HalfNormal(2))
        series = numpyro.plate("series", len(y), subsample_size=30)
        with series as i:
            rows = y[i].T

        def step(before, row):
            with series:
                state = state_of(before)
                numpyro.sample("y", dist.Normal(height * state, 1), obs=row)
            return state, None

        scan(step, jnp.zeros(rows.shape[1], int), rows)

    return model


@pytest.mark.nightly
def test_impossible_transitions():
    """A second state that is never left: values and gradients are finite."""

    logits = jnp.array([[1.0, 0.0], [-jnp.inf, 0.0]])

    def absorbing(before):
        return numpyro.sample("state", dist.Categorical(logits=logits[before]))

    target = target_of(chain(absorbing), Y)
    potential = target.potential(IdentityMetric())
    rows = {"series": jnp.arange(SERIES)}

    def total(height):
        values = {"height": jnp.log(height)}
        return potential.with_row_terms(values, rows, random.key(0))[1]["series"].sum()

    stay = np.exp(1) / (1 + np.exp(1))
    y, expected = np.asarray(Y, float), []
    for change in range(TIMES + 1):
        states = np.arange(TIMES) >= change
        moves = min(change, TIMES) * np.log(stay) + (change < TIMES) * np.log(1 - stay)
        expected.append(moves + (-((y - 1.5 * states) ** 2) / 2 - np.log(2 * np.pi) / 2).sum(1))
    expected = np.logaddexp.reduce(expected, axis=0).sum()
    np.testing.assert_allclose(jax.jit(total)(1.5), expected, rtol=1e-5)
    assert np.isfinite(jax.jit(jax.hessian(total))(1.5))


@pytest.mark.nightly
def test_effects_of_series_with_states():
    """A level of each series, integrated around the sum over its states."""

    def model(y):
        sd = numpyro.sample("sd", dist.HalfNormal(1))
        series = numpyro.plate("series", len(y), subsample_size=30)
        with series as i:
            rows = y[i].T
            level = numpyro.sample("level", dist.Normal(0, sd))

        def step(before, row):
            with series:
                state = numpyro.sample("state", dist.Bernoulli(0.2 + 0.5 * before))
                numpyro.sample("y", dist.Normal(level + 2 * state, 1), obs=row)
            return state, None

        scan(step, jnp.zeros(rows.shape[1], int), rows)

    found, read = densities(model, Y, {"sd": jnp.log(0.7)})
    assert not read.model.plates[0].normal
    y, expected = np.asarray(Y, float), []
    covariance = np.eye(TIMES) + 0.7**2
    for path in product(range(2), repeat=TIMES):
        moves = np.log([(0.8, 0.2), (0.3, 0.7)])
        before = (0, *path[:-1])
        away = y - 2 * np.array(path)
        squares = np.einsum("ni,ij,nj->n", away, np.linalg.inv(covariance), away)
        norm = np.linalg.slogdet(2 * np.pi * covariance)[1]
        expected.append(moves[before, path].sum() - (squares + norm) / 2)
    expected = np.logaddexp.reduce(expected, axis=0)
    # the nodes of a step have a small error where a level has two modes
    np.testing.assert_allclose(found, expected, atol=0.01)
    assert abs(found.mean() - expected.mean()) < 1e-3


@pytest.mark.nightly
def test_an_outcome_of_the_last_state():
    """In the body, with a mask at the other times."""

    def model(y, outcome):
        height = numpyro.sample("height", dist.HalfNormal(2))
        series = numpyro.plate("series", len(y), subsample_size=30)
        with series as i:
            rows, result = y[i].T, outcome[i]

        def step(before, now):
            row, is_last = now
            with series:
                state = numpyro.sample("state", dist.Bernoulli(0.2 + 0.5 * before))
                numpyro.deterministic("level", height * state)
                numpyro.sample("y", dist.Normal(height * state, 1), obs=row)
                law = dist.Bernoulli(0.1 + 0.7 * state)
                numpyro.sample("outcome", law.mask(is_last), obs=result)
            return state, None

        is_last = jnp.arange(TIMES) == TIMES - 1
        scan(step, jnp.zeros(rows.shape[1], int), (rows, is_last))

    outcome = jnp.asarray(RNG.random(SERIES) < 0.4, jnp.float32)
    target, values = target_of(model, Y, outcome), {"height": jnp.log(1.5)}
    rows = {"series": jnp.arange(SERIES)}
    potential = target.potential(IdentityMetric())
    _, terms = jax.jit(potential.with_row_terms)(values, rows, random.key(0))
    check_structure(target, values)
    y, result, expected = np.asarray(Y, float), np.asarray(outcome), []
    moves = np.log([(0.8, 0.2), (0.3, 0.7)])
    for path in product(range(2), repeat=TIMES):
        of_rows = (-((y - 1.5 * np.array(path)) ** 2) / 2 - np.log(2 * np.pi) / 2).sum(1)
        p = 0.1 + 0.7 * path[-1]
        of_outcome = np.log(np.where(result == 1, p, 1 - p))
        expected.append(moves[(0, *path[:-1]), path].sum() + of_rows + of_outcome)
    expected = np.logaddexp.reduce(expected, axis=0)
    np.testing.assert_allclose(terms["series"], expected, rtol=1e-4, atol=1e-4)


# --- what is refused


def irregular(kind):
    """States that are no Markov chain in time."""

    def model(y):
        height = numpyro.sample("height", dist.HalfNormal(2))
        series = numpyro.plate("series", len(y), subsample_size=30)
        with series as i:
            rows = y[i].T
        zeros = jnp.zeros(rows.shape[1], int)

        def step(carry, row):
            with series:
                p = 0.2 + 0.5 * carry[1 if kind == "two before" else 0]
                state = numpyro.sample("state", dist.Bernoulli(p))
                shown = carry[2] if kind == "sum of all" else state
                if kind != "outside":
                    numpyro.sample("y", dist.Normal(height * shown, 1), obs=row)
            return (state, carry[0], carry[2] + state), state

        _, states = scan(step, (zeros, zeros, zeros), rows, reverse=kind == "backwards")
        if kind == "outside":
            with series:
                numpyro.sample("y", dist.Normal(height * states.T, 1).to_event(1), obs=rows.T)

    return model


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["two before", "sum of all", "backwards", "outside"])
def test_states_that_are_no_chain(kind):
    with pytest.raises(
        ValueError, match="no Markov chain in groups of the plate 'series', at least 300"
    ):
        check_structure(target_of(irregular(kind), Y), {"height": jnp.zeros(())})


def with_mask(before):
    with numpyro.handlers.mask(mask=before > -1):
        return numpyro.sample("state", dist.Bernoulli(0.2 + 0.5 * before))


def with_level(before):
    level = numpyro.sample("level", dist.Normal(before, 1))
    return numpyro.sample("state", dist.Bernoulli(logits=level))


def of_several(before):
    states = numpyro.sample("state", dist.Bernoulli(jnp.full((30, 2), 0.2)).to_event(1))
    return before + states.sum(-1)


def of_features(before):
    with numpyro.plate("features", 2, dim=-2):
        states = numpyro.sample("state", dist.Bernoulli(jnp.full((2, 30), 0.2)))
    return before + states.sum(0)


@pytest.mark.parametrize(
    ("state_of", "message"),
    [
        (with_mask, "'state' .* in a `scan` and has a mask"),
        (with_level, "continuous .'level'. and discrete .'state'. latent sites"),
        (of_several, "has several values in each group"),
        (of_features, "has several states at each time"),
        (
            lambda before: numpyro.sample("state", dist.Categorical(logits=jnp.zeros(40))),
            "1,600 combinations .* pairs of hidden states",
        ),
    ],
)
def test_states_that_are_refused(state_of, message):
    with pytest.raises(ValueError, match=message):
        target_of(chain(state_of), Y)


# --- laws


def paths_of(y, stay, height):
    """All paths of states of one series, and their probabilities."""
    values = np.array(list(product(range(2), repeat=len(y))))
    matrix = np.array([[stay[0], 1 - stay[0]], [1 - stay[1], stay[1]]])
    moves = np.log(matrix[values[:, :-1], values[:, 1:]]).sum(1)
    log_weights = moves - ((np.asarray(y) - height * values) ** 2).sum(1) / 2
    weights = np.exp(log_weights - log_weights.max())
    return values, weights / weights.sum()


def surprise(counts, expected, variance):
    """Largest distance of counts from what is expected, in standard errors."""
    enough = expected > 5
    assert enough.sum() > 3
    return np.abs((counts - expected)[enough] / variance[enough] ** 0.5).max()


@pytest.mark.nightly
def test_draws_of_states():
    """Frequencies of all 16 paths of states of 4,000 equal series."""
    stay, height, y, number = (0.8, 0.4), 1.5, np.array([0.2, 1.1, 0.9, -0.3]), 4_000
    matrix = jnp.log(jnp.array([[stay[0], 1 - stay[0]], [1 - stay[1], stay[1]]]))

    def terms(states):
        rows = -((y - height * states) ** 2) / 2
        moves = jnp.pad(matrix[states[:, :-1], states[:, 1:]], ((0, 0), (1, 0)))
        return (rows + moves).T, jnp.zeros(len(states))

    states = HiddenStates((HiddenSite("s", (0, 1), (4, number), 1),), 4)
    drawn = np.asarray(draw_states(terms, states, number, random.key(0)))
    values, p = paths_of(y, stay, height)
    counts = np.array([(drawn == path).all(1).sum() for path in values])
    assert surprise(counts, number * p, number * p * (1 - p)) < 4
    _, wrong = paths_of(y[::-1], stay, height)
    assert surprise(counts, number * wrong, number * wrong * (1 - wrong)) > 10


@pytest.fixture(scope="module")
def run():
    kernel = CCAdL(hmm, progress_bar=False)
    return run_mcmc(kernel, Y, warmup=300, samples=2_000, chains=4)


def exact_moments():
    """Means and standard deviations of both probabilities and the height, on a grid."""
    grids = np.linspace(0.7, 0.99, 16), np.linspace(0.35, 0.95, 16), np.linspace(1.1, 1.9, 14)
    log_p = np.zeros([len(x) for x in grids])
    for i, j, k in np.ndindex(log_p.shape):
        a, b, height = grids[0][i], grids[1][j], grids[2][k]
        prior = np.log(a * (1 - a) * b * (1 - b)) - height**2 / 8
        log_p[i, j, k] = prior + enumerated(Y, (a, b), height).sum()
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    for axis in range(3):  # the grid reaches as far as the density
        edges = np.moveaxis(p, axis, 0)[[0, -1]].sum((1, 2))
        assert edges.max() < 1e-4
    meshes = np.meshgrid(*grids, indexing="ij")
    means = np.array([(p * x).sum() for x in meshes])
    return means, np.array(
        [(p * (x - m) ** 2).sum() for x, m in zip(meshes, means, strict=True)]
    ) ** 0.5


@pytest.mark.nightly
def test_law_of_two_states(run):
    found = run.get_samples(group_by_chain=True)
    stay, height = (np.asarray(found[k], float) for k in ("stay", "height"))
    draws = np.concatenate([stay, height[..., None]], axis=-1)
    mean, sd = exact_moments()
    size = effective_sample_size(draws)
    assert size.min() > 1_000
    assert (np.abs(draws.mean((0, 1)) - mean) / (sd / size**0.5)).max() < 4
    assert (np.abs(draws.std((0, 1)) / sd - 1) < 4 / (2 * size) ** 0.5).all()


@pytest.mark.slow
def test_states_after_a_run(run):
    """Paths of states of two series, given the draws of the other sites."""
    chosen = [3, 7]
    found = local_draws(run, chosen, num_draws=1_000, rng_key=random.key(5))["state"]
    assert found.dims == ("chain", "draw", "series", "state_dim_0")
    taken = np.asarray(found.coords["draw"])
    samples = run.get_samples(group_by_chain=True)
    stay, height = (np.asarray(samples[k])[:, taken] for k in ("stay", "height"))
    stay, height = stay.reshape(-1, 2), height.ravel()
    for k, series in enumerate(chosen):
        drawn = found.values[:, :, k].reshape(-1, TIMES)
        p = np.array([paths_of(Y[series], a, h)[1] for a, h in zip(stay, height, strict=True)])
        counts = np.array([(drawn == path).all(1).sum() for path in paths_of(Y[0], stay[0], 1)[0]])
        assert surprise(counts, p.sum(0), (p * (1 - p)).sum(0)) < 4


# --- results


@pytest.fixture(scope="module")
def short_run():
    kernel = CCAdL(hmm, progress_bar=False)
    return run_mcmc(kernel, Y[:60], warmup=10, samples=20, chains=2)


@pytest.mark.nightly
def test_results_name_times_and_series(short_run):
    """The times of a ``scan`` are before the series, and have no name of a plate."""
    data = to_arviz(short_run, posterior_predictive=True, log_likelihood=True)
    assert data.posterior_predictive["y"].dims == ("chain", "draw", "y_dim_0", "series")
    assert data.observed_data["y"].dims == ("y_dim_0", "series")
    (likelihood,) = data.log_likelihood.data_vars.values()
    assert likelihood.dims[:3] == ("chain", "draw", "series")
    with pytest.warns(UserWarning, match="7 of 60 rows"):
        some = to_arviz(short_run, rows=7, log_likelihood=True)
    observed = some.observed_data["y"]
    assert observed.dims == ("y_dim_0", "series") and observed.shape == (TIMES, 7)
    with pytest.warns(UserWarning, match="Pareto"):  # of 40 draws
        loo(short_run)


def test_axes_of_plates():
    """Of sample and deterministic sites, in a ``scan`` and outside, with axes of their own."""
    series = numpyro.plate("series", 4)

    def body(carry, _):
        with series:
            numpyro.sample("states", dist.Normal(jnp.zeros(4), 1))
            numpyro.deterministic("levels", jnp.zeros(4))
            numpyro.deterministic("wide levels", jnp.zeros((4, 3)))
        return carry, None

    def model():
        with series:
            numpyro.deterministic("level", jnp.zeros(4))
            numpyro.deterministic("wide", jnp.zeros((4, 3)))
            numpyro.deterministic("one", jnp.zeros(()))
        scan(body, 0.0, None, length=5)

    sites = trace(seed(model, 0)).get_trace()
    axes = {
        name: plate_axes(site).get("series") for name, site in sites.items() if name != "series"
    }
    in_scan = dict.fromkeys(("states", "levels", "wide levels"), 1)
    assert axes == {"level": 0, "wide": 0, "one": None} | in_scan


@pytest.mark.nightly
def test_predictions_of_series(short_run):
    new = predict(short_run, Y[60:66], known_groups=-1, num_draws=10)["y"]
    assert new.dims == ("chain", "draw", "y_dim_0", "series") and new.shape[2:] == (TIMES, 6)
    known = predict(short_run, Y[:60], known_groups=np.arange(60), num_draws=20)["y"]
    # a state that is certain shows in the rows
    high = np.asarray(Y[:60]).T > 3
    assert known.values[:, :, high].mean() > known.values.mean() + 0.3
    backwards = predict(short_run, Y[59::-1], known_groups=np.arange(60)[::-1], num_draws=20)["y"]
    assert backwards.values[:, :, high[:, ::-1]].mean() > known.values.mean() + 0.3
    predictive_checks(short_run)
