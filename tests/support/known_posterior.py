# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A posterior that is known, sampled on one device, on several, or by several processes."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
from small_models import linear

from numpyro_sgmcmc import CCAdL

ROWS, BATCH = 960, 96
_RNG = np.random.default_rng(1)
X = _RNG.standard_normal((ROWS, 3)).astype(np.float32)
# in order, so that the devices hold rows that differ
Y = np.sort(X @ np.array([1.0, -1.0, 0.5]) + _RNG.standard_normal(ROWS)).astype(np.float32)
X = X[np.argsort(X @ np.array([1.0, -1.0, 0.5]))]
PRECISION = X.T.astype(float) @ X + np.eye(3)
COVARIANCE = np.linalg.inv(PRECISION)
MEAN = COVARIANCE @ (X.T.astype(float) @ Y)


model = partial(linear, batch_size=BATCH)


def sample(mesh, data, samples=300, run=MCMC, **options):
    """Draws of four chains, shape (chains, samples, 3), and the last state."""
    metric = COVARIANCE.astype(np.float32)
    kernel = CCAdL(model, 0.3, 2.0, metric=metric, steps_per_sample=4)
    mcmc = run(
        kernel,
        num_warmup=100,
        num_samples=samples,
        num_chains=4,
        chain_method="vectorized",
        jit_model_args=True,
        progress_bar=False,
        **options,
    )
    start = {"w": jnp.tile(jnp.asarray(MEAN, jnp.float32), (4, 1))}
    mcmc.run(random.key(2), *data, init_params=start)
    return np.asarray(jax.device_get(mcmc.get_samples(True)["w"])), mcmc.last_state
