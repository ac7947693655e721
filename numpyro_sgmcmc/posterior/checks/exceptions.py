# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Explanations of errors that the code of a model raises on a minibatch, with remedies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import linecache
from pathlib import Path
import re
from threading import RLock
from types import TracebackType

import jax
import numpyro

from numpyro_sgmcmc.data.rows_on_disk import on_disk
from numpyro_sgmcmc.posterior.checks.arguments import shapes_of, what_is_no_array

#: Errors of JAX if Python needs a traced value.
_NEEDS_A_VALUE = (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError)
#: Error of JAX if NumPy needs a traced value.
_NEEDS_AN_ARRAY = jax.errors.TracerArrayConversionError

#: Characters of the first line of another package's error that are repeated: pandas lists rows.
_MOST_LETTERS = 100

_OTHERS = tuple(module.__path__[0] for module in (jax, numpyro))
_HERE = str(Path(__file__).parents[2])


#: Lock for the evaluation of models: NumPyro has one stack of handlers for all threads.
one_at_a_time = RLock()


@contextmanager
def explained(model: Callable, args: tuple, kwargs: dict) -> Iterator[None]:
    """
    Explain errors of an evaluation of a model on a minibatch, in a context.

    :raises ValueError: with line, likely cause and remedy, in the place of the model's own error.
    """
    try:
        with one_at_a_time:
            yield
    except (*_NEEDS_A_VALUE, _NEEDS_AN_ARRAY) as error:
        strange = what_is_no_array(model, args, kwargs)
        instead = f"The model cannot be evaluated on a minibatch{_line(error)}. {strange}"
        raise ValueError(instead if strange else _value_needed(error)) from error
    except NotImplementedError as error:
        if "control flow primitive under a `plate`" not in str(error):
            raise
        raise ValueError(
            f"A `scan` is inside a plate{_line(error)}, where NumPyro cannot have it. Make the"
            " plate outside, `rows = numpyro.plate(...)`, index the data there, `with rows as i:`,"
            " and write `with rows:` in the body of the `scan`."
        ) from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError) as error:
        said = _said(error, model, args, kwargs)
        if said is None:
            raise
        raise (TypeError if isinstance(error, TypeError) else ValueError)(said) from error


def _value_needed(error: Exception) -> str:
    traced = (
        "JAX traces the rows of a minibatch, arrays among the arguments, and with"
        " `MCMC(jit_model_args=True)` every argument"
    )
    if isinstance(error, _NEEDS_AN_ARRAY):
        return (
            f"A function or an array of NumPy gets a traced value in the model{_line(error)}."
            f" {traced}. Use the function of `jax.numpy`; or, as for `np.unique`, compute the"
            " value before the run and bind it, `functools.partial(model, classes=...)`. Convert a"
            " NumPy array that is indexed by rows, `jnp.asarray(x)`, or pass it as an argument."
        )
    return (
        "The model needs the value of an argument in Python, for a `subsample_size`, an `if` or"
        f" `int(y.max())`{_line(error)}. {traced}. Compute the value before the run and bind it,"
        " `functools.partial(model, classes=...)`; or write `jnp.where` for the `if`."
    )


def _said(error: Exception, model: Callable, args: tuple, kwargs: dict) -> str | None:
    """Return the message that replaces an error, or None if the error itself is clear."""
    text, shapes = str(error), shapes_of(model, args, kwargs)
    if sources := on_disk((args, kwargs)):
        if isinstance(error, TypeError):
            return (
                f"Rows on disk ({', '.join(map(repr, sources))}) can only be indexed by the plate,"
                " `with numpyro.plate(...) as i: ... X[i]`. `numpyro.subsample` and operations on"
                f" the whole array need an array in memory. The model raised: {text}"
            )
    if strange := what_is_no_array(model, args, kwargs):
        return (
            f"The model cannot be evaluated on a minibatch{_line(error)}. {strange} It raised"
            f" {type(error).__name__}: {_first_words(text)}"
        )
    if "size of plate should be positive" in text:
        return f"A plate has no rows{_line(error)}; the arguments are {shapes}."
    if isinstance(error, AssertionError) and not text:
        return (
            f"An assertion without a message failed in the model{_line(error)}. The usual cause is"
            " two nested plates in one dimension: give the outer plate another,"
            " `numpyro.plate('groups', G, dim=-2)`."
        )
    if "invalid shape of numpyro.subsample" in text:
        return (
            f"{text}. The data must have as many rows as the plate, in the dimension before the"
            " last `event_dim` ones. Make the two lengths equal."
        )
    if isinstance(error, ValueError | TypeError) and "broadcast" in text:
        return (
            f"The model cannot be evaluated on a minibatch{_line(error)}: {text.rstrip('.')}."
            " Under a subsampled plate every array must have the length of the minibatch. Index it"
            " by the plate, `with numpyro.plate(...) as i: ... X[i]`, or use `numpyro.subsample(X,"
            " event_dim=...)`."
        )
    if "'scale' argument should be positive" in text:
        return (
            f"A weight in `numpyro.handlers.scale` is not positive{_line(error)}. Mask rows of"
            " weight zero, `with numpyro.handlers.mask(mask=weight[i] > 0):`, and set their weight"
            " to 1."
        )
    if isinstance(error, TypeError) and "integer" in text and "ind" in text.lower():
        return (
            f"The model uses an index that is no whole number{_line(error)}: {text}. Convert"
            f" labels and codes to integers, `.astype(int)`. The arguments are {shapes}."
        )
    if isinstance(error, ValueError) or not (line := _line(error)):
        return None
    return (
        f"The model raised {type(error).__name__} on a minibatch{line}: {text}. Its arguments are"
        f" {shapes}."
    )


def _first_words(text: str) -> str:
    """Return the beginning of an error, without text that differs between processes."""
    return re.sub(r" at 0x\w+", "", text.partition("\n")[0])[:_MOST_LETTERS]


def _line(error: Exception) -> str:
    """Return the line of the user's code that raised an error, as text."""
    line, traceback = "", error.__traceback__
    while traceback is not None:
        place = _place(traceback)
        line, traceback = place or line, traceback.tb_next
    return line


def _place(traceback: TracebackType) -> str:
    path, number = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
    if path.startswith((*_OTHERS, _HERE)) or "site-packages" in path:
        return ""
    code = linecache.getline(path, number).strip()
    return f" (`{code}`, line {number} of {Path(path).name})" if code else ""
