# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Rows: where they come from, on which device they lie, and how a minibatch of them is drawn."""
