# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The models of NumPyro's own examples, with minibatches, on data like theirs.

Each is the example's model, written anew, with what a user would change first. Where that is
refused there is a second one, which does what the message says.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from flax import linen
import jax.numpy as jnp
from jax.scipy.special import expit
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
from numpyro.contrib.module import flax_module
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import OrderedTransform
from numpyro.handlers import mask, reparam
from numpyro.infer.reparam import LocScaleReparam
from numpyro.ops.indexing import Vindex


class Example(NamedTuple):
    """
    - **title** - the name of the example in NumPyro.
    - **change** - what was changed, in words.
    - **model** - with ``batch`` as its last argument; None is all rows.
    - **data** - makes the arguments.
    - **original** - the model for NUTS, where it is not the same one of all rows.
    - **compared** - from the draws of a chain to what is compared; None is all latent sites.
    """

    title: str
    change: str
    model: Callable
    data: Callable[[np.random.Generator], tuple]
    batch: int
    original: Callable | None = None
    compared: Callable[[dict[str, Any]], dict[str, Any]] | None = None


EXAMPLES: list[Example] = []


def example(title, change, data, batch, original=None, compared=None):
    """Lists a model."""

    def listed(model):
        EXAMPLES.append(Example(title, change, model, data, batch, original, compared))
        return model

    return listed


def normal(size):
    return dist.Normal(0, 1).expand([size]).to_event(1)


# Baseball: hits of 18 players in 45 times at bat

HITS = [18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7]


def baseball(rng):
    return jnp.full(18, 45), jnp.array(HITS)


@example("baseball, fully pooled", "plate, index", baseball, 6)
def fully_pooled(at_bats, hits, batch=None):
    phi = numpyro.sample("phi", dist.Uniform(0, 1))
    with numpyro.plate("players", at_bats.shape[0], subsample_size=batch) as i:
        numpyro.sample("hits", dist.Binomial(at_bats[i], probs=phi), obs=hits[i])


@example("baseball, not pooled", "plate, index", baseball, 6)
def not_pooled(at_bats, hits, batch=None):
    with numpyro.plate("players", at_bats.shape[0], subsample_size=batch) as i:
        phi = numpyro.sample("phi", dist.Uniform(0, 1))
        numpyro.sample("hits", dist.Binomial(at_bats[i], probs=phi), obs=hits[i])


@example("baseball, not pooled", "as the message says: latent sites outside", baseball, 6)
def not_pooled_outside(at_bats, hits, batch=None):
    with numpyro.plate("all players", at_bats.shape[0]):
        phi = numpyro.sample("phi", dist.Uniform(0, 1))
    with numpyro.plate("players", at_bats.shape[0], subsample_size=batch) as i:
        numpyro.sample("hits", dist.Binomial(at_bats[i], probs=phi[i]), obs=hits[i])


def pooled_without_centre(at_bats, hits):
    """As written, draws of NUTS are 10 % too narrow after 1,000 of them."""
    with reparam(config={"alpha": LocScaleReparam(0)}):
        return partially_pooled(at_bats, hits)


@example(
    "baseball, partially pooled", "plate, index; latent sites outside", baseball, 6,
    pooled_without_centre,
)  # fmt: skip
def partially_pooled(at_bats, hits, batch=None):
    loc = numpyro.sample("loc", dist.Normal(-1, 1))
    scale = numpyro.sample("scale", dist.HalfCauchy(1))
    with numpyro.plate("all players", at_bats.shape[0]):
        alpha = numpyro.sample("alpha", dist.Normal(loc, scale))
    with numpyro.plate("players", at_bats.shape[0], subsample_size=batch) as i:
        numpyro.sample("hits", dist.Binomial(at_bats[i], logits=alpha[i]), obs=hits[i])


# Regressions


def wiggle(rng, rows=100):
    x = np.linspace(-1, 1, rows)[:, None] ** np.arange(3)
    y = x @ [0.9, 0.2, 0.5] + 0.5 * (0.5 + x[:, 1]) ** 2 * np.sin(4 * x[:, 1])
    y = y + 0.05 * rng.standard_normal(rows)
    return jnp.asarray(x), jnp.asarray((y - y.mean()) / y.std())[:, None]


def predictions_of_network(draws):
    x = jnp.linspace(-1, 1, 5)[:, None] ** jnp.arange(3)
    hidden = jnp.tanh(jnp.tanh(x @ draws["w1"]) @ draws["w2"])
    return {"f": (hidden @ draws["w3"])[..., 0], "prec_obs": draws["prec_obs"]}


