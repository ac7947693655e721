# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic-gradient MCMC for NumPyro models, with minibatches from their own plates."""

from importlib.metadata import version as _version

from numpyro_sgmcmc.data.groups import group_rows as group_rows
from numpyro_sgmcmc.data.growing import GrowingRows as GrowingRows
from numpyro_sgmcmc.data.rows_on_disk import RowsOnDisk as RowsOnDisk
from numpyro_sgmcmc.data.sharding import spread_rows as spread_rows
from numpyro_sgmcmc.data.sources import UnreadableRows as UnreadableRows
from numpyro_sgmcmc.diagnostics import calibrated as calibrated
from numpyro_sgmcmc.diagnostics import certify as certify
from numpyro_sgmcmc.diagnostics import compare as compare
from numpyro_sgmcmc.diagnostics import configurational_temperature as configurational_temperature
from numpyro_sgmcmc.diagnostics import debiased as debiased
from numpyro_sgmcmc.diagnostics import growth as growth
from numpyro_sgmcmc.diagnostics import kernel_stein_discrepancy as kernel_stein_discrepancy
from numpyro_sgmcmc.diagnostics import kinetic_temperature as kinetic_temperature
from numpyro_sgmcmc.diagnostics import moments as moments
from numpyro_sgmcmc.diagnostics import predictive_checks as predictive_checks
from numpyro_sgmcmc.diagnostics import predictive_scores as predictive_scores
from numpyro_sgmcmc.diagnostics import stein_matrix as stein_matrix
from numpyro_sgmcmc.diagnostics import summary as summary
from numpyro_sgmcmc.gradients.noise_estimate import NoiseEstimate as NoiseEstimate
from numpyro_sgmcmc.kernels import Replicas as Replicas
from numpyro_sgmcmc.kernels import SGMCMCKernel as SGMCMCKernel
from numpyro_sgmcmc.kernels import cyclical as cyclical
from numpyro_sgmcmc.long_runs import LongRun as LongRun
from numpyro_sgmcmc.methods import AMAGOLD as AMAGOLD
from numpyro_sgmcmc.methods import PSGLD as PSGLD
from numpyro_sgmcmc.methods import SGFS as SGFS
from numpyro_sgmcmc.methods import SGHMC as SGHMC
from numpyro_sgmcmc.methods import SGLD as SGLD
from numpyro_sgmcmc.methods import SGMCLMC as SGMCLMC
from numpyro_sgmcmc.methods import SGNHT as SGNHT
from numpyro_sgmcmc.methods import SMSUBU as SMSUBU
from numpyro_sgmcmc.methods import ApproximateScaleAdaptedSGHMC as ApproximateScaleAdaptedSGHMC
from numpyro_sgmcmc.methods import CCAdL as CCAdL
from numpyro_sgmcmc.plots import plot_calibrated as plot_calibrated
from numpyro_sgmcmc.plots import plot_stein as plot_stein
from numpyro_sgmcmc.posterior.fusions import avoid_faulty_fusions as _avoid_faulty_fusions
from numpyro_sgmcmc.posterior.handlers import full_data as full_data
from numpyro_sgmcmc.results.inference_data import to_arviz as to_arviz
from numpyro_sgmcmc.results.local_draws import local_draws as local_draws
from numpyro_sgmcmc.results.loo import loo as loo
from numpyro_sgmcmc.results.predict import predict as predict
from numpyro_sgmcmc.tuning.ensemble import Ensemble as Ensemble
from numpyro_sgmcmc.tuning.tuning import Tuning as Tuning

# before JAX starts, which no import does
_avoid_faulty_fusions()

__version__ = _version("numpyro_sgmcmc")
