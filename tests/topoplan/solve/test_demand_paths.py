"""The links of the slowest cut are filled exactly, by paths that carry the demand, or nothing is returned."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from itertools import pairwise
from random import Random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.concurrent_flow import concurrent_flow
from tests.support.demands import Rows, one_hot, some, zipf
from tests.support.small_fabrics import WRITTEN, machine, switched_machines
from topoplan.errors import InfeasibleError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.certificate import Cut
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.loads import link_loads
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Edge, Stage
from topoplan.solve.packing import all_to_all, demand_paths
from topoplan.solve.packing.demand_paths import fill_cut, slowest_cut
from topoplan.solve.packing.flow_packing import Path, block_shards, path_shards, path_stages
from topoplan.solve.search_control import Deadline


def servers(name: str, count: int, access: str = "direct") -> Topology:
    server = topoplan.Server(topoplan.load(name), count=count)
    return topoplan.cluster([server], nics=8, nic_gbps=400, nic_access=access)


def proved(made: Topology, demand: Rows, **options: object) -> Plan:
    plan = topoplan.plan(made, "alltoall", demand=demand, **options)  # type: ignore[arg-type]
    assert topoplan.verify(plan).optimal
    return plan


@pytest.mark.parametrize("demand", [zipf, some, one_hot])
def test_twenty_four_gpus_on_three_servers_fill_their_cut(demand: object) -> None:
    """The certificate is a cut, exact, and no linear program ran."""
    made, rows = servers("dgx-h100", 3), demand(24)  # type: ignore[operator]
    with mock.patch.object(all_to_all, "ColumnGeneration", side_effect=AssertionError):
        plan = proved(made, rows)
    assert isinstance(plan.certificate, Demand)
    assert isinstance(plan.certificate.certificate, Cut)
    assert plan.method == "exact"


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100", "dgx-1v"])
@pytest.mark.parametrize("access", ["direct", "pcie"])
@pytest.mark.parametrize("demand", [zipf, some, one_hot])
@pytest.mark.parametrize("seed", range(3))
def test_sixty_four_gpus_are_planned_optimally(name: str, access: str, demand: object, seed: int) -> None:
    proved(servers(name, 8, access), demand(64, seed))  # type: ignore[operator]


@pytest.mark.thorough
@pytest.mark.parametrize("demand", [zipf, some])
def test_both_roads_to_the_optimum_of_eighteen_gpus_lead_to_one_rate(demand: object) -> None:
    server = topoplan.Server(topoplan.load("dgx-a100"), range(6), count=3)
    made = topoplan.cluster([server], nics=6, nic_gbps=200, nic_access="direct")
    rows = demand(18)  # type: ignore[operator]
    filled = proved(made, rows)
    with mock.patch.object(all_to_all, "FILLED_FROM", 1000):
        assert proved(made, rows).rate == filled.rate


@settings(max_examples=20)
@given(switched_machines(bandwidths=WRITTEN), st.integers(0, 2**32))
def test_what_fills_a_cut_is_the_optimum_of_a_linear_program(small: Topology, seed: int) -> None:
    """Bandwidths of four digits: loads are exact all the same."""
    pick, size = Random(seed), len(small.gpus)
    demand = [[pick.choice((0, 1, 5, 30)) for _ in range(size)] for _ in range(size)]
    demand[0][1] += 1
    with mock.patch.object(all_to_all, "FILLED_FROM", 2), suppress(InfeasibleError):
        plan = proved(small, demand)
        flow = concurrent_flow(Fabric(plan.topology, plan.channels), demand)
        assert plan.rate == pytest.approx(sum(map(sum, demand)) / size * flow, rel=1e-7)


def test_every_block_leaves_whole_and_no_link_takes_longer_than_the_cut() -> None:
    made, rows = servers("dgx-a100", 2, "pcie"), some(16)
    demand = tuple(map(tuple, rows))
    fabric = Fabric(made, ("nvlink", "network"))
    filled = fill_cut(fabric, demand, deadline=Deadline(None))
    assert filled is not None
    least, cut = slowest_cut(fabric, demand)
    assert filled.cut == cut
    load = [Fraction(0)] * len(fabric.links)
    sent: dict[tuple[int, ...], Fraction] = {}
    for path, part in filled.paths():
        pair = path[0], path[-1]
        sent[pair] = sent.get(pair, Fraction(0)) + part
        for link in pairwise(path):
            load[fabric.link_between[link]] += part * demand[pair[0]][pair[1]]
    assert set(sent.values()) == {1}
    assert {pair for pair, row in np.ndenumerate(np.array(rows)) if row} == set(sent)
    assert max(one / width for one, width in zip(load, fabric.capacity, strict=True)) == least
    assert load == filled.loads(Fraction(1))


def test_paths_and_blocks_that_stay_are_in_the_order_of_the_shards_of_a_plan() -> None:
    """Destination, source, then the largest part; sums of loads are those of the shards."""
    made, rows = servers("dgx-a100", 3, "pcie"), some(24)
    rows = [[amount + 5 * (r == s and r % 2) for s, amount in enumerate(row)] for r, row in enumerate(rows)]
    fabric = Fabric(made, ("nvlink", "network"))
    demand = tuple(map(tuple, rows))
    filled = fill_cut(fabric, demand, deadline=Deadline(None))
    assert filled is not None
    paths = list(filled.paths())
    assert paths == sorted(paths, key=lambda one: (one[0][-1], one[0][0], -one[1], len(one[0]), one[0]))
    assert len(paths) == len({path for path, _ in paths})
    assert [path for path, part in paths if len(path) == 1] == [(rank,) for rank in range(1, 24, 2)]
    shards = path_shards(fabric, demand, paths)
    assert shards == block_shards(fabric, demand, dict(reversed(paths)))
    assert link_loads(shards, fabric) == filled.loads(Fraction(sum(map(sum, demand)), 24))


@pytest.mark.parametrize("channels", [("nvlink", "network"), ("pcie", "network"), ("all", "network")])
def test_edges_of_many_paths_are_those_of_each_path_alone(channels: tuple[str, ...]) -> None:
    """Random walks end at ranks, pass others, follow one another over links, or stay."""
    fabric, pick = Fabric(servers("dgx-1v", 2, "pcie"), channels), Random(3)
    leaving = fabric.route_graph.leaving()
    paths: list[Path] = [(0,), (1,)]
    while len(paths) < 60:
        walk = [pick.randrange(fabric.size)]
        while len(walk) < 3 or (walk[-1] >= fabric.size and len(walk) < 40):
            walk.append(pick.choice(leaving[walk[-1]])[1])
        nodes = tuple(fabric.route_graph.nodes[state] for state in walk)
        if nodes[-1] < fabric.size:
            paths += [nodes, (nodes[-1],)][: pick.randint(1, 2)]
    for path, stage in zip(paths, path_stages(fabric, paths), strict=True):
        edges, known = [], list(path[:1])
        for node in path[1:]:
            known.append(node)
            if node < fabric.size:
                links = [fabric.link_between[ends] for ends in pairwise(known)]
                route = tuple(fabric.nodes[each] for each in known)
                edges.append(Edge(known[0], node, route, fabric.channel_of(links)))
                known = [node]
        assert stage == Stage("broadcast", path[0], tuple(edges))
    assert len({edge.channel for stage in path_stages(fabric, paths) for edge in stage.edges}) > 1
    assert path_stages(fabric, []) == []


def test_a_fabric_whose_cuts_prove_less_than_its_links_is_left_to_the_program() -> None:
    """On a torus all links are full together, as no cut around a rank says."""
    fabric = Fabric(topoplan.load("torus:3,3,2@25"), ("nvlink", "network"))
    demand = tuple(tuple(int(a != b) for b in range(18)) for a in range(18))
    assert fill_cut(fabric, demand, deadline=Deadline(None)) is None
    plan = topoplan.plan("torus:3,3,2@25", "alltoall", demand=demand, method="mwu")
    assert topoplan.verify(plan).rate >= 0.95 * plan.bound
    assert plan.method == "mwu"


def test_slack_is_the_most_that_a_filled_cut_takes_longer() -> None:
    """A chain of two links, of which only the first is around a rank with a demand of its own."""
    wires = {("gpu0", "sw0"): 10.0, ("sw0", "sw1"): 9.6, ("sw1", "gpu1"): 20.0, ("gpu1", "gpu0"): 1.0}
    fabric = Fabric(machine(2, wires, switches=2), ("nvlink",))
    demand = ((0, 7), (0, 0))
    assert fill_cut(fabric, demand, deadline=Deadline(None)) is None
    filled = fill_cut(fabric, demand, slack=Fraction(1, 20), deadline=Deadline(None))
    assert filled is not None
    assert list(filled.paths()) == [((0, 2, 3, 1), Fraction(1))]


@pytest.mark.parametrize("unit", [1, 7, 2**20 - 3, 2**46])
def test_the_unit_of_a_demand_does_not_change_its_rate(unit: int) -> None:
    """Up to bytes whose sums only just fit into a double."""
    made, rows = servers("dgx-h100", 3), some(24)
    other = [[amount * unit for amount in row] for row in rows]
    assert proved(made, other).rate == proved(made, rows).rate


def test_amounts_that_are_too_many_to_count_exactly_are_left_to_the_program() -> None:
    """Pairs of 2^53 bytes and one less: their sums do not fit into a double."""
    ports = {(f"gpu{a}", "sw0"): 50.0 for a in range(3)} | {("sw0", f"gpu{a}"): 50.0 for a in range(3)}
    fabric = Fabric(machine(3, ports, switches=1), ("nvlink",))
    demand = ((0, 2**53, 2**53 - 1), (2**53 - 1, 0, 1), (1, 1, 0))
    assert fill_cut(fabric, demand, deadline=Deadline(None)) is None
    plan = topoplan.plan(fabric.topology, "alltoall", demand=demand, method="mwu")
    assert topoplan.verify(plan).rate >= 0.95 * plan.bound


def test_a_search_that_runs_out_of_moves_finds_nothing() -> None:
    made = servers("dgx-h100", 3, "pcie")
    fabric = Fabric(made, ("nvlink", "network"))
    with mock.patch.object(demand_paths, "MOVES", 1):
        assert fill_cut(fabric, tuple(map(tuple, zipf(24))), deadline=Deadline(None)) is None


def test_the_same_demand_has_the_same_plan() -> None:
    made = servers("dgx-h100", 3)
    assert proved(made, zipf(24)).to_json() == proved(made, zipf(24)).to_json()