@example("bnn", "plate has `subsample_size`, index", wiggle, 20, None, predictions_of_network)
def bnn(x, y, batch=None):
    sizes = {"w1": (3, 5), "w2": (5, 5), "w3": (5, 1)}
    w = {k: numpyro.sample(k, dist.Normal(jnp.zeros(v), 1).to_event(2)) for k, v in sizes.items()}
    precision = numpyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
    with numpyro.plate("data", x.shape[0], subsample_size=batch) as i:
        mean = jnp.tanh(jnp.tanh(x[i] @ w["w1"]) @ w["w2"]) @ w["w3"]
        law = dist.Normal(mean, 1 / jnp.sqrt(precision)).to_event(1)
        numpyro.sample("y", law, obs=y[i])


def stein_data(rng, rows=300):
    x = rng.standard_normal((rows, 4))
    y = np.tanh(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.2 * rng.standard_normal(rows)
    return jnp.asarray(x), jnp.asarray(y / y.std())


def predictions_of_relu(draws):
    x = jnp.eye(4)
    hidden = jnp.maximum(x @ draws["w1"] + draws["b1"], 0)
    return {"f": hidden @ draws["w2"] + draws["b2"], "prec_obs": draws["prec_obs"]}


@example("stein_bnn", "nothing", stein_data, 50, None, predictions_of_relu)
def stein_bnn(x, y, batch=None):
    precision = numpyro.sample("prec_obs", dist.Gamma(1.0, 0.1))
    prior = 1 / numpyro.sample("prec_nn", dist.Gamma(1.0, 0.1))
    b1 = numpyro.sample("b1", dist.Normal(jnp.zeros(10), prior))
    b2 = numpyro.sample("b2", dist.Normal(0.0, prior))
    w1 = numpyro.sample("w1", dist.Normal(jnp.zeros((4, 10)), prior))
    w2 = numpyro.sample("w2", dist.Normal(jnp.zeros(10), prior))
    with numpyro.plate("data", x.shape[0], subsample_size=batch, dim=-1):
        x_batch, y_batch = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        mean = jnp.maximum(x_batch @ w1 + b1, 0) @ w2 + b2
        numpyro.sample("y", dist.Normal(mean, 1 / precision), obs=y_batch)


def covertype(rng, rows=2_000):
    x = np.column_stack([rng.standard_normal((rows, 10)), np.ones(rows)])
    y = expit(x @ rng.standard_normal(11)) > rng.uniform(size=rows)
    return jnp.asarray(x), jnp.asarray(y)


@example("covtype", "a plate, index", covertype, 200)
def covtype(features, labels, batch=None):
    coefs = numpyro.sample("coefs", dist.Normal(jnp.zeros(11), jnp.ones(11)))
    with numpyro.plate("rows", len(labels), subsample_size=batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=features[i] @ coefs), obs=labels[i])


@example("covtype", "nothing: no plate at all", covertype, 200)
def covtype_as_it_is(features, labels, batch=None):
    coefs = numpyro.sample("coefs", dist.Normal(jnp.zeros(11), jnp.ones(11)))
    numpyro.sample("y", dist.Bernoulli(logits=features @ coefs), obs=labels)


@example("hmcecs", "nothing", covertype, 200)
def hmcecs(features, labels, batch=None):
    coefs = numpyro.sample("coefs", dist.Normal(jnp.zeros(11), jnp.ones(11)))
    with numpyro.plate("N", features.shape[0], subsample_size=batch):
        x = numpyro.subsample(features, event_dim=1)
        y = numpyro.subsample(labels, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=x @ coefs), obs=y)


def sparse(rng, rows=400, binary=False):
    x = rng.standard_normal((rows, 8))
    y = x[:, :3] @ [2.0, -1.0, 0.5]
    y = rng.binomial(1, expit(y)) if binary else y + 0.05 * rng.standard_normal(rows)
    return jnp.asarray(x), jnp.asarray(y)


def betas(draws):
    found = {"betas": draws["tau"] * draws["lambdas"] * draws["unscaled_betas"]}
    return found | {k: draws[k] for k in ("prec_obs",) if k in draws}


def horseshoe_betas():
    lambdas = numpyro.sample("lambdas", dist.HalfCauchy(jnp.ones(8)))
    tau = numpyro.sample("tau", dist.HalfCauchy(jnp.ones(1)))
    unscaled = numpyro.sample("unscaled_betas", dist.Normal(0.0, jnp.ones(8)))
    return numpyro.deterministic("betas", tau * lambdas * unscaled)


@example("horseshoe_regression, normal", "a plate, index", sparse, 100, None, betas)
def horseshoe(x, y, batch=None):
    beta = horseshoe_betas()
    precision = numpyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ beta, 1 / jnp.sqrt(precision)), obs=y[i])


