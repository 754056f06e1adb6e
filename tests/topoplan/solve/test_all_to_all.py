"""All-to-all reaches the optimum of the concurrent flow problem, proves it, and a wrong plan of it is found out."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.concurrent_flow import concurrent_flow
from tests.support.irregular_fabrics import KINDS, irregular
from tests.support.refusals import refused
from tests.support.small_fabrics import direct_machines, machine, switched_machines
from topoplan.errors import InfeasibleError, Note, PlanError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.certificate import Channels, Cut, Lengths
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.plan import Plan
from topoplan.solve.packing import all_to_all
from topoplan.solve.simplex.guided_simplex import GuidedSimplex


def exact_rate(plan: Plan) -> Fraction:
    """The recomputed rate of a plan that is proved optimal."""
    report = topoplan.verify(plan)
    assert report.optimal
    assert report.exact_rate is not None
    return report.exact_rate


def boxes(count: int, access: str) -> Topology:
    """DGX-A100 with eight NICs of 200 Gb/s each."""
    server = topoplan.Server(topoplan.load("dgx-a100"), count=count)
    return topoplan.cluster([server], nics=8, nic_gbps=200, nic_access=access)


@pytest.mark.parametrize(
    ("name", "channels", "pair"),
    [
        ("dgx-1v", "nvlink", "75/8"),
        ("dgx-1v", "pcie", "1/2"),
        ("v100x4", "nvlink", "125/4"),
        ("dgx-2", "nvlink", "10"),
        ("dgx-a100", "nvlink", "300/7"),
        ("dgx-h100", "nvlink", "450/7"),
    ],
)
def test_a_pair_of_a_known_machine_has_the_known_rate(name: str, channels: str, pair: str) -> None:
    """And the plan's rate is that of a whole buffer, one block for each rank."""
    plan = topoplan.plan(name, "alltoall", channels=channels)
    assert exact_rate(plan) == len(plan.ranks) * Fraction(pair)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("count", "access", "pair"), [(2, "direct", "25/8"), (2, "pcie", "3"), (8, "direct", "25/56")]
)
def test_a_pair_of_a_cluster_has_the_known_rate(count: int, access: str, pair: str) -> None:
    plan = topoplan.plan(boxes(count, access), "all_to_all")
    assert exact_rate(plan) == 8 * count * Fraction(pair)
    assert isinstance(plan.certificate, Cut)


def test_relays_are_worth_a_quarter_on_four_gpus() -> None:
    """Single NVLinks are full with 25 GB/s of each pair alone, double ones relay; an MI250 is five hops wide."""
    assert topoplan.one_hop_plan("v100x4", "alltoall").rate == 100.0
    plans = {name: topoplan.plan(name, "alltoall") for name in ("v100x4", "dgx-1v", "mi250")}
    assert {name: made.height for name, made in plans.items()} == {"v100x4": 2, "dgx-1v": 2, "mi250": 5}
    assert plans["v100x4"].rate == 125.0
    text = plans["dgx-1v"].to_json()
    assert '"format": "topoplan.plan/2"' in text
    assert Plan.from_json(text).to_json() == text


def meets_the_program(made: Topology, demand: list[list[int]]) -> None:
    """Equal blocks, and a demand, have the rate of a linear program over concurrent flows."""
    size = len(demand)
    for wanted, plan in (
        ([[1] * size] * size, topoplan.plan(made, "alltoall")),
        (demand, topoplan.plan(made, "alltoall", demand=demand)),
    ):
        flow = concurrent_flow(Fabric(plan.topology, plan.channels), wanted)
        assert float(exact_rate(plan)) == pytest.approx(sum(map(sum, wanted)) / size * flow, rel=1e-7)


@settings(max_examples=20)
@given(st.one_of(direct_machines(), switched_machines()), st.data())
def test_the_rate_is_that_of_a_linear_program(small: Topology, data: st.DataObject) -> None:
    size = len(small.gpus)
    row = st.lists(st.integers(0, 5), min_size=size, max_size=size)
    demand = data.draw(st.lists(row, min_size=size, max_size=size))
    demand[0][1] += 1
    with suppress(InfeasibleError):
        meets_the_program(small, demand)


