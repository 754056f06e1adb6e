"""Pair tests: rounds that leave each other alone, and the links that slow pairs are blamed on."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.bench.pairs import Counts, fat_tree, fills, trial
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.operate.calibration.calibrated_topology import LinkKey
from topoplan.operate.calibration.pair_results import match_results, parse_results
from topoplan.operate.calibration.pair_rounds import Rounds, plan_rounds
from topoplan.operate.calibration.pair_tests import PairTests, possible_tests, wire_names
from topoplan.operate.calibration.slow_links import MeasuredPair, attribute_slow_pairs


def one_switch(servers: int) -> Topology:
    return topoplan.cluster(
        [topoplan.Server("dgx-1v", [0], count=servers)], nic_gbps=100, nics=1, nic_access="direct"
    )


def planned(machine: Topology, **asked: object) -> tuple[PairTests, Rounds]:
    possible = possible_tests(machine, **asked)  # type: ignore[arg-type]
    return possible, plan_rounds(possible)


MACHINES = {
    "one switch": one_switch(6),
    "fat tree": fat_tree(8),
    "fat tree, every GPU": fat_tree(8, gpus=2),
    "rails": topoplan.cluster([topoplan.Server("dgx-1v", count=3)], nic_gbps=100, network="rail-optimised"),
    "dgx-1v": topoplan.load("dgx-1v"),
    "dgx-2": topoplan.load("dgx-2"),
    "torus": topoplan.load("torus:3,3"),
    "fat-tree:4": topoplan.load("fat-tree:4"),
}


@pytest.mark.parametrize("one_way", [False, True], ids=["both ways", "one way"])
@pytest.mark.parametrize("name", MACHINES)
def test_rounds_leave_each_other_alone_and_cross_every_link(name: str, *, one_way: bool) -> None:
    """No end twice in a round, no wire between switches twice, no link beyond its bandwidth; each link three times or
    as often as there are tests; never fewer rounds than the bound."""
    possible, made = planned(MACHINES[name], every_gpu=True, one_way=one_way)
    switches = {device.name for device in MACHINES[name].devices if device.kind == "switch"}
    bandwidth = {(link.src, link.dst, link.channel): link.bandwidth for link in MACHINES[name].links}
    for tests in made.rounds:
        ends = [end for test in tests for end in (test.src, test.dst)]
        assert len(ends) == len(set(ends))
        for key in {key for test in tests for key in test.links}:
            crossing = [test for test in tests if key in test.links]
            assert sum(test.load(key) for test in crossing) <= bandwidth[key] * (1 + 1e-9)
            assert len(crossing) == 1 or not {key[0], key[1]} <= switches
    crossed: dict[LinkKey, int] = {}
    for test in made.tests:
        for key in test.links:
            crossed[key] = crossed.get(key, 0) + 1
    there: dict[LinkKey, int] = {}
    for test in possible.tests:
        for key in test.links:
            there[key] = there.get(key, 0) + 1
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


def test_leaves_of_four_take_one_round_more() -> None:
    """Each uplink carries one test of a round, and then one of the three other hosts has no partner."""
    _, made = planned(fat_tree(32))
    assert (len(made.rounds), made.fewest, made.classes, made.finest) == (4, 4, 40, 40)
    assert made.wide[0] == ("leaf0-spine0", 25.0, 12.5)


@given(
    st.integers(2, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([1.0, 2.0]),
)
@settings(max_examples=25, deadline=None)
def test_no_plan_is_below_the_bound(hosts: int, leaf: int, times: int, ratio: float) -> None:
    """Where the bound is met it is the optimum; otherwise it is at most two rounds away on small trees."""
    machine = topoplan.cluster(
        [topoplan.Server("dgx-1v", [0], count=hosts)],
        nic_gbps=100,
        nics=1,
        network="fat-tree",
        leaf_size=leaf,
        oversubscription=ratio,
    )
    made = plan_rounds(possible_tests(machine), times=times)
    assert made.fewest <= len(made.rounds) <= made.fewest + 2


def test_the_bound_is_the_optimum_of_all_plans_of_a_small_tree() -> None:
    """Two leaves of two hosts, each link once: every set of two rounds is tried, and the bound says two."""
    machine = topoplan.cluster(
        [topoplan.Server("dgx-1v", [0], count=4)], nic_gbps=100, nics=1, network="fat-tree", leaf_size=2
    )
    possible = possible_tests(machine)
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


def rates(possible: PairTests, slow: dict[LinkKey, float]) -> list[MeasuredPair]:
    return [
        MeasuredPair(test, 0.9 * min([test.rate, *(slow[key] for key in test.links if key in slow)]))
        for test in possible.tests
    ]


@pytest.mark.parametrize("name", MACHINES)
def test_each_single_slow_link_is_in_the_class_that_is_named(name: str) -> None:
    """Half of what a test takes of it, no noise, all pairs measured one way: named, and nothing else."""
    possible = possible_tests(MACHINES[name], every_gpu=True, one_way=True)
    keys = sorted({key for test in possible.tests for key in test.links})
    for key in keys[:: max(1, len(keys) // 6)]:
        load = max(test.rate for test in possible.tests if key in test.links)
        found = attribute_slow_pairs(rates(possible, {key: load / 2}))
        assert [key in one.links for one in found.named] == [True], key
        assert not found.alternatives
        assert not found.unexplained


def test_a_slow_pair_whose_links_others_clear_is_blamed_on_no_link() -> None:
    possible = possible_tests(one_switch(4))
    found = attribute_slow_pairs(
        [MeasuredPair(test, 5.0 if test.name == "s0.gpu0-s1.gpu0" else 11.0) for test in possible.tests]
    )
    assert not found.named
    assert [one.test.name for one in found.unexplained] == ["s0.gpu0-s1.gpu0"]


def test_explanations_of_one_size_are_all_told() -> None:
    """Of three servers all three pairs are slow, three others are well: any two of the three explain it."""
    possible = possible_tests(one_switch(6))
    slow, well = {f"s{n}.gpu0" for n in range(3)}, {f"s{n}.gpu0" for n in range(3, 6)}
    measured = [
        MeasuredPair(test, 5.0 if test.src in slow else 11.0)
        for test in possible.tests
        if {test.src, test.dst} <= slow or {test.src, test.dst} <= well
    ]
    found = attribute_slow_pairs(measured, possible=possible.tests)
    assert not found.named
    told = {frozenset(wire_names(one.links)[0] for one in each) for each in found.alternatives[0]}
    ways = [f"s{n}.gpu0-s{n}.nic0" for n in range(3)]
    assert told == {frozenset(two) for two in combinations(ways, 2)}


def test_the_two_ends_of_a_single_slow_pair_are_one_class() -> None:
    possible = possible_tests(one_switch(4))
    rate = {"s0.gpu0-s1.gpu0": 5.0, "s2.gpu0-s3.gpu0": 11.0}
    found = attribute_slow_pairs(
        [MeasuredPair(test, rate[test.name]) for test in possible.tests if test.name in rate]
    )
    assert [len(wire_names(one.links)) for one in found.named] == [4]


def test_a_dead_link_counts_as_no_rate_at_all() -> None:
    possible = possible_tests(one_switch(4))
    found = attribute_slow_pairs(
        [MeasuredPair(test, 0.0 if "s3" in test.name else 11.0) for test in possible.tests],
        possible=possible.tests,
    )
    assert [(one.rate, wire_names(one.links)) for one in found.named] == [
        (0.0, ("s3.gpu0-s3.nic0", "s3.nic0-switch0"))
    ]


def test_links_that_no_result_crosses_are_told() -> None:
    possible = possible_tests(one_switch(4))
    found = attribute_slow_pairs([MeasuredPair(possible.tests[0], 11.0)], possible=possible.tests)
    told = {name for links in found.unmeasured for name in wire_names(links)}
    assert told == {wire for n in (2, 3) for wire in (f"s{n}.gpu0-s{n}.nic0", f"s{n}.nic0-switch0")}


@pytest.mark.parametrize(("number", "gpus"), [(1, 1), (2, 1), (2, 2)])
def test_random_slow_links_are_named_under_noise(number: int, gpus: int) -> None:
    """3 % noise, ten trials, none missed and nobody blamed for nothing; with two GPUs a NIC each is named exactly."""
    rounds = plan_rounds(possible_tests(fat_tree(16, gpus=gpus), every_gpu=True))
    among = sorted({key for test in rounds.tests for key in test.links})
    random = numpy.random.default_rng(11)
    total = Counts()
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
    with pytest.raises(
        UsageError, match="line 3 of the results: s0 and s4 have no test of a round 'fill1'; give --fill"
    ):
        match_results(parse_results(text), possible, possible.tests)


def test_noise_alone_blames_nobody() -> None:
    """Twenty times 3 % noise on healthy pairs."""
    rounds = plan_rounds(possible_tests(fat_tree(16)))
    random = numpy.random.default_rng(3)
    total = Counts()
    for _ in range(20):
        total.add(trial(rounds.tests, 0, random, among=[]))
    assert total.false_alarms == 0


def test_csv_json_and_what_calibrate_prints_are_read_alike() -> None:
    csv = parse_results("# made by hand\nsrc,dst,GB/s\n s0.gpu0 , s1.gpu0 , 11.5 \n")
    json = parse_results(
        '{"one_way": true, "pairs": [{"src": "s0.gpu0", "dst": "s1.gpu0", "bandwidth": 11.5}]}'
    )
    made = parse_results(
        '{"method": "x", "pairs": [{"src": "s0.gpu0", "dst": "s1.gpu0", "bandwidth": 11.5}]}'
    )
    assert [one.one_way for one in (csv, json, made)] == [True] * 3
    assert [one.calibrated for one in (csv, json, made)] == [False, False, True]
    possible = possible_tests(one_switch(2), one_way=True)
    for one in (csv, json, made):
        assert [(found.test.name, found.rate) for found in match_results(one, possible)] == [
            ("s0.gpu0>s1.gpu0", 11.5)
        ]


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
