# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Models of case studies and text books, on rows simulated from them."""

from functools import partial

from jax.nn import softplus
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from battery.posterior import posterior

#: So many rows, at which NUTS takes its time but is still to be had.
ROWS = 5_000

#: *Data Analysis Using Regression and Multilevel Models*, Andrew Gelman and Jennifer Hill (2007);
#: the case studies and the user's guide of Stan; PyMC's example gallery.
GELMAN, STAN, PYMC = "Gelman and Hill", "Stan", "PyMC"


def normal(name, size, scale=1.0):
    return numpyro.sample(name, dist.Normal(0, scale).expand([size]).to_event(1))


def rows_of(x, batch):
    return numpyro.plate("rows", x.shape[0], subsample_size=batch)


def design(rng, size, rows=ROWS):
    return np.column_stack([np.ones(rows), rng.standard_normal((rows, size - 1))])


def single(*arrays):
    return tuple(
        jnp.asarray(x, jnp.int32 if x.dtype.kind in "iub" else jnp.float32) for x in arrays
    )


def heteroscedastic_data(rng, folder, size=8):
    x = design(rng, size, 20_000)
    b, g = rng.standard_normal(size), 0.4 * rng.standard_normal(size)
    return single(x, x @ b + np.exp(x @ g) * rng.standard_normal(len(x)))


@posterior("heteroscedastic", PYMC, 20_000, heteroscedastic_data, batch=200)
def heteroscedastic(x, y, batch=None):
    b, g = normal("b", x.shape[1], 5), normal("g", x.shape[1], 5)
    with rows_of(x, batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ b, jnp.exp(x[i] @ g)), obs=y[i])


UNITS = 10.0 ** np.array([0, 4, -4, 3, -3, 2])


def raw_units_data(rng, folder):
    x = design(rng, 6)
    y = rng.random(ROWS) < 1 / (1 + np.exp(-(x @ rng.standard_normal(6))))
    return single(x * UNITS, y)


def standard_units(x, y, batch=None):
    c = numpyro.sample("c", dist.ImproperUniform(dist.constraints.real_vector, (), (6,)))
    b = numpyro.deterministic("b", c / UNITS)
    with rows_of(x, batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ b), obs=y[i])


@posterior("logistic, raw units", GELMAN, ROWS, raw_units_data, original=standard_units)
def raw_units(x, y, batch=None):
    b = numpyro.sample("b", dist.ImproperUniform(dist.constraints.real_vector, (), (6,)))
    with rows_of(x, batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ b), obs=y[i])


COUNTIES = 85


def radon_data(rng, folder, rows=ROWS):
    county = rng.choice(COUNTIES, rows, p=rng.dirichlet(np.full(COUNTIES, 2.0)))
    floor = (rng.random(rows) < 0.2).astype(float)
    uranium = rng.standard_normal(COUNTIES)
    a = 1.5 + 0.7 * uranium + 0.3 * rng.standard_normal(COUNTIES)
    b = -0.7 + 0.3 * rng.standard_normal(COUNTIES)
    y = a[county] + b[county] * floor + 0.75 * rng.standard_normal(rows)
    return single(county, floor, uranium, y)


def radon(county, floor, uranium, y, batch=None, centred=True):
    mu, tau = normal("mu", 3, 2), numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
    means = mu[0] + mu[1] * uranium, mu[2]
    with numpyro.plate("counties", COUNTIES):
        if centred:
            a, b = (
                numpyro.sample(k, dist.Normal(*p)) for k, *p in zip("ab", means, tau, strict=True)
            )
        else:
            z = [numpyro.sample(f"z_{k}", dist.Normal(0, 1)) for k in "ab"]
            a, b = (m + s * x for m, s, x in zip(means, tau, z, strict=True))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with rows_of(y, batch) as i:
        numpyro.sample("y", dist.Normal(a[county[i]] + b[county[i]] * floor[i], sigma), obs=y[i])


posterior("radon, centred", GELMAN, ROWS, radon_data)(partial(radon, centred=True))
posterior("radon, non-centred", GELMAN, ROWS, radon_data)(partial(radon, centred=False))


