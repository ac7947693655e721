# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Compiled programs over draws or rows, a part at a time, behind a progress bar."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from numpyro_sgmcmc.posterior.fusions import WITHOUT_FAULTY_FUSIONS
from numpyro_sgmcmc.posterior.linear_algebra import run_in_order
from numpyro_sgmcmc.tuning.progress import bar

#: Number of parts of a loop, which are calls of its program and steps of the progress bar.
_PARTS = 32

#: Seconds before a progress bar is shown.
_LONG = 2.0


def compiled(function: Callable, *examples: Any) -> Callable:
    """
    A function under ``jit`` whose captured arrays are arguments and not constants.

    :param examples: arguments with the shapes of every call.
    """
    traced, result = jax.make_jaxpr(function, return_shape=True)(*examples)

    def run(captured: list, *arguments: Any) -> Any:
        return run_in_order(ClosedJaxpr(traced.jaxpr, captured), result, arguments)

    options = WITHOUT_FAULTY_FUSIONS if jax.default_backend() == "cpu" else None
    return partial(jax.jit(run, compiler_options=options), traced.consts)


def waiting_bar(total: int, description: str) -> tqdm:
    """A progress bar that appears after two seconds and disappears at the end."""
    return bar(True, total, description, delay=_LONG)


def of_each(function: Callable, entries: Any, description: str) -> Any:
    """
    The values of a function of each entry along the leading axis, one entry at a time.

    It needs memory for a single entry and for the result.

    :param function: function of one entry, a tree of arrays, to a tree of arrays.
    :param entries: a tree of arrays with a common leading axis.
    :param str description: the text of the progress bar.
    :return: a tree of NumPy arrays with this leading axis.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_sgmcmc.results.parts import of_each
        >>> of_each(lambda x: 2 * x, jnp.arange(100), "doubling")[-3:].tolist()
        [194, 196, 198]
    """
    size = len(jax.tree.leaves(entries)[0])
    length = -(-size // _PARTS)
    result: Any = None

    def of_part(part: Any) -> Any:
        return lax.map(function, part)

    def part_of(first: int) -> Any:
        # copies of the last entry give the last part the length of the others
        numbers = np.minimum(first + np.arange(length), size - 1)
        return jax.tree.map(lambda x: x[jnp.asarray(numbers)], entries)

    program = compiled(of_part, part_of(0))
    with waiting_bar(size, description) as seen:
        for first in range(0, size, length):
            part = jax.device_get(program(part_of(first)))
            if result is None:
                result = jax.tree.map(lambda x: np.empty((size, *x.shape[1:]), x.dtype), part)
            some = slice(first, min(first + length, size))
            jax.tree.map(lambda to, x, some=some: _put(to, some, x), result, part)
            seen.update(some.stop - first)
    return result


def _put(into: np.ndarray, some: slice, values: np.ndarray) -> None:
    into[some] = values[: some.stop - some.start]
