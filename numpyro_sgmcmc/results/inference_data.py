# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Conversion of an ``MCMC`` object for ArviZ: ``InferenceData`` in 0.x, ``DataTree`` in 1.x."""

from collections.abc import Callable, Mapping
import inspect
import math
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import Unit
from numpyro.handlers import uncondition
from numpyro.infer import MCMC, Predictive
import xarray as xr

from numpyro_sgmcmc.data.converters import (
    MOST_OF_64_BITS,
    instance,
    names,
    positive,
    random_key,
    truth,
    whole,
)
from numpyro_sgmcmc.data.rows_on_disk import on_disk
from numpyro_sgmcmc.posterior.group_handlers import group_axis, plate_axes
from numpyro_sgmcmc.posterior.handlers import log_density
from numpyro_sgmcmc.posterior.numpyro_private import view_of
from numpyro_sgmcmc.results.cycle_draws import kept_draws
from numpyro_sgmcmc.results.facts import (
    attributes,
    latent_shapes,
    plate_dims,
    stein_group,
    stein_of,
    variable_name,
)
from numpyro_sgmcmc.results.group_draws import GroupDraws
from numpyro_sgmcmc.results.parts import compiled, of_each
from numpyro_sgmcmc.results.row_subset import (
    Selection,
    full_sites,
    keep_rows,
    log_likelihood_of,
    sites_of,
    subsampled_plates,
)
from numpyro_sgmcmc.results.run_data import are_edited, arguments_of, check_data, marginal_of
from numpyro_sgmcmc.stein import SteinReport, advice, problem_of_undone_steps

#: Rate of exchanges below which replicas do not help the chain.
_SELDOM = 0.02

#: Warning for a log likelihood of some rows, whose sum ArviZ would take for the sum over all rows.
SOME_ROWS = (
    "The log likelihood is that of {}: `arviz.loo` sums over these rows alone."
    " `numpyro_sgmcmc.results.loo.loo(mcmc)` estimates the sum over all rows."
)

#: Number of values of (chains, draws, N) beyond which `max_values` is needed: 2 GB in float32.
MAX_VALUES = 500_000_000


