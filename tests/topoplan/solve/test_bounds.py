"""Bounds from flows: the least of all cuts or partitions, on classes of equal devices too; lengths of forests."""

from __future__ import annotations

import random
from fractions import Fraction

import networkx as nx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.regular_fabrics import cluster, hybrid_cubes, torus
from tests.support.small_fabrics import (
    COLLECTIVES,
    ROOTED,
    WRITTEN,
    both_ways,
    device_sets,
    direct_machines,
    leaving,
    machine,
    parents_of_trees,
    partitions,
    rank_distances,
    switched_machines,
)
from topoplan.machine.cluster import nvswitch_cluster
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.certificate import Cut, Lengths, Partition, Trivial
from topoplan.plans.certificates.forest_length import cheapest_forest, forest_length
from topoplan.solve.cuts_and_partitions import (
    FlowNetwork,
    best_bound,
    equivalent_ranks,
    smallest_cut,
    whole_capacities,
)

MACHINES = direct_machines(most=6) | direct_machines(most=5, bandwidths=WRITTEN) | switched_machines()


def nvlink(topology: Topology) -> Fabric:
    return Fabric(topology, ("nvlink",))


def value(topology: Topology, collective: str, root: int | None = None) -> Fraction:
    fabric = nvlink(topology)
    return best_bound(fabric, collective, root).bound(fabric, collective, root)


def other_side(topology: Topology, side: frozenset[str]) -> frozenset[str]:
    return frozenset(device.name for device in topology.devices) - side


