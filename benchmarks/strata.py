# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The noise of the gradient with rows drawn alike and in strata.

Two posteriors that know some parameters from a few rows only: 20,000 rows in 40 groups, of which
some have four and one outcome, in minibatches of 500; and a logistic regression on a million
rows with 0.5 % positives and ten features that one row of a thousand has, in minibatches of 1,000.
Strata are those of the tuning.

Run with ``python benchmarks/strata.py``; writes a Markdown table of the variance of the noise in
the coordinates of the posterior, with the control variate: its mean and its largest entry.
"""

import warnings

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc import CCAdL
from numpyro_sgmcmc.data.strata import by_importance
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.potential import of_all_rows, ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian
from numpyro_sgmcmc.tuning.rare_rows import find_importance

DRAWS = 16


def groups(x, group, y, batch_size=500):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("group", 40):
        a = numpyro.sample("a", dist.Normal(mu, tau))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=a[group[i]] + x[i] @ w), obs=y[i])


def rare_features(x, y, batch_size=1_000):
    w = numpyro.sample("w", dist.Normal(0, 2.5).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def outcomes(rng, logits):
    return jnp.asarray(rng.random(len(logits)) < 1 / (1 + np.exp(-logits)), jnp.int32)


def grouped_data():
    """Sizes from 4 to 4,000; the smallest groups have one outcome."""
    rng = np.random.default_rng(0)
    sizes = np.exp(np.linspace(np.log(4), np.log(4_000), 40))
    sizes = np.maximum(4, sizes * 20_000 / sizes.sum()).astype(int)
    sizes[-1] += 20_000 - sizes.sum()
    group = rng.permutation(np.repeat(np.arange(40), sizes))
    x = rng.standard_normal((20_000, 4))
    logits = np.where(np.arange(40) < 8, 4.0, rng.standard_normal(40))[group] + x @ [0.6, 0.1, 0, 0]
    return jnp.asarray(x, jnp.float32), jnp.asarray(group), outcomes(rng, logits)


def rare_data():
    rng = np.random.default_rng(0)
    rare = rng.random((1_000_000, 10)) < 1e-3
    x = np.column_stack([np.ones(1_000_000), rng.standard_normal((1_000_000, 4)), rare])
    w = np.concatenate([[-5.9], 0.4 * rng.standard_normal(4), np.linspace(-1, 2.5, 10)])
    return jnp.asarray(x, jnp.float32), outcomes(rng, x @ w)


def squares_of(target, tuning):
    """The mean over draws of the squared gradient of each row, by coordinate, shape (N, d)."""
    metric, anchor, plate = tuning.metric, tuning.anchor, target.model.plates[0]

    def run(target, draws, metric, anchor):
        normal = random.normal(random.key(1), (DRAWS, *draws.center.shape))
        potential = target.potential(metric)

        def of_row(values, row):
            def term(values):
                rows = {plate.name: row[None]}
                return potential.with_row_terms(values, rows, random.key(0))[1][plate.name][0]

            return metric.pullback(ravel(jax.grad(term)(values))) / plate.size

        def of_rows(rows):
            known = jax.vmap(of_row, (None, 0))(anchor.values, rows)

            def added(total, z):
                here = jax.vmap(of_row, (None, 0))(target.unravel(draws.values(z)), rows)
                return total + (here - known) ** 2 / DRAWS, None

            return lax.scan(added, jnp.zeros_like(known), normal)[0]

        return of_all_rows(of_rows, plate)

    return np.asarray(target.compiled(run)(tuning.start, metric, anchor), np.float64)


def measured(name, model, args, n):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = CCAdL(model, gradient="control_variate", progress_bar=False)
        tuning = kernel.tune(random.key(0), *args)
    target = Target(read_model(model, init_to_uniform, args, {}), args, {})
    squares = squares_of(target, tuning)
    size = len(squares)
    found = find_importance(target, random.key(2), Gaussian(tuning.start, 0.0), order=1)
    ways = {
        "alike": size / n - 1,
        "strata": by_importance(found.sizes["rows"], n).row_weights - 1,
    }
    for way, weights in ways.items():
        variances = (squares * np.broadcast_to(weights, size)[:, None]).sum(axis=0)
        print(f"| {name} | {way} | {variances.mean():.3g} | {variances.max():.3g} |")


def main():
    print("| posterior | rows drawn | mean variance | largest |\n| --- | --- | ---: | ---: |")
    measured("40 groups, 20,000 rows", groups, grouped_data(), 500)
    measured("rare features, 1,000,000 rows", rare_features, rare_data(), 1_000)


if __name__ == "__main__":
    main()
