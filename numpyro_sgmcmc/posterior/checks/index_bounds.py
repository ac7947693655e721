# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Detection of indices beyond the ends of arrays in a computation.

JAX takes the last entry of an array for an index beyond its end, and counts negative indices from
the end, both in silence. A program cannot report it, but an evaluation of its jaxpr, operation by
operation, can.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import Literal
import jax.numpy as jnp

from numpyro_sgmcmc.posterior.jaxpr import CALLS, results_of


class IndexedArray(NamedTuple):
    """Array with the indices that are used along one of its axes."""

    #: the array, a value or a tracer
    array: Any
    #: length of the axis
    length: int
    #: the indices as written, before JAX counts negative indices from the end
    indices: Array


class _Variables:
    """Values and properties of the variables of a jaxpr."""

    def __init__(self, elsewhere: bool, found: list[IndexedArray]) -> None:
        self.elsewhere, self.found = elsewhere, found
        self.values: dict[Any, Any] = {}
        #: variables that depend on the inputs
        self.dependent: set[Any] = set()
        #: the variable ``i`` by the variables of ``i < 0`` and of ``i + length``
        self.negative: dict[Any, Any] = {}
        self.moved: dict[Any, Any] = {}
        #: the index as written, by the variable of an index that was counted from the end
        self.written: dict[Any, Any] = {}

    def value(self, variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else self.values[variable]

    def write(self, variables: Any, values: Any, dependent: bool) -> None:
        self.values |= dict(zip(variables, values, strict=True))
        if dependent:
            self.dependent |= set(variables)


def watched(
    function: Callable[[Any], Any], inputs: Any, elsewhere: bool = False
) -> tuple[Any, list[IndexedArray]]:
    """
    Evaluate a function, and return its value and the arrays that its inputs index.

    :param function: a function of a tree of arrays, traced once.
    :param inputs: a tree of arrays.
    :param bool elsewhere: whether index 0 replaces indices outside of an array, instead of JAX's
        choice. If this makes no difference, the entries read there are not used.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(inputs)
    indexed: list[IndexedArray] = []
    known = _Variables(elsewhere, indexed)
    known.write(closed.jaxpr.constvars, closed.consts, dependent=False)
    known.write(closed.jaxpr.invars, jax.tree.leaves(inputs), dependent=True)
    return jax.tree.unflatten(jax.tree.structure(shape), _evaluate(closed.jaxpr, known)), indexed


def _evaluate(jaxpr: Any, known: _Variables) -> list[Any]:
    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, [known.value(v) for v in eqn.invars]
        variables = [None if isinstance(v, Literal) else v for v in eqn.invars]
        dependent = [v in known.dependent for v in variables]
        if (inner := eqn.params.get(CALLS.get(name, ""))) is not None:
            results = _entered(inner, eqn, known, inputs)
        else:
            if name == "gather" and dependent[1]:
                inputs[1] = _watch(eqn, inputs, known)
            elif name == "select_n" and _counts_from_the_end(variables, known):
                known.written[eqn.outvars[0]] = inputs[1]
                inputs[2] = jnp.zeros_like(inputs[2]) if known.elsewhere else inputs[2]
            results = results_of(eqn, inputs)
        known.write(eqn.outvars, results, any(dependent))
        if name == "lt" and dependent[0]:
            known.negative[eqn.outvars[0]] = variables[0]
        elif name == "add" and dependent[0] and not dependent[1]:
            known.moved[eqn.outvars[0]] = variables[0]
        elif name in ("broadcast_in_dim", "reshape") and variables[0] in known.written:
            written = known.written[variables[0]]
            known.written[eqn.outvars[0]] = results_of(eqn, [written, *inputs[1:]])[0]
    return [known.value(v) for v in jaxpr.outvars]


def _counts_from_the_end(variables: list[Any], known: _Variables) -> bool:
    """Return whether a selection is ``where(i < 0, i + length, i)``."""
    is_negative, index, moved = variables
    return (
        index is not None
        and known.negative.get(is_negative) is index
        and known.moved.get(moved) is index
    )


def _entered(inner: Any, eqn: Any, known: _Variables, inputs: list[Any]) -> list[Any]:
    """Evaluate the program inside an operation and return its results."""
    inside, body = _Variables(known.elsewhere, known.found), getattr(inner, "jaxpr", inner)
    inside.write(body.constvars, getattr(inner, "consts", ()), dependent=False)
    own = {}
    for outer, variable, value in zip(eqn.invars, body.invars, inputs, strict=True):
        is_variable = not isinstance(outer, Literal)
        inside.write([variable], [value], is_variable and outer in known.dependent)
        if is_variable:
            own[outer] = variable
    inside.written = {own[v]: x for v, x in known.written.items() if v in own}
    for facts, theirs in ((known.negative, inside.negative), (known.moved, inside.moved)):
        theirs |= {own[v]: own[i] for v, i in facts.items() if v in own and i in own}
    results = _evaluate(body, inside)
    for outer, variable in zip(eqn.outvars, body.outvars, strict=True):
        if not isinstance(variable, Literal) and variable in inside.written:
            known.written[outer] = inside.written[variable]
    return results


def _watch(eqn: Any, inputs: list[Any], known: _Variables) -> Any:
    """Record the indices of an array, and return the indices for the evaluation."""
    array, indices = inputs[0], inputs[1]
    written, columns = known.written.get(eqn.invars[1], indices), []
    for k, axis in enumerate(eqn.params["dimension_numbers"].start_index_map):
        length = array.shape[axis] - eqn.params["slice_sizes"][axis] + 1
        known.found.append(IndexedArray(array, length, written[..., k]))
        index = indices[..., k]
        columns.append(jnp.where((index < 0) | (index >= length), 0, index))
    return jnp.stack(columns, axis=-1) if known.elsewhere and columns else indices
