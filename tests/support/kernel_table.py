# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""One table of all kernels, and a small model they all can sample: shared by the tests."""

from functools import cache, partial
import math

from jax import random
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro.infer.initialization import init_to_value

from numpyro_sgmcmc import (
    AMAGOLD,
    PSGLD,
    SGFS,
    SGHMC,
    SGLD,
    SGMCLMC,
    SGNHT,
    SMSUBU,
    CCAdL,
    NoiseEstimate,
    Replicas,
)

momentum = {"step_size": 3e-3, "friction": 30.0}


@cache
def tuning():
    """Found once: with a dense metric and a control variate."""
    return CCAdL(model, progress_bar=False).tune(random.key(0), X, Y)


def tuned(model, **options):
    return CCAdL(model, tuning=tuning(), **({"steps_per_sample": 1} | options))


KERNELS = {
    "SGLD": partial(SGLD, step_size=1e-4),
    "SGLD replicas": partial(SGLD, step_size=1e-4, replicas=Replicas([1, 2, 4])),
    "SGLD epochs": partial(SGLD, step_size=1e-4, subsampling="epochs"),
    "SGLD modified": partial(
        SGLD, step_size=1e-4, modified=True, noise=NoiseEstimate("low_rank", rank=2, window=5)
    ),
    "SGHMC": partial(
        SGHMC,
        noise_variance={"scale": 10.0, "w": np.ones(3)},
        resample_momentum=7,
        **momentum,
    ),
    "SGHMC estimated": partial(
        SGHMC, integrator="baoab", noise_variance="estimated", step_size=3e-3, friction=100.0
    ),
    "SGNHT": partial(SGNHT, thermostats="site", **momentum),
    "CCAdL": partial(CCAdL, **momentum),
    "CCAdL euler": partial(
        CCAdL,
        integrator="euler",
        noise=NoiseEstimate("full", window=math.inf),
        subsampling="with_replacement",
        **momentum,
    ),
    "CCAdL tuned": tuned,
    "CCAdL matrix free": partial(CCAdL, noise="matrix_free", **momentum),
    "PSGLD": partial(PSGLD, step_size=1e-3),
    "SGFS": partial(SGFS, step_size=1e-4, noise=NoiseEstimate("diagonal", "two_cotangents")),
    "SMSUBU": partial(SMSUBU, **momentum),
    "SGMCLMC": partial(SGMCLMC, noise="diagonal", **momentum),
    "AMAGOLD": partial(AMAGOLD, **momentum),
}

RNG = np.random.default_rng(0)
X = RNG.standard_normal((80, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -1.0, 0.5]) + RNG.standard_normal(80)).astype(np.float32)


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    numpyro.deterministic("precision", scale**-2)
    with numpyro.plate("rows", x.shape[0], subsample_size=20) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, scale), obs=y[i])


# Close to the posterior, for steps of a useful size from the first one on.
CENTRE = init_to_value(values={"w": np.array([1.0, -1.0, 0.5]), "scale": 1.0})


def make(name, num_warmup=3, num_samples=6, progress_bar=False, options=None, **mcmc_options):
    kernel = KERNELS[name](model, **({"init_strategy": CENTRE} | (options or {})))
    return MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        progress_bar=progress_bar,
        **mcmc_options,
    )


def run(name, key=None, extra_fields=(), init_params=None, **options):
    mcmc = make(name, **options)
    mcmc.run(
        random.key(0) if key is None else key,
        X,
        Y,
        extra_fields=extra_fields,
        init_params=init_params,
    )
    return mcmc
