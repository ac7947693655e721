# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic-gradient MCMC for NumPyro models, with minibatches from their own plates."""

from importlib.metadata import version as _version

from numpyro_sgmcmc.inference_data import to_arviz as to_arviz
from numpyro_sgmcmc.kernels import PSGLD as PSGLD
from numpyro_sgmcmc.kernels import SGFS as SGFS
from numpyro_sgmcmc.kernels import SGHMC as SGHMC
from numpyro_sgmcmc.kernels import SGLD as SGLD
from numpyro_sgmcmc.kernels import SGNHT as SGNHT
from numpyro_sgmcmc.kernels import SMSUBU as SMSUBU
from numpyro_sgmcmc.kernels import ApproximateScaleAdaptedSGHMC as ApproximateScaleAdaptedSGHMC
from numpyro_sgmcmc.kernels import CCAdL as CCAdL
from numpyro_sgmcmc.kernels import SGMCMCKernel as SGMCMCKernel
from numpyro_sgmcmc.minibatch import full_data as full_data

__version__ = _version("numpyro_sgmcmc")
