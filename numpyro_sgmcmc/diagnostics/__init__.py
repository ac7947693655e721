# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Diagnostics of whether to trust a run, beyond effective sample sizes and R-hat."""

from numpyro_sgmcmc.diagnostics.calibrated import Calibrated as Calibrated
from numpyro_sgmcmc.diagnostics.calibrated import calibrated as calibrated
from numpyro_sgmcmc.diagnostics.certificate import Certificate as Certificate
from numpyro_sgmcmc.diagnostics.certificate import certify as certify
from numpyro_sgmcmc.diagnostics.comparison import Moments as Moments
from numpyro_sgmcmc.diagnostics.comparison import compare as compare
from numpyro_sgmcmc.diagnostics.comparison import moments as moments
from numpyro_sgmcmc.diagnostics.debiased import Debiased as Debiased
from numpyro_sgmcmc.diagnostics.debiased import debiased as debiased
from numpyro_sgmcmc.diagnostics.discrepancy import Discrepancy as Discrepancy
from numpyro_sgmcmc.diagnostics.discrepancy import (
    kernel_stein_discrepancy as kernel_stein_discrepancy,
)
from numpyro_sgmcmc.diagnostics.growth import Growth as Growth
from numpyro_sgmcmc.diagnostics.growth import growth as growth
from numpyro_sgmcmc.diagnostics.predictive_checks import predictive_checks as predictive_checks
from numpyro_sgmcmc.diagnostics.predictive_scores import PredictiveScores as PredictiveScores
from numpyro_sgmcmc.diagnostics.predictive_scores import predictive_scores as predictive_scores
from numpyro_sgmcmc.diagnostics.stein_matrix import stein_matrix as stein_matrix
from numpyro_sgmcmc.diagnostics.summary import Summary as Summary
from numpyro_sgmcmc.diagnostics.summary import summary as summary
from numpyro_sgmcmc.diagnostics.temperature import Temperature as Temperature
from numpyro_sgmcmc.diagnostics.temperature import (
    configurational_temperature as configurational_temperature,
)
from numpyro_sgmcmc.diagnostics.temperature import kinetic_temperature as kinetic_temperature
