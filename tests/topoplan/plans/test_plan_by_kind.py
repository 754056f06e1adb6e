"""Plans of clusters by kind: known answers, agreement with the listed form, files, and wrong files that are refused."""

from __future__ import annotations

import json
import pickle
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

import topoplan
from tests.support.kind_clusters import (
    changed_file,
    loads_in_list,
    plan_of_groups,
    plan_of_three_levels,
    random_plan,
    refused_of_changed,
)
from topoplan import InfeasibleError, PlanByKind, PlanError, Server, UsageError, cluster_by_kind, plan_by_kind
from topoplan.plans.deferred_plan import DeferredPlan
from topoplan.plans.kind_templates import KindTemplate, beside_root, centre_of, third_groups
from topoplan.plans.shards import Edge, ImageShards, Shard
from topoplan.plans.size_plans import parse_job_plan, parse_plan_file
from topoplan.plans.verify_by_kind import verify_by_kind
from topoplan.solve.route_table import FabricOrbits, RouteTable


def agree(plan: PlanByKind | None) -> None:
    if plan is None:
        return
    report, listed = verify_by_kind(plan), topoplan.verify(plan.listed())
    assert (report.exact_rate, report.exact_bound) == (plan.exact_rate(), plan.exact_bound())
    assert (report.exact_rate, report.trees, report.height) == (
        listed.exact_rate,
        listed.trees,
        listed.height,
    )
    assert report.loads == pytest.approx(loads_in_list(plan, report, listed))
    assert listed.exact_bound is not None
    assert report.exact_bound is not None
    assert listed.exact_bound <= report.exact_bound
    read = PlanByKind.from_object(json.loads(plan.to_json()))
    assert read.to_json() == plan.to_json()
    assert verify_by_kind(read) == report


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(20))
def test_the_listed_form_agrees(seed: int) -> None:
    agree(random_plan(seed, most=36))


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(20, 290))
def test_the_listed_form_of_up_to_256_gpus_agrees(seed: int) -> None:
    agree(random_plan(seed, most=256 if seed < 40 else 128))


def refuse_wrong_files(seeds: range, changes: int, *makers: Callable[..., PlanByKind | None]) -> None:
    """Change files at random; whatever is accepted must be right by its list."""
    rng = random.Random(7)
    drawn = (make(seed, most=40) for seed in seeds for make in makers or (random_plan, plan_of_three_levels))
    plans = [plan for plan in drawn if plan is not None]
    refused = refused_of_changed(plans, changed_file, rng, changes, lambda _, listed: listed.exact_bound)
    assert refused > changes // 2


@pytest.mark.parametrize(
    ("edge", "where"),
    [
        (0, "cell 0 (remaining, leaf 0)"),
        (3, "cell 0 (remaining, pod (0, 0))"),
        (4, "cell 1 (remaining, pod (0, 0))"),
    ],
)
def test_a_tree_that_leaves_out_servers_without_a_role_is_refused(edge: int, where: str) -> None:
    """In the leaf of the root, and in those of the entries."""
    kinds = [Server("v100x4", [0], count=6), Server("nvlink-x4", [0], count=3)]
    many = cluster_by_kind(kinds, nic_gbps=100, network="fat-tree", leaf_size=3)
    value = json.loads(plan_by_kind(many, "all_gather").to_json())
    del value["templates"][0]["stages"][0]["edges"][edge]
    with pytest.raises(PlanError, match=re.escape(f"reaches no server of {where}")):
        verify_by_kind(PlanByKind.from_object(value))


@pytest.mark.thorough
def test_wrong_files_are_refused() -> None:
    refuse_wrong_files(range(12), 60)


@pytest.mark.thorough
def test_wrong_files_of_dragonflies_are_refused() -> None:
    refuse_wrong_files(range(20), 60, plan_of_groups)


@pytest.mark.slow
def test_many_wrong_files_are_refused() -> None:
    refuse_wrong_files(range(120), 1000)
    refuse_wrong_files(range(60), 400, plan_of_groups)


