# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What judges a run after its end: against known laws, and against other software."""

from functools import partial
from pathlib import Path
import re
import warnings

import arviz as az
from generations import FIRST_GENERATION, arviz_marks
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
import pytest
from runs import run_mcmc, with_draws
from scipy import stats
from scipy.signal import lfilter
from small_models import means
import xarray as xr

from numpyro_sgmcmc import (
    SGHMC,
    SGLD,
    CCAdL,
    compare,
    configurational_temperature,
    kernel_stein_discrepancy,
    kinetic_temperature,
    moments,
    stein_matrix,
    summary,
    to_arviz,
)
from numpyro_sgmcmc.diagnostics._posterior_score import RunModel, Scores, scores_of
from numpyro_sgmcmc.diagnostics.discrepancy import _sums, discrepancy_of
from numpyro_sgmcmc.diagnostics.runs import group
from numpyro_sgmcmc.diagnostics.summary import _HEADINGS
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.stein import stein_report
from numpyro_sgmcmc.tuning.tuning import Tuning

COMPILE_QUICKLY = True
pytestmark = arviz_marks("The draws do not have the law")


N, BATCH, D = 400, 100, 3
Y = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
PRECISION = N + 0.01  # of the posterior of each mean


model = partial(means, batch_size=BATCH)


run = partial(run_mcmc, warmup=200, samples=1_000, chains=4)


def sgld(scaled, **options):
    """SGLD at a step size of `scaled` in units of the inverse precision."""
    return SGLD(model, scaled / PRECISION, steps_per_sample=10, **options)


def as_arviz(draws, attrs=None):
    groups = {"posterior": draws}
    data = az.from_dict(**groups) if FIRST_GENERATION else az.from_dict(groups)
    data.attrs.update(attrs or {})
    return data


def normal_scores(count, size, scale=1.0, key=0, chains=1):
    """Independent draws of N(0, scale^2) and the scores of N(0, I)."""
    draws = np.random.default_rng(key).standard_normal((chains, count, size)) * scale
    labels = [f"x[{k}]" for k in range(size)]
    return Scores(draws, -draws, True, labels, ["x"] * size)


@pytest.fixture(scope="module")
def good():
    return run(CCAdL(model, 0.3 / N**0.5, 2 * N**0.5, steps_per_sample=5), Y, fields=FIELDS)


FIELDS = ("kinetic_temperature", "thermostat")


@pytest.fixture(scope="module")
def wide():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(sgld(0.5), Y)


@pytest.fixture(scope="module")
def nuts():
    return run(NUTS(means), jnp.asarray(Y), None, warmup=300, fields=("num_steps",))


# The kernel Stein discrepancy


@pytest.mark.parametrize("double", [False, True])
def test_discrepancy_equals_that_of_stein_thinning(double):
    other = pytest.importorskip("stein_thinning.stein")
    kernel = pytest.importorskip("stein_thinning.kernel")
    found = normal_scores(300, 7, 1.3)
    draws, scores = found.positions[0], found.scores[0]
    k0 = kernel.make_imq(draws, "id")

    def pairs(one, two):
        return k0(draws[one], draws[two], scores[one], scores[two])

    theirs = other.ksd(pairs, len(draws))[-1]
    with jax.enable_x64(double):
        ours = discrepancy_of(found, np.ones(7), "V")
    assert ours.value == pytest.approx(theirs, rel=1e-10 if double else 1e-5)
    # and in coordinates in which a correlated covariance is the identity
    covariance = np.cov(np.random.default_rng(1).standard_normal((7, 20)))
    root = np.real(np.asarray(np.linalg.cholesky(covariance)))
    moved = found._replace(
        positions=found.positions @ root.T, scores=found.scores @ np.linalg.inv(root)
    )
    with jax.enable_x64(double):
        again = discrepancy_of(moved, covariance, "V")
    assert again.value == pytest.approx(theirs, rel=1e-9 if double else 1e-4)


