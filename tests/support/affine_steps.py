# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The step of a kernel as an affine map: its Jacobian, for ``exact_laws.py``."""

import math

import exact_laws
import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.gradients.estimators import Evaluation

D, H, A = 3, 0.3, 1.3
ONE = np.eye(D)
#: Precision, and the covariance that the method has for the noise; they do not commute.
PRECISION = np.array([[2.0, 0.6, -0.3], [0.6, 1.2, 0.2], [-0.3, 0.2, 0.7]])
ESTIMATE = np.array([[3.0, -1.0, 0.4], [-1.0, 2.0, 0.5], [0.4, 0.5, 4.0]])
SAME = {"atol": 1e-5, "rtol": 1e-5}


def state_of(kernel, **dynamics):
    """A state of the kernel after its warm-up, with these parts of its dynamics."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((100, D)), jnp.float32)
    args = x, jnp.eye(D) / 100  # with so little noise that any friction covers it
    state = kernel.init(random.key(0), 1, {"theta": jnp.zeros(D)}, args, {})
    dynamics = {name: jax.tree.map(jnp.float32, x) for name, x in dynamics.items()}
    known = {name: x for name, x in dynamics.items() if name in state.dynamics._fields}
    return state._replace(
        i=jnp.asarray(7), z=jnp.zeros(D), dynamics=state.dynamics._replace(**known)
    )


def stepped(kernel, state, monkeypatch, noise=None, precision=PRECISION):
    """
    The step as a function of one vector: position, momentum, noise of the gradient, and four
    standard normals; with all that it leaves.
    """
    momentum = "momentum" in state.dynamics._fields

    def function(vector):
        theta, p, zeta, *normals = jnp.reshape(vector, (7, D))
        taken = iter(normals)

        def normal(key, shape=(), dtype=None):
            count = math.prod(shape) // D
            return jnp.stack([next(taken) for _ in range(count)]).reshape(shape)

        def gradient(position):
            slope = jnp.asarray(precision, jnp.float32) @ position + zeta
            return Evaluation(position @ slope, slope, noise)

        here = state._replace(z=theta)
        if momentum:
            here = here._replace(dynamics=here.dynamics._replace(momentum=p))
        with monkeypatch.context() as patch:
            patch.setattr(random, "normal", normal)
            new, evaluation = kernel.method.step(here, gradient, random.key(1))
        return new, evaluation

    return function


def jacobian(function):
    """Of an affine map, exactly: its values at the unit vectors less that at zero."""

    def moved(vector):
        new, _ = function(vector)
        return jnp.concatenate([new.z, getattr(new.dynamics, "momentum", jnp.zeros(0))])

    images = jax.vmap(moved)(jnp.concatenate([jnp.zeros((1, 7 * D)), jnp.eye(7 * D)]))
    matrix = np.asarray(images[1:] - images[0], float).T
    # it is affine, also away from the unit vectors
    point = random.normal(random.key(2), (7 * D,))
    np.testing.assert_allclose(moved(point), images[0] + matrix @ np.asarray(point), **SAME)
    size = len(matrix)
    normals = matrix[:, 3 * D :]
    state = matrix[:, : 2 * D] if size == 2 * D else matrix[:, :D]
    return exact_laws.Affine(state, matrix[:, 2 * D : 3 * D], normals @ normals.T)
