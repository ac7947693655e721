# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Batches of factorisations, one after the other.

On a CPU jaxlib spreads a batch of factorisations over the threads that XLA runs a program with, and
the thread that has called waits for the others. Operations that do not need each other's results
are run at once: where as many such calls as there are threads are waiting, none is left to do their
work, and the program stands still for ever. The potential at the position and that at the
anchor of a control variate are two of them, two sites with a covariance for each row are others.
:func:`in_order` makes each of them wait for the result of the one before. What several devices of a
process run at once cannot wait for each other: there the matrices are taken one by one, which is
slower, and needs no other thread.
"""

from collections.abc import Callable, Iterator
import math
from typing import Any

import jax
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
import jax.numpy as jnp

from numpyro_sgmcmc.posterior.jaxpr import CALLS, results_of

#: What jaxlib computes by LAPACK on a CPU, by the names of JAX's primitives.
_FACTORISATIONS = frozenset(
    {
        "cholesky",
        "eig",
        "eigh",
        "geqp3",
        "geqrf",
        "hessenberg",
        "householder_product",
        "lu",
        "ormqr",
        "qr",
        "schur",
        "svd",
        "triangular_solve",
        "tridiagonal",
        "tridiagonal_solve",
    }
)


def in_order(function: Callable) -> Callable:
    """
    A function whose batches of factorisations are computed one after the other, or with several
    CPU devices matrix by matrix. Its values are the same, and a program that needs neither is the
    same program.

    The order is a dependence of the data, since XLA removes an ``optimization_barrier`` before it
    decides what to run at once: an operand of each call is zero where an entry of the result of
    the call before exceeds infinity, which XLA does not know to be never.

    :param function: of trees of arrays to a tree of arrays; it is not to be differentiated.
    """

    def ordered(*arguments: Any) -> Any:
        return run_in_order(*jax.make_jaxpr(function, return_shape=True)(*arguments), arguments)

    return ordered


def run_in_order(program: ClosedJaxpr, result: Any, arguments: Any) -> Any:
    """
    Runs what :func:`jax.make_jaxpr` has traced as :func:`in_order` does.

    :param result: a tree like its result.
    """
    leaves = jax.tree.leaves(arguments)
    if _count(program.jaxpr) < (1 if _devices_share_threads() else 2):
        found = jaxpr_as_fun(program)(*leaves)
    else:
        _, found = _run(program, jnp.zeros((), bool), leaves)
    return jax.tree.unflatten(jax.tree.structure(result), found)


def _devices_share_threads() -> bool:
    return jax.default_backend() == "cpu" and jax.local_device_count() > 1


def _count(program: Jaxpr) -> int:
    """The number of batches of factorisations in a program and all that it calls."""
    return sum(
        _is_batch(equation) + sum(map(_count, _within(equation))) for equation in program.eqns
    )


def _is_batch(equation: JaxprEqn) -> bool:
    if equation.primitive.name not in _FACTORISATIONS:
        return False
    operand: Any = equation.invars[0].aval
    return operand.ndim > 2  # of a single matrix the thread that calls is the one that works


def _within(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The programs that an operation calls."""
    is_program = (Jaxpr, ClosedJaxpr)
    for leaf in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, is_program)):
        if isinstance(leaf, ClosedJaxpr):
            yield leaf.jaxpr
        elif isinstance(leaf, Jaxpr):
            yield leaf


