# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""AMAGOLD is exact at step sizes where the same steps without a test are far off."""

from functools import partial
from types import SimpleNamespace

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
import pytest
from runs import run_mcmc
from scipy import special
from small_models import logistic, mean

from numpyro_sgmcmc import AMAGOLD, spread_rows, to_arviz
from numpyro_sgmcmc.gradients.estimators import Evaluation

COMPILE_QUICKLY = True
N = 100
PRECISION = N + 0.01
Y = np.random.default_rng(0).standard_normal(N)
Y = ((Y - Y.mean()) / Y.std(ddof=1)).astype(np.float32)


def rare(y):
    """Few positives: the posterior is skewed."""
    b = numpyro.sample("b", dist.Normal(0, 3))
    with numpyro.plate("rows", y.shape[0], subsample_size=50) as i:
        numpyro.sample("y", dist.Bernoulli(logits=b), obs=y[i])


RARE = (np.arange(200) < 4).astype(np.float32)


def rare_moments():
    """Mean, variance and third central moment, by quadrature."""
    b = np.linspace(-12, 2, 20_001)
    log = -(b**2) / 18 + 4 * special.log_expit(b) + 196 * special.log_expit(-b)
    weights = np.exp(log - log.max())
    weights /= weights.sum()
    mean = weights @ b
    return mean, weights @ (b - mean) ** 2, weights @ (b - mean) ** 3


run_of = partial(run_mcmc, warmup=200, chains=4)


def z_scores(draws, moments):
    """Of the mean and of central moments around the right mean, by effective sample sizes."""
    mean = moments[0]
    found = []
    for power, right in enumerate(moments, 1):
        values = draws if power == 1 else (draws - mean) ** power
        error = values.std() / effective_sample_size(values) ** 0.5
        found.append((values.mean() - right) / error)
    return np.array(found)


@pytest.mark.slow
@pytest.mark.parametrize("step_size", [0.1, pytest.param(0.2, marks=pytest.mark.nightly)])
def test_exact_law(step_size, monkeypatch):
    root = PRECISION**0.5
    kernel = AMAGOLD(mean, step_size / root, 2 * root, steps_per_sample=5)
    moments = N * Y.mean() / PRECISION, 1 / PRECISION

    def draws():
        mcmc = run_of(kernel, Y, samples=10_000)
        accepted = float(mcmc.get_extra_fields()["accept_prob"].mean())
        return np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], float), accepted

    found, accepted = draws()
    assert 0.2 < accepted < 0.95
    assert np.all(np.abs(z_scores(found, moments)) < 4)
    # without the test the same steps are far too wide
    monkeypatch.setattr(AMAGOLD.Method, "accept", lambda self, before, after, *rest: after)
    kernel = AMAGOLD(mean, step_size / root, 2 * root, steps_per_sample=5)
    found, _ = draws()
    assert found.var() * PRECISION > 1.1
    assert z_scores(found, moments)[1] > 8


@pytest.mark.nightly
@pytest.mark.parametrize("options", [
    {"step_size": 0.3, "friction": 1.0, "metric": np.array([0.3]), "steps_per_sample": 3},
    pytest.param({}, marks=pytest.mark.nightly),
])  # fmt: skip
def test_a_skewed_posterior(options):
    mcmc = run_of(AMAGOLD(rare, progress_bar=False, **options), RARE, samples=10_000)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["b"], float)
    assert np.all(np.abs(z_scores(draws, rare_moments())) < 4)
    assert mcmc.get_extra_fields()["accept_prob"].mean() > 0.3
    data = to_arviz(mcmc)
    assert "acceptance_rate" in data["sample_stats"]
    assert data.attrs["passes_per_sample"] > 1


@pytest.mark.nightly
def test_paths_are_as_long_as_their_noise_allows():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2_000, 5)).astype(np.float32)
    y = (x[:, 0] + rng.logistic(size=2_000) > 0).astype(np.float32)

    model, steps = partial(logistic, batch_size=500, prior=1.0), []
    for gradient in ("minibatch", "control_variate"):
        kernel = AMAGOLD(model, gradient=gradient, progress_bar=False)
        mcmc = run_of(kernel, x, y, samples=500)
        accepted = float(mcmc.get_extra_fields()["accept_prob"].mean())
        assert 0.3 < accepted < (0.9 if gradient == "minibatch" else 1.0)
        steps.append(kernel.steps_per_sample)
    assert steps[0] < steps[1]


