"""Schedules for small messages: one hop, the lowest tree, one shot; parameter servers and their ring of keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from collectives import Communicator
from tests.support.regular_fabrics import helped_star as star
from tests.support.small_fabrics import COLLECTIVES, both_ways, direct_machines, machine, switched_machines
from tests.support.small_machines import CABLED
from topoplan import InfeasibleError, Plan, PlanError, Topology, UsageError, one_shot_plan
from topoplan.machine.fabric import Fabric
from topoplan.model.closed_form import clock
from topoplan.model.dataflow import LAUNCH, START_UP
from topoplan.model.event_simulation import run_events
from topoplan.plans.shards import Shard, Stage
from topoplan.plans.verify import _check_exchanges
from topoplan.reading.load import library
from topoplan.schedules.hierarchical import grid_exchange
from topoplan.schedules.low_latency import (
    _spread,
    lowest_tree,
    one_shot_along,
    one_shot_servers,
    spread_one_hop,
)
from topoplan.schedules.owner_exchange import owner_exchanges
from topoplan.schedules.parameter_server import KEYS, HashRing, parameter_server
from topoplan.schedules.ring_forest import shortest_route
from topoplan.schedules.routes import LeastLoaded

QUICK = ("dgx-1v", "dgx-2")
MACHINES = direct_machines() | direct_machines(symmetric=True) | switched_machines()


def planes(count: int) -> Topology:
    """Four GPUs, each with a 10 GB/s port into each of some switches."""
    ports = {(f"gpu{i}", f"sw{j}"): 10.0 for i in range(4) for j in range(count)}
    return machine(4, both_ways(ports), switches=count)


@pytest.mark.parametrize("size", [4, 6, pytest.param(64, marks=pytest.mark.thorough)])
def test_spread_stars_reach_optcc_and_leave_room_at_the_fast_ports(size: int) -> None:
    """One port at r of 8 GB/s: rate and bound are OptCC's; fast ranks own equal parts; r up to 1/2 within 5 % of it."""
    for eighths in (1, 2, 3, 4, 5, 7):
        part = Fraction(eighths, 8)
        ports = {(f"gpu{rank}", "sw0"): float(eighths if rank == size - 1 else 8) for rank in range(size)}
        plan = spread_one_hop(machine(size, both_ways(ports), switches=1))
        longest = max(1 / part, 2 * (size - 1) / (size - 1 + part))
        report = topoplan.verify(plan)
        assert report.exact_rate == report.exact_bound == 8 / longest
        assert len({shard.share for shard in plan.shards[: size - 1]}) == 1
        assert sum(shard.share for shard in plan.shards) == 1
        if size < 8 and part <= Fraction(1, 2):
            took = run_events(plan, nbytes=1 << 26, chunk_bytes=1 << 18).seconds
            assert took < 1.05 * (1 << 26) / (plan.rate * 1e9)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(5))
def test_spread_stars_are_at_least_as_fast_as_even_ones(seed: int) -> None:
    """Ports of all rates: no link is above what the rate allows, and slower shares cannot free a port further."""
    draw = np.random.default_rng(seed)
    size = int(draw.integers(3, 8))
    ports = {(f"gpu{rank}", "sw0"): float(draw.integers(1, 9)) for rank in range(size)}
    fabric = machine(size, both_ways(ports), switches=1)
    even, spread = topoplan.one_hop_plan(fabric), spread_one_hop(fabric)
    assert topoplan.verify(spread).exact_rate >= topoplan.verify(even).exact_rate
    shares = {shard.stages[-1].root: shard.share for shard in spread.shards}
    fill = {
        rank: (1 + (size - 2) * shares.get(rank, Fraction(0))) / Fraction(ports[f"gpu{rank}", "sw0"])
        for rank in range(size)
    }
    assert max(fill.values()) == 1 / topoplan.verify(spread).exact_rate
    owners = [fill[rank] for rank in shares]
    assert all(fill[rank] >= max(owners) for rank in range(size) if rank not in shares)
    assert len(set(owners)) == 1


