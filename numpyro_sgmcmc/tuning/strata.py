# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Strata from the user, checked and fitted to a model."""

from typing import Any

import numpy as np

from numpyro_sgmcmc.data.converters import MOST, array, one_of
from numpyro_sgmcmc.data.strata import Strata, by_labels
from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.posterior.target import Target

#: Name of the subsampling scheme that can draw rows within strata.
STRATIFIED = "without_replacement"


def checked_subsampling(subsampling: Any) -> Any:
    """
    The argument ``subsampling``, checked: the name of a scheme, or strata by plate.

    Strata of the only plate have the name None.

    :raises ValueError: if there is no such scheme, or strata are not whole numbers.
    """
    if isinstance(subsampling, str):
        # a name of earlier versions, with its own error for one release
        if subsampling == "importance":
            raise ValueError(
                "subsampling='importance' was removed. Leave `subsampling` out: the tuning finds"
                " strata, which do the same."
            )
        return one_of("subsampling", subsampling, ("auto", *SCHEMES))
    if subsampling is None:
        words = ", ".join(map(repr, ("auto", *SCHEMES)))
        raise ValueError(
            f"`subsampling` must be one of {words}, an array with the number of the stratum of each"
            " row, or a dictionary of arrays by plate; got None."
        )
    checked = {}
    for plate, labels in (
        subsampling if isinstance(subsampling, dict) else {None: subsampling}
    ).items():
        where = "`subsampling`" if plate is None else f"`subsampling[{plate!r}]`"
        numbers = array(where.strip("`"), labels)
        if numbers.ndim != 1 or numbers.dtype.kind not in "biu":
            raise ValueError(
                f"{where} must be a vector of whole numbers, the stratum of each row; got"
                f" {numbers.dtype} of shape {numbers.shape}. Number categories with"
                " `numpy.unique(labels, return_inverse=True)[1]`."
            )
        wrong = (numbers < 0) | (numbers > MOST)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(
                f"{where} has the stratum {numbers[row]} at row {row}. Give each row a stratum"
                f" from 0 to {MOST:,}."
            )
        checked[plate] = numbers.astype(np.int32)
    return checked


def are_strata_of(target: Target, strata: dict[str, Strata]) -> bool:
    """True if the strata fit the rows and the minibatch sizes of the plates."""
    sizes = {plate.name: (plate.size, plate.subsample_size) for plate in target.model.plates}
    return all(
        sizes.get(name) == (of_plate.allocation.size, of_plate.allocation.batch_size)
        for name, of_plate in strata.items()
    )


def given_strata(
    strata: Any, target: Target, importance: dict[str, np.ndarray] | None = None
) -> dict[str, Strata]:
    """
    The given strata for a model; none for ``"auto"`` and None.

    :param importance: importance of the rows of each plate, if it is known.
    :raises ValueError: if the strata do not fit the model.
    """
    if strata is None or isinstance(strata, str):
        return {}
    plates = {plate.name: plate for plate in target.model.plates}
    names = ", ".join(f"'{name}'" for name in plates) or "none"
    if None in strata and len(plates) != 1:
        raise ValueError(
            f"`subsampling` is one array, but the plates with a `subsample_size` are {names}. Give"
            " a dictionary of arrays by the name of the plate."
        )
    if target.shards is not None:
        raise ValueError(
            "Strata cannot be used with rows that are spread over devices, because each device"
            " draws from its own rows. Leave `subsampling` out, or sample on one device."
        )
    checked = {}
    for key, labels in strata.items():
        if key is not None and key not in plates:
            raise ValueError(
                f"`subsampling` has an entry for '{key}', but the plates with a `subsample_size`"
                f" are {names}."
            )
        plate = next(iter(plates.values())) if key is None else plates[key]
        if len(labels) != plate.size:
            raise ValueError(
                f"`subsampling` has {len(labels):,} entries for plate '{plate.name}', which has"
                f" {plate.size:,} rows. Give the number of the stratum of each row."
            )
        known = None if importance is None else importance[plate.name]
        where = f"Plate '{plate.name}'"
        checked[plate.name] = by_labels(labels, plate.subsample_size, known, where)
    return checked