def test_discrepancy_by_the_definition():
    """By automatic differentiation of the kernel: the Stein operator applied to both sides."""
    found = normal_scores(5, 3, 1.5)

    def k(x, y):
        return (1 + jnp.sum((x - y) ** 2)) ** -0.5

    def k0(x, y):
        mixed = jax.jacfwd(jax.grad(k, argnums=1), argnums=0)(x, y)
        return (
            jnp.trace(mixed)
            + jax.grad(k, 0)(x, y) @ -y
            + jax.grad(k, 1)(x, y) @ -x
            + k(x, y) * (x @ y)
        )

    with jax.enable_x64(True):
        draws = jnp.asarray(found.positions[0])
        matrix = np.asarray(jax.vmap(lambda x: jax.vmap(lambda y: k0(x, y))(draws))(draws))
        off = matrix - np.diag(np.diag(matrix))
        ours = discrepancy_of(found, np.ones(3))
    assert ours.squared == pytest.approx(off.sum() / 20, rel=1e-9)
    assert ours.error == pytest.approx((2 * (off**2).sum()) ** 0.5 / 20, rel=1e-9)


def test_discrepancy_of_correct_draws_is_zero():
    """The U-statistic has mean 0 and the standard deviation that it says it has."""
    found = [discrepancy_of(normal_scores(200, 4, key=k), np.ones(4)) for k in range(100)]
    z = np.array([x.squared / x.error for x in found])
    assert abs(z.mean()) < 4 / 10
    # the law is a skewed sum of chi-squares: the standard error of a variance is larger
    assert 0.6 < z.std() < 1.5
    wide = discrepancy_of(normal_scores(2_000, 4, 1.2), np.ones(4))
    assert wide.squared > 10 * wide.error


@pytest.mark.slow
def test_scores_on_minibatches_are_unbiased():
    """Of a regression with an unknown scale: not linear, so that a control variate has noise."""
    x = np.random.default_rng(1).standard_normal((500, 2)).astype(np.float32)
    y = (x[:, 0] + np.random.default_rng(2).standard_normal(500)).astype(np.float32)

    def regression(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("rows", len(y), subsample_size=50) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, scale), obs=y[i])

    rng = np.random.default_rng(3)
    draws = {
        "w": np.array([1.0, 0.0]) + 0.05 * rng.standard_normal((2, 4_000, 2)),
        "scale": 1 + 0.05 * rng.standard_normal((2, 4_000)),
    }
    data = as_arviz(draws)
    target = RunModel(regression, (x, y))
    full = scores_of(data, target, 8_000, "full")
    noisy = scores_of(data, target, 8_000, "minibatch", random.key(5))
    assert full.exact and not noisy.exact and full.labels == ["scale", "w[0]", "w[1]"]
    # the score by hand: of log scale, with the Jacobian of the transform
    w, s = draws["w"].reshape(-1, 2), draws["scale"].reshape(-1)
    away = y - w @ x.T
    by_hand = np.sum(away**2, 1) / s**2 - len(y) - s**2 + 1
    np.testing.assert_allclose(full.scores[..., 0].ravel(), by_hand, rtol=2e-3, atol=0.2)
    difference = (noisy.scores - full.scores).reshape(-1, 3)
    error = difference.std(0) / len(difference) ** 0.5
    assert np.all(error > 0)
    assert np.all(np.abs(difference.mean(0)) < 4 * error)
    one = kernel_stein_discrepancy(data, scores="full", model=regression, model_args=(x, y))
    two = kernel_stein_discrepancy(data, scores="minibatch", model=regression, model_args=(x, y))
    assert one.exact and not two.exact
    assert abs(one.squared - two.squared) < 4 * two.error


def test_memory_of_the_discrepancy_is_bounded():
    count, size = 4_000, 10
    shape = jax.ShapeDtypeStruct((count, size), jnp.float32)
    memory = _sums.lower(shape, shape, "U").compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.5 * 4 * count**2


def test_discrepancy_by_site():
    """One site is wrong, the other right, and each says so."""
    found = normal_scores(1_000, 6)
    scale = np.array([1, 1, 1, 1.3, 1.3, 1.3])
    found = Scores(found.positions * scale, -found.positions * scale, True, found.labels,
                   ["a"] * 3 + ["b"] * 3)  # fmt: skip
    whole = discrepancy_of(found, np.ones(6))
    (right, right_error), (wrong, wrong_error) = whole.blocks["a"], whole.blocks["b"]
    assert abs(right) < 4 * right_error and wrong > 8 * wrong_error


