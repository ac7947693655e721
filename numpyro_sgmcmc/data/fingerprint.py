# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Fingerprints of data, settings and programs."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
import hashlib
import math
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax
from jax import Array, random
from jax.extend.core import Literal
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.content_hash import of_all_processes
from numpyro_sgmcmc.data.rows_on_disk import RowsOnDisk

#: Relative or absolute difference of log densities above which the models differ.
_ROUNDING = 1e-4

#: Types of arguments and captured values of functions.
_VALUES = np.ndarray | jax.Array | str | bytes | int | float | complex | None

#: Packages whose classes do not change while their version stays.
_KNOWN_BY_VERSION = frozenset(["builtins", "numpyro_sgmcmc", "numpyro", "jax", "typing", "abc"])


def fingerprint_of(args: tuple, kwargs: dict) -> str | None:
    """
    Return the fingerprint of data, equal in every process, or None for traced data.

    The data are not held. Rows on disk are read if they have not been read, or may have changed.
    """
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, RowsOnDisk))
    hasher = hashlib.blake2b(str(tree).encode())
    for leaf in leaves:
        if isinstance(leaf, jax.core.Tracer):
            return None
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            hasher.update(f"{leaf.dtype}{leaf.shape}".encode())
            hasher.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        elif isinstance(leaf, jax.Array):
            hasher.update(f"{leaf.dtype}{leaf.shape}".encode())
            for part in _parts_here(random.key_data(leaf) if _is_key(leaf) else leaf):
                hasher.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        elif isinstance(leaf, RowsOnDisk):
            hasher.update(leaf.digest.encode())
        else:
            hasher.update(repr(leaf.tolist() if isinstance(leaf, np.ndarray) else leaf).encode())
        hasher.update(b",")
    if all(leaf.is_fully_addressable for leaf in leaves if isinstance(leaf, jax.Array)):
        return hasher.hexdigest()
    # each process has hashed its own rows only, and all must return one answer
    digests = of_all_processes(np.frombuffer(hasher.digest(), np.uint8))
    return hashlib.blake2b(digests.tobytes()).hexdigest()


def fingerprints_of_captured(traced: Any) -> tuple[str, str]:
    """
    Return the fingerprints of the arrays and of the numbers that a traced function captures.

    Captured values, of a closure for instance, are not among the arguments. The fingerprint of the
    arrays is equal in every process and version. The fingerprint of the numbers holds in this
    process.

    :param traced: the result of :func:`jax.make_jaxpr`.
    """
    captured = list(_captured(traced))
    arrays = [x for x in captured if np.ndim(x) > 0 or _is_key(x)]
    numbers = [np.asarray(x) for x in captured if np.ndim(x) == 0 and not _is_key(x)]
    return fingerprint_of((arrays,), {}) or "", fingerprint_of((numbers,), {}) or ""


def fingerprint_of_program(traced: Any) -> str:
    """
    Return the fingerprint of the operations of a traced function.

    It is equal in every process with equal versions of JAX and NumPyro.

    :param traced: the result of :func:`jax.make_jaxpr`.
    """
    return hashlib.blake2b("\n".join(_equations(traced)).encode()).hexdigest()


def _equations(traced: Any) -> Iterator[str]:
    """Yield the equations as text, without addresses and names of functions and variables."""
    jaxpr = getattr(traced, "jaxpr", traced)
    known = {x: k for k, x in enumerate((*jaxpr.constvars, *jaxpr.invars))}

    def word(x: Any) -> str:
        if not isinstance(x, Literal):
            return f"{x.aval} {known[x]}"
        # the fingerprint of captured arrays covers arrays
        is_number = np.ndim(x.val) == 0 and not _is_key(x.val)
        return f"{x.aval} {np.asarray(x.val).item() if is_number else 'given'}"

    numbers = (x for x in getattr(traced, "consts", ()) if np.ndim(x) == 0 and not _is_key(x))
    yield f"with {[np.asarray(x).item() for x in numbers]}"
    for eqn in jaxpr.eqns:
        known |= {x: len(known) + k for k, x in enumerate(eqn.outvars)}
        yield f"{eqn.primitive} of {', '.join(map(word, eqn.invars))}"
        for name, value in sorted(eqn.params.items()):
            for x in jax.tree.leaves(value, is_leaf=_is_program):
                if _is_program(x):
                    yield from _equations(x)
                elif name != "name" and isinstance(x, bool | int | float | str | np.dtype | Enum):
                    yield f"{name} {x}"
    yield f"gives {', '.join(map(word, jaxpr.outvars))}"


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key))


