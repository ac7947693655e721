# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Kernels that tune themselves: what they find, that they find it again, and what they sample."""

from contextlib import nullcontext
from functools import partial
import warnings

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from numpyro.infer.initialization import init_to_uniform, init_to_value
import optax
import pytest
from runs import run_mcmc, target_of
from small_models import logistic

from numpyro_sgmcmc import (
    PSGLD,
    SGFS,
    SGHMC,
    SGLD,
    SGNHT,
    SMSUBU,
    ApproximateScaleAdaptedSGHMC,
    CCAdL,
    full_data,
)
from numpyro_sgmcmc.kernels import self_tuning
from numpyro_sgmcmc.posterior import potential
from numpyro_sgmcmc.posterior import target as target_module
from numpyro_sgmcmc.posterior.control_variate import ControlVariate
from numpyro_sgmcmc.posterior.metric import (
    DenseMetric,
    DiagonalMetric,
    IdentityMetric,
    LowRankMetric,
    from_covariance,
)
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.potential import full_data_gradient
from numpyro_sgmcmc.posterior.target import Target, _quick_compilation
from numpyro_sgmcmc.stein import SteinReport, start_sums, stein_report
from numpyro_sgmcmc.tuning import expansion, phases, speed
from numpyro_sgmcmc.tuning.curvature import find_curvature
from numpyro_sgmcmc.tuning.gaussian import Gaussian, find_metric
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel, measure_noise
from numpyro_sgmcmc.tuning.phases import run_phases
from numpyro_sgmcmc.tuning.pilot import run_pilot
from numpyro_sgmcmc.tuning.pilot_rhat import Halves, PilotRun
from numpyro_sgmcmc.tuning.request import Known, TuningRequest
from numpyro_sgmcmc.tuning.tuning import Tuning
from numpyro_sgmcmc.tuning.words import warn_of

RNG = np.random.default_rng(0)
N, D = 3_000, 4
MIXED = RNG.standard_normal((N, D - 1)) @ RNG.standard_normal((D - 1, D - 1))
X = np.column_stack([np.ones(N), MIXED]) * np.array([1.0, 1.0, 0.1, 10.0])
LOGITS = X @ np.array([0.5, -0.5, 1.0, 0.05])
Y = jnp.asarray(RNG.random(N) < 1 / (1 + np.exp(-LOGITS)), jnp.float32)
X = jnp.asarray(X, jnp.float32)


run = partial(run_mcmc, warmup=300, samples=1_000, chains=4, key=1)


@pytest.fixture(scope="module")
def nuts():
    mcmc = run(NUTS(full_data(logistic), dense_mass=True), X, Y, samples=2_000)
    return np.asarray(mcmc.get_samples(True)["w"], float)


@pytest.fixture(scope="module")
def tuning():
    return CCAdL(logistic, progress_bar=False).tune(random.key(0), X, Y)


def assert_same_posterior(found, expected, bias=0.05):
    """Means and standard deviations, up to their Monte-Carlo errors and a relative bias."""
    found = np.asarray(found, float)
    errors = np.sqrt(1 / effective_sample_size(found) + 1 / effective_sample_size(expected))
    sd = expected.std((0, 1))
    means = np.abs(found.mean((0, 1)) - expected.mean((0, 1))) / sd
    np.testing.assert_array_less(means, 2 * bias + 3.5 * errors)
    np.testing.assert_array_less(np.abs(found.std((0, 1)) / sd - 1), bias + 3.5 * errors / 2**0.5)


def differing(one, other):
    """The leaves that are not the same to the last bit."""
    leaves = jax.tree_util.tree_leaves_with_path(one)
    pairs = zip(leaves, jax.tree.leaves(other), strict=True)
    return [
        (jax.tree_util.keystr(path), a, b) for (path, a), b in pairs if not np.array_equal(a, b)
    ]


@pytest.mark.slow
def test_what_is_found(tuning, nuts):
    assert isinstance(tuning.metric, DenseMetric) and tuning.anchor is not None
    assert 0.5 <= tuning.step_size <= 1.0 and tuning.halvings == 0 and tuning.problem is None
    assert not tuning.multimodal
    assert tuning.noise.mean < tuning.plain_noise.mean / 10
    covariance = np.cov(nuts.reshape(-1, D).T)
    np.testing.assert_array_less(
        np.abs(tuning.metric.center - nuts.mean((0, 1))), 0.2 * np.sqrt(np.diag(covariance))
    )
    factor = np.asarray(tuning.metric.factor, float)
    relative = np.linalg.eigvals(np.linalg.solve(covariance, factor @ factor.T)).real
    assert np.all((relative > 0.6) & (relative < 1.6))
    assert set(tuning.passes) == {"centre", "metric", "noise", "rare rows", "pilot"}
    assert "control variate" in str(tuning) and "passes over the data" in str(tuning)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [CCAdL]
    + [
        pytest.param(k, marks=pytest.mark.nightly)
        for k in (SGLD, SGHMC, SGNHT, PSGLD, SGFS, SMSUBU)
    ],
)
def test_nothing_but_the_model(kernel, nuts):
    """The same posterior as NUTS, with no argument but the model."""
    mcmc = run(kernel(logistic, progress_bar=False), X, Y, samples=1_500)
    found = np.asarray(mcmc.get_samples(True)["w"])
    assert_same_posterior(found, nuts)
    # samples that are almost independent, of the squares too
    for x in (found, (found - found.mean((0, 1))) ** 2):
        assert effective_sample_size(x).min() > 0.3 * 4 * 1_500


@pytest.mark.nightly
def test_steps_per_sample(tuning):
    def of(**options):
        kernel = CCAdL(logistic, tuning=tuning, **options)
        mcmc = run(kernel, X, Y, warmup=1, samples=2, jit_model_args=True)
        assert set(np.asarray(mcmc.last_state.i)) == {3 * kernel.steps_per_sample}
        assert kernel.run_info["steps_per_sample"] == kernel.steps_per_sample
        return kernel, mcmc

    assert tuning.steps_per_sample == np.ceil(4 / tuning.step_size)
    kernel, mcmc = of()
    assert kernel.steps_per_sample == tuning.steps_per_sample
    assert of(steps_per_sample=1)[0].steps_per_sample == 1
    assert of(step_size=0.1)[0].steps_per_sample == 1
    # other data may be tuned to another number: the program of the same object must follow
    kernel.method = kernel.method.with_values(tuning=tuning._replace(steps_per_sample=7))
    mcmc.run(random.key(0), X, Y)
    assert set(np.asarray(mcmc.last_state.i)) == {3 * 7}


@pytest.mark.parametrize(
    ("friction", "scale", "expected"),
    [(None, 1.0, 1.0), (None, 2.0, 4.0), (0.7, 1.0, 2.0), (5.0, 1.0, 5.0), (0.7, 3.0, 6.3)],
)
def test_memory_of_a_chain(friction, scale, expected):
    """In units of the metric; the width is that of 100 draws, to 7 % for each of 3 coordinates."""
    start = DenseMetric(jnp.zeros(3), scale * jnp.eye(3), jnp.eye(3) / scale)
    tuning = Tuning(0.1, friction, IdentityMetric(), start)
    assert CCAdL(logistic).method.relaxation_time(tuning) == pytest.approx(expected, rel=0.3)


@pytest.mark.nightly
@pytest.mark.parametrize("integrator", ["euler", "symmetric"])
def test_another_integrator(integrator, nuts):
    kernel = CCAdL(logistic, integrator=integrator, progress_bar=False)
    assert_same_posterior(run(kernel, X, Y, samples=2_000).get_samples(True)["w"], nuts)