def to_arviz(
    mcmc: MCMC,
    *,
    log_likelihood: bool | str = False,
    log_prior: bool = False,
    posterior_predictive: bool = False,
    constant_data: bool = True,
    rows: Selection | Mapping[str, Selection] | None = None,
    rng_key: Array | None = None,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, list[str]] | None = None,
    attrs: Mapping[str, str | int | float] | None = None,
    sampling_time: float | None = None,
    max_values: int = MAX_VALUES,
) -> Any:
    """
    The results of a run for ArviZ, on the full data.

    Its groups are ``posterior``, ``sample_stats`` (the collected fields of the state), ``stein``
    (the variance ratio of each parameter and its standard error, see
    :mod:`numpyro_sgmcmc.stein`), ``observed_data``, ``constant_data`` (the array arguments of the
    model), and on request ``log_likelihood``, ``log_prior`` and ``posterior_predictive``.

    Variables have the shape ``(chain, draw, *site)``. Dimensions have the names of the plates and
    of ``infer={"event_dims": [...]}``, and ``dims`` adds names. The result has no minibatches.
    Plain ``arviz.from_numpyro(mcmc)`` gives an equal posterior. A slash in the name of a site, as
    in sites of ``flax_module``, becomes a dot, because in ArviZ 1.x a slash begins a group.

    If memory is too small for all rows, ``rows=2_000`` draws 2,000 of them at random. All groups
    then have these rows only, and the cost grows with their number and not with :math:`N`. The row
    numbers are the coordinate of the plate's dimension. The attribute ``rows_kept_`` with the name
    of the plate has the number of kept rows and of all rows. Checks of calibration such as
    ``arviz.plot_loo_pit`` need no more rows. :math:`N / n` times the sum over :math:`n` rows
    estimates the sum over all rows. :func:`~numpyro_sgmcmc.results.loo.loo` is a better estimate.

    :param mcmc: an ``MCMC`` object after its run, of any kernel.
    :param bool log_likelihood: whether to compute :math:`\\log p(y_i \\mid \\theta)` of every
        row for every draw, one draw at a time: an array of (chains, draws, :math:`N`). With
        ``"total"`` it is the sum over all rows, weighted as in the posterior, an array of (chains,
        draws): for the power scaling of ArviZ, and not for ``arviz.loo``.
    :param bool log_prior: whether to compute :math:`\\log p(\\theta)` for every draw, the sum of
        each latent site, for ``arviz.psens`` of ArviZ 0.x and ``arviz.psense_summary`` of ArviZ
        1.x. Effects that a run integrates out, and each ``numpyro.factor``, belong to the
        likelihood.
    :param bool posterior_predictive: whether to draw new observations of every row for every draw,
        one draw at a time. The arrays have the size of ``log_likelihood``. For groups with latent
        variables these variables are drawn first.
    :param bool constant_data: whether to keep the array arguments of the model that are
        not its observations.
    :param rows: number of rows to keep of every subsampled plate, drawn without replacement (plates
        of one size get equal rows); or the row numbers; or a dict of either by the name of the
        plate, where other plates stay whole. None keeps all rows, or 1,000 rows of data on disk
        (:class:`~numpyro_sgmcmc.RowsOnDisk`).
    :param rng_key: random key of the choice of rows and of the posterior predictive draws.
    :param coords: coordinate values of dimensions, by name; for all rows, even if ``rows`` is
        given.
    :param dims: names of the dimensions of variables, in addition to the inferred ones.
    :param attrs: attributes in addition to the settings of the kernel.
    :param float sampling_time: seconds that the run took, kept as an attribute; NumPyro does
        not measure it.
    :param int max_values: largest number of values that ``log_likelihood`` or
        ``posterior_predictive`` may have.
    :return: an ``arviz.InferenceData`` or an ``xarray.DataTree``.
    :raises ValueError: if the object has no draws, if a requested group is too large, or if
        there are no such rows.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGNHT, to_arviz

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=10) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> mcmc = MCMC(SGNHT(model, step_size=1e-2, friction=10.0), num_warmup=100,
        ...             num_samples=100, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), jnp.ones(50))
        >>> data = to_arviz(mcmc, log_likelihood=True)
        >>> data["log_likelihood"]["y"].sizes["rows"]
        50
        >>> data = to_arviz(mcmc, posterior_predictive=True, rows=[3, 14, 41])
        >>> data["posterior_predictive"]["y"].coords["rows"].values.tolist()
        [3, 14, 41]
    """
    import arviz

    args, kwargs = arguments_of(mcmc)
    is_total = isinstance(log_likelihood, str) and log_likelihood == "total"
    log_likelihood = is_total or truth("log_likelihood", log_likelihood)
    log_prior = truth("log_prior", log_prior)
    posterior_predictive = truth("posterior_predictive", posterior_predictive)
    constant_data = truth("constant_data", constant_data)
    key, max_values = random_key(rng_key), whole("max_values", max_values, most=MOST_OF_64_BITS)
    for name, given in (("coords", coords), ("dims", dims), ("attrs", attrs)):
        instance(name, given, Mapping | None, "a dict")
    if sampling_time is not None:
        sampling_time = positive("sampling_time", sampling_time, zero=True)
    stein = stein_of(mcmc)
    _warn_of_draws(mcmc, stein)
    if log_likelihood or posterior_predictive:
        check_data(mcmc, "Evaluate")
    if is_total and (rows is not None or on_disk((args, kwargs))):
        raise ValueError(
            '`log_likelihood="total"` is a sum over all rows. Leave `rows` out, and give the run'
            " arrays in memory."
        )
    run = _on_rows(kept_draws(mcmc), args, kwargs, rows, key)
    coords = dict(run.chosen) | {
        name: np.asarray(labels)[run.chosen[name]] if name in run.chosen else labels
        for name, labels in (coords or {}).items()
    }
    known = _observations(mcmc, run)
    groups: dict[str, Any] = {}
    all_dims = plate_dims(run.sites) | {
        variable_name(k): names(f"dims[{k!r}]", v) for k, v in (dims or {}).items()
    }
    if posterior_predictive:
        groups["posterior_predictive"] = _variables(_replicated(run, key, max_values))
    if constant_data:
        constants, their_dims = _constants(run, list(known.values()))
        groups["constant_data"], all_dims = constants or None, their_dims | all_dims
    # ArviZ would trace the model for its observations, operation by operation
    view = view_of(run.mcmc, _Observations(_variables(known)), _variables(run.draws), (), {})
    data = arviz.from_numpyro(view, coords=coords, dims=all_dims, log_likelihood=False, **groups)
    if log_likelihood:
        terms = _log_densities(run, True) if is_total else _log_likelihood(run, max_values)
        dims_of = None if is_total else all_dims
        _add_group(arviz, data, "log_likelihood", _variables(terms), coords, dims_of)
    if log_prior:
        inside = {
            name: plates
            for name in run.draws
            if (plates := run.chosen.keys() & plate_axes(run.sites[name]).keys())
        }
        if rows is not None and inside:
            raise ValueError(
                f"`log_prior=True` needs all rows, because sites {sorted(inside)} are inside of"
                " plates with chosen `rows`. Leave `rows` out."
            )
        _add_group(arviz, data, "log_prior", _variables(_log_densities(run, False)), coords, None)
    if stein is not None:
        _add_dataset(data, "stein", stein_group(stein, latent_shapes(mcmc)))
    data.attrs.update(attributes(run.mcmc, stein, sampling_time))
    for name, kept in run.rows_kept.items():
        data.attrs[f"rows_kept_{name}"] = kept
        # with predictions the log likelihood is for calibration, and not for a sum
        if log_likelihood and not posterior_predictive:
            warnings.warn(SOME_ROWS.format(kept), stacklevel=2)
    data.attrs.update(attrs or {})
    return data


