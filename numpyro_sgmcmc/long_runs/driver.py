# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Runs that last for days: :class:`LongRun`."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
import os
from pathlib import Path
import time
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key
import xarray as xr

from numpyro_sgmcmc.data.converters import given_key, instance, one_of, path, positive, truth, whole
from numpyro_sgmcmc.data.growing import trimmed
from numpyro_sgmcmc.data.rows_on_disk import on_disk
from numpyro_sgmcmc.long_runs import identity
from numpyro_sgmcmc.long_runs.checkpoint import CHECKPOINT
from numpyro_sgmcmc.long_runs.draws import Draws
from numpyro_sgmcmc.long_runs.effective_size import places
from numpyro_sgmcmc.long_runs.folder import RunFolder
from numpyro_sgmcmc.long_runs.growing import RowsOfRun, check_rows, rows_of_run
from numpyro_sgmcmc.long_runs.moments import Moments, no_moments, summary_of
from numpyro_sgmcmc.long_runs.program import Program, joined, separated
from numpyro_sgmcmc.long_runs.running import Limits, Progress, Running, restored_progress
from numpyro_sgmcmc.posterior.checks.arguments import checked_arrays
from numpyro_sgmcmc.posterior.handlers import first_rows_of, full_data
from numpyro_sgmcmc.posterior.numpyro_private import HostedRun, is_initialised
from numpyro_sgmcmc.results.facts import plate_dims
from numpyro_sgmcmc.results.row_subset import site_shapes

#: Name of the number of samples over which two runs were compared.
COMPARED = "samples compared"


#: Checks of the arguments of ``MCMC``.
_CHECKS: dict[str, Callable] = {
    "num_chains": whole,
    "thinning": whole,
    "progress_bar": truth,
    "chain_method": partial(one_of, options=("sequential", "vectorized", "parallel")),
}


