# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Stein checks of the distribution of draws, which effective sample sizes and R-hat do not test.

For a density :math:`\\propto e^{-U / T}` of any shape, and every constant :math:`c`,

.. math:: S = \\frac1T \\, \\mathrm{E} \\left[ (\\phi - c) \\nabla U(\\phi)^\\top \\right] = I,

so that the *Stein matrix* of the draws, estimated with the minibatch gradients that the
sampler has computed anyway, can be compared with the identity. For a Gaussian posterior its
eigenvalues are the ratios of the variances of the draws to the true variances. The mean of its
diagonal is the *configurational temperature* (in units of :math:`T`). It is 1 if the variances of
the draws are right on average over the coordinates, and 1.2 if they are 20 % too large. Noise of
the gradient makes the estimate noisier and not biased.

For the parameters one by one, with the metric :math:`\\theta = c + L \\phi` and
:math:`M = L L^\\top`, these are the *variance ratios*

.. math:: r_i = \\frac1T \\, \\frac{\\mathrm{E} \\left[ (\\theta_i - c_i)
    (M \\nabla_\\theta U)_i \\right]}{M_{ii}} = 1,

which hold for every :math:`M`. If :math:`M` is the covariance of a Gaussian posterior,
:math:`r_i` is the ratio of the variance of :math:`\\theta_i` among the draws to the true variance.
With another :math:`M` it is the ratio for a combination of parameters.

The checks have four limits. They test the spread of the draws and not their location. With
momentum, each entry of the diagonal is the kinetic energy of that coordinate (the virial theorem).
A thermostat, in :class:`~numpyro_sgmcmc.SGNHT` and :class:`~numpyro_sgmcmc.CCAdL`, holds the mean
kinetic energy. The trace is then 1 for any noise, and only single ratios and eigenvalues show an
error. Above 100 parameters there are no eigenvalues: the checks pass draws that are too wide in one
direction and too narrow in another, if neither direction is along a parameter. The checks see only
the places that the chains have visited: they miss a mode or a tail that no chain has reached.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from scipy import special

#: Largest number of parameters for which the Stein matrix is kept.
MATRIX_DIMENSION = 100
#: Largest number of parameters with a variance ratio each; above, each latent site has one.
COORDINATES = 1_000

#: Number of batches for the standard errors, of which at least half are always full.
_BATCHES = 64

#: Smallest numbers of samples and of batches for a verdict.
_FEWEST_SAMPLES, FEWEST_BATCHES = 200, 20

#: Tolerated relative errors of a variance: of the mean over the coordinates, and of a single
#: coordinate, which is 5 % of its standard deviation.
TOLERANCE, _TOLERANCE_OF_ONE = 0.05, 0.1

#: Number of undone steps that chance explains, and the largest share of undone steps beyond it.
#: Correct posteriors have up to 5e-5, and posteriors whose means are off by 0.1 standard deviations
#: have 7e-4 or more.
_UNDONE_BY_CHANCE, _UNDONE = 2, 1.5e-4
#: Number of undone steps in a row after which a chain is stuck.
_LONG_STAY = 10


class SteinSums(NamedTuple):
    """
    Running sums of a chain after its warm-up, for the Stein matrix :math:`S`.

    - **center** - :math:`c`, shape (d,): the mean of the second half of the warm-up.
    - **steps** - number of steps in the following sums.
    - **samples** - number of samples in the following sums.
    - **matrix** - sum of :math:`(\\phi - c) g^\\top / T` over past batches, shape (d, d), up to
      100 parameters; above, shape (0, 0).
    - **current_matrix** - sum of :math:`(\\phi - c) g^\\top / T` over the current batch. In single
      precision the sum over a long run would lose the terms of single steps.
    - **current** - sums over the current batch, shape (1 + k,): the mean of the diagonal of
      :math:`(\\phi - c) g^\\top / T`, and the mean of the terms of :math:`r_i` in each of k groups.
      There is a group for each parameter, or for each latent site if there are many parameters.
    - **batches** - the sums ``current`` of past batches of equal length, shape (64, 1 + k).
    - **length** - number of samples in each batch.
    """

    center: Array
    steps: Array
    samples: Array
    matrix: Array
    current_matrix: Array
    current: Array
    batches: Array
    length: Array


