# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Estimation of the covariance of a kernel's gradient noise."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
import math
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_sgmcmc.data.converters import one_of, whole
from numpyro_sgmcmc.data.rows import Group
from numpyro_sgmcmc.data.subsampling import sub_batches
from numpyro_sgmcmc.gradients.blocks import blocks_of
from numpyro_sgmcmc.gradients.covariance import (
    LANCZOS_STEPS,
    MAX_FULL_DIMENSION,
    Covariance,
    Diagonal,
    Full,
    LowRank,
    MatrixFree,
)
from numpyro_sgmcmc.gradients.estimators import (
    ESTIMATORS,
    Evaluation,
    Gradient,
    minibatch_gradient,
    over_devices,
    product_gradient,
)
from numpyro_sgmcmc.posterior.potential import Potential, Rows
from numpyro_sgmcmc.posterior.target import Target

COVARIANCES = ("diagonal", "full", "low_rank", "matrix_free")

#: Largest number of parameters for which the full matrix is the default.
FULL_BY_DEFAULT = 100

#: Default number of directions of a low-rank covariance.
_RANK = 20

#: Largest number of parameters for which it is the default. Beyond, an average of a few thousand
#: observed directions shows few of the true ones, and takes most of the time of a step.
_MOST_FOR_LOW_RANK = 20_000

#: Smallest number of steps in an average, of observed directions, and of observed directions for
#: each direction of the representation. The error of the average then widens or narrows the draws
#: by less than about one per cent.
_FEWEST_STEPS, _FEWEST_DIRECTIONS, _DIRECTIONS_FOR_EACH = 50, 900, 100

#: Number of times that the minibatches of an average have a row, and the most steps for it. A row
#: kicks a chain, and the friction for its noise grows at the same time. The variances of parameters
#: that few rows inform were 1.2 per cent too large if a row came half a time, and 0.1 per cent if
#: it came ten times.
_TIMES_OF_A_ROW, _MOST_FOR_ROWS = 10, 2_000

#: Variance of the noise, in units of the curvature, below which its directions do not matter.
_LITTLE_NOISE = 0.05

#: Parameters that are many, steps of a sample that is long, and the steps from one estimate of the
#: noise to the next where both are.
_MANY, _LONG_SAMPLE, _SPARED = 1_000, 16, 4


