# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The score of the posterior at the draws of a run."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC

from numpyro_sgmcmc.data.converters import instance, one_of, random_key, whole
from numpyro_sgmcmc.diagnostics.runs import Run, as_data, draws_of, group
from numpyro_sgmcmc.posterior.metric import IdentityMetric
from numpyro_sgmcmc.posterior.numpyro_private import half_life_of
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.results.facts import parameters, variable_name
from numpyro_sgmcmc.results.run_data import arguments_of, check_data, target_of

#: Largest product of rows and draws for scores on all data by default.
_AFFORDABLE = 2e8

#: Number of draws that share a pass over the data, or a call for minibatches.
_AT_ONCE, _MINIBATCHES_AT_ONCE = 8, 64

#: Number of draws at which the minibatch noise is compared with and without a control variate.
_COMPARED = 32

#: R-hat above which chains do not agree.
_NOT_MIXED = 1.1


class RunModel(NamedTuple):
    """The model of the posterior with its arguments, or None if it is not known."""

    model: Callable | None
    args: tuple = ()
    kwargs: dict | None = None

    def or_of(self, *runs: Run) -> "RunModel":
        """
        This model if it is known, otherwise the model of the first ``MCMC`` object.

        :raises ValueError: if there is none.
        """
        instance("model", self.model, Callable | None, "a function with NumPyro primitives")
        instance("model_args", self.args, tuple | list, "a tuple, such as `(x, y)`")
        instance("model_kwargs", self.kwargs, dict | None, "a dict")
        if self.model is None:
            for run in runs:
                if isinstance(run, MCMC):
                    check_rows_of(run)
                    return RunModel(run.sampler.model, *arguments_of(run))
        return self


class Scores(NamedTuple):
    """
    Positions of draws with the scores of the posterior.

    - **positions** - unconstrained values, shape (chains, draws, d).
    - **scores** - :math:`\\nabla \\log p(\\theta \\mid D) / T` at the positions, or unbiased
      estimates.
    - **exact** - whether the scores are on all data.
    - **labels** - labels of the parameters.
    - **sites** - the site of each parameter.
    """

    positions: np.ndarray
    scores: np.ndarray
    exact: bool
    labels: list[str]
    sites: list[str]


def scores_of(
    run: Run, run_model: RunModel, draws: int, scores: str = "auto", rng_key: Array | None = None
) -> Scores:
    """
    The scores at evenly spaced draws.

    :param int draws: number of draws of all chains together.
    :raises ValueError: if the model is not known, or does not belong to the draws.
    """
    one_of("scores", scores, ("auto", "full", "minibatch"))
    draws, key = whole("draws", draws, least=2), random_key(rng_key)
    model, args, kwargs = run_model.or_of(run)
    if model is None:
        raise ValueError(
            "The score of the posterior needs the model. Give the `MCMC` object; or with an ArviZ"
            " object give `model=` and `model_args=` too, as in `mcmc.run(rng_key, *model_args)`."
        )
    data = as_data(run)
    target = target_of(model, args, kwargs, data.attrs.get("subsampling"))
    if isinstance(run, MCMC):
        check_data(run, "Judge", target)
    flat = positions_of(target, _thinned(data, target, draws))
    every = flat.reshape(-1, flat.shape[-1])
    labels, sites = labels_and_sites(target)
    check_moves(every, labels)
    rows = math.prod(plate.size for plate in target.model.plates)
    affordable = scores == "auto" and rows * len(every) <= _AFFORDABLE
    exact = scores == "full" or affordable or not target.model.plates
    if exact:
        gradients = _full_scores(target, every)
    else:
        gradients = _estimated_scores(target, every, key)
    temperature = float(data.attrs.get("temperature", 1.0))
    return Scores(
        flat.astype(np.float64),
        gradients.astype(np.float64).reshape(flat.shape) / temperature,
        exact,
        labels,
        sites,
    )


