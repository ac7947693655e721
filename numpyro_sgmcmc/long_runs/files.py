# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Files of a store: never reached through a link, written whole or not at all; and locks of folders.

Whoever made the folder, by an archive or beside this process, no other file is read or written.
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
except ImportError:  # of Windows: there two runs in one store are not noticed
    fcntl = None  # type: ignore[assignment]

#: Without following a link, and without waiting for the other end of a pipe.
_FLAGS = reduce(int.__or__, (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK")))


def plain(path: Path) -> Path:
    """
    The path, of which every folder is a folder, and what is there, if anything, a file.

    :raises OSError: if one of them is a link, or if what is there is no file: a pipe would keep
        whoever opens it waiting.
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
    """The content of a file of a store."""
    with _opened(path, "rb") as file:
        return file.read()


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """The file with this content, in parts; whatever happens, it is the old one or the new one."""
    new = plain(path.with_name(f"{path.name}.new"))
    try:
        with suppress(FileNotFoundError):
            new.unlink()  # of a process that was killed
        with _opened(new, "xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, plain(path))
    except OSError:
        with suppress(OSError):  # a full disk has need of the room
            new.unlink()
        raise


def _opened(path: Path, mode: str) -> IO:
    return open(plain(path), mode, opener=lambda name, flags: os.open(name, flags | _FLAGS, 0o666))


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

    :raises BlockingIOError: if another process holds it, or puts its folder aside just now.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, self._opened(path)
        if not self.is_in_its_place:
            self.release()
            raise BlockingIOError(errno.EWOULDBLOCK, "its folder has been renamed", str(path))

    @staticmethod
    def _opened(path: Path) -> IO:
        file = _opened(path, "ab")  # whatever is in it stays
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
            return os.path.samestat(os.fstat(self._file.fileno()), os.lstat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        self._file.close()