@example(
    "horseshoe_regression, binary", "a plate, index", partial(sparse, binary=True), 100, None,
    betas,
)  # fmt: skip
def horseshoe_binary(x, y, batch=None):
    beta = horseshoe_betas()
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def customers(rng):
    called = np.repeat([1, 0], [51_342, 48_658])
    female = rng.binomial(1, 0.5, 100_000)
    bought = rng.binomial(1, np.where(called, 0.084, 0.061))
    return jnp.column_stack([jnp.ones(100_000), called, female]), jnp.asarray(bought)


@example("proportion_test", "plate has `subsample_size`, index", customers, 1_000)
def proportion_test(design, outcome, batch=None):
    prior = dist.MultivariateNormal(0.0, jnp.eye(design.shape[1]))
    beta = numpyro.sample("coefficients", prior)
    with numpyro.plate("data", design.shape[0], subsample_size=batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=design[i] @ beta), obs=outcome[i])


@example("proportion_test", "`subsample_size` alone, index of `obs` alone", customers, 1_000)
def proportion_test_half(design, outcome, batch=None):
    prior = dist.MultivariateNormal(0.0, jnp.eye(design.shape[1]))
    logits = design @ numpyro.sample("coefficients", prior)
    with numpyro.plate("data", design.shape[0], subsample_size=batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=outcome[i])


@example("proportion_test", "logits of all rows outside, indexed inside", customers, 1_000)
def proportion_test_outside(design, outcome, batch=None):
    prior = dist.MultivariateNormal(0.0, jnp.eye(design.shape[1]))
    logits = design @ numpyro.sample("coefficients", prior)
    with numpyro.plate("data", design.shape[0], subsample_size=batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=logits[i]), obs=outcome[i])


def fish(rng, rows=250):
    persons = rng.integers(1, 5, rows)
    x = np.column_stack([
        rng.binomial(1, 0.8, rows), rng.binomial(1, 0.6, rows), persons,
        rng.integers(0, persons), np.ones(rows),
    ])  # fmt: skip
    caught = rng.poisson(np.exp(x @ [0.6, 0.6, 0.5, -0.8, -1.0]))
    return jnp.asarray(x), jnp.asarray(
        np.where(expit(x @ [0, -1, -1, 1.5, 1.5]) > rng.uniform(size=rows), 0, caught)
    )


@example("zero_inflated_poisson", "plate has `subsample_size`, index", fish, 50)
def zero_inflated(x, y, batch=None):
    b1, b2 = numpyro.sample("b1", normal(5)), numpyro.sample("b2", normal(5))
    with numpyro.plate("obs", x.shape[0], subsample_size=batch) as i:
        law = dist.ZeroInflatedPoisson(gate=expit(x[i] @ b1), rate=jnp.exp(x[i] @ b2))
        numpyro.sample("y", law, obs=y[i])


def divorces(rng, rows=500):
    a = rng.standard_normal(rows)
    m = -0.7 * a + 0.7 * rng.standard_normal(rows)
    return tuple(jnp.asarray(v) for v in (m, a, -0.6 * a + 0.8 * rng.standard_normal(rows)))


@example("bayesian_regression", "a plate, index", divorces, 100)
def divorce(marriage, age, divorce, batch=None):
    a = numpyro.sample("a", dist.Normal(0.0, 0.2))
    b_m = numpyro.sample("bM", dist.Normal(0.0, 0.5))
    b_a = numpyro.sample("bA", dist.Normal(0.0, 0.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with numpyro.plate("states", len(divorce), subsample_size=batch) as i:
        mu = a + b_m * marriage[i] + b_a * age[i]
        numpyro.sample("obs", dist.Normal(mu, sigma), obs=divorce[i])


def lungs(rng, patients=40, visits=12):
    patient = np.repeat(np.arange(patients), visits)
    week = rng.uniform(-1, 1, patients * visits)
    a, b = 0.8 * rng.standard_normal(patients), 0.1 * rng.standard_normal(patients) - 0.1
    y = a[patient] + b[patient] * week + 0.2 * rng.standard_normal(len(week))
    return jnp.asarray(patient), jnp.asarray(week), jnp.asarray(y)


def patients_model(patient, week, y, count, batch):
    mu_a = numpyro.sample("mu_a", dist.Normal(0.0, 5.0))
    sigma_a = numpyro.sample("sigma_a", dist.HalfNormal(5.0))
    mu_b = numpyro.sample("mu_b", dist.Normal(0.0, 5.0))
    sigma_b = numpyro.sample("sigma_b", dist.HalfNormal(5.0))
    with numpyro.plate("patients", count):
        a = numpyro.sample("a", dist.Normal(mu_a, sigma_a))
        b = numpyro.sample("b", dist.Normal(mu_b, sigma_b))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(y), subsample_size=batch) as i:
        mean = a[patient[i]] + b[patient[i]] * week[i]
        numpyro.sample("obs", dist.Normal(mean, sigma), obs=y[i])


def patients_counted(patient, week, y, batch=None):
    patients_model(patient, week, y, 40, batch)


@example(
    "bayesian_hierarchical_linear_regression", "plate has `subsample_size`, index", lungs, 120,
    patients_counted,
)  # fmt: skip
def patients_unique(patient, week, y, batch=None):
    patients_model(patient, week, y, len(np.unique(patient)), batch)


@example(
    "bayesian_hierarchical_linear_regression", "the same, with the count as a number", lungs, 120,
    patients_counted,
)  # fmt: skip
def patients(patient, week, y, batch=None):
    patients_counted(patient, week, y, batch)


def dotted(rng, rows=1_000):
    x = rng.standard_normal((rows, 3))
    return jnp.asarray(x), jnp.asarray(rng.binomial(1, expit(x @ [1.0, 2.0, 3.0] + 0.5)))


@example("logistic_regression", "a plate, index", dotted, 100)
def logistic(x, y, batch=None):
    m = numpyro.sample("m", dist.Normal(jnp.zeros(3), jnp.ones(3)))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ m + b), obs=y[i])


