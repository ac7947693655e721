# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What a tuning says of larger minibatches."""

from jax import random
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import CCAdL

ROWS, COLUMNS = 20_000, 8


def model(x, y, size):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([COLUMNS]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def tuned(size, **options):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, COLUMNS), np.float32)
    y = rng.random(ROWS) < 1 / (1 + np.exp(-x[:, 0]))
    return CCAdL(model, progress_bar=False, **options).tune(random.key(0), x, y, size)


@pytest.mark.nightly
@pytest.mark.parametrize("friction", [None, pytest.param(4.0, marks=pytest.mark.nightly)])
def test_larger_minibatches_need_the_promised_steps(friction):
    few = tuned(50, gradient="minibatch", friction=friction)
    factor, steps = few.larger
    assert factor > 4
    assert few.steps_per_sample > 2 * steps
    assert f"{factor} times as many rows would need {steps} steps per sample" in str(few)
    many = tuned(50 * factor, gradient="minibatch", friction=friction)
    assert abs(many.steps_per_sample - steps) <= 0.25 * steps
    assert "larger minibatches" not in str(many)


@pytest.mark.nightly
def test_small_noise_needs_no_larger_minibatches():
    assert tuned(500).larger[0] == 1
