# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Evaluation of programs of JAX, operation by operation.

The layout of a jaxpr is not a stable interface. All evaluations of a jaxpr go through this module,
and ``test_row_checks`` and ``test_linear_algebra`` notice a change.
"""

from typing import Any

from jax.extend.core import JaxprEqn

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
