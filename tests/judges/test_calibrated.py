# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Intervals of a model that is wrong are those of the sandwich; those of a right one stay."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS
import pandas as pd
import pytest
from runs import run_mcmc

from numpyro_sgmcmc import (
    CCAdL,
    calibrated,
    full_data,
    local_draws,
    plot_calibrated,
    summary,
    to_arviz,
)
from numpyro_sgmcmc.diagnostics._sandwich import Sandwich
from numpyro_sgmcmc.diagnostics.runs import group
from numpyro_sgmcmc.posterior.numpyro_private import arguments, view_of

COMPILE_QUICKLY = True

ROWS, CLUSTERS = 2_000, 100
RNG = np.random.default_rng(0)
CLUSTER = np.repeat(np.arange(CLUSTERS), ROWS // CLUSTERS)
X = np.column_stack(
    [np.ones(ROWS), RNG.standard_normal(CLUSTERS)[CLUSTER], RNG.standard_normal(ROWS)]
)
EFFECT = 0.8 * RNG.standard_normal(CLUSTERS)[CLUSTER]
Y = (RNG.random(ROWS) < 1 / (1 + np.exp(-X @ [0.3, -0.5, 0.4] - EFFECT))).astype(np.float32)
WEIGHTS = np.exp(0.5 * RNG.standard_normal(ROWS))
DATA = jnp.asarray(X, jnp.float32), jnp.asarray(Y)


def logistic(x, y):
    b = numpyro.sample("b", dist.Normal(0, 30).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=200) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ b), obs=y[i])


def run_of(model, data, samples=2_000, kernel=CCAdL, **options):
    return run_mcmc(
        kernel(full_data(model) if kernel is NUTS else model, **options),
        *data,
        warmup=200,
        samples=samples,
        chains=2,
    )


@pytest.fixture(scope="module")
def run():
    return run_of(logistic, DATA, progress_bar=False)


def newton(x, y, w):
    """The mode of a weighted logistic regression, and its curvature."""
    b = np.zeros(x.shape[1])
    for _ in range(20):
        p = 1 / (1 + np.exp(-x @ b))
        curvature = (x * (w * p * (1 - p))[:, None]).T @ x
        b = b + np.linalg.solve(curvature, x.T @ (w * (y - p)))
    return b, curvature, x * (w * (y - p))[:, None]


def closed_form(weights=None, clusters=None, sampled=1.0):
    """Mode and sandwich of a logistic regression with a flat prior."""
    w = np.ones(ROWS) if weights is None else weights / weights.mean()
    mode, curvature, scores = newton(X, Y, w)
    if clusters is not None:
        scores = np.stack([scores[clusters == g].sum(0) for g in np.unique(clusters)])
    count = len(scores)
    correction = count / (count - 1) * (ROWS - 1) / (ROWS - 3) * sampled
    bread = np.linalg.inv(curvature)
    return mode, bread @ (correction * scores.T @ scores) @ bread


