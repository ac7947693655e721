# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Conversion of values to JSON and arrays, safe to read whoever wrote them.

Reading gives data only and runs no code. A value is None, a Boolean, a number, a word or an array;
or a list, a tuple, a mapping by words, a ``NamedTuple`` or a dataclass of values. In JSON the
latter are mappings with a single entry, ``{"array": 3}``, ``{"tuple": [...]}``, ``{"mapping":
{...}}`` and ``{"record": ["Moments", {...}]}``.
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import jax
import numpy as np


def kinds_in(*roots: Any) -> dict[str, type]:
    """The kinds of ``NamedTuple`` among these types and in their annotations, by name."""
    kinds: dict[str, type] = {}
    for root in roots:
        if _is_record(root):
            kinds |= {root.__name__: root} | kinds_in(*get_type_hints(root).values())
        kinds |= kinds_in(*get_args(root))
    return kinds


def as_words(value: Any, arrays: list[np.ndarray], kinds: Mapping[str, type]) -> Any:
    """
    The value in a form for JSON.

    :param arrays: the list to which arrays of the value are appended.
    :param kinds: the allowed kinds of ``NamedTuple``, by name.
    :raises TypeError: if the value has a part of another kind.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | jax.Array) and not np.asarray(value).dtype.hasobject:
        arrays.append(np.asarray(value))
        return {"array": len(arrays) - 1}
    if isinstance(value, list):
        return [as_words(x, arrays, kinds) for x in value]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {"mapping": {name: as_words(x, arrays, kinds) for name, x in value.items()}}
    if type(value) in kinds.values():
        kind: Any = type(value)
        fields = {name: as_words(getattr(value, name), arrays, kinds) for name in _hints(kind)}
        return {"record": [type(value).__name__, fields]}
    if type(value) is tuple:
        return {"tuple": [as_words(x, arrays, kinds) for x in value]}
    raise TypeError(f"{type(value).__name__} cannot be stored in a file")


def from_words(words: Any, arrays: list[np.ndarray], kinds: Mapping[str, type]) -> Any:
    """
    The inverse of :func:`as_words`.

    :param kinds: the allowed kinds of ``NamedTuple``, by name.
    :raises ValueError: if the words have anything else.
    """

    def value(words: Any) -> Any:
        match words:
            case None | bool() | int() | float() | str():
                return words
            case list():
                return [value(x) for x in words]
            case {"array": int(k)} if 0 <= k < len(arrays):
                return arrays[k]
            case {"tuple": list(items)}:
                return tuple(value(x) for x in items)
            case {"mapping": dict(items)}:
                return {name: value(x) for name, x in items.items()}
            case {"record": [str(name), dict(fields)]} if name in kinds:
                kind: Any = kinds[name]
                if set(fields) == set(_hints(kind)):
                    record = kind(**{field: value(x) for field, x in fields.items()})
                    if is_of_type(record, kind):
                        return record
        raise ValueError(f"this version does not write {str(words)[:80]!r}")

    return value(words)


def is_of_type(value: Any, kind: Any) -> bool:
    """
    True if a value that was read has the type of an annotation.

    :param kind: a type, a ``NamedTuple``, a union, or a list or mapping of values of one.
    """
    args, origin = get_args(kind), get_origin(kind)
    if _is_record(kind):
        hints = _hints(kind).items()
        return isinstance(value, kind) and all(is_of_type(getattr(value, k), x) for k, x in hints)
    if origin in (list, dict, Mapping):
        each = value if origin is list else value.values() if isinstance(value, dict) else ()
        return isinstance(value, dict if origin is Mapping else origin) and all(
            is_of_type(x, args[-1]) for x in each
        )
    if origin is tuple:
        return isinstance(value, tuple)
    if args:
        return any(is_of_type(value, x) for x in args)
    if kind in (bool, float, int, jax.Array) and isinstance(
        value, bool | int | float | np.ndarray
    ):  # numbers may be arrays without axes, and the reverse
        array = np.asarray(value)
        kinds = {bool: "b", int: "iu", float: "iuf"}.get(kind)
        return kinds is None or array.ndim == 0 and array.dtype.kind in kinds
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_record(kind: Any) -> bool:
    is_named = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_named or isinstance(kind, type) and is_dataclass(kind)