def ordered(rng, rows=600):
    x = rng.standard_normal(rows)
    y = np.digitize(1.5 * x + rng.logistic(size=rows), [-1.0, 1.0])
    return jnp.asarray(x), jnp.asarray(y)


@example("ordinal_regression", "plate has `subsample_size`, index", ordered, 100)
def ordinal(x, y, batch=None):
    b_x = numpyro.sample("b_X_eta", dist.Normal(0, 5))
    base = dist.TransformedDistribution(dist.Normal(0, 1).expand([2]), OrderedTransform())
    c_y = numpyro.sample("c_y", base)
    with numpyro.plate("obs", len(x), subsample_size=batch) as i:
        numpyro.sample("y", dist.OrderedLogistic(x[i] * b_x, c_y), obs=y[i])


# Tables of counts, and groups

DEPARTMENTS = [825, 108, 560, 25, 325, 593, 417, 375, 191, 393, 373, 341]
ADMITTED = [512, 89, 353, 17, 120, 202, 138, 131, 53, 94, 22, 24]


def admissions(rng):
    dept, male = np.arange(12) // 2, 1 - np.arange(12) % 2
    return tuple(map(jnp.asarray, (dept, male, np.array(DEPARTMENTS), np.array(ADMITTED))))


def glmm(dept, male, applications, admit, count, batch):
    v_mu = numpyro.sample("v_mu", dist.Normal(0, jnp.array([4.0, 1.0])))
    sigma = numpyro.sample("sigma", dist.HalfNormal(jnp.ones(2)))
    factor = numpyro.sample("L_Rho", dist.LKJCholesky(2, concentration=2))
    z = numpyro.sample("z", dist.Normal(jnp.zeros((count, 2)), 1))
    v = z @ (sigma[:, None] * factor).T
    with numpyro.plate("rows", len(dept), subsample_size=batch) as i:
        logits = v_mu[0] + v[dept[i], 0] + (v_mu[1] + v[dept[i], 1]) * male[i]
        numpyro.sample("admit", dist.Binomial(applications[i], logits=logits), obs=admit[i])


def glmm_counted(*args, batch=None):
    glmm(*args, 6, batch)


def departments(draws):
    return {name: draws[name] for name in ("v_mu", "sigma", "z")}


@example("ucbadmit", "a plate, index", admissions, 4, glmm_counted, departments)
def glmm_unique(dept, male, applications, admit, batch=None):
    glmm(dept, male, applications, admit, len(np.unique(dept)), batch)


@example(
    "ucbadmit", "the same, with the count as a number", admissions, 4, glmm_counted, departments
)
def glmm_number(dept, male, applications, admit, batch=None):
    glmm(dept, male, applications, admit, 6, batch)


AREAS, AGES, YEARS = 10, 5, 6


def deaths(rng):
    space, age, time = (v.ravel() for v in np.indices((AREAS, AGES, YEARS)))
    rate = 0.3 * rng.standard_normal(AREAS)[space] + 0.8 * age - 5 - 0.05 * time
    population = rng.integers(500, 2_000, len(space))
    counts = rng.binomial(population, expit(rate))
    return tuple(map(jnp.asarray, (age, space, time, population, counts)))


WALKS = {k: LocScaleReparam(0) for k in ("alpha_s", "alpha_drift", "beta_drift", "pi_drift")}


