# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Predictive accuracy for runs whose array of (chains, draws, rows) would not fit in memory."""

from collections.abc import Callable, Mapping
import math
import re
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
from numpyro.infer.util import constrain_fn, unconstrain_fn

from numpyro_sgmcmc.data.converters import (
    MOST_OF_64_BITS,
    array,
    instance,
    random_key,
    truth,
    whole,
)
from numpyro_sgmcmc.posterior.handlers import Plate
from numpyro_sgmcmc.results.cycle_draws import kept_draws
from numpyro_sgmcmc.results.facts import variable_name
from numpyro_sgmcmc.results.inference_data import (
    MAX_VALUES,
    SOME_ROWS,
    check_size,
    to_arviz,
)
from numpyro_sgmcmc.results.parts import of_each
from numpyro_sgmcmc.results.row_subset import (
    Selection,
    at_rows,
    chosen_site,
    log_likelihood_of,
    of_rows,
    row_numbers,
    seeded,
    site_shapes,
    subsampled_plates,
)
from numpyro_sgmcmc.results.run_data import arguments_of, check_data

#: Number of rows whose log likelihood is computed at once.
_CHUNK = 10_000


def loo(
    mcmc: MCMC,
    observations: Selection = 1_000,
    *,
    var_name: str | None = None,
    pointwise: bool | None = None,
    rng_key: Array | None = None,
    max_values: int = MAX_VALUES,
) -> Any:
    """
    PSIS-LOO of a run on a large data set, from the log likelihood of some of its observations.

    It is ``arviz.loo_subsample`` of ArviZ 1.x, without the array of (chains, draws, :math:`N`) that
    ArviZ needs, and the same on ArviZ 0.23.

    With the log density :math:`\\hat\\ell_i = \\log p(y_i \\mid \\hat\\theta)` of every
    observation at one point :math:`\\hat\\theta` and a simple random sample :math:`S` of
    :math:`m` observations, the difference estimator [1] is

    .. math:: \\widehat{\\text{elpd}} = \\sum_{i=1}^{N} \\hat\\ell_i
        + \\frac{N}{m} \\sum_{i \\in S}
        \\left( \\log p(y_i \\mid y_{-i}) - \\hat\\ell_i \\right),

    which has no bias for any :math:`\\hat\\theta`. Here :math:`\\hat\\theta` is the transformed
    mean of the unconstrained draws, so that the differences and ``subsampling_se`` are small. The
    first sum is computed in chunks of rows, the second one draw at a time.

    Two runs are compared by the same observations, unless their keys differ. With ArviZ 0.23 the
    pointwise values are :math:`\\log p(y_i \\mid y_{-i})` of the sample, and :math:`\\hat\\ell_i`
    plus the mean of the differences of all others, whose sum is the estimate. ``arviz.compare``
    then finds the standard error of a difference of models, in which the error of the sampling,
    ``subsampling_se``, is not.

    :param mcmc: an ``MCMC`` object after its run, of any kernel.
    :param observations: number of observations to draw (all, if there are fewer), or their numbers.
    :param str var_name: the observed site, if the model has several.
    :param bool pointwise: whether to keep the values and the Pareto :math:`k` of every observation
        of the sample; None is the default of ArviZ. :math:`k` is NaN outside of the sample.
    :param rng_key: random key of the choice of observations.
    :param int max_values: largest number of values that the log likelihood may have.
    :return: an ``ELPDDataLOOSubsample`` of ArviZ 1.x, or an ``ELPDData`` of ArviZ 0.23 with
        ``subsampling_se`` and ``subsample_size``.
    :raises ValueError: if the site or the observations do not exist, or if too many values would be
        needed.

    **References:**

    1. *Bayesian Leave-One-Out Cross-Validation for Large Data*,
       Måns Magnusson, Michael Riis Andersen, Johan Jonasson, Aki Vehtari (2019).

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGNHT
        >>> from numpyro_sgmcmc.results.loo import loo

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> mcmc = MCMC(SGNHT(model, step_size=1e-2, friction=20.0, steps_per_sample=10),
        ...             num_warmup=100, num_samples=300, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), jax.random.normal(jax.random.key(1), (500,)))
        >>> int(loo(mcmc, observations=50).n_data_points)
        500
    """
    import arviz

    args, kwargs = arguments_of(mcmc)
    key, max_values = random_key(rng_key), whole("max_values", max_values, most=MOST_OF_64_BITS)
    pointwise = None if pointwise is None else truth("pointwise", pointwise)
    instance("var_name", var_name, str | None, "the name of a site")
    observations = array("observations", observations)
    check_data(mcmc, "Score")
    site = _site_of(mcmc, args, kwargs, var_name)
    count = math.prod(site.shape)
    options = {"log_likelihood": True, "constant_data": False, "max_values": max_values}
    shown = {"var_name": variable_name(site.name), "pointwise": pointwise}
    if not site.axes:
        remedy = "a `subsample_size` in a plate of the site, which makes this function sample"
        check_size("log_likelihood", mcmc, count, max_values, remedy)
        return arviz.loo(_of_rows(mcmc, site.others or None, options), **shown)
    if np.ndim(observations) == 0:
        observations = min(whole("observations", observations, most=MOST_OF_64_BITS), count)
    chosen = np.sort(row_numbers(f"site '{site.name}'", observations, count, key))
    positions = np.unravel_index(chosen, site.shape)
    rows = {plate: np.unique(positions[axis]) for plate, axis in site.axes.items()}
    data = _of_rows(mcmc, site.others | rows, options)
    at_mean = _at_mean(site, args, kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto")
        if int(arviz.__version__.split(".")[0]) < 1:
            found = _as_arviz_0(arviz, data, site, rows, positions, at_mean)
        else:
            tree = _tree(data, site, rows, at_mean)
            found = arviz.loo_subsample(
                tree,
                chosen,
                **shown | {"pointwise": True},
                method="plpd",
                log_lik_fn=lambda observed, _: observed,
            )
    high = chosen[found["pareto_k"].values.ravel()[chosen] > found["good_k"]]
    if high.size:
        warnings.warn(_said_of(high, chosen.size, site, found.good_k), stacklevel=2)
    if pointwise is None:
        pointwise = arviz.rcParams["stats.ic_pointwise"]
    return found if pointwise else _without_pointwise(found)


class _Site(NamedTuple):
    """
    The observed site, with its run.

    - **axes** - axes of the subsampled plates around the site.
    - **others** - one row of each other plate, because a plate cannot be empty.
    """

    name: str
    shape: tuple[int, ...]
    axes: dict[str, int]
    others: dict[str, np.ndarray]
    model: Callable
    draws: dict[str, Array]
    sites: dict[str, dict]
    plates: tuple[Plate, ...]


def _site_of(mcmc: MCMC, args: tuple, kwargs: dict, var_name: str | None) -> _Site:
    model, draws = mcmc.sampler.model, kept_draws(mcmc).get_samples(group_by_chain=True)
    sites = site_shapes(model, draws, args, kwargs)
    observed = [k for k, s in sites.items() if s["type"] == "sample" and s["is_observed"]]
    name, plates = chosen_site(observed, var_name), subsampled_plates(sites)
    shape = sites[name]["fn"].batch_shape
    axes = {
        frame.name: len(shape) + frame.dim
        for frame in sites[name]["cond_indep_stack"]
        if frame.name in {plate.name for plate in plates}
    }
    others = {plate.name: np.zeros(1, int) for plate in plates if plate.name not in axes}
    return _Site(name, shape, axes, others, model, draws, sites, plates)


def _at_mean(site: _Site, args: tuple, kwargs: dict) -> np.ndarray:
    """The log density of every observation at the posterior mean."""
    point = _posterior_mean(site.model, site.plates, site.draws, site.sites, args, kwargs)
    chunked, axis = next(iter(site.axes.items()))

    def of_chunk(chunk: Array) -> Array:
        rows = site.others | {chunked: chunk}
        part = at_rows(site.model, site.plates, rows)
        terms = log_likelihood_of(part, of_rows(point, site.sites, rows), args, kwargs)
        return jnp.moveaxis(terms[site.name], axis, 0)

    return np.moveaxis(_in_chunks(of_chunk, site.shape[axis]), 0, axis)


def _as_arviz_0(
    arviz: Any,
    data: Any,
    site: _Site,
    rows: Mapping[str, np.ndarray],
    positions: tuple[np.ndarray, ...],
    at_point: np.ndarray,
) -> Any:
    """
    The difference estimator as an ``ELPDData`` of ArviZ 0.23.

    :param positions: of the chosen observations, by axis.
    :param at_point: the log density of every observation at a point.
    """
    import xarray

    variable = variable_name(site.name)
    terms = data["log_likelihood"][variable]
    known = {axis: rows[plate] for plate, axis in site.axes.items()}
    within = [np.searchsorted(known[k], x) if k in known else x for k, x in enumerate(positions)]
    of_chosen = terms.values[(slice(None), slice(None), *within)]
    of_chosen = xarray.Dataset({variable: (("chain", "draw", "observation"), of_chosen)})
    part = arviz.InferenceData(posterior=data["posterior"], log_likelihood=of_chosen)
    found = arviz.loo(part, pointwise=True)
    of_scale = {"log": 1, "negative_log": -1, "deviance": -2}[found["scale"]]
    size, count, values = at_point.size, len(within[0]), of_scale * at_point.astype(float)
    seen = found["loo_i"].values
    differences = seen - values[positions]
    # the estimates of the sum of the values, and of that of their squares
    total = values.sum() + size * differences.mean()
    squares = np.sum(values**2) + size * np.mean(seen**2 - values[positions] ** 2)
    # the error of a single observation is not known
    spread = differences.var(ddof=1) if count > 1 else math.nan if count < size else 0.0
    variance = size**2 * (1 - count / size) * spread / count
    found["elpd_loo"] = total
    found["se"] = max(squares - (total**2 - np.nan_to_num(variance)) / size, 0.0) ** 0.5
    found["p_loo"] *= size / count
    found["n_data_points"] = size
    everywhere = values + differences.mean()
    everywhere[positions] = seen
    shapes = np.full(at_point.shape, np.nan)
    shapes[positions] = found["pareto_k"].values
    for name, x in (("loo_i", everywhere), ("pareto_k", shapes)):
        found[name] = xarray.DataArray(x, dims=terms.dims[2:], name=name)
    found["subsampling_se"], found["subsample_size"] = variance**0.5, count
    return found


def _without_pointwise(found: Any) -> Any:
    """A result of ArviZ without the values of single observations."""
    if hasattr(found, "elpd_loo"):
        return type(found)(found.drop(["loo_i", "pareto_k"]))
    found.elpd_i = found.pareto_k = None
    return found


def _said_of(high: np.ndarray, count: int, site: _Site, good: float) -> str:
    """The warning about observations whose importance weights vary too much."""
    some = ", ".join(f"{k:,}" for k in high[:5]) + (", ..." if len(high) > 5 else "")
    # it begins as the warning of ArviZ does, which names none
    return (
        f"Estimated shape parameter of Pareto distribution is greater than {good:.2f} for"
        f" {len(high)} of the {count:,} observations of site '{site.name}' in the sample: {some}."
        " Their terms of the sum are not reliable. Look at these observations, or give the model"
        " heavier tails."
    )


def _tree(data: Any, site: _Site, rows: Mapping[str, np.ndarray], at_point: np.ndarray) -> Any:
    """
    A run for ArviZ with the log likelihood of some rows only.

    Its observations are the log densities at a point.
    """
    import xarray

    variable = variable_name(site.name)
    terms = data["log_likelihood"][variable]
    chain_and_draw, dims = terms.dims[:2], terms.dims[2:]
    known = {2 + axis: rows[plate] for plate, axis in site.axes.items()}
    every = _only_known(terms.values, known, (*terms.shape[:2], *site.shape))
    return xarray.DataTree.from_dict(
        {
            "posterior": data["posterior"].to_dataset(),
            "log_likelihood": xarray.Dataset(
                {variable: (terms.dims, every)}, {dim: terms[dim] for dim in chain_and_draw}
            ),
            "observed_data": xarray.Dataset({variable: (dims, at_point)}),
        }
    )


def _of_rows(mcmc: MCMC, rows: Any, options: Mapping[str, Any]) -> Any:
    """An ArviZ object with the log likelihood of some rows, without the warning about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", re.escape(SOME_ROWS.partition("{")[0]))
        return to_arviz(mcmc, rows=rows, **options)


def _posterior_mean(
    model: Callable,
    plates: tuple[Plate, ...],
    draws: dict[str, Array],
    sites: Mapping[str, dict],
    args: tuple,
    kwargs: dict,
) -> dict[str, Array]:
    """The latent sites at the mean of the unconstrained draws."""
    latents = {k: x for k, x in draws.items() if sites[k]["type"] == "sample"}
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), latents)
    # plates with data only are not needed here, but a plate cannot be empty
    inside = {frame.name for name in latents for frame in sites[name]["cond_indep_stack"]}
    of_data = {plate.name: np.zeros(1, int) for plate in plates if plate.name not in inside}
    prior = seeded(at_rows(model, plates, of_data))
    # a loop is compiled, and does not run operation by operation
    z = lax.map(lambda values: unconstrain_fn(prior, args, kwargs, values), flat)
    mean = jax.tree.map(lambda x: jnp.mean(x, 0, keepdims=True), z)
    point = lax.map(lambda z: constrain_fn(prior, args, kwargs, z), mean)
    return jax.tree.map(lambda x: x[0], point)


def _in_chunks(function: Callable[[Array], Array], size: int) -> np.ndarray:
    """The values of a function of row numbers for each of ``size`` rows."""
    count = -(-size // _CHUNK)
    length = -(-size // count)
    # copies of the last row fill up the last chunk
    rows = np.minimum(np.arange(count * length), size - 1).reshape(count, length)
    chunks = of_each(function, jnp.asarray(rows), "log densities")
    return chunks.reshape(-1, *chunks.shape[2:])[:size]


def _only_known(values: np.ndarray, known: Mapping[int, np.ndarray], shape: tuple) -> Any:
    """
    An array for xarray that has values only at some indices along some axes.

    ArviZ asks for the shape of the whole log likelihood, and for the values of the chosen
    observations.

    :param known: the indices with values, ascending, by axis.
    :param shape: the shape that the array reports.
    """
    from xarray.backends import BackendArray
    from xarray.core import indexing

    class OnlyKnown(BackendArray):
        def __init__(self) -> None:
            self.shape, self.dtype = shape, values.dtype

        def __getitem__(self, key: Any) -> np.ndarray:
            support = indexing.IndexingSupport.OUTER
            return indexing.explicit_indexing_adapter(key, shape, support, self._read)

        def _read(self, key: tuple) -> np.ndarray:
            selected = values
            # from the last axis, because an integer index removes its axis
            for axis in reversed(range(len(shape))):
                index = key[axis]
                if axis in known:
                    asked = np.arange(shape[axis])[index]
                    index = np.searchsorted(known[axis], asked)
                    if not np.array_equal(np.take(known[axis], index, mode="clip"), asked):
                        raise IndexError(
                            f"The log likelihood was computed for only {known[axis].size:,} of"
                            f" {shape[axis]:,} rows, and others were requested."
                        )
                selected = selected[(slice(None),) * axis + (index,)]
            return selected

    return indexing.LazilyIndexedArray(OnlyKnown())