def _captured(traced: Any) -> Iterator[Any]:
    yield from getattr(traced, "consts", ())
    jaxpr = getattr(traced, "jaxpr", traced)
    # newer versions of JAX write arrays at their uses
    yield from (x.val for x in jaxpr.outvars if isinstance(x, Literal))
    for eqn in jaxpr.eqns:
        yield from (x.val for x in eqn.invars if isinstance(x, Literal))
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_program):
            if _is_program(value):
                yield from _captured(value)


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def _parts_here(array: Array) -> list[Array]:
    """Return the parts of an array that this process holds, each part once."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return [array]
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    seen = {str(shard.index): shard.data for shard in reversed(shards)}
    return [seen[index] for index in sorted(seen)]


def description_of(value: Any) -> str:
    """
    Return a text that identifies a setting, equal in every process.

    Numbers, words and arrays give their values. Other objects, such as functions, give their names.
    """
    if isinstance(value, str | int | float | bool | None) or is_dataclass(value):
        return repr(value)
    leaves = [
        leaf if isinstance(leaf, str | int | float | bool | np.ndarray | jax.Array) else _name(leaf)
        for leaf in jax.tree.leaves(value)
    ]
    if callable(value):
        return _name(value)
    return fingerprint_of((leaves, str(jax.tree.structure(value))), {}) or ""


def fingerprint_of_code(value: Any) -> str:
    """
    Return the fingerprint of functions and classes, equal in every process of a Python version.

    It covers the instructions, the default arguments and the captured values of functions, and the
    functions of classes of other packages. A function that is called by its global name counts with
    this name alone.

    :param value: a function, a class, or a tree of both.

    **Example:**

    .. doctest::

        >>> from numpyro_sgmcmc.data.fingerprint import fingerprint_of_code
        >>> def decaying(rate):
        ...     return lambda step: rate**step
        >>> one, same, other = (fingerprint_of_code(decaying(x)) for x in (0.5, 0.5, 0.4))
        >>> one == same, one == other
        (True, False)
    """
    return hashlib.blake2b("\n".join(_words_of(value, [])).encode()).hexdigest()


def _words_of(value: Any, seen: list) -> Iterator[str]:
    """Yield words for a value and for all that it refers to; ``seen`` has what came before."""
    if isinstance(value, _VALUES):
        yield fingerprint_of((value,), {}) or ""
        return
    # whether two equal tuples are one object differs between processes
    if not isinstance(value, tuple | frozenset | CodeType):
        if (before := next((k for k, x in enumerate(seen) if x is value), None)) is not None:
            yield f"again {before}"
            return
        seen.append(value)
    word, parts = _parts_of(value)
    yield word
    for part in parts:
        yield from _words_of(part, seen)
    yield "."


def _parts_of(value: Any) -> tuple[str, list[Any]]:
    """Return a word for a value itself, and the values that it refers to."""
    match value:
        case partial():
            return "partial", [value.func, value.args, value.keywords]
        case MethodType():
            return "method", [value.__func__, value.__self__]
        case FunctionType():
            parts: list[Any] = [value.__code__, value.__defaults__, value.__kwdefaults__]
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # an empty cell
                    parts.append(cell.cell_contents)
            return "function", parts
        case CodeType():
            return f"{value.co_code.hex()} {value.co_names}", list(value.co_consts)
        case property():
            return "property", [value.fget]
        case classmethod() | staticmethod():
            return "method", [value.__func__]
        case type():
            is_known = value.__module__.partition(".")[0] in _KNOWN_BY_VERSION
            return _name(value), [] if is_known else [*vars(value).values(), *value.__bases__]
        case Mapping():
            return "mapping", [x for k in sorted(value, key=str) for x in (str(k), value[k])]
        case list() | tuple():
            return "sequence", list(value)
        case frozenset():
            return f"set {sorted(map(repr, value))}", []
    return _name(value), list(getattr(value, "__dict__", {}).items())


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def are_same_densities(one: float, other: float) -> bool:
    """Return whether two log densities differ by rounding alone, or neither is a number."""
    are_near = math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    return are_near or (math.isnan(one) and math.isnan(other))
