# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Posteriors that nobody here has chosen: those of posteriordb, and of case studies by others."""

from battery import case_studies, posteriordb, text_books
from battery.posterior import POSTERIORS

__all__ = ["POSTERIORS", "case_studies", "posteriordb", "text_books"]
