# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The sampling methods, one in each file."""

from numpyro_sgmcmc.methods.amagold import AMAGOLD as AMAGOLD
from numpyro_sgmcmc.methods.ccadl import CCAdL as CCAdL
from numpyro_sgmcmc.methods.psgld import PSGLD as PSGLD
from numpyro_sgmcmc.methods.scale_adapted import (
    ApproximateScaleAdaptedSGHMC as ApproximateScaleAdaptedSGHMC,
)
from numpyro_sgmcmc.methods.sgfs import SGFS as SGFS
from numpyro_sgmcmc.methods.sghmc import SGHMC as SGHMC
from numpyro_sgmcmc.methods.sgld import SGLD as SGLD
from numpyro_sgmcmc.methods.sgmclmc import SGMCLMC as SGMCLMC
from numpyro_sgmcmc.methods.sgnht import SGNHT as SGNHT
from numpyro_sgmcmc.methods.smsubu import SMSUBU as SMSUBU
