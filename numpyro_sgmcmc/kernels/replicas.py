# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Replicas of a chain at higher temperatures, and exchanges of positions between them."""

from collections.abc import Sequence
from dataclasses import dataclass
import math
from typing import Any, NamedTuple

from jax import Array

from numpyro_sgmcmc.data.converters import array, instance, shown, whole


@dataclass(frozen=True)
class Replicas:
    """
    Replica exchange, for right weights of several modes: the argument ``replicas`` of the kernels.

    Each chain has replicas at higher temperatures :math:`1 = T_1 < T_2 < \\dots < T_K`. Their laws
    are :math:`\\propto e^{-U / T_k}`, for prior and likelihood together. They reach modes that the
    chain does not reach. After each sample neighbours exchange their positions, :math:`(1, 2), (3,
    4), \\dots` and :math:`(2, 3), (4, 5), \\dots` in turn, with probability

    .. math:: \\min \\{1, \\exp(\\tilde\\Delta - u)\\}, \\qquad \\tilde\\Delta =
        \\left( \\frac{1}{T_k} - \\frac{1}{T_{k+1}} \\right)
        \\left( \\tilde U(\\theta_k) - \\tilde U(\\theta_{k+1}) \\right),

    from fresh minibatches. The noise of :math:`\\tilde\\Delta` would favour wrong exchanges. If
    :math:`\\tilde\\Delta` is normal with variance :math:`\\sigma^2`, the penalty :math:`u =
    \\sigma^2 / 2` makes the exchange exact. With the estimate :math:`s^2` from :math:`n` rows the
    penalty is

    .. math:: u = \\frac{s^2}{2} + \\frac{s^4}{4 (n + 1)} + \\frac{s^6}{3 (n + 1)(n + 3)} .

    Only the draws at :math:`T_1` are collected. The field ``exchange_prob`` of each sample has the
    probabilities of the :math:`K - 1` pairs. If a mean is below 0.1, add a temperature between the
    two. A geometric sequence of temperatures works. The hottest temperature should be about the
    height of the barriers between the modes, in units of the log density. A step costs :math:`K`
    gradients, and each exchange :math:`K` potentials of some minibatches: let ``steps_per_sample``
    be ten or so. Estimates of the gradient noise and thermostats stay with their temperature.

    :param temperatures: :math:`1, T_2, \\dots, T_K`, rising.
    :param int minibatches: number of minibatches for the potentials of an exchange. All rows are
        used if the minibatches together have as many rows, or if rows are drawn within strata.
    :raises ValueError: if the temperatures do not rise from 1.

    **References:**

    1. *Replica Monte Carlo Simulation of Spin-Glasses*,
       Robert Swendsen and Jian-Sheng Wang (1986).
    2. *The Penalty Method for Random Walks with Uncertain Energies*,
       David Ceperley and Mark Dewing (1999).
    3. *Non-convex Learning via Replica Exchange Stochastic Gradient MCMC*,
       Wei Deng, Qi Feng, Liyao Gao, Faming Liang and Guang Lin (2020).

    **Example:** a mean whose sign is unknown.

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
        temperatures = tuple(given.astype(float).tolist()) if is_vector else ()
        rises = all(b > a for a, b in zip(temperatures, temperatures[1:], strict=False))
        if (
            len(temperatures) < 2
            or temperatures[0] != 1
            or not rises
            or not math.isfinite(temperatures[-1])
        ):
            raise ValueError(
                "`temperatures` of replicas must rise from 1, for instance"
                f" `np.geomspace(1, 50, 6)`; got {shown(self.temperatures)}."
            )
        object.__setattr__(self, "minibatches", whole("minibatches", self.minibatches))
        object.__setattr__(self, "temperatures", temperatures)


class HotReplicas(NamedTuple):
    """
    The replicas of a chain at temperatures above 1.

    - **states** - the states of the replicas, with a leading axis for the K - 1 temperatures above
      1. They leave out the constants, which they share with the chain.
    - **exchange_prob** - probabilities of the latest exchange for each pair of neighbours, shape (K
      - 1,).
    """

    states: Any
    exchange_prob: Array


def checked_replicas(replicas: Any) -> Replicas | None:
    """
    Check the argument ``replicas`` of a kernel.

    :raises ValueError: if it is neither None nor a :class:`Replicas`.
    """
    example = "a `Replicas`, such as `Replicas([1, 3, 10, 30])`"
    return instance("replicas", replicas, Replicas | None, example)
