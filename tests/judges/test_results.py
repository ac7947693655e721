# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What a run leaves: of groups too, of copies too, and compiled."""

import os
import pickle
import subprocess
import sys

import arviz as az
from generations import arviz_marks
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
import pytest
from runs import run_mcmc
from scipy import stats

from numpyro_sgmcmc import (
    CCAdL,
    group_rows,
    local_draws,
    loo,
    stein_matrix,
    summary,
    to_arviz,
)
from numpyro_sgmcmc.diagnostics.runs import group
from numpyro_sgmcmc.posterior import numpyro_private, quadrature

ARVIZ, *pytestmark = arviz_marks(
    "The draws do not have the law",
    "The log likelihood is that of",
    "Estimated shape parameter of Pareto",
    "Nothing is certified",
)

COMPILE_QUICKLY = True

GROUPS, VISITS = 80, 3


def normal(y, batch=20):
    """Effects whose law, given the draws, is normal; and a site outside of the groups."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("others", len(y), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(mu, 2), obs=y[i, 0])
    with numpyro.plate("groups", len(y), subsample_size=batch) as g:
        a = numpyro.sample("a", dist.Normal(mu, 1))
        numpyro.deterministic("twice", 2 * a)
        with numpyro.plate("visits", VISITS, dim=-2):
            numpyro.sample("y", dist.Normal(a, 0.5), obs=y[g].T)


def counts(promo, exposure, members, observed, y, batch=50):
    """Customers with as many visits as they have made."""
    mu, tau = numpyro.sample("mu", dist.Normal(0, 1)), numpyro.sample("tau", dist.HalfNormal(1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("customers", len(members), subsample_size=batch) as g:
        a = numpyro.sample("a", dist.Normal(mu, tau))
        with numpyro.plate("visits", members.shape[1], dim=-2):
            row = members[g].T
            rate = exposure[row] * jnp.exp(a + b * promo[row])
            numpyro.sample("y", dist.Poisson(rate).mask(observed[g].T), obs=y[row])


def customers(number, seed=0):
    rng = np.random.default_rng(seed)
    customer = np.repeat(np.arange(number), 1 + rng.poisson(4, number))
    promo = rng.integers(0, 2, len(customer)) * 1.0
    exposure = rng.gamma(2, 1, len(customer))
    effects = rng.normal(0.2, 0.5, number)
    y = rng.poisson(exposure * np.exp(effects[customer] + 0.3 * promo))
    return promo, exposure, *group_rows(customer), y


def sampled(model, *data, samples=60, chains=2, step_size=0.02):
    kernel = CCAdL(model, step_size=step_size, friction=10.0, steps_per_sample=5)
    return run_mcmc(kernel, *data, warmup=50, samples=samples, chains=chains)


@pytest.fixture(scope="module")
def y():
    rng = np.random.default_rng(0)
    return rng.normal(size=(GROUPS, 1)) + 0.5 * rng.normal(size=(GROUPS, VISITS))


@pytest.fixture(scope="module")
def mcmc(y):
    return sampled(normal, y, samples=200)


@pytest.mark.nightly
@ARVIZ
def test_groups_are_drawn_anew(mcmc, y):
    """New observations of a group are at its own effect, given its rows: against their law."""
    data = to_arviz(mcmc, posterior_predictive=True)
    found = group(data, "posterior_predictive")
    assert found["y"].dims == ("chain", "draw", "visits", "groups")
    assert found["x"].dims == ("chain", "draw", "others")
    np.testing.assert_allclose(group(data, "observed_data")["y"], y.T, rtol=1e-6)
    precision = 1 + VISITS / 0.25
    mu = np.asarray(group(data, "posterior")["mu"], float)[..., None, None]
    mean = (mu + y.sum(1) / 0.25) / precision
    uniform = stats.norm.cdf(found["y"], mean, np.sqrt(1 / precision + 0.25))
    # visits of a draw have its effect in common
    for visit in uniform.transpose(2, 0, 1, 3):
        assert stats.kstest(visit.ravel()[::7], "uniform").pvalue > 0.001
    # those of another group have another law
    other = stats.norm.cdf(found["y"], np.roll(mean, 1, -1), np.sqrt(1 / precision + 0.25))
    assert stats.kstest(other[..., 0, :].ravel()[::7], "uniform").pvalue < 1e-6


def test_a_copy_knows_its_groups(mcmc):
    copy = pickle.loads(pickle.dumps(mcmc))
    assert copy.sampler.run_info == mcmc.sampler.run_info
    assert copy.sampler.model.fn.plates == mcmc.sampler.model.fn.plates
    assert not numpyro_private.is_initialised(copy.sampler) and numpyro_private.is_initialised(
        mcmc.sampler
    )


@ARVIZ
def test_chosen_groups_are_drawn_anew(mcmc):
    data = to_arviz(mcmc, posterior_predictive=True, rows={"groups": [3, 70]})
    found = group(data, "posterior_predictive")
    assert found["y"].sizes["groups"] == 2 and found["x"].sizes["others"] == GROUPS
    assert found["groups"].values.tolist() == [3, 70]
    assert data.attrs["rows_kept_groups"] == "2 of 80 rows of plate 'groups'"


@ARVIZ
def test_an_elpd_of_some_rows_is_told(mcmc):
    with pytest.warns(UserWarning, match="that of 7 of 80 rows of plate 'others'"):
        data = to_arviz(mcmc, log_likelihood=True, rows={"others": 7})
    assert data.attrs["rows_kept_others"] == "7 of 80 rows of plate 'others'"
    assert "rows_kept_groups" not in data.attrs
    assert "rows_kept_others" not in to_arviz(mcmc, rows={"others": GROUPS}).attrs


@pytest.fixture(scope="session")
def of_customers():
    return sampled(counts, *customers(300), samples=20)


NIGHTLY = ("from_numpyro", "loo")

RESULTS = {
    "summary": summary,
    "to_arviz": lambda run: to_arviz(run, log_likelihood=True, posterior_predictive=True),
    "from_numpyro": lambda run: az.from_numpyro(run, log_likelihood=True),
    "local_draws": lambda run: local_draws(run, num_draws=5),
    "loo": lambda run: loo(run, var_name="customers, marginal"),
    "stein_matrix": stein_matrix,
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=pytest.mark.nightly if k in NIGHTLY else ()) for k in RESULTS]
)
def test_integrals_are_compiled(of_customers, name, monkeypatch):
    """No result evaluates groups operation by operation, or all at once."""
    search, numbers = quadrature.find_modes, []

    def watched(density, start, form):
        assert isinstance(start, jax.core.Tracer)
        numbers.append(len(start))
        return search(density, start, form)

    monkeypatch.setattr(quadrature, "find_modes", watched)
    monkeypatch.setattr("numpyro_sgmcmc.posterior.local_latents.AT_ONCE", 64)
    monkeypatch.setattr("numpyro_sgmcmc.results.group_draws.CHUNK", 64)
    monkeypatch.setattr("numpyro_sgmcmc.posterior.potential._CHUNK", 64)
    monkeypatch.setattr("numpyro_sgmcmc.kernels.kernel.AT_ONCE", 64)
    RESULTS[name](of_customers)
    assert name == "summary" or 1 <= max(numbers) <= 64


def drawn(run):
    """What all results say of a run, as numbers and words."""
    data = to_arviz(run, log_likelihood=True, posterior_predictive=True)
    found = {
        f"{part} {name}": np.asarray(x)
        for part in ("posterior", "log_likelihood", "posterior_predictive", "observed_data")
        for name, x in group(data, part).items()
    }
    said = summary(run)
    words = [str(said), said.verdict, str(data.attrs), str(run.sampler.run_info)]
    return found | {k: np.asarray(x) for k, x in local_draws(run, num_draws=5).items()}, words


@pytest.mark.nightly
def test_results_of_a_copy(mcmc):
    """And of its copy."""
    copy = mcmc
    for _ in range(2):
        copy = pickle.loads(pickle.dumps(copy))
    (found, words), (expected, expected_words) = drawn(copy), drawn(mcmc)
    assert words == expected_words and found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    # and it goes on like the original
    for run in (copy, mcmc):
        run.post_warmup_state = run.last_state
    before = mcmc.last_state
    for run in (copy, mcmc):
        run.run(before.rng_key, *run._args)
    np.testing.assert_array_equal(copy.get_samples()["mu"], mcmc.get_samples()["mu"])


@pytest.mark.nightly
def test_series_are_drawn_anew():
    """Observations in a scan, each at the effect of its series."""
    rng = np.random.default_rng(1)
    level = 3 * rng.normal(size=30)
    data = (level[:, None] + 0.1 * rng.normal(size=(30, 5))).astype(np.float32)

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        rows = numpyro.plate("series", len(y), subsample_size=10)
        with rows as i:
            a = numpyro.sample("a", dist.Normal(mu, 3))
            own = y[i]

        def body(_, now):
            with rows:
                numpyro.sample("y", dist.Normal(a, 0.1), obs=now)
            return None, None

        scan(body, None, own.T)

    found = group(to_arviz(sampled(model, data), posterior_predictive=True), "posterior_predictive")
    mean = np.asarray(found["y"]).mean((0, 1))
    axis = mean.shape.index(30)
    assert np.abs(mean.mean(1 - axis) - data.mean(1)).max() < 0.05
    spread = np.asarray(found["y"]).std((0, 1))
    assert 0.08 < spread.min() and spread.max() < 0.13


@pytest.mark.nightly
def test_programs_avoid_faulty_fusions():
    """The flag is set before JAX starts, once, and another value from a user stays."""
    program = "import os, numpyro_sgmcmc; print(os.environ.get('XLA_FLAGS', ''))"
    flag = "--xla_cpu_experimental_ynn_fusion_type="
    said = {}
    for given in ("", f"{flag}LIBRARY_FUSION_TYPE_DOT"):
        environment = {**os.environ, "XLA_FLAGS": given}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        said[given] = done.stdout.strip()
    needed = jax.lib.__version__ == "0.10.2"
    ours = f"{flag}LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT" if needed else ""
    assert said == {k: k or ours for k in said}


@pytest.mark.nightly
def test_many_customers():
    """Groups of unequal sizes, so many that a fault of jaxlib 0.10.2 has ended the process."""
    data = customers(20_000)
    run = sampled(lambda *x: counts(*x, batch=200), *data, samples=20, step_size=1e-4)
    assert summary(run).facts["step size"] == pytest.approx(1e-4)
    found = to_arviz(run, posterior_predictive=True, rows=500)
    assert group(found, "posterior_predictive")["y"].sizes["customers"] == 500
    assert local_draws(run, groups=500, num_draws=5)["a"].shape == (2, 5, 500)
