# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Coupled chains at two step sizes, :math:`h` and :math:`h / 2`, that stay close to each other.

The chains of a pair have one Brownian path. The long step uses the minibatches of both short steps.

The integrator splits the potential, in the coordinates of a metric, into the potential of a
standard normal law and a rest. It solves the damped noisy motion in the first part exactly. With
this solution :math:`\\Phi_t` over a time :math:`t` a step is

.. math::

    (\\theta, p) &\\leftarrow \\Phi_{h/2}(\\theta, p) \\\\
    p &\\leftarrow (I - h^2 \\hat V(\\theta))^{1/2} p - h (\\tilde g(\\theta) - \\theta) \\\\
    (\\theta, p) &\\leftarrow \\Phi_{h/2}(\\theta, p),

    \\Phi_t(\\theta, p) = M_t \\binom{\\theta}{p} + R_t, \\qquad
        M_t = \\exp t \\begin{pmatrix} 0 & 1 \\\\ -1 & -A \\end{pmatrix}, \\qquad
        R_t \\sim N(0, I - M_t M_t^\\top) .

The integrator has no error at any step size if the posterior is Gaussian. For other posteriors its
error, and the distance of the two chains, is in proportion to their distance from a Gaussian. The
damping uses the covariance :math:`\\hat V` of the noise, estimated from the minibatch of the step.
It removes the noise of :math:`\\tilde g`, at every position as much as there is, so that a standard
normal momentum stays standard normal. The error is of second order in :math:`h`, and the variance
of the difference of the chains is of fourth order.

**References:**

1. *Unbiased Kinetic Langevin Monte Carlo with Inexact Gradients*, the coupling,
   Neil K. Chada, Benedict Leimkuhler, Daniel Paulin and Peter A. Whalley (2023).
2. *Covariance-Controlled Adaptive Langevin Thermostat for Large-Scale Bayesian Sampling*, the
   damping, Xiaocheng Shang, Zhanxing Zhu, Benedict Leimkuhler and Amos J. Storkey (2015).
