# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Exact stationary laws of the discretised methods on a Gaussian posterior with constant
gradient noise, where a step is a linear map of the state with Gaussian noise of covariance
``Q``: the stationary covariance solves ``P = F P F' + Q``.

Closed forms for one direction are given where they exist, and compared with the solution
of that equation in ``test_exact_laws.py``, so that neither is trusted alone.
"""

import numpy as np
from scipy.linalg import solve_discrete_lyapunov
from scipy.optimize import brentq


def sgld(precision, noise, h):
    """Covariance of the position: precision and noise are (d, d) matrices."""
    d = len(precision)
    return solve_discrete_lyapunov(np.eye(d) - h * precision, 2 * h * np.eye(d) + h**2 * noise)


def drift_then_kick(precision, noise, h, friction, diffusion):
    """
    theta += h p; p += -h (Lambda theta + noise) - h Gamma p + sqrt(2 h D) R: SGHMC, CCAdL,
    and the law of the position of SGNHT at a fixed thermostat, whose order of drift and
    kick is the other one. Returns the covariances of the position and of the momentum.
    """
    d = len(precision)
    one, zero = np.eye(d), np.zeros((d, d))
    drift = np.block([[one, h * one], [zero, one]])
    kick = np.block([[one, zero], [-h * precision, one - h * friction]])
    q = np.block([[zero, zero], [zero, h**2 * noise + 2 * h * diffusion]])
    p = solve_discrete_lyapunov(kick @ drift, q)
    return p[:d, :d], p[d:, d:]


def explicit_euler(precision, noise, h, friction):
    """SGHMC with the gradient at the old position, which is not Chen et al.'s algorithm."""
    d = len(precision)
    one, zero = np.eye(d), np.zeros((d, d))
    f = np.block([[one, h * one], [-h * precision, one - h * friction * one]])
    q = np.block([[zero, zero], [zero, h**2 * noise + 2 * h * friction * one]])
    return solve_discrete_lyapunov(f, q)[:d, :d]


def thermostatted(precision, noise, h, friction, control=0.0):
    """
    SGNHT (``control=0``) and CCAdL (``control`` the covariance it is given) for a thermal
    mass so large that the thermostat is constant: it settles where the mean kinetic
    temperature is 1. Returns the covariance of the position and the thermostat.
    """
    d = len(precision)
    diffusion = friction * np.eye(d)

    def at(xi):
        damping = xi * np.eye(d) + h / 2 * control * np.ones((d, d))
        return drift_then_kick(precision, noise, h, damping, diffusion)

    # beyond h xi = 1 the momentum flips in a step and heats up again
    fastest = 1 / h - h / 2 * np.max(control)
    xi = brentq(lambda xi: np.trace(at(xi)[1]) / d - 1, 0.05 * friction, fastest)
    return at(xi)[0], xi
