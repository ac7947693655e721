# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic-gradient MCMC for NumPyro models, with minibatches from their own plates."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
import typing as _typing

from numpyro_sgmcmc.data.groups import group_rows as group_rows
from numpyro_sgmcmc.data.growing import GrowingRows as GrowingRows
from numpyro_sgmcmc.data.rows_on_disk import RowsOnDisk as RowsOnDisk
from numpyro_sgmcmc.data.sharding import spread_rows as spread_rows
from numpyro_sgmcmc.data.sources import UnreadableRows as UnreadableRows
from numpyro_sgmcmc.gradients.noise_estimate import NoiseEstimate as NoiseEstimate
from numpyro_sgmcmc.kernels import Replicas as Replicas
from numpyro_sgmcmc.kernels import SGMCMCKernel as SGMCMCKernel
from numpyro_sgmcmc.kernels import cyclical as cyclical
from numpyro_sgmcmc.methods import AMAGOLD as AMAGOLD
from numpyro_sgmcmc.methods import PSGLD as PSGLD
from numpyro_sgmcmc.methods import SGFS as SGFS
from numpyro_sgmcmc.methods import SGHMC as SGHMC
from numpyro_sgmcmc.methods import SGLD as SGLD
from numpyro_sgmcmc.methods import SGMCLMC as SGMCLMC
from numpyro_sgmcmc.methods import SGNHT as SGNHT
from numpyro_sgmcmc.methods import SMSUBU as SMSUBU
from numpyro_sgmcmc.methods import ApproximateScaleAdaptedSGHMC as ApproximateScaleAdaptedSGHMC
from numpyro_sgmcmc.methods import CCAdL as CCAdL
from numpyro_sgmcmc.posterior.fusions import avoid_faulty_fusions as _avoid_faulty_fusions
from numpyro_sgmcmc.posterior.handlers import full_data as full_data
from numpyro_sgmcmc.tuning.ensemble import Ensemble as Ensemble
from numpyro_sgmcmc.tuning.tuning import Tuning as Tuning

# before JAX starts, which no import does
_avoid_faulty_fusions()

__version__ = _version("numpyro_sgmcmc")

if _typing.TYPE_CHECKING:
    from numpyro_sgmcmc.lazy_names import *  # noqa: F403
else:

    def _lazy_names() -> _typing.Any:
        # pandas and xarray take as long to import as NumPyro
        return _import_module("numpyro_sgmcmc.lazy_names")

    def __getattr__(name: str) -> _typing.Any:
        if name == "__all__":
            return [public for public in __dir__() if not public.startswith("_")]
        if name.startswith("_") or name == "lazy_names" or not hasattr(_lazy_names(), name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_lazy_names(), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *vars(_lazy_names())})