"""

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from scipy.linalg import expm

from numpyro_sgmcmc.gradients.covariance import Covariance
from numpyro_sgmcmc.gradients.estimators import Evaluation, Gradient, sub_batch_gradient
from numpyro_sgmcmc.posterior.control_variate import GRADIENTS_OF_A_STEP, Anchor, order_of
from numpyro_sgmcmc.posterior.metric import Metric
from numpyro_sgmcmc.posterior.potential import full_data_gradient
from numpyro_sgmcmc.posterior.target import Target

#: Number of chains, whose means give the standard error.
CHAINS = 64

#: Friction, per unit of time: the one with the smallest errors of means.
_FRICTION = 0.7

#: Largest number of rows for gradients on all rows.
_FEW_ROWS = 2_000

#: Number of draws of one call of a program.
_AT_ONCE = 16

#: Numbers of draws of the pilot that are left out, and that are used.
_FORGOTTEN, _LOOKED_AT = 16, 32

#: Largest variance of the difference of two chains, as a share of the variance of one, and its
#: largest mean in standard deviations. The error of higher order is then at most a tenth of this.
_SHARE, _DIFFERENCE = 0.05, 0.05

#: First coefficients of the series of :math:`1 - (1 - x)^{1/2}`, and the largest x for which it is
#: used.
_ROOT = (1 / 2, 1 / 8, 1 / 16, 5 / 128, 7 / 256, 21 / 1_024)
_LARGEST = 1.5

#: Share of the minibatches whose noise in a step must be less than a momentum can lose, and the
#: bound on this noise for the series.
_COVERED, _COVERS = 0.95, 1.2

#: Powers of one half for step sizes from 1 to 1/64 of a posterior standard deviation.
_FIRST, _LAST = 0, 6


class Levels(NamedTuple):
    """
    The draws of coupled chains at two step sizes, in the coordinates of the metric.

    - **coarse** - draws at step size :math:`h`, shape (chains, draws, d).
    - **fine** - draws at :math:`h / 2`, coupled to the first coarse draws.
    - **step_size** - :math:`h`, in units of a posterior standard deviation.
    - **gradients** - the cost in gradients of minibatches, or of all rows.
    - **on_all_rows** - whether the gradients are on all rows.
    """

    coarse: np.ndarray
    fine: np.ndarray
    step_size: float
    gradients: int
    on_all_rows: bool


class Flow(NamedTuple):
    """
    The exact flow :math:`\\Phi_t` of the standard normal part over a time :math:`t`.

    - **matrix** - :math:`M_t`, shape (2, 2).
    - **root** - a root of the covariance of :math:`R_t`, shape (2, 2).
    """

    matrix: Array
    root: Array

    def __call__(self, state: Array, noise: Array) -> Array:
        """The flow :math:`\\Phi_t` of position and momentum with noise, both of shape (2, d)."""
        return jnp.matmul(self.matrix, state, precision="highest") + noise

    def noise(self, rng_key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """Draw the noise :math:`R_t`, of a shape that ends in (2, d)."""
        return jnp.matmul(self.root, random.normal(rng_key, shape, dtype), precision="highest")


class Times(NamedTuple):
    """
    A step size and its flows, as the programs take them.

    - **step** - :math:`h`.
    - **half**, **quarter** - :math:`\\Phi_{h/2}` and :math:`\\Phi_{h/4}`.
    - **steps** - number of steps from one draw to the next.
    """

    step: Array
    half: Flow
    quarter: Flow
    steps: Array


class _Samples(Covariance):
    """
    A covariance :math:`V = \\sum_k z_k z_k^\\top` held by its vectors :math:`z_k`, shape (k, d).
    """

    def zeros(self, dimension: int, dtype: Any) -> Array:
        return jnp.zeros((1, dimension), dtype)

    def outer(self, samples: Array) -> Array:
        return samples

    def add(self, keep: Array | float, first: Any, weight: Array | float, second: Any) -> Any:
        return jnp.concatenate([jnp.sqrt(keep) * first, jnp.sqrt(weight) * second])

    def product(self, covariance: Array, vector: Array) -> Array:
        return (covariance @ vector) @ covariance

    def trace(self, covariance: Array, probe: Array) -> Array:
        return jnp.sum(covariance**2)


def coupled(
    target: Target,
    metric: Metric,
    anchor: Anchor | None,
    starts: np.ndarray,
    num_draws: int,
    rng_key: Array,
) -> Levels:
    """
    Run coupled chains at two step sizes from draws of a run.

    A search first finds the largest step size at which pairs stay together. The pairs then get the
    number of draws with the least total error.

    :param metric: the metric, in whose coordinates the posterior is about standard normal.
    :param starts: positions in the coordinates, shape (chains, d).
    :param int num_draws: number of draws of each chain at :math:`h`, one for each unit of time.
    :raises ValueError: if the chains do not stay together at any step size.
    """
    few = sum(plate.size for plate in target.model.plates) <= _FEW_ROWS
    everything = few or not any(target.factors.values())
    run = _Runner(target, metric, None if everything else anchor, everything)
    state = jnp.stack(
        [
            jnp.asarray(starts, target.model.dtype),
            random.normal(random.fold_in(rng_key, 0), starts.shape, target.model.dtype),
        ],
        axis=1,
    )
    both, step_size, share = _near_pairs(run, state, rng_key)
    # two levels with costs c and variances v get draws in proportion to (v / c)^(1/2)
    coarse_cost, fine_cost = run.costs
    part = math.sqrt(16 / 9 * share * coarse_cost / fine_cost)
    pairs = min(num_draws, max(_AT_ONCE, math.ceil(part * num_draws)))
    key = random.fold_in(rng_key, 10)
    both, coarse, fine = run(both, step_size, pairs, key, True)
    _, rest, _ = run(both[:, 0], step_size, num_draws - pairs, random.fold_in(key, 1), False)
    coarse = np.concatenate([coarse, rest], axis=1)
    if not (np.isfinite(coarse).all() and np.isfinite(fine).all()):
        raise ValueError(
            f"Chains at the step size {step_size:g} are not finite. The posterior bends too much"
            " in places that chains seldom reach, or it has no mode. `compare` this run with a run"
            " at half the step size, `kernel.with_step_size`."
        )
    return Levels(coarse, fine, step_size, run.gradients, everything)


def _near_pairs(run: "_Runner", state: Array, rng_key: Array) -> tuple[Array, float, float]:
    """
    Pairs of chains that stay together, their step size, and the variance share of the difference.

    :raises ValueError: if no step size keeps the pairs together.
    """
    tried, first = "", max(_FIRST, run.halvings(state))
    if first > _LAST:
        raise ValueError(
            f"The noise of the minibatches is more than a step of {2.0 ** (-_LAST):g} posterior"
            " standard deviations can remove. Use a larger `subsample_size`, or a control variate."
        )
    for halving in range(first, _LAST + 1):
        step_size = 2.0**-halving
        key = random.fold_in(rng_key, 1 + halving)
        both, coarse, fine = run(jnp.stack([state, state], 1), step_size, _FORGOTTEN, key, True)
        key = random.fold_in(key, 1)
        both, coarse, fine = run(both, step_size, _LOOKED_AT, key, True)
        share, difference = _apart(coarse, fine)
        if share <= _SHARE and difference <= _DIFFERENCE:
            return both, step_size, share
        tried = (
            f"at the step size {step_size:g} the means of a pair differ by {difference:.2g} and"
            f" share {1 - share:.0%} of their variance"
            if math.isfinite(share)
            else f"at the step size {step_size:g} the chains are not finite"
        )
    raise ValueError(
        f"Chains at a step size and at its half do not stay together: {tried}. The posterior may"
        " have several modes, no mode, or a scale that differs from place to place. `compare` this"
        " run with a run at half the step size, `kernel.with_step_size`."
    )


def _apart(coarse: np.ndarray, fine: np.ndarray) -> tuple[float, float]:
    """
    The largest relative variance and mean of the difference between two chains.

    The variance of the difference of the chains' means, and of their mean squares, is relative to
    the variance of one chain. The mean difference is in standard deviations. Each is of the worst
    coordinate.
    """
    if not (np.isfinite(coarse).all() and np.isfinite(fine).all()):
        return math.inf, math.inf
    shares, differences = [], []
    for power in (1, 2):
        one, other = coarse**power, fine**power
        apart = (other - one).mean(axis=1)
        own = other.mean(axis=1).var(axis=0, ddof=1)
        shares.append(apart.var(axis=0, ddof=1) / own)
        chance = 3 * apart.std(axis=0, ddof=1) / math.sqrt(len(apart))
        over = np.maximum(np.abs(apart.mean(axis=0)) - chance, 0.0)
        differences.append(over / other.std(axis=(0, 1)) / power)
    return float(np.max(shares)), float(np.max(differences))


class _Runner:
    """
    A runner of chains and pairs of chains, with one program each for all step sizes.

    - **gradients** - number of gradients so far.
    - **costs** - number of gradients in a unit of time at step size 1, for a chain and for a pair.
    """

    def __init__(
        self, target: Target, metric: Metric, anchor: Anchor | None, everything: bool
    ) -> None:
        self.gradients = 0
        each = GRADIENTS_OF_A_STEP[order_of(anchor)]
        self.costs = (each, 3 * each) if everything else (2 * each, 4 * each)
        self._data = metric, anchor
        self._everything = everything
        self._noise = target.compiled(_noise)
        self._programs = [
            target.compiled(partial(function, everything)) for function in (_chains, _pairs)
        ]

    def halvings(self, state: Array) -> int:
        """The number of halvings of step size 1 after which a step can remove the noise."""
        if self._everything:
            return 0
        keys = random.split(random.key(0), len(state))
        products = np.asarray(self._noise(*self._data, state, keys), np.float64)
        if not np.isfinite(products).all():
            return 0
        largest = np.quantile(np.linalg.eigvalsh(products)[:, -1], _COVERED)
        return max(0, math.ceil(math.log2(max(largest / _COVERS, 1e-30)) / 2))

    def __call__(
        self, state: Array, step_size: float, num_draws: int, rng_key: Array, paired: bool
    ) -> tuple[Array, np.ndarray, np.ndarray]:
        """Run chains, and return the state at the end and the draws of both levels."""
        times = _times(step_size, state.dtype)
        parts = []
        for k in range(-(-num_draws // _AT_ONCE)):
            key = random.fold_in(rng_key, k)
            state, draws = self._programs[paired](*self._data, times, state, key)
            parts.append(np.asarray(draws, np.float64))
        self.gradients += len(parts) * _AT_ONCE * len(state) * int(times.steps) * self.costs[paired]
        shape = (len(state), 0, *state.shape[1:-2], state.shape[-1])
        draws = np.concatenate(parts, axis=1)[:, :num_draws] if parts else np.zeros(shape)
        return (state, draws[:, :, 0], draws[:, :, 1]) if paired else (state, draws, draws)


def _times(step_size: float, dtype: Any) -> Times:
    def flow(time: float) -> Flow:
        matrix = expm(time * np.array([[0.0, 1.0], [-1.0, -_FRICTION]]))
        values, vectors = np.linalg.eigh(np.eye(2) - matrix @ matrix.T)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        return Flow(jnp.asarray(matrix, dtype), jnp.asarray(root, dtype))

    steps = jnp.asarray(round(1 / step_size), jnp.int32)
    step = jnp.asarray(step_size, dtype)
    return Times(step, flow(step_size / 2), flow(step_size / 4), steps)


def _chains(
    everything: bool,
    target: Target,
    metric: Metric,
    anchor: Anchor | None,
    times: Times,
    state: Array,
    rng_key: Array,
) -> tuple[Array, Array]:
    """Draws of chains at one step size, from states of shape (chains, 2, d)."""
    oracles = partial(_oracles, everything, target, metric, anchor)

    def step(state: Array, key: Array) -> Array:
        noise_key, rows_key = random.split(key)
        noise = times.half.noise(noise_key, (2, *state.shape), state.dtype)
        return _step(state, times.half, times.step, oracles(rows_key), noise)

    return _drawn(step, times.steps, state, rng_key)


def _pairs(
    everything: bool,
    target: Target,
    metric: Metric,
    anchor: Anchor | None,
    times: Times,
    state: Array,
    rng_key: Array,
) -> tuple[Array, Array]:
    """Draws of coupled pairs, from states of shape (chains, 2 levels, 2, d)."""
    oracles = partial(_oracles, everything, target, metric, anchor)
    half, quarter = times.half, times.quarter

    def step(state: Array, key: Array) -> Array:
        noise_key, rows_key = random.split(key)
        coarse, fine = state
        short = quarter.noise(noise_key, (2, 2, *coarse.shape), coarse.dtype)
        both = oracles(rows_key)
        for noise, oracle in zip(short, (both[0], both[-1]), strict=True):
            fine = _step(fine, quarter, times.step / 2, [oracle], noise)
        # one path for both: the flow of the second short step moves the noise of the first
        long = jax.vmap(lambda noise: quarter(noise[0], noise[1]))(short)
        return jnp.stack([_step(coarse, half, times.step, both, long), fine])

    return _drawn(step, times.steps, state, rng_key)


def _noise(
    target: Target, metric: Metric, anchor: Anchor | None, state: Array, keys: Array
) -> Array:
    """The matrix :math:`Z Z^\\top` of two minibatches together, at each state."""

    def one(state: Array, key: Array) -> Array:
        seen = [oracle(state[0]) for oracle in _oracles(False, target, metric, anchor, key)]
        samples = _together(seen)
        return samples @ samples.T

    return jax.vmap(one)(state, keys)


def _together(seen: list[Evaluation]) -> Array:
    """The vectors whose outer products are the covariance of the mean of several gradients."""
    return jnp.concatenate([one.noise for one in seen]) / len(seen)


def _drawn(
    step: Callable[[Array, Array], Array], steps: Array, state: Array, rng_key: Array
) -> tuple[Array, Array]:
    """The states at the end, and the positions of all draws, shape (chains, draws, ..., d)."""

    def of_chain(state: Array, key: Array) -> tuple[Array, Array]:
        def draw(state: Array, key: Array) -> tuple[Array, Array]:
            def body(k: Array, state: Array) -> Array:
                return step(state, random.fold_in(key, k))

            state = lax.fori_loop(0, steps, body, state)
            return state, state[..., 0, :]

        return lax.scan(draw, state, random.split(key, _AT_ONCE))

    return jax.vmap(of_chain)(state, random.split(rng_key, len(state)))


def _step(
    state: Array, flow: Flow, step_size: Array, oracles: list[Gradient], noise: Array
) -> Array:
    """A step of position and momentum, shape (2, d), with the mean of several gradients."""
    position, momentum = flow(state, noise[0])
    momentum = _kick(position, momentum, step_size, [oracle(position) for oracle in oracles])
    return flow(jnp.stack([position, momentum]), noise[1])


def _kick(position: Array, momentum: Array, h: Array, seen: list[Evaluation]) -> Array:
    """
    The kick :math:`(I - h^2 \\hat V)^{1/2} p - h (\\tilde g - \\theta)` by a mean of gradients.
    """
    gradient = sum(one.gradient for one in seen) / len(seen)
    if seen[0].noise is not None:
        momentum = damped(momentum, h * _together(seen))
    return momentum - h * (gradient - position)


def damped(momentum: Array, samples: Array) -> Array:
    """
    The damped momentum :math:`(I - Z^\\top Z)^{1/2} p`, by a series in :math:`Z Z^\\top`.

    Let the momenta be standard normal, and let the mean of :math:`Z^\\top Z` be the covariance of
    the noise that is added next. Then the covariance stays :math:`I`, even if estimates from single
    minibatches are too large or too small.

    :param samples: :math:`Z`, shape (k, d); shortened if it is so long that a momentum would grow.
    """
    products = samples @ samples.T
    longest = jnp.abs(products).sum(axis=1).max()
    shorter = jnp.minimum(1.0, _LARGEST / jnp.maximum(longest, 1e-30))
    along = samples @ momentum
    total = jnp.zeros_like(along)
    for coefficient in reversed(_ROOT):
        total = coefficient * shorter * along + shorter * (products @ total)
    return momentum - total @ samples


def _oracles(
    everything: bool, target: Target, metric: Metric, anchor: Anchor | None, rng_key: Array
) -> list[Gradient]:
    """The gradient on two minibatches, or once on all rows."""
    potential = target.potential(metric, anchor)
    if everything:

        def gradient(position: Array) -> Evaluation:
            values = potential.values(position)
            value, slope = full_data_gradient(potential, target.model.plates, values, rng_key)
            return Evaluation(value, potential.pullback(slope))

        return [gradient]
    gradients = []
    for key in random.split(rng_key):
        rows_key, model_key = random.split(key)
        facts = target.rows(rows_key), model_key, target.factors, _Samples(), target.groups
        gradients.append(sub_batch_gradient(potential, *facts))
    return gradients