@pytest.mark.parametrize(("gpus", "servers"), [(2, 3), (3, 4)])
def test_stars_of_a_slow_server_leave_its_links_empty(gpus: int, servers: int) -> None:
    """All end in other servers, whose shares nothing limits then: each GPU's input leaves by the slow NIC alone."""
    parts = [topoplan.Server("v100x4", list(range(gpus)), count=servers)]
    slow = topoplan.cluster(parts, nic_gbps=80, nics=1).degrade_links({f"s{servers - 1}.nic0-switch0": 2.5})
    plan = spread_one_hop(slow)
    assert topoplan.verify(plan).exact_rate == Fraction(5, 2) / gpus
    assert {shard.stages[-1].root // gpus for shard in plan.shards} <= set(range(servers - 1))


def test_spread_stars_are_those_of_an_allreduce() -> None:
    with pytest.raises(UsageError, match="spread-one-hop is for all_reduce, got reduce; use one-hop"):
        spread_one_hop("dgx-2", "reduce")
    assert spread_one_hop("dgx-2", gpus=[3]).method == "spread-one-hop"
    with pytest.raises(InfeasibleError):
        spread_one_hop("dgx-1v")


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name not in QUICK))
        for name in library()
        # The NVLinks of a gb300-nvl72 are those of a gb200-nvl72; rings have no one-hop schedule.
        if name not in ("gb300-nvl72", "mi60-hive-x4", *CABLED)
    ],
)
def test_both_are_valid_wherever_they_exist(name: str, collective: str) -> None:
    """On every library machine; only machines with a missing link have no one-hop schedule."""
    topology = topoplan.load(name)
    lowest = topoplan.lowest_tree(topology, collective)
    uneven = 3 if collective == "allreduce" else 5
    heights = {"dgx-1p": 2, "dgx-1v": 2, "mi250x": 2, "mi250": uneven}
    assert topoplan.verify(lowest).height == heights.get(name, 1)
    if lowest.height > 1:
        with pytest.raises(InfeasibleError, match="only through another GPU; a one-hop schedule needs"):
            topoplan.one_hop_plan(topology, collective)
        return
    assert topoplan.verify(topoplan.one_hop_plan(topology, collective)).height == 1


def test_a_hop_without_a_wire_is_one_clear_error() -> None:
    """GPUs 0 and 5 of a DGX-1V have no NVLink between them: a schedule that wants one is told the cut."""
    alone = Fabric(topoplan.load("dgx-1v").subset([0, 5]), ("nvlink",))
    with pytest.raises(InfeasibleError, match="no path over NVLink leads from gpu0 to gpu5; use a") as caught:
        shortest_route(alone, 0, 1)
    assert caught.value.cut == ("gpu0",)
    with pytest.raises(InfeasibleError, match="no wire leads from gpu0 to gpu5 but through another GPU"):
        LeastLoaded(alone).edge("broadcast", (0,), 1, Fraction(1))
    with pytest.raises(InfeasibleError, match="no wire leads to gpu0 from gpu5 but through another GPU"):
        LeastLoaded(alone).edge("reduce", (0,), 1, Fraction(1))


def test_one_hop_on_dgx2_is_the_optimum_but_for_rooted_collectives() -> None:
    """Stars of all ranks fill every port; the star of a root sends 15 copies out of one port of 150 GB/s."""
    dgx = topoplan.load("dgx-2")
    rates = {collective: topoplan.one_hop_plan(dgx, collective).rate for collective in COLLECTIVES}
    assert rates == dict(zip(COLLECTIVES, (80.0, 10.0, 10.0, 160.0, 160.0), strict=True))
    assert topoplan.one_hop_plan(dgx, "broadcast").bound == 150.0
    assert topoplan.one_hop_plan(dgx, "broadcast", gpus=[3, 5, 9], root=9).root == 2


