# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Programs of JAX, operation by operation.

The layout of a jaxpr is not a stable interface; whoever evaluates one does it through here, and
``test_row_checks`` and ``test_linear_algebra`` notice a change.
"""

from typing import Any

from jax.extend.core import JaxprEqn

#: Operations that are nothing but a call of the program in one of their parameters.
CALLS = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
}


def results_of(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    """The results of one operation."""
    bound = equation.primitive.get_bind_params(equation.params)
    # older versions of JAX give the functions among the parameters apart
    functions, params = ((), bound) if isinstance(bound, dict) else bound
    results = equation.primitive.bind(*functions, *operands, **params)
    return results if equation.primitive.multiple_results else [results]
