# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Rows over devices, chains over devices, and several processes."""

from functools import partial
import math
import os
from pathlib import Path
import pickle
import re
import socket
import subprocess
import sys
import time

import exact_laws
import jax
from jax import random
import jax.numpy as jnp
from jax.sharding import Mesh
import kernel_table
from kernel_table import CENTRE, KERNELS, X, Y
import known_posterior
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro.util import fori_collect
import pytest
from runs import go_on

from numpyro_sgmcmc import (
    SGLD,
    SMSUBU,
    CCAdL,
    Ensemble,
    NoiseEstimate,
    RowsOnDisk,
    local_draws,
    spread_rows,
)
from numpyro_sgmcmc.data.fingerprint import fingerprint_of
from numpyro_sgmcmc.gradients import noise_estimate
from numpyro_sgmcmc.posterior.control_variate import Anchor
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.tuning.tuning import Tuning

COMPILE_QUICKLY = True

pytestmark = pytest.mark.filterwarnings("ignore:After .* samples. The draws do not have the law")


def mesh_of(*shape):
    names = ("rows",) if len(shape) == 1 else ("chains", "rows")
    return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), names)


MESH = mesh_of(4)


def sampler(kernel, num_samples=6, **options):
    options = {"num_warmup": 3, "progress_bar": False, "jit_model_args": True} | options
    return MCMC(kernel, num_samples=num_samples, **options)


def everywhere_equal(tree):
    """Whether all devices that hold the same part of an array hold the same numbers."""
    for leaf in jax.tree.leaves(tree):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        leaf, parts = random.key_data(leaf) if is_key else leaf, {}
        for shard in leaf.addressable_shards:
            parts.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        pairs = [(part, same[0]) for same in parts.values() for part in same]
        if not all(np.array_equal(*pair, equal_nan=True) for pair in pairs):
            return False
    return True


# --- the gradient -------------------------------------------------------------------------


def indexed(x, y, batch=80):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])


def written_out(x, y, batch=80):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", 80, subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])


