# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Debiased expectations: coupled chains have no error that grows with a step size."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
from linear_posterior import X, Y, exact
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS
import pytest
from runs import run_mcmc, with_draws
from scipy import stats
from small_models import linear

from numpyro_sgmcmc import SGHMC, SGLD, CCAdL, debiased, full_data, summary
from numpyro_sgmcmc.diagnostics import _coupled_chains
from numpyro_sgmcmc.diagnostics._coupled_chains import coupled
from numpyro_sgmcmc.posterior.metric import DiagonalMetric
from numpyro_sgmcmc.results.run_data import target_of

COMPILE_QUICKLY = True


run_of = partial(run_mcmc, samples=1_000, chains=4)


def test_a_normal_law_is_left_unchanged_at_any_step_size():
    for step_size in (1.0, 0.25):
        times = _coupled_chains._times(
            step_size, jnp.float64 if jax.config.x64_enabled else jnp.float32
        )
        for flow in (times.half, times.quarter):
            matrix, root = (np.asarray(x, np.float64) for x in flow)
            np.testing.assert_allclose(matrix @ matrix.T + root @ root.T, np.eye(2), atol=1e-6)
        # two short flights are a long one, and so is their noise
        short, root = (np.asarray(x, np.float64) for x in times.quarter)
        long, whole = (np.asarray(x, np.float64) for x in times.half)
        np.testing.assert_allclose(short @ short, long, atol=1e-6)
        both = short @ root @ root.T @ short.T + root @ root.T
        np.testing.assert_allclose(both, whole @ whole.T, atol=1e-6)


def test_a_normal_momentum_keeps_its_law():
    rng = np.random.default_rng(0)
    # the covariance of the noise from few samples, in some directions far too much
    root = 0.05 * rng.standard_normal((30, 30))
    samples = rng.standard_normal((4_000, 10, 30)) @ root / np.sqrt(10)
    momentum, noise = rng.standard_normal((2, 4_000, 30))
    after = np.asarray(jax.vmap(_coupled_chains.damped)(momentum, samples)) + noise @ root
    assert 0.2 < np.linalg.eigvalsh(root.T @ root)[-1] < 0.95
    ratio = (after**2).mean(axis=0)
    assert np.all(np.abs(ratio - 1) < 4 * np.sqrt(2 / 4_000))
    assert abs(ratio.mean() - 1) < 4 * np.sqrt(2 / 4_000 / 30)
    # without it they would be wider by this
    assert np.mean((momentum + noise @ root) ** 2) > 1.05
    far = np.asarray(
        _coupled_chains.damped(jnp.asarray(momentum[0]), jnp.asarray(100 * samples[0]))
    )
    assert np.linalg.norm(far) <= np.linalg.norm(momentum[0]) * 1.01


def quarter(scale):
    """A law with the density exp(-x^4 / 4 - x^2 / 8), of standard deviation 0.8."""
    x = numpyro.sample("x", dist.Normal(0, 2.0))
    numpyro.factor("tails", -((x / scale) ** 4) / 4)


def square_of_quarter():
    grid = np.linspace(-6, 6, 100_001)
    weights = np.exp(-(grid**4) / 4 - grid**2 / 8)
    weights /= weights.sum()
    return weights @ grid**2


@pytest.mark.slow
def test_differences_are_small_and_of_second_order(monkeypatch):
    target = target_of(quarter, (1.0,))
    metric = DiagonalMetric(jnp.zeros(1), jnp.full(1, 0.8))
    rng = np.random.default_rng(0)
    starts = rng.standard_normal((_coupled_chains.CHAINS, 1))
    square = square_of_quarter()
    monkeypatch.setattr(_coupled_chains, "_SHARE", np.inf)
    monkeypatch.setattr(_coupled_chains, "_DIFFERENCE", np.inf)
    apart, spread, differences = [], [], []
    for power in (1, 2, 3):
        # as `coupled` with a first step size of 1/2, 1/4 and 1/8
        monkeypatch.setattr(_coupled_chains, "_FIRST", power)
        found = coupled(target, metric, None, starts, 2_000, random.key(1))
        assert found.on_all_rows and found.step_size == 2.0**-power
        values = [0.8 * x for x in (found.coarse, found.fine)]
        pairs = values[1].shape[1]
        difference = values[1] ** 2 - values[0][:, :pairs] ** 2
        apart.append(difference.mean())
        spread.append(difference.var())
        each = (values[0] ** 2).mean(axis=1) + 4 / 3 * difference.mean(axis=1)
        differences.append(difference)
        error = each.std(ddof=1) / np.sqrt(len(each))
        assert error < 0.01 * square
        assert abs(each.mean() - square) < 4 * error + 0.3 * apart[-1] ** 2
    # h^2 and h^4
    assert 3 < apart[0] / apart[1] < 6 and 3 < apart[1] / apart[2] < 6
    assert 9 < spread[0] / spread[1] < 40 and 9 < spread[1] / spread[2] < 40
    # without the second level it would be off
    each = differences[0].mean(axis=1)
    assert abs(each.mean()) > 8 * each.std(ddof=1) / np.sqrt(len(each))