class _Run(NamedTuple):
    """
    A run on some of its rows.

    - **model**, **draws** - the model and the draws with these rows as all data.
    - **chosen** - row numbers by plate, for plates that are not whole.
    - **sites**, **observed** - the sites of this model, and the observed ones.
    """

    mcmc: MCMC
    args: tuple
    kwargs: dict
    model: Callable
    draws: dict
    chosen: dict[str, np.ndarray]
    sites: dict[str, dict]
    observed: dict[str, dict]

    @property
    def rows_kept(self) -> dict[str, str]:
        """Descriptions of the kept rows of plates that are not whole."""
        return {
            plate.name: f"{len(numbers):,} of {plate.size:,} rows of plate '{plate.name}'"
            for plate in subsampled_plates(self.sites)
            if (numbers := self.chosen.get(plate.name)) is not None and len(numbers) < plate.size
        }


def _on_rows(mcmc: MCMC, args: tuple, kwargs: dict, rows: Any, key: Array) -> _Run:
    draws = mcmc.get_samples(group_by_chain=True)
    model, draws, chosen = keep_rows(mcmc.sampler.model, draws, args, kwargs, rows, key)
    with numpyro.validation_enabled(False):  # diagnostics judge the positions of the chains
        sites = full_sites(model, draws, args, kwargs)
    observed = {
        name: site
        for name, site in sites.items()
        if site["type"] == "sample"
        and site["is_observed"]
        and site["value"] is not None
        and not _is_factor(site)
    }
    return _Run(mcmc, args, kwargs, model, draws, chosen, sites, observed)


def _observations(mcmc: MCMC, run: _Run) -> dict[str, np.ndarray]:
    """Values of the observed sites; none if the data have changed since the run."""
    if not are_edited(mcmc):
        return {name: np.asarray(site["value"]) for name, site in run.observed.items()}
    warnings.warn(
        "The data have been changed in place since the run: `observed_data` is left out, and the"
        " draws are from the data before the change.",
        stacklevel=3,
    )
    return {}


