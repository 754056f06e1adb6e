"""Watching a communicator's collectives for links and ranks that are slow, and planning around slow links.

Ranks measure every collective of `LEAST_BYTES` or more: how long it takes, and, where the back end can
(`MeasuresLinks`), what each link from them has carried in how much busy time. Every `EVERY` of them, or more where they
are quick, they tell each other before the next one begins, and each judges for itself what is slow
(`collectives.communicator.what_is_slow`). Small collectives are neither measured nor held up.

With that the plan may change, where the model says that another is more than `GAIN` times as fast on the machine as it
is now believed to be. What a plan still sends over a slow link tells when it is fast again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from collectives.backends.backend import Backend, GathersTexts, LinkShare, LinkUse, MeasuresLinks
from collectives.communicator.what_is_left import Change, Company, plan_of_rest
from collectives.communicator.what_is_slow import Carried, Judge, SlowLink, SlowRank, Told
from collectives.execution.execution import Execution
from collectives.execution.request import Request
from topoplan.errors import InfeasibleError, RefusedError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import Plan, Plans
from topoplan.topology import Topology

EVERY, MOST, LOOK_SECONDS = 4, 64, 0.2
"""Collectives that are measured between two judgements: at least and at most, and so many seconds of them."""

LEAST_BYTES = 1 << 20
"""Of a buffer; smaller collectives take what messages take, whatever links can do."""

LEAST_BUSY = 0.1
"""Seconds that a link must have been busy for its rate to count, or a slow one would have been for what it carried:
25 ticks of the kernel's clock, as a rule."""

TICK = 0.004
"""Seconds that a link was busy at least: shorter times are not seen."""

GAIN = 1.1
"""How many times faster another plan must be."""

MODES = ("ignore", "report", "replan")
"""What ``on_slow`` may be."""

MUTUAL = ("allreduce", "allgather", "reduce_scatter", "alltoall")
"""Collectives that no rank ends before the last has begun, so that who needs little time has come late."""

Queue = tuple[int, int, str]


@dataclass(slots=True)
class _Window:
    """What a link has carried since that was told: bytes, busy seconds, and what the plan counts on for them."""

    share: LinkShare
    nbytes: int = 0
    busy: float = 0.0
    due: float = 0.0

    def add(self, nbytes: int, busy: float, share: LinkShare) -> None:
        """Of one more collective."""
        self.nbytes += nbytes
        self.busy += busy
        self.due += nbytes / (share.rate * 1e9)
        self.share = share

    def counts(self, reached: float | None) -> bool:
        """Whether it was busy for long enough; the rates of slow links are `reached` so many times as believed."""
        return self.busy >= LEAST_BUSY or (reached is not None and self.due / reached >= LEAST_BUSY)

    def carried(self, source: str, destination: str, channel: str) -> Carried:
        """That, from one GPU to another."""
        rate = self.nbytes / max(self.busy, TICK) / 1e9
        planned = self.nbytes / self.due / 1e9 if self.nbytes else self.share.rate
        return Carried(source, destination, channel.partition("#")[0], rate, planned, self.share.wires)


