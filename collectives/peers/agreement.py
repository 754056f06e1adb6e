"""Gather texts from all ranks so that an error of one rank is raised on all of them, and plan on one rank for all.

A job provides an allgather of texts. A rank that fails alone would leave the others waiting in the next round, so an
error between two rounds is sent in the next one, and every rank raises the same.

Planning may take much longer than ranks wait for a step of a collective, and need not take the same time on each. Rank
0 therefore plans alone and the others wait as long as it is busy (`gather_when_done`). Each rank verifies the plan,
and all compare its digest.
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
from topoplan.plans.size_plans import parse_job_plan
from topoplan.plans.verify import verify_all

Gather = Callable[[str], list[str]]
"""An allgather of texts: takes this rank's text and returns those of all ranks, in order; all ranks call it."""

FORMAT = "topoplan.job/1"

BEAT_SECONDS = 0.2  # interval of the heartbeat of a busy rank; timeouts should be a few times as long

KINDS: dict[str, Callable[[str], TopoplanError]] = {
    kind.__name__: kind for kind in (InfeasibleError, PlanError, ProbeError, TopologyError, UsageError)
}
"""Errors of other ranks that are raised as the same class; all others become `TopoplanError`."""


def gather_or_raise(gather: Gather, what: Callable[[], str]) -> list[str]:
    """Return the texts of all ranks, in order of rank; `what` makes this rank's text.

    Raises
    ------
    TopoplanError
        `what` failed on some rank; the lowest is named, with the same text on all ranks.
    UsageError
        A rank makes another call.

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
    """Raise on all ranks if a check fails on one: the error there, elsewhere one that names the rank."""
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
    """Gather as `gather_or_raise`, for a `what` that may take longer than a gather waits for a rank.

    It runs in a thread, and every rank sends heartbeats until it has ended on all ranks. A rank thus waits for a busy
    rank as long as that takes, but for a dead or stopped one no longer than the gather's timeout. After an error,
    `what` ends at its next call of `check_still_wanted`.

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
            except BaseException as error:  # an interrupt: the result of the thread is not needed
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
    """Raise in a thread of `gather_when_done` that an error has made useless; do nothing elsewhere.

    It can be passed as ``progress`` to `topoplan.plan`, so that a thread does not continue to plan.
    """
    work = threading.current_thread()
    if isinstance(work, _BackgroundTask) and work.given_up.is_set():
        raise BackendError("an error of another rank has ended this work")


class _BackgroundTask(threading.Thread):
    """The thread that makes this rank's text."""

    def __init__(self, what: Callable[[], str]) -> None:
        super().__init__(name="topoplan-background-task", daemon=True)
        self.said: list[str] = []
        self.failures: list[BaseException] = []
        self.ended = threading.Event()
        self.given_up = threading.Event()
        self._what = what

    def run(self) -> None:
        try:
            self.said.append(self._what())
        except BaseException as error:
            self.failures.append(error)
        finally:
            self.ended.set()


def _failure_text(error: BaseException) -> dict[str, str]:
    """Return the fields of a rank that failed."""
    text = str(error) if isinstance(error, TopoplanError) else f"{type(error).__name__}: {error}"
    return {"kind": type(error).__name__, "failed": " ".join(text.split())}


def _round(gather: Gather, mine: dict[str, str], failure: BaseException | None) -> list[dict[str, str]]:
    """Return the answers of all ranks, or raise the failure of the lowest failed rank."""
    texts = gather(json.dumps({"format": FORMAT, **mine}))
    if failure is not None and not isinstance(failure, Exception):
        raise failure
    answers = [_read(rank, text) for rank, text in enumerate(texts)]
    for rank, answer in enumerate(answers):
        if "failed" in answer:
            text = answer["failed"]
            made = KINDS.get(answer["kind"], TopoplanError)
            cause = None if isinstance(failure, UsageError) else failure  # the text is the same
            raise made(text if text.startswith("rank ") else f"rank {rank}: {text}") from cause
    return answers


def _read(rank: int, text: str) -> dict[str, str]:
    try:
        answer = json.loads(text)
    except (TypeError, ValueError):
        answer = None
    if not isinstance(answer, dict) or answer.get("format") != FORMAT:
        raise UsageError(
            f"rank {rank} sent {str(text)[:40]!r} while the ranks agree on a plan; call job_plan on all ranks, "
            "with the same version, and give it an allgather that nothing else uses at the time"
        )
    return answer


PLANNER = 0  # the rank that plans

COMPRESSED_FROM = 1 << 14
"""Characters from which a plan file is sent compressed; compressed text never begins as JSON does."""


def plan_on_one_rank(
    gather: Gather, make: Callable[[], Plans], *, rank: int, check: Callable[[Plans], None] | None = None
) -> Plans:
    """Return the plan that one rank makes, verified by all ranks; all must call this.

    `make` runs on the planning rank, in a thread. `check` makes further checks on every rank and raises `PlanError`.
    An error of a rank is raised on all ranks and names it.

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
            held.append(parse_job_plan(decompressed_plan(text)))
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
    """Return a plan file as it is sent: compressed if long, since control planes are made for short messages.

    Examples
    --------
    >>> long = "{}" * COMPRESSED_FROM
    >>> compressed_plan("{}"), len(compressed_plan(long)) < 200, decompressed_plan(compressed_plan(long)) == long
    ('{}', True, True)
    """
    return text if len(text) < COMPRESSED_FROM else base64.b85encode(zlib.compress(text.encode())).decode()


def decompressed_plan(text: str) -> str:
    """Return the plan file of a `compressed_plan`."""
    return text if text.startswith("{") else zlib.decompress(base64.b85decode(text)).decode()