def start_sums(position: Array, sites: Sequence[int]) -> SteinSums:
    """
    Return the sums of a chain before its first step.

    :param position: the initial position of one chain, shape ``(d,)``.
    :param sites: number of parameters of each latent site, in the order of the vector.
    """
    size, dtype = position.shape[0], position.dtype
    groups = size if size <= COORDINATES else len(sites)
    edge = size if size <= MATRIX_DIMENSION else 0
    none = jnp.zeros((), jnp.int32)
    return SteinSums(
        center=position,
        steps=none,
        samples=none,
        matrix=jnp.zeros((edge, edge), dtype),
        current_matrix=jnp.zeros((edge, edge), dtype),
        current=jnp.zeros(1 + groups, dtype),
        batches=jnp.zeros((_BATCHES, 1 + groups), dtype),
        length=none + 1,
    )


def center_sums(sums: SteinSums, position: Array, number: Array) -> SteinSums:
    """
    Include a position of the warm-up in the mean :math:`c`.

    :param number: number of positions in the mean with this one, or 0 if it does not count.
    """
    share = jnp.where(number > 0, 1 / jnp.maximum(number, 1).astype(position.dtype), 0.0)
    return sums._replace(center=sums.center + share * (position - sums.center))


def add_to_sums(
    sums: SteinSums,
    position: Array,
    gradient: Array,
    counts: Array,
    temperature: float,
    sites: Sequence[int],
    direction: Callable[[Array], Array],
    variances: Array,
) -> tuple[SteinSums, Array]:
    """
    Add one step to the sums.

    :param position: position :math:`\\phi` of the gradient, shape ``(d,)``.
    :param gradient: minibatch gradient, shape ``(d,)``.
    :param counts: whether the step counts.
    :param float temperature: :math:`T`.
    :param sites: number of parameters of each latent site, in the order of the vector.
    :param direction: :math:`L` of the metric, a linear function.
    :param variances: the diagonal of :math:`M = L L^\\top`, shape ``(d,)``.
    :return: the sums, and this step's share of the configurational temperature.
    """
    away = jnp.where(counts, position - sums.center, 0.0)
    scaled = jnp.where(counts, gradient, 0.0) / temperature
    share = away @ scaled / position.shape[0]
    terms = direction(away) * direction(scaled) / variances
    if sums.current.shape[0] != 1 + terms.shape[0]:
        # each site is a contiguous part of the vector
        terms = jnp.stack([jnp.mean(x) for x in jnp.split(terms, np.cumsum(sites)[:-1])])
    matrix = sums.current_matrix
    if matrix.size:
        matrix = matrix + away[:, None] * scaled[None]
    return sums._replace(
        steps=sums.steps + counts,
        current_matrix=matrix,
        current=sums.current + jnp.concatenate([share[None], terms]),
    ), share


def batch_is_full(sums: SteinSums) -> Array:
    """Return whether :func:`close_batch` is due, for one chain or several."""
    samples, length = sums.samples.ravel()[0], sums.length.ravel()[0]
    return (samples > 0) & (samples % length == 0)