class Watch:
    """What is measured of a communicator's collectives.

    Parameters
    ----------
    execution : Execution
        What runs them.
    plans : Plan or SizePlans
        Of the machine as it was planned.
    company : Company
        Whose they are.
    replans : bool
        Whether to plan around slow links.
    """

    def __init__(self, execution: Execution[Any], plans: Plans, company: Company, *, replans: bool) -> None:
        self.execution = execution
        self._first = plans
        self._company = company
        self._replans = replans
        backend = execution.backend
        self._links = backend if isinstance(backend, MeasuresLinks) and backend.measures else None
        self._judge = Judge(plans.topology, plans.ranks)
        self._shares: dict[str, Mapping[Queue, LinkShare]] = {}
        self._windows: dict[Queue, _Window] = {}
        self._used: Mapping[Queue, LinkUse] = {}
        self._used_at = -1
        self._seconds: list[float] = []
        self._number = self._judged = 0
        self._every = EVERY

    @property
    def slow(self) -> tuple[SlowLink | SlowRank, ...]:
        """What is slow by now."""
        return self._judge.slow

    @property
    def company(self) -> Company:
        """Who works together, over links as slow as they are believed to be where that is planned with."""
        return self._company.with_slow(self._judge.believed) if self._replans else self._company

    def measures(self, request: Request[Any]) -> bool:
        """Whether a collective is one of those that are measured; all ranks say the same."""
        return request.kind.nbytes >= LEAST_BYTES

    @property
    def due(self) -> bool:
        """Whether to `look` before the next collective that is measured; all ranks say the same."""
        return self._number - self._judged == self._every

    def run(self, request: Request[Any]) -> Any:
        """Run a collective and measure it."""
        execution, kind = self.execution, request.kind
        plan = execution.plan_of(kind)
        if self._links is not None and self._used_at != execution.calls:
            self._used = self._links.link_uses()
        began = time.perf_counter()
        result = execution.run(request)
        # ranks have waited for each other before the first, when they told each other what they measured
        if kind.collective in MUTUAL and self._number > self._judged:
            self._seconds.append(time.perf_counter() - began)
        self._number += 1
        if not plan.exchanges:
            self._add_links(plan)
        return result

    def look(self, current: Plans) -> tuple[Plans, list[str]]:
        """Tell the others what was measured, judge, and plan anew where that is worth it; all ranks must call it.

        Returns
        -------
        (plans, news)
            The current plan or another one, and what to note.

        Raises
        ------
        BackendError
            Another rank failed.
        """
        first, self._judged = self._judged + 1, self._number
        told = self._tell()
        longest = max(sum(one.seconds) for one in told)
        if longest:
            self._every = min(MOST, max(EVERY, ceil(LOOK_SECONDS * len(told[0].seconds) / longest)))
        news = self._judge.hear(told, first)
        if news:  # what was counted on, and is yet to be told, was another share
            self._shares.clear()
            self._windows.clear()
        if not news or not self._replans:
            return current, news
        try:
            made = self.execution.planned(
                lambda: self._better(current),
                collective=current.collective,
                root=current.root,
                about=Change.of(slow_links=self._judge.believed).digest,
            )
        except RefusedError:
            raise
        except (InfeasibleError, UsageError) as error:
            return current, [*news, f"the plan stays, since there is no other: {error}"]
        if made.digest == current.digest:
            return current, [
                *news,
                f"the plan stays: no other is {GAIN - 1:.0%} faster on what links have now",
            ]
        machine = self._judge.machine
        rates = f"{_rate(made, machine):.4g} GB/s where the plan before has {_rate(current, machine):.4g}"
        return made, [*news, f"planned anew for that: {rates}"]

    def _better(self, current: Plans) -> Plans:
        """The plan for the machine as it is believed to be, or the current one where that is nearly as good."""
        machine, believed = self._judge.machine, self._judge.believed
        made = plan_of_rest(self._first, Change.of(slow_links=believed)) if believed else self._first
        return made if _rate(made, machine) > GAIN * _rate(current, machine) else current

    def _tell(self) -> list[Told]:
        """Exchange what was measured with all ranks; what was told is measured anew."""
        vertices, carried, rest = self._first.plans[-1].vertices, [], {}
        for queue, one in sorted(self._windows.items()):
            source, destination, channel = queue
            if one.counts(self._judge.reached(one.share.wires)):
                carried.append(one.carried(vertices[source], vertices[destination], channel))
            else:
                rest[queue] = one
        self._windows = rest
        mine = Told(tuple(self._seconds), tuple(carried))
        self._seconds.clear()
        return [Told.from_json(text) for text in self.execution.gather_texts(mine.to_json())]

    def _add_links(self, plan: Plan) -> None:
        """Add what the links have carried since they were last looked at."""
        if self._links is None:
            return
        before, self._used = self._used, self._links.link_uses()
        self._used_at = self.execution.calls
        shares = self._shares_of(plan)
        for queue, use in self._used.items():
            one = before.get(queue, LinkUse(0, 0.0))
            if queue in shares:
                window = self._windows.setdefault(queue, _Window(shares[queue]))
                window.add(use.nbytes - one.nbytes, use.busy - one.busy, shares[queue])

    def _shares_of(self, plan: Plan) -> Mapping[Queue, LinkShare]:
        """What a plan counts on for its links, as slow as they are believed to be."""
        digest = self.execution.store.key(plan).digest
        if digest not in self._shares:
            assert self._links is not None, "looked at before"
            self._shares[digest] = self._links.link_shares(plan, self._judge.machine)
        return self._shares[digest]


def check_watched(backend: Backend[Any], plans: Plans, *, replans: bool) -> None:
    """Raise where nobody can look for what is slow.

    Raises
    ------
    UsageError
        One process holds all ranks, there are helpers, or links are to be replanned that nobody measures.
    """
    if not isinstance(backend, GathersTexts):
        raise UsageError(
            f"the {backend.name} back end has all ranks in one process, where none is slower than another; "
            "leave on_slow out"
        )
    if any(plan.helpers for plan in plans.plans):
        raise UsageError("a plan with helpers is not watched; leave on_slow out")
    if replans and not (isinstance(backend, MeasuresLinks) and backend.measures):
        raise UsageError(
            f"the {backend.name} back end cannot measure its links here, so there is nothing to plan anew with; "
            "use on_slow='report' to hear of slow ranks, or tcp on Linux"
        )


def _rate(plans: Plans, machine: Topology) -> float:
    """GB/s of a plan, of plans by size of that for large buffers, on a machine with the same links, perhaps slower."""
    plan = plans.plans[-1]
    return float(forest_rate(plan.shards, Fabric(machine, plan.channels)) or 0)