@pytest.mark.nightly
def test_discrepancy_is_that_of_the_temperature():
    # far enough apart to be independent, for which the error is
    kernel = SGLD(model, 0.01 / PRECISION, steps_per_sample=300, temperature=2.0)
    mcmc = run(kernel, Y, samples=2_000, warmup=50)
    found = kernel_stein_discrepancy(mcmc)
    assert abs(found.squared) < 6 * found.error
    draws = as_arviz({"mu": group(to_arviz(mcmc), "posterior")["mu"].values})
    cold = kernel_stein_discrepancy(draws, model=model, model_args=(Y,))
    assert cold.squared > 20 * found.error


# The Stein matrix and the temperatures


@pytest.mark.nightly
def test_stein_matrix_from_draws(good, wide, nuts):
    for mcmc in (good, nuts):
        report = stein_matrix(mcmc)
        assert report.problem() is None
        assert abs(report.temperature - 1) < 4 * report.error
    report = stein_matrix(wide)
    right = 1 / PRECISION / (1 - 0.25) * (1 + 0.25 * noise_ratio())
    np.testing.assert_allclose(report.temperature, right * PRECISION, atol=5 * report.error)
    assert "configurational temperature" in report.problem()


def noise_ratio():
    """Variance of the gradient's noise relative to the precision, for these minibatches."""
    return float(np.mean(Y.var(0, ddof=1))) * N**2 / BATCH * (1 - BATCH / N) / PRECISION


def test_stein_matrix_of_the_run_and_of_its_draws_agree(wide):
    kept = stein_report(wide.last_state.monitor.stein)
    computed = stein_matrix(wide, draws=4_000)
    error = np.hypot(kept.error, computed.error)
    assert abs(kept.temperature - computed.temperature) < 4 * error
    ratio_error = np.hypot(kept.ratio_errors, computed.ratio_errors)
    assert np.all(np.abs(kept.ratios - computed.ratios) < 4 * ratio_error)


def exact_noise(dimension):
    """Data whose gradient noise has the variance 2 times the precision, and no other."""
    y = np.random.default_rng(3).standard_normal((N, dimension))
    y = (y - y.mean(0)) / y.std(0, ddof=1)
    return (y * np.sqrt(2 * PRECISION / (N**2 / BATCH * (1 - BATCH / N)))).astype(np.float32)


#: Chains in each run, and the number of parameters.
CHAINS, PARAMETERS = 4, 5


def verdicts(kernel, num_samples, runs):
    """The verdicts of runs of 4 chains, and the median of their effective sample sizes."""
    y = exact_noise(PARAMETERS)
    mcmc = run(kernel, y, samples=num_samples, chains=runs * CHAINS)
    found = []
    for k in range(runs):
        chains = slice(CHAINS * k, CHAINS * (k + 1))
        sums = jax.tree.map(lambda x, chains=chains: x[chains], mcmc.last_state.monitor.stein)
        found.append(stein_report(sums).problem())
    draws = np.asarray(mcmc.get_samples(True)["mu"], float)
    draws = draws.reshape(runs, CHAINS, num_samples, PARAMETERS)[:20]
    sizes = [
        az.ess(xr.Dataset({"x": (("chain", "draw", "k"), x)}), method="mean")["x"].values
        for x in draws
    ]
    ratio = np.mean(draws**2) * PRECISION
    return found, float(np.median(sizes)), ratio


@pytest.mark.nightly
def test_verdict_is_calibrated():
    """Hardly ever wolf where the law is right; nearly always where variances are 10 % off."""
    h, friction = 0.5 / PRECISION**0.5, PRECISION**0.5
    right = CCAdL(model, h, friction, thermal_mass=np.inf, steps_per_sample=5)
    found, size, ratio = verdicts(right, 700, runs=200)
    assert size > 2_000 and abs(ratio - 1) < 0.02
    assert sum(problem is not None for problem in found) <= 0.02 * 200
    # (1 + h v / 2) / (1 - h / 2) = 1.1 with v = 2, in units of the precision
    step_size = 0.1 / (1 + 1.1 / 2) / PRECISION
    wrong = SGLD(model, step_size, steps_per_sample=20)
    found, size, ratio = verdicts(wrong, 900, runs=100)
    assert 1_500 < size < 2_500 and abs(ratio - 1.1) < 0.02
    assert sum(problem is not None for problem in found) >= 0.95 * 100


