# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Which kind the rows of a plate are."""

from typing import Any

from numpyro_sgmcmc.data.growing import RowCount, RowsSoFar
from numpyro_sgmcmc.data.rows import Rows
from numpyro_sgmcmc.data.strata import Strata, Stratified
from numpyro_sgmcmc.data.subsampling import Scheme


def kind_of(
    size: int,
    batch_size: int,
    scheme: Scheme,
    strata: Strata | None,
    known: RowCount | None,
    dtype: Any,
) -> Rows:
    """
    :param size: the number of rows, or of those that there is room for.
    :param batch_size: the number of rows of a minibatch.
    :param scheme: how they are drawn.
    :param strata: strata of the rows, if there are any.
    :param known: how many rows there are so far, where they keep coming.
    :param dtype: that of weights.
    """
    if strata is not None:
        return Stratified(strata)
    if known is not None:
        return RowsSoFar(size, batch_size, scheme, known, dtype)
    return scheme.rows(size, batch_size)
