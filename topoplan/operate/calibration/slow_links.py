"""Attribute slow pair tests to links: the fewest slow links that explain the rates of pairs.

A test is as fast as the slowest link that it crosses: rates are a minimum over links, so least squares on 1/rate would
spread one narrow link over its neighbours. The model is the minimum:

1. Healthy links reach the median ratio of measured to stated of the faster half of the pairs (for each kind of link
with `FEWEST` pairs). A pair is slow if it is below that by more than the tolerance.
2. Links that occur in the same tests are one class: no test distinguishes them.
3. A class is a candidate unless a test that crosses it is clearly faster, or is not slow and should be as fast.
4. All sets of fewest classes that explain every slow pair are found by branching on the pair with fewest candidates,
for each connected part. A class of all sets is named; alternatives follow, best agreement on one rate first (least
squares of logarithms).

A slow pair whose links are all cleared is reported as not caused by a link (a GPU, a process, other traffic). A class
that only slow pairs cross, and that is not needed to explain them, is reported as undecided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from topoplan.errors import UsageError
from topoplan.operate.calibration.calibrated_topology import TOLERANCE, LinkKey
from topoplan.operate.calibration.pair_tests import PairTest, link_classes

FEWEST = 4
"""Fewest pairs that determine the healthy rate of a kind of link."""

MOST_TOGETHER = 6
"""Most classes of a connected part for the exact search; beyond, the class that explains most is taken."""

_MOST_SETS = 200


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """A test and its rate in GB/s, each way; 0 for a failed test."""

    test: PairTest
    rate: float


@dataclass(frozen=True, slots=True)
class SlowClass:
    """Links one of which is slow; no test crosses one of them without the others.

    rate: median GB/s of the slow pairs that they explain.
    healthy: median GB/s that these pairs should get.
    """

    links: tuple[LinkKey, ...]
    rate: float
    healthy: float
    pairs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SlowLinkReport:
    """The explanation of the rates of pairs.

    healthy: measured over stated of healthy pairs, for each kind of link.
    slow: pairs below that by more than the tolerance, the slowest first.
    named: classes of every smallest explanation.
    alternatives: for each part with several smallest explanations: additions to the named ones, the likeliest first.
    unexplained: slow pairs whose links are all cleared by other pairs.
    unjudged: classes that only slow pairs cross, and that are not in an explanation.
    unmeasured: links of the machine's tests that no result crosses.
    fewest: False if a part was too large for the exact search.
    """

    healthy: Mapping[str, float]
    slow: tuple[MeasuredPair, ...]
    named: tuple[SlowClass, ...]
    alternatives: tuple[tuple[tuple[SlowClass, ...], ...], ...]
    unexplained: tuple[MeasuredPair, ...]
    unjudged: tuple[tuple[LinkKey, ...], ...]
    unmeasured: tuple[tuple[LinkKey, ...], ...]
    fewest: bool = True


def attribute_slow_pairs(
    results: Sequence[MeasuredPair], *, tolerance: float = TOLERANCE, possible: Sequence[PairTest] = ()
) -> SlowLinkReport:
    """Return the links that make pairs slow.

    results: several results of one test all count.
    tolerance: relative deviation of healthy pairs, below and above.
    possible: all tests of the machine, for the links that no result crosses.

    Four servers at one switch; all tests of s2 get 5 GB/s:

    >>> import topoplan
    >>> from topoplan.operate.calibration.pair_tests import possible_tests, wire_names
    >>> four = topoplan.cluster([topoplan.Server("dgx-1v", count=4)], nic_gbps=100, nics=1)
    >>> tests = possible_tests(four).tests
    >>> found = attribute_slow_pairs([MeasuredPair(test, 5.0 if "s2.gpu0" in test.name else 11.5) for test in tests])
    >>> [(wire_names(one.links), one.rate, len(one.pairs)) for one in found.named]
    [(('s2.gpu0-s2.nic0', 's2.nic0-switch0'), 5.0, 3)]
    """
    if not any(one.rate > 0 for one in results):
        raise UsageError("the results have no rate above zero to compare with; give those of several pairs")
    healthy = _healthy(results)
    expected = [one.test.rate * healthy[one.test.channel] for one in results]
    is_slow = [one.rate < right * (1 - tolerance) for one, right in zip(results, expected, strict=True)]
    classes = link_classes([one.test for one in results])
    place = {key: number for number, keys in enumerate(classes) for key in keys}
    crossing: list[list[int]] = [[] for _ in classes]
    of_result: list[list[int]] = []
    for number, one in enumerate(results):
        of_result.append(sorted({place[key] for key in one.test.links}))
        for found in of_result[-1]:
            crossing[found].append(number)
    slack = (1 + tolerance) / (1 - tolerance)

    def may_explain(found: int, number: int) -> bool:
        return not any(
            results[other].rate > slack * results[number].rate
            or (not is_slow[other] and expected[other] >= expected[number] * (1 - tolerance))
            for other in crossing[found]
        )

    candidates = {
        number: frozenset(found for found in of_result[number] if may_explain(found, number))
        for number, slow in enumerate(is_slow)
        if slow
    }
    unexplained = [number for number, found in candidates.items() if not found]
    explained = {number: found for number, found in candidates.items() if found}

    def described(found: int) -> SlowClass:
        numbers = [number for number, chosen in explained.items() if found in chosen]
        return SlowClass(
            classes[found],
            median(results[number].rate for number in numbers),
            median(expected[number] for number in numbers),
            tuple(dict.fromkeys(results[number].test.name for number in numbers)),
        )

    def misfit(found: int) -> float:
        rates = [results[number].rate for number, chosen in explained.items() if found in chosen]
        logs = [math.log(max(rate, 1e-9)) for rate in rates]
        return math.fsum((one - median(logs)) ** 2 for one in logs)

    named: list[int] = []
    alternatives: list[tuple[tuple[int, ...], ...]] = []
    fewest = True
    for part in _parts(explained):
        sets, exact = _smallest_sets(part)
        fewest = fewest and exact
        common = frozenset.intersection(*sets)
        named += sorted(common)
        rest = [tuple(sorted(one - common)) for one in sets if one - common]
        if rest:
            alternatives.append(tuple(sorted(rest, key=lambda one: (math.fsum(map(misfit, one)), one))))
    chosen = {*named, *(found for part in alternatives for one in part for found in one)}
    measured = {key for one in results for key in one.test.links}
    absent = [test for test in possible if not set(test.links) <= measured]
    return SlowLinkReport(
        healthy=healthy,
        slow=tuple(
            sorted((results[number] for number in candidates), key=lambda one: (one.rate, one.test.name))
        ),
        named=tuple(described(found) for found in named),
        alternatives=tuple(
            tuple(tuple(described(found) for found in one) for one in part) for part in alternatives
        ),
        unexplained=tuple(results[number] for number in unexplained),
        unjudged=tuple(
            keys
            for found, keys in enumerate(classes)
            if found not in chosen
            and all(is_slow[number] for number in crossing[found])
            and any(found in one for one in explained.values())
        ),
        unmeasured=tuple(
            kept
            for keys in link_classes(absent)
            if (kept := tuple(key for key in keys if key not in measured))
        ),
        fewest=fewest,
    )


def _healthy(results: Sequence[MeasuredPair]) -> dict[str, float]:
    kinds = dict.fromkeys(one.test.channel for one in results)
    whole = _upper_median([one.rate / one.test.rate for one in results])
    found = {}
    for kind in kinds:
        ratios = [one.rate / one.test.rate for one in results if one.test.channel == kind]
        found[kind] = _upper_median(ratios) if len(ratios) >= FEWEST else whole
    return found


def _upper_median(ratios: Sequence[float]) -> float:
    return median(sorted(ratios)[len(ratios) // 2 :])


def _parts(explained: Mapping[int, frozenset[int]]) -> list[dict[int, frozenset[int]]]:
    """Return the connected parts of slow pairs that share candidates, in order of their first pair."""
    parts: list[tuple[set[int], dict[int, frozenset[int]]]] = []
    for number, found in explained.items():
        joined = [part for part in parts if part[0] & found]
        merged: tuple[set[int], dict[int, frozenset[int]]] = (set(found), {number: found})
        for part in joined:
            merged = (merged[0] | part[0], part[1] | merged[1])
            parts.remove(part)
        parts.append(merged)
    return [dict(sorted(part.items())) for _, part in sorted(parts, key=lambda part: min(part[1]))]


def _smallest_sets(part: Mapping[int, frozenset[int]]) -> tuple[list[frozenset[int]], bool]:
    """Return all smallest sets of classes with one of each pair, and whether they are known to be smallest."""
    pairs = list(part.values())
    for size in range(1, MOST_TOGETHER + 1):
        sets: dict[frozenset[int], None] = {}
        _search(pairs, size, frozenset(), sets)
        if sets:
            return list(sets), True
    left, taken = pairs, set[int]()
    while left:
        counts = {found: sum(found in one for one in left) for one in left for found in one}
        best = max(sorted(counts), key=counts.__getitem__)
        taken.add(best)
        left = [one for one in left if best not in one]
    return [frozenset(taken)], False


def _search(
    pairs: Sequence[frozenset[int]], size: int, taken: frozenset[int], sets: dict[frozenset[int], None]
) -> None:
    """Add the sets of ``size`` more classes that leave no pair without one."""
    left = [one for one in pairs if not one & taken]
    if not left:
        sets[taken] = None
        return
    if not size or len(sets) >= _MOST_SETS or _disjoint_pairs(left) > size:
        return
    narrowest = min(left, key=lambda one: (len(one), sorted(one)))
    for found in sorted(narrowest):
        _search(left, size - 1, taken | {found}, sets)


def _disjoint_pairs(pairs: Sequence[frozenset[int]]) -> int:
    """Return a number of pairs without common candidates, a lower bound on the number of classes."""
    seen: set[int] = set()
    count = 0
    for one in pairs:
        if not one & seen:
            seen |= one
            count += 1
    return count
