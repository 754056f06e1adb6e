"""End a command in order by a signal: `KeyboardInterrupt` is raised for it, and again if it was lost.

Python drops an exception that a signal handler raises inside a finalizer or a callback, such as those of imports. Loops
that wait therefore look whether a signal has arrived.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

received: list[signal.Signals] = []
"""The signals that ended the last command, in order."""


def raise_if_interrupted() -> None:
    """Raise `KeyboardInterrupt` if a signal has arrived; not for cleaning up."""
    if received:
        raise _interrupt(received[0])


def _interrupt(number: signal.Signals) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else KeyboardInterrupt(number)


@contextlib.contextmanager
def raising_for_signals() -> Iterator[None]:
    """Raise `KeyboardInterrupt` for SIGINT, SIGTERM and SIGHUP if they would end the process.

    SIGTERM or SIGHUP raise it once, with the number inside; SIGINT each time.
    """
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.getsignal(number) for number in numbers}
    taken = [n for n, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)]

    def end(number: int, frame: object) -> None:
        received.append(signal.Signals(number))
        if number != signal.SIGINT:
            for one in {*taken} - {signal.SIGINT}:
                signal.signal(one, signal.SIG_IGN)
        raise _interrupt(received[-1])

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def end_by_signal() -> None:
    """End this process by the signal that ended its command, if one has, so that shells stop their loops."""
    for number in received:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
