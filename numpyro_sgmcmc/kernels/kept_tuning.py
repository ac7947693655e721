# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Folders of tunings, which are found again by their model and data."""

from dataclasses import fields
import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
import warnings

import jax

from numpyro_sgmcmc.data.fingerprint import fingerprint_of_code
from numpyro_sgmcmc.kernels.identity import data_fingerprint
from numpyro_sgmcmc.kernels.method import Method
from numpyro_sgmcmc.kernels.run_info import facts_of_model
from numpyro_sgmcmc.kernels.runtime import Runtime
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.tuning.speed import MOST_STEPS_PER_SAMPLE
from numpyro_sgmcmc.tuning.tuning import Tuning

#: Number of hexadecimal digits of a fingerprint in a file name.
_DIGITS = 32


class Kept(NamedTuple):
    """
    The findings in a folder of tunings.

    A file belongs to one kernel with its arguments, to one program of the model with its numbers
    and the shapes of its data, to the versions of the packages, and to the values of the data.

    - **tuning** - the tuning of this model and these data, or None.
    - **near** - the latest tuning of this model and other data, or None.
    - **folder** - the folder, or None.
    - **model** - first word of the names of the files of this model.
    """

    tuning: Tuning | None = None
    near: Tuning | None = None
    folder: Path | None = None
    model: str = ""

    def file_of(self, data: str) -> Path:
        """The path of the tuning of some data, from their fingerprint."""
        assert self.folder is not None
        return self.folder / f"{self.model}-{_digest(data)}.npz"

    def loaded(self, path: Path, target: Target) -> Tuning | None:
        """The tuning in a file of this model, or None with a warning."""
        try:
            tuning = Tuning.load(path)
            if tuning.model != self.model or path != self.file_of(tuning.data or ""):
                raise ValueError(f"{path} is the tuning of another model or of other data.")
            if tuning.start is None or tuning.start.center.shape != (target.model.dimension,):
                raise ValueError(f"{path} is the tuning of another number of parameters.")
        except ValueError as error:
            warnings.warn(
                f"The kernel tunes itself, since a kept tuning cannot be used. {error}",
                stacklevel=4,
            )
            return None
        return tuning

    def keep(self, tuning: Tuning) -> None:
        """Write a new tuning, unless its samples take more steps than are allowed."""
        if self.folder is None or tuning.steps_per_sample >= MOST_STEPS_PER_SAMPLE:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tuning._replace(model=self.model).save(self.file_of(tuning.data or ""))
        except (OSError, TypeError) as error:  # a metric of another package is no data
            warnings.warn(
                f"The tuning was not written to {self.folder}: {error}. The run goes on, and the"
                " next one tunes itself again.",
                stacklevel=2,
            )


def kept_for(method: Method, runtime: Runtime, target: Target) -> Kept:
    """
    Look for a tuning in the folder of a method, if it has one.

    :param target: the model with its data, whose rows need not have been checked.
    """
    folder = method.tuning
    # files of one process need not be those of another
    if not isinstance(folder, Path) or jax.process_count() > 1:
        return Kept()
    facts = facts_of_model(method, runtime, target, 1)
    del facts["kernel's tuning"]
    settings = {x.name: getattr(method, x.name) for x in fields(method) if x.name != "model"}
    functions = {name: x for name, x in settings.items() if callable(x)}
    # a resumed run knows functions by their names, but a search depends on what they do
    facts |= {
        "functions": fingerprint_of_code([type(method), functions]),
        "plates": str([(p.name, p.size, p.subsample_size) for p in target.model.plates]),
        "growing": runtime.grows,
        "jax_enable_x64": bool(jax.config.read("jax_enable_x64")),
        "numpyro_sgmcmc": version("numpyro_sgmcmc"),
    }
    kept = Kept(folder=folder, model=_digest(repr(sorted(facts.items()))))
    files = sorted(folder.glob(f"{kept.model}-*.npz"), key=_written)
    if not files or (data := data_fingerprint(target)) is None:
        return kept
    if (own := kept.file_of(data)) in files:
        tuning = kept.loaded(own, target)
        if tuning is not None:
            return kept._replace(tuning=tuning)
    others = (kept.loaded(file, target) for file in reversed(files) if file != own)
    return kept._replace(near=next(filter(None, others), None))


def _written(path: Path) -> float:
    """The time of the last change of a file, or zero if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode()).hexdigest()[:_DIGITS]
