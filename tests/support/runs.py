# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Runs of ``MCMC``, as most tests have them."""

from jax import random
from numpyro.infer import MCMC


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
