# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The request for a tuning, and the findings that its phases hand on."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax import Array, random
import numpy as np

from numpyro_sgmcmc.posterior.control_variate import Anchor
from numpyro_sgmcmc.posterior.metric import Metric
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel
from numpyro_sgmcmc.tuning.pilot import Pilot
from numpyro_sgmcmc.tuning.tuning import Tuning


class TuningRequest(NamedTuple):
    """
    The request of a kernel: what to tune, and what is given.

    - **step_size**, **friction** - given values, or None.
    - **metric** - a given metric, ``"diagonal"``, ``"low_rank"``, ``"dense"``, or None for what
      suits the number of parameters.
    - **gradient** - ``"auto"``, or one of
      :data:`~numpyro_sgmcmc.posterior.control_variate.GRADIENTS`.
    - **init_strategy** - where the search for the centre starts.
    - **strata** - numbers of strata by plate, ``"auto"``, or None.
    - **reparametrise** - whether hierarchies are sampled in coordinates of their own.
    - **near** - a tuning of the same model and other data, at whose centre the search starts; or
      None.
    """

    step_size: float | None
    friction: float | None
    metric: Metric | str | None
    gradient: str
    init_strategy: Callable
    strata: Mapping[str, np.ndarray] | str | None = "auto"
    reparametrise: bool = True
    near: Tuning | None = None


#: From the noise of the gradient to step size and friction (None if the method has none).
Suggestion = Callable[[NoiseLevel], tuple[float, float | None]]


class Search(NamedTuple):
    """
    The arguments of every phase.

    - **request** - what is to be found.
    - **suggest** - the method's step size and friction for a level of noise; None if both are
      given.
    - **pilot** - from a tuning, without a report, to its pilot.
    - **report** - is told the name of each phase when it begins, and the passes before it.
    - **rng_key** - a random key.
    - **from_sample** - whether a sample of the rows may do for what needs no more.
    """

    request: TuningRequest
    suggest: Suggestion | None
    pilot: Callable[[Tuning], Pilot]
    report: Callable[[str, float], None]
    rng_key: Array
    from_sample: bool = True

    def key(self, phase: int) -> Array:
        """The random key of a phase."""
        return random.fold_in(self.rng_key, phase)

    def rates(self, noise: NoiseLevel) -> tuple[float, float | None]:
        """Step size and friction: those given, and what a level of noise asks for."""
        step_size, friction = self.request.step_size, self.request.friction
        if self.suggest is not None:
            suggested = self.suggest(noise)
            step_size, friction = step_size or suggested[0], friction or suggested[1]
        assert step_size is not None
        return step_size, friction


class Known(NamedTuple):
    """
    The findings between two phases.

    - **target** - the model with all of its rows.
    - **seen** - the model with the rows that are looked at: all of them, or a sample.
    - **share** - number of rows that are looked at, as a part of all.
    - **passes** - the cost of each phase, in passes over all rows.
    - **gaussian** - the Gaussian that is close to the posterior.
    - **first** - where the search on a sample has ended, or None.
    - **metric** - the metric in whose coordinates chains will move.
    - **noise** - the noise of the gradient, with the anchor if there is one.
    - **anchor** - of the control variate, or None.
    - **tuning** - the tuning, as far as it is known.
    - **is_sample** - whether a sample of the rows is looked at.
    """

    target: Target
    seen: Target
    share: float
    passes: dict[str, float]
    gaussian: Any = None
    first: Any = None
    metric: Any = None
    noise: Any = None
    anchor: Anchor | None = None
    tuning: Any = None
    is_sample: bool = False

    @property
    def spent(self) -> float:
        """The cost of the phases until now, in passes."""
        return sum(self.passes.values())

    def after(self, phase: str, passes: float, **values: Any) -> "Known":
        """The findings after a phase, with its cost in passes."""
        spent = self.passes | {phase: self.passes.get(phase, 0.0) + passes}
        return self._replace(passes=spent, **values)
