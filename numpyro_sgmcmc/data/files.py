# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Safe files of a store: no links, atomic writes, and locks of folders.

Even if someone else made the folder, for instance by an archive, no file outside of it is read or
written.
"""

from contextlib import suppress
import errno
from functools import reduce
import os
from pathlib import Path
import stat
from typing import IO
import warnings

try:
    import fcntl
except ImportError:  # Windows has no such locks, so two runs in one store are not noticed there
    fcntl = None  # type: ignore[assignment]

#: Flags for opening a file without following links or waiting for a pipe.
_FLAGS = reduce(int.__or__, (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK")))


def plain(path: Path) -> Path:
    """
    The path, after a check that its folders are folders and that it is a file or free.

    :raises OSError: if a part of the path is a link, or if the path is not a file. Opening a pipe
        would wait forever.
    """
    if os.path.realpath(path.parent) != str(path.parent):
        raise OSError(errno.ELOOP, "its folder is behind a link, which is not followed", str(path))
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return path
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "it is a link, which is not followed: remove it", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a file: remove it", str(path))
    return path


def read(path: Path) -> bytes:
    """Read the content of a file of a store."""
    with _opened(path, "rb") as file:
        return file.read()


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file from parts; a failure leaves the old file."""
    new = plain(path.with_name(f"{path.name}.new"))
    try:
        with suppress(FileNotFoundError):
            new.unlink()  # left by a process that was killed
        with _opened(new, "xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, plain(path))
    except OSError:
        with suppress(OSError):  # a full disk needs the room
            new.unlink()
        raise


def _opened(path: Path, mode: str) -> IO:
    return open(plain(path), mode, opener=lambda name, flags: os.open(name, flags | _FLAGS, 0o666))


def flush_folder(path: Path) -> None:
    """Flush a folder, so that its file names outlast a failure of the machine."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Lock:
    """
    A lock file that one process at a time holds, until :meth:`release` or its end.

    :raises BlockingIOError: if another process holds the lock, or is renaming its folder.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, self._opened(path)
        if not self.is_in_its_place:
            self.release()
            raise BlockingIOError(errno.EWOULDBLOCK, "its folder has been renamed", str(path))

    @staticmethod
    def _opened(path: Path) -> IO:
        file = _opened(path, "ab")  # append mode keeps the content
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError as error:
            warnings.warn(
                f"The file system cannot lock {path} ({error.strerror}). Make sure that no other"
                " run writes into this store.",
                stacklevel=2,
            )
        return file

    @property
    def is_in_its_place(self) -> bool:
        """True if the lock file still has its name."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.lstat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        self._file.close()
