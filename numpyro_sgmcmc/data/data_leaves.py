# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The arrays of a tree apart from the rest of it, so that a program takes them as arguments."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import Array


class WithoutData(NamedTuple):
    """
    A tree without its arrays; it can be compared, and tells what a program was traced for.

    - **tree** - the structure.
    - **others** - its leaves, with None in the place of each array.
    """

    tree: Any
    others: tuple[Any, ...]

    @property
    def is_data(self) -> list[bool]:
        """Which of the leaves are arrays: None is no leaf by itself."""
        return [leaf is None for leaf in self.others]

    def with_data(self, data: Sequence[Array]) -> Any:
        """The tree with these arrays."""
        rest = iter(data)
        leaves = [next(rest) if leaf is None else leaf for leaf in self.others]
        return jax.tree.unflatten(self.tree, leaves)


def separated_data(tree: Any) -> tuple[list[Array], WithoutData]:
    """The arrays of a tree, and the tree without them."""
    leaves, structure = jax.tree.flatten(tree)
    data = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    others = tuple(None if isinstance(leaf, jax.Array) else leaf for leaf in leaves)
    return data, WithoutData(structure, others)
