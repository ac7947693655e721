# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Optima of a posterior with many modes, one for each chain, by Adam on minibatches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import optax

from numpyro_sgmcmc.data.converters import instance, positive, shown, whole
from numpyro_sgmcmc.posterior.handlers import log_density
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.model import Values
from numpyro_sgmcmc.posterior.potential import Rows, over_all_data
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.progress import bar

#: Number of last steps whose mean potential is the potential of a member.
_LAST = 100

#: Number of minibatches for a curvature: its error is then 10 %, and the error of a scale 5 %.
_MINIBATCHES = 200

#: Number of parts of a descent, each followed by a test on held-out rows.
_PARTS = 20


@dataclass(frozen=True)
class Ensemble:
    """
    Settings of chains that start at separate optima, the argument ``start`` of the kernels.

    ``start="ensemble"`` is short for ``start=Ensemble()``. Each chain descends from its own initial
    value, by Adam on minibatches with a learning rate that falls to zero, and starts at the end of
    the descent. Ensembles are for posteriors with very many modes, as in networks, where a chain
    finds only a few modes. Their predictions are pooled.

    With ``metric="diagonal"`` each chain moves in its own coordinates,
    :math:`\\theta_i = m_i + s_i \\phi_i` around its member :math:`m`, shape (d,), with

    .. math:: s_i^{-2} = \\frac{b}{N c} \\operatorname{Var} ( \\partial_i \\tilde U(m) )
        + \\max \\left( 0, -\\partial_i^2 \\log p(m) \\right),

    where the first term is the empirical Fisher information, the sum of the squared gradients of
    the rows. It comes from the variance of the gradient over 200 minibatches of :math:`b` of
    :math:`N` rows, with the finite-population factor :math:`c`. The second term is the curvature of
    the prior, exact if its values are independent. Step sizes are then in units of :math:`s`, which
    has the units of the unconstrained parameters.

    :param int steps: number of steps, each on a minibatch.
    :param float learning_rate: learning rate of Adam in the first step.
    :param float energy_variance: largest variance of the energy in a step, for each parameter. It
        sets the step size if none is given. None is 0.1, or 5e-4 with ``metric="diagonal"``. The
        value 5e-4 gives a sampler without noticeable bias. With 0.1 chains go further in parameters
        that differ much in width, and the law of the weights is biased. On held-out rows 0.1 was
        better than 0.5 on one table, and 5e-4 with the metric was better than 0.5 on another.
    :param tuple held_out: the arguments of the model with held-out rows, which are not in the run.
        Each member is then the best of 20 points along its descent, by the likelihood of these
        rows. None takes the last point.
    :raises ValueError: if an argument is not positive, naming it.

    **References:**

    1. *Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles*,
       Balaji Lakshminarayanan, Alexander Pritzel and Charles Blundell (2017).
    2. *Microcanonical Langevin Ensembles: Advancing the Sampling of Bayesian Neural Networks*,
       Emanuel Sommer, Jakob Robnik, Giorgi Nozadze, Uros Seljak and David Ruegamer (2025).

    **Example:**

    .. doctest::

        >>> from numpyro_sgmcmc import Ensemble
        >>> Ensemble(steps=1_000)
        Ensemble(steps=1000, learning_rate=0.003, energy_variance=None)
    """

    steps: int = 10_000
    learning_rate: float = 3e-3
    energy_variance: float | None = None
    #: an argument of the program, not a part of its cache key
    held_out: tuple | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("steps", "learning_rate", "energy_variance"):
            value = getattr(self, name)
            if name != "energy_variance" or value is not None:
                check = whole if name == "steps" else positive
                object.__setattr__(self, name, check(name, value))
        example = "a tuple of the arguments of the model, such as `(x, y)`"
        instance("held_out", self.held_out, tuple | None, example)


class Members(NamedTuple):
    """
    Members of an ensemble, with potentials, steps and curvatures.

    - **values** - unconstrained values of the latent sites, with a leading axis for the members.
    - **potentials** - the mean minibatch potential at the end of each descent.
    - **steps** - the number of steps after which each was best on held-out rows.
    - **curvatures** - approximate second derivatives of the potential by each value, a tree like
      the values; None if not requested.
    """

    values: Values
    potentials: np.ndarray
    steps: np.ndarray
    curvatures: Values | None = None


