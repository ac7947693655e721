# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Evaluation of programs of JAX, operation by operation.

The layout of a jaxpr is not a stable interface. All evaluations of a jaxpr go through this module,
and ``test_row_checks`` and ``test_linear_algebra`` notice a change.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jax.extend.core import JaxprEqn, Literal

#: Operations that only call the program in one of their parameters, by the parameter's name.
CALLS = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
}


def results_of(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluate one operation and return its results."""
    bound = equation.primitive.get_bind_params(equation.params)
    # older versions of JAX return functions and parameters separately
    functions, params = ((), bound) if isinstance(bound, dict) else bound
    results = equation.primitive.bind(*functions, *operands, **params)
    return results if equation.primitive.multiple_results else [results]


def value_of(known: Mapping[Any, Any], variable: Any) -> Any:
    """Return the value of a variable or a constant."""
    return variable.val if isinstance(variable, Literal) else known[variable]


def evaluate(program: Any, known: dict[Any, Any], variables: Iterable[Any]) -> None:
    """Add variables of a program to those that are known."""
    for equation in _missing(program, known, variables):
        results = results_of(equation, [value_of(known, x) for x in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))


def _missing(program: Any, known: Mapping[Any, Any], variables: Iterable[Any]) -> list[Any]:
    """Return the operations that are still needed for some variables, in their order."""
    wanted = {x for x in variables if not isinstance(x, Literal) and x not in known}
    missing = []
    for equation in reversed(program.eqns):
        if wanted.intersection(equation.outvars):
            missing.append(equation)
            inputs = (x for x in equation.invars if not isinstance(x, Literal))
            wanted.update(x for x in inputs if x not in known)
    return missing[::-1]


def needed_by(program: Any, variables: Iterable[Any]) -> set[Any]:
    """Return the variables of a program that some of its variables depend on, and these."""
    needed = {x for x in variables if not isinstance(x, Literal)}
    for equation in _missing(program, {}, variables):
        needed.update(x for x in equation.invars if not isinstance(x, Literal))
    return needed


def reached_by(program: Any, variable: Any, but: Any) -> set[Any]:
    """
    Return the variables of a program that depend on an argument.

    :param variable: the argument.
    :param but: variables that are taken not to depend on it.
    """
    reached = {variable}
    for equation in program.eqns:
        if any(not isinstance(x, Literal) and x in reached for x in equation.invars):
            reached.update(x for x in equation.outvars if x not in but)
    return reached


def carried_by(equation: JaxprEqn) -> tuple[int, int]:
    """
    Return the numbers of the first operand that a ``scan`` carries, and of the first after these.

    The parameters that say so differ between versions of JAX. Operands of which the body gets
    entries are scanned over.

    :param equation: the equation of a ``scan``.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro_sgmcmc.posterior.jaxpr import carried_by
        >>> loop = lambda a, c, x: jax.lax.scan(lambda c, x: (c + a * x, c), c, x)
        >>> carried_by(jax.make_jaxpr(loop)(1.0, 0.0, jnp.ones(3)).eqns[0])
        (1, 2)
    """
    program = equation.params["jaxpr"].jaxpr

    def entries(inside: Any, outside: Any) -> int:
        return sum(y.aval.ndim > x.aval.ndim for x, y in zip(inside, outside, strict=True))

    end = len(equation.invars) - entries(program.invars, equation.invars)
    carried = len(program.outvars) - entries(program.outvars, equation.outvars)
    return end - carried, end
