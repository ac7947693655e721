# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Runs that last for days; see :class:`LongRun`."""

from numpyro_sgmcmc.long_runs.driver import LongRun as LongRun
