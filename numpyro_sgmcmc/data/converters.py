# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Converters of arguments: numbers of any package, words, names and random keys."""

from collections.abc import Iterable
import math
from numbers import Integral, Real
import os
from pathlib import Path
from typing import Any

import jax
from jax import Array, random
from jax.experimental.sparse import JAXSparse
import jax.numpy as jnp
import numpy as np
from numpyro.util import is_prng_key

#: The largest number of steps or rows in JAX without 64 bits, and the largest of any program.
MOST, MOST_OF_64_BITS = 2**31 - 1, 2**63 - 1

#: Characters of a value that a message shows at most.
_SHOWN = 200


def shown(value: Any) -> str:
    """Return a short text of a value for a message, even if its ``repr`` raises."""
    try:
        text = repr(value)
    except Exception:  # Python refuses the text of integers with many digits too
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _scalar(value: Any) -> Any:
    """Return a number of any package as a Python number, or None for truth values and the rest."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        is_number = jnp.issubdtype(value.dtype, jnp.number) and value.dtype.kind not in "mM"
        hidden = isinstance(value, np.ma.MaskedArray | jax.core.Tracer)
        value = value.item() if is_number and not hidden and value.ndim == 0 else None
    return value if isinstance(value, Real) and not isinstance(value, bool) else None


def _real(value: Any) -> float:
    """Return a number in double precision, or NaN if it is no number or too large."""
    scalar = _scalar(value)
    try:
        return math.nan if scalar is None else float(scalar)
    except OverflowError:
        return math.nan


def positive(name: str, value: Any, *, zero: bool = False, infinite: bool = False) -> float:
    """
    Return a positive number as a float.

    :param zero: whether zero is allowed.
    :param infinite: whether infinity is allowed.
    :raises ValueError: if ``value`` is not a positive finite number, in the precision in use.
    """
    number, limits = _real(value), jnp.finfo(jnp.result_type(float))
    is_special = (zero and number == 0) or (infinite and number == math.inf)
    if not (float(limits.tiny) <= number <= float(limits.max) or is_special):
        kind = f"positive {'' if infinite else 'finite '}number{' or zero' if zero else ''}"
        beyond = f", beyond the range of {limits.dtype}" if 0 < number < math.inf else ""
        raise ValueError(f"`{name}` must be a {kind}; got {shown(value)}{beyond}.")
    return number


def share(name: str, value: Any) -> float:
    """Raise ``ValueError`` if ``value`` is not between 0 and 1."""
    if not 0 < (number := _real(value)) < 1:
        raise ValueError(f"`{name}` must be a number between 0 and 1; got {shown(value)}.")
    return number


def whole(name: str, value: Any, least: int = 1, most: int = MOST) -> int:
    """Raise ``ValueError`` if ``value`` is not an integer from ``least`` to ``most``."""
    scalar = _scalar(value)
    number = int(scalar) if isinstance(scalar, Integral) else None
    if number is None or number < least:
        kind = "a positive integer" if least == 1 else f"an integer of {least:,} or more"
        raise ValueError(f"`{name}` must be {kind}; got {shown(value)}.")
    if number > most:
        raise ValueError(f"`{name}` must be at most {most:,}; got {shown(value)}.")
    return number


def truth(name: str, value: Any) -> bool:
    """Raise ``ValueError`` if ``value`` is not a truth value."""
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array)
    is_scalar = is_array and value.ndim == 0 and value.dtype == np.bool_
    if not isinstance(value, bool) and (not is_scalar or isinstance(value, jax.core.Tracer)):
        raise ValueError(f"`{name}` must be True or False; got {shown(value)}.")
    return bool(value)


def one_of(name: str, value: Any, options: Iterable[str]) -> str:
    """Raise ``ValueError`` if ``value`` is not among ``options``, which the message lists."""
    if not isinstance(value, str) or value not in options:
        words = ", ".join(map(repr, options))
        raise ValueError(f"`{name}` must be one of {words}; got {shown(value)}.")
    return value


def names(name: str, value: Any) -> list[str]:
    """Raise ``ValueError`` if ``value`` is neither a name nor a sequence of names."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(x, str) for x in listed):
        raise ValueError(f"`{name}` must be a name or a list of names; got {shown(value)}.")
    if not listed:
        raise ValueError(
            f"`{name}` is empty. Give at least one name, or leave `{name}` out for all."
        )
    return list(listed)


def random_key(value: Any) -> Array:
    """Return the random key of an argument ``rng_key`` that may be left out."""
    return random.key(0) if value is None else given_key(value)


def in_host_memory(x: Array) -> bool:
    """Return whether NumPy can read an array without a copy."""
    return x.is_fully_addressable and all(device.platform == "cpu" for device in x.devices())


def given_key(value: Any, chains: int | None = 1) -> Array:
    """
    Return a random key or a batch of keys, one for each chain.

    :param chains: number of keys that is allowed besides a single key; None is any number.
    :raises ValueError: if ``value`` is not a random key, of either kind.
    """
    count = 0 if is_prng_key(value) else len(getattr(value, "shape", ()) and value)
    is_of_chains = count > 0 and chains in (None, count) and is_prng_key(value[0])
    if not is_prng_key(value) and not is_of_chains:
        several = f", or one for each of {chains} chains" if chains and chains > 1 else ""
        raise ValueError(
            f"`rng_key` must be a random key, such as `jax.random.key(0)`{several}; got"
            f" {shown(value)}."
        )
    return value


def array(name: str, value: Any) -> np.ndarray:
    """Raise ``ValueError`` if ``value`` is no array, or if it is a masked one."""
    try:
        converted = np.asarray(value)
    except Exception:  # any package may own the object and raise its own errors
        converted = None
    if converted is None or np.ma.is_masked(value):
        hint = "an array" if converted is None else "an array without masked entries"
        raise ValueError(f"`{name}` must be {hint}; got {shown(value)}.")
    return converted


def is_sparse(value: Any) -> bool:
    """Return whether a value is a sparse matrix of JAX, SciPy, CuPy or PyData."""
    return isinstance(value, JAXSparse) or (hasattr(value, "nnz") and hasattr(value, "shape"))


def path(name: str, value: Any) -> Path:
    """Raise ``ValueError`` if ``value`` is not the path of a file or a folder."""
    if not isinstance(value, str | os.PathLike) or os.fspath(value) in ("", b""):
        raise ValueError(f"`{name}` must be a path; got {shown(value)}.")
    return Path(os.fsdecode(value))


def instance(name: str, value: Any, kind: Any, what: str) -> Any:
    """
    Return a value of a given type, or raise.

    :param kind: a type, a tuple of types, or ``Callable``.
    :param what: description of the type in words, with an example.
    :raises ValueError: if ``value`` is not of this type.
    """
    if not isinstance(value, kind):
        raise ValueError(f"`{name}` must be {what}; got {shown(value)}.")
    return value
