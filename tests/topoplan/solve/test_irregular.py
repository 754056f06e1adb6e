"""Machines without any symmetry: measured bandwidths, random meshes, limits that differ in the last bit."""

from __future__ import annotations

import heapq
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.topology import Device, Link, Topology
from topoplan.plans.build import build_plan
from topoplan.solve.packing.column_generation import ColumnGeneration
from topoplan.solve.packing.exact import pack_exact
from topoplan.solve.packing.packing_program import Packing, Pricing
from topoplan.solve.route_table import ShortestRoutes
from topoplan.solve.simplex.guided_simplex import GuidedSimplex
from topoplan.solve.symmetry.symmetry_search import find_symmetry


def scaled(topology: Topology, factor: Callable[[random.Random], float], seed: int) -> Topology:
    stream = random.Random(seed)
    links = tuple(replace(link, bandwidth=link.bandwidth * factor(stream)) for link in topology.links)
    return replace(topology, links=links)


def measured(topology: Topology, seed: int) -> Topology:
    """Every bandwidth 0.9 to 1 times as large, to four decimals."""
    rough = scaled(topology, lambda stream: stream.uniform(0.9, 1), seed)
    return replace(rough, links=tuple(replace(x, bandwidth=round(x.bandwidth, 4)) for x in rough.links))


def mesh(size: int, seed: int) -> Topology:
    """A link of 10, 20, 30 or 45 GB/s between any two GPUs."""
    stream = random.Random(seed)
    links = []
    for a, b in combinations(range(size), 2):
        width = stream.choice([10.0, 20.0, 30.0, 45.0])
        links += [Link(f"gpu{s}", f"gpu{d}", "nvlink", width) for s, d in ((a, b), (b, a))]
    return Topology("mesh", tuple(Device(f"gpu{i}", "gpu", "s0") for i in range(size)), tuple(links))


TWO_SERVERS = topoplan.nvswitch_cluster(2)
LAST_BIT = scaled(TWO_SERVERS, lambda stream: 1 + stream.randrange(-3, 4) * 2.3e-16, 4)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "broadcast"])
@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(measured(TWO_SERVERS, 1), id="measured"),
        pytest.param(mesh(12, 3), id="mesh"),
        pytest.param(LAST_BIT, id="last bit"),
    ],
)
def test_the_optimum_is_proved_to_the_last_digit(machine: Topology, collective: str) -> None:
    """Rate and bound are equal fractions; the largest height is small."""
    made = topoplan.plan(machine, collective)
    assert topoplan.verify(made).optimal
    assert made.gap == 0
    assert made.height <= 3


def test_large_programs_are_guided_and_small_ones_are_not() -> None:
    """By their rows and the size of their limits: a measured cluster is, the same one with its symmetries is not."""
    programs = []
    for machine in (TWO_SERVERS, measured(TWO_SERVERS, 1)):
        fabric = usable_fabric(machine)
        generators = () if machine is not TWO_SERVERS else _symmetries(machine)
        packing = Packing(fabric, "allgather", None, generators)
        programs.append(isinstance(ColumnGeneration(Pricing(packing)).program, GuidedSimplex))
    assert programs == [False, True]


def _symmetries(machine: Topology) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(one.tolist()) for one in find_symmetry(usable_fabric(machine)))


PLAN = """
from tests.topoplan.solve.test_irregular import LAST_BIT, mesh
import topoplan
for machine in (mesh(11, 5), LAST_BIT):
    print(topoplan.plan(machine, "allgather").digest)
"""


