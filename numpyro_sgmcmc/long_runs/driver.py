# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Runs that last for days: :class:`LongRun`."""

from collections.abc import Callable
from importlib import import_module
import math
import os
from pathlib import Path
import time
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
from numpyro.util import is_prng_key
from tqdm.auto import tqdm
import xarray as xr

from numpyro_sgmcmc.data import failure_of
from numpyro_sgmcmc.inference_data import plate_dims
from numpyro_sgmcmc.long_runs import identity
from numpyro_sgmcmc.long_runs.draws import Draws
from numpyro_sgmcmc.long_runs.interrupts import first_interrupt_waits
from numpyro_sgmcmc.long_runs.moments import Moments, no_moments, summary_of
from numpyro_sgmcmc.long_runs.moments import with_draws as moments_with
from numpyro_sgmcmc.long_runs.monitor import Monitored, least_size, places
from numpyro_sgmcmc.long_runs.monitor import with_draws as monitored_with
from numpyro_sgmcmc.long_runs.processes import agreed, together, watched
from numpyro_sgmcmc.long_runs.program import Program, joined, separated
from numpyro_sgmcmc.long_runs.records import Record
from numpyro_sgmcmc.minibatch import as_arrays, first_rows_of, full_data
from numpyro_sgmcmc.record import attributes, stein_of
from numpyro_sgmcmc.rows import site_shapes

#: What a call of the program is to take, and the bytes of draws that wait to be written.
_SECONDS, _WAITING_BYTES = 0.5, 32_000_000

#: Targets are looked at after so many draws, and then whenever there are so many times more,
#: as long as that takes no more than a small part of the time.
_FEWEST_DRAWS, _GROWTH, _SHARE = 64, 1.3, 0.05


