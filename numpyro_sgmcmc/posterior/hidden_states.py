# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Sums over the hidden Markov chains of groups.

A group has discrete states :math:`s_1, \\dots, s_T`, each of which depends on the one before it
alone. With :math:`f_t(s_{t-1}, s_t)` for the factor of time :math:`t`, of the transition and of the
observations there,

.. math:: p(y_g \\mid \\theta) = \\sum_{s_1, \\dots, s_T} \\prod_t f_t(s_{t-1}, s_t) ,

which the forward recursion finds in :math:`T K^2` products for :math:`K` states,

.. math:: a_t(j) = \\sum_i a_{t-1}(i) \\, f_t(i, j) .

A model gives no factor as a function of two states, but all factors at given states. States that
alternate between :math:`a` and :math:`b` give :math:`f_t(a, b)` at every second time and
:math:`f_t(b, a)` at the others. So :math:`K^2` evaluations of the model give all factors of all
times.

**References:**

1. *A Maximization Technique Occurring in the Statistical Analysis of Probabilistic Functions of
   Markov Chains*, Leonard E. Baum, Ted Petrie, George Soules and Norman Weiss (1970).
2. *Calculating posterior distributions and modal estimates in Markov mixture models*,
   Siddhartha Chib (1996): draws of states, from the last to the first.
"""

from collections.abc import Callable
import math
from typing import NamedTuple

import jax
from jax import Array, lax, random
from jax.nn import logsumexp
import jax.numpy as jnp

#: Function of the states of groups, shape (n, T), that returns the log factors of each time, shape
#: (T, n), and the sum of all other terms, shape (n,).
Terms = Callable[[Array], tuple[Array, Array]]

#: Log factor of a transition that is impossible: the gradient of a sum of infinite terms is none.
_IMPOSSIBLE = -1e30


class HiddenSite(NamedTuple):
    """Discrete site of a state: its values, its shape, and the axis of the groups in it."""

    name: str
    values: tuple[int, ...]
    shape: tuple[int, ...]
    axis: int


class HiddenStates(NamedTuple):
    """
    States of a group, one for each time.

    - **sites** - discrete sites in the body of a ``scan``, of which a state is a combination.
    - **length** - number of times.

    **Example:** two sites make six states.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.posterior.hidden_states import HiddenSite, HiddenStates
        >>> sites = HiddenSite("a", (0, 1), (4, 1), 1), HiddenSite("b", (3, 4, 5), (4, 1), 1)
        >>> states = HiddenStates(sites, length=4)
        >>> states.number
        6
        >>> {name: x[:, 0].tolist() for name, x in states.values(jnp.array([[0, 1, 2, 5]])).items()}
        {'a': [0, 1, 0, 1], 'b': [3, 3, 4, 5]}
    """

    sites: tuple[HiddenSite, ...]
    length: int

    @property
    def number(self) -> int:
        """The number of states."""
        return math.prod(len(site.values) for site in self.sites)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    def values(self, states: Array) -> dict[str, Array]:
        """Return the values of the sites by the numbers of the states, shape (n, T)."""
        result, rest = {}, states
        for site in self.sites:
            values = jnp.asarray(site.values)
            rest, own = jnp.divmod(rest, len(values))
            axes = [len(states) if k == site.axis else 1 for k in range(1, len(site.shape))]
            result[site.name] = values[own.T].reshape(-1, *axes)
        return result


def log_sum(terms: Terms, states: HiddenStates, groups: int) -> Array:
    """
    Return the log density of each group, summed over its states, shape (n,).

    :param groups: the number of groups.

    **Example:** independent states.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.posterior.hidden_states import HiddenSite, HiddenStates, log_sum
        >>> states = HiddenStates((HiddenSite("s", (0, 1), (3, 1), 1),), length=3)
        >>> terms = lambda s: (jnp.log(0.1 + s.T), jnp.zeros(1))
        >>> bool(jnp.allclose(jnp.exp(log_sum(terms, states, 1)), (0.1 + 1.1) ** 3))
        True
    """
    factors, rest = _factors(terms, states, groups)
    return logsumexp(_forward(factors)[-1], axis=0) + rest


def draw_states(terms: Terms, states: HiddenStates, groups: int, rng_key: Array) -> Array:
    """Draw the states of each group given its observations, shape (n, T)."""
    factors, _ = _factors(terms, states, groups)
    forward = _forward(factors)
    last_key, key = random.split(rng_key)
    last = random.categorical(last_key, forward[-1], axis=0)

    def back(state: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        before, factor, key = inputs
        into = jnp.take_along_axis(factor, state[None, None], axis=1)[:, 0]
        drawn = random.categorical(key, before + into, axis=0)
        return drawn, drawn

    keys = random.split(key, states.length - 1)
    _, earlier = lax.scan(back, last, (forward[:-1], factors[1:], keys), reverse=True)
    return jnp.concatenate([earlier, last[None]]).T


def is_a_chain(terms: Terms, states: HiddenStates, groups: int, rng_key: Array) -> Array:
    """
    Return whether the terms at some states are those of factors of neighbours, shape (n,).

    The states are two paths without structure, and two draws given the observations, which are
    possible also where most transitions are not.
    """
    factors, rest = _factors(terms, states, groups)
    result = jnp.ones(groups, bool)
    for k, key in enumerate(random.split(rng_key, 4)):
        if k < 2:
            path = random.randint(key, (groups, states.length), 0, states.number)
        else:
            path = draw_states(terms, states, groups, key)
        found, found_rest = terms(path)
        found = jnp.maximum(found, _IMPOSSIBLE)
        before = jnp.pad(path.T[:-1], ((1, 0), (0, 0)))
        times, rows = jnp.indices(found.shape)
        expected = factors[times, before, path.T, rows]
        near = 1e-3 * (1 + jnp.abs(expected))
        result &= jnp.all(jnp.abs(found - expected) <= near, axis=0)
        result &= jnp.abs(found_rest - rest) <= 1e-3 * (1 + jnp.abs(rest))
    return result


def _factors(terms: Terms, states: HiddenStates, groups: int) -> tuple[Array, Array]:
    """Return the log factors by time and by the states before and at it, and the other terms."""
    number, length = states.number, states.length
    is_odd = jnp.arange(length) % 2 == 1

    def at(pair: Array) -> tuple[Array, Array]:
        path = jnp.where(is_odd, pair % number, pair // number)
        return terms(jnp.broadcast_to(path, (groups, length)))

    found, rest = jax.vmap(at)(jnp.arange(number**2))
    found = jnp.maximum(found, _IMPOSSIBLE).reshape(number, number, length, groups)
    # at even times the second of a pair is the state before
    found = jnp.where(is_odd[:, None], found, found.swapaxes(0, 1))
    return jnp.moveaxis(found, 2, 0), rest[0]


def _forward(factors: Array) -> Array:
    """Return :math:`\\log a_t(j)`, shape (T, K, n)."""

    def one(before: Array, factor: Array) -> tuple[Array, Array]:
        now = logsumexp(before[:, None] + factor, axis=0)
        return now, now

    # no state is before the first
    first = factors[0, 0]
    _, later = lax.scan(one, first, factors[1:])
    return jnp.concatenate([first[None], later])
