# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Which generation of ArviZ there is, and the marks of tests that talk to it."""

import arviz as az
import pytest

FIRST_GENERATION = int(az.__version__.split(".")[0]) < 1


def arviz_marks(*messages):
    """For `pytestmark`, with the messages of warnings that the tests provoke."""
    categories = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")
    filters = [f"ignore:.*{message}:UserWarning" for message in messages]
    filters += [f"ignore::{category}" for category in categories]
    return [pytest.mark.arviz, pytest.mark.filterwarnings(*filters)]


def saved(picture, path):
    """The size in bytes of a picture of either generation of ArviZ."""
    import matplotlib.pyplot as plt
    import numpy as np

    figure = picture if hasattr(picture, "savefig") else np.ravel(picture)[0].figure
    figure.savefig(path)
    plt.close("all")
    return path.stat().st_size
