"""Structure of a plan: phases, bottleneck, shapes of trees; what a plan says of itself in Python."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from random import Random

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.checkout import Run
from topoplan import Device, Link, Plan, Server, Topology, cluster, nvswitch_cluster, ring_plan
from topoplan.machine.fabric import Fabric
from topoplan.plans.plan import ALL_TO_ALL, COLLECTIVES
from topoplan.plans.shards import Edge, ImageShards, Shard, Stage
from topoplan.plans.structure import phases, tree_shapes
from topoplan.schedules.registry import SCHEDULES

V100S = topoplan.load("dgx-1v")


def pair(gbps: float) -> Topology:
    """Two DGX-1V with 3 and 5 GPUs and one NIC each that all GPUs reach."""
    servers = [Server(V100S, [4, 5, 7]), Server(V100S, [1, 2, 4, 5, 7])]
    return cluster(servers, nic_gbps=gbps, nics=1, nic_access="direct")


@pytest.mark.parametrize(
    ("gbps", "between", "bottleneck"),
    [
        (40, 5.0, "between servers"),
        (400, 50.0, "between servers and inside servers"),
        (800, 100.0, "inside servers"),
    ],
)
def test_the_bottleneck_moves_from_the_network_into_the_servers(
    gbps: float, between: float, bottleneck: str
) -> None:
    """Two servers exchange at NIC speed; inside, the pair's weaker server allows 50 GB/s."""
    found = phases(topoplan.three_phase(pair(gbps)))
    assert found is not None
    assert (found.between.rate, found.bottleneck) == (between, bottleneck)
    assert found.inside.rate >= min(between, 50.0)
    assert ("s0.nic0.tx", "switch0") in found.between.full


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(1, 5), st.integers(1, 40), st.sampled_from(["exact", "three-phase"]))
def test_no_phase_is_slower_alone_and_the_slowest_is_the_bottleneck(
    servers: int, gpus: int, nic: int, method: str
) -> None:
    """On NVSwitch servers phases inside and between share no link, so the plan runs at the lower rate of both."""
    plan = topoplan.plan(
        nvswitch_cluster(servers, gpus=gpus, nvlink=30.0, nic=float(nic), rails=1), method=method
    )
    found = phases(plan)
    assert found is not None
    assert plan.rate == min(found.inside.rate, found.between.rate)
    assert (found.bottleneck == "between servers") == (found.between.rate < found.inside.rate)
    assert min(found.reduce.rate, found.broadcast.rate) >= found.inside.rate


def test_servers_on_pcie_share_links_between_phases() -> None:
    """Without NVLink, what a GPU sends to the NIC and to its neighbour leaves over one PCIe link."""
    two = cluster([Server("pcie-x8", [0, 1], count=2)], nic_gbps=400)
    found = phases(topoplan.three_phase(two))
    assert found is not None
    assert found.bottleneck == "links that both cross"


def test_compact_plans_have_the_phases_of_the_same_plan_written_out() -> None:
    """Loads are spread over orbits where symmetries keep servers, and added up shard by shard otherwise."""
    plan = topoplan.three_phase(nvswitch_cluster(20))
    assert phases(plan) == phases(replace(plan, shards=tuple(plan.shards)))


def test_symmetries_that_mix_servers_do_not_mix_phases() -> None:
    """Four GPUs in a ring of equal wires, two in each server: half of the wires are inside."""
    names = ["a.gpu0", "a.gpu1", "b.gpu0", "b.gpu1"]
    links = [Link(names[i], names[j % 4], "nvlink", 10.0) for i in range(4) for j in (i + 1, i + 3)]
    ring = Topology("ring", tuple(Device(n, "gpu", n[0]) for n in names), tuple(links))
    fabric = Fabric(ring, ("nvlink",))
    path = tuple(Edge(i, i + 1, (names[i], names[i + 1]), "nvlink") for i in range(3))
    template = Shard(Fraction(1, 4), (Stage("reduce", 0, path), Stage("broadcast", 0, path)))
    turned = ImageShards(fabric.nodes, 4, ((1, 2, 3, 0),), (template,))
    plan = replace(topoplan.plan(ring), shards=turned)
    assert topoplan.verify(replace(plan, rate=40 / 3)).trees == 4
    found = phases(plan)
    assert found is not None
    crossing = {("a.gpu1", "b.gpu0"), ("b.gpu0", "a.gpu1"), ("b.gpu1", "a.gpu0"), ("a.gpu0", "b.gpu1")}
    assert set(found.between.full) == crossing
    assert (found.between.rate, found.inside.rate) == (40 / 3, 40 / 3)