def test_kinetic_temperature(good):
    found = kinetic_temperature(good)
    low, high = stats.chi2.ppf([0.005, 0.995], D) / D
    np.testing.assert_allclose(found.band, (low, high))
    assert abs(found.inside - 0.99) < 4 * (0.99 * 0.01 / 2_000) ** 0.5
    # at the end of a step of NOGIN it is 1 / (1 - h^2 lambda / 4)
    expected = 1 / (1 - 0.3**2 * PRECISION / N / 4)
    assert abs(found.mean - expected) < 4 * found.error
    assert found.error < 0.03
    assert (
        abs(configurational_temperature(good).mean - 1)
        < 4 * configurational_temperature(good).error
    )


def test_temperatures_are_in_units_of_the_target():
    everything = partial(model, batch_size=N)
    kernel = SGHMC(everything, 0.3 / N**0.5, 2 * N**0.5, temperature=3.0)
    mcmc = run(kernel, Y, fields=("kinetic_temperature",))
    found = kinetic_temperature(mcmc)
    assert abs(found.mean - 1 / (1 - 0.3**2 / 4)) < 4 * found.error


def test_temperatures_that_were_not_collected(wide, nuts):
    with pytest.raises(ValueError, match=r"extra_fields=\('kinetic_temperature',\)"):
        kinetic_temperature(wide)
    with pytest.raises(ValueError, match="extra_fields"):
        configurational_temperature(nuts)
    epochs = run(sgld(0.01, subsampling="epochs"), Y, samples=100)
    with pytest.raises(ValueError, match="needs independent minibatches"):
        configurational_temperature(epochs)


# The summary


def test_summary_has_the_columns_of_arviz(good):
    found, theirs = summary(good), az.summary(to_arviz(good), round_to="none")
    assert list(found.table.columns) == [*theirs.columns, "variance_error", "mcse_variance_error"]
    np.testing.assert_allclose(found.table[theirs.columns].astype(float), theirs.astype(float))
    report = stein_report(good.last_state.monitor.stein)
    np.testing.assert_allclose(found.table["variance_error"], report.ratios - 1)
    np.testing.assert_allclose(found.table["mcse_variance_error"], report.ratio_errors)
    assert found.verdict.startswith("No problem found.")
    assert "would have been seen" in found.verdict


def test_what_the_tuning_found_is_in_the_verdict():
    tuning = Tuning(0.1 / PRECISION, None, IdentityMetric(), multimodal=True)
    mcmc = run(SGLD(model, tuning=tuning), Y, samples=2_000, warmup=50)
    assert to_arviz(mcmc).attrs["tuning_problem"] == "the posterior has several modes"
    verdict = summary(mcmc).verdict
    assert "Doubtful: the tuning found that the posterior has several modes." in verdict
    assert "No problem found" not in verdict


def test_summary_of_named_entries():
    """Rows go by their labels, whatever the order and the names of ArviZ."""

    def named(y):
        a = numpyro.sample(
            "b", dist.Normal(0, 10).expand([2, 2]).to_event(2), infer={"event_dims": ["r", "c"]}
        )
        numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(a.ravel()[:3], 1).to_event(1), obs=y[i])

    kernel = CCAdL(named, 0.03, 30.0)
    mcmc = run_mcmc(kernel, jnp.asarray(Y), warmup=50, samples=300)
    data = to_arviz(mcmc, coords={"r": ["x", "y"], "c": [3, 4]})
    found, ratios = (
        summary(data).table["variance_error"],
        stein_report(mcmc.last_state.monitor.stein).ratios,
    )
    assert found["a"] == ratios[0] - 1
    assert [found[f"b[{r}, {c}]"] + 1 for r in "xy" for c in (3, 4)] == pytest.approx(ratios[1:])
    some = summary(data, var_names=["b"]).table
    assert some["variance_error"].tolist() == found[some.index].tolist()
    with pytest.raises(ValueError, match="The verdict needs the columns"):
        summary(data, kind="stats")


