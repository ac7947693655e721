# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The posterior for samplers: a model read and checked, and its minibatch potential."""
