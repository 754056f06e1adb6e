"""A job of threads: an allgather of texts among them, and what each of them gets or raises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from collectives import Communicator
from collectives.backends.shared.shared_backend import SharedBackend
from collectives.communicator.job_topology import agree_on_job_plan
from collectives.peers.agreement import Gather
from topoplan.plans.plan import Plan

SECONDS = 30.0
"""After which a rank that waits in vain raises instead of hanging."""

Change = Callable[[int, int, list[str]], list[str]]
"""From rank, number of the round and texts to the texts that this rank hears."""


class Meeting:
    """An allgather among threads; ``rounds`` counts them."""

    def __init__(self, size: int, change: Change | None = None) -> None:
        self.size = size
        self.rounds = 0
        self._change = change
        self._barrier = threading.Barrier(size)
        self._texts = [""] * size

    def gather(self, rank: int) -> Gather:
        """The allgather as a rank calls it."""

        def gathered(text: str) -> list[str]:
            self._texts[rank] = text
            if self._barrier.wait(SECONDS) == 0:
                self.rounds += 1
            self._barrier.wait(SECONDS)
            heard = list(self._texts)
            self._barrier.wait(SECONDS)
            return heard if self._change is None else self._change(rank, self.rounds, heard)

        return gathered


def as_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Return the body's result or exception for each rank, a thread each."""
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def of_all(results: list[Any]) -> list[Any]:
    """The results, when no rank failed."""
    for one in results:
        if isinstance(one, BaseException):
            raise one
    return results


def in_shared_memory(
    plan: Plan, work: Callable[[Communicator, int], Any], *, timeout: float = 30.0, **options: Any
) -> list[Any]:
    """What each rank's thread returns, with a communicator of ranks that share memory."""
    size = len(plan.ranks)
    meeting = Meeting(size)

    def one(rank: int) -> Any:
        backend = SharedBackend(meeting.gather(rank), rank=rank, size=size, timeout=timeout)
        with Communicator(plan, backend, **options) as comm:
            return work(comm, rank)

    return of_all(as_threads(size, one))


def plans_of(members: Sequence[dict[str, Any]], meeting: Meeting | None = None) -> list[Plan | Exception]:
    """What `agree_on_job_plan` returns or raises on every rank of a job, given what each rank says."""
    meeting = meeting or Meeting(len(members))

    def one(rank: int) -> Plan | Exception:
        told = {"rank": rank, "size": len(members), **members[rank]}
        try:
            return agree_on_job_plan(meeting.gather(rank), **told)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, range(len(members))))


def plan_of(members: Sequence[dict[str, Any]]) -> Plan:
    """The plan that all ranks of a job get."""
    made = plans_of(members)
    for one in made:
        if isinstance(one, Exception):
            raise one
    plans = [one for one in made if isinstance(one, Plan)]
    assert len({plan.digest for plan in plans}) == 1
    return plans[0]