CASES = {
    "rows": {},
    "clusters": {"clusters": CLUSTER},
    "named clusters": {"clusters": np.array([f"school {k}" for k in CLUSTER])},
    "weights": {"weights": 7 * WEIGHTS},
    "weights and clusters": {"weights": WEIGHTS, "clusters": {"rows": CLUSTER}},
    "a known part": {"clusters": CLUSTER, "population": 2 * CLUSTERS},
}


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_the_sandwich(run, case):
    """Means and covariances of the draws, up to what is random in those of the run."""
    options = CASES[case]
    found = calibrated(run, **options)
    clusters = CLUSTER if "clusters" in options else None
    weights = options.get("weights")
    mode, expected = closed_form(weights, clusters, 0.5 if "population" in options else 1.0)
    bread = np.linalg.inv(newton(X, Y, np.ones(ROWS))[1])
    before, after = (np.asarray(m.get_samples()["b"], float) for m in (run, found.mcmc))
    size, sd = len(before), np.sqrt(np.diag(expected))
    shift = before.mean(0) - newton(X, Y, np.ones(ROWS))[0]
    assert np.abs(shift / np.sqrt(np.diag(bread))).max() < 0.1
    assert np.abs((after.mean(0) - mode - (0 if weights is not None else shift)) / sd).max() < 0.02
    # what the draws have of covariance by chance is stretched with them
    whitened = np.linalg.solve(np.linalg.cholesky(bread), (before - before.mean(0)).T)
    assert np.abs(whitened @ whitened.T / size - np.eye(3)).max() < 0.1
    ratio = after.std(0) / before.std(0)
    np.testing.assert_allclose(ratio, np.sqrt(np.diag(expected) / np.diag(bread)), rtol=0.03)
    np.testing.assert_allclose(found.table["ratio"], ratio, rtol=1e-4)
    if case == "clusters":
        assert found.p_value < 0.001 and "clusters do not vary as the model says" in found.verdict
        assert ratio[:2].min() > 1.3 and "too narrow" in str(found)
    if case == "rows":
        assert found.p_value > 0.01 and "vary as the model says" in found.verdict
        np.testing.assert_allclose(found.table["ratio"], 1, atol=0.05)


@pytest.mark.parametrize("is_right", [True, False])
def test_what_is_said_of_the_ratio(is_right):
    """Its standard error, over many data sets, in which the curvature varies with the scores."""
    rng, ratios, errors = np.random.default_rng(5), [], []
    for _ in range(300):
        x = rng.standard_normal((500, 2)) @ np.array([[1.0, 0.5], [0.0, 1.0]])
        y = rng.random(500) < 1 / (1 + np.exp(-x @ [1.0, -0.5]))
        w = np.ones(500) if is_right else np.exp(0.5 * rng.standard_normal(500))
        mode, curvature, scores = newton(x, y, w)
        p = 1 / (1 + np.exp(-x @ mode))
        inverse = np.linalg.inv(curvature)
        factor = np.linalg.cholesky(inverse)
        alone = factor @ factor.T / np.linalg.norm(factor, axis=1)
        bends = (x @ alone) ** 2 * (w * p * (1 - p))[:, None]
        scores = scores - scores.mean(axis=0)
        found = Sandwich(
            mode, factor, scores @ factor, bends, np.zeros((2, 2)), np.zeros(2), 1.0, 1.0
        )
        stretched = found.stretch @ inverse @ found.stretch.T
        ratios.append(np.sqrt(np.diag(stretched) / np.diag(inverse)))
        errors.append(found.error_of(np.eye(2)))
    np.testing.assert_allclose(np.std(ratios, axis=0), np.mean(errors, axis=0), rtol=0.25)


@pytest.mark.parametrize("few", [True, False])
def test_the_size_of_the_test(few):
    """Of right models, one in twenty: no more by much, whether clusters are few or many."""
    rng, rejected, size = np.random.default_rng(6), 0, 30 if few else 500
    for _ in range(300):
        scores = rng.standard_normal((size, 2)) / size**0.5
        scores -= scores.mean(axis=0)
        bends = np.full((size, 2), 1.0 / size)
        found = Sandwich(
            np.zeros(2), np.eye(2), scores, bends, np.zeros((2, 2)), np.zeros(2), 1.0, 1.0
        )
        rejected += found.test()[2] < 0.05
    assert rejected <= 300 * 0.05 + 4 * (300 * 0.05 * 0.95) ** 0.5
    twice = found._replace(scores=1.5 * scores)
    assert twice.test()[2] < 0.05


def test_few_clusters_are_shrunk():
    """Towards a multiple of the identity; of many the covariance is as it is."""
    rng = np.random.default_rng(7)
    for size, same in ((40, False), (4_000, True)):
        scores = rng.standard_normal((size, 20)) / size**0.5
        scores -= scores.mean(axis=0)
        none = np.zeros((20, 20))
        found = Sandwich(np.zeros(20), np.eye(20), scores, scores, none, none[0], 1.0, 1.0)
        away = np.abs(found.meat - np.cov(scores.T, bias=True) * size).max()
        assert (away < 1e-10) == same
        assert np.linalg.eigvalsh(found.meat).min() > 0.3


