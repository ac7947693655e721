# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Short chains that show whether the steps are short enough, and whether chains agree."""

from collections.abc import Callable
import math
from typing import Any, Protocol

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.control_variate import GRADIENTS_OF_A_STEP, order_of
from numpyro_sgmcmc.posterior.initial_values import draw_from
from numpyro_sgmcmc.posterior.metric import DenseMetric, GaussianMetric, Metric
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.potential import ravel
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.stein import stein_report
from numpyro_sgmcmc.tuning.noise_level import NoiseLevel
from numpyro_sgmcmc.tuning.pilot_rhat import (
    Halves,
    PilotRun,
    beyond_chance,
    no_positions,
    r_hats,
    with_position,
)
from numpyro_sgmcmc.tuning.tuning import NOT_MIXED, NOT_MIXED_OF_MANY, Tuning

PILOT_CHAINS = 8  #: number of chains of a pilot
_PILOT_STEPS = 600  #: smallest number of steps of each chain
_MOST_PILOT_STEPS = 40_000  #: largest number of steps of each chain
_HALVINGS = 5  #: largest number of halvings of the step size

_UNDONE_BY_CHANCE = 2  #: number of undone steps of a pilot that chance explains
_UNDONE = 1e-4  #: tolerable share of undone steps beyond it

_PILOT_TIME = 40.0  #: length of a chain in units of its memory; shorter chains look too narrow
_LONGER = (1, 8, 32)  #: factors of this length, until the chains agree
#: Chains of any length disagree if the square of R-hat, less 1, is larger than this, and than half
#: of that of shorter chains.
_APART = 1.0
_AGAIN = 2**31  #: of the key of chains that confirm what others have shown


class Pilot(Protocol):
    """A function that runs short chains."""

    def __call__(self, step_size: float, steps: int, rng_key: Array, /) -> PilotRun:
        """Run the chains with a step size and a number of steps."""

    def prepare(self) -> None:
        """Compile the program beside the next work."""


def run_pilot(target: Target, rng_key: Array, tuning: Tuning, pilot: Pilot) -> Tuning:
    """
    Run short chains with the step size of a tuning, and halve it until their Stein matrix is right.

    A right Stein matrix is the identity. If shorter steps do not help, the step size stays as it
    was. Chains that do not agree are run longer, as long as this helps. Without a full matrix as
    metric, other chains of the same length must confirm that a coordinate is slow.

    :param target: the model with its data.
    :param rng_key: a random key.
    :param tuning: the tuning before the pilot.
    :param pilot: the function that runs the chains.
    :return: the tuning with the step size, and with the results of its chains.
    """
    noise = tuning.noise
    assert noise is not None
    # with one, chains agree where the posterior is a Gaussian
    has_matrix = isinstance(tuning.start, DenseMetric)
    cost = PILOT_CHAINS * GRADIENTS_OF_A_STEP[order_of(tuning.anchor)] * target.minibatch_share
    passes = 0.0
    tried: list[Tuning] = []
    for halvings in range(_HALVINGS + 1):
        step_size = tuning.step_size / 2**halvings
        key = random.fold_in(rng_key, halvings)
        most = math.inf
        for longer in _LONGER:
            steps, is_long_enough = pilot_steps(noise, step_size / tuning.width, longer)
            seen = pilot(step_size, steps, random.fold_in(key, longer))
            passes += steps * cost
            judged = _r_hats(target, seen, has_matrix)
            if not has_matrix and judged is not None and judged[1].max() > NOT_MIXED_OF_MANY:
                # chance does not choose the same of many coordinates twice
                again = pilot(step_size, steps, random.fold_in(key, _AGAIN))
                confirmed = _r_hats(target, again, has_matrix)
                judged = judged if confirmed is None else np.minimum(judged, confirmed)
                passes += steps * cost
            r_hat = None if judged is None else float(judged[1].max())
            # not by chance, and not because their memory is somewhat longer
            if r_hat is None or r_hat <= NOT_MIXED or not (has_matrix and is_long_enough):
                break
            excess = r_hat**2 - 1
            if excess > most:
                break
            most = max(_APART, excess / 2)
        found = stein_report(seen.stein)
        tried.append(
            tuning._replace(
                step_size=step_size,
                passes=tuning.passes | {"pilot": passes},
                halvings=halvings,
                report=found,
                r_hat=r_hat,
                slowest="" if judged is None else _slowest(target, *judged),
                # where chains agree the search has only not come to its end
                flat=tuning.flat if r_hat is None or r_hat > NOT_MIXED else "",
            )
        )
        may_be_undone = _UNDONE_BY_CHANCE + _UNDONE * PILOT_CHAINS * steps
        is_stable = np.asarray(seen.undone).sum() <= may_be_undone
        if is_stable and (found is None or found.problem() is None):
            return tried[-1]
        if not is_long_enough or (halvings >= 2 and is_stable and _is_no_better(tried)):
            break
    # whatever is wrong, it is not the step size
    return tried[0]._replace(passes=tried[-1].passes)