@reparam(config=WALKS)
def mortality_model(age, space, time, population, deaths, sizes, batch):
    areas, ages, years = sizes
    sigma = {
        k: numpyro.sample(f"sigma_{k}", dist.HalfNormal(1.0)) for k in ("s", "age", "beta", "pi")
    }
    with numpyro.plate("space", areas):
        alpha_s = numpyro.sample("alpha_s", dist.Normal(0, sigma["s"]))
    with numpyro.plate("age_groups", ages):
        first = jnp.arange(ages) == 0
        scale = jnp.where(first, 10.0, sigma["age"])
        alpha = jnp.cumsum(numpyro.sample("alpha_drift", dist.Normal(0, scale)))
        scale = jnp.where(first, 10.0, sigma["beta"])
        beta = jnp.cumsum(numpyro.sample("beta_drift", dist.Normal(0, scale)))
    with numpyro.plate("year", years - 1):
        drift = numpyro.sample("pi_drift", dist.Normal(0, sigma["pi"]))
    pi = jnp.pad(jnp.cumsum(drift), (1, 0))
    with numpyro.plate("N", len(population), subsample_size=batch) as i:
        logit = alpha_s[space[i]] + alpha[age[i]] + beta[age[i]] * time[i] + pi[time[i]]
        mu = numpyro.deterministic("mu", expit(logit))
        numpyro.sample("deaths", dist.Binomial(population[i], mu), obs=deaths[i])


def mortality_counted(*args, batch=None):
    mortality_model(*args, (AREAS, AGES, YEARS), batch)


def scales(draws):
    return {k: v for k, v in draws.items() if k.startswith("sigma")}


@example("mortality", "plate has `subsample_size`, index", deaths, 60, mortality_counted, scales)
def mortality(age, space, time, population, deaths, batch=None):
    sizes = [len(np.unique(v)) for v in (space, age, time)]
    mortality_model(age, space, time, population, deaths, sizes, batch)


@example("mortality", "the same, with the counts as numbers", deaths, 60, mortality_counted, scales)
def mortality_number(*args, batch=None):
    mortality_counted(*args, batch=batch)


# Series


def series(rng, rows=500):
    return (jnp.asarray(np.sin(np.arange(rows)) + 0.1 * rng.standard_normal(rows)),)


def ar2_latents():
    alpha = [numpyro.sample(f"alpha_{k}", dist.Normal(0, 1)) for k in (1, 2)]
    return (
        alpha,
        numpyro.sample("const", dist.Normal(0, 1)),
        numpyro.sample("sigma", dist.HalfNormal(1)),
    )


def ar2_scan(y, batch=None):
    (one, two), const, sigma = ar2_latents()

    def transition(carry, _):
        last, before = carry
        now = numpyro.sample("y", dist.Normal(const + one * last + two * before, sigma))
        return (now, last), None

    with numpyro.handlers.condition(data={"y": y[2:]}):
        scan(transition, (y[1], y[0]), jnp.arange(len(y) - 2))


example("ar2", "nothing: `scan`, no plate", series, 100)(ar2_scan)


@example("ar2", "a plate of the times, `y[t]`, `y[t + 1]`, `y[t + 2]`", series, 100, ar2_scan)
def ar2_plate(y, batch=None):
    (one, two), const, sigma = ar2_latents()
    with numpyro.plate("time", len(y) - 2, subsample_size=batch) as t:
        mean = const + one * y[t + 1] + two * y[t]
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y[t + 2])


@example("ar2", "the same with slices: `y[1:-1][t]`", series, 100, ar2_scan)
def ar2_slices(y, batch=None):
    (one, two), const, sigma = ar2_latents()
    with numpyro.plate("time", len(y) - 2, subsample_size=batch) as t:
        mean = const + one * y[1:-1][t] + two * y[:-2][t]
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y[2:][t])


def returns(rng, days=150):
    s = np.cumsum(0.15 * rng.standard_normal(days)) - 1
    return (jnp.asarray(np.exp(s) * rng.standard_t(10, days)),)


def volatility(draws):
    return {"log sigma": jnp.log(draws["sigma"]), "s": draws["s"][..., ::30]}


@example("stochastic_volatility", "a plate of the days, index", returns, 50, None, volatility)
def stochastic_volatility(returns, batch=None):
    sigma = numpyro.sample("sigma", dist.Exponential(50.0))
    s = numpyro.sample("s", dist.GaussianRandomWalk(sigma, num_steps=len(returns)))
    nu = numpyro.sample("nu", dist.Exponential(0.1))
    with numpyro.plate("days", len(returns), subsample_size=batch) as i:
        numpyro.sample("r", dist.StudentT(nu, 0.0, jnp.exp(s[i])), obs=returns[i])


