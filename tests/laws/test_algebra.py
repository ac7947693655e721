# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The step of each method, by algebra.

On a Gaussian posterior a step with the thermostat frozen is an affine map of position, momentum,
noise of the gradient and standard normals. Its Jacobian, taken through the kernel's own ``step``,
is compared with that of the independent laws (``exact_laws.py``), whose stationary covariances
follow from it. What algebra cannot say is simulated in ``test_exact_laws.py``.
"""

from functools import partial
import math
import os
import pickle
import subprocess
import sys

from affine_steps import ESTIMATE, ONE, PRECISION, SAME, A, D, H, jacobian, state_of, stepped
import exact_laws
from gaussian_posterior import ExplicitEuler, gaussian_mean
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc import (
    PSGLD,
    SGFS,
    SGHMC,
    SGLD,
    SGNHT,
    SMSUBU,
    ApproximateScaleAdaptedSGHMC,
    CCAdL,
    NoiseEstimate,
)
from numpyro_sgmcmc.gradients.covariance import LowRankPlusDiagonal
from numpyro_sgmcmc.gradients.estimators import Evaluation
from numpyro_sgmcmc.kernels import splittings

MASS = 1e30
XI = np.array([1.7, 0.9, 2.4])
COMPILE_QUICKLY = True


LANGEVIN = partial(exact_laws.langevin, h=H, friction=A, noise=ONE)
full = {"noise": NoiseEstimate("full")}
estimated = {"noise_variance": "estimated"} | full
INFORMATION = ESTIMATE + 5 * ONE
SQUARES = np.array([2.0, 9.0, 0.5])
#: An estimate that is given, for each parameter.
VARIANCES = np.array([0.3, 0.1, 0.9])

#: Kernel; its dynamics; and the law, of the covariance of the noise over the temperature.
STEPS = {
    "SGLD": (partial(SGLD), {}, lambda v, _: exact_laws.overdamped_step(PRECISION, H)),
    "SGLD modified": (
        partial(SGLD, modified=True, **full),
        {"noise_covariance": ESTIMATE},
        lambda v, _: exact_laws.modified_step(PRECISION, v, H),
    ),
    "PSGLD": (
        partial(PSGLD, damping=0.1),
        {"mean_square": SQUARES},
        lambda v, _: exact_laws.overdamped_step(PRECISION, H, np.diag(1 / (0.1 + SQUARES**0.5))),
    ),
    "SGFS": (
        partial(SGFS, **full),
        {"score_covariance": INFORMATION},
        lambda v, _: exact_laws.fisher_scoring_step(PRECISION, INFORMATION, H),
    ),
    "ApproximateScaleAdaptedSGHMC": (
        partial(ApproximateScaleAdaptedSGHMC, momentum_decay=0.2),
        {"mean_square": SQUARES},
        lambda v, _: exact_laws.scale_adapted_step(PRECISION, H, 0.2, np.diag(SQUARES**-0.25)),
    ),
    **{
        f"SGHMC {name}": (
            partial(SGHMC, friction=A, integrator=name),
            {},
            lambda v, _, name=name: LANGEVIN(name, PRECISION).affine(),
        )
        for name in ("euler", *splittings.SPLITTINGS)
    },
    **{
        f"SGHMC {name} given": (
            partial(SGHMC, friction=A, integrator=name, noise_variance={"theta": VARIANCES}),
            {},
            lambda _, temperature, name=name: LANGEVIN(
                name, PRECISION, estimate=np.diag(VARIANCES) / temperature
            ).affine(),
        )
        for name in ("euler", *splittings.SPLITTINGS)
    },
    **{
        f"SGHMC {name} estimated": (
            partial(SGHMC, friction=A, integrator=name, **estimated),
            {"noise_covariance": ESTIMATE},
            lambda v, _, name=name: LANGEVIN(name, PRECISION, estimate=v).affine(),
        )
        for name in ("euler", *splittings.SPLITTINGS)
    },
    **{
        f"SGNHT {name} {thermostats}": (
            partial(SGNHT, friction=A, integrator=name, thermostats=thermostats, thermal_mass=MASS),
            {
                "thermostat": XI[0]
                if thermostats == "one"
                else XI[: 1 if thermostats == "site" else D]
            },
            lambda v, _, name=name, many=thermostats == "coordinate": exact_laws.adaptive(
                name, PRECISION, ONE, H, A, XI if many else np.full(D, XI[0]), 0.0
            ).affine(),
        )
        for name in ("badodab", *splittings.SPLITTINGS)
        for thermostats in ("one", "site", "coordinate")
    },
    "SGNHT euler": (
        partial(SGNHT, friction=A, integrator="euler", thermostats="coordinate", thermal_mass=MASS),
        {"thermostat": XI},
        lambda v, _: exact_laws.kick_then_drift(PRECISION, ONE, H, A, XI).affine(),
    ),
    **{
        f"CCAdL {name}": (
            partial(CCAdL, friction=A, integrator=name, thermal_mass=math.inf, **full),
            {"thermostat": XI[0], "noise_covariance": ESTIMATE},
            lambda v, _, name=name: exact_laws.adaptive(
                name, PRECISION, ONE, H, A, np.full(D, XI[0]), v
            ).affine(),
        )
        for name in ("euler", "symmetric", "nogin", *splittings.SPLITTINGS)
    },
    "SMSUBU": (
        partial(SMSUBU, friction=A, subsampling="without_replacement"),
        {},
        lambda v, _: (
            exact_laws.Step(PRECISION, ONE, H)
            .free_flight(A, 0.5, 0)
            .gradient()
            .kick()
            .free_flight(A, 0.5, 2)
            .affine()
        ),
    ),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", STEPS)
def test_the_step_is_its_law(name, monkeypatch):
    """At a temperature, so that none is left out."""
    (method, dynamics, law), temperature = STEPS[name], 0.25
    kernel = method(gaussian_mean, step_size=H, temperature=temperature)
    if "noise_covariance" in dynamics:
        dynamics = dynamics | {"noise_covariance": temperature * ESTIMATE}
    state = state_of(kernel, **dynamics)
    # what this minibatch shows of the noise is of no use for this step
    other = jnp.asarray(ESTIMATE + 7 * ONE, jnp.float32) if state.fixed.layout.noise else None
    found = jacobian(stepped(kernel, state, monkeypatch, other))
    expected = law(ESTIMATE, temperature).at_temperature(temperature)
    for one, another in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, another, **SAME)


@pytest.mark.one_case
@pytest.mark.parametrize("covariance", ["diagonal", "low_rank", "matrix_free"])
@pytest.mark.parametrize(
    "method",
    [
        partial(CCAdL, integrator="nogin", thermal_mass=math.inf),
        partial(CCAdL, integrator="euler", thermal_mass=math.inf),
        partial(SGHMC, noise_variance="estimated"),
    ],
)
def test_representations_of_the_noise(method, covariance, monkeypatch):
    """A step is that of the full matrix, whatever represents it."""
    estimate = ESTIMATE / 5  # so that the friction of SGHMC covers it
    if covariance == "diagonal":
        estimate = np.diag(np.diag(estimate))

    def of(covariance):
        rank = 2 if covariance == "low_rank" else None
        noise = NoiseEstimate(covariance, rank=rank)
        kernel = method(gaussian_mean, step_size=H, friction=A, noise=noise)
        average, seen = jnp.asarray(estimate, jnp.float32), None
        if covariance == "diagonal":
            average = jnp.diag(average)
        elif covariance == "low_rank":
            values, vectors = np.linalg.eigh(estimate - 0.1 * ONE)
            factors = (vectors * np.sqrt(values)).T
            rest = np.full(D, 0.1) + 0 * factors[0]
            estimate_here = factors[1:].T @ factors[1:] + np.diag(rest)
            average = LowRankPlusDiagonal(factors[1:], rest)
            return kernel, average, seen, estimate_here
        elif covariance == "matrix_free":
            average, seen = (), lambda vector: jnp.asarray(estimate, jnp.float32) @ vector
        return kernel, average, seen, estimate

    def jacobian_of(kernel, average, seen):
        state = state_of(kernel, noise_covariance=average, thermostat=XI[0])
        return jacobian(stepped(kernel, state, monkeypatch, seen or average))

    kernel, average, seen, same = of(covariance)
    whole, _, _, _ = of("full")
    expected = jacobian_of(whole, jnp.asarray(same, jnp.float32), None)
    for one, another in zip(jacobian_of(kernel, average, seen), expected, strict=True):
        np.testing.assert_allclose(one, another, **SAME)


def test_negative_controls(monkeypatch):
    """Steps that are wrong in one place are far from the law."""
    kernel = ExplicitEuler(gaussian_mean, step_size=H, friction=A)
    found = jacobian(stepped(kernel, state_of(kernel), monkeypatch))
    right, explicit = (
        step.affine()
        for step in (
            LANGEVIN("euler", PRECISION),
            exact_laws.explicit_euler(PRECISION, ONE, H, A),
        )
    )
    assert np.abs(found.state - right.state).max() > 0.1
    for one, another in zip(found, explicit, strict=True):
        np.testing.assert_allclose(one, another, **SAME)


#: Kernel, and the map that the momentum has gone through where its thermostat looks, as a number
#: of looks; each look moves the thermostat by as large a part of the step.
THERMOSTATS = {
    "SGNHT badodab": (partial(SGNHT, thermal_mass=2.0), "badodab", 0.0),
    "SGNHT obabo": (partial(SGNHT, integrator="obabo", thermal_mass=2.0), "obabo", 0.0),
    "SGNHT coordinate": (
        partial(SGNHT, thermostats="coordinate", thermal_mass=2.0), "badodab", 0.0),
    "SGNHT euler": (partial(SGNHT, integrator="euler", thermal_mass=2.0), "euler", 0.0),
    "CCAdL nogin": (partial(CCAdL, thermal_mass=2.0, **full), "nogin", ESTIMATE),
    "CCAdL symmetric": (
        partial(CCAdL, integrator="symmetric", thermal_mass=2.0, **full), "symmetric", ESTIMATE),
    "CCAdL euler": (
        partial(CCAdL, integrator="euler", thermal_mass=2.0, **full), "euler", ESTIMATE),
}  # fmt: skip


@pytest.mark.parametrize("name", THERMOSTATS)
def test_the_thermostat_sees_the_momentum_where_the_law_says(name, monkeypatch):
    """Step by step with a thermostat that moves, from random positions and momenta."""
    (method, integrator, control), temperature = THERMOSTATS[name], 0.25
    kernel = method(gaussian_mean, step_size=H, friction=A, temperature=temperature)
    many = name == "SGNHT coordinate"
    state = state_of(kernel, thermostat=XI if many else XI[0], noise_covariance=ESTIMATE)
    vector = np.asarray(random.normal(random.key(3), (7 * D,)), float)
    noise = jnp.asarray(ESTIMATE, jnp.float32) if state.fixed.layout.noise else None
    new, _ = stepped(kernel, state, monkeypatch, noise)(jnp.asarray(vector, jnp.float32))
    # the law is for temperature 1: momenta and noise in units of its root
    scaled = vector.copy()
    scaled[: 3 * D] /= temperature**0.5
    xi = XI if many else np.full(D, XI[0])
    looks = 1 if integrator in ("nogin", "euler") else 2
    v = np.asarray(control) / temperature

    def seen(xi, look):
        if name == "SGNHT euler":
            step = exact_laws.kick_then_drift(PRECISION, ONE, H, A, xi)
        else:
            step = exact_laws.adaptive(integrator, PRECISION, ONE, H, A, xi, v)
        p = step.seen[look] @ scaled
        energy = temperature * (p**2 if many else np.full(D, np.mean(p**2)))
        heat = H**2 / 4 * np.trace(np.asarray(control)) / D if integrator == "nogin" else 0.0
        return energy - heat - temperature

    for look in range(looks):
        xi = xi + H / looks / 2.0 * seen(xi, look)
    np.testing.assert_allclose(new.dynamics.thermostat, xi if many else xi[0], **SAME)


@pytest.mark.one_case
@pytest.mark.parametrize("window", [3, math.inf])
@pytest.mark.parametrize(
    "method",
    [
        partial(CCAdL, friction=A),
        partial(CCAdL, friction=A, integrator="symmetric"),
        partial(CCAdL, friction=A, integrator="euler"),
        partial(SGHMC, friction=100.0, noise_variance="estimated"),
        partial(SGLD, modified=True),
        partial(SGFS),
    ],
)
def test_the_average_takes_what_this_minibatch_shows(method, window, monkeypatch):
    """kappa = max(1 / t, 1 / window), for the next step."""
    kernel = method(gaussian_mean, step_size=H, noise=NoiseEstimate("full", window=window))
    state = state_of(kernel)
    fields = state.dynamics._fields
    name = "noise_covariance" if "noise_covariance" in fields else "score_covariance"
    expected = np.zeros((D, D))
    for t in range(1, 6):
        seen = np.diag([1.0, 2.0, 3.0]) * t
        function = stepped(kernel, state, monkeypatch, jnp.asarray(seen, jnp.float32))
        state, _ = function(jnp.ones(7 * D) / 10)
        kappa = max(1 / t, 1 / window)
        expected = (1 - kappa) * expected + kappa * seen
        np.testing.assert_allclose(getattr(state.dynamics, name), expected, **SAME)
        assert state.dynamics.observations == t


@pytest.mark.one_case
@pytest.mark.parametrize("h", [0.1, 0.5, 1.0])
def test_stationary_covariances_follow(h, monkeypatch):
    """NOGIN and corrected ABOBA are exact: by the Jacobian of the kernel itself."""
    for method, dynamics in (
        (partial(CCAdL, thermal_mass=math.inf, **full), {"thermostat": A}),
        (partial(SGHMC, **estimated), {}),
    ):
        noise = ESTIMATE / (5 if method.func is SGHMC else 1)
        kernel = method(gaussian_mean, step_size=h, friction=A)
        state = state_of(kernel, noise_covariance=noise, **dynamics)
        seen = jnp.zeros((D, D))
        found = jacobian(stepped(kernel, state, monkeypatch, seen)).covariance(noise)
        np.testing.assert_allclose(found[:D, :D], np.linalg.inv(PRECISION), rtol=2e-4, atol=2e-4)


def data(size=200, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((size, D)), jnp.float32)


@pytest.mark.nightly
@pytest.mark.parametrize("metric", [None, "dense"])
def test_a_sample_is_a_step_on_a_minibatch(metric):
    """Through ``sample``: the rows, their scale N / n, the prior, the metric and back."""
    covariance = None if metric is None else np.linalg.inv(PRECISION)
    kernel = SGLD(gaussian_mean, step_size=1e-3, metric=covariance)
    x, factor = data(), jnp.asarray(np.linalg.cholesky(PRECISION), jnp.float32)
    start = {"theta": jnp.array([0.3, -0.2, 0.5])}
    state = kernel.init(random.key(0), 0, start, (x, factor), {})
    rows_key, noise_key, _ = random.split(state.rng_key, 3)
    target, drawn = kernel.runtime.target(kernel.method), []
    for i in range(2):  # each with rows and normals of its own
        rows = np.asarray(target.rows(rows_key, i)["rows"].numbers)
        normal = np.asarray(random.normal(random.fold_in(noise_key, i), (D,)))
        drawn.append((set(rows.tolist()), normal))
        theta = np.asarray(state.z["theta"], float)
        slope = 200 / 10 * PRECISION @ np.sum(theta - np.asarray(x, float)[rows], axis=0)
        root = np.eye(D) if metric is None else np.asarray(state.fixed.metric.factor, float)
        expected = theta + root @ (-1e-3 * root.T @ slope + (2e-3) ** 0.5 * normal)
        state = kernel.sample(state, (x, factor), {})
        np.testing.assert_allclose(state.z["theta"], expected, rtol=2e-5, atol=2e-5)
        assert state.i == i + 1 and len(drawn[i][0]) == 10
    assert drawn[0][0] != drawn[1][0] and not np.allclose(drawn[0][1], drawn[1][1])


STEP = """
import pickle, sys
import jax, jax.numpy as jnp
from numpyro_sgmcmc.gradients.estimators import Evaluation
kernel, state, key = pickle.load(open(sys.argv[1], "rb"))
def gradient(position):
    return Evaluation(jnp.sum(position**2), 3 * position, jnp.eye(3))
