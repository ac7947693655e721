# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Certificates of runs: means and widths compared with independent weighted draws."""

from typing import Any, NamedTuple

from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
import pandas as pd

from numpyro_sgmcmc.data.converters import random_key, whole
from numpyro_sgmcmc.diagnostics._mixture import fitted
from numpyro_sgmcmc.diagnostics._posterior_score import (
    check_draws,
    constrained,
    exact_target,
    positions_of,
)
from numpyro_sgmcmc.diagnostics.runs import as_data, draws_of, effective_sizes, flat_draws, printed
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.potential import over_all_data
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.results.cycle_draws import kept_draws
from numpyro_sgmcmc.results.facts import variable_name
from numpyro_sgmcmc.results.run_data import arguments_of

#: Tail shapes of the weights: above the first they hardly have a variance, and above the second
#: they are of no use.
GOOD, USABLE = 0.5, 0.7

#: The most and the fewest draws of the run for fitting a mixture.
_FITTED, _FEWEST = 4_000, 100

#: Number of points at which a chunk of rows is evaluated at once.
_AT_ONCE = 16

#: Standard errors beyond which the run is off.
_ERRORS = 4.0


@printed
class Certificate(NamedTuple):
    """
    The result of :func:`certify`: the errors of a run, from independent weighted draws.

    - **k_hat** - the shape of the tail of the weights. Below 0.5 their means and standard errors
      can be trusted, below 0.7 only the means, and above neither.
    - **table** - for each entry of each variable the mean and the standard deviation of the
      weighted draws, ``mean`` and ``sd``, with their standard errors ``mean_error`` and
      ``sd_error``. The error of the run is ``shift``, of its mean in standard deviations, and
      ``ratio``, of its standard deviation. Their standard errors ``shift_error`` and
      ``ratio_error`` include the errors of both.
    - **effective** - effective number of independent draws.
    - **log_evidence**, **log_evidence_error** - the logarithm of the marginal likelihood
      :math:`\\log \\int p(\\theta) p(y \\mid \\theta) d\\theta`, for comparing models.
    - **draws** - the weighted draws by variable, shape (draws, ...).
    - **weights** - weights of the draws, shape (draws,), with sum 1.
    """

    k_hat: float
    table: pd.DataFrame
    effective: float
    log_evidence: float
    log_evidence_error: float
    draws: dict[str, np.ndarray]
    weights: np.ndarray

    @property
    def verdict(self) -> str:
        """The verdict on the run in words, and whether it can be trusted."""
        if self.k_hat < USABLE and self.effective < _FEWEST:
            return (
                f"Nothing is certified: {len(self.weights):,} weighted draws count as"
                f" {self.effective:.0f} independent ones (k-hat {self.k_hat:.2f}). Take more of"
                " them, `num_draws=`, or a longer run, to which the mixture fits better."
            )
        if not self.k_hat < USABLE:
            return (
                f"Nothing is certified (k-hat {self.k_hat:.2f}, above {USABLE}): the mixture that"
                " was fitted to the draws is too far from the posterior, which has too many"
                " parameters for it or another shape, and the weights say little. The table is no"
                " correction; look at `debiased` and `stein_matrix`."
            )
        trust = f"k-hat {self.k_hat:.2f}, {self.effective:,.0f} effective draws"
        # nearly equal weights do no harm, whatever the shape of their tail
        if self.k_hat > GOOD and self.effective < len(self.weights) / 2:
            trust += ", standard errors somewhat too small"
        table = self.table
        far = (
            (table["shift"].abs() > _ERRORS * table["shift_error"]),
            ((table["ratio"] - 1).abs() > _ERRORS * table["ratio_error"]),
        )
        said = []
        if far[0].any():
            worst = table["shift"].where(far[0]).abs().idxmax()
            one = table.loc[worst]
            said.append(
                f"the means of {far[0].sum()} of {len(table)} are off, the most that of '{worst}',"
                f" by {one['shift']:+.3f} +- {one['shift_error']:.3f} standard deviations"
            )
        if far[1].any():
            worst = (table["ratio"] - 1).where(far[1]).abs().idxmax()
            one = table.loc[worst]
            said.append(
                f"{far[1].sum()} of {len(table)} are too wide or too narrow, the most that of"
                f" '{worst}', by a factor of {one['ratio']:.3f} +- {one['ratio_error']:.3f}"
            )
        if said:
            return f"The run is off ({trust}): {'; '.join(said)}. The table has the right values."
        shift, ratio = table["shift_error"].max(), table["ratio_error"].max()
        return (
            f"The run is right as far as this can see ({trust}): means to {2 * shift:.2g} standard"
            f" deviations, widths to a part of {2 * ratio:.2g}."
        )

    @property
    def _lines(self) -> list[str]:
        evidence = f"log evidence {self.log_evidence:.2f} +- {self.log_evidence_error:.2f}"
        return [evidence, self.verdict]