steep = partial(linear, batch_size=20)


@pytest.mark.nightly
@pytest.mark.parametrize("damped", [True, False])
def test_the_noise_of_minibatches_is_taken_out(monkeypatch, damped):
    mean, sd, _ = exact()
    monkeypatch.setattr(_coupled_chains, "_FEW_ROWS", 0)
    if not damped:
        monkeypatch.setattr(_coupled_chains, "damped", lambda momentum, samples: momentum)
    draws = mean + sd * np.random.default_rng(0).standard_normal((4, 500, 3))
    run = with_draws(steep, (X, Y), {"w": draws})
    # any anchor has no noise at the mean: one far from it has some everywhere
    found = debiased(run, num_draws=40_000)
    squares = found.table.filter(like="variance", axis=0)
    off = np.abs(squares["debiased"] - sd**2) / squares["error"]
    assert np.all(squares["error"] < 0.02 * sd**2)
    assert np.all(off < 4) if damped else np.any(off > 6)
    means = found.table.filter(like="mean", axis=0)
    assert np.all(np.abs(means["debiased"] - mean) < 4 * means["error"])


@pytest.mark.nightly
@pytest.mark.arviz
def test_the_bias_of_a_run_is_a_number():
    mean, sd, _ = exact()
    # OBABO at h = 1 is too wide by a third in variance
    kernel = SGHMC(linear, integrator="obabo", step_size=1.0, noise_variance="estimated",
                   tuning=CCAdL(linear, progress_bar=False).tune(random.key(1), X, Y))  # fmt: skip
    mcmc = run_of(kernel, X, Y)
    found = debiased(mcmc, quantiles=(0.1,))
    table = found.table
    right = np.concatenate([mean, sd**2, mean + sd * stats.norm.ppf(0.1)])
    assert list(table.index[:1]) == ["mean of w[0]"] and table.index[-1] == "0.1 quantile of w[2]"
    assert np.all(np.abs(table["debiased"] - right) < 4 * table["error"])
    assert np.all((table["error"] / found.scale)[:6] < 0.03)
    bias = table.filter(like="variance", axis=0)["bias"] / sd**2
    assert np.all(np.abs(bias - 1 / 3) < 0.15)
    far = table.filter(like="variance", axis=0)
    assert np.all(far["bias"] > 4 * far["bias_error"])
    assert found.verdict.startswith("The run is off in")
    assert "the most in the variance of w[" in found.verdict
    # a column of the summary
    shown = summary(mcmc, debiased=found).table
    np.testing.assert_allclose(shown["debiased_mean"], table["debiased"][:3])
    np.testing.assert_allclose(shown["debiased_sd"], np.sqrt(table["debiased"][3:6]))
    other = debiased(mcmc, var_names=["w"], num_draws=2_000, rng_key=random.key(0)).table
    again = debiased(mcmc, num_draws=2_000).table
    np.testing.assert_array_equal(other, again)


@pytest.mark.nightly
@pytest.mark.arviz
def test_a_right_run_is_not_accused_and_functions_are_asked_of():
    mean, sd, _ = exact()
    mcmc = run_of(CCAdL(linear, progress_bar=False), X, Y)

    def first_two(draw):
        return {"sum": draw["w"][0] + draw["w"][1], "squares": draw["w"] ** 2}

    found = debiased(mcmc, first_two)
    assert list(found.table.index) == ["squares[0]", "squares[1]", "squares[2]", "sum"]
    right = [*(mean**2 + sd**2), mean[0] + mean[1]]
    assert np.all(np.abs(found.table["debiased"] - right) < 4 * found.table["error"])
    assert found.verdict.startswith("No bias of the run is seen")
    assert "passes" in str(found) and "<table" in found._repr_html_()
    with pytest.raises(ValueError, match="The table of `debiased` has means of"):
        summary(mcmc, debiased=found)


