# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The kernel Stein discrepancy."""

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.converters import array, one_of
from numpyro_sgmcmc.diagnostics._posterior_score import RunModel, Scores, scores_of
from numpyro_sgmcmc.diagnostics.runs import Run
from numpyro_sgmcmc.posterior.metric import DenseMetric, DiagonalMetric, from_covariance

#: Number of rows of the matrix of pairs that exist at once.
_ROWS = 256

#: Largest number of parameters for whitening by a full covariance matrix.
_FULL_COVARIANCE = 500


class Discrepancy(NamedTuple):
    """
    A kernel Stein discrepancy between draws and the posterior.

    - **squared** - the estimate of the squared discrepancy. The U-statistic can be negative, which
      is no evidence of a difference.
    - **error** - standard deviation of the U-statistic for this number of independent draws of the
      posterior.
    - **blocks** - square and error for the parameters of each latent site alone.
    - **draws** - number of draws.
    - **exact** - whether the scores were on all data.
    """

    squared: float
    error: float
    blocks: dict[str, tuple[float, float]]
    draws: int
    exact: bool

    @property
    def value(self) -> float:
        """The discrepancy, 0 if the estimate of its square is negative."""
        return math.sqrt(max(self.squared, 0.0))

    def __str__(self) -> str:
        kind = "all data" if self.exact else "minibatches"
        return (
            f"kernel Stein discrepancy {self.value:.3g}, squared {self.squared:.3g} (0 +-"
            f" {self.error:.2g} for independent correct draws), {self.draws} draws, scores on"
            f" {kind}"
        )


def kernel_stein_discrepancy(
    run: Run,
    *,
    draws: int = 2_000,
    scores: str = "auto",
    covariance: np.ndarray | None = None,
    statistic: str = "U",
    model: Callable | None = None,
    model_args: tuple = (),
    model_kwargs: dict | None = None,
    rng_key: Array | None = None,
) -> Discrepancy:
    """
    The kernel Stein discrepancy: a distance of the draws from the posterior.

    It is the largest mean that a Stein operator of the posterior has under the draws, over the unit
    ball of a reproducing kernel Hilbert space. It is 0 for the posterior. It detects a wrong
    location, a wrong spread and a wrong shape, which R-hat and effective sample sizes do not.

    With :math:`\\phi` the whitened unconstrained parameters, :math:`s = \\nabla_\\phi \\log p`,
    :math:`r = \\phi - \\phi'` and the inverse multiquadric kernel
    :math:`k = (1 + \\| r \\|^2)^{-1/2} = b^{-1/2}`,

    .. math::

        \\mathrm{KSD}^2 = \\frac{1}{K (K - 1)} \\sum_{i \\ne j} k_0(\\phi_i, \\phi_j), \\qquad
        k_0 = s^\\top s' b^{-1/2} + (s - s')^\\top r \\, b^{-3/2} + d \\, b^{-3/2}
            - 3 \\| r \\|^2 b^{-5/2} .

    Compare runs with the same ``covariance`` and the same number of draws. Alone, compare
    ``squared`` with ``error``: ten times as much is a difference, twice is none. (The draws of a
    run are not independent; choose no more than the effective sample size.) In many dimensions the
    kernel of all parameters detects little. Each of the ``blocks`` uses the parameters and the
    scores of one site, and is 0 for the posterior too.

    Scores on minibatches (Gorham et al. 2020) are unbiased and independent, so that the U-statistic
    is unbiased, but noisier. They use a control variate, anchored at the mean of the draws, if that
    has less noise.

    :param run: an ``MCMC`` object, or an ArviZ object and the model.
    :param int draws: number of draws, evenly spaced over the chains. The cost grows with the square
        of this number times the number of parameters. Memory grows with ``draws`` times 256.
    :param str scores: ``"full"`` for a pass over the data for each draw, ``"minibatch"``, or
        ``"auto"``: full if draws times rows are at most 2e8.
    :param covariance: covariance of the unconstrained parameters (in the order of the names of
        their sites) or their variances, for the whitening; None is the covariance of the draws.
    :param str statistic: ``"U"``, or ``"V"`` with the pairs :math:`i = j` and
        :math:`1 / K^2`, biased upwards and never negative, for comparison with other software.
    :param model: the model, for an ArviZ object.
    :param tuple model_args: its arguments.
    :param dict model_kwargs: its keyword arguments.
    :param rng_key: random key of the minibatches.
    :raises ValueError: if there are no draws, if they are not finite or never move, or if the model
        is missing or wrong.

    **References:**

    1. *Measuring Sample Quality with Kernels*, Proposition 2 and Theorem 8, Jackson Gorham and
       Lester Mackey (2017).
    2. *Stochastic Stein Discrepancies*, Jackson Gorham, Anant Raj and Lester Mackey (2020).
    3. *A Kernelized Stein Discrepancy for Goodness-of-fit Tests*, the U-statistic, Qiang Liu,
       Jason D. Lee and Michael Jordan (2016).

    **Example:** at half of the largest stable step size the draws of SGLD are 1.4 times too
    wide.

    .. doctest::

        >>> import jax
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGLD, kernel_stein_discrepancy

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10).expand([5]).to_event(1))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])

        >>> y = jax.random.normal(jax.random.key(0), (100, 5))
        >>> for step_size in (0.01, 0.001):
        ...     kernel = SGLD(model, step_size, steps_per_sample=20)
        ...     mcmc = MCMC(kernel, num_warmup=100, num_samples=500, progress_bar=False)
        ...     mcmc.run(jax.random.key(1), y)
        ...     found = kernel_stein_discrepancy(mcmc)
        ...     print(found.squared > 10 * found.error)
        True
        False
    """
    one_of("statistic", statistic, ("U", "V"))
    run_model = RunModel(model, model_args, model_kwargs)
    run_scores = scores_of(run, run_model, draws, scores, rng_key)
    return discrepancy_of(run_scores, covariance, statistic)