def check_rows_of(mcmc: MCMC) -> None:
    """
    Check that the draws belong to the posterior of all present rows.

    :raises ValueError: if the draws belong to the posterior of other rows, or of rows with other
        weights.
    """
    if (half_life := half_life_of(mcmc)) is not None:
        raise ValueError(
            f"A row of this run counts half after {half_life:g} others, but in the posterior of"
            " its model every row counts fully. Judge such a run by `growth`."
        )
    if first := getattr(mcmc, "first_draw", 0):
        raise ValueError(
            f"The first {first:,} draws of each chain are from fewer rows than the later draws, so"
            " that pooled draws target no single posterior. Judge a run of `MCMC` on all rows."
        )


def checked_target(mcmc: MCMC, args: tuple, kwargs: dict, asked: str) -> Target:
    """
    The model of a run, after a check that the draws are from its posterior.

    :param str asked: the action on the run, a verb.
    :raises ValueError: if the draws have another law.
    """
    settings = getattr(mcmc.sampler, "run_info", {})
    temperature = settings.get("temperature", 1.0)
    if temperature != 1.0:
        raise ValueError(
            f"The run has temperature={temperature}, so that its draws do not have the law of the"
            f" posterior. {asked} a run at temperature 1."
        )
    check_rows_of(mcmc)
    target = target_of(mcmc.sampler.model, args, kwargs, settings.get("subsampling"))
    check_data(mcmc, asked, target)
    return target


def exact_target(mcmc: MCMC, args: tuple, kwargs: dict, asked: str) -> Target:
    """
    The model of a run if its density and gradients can be computed, with the run's data.

    It includes the check of :func:`checked_target`.

    :raises ValueError: if the density is random, or the data were changed in place after the run.
    """
    target = checked_target(mcmc, args, kwargs, asked)
    if drawn := target.model.drawn_plates:
        raise ValueError(
            f"The latent variables of plate '{drawn[0].name}' are integrated out by random draws,"
            f" so that the density is random. {asked} runs with at most two latent numbers in a"
            " group, or normal ones, whose integrals are not random."
        )
    return target


def check_draws(positions: np.ndarray, judge: str, fewest: int, where_not_mixed: str = "") -> None:
    """
    Check that there are enough draws and that the chains agree.

    :param positions: shape (chains, draws, d).
    :param str judge: the name of the diagnostic that needs the draws.
    :param int fewest: the fewest draws that it needs.
    :param str where_not_mixed: the meaning of chains that do not agree; empty for no check.
    :raises ValueError: if there are too few draws, or if the chains do not agree.
    """
    chains, count, dimension = positions.shape
    if chains * count < fewest:
        raise ValueError(
            f"The run has {chains * count:,} draws of {dimension:,} parameters: {judge} needs"
            f" {fewest:,} or more. Run with a larger `num_samples`."
        )
    if not where_not_mixed or count < 4:
        return
    with np.errstate(invalid="ignore", divide="ignore"):  # for values that never move
        worst = float(np.nanmax(split_gelman_rubin(positions.astype(np.float64))))
    if worst > _NOT_MIXED:
        raise ValueError(f"The chains do not agree: R-hat is up to {worst:.2f}. {where_not_mixed}")


def labels_and_sites(target: Target) -> tuple[list[str], list[str]]:
    """The label and the site of each unconstrained parameter."""
    return parameters({name: x.shape for name, x in target.model.latents.items()})


