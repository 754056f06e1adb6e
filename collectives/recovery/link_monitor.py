"""Find slow links and stragglers from measured collectives, the same on all ranks, and replan around slow links.

Ranks measure collectives of `MIN_MONITORED_BYTES` or more: duration, and bytes and busy time of each link where the
back end `measures` them. Every `JUDGEMENT_CALLS` of them they exchange the figures, and each judges the same texts.
Links are compared with each other, since a planned GB/s need not hold where the job runs: a connection is slow below
`SLOW_SHARE` of its planned rate times the median of its kind. The fewest links that explain this are slow
(`topoplan.operate.calibration.slow_links`). A straggler needs less than `SLOW_SHARE` of the others' time: they wait
for it. A finding counts after `CONSECUTIVE_JUDGEMENTS`. A link without measurements for `RETRY_AFTER` judgements is
tried again; after each relapse both take `RETRY_FACTOR` times as long. The plan changes if the model promises more
than `REPLAN_GAIN` times the rate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import ceil
from statistics import median, median_low
from typing import Any

from collectives.backends.backend import Backend, LinkShare, LinkUse
from collectives.backends.execution import Execution
from collectives.backends.request import Request
from collectives.recovery.survivors import Membership, PlanChange, replan_for_change
from topoplan.errors import InfeasibleError, RefusedError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import SLOWEST, Topology
from topoplan.machine.variants import slow_links
from topoplan.operate.calibration.calibrated_topology import LinkKey
from topoplan.operate.calibration.pair_tests import PairTest
from topoplan.operate.calibration.slow_links import MeasuredPair, SlowClass, attribute_slow_pairs
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import Plan, Plans

SLOW_SHARE = 0.5  # share of the peers' rate below which a link or rank is slow
CONSECUTIVE_JUDGEMENTS = 2  # consecutive judgements that must agree
RETRY_AFTER = 16  # judgements without measurements of a slow link after which it is tried again
RETRY_FACTOR = 8  # factor of both counts for each earlier time that a link was slow
FEWEST_LINKS = 3  # fewest connections over wires of one kind that are compared with each other
MIN_LATE_SECONDS = 0.001  # smallest delay of a rank that is reported
DIGITS = 4  # significant digits of the GB/s that a slow link is planned with


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """The measured rate of one connection.

    `source` and `destination` are the names of GPUs. `rate` is in GB/s while the connection was busy; `planned` is the
    GB/s of the plan, on the machine at its estimated speeds. `wires` are the links that it crosses (source device,
    destination device, channel).
    """

    source: str
    destination: str
    channel: str
    rate: float
    planned: float
    wires: tuple[LinkKey, ...]


@dataclass(frozen=True, slots=True)
class RankMeasurements:
    """A rank's measurements since the last judgement.

    `seconds` are the durations of collectives in which every rank needs data of every other; `carried` has the
    connections that were busy for long enough.
    """

    seconds: tuple[float, ...] = ()
    carried: tuple[LinkMeasurement, ...] = ()

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps([self.seconds, [astuple(one) for one in self.carried]], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RankMeasurements:
        """Read the output of `to_json`.

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

    `wire` is one direction, such as ``gpu0->gpu3``. `measured` and `planned` are in GB/s; the former was measured on
    busy connections at the last judgement as slow. `share` is the link's share of its planned rate, over that of the
    other links. `since` is the number of the first monitored collective in which it was slow.
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
    """A straggler. `late` is its median delay in seconds over the last collectives, and `since` is as in `SlowLink`."""

    rank: int
    gpu: str
    late: float
    since: int

    def __str__(self) -> str:
        late = f"{self.late * 1e3:.3g} ms later than the others"
        return f"rank {self.rank} ({self.gpu}): {late}, since collective {self.since}"