@pytest.mark.nightly
def test_a_prior_is_as_if_seen():
    """What no row says anything of has the width of its prior, whatever rows vary by."""
    y = 2 * RNG.standard_normal(1_000)

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        other = numpyro.sample("other", dist.Normal(0, 3))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(mu + other, 1), obs=y[i])

    found = calibrated(run_of(model, (jnp.asarray(y, jnp.float32),), 500, NUTS))
    np.testing.assert_allclose(found.table["ratio"], 1, atol=0.02)
    total = sum(np.asarray(found.mcmc.get_samples()[name]) for name in ("mu", "other"))
    assert abs(total.std() / (2 / 1_000**0.5) - 1) < 0.15


def heteroscedastic(x, y, batch=100):
    b = numpyro.sample("b", dist.Normal(0, 10).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    numpyro.deterministic("signal", b[1] / sigma)
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ b, sigma), obs=y[i])


@pytest.fixture(scope="module")
def constrained():
    x = np.column_stack([np.ones(1_000), RNG.standard_normal(1_000)])
    y = x @ [1.0, 2.0] + np.exp(0.7 * x[:, 1]) * RNG.standard_normal(1_000)
    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return run_of(heteroscedastic, data, 500, NUTS)


@pytest.mark.nightly
def test_constrained_sites_and_what_follows_from_them(constrained):
    """Of a run of NUTS: its model has the rows."""
    found = calibrated(constrained)
    draws = found.mcmc.get_samples()
    np.testing.assert_allclose(draws["signal"], draws["b"][:, 1] / draws["sigma"], rtol=1e-5)
    assert draws["sigma"].min() > 0
    assert list(found.table.index) == ["b[0]", "b[1]", "sigma", "signal"]
    assert found.table["ratio"]["b[1]"] > 1.2 and found.p_value < 0.001
    assert (found.table["ratio_error"] > 0).all()


@pytest.mark.arviz
def test_results(constrained, tmp_path):
    """An ArviZ object that says what it is, a column in the summary, and a picture."""
    found = calibrated(constrained)
    data = to_arviz(found.mcmc, log_likelihood=True)
    assert data.attrs["calibrated"] == "sandwich" and data.attrs["algorithm"] == "NUTS"
    posterior = group(data, "posterior")
    np.testing.assert_allclose(
        posterior["sigma"].values.std(), found.table["calibrated_sd"]["sigma"], rtol=1e-4
    )
    table = summary(constrained, calibrated=found).table
    np.testing.assert_array_equal(table["calibrated_sd"], found.table["calibrated_sd"])
    assert "calibrated_sd" in str(summary(constrained, calibrated=found))
    assert "<table" in found._repr_html_() and str(found) == repr(found)
    ax = plot_calibrated(found)
    assert [text.get_text() for text in ax.get_yticklabels()] == list(found.table.index)
    ax.figure.savefig(tmp_path / "picture.png")


@pytest.mark.nightly
def test_latent_variables_of_groups():
    """A group is a row, and its effects keep their conditional law."""
    groups = 500
    y = 1 + RNG.standard_normal(groups)[:, None] + RNG.standard_t(3, (groups, 5))

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfNormal(2))
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        with numpyro.plate("groups", groups, subsample_size=100) as g:
            a = numpyro.sample("a", dist.Normal(mu, tau))
            with numpyro.plate("members", 5):
                numpyro.sample("y", dist.Normal(a, sigma), obs=y[g].T)

    mcmc = run_of(model, (jnp.asarray(y, jnp.float32),), 500, progress_bar=False)
    found = calibrated(mcmc)
    assert found.clusters == groups and found.table["ratio"]["sigma"] > 1.2
    effects = [local_draws(m, groups=20, num_draws=500)["a"] for m in (mcmc, found.mcmc)]
    means = [x.mean(("chain", "draw")).values for x in effects]
    assert np.abs(means[0] - means[1]).max() < 0.2