def subsampled(x, y, batch=80):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch):
        x, y = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def twice(x, y, batch=80):
    """Two plates of the same rows, and a prior that knows nothing of them."""
    w = numpyro.sample("w", dist.StudentT(3, 0, 1).expand([3]).to_event(1))
    with numpyro.plate("first", x.shape[0], subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])
    with numpyro.plate("second", x.shape[0], subsample_size=batch // 2) as i:
        numpyro.factor("x", -jnp.abs(x[i] @ w))


def with_effects(x, y, batch=20, number=1):
    """Integrated out by nodes, or by draws if there are three of each row."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch) as i:
        effects = numpyro.sample("effects", dist.Normal(0, 0.7).expand([number]).to_event(1))
        numpyro.sample("y", dist.Normal(x[i] @ w + effects.sum(-1), 0.5), obs=y[i])


def without_effects(x, y, number=1):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=80) as i:
        scale = math.sqrt(0.5**2 + number * 0.7**2)
        numpyro.sample("y", dist.Normal(x[i] @ w, scale), obs=y[i])


def read(model, mesh=MESH, kernel=SGLD, **options):
    kernel = kernel(model, step_size=1e-3, **options)
    args = (X, Y) if mesh is None else spread_rows(mesh, X, Y)
    args = tuple(map(jnp.asarray, args))
    kernel.runtime.read(kernel.method, args, {})
    return kernel, args


def target_of(kernel, args):
    return kernel.runtime.target(kernel.method, args)


def oracle(kernel, target, potential, rows, rng_key):
    noise = kernel.method.noise_estimator(target, Tuning(1.0, 1.0, IdentityMetric()))
    return noise_estimate.gradient_oracle(target, potential, rows, rng_key, noise)


def gradient_at(kernel, args, z, rows=None, key=0):
    """The potential and its gradient by the oracle of a step."""

    def found(target, z):
        at = target.rows(random.key(key)) if rows is None else rows
        flat = jnp.concatenate([z[name].ravel() for name in sorted(z)])
        potential = target.potential(IdentityMetric())
        return oracle(kernel, target, potential, at, random.key(0))(flat)[:2]

    return jax.tree.map(np.asarray, target_of(kernel, args).compiled(found)(z))


POINT = {"w": jnp.array([0.5, -0.5, 1.0])}


@pytest.mark.parametrize("model", [indexed, written_out, subsampled])
def test_all_rows_give_the_gradient_of_all_data(model):
    here, there = (gradient_at(*read(model, mesh), POINT) for mesh in (None, MESH))
    np.testing.assert_allclose(here[0], there[0], rtol=1e-5)
    np.testing.assert_allclose(here[1], there[1], rtol=1e-5)


@pytest.mark.parametrize("order", [pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize(
    "model", [indexed, twice, pytest.param(with_effects, marks=pytest.mark.nightly)]
)
def test_a_pass_over_all_rows_moves_none(model, order):
    """The anchor of a control variate, and what its program sends between devices."""
    kernel, args = read(partial(model, batch=40))
    plain, plain_args = read(partial(model, batch=40), None)
    target = target_of(kernel, args)
    program, data, _ = target.program(partial(type(target).anchor, order=order))
    expected = target_of(plain, plain_args).anchor(POINT, order)
    found = program(data, POINT)
    np.testing.assert_allclose(found.potential, expected.potential, rtol=1e-5)
    np.testing.assert_allclose(found.gradient["w"], expected.gradient["w"], rtol=1e-5)
    if order == 2:
        np.testing.assert_allclose(found.hessian, expected.hessian, rtol=1e-5, atol=1e-3)
    assert collectives(program, data, POINT) == {"all-reduce": 1}


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("model", "all_rows"),
    [
        (indexed, indexed),
        (with_effects, without_effects),
        pytest.param(
            partial(with_effects, number=3),
            partial(without_effects, number=3),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_minibatches_average_to_all_data(model, all_rows):
    """Over a partition of the rows of every device; and without the scale they do not."""
    kernel, args = read(partial(model, batch=20), subsampling="epochs")
    whole = gradient_at(*read(all_rows, None), POINT)

    def found(target, z):
        potential = target.potential(IdentityMetric())

        def one(k):
            rows = target.rows(random.key(3), k)
            return oracle(kernel, target, potential, rows, random.key(0))(z["w"])[:2]

        return jax.tree.map(lambda x: x.mean(0), jax.lax.map(one, jnp.arange(4)))

    seen = target_of(kernel, args).compiled(found)(POINT)
    np.testing.assert_allclose(seen[0], whole[0], rtol=1e-5)
    np.testing.assert_allclose(seen[1], whole[1], rtol=1e-5)


def collectives(function, *arguments):
    """How often a program sends something, by what it does."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    counts = {kind: len(re.findall(rf"\S {kind}(?:-start)?\(", text)) for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["SGLD modified", "CCAdL"])
def test_a_step_is_one_message(name):
    """And what the loop of `MCMC` does besides sends nothing, and no data."""
    mesh = mesh_of(2, 4)
    args = spread_rows(mesh, X, Y)
    kernel = KERNELS[name](kernel_table.model, init_strategy=CENTRE)
    state = kernel.init(random.split(random.key(0), 2), 10, None, args, {})

    def sample(values):
        return kernel.sample(*values, {}), values[1]

    def kept(values):
        return jax.vmap(kernel.postprocess_fn(values[1], {}))(values[0].z)

    def loop(*values):
        return fori_collect(5, 20, sample, values, transform=kept, progbar=False)

    assert collectives(loop, state, args) == {"all-reduce": 1}


# --- the noise ----------------------------------------------------------------------------


def strata(noise, directions, parts, batch=10, size=100):
    """
    Observations with the factor of the precision of one of them, for which the posterior has
    mean zero and precision one in every direction, and the stratified gradient the given noise;
    without strata it has nine times as much.
    """
    rows = size // parts
    x = np.random.default_rng(0).standard_normal((parts, rows, directions))
    x = (x - x.mean(1, keepdims=True)) / x.std(1, ddof=1, keepdims=True)
    x = x + np.linspace(-4, 4, parts)[:, None, None]
    x *= math.sqrt(noise * batch / (1 - batch / size))
    return (x.reshape(size, directions)).astype(np.float32)


def gaussian_mean(x):
    """x_i ~ N(theta, N), with an improper flat prior."""
    prior = dist.ImproperUniform(dist.constraints.real_vector, (), (x.shape[1],))
    theta = numpyro.sample("theta", prior)
    with numpyro.plate("rows", x.shape[0], subsample_size=10) as i:
        numpyro.factor("x", -0.5 * jnp.sum((x[i] - theta) ** 2, -1) / 100)


NOISE, FRICTION, ONE = 4.0, 1.0, np.eye(1)
ALL = NoiseEstimate(window=math.inf)
sure = {"friction": FRICTION, "thermal_mass": 100.0, "noise": ALL}


def thermostatted(precision, noise, h):
    return exact_laws.thermostatted("nogin", precision, noise, h, FRICTION, noise)


def sweeps(precision, noise, h):
    return exact_laws.symmetric_sweeps(precision, noise, h, FRICTION, 10)


LAWS = {
    "SGLD": (SGLD, {}, exact_laws.overdamped, 0.2),
    "CCAdL": (CCAdL, sure, thermostatted, 0.5),
    "CCAdL two cotangents": (
        CCAdL,
        sure | {"noise": NoiseEstimate(None, "two_cotangents", math.inf)},
        thermostatted,
        0.5,
    ),
    "CCAdL per example": (
        CCAdL,
        sure | {"noise": NoiseEstimate(None, "per_example", math.inf)},
        thermostatted,
        0.5,
    ),
    "SMSUBU": (SMSUBU, {"friction": FRICTION}, sweeps, 0.6),
}


def z_score(name, mesh, steps=4, samples=3_000):
    method, options, law, h = LAWS[name]
    if method is SMSUBU:  # the law at the end of a sweep
        steps, samples = 20, 1_000
    x = spread_rows(mesh, strata(NOISE, 500, mesh.shape["rows"]))
    kernel = method(gaussian_mean, step_size=h, steps_per_sample=steps, **options)
    mcmc = sampler(kernel, samples, num_warmup=samples // 4)
    mcmc.run(random.key(1), x, init_params={"theta": jnp.zeros(500)})
    squares = (np.asarray(mcmc.get_samples(True)["theta"], float) ** 2).mean(-1)
    error = squares.std() / effective_sample_size(squares) ** 0.5
    expected = law(ONE, NOISE * ONE, h).item()
    return (squares.mean() - expected) / error, error / expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "CCAdL" else pytest.mark.nightly) for n in LAWS],
)
def test_stationary_variance(name):
    z, error = z_score(name, mesh_of(5))
    assert error < 0.01
    assert abs(z) < 3.5