def close_batch(sums: SteinSums) -> SteinSums:
    """Move the current batch to the past batches, and merge 64 full ones in pairs into 32."""
    k = sums.samples // sums.length - 1
    batches = sums.batches.at[k].set(sums.current)
    pairs = batches.reshape(_BATCHES // 2, 2, -1).sum(axis=1)
    merged = jnp.concatenate([pairs, jnp.zeros_like(pairs)])
    full = sums.samples == _BATCHES * sums.length
    return sums._replace(
        matrix=sums.matrix + sums.current_matrix,
        current_matrix=jnp.zeros_like(sums.current_matrix),
        current=jnp.zeros_like(sums.current),
        batches=jnp.where(full, merged, batches),
        length=jnp.where(full, 2 * sums.length, sums.length),
    )


class SteinReport(NamedTuple):
    """
    The Stein matrix of a run, over all chains.

    - **temperature** - configurational temperature, the mean of the diagonal.
    - **error** - standard error of the temperature, by batch means.
    - **ratios** - the variance ratios :math:`r_i`, for each parameter, or for each latent site
      if there are more than 1,000 parameters.
    - **ratio_errors** - standard errors of the ratios.
    - **matrix** - the symmetric part of :math:`S`, or None for more than 100 parameters.
    - **samples** - number of samples, of all chains.
    """

    temperature: float
    error: float
    ratios: np.ndarray
    ratio_errors: np.ndarray
    matrix: np.ndarray | None
    samples: int

    @property
    def eigenvalues(self) -> tuple[float, float]:
        """
        The smallest and the largest eigenvalue of the matrix, or NaN without a matrix.

        Noise of the matrix itself spreads the eigenvalues: see :meth:`eigenvalue_spread`.
        """
        if self.matrix is None:
            return math.nan, math.nan
        values = np.linalg.eigvalsh(self.matrix)
        return float(values[0]), float(values[-1])

    def eigenvalue_spread(self, size: int) -> float:
        """
        Return the distance of extreme eigenvalues from 1 that chance explains.

        It is a rough value for a block of ``size`` parameters and correct draws: the edge of the
        spectrum of a symmetric matrix of independent entries.
        """
        return math.sqrt(2 * (size - 1)) * float(np.median(self.ratio_errors))

    def problem(self, errors: float = 3.0) -> str | None:
        """
        Return a description of the deviation from the identity, or None.

        The temperature deviates if it is off by more than ``errors`` standard errors and 5 %. A
        variance ratio or an eigenvalue deviates if it is off by more than 10 % and by more than
        chance explains for the most extreme of all.
        """
        if not math.isfinite(self.error):
            return None
        problems = []
        if abs(self.temperature - 1) > max(errors * self.error, TOLERANCE):
            problems.append(
                f"the configurational temperature is {self.temperature:.3g} +- {self.error:.2g}"
            )
        count = len(self.ratios)
        quantile = -special.stdtrit(FEWEST_BATCHES - 1, special.ndtr(-errors) / count)
        # a mean of few products that is small by chance has too small a standard error
        error = self.ratio_errors / np.clip(self.ratios, 0.1, 1.0)
        excess = np.abs(self.ratios - 1) / np.maximum(quantile * error, _TOLERANCE_OF_ONE)
        worst = int(np.argmax(excess))
        if excess[worst] > 1:
            problems.append(
                f"{int(np.sum(excess > 1))} of {count} variance ratios are off, the worst"
                f" {self.ratios[worst]:.3g} +- {self.ratio_errors[worst]:.2g}"
            )
        if self.matrix is not None:
            extreme = max(self.eigenvalues, key=lambda value: abs(value - 1))
            spread = 1.5 * self.eigenvalue_spread(len(self.matrix))
            spread += errors * float(np.median(self.ratio_errors))
            if abs(extreme - 1) > max(spread, _TOLERANCE_OF_ONE):
                problems.append(f"an eigenvalue of the Stein matrix is {extreme:.3g}")
        return "; ".join(problems) or None

    def summary(self) -> str:
        """Return a summary in a few words, for a progress bar."""
        error = f" +- {self.error:.2f}" if math.isfinite(self.error) else ""
        return f"configurational temperature {self.temperature:.2f}{error}"


def stein_report(running: SteinSums) -> SteinReport | None:
    """
    Return the Stein report of a run from its running sums.

    :param running: the sums of a chain, or of several chains along a leading axis.
    :return: the report, or None before the first sample.

    **Example:** with half of the largest stable step size, the variance of the draws of SGLD is
    1 / (1 - 0.5) times too large.

    .. doctest::

        >>> import jax
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGLD
        >>> from numpyro_sgmcmc.stein import stein_report

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10).expand([50]).to_event(1))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])

        >>> y = jax.random.normal(jax.random.key(0), (100, 50))
        >>> mcmc = MCMC(
        ...     SGLD(model, step_size=0.01), num_warmup=100, num_samples=400, progress_bar=False
        ... )
        >>> mcmc.run(jax.random.key(1), y)
        >>> report = stein_report(mcmc.last_state.monitor.stein)
        >>> print(f"{report.temperature:.1f} +- {report.error:.2f}")
        2.0 +- 0.02
        >>> "configurational temperature" in report.problem()
        True
    """

    def on_the_host(x: Any) -> np.ndarray:
        x = np.asarray(x)
        return x if np.issubdtype(x.dtype, np.integer) else x.astype(np.float64)

    sums: Any = jax.tree.map(on_the_host, jax.device_get(running))
    if not sums.steps.any():
        return None
    if sums.steps.ndim == 0:
        sums = jax.tree.map(lambda x: x[None], sums)
    steps, samples, length = int(sums.steps.sum()), int(sums.samples.sum()), int(sums.length[0])
    means = (sums.batches.sum(axis=1) + sums.current).sum(axis=0) / steps
    # steps that were not finite are in no sum; the run warns if there are many
    per_batch = length * steps / samples
    complete = int(sums.samples[0]) // length
    errors = _batch_error(sums.batches[:, :complete] / per_batch)
    matrix = (sums.matrix + sums.current_matrix).sum(axis=0) / steps
    return _report(means, errors, matrix, samples)


def _report(means: np.ndarray, errors: np.ndarray, matrix: np.ndarray, samples: int) -> SteinReport:
    """
    Return the report, with infinite errors if there are too few samples for a verdict.

    :param means: the configurational temperature and the k variance ratios, shape ``(1 + k,)``.
    :param matrix: :math:`S`, shape ``(d, d)``, or ``(0, 0)`` for more than 100 parameters.
    """
    if samples < _FEWEST_SAMPLES:
        errors = np.full(means.shape, math.inf)
    symmetric = (matrix + matrix.T) / 2 if matrix.size else None
    return SteinReport(float(means[0]), float(errors[0]), means[1:], errors[1:], symmetric, samples)


def report_of_draws(
    positions: np.ndarray, gradients: np.ndarray, metric: Any, temperature: float = 1.0
) -> SteinReport:
    """
    Return the Stein report of draws with their gradients.

    :param positions: coordinates :math:`\\phi`, shape ``(chains, draws, d)``.
    :param gradients: gradients of the potential with respect to the coordinates, same shape.
    :param metric: the metric of the coordinates.
    :param float temperature: :math:`T`.
    """
    chains, draws, size = positions.shape
    away = positions - positions.mean(axis=(0, 1))
    gradients = gradients / temperature
    over_draws = jax.vmap(jax.vmap(metric.direction))
    ratios = np.asarray(over_draws(jnp.asarray(away)) * over_draws(jnp.asarray(gradients)))
    ratios = ratios / np.asarray(metric.variances(jnp.zeros(size)))
    mean = np.sum(away * gradients, axis=2, keepdims=True) / size
    series = np.concatenate([mean, ratios], axis=2)
    count = min(_BATCHES, draws)
    length = draws // count
    batches = series[:, : count * length].reshape(chains, count, length, -1).mean(axis=2)
    matrix = np.zeros((0, 0))
    if size <= MATRIX_DIMENSION:
        matrix = np.einsum("cni,cnj->ij", away, gradients, optimize=True) / (chains * draws)
    series = series.astype(np.float64)
    return _report(series.mean(axis=(0, 1)), _batch_error(batches), matrix, chains * draws)


def _batch_error(batches: np.ndarray) -> np.ndarray:
    """
    Return standard errors of means of a series from its batch means, shape (chains, batches, k).

    Batches may be shorter than the autocorrelation of the series: their means are modelled as a
    first-order autoregression. The errors are infinite for too few batches.
    """
    count = batches.shape[0] * batches.shape[1]
    if count < FEWEST_BATCHES:
        return np.full(batches.shape[2], math.inf)
    away = batches - batches.mean(axis=(0, 1))
    variance = np.mean(away**2, axis=(0, 1))
    lagged = np.mean(away[:, 1:] * away[:, :-1], axis=(0, 1))
    memory = np.clip(lagged / np.maximum(variance, 1e-30), 0.0, 0.9)
    return np.sqrt(variance / (count - 1) * (1 + memory) / (1 - memory))


def advice(problem: str) -> str:
    """Return the advice for a run whose Stein matrix is not the identity."""
    return (
        f"The draws do not have the law of the posterior: {problem} (1 for correct draws, larger"
        " for draws that are too wide, smaller for draws that are too narrow or a run that is too"
        " short). R-hat and effective sample sizes do not show this. Too wide: halve the step size"
        " or use larger minibatches; too narrow: use a longer warm-up and run, then a smaller step"
        " size; if the numbers stay, reparametrise the model."
    )


def problem_of_undone_steps(state: Any) -> str | None:
    """
    Return a description of the problem that undone steps show, or None if they are few.

    A few undone steps are counted, and are no sign of wrong draws. A share :math:`s` of steps that
    are undone at :math:`z` standard deviations from the centre moves a mean by only :math:`s z`
    standard deviations. But steps that are too long are undone more often in the tail of a skewed
    posterior, so that a large share shows that the draws miss this tail.

    :param state: state of one chain or several. A state of another package has no undone steps.
    """
    monitor: Any = getattr(state, "monitor", None)
    if not hasattr(monitor, "longest_stay"):
        return None
    parts: list[tuple[Any, Any]] = [(state.i, monitor)]
    if (hot := state.replicas) is not None:
        parts.append((hot.states.i, hot.states.monitor))
    undone = sum(int(np.sum(part.nonfinite_steps)) for _, part in parts)
    steps = sum(int(np.sum(np.asarray(i, np.float64))) for i, _ in parts)
    stay = max(int(np.max(part.longest_stay)) for _, part in parts)
    if stay >= _LONG_STAY:
        return f"a chain stood still, {stay:,} steps in a row were undone"
    usual = _UNDONE * steps
    if undone > _UNDONE_BY_CHANCE + usual + 3 * math.sqrt(usual):
        return f"{undone:,} of {steps:,} steps were undone"
    return None
