# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Exact stationary laws of the discretised methods on a Gaussian posterior with constant
gradient noise, where a step is a linear map of the state with Gaussian noise of covariance
``Q``: the stationary covariance solves ``P = F P F' + Q``.

Closed forms for one direction are given where they exist, and compared with the solution
of that equation in ``test_exact_laws.py``, so that neither is trusted alone.
"""

from typing import NamedTuple

import numpy as np
from scipy.linalg import expm, solve_discrete_lyapunov, sqrtm
from scipy.optimize import brentq

HALF = 0.5


class Affine(NamedTuple):
    """
    A step as an affine map: of the state, of the noise of the gradient, and of normals, of which
    the covariance that they add is all that matters.
    """

    state: np.ndarray
    gradient_noise: np.ndarray
    added: np.ndarray

    def covariance(self, noise):
        """The stationary covariance, with gradient noise of this covariance."""
        q = self.gradient_noise @ noise @ self.gradient_noise.T + self.added
        return solve_discrete_lyapunov(self.state, q)

    def at_temperature(self, temperature):
        """Of a step whose covariances were divided by T: all that is added is T times as large."""
        return self._replace(added=temperature * self.added)


def overdamped_step(precision, h, scale=None, injected=None):
    """theta += -h G (Lambda theta + noise) + sqrt(2 h) N(0, injected): SGLD and its kin."""
    one = np.eye(len(precision))
    scale = one if scale is None else scale
    injected = scale if injected is None else injected
    return Affine(one - h * scale @ precision, -h * scale, 2 * h * injected)


def modified_step(precision, estimate, h):
    """SGLD with sqrt(2 h) (I - h V / 4) R, Vollmer et al. (2016)."""
    root = np.eye(len(precision)) - h * estimate / 4
    return overdamped_step(precision, h, injected=root @ root)


def fisher_scoring_step(precision, information, h):
    """SGFS with the given N I + V: theta -= 2 M^-1 (g + sqrt(2 / h) R)."""
    inverse = np.linalg.inv(information + 2 / h * np.eye(len(precision)))
    return overdamped_step(precision, 1.0, 2 * inverse, 4 / h * inverse @ inverse)


def overdamped(precision, noise, h):
    """SGLD."""
    return overdamped_step(precision, h).covariance(noise)


def modified(precision, noise, h):
    """SGLD, modified, that knows the noise."""
    return modified_step(precision, noise, h).covariance(noise)


def fisher_scoring(precision, noise, h, information):
    """SGFS with the given N I + V."""
    return fisher_scoring_step(precision, information, h).covariance(noise)


def scale_adapted_step(precision, h, decay, scale):
    """p <- (1 - alpha) p - h s g + sqrt(2 alpha) R; theta += h s p, from the same gradient."""
    step = Step(precision, np.eye(len(precision)), h).gradient()
    step.p = (1 - decay) * step.p - h * scale @ step.g + (2 * decay) ** 0.5 * step.normal[0]
    step.theta = step.theta + h * scale @ step.p
    return step.affine()


class Step:
    """
    A step of a method with momentum, map by map: position and momentum as matrices that act
    on the stack of the old position, the old momentum, the noise of the gradient and four
    standard normal vectors.
    """

    def __init__(self, precision, noise, h):
        self.precision, self.noise, self.h = precision, noise, h
        self.d = d = len(precision)
        self.one = np.eye(d)
        blocks = np.eye(7 * d).reshape(7, d, 7 * d)
        self.theta, self.p = blocks[0], blocks[1]
        self.zeta, *self.normal = blocks[2:]
        self.seen = []

    def drift(self, part=1.0):
        self.theta = self.theta + part * self.h * self.p
        return self

    def gradient(self):
        self.g = self.precision @ self.theta + self.zeta
        return self

    def kick(self, part=1.0):
        self.p = self.p - part * self.h * self.g
        return self

    def linear(self, matrix, noise=None, which=0):
        """p <- matrix p + noise R"""
        self.p = matrix @ self.p
        if noise is not None:
            self.p = self.p + np.real(sqrtm(noise)) @ self.normal[which]
        return self

    def nogin(self, friction, control, xi=None):
        xi = friction if xi is None else xi
        h, one = self.h, self.one
        d = np.tanh(xi * h / 2) * one + h**2 / 4 * control
        r = np.tanh(friction * h / 2) ** 0.5 * self.normal[0]
        self.p = (one - d) @ np.linalg.solve(one + d, self.p + r) + r
        return self

    def free_flight(self, friction, part, which):
        """The exact flow, from its generator; R of the block is what that leaves."""
        t, d, one = part * self.h, self.d, self.one
        zero = np.zeros((d, d))
        a = np.block([[zero, one], [zero, -friction * one]])
        diffusion = np.block([[zero, zero], [zero, 2 * friction * one]])
        # Van Loan (1978)
        both = expm(t * np.block([[-a, diffusion], [np.zeros((2 * d, 2 * d)), a.T]]))
        flow = both[2 * d :, 2 * d :].T
        noise = np.real(sqrtm(flow @ both[: 2 * d, 2 * d :]))
        state = flow @ np.concatenate([self.theta, self.p])
        state = state + noise @ np.concatenate(self.normal[which : which + 2])
        self.theta, self.p = state[:d], state[d:]
        return self

    def look(self):
        """The thermostat sees the momentum as it is here."""
        self.seen.append(self.p)
        return self

    def affine(self):
        """The whole step as one affine map."""
        d = self.d
        both = np.concatenate([self.theta, self.p])
        normals = both[:, 3 * d :]
        return Affine(both[:, : 2 * d], both[:, 2 * d : 3 * d], normals @ normals.T)

    def law(self):
        """Covariance of the position, and mean kinetic temperature where it was looked at."""
        d = self.d
        state = np.concatenate([self.theta, self.p])
        q = np.kron(np.diag([0, 0, 0, 1, 1, 1, 1.0]), self.one)
        q[2 * d : 3 * d, 2 * d : 3 * d] = self.noise
        covariance = solve_discrete_lyapunov(state[:, : 2 * d], state @ q @ state.T)
        q[: 2 * d, : 2 * d] = covariance
        energies = [np.diag(p @ q @ p.T) for p in self.seen]
        return covariance[:d, :d], np.mean(energies, axis=0) if energies else None


def euler(precision, noise, h, friction, diffusion, control=None):
    """
    theta += h p; p += -h (Lambda theta + noise) - h (friction + control) p + sqrt(2 h D) R:
    SGHMC and CCAdL, and the law of the position of SGNHT, whose order of drift and kick is
    the other one.
    """
    step = Step(precision, noise, h).drift()
    before = step.p
    step.gradient()
    damping = friction * step.one + (0.0 if control is None else control)
    step.p = step.p - h * step.g - h * damping @ before
    diffusion = diffusion * step.one if np.ndim(diffusion) == 0 else diffusion
    step.p = step.p + np.real(sqrtm(2 * h * diffusion)) @ step.normal[0]
    return step.look()


def explicit_euler(precision, noise, h, friction):
    """SGHMC with the gradient at the old position, which is not Chen et al.'s algorithm."""
    step = Step(precision, noise, h).gradient()
    before = step.p
    step.drift()
    step.p = before - h * step.g - h * friction * before
    step.p = step.p + (2 * h * friction) ** 0.5 * step.normal[0]
    return step


