# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The selection of draws that count: for cyclical step sizes the draws at the ends of cycles."""

import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc.posterior.numpyro_private import with_draws

#: Relative difference of step sizes by rounding.
_SAME = 1e-5


def kept_draws(mcmc: MCMC) -> MCMC:
    """
    The run with only the draws that count.

    :raises ValueError: if there are none.
    """
    smallest = getattr(mcmc.sampler, "run_info", {}).get("cycle_step_size")
    if smallest is None or mcmc.last_state is None:
        return mcmc
    sizes = mcmc.get_extra_fields(group_by_chain=True).get("step_size")
    if sizes is None:
        return mcmc
    used = np.asarray(sizes)[0] <= smallest * (1 + _SAME)  # equal in all chains
    if used.all():
        return mcmc
    if not used.any():
        steps = mcmc.sampler.run_info["cycle_steps"]
        raise ValueError(
            f"None of {used.size:,} draws is from the end of a cycle of {steps:,} steps. Draw more"
            " samples; or leave `steps_per_sample` and `thinning` out, for one sample at the end"
            " of each cycle."
        )
    return with_draws(mcmc, np.flatnonzero(used))
