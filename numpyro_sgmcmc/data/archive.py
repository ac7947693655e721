# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Archives of arrays and words, written atomically and checked when read.

An archive is an ``.npz`` file of NumPy, not compressed and read with ``allow_pickle=False``. It has
arrays, each with a CRC-32, and a member ``words`` of JSON for everything else
(:mod:`numpyro_sgmcmc.data.records`). Reading it runs no code.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numpyro_sgmcmc.data.files import flush_folder, read, write_atomically
from numpyro_sgmcmc.data.records import as_words, from_words

#: First bytes of an archive.
_MAGIC = b"PK"


class Archive(NamedTuple):
    """
    A kind of archive.

    - **name** - its name in errors, such as "checkpoint".
    - **version** - the version of the format.
    - **kinds** - the ``NamedTuple`` classes that it may have, by name.
    - **remedy** - the last sentence of errors.
    """

    name: str
    version: int
    kinds: Mapping[str, type]
    remedy: str

    def save(self, path: Path, content: Mapping[str, Any]) -> None:
        """
        Write an archive in the place of the previous one.

        :raises TypeError: if the content has anything that is not data.
        """
        arrays: list[np.ndarray] = []
        words = {"version": self.version, "content": as_words(content, arrays, self.kinds)}
        words["types"] = [str(x.dtype) for x in arrays]
        text, file = np.frombuffer(json.dumps(words).encode(), np.uint8), io.BytesIO()
        np.savez(file, *map(_of_numpy, arrays), words=text)
        write_atomically(path, file.getbuffer())
        flush_folder(path.parent)

    def load(self, path: Path) -> dict[str, Any]:
        """
        Read the content of an archive.

        :raises ValueError: if the file is incomplete, or of another kind or version.
        """
        try:
            content = read(path)
        except (OSError, MemoryError) as error:
            raise ValueError(
                f"The {self.name} {path} cannot be read: {error}. {self.remedy}"
            ) from error
        if not content.startswith(_MAGIC):
            raise ValueError(
                f"{path} is not a {self.name}, or its beginning is lost. {self.remedy}"
            )
        try:
            words, arrays = _members_of(content)
        except Exception as error:  # archives with other content raise many kinds of errors
            raise ValueError(
                f"The {self.name} {path} is truncated or corrupted"
                f" ({type(error).__name__}: {error}). {self.remedy}"
            ) from error
        with self.understood(path):
            if (version := words["version"]) != self.version:
                raise self._of_version(path, version)
            try:
                arrays = [x.view(of) for x, of in zip(arrays, words["types"], strict=True)]
                record = from_words(words["content"], arrays, self.kinds)
            except ValueError as error:
                raise TypeError(error) from error
            if not isinstance(record, dict):
                raise TypeError("it has no named fields")
        return record

    def _of_version(self, path: Path, version: Any) -> ValueError:
        """The error for a file of another version."""
        return ValueError(
            f"The {self.name} {path} has version {version} of the format; this is version"
            f" {self.version}. Go on with the version of numpyro_sgmcmc that wrote it."
            f" {self.remedy}"
        )

    @contextmanager
    def understood(self, path: Path | None) -> Iterator[None]:
        """
        Context that turns any error from invalid content into a ``ValueError``.

        The checksums are right here, but the content need not be.

        :raises ValueError: in the place of errors from other content.
        """
        try:
            yield
        except (TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise ValueError(
                f"The {self.name} {path} was written by something else:"
                f" {error if isinstance(error, TypeError) else repr(error)}. {self.remedy}"
            ) from error


def _members_of(content: bytes) -> tuple[Any, list[np.ndarray]]:
    """
    The words and the arrays of an archive.

    :raises Exception: of many kinds, if the archive is incomplete.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        # with another shape in its header an array would be read in part, without its checksum
        if (name := file.zip.testzip()) is not None:
            raise ValueError(f"the checksum of its member {name} differs")
        arrays = [file[f"arr_{k}"] for k in range(len(file.files) - 1)]
        return json.loads(file["words"].tobytes()), arrays


def _of_numpy(array: np.ndarray) -> np.ndarray:
    """The array, or its bytes if its type, such as bfloat16, is not one of NumPy."""
    array = np.asarray(array, order="C")
    return array if array.dtype.isbuiltin == 1 else array.view(f"V{array.itemsize}")
