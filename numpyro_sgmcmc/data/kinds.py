# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Choice of the class for the rows of a plate."""

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
    Return the rows of a plate as an object of their class.

    :param size: number of rows, or capacity where rows keep coming.
    :param batch_size: number of rows of a minibatch.
    :param scheme: scheme that draws the rows.
    :param strata: strata of the rows, or None.
    :param known: number of rows so far where rows keep coming, or None.
    :param dtype: data type of the weights.
    """
    if strata is not None:
        return Stratified(strata)
    if known is not None:
        return RowsSoFar(size, batch_size, scheme, known, dtype)
    return scheme.rows(size, batch_size)
