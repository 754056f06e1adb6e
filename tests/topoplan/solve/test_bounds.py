"""Bounds from flows alone: each is the least of all cuts or partitions, and flows are maximum flows."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import networkx as nx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.small_fabrics import (
    COLLECTIVES,
    WRITTEN,
    device_sets,
    direct_machines,
    leaving,
    machine,
    partitions,
    switched_machines,
)
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.certificate import Cut, Lengths, Partition, Trivial
from topoplan.plans.certificates.forest_length import forest_length
from topoplan.solve.cuts_and_partitions import FlowNetwork, best_bound

MACHINES = direct_machines(most=6) | direct_machines(most=5, bandwidths=WRITTEN) | switched_machines()


def nvlink(topology: Topology) -> Fabric:
    return Fabric(topology, ("nvlink",))


def value(topology: Topology, collective: str, root: int | None = None) -> Fraction:
    fabric = nvlink(topology)
    return best_bound(fabric, collective, root).bound(fabric, collective, root)


def other_side(topology: Topology, side: frozenset[str]) -> frozenset[str]:
    return frozenset(device.name for device in topology.devices) - side


@given(MACHINES, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_the_broadcast_bound_is_the_smallest_cut_that_holds_the_root(topology: Topology, root: int) -> None:
    """Against all device sets; for reduce against what enters them."""
    root %= len(topology.gpus)
    sides = [side for side in device_sets(topology) if f"gpu{root}" in side]
    assert value(topology, "broadcast", root) == min(leaving(topology, side) for side in sides)
    assert value(topology, "reduce", root) == min(
        leaving(topology, other_side(topology, side)) for side in sides
    )


@given(MACHINES)
@settings(max_examples=60, deadline=None)
def test_the_allgather_bound_is_the_slowest_cut(topology: Topology) -> None:
    """B+(S) N / |S ∩ ranks| over all device sets; for reduce-scatter with what enters them."""
    size = len(topology.gpus)
    sides = [(side, sum(gpu in side for gpu in topology.gpus)) for side in device_sets(topology)]
    assert value(topology, "allgather") == min(leaving(topology, s) * size / k for s, k in sides)
    assert value(topology, "reduce_scatter") == min(
        leaving(topology, other_side(topology, s)) * size / k for s, k in sides
    )


@given(direct_machines(most=6, symmetric=True) | direct_machines(most=6, symmetric=True, bandwidths=WRITTEN))
@settings(max_examples=80, deadline=None)
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


@pytest.mark.parametrize(
    ("name", "broadcast", "allreduce", "allgather"),
    [
        ("dgx-1v", 150, Fraction(600, 7), Fraction(1200, 7)),
        ("dgx-1p", 80, Fraction(320, 7), Fraction(640, 7)),
        ("dgx-2", 150, 80, 160),
        ("dgx-a100", 300, Fraction(1200, 7), Fraction(2400, 7)),
    ],
)
def test_bounds_of_real_machines(name: str, broadcast: int, allreduce: Fraction, allgather: Fraction) -> None:
    """Design section 8: 6, 24/7 and 48/7 links on DGX-1V, 4, 16/7 and 32/7 on DGX-1P, 80 GB/s on DGX-2."""
    machine = topoplan.load(name)
    for root in (0, len(machine.gpus) - 1):
        assert value(machine, "broadcast", root) == value(machine, "reduce", root) == broadcast
    assert value(machine, "allreduce") == allreduce
    assert value(machine, "allgather") == value(machine, "reduce_scatter") == allgather


def test_each_kind_of_certificate_has_its_place() -> None:
    """Cuts for one-way collectives, a partition on direct wires, lengths behind a switch, nothing for one rank."""
    dgx_1v, dgx_2 = topoplan.load("dgx-1v"), topoplan.load("dgx-2")
    assert best_bound(nvlink(dgx_1v.subset([0, 1, 3])), "reduce", 1) == Cut(("gpu1",))
    assert isinstance(best_bound(nvlink(dgx_1v), "allreduce"), Partition)
    assert isinstance(best_bound(nvlink(dgx_2), "allreduce"), Lengths)
    assert best_bound(nvlink(dgx_1v.subset([4])), "allgather") == Trivial()


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_bound_for_switches_that_copy_and_add_is_a_cut(collective: str) -> None:
    """What leaves one GPU of an A100 box bounds an allreduce in the network: 300 GB/s, not the 171.4 of plain trees."""
    a100 = topoplan.load("dgx-a100")
    devices = tuple(
        replace(d, multicast=d.kind == "nvswitch", reduce=d.kind == "nvswitch") for d in a100.devices
    )
    able = nvlink(replace(a100, devices=devices))
    root = 0 if collective in ("broadcast", "reduce") else None
    certificate = best_bound(able, collective, root)
    assert isinstance(certificate, Cut)
    assert certificate.bound(able, collective, root) == (
        Fraction(2400, 7) if collective in ("allgather", "reduce_scatter") else 300
    )


def test_a_wide_wire_hides_no_thin_one() -> None:
    """Twelve orders of magnitude between two wires: the bound is the thin one to the last digit."""
    thin, wide = 0.000047, 47_318_600.25
    wires = {("gpu0", "gpu1"): wide, ("gpu1", "gpu0"): wide, ("gpu1", "gpu2"): thin, ("gpu2", "gpu1"): thin}
    topology = machine(3, wires)
    assert value(topology, "broadcast", 0) == Fraction("0.000047")
    assert value(topology, "allreduce") == Fraction("0.000047")


NETWORKS = st.integers(2, 7).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.lists(
            st.tuples(
                st.integers(0, size - 1),
                st.integers(0, size - 1),
                st.integers(0, 9) | st.integers(0, 1 << 70),
            ),
            max_size=25,
        ),
    )
)


@given(NETWORKS)
@example(
    (8, [(0, 1, 1), (1, 2, 1), (2, 7, 1), (1, 3, 1), (3, 4, 1), (4, 7, 1), (0, 5, 1), (5, 6, 1), (6, 2, 1)])
)
@settings(max_examples=150, deadline=None)
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
    rates = [
        topoplan.bound("dgx-1v", gpus=range(4), channels=one).rate
        for one in ("nvlink", "pcie", "nvlink+pcie")
    ]
    assert rates == [75.0, 8.0, 83.0]