@pytest.mark.slow
def test_negative_control(monkeypatch):
    """The noise of one device, in place of that of the mean over devices, is found out."""
    right = noise_estimate.over_devices

    def wrong(gradient, target, rng_key):
        oracle = right(gradient, target, rng_key)

        def everywhere(position):
            seen = oracle(position)
            return seen._replace(noise=target.parts * seen.noise)

        return everywhere

    monkeypatch.setattr(noise_estimate, "over_devices", wrong)
    z, _ = z_score("CCAdL", mesh_of(5), samples=1_500)
    assert abs(z) > 10


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("covariance", "estimator"),
    [
        *((held, "sub_batches") for held in ("diagonal", "full", "low_rank", "matrix_free")),
        *(
            pytest.param(held, estimator, marks=pytest.mark.nightly)
            for held in ("diagonal", "full", "low_rank")
            for estimator in ("two_cotangents", "per_example")
        ),
    ],
)
def test_noise_of_the_devices(covariance, estimator):
    """Every estimate in every form has the mean that the strata say."""
    rank = 2 if covariance == "low_rank" else None
    estimator = None if covariance == "matrix_free" else estimator
    options = {"noise": NoiseEstimate(covariance, estimator, rank=rank), "friction": 1.0}
    kernel, args = read(partial(indexed, batch=40), kernel=CCAdL, **options)
    representation = kernel.method.noise_estimator(
        target_of(kernel, args), Tuning(1.0, 1.0, IdentityMetric())
    ).representation

    def found(target, z):
        potential = target.potential(IdentityMetric())

        def one(k):
            rows_key, model_key = random.split(random.fold_in(random.key(0), k))
            rows = target.rows(rows_key)
            noise = oracle(kernel, target, potential, rows, model_key)(z["w"]).noise
            return jax.vmap(partial(representation.product, noise))(jnp.eye(3))

        return jax.lax.map(one, jnp.arange(2_000))

    seen = np.asarray(target_of(kernel, args).compiled(found)(POINT), float)
    slopes = (X @ np.asarray(POINT["w"]) - Y)[:, None] * X / 0.25
    within = np.mean([np.cov(part.T, ddof=1) for part in slopes.reshape(4, 20, 3)], axis=0)
    expected = 80**2 / 40 * (1 - 40 / 80) * within
    if covariance == "diagonal":
        expected = np.diag(np.diag(expected))
    error = seen.std(0) / len(seen) ** 0.5 + 1e-4 * np.abs(expected).max()
    if covariance == "low_rank":  # what is cut goes to the diagonal
        diagonal = np.eye(3, dtype=bool)
        assert np.all(np.abs(seen.mean(0) - expected)[diagonal] < 4 * error[diagonal])
    else:
        assert np.all(np.abs(seen.mean(0) - expected) < 4 * error)


