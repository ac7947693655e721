# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Rows of data: their sources, their placement on devices, and the drawing of minibatches."""
