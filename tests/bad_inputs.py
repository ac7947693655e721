# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Models and arguments that are refused, and how.

    python tests/bad_inputs.py

writes what is said of each into ``docs/errors.md``; the tests see that it is still said.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
import re
import time
import warnings

import jax
from jax import random
from jax.experimental.sparse import BCOO
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pandas as pd
import pyarrow as pa

from numpyro_sgmcmc import (
    SGFS,
    SGHMC,
    SGLD,
    SMSUBU,
    CCAdL,
    NoiseEstimate,
    RowsOnDisk,
    UnreadableRows,
)

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"

N = 40
X = np.random.default_rng(0).standard_normal((N, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def run(kernel, *args, init_params=None, **kwargs):
    mcmc = MCMC(kernel, num_warmup=1, num_samples=2, progress_bar=False)
    mcmc.run(random.key(0), *args, init_params=init_params, **kwargs)
    return mcmc


def regression(x, y, batch_size=10):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])


def subsampled_regression(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10):
        mean = numpyro.subsample(x, event_dim=1) @ w
        numpyro.sample("y", dist.Normal(mean, 1), obs=numpyro.subsample(y, event_dim=0))


def forgotten_observation(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(w * x[i, 0], 1))


def counts_without_observations(x, y, counts=None):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        obs = None if counts is None else counts[i]
        numpyro.sample("y", dist.Poisson(jnp.exp(w * x[i, 0])), obs=obs)


def labels_in_a_column(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Bernoulli(logits=w * x[i, 0]), obs=y[i])


def partial_likelihood(x, time):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        risk = jnp.where(x[i, 1] >= x[i, 1][:, None], w * x[i, 0], -jnp.inf)
        numpyro.factor("risk", w * x[i, 0] - jax.nn.logsumexp(risk, axis=1))


def scaled_by_its_length(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.factor("terms", N / len(i) * dist.Normal(w * x[i, 0], 1).log_prob(y[i]))


def effect_seen_outside(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=10):
        z = numpyro.sample("z", dist.Normal(w, 1))
    numpyro.sample("y", dist.Normal(z.mean(), 1), obs=y[0])


def crossed_effects(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    rows = numpyro.plate("rows", N, subsample_size=10, dim=-1)
    columns = numpyro.plate("columns", 3, subsample_size=2, dim=-2)
    with rows:
        a = numpyro.sample("a", dist.Normal(w, 1))
    with columns:
        b = numpyro.sample("b", dist.Normal(0, 1))
    with rows as i, columns as j:
        numpyro.sample("x", dist.Normal(a + b, 1), obs=x[i][:, j].T)


def masked_observation(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i], obs_mask=x[i, 0] > 0)


def discrete_latent(x, y):
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(k, 1), obs=y[i])


def delta_latent(x, y):
    mu = numpyro.sample("mu", dist.Delta(1.0))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def outside_the_plate(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        batch = y[i]
    numpyro.sample("y", dist.Normal(mu, 1).expand([10]).to_event(1), obs=batch)


def observations_not_indexed(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y)


def predictors_not_indexed(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y[i])


def one_row_not_indexed(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=1) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y)


def given_minibatches(x, y):
    """As for SVI: a plate of N rows around data of a minibatch."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", 1000, subsample_size=x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def half_given(x, y):
    """Predictors indexed by the plate, observations passed in as a minibatch."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y)


def plate_in_scan(x, y):
    phi = numpyro.sample("phi", dist.Normal(0, 1))

    def step(previous, t):
        with numpyro.plate("rows", N, subsample_size=10) as i:
            numpyro.sample("x", dist.Normal(phi, 1), obs=x[i, t])
        return previous, None

    scan(step, 0.0, jnp.arange(3))


def no_latent(x, y):
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(0, 1), obs=y[i])


def no_subsampling(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])


def wrong_support(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Gamma(2, jnp.exp(mu)), obs=y[i])


def closes_over_numpy(y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=y[i])


def logistic(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def rows_as_event(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1).to_event(1), obs=y[i])


