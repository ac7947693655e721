# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Pictures that ArviZ lacks, drawn with matplotlib: whether the draws have the right law
(:func:`plot_stein`), whether the chains have settled (:func:`plot_temperature`), how the error
shrinks with the step size (:func:`plot_bias`), and which directions of the gradient are noisy
(:func:`plot_noise_spectrum`).

They return matplotlib axes, for further work, take ``ax`` or ``axes`` to draw into, and follow
the style in force, such as that of ``arviz.style.use``. What differs in colour differs in its
marker or its line, too.
"""

from numpyro_sgmcmc.plots.bias import plot_bias as plot_bias
from numpyro_sgmcmc.plots.calibrated import plot_calibrated as plot_calibrated
from numpyro_sgmcmc.plots.noise_spectrum import plot_noise_spectrum as plot_noise_spectrum
from numpyro_sgmcmc.plots.stein import plot_stein as plot_stein
from numpyro_sgmcmc.plots.temperature import plot_temperature as plot_temperature