@pytest.mark.nightly
@pytest.mark.parametrize("metric", ["diagonal", "low_rank", "given"])
def test_other_metrics(metric, nuts):
    """The step size fits the metric, where its coordinates are correlated or have other units."""
    given, least = (100 * nuts.var((0, 1)), 80) if metric == "given" else (metric, 1.2)
    kernel = CCAdL(logistic, metric=given, progress_bar=False)
    found = run(kernel, X, Y, samples=2_000).get_samples(True)["w"]
    assert_same_posterior(found, nuts)
    curvature = kernel.tuning.noise.curvature
    # eigenvalues of up to 2 get no direction of their own
    assert 0.8 < curvature < 2.1 if metric == "low_rank" else curvature > least, curvature


def untimed(tuning):
    """Without what depends on the machine, and a sum that each program rounds in its own way."""
    return tuning._replace(report=None, seconds_per_sample=None, fourth_cumulant=None)


@pytest.mark.nightly
def test_same_values_for_every_chain_method(tuning):
    """The values do not depend on chain method, key of the run or process of the chains."""
    found = []
    for k, method in enumerate(["sequential", "vectorized", "parallel"]):
        kernel = CCAdL(logistic, progress_bar=False)
        mcmc = run(kernel, X, Y, warmup=2, samples=2, chains=2, key=k, chain_method=method)
        tuned = mcmc.last_state.fixed
        if method != "vectorized":
            tuned = jax.tree.map(lambda x: x[0], tuned)
        found.append((tuned, untimed(kernel.tuning)))
    for values in (found[1], found[2], (found[0][0], untimed(tuning))):
        assert differing(found[0], values) == []
    other = CCAdL(logistic, progress_bar=False).tune(random.key(1), X, Y)
    assert differing(tuning.metric, other.metric)


@pytest.mark.nightly
def test_other_data_of_the_same_sums(tuning):
    """Responses in another order: a new anchor, a new tuning, and no old run goes on."""
    other = Y[::-1]
    kernel = SGLD(logistic, gradient="control_variate", step_size=1e-4, progress_bar=False)
    mcmc = run(kernel, X, Y, warmup=2, samples=2, chains=1)
    found = kernel.tuning
    run(kernel, X, other, warmup=2, samples=2, chains=1)
    assert kernel.tuning is not found
    kernel = CCAdL(logistic, tuning=tuning)
    mcmc = run(kernel, X, other, warmup=2, samples=2)
    anchor = mcmc.last_state.fixed.anchor
    assert np.array_equal(anchor.values["w"], tuning.anchor.values["w"])
    potential = Model(logistic, X, other).potential
    slope = jax.grad(potential)(tuning.anchor.values, {"rows": jnp.arange(N)}, random.key(0))
    np.testing.assert_allclose(anchor.gradient["w"], slope["w"], rtol=1e-3, atol=0.5)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(random.key(0), X, other)
    with pytest.raises(ValueError, match="the run cannot continue with"):
        mcmc.run(random.key(0), X, Y)


@pytest.mark.nightly
def test_chains_start_from_different_places(tuning):
    mcmc = run(CCAdL(logistic, tuning=tuning), X, Y, warmup=1, samples=1, chains=50)
    first = mcmc.get_samples(True)["w"][:, 0]
    z = jax.vmap(tuning.metric.coordinates)(first)
    assert 0.7 < float(z.std()) < 1.3


@pytest.mark.nightly
def test_given_values_are_kept(tuning):
    kernel = CCAdL(logistic, step_size=0.25, friction=2.0, tuning=tuning)
    state = run(kernel, X, Y, warmup=2, samples=2).last_state
    assert state.fixed.step_size == 0.25 and state.fixed.friction == 2.0
    assert kernel.run_info["step_size"] == 0.25 and kernel.run_info["metric"] == "dense"
    assert kernel.run_info["gradient"] == "control_variate"


class Model:
    """The potential of a model with its data."""

    def __init__(self, model, *args):
        self.model = read_model(model, init_to_uniform, args, {})
        self.target = Target(self.model, args, {})
        self.potential = self.target.potential(IdentityMetric())
        size = self.model.dimension
        self.point, self.other = (
            self.target.unravel(0.3 * random.normal(random.key(k), (size,))) for k in (1, 2)
        )

    def gradient(self, potential, values, rows):
        """The gradient on some rows of the only plate, as a vector."""
        slope = jax.grad(potential)(values, {"rows": rows}, random.key(0))
        return ravel_pytree(slope)[0]


def nested(x):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("columns", x.shape[1], subsample_size=2) as j:
        with numpyro.plate("rows", x.shape[0], subsample_size=10) as i:
            numpyro.sample("x", dist.StudentT(3.0, mean * (1 + j), 1.0), obs=x[i][:, j])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(10**6, marks=pytest.mark.nightly),
        pytest.param(1_000, marks=pytest.mark.nightly),
        pytest.param(700, marks=pytest.mark.nightly),
        7,
    ],
)
def test_one_pass_over_the_data(chunk, monkeypatch):
    """In chunks that divide the rows and that do not, it is the potential of all data."""
    monkeypatch.setattr(potential, "_CHUNK", chunk)
    # 2,999 is a prime number
    for model, args in ((logistic, (X[:2_999], Y[:2_999])), (nested, (X[:50],))):
        found = Model(model, *args)
        value, gradient = jax.jit(
            lambda z: full_data_gradient(found.potential, found.model.plates, z, random.key(0))
        )(found.point)
        rows = {plate.name: jnp.arange(plate.size) for plate in found.model.plates}
        expected = jax.value_and_grad(found.potential)(found.point, rows, random.key(0))
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected[1]), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-2)