@settings(max_examples=20)
@given(st.one_of(direct_machines(), switched_machines()), st.integers(0, 2**32))
def test_trees_that_avoid_each_other_lead_to_the_same_optimum(small: Topology, seed: int) -> None:
    """Plans of nine ranks and more begin with them; here all do."""
    pick, size = Random(seed), len(small.gpus)
    demand = [[pick.choice((0, 1, 1, 5, 30)) for _ in range(size)] for _ in range(size)]
    demand[0][1] += 1
    with mock.patch.object(all_to_all, "SPREAD_FROM", 2), suppress(InfeasibleError):
        meets_the_program(small, demand)


def known_machines() -> dict[str, Topology]:
    """A mesh of four, a ring of four, and a switch of four with one narrow port."""
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    mesh = {(f"gpu{a}", f"gpu{b}"): 25.0 for a, b in pairs}
    ring = {(f"gpu{a}", f"gpu{b}"): 50.0 for a, b in pairs if (a - b) % 4 in (1, 3)}
    ports = {(f"gpu{a}", "sw0"): 150.0 for a in range(4)}
    ports |= {("sw0", f"gpu{a}"): 75.0 if a == 2 else 150.0 for a in range(4)}
    return {
        "mesh": machine(4, mesh),
        "ring": machine(4, ring),
        "switch": machine(4, ports, switches=1),
        "dgx-1v": topoplan.load("dgx-1v"),
        "servers": machine(8, servers(), switches=3),
    }


def servers() -> dict[tuple[str, str], float]:
    """Links of two servers of four GPUs: 300 GB/s to an NVSwitch, 25 GB/s of each GPU to a flat network."""
    wires = {}
    for rank in range(8):
        for end, width in ((f"sw{rank // 4}", 300.0), ("sw2", 25.0)):
            wires[f"gpu{rank}", end] = wires[end, f"gpu{rank}"] = width
    return wires


KNOWN_DEMANDS: list[tuple[str, list[list[int]], str, str | None]] = [
    ("mesh", [[0, 8, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]], "2/15", "8/25"),
    ("ring", [[0, 0, 4, 0], [0, 0, 0, 0], [0, 0, 0, 2], [1, 0, 0, 0]], "1/25", None),
    ("switch", [[0, 3, 6, 0], [0, 0, 6, 3], [3, 3, 0, 3], [0, 6, 3, 0]], "1/5", "1/5"),
    ("dgx-1v", [[0] + [1] * 7, *([4] + [0] * 7 for _ in range(7))], "14/75", None),
    ("servers", [[0] * 4 + [3, 1, 1, 1]] * 4 + [[1] * 4 + [0] * 4] * 4, "6/25", "12/25"),
]
"""Machines, GB from row to column, and the least seconds with relays, and of direct paths alone if they lead to all.

Each equals its dual by shortest paths.
"""


def seconds_of(plan: Plan) -> Fraction:
    """The recomputed time of a demand in GB."""
    rate = topoplan.verify(plan).exact_rate
    assert isinstance(plan.certificate, Demand)
    assert rate is not None
    return plan.certificate.buffer / rate


@pytest.mark.parametrize(("name", "demand", "seconds", "direct"), KNOWN_DEMANDS)
@pytest.mark.parametrize("spread_from", [2, 9])
def test_a_demand_in_gb_takes_the_known_seconds(
    name: str, demand: list[list[int]], seconds: str, direct: str | None, spread_from: int
) -> None:
    with mock.patch.object(all_to_all, "SPREAD_FROM", spread_from):
        plan = topoplan.plan(known_machines()[name], "alltoall", demand=demand)
    assert topoplan.verify(plan).optimal
    assert seconds_of(plan) == Fraction(seconds)


