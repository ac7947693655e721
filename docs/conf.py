# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

from importlib.metadata import version as installed
from pathlib import Path
import zlib

project = "numpyro_sgmcmc"
author = "Contributors to the numpyro_sgmcmc project"
copyright = author
version = release = installed("numpyro_sgmcmc")
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx-mathjax-offline",
    "myst_nb",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "numpyro_sgmcmc"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
# what a block of no language has is not Python
highlight_language = "text"
nb_execution_mode = "off"  # notebooks are committed with their outputs

#: Where names of other projects are documented, for machines that cannot ask these projects.
_OTHERS = {
    "numpyro": (
        "https://num.pyro.ai/en/stable/",
        {
            "numpyro.infer.mcmc.MCMC": "mcmc.html",
            "numpyro.infer.mcmc.MCMCKernel": "mcmc.html",
            "numpyro.infer.hmc.HMC": "mcmc.html",
            "numpyro.infer.hmc.NUTS": "mcmc.html",
            "numpyro.infer.hmc_gibbs.HMCECS": "mcmc.html",
            "numpyro.infer.util.Predictive": "utilities.html",
            "numpyro.primitives.plate": "primitives.html",
        },
    ),
    "jax": ("https://docs.jax.dev/en/latest/", {"jax.Array": "_autosummary/jax.Array.html"}),
    "arviz": (
        "https://python.arviz.org/en/stable/",
        {"arviz.summary": "api/stats/generated/arviz.summary.html"},
    ),
}


def inventory(name: str, pages: dict[str, str]) -> str:
    """An inventory of Sphinx with these names."""
    lines = [f"{entry} py:class 1 {page}#$ -\n" for entry, page in pages.items()]
    head = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n# The rest is zlib.\n"
    path = Path(__file__).parent / "_build" / f"{name}.inv"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(head.encode() + zlib.compress("".join(lines).encode()))
    return str(path)


intersphinx_mapping = {
    name: (url, (None, inventory(name, pages))) for name, (url, pages) in _OTHERS.items()
}
intersphinx_timeout = 5
