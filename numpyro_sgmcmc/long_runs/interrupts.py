# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""A handler of Ctrl-C that lets a run end in good order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import signal
import threading
from typing import Any


@contextmanager
def first_interrupt_waits() -> Iterator[Callable[[], bool]]:
    """
    Context in which the first Ctrl-C only sets a flag.

    The context gives a function that returns the flag. The second Ctrl-C acts as before.
    """
    seen = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals reach the main thread only
        return
    before = signal.getsignal(signal.SIGINT)

    def noticed(number: int, frame: Any) -> None:
        nonlocal seen
        seen = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, noticed)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)