@pytest.mark.parametrize(("count", "collective"), [(1, "allreduce"), (2, "allgather"), (3, "allreduce")])
def test_parallel_switches_are_used_evenly(collective: str, count: int) -> None:
    """Three destinations on one, two or three planes: the fullest port carries 3, 2 or 1 of them."""
    plan = topoplan.one_hop_plan(planes(count), collective)
    fullest = -(-3 // count)
    whole = 4 * 10.0 / fullest
    assert topoplan.verify(plan).rate == pytest.approx(whole / 2 if collective == "allreduce" else whole)


@pytest.mark.thorough
@given(MACHINES, st.sampled_from(COLLECTIVES))
@settings(max_examples=60, deadline=None)
def test_no_plan_is_lower_than_the_lowest_tree(topology: Topology, collective: str) -> None:
    """It is valid, stays within the bound, and no optimal plan has fewer edges one after another."""
    low, best = topoplan.lowest_tree(topology, collective), topoplan.plan(topology, collective)
    report = topoplan.verify(low)
    assert report.exact_rate is not None
    assert report.exact_rate <= Fraction(topoplan.verify(best).exact_bound or 0)
    assert low.depth <= best.depth
    assert low.num_trees == (len(topology.gpus) if collective in ("allgather", "reduce_scatter") else 1)


@given(MACHINES, st.sampled_from(COLLECTIVES))
@settings(max_examples=30, deadline=None)
def test_one_hop_exists_exactly_where_the_lowest_tree_has_height_one(
    topology: Topology, collective: str
) -> None:
    """For all roots at once in the collectives without a root of their own."""
    roots = range(len(topology.gpus)) if collective in ("broadcast", "reduce") else [None]
    for root in roots:
        low = topoplan.lowest_tree(topology, collective, root=root)
        try:
            plan = topoplan.one_hop_plan(topology, collective, root=root)
        except InfeasibleError:
            assert low.height > 1 or collective == "allreduce"
        else:
            assert low.height == topoplan.verify(plan).height == 1


def test_the_lowest_tree_starts_in_the_middle() -> None:
    """Five GPUs in a row: an allreduce meets at the third, two hops up and two down, for any first GPU."""
    row = machine(5, both_ways({(f"gpu{i}", f"gpu{i + 1}"): 1.0 for i in range(4)}))
    plan = topoplan.lowest_tree(row)
    assert (plan.shards[0].stages[0].root, plan.height, plan.depth) == (2, 2, 4)
    assert topoplan.lowest_tree(row, "broadcast").height == 4
    seconds = topoplan.simulate(plan, nbytes=0).seconds
    assert seconds == pytest.approx(LAUNCH + 4 * START_UP["nvlink"])


def test_children_share_the_parents_that_are_equally_near() -> None:
    """A root, two middle ranks, and four leaves behind a switch with both: each middle port feeds two of them."""
    wires = {("gpu0", f"gpu{middle}"): 4.0 for middle in (1, 2)}
    wires |= {(f"gpu{rank}", "sw0"): 2.0 for rank in range(1, 7)}
    plan = topoplan.lowest_tree(machine(7, both_ways(wires), switches=1), "broadcast")
    children = [edge.parent for edge in plan.shards[0].stages[0].edges]
    assert (children.count(1), children.count(2), plan.rate) == (2, 2, 1.0)


@pytest.mark.parametrize("build", [topoplan.one_hop_plan, topoplan.lowest_tree, topoplan.double_binary_tree])
def test_what_does_not_fit_is_refused(build: Callable[..., Plan]) -> None:
    dgx = topoplan.load("dgx-1v")
    assert topoplan.verify(build(dgx, "broadcast", gpus=[3])).trees == 0
    with pytest.raises(UsageError, match="collective 'gather' is unknown"):
        build(dgx, "gather")
    with pytest.raises(UsageError, match="GPU 8 is out of range"):
        build(dgx, gpus=[0, 8])
    with pytest.raises(UsageError, match="allreduce has no root"):
        build(dgx, root=0)
    with pytest.raises(UsageError, match="root 7 is not in the allocation 0, 1"):
        build(dgx, "reduce", gpus=[0, 1], root=7)
    with pytest.raises(UsageError, match="channels 'air' is unknown"):
        build(dgx, channels="air")
    with pytest.raises(InfeasibleError, match="no NVLink path"):
        build(dgx, gpus=[0, 5], channels="nvlink")


ALPHA = START_UP["nvlink"]


def servers(count: int, gpus: list[int] | None = None, access: str = "direct") -> Topology:
    one = topoplan.Server("dgx-a100", gpus, count=count)
    return topoplan.cluster([one], nic_gbps=200, nics=8, nic_access=access)


@pytest.mark.parametrize(
    ("name", "rate", "depth"), [("dgx-2", 10, 1), ("v100x4", 25, 1), ("dgx-1v", 12.5, 2)]
)
def test_every_rank_takes_in_what_all_others_have(name: str, rate: float, depth: int) -> None:
    """A rank receives N - 1 buffers; start-ups are those of the longest way, and no more."""
    plan = one_shot_plan(name)
    report = topoplan.verify(plan)
    assert (report.rate, plan.depth) == (rate, depth)
    for road in (topoplan.simulate, run_events):
        assert road(plan, nbytes=0).seconds == pytest.approx(LAUNCH + depth * ALPHA)


def test_along_an_optimal_allgather() -> None:
    """N blocks of an allgather at 1200/7 GB/s are one buffer at an eighth of that."""
    plan = one_shot_along(topoplan.plan("dgx-1v", "allgather"))
    assert topoplan.verify(plan).exact_rate == Fraction(1200, 7) / 8


@pytest.mark.parametrize("access", ["direct", "pcie"])
def test_between_servers_each_owner_sends_its_sum_to_the_others(access: str) -> None:
    """Three NICs' worth of eighths leave every NIC: 25 GB/s carry the buffer at 200/3, the GPU's slot at 24 at 64."""
    plan = one_shot_servers(servers(4, access=access))
    assert topoplan.verify(plan).exact_rate == (Fraction(200, 3) if access == "direct" else 64)
    assert topoplan.simulate(plan, nbytes=0).seconds == pytest.approx(
        LAUNCH + 2 * ALPHA + START_UP["network"]
    )


def test_a_rank_that_adds_up_less_is_refused() -> None:
    plan = one_shot_plan("v100x4")
    (shard,) = plan.shards
    fewer = replace(plan, shards=(replace(shard, stages=shard.stages[:3]),))
    with pytest.raises(PlanError, match="contribution of rank 3 0 times"):
        topoplan.verify(fewer)
    twice = replace(plan, shards=(replace(shard, stages=(*shard.stages, shard.stages[0])),))
    with pytest.raises(PlanError, match="contribution of rank 0 2 times"):
        topoplan.verify(twice)
    broadcast = replace(plan, collective="broadcast", root=0)
    with pytest.raises(PlanError, match="contribution of rank 1 1 times instead of 0"):
        topoplan.verify(broadcast)
    of_trees = topoplan.lowest_tree("v100x4").shards[0].stages
    halves = tuple(Shard(Fraction(1, 2), stages) for stages in (shard.stages, of_trees))
    with pytest.raises(PlanError, match="all shards of a plan with exchanges take the same rounds"):
        topoplan.verify(replace(plan, shards=halves))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("torus:9@25", [(1, 5, 12.5), (3, 5, 15)]),
        ("torus:3,3,3@25", [(1, 4, 8.3333), (1, 5, 25), (3, 4, 25), (4, 5, 33.3333)]),
    ],
)
def test_a_few_owners_exchange_what_their_neighbours_have(
    name: str, found: list[tuple[int, int, float]]
) -> None:
    """Parts, hops and rates: radius twice, and the distance of owners; ranks in between forward and hold the total.

    Three owners around nine ranks are three hops apart, with one rank on either side. All ranks end with equal bits.
    """
    made = owner_exchanges(topoplan.plan(name))
    assert [(len(one.shards), one.depth, one.rate) for one in made] == [
        (parts, hops, pytest.approx(rate, rel=1e-4)) for parts, hops, rate in found
    ]
    network = START_UP["network"]
    for one in made:
        assert topoplan.verify(Plan.from_json(one.to_json())).rate == one.rate
        assert topoplan.simulate(one, nbytes=0).seconds >= LAUNCH + one.depth * network * (1 - 1e-9)
    given = [
        np.float32(1) / np.arange(1 + rank, 200 + rank, dtype=np.float32)
        for rank in range(len(made[-1].ranks))
    ]
    with Communicator(made[-1]) as comm:
        totals = comm.all_reduce([part.copy() for part in given])
    assert all(np.array_equal(total, totals[0]) for total in totals)
    assert np.allclose(totals[0], np.sum(given, axis=0, dtype=np.float64))