def _constants(
    run: _Run, observations: list[np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """The array arguments of the model without its observations, and names of dimensions."""
    plates = {s["args"][0]: name for name, s in run.sites.items() if s["type"] == "plate"}
    constants, dims = {}, {}
    for name, argument in _array_arguments(run.mcmc.sampler.model, run.args, run.kwargs).items():
        # an observation may have axes of several plates
        x = argument
        for axis, size in enumerate(argument.shape):
            if plates.get(size) in run.chosen:
                x = jnp.take(x, run.chosen[plates[size]], axis=axis)
        # an argument with the name of a site has its observations, in another layout
        if name in run.observed or any(np.array_equal(x, v) for v in observations):
            continue
        plate = plates.get(argument.shape[0])
        constants[name] = np.asarray(
            argument[run.chosen[plate]] if plate in run.chosen else argument
        )
        if plate is not None:
            dims[name] = [plate, *(f"{name}_dim_{k}" for k in range(1, argument.ndim))]
    return constants, dims


def _log_likelihood(run: _Run, max_values: int) -> dict[str, np.ndarray]:
    """The log likelihood of every observation at every draw."""

    def terms_of(draw: dict) -> dict[str, Array]:
        return log_likelihood_of(run.model, draw, run.args, run.kwargs)

    shapes = jax.eval_shape(terms_of, jax.tree.map(lambda x: x[0, 0], run.draws)).values()
    check_size("log_likelihood", run.mcmc, sum(x.size for x in shapes), max_values)
    return _of_draws(terms_of, run.draws, "log likelihood")


def _log_densities(run: _Run, observed: bool) -> dict[str, np.ndarray]:
    """The log densities of observed or of latent sites at every draw, summed over each site."""

    def terms_of(draw: dict) -> dict[str, Array]:
        sites = sites_of(run.model, draw, run.args, run.kwargs)
        chosen = {k: s for k, s in sites.items() if s["type"] == "sample"}
        return {k: log_density(s) for k, s in chosen.items() if s["is_observed"] == observed}

    first = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), run.draws)
    reference = compiled(terms_of, first)(first)
    # a sum of many rows has fewer digits than its differences between draws
    apart = _of_draws(
        lambda draw: jax.tree.map(lambda x, y: jnp.sum(x - y), terms_of(draw), reference),
        run.draws,
        "log likelihood" if observed else "log prior",
    )
    return {k: np.sum(np.asarray(reference[k], np.float64)) + x for k, x in apart.items()}


class _Observations:
    """A model of observations only."""

    def __init__(self, values: Mapping[str, np.ndarray]) -> None:
        self.values = values

    def __call__(self) -> None:
        for name, value in self.values.items():
            numpyro.sample(name, Unit(jnp.zeros(())), obs=value)


def _of_draws(function: Callable, draws: Any, description: str) -> dict[str, np.ndarray]:
    """The values of a function at each draw, shape (chains, draws, ...)."""
    shape = jax.tree.leaves(draws)[0].shape[:2]
    flat = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:]), draws)
    values = of_each(function, flat, description)
    return {name: x.reshape(*shape, *x.shape[1:]) for name, x in values.items()}


def _replicated(run: _Run, key: Array, max_values: int) -> dict[str, np.ndarray]:
    """New observations for every draw."""
    values = sum(math.prod(site["fn"].shape()) for site in run.observed.values())
    check_size("posterior_predictive", run.mcmc, values, max_values)
    of_groups = _replicated_groups(run, key)
    names = [name for name in run.observed if name not in of_groups]
    if not names:
        return of_groups

    def one(draw_and_key: tuple[dict, Array]) -> dict[str, Array]:
        draw, own = draw_and_key
        single = jax.tree.map(lambda x: x[None], draw)
        predict = Predictive(uncondition(run.model), single, return_sites=names)
        return jax.tree.map(lambda x: x[0], predict(own, *run.args, **run.kwargs))

    shape = next(iter(run.draws.values())).shape[:2]
    keys = random.split(key, shape)
    return of_groups | _of_draws(one, (run.draws, keys), "posterior predictive")


def _replicated_groups(run: _Run, key: Array) -> dict[str, np.ndarray]:
    """New observations of groups for every draw, with latent variables drawn too."""
    marginal = marginal_of(run.mcmc)
    if marginal is None:
        return {}
    plates = subsampled_plates(run.sites)
    parts = GroupDraws(marginal.replicates, plates, run.draws, key, run.args, run.kwargs)
    sizes = {plate.name: plate.size for plate in plates}
    replicated = {}
    for plate in marginal.plates:
        rows = run.chosen.get(plate.name, np.arange(sizes[plate.name]))
        for name, values in parts.in_memory(plate.name, rows).items():
            replicated[name] = np.moveaxis(values, 2, 2 + group_axis(run.sites[name], plate.name))
    return replicated