class _Descent(NamedTuple):
    """
    Descents in progress, each leaf with a leading axis for the members.

    - **values**, **state** - the present values and the state of the optimiser.
    - **potential** - the mean minibatch potential of the last steps so far.
    - **best** - the values of the member, the log likelihood of held-out rows there, and its number
      of steps.
    """

    values: Values
    state: Any
    potential: Array
    best: tuple[Values, Array, Array]


def checked_start(start: object) -> Ensemble | None:
    """
    Check the argument ``start`` of a kernel.

    :raises ValueError: if it is not a valid start.
    """
    if start is None or isinstance(start, Ensemble):
        return start
    if isinstance(start, str) and start == "ensemble":
        return Ensemble()
    raise ValueError(f"`start` must be None, 'ensemble' or an `Ensemble`; got {shown(start)}.")


def find_members(
    target: Target,
    starts: Values,
    rng_keys: Array,
    ensemble: Ensemble,
    compiled: Callable,
    held: Target | None = None,
    with_curvature: bool = False,
    shown: bool = False,
) -> Members:
    """
    Find an optimum for each chain, all in one program.

    If a descent does not end at finite values, another member replaces it, with a warning.

    :param starts: unconstrained values, with a leading axis for the members.
    :param rng_keys: random keys for the minibatches of each member.
    :param compiled: the cache of programs,
        :meth:`~numpyro_sgmcmc.kernels.runtime.Runtime.compiled`.
    :param held: the model with held-out rows, which select the best point of each descent; None
        takes the last point.
    :param with_curvature: whether to compute the curvature.
    :param shown: whether to show a progress bar.
    :raises ValueError: if no descent ends at finite values.
    """
    schedule = optax.cosine_decay_schedule(ensemble.learning_rate, ensemble.steps)
    optimiser = optax.adam(schedule)  # the prior of the model decays the weights
    last = min(_LAST, ensemble.steps)

    def part(
        target: Target, descents: _Descent, rng_keys: Array, bounds: Array, arguments: Any
    ) -> _Descent:
        potential = target.potential(IdentityMetric())

        def one(descent: _Descent, key: Array) -> _Descent:
            def step(i: Array, descent: _Descent) -> _Descent:
                rows, own = target.rows(key, i), random.fold_in(key, i)
                both = potential.value_and_gradient(descent.values, rows, own)
                value, slope = target.mean(both)
                updates, state = optimiser.update(slope, descent.state, descent.values)
                values = optax.apply_updates(descent.values, updates)
                counted = jnp.where(i < ensemble.steps - last, 0.0, value / last)
                mean = (descent.potential + counted).astype(value.dtype)
                return descent._replace(values=values, state=state, potential=mean)

            begin, end = bounds
            descent = lax.fori_loop(begin, end, step, descent)
            if held is None:
                return descent._replace(best=(descent.values, descent.best[1], end))
            score = log_likelihood(_with_data(held, arguments), descent.values)
            better = ~(score <= descent.best[1])  # NaN counts as better, so that it shows
            both = (descent.values, score, end), descent.best
            best = jax.tree.map(lambda new, old: jnp.where(better, new, old), *both)
            return descent._replace(best=best)

        return jax.vmap(one)(descents, rng_keys)

    zeros = jnp.zeros(len(rng_keys), target.model.dtype)
    best = starts, zeros - jnp.inf, jnp.zeros(len(rng_keys), int)
    descents = _Descent(starts, jax.vmap(optimiser.init)(starts), zeros, best)
    facts = ensemble, None if held is None else held.model.facts
    program = compiled("ensemble", part, target, *facts)
    arguments = None if held is None else (held.args, held.kwargs)
    ends = np.linspace(0, ensemble.steps, min(_PARTS, ensemble.steps) + 1).round().astype(int)
    with bar(shown, ensemble.steps, "ensemble") as seen:
        for bounds in zip(ends[:-1], ends[1:], strict=True):
            descents = program(descents, rng_keys, jnp.asarray(bounds), arguments)
            jax.block_until_ready(descents.values)
            seen.update(int(bounds[1] - bounds[0]))
    (values, _, steps), curvatures = descents.best, None
    if with_curvature:
        program = compiled("curvatures", jax.vmap(_curvature, (None, 0, 0)), target)
        curvatures = program(values, jax.vmap(lambda key: random.fold_in(key, 1))(rng_keys))
    potentials = np.asarray(descents.potential)
    members = Members(values, potentials, np.asarray(steps), curvatures)
    return _with_lost_ones_replaced(members, ensemble)