@pytest.mark.sampled
@settings(max_examples=30, deadline=None)
@given(direct_machines(most=7, symmetric=True))
def test_owners_on_any_direct_links(topology: Topology) -> None:
    best = topoplan.plan(topology)
    for one in owner_exchanges(best):
        assert topoplan.verify(one).rate <= best.bound


def test_owners_need_direct_links_and_an_allreduce() -> None:
    assert owner_exchanges(topoplan.plan("dgx-2")) == []
    assert owner_exchanges(topoplan.plan("dgx-1v", "broadcast")) == []


def test_a_rank_that_forwards_has_the_total_before_it_is_used() -> None:
    """Elements between owners have other bits: refused at the end, when sent, when added up, and when exchanged."""
    plan = owner_exchanges(topoplan.plan("torus:9@25"))[0]
    (shard,) = plan.shards
    up, across, down = (shard.stages[start : start + 3] for start in (0, 3, 6))
    (relay,) = (edge.child for edge in across[0].edges if edge.child == 1)
    (link,) = (edge for edge in down[0].edges if edge.child == relay)
    assert across[0].root == link.parent == 0
    back = replace(down[0], op="reduce", edges=(link,))
    sent = replace(down[0], root=relay, edges=(replace(link, parent=relay, child=0, route=link.route[::-1]),))
    again = replace(down[0], op="gather", root=relay, edges=())
    for stages in (
        (*up, *across, *down[1:], replace(down[0], edges=down[0].edges[:0])),
        (*up, *across, sent, *down),
        (*up, *across, back, *down),
        (*up, *across, replace(down[1], edges=()), again, *down),
    ):
        spoiled = replace(plan, shards=(replace(shard, stages=stages),))
        with pytest.raises(PlanError, match=r"contribution of rank|so its sum has other bits"):
            topoplan.verify(spoiled)
        with pytest.raises(PlanError, match="or receive the total before it is used"):
            _check_exchanges(spoiled)


