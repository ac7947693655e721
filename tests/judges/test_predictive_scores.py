# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Scores of the mixture of all draws against brute force in double precision, and closed forms."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
import pytest
from scipy import special, stats

from numpyro_sgmcmc import SGLD, RowsOnDisk, full_data, predictive_scores
from numpyro_sgmcmc.diagnostics import _predictive_mixture
from numpyro_sgmcmc.results import parts

COMPILE_QUICKLY = True

RNG = np.random.default_rng(0)
ROWS, DRAWS = 400, 1_500
X = RNG.standard_normal((ROWS, 3)).astype(np.float32)
W = (np.array([1.0, 0.5, 0.0]) + 0.3 * RNG.standard_normal((DRAWS, 3))).astype(np.float32)
Y = (X @ W[0] + RNG.standard_normal(ROWS)).astype(np.float32)
LEVELS = np.arange(1, 20) / 20


def linear(x, y=None, scale=1.0, batch_size=1_000):
    """With minibatches of more rows than are held out, and a site that depends on all rows."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        mean = numpyro.deterministic("mean", x[i] @ w)
        numpyro.sample("y", dist.Normal(mean, scale), obs=None if y is None else y[i])


def classes(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 4]).to_event(2))
    with numpyro.plate("rows", x.shape[0], subsample_size=50):
        logits = numpyro.subsample(x, event_dim=1) @ w
        numpyro.sample("y", dist.Categorical(logits=logits), obs=numpyro.subsample(y, event_dim=0))


def of_laws(law):
    """A model of rows with this law, given a number."""

    def model(y):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0], subsample_size=10) as i:
            numpyro.sample("y", law(a), obs=y[i])

    return model


def coverage_error(pit):
    covered = [np.mean(np.abs(2 * pit - 1) <= level) for level in LEVELS]
    return np.mean(np.abs(covered - LEVELS))


def column(found, name):
    return found.pointwise[name].values


@pytest.fixture(scope="module")
def found():
    return predictive_scores((linear, {"w": W, "mean": np.zeros((DRAWS, 7))}), X, y=Y)


def test_numbers_against_brute_force(found):
    """On the same draws; of the ranked score by the distances of all pairs of many more draws."""
    mean = X.astype(float) @ W.T.astype(float)
    expected = special.logsumexp(stats.norm.logpdf(Y[:, None], mean), axis=1) - np.log(DRAWS)
    np.testing.assert_allclose(column(found, "log_predictive_density"), expected, atol=2e-5)
    np.testing.assert_allclose(column(found, "mean"), mean.mean(1), atol=1e-4)
    pit = stats.norm.cdf(Y[:, None], mean).mean(1)
    np.testing.assert_allclose(column(found, "pit"), pit, atol=1e-5)
    table = found.table["score"]
    np.testing.assert_allclose(table["log_predictive_density"], expected.mean(), atol=1e-5)
    rmse = np.sqrt(np.mean((Y - mean.mean(1)) ** 2))
    np.testing.assert_allclose(table["rmse"], rmse, rtol=1e-5)
    np.testing.assert_allclose(table["calibration_error"], coverage_error(pit), atol=1e-6)
    # E|Y - y| of a mixture of normal laws in closed form, and of half as many pairs of draws
    from_y = folded(mean - Y[:, None], 1.0).mean(1)
    pairs = [np.mean(folded(m[:, None] - m[None], 2**0.5)) for m in mean[:40, ::3]]
    z = (column(found, "crps")[:40] - from_y[:40] + np.array(pairs) / 2) * 1_000**0.5 / 0.8
    assert np.abs(z).max() < 4 and np.abs(z.mean()) < 4 / 40**0.5
    assert found.facts == {"site": "y", "rows": 400, "draws": 1_500, "predictive draws": 1_000}
    assert "rows 400, draws 1,500" in str(found) and "rmse" in found._repr_html_()


def folded(mean, scale):
    """The mean of the absolute value of a normal law."""
    return scale * (2 / np.pi) ** 0.5 * np.exp(-((mean / scale) ** 2) / 2) + mean * (
        1 - 2 * stats.norm.cdf(-mean / scale)
    )


def test_the_estimator_of_the_ranked_score():
    """By the distances of all pairs of the same predictive draws."""
    y = RNG.standard_normal(5)
    drawn = RNG.standard_normal((30, 2, 5)) - y
    got = _predictive_mixture._of_numbers({}, jnp.asarray(drawn), jnp.zeros(5), False)
    flat = drawn.reshape(60, 5)
    pairs = np.abs(flat[:, None] - flat[None]).sum((0, 1)) / (60 * 59)
    np.testing.assert_allclose(got["crps"], np.abs(flat).mean(0) - pairs / 2, atol=1e-5)
    np.testing.assert_allclose(got["below"], (flat < 0).mean(0), atol=1e-6)


def test_closed_forms_of_a_conjugate_model():
    """Posterior draws of the mean: the predictive law is normal, with both variances."""
    train, test = RNG.normal(2, 1, 4), RNG.normal(2, 1, 300).astype(np.float32)
    center, sd = train.sum() / (4 + 0.01), (4 + 0.01) ** -0.5
    draws = (center + sd * RNG.standard_normal(50_000)).astype(np.float32)
    got = predictive_scores((of_laws(lambda a: dist.Normal(a, 1)), {"a": draws}), test)
    law = stats.norm(center, np.sqrt(1 + sd**2))
    # the standard error of a mean of densities over the draws
    density = stats.norm.pdf(test[:, None], draws[:2_000])
    error = density.std(1) / density.mean(1) / 50_000**0.5
    z = (column(got, "log_predictive_density") - law.logpdf(test)) / error
    assert np.abs(z).max() < 4
    np.testing.assert_allclose(column(got, "pit"), law.cdf(test), atol=4 * 0.5 / 50_000**0.5)
    u = (test - center) / law.std()
    crps = law.std() * (u * (2 * stats.norm.cdf(u) - 1) + 2 * stats.norm.pdf(u) - np.pi**-0.5)
    # of the absolute distance, and of half the mean distance, of a thousand draws
    away = (column(got, "crps") - crps) / law.std() * 1_000**0.5
    assert np.abs(away).max() < 4.5 and np.abs(away.mean()) < 4 / 300**0.5
    se = np.std(law.logpdf(test), ddof=1) / 300**0.5
    np.testing.assert_allclose(got.table["se"]["log_predictive_density"], se, rtol=1e-2)


@pytest.mark.parametrize("law", ["logits", "probs", "bernoulli"])
def test_classes_against_brute_force(law):
    a = RNG.normal(0, 1, (60, 1)) + RNG.normal(0, 0.3, (60, 30))
    if law == "bernoulli":
        p = special.expit(a)[..., None] * [-1, 1] + [1, 0]
    else:
        p = special.softmax(a[..., None] * [-1, 0, 0.5, 2], axis=-1)
    y = RNG.integers(p.shape[-1], size=60)

    def model(y):
        effects = numpyro.sample("effects", dist.Normal(0, 1).expand([60]).to_event(1))
        slopes = jnp.array([-1.0, 0.0, 0.5, 2.0])
        with numpyro.plate("rows", 60, subsample_size=10) as i:
            logits = effects[i, None] * slopes
            fn = {
                "logits": lambda: dist.Categorical(logits=logits),
                "probs": lambda: dist.Categorical(probs=jax.nn.softmax(logits)),
                "bernoulli": lambda: dist.Bernoulli(logits=effects[i]),
            }[law]()
            numpyro.sample("y", fn, obs=y[i])

    got = predictive_scores((model, {"effects": a.T.astype(np.float32)}), y)
    p = p.mean(1)
    confidence, right = p.max(1), p.argmax(1) == y
    np.testing.assert_allclose(
        column(got, "log_predictive_density"), np.log(p[np.arange(60), y]), atol=1e-5
    )
    ece = 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            ece += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    brier = np.mean(np.sum((p - np.eye(p.shape[1])[y]) ** 2, axis=1))
    table = got.table["score"]
    np.testing.assert_allclose(table["expected_calibration_error"], ece, atol=1e-5)
    np.testing.assert_allclose(table["brier"], brier, atol=1e-5)
    assert table["error_rate"] == np.mean(~right)
    assert "predictive draws" not in got.facts


def test_many_chunks_are_one(found, monkeypatch):
    monkeypatch.setattr(_predictive_mixture, "_CHUNK", 130)
    got = predictive_scores((linear, {"w": W}), X, Y)
    for name in ("log_predictive_density", "mean", "pit", "observed"):
        np.testing.assert_allclose(column(got, name), column(found, name), atol=2e-6)
    # the predictive draws are others
    assert np.abs(column(got, "crps") - column(found, "crps")).max() < 8 * 0.8 / 1_000**0.5


def test_nothing_is_of_draws_times_rows(monkeypatch):
    """No array of the program is as large as the draws of all rows."""
    monkeypatch.setattr(_predictive_mixture, "_CHUNK", 100)
    monkeypatch.setattr(_predictive_mixture, "_PREDICTIVE_DRAWS", 20)
    programs = []

    def recorded(function, *examples):
        programs.append(str(jax.make_jaxpr(function)(*examples)))
        return jax.jit(function)

    monkeypatch.setattr(parts, "compiled", recorded)
    predictive_scores((linear, {"w": W}), X, Y)
    assert len(programs) == 1
    for shape in set(programs[0].split("f32[")[1:]):
        sizes = [int(n) for n in shape.split("]")[0].split(",") if n]
        assert np.prod(sizes, dtype=int) <= max(W.size, X.size, 20 * 100)


@pytest.mark.parametrize("draws", [1, 3, 5_000])
def test_probabilities_that_underflow(draws):
    """Densities far below what single precision has, and means of large numbers."""
    y = np.array([2_000.0, 2_060.0], np.float32)
    a = np.full(draws, 2_000, np.float32) + np.arange(draws) % 2
    got = predictive_scores((of_laws(lambda a: dist.Normal(a, 1)), {"a": a}), y)
    expected = special.logsumexp(stats.norm.logpdf(y[:, None], a.astype(float)), axis=1)
    expected -= np.log(draws)
    np.testing.assert_allclose(column(got, "log_predictive_density"), expected, rtol=2e-6)
    np.testing.assert_allclose(column(got, "error"), a.astype(float).mean() - y, rtol=2e-6)
    assert got.facts["predictive draws"] == {1: 1_000, 3: 999, 5_000: 1_000}[draws]


def test_overconfidence_is_seen():
    """Scores of rows of the model: the right law is calibrated up to chance, a narrow one not."""
    x = RNG.standard_normal((3_000, 3)).astype(np.float32)
    y = (x @ [1, 0.5, 0] + RNG.standard_normal(3_000)).astype(np.float32)
    draws = {"w": np.array([[1, 0.5, 0]], np.float32) + np.zeros((10, 1), np.float32)}
    right, narrow = (predictive_scores((linear, draws), x, y, scale) for scale in (1.0, 0.4))
    assert narrow.table["score"]["calibration_error"] > 0.2
    of_right = right.table.loc["calibration_error"]
    assert of_right["score"] < of_right["by_chance"] + 3 * of_right["se"]
    differences = right.minus(narrow)
    z = differences["difference"] / differences["se"]
    assert z["log_predictive_density"] > 5 and z["crps"] < -5 and z["calibration_error"] < -5
    np.testing.assert_allclose(differences["difference"]["rmse"], 0, atol=1e-6)


@pytest.mark.nightly
def test_standard_errors_are_those_of_many_samples_of_rows():
    """And what calibrated laws have of calibration error is what is said to come by chance."""
    draws = {"a": RNG.normal(0, 0.2, 20).astype(np.float32)}
    laws = {
        "numbers": (lambda a: dist.Normal(a, 1), RNG.normal),
        "classes": (lambda a: dist.Bernoulli(logits=a), lambda m, s, n: RNG.random(n) < 0.5 + m),
    }
    for law, sample in laws.values():
        found = []
        for _ in range(30):
            a = RNG.choice(draws["a"], 500).astype(float)
            of_row = a if law(0.0).support.is_discrete is False else special.expit(a) - 0.5
            y = np.asarray(sample(of_row, 1, 500), np.float32)
            found.append(predictive_scores((of_laws(law), draws), y).table)
        score = np.array([t["score"] for t in found])
        se = np.mean([t["se"] for t in found], axis=0)
        names = list(found[0].index)
        for k, name in enumerate(names):
            if "calibration" in name:
                by_chance = found[0]["by_chance"][name]
                away = score[:, k].mean() - by_chance
                assert abs(away) < 4 * score[:, k].std() / 30**0.5
                # signs are not known there, and the error is too large
                assert 0.7 < se[k] / score[:, k].std() < 2.5
            else:
                assert 0.6 < se[k] / score[:, k].std() < 1.6


def test_differences_are_of_paired_rows(found):
    other = predictive_scores((linear, {"w": W[:100]}), X, Y)
    differences = found.minus(other)
    away = column(found, "log_predictive_density") - column(other, "log_predictive_density")
    row = differences.loc["log_predictive_density"]
    np.testing.assert_allclose(row["difference"], away.mean(), rtol=1e-6)
    np.testing.assert_allclose(row["se"], away.std(ddof=1) / ROWS**0.5, rtol=1e-6)
    assert row["se"] < found.table["se"]["log_predictive_density"] / 3
    # of the root mean square error, by leaving rows out
    square, others = column(found, "error") ** 2, column(other, "error") ** 2
    left_out = [
        np.sqrt((square.sum() - square[k]) / 399) - np.sqrt((others.sum() - others[k]) / 399)
        for k in range(ROWS)
    ]
    jackknife = np.std(left_out) * 399 / ROWS**0.5
    np.testing.assert_allclose(differences["se"]["rmse"], jackknife, rtol=0.02)
    assert np.all(found.minus(found) == 0)


COUNTS = {
    "poisson": (lambda a: dist.Poisson(jnp.exp(a)), lambda y, a: stats.poisson(np.exp(a))),
    "binomial": (
        lambda a: dist.Binomial(10, logits=a - 2),
        lambda y, a: stats.binom(10, special.expit(a - 2)),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", COUNTS)
def test_counts_have_a_randomised_transform(name):
    """Uniform for calibrated counts, with and without a distribution function."""
    law, exact = COUNTS[name]
    a = RNG.normal(0.5, 0.2, 1_000).astype(np.float32)
    y = exact(0, RNG.choice(a, 1_000).astype(float)).rvs(random_state=RNG)
    got = predictive_scores((of_laws(law), {"a": a}), y)
    values = exact(0, a.astype(float)[:, None])
    p = values.pmf(y).mean(0)
    np.testing.assert_allclose(column(got, "log_predictive_density"), np.log(p), atol=1e-4)
    below = values.cdf(y - 1).mean(0)
    error = 1e-4 if name == "poisson" else 4.5 * 0.5 / 1_000**0.5
    assert np.all((column(got, "pit") > below - error) & (column(got, "pit") < below + p + error))
    assert stats.kstest(column(got, "pit"), "uniform").pvalue > 0.001
    np.testing.assert_allclose(column(got, "mean"), values.mean().mean(), rtol=1e-4)
    assert list(got.table.index) == ["log_predictive_density", "rmse", "crps", "calibration_error"]


def table(y):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("times", 3, dim=-1), numpyro.plate("rows", y.shape[0], 5, dim=-2) as i:
        numpyro.sample("the/y", dist.StudentT(4.0, a, 2.0), obs=y[i])


def vectors(y):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.factor("prior", -(a[0] ** 2))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.MultivariateNormal(a, jnp.eye(3)), obs=y)


def angles(y):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.VonMises(a[0], 1.0), obs=y[:, 0])


def censored(y):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        law = dist.RightCensoredDistribution(dist.Normal(a[0], 1), y[:, 1] > 0)
        numpyro.sample("y", law, obs=y[:, 0])


@pytest.mark.nightly
def test_sites_of_other_shapes(monkeypatch):
    monkeypatch.setattr(_predictive_mixture, "_CHUNK", 6)
    y = RNG.standard_normal((14, 3)).astype(np.float32)
    a = RNG.standard_normal((30, 3)).astype(np.float32)
    got = predictive_scores((table, {"a": a}), y)
    assert got.pointwise["crps"].dims == ("rows", "times") and got.facts["rows"] == 42
    density = stats.t.pdf(y[:, None], 4, a[None].astype(float), 2).mean(1)
    np.testing.assert_allclose(
        column(got, "log_predictive_density"), np.log(density), rtol=1e-4, atol=1e-5
    )
    got = predictive_scores((vectors, {"a": a}), y)
    density = stats.norm.pdf(y[:, None], a[None].astype(float)).prod(-1).mean(1)
    np.testing.assert_allclose(column(got, "log_predictive_density"), np.log(density), rtol=1e-4)
    assert list(got.table.index) == ["log_predictive_density"]
    assert got.pointwise["observed"].dims == ("rows", "y_dim_1")
    for model in (angles, censored):
        got = predictive_scores((model, {"a": a}), y)
        assert list(got.table.index) == ["log_predictive_density"]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Deterministic sites")
def test_runs(tmp_path):
    """Of a kernel on minibatches, and of NUTS; with rows on disk; all chains are pooled."""
    x, y = X[:100], Y[:100]
    options = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    for kernel in (SGLD(linear, step_size=1e-3), NUTS(full_data(linear))):
        mcmc = MCMC(kernel, num_warmup=20, num_samples=30, **options)
        mcmc.run(random.key(0), X, Y, batch_size=40)
        got = predictive_scores(mcmc, x, y)
        assert got.facts["draws"] == 60
        w = np.asarray(mcmc.get_samples()["w"], float)
        expected = np.log(stats.norm.pdf(y[:, None], x.astype(float) @ w.T).mean(1))
        np.testing.assert_allclose(column(got, "log_predictive_density"), expected, atol=1e-4)
    np.save(tmp_path / "x.npy", x)
    on_disk = predictive_scores(mcmc, RowsOnDisk(str(tmp_path / "x.npy")), y)
    np.testing.assert_allclose(column(on_disk, "mean"), column(got, "mean"), atol=1e-5)


def two_sites(x, y):
    linear(x, y)
    numpyro.sample("z", dist.Normal(0, 1), obs=0.3)


def local(x, y, size=50):
    with numpyro.plate("rows", x.shape[0], subsample_size=size) as i:
        w = numpyro.sample("w", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(w, 1), obs=y[i])


def with_scale(x, y):
    linear(x, y, numpyro.sample("scale", dist.HalfNormal(1)))


def masked(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]), numpyro.handlers.mask(mask=x[:, 0] > 0):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


BAD = {
    "no observations": (linear, W, (X,), {}, "no observed value of any of .'y'.*Pass the obs"),
    "not observed": (linear, W, (X,), {"var_name": "y"}, "no observed value of 'y'"),
    "two sites": (two_sites, W, (X, Y), {}, r"2 observed sites, \['y', 'z'\].*`var_name='y'`"),
    "no such site": (linear, W, (X, Y), {"var_name": "u"}, r"`var_name='u'`.*\['y'\]"),
    "local": (local, W[:, 0], (X, Y), {}, r"'w' has the shape \(\).*\(400,\).*latent in .'rows'"),
    "local, as many rows": (local, W[:5, :1], (X[:1], Y[:1], 1), {}, "latent in plate 'rows'"),
    "local, integrated out": (local, None, (X, Y), {}, "latent in plate 'rows'"),
    "a site is not there": (with_scale, W, (X, Y), {}, "latent site 'scale', but.*'w'"),
    "masked": (masked, W, (X, Y), {}, "'y' is masked"),
    "not finite": (linear, np.where(W > 1.9, np.inf, W), (X, Y), {}, r"not finite.*\d+ of 'w'"),
    "in chains": (linear, W.reshape(5, 300, 3), (X, Y), {}, r"shape \(300, 3\).*shape \(3,\)"),
    "no draws": (linear, W[:0], (X, Y), {}, "one leading axis.*'w': .0,"),
    "y not finite": (linear, W, (X, np.where(Y > 1, np.nan, Y)), {}, "of 400 observations"),
    "unknown class": (
        classes,
        np.zeros((2, 3, 4), np.float32),
        (X, np.arange(ROWS) % 5),
        {},
        "80 of 400 observations of site 'y' are not among its classes.* 0 to 3.*is 4 at index .4,.",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case):
    model, w, args, kwargs, message = BAD[case]
    samples = {"u": W} if w is None else {"w": w}
    with pytest.raises(ValueError, match=f"(?s){message}"):
        predictive_scores((model, samples), *args, **kwargs)


def test_what_is_not_a_run(found):
    with pytest.raises(TypeError, match="got a dict"):
        predictive_scores({"w": W}, X, Y)
    with pytest.raises(ValueError, match="call `mcmc.run"):
        predictive_scores(MCMC(NUTS(linear), num_warmup=1, num_samples=1), X, Y)
    other = predictive_scores((linear, {"w": W[:5]}), X[:9], Y[:9])
    with pytest.raises(ValueError, match=r"shapes \(400,\) and \(9,\)"):
        found.minus(other)
    with pytest.raises(ValueError, match=r"2 of 9 observations.*same order"):
        other.minus(predictive_scores((linear, {"w": W[:5]}), X[:9], np.r_[Y[1], Y[0], Y[2:9]]))
