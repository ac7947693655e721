# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What a posterior of the battery is made of."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Posterior(NamedTuple):
    """
    - **title** - its name.
    - **source** - who wrote it.
    - **rows** - how many rows its data have.
    - **model** - of the arrays of the data; the number of rows in a minibatch is ``batch``.
    - **data** - makes the arrays, of a random generator and the folder with the real data.
    - **batch** - rows in a minibatch.
    - **compared** - from the draws of a chain to what is compared; None is all latent sites.
    - **reference** - name of the published moments in posteriordb, or None for NUTS.
    - **original** - the same posterior in coordinates that suit NUTS, where the model's do not.
    """

    title: str
    source: str
    rows: int
    model: Callable
    data: Callable[[np.random.Generator, Any], tuple]
    batch: int = 100
    compared: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    reference: str | None = None
    original: Callable | None = None


POSTERIORS: list[Posterior] = []


def posterior(title: str, source: str, rows: int, data: Callable, **options: Any) -> Callable:
    """Lists a model."""

    def listed(model: Callable) -> Callable:
        POSTERIORS.append(Posterior(title, source, rows, model, data, **options))
        return model

    return listed