def split(name, step, middle):
    """The maps of a splitting, from one drift to the next, around a map of the momentum."""
    if name == "baoab":
        return middle(step.drift(HALF)).drift(HALF).gradient().kick()
    before = {"aboba": HALF, "obabo": 1.0}[name]
    middle(step.drift(before).gradient().kick(HALF)).kick(HALF)
    return step.drift(1 - before)


def langevin(name, precision, noise, h, friction, estimate=0.0):
    """SGHMC: in the order of the letters, from one drift to the next."""
    one = np.eye(len(precision))
    if name == "euler":
        return euler(precision, noise, h, friction, friction * one - h / 2 * estimate)
    c = np.exp(-friction * h)
    root = (1 - c**2) * one - h**2 / 4 * (1 + c) ** 2 * estimate
    return split(name, Step(precision, noise, h), lambda step: step.linear(c * one, root))


def controls(noise, h, friction):
    """The maps around the O of BAOAB: functions of the noise, found by iteration."""
    v, vectors = np.linalg.eigh(noise)
    u, kappa = h**2 * v, np.full_like(v, np.exp(-friction * h))
    for _ in range(100):
        delta = u / (4 - h**2) * (1 + 3 * kappa) / (1 + kappa)
        before, after = (1 + 4 * u / (4 - h**2) - delta) ** -0.5, (1 - delta) ** 0.5
        kappa = np.exp(-friction * h) * before * after
    return tuple(vectors * scale @ vectors.T for scale in (before, after))


