# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Three models of very different size, each as a NumPyro model and as somebody would write its
minibatch potential for a loop of their own: two parameters, where whatever a step does besides
its gradient shows; logistic regression; a network.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist


class Workload(NamedTuple):
    #: in words
    name: str
    #: NumPyro model of the data and ``batch_size``
    model: Callable
    #: minibatch potential of unconstrained values, rows and the data
    potential: Callable[..., Array]
    data: tuple[Array, ...]
    batch_size: int
    #: step size of the methods with momentum, far from where anything diverges
    step_size: float
    #: steps that take about 0.1 seconds
    steps: int


def normal(y: Array, batch_size: int) -> None:
    mean = numpyro.sample("mean", dist.Normal(0, 10))
    log_scale = numpyro.sample("log_scale", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mean, jnp.exp(log_scale)), obs=y[i])


def normal_potential(z: dict[str, Array], rows: Array, y: Array) -> Array:
    away = (y[rows] - z["mean"]) / jnp.exp(z["log_scale"])
    prior = (z["mean"] / 10) ** 2 / 2 + z["log_scale"] ** 2 / 2
    return prior + len(y) / len(rows) * jnp.sum(away**2 / 2 + z["log_scale"])


def logistic(x: Array, y: Array, batch_size: int, scale: float = 1.0) -> None:
    w = numpyro.sample("w", dist.Normal(0, scale).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i].astype(w.dtype) @ w), obs=y[i])


def logistic_potential(z: dict[str, Array], rows: Array, x: Array, y: Array) -> Array:
    logits = x[rows] @ z["w"]
    likelihood = jnp.sum(y[rows] * logits - jax.nn.softplus(logits))
    return z["w"] @ z["w"] / 2 - len(y) / len(rows) * likelihood


def network(x: Array, y: Array, batch_size: int, hidden: int = 100) -> None:
    def weights(name: str, *shape: int) -> Array:
        return numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))

    w1, b1 = weights("w1", x.shape[1], hidden), weights("b1", hidden)
    w2, b2 = weights("w2", hidden, 10), weights("b2", 10)
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        logits = jnp.tanh(x[i] @ w1 + b1) @ w2 + b2
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y[i])


def network_potential(z: dict[str, Array], rows: Array, x: Array, y: Array) -> Array:
    logits = jnp.tanh(x[rows] @ z["w1"] + z["b1"]) @ z["w2"] + z["b2"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[rows][:, None], axis=1)
    prior = sum(jnp.sum(value**2) for value in z.values()) / 2
    return prior - len(y) / len(rows) * jnp.sum(chosen)


def logistic_data(size: int, parameters: int, dtype: Any = np.float32) -> tuple[Array, Array]:
    """Covariates of integers from -3 to 3 times a unit, so that eight bits hold them."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (size, parameters), np.int8)
    y = (x[:, 0] + rng.integers(-3, 4, size, np.int8) > 0).astype(dtype)
    return jnp.asarray(x.astype(dtype, copy=False)), jnp.asarray(y)


def workloads() -> list[Workload]:
    rng = np.random.default_rng(0)
    two = (jnp.asarray(rng.standard_normal(100, np.float32)),)
    pixels = jnp.asarray(rng.random((50_000, 784), np.float32))
    images = (pixels, jnp.asarray(rng.integers(0, 10, 50_000)))
    return [
        Workload("normal, N = 100, d = 2, n = 10", normal, normal_potential, two, 10, 1e-3, 20_000),
        Workload(
            "logistic, N = 12,214, d = 100, n = 500",
            logistic, logistic_potential, logistic_data(12_214, 100), 500, 1e-3, 4_000,
        ),
        Workload(
            "network 784-100-10, N = 50,000, n = 500",
            network, network_potential, images, 500, 1e-4, 60,
        ),
    ]  # fmt: skip
