# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Rows spread over many devices, and chains over another axis of them.

Each of ``P`` devices holds :math:`N / P` rows and draws :math:`n / P` of them at each step, so that
no row ever moves. The minibatch is a stratified sample. Device :math:`p` computes

.. math::

    \\tilde U_p(z) = -\\log p(z) - \\frac{N}{n / P} \\sum_{i \\in S_p} \\log p(x_i \\mid z),

an estimate of the potential that is unbiased up to the difference between its rows and all rows.
The step uses the mean over the devices,

.. math:: \\tilde U = \\frac1P \\sum_p \\tilde U_p, \\qquad
    \\operatorname{Cov}(\\nabla \\tilde U)
        = \\frac{1}{P^2} \\sum_p \\operatorname{Cov}(\\nabla \\tilde U_p),

with one all-reduce of the potential, the gradient and the estimate of its noise. All devices of a
chain then make one common step with equal random numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax, random
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from numpyro_sgmcmc.data.converters import array, shown
from numpyro_sgmcmc.data.rows_on_disk import RowsOnDisk, on_disk
from numpyro_sgmcmc.data.spread_on_disk import SpreadRowsOnDisk

ROWS, CHAINS = "rows", "chains"

#: Partition of an array that is equal on all devices.
EVERYWHERE = PartitionSpec()

_MAKE_A_MESH = (
    "Make it with `jax.make_mesh((8,), ('rows',))`; or with `jax.make_mesh((2, 4), ('chains',"
    " 'rows'))` to spread chains over devices too"
)


@dataclass(frozen=True)
class Shards:
    """
    Layout of data on devices: static facts, equal for all data of one layout.

    - **mesh** - the devices, with an axis ``rows`` and perhaps an axis ``chains``.
    - **spread** - for each leaf of the model's arguments, whether it is spread over ``rows``.
    """

    mesh: Mesh
    spread: tuple[bool, ...]

    @property
    def parts(self) -> int:
        """The number of devices that the rows are spread over."""
        return int(self.mesh.shape[ROWS])

    @property
    def chains(self) -> int:
        """The number of parts that the chains are laid over."""
        return int(self.mesh.shape.get(CHAINS, 1))

    @property
    def processes(self) -> int:
        """The number of processes whose devices these are."""
        return len({device.process_index for device in self.mesh.devices.flat})

    @property
    def part(self) -> Array:
        """The number of this device along the axis of rows, in the program of a device."""
        return lax.axis_index(ROWS)

    def own(self, rng_key: Array) -> Array:
        """Return a random key of its own for each device that holds other rows."""
        return random.fold_in(rng_key, self.part)

    def mean(self, vector: Array) -> Array:
        """Return the mean of a vector over the devices that hold other rows, by one all-reduce."""
        return lax.psum(vector, ROWS) / self.parts

    def on_each(self, function: Callable, inputs: Any, outputs: Any) -> Callable:
        """
        Return the function on every device, with its part of the data.

        :param inputs: partition of each argument, for `jax.shard_map`.
        :param outputs: partition of the result.
        """
        # tests cover the agreement of devices: NumPyro does not carry the types of `check_vma`
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )

    def of_leaves(self, is_data: list[bool]) -> list[PartitionSpec]:
        """Return the partitions of the model's arguments that are data."""
        return [
            PartitionSpec(ROWS) if spread else EVERYWHERE
            for spread, here in zip(self.spread, is_data, strict=True)
            if here
        ]

    def taken(self, array: Array, numbers: np.ndarray) -> Array:
        """Return the rows with these numbers of each device."""
        rows = PartitionSpec(ROWS)
        return jax.jit(self.on_each(lambda x: x[numbers], rows, rows))(array)

    @property
    def of_chains(self) -> PartitionSpec:
        """The partition of an array whose leading axis is the axis of the chains."""
        return PartitionSpec(CHAINS) if CHAINS in self.mesh.shape else EVERYWHERE

    def place(self, tree: Any, specs: Any) -> Any:
        """Place the arrays of a tree on the devices."""
        shardings = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            specs,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        return jax.jit(lambda x: x, out_shardings=shardings)(tree)


