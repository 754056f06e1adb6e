"""Pair tests: rounds that leave each other alone, and the links that slow pairs are blamed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import networkx
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.bench.pairs import Counts as TrialCounts
from tests.bench.pairs import fat_tree, fills, trial
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.model.copy_routes import CopyRoutes
from topoplan.operate.calibration.calibrated_topology import LinkKey
from topoplan.operate.calibration.pair_results import match_results, parse_results
from topoplan.operate.calibration.pair_rounds import Rounds, plan_rounds
from topoplan.operate.calibration.pair_tests import PairTest, PairTests, possible_tests, wire_names
from topoplan.operate.calibration.slow_links import MeasuredPair, SlowLinkReport, attribute_slow_pairs


def one_switch(servers: int, **network: Any) -> Topology:
    boxes = [topoplan.Server("dgx-1v", [0], count=servers)]
    return topoplan.cluster(boxes, nic_gbps=100, nics=1, nic_access="direct", **network)


def planned(machine: Topology, **asked: object) -> tuple[PairTests, Rounds]:
    possible = possible_tests(machine, **asked)  # type: ignore[arg-type]
    return possible, plan_rounds(possible)


MACHINES = {
    "one switch": partial(one_switch, 6),
    "dgx-2": partial(topoplan.load, "dgx-2"),
    "fat tree": partial(fat_tree, 8),
    "fat tree, every GPU": partial(fat_tree, 8, gpus=2),
    "rails": lambda: topoplan.cluster(
        [topoplan.Server("dgx-1v", count=3)], nic_gbps=100, network="rail-optimised"
    ),
    "dgx-1v": partial(topoplan.load, "dgx-1v"),
    "torus": partial(topoplan.load, "torus:3,3"),
    "fat-tree:4": partial(topoplan.load, "fat-tree:4"),
}


POSSIBLE = possible_tests(one_switch(4))


@pytest.mark.sampled
@pytest.mark.parametrize("one_way", [False, True], ids=["both ways", "one way"])
@pytest.mark.parametrize("name", MACHINES)
def test_rounds_leave_each_other_alone_and_cross_every_link(name: str, *, one_way: bool) -> None:
    """No end or wire between switches twice in a round; each link three times or as often as there are tests."""
    machine = MACHINES[name]()
    possible, made = planned(machine, every_gpu=True, one_way=one_way)
    switches = {device.name for device in machine.devices if device.kind == "switch"}
    bandwidth = {(link.src, link.dst, link.channel): link.bandwidth for link in machine.links}
    for tests in made.rounds:
        ends = [end for test in tests for end in (test.src, test.dst)]
        assert len(ends) == len(set(ends))
        for key in {key for test in tests for key in test.links}:
            crossing = [test for test in tests if key in test.links]
            assert sum(test.load(key) for test in crossing) <= bandwidth[key] * (1 + 1e-9)
            assert len(crossing) == 1 or not {key[0], key[1]} <= switches
    crossed, there = (
        Counter(key for test in tests for key in test.links) for tests in (made.tests, possible.tests)
    )
    assert all(crossed[key] >= min(3, number) for key, number in there.items())
    assert len(made.rounds) >= made.fewest


@pytest.mark.parametrize(
    ("servers", "rounds"), [(2, 1), (3, 3), (4, 3), (5, 4), (6, 3), (7, 4), (16, 3), (17, 4)]
)
def test_one_switch_takes_as_many_rounds_as_are_needed(servers: int, rounds: int) -> None:
    """Three, and one more where a server stays over in each: an edge colouring of a graph of degree three."""
    _, made = planned(one_switch(servers))
    assert (len(made.rounds), made.fewest) == (rounds, rounds)
    assert made.classes == made.finest


@given(st.integers(2, 9), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1.0, 2.0]))
@settings(max_examples=12)
def test_no_plan_is_below_the_bound(hosts: int, leaf: int, times: int, ratio: float) -> None:
    """Where the bound is met it is the optimum; otherwise it is at most two rounds away on small trees."""
    tree = one_switch(hosts, network="fat-tree", leaf_size=leaf, oversubscription=ratio)
    made = plan_rounds(possible_tests(tree), times=times)
    assert made.fewest <= len(made.rounds) <= made.fewest + 2


def test_the_bound_is_the_optimum_of_all_plans_of_a_small_tree() -> None:
    """Two leaves of two hosts, each link once: every set of two rounds is tried, and the bound says two."""
    possible = possible_tests(one_switch(4, network="fat-tree", leaf_size=2))
    made = plan_rounds(possible, times=1)
    every = {key for test in possible.tests for key in test.links}
    single = [
        tests
        for size in (1, 2)
        for tests in combinations(possible.tests, size)
        if len({end for test in tests for end in (test.src, test.dst)}) == 2 * size
        and all(
            not {key for key in a.links if "spine0" in key[:2]} & set(b.links)
            for a, b in combinations(tests, 2)
        )
    ]
    assert not any({key for test in tests for key in test.links} == every for tests in single)
    assert (len(made.rounds), made.fewest) == (2, 2)


def blamed(
    possible: PairTests, rate: Callable[[PairTest], float | None], *, told: bool = False
) -> SlowLinkReport:
    """Return the links that are blamed for pairs at these rates; None was not measured."""
    rates = [(test, rate(test)) for test in possible.tests]
    measured = [MeasuredPair(test, value) for test, value in rates if value is not None]
    return attribute_slow_pairs(measured, **({"possible": possible.tests} if told else {}))


def rate_with_slow_link(key: LinkKey, most: float, test: PairTest) -> float:
    """90 % of what the test's links allow, one of which does so much at most."""
    return 0.9 * (min(test.rate, most) if key in test.links else test.rate)


