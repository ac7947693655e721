# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The values that ``MCMC`` collects of a sample: constrained values and deterministic sites."""

from collections.abc import Callable
import warnings

from numpyro_sgmcmc.data.rows_on_disk import on_disk
from numpyro_sgmcmc.kernels.identity import DATA_CHANGED, data_fingerprint
from numpyro_sgmcmc.kernels.method import Method
from numpyro_sgmcmc.kernels.runtime import Runtime
from numpyro_sgmcmc.posterior.model import MinibatchModel, Values
from numpyro_sgmcmc.posterior.target import Target


def constrained(
    method: Method, runtime: Runtime, args: tuple, kwargs: dict
) -> Callable[[Values], Values]:
    """
    The function from a chain's unconstrained values to the collected values.

    :raises ValueError: if a run goes on with data that do not belong to its anchor.
    """
    whole = runtime.whole(method, args, kwargs)
    _check_data(runtime, whole)
    _warn_of_dropped_sites(whole.model)

    def constrain(target: Target, z: Values) -> Values:
        return target.model.constrain(z, target.args, target.kwargs)

    return runtime.compiled("constrain", constrain, whole)


def _warn_of_dropped_sites(view: MinibatchModel) -> None:
    if view.minibatch_dependent:
        names = ", ".join(f"'{name}'" for name in sorted(view.minibatch_dependent))
        warnings.warn(
            f"Deterministic sites {names} depend on the minibatch and are not collected. Compute"
            " their values on all data by `Predictive(full_data(model), mcmc.get_samples())`.",
            stacklevel=4,
        )


def _check_data(runtime: Runtime, target: Target) -> None:
    tuning = runtime.tuning
    if target.known is not None:
        runtime.data = None  # traced data are new at each call
        return
    has_anchor = tuning is not None and tuning.anchor is not None
    if not has_anchor and on_disk((target.args, target.kwargs)):
        return  # this would read all rows
    if (data := data_fingerprint(target)) is None:
        return
    runtime.data = data
    if tuning is not None and has_anchor and data not in {tuning.data, *runtime.known}:
        raise ValueError(DATA_CHANGED)
