# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The Stein matrix: what it says of draws whose law is known."""

from functools import partial
import warnings

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
import pytest
from runs import run_mcmc
from small_models import mean, means

from numpyro_sgmcmc import SGLD, CCAdL, summary, to_arviz
from numpyro_sgmcmc.kernels.monitor import Monitor
from numpyro_sgmcmc.posterior.metric import IdentityMetric, from_covariance
from numpyro_sgmcmc.stein import (
    add_to_sums,
    batch_is_full,
    center_sums,
    close_batch,
    problem_of_undone_steps,
    start_sums,
    stein_report,
)

COMPILE_QUICKLY = True


def sums_of(draws, gradients, site_of=None, temperature=1.0, metric=None):
    """The running sums after a warm-up at zero and these steps."""
    size, metric = draws.shape[1], metric or IdentityMetric()
    sites = (size,) if site_of is None else tuple(np.bincount(site_of).tolist())
    variances = metric.variances(draws[0])
    start = center_sums(start_sums(draws[0], sites), jnp.zeros(size), jnp.asarray(1))

    def step(sums, seen):
        position, gradient = seen
        sums, share = add_to_sums(
            sums,
            position,
            gradient,
            jnp.asarray(True),
            temperature,
            sites,
            metric.direction,
            variances,
        )
        sums = sums._replace(samples=sums.samples + 1)
        return lax.cond(batch_is_full(sums), close_batch, lambda s: s, sums), share

    return jax.jit(lambda: lax.scan(step, start, (draws, gradients)))()


def normal(size, count, scale=1.0, noise=0.0, key=0):
    """Independent draws of N(0, scale^2), with the gradients of N(0, I) and their noise."""
    one, two = random.split(random.key(key))
    draws = scale * random.normal(one, (count, size))
    return draws, draws + noise * random.normal(two, draws.shape)


def test_sums_of_a_long_run():
    """After 3e7 steps single precision still counts each of the next ones."""
    before, product, each = 30_000_000, 1.1, 5_000
    one, yes = jnp.ones(1), jnp.asarray(True)
    sums, direction = start_sums(0 * one, (1,)), IdentityMetric().direction
    sums = sums._replace(
        steps=jnp.asarray(before),
        samples=jnp.asarray(32),
        length=jnp.asarray(1),
        matrix=jnp.full((1, 1), before * product),
        batches=sums.batches.at[:32].set(before * product / 32),
    )

    def step(_, sums):
        return add_to_sums(sums, product * one, one, yes, 1.0, (1,), direction, one)[0]

    sums = jax.jit(lambda sums: lax.fori_loop(0, each, step, sums))(sums)
    sums = close_batch(sums._replace(samples=sums.samples + 1))
    added = stein_report(sums).matrix[0, 0] * (before + each) - before * product
    assert added == pytest.approx(each * product, abs=0.1 * each)  # by one rounding, and not 5,000


@pytest.mark.parametrize("count", [200, 1_000, 1_024, 5_000])
def test_ratio_of_variances(count):
    scale = jnp.array([1.0, 1.1, 0.8])
    draws, gradients = normal(3, count, scale, noise=2.0)
    sums, shares = sums_of(draws, gradients)
    report = stein_report(sums)
    products = np.asarray(draws * gradients, float)
    np.testing.assert_allclose(report.ratios, products.mean(0), rtol=1e-4)
    assert report.temperature == pytest.approx(products.mean(), rel=1e-4)
    assert shares.mean() == pytest.approx(products.mean(), rel=1e-4)
    assert report.samples == count
    # batch means of independent draws: the usual standard errors, to the error of 32 of them
    usual = products.std(0) / count**0.5
    np.testing.assert_allclose(report.ratio_errors / usual, 1, atol=0.4)
    np.testing.assert_array_less(np.abs(report.ratios - scale**2) / usual, 4)
    low, high = report.eigenvalues
    matrix = np.asarray(draws, float).T @ np.asarray(gradients, float) / count
    np.testing.assert_allclose(
        [low, high], np.linalg.eigvalsh((matrix + matrix.T) / 2)[[0, -1]], rtol=1e-3
    )


def test_variance_ratios_of_correlated_parameters():
    """In the metric of the posterior they are the ratios of the marginal variances."""
    covariance = np.array([[1.0, 0.7, 0.0], [0.7, 1.0, 0.3], [0.0, 0.3, 0.25]])
    metric = from_covariance(covariance, np.zeros(3), np.float32)
    wide = np.array([[1.15, 0.15, 0.0], [0.15, 1.15, 0.0], [0.0, 0.0, 1.0]])  # in coordinates
    draws = normal(3, 100_000)[0] @ np.linalg.cholesky(wide).T
    report = stein_report(sums_of(draws, draws, metric=metric)[0])
    root = np.asarray(metric.factor)
    right = np.diag(root @ wide @ root.T) / np.diag(covariance)
    assert right[0] > 1.2
    np.testing.assert_array_less(np.abs(report.ratios - right) / report.ratio_errors, 4)


