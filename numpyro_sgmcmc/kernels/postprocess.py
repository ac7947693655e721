# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What ``MCMC`` collects of a sample: values on their supports, and deterministic sites."""

from collections.abc import Callable
from typing import TYPE_CHECKING
import warnings

from numpyro_sgmcmc.data.rows_on_disk import on_disk
from numpyro_sgmcmc.kernels.identity import DATA_CHANGED, data_fingerprint
from numpyro_sgmcmc.posterior.model import MinibatchModel, Values
from numpyro_sgmcmc.posterior.target import Target

if TYPE_CHECKING:
    from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel


def constrained(kernel: "SGMCMCKernel", args: tuple, kwargs: dict) -> Callable[[Values], Values]:
    """
    The function of the unconstrained values of one chain that gives what is collected of them.

    :raises ValueError: if a run goes on with other data than those of its anchor.
    """
    context = kernel.context
    whole = context.whole(kernel.given, args, kwargs)
    _check_data(kernel, whole)
    _warn_of_dropped_sites(whole.model)

    def constrain(target: Target, z: Values) -> Values:
        return target.model.constrain(z, target.args, target.kwargs)

    return context.compiled("constrain", constrain, whole)


def _warn_of_dropped_sites(view: MinibatchModel) -> None:
    if view.minibatch_dependent:
        names = ", ".join(f"'{name}'" for name in sorted(view.minibatch_dependent))
        warnings.warn(
            f"Deterministic sites {names} depend on the minibatch and are not collected. For"
            " their values on all data use `Predictive(full_data(model), mcmc.get_samples())`.",
            stacklevel=4,
        )


def _check_data(kernel: "SGMCMCKernel", target: Target) -> None:
    tuning, context = kernel.tuning, kernel.context
    if target.known is not None:
        context.data = None  # other ones each time
        return
    has_anchor = tuning is not None and tuning.anchor is not None
    if not has_anchor and on_disk((target.args, target.kwargs)):
        return  # all of which would be read for it
    if (data := data_fingerprint(target)) is None:
        return
    context.data = data
    if tuning is not None and has_anchor and data not in {tuning.data, *context.known}:
        raise ValueError(DATA_CHANGED)