new, _ = kernel.method.step(state, gradient, jax.random.wrap_key_data(jnp.asarray(key)))
pickle.dump(jax.device_get((new.z, new.dynamics)), open(sys.argv[2], "wb"))
"""


def some_model(x, factor):
    """In a module that another process can import."""
    gaussian_mean(x, factor)


@pytest.mark.nightly
def test_a_step_is_a_function_of_its_arguments(tmp_path):
    """Outside of ``MCMC``, of a kernel that was never initialised, in another process."""
    kernel = CCAdL(some_model, step_size=H, friction=A, **full)
    state = state_of(kernel, noise_covariance=ESTIMATE)
    state = state._replace(rng_key=random.key_data(state.rng_key))
    key = random.key_data(random.key(5))

    def gradient(position):
        return Evaluation(jnp.sum(position**2), 3 * position, jnp.eye(3))

    fresh = CCAdL(some_model, step_size=H, friction=A, **full)
    (tmp_path / "in").write_bytes(pickle.dumps((fresh, jax.device_get(state), np.asarray(key))))
    expected, _ = kernel.method.step(state, gradient, random.wrap_key_data(key))
    twice, _ = kernel.method.step(state, gradient, random.wrap_key_data(key))
    subprocess.run(
        [sys.executable, "-c", STEP, tmp_path / "in", tmp_path / "out"],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "True",  # compiled as in this process
        },
        check=True,
        timeout=300,
    )
    found = pickle.loads((tmp_path / "out").read_bytes())
    for one, same, other in zip(
        *map(jax.tree.leaves, ((expected.z, expected.dynamics), (twice.z, twice.dynamics), found)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, same)
        np.testing.assert_array_equal(one, other)