def adaptive(name, precision, noise, h, friction, xi, control):
    """SGNHT and CCAdL at a fixed thermostat, one for each coordinate."""
    one = np.eye(len(precision))
    control = control * one if np.ndim(control) == 0 else control
    if name == "euler":
        return euler(precision, noise, h, np.diag(xi), friction * one, h / 2 * control)
    step = Step(precision, noise, h)
    if name == "nogin":
        return split("aboba", step, lambda step: step.look().nogin(friction, control, xi[0]))
    c = np.diag(np.exp(-xi * h))
    root = np.diag(friction / xi * (1 - np.exp(-2 * xi * h)))
    before = after = expm(-(h**2) / 4 * control)
    splitting = {"badodab": "baoab", "symmetric": "baoab"}.get(name, name)
    if splitting == "baoab":
        before, after = controls(control, h, friction)

    def middle(step):
        return step.linear(before).look().linear(c, root).look().linear(after)

    return split(splitting, step, middle)


def kick_then_drift(precision, noise, h, friction, xi):
    """SGNHT by Euler's method: the gradient at the old position, the drift on the new momentum."""
    step = Step(precision, noise, h).gradient()
    added = (2 * h * friction) ** 0.5 * step.normal[0]
    step.p = step.p - h * step.g - h * np.diag(xi) @ step.p + added
    return step.drift().look()


def thermostatted(name, precision, noise, h, friction, control=0.0, shared=True):
    """
    SGNHT (``control=0``) and CCAdL (``control`` the covariance it is given) for a thermal
    mass so large that the thermostats are constant: they settle where the kinetic
    temperature that they see is 1. Returns the covariance of the position.

    :param shared: one thermostat; or one for each coordinate, which must not interact.
    """
    d = len(precision)
    if not shared:
        rows = [np.ix_([k], [k]) for k in range(d)]
        each = [thermostatted(name, precision[k], noise[k], h, friction) for k in rows]
        return np.diag(np.ravel(each))
    # the noise of half a kick is not heat
    offset = h**2 / 4 * np.trace(control * np.eye(d)) / d if name == "nogin" else 0.0

    def at(xi):
        return adaptive(name, precision, noise, h, friction, np.full(d, xi), control).law()

    # beyond h xi = 1 the momentum flips in a step of Euler's method and heats up again
    fastest = 1 / h - h / 2 * np.max(control) if name == "euler" else 50 / h
    xi = brentq(lambda xi: at(xi)[1].mean() - offset - 1, 0.05 * friction, fastest)
    return at(xi)[0]


def symmetric_sweeps(precision, noise, h, friction, batches):
    """
    SMS-UBU at the ends of its sweeps: minibatch ``b`` of a random partition has noise
    ``zeta_b``, the noises add up to zero, and each is met twice in the sweep.
    """
    d = len(precision)
    step = Step(precision, noise, h)
    step.free_flight(friction, HALF, 0).gradient().kick().free_flight(friction, HALF, 2)
    after = np.concatenate([step.theta, step.p])
    f, g, normal = after[:, : 2 * d], after[:, 2 * d : 3 * d], after[:, 3 * d :]
    steps = 2 * batches
    powers = [np.linalg.matrix_power(f, steps - 1 - j) for j in range(steps)]
    q = sum(power @ normal @ normal.T @ power.T for power in powers)
    met = [(powers[b] + powers[steps - 1 - b]) @ g for b in range(batches)]
    mean = sum(met) / batches
    exchangeable = batches / (batches - 1)
    q = q + exchangeable * sum((m - mean) @ noise @ (m - mean).T for m in met)
    return solve_discrete_lyapunov(np.linalg.matrix_power(f, steps), q)[:d, :d]