def test_a_rank_that_receives_from_all_and_does_not_send_only_forwards() -> None:
    """It would add its own elements by the counts, and a back end does not: rank 0's sum is then spread by rank 1."""
    plan = one_shot_plan("v100x4", gpus=[0, 1])
    (shard,) = plan.shards
    edge = shard.stages[0].edges[0]
    back = replace(edge, parent=1, child=0, route=edge.route[::-1])
    stages = (shard.stages[0], Stage("broadcast", 1, (back,)))
    with pytest.raises(PlanError, match="adds up elements of 1 of 1 ranks of an exchange"):
        topoplan.verify(replace(plan, shards=(replace(shard, stages=stages),)))


def test_what_it_is_not_for_is_one_clear_line() -> None:
    with pytest.raises(UsageError, match="one-shot is an allreduce, not broadcast; choose another schedule"):
        one_shot_plan("dgx-2", "broadcast")
    with pytest.raises(UsageError, match="all 8 are on s0"):
        one_shot_servers(topoplan.load("dgx-a100"))
    with pytest.raises(InfeasibleError, match=r"each of 2 servers has one GPU, .* use the schedule one-shot"):
        one_shot_servers(servers(2, [0]))


@pytest.mark.parametrize(("workers", "helpers"), [(4, 1), (4, 6), (8, 3)])
def test_dedicated_servers_reach_a_part_of_a_port(workers: int, helpers: int) -> None:
    """B min(1, S / N): with one server it carries all buffers; every rank sends and takes one."""
    made = parameter_server(star(workers, helpers))
    assert made.rate == pytest.approx(10 * min(1, helpers / workers))
    assert topoplan.verify(made).rate == made.rate
    sent = clock(made)(1 << 20).link_bytes
    assert {sent[f"gpu{rank}", "sw0"] for rank in range(workers)} == {1 << 20}
    assert sent["helper0", "sw0"] == pytest.approx(workers / helpers * (1 << 20))


