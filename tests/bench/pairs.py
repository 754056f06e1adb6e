"""Random slow links of a fat tree of 32 hosts, and whether pair tests with noise name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy

import topoplan
from topoplan.operate.calibration.calibrated_topology import LinkKey
from topoplan.operate.calibration.pair_rounds import TIMES, Rounds, plan_rounds
from topoplan.operate.calibration.pair_tests import FILLED, PairTest, possible_tests, wire_names
from topoplan.operate.calibration.slow_links import MeasuredPair, SlowLinkReport, attribute_slow_pairs

HEALTHY, NOISE = 0.93, 0.03
"""What healthy pairs get of what is stated, and the standard deviation of a measurement."""


@dataclass
class Counts:
    """What became of slow links: of ``links``, each is in one of the next four."""

    links: int = 0
    exact: int = 0
    in_class: int = 0
    alternative: int = 0
    missed: int = 0
    false_alarms: int = 0

    def add(self, other: Counts) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def fat_tree(hosts: int, *, gpus: int = 1, oversubscription: float = 2) -> topoplan.Topology:
    """Hosts of one NIC of 100 Gb/s, four on a leaf."""
    return topoplan.cluster(
        [topoplan.Server("dgx-1v", list(range(gpus)), count=hosts)],
        nic_gbps=100,
        nics=1,
        network="fat-tree",
        leaf_size=4,
        oversubscription=oversubscription,
        nic_access="direct",
    )


def measured(
    tests: tuple[PairTest, ...], limits: Mapping[LinkKey, float], random: numpy.random.Generator
) -> list[MeasuredPair]:
    """Rates of tests over links of which some let through no more than their limit, GB/s."""
    rates = [min([test.rate, *(limits[key] for key in test.links if key in limits)]) for test in tests]
    noise = random.normal(1, NOISE, len(tests))
    return [
        MeasuredPair(test, HEALTHY * rate * float(one))
        for test, rate, one in zip(tests, rates, noise, strict=True)
    ]


def fills(
    rounds: Rounds, slow: Mapping[LinkKey, float], random: numpy.random.Generator
) -> tuple[list[MeasuredPair], set[LinkKey]]:
    """Rates of tests where wide links have so many GB/s, which the tests of a round share; and the keys of these."""
    results = measured(tuple(test for tests in rounds.rounds for test in tests), slow, random)
    keys: set[LinkKey] = set()
    for tests in rounds.fill:
        limits = {}
        for (src, dst, channel), rate in slow.items():
            key = src, dst, channel + FILLED
            sharing = sum(key in test.links for test in tests)
            if sharing:
                limits[key] = rate / sharing
        keys |= limits.keys()
        results += measured(tests, limits, random)
    return results, keys


def counted(verdict: SlowLinkReport, slow: Mapping[LinkKey, float]) -> Counts:
    """What a verdict says of the links that are slow."""
    named = [frozenset(one.links) for one in verdict.named]
    others = [frozenset(one.links) for part in verdict.alternatives for each in part for one in each]
    found = Counts(links=len(slow))
    for key in slow:
        holding = [links for links in named if key in links]
        if any(len(wire_names(links)) == 1 for links in holding):
            found.exact += 1
        elif holding:
            found.in_class += 1
        elif any(key in links for links in others):
            found.alternative += 1
        else:
            found.missed += 1
    found.false_alarms = sum(not links & slow.keys() for links in named)
    return found


def trial(
    tests: tuple[PairTest, ...], number: int, random: numpy.random.Generator, *, among: list[LinkKey]
) -> Counts:
    """So many slow links, each at 20 to 70 % of what a test takes of it."""
    keys = [among[place] for place in random.choice(len(among), number, replace=False)]
    load = {key: max(test.load(key) for test in tests if key in test.links) for key in keys}
    slow = {key: load[key] * float(random.uniform(0.2, 0.7)) for key in keys}
    return counted(attribute_slow_pairs(measured(tests, slow, random)), slow)


def main() -> None:
    """A table: one and two slow links at once, by what each test looks like."""
    print(
        f"slow links of a fat tree of 32 hosts, 100 trials each, noise {NOISE:.0%} of a rate, tolerance 10%"
    )
    heads = [field.name.replace("_", " ") for field in fields(Counts)]
    print("ends             ways  times  rounds  slow  " + "  ".join(f"{head:>12}" for head in heads))
    for gpus, one_way, times in ((1, False, TIMES), (1, False, 2), (1, True, TIMES), (2, False, TIMES)):
        machine = fat_tree(32, gpus=gpus)
        rounds = plan_rounds(possible_tests(machine, every_gpu=True, one_way=one_way), times=times)
        among = sorted({key for test in rounds.tests for key in test.links})
        for number in (1, 2):
            random = numpy.random.default_rng(7)
            total = Counts()
            for _ in range(100):
                total.add(trial(rounds.tests, number, random, among=among))
            figures = "  ".join(f"{getattr(total, field.name):>12}" for field in fields(Counts))
            ends = f"{gpus} GPU{'s' * (gpus > 1)} a NIC"
            ways = "one" if one_way else "both"
            print(f"{ends:<15}  {ways:>4}  {times:>5}  {len(rounds.rounds):>6}  {number:>4}  {figures}")
    print(
        "\nuplinks of 50 GB/s at 30 to 70 %, which no pair of 12.5 GB/s sees, with and without rounds that fill them"
    )
    rounds = plan_rounds(possible_tests(fat_tree(32, oversubscription=1)), fill=True)
    uplinks = sorted(key for key in {key for test in rounds.tests for key in test.links} if "spine0" in key)
    uplinks = [key for key in uplinks if not key[2].endswith(FILLED)]
    for fill in (False, True):
        random = numpy.random.default_rng(7)
        total = Counts()
        for _ in range(100):
            key = uplinks[int(random.integers(len(uplinks)))]
            slow = {key: 50 * float(random.uniform(0.3, 0.7))}
            results, keys = fills(rounds if fill else replace(rounds, fill=()), slow, random)
            total.add(counted(attribute_slow_pairs(results), dict.fromkeys(keys or slow, 0.0)))
        figures = "  ".join(f"{getattr(total, field.name):>12}" for field in fields(Counts))
        print(
            f"{'with' if fill else 'without':<33}{len(rounds.rounds) + fill * len(rounds.fill):>5}  {1:>4}  {figures}"
        )