def _variables(values: Mapping[str, Any]) -> dict[str, Any]:
    return {variable_name(name): x for name, x in jax.device_get(values).items()}


def _warn_of_draws(mcmc: MCMC, stein: SteinReport | None) -> None:
    """Warn of problems of the draws that the run has recorded."""
    if (problem := problem_of_undone_steps(mcmc.last_state)) is not None:
        step_size = float(np.max(mcmc.last_state.step_size))
        warnings.warn(
            f"{problem[0].upper()}{problem[1:]}, at a step size of {step_size:.3g}: they were not"
            " finite, or led to an impossible momentum. The draws near them cannot be trusted."
            " Reduce the step size, start closer to the posterior (`init_to_value`), or give"
            " parameters with heavy-tailed posteriors a narrower prior.",
            stacklevel=3,
        )
    fields = mcmc.get_extra_fields()
    used = np.asarray(fields.get("friction_used", 0.0))
    if np.any(used > 1):
        warnings.warn(
            "The noise of the gradient was more than the friction can dissipate in"
            f" {np.mean(used > 1):.1%} of the draws, by a factor of up to {np.max(used):.3g}, so"
            " that they spread too widely. Increase the friction or reduce the step size by more"
            " than that factor, or use CCAdL, which has no such limit.",
            stacklevel=3,
        )
    if (tried := fields.get("exchange_prob")) is not None:
        mean = np.mean(np.asarray(tried, np.float64), axis=0)
        k = int(np.argmin(mean))
        temperatures = str(mcmc.sampler.run_info["temperatures"]).split(", ")
        if mean[k] < _SELDOM:
            warnings.warn(
                f"Positions were exchanged in {mean[k]:.1%} of the tries between replicas at the"
                f" temperatures {temperatures[k]} and {temperatures[k + 1]}. Hotter replicas"
                " hardly take part, and modes may be missing or have wrong weights. Add"
                " temperatures between these two, or use more `minibatches` for an exchange.",
                stacklevel=3,
            )
    if stein is not None and (problem := stein.problem()) is not None:
        warnings.warn(advice(problem), stacklevel=3)


def _is_factor(site: dict) -> bool:
    return type(site["fn"]).__name__ == "Unit"


def _array_arguments(model: Callable, args: tuple, kwargs: dict) -> dict[str, Array]:
    bound = inspect.signature(getattr(model, "fn", model)).bind(*args, **kwargs).arguments
    return {k: x for k, x in bound.items() if isinstance(x, jax.Array) and x.ndim > 0}


def check_size(
    group: str,
    mcmc: MCMC,
    values: int,
    max_values: int,
    remedy: str = "`rows=2_000` for some of the rows",
) -> None:
    draws = mcmc.num_chains * (mcmc.num_samples // mcmc.thinning)
    if draws * values > max_values:
        raise ValueError(
            f"`{group}` would have {draws:,} draws x {values:,} values = {draws * values:,}"
            f" values, more than max_values={max_values:,}. Use {remedy}, or keep fewer draws with"
            " `MCMC(thinning=...)`. With enough memory (4 bytes for each value) raise"
            " `max_values`."
        )


def _add_group(
    arviz: Any,
    data: Any,
    name: str,
    values: dict[str, np.ndarray],
    coords: Mapping[str, Any] | None,
    dims: dict[str, list[str]] | None,
) -> None:
    if int(arviz.__version__.split(".")[0]) < 1:
        data.add_groups({name: arviz.dict_to_dataset(values, coords=coords, dims=dims)})
    else:
        data.update(arviz.from_dict({name: values}, coords=coords, dims=dims))


def _add_dataset(data: Any, name: str, dataset: xr.Dataset) -> None:
    if hasattr(data, "add_groups"):
        data.add_groups({name: dataset})
    else:
        data[name] = xr.DataTree(dataset)
