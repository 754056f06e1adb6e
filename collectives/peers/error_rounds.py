"""Rounds in which all ranks of a job say something, and in which an error of one rank is an error of all.

All that is asked of the job is an allgather of texts. A rank that fails on its own would leave the others waiting in
the next round; so what goes wrong between two rounds is told in the next one, and every rank raises the same.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from topoplan.errors import (
    BackendError,
    InfeasibleError,
    PlanError,
    ProbeError,
    TopologyError,
    TopoplanError,
    UsageError,
)

Gather = Callable[[str], list[str]]
"""Takes this rank's text and returns the texts of all ranks in their order; all ranks call it alike."""

FORMAT = "topoplan.job/1"

BEAT_SECONDS = 0.2
"""Seconds between two words of a rank that is busy; a timeout should be a few times as long."""

KINDS: dict[str, Callable[[str], TopoplanError]] = {
    kind.__name__: kind for kind in (InfeasibleError, PlanError, ProbeError, TopologyError, UsageError)
}
"""What a rank raises where another met an error of this name; `TopoplanError` for all others."""


def say_all(gather: Gather, what: Callable[[], str]) -> list[str]:
    """What every rank says, in order of rank.

    Parameters
    ----------
    gather : Gather
    what : callable
        Makes this rank's text; may fail.

    Raises
    ------
    TopoplanError
        ``what`` failed on some rank, the lowest of which is named; the same text on all ranks.
    UsageError
        A rank takes part in something else.

    Examples
    --------
    >>> say_all(lambda text: [text, text], lambda: "here")
    ['here', 'here']
    """
    try:
        mine, failure = {"said": what()}, None
    except Exception as error:
        mine, failure = _failed(error), error
    return [answer["said"] for answer in _round(gather, mine, failure)]


def check_all(gather: Gather, check: Callable[[], object]) -> None:
    """Raise on all ranks where a check fails on one: there what it has raised, elsewhere what names that rank.

    Examples
    --------
    >>> check_all(lambda text: [text, text], lambda: None)
    """
    failures: list[Exception] = []

    def checked() -> str:
        try:
            check()
        except Exception as error:
            failures.append(error)
            raise
        return ""

    try:
        say_all(gather, checked)
    except TopoplanError:
        if failures:
            raise failures[0] from None
        raise


def say_when_done(gather: Gather, what: Callable[[], str]) -> list[str]:
    """As `say_all`, where ``what`` may take longer than a gather waits for a rank.

    It runs in a thread of its own, and until it has ended on all ranks they go on telling each other that they are
    there: so a rank that waits for a busy one waits as long as that takes, and still no longer than the timeout of the
    gather for one that is dead or stopped. Where the rounds end with an error, ``what`` ends when it next calls
    `still_wanted`.

    Examples
    --------
    >>> say_when_done(lambda text: [text, text], lambda: "made")
    ['made', 'made']
    """
    work = _Work(what)
    work.start()
    try:
        while True:
            try:
                work.ended.wait(BEAT_SECONDS)
            except BaseException as error:  # an interrupt: what the thread finds is of no use any more
                work.failures.insert(0, error)
            failure = work.failures[0] if work.failures else None
            mine = _failed(failure) if failure else {"said": work.said[0]} if work.said else {"busy": "yes"}
            answers = _round(gather, mine, failure)
            if all("said" in answer for answer in answers):
                return [answer["said"] for answer in answers]
    finally:
        work.given_up.set()


def still_wanted(report: str = "") -> None:
    """End what a rank does in `say_when_done` where an error has ended the rounds; anywhere else nothing is done.

    It can be given as ``progress`` to `topoplan.plan`, so that a thread does not go on planning for nobody.
    """
    work = threading.current_thread()
    if isinstance(work, _Work) and work.given_up.is_set():
        raise BackendError("an error of another rank has ended what this was for")


class _Work(threading.Thread):
    """The thread in which a rank does what all wait for."""

    def __init__(self, what: Callable[[], str]) -> None:
        super().__init__(name="what all ranks wait for", daemon=True)
        self.said: list[str] = []
        self.failures: list[BaseException] = []
        self.ended = threading.Event()
        self.given_up = threading.Event()
        self._what = what

    def run(self) -> None:
        """Do it."""
        try:
            self.said.append(self._what())
        except BaseException as error:
            self.failures.append(error)
        finally:
            self.ended.set()


def _failed(error: BaseException) -> dict[str, str]:
    """What a rank says that has met an error."""
    text = str(error) if isinstance(error, TopoplanError) else f"{type(error).__name__}: {error}"
    return {"kind": type(error).__name__, "failed": " ".join(text.split())}


def _round(gather: Gather, mine: dict[str, str], failure: BaseException | None) -> list[dict[str, str]]:
    """The answers of all ranks, or what the lowest has failed with, raised."""
    texts = gather(json.dumps({"format": FORMAT, **mine}))
    if failure is not None and not isinstance(failure, Exception):
        raise failure
    answers = [_read(rank, text) for rank, text in enumerate(texts)]
    for rank, answer in enumerate(answers):
        if "failed" in answer:
            text = answer["failed"]
            made = KINDS.get(answer["kind"], TopoplanError)
            raise made(text if text.startswith("rank ") else f"rank {rank}: {text}") from failure
    return answers


def _read(rank: int, text: str) -> dict[str, str]:
    try:
        answer = json.loads(text)
    except (TypeError, ValueError):
        answer = None
    if not isinstance(answer, dict) or answer.get("format") != FORMAT:
        raise UsageError(
            f"rank {rank} says {str(text)[:40]!r} where the ranks agree on a plan; let all ranks call job_plan, "
            "with the same version, and give it an allgather that nothing else uses meanwhile"
        )
    return answer