def test_facts_of_a_run(good, wide, nuts):
    facts = summary(good).facts
    assert facts["passes"] == 4 * 1_200 * 5 * BATCH / N
    assert facts["step size"] == pytest.approx(0.3 / N**0.5)
    assert facts["friction"] == pytest.approx(2 * N**0.5)
    assert facts["non-finite steps"] == 0
    size = summary(good).table["ess_bulk"].min()
    assert facts["passes per effective sample"] == pytest.approx(facts["passes"] / size)
    assert "friction" not in summary(wide).facts
    leapfrogs = np.sum(np.asarray(nuts.get_extra_fields()["num_steps"]))
    assert summary(nuts).facts["passes"] == pytest.approx(leapfrogs, rel=1e-12)


@pytest.mark.nightly
def test_facts_of_a_tuned_run():
    mcmc = run(CCAdL(model, gradient="minibatch", progress_bar=False), Y, samples=500)
    tuning, facts = mcmc.sampler.tuning, summary(mcmc).facts
    assert facts["passes of the tuning"] == pytest.approx(sum(tuning.passes.values()))
    ratio = tuning.step_size * tuning.noise.mean / (2 * tuning.friction)
    assert facts["noise ratio"] == pytest.approx(ratio)
    assert ratio > 0.1


def test_verdict_of_a_run_that_is_too_wide(wide):
    found = summary(wide)
    assert found.table["r_hat"].max() < 1.01
    assert found.table["variance_error"].min() > 0.3
    assert found.verdict.startswith("Do not trust this run: the draws do not have the law")
    assert found.verdict in str(found) and found.verdict in found._repr_html_()
    assert re.search(r"\+1\.\d\d\d", str(found))


def test_verdicts():
    rng = np.random.default_rng(0)
    white = rng.standard_normal((4, 1_000, 2))
    right = summary(as_arviz({"x": white}))
    assert right.verdict.startswith("No problem found in what is known. Not known: whether the law")
    assert "nan" not in str(right)
    apart = white + np.arange(4)[:, None, None]
    assert "have not mixed: R-hat is up to" in summary(as_arviz({"x": apart})).verdict
    assert "'x[0]', 'x[1]'" in summary(as_arviz({"x": apart})).verdict
    alone = summary(as_arviz({"x": white[:1]})).verdict
    assert "whether chains agree (there is one)" in alone and "mixed" not in alone
    assert "Too short" in summary(as_arviz({"x": white[:, :30]})).verdict
    some = summary(as_arviz({"x": white, "constant": np.zeros((4, 1_000))})).verdict
    assert "whether 'constant' should be constant" in some and "Do not trust" not in some
    none = summary(as_arviz({"constant": np.zeros((4, 1_000))})).verdict
    assert "nothing ever moved" in none


@pytest.mark.nightly
def test_summary_of_sites_with_constraints(tmp_path):
    """A simplex has one parameter less than entries; a deterministic site has none."""

    def mixed(counts):
        p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        numpyro.deterministic("square", scale**2)
        with numpyro.plate("rows", len(counts), subsample_size=100) as i:
            numpyro.sample("y", dist.Categorical(p), obs=counts[i])

    counts = jnp.asarray(np.random.default_rng(0).integers(0, 3, 500))
    mcmc = run_mcmc(
        CCAdL(mixed, 0.02, 20.0, steps_per_sample=10), counts, warmup=200, samples=500, chains=2
    )
    table = summary(mcmc).table
    assert table.loc["p[0]", "variance_error"] == table.loc["p[2]", "variance_error"]
    assert np.isfinite(table.loc["p[0]", "variance_error"])
    assert np.isnan(table.loc["square", "variance_error"])
    data = to_arviz(mcmc)
    path = str(tmp_path / "run.nc")
    data.to_netcdf(path)
    stored = summary(az.from_netcdf(path))
    np.testing.assert_allclose(stored.table["variance_error"], table["variance_error"])
    assert stored.verdict == summary(mcmc).verdict and stored.line == summary(mcmc).line


@pytest.mark.nightly
def test_thinned_runs():
    mcmc = run(sgld(0.01), Y, thinning=5)
    found = summary(mcmc)
    assert found.facts["passes"] == 4 * 1_200 * 10 * BATCH / N
    assert kernel_stein_discrepancy(mcmc).draws == 800


# A table of runs