# --- kernels ------------------------------------------------------------------------------

FAST = ("SGLD epochs", "CCAdL matrix free")
SLOW = ("SGHMC estimated", "SGNHT", "CCAdL tuned", "SGFS", "SMSUBU")


@pytest.mark.one_case
@pytest.mark.parametrize(
    "name",
    [*FAST, *(pytest.param(name, marks=pytest.mark.nightly) for name in SLOW)],
)
def test_kernels(name):
    """They run, and all devices stay together."""
    kernel = KERNELS[name](kernel_table.model, init_strategy=CENTRE)
    mcmc = sampler(kernel, 60)
    mcmc.run(random.key(0), *spread_rows(MESH, X, Y), extra_fields=("nonfinite_steps",))
    draws = mcmc.get_samples()
    assert np.all(np.isfinite(draws["w"])) and np.ptp(draws["w"]) > 0
    assert mcmc.last_state.monitor.nonfinite_steps == 0
    assert len(mcmc.last_state.z["w"].addressable_shards) == 4
    assert everywhere_equal(mcmc.last_state)


def draws_of(mesh, **options):
    kernel = CCAdL(kernel_table.model, init_strategy=CENTRE, **options)
    mcmc = sampler(kernel, 20, num_chains=4, chain_method="vectorized")
    mcmc.run(random.key(0), *spread_rows(mesh, X, Y))
    assert everywhere_equal(mcmc.last_state.z)
    return mcmc.get_samples(True)["w"], mcmc.last_state.z["w"].addressable_shards


@pytest.mark.slow
def test_chains_over_devices():
    """Laid over devices they give the draws that they give on the same devices, together."""
    together, _ = draws_of(MESH, **kernel_table.momentum)
    apart, shards = draws_of(mesh_of(2, 4), **kernel_table.momentum)
    assert len(shards) == 8 and shards[0].data.shape == (2, 3)
    np.testing.assert_allclose(together, apart, rtol=1e-3, atol=1e-4)


