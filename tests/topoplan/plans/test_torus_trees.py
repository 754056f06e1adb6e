"""Broadcast and reduce on tori of hosts by kind: known answers, the smallest cut, the listed form, and wrong files."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest

import topoplan
from tests.support.kind_clusters import broadcast_of_hosts, random_hosts
from tests.topoplan.plans.test_plan_by_kind import agree, refuse_wrong_files
from topoplan import ClusterByKind, InfeasibleError, PlanByKind, PlanError, UsageError, plan_by_kind
from topoplan.machine.fabric import Fabric
from topoplan.machine.nic_wiring import NicPort
from topoplan.plans.torus_trees import TorusTree, port_rates
from topoplan.plans.verify_by_kind import verify_by_kind
from topoplan.reading.load import load_cluster_by_kind
from topoplan.solve.cuts_and_partitions import FlowNetwork, whole_capacities


def hosts(name: str, rates: Sequence[float] | None = None) -> ClusterByKind:
    """Return the torus of a name; ``rates`` are GB/s of a port in each dimension."""
    cluster = load_cluster_by_kind(name)
    assert cluster is not None
    if rates is None:
        return cluster
    (kind,) = cluster.kinds
    ports = tuple(
        replace(port, out=rates[number // 2], back=rates[number // 2])
        for number, port in enumerate(kind.ports)
    )
    return replace(cluster, kinds=(replace(kind, ports=ports),))


@pytest.mark.parametrize(
    ("name", "ports", "height"),
    [
        # A tree enters the hosts behind the root's neighbour last: n - 1 steps in each dimension, and one more.
        ("torus:200,200", 4, 399),
        ("torus:1000,1000", 4, 1999),
        ("torus:3,4,500", 6, 505),
        ("torus:10,10,10,10,10", 10, 46),
        # The trees of a ring go all around.
        ("torus:100000", 2, 99_999),
        ("torus:2,5000@10", 4, 5001),
    ],
)
def test_a_broadcast_fills_all_ports_of_the_root(name: str, ports: int, height: int) -> None:
    plan = plan_by_kind(hosts(name), "broadcast", root=777)
    report = verify_by_kind(plan)
    assert report.exact_rate == report.exact_bound == ports * Fraction(name.partition("@")[2] or "25/2")
    assert (report.trees, report.height) == (ports, height)
    assert verify_by_kind(PlanByKind.from_object(json.loads(plan.to_json()))) == report
    assert len(plan.to_json()) < 100_000


@pytest.mark.parametrize(
    ("name", "rates", "rate"),
    [
        ("torus:100,100", (3, 1), 8),
        ("torus:100,100", (1, 3), 8),
        ("torus:50,20,30", (1, 2, 2), 10),
        # 500 rings of 3 hosts are joined by the slow dimension alone: 3 x 2 ports lead into each.
        ("torus:3,500", (3, 1), 6),
        ("torus:2,500", (3, 1), 4),
        ("torus:4,4,1000", (4, 2, 1), 14),
        ("torus:2,2,1000", (4, 4, 1), 8),
        # 990 common parts: trees of unequal shares.
        ("torus:50,40", (12.5, 12.25), Fraction(99, 2)),
    ],
)
@pytest.mark.parametrize("collective", ["broadcast", pytest.param("reduce", marks=pytest.mark.thorough)])
def test_ports_that_differ_reach_the_narrowest_line(
    name: str, rates: tuple[float, ...], rate: int | Fraction, collective: str
) -> None:
    report = verify_by_kind(plan_by_kind(hosts(name, rates), collective, root=99))
    assert report.exact_rate == report.exact_bound == rate


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(40))
def test_the_bound_is_the_smallest_cut_of_the_list(seed: int) -> None:
    """From the root to all hosts, by flows on the list."""
    plan = broadcast_of_hosts(seed, most=100)
    if plan is None:
        return
    fabric = Fabric(plan.cluster.listed().settled(), plan.channels)
    whole, scale = whole_capacities(fabric)
    ends = fabric.ends if plan.collective == "broadcast" else [(head, tail) for tail, head in fabric.ends]
    network = FlowNetwork(fabric.size, [(*one, many) for one, many in zip(ends, whole, strict=True)])
    assert plan.root is not None
    flows = [network.maximum(plan.root, rank) for rank in range(fabric.size) if rank != plan.root]
    assert plan.exact_rate() == plan.exact_bound() == Fraction(min(flows), scale)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(24))
def test_the_listed_form_agrees(seed: int) -> None:
    agree(broadcast_of_hosts(seed, most=60))


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(24, 300))
def test_the_listed_form_of_up_to_400_hosts_agrees(seed: int) -> None:
    agree(broadcast_of_hosts(seed, most=400))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["torus:2,3", "torus:5", "torus:4,4@10", "torus:3,2,3"])
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_the_rate_is_that_of_the_listed_planner(name: str, collective: str) -> None:
    listed = topoplan.plan(topoplan.load(name), collective, root=4)
    assert plan_by_kind(hosts(name), collective, root=4).rate == pytest.approx(listed.rate, rel=1e-12)


@pytest.mark.thorough
def test_wrong_files_are_refused() -> None:
    refuse_wrong_files(range(60), 600, broadcast_of_hosts)


def test_a_wrong_tree_is_refused() -> None:
    plan = plan_by_kind(hosts("torus:6,7"), "broadcast", root=5)
    template = plan.templates[0]
    assert isinstance(template, TorusTree)
    (stage,) = template.stages

    def refused(match: str, **changes: Any) -> None:
        wrong = replace(plan, templates=(replace(template, **changes), *plan.templates[1:]))
        with pytest.raises(PlanError, match=match):
            verify_by_kind(wrong)

    refused("must enter 8 servers of the sample, got 7", stages=(replace(stage, edges=stage.edges[:-1]),))
    refused("must be entered once", stages=(replace(stage, edges=(*stage.edges, stage.edges[0])),))
    refused("shares add up to", share=template.share / 2)
    refused("must be above zero", share=-template.share)
    refused("must be a broadcast, got reduce", stages=(replace(stage, op="reduce"),))
    refused("must be one tree", stages=(stage, stage))
    ranks = {name: rank for rank, name in enumerate(plan.fabric.ranks)}

    def joined(parent: str, child: str) -> None:
        edge = next(one for one in stage.edges if one.child == ranks[child])
        other = replace(edge, parent=ranks[parent], route=(parent, child))
        changed = tuple(other if one is edge else one for one in stage.edges)
        kept = replace(plan, templates=(replace(template, stages=(replace(stage, edges=changed),)),))
        with pytest.raises(PlanError, match=r"must be neighbours|must end at the root"):
            verify_by_kind(replace(kept, templates=(*kept.templates, *plan.templates[1:])))

    joined("s0.gpu0", "s4.gpu0")
    last = stage.edges[-1]
    joined(plan.fabric.ranks[last.child], plan.fabric.ranks[last.parent])


def test_a_wrong_claim_or_certificate_is_refused() -> None:
    plan = plan_by_kind(hosts("torus:3,50", (3, 1)), "broadcast", root=1)
    assert plan.line == (0,)
    for match, wrong in (
        ("claims a rate", replace(plan, rate=2 * plan.rate)),
        ("claims a bound", replace(plan, bound=2 * plan.bound)),
        ("claims a bound", replace(plan, line=())),
        ("must be some of 2, but not all", replace(plan, line=(0, 1))),
        ("must be some of 2, but not all", replace(plan, line=(-1,))),
        ("must be some of 2, but not all", replace(plan, line=None)),
        ("must have a root from 0 to 149, got 150", replace(plan, root=150)),
        ("must have a root from 0 to 149, got None", replace(plan, root=None)),
    ):
        with pytest.raises(PlanError, match=match):
            verify_by_kind(wrong)
    value = json.loads(plan.to_json())
    value["certificate"] = {"kind": "class-lengths", "lengths": []}
    with pytest.raises(PlanError, match="must be torus-line"):
        PlanByKind.from_object(value)
    value = json.loads(plan.to_json())
    value["templates"][0]["arms"] = []
    with pytest.raises(PlanError, match="arms"):
        PlanByKind.from_object(value)


def test_cables_of_one_direction_alone_and_several_cables_are_planned() -> None:
    """Hosts that send ahead only reach one port of each dimension; two cables of 0.1 and 0.2 GB/s are one link."""
    cluster = hosts("torus:4,5")
    (kind,) = cluster.kinds
    ahead = tuple(
        replace(port, out=3.0 * (1 - port.number % 2), back=3.0 * (port.number % 2), built=(3.0, 3.0))
        for port in kind.ports
    )
    one_way = replace(cluster, kinds=(replace(kind, ports=ahead),))
    plan = plan_by_kind(one_way, "broadcast", root=3)
    agree(plan)
    assert plan.exact_rate() == plan.exact_bound() == 6
    two_way = plan_by_kind(hosts("torus:4,5", (3, 3)), "broadcast", root=3)
    with pytest.raises(PlanError, match="which has no network link"):
        verify_by_kind(replace(two_way, cluster=one_way))
    rates = (0.1, 0.2, 0.1, 0.2, 0.3, 0.3)
    ports = tuple(NicPort(number, "gpu0", "gpu0", rate, rate) for number, rate in enumerate(rates))
    network = replace(cluster.network, dimension_nics=(2, 1))
    several = replace(cluster, kinds=(replace(kind, nics=6, ports=ports),), nics=6, network=network)
    plan = plan_by_kind(several, "reduce", root=3)
    agree(plan)
    assert plan.exact_rate() == plan.exact_bound() == Fraction(12, 10)
    assert plan.explain_bound() == "the bottleneck is 6 ports that leave 1 host"


def test_every_line_bounds_the_rate() -> None:
    """A plan whose certificate is another line has a gap, and no rate above it."""
    rng = random.Random(3)
    for seed in range(12):
        cluster = random_hosts(seed, most=200)
        if cluster is None:
            continue
        try:
            plan = plan_by_kind(cluster, "broadcast", root=rng.randrange(cluster.size))
        except InfeasibleError:
            continue
        many = range(len(port_rates(cluster)))
        for line in (one for length in many for one in combinations(many, length)):
            other = replace(plan, line=line)
            assert verify_by_kind(replace(other, bound=float(other.exact_bound()))).exact_rate is not None


def test_what_is_not_planned_by_kind_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="needs a sample of at most 1,024 hosts, got 1,026"):
        plan_by_kind(hosts("torus:1000,900", (1000, 1)), "broadcast")
    with pytest.raises(InfeasibleError, match="must have a common part that needs at most 64 trees"):
        plan_by_kind(hosts("torus:50,50,50", (12.5, 12.25, 12)), "broadcast")
    plan = plan_by_kind(hosts("torus:129,128"), "broadcast")
    with pytest.raises(UsageError, match="need the list of its GPUs, at most 16,384, got 16,512"):
        topoplan.simulate(plan, "1MB")