@pytest.mark.sampled
@pytest.mark.parametrize(("servers", "collective", "rate"), [
    (128, "all_reduce", Fraction(400 * 128, 2 * 127)),
    (512, "all_reduce", Fraction(400 * 512, 2 * 511)),
    (12_500, "all_reduce", Fraction(400 * 12_500, 2 * 12_499)),
    (512, "all_gather", Fraction(400 * 512, 511)),
    (12_500, "reduce_scatter", Fraction(400 * 12_500, 12_499)),
    (12_500, "broadcast", Fraction(400)),
])  # fmt: skip
def test_known_optima_of_one_switch(servers: int, collective: str, rate: Fraction) -> None:
    many = cluster_by_kind([Server("dgx-h100", count=servers)], nic_gbps=400, nic_access="direct")
    plan = plan_by_kind(many, collective)
    assert (plan.exact_rate(), plan.exact_bound()) == (rate, rate)
    assert len(plan.to_json()) < 200_000


def test_counts_without_a_common_divisor_need_no_more_trees() -> None:
    many = cluster_by_kind([Server("dgx-h100", count=6249), Server("dgx-a100", count=6251)], nic_gbps=400)
    plan = plan_by_kind(many, "all_gather")
    assert (plan.gap, plan.num_trees) == (0, 100_000)


@pytest.mark.parametrize(("collective", "trees"), [("all_gather", 8 * 12_660), ("all_reduce", 8 * 12_640)])
def test_a_smaller_last_leaf_needs_about_one_tree_for_each_gpu(collective: str, trees: int) -> None:
    # 390 leaves of 32 servers and one of 20: the root's turn among 12,480 servers is enough for the entry among 20.
    many = cluster_by_kind(
        [Server("dgx-h100", count=12_500)], nic_gbps=400, network="fat-tree", leaf_size=32, oversubscription=2
    )
    plan = plan_by_kind(many, collective)
    report = verify_by_kind(plan)
    # Every server receives the blocks of the others over eight links of PCIe with 48 GB/s each, or twice as much.
    twice = 2 if collective == "all_reduce" else 1
    assert report.exact_rate == report.exact_bound == Fraction(384 * 12_500, 12_499 * twice)
    assert report.trees == trees


@pytest.mark.parametrize("network", [{"leaf_size": 4}, {"leaf_size": 1, "pod_size": 4}])
def test_roots_in_several_leaves_or_pods_take_turns_for_the_entries_of_another(
    network: dict[str, Any],
) -> None:
    """12 servers in leaves, or pods, of four give the three of the last one equal parts, but not the other way."""
    many = cluster_by_kind(
        [Server("v100x4", count=15)], nic_gbps=100, network="fat-tree", oversubscription=8, **network
    )
    plan = plan_by_kind(many, "all_reduce")
    assert all(len(template.entries) == 2 for template in plan.templates if template.root == 0)
    assert {template.shifts for template in plan.templates if template.root == 0} == {1}
    agree(plan)
    uneven = next(template for template in plan.templates if template.shifts > 1)
    others = tuple(template for template in plan.templates if template is not uneven)
    with pytest.raises(
        PlanError, match="1 shifts do not give every server of a cell each role equally often"
    ):
        topoplan.verify(replace(plan, templates=(*others, replace(uneven, shifts=1))))


def test_oversubscribed_leaves_are_entered_once() -> None:
    # 40 leaves of 16 servers with 16 x 8 x 50 GB/s below and an eighth of it above: data of 39 leaves enters each leaf.
    many = cluster_by_kind(
        [Server("dgx-h100", count=640)],
        nic_gbps=400,
        nic_access="direct",
        network="fat-tree",
        leaf_size=16,
        oversubscription=8,
    )
    plan = plan_by_kind(many, "all_gather")
    assert plan.gap == 0
    assert plan.exact_rate() == min(Fraction(800 * 40, 39), Fraction(400 * 640, 639))
    assert all(template.entries for template in plan.templates)


@pytest.mark.thorough
@pytest.mark.parametrize(("collective", "rate"), [
    ("all_reduce", Fraction(400 * 12_500, 2 * 12_499)),
    pytest.param("all_gather", Fraction(400 * 12_500, 12_499), marks=pytest.mark.slow),
])  # fmt: skip
def test_pods_of_oversubscribed_leaves_are_no_bottleneck(collective: str, rate: Fraction) -> None:
    # 16 x 8 x 50 GB/s below a leaf, a half of it above, and 1/4 of it for each of the 16 leaves of a pod to the core:
    # every leaf is entered once, at 1,600 GB/s in and out of a pod for each of its leaves.
    many = cluster_by_kind(
        [Server("dgx-h100", count=12_500)],
        nic_gbps=400,
        nic_access="direct",
        network="fat-tree",
        leaf_size=16,
        oversubscription=2,
        pod_size=16,
        pod_oversubscription=2,
    )
    plan = plan_by_kind(many, collective)
    assert (plan.exact_rate(), plan.exact_bound()) == (rate, rate)
    read = PlanByKind.from_object(json.loads(plan.to_json()))
    assert verify_by_kind(read).exact_rate == rate
    assert len(plan.to_json()) < 2_000_000