def populations(rng, years=21):
    from jax.experimental.ode import odeint

    ts = jnp.arange(float(years))
    z = odeint(predator_prey, jnp.array([33.0, 6.0]), ts, jnp.array([0.55, 0.028, 0.84, 0.026]))
    noise = np.exp(0.25 * rng.standard_normal((years, 2)))
    return (jnp.asarray(np.asarray(z) * noise),)


def predator_prey(z, t, theta):
    u, v = z[0], z[1]
    alpha, beta, gamma, delta = theta
    return jnp.stack([(alpha - beta * v) * u, (-gamma + delta * u) * v])


@example("ode", "a plate of the years, index", populations, 7)
def ode(y, batch=None):
    from jax.experimental.ode import odeint

    z_init = numpyro.sample("z_init", dist.LogNormal(jnp.log(10), 1).expand([2]))
    prior = dist.TruncatedNormal(
        low=0.0, loc=jnp.array([1.0, 0.05, 1.0, 0.05]), scale=jnp.array([0.2, 0.01, 0.2, 0.01])
    )
    theta = numpyro.sample("theta", prior)
    sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1).expand([2]))
    z = odeint(predator_prey, z_init, jnp.arange(float(len(y))), theta, rtol=1e-6, atol=1e-5)
    with numpyro.plate("years", len(y), subsample_size=batch) as i:
        numpyro.sample("y", dist.LogNormal(jnp.log(z[i]), sigma).to_event(1), obs=y[i])


# Discrete latent variables


def annotations(rng, items=300):
    true = rng.integers(0, 3, items)
    wrong = rng.uniform(size=(items, 5)) < [0.1, 0.2, 0.2, 0.3, 0.3]
    seen = np.where(wrong, rng.integers(0, 3, (items, 5)), true[:, None])
    return jnp.arange(5), jnp.asarray(seen)


def dawid_skene_prior():
    with numpyro.plate("annotator", 5, dim=-2), numpyro.plate("class", 3):
        # so that the classes are told apart
        beta = numpyro.sample("beta", dist.Dirichlet(jnp.ones(3) + 5 * jnp.eye(3)))
    return beta, numpyro.sample("pi", dist.Dirichlet(jnp.ones(3)))


def dawid_skene_enumerated(positions, annotations, batch=None):
    beta, pi = dawid_skene_prior()
    with numpyro.plate("item", len(annotations), subsample_size=batch, dim=-2) as i:
        c = numpyro.sample("c", dist.Categorical(pi), infer={"enumerate": "parallel"})
        with numpyro.plate("position", 5):
            numpyro.sample("y", dist.Categorical(Vindex(beta)[positions, c, :]), obs=annotations[i])


def dawid_skene_summed(positions, annotations, batch=None):
    beta, pi = dawid_skene_prior()
    with numpyro.plate("item", len(annotations), subsample_size=batch) as i:
        # log p(y, c), shape (items, positions, classes)
        given = jnp.log(beta)[positions, :, annotations[i]]
        numpyro.factor("y", jnp.logaddexp.reduce(jnp.log(pi) + given.sum(1), axis=-1))


example(
    "annotation, Dawid-Skene", "plate has `subsample_size`, index", annotations, 60,
    dawid_skene_summed,
)(dawid_skene_enumerated)  # fmt: skip
example(
    "annotation, Dawid-Skene", "as the message says: classes summed out", annotations, 60
)(dawid_skene_summed)  # fmt: skip


def mixed(rng, rows=1_000):
    which = rng.uniform(size=rows) < 0.4
    return (jnp.asarray(np.where(which, -2, 2) + rng.standard_normal(rows)),)


def mixture_prior():
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.full(2, 0.5)))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 2.0))
    locs = numpyro.sample("locs", dist.Normal(jnp.array([-1.0, 1.0]), 10.0).to_event(1))
    return weights, locs, scale


def mixture_summed(y, batch=None):
    weights, locs, scale = mixture_prior()
    with numpyro.plate("data", len(y), subsample_size=batch) as i:
        law = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, scale))
        numpyro.sample("obs", law, obs=y[i])


@example("gmm", "plate has `subsample_size`, index", mixed, 100, mixture_summed)
def mixture_enumerated(y, batch=None):
    weights, locs, scale = mixture_prior()
    with numpyro.plate("data", len(y), subsample_size=batch) as i:
        assignment = numpyro.sample("assignment", dist.Categorical(weights))
        numpyro.sample("obs", dist.Normal(locs[assignment], scale), obs=y[i])


example("gmm", "as the message says: `MixtureSameFamily`", mixed, 100)(mixture_summed)


def captures(rng, animals=200, times=6):
    alive = np.cumprod(rng.uniform(size=(animals, times)) < [1.0] + [0.7] * (times - 1), axis=1)
    seen = alive * (rng.uniform(size=(animals, times)) < 0.6)
    return (jnp.asarray(seen * (np.arange(times) > 0) + (np.arange(times) == 0), dtype=int),)