@pytest.mark.nightly
def test_members_of_an_ensemble_over_devices():
    """Their descents, and the metric of each, from the rows of all devices."""
    options = {
        "step_size": 0.05,
        "friction": 5.0,
        "metric": "diagonal",
        "start": Ensemble(steps=500, learning_rate=0.02),
        "progress_bar": False,
    }
    together, _ = draws_of(MESH, **options)
    apart, _ = draws_of(mesh_of(2, 4), **options)
    np.testing.assert_allclose(together, apart, rtol=1e-3, atol=1e-4)

    def widths(mesh, *data):
        kernel = CCAdL(kernel_table.model, **options)
        state = kernel.init(random.split(random.key(0), 4), 1, None, data, {})
        assert everywhere_equal(state.fixed.metric)
        return np.asarray(state.fixed.metric.scale).mean(axis=0)

    # each is known to 5 %, of four chains to 2.5 %
    np.testing.assert_allclose(widths(MESH, *spread_rows(MESH, X, Y)), widths(None, X, Y), rtol=0.1)


@pytest.mark.nightly
def test_anchor_moves():
    """Of chains together and apart, to the potential and the gradient of all data."""
    values = {"w": jnp.array([1.0, -1.0, 0.5]), "scale": jnp.array(0.0)}
    anchor = Anchor(values, jnp.array(0.0), values)  # made anew for these data
    tuning = Tuning(3e-3, 30.0, IdentityMetric(), anchor=anchor)
    options = {"tuning": tuning, "gradient": ("control_variate", 1.0)}
    together, _ = draws_of(MESH, **options)
    apart, _ = draws_of(mesh_of(2, 4), **options)
    np.testing.assert_allclose(together, apart, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_and_is_pickled():
    """In pieces, with the mesh of the data where the kernel is not told one."""
    args = spread_rows(MESH, X, Y)
    kernel = partial(SGLD, kernel_table.model, step_size=1e-4, init_strategy=CENTRE)
    whole = sampler(kernel(), 20)
    whole.run(random.key(0), *args)
    parts = pickle.loads(pickle.dumps(sampler(kernel(), 10)))
    parts.run(random.key(0), *args)
    first = parts.get_samples()["w"]
    go_on(parts, *args)
    seen = np.concatenate([first, parts.get_samples()["w"]])
    np.testing.assert_array_equal(seen, whole.get_samples()["w"])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Minibatches do not pay")  # of 40 rows among 80
def test_tuned():
    """The tuning sees all data, and finds what it finds without devices."""
    here = kernel_table.tuning()
    kernel = CCAdL(kernel_table.model, progress_bar=False)
    there = kernel.tune(random.key(0), *spread_rows(MESH, X, Y))
    assert everywhere_equal(there.anchor)
    np.testing.assert_allclose(there.step_size, here.step_size, rtol=0.3)
    np.testing.assert_allclose(there.metric.factor, here.metric.factor, atol=0.03)
    # the noise is that of strata, of rows that are in random order
    np.testing.assert_allclose(there.plain_noise.mean, here.plain_noise.mean, rtol=0.4)


@pytest.mark.nightly
def test_tuned_with_an_anchor_that_moves():
    """The pilot, too, has an anchor for each chain."""
    options = {"gradient": ("control_variate", 1.0), "progress_bar": False}
    kernel = SGLD(kernel_table.model, **options)
    there = kernel.tune(random.key(0), *spread_rows(MESH, X, Y))
    assert there.report is not None and there.report.problem() is None


@pytest.mark.nightly
def test_latent_variables_of_rows():
    """Devices stay together, and draws after the run are those of the rows that each has."""
    mcmc = sampler(SGLD(with_effects, 1e-3, init_strategy=CENTRE), 200)
    mcmc.run(random.key(0), *spread_rows(MESH, X, Y))
    assert everywhere_equal(mcmc.last_state)
    found = local_draws(mcmc, num_draws=200)["effects"].values[0, ..., 0]
    precision = 0.7**-2 + 0.5**-2
    residuals = Y - np.asarray(mcmc.get_samples()["w"]) @ X.T
    z = (found - residuals / 0.5**2 / precision) * precision**0.5
    assert np.all(np.abs(z.mean(0)) < 4.5 / 200**0.5)
    assert np.ptp(residuals, axis=1).min() > 1  # of other rows they would not be


# --- what cannot be -----------------------------------------------------------------------


def full_plate(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=20) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])
    with numpyro.plate("all", x.shape[0]):
        numpyro.sample("again", dist.Normal(x @ w, 0.5), obs=y)


