# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Batches of factorisations that do not wait for each other."""

import os
from pathlib import Path
import re
import subprocess
import sys

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_median
import pytest
import two_threads
import two_threads_of_groups

from numpyro_sgmcmc import SGHMC
from numpyro_sgmcmc.posterior import linear_algebra, small_cholesky
from numpyro_sgmcmc.posterior.linear_algebra import in_order
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.tuning import Tuning

COMPILE_QUICKLY = True

A = random.normal(random.key(0), (20, 3, 3))
A = A @ A.mT + jnp.eye(3)
Y = random.normal(random.key(1), (20, 3))
W = jnp.array([0.1, 0.2])


def potential(w, A, y):
    """Of rows with a covariance each."""
    factor = jnp.linalg.cholesky(A + jnp.exp(w[1]) * jnp.eye(3))
    z = lax.linalg.triangular_solve(factor, (y - w[0])[..., None], left_side=True, lower=True)
    return jnp.sum(z**2) / 2 + jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)))


slope = jax.grad(potential)


@jax.custom_jvp
def custom(x):
    return jnp.linalg.cholesky(x).sum()


custom.defjvps(lambda tangent, value, x: tangent.sum())


def two_points(w, A, y):
    return slope(w, A, y) - slope(w / 2, A, y)


def several_chains(w, A, y):
    return jax.vmap(two_points, (0, None, None))(jnp.stack([w, 2 * w]), A, y)


def beside_chunks(w, A, y):
    chunks = A.reshape(4, 5, 3, 3), y.reshape(4, 5, 3)
    total, _ = lax.scan(lambda total, chunk: (total + slope(w, *chunk), None), jnp.zeros(2), chunks)
    return total - slope(w / 2, A, y)


def two_loops(w, A, y):
    def found(w, count):
        state = 0, w
        return lax.while_loop(
            lambda state: state[0] < count,
            lambda state: (state[0] + 1, state[1] - 1e-3 * two_points(state[1], A, y)),
            state,
        )[1]

    count = jnp.argmax(y[:, 0])  # not known when it is compiled
    return found(w, count) - found(2 * w, count)


def loops_of_several_lengths(w, A, y):
    def found(w):
        return lax.while_loop(
            lambda x: jnp.sum(x**2) > 0.1,
            lambda x: 0.7 * x - 1e-3 * two_points(x, A, y),
            w,
        )

    return jax.vmap(found)(jnp.stack([w, 5 * w])).sum(0)


def two_branches(w, A, y):
    def found(w):
        return lax.cond(w[0] > 0, slope, two_points, w, A, y)

    return found(w) - found(-w)


def two_custom(w, A, y):
    return custom(w[0] ** 2 + A) - custom(w[1] ** 2 + A)


def other_factorisations(w, A, y):
    q, r = jnp.linalg.qr(A + w[0])
    values, vectors = jnp.linalg.eigh(A * w[1])
    return jnp.linalg.solve(A, y[..., None]).sum() + r.sum() + (values**2).sum()


PROGRAMS = [two_points, several_chains, beside_chunks, two_loops, two_branches, two_custom]
PROGRAMS += [other_factorisations, loops_of_several_lengths]


def unordered(program: str) -> list[tuple[str, str]]:
    """Calls of LAPACK in a compiled program that do not wait for each other, in pairs."""
    programs, found = {}, []
    for name, body in re.findall(r"^(?:ENTRY )?%(\S+) [^\n]*\{\n(.*?)^\}", program, re.S | re.M):
        lines = re.findall(r"^\s+(?:ROOT )?%(\S+) = (.*)$", body, re.M)
        programs[name] = {key: re.sub(r", metadata=.*", "", line) for key, line in lines}

    def calls(line):
        names = re.findall(r"%([\w.\-]+)", line)
        inside = [one for name in names if name in programs for one in programs[name].values()]
        return 'custom_call_target="lapack_' in line or any(map(calls, inside))

    for lines in programs.values():
        waits = {}  # operations are listed after those that they need
        for name, line in lines.items():
            needed = [one for one in re.findall(r"%([\w.\-]+)", line) if one in lines]
            waits[name] = set(needed).union(*(waits[one] for one in needed))
        factorisations = [name for name, line in lines.items() if calls(line)]
        pairs = zip(factorisations, factorisations[1:], strict=False)
        found += [(one, other) for one, other in pairs if one not in waits[other]]
    return found


