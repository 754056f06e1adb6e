"""The exact method: the optimum of independent linear programs, proved as a rational number, at the lowest height."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.small_fabrics import (
    COLLECTIVES,
    ROOTED,
    WRITTEN,
    both_ways,
    direct_machines,
    machine,
    rate_by_flows,
    rate_by_trees,
    switched_machines,
)
from topoplan.machine.topology import FASTEST, SLOWEST, Device, Link, Topology
from topoplan.plans.plan import Plan

CLOSE = 1e-6
"""Certificates from the solutions of linprog."""

ANY_COLLECTIVE = st.sampled_from(COLLECTIVES)

REVERSED = {"broadcast": "reduce", "allgather": "reduce_scatter", "allreduce": "allreduce"}
REVERSED |= {back: there for there, back in REVERSED.items()}
"""The collective whose plans are those of another with every edge reversed."""


def proved(topology: Topology, collective: str, *, root: int | None = None, order: str = "height") -> Plan:
    """The plan, after the independent check found its rate equal to its bound as rational numbers."""
    if root is None and collective in ROOTED:
        root = 0
    made = topoplan.plan(topology, collective, root=root, order=order)
    report = topoplan.verify(made)
    assert report.exact_rate == report.exact_bound
    assert made.notes == () or len(topology.gpus) > 9
    return made


@pytest.mark.thorough
@given(direct_machines(most=4), ANY_COLLECTIVE, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_the_rate_is_the_optimum_over_all_listed_trees(
    topology: Topology, collective: str, root: int
) -> None:
    """Direct links of any width each way: linprog over every tree, or pair of trees, gives the same rate."""
    top = root % len(topology.gpus) if collective in ROOTED else None
    best = rate_by_trees(topology, collective, root=top)
    for order in ("height", "trees"):
        assert proved(topology, collective, root=top, order=order).rate == pytest.approx(best, rel=CLOSE)


@given(direct_machines(most=4), ANY_COLLECTIVE)
@settings(max_examples=25, deadline=None)
def test_the_height_is_the_lowest_that_reaches_the_rate(topology: Topology, collective: str) -> None:
    """All trees up to one edge less lose rate, and all trees up to the plan's height do not."""
    root = 0 if collective in ROOTED else None
    made = proved(topology, collective)
    lower = rate_by_trees(topology, collective, root=root, height=made.height - 1)
    enough = rate_by_trees(topology, collective, root=root, height=made.height)
    assert lower < made.rate * (1 - CLOSE)
    assert enough == pytest.approx(made.rate, rel=CLOSE)


