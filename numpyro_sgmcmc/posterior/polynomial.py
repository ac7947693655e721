# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The degree of a function that is a polynomial, read from its program."""

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn, Literal
import jax.numpy as jnp

from numpyro_sgmcmc.posterior.jaxpr import CALLS, carried_by

#: Operations that are linear in all their operands together.
_SUMS = frozenset(
    "add add_any broadcast_in_dim concatenate copy cumsum expand_dims neg pad real reduce_sum"
    " reshape rev slice squeeze stack sub transpose unstack".split()
)
#: Operations that are linear in each operand.
_PRODUCTS = frozenset(["mul", "dot_general"])
#: Operations that are linear in the operands of these numbers, if the others are constant.
_LINEAR_IN = {
    "div": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "gather": (0,),
    "scatter": (0, 2),
    "scatter-add": (0, 2),
    "triangular_solve": (1,),
}


def degree(function: Callable[[Array], Array], point: Array) -> float:
    """
    Return an upper bound of the degree of a polynomial, or infinity for other functions.

    An operation that is not known counts as no polynomial, and so does a function with derivatives
    of its own. A test that all values are finite counts as constant.

    :param function: a function of one array.
    :param point: an array of the shape of its argument.

    **Example:** the log density of a normal variable is of degree two, and that of Student's t
    distribution is no polynomial.

    .. doctest::

        >>> import jax.numpy as jnp, numpyro.distributions as dist
        >>> from numpyro_sgmcmc.posterior.polynomial import degree
        >>> degree(dist.Normal(1.0, 2.0).log_prob, jnp.zeros(3))
        2
        >>> degree(dist.StudentT(4.0, 1.0, 2.0).log_prob, jnp.zeros(3))
        inf
    """
    program = jax.make_jaxpr(function)(point).jaxpr
    return max(_degrees(program, [1]))


def _degrees(program: Jaxpr, arguments: Sequence[float]) -> list[float]:
    """Return the degrees of the results of a program for arguments of these degrees."""
    degrees: dict[Any, float] = dict(zip(program.invars, arguments, strict=True))

    def of(variable: Any) -> float:
        return 0 if isinstance(variable, Literal) else degrees.get(variable, 0)

    for equation in program.eqns:
        results = _of_results(equation, [of(x) for x in equation.invars])
        degrees.update(zip(equation.outvars, results, strict=True))
    return [of(x) for x in program.outvars]


def _of_results(equation: JaxprEqn, operands: list[float]) -> list[float]:
    name, params = equation.primitive.name, equation.params
    if name == "scan" and any(operands):
        return _of_loop(equation, operands)
    has_own_derivatives = name.startswith("custom_")
    if name in CALLS and any(operands) and not has_own_derivatives:
        inner = params[CALLS[name]]
        return _degrees(getattr(inner, "jaxpr", inner), operands)
    return [_of_result(equation, name, params, operands)] * len(equation.outvars)


def _of_loop(equation: JaxprEqn, operands: list[float]) -> list[float]:
    """Return the degrees of the results of a loop, if they do not grow with its length."""
    first, last = carried_by(equation)
    # a degree may pass from each carried value to the next
    for _ in range(last - first + 2):
        results = _degrees(equation.params["jaxpr"].jaxpr, operands)
        carried = [max(x) for x in zip(operands[first:last], results, strict=False)]
        if carried == operands[first:last]:
            return results
        operands = [*operands[:first], *carried, *operands[last:]]
    return [math.inf] * len(results)


def _of_result(equation: JaxprEqn, name: str, params: Any, operands: list[float]) -> float:
    most = max(operands, default=0)
    if not most or _is_finite(equation, name):
        return 0
    if name in _SUMS:
        return most
    if name in _PRODUCTS:
        return sum(operands)
    if name == "square":
        return 2 * most
    if name == "integer_pow" and params["y"] > 0:
        return params["y"] * most
    if name == "convert_element_type" and jnp.issubdtype(params["new_dtype"], jnp.inexact):
        return most
    # the cases of a choice
    linear = range(1, len(operands)) if name == "select_n" else _LINEAR_IN.get(name, ())
    return math.inf if any(x for k, x in enumerate(operands) if k not in linear) else most


def _is_finite(equation: JaxprEqn, name: str) -> bool:
    """Return whether an operation tests for NaN or infinity."""
    if name not in ("eq", "ne"):
        return name == "is_finite"
    first, second = equation.invars
    return first is second or any(
        isinstance(x, Literal) and bool(jnp.all(jnp.isinf(x.val))) for x in (first, second)
    )