def schools_data(rng, folder, rows=ROWS):
    school = np.repeat(np.arange(8), rows // 8)
    effect = 4 + 5 * rng.standard_normal(8)
    return single(school, effect[school] + 100 * rng.standard_normal(len(school)))


@posterior("eight schools, every pupil", STAN, ROWS, schools_data)
def schools(school, y, batch=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        theta = mu + tau * numpyro.sample("z", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(200))
    with rows_of(y, batch) as i:
        numpyro.sample("y", dist.Normal(theta[school[i]], sigma), obs=y[i])


PERSONS, ITEMS = 250, 20


def items_data(rng, folder):
    person, item = (x.ravel() for x in np.indices((PERSONS, ITEMS)))
    ability, difficulty = rng.standard_normal(PERSONS), rng.standard_normal(ITEMS)
    slope = np.exp(0.3 * rng.standard_normal(ITEMS))
    logits = slope[item] * (ability[person] - difficulty[item])
    return single(person, item, rng.random(len(person)) < 1 / (1 + np.exp(-logits)))


@posterior("item response, two parameters", STAN, ROWS, items_data)
def items(person, item, y, batch=None):
    ability, difficulty = normal("ability", PERSONS), normal("difficulty", ITEMS, 2)
    slope = numpyro.sample("slope", dist.LogNormal(0, 0.5).expand([ITEMS]).to_event(1))
    with rows_of(y, batch) as i:
        p, k = person[i], item[i]
        logits = slope[k] * (ability[p] - difficulty[k])
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])


def counts_data(rng, folder, rows=ROWS):
    x = design(rng, 5, rows)
    rate = np.exp(x @ np.array([0.5, 0.4, -0.3, 0.2, 0.0]))
    zero = rng.random(rows) < 1 / (1 + np.exp(-(x @ np.array([-1.0, 0.5, 0, 0, 0.5]))))
    return single(x, np.where(zero, 0, rng.poisson(rate)))


@posterior("Poisson with zeros", PYMC, ROWS, counts_data)
def zeros(x, y, batch=None):
    b, g = normal("b", 5, 2), normal("g", 5, 2)
    with rows_of(x, batch) as i:
        counts = dist.Poisson(jnp.exp(x[i] @ b))
        law = dist.ZeroInflatedDistribution(counts, gate_logits=x[i] @ g)
        numpyro.sample("y", law, obs=y[i])


@posterior("negative binomial", GELMAN, ROWS, counts_data)
def negative_binomial(x, y, batch=None):
    b, shape = normal("b", 5, 2), numpyro.sample("shape", dist.HalfNormal(5))
    with rows_of(x, batch) as i:
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(x[i] @ b), shape), obs=y[i])


def sparse_data(rng, folder):
    x = rng.standard_normal((ROWS, 40))
    w = np.zeros(40)
    w[:5] = [2, -1.5, 1, 0.5, -0.3]
    return single(x, x @ w + 3 * rng.standard_normal(ROWS))


def slab(tau, local, c2):
    return tau * local * jnp.sqrt(c2 / (c2 + (tau * local) ** 2))


def coefficients_and_logarithms(draws):
    """Scales with these priors have no variance."""
    scale = slab(draws["tau"][..., None], draws["local"], draws["c2"][..., None])
    logarithms = {f"log {k}": jnp.log(draws[k]) for k in ("tau", "local", "c2")}
    return {"w": draws["z"] * scale, "sigma": draws["sigma"], **logarithms}


@posterior("regularised horseshoe", STAN, ROWS, sparse_data, compared=coefficients_and_logarithms)
def horseshoe(x, y, batch=None):
    size = x.shape[1]
    tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
    c2 = numpyro.sample("c2", dist.InverseGamma(2, 8))
    local = numpyro.sample("local", dist.HalfCauchy(1).expand([size]).to_event(1))
    w = normal("z", size) * slab(tau, local, c2)
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    with rows_of(x, batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, sigma), obs=y[i])


FUNCTIONS, EDGE = 20, 1.5


def curve_data(rng, folder):
    x = rng.uniform(-1, 1, ROWS)
    return single(x, np.sin(4 * x) + 0.5 * np.cos(9 * x) + 0.4 * rng.standard_normal(ROWS))


def basis(x):
    k = jnp.arange(1, FUNCTIONS + 1)
    return jnp.sin(jnp.pi * k * (x[:, None] + EDGE) / (2 * EDGE)) / jnp.sqrt(EDGE)