def summary(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    centred = x - x.mean(0)
    with numpyro.plate("rows", x.shape[0], subsample_size=20) as i:
        numpyro.sample("y", dist.Normal(centred[i] @ w, 0.5), obs=y[i])


def of_the_number(x, y):
    w = numpyro.sample("w", dist.Normal(0, x.shape[0]).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=20) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])


def other_rows(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=20) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])
    with numpyro.plate("groups", 12, subsample_size=4) as i:
        numpyro.factor("w of groups", -jnp.zeros(12)[i] * w[0])


def no_minibatch(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


@pytest.mark.filterwarnings("ignore:No plate of the model")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (full_plate, "on one device differs.*Index all data by the plate"),
        (summary, "on one device differs.*means and numbers of all rows"),
        (of_the_number, "on one device differs"),
        (other_rows, "Plate 'groups' has a `subsample_size` and 12 rows.*have 80"),
        (no_minibatch, "needs minibatches.*`numpyro.plate\\(name, 80, subsample_size"),
        (partial(indexed, batch=18), "subsample_size=18, .* among 4 devices\\. Use 16"),
    ],
)
def test_models_refused(model, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        read(model)


def run(kernel=None, args=None, **options):
    kernel = SGLD(kernel_table.model, step_size=1e-4) if kernel is None else kernel
    args = spread_rows(MESH, X, Y) if args is None else args
    sampler(kernel, **options).run(random.key(0), *args)


def test_runs_refused():
    some = {"step_size": 1e-4, "init_strategy": CENTRE}
    with pytest.raises(
        ValueError, match=r"The arrays args\.1 have 80 rows too and are not spread: use"
    ):
        run(args=(spread_rows(MESH, X), Y))
    with pytest.raises(ValueError, match="RowsOnDisk.* is not spread, so that all devices"):
        run(args=(RowsOnDisk(X), spread_rows(MESH, Y)))
    with pytest.raises(ValueError, match="different numbers of rows: 40, 80"):
        kernel = SGLD(lambda x, y, groups: kernel_table.model(x, y), **some)
        run(kernel, spread_rows(MESH, X, Y, np.ones(40)))
    with pytest.raises(ValueError, match=r"Use `MCMC\(..., jit_model_args=True\)`"):
        run(jit_model_args=False)
    with pytest.raises(ValueError, match="Use chain_method='vectorized'"):
        run(num_chains=2, chain_method="parallel")
    both = mesh_of(2, 4)
    args = spread_rows(both, X, Y)
    with pytest.raises(
        ValueError, match="has 2 parts for chains, and the number of chains in one program is 3"
    ):
        kernel = SGLD(kernel_table.model, **some)
        run(kernel, args, num_chains=3, chain_method="vectorized")
    with pytest.raises(ValueError, match="the mesh .*'chains': 2.*, but the rows of another"):
        run(args=(spread_rows(MESH, X), spread_rows(both, Y)))
    with pytest.raises(ValueError, match="at least 2 for each of the devices"):
        kernel = CCAdL(partial(indexed, batch=4), friction=1.0, **some)
        run(kernel)


def test_meshes_and_arrays_refused():
    with pytest.raises(ValueError, match=r"has the axes \('x',\), but needs 'rows'"):
        spread_rows(Mesh(np.array(jax.devices()), ("x",)), X)
    with pytest.raises(ValueError, match=r"has 78 rows, .* 4 devices\. Leave out 2 .*`X\[:76\]`"):
        spread_rows(MESH, X[:78])
    with pytest.raises(ValueError, match="Array 1 is a number"):
        spread_rows(MESH, X, 3.0)
    with pytest.raises(ValueError, match="needs a mesh and arrays"):
        spread_rows(MESH)


def test_bad_data_are_named_where_they_are():
    x = X.copy()
    x[71, 2] = np.nan
    with pytest.raises(ValueError, match=r"1 entries .* the first at index \(71, 2\)"):
        run(args=spread_rows(MESH, x, Y))


def test_fingerprint():
    """Says nothing of where the data lie."""
    here = tuple(map(jnp.asarray, (X, Y)))
    there = spread_rows(MESH, X, Y)
    assert fingerprint_of(here, {}) == fingerprint_of(there, {})
    assert fingerprint_of(here[:1], {}) != fingerprint_of(there, {})


# --- the same posterior -------------------------------------------------------------------


def check_posterior(draws):
    """Means and variances in whitened coordinates, by effective sample size."""
    white = (draws - known_posterior.MEAN) @ np.linalg.cholesky(known_posterior.PRECISION)
    for power, expected in ((1, 0.0), (2, 1.0)):
        series = white**power
        size = [effective_sample_size(series[..., k]) for k in range(3)]
        z = (series.mean((0, 1)) - expected) / series.std((0, 1)) * np.sqrt(size)
        assert np.all(np.abs(z) < 4), (power, z)
        assert min(size) > 150


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(), (1,), (8,), (2, 4)])
def test_same_posterior(shape):
    data = known_posterior.X, known_posterior.Y
    mesh = mesh_of(*shape) if shape else None
    data = spread_rows(mesh, *data) if shape else data
    check_posterior(known_posterior.sample(mesh, data)[0])


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start_processes(script, processes, *arguments):
    """As many processes that know of each other, started together."""
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / script)]
    port = free_port()
    return [
        subprocess.Popen(
            [*command, str(k), str(processes), str(port), *(str(x).format(k) for x in arguments)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for k in range(processes)
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("processes", "devices", "chains", "on_disk"),
    [(2, 1, 1, False), (4, 1, 1, False), (2, 4, 2, False), (2, 1, 1, True), (2, 2, 1, True)],
)
def test_processes(processes, devices, chains, on_disk, tmp_path, monkeypatch):
    """
    They draw what one process with as many devices draws, and the law is right; a long run draws
    the same in two parts. Of two that go on one is killed: within a minute the other ends, and
    says which it was.
    """
    if on_disk:
        monkeypatch.setenv("ROWS_ON_DISK", "1")
    where = str(tmp_path / "{}.npz")
    goes_on = [tmp_path / "run.zarr"] if (processes, chains) == (2, 1) else []
    started = start_processes("one_process.py", processes, devices, chains, where, *goes_on)
    try:
        if goes_on:
            for k in range(2):
                while not os.path.exists(f"{where.format(k)}.long"):
                    assert started[k].poll() is None, started[k].communicate()[1][-2_000:]
                    time.sleep(0.1)
            started[1].kill()
            _, error = started[0].communicate(timeout=60)
            assert re.search(r"unhealthy \(stopped sending heartbeats\):\n1\n", error)
        else:
            errors = [process.communicate(timeout=300)[1] for process in started]
            for process, error in zip(started, errors, strict=True):
                assert process.returncode == 0, error[-2_000:]
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stderr.close()
    found = [np.load(where.format(k)) for k in range(processes)]
    for name in ("draws", "data"):
        assert all(np.array_equal(one[name], found[0][name]) for one in found)
    if chains == 1:  # all have all chains
        last = np.concatenate([one["last"] for one in found])
        assert np.all(last == last[0])
    assert tuple(found[0]["rows"]) == known_posterior.X.shape
    mesh = mesh_of(chains, 4) if chains > 1 else mesh_of(processes * devices)
    data = spread_rows(mesh, known_posterior.X, known_posterior.Y)
    here, _ = known_posterior.sample(mesh, data, 10)
    np.testing.assert_allclose(found[0]["draws"][:, :1], here[:, :1], rtol=1e-2)
    check_posterior(found[0]["draws"])
