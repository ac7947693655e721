# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Data outside of the support of their distribution."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from .cases import (
    CLASSES,
    COUNTS,
    LABELS,
    POSITIVE,
    SUCCESSES,
    TRIALS,
    N,
    X,
    Y,
    case,
    coefficients,
    exact,
    logistic,
    regression,
    rows,
)  # fmt: skip

SUPPORTS = "support"


def likelihood(of):
    """A regression whose observations have the distribution ``of`` a linear predictor."""

    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", of(x[i] @ w), obs=y[i])

    return model


def with_one(values, value, at=N - 1):
    values = np.array(values)
    values[at] = value
    return values


#: Title, distribution, observations.
WRONG = {
    "labels from 1, Bernoulli": (lambda m: dist.Bernoulli(logits=m), LABELS + 1),
    "labels -1 and 1, Bernoulli": (lambda m: dist.Bernoulli(logits=m), 2 * LABELS - 1),
    "probabilities, Bernoulli": (
        lambda m: dist.Bernoulli(logits=m), (0.5 + 0.4 * np.sin(Y)).astype(np.float32),
    ),
    "NaN as a label, Bernoulli": (
        lambda m: dist.Bernoulli(logits=m), with_one(LABELS.astype(np.float32), np.nan),
    ),
    "labels from 1, Categorical": (
        lambda m: dist.Categorical(logits=jnp.stack([m, 0 * m, -m], -1)), CLASSES + 1,
    ),
    "label -1 in the last row, Categorical": (
        lambda m: dist.Categorical(logits=jnp.stack([m, 0 * m, -m], -1)), with_one(CLASSES, -1),
    ),
    "one count above the total, Binomial": (
        lambda m: dist.Binomial(10, logits=m), with_one(SUCCESSES, 11),
    ),
    "fractions, Binomial": (lambda m: dist.Binomial(10, logits=m), SUCCESSES / 10),
    "a negative count, Poisson": (lambda m: dist.Poisson(jnp.exp(m)), with_one(COUNTS, -1)),
    "rates, Poisson": (lambda m: dist.Poisson(jnp.exp(m)), COUNTS / 3),
    "a zero, Gamma": (lambda m: dist.Gamma(2, jnp.exp(m)), with_one(POSITIVE, 0)),
    "a zero, LogNormal": (lambda m: dist.LogNormal(m, 1), with_one(POSITIVE, 0)),
    "a negative number, Exponential": (
        lambda m: dist.Exponential(jnp.exp(m)), with_one(POSITIVE, -1.0),
    ),
    "zero and one, Beta": (
        lambda m: dist.Beta(1 + jnp.exp(m), 2), with_one(np.clip(POSITIVE / 9, 0.01, 0.9), 1.0),
    ),
    "beyond a bound, TruncatedNormal": (
        lambda m: dist.TruncatedNormal(m, 1, low=0), with_one(np.abs(Y), -1.0),
    ),
    "outside of a Uniform whose bounds are latent": (
        lambda m: dist.Uniform(-4, 4 + jnp.exp(m)), with_one(np.clip(Y, -3, 3), -5.0),
    ),
    "an order that is not sorted, OrderedLogistic label 3 of 3": (
        lambda m: dist.OrderedLogistic(m, jnp.array([-1.0, 1.0])), CLASSES + 1,
    ),
    "a zero, NegativeBinomial with fractions": (
        lambda m: dist.NegativeBinomial2(jnp.exp(m), 2), COUNTS + 0.5,
    ),
    "rows that do not sum to one, Dirichlet": (
        lambda m: dist.Dirichlet(1 + jnp.exp(jnp.stack([m, -m], -1))),
        np.abs(X[:, :2]) + 0.1,
    ),
}  # fmt: skip


def listed(title, of, y, kernels):
    @case(SUPPORTS, title, kernels)
    def outside(run):
        """A draw from such a model is wrong, whatever it is."""
        run(likelihood(of), X, y)
        return "WRONG, SILENT: sampled"


for k, (title, (of, y)) in enumerate(WRONG.items()):
    listed(title, of, y, "given tuned" if k % 5 == 0 else "given")


@case(SUPPORTS, "one bad row among 100,000", "given tuned")
def one_in_many(run):
    x = np.random.default_rng(1).standard_normal((100_000, 3)).astype(np.float32)
    y = with_one((x[:, 0] > 0).astype(np.int32), 2, at=77_777)
    run(logistic, x, y, **({"samples": 100, "step_size": 1e-7} if run.__name__ == "given" else {}))
    return "WRONG, SILENT: sampled"


@case(SUPPORTS, "NaN in a row that is masked", "given tuned")
def nan_masked(run):
    y, seen = with_one(Y, np.nan, at=7), np.arange(N) != 7

    def model(x, y, seen):
        w = coefficients(3)
        with rows(N) as i, numpyro.handlers.mask(mask=seen[i]):
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, y, seen), exact(X[seen], Y[seen])


@case(SUPPORTS, "labels -1 for missing, masked", "given tuned")
def missing_masked(run):
    seen = np.arange(N) % 4 > 0

    def model(x, y, seen):
        w = coefficients(3)
        with rows(N) as i, numpyro.handlers.mask(mask=seen[i]):
            numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])

    from .cases import full, nuts

    y = np.where(seen, LABELS, -1)
    return run(model, X, y, seen), nuts(full(logistic), X[seen], LABELS[seen])


@case(SUPPORTS, "`nan_to_num` in the model", "given")
def nan_to_num(run):
    x = with_one(X, np.nan, at=(7, 1))

    def model(x, y):
        regression(jnp.nan_to_num(x), y)

    return run(model, x, Y), exact(np.nan_to_num(x), Y)


@case(SUPPORTS, "`validate_args=True` and labels from 1", "given")
def validated(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w, validate_args=True), obs=y[i])

    run(model, X, LABELS + 1)
    return "WRONG, SILENT: sampled"


@case(SUPPORTS, "more successes than trials of the row, Binomial", "given")
def trials(run):
    def model(x, y, n):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Binomial(n[i], logits=x[i] @ w), obs=y[i])

    run(model, X, SUCCESSES, with_one(TRIALS, 0, at=int(np.argmax(SUCCESSES))))
    return "WRONG, SILENT: sampled"
