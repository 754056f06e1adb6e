"""Rounds in which all ranks of a job say something, and in which an error of one rank is an error of all.

All that is asked of the job is an allgather of texts. A rank that fails on its own would leave the others waiting in
the next round; so what goes wrong between two rounds is told in the next one, and every rank raises the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from topoplan.errors import (
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
    failure: Exception | None = None
    try:
        mine = {"format": FORMAT, "said": what()}
    except Exception as error:
        failure = error
        known = isinstance(error, TopoplanError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        mine = {"format": FORMAT, "kind": type(error).__name__, "failed": " ".join(text.split())}
    answers = [_read(rank, text) for rank, text in enumerate(gather(json.dumps(mine)))]
    for rank, answer in enumerate(answers):
        if "failed" in answer:
            text = answer["failed"]
            made = KINDS.get(answer["kind"], TopoplanError)
            raise made(text if text.startswith("rank ") else f"rank {rank}: {text}") from failure
    return [answer["said"] for answer in answers]


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
