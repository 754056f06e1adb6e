"""Measured, random and unequal machines: the optimum to the last digit, or within a tolerance by kinds of links."""

from __future__ import annotations

import heapq
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.checkout import Run
from tests.support.refusals import refused
from tests.support.small_machines import joined
from topoplan import UsageError
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.topology import Device, Link, Topology
from topoplan.plans.plan import Plan
from topoplan.plans.shards import ImageShards
from topoplan.solve.cuts_and_partitions import best_bound, quick_bound
from topoplan.solve.packing.column_generation import ColumnGeneration
from topoplan.solve.packing.packing_program import Packing, Pricing
from topoplan.solve.planner import floored_by_kind
from topoplan.solve.route_table import ShortestRoutes
from topoplan.solve.simplex.guided_simplex import GuidedSimplex
from topoplan.solve.symmetry.symmetry_search import find_symmetry


def scaled(
    topology: Topology, factor: Callable[[random.Random], float], seed: int, digits: int = 20
) -> Topology:
    """Every bandwidth times a factor of its own."""
    stream = random.Random(seed)
    links = [replace(x, bandwidth=round(x.bandwidth * factor(stream), digits)) for x in topology.links]
    return replace(topology, links=tuple(links))


def measured(topology: Topology, seed: int) -> Topology:
    """Every bandwidth 0.9 to 1 times as large, to four decimals."""
    return scaled(topology, lambda stream: stream.uniform(0.9, 1), seed, 4)


def mesh(size: int, seed: int) -> Topology:
    """A link of 10, 20, 30 or 45 GB/s between any two GPUs."""
    stream = random.Random(seed)
    pairs = combinations(range(size), 2)
    return joined("mesh", {pair: stream.choice([10.0, 20.0, 30.0, 45.0]) for pair in pairs})


TWO_SERVERS = topoplan.nvswitch_cluster(2)
LAST_BIT = scaled(TWO_SERVERS, lambda stream: 1 + stream.randrange(-3, 4) * 2.3e-16, 4)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "broadcast"])
@pytest.mark.parametrize(
    "machine", [measured(TWO_SERVERS, 1), mesh(12, 3), LAST_BIT], ids=["measured", "mesh", "last bit"]
)
def test_the_optimum_is_proved_to_the_last_digit(machine: Topology, collective: str) -> None:
    """Rate and bound are equal fractions; the largest height is small."""
    made = topoplan.plan(machine, collective)
    assert topoplan.verify(made).optimal
    assert made.gap == 0
    assert made.height <= 3


def test_large_programs_are_guided_and_small_ones_are_not() -> None:
    """By their rows and the size of their limits: a measured cluster is, the same one with its symmetries is not."""
    symmetries = tuple(tuple(one.tolist()) for one in find_symmetry(usable_fabric(TWO_SERVERS)))
    for machine, generators, guided in (
        (TWO_SERVERS, symmetries, False),
        (measured(TWO_SERVERS, 1), (), True),
    ):
        packing = Packing(usable_fabric(machine), "allgather", None, generators)
        assert isinstance(ColumnGeneration(Pricing(packing)).program, GuidedSimplex) == guided


PLAN = """
from tests.topoplan.solve.test_irregular import LAST_BIT, mesh
import topoplan
for machine in (mesh(11, 5), LAST_BIT):
    print(topoplan.plan(machine, "allgather").digest)
"""