def certify(mcmc: MCMC, num_draws: int = 1_000, *, rng_key: Array | None = None) -> Certificate:
    """
    Certify a run: compute the errors of its means and standard deviations.

    A mixture :math:`q` of Student's t distributions is fitted to the standardised draws.
    Independent draws :math:`\\theta_i` from the mixture are weighted by the posterior on all rows,

    .. math:: w_i \\propto \\exp(-U(\\theta_i)) / q(\\theta_i),

    where a generalised Pareto law smooths the tail of the weights. Its shape :math:`\\hat k` says
    whether the weights can be trusted. Weighted means have no error of a step size or a minibatch.
    If :math:`q` is near the posterior, they are right whatever the run has done,

    .. math:: \\hat\\mu = \\sum_i w_i f_i, \\qquad
        \\operatorname{se}^2 = \\sum_i w_i^2 (f_i - \\hat\\mu)^2,

    and the mean of the weights is the evidence. The cost is an evaluation of the log density on all
    rows for each draw, without gradients. It is for up to about a hundred parameters. Modes that
    the run has missed stay unknown.

    :param mcmc: an ``MCMC`` object after its run, of any kernel, with 100 draws or more and more
        than two for each parameter.
    :param int num_draws: number of weighted draws.
    :param rng_key: random key of the weighted draws; None is ``jax.random.key(0)``.
    :return: a :class:`Certificate`.
    :raises ValueError: if there are too few draws, or if the draws are not from a posterior on
        these data.

    **References:**

    1. *Pareto Smoothed Importance Sampling*, Aki Vehtari, Daniel Simpson, Andrew Gelman,
       Yuling Yao and Jonah Gabry (2024).
    2. *Safe and Effective Importance Sampling*, Art Owen and Yi Zhou (2000), for the wide part of
       the mixture.

    **Example:** a model with known evidence.

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import CCAdL, certify

        >>> def model(y):
        ...     p = numpyro.sample("p", dist.Beta(1, 1))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Bernoulli(p), obs=y[i])

        >>> y = (jnp.arange(1_000) < 200) * 1.0
        >>> kernel = CCAdL(model, progress_bar=False)
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=1_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), y)
        >>> found = certify(mcmc)
        >>> found.k_hat < 0.5
        True
        >>> exact = jax.scipy.special.betaln(201, 801)
        >>> bool(abs(found.log_evidence - exact) < 4 * found.log_evidence_error)
        True
    """
    args, kwargs = arguments_of(mcmc)
    num_draws, key = whole("num_draws", num_draws, least=_FEWEST), random_key(rng_key)
    draws = kept_draws(mcmc).get_samples(group_by_chain=True)
    target = exact_target(mcmc, args, kwargs, "Certify")
    target = target._replace(model=target.model.with_rule("fine"))
    positions = positions_of(target, draws).astype(np.float64)
    chains, count, d = positions.shape
    check_draws(positions, "a certificate", max(_FEWEST, 2 * d))
    each = np.linspace(0, count - 1, min(count, -(-_FITTED // chains))).round().astype(int)
    flat = positions.reshape(-1, d)
    center, factor = flat.mean(axis=0), _factor_of(flat)
    rng = np.random.default_rng(np.asarray(random.key_data(random.fold_in(key, 0))))
    standard = np.linalg.solve(factor, (positions[:, each].reshape(-1, d) - center).T).T
    mixture = fitted(standard.reshape(chains, len(each), d), rng)
    fresh = mixture.draw(rng, num_draws)
    points = center + fresh @ factor.T
    at_center, differences = _potentials(target, center, points)
    log_ratios = -differences - mixture.log_density(fresh)
    log_ratios = np.where(np.isfinite(log_ratios), log_ratios, -np.inf)
    if not np.isfinite(log_ratios).any():
        raise ValueError(
            "The density of the posterior is not finite at any point drawn near the draws of the"
            " run. The draws are from another posterior, or the posterior is improper."
        )
    log_weights, k_hat = _smoothed(log_ratios)
    weights = np.exp(log_weights)
    values = constrained(target, points[None])
    evidence, error = _evidence(log_ratios, weights)
    log_det = float(np.sum(np.log(np.diagonal(factor))))
    rounding = abs(at_center) * float(np.finfo(target.model.dtype).eps)
    return Certificate(
        k_hat,
        _table(mcmc, values, weights),
        1 / float(np.sum(weights**2)),
        evidence - at_center + log_det,
        float(np.hypot(error, rounding)),
        {name: x[0] for name, x in values.items()},
        weights,
    )


def _factor_of(flat: np.ndarray) -> np.ndarray:
    """A square root of the covariance; raise ``ValueError`` if a parameter never moves."""
    try:
        return np.linalg.cholesky(np.atleast_2d(np.cov(flat.T)))
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "The covariance of the draws is singular, because a parameter never moves or two are"
            " equal. Remove such a parameter from the model, or run again if the chain is stuck."
        ) from error


def _potentials(target: Target, center: np.ndarray, points: np.ndarray) -> tuple[float, np.ndarray]:
    """The potential of all rows at the centre, and its rise at points, shape (n,)."""

    def run(target: Target, center: Array, points: Array) -> tuple[Array, Array]:
        potential: Any = target.potential(IdentityMetric())
        key = target.own(random.key(0))

        def of_chunk(rows: Any) -> tuple[Array, Array]:
            def at(x: Array) -> Array:
                return potential(target.unravel(x), rows, key)

            # differences are taken chunk by chunk, because large sums would lose their digits
            there = at(center)
            return there, lax.map(at, points, batch_size=_AT_ONCE) - there

        return target.mean(over_all_data(of_chunk, target.model.plates))

    dtype = target.model.dtype
    arrays = jnp.asarray(center, dtype), jnp.asarray(points, dtype)
    at_center, rises = target.compiled(run)(*arrays)
    return float(at_center), np.asarray(rises, np.float64)


def _smoothed(log_ratios: np.ndarray) -> tuple[np.ndarray, float]:
    """Logarithms of weights with sum 1, and the shape of their tail."""
    try:
        from arviz_stats.base import array_stats

        # this function takes the logarithms of one over the ratios
        log_weights, k_hat = array_stats.psislw(-log_ratios)
    except ImportError:
        from arviz import psislw

        log_weights, k_hat = psislw(log_ratios)
    log_weights = np.asarray(log_weights, np.float64)
    return log_weights - np.logaddexp.reduce(log_weights), float(k_hat)


def _evidence(log_ratios: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """The logarithm of the mean of the ratios, and its standard error."""
    mean = float(np.logaddexp.reduce(log_ratios) - np.log(len(log_ratios)))
    spread = len(weights) * weights - 1
    return mean, float(np.sqrt(np.mean(spread**2) / len(weights)))


def _table(mcmc: MCMC, values: dict[str, np.ndarray], weights: np.ndarray) -> pd.DataFrame:
    posterior = draws_of(as_data(mcmc))
    # variables in the order of the run
    named = {variable_name(name): x for name, x in values.items()}
    names = [name for name in posterior.data_vars if name in named]
    run, labels = flat_draws(posterior[names])
    columns = [named[name][0].reshape(len(weights), -1) for name in names]
    fresh = np.concatenate(columns, axis=1).astype(np.float64)
    mean = weights @ fresh
    away = fresh - mean
    variance = weights @ away**2
    sd = np.sqrt(variance)
    mean_error = np.sqrt(weights**2 @ away**2)
    variance_error = np.sqrt(weights**2 @ (away**2 - variance) ** 2)
    moves = sd > 0
    sd_error = np.divide(variance_error, 2 * sd, where=moves, out=np.zeros_like(sd))
    flat = run.reshape(-1, run.shape[-1])
    own_mean, own_sd = flat.mean(axis=0), flat.std(axis=0)
    own_mean_error = own_sd / np.sqrt(effective_sizes(run))
    own_sd_error = own_sd / np.sqrt(2 * effective_sizes((run - own_mean) ** 2))
    safe = np.where(moves, sd, np.nan)
    ratio = own_sd / safe
    relative = own_sd_error / np.where(own_sd > 0, own_sd, np.nan)
    return pd.DataFrame(
        {
            "mean": mean,
            "mean_error": mean_error,
            "sd": sd,
            "sd_error": sd_error,
            "shift": (own_mean - mean) / safe,
            "shift_error": np.hypot(own_mean_error, mean_error) / safe,
            "ratio": ratio,
            "ratio_error": ratio * np.hypot(relative, sd_error / safe),
        },
        index=labels,
    )
