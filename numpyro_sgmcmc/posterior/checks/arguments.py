# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Arguments of a model: conversion to arrays, their names, and checks of their values."""

from collections.abc import Callable
import inspect
from typing import Any
import warnings

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.converters import in_host_memory, is_sparse

#: Kinds of data types that JAX has: truth values, integers, floating point and complex numbers.
_NUMBERS = "biufc"

#: Rounding error as a part of a standard deviation above which a warning is given, and the number
#: of rows in the estimate.
_MUCH_ROUNDING, _ENOUGH = 0.001, 10_000


def as_arrays(tree: Any) -> Any:
    """Convert NumPy arrays in a tree to JAX arrays, which traced indices can index."""
    return jax.tree.map(lambda x: _converted(x) if _is_numeric(x) else x, tree)


def _is_numeric(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in _NUMBERS


def _converted(x: np.ndarray) -> Array:
    # the values must be concrete even while a program is traced
    with jax.ensure_compile_time_eval():
        return jnp.asarray(x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("=")))


def checked_arrays(model: Callable | None, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """
    Return the arguments of a model with JAX arrays in the place of NumPy arrays.

    :raises ValueError: if this would change values or lose a mask, and for a sparse matrix, whose
        rows no program takes without a pass over all of its entries.
    """
    for name, x in _named(model, args, kwargs, is_leaf=is_sparse):
        if is_sparse(x):
            raise ValueError(
                f"Argument '{name}' of the model is a sparse matrix, a {type(x).__name__} of shape"
                f" {tuple(x.shape)}, and the rows of each minibatch would cost a pass over all"
                " entries. Pass an array, `.todense()`; or pass the column numbers and the values"
                " of each row, padded with zeros, as two arrays of shape (N, k). In the model"
                " write `(values[i] * w[columns[i]]).sum(-1)`."
            )
    for name, x in _named(model, args, kwargs):
        if not _is_numeric(x):
            continue
        if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
            raise ValueError(
                f"Argument '{name}' of the model is a masked array with"
                f" {int(np.ma.count_masked(x)):,} masked entries, and arrays of JAX have no mask."
                " Fill it, `x.filled(0)`, and pass `~np.ma.getmaskarray(x)` as another argument,"
                " for `numpyro.handlers.mask`."
            )
        kept = jax.dtypes.canonicalize_dtype(x.dtype)
        if x.dtype.kind in "iu" and kept.itemsize < x.dtype.itemsize and x.size:
            limits = np.iinfo(kept)
            low, high = int(x.min()), int(x.max())
            if low < limits.min or high > limits.max:
                raise ValueError(
                    f"Argument '{name}' of the model has {x.dtype} entries from {low:,} to"
                    f" {high:,}{_columns(x, limits)}. JAX keeps 32 bits, and would turn entries"
                    f" beyond {limits.max:,} into other numbers. Call `numpyro.enable_x64()`"
                    " before anything else, or store codes from 0 instead, `np.unique(x,"
                    " return_inverse=True)[1]`."
                )
        elif x.dtype == np.float64 and kept == np.float32:
            _warn_of_rounding(name, x)
    return as_arrays((args, kwargs))


def _warn_of_rounding(name: str, x: np.ndarray) -> None:
    """Warn of columns whose differences are lost in single precision, such as timestamps."""
    some = x[:: max(1, len(x) // _ENOUGH)] if x.ndim else x
    with np.errstate(all="ignore"):
        rounding = np.abs(some - some.astype(np.float32)).max(axis=0, initial=0.0)
        spread = some.std(axis=0)
        is_constant = spread < 1e-12 * np.abs(some).max(axis=0, initial=0.0)
        lost = np.atleast_1d((rounding > _MUCH_ROUNDING * spread) & ~is_constant)
    if lost.any():
        where = f" in column {int(np.argmax(lost))}" if x.ndim > 1 else ""
        warnings.warn(
            f"Argument '{name}' of the model loses digits{where} in single precision: rounding"
            f" changes it by more than {_MUCH_ROUNDING} of its standard deviation. Subtract the"
            " mean first, `x - x.mean(0)`, or call `numpyro.enable_x64()` before anything else.",
            stacklevel=2,
        )


def _columns(x: np.ndarray, limits: Any) -> str:
    """Return a text that names the columns of a table with too large values."""
    if x.ndim != 2 or x.shape[1] == 1:
        return ""
    wrong = (x.min(axis=0) < limits.min) | (x.max(axis=0) > limits.max)
    return f" (column {', '.join(map(str, np.flatnonzero(wrong)[:5]))})"


def named_arrays(model: Callable, args: tuple, kwargs: dict) -> list[tuple[str, Array]]:
    """Return the JAX arrays among the arguments of the model, with the user's names."""
    return [(k, x) for k, x in _named(model, args, kwargs) if isinstance(x, jax.Array)]


def _arguments(model: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    try:
        # an object that is no function has no signature, which is a TypeError too
        return dict(inspect.signature(model).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"args[{i}]": x for i, x in enumerate(args)} | dict(kwargs)


def _named(
    model: Callable | None, args: tuple, kwargs: dict, is_leaf: Callable | None = None
) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(_arguments(model, args, kwargs), is_leaf=is_leaf)
    return [(name.key + jax.tree_util.keystr(tuple(path)), x) for (name, *path), x in leaves]


@jax.jit
def _count_nonfinite(x: Array) -> Array:
    return jnp.sum(~jnp.isfinite(x))


@jax.jit
def _first_nonfinite(x: Array) -> list[Array]:
    """Return the index of the first entry that is not finite, of an array over processes too."""
    bad, index = ~jnp.isfinite(x), []
    for _ in range(x.ndim):
        index.append(jnp.argmax(bad.any(axis=tuple(range(1, bad.ndim)))))
        bad = bad[index[-1]]
    return index


def check_data(model: Callable, args: tuple, kwargs: dict) -> None:
    """Raise ``ValueError`` if an array among the arguments has entries that are NaN or infinite."""
    for name, x in named_arrays(model, args, kwargs):
        if isinstance(x, jax.core.Tracer) or not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        if in_host_memory(x) and np.isfinite(np.sum(np.asarray(x), dtype=np.float64)):
            continue  # without a program for each shape
        with jax.ensure_compile_time_eval():
            count = int(_count_nonfinite(x))
        if count:
            with jax.ensure_compile_time_eval():
                first = tuple(int(k) for k in _first_nonfinite(x))
            raise ValueError(
                f"Argument '{name}' of the model, of shape {x.shape}, has {count} entries that are"
                f" NaN or infinite, the first at index {first}. Drop these rows; or put any finite"
                " value there, and mask the site with `numpyro.handlers.mask`."
            )


def what_is_no_array(model: Callable, args: tuple, kwargs: dict) -> str:
    """
    Return a text about arguments that look like data and cannot be indexed by rows.

    It says what they are and how to convert them to arrays. It is empty if there are none.
    """
    texts = [
        f"Argument '{name}' is {kind}: {remedy}."
        for name, value in _arguments(model, args, kwargs).items()
        for kind, remedy in _not_an_array(value)
    ]
    return " ".join(texts)


def shapes_of(model: Callable, args: tuple, kwargs: dict) -> str:
    """Return the shapes of a model's arguments in a few words."""
    texts = []
    for name, value in _arguments(model, args, kwargs).items():
        shape = getattr(value, "shape", None)
        kind = getattr(value, "dtype", type(value).__name__)
        kind = kind if shape is None else f"{kind}{list(shape)}"
        texts.append(f"{name}: {kind}")
    return ", ".join(texts) or "none"


def _not_an_array(value: Any) -> list[tuple[str, str]]:
    """Return the kind and the remedy of values that look like rows and are no arrays."""
    if value is None:
        return [("None", "pass the observations")]
    package = type(value).__module__.partition(".")[0]
    name = f"a {package} {type(value).__name__}"
    if isinstance(value, np.ndarray) and value.dtype.kind not in _NUMBERS:
        return [(f"an array of dtype {value.dtype}", _from_numpy(value.dtype))]
    if isinstance(value, list | tuple) and value and all(np.isscalar(x) for x in value):
        kind = type(value).__name__
        return [(f"a {kind} of {len(value):,} values", "pass an array, `jnp.asarray(...)`")]
    if package in ("pandas", "polars", "xarray", "pyarrow"):
        if str(getattr(value, "dtype", "")) == "category":
            return [(f"{name} of categories", "pass its codes, `.cat.codes.to_numpy()`")]
        return [
            (
                name,
                "pass its columns as arrays, `df['x'].to_numpy()` or `df[['x', 'z']].to_numpy()`,"
                " and codes of text, `np.unique(df['x'], return_inverse=True)[1]`",
            )
        ]
    if package in ("h5py", "zarr"):
        return [(name, "wrap it, `RowsOnDisk(...)`, or load its rows into memory, `[:]`")]
    if package == "torch":
        return [(name, "pass an array, `.numpy()`")]
    if isinstance(value, dict):
        return [pair for x in value.values() for pair in _not_an_array(x)]
    return []


def _from_numpy(dtype: np.dtype) -> str:
    if dtype.kind in "US":
        return "pass codes, `np.unique(x, return_inverse=True)[1]`"
    if dtype.kind in "mM":
        return "pass a number of days or seconds, `(x - x.min()) / np.timedelta64(1, 'D')`"
    if dtype.names:
        return f"pass its fields as arrays, `x['{dtype.names[0]}']`"
    return (
        "pass numbers, `x.astype(float)`, or codes of text, `np.unique(x,"
        " return_inverse=True)[1]`, and no entry that is None"
    )