def test_chains_are_pooled():
    chains = [sums_of(*normal(2, 1_000, 1.1, key=k))[0] for k in range(4)]
    pooled = stein_report(jax.tree.map(lambda *x: jnp.stack(x), *chains))
    alone = [stein_report(chain) for chain in chains]
    assert pooled.temperature == pytest.approx(np.mean([r.temperature for r in alone]), rel=1e-5)
    assert pooled.error == pytest.approx(alone[0].error / 2, rel=0.3)
    assert pooled.samples == 4_000


def test_sites_of_many_coordinates():
    site_of = np.repeat([0, 1], [900, 300])
    scale = jnp.where(site_of == 0, 1.0, 1.2)
    report = stein_report(sums_of(*normal(1_200, 500, scale), site_of)[0])
    np.testing.assert_allclose(report.ratios, [1, 1.44], rtol=0.02)
    assert report.temperature == pytest.approx((900 + 300 * 1.44) / 1_200, rel=0.02)
    assert np.all(np.isnan(report.eigenvalues))
    assert "1 of 2 variance ratios" in report.problem()


def test_temperature_is_the_unit():
    draws, gradients = normal(5, 4_000, 2.0**0.5)
    assert stein_report(sums_of(draws, gradients, temperature=2.0)[0]).problem() is None
    assert (
        "configurational temperature is 2" in stein_report(sums_of(draws, gradients)[0]).problem()
    )


def test_each_part_of_the_verdict():
    good = stein_report(sums_of(*normal(4, 4_000))[0])
    assert good.problem() is None
    wide = stein_report(sums_of(*normal(4, 20_000, 1.035))[0])
    assert "temperature is 1.08" in wide.problem() and "ratios" not in wide.problem()
    uneven = jnp.array([1.3, 1.0, 1.0, 0.55])
    assert "2 of 4 variance ratios" in stein_report(sums_of(*normal(4, 4_000, uneven))[0]).problem()
    # both coordinates and the temperature are right, and the correlation is not
    draws, _ = normal(2, 4_000)
    tilted = draws @ jnp.linalg.cholesky(jnp.array([[1.0, 0.5], [0.5, 1.0]])).T
    problem = stein_report(sums_of(tilted, tilted)[0]).problem()
    assert "an eigenvalue" in problem and "temperature" not in problem


def test_too_short_for_a_verdict():
    report = stein_report(sums_of(*normal(3, 100, 3.0))[0])
    assert report.temperature > 5 and report.problem() is None
    assert stein_report(start_sums(jnp.zeros(3), (3,))) is None


def test_standard_error_of_a_series_with_memory():
    """Draws that remember hundreds of steps: the standard error knows, and there is no verdict."""
    noise = random.normal(random.key(0), (4_000, 5))
    _, draws = lax.scan(
        lambda x, e: ((y := 0.99 * x + (1 - 0.99**2) ** 0.5 * e), y), noise[0], noise
    )
    report = stein_report(sums_of(draws, draws)[0])
    # squares have half the memory: (1 + 0.98) / (1 - 0.98) steps for an independent one
    usual = (2 / 4_000 * 1.98 / 0.02) ** 0.5
    assert 0.5 < np.median(report.ratio_errors) / usual < 1.5
    assert report.problem() is None


def test_silent_on_good_draws():
    """Of 60 runs with the right law hardly any is found guilty."""
    runs = [normal(6, 1_000, noise=1.0, key=k) for k in range(60)]
    sums = jax.vmap(lambda *run: sums_of(*run)[0])(*map(jnp.stack, zip(*runs, strict=True)))
    found = [stein_report(jax.tree.map(lambda x, k=k: x[k], sums)) for k in range(60)]
    assert sum(report.problem() is not None for report in found) <= 2


gaussian = partial(means, batch_size=90)