def _thinned(data: Any, target: Target, draws: int) -> dict[str, np.ndarray]:
    """Values of the latent sites at evenly spaced draws, shape (chains, draws, ...)."""
    known, latents = group(data, "posterior"), sorted(target.model.latents)
    if not latents:
        raise ValueError("The model has no latent sites. Give the model of this run as `model`.")
    missing = [name for name in latents if known is None or variable_name(name) not in known]
    if missing:
        raise ValueError(
            f"The model has the latent sites {latents}, but the draws have no {missing}. Give the"
            " model of this run, and keep its latent sites when you save it."
        )
    posterior = draws_of(data, latents)
    chains, count = posterior.sizes["chain"], posterior.sizes["draw"]
    each = max(1, min(count, draws // chains))
    if chains * each < 2:
        raise ValueError(
            "The run has a single draw, and at least two are needed. Run with a larger"
            " `num_samples`."
        )
    chosen = np.linspace(0, count - 1, each).round().astype(int)
    return {
        name: posterior[variable_name(name)].transpose("chain", "draw", ...).values[:, chosen]
        for name in target.model.latents
    }


def check_moves(every: np.ndarray, labels: list[str]) -> None:
    """
    Check that every parameter moves.

    :param every: positions, shape (draws, d).
    :raises ValueError: if a parameter never moves.
    """
    constant = [label for label, x in zip(labels, every.T, strict=True) if np.ptp(x) == 0]
    if constant:
        some = ", ".join(constant[:5]) + (", ..." if len(constant) > 5 else "")
        raise ValueError(
            f"{len(constant)} of {len(labels)} parameters never move ({some}), so that the chain"
            " is stuck. Reduce the step size, or start elsewhere."
        )


def positions_of(target: Target, values: dict[str, Any]) -> np.ndarray:
    """Unconstrained positions of draws, shape ``(chains, draws, d)``."""

    def run(target: Target, values: dict[str, Array]) -> Array:
        def one(draw: dict[str, Array]) -> Array:
            return ravel_pytree(target.model.unconstrain(draw, target.args, target.kwargs))[0]

        return jax.vmap(jax.vmap(one))(values)

    return np.asarray(target.compiled(run)({k: jnp.asarray(x) for k, x in values.items()}))


def constrained(target: Target, positions: np.ndarray) -> dict[str, np.ndarray]:
    """Latent and deterministic sites of unconstrained positions, shape (chains, draws, d)."""

    def run(target: Target, positions: Array) -> dict[str, Array]:
        def one(position: Array) -> dict[str, Array]:
            return target.model.constrain(target.unravel(position), target.args, target.kwargs)

        return jax.vmap(jax.vmap(one))(positions)

    dtype = target.model.dtype
    return jax.device_get(target.compiled(run)(jnp.asarray(positions, dtype)))


def _full_scores(target: Target, every: np.ndarray) -> np.ndarray:
    def run(target: Target, every: Array) -> Array:
        def one(x: Array) -> Array:
            return -ravel_pytree(target.anchor(target.unravel(x)).gradient)[0]

        return lax.map(one, every, batch_size=_AT_ONCE)

    return np.asarray(target.compiled(run)(jnp.asarray(every)))


def _estimated_scores(target: Target, every: np.ndarray, rng_key: Array) -> np.ndarray:
    """Scores on a separate minibatch for each draw, of the kind with less noise."""

    def run(target: Target, points: Array, center: Array, rng_key: Array) -> list[Array]:
        # any anchor gives unbiased estimates
        anchor = target.anchor(target.unravel(center))
        kinds = [target.potential(IdentityMetric(), kind) for kind in (None, anchor)]

        def one(point: tuple[Array, Array]) -> list[Array]:
            rows_key, model_key = random.split(point[1])
            values, rows = target.unravel(point[0]), target.rows(rows_key)
            return [-ravel_pytree(jax.grad(kind)(values, rows, model_key))[0] for kind in kinds]

        keys = random.split(rng_key, len(points))
        return lax.map(one, (points, keys), batch_size=_MINIBATCHES_AT_ONCE)

    count, some = len(every), every[:: max(1, len(every) // _COMPARED)]
    # some scores are computed twice more, to see which kind has less noise
    points = jnp.asarray(np.concatenate([every, some, some]))
    gradients = target.compiled(run)(points, jnp.asarray(every.mean(axis=0)), rng_key)
    kinds = [np.asarray(x) for x in gradients]
    noise = [np.sum(np.diff(x[count:].reshape(2, *some.shape), axis=0) ** 2) for x in kinds]
    return kinds[int(np.argmin(noise))][:count]
