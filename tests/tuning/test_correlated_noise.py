# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Effects that cross, and effects of few rows: noise that its estimate does not show at once."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from runs import run_mcmc, target_of

from numpyro_sgmcmc import CCAdL, NoiseEstimate
from numpyro_sgmcmc.posterior.metric import DiagonalMetric
from numpyro_sgmcmc.tuning import correlated_noise
from numpyro_sgmcmc.tuning.correlated_noise import error_of_correlations
from numpyro_sgmcmc.tuning.gaussian import Gaussian
from numpyro_sgmcmc.tuning.noise_level import measure_noise
from numpyro_sgmcmc.tuning.tuning import Tuning

TAU, SIGMA = 0.5, 2.0


class Crossed:
    """Effects of several columns of levels on rows of a normal law, and their exact posterior."""

    def __init__(self, levels, columns, rows, batch):
        self.shape, self.batch = (levels, columns), batch
        rng, share = np.random.default_rng(0), 1 / np.arange(1, levels + 1)
        self.level = rng.choice(levels, (rows, columns), p=share / share.sum())
        self.design = np.zeros((rows, levels * columns))
        at = self.level * columns + np.arange(columns)
        self.design[np.arange(rows)[:, None], at] = 1
        truth = TAU * rng.standard_normal(levels * columns)
        self.y = self.design @ truth + SIGMA * rng.standard_normal(rows)
        information = self.design.T @ self.design / SIGMA**2
        self.precision = information + np.eye(len(truth)) / TAU**2
        self.covariance = np.linalg.inv(self.precision)
        self.mean = self.covariance @ self.design.T @ self.y / SIGMA**2

    @property
    def data(self):
        return jnp.asarray(self.level), jnp.asarray(self.y, jnp.float32)

    def model(self, level, y):
        u = numpyro.sample("u", dist.Normal(0, TAU).expand(self.shape).to_event(2))
        with numpyro.plate("rows", len(y), subsample_size=self.batch) as i:
            mean = u[level[i], jnp.arange(self.shape[1])].sum(-1)
            numpyro.sample("y", dist.Normal(mean, SIGMA), obs=y[i])

    def narrowing(self):
        """The trace of Hessian and noise beside their diagonals, whitened, for each parameter."""
        weight = np.diag(self.precision) ** -0.5
        leverage = np.sum(self.design @ self.covariance * self.design, axis=1)
        rows = len(self.y)
        noise = self.design.T * (leverage / SIGMA**4) @ self.design
        noise *= rows / self.batch * (1 - self.batch / rows)
        beside = 1 - np.eye(len(weight))
        return np.sum(beside * self.precision * noise * np.outer(weight, weight) ** 2) / len(weight)


def tuned(crossed):
    """The model and a tuning in the conditional standard deviations, from the exact posterior."""
    target, center = target_of(crossed.model, *crossed.data), jnp.asarray(crossed.mean, jnp.float32)
    scales = np.diag(crossed.precision) ** -0.5, np.diag(crossed.covariance) ** 0.5
    metric, start = (DiagonalMetric(center, jnp.asarray(x, jnp.float32)) for x in scales)
    anchor = target.anchor(target.written(target.unravel(center)).effects)
    return target, Tuning(0.1, 2.0, metric, start, anchor)


def test_the_error_is_that_of_the_algebra(monkeypatch):
    monkeypatch.setattr(correlated_noise, "_DRAWS", 400)
    crossed = Crossed(20, 3, 600, 20)
    target, tuning = tuned(crossed)
    error, passes = error_of_correlations(target, random.key(0), tuning)
    assert passes == pytest.approx(400 * (4 + 4 * 20 / 600))
    # of 400 draws, whose coordinates are independent
    assert 0.02 * error == pytest.approx(crossed.narrowing() / 2, rel=0.2)
    # effects of one column share no rows
    target, tuning = tuned(Crossed(60, 1, 600, 20))
    alone, _ = error_of_correlations(target, random.key(0), tuning)
    assert abs(alone) < 0.01 * error


@pytest.mark.slow
def test_crossed_effects_are_not_too_narrow(monkeypatch):
    """An error of half a per cent. The longest step for the noise alone is the negative control."""
    monkeypatch.setattr(correlated_noise, "ACCEPTED_BIAS", 0.005)
    crossed = Crossed(60, 10, 1_200, 6)
    target, tuning = tuned(crossed)
    at = Gaussian(tuning.start, 0.0), tuning.metric, True
    noise = measure_noise(target, random.key(0), *at).controlled
    suggest = CCAdL(crossed.model).method.suggest

    def variances(noise):
        step_size, friction = suggest(noise)
        steps = int(5 / step_size)
        known = tuning._replace(step_size=step_size, friction=friction, noise=noise)
        kernel = CCAdL(crossed.model, tuning=known, steps_per_sample=steps)
        mcmc = run_mcmc(kernel, *crossed.data, warmup=50, samples=300)
        away = np.asarray(mcmc.get_samples()["u"]).reshape(300, -1) - crossed.mean
        return step_size, np.mean(away**2 / np.diag(crossed.covariance))

    error, _ = error_of_correlations(target, random.key(0), tuning)
    step_size, found = variances(noise._replace(correlated=error))
    longer, narrow = variances(noise)
    # 600 variances, each known from 300 draws to 8 per cent, have a mean known to 0.4
    assert step_size < longer and abs(found - 1) < 0.01 and narrow < 0.985


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 100])
def test_effects_of_few_rows_are_not_too_wide(window):
    """A row is in one minibatch of 200. An average that forgets it makes its effects wider."""
    levels, rows = 3_000, 60_000
    rng, share = np.random.default_rng(0), 1 / np.arange(1, levels + 1)
    level = rng.choice(levels, rows, p=share / share.sum())
    y = TAU * rng.standard_normal(levels)[level] + SIGMA * rng.standard_normal(rows)

    def model(level, y):
        u = numpyro.sample("u", dist.Normal(0, TAU).expand([levels]).to_event(1))
        with numpyro.plate("rows", rows, subsample_size=300) as i:
            numpyro.sample("y", dist.Normal(u[level[i]], SIGMA), obs=y[i])

    data = jnp.asarray(level), jnp.asarray(y, jnp.float32)
    kernel = CCAdL(model, noise=NoiseEstimate("diagonal", window=window))
    draws = np.asarray(run_mcmc(kernel, *data, warmup=60, samples=400).get_samples()["u"])
    counts = np.bincount(level, minlength=levels)
    precision = TAU**-2 + counts / SIGMA**2
    mean = np.bincount(level, y, levels) / SIGMA**2 / precision
    found = np.mean((draws - mean) ** 2 * precision, axis=0)[(counts >= 3) & (counts < 64)]
    error = found.std() / len(found) ** 0.5
    assert (abs(found.mean() - 1) < 3 * error) == (window is None)


@pytest.mark.parametrize(("batch", "steps"), [(10, 4_000), (1_000, 100)])
def test_the_average_has_each_row_ten_times(batch, steps):
    def model(y):
        u = numpyro.sample("u", dist.Normal(0, 1).expand([200]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch) as i:
            numpyro.sample("y", dist.Normal(u[0], 1), obs=y[i])

    target, diagonal = target_of(model, jnp.zeros(4_000)), NoiseEstimate("diagonal")
    assert diagonal.resolved(target, level=1.0).window == steps
    # chains that may start far away forget what they see there
    assert diagonal.resolved(target).window == 100