def test_phases_that_move_nothing_are_infinite_and_one_server_has_none() -> None:
    assert phases(topoplan.plan(V100S)) is None
    found = phases(topoplan.three_phase(nvswitch_cluster(3, gpus=1, rails=1), "broadcast"))
    assert found is not None
    assert (found.reduce.rate, found.broadcast.rate, found.between.full != ()) == (math.inf, math.inf, True)
    alone = found.to_object()["alone"]
    assert isinstance(alone, dict)
    assert alone["reduce inside servers"] is None


TWO = ("plan", "dgx-1v", "--servers", "2", "--nic-bandwidth", "40Gb/s", "--method", "three-phase")


def test_plan_prints_phases_and_bottleneck(run: Run) -> None:
    """Of any plan over several servers, and not of others; with --all a table below the trees."""
    out = run(*TWO)[1]
    assert "(three-phase)" in out
    assert (
        "phases       between servers 20 GB/s alone, inside servers 50 GB/s alone; bottleneck: between servers\n"
        in out
    )
    out = run(*TWO, "--all")[1]
    assert "phase                     GB/s alone  full links" in out
    assert "between servers                   20  s0.nic0.tx>switch0 " in out
    assert "bottleneck: between servers\n" in out
    made = json.loads(run(*TWO, "--json")[1])
    assert made["phases"]["alone"]["between servers"] == made["rate"] == 20.0
    assert made["phases"]["bottleneck"] == "between servers"
    assert "bottleneck:" not in run("plan", "dgx-1v", "--gpus", "0,1")[1]


def tree(parents: list[int], *, names: list[int], channel: str = "nvlink", op: str = "broadcast") -> Stage:
    """Vertex i + 1 hangs below ``parents[i]``; vertices are called by ``names``."""
    edges = [
        Edge(names[parent], names[child], ("a", "b"), channel) for child, parent in enumerate(parents, 1)
    ]
    return Stage(op, names[0], tuple(edges))


@cache
def broadcast() -> Plan:
    """A plan whose shards are taken away."""
    return topoplan.plan("dgx-1v", "broadcast")


def shapes(*shards: Shard) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.count, one.roots) for one in tree_shapes(replace(broadcast(), shards=shards))]


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        (lambda: topoplan.plan("dgx-2"), [(16, tuple(range(16)))]),
        (lambda: topoplan.plan(topoplan.nvswitch_cluster(8), "allgather"), [(64, tuple(range(64)))]),
        (lambda: ring_plan("dgx-1v", "broadcast"), [(6, (0,))]),
        (lambda: topoplan.plan("dgx-1v", gpus=[3]), []),
    ],
    ids=["dgx-2", "images under symmetries", "paths", "one rank"],
)
def test_known_shapes(plan: Callable[[], Plan], wanted: list[tuple[int, tuple[int, ...]]]) -> None:
    assert [(one.count, one.roots) for one in tree_shapes(plan())] == wanted


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=7), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_renaming_keeps_a_shape(choices: list[int], random: Random) -> None:
    """A tree and the same with other names, its edges in another order, are one shape with both roots."""
    parents = [choice % (place + 1) for place, choice in enumerate(choices)]
    names = list(range(len(parents) + 1))
    other = names.copy()
    random.shuffle(other)
    first, second = tree(parents, names=names), tree(parents, names=other)
    second = Stage(second.op, second.root, tuple(reversed(second.edges)))
    found = shapes(Shard(Fraction(1, 2), (first,)), Shard(Fraction(1, 2), (second,)))
    assert found == [(2, tuple(dict.fromkeys((0, other[0]))))]


def test_what_is_told_apart() -> None:
    """Other heights, channels, shares and operations, and the root at another vertex of the same tree."""
    names = [0, 1, 2]
    half = Fraction(1, 2)
    path, star = tree([0, 1], names=names), tree([0, 0], names=names)
    for one, other in (
        ((half, path), (half, star)),
        ((half, path), (half, tree([0, 1], names=names, channel="pcie"))),
        ((Fraction(1, 3), path), (Fraction(2, 3), path)),
        ((half, path), (half, tree([0, 1], names=names, op="reduce"))),
        ((half, path), (half, tree([0, 0], names=[1, 0, 2]))),
    ):
        assert len(shapes(Shard(one[0], (one[1],)), Shard(other[0], (other[1],)))) == 2


def test_a_tree_up_and_down_is_one() -> None:
    """Two operations over the same edges are one tree; a ring's two paths are two."""
    (star,) = tree_shapes(topoplan.plan("dgx-2"))
    assert [operations for _, operations in star.trees] == [("reduce", "broadcast")]
    paths = tree_shapes(ring_plan("dgx-1v", "allreduce"))[0]
    assert [operations for _, operations in paths.trees] == [("reduce",), ("broadcast",)]


