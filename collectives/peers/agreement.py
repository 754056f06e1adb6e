"""Gather texts from all ranks so that an error of one rank is raised on all of them, and plan on one rank for all.

A job provides an allgather of texts. A rank that fails alone would leave the others waiting in the next round, so
an error between two rounds is sent in the next one, and every rank raises the same.

Planning may take much longer than ranks wait for a step of a collective, and need not take the same time on each.
Rank 0 therefore plans alone and the others wait as long as it is busy (`gather_when_done`). Each rank verifies the
plan, and all compare its digest.
"""

from __future__ import annotations

import base64
import json
import threading
import zlib
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
from topoplan.plans.plan import Plans
from topoplan.plans.size_plans import parse_plan_file
from topoplan.plans.verify import verify_all

Gather = Callable[[str], list[str]]
"""Takes this rank's text and returns the texts of all ranks in their order; all ranks call it alike."""

FORMAT = "topoplan.job/1"

BEAT_SECONDS = 0.2
"""Seconds between two words of a rank that is busy; a timeout should be a few times as long."""

KINDS: dict[str, Callable[[str], TopoplanError]] = {
    kind.__name__: kind for kind in (InfeasibleError, PlanError, ProbeError, TopologyError, UsageError)
}
"""What a rank raises where another met an error of this name; `TopoplanError` for all others."""


def gather_or_raise(gather: Gather, what: Callable[[], str]) -> list[str]:
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
    >>> gather_or_raise(lambda text: [text, text], lambda: "here")
    ['here', 'here']
    """
    try:
        mine, failure = {"said": what()}, None
    except Exception as error:
        mine, failure = _failure_text(error), error
    return [answer["said"] for answer in _round(gather, mine, failure)]


def check_on_all(gather: Gather, check: Callable[[], object]) -> None:
    """Raise on all ranks where a check fails on one: there what it has raised, elsewhere what names that rank.

    Examples
    --------
    >>> check_on_all(lambda text: [text, text], lambda: None)
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
        gather_or_raise(gather, checked)
    except TopoplanError:
        if failures:
            raise failures[0] from None
        raise


def gather_when_done(gather: Gather, what: Callable[[], str]) -> list[str]:
    """As `gather_or_raise`, where ``what`` may take longer than a gather waits for a rank.

    It runs in a thread of its own, and until it has ended on all ranks they go on telling each other that they are
    there: so a rank that waits for a busy one waits as long as that takes, and still no longer than the timeout of the
    gather for one that is dead or stopped. Where the rounds end with an error, ``what`` ends when it next calls
    `check_still_wanted`.

    Examples
    --------
    >>> gather_when_done(lambda text: [text, text], lambda: "made")
    ['made', 'made']
    """
    work = _BackgroundTask(what)
    work.start()
    try:
        while True:
            try:
                work.ended.wait(BEAT_SECONDS)
            except BaseException as error:  # an interrupt: what the thread finds is of no use any more
                work.failures.insert(0, error)
            failure = work.failures[0] if work.failures else None
            mine = (
                _failure_text(failure)
                if failure
                else {"said": work.said[0]}
                if work.said
                else {"busy": "yes"}
            )
            answers = _round(gather, mine, failure)
            if all("said" in answer for answer in answers):
                return [answer["said"] for answer in answers]
    finally:
        work.given_up.set()


def check_still_wanted(report: str = "") -> None:
    """End what a rank does in `gather_when_done` where an error has ended the rounds; anywhere else nothing is done.

    It can be given as ``progress`` to `topoplan.plan`, so that a thread does not go on planning for nobody.
    """
    work = threading.current_thread()
    if isinstance(work, _BackgroundTask) and work.given_up.is_set():
        raise BackendError("an error of another rank has ended what this was for")


class _BackgroundTask(threading.Thread):
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


def _failure_text(error: BaseException) -> dict[str, str]:
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


PLANNER = 0
"""The rank that plans."""

COMPRESSED_FROM = 1 << 14
"""Characters from which on a plan file travels compressed; nothing that is so begins as JSON does."""


def plan_on_one_rank(
    gather: Gather,
    make: Callable[[], Plans],
    *,
    rank: int,
    check: Callable[[Plans], None] | None = None,
) -> Plans:
    """The plan that one rank makes; all ranks must call this.

    Parameters
    ----------
    gather : Gather
    make : callable
        Called on the rank that plans, in a thread.
    rank : int
        This one.
    check : callable, optional
        Further checks of the plan, on every rank; raises `PlanError`.

    Raises
    ------
    TopoplanError
        What ``make`` raises, or what a rank finds wrong: on all ranks, naming the one that failed.

    Examples
    --------
    >>> import topoplan
    >>> plan_on_one_rank(lambda text: [text], lambda: topoplan.plan(topoplan.load("dgx-2")), rank=0).rate
    80.0
    """
    held: list[Plans] = []

    def planned() -> str:
        if rank != PLANNER:
            return ""
        held.append(make())
        return compressed_plan(held[0].to_json())

    text = gather_when_done(gather, planned)[PLANNER]

    def checked() -> str:
        if rank != PLANNER:
            held.append(parse_plan_file(decompressed_plan(text)))
        verify_all(held[0])
        if check is not None:
            check(held[0])
        return held[0].digest

    digests = gather_when_done(gather, checked)
    for other, digest in enumerate(digests):
        if digest != digests[PLANNER]:
            raise PlanError(
                f"rank {other} has plan {digest[:16]} and rank {PLANNER} has {digests[PLANNER][:16]}; "
                "install the same version of topoplan everywhere"
            )
    return held[0]


def compressed_plan(text: str) -> str:
    """A plan file as it travels: a long one compressed, since control planes are made for short messages.

    Examples
    --------
    >>> long = "{}" * COMPRESSED_FROM
    >>> compressed_plan("{}"), len(compressed_plan(long)) < 200, decompressed_plan(compressed_plan(long)) == long
    ('{}', True, True)
    """
    return text if len(text) < COMPRESSED_FROM else base64.b85encode(zlib.compress(text.encode())).decode()


def decompressed_plan(text: str) -> str:
    """The plan file that `compressed_plan` was given."""
    return text if text.startswith("{") else zlib.decompress(base64.b85decode(text)).decode()
