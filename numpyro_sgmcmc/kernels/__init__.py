# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The common part of all kernels: NumPyro's contract, states and steps."""

from numpyro_sgmcmc.kernels.cyclical import cyclical as cyclical
from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel as SGMCMCKernel
from numpyro_sgmcmc.kernels.replicas import Replicas as Replicas
from numpyro_sgmcmc.kernels.state import SGMCMCState as SGMCMCState
