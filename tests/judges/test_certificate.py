# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Certificates: weighted draws are right where the run is not, and say where they cannot be."""

from functools import partial

from jax import random
import jax.numpy as jnp
from linear_posterior import X, Y, exact
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest
from runs import run_mcmc, with_draws
from scipy import stats
from small_models import linear

from numpyro_sgmcmc import (
    SGHMC,
    CCAdL,
    RowsOnDisk,
    calibrated,
    certify,
    debiased,
    loo,
    stein_matrix,
    to_arviz,
)
from numpyro_sgmcmc.diagnostics._mixture import Mixture, fitted
from numpyro_sgmcmc.diagnostics.runs import group

COMPILE_QUICKLY = True
#: the smoothing of weights has another name, and another sign, in ArviZ 1.x
ARVIZ = pytest.mark.arviz


def plain(x, y):
    """The same model for NUTS."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def run_too_wide_by(factor, seed=0):
    mean, sd, _ = exact()
    x = X.astype(np.float64)
    covariance = np.linalg.inv(x.T @ x + np.eye(3)) * factor**2
    draws = np.random.default_rng(seed).multivariate_normal(mean, covariance, size=(4, 1_000))
    return with_draws(plain, (X, Y), {"w": draws})


@pytest.mark.nightly
@ARVIZ
def test_a_run_that_is_too_wide_is_corrected():
    mean, sd, evidence = exact()
    for factor in (1.0, 1.15):
        found = certify(run_too_wide_by(factor), 4_000)
        table = found.table
        assert found.k_hat < 0.7 and found.effective > 3_000
        assert np.all(np.abs(table["mean"] - mean) < 4 * table["mean_error"])
        assert np.all(np.abs(table["sd"] - sd) < 4 * table["sd_error"])
        assert np.all(table["sd_error"] < 0.02 * sd)
        assert abs(found.log_evidence - evidence) < 4 * found.log_evidence_error
        assert np.all(np.abs(table["ratio"] - factor) < 4 * table["ratio_error"])
        assert ("The run is off" in found.verdict) == (factor > 1)
    assert "too wide or too narrow, the most that of 'w[" in found.verdict
    assert str(found).endswith(found.verdict)


@pytest.mark.nightly
def test_five_per_cent_are_seen_and_standard_errors_are_calibrated():
    mean, sd, evidence = exact()
    run, z = run_too_wide_by(1.05, seed=1), []
    for key in range(50):
        found = certify(run, 1_000, rng_key=random.key(key))
        table = found.table
        z.append([
            *((table["mean"] - mean) / table["mean_error"]),
            *((table["sd"] - sd) / table["sd_error"]),
            (found.log_evidence - evidence) / found.log_evidence_error,
        ])  # fmt: skip
    z = np.array(z)
    # 350 numbers, those of a key correlated: of 50 independent ones an sd of 1 has an error of 0.1
    assert 0.85 < np.sqrt(np.mean(z**2)) < 1.15
    assert np.all(np.abs(z.mean(axis=0)) < 4 / 50**0.5)
    found = certify(run, 40_000)
    assert "too wide" in found.verdict
    assert np.all(np.abs(found.table["ratio"] - 1.05) < 4 * found.table["ratio_error"])


def bent(n):
    for k in range(n):
        x = numpyro.sample(f"x{k}", dist.Normal(0, 1))
        numpyro.sample(f"y{k}", dist.Normal(3 * (x**2 - 1), 0.1))


@pytest.mark.nightly
def test_where_nothing_can_be_certified():
    rng = np.random.default_rng(0)
    # ten bananas, twenty dimensions
    x = rng.standard_normal((10, 2, 2_000))
    values = {f"x{k}": x[k] for k in range(10)}
    values |= {
        f"y{k}": 3 * (x[k] ** 2 - 1) + 0.1 * rng.standard_normal(x[k].shape) for k in range(10)
    }
    found = certify(with_draws(bent, (10,), values))
    assert not (found.k_hat < 0.7 and found.effective > 100)
    assert found.verdict.startswith("Nothing is certified")

    def many():
        numpyro.sample("x", dist.Normal(0, 1).expand([300]).to_event(1))

    values = {"x": rng.standard_normal((4, 1_000, 300))}
    found = certify(with_draws(many, (), values))
    assert found.k_hat > 0.7
    assert "too many parameters" in found.verdict


def test_a_mode_that_no_draw_has_found_is_not_known():
    def two():
        x = numpyro.sample("x", dist.Normal(0, 10))
        numpyro.factor("modes", jnp.logaddexp(-((x - 5) ** 2) / 2, -((x + 5) ** 2) / 2))

    half = np.log(np.sqrt(2 * np.pi)) + stats.norm.logpdf(5, 0, np.sqrt(101))
    rng = np.random.default_rng(0)
    scale, center = np.sqrt(100 / 101), 5 * 100 / 101
    draws = center + scale * rng.standard_normal((2, 1_000))
    found = certify(with_draws(two, (), {"x": draws}))
    assert abs(found.log_evidence - half) < 4 * found.log_evidence_error + 1e-3
    both = np.concatenate([draws[:1], -draws[:1]])
    found = certify(with_draws(two, (), {"x": both}))
    assert abs(found.log_evidence - half - np.log(2)) < 4 * found.log_evidence_error + 1e-3


@pytest.mark.nightly
def test_through_a_kernel_and_from_disk(tmp_path):
    def model(x, y):
        b = numpyro.sample("b", dist.LogNormal(0, 1))
        with numpyro.plate("rows", y.shape[0], subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(b * x[i, 0], 1), obs=y[i])

    kernel = SGHMC(model, 0.02, 5.0, metric=np.array([5e-4]), gradient="control_variate")
    mcmc = MCMC(kernel, num_warmup=50, num_samples=300, progress_bar=False)
    x = X.copy()
    mcmc.run(random.key(0), x, Y)
    found = certify(mcmc)
    for name, values in (("x", X), ("y", Y)):
        np.save(tmp_path / f"{name}.npy", values)
    on_disk = run_mcmc(
        kernel, *(RowsOnDisk(tmp_path / f"{name}.npy") for name in "xy"), warmup=50, samples=300
    )
    again = certify(on_disk)
    np.testing.assert_allclose(again.log_evidence, found.log_evidence, atol=0.01)
    np.testing.assert_allclose(again.table["mean"], found.table["mean"], rtol=1e-3)
    # the draws are those of the site as written
    assert found.draws["b"].shape == (1_000,)
    assert np.all(found.draws["b"] > 0)
    np.testing.assert_allclose(
        found.weights @ found.draws["b"], found.table["mean"]["b"], rtol=1e-5
    )


@pytest.mark.nightly
def test_data_that_were_changed_since():
    kernel = CCAdL(linear, progress_bar=False)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=200, progress_bar=False)
    x = X.copy()
    mcmc.run(random.key(0), x, Y)
    assert certify(mcmc, 200).k_hat < 0.7
    x[0] += 1
    functions = [certify, debiased, calibrated, loo, stein_matrix]
    functions.append(partial(to_arviz, log_likelihood=True))
    functions.append(partial(to_arviz, posterior_predictive=True))
    for function in functions:
        with pytest.raises(
            ValueError, match="differ from those of the run: the data were changed in"
        ):
            function(mcmc)
    with pytest.warns(UserWarning, match="changed in place since the run: `observed_data` is left"):
        data = to_arviz(mcmc)  # the draws are what they were
    assert group(data, "observed_data") is None


def test_runs_that_cannot_be_certified():
    rng = np.random.default_rng(0)
    draws = rng.standard_normal((2, 40, 3))
    with pytest.raises(ValueError, match="has 80 draws of 3 parameters: a certificate needs 100"):
        certify(with_draws(plain, (X, Y), {"w": draws}))
    draws = rng.standard_normal((2, 100, 3))
    draws[..., 2] = 1
    with pytest.raises(ValueError, match="covariance of the draws is singular"):
        certify(with_draws(plain, (X, Y), {"w": draws}))
    mcmc = with_draws(plain, (X, Y), {"w": rng.standard_normal((2, 100, 3))}, temperature=0.5)
    with pytest.raises(ValueError, match="The run has temperature=0.5"):
        certify(mcmc)


def test_the_mixture():
    rng = np.random.default_rng(0)
    one = Mixture(
        np.array([0.3, 0.7]),
        np.array([[-3.0, 0.0], [2.0, 1.0]]),
        np.array([np.eye(2), [[1.0, 0.0], [0.5, 0.5]]]),
        np.array([5.0, 5.0]),
    )
    # its density is that of SciPy
    x = one.draw(rng, 4_000)
    parts = [
        stats.multivariate_t(m, f @ f.T, df=5).logpdf(x) + np.log(w)
        for w, m, f in zip(one.weights, one.means, one.factors, strict=True)
    ]
    np.testing.assert_allclose(one.log_density(x), np.logaddexp(*parts), rtol=1e-10)
    # what is drawn has its law: the mean, and the part that is left of 0
    mean = one.weights @ one.means
    spread = x.std(axis=0) / 4_000**0.5
    assert np.all(np.abs(x.mean(axis=0) - mean) < 4 * spread)
    # a step of EM never makes the likelihood smaller
    start = one._replace(means=one.means + 0.5, weights=np.array([0.5, 0.5]))
    likelihoods = []
    for _ in range(20):
        start, likelihood = start.improved(x)
        likelihoods.append(likelihood)
    assert np.all(np.diff(likelihoods) > -1e-4)
    # and what is fitted says as much of other draws, but for its wider part
    found = fitted(rng.permutation(x).reshape(4, 1_000, 2), rng)
    other = one.draw(rng, 4_000)
    assert found.log_density(other).mean() > one.log_density(other).mean() - 0.02