def _run(program: ClosedJaxpr | Jaxpr, last: Array, arguments: Any) -> tuple[Array, list[Any]]:
    """
    Runs a program with its batches in order.

    :param last: a scalar that is false, and is known when the batch before has been computed.
    :return: the same of the last batch of this program, and its results.
    """
    inner, constants = (
        (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, ())
    )
    values = dict(zip((*inner.constvars, *inner.invars), (*constants, *arguments), strict=True))

    def value(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in inner.eqns:
        last, results = _step(equation, last, [value(x) for x in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return last, [value(x) for x in inner.outvars]


def _step(equation: JaxprEqn, last: Array, operands: list[Any]) -> tuple[Array, list[Any]]:
    """Runs one operation of a program."""
    name, params = equation.primitive.name, equation.params
    is_batch = _is_batch(equation)
    if not is_batch and not any(map(_count, _within(equation))):
        return last, results_of(equation, operands)
    if name in CALLS:
        return _run(params[CALLS[name]], last, operands)
    if name in _CONTROL_FLOW:
        return _CONTROL_FLOW[name](equation, last, operands)
    if is_batch and _devices_share_threads():
        return last, _one_by_one(equation, operands)
    # the first of the operands that can wait
    k = next(k for k, x in enumerate(operands) if _is_real(x))
    operands[k] = jnp.where(last, 0, operands[k])
    results = results_of(equation, operands)
    seen = next(x for x in results if _is_real(x))
    return jnp.real(seen[(0,) * seen.ndim]) > jnp.inf, results


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact) and x.size > 0


def _one_by_one(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    """The factorisations of a batch, in a loop."""
    batch = operands[0].shape[:-2]

    def one(matrices: list[Any]) -> list[Any]:
        return results_of(equation, matrices)

    count = math.prod(batch)
    flat = [x.reshape(count, *x.shape[len(batch) :]) for x in operands]
    return [x.reshape(*batch, *x.shape[1:]) for x in lax.map(one, flat)]


def _is_entry(inside: Any, outside: Any) -> bool:
    return outside.aval.ndim > inside.aval.ndim


def _scan(equation: JaxprEqn, last: Array, operands: list[Any]) -> tuple[Array, list[Any]]:
    params, program = equation.params, equation.params["jaxpr"].jaxpr
    # versions of JAX count them in other ways: a body sees entries of what it goes along
    entries = sum(map(_is_entry, program.invars, equation.invars))
    carried = len(program.outvars) - sum(map(_is_entry, program.outvars, equation.outvars))
    end = len(operands) - entries
    start = end - carried
    constants, carry, inputs = operands[:start], operands[start:end], operands[end:]

    def body(state: Any, entries: Any) -> Any:
        last, results = _run(params["jaxpr"], state[0], (*constants, *state[1], *entries))
        return (last, results[:carried]), results[carried:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    (last, carry), outputs = lax.scan(body, (last, carry), inputs, **options)
    return last, [*carry, *outputs]


def _while(equation: JaxprEqn, last: Array, operands: list[Any]) -> tuple[Array, list[Any]]:
    params = equation.params
    start = params["cond_nconsts"]
    end = start + params["body_nconsts"]
    for_condition, for_body, carry = operands[:start], operands[start:end], operands[end:]

    def condition(state: Any) -> Any:
        return _run(params["cond_jaxpr"], state[0], (*for_condition, *state[1]))[1][0]

    def body(state: Any) -> Any:
        last, found = _run(params["body_jaxpr"], state[0], (*for_body, *state[1]))
        # under `vmap` there may be several loops, of which some have come to their ends
        if not (still := condition(state)).ndim:
            return last, found
        held = [
            jnp.where(still.reshape(still.shape + (1,) * (new.ndim - still.ndim)), new, old)
            for new, old in zip(found, state[1], strict=True)
        ]
        return last, held

    return lax.while_loop(lambda state: jnp.any(condition(state)), body, (last, carry))


def _cond(equation: JaxprEqn, last: Array, operands: list[Any]) -> tuple[Array, list[Any]]:
    def branch(program: ClosedJaxpr) -> Callable:
        return lambda last, *arguments: _run(program, last, arguments)

    index, *arguments = operands
    return lax.switch(index, [branch(x) for x in equation.params["branches"]], last, *arguments)


def _solve(equation: JaxprEqn, last: Array, operands: list[Any]) -> tuple[Array, list[Any]]:
    """JAX's linear solver, whose derivatives have been taken before."""
    params = equation.params
    counts = params["const_lengths"]
    start, end = counts.matvec + counts.vecmat, sum(counts)
    constants = operands[start : start + counts.solve]
    return _run(params["jaxprs"].solve, last, (*constants, *operands[end:]))


_CONTROL_FLOW = {"cond": _cond, "custom_linear_solve": _solve, "scan": _scan, "while": _while}