POD_NETWORK: dict[str, Any] = {
    "nic_gbps": 100,
    "nic_access": "direct",
    "network": "fat-tree",
    "leaf_size": 2,
    "pod_size": 2,
    "pod_oversubscription": 8,
}


def pods_as_bottleneck() -> topoplan.ClusterByKind:
    """Return four pods of 2 leaves of 2 servers with a NIC of 12.5 GB/s each, and 6.25 GB/s to the core."""
    return cluster_by_kind([Server("v100x4", count=16)], **POD_NETWORK)


@pytest.mark.sampled
@pytest.mark.parametrize(("collective", "rate"), [
    ("all_gather", Fraction(25, 4) * 4 / 3),
    ("reduce_scatter", Fraction(25, 4) * 4 / 3),
    ("all_reduce", Fraction(25, 4) * 4 / 6),
    ("broadcast", Fraction(25, 4)),
    ("reduce", Fraction(25, 4)),
])  # fmt: skip
def test_pods_that_are_the_bottleneck_are_entered_once(collective: str, rate: Fraction) -> None:
    plan = plan_by_kind(pods_as_bottleneck(), collective)
    assert (plan.exact_rate(), plan.exact_bound()) == (rate, rate)
    assert all(template.pod_entries for template in plan.templates)
    listed = topoplan.verify(plan.listed())
    assert (listed.exact_rate, listed.trees) == (rate, verify_by_kind(plan).trees)


@pytest.mark.thorough
def test_large_pods_that_are_the_bottleneck_are_entered_once() -> None:
    # 16 x 8 x 50 GB/s below a leaf; 8 x 6,400 / 32 = 1,600 GB/s above a pod of 128 of the 1,250 servers.
    network = POD_NETWORK | {
        "leaf_size": 16,
        "oversubscription": 2,
        "pod_size": 8,
        "pod_oversubscription": 16,
    }
    many = cluster_by_kind([Server("dgx-h100", count=1250)], **network | {"nic_gbps": 400})
    plan = plan_by_kind(many, "all_gather")
    assert plan.gap == 0
    assert verify_by_kind(plan).optimal
    assert len(plan.to_json()) < 10_000_000


def agree_with_pods(seed: int, *, most: int) -> None:
    plan = plan_of_three_levels(seed, most=most)
    if plan is not None and plan.num_trees * plan.size < 200_000:
        report, listed = verify_by_kind(plan), topoplan.verify(plan.listed())
        assert (report.exact_rate, report.trees) == (listed.exact_rate, listed.trees)
        assert verify_by_kind(PlanByKind.from_object(json.loads(plan.to_json()))) == report


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(24))
def test_the_listed_form_of_three_levels_agrees(seed: int) -> None:
    agree_with_pods(seed, most=40)


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(24, 200))
def test_the_listed_form_of_larger_trees_of_three_levels_agrees(seed: int) -> None:
    agree_with_pods(seed, most=100)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(20))
def test_the_listed_form_of_dragonflies_agrees(seed: int) -> None:
    agree(plan_of_groups(seed, most=36))


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(20, 140))
def test_the_listed_form_of_larger_dragonflies_agrees(seed: int) -> None:
    agree(plan_of_groups(seed, most=128))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(10))
def test_dragonflies_are_planned_as_well_as_their_lists(seed: int) -> None:
    plan = plan_of_groups(seed, most=40)
    if plan is not None:
        listed = topoplan.plan(plan.cluster.listed(), plan.collective, root=plan.root)
        assert plan.bound >= listed.rate * (1 - 1e-9)
        assert plan.rate == pytest.approx(listed.rate)


