# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What a kernel finds out of a model and its data: made in ``init``, remade in another process."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
import warnings

from numpyro_sgmcmc.data.sharding import Shards, found_shards
from numpyro_sgmcmc.data.subsampling import SCHEMES
from numpyro_sgmcmc.kernels.settings import Settings
from numpyro_sgmcmc.target.model import MinibatchModel, read_model
from numpyro_sgmcmc.target.sharding_checks import check_spread
from numpyro_sgmcmc.target.target import Target
from numpyro_sgmcmc.tuning.tuning import Tuning

if TYPE_CHECKING:
    from numpyro_sgmcmc.kernels.kernel import SGMCMCKernel


class Context:
    """
    Static facts of the model and the data, the same for every chain.

    - **kernel** - the name of the kernel, for errors.
    - **model** - the model as read, or None before.
    - **shards** - how the data lie on devices, if they are spread.
    - **programs** - compiled programs for any data with these facts.
    - **tuning** - the latest tuning.
    """

    def __init__(self, kernel: str, tuning: Tuning | None = None) -> None:
        self.kernel = kernel
        self.model: MinibatchModel | None = None
        self.shards: Shards | None = None
        self.programs: dict[Any, Callable] = {}
        self.tuning = tuning

    def read(self, kernel: "SGMCMCKernel", args: tuple, kwargs: dict) -> MinibatchModel:
        """
        Reads the model, and keeps what it has read.

        :raises ValueError: if the method cannot serve the model, or minibatches cannot.
        """
        given, name = kernel.given, self.kernel
        self.shards = found_shards(given.mesh, args, kwargs)
        model = read_model(given.model, given.init_strategy, args, kwargs)
        if model != self.model:
            self.model, self.programs = model, {}
        independent = SCHEMES[given.subsampling].independent
        if kernel.traits.corrects_noise and not independent:
            raise ValueError(
                f"{name} with subsampling='{given.subsampling}' would correct for noise that is not"
                " there: minibatches of one pass over the data are anti-correlated. Use"
                " subsampling='without_replacement'."
            )
        if not model.plates and (kernel.traits.corrects_noise or not independent):
            raise ValueError(
                f"{name} with subsampling='{given.subsampling}' needs minibatches, but no plate of"
                " the model has a `subsample_size`: write `numpyro.plate(name, size,"
                " subsample_size=...)` around the data, or use another kernel."
            )
        if not model.plates:
            warnings.warn(
                "No plate of the model has a `subsample_size`: every step uses the gradient on all"
                " data.",
                stacklevel=3,
            )
        if model.dimension == 0:
            raise ValueError("The model has no latent sites: there is nothing to sample.")
        if self.shards is not None:
            check_spread(self.whole(given, args, kwargs), self.shards)
        return model

    def whole(self, given: Settings, args: tuple, kwargs: dict) -> Target:
        """
        The model with all data, of which no more than a few rows should be looked at.

        :raises RuntimeError: if no model has been read.
        """
        if self.model is None:
            raise RuntimeError(f"Call `{self.kernel}.init` first.")
        return Target(self.model, args, kwargs, SCHEMES[given.subsampling])

    def target(self, given: Settings, args: tuple = (), kwargs: dict | None = None) -> Target:
        """The model with these data, on each of the devices that they are spread over."""
        whole = self.whole(given, args, kwargs or {})
        if self.shards is None:
            return whole
        return whole._replace(view=whole.view.on_each(self.shards.parts), shards=self.shards)

    def compiled(self, name: str, function: Callable, target: Target, *facts: Any) -> Callable:
        """
        ``function(target, *arguments)`` under ``jit``, compiled once for all data of one shape.

        :param facts: what else the function depends on, besides the model and its arguments.
        """
        program, data, rest = target.program(function)
        with suppress(TypeError):  # an argument of the model that cannot be told from others
            program = self.programs.setdefault((name, rest, facts), program)
        return partial(program, data)