def factor_of_a_sum(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.factor("likelihood", dist.Normal(x[i] @ w, 1).log_prob(y[i]).sum())


def batch_normalisation(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        batch = (x[i] - x[i].mean(0)) / x[i].std(0)
        numpyro.sample("y", dist.Normal(batch @ w, 1), obs=y[i])


def dropout_by_place(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        kept = random.bernoulli(random.key(0), 0.8, (len(i), 3))
        numpyro.sample("y", dist.Normal((x[i] * kept) @ w, 1), obs=y[i])


def scaled_by_hand(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i, numpyro.handlers.scale(scale=N / 10):
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])


def computed_index(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(x[i * 1] @ w, 1), obs=y[i])


def groups(x, y):
    z = numpyro.sample("z", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("x", dist.Normal(z[y[i]], 1), obs=x[i, 0])


def count_of_each_row(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        k = numpyro.sample("k", dist.Poisson(jnp.exp(mu[0])))
        numpyro.sample("x", dist.Normal(mu[1] * k, 1), obs=x[i, 0])


def classes_of_the_data(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3, len(np.unique(y))]).to_event(2))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Categorical(logits=x[i] @ w), obs=y[i])


def two_plates_in_one_dimension(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("columns", 3, dim=-1), numpyro.plate("rows", N, 10, dim=-1) as i:
        numpyro.sample("x", dist.Normal(mu, 1), obs=x[i])


def no_coefficients(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([0]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(x[i, :0] @ w, 1), obs=y[i])


def logarithm(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(w * jnp.log(y[i]), 1), obs=x[i, 0])


def random_numbers_of_numpy(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        noise = np.random.default_rng().standard_normal(10)
        numpyro.sample("y", dist.Normal(x[i] @ w + noise, 1), obs=y[i])


def wide(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([1001]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(x[i, 0] * w.sum(), 1), obs=y[i])


def sgld(model, **options):
    return SGLD(model, **({"step_size": 1e-3} | options))


def ccadl(model, **options):
    return CCAdL(model, **({"step_size": 1e-2, "friction": 1.0} | options))


RARE = (np.arange(N) == 33).astype(np.int32)[:, None]
WITH_NAN = X.copy()
WITH_NAN[7, 2] = np.nan


BAD_MODELS = {
    "an observed site without `obs`": (
        forgotten_observation,
        (X, Y),
        "'y' in the subsampled plate 'rows' has no observations: its `obs` is None",
    ),
    "counts without `obs`": (
        counts_without_observations,
        (X, Y),
        "'y' in the subsampled plate 'rows' has no observations: its `obs` is None",
    ),
    "observations of shape (N, 1), most of them equal": (
        labels_in_a_column,
        (X, RARE),
        r"the batch shape \(10, 10\) .*`y\[i, 0\]`",
    ),
    "the partial likelihood of a Cox regression": (
        partial_likelihood,
        (X, Y),
        "'risk' .*depends on the other rows .*needs the risk set among all rows",
    ),
    "a minibatch that is scaled by hand": (
        scaled_by_its_length,
        (X, Y),
        r"'terms' .*number of rows in the minibatch.*Leave out factors such as `N / len\(i\)`",
    ),
    "text as an array of objects": (
        regression,
        (np.array(["north", "south"] * 20, dtype=object), Y),
        r"'x' is an array of dtype object: .*np.unique\(x, return_inverse=True\)\[1\]",
    ),
    "effects of rows outside of their plate": (
        effect_seen_outside,
        (X, Y),
        "'y' depends on the latent site 'z' of the subsampled plate 'rows'",
    ),
    "two kinds of effects, both in subsampled plates": (
        crossed_effects,
        (X, Y),
        "one plate has latent sites, whose integral needs all rows of a group",
    ),
    "`obs_mask`": (masked_observation, (X, Y), "'y' has an `obs_mask`.*handlers.mask"),
    "a discrete latent site": (discrete_latent, (X, Y), "'k' is discrete.*MixtureSameFamily"),
    "a latent site with a Delta distribution": (
        delta_latent,
        (X, Y),
        "'mu' has a Delta.*numpyro.deterministic",
    ),
    "an observed site outside of its plate": (
        outside_the_plate,
        (X, Y),
        "'y' depends on the minibatch of plate 'rows'.*outside",
    ),
    "observations that are not indexed": (
        observations_not_indexed,
        (X, Y),
        "'y' are not indexed by the plate: .* 40",
    ),
    "predictors that are not indexed": (
        predictors_not_indexed,
        (X, Y),
        r"minibatch .*line \d+ of bad_inputs.py\): .*Index it by the plate",
    ),
    "observations that are not indexed, by minibatches of one row": (
        one_row_not_indexed,
        (X, Y),
        "'y' are not indexed by the plate: .* 40 rows",
    ),
    "minibatches as arguments, as for SVI": (
        given_minibatches,
        (X[:10], Y[:10]),
        "does not use its indices.*as for SVI",
    ),
    "observations of a minibatch, predictors of all rows": (
        half_given,
        (X, Y[:10]),
        "observations of site 'y' .*without the plate's",
    ),
    "a subsampled plate inside `scan`": (
        plate_in_scan,
        (X, Y),
        "plate 'rows', which is subsampled inside `scan`",
    ),
    "no latent sites": (no_latent, (X, Y), "no latent sites"),
    "a minibatch of no rows": (
        partial(regression, batch_size=0),
        (X, Y),
        "subsample_size=0.*from 1 to its size 40",
    ),
    "a negative minibatch size": (partial(regression, batch_size=-3), (X, Y), "subsample_size=-3"),
    "a minibatch of more rows than there are": (
        partial(regression, batch_size=41),
        (X, Y),
        "subsample_size=41.*size 40",
    ),
    "a minibatch size that is not a whole number": (
        partial(regression, batch_size=2.5),
        (X, Y),
        "both must be Python integers",
    ),
    "predictors shorter than the plate": (
        regression,
        (X[:30], Y),
        r"argument 'x' of shape \(30, 3\), which has 30 rows",
    ),
    "observations longer than the plate": (
        regression,
        (X, np.append(Y, Y)),
        r"argument 'y' of shape \(80,\)",
    ),
    "`subsample` of data shorter than the plate": (
        subsampled_regression,
        (X, Y[:30]),
        r"numpyro.plate\(rows, 40.*\(30,\)",
    ),
    "data with NaN": (
        regression,
        (WITH_NAN, Y),
        r"Argument 'x'.*1 entries.*first at index \(7, 2\)",
    ),
    "infinite data": (regression, (X, np.full(N, np.inf)), "Argument 'y'"),
    "observations outside of the support": (
        wrong_support,
        (X, Y),
        r"'y' \(Gamma\) are outside .* in 2\d of 40 rows of plate 'rows'.* no density at 0",
    ),
    "labels that count from 1": (logistic, (X, Y + 1), r"\(Bernoulli\) .* of 40 rows .*subtract 1"),
    "-1 for a missing label": (
        logistic,
        (X, np.where(np.arange(N) == 17, -1, Y)),
        "in 1 of 40 rows of plate 'rows', the first in row 17: -1. -1 often stands for a missing",
    ),
    "observations in a column": (
        regression,
        (X, Y[:, None]),
        r"batch shape \(10, 10\) .* `y\[i, 0\]`",
    ),
    "rows that are declared an event": (rows_as_event, (X, Y), r"Leave out `.to_event\(...\)`"),
    "a factor of the sum of the rows": (
        factor_of_a_sum,
        (X, Y),
        "the vector of the terms of the rows",
    ),
    "dropout by place": (dropout_by_place, (X, Y), "leave dropout out"),
    "batch normalisation": (
        batch_normalisation,
        (X, Y),
        "depends on the other rows of .* batch normalisation",
    ),
    "a scale besides that of the plate": (scaled_by_hand, (X, Y), "scaled by 40/10 twice"),
    "a computed index on data shorter than the plate": (
        computed_index,
        (X[:30], Y),
        r"argument 'x' of shape \(30, 3\) with 30 in row 30, and beyond its ends in 10 rows",
    ),
    "groups that count from 1": (groups, (X, 1 + np.arange(N) % 4), "with 4 in row 3, .* 10 rows"),
    "a count of each row that is not observed": (
        count_of_each_row,
        (X, Y),
        "'k' in plate 'rows' is discrete .*infinitely many values",
    ),
    "NumPy's functions of an argument": (
        classes_of_the_data,
        (X, Y),
        r"NumPy gets a traced value .*np.unique\(y\).*line \d+ of bad_inputs.py.*`functools",
    ),
    "two plates in one dimension": (
        two_plates_in_one_dimension,
        (X, Y),
        r"line \d+ of bad_inputs.py\). The usual cause is two nested plates",
    ),
    "a latent site without entries": (no_coefficients, (X, Y), "'w' has nothing to sample"),
    "a row without a finite density": (
        logarithm,
        (X, np.where(np.arange(N) == 17, 0.0, 1.0)),
        "'y' .Normal. is not finite in 1 of 40 rows .* the first is row 17",
    ),
    "random numbers of NumPy": (
        random_numbers_of_numpy,
        (X, Y),
        "The model changes between evaluations.*numpyro.prng_key",
    ),
    "a hidden latent site": (
        numpyro.handlers.block(regression, hide=["w"]),
        (X, Y),
        "Latent site 'w' is hidden by `numpyro.handlers.block`",
    ),
    "a list": (regression, (X, Y.tolist()), "Argument 'y' is a list of 40 values.*jnp.asarray"),
    "a pandas object": (regression, (X, pd.Series(Y)), "'y' is a pandas Series.*to_numpy"),
    "text": (regression, (X, Y.astype(str)), "'y' is an array of dtype <U11: pass codes"),
    "integers beyond 32 bits": (
        regression,
        (X, Y.astype(np.int64) + 2**31),
        "Argument 'y' .* 2,147,483,648 .*numpyro.enable_x64",
    ),
    "masked arrays": (
        regression,
        (X, np.ma.masked_less(Y, 1)),
        r"'y' .* masked entries.*handlers.mask",
    ),
    "data that are not an argument": (
        closes_over_numpy,
        (Y,),
        r"NumPy gets a traced value .*`jnp.asarray\(x\)`, or pass it as an argument",
    ),
}


def chain_of(kernel, *args, init_params=None):
    return partial(run, kernel, *args, init_params=init_params)


#: Kernels and starts: how they come to be, and what is said.
BAD_ARGUMENTS = {
    "no model": (partial(SGLD, None, 0.1), "SGLD needs a model"),
    "a step size that is not positive": (
        partial(sgld, regression, step_size=-1.0),
        "`step_size` must be a positive finite number; got -1.0",
    ),
    "a step size schedule that is not positive": (
        chain_of(sgld(regression, step_size=lambda i: 0.0), X, Y),
        "step size schedule gives .* at step 0",
    ),
    "a step size schedule that ends": (
        chain_of(sgld(regression, step_size=lambda i: 1e-3 * (1 - i)), X, Y),
        "schedule gives 0 at step 1 of 2",
    ),
    "a step size that asks a traced number": (
        chain_of(sgld(regression, step_size=lambda i: 1e-3 if i < 9 else 1e-4), X, Y),
        "`step_size` must be a function that JAX can trace.*jnp.where",
    ),
    "initial values of another kind": (
        partial(sgld, regression, init_strategy={"w": jnp.zeros(3)}),
        "`init_strategy` must be one of NumPyro's functions.*init_to_value",
    ),
    "an unknown word": (
        partial(ccadl, regression, noise="complete"),
        "`noise` must be one of 'diagonal', 'full', 'low_rank', 'matrix_free'",
    ),
    "options that do not go together": (
        partial(ccadl, regression, integrator="symmetric", noise="matrix_free"),
        "integrator='nogin'",
    ),
    "a noise estimate that nothing asks for": (
        partial(SGHMC, regression, 0.1, 1.0, noise="full"),
        "`noise` would be ignored, because these arguments estimate no noise",
    ),
    "a rank of a matrix that has none": (
        partial(NoiseEstimate, covariance="full", rank=3),
        "`rank=3` is the number of directions for covariance='low_rank'",
    ),
    "shuffled passes with a method that corrects for the noise": (
        chain_of(ccadl(regression, subsampling="epochs"), X, Y),
        "anti-correlated.*without_replacement",
    ),
    "noise beyond the friction": (
        chain_of(SGHMC(regression, 0.1, 1.0, noise_variance=300.0), X, Y),
        "friction of at least 19.46",
    ),
    "noise that does not fit the sites": (
        chain_of(SGHMC(regression, 0.01, 10.0, noise_variance={"v": 1.0}), X, Y),
        r"entry for each latent site \['w'\]; got \['v'\]",
    ),
    "a noise estimate from single rows": (
        chain_of(ccadl(partial(regression, batch_size=1)), X, Y),
        "subsample_size` of at least 2",
    ),
    "a full covariance of many parameters": (
        chain_of(ccadl(wide, noise="full"), X, Y),
        "at most 1,000 parameters, but the model has 1,001",
    ),
    "a partition that does not come out even": (
        chain_of(SMSUBU(partial(regression, batch_size=11), 0.01, 1.0), X, Y),
        "divides the 40 rows .* 11 does not",
    ),
    "initial values that are whole numbers": (
        chain_of(sgld(regression), X, Y, init_params={"w": jnp.zeros(3, int)}),
        "has dtype int32.*1.0 instead of 1",
    ),
    "initial values of another shape": (
        chain_of(sgld(regression), X, Y, init_params={"w": jnp.zeros(4)}),
        r"has shape \(4,\).*has shape \(3,\)",
    ),
    "initial values where the density is zero": (
        chain_of(sgld(regression), X, Y, init_params={"w": jnp.full(3, 1e30)}),
        "potential at `init_params` is inf",
    ),
    "a file that is not of rows": (partial(RowsOnDisk, "rows.csv"), "is not a .npy, .parquet or"),
    "a file that is not there": (
        partial(RowsOnDisk, "rows.npy"),
        r"'rows.npy' cannot be opened \(No such file.*Give the path",
    ),
    "a table that is not there": (
        partial(RowsOnDisk, "rows.parquet", ["x1", "x2"]),
        "'rows.parquet' cannot be opened: no file has this path",
    ),
    "a column that is not there": (
        partial(RowsOnDisk, pa.table({"x1": X[:, 0], "x2": X[:, 1]}), ["x1", "x3"]),
        "has no column 'x3'. It has 'x1', 'x2'",
    ),
    "a column of text": (
        partial(RowsOnDisk, pa.table({"carrier": ["AA", "DL"]}), "carrier"),
        "Column 'carrier' .* has type string, and rows are numbers. Store codes",
    ),
    "a column of dates": (
        partial(RowsOnDisk, pa.table({"day": np.array([0, 1], "M8[s]")}), "day"),
        "Column 'day' .* has type timestamp.* Store a number of days",
    ),
    "a column with missing values": (
        partial(RowsOnDisk, pa.table({"delay": [1.0, None]}), "delay"),
        "Column 'delay' .* has missing values, the first in row 1",
    ),
    "columns of an array": (
        partial(RowsOnDisk, "rows.npy", "x1"),
        "`columns` chooses columns of a table, and 'rows.npy' is an array or no table",
    ),
    "a frame in the place of a file": (
        partial(RowsOnDisk, pd.DataFrame(X), ["x1"]),
        "A DataFrame of pandas is not on disk. Give the model its columns",
    ),
    "strata of another number of rows": (
        chain_of(sgld(regression, subsampling=np.zeros(39, int)), X, Y),
        "`subsampling` has 39 entries for plate 'rows', which has 40 rows",
    ),
    "strata of a plate that is not there": (
        chain_of(sgld(regression, subsampling={"row": np.zeros(N, int)}), X, Y),
        "`subsampling` has an entry for 'row', but the plates with a `subsample_size` are 'rows'",
    ),
    "more strata than a minibatch can hold": (
        chain_of(sgld(regression, subsampling=np.arange(N) // 5), X, Y),
        "Plate 'rows' has 8 strata, too many for minibatches of 10 rows",
    ),
    "strata that are not numbered": (
        partial(sgld, regression, subsampling=X[:, 0]),
        r"`subsampling` must be a vector of whole numbers, .*; got float32 of shape \(40,\)",
    ),
    "negative numbers of strata": (
        partial(sgld, regression, subsampling=np.where(np.arange(N) == 7, -1, 0)),
        "`subsampling` has the stratum -1 at row 7",
    ),
    "an unknown word for the strata": (
        partial(sgld, regression, subsampling="soil"),
        "`subsampling` must be one of 'auto', 'without_replacement'.*got 'soil'",
    ),
    "an argument that is part of another now": (
        partial(sgld, regression, refresh_every=2.0),
        r"argument 'refresh_every'; write gradient=\('control_variate', passes\)",
    ),
    "strata with an estimate from single rows": (
        chain_of(
            ccadl(
                regression,
                subsampling=np.arange(N) % 2,
                noise=NoiseEstimate(estimator="per_example"),
            ),
            X,
            Y,
        ),
        "Stratified minibatches need an estimate of the noise from sub-batches of one stratum",
    ),
    "strata with a Fisher information": (
        partial(SGFS, regression, 0.1, subsampling=np.zeros(N, int)),
        "SGFS estimates the Fisher information from rows with equal probabilities",
    ),
    "rows that are drawn by importance": (
        partial(sgld, regression, subsampling="importance"),
        "subsampling='importance' was removed.* strata, which do the same",
    ),
    "a sparse matrix of JAX": (
        chain_of(sgld(regression), BCOO.fromdense(X), Y),
        r"Argument 'x' of the model is a sparse matrix, a BCOO of shape \(40, 3\), and the rows",
    ),
    "rows that are not numbers": (
        partial(RowsOnDisk, np.array(["a", "b"])),
        "`RowsOnDisk` needs at least one row of numbers or truth values; got an array",
    ),
}


def bad_inputs() -> dict[str, tuple[Callable, str]]:
    """All of them: what raises an error, and a pattern of what it says."""
    models = {
        title: (chain_of(sgld(model), *args), message)
        for title, (model, args, message) in BAD_MODELS.items()
    }
    return models | BAD_ARGUMENTS


def said_of(refused: Callable) -> str:
    """The error, and what it says."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refused()
    except (TypeError, ValueError, UnreadableRows) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was said")


def section(title: str, message: str) -> str:
    """Of the page, between its ends."""
    return f"**{title[0].upper()}{title[1:]}**\n\n```text\n{message}\n```\n"


def seconds_of(refused: Callable) -> float:
    """Until it is refused, with nothing compiled before but the operations of JAX itself."""
    jax.clear_caches()
    start = time.monotonic()
    said_of(refused)
    return time.monotonic() - start


def written(page: str, name: str, text: str) -> str:
    """The page with another text between the marks of this name."""
    pattern = re.compile(f"<!-- {name} -->\n.*?<!-- end -->", re.DOTALL)
    return pattern.sub(lambda _: f"<!-- {name} -->\n{text}<!-- end -->", page)


if __name__ == "__main__":
    inputs = bad_inputs()
    sections = [section(title, said_of(raises)) for title, (raises, _) in inputs.items()]
    page = written(PAGE.read_text(), "messages", "\n".join(sections))
    rows = [f"| {title} | {seconds_of(raises):.1f} |" for title, (raises, _) in inputs.items()]
    table = "\n".join(["| input | seconds |", "| --- | ---: |", *rows]) + "\n"
    PAGE.write_text(written(page, "seconds", table))