class LongRun(HostedRun):
    """
    NumPyro's ``MCMC`` for runs that do not fit into memory, or into the life of a process.

    Constructor, :meth:`run`, results and draws are equal to ``numpyro.infer.MCMC``. One compiled
    program takes the draws in chunks of about half a second, with the data as arguments. With
    ``store`` the draws go to a Zarr store on disk, which ArviZ can open at any moment. At intervals
    the state of all chains goes to a checkpoint in the store. If the script is killed and runs
    again, it goes on from the checkpoint, and gives the draws of a run without interruption. A
    finished run gives its draws at once, and a larger ``num_samples`` extends it.

    - *Stored draws.* Draws are read from the store when they are needed. Sites left out by
      ``extra_fields=("~z.w",)`` are not stored; :attr:`moments` has the mean, standard deviation
      and R-hat of all sites.
    - *End.* The run ends after ``num_samples``, or earlier for a reason that :attr:`stopped` names:
      ``max_time``, ``target_ess``, ``target_mcse``, or Ctrl-C. Ctrl-C acts after the current chunk,
      and a second one acts at once. All draws so far are then available.
    - *Identity.* A checkpoint of another key, kernel, model, data or number of chains is refused,
      and the error says what differs. A damaged checkpoint is refused too.
    - *Growing rows.* With a :class:`~numpyro_sgmcmc.GrowingRows` and a larger ``num_samples`` a
      store goes on when more rows exist. The field ``rows``, in ``sample_stats`` and in
      ``get_extra_fields()``, has the number of rows that each draw knows. :attr:`first_draw` is the
      first draw that knows all rows.

    :param MCMCKernel sampler: a kernel of this package, or any other.
    :param int num_warmup: number of samples of the warm-up, which are not stored.
    :param int num_samples: number of samples after it.
    :param store: path of the folder of the store, for instance ``"run.zarr"``; None keeps draws
        in memory, without checkpoints.
    :param bool resume: whether to go on with the run in the store. ``False`` begins anew, and
        renames an existing store to ``run.zarr.1``, or the next free name. Other files are not
        renamed.
    :param float max_time: seconds of this call, everything included, after which the run stops.
    :param float target_ess: smallest bulk effective sample size at which the run stops.
    :param float target_mcse: largest Monte-Carlo standard error of a mean at which the run stops,
        in units of the posterior standard deviation. Targets look at 100 values at most, spread
        over the sites.
    :param float checkpoint_every: seconds between checkpoints.
    :param int rank: number of leading directions of the covariance that :attr:`moments` keeps.
    :param mcmc: the other arguments of ``MCMC``: ``num_chains``, ``thinning``, ``chain_method`` (by
        its name), ``postprocess_fn``, ``progress_bar``. The data are always arguments of the
        program, as with ``jit_model_args=True``. Chains on several devices advance together, and
        sequential chains advance in turn.
    :raises ValueError: if an argument has no meaning.
    :raises ImportError: if there is a ``store``, and zarr is not installed.

    **Example:**

    .. doctest::

        >>> import tempfile
        >>> import jax
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro_sgmcmc import SGHMC, LongRun

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (1_000,))
        >>> folder = tempfile.TemporaryDirectory()
        >>> for num_samples in (1_000, 3_000):
        ...     mcmc = LongRun(
        ...         SGHMC(model, step_size=0.005, friction=20.0), num_warmup=500,
        ...         num_samples=num_samples, store=f"{folder.name}/run.zarr",
        ...         progress_bar=False,
        ...     )
        ...     mcmc.run(jax.random.key(1), y)  # the second time from the end of the first
        ...     print(mcmc.get_samples()["mu"].shape)
        (1000,)
        (3000,)
        >>> folder.cleanup()
        >>> abs(mcmc.moments["mu"].sel(statistic="mean") - y.mean()).item() < 0.02
        True
    """

    def __init__(
        self,
        sampler: Any,
        *,
        num_warmup: int,
        num_samples: int,
        store: str | os.PathLike | None = None,
        resume: bool = True,
        max_time: float | None = None,
        target_ess: float | None = None,
        target_mcse: float | None = None,
        checkpoint_every: float = 10.0,
        rank: int = 0,
        **mcmc: Any,
    ) -> None:
        instance("sampler", sampler, MCMCKernel, "a kernel, such as `CCAdL(model)`")
        num_warmup = whole("num_warmup", num_warmup, least=0)
        self._asked = num_samples = whole("num_samples", num_samples)
        self._draws: Draws | None = None
        mcmc = {k: _CHECKS[k](k, x) if k in _CHECKS else x for k, x in mcmc.items()}
        super().__init__(sampler, num_warmup=num_warmup, num_samples=num_samples, **mcmc)
        limits = {"max_time": max_time, "target_ess": target_ess, "target_mcse": target_mcse}
        for name, value in limits.items():
            limits[name] = None if value is None else positive(name, value, infinite=True)
        every = positive("checkpoint_every", checkpoint_every, zero=True)
        if store is not None:
            store = path("store", store).expanduser()
            import_module("numpyro_sgmcmc.long_runs.store")  # an error at once if zarr is missing
        self._path = None if store is None else Path(store).absolute()
        self._resume = truth("resume", resume)
        self._limits = Limits(**limits, checkpoint_every=every)
        self._rank = whole("rank", rank, least=0)
        self._moments: tuple[Moments, dict[str, list[str]]] | None = None
        self._stopped: str | None = None
        self._rows: RowsOfRun | None = None
        self._program: Program | None = None

    @property
    def num_samples(self) -> int:
        """The number of samples; after an early stop the number of samples drawn."""
        drawn = self._draws
        if drawn is None or drawn.count == self._asked // self.thinning:
            return self._asked
        return drawn.count * self.thinning

    @num_samples.setter
    def num_samples(self, value: int) -> None:
        self._asked = value

    @property
    def stopped(self) -> str | None:
        """
        The reason why the latest run ended before ``num_samples``, or None.

        It is ``"max_time"``, ``"target_ess"``, ``"target_mcse"`` or ``"interrupt"``.
        """
        return self._stopped

    @property
    def first_draw(self) -> int:
        """
        The first draw of each chain from the posterior of all rows.

        It is 0, unless rows have come to a :class:`~numpyro_sgmcmc.GrowingRows` since the run was
        begun.
        """
        return 0 if self._rows is None else self._rows.first

    @property
    def moments(self) -> xr.Dataset:
        """
        Moments of all draws of all sites in double precision, for sites without draws too.

        For growing rows they are the moments of the draws after the latest change. See
        :func:`numpyro_sgmcmc.long_runs.moments.summary_of`.
        """
        if self._moments is None:
            raise ValueError("There are no draws yet: call `run` first.")
        return summary_of(*self._moments)

    def stored_draws(self) -> dict[str, Any] | None:
        """The draws so far, read from the store or from memory."""
        return None if self._draws is None else self._draws.read()

    def run(
        self,
        rng_key: Array,
        *args: Any,
        extra_fields: tuple[str, ...] | list[str] = (),
        init_params: Any = None,
        **kwargs: Any,
    ) -> None:
        """
        Draw until there are ``num_samples``, or until a reason to stop.

        The arguments are the arguments of ``MCMC.run``.

        :raises ValueError: if the store holds another run, or is damaged.
        """
        begin = time.monotonic()
        rng_key = given_key(rng_key, self.num_chains)
        init_params = jax.tree.map(
            lambda x: lax.convert_element_type(x, jnp.result_type(x)), init_params
        )
        self.begin(args, kwargs)
        self._draws, self._stopped = None, None
        names, removed = _fields_of(self, extra_fields)
        lower, upper = self._bounds()
        skipped = lower + (upper - lower) % self.thinning
        num_draws = (upper - lower) // self.thinning
        model = getattr(getattr(self.sampler, "method", self.sampler), "model", None)
        arguments = checked_arrays(model, args, kwargs)
        # a separate warm-up returns its last state
        path = None if self.only_warms_up else self._path
        with RunFolder(path, self._resume) as folder:
            content = folder.checkpoint
            begun, arguments = self._rows_of(folder, arguments)
            about = self._about(folder, begun, rng_key, init_params, extra_fields)
            if content is not None and content["tuning"] is not None:
                self.sampler.tuning = content["tuning"]
            with CHECKPOINT.understood(folder.file) if content is not None else nullcontext():
                states = self._started(rng_key, init_params, begun, content)
            program = Program(
                self.sampler, self.postprocess_fn, names, *arguments,
                method=self.chain_method, num_chains=self.num_chains, thinning=self.thinning,
                states=states, num_draws=num_draws,
            ).compiled_as(self._program)  # fmt: skip
            self._program = program
            draws = Draws(program.shapes, names[0], removed, self.num_chains, self._rows)
            self._draws = draws
            dims = _dims_of(self.sampler, program.shapes[names[0]], trimmed(arguments))
            if path is not None:
                draws.begin_store(folder, dims, num_draws)
            shapes = {name: x.shape for name, x in draws.sites_of(program.shapes).items()}
            run = Running(
                self, self._limits, folder, about, program, draws,
                self._progress(folder, states, shapes, skipped),
                total=upper, skipped=skipped, dims=dims, begin=begin, rows=self._rows,
            )  # fmt: skip
            try:
                self._stopped = run.advance()
            finally:
                self.end(joined(run.progress.states))
                self._moments = (run.progress.moments, dims)
            run.finish()

    def _rows_of(self, folder: RunFolder, arguments: tuple) -> tuple[tuple, tuple]:
        """
        The arguments with the rows at the begin of the run, and with the present rows.

        :raises ValueError: if the rows do not begin with the rows of the store.
        """
        content = folder.checkpoint
        if content is None:
            self._rows = rows_of_run(arguments)
            return arguments, arguments
        known = content["known"]
        with CHECKPOINT.understood(folder.file):
            check_rows(self._path, arguments, known, content["rows"])
            if known is None:
                for rows, seen in zip(on_disk(arguments), content["rows"], strict=False):
                    rows.remember(seen)  # rows that were read need not be read again
                return arguments, arguments
            begun, arguments = known.as_begun(arguments), known.as_known(arguments)
            self._rows = known.gone_on(arguments, content["draws"])
            return begun, arguments

    def _about(self, folder: RunFolder, *same: Any) -> dict[str, Any]:
        """
        The facts that identify this run in another process; empty for a run in memory.

        :raises ValueError: if the store has another run.
        """
        if folder.path is None:
            return {}
        content, upper = folder.checkpoint, self._bounds()[1]
        samples = upper if content is None else _compared(folder, content["about"])
        about = self._identity(samples, *same)
        if content is not None and folder.writes:
            folder.check(about, self._asked // self.thinning)
        # an extended run is compared over more samples from now on
        return about if samples == upper else self._identity(upper, *same)

    def _progress(
        self, folder: RunFolder, states: list, shapes: dict[str, tuple[int, ...]], skipped: int
    ) -> Progress:
        """The progress of the run, to which the draws are cut."""
        content, draws = folder.checkpoint, self._draws
        none = no_moments(shapes, self.num_chains, self._rank)
        progress = Progress(0, states, none, None, 0.0)
        if content is None or draws is None:
            return progress
        kept = max(0, content["done"] - skipped) // self.thinning
        with CHECKPOINT.understood(folder.file):
            numbers = sum(map(len, places(shapes).values()))
            progress = restored_progress(content, progress, kept, numbers)
        draws.cut(folder, content["draws"])
        if self._rows is not None and not self._rows.is_as(content["known"]):
            # moments belong to the posterior of these rows
            progress = progress._replace(moments=none, monitored=None)
        return progress

    def _bounds(self) -> tuple[int, int]:
        """The number of samples before draws are kept, and the number at which the run ends."""
        if self.only_warms_up:
            return self.warmup_bounds
        if self.post_warmup_state is not None:
            return 0, self._asked
        return self.num_warmup, self.num_warmup + self._asked

    def _identity(
        self,
        samples: int,
        arguments: tuple[tuple, dict],
        rng_key: Array,
        init_params: Any,
        extra_fields: Any,
    ) -> dict[str, Any]:
        """The facts that identify this run, up to a number of samples, in another process."""
        facts = identity.of_run(
            self.sampler, arguments, samples, rng_key, init_params, self.post_warmup_state
        )
        return facts | {
            COMPARED: samples,
            "num_chains": self.num_chains,
            "num_warmup": self.num_warmup,
            "thinning": self.thinning,
            "num_samples modulo thinning": self._asked % self.thinning,
            "chain_method": self.chain_method if self.num_chains > 1 else "",
            "extra_fields": ", ".join(extra_fields),
            "rank": self._rank,
        }

    def _started(
        self, rng_key: Array, init_params: Any, arguments: tuple[tuple, dict], found: dict | None
    ) -> list:
        """The states of the chains before their first sample, or from the checkpoint."""
        args, kwargs = arguments
        if self.num_chains > 1 and is_prng_key(rng_key):
            rng_key = random.split(rng_key, self.num_chains)
        alone = self.num_chains == 1 or self.chain_method == "vectorized"
        if init_params is not None and self.num_chains > 1:
            chains = {jnp.shape(x)[0] for x in jax.tree.leaves(init_params)}
            if chains != {self.num_chains}:
                raise ValueError(
                    "`init_params` must have a leading axis of length"
                    f" num_chains={self.num_chains}; got lengths {sorted(chains)}."
                )

        def started(key: Array, params: Any) -> Any:
            state = self.sampler.init(
                key, self.num_warmup, params, model_args=args, model_kwargs=kwargs
            )
            # a loop needs types that are not weak, because a weak type may change
            return jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), state)

        def of_chain(k: int) -> tuple[Array, Any]:
            return jax.tree.map(lambda x: x[k], (rng_key, init_params))

        if self.post_warmup_state is not None:
            if not is_initialised(self.sampler):
                started(*((rng_key, init_params) if alone else of_chain(0)))
            self.sampler.postprocess_fn(args, kwargs)  # refuses other data
            key = rng_key[0] if self.sampler.is_ensemble_kernel else rng_key
            state = self.post_warmup_state._replace(rng_key=key)
        elif alone:
            state = started(rng_key, init_params)
        else:
            count = 1 if found is not None else self.num_chains
            states = [started(*of_chain(k)) for k in range(count)]
            state = joined(states * (self.num_chains // count))
        if found is not None:
            state = found.pop("restored")(state)
        return separated(state, self.chain_method, self.num_chains, arguments)


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float | np.integer | np.floating)
    return is_real and not isinstance(value, bool)


def _compared(folder: RunFolder, about: dict[str, Any]) -> int:
    """The number of samples over which the run of a checkpoint was compared."""
    with CHECKPOINT.understood(folder.file):
        samples = about[COMPARED]
        if not _is_number(samples) or not 0 < samples < 2**63 or samples % 1:
            raise TypeError(f"it has no valid `{COMPARED}`")
        return int(samples)


def _fields_of(mcmc: LongRun, extra_fields: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields to collect, and the sites to leave out, as ``MCMC.run`` reads them."""
    if not isinstance(extra_fields, tuple | list):
        raise ValueError(f"`extra_fields` must be a tuple or a list; got {extra_fields!r}.")
    sample_field, others = mcmc.fields
    names = dict.fromkeys((sample_field, *others, *extra_fields))
    mark = f"~{sample_field}."
    removed = tuple(name.removeprefix(mark) for name in names if name.startswith(mark))
    return tuple(name for name in names if not name.startswith(mark)), removed


def _dims_of(kernel: Any, sample: Any, arguments: tuple[tuple, dict]) -> dict[str, list[str]]:
    """Names of the dimensions of sites, from the model if there is one."""
    model = getattr(kernel, "model", None)
    if model is None or not isinstance(sample, dict):
        return {}
    # the dimensions of minibatches suffice, and reading all rows could take hours
    model = first_rows_of(model.fn) if isinstance(model, full_data) else model
    draws = {k: jax.ShapeDtypeStruct((1, 1, *x.shape), x.dtype) for k, x in sample.items()}
    return plate_dims(site_shapes(model, draws, *arguments))