def checked_mesh(mesh: Any) -> Mesh:
    """
    Return the mesh with axes whose shardings XLA propagates.

    :raises ValueError: if it is no mesh, or has other axes than ``rows`` and ``chains``.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`mesh` must be a `jax.sharding.Mesh`; got {shown(mesh)}. {_MAKE_A_MESH}."
        )
    if ROWS not in mesh.axis_names or not set(mesh.axis_names) <= {ROWS, CHAINS}:
        raise ValueError(
            f"The mesh has the axes {mesh.axis_names}, but needs 'rows', and may have 'chains'."
            f" {_MAKE_A_MESH}."
        )
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def spread_rows(mesh: Mesh, *arrays: Any) -> Any:
    """
    Spread arrays over the devices of a mesh by their first axis, the rows.

    Pass the spread arrays to ``mcmc.run`` like any arrays, with an ``MCMC`` that has
    ``jit_model_args=True``.

    In one process every array has all rows. In several processes (``jax.distributed.initialize``)
    each process gives the rows that its own devices will hold. All processes give equal numbers of
    rows, and all have to call this function.

    Each device reads its own part of :class:`RowsOnDisk` while it samples. Device memory holds only
    the next minibatches. In several processes each gives the shards that its own devices will read,
    such as ``RowsOnDisk(f"X-{jax.process_index()}-*.npy")``.

    :param mesh: devices with an axis ``rows``, and ``chains`` if chains are laid over devices too.
    :param arrays: NumPy or JAX arrays, or :class:`RowsOnDisk`.
    :return: the array, or a tuple of several arrays.
    :raises ValueError: if the rows cannot be divided among the devices, or the mesh has no rows.

    **Example:**

    .. doctest::

        >>> import jax, numpy as np
        >>> from numpyro_sgmcmc import spread_rows
        >>> mesh = jax.make_mesh((jax.device_count(),), ("rows",))
        >>> X, y = spread_rows(mesh, np.ones((800, 3)), np.zeros(800))
        >>> X.shape, len(X.addressable_shards) == jax.device_count()
        ((800, 3), True)
    """
    if mesh is None or not arrays:
        raise ValueError("`spread_rows` needs a mesh and arrays: `spread_rows(mesh, X, y)`.")
    checked = checked_mesh(mesh)
    sharding = NamedSharding(checked, PartitionSpec(ROWS))
    several = Shards(checked, ()).processes > 1
    arrays = tuple(_rows_of(f"arrays[{k}]", x) for k, x in enumerate(arrays))
    _check_rows(checked, [np.shape(array) for array in arrays], several)
    put = jax.make_array_from_process_local_data if several else _device_put
    placed = tuple(
        SpreadRowsOnDisk(array, checked, ROWS)
        if isinstance(array, RowsOnDisk)
        else put(sharding, array)
        for array in arrays
    )
    return placed[0] if len(placed) == 1 else placed


def _rows_of(name: str, value: Any) -> Any:
    """Raise ``ValueError`` if a value is no array that devices could hold."""
    if isinstance(value, jax.Array | RowsOnDisk):
        return value
    if (rows := array(name, value)).dtype.kind not in "biufc":
        raise ValueError(f"`{name}` must be an array of numbers; got {shown(value)}.")
    return rows


def _device_put(sharding: NamedSharding, array: Any) -> Array:
    return jax.device_put(array, sharding)


def _check_rows(mesh: Mesh, shapes: list[tuple[int, ...]], several: bool) -> None:
    """Raise ``ValueError`` if a device would hold more rows than another."""
    axis = mesh.axis_names.index(ROWS)
    here = [device.process_index == jax.process_index() for device in mesh.devices.flat]
    held = np.where(np.reshape(here, mesh.devices.shape))[axis]
    parts = len(set(held.tolist())) if several else int(mesh.shape[ROWS])
    where = f"the {parts} devices of this process" if several else f"{parts} devices"
    for k, shape in enumerate(shapes):
        if not shape:
            raise ValueError(
                f"Array {k} is a number and has no rows. Pass it to the model without"
                " `spread_rows`."
            )
        if several:
            _check_same_rows(k, shape[0])
        if shape[0] % parts:
            raise ValueError(
                f"Array {k} has {shape[0]:,} rows, which cannot be divided evenly among {where}."
                f" Leave out {shape[0] % parts} rows, `X[:{shape[0] - shape[0] % parts}]`; for a"
                " file write `RowsOnDisk(np.load(path, mmap_mode='r')[:...])`."
            )


def _check_same_rows(k: int, rows: int) -> None:
    """Raise `ValueError` in all processes if a process has another number of rows."""
    counts = np.ravel(process_allgather(np.asarray(rows))).tolist()
    if len(set(counts)) > 1:
        listed = ", ".join(f"{count:,} in process {p}" for p, count in enumerate(counts))
        raise ValueError(
            f"Array {k} has different numbers of rows: {listed}. Give {min(counts):,} rows in each"
            " process."
        )


def found_shards(args: tuple, kwargs: dict) -> Shards | None:
    """
    Return the layout of a model's arguments on devices, or None if their rows are not spread.

    :raises ValueError: if some arguments are spread over another mesh than others, or are on disk
        and not spread.
    """
    meshes = [_mesh_of(leaf) for leaf in jax.tree.leaves((args, kwargs))]
    sources = on_disk((args, kwargs))
    present = [one for one in meshes if one is not None]
    present += [source.mesh for source in sources if isinstance(source, SpreadRowsOnDisk)]
    if not present:
        return None
    for source in sources:
        if not isinstance(source, SpreadRowsOnDisk):
            raise ValueError(
                f"{source!r} is not spread, so that all devices would read the same rows. Spread"
                " it too, `X = spread_rows(mesh, X)`; or read from disk on one device, without a"
                " mesh."
            )
    chosen = checked_mesh(present[0])
    for one in present:
        if one.axis_names != chosen.axis_names or not np.array_equal(one.devices, chosen.devices):
            raise ValueError(
                f"The rows of one array are spread over {_named(one)}, but the rows of another"
                f" over {_named(chosen)}. Use one mesh for all arrays, `spread_rows(mesh, ...)`."
            )
    return Shards(chosen, tuple(one is not None for one in meshes))


def _named(mesh: Mesh) -> str:
    ids = [device.id for device in mesh.devices.flat]
    return f"the mesh {dict(mesh.shape)} of the devices {ids}"


def _mesh_of(leaf: Any) -> Mesh | None:
    """Return the mesh over whose rows an array is spread by its first axis, or None."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return None
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    first = sharding.spec[0] if len(sharding.spec) else None
    return sharding.mesh if first in (ROWS, (ROWS,)) else None
