# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Optima of a posterior with many of them, one for each chain, by Adam on minibatches."""

from collections.abc import Callable
from dataclasses import dataclass
import math
from typing import NamedTuple
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import optax

from numpyro_sgmcmc.target.metric import IdentityMetric
from numpyro_sgmcmc.target.model import Values
from numpyro_sgmcmc.target.target import Target

#: Steps whose mean potential is that of a member.
_LAST = 100


@dataclass(frozen=True)
class Ensemble:
    """
    How chains come to optima of their own, the argument ``start`` of the kernels.

    ``start="ensemble"`` is short for ``start=Ensemble()``. Each chain descends from an initial
    value of its own, by Adam on minibatches with a learning rate that falls to zero, and starts
    where it ends. For posteriors with very many modes, those of networks, of which no chain could
    find more than a few; what is pooled is predictions.

    :param int steps: number of steps, each on a minibatch.
    :param float learning_rate: of Adam in the first step.
    :param float energy_variance: where no step size is given, it is the largest at which the
        variance of the energy in a step is so much for each parameter. 0.5 is far from the
        5e-4 of a sampler without bias: chains then go further, and the law of the weights is
        another. It has been tried on two data sets, and other values have not been compared.
    :raises ValueError: if an argument is not positive, naming it.

    **References:**

    1. *Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles*,
       Balaji Lakshminarayanan, Alexander Pritzel and Charles Blundell (2017).
    2. *Microcanonical Langevin Ensembles: Advancing the Sampling of Bayesian Neural Networks*,
       Emanuel Sommer, Jakob Robnik, Giorgi Nozadze, Uros Seljak and David Ruegamer (2025).

    **Example:**

    .. doctest::

        >>> from numpyro_sgmcmc import Ensemble
        >>> Ensemble(steps=1_000)
        Ensemble(steps=1000, learning_rate=0.003, energy_variance=0.5)
    """

    steps: int = 10_000
    learning_rate: float = 3e-3
    energy_variance: float = 0.5

    def __post_init__(self) -> None:
        for name in ("steps", "learning_rate", "energy_variance"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (math.isfinite(value) and value > 0):
                raise ValueError(f"`{name}` of an ensemble must be positive; got {value!r}.")
        if not isinstance(self.steps, int):
            raise ValueError(f"`steps` of an ensemble must be a whole number; got {self.steps!r}.")


class Members(NamedTuple):
    """
    - **values** - unconstrained values of the latent sites, with a leading axis for the members.
    - **potentials** - the mean minibatch potential at the end of each.
    """

    values: Values
    potentials: np.ndarray


def checked_start(start: object) -> Ensemble | None:
    """
    :raises ValueError: if it is neither None nor a way to start.
    """
    if start is None or isinstance(start, Ensemble):
        return start
    if start == "ensemble":
        return Ensemble()
    raise ValueError(f"`start` must be None, 'ensemble' or an `Ensemble`; got {start!r}.")


def find_members(
    target: Target,
    starts: Values,
    rng_keys: Array,
    ensemble: Ensemble,
    compiled: Callable,
) -> Members:
    """
    An optimum for each chain, all in one program. Where a descent has not ended at finite values,
    another member takes its place, and a warning says so.

    :param starts: unconstrained values, with a leading axis for the members.
    :param rng_keys: for the minibatches of each.
    :param compiled: keeps the program, :meth:`~numpyro_sgmcmc.kernels.context.Context.compiled`.
    :raises ValueError: if none has.
    """

    def run(target: Target, starts: Values, rng_keys: Array) -> tuple[Values, Array]:
        potential = target.potential(IdentityMetric())
        schedule = optax.cosine_decay_schedule(ensemble.learning_rate, ensemble.steps)
        optimiser = optax.adam(schedule)  # the model's prior is what decays weights

        def one(values: Values, key: Array) -> tuple[Values, Array]:
            def step(carry: tuple, i: Array) -> tuple[tuple, Array]:
                values, state = carry
                rows, own = target.rows(key, i), random.fold_in(key, i)
                value, slope = target.mean(potential.value_and_gradient(values, rows, own))
                updates, state = optimiser.update(slope, state, values)
                return (optax.apply_updates(values, updates), state), value

            carry = values, optimiser.init(values)
            (values, _), found = lax.scan(step, carry, jnp.arange(ensemble.steps))
            return values, found[-_LAST:].mean()

        return jax.vmap(one)(starts, rng_keys)

    values, potentials = compiled("ensemble", run, target, ensemble)(starts, rng_keys)
    leaves = [np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(values)]
    finite = np.isfinite(np.concatenate(leaves, axis=1)).all(axis=1) & np.isfinite(potentials)
    if not finite.any():
        raise ValueError(
            f"None of {len(finite)} members of the ensemble has ended at finite values: give a"
            f" `start=Ensemble(learning_rate=...)` below {ensemble.learning_rate:g}, standardise"
            " the data, or give `init_strategy`."
        )
    if not finite.all():
        lost = int((~finite).sum())
        warnings.warn(
            f"{lost} of {len(finite)} members of the ensemble have not ended at finite values, and"
            f" were dropped: their chains start at other members. A learning rate less than"
            f" {ensemble.learning_rate:g}, `start=Ensemble(learning_rate=...)`, may keep them.",
            stacklevel=2,
        )
        good = np.flatnonzero(finite)
        instead = np.where(finite, np.arange(len(finite)), np.resize(good, len(finite)))
        values = jax.tree.map(lambda x: x[instead], values)
        potentials = potentials[instead]
    return Members(values, np.asarray(potentials))