@pytest.mark.sampled
@pytest.mark.parametrize("name", MACHINES)
def test_each_single_slow_link_is_in_the_class_that_is_named(name: str) -> None:
    """Half of what a test takes of it, no noise, all pairs measured one way: named, and nothing else."""
    possible = possible_tests(MACHINES[name](), every_gpu=True, one_way=True)
    keys = sorted({key for test in possible.tests for key in test.links})
    for key in keys[:: max(1, len(keys) // 6)]:
        load = max(test.rate for test in possible.tests if key in test.links)
        slow = partial(rate_with_slow_link, key, load / 2)
        found = blamed(possible, slow)
        assert [key in one.links for one in found.named] == [True], key
        assert not found.alternatives
        assert not found.unexplained


def test_a_slow_pair_whose_links_others_clear_is_blamed_on_no_link() -> None:
    found = blamed(POSSIBLE, lambda test: 5.0 if test.name == "s0.gpu0-s1.gpu0" else 11.0)
    assert not found.named
    assert [one.test.name for one in found.unexplained] == ["s0.gpu0-s1.gpu0"]


def test_explanations_of_one_size_are_all_told() -> None:
    """Of three servers all three pairs are slow, three others are well: any two of the three explain it."""
    slow = {f"s{n}.gpu0" for n in range(3)}
    rate = {True: 5.0, False: 11.0}
    found = blamed(
        possible_tests(one_switch(6)),
        lambda test: rate[test.src in slow] if (test.src in slow) == (test.dst in slow) else None,
        told=True,
    )
    assert not found.named
    told = {frozenset(wire_names(one.links)[0] for one in each) for each in found.alternatives[0]}
    ways = [f"s{n}.gpu0-s{n}.nic0" for n in range(3)]
    assert told == {frozenset(two) for two in combinations(ways, 2)}


def test_the_two_ends_of_a_single_slow_pair_are_one_class() -> None:
    """They occur in one test only: which of them it is, nothing tells."""
    rate = {"s0.gpu0-s1.gpu0": 5.0, "s2.gpu0-s3.gpu0": 11.0}
    found = blamed(POSSIBLE, lambda test: rate.get(test.name))
    assert [len(wire_names(one.links)) for one in found.named] == [4]


def test_a_dead_link_counts_as_no_rate_at_all() -> None:
    found = blamed(POSSIBLE, lambda test: 0.0 if "s3" in test.name else 11.0, told=True)
    (one,) = found.named
    assert (one.rate, wire_names(one.links)) == (0.0, ("s3.gpu0-s3.nic0", "s3.nic0-switch0"))


def test_links_that_no_result_crosses_are_told() -> None:
    found = blamed(POSSIBLE, lambda test: 11.0 if test is POSSIBLE.tests[0] else None, told=True)
    told = {name for links in found.unmeasured for name in wire_names(links)}
    assert told == {wire for n in (2, 3) for wire in (f"s{n}.gpu0-s{n}.nic0", f"s{n}.nic0-switch0")}


@pytest.mark.parametrize(
    ("number", "gpus"), [(2, 1), (0, 1), *(pytest.param(n, 2, marks=pytest.mark.thorough) for n in (1, 2))]
)
def test_random_slow_links_are_named_under_noise(number: int, gpus: int) -> None:
    """3 % noise, ten trials, none missed and nobody blamed for nothing; with two GPUs a NIC each is named exactly."""
    rounds = plan_rounds(possible_tests(fat_tree(16, gpus=gpus), every_gpu=True))
    among = sorted({key for test in rounds.tests for key in test.links})
    random = numpy.random.default_rng(11)
    total = TrialCounts()
    for _ in range(10):
        total.add(trial(rounds.tests, number, random, among=among))
    assert (total.missed, total.false_alarms, total.alternative) == (0, 0, 0)
    assert total.exact + total.in_class == 10 * number
    assert gpus == 1 or total.exact == 10 * number


def test_rounds_that_fill_wide_links_find_an_uplink_that_no_pair_sees() -> None:
    """50 GB/s at half: a pair of 12.5 GB/s is none the slower, four at once are, and the uplink is named."""
    rounds = plan_rounds(possible_tests(fat_tree(16, oversubscription=1)), fill=True)
    bandwidth = {("leaf1", "spine0", "network"): 25.0}
    for tests in rounds.fill:
        ends = [end for test in tests for end in (test.src, test.dst)]
        assert len(ends) == len(set(ends)) == 16
    results, _ = fills(rounds, bandwidth, numpy.random.default_rng(5))
    found = attribute_slow_pairs(results)
    assert [wire_names(one.links) for one in found.named] == [("leaf1-spine0 filled",)]
    assert found.named[0].rate == pytest.approx(0.93 * 25 / 4, rel=0.05)
    results, _ = fills(replace(rounds, fill=()), bandwidth, numpy.random.default_rng(5))
    assert not attribute_slow_pairs(results).slow


def test_results_of_rounds_that_fill_links_say_so() -> None:
    possible = possible_tests(fat_tree(8, oversubscription=1))
    rounds = plan_rounds(possible, fill=True)
    text = "a,b,GB/s\ns0,s4,11\ns0,s4,6,fill1\n"
    fill = [test for tests in rounds.fill for test in tests]
    measured = match_results(parse_results(text), possible, rounds.tests, fill=fill)
    assert [(one.test.together, one.rate) for one in measured] == [("", 11.0), ("fill1", 6.0)]
    told = "line 3 of the results: s0 and s4 have no test of a round 'fill1'; give --fill"
    with pytest.raises(UsageError, match=told):
        match_results(parse_results(text), possible, possible.tests)


@pytest.mark.parametrize(
    ("text", "calibrated"),
    [
        ("# made by hand\nsrc,dst,GB/s\n s0.gpu0 , s1.gpu0 , 11.5 \n", False),
        ('{"one_way": true, "pairs": [{"src": "s0.gpu0", "dst": "s1.gpu0", "bandwidth": 11.5}]}', False),
        ('{"method": "x", "pairs": [{"src": "s0.gpu0", "dst": "s1.gpu0", "bandwidth": 11.5}]}', True),
    ],
)
def test_csv_json_and_what_calibrate_prints_are_read_alike(text: str, calibrated: bool) -> None:
    """One way as the head says; calibrate's object is told by its method."""
    read = parse_results(text)
    assert (read.one_way, read.calibrated) == (True, calibrated)
    found = match_results(read, possible_tests(one_switch(2), one_way=True))
    assert [(one.test.name, one.rate) for one in found] == [("s0.gpu0>s1.gpu0", 11.5)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the file is empty"),
        ("a,b,GB/s\n", "no pair below it"),
        ("s0,s1,3\n", "they need the head"),
        ("a,b,GB/s\ns0,s1\n", "line 2 of the results has 2 of 3 values; was the file cut?"),
        ("a,b,GB/s\ns0,s1,-3\n", "or failed, got '-3'"),
        ("a,b,GB/s\ns0,s1,inf\n", "or failed, got 'inf'"),
        ("a,b,GB/s\ns0,s7,3\n", "'s7' is not a GPU"),
        ("a,b,GB/s\ns0,s0,3\n", "a pair has two ends"),
        ("a,b,GB/s\ns0,s2,3\n", "is not a planned test"),
        ('{"pairs": [{"src": "s0"', "was the file cut?"),
        ('{"pairs": [{"src": "s0", "dst": 3}]}', "needs src, dst and bandwidth"),
        ('{"pairs": [{"src": "s0", "dst": "s1", "bandwidth": true}]}', "or failed, got True"),
        ('{"pairs": 3}', 'need "pairs"'),
    ],
)
def test_a_wrong_file_is_one_line(text: str, told: str) -> None:
    possible = possible_tests(one_switch(3))
    with pytest.raises(UsageError, match=told.replace("?", r"\?")) as caught:
        match_results(parse_results(text), possible, [possible.tests[0]])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("network", [{}, {"network": "fat-tree", "leaf_size": 2}])
def test_routes_between_servers_are_shortest_whichever_was_asked_for_first(network: dict[str, Any]) -> None:
    """A search continues where it stopped: near and far ends, in both orders, have the routes of fresh searches."""
    many = topoplan.cluster([topoplan.Server("dgx-a100", count=4)], nic_gbps=200, **network)
    ends = [f"s{server}.gpu{gpu}" for server in range(4) for gpu in (0, 5)]
    pairs = [(a, b) for a in ends for b in ends if a != b]
    near, far = CopyRoutes(many), CopyRoutes(many)
    first = {pair: near.between_servers(*pair) for pair in pairs}
    last = {pair: far.between_servers(*pair) for pair in reversed(pairs)}
    graph = networkx.DiGraph()
    for link in many.links:
        if link.channel != "nvlink":
            graph.add_edge(link.src, link.dst)
    for pair in pairs:
        alone = CopyRoutes(many).between_servers(*pair)
        assert alone is not None
        assert first[pair] == last[pair] == alone
        if alone.channel == "network":
            others = set(many.gpus) - set(pair)
            direct = graph.subgraph(set(graph) - others)
            assert len(alone.links) == networkx.shortest_path_length(direct, *pair)