def test_compare(wide, good, nuts):
    table = compare({"wide": wide, "good": good}, nuts, discrepancy=True)
    assert list(table.index) == ["wide", "good"]
    ratio = (1 / (1 - 0.25) * (1 + 0.25 * noise_ratio())) ** 0.5
    assert abs(table.loc["wide", "sd_ratio"] - ratio) < 5 * table.loc["wide", "sd_ratio_se"]
    assert abs(table.loc["good", "sd_ratio"] - 1) < 5 * table.loc["good", "sd_ratio_se"]
    assert table.loc["wide", "sd_z"] > 5 and table.loc["good", "sd_z"] < 2.5
    assert table.loc["good", "mean_z"] < 2.5
    # between N(0, 1) and N(0, r^2) in any direction it is r - 1
    error = 5 * table.loc["wide", "sd_ratio_se"] + table.loc["wide", "wasserstein_floor"]
    assert error < 0.5 * (ratio - 1)
    assert abs(table.loc["wide", "wasserstein"] - (ratio - 1)) < error
    assert table.loc["good", "wasserstein"] < 3 * table.loc["good", "wasserstein_floor"]
    assert table.loc["wide", "ksd_squared"] > 10 * table.loc["wide", "ksd_error"]
    assert abs(table.loc["good", "ksd_squared"]) < 5 * table.loc["good", "ksd_error"]
    assert list(compare(wide, moments(nuts)).index) == ["SGLD"]
    assert list(compare(to_arviz(wide), moments(nuts)).index) == ["SGLD"]
    kept = compare({"wide": wide}, moments(nuts))
    shared = ["mean_error", "sd_ratio", "sd_z", "ess"]
    np.testing.assert_allclose(kept.loc["wide", shared].astype(float), table.loc["wide", shared])
    assert "wasserstein" not in kept


def test_compare_means():
    rng = np.random.default_rng(0)
    draws = [{"x": rng.standard_normal((4, 2_000, 2))} for _ in range(2)]
    draws[1]["x"][..., 0] = 3 * draws[1]["x"][..., 0]
    moved = {"x": draws[0]["x"] + np.array([0.3, 0.0])}
    table = compare({"moved": as_arviz(moved)}, as_arviz(draws[1]))
    row = table.loc["moved"]
    # in standard deviations of the reference, which is three times as wide there
    assert abs(row.mean_error - 0.1) < 4 * row.mean_error_se
    assert abs(row.sd_ratio - 1 / 3) < 5 * row.sd_ratio_se
    with pytest.raises(ValueError, match="differ in their variables"):
        compare({"moved": as_arviz({"y": moved["x"]})}, as_arviz(draws[1]))


# What is not a run


def test_what_is_not_a_run():
    with pytest.raises(TypeError, match="got a dict"):
        summary({"x": np.zeros(3)})
    idle = MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(ValueError, match="no draws yet: call `mcmc.run"):
        summary(idle)
    bad = np.zeros((2, 10))
    bad[0, :3] = np.inf
    with pytest.raises(ValueError, match="not finite: 3 of 'x'"):
        summary(as_arviz({"x": bad}))
    with pytest.raises(
        ValueError, match=r"\['z'\], which are no variables of the posterior; it has \['x'\]"
    ):
        summary(as_arviz({"x": np.ones((2, 10))}), var_names=["z"])


def test_what_the_score_needs(good):
    data = to_arviz(good)
    with pytest.raises(ValueError, match="`model=` and `model_args=`"):
        kernel_stein_discrepancy(data)
    with pytest.raises(ValueError, match=r"have no \['mu'\]"):
        stein_matrix(as_arviz({"x": np.zeros((1, 10))}), model=model, model_args=(Y,))
    with pytest.raises(ValueError, match="a single draw"):
        stein_matrix(as_arviz({"mu": np.ones((1, 1, D))}), model=model, model_args=(Y,))
    stuck = as_arviz({"mu": np.zeros((2, 10, D), np.float32)})
    with pytest.raises(ValueError, match="3 of 3 parameters never move"):
        stein_matrix(stuck, model=model, model_args=(Y,))
    with pytest.raises(ValueError, match="`covariance` has shape"):
        kernel_stein_discrepancy(good, covariance=np.ones(2))
    with pytest.raises(ValueError, match="smallest eigenvalue|smallest variance"):
        kernel_stein_discrepancy(good, covariance=-np.ones(D))
    with pytest.raises(ValueError, match="`scores` must be"):
        kernel_stein_discrepancy(good, scores="some")
    with pytest.raises(ValueError, match="`statistic` must be"):
        kernel_stein_discrepancy(good, statistic="W")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*No plate of the model")
