# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""From an ``MCMC`` object to ArviZ: ``InferenceData`` in ArviZ 0.x, ``DataTree`` in 1.x."""

from collections.abc import Callable, Mapping
from importlib.metadata import version
import inspect
import math
from typing import Any
import warnings

import jax
from jax import Array, random
import numpy as np
from numpyro.handlers import seed, substitute, trace, uncondition
from numpyro.infer import MCMC, Predictive
from numpyro.infer.util import log_likelihood as pointwise_log_likelihood

from numpyro_sgmcmc.diagnostics import SteinReport, SteinSums, advice, stein_report
from numpyro_sgmcmc.minibatch import as_arrays

#: Values of the size of (chains, draws, N) beyond this need `max_values`: 2 GB in float32.
_MAX_VALUES = 500_000_000


def to_arviz(
    mcmc: MCMC,
    *,
    log_likelihood: bool = False,
    posterior_predictive: bool = False,
    constant_data: bool = True,
    rng_key: Array | None = None,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, list[str]] | None = None,
    attrs: Mapping[str, str | int | float] | None = None,
    sampling_time: float | None = None,
    max_values: int = _MAX_VALUES,
) -> Any:
    """
    The results of a run for ArviZ, on the full data: groups ``posterior``,
    ``sample_stats`` (the collected fields of the state), ``observed_data``,
    ``constant_data`` (the array arguments of the model), and on request
    ``log_likelihood`` and ``posterior_predictive``.

    Variables have the shape ``(chain, draw, *site)``. Names of dimensions are those of
    the plates and of ``infer={"event_dims": [...]}``; ``dims`` adds to them. Nothing of a
    minibatch is in the result. Plain ``arviz.from_numpyro(mcmc)`` gives the same posterior.

    :param mcmc: an ``MCMC`` object after its run, of any kernel.
    :param bool log_likelihood: whether to compute :math:`\\log p(y_i \\mid \\theta)` of every
        row for every draw, one draw at a time: an array of (chains, draws, :math:`N`).
    :param bool posterior_predictive: whether to draw new observations of every row for
        every draw, one draw at a time; arrays of the same size.
    :param bool constant_data: whether to keep the array arguments of the model that are
        not its observations.
    :param rng_key: random key of the posterior predictive draws.
    :param coords: coordinate values of dimensions, by name.
    :param dims: names of the dimensions of variables, in addition to the inferred ones.
    :param attrs: attributes in addition to the settings of the kernel.
    :param float sampling_time: seconds that the run took, kept as an attribute; NumPyro does
        not measure it.
    :param int max_values: largest number of values that ``log_likelihood`` or
        ``posterior_predictive`` may have.
    :return: an ``arviz.InferenceData`` or an ``xarray.DataTree``.
    :raises ValueError: if the object has no draws, or if a requested group is too large.

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
    """
    import arviz

    if mcmc.last_state is None:
        raise ValueError("The `MCMC` object has no draws yet: call `mcmc.run(...)` first.")
    args, kwargs = as_arrays((mcmc._args, mcmc._kwargs))
    model, draws = mcmc.sampler.model, mcmc.get_samples(group_by_chain=True)
    _warn_if_nonfinite(mcmc)
    _warn_if_friction_is_exceeded(mcmc)
    stein = _stein_report(mcmc)
    if stein is not None and (problem := stein.problem()) is not None:
        warnings.warn(advice(problem), stacklevel=2)
    sites = _full_sites(model, draws, args, kwargs)
    observed = {
        name: site
        for name, site in sites.items()
        if site["type"] == "sample" and site["is_observed"] and site["value"] is not None
    }
    groups: dict[str, Any] = {}
    all_dims = _plate_dims(sites) | {k: list(v) for k, v in (dims or {}).items()}
    if posterior_predictive:
        values = sum(math.prod(site["fn"].shape()) for site in observed.values())
        _check_size("posterior_predictive", mcmc, values, max_values)
        predict = Predictive(
            uncondition(model),
            draws,
            return_sites=[name for name in observed if not _is_factor(observed[name])],
            batch_ndims=2,
        )
        key = random.key(0) if rng_key is None else rng_key
        groups["posterior_predictive"] = jax.device_get(predict(key, *args, **kwargs))
    if constant_data:
        arguments = _array_arguments(model, args, kwargs)
        known = [np.asarray(site["value"]) for site in observed.values()]
        groups["constant_data"] = {
            name: np.asarray(x)
            for name, x in arguments.items()
            if not any(x.shape == v.shape and np.array_equal(x, v) for v in known)
        } or None
        plates = {s["args"][0]: name for name, s in sites.items() if s["type"] == "plate"}
        for name, x in (groups["constant_data"] or {}).items():
            if x.shape[0] in plates:
                rest = [f"{name}_dim_{k}" for k in range(1, x.ndim)]
                all_dims.setdefault(name, [plates[x.shape[0]], *rest])
    data = arviz.from_numpyro(mcmc, coords=coords, dims=all_dims, log_likelihood=False, **groups)
    if log_likelihood:
        rows = sum(math.prod(site["fn"].batch_shape) for site in observed.values())
        _check_size("log_likelihood", mcmc, rows, max_values)
        terms = pointwise_log_likelihood(model, draws, *args, batch_ndims=2, **kwargs)
        _add_group(arviz, data, "log_likelihood", jax.device_get(terms), coords, all_dims)
    data.attrs.update(_attributes(mcmc, stein, sampling_time) | dict(attrs or {}))
    return data


