# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The stationary law of each method, through the whole pipeline: a NumPyro model with a
subsampled plate, run by ``MCMC``.

With observations :math:`x_i \\sim N(\\theta, s^2)` the gradient noise does not depend on
:math:`\\theta`: its covariance is :math:`(N^2/n)(1 - n/N) S_x^2 / s^4`, and the law of every
discretisation is known exactly (``exact_laws.py``).
"""

from functools import partial
import math

import exact_laws
from gaussian_posterior import (
    BATCH,
    NOISE,
    ExplicitEuler,
    N,
    Z,
    data,
    gaussian_mean,
    sampled,
    z_score,
)
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest
from runs import run_mcmc
from scipy.optimize import brentq

from numpyro_sgmcmc import SGFS, SGHMC, SGLD, SGNHT, SMSUBU, CCAdL, NoiseEstimate
from numpyro_sgmcmc.methods import ccadl
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel

# Many of these samplers are biased, and say so.
pytestmark = pytest.mark.filterwarnings("ignore:After .* samples. The draws do not have the law")

FRICTION = 1.0
#: So heavy that the thermostat is constant, as the closed forms assume.
HEAVY = 100.0


ONE = np.eye(1)
DIRECTIONS = 500
heavy = {"friction": FRICTION, "thermal_mass": HEAVY}
#: An average over all minibatches since the start.
ALL = NoiseEstimate(window=math.inf)
sure = {"noise": ALL}


def langevin(name, estimate=0.0):
    return lambda precision, noise, h: exact_laws.langevin(
        name, precision, noise, h, FRICTION, estimate * noise
    ).law()[0]


def thermostatted(name, control=0.0, shared=True):
    return lambda precision, noise, h: exact_laws.thermostatted(
        name, precision, noise, h, FRICTION, control * noise, shared
    )


#: Kernel, its law for precision, noise covariance and step size, and a step size: with noise of
#: variance 4 it shows a bias of 5 % and more where the method has one. Each kernel with its
#: defaults, and what concerns the rows and the estimate; of all others the step is compared with
#: its law by algebra (test_algebra.py).
METHODS = {
    "SGLD": (partial(SGLD), exact_laws.overdamped, 0.2),
    "SGHMC aboba": (partial(SGHMC, friction=FRICTION), langevin("aboba"), 0.4),
    "SGHMC aboba estimated": (
        partial(SGHMC, friction=FRICTION, noise_variance="estimated", **sure),
        langevin("aboba", 1.0),
        0.4,
    ),
    "SGNHT badodab": (partial(SGNHT, **heavy), thermostatted("badodab"), 0.5),
    "CCAdL nogin": (partial(CCAdL, **sure, **heavy), thermostatted("nogin", 1.0), 1.0),
    "SMSUBU": (
        partial(SMSUBU, friction=FRICTION),
        lambda precision, noise, h: exact_laws.symmetric_sweeps(
            precision, noise, h, FRICTION, N // BATCH
        ),
        0.6,
    ),
    "SGFS": (
        partial(SGFS, **sure),
        # noise of variance 4 without replacement is 4 / (1 - n / N) with
        lambda precision, noise, h: exact_laws.fisher_scoring(
            precision, noise, h, noise / (1 - BATCH / N)
        ),
        1.0,
    ),
}
NIGHTLY = {
    "SGLD with replacement": (
        partial(SGLD, subsampling="with_replacement"), exact_laws.overdamped, 0.2
    ),
    "SGLD modified": (partial(SGLD, modified=True, **sure), exact_laws.modified, 0.4),
    "CCAdL window": (partial(CCAdL, **heavy), thermostatted("nogin", 1.0), 0.5),
    "CCAdL two cotangents": (
        partial(CCAdL, noise=NoiseEstimate(None, "two_cotangents", math.inf), **heavy),
        thermostatted("nogin", 1.0),
        0.5,
    ),
    "CCAdL with replacement, low rank, per example, no thermostat": (
        partial(
            CCAdL,
            friction=FRICTION,
            thermal_mass=math.inf,
            noise=NoiseEstimate("low_rank", "per_example", math.inf, rank=2),
            subsampling="with_replacement",
        ),
        thermostatted("nogin", 1.0),
        0.5,
    ),
}  # fmt: skip


#: Steps between draws, and draws, for the law at the end of a sweep.
SWEEP = 2 * N // BATCH, 1_000


def measure(method, law, h, subsampling="without_replacement"):
    directions, between, samples = DIRECTIONS, 4, 4_000
    if method.func is SMSUBU:
        between, samples = SWEEP
    if getattr(method.keywords.get("noise"), "covariance", None) == "low_rank":
        # it sees that the noise of 100 rows is correlated in 500 directions; of two it need not be
        directions, samples = 2, 100_000
    one = np.eye(directions)
    x, factor = data(one, NOISE * one, subsampling)
    kernel = method(gaussian_mean, step_size=h, steps_per_sample=between)
    found, stein = sampled(kernel, x, factor, samples)
    expected = law(ONE, NOISE * ONE, h).item()
    # minibatches that are not independent cannot be judged
    stein_z = 0.0 if stein is None else (stein.temperature - expected) / stein.error
    return *z_score(found.mean(-1), expected), stein_z


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*METHODS, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)]
)
def test_stationary_variance(name):
    method, law, h = (METHODS | NIGHTLY)[name]
    subsampling = "with_replacement" if "with replacement" in name else "without_replacement"
    z, error, stein = measure(method, law, h, subsampling)
    assert error < 0.01
    assert abs(z) < Z
    # the configurational temperature of the draws is this ratio of variances, biased or not
    assert abs(stein) < Z


@pytest.mark.slow
def test_negative_control():
    """Explicit Euler is found out by the test that the others pass."""
    method, law = partial(ExplicitEuler, friction=FRICTION), langevin("euler")
    z, error, _ = measure(method, law, 0.1)
    assert error < 0.01
    assert abs(z) > 10


@pytest.mark.parametrize("h", [0.05, 0.2, 0.5, 0.7, 1.0])
def test_a_symmetric_integrator_takes_noise_out(h):
    """
    By algebra, with the friction that the tuning takes: all that a tuned step has, whatever its
    direction, in the metric of the posterior, and nearly all in another. One thermostat of two
    directions cannot hide the error of either.
    """

    def variances(noise, curvature=(1.0, 1.0), control=1.0):
        noise, curvature = np.diag(noise) / h**2, np.diag(curvature)
        level = NoiseLevel(np.diag(noise).mean(), noise.max(), 1.0, 0.0)
        _, friction = CCAdL(lambda: None).method.suggest(level)
        data = curvature, noise, h, friction, control * noise
        return np.diag(exact_laws.thermostatted("symmetric", *data) @ curvature)

    most = ccadl._MOST_NOISE
    for noise in (0.01, 0.1, 0.5, most):
        for both in ([noise, noise], [noise, 0.0]):
            assert variances(both) == pytest.approx([1, 1], abs=1e-9)
        error = 0.35 * noise * h * 0.3
        assert variances([noise, noise], [0.7, 1.3]) == pytest.approx([1, 1], abs=error)
    # with half of the control
    assert np.abs(variances([most, 0.0], control=0.5) - 1).max() > 0.03


def test_laws_without_bias():
    """What is claimed to be exact for a Gaussian posterior is."""
    for law, step_sizes in (
        (thermostatted("nogin", 1.0), (0.5, 1.0)),
        (langevin("aboba", 1.0), (0.4,)),
    ):
        for h in step_sizes:
            assert law(ONE, NOISE * ONE, h) == pytest.approx(1)
            for matrices in ((PRECISION, NOISE_2), HETEROGENEOUS):
                posterior = np.linalg.inv(matrices[0])
                np.testing.assert_allclose(law(*matrices, h / 10), posterior)


@pytest.mark.parametrize("h", [0.05, 0.1, 0.2])
def test_closed_forms_solve_the_lyapunov_equation(h):
    """The table of closed forms for one direction, for precision 1.7, friction 1.2, noise 3."""
    precision, v, a = 1.7, 3.0, 1.2
    c, tau, alpha = np.exp(-a * h), np.tanh(a * h / 2), a * h
    stiff = 1 - h**2 * precision / 4
    expected = {
        "euler": (1 + h**2 * v / 2 / alpha) / (1 - h**2 * precision / (2 * (2 - alpha))),
        "baoab": 1 + h**2 * v / (4 * tau) / stiff,
        "aboba": 1 + h**2 * v / (4 * tau),
        "obabo": (1 + h**2 * v / (4 * tau)) / stiff,
    }
    matrices = precision * ONE, v * ONE, h
    for name, closed in expected.items():
        found = exact_laws.langevin(name, *matrices, a).law()[0]
        assert precision * found == pytest.approx(closed), name
    corrected = exact_laws.langevin("euler", *matrices, a, v * ONE).law()[0]
    assert precision * corrected == pytest.approx(1 / (1 - h**2 * precision / (2 * (2 - alpha))))
    sgld = exact_laws.overdamped(*matrices)
    assert precision * sgld == pytest.approx((1 + h * v / 2) / (1 - h * precision / 2))
    modified = exact_laws.modified(*matrices)
    assert precision * modified == pytest.approx((1 + h**2 * v**2 / 16) / (1 - h * precision / 2))
    for control in (0.0, v):
        xi, closed = thermostat_euler(precision, v, h, a, control)
        found = exact_laws.thermostatted("euler", *matrices, a, control)
        assert precision * found == pytest.approx(closed)
        assert closed == pytest.approx(1 - (h * xi + h**2 * control / 2) / 2)
    # one direction, one thermostat: BADODAB, frozen
    xi = brentq(
        lambda xi: a / xi + h**2 * v / 2 * (1 + np.exp(-2 * xi * h))
        / (1 - np.exp(-2 * xi * h)) / stiff - 1, 0.1, 100
    )  # fmt: skip
    closed = 1 - h**2 * v / 4 * np.tanh(xi * h / 2) / stiff
    assert precision * exact_laws.thermostatted("badodab", *matrices, a) == pytest.approx(closed)
    # symmetric CCAdL: the law of BAOAB with c k^2 for c and k^2 (A / xi) (1 - c^2) for s^2
    assert c < 1


def thermostat_euler(precision, v, h, friction, control):
    """The thermostat at which the kinetic temperature is 1, and the variance, in closed form."""

    def energy(xi):
        a = h * xi + h**2 * control / 2
        return 2 * (2 * friction * h + h**2 * v) / (a * (4 - 2 * a - h**2 * precision))

    xi = brentq(lambda xi: energy(xi) - 1, 0.05, 1 / h - h * control / 2)
    return xi, 1 - (h * xi + h**2 * control / 2) / 2


def test_published_references():
    """Numbers that other work has for these schemes, found there by simulation."""
    both = PRECISION, NOISE_2, 0.1
    laws = {
        name: partial(exact_laws.langevin, name, *both, 1.5) for name in ("euler", "baoab", "aboba")
    }
    for law, entries in (
        (exact_laws.overdamped(*both), [1.22513514, 0.98513514, 1.19513514]),
        (laws["euler"]().law()[0], [1.08977318, 0.97496142, 1.08283484]),
        (laws["euler"](NOISE_2).law()[0], [1.00274217, 0.89996439, 1.00274217]),
        (laws["baoab"]().law()[0], [1.08699592, 0.97513803, 1.08040621]),
        (laws["aboba"]().law()[0], [1.08674103, 0.97514057, 1.08023802]),
        (exact_laws.thermostatted("nogin", *both, 1.5, NOISE_2), [1, 0.9, 1]),
    ):
        np.testing.assert_allclose(law[np.triu_indices(2)], entries, rtol=1e-7)
    one = ONE, 4 * ONE, 0.2
    assert thermostatted("euler")(*one) == pytest.approx(0.82908, abs=1e-5)
    assert thermostatted("badodab")(*one) == pytest.approx(0.99432, abs=1e-5)
    assert thermostatted("euler", 1.0)(*one) == pytest.approx(0.82908, abs=1e-5)
    for law, expected in (
        (thermostatted("euler"), [0.979, 0.649]),
        (thermostatted("badodab"), [1.194, 0.791]),
        (thermostatted("euler", 1.0), [0.847, 0.778]),
        (thermostatted("nogin", 1.0), [1.0, 1.0]),
    ):
        relative = np.diag(law(*HETEROGENEOUS, 0.2)) * np.diag(HETEROGENEOUS[0])
        np.testing.assert_allclose(relative, expected, atol=1e-3)


#: Two directions of different precision, and noise that is not in proportion to it.
HETEROGENEOUS = np.diag([1.0, 0.5]), np.diag([8.0, 2.0])
# Two directions in which the precision and the noise do not commute.
PRECISION = np.linalg.inv([[1.0, 0.9], [0.9, 1.0]])
NOISE_2 = np.diag([4.0, 1.0])


def state_dependent(a, b):
    """Precision 1 and gradient noise of variance 2 + 3 theta^2: rows add a theta + b theta^2/2."""
    theta = numpyro.sample("theta", dist.Normal(0, 1))
    with numpyro.plate("rows", len(a), subsample_size=len(a) // 20) as i:
        numpyro.factor("x", -(a[i] * theta + b[i] * theta**2 / 2))


def state_dependent_data(size=4_000):
    a, b = np.random.default_rng(3).standard_normal((2, size))
    a -= a.mean()
    b -= b.mean()
    b -= (a @ b) / (a @ a) * a
    factor = 20 * size * (1 - 1 / 20)  # N^2 / n (1 - n / N)
    return [
        jnp.asarray(z * np.sqrt(v / factor) / z.std(ddof=1), jnp.float32)
        for z, v in ((a, 2.0), (b, 3.0))
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(("covariance", "exact"), [("matrix_free", True), ("diagonal", False)])
def test_state_dependent_noise(covariance, exact):
    """NOGIN is exact where the noise depends on the position, if it knows the noise there."""
    kernel = CCAdL(
        state_dependent,
        step_size=0.4,
        friction=FRICTION,
        thermal_mass=math.inf,
        noise=covariance,
        steps_per_sample=5,
    )
    mcmc = run_mcmc(kernel, *state_dependent_data(), key=4, warmup=200, samples=4_000, chains=100)
    means = (np.asarray(mcmc.get_samples(True)["theta"], float) ** 2).mean(1)
    error = means.std(ddof=1) / 10
    if exact:
        assert error < 0.004
        assert abs(means.mean() - 1) < 0.01
    else:
        assert means.mean() - 1 > 0.01 + 3 * error


#: Order of the error in the step size, and two step sizes small enough to see it: 1 for
#: Euler's method, at least 2 for the symmetric integrators.
ORDERS = {
    "SGLD": (SGLD, (0.05, 0.1), 1),
    **{
        name: (partial(method, integrator="euler", **options), (0.05, 0.1), 1)
        for name, method, options in (
            ("SGHMC euler", SGHMC, {"friction": FRICTION}),
            ("SGNHT euler", SGNHT, heavy),
            ("CCAdL euler", CCAdL, sure | heavy),
        )
    },
    **{
        f"SGHMC {name}": (
            partial(SGHMC, integrator=name, friction=FRICTION, noise_variance="estimated", **sure),
            (0.3, 0.6),
            2,
        )
        for name in ("baoab", "aboba", "obabo")
    },
    "SGNHT badodab": (partial(SGNHT, **heavy), (0.3, 0.6), 2),
    # of 0.3 the error is not seen
    "CCAdL symmetric": (partial(CCAdL, integrator="symmetric", **sure, **heavy), (0.4, 0.8), 2),
    "CCAdL nogin": (
        partial(CCAdL, friction=FRICTION, thermal_mass=math.inf, **sure),
        (0.3, 0.6),
        2,
    ),
}


def logistic(x):
    """Many coordinates with the logistic density sech(theta)^2, and constant gradient noise."""
    size = x.shape[1]
    prior = dist.ImproperUniform(dist.constraints.real_vector, (), (size,))
    theta = numpyro.sample("theta", prior)
    numpyro.factor("logistic", -2 * jnp.sum(jnp.logaddexp(theta, -theta)))
    with numpyro.plate("rows", x.shape[0], subsample_size=BATCH) as i:
        numpyro.factor("x", x[i] @ theta)


#: Its variance.
LOGISTIC = np.pi**2 / 12


def weak_order(method, step_sizes, dimension=2_000, num_samples=6_000):
    x = np.random.default_rng(5).standard_normal((N, dimension))
    x -= x.mean(0)
    x *= np.sqrt(1.0 / (N**2 / BATCH * (1 - BATCH / N))) / x.std(0, ddof=1)
    biases, errors = [], []
    for h in step_sizes:
        kernel = method(logistic, step_size=h, steps_per_sample=4)
        mcmc = MCMC(kernel, num_warmup=1_000, num_samples=num_samples, progress_bar=False)
        start = {"theta": jnp.zeros(dimension)}
        mcmc.run(random.key(6), jnp.asarray(x, jnp.float32), init_params=start)
        series = (np.asarray(mcmc.get_samples(True)["theta"], float) ** 2).mean(-1)
        biases.append(abs(series.mean() - LOGISTIC))
        errors.append(series.std() / effective_sample_size(series) ** 0.5 / biases[-1])
    return np.log(biases[1] / biases[0]) / np.log(step_sizes[1] / step_sizes[0]), np.hypot(*errors)


#: One of each order; the others are nightly.
SOME_ORDERS = ("CCAdL nogin",)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in SOME_ORDERS else pytest.mark.nightly) for n in ORDERS],
)
def test_weak_order(name):
    method, step_sizes, order = ORDERS[name]
    slope, error = weak_order(method, step_sizes)
    if order == 1:
        assert error < 0.1
        assert abs(slope - 1) < 0.25
    else:
        assert slope - 2 * error > 2 - 0.25