def test_programs_that_compile_quickly():
    """Options of XLA where there are such; within another program there can be none."""
    # JAX 0.10 knows both, 0.12 only this one
    assert "xla_backend_optimization_level" in _quick_compilation()
    found = Model(logistic, X, Y)
    anchor = found.target.compiled(Target.anchor)
    alone, inside = anchor(found.point), jax.jit(anchor)(found.point)
    for other in (inside, anchor.optimised(found.point)):
        np.testing.assert_allclose(alone.gradient["w"], other.gradient["w"], rtol=1e-3, atol=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize(("long", "is_optimised"), [(3_000, False), (2_000, True)])
def test_long_pilots_have_optimised_programs(long, is_optimised, tuning, monkeypatch):
    """At least 600 steps with four parameters; the tuning is the same."""
    run = []
    timed = self_tuning._Pilot.seconds_of_a_step
    monkeypatch.setattr(self_tuning, "_LONG", long)
    monkeypatch.setattr(
        self_tuning._Pilot, "seconds_of_a_step", lambda pilot: run.append(pilot) or timed(pilot)
    )
    found = CCAdL(logistic, progress_bar=False).tune(random.key(0), X, Y)
    (pilot,) = run
    assert (pilot.latest.run is pilot.program.run.optimised) == is_optimised
    assert found.step_size == tuning.step_size
    np.testing.assert_allclose(found.report.temperature, tuning.report.temperature, atol=0.01)


def test_a_program_is_compiled_beside_what_is_done_next(compiled, monkeypatch):
    """And a call finds it: JAX says nothing of that, and this notices when it is no longer so."""
    monkeypatch.setattr(target_module.os, "cpu_count", lambda: 2)
    found = Model(logistic, X, Y)
    anchor = found.target.compiled(Target.anchor)
    anchor.prepare(found.point)
    assert anchor.run._pending.result() and compiled
    compiled.clear()
    prepared = anchor(found.point)
    assert not compiled
    at_once = found.target.compiled(Target.anchor)(found.point)
    np.testing.assert_array_equal(prepared.gradient["w"], at_once.gradient["w"])


def test_what_cannot_be_prepared_fails_where_it_is_used(monkeypatch):
    monkeypatch.setattr(target_module.os, "cpu_count", lambda: 2)
    broken = Model(logistic, X, Y).target.compiled(lambda target, x: jnp.linalg.inv(x))
    broken.prepare(jnp.ones(3))
    with pytest.raises(ValueError, match="[Aa]rgument"):
        broken(jnp.ones(3))


@pytest.mark.nightly
def test_a_tuning_for_other_data_compiles_nothing(compiled):
    """Programs are kept by name for data of the same shapes; numbers are those of a new kernel."""
    others = X[::-1] + 0.1, Y[::-1]
    kernel = CCAdL(logistic, progress_bar=False)
    kernel.tune(random.key(0), X, Y)
    compiled.clear()
    again = kernel.tune(random.key(1), *others)
    assert not compiled
    anew = CCAdL(logistic, progress_bar=False).tune(random.key(1), *others)
    np.testing.assert_array_equal(again.metric.center, anew.metric.center)
    assert (again.step_size, again.noise, again.passes) == (anew.step_size, anew.noise, anew.passes)


@pytest.mark.nightly
def test_a_run_takes_the_tuning_that_was_asked_for():
    """A new one would have its own key, and cost as much again."""
    kernel = CCAdL(logistic, progress_bar=False)
    tuning = kernel.tune(random.key(5), X, Y)
    assert kernel.tuning is tuning
    run(kernel, X, Y, warmup=1, samples=1, chains=1)
    assert kernel.tuning is tuning
    run(kernel, X[::-1] + 0.1, Y[::-1], warmup=1, samples=1, chains=1)
    assert kernel.tuning is not tuning


def controlled(found, order=1):
    return ControlVariate(found.potential, found.target.anchor(found.other, order))


orders = pytest.mark.parametrize("order", [1, 2])


@pytest.mark.nightly
def test_the_hessian_of_all_data(monkeypatch):
    """In chunks of the rows and of the columns, and in the order of flat vectors."""
    monkeypatch.setattr(potential, "_CHUNK", 700)
    monkeypatch.setattr(potential, "_COLUMNS", 3)
    for model, args in ((several_sites, (X[:1_000], Y[:1_000])), (nested, (X[:50],))):
        found = Model(model, *args)
        anchor = found.target.anchor(found.point, 2)
        rows = {plate.name: jnp.arange(plate.size) for plate in found.model.plates}
        flat, unravel = ravel_pytree(found.point)

        def whole(x, found=found, rows=rows, unravel=unravel):
            return found.potential(unravel(x), rows, random.key(0))

        expected = jax.hessian(whole)(flat)
        np.testing.assert_allclose(anchor.hessian, expected, rtol=1e-3, atol=0.05)


def several_sites(X, y):
    """Sites whose names are not in the order of the model."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", len(X), subsample_size=100) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w + b), obs=y[i])


@pytest.mark.nightly
@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_control_variate_is_unbiased(order):
    """Over a partition of the data its mean is the potential of all data, with its gradient."""
    found = Model(logistic, X, Y)
    potential = controlled(found, order)
    batches = jnp.arange(N).reshape(-1, 100)
    values, slopes = jax.vmap(
        lambda rows: jax.value_and_grad(potential)(found.point, {"rows": rows}, random.key(0))
    )(batches)
    whole = jax.value_and_grad(found.potential)(found.point, {"rows": jnp.arange(N)}, random.key(0))
    np.testing.assert_allclose(values.mean(), whole[0], rtol=1e-5)
    np.testing.assert_allclose(slopes["w"].mean(0), whole[1]["w"], rtol=1e-3, atol=0.05)
    energy, terms = potential.with_row_terms(found.point, {"rows": batches[0]}, random.key(0))
    assert energy == pytest.approx(float(values[0]), rel=1e-5)
    # what the rows contribute is all that depends on them
    assert energy + terms["rows"].sum() == pytest.approx(
        float(values[1])
        + float(
            potential.with_row_terms(found.point, {"rows": batches[1]}, random.key(0))[1][
                "rows"
            ].sum()
        ),
        rel=1e-4,
    )
    # the two ways to its gradient
    both = potential.value_and_gradient(found.point, {"rows": batches[0]}, random.key(0))
    np.testing.assert_allclose(both[0], values[0], rtol=1e-5)
    np.testing.assert_allclose(both[1]["w"], slopes["w"][0], rtol=1e-3, atol=0.05)


@pytest.mark.nightly
def test_noise_falls_with_the_order():
    """
    With the distance from the anchor the noise grows as the distance to the power of the order:
    a tenth of the way has a hundredth of the noise of second order.
    """
    found = Model(logistic, X[:, :2], Y)
    batches = jnp.arange(N).reshape(-1, 100)
    away = jax.tree.map(jnp.subtract, found.point, found.other)
    for order in (1, 2):
        potential, spread = controlled(found, order), []
        for share in (0.5, 0.05):
            point = jax.tree.map(lambda a, d, s=share: a + s * d, found.other, away)
            slopes = jax.vmap(
                lambda rows, u=potential, x=point: u.value_and_gradient(
                    x, {"rows": rows}, random.key(0)
                )[1]["w"]
            )(batches)
            spread.append(float(slopes.std(0).mean()))
        assert spread[0] / spread[1] == pytest.approx(10**order, rel=0.3)


@pytest.mark.nightly
@orders
def test_no_noise_at_the_anchor_or_for_gaussians(order):
    found = Model(logistic, X, Y)
    potential = controlled(found, order)
    batches = jnp.arange(N).reshape(-1, 100)
    slopes = jax.vmap(lambda rows: found.gradient(potential, found.other, rows))(batches)
    np.testing.assert_allclose(slopes, slopes[:1].repeat(30, 0), rtol=1e-3, atol=0.5)

    def mean(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    def regression(X, y):  # each row has a Hessian of its own
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=y[i])

    for model, args, is_quiet in (
        (mean, (X[:, 1],), True),
        (regression, (X, X[:, 1]), order == 2),
    ):
        found = Model(model, *args)
        spread, plain = (
            jax.vmap(lambda rows, u=u, f=found: f.gradient(u, f.point, rows))(batches).std(0).mean()
            for u in (controlled(found, order), found.potential)
        )
        assert (spread < 1e-4 * plain) == is_quiet


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("order", [0, 1, 2])
def test_law_with_a_control_variate(order):
    """SGLD of a Gaussian mean: without noise exactly 1 / (1 - h lambda / 2) times the variance."""

    def mean(y):
        prior = dist.ImproperUniform(dist.constraints.real_vector, (), (y.shape[1],))
        mu = numpyro.sample("mu", prior)
        with numpyro.plate("rows", len(y), subsample_size=50) as i:
            numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])

    y = random.normal(random.key(0), (500, 200))
    found = Model(mean, y)
    anchor = controlled(found, order).anchor if order else None
    h = 0.2 / 500
    tuning = Tuning(h, None, IdentityMetric(), anchor=anchor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc = run(SGLD(mean, tuning=tuning), y, samples=4_000, chains=1)
    squares = (np.asarray(mcmc.get_samples(True)["mu"], float) - np.asarray(y.mean(0))) ** 2 * 500
    series = squares.mean(-1)
    error = series.std() / effective_sample_size(series) ** 0.5
    law = 1 / (1 - 0.1)
    if order:
        assert error < 0.01 and abs(series.mean() - law) < 3.5 * error
    else:  # the negative control: the noise of these minibatches
        assert series.mean() - law > 10 * error


@pytest.mark.nightly
@pytest.mark.parametrize("order", [2, 1])
def test_where_the_gradient_is_taken(order):
    """
    Many coefficients and the scale of what they leave: half a drift further, where NOGIN takes the
    gradient, the coefficients are wider, and the scale is pushed by all of them together. With and
    without noise.
    """
    rows, size = 400, 60
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, size))
    y = x @ rng.standard_normal(size) + rng.standard_normal(rows)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 10).expand([size]).to_event(1))
        log_scale = numpyro.sample("z", dist.Normal(0, 10))
        with numpyro.plate("rows", rows, subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, jnp.exp(log_scale)), obs=y[i])

    # the coefficients integrated out, on a grid
    e, vectors = np.linalg.eigh(x @ x.T)
    grid = np.linspace(-0.5, 0.6, 10_001)
    variances = np.exp(2 * grid)[:, None] + 100 * e
    log_density = -0.5 * (np.log(variances) + (vectors.T @ y) ** 2 / variances).sum(1)
    p = np.exp(log_density - log_density.max() - 0.5 * (grid / 10) ** 2)
    p /= p.sum()
    mean, sd = p @ grid, np.sqrt(p @ (grid - p @ grid) ** 2)

    args = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    target = target_of(model, *args)
    precision = x.T @ x / np.exp(2 * mean)
    covariance = np.zeros((size + 1, size + 1))
    covariance[:size, :size], covariance[size, size] = np.linalg.inv(precision), 1 / (2 * rows)
    center = np.append(np.linalg.solve(x.T @ x, x.T @ y), mean)
    metric = from_covariance(covariance, center, jnp.float32)
    anchor = target.anchor(target.unravel(metric.center), order)
    tuning = Tuning(0.5, 0.7, metric, metric, anchor, steps_per_sample=6)
    off, error = {}, {}
    for integrator in ("symmetric", "nogin"):
        kernel = CCAdL(model, tuning=tuning, integrator=integrator, noise="diagonal")
        draws = np.asarray(run(kernel, *args, samples=2_000).get_samples(True)["z"], float)
        off[integrator] = abs(draws.mean() - mean) / sd
        error[integrator] = draws.std() / sd / effective_sample_size(draws) ** 0.5
    assert max(error.values()) < 0.015 and off["symmetric"] < 3.5 * error["symmetric"]
    assert off["nogin"] > 8 * error["nogin"]  # the negative control


@pytest.mark.nightly
def test_no_hessian_of_too_many_parameters(monkeypatch):
    monkeypatch.setattr(expansion, "DENSE_BY_DEFAULT", 3)
    target, noise = Model(logistic, X, Y).target, NoiseLevel(1.0, 100.0, 1.0, 0.1)
    asked = "second_order_control_variate"

    def steps(noise):
        return 1 + noise.largest

    with pytest.raises(ValueError, match="has 4 parameters, and no more than 3 are held"):
        expansion.worth_of_expansion(target, asked, steps, noise)
    assert expansion.worth_of_expansion(target, "auto", steps, noise) == 0


@pytest.mark.nightly
def test_the_integrator_suits_the_noise(tuning):
    quiet, noisy = (
        tuning._replace(noise=tuning.noise._replace(mean=0.0, largest=level / tuning.step_size**2))
        for level in (1.0, 1.1)
    )
    assert CCAdL(logistic).method.integrator_for(quiet) == "symmetric"
    another_metric = quiet._replace(noise=quiet.noise._replace(curvature=1.2))
    everywhere = quiet._replace(noise=quiet.noise._replace(mean=0.4 / tuning.step_size**2))
    bent = quiet._replace(noise=quiet.noise._replace(nonlinearity=0.2))
    hardly_any = bent._replace(noise=bent.noise._replace(largest=0.0))
    assert CCAdL(logistic).method.integrator_for(hardly_any) == "symmetric"
    funnel = hardly_any._replace(noise=hardly_any.noise._replace(nonlinearity=0.4))
    for found in (noisy, another_metric, everywhere, bent, funnel, tuning._replace(noise=None)):
        assert CCAdL(logistic).method.integrator_for(found) == "nogin"
    assert CCAdL(logistic, temperature=2.0).method.integrator_for(noisy) == "symmetric"
    assert CCAdL(logistic, noise="matrix_free").method.integrator_for(quiet) == "nogin"
    assert CCAdL(logistic, integrator="nogin").method.integrator_for(quiet) == "nogin"
    kernel = CCAdL(logistic, tuning=quiet)
    state = run(kernel, X, Y, warmup=2, samples=2, chains=1).last_state
    assert state.fixed.layout.integrator == kernel.run_info["integrator"] == "symmetric"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "chain_method", ["vectorized", pytest.param("sequential", marks=pytest.mark.nightly)]
)
def test_the_anchor_moves_on_request(chain_method, tuning):
    options = {"tuning": tuning, "gradient": "control_variate", "steps_per_sample": 1}
    state = run(CCAdL(logistic, **options), X, Y, samples=30, chain_method=chain_method).last_state
    center = tuning.anchor.values["w"]
    # one for all chains, or of chains one after the other as many
    anchors = np.broadcast_to(state.fixed.anchor.values["w"], (4, *center.shape))
    assert np.array_equal(anchors, jnp.stack([center] * 4))
    options["gradient"] = ("control_variate", 0.5)  # 15 steps of 100 of 3,000 rows
    kernel = CCAdL(logistic, **options)
    mcmc = run_mcmc(kernel, X, Y, key=1, warmup=0, samples=31, chains=4, chain_method=chain_method)
    anchor, draws = mcmc.last_state.fixed.anchor, mcmc.get_samples(True)["w"]
    # before the 31st step, so at the 30th draw
    np.testing.assert_allclose(anchor.values["w"], draws[:, 29], rtol=1e-5)
    found = Model(logistic, X, Y)
    one = jax.tree.map(lambda x: x[2], anchor)
    rows = {"rows": jnp.arange(N)}
    energy, slope = jax.value_and_grad(found.potential)(one.values, rows, random.key(0))
    assert one.potential == pytest.approx(float(energy), rel=1e-5)
    np.testing.assert_allclose(one.gradient["w"], slope["w"], rtol=1e-3, atol=0.5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "guide",
    [AutoDiagonalNormal, AutoMultivariateNormal],
)
def test_metric_of_a_fitted_guide(guide):
    guide = guide(full_data(logistic))
    svi = SVI(full_data(logistic), guide, optax.adam(0.01), Trace_ELBO())
    params = svi.run(random.key(0), 300, X, Y, progress_bar=False).params
    kernel = SGLD(logistic, step_size=1e-3, metric=(guide, params))
    run(kernel, X, Y, warmup=2, samples=2)
    metric = kernel.tuning.metric
    posterior = guide.get_posterior(params)
    np.testing.assert_allclose(
        np.diag(metric.factor @ metric.factor.T), posterior.variance, rtol=0.25
    )
    np.testing.assert_allclose(
        (metric.center - posterior.mean) / posterior.variance**0.5, 0, atol=0.15
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": np.ones(3)}, r"`metric` has shape \(3,\), but the model has 4 unconstrained"),
        ({"metric": "full"}, "`metric` must be one of 'identity', 'diagonal', 'low_rank', 'dense'"),
        ({"metric": np.array(["a"])}, "`metric` must be an array of variances"),
        ({"gradient": "full"}, "`gradient` must be one of 'auto', 'minibatch', 'control_variate'"),
        (
            {"gradient": ("control_variate", 0.0)},
            r"`gradient\[1\]` must be a positive finite number",
        ),
        ({"gradient": ("minibatch", 1.0)}, r"or \('control_variate', passes\) for an anchor"),
        ({"tuning": {"step_size": 1.0}}, r"`tuning` must be the result of `kernel.tune\(...\)`"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        run(SGLD(logistic, step_size=1e-4, **options), X, Y, warmup=2, samples=2)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"metric": "diagonal"}, "`tuning` has a metric already"),
        ({}, {"gradient": "minibatch"}, "was found for gradient='control_variate'"),
        ({"anchor": None}, {"gradient": "control_variate"}, "was found for gradient='minibatch'"),
        ({"friction": None}, {}, "has no friction, which CCAdL needs"),
    ],
)
def test_what_contradicts_a_tuning(change, options, message, tuning):
    with pytest.raises(ValueError, match=message):
        run(CCAdL(logistic, tuning=tuning._replace(**change), **options), X, Y)


def test_tuning_of_another_model(tuning):
    with pytest.raises(
        ValueError, match="found for 4 unconstrained parameters, but this model has 3"
    ):
        run(CCAdL(logistic, tuning=tuning), X[:, :3], Y)


METHODS = [
    CCAdL,
    partial(CCAdL, integrator="euler"),
    SGHMC,
    partial(SGHMC, noise_variance="estimated"),
    SGNHT,
    partial(SGNHT, integrator="euler"),
    SGLD,
    partial(SGLD, modified=True),
    PSGLD,
    SGFS,
    SMSUBU,
]


@pytest.mark.parametrize("kernel", METHODS)
def test_step_sizes_fall_with_noise_and_curvature(kernel):
    kernel = kernel(logistic)
    levels = [NoiseLevel(v, v, c, 0.2) for c in (1.0, 100.0) for v in (0.0, 0.01, 1.0, 100.0)]
    steps, frictions = np.array([kernel.method.suggest(level) for level in levels], float).T
    assert np.all((steps > 0) & (steps <= 0.5)) and not np.any(frictions <= 0)
    assert np.all(np.diff(steps.reshape(2, 4)) <= 0) and np.all(steps[:4] >= steps[4:])


def test_longer_steps_for_gaussians():
    """Only where the gradient is close to linear, and only for a method exact for Gaussians."""
    level = NoiseLevel(0.0, 0.0, 1.0, 0.0)
    steps = [
        CCAdL(logistic).method.suggest(level._replace(nonlinearity=nu))[0]
        for nu in (0.0, 0.05, 0.2, 0.8)
    ]
    np.testing.assert_allclose(steps, [1.0, 0.953, 0.423, 0.155], rtol=0.01)
    for kernel in METHODS[1:]:
        assert kernel(logistic).method.suggest(level._replace(nonlinearity=0.0))[0] <= 0.5


@pytest.mark.parametrize("bend", [0.0, 0.3])
def test_nonlinearity_of_the_gradient(bend):
    """A gradient of x, and for the last of many coordinates bend * sign(x) besides."""

    def bent(y):
        x = numpyro.sample("x", dist.ImproperUniform(dist.constraints.real_vector, (), (1_000,)))
        numpyro.factor("y", -jnp.sum(x**2) / 2 - bend * jnp.log(jnp.cosh(50 * x[-1])) / 50)

    metric = DiagonalMetric(jnp.zeros(1_000), jnp.ones(1_000))
    target = Model(bent, jnp.zeros(1)).target
    found = measure_noise(target, random.key(0), Gaussian(metric, 0.0, 1.0), metric, False)
    # sign(x) - 2 sign(x / 2) is a sign; the usual size is known from 8,000 normal numbers
    error, mean = (2 / 8_000) ** 0.5 / 2, np.arange(0, 9, 2) / 8
    expected = bend * np.sqrt(1.5 * (1 - mean**2) * 8 / 7)
    assert np.any(np.abs(found.plain.nonlinearity - expected) <= 3 * error * expected + 1e-6)
    assert (found.plain.nonlinearity > 0.15) == (bend > 0)
    assert found.plain.mean == 0 and found.plain.curvature == 1


@pytest.mark.nightly
def test_rounding_errors_are_not_taken_for_a_nonlinearity():
    """One slope of a Gaussian is rounded by 0.1, as if at random."""

    def rough(y):
        x = numpyro.sample("x", dist.ImproperUniform(dist.constraints.real_vector, (), (12,)))
        numpyro.factor("y", 0.15 * jnp.cos(1e4 * x[0]) / 1e4 - jnp.sum(x**2) / 2)

    metric = DiagonalMetric(jnp.zeros(12), jnp.ones(12))
    target, gaussian = Model(rough, jnp.zeros(1)).target, Gaussian(metric, 0.0, 1.0)
    found = [
        measure_noise(target, key, gaussian, metric, False)
        for key in random.split(random.key(0), 40)
    ]
    squares, error = [one.rounding**2 for one in found], (2 / (8 * 40)) ** 0.5
    assert abs(np.mean(squares) / (0.15**2 / 2) - 1) < 3 * error
    # most of 40 keys found one when 4 lines of 8 told what is rounding
    assert np.mean([one.plain.nonlinearity < 0.1 for one in found]) > 0.85


def rounded(offset, size):
    """A standard normal, whose gradient (x + c) - c has the spacing of the numbers around c."""

    def model(y):
        x = numpyro.sample("x", dist.ImproperUniform(dist.constraints.real_vector, (), (size,)))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            squares = 0.5 * jnp.sum((x + offset) ** 2) - offset * jnp.sum(x)
            numpyro.factor("y", -squares / len(y) + 0 * y[i])

    return model


def test_rounding_errors_of_the_gradient():
    offset, size = 2.0**20, 1_000
    spacing = float(np.spacing(np.float32(offset)))
    center = spacing * random.uniform(random.key(1), (size,))
    metric = DiagonalMetric(center, jnp.ones(size))
    target = Model(rounded(offset, size), jnp.zeros(50)).target
    found = measure_noise(target, random.key(0), Gaussian(metric, 0.0, 1.0), metric, False)
    # it jumps by a spacing on one to eight of eight lines, in the coordinate where most do
    assert spacing / 48**0.5 <= found.rounding <= 1.001 * spacing / 6**0.5


@pytest.mark.nightly
@pytest.mark.parametrize("offset", [0.0, 2.0**22])
def test_warns_of_rounding(offset):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = CCAdL(rounded(offset, 100), progress_bar=False)
        tuning = kernel.tune(random.key(0), jnp.ones(50))
    warned = any("Use double precision" in str(w.message) for w in caught)
    assert warned == tuning.needs_double_precision == (offset > 0)
    assert ("rounded off" in (tuning.problem or "")) == ("rounding errors" in str(tuning)) == warned


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kernel", [CCAdL] + [pytest.param(k, marks=pytest.mark.nightly) for k in (SGHMC, SGLD)]
)
def test_no_noise_at_all(kernel):
    """All rows in every minibatch or, for methods that allow it, no minibatches."""

    def mean(y, batch_size):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", len(y), subsample_size=batch_size):
            batch = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(mu, 1), obs=batch)

    y = random.normal(random.key(0), (200,))
    for batch_size in [200] if kernel is CCAdL else [200, None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No plate of the model")
            mcmc = run(kernel(mean, progress_bar=False), y, batch_size, warmup=20, samples=20)
        assert mcmc.sampler.tuning.noise.largest == 0
        assert np.all(np.isfinite(mcmc.get_samples()["mu"]))


@pytest.mark.nightly
def test_too_many_parameters_for_a_matrix():
    """Variances, and some directions of a chain of correlations, which has no few that are all."""
    size, coupling = 2_100, 0.4
    scales = jnp.asarray(np.geomspace(0.1, 10, size), jnp.float32)

    def chain(y):
        prior = dist.ImproperUniform(dist.constraints.real_vector, (), (size,))
        theta = numpyro.sample("theta", prior)
        with numpyro.plate("rows", len(y), subsample_size=20) as i:
            away = (theta - y[i]) / scales
            squares = jnp.sum(away**2, -1) + 2 * coupling * jnp.sum(away[:, 1:] * away[:, :-1], -1)
            numpyro.factor("y", -0.5 * squares / len(y))

    y = 2 * scales * random.normal(random.key(0), (200, size))
    kernel = CCAdL(chain, progress_bar=False)
    mcmc = run(kernel, y, warmup=500, samples=2_000, chains=2)
    tuning = kernel.tuning
    assert isinstance(tuning.metric, LowRankMetric)
    np.testing.assert_allclose(tuning.metric.scale / scales, 1, atol=0.25)
    hessian = np.eye(size) + coupling * (np.eye(size, k=1) + np.eye(size, k=-1))
    factor = jax.vmap(tuning.metric.direction, 1, 1)(jnp.eye(size))
    factor = np.asarray(factor, float) / np.asarray(scales, float)[:, None]
    largest = np.linalg.eigvalsh(factor.T @ hessian @ factor)[-1]
    # too small by the bound of Kuczynski and Wozniakowski, and never too large
    bound = 0.871 * np.log(size) / 19
    assert 1 - bound <= tuning.noise.curvature / largest <= 1 + 1e-4
    assert tuning.problem is None and "noise" in tuning.passes
    assert stein_report(mcmc.last_state.monitor.stein).problem() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "expected"),
    # three quarters less at each halving; too wide whatever the step size; all is well
    [
        (lambda h: 1 + 0.5 * h**2, [1, 0.5, 0.25]),
        pytest.param(lambda h: 1.2, [1, 0.5, 0.25], marks=pytest.mark.nightly),
        pytest.param(lambda h: 1, [1], marks=pytest.mark.nightly),
    ],
)
def test_halvings_of_the_step_size(temperature, expected):
    """As long as they help, and given up where they do not."""
    target, tried = Model(logistic, X, Y).target, []

    def pilot(tuning):
        def run(step_size, steps, rng_key):
            tried.append(step_size)
            assert steps * step_size >= 40
            sums = start_sums(jnp.zeros(D), (D,))
            count = jnp.asarray(640, jnp.int32)
            shares = 10 * temperature(step_size) * (1 + 0.01 * random.normal(rng_key, (64, D)))
            matrix = jnp.diag(shares.sum(0))
            batches = jnp.concatenate([shares.mean(1, keepdims=True), shares], axis=1)
            sums = sums._replace(
                steps=count, samples=count, length=count // 64, batches=batches, matrix=matrix
            )
            return PilotRun(sums)

        run.prepare = lambda: None
        return run

    choices = TuningRequest(None, None, None, "minibatch", init_to_uniform)
    found = run_phases(target, random.key(0), choices, lambda noise: (1.0, None), pilot)
    assert tried == expected
    assert found.step_size == (0.25 if temperature(0) == 1 and len(expected) > 1 else 1)
    assert (found.problem is None) == (temperature(0) == 1)
    assert found.halvings == round(-np.log2(found.step_size))


@pytest.mark.parametrize("error", [2.0, np.inf, np.nan])
def test_errors_that_are_not_numbers_are_problems(error):
    metric = DiagonalMetric(jnp.zeros(D), jnp.ones(D))
    noise = NoiseLevel(0.0, 0.0, 1.0, 0.1)
    tuning = Tuning(1.0, 1.0, metric, metric, noise=noise)
    assert tuning.problem is None
    for name in ("fourth_cumulant", "rounding", "integrals"):
        assert tuning._replace(**{name: 1e6 * error}).problem is not None
    assert "one posterior standard deviation or more" in str(tuning._replace(integrals=error))


@pytest.mark.parametrize(("undone", "expected"), [(2, [1.0]), (3, [1.0, 0.5])])
def test_undone_steps_of_a_pilot(undone, expected):
    """Two of 4,800 may be chance; of more the first step size is left."""
    metric, tried = DiagonalMetric(jnp.zeros(D), jnp.ones(D)), []

    def pilot(step_size, steps, rng_key):
        tried.append(step_size)
        assert steps == 600
        return PilotRun(start_sums(jnp.zeros(D), (D,)), undone=undone * (step_size == 1))

    noise = NoiseLevel(0.0, 0.0, 1.0, 0.0)
    tuning = Tuning(1.0, None, metric, metric, noise=noise)
    found = run_pilot(Model(logistic, X, Y).target, random.key(0), tuning, pilot)
    assert tried == expected
    assert found.step_size == expected[-1] and found.halvings == len(expected) - 1


@pytest.mark.parametrize(
    ("left", "lengths"),
    [((4, 1.5, 0.05), [1, 8, 32]), ((4, 3), [1, 8]), ((0.4, 0.4, 0.4), [1, 8, 32]), ((0.1,), [1])],
)
def test_longer_chains_of_a_pilot(left, lengths):
    """Chains that disagree are run longer, unless R-hat is large and has hardly fallen."""
    metric, asked = DenseMetric(jnp.zeros(D), jnp.eye(D), jnp.eye(D)), []

    def pilot(step_size, steps, rng_key):
        # halves of 20 positions with a variance of 1, and the means of chains in turn at both ends
        end = np.sqrt((left[len(asked)] + 0.05) * 15 / 16)
        means = np.broadcast_to(np.resize([end, -end], (8, 1, 1)), (8, 2, D))
        halves = Halves(np.full((8, 2), 20.0), 20 * means, 20 * means**2 + 19)
        asked.append(steps)
        return PilotRun(start_sums(jnp.zeros(D), (D,)), halves)

    tuning = Tuning(0.05, None, metric, metric, noise=NoiseLevel(0.0, 0.0, 1.0, 0.0))
    found = run_pilot(Model(logistic, X, Y).target, random.key(0), tuning, pilot)
    assert asked == [800 * k for k in lengths]
    assert found.r_hat == pytest.approx(np.sqrt(1 + left[-1]), rel=0.01)


def test_metric_where_the_potential_curves_downward():
    """From the top between two wells the Gaussian spreads over both of them."""

    def wells(y):
        x = numpyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.factor("y", x**2 / 2 - x**4 / 400)

    target = Model(wells, jnp.zeros(1)).target.keeping_programs()
    start = Gaussian(DiagonalMetric(jnp.zeros(1), jnp.ones(1)), 0.0)
    found = [find_metric(target, random.key(k), start) for k in range(8)]
    # E[U''] = -1 + 12 s^2 / 400 is 1 / s^2 at s = 5.9; eight draws have a variance of their own,
    # and the wells are at -10 and 10
    assert 4 < np.median([float(x.metric.factor[0, 0]) for x in found]) < 10
    assert not all(x.converged for x in found)


def test_traced_data_cannot_be_tuned_to():
    kernel = CCAdL(logistic, progress_bar=False)
    with pytest.raises(ValueError, match="cannot tune itself inside `jit`"):
        jax.jit(lambda x: kernel.init(random.key(0), 1, None, (x, Y), {}).z)(X)


@pytest.mark.slow
def test_no_centre():
    def bad(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.factor("y", jnp.sqrt(-jnp.abs(mu - 1.0)) * y[i])

    with pytest.raises(ValueError, match="finite"):
        CCAdL(bad, init_strategy=init_to_value(values={"mu": 1.0}), progress_bar=False).tune(
            random.key(0), jnp.ones(50)
        )


@pytest.mark.nightly
def test_warns_of_a_funnel():
    def funnel(y):
        x = numpyro.sample("x", dist.Normal(0, 3))
        z = numpyro.sample("z", dist.Normal(0, jnp.exp(x / 2)).expand([9]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(z[0], 1e3), obs=y[i])

    from_internal = CCAdL(funnel, progress_bar=False, reparametrise=False)
    with pytest.warns(UserWarning, match=r"far from any Gaussian.* R-hat .* in site"):
        tuning = from_internal.tune(random.key(0), jnp.zeros(100))
    assert "far from any Gaussian" in tuning.problem and "slow directions" in str(tuning)
    # in coordinates of its own there is none
    tuning = CCAdL(funnel, progress_bar=False).tune(random.key(0), jnp.zeros(100))
    assert tuning.problem is None and tuning.noise.nonlinearity < 0.1


@pytest.mark.slow
def test_warns_of_several_modes():
    def squared(y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("rows", len(y), subsample_size=50) as i:
            numpyro.sample("y", dist.Normal(mu**2, 1), obs=y[i])

    y = 1 + random.normal(random.key(0), (1_000,))
    with pytest.warns(UserWarning, match="several modes"):
        # of six searches at least one has to end in the other mode: 31 of 32 keys
        tuning = CCAdL(squared, progress_bar=False).tune(random.key(1), y)
    assert tuning.multimodal and "modes" in tuning.problem and "modes" in str(tuning)
    assert abs(abs(tuning.metric.center[0]) - 1) < 0.1


@pytest.mark.nightly
def test_scale_adapted_law():
    """Frozen after the warm-up, it is Euler's SGHMC with a step size for each coordinate."""
    scales = jnp.asarray(np.repeat([0.2, 5.0], 100), jnp.float32)

    def gaussian(y):
        prior = dist.ImproperUniform(dist.constraints.real_vector, (), (200,))
        theta = numpyro.sample("theta", prior)
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.factor("y", -0.5 * jnp.sum(((theta - y[i]) / scales) ** 2, -1) / len(y))

    y = random.normal(random.key(0), (100, 200)) * scales * 20
    y = y - y.mean(0)
    kernel = ApproximateScaleAdaptedSGHMC(gaussian, 0.4, 0.4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc = run(kernel, y, warmup=3_000, samples=12_000, chains=1)
    state = jax.tree.map(lambda x: x[0] if x.ndim and x.shape[0] == 1 else x, mcmc.last_state)
    s2 = np.asarray(state.dynamics.mean_square).reshape(-1) ** -0.5
    precision = np.asarray(scales) ** -2
    variance = np.asarray(y).var(0, ddof=1) * precision**2 / 10 * (1 - 10 / 100)
    h, alpha = 0.4, 0.4
    # Chen et al.'s law with eta = h^2 s^2 and precision lambda; noise of variance v
    eta = h**2 * s2
    law = (1 + eta * variance / (2 * alpha)) / (1 - eta * precision / (2 * (2 - alpha)))
    draws = np.asarray(mcmc.get_samples(True)["theta"], float)
    ratio = draws**2 * precision / law
    for part in np.split(ratio, 2, axis=-1):
        series = part.mean(-1)
        error = series.std() / effective_sample_size(series) ** 0.5
        assert error < 0.02 and abs(series.mean() - 1) < 3.5 * error
    assert law.min() > 1.05


def test_scale_adapted_needs_a_warmup():
    with pytest.raises(ValueError, match="finds its scales in the warm-up"):
        run(ApproximateScaleAdaptedSGHMC(logistic), X, Y, warmup=0)


@pytest.mark.nightly
def test_a_sampler_that_hardly_moves(monkeypatch):
    """Columns that nearly depend on each other, and a metric that does not know of it."""
    x = np.column_stack([X[:, 1], X[:, 1] + 0.02 * RNG.standard_normal(N)])
    kernel = CCAdL(logistic, metric="diagonal", progress_bar=False)
    monkeypatch.setattr(speed, "_LONG", 0.0)
    with pytest.warns(UserWarning, match=r"moves slowly: with a step size of .* [\d,]+ steps"):
        tuning = kernel.tune(random.key(0), x, Y)
    assert tuning.steps_per_sample > 100
    assert 0 < tuning.seconds_per_sample < 10
    assert "s for 400 effective samples of a chain" in str(tuning)
    monkeypatch.setattr(speed, "_FAILED", tuning.steps_per_sample - 1)
    kernel = CCAdL(logistic, metric="diagonal", progress_bar=False)
    with pytest.raises(ValueError, match=r"has failed: .* site is 'w'.*on_failure='warn'"):
        run(kernel, x, Y)
    nevertheless = CCAdL(logistic, tuning=kernel.tuning)
    run(nevertheless, x, Y, warmup=2, samples=2)
    assert nevertheless.steps_per_sample == tuning.steps_per_sample
    asked = CCAdL(logistic, metric="diagonal", on_failure="warn", progress_bar=False)
    with pytest.warns(UserWarning, match="moves slowly"):
        assert asked.tune(random.key(0), x, Y).steps_per_sample == tuning.steps_per_sample


@pytest.mark.nightly
def test_a_parameter_of_which_nothing_is_known():
    """Nothing but the site that is improper is wrong with the posterior, and is named."""

    def improper(x, y):
        logistic(x, y)
        numpyro.sample("extra", dist.ImproperUniform(dist.constraints.real_vector, (), (2,)))

    with pytest.warns(UserWarning) as caught:
        tuning = CCAdL(improper, progress_bar=False).tune(random.key(0), X, Y)
    assert any("flat in some direction of site 'extra'" in str(one.message) for one in caught)
    assert tuning.flat == "extra" and "does not depend on 'extra'" in tuning.problem


@pytest.mark.nightly
@pytest.mark.parametrize("given", [None, 0.9])
def test_a_momentum_that_does_not_occur(tuning, given):
    """A tuned kernel, with another step size too, undoes and counts the step, and turns round."""
    kernel = CCAdL(logistic, given, tuning=tuning, steps_per_sample=1, progress_bar=False)
    args = jnp.asarray(X), jnp.asarray(Y)
    state = kernel.init(random.key(0), 0, None, args, {})

    def with_energy(energy):
        """Energies are half of the square of a momentum; they are about d / 2."""
        momentum = jnp.full_like(state.dynamics.momentum, (2 * energy / D) ** 0.5)
        before = state._replace(dynamics=state.dynamics._replace(momentum=momentum))
        return before, kernel.sample(before, args, {})

    before, after = with_energy(D)
    assert after.monitor.nonfinite_steps == 0
    before, after = with_energy(1e4)
    assert after.monitor.nonfinite_steps == 1 and bool(after.monitor.diverging)
    np.testing.assert_array_equal(after.dynamics.momentum, -before.dynamics.momentum)
    np.testing.assert_allclose(after.z["w"], before.z["w"], rtol=1e-5)


@pytest.mark.nightly
def test_a_direction_that_a_metric_misses():
    """Differences are known, and the sum is not: by products with the Hessian, and of a matrix."""
    size, rows, scale = 12, 400, 0.3
    pairs = RNG.integers(0, size, (rows, 2))
    design = np.eye(size)[pairs[:, 0]] - np.eye(size)[pairs[:, 1]]

    def differences(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([size]).to_event(1))
        with numpyro.plate("rows", rows, subsample_size=40) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, scale), obs=y[i])

    args = jnp.asarray(design, jnp.float32), jnp.zeros(rows)
    target = target_of(differences, *args)
    precision = np.eye(size) + design.T @ design / scale**2
    marginal = np.sqrt(np.diag(np.linalg.inv(precision)))
    center = jnp.zeros(size)
    for sd in (np.diag(precision) ** -0.5, marginal):
        metric = DiagonalMetric(center, jnp.asarray(sd, jnp.float32))
        right = np.linalg.eigvalsh(precision * np.outer(sd, sd))[[0, -1]]
        dense = from_covariance(np.linalg.inv(precision), center, np.float32)
        for gaussian in (Gaussian(metric, 0.0), Gaussian(dense, 0.0, 1.0)):
            largest, widest, _ = find_curvature(target, random.key(0), gaussian, metric)
            assert largest == pytest.approx(right[1], rel=0.02)
            assert np.linalg.norm(widest) == pytest.approx(right[0] ** -0.5, rel=0.02)
            assert abs((sd * widest).sum()) / np.linalg.norm(sd * widest) > 0.99 * size**0.5
    fits = find_curvature(target, random.key(0), Gaussian(dense, 0.0), dense)
    assert fits[0] == pytest.approx(1, abs=0.02) and fits[1] is None


