# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The draws of a run, in memory or in a store."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from numpyro_sgmcmc.long_runs.checkpoint import load_run
from numpyro_sgmcmc.long_runs.folder import FOLDER, RunFolder
from numpyro_sgmcmc.long_runs.growing import RowsOfRun
from numpyro_sgmcmc.long_runs.program import Fields
from numpyro_sgmcmc.results.facts import variable_name

if TYPE_CHECKING:
    from numpyro_sgmcmc.long_runs.store import Manifest

#: Names in ArviZ for fields of NumPyro's states.
_NAMES = {
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}

#: Name of the field with the number of rows that each draw knows.
_ROWS = "sample_stats/rows"


class Draws:
    """
    The draws of a run, in memory or in a store.

    :param shapes: shapes of the collected fields of one draw of one chain.
    :param str sample: the field of the sample.
    :param removed: sites whose draws are not kept.
    :param rows: number of rows that new draws know, for growing rows.
    """

    def __init__(
        self,
        shapes: Fields,
        sample: str,
        removed: tuple[str, ...],
        num_chains: int,
        rows: RowsOfRun | None = None,
    ) -> None:
        self._sample = sample
        self._removed = removed
        if unknown := [name for name in removed if name not in shapes[self._sample]]:
            raise ValueError(
                f"`extra_fields` leaves out {unknown}, which are no sites of the draws; the sites"
                f" are {sorted(shapes[self._sample])}."
            )
        self._shapes = self._kept(shapes)
        self._num_chains = num_chains
        #: draws that are not yet in the store
        self._waiting: list[Fields] = []
        self._path: Path | None = None
        self._rows = rows
        self._stored = 0
        #: manifest of the draws in the store, if this process writes them
        self.manifest: Manifest | None = None
        #: number of draws of each chain
        self.count = 0
        self.waiting_bytes = 0

    def sites_of(self, draws: Fields) -> dict[str, Any]:
        """The sample by the names of its sites, with the sites that are not kept."""
        return {name: x for name, x in _named({self._sample: draws[self._sample]}, self._sample)}

    def add(self, draws: Fields) -> None:
        """Add draws, arrays of shape (chains, draws, ...), with all sites."""
        draws = self._kept(draws)
        leaves = jax.tree.leaves(draws)
        self.count += leaves[0].shape[1]
        self.waiting_bytes += sum(x.nbytes for x in leaves)
        self._waiting.append(draws)

    def read(self) -> Fields:
        """All draws; for growing rows also ``rows``, the number of rows that each draw knows."""
        draws = self._read()
        if self._rows is None:
            return draws
        known = np.full(self.count, self._rows.rows)
        if self._path is not None:
            known[: self._stored] = self._from_store([_ROWS])[0]
        return draws | {"rows": jnp.asarray(np.tile(known, (self._num_chains, 1)))}

    def _read(self) -> Fields:
        if self._path is None:
            if not self._waiting:
                draws = jax.tree.map(self._empty, self._shapes)
            else:
                draws = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *self._waiting)
                self._waiting = [draws]
            return jax.tree.map(jnp.asarray, draws)
        # names and leaves have one order
        values = self._from_store([path for path, _ in self._paths(self._shapes)])
        if self._waiting:  # an earlier write has failed
            waiting = [jax.tree.leaves(draws) for draws in self._waiting]
            values = [np.concatenate(x, axis=1) for x in zip(values, *waiting, strict=True)]
        dtypes = [x.dtype for x in jax.tree.leaves(self._shapes)]
        leaves = [jnp.asarray(x, dtype) for x, dtype in zip(values, dtypes, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(self._shapes), leaves)

    def _from_store(self, names: list[str]) -> list[np.ndarray]:
        """The draws from the store; raise ``ValueError`` if its values have changed."""
        from numpyro_sgmcmc.long_runs.store import Store

        assert self._path is not None
        manifest = self.manifest
        if manifest is None:  # another process has written the draws
            manifest = load_run(self._path / FOLDER / "checkpoint")["manifest"]
        store = Store(self._path)
        return [store.read(name, manifest, self._stored) for name in names]

    def begin_store(self, folder: RunFolder, dims: dict[str, list[str]], num_draws: int) -> None:
        """
        Make the store, which takes the draws from now on.

        :param dims: names of the dimensions of sites; other dimensions get numbers.
        """
        from numpyro_sgmcmc.long_runs.store import variable

        self._path = folder.path
        if not folder.writes:
            return
        if folder.checkpoint is not None:
            self.manifest = folder.checkpoint["manifest"]
            return
        groups: dict[str, dict[str, dict]] = {"posterior": {}, "sample_stats": {}}
        constants: dict[str, dict[str, Any]] = {name: {} for name in groups}
        chains = self._num_chains
        for path, x in self._paths(self._shapes):
            group, name = path.split("/")
            names = dims.get(name, []) if group == "posterior" else []
            if len(names) != len(x.shape):
                names = [f"{name}_dim_{k}" for k in range(len(x.shape))]
            groups[group][name] = variable(
                (chains, *x.shape), x.dtype, ["chain", "draw", *names], num_draws
            )
            constants[group] |= {
                d: ([d], np.arange(n)) for d, n in zip(names, x.shape, strict=True)
            }
        if self._rows is not None:
            group, name = _ROWS.split("/")
            groups[group][name] = variable((), np.int64, ["draw"], num_draws)
        for group in [name for name in groups if not groups[name]]:
            del groups[group], constants[group]
        for group, arrays in groups.items():
            arrays["draw"] = variable((), np.int64, ["draw"], num_draws)
            constants[group]["chain"] = (["chain"], np.arange(chains))
        with folder.writing():
            folder.store.create(groups, inference_library="numpyro_sgmcmc")
            for group, coordinates in constants.items():
                folder.store.write(group, xr.Dataset(coords=coordinates))
            folder.store.publish(0)
            self.manifest = folder.store.manifest

    def write(self, folder: RunFolder, moments: xr.Dataset | None) -> None:
        """Append the waiting draws to the store, and show them to readers."""
        manifest = self.manifest
        assert manifest is not None
        if self._waiting:
            draws = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *self._waiting)
            values = dict(self._paths(draws))
            numbers = np.arange(self._stored, self.count)
            if self._rows is not None:
                values[_ROWS] = np.full(len(numbers), self._rows.rows)
            for group in {path.split("/")[0] for path in values}:
                values[f"{group}/draw"] = numbers
            manifest = folder.store.append(self._stored, values, manifest)
        if moments is not None:
            folder.store.write("moments", moments)
        folder.store.publish(self.count)
        self.manifest = manifest
        self.forget()

    def cut(self, folder: RunFolder, count: int) -> None:
        """Drop the draws after a checkpoint."""
        self.count = self._stored = count
        if folder.writes:
            with folder.writing():
                folder.store.publish(count)

    def forget(self) -> None:
        """Drop the waiting draws, which the store or another process has."""
        self._waiting, self._stored, self.waiting_bytes = [], self.count, 0

    def _kept(self, draws: Fields) -> Fields:
        if not self._removed:
            return draws
        sample = {k: x for k, x in draws[self._sample].items() if k not in self._removed}
        return draws | {self._sample: sample}

    def _empty(self, x: Any) -> np.ndarray:
        return np.zeros((self._num_chains, 0, *x.shape), x.dtype)

    def _paths(self, draws: Fields) -> Iterator[tuple[str, Any]]:
        """The arrays by their path in the store, in the order of the leaves."""
        for field in sorted(draws):
            group = "posterior" if field == self._sample else "sample_stats"
            for name, x in _named({field: draws[field]}, self._sample):
                yield f"{group}/{variable_name(name)}", x


def _named(draws: Fields, sample: str) -> Iterator[tuple[str, Any]]:
    """Arrays by name; sample arrays have the names of their sites."""
    for path, x in jax.tree_util.tree_flatten_with_path(draws)[0]:
        words = [
            str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path
        ]
        if words[0] == sample and len(words) > 1:
            words = words[1:]
        name = ".".join(words)
        yield _NAMES.get(name, name), x
