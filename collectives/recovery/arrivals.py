"""Report which ranks came late to collectives, how often, and by how much (`Communicator.report`).

A rank waits in each collective until the last rank has come. All of them wait until the same moment, so differences of
these times are differences of arrivals, and no clock is compared with another. A rank is late in a call if it came
more than `MIN_LATE_SECONDS` after the median of the others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from collectives.backends.backend import KEPT_ARRIVALS, Backend
from collectives.recovery.link_monitor import MIN_LATE_SECONDS
from topoplan.errors import UsageError
from topoplan.units import format_seconds


@dataclass(frozen=True, slots=True)
class RankArrivals:
    """How often a rank was late in some collectives, and by how much.

    Attributes
    ----------
    rank : int
    gpu : str
        The device of the rank in the plan.
    late : int
        Calls to which it came late.
    median, longest : float
        Seconds by which it was late in them, behind the median of the other ranks; 0 if it never was.
    waited : float
        Seconds that it has waited for the others in all calls.
    """

    rank: int
    gpu: str
    late: int
    median: float
    longest: float
    waited: float


@dataclass(frozen=True, slots=True)
class ArrivalReport:
    """The arrivals of all ranks in their last collectives, the same on every rank.

    ``str`` of it is a text for people.

    Attributes
    ----------
    calls : int
        Collectives that count.
    ranks : tuple of RankArrivals
        One for each rank, in order.

    Examples
    --------
    >>> waits = [[0.2, 0.2], [0.2, 0.2], [0.0, 0.19999]]
    >>> report = ArrivalReport.of(waits, ["gpu0", "gpu1", "gpu2"])
    >>> print(report)
    arrivals in 2 collectives, 3 ranks
    rank 2 (gpu2): late in 1 (50 %), by 200 ms, at most 200 ms
    >>> report.to_object()["ranks"][2]["late"]
    1
    """

    calls: int
    ranks: tuple[RankArrivals, ...]

    @property
    def late(self) -> tuple[RankArrivals, ...]:
        """The ranks that were late, most often first."""
        return tuple(sorted((one for one in self.ranks if one.late), key=lambda one: (-one.late, one.rank)))

    @classmethod
    def of(cls, waits: Sequence[Sequence[float]], gpus: Sequence[str]) -> ArrivalReport:
        """Return the report of the seconds that each rank has waited in the same collectives.

        `waits` has (ranks, calls) entries. A rank that waits alone is never late.
        """
        waited = np.array(waits, dtype=np.float64).reshape(len(gpus), -1)
        found = []
        for rank, gpu in enumerate(gpus):
            others = np.delete(waited, rank, axis=0)
            behind = np.median(others, axis=0) - waited[rank] if len(others) else np.zeros(waited.shape[1])
            late = behind[behind > MIN_LATE_SECONDS].tolist()
            usual, longest = (median(late), max(late)) if late else (0.0, 0.0)
            found.append(RankArrivals(rank, gpu, len(late), usual, longest, float(waited[rank].sum())))
        return cls(waited.shape[1], tuple(found))

    def to_object(self) -> dict[str, object]:
        """Return it as JSON has it; keys are the names of the fields."""
        return {"calls": self.calls, "ranks": [asdict(one) for one in self.ranks]}

    def __str__(self) -> str:
        lines = [f"arrivals in {self.calls} collectives, {len(self.ranks)} ranks"]
        for one in self.late:
            lines.append(
                f"rank {one.rank} ({one.gpu}): late in {one.late} ({one.late / self.calls:.0%}), by "
                f"{format_seconds(one.median)}, at most {format_seconds(one.longest)}".replace("%)", " %)")
            )
        if not self.late:
            lines.append(f"no rank came more than {format_seconds(MIN_LATE_SECONDS)} after the others")
        return "\n".join(lines)


def own_arrivals(backend: Backend[Any]) -> str:
    """Return the nanoseconds that this rank has waited in calls since the last report, as a text for the others."""
    if backend.arrivals is None:
        where = "in one process" if not backend.one_rank else "on GPUs"
        raise UsageError(
            f"the {backend.name} back end has its ranks {where}, and does not know when each of them comes; use "
            "shared, tcp, mpi or torch on the host"
        )
    return json.dumps(backend.arrivals.taken())


def arrival_report(texts: Sequence[str], gpus: Sequence[str]) -> ArrivalReport:
    """Return the report of the texts of all ranks (`own_arrivals`), of the calls that all of them have."""
    waits = [json.loads(text) for text in texts]
    calls = min(KEPT_ARRIVALS, *map(len, waits))
    return ArrivalReport.of(
        [[one / 1e9 for one in of_rank[len(of_rank) - calls :]] for of_rank in waits], gpus
    )
