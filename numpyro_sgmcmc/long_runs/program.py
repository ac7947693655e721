# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The compiled loop of a long run: any number of samples by one program.

A call takes :math:`k` times :math:`m` samples and keeps the last of each :math:`m`; both numbers
and the data are arguments of the program. Draws do not depend on their division into calls.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
from numpyro.util import nested_attrgetter

from numpyro_sgmcmc.data.data_leaves import separated_data

#: Largest size of the draws of a call, in bytes for all chains.
MOST_BYTES = 16_000_000

#: Collected fields of the state by name; the first one is the sample.
Fields = dict[str, Any]


class Program:
    """
    The program of a run.

    :param kernel: an initialised kernel.
    :param postprocess: function of the values of one chain, or None for the function of the kernel.
    :param fields: names of the fields to collect, the sample first.
    :param args: arguments of the model, whose arrays become arguments of the program.
    :param str method: ``"sequential"``, ``"vectorized"`` or ``"parallel"``.
    :param int thinning: number of samples from one draw to the next.
    :param list states: the states of the chains from :func:`separated`.
    :param int num_draws: the most draws of a call.
    """

    def __init__(
        self,
        kernel: Any,
        postprocess: Callable | None,
        fields: tuple[str, ...],
        args: tuple,
        kwargs: dict,
        *,
        method: str,
        num_chains: int,
        thinning: int,
        states: list,
        num_draws: int,
    ) -> None:
        self._kernel, self._postprocess, self._fields = kernel, postprocess, fields
        self._method = method if num_chains > 1 else "single"
        self._thinning = thinning
        data, self._rest = separated_data((args, kwargs))
        one = jax.tree.map(lambda x: x[0], states[0]) if self._method == "parallel" else states[0]
        shapes = jax.eval_shape(lambda state: self._collected(state, args, kwargs), one)
        if self._method == "vectorized":
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes)
        #: Shapes of the collected fields of one draw of one chain.
        self.shapes: Fields = shapes
        each = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
        #: Largest number of draws that a call returns.
        self.capacity = int(min(max(1, MOST_BYTES // max(1, each * num_chains)), max(1, num_draws)))
        run: Callable = self._drawn
        if self._method == "parallel":
            mesh = chain_mesh(num_chains)
            everywhere, by_chain = PartitionSpec(), PartitionSpec("chain")
            run = jax.shard_map(
                self._drawn_by_one,
                mesh=mesh,
                in_specs=(everywhere, by_chain, everywhere, everywhere),
                out_specs=by_chain,
                check_vma=False,
            )
            data = jax.device_put(data, NamedSharding(mesh, everywhere))
        self._data = data
        self._run = jax.jit(run)
        self._first = states[0]

    def compiled_as(self, other: "Program | None") -> "Program":
        """
        This program, with the compiled loop of another one where the two differ in data alone.

        What else a loop depends on is in the shapes of states and data, for which JAX compiles it
        again. The data of the other program are forgotten.
        """
        if other is None:
            return self
        own, others = (
            (x._kernel, x._postprocess, x._fields, x._rest, x._method, x._thinning, x.capacity)
            for x in (self, other)
        )
        if own == others:
            self._run = other._run
        other._data = []
        return self

    def _collected(self, state: Any, args: tuple, kwargs: dict) -> Fields:
        values = nested_attrgetter(*self._fields)(state)
        sample, *rest = [values] if len(self._fields) == 1 else values
        constrain = self._postprocess or self._kernel.postprocess_fn(args, kwargs)
        sample = (jax.vmap(constrain) if self._method == "vectorized" else constrain)(sample)
        collected = jax.tree.map(jnp.asarray, (sample, *rest))
        return dict(zip(self._fields, collected, strict=True))

    def _drawn(
        self, data: list[Array], state: Any, segments: Array, steps: Array
    ) -> tuple[Any, Fields]:
        args, kwargs = self._rest.with_data(data)

        def sample(_: Any, state: Any) -> Any:
            return self._kernel.sample(state, args, kwargs)

        def segment(k: Array, carry: tuple[Any, Fields]) -> tuple[Any, Fields]:
            state, draws = carry
            # a loop would cost a single sample some microseconds
            alone = self._thinning == 1
            state = sample(0, state) if alone else lax.fori_loop(0, steps, sample, state)
            draws = jax.tree.map(
                lambda kept, x: lax.dynamic_update_index_in_dim(kept, x, k, 0),
                draws,
                self._collected(state, args, kwargs),
            )
            return state, draws

        shapes = jax.eval_shape(lambda state: self._collected(state, args, kwargs), state)
        empty = jax.tree.map(lambda x: jnp.zeros((self.capacity, *x.shape), x.dtype), shapes)
        return lax.fori_loop(0, segments, segment, (state, empty))

    def _drawn_by_one(self, data: list[Array], state: Any, segments: Array, steps: Array) -> Any:
        """Draws of one chain on its device, with a leading axis of length one."""
        state = jax.tree.map(lambda x: x[0], state)
        return jax.tree.map(lambda x: x[None], self._drawn(data, state, segments, steps))

    def compile(self) -> None:
        """Compile the program, by a call without samples."""
        jax.block_until_ready(self._run(self._data, self._first, _number(0), _number(1)))
        self._first = None

    def __call__(self, states: list, segments: int, steps: int) -> tuple[list, Fields]:
        """
        Take samples and return the kept draws.

        :param int segments: number of groups of samples, each of which gives one draw, its last
            sample.
        :param int steps: number of samples in a group; with ``thinning=1`` always 1.
        :return: the states after the samples, and the draws, arrays of NumPy of shape ``(chains,
            min(segments, capacity), ...)``.
        """
        if self._thinning == 1:
            assert steps == 1
        counts = _number(segments), _number(steps)
        done = [self._run(self._data, state, *counts) for state in states]
        kept = min(segments, self.capacity)
        # errors of a program appear when its results are awaited
        states = jax.block_until_ready([state for state, _ in done])
        if self._method == "sequential":
            draws = jax.tree.map(
                lambda *chains: np.stack([np.asarray(x)[:kept] for x in chains]),
                *(part for _, part in done),
            )
        elif self._method == "parallel":
            draws = jax.tree.map(lambda x: np.array(x)[:, :kept].copy(), done[0][1])
        elif self._method == "vectorized":
            draws = jax.tree.map(
                lambda x: np.array(np.swapaxes(np.asarray(x)[:kept], 0, 1), order="C"), done[0][1]
            )
        else:
            draws = jax.tree.map(lambda x: np.asarray(x)[None, :kept].copy(), done[0][1])
        return states, draws


def _number(count: int) -> Any:
    # not yet on a device, as data that are spread over processes need it
    return np.int32(count)


def chain_mesh(num_chains: int) -> Mesh:
    """A mesh with a device for every chain."""
    return Mesh(np.array(jax.local_devices()[:num_chains]), ("chain",))


def separated(state: Any, method: str, num_chains: int, data: Any = ()) -> list:
    """
    The states of all chains as a list, in the form that a program takes.

    The list has a state for each sequential chain, or one state of all chains. The argument has the
    form of ``MCMC.last_state``.

    :param data: a tree of the arguments of the program. If they are spread over devices, the state
        goes to all devices, where the program returns it.
    """
    shardings = [x.sharding for x in jax.tree.leaves(data) if isinstance(x, jax.Array)]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and s.num_devices > 1]
    if meshes:
        everywhere = NamedSharding(meshes[0], PartitionSpec())
        state = jax.tree.map(
            lambda x: jax.device_put(x, everywhere) if x.sharding.num_devices == 1 else x, state
        )
    if method == "sequential" and num_chains > 1:
        return [jax.tree.map(lambda x, k=k: x[k], state) for k in range(num_chains)]
    if method == "parallel" and num_chains > 1:
        sharding = NamedSharding(chain_mesh(num_chains), PartitionSpec("chain"))
        return [jax.device_put(state, sharding)]
    return [state]


def joined(states: list) -> Any:
    """The inverse of :func:`separated`."""
    if len(states) == 1:
        return states[0]
    return jax.tree.map(lambda *chains: jnp.stack(chains), *states)