@pytest.mark.thorough
def test_plans_are_the_same_in_every_process_and_on_any_number_of_threads() -> None:
    """Byte for byte, where floating point guides and has to be mended."""
    seen = {
        subprocess.run(
            [sys.executable, "-c", PLAN],
            env={"PYTHONHASHSEED": seed, "OPENBLAS_NUM_THREADS": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_a_forest_on_orbits_needs_no_more_than_its_own_fabric() -> None:
    """Called directly, as the bench does: a broadcast over a mesh of ten in its two heights."""
    fabric = usable_fabric(mesh(10, 1))
    forest = pack_exact(fabric, "broadcast", root=3)
    made = build_plan(
        fabric,
        "broadcast",
        root=3,
        shards=forest.shards,
        certificate=forest.certificate,
        schedule="trees",
        method="exact",
    )
    assert made.gap == 0
    assert topoplan.verify(made).optimal


@st.composite
def wirings(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]], list[int]]:
    """Ranks and switches, links between them, and lengths with many ties."""
    ranks, nodes = draw(st.integers(2, 5)), draw(st.integers(0, 5))
    nodes += ranks
    pairs = [(s, d) for s in range(nodes) for d in range(nodes) if s != d]
    ends = draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=len(pairs), unique=True))
    lengths = draw(st.lists(st.integers(0, 3), min_size=len(ends), max_size=len(ends)))
    return ranks, nodes, ends, lengths


@given(wirings())
@settings(max_examples=300, deadline=None)
def test_routes_are_those_of_dijkstra(wiring: tuple[int, int, list[tuple[int, int]], list[int]]) -> None:
    """Distance and last link from every rank, ties included."""
    ranks, nodes, ends, lengths = wiring
    search = ShortestRoutes(np.array(ends), ranks=ranks, nodes=nodes)
    distance, via = search(np.array(lengths), np.arange(ranks))
    for start in range(ranks):
        assert (distance[start].tolist(), via[start].tolist()) == _dijkstra(
            start, ranks, nodes, ends, lengths
        )


def _dijkstra(
    start: int, ranks: int, nodes: int, ends: list[tuple[int, int]], lengths: list[int]
) -> tuple[list[int], list[int]]:
    """Nodes by length, then links, then number; ranks but the first pass nothing on."""
    best: list[tuple[int, int] | None] = [None] * nodes
    via = [-1] * nodes
    best[start] = (0, 0)
    heap = [(0, 0, start)]
    while heap:
        length, hops, node = heapq.heappop(heap)
        if (length, hops) > (best[node] or (0, 0)) or (node < ranks and node != start):
            continue
        for number, (s, d) in enumerate(ends):
            reached = (length + lengths[number], hops + 1)
            known = best[d]
            if s == node and (known is None or reached < known):
                best[d], via[d] = reached, number
                heapq.heappush(heap, (*reached, d))
    return [-1 if one is None else one[0] for one in best], via


def switches(gpus: int, count: int, seed: int) -> Topology:
    """Every GPU on every switch, the switches joined, GPUs wired in a chain, all at bandwidths of their own."""
    stream = random.Random(seed)
    hubs = [f"nvswitch{j}" for j in range(count)]
    pairs = [(f"gpu{i}", hub) for i in range(gpus) for hub in hubs]
    pairs += [*combinations(hubs, 2), *((f"gpu{i}", f"gpu{i + 1}") for i in range(gpus - 1))]
    links = [
        Link(src, dst, "nvlink", round(stream.uniform(5, 150), 4))
        for one, other in pairs
        for src, dst in ((one, other), (other, one))
    ]
    devices = [Device(f"gpu{i}", "gpu") for i in range(gpus)] + [Device(hub, "nvswitch") for hub in hubs]
    return Topology("unequal switches", tuple(devices), tuple(links))


@pytest.mark.parametrize(("gpus", "count", "seed"), [(7, 3, 1), (9, 3, 2)])
def test_unequal_switches_are_packed_at_the_optimum_in_floating_point_first(
    gpus: int, count: int, seed: int
) -> None:
    """Limits beyond 16 bits: from 64 rows on floating point finds the corner, and exact duals prove it."""
    machine = switches(gpus, count, seed)
    made = topoplan.plan(machine, "allreduce")
    assert made.gap == 0
    assert topoplan.verify(made).exact_rate == topoplan.verify(made).exact_bound
    packing = Packing(Fabric(machine, ("nvlink",)), "allreduce", None)
    assert ColumnGeneration(Pricing(packing)).guided == (gpus == 9)