def test_ranks_as_servers_are_the_one_hop_plan() -> None:
    made, stars = parameter_server("dgx-2"), topoplan.one_hop_plan("dgx-2")
    assert made.shards == stars.shards
    assert (made.rate, made.gap) == (80, 0)
    assert parameter_server(star(4, 1), servers=[f"gpu{n}" for n in range(4)]).rate == pytest.approx(20 / 3)


def test_hashed_parts_are_as_slow_as_the_fullest_server() -> None:
    names = [f"helper{n}" for n in range(4)]
    for points in (1, 128):
        loads = HashRing(tuple(names), points).loads(map(str, range(KEYS)))
        most = max(loads.values()) * 4 / KEYS
        made = parameter_server(star(4, 4), placement="hashed", points=points)
        assert made.rate == pytest.approx(10 / most)
        assert topoplan.verify(made).rate == made.rate


def test_helpers_add_up_what_ranks_push() -> None:
    values = [np.arange(500, dtype=np.float64) * (rank + 1) for rank in range(4)]
    with Communicator(parameter_server(star(4, 2), placement="hashed")) as comm:
        for result in comm.all_reduce(values):
            np.testing.assert_array_equal(result, np.arange(500) * 10.0)


@pytest.mark.parametrize(
    ("points", "load", "moved"),
    [
        (16, 1.13, 0.130),
        pytest.param(1, 2.21, 0.164, marks=pytest.mark.thorough),
        pytest.param(1024, 1.04, 0.129, marks=pytest.mark.thorough),
    ],
)
def test_a_ring_of_eight_servers(points: int, load: float, moved: float) -> None:
    """Load of the fullest over the mean, and the part of 20,000 keys that moves when a server leaves: its own alone."""
    ring = HashRing(tuple(f"s{n}" for n in range(8)), points)
    keys = [f"k{n}" for n in range(20_000)]
    before = {key: ring.holders(key)[0] for key in keys}
    assert max(Counter(before.values()).values()) * 8 / len(keys) == pytest.approx(load, abs=0.005)
    gone = HashRing(tuple(f"s{n}" for n in range(8) if n != 3), points)
    changed = [key for key in keys if gone.holders(key)[0] != before[key]]
    assert {before[key] for key in changed} == {"s3"}
    assert len(changed) / len(keys) == pytest.approx(moved, abs=0.0005)
    for key in changed[:50]:
        assert gone.holders(key)[0] == ring.holders(key, replicas=2)[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"servers": ["gpu9"]}, "server 'gpu9' is not a rank or helper here"),
        ({"servers": ["gpu0", "gpu0"]}, "or stands twice"),
        ({"placement": "random"}, "placement 'random' is unknown"),
        ({"collective": "broadcast"}, "as an allreduce does, not broadcast"),
        ({"placement": "hashed", "points": 0}, "points 0 of a server"),
    ],
)
def test_what_is_no_parameter_server_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parameter_server(star(4, 1), **options)


def test_servers_are_reached_directly_and_replicas_are_helpers() -> None:
    with pytest.raises(InfeasibleError, match="through another GPU"):
        parameter_server("dgx-1v", servers=["gpu0"])
    with pytest.raises(UsageError, match="replicas 2 must be a whole number from 0 to 1"):
        parameter_server(star(4, 2), replicas=2)
    with pytest.raises(UsageError, match="ranks get all sums and need no replicas"):
        parameter_server("dgx-2", replicas=1)


