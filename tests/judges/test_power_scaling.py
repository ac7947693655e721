# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Sensitivity to the prior and the likelihood, from ``log_prior`` and ``log_likelihood``."""

import arviz as az
from generations import FIRST_GENERATION, arviz_marks
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import scale
from numpyro.infer import NUTS
import pytest
from runs import run_mcmc, with_draws
from scipy import stats

from numpyro_sgmcmc import SGLD, full_data, to_arviz

COMPILE_QUICKLY = True

pytestmark = arviz_marks()

RNG = np.random.default_rng(1)
N, MEAN = 20, 3.0
DRAWS = (4, 2_000)
GROUPS = {"log_likelihood": "total", "log_prior": True}


def normal(y, sd, power=1.0):
    with scale(scale=power):
        mu = numpyro.sample("mu", dist.Normal(0, sd))
    with numpyro.plate("rows", len(y), subsample_size=5) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def exact(sd, prior=1.0, likelihood=1.0):
    """Mean and standard deviation with the prior and the likelihood to these powers."""
    precision = prior / sd**2 + likelihood * N
    return likelihood * N * MEAN / precision, precision**-0.5


def of_normal(sd):
    mean, width = exact(sd)
    y = MEAN + np.linspace(-1, 1, N).astype(np.float32)
    draws = {"mu": RNG.normal(mean, width, DRAWS)}
    run = with_draws(full_data(normal), (y, sd), draws)
    return to_arviz(run, **GROUPS)


def sensitivity(data, component):
    if FIRST_GENERATION:
        return float(az.psens(data, component=component)["mu"])
    return float(az.psense(data, group=component)["mu"])


def reweighted(x, log_weights):
    """Mean, standard deviation and standard error of the mean of weighted draws."""
    w = np.exp(log_weights - log_weights.max())
    w /= w.sum()
    mean = np.sum(w * x)
    sd = np.sum(w * (x - mean) ** 2) ** 0.5
    return mean, sd, sd * np.sum(w**2) ** 0.5


@pytest.mark.nightly
@pytest.mark.parametrize("power", [0.8, 1.25])
@pytest.mark.parametrize("component", ["prior", "likelihood"])
def test_weights_are_those_of_a_fit_with_another_power(component, power):
    data = of_normal(sd=0.3)
    group, name = ("log_prior", "mu") if component == "prior" else ("log_likelihood", "y")
    terms = data[group][name].values
    assert terms.shape == DRAWS
    x = data["posterior"]["mu"].values.ravel()
    mean, sd, error = reweighted(x, (power - 1) * terms.ravel())
    right_mean, right_sd = exact(0.3, **{component: power})
    assert abs(mean - right_mean) < 4 * error
    assert abs(sd / right_sd - 1) < 4 * error / sd
    # the original posterior is another one
    assert abs(mean - exact(0.3)[0]) > 4 * error


def test_prior_in_conflict_with_the_rows_is_seen():
    conflict, weak = of_normal(sd=0.3), of_normal(sd=30)
    assert sensitivity(conflict, "prior") > 0.05 > sensitivity(weak, "prior")
    assert sensitivity(weak, "likelihood") > 0.05
    if not FIRST_GENERATION:
        assert "prior-data conflict" in az.psense_summary(conflict)["diagnosis"]["mu"]


X = RNG.normal(size=(200, 3)).astype(np.float32)
Y = (X[:, 0] + RNG.logistic(size=200) > 0).astype(np.float32)


def logistic(x, y, power=1.0, likelihood=1.0):
    with scale(scale=power):
        w = numpyro.sample("w", dist.StudentT(4, 1, 0.3).expand([3]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=20) as i, scale(scale=likelihood):
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


@pytest.mark.nightly
def test_refits_of_a_logistic_regression():
    def drawn(**powers):
        kernel = NUTS(full_data(logistic))
        return run_mcmc(kernel, X, Y, *powers.values(), warmup=300, samples=2_000, chains=2)

    data = to_arviz(drawn(), **GROUPS)
    for powers, group, name in (
        ({"power": 2.0}, "log_prior", "w"),
        ({"power": 1.0, "likelihood": 0.7}, "log_likelihood", "y"),
    ):
        power = list(powers.values())[-1]
        again = drawn(**powers).get_samples()["w"]
        log_weights = (power - 1) * data[group][name].values.ravel()
        for k in range(3):
            x = data["posterior"]["w"].values[..., k].ravel()
            mean, sd, error = reweighted(x, log_weights)
            other = float(again[:, k].std()) / (len(again) / 2) ** 0.5
            assert abs(mean - again[:, k].mean()) < 4 * np.hypot(2**0.5 * error, other)
            assert abs(sd / again[:, k].std() - 1) < 0.15


def hidden(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("groups", len(y), subsample_size=5) as g:
        a = numpyro.sample("a", dist.Normal(mu, 1))
        with scale(scale=1.0), numpyro.plate("visits", 3):
            numpyro.sample("y", dist.Normal(a, 0.5), obs=y[g].T)


@pytest.mark.nightly
def test_likelihood_of_groups_has_their_effects_integrated_out():
    y = RNG.normal(size=(30, 3)).astype(np.float32)
    run = run_mcmc(SGLD(hidden, step_size=1e-3), jnp.asarray(y), samples=20)
    data = to_arviz(run, **GROUPS)
    mu = data["posterior"]["mu"].values
    assert np.allclose(data["log_prior"]["mu"], stats.norm(0, 1).logpdf(mu), atol=1e-4)
    law = stats.multivariate_normal(np.zeros(3), 0.25 * np.eye(3) + 1)
    right = [law.logpdf(y - m).sum() for m in mu.ravel()]
    (total,) = data["log_likelihood"].data_vars.values()
    assert np.allclose(total.values.ravel(), right, rtol=1e-4)


@pytest.mark.nightly
def test_digits_of_the_total_of_many_rows():
    """Its differences between draws, of which the sum in single precision has none."""
    y = RNG.normal(5.0, 1, 1_000_000).astype(np.float32)
    mu = 5 + RNG.normal(size=(1, 30)) / 1_000
    run = with_draws(full_data(normal), (y, 10.0), {"mu": mu})
    total = to_arviz(run, constant_data=False, **GROUPS)["log_likelihood"]["y"].values
    exact = [stats.norm(m, 1).logpdf(y.astype(float)).sum() for m in mu[0].astype(np.float32)]
    assert np.std(total[0] - exact) < 0.02 < 0.3 < np.std(exact)


def of_rows(y):
    with numpyro.plate("rows", len(y), subsample_size=5) as i:
        a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(a, 1), obs=y[i])


def test_total_is_of_all_rows():
    y = np.zeros(N, np.float32)
    run = with_draws(full_data(normal), (y, 1.0), {"mu": np.zeros((1, 3))})
    with pytest.raises(ValueError, match="sum over all rows. Leave `rows` out"):
        to_arviz(run, log_likelihood="total", rows=3)
    with pytest.raises(ValueError, match="`log_likelihood` must be True or False"):
        to_arviz(run, log_likelihood="all")
    run = with_draws(full_data(of_rows), (y,), {"a": np.zeros((1, 3, N))})
    with pytest.raises(ValueError, match="needs all rows, because sites .'a'. are inside"):
        to_arviz(run, log_prior=True, rows=3)
