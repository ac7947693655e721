# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of the variables of groups, some thousand groups at a time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
import math
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import block, seed, substitute

from numpyro_sgmcmc.posterior.handlers import Plate, given_rows
from numpyro_sgmcmc.results.parts import compiled, waiting_bar

#: Number of groups that are drawn at once.
CHUNK = 2_000

#: Approximate number of values that are drawn at once: 32 MB in float32.
_CHUNK_VALUES = 2**23


@dataclass(frozen=True)
class GroupDraws:
    """
    Draws of the variables of groups, for some draws of the run and some groups at a time.

    - **draw** - :meth:`~numpyro_sgmcmc.posterior.local_latents.Marginal.draws` of a model, or its
      ``replicates``.
    - **plates** - the subsampled plates of the model.
    - **kept** - the draws of the run, shape (chains, draws, ...).
    - **key** - a random key.
    - **args**, **kwargs** - arguments of the model.
    - **programs** - compiled programs, by shapes.
    """

    draw: Callable[[Array, tuple, dict], dict[str, dict[str, Array]]]
    plates: tuple[Plate, ...]
    kept: dict[str, Array]
    key: Array
    args: tuple
    kwargs: dict
    programs: dict[Any, Callable] = field(default_factory=dict)

    def _some(self, kept: dict[str, Array], keys: Array, rows: dict[str, Array]) -> dict[str, Any]:
        """Draws for some draws of the run and some groups."""

        def one(draw_and_key: tuple[dict[str, Array], Array]) -> dict[str, Any]:
            draw, key = draw_and_key
            model_key, key = random.split(key)
            given = given_rows(self.draw, self.plates, rows)
            with block(), seed(rng_seed=model_key), substitute(data=draw):
                return given(key, self.args, self.kwargs)

        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (kept, keys))
        draws = lax.map(one, flat)
        return jax.tree.map(lambda x: x.reshape(*keys.shape[:2], *x.shape[1:]), draws)

    def _compiled(self, *arguments: Any) -> dict[str, Any]:
        shapes = tuple(x.shape for x in jax.tree.leaves(arguments))
        if shapes not in self.programs:
            self.programs[shapes] = compiled(self._some, *arguments)
        return self.programs[shapes](*arguments)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of chains and draws."""
        chains, draws = next(iter(self.kept.values())).shape[:2]
        return chains, draws

    def shapes(self, plate: str, groups: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of all draws of this number of groups of a plate, by site."""
        keys = random.split(self.key, self.shape)
        sites = jax.eval_shape(self._some, self.kept, keys, self._rows(plate, np.zeros(1, int)))
        return {
            name: jax.ShapeDtypeStruct((*x.shape[:2], groups, *x.shape[3:]), x.dtype)
            for name, x in sites[plate].items()
        }

    def draws_of(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int:
        """The number of draws of each chain in a part."""
        chains, draws = self.shape
        each = sum(math.prod(x.shape[3:]) * min(CHUNK, x.shape[2]) for x in shapes.values())
        most = max(1, _CHUNK_VALUES // (chains * max(1, each)))
        return math.ceil(draws / math.ceil(draws / most))  # parts of nearly equal size

    def of(
        self, plate: str, rows: np.ndarray, shapes: Mapping[str, jax.ShapeDtypeStruct]
    ) -> Iterator[tuple[tuple[slice, slice, slice], dict[str, np.ndarray]]]:
        """
        Draw the variables of groups, part by part.

        :param rows: the numbers of the groups.
        :param shapes: the shapes of all draws, by site.
        :return: the index of the chains, draws and groups of a part, and the values of each site.
        """
        k = [p.name for p in self.plates].index(plate)
        each = self.draws_of(shapes)
        with waiting_bar(len(rows) * self.shape[1], f"draws of '{plate}'") as seen:
            for first in range(0, len(rows), CHUNK):
                here = self._rows(plate, rows[first : first + CHUNK])
                chunk_key = random.fold_in(random.fold_in(self.key, k), first)
                keys = random.split(chunk_key, self.shape)
                for start in range(0, self.shape[1], each):
                    some = slice(start, start + each)
                    kept, own = jax.tree.map(lambda x, some=some: x[:, some], (self.kept, keys))
                    values = jax.device_get(self._compiled(kept, own, here)[plate])
                    number = len(here[plate])
                    yield (slice(None), some, slice(first, first + number)), values
                    seen.update(number * own.shape[1])

    def in_memory(
        self,
        plate: str,
        rows: np.ndarray,
        shapes: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    ) -> dict[str, np.ndarray]:
        """All draws of some groups of a plate, by site, shape (chains, draws, groups, ...)."""
        shapes = self.shapes(plate, len(rows)) if shapes is None else shapes
        arrays = {name: np.empty(x.shape, x.dtype) for name, x in shapes.items()}
        for here, values in self.of(plate, rows, shapes):
            for name, array in arrays.items():
                array[here] = values[name]
        return arrays

    def _rows(self, plate: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of these groups, with one row of each other plate."""
        return {p.name: np.zeros(1, int) for p in self.plates} | {plate: rows}


def thinned(draws: Mapping[str, Array], most: int) -> tuple[np.ndarray, dict[str, Array]]:
    """Evenly spaced draws, at most this many of each chain, and their numbers."""
    length = next(iter(draws.values())).shape[1]
    if not length:
        raise ValueError("The run has no draws: `num_samples` is 0.")
    numbers = np.unique(np.linspace(0, length - 1, min(most, length)).round().astype(int))
    return numbers, {name: jnp.asarray(x[:, numbers]) for name, x in draws.items()}
