"""Ranks with more routes between them than are listed: all are searched, by plans, rings and one-hop trees alike."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from itertools import pairwise, permutations
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.checkout import Run
from tests.support.small_fabrics import machine
from topoplan.machine.fabric import MOST_LISTED, Fabric, usable_fabric
from topoplan.machine.topology import Topology
from topoplan.plans.minimum_trees import UNREACHABLE
from topoplan.schedules.routes import DirectRoutes, LeastLoaded, Links
from topoplan.solve.packing.packing_program import Packing


def behind_shared_nics(name: str, servers: int, *, nics: int | None = None, gbps: float = 200) -> Topology:
    """Servers whose GPUs all reach every NIC of theirs: nics x nics routes between GPUs of two servers."""
    server = topoplan.Server(topoplan.load(name), count=servers, nics=nics)
    return topoplan.cluster([server], nic_gbps=gbps, nic_access="direct")


@pytest.mark.parametrize("method", ["exact", "mwu"])
def test_the_command_that_ended_with_lengths_of_zero(method: str, tmp_path: Path, run: Run) -> None:
    """Two GPUs behind eight NICs of 25 GB/s each: 200 GB/s, and `verify` agrees."""
    file = str(tmp_path / "plan.json")
    ends = ("--servers", "2", "--gpus", "0,8", "--nic-bandwidth", "200Gb/s", "--nic-access", "direct")
    status, out, _ = run("plan", "dgx-a100", *ends, "--method", method, "--json", "-o", file)
    told = json.loads(out)
    assert (status, told["rate"], told["bound"]) == (0, 200.0, 200.0)
    assert run("verify", file)[0] == 0


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "broadcast"])
@pytest.mark.parametrize(
    ("servers", "nics", "gpus", "method"),
    [
        *((2, 6, (0, 2, 3, 4, 5, 6, 11, 13, 15), method) for method in ("exact", "mwu")),
        *((2, 8, (0, 1, 9, 10), method) for method in ("exact", "mwu")),
        (3, 7, (2, 12, 20), "exact"),
        pytest.param(4, 8, (0, 9, 18, 31), "mwu", marks=pytest.mark.slow),
    ],
)
def test_plans_fill_every_nic(
    servers: int, nics: int, gpus: tuple[int, ...], method: str, collective: str
) -> None:
    """What leaves a server is 25 GB/s for each of its NICs: the optimum, or twice 5 % less by weights."""
    machine = behind_shared_nics("dgx-a100", servers, nics=nics)
    plan = topoplan.plan(machine, collective, gpus=gpus, method=method)
    report = topoplan.verify(plan)
    assert report.exact_rate == Fraction(plan.rate).limit_denominator(1000)
    if method == "exact":
        assert plan.gap == 0
    assert plan.rate >= 0.95**2 * plan.bound
    each, least = 25 * nics, min(Counter(gpu // 8 for gpu in gpus).values())
    bounds = {
        "allreduce": each * servers / (2 * (servers - 1)),
        "allgather": each * len(gpus) / (len(gpus) - least),
        "broadcast": each,
    }
    assert plan.bound == pytest.approx(bounds[collective])


@pytest.mark.parametrize(("servers", "rate"), [(2, Fraction(640, 3)), (3, Fraction(4800, 23))])
def test_rings_over_shared_nics_use_all_of_them(servers: int, rate: Fraction) -> None:
    """Eight rings of 50 GB/s, each over a NIC of its own: 213.333, 208.696 and 206.452 GB/s."""
    ring = topoplan.ring_plan(behind_shared_nics("dgx-h100", servers, gbps=400))
    assert topoplan.verify(ring).exact_rate == rate
    assert len(ring.shards) == 8 * 8 * servers


def test_rings_and_one_hop_trees_of_two_gpus_use_all_nics_too() -> None:
    """Two GPUs behind eight NICs: eight rings there and back, 200 GB/s, and eight edges of trees."""
    fabric = usable_fabric(behind_shared_nics("dgx-a100", 2).subset([0, 8]))
    ring = topoplan.ring_plan(fabric.topology)
    assert (len(ring.shards), topoplan.verify(ring).exact_rate) == (16, 200)
    routes = LeastLoaded(fabric)
    edges = [routes.edge("broadcast", (0,), 1, Fraction(1)) for _ in range(8)]
    crossed = Counter(device for edge in edges for device in edge.route if "nic" in device)
    assert len(crossed) == 16
    assert set(crossed.values()) == {1}


def test_of_many_routes_the_first_are_listed() -> None:
    """Four NICs have 16 routes, which are all of fewest links; five have 25."""
    for nics, shortest in ((4, True), (5, False)):
        fabric = usable_fabric(behind_shared_nics("dgx-a100", 2, nics=nics).subset([0, 8]))
        assert len(fabric.arcs) == 2 * MOST_LISTED
        assert (fabric.lists_shortest_routes, fabric.lists_every_route) == (shortest, shortest)
    inside = usable_fabric(behind_shared_nics("dgx-a100", 2, nics=4).subset([0, 1, 8]))
    assert (inside.lists_shortest_routes, inside.lists_every_route) == (True, False)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Fabric, list[int]]:
    """Two or three ranks among switches that most links join, and a small number for every link."""
    size, switches = draw(st.integers(2, 3)), draw(st.integers(2, 5))
    names = [*(f"gpu{i}" for i in range(size)), *(f"sw{i}" for i in range(switches))]
    pairs = [(a, b) for a in names for b in names if a != b]
    wires = {pair: 1.0 for pair in pairs if draw(st.integers(0, 3))}
    fabric = Fabric(machine(size, wires, switches=switches), ("nvlink",))
    numbers = st.integers(0, 4)
    return fabric, draw(st.lists(numbers, min_size=len(fabric.links), max_size=len(fabric.links)))


def routes_between(fabric: Fabric, tail: int, head: int) -> list[Links]:
    """All routes, by networkx: fewest links first, then in the order of their links."""
    names = [fabric.ranks[tail], fabric.ranks[head], *fabric.nodes[fabric.size :]]
    graph = nx.DiGraph(ends for ends in fabric.link_index if set(ends) <= set(names))
    graph.add_nodes_from(names)
    paths = nx.all_simple_paths(graph, names[0], names[1])
    found = [tuple(fabric.link_index[ends] for ends in pairwise(path)) for path in paths]
    return sorted(found, key=lambda links: (len(links), links))


@given(meshes())
@settings(max_examples=30, deadline=None)
def test_the_widest_routes_are_those_of_all_that_networkx_lists(drawn: tuple[Fabric, list[int]]) -> None:
    """Of the shortest, and of all of which the shortest is taken; of equals the first."""
    fabric, numbers = drawn
    width = [Fraction(number) for number in numbers]
    routes = DirectRoutes(fabric)
    for tail, head in ((0, 1), (1, 0)):
        known = routes_between(fabric, tail, head)
        assert routes.joined(tail, head) == bool(known)
        if not known:
            assert routes.shortest(tail, head, width) is routes.widest(tail, head, width) is None
            assert routes.stripes(tail, head, width) == {}
            continue
        short = [links for links in known if len(links) == len(known[0])]

        def narrow(links: Links) -> Fraction:
            return min(width[link] for link in links)

        assert routes.shortest(tail, head, width) == max(short, key=narrow)
        assert routes.widest(tail, head, width) == max(known, key=narrow)


@given(meshes())
@settings(max_examples=30, deadline=None)
def test_stripes_carry_all_of_the_data_over_the_shortest_routes(drawn: tuple[Fabric, list[int]]) -> None:
    """What reaches a switch leaves it, and all reaches the head; where each route has a switch, by its width."""
    fabric, numbers = drawn
    width = [Fraction(number + 1) for number in numbers]
    known = routes_between(fabric, 0, 1)
    part = DirectRoutes(fabric).stripes(0, 1, width)
    short = [links for links in known if len(links) == len(known[0])]
    assert set(part) == {link for links in short for link in links}
    for node in range(len(fabric.nodes)) if part else ():
        entered, left = (sum(part[e] for e in part if fabric.ends[e][side] == node) for side in (1, 0))
        assert left - entered == {0: 1, 1: -1}.get(node, 0)
    if short and len(short[0]) == 2:
        narrow = {links: min(width[link] for link in links) for links in short}
        assert {part[links[0]] for links in short} == {part[links[1]] for links in short}
        assert all(part[links[0]] == least / sum(narrow.values()) for links, least in narrow.items())


@given(meshes())
@settings(max_examples=30, deadline=None)
def test_the_cheapest_route_is_the_cheapest_of_all(drawn: tuple[Fabric, list[int]]) -> None:
    """Between any two ranks, whatever was listed: it is one of the routes there are, and none is shorter."""
    fabric, numbers = drawn
    if not fabric.arcs:
        return
    for lengths in (numbers, [4 * number + 1 for number in numbers]):
        routes = Packing(fabric, "broadcast", 0).routes(lengths)
        for tail, head in permutations(range(fabric.size), 2):
            known = routes_between(fabric, tail, head)
            assert (routes.cost[tail, head] < UNREACHABLE) == bool(known)
            if not known:
                continue
            least = min(sum(lengths[link] for link in links) for links in known)
            found = routes.route(tail, head)
            assert (fabric.arc(found).tail, fabric.arc(found).head) == (tail, head)
            assert found in known
            assert sum(lengths[link] for link in found) == least == routes.cost[tail, head]
            crossed = routes.usage(np.array([tail]), np.array([head]), np.array([0]), 1)[0]
            assert sorted(found) == np.flatnonzero(crossed).tolist()
