# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Effect handlers that choose the rows of plates with a ``subsample_size``.

They choose all rows, the first rows, or the rows of a minibatch.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
import operator
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from numpyro import distributions as dist
from numpyro.primitives import Messenger

from numpyro_sgmcmc.data.drawn_rows import DrawnRows, drawn_rows

Model = Callable[..., Any]
#: Rows of a minibatch of one plate, which may be given by their numbers alone.
BatchRows = Array | DrawnRows
#: Rows of the minibatch for each subsampled plate, by name of the plate.
Indices = Mapping[str, BatchRows]


#: Values of a group that count as one row, and the largest number of rows that a group counts as.
_FEW_MEMBERS, _MOST_WORTH = 10, 5.0


class Plate(NamedTuple):
    """Plate with a ``subsample_size``."""

    #: name of the plate
    name: str
    #: number of rows N
    size: int
    #: number of rows in a minibatch n
    subsample_size: int
    #: number of points at which the likelihood of a row is evaluated
    points: int = 1
    #: number of observed values of a row; more than 1 if a row is a group
    members: int = 1
    #: number of rows in a pass, evenly spaced; all rows if None
    seen: int | None = None
    #: number of rows from which these rows are a sample, or None
    of: int | None = None
    #: whether rows are groups with latent variables, which interact with no row of another plate
    is_group: bool = False

    @property
    def worth(self) -> float:
        """
        The number of rows that a row counts as, where enough rows are required.

        A group of many values tells more of the parameters common to all groups, but no more of the
        differences between groups than any other group.
        """
        return min(max(self.members / _FEW_MEMBERS, 1.0), _MOST_WORTH)


class _choose_rows(Messenger):
    """Handler that sets the indices of every plate with a ``subsample_size``."""

    def rows(self, plate: Plate) -> Array:
        raise NotImplementedError

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["args"][1] is not None:
            size, subsample_size = msg["args"]
            rows = self.rows(Plate(msg["name"], size, subsample_size))
            # Both are set, since the plate warns of indices of another length than declared.
            msg["value"], msg["args"] = rows, (size, rows.shape[0])


class full_data(_choose_rows):
    """
    Effect handler that makes every subsampled plate of a model complete.

    The indices of a plate are :math:`0, \\ldots, N - 1`, and its sites are not scaled.

    ``Predictive`` and ``log_likelihood`` see all rows of ``full_data(model)``, in order. With the
    model itself they would see one random minibatch. The wrapped model can be pickled if the model
    can.

    :param fn: a model with NumPyro primitives. Leave it out to use the handler as a context
        manager.
    :raises UnreadableRows: on evaluation, if rows on disk cannot be read.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import log_likelihood
        >>> from numpyro_sgmcmc import full_data

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with numpyro.plate("rows", len(y), subsample_size=10) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> draws = {"mu": jnp.zeros(3)}
        >>> log_likelihood(full_data(model), draws, jnp.ones(50))["y"].shape
        (3, 50)
    """

    def rows(self, plate: Plate) -> Array:
        # the indices are concrete even in a trace of the model, so that they can index NumPy data
        with jax.ensure_compile_time_eval():
            return jnp.arange(plate.size)


class first_rows_of(_choose_rows):
    """
    Handler that takes the first rows of every plate, without a draw at a cost of O(N).

    :param taken: receives the rows that were taken, by name of the plate.
    """

    def __init__(self, fn: Model, taken: dict[str, Array] | None = None) -> None:
        self.taken = taken
        super().__init__(fn)

    def rows(self, plate: Plate) -> Array:
        check_plate(plate.name, plate.size, plate.subsample_size)
        rows = jnp.arange(plate.subsample_size)
        if self.taken is not None:
            self.taken[plate.name] = rows
        return rows


class given_rows(_choose_rows):
    """
    Handler that takes given rows.

    Their number may differ from the ``subsample_size``, and the term of each row has its weight. If
    the rows are divided over ``parts`` devices, sites are scaled as if this part stood for all.
    """

    def __init__(
        self, fn: Model, plates: tuple[Plate, ...], indices: Indices, parts: int | Fraction = 1
    ) -> None:
        self.sizes = {plate.name: plate.size for plate in plates}
        drawn = {name: drawn_rows(rows) for name, rows in indices.items()}
        self.indices = {name: rows.numbers for name, rows in drawn.items()}
        self.weights = {name: rows.weights for name, rows in drawn.items()}
        self.parts = parts
        #: factor by plate that the plate's own scale of its sites lacks
        self.missing: dict[str, float] = {}
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        super().process_message(msg)
        if msg["type"] == "sample":
            for frame in msg["cond_indep_stack"]:
                factor: Any = self.missing.get(frame.name, 1.0)
                if (weights := self.weights.get(frame.name)) is not None:
                    factor = factor * weights.reshape(-1, *(1,) * (-frame.dim - 1))
                if isinstance(factor, Array) or factor != 1.0:
                    msg["scale"] = factor * (1.0 if msg["scale"] is None else msg["scale"])

    def rows(self, plate: Plate) -> Array:
        here = self.sizes.get(plate.name)
        # the size is the number of rows here, or a number that was written out
        if here is None or plate.size not in (here, here * self.parts):
            raise ValueError(
                f"Plate '{plate.name}' has size {plate.size}, but had size {here} when the sampler"
                " was initialised. For data of another length call `mcmc.warmup` again, or use a"
                " new `MCMC` object. Two plates of the model need two names."
            )
        self.missing[plate.name] = float(here * self.parts / plate.size)
        return self.indices[plate.name]


def log_density(site: dict) -> Array:
    """Return the log density of a site, entry by entry of its batch shape."""
    given = (site["value"], site["intermediates"]) if site["intermediates"] else (site["value"],)
    term = site["fn"].log_prob(*given)
    return term if site["scale"] is None else site["scale"] * term


def without_wrappers(fn: Any) -> Any:
    """Return a distribution without its expansions, masks and declarations as an event."""
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent | dist.MaskedDistribution):
        fn = fn.base_dist
    return fn


def is_masked(fn: Any) -> bool:
    """Return True for a distribution with a mask."""
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return isinstance(fn, dist.MaskedDistribution)


def check_plate(name: str, size: Any, subsample_size: Any) -> None:
    """Raise ``ValueError`` if ``subsample_size`` is not a whole number from 1 to ``size``."""
    try:
        size, subsample_size = operator.index(size), operator.index(subsample_size)
    except (TypeError, jax.errors.JAXTypeError) as error:
        raise ValueError(
            f"Plate '{name}' has size {size} and subsample_size {subsample_size}, and both must be"
            " Python integers. Bind an argument of the model that sets a size,"
            " `functools.partial(model, batch_size=...)`, because it cannot be traced."
        ) from error
    if not 1 <= subsample_size <= size:
        raise ValueError(
            f"Plate '{name}' has subsample_size={subsample_size}, which must be from 1 to its"
            f" size {size}."
        )