def test_model_without_minibatches(nuts):
    """NUTS on a plain model: scores are on all data, and there is nothing else."""

    def plain(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10).expand([D]).to_event(1))
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y)

    mcmc = run_mcmc(NUTS(plain), jnp.asarray(Y), warmup=300, samples=500, chains=2)
    found = kernel_stein_discrepancy(mcmc, scores="minibatch")
    assert found.exact and abs(found.squared) < 5 * found.error


@pytest.mark.parametrize(
    ("memory", "attrs", "said"),
    [
        (0.99, {"promised_per_sample": 1.0, "seconds_per_sample": 0.1}, True),
        (0.99, {"promised_per_sample": 0.01, "seconds_per_sample": 0.1}, False),  # as it said
        (0.99, {}, False),  # a step size of the user's, of which nothing was promised
        (0.3, {"promised_per_sample": 1.0, "seconds_per_sample": 0.1}, False),
        (0.9, {"promised_per_sample": 0.1, "thinning": 10, "seconds_per_sample": 0.1}, True),
    ],
)
def test_a_promise_of_the_tuning_is_checked(memory, attrs, said):
    noise = np.random.default_rng(0).standard_normal((4, 1_000, 2)) * (1 - memory**2) ** 0.5
    slow = lfilter([1], [1, -memory], noise, axis=1)
    verdict = summary(as_arviz({"fast": noise, "slow": slow}, attrs)).verdict
    assert ("Slower than promised" in verdict) == said
    if said:
        assert re.search(r"promised 4,000 effective samples in .* and \d+ of 'slow\[\d\]'", verdict)


@pytest.mark.slow
def test_a_tuned_run_says_what_was_promised():
    mcmc = run(CCAdL(model, progress_bar=False), Y, samples=200)
    attrs = to_arviz(mcmc).attrs
    assert attrs["promised_per_sample"] == 1 and attrs["seconds_per_sample"] > 0
    mcmc.sampler = mcmc.sampler.with_step_size(0.5)
    assert "promised_per_sample" not in to_arviz(mcmc).attrs


def test_a_verdict_has_a_page():
    """Each beginning of a verdict is a heading there, and its address ends the verdict."""
    page = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text()
    assert re.findall("^## (.*)$", page, re.MULTILINE) == list(_HEADINGS)
    said = summary(as_arviz({"a": np.random.default_rng(0).standard_normal((1, 50))}))
    assert said.verdict.endswith("What to do: docs/verdicts.md#too-short, #not-known.")


def many(y):
    numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("columns", 3), numpyro.plate("groups", 2_000, dim=-2):
        numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=5) as i:
        numpyro.sample("y", dist.Normal(0, 1), obs=y[i])


@pytest.mark.nightly
def test_summary_of_many_entries_has_the_slowest():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 100, 2_000, 3))
    x[0, :, 1_234, 1] += 5  # chains apart
    x[:, :, 77, 2] = np.cumsum(x[:, :, 77, 2], 1)  # a random walk
    x[:, :, 1_800:2_000, 0] = 1.0
    x[..., 77, 2] += 1e5
    run = with_draws(many, (np.zeros(20, np.float32),), {"a": x, "b": rng.normal(size=(2, 100))})
    found = summary(run)
    assert len(found.table) <= 321
    wanted = {"b", "a[1234, 1]", "a[77, 2]", "a[1800, 0]", "a[0, 0]"}
    assert wanted <= set(found.table.index)
    assert "have not mixed" in found.verdict
    assert "should be constant" in found.verdict
    assert "of the 6,000 entries of 'a': an even sample, and those with" in found.verdict
    # a row is that of ArviZ
    group = xr.Dataset({"a": (("chain", "draw"), x[:, :, 77, 2].astype(np.float32))})
    row = az.summary(group, round_to="none").iloc[0]
    same = found.table.loc["a[77, 2]", row.index]
    assert np.allclose(same.astype(float), row.astype(float), rtol=1e-5)
