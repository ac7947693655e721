# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The result of a tuning for a model and its data."""

import math
import os
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.archive import Archive
from numpyro_sgmcmc.data.records import kinds_in
from numpyro_sgmcmc.data.strata import Strata
from numpyro_sgmcmc.posterior.control_variate import Anchor
from numpyro_sgmcmc.posterior.coordinates import AnyCoordinates
from numpyro_sgmcmc.posterior.metric import DenseMetric, GaussianMetric, Metric
from numpyro_sgmcmc.stein import SteinReport
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel
from numpyro_sgmcmc.tuning.rare_rows import MUCH_ERROR, error_of
from numpyro_sgmcmc.tuning.words import LIMITS, summary_of

#: Nonlinearity of the gradient and R-hat of the pilot above which the posterior may fit no metric,
#: such as a funnel, a banana or a neural network.
_FAR_FROM_GAUSSIAN = 0.6
NOT_MIXED = 1.1
NOT_MIXED_OF_MANY = 1.5  #: the same R-hat for a metric that is not a full matrix

#: Rounding error that is worth a warning, in posterior standard deviations.
_MUCH_ROUNDING = 0.05

#: Error of integrals over latent variables of groups that is worth a warning, in the same units.
_WRONG_INTEGRALS = 0.05

#: Slowness in a direction that is worth a warning.
_MUCH_SLOWER = 4.0

_NO_GAIN = 3.0  #: passes over the data for an independent draw beyond which minibatches do not pay


