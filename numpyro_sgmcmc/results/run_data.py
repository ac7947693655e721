# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The model of a run with its data, for computations after the run."""

from collections.abc import Callable
from typing import Any

from numpyro.infer import MCMC
from numpyro.infer.initialization import init_to_uniform

from numpyro_sgmcmc.data.converters import shown
from numpyro_sgmcmc.data.fingerprint import fingerprint_of
from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.posterior.checks.arguments import as_arrays
from numpyro_sgmcmc.posterior.handlers import full_data
from numpyro_sgmcmc.posterior.local_latents import Marginal
from numpyro_sgmcmc.posterior.model import read_model
from numpyro_sgmcmc.posterior.numpyro_private import arguments
from numpyro_sgmcmc.posterior.target import Target


def target_of(
    model: Callable, args: tuple, kwargs: dict | None = None, subsampling: Any = None
) -> Target:
    """
    The model with its minibatches, from the full-data view that the kernels show.

    :param subsampling: the subsampling scheme of the run, which may set the weights of rows.
    """
    args, kwargs = as_arrays((tuple(args), kwargs or {}))
    raw: Any = model.fn if isinstance(model, full_data) else model
    raw = raw.model if isinstance(raw, Marginal) else raw
    scheme = SCHEMES["without_replacement"]
    if subsampling in SCHEMES:
        scheme = scheme._replace(kind=SCHEMES[subsampling].kind)
    return Target(read_model(raw, init_to_uniform, args, kwargs), args, kwargs, scheme)


def check_data(mcmc: MCMC, asked: str, target: Target | None = None) -> None:
    """
    Check that the data of a run are unchanged.

    :param asked: the action on the run, a verb.
    :param target: the model with the present data, if it has been read.
    :raises ValueError: if the data have been changed in place since the run.
    """
    seen = getattr(getattr(mcmc.sampler, "runtime", None), "data", None)
    if seen is None:  # other kernels, or traced data
        return
    target = target or target_of(mcmc.sampler.model, *arguments(mcmc))
    data = fingerprint_of(target.args, target.kwargs)
    if data is not None and data + target.model.captured != seen:
        raise ValueError(
            "The model or the data differ from those of the run: the data were changed in place, or"
            f" the kernel was used for others. {asked} the run with its own data, or run again."
        )


def are_edited(mcmc: MCMC) -> bool:
    """True if the arguments of the model were changed in place since the run."""
    seen = getattr(getattr(mcmc.sampler, "runtime", None), "data", None)
    if seen is None:  # other kernels, or traced data
        return False
    data = fingerprint_of(*as_arrays(arguments(mcmc)))
    return data is not None and not seen.startswith(data)


def marginal_of(mcmc: MCMC) -> Marginal | None:
    """The model of a run with latent variables of groups integrated out, or None."""
    model = getattr(mcmc.sampler.model, "fn", None)
    return model if isinstance(model, Marginal) else None


def arguments_of(mcmc: MCMC) -> tuple[tuple, dict]:
    """
    The arguments of the model in the run.

    :raises TypeError: if the object is no run.
    :raises ValueError: if the run has no draws.
    """
    if not isinstance(mcmc, MCMC):
        raise TypeError(f"`mcmc` must be an `MCMC` object after its run; got {shown(mcmc)}.")
    if mcmc.last_state is None:
        raise ValueError("The `MCMC` object has no draws yet: call `mcmc.run(...)` first.")
    return as_arrays(arguments(mcmc))