@pytest.mark.parametrize(("placement", "replicas"), [("equal", 1), ("equal", 2), ("hashed", 2)])
def test_replicas_cost_one_copy_of_each_sum(placement: str, replicas: int) -> None:
    """A server with a part sends it to all ranks and its replicas; what replicas take is R buffers in all."""
    made = parameter_server(star(4, 3), placement=placement, replicas=replicas)
    alone = parameter_server(star(4, 3), placement=placement)
    assert topoplan.verify(made).rate == made.rate
    nbytes = 3 << 20
    sent, before = (clock(one)(nbytes).link_bytes for one in (made, alone))
    for server in ("helper0", "helper1", "helper2"):
        out = before[server, "sw0"] / 4
        assert sent[server, "sw0"] == pytest.approx(out * (4 + replicas))
    taken = sum(sent["sw0", f"helper{n}"] - before["sw0", f"helper{n}"] for n in range(3))
    assert taken == pytest.approx(replicas * nbytes)
    if placement == "equal":
        assert made.rate == pytest.approx(10 * 3 / (4 + replicas))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "rotated", "shards", "depth", "rate"),
    [
        ("dgx-1p", False, 4, 3, 40),
        ("pcie-x8", False, 4, 3, 10),
        ("torus:3,3@25", False, 3, 3, Fraction(75, 2)),
        ("torus:3,3@25", True, 6, 3, 50),
        ("torus:3,3,3@25", True, 27, 5, 75),
        ("bcube:2,3", False, 4, 5, None),
    ],
)
def test_a_grid_exchange_has_one_hop_less_than_twice_its_dimensions(
    name: str, rotated: bool, shards: int, depth: int, rate: Fraction | None
) -> None:
    """On 3 x 3 ranks a link has a third in and out of the owner, or a third across; rotated, half of the sum of both.

    Every rank has the sum in the end, and all have the same bits.
    """
    made = grid_exchange(name, rotated=rotated)
    assert (made.num_trees, made.depth) == (shards, depth)
    assert topoplan.verify(made).rate == float(made.rate)
    if rate is not None:
        assert made.rate == pytest.approx(float(rate))
    generator = np.random.default_rng(7)
    buffers = [generator.standard_normal(216) for _ in made.ranks]
    with Communicator(made, backend="loopback") as communicator:
        results = communicator.all_reduce([buffer.copy() for buffer in buffers])
    assert all(np.array_equal(result, results[0]) for result in results)
    assert np.allclose(results[0], np.sum(buffers, axis=0))


def test_a_grid_exchange_needs_a_grid_and_an_allreduce() -> None:
    with pytest.raises(InfeasibleError, match="the 5 GPUs are not a grid"):
        grid_exchange("torus:5")
    with pytest.raises(UsageError, match="a grid exchange is an allreduce, not broadcast; choose another"):
        grid_exchange("torus:3,3", "broadcast")
    assert grid_exchange("v100x4", gpus=[2]).num_trees == 0


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter"])
@pytest.mark.parametrize(("name", "most"), [("torus:3,3", 2), ("torus:3,3,3", 5), ("torus:4,4", 4)])
def test_lowest_trees_start_as_few_copies_on_a_wire_as_there_can_be(
    name: str, most: int, collective: str
) -> None:
    """Every rank takes in N - 1 blocks over its wires: 8 over 4, 26 over 6, 15 over 4."""
    made = lowest_tree(name, collective)
    copies = Counter(
        (edge.parent, edge.child) for shard in made.shards for stage in shard.stages for edge in stage.edges
    )
    assert max(copies.values()) == most
    assert topoplan.verify(made).rate == made.rate


@given(st.data())
def test_items_are_spread_as_evenly_as_possible(data: st.DataObject) -> None:
    """The fullest place has as little for its width as in the best of all assignments."""
    places = range(data.draw(st.integers(1, 4)))
    width = {place: data.draw(st.integers(1, 3)) for place in places}
    allowed = {
        item: sorted(data.draw(st.sets(st.sampled_from(places), min_size=1)))
        for item in range(data.draw(st.integers(0, 5)))
    }

    def fullest(chosen: tuple[int, ...]) -> Fraction:
        return max((Fraction(chosen.count(place), width[place]) for place in places), default=Fraction(0))

    found = {item: options[0] for item, options in allowed.items()}
    _spread(found, allowed, width)
    assert all(place in allowed[item] for item, place in found.items())
    assert fullest(tuple(found.values())) == min(map(fullest, product(*allowed.values())))