def test_weights_that_move_the_mode_far(constrained):
    """Also from where the weighted potential does not curve upward: a mode of least squares."""
    x, y = (np.asarray(a, float) for a in arguments(constrained)[0])
    weights = np.exp(3 * (y > np.quantile(y, 0.9)))
    found = calibrated(constrained, weights=weights)
    w = weights / weights.mean()
    expected = np.linalg.solve((x * w[:, None]).T @ x, (x * w[:, None]).T @ y)
    draws = np.asarray(found.mcmc.get_samples()["b"])
    assert (np.abs(draws.mean(0) - expected) < 0.02 * draws.std(0) + 1e-3).all()
    with pytest.raises(ValueError, match="was not found in 20 Newton steps"):
        calibrated(constrained, weights=np.where(np.arange(1_000) == 0, 1e20, 1e-20))


@pytest.mark.nightly
def test_rows_in_two_plates(constrained):
    """Clusters go across them, as if all rows were in one."""
    x, y = arguments(constrained)[0]
    clusters = np.arange(1_000) % 200

    def halves(x, y):
        b = numpyro.sample("b", dist.Normal(0, 10).expand([2]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        for k, rows in enumerate((slice(0, 400), slice(400, 1_000))):
            with numpyro.plate(f"rows {k}", len(y[rows]), subsample_size=100) as i:
                law = dist.Normal(x[rows][i] @ b, sigma)
                numpyro.sample(f"y {k}", law, obs=y[rows][i])

    both = {"rows 0": clusters[:400], "rows 1": clusters[400:]}
    found = calibrated(run_of(halves, (x, y), 500, NUTS), clusters=both)
    one = calibrated(constrained, clusters=clusters)
    assert found.clusters == one.clusters == 200
    names = ["b[0]", "b[1]", "sigma"]
    np.testing.assert_allclose(found.table["ratio"][names], one.table["ratio"][names], rtol=0.05)
    with pytest.raises(ValueError, match="Give `clusters` as a dict by plate"):
        calibrated(found.run, clusters=clusters)


def without_rows(x, y):
    b = numpyro.sample("b", dist.Normal(0, 30).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


BAD = {
    "another length": (
        {"clusters": CLUSTER[:-1]},
        r"shape \(1999,\), but the plate has 2,000 rows",
    ),
    "one cluster": ({"clusters": np.zeros(ROWS, int)}, "a single cluster, 0, which"),
    "few clusters": ({"clusters": CLUSTER % 3}, "3 clusters are too few .* of 3 parameters"),
    "weights of zero": (
        {"weights": WEIGHTS * (CLUSTER > 0)},
        "20 are not; the first is 0.0 in row 0",
    ),
    "negative weights": ({"weights": -WEIGHTS}, "2,000 are not"),
    "no number": ({"weights": np.full(ROWS, np.nan)}, "nan in row 0"),
    "an unknown plate": ({"clusters": {"row": CLUSTER}}, r"names the plates \['row'\]"),
    "a small population": ({"population": 100}, "is 100, but the data alone have 2,000"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(run, case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        calibrated(run, **options)


@pytest.mark.nightly
def test_runs_that_cannot_be_calibrated(run):
    with pytest.raises(ValueError, match="no plate with a `subsample_size`"):
        calibrated(run_of(without_rows, DATA, 4, NUTS))
    draws = run.get_samples(group_by_chain=True)["b"]
    apart = jnp.array([-1.0, 1.0])[:, None, None] + draws
    two_modes = view_of(run, run.sampler.model, {"b": apart}, DATA, {})
    with pytest.raises(ValueError, match="The chains do not agree: R-hat"):
        calibrated(two_modes)
    far = view_of(run, run.sampler.model, {"b": 1e3 * draws}, DATA, {})
    with pytest.raises(ValueError, match="standard deviations from the point of zero gradient"):
        calibrated(far)
    hot = run_mcmc(
        CCAdL(logistic, step_size=0.01, friction=10.0, temperature=2.0), *DATA, warmup=2, samples=4
    )
    with pytest.raises(ValueError, match="temperature=2.0"):
        calibrated(hot)


@pytest.mark.parametrize("samples", [1, 2, 49])
def test_few_draws_say_nothing_of_intervals(run, samples):
    draws = run.get_samples(group_by_chain=True)["b"][:, :samples]
    few = view_of(run, run.sampler.model, {"b": draws}, DATA, {})
    with pytest.raises(ValueError, match=f"has {2 * samples} draws of .*`calibrated` needs 100"):
        calibrated(few)


@pytest.mark.parametrize(
    ("kind", "missing"), [(float, np.nan), (object, None), (object, pd.NA), ("M8[D]", "NaT")]
)
def test_rows_of_no_cluster(run, kind, missing):
    clusters = CLUSTER.astype("M8[D]" if kind == "M8[D]" else kind)
    clusters[[7, 12]] = missing
    with pytest.raises(ValueError, match="`clusters` .* missing for 2 rows, the first is row 7"):
        calibrated(run, clusters)


def test_clusters_of_numbers_and_words(run):
    """One and "1" are two of them."""
    mixed = np.where(CLUSTER < 50, CLUSTER, "").astype(object)
    mixed[CLUSTER < 50] = CLUSTER[CLUSTER < 50]
    mixed[CLUSTER >= 50] = [str(k - 50) for k in CLUSTER[CLUSTER >= 50]]
    assert calibrated(run, mixed).clusters == CLUSTERS


def bounded(site, prior, likelihood):
    def model(y):
        value = numpyro.sample(site, prior)
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", likelihood(value), obs=y[i])

    return model


NOISE = np.random.default_rng(1).standard_normal(1_000).astype(np.float32)
BEYOND = {
    "a mean beyond its bound": ("mu", dist.Uniform(0, 3), lambda m: dist.Normal(m, 1), NOISE + 3.3),
    "a mean below zero": ("mu", dist.HalfNormal(1), lambda m: dist.Normal(m, 1), NOISE - 0.5),
    "a scale beyond its bound": ("s", dist.Uniform(0, 1), lambda s: dist.Normal(0, s), 1.5 * NOISE),
    "a share beyond its bound": (
        "p", dist.Uniform(0, 0.2), dist.Bernoulli, (NOISE > 0).astype(np.float32)
    ),
    "a narrow prior": ("mu", dist.Normal(0, 0.01), lambda m: dist.Normal(m, 1), NOISE + 3),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("case", BEYOND)
def test_rows_that_contradict_the_prior(case):
    """At a bound the draws have a width that has nothing to do with that of an estimate."""
    site, prior, likelihood, y = BEYOND[case]
    run = run_of(bounded(site, prior, likelihood), (y,), 200, NUTS)
    said = f"contradict each other: the rows alone put '{site}' .* standard errors away"
    with pytest.raises(ValueError, match=said):
        calibrated(run)


@pytest.mark.nightly
def test_rows_near_a_bound_and_priors_that_say_much():
    near = bounded("mu", dist.Uniform(0, 3), lambda m: dist.Normal(m, 1))
    found = calibrated(run_of(near, (NOISE - NOISE.mean() + 2.9,), 500, NUTS))
    assert 0.8 < found.table["ratio"]["mu"] < 1.2
    informed = bounded("mu", dist.Normal(0.02, 0.03), lambda m: dist.Normal(m, 1))
    assert calibrated(run_of(informed, (NOISE,), 500, NUTS)).table["ratio"]["mu"] > 0.8


def crossed(y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", 40, subsample_size=10) as i:
        with numpyro.plate("columns", 30, subsample_size=10) as j:
            numpyro.sample("y", dist.Normal(b, 1), obs=y[j][:, i])


def test_rows_of_two_plates():
    y = jax.random.normal(random.key(0), (30, 40))
    mcmc = run_mcmc(CCAdL(crossed, step_size=0.01, friction=10.0), y, warmup=2, samples=4)
    with pytest.raises(ValueError, match="Site 'y' is inside of several subsampled plates"):
        calibrated(mcmc)
