# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Several processes, started by ``jax.distributed.initialize``, that take part in one run.

The first one writes and decides. Where one fails, the others would wait for it for ever, inside a
collective operation that Python cannot interrupt. So each has a file in the folder of the run, in
which a thread writes every few seconds that it is alive, and in the end why it is not; whoever
finds that another one has failed stops, with an error that names it. The folder must be one that
all processes see.
"""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager, suppress
import json
import os
from pathlib import Path
import sys
import threading
import time

import jax
import numpy as np

from numpyro_sgmcmc.long_runs.files import plain, read, write_atomically

#: Seconds between signs of life, without any until a process is given up, and until a process
#: that waits for a failed one is ended.
BEAT, SILENCE, GRACE = 2.0, 25.0, 5.0

#: The reasons to stop, by number.
_REASONS = ("", "max_time", "target_ess", "target_mcse", "interrupt")

#: Words of errors that say that another process has failed.
_OF_OTHERS = ("gloo", "nccl", "mpi", "connection closed", "coordination", "heartbeat")


def agreed(reason: str, count: int) -> tuple[str, int]:
    """
    What all processes do next: what the first says, unless one of them is to stop.

    :param reason: why this process is to stop, or an empty word.
    :param count: how many samples it would take.
    """
    if jax.process_count() == 1:
        return reason, count
    everyone = _gathered([_REASONS.index(reason), count])
    return _REASONS[int(everyone[:, 0].max())], int(everyone[0, 1])


def together(error: BaseException | None = None) -> None:
    """
    Waits for all processes.

    :param error: what went wrong in this one.
    :raises RuntimeError: if something went wrong in another one, naming it.
    """
    if jax.process_count() > 1:
        failed = np.flatnonzero(_gathered([error is not None])[:, 0])
        if error is None and failed.size:
            raise RuntimeError(
                f"Process {failed[0]} has failed, and its error says why: this one cannot go on."
            )
    if error is not None:
        raise error


def _gathered(numbers: list) -> np.ndarray:
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(np.array(numbers, np.int32))).reshape(-1, len(numbers))


@contextmanager
def watched(folder: Path | None) -> Iterator[None]:
    """
    Within it a process that fails ends the others.

    :param folder: the folder of the run, or None for runs that leave nothing.
    :raises RuntimeError: if another process has failed, naming it.
    """
    if folder is None or jax.process_count() == 1:
        yield
        return
    watch = Watch(folder / "processes", jax.process_index(), jax.process_count())
    watch.say("runs")
    together()  # or what is left of an earlier run would be believed
    watch.start()
    try:
        yield
    except BaseException as error:
        atexit.register(_end_at_once)
        text = f"{type(error).__name__}: {error}"
        if not any(word in text.lower() for word in _OF_OTHERS):
            watch.say("failed", text)
            raise
        watch.say("waits")
        culprit = watch.wait_for_culprit(SILENCE + 3 * BEAT)
        if culprit is None:
            watch.say("failed", text)
            raise
        watch.say("stopped", culprit)
        raise RuntimeError(culprit) from error
    else:
        watch.say("done")
    finally:
        watch.stop()


def _end_at_once() -> None:
    """The end of a process in which or beside which one has failed: JAX would wait for minutes."""
    if jax.process_index() == 0:
        # without it the others are ended by JAX, before they can say why
        time.sleep(BEAT + GRACE + 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class Watch:
    """
    The signs of life of all processes.

    :param folder: of the files.
    :param int index: of this process.
    :param int count: of processes.
    """

    def __init__(self, folder: Path, index: int, count: int) -> None:
        file = plain(folder / str(index))
        folder.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # of an earlier run
        self._folder, self._index, self._count = folder, index, count
        self._beats, self._state, self._text = 0, "runs", ""
        self._lock, self._ended = threading.Lock(), threading.Event()
        #: of each process what it said last, and when that was new
        self._seen: dict[int, tuple[dict, float]] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(2 * BEAT)

    def say(self, state: str, text: str = "") -> None:
        """Writes what this process does."""
        with self._lock:
            self._state, self._text = state, text
            self._write()

    def _write(self) -> None:
        self._beats += 1
        content = {"state": self._state, "error": self._text, "beat": self._beats}
        with suppress(OSError):  # where it cannot be written, silence says enough
            write_atomically(self._folder / str(self._index), json.dumps(content).encode())

    def culprit(self) -> str | None:
        """Which of the others has failed, in words, if one has."""
        now = time.monotonic()
        for k in range(self._count):
            if k == self._index:
                continue
            before = self._seen.get(k, ({"state": "runs"}, now))
            try:
                said = json.loads(read(self._folder / str(k)))
                said = {name: said[name] for name in ("state", "error", "beat")}
            except (
                OSError,
                ValueError,
                LookupError,
                TypeError,
            ):  # the folder is gone, or cannot be read just now
                said = before[0]
            self._seen[k] = before if said == before[0] else (said, now)
            since = now - self._seen[k][1]
            if said["state"] == "failed":
                return f"Process {k} has failed: {said['error']}"
            if said["state"] in ("runs", "waits") and since > SILENCE:
                return f"Process {k} has given no sign of life for {since:.0f} seconds"
        return None

    def wait_for_culprit(self, seconds: float) -> str | None:
        """The first that is found within some time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (found := self.culprit()) is not None:
                return found
            time.sleep(0.5)
        return None

    def _watch(self) -> None:
        while not self._ended.wait(BEAT):
            with self._lock:
                self._write()
            found = self.culprit()
            if found is None or self._ended.wait(GRACE):
                continue
            # it waits in a collective operation, which only the end of the process ends
            message = f"{found}. Process {self._index} stops, too; the checkpoint is whole."
            print(message, file=sys.stderr, flush=True)
            os._exit(1)