@pytest.mark.thorough
def test_plans_are_the_same_in_every_process_and_on_any_number_of_threads() -> None:
    """Byte for byte, where floating point guides and has to be mended."""
    seen = set()
    for seed in ("1", "2"):
        env = {"PYTHONHASHSEED": seed, "OPENBLAS_NUM_THREADS": seed, "PYTHONPATH": ":".join(sys.path)}
        seen.add(subprocess.check_output([sys.executable, "-c", PLAN], env=env))
    assert len(seen) == 1


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
@settings(max_examples=80, deadline=None)
def test_routes_are_those_of_dijkstra(wiring: tuple[int, int, list[tuple[int, int]], list[int]]) -> None:
    """Distance and last link from every rank, ties included."""
    ranks, nodes, ends, lengths = wiring
    search = ShortestRoutes(np.array(ends), ranks=ranks, nodes=nodes)
    distance, via = search(np.array(lengths), np.arange(ranks))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("topoplan.solve.route_table._CACHED_PAIRS", 1)
        parts = search(np.array(lengths), np.arange(ranks))
    assert np.array_equal(parts[0], distance)
    assert np.array_equal(parts[1], via)
    for start in range(ranks):
        found = (distance[start].tolist(), via[start].tolist())
        assert found == _dijkstra(start, ranks, nodes, ends, lengths)


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
    both = [ends for one, other in pairs for ends in ((one, other), (other, one))]
    links = [Link(*ends, "nvlink", round(stream.uniform(5, 150), 4)) for ends in both]
    devices = [Device(f"gpu{i}", "gpu") for i in range(gpus)] + [Device(hub, "nvswitch") for hub in hubs]
    return Topology("unequal switches", tuple(devices), tuple(links))


@pytest.mark.thorough
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


def measured_servers(servers: int, spread: float) -> Topology:
    """A100 servers whose links all differ, by up to ``spread`` of what they were."""
    machine = topoplan.nvswitch_cluster(servers)
    return scaled(machine, lambda stream: stream.uniform(1 - spread, 1), servers)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter", "broadcast", "reduce"])
def test_hundreds_of_measured_gpus_are_planned_within_the_tolerance(collective: str) -> None:
    """Servers within 0.4 %: the gap is at most that, from the plan's file, and the plan says where it comes from."""
    made = topoplan.plan(measured_servers(128 if collective == "allgather" else 16, 0.004), collective)
    read = Plan.from_json(made.to_json())
    checked = topoplan.verify(read)
    assert checked.exact_rate is not None
    assert checked.exact_bound is not None
    assert 0 < 1 - checked.exact_rate / checked.exact_bound <= 0.004
    assert "packed on the slowest bandwidth of each kind of link" in made.notes[-1]


def noisy_servers(servers: int, rails: int | None = None) -> Topology:
    """H100 servers whose links all differ by up to 10 %, each way on its own."""
    machine = topoplan.nvswitch_cluster(servers, nvlink=450.0, nic=50.0, rails=rails)
    return scaled(machine, lambda stream: stream.uniform(0.9, 1.1), servers, 4)


@pytest.mark.sampled
@pytest.mark.parametrize("rails", [None, 1])
@pytest.mark.parametrize(
    "collective", ["allreduce", "allgather", pytest.param("reduce", marks=pytest.mark.thorough)]
)
def test_images_are_weighed_by_the_links_they_cross(collective: str, rails: int | None) -> None:
    """72 GPUs within 10 %: the slowest links of each kind lose more than twice as much as the weighed images."""
    machine = noisy_servers(9, rails)
    made = topoplan.plan(machine, collective)
    fabric = Fabric(made.topology, made.channels)
    floored = floored_by_kind(fabric)
    assert floored is not None
    lost = 1 - topoplan.plan(floored.topology, collective).rate / made.bound
    assert made.gap < 0.5 * lost
    assert isinstance(made.shards, ImageShards)
    assert made.shards.parts is not None
    read = Plan.from_json(made.to_json())
    assert read == made
    assert topoplan.verify(read).rate == made.rate
    assert "images of the trees weighed by the actual ones" in made.notes[-1]


@pytest.mark.sampled
@pytest.mark.parametrize("rails", [1, 2, 8])
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_servers_are_entered_over_unlike_nics_by_one_tree(collective: str, rails: int) -> None:
    """128 GPUs within 10 %: the cut of one server is the optimum, and weighed trees come within 0.5 % of it."""
    made = topoplan.plan(noisy_servers(16, rails), collective)
    checked = topoplan.verify(made)
    assert checked.exact_rate is not None
    assert checked.exact_bound is not None
    assert checked.exact_rate >= checked.exact_bound * Fraction(995, 1000)


