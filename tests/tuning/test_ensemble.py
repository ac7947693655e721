# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Chains that start at optima of their own, and steps by the variance of the energy."""

import functools
from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer.util import potential_energy
import optax
import pytest
from runs import run_mcmc
import small_models

from numpyro_sgmcmc import SGHMC, SGMCLMC, CCAdL, Ensemble, Replicas, full_data
from numpyro_sgmcmc.kernels import ensemble_start
from numpyro_sgmcmc.tuning import ensemble

COMPILE_QUICKLY = True
RNG = np.random.default_rng(0)
X = RNG.uniform(-2, 2, (200, 1)).astype(np.float32)
Y = (np.sin(1.5 * X[:, 0]) + 0.1 * RNG.standard_normal(200)).astype(np.float32)


def network(x, y, batch_size=50):
    w1 = numpyro.sample("w1", dist.Normal(0, 2).expand([1, 8]).to_event(2))
    b1 = numpyro.sample("b1", dist.Normal(0, 2).expand([8]).to_event(1))
    w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([8]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        mean = jnp.tanh(x[i] @ w1 + b1) @ w2
        numpyro.sample("y", dist.Normal(mean, 0.1), obs=y[i])


def of_model(draw, x=X):
    return jnp.tanh(x @ draw["w1"] + draw["b1"]) @ draw["w2"]


def states(kernel, chains=3):
    return kernel.init(random.split(random.key(0), chains), 1, None, (X, Y), {})


def after_run(kernel, warmup, samples, *data):
    return run_mcmc(kernel, *data, warmup=warmup, samples=samples, chains=4)


@pytest.mark.nightly
def test_each_chain_starts_at_an_optimum_of_its_own():
    state = states(SGHMC(network, 1e-3, 10.0, start=Ensemble(steps=2_000, learning_rate=0.02)))
    fits = np.asarray(jax.vmap(of_model)(state.z))
    error = np.sqrt(np.mean((fits - Y) ** 2, axis=1))
    assert np.all(error < 0.2), error
    weights = np.asarray(state.z["w1"]).reshape(3, -1)
    assert np.abs(np.diff(weights, axis=0)).max(axis=1).min() > 0.5
    # by the descent, and not by where it starts
    few = states(SGHMC(network, 1e-3, 10.0, start=Ensemble(steps=1)))
    assert np.sqrt(np.mean((np.asarray(jax.vmap(of_model)(few.z)) - Y) ** 2)) > 0.5
    one = SGHMC(network, 1e-3, 10.0, start=Ensemble(steps=1))
    assert one.init(random.key(0), 1, None, (X, Y), {}).z["w1"].shape == (1, 8)


@pytest.mark.nightly
def test_a_progress_bar_shows_the_parts_of_a_descent_and_changes_nothing(monkeypatch, capsys):
    def found(**options):
        kernel = SGHMC(network, 1e-3, 10.0, start=Ensemble(steps=30), **options)
        return states(kernel).z["w1"], capsys.readouterr().err

    hidden, nothing = found(progress_bar=False)
    for name in ("CI", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    shown, bar = found()
    assert "ensemble:" not in nothing and "0/30" in bar
    monkeypatch.setattr(ensemble, "_PARTS", 1)
    np.testing.assert_array_equal(shown, hidden)
    np.testing.assert_allclose(found()[0], hidden, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_steps_are_as_long_as_the_energy_allows_and_chains_stay_near():
    kernels = [SGMCLMC(network, start=Ensemble(3_000, 0.02, v)) for v in (0.5, 0.005)]
    for kernel in kernels:
        states(kernel)
    large, small = (kernel.tuning.step_size for kernel in kernels)
    assert small <= large / 2 and kernels[0].steps_per_sample == 100
    mcmc = after_run(kernels[1], 50, 50, X, Y)
    start = states(kernels[1], 4).z

    def potential(draw):
        return potential_energy(full_data(network), (X, Y), {}, draw)

    # chains that went on with the descent would be below, and lost ones far above: 12 is what 24
    # parameters around an optimum come to
    above = jax.vmap(potential)(mcmc.get_samples()).mean() - jax.vmap(potential)(start).mean()
    assert 0 < above < 24
    pooled = np.asarray(jax.vmap(of_model)(mcmc.get_samples())).mean(axis=0)
    assert np.sqrt(np.mean((pooled - np.sin(1.5 * X[:, 0])) ** 2)) < 0.05
    # the same chains again: nothing is found anew
    found = kernels[1].tuning
    assert states(kernels[1]).fixed.step_size == found.step_size
    assert kernels[1].tuning is found


@pytest.mark.nightly
def test_members_that_are_lost_are_told():
    kernel = SGHMC(network, 1e-3, 10.0, start=Ensemble(steps=5))

    def lost(target, starts, *rest):
        starts = jax.tree.map(lambda v: v.at[1].set(jnp.nan), starts)
        return found(target, starts, *rest)

    found = ensemble.find_members
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ensemble_start, "find_members", lost)
        with pytest.warns(UserWarning, match="1 of 3 members of the ensemble did not end"):
            state = states(kernel)
    assert all(np.isfinite(v).all() for v in jax.tree.leaves(state.z))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            optax, "apply_updates", lambda values, _: jax.tree.map(lambda v: v * jnp.nan, values)
        )
        other = SGHMC(network, 1e-3, 10.0, start=Ensemble(steps=6))
        with pytest.raises(ValueError, match="None of 3 members of the ensemble ended"):
            states(other)


@pytest.mark.nightly
def test_what_cannot_start_is_said():
    with pytest.raises(ValueError, match="must be None, 'ensemble' or an `Ensemble`; got 'best'"):
        SGMCLMC(network, start="best")
    with pytest.raises(ValueError, match="`learning_rate` must be a positive finite number; got 0"):
        Ensemble(learning_rate=0)
    with pytest.raises(ValueError, match="no `metric` or `tuning` fits all chains"):
        SGMCLMC(network, start="ensemble", metric="dense")
    with pytest.raises(ValueError, match="without the anchor of a control variate .*Use gradient="):
        SGMCLMC(network, start="ensemble", gradient="control_variate")
    with pytest.raises(ValueError, match="SGHMC with start='ensemble' needs `step_size`"):
        states(SGHMC(network, start=Ensemble(steps=1)))
    with pytest.raises(ValueError, match="even in a step of .* may be at most 1e-12"):
        states(SGMCLMC(network, start=Ensemble(steps=1, energy_variance=1e-12)))
    kernel = SGHMC(network, 1e-3, 10.0, start=Ensemble(steps=1))
    keys = random.split(random.key(0), 2)
    with pytest.raises(ValueError, match="traced random keys"):
        jax.vmap(lambda key: kernel.init(key, 1, None, (X, Y), {}))(keys)


@pytest.mark.slow
def test_members_are_the_best_along_their_descent_by_rows_that_were_held_out(monkeypatch):
    found = []

    def kept(*arguments):
        found.append(ensemble_of(*arguments))
        return found[-1]

    ensemble_of = ensemble.find_members
    monkeypatch.setattr(ensemble_start, "find_members", kept)

    def member(held_out):
        start = Ensemble(steps=1_000, learning_rate=2e-3, held_out=held_out)
        draws = states(SGHMC(network, 1e-3, 10.0, start=start)).z
        fits = np.asarray(jax.vmap(of_model)(draws))
        return found[-1].steps.tolist(), ((fits - Y) ** 2).mean(axis=1)

    steps, last = member(None)
    assert steps == [1_000] * 3
    # the more is learned of the rows of the run the worse for these
    steps, early = member((X[:120], -Y[:120]))
    assert steps == [50] * 3 and np.all(early > last)
    steps, late = member((X[:120], Y[:120]))
    assert min(steps) > 500 and np.all(late < 1.05 * last)


def test_rows_that_were_held_out_are_checked():
    with pytest.raises(ValueError, match="`held_out` must be a tuple"):
        Ensemble(held_out=[X, Y])

    of_columns = partial(small_models.linear, batch_size=50)

    two = np.concatenate([X, X], axis=1)
    kernel = SGHMC(of_columns, 1e-3, 10.0, start=Ensemble(steps=1, held_out=(two, Y)))
    with pytest.raises(ValueError, match=r"the parameters \{'w': \(2,\)\} .* but \{'w': \(1,\)\}"):
        kernel.init(random.key(0), 1, None, (X, Y), {})
    kernel = SGHMC(of_columns, 1e-3, 10.0, start=Ensemble(steps=1, held_out=(X[:20], Y[:20])))
    with pytest.raises(ValueError, match="`held_out` .*=50.*fewer rows than a minibatch"):
        kernel.init(random.key(0), 1, None, (X, Y), {})


TRUE_SCALES = np.array([0.1, 1.0, 10.0])
X3 = (RNG.standard_normal((2_000, 3)) * TRUE_SCALES).astype(np.float32)
Y3 = (X3 @ np.ones(3) + RNG.standard_normal(2_000)).astype(np.float32)


linear = partial(small_models.linear, prior=0.5)


LINEAR_START = Ensemble(steps=5_000, learning_rate=0.02)


@pytest.mark.nightly
def test_the_metric_of_a_chain_has_the_curvature_at_its_member():
    kernel = SGHMC(linear, 0.01, 1.0, start=LINEAR_START, metric="diagonal")
    state = kernel.init(random.split(random.key(0), 3), 1, None, (X3, Y3), {})
    residuals = Y3 - X3.astype(float) @ np.asarray(state.z["w"]).mean(axis=0)
    exact = ((X3.astype(float) ** 2).T @ residuals**2 + 4) ** -0.5
    scale = np.asarray(state.fixed.metric.scale)
    # the root of a variance of 200: 5 % each, and 4 of these for 9 of them
    np.testing.assert_allclose(scale, np.broadcast_to(exact, (3, 3)), rtol=0.2)
    np.testing.assert_allclose(scale.mean(axis=0), exact, rtol=0.1)
    # each its own, the one that it has by itself
    alone = kernel.init(random.split(random.key(0), 3)[1], 1, None, (X3, Y3), {})
    np.testing.assert_allclose(alone.fixed.metric.scale, scale[1], rtol=1e-3)
    assert np.abs(scale[0] / scale[1] - 1).max() > 0.01
    np.testing.assert_array_equal(state.fixed.metric.center, state.z["w"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind, settings",
    [
        (SGHMC, {"friction": 5.0}),
        pytest.param(SGMCLMC, {"friction": 2.0}, marks=pytest.mark.slow),
        pytest.param(
            SGHMC,
            {"friction": 5.0, "replicas": Replicas((1.0, 2.0), minibatches=2)},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_chains_with_metrics_of_their_own_are_chains_with_these_metrics(kind, settings):
    settings = {"step_size": 0.02, "steps_per_sample": 5, "gradient": "minibatch", **settings}
    kernel = kind(linear, start=LINEAR_START, metric="diagonal", **settings)
    keys = random.split(random.key(1), 2)
    together = kernel.init(keys, 1, None, (X3, Y3), {})
    metric, start = together.fixed.metric, together.z["w"]
    for _ in range(3):
        together = kernel.sample(together, (X3, Y3), {})
    for chain in range(2):
        variances = np.asarray(metric.scale[chain], float) ** 2
        alone = kind(linear, metric=variances, **settings)
        state = alone.init(keys[chain], 1, {"w": start[chain]}, (X3, Y3), {})
        for _ in range(3):
            state = alone.sample(state, (X3, Y3), {})
        moved = np.abs(np.asarray(state.z["w"] - start[chain]))
        assert (moved > 0.01 * np.sqrt(variances)).all()
        difference = np.abs(np.asarray(state.z["w"] - together.z["w"][chain]))
        assert (difference < 0.01 * np.sqrt(variances)).all(), difference / np.sqrt(variances)


@pytest.mark.nightly
def test_chains_with_metrics_of_their_own_have_the_law_of_the_posterior():
    kernel = CCAdL(
        linear,
        step_size=0.1,
        friction=2.0,
        gradient="minibatch",
        start=LINEAR_START,
        metric="diagonal",
        steps_per_sample=20,
    )
    mcmc = after_run(kernel, 100, 6_000, X3, Y3)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], float)
    precision = X3.T.astype(float) @ X3 + 4 * np.eye(3)
    covariance = np.linalg.inv(precision)
    mean, sd = covariance @ (X3.T @ Y3.astype(float)), np.sqrt(np.diag(covariance))
    standard = (draws - mean) / sd
    for values, expected in ((standard, 0.0), (standard**2, 1.0)):
        for k in range(3):
            effective = effective_sample_size(values[..., k])
            error = values[..., k].std() / effective**0.5
            assert error < 0.0125 * (1 if expected else 4), error  # of variances 5 % would be seen
            assert abs(values[..., k].mean() - expected) < 4 * error


def test_a_metric_of_its_own_is_refused_where_none_is_found():
    with pytest.raises(ValueError, match="tuned from the gradients of minibatches, but each"):
        start = Ensemble(steps=1)
        model = functools.partial(network, batch_size=len(Y))
        states(SGHMC(model, 1e-3, 10.0, start=start, metric="diagonal"))
    kernel = SGHMC(linear, 0.01, 1.0, start=LINEAR_START, metric="diagonal")
    with pytest.raises(ValueError, match="tuned in the descents, and `init_params` replaces"):
        kernel.init(random.key(0), 1, {"w": jnp.zeros(3)}, (X3, Y3), {})


@pytest.mark.nightly
def test_steps_are_in_units_of_the_metric():
    sizes = []
    for metric in (None, "diagonal"):
        kernel = SGMCLMC(linear, start=LINEAR_START, metric=metric)
        kernel.init(random.split(random.key(0), 2), 1, None, (X3, Y3), {})
        sizes.append(kernel.tuning.step_size)
    # the narrowest coordinate has a standard deviation of 0.002, where 200 times the variance of
    # the energy is allowed
    assert sizes[0] < 0.01 < 0.05 < sizes[1], sizes
