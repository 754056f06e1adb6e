"""Flows on classes of devices that look alike, and forests on devices joined at no length: both lose nothing."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.regular_fabrics import cluster, hybrid_cubes, library, torus
from tests.support.small_fabrics import (
    COLLECTIVES,
    ROOTED,
    both_ways,
    device_sets,
    direct_machines,
    leaving,
    machine,
    parents_of_trees,
    rank_distances,
    switched_machines,
)
from topoplan.machine.cluster import nvswitch_cluster
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.forest_length import (
    cheapest_forest,
    forest_length,
    zero_length_components,
)
from topoplan.solve.cuts_and_partitions import (
    FlowNetwork,
    Quotient,
    best_bound,
    equivalent_ranks,
    smallest_cut,
    whole_capacities,
)

FEW = st.sampled_from([1.0, 2.0])
"""Few different bandwidths, so that devices look alike."""

ALIKE = st.one_of(
    direct_machines(most=6, symmetric=True, bandwidths=st.just(1.0)),
    direct_machines(most=5, bandwidths=FEW),
    switched_machines(bandwidths=FEW),
)


def nvlink(topology: Topology) -> Fabric:
    return Fabric(topology, ("nvlink",))


@given(ALIKE, st.integers(0, 5), st.integers(0, 5), st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_smallest_cut_between_two_ranks_is_that_of_all_device_sets(
    topology: Topology, one: int, two: int, forward: bool
) -> None:
    """Its value, and the set that comes with it has that value."""
    size = len(topology.gpus)
    source, sink = one % size, two % size
    if source == sink:
        sink = (sink + 1) % size
    fabric = nvlink(topology)
    capacity, scale = whole_capacities(fabric)
    value, side = Quotient(fabric, capacity, fixed=[source, sink], forward=forward).smallest_cut(source, sink)
    every = frozenset(device.name for device in topology.devices)

    def across(names: frozenset[str]) -> Fraction:
        return leaving(topology, names if forward else every - names)

    known = [s for s in device_sets(topology) if f"gpu{source}" in s and f"gpu{sink}" not in s]
    assert Fraction(value, scale) == min(across(s) for s in known)
    names = frozenset(fabric.nodes[node] for node in side)
    assert f"gpu{source}" in names
    assert f"gpu{sink}" not in names
    assert across(names) == Fraction(value, scale)


@given(ALIKE, st.integers(0, 5), st.fractions(Fraction(1, 9), 9, max_denominator=12), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_cut_slower_than_a_time_is_found_where_there_is_one(
    topology: Topology, sink: int, time: Fraction, forward: bool
) -> None:
    """Over all device sets without the sink: |S ∩ ranks| > time x capacity."""
    sink %= len(topology.gpus)
    fabric = nvlink(topology)
    capacity, scale = whole_capacities(fabric)
    found = Quotient(fabric, capacity, fixed=[sink], forward=forward).gather_cut(
        sink, ranks=fabric.size, time=time / scale
    )
    every = frozenset(device.name for device in topology.devices)

    def excess(names: frozenset[str]) -> Fraction:
        crossing = leaving(topology, names if forward else every - names)
        return sum(gpu in names for gpu in topology.gpus) - time * crossing

    worst = max(excess(s) for s in device_sets(topology) if f"gpu{sink}" not in s)
    assert (found is not None) == (worst > 0)
    if found is not None:
        names = frozenset(fabric.nodes[node] for node in found)
        assert f"gpu{sink}" not in names
        assert excess(names) == worst


@pytest.mark.parametrize(
    "fabric",
    [
        cluster([4, 4]),
        cluster([3, 5], dead=["s1.nic2"]),
        cluster([4, 4, 4, 4], servers_per_leaf=2, spines=2),
        cluster([4, 4], slow=["s0.nic1"]),
        hybrid_cubes(2),
        torus(3, 4),
        library("dgx-1v"),
        library("dgx-2", "pcie"),
        Fabric(nvswitch_cluster(2, gpus=4, rails=4, oversubscription=3), ("nvlink", "network")),
    ],
    ids=lambda fabric: f"{fabric.topology.name}-{fabric.size}",
)
def test_bounds_of_regular_fabrics_equal_flows_between_all_devices(fabric: Fabric) -> None:
    """Without classes: a flow to every rank, and a chain of flows for the gathered buffer."""
    capacity, scale = whole_capacities(fabric)
    for collective, forward in (("broadcast", True), ("reduce", False)):
        for root in (0, fabric.size - 1):
            side = smallest_cut(fabric, capacity, root, forward=forward)
            ends = fabric.ends if forward else [(d, s) for s, d in fabric.ends]
            whole = sum(c for (s, d), c in zip(ends, capacity, strict=True) if s in side and d not in side)
            proof = best_bound(fabric, collective, root).bound(fabric, collective, root)
            assert proof == Fraction(whole, scale)
    for collective, forward in (("allgather", True), ("reduce_scatter", False)):
        proof = best_bound(fabric, collective).bound(fabric, collective, None)
        assert feasible(fabric, capacity, scale, proof, forward=forward)
        assert not feasible(fabric, capacity, scale, proof * Fraction(1001, 1000), forward=forward)


def feasible(fabric: Fabric, capacity: list[int], scale: int, rate: Fraction, *, forward: bool) -> bool:
    """True where every rank can receive rate / N from each rank at once, or send it."""
    size = fabric.size
    unit = rate / size * scale
    ends = fabric.ends if forward else [(d, s) for s, d in fabric.ends]
    source = len(fabric.nodes)
    arcs = [(s, d, c * unit.denominator) for (s, d), c in zip(ends, capacity, strict=True)]
    arcs += [(source, rank, unit.numerator) for rank in range(size)]
    return all(
        FlowNetwork(source + 1, arcs).maximum(source, rank) == size * unit.numerator for rank in range(size)
    )


def test_ranks_that_look_alike_are_asked_once() -> None:
    """1024 GPUs of equal servers are one class, and from a root three: itself, its server, the others."""
    fabric = Fabric(nvswitch_cluster(128, rails=1), ("nvlink", "network"))
    assert equivalent_ranks(fabric) == [0]
    assert equivalent_ranks(fabric, [0]) == [1, 8]
    proof = best_bound(fabric, "allgather").bound(fabric, "allgather", None)
    assert proof == Fraction(25600, 127)


@given(switched_machines() | direct_machines(most=5), st.sampled_from(COLLECTIVES), st.data())
@settings(max_examples=150, deadline=None)
def test_devices_joined_at_no_length_may_be_one(
    topology: Topology, collective: str, data: st.DataObject
) -> None:
    """Many lengths of zero: the same forest length as from the distances between all ranks."""
    fabric = nvlink(topology)
    length = [data.draw(st.sampled_from([0, 0, 0, 1, 2, 7])) for _ in fabric.links]
    root = 0 if collective in ROOTED else None
    whole = cheapest_forest(rank_distances(fabric, length), collective, root)
    assert forest_length(fabric, length, collective, root) == whole


@given(switched_machines() | direct_machines(most=5), st.data())
@settings(max_examples=80, deadline=None)
def test_parts_are_devices_that_reach_each_other_for_nothing(topology: Topology, data: st.DataObject) -> None:
    """Both ways: reachability over links of length zero, by repeated squaring."""
    fabric = nvlink(topology)
    length = [data.draw(st.sampled_from([0, 0, 1])) for _ in fabric.links]
    size = len(fabric.nodes)
    free = np.eye(size, dtype=bool)
    for (s, d), y in zip(fabric.ends, length, strict=True):
        free[s, d] |= y == 0
    for _ in range(size):
        free = free @ free
    both = free & free.T
    assert zero_length_components(fabric, length) == [int(np.flatnonzero(both[v])[0]) for v in range(size)]


LONG = [3, 1 << 20, 1 << 40, 1 << 57, (1 << 61) // 7 - 1, 1 << 61, 1 << 90]
"""Longest arcs: sums within machine words, at their edge, and beyond."""


@pytest.mark.parametrize("longest", LONG)
def test_arborescences_of_any_length_are_the_shortest_of_all_trees(longest: int) -> None:
    """Five vertices, every tree listed. Sums of all arcs once left the machine words and had no end."""
    pick = random.Random(longest)
    for _ in range(20):
        size = pick.randint(2, 5)
        distance = [[0 if u == v else pick.randint(0, longest) for v in range(size)] for u in range(size)]
        root = pick.randrange(size)
        listed = min(sum(distance[u][v] for v, u in tree.items()) for tree in parents_of_trees(size, root))
        assert cheapest_forest(distance, "broadcast", root) == listed


def test_long_arcs_between_many_ranks_stay_exact() -> None:
    """Fourteen ranks at the edge of machine words: as many times longer as the same arcs made short."""
    pick = random.Random(14)
    for _ in range(20):
        short = [[0 if u == v else pick.randint(1, 1 << 20) for v in range(14)] for u in range(14)]
        long = [[y << 37 for y in row] for row in short]
        assert cheapest_forest(long, "broadcast", 3) == cheapest_forest(short, "broadcast", 3) * (1 << 37)


def test_a_server_without_inner_lengths_counts_once_for_each_of_its_ranks() -> None:
    """Two servers of 3 and 1: of four buffers' parts three cross one way and one the other."""
    wires = {("gpu0", "sw0"): 9.0, ("gpu1", "sw0"): 9.0, ("gpu2", "sw0"): 9.0, ("sw0", "gpu3"): 1.0}
    fabric = nvlink(machine(4, both_ways(wires), switches=1))
    there = [int((link.src, link.dst) == ("sw0", "gpu3")) for link in fabric.links]
    back = [int((link.src, link.dst) == ("gpu3", "sw0")) for link in fabric.links]
    assert forest_length(fabric, there, "allgather", None) == Fraction(3, 4)
    assert forest_length(fabric, back, "allgather", None) == Fraction(1, 4)
    assert forest_length(fabric, there, "allreduce", None) == 1
    assert topoplan.plan(fabric.topology, "allgather").bound == pytest.approx(4 / 3, rel=1e-12)