def test_shares_of_images_come_out_the_same_again() -> None:
    first, second = (topoplan.plan(noisy_servers(9), "allgather").digest for _ in range(2))
    assert first == second


@pytest.mark.thorough
@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter"])
def test_the_exact_search_starts_from_images_of_symmetric_trees(collective: str) -> None:
    """40 GPUs within 10 %: exact, and the trees suffice, so only the symmetric plan reports a round of pricing."""
    told: list[str] = []
    made = topoplan.plan(noisy_servers(5), collective, progress=told.append)
    assert topoplan.verify(made).optimal
    assert len(told) < 10


def test_links_of_the_floored_machine_have_one_bandwidth_a_kind() -> None:
    """NVLinks and NICs keep their own floors, and wires of two widths are two kinds."""
    fabric = Fabric(measured_servers(8, 0.05), ("nvlink", "network"))
    floored = floored_by_kind(fabric)
    assert floored is not None
    kinds = {(x.channel, x.src.split(".")[-1][:3], x.dst.split(".")[-1][:3]) for x in fabric.links}
    assert len({link.bandwidth for link in floored.links}) == len(kinds)
    assert all(low.bandwidth <= link.bandwidth for low, link in zip(floored.links, fabric.links, strict=True))
    # One slow wire makes a handful of classes, which the exact search takes as they are.
    assert floored_by_kind(Fabric(topoplan.nvswitch_cluster(16), ("nvlink", "network"))) is None
    assert floored_by_kind(Fabric(measured_servers(4, 0.05), ("nvlink", "network"))) is None


@pytest.mark.thorough
def test_a_time_limit_never_ends_below_the_start_of_the_search() -> None:
    """128 GPUs within 4 %: without a limit the start is the answer, with a limit of 0 the plan is at least as good."""
    machine = measured_servers(16, 0.04)
    start = topoplan.plan(machine, "allgather", tolerance=0.0001)
    assert 0.0001 < start.gap < 0.02
    assert "--time-limit S searches on" in start.notes[-1]
    searched = topoplan.plan(machine, "allgather", tolerance=0.0001, time_limit=0)
    assert searched.rate >= start.rate
    assert topoplan.verify(searched).rate == searched.rate


@pytest.mark.thorough
def test_the_tolerance_says_when_the_start_is_the_answer() -> None:
    """40 GPUs within 0.4 %: 1 % takes the start, 0 searches for the optimum."""
    machine = measured_servers(5, 0.004)
    assert topoplan.plan(machine, "allgather", tolerance=0.01).gap > 0
    assert topoplan.plan(machine, "allgather", tolerance=0).gap == 0


@pytest.mark.thorough
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter", "broadcast", "reduce"])
def test_blocks_prove_what_flows_do_on_clusters(collective: str) -> None:
    """Nine servers, measured: the tightest block is the tightest cut, and for an allreduce all servers prove less."""
    root = 5 if collective in ("broadcast", "reduce") else None
    fabric = Fabric(measured_servers(9, 0.03), ("nvlink", "network"))
    quick, flows = (bound(fabric, collective, root) for bound in (quick_bound, best_bound))
    proved, known = (each.bound(fabric, collective, root) for each in (quick, flows))
    assert proved < known if collective == "allreduce" else proved == known


def test_a_wrong_tolerance_is_one_line(run: Run) -> None:
    with refused(UsageError, "tolerance 1 must be a part of the bound"):
        topoplan.plan("dgx-1v", tolerance=1)
    status, _, error = run("plan", "dgx-1v", "--tolerance", "0.1", "--method", "mwu")
    assert (status, "--tolerance belongs to --method exact" in error) == (2, True)
