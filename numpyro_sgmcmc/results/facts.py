# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The facts of a run, in a form that is stored with its draws."""

from collections.abc import Mapping
from importlib.metadata import version
from itertools import product
import math
from typing import Any

import numpy as np
from numpyro.infer import MCMC
import xarray as xr

from numpyro_sgmcmc.posterior.group_handlers import plate_axes
from numpyro_sgmcmc.stein import SteinReport, SteinSums, problem_of_undone_steps, stein_report


def stein_of(mcmc: MCMC) -> SteinReport | None:
    """The Stein matrix of the run, or None for kernels that keep none."""
    sums = getattr(getattr(mcmc.last_state, "monitor", None), "stein", None)
    return stein_report(sums) if isinstance(sums, SteinSums) else None


def attributes(
    mcmc: MCMC, stein: SteinReport | None, sampling_time: float | None
) -> dict[str, str | int | float]:
    """The settings of the kernel and the facts of the run, as words and numbers."""
    settings = getattr(mcmc.sampler, "run_info", {})
    # netCDF has no Boolean values
    facts = {name: int(x) if isinstance(x, bool) else x for name, x in settings.items()}
    facts.setdefault("algorithm", type(mcmc.sampler).__name__)
    facts |= {
        "inference_library": "numpyro_sgmcmc",
        "inference_library_version": version("numpyro_sgmcmc"),
        "numpyro_version": version("numpyro"),
        "jax_version": version("jax"),
        "tuning_steps": mcmc.num_warmup,
        "thinning": mcmc.thinning,
    }
    if "passes_per_sample" in facts:
        samples = mcmc.num_chains * (mcmc.num_warmup + mcmc.num_samples)
        facts["passes"] = samples * float(facts["passes_per_sample"])
    if (tuning := getattr(mcmc.sampler, "tuning", None)) is not None:
        facts["tuning_problem"] = tuning.problem or ""
        if mcmc.sampler.method.step_size is None and tuning.steps_per_sample > 1:
            # samples closer than a relaxation time count for less, in proportion
            of_a_draw = mcmc.sampler.steps_per_sample / tuning.steps_per_sample
            facts["promised_per_sample"] = of_a_draw / tuning.slowness
            facts["seconds_per_sample"] = of_a_draw * tuning.seconds_per_sample
    if hasattr(mcmc.last_state, "monitor"):
        facts["dimension"] = sum(map(math.prod, latent_shapes(mcmc).values()))
        facts["nonfinite_steps"] = int(np.sum(mcmc.last_state.monitor.nonfinite_steps))
        facts["undone_steps_problem"] = problem_of_undone_steps(mcmc.last_state) or ""
    known = getattr(getattr(mcmc.last_state, "fixed", None), "known", None)
    if known is not None:
        facts["rows"] = int(np.ravel(known.rows)[0])
    if stein is not None:
        facts |= {
            "configurational_temperature": stein.temperature,
            "configurational_temperature_error": stein.error,
            "variance_ratio_smallest": float(stein.ratios.min()),
            "variance_ratio_largest": float(stein.ratios.max()),
            "stein_eigenvalue_smallest": stein.eigenvalues[0],
            "stein_eigenvalue_largest": stein.eigenvalues[1],
            "stein_samples": stein.samples,
            "verdict": stein.problem() or "",
        }
    if sampling_time is not None:
        facts["sampling_time"] = float(sampling_time)
    return facts


def variable_name(site: str) -> str:
    """The name of a site in the results, without slashes, which would begin a group."""
    return site.replace("/", ".")


def parameters(shapes: dict[str, tuple[int, ...]]) -> tuple[list[str], list[str]]:
    """
    Labels and variables of the unconstrained parameters, in the order of the flat vector.

    The labels have the form of ArviZ.

    :param shapes: shapes of the unconstrained values of the latent sites.
    """
    labels, sites = [], []
    for site in sorted(shapes):
        name = variable_name(site)
        for index in product(*map(range, shapes[site])):
            labels.append(f"{name}[{', '.join(map(str, index))}]" if index else name)
            sites.append(name)
    return labels, sites


def stein_group(stein: SteinReport, shapes: dict[str, tuple[int, ...]]) -> xr.Dataset:
    """
    The Stein matrix by parameter, as a group for ArviZ.

    Its variables are ``variance_ratio`` and ``variance_ratio_error``. Up to 100 parameters there
    are ``eigenvalue`` and ``eigenvalue_spread`` of the block of each site. The dimension is
    ``parameter``, with labels of the unconstrained parameters, or of the sites above 1,000
    parameters. Its coordinate is ``site``.
    """
    labels, sites = parameters(shapes)
    if len(stein.ratios) != len(labels):
        labels = sites = [variable_name(site) for site in sorted(shapes)]
    site_of = np.asarray(sites)
    variables: dict[str, Any] = {
        "variance_ratio": stein.ratios,
        "variance_ratio_error": stein.ratio_errors,
    }
    if stein.matrix is not None:
        values, spread = np.zeros(len(labels)), np.zeros(len(labels))
        for site in dict.fromkeys(sites):
            block = np.flatnonzero(site_of == site)
            values[block] = np.linalg.eigvalsh(stein.matrix[np.ix_(block, block)])
            spread[block] = stein.eigenvalue_spread(len(block))
        variables |= {"eigenvalue": values, "eigenvalue_spread": spread}
    return xr.Dataset(
        {name: ("parameter", np.asarray(x, float)) for name, x in variables.items()},
        {"parameter": labels, "site": ("parameter", sites)},
        {
            "temperature": stein.temperature,
            "temperature_error": stein.error,
            "samples": stein.samples,
        },
    )


def latent_shapes(mcmc: MCMC) -> dict[str, tuple[int, ...]]:
    """Shapes of the unconstrained values of one chain, from the latest state."""
    z = mcmc.last_state.z
    batch = np.ndim(mcmc.last_state.i)
    return {name: tuple(x.shape[batch:]) for name, x in z.items()}


def plate_dims(sites: Mapping[str, dict]) -> dict[str, list[str]]:
    """Names of the dimensions of the variable of every site: its batch, then its events."""
    dims = {}
    for name, site in sites.items():
        if site["type"] not in ("sample", "deterministic"):
            continue
        frames, variable = site["cond_indep_stack"], variable_name(name)
        if site["type"] == "deterministic":
            plates = {axis: plate for plate, axis in plate_axes(site).items()}
            if len(plates) < len(frames):
                continue  # its shape is not that of its plates
            axes, events = 1 + max(plates, default=-1), []
        else:
            axes = len(site["fn"].batch_shape)
            plates = {axes + frame.dim: frame.name for frame in frames}
            events = list(site["infer"].get("event_dims", []))
        if plates or events:
            # an axis without a plate may be before those of plates, as the times of a `scan` are
            own = [plates.get(k, f"{variable}_dim_{k}") for k in range(axes)]
            dims[variable] = own + events
    return dims
