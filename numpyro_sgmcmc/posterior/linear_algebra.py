# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Sequential execution of batches of factorisations, which avoids a deadlock of jaxlib.

On a CPU jaxlib spreads a batch of factorisations over the threads that XLA runs a program with, and
the calling thread waits for the others. Operations that do not need each other's results run at
once. If all threads wait in such calls, no thread is left to do the work, and the program stands
still for ever. Examples are the potentials at the position and at the anchor of a control variate,
and two sites with a covariance for each row.

:func:`in_order` makes each batch wait for the result of the one before. Batches that several
devices of a process run at once cannot wait for each other. There the matrices are factorised one
by one, which is slower, and needs no other thread.
"""

from collections.abc import Callable, Iterator
import math
from typing import Any

import jax
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
import jax.numpy as jnp

from numpyro_sgmcmc.posterior.jaxpr import CALLS, carried_by, results_of

#: Factorisations that jaxlib computes by LAPACK on a CPU, by the names of JAX's primitives.
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
    Return a function that computes its batches of factorisations one after the other.

    With several CPU devices it computes them matrix by matrix. Its values are unchanged, and a
    program that needs neither is left as it is.

    The order is a dependence of the data, since XLA removes an ``optimization_barrier`` before it
    schedules operations: an operand of each call is zero where an entry of the result of the call
    before exceeds infinity. XLA does not know that this never happens.

    :param function: function of trees of arrays that returns a tree of arrays. It must not be
        differentiated.
    """

    def ordered(*arguments: Any) -> Any:
        return run_in_order(*jax.make_jaxpr(function, return_shape=True)(*arguments), arguments)

    return ordered


def run_in_order(program: ClosedJaxpr, result: Any, arguments: Any) -> Any:
    """
    Run a program traced by :func:`jax.make_jaxpr` like :func:`in_order`.

    :param result: a tree with the structure of the result.
    """
    leaves = jax.tree.leaves(arguments)
    if _count(program.jaxpr) < (1 if _devices_share_threads() else 2):
        results = jaxpr_as_fun(program)(*leaves)
    else:
        _, results = _run(program, jnp.zeros((), bool), leaves)
    return jax.tree.unflatten(jax.tree.structure(result), results)


def _devices_share_threads() -> bool:
    return jax.default_backend() == "cpu" and jax.local_device_count() > 1


def _count(program: Jaxpr) -> int:
    """Count the batches of factorisations in a program and the programs that it calls."""
    return sum(
        _is_batch(equation) + sum(map(_count, _within(equation))) for equation in program.eqns
    )


def _is_batch(equation: JaxprEqn) -> bool:
    if equation.primitive.name not in _FACTORISATIONS:
        return False
    operand: Any = equation.invars[0].aval
    return operand.ndim > 2  # the calling thread itself factorises a single matrix


def _within(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the programs that an operation calls."""
    is_program = (Jaxpr, ClosedJaxpr)
    for leaf in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, is_program)):
        if isinstance(leaf, ClosedJaxpr):
            yield leaf.jaxpr
        elif isinstance(leaf, Jaxpr):
            yield leaf


def _run(program: ClosedJaxpr | Jaxpr, last: Array, arguments: Any) -> tuple[Array, list[Any]]:
    """
    Run a program with its batches in order.

    :param last: a false scalar that depends on the result of the batch before.
    :return: such a scalar for the last batch of this program, and the results.
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
    """Run one operation of a program."""
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
    # the first floating-point operand carries the dependence
    k = next(k for k, x in enumerate(operands) if _is_real(x))
    operands[k] = jnp.where(last, 0, operands[k])
    results = results_of(equation, operands)
    seen = next(x for x in results if _is_real(x))
    return jnp.real(seen[(0,) * seen.ndim]) > jnp.inf, results


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact) and x.size > 0


def _one_by_one(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Compute the factorisations of a batch in a loop."""
    batch = operands[0].shape[:-2]

    def one(matrices: list[Any]) -> list[Any]:
        return results_of(equation, matrices)

    count = math.prod(batch)
    flat = [x.reshape(count, *x.shape[len(batch) :]) for x in operands]
    return [x.reshape(*batch, *x.shape[1:]) for x in lax.map(one, flat)]


def _scan(equation: JaxprEqn, last: Array, operands: list[Any]) -> tuple[Array, list[Any]]:
    params, (start, end) = equation.params, carried_by(equation)
    carried = end - start
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
        last, results = _run(params["body_jaxpr"], state[0], (*for_body, *state[1]))
        # under `vmap` there may be several loops, some of which have ended
        if not (still := condition(state)).ndim:
            return last, results
        held = [
            jnp.where(still.reshape(still.shape + (1,) * (new.ndim - still.ndim)), new, old)
            for new, old in zip(results, state[1], strict=True)
        ]
        return last, held

    return lax.while_loop(lambda state: jnp.any(condition(state)), body, (last, carry))


def _cond(equation: JaxprEqn, last: Array, operands: list[Any]) -> tuple[Array, list[Any]]:
    def branch(program: ClosedJaxpr) -> Callable:
        return lambda last, *arguments: _run(program, last, arguments)

    index, *arguments = operands
    return lax.switch(index, [branch(x) for x in equation.params["branches"]], last, *arguments)


def _solve(equation: JaxprEqn, last: Array, operands: list[Any]) -> tuple[Array, list[Any]]:
    """Run JAX's linear solver, whose derivatives have been taken before."""
    params = equation.params
    counts = params["const_lengths"]
    start, end = counts.matvec + counts.vecmat, sum(counts)
    constants = operands[start : start + counts.solve]
    return _run(params["jaxprs"].solve, last, (*constants, *operands[end:]))


_CONTROL_FLOW = {"cond": _cond, "custom_linear_solve": _solve, "scan": _scan, "while": _while}