def test_what_is_said_of_a_direction_that_is_missed():
    tuning = Tuning(0.5, 2.0, IdentityMetric(), seconds_per_sample=0.1, widest=5.0, slow="a")
    assert tuning.slowness == 25 and "misses a direction of 'a'" in tuning.problem
    assert "about 1e+03 s for 400 effective samples" in str(tuning)
    with pytest.warns(UserWarning, match="site 'a'.*25 times as slow"):
        warn_of(tuning)
    tuning = tuning._replace(widest=1.9)  # as what is far from a Gaussian may be
    assert tuning.problem is None
    warn_of(tuning)


NO_GAIN = Tuning(
    0.07, 2.5, IdentityMetric(), noise=NoiseLevel(1.7, 206.0, 1.0, 0.4), steps_per_sample=72,
    passes_per_sample=7.2,
)  # fmt: skip


def test_when_minibatches_do_not_pay():
    assert not NO_GAIN.minibatches_pay
    assert "minibatches do not pay: the noise" in str(NO_GAIN) and "7.2 passes" in str(NO_GAIN)
    with pytest.warns(UserWarning, match="do not pay here.*step size to 0.07.*72 steps or 7.2"):
        warn_of(NO_GAIN)
    # few rows in a minibatch; another cause than noise; and a method without momentum
    for other in (
        {"passes_per_sample": 1.3},
        {"noise": NoiseLevel(1.7, 2.0, 200.0, 0.4)},
        {"friction": None},
    ):
        assert NO_GAIN._replace(**other).minibatches_pay
    assert not NO_GAIN._replace(step_size=0.07 / 4, halvings=2).minibatches_pay
    assert not NO_GAIN._replace(noise=NoiseLevel(1.7, 2.0, 1.0, 0.4, 35.0)).minibatches_pay


