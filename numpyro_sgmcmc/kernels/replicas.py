# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Replicas of a chain at higher temperatures, and exchanges of positions between them."""

from collections.abc import Sequence
from dataclasses import dataclass
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_sgmcmc.data.converters import array, instance, shown, whole
from numpyro_sgmcmc.data.rows_on_disk import on_disk
from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.potential import Rows, over_all_data, ravel
from numpyro_sgmcmc.posterior.target import Target

if TYPE_CHECKING:
    from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel

#: Keys from that of the chain by these numbers; the chain's own steps split it in three.
_EXCHANGE_KEY, _FIRST_KEY = 3, 4


@dataclass(frozen=True)
class Replicas:
    """
    Replica exchange, the argument ``replicas`` of the kernels: right weights of several modes.

    Beside each chain run replicas of it at higher temperatures
    :math:`1 = T_1 < T_2 < \\dots < T_K`, whose laws are :math:`\\propto e^{-U / T_k}`, of prior and
    likelihood, and which go where the chain does not get. After each sample neighbours exchange
    their positions, :math:`(1, 2), (3, 4), \\dots` and :math:`(2, 3), (4, 5), \\dots` in turn, with
    probability

    .. math:: \\min \\{1, \\exp(\\tilde\\Delta - u)\\}, \\qquad \\tilde\\Delta =
        \\left( \\frac{1}{T_k} - \\frac{1}{T_{k+1}} \\right)
        \\left( \\tilde U(\\theta_k) - \\tilde U(\\theta_{k+1}) \\right),

    from fresh minibatches. The noise of :math:`\\tilde\\Delta` would favour exchanges that are
    wrong. With the variance :math:`\\sigma^2` of a normal :math:`\\tilde\\Delta` the penalty
    :math:`u = \\sigma^2 / 2` makes the exchange exact; with its estimate :math:`s^2` from :math:`n`
    rows it is

    .. math:: u = \\frac{s^2}{2} + \\frac{s^4}{4 (n + 1)} + \\frac{s^6}{3 (n + 1)(n + 3)} .

    Only the draws at :math:`T_1` are collected. The field ``exchange_prob`` of each sample has the
    probabilities of the :math:`K - 1` pairs; where a mean is below 0.1 one more temperature belongs
    between the two. A geometric sequence serves, the hottest of it about as hot as the barriers
    between the modes are high, in units of the log density. A step costs :math:`K`
    gradients, and each exchange :math:`K` potentials of some minibatches: let
    ``steps_per_sample`` be ten or so. Estimates of the noise of the gradient and thermostats stay
    with their temperature.

    :param temperatures: :math:`1, T_2, \\dots, T_K`, rising.
    :param int minibatches: of how many minibatches the potentials of an exchange are; all rows are
        taken where so many minibatches hold as many, or rows are not drawn alike.
    :raises ValueError: if the temperatures do not rise from 1.

    **References:**

    1. *Replica Monte Carlo Simulation of Spin-Glasses*,
       Robert Swendsen and Jian-Sheng Wang (1986).
    2. *The Penalty Method for Random Walks with Uncertain Energies*,
       David Ceperley and Mark Dewing (1999).
    3. *Non-convex Learning via Replica Exchange Stochastic Gradient MCMC*,
       Wei Deng, Qi Feng, Liyao Gao, Faming Liang and Guang Lin (2020).

    **Example:** a mean of which only the absolute value is known.

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpy as np
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGHMC, Replicas

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 2))
        ...     with numpyro.plate("rows", len(y), subsample_size=50) as i:
        ...         numpyro.sample("y", dist.Normal(abs(mu), 1), obs=y[i])

        >>> y = 1 + jax.random.normal(jax.random.key(0), (200,))
        >>> replicas = Replicas(np.geomspace(1, 100, 5))
        >>> kernel = SGHMC(model, 0.02, 10.0, replicas=replicas, steps_per_sample=10)
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=5_000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> bool(abs((mcmc.get_samples()["mu"] > 0).mean() - 0.5) < 0.1)
        True
    """

    temperatures: Sequence[float]
    minibatches: int = 10

    def __post_init__(self) -> None:
        given = array("temperatures", self.temperatures)
        is_vector = given.dtype.kind in "iuf" and given.ndim == 1
        found = tuple(given.astype(float).tolist()) if is_vector else ()
        rises = all(b > a for a, b in zip(found, found[1:], strict=False))
        if len(found) < 2 or found[0] != 1 or not rises or not math.isfinite(found[-1]):
            raise ValueError(
                "`temperatures` of replicas must rise from 1, for instance"
                f" `np.geomspace(1, 50, 6)`; got {shown(self.temperatures)}."
            )
        object.__setattr__(self, "minibatches", whole("minibatches", self.minibatches))
        object.__setattr__(self, "temperatures", found)


class HotReplicas(NamedTuple):
    """
    The replicas of a chain besides itself.

    - **states** - their states, with a leading axis for the K - 1 temperatures above 1, and without
      what is fixed, which they share with the chain.
    - **exchange_prob** - of the latest exchange, for each pair of neighbours, shape (K - 1,).
    """

    states: Any
    exchange_prob: Array


def checked_replicas(replicas: Any) -> Replicas | None:
    """
    :raises ValueError: if it is neither None nor a :class:`Replicas`.
    """
    example = "a `Replicas`, such as `Replicas([1, 3, 10, 30])`"
    return instance("replicas", replicas, Replicas | None, example)


