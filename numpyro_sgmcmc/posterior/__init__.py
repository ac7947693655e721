# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What a sampler sees: a model read and checked, and its minibatch potential."""
