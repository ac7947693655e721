# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Separation of the arrays of a tree from its other leaves, to pass them to a program."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import Array


class WithoutData(NamedTuple):
    """
    Tree without its arrays, a comparable key of what a program was traced for.

    - **tree** - the structure of the tree.
    - **others** - the leaves, with None in the place of each array.
    """

    tree: Any
    others: tuple[Any, ...]

    @property
    def is_data(self) -> list[bool]:
        """The mask of the leaves that are arrays: None is no leaf by itself."""
        return [leaf is None for leaf in self.others]

    def with_data(self, data: Sequence[Array]) -> Any:
        """Return the tree with these arrays in their places."""
        rest = iter(data)
        leaves = [next(rest) if leaf is None else leaf for leaf in self.others]
        return jax.tree.unflatten(self.tree, leaves)


def separated_data(tree: Any) -> tuple[list[Array], WithoutData]:
    """Return the arrays of a tree, and the tree without them."""
    leaves, structure = jax.tree.flatten(tree)
    data = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    others = tuple(None if isinstance(leaf, jax.Array) else leaf for leaf in leaves)
    return data, WithoutData(structure, others)
