# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Checks of a model for a kernel and its settings."""

from collections.abc import Callable
from typing import NamedTuple
import warnings

from numpyro_sgmcmc.data.row_numbers import MOST_ROWS, needs_64_bits
from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.posterior.local_latents import Marginal
from numpyro_sgmcmc.posterior.model import MinibatchModel


class Asked(NamedTuple):
    """Request of a run: a model, and the properties of its kernel."""

    #: the name of the kernel
    kernel: str
    #: whether the kernel corrects for the noise of independent minibatches
    corrects_noise: bool
    subsampling: str
    model: MinibatchModel
    #: the number of devices that the rows are spread over
    parts: int


def check_run(asked: Asked) -> None:
    """Raise ``ValueError`` if the kernel or its minibatches do not fit the model."""
    for check in CHECKS:
        check(asked)


def _check_correction(asked: Asked) -> None:
    if asked.corrects_noise and not SCHEMES[asked.subsampling].independent:
        raise ValueError(
            f"{asked.kernel} corrects for independent noise of minibatches, and with"
            f" subsampling='{asked.subsampling}' the minibatches of a pass over the data are"
            " anti-correlated. Use subsampling='without_replacement'."
        )


def _check_number_of_rows(asked: Asked) -> None:
    for plate in asked.model.plates:
        size = plate.size // asked.parts
        if needs_64_bits(size) and SCHEMES[asked.subsampling].draw_far is None:
            words = [name for name, scheme in SCHEMES.items() if scheme.draw_far is not None]
            raise ValueError(
                f"Plate '{plate.name}' has {size:,} rows on a device, and"
                f" subsampling='{asked.subsampling}' can number at most {MOST_ROWS:,}. Use one of"
                f" {', '.join(words)}, or more devices."
            )


def _check_minibatches(asked: Asked) -> None:
    if asked.model.plates:
        return
    if not SCHEMES[asked.subsampling].independent:
        raise ValueError(
            f"{asked.kernel} with subsampling='{asked.subsampling}' needs minibatches, but no"
            " plate of the model has a `subsample_size`. Write `numpyro.plate(name, size,"
            " subsample_size=...)` around the data, or use another kernel."
        )
    warnings.warn(
        "No plate of the model has a `subsample_size`, so that every step uses the gradient on all"
        " data. For minibatches write `numpyro.plate(name, size, subsample_size=...)` around the"
        " data.",
        stacklevel=5,
    )


def _check_parameters(asked: Asked) -> None:
    if asked.model.dimension:
        return
    if isinstance(asked.model.model, Marginal):
        names = ", ".join(f"'{plate.name}'" for plate in asked.model.model.plates)
        raise ValueError(
            f"All latent sites of the model are inside of the subsampled plate {names} and are"
            " integrated out, so that no parameter is left to sample. Leave its `subsample_size`"
            " out to sample them."
        )
    raise ValueError(
        "The model has no latent sites, and nothing to sample. Give a parameter a prior,"
        " `numpyro.sample(...)` without `obs`."
    )


#: Checks of a run, in their order.
CHECKS: list[Callable[[Asked], None]] = [
    _check_correction,
    _check_number_of_rows,
    _check_minibatches,
    _check_parameters,
]