@pytest.mark.sampled
@pytest.mark.parametrize(("count", "size", "speed", "collective", "rate"), [
    # Data of 4 groups enters each of 5 over 4 links, and all of it by one server's NICs of 8 x 50 GB/s but its own.
    (80, 16, 800, "all_gather", Fraction(400 * 80, 79)),
    (80, 16, 80, "all_gather", Fraction(10 * 5)),
    (80, 16, 80, "all_reduce", Fraction(10 * 5, 2)),
    # All data leaves the group of the root by its 4 links.
    (80, 16, 80, "broadcast", Fraction(10 * 4)),
    # The last of 79 groups has 2 servers: 1,248/1,250 of the data enter it by 78 links, and 1,234/1,250 the others.
    (1250, 16, 4, "all_gather", Fraction(39 * 1250, 1248)),
    (12_500, 16, 800, "all_reduce", Fraction(400 * 12_500, 2 * 12_499)),
])  # fmt: skip
def test_known_optima_of_dragonflies(
    count: int, size: int, speed: float, collective: str, rate: Fraction
) -> None:
    network: dict[str, Any] = {"network": "dragonfly", "group_size": size, "global_gbps": speed}
    many = cluster_by_kind([Server("dgx-h100", count=count)], nic_gbps=400, nic_access="direct", **network)
    plan = plan_by_kind(many, collective)
    report = verify_by_kind(plan)
    assert (report.exact_rate, report.exact_bound) == (rate, rate)
    assert len(plan.to_json()) < 1_000_000


def test_routes_that_pass_third_groups_unevenly_are_refused() -> None:
    # Slow servers of two GPUs in groups of their own, over which data of the others passes.
    servers = [Server("v100x4", [0], count=3), Server("v100x4", [0, 1], nic_gbps=25, count=3)]
    network: dict[str, Any] = {"network": "dragonfly", "group_size": 1, "global_gbps": 10}
    plan = plan_by_kind(cluster_by_kind(servers, nic_gbps=100, **network), "all_reduce")
    assert plan.gap == 0
    agree(plan)
    groups = plan.sample.groups
    number, edge = next(
        (number, edge)
        for number, template in enumerate(plan.templates)
        for edge in template.stages[0].edges
        if third_groups(plan.sample, edge.route)
    )
    template = plan.templates[number]
    assert template.shifts == 3

    def changed(**fields: Any) -> PlanByKind:
        every = [*plan.templates]
        every[number] = replace(template, **fields)
        return replace(plan, templates=tuple(every))

    with pytest.raises(PlanError, match="shifts do not give every server of a cell each role equally often"):
        verify_by_kind(changed(shifts=1))
    (third,) = third_groups(plan.sample, edge.route)
    ends = {groups[device] for device in edge.route if device in groups and device != third}
    other = next(
        switch for switch, leaf in groups.items() if leaf not in ends and leaf[0] in {one for one, _ in ends}
    )
    route = tuple(other if device == third else device for device in edge.route)
    edges = tuple(replace(one, route=route) if one == edge else one for one in template.stages[0].edges)
    with pytest.raises(PlanError, match="must pass at most one other group of each class"):
        verify_by_kind(changed(stages=(replace(template.stages[0], edges=edges), *template.stages[1:])))


