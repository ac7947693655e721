# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

from importlib.metadata import version as installed

project = "numpyro_sgmcmc"
author = "Contributors to the numpyro_sgmcmc project"
copyright = author
version = release = installed("numpyro_sgmcmc")
extensions = ["sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx-mathjax-offline", "myst_nb"]
exclude_patterns = ["_build"]
html_theme = "sphinx_rtd_theme"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
myst_enable_extensions = ["dollarmath"]
nb_execution_mode = "off"  # notebooks are committed with their outputs