@pytest.mark.parametrize(("name", "demand", "seconds", "direct"), KNOWN_DEMANDS)
def test_direct_paths_take_the_known_seconds(
    name: str, demand: list[list[int]], seconds: str, direct: str | None
) -> None:
    """The bound is that of relayed paths, and the note says which height was asked."""
    if direct is None:
        with refused(UsageError, begins="height must allow a path from rank"):
            topoplan.plan(known_machines()[name], "alltoall", demand=demand, height=1)
        return
    plan = topoplan.plan(known_machines()[name], "alltoall", demand=demand, height=1)
    assert plan.height == 1
    assert seconds_of(plan) == Fraction(direct)
    assert [note.kind for note in plan.notes if isinstance(note, Note)] == ["height asked"] * (
        direct != seconds
    )


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(100))
def test_a_random_demand_takes_the_time_of_a_linear_program(seed: int) -> None:
    """With relays, by direct paths alone, and within a gap: flows of each source, by scipy's HiGHS."""
    pick = Random(f"demand {seed}")
    size = pick.randint(3, 6)
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    wires = {
        (f"gpu{a}", f"gpu{b}"): pick.randint(1, 400) / 8
        for a, b in pairs
        if (b - a) % size == 1 or pick.random() < 0.5
    }
    if pick.random() < 0.5:
        for rank in range(size):
            wires[f"gpu{rank}", "sw0"] = wires["sw0", f"gpu{rank}"] = float(pick.randint(1, 50))
    made = machine(size, wires, switches=1)
    demand = [[pick.choice((0, 0, 1, 3, 40, 999)) for _ in range(size)] for _ in range(size)]
    demand[0][1] += 1
    plan = topoplan.plan(made, "alltoall", demand=demand)
    fabric, mean = Fabric(plan.topology, plan.channels), sum(map(sum, demand)) / size
    best = concurrent_flow(fabric, demand)
    assert float(exact_rate(plan)) == pytest.approx(mean * best, rel=1e-7)
    near = topoplan.plan(made, "alltoall", demand=demand, method="mwu", epsilon=0.02)
    report = topoplan.verify(near)
    assert 0.98 * report.bound <= report.rate <= plan.rate <= report.bound * (1 + 1e-12)
    direct = concurrent_flow(fabric, demand, relays=False)
    if direct < best * 1e-9:
        with refused(UsageError, begins="height must allow a path from rank"):
            topoplan.plan(made, "alltoall", demand=demand, height=1)
        return
    one = topoplan.plan(made, "alltoall", demand=demand, height=1)
    assert one.height == 1
    assert topoplan.verify(one).rate == pytest.approx(mean * direct, rel=1e-7)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(50))
def test_a_demand_over_one_way_links_needs_paths_only_for_what_it_sends(seed: int) -> None:
    """It takes the time of a linear program; a block for a rank out of reach is refused with both ranks."""
    pick = Random(f"one way {seed}")
    size, switches = pick.randint(3, 7), pick.randint(0, 2)
    names = [f"gpu{rank}" for rank in range(size)] + [f"sw{number}" for number in range(switches)]
    wires = {
        (a, b): pick.choice((1.0, 2.5, 7.0, 25.0))
        for a in names
        for b in names
        if a != b and (a, b) != ("gpu1", "gpu0") and ((a, b) == ("gpu0", "gpu1") or pick.random() < 0.25)
    }
    made = machine(size, wires, switches=switches)
    fabric = Fabric(made, ("nvlink",))
    reached = [fabric.reached_from(rank, forward=True) for rank in range(size)]
    demand = [[pick.choice((0, 1, 9, 10**6)) * (d in reached[s]) for d in range(size)] for s in range(size)]
    demand[0][1] += 1
    mean, best = Fraction(sum(map(sum, demand)), size), concurrent_flow(fabric, demand)
    plan = topoplan.plan(made, "alltoall", demand=demand)
    assert float(exact_rate(plan)) == pytest.approx(float(mean) * best, rel=1e-7)
    assert (
        topoplan.verify(topoplan.plan(made, "alltoall", demand=demand, method="mwu")).rate >= 0.95 * plan.rate
    )
    lost = [(s, d) for s in range(size) for d in range(size) if d not in reached[s]]
    if lost:
        source, end = pick.choice(lost)
        demand[source][end] = 4
        with refused(InfeasibleError, f"the demand sends a block from rank {source} to rank {end}") as caught:
            topoplan.plan(made, "alltoall", demand=demand)
        cut = caught.value.cut  # type: ignore[attr-defined]
        assert f"gpu{source}" in cut
        assert f"gpu{end}" not in cut
        assert not any(a in cut and b not in cut for a, b in wires)
        assert isinstance(plan.certificate, Demand)
        wrong = replace(plan, certificate=Demand(tuple(map(tuple, demand)), plan.certificate.certificate))
        with refused(PlanError, "the ranks are not connected over nvlink"):
            topoplan.verify(wrong)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["torus:4,4,2@25", "torus:8,4@25", "torus:2,2,2,2,2@25"])
@pytest.mark.parametrize("orders", [5, 7, 9])
def test_blocks_of_nine_orders_of_magnitude_are_planned_by_a_few_exact_pivots(name: str, orders: int) -> None:
    """No exact search starts anew, which took minutes; the optimum is proved, and is that of HiGHS within its gap."""
    pick = Random(f"orders {orders} {name}")
    demand = [[int(10 ** pick.uniform(0, orders)) * (a != b) for b in range(32)] for a in range(32)]
    with mock.patch.object(GuidedSimplex, "_repaired", side_effect=AssertionError("searched anew")):
        plan = topoplan.plan(name, "alltoall", demand=demand)
    assert topoplan.verify(plan).optimal
    near = topoplan.plan(name, "alltoall", demand=demand, method="mwu", epsilon=0.01)
    assert 0.99 * plan.rate <= near.rate <= plan.rate * (1 + 1e-9) <= near.bound * (1 + 2e-9)


