# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What cases share: how they are listed and run, data, models, and what the right draws are."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from verdicts import Right, moments_of

from numpyro_sgmcmc import SGLD, CCAdL

#: Of every case that does not need others.
N, BATCH = 400, 100

#: Of SGLD: variances are 3 % too wide, and a chain forgets in 60 steps.
STEP_SIZE = 4e-5


class Case(NamedTuple):
    """
    - **subject** - the heading under which it is listed.
    - **title** - what is awkward about it.
    - **function** - from :func:`given` or :func:`tuned` to draws and the right ones, or to a word.
    - **kernel** - which of the two.

    """

    subject: str
    title: str
    function: Callable[[Callable], Any]
    kernel: str

    @property
    def name(self) -> str:
        return f"{self.subject}: {self.title}{', tuned' if self.kernel == 'tuned' else ''}"


CASES: list[Case] = []


def case(subject: str, title: str, kernels: str = "given") -> Callable:
    """Lists a function as a case, once for each kernel."""

    def listed(function: Callable) -> Callable:
        CASES.extend(Case(subject, title, function, kernel) for kernel in kernels.split())
        return function

    return listed


def run(kernel, *args, samples=300, chains=4, init_params=None, options=None, **kwargs):
    """Four chains side by side, nothing shown."""
    mcmc = MCMC(
        kernel,
        **(
            {
                "num_warmup": 50,
                "num_samples": samples,
                "num_chains": chains,
                "chain_method": "vectorized",
                "progress_bar": False,
            }
            | (options or {})
        ),
    )
    mcmc.run(random.key(1), *args, init_params=init_params, **kwargs)
    return mcmc


def given(model, *args, step_size=STEP_SIZE, settings=None, **kwargs):
    """SGLD with a step size whose errors are below those of chance."""
    kernel = SGLD(model, step_size, **({"steps_per_sample": 25} | (settings or {})))
    return run(kernel, *args, **kwargs)


def tuned(model, *args, settings=None, **kwargs):
    """CCAdL with nothing set."""
    kernel = CCAdL(model, progress_bar=False, **(settings or {}))
    return run(kernel, *args, **kwargs)


def never(mcmc):
    """A run that should have been refused."""
    return "WRONG, SILENT: sampled"


RUNNERS = {"given": given, "tuned": tuned}


def nuts(model, *args, names=None, **kwargs) -> Right:
    """Of a model of all rows, written without a minibatch."""
    mcmc = MCMC(
        NUTS(model), num_warmup=500, num_samples=2_000, num_chains=2,
        chain_method="sequential", progress_bar=False,
    )  # fmt: skip
    # full plates index as well, which NumPy's arrays cannot be by traced numbers
    args = jax.tree.map(jnp.asarray, args)
    mcmc.run(random.key(2), *args, **kwargs)
    draws = mcmc.get_samples(group_by_chain=True)
    return moments_of({k: draws[k] for k in names or draws})


def exact(x, y, weight=None, name="w") -> Right:
    """Regression with unit noise and standard normal coefficients; rows may have weights."""
    x, y = np.asarray(x, float), np.asarray(y, float).reshape(-1)
    weight = np.ones(len(y)) if weight is None else np.asarray(weight, float)
    covariance = np.linalg.inv((weight * x.T) @ x + np.eye(x.shape[1]))
    mean = covariance @ ((weight * x.T) @ y)
    return Right({name: mean}, {name: np.sqrt(np.diag(covariance))})


def exact_mean(y, weight=None) -> Right:
    """The mean of numbers with unit noise, standard normal before."""
    y = np.asarray(y, float).reshape(-1)
    found = exact(np.ones((len(y), 1)), y, weight, "mu")
    return found._replace(mean={"mu": found.mean["mu"][0]}, sd={"mu": found.sd["mu"][0]})


RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, 3)).astype(np.float32)
Y = (X @ [1.0, -1.0, 0.5] + RNG.standard_normal(N)).astype(np.float32)
LABELS = (X[:, 0] + RNG.logistic(size=N) > 0).astype(np.int32)
COUNTS = RNG.poisson(np.exp(0.5 * X[:, 0])).astype(np.int32)
CLASSES = np.argmax(X + RNG.gumbel(size=(N, 3)), axis=1).astype(np.int32)
TRIALS = np.full(N, 10, np.int32)
SUCCESSES = RNG.binomial(10, 0.3, N).astype(np.int32)
POSITIVE = RNG.gamma(2.0, 1.0, N).astype(np.float32)


def coefficients(size=3):
    return numpyro.sample("w", dist.Normal(0, 1).expand([size]).to_event(1))


def rows(size=N, batch=BATCH, **options):
    return numpyro.plate("rows", size, subsample_size=batch, **options)


def regression(x, y, batch=BATCH):
    w = coefficients(x.shape[1])
    with rows(x.shape[0], batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])


def logistic(x, y, batch=BATCH):
    w = coefficients(x.shape[1])
    with rows(x.shape[0], batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def mean_of(y, batch=BATCH):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with rows(len(y), batch) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


full = partial(partial, batch=None)  # of a model, for NUTS