def _with_lost_ones_replaced(members: Members, ensemble: Ensemble) -> Members:
    """
    The members with copies of finite ones in the places of lost ones.

    :raises ValueError: if no member has finite values.
    """
    leaves = [np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(members.values)]
    finite = np.isfinite(np.concatenate(leaves, axis=1)).all(axis=1) & np.isfinite(
        members.potentials
    )
    if not finite.any():
        raise ValueError(
            f"None of {len(finite)} members of the ensemble ended at finite values. Give a"
            f" `start=Ensemble(learning_rate=...)` below {ensemble.learning_rate:g}, standardise"
            " the data, or give `init_strategy`."
        )
    if finite.all():
        return members
    warnings.warn(
        f"{int((~finite).sum())} of {len(finite)} members of the ensemble did not end at finite"
        " values and were dropped, so that their chains start at other members. A learning rate"
        f" below {ensemble.learning_rate:g}, `start=Ensemble(learning_rate=...)`, may keep them.",
        stacklevel=2,
    )
    good = np.flatnonzero(finite)
    instead = np.where(finite, np.arange(len(finite)), np.resize(good, len(finite)))
    return jax.tree.map(lambda x: x[instead], members)


def _curvature(target: Target, values: Values, rng_key: Array) -> Values:
    """
    Approximate second derivatives of the potential by each value.

    For the likelihood it is the empirical Fisher information, the sum of the squared gradients of
    all rows. This is the variance of a minibatch gradient times the rows in a minibatch, divided by
    all rows. For a prior with independent values the curvature is exact.
    """
    potential, size = target.potential(IdentityMetric()), target.largest_share

    def seen(totals: tuple[Values, Values], key: Array) -> tuple[tuple[Values, Values], None]:
        slope = target.mean(potential.value_and_gradient(values, target.rows(key), key)[1])
        sums, squares = totals
        added = jax.tree.map(jnp.add, sums, slope)
        return (added, jax.tree.map(lambda total, g: total + g**2, squares, slope)), None

    zeros = jax.tree.map(jnp.zeros_like, values)
    keys = random.split(rng_key, _MINIBATCHES)
    (sums, squares), _ = lax.scan(seen, (zeros, zeros), keys)
    # minibatches without replacement differ less from each other
    factor = min(target.factors.values()) or 1 - size

    def both(total: Array, square: Array, prior: Array) -> Array:
        variance = (square - total**2 / _MINIBATCHES) / (_MINIBATCHES - 1)
        return size / factor * jnp.maximum(variance, 0.0) + jnp.maximum(prior, 0.0)

    # devices have different rows and so different rounding errors, but they need one metric
    prior = target.mean(_prior_curvature(target, values, target.rows(rng_key)))
    return jax.tree.map(both, sums, squares, prior)


def _prior_curvature(target: Target, values: Values, rows: Rows) -> Values:
    """The second derivatives of minus the log prior, for independent values."""
    data = rows, random.key(0), target.args, target.kwargs
    names = {plate.name for plate in target.model.plates}

    def prior(values: Values) -> Array:
        energy, sites = target.model.potential_and_sites(values, *data)
        for site in sites.values():
            frames = site["cond_indep_stack"] if site["type"] == "sample" else []
            if any(frame.name in names for frame in frames):
                energy = energy + jnp.sum(log_density(site))
        return energy

    ones = jax.tree.map(jnp.ones_like, values)
    return jax.jvp(jax.grad(prior), (values,), (ones,))[1]


def log_likelihood(target: Target, values: Values) -> Array:
    """The log likelihood of all rows, at the values of one member."""
    potential = target.potential(IdentityMetric())

    def of_chunk(rows: Rows) -> Array:
        _, terms = potential.with_row_terms(values, rows, random.key(0))
        return sum((jnp.sum(term) for term in terms.values()), jnp.zeros((), target.model.dtype))

    return over_all_data(of_chunk, target.model.plates)


def _with_data(target: Target, arguments: tuple[tuple, dict]) -> Target:
    args, kwargs = arguments
    return target._replace(args=args, kwargs=kwargs)