@pytest.mark.nightly
def test_runs_of_any_kernel_are_judged():
    mean, _, _ = exact()
    nuts = run_of(NUTS(full_data(linear)), jnp.asarray(X), jnp.asarray(Y))
    # of the first order, and of minibatches that are not independent
    first = run_of(SGLD(linear, step_size=1e-5, subsampling="epochs", steps_per_sample=50), X, Y)
    for mcmc in (nuts, first):
        table = debiased(mcmc).table.iloc[:3]
        assert np.all(np.abs(table["debiased"] - mean) < 4 * table["error"])


def groups(group, y, batch_size=100):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("groups", 10):
        effect = numpyro.sample("effect", dist.Normal(mean, spread))
    numpyro.deterministic("largest", effect.max())
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(effect[group[i]], 1), obs=y[i])


@pytest.mark.nightly
def test_hierarchies_keep_their_coordinates_and_names():
    rng = np.random.default_rng(0)
    group = rng.integers(0, 10, 3_000)
    y = (0.3 * rng.standard_normal(10)[group] + rng.standard_normal(3_000)).astype(np.float32)
    nuts = run_of(NUTS(full_data(groups)), jnp.asarray(group), jnp.asarray(y), samples=5_000)
    mcmc = run_of(CCAdL(groups, progress_bar=False), group, y, samples=2_000)
    found, other = (debiased(run, num_draws=20_000).table for run in (mcmc, nuts))
    assert "mean of largest" in found.index and "variance of effect[9]" in found.index
    # of one run in the coordinates of a tuning, of the other in those of its draws
    error = np.hypot(found["error"], other["error"])
    assert np.all(np.abs(found["debiased"] - other["debiased"]) < 4.5 * error)
    assert np.all(np.abs(found["debiased"] - nuts_values(nuts, found)) < 4.5 * found["bias_error"])


def nuts_values(nuts, table):
    return debiased(nuts, num_draws=2_000).table["run"].reindex(table.index)


def gamma(y, batch_size=25):
    shape = numpyro.sample("shape", dist.LogNormal(0, 2))
    rate = numpyro.sample("rate", dist.LogNormal(0, 2))
    with numpyro.plate("rows", y.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Gamma(shape, rate), obs=y[i])


@pytest.mark.nightly
def test_standard_errors_are_right_on_a_skewed_posterior():
    y = np.random.default_rng(0).gamma(0.5, size=50)
    axis = np.linspace(-5, 3, 1_001)
    a, b = np.exp(np.meshgrid(axis, axis, indexing="ij"))
    log_density = 50 * stats.gamma.logpdf(1.0, 1.0)  # a constant
    log_density += (
        (a - 1) * np.log(y).sum()
        - b * y.sum()
        + 50 * (a * np.log(b) - jax.scipy.special.gammaln(a))
    )
    log_density = log_density - (np.log(a) ** 2 + np.log(b) ** 2) / 8
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    right = [np.sum(weights * b), np.sum(weights * a)]
    right += [np.sum(weights * (b - right[0]) ** 2), np.sum(weights * (a - right[1]) ** 2)]
    mcmc = run_of(CCAdL(gamma, progress_bar=False), y)
    scores = []
    for key in range(50):
        table = debiased(mcmc, rng_key=random.key(key)).table
        assert list(table.index[:2]) == ["mean of rate", "mean of shape"]
        scores.append((table["debiased"] - right) / table["error"])
    spread = np.sqrt(np.mean(np.square(scores), axis=0))
    # of 50 scores the spread is known to a tenth
    assert np.all((0.75 < spread) & (spread < 1.3)), spread


def banana():
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(x**2, 0.1))


def two_wells(depth):
    x = numpyro.sample("x", dist.Normal(0, 10))
    numpyro.factor("wells", -depth * (x**2 - 1) ** 2)


