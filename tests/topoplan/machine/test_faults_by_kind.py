"""Faults of a cluster by kind against the same faults of the listed cluster."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from typing import Any

import pytest

import topoplan
from tests.support.kind_clusters import random_dragonfly
from topoplan import ClusterByKind, Server, Topology
from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.variants import nic_name, slow_links, without_devices, without_gpus, without_links
from topoplan.plans.plan_by_kind import PlanByKind

NETWORKS: dict[str, dict[str, Any]] = {
    "switch": {},
    "fat-tree": {"network": "fat-tree", "leaf_size": 2, "oversubscription": 2},
    "three levels": {"network": "fat-tree", "leaf_size": 1, "oversubscription": 2, "pod_size": 2},
    "rail-optimised": {"network": "rail-optimised", "oversubscription": 2},
    "dragonfly": {"network": "dragonfly", "group_size": 2, "global_gbps": 400},
}


def many(count: int = 4, network: str = "switch", **given: Any) -> ClusterByKind:
    return topoplan.cluster_by_kind(
        [Server("v100x4", count=count)], **{"nic_gbps": 400, "nics": 2, **NETWORKS[network], **given}
    )


def listed_after(cluster: ClusterByKind, faults: dict[str, Any]) -> Topology:
    """The listed cluster after the same faults, by the functions for any topology."""
    left = slow_links(cluster.listed(), faults.get("slow_links", {}))
    left = without_links(left, faults.get("without_links", ()))
    left = without_devices(left, faults.get("without_devices", ()))
    return without_gpus(left, faults.get("without_gpus", ()))


def random_faults(cluster: ClusterByKind, rng: random.Random) -> dict[str, Any]:
    whole = cluster.listed()
    faults: dict[str, Any] = {
        "slow_links": {},
        "without_links": [],
        "without_devices": [],
        "without_gpus": [],
    }
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(list(faults))
        link = rng.choice(whole.links)
        wire = f"{nic_name(link.src)}{rng.choice(('-', '->'))}{nic_name(link.dst)}"
        if kind == "slow_links":
            faults[kind][wire] = link.bandwidth * rng.choice((0.25, 0.5))
        elif kind == "without_links":
            faults[kind].append(wire)
        elif kind == "without_devices":
            losable = [one.name for one in whole.devices if one.kind in ("nic", "switch")]
            faults[kind].append(nic_name(rng.choice(losable)))
        else:
            faults[kind].append(rng.randrange(cluster.size))
    return faults


CASES = [(network, seed) for network in NETWORKS for seed in range(6)]


@pytest.mark.sampled
@pytest.mark.parametrize(("network", "seed"), CASES)
def test_listed_form_has_the_links_of_the_listed_cluster_after_the_same_faults(
    network: str, seed: int
) -> None:
    rng = random.Random(f"{network} {seed}")
    cluster = many(rng.randint(2, 5), network, nic_access=rng.choice(("pcie", "direct")))
    faults = random_faults(cluster, rng)
    try:
        after = cluster.with_faults(**faults)
    except UsageError as error:
        if "plan the listed cluster" in str(error):
            return
        # A server or leaf without the network has no plan in the listed form either, or the whole is refused there.
        with pytest.raises((UsageError, InfeasibleError)):
            topoplan.plan(listed_after(cluster, faults))
        return
    left, found = listed_after(cluster, faults), after.listed()
    assert found.gpus == left.gpus
    assert [after.gpu_name(rank) for rank in range(after.size)] == list(left.gpus)
    gone = {name.split(".")[0] for name in cluster.listed().gpus} - {name.split(".")[0] for name in left.gpus}
    wanted = [link for link in left.links if not {link.src.split(".")[0], link.dst.split(".")[0]} & gone]
    assert sorted(map(repr, found.links)) == sorted(map(repr, wanted))


@pytest.mark.sampled
@pytest.mark.parametrize(("network", "seed"), CASES)
def test_plan_by_kind_and_listed_plan_stay_below_each_other_s_bound(network: str, seed: int) -> None:
    rng = random.Random(f"plan {network} {seed}")
    cluster = many(rng.randint(2, 4), network, nic_access="direct")
    collective = rng.choice(("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce"))
    faults = random_faults(cluster, rng)
    try:
        after = cluster.with_faults(**faults)
        root = rng.randrange(after.size) if collective in ("broadcast", "reduce") else None
        plan = topoplan.plan_by_kind(after, collective, root=root)
    except (UsageError, InfeasibleError):
        return
    other = topoplan.plan(listed_after(cluster, faults), collective, root=root)
    assert other.rate <= plan.bound * (1 + 1e-9)
    assert plan.rate <= other.bound * (1 + 1e-9)
    if plan.gap == 0:
        assert plan.rate == pytest.approx(other.rate)
    read = PlanByKind.from_object(json.loads(plan.to_json()))
    assert read.to_json() == plan.to_json()
    report, listed = topoplan.verify(read), topoplan.verify(read.listed())
    assert (report.exact_rate, report.exact_bound) == (listed.exact_rate, listed.exact_bound)


def test_servers_with_equal_faults_are_one_kind() -> None:
    after = many(100).with_faults(slow_links={f"s{n}.gpu0-s{n}.gpu3": 20.0 for n in (7, 30, 31)})
    assert (len(after.kinds), after.runs) == (2, ((0, 7), (1, 1), (0, 22), (1, 2), (0, 68)))


def test_fault_of_an_uplink_makes_its_leaf_a_class_of_its_own() -> None:
    after = many(8, "fat-tree").with_faults(slow_links={"leaf1-spine0": 10.0})
    assert [(cell.leaves, cell.count) for cell in after.cells] == [(3, 2), (1, 2)]
    plan = topoplan.plan_by_kind(after, "allreduce")
    assert (plan.rate, plan.gap) == (topoplan.plan(after.listed()).rate, 0)


@pytest.mark.parametrize(
    "collective",
    [
        "alltoall",
        pytest.param("allgather", marks=pytest.mark.thorough),
        pytest.param("allreduce", marks=pytest.mark.slow),
    ],
)
def test_groups_of_a_slow_or_missing_link_are_classes_of_their_own(collective: str) -> None:
    cluster = many(12, "dragonfly", global_gbps=80, nic_access="direct")
    after = cluster.with_faults(slow_links={"group0-group1": 2.5})
    after = after.with_faults(without_links=["group3->group5"])
    assert after.global_links == ((0, 1, 2.5, 2.5), (3, 5, 0.0, 10.0))
    assert [(cell.leaves, cell.count) for cell in after.cells] == [(1, 2), (1, 2), (2, 2), (1, 2), (1, 2)]
    plan = topoplan.plan_by_kind(after, collective)
    if collective == "allgather":
        # Data of 40 of 48 GPUs enters group5 over four links of 10 GB/s.
        assert plan.exact_rate() == plan.exact_bound() == Fraction(40 * 48, 40)
    report = topoplan.verify(PlanByKind.from_object(json.loads(plan.to_json())))
    assert report.exact_rate == plan.exact_rate()
    listed = topoplan.plan(after.listed(), collective)
    assert plan.bound == pytest.approx(listed.bound)
    assert plan.rate <= listed.bound * (1 + 1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(8, 40))]
)
def test_links_between_groups_fail_by_kind_as_in_the_list(seed: int) -> None:
    """Loads, rate and bound are those of the list, and the bound is that of the planner of lists."""
    cluster, rng = random_dragonfly(seed, most=32), random.Random(f"groups {seed}")
    if cluster is None or len(cluster.leaves) < 3:
        return
    pairs = list(permutations(range(len(cluster.leaves)), 2))
    faults: dict[str, Any] = {"slow_links": {}, "without_links": []}
    for one, other in rng.sample(pairs, rng.randint(1, 2)):
        name = f"group{one}{rng.choice(('-', '->'))}group{other}"
        if rng.random() < 0.5:
            faults["without_links"].append(name)
        else:
            faults["slow_links"][name] = cluster.network.global_gbps * rng.choice((0.01, 0.05))
    collective = ("allgather", "allreduce", "alltoall", "reduce_scatter", "broadcast")[seed % 5]
    try:
        after = cluster.with_faults(**faults)
        plan = topoplan.plan_by_kind(after, collective, root=5 if collective == "broadcast" else None)
    except InfeasibleError:
        return
    left = listed_after(cluster, faults)
    assert sorted(map(repr, after.listed().links)) == sorted(map(repr, left.links))
    report, listed = topoplan.verify(plan), topoplan.verify(plan.listed())
    assert (report.exact_rate, report.exact_bound) == (listed.exact_rate, listed.exact_bound)
    assert report.loads == pytest.approx({ends: listed.loads[ends] for ends in report.loads})
    other = topoplan.plan(left, collective, root=plan.root)
    assert plan.bound >= other.rate * (1 - 1e-9)
    assert plan.rate <= other.bound * (1 + 1e-9)


def test_wrong_global_links_of_a_plan_file_are_refused() -> None:
    after = many(8, "dragonfly").with_faults(without_links=["group1->group2"])
    stated = json.loads(topoplan.plan_by_kind(after, "allgather").to_json())
    network = stated["cluster"]["network"]
    assert network["global_links"] == [[1, 2, 0.0, 50.0]]
    for rows, words in (
        ([[2, 1, 0, 50]], "the lower first and below 4"),
        ([[1, 4, 0, 50]], "the lower first and below 4"),
        ([[1, 2, 0, 50], [1, 2, 0, 50]], "each pair once"),
        ([[1, 2, 0]], "a global link must be"),
        ([[1, 2, -1, 50]], "zero or more"),
        ([["group1", 2, 0, 50]], "group of a global link"),
        ([], "which is not on the plan's servers|template|certificate|rate|does not"),
    ):
        network["global_links"] = rows
        with pytest.raises(PlanError, match=words):
            topoplan.verify(PlanByKind.from_object(stated))
    network.update(kind="switch", global_links=[[0, 1, 5, 5]])
    del network["group_size"], network["global_gbps"]
    with pytest.raises(PlanError, match="below 0"):
        PlanByKind.from_object(stated)


def test_rail_that_is_taken_out_is_missing_at_every_server() -> None:
    cluster = many(6, "rail-optimised")
    after = cluster.with_faults(without_devices=["rail1"])
    assert (len(after.kinds), after.runs) == (1, ((0, 6),))
    assert [port.out for port in after.kinds[0].ports] == [cluster.kinds[0].ports[0].out, 0.0]


def test_ranks_are_the_gpus_that_remain() -> None:
    after = many(5).with_faults(without_gpus=[1, *range(8, 12)])
    assert after.size == 15
    assert [after.first_rank(server) for server in range(5)] == [0, 3, 7, 7, 11]
    assert [after.server_of(rank) for rank in (2, 3, 6, 7, 14)] == [(0, 2), (1, 0), (1, 3), (3, 0), (4, 3)]
    assert after.gpu_name(1) == "s0.gpu2"
    with pytest.raises(UsageError, match="s2 has no GPU"):
        after.place(2)


def test_uplinks_stay_as_the_network_was_built_when_ports_and_servers_fail() -> None:
    cluster = many(8, "fat-tree")
    after = cluster.with_faults(without_gpus=range(8, 12), without_devices=["s0.nic0"])
    uplinks = [link for link in cluster.listed().links if "spine0" in (link.src, link.dst)]
    assert [link for link in after.listed().links if "spine0" in (link.src, link.dst)] == uplinks
    again = after.with_faults(slow_links={"s0.nic1-leaf0": 10.0})
    assert [link for link in again.listed().links if "spine0" in (link.src, link.dst)] == uplinks


@pytest.mark.parametrize(
    ("network", "faults", "words"),
    [
        ("switch", {"without_devices": ["s9.nic0"]}, "s9.nic0: .* has servers s0 to s3"),
        ("switch", {"without_devices": ["s1.nic7"]}, "has no device 's1.nic7'"),
        ("switch", {"without_devices": ["s1.gpu2"]}, "s1.gpu2 is GPU 6"),
        ("switch", {"without_gpus": [16]}, "GPU 16 is out of range"),
        ("switch", {"without_gpus": range(16)}, "all GPUs of .* are taken out"),
        ("switch", {"without_devices": ["s1.nic0", "s1.nic1"]}, "s1 must have a link .* 4 to 7"),
        ("switch", {"without_devices": ["switch0"]}, "s0 must have a link"),
        ("switch", {"slow_links": {"s1.nic0-switch0": 99.0}}, "is not slower"),
        ("fat-tree", {"without_devices": ["spine0"]}, "leaf0 must have links with spine0"),
        ("fat-tree", {"without_links": ["leaf1->spine0"]}, "leaf1 must have links .* got 0 GB/s up"),
        ("fat-tree", {"without_devices": ["leaf9"]}, "has no device 'leaf9'"),
        ("dragonfly", {"without_links": ["group1->group0"]}, "group1 must have a way to group0 after"),
        ("dragonfly", {"without_links": ["group0->group1"]}, "group1 must have a way from group0 after"),
        ("dragonfly", {"without_gpus": range(8)}, "group0 must have a GPU, got none"),
        ("dragonfly", {"without_devices": ["group1"]}, "s2 must have a link into the network"),
    ],
)
def test_refused_faults(network: str, faults: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        many(4, network).with_faults(**faults)


def test_wrong_ports_and_uplinks_of_a_plan_file_are_refused() -> None:
    after = many(6, "fat-tree").with_faults(without_devices=["s1.nic0"], slow_links={"leaf2-spine0": 30.0})
    plan = topoplan.plan_by_kind(after, "allgather")
    wrong: list[tuple[str, Any, str]] = [
        ("ports", [[0, "nic0", "nic0", 0, 50]], "above 0 GB/s"),
        ("ports", [[0, "nic0", "nic0", 50, 50, 50]], "after a fault"),
        ("ports", [[0, "nic0", "nic0", 0, 0, 50, 50]], "needs a GPU, a port out and a port back"),
        ("uplinks", [["leaf2", -1, 3]], "zero or more"),
        ("uplinks", [["leaf2", None, 3]], "must be a number of GB/s"),
        ("uplinks", [["leaf2", 3]], "an uplink must be"),
    ]
    for key, value, words in wrong:
        stated = json.loads(plan.to_json())
        place = stated["cluster"]["network"] if key == "uplinks" else stated["cluster"]["kinds"][0]
        place[key] = value
        with pytest.raises(PlanError, match=words):
            PlanByKind.from_object(stated)


def test_verification_refuses_an_edge_with_the_route_of_another() -> None:
    plan = topoplan.plan_by_kind(many(4), "broadcast", root=0)
    template = plan.templates[0]
    stage = template.stages[0]
    edges = (replace(stage.edges[0], route=stage.edges[1].route), *stage.edges[1:])
    wrong = replace(template, stages=(replace(stage, edges=edges),))
    with pytest.raises(PlanError, match="does not lead"):
        topoplan.verify(replace(plan, templates=(wrong, *plan.templates[1:])))