@given(MACHINES, st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_the_broadcast_bound_is_the_smallest_cut_that_holds_the_root(topology: Topology, root: int) -> None:
    """Against all device sets; for reduce against what enters them."""
    root %= len(topology.gpus)
    sides = [side for side in device_sets(topology) if f"gpu{root}" in side]
    assert value(topology, "broadcast", root) == min(leaving(topology, side) for side in sides)
    others = [leaving(topology, other_side(topology, side)) for side in sides]
    assert value(topology, "reduce", root) == min(others)


@given(MACHINES)
@settings(max_examples=30, deadline=None)
def test_the_allgather_bound_is_the_slowest_cut(topology: Topology) -> None:
    """B+(S) N / |S ∩ ranks| over all device sets; for reduce-scatter with what enters them."""
    size = len(topology.gpus)
    sides = [(side, sum(gpu in side for gpu in topology.gpus)) for side in device_sets(topology)]
    assert value(topology, "allgather") == min(leaving(topology, s) * size / k for s, k in sides)
    entered = [leaving(topology, other_side(topology, s)) * size / k for s, k in sides]
    assert value(topology, "reduce_scatter") == min(entered)


@given(direct_machines(most=6, symmetric=True) | direct_machines(most=6, symmetric=True, bandwidths=WRITTEN))
@settings(max_examples=40, deadline=None)
def test_the_allreduce_bound_is_the_weakest_partition(topology: Topology) -> None:
    """cut(P) / (|P| - 1) over all partitions of the ranks, where links are direct and symmetric."""
    wires = [link for link in topology.links if link.src < link.dst]
    found = []
    for parts in partitions(list(topology.gpus)):
        if len(parts) > 1:
            part_of = {name: number for number, part in enumerate(parts) for name in part}
            crossing = [Fraction(str(w.bandwidth)) for w in wires if part_of[w.src] != part_of[w.dst]]
            found.append(sum(crossing, Fraction(0)) / (len(parts) - 1))
    assert value(topology, "allreduce") == min(found)
    assert isinstance(best_bound(nvlink(topology), "allreduce"), Partition)


def test_a_regular_fabric_with_a_bridge_is_parted_there() -> None:
    """Every rank has three equal links, but ranks are not equivalent: the halves are the weakest partition."""
    half = [(0, 1), (0, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)]
    wires = {(f"gpu{a + side}", f"gpu{b + side}"): 10.0 for side in (0, 5) for a, b in half}
    topology = machine(10, both_ways({**wires, ("gpu0", "gpu5"): 10.0}))
    assert len(equivalent_ranks(nvlink(topology))) == 1
    assert value(topology, "allreduce") == 10


def test_each_kind_of_certificate_has_its_place() -> None:
    """Cuts for one-way collectives, a partition on direct wires, lengths behind a switch, nothing for one rank."""
    dgx_1v, dgx_2 = topoplan.load("dgx-1v"), topoplan.load("dgx-2")
    assert best_bound(nvlink(dgx_1v.subset([0, 1, 3])), "reduce", 1) == Cut(("gpu1",))
    assert isinstance(best_bound(nvlink(dgx_1v), "allreduce"), Partition)
    assert isinstance(best_bound(nvlink(dgx_2), "allreduce"), Lengths)
    assert best_bound(nvlink(dgx_1v.subset([4])), "allgather") == Trivial()


@st.composite
def networks(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """A number of nodes, and arcs with capacities."""
    size = draw(st.integers(2, 7))
    node, capacity = st.integers(0, size - 1), st.integers(0, 9) | st.integers(0, 1 << 70)
    return size, draw(st.lists(st.tuples(node, node, capacity), max_size=25))


@given(networks())
@example((8, [(*map(int, ends), 1) for ends in ["01", "12", "27", "13", "34", "47", "05", "56", "62"]]))  # type: ignore[misc]
@settings(max_examples=60, deadline=None)
def test_a_flow_equals_its_cut_and_the_flow_of_networkx(
    network: tuple[int, list[tuple[int, int, int]]],
) -> None:
    """With capacities beyond 2^64 too, parallel arcs and arcs of capacity 0; the same object answers twice alike."""
    size, arcs = network
    ours = FlowNetwork(size, arcs)
    flow = ours.maximum(0, size - 1)
    side = ours.source_side()
    assert 0 in side
    assert size - 1 not in side
    assert flow == sum(c for u, v, c in arcs if u in side and v not in side)
    summed: dict[tuple[int, int], int] = {}
    for u, v, c in arcs:
        summed[u, v] = summed.get((u, v), 0) + c
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from((u, v, {"capacity": c}) for (u, v), c in summed.items())
    assert flow == nx.maximum_flow_value(graph, 0, size - 1)
    ours.maximum(size - 1, 0)
    assert ours.maximum(0, size - 1) == flow


def test_a_length_bounded_from_below_never_exceeds_the_true_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for a forest's length on thousands of GPUs is at most the length, and equal where ranks are alike."""
    fabrics = [Fabric(topoplan.nvswitch_cluster(3), ("nvlink", "network"))]
    fabrics += [Fabric(topoplan.load(name), ("nvlink",)) for name in ("dgx-1v", "mi250")]
    for fabric in fabrics:
        lengths = [
            [1 + (7 * place) % 5 for place in range(len(fabric.links))],
            [int(dst < fabric.size) for _, dst in fabric.ends],
        ]
        for collective in ("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce"):
            root = 1 if collective in ("broadcast", "reduce") else None
            for length in lengths:
                exact = forest_length(fabric, length, collective, root)
                with monkeypatch.context() as patched:
                    patched.setattr("topoplan.plans.certificates.forest_length.MOST_VERTICES", 1)
                    assert forest_length(fabric, length, collective, root) <= exact
                    if length is lengths[1] and not fabric.direct:
                        assert forest_length(fabric, length, collective, root) == exact


def test_bounds_of_channels_that_a_buffer_is_divided_between_add_up() -> None:
    channels = ("nvlink", "pcie", "nvlink+pcie")
    rates = [topoplan.compute_bound("dgx-1v", gpus=range(4), channels=one).rate for one in channels]
    assert rates == [75.0, 8.0, 83.0]


@pytest.mark.parametrize(
    "fabric",
    [
        cluster([3, 5], dead=["s1.nic2"]),
        cluster([4, 4, 4, 4], servers_per_leaf=2, spines=2),
        hybrid_cubes(2),
        torus(3, 4),
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
@settings(max_examples=50, deadline=None)
def test_devices_joined_at_no_length_may_be_one(
    topology: Topology, collective: str, data: st.DataObject
) -> None:
    """Many lengths of zero: the same forest length as from the distances between all ranks."""
    fabric = Fabric(topology, ("nvlink",))
    length = [data.draw(st.sampled_from([0, 0, 0, 1, 2, 7])) for _ in fabric.links]
    root = 0 if collective in ROOTED else None
    whole = cheapest_forest(rank_distances(fabric, length), collective, root)
    assert forest_length(fabric, length, collective, root) == whole


LONG = [1 << 40, 1 << 57, (1 << 61) // 7 - 1, 1 << 61, 1 << 90]
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


def test_a_server_without_inner_lengths_counts_once_for_each_of_its_ranks() -> None:
    """Two servers of 3 and 1: of four buffers' parts three cross one way and one the other."""
    wires = {("gpu0", "sw0"): 9.0, ("gpu1", "sw0"): 9.0, ("gpu2", "sw0"): 9.0, ("sw0", "gpu3"): 1.0}
    fabric = Fabric(machine(4, both_ways(wires), switches=1), ("nvlink",))
    there = [int((link.src, link.dst) == ("sw0", "gpu3")) for link in fabric.links]
    back = [int((link.src, link.dst) == ("gpu3", "sw0")) for link in fabric.links]
    assert forest_length(fabric, there, "allgather", None) == Fraction(3, 4)
    assert forest_length(fabric, back, "allgather", None) == Fraction(1, 4)
    assert forest_length(fabric, there, "allreduce", None) == 1
    assert topoplan.plan(fabric.topology, "allgather").bound == pytest.approx(4 / 3, rel=1e-12)