def test_a_centre_in_each_other_group_equally_often_for_each_group_of_the_root() -> None:
    network: dict[str, Any] = {"network": "dragonfly", "group_size": 2, "global_gbps": 40}
    sample = cluster_by_kind([Server("v100x4", count=10)], nic_gbps=100, **network).sample(3)
    centre = next(one for one in range(len(sample.places)) if sample.leaf_of(one) != sample.leaf_of(0))
    template = KindTemplate(Fraction(1), 0, centre, (), 4, ())
    pairs: Counter[tuple[int, int]] = Counter()
    for number in range(40):
        leaf, position = divmod(number // 4, 2)
        group, at = centre_of(sample, template, leaf, position, number)
        assert at == position
        pairs[leaf, group] += 1
    assert pairs == {(one, other): 2 for one in range(5) for other in range(5) if one != other}


def test_wrong_entries_of_pods_are_refused() -> None:
    plan = plan_by_kind(pods_as_bottleneck(), "all_gather")
    template = plan.templates[0]
    (entry,) = template.pod_entries
    beside = next(one for one in template.entries if one != entry)
    for change, message in (
        ({"entries": (beside,)}, "must be an entry, in another pod than the centre"),
        ({"pod_entries": ()}, "leaf class 0, others has two entries"),
        ({"pod_entries": (entry, entry)}, "has two entries of a pod"),
    ):
        wrong = replace(plan, templates=(replace(template, **change), *plan.templates[1:]))
        with pytest.raises(PlanError, match=message):
            verify_by_kind(wrong)


def test_an_entry_of_a_pod_that_sends_to_another_pod_is_refused() -> None:
    plan = plan_by_kind(pods_as_bottleneck(), "all_gather")
    template, fabric = plan.templates[0], plan.fabric
    (stage,), (entry,) = template.stages, template.pod_entries
    home = plan.sample.servers_of(fabric.ranks)
    beside = next(
        edge
        for edge in stage.edges
        if home[edge.child] != home[edge.parent] == template.root
        and plan.sample.pod_of(home[edge.child]) == plan.sample.pod_of(template.root)
    )
    table = RouteTable(FabricOrbits(fabric), (1,) * len(fabric.links))
    arc = fabric.arc(table.route(home.index(entry), beside.child))
    edges = tuple(
        Edge(home.index(entry), edge.child, arc.route, arc.channel) if edge == beside else edge
        for edge in stage.edges
    )
    wrong = replace(template, stages=(replace(stage, edges=edges),))
    with pytest.raises(PlanError, match="neither root, centre, nor the entry of its leaf or pod"):
        verify_by_kind(replace(plan, templates=(wrong, *plan.templates[1:])))


def test_entries_of_pods_that_do_not_fall_on_all_servers_equally_are_refused() -> None:
    # Pods of two leaves of two servers and one of a leaf: the entries of the full pods need shifts for its root.
    plan = plan_by_kind(cluster_by_kind([Server("v100x4", count=14)], **POD_NETWORK), "all_gather")
    assert topoplan.verify(plan.listed()).exact_rate == plan.exact_rate() == plan.exact_bound()
    shifted = next(one for one in plan.templates if one.shifts > 1 and one.pod_entries)
    others = tuple(template for template in plan.templates if template is not shifted)
    with pytest.raises(PlanError, match="shifts do not give every server of a cell each role equally often"):
        verify_by_kind(replace(plan, templates=(*others, replace(shifted, shifts=1))))


def test_a_server_that_stands_for_no_other_is_refused() -> None:
    # The third server of the sample in place of the second, which stands for the others.
    plan = plan_by_kind(cluster_by_kind([Server("v100x4", count=16)], nic_gbps=100), "all_gather")
    value = plan.to_object()
    value["templates"] = json.loads(json.dumps(value["templates"]).replace('"s1.', '"s2.'))
    other = PlanByKind.from_object(json.loads(json.dumps(value)))
    with pytest.raises(PlanError, match="reaches s2 for 15 servers, but it stands for 0"):
        verify_by_kind(other)
    with pytest.raises(PlanError, match="s2, which stands for no server"):
        other.exact_rate()


def test_a_centre_in_another_class_of_leaves_of_the_same_pods_is_refused() -> None:
    servers = [Server("v100x4", count=2), Server("dgx-1v", [0, 1], count=2)] * 3
    network: dict[str, Any] = {"network": "fat-tree", "leaf_size": 2, "pod_size": 2}
    plan = plan_by_kind(cluster_by_kind(servers, nic_gbps=100, **network), "all_gather")
    cells, places = plan.cluster.cells, plan.sample.places
    assert {(cell.leaf_class, cell.pod_class, cell.pods) for cell in cells} == {(0, 0, 3), (1, 0, 3)}
    template = plan.templates[0]
    other = next(one for one, place in enumerate(places) if place.cell != places[template.root].cell)
    bare = replace(template, centre=other, entries=(), pod_entries=())
    wrong = replace(plan, templates=(bare, *plan.templates[1:]))
    with pytest.raises(PlanError, match="centre must be in a leaf of the root's class"):
        verify_by_kind(wrong)


def test_a_centre_in_another_pod_is_each_server_once_and_never_in_the_pod_of_the_root() -> None:
    network: dict[str, Any] = {"network": "fat-tree", "leaf_size": 2, "pod_size": 2}
    sample = cluster_by_kind([Server("v100x4", count=16)], nic_gbps=100, **network).sample(3)
    cell = sample.cluster.cells[0]
    pods = [sample.pod_of(server) for server in range(len(sample.places))]
    template = KindTemplate(Fraction(1), 0, pods.index((0, 1)), (), 1, ())
    centres = []
    for number in range(16):
        leaf, position = divmod(number, 2)
        centre, at = centre_of(sample, template, leaf, position, number)
        assert (cell.pod(centre) != cell.pod(leaf), centre % 2, at) == (True, leaf % 2, position)
        centres.append((centre, at))
    assert len(set(centres)) == 16


def test_centres_out_of_reach_are_left_out() -> None:
    agree(random_plan(418, most=100))


@pytest.mark.thorough
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_the_leaf_of_a_root_is_entered_once_too(collective: str) -> None:
    network: dict[str, Any] = {"network": "fat-tree", "oversubscription": 4}
    large = cluster_by_kind([Server("dgx-h100", count=1280)], nic_gbps=400, leaf_size=32, **network)
    plan = plan_by_kind(large, collective)
    assert (plan.exact_rate(), plan.exact_bound()) == (384, 384)
    servers = [Server("v100x4", count=5), Server("nvlink-x4", [0, 1], count=7)]
    small = plan_by_kind(cluster_by_kind(servers, nic_gbps=100, leaf_size=4, **network), collective)
    beside = [
        template
        for template in small.templates
        if any(beside_root(small.sample, template, entry) for entry in template.entries)
    ]
    assert beside
    listed = topoplan.verify(small.listed())
    assert listed.exact_rate == verify_by_kind(small).exact_rate
    twice = replace(
        small,
        templates=tuple(
            replace(one, entries=(*one.entries, one.entries[0])) if one in beside else one
            for one in small.templates
        ),
    )
    with pytest.raises(PlanError, match="has two entries"):
        verify_by_kind(twice)


def test_the_listed_planner_is_not_faster() -> None:
    many = cluster_by_kind(
        [Server("v100x4", count=3), Server("nvlink-x4", [0, 1], count=2)],
        nic_gbps=100,
        network="fat-tree",
        leaf_size=3,
    )
    for collective in ("all_reduce", "all_gather", "broadcast"):
        by_kind = plan_by_kind(many, collective)
        assert by_kind.rate >= topoplan.plan(many.listed(), collective).rate * (1 - 1e-12)


def test_the_list_of_one_kind_has_templates_and_rotations() -> None:
    for network in ({}, {"network": "fat-tree", "leaf_size": 3, "oversubscription": 4}):
        servers = [Server("v100x4", count=6)]
        plan = plan_by_kind(cluster_by_kind(servers, nic_gbps=100, **network), "all_gather")
        images = [
            shard for template in plan.templates for shard in map(plan.images(template).shard, range(6))
        ]
        made = plan.listed()
        assert isinstance(made.shards, ImageShards)
        assert {shard_key(shard) for shard in images} == {shard_key(shard) for shard in made.shards}
        assert topoplan.verify(made).exact_rate == plan.exact_rate()


def shard_key(shard: Shard) -> tuple[object, ...]:
    return shard.share, *((stage.root, frozenset(stage.edges)) for stage in shard.stages)


def test_a_list_that_does_not_fit_is_refused() -> None:
    plan = plan_by_kind(
        cluster_by_kind([Server("dgx-h100", count=12500)], nic_gbps=400, nic_access="direct"), "all_reduce"
    )
    with pytest.raises(UsageError, match="choose fewer servers, or use the plan by kind"):
        plan.listed()


def test_faults_of_a_file_are_named() -> None:
    plan = plan_by_kind(cluster_by_kind([Server("v100x4", count=5)], nic_gbps=100), "all_reduce")
    value = json.loads(plan.to_json())
    value["templates"][0]["shifts"] = 0
    with pytest.raises(PlanError, match="template 0: shifts must be 1 or more, got 0"):
        PlanByKind.from_object(value)
    with pytest.raises(PlanError, match="claims a rate of 1000000 GB/s"):
        topoplan.verify(replace(plan, rate=1e6))
    with pytest.raises(PlanError, match="shares add up to"):
        topoplan.verify(replace(plan, templates=plan.templates[1:]))


def test_devices_that_forward_are_left_to_the_list() -> None:
    machine = topoplan.load("v100x4")
    forwarding = replace(machine.devices[-1], forwards=True)
    one = replace(machine, devices=(*machine.devices[:-1], forwarding))
    with pytest.raises(InfeasibleError, match="are planned in a list only"):
        plan_by_kind(cluster_by_kind([Server(one, count=3)], nic_gbps=100), "all_gather")
    plain = cluster_by_kind([Server(machine, count=3)], nic_gbps=100)
    plan = plan_by_kind(plain, "all_gather")
    wired = replace(
        plain.kinds[0],
        devices=(*plain.kinds[0].devices[:-1], replace(plain.kinds[0].devices[-1], forwards=True)),
    )
    with pytest.raises(PlanError, match="are planned in a list only"):
        topoplan.verify(replace(plan, cluster=replace(plan.cluster, kinds=(wired,))))


def test_copies_through_the_memory_of_cpus_are_left_to_the_list() -> None:
    many = cluster_by_kind([Server("dgx-1v", count=40)], nic_gbps=100)
    with pytest.raises(InfeasibleError, match="through the CPUs' memory, are planned in a list only"):
        plan_by_kind(many, "all_reduce", channels="all-staged+network")
    value = json.loads(plan_by_kind(many, "all_reduce", channels="all+network").to_json())
    with pytest.raises(PlanError, match="are planned in a list only"):
        verify_by_kind(PlanByKind.from_object({**value, "channels": ["all-staged", "network"]}))


def test_roles_that_do_not_fall_on_all_servers_equally_are_refused() -> None:
    # Leaves of four and of three servers: entries of a leaf of four need shifts for roots in the leaf of three.
    uneven = cluster_by_kind(
        [Server("v100x4", count=7)], nic_gbps=100, network="fat-tree", leaf_size=4, oversubscription=8
    )
    plan = plan_by_kind(uneven, "all_reduce")
    assert topoplan.verify(plan.listed()).exact_rate == plan.exact_rate()
    shifted = next(template for template in plan.templates if template.shifts > 1)
    others = tuple(template for template in plan.templates if template is not shifted)
    with pytest.raises(
        PlanError, match="1 shifts do not give every server of a cell each role equally often"
    ):
        topoplan.verify(replace(plan, templates=(*others, replace(shifted, shifts=1))))


@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce", "alltoall"])
def test_a_deferred_plan_is_the_listed_plan_and_is_listed_for_its_trees_alone(
    collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [Server("v100x4", count=2), Server("nvlink-x4", [0, 1], count=2)]
    plan = plan_by_kind(cluster_by_kind(servers, nic_gbps=100), collective)
    deferred, listed = DeferredPlan(plan), plan.listed()
    with monkeypatch.context() as patched:
        patched.setattr(PlanByKind, "listed", None)
        for name in (
            "collective",
            "ranks",
            "root",
            "topology",
            "channels",
            "schedule",
            "method",
            "rate",
            "bound",
        ):
            assert getattr(deferred, name) == getattr(listed, name), name
        for name in (
            "vertices",
            "helpers",
            "exchanges",
            "sparse",
            "blocks",
            "buffers",
            "num_trees",
            "height",
        ):
            assert getattr(deferred, name) == getattr(listed, name), name
        assert deferred.digest == plan.digest
        assert parse_job_plan(deferred.to_json()) == deferred == pickle.loads(pickle.dumps(deferred))
        assert topoplan.verify(deferred) == topoplan.verify(plan)
    assert deferred.shards == listed.shards
    assert deferred.certificate == listed.certificate
    assert replace(deferred, notes=listed.notes, order=listed.order) == listed
    assert parse_plan_file(deferred.to_json()) == listed


def test_a_deferred_plan_of_100_000_gpus_refuses_a_list_of_its_trees() -> None:
    many = cluster_by_kind([Server("dgx-h100", count=12_500)], nic_gbps=400)
    deferred = DeferredPlan(plan_by_kind(many, "all_gather"))
    assert (deferred.ranks[0], deferred.ranks[-1], len(deferred.ranks)) == ("s0.gpu0", "s12499.gpu7", 100_000)
    assert "384.031 GB/s" in repr(deferred)
    assert "all_gather on 12500 x dgx-h100" in str(deferred)
    assert "topology" not in vars(deferred)
    with pytest.raises(UsageError, match="16,384 GPUs fit; choose fewer servers, or use the plan by kind"):
        deferred.bounds(100_000)
