# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The predictive law of rows as the mixture over all draws, summed draw by draw."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro.distributions import constraints
from numpyro.handlers import substitute, trace

from numpyro_sgmcmc.posterior.handlers import Model, without_wrappers
from numpyro_sgmcmc.results.parts import of_each
from numpyro_sgmcmc.results.row_subset import (
    at_rows,
    chunked_axis,
    seeded,
    subsampled_plates,
)

#: Number of rows in a chunk, and number of predictive draws of each row.
_CHUNK, _PREDICTIVE_DRAWS = 2_000, 1_000

#: The most predictive draws that are kept at once, if the rows cannot be divided.
_MOST_VALUES = 50_000_000

#: Distributions of classes, each with a probability.
_OF_CLASSES = (
    dist.BernoulliLogits,
    dist.BernoulliProbs,
    dist.CategoricalLogits,
    dist.CategoricalProbs,
)

#: Censored distributions, whose values are bounds of numbers.
_CENSORED = (
    dist.IntervalCensoredDistribution,
    dist.LeftCensoredDistribution,
    dist.RightCensoredDistribution,
)


def sites_at(
    model: Model, draw: Mapping[str, Array], args: tuple, kwargs: dict
) -> dict[str, dict[str, Any]]:
    """
    The sites of the model at one draw of its latent sites; other values of the draw are ignored.
    """

    def given(site: dict) -> Array | None:
        if site["type"] != "sample" or site["is_observed"] or site["name"] not in draw:
            return None
        value, shape = draw[site["name"]], site["fn"].shape()
        if jnp.shape(value) != shape:
            plates = [frame.name for frame in site["cond_indep_stack"]]
            raise ValueError(
                f"A draw of site '{site['name']}' has the shape {jnp.shape(value)}, but with these"
                f" arguments the site has the shape {shape}. "
                + (
                    f"It is latent in {plates}, and its draws apply only to the rows or groups of"
                    " the run. Write a likelihood that integrates it out."
                    if plates
                    else (
                        "Give draws with a single leading axis, as `mcmc.get_samples()` returns"
                        " them."
                    )
                )
            )
        return value

    return trace(substitute(model, substitute_fn=given)).get_trace(*args, **kwargs)


def of_classes(fn: Any) -> bool:
    return fn.event_dim == 0 and isinstance(without_wrappers(fn), _OF_CLASSES)


def of_numbers(fn: Any) -> bool:
    """True if values have an order, unlike arrays, classes, angles and censored values."""
    if fn.event_dim or of_classes(fn) or isinstance(without_wrappers(fn), _CENSORED):
        return False
    return fn.support is not constraints.circular