@pytest.fixture
def one_device(monkeypatch):
    """The tests have several."""
    monkeypatch.setattr(linear_algebra, "_devices_share_threads", lambda: False)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_calls_wait_for_each_other(program, one_device):
    before, after = (jax.jit(f).lower(W, A, Y).compile() for f in (program, in_order(program)))
    assert unordered(before.as_text())  # else there is nothing to see
    assert not unordered(after.as_text())
    np.testing.assert_allclose(after(W, A, Y), before(W, A, Y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_devices_take_matrices_one_by_one(program):
    assert jax.local_device_count() > 1
    found = jax.make_jaxpr(in_order(program))(W, A, Y)
    assert linear_algebra._count(found.jaxpr) == 0
    np.testing.assert_allclose(
        jax.jit(in_order(program))(W, A, Y), jax.jit(program)(W, A, Y), rtol=1e-4, atol=1e-5
    )


def test_values_that_are_not_finite_stay_where_they_are(one_device):
    bad = -A
    one, other = in_order(lambda: (jnp.linalg.cholesky(bad), jnp.linalg.cholesky(A)))()
    assert np.isnan(one[:, 0, 0]).all()
    np.testing.assert_array_equal(other, jnp.linalg.cholesky(A))


def test_programs_without_batches_stay_as_they_are(one_device):
    def program(w, A, y):
        one = jnp.linalg.cholesky(A[0]) + jnp.linalg.cholesky(A[1])  # not batches
        return one @ y[0] + jnp.linalg.cholesky(A).sum() + lax.fori_loop(0, 3, lambda i, x: x, w[0])

    assert str(jax.make_jaxpr(in_order(program))(W, A, Y)) == str(
        jax.make_jaxpr(lambda *x: program(*x))(W, A, Y)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("several", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_samples_of_a_kernel(several, one_device):
    view = read_model(two_threads.model, init_to_median, two_threads.DATA, {})
    values = {"mu": jnp.zeros(two_threads.SIZE), "s": jnp.zeros(())}
    anchor = Target(view, two_threads.DATA, {}).anchor(values)
    tuning = Tuning(1e-3, 1.0, IdentityMetric(), anchor=anchor)
    kernel = SGHMC(two_threads.model, tuning=tuning)
    keys = random.split(random.key(0), 2) if several else random.key(0)
    state = kernel.init(keys, 0, None, two_threads.DATA, {})
    sampled = jax.jit(lambda state: kernel.sample(state, two_threads.DATA, {}))
    assert not unordered(sampled.lower(state).compile().as_text())
    assert jnp.all(jnp.isfinite(sampled(state).z["mu"]))


@pytest.mark.nightly
def test_integrals_over_groups_need_no_lapack(monkeypatch):
    """The rule of many dimensions has matrices of its own, and is to go on without."""
    data = two_threads_of_groups.X, two_threads_of_groups.Y

    def lowered():
        kernel = two_threads_of_groups.kernel_of(method=SGHMC)  # it estimates no noise
        state = kernel.init(random.key(0), 0, None, data, {})
        return jax.jit(lambda state: kernel.sample(state, data, {})).lower(state).as_text()

    program = lowered()
    assert "dot_general" in program and "lapack" not in program
    factor = lambda matrices, _: jnp.linalg.inv(jnp.linalg.cholesky(matrices))  # noqa: E731
    monkeypatch.setattr(small_cholesky, "inverse_cholesky", factor)
    assert "lapack" in lowered()


def run_with_two_threads(script, *arguments, devices=1):
    here = {"NPROC": "2", "PYTHONPATH": str(Path(script).parents[2])}
    here["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=os.environ | here,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_two_threads(devices):
    """It stands still for ever where the calls are not in order."""
    run_with_two_threads(two_threads.__file__, devices=devices)


@pytest.mark.nightly
@pytest.mark.parametrize("law", ["independent", "correlated"])
def test_two_threads_of_groups(law):
    """With effects that are correlated, a factorisation for each search beside the others."""
    run_with_two_threads(two_threads_of_groups.__file__, law)
