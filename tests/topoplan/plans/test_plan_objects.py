"""What a plan says of itself in Python: bandwidths, trees as objects, short texts, order of the ranks."""

from __future__ import annotations

import random

import networkx as nx
import pytest

import topoplan
from topoplan import Plan
from topoplan.plans.plan import ALL_TO_ALL, COLLECTIVES
from topoplan.schedules.registry import SCHEDULES

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


def test_figures_of_plans_and_machines_are_those_of_the_commands() -> None:
    pytest.importorskip("matplotlib")
    plan = topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7])
    assert plan.plot().axes
    assert plan.topology.plot().axes


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
