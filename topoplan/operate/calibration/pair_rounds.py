"""Schedule pair tests in few rounds of concurrent tests that take no bandwidth from each other.

Tests of a round have no end in common, share no link between two switches (one name may stand for several cables,
selected by a hash), and take no more of any other link than its bandwidth. Every link that some test crosses is to be
crossed a number of times, by different partners as far as possible: once shows whether it is slow, three times
distinguishes it from the links of its partners.

Rounds are filled greedily, tests that cross most missing links first; remaining ends are brought in by exchanges of one
test for two. That is repeated in several orders, and the one with fewest rounds is kept. Lower bounds on the number of
rounds: each link must be crossed so often, and the ends behind a link must share it (`fewest_rounds`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from topoplan.operate.calibration.calibrated_topology import LinkKey
from topoplan.operate.calibration.pair_tests import FILLED, PairTest, PairTests, link_classes, wire_names
from topoplan.units import TOLERANCE, counted

TIMES = 3
"""Default number of crossings of each link."""

_EFFORT = 60_000
"""Most tests in all tried orders together."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of tests.

    fewest, why: a lower bound on the number of rounds of any plan with the same aim, and its reason.
    times: wanted crossings of each link, if enough tests cross it.
    links: number of crossed links, all that any test crosses.
    classes, finest: sets of links that the tests of these rounds cannot distinguish, and that all tests together could
    not.
    wide: links that no test fills: name, GB/s, and the GB/s below which a test shows them slow.
    """

    rounds: tuple[tuple[PairTest, ...], ...]
    fewest: int
    why: str
    times: int
    links: int
    classes: int
    finest: int
    wide: tuple[tuple[str, float, float], ...]
    fill: tuple[tuple[PairTest, ...], ...] = ()

    @property
    def tests(self) -> tuple[PairTest, ...]:
        return tuple(test for tests in (*self.rounds, *self.fill) for test in tests)


def plan_rounds(possible: PairTests, *, times: int = TIMES, fill: bool = False) -> Rounds:
    """Return rounds in which every link is crossed ``times`` times, or as often as tests allow.

    ``fill`` adds rounds that fill the wide links between switches (`fill_rounds`).

    >>> import topoplan
    >>> from topoplan.operate.calibration.pair_tests import possible_tests
    >>> four = topoplan.cluster([topoplan.Server("dgx-1v", count=4)], nic_gbps=100, nics=1)
    >>> made = plan_rounds(possible_tests(four))
    >>> [[test.name for test in tests] for tests in made.rounds][0], len(made.rounds), made.fewest
    (['s0.gpu0-s1.gpu0', 's2.gpu0-s3.gpu0'], 3, 3)
    """
    crossing: dict[LinkKey, int] = {}
    for test in possible.tests:
        for key in test.links:
            crossing[key] = crossing.get(key, 0) + 1
    wanted = {key: min(times, number) for key, number in crossing.items()}
    capacity = _LinkCapacity(possible)
    fewest, why = fewest_rounds(possible, wanted, capacity)
    finest = len(link_classes(possible.tests))
    best: tuple[int, int] = (len(possible.tests) + 1, 0)
    rounds: list[list[PairTest]] = []
    for turn in range(max(1, min(len(_STRIDES), _EFFORT // len(possible.tests)))):
        made = _filled(possible, wanted, capacity, turn)
        found = (len(made), -len(link_classes([test for tests in made for test in tests])))
        if found < best:
            best, rounds = found, made
        if best == (fewest, -finest):
            break
    return Rounds(
        tuple(tuple(tests) for tests in rounds),
        fewest,
        why,
        times,
        len(wanted),
        -best[1],
        finest,
        _wide(possible, capacity),
        fill_rounds(possible, capacity) if fill else (),
    )


def fill_rounds(possible: PairTests, capacity: _LinkCapacity) -> tuple[tuple[PairTest, ...], ...]:
    """Return rounds of concurrent tests that fill links between switches which no single test fills.

    Together they take no more than a link's bandwidth, so each is as fast as alone while the link is healthy. The
    traffic of a filled link counts as a link of its own in the search for slow links, since single tests do not clear
    it. Each link is filled twice, by tests to different places as far as possible.
    """
    wide = _unfilled(possible, capacity).keys() & capacity.unshared
    crossed = [frozenset(key for key in test.links if key in wide) for test in possible.tests]
    met: set[frozenset[LinkKey]] = set()
    rounds: list[tuple[PairTest, ...]] = []
    for _ in range(2):
        left = set(wide)
        while left:
            order = sorted(
                (number for number, keys in enumerate(crossed) if keys & left),
                key=lambda number: (crossed[number] in met, -len(crossed[number] & left), number),
            )
            taken: dict[LinkKey, float] = {}
            busy: set[str] = set()
            chosen: list[int] = []
            for number in order:
                test = possible.tests[number]
                loads = {key: taken.get(key, 0.0) + test.load(key) for key in test.links}
                if {test.src, test.dst} & busy or any(
                    load > capacity.bandwidth[key] * (1 + TOLERANCE) for key, load in loads.items()
                ):
                    continue
                taken |= loads
                busy |= {test.src, test.dst}
                chosen.append(number)
            met |= {crossed[number] for number in chosen}
            left -= {key for number in chosen for key in crossed[number]}
            name = f"fill{len(rounds) + 1}"
            rounds.append(tuple(_filling(possible.tests[number], wide, name) for number in sorted(chosen)))
    return tuple(rounds)


def _filling(test: PairTest, wide: set[LinkKey], name: str) -> PairTest:
    def both(links: Mapping[LinkKey, float]) -> dict[LinkKey, float]:
        more = {(src, dst, f"{channel}{FILLED}"): load for (src, dst, channel), load in links.items()}
        kept = {key: load for key, load in more.items() if (*key[:2], key[2].removesuffix(FILLED)) in wide}
        return {**links, **kept}

    return replace(test, out=both(test.out), back=both(test.back), together=name)


class _LinkCapacity:
    """The capacity of links for concurrent tests."""

    def __init__(self, possible: PairTests) -> None:
        topology = possible.topology
        switches = {device.name for device in topology.devices if device.kind == "switch"}
        self.bandwidth = {(link.src, link.dst, link.channel): link.bandwidth for link in topology.links}
        self.unshared = {key for key in self.bandwidth if key[0] in switches and key[1] in switches}
        self.scarce = self._scarce(possible.tests)

    def _scarce(self, tests: Sequence[PairTest]) -> set[LinkKey]:
        """Return links that only one test of a round crosses, shared by several ends that also have other tests."""
        sending: dict[LinkKey, dict[str, int]] = {}
        number: dict[str, int] = {}
        least: dict[LinkKey, float] = {}
        for test in tests:
            for end, links in ((test.src, test.out), (test.dst, test.back)):
                number[end] = number.get(end, 0) + bool(links)
                for key in links:
                    ends = sending.setdefault(key, {})
                    ends[end] = ends.get(end, 0) + 1
                    least[key] = min(least.get(key, math.inf), test.load(key))
        return {
            key
            for key, ends in sending.items()
            if len(ends) > 1
            and self.tests_per_round(key, least[key]) == 1
            and any(number[end] > times for end, times in ends.items())
        }

    def fits(self, test: PairTest, taken: dict[LinkKey, float]) -> bool:
        """Return whether the links have capacity for a test beside ``taken``."""
        for key in test.links:
            used = taken.get(key)
            if used and (
                key in self.unshared or used + test.load(key) > self.bandwidth[key] * (1 + TOLERANCE)
            ):
                return False
        return True

    def tests_per_round(self, key: LinkKey, load: float) -> int:
        """Return the most tests of a load that a link bears in one round."""
        return 1 if key in self.unshared else max(1, floor(self.bandwidth[key] / load * (1 + TOLERANCE)))


def _filled(
    possible: PairTests, wanted: dict[LinkKey, int], capacity: _LinkCapacity, turn: int
) -> list[list[PairTest]]:
    """Return rounds, filled in sequence; ``turn`` changes the order of equally useful tests."""
    left = dict(wanted)
    used: dict[int, int] = {}
    met: set[frozenset[LinkKey]] = set()
    scarce = [frozenset(key for key in test.links if key in capacity.scarce) for test in possible.tests]
    order = [(number * _STRIDES[turn]) % _PRIME for number in range(len(possible.tests))]
    rounds: list[list[PairTest]] = []
    while any(left.values()):
        worth = {}
        for number, test in enumerate(possible.tests):
            wants = [left[key] for key in test.links if left[key]]
            if wants:
                again = scarce[number] in met
                worth[number] = (used.get(number, 0), -len(wants), again, -sum(wants), order[number])
        chosen = _one_round(possible.tests, sorted(worth, key=worth.__getitem__), capacity)
        for number in chosen:
            used[number] = used.get(number, 0) + 1
            met.add(scarce[number])
            for key in possible.tests[number].links:
                left[key] = max(0, left[key] - 1)
        rounds.append([possible.tests[number] for number in chosen])
    return rounds


_PRIME = 1_000_003
_STRIDES = (1, 389, 7_919, 104_729, 611_953, 15_485, 32_452, 49_979, 67_867, 86_028, 253_097, 500_009)


def _one_round(tests: Sequence[PairTest], order: Sequence[int], capacity: _LinkCapacity) -> list[int]:
    """Return the tests of one round: the first in the order that fit, then exchanges of one test for two."""
    chosen = _Round(tests, capacity)
    of_end: dict[str, list[int]] = {}
    for number in order:
        if chosen.fits(number):
            chosen.put(number)
        for end in (tests[number].src, tests[number].dst):
            of_end.setdefault(end, []).append(number)
    for end in of_end:
        if end not in chosen.busy:
            chosen.exchange(end, of_end)
    return sorted(set(chosen.busy.values()))


class _Round:
    """The tests of one round during their selection."""

    def __init__(self, tests: Sequence[PairTest], capacity: _LinkCapacity) -> None:
        self.tests, self.capacity = tests, capacity
        self.taken: dict[LinkKey, float] = {}
        self.busy: dict[str, int] = {}

    def fits(self, number: int) -> bool:
        test = self.tests[number]
        return (
            test.src not in self.busy and test.dst not in self.busy and self.capacity.fits(test, self.taken)
        )

    def put(self, number: int) -> None:
        test = self.tests[number]
        for key in test.links:
            self.taken[key] = self.taken.get(key, 0.0) + test.load(key)
        self.busy[test.src] = self.busy[test.dst] = number

    def take_out(self, number: int) -> None:
        test = self.tests[number]
        for key in test.links:
            self.taken[key] -= test.load(key)
            if self.taken[key] < TOLERANCE * test.load(key):
                del self.taken[key]
        del self.busy[test.src], self.busy[test.dst]

    def exchange(self, end: str, of_end: dict[str, list[int]]) -> None:
        """Bring in a free end: a test of it replaces one whose partner then gets a free end."""
        for number in of_end[end]:
            test = self.tests[number]
            other = test.dst if test.src == end else test.src
            given = self.busy.get(other)
            # tests across a scarce link stay
            if given is None or any(key in self.capacity.scarce for key in self.tests[given].links):
                continue
            leaving = self.tests[given]
            partner = leaving.dst if leaving.src == other else leaving.src
            self.take_out(given)
            if self.fits(number):
                self.put(number)
                for second in of_end.get(partner, ()):
                    if self.fits(second):
                        self.put(second)
                        return
                self.take_out(number)
            self.put(given)


def fewest_rounds(
    possible: PairTests, wanted: dict[LinkKey, int], capacity: _LinkCapacity
) -> tuple[int, str]:
    """Return a lower bound on the number of rounds, and its reason.

    1. A link that two tests of a round cannot share needs a round for each crossing.
    2. An end takes part in one test of a round, for each of its own links in turn, and of an odd number of ends one is
    idle.
    3. Ends with a link that is crossed only together with another link take turns at that one.
    4. Of an even number of ends behind a link that two tests cannot share one is idle whenever one of them is tested
    across it.
    """
    crossing: dict[LinkKey, set[int]] = {}
    own: dict[tuple[str, bool], set[frozenset[LinkKey]]] = {}
    of_end: dict[str, list[tuple[int, str]]] = {}
    for number, test in enumerate(possible.tests):
        of_end.setdefault(test.src, []).append((number, test.dst))
        of_end.setdefault(test.dst, []).append((number, test.src))
        for key in test.links:
            crossing.setdefault(key, set()).add(number)
        for end, links in ((test.src, test.out), (test.dst, test.back)):
            own.setdefault((end, True), set()).add(frozenset(key for key in links if key[0] == end))
        for end, links in ((test.dst, test.out), (test.src, test.back)):
            own.setdefault((end, False), set()).add(frozenset(key for key in links if key[1] == end))
    found = []
    scarce = {
        key: number
        for key, number in wanted.items()
        if capacity.tests_per_round(key, _least(possible, crossing[key], key)) == 1
    }
    if scarce:
        most, key = max((number, key) for key, number in scarce.items())
        found.append((most, f"{_named(key)} must be crossed {counted(most, 'time')}, by one test per round"))
    need = {}
    for end in possible.ends:
        ways = [_turns(own.get((end, way), set()), wanted) for way in (True, False)]
        need[end] = sum(ways) if possible.one_way else max(ways)
    end, most = max(need.items(), key=lambda one: one[1])
    found.append((most, f"{end} must be tested {counted(most, 'time')}, once per round"))
    pairs = len(need) // 2 * 2
    found.append(
        (
            ceil(sum(need.values()) / pairs),
            f"{len(need)} GPUs must be tested {sum(need.values())} times in all, and a round tests {pairs} of them",
        )
    )
    for key in crossing:
        found += _behind(possible, key, crossing, own, of_end, capacity, wanted)
    return max(found, key=lambda pair: pair[0])


def _turns(own: set[frozenset[LinkKey]], wanted: dict[LinkKey, int]) -> int:
    """Return the number of tests of an end, given the sets of its own links, one set per test."""
    sets = [links for links in own if links]
    if sum(map(len, sets)) == len(set().union(*sets)):
        return sum(max(wanted[key] for key in links) for links in sets)
    return max((wanted[key] for links in sets for key in links), default=0)


def _least(possible: PairTests, numbers: Iterable[int], key: LinkKey) -> float:
    return min(possible.tests[number].load(key) for number in numbers)


def _behind(
    possible: PairTests,
    key: LinkKey,
    crossing: dict[LinkKey, set[int]],
    own: dict[tuple[str, bool], set[frozenset[LinkKey]]],
    of_end: dict[str, list[tuple[int, str]]],
    capacity: _LinkCapacity,
    wanted: dict[LinkKey, int],
) -> list[tuple[int, str]]:
    """Return bounds on the rounds by the ends behind a link; ``of_end`` are the tests of each end, with its partner."""
    found = []
    tests = [possible.tests[number] for number in crossing[key]]
    at_once = capacity.tests_per_round(key, _least(possible, crossing[key], key))
    near = dict.fromkeys(end for test in tests for end in (test.src, test.dst))
    for way in (True, False):
        turns = {}
        for end in near:
            links = {one for links in own.get((end, way), ()) for one in links}
            under = [wanted[one] for one in links if one != key and crossing[one] <= crossing[key]]
            if under:
                turns[end] = max(under)
        if len(turns) > 1:
            together = (
                1 if possible.one_way else max((test.src in turns) + (test.dst in turns) for test in tests)
            )
            what = (
                f"{len(turns)} GPUs must be tested {sum(turns.values())} times in all across {_named(key)}, "
                f"and a round has room for {together * at_once} of them"
            )
            found.append((ceil(sum(turns.values()) / (together * at_once)), what))
    side = {test.src for test in tests if key in test.out} | {test.dst for test in tests if key in test.back}
    joined = any({test.src, test.dst} <= side for test in tests)
    if at_once == 1 and not possible.one_way and not joined and side and len(side) % 2 == 0:
        needed = sum(_turns(own.get((end, True), set()), wanted) for end in side) + wanted[key]
        what = (
            f"{_named(key)} must be crossed {counted(wanted[key], 'time')}, and in such a round one of the {len(side)} "
            "GPUs behind it has no partner"
        )
        outwards = (number for end in side for number, other in of_end[end] if other not in side)
        if all(number in crossing[key] for number in outwards):
            found.append((ceil(needed / len(side)), what))
    return found


def _wide(possible: PairTests, capacity: _LinkCapacity) -> tuple[tuple[str, float, float], ...]:
    """Return links that no test fills, with the part that tests measure."""
    found = _unfilled(possible, capacity)
    named: dict[str, tuple[str, float, float]] = {}
    for key, load in found.items():
        name = wire_names([key, *(back for back in [(key[1], key[0], key[2])] if back in found)])[0]
        named.setdefault(name, (name, capacity.bandwidth[key], load))
    return tuple(named.values())


def _unfilled(possible: PairTests, capacity: _LinkCapacity) -> dict[LinkKey, float]:
    """Return the largest load of a test on each link that no test fills."""
    most: dict[LinkKey, float] = {}
    for test in possible.tests:
        for key in test.links:
            most[key] = max(most.get(key, 0.0), test.load(key))
    return {key: load for key, load in most.items() if load * (1 + TOLERANCE) < capacity.bandwidth[key]}


def _named(key: LinkKey) -> str:
    return wire_names([key])[0]