class LongRun(MCMC):
    """
    NumPyro's ``MCMC`` for runs that do not fit into memory, or into the life of a process.

    Constructor, :meth:`run` and results are those of ``numpyro.infer.MCMC``, and the draws are the
    same. They are taken in chunks of about half a second by one compiled program whose data are
    arguments. With ``store`` draws go to a Zarr store on disk, which ArviZ can open at any moment,
    and every so often the state of all chains goes to a checkpoint in it: the same script, run
    again after a kill, goes on from there, and gives the draws that a run without interruption
    gives. A run that was finished gives its draws at once, and with a larger ``num_samples`` it is
    extended.

    - *What is kept.* Draws are read from the store when they are asked for. Sites left out by
      ``extra_fields=("~z.w",)`` are not stored; :attr:`moments` has the mean, standard deviation
      and R-hat of all sites.
    - *When it stops.* After ``num_samples``, or before for a reason that :attr:`stopped` names:
      ``max_time``, ``target_ess``, ``target_mcse``, or Ctrl-C, after the current chunk (pressed
      again, at once). Everything that was drawn is then there.
    - *Whether it is the same run.* A checkpoint of another key, kernel, model, data or number of
      chains is refused, and so is one that is damaged; the error says what differs.

    :param MCMCKernel sampler: a kernel of this package, or any other.
    :param int num_warmup: number of samples of the warm-up, which are not stored.
    :param int num_samples: number of samples after it.
    :param store: path of the folder of the store, for instance ``"run.zarr"``; None keeps draws
        in memory, without checkpoints.
    :param bool resume: whether to go on with what is in the store. ``False`` begins anew, and
        renames a store that is there to ``run.zarr.1``, or the next that is free.
    :param float max_time: stop after so many seconds of this call, everything included.
    :param float target_ess: stop when the smallest bulk effective sample size is so large.
    :param float target_mcse: stop when the largest Monte-Carlo standard error of a mean is so
        small, in units of the posterior standard deviation. Targets look at 100 values at most,
        spread over the sites.
    :param float checkpoint_every: seconds between checkpoints.
    :param int rank: number of leading directions of the covariance that :attr:`moments` keeps.
    :param mcmc: the other arguments of ``MCMC``: ``num_chains``, ``thinning``, ``chain_method`` (by
        its name), ``postprocess_fn``, ``progress_bar``; the data are always arguments of the
        program, as with ``jit_model_args=True``. Chains on several devices advance together,
        sequential ones in turn.
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
        self._asked = num_samples
        self._draws: Draws | None = None
        super().__init__(sampler, num_warmup=num_warmup, num_samples=num_samples, **mcmc)
        if not isinstance(self.chain_method, str):
            raise ValueError(
                "`LongRun` needs chain_method='sequential', 'vectorized' or 'parallel'; got"
                f" {self.chain_method!r}."
            )
        for name, value in (
            ("max_time", max_time), ("target_ess", target_ess), ("target_mcse", target_mcse),
        ):  # fmt: skip
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be a positive number; got {value!r}.")
        if checkpoint_every < 0:
            raise ValueError(f"`checkpoint_every` must not be negative; got {checkpoint_every!r}.")
        if not isinstance(rank, int) or rank < 0:
            raise ValueError(f"`rank` must be a whole number, 0 or more; got {rank!r}.")
        if store is not None:
            import_module("numpyro_sgmcmc.long_runs.store")  # without zarr, say so at once
        self._path = None if store is None else Path(store).absolute()
        self._resume = resume
        self._max_time, self._target_ess, self._target_mcse = max_time, target_ess, target_mcse
        self._checkpoint_every, self._rank = checkpoint_every, rank
        self._moments: tuple[Moments, dict[str, list[str]]] | None = None
        self._stopped: str | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples: those drawn if the run has stopped before its end."""
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
        Why the latest run ended before ``num_samples``: ``"max_time"``, ``"target_ess"``,
        ``"target_mcse"``, ``"interrupt"``, or None.
        """
        return self._stopped

    @property
    def moments(self) -> xr.Dataset:
        """
        Moments of all draws of all sites, also of those whose draws are not kept, in double
        precision; see :func:`numpyro_sgmcmc.long_runs.moments.summary_of`.
        """
        if self._moments is None:
            raise ValueError("There are no draws yet: call `run` first.")
        return summary_of(*self._moments)

    @property
    def _states(self) -> Any:
        # what `MCMC` keeps in memory is read when it is asked for
        if self._given_states is not None or self._draws is None:
            return self._given_states
        return self._draws.read()

    @_states.setter
    def _states(self, states: Any) -> None:
        self._given_states = states

    def _get_states_flat(self) -> Any:
        states = self._states if self._states_flat is None else None
        if states is None:
            return self._states_flat
        return jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), states)

    def run(
        self,
        rng_key: Array,
        *args: Any,
        extra_fields: tuple[str, ...] | list[str] = (),
        init_params: Any = None,
        **kwargs: Any,
    ) -> None:
        """
        Draws until there are ``num_samples``, or until a reason to stop; arguments are those of
        ``MCMC.run``.

        :raises ValueError: if the store holds another run, or is damaged.
        """
        begin = time.monotonic()
        init_params = jax.tree.map(
            lambda x: lax.convert_element_type(x, jnp.result_type(x)), init_params
        )
        self._args, self._kwargs = args, kwargs
        self._states = self._states_flat = None
        self._draws, self._stopped = None, None
        names, removed = _fields_of(self, extra_fields)
        lower, upper = self._bounds()
        skipped = lower + (upper - lower) % self.thinning
        arguments = as_arrays((args, kwargs))
        keys = rng_key
        if self.num_chains > 1 and is_prng_key(rng_key):
            keys = random.split(rng_key, self.num_chains)
        # what a warm-up of its own gives is its last state
        path = None if self._collection_params["phase"] == "warmup" else self._path
        with Record(path, self._resume) as record, watched(record.folder):
            found = record.checkpoint
            about: dict[str, Any] = {}
            if path is not None:
                about = self._identity(arguments, rng_key, init_params, extra_fields)
            if found is not None:
                if record.writes:
                    record.check(about, self._asked // self.thinning)
                if found["tuning"] is not None:
                    self.sampler.adopt_tuning(found["tuning"])
            states = self._started(keys, init_params, arguments, found)
            program = Program(
                self.sampler, self.postprocess_fn, names, *arguments,
                method=self.chain_method, num_chains=self.num_chains, thinning=self.thinning,
                states=states, num_draws=(upper - lower) // self.thinning,
            )  # fmt: skip
            draws = self._draws = Draws(program.shapes, names[0], removed, self.num_chains)
            sites = draws.sites_of(program.shapes)
            dims = _dims_of(self.sampler, program.shapes[names[0]], arguments)
            if path is not None:
                draws.begin_store(record, dims, (upper - lower) // self.thinning)
            shapes = {name: x.shape for name, x in sites.items()}
            progress = Progress(
                done=0,
                states=states,
                moments=no_moments(shapes, self.num_chains, self._rank),
                monitored=None,
                seconds=0.0,
            )
            if found is not None:
                progress = Progress(**found["progress"], states=states)
                draws.cut(record, found["draws"])
            run = _Run(
                self, record, about, program, draws, progress,
                total=upper, skipped=skipped, dims=dims, begin=begin,
            )  # fmt: skip
            try:
                self._stopped = run.advance()
            finally:
                self._last_state = joined(run.progress.states)
                self._moments = (run.progress.moments, dims)
                self._set_collection_params()
            run.finish()

    def _bounds(self) -> tuple[int, int]:
        """After how many samples they are kept, and after how many the run ends."""
        if self._collection_params["phase"] == "warmup":
            return self._collection_params["lower"], self._collection_params["upper"]
        if self._warmup_state is not None:
            return 0, self._asked
        return self.num_warmup, self.num_warmup + self._asked

    def _identity(
        self, arguments: tuple[tuple, dict], rng_key: Array, init_params: Any, extra_fields: Any
    ) -> dict[str, Any]:
        """What makes this run the same one in another process."""
        found = identity.of_run(self.sampler, arguments, rng_key, init_params, self._warmup_state)
        return found | {
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
        """The states of the chains before their first sample, or those of the checkpoint."""
        args, kwargs = arguments
        alone = self.num_chains == 1 or self.chain_method == "vectorized"
        if init_params is not None and self.num_chains > 1:
            chains = {jnp.shape(x)[0] for x in jax.tree.leaves(init_params)}
            if chains != {self.num_chains}:
                raise ValueError(
                    "`init_params` must have the same leading dimension as `num_chains`."
                )

        def started(key: Array, params: Any) -> Any:
            state = self.sampler.init(
                key, self.num_warmup, params, model_args=args, model_kwargs=kwargs
            )
            # in a loop no type may be weak, to become another one
            return jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), state)

        def of_chain(k: int) -> tuple[Array, Any]:
            return jax.tree.map(lambda x: x[k], (rng_key, init_params))

        if self._warmup_state is not None:
            if getattr(self.sampler, "_sample_fn", None) is None:
                started(*((rng_key, init_params) if alone else of_chain(0)))
            self.sampler.postprocess_fn(args, kwargs)  # refuses other data than those of the state
            key = rng_key[0] if self.sampler.is_ensemble_kernel else rng_key
            state = self._warmup_state._replace(rng_key=key)
        elif alone:
            state = started(rng_key, init_params)
        else:
            count = 1 if found is not None else self.num_chains
            states = [started(*of_chain(k)) for k in range(count)]
            state = joined(states * (self.num_chains // count))
        if found is not None:
            state = found.pop("restored")(state)
        return separated(state, self.chain_method, self.num_chains, arguments)


class Progress(NamedTuple):
    """
    How far a run has come.

    - **done** - samples taken, warm-up included.
    - **states** - states of the chains.
    - **moments** - of all draws.
    - **monitored** - draws of a few parameters.
    - **seconds** - that it took so far, in all processes.
    """

    done: int
    states: list
    moments: Moments
    monitored: Monitored | None
    seconds: float


class _Run:
    """A run on its way; what it shows, writes and decides."""

    def __init__(
        self,
        mcmc: LongRun,
        record: Record,
        about: dict[str, Any],
        program: Program,
        draws: Draws,
        progress: Progress,
        *,
        total: int,
        skipped: int,
        dims: dict[str, list[str]],
        begin: float,
    ) -> None:
        self.mcmc, self.record, self.about, self.program = mcmc, record, about, program
        self.draws, self.progress, self.dims = draws, progress, dims
        self.total, self.skipped, self.begin = total, skipped, begin
        self.before = progress.seconds
        self.where = places({k: x.shape for k, x in draws.sites_of(program.shapes).items()})
        self.committed = -math.inf
        #: seconds for a call without samples, for a sample, and samples of the latest call
        self.call, self.each, self.latest = 0.0, 0.0, 1
        #: after how many draws, and when, the targets are looked at next
        self.look, self.look_after = _FEWEST_DRAWS, 0.0
        self.judged = 0

    def advance(self) -> str | None:
        """Draws until the end, or gives the reason to stop before."""
        mcmc = self.mcmc
        if self.progress.done < self.total:
            self.commit()  # what the tuning has found is not to be lost
            self.program.compile()
            start = time.perf_counter()
            self.program(self.progress.states, 0, 1)
            self.call = time.perf_counter() - start
        hidden = not mcmc.progress_bar or jax.process_index() > 0
        done = self.progress.done
        with (
            first_interrupt_waits() as interrupted,
            tqdm(total=self.total, initial=done, unit="sample", disable=hidden) as bar,
        ):
            while self.progress.done < self.total:
                reason, count = agreed(self.reason(interrupted), self.planned())
                if reason:
                    if reason == "interrupt":
                        self.say_interrupted()
                    return reason
                self.chunk(count)
                self.show(bar)
        return None

    def chunk(self, count: int) -> None:
        """About so many samples, by one call of the program."""
        progress, thinning = self.progress, self.mcmc.thinning
        left = self.skipped - progress.done
        if left > 0:
            number, kept = min(count, left), 0
        else:
            # of the way from one draw to the next
            gone = -left % thinning
            number = min(count, thinning - gone)
            kept = int(number == thinning - gone)
            if gone == 0 and kept:
                kept = min(count // thinning, self.program.capacity)
                number = kept * thinning
        single = thinning == 1
        segments, steps = (number, 1) if single else (max(1, kept), number // max(1, kept))
        start = time.perf_counter()
        try:
            states, draws = self.program(progress.states, segments, steps)
        except BaseException as error:
            # not what the failed call did, and everything before it
            self.commit()
            if unreadable := failure_of((self.mcmc._args, self.mcmc._kwargs)):
                raise unreadable from error
            raise
        took = time.perf_counter() - start
        # what a call costs by itself says nothing of longer ones
        self.each, self.latest = max(took - self.call, 0.1 * took) / number, number
        moments, monitored = progress.moments, progress.monitored
        if kept:
            sites = self.draws.sites_of(draws)
            moments = moments_with(moments, sites)
            monitored = monitored_with(monitored, sites, self.where, self.target_size)
            self.draws.add(draws)
        seconds = self.before + time.monotonic() - self.begin
        self.progress = Progress(progress.done + number, states, moments, monitored, seconds)
        due = time.monotonic() - self.committed >= self.mcmc._checkpoint_every
        if due or self.draws.waiting_bytes > _WAITING_BYTES:
            self.commit()

    def planned(self) -> int:
        """How many samples the next call is to take."""
        left = self.total - self.progress.done
        if not self.each:
            return 1
        seconds = _SECONDS
        if self.mcmc._max_time is not None:
            seconds = min(seconds, self.mcmc._max_time - (time.monotonic() - self.begin))
        return max(1, min(left, int(seconds / self.each), 10 * self.latest))

    @property
    def target_size(self) -> float:
        """The effective sample size that is asked for, whatever it is of."""
        mcse = self.mcmc._target_mcse
        return max(self.mcmc._target_ess or 0.0, 0.0 if mcse is None else mcse**-2)

    def reason(self, interrupted: Callable[[], bool]) -> str:
        """Why to stop now, or an empty word."""
        mcmc, progress = self.mcmc, self.progress
        if interrupted():
            return "interrupt"
        now = time.monotonic()
        if mcmc._max_time is not None and self.each and now - self.begin >= mcmc._max_time:
            return "max_time"
        draws, monitored = self.draws.count, progress.monitored
        if not self.target_size or monitored is None or draws < self.look or now < self.look_after:
            return ""
        found = ""
        if mcmc._target_ess is not None and least_size(monitored, "bulk") >= mcmc._target_ess:
            found = "target_ess"
        elif (
            mcmc._target_mcse is not None and least_size(monitored, "mean") >= mcmc._target_mcse**-2
        ):
            found = "target_mcse"
        took = time.monotonic() - now
        self.look, self.look_after = int(_GROWTH * draws), now + took + took / _SHARE
        return found

    def show(self, bar: tqdm) -> None:
        """The progress bar, and what the kernel says of the draws."""
        done = self.progress.done
        bar.set_description("warmup" if done <= self.skipped else "sample", refresh=False)
        kernel = self.mcmc.sampler
        if not bar.disable:
            state = self.progress.states[0]
            bar.set_postfix_str(_diagnostics(kernel, state), refresh=False)
        bar.update(done - bar.n)
        if self.draws.count >= 2 * self.judged or done == self.total:
            self.judged = max(self.draws.count, 1)
            if hasattr(kernel, "judge"):
                kernel.judge(joined(self.progress.states))

    def say_interrupted(self) -> None:
        kept = "" if self.record.path is None else " The same script goes on where it was."
        warnings.warn(
            f"The run was interrupted after {self.progress.done:,} of {self.total:,} samples, which"
            f" are kept.{kept}",
            stacklevel=4,
        )

    def commit(self) -> None:
        """Writes what has been drawn, in an order in which nothing is lost or seen in part."""
        self.committed = time.monotonic()
        if self.record.path is None:
            return
        progress = self.progress
        if not self.record.writes:
            self.draws.forget()
            return
        moments = summary_of(progress.moments, self.dims) if progress.moments.draws else None
        self.draws.write(self.record, moments)
        self.record.save(
            self.about,
            draws=self.draws.count,
            state=joined(progress.states),
            tuning=getattr(self.mcmc.sampler, "tuning", None),
            progress={k: v for k, v in progress._asdict().items() if k != "states"},
        )

    def finish(self) -> None:
        """The facts of the run go to the store."""
        if self.record.writes:
            stein = stein_of(self.mcmc)
            found = attributes(self.mcmc, stein, self.progress.seconds)
            self.record.store.describe(
                {
                    name: value.item() if isinstance(value, np.generic) else value
                    for name, value in found.items()
                    if not isinstance(value, float | np.floating) or math.isfinite(value)
                }
            )
        if self.record.path is not None:
            self.commit()
            together()  # so that all of them can read


def _diagnostics(kernel: Any, state: Any) -> str:
    if hasattr(kernel, "judge") or not np.ndim(getattr(state, "i", 0)):
        return kernel.get_diagnostics_str(state)
    return ""


def _fields_of(mcmc: LongRun, extra_fields: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields to collect, and the sites to leave out, as ``MCMC.run`` reads them."""
    if not isinstance(extra_fields, tuple | list):
        raise ValueError(f"`extra_fields` must be a tuple or a list; got {extra_fields!r}.")
    names = dict.fromkeys((mcmc._sample_field, *mcmc._default_fields, *extra_fields))
    mark = f"~{mcmc._sample_field}."
    removed = tuple(name.removeprefix(mark) for name in names if name.startswith(mark))
    return tuple(name for name in names if not name.startswith(mark)), removed


def _dims_of(kernel: Any, sample: Any, arguments: tuple[tuple, dict]) -> dict[str, list[str]]:
    """Names of the dimensions of sites, from the model where there is one."""
    model = getattr(kernel, "model", None)
    if model is None or not isinstance(sample, dict):
        return {}
    # minibatches have the same dimensions, and reading all rows could take hours
    model = first_rows_of(model.fn) if isinstance(model, full_data) else model
    draws = {k: jax.ShapeDtypeStruct((1, 1, *x.shape), x.dtype) for k, x in sample.items()}
    return plate_dims(site_shapes(model, draws, *arguments))
