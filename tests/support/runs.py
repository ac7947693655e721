# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Runs of ``MCMC`` and targets, as most tests have them."""

from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC, NUTS, init_to_uniform

from numpyro_sgmcmc import full_data
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.numpyro_private import view_of
from numpyro_sgmcmc.posterior.target import Target


def run_mcmc(
    kernel, *args, key=0, warmup=100, samples=500, chains=1, start=None, fields=(), sampler=MCMC,
    **options,
):  # fmt: skip
    """
    A run without a bar, of chains side by side where there are several.

    :param args: of the model.
    :param start: its ``init_params``.
    :param fields: its ``extra_fields``.
    :param sampler: ``MCMC``, or another class with its arguments; ``options`` are further ones.
    """
    options = {"progress_bar": False, "num_chains": chains} | options
    if chains > 1:
        options = {"chain_method": "vectorized"} | options
    mcmc = sampler(kernel, num_warmup=warmup, num_samples=samples, **options)
    mcmc.run(random.key(key), *args, init_params=start, extra_fields=fields)
    return mcmc


def go_on(mcmc, *args):
    """The same run, from its last state."""
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, *args)
    return mcmc


def with_draws(model, args, values, **settings):
    """A run that has these draws, shape (chains, draws, ...)."""
    arrays = (jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in args)
    mcmc = run_mcmc(NUTS(full_data(model)), *arrays, warmup=1, samples=1)
    values = {name: jnp.asarray(x, jnp.float32) for name, x in values.items()}
    view = view_of(mcmc, model, values, args, {}, settings)
    view.num_chains, view.num_samples = next(iter(values.values())).shape[:2]
    return view


def target_of(model, *args):
    return Target(read_model(model, init_to_uniform, args, {}), args, {})
