# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""More models of text books and examples, and some of the case studies on ten times the rows."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from battery import case_studies
from battery.case_studies import GELMAN, PYMC, ROWS, STAN, design, normal, rows_of, single
from battery.posterior import posterior

BUGS = "BUGS"
MANY = 10 * ROWS
NON_CENTRED = partial(case_studies.radon, centred=False)

for title, source, model, data in (
    ("radon", GELMAN, NON_CENTRED, case_studies.radon_data),
    ("eight schools", STAN, case_studies.schools, case_studies.schools_data),
    ("negative binomial", GELMAN, case_studies.negative_binomial, case_studies.counts_data),
    ("ordinal", STAN, case_studies.ordinal, case_studies.grades_data),
    ("robust regression", PYMC, case_studies.robust, case_studies.tails_data),
):
    data = partial(data, rows=MANY)
    posterior(f"{title}, 50,000 rows", source, MANY, data, batch=200)(model)


def earnings_data(rng, folder):
    height, male = rng.normal(66, 4, ROWS), rng.random(ROWS) < 0.4
    y = -60_000 + 1_250 * height + 10_000 * male + 19_000 * rng.standard_normal(ROWS)
    return single(np.column_stack([np.ones(ROWS), height, male]), y)


@posterior("earnings, raw units and flat priors", GELMAN, ROWS, earnings_data)
def earnings(x, y, batch=None):
    flat = dist.ImproperUniform(dist.constraints.real_vector, (), (3,))
    w = numpyro.sample("w", flat)
    sigma = numpyro.sample("sigma", dist.ImproperUniform(dist.constraints.positive, (), ()))
    with rows_of(x, batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, sigma), obs=y[i])


RATS = 100


def rats_data(rng, folder):
    rat = np.repeat(np.arange(RATS), ROWS // RATS)
    day = rng.uniform(-1, 1, ROWS)
    a, b = 240 + 14 * rng.standard_normal(RATS), 90 + 7 * rng.standard_normal(RATS)
    return single(rat, day, a[rat] + b[rat] * day + 6 * rng.standard_normal(ROWS))


@posterior("rats", BUGS, ROWS, rats_data)
def rats(rat, day, y, batch=None):
    mean = numpyro.sample("mean", dist.Normal(jnp.array([200.0, 50.0]), 100).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(50).expand([2]).to_event(1))
    with numpyro.plate("rats", RATS):
        a = numpyro.sample("a", dist.Normal(mean[0], scale[0]))
        b = numpyro.sample("b", dist.Normal(mean[1], scale[1]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(20))
    with rows_of(y, batch) as i:
        numpyro.sample("y", dist.Normal(a[rat[i]] + b[rat[i]] * day[i], sigma), obs=y[i])


SUBJECTS = 50


def sleep_data(rng, folder):
    subject, day = np.repeat(np.arange(SUBJECTS), ROWS // SUBJECTS), rng.uniform(0, 9, ROWS)
    a, b = rng.multivariate_normal([250, 10], [[600, 60], [60, 36]], SUBJECTS).T
    y = a[subject] + b[subject] * day + 26 * rng.standard_normal(ROWS)
    return single(subject, day, y / 100)


def correlation(draws):
    return {**draws, "factor": draws["factor"][1, 0]}


@posterior("sleep study, correlated slopes", STAN, ROWS, sleep_data, compared=correlation)
def sleep(subject, day, y, batch=None):
    mean = normal("mean", 2, 5)
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
    factor = numpyro.sample("factor", dist.LKJCholesky(2, 2))
    law = dist.MultivariateNormal(mean, scale_tril=scale[:, None] * factor)
    with numpyro.plate("subjects", SUBJECTS):
        effects = numpyro.sample("effects", law)
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with rows_of(y, batch) as i:
        k = subject[i]
        numpyro.sample("y", dist.Normal(effects[k, 0] + effects[k, 1] * day[i], sigma), obs=y[i])


def two_groups_data(rng, folder):
    second = rng.random(ROWS) < 0.35
    return single(np.where(second, 2.0, -1.0) + rng.standard_normal(ROWS))


@posterior("mixture of two normals", STAN, ROWS, two_groups_data)
def mixture(y, batch=None):
    share = numpyro.sample("share", dist.Beta(2, 2))
    low = numpyro.sample("low", dist.Normal(0, 2))
    gap = numpyro.sample("gap", dist.LogNormal(0.5, 0.5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2).expand([2]).to_event(1))
    law = dist.MixtureSameFamily(
        dist.Categorical(jnp.stack([1 - share, share])),
        dist.Normal(jnp.stack([low, low + gap]), sigma),
    )
    with rows_of(y, batch) as i:
        numpyro.sample("y", law, obs=y[i])


PRECINCTS = 60


def stops_data(rng, folder):
    precinct = rng.integers(PRECINCTS, size=ROWS)
    group, exposure = rng.integers(3, size=ROWS), rng.gamma(2.0, 5.0, ROWS)
    rate = exposure * np.exp(
        np.array([-1.0, -0.6, -1.4])[group] + 0.5 * rng.standard_normal(PRECINCTS)[precinct]
    )
    return single(precinct, group, exposure, rng.poisson(rate * rng.gamma(2.0, 0.5, ROWS)))


@posterior("police stops, overdispersed", GELMAN, ROWS, stops_data)
def stops(precinct, group, exposure, y, batch=None):
    mean, scale = normal("mean", 3, 2), numpyro.sample("scale", dist.HalfNormal(1))
    z = normal("z", PRECINCTS)
    effect = scale * z
    shape = numpyro.sample("shape", dist.LogNormal(0, 1))
    with rows_of(y, batch) as i:
        log_rate = jnp.log(exposure[i]) + mean[group[i]] + effect[precinct[i]]
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(log_rate), shape), obs=y[i])


PLATES = 100


def seeds_data(rng, folder):
    plate = np.repeat(np.arange(PLATES), ROWS // PLATES)
    x = rng.random((PLATES, 2)) < 0.5
    logits = -0.5 + x @ np.array([0.1, 1.3]) + 0.3 * rng.standard_normal(PLATES)
    return single(plate, x.astype(float), rng.random(ROWS) < 1 / (1 + np.exp(-logits[plate])))


@posterior("seeds", BUGS, ROWS, seeds_data)
def seeds(plate, x, y, batch=None):
    b, tau = normal("b", 3, 2), numpyro.sample("tau", dist.HalfNormal(1))
    mean = b[0] + x @ b[1:]
    with numpyro.plate("plates", PLATES):
        a = numpyro.sample("a", dist.Normal(mean, tau))
    with rows_of(y, batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=a[plate[i]]), obs=y[i])


def ridge_data(rng, folder):
    x = rng.standard_normal((ROWS, 60))
    return single(x, rng.random(ROWS) < 1 / (1 + np.exp(-(x @ (0.1 * rng.standard_normal(60))))))


@posterior("ridge with a learned scale", PYMC, ROWS, ridge_data)
def ridge(x, y, batch=None):
    tau = numpyro.sample("tau", dist.HalfCauchy(1))
    w = numpyro.sample("w", dist.Normal(0, tau).expand([60]).to_event(1))
    with rows_of(x, batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def votes_data(rng, folder):
    x = design(rng, 5)
    logits = np.column_stack([np.zeros(ROWS), x @ rng.standard_normal((5, 2))])
    return single(x, np.argmax(logits + rng.gumbel(size=logits.shape), axis=1))


@posterior("multinomial logit", GELMAN, ROWS, votes_data)
def votes(x, y, batch=None):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([5, 2]).to_event(2))
    with rows_of(x, batch) as i:
        logits = jnp.column_stack([jnp.zeros(len(i)), x[i] @ w])
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y[i])