@pytest.mark.slow
def test_modes_between_which_no_chain_goes_are_told():
    normal = np.random.default_rng(0).standard_normal((2, 4, 500))
    modes = np.sign(normal[0]) + 0.2 * normal[1]
    found = debiased(with_draws(two_wells, (10.0,), {"x": modes}), num_draws=5_000)
    assert "have stayed in parts of the posterior" in found.verdict


def improper(y):
    a = numpyro.sample("a", dist.ImproperUniform(dist.constraints.real, (), ()))
    b = numpyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), ()))
    with numpyro.plate("rows", len(y), subsample_size=20) as i:
        numpyro.sample("y", dist.Normal(a + b, 1), obs=y[i])


@pytest.mark.nightly
def test_what_cannot_be_debiased_is_said():
    mean, sd, _ = exact()
    normal = np.random.default_rng(0).standard_normal((4, 500, 3))
    few = with_draws(linear, (X, Y), {"w": (mean + sd * normal)[:, :20]})
    with pytest.raises(ValueError, match="has 80 draws of .*`debiased` needs 100"):
        debiased(few)
    stuck = with_draws(linear, (X, Y), {"w": mean + sd * normal * [1, 0, 1]})
    with pytest.raises(ValueError, match="never move "):
        debiased(stuck)
    apart = with_draws(linear, (X, Y), {"w": mean + sd * (normal + np.arange(4)[:, None, None])})
    with pytest.raises(ValueError, match="do not agree: R-hat"):
        debiased(apart)
    hot = with_draws(linear, (X, Y), {"w": mean + sd * normal}, temperature=2.0)
    with pytest.raises(ValueError, match="temperature=2.0"):
        debiased(hot)
    right = with_draws(linear, (X, Y), {"w": mean + sd * normal})
    with pytest.raises(ValueError, match="`quantiles` must be a number between 0 and 1"):
        debiased(right, quantiles=(1.5,))
    with pytest.raises(ValueError, match="`num_draws` must be an integer of 100 or more; got 7"):
        debiased(right, num_draws=7)
    x = normal[..., 0]
    with pytest.raises(ValueError, match="do not stay together: at the step size 0.0156"):
        debiased(with_draws(banana, (), {"x": x, "y": x**2 + 0.1 * normal[..., 1]}))
    y = Y[:200]
    level, away = 0.1 * normal[..., 0], 100 * normal[..., 1]
    wandering = {"a": level + away, "b": y.mean() - away}
    found = debiased(with_draws(improper, (y,), wandering))
    assert "Nothing is known: 64 coupled chains" in found.verdict


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("functions", "said"),
    [
        (lambda draw: {"f": jnp.log(-(draw["w"] ** 2))}, "not finite for 'f'"),
        (lambda draw: {"f": draw["w"][0], "g": 1 / (draw["w"] * 0)}, "not finite for 'g'"),
        (lambda draw: {"f": jnp.where(draw["w"][0] > 0, jnp.nan, 1.0)}, "not finite for 'f'"),
        (lambda draw: {}, "it gives nothing"),
        (lambda draw: draw["v"], "must map .* to a dict .* It raised KeyError: 'v'"),
        (lambda draw: float(draw["w"][0]), "must map .* to a dict .* It raised Concretization"),
        (lambda draw: None, "must map .* to a dict .* It raised TypeError"),
        ("w", "must be a function of the values of one draw, by name; got 'w'"),
    ],
)
def test_functions_without_a_mean_are_refused(functions, said):
    mean, sd, _ = exact()
    normal = np.random.default_rng(0).standard_normal((4, 50, 3))
    run = with_draws(linear, (X, Y), {"w": mean + sd * normal})
    with pytest.raises(ValueError, match=f"`functions` .*{said}"):
        debiased(run, functions)


@pytest.mark.slow
def test_too_much_noise_is_said(monkeypatch):
    mean, sd, _ = exact()
    monkeypatch.setattr(_coupled_chains, "_FEW_ROWS", 0)
    monkeypatch.setattr(_coupled_chains, "_COVERS", 1e-9)
    normal = np.random.default_rng(0).standard_normal((4, 100, 3))
    with pytest.raises(ValueError, match="Use a larger `subsample_size`"):
        debiased(with_draws(steep, (X, Y), {"w": mean + sd * normal}))