@pytest.mark.thorough
@given(
    switched_machines() | switched_machines(bandwidths=WRITTEN) | direct_machines(most=5),
    ANY_COLLECTIVE,
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_the_rate_is_the_optimum_over_all_flows(topology: Topology, collective: str, root: int) -> None:
    """Switches that only forward, asymmetric ports: a program over flows, without a tree in it, gives the same rate."""
    top = root % len(topology.gpus) if collective in ROOTED else None
    made = proved(topology, collective, root=top)
    assert made.rate == pytest.approx(rate_by_flows(topology, collective, root=top), rel=CLOSE)


@given(direct_machines(most=6, bandwidths=WRITTEN, symmetric=True), ANY_COLLECTIVE)
@settings(max_examples=30, deadline=None)
def test_bandwidths_such_as_47_3186_are_packed_to_the_last_digit(topology: Topology, collective: str) -> None:
    """`proved` compares rational numbers; the file carries them, whatever their length."""
    made = proved(topology, collective)
    assert topoplan.verify(Plan.from_json(made.to_json())).optimal


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bandwidths_of_any_size_are_packed_exactly(collective: str) -> None:
    """The slowest and the fastest link that a topology may have, beside measured ones, in one machine."""
    wires = {("gpu0", "gpu1"): SLOWEST, ("gpu0", "gpu2"): FASTEST}
    wires |= {("gpu1", "gpu2"): 47.3186, ("gpu2", "gpu3"): 1 / 3}
    made = proved(machine(4, both_ways(wires)), collective)
    assert topoplan.verify(Plan.from_json(made.to_json())).optimal


REVERSIBLE = switched_machines() | direct_machines(most=5, bandwidths=WRITTEN)


def optimum(topology: Topology, collective: str, root: int | None = None) -> Fraction:
    rate = topoplan.verify(topoplan.plan(topology, collective, root=root)).exact_rate
    assert rate is not None
    return rate


@pytest.mark.thorough
@given(REVERSIBLE, ANY_COLLECTIVE, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_rate_follows_the_machine(topology: Topology, collective: str, random: Random) -> None:
    """Reversed links reverse a collective; order does not matter, units do; a wider link never lowers the rate."""
    devices, links = list(topology.devices), list(topology.links)
    rate = optimum(topology, collective)
    turned = tuple(replace(link, src=link.dst, dst=link.src) for link in links)
    assert optimum(replace(topology, links=turned), REVERSED[collective]) == rate
    wider = tuple(replace(link, bandwidth=link.bandwidth * 1024) for link in links)
    assert optimum(replace(topology, links=wider), collective) == pytest.approx(float(rate) * 1024, rel=1e-12)
    random.shuffle(devices)
    random.shuffle(links)
    shuffled = replace(topology, devices=tuple(devices), links=tuple(links))
    root = shuffled.gpus.index("gpu0") if collective in ROOTED else None
    assert optimum(shuffled, collective, root) == rate
    links[0] = replace(links[0], bandwidth=links[0].bandwidth + 1)
    assert optimum(replace(topology, links=tuple(links)), collective) >= rate


@pytest.mark.sampled
@pytest.mark.parametrize("root", range(8))
def test_dgx_1v_broadcasts_at_six_links_over_four_trees(root: int) -> None:
    """Trees of weights 2, 2, 1, 1 reach the rate of Blink's six; a root of four wires needs a tree for each."""
    made = proved(topoplan.load("dgx-1v"), "broadcast", root=root, order="trees")
    assert (made.rate, made.num_trees) == (150, 4)
    assert root or [shard.share for shard in made.shards] == [Fraction(n, 6) for n in (2, 2, 1, 1)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "collective", "rate", "height"),
    [
        ("dgx-1v", "allgather", Fraction(1200, 7), 2),
        ("dgx-1p", "reduce_scatter", Fraction(640, 7), 2),
        ("dgx-2", "allreduce", 80, 1),
        ("dgx-a100", "allgather", Fraction(2400, 7), 1),
    ],
)
def test_known_rates_and_heights(name: str, collective: str, rate: Fraction, height: int) -> None:
    """Design section 8 and Blink 3.5: 48/7 and 32/7 links' worth; one star for each GPU behind a switch."""
    made = proved(topoplan.load(name), collective)
    assert made.height == height
    assert made.rate == pytest.approx(float(rate), rel=1e-12)
    if height == 1:
        assert made.schedule == "one-hop"
        assert sorted(shard.stages[0].root for shard in made.shards) == list(range(len(made.ranks)))


def test_of_two_wires_between_the_same_devices_the_wider_is_used() -> None:
    """A GPU with PCIe and C2C to its CPU: a route names devices only, so a plan can speak of one of them."""
    links = [
        Link(a, b, channel, width)
        for i in range(3)
        for a, b in ((f"gpu{i}", "cpu0"), ("cpu0", f"gpu{i}"))
        for channel, width in (("pcie", 10.0), ("c2c", 20.0))
    ]
    devices = (*(Device(f"gpu{i}", "gpu") for i in range(3)), Device("cpu0", "cpu"))
    topology = Topology("superchip", devices, tuple(links))
    for collective, rate in (("allgather", 30), ("allreduce", 15), ("broadcast", 20)):
        made = proved(topology, collective)
        assert made.rate == rate
        assert made.channels == ("pcie",)


@pytest.mark.thorough
def test_a_mesh_of_switches_ends() -> None:
    """Twelve switches, all joined: there are millions of ways between two GPUs, and a plan in a moment."""
    wires = {(f"sw{a}", f"sw{b}"): 10.0 for a, b in combinations(range(12), 2)}
    wires |= {(f"gpu{i}", f"sw{3 * i}"): 25.0 for i in range(4)}
    made = proved(machine(4, both_ways(wires), switches=12), "allgather")
    assert made.rate == pytest.approx(25 * 4 / 3, rel=1e-12)


def test_more_than_nine_ranks_say_that_heights_are_not_proved_lowest() -> None:
    wires = {(f"gpu{i}", f"gpu{(i + 1) % 10}"): 2.0 for i in range(10)} | {("gpu0", "gpu5"): 1.0}
    made = proved(machine(10, both_ways(wires)), "broadcast")
    assert made.rate == 4
    assert made.notes == (f"height {made.height} is the lowest found, 3 the lowest not excluded",)


@pytest.mark.thorough
@pytest.mark.parametrize(("height", "rate"), [(2, 50), (3, 125), (4, 150)])
def test_a_height_that_is_asked_for_is_kept(height: int, rate: int) -> None:
    """The known optima of a DGX-1V's broadcast from gpu0, under the bound of all heights."""
    made = topoplan.plan("dgx-1v", "broadcast", height=height)
    assert (made.rate, made.bound) == (rate, 150)
    assert made.height <= height
    assert topoplan.verify(made).rate == rate
    assert any("as asked" in note for note in made.notes) == (height < 4)


def test_heights_beyond_the_tables_are_searched_on_orbits() -> None:
    made = topoplan.plan("mi250", height=3)
    assert made.height == 3
    assert 100 <= made.rate <= made.bound
    topoplan.verify(made)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"height": 1}, "no trees of height 1 serve all GPUs; the lowest that do are of height 2"),
        ({"height": 0}, "a height of 0 has no edge"),
        ({"height": 2, "order": "trees"}, "goes with order 'height'"),
        ({"height": 2, "method": "mwu"}, "goes with method 'exact'"),
        ({"height": 1, "collective": "alltoall"}, "height must allow a path from rank 0 .* got 1; raise it"),
    ],
)
def test_heights_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(topoplan.UsageError, match=words):
        topoplan.plan("dgx-1v", **options)
