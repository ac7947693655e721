# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Checks of the structure of groups: of paths, and of hidden Markov chains."""

from typing import Any

from jax import Array, random
import jax.numpy as jnp

from numpyro_sgmcmc.posterior.local_latents import SEEN
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.potential import over_all_data
from numpyro_sgmcmc.posterior.target import Target


def check_structure(target: Target, values: Values) -> None:
    """
    Check that every group has the structure of its plate.

    Its latent values depend on each other as in the first groups, and a factor depends on the
    hidden states of two neighbouring times at most.

    :param target: the model with its data, on each of the devices that they are spread over.
    :param values: unconstrained values of the other sites.
    :raises ValueError: if a group has another structure.
    """
    paths, hidden_states = target.model.paths, target.model.hidden_states
    names = paths.keys() | hidden_states.keys()
    if not names:
        return

    def run(target: Target, values: Values) -> dict[str, Array]:
        potential = target.potential(IdentityMetric())

        def of_chunk(rows: Any) -> dict[str, Array]:
            terms = potential.with_row_terms(values, rows, random.key(0))[1]
            return {name: jnp.sum(terms[name]) for name in names}

        return target.mean(over_all_data(of_chunk, target.model.plates))

    there = target._replace(model=target.model.with_rule("structure"))
    found = {name: round(float(number)) for name, number in there.compiled(run)(values).items()}
    for name, number in found.items():
        if number and name in hidden_states:
            raise ValueError(
                f"The discrete sites in a `scan` ({', '.join(hidden_states[name].names)}) are no"
                f" Markov chain in groups of the plate '{name}', at least {number:,} of them: a"
                " site depends on a state two or more steps back, on a later state, or stands after"
                " the `scan`. Put all observations into its body, with a mask at times without one."
                " If a state depends on the last two, make the pair the state."
            )
        if number:
            raise ValueError(
                f"Groups of the plate '{name}', {number:,} in all, have latent values"
                f" that depend on others than in the first {SEEN} groups, where each depends on"
                f" the {paths[name].form.width} before and after it alone. Their integrals would"
                " be wrong. Order the groups so that one of each kind is among the first"
                f" {SEEN}; or give groups of other kinds a plate of their own."
            )
