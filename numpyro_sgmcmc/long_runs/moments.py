# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Running moments of all draws, in double precision.

With :math:`n` draws of each of :math:`C` chains, a block of :math:`m` new draws is merged by the
update of Chan, Golub and LeVeque (1983),

.. math:: \\mu \\leftarrow \\mu + \\frac{m}{n + m} \\delta, \\qquad
    S \\leftarrow S + S_m + \\frac{n m}{n + m} \\delta^2, \\qquad \\delta = \\mu_m - \\mu,

for each chain and each value. The rows of :math:`F` are leading directions of the covariance over
all chains. The matrix of squared deviations is :math:`F^\\top F` plus a diagonal matrix that makes
the diagonal right. New deviations are added as rows, and the largest :math:`r` principal directions
of all rows are kept.

**References:**

1. *Algorithms for computing the sample variance: analysis and recommendations*, Tony F. Chan,
   Gene H. Golub and Randall J. LeVeque (1983).
"""

from typing import NamedTuple

import numpy as np
import xarray as xr

from numpyro_sgmcmc.results.facts import variable_name

#: Number of values that are turned into double precision at a time.
_BLOCK = 4_000_000

STATISTICS = ("mean", "sd", "r_hat")

Sites = dict[str, np.ndarray]


class Moments(NamedTuple):
    """
    Moments of the draws of each chain.

    - **draws** - number of draws of each chain, :math:`n`.
    - **mean** - mean of each chain, for each site shape (chains, ...).
    - **squares** - sums of squared deviations from the mean, likewise.
    - **factors** - :math:`F`, shape (r, d), over the sites in the order of their names.
    """

    draws: int
    mean: Sites
    squares: Sites
    factors: np.ndarray


def no_moments(shapes: dict[str, tuple[int, ...]], chains: int, rank: int) -> Moments:
    """The moments before the first draw, for sites of these shapes."""
    zeros = {name: np.zeros((chains, *shape)) for name, shape in shapes.items()}
    size = sum(x[0].size for x in zeros.values())
    return Moments(0, zeros, {name: x.copy() for name, x in zeros.items()}, np.zeros((rank, size)))


def with_draws(moments: Moments, draws: Sites) -> Moments:
    """The moments updated by draws of every site, shape (chains, draws, ...)."""
    chains, count = next(iter(draws.values())).shape[:2]
    each = sum(x[0, 0].size for x in draws.values()) * chains
    rows = max(1, _BLOCK // max(1, each))
    if len(moments.factors):
        rows = min(rows, max(1, 4 * len(moments.factors) // chains))
    for start in range(0, count, rows):
        block = {name: x[:, start : start + rows].astype(np.float64) for name, x in draws.items()}
        moments = _merged(moments, block)
    return moments


def _merged(moments: Moments, block: Sites) -> Moments:
    n = moments.draws
    m = next(iter(block.values())).shape[1]
    mean, squares = {}, {}
    rows: list[np.ndarray] = []
    for name in sorted(block):
        x = block[name]
        new = x.mean(axis=1)
        shift = new - moments.mean[name]
        # the draws are overwritten, because nobody needs them any more
        deviations = np.subtract(x, new[:, None], out=x)
        inside = np.einsum("cm...,cm...->c...", deviations, deviations)
        mean[name] = moments.mean[name] + m / (n + m) * shift
        squares[name] = moments.squares[name] + inside + n * m / (n + m) * shift**2
        if len(moments.factors):
            chains = len(new)
            flat = deviations.reshape(chains * m, -1)
            # the scatter of the means of the chains changes with the new draws
            between = (np.sqrt(n * m / (n + m)) * shift).reshape(chains, -1)
            rows.append(np.concatenate([flat, between]))
    factors = moments.factors
    if len(factors):
        factors = _leading(np.concatenate([factors, np.concatenate(rows, axis=1)]), len(factors))
    return Moments(n + m, mean, squares, factors)


def _leading(rows: np.ndarray, rank: int) -> np.ndarray:
    """The principal directions of rows, with their lengths."""
    _, directions = np.linalg.eigh(rows @ rows.T)
    return directions[:, -rank:].T @ rows


def summary_of(moments: Moments, dims: dict[str, list[str]]) -> xr.Dataset:
    """
    Moments over all chains: mean, standard deviation and R-hat of each site.

    Each site has a variable over ``statistic``: ``mean``, ``sd`` and, for several chains,
    ``r_hat``, :math:`\\sqrt{(n - 1) / n + B / W}`. Here :math:`B` is the variance of the means of
    the chains, and :math:`W` the variance within them. If directions are kept, ``SITE_factors`` has
    them over ``direction``. The covariance within the chains is :math:`\\sum_k F_{ka} F_{kb}`, and
    its diagonal is the variance.

    :param dims: names of the dimensions of variables.
    """
    n, variables, start = moments.draws, {}, 0
    for site in sorted(moments.mean):
        name = variable_name(site)
        means, squares = moments.mean[site], moments.squares[site]
        chains, shape = len(means), means.shape[1:]
        names = dims.get(name) or [f"{name}_dim_{k}" for k in range(len(shape))]
        mean = means.mean(axis=0)
        within = squares.mean(axis=0) / max(1, n - 1)
        deviations = ((means - mean) ** 2).sum(axis=0)
        variance = (squares.sum(axis=0) + n * deviations) / max(1, chains * n - 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            between = deviations / (chains - 1) if chains > 1 else np.full_like(mean, np.nan)
            r_hat = np.sqrt((n - 1) / max(1, n) + between / within)
        values = np.stack([mean, np.sqrt(variance), r_hat])
        variables[name] = (["statistic", *names], values)
        size = mean.size
        if len(moments.factors):
            factors = moments.factors[:, start : start + size] / np.sqrt(max(1, chains * (n - 1)))
            variables[f"{name}_factors"] = (["direction", *names], factors.reshape(-1, *shape))
        start += size
    return xr.Dataset(variables, {"statistic": list(STATISTICS)}, {"draws": n})
