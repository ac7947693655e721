# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Noise of effects that cross, whose correlations are not estimated, and of effects of few rows."""

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
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel, measure_noise
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
        """
        The trace of Hessian and noise beside their diagonals, whitened, for each parameter: at
        draws with independent coordinates.
        """
        weight = np.diag(self.precision) ** -0.5
        leverage = self.design @ np.diag(self.covariance)
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
    return target, Tuning(0.1, 2.0, metric, start, anchor, NoiseLevel(1.0, 1.0, 1.0, 0.0))


@pytest.mark.nightly
def test_the_error_is_that_of_the_algebra(monkeypatch):
    monkeypatch.setattr(correlated_noise, "_DRAWS", 1_000)
    crossed = Crossed(20, 3, 600, 20)
    target, tuning = tuned(crossed)
    error, _, passes = error_of_correlations(target, random.key(0), tuning)
    assert passes == pytest.approx(1_000 * (8 + 16 * 20 / 600))
    at = jnp.asarray(0.025**0.5), tuning.metric, tuning.start, tuning.anchor
    narrowings = np.asarray(correlated_noise._changes(target, random.key(0), *at)[1])
    of_mean, expected = narrowings.std() / 1_000**0.5, 0.025 * crossed.narrowing()
    assert of_mean < 0.05 * expected and abs(narrowings.mean() - expected) < 4 * of_mean
    # what moves the step is its largest ratio to the friction, with 2 % of the variance
    assert error == pytest.approx(narrowings.mean() / 0.02 / 0.05, rel=1e-3)
    # effects of one column share no rows
    target, tuning = tuned(Crossed(60, 1, 600, 20))
    alone, _, _ = error_of_correlations(target, random.key(0), tuning)
    assert abs(alone) < 0.01 * error


@pytest.mark.nightly
def test_the_shift_of_a_scale_is_that_of_the_algebra(monkeypatch):
    """
    The logarithm of the rows' precision: its gradient moves by half of the trace of the rows'
    Hessian and what is added to the covariance of the effects.
    """
    monkeypatch.setattr(correlated_noise, "_DRAWS", 400)
    crossed = Crossed(20, 3, 600, 20)
    _, known = tuned(crossed)

    def model(level, y):
        t = numpyro.sample("a", dist.Normal(0, 1))
        u = numpyro.sample("u", dist.Normal(0, TAU).expand(crossed.shape).to_event(2))
        with numpyro.plate("rows", len(y), subsample_size=crossed.batch) as i:
            mean = u[level[i], jnp.arange(crossed.shape[1])].sum(-1)
            numpyro.factor("y", -jnp.exp(t) * (y[i] - mean) ** 2 / (2 * SIGMA**2))

    target = target_of(model, *crossed.data)
    unit, root = 1e-3, 0.1  # the logarithm hardly moves itself
    metric, start = (
        m._replace(center=jnp.append(0.0, m.center), scale=jnp.append(unit, m.scale))
        for m in (known.metric, known.start)
    )
    anchor = target.anchor(target.written(target.unravel(metric.center)).effects)
    at = jnp.asarray(root), metric, start, anchor
    shifts, _, _ = correlated_noise._changes(target, random.key(0), *at)
    trace = crossed.narrowing() * len(crossed.mean)
    shift, error = np.mean(shifts[:, 0]), np.std(shifts[:, 0]) / 20
    expected = unit * root**2 * trace / 2
    assert error < expected / 10 and abs(shift - expected) < 4 * error


@pytest.mark.nightly
def test_a_tuning_takes_shorter_steps():
    """Through all phases, above 500 parameters."""
    crossed = Crossed(60, 10, 1_200, 24)
    kernel = CCAdL(crossed.model, metric="diagonal", gradient="control_variate")
    with pytest.warns(UserWarning, match="Minibatches do not pay"):
        found = kernel.tune(random.key(0), *crossed.data)
    level = found.noise
    longer, friction = kernel.method.suggest(level._replace(correlated=0.0))
    assert found.step_size * 2**found.halvings == pytest.approx(friction / level.correlated)
    assert found.step_size < 0.9 * longer
    assert "(short: the noise is correlated between parameters)" in str(found) or found.halvings


def test_the_limit_of_a_step_with_a_friction_and_a_temperature():
    level = NoiseLevel(0.1, 1.0, 1.0, 0.0, correlated=40.0)

    def step_size(**given):
        return CCAdL(lambda: None, **given).method.suggest(level)[0]

    assert step_size() == pytest.approx(2.5 / 40)
    assert step_size(friction=0.1) == pytest.approx(0.1 / 40)
    assert step_size(temperature=0.5) == pytest.approx(0.5 * 2.5 / 40)
    assert step_size(noise="full") == CCAdL(lambda: None).method.suggest(level.times(0.0))[0]


