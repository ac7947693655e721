# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Posteriors of posteriordb with published moments of 10,000 draws: flat priors, raw units.

Magnusson, Torgander, Buerkner, Zhang, Carpenter and Vehtari: *posteriordb: Testing, Benchmarking
and Developing Bayesian Inference Algorithms* (2025).
"""

from functools import partial
import zlib

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from battery.posterior import posterior

SOURCE = "posteriordb"


def flat(name, size):
    return numpyro.sample(name, dist.ImproperUniform(constraints.real_vector, (), (size,)))


def flat_scale(name):
    return numpyro.sample(name, dist.ImproperUniform(constraints.positive, (), ()))


def columns(name, make):
    """Of the data of a posterior: the matrix of the regression, and what is to be explained."""

    def data(rng, folder):
        with np.load(folder / "posteriordb.npz", allow_pickle=True) as file:
            found = {
                key.rpartition("/")[2]: np.asarray(file[key], float)
                for key in file.files
                if key.startswith(f"{name}/data/")
            }
        return tuple(np.asarray(x, np.float32) for x in make(found))

    return data


def by_entry(draws, vector="beta"):
    """Stan's names."""
    found = {f"{vector}[{k + 1}]": draws[vector][..., k] for k in range(draws[vector].shape[-1])}
    return found | {name: x for name, x in draws.items() if name != vector}


def least_squares(x, y, batch=None):
    beta, sigma = flat("beta", x.shape[1]), flat_scale("sigma")
    with numpyro.plate("rows", x.shape[0], subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ beta, sigma), obs=y[i])


def with_cauchy_scale(x, y, batch=None):
    beta = flat("beta", x.shape[1])
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ beta, sigma), obs=y[i])


def ones_and(*rest):
    return np.column_stack([np.ones(len(rest[0])), *rest])


def regression(name, rows, make, model=least_squares, batch=100):
    """Once as it is, and once with every column in a unit of its own."""
    title = name.partition("-")[2]

    def units(number):
        return 10 ** np.random.default_rng(zlib.crc32(name.encode())).uniform(-4, 4, number)

    def rescaled(found):
        x, y = make(found)
        return x * units(x.shape[1]), y

    def in_old_units(draws):
        beta = draws["beta"]
        return by_entry(draws | {"beta": beta * units(beta.shape[-1])})

    for said, made, compared in (("", make, by_entry), (", rescaled", rescaled, in_old_units)):
        listed = posterior(
            title + said, SOURCE, rows, columns(name, made), batch=batch, compared=compared,
            reference=name,
        )  # fmt: skip
        listed(partial(model))


regression("earnings-earn_height", 1_192, lambda d: (ones_and(d["height"]), d["earn"]))
regression(
    "earnings-logearn_interaction",
    1_192,
    lambda d: (
        ones_and(d["height"], d["male"], d["height"] * d["male"]),
        np.log(d["earn"]),
    ),
)
regression(
    "kidiq-kidscore_momhsiq",
    434,
    lambda d: (ones_and(d["mom_hs"], d["mom_iq"]), d["kid_score"]),
    with_cauchy_scale,
)
regression(
    "kidiq-kidscore_interaction",
    434,
    lambda d: (ones_and(d["mom_hs"], d["mom_iq"], d["mom_hs"] * d["mom_iq"]), d["kid_score"]),
    with_cauchy_scale,
)
regression(
    "mesquite-mesquite",
    46,
    lambda d: (
        ones_and(
            *(d[k] for k in ("diam1", "diam2", "canopy_height", "total_height", "density", "group"))
        ),
        d["weight"],
    ),
    batch=10,
)
regression(
    "nes1972-nes",
    1_330,
    lambda d: (
        ones_and(
            d["real_ideo"], d["race_adj"], *(d["age_discrete"] == k for k in (2, 3, 4)),
            d["educ1"], d["gender"], d["income"],
        ),
        d["partyid7"],
    ),
)  # fmt: skip


@posterior(
    "kilpisjarvi", SOURCE, 62,
    columns(
        "kilpisjarvi_mod-kilpisjarvi",
        lambda d: (d["x"], d["y"], d["pmualpha"], d["psalpha"], d["pmubeta"], d["psbeta"]),
    ),
    batch=20, reference="kilpisjarvi_mod-kilpisjarvi",
)  # fmt: skip
def kilpisjarvi(x, y, mean_alpha, sd_alpha, mean_beta, sd_beta, batch=None):
    """Temperatures by calendar year: the intercept is two thousand years away."""
    alpha = numpyro.sample("alpha", dist.Normal(mean_alpha, sd_alpha))
    beta = numpyro.sample("beta", dist.Normal(mean_beta, sd_beta))
    sigma = flat_scale("sigma")
    with numpyro.plate("rows", x.shape[0], subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(alpha + beta * x[i], sigma), obs=y[i])


@posterior(
    "blr", SOURCE, 100, columns("sblrc-blr", lambda d: (d["X"], d["y"])), batch=20,
    compared=by_entry, reference="sblrc-blr",
)  # fmt: skip
def blr(x, y, batch=None):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(10))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ beta, sigma), obs=y[i])


@posterior(
    "diamonds", SOURCE, 5_000, columns("diamonds-diamonds", lambda d: (d["X"], d["Y"])),
    compared=lambda draws: by_entry(draws, "b"), reference="diamonds-diamonds",
)  # fmt: skip
def diamonds(x, y, batch=None):
    """24 columns that nearly depend on each other."""
    x = x[:, 1:] - x[:, 1:].mean(0)
    b = numpyro.sample("b", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    intercept = numpyro.sample("Intercept", dist.StudentT(3, 8, 10))
    sigma = numpyro.sample("sigma", dist.FoldedDistribution(dist.StudentT(3, 0, 10)))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(intercept + x[i] @ b, sigma), obs=y[i])


@posterior(
    "low_dim_gauss_mix", SOURCE, 1_000,
    columns("low_dim_gauss_mix-low_dim_gauss_mix", lambda d: (d["y"],)),
    compared=lambda draws: by_entry(by_entry(draws, "mu"), "sigma"),
    reference="low_dim_gauss_mix-low_dim_gauss_mix",
)  # fmt: skip
def low_dim_gauss_mix(y, batch=None):
    prior = dist.Normal(0, 2).expand([2]).to_event(1)
    mu = numpyro.sample("mu", dist.ImproperUniform(constraints.ordered_vector, (), (2,)))
    numpyro.factor("prior of mu", prior.log_prob(mu))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2).expand([2]).to_event(1))
    theta = numpyro.sample("theta", dist.Beta(5, 5))
    parts = dist.Categorical(probs=jnp.stack([theta, 1 - theta]))
    with numpyro.plate("rows", y.shape[0], subsample_size=batch) as i:
        numpyro.sample("y", dist.MixtureSameFamily(parts, dist.Normal(mu, sigma)), obs=y[i])
