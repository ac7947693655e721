# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Hessians of all rows for control variates of second order, by a Gauss-Newton matrix."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform
import pytest

from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.expansion import expanded
from numpyro_sgmcmc.tuning.find_reparam import non_centred

COMPILE_QUICKLY = True

N, D, GROUPS = 20_001, 14, 20
X = random.normal(random.key(0), (N, D))
Z = jnp.arange(N) % GROUPS
UNITS = 2.0 ** jnp.linspace(-15, 15, D)


def regression(x, y, bend=0.0):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", N, subsample_size=200) as i:
        eta = x[i] @ w
        numpyro.sample("y", dist.Normal(eta + bend * jnp.sin(eta), sigma), obs=y[i])


def units(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1 / UNITS).to_event(1))
    with numpyro.plate("rows", N, subsample_size=200) as i:
        numpyro.sample("y", dist.Normal((x[i] * UNITS) @ w, 1), obs=y[i])


def effects(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    group = numpyro.sample("group", dist.Normal(mu, tau).expand([GROUPS]).to_event(1))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=200) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w + group[Z[i]]), obs=y[i])


def target_of(model, **kwargs):
    y = (X[:, 0] + random.normal(random.key(1), (N,)) > 0).astype(jnp.float32)
    data = X, y
    target = Target(read_model(model, init_to_uniform, data, kwargs), data, kwargs)
    return non_centred(target)


def anchor_of(target, units=1.0):
    """Away from the mode, with coefficients in these units."""
    rng = np.random.default_rng(0)
    values = {k: jnp.asarray(rng.normal(size=x.shape)) / 5 for k, x in target.model.latents.items()}
    return target.anchor(values | {"w": values["w"] / units})


@pytest.mark.nightly
@pytest.mark.parametrize("model", [regression, units, effects])
def test_the_hessian_of_all_rows_for_eight_passes(model):
    target = target_of(model)
    anchor = anchor_of(target, UNITS if model is units else 1.0)
    found, cost = expanded(target, anchor, worth=10.0)
    assert found is not None and cost == 8
    right = np.asarray(target.anchor(anchor.values, order=2).hessian)
    scale = np.abs(np.diag(right)) ** -0.5
    off = scale[:, None] * (np.asarray(found.hessian) - right) * scale
    assert np.abs(off).max() < 1e-3


@pytest.mark.nightly
def test_what_is_not_linear_takes_columns_if_these_pay():
    target = target_of(regression, bend=1.0)
    anchor = anchor_of(target)
    assert expanded(target, anchor, worth=7.0) == (None, 0.0)
    assert expanded(target, anchor, worth=10.0) == (None, 8.0)
    found, cost = expanded(target, anchor, worth=100.0)
    assert cost == 8 + 2 * (D + 1)
    right = target.anchor(anchor.values, order=2).hessian
    np.testing.assert_allclose(found.hessian, right, rtol=1e-3, atol=1.0)
