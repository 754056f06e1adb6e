"""Rings across servers: over NICs of their own, known rates, shortest routes, and compact where they are large."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from typing import Any

import pytest

import topoplan
from topoplan.errors import InfeasibleError
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.topology import Topology
from topoplan.plans.shards import ImageShards
from topoplan.schedules.ring import server_rings, switched_rings
from topoplan.schedules.ring_forest import ring_forest
from topoplan.schedules.routes import DirectRoutes, Layer


def dgx_1v_servers(count: int) -> Topology:
    return topoplan.cluster([topoplan.Server(topoplan.load("dgx-1v"), count=count)], nic_gbps=100)


@pytest.mark.sampled
@pytest.mark.parametrize("servers", [2, 3, 4, 5])
def test_rings_fill_every_nic(servers: int) -> None:
    """Eight rings of 25 GB/s over N ranks: 200 N / (2 (N - 1)) for an allreduce, on rails that are not joined."""
    machine = topoplan.nvswitch_cluster(servers)
    size = 8 * servers
    ring = topoplan.ring(machine)
    report = topoplan.verify(ring)
    assert ring.schedule == "network ring"
    assert report.exact_rate == Fraction(200 * size, 2 * (size - 1))
    assert {src for src, _ in report.bottleneck} == {
        *(f"s{s}.gpu{i}" for s in range(servers) for i in range(8)),
        *(f"s{s}.nic{i}" for s in range(servers) for i in range(8)),
        *("rail0", "rail1"),
    }


@pytest.mark.sampled
@pytest.mark.parametrize(("servers", "nics"), [(2, 2), (2, 4), (3, 2), (4, 3), (2, 1)])
def test_rings_fill_fewer_nics_than_gpus(servers: int, nics: int) -> None:
    """GPUs without a NIC are no doors: all NICs at their rate, both ways."""
    machine = topoplan.cluster(
        [topoplan.Server(topoplan.load("dgx-a100"), count=servers)], nic_gbps=200, nics=nics
    )
    size = 8 * servers
    assert topoplan.verify(topoplan.ring(machine)).exact_rate == Fraction(24 * nics * size, 2 * (size - 1))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "drawn",
    [
        {"network": "switch"},
        {"network": "rail-optimised"},
        {"network": "rail-optimised", "rails": 2},
        {"network": "rail-optimised", "oversubscription": 1.0},
        {"network": "fat-tree", "leaf_size": 1},
        {"network": "fat-tree", "leaf_size": 2},
    ],
    ids=["switch", "rails", "two rails", "spine", "leaves", "leaves of two"],
)
@pytest.mark.parametrize(("access", "nic"), [("direct", 50), ("pcie", 48)])
def test_the_rate_does_not_depend_on_how_the_network_is_drawn(
    drawn: dict[str, Any], access: str, nic: int
) -> None:
    """Three DGX H100: 8 NICs over 2 * 23 / 24 bytes, 208.696 GB/s with direct NICs, 200.348 behind PCIe slots."""
    made = topoplan.cluster([topoplan.Server("dgx-h100", count=3)], nic_gbps=400, nic_access=access, **drawn)
    assert topoplan.verify(topoplan.ring(made)).exact_rate == Fraction(8 * nic * 24, 46)


@pytest.mark.parametrize(
    ("name", "servers", "gbps", "rate"),
    [
        ("dgx-h100", 2, 400, Fraction(640, 3)),
        ("dgx-h100", 4, 400, Fraction(6400, 31)),
        ("dgx-a100", 2, 200, Fraction(320, 3)),
        ("dgx-a100", 4, 200, Fraction(3200, 31)),
    ],
)
def test_rings_of_direct_nics_are_those_of_another_program(
    name: str, servers: int, gbps: int, rate: Fraction
) -> None:
    """Answers of another program for servers behind one switch."""
    made = topoplan.cluster(
        [topoplan.Server(name, count=servers)], nic_gbps=gbps, nic_access="direct", network="switch"
    )
    assert topoplan.verify(topoplan.ring(made)).exact_rate == rate


@pytest.mark.parametrize("servers", [2, 3, 4])
def test_each_ring_enters_every_server_once_and_no_nic_carries_two(servers: int) -> None:
    """Ranks of a server stand together in every order; the hops between servers part over all NICs."""
    fabric = usable_fabric(topoplan.nvswitch_cluster(servers))
    rings = server_rings(fabric, DirectRoutes(fabric))
    assert len(rings) == 8
    crossed = Counter(link for ring in rings for hop in ring.hops for link in hop)
    network = {number for number, link in enumerate(fabric.links) if link.channel == "network"}
    assert {crossed[number] for number in network} == {1}
    for ring in rings:
        home = [rank // 8 for rank in ring.order]
        changes = sum(one != other for one, other in zip(home, home[1:] + home[:1], strict=True))
        assert changes == servers
        assert sorted(ring.order) == list(range(fabric.size))


def test_servers_of_direct_links_are_walked_over_nvlink_alone() -> None:
    """Two DGX-1V with four NICs of 12 GB/s: four rings, 48 * 16 / 30 GB/s, where one ring has 12."""
    machine = dgx_1v_servers(2)
    fabric = usable_fabric(machine)
    assert sum(ring.weight for ring in switched_rings(fabric, DirectRoutes(fabric))) == 12
    for ring in server_rings(fabric, DirectRoutes(fabric)):
        lengths = [len(hop) for hop in ring.hops]
        assert sorted(lengths) == [1] * 14 + [4, 4]
    assert topoplan.verify(topoplan.ring(machine)).exact_rate == Fraction(48 * 16, 30)


def test_a_ring_within_one_server_enters_no_server() -> None:
    """There is nothing to cross."""
    fabric = Fabric(topoplan.load("dgx-2"), ("nvlink",))
    assert server_rings(fabric, DirectRoutes(fabric)) == ()
    assert topoplan.ring(topoplan.load("dgx-2")).schedule == "nvlink ring"


@pytest.mark.parametrize(
    "fabric",
    [
        Fabric(topoplan.load("dgx-1v"), ("nvlink",)),
        Fabric(topoplan.load("dgx-1v"), ("pcie",)),
        Fabric(topoplan.load("mi250"), ("pcie",)),
        usable_fabric(topoplan.nvswitch_cluster(3, gpus=4)),
        usable_fabric(dgx_1v_servers(2)),
    ],
    ids=["nvlink", "pcie", "cpus", "rails", "one switch"],
)
def test_routes_are_the_shortest_of_all_arcs(fabric: Fabric) -> None:
    """The search from both ends finds the links of what the enumeration of all routes finds, and its widest."""
    every: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for arc in fabric.arcs:
        every.setdefault((arc.tail, arc.head), []).append(arc.links)
    routes = DirectRoutes(fabric)
    even, odd = ([Fraction(number % 2 == rest) for number in range(len(fabric.links))] for rest in (0, 1))

    def links_of(layer: Layer) -> set[int]:
        return {number for number, _, _ in layer}

    for pair in permutations(range(fabric.size), 2):
        known = every.get(pair, [])
        shortest = min(map(len, known), default=0)
        short = [links for links in known if len(links) == shortest]
        assert tuple(map(links_of, routes.layers(*pair))) == tuple(map(set, zip(*short, strict=True)))
        for width in (fabric.capacity, even, odd):
            best = max(short, key=lambda links, width=width: min(width[link] for link in links), default=None)
            assert routes.shortest(*pair, width) == best


@pytest.mark.thorough
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter"])
@pytest.mark.parametrize("machine", [topoplan.nvswitch_cluster(8), dgx_1v_servers(14)], ids=["rails", "cube"])
def test_large_rings_are_few_chains_and_symmetries(machine: Topology, collective: str) -> None:
    """Written out, a compact ring is valid and has the same rate and loads; the chains are those of all rings."""
    ring = topoplan.ring(machine, collective)
    assert isinstance(ring.shards, ImageShards)
    whole = replace(ring, shards=tuple(ring.shards))
    compact, spread = topoplan.verify(ring), topoplan.verify(whole)
    assert (compact.exact_rate, compact.loads) == (spread.exact_rate, spread.loads)
    fabric = usable_fabric(machine)
    rings = server_rings(fabric, DirectRoutes(fabric))
    assert len(whole.shards) == len(rings) * fabric.size
    assert len(set(whole.shards)) == len(whole.shards)
    again = topoplan.Plan.from_json(ring.to_json())
    assert topoplan.verify(again).exact_rate == compact.exact_rate


def test_large_rings_without_symmetry_are_refused() -> None:
    """128 servers of which one NIC is slower: 16 million edges are not written out."""
    machine = topoplan.nvswitch_cluster(128)
    slow = topoplan.slow_links(machine, {"s0.nic0-rail0": 12.0})
    fabric = usable_fabric(slow)
    rings = server_rings(fabric, DirectRoutes(fabric))
    with pytest.raises(InfeasibleError, match="8 rings of 1024 GPUs have 16760832 edges"):
        ring_forest(rings, fabric, collective="allreduce", root=None)
    assert len(ring_forest(rings, fabric, collective="broadcast", root=0)) == len(rings)