def run(step_size, chains=1, progress_bar=False, **options):
    mcmc = MCMC(
        SGLD(gaussian, step_size), num_warmup=200, num_samples=4_100, num_chains=chains,
        chain_method="vectorized", progress_bar=progress_bar, **options,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mcmc.run(random.key(1), random.normal(random.key(0), (100, 3)))
    return mcmc, [w for w in seen if "do not have the law of the posterior" in str(w.message)]


@pytest.mark.nightly
@pytest.mark.parametrize(("step_size", "expected"), [(5e-4, 0), (1.5e-2, 1)])  # stable to 0.02
def test_a_wrong_run_says_so_once(step_size, expected, monkeypatch):
    """Under a progress bar while it goes on."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # NumPyro hides its bar for these
    monkeypatch.delenv("CI", raising=False)
    mcmc, said = run(step_size, progress_bar=True)
    assert len(said) == expected
    assert mcmc.sampler.get_diagnostics_str(mcmc.last_state).endswith("BIASED") == bool(expected)


@pytest.mark.one_case
@pytest.mark.parametrize("chains", [1, 3])
def test_a_wrong_run_without_a_bar_says_so_where_it_is_looked_at(chains):
    """Nothing is called from inside a compiled loop: the sums in the state are judged later."""
    mcmc, said = run(1.5e-2, chains)
    assert not said
    with pytest.warns(UserWarning, match="do not have the law of the posterior"):
        to_arviz(mcmc)
    assert "variance ratio" in summary(mcmc).verdict or "temperature" in summary(mcmc).verdict
    with pytest.warns(UserWarning, match="do not have the law of the posterior"):
        mcmc.sampler.monitor.judge(mcmc.last_state)


def test_a_wrong_run_with_a_long_warmup_says_so(monkeypatch):
    """By the number of samples alone: a count that has the warm-up in it would judge none."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("numpyro_sgmcmc.kernels.monitor._SECONDS_BETWEEN_TEXTS", np.inf)
    mcmc = MCMC(SGLD(gaussian, 1.5e-2), num_warmup=1_000, num_samples=600, progress_bar=True)
    with pytest.warns(UserWarning, match="After 512 samples: The draws do not have the law"):
        mcmc.run(random.key(1), random.normal(random.key(0), (100, 3)))


def test_the_device_is_asked_seldom(monkeypatch):
    """Whose data a state has is looked at when a run may have begun, and not at each sample."""
    state = run_of_a_mean().last_state
    looked, clock = [], [0.0]
    monkeypatch.setattr("numpyro_sgmcmc.kernels.monitor.check_state", lambda *a: looked.append(a))
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monitor = Monitor()
    for k in range(50):
        clock[0] = 1e-3 * k
        monitor.text(state, data="a")
    assert looked == [(state, "a")]
    clock[0] += 0.1
    monitor.text(state, data="b")
    assert looked == [(state, "a"), (state, "b")]


def run_of_a_mean():
    return run_mcmc(CCAdL(mean, 0.01, 1.0), jnp.ones(100), warmup=1, samples=10)


def test_a_run_that_takes_longer_than_expected(monkeypatch):
    """The bar says so, after half a minute and not before."""
    mcmc = run_of_a_mean()
    monitor, clock = Monitor(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    texts = []
    for clock[0] in (0.0, 20.0, 40.0):
        texts.append(monitor.text(mcmc.last_state, seconds=1.0))
    assert not any("TIMES AS LONG" in text for text in texts[:2])
    assert "13 TIMES AS LONG AS AFTER THE TUNING" in texts[2]
    # the time between two runs is none of a run
    monitor = Monitor()
    for clock[0] in (*range(10), *range(1_000, 1_040)):
        assert "TIMES AS LONG" not in monitor.text(mcmc.last_state, seconds=1.0)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("undone", "steps", "stay", "said"),
    [
        (1, 48_000, 1, ""),
        (7, 768_000, 1, ""),
        (8, 24_000, 6, ""),  # one visit of a skewed tail, as seen
        (2, 100, 2, ""),
        (3, 9, 3, "3 of 9 steps were undone"),
        (20, 24_000, 1, "20 of 24,000 steps were undone"),
        (500, 1_000_000, 1, "500 of 1,000,000 steps were undone"),
        (50, 10_000_000, 50, "a chain stood still, 50 steps in a row were undone"),
    ],
)
def test_steps_undone_in_passing_are_a_fact_and_no_verdict(undone, steps, stay, said):
    """One rule for the progress bar, the warning of `to_arviz` and the verdict."""
    mcmc = run_of_a_mean()
    state = mcmc.last_state
    counts = {"nonfinite_steps": undone, "longest_stay": stay}
    counts = {name: jnp.asarray(count) for name, count in counts.items()}
    monitor = state.monitor._replace(**counts)
    mcmc._last_state = state = state._replace(i=jnp.asarray(steps), monitor=monitor)
    assert (problem_of_undone_steps(state) or "") == said
    assert ("reduce the step size" in Monitor().text(state)) == bool(said)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = to_arviz(mcmc)
    warned = [str(one.message) for one in caught]
    assert (
        any(f"{said[0].upper()}{said[1:]}, at" in text for text in warned) if said else not warned
    )
    found = summary(data)
    assert found.facts["non-finite steps"] == undone
    assert (said in found.verdict) if said else "undone" not in found.verdict
