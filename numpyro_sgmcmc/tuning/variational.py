# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The centre of a posterior with very many parameters, by variational inference."""

from collections.abc import Callable
from typing import Any

from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal
import optax

from numpyro_sgmcmc.posterior.checks.exceptions import one_at_a_time
from numpyro_sgmcmc.posterior.metric import DiagonalMetric, IdentityMetric
from numpyro_sgmcmc.posterior.model import with_rows
from numpyro_sgmcmc.posterior.potential import over_all_data
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.gaussian import Gaussian, are_modes

_CENTER_STARTS = 6  #: number of starts of the search
_CENTER_STEPS = 2_000  #: number of steps of stochastic variational inference
_LEARNING_RATE = 0.05  #: learning rate of its optimiser


def find_center(target: Target, rng_key: Array, init_strategy: Callable) -> Gaussian:
    """
    Find the closest Gaussian with independent coordinates by variational inference.

    It solves

    .. math::

        \\min_{c, s} \\; \\mathrm{E}_{\\theta \\sim N(c, s^2)} [U(\\theta)]
            - \\sum_j \\log s_j,

    by 2,000 steps of Adam on minibatches, with a learning rate that falls from 0.05 to 0. Six
    searches start at different points, because some models have poor local optima, and the best one
    counts. If another search is about as good, with a barrier in between, the posterior has several
    modes.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param init_strategy: initial values of the searches, a per-site initialization function.
    :raises ValueError: if no search ends at finite values.

    **References:**

    1. *Automatic Differentiation Variational Inference*, Alp Kucukelbir, Dustin Tran,
       Rajesh Ranganath, Andrew Gelman and David M. Blei (2017).
    """
    schedule = optax.cosine_decay_schedule(_LEARNING_RATE, _CENTER_STEPS)

    def run(target: Target, rng_key: Array) -> tuple[Array, ...]:
        start_key, rows_key = random.split(rng_key)

        def one(init_key: Array) -> tuple[Array, Array, Array]:
            # all in one program, because `svi.init` alone compiles many small programs
            model = with_rows(target.model)
            guide = AutoDiagonalNormal(model, init_loc_fn=init_strategy, init_scale=0.01)
            mean = optax.stateless(lambda gradient, _: target.mean(gradient))
            svi = SVI(model, guide, optax.chain(mean, optax.adam(schedule)), Trace_ELBO())

            def step(state: Any, i: Array) -> tuple[Any, Array]:
                rows = target.rows(rows_key, i)
                return svi.update(state, rows, *target.args, **target.kwargs)

            with one_at_a_time:
                state = svi.init(init_key, target.rows(rows_key), *target.args, **target.kwargs)
                state, losses = lax.scan(step, state, jnp.arange(_CENTER_STEPS))
                posterior = guide.get_posterior(svi.get_params(state))
            loss = target.mean(losses[-_CENTER_STEPS // 10 :].mean())
            return posterior.loc, posterior.scale, loss

        # with equal rows, so that the losses can be compared
        starts = random.split(start_key, _CENTER_STARTS)
        centers, scales, losses = target.for_each(one, starts)
        best = jnp.nanargmin(jnp.where(jnp.isfinite(losses), losses, jnp.nan))
        energies = _energies_between(target, centers, best)
        return centers[best], scales[best], losses[best], energies

    center, scale, loss, energies = target.compiled(run)(rng_key)
    if not (np.all(np.isfinite(center)) and np.isfinite(loss)):
        raise ValueError(
            "Tuning found no centre: variational inference with an AutoDiagonalNormal guide did not"
            " converge (the loss is not finite). Start it near the posterior with"
            " `init_strategy=init_to_value(...)`, standardise the data, or give `step_size` and"
            " `friction` yourself."
        )
    passes = _CENTER_STARTS * (_CENTER_STEPS * target.minibatch_share + 5)
    several = bool(are_modes(np.asarray(energies)).any())
    return Gaussian(DiagonalMetric(center, scale), passes, multimodal=several)


def _energies_between(target: Target, centers: Array, best: Array) -> Array:
    """The potential of all data on the way from the best centre to each other centre."""
    potential, view = target.potential(IdentityMetric()), target.model

    def at(point: Array) -> Array:
        values = target.unravel(point)
        whole = over_all_data(lambda rows: potential(values, rows, random.key(0)), view.plates)
        return target.mean(whole)

    way = jnp.linspace(0, 1, 5)[:, None, None]
    points = centers[best] + way * (centers - centers[best])
    return lax.map(at, points.reshape(-1, points.shape[-1])).reshape(5, -1)
