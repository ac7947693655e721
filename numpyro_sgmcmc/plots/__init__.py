# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Pictures that ArviZ lacks, drawn with matplotlib: whether the draws have the right law
(:func:`plot_stein`), and intervals beside calibrated ones (:func:`plot_calibrated`).

They return matplotlib axes, for further work, take ``ax`` to draw into, and follow the style in
force, such as that of ``arviz.style.use``. What differs in colour differs in its marker or its
line, too.
"""

from numpyro_sgmcmc.plots.calibrated import plot_calibrated as plot_calibrated
from numpyro_sgmcmc.plots.stein import plot_stein as plot_stein