@pytest.mark.one_case
@pytest.mark.parametrize("many", [600, 6])
def test_wider_effects_move_their_scale(many, monkeypatch):
    """The logarithm of the scale of many effects, whose mean gradient is that of sum(a^2) / 2."""
    monkeypatch.setattr(correlated_noise, "_DRAWS", 400)
    width, of_scale = 0.5, 0.03

    def model(y):
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        a = numpyro.sample("a", dist.Normal(0, scale).expand([many]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=20) as i:
            numpyro.sample("y", dist.Normal(a[i % many], 1), obs=y[i])

    target = target_of(model, jnp.zeros(1_200))
    widths = jnp.append(jnp.full(many, width), of_scale)
    metric = DiagonalMetric(jnp.zeros(many + 1), widths)
    tuning = Tuning(0.1, 2.0, metric, metric, None, NoiseLevel(1.0, 1.0, 1.0, 0.0))
    _, found, _ = error_of_correlations(target, random.key(0), tuning)
    # of the scale itself too, which is exp(-2 x) in the sum
    expected = of_scale * many * width**2 * np.exp(2 * of_scale**2)
    if many == 600:
        assert abs(found - expected) < 0.05 * expected
    else:
        assert found < 0.5


def test_steps_of_nogin_move_no_scale_by_more_than_a_tenth():
    level = NoiseLevel(0.9, 3.0, 1.4, 0.1, widened=2.5)

    def step_size(**given):
        return CCAdL(lambda: None, **given).method.suggest(level)[0]

    assert step_size() == pytest.approx(0.4)
    assert step_size() ** 2 / 4 * level.widened == pytest.approx(0.1)
    assert step_size(integrator="symmetric") > 0.4
    # with less noise the default takes gradients where the draws are
    level = level._replace(mean=0.1, largest=0.2)
    assert step_size() > 0.6 and step_size(integrator="nogin") == pytest.approx(0.4)


@pytest.mark.nightly
def test_crossed_effects_are_not_too_narrow(monkeypatch):
    """An error of 0.4 per cent. The longest step for the noise alone is the negative control."""
    monkeypatch.setattr(correlated_noise, "ACCEPTED_BIAS", 0.004)
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

    error, _, _ = error_of_correlations(target, random.key(0), tuning)
    step_size, found = variances(noise._replace(correlated=error))
    longer, narrow = variances(noise)
    # 600 variances, each known from 300 draws to 8 per cent, have a mean known to 0.4
    assert step_size < longer and abs(found - 1) < 0.013 and narrow < 0.984


@pytest.mark.nightly
def test_effects_of_few_rows_have_right_variances():
    """A row is in one minibatch of 200: an average that forgets it gives other variances."""
    levels, rows = 3_000, 60_000
    rng, share = np.random.default_rng(0), 1 / np.arange(1, levels + 1)
    level = rng.choice(levels, rows, p=share / share.sum())
    y = TAU * rng.standard_normal(levels)[level] + SIGMA * rng.standard_normal(rows)

    def model(level, y):
        u = numpyro.sample("u", dist.Normal(0, TAU).expand([levels]).to_event(1))
        with numpyro.plate("rows", rows, subsample_size=300) as i:
            numpyro.sample("y", dist.Normal(u[level[i]], SIGMA), obs=y[i])

    data = jnp.asarray(level), jnp.asarray(y, jnp.float32)
    counts = np.bincount(level, minlength=levels)
    precision = TAU**-2 + counts / SIGMA**2
    mean = np.bincount(level, y, levels) / SIGMA**2 / precision
    tuning = CCAdL(model).tune(random.key(0), *data)

    def variances(window):
        kernel = CCAdL(model, tuning=tuning, noise=NoiseEstimate("diagonal", window=window))
        draws = run_mcmc(kernel, *data, warmup=60, samples=400).get_samples()["u"]
        found = np.mean((np.asarray(draws) - mean) ** 2 * precision, axis=0)
        return found[(counts >= 3) & (counts < 64)]

    found = variances(None)
    error = found.std() / len(found) ** 0.5
    assert abs(found.mean() - 1) < 3 * error
    assert abs(variances(100).mean() - 1) > 5 * error  # larger for short steps, smaller for long


@pytest.mark.parametrize(("batch", "steps"), [(40, 1_000), (10, 2_000), (1_000, 100)])
def test_the_average_has_each_row_ten_times(batch, steps):
    def model(y):
        u = numpyro.sample("u", dist.Normal(0, 1).expand([200]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch) as i:
            numpyro.sample("y", dist.Normal(u[0], 1), obs=y[i])

    target, diagonal = target_of(model, jnp.zeros(4_000)), NoiseEstimate("diagonal")
    assert diagonal.resolved(target, level=1.0).window == steps
    # chains that may start far away forget what they see there
    assert diagonal.resolved(target).window == 100