@dataclass(frozen=True)
class NoiseEstimate:
    """
    Settings for estimating the covariance of the gradient's noise.

    It is the argument ``noise`` of the kernels that correct for that noise. The model and the
    tuning decide settings that are left out. The shorthand ``noise="full"`` of a kernel means
    ``noise=NoiseEstimate(covariance="full")``.

    :param str covariance: representation of the estimate :math:`\\hat V`. It is one of

        - ``"diagonal"``: the variance of each coordinate;
        - ``"full"``: the matrix, for at most 1,000 parameters;
        - ``"low_rank"``: the leading directions and the diagonal;
        - ``"matrix_free"``: products only, with :math:`V(\\theta)` at the current position from an
          independent minibatch, and nothing averaged.

        None is ``"full"`` for up to 100 parameters. Above, it is ``"diagonal"``, or ``"low_rank"``
        for up to 20,000 parameters if the tuning has measured more than a little noise.
    :param str estimator: estimator of single minibatches: ``"sub_batches"``, the default,
        ``"two_cotangents"`` or ``"per_example"``; see :mod:`numpyro_sgmcmc.gradients.estimators`.
    :param window: number of estimates in the average; ``math.inf`` for all since the start, as in
        the paper. With None the error of the average widens the draws by less than a per cent: 100
        for the diagonal, more in proportion to the number of parameters for the full matrix, and
        after a tuning as many minibatches as draw a row ten times, or 2,000 if that is less. Each
        step has an estimate. With groups and more than 1,000 parameters every fourth step has one,
        if the tuning takes 16 steps or more for a sample.
    :param int rank: number of leading directions of ``covariance="low_rank"``; None is 20.
    :raises ValueError: if an argument has no meaning, or would be ignored. The message names it.

    **Example:**

    .. doctest::

        >>> import math
        >>> from numpyro_sgmcmc import NoiseEstimate
        >>> NoiseEstimate(covariance="low_rank", rank=5, window=math.inf)
        NoiseEstimate(covariance='low_rank', estimator=None, window=inf, rank=5)
    """

    covariance: str | None = None
    estimator: str | None = None
    window: float | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        for name, options in (("covariance", COVARIANCES), ("estimator", tuple(ESTIMATORS))):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, one_of(name, value, options))
        for name in ("window", "rank"):
            value = getattr(self, name)
            is_all = name == "window" and isinstance(value, float) and value == math.inf
            if value is not None and not is_all:
                object.__setattr__(self, name, whole(name, value))
        if self.rank is not None and self.covariance != "low_rank":
            raise ValueError(
                f"`rank={self.rank}` is the number of directions for covariance='low_rank', but"
                f" covariance={self.covariance!r}. Leave `rank` out, or use covariance='low_rank'."
            )
        if self.covariance == "matrix_free":
            for name in ("estimator", "window"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(
                        f"`{name}={value!r}` would be ignored: covariance='matrix_free' takes"
                        " products with the covariance of another minibatch at each step, without"
                        f" an average. Leave `{name}` out, or use another covariance."
                    )

    @property
    def can_stratify(self) -> bool:
        """True if the estimate is correct for stratified minibatches too."""
        return self.covariance != "matrix_free" and self.estimator in (None, "sub_batches")

    def resolved(
        self, target: Target, level: float | None = None, lanczos_steps: int = LANCZOS_STEPS
    ) -> "RunningCovariance":
        """
        Return the estimate for a model, with all settings decided.

        Open settings are decided by the number of parameters and, in the coordinates of a tuned
        metric, by the level of the noise.

        :param target: the model with its data and its scheme of subsampling.
        :param float level: the largest variance of the noise, in units of the curvature, if
            measured.
        :param int lanczos_steps: steps of the Lanczos process for functions of the covariance.
        :raises ValueError: if the estimate does not fit the model or the scheme of subsampling.
        """
        plates, dimension = target.model.plates, target.model.dimension
        factors = target.factors
        covariance, estimator = self.covariance, self.estimator or "sub_batches"
        if covariance is None:
            if level is not None and level < _LITTLE_NOISE:
                covariance = "diagonal"
            elif dimension <= FULL_BY_DEFAULT:
                covariance = "full"
            else:
                # a tuned step is as long as the noise allows, so that all its directions matter
                is_seen = level is not None and dimension <= _MOST_FOR_LOW_RANK
                covariance = "low_rank" if is_seen else "diagonal"
        if target.scheme.blocks and (covariance == "matrix_free" or estimator != "sub_batches"):
            raise ValueError(
                "subsampling='blocks' needs an estimate of the noise from whole blocks, and not"
                " from single rows. Use estimator='sub_batches', and a covariance other than"
                " 'matrix_free'."
            )
        if target.groups and not self.can_stratify:
            raise ValueError(
                "Stratified minibatches need an estimate of the noise from sub-batches of one"
                " stratum. Use estimator='sub_batches' and a covariance other than 'matrix_free';"
                " or use subsampling='without_replacement'."
            )
        if covariance == "full" and dimension > MAX_FULL_DIMENSION:
            raise ValueError(
                f"covariance='full' is for at most {MAX_FULL_DIMENSION:,} parameters, but the"
                f" model has {dimension:,}. Use covariance='low_rank' or 'diagonal'."
            )
        representation: Covariance = {
            "diagonal": Diagonal,
            "full": lambda: Full(dimension, lanczos_steps),
            "low_rank": lambda: LowRank(min(self.rank or _RANK, dimension), lanczos_steps),
            "matrix_free": MatrixFree,
        }[covariance]()
        noisy = [plate for plate in plates if factors[plate.name] > 0]
        ranks = [
            blocks_of(target.groups[plate.name], plate.subsample_size).rank
            if plate.name in target.groups
            else estimate_rank(estimator, plate.subsample_size)
            for plate in noisy
        ]
        directions = _FEWEST_DIRECTIONS + _DIRECTIONS_FOR_EACH * representation.freedom
        fewest = _FEWEST_STEPS
        if level is not None and target.known is None:
            # chains start in the posterior, and need not forget the noise at their start
            rarest = max((plate.size / plate.subsample_size for plate in noisy), default=1.0)
            fewest = max(fewest, min(math.ceil(_TIMES_OF_A_ROW * rarest), _MOST_FOR_ROWS))
        window = self.window or max(fewest, math.ceil(directions / min(ranks, default=1)))
        return RunningCovariance(
            covariance, estimator, window, representation, tuple(factors.items())
        )


def estimate_rank(estimator: str, batch_size: int) -> int:
    """
    Return the number of independent directions in one estimate from ``batch_size`` rows.

    :raises ValueError: if there is a single row, which shows no spread.
    """
    blocks = blocks_of([Group(0, sub_batches(batch_size), 1.0)], batch_size)
    return {"sub_batches": blocks.rank, "two_cotangents": 1, "per_example": batch_size - 1}[
        estimator
    ]


@dataclass(frozen=True)
class RunningCovariance:
    """
    Running estimate :math:`\\hat V` of the covariance of the gradient's noise.

    It is the average

    .. math::

        \\hat V_t = (1 - \\kappa_t) \\hat V_{t-1} + \\kappa_t V(\\theta),
            \\qquad \\kappa_t = \\max(1 / t, 1 / \\text{window}),

    of the estimates :math:`V(\\theta)` of single minibatches. A step uses :math:`\\hat V_{t-1}`,
    since the estimate of a minibatch is correlated with the noise of its own gradient.

    The object is a :class:`NoiseEstimate` resolved for one model: words and numbers that are part
    of a compiled step. The average itself is in the state of a chain.
    """

    covariance: str
    estimator: str
    window: float
    representation: Covariance
    #: the finite-population factor by plate
    factors: tuple[tuple[str, float], ...]
    #: number of steps from one estimate to the next
    every: int = 1

    def for_samples_of(self, steps: int, target: Target) -> "RunningCovariance":
        """
        Return the estimate with as few evaluations as samples of so many steps need.

        With groups a gradient takes up to twice as long if it comes with an estimate. Long samples
        of many parameters have one in every fourth step. With few parameters the seconds that this
        takes to compile are not won back. Growing rows change the noise, and need all estimates.
        """
        has_groups = any(plate.is_group for plate in target.model.plates)
        is_dear = has_groups and target.model.dimension > _MANY and steps >= _LONG_SAMPLE
        can_spare = self.covariance != "matrix_free" and target.known is None
        return replace(self, every=_SPARED) if is_dear and can_spare else self

    def start(self, position: Array) -> tuple[Any, Array]:
        """Return the initial average: covariance zero, from zero minibatches."""
        zeros = self.representation.zeros(position.shape[0], position.dtype)
        return zeros, jnp.zeros((), jnp.int32)

    def current(self, average: Any, evaluation: Evaluation) -> Any:
        """Return the covariance for this step."""
        return evaluation.noise if self.covariance == "matrix_free" else average

    def update(self, average: Any, count: Array, evaluation: Evaluation) -> tuple[Any, Array]:
        """Return the average and the number of minibatches for the next step."""
        if self.every == 1:
            return self._updated(average, count, evaluation)
        return lax.cond(
            evaluation.has_estimate, self._updated, lambda *x: x[:2], average, count, evaluation
        )

    def _updated(self, average: Any, count: Array, evaluation: Evaluation) -> tuple[Any, Array]:
        count = count + 1
        if self.covariance == "matrix_free":
            return average, count
        window = count if self.window == math.inf else jnp.minimum(count, int(self.window))
        kappa = 1 / window.astype(evaluation.gradient.dtype)
        return self.representation.add(1 - kappa, average, kappa, evaluation.noise), count


def gradient_oracle(
    target: Target,
    potential: Potential,
    rows: Rows,
    rng_key: Array,
    noise: RunningCovariance | None = None,
    step: Array | int = 0,
) -> Gradient:
    """
    Return the gradient oracle for one step, over all devices that the rows are spread over.

    :param target: the model with its data, on one device.
    :param potential: the minibatch potential.
    :param rows: rows of the minibatch for each subsampled plate.
    :param rng_key: key for a potential that is itself random, and for other minibatches.
    :param noise: the estimate of the noise covariance, or None for the gradient alone.
    :param step: the number of the step in its sample.
    """
    own = target.own(rng_key)
    if noise is None:
        gradient = minibatch_gradient(potential, rows, own)
    else:
        factors: Mapping[str, Any] = dict(noise.factors) | target.factors_so_far
        if noise.covariance == "matrix_free":
            others = target.rows(random.fold_in(own, 1))
            gradient = product_gradient(potential, rows, own, factors, others)
        else:
            estimate, groups = ESTIMATORS[noise.estimator], target.groups
            # stratified minibatches are resolved to this estimator alone
            strata = {"groups": groups} if groups else {}
            gradient = estimate(potential, rows, own, factors, noise.representation, **strata)
            if noise.every > 1:
                alone = minibatch_gradient(potential, rows, own)
                gradient = _now_and_then(gradient, alone, noise, step)
    return over_devices(gradient, target, target.own(random.fold_in(rng_key, 2)))


def _now_and_then(
    estimate: Gradient, alone: Gradient, noise: RunningCovariance, step: Array | int
) -> Gradient:
    """The oracle with an estimate of the noise at some steps of a sample, and without at others."""
    estimate = jax.jit(estimate)  # traced once, for shapes and for its branch

    def gradient(position: Array) -> Evaluation:
        shapes = jax.eval_shape(estimate, position).noise
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def without(position: Array) -> Evaluation:
            return alone(position)._replace(noise=zeros, has_estimate=False)

        # the number of the step is the same in all chains, so that `vmap` keeps the branches apart
        return lax.cond(step % noise.every == 0, estimate, without, position)

    return gradient
