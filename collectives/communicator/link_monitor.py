"""Find slow links and stragglers from measured collectives, alike on all ranks, and replan around slow links.

Ranks measure collectives of `MIN_MONITORED_BYTES` or more: duration, and bytes and busy time of each link where the
back end is `MeasuresLinks`. Every `JUDGEMENT_CALLS` of them they exchange the figures, and each judges the same texts.
Links are compared with each other, since a planned GB/s need not hold where the job runs: a connection is slow below
`SLOW_SHARE` of its planned rate times the median of its kind. The fewest links that explain this are slow
(`topoplan.operate.calibration.slow_links`). A straggler needs less than `SLOW_SHARE` of the others' time: they wait for
it. A finding counts after `CONSECUTIVE_JUDGEMENTS`. A link without measurements for `RETRY_AFTER` judgements is tried
again; after each relapse both take `RETRY_FACTOR` times as long. The plan changes if the model promises more than
`REPLAN_GAIN` times the rate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import ceil
from statistics import median, median_low
from typing import Any

from collectives.backends.backend import Backend, GathersTexts, LinkShare, LinkUse, MeasuresLinks
from collectives.backends.execution import Execution
from collectives.backends.request import Request
from collectives.communicator.recovery import Membership, PlanChange, replan_for_change
from topoplan.errors import InfeasibleError, RefusedError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import SLOWEST, Topology
from topoplan.machine.variants import slow_links
from topoplan.operate.calibration.calibrated_topology import LinkKey
from topoplan.operate.calibration.pair_tests import PairTest
from topoplan.operate.calibration.slow_links import MeasuredPair, SlowClass, attribute_slow_pairs
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import Plan, Plans

SLOW_SHARE = 0.5
"""Of what its peers reach: what is below is slow."""

CONSECUTIVE_JUDGEMENTS = 2
"""Judgements after each other that must find the same."""

RETRY_AFTER = 16
"""Judgements without a word of a slow link, after which it is tried again."""

RETRY_FACTOR = 8
"""Times as many judgements after each other, of either kind, for each time before that a link was slow."""

FEWEST_LINKS = 3
"""Fewest connections over wires of one kind of which one can be slower than the others."""

MIN_LATE_SECONDS = 0.001
"""Seconds by which a rank must be late to be told."""

DIGITS = 4
"""Significant digits of the GB/s that a link is planned with from then on."""


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """What one connection did.

    Parameters
    ----------
    source, destination : str
        Names of the ranks' GPUs.
    channel : str
    rate : float
        GB/s while it had something to carry.
    planned : float
        GB/s that the plan gives it, on the machine as it is believed to be.
    wires : tuple of (source device, destination device, channel)
        The links that it crosses.
    """

    source: str
    destination: str
    channel: str
    rate: float
    planned: float
    wires: tuple[LinkKey, ...]


@dataclass(frozen=True, slots=True)
class RankMeasurements:
    """What one rank measured since the last judgement.

    Parameters
    ----------
    seconds : tuple of float
        That it needed for each collective in which every rank needs something of every other.
    carried : tuple of Carried
        Of its connections that were busy for long enough.
    """

    seconds: tuple[float, ...] = ()
    carried: tuple[LinkMeasurement, ...] = ()

    def to_json(self) -> str:
        """One line."""
        return json.dumps([self.seconds, [astuple(one) for one in self.carried]], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RankMeasurements:
        """Read what `to_json` wrote.

        Examples
        --------
        >>> link = LinkMeasurement("gpu0", "gpu1", "nvlink", 0.5, 25.0, (("gpu0", "gpu1", "nvlink"),))
        >>> one = RankMeasurements((0.5,), (link,))
        >>> RankMeasurements.from_json(one.to_json()) == one
        True
        """
        seconds, carried = json.loads(text)
        return cls(
            tuple(seconds),
            tuple(
                LinkMeasurement(
                    source, destination, channel, rate, planned, tuple((a, b, c) for a, b, c in wires)
                )
                for source, destination, channel, rate, planned, wires in carried
            ),
        )


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A link that is slower than planned.

    Parameters
    ----------
    wire : str
        One direction, such as ``gpu0->gpu3``.
    measured : float
        GB/s of the connections over it while they were busy, the last time that it was judged slow.
    planned : float
        GB/s that the plan's machine said.
    share : float
        What it reaches of that, over what the other links reach of theirs.
    since : int
        Number of the first collective of those in which it was seen; small ones are not counted.
    """

    wire: str
    measured: float
    planned: float
    share: float
    since: int

    def __str__(self) -> str:
        return (
            f"{self.wire}: {self.measured:.3g} GB/s, planned {self.planned:g}: {self.share:.0%} of what other links "
            f"reach, since collective {self.since}"
        )


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank for which the others wait.

    Parameters
    ----------
    rank : int
    gpu : str
    late : float
        Seconds that it comes later than the others, the median over the last collectives.
    since : int
        As in `SlowLink`.
    """

    rank: int
    gpu: str
    late: float
    since: int

    def __str__(self) -> str:
        late = f"{self.late * 1e3:.3g} ms later than the others"
        return f"rank {self.rank} ({self.gpu}): {late}, since collective {self.since}"


class SlowLinkDetector:
    """What is slow by now, of the ranks of a plan.

    Parameters
    ----------
    planned : Topology
        The machine as it was planned.
    gpus : sequence of str
        Of the ranks.

    Attributes
    ----------
    believed : dict of wire to float
        GB/s of the links that are slow, such as ``gpu0->gpu3``.

    Examples
    --------
    Three links, one of which has a tenth of what the others have of their 25 GB/s:

    >>> import topoplan
    >>> judge = SlowLinkDetector(topoplan.load("dgx-1v"), ["gpu0", "gpu1", "gpu2", "gpu3"])
    >>> wires = [("gpu0", "gpu1"), ("gpu0", "gpu2"), ("gpu1", "gpu3")]
    >>> told = [
    ...     RankMeasurements(carried=(LinkMeasurement(*ends, "nvlink", rate, 25.0, ((*ends, "nvlink"),)),))
    ...     for ends, rate in zip(wires, [0.5, 0.49, 0.05])
    ... ]
    >>> judge.hear(told, first=1)
    []
    >>> judge.hear(told, first=5)
    ['gpu1->gpu3: 0.05 GB/s, planned 25: 10% of what other links reach, since collective 1']
    >>> judge.believed
    {'gpu1->gpu3': 2.551}
    """

    def __init__(self, planned: Topology, gpus: Sequence[str]) -> None:
        self.believed: dict[str, float] = {}
        self._planned = planned
        self._gpus = tuple(gpus)
        self._bandwidths = {(link.src, link.dst, link.channel): link.bandwidth for link in planned.links}
        self._links: dict[str, SlowLink] = {}
        self._ranks: dict[int, SlowRank] = {}
        self._low: dict[object, tuple[int, int]] = {}
        self._high: dict[object, tuple[int, int]] = {}
        self._late: dict[object, tuple[int, int]] = {}
        self._unheard: dict[object, tuple[int, int]] = {}
        self._longer: dict[str, int] = {}
        self._healthy: dict[str, float] = {}

    @property
    def machine(self) -> Topology:
        """The machine as it is believed to be."""
        return slow_links(self._planned, self.believed)

    @property
    def slow(self) -> tuple[SlowLink | SlowRank, ...]:
        """Links in order of their names, then ranks."""
        links, ranks = sorted(self._links.items()), sorted(self._ranks.items())
        return (*(one for _, one in links), *(one for _, one in ranks))

    def reached(self, wires: Sequence[LinkKey]) -> float | None:
        """What links reach of the rates that they are believed to have, where one of these is slow; else None.

        Parameters
        ----------
        wires : sequence of (source device, destination device, channel)
            Which a connection crosses.
        """
        slow = [self._healthy[key[2]] for key in wires if f"{key[0]}->{key[1]}" in self.believed]
        return min(slow, default=None)

    def hear(self, told: Sequence[RankMeasurements], first: int) -> list[str]:
        """Judge what all ranks have measured.

        Parameters
        ----------
        told : sequence of Told
            In order of rank.
        first : int
            Number of the first collective that it is about.

        Returns
        -------
        list of str
            What is new of links, which are slow or not any more; `believed` has changed where there is anything.
        """
        self._hear_seconds([one.seconds for one in told], first)
        carried = [one for rank in told for one in rank.carried]
        medians = _median_shares(carried)
        carried = [one for one in carried if one.channel in medians]
        if not carried:
            return []
        self._healthy |= medians
        found = self._blamed(carried)
        heard: set[str] = set()
        news = []
        for key in sorted({key for one in carried for key in one.wires}):
            wire, since = f"{key[0]}->{key[1]}", _first_of_streak(self._low, key, key in found, first)
            heard.add(wire)
            if since is not None:
                del self._low[key]
                news.append(self._slower(wire, key, found[key], since))
            elif wire in self.believed:
                fast, least = (
                    self._as_planned(wire, key, carried),
                    CONSECUTIVE_JUDGEMENTS * self._longer.get(wire, 1),
                )
                if _first_of_streak(self._high, wire, fast, first, least) is not None:
                    news.append(self._not_slow(wire, "is not slow any more"))
        for wire in sorted(self.believed):
            least = RETRY_AFTER * self._longer.get(wire, 1)
            if _first_of_streak(self._unheard, wire, wire not in heard, first, least) is not None:
                news.append(self._not_slow(wire, "has carried nothing for long, and is tried again"))
        return news

    def _blamed(self, carried: Sequence[LinkMeasurement]) -> dict[LinkKey, SlowClass]:
        """The links that make connections slow."""
        results = []
        for one in carried:
            load = dict.fromkeys(one.wires, one.planned)
            test = PairTest(one.source, one.destination, one.channel, one.planned, load)
            # a connection that had more than its share, where others rested, is as good as one that had it
            results.append(MeasuredPair(test, min(one.rate / self._healthy[one.channel], one.planned)))
        verdict = attribute_slow_pairs(results, tolerance=1 - SLOW_SHARE)
        likeliest = [one for part in verdict.alternatives for one in part[0]]
        return {key: one for one in (*verdict.named, *likeliest) for key in one.links}

    def _as_planned(self, wire: str, key: LinkKey, carried: Sequence[LinkMeasurement]) -> bool:
        """Whether a link that is slow has as much again as makes one that is not."""
        shares = [
            one.rate / (one.planned * self._healthy[one.channel]) for one in carried if key in one.wires
        ]
        return self.believed[wire] * max(shares) >= SLOW_SHARE * self._bandwidths[key]

    def _slower(self, wire: str, key: LinkKey, found: SlowClass, since: int) -> str:
        planned, before = self._bandwidths[key], self._links.get(wire)
        now = self.believed.get(wire, planned) * found.rate / found.healthy
        measured = found.rate * self._healthy[key[2]]
        self.believed[wire] = max(SLOWEST, float(f"{now:.{DIGITS}g}"))
        since = since if before is None else before.since
        self._links[wire] = SlowLink(wire, measured, planned, now / planned, since)
        return str(self._links[wire])

    def _not_slow(self, wire: str, why: str) -> str:
        self._high.pop(wire, None)
        self._unheard.pop(wire, None)
        self._longer[wire] = RETRY_FACTOR * self._longer.get(wire, 1)
        del self.believed[wire], self._links[wire]
        return f"{wire} {why}"

    def _hear_seconds(self, seconds: Sequence[Sequence[float]], first: int) -> None:
        """Who came late to every collective; ranks have counted the same."""
        each = [(median(of_one), of_one) for of_one in zip(*seconds, strict=True)]
        if not each:
            return
        for rank, gpu in enumerate(self._gpus):
            late = median(usual - of_one[rank] for usual, of_one in each)
            always = all(of_one[rank] < SLOW_SHARE * usual for usual, of_one in each)
            since = _first_of_streak(self._late, rank, always and late >= MIN_LATE_SECONDS, first)
            if since is None:
                self._ranks.pop(rank, None)
            else:
                self._ranks[rank] = SlowRank(rank, gpu, late, since)


def _first_of_streak(
    counted: dict[object, tuple[int, int]],
    what: object,
    seen: bool,
    first: int,
    least: int = CONSECUTIVE_JUDGEMENTS,
) -> int | None:
    """The first collective since which something was seen in all judgements, once these are so many."""
    if not seen:
        counted.pop(what, None)
        return None
    times, since = counted.get(what, (0, first))
    counted[what] = times + 1, since
    return since if times + 1 >= least else None


def _median_shares(carried: Sequence[LinkMeasurement]) -> dict[str, float]:
    """What connections reach of what they are planned with, for each kind of wire of which there are `FEWEST_LINKS`."""
    reached: dict[str, list[float]] = {}
    for one in carried:
        reached.setdefault(one.channel, []).append(one.rate / one.planned)
    return {channel: median_low(shares) for channel, shares in reached.items() if len(shares) >= FEWEST_LINKS}


JUDGEMENT_CALLS, JUDGEMENT_CALLS_MOST, JUDGEMENT_SECONDS = 4, 64, 0.2
"""Collectives that are measured between two judgements: at least and at most, and so many seconds of them."""

MIN_MONITORED_BYTES = 1 << 20
"""Of a buffer; smaller collectives take what messages take, whatever links can do."""

MIN_BUSY_SECONDS = 0.1
"""Seconds that a link must have been busy for its rate to count, or a slow one would have been for what it carried:
25 ticks of the kernel's clock, as a rule."""

