# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Arrays that are filled part by part, in memory or in a Zarr store.

The store has version 3 of the format. It gets its name only when it is complete.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import os
from pathlib import Path
import secrets
import shutil
from typing import Any
import warnings

import numpy as np

#: Function that makes an array from its name, shape, data type, dimensions and the shape of the
#: parts that are written at once.
Create = Callable[[str, tuple[int, ...], Any, list[str], tuple[int, ...]], Any]


@contextmanager
def in_memory() -> Iterator[Create]:
    """Make arrays of NumPy in memory."""
    yield lambda name, shape, dtype, dims, part: np.empty(shape, dtype)


@contextmanager
def on_disk(folder: Path) -> Iterator[Create]:
    """
    Make arrays of a store in a folder that gets its name when all of them are written.

    An interrupted program leaves nothing that looks like a complete store.

    :param folder: the store, which must not exist yet.
    :raises ImportError: if zarr is not installed.
    :raises ValueError: if the path of the store is in use.
    """
    try:
        import zarr
        from zarr.codecs import Crc32cCodec
    except ImportError as error:
        raise ImportError(
            "`local_draws(store=...)` writes with zarr 3.1.6 or later: pip install"
            " 'numpyro_sgmcmc[zarr]'."
        ) from error
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.unfinished-{secrets.token_hex(4)}")
    unfinished.mkdir()
    try:
        root = zarr.create_group(unfinished)

        def create(
            name: str, shape: tuple[int, ...], dtype: Any, dims: list[str], part: tuple[int, ...]
        ) -> Any:
            chunks = tuple(max(1, n) for n in part)
            return root.create_array(
                name,
                shape=shape,
                dtype=dtype,
                chunks=chunks,
                dimension_names=dims,
                # draws are noise, which cannot be compressed, and all readers compare checksums
                compressors=[Crc32cCodec()],
            )

        yield create
        with warnings.catch_warnings():
            # consolidated metadata are not in the specification yet, but all known readers have
            # them
            warnings.filterwarnings("ignore", "Consolidated metadata is currently not part")
            zarr.consolidate_metadata(root.store)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    check_free(folder)  # another process may have written it in the meantime
    if folder.exists():
        folder.rmdir()
    unfinished.rename(folder)


def check_free(folder: Path) -> None:
    """Raise ``ValueError`` unless the path is an empty folder or does not exist."""
    is_folder = folder.is_dir() and not folder.is_symlink()
    if os.path.lexists(folder) and not (is_folder and not any(folder.iterdir())):
        what = "is a link" if folder.is_symlink() else "is a file"
        what = "has files in it" if is_folder else what
        raise ValueError(
            f"The store {folder} {what}, and is not overwritten. Choose another path for `store`,"
            " or remove it. `xarray.open_zarr(path, chunks=None)` opens existing draws."
        )