class Tuning(NamedTuple):
    """
    The result of a tuning for a model and its data, for use in ``kernel(model, tuning=...)``.

    - **step_size** - step size, in units of a posterior standard deviation.
    - **friction** - friction, or None for methods that have none.
    - **metric** - the metric, in whose coordinates the sampler moves.
    - **start** - the Gaussian from which chains start, or None.
    - **anchor** - the anchor of the control variate, or None if plain minibatches are better.
    - **noise** - the noise of the gradient in use.
    - **plain_noise** - the gradient noise of plain minibatches.
    - **passes** - the cost in passes over the data, by phase: gradients of all rows.
    - **rounding** - the rounding error of the gradient of all data, as the largest shift of the
      draws in posterior standard deviations.
    - **halvings** - number of times that the pilot halved the step size.
    - **report** - the Stein matrix of the pilot with this step size.
    - **multimodal** - whether the searches for the centre ended in different modes.
    - **converged** - whether the search for the metric has converged. It does not if the posterior
      is far from any Gaussian.
    - **r_hat**, **slowest** - the largest R-hat of the pilot's chains, and its site. Without a full
      matrix as metric, values that chance explains do not count.
    - **flat** - the site that neither the data nor the prior determine, if there is one.
    - **data** - fingerprint of the data of the anchor.
    - **model** - fingerprint of kernel and model, in a folder of tunings.
    - **densities** - log density of each site at fixed values, which identifies the model.
    - **steps_per_sample** - number of steps after which a chain has nearly forgotten its position,
      for a tuned step size; otherwise 1.
    - **seconds_per_sample** - measured duration of these steps in one chain.
    - **strata** - strata of the rows by plate, if rows are drawn within strata.
    - **centring** - the coordinates of hierarchies by site, used by metric, start and anchor
      (:mod:`numpyro_sgmcmc.posterior.reparam`).
    - **fourth_cumulant** - fourth cumulant of the gradient noise from rare rows in the worst
      direction, or a bound on it (:mod:`numpyro_sgmcmc.tuning.rare_rows`).
    - **integrals** - largest shift of the draws by the integrals over latent variables of groups,
      in posterior standard deviations (:mod:`numpyro_sgmcmc.tuning.quadrature_error`).
    - **rule** - quadrature rule of these integrals in a step.
    - **widest**, **slow** - width of the posterior, in the coordinates of the metric, in a
      direction where it is much wider than the metric says
      (:mod:`numpyro_sgmcmc.tuning.curvature`), and its site; otherwise 0.
    - **passes_per_sample** - cost of a sample of a chain in passes over the data.
    - **larger** - a factor of the number of rows in a minibatch, and the number of steps per sample
      with it, where the noise makes steps short; otherwise the factor is 1.

    **Example:** a tuning in a file, for another process.

    .. doctest::

        >>> import tempfile
        >>> from numpyro_sgmcmc import Tuning
        >>> from numpyro_sgmcmc.posterior.metric import IdentityMetric
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Tuning(0.5, 0.7, IdentityMetric()).save(f"{folder}/tuning.npz")
        ...     Tuning.load(f"{folder}/tuning.npz").step_size
        0.5
    """

    step_size: float
    friction: float | None
    metric: Metric
    start: GaussianMetric | None = None
    anchor: Anchor | None = None
    noise: NoiseLevel | None = None
    plain_noise: NoiseLevel | None = None
    passes: dict[str, float] = {}
    rounding: float = 0.0
    halvings: int = 0
    report: SteinReport | None = None
    multimodal: bool = False
    converged: bool = True
    r_hat: float | None = None
    slowest: str = ""
    flat: str = ""
    data: str | None = None
    model: str = ""
    densities: dict[str, float] = {}
    steps_per_sample: int = 1
    seconds_per_sample: float = 0.0
    strata: dict[str, Strata] = {}
    centring: dict[str, AnyCoordinates] = {}
    fourth_cumulant: float = 0.0
    integrals: float = 0.0
    rule: str = "step"
    widest: float = 0.0
    slow: str = ""
    passes_per_sample: float = 0.0
    larger: tuple[int, int] = (1, 1)

    def save(self, path: str | os.PathLike) -> None:
        """
        Write the tuning into a file of arrays and JSON, for :meth:`load`.

        :param path: the path of the file. An older file is replaced.
        :raises OSError: if the file cannot be written.
        """
        path = Path(os.path.realpath(path))
        own = path.with_name(f"{path.name}.{uuid4().hex}")  # another process may write, too
        try:
            _FILE.save(own, {"tuning": self})
            os.replace(own, path)
        finally:
            own.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike) -> "Tuning":
        """
        Read a tuning from the file that :meth:`save` wrote; this runs no code of the file.

        :param path: the path of the file.
        :raises ValueError: if the file is not a tuning, is damaged or has another version.
        """
        path = Path(os.path.realpath(path))
        content = _FILE.load(path)
        with _FILE.understood(path):
            tuning = content["tuning"]
            if not isinstance(tuning, Tuning):
                raise TypeError("it has no tuning")
            if not 0 < tuning.step_size < math.inf:
                raise TypeError(f"its step size is {tuning.step_size}")
            of_programs = ("metric", "start", "anchor", "strata", "centring")
            return tuning._replace(
                **{name: jax.tree.map(jnp.asarray, getattr(tuning, name)) for name in of_programs}
            )

    @property
    def width(self) -> float:
        """
        The approximate largest posterior standard deviation, in the coordinates of the metric.
        """
        metric, start = self.metric, self.start
        if start is None or _are_equal(metric, start):
            return 1.0
        normal = random.normal(random.key(0), (100, *start.center.shape), start.center.dtype)
        coordinates = jax.vmap(lambda x: metric.coordinates(start.values(x)))(normal)
        return float(jnp.std(coordinates, axis=0).max())

    @property
    def relaxation_time(self) -> float:
        """
        The relaxation time, after which a chain has forgotten its position.

        It is :math:`w^2` if the posterior has the width :math:`w` in the coordinates of the metric.
        With momentum and friction :math:`A` it is the larger one of :math:`A w^2` and :math:`2 w`.

        **Example:** in the metric of the posterior a chain with little friction moves by inertia.

        .. doctest::

            >>> from numpyro_sgmcmc.posterior.metric import IdentityMetric
            >>> from numpyro_sgmcmc.tuning.tuning import Tuning
            >>> [Tuning(0.5, A, IdentityMetric()).relaxation_time for A in (None, 0.7, 5.0)]
            [1.0, 2.0, 5.0]
        """
        return self._time_of(self.width)

    def _time_of(self, width: float) -> float:
        return width**2 if self.friction is None else max(2 * width, self.friction * width**2)

    @property
    def slowness(self) -> float:
        """The factor by which a chain is slower in the direction that the metric misses."""
        width = self.width
        return self._time_of(max(width, self.widest)) / self._time_of(width)

    @property
    def misses_a_direction(self) -> bool:
        """True if a sample is much less than an independent draw in some direction."""
        return self.slowness > _MUCH_SLOWER

    @property
    def takes_all_rows(self) -> bool:
        """True if the tuning was found with all rows in each step, without any noise."""
        return self.plain_noise is not None and self.plain_noise.mean == 0

    @property
    def minibatches_pay(self) -> bool:
        """
        True if minibatches need fewer passes for an independent draw than NUTS on all rows.

        It is also true if minibatch noise is not the reason for the number of passes. NUTS needs 7
        to 30 gradients for a draw, and rows cost about half as much if all of them are evaluated
        together.
        """
        if self.noise is None or self.passes_per_sample < _NO_GAIN:
            return True
        longest = self.step_size * 2**self.halvings
        if self.friction is None:
            return True
        limits = longest**2 * self.noise.largest, longest * self.noise.correlated / self.friction
        return max(limits) < LIMITS

    @property
    def is_far_from_gaussian(self) -> bool:
        """True if the metric is only a rough guess, and chains are slow because of it."""
        if self.noise is None:
            return False
        if not isinstance(self.start, DenseMetric):
            # in short pilots even the median of thousands of coordinates is above 1.1
            return self.r_hat is not None and self.r_hat > NOT_MIXED_OF_MANY
        if self.r_hat is not None:
            return self.r_hat > NOT_MIXED
        return self.noise.nonlinearity > _FAR_FROM_GAUSSIAN or not self.converged

    @property
    def rare_rows_error(self) -> float:
        """The approximate error of standard deviations from rare rows in the worst direction."""
        if self.noise is None:
            return 0.0
        rates = self.step_size, self.friction
        return error_of(self.fourth_cumulant, self.noise.nonlinearity, *rates)

    @property
    def has_rare_rows(self) -> bool:
        """True if rare rows count too much in their minibatches."""
        return not self.rare_rows_error <= MUCH_ERROR  # NaN is a problem too

    @property
    def needs_double_precision(self) -> bool:
        """True if rounding errors of the gradient are large enough to affect the draws."""
        return not self.rounding <= _MUCH_ROUNDING

    @property
    def has_wrong_integrals(self) -> bool:
        """True if errors of integrals over latent variables of groups affect the draws."""
        return not self.integrals <= _WRONG_INTEGRALS

    @property
    def problem(self) -> str | None:
        """The problems of the pilot or the searches in words, or None."""
        problems = [f"the posterior does not depend on '{self.flat}'"] if self.flat else []
        problems += ["the posterior has several modes"] if self.multimodal else []
        problems += ["the posterior is far from any Gaussian"] if self.is_far_from_gaussian else []
        if self.misses_a_direction:
            problems += [f"the metric misses a direction of '{self.slow}'"]
        problems += ["the gradient is rounded off"] if self.needs_double_precision else []
        problems += ["few minibatches have rows that count much"] if self.has_rare_rows else []
        problems += ["the integrals over groups are not exact"] if self.has_wrong_integrals else []
        pilot = None if self.report is None else self.report.problem()
        return "; ".join(problems + ([pilot] if pilot else [])) or None

    def __str__(self) -> str:
        return summary_of(self)


_FILE = Archive("tuning", 1, kinds_in(Tuning), "Tune the kernel again.")


class TuningFailed(ValueError):
    """
    The error of a tuning with which a run would be of no use.

    :param tuning: the result of the tuning.
    """

    def __init__(self, message: str, tuning: Tuning) -> None:
        super().__init__(message)
        self.tuning = tuning


def _are_equal(metric: Metric, other: Metric) -> bool:
    """True for one metric, which may have been read from a file twice."""
    if metric is other or type(metric) is not type(other):
        return metric is other
    return all(map(np.array_equal, metric, other))
