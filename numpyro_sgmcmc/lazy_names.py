# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Public names that are imported at first use, since their modules import pandas and xarray."""

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
from numpyro_sgmcmc.long_runs import LongRun as LongRun
from numpyro_sgmcmc.plots import plot_calibrated as plot_calibrated
from numpyro_sgmcmc.plots import plot_stein as plot_stein
from numpyro_sgmcmc.results.inference_data import to_arviz as to_arviz
from numpyro_sgmcmc.results.local_draws import local_draws as local_draws
from numpyro_sgmcmc.results.loo import loo as loo
from numpyro_sgmcmc.results.predict import predict as predict