@pytest.mark.parametrize(
    ("step", "friction", "halvings", "largest", "curvature", "said"),
    [
        (0.5, 1.0, 0, 0.1, 1.0, "long"),
        (0.2, None, 0, 0.1, 1.0, "long"),  # a squared length
        (0.01, None, 0, 0.1, 1.0, "short: far from a Gaussian"),
        (0.01, None, 0, 90.0, 1.0, "short because of the noise"),
        (0.1, 1.0, 0, 0.1, 1.0, "short: far from a Gaussian"),
        (0.1, 1.0, 0, 0.1, 90.0, "short: the metric misses a narrow direction"),
        (0.1, 1.0, 0, 90.0, 1.0, "short because of the noise"),
        (0.1, 1.0, 2, 90.0, 1.0, "short: the pilot halved it"),
    ],
)
def test_what_is_said_of_a_step_size(step, friction, halvings, largest, curvature, said):
    one = np.ones(1)
    tuning = Tuning(
        step, friction, IdentityMetric(), halvings=halvings,
        noise=NoiseLevel(0.05, largest, curvature, 0.4), plain_noise=NoiseLevel(2.0, 9.0, 1.0, 0.4),
        report=SteinReport(1.0, 0.01, one, one, np.eye(1), 100),
    )  # fmt: skip
    rates, noise, pilot = str(tuning).splitlines()
    assert rates.startswith(f"step size {step} ({said})")
    assert "0.05 times the curvature (small), with plain minibatches" in noise
    assert pilot == "pilot: configurational temperature 1.00 +- 0.01 (good: it must be 1)"


