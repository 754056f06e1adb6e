"""Which links and ranks are slow: judged by every rank from the same texts, so that all say the same.

Ranks measure for some collectives, then tell each other (`Told`). What a plan says of a link in GB/s need not be what
it has where the job runs, so links are compared with each other: a connection is slow where it stays below `SHARE` of
its planned rate times what the others reach of theirs (their median, for each kind of wire). Which links of the
machine that blames is decided as for tests of pairs: the fewest that explain it (`topoplan.calibration.slow_links`). A
rank is late where it needs less than `SHARE` of the time that others need in every collective: they wait for it.

Once is not enough: what is found in `IN_A_ROW` judgements after each other counts. A link that was slow and reaches
that share of its planned rate again is not slow any more, and one of which nothing is heard for `UNHEARD` judgements,
since the plan goes round it, is tried again. Each time that it is slow again both take `LONGER`, or plans would change
for ever.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import median, median_low

from topoplan.calibration.links import Key
from topoplan.calibration.pair_tests import PairTest
from topoplan.calibration.slow_links import Measured, SlowClass, attribute
from topoplan.degraded import slow_links
from topoplan.topology import SLOWEST, Topology

SHARE = 0.5
"""Of what its peers reach: what is below is slow."""

IN_A_ROW = 2
"""Judgements after each other that must find the same."""

UNHEARD = 16
"""Judgements without a word of a slow link, after which it is tried again."""

LONGER = 8
"""Times as many judgements after each other, of either kind, for each time before that a link was slow."""

FEWEST = 3
"""Fewest connections over wires of one kind of which one can be slower than the others."""

LEAST_LATE = 0.001
"""Seconds by which a rank must be late to be told."""

DIGITS = 4
"""Significant digits of the GB/s that a link is planned with from then on."""


@dataclass(frozen=True, slots=True)
class Carried:
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
    wires: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank measured since the last judgement.

    Parameters
    ----------
    seconds : tuple of float
        That it needed for each collective in which every rank needs something of every other.
    carried : tuple of Carried
        Of its connections that were busy for long enough.
    """

    seconds: tuple[float, ...] = ()
    carried: tuple[Carried, ...] = ()

    def to_json(self) -> str:
        """One line."""
        return json.dumps([self.seconds, [astuple(one) for one in self.carried]], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Told:
        """Read what `to_json` wrote.

        Examples
        --------
        >>> one = Told((0.5,), (Carried("gpu0", "gpu1", "nvlink", 0.5, 25.0, (("gpu0", "gpu1", "nvlink"),)),))
        >>> Told.from_json(one.to_json()) == one
        True
        """
        seconds, carried = json.loads(text)
        return cls(
            tuple(seconds),
            tuple(
                Carried(source, destination, channel, rate, planned, tuple((a, b, c) for a, b, c in wires))
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


class Judge:
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
    >>> judge = Judge(topoplan.load("dgx-1v"), ["gpu0", "gpu1", "gpu2", "gpu3"])
    >>> wires = [("gpu0", "gpu1"), ("gpu0", "gpu2"), ("gpu1", "gpu3")]
    >>> told = [
    ...     Told(carried=(Carried(*ends, "nvlink", rate, 25.0, ((*ends, "nvlink"),)),))
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

    def reached(self, wires: Sequence[Key]) -> float | None:
        """What links reach of the rates that they are believed to have, where one of these is slow; else None.

        Parameters
        ----------
        wires : sequence of (source device, destination device, channel)
            Which a connection crosses.
        """
        slow = [self._healthy[key[2]] for key in wires if f"{key[0]}->{key[1]}" in self.believed]
        return min(slow, default=None)

    def hear(self, told: Sequence[Told], first: int) -> list[str]:
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
        medians = _medians(carried)
        carried = [one for one in carried if one.channel in medians]
        if not carried:
            return []
        self._healthy |= medians
        found = self._blamed(carried)
        heard: set[str] = set()
        news = []
        for key in sorted({key for one in carried for key in one.wires}):
            wire, since = f"{key[0]}->{key[1]}", _in_a_row(self._low, key, key in found, first)
            heard.add(wire)
            if since is not None:
                del self._low[key]
                news.append(self._slower(wire, key, found[key], since))
            elif wire in self.believed:
                fast, least = self._as_planned(wire, key, carried), IN_A_ROW * self._longer.get(wire, 1)
                if _in_a_row(self._high, wire, fast, first, least) is not None:
                    news.append(self._not_slow(wire, "is not slow any more"))
        for wire in sorted(self.believed):
            least = UNHEARD * self._longer.get(wire, 1)
            if _in_a_row(self._unheard, wire, wire not in heard, first, least) is not None:
                news.append(self._not_slow(wire, "has carried nothing for long, and is tried again"))
        return news

    def _blamed(self, carried: Sequence[Carried]) -> dict[Key, SlowClass]:
        """The links that make connections slow."""
        results = []
        for one in carried:
            load = dict.fromkeys(one.wires, one.planned)
            test = PairTest(one.source, one.destination, one.channel, one.planned, load)
            # a connection that had more than its share, where others rested, is as good as one that had it
            results.append(Measured(test, min(one.rate / self._healthy[one.channel], one.planned)))
        verdict = attribute(results, tolerance=1 - SHARE)
        likeliest = [one for part in verdict.alternatives for one in part[0]]
        return {key: one for one in (*verdict.named, *likeliest) for key in one.links}

    def _as_planned(self, wire: str, key: Key, carried: Sequence[Carried]) -> bool:
        """Whether a link that is slow has as much again as makes one that is not."""
        shares = [
            one.rate / (one.planned * self._healthy[one.channel]) for one in carried if key in one.wires
        ]
        return self.believed[wire] * max(shares) >= SHARE * self._bandwidths[key]

    def _slower(self, wire: str, key: Key, found: SlowClass, since: int) -> str:
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
        self._longer[wire] = LONGER * self._longer.get(wire, 1)
        del self.believed[wire], self._links[wire]
        return f"{wire} {why}"

    def _hear_seconds(self, seconds: Sequence[Sequence[float]], first: int) -> None:
        """Who came late to every collective; ranks have counted the same."""
        each = [(median(of_one), of_one) for of_one in zip(*seconds, strict=True)]
        if not each:
            return
        for rank, gpu in enumerate(self._gpus):
            late = median(usual - of_one[rank] for usual, of_one in each)
            always = all(of_one[rank] < SHARE * usual for usual, of_one in each)
            since = _in_a_row(self._late, rank, always and late >= LEAST_LATE, first)
            if since is None:
                self._ranks.pop(rank, None)
            else:
                self._ranks[rank] = SlowRank(rank, gpu, late, since)


def _in_a_row(
    counted: dict[object, tuple[int, int]], what: object, seen: bool, first: int, least: int = IN_A_ROW
) -> int | None:
    """The first collective since which something was seen in all judgements, once these are so many."""
    if not seen:
        counted.pop(what, None)
        return None
    times, since = counted.get(what, (0, first))
    counted[what] = times + 1, since
    return since if times + 1 >= least else None


def _medians(carried: Sequence[Carried]) -> dict[str, float]:
    """What connections reach of what they are planned with, for each kind of wire of which there are `FEWEST`."""
    reached: dict[str, list[float]] = {}
    for one in carried:
        reached.setdefault(one.channel, []).append(one.rate / one.planned)
    return {channel: median_low(shares) for channel, shares in reached.items() if len(shares) >= FEWEST}
