"""Fail one rank of a job at the entrance of a chosen function of the package, in its threads alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tests.support.checkout import ROOT

PACKAGE = f"{ROOT}/collectives/"

UNSEEN = ("in_step.<locals>.call", "CallQueue.submit.<locals>.in_turn", "CallQueue.in_step")
"""The beginning of a call, in its thread and in that of the queue: this package cannot catch errors before."""


class LoneFailure:
    """An error of one rank: raised once, in the threads of `rank_thread`, where a function of the package is entered.

    `armed` lets it be raised. Without a `place` it only records in `seen` which functions are entered, in order.
    """

    def __init__(self, place: str | None = None, error: BaseException | None = None) -> None:
        self.armed = False
        self.raised = False
        self.seen: dict[str, None] = {}
        self._place = place
        self._error = error

    def _traced(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not self.armed or not code.co_filename.startswith(PACKAGE):
            return
        place = f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"
        self.seen[place] = None
        if place == self._place and self._error is not None:
            self.armed, self.raised = False, True
            raise self._error

    @contextmanager
    def rank_thread(self) -> Iterator[None]:
        """Fail in this thread, and in threads that it starts."""
        before, mine, start = sys.gettrace(), threading.get_ident(), threading.Thread.start

        def started(thread: threading.Thread) -> None:
            run = thread.run
            if threading.get_ident() == mine:

                def traced() -> None:
                    sys.settrace(self._traced)
                    run()

                thread.run = traced  # type: ignore[method-assign]
            start(thread)

        threading.Thread.start = started  # type: ignore[method-assign]
        sys.settrace(self._traced)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.Thread.start = start  # type: ignore[method-assign]


def places_of(seen: dict[str, None]) -> list[str]:
    """The functions at whose entrance a rank may fail alone: all but the caller's own call."""
    return [one for one in list(seen)[1:] if not one.endswith(UNSEEN)]


def outcome_of(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the error that it raises, an interrupt too."""
    try:
        return call()
    except BaseException as error:
        return error
