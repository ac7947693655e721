# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Models that many tests have; ``partial`` gives them another minibatch or another prior."""

import numpyro
import numpyro.distributions as dist


def linear(x, y, batch_size=100, prior=1.0):
    """Coefficients, with noise of variance 1."""
    w = numpyro.sample("w", dist.Normal(0, prior).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])


def logistic(x, y, batch_size=100, prior=5.0):
    w = numpyro.sample("w", dist.Normal(0, prior).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def mean(y, batch_size=10, prior=10.0):
    """The mean of rows of variance 1."""
    mu = numpyro.sample("mu", dist.Normal(0, prior))
    with numpyro.plate("rows", y.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def means(y, batch_size=10, prior=10.0):
    """The mean of each column."""
    mu = numpyro.sample("mu", dist.Normal(0, prior).expand([y.shape[1]]).to_event(1))
    with numpyro.plate("rows", y.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])