def test_chains_that_do_not_agree_without_a_full_matrix():
    """The largest of thousands of R-hats is above 1.1 by chance, and not above 1.5."""
    start = DiagonalMetric(jnp.zeros(2_000), jnp.ones(2_000))
    apart = NO_GAIN._replace(passes_per_sample=0.0, start=start, r_hat=2.0, slowest="tau")
    assert "far from any Gaussian" in apart.problem
    with pytest.warns(UserWarning, match="chains of the pilot is 2, in site 'tau'"):
        warn_of(apart)
    assert apart._replace(r_hat=1.3).problem is None


def groups(x, y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("groups", len(y), subsample_size=50) as i:
        effect = numpyro.sample("effect", dist.Normal(0, 1))
        numpyro.sample("y", dist.Bernoulli(logits=mean + effect + x[i, 0]), obs=y[i])


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("model", "passes", "size", "is_said"),
    [
        (logistic, 12_000, 400, True),
        (logistic, 12_000, 20_000, False),
        (logistic, 3_000, 400, False),  # the warm-up of NUTS takes more
        (groups, 12_000, 400, False),  # of any number of rows
    ],
)
def test_many_passes_over_few_rows_are_said(model, passes, size, is_said):
    target = target_of(model, jnp.zeros((size, 1)), jnp.zeros(size))
    known = Known(target, target, 1.0, {"centre": passes})
    with pytest.warns() if is_said else nullcontext() as said:
        assert phases._compare_with_nuts(None, known) is known
    assert not is_said or "has taken 12,000 passes over 400 rows" in str(said[0].message)