@example("capture_recapture, model 1", "plate in `scan` has `subsample_size`", captures, 50)
def capture_recapture(history, batch=None):
    phi = numpyro.sample("phi", dist.Uniform(0.0, 1.0))
    rho = numpyro.sample("rho", dist.Uniform(0.0, 1.0))

    def transition(carry, y):
        seen, z = carry
        with numpyro.plate("animals", len(history), subsample_size=batch, dim=-1) as i:
            with mask(mask=seen[i]):
                alive = dist.util.clamp_probs(seen[i] * phi * z[i] + (1 - seen[i]))
                z = numpyro.sample("z", dist.Bernoulli(alive), infer={"enumerate": "parallel"})
                law = dist.Bernoulli(dist.util.clamp_probs(rho * z))
                numpyro.sample("y", law, obs=y[i])
        return (seen | y.astype(bool), z), None

    start = history[:, 0].astype(bool), jnp.ones(len(history), int)
    scan(transition, start, history[:, 1:].T)


# Missing and censored


def lifetimes(rng, rows=500):
    t = rng.exponential(20.0, rows)
    return jnp.asarray(np.minimum(t, 25.0)), jnp.asarray(t > 25.0)


@example("censoring", "plate has `subsample_size`, index", lifetimes, 100)
def censoring(times, is_censored, batch=None):
    scale = numpyro.sample("scale", dist.Gamma(2, 0.1))
    with numpyro.plate("data", len(times), subsample_size=batch) as i:
        law = dist.Exponential(1 / scale)
        with mask(mask=~is_censored[i]):
            numpyro.sample("obs", law, obs=times[i])
        with mask(mask=is_censored[i]):
            numpyro.factor("censored", -times[i] / scale)


@example("censoring", "the same by `RightCensoredDistribution`", lifetimes, 100, censoring)
def right_censored(times, is_censored, batch=None):
    scale = numpyro.sample("scale", dist.Gamma(2, 0.1))
    with numpyro.plate("data", len(times), subsample_size=batch) as i:
        law = dist.RightCensoredDistribution(dist.Exponential(1 / scale), is_censored[i])
        numpyro.sample("obs", law, obs=times[i])


def above_zero(rng, rows=1_000):
    y = 0.5 + rng.standard_normal(3 * rows)
    return (jnp.asarray(y[y > 0][:rows]),)


@example("truncated_distributions", "plate has `subsample_size`, index", above_zero, 100)
def truncated(y, batch=None):
    loc = numpyro.sample("loc", dist.Normal())
    scale = numpyro.sample("scale", dist.LogNormal(0, 0.5))
    with numpyro.plate("data", len(y), subsample_size=batch) as i:
        numpyro.sample("obs", dist.TruncatedNormal(loc, scale, low=0.0), obs=y[i])


def passengers(rng, rows=300):
    sex, x = rng.integers(0, 2, rows), rng.standard_normal(rows)
    age = 0.5 * x + 0.8 * rng.standard_normal(rows)
    survived = rng.binomial(1, expit(1.0 - 2 * sex - 0.5 * age))
    age[rng.uniform(size=rows) < 0.1] = np.nan
    return jnp.asarray(age), jnp.asarray(sex), jnp.asarray(survived)


def imputation_model(age, sex, survived, missing, batch):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("missing", len(missing)):
        imputed = numpyro.sample("imputed", dist.Normal(mu, sigma))
    age = age.at[missing].set(imputed)
    a, b = numpyro.sample("a", dist.Normal(0, 1)), numpyro.sample("b", dist.Normal(0, 1))
    b_sex = numpyro.sample("b_sex", dist.Normal(0, 1).expand([2]).to_event(1))
    seen = jnp.ones(len(age)).at[missing].set(0.0)
    with numpyro.plate("rows", len(age), subsample_size=batch) as i:
        with mask(mask=seen[i] > 0):
            numpyro.sample("age", dist.Normal(mu, sigma), obs=age[i])
        logits = a + b_sex[sex[i]] + b * age[i]
        numpyro.sample("survived", dist.Bernoulli(logits=logits), obs=survived[i])


@example("bayesian_imputation", "plate has `subsample_size`, index", passengers, 60)
def imputation(age, sex, survived, batch=None):
    missing = np.flatnonzero(np.isnan(age))
    imputation_model(age, sex, survived, missing, batch)


def passengers_found(rng):
    age, sex, survived = passengers(rng)
    missing = np.flatnonzero(np.isnan(age))
    return jnp.nan_to_num(age), sex, survived, jnp.asarray(missing)


@example("bayesian_imputation", "missing rows found before, finite values there",
         passengers_found, 60)  # fmt: skip
