# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""How a kernel comes to know the covariance of its gradient's noise."""

import math
from typing import Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp

from numpyro_sgmcmc.covariance import (
    LANCZOS_STEPS,
    MAX_FULL_DIMENSION,
    Covariance,
    Diagonal,
    Full,
    LowRank,
    MatrixFree,
)
from numpyro_sgmcmc.gradients import (
    ESTIMATORS,
    Gradient,
    Observation,
    estimate_rank,
    product_gradient,
)
from numpyro_sgmcmc.kernels._arguments import one_of, whole
from numpyro_sgmcmc.kernels._base import SGMCMCKernel
from numpyro_sgmcmc.minibatch import MinibatchModel
from numpyro_sgmcmc.noise import NoiseLevel
from numpyro_sgmcmc.potentials import Potential, Rows
from numpyro_sgmcmc.subsampling import finite_population_factor

COVARIANCES = ("diagonal", "full", "low_rank", "matrix_free")

#: The full matrix is the default up to this many parameters.
FULL_BY_DEFAULT = 100

#: An average keeps at least this many steps, and of the observed directions at least so many
#: for itself and so many for each direction that it holds: its own error then widens or
#: narrows the draws by less than about one per cent.
_FEWEST_STEPS, _FEWEST_DIRECTIONS, _DIRECTIONS_FOR_EACH = 50, 900, 100


#: Noise of this variance, in units of the curvature, is too small for its directions to matter.
_LITTLE_NOISE = 0.05


class NoiseSettings(NamedTuple):
    """The arguments of a kernel that say how its noise covariance is estimated."""

    covariance: str | None
    estimator: str
    window: float | None
    rank: int

    @classmethod
    def checked(cls, covariance: Any, estimator: Any, window: Any, rank: Any) -> "NoiseSettings":
        """
        :raises ValueError: if an argument has no meaning, naming it.
        """
        if covariance is not None:
            one_of("covariance", covariance, COVARIANCES)
        if window is not None and window != math.inf:
            whole("window", window)
        return cls(
            covariance,
            one_of("estimator", estimator, ESTIMATORS),
            window,
            whole("rank", rank),
        )

    def on(
        self,
        view: MinibatchModel,
        subsampling: str,
        level: NoiseLevel | None,
        lanczos_steps: int = LANCZOS_STEPS,
    ) -> "NoiseEstimate":
        """
        The estimate for a model: whatever was left open is decided by its size and, in the
        coordinates of a tuned metric, by the level of the noise.
        """
        dimension = view.dimension
        factors = {
            plate.name: finite_population_factor(subsampling, plate.size, plate.subsample_size)
            for plate in view.plates
        }
        covariance = self.covariance
        if covariance is None:
            if level is not None and level.largest < _LITTLE_NOISE:
                covariance = "diagonal"
            elif dimension <= FULL_BY_DEFAULT:
                covariance = "full"
            else:
                # a tuned step is as long as the noise allows, in all of its directions
                covariance = "diagonal" if level is None else "low_rank"
        single = covariance == "matrix_free" or self.estimator != "sub_batches"
        if subsampling == "clusters" and single:
            raise ValueError(
                "subsampling='clusters' needs an estimate from whole clusters, and not from single"
                " rows: use estimator='sub_batches', and another covariance than 'matrix_free'."
            )
        if covariance == "full" and dimension > MAX_FULL_DIMENSION:
            raise ValueError(
                f"covariance='full' is for at most {MAX_FULL_DIMENSION:,} parameters, but the model"
                f" has {dimension:,}; use covariance='low_rank' or 'diagonal'."
            )
        held: Covariance = {
            "diagonal": Diagonal,
            "full": lambda: Full(dimension, lanczos_steps),
            "low_rank": lambda: LowRank(min(self.rank, dimension), lanczos_steps),
            "matrix_free": MatrixFree,
        }[covariance]()
        noisy = [plate for plate in view.plates if factors[plate.name] > 0]
        ranks = [estimate_rank(self.estimator, plate.subsample_size) for plate in noisy]
        directions = _FEWEST_DIRECTIONS + _DIRECTIONS_FOR_EACH * held.freedom
        window = self.window or max(_FEWEST_STEPS, math.ceil(directions / min(ranks, default=1)))
        return NoiseEstimate(covariance, self.estimator, window, held, factors)


class NoiseEstimate(NamedTuple):
    """
    The estimate :math:`\\hat V` of the covariance of the gradient's noise,

    .. math::

        \\hat V_t = (1 - \\kappa_t) \\hat V_{t-1} + \\kappa_t V(\\theta),
            \\qquad \\kappa_t = \\max(1 / t, 1 / \\text{window}),

    of what single minibatches show, :math:`V(\\theta)`. A step uses :math:`\\hat V_{t-1}`,
    since what a minibatch shows is correlated with the noise of its own gradient.
    """

    covariance: str
    estimator: str
    window: float
    held: Covariance
    factors: dict[str, float]

    def start(self, position: Array) -> tuple[Any, Array]:
        """No covariance, from no observations."""
        zeros = self.held.zeros(position.shape[0], position.dtype)
        return zeros, jnp.zeros((), jnp.int32)

    def oracle(
        self, kernel: SGMCMCKernel, potential: Potential, rows: Rows, rng_key: Array
    ) -> Gradient:
        """The gradient with an observation of the covariance of its noise."""
        if self.covariance != "matrix_free":
            estimate = ESTIMATORS[self.estimator]
            return estimate(potential, rows, rng_key, self.factors, self.held)
        others = kernel.draw_rows(random.fold_in(rng_key, 1), jnp.zeros((), jnp.int32))
        return product_gradient(potential, rows, rng_key, self.factors, others)

    def current(self, average: Any, observed: Observation) -> Any:
        """The covariance for this step."""
        return observed.noise if self.covariance == "matrix_free" else average

    def update(self, average: Any, count: Array, observed: Observation) -> tuple[Any, Array]:
        """The average and the number of observations for the next step."""
        count = count + 1
        if self.covariance == "matrix_free":
            return average, count
        window = count if self.window == math.inf else jnp.minimum(count, int(self.window))
        kappa = 1 / window.astype(observed.gradient.dtype)
        return self.held.add(1 - kappa, average, kappa, observed.noise), count