def costs_data(rng, folder):
    x = design(rng, 4)
    mean = np.exp(x @ np.array([1.0, 0.3, -0.2, 0.1]))
    return single(x, rng.gamma(2.0, mean / 2.0))


@posterior("gamma regression", PYMC, ROWS, costs_data)
def costs(x, y, batch=None):
    b, shape = normal("b", 4, 2), numpyro.sample("shape", dist.HalfNormal(5))
    with rows_of(x, batch) as i:
        numpyro.sample("y", dist.Gamma(shape, shape * jnp.exp(-(x[i] @ b))), obs=y[i])


WEEKS = 40


def hazard_data(rng, folder):
    level = np.cumsum(0.15 * rng.standard_normal(WEEKS)) - 1
    week, exposure = rng.integers(WEEKS, size=ROWS), rng.gamma(2.0, 1.0, ROWS)
    x = rng.standard_normal(ROWS)
    return single(week, x, exposure, rng.poisson(exposure * np.exp(level[week] + 0.4 * x)))


@posterior("piecewise hazard, a random walk", PYMC, ROWS, hazard_data)
def hazard(week, x, exposure, y, batch=None):
    start, b = numpyro.sample("start", dist.Normal(0, 2)), numpyro.sample("b", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(0.5))
    steps = numpyro.sample("steps", dist.Normal(0, scale).expand([WEEKS]).to_event(1))
    level = start + jnp.cumsum(steps)
    with rows_of(y, batch) as i:
        numpyro.sample(
            "y", dist.Poisson(exposure[i] * jnp.exp(level[week[i]] + b * x[i])), obs=y[i]
        )


USERS, FILMS = 943, 300


def ratings_data(rng, folder):
    with np.load(folder / "movielens_100k.npz") as file:
        user, item, rating = (file[k] for k in ("user", "item", "rating"))
    film = np.full(item.max() + 1, -1)
    film[np.argsort(-np.bincount(item))[:FILMS]] = np.arange(FILMS)
    kept = film[item] >= 0
    return single(user[kept] - 1, film[item[kept]], rating[kept] - 3.5)


@posterior("crossed effects, MovieLens", GELMAN, 60_821, ratings_data, batch=500)
def ratings(user, film, y, batch=None):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
    with numpyro.plate("users", USERS):
        a = numpyro.sample("a", dist.Normal(0, scale[0]))
    with numpyro.plate("films", FILMS):
        b = numpyro.sample("b", dist.Normal(mu, scale[1]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with rows_of(y, batch) as i:
        numpyro.sample("y", dist.Normal(a[user[i]] + b[film[i]], sigma), obs=y[i])