@pytest.mark.nightly
def test_minibatches_do_not_pay_for_a_share_near_zero():
    profiles = np.exp(-((np.arange(12) - np.linspace(0, 11, 6)[:, None]) ** 2) / 4.5) + 0.02
    profiles /= profiles.sum(1, keepdims=True)
    shares = np.array([0.3, 0.001, 0.25, 0.2, 0.05, 0.199])
    kinds = jnp.asarray(np.random.default_rng(0).choice(12, 5_000, p=shares @ profiles))

    def mixed(kinds):
        p = numpyro.sample("p", dist.Dirichlet(jnp.ones(6)))
        with numpyro.plate("rows", len(kinds), subsample_size=250) as i:
            law = dist.Categorical(probs=p @ jnp.asarray(profiles, jnp.float32))
            numpyro.sample("kinds", law, obs=kinds[i])

    with pytest.warns(UserWarning, match="Minibatches do not pay here"):
        CCAdL(mixed, progress_bar=False).tune(random.key(0), kinds)


def test_a_metric_that_is_too_wide_misses_no_direction():
    """Chains are slow for the width that it has elsewhere, and not for one that was looked for."""
    start = DenseMetric(jnp.zeros(1), 0.05 * jnp.eye(1), 20 * jnp.eye(1))
    found = Tuning(0.01, 1.0, IdentityMetric(), start)
    assert found.width < 0.2 and found.slowness == 1.0 and not found.misses_a_direction
    assert found._replace(widest=3.0, slow="a").misses_a_direction
