# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The folder of a run: the store, the checkpoint in it, and who may write there."""

from collections.abc import Mapping
from pathlib import Path
import shutil
from typing import TYPE_CHECKING, Any, Self

import jax

from numpyro_sgmcmc.long_runs import checkpoint
from numpyro_sgmcmc.long_runs.identity import differences
from numpyro_sgmcmc.long_runs.processes import together

if TYPE_CHECKING:
    from numpyro_sgmcmc.long_runs.store import Store

#: Where in the store the checkpoint is; readers of Zarr do not see it.
FOLDER = ".long_run"


class RunFolder:
    """
    What is on disk of a run; of a run in memory nothing.

    :param path: the folder, or None.
    :param bool resume: whether to go on with what is there.
    """

    def __init__(self, path: Path | None, resume: bool) -> None:
        self.path = path
        #: whether it is this process that writes
        self.writes = path is not None and jax.process_index() == 0
        self._resume = resume
        self._lock: Any = None
        self.store: Store
        #: what the latest checkpoint says
        self.checkpoint: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        failed: BaseException | None = None
        try:
            self._open()
        except BaseException as error:
            failed = error
        try:
            if self.path is not None:
                together(failed)
                self._load()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _open(self) -> None:
        if self.writes:
            assert self.path is not None
            if not self._resume and self.path.exists():
                put_aside(self.path)
            self._begin_to_write()

    def _load(self) -> None:
        # zarr is needed for nothing else
        from numpyro_sgmcmc.long_runs.store import Store

        assert self.path is not None
        self.store = Store(self.path)
        file = self.path / FOLDER / "checkpoint"
        if file.exists():
            self.checkpoint = self._loaded(file)
        elif self.store.draws:
            raise ValueError(
                f"The store {self.path} has {self.store.draws:,} draws, but its checkpoint {file}"
                " is lost: the run cannot go on. `resume=False` begins anew and keeps the store"
                " under another name."
            )

    def __exit__(self, *error: Any) -> None:
        if self._lock is not None:
            self._lock.close()

    @property
    def hidden(self) -> Path | None:
        """The folder of what is not for readers of Zarr."""
        return None if self.path is None else self.path / FOLDER

    def _begin_to_write(self) -> None:
        assert self.path is not None
        folder = self.path / FOLDER
        others = [] if not self.path.exists() else list(self.path.iterdir())
        if others and not folder.exists():
            raise ValueError(
                f"{self.path} is not a store of `LongRun`, and has files in it: choose another path"
                " for `store`, or begin anew with `resume=False`, which renames it."
            )
        folder.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:  # of Windows: there two runs in one store are not noticed
            return
        self._lock = open(folder / "lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ValueError(
                f"Another process is writing into the store {self.path}: wait for it, or give this"
                " run a `store` of its own."
            ) from error

    def _loaded(self, file: Path) -> dict[str, Any]:
        found = checkpoint.load(file)
        leaves = found.pop("leaves")
        return found | {"restored": lambda template: checkpoint.restored(leaves, template)}

    def check(self, about: Mapping[str, Any], num_draws: int) -> None:
        """
        :raises ValueError: if the checkpoint is that of another run, or has more draws than asked
            for, or if the store has fewer.
        """
        assert self.checkpoint is not None
        if found := differences(dict(about), self.checkpoint["about"]):
            raise ValueError(
                f"The store {self.path} holds another run: {'; '.join(found)}. Give this one a"
                " `store` of its own, or begin anew with `resume=False`, which keeps the old store"
                " under another name."
            )
        draws = self.checkpoint["draws"]
        if draws > num_draws:
            raise ValueError(
                f"The store {self.path} has {draws:,} draws of each chain already, more than the"
                f" {num_draws:,} of `num_samples`: a run can be extended, and not shortened."
            )
        if self.store.draws < draws:
            raise ValueError(
                f"The store {self.path} has {self.store.draws:,} draws of each chain, but its"
                f" checkpoint knows of {draws:,}: files of the store are lost. `resume=False`"
                " begins anew and keeps the store under another name."
            )

    def save(self, about: Mapping[str, Any], *, state: Any, **content: Any) -> None:
        """Writes a checkpoint, after the draws that belong to it."""
        assert self.path is not None
        content["tuning"] = jax.device_get(content["tuning"])
        checkpoint.save(
            self.path / FOLDER / "checkpoint",
            {"about": dict(about), "leaves": checkpoint.held(state), **content},
        )


def put_aside(path: Path) -> Path:
    """Renames a store to the first free of ``NAME.1``, ``NAME.2``, ..."""
    k = 1
    while (new := path.with_name(f"{path.name}.{k}")).exists():
        k += 1
    shutil.move(path, new)
    return new