def _warn_if_friction_is_exceeded(mcmc: MCMC) -> None:
    used = np.asarray(mcmc.get_extra_fields().get("friction_used", 0.0))
    if np.any(used > 1):
        warnings.warn(
            "The noise of the gradient was more than the friction can dissipate in"
            f" {np.mean(used > 1):.1%} of the draws, by a factor of up to {np.max(used):.3g}: they"
            " spread too widely. Increase the friction or reduce the step size by more than that"
            " factor, or use CCAdL, which has no such limit.",
            stacklevel=3,
        )


def _warn_if_nonfinite(mcmc: MCMC) -> None:
    state = mcmc.last_state
    undone = np.asarray(getattr(state, "nonfinite_steps", 0))
    if undone.sum():
        chains = undone.reshape(-1)
        warnings.warn(
            f"{int(chains.sum())} steps were not finite and were undone, in"
            f" {int((chains > 0).sum())} of {chains.size} chains, at a step size of"
            f" {float(np.max(state.step_size)):.3g}. The draws near them cannot be trusted: reduce"
            " the step size, start closer to the posterior (`init_to_value`), or give"
            " parameters with heavy-tailed posteriors a narrower prior.",
            stacklevel=3,
        )


def _full_sites(model: Callable, draws: dict, args: tuple, kwargs: dict) -> dict[str, dict]:
    """The sites of the model on its full data, at the first draw."""
    first = jax.tree.map(lambda x: x[0, 0], draws)
    return trace(substitute(seed(model, random.key(0)), data=first)).get_trace(*args, **kwargs)


def _is_factor(site: dict) -> bool:
    return type(site["fn"]).__name__ == "Unit"


def _plate_dims(sites: Mapping[str, dict]) -> dict[str, list[str]]:
    """Names of the dimensions of every site: of its plates, then of its events."""
    found = {}
    for name, site in sites.items():
        if site["type"] not in ("sample", "deterministic"):
            continue
        frames = sorted(site["cond_indep_stack"], key=lambda frame: frame.dim)
        events = site["infer"].get("event_dims", []) if site["type"] == "sample" else []
        if frames or events:
            found[name] = [frame.name for frame in frames] + list(events)
    return found


def _array_arguments(model: Callable, args: tuple, kwargs: dict) -> dict[str, Array]:
    bound = inspect.signature(getattr(model, "fn", model)).bind(*args, **kwargs).arguments
    return {k: x for k, x in bound.items() if isinstance(x, jax.Array) and x.ndim > 0}


def _check_size(group: str, mcmc: MCMC, values: int, max_values: int) -> None:
    draws = mcmc.num_chains * (mcmc.num_samples // mcmc.thinning)
    if draws * values > max_values:
        raise ValueError(
            f"`{group}` would have {draws:,} draws x {values:,} values = {draws * values:,} values,"
            f" more than max_values={max_values:,}. Keep fewer draws with `MCMC(thinning=...)`,"
            " or raise `max_values` if the memory is there (4 bytes each)."
        )


def _add_group(
    arviz: Any,
    data: Any,
    name: str,
    values: dict[str, np.ndarray],
    coords: Mapping[str, Any] | None,
    dims: dict[str, list[str]],
) -> None:
    if int(arviz.__version__.split(".")[0]) < 1:
        data.extend(arviz.from_dict(**{name: values}, coords=coords, dims=dims))
    else:
        data.update(arviz.from_dict({name: values}, coords=coords, dims=dims))


def _stein_report(mcmc: MCMC) -> SteinReport | None:
    sums = getattr(mcmc.last_state, "stein", None)
    return stein_report(sums) if isinstance(sums, SteinSums) else None


def _attributes(
    mcmc: MCMC, stein: SteinReport | None, sampling_time: float | None
) -> dict[str, str | int | float]:
    found = dict(getattr(mcmc.sampler, "settings", {}))
    found |= {
        "inference_library": "numpyro_sgmcmc",
        "inference_library_version": version("numpyro_sgmcmc"),
        "numpyro_version": version("numpyro"),
        "jax_version": version("jax"),
        "tuning_steps": mcmc.num_warmup,
        "thinning": mcmc.thinning,
    }
    if stein is not None:
        found |= {
            "configurational_temperature": stein.temperature,
            "configurational_temperature_error": stein.error,
            "stein_diagonal_smallest": float(stein.diagonal.min()),
            "stein_diagonal_largest": float(stein.diagonal.max()),
            "stein_eigenvalue_smallest": stein.eigenvalues[0],
            "stein_eigenvalue_largest": stein.eigenvalues[1],
        }
    if sampling_time is not None:
        found["sampling_time"] = float(sampling_time)
    return found
