# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""R-hat of the short chains of a pilot."""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from scipy import special

from numpyro_sgmcmc.stein import SteinSums

#: Degrees of freedom of the variance within half of a chain, those of five independent positions.
_FREEDOM = 4

#: Chance of a false alarm about the largest coordinate.
_FALSE_ALARM = 0.01

#: The median of the squares of R-hat, less 1, beyond which chains are too short for a verdict on
#: single coordinates.
_MOST_BY_CHANCE = 0.3


class PilotRun(NamedTuple):
    """
    The results of the chains of a pilot.

    - **stein** - the sums of each chain for the Stein matrix.
    - **halves** - the sums of each half of each chain, or None.
    - **undone** - number of steps of each chain that were undone.
    """

    stein: SteinSums
    halves: "Halves | None" = None
    undone: Any = 0


class Halves(NamedTuple):
    """
    Sums over the first and the second half of a chain, in the coordinates of the metric.

    - **counts** - number of positions in each half, shape (2,).
    - **sums** - sums of positions, shape (2, d).
    - **squares** - sums of squares, shape (2, d).
    """

    counts: Array
    sums: Array
    squares: Array


def no_positions(size: int, dtype: Any) -> Halves:
    """The sums of a chain before its first position."""
    zeros = jnp.zeros((2, size), dtype)
    return Halves(jnp.zeros(2, dtype), zeros, zeros)


def with_position(halves: Halves, position: Array, k: Any, counts: Any) -> Halves:
    """
    Add a position to the sums of a half.

    :param k: the half of the position, 0 or 1.
    :param counts: whether the position counts.
    """
    x = jnp.where(counts, position, 0.0)
    added = Halves(jnp.asarray(counts, x.dtype), x, x**2)
    return jax.tree.map(lambda total, one: total.at[k].add(one), halves, added)


def r_hats(halves: Halves) -> np.ndarray:
    """
    R-hat of each coordinate, from the halves of all chains.

    .. math:: \\hat R^2 = \\frac{n - 1}{n} + \\frac{B}{W},

    with :math:`W` the mean of the variances within halves of :math:`n` positions and :math:`B` the
    variance of their means.

    :param halves: the halves of several chains, along a leading axis.
    :return: R-hat, shape ``(d,)``; NaN for coordinates that do not move.

    **References:**

    1. *Bayesian Data Analysis*, third edition, section 11.4, Andrew Gelman, John B. Carlin,
       Hal S. Stern, David B. Dunson, Aki Vehtari and Donald B. Rubin (2013).

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_sgmcmc.tuning.pilot_rhat import Halves, r_hats
        >>> apart = np.array([[[10.0], [10.0]], [[-10.0], [-10.0]]])  # means of 1 and of -1
        >>> r_hats(Halves(np.full((2, 2), 10.0), apart, np.full((2, 2, 1), 20.0))).round(1)
        array([1.4])
    """
    counts, sums, squares = (np.asarray(x, np.float64) for x in halves)
    n = counts[..., None]
    means = sums / n
    within = np.mean(squares / n - means**2, axis=(0, 1))
    n = counts.mean()
    within *= n / (n - 1)
    between = means.reshape(-1, means.shape[-1]).var(axis=0, ddof=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt((n - 1) / n + between / within)


def beyond_chance(r_hats: np.ndarray, halves: int, sizes: np.ndarray) -> np.ndarray:
    """
    R-hat of each coordinate, at most the median where chance explains a larger value.

    The largest of 100,000 coordinates of short chains is beyond 1.5 by chance alone. If all of them
    move at the same pace, :math:`\\hat R^2 - 1` has about an :math:`F` law times a constant, with
    :math:`m - 1` degrees of freedom between halves and 4 in each half. With the median :math:`r` of
    all coordinates, chance explains

    .. math:: \\hat R_j^2 - 1 \\le (r^2 - 1) \\, F_{1 - 0.01 / n_j} / F_{1/2} ,

    and nothing if :math:`r` is above 1.14.

    :param r_hats: R-hat, shape ``(d,)``.
    :param int halves: number :math:`m` of halves of chains.
    :param sizes: number :math:`n_j` of coordinates among which each one may be the largest, shape
        ``(d,)``.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_sgmcmc.tuning.pilot_rhat import beyond_chance
        >>> found = np.array([1.05, 1.1, 1.1, 1.25, 3.0])
        >>> beyond_chance(found, 16, sizes=np.full(5, 5)).round(2).tolist()
        [1.05, 1.1, 1.1, 1.1, 3.0]
    """
    usual = np.median(r_hats) ** 2 - 1
    if not usual <= _MOST_BY_CHANCE:
        return r_hats
    quantile = partial(special.fdtri, halves - 1, _FREEDOM * halves)
    most = quantile(1 - _FALSE_ALARM / sizes) / quantile(0.5) * usual
    explained = np.minimum(r_hats, np.sqrt(1 + usual))
    return np.where(r_hats**2 - 1 > most, r_hats, explained)