def pooled(
    model: Model,
    draws: Mapping[str, Array],
    count: int,
    args: tuple,
    kwargs: dict,
    sites: Mapping[str, dict],
    name: str,
    rng_key: Array,
) -> tuple[dict[str, np.ndarray], int, int]:
    """
    The predictive law of each row of a site, with the numbers of classes and predictive draws.

    The arrays have the batch shape of the site. Both numbers may be zero.
    """
    plates, chunked = subsampled_plates(sites), chunked_axis(sites, name)
    shape = sites[name]["fn"].batch_shape

    def evaluate(number: Array, rows: Array) -> tuple[Any, Array]:
        """The law of the rows at a draw, and their values."""
        of_rows = model if chunked is None else at_rows(model, plates, {chunked[0]: rows})
        draw = {k: x[number] for k, x in draws.items()}
        site = sites_at(seeded(of_rows), draw, args, kwargs)[name]
        fn = site["fn"]
        return fn, jnp.broadcast_to(site["value"], fn.shape())

    length, axis = (1, 0) if chunked is None else (shape[chunked[1]], chunked[1])
    parts = -(-length // _CHUNK)
    rows = np.minimum(np.arange(parts * -(-length // parts)), length - 1).reshape(parts, -1)
    together = int(np.prod(shape)) if chunked is None else int(np.prod(shape)) // parts + 1
    known: dict[str, int] = {"classes": 0}
    most = max(2, min(_PREDICTIVE_DRAWS, _MOST_VALUES // together))
    kept, each = _kept(count, most)

    def of_chunk(given: tuple[Array, Array]) -> dict[str, Array]:
        part, rows = given
        key = random.fold_in(rng_key, part)
        laws = _of_rows(lambda k: evaluate(k, rows), count, kept, each, key, known)
        return {k: x if chunked is None else jnp.moveaxis(x, axis, 0) for k, x in laws.items()}

    laws = of_each(of_chunk, (jnp.arange(parts), jnp.asarray(rows)), "predictive law")
    if chunked is None:
        arrays = {k: x[0] for k, x in laws.items()}
    else:
        flat = {k: x.reshape(-1, *x.shape[2:])[:length] for k, x in laws.items()}
        arrays = {k: np.moveaxis(x, 0, axis) for k, x in flat.items()}
    return arrays, known["classes"], kept.size * each if "crps" in arrays else 0


def _kept(count: int, most: int) -> tuple[np.ndarray, int]:
    """The evenly spaced draws that give predictive draws, and the predictive draws of each."""
    kept = np.linspace(0, count - 1, min(count, most)).round().astype(int)
    return kept, max(1, most // count)


def _of_rows(
    evaluate: Callable[[Array], tuple[Any, Array]],
    count: int,
    kept: np.ndarray,
    each: int,
    key: Array,
    known: dict[str, int],
) -> dict[str, Array]:
    """
    The predictive law of some rows.

    :param evaluate: function from the number of a draw to the distribution of some rows, and their
        values.
    :param kept: the numbers of the draws with predictive draws, ``each`` of one.
    :param known: a dictionary that receives the number of classes.
    """

    def terms(fn: Any, y: Array) -> dict[str, Array]:
        values = _averaged(fn, y)
        known["classes"] = values["probabilities"].shape[-1] if "probabilities" in values else 0
        return values

    def first_terms() -> tuple[Array, dict[str, Array]]:
        fn, y = evaluate(jnp.asarray(0))
        return fn.log_prob(y), terms(fn, y)

    def add(sums: tuple, number: Array, with_draws: bool) -> tuple[tuple, Array | None]:
        """
        Add a draw to the sum of densities, relative to the largest one, and to the other sums.
        """
        largest, density, others = sums
        fn, y = evaluate(number)
        log_density = fn.log_prob(y)
        above = jnp.maximum(largest, log_density)
        reference = jnp.where(jnp.isfinite(above), above, 0.0)
        factor = jnp.exp(largest - reference)
        scaled = _Sum(density.total * factor, density.lost * factor)
        density = _plus(scaled, jnp.exp(log_density - reference))
        others = {k: _plus(others[k], x) for k, x in terms(fn, y).items()}
        own = random.fold_in(key, number)
        return (above, density, others), _distances(fn, y, own, each) if with_draws else None

    of_density, of_terms = jax.tree.map(
        lambda x: _Sum(*(jnp.zeros(x.shape, jnp.result_type(x.dtype, float)),) * 2),
        jax.eval_shape(first_terms),
    )
    sums = (of_density.total - jnp.inf, of_density, of_terms)
    rest = np.setdiff1d(np.arange(count), kept)
    sums, ensemble = lax.scan(lambda s, k: add(s, k, True), sums, jnp.asarray(kept))
    if rest.size:
        sums, _ = lax.scan(lambda s, k: add(s, k, False), sums, jnp.asarray(rest))
    largest, density, others = sums
    reference = jnp.where(jnp.isfinite(largest), largest, 0.0)
    means = {name: x.total / count for name, x in others.items()}
    fn, y = evaluate(jnp.asarray(0))
    values = {
        "observed": y,
        "log_predictive_density": reference + jnp.log(density.total / count),
    }
    if "probabilities" in means:
        return values | _of_classes(means["probabilities"], y)
    if of_numbers(fn):
        discrete = without_wrappers(fn).support.is_discrete
        values |= _of_numbers(means, ensemble, values["log_predictive_density"], discrete)
    return values


def _averaged(fn: Any, y: Array) -> dict[str, Array]:
    """The quantities that are averaged over the draws, besides the density."""
    base = without_wrappers(fn)
    if of_classes(fn):
        p = base.probs
        if isinstance(base, dist.BernoulliLogits | dist.BernoulliProbs):
            p = jnp.stack([1 - p, p], axis=-1)
        return {"probabilities": jnp.broadcast_to(p, (*fn.batch_shape, p.shape[-1]))}
    if not of_numbers(fn):
        return {}
    # the distance to the value keeps the digits that a large mean would lose
    laws = {"error": lambda: fn.mean - y, "cdf": lambda: base.cdf(y)}
    return {k: jnp.broadcast_to(law(), fn.batch_shape) for k, law in laws.items() if _exists(law)}


def _distances(fn: Any, y: Array, key: Array, each: int) -> Array | None:
    """Distances of predictive draws from the values."""

    def distances() -> Array:
        return fn.sample(key, (each,)) - y * 1.0

    return distances() if of_numbers(fn) and _exists(distances) else None


class _Sum(NamedTuple):
    """A sum, with the part of its last terms that rounding has lost."""

    total: Array
    lost: Array


def _plus(before: _Sum, term: Array) -> _Sum:
    """The sum with one more term, by Kahan's method: its error does not grow with the terms."""
    term = term - before.lost
    total = before.total + term
    return _Sum(total, (total - before.total) - term)


def _exists(law: Callable[[], Array]) -> bool:
    """True if a distribution can compute the quantity."""
    try:
        jax.eval_shape(law)
    except NotImplementedError:
        return False
    return True


def _of_classes(p: Array, y: Array) -> dict[str, Array]:
    one_hot = jax.nn.one_hot(y, p.shape[-1], dtype=p.dtype)
    most_probable = jnp.argmax(p, axis=-1)
    return {
        "most_probable": most_probable,
        "confidence": jnp.max(p, axis=-1),
        "error": (most_probable != y) * 1.0,
        "brier": jnp.sum((p - one_hot) ** 2, axis=-1),
    }


def _of_numbers(
    means: Mapping[str, Array], ensemble: Array | None, log_density: Array, discrete: bool
) -> dict[str, Array]:
    """
    The scores of numbers.

    :param means: means over all draws of the distance of the predictive mean and of the
        distribution function.
    :param ensemble: distances of predictive draws, with draws in the first two axes.
    :return: the scores, with ``below`` and ``at``, the probabilities of less than the value and of
        the value.
    """
    scores = {"error": means["error"]} if "error" in means else {}
    if "cdf" in means:
        at = jnp.exp(log_density) if discrete else jnp.zeros_like(log_density)
        scores |= {"below": means["cdf"] - at, "at": at}
    if ensemble is None:
        return scores
    flat = jnp.sort(ensemble.reshape(-1, *ensemble.shape[2:]), axis=0)
    size = flat.shape[0]
    # half of the mean distance of all pairs, from the sorted draws
    weights = (2 * np.arange(1, size + 1) - size - 1) / (size - 1)
    spread = jnp.tensordot(jnp.asarray(weights, flat.dtype), flat, axes=1) / size
    scores.setdefault("error", jnp.mean(flat, axis=0))
    scores.setdefault("below", jnp.mean(flat < 0, axis=0))
    scores.setdefault("at", jnp.mean(flat == 0, axis=0))
    return scores | {"crps": jnp.mean(jnp.abs(flat), axis=0) - spread}