PLANS = {
    "trees": lambda: topoplan.plan("dgx-1v"),
    "rings": lambda: topoplan.ring_plan("dgx-1v", gpus=[4, 5, 6, 7]),
    "reduce": lambda: topoplan.plan("v100x4", "reduce", root=2),
    "paths": lambda: topoplan.plan("v100x4", "alltoall"),
    "servers": lambda: topoplan.three_phase(
        topoplan.cluster([topoplan.Server("v100x4", count=2)], nic_gbps=100)
    ),
    "reduce over servers": lambda: topoplan.three_phase(
        topoplan.cluster([topoplan.Server("v100x4", count=2)], nic_gbps=100), "reduce"
    ),
    "one rank": lambda: topoplan.plan("dgx-1v", gpus=[3]),
}


@pytest.mark.parametrize("name", PLANS)
def test_trees_are_arborescences_with_the_fractions_of_the_shards(name: str) -> None:
    plan = PLANS[name]()
    assert len(plan.trees) == plan.num_trees
    for tree in plan.trees:
        graph = tree.to_networkx()
        assert nx.is_arborescence(graph)
        assert graph.in_degree(tree.root) == 0
        assert set(graph) == {*plan.ranks} or plan.collective == ALL_TO_ALL
    moving = [shard for shard in plan.shards if any(stage.edges for stage in shard.stages)]
    assert sum(tree.fraction for tree in plan.trees) == sum(shard.share for shard in moving)


def test_an_exchange_has_the_edges_of_all_its_trees() -> None:
    (tree,) = topoplan.one_shot_plan("v100x4").trees
    assert len(tree.edges) == 12


def test_texts_are_short_and_bandwidths_have_the_names_of_nccl_tests() -> None:
    plan = topoplan.plan("dgx-1v", "allgather")
    assert (plan.algbw, plan.busbw, plan.upper_bound) == (plan.rate, plan.rate * 7 / 8, plan.bound)
    for each in (plan, plan.topology, topoplan.plan_by_size("v100x4", sizes=["64KB"])):
        assert len(repr(each)) < 100
    assert plan._repr_html_() == f"<pre>{plan.summary().replace('>', '&gt;')}</pre>"
    with pytest.warns(DeprecationWarning, match=r"use Plan.planning_seconds"):
        assert plan.seconds == plan.planning_seconds


@pytest.mark.thorough
def test_figures_of_plans_and_machines_are_those_of_the_commands() -> None:
    pytest.importorskip("matplotlib")
    plan = topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7])
    assert plan.plot().axes
    assert plan.topology.plot().axes


@pytest.mark.sampled
@pytest.mark.parametrize("collective", [*COLLECTIVES, ALL_TO_ALL])
def test_gpus_are_the_ranks_in_their_order(collective: str) -> None:
    """Packed trees have the same rate and bound in every order; all schedules keep it, and verify."""
    chosen = random.Random(7).sample(range(8), 5)
    root = chosen[2] if collective in ("broadcast", "reduce") else None
    machine = topoplan.load("dgx-1v")

    def made(gpus: list[int]) -> list[Plan]:
        found = [topoplan.plan(machine, collective, gpus=gpus, root=root)]
        for schedule in SCHEDULES.values():
            try:
                found.append(schedule.make(machine, collective, gpus=gpus, root=root))
            except (topoplan.InfeasibleError, topoplan.UsageError):
                continue
        return found

    plans = made(chosen)
    for plan in plans:
        assert plan.ranks == tuple(f"gpu{gpu}" for gpu in chosen)
        assert plan.root == (None if root is None else chosen.index(root))
        topoplan.verify(plan)
    ascending = made(sorted(chosen))[0]
    assert (plans[0].rate, plans[0].bound) == pytest.approx((ascending.rate, ascending.bound))
    assert topoplan.Plan.from_json(plans[0].to_json()) == plans[0]


def test_texts_of_a_plan_say_what_its_bound_leaves_out() -> None:
    """NVLS may reach 450 GB/s on a DGX H100, where the bound of switches that forward is 257."""
    plan = topoplan.plan("dgx-h100")
    first, *others = plan.summary().splitlines()
    assert first.endswith("provably optimal without in-network reduction")
    assert "in-network   at most 450 GB/s, busbw 787.5 GB/s with in-network reduction (NVLS, SHARP)" in others
    assert repr(plan).endswith("257.143 GB/s (optimal without in-network reduction)>")
    assert repr(topoplan.plan("dgx-a100")).endswith("(optimal)>")