def imputation_found(age, sex, survived, missing, batch=None):
    imputation_model(age, sex, survived, missing, batch)


# Processes and topics


def curve(rng, rows=500):
    x = np.linspace(-1, 1, rows)
    return jnp.asarray(x), jnp.asarray(np.sin(5 * x) + 0.3 * rng.standard_normal(rows))


@example("hsgp", "basis of all rows, plate has `subsample_size`, index", curve, 100)
def hsgp(x, y, batch=None):
    alpha = numpyro.sample("alpha", dist.HalfNormal(1.0))
    length = numpyro.sample("length", dist.InverseGamma(10.0, 2.0))
    w = jnp.arange(1, 11) * jnp.pi / 2 / 1.5
    phi = jnp.sin(w * (1.5 + x[:, None])) / jnp.sqrt(1.5)
    density = alpha * jnp.sqrt(2 * jnp.pi) * length * jnp.exp(-((length * w) ** 2) / 2)
    with numpyro.plate("basis", 10):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
    f = numpyro.deterministic("f", phi @ (jnp.sqrt(density) * beta))
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.5))
    with numpyro.plate("obs", len(y), subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(f[i], sigma), obs=y[i])


def gp_law(x, size):
    variance, length, noise = (
        numpyro.sample(k, dist.LogNormal(0.0, 1.0)) for k in ("variance", "length", "noise")
    )
    kernel = variance * jnp.exp(-(((x[:, None] - x) / length) ** 2) / 2)
    return dist.MultivariateNormal(jnp.zeros(size), kernel + (noise + 1e-4) * jnp.eye(size))


def gp_of_all(x, y, batch=None):
    numpyro.sample("y", gp_law(x, len(y)), obs=y)


@example("gp", "a plate around the process, index", partial(curve, rows=200), 50, gp_of_all)
def gp(x, y, batch=None):
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        x, y = x[i], y[i]
    numpyro.sample("y", gp_law(x, len(y)), obs=y)


@example("gp", "the process inside the plate", partial(curve, rows=200), 50, gp_of_all)
def gp_inside(x, y, batch=None):
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        numpyro.sample("y", gp_law(x[i], batch), obs=y[i])


def documents(rng, count=200):
    return (jnp.asarray(rng.poisson(1.0, (count, 30))),)


class Decoder(linen.Module):
    @linen.compact
    def __call__(self, theta, is_training):
        logits = linen.Dense(30, use_bias=False)(theta)
        return linen.BatchNorm(
            use_bias=False, use_scale=False, use_running_average=not is_training
        )(logits)


@example("prodlda", "nothing", documents, 50)
def prodlda(docs, batch=None):
    decoder = flax_module(
        "decoder", Decoder(), input_shape=(1, 3), mutable=["batch_stats"], is_training=True
    )
    with numpyro.plate("documents", len(docs), subsample_size=batch):
        counts = numpyro.subsample(docs, event_dim=1)
        theta = numpyro.sample("theta", dist.Dirichlet(jnp.ones(3)))
        logits = decoder(theta, True)
        numpyro.sample("obs", dist.Multinomial(counts.sum(-1), logits=logits), obs=counts)


# Small ones


@example("minipyro", "plate has `subsample_size`, index",
         lambda rng: (jnp.asarray(3 + rng.standard_normal(100)),), 20)  # fmt: skip
def minipyro(data, batch=None):
    loc = numpyro.sample("loc", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("data", len(data), subsample_size=batch) as i:
        numpyro.sample("obs", dist.Normal(loc, scale), obs=data[i])


@example("minipyro", "`numpyro.param` kept, as for SVI",
         lambda rng: (jnp.asarray(3 + rng.standard_normal(100)),), 20, minipyro)  # fmt: skip
def minipyro_param(data, batch=None):
    loc = numpyro.sample("loc", dist.Normal(0, 1))
    scale = numpyro.param("scale", 1.0, constraint=constraints.positive)
    with numpyro.plate("data", len(data), subsample_size=batch) as i:
        numpyro.sample("obs", dist.Normal(loc, scale), obs=data[i])


def election(rng, rows=400):
    x = rng.standard_normal(rows)
    return jnp.asarray(x), jnp.asarray(rng.poisson(np.exp(0.3 + 0.5 * x)))


@example("model_rendering: Poisson with a plate of its own", "plate has `subsample_size`, index",
         election, 100)  # fmt: skip
def rendered(x, y, batch=None):
    with numpyro.plate("coefficients", 2):
        b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("N", len(y), subsample_size=batch) as i:
        rate = numpyro.deterministic("rate", jnp.exp(b[0] + b[1] * x[i]))
        numpyro.sample("y", dist.Poisson(rate), obs=y[i])
