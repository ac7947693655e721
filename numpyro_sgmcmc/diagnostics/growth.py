# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Tests of a run with growing rows: has it settled, and do old and new rows agree?"""

import math
from typing import NamedTuple

import jax
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from scipy import stats

from numpyro_sgmcmc.data.converters import shown
from numpyro_sgmcmc.data.growing import FEWEST_COUNTED
from numpyro_sgmcmc.stein import SteinReport, SteinSums, stein_report

#: p value below which old and new rows disagree.
_LEVEL = 1e-3

#: Standard errors between halves of the draws beyond which they have not settled.
_ERRORS = 4.0


class Growth(NamedTuple):
    """
    The result of :func:`growth`: the state of a run after rows have come.

    - **rows** - number of rows.
    - **new** - number of rows that came with the latest change; negative if rows were removed.
    - **surprise** - the mean square shift of the mode in units of its standard deviation. It is
      about 1 if old and new rows have the law of the model; NaN if not known.
    - **p_value** - probability of at least this surprise in that case.
    - **drift** - the largest difference between the means of the two halves of the new draws, over
      the parameters, in standard errors.
    - **stein** - the Stein matrix of the new draws, or None.
    - **counted** - effective number of rows in a minibatch if old rows are forgotten; otherwise
      NaN.
    """

    rows: int
    new: int
    surprise: float
    p_value: float
    drift: float
    stein: SteinReport | None
    counted: float = math.nan

    @property
    def problem(self) -> str | None:
        """The problems of the draws in words, or None."""
        problems = []
        if self.p_value < _LEVEL:
            problems.append(
                f"old and new rows disagree: {self.new:,} rows have moved the mode by"
                f" {math.sqrt(self.surprise):.1f} times what chance explains (p ="
                f" {self.p_value:.1g}). The posterior is that of all of them, as if they had one"
                " law; a model whose parameters may change, or rows of the latest time alone, would"
                " say more"
            )
        if self.drift > _ERRORS:
            problems.append(
                "the draws have not settled: the means of their halves differ by"
                f" {self.drift:.1f} standard errors; run again, from `mcmc.last_state`"
            )
        if self.counted < FEWEST_COUNTED:
            problems.append(
                f"a minibatch counts as {self.counted:.1f} rows, and at least {FEWEST_COUNTED} are"
                " needed: remove rows older than ten half-lives, `rows.remove(...)`"
            )
        if self.stein is not None and (seen := self.stein.problem()) is not None:
            problems.append(seen)
        return "; ".join(problems) or None

    def __str__(self) -> str:
        change = f"{self.new:,} of them new" if self.new >= 0 else f"{-self.new:,} removed"
        parts = [f"{self.rows:,} rows, {change}"]
        if math.isfinite(self.surprise):
            moved = math.sqrt(self.surprise)
            parts.append(f"the mode moved by {moved:.1f} times what chance explains")
        if self.stein is not None:
            parts.append(self.stein.summary())
        return "; ".join([*parts, self.problem or "settled"])


def growth(mcmc: MCMC) -> Growth:
    """
    Test whether a run has settled on new rows, and whether these agree with the old ones.

    The rows are those of a :class:`~numpyro_sgmcmc.GrowingRows`. For a model that is right the
    :math:`N' - N` new rows move the mode :math:`m` of the posterior of :math:`N` by a draw of
    :math:`N(0, \\Sigma_N - \\Sigma_{N'})`, with :math:`\\Sigma_{N'} = L' L'^\\top` about
    :math:`\\tfrac{N}{N'} \\Sigma_N`, so that

    .. math:: \\frac{1}{d} \\Bigl(\\frac{N'}{N} - 1\\Bigr)^{-1} \\| L'^{-1} (m' - m) \\|^2

    is :math:`\\chi^2_d / d`. It is larger if the law of the rows drifts, or if the model is wrong.

    :param mcmc: an ``MCMC`` object after ``run`` with a kernel of this package.
    :raises ValueError: if the run has no growing rows.

    **Example:**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import CCAdL, GrowingRows, growth

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", y.shape[0], subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = jax.random.normal(jax.random.key(0), (12_000,))
        >>> rows = GrowingRows(y[:10_000])
        >>> mcmc = MCMC(
        ...     CCAdL(model, progress_bar=False), num_warmup=200, num_samples=1_000,
        ...     progress_bar=False, jit_model_args=True,
        ... )
        >>> mcmc.run(jax.random.key(1), *rows)
        >>> rows.append(y[10_000:] + 0.2)  # another law
        >>> mcmc.post_warmup_state = mcmc.last_state
        >>> mcmc.run(mcmc.last_state.rng_key, *rows)
        >>> print(growth(mcmc).problem[:42])
        old and new rows disagree: 2,000 rows have

    **References:**

    1. *Asymptotic Statistics*, Aad van der Vaart (1998), section 5.3.
    """
    if not isinstance(mcmc, MCMC):
        raise TypeError(f"`mcmc` must be an `MCMC` object after its run; got {shown(mcmc)}.")
    known = getattr(getattr(mcmc.last_state, "fixed", None), "known", None)
    if known is None:
        raise ValueError(
            "The run has no `GrowingRows`, and `growth` judges only runs that have one. Run a"
            " kernel of this package on a `GrowingRows`, `mcmc.run(rng_key, *rows)`."
        )
    # each chain may have its own copy
    rows, before = (int(np.ravel(x)[0]) for x in (known.rows, known.before))
    shift = np.asarray(known.shift, np.float64).reshape(-1, np.shape(known.shift)[-1])[0]
    surprise = float(np.mean(shift**2)) if rows > before else math.nan
    size = len(shift)
    p_value = float(stats.chi2.sf(size * surprise, size)) if math.isfinite(surprise) else math.nan
    sums = mcmc.last_state.monitor.stein
    report = stein_report(sums) if isinstance(sums, SteinSums) else None
    values = mcmc.get_samples(group_by_chain=True)
    first = getattr(mcmc, "first_draw", 0)  # a `LongRun` also has older draws
    drift = max(
        (_drift(np.asarray(x)[:, first:]) for x in jax.tree.leaves(values)), default=math.nan
    )
    counted = _counted(mcmc, rows, float(np.ravel(known.worth)[0]))
    return Growth(rows, rows - before, surprise, p_value, drift, report, counted)


def _counted(mcmc: MCMC, rows: int, worth: float) -> float:
    """The effective number of rows in a minibatch; NaN if all rows have weight one."""
    model = mcmc.sampler.runtime.model
    if model is None or abs(worth / rows - 1) < 1e-6:
        return math.nan
    return model.plates[0].subsample_size * worth / rows


def _drift(draws: np.ndarray) -> float:
    """The largest difference between the halves of the draws, in standard errors."""
    if draws.dtype.kind != "f" or draws.shape[1] < 8:
        return 0.0
    flat = draws.reshape(*draws.shape[:2], -1).astype(np.float64)
    half = flat.shape[1] // 2
    parts = flat[:, :half], flat[:, half : 2 * half]
    spread = [x.var(axis=(0, 1)) / np.maximum(effective_sample_size(x), 1.0) for x in parts]
    away = np.abs(parts[0].mean(axis=(0, 1)) - parts[1].mean(axis=(0, 1)))
    return float(np.max(away / np.sqrt(np.maximum(sum(spread), 1e-300))))
