# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The folder of a run: its store, its checkpoint and its lock."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
import errno
from functools import partial
import os
from pathlib import Path
import shutil
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np

from numpyro_sgmcmc.data.files import Lock
from numpyro_sgmcmc.long_runs import checkpoint
from numpyro_sgmcmc.long_runs.checkpoint import CHECKPOINT
from numpyro_sgmcmc.long_runs.identity import differences

if TYPE_CHECKING:
    from numpyro_sgmcmc.long_runs.store import Store

#: Path of the checkpoint in the store; readers of Zarr do not see it.
FOLDER = ".long_run"


class RunFolder:
    """
    The files of a run on disk; a run in memory has none.

    :param bool resume: whether to go on with an existing run.
    """

    def __init__(self, path: Path | None, resume: bool) -> None:
        # a link stays a link, even if its store is renamed
        self.path = None if path is None else Path(os.path.realpath(path))
        #: whether this process writes
        self.writes = path is not None and jax.process_index() == 0
        self._resume = resume
        self._lock: Lock | None = None
        self.store: Store
        #: content of the latest checkpoint
        self.checkpoint: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        try:
            if self.path is not None:
                # if one process failed alone, the others would wait forever
                together(_failure_of(self._open))
                together(_failure_of(self._load))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _open(self) -> None:
        if self.writes:
            with self.writing():
                if not self._resume:
                    self._put_aside()
                self._begin_to_write()

    def _load(self) -> None:
        # zarr is needed only here
        from numpyro_sgmcmc.long_runs.store import Store

        assert self.path is not None
        self.store = Store(self.path)
        file = self.file
        assert file is not None
        if os.path.lexists(file):
            content = checkpoint.load_run(file)
            with CHECKPOINT.understood(file):
                self.store.go_on(content["metadata"])
            leaves = content.pop("leaves")
            self.checkpoint = content | {"restored": partial(checkpoint.restored, file, leaves)}
        elif self.store.draws or any(self.path.glob("*/draw/c")):  # after a checkpoint
            raise ValueError(
                f"The store {self.path} has {self.store.draws:,} draws, but its checkpoint {file}"
                f" is lost, so that the run cannot continue. {checkpoint.REMEDY}"
            )

    def __exit__(self, *error: Any) -> None:
        if self._lock is not None:
            self._lock.release()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """
        Context in which files of the store are written.

        :raises OSError: if writing fails, with cause and remedy.
        """
        self._check_place()
        try:
            yield
        except OSError as error:
            self._check_place()
            cause = error.strerror or str(error)
            raise OSError(
                error.errno,
                f"The store {self.path} cannot be written: {cause} (at '{error.filename}', with"
                f" {_free_bytes(self.path):,} bytes free on this disk). The draws up to the last"
                " checkpoint are safe. Once this is mended, the same script continues from there.",
            ) from error

    def _check_place(self) -> None:
        """Raise ``FileNotFoundError`` if the folder of the run was replaced."""
        if self._lock is not None and not self._lock.is_in_its_place:
            raise FileNotFoundError(
                errno.ENOENT,
                f"The store {self.path} was removed, renamed or replaced while the run was writing"
                " into it, and nothing more is written. Give it its old name, and the same script"
                " continues from its last checkpoint. If it is lost, the script begins anew.",
            )

    @property
    def file(self) -> Path | None:
        """The path of the checkpoint."""
        return None if self.path is None else self.path / FOLDER / "checkpoint"

    def _put_aside(self) -> None:
        """Rename an existing store, unless another process is using it."""
        assert self.path is not None
        if self._is_store:
            # until the store has its new name, no other run can begin
            held = self._locked()
            try:
                put_aside(self.path)
            finally:
                held.release()

    @property
    def _is_store(self) -> bool:
        """True if the folder has files of a run, even if they are damaged."""
        assert self.path is not None
        hidden = self.path / FOLDER
        is_folder = hidden.is_dir() and not hidden.is_symlink()
        return is_folder and any(os.path.lexists(hidden / x) for x in ("lock", "checkpoint"))

    def _begin_to_write(self) -> None:
        assert self.path is not None
        is_empty = self.path.is_dir() and not any(self.path.iterdir())
        if os.path.lexists(self.path) and not is_empty and not self._is_store:
            raise ValueError(
                f"{self.path} is a file, or a folder of other files, and not a store of `LongRun`."
                " Choose another path for `store`. Nothing there is renamed or overwritten."
            )
        (self.path / FOLDER).mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()

    def _locked(self) -> Lock:
        """Lock the store; raise ``ValueError`` if another process has it."""
        assert self.path is not None
        try:
            return Lock(self.path / FOLDER / "lock")
        except BlockingIOError as error:
            raise ValueError(
                f"Another process is writing into the store {self.path}. Wait for it, or give this"
                " run a `store` of its own."
            ) from error

    def check(self, about: Mapping[str, Any], num_draws: int) -> None:
        """
        Check that the checkpoint and the store belong to this run.

        :raises ValueError: if the checkpoint belongs to another run or has more draws than
            requested, or if the store has fewer draws or is damaged.
        """
        assert self.checkpoint is not None
        if differing := differences(dict(about), self.checkpoint["about"]):
            raise ValueError(
                f"The store {self.path} holds another run: {'; '.join(differing)}. Give this one a"
                " `store` of its own, or begin anew with `resume=False`, which keeps the old store"
                " under another name."
            )
        draws = self.checkpoint["draws"]
        if draws > num_draws:
            raise ValueError(
                f"The store {self.path} already has {draws:,} draws of each chain, more than"
                f" num_samples={num_draws:,}. A run can only be extended: give a larger"
                " `num_samples`."
            )
        if self.store.draws < draws:
            raise ValueError(
                f"The store {self.path} has {self.store.draws:,} draws of each chain, but its"
                f" checkpoint has {draws:,}, so that files of the store are lost. `resume=False`"
                " begins anew and keeps the store under another name."
            )
        self.store.check(self.checkpoint["manifest"], draws)

    def save(self, about: Mapping[str, Any], *, state: Any, **content: Any) -> None:
        """
        Write a checkpoint, after the draws that belong to it.

        :raises ValueError: if a checkpoint cannot hold a value of the kernel.
        """
        assert self.file is not None
        content["tuning"] = jax.device_get(content["tuning"])
        content |= {"about": about, "leaves": checkpoint.held(state)}
        try:
            CHECKPOINT.save(self.file, content)
        except TypeError as error:
            raise ValueError(
                f"The checkpoint in {self.path} cannot be written: {error}. The state, `tuning`"
                " and `identity` of a kernel must be numbers, words and arrays, or lists, tuples"
                " and mappings of such values."
            ) from error


def put_aside(path: Path) -> Path:
    """Rename a store to the first free of ``NAME.1``, ``NAME.2``, ..."""
    k = 1
    while os.path.lexists(new := path.with_name(f"{path.name}.{k}")):
        k += 1
    path.rename(new)
    return new


def together(error: BaseException | None = None) -> None:
    """
    Wait for all processes of ``jax.distributed``.

    :param error: the error of this process.
    :raises RuntimeError: if another process has failed, with its number.
    """
    if jax.process_count() > 1:
        failed = np.flatnonzero(of_all_processes([error is not None])[:, 0])
        if error is None and failed.size:
            raise RuntimeError(
                f"Process {failed[0]} has failed, so that this one cannot continue. Its own error"
                " has the cause."
            )
    if error is not None:
        raise error


def of_all_processes(numbers: list) -> np.ndarray:
    """Gather whole numbers from all processes, one row each."""
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(np.array(numbers, np.int32))).reshape(-1, len(numbers))


def _failure_of(action: Callable[[], None]) -> BaseException | None:
    try:
        action()
    except BaseException as error:
        return error
    return None


def _free_bytes(path: Path | None) -> int:
    """The free bytes on the disk of a path, or of its nearest existing folder."""
    assert path is not None
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(there).free