class SlowLinkDetector:
    """Finds the slow links and stragglers among the ranks of a plan.

    `believed` has the estimated GB/s of the slow links, by wire such as ``gpu0->gpu3``.

    Three links, one of which has a tenth of the others' share of 25 GB/s:

    >>> import topoplan
    >>> detector = SlowLinkDetector(topoplan.load("dgx-1v"), ["gpu0", "gpu1", "gpu2", "gpu3"])
    >>> wires = [("gpu0", "gpu1"), ("gpu0", "gpu2"), ("gpu1", "gpu3")]
    >>> measured = [
    ...     RankMeasurements(carried=(LinkMeasurement(*ends, "nvlink", rate, 25.0, ((*ends, "nvlink"),)),))
    ...     for ends, rate in zip(wires, [0.5, 0.49, 0.05])
    ... ]
    >>> detector.judge(measured, first=1)
    []
    >>> detector.judge(measured, first=5)
    ['gpu1->gpu3: 0.05 GB/s, planned 25: 10% of what other links reach, since collective 1']
    >>> detector.believed
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
        self._unmeasured: dict[object, tuple[int, int]] = {}
        self._backoff: dict[str, int] = {}
        self._healthy: dict[str, float] = {}

    @property
    def machine(self) -> Topology:
        """The machine at its estimated speeds."""
        return slow_links(self._planned, self.believed)

    @property
    def slow(self) -> tuple[SlowLink | SlowRank, ...]:
        """Links in order of their names, then ranks."""
        links, ranks = sorted(self._links.items()), sorted(self._ranks.items())
        return (*(one for _, one in links), *(one for _, one in ranks))

    def reached(self, wires: Sequence[LinkKey]) -> float | None:
        """Return the share of the estimated rates that links reach, if one of these wires is slow; else None."""
        slow = [self._healthy[key[2]] for key in wires if f"{key[0]}->{key[1]}" in self.believed]
        return min(slow, default=None)

    def judge(self, measured: Sequence[RankMeasurements], first: int) -> list[str]:
        """Judge the measurements of all ranks, in order of rank; `first` is the number of the first collective of
        them.

        Returns the news about links that have become slow or have recovered; `believed` has changed if there are any.
        """
        self._judge_ranks([one.seconds for one in measured], first)
        carried = [one for rank in measured for one in rank.carried]
        medians = _median_shares(carried)
        carried = [one for one in carried if one.channel in medians]
        if not carried:
            return []
        self._healthy |= medians
        found = self._explaining_links(carried)
        measured_wires: set[str] = set()
        news = []
        for key in sorted({key for one in carried for key in one.wires}):
            wire, since = f"{key[0]}->{key[1]}", _first_of_streak(self._low, key, key in found, first)
            measured_wires.add(wire)
            if since is not None:
                del self._low[key]
                news.append(self._note_slow(wire, key, found[key], since))
            elif wire in self.believed:
                fast, least = (
                    self._as_planned(wire, key, carried),
                    CONSECUTIVE_JUDGEMENTS * self._backoff.get(wire, 1),
                )
                if _first_of_streak(self._high, wire, fast, first, least) is not None:
                    news.append(self._note_recovered(wire, "is not slow any more"))
        for wire in sorted(self.believed):
            least = RETRY_AFTER * self._backoff.get(wire, 1)
            if _first_of_streak(self._unmeasured, wire, wire not in measured_wires, first, least) is not None:
                news.append(self._note_recovered(wire, "has carried nothing for long, and is tried again"))
        return news

    def _explaining_links(self, carried: Sequence[LinkMeasurement]) -> dict[LinkKey, SlowClass]:
        results = []
        for one in carried:
            load = dict.fromkeys(one.wires, one.planned)
            test = PairTest(one.source, one.destination, one.channel, one.planned, load)
            # a connection with more than its share, since others were idle, is as good as one with its share
            results.append(MeasuredPair(test, min(one.rate / self._healthy[one.channel], one.planned)))
        verdict = attribute_slow_pairs(results, tolerance=1 - SLOW_SHARE)
        likeliest = [one for part in verdict.alternatives for one in part[0]]
        return {key: one for one in (*verdict.named, *likeliest) for key in one.links}

    def _as_planned(self, wire: str, key: LinkKey, carried: Sequence[LinkMeasurement]) -> bool:
        shares = [
            one.rate / (one.planned * self._healthy[one.channel]) for one in carried if key in one.wires
        ]
        return self.believed[wire] * max(shares) >= SLOW_SHARE * self._bandwidths[key]

    def _note_slow(self, wire: str, key: LinkKey, found: SlowClass, since: int) -> str:
        planned, before = self._bandwidths[key], self._links.get(wire)
        now = self.believed.get(wire, planned) * found.rate / found.healthy
        measured = found.rate * self._healthy[key[2]]
        self.believed[wire] = max(SLOWEST, float(f"{now:.{DIGITS}g}"))
        since = since if before is None else before.since
        self._links[wire] = SlowLink(wire, measured, planned, now / planned, since)
        return str(self._links[wire])

    def _note_recovered(self, wire: str, why: str) -> str:
        self._high.pop(wire, None)
        self._unmeasured.pop(wire, None)
        self._backoff[wire] = RETRY_FACTOR * self._backoff.get(wire, 1)
        del self.believed[wire], self._links[wire]
        return f"{wire} {why}"

    def _judge_ranks(self, seconds: Sequence[Sequence[float]], first: int) -> None:
        """Find the ranks that were late in every collective; all ranks have measured the same ones."""
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
    """Return the first collective of a streak of judgements, once it is `least` long."""
    if not seen:
        counted.pop(what, None)
        return None
    times, since = counted.get(what, (0, first))
    counted[what] = times + 1, since
    return since if times + 1 >= least else None


def _median_shares(carried: Sequence[LinkMeasurement]) -> dict[str, float]:
    """Return the median share of their planned rates that connections reach, by kind of wire with `FEWEST_LINKS`."""
    reached: dict[str, list[float]] = {}
    for one in carried:
        reached.setdefault(one.channel, []).append(one.rate / one.planned)
    return {channel: median_low(shares) for channel, shares in reached.items() if len(shares) >= FEWEST_LINKS}


JUDGEMENT_CALLS, JUDGEMENT_CALLS_MOST, JUDGEMENT_SECONDS = 4, 64, 0.2
"""Measured collectives between two judgements: at least and at most, and the seconds that they should take."""

MIN_MONITORED_BYTES = 1 << 20  # smallest monitored buffer; latency dominates smaller collectives

MIN_BUSY_SECONDS = 0.1
"""Busy seconds for a rate to count, usually 25 kernel ticks; for a slow link the seconds that its bytes need."""

TICK_SECONDS = 0.004  # resolution of busy times
REPLAN_GAIN = 1.1  # factor by which another plan must be faster
ON_SLOW_MODES = ("ignore", "report", "replan")  # values of ``on_slow``

SYNCHRONIZING_COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "alltoall")
"""Collectives that no rank ends before the last has begun: a rank with a short duration was late."""

LinkQueue = tuple[int, int, str]


@dataclass(slots=True)
class _LinkWindow:
    """Bytes and busy seconds of a link since the last exchange, and the seconds that the plan expects."""

    share: LinkShare
    nbytes: int = 0
    busy: float = 0.0
    due: float = 0.0

    def add(self, nbytes: int, busy: float, share: LinkShare) -> None:
        """Add one more collective."""
        self.nbytes += nbytes
        self.busy += busy
        self.due += nbytes / (share.rate * 1e9)
        self.share = share

    def counts(self, reached: float | None) -> bool:
        """Return whether it was busy for long enough; slow links reach `reached` of their estimates."""
        return self.busy >= MIN_BUSY_SECONDS or (
            reached is not None and self.due / reached >= MIN_BUSY_SECONDS
        )

    def carried(self, source: str, destination: str, channel: str) -> LinkMeasurement:
        """Return the measurement between two GPUs."""
        rate = self.nbytes / max(self.busy, TICK_SECONDS) / 1e9
        planned = self.nbytes / self.due / 1e9 if self.nbytes else self.share.rate
        return LinkMeasurement(
            source, destination, channel.partition("#")[0], rate, planned, self.share.wires
        )


class LinkMonitor:
    """Measures a communicator's collectives, and replans around slow links if `replans`.

    `plans` is the plan on the machine as described.
    """

    def __init__(
        self, execution: Execution[Any], plans: Plans, membership: Membership, *, replans: bool
    ) -> None:
        self.execution = execution
        self._first = plans
        self._membership = membership
        self._replans = replans
        backend = execution.backend
        self._links = backend if backend.measures else None
        backend.monitored = self._links is not None
        self._detector = SlowLinkDetector(plans.topology, plans.ranks)
        self._shares: dict[str, Mapping[LinkQueue, LinkShare]] = {}
        self._windows: dict[LinkQueue, _LinkWindow] = {}
        self._used: Mapping[LinkQueue, LinkUse] = {}
        self._used_at = -1
        self._seconds: list[float] = []
        self._number = self._judged = 0
        self._every = JUDGEMENT_CALLS

    @property
    def slow(self) -> tuple[SlowLink | SlowRank, ...]:
        return self._detector.slow

    @property
    def membership(self) -> Membership:
        """The membership, with the estimated speeds of slow links if plans use them."""
        return self._membership.with_slow(self._detector.believed) if self._replans else self._membership

    def measures(self, request: Request[Any]) -> bool:
        """Return whether a collective is measured; the same on all ranks."""
        return request.kind.nbytes >= MIN_MONITORED_BYTES

    @property
    def due(self) -> bool:
        """Whether to `look` before the next measured collective; the same on all ranks."""
        return self._number - self._judged == self._every

    def run(self, request: Request[Any]) -> Any:
        """Run a collective and measure it."""
        execution, kind = self.execution, request.kind
        plan = execution.plan_of(kind)
        if self._links is not None and self._used_at != execution.calls:
            self._used = self._links.link_uses()
        began = time.perf_counter()
        result = execution.run(request)
        # before the first, ranks have waited for each other in the exchange of measurements
        synchronizes = kind.collective in SYNCHRONIZING_COLLECTIVES and kind.uneven is None
        if synchronizes and self._number > self._judged:
            self._seconds.append(time.perf_counter() - began)
        self._number += 1
        if not plan.exchanges:
            self._add_links(plan)
        return result

    def look(self, current: Plans) -> tuple[Plans, list[str]]:
        """Exchange measurements, judge, and replan if it pays, on all ranks; return the plan and the news."""
        first, self._judged = self._judged + 1, self._number
        measured = self._exchange()
        longest = max(sum(one.seconds) for one in measured)
        if longest:
            self._every = min(
                JUDGEMENT_CALLS_MOST,
                max(JUDGEMENT_CALLS, ceil(JUDGEMENT_SECONDS * len(measured[0].seconds) / longest)),
            )
        news = self._detector.judge(measured, first)
        if news:  # the expected shares have changed
            self._shares.clear()
            self._windows.clear()
        if not news or not self._replans:
            return current, news
        try:
            made = self.execution.planned(
                lambda: self._better(current),
                collective=current.collective,
                root=current.root,
                about=PlanChange.of(slow_links=self._detector.believed).digest,
            )
        except RefusedError:
            raise
        except (InfeasibleError, UsageError) as error:
            return current, [*news, f"the plan stays, since no other is possible: {error}"]
        if made.digest == current.digest:
            return current, [
                *news,
                f"the plan stays: no other is {REPLAN_GAIN - 1:.0%} faster at the present speeds of links",
            ]
        machine = self._detector.machine
        rates = f"{_plan_rate(made, machine):.4g} GB/s, before {_plan_rate(current, machine):.4g}"
        return made, [*news, f"replanned: {rates}"]

    def _better(self, current: Plans) -> Plans:
        """Return the plan for the estimated speeds, or the current one if that is nearly as good."""
        machine, believed = self._detector.machine, self._detector.believed
        made = replan_for_change(self._first, PlanChange.of(slow_links=believed)) if believed else self._first
        return made if _plan_rate(made, machine) > REPLAN_GAIN * _plan_rate(current, machine) else current

    def _exchange(self) -> list[RankMeasurements]:
        """Exchange the measurements with all ranks, and start new ones for the links that were reported."""
        vertices, carried, rest = self._first.plans[-1].vertices, [], {}
        for queue, one in sorted(self._windows.items()):
            source, destination, channel = queue
            if one.counts(self._detector.reached(one.share.wires)):
                carried.append(one.carried(vertices[source], vertices[destination], channel))
            else:
                rest[queue] = one
        self._windows = rest
        mine = RankMeasurements(tuple(self._seconds), tuple(carried))
        self._seconds.clear()
        return [RankMeasurements.from_json(text) for text in self.execution.gather_texts(mine.to_json())]

    def _add_links(self, plan: Plan) -> None:
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
        """Return the rates that a plan expects of its links, at their estimated speeds."""
        digest = self.execution.store.key(plan).digest
        if digest not in self._shares:
            assert self._links is not None, "measured links"
            self._shares[digest] = self._links.link_shares(plan, self._detector.machine)
        return self._shares[digest]


def check_monitoring(backend: Backend[Any], plans: Plans, *, replans: bool) -> None:
    """Raise `UsageError` if a back end cannot be monitored: one process, helpers, or no measured links."""
    if not backend.one_rank:
        raise UsageError(
            f"the {backend.name} back end has all ranks in one process, so none can be slower than another; "
            "leave on_slow out"
        )
    if any(plan.helpers for plan in plans.plans):
        raise UsageError("a plan with helpers cannot be monitored; leave on_slow out")
    if replans and not backend.measures:
        raise UsageError(
            f"the {backend.name} back end cannot measure its links here, so it cannot replan for them; "
            "use on_slow='report' for slow ranks, or tcp on Linux"
        )


def _plan_rate(plans: Plans, machine: Topology) -> float:
    """Return the GB/s of a plan (for large buffers) on a machine with the same links at other speeds."""
    plan = plans.plans[-1]
    return float(forest_rate(plan.shards, Fabric(machine, plan.channels)) or 0)
