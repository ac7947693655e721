# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Inputs as new users type them, by subject; `benchmarks/awkward_inputs.py` runs them."""
