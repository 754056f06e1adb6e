"""Broadcast and reduce on tori of servers by kind: known answers, the listed planner, the listed form, wrong files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

import pytest

import topoplan
from tests.support.kind_clusters import broadcast_of_servers
from tests.topoplan.plans.test_plan_by_kind import agree, refuse_wrong_files
from topoplan import (
    ClusterByKind,
    InfeasibleError,
    PlanByKind,
    PlanError,
    Server,
    cluster_by_kind,
    plan_by_kind,
)
from topoplan.machine.topology import Topology
from topoplan.plans.shards import Edge
from topoplan.plans.torus_trees import TorusTree
from topoplan.plans.verify_by_kind import verify_by_kind


def servers(
    machine: str | Topology,
    sides: Sequence[int],
    *,
    nic_gbps: float = 100,
    nics: int | None = None,
    **options: Any,
) -> ClusterByKind:
    return cluster_by_kind(
        [Server(machine, count=prod(sides))],
        nic_gbps=nic_gbps,
        nics=nics,
        network="torus",
        sides=list(sides),
        **options,
    )


def pcie_only(name: str) -> Topology:
    machine = topoplan.load(name)
    return replace(machine, links=tuple(link for link in machine.links if link.channel != "nvlink"))


@pytest.mark.parametrize(
    ("machine", "sides", "options", "rate", "height"),
    [
        ("dgx-h100", (40, 50), {"nic_gbps": 400, "nic_access": "direct"}, 400, 180),
        pytest.param("dgx-h100", (100, 125), {"nic_gbps": 400}, 384, 450, marks=pytest.mark.thorough),
        ("v100x4", (500,), {"nics": 4}, 50, None),
        pytest.param("dgx-1v", (2, 3000), {"nics": 4}, 48, None, marks=pytest.mark.thorough),
    ],
)
def test_a_broadcast_fills_all_ports_of_a_server(
    machine: str, sides: Sequence[int], options: dict[str, Any], rate: int, height: int | None
) -> None:
    plan = plan_by_kind(servers(machine, sides, **options), "broadcast", root=777)
    report = verify_by_kind(plan)
    assert report.exact_rate == report.exact_bound == rate
    assert height in (None, report.height)
    assert verify_by_kind(PlanByKind.from_object(json.loads(plan.to_json()))) == report
    assert len(plan.to_json()) < 100_000


@pytest.mark.parametrize(
    ("machine", "sides", "nics"),
    [
        ("v100x4", (2, 2), 4),
        pytest.param("v100x4", (3, 2), 4, marks=pytest.mark.thorough),
        pytest.param("dgx-1v", (2, 2), 4, marks=pytest.mark.thorough),
        pytest.param("v100x4", (3, 3), 4, marks=pytest.mark.slow),
        pytest.param("dgx-1v", (3, 2), 4, marks=pytest.mark.slow),
        pytest.param("dgx-h100", (3, 2), 8, marks=pytest.mark.slow),
        pytest.param("dgx-h100", (2, 2), 8, marks=pytest.mark.thorough),
        pytest.param("v100x4", (2, 2, 2), 6, marks=pytest.mark.slow),
        pytest.param("dgx-1v", (2, 2, 2), 6, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_the_rate_is_that_of_the_listed_planner(
    machine: str, sides: Sequence[int], nics: int, collective: str
) -> None:
    cluster = servers(machine, sides, nics=nics)
    listed = topoplan.plan(cluster.listed(), collective, root=3)
    assert plan_by_kind(cluster, collective, root=3).rate == pytest.approx(listed.rate, rel=1e-12)


@pytest.mark.parametrize(
    ("machine", "sides", "collective"),
    [
        ("v100x4", (5, 4), "broadcast"),
        ("v100x4", (4, 2), "reduce"),
        ("dgx-h100", (4, 5), "reduce"),
        # NICs that share PCIe links are slower: 146 common parts of the rate.
        pytest.param("dgx-1v", (2, 2, 2), "reduce", marks=pytest.mark.thorough),
    ],
)
def test_the_listed_form_agrees(machine: str, sides: Sequence[int], collective: str) -> None:
    plan = plan_by_kind(
        servers(machine, sides, nics={"dgx-h100": 8, "dgx-1v": 6}.get(machine, 4)), collective, root=13
    )
    agree(plan)
    assert plan.exact_rate() == plan.exact_bound()


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(40))
def test_the_listed_form_of_random_servers_agrees(seed: int) -> None:
    agree(broadcast_of_servers(seed, most=60))


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(40, 200))
def test_the_listed_form_of_up_to_400_gpus_agrees(seed: int) -> None:
    agree(broadcast_of_servers(seed, most=400))


@pytest.mark.thorough
def test_wrong_files_are_refused() -> None:
    refuse_wrong_files(range(20), 120, broadcast_of_servers)


@pytest.mark.slow
def test_many_wrong_files_are_refused() -> None:
    refuse_wrong_files(range(60), 600, broadcast_of_servers)


def test_a_wrong_tree_is_refused() -> None:
    plan = plan_by_kind(servers("v100x4", (6, 7), nics=4), "broadcast", root=5)
    template = plan.templates[0]
    assert isinstance(template, TorusTree)
    (stage,) = template.stages
    ranks = plan.fabric.ranks

    def refused(match: str, *edges: Edge, root: int = stage.root) -> None:
        wrong = replace(template, stages=(replace(stage, edges=edges, root=root),))
        with pytest.raises(PlanError, match=match):
            verify_by_kind(replace(plan, templates=(wrong, *plan.templates[1:])))

    inner = next(one for one in stage.edges if ranks[one.parent][:3] == ranks[one.child][:3])
    outer = next(one for one in stage.edges if ranks[one.parent][:3] != ranks[one.child][:3])
    others = [one for one in stage.edges if one is not inner]
    refused("must enter 35 GPUs of the sample, got 34", *others)
    refused("must enter 8 servers of the sample, got 7", *(one for one in stage.edges if one is not outer))
    refused("must be entered once, and the root not", *stage.edges, inner)
    refused("the root of the tree must be s0.gpu1", *stage.edges, root=0)
    # A second edge into a server from outside, over the same cable, in place of one inside.
    ends = outer.child // 4
    other = next(one for one in stage.edges if one.child // 4 == one.parent // 4 == ends)
    way = (*outer.route[:-1], ranks[outer.child], ranks[other.child])
    twice = replace(outer, child=other.child, route=way)
    refused(
        "must be entered once, and the server of the root not",
        *(twice if one is other else one for one in stage.edges),
    )
    # Two GPUs of one server, each below the other.
    into = {one.child: one for one in stage.edges if one.child // 4 == one.parent // 4}
    last = next(one for one in stage.edges if one.child in into and one.parent in into)
    turned = replace(last, parent=last.child, child=last.parent, route=last.route[::-1])
    above = into[last.parent]
    refused("must end at the root, got a cycle", *(turned if one is above else one for one in stage.edges))


def test_a_wrong_claim_is_refused() -> None:
    plan = plan_by_kind(servers("v100x4", (3, 50), nics=4), "reduce", root=1)
    for match, wrong in (
        ("claims a rate", replace(plan, rate=2 * plan.rate)),
        ("claims a bound", replace(plan, bound=2 * plan.bound)),
        ("the root of the tree must be s0.gpu2", replace(plan, root=2)),
        ("must have a root from 0 to 599, got 600", replace(plan, root=600)),
    ):
        with pytest.raises(PlanError, match=match):
            verify_by_kind(wrong)


def test_servers_that_do_not_carry_what_their_ports_take_are_refused() -> None:
    cluster = servers(pcie_only("v100x4"), (40, 50), nics=4)
    with pytest.raises(
        InfeasibleError, match="own links carry what their ports take, 50 GB/s, which these do not"
    ):
        plan_by_kind(cluster, "broadcast")
    narrow = servers(pcie_only("v100x4"), (40, 50), nics=4, nic_gbps=20, nic_access="direct")
    report = verify_by_kind(plan_by_kind(narrow, "broadcast"))
    assert report.exact_rate == report.exact_bound == Fraction(10)
