# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The sampling methods, one in each file."""

from numpyro_sgmcmc.kernels.amagold import AMAGOLD as AMAGOLD
from numpyro_sgmcmc.kernels.ccadl import CCAdL as CCAdL
from numpyro_sgmcmc.kernels.cyclical import cyclical as cyclical
from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel as SGMCMCKernel
from numpyro_sgmcmc.kernels.psgld import PSGLD as PSGLD
from numpyro_sgmcmc.kernels.replicas import Replicas as Replicas
from numpyro_sgmcmc.kernels.scale_adapted import (
    ApproximateScaleAdaptedSGHMC as ApproximateScaleAdaptedSGHMC,
)
from numpyro_sgmcmc.kernels.sgfs import SGFS as SGFS
from numpyro_sgmcmc.kernels.sghmc import SGHMC as SGHMC
from numpyro_sgmcmc.kernels.sgld import SGLD as SGLD
from numpyro_sgmcmc.kernels.sgmclmc import SGMCLMC as SGMCLMC
from numpyro_sgmcmc.kernels.sgnht import SGNHT as SGNHT
from numpyro_sgmcmc.kernels.smsubu import SMSUBU as SMSUBU
from numpyro_sgmcmc.kernels.state import SGMCMCState as SGMCMCState
