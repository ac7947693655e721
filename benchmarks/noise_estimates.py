# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The cost of an estimate of the noise covariance, as a ratio to one gradient.

Minibatches of 500: logistic regression with 100 parameters, and a network of 784-100-10 units
with 79,510. Each estimate is represented as a diagonal, as low rank (20), and, for 100 parameters,
as the full matrix; ``product`` is the gradient with a single product of the covariance and a
vector. Medians of interleaved runs in one process.

Run with ``python benchmarks/noise_estimates.py``; writes a Markdown table.
"""

import argparse
import time

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.initialization import init_to_uniform

from numpyro_sgmcmc.gradients.covariance import Diagonal, Full, LowRank
from numpyro_sgmcmc.gradients.estimators import ESTIMATORS, minibatch_gradient, product_gradient
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.target import Target

N, BATCH = 12_214, 500


def logistic(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def network(x, y):
    def layer(name, *shape):
        return numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))

    first, bias, second, last = (
        layer("first", 784, 100), layer("bias", 100), layer("second", 100, 10), layer("last", 10)
    )  # fmt: skip
    with numpyro.plate("rows", len(x), subsample_size=BATCH) as i:
        hidden = jax.nn.sigmoid(x[i] @ first + bias)
        numpyro.sample("y", dist.Categorical(logits=hidden @ second + last), obs=y[i])


def runs(model, x, y, steps):
    """Functions that take ``steps`` gradients with each estimate of the covariance."""
    target = Target(read_model(model, init_to_uniform, (x, y), {}), (x, y), {})
    d = target.model.dimension
    position, factors = 0.1 * random.normal(random.key(0), (d,)), {"rows": 1 - BATCH / N}
    representations = {"diagonal": Diagonal(), "low rank": LowRank(20)} | (
        {"full": Full(d)} if d <= 100 else {}
    )

    def repeated(oracle, zeros):
        def run(position, x, y):
            potential = target._replace(args=(x, y)).potential(IdentityMetric())

            def body(k, carry):
                position, total = carry
                evaluation = oracle(potential, target.rows(random.key(1), k), k)(position)
                total = jax.tree.map(jnp.add, total, evaluation.noise)
                return position - 1e-9 * evaluation.gradient, total

            return lax.fori_loop(0, steps, body, (position, zeros))

        return jax.jit(run)

    key = random.key(2)
    found = {"gradient": repeated(lambda p, rows, k: minibatch_gradient(p, rows, key), None)}

    def with_product(potential, rows, k):
        others = target.rows(random.key(3), k)
        oracle = product_gradient(potential, rows, key, factors, others)

        def evaluated(position):
            evaluation = oracle(position)
            return evaluation._replace(noise=evaluation.noise(evaluation.gradient))

        return evaluated

    found["product"] = repeated(with_product, jnp.zeros(d))
    for name, estimator in ESTIMATORS.items():
        for how, representation in representations.items():
            if name == "per_example" and how == "low rank":
                continue

            def averaged(potential, rows, k, estimator=estimator, representation=representation):
                keys = random.fold_in(key, k)
                return estimator(potential, rows, keys, factors, representation)

            zeros = representation.zeros(d, jnp.float32)
            if how == "low rank":
                found[f"{name}, {how}"] = low_rank(repeated, averaged, representation, zeros)
            else:
                found[f"{name}, {how}"] = repeated(averaged, zeros)
    return {name: (lambda run=run: jax.block_until_ready(run(position, x, y)))
            for name, run in found.items()}  # fmt: skip


def low_rank(repeated, averaged, representation, zeros):
    """With the cut to the leading directions that an average needs at every step."""

    def oracle(potential, rows, k):
        inner = averaged(potential, rows, k)

        def evaluated(position):
            evaluation = inner(position)
            return evaluation._replace(noise=representation.add(0.5, zeros, 0.5, evaluation.noise))

        return evaluated

    return repeated(oracle, zeros)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    cases = {
        "logistic, d = 100": (
            logistic,
            rng.standard_normal((N, 100)),
            rng.integers(0, 2, N),
            1_000,
        ),
        "network 784-100-10": (network, rng.random((N, 784)), rng.integers(0, 10, N), 20),
    }
    for name, (model, x, y, steps) in cases.items():
        x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.int32)
        todo = runs(model, x, y, steps)
        for run in todo.values():
            run()
        times = {key: [] for key in todo}
        for _ in range(args.repeats):
            for key, run in todo.items():
                begin = time.perf_counter()
                run()
                times[key].append((time.perf_counter() - begin) / steps * 1e6)
        base = np.median(times["gradient"])
        print(f"\n| {name} | us | ratio to one gradient |\n| --- | ---: | ---: |")
        for key, found in times.items():
            print(f"| {key} | {np.median(found):,.1f} | {np.median(found) / base:.2f} |")


if __name__ == "__main__":
    main()