def curve(x, y, batch=None, centred=False):
    alpha = numpyro.sample("alpha", dist.LogNormal(0, 1))
    length = numpyro.sample("length", dist.InverseGamma(5, 2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    w = jnp.pi * jnp.arange(1, FUNCTIONS + 1) / (2 * EDGE)
    scale = (
        alpha * (2 * jnp.pi) ** 0.25 * jnp.sqrt(length) * jnp.exp(-((length * w) ** 2) / 4) + 1e-5
    )
    if centred:
        b = numpyro.sample("b", dist.Normal(0, scale).to_event(1))
    else:
        b = scale * normal("z", FUNCTIONS)
    with rows_of(x, batch) as i:
        numpyro.sample("y", dist.Normal(basis(x[i]) @ b, sigma), obs=y[i])


posterior("Gaussian process by basis functions", STAN, ROWS, curve_data)(curve)


def in_written_coordinates(draws):
    return {k: draws[k] for k in ("alpha", "length", "sigma")}


# NUTS needs the other coordinates
posterior(
    "the same, centred", STAN, ROWS, curve_data, compared=in_written_coordinates, original=curve
)(partial(curve, centred=True))


def times_data(rng, folder):
    x = design(rng, 4)
    time = np.exp(x @ np.array([1.0, 0.5, -0.5, 0.2])) * rng.weibull(1.5, ROWS)
    end = rng.exponential(6.0, ROWS)
    return single(x, np.minimum(time, end), time > end)


@posterior("survival, Weibull", PYMC, ROWS, times_data)
def survival(x, time, is_censored, batch=None):
    b, shape = normal("b", 4, 2), numpyro.sample("shape", dist.HalfNormal(3))
    with rows_of(x, batch) as i:
        law = dist.Weibull(jnp.exp(x[i] @ b), shape)
        # what is censored adds the log of the survival function
        survived = -((time[i] / law.scale) ** shape)
        term = jnp.where(is_censored[i] == 1, survived, law.log_prob(time[i]))
        numpyro.factor("time", term)


def grades_data(rng, folder, rows=ROWS):
    x = rng.standard_normal((rows, 4))
    latent = x @ np.array([1.0, -0.5, 0.3, 0.0]) + rng.logistic(size=rows)
    return single(x, np.digitize(latent, [-2.0, -0.5, 0.7, 2.0]))


@posterior("ordinal", STAN, ROWS, grades_data)
def ordinal(x, y, batch=None):
    b = normal("b", 4, 2)
    first = numpyro.sample("first", dist.Normal(0, 5))
    gaps = numpyro.sample("gaps", dist.HalfNormal(2).expand([3]).to_event(1))
    cuts = first + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gaps)])
    with rows_of(x, batch) as i:
        numpyro.sample("y", dist.OrderedLogistic(x[i] @ b, cuts), obs=y[i])


def tails_data(rng, folder, rows=ROWS):
    x = design(rng, 5, rows)
    return single(x, x @ np.array([1.0, 2, -1, 0.5, 0]) + 2 * rng.standard_t(3, rows))


@posterior("robust regression", PYMC, ROWS, tails_data)
def robust(x, y, batch=None):
    b, sigma = normal("b", 5, 5), numpyro.sample("sigma", dist.HalfNormal(5))
    degrees = numpyro.sample("degrees", dist.Gamma(2, 0.1))
    with rows_of(x, batch) as i:
        numpyro.sample("y", dist.StudentT(degrees, x[i] @ b, sigma), obs=y[i])


@posterior("quantile regression", PYMC, ROWS, tails_data)
def quantile(x, y, batch=None):
    b, sigma = normal("b", 5, 5), numpyro.sample("sigma", dist.HalfNormal(5))
    with rows_of(x, batch) as i:
        law = dist.AsymmetricLaplaceQuantile(x[i] @ b, sigma, quantile=0.9)
        numpyro.sample("y", law, obs=y[i])


def growth_data(rng, folder):
    age = rng.uniform(1, 30, ROWS)
    return single(age, 2.6 - 0.97 * 0.87**age + 0.1 * rng.standard_normal(ROWS))


@posterior("dugongs", "BUGS", ROWS, growth_data)
def dugongs(age, y, batch=None):
    alpha, beta = (numpyro.sample(k, dist.HalfNormal(5)) for k in ("alpha", "beta"))
    gamma = numpyro.sample("gamma", dist.Uniform(0.5, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with rows_of(age, batch) as i:
        numpyro.sample("y", dist.Normal(alpha - beta * gamma ** age[i], sigma), obs=y[i])


def shares_data(rng, folder):
    x = design(rng, 4)
    mean = 1 / (1 + np.exp(-(x @ np.array([0.3, 0.5, -0.5, 0.0]))))
    return single(x, np.clip(rng.beta(20 * mean, 20 * (1 - mean)), 1e-4, 1 - 1e-4))


@posterior("beta regression", STAN, ROWS, shares_data)
def shares(x, y, batch=None):
    b, g = normal("b", 4, 2), numpyro.sample("g", dist.Normal(0, 3))
    with rows_of(x, batch) as i:
        mean, size = 1 / (1 + jnp.exp(-(x[i] @ b))), softplus(g) * 10
        numpyro.sample("y", dist.Beta(mean * size, (1 - mean) * size), obs=y[i])