def test_a_path_and_its_reverse():
    """The work is what the probabilities of the two differ by, and of their momenta."""
    rng, h, friction, temperature = np.random.default_rng(0), 0.3, 1.4, 1.7
    kernel = AMAGOLD(mean, h, friction, temperature=temperature)
    matrices = rng.standard_normal((6, 3, 3))

    def state(z, momentum):
        zero = jnp.zeros(())
        dynamics = kernel.method.init_dynamics(random.key(0), jnp.zeros(3), None)
        dynamics = dynamics._replace(momentum=jnp.asarray(momentum), work=zero)
        fixed = SimpleNamespace(friction=friction)
        fields = {"z": jnp.asarray(z), "dynamics": dynamics, "fixed": fixed, "step_size": h}
        found = SimpleNamespace(**fields)
        found._replace = lambda **new: SimpleNamespace(**(fields | new))
        return found

    with jax.enable_x64(True):
        z, p = rng.standard_normal((2, 3))
        start, work, log_forth, log_back = (z, p), 0.0, 0.0, 0.0
        half, variance = h * friction / 2, 2 * h * friction * temperature
        for k, matrix in enumerate(matrices):
            seen = []

            def gradient(x, matrix=matrix, seen=seen):
                seen.append(np.asarray(matrix @ x))
                return Evaluation(jnp.zeros(()), jnp.asarray(seen[-1]))

            after, _ = kernel.method.step(state(z, p), gradient, random.key(k))
            new = np.asarray(after.dynamics.momentum)
            work += float(after.dynamics.work)
            forth = (1 + half) * new - (1 - half) * p + h * seen[0]
            # from the reversed momentum back, by the same minibatch
            back = (1 + half) * -p - (1 - half) * -new + h * seen[0]
            log_forth -= forth @ forth / (2 * variance)
            log_back -= back @ back / (2 * variance)
            z, p = np.asarray(after.z), new
        kinetic = (p @ p - start[1] @ start[1]) / (2 * temperature)
    np.testing.assert_allclose(work / temperature, log_back - log_forth - kinetic, rtol=1e-9)


def test_what_is_not_accepted_stays_with_its_momentum_reversed():
    kernel = AMAGOLD(mean, 0.01, 1.0)
    mcmc = run_of(kernel, Y, samples=3, chains=1)
    before = mcmc.last_state._replace(z=jnp.array([1.0]))
    after = before._replace(
        z=jnp.array([2.0]), dynamics=before.dynamics._replace(momentum=jnp.array([5.0]))
    )
    for change, accepted in ((-1.0, True), (jnp.inf, False), (jnp.nan, False)):
        found = kernel.method.accept(before, after, jnp.asarray(change), random.key(0))
        expected = (2.0, 5.0) if accepted else (1.0, -float(before.dynamics.momentum[0]))
        assert (float(found.z[0]), float(found.dynamics.momentum[0])) == expected
        assert float(found.dynamics.work) == 0


def test_a_path_that_is_not_finite_is_not_accepted():
    mcmc = run_of(AMAGOLD(mean, 1e30, 1e-30, steps_per_sample=2), Y, samples=5, chains=1)
    assert np.all(mcmc.get_extra_fields()["diverging"])
    assert np.ptp(mcmc.get_samples()["mu"]) == 0


@pytest.mark.nightly
def test_rows_on_devices():
    mesh = jax.make_mesh((2,), ("rows",))
    root = PRECISION**0.5
    kernel = AMAGOLD(mean, 0.1 / root, 2 * root, steps_per_sample=5)
    mcmc = run_of(kernel, spread_rows(mesh, Y), samples=3_000, jit_model_args=True)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], float)
    assert np.all(np.abs(z_scores(draws, (N * Y.mean() / PRECISION, 1 / PRECISION))) < 4)


def test_what_would_not_be_exact():
    with pytest.raises(ValueError, match="needs a constant `step_size`"):
        AMAGOLD(mean, lambda i: 0.1 / (1 + i))
    kernel = AMAGOLD(mean, 0.01, 1.0, subsampling="epochs")
    with pytest.raises(ValueError, match="minibatches of a path must be independent"):
        run_of(kernel, Y, samples=3, chains=1)