def test_a_demand_takes_links_that_join_all_ranks_before_those_that_serve_it_alone() -> None:
    """Plans of demands stay what they were wherever some channels join all ranks."""
    wires = {("gpu0", "gpu1"): 1.0, ("gpu1", "gpu2"): 1.0}
    one_way = machine(3, wires)
    hosts = machine(
        3, {(f"gpu{a}", f"gpu{b}"): 9.0 for a in range(3) for b in range(3) if a != b}, channel="pcie"
    )
    both = replace(one_way, links=one_way.links + hosts.links)
    demand = [[0, 5, 5], [0, 0, 5], [0, 0, 0]]
    assert topoplan.plan(one_way, "alltoall", demand=demand).channels == ("nvlink",)
    assert "nvlink" not in topoplan.plan(both, "alltoall", demand=demand, channels="pcie").channels
    assert topoplan.plan(both, "alltoall", demand=demand).channels == topoplan.plan(both, "alltoall").channels


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(one, marks=pytest.mark.slow) for one in range(2, 6))])
def test_irregular_machines_reach_a_linear_program(kind: str, seed: int) -> None:
    made, pick = irregular(kind, seed), Random(f"demand {kind} {seed}")
    meets_the_program(made, [[pick.choice([0, 0, 1, 3, 8]) for _ in made.gpus] for _ in made.gpus])


@pytest.mark.parametrize(("name", "ranks"), [("torus:3,3@25", 8), ("torus:4,3@25", 10), ("dgx-2", 7)])
@pytest.mark.parametrize("method", ["exact", "mwu"])
@pytest.mark.parametrize("kept", [0, 5])
def test_equal_blocks_of_a_demand_are_planned_by_orbits_of_ranks(
    name: str, ranks: int, method: str, kept: int
) -> None:
    """Orbits of several lengths: the rate is that of the optimum without a demand, whatever stays on its rank."""
    gpus = range(ranks)
    demand = [[3 if a != b else kept for b in gpus] for a in gpus]
    plan = topoplan.plan(name, "alltoall", gpus=gpus, demand=demand, method=method)
    even = topoplan.verify(topoplan.plan(name, "alltoall", gpus=gpus))
    report = topoplan.verify(plan)
    assert isinstance(plan.certificate, Demand)
    assert even.exact_rate is not None
    assert report.exact_rate is not None
    least = Fraction(3 * ranks) / even.exact_rate / 10**9
    taken = plan.certificate.seconds(report.exact_rate)
    assert least <= taken <= least * (1 + (method == "mwu") * Fraction(1, 19))
    packed = all_to_all._Exchange(Fabric(plan.topology, plan.channels), plan.certificate.demand).packing
    assert len(packed.roots) < ranks