TICK_SECONDS = 0.004
"""Seconds that a link was busy at least: shorter times are not seen."""

REPLAN_GAIN = 1.1
"""How many times faster another plan must be."""

ON_SLOW_MODES = ("ignore", "report", "replan")
"""What ``on_slow`` may be."""

SYNCHRONIZING_COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "alltoall")
"""Collectives that no rank ends before the last has begun, so that who needs little time has come late."""

LinkQueue = tuple[int, int, str]


@dataclass(slots=True)
class _LinkWindow:
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
        return self.busy >= MIN_BUSY_SECONDS or (
            reached is not None and self.due / reached >= MIN_BUSY_SECONDS
        )

    def carried(self, source: str, destination: str, channel: str) -> LinkMeasurement:
        """That, from one GPU to another."""
        rate = self.nbytes / max(self.busy, TICK_SECONDS) / 1e9
        planned = self.nbytes / self.due / 1e9 if self.nbytes else self.share.rate
        return LinkMeasurement(
            source, destination, channel.partition("#")[0], rate, planned, self.share.wires
        )


class LinkMonitor:
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

    def __init__(
        self, execution: Execution[Any], plans: Plans, company: Membership, *, replans: bool
    ) -> None:
        self.execution = execution
        self._first = plans
        self._company = company
        self._replans = replans
        backend = execution.backend
        self._links = backend if isinstance(backend, MeasuresLinks) and backend.measures else None
        self._judge = SlowLinkDetector(plans.topology, plans.ranks)
        self._shares: dict[str, Mapping[LinkQueue, LinkShare]] = {}
        self._windows: dict[LinkQueue, _LinkWindow] = {}
        self._used: Mapping[LinkQueue, LinkUse] = {}
        self._used_at = -1
        self._seconds: list[float] = []
        self._number = self._judged = 0
        self._every = JUDGEMENT_CALLS

    @property
    def slow(self) -> tuple[SlowLink | SlowRank, ...]:
        """What is slow by now."""
        return self._judge.slow

    @property
    def company(self) -> Membership:
        """Who works together, over links as slow as they are believed to be where that is planned with."""
        return self._company.with_slow(self._judge.believed) if self._replans else self._company

    def measures(self, request: Request[Any]) -> bool:
        """Whether a collective is one of those that are measured; all ranks say the same."""
        return request.kind.nbytes >= MIN_MONITORED_BYTES

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
        if kind.collective in SYNCHRONIZING_COLLECTIVES and self._number > self._judged:
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
            self._every = min(
                JUDGEMENT_CALLS_MOST,
                max(JUDGEMENT_CALLS, ceil(JUDGEMENT_SECONDS * len(told[0].seconds) / longest)),
            )
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
                about=PlanChange.of(slow_links=self._judge.believed).digest,
            )
        except RefusedError:
            raise
        except (InfeasibleError, UsageError) as error:
            return current, [*news, f"the plan stays, since there is no other: {error}"]
        if made.digest == current.digest:
            return current, [
                *news,
                f"the plan stays: no other is {REPLAN_GAIN - 1:.0%} faster on what links have now",
            ]
        machine = self._judge.machine
        rates = f"{_plan_rate(made, machine):.4g} GB/s where the plan before has {_plan_rate(current, machine):.4g}"
        return made, [*news, f"planned anew for that: {rates}"]

    def _better(self, current: Plans) -> Plans:
        """The plan for the machine as it is believed to be, or the current one where that is nearly as good."""
        machine, believed = self._judge.machine, self._judge.believed
        made = replan_for_change(self._first, PlanChange.of(slow_links=believed)) if believed else self._first
        return made if _plan_rate(made, machine) > REPLAN_GAIN * _plan_rate(current, machine) else current

    def _tell(self) -> list[RankMeasurements]:
        """Exchange what was measured with all ranks; what was told is measured anew."""
        vertices, carried, rest = self._first.plans[-1].vertices, [], {}
        for queue, one in sorted(self._windows.items()):
            source, destination, channel = queue
            if one.counts(self._judge.reached(one.share.wires)):
                carried.append(one.carried(vertices[source], vertices[destination], channel))
            else:
                rest[queue] = one
        self._windows = rest
        mine = RankMeasurements(tuple(self._seconds), tuple(carried))
        self._seconds.clear()
        return [RankMeasurements.from_json(text) for text in self.execution.gather_texts(mine.to_json())]

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
                window = self._windows.setdefault(queue, _LinkWindow(shares[queue]))
                window.add(use.nbytes - one.nbytes, use.busy - one.busy, shares[queue])

    def _shares_of(self, plan: Plan) -> Mapping[LinkQueue, LinkShare]:
        """What a plan counts on for its links, as slow as they are believed to be."""
        digest = self.execution.store.key(plan).digest
        if digest not in self._shares:
            assert self._links is not None, "looked at before"
            self._shares[digest] = self._links.link_shares(plan, self._judge.machine)
        return self._shares[digest]


def check_monitoring(backend: Backend[Any], plans: Plans, *, replans: bool) -> None:
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


def _plan_rate(plans: Plans, machine: Topology) -> float:
    """GB/s of a plan, of plans by size of that for large buffers, on a machine with the same links, perhaps slower."""
    plan = plans.plans[-1]
    return float(forest_rate(plan.shards, Fabric(machine, plan.channels)) or 0)