def check_replicas(method: "SGMCMCKernel", target: Target) -> None:
    """
    :raises ValueError: if this method cannot have replicas, or not with these data.
    """
    if method.given.replicas is None:
        return
    name, given = type(method).__name__, method.given
    if method.traits.tested:
        raise ValueError(
            f"{name} with `replicas` is not possible: its test of a sample is of one temperature."
            " Use CCAdL or SGHMC."
        )
    known = getattr(given, "noise_variance", None)
    if known is not None and not isinstance(known, str) and jnp.any(ravel(known) != 0):
        raise ValueError(
            f"{name} with `replicas` cannot use a given `noise_variance`, which is another one at"
            " each temperature: use noise_variance='estimated'."
        )
    if target.shards is not None or target.known is not None:
        raise ValueError(
            "`replicas` cannot be used with rows that are spread over devices or keep coming: take"
            " arrays on one device."
        )
    if on_disk((target.args, target.kwargs)):
        raise ValueError(
            "`replicas` cannot be used with rows on disk, where each replica would read its own:"
            " load the arrays into memory."
        )


def hot_temperatures(replicas: Replicas, dtype: Any) -> Array:
    """:math:`T_2, \\dots, T_K`."""
    return jnp.asarray(replicas.temperatures[1:], dtype)


def keys_of(rng_key: Array, count: int) -> Array:
    """The random keys of the replicas, from that of the chain."""
    return jax.vmap(lambda k: random.fold_in(rng_key, k))(_FIRST_KEY + jnp.arange(count))


def with_positions_exchanged(
    method: "SGMCMCKernel", target: Target, state: Any, hot: HotReplicas
) -> Any:
    """
    The state of a chain after an exchange with its replicas.

    :param state: the state of the chain, without replicas.
    :param hot: those of its replicas.
    """
    replicas: Replicas = method.given.replicas
    key = random.fold_in(random.fold_in(state.rng_key, _EXCHANGE_KEY), state.i)
    rows_key, accept_key = random.split(key)
    z = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), state.z, hot.states.z)
    difference, variance, count = _potential_differences(target, z, replicas.minibatches, rows_key)
    cold = 1 / jnp.asarray(replicas.temperatures, difference.dtype) / method.given.temperature
    slope = cold[:-1] - cold[1:]
    probability = exchange_probability(slope * difference, slope**2 * variance, count)
    pairs = len(replicas.temperatures) - 1
    accepted = random.uniform(accept_key, (pairs,), probability.dtype) < probability
    # neighbours in turn: no position is in two pairs
    turn = state.i // state.fixed.layout.steps_per_sample % 2
    accepted = accepted & (jnp.arange(pairs) % 2 == turn)
    order = jnp.arange(pairs + 1)
    step = jnp.concatenate([accepted.astype(order.dtype), jnp.zeros(1, order.dtype)])
    order = order + step - jnp.roll(step, 1)
    z = jax.tree.map(lambda x: x[order], z)
    states = hot.states._replace(z=jax.tree.map(lambda x: x[1:], z))
    first = jax.tree.map(lambda x: x[0], z)
    return state._replace(z=first, replicas=HotReplicas(states, probability))


def exchange_probability(difference: Array, variance: Array, count: Any) -> Array:
    """
    The probability of an exchange, :math:`\\min \\{1, \\exp(\\tilde\\Delta - u)\\}`.

    :param difference: :math:`\\tilde\\Delta`.
    :param variance: :math:`s^2`, the estimate of its variance.
    :param count: :math:`n`, from how many rows that is; infinite for its true value.
    """
    penalty = (
        variance / 2
        + variance**2 / (4 * (count + 1))
        + variance**3 / (3 * (count + 1) * (count + 3))
    )
    ratio = difference - penalty
    return jnp.where(jnp.isnan(ratio), 0.0, jnp.exp(jnp.minimum(ratio, 0.0)))


def _potential_differences(
    target: Target, z: Values, minibatches: int, rng_key: Array
) -> tuple[Array, Array, float]:
    """
    By how much the potential at each of K positions is above that at the next, the variance of the
    error of that, and from how many rows it is known.

    :param z: unconstrained values, with a leading axis for the positions.
    """
    # independent minibatches, whose rows say how they vary
    potential = target.potential(IdentityMetric())
    target = target._replace(scheme=SCHEMES["without_replacement"])
    factors = target.factors
    values = jax.vmap(lambda z: potential.values(ravel(target.to_internal(z))))(z)
    if target.strata or minibatches * target.minibatch_share >= 1:

        def of_chunk(rows: Rows) -> Array:
            return -jnp.diff(jax.vmap(lambda x: potential(x, rows, rng_key))(values))

        difference = over_all_data(of_chunk, target.model.plates)
        return difference, jnp.zeros_like(difference), math.inf

    def of_minibatch(total: Any, k: Array) -> tuple[Any, None]:
        own = random.fold_in(rng_key, k)
        rows = target.rows(own)
        energies, terms = jax.vmap(lambda x: potential.with_row_terms(x, rows, own))(values)
        difference, variance = -jnp.diff(energies), jnp.zeros(len(energies) - 1, energies.dtype)
        for name, term in terms.items():
            count, each = rows[name].size, -jnp.diff(term, axis=0)
            # as of the sum of as many draws, with the factor of a finite population
            variance += factors[name] * count * jnp.var(each, axis=1, ddof=1)
        return jax.tree.map(jnp.add, total, (difference, variance)), None

    pairs = len(jax.tree.leaves(z)[0]) - 1
    none = jnp.zeros(pairs, target.model.dtype)
    (difference, variance), _ = lax.scan(of_minibatch, (none, none), jnp.arange(minibatches))
    rows = minibatches * min(plate.subsample_size for plate in target.model.plates)
    return difference / minibatches, variance / minibatches**2, rows
