# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Files that are written whole or not at all, and locks of folders."""

from contextlib import suppress
import errno
import os
from pathlib import Path
from typing import IO
import warnings

try:
    import fcntl
except ImportError:  # of Windows: there two runs in one store are not noticed
    fcntl = None  # type: ignore[assignment]


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """The file with this content, in parts; whatever happens, it is the old one or the new one."""
    new = path.with_name(f"{path.name}.new")
    try:
        with open(new, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        with suppress(OSError):  # a full disk has need of the room
            new.unlink()
        raise


def flush_folder(path: Path) -> None:
    """Makes sure that the names in a folder outlast a failure of the machine."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Lock:
    """
    A file that one process at a time holds, until :meth:`release` or its end.

    :param path: the file.
    :raises BlockingIOError: if another process holds it, or puts its folder aside just now.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, self._opened(path)
        if not self.is_in_its_place:
            self.release()
            raise BlockingIOError(errno.EWOULDBLOCK, "its folder has been renamed", str(path))

    @staticmethod
    def _opened(path: Path) -> IO:
        file = open(path, "w")
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError as error:
            warnings.warn(
                f"The file system cannot lock {path} ({error.strerror}): see to it that no other"
                " run writes into this store.",
                stacklevel=2,
            )
        return file

    @property
    def is_in_its_place(self) -> bool:
        """Whether the file that is held still has its name."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        self._file.close()