def pilot_steps(noise: NoiseLevel, step_size: float, longer: int = 1) -> tuple[int, bool]:
    """
    The number of steps of each chain of a pilot.

    Independent draws take more steps if the noise is large, or the steps are short.

    :param noise: the noise of the gradient.
    :param float step_size: step size in units of the largest posterior standard deviation.
    :param int longer: factor of the length that chains need if a metric fits.
    :return: the number of steps, and whether they are enough for a verdict.
    """
    needed = longer * _PILOT_TIME / step_size
    fewest = _PILOT_STEPS * min(max(1.0, noise.mean / 4), 10.0)
    return int(min(max(fewest, needed), _MOST_PILOT_STEPS)), needed <= _MOST_PILOT_STEPS


def _is_no_better(tried: list[Tuning]) -> bool:
    """True if a quarter of the step size or less has not corrected a wrong temperature."""
    first, found = tried[0].report, tried[-1].report
    assert first is not None and found is not None
    before, now = abs(first.temperature - 1), abs(found.temperature - 1)
    return before > 3 * first.error and now > 0.75 * before


def _r_hats(target: Target, seen: PilotRun, has_matrix: bool) -> np.ndarray | None:
    """R-hat of each coordinate, and the same without what chance explains, shape (2, d)."""
    if seen.halves is None:
        return None
    found = np.nan_to_num(r_hats(seen.halves), nan=np.inf, posinf=np.inf)
    if has_matrix:
        return np.stack([found, found])
    # these chains are not run longer until all coordinates agree
    own = _sizes_of_sites(target)
    sizes = len(own) * np.repeat(own, own)
    return np.stack([found, beyond_chance(found, np.size(seen.halves.counts), sizes)])


def _slowest(target: Target, r_hats: np.ndarray, judged: np.ndarray) -> str:
    """The site of the largest R-hat, among equal ones of that which chance explains."""
    return site_of(target, np.where(judged == judged.max(), r_hats, 0))


def site_of(target: Target, sizes: np.ndarray) -> str:
    """The site of the coordinate with the largest number."""
    ends = np.cumsum(_sizes_of_sites(target))
    k = int(np.searchsorted(ends, np.argmax(sizes), side="right"))
    return sorted(target.model.latents)[k]


def _sizes_of_sites(target: Target) -> list[int]:
    """The number of coordinates of each site, in the order of the flat vector."""
    latents = target.model.latents
    return [math.prod(latents[name].shape) for name in sorted(latents)]


def short_chains(
    begin: Callable[[Values, Array, Array], Any],
    advance: Callable[[Any], Any],
    axes: Any,
    target: Target,
    gaussian: GaussianMetric,
    temperature: float,
    metric: Metric,
    samples: Array,
    rng_key: Array,
) -> PilotRun:
    """
    The chains of a pilot, from draws of a Gaussian.

    :param begin: function from values and two keys to the state of a chain.
    :param advance: function that takes one sample of a chain, or of several.
    :param axes: axes of the state of several chains, for :func:`jax.vmap`.
    :param target: the model with its data, tuned.
    :param gaussian: the Gaussian that is close to the posterior.
    :param metric: metric in whose coordinates chains are compared.
    :param samples: number of samples of each chain.
    """
    keys = random.split(rng_key, (3, PILOT_CHAINS))
    z = draw_from(gaussian, target, temperature, keys[1])

    def seen(halves: Halves, z: Values, k: Array) -> Halves:
        position = metric.coordinates(ravel(target.to_internal(z)))
        return with_position(halves, position, 4 * k // samples - 2, 2 * k >= samples)

    def both(seen: Callable) -> Callable:
        def sampled(k: Array, run: tuple[Any, Halves]) -> tuple[Any, Halves]:
            state = advance(run[0])
            return state, seen(run[1], state.z, k)

        return sampled

    none = no_positions(target.model.dimension, gaussian.center.dtype)

    def one(chain: tuple[Values, Array, Array]) -> PilotRun:
        state, halves = lax.fori_loop(0, samples, both(seen), (begin(*chain), none))
        return PilotRun(state.monitor.stein, halves, state.monitor.nonfinite_steps)

    if target.shards is None:
        # one after the other: a program for all at once takes twice as long to compile
        return lax.map(one, (z, keys[0], keys[2]))
    # devices would spend their time in waiting for each other
    chains = jax.vmap(begin, out_axes=axes)(z, keys[0], keys[2])
    several = jax.tree.map(lambda x: jnp.stack([x] * PILOT_CHAINS), none)
    of_chains = both(jax.vmap(seen, (0, 0, None)))
    state, halves = lax.fori_loop(0, samples, of_chains, (chains, several))
    return PilotRun(state.monitor.stein, halves, state.monitor.nonfinite_steps)
