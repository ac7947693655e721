# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What is new is in one place: a method, a splitting of all methods, a scheme of subsampling."""

from dataclasses import dataclass
from functools import partial
import inspect
import math
from pathlib import Path

from affine_steps import ESTIMATE, ONE, PRECISION, SAME, A, D, H, jacobian, state_of, stepped
import exact_laws
from gaussian_posterior import NOISE, Z, data, gaussian_mean, sampled, z_score
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from runs import run_mcmc
from scipy.linalg import expm

import numpyro_sgmcmc
from numpyro_sgmcmc import SGHMC, SGLD, SGNHT, CCAdL, NoiseEstimate, SGMCMCKernel
from numpyro_sgmcmc.data import subsampling
from numpyro_sgmcmc.kernels import splittings
from numpyro_sgmcmc.kernels.integrators import drift, kick
from numpyro_sgmcmc.kernels.momentum import Momentum, fresh_momentum
from numpyro_sgmcmc.kernels.settings import recorded, whole

COMPILE_QUICKLY = True

# It is biased, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:After .* samples. The draws do not have the law")


class RefreshedMomentum(SGMCMCKernel):
    """
    SGLD with a momentum that is drawn anew every so many steps.

    :param int every: number of steps between two momenta.
    """

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Method(SGMCMCKernel.Method):
        every: int = recorded(5)

        def __post_init__(self):
            super().__post_init__()
            whole("every", self.every)

        def init_dynamics(self, rng_key, position, fixed):
            return Momentum(fresh_momentum(rng_key, position, self.temperature))

        def step(self, state, gradient, rng_key):
            h, p = state.step_size, state.dynamics.momentum
            fresh = fresh_momentum(rng_key, p, self.temperature)
            p = jnp.where(state.i % self.every == 0, fresh, p)
            position = drift(state.z, p, h)
            evaluation = gradient(position)
            p = kick(p, evaluation.gradient, h)
            return state._replace(z=position, dynamics=Momentum(p)), evaluation


def law_of_refreshed(h, every):
    """At the end of a cycle: theta' = a theta + b R + sum of c_j zeta_j."""
    size = 2 + every  # theta, R, and the noise of each gradient
    theta, p = np.eye(size)[0], np.eye(size)[1]
    for k in range(every):
        theta = theta + h * p
        p = p - h * (theta + np.eye(size)[2 + k])
    return (theta[1] ** 2 + NOISE * np.sum(theta[2:] ** 2)) / (1 - theta[0] ** 2)


@pytest.mark.nightly
def test_a_new_method():
    """Its arguments are checked, in the signature, in the record and described."""
    every, h = 4, 0.2
    x, factor = data(np.eye(200), NOISE * np.eye(200))
    kernel = RefreshedMomentum(gaussian_mean, h, every=every, steps_per_sample=every)
    squares, _ = sampled(kernel, x, factor)
    z, error = z_score(squares.mean(-1), law_of_refreshed(h, every))
    assert error < 0.01 and abs(z) < Z
    assert kernel.run_info["every"] == every and kernel.run_info["step_size"] == h
    parameters = list(inspect.signature(RefreshedMomentum).parameters)
    assert parameters[:3] == ["model", "step_size", "every"] and "temperature" in parameters
    assert all(f"{name}:" in RefreshedMomentum.__doc__ for name in parameters)
    with pytest.raises(ValueError, match="`every` must be a positive integer; got 0"):
        RefreshedMomentum(gaussian_mean, h, every=0)
    with pytest.raises(TypeError, match="RefreshedMomentum: .*'friction'; the arguments are model"):
        RefreshedMomentum(gaussian_mean, h, friction=1.0)
    with pytest.raises(ValueError, match="RefreshedMomentum cannot propose a step size"):
        RefreshedMomentum(gaussian_mean).method.suggest(None)


