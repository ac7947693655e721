# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Plots that ArviZ lacks, drawn with matplotlib.

:func:`plot_stein` shows whether the draws have the right law. :func:`plot_calibrated` shows
intervals beside calibrated ones.

The functions draw into ``ax`` and return matplotlib axes. They follow the current style, such as
one set by ``arviz.style.use``. Elements of different colours also have different markers or lines.
"""

from numpyro_sgmcmc.plots.calibrated import plot_calibrated as plot_calibrated
from numpyro_sgmcmc.plots.stein import plot_stein as plot_stein
