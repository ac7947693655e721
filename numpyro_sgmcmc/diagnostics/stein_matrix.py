# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The Stein matrix from draws, of any kernel."""

from collections.abc import Callable

from jax import Array
import numpy as np

from numpyro_sgmcmc.diagnostics._posterior_score import RunModel, scores_of
from numpyro_sgmcmc.diagnostics.discrepancy import metric_of, whitened
from numpyro_sgmcmc.diagnostics.runs import Run
from numpyro_sgmcmc.stein import SteinReport, report_of_draws


def stein_matrix(
    run: Run,
    *,
    draws: int = 2_000,
    scores: str = "auto",
    covariance: np.ndarray | None = None,
    model: Callable | None = None,
    model_args: tuple = (),
    model_kwargs: dict | None = None,
    rng_key: Array | None = None,
) -> SteinReport:
    """
    Compute the Stein matrix of draws, for other kernels and for stored draws.

    The report has the configurational temperature and the variance ratios of
    :mod:`numpyro_sgmcmc.stein`. The gradients are computed anew. The kernels of this package keep
    the Stein matrix of their own steps at no cost, and ``to_arviz`` has it in the group ``stein``.

    :param run: an ``MCMC`` object, or an ArviZ object and the model.
    :param int draws: number of draws, evenly spaced over the chains.
    :param str scores: ``"full"`` for a pass over the data for each draw, ``"minibatch"``, or
        ``"auto"``: full if draws times rows are at most 2e8.
    :param covariance: :math:`M`, as a matrix or as variances, of the unconstrained parameters in
        the order of the names of their sites. With the covariance of the draws, the default, a
        variance ratio is to first order the relative variance of the parameter.
    :param model: the model, for an ArviZ object.
    :param tuple model_args: its arguments.
    :param dict model_kwargs: its keyword arguments.
    :param rng_key: random key of the minibatches.
    :return: a report, whose ``problem()`` describes problems in words.
    :raises ValueError: as :func:`kernel_stein_discrepancy`.

    **Example:**

    .. doctest::

        >>> import jax
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_sgmcmc import stein_matrix

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10).expand([5]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y)

        >>> y = jax.random.normal(jax.random.key(0), (100, 5))
        >>> mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> report = stein_matrix(mcmc)
        >>> report.problem() is None, abs(report.temperature - 1) < 4 * report.error
        (True, True)
    """
    run_model = RunModel(model, model_args, model_kwargs)
    run_scores = scores_of(run, run_model, draws, scores, rng_key)
    metric = metric_of(run_scores, covariance)
    positions, gradients = whitened(run_scores, metric)
    return report_of_draws(positions, -gradients, metric)