def abao(position, momentum, gradient, h, middle):
    """A(h/2) B(h) A(h/2) O."""
    position = drift(position, momentum, h / 2)
    evaluation = gradient(position)
    momentum = kick(momentum, evaluation.gradient, h)
    position = drift(position, momentum, h / 2)
    momentum, kept = middle(momentum, evaluation)
    return position, momentum, kept, evaluation


SAME_MAPS = {
    "SGHMC": (partial(SGHMC, friction=A), {}, 0 * ONE),
    "SGNHT": (partial(SGNHT, friction=A, thermal_mass=1e30), {"thermostat": A}, 0 * ONE),
    "CCAdL": (
        partial(CCAdL, friction=A, thermal_mass=math.inf, noise=NoiseEstimate("full")),
        {"thermostat": A, "noise_covariance": ESTIMATE},
        ESTIMATE,
    ),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", SAME_MAPS)
def test_a_new_splitting_is_that_of_all_kernels(name, monkeypatch):
    record = splittings.Splitting(abao, gradient_at_end=False, gradient_before_middle=True)
    monkeypatch.setitem(splittings.SPLITTINGS, "abao", record)
    method, dynamics, control = SAME_MAPS[name]
    kernel = method(gaussian_mean, step_size=H, integrator="abao")
    assert not kernel.method.traits.gradient_at_end and kernel.run_info["integrator"] == "abao"
    state = state_of(kernel, **dynamics)
    found = jacobian(stepped(kernel, state, monkeypatch, jnp.zeros((D, D))))
    damped = expm(-(H**2) / 4 * control)
    c = math.exp(-A * H)
    step = exact_laws.Step(PRECISION, ONE, H).drift(0.5).gradient().kick().drift(0.5)
    expected = step.linear(damped).linear(c * ONE, (1 - c**2) * ONE).linear(damped).affine()
    for one, another in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, another, **SAME)


def systematic(key, step, size, batch_size):
    """Every so manieth row, from a random one on."""
    first = random.randint(random.fold_in(key, step), (), 0, size)
    return (first + jnp.arange(batch_size) * (size // batch_size)) % size


def test_a_new_scheme(monkeypatch):
    monkeypatch.setitem(subsampling.SCHEMES, "systematic", subsampling.Scheme(systematic))
    x, factor = data(np.eye(D), np.eye(D))
    kernel = SGLD(gaussian_mean, step_size=1e-3, subsampling="systematic")
    state = kernel.init(random.key(0), 0, {"theta": jnp.zeros(D)}, (x, factor), {})
    rows = np.asarray(kernel.runtime.target(kernel.method).rows(random.key(1))["rows"].numbers)
    assert np.all(np.diff(rows) % 100 == 10)
    kernel.sample(state, (x, factor), {})
    assert kernel.run_info["subsampling"] == "systematic"
    with pytest.raises(ValueError, match="one of .*'blocks', 'systematic'; got 'other'"):
        SGLD(gaussian_mean, step_size=1e-3, subsampling="other")


PACKAGE, PACKAGE_DEPTH = str(Path(numpyro_sgmcmc.__file__).parent), 10


@pytest.mark.nightly
def test_frames_from_mcmc_to_the_gradient():
    """How many functions of the package stand between ``MCMC`` and the model."""
    depths = []

    def model(x, factor):
        frames = [frame.filename for frame in inspect.stack()]
        first = next((k for k, f in enumerate(frames) if f.endswith("infer/mcmc.py")), None)
        within = [f for f in frames[:first] if f.startswith(PACKAGE)]
        if first is not None and any(f.endswith("transition.py") for f in within):
            depths.append(len(within))
        gaussian_mean(x, factor)

    for method in (partial(SGLD), partial(CCAdL, friction=A), partial(SGHMC, friction=A)):
        x, factor = data(np.eye(D), np.eye(D))
        run_mcmc(method(model, 1e-3), x, factor, warmup=1, samples=1)
    assert depths and max(depths) <= PACKAGE_DEPTH