def discrepancy_of(
    found: Scores, covariance: np.ndarray | None = None, statistic: str = "U"
) -> Discrepancy:
    """The discrepancy from known scores."""
    both = whitened(found, metric_of(found, covariance))
    position, score = (x.reshape(-1, x.shape[-1]) for x in both)
    sites = np.asarray(found.sites)
    blocks = {site: np.flatnonzero(sites == site) for site in dict.fromkeys(found.sites)}
    count = len(position)
    means = {
        site: _statistic(position[:, block], score[:, block], statistic)
        for site, block in blocks.items()
    }
    every = means[found.sites[0]] if len(blocks) == 1 else _statistic(position, score, statistic)
    return Discrepancy(*every, means, count, found.exact)


def whitened(found: Scores, metric: DiagonalMetric | DenseMetric) -> tuple[np.ndarray, np.ndarray]:
    """Positions and scores in the coordinates of a metric."""
    return (
        np.asarray(_over_draws(metric.coordinates, found.positions)),
        np.asarray(_over_draws(metric.pullback, found.scores)),
    )


def _over_draws(function: Callable[[Array], Array], values: np.ndarray) -> Array:
    return jax.vmap(jax.vmap(function))(jnp.asarray(values, jnp.result_type(float)))


def metric_of(found: Scores, covariance: np.ndarray | None) -> DiagonalMetric | DenseMetric:
    """
    The metric of a given covariance, or of the covariance of the draws.

    :raises ValueError: if the covariance does not fit, or is not positive definite.
    """
    every = found.positions.reshape(-1, found.positions.shape[-1])
    count, size = every.shape
    if covariance is None:
        full = size <= _FULL_COVARIANCE and count > 2 * size
        covariance = np.cov(every, rowvar=False).reshape(size, size) if full else every.var(axis=0)
    covariance = array("covariance", covariance)
    is_real = covariance.dtype.kind in "iuf"
    if not is_real or covariance.shape not in ((size,), (size, size)):
        raise ValueError(
            f"`covariance` has shape {covariance.shape} and type {covariance.dtype}, but the model"
            f" has {size} unconstrained parameters: give variances, shape ({size},), or a matrix,"
            f" ({size}, {size})."
        )
    return from_covariance(covariance, every.mean(axis=0), jnp.result_type(float))


@partial(jax.jit, static_argnames="statistic")
def _sums(position: Array, score: Array, statistic: str) -> tuple[Array, Array]:
    """Sums of k_0 and of its square over the pairs of different draws, and over all."""
    count, size = position.shape
    padded = -(-count // _ROWS) * _ROWS
    position = position - position.mean(axis=0)
    square, own = jnp.sum(position**2, axis=1), jnp.sum(score * position, axis=1)

    def of_rows(rows: Array) -> tuple[Array, Array]:
        here = jnp.clip(rows, 0, count - 1)
        x, s = position[here], score[here]
        distance = jnp.maximum(square[here][:, None] + square - 2 * x @ position.T, 0.0)
        # (s - s')'(x - x')
        slope = own[here][:, None] - s @ position.T - x @ score.T + own
        b = 1 + distance
        value = (s @ score.T + (slope + size) / b - 3 * distance / b**2) / jnp.sqrt(b)
        pairs = (rows[:, None] < count) & (rows[:, None] != jnp.arange(count))
        value = jnp.where(pairs, value, 0.0)
        return jnp.sum(value), jnp.sum(value**2)

    sums, squares = lax.map(of_rows, jnp.arange(padded).reshape(-1, _ROWS))
    diagonal = jnp.sum(score**2) + count * size if statistic == "V" else 0.0
    return jnp.sum(sums) + diagonal, jnp.sum(squares)


def _statistic(position: np.ndarray, score: np.ndarray, statistic: str) -> tuple[float, float]:
    """The statistic, and the standard deviation of the U-statistic for independent draws."""
    total, squares = _sums(jnp.asarray(position), jnp.asarray(score), statistic)
    count = len(position)
    pairs: Any = count * (count - 1)
    number = pairs if statistic == "U" else count**2
    return float(total) / number, math.sqrt(2 * float(squares)) / pairs
