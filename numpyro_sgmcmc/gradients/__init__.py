# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Gradients of the minibatch potential, and the covariance of their noise."""