def test_a_demand_takes_the_time_of_its_cut() -> None:
    """One expert is wanted by all: its port of 300 GB/s takes 7 times 3 MB, and 10 us go by for each of them."""
    demand = [[3_000_000 if rank == 5 else 0 for rank in range(8)] for _ in range(8)]
    plan = topoplan.plan("dgx-a100", "alltoall", demand=demand)
    proof = plan.certificate
    assert isinstance(proof, Demand)
    assert isinstance(proof.certificate, Cut)
    assert proof.seconds(exact_rate(plan)) == Fraction(70, 10**6)
    assert sum(shard.share for shard in plan.shards) == 8


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        ([[0, -1], [1, 0]], "the demand from rank 0 to rank 1 must be whole bytes from 0 to "),
        (
            [[0, 1], [math.nan, 0]],
            "the demand from rank 1 to rank 0 must be whole bytes from 0 to ",
        ),
        (
            [[0, 1.5], [1, 0]],
            "the demand from rank 0 to rank 1 must be whole bytes from 0 to ",
        ),
        ([[0, 10**18], [1, 0]], "the demand from rank 0 to rank 1 must be whole bytes from 0 to "),
        ([[0, 1]], "the demand has 1 rows of 2 entries for 2 ranks; give 2 rows of 2"),
        ([[0], [1, 0]], "the demand has 2 rows of 1, 2 entries for 2 ranks; give 2 rows of 2"),
        ([], "the demand has 0 rows of 0 entries for 2 ranks; give 2 rows of 2"),
        ([[4, 0], [0, 4]], "the demand sends nothing from any rank to another; there is nothing to plan"),
    ],
)
def test_a_demand_that_is_none_is_refused_in_a_line(demand: list[list[float]], message: str) -> None:
    with refused(UsageError, begins=message):
        topoplan.plan("dgx-1v", "alltoall", gpus=[0, 1], demand=demand)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "mwu", "threshold": 0.1}, "threshold 0.1 does not apply"),
        ({"method": "mwu", "epsilon": 0.6}, "epsilon 0.6 must be from 0.002 to 0.5"),
        ({"method": "mwu", "height": 1}, "height goes with method 'exact', not 'mwu'"),
        ({"method": "three-phase"}, "by method exact or mwu, got three-phase"),
        ({"order": "trees"}, "order 'trees' does not apply"),
        ({"channels": "nvlink+pcie"}, "one choice of links"),
        ({"root": 0}, "alltoall has no root"),
    ],
)
def test_what_only_trees_have_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        topoplan.plan("dgx-1v", "alltoall", **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a demand belongs to alltoall, not to allreduce"):
        topoplan.plan("dgx-1v", gpus=[0, 1], demand=[[0, 1], [1, 0]])


def test_wrong_paths_are_found_out() -> None:
    """A block that goes elsewhere, one that is missing, one out of order, and a path that branches."""
    plan = topoplan.plan("v100x4", "alltoall")
    shards = list(plan.shards)
    moved = next(number for number, shard in enumerate(shards) if shard.stages[0].edges)
    before, after = shards[:moved], shards[moved + 1 :]
    stage = shards[moved].stages[0]
    others = [one.stages[0].edges for one in shards if one.stages[0].root == stage.root]
    other = next(edges[0] for edges in others if edges and edges != stage.edges)
    twice = replace(stage, edges=(*stage.edges[:1], other))
    uneven = [replace(shards[i], share=shards[i].share + Fraction((1, -1)[i], 100)) for i in (0, 1)]
    for message, changed in (
        ("order of their destinations", [*before, shards[moved], *after[::-1]]),
        ("the shares add up to", shards[:-1]),
        ("branches at rank", [*before, replace(shards[moved], stages=(twice,)), *after]),
        ("of its buffer to rank", [*uneven, *shards[2:]]),
    ):
        with pytest.raises(PlanError, match=message):
            topoplan.verify(replace(plan, shards=tuple(changed)))


def test_the_shards_of_a_demand_are_held_to_it() -> None:
    demand = [[0, 2, 1], [1, 0, 1], [1, 1, 0]]
    plan = topoplan.plan("dgx-1v", "alltoall", gpus=[0, 1, 2], demand=demand)
    assert isinstance(plan.certificate, Demand)
    other = replace(plan.certificate, demand=((0, 1, 2), *plan.certificate.demand[1:]))
    with pytest.raises(PlanError, match="carries 2 bytes to rank 1 instead of the 1"):
        topoplan.verify(replace(plan, certificate=other))


def test_certificates_of_other_plans_prove_nothing() -> None:
    """Bounds of channels suppose equal parts, and a demand speaks of an all-to-all."""
    plan = topoplan.plan("dgx-1v", "alltoall", gpus=[0, 1, 2])
    assert isinstance(plan.certificate, Cut | Lengths)
    with pytest.raises(PlanError, match="the bounds of channels do not add up"):
        topoplan.verify(replace(plan, certificate=Channels((("nvlink", plan.certificate),))))
    demand = Demand(((1, 1, 1),) * 3, plan.certificate)
    assert topoplan.verify(replace(plan, certificate=demand)).optimal
    other = topoplan.plan("dgx-1v", "allgather", gpus=[0, 1, 2])
    with pytest.raises(PlanError, match="a demand bounds alltoall, not allgather"):
        topoplan.verify(replace(other, certificate=demand))


def test_lengths_prove_what_no_cut_does() -> None:
    """Three GPUs on one side of a thin wire each: the links of a triangle, weighted, are what is full."""
    wires = {("gpu0", "gpu1"): 2.0, ("gpu1", "gpu2"): 3.0, ("gpu2", "gpu0"): 4.0}
    plan = topoplan.plan(machine(3, wires), "alltoall")
    assert isinstance(plan.certificate, Cut | Lengths)
    assert exact_rate(plan) == 2
