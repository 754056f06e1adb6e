"""Plans by kind with in-network reduction: known answers, the listed form, exact Steiner lengths, and wrong files."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

import topoplan
from tests.support.kind_clusters import (
    changed_switches,
    plan_in_network,
    random_in_network,
    refused_of_changed,
)
from topoplan import InfeasibleError, PlanByKind, PlanError, Server, UsageError, cluster_by_kind, plan_by_kind
from topoplan.machine.fabric import Fabric
from topoplan.machine.variants import with_in_network
from topoplan.plans.certificates.exchange import Steiner
from topoplan.plans.verify import Verification
from topoplan.plans.verify_by_kind import verify_by_kind
from topoplan.plans.verify_kind_mesh import verify_kind_mesh
from topoplan.solve.mesh_by_kind import plan_mesh_by_kind


def servers(
    count: int, which: str, nic_gbps: float = 400, gpus: Sequence[int] | None = None, **network: Any
) -> topoplan.ClusterByKind:
    """Return servers of 8 GPUs with 450 GB/s each to their NVSwitches, and 8 NICs that all GPUs reach."""
    server = [Server("dgx-h100", gpus, count=count)]
    return cluster_by_kind(server, nic_gbps=nic_gbps, nic_access="direct", **network).with_in_network(which)


def agree(plan: PlanByKind) -> None:
    """Compare a plan with its list, and its bound with exact Steiner lengths if they are known."""
    report, listed = verify_by_kind(plan), topoplan.verify(plan.listed())
    assert (report.exact_rate, report.exact_bound) == (plan.exact_rate(), plan.exact_bound())
    assert (report.exact_rate, report.trees, report.height) == (
        listed.exact_rate,
        listed.trees,
        listed.height,
    )
    assert report.loads == pytest.approx({ends: listed.loads[ends] for ends in report.loads})
    assert steiner_bound(plan) <= report.exact_bound
    read = PlanByKind.from_object(json.loads(plan.to_json()))
    assert read.to_json() == plan.to_json()
    assert verify_by_kind(read) == report


def steiner_bound(plan: PlanByKind) -> Fraction:
    """Return the bound that the lengths of all links prove with the exact length of trees; 0 if it is not known."""
    fabric = Fabric(plan.cluster.listed().settled(), plan.channels)
    try:
        return Steiner(plan._listed_lengths(fabric).lengths).bound(fabric, plan.collective, plan.root)
    except PlanError as error:
        if "inner vertices" not in str(error):
            raise
        return Fraction(0)


@pytest.mark.sampled
@pytest.mark.parametrize(("count", "which", "nic_gbps", "collective", "rate"), [
    # The NICs of a server carry 400 GB/s, out and in. Without switches of the network that add, each of N servers has
    # data from N - 1 others in both phases.
    (1250, "nvswitch", 400, "all_reduce", Fraction(400 * 1250, 2 * 1249)),
    (12_500, "nvswitch", 400, "all_reduce", Fraction(400 * 12_500, 2 * 12_499)),
    # With them every byte leaves and enters a server once.
    (3, "all", 400, "all_reduce", Fraction(400)),
    (12_500, "all", 400, "all_reduce", Fraction(400)),
    (12_500, "all", 400, "broadcast", Fraction(400)),
    # 450 + 800 / 8 GB/s enter each of 100,000 GPUs, for all blocks but its own.
    (12_500, "nvswitch", 800, "all_gather", Fraction(550 * 100_000, 99_999)),
    (12_500, "all", 800, "reduce_scatter", Fraction(550 * 100_000, 99_999)),
    (12_500, "all", 800, "all_reduce", Fraction(1975, 4)),
])  # fmt: skip
def test_known_optima_of_one_switch(
    count: int, which: str, nic_gbps: float, collective: str, rate: Fraction
) -> None:
    plan = plan_by_kind(servers(count, which, nic_gbps), collective)
    report = verify_by_kind(PlanByKind.from_object(json.loads(plan.to_json())))
    assert (report.exact_rate, report.exact_bound) == (rate, rate)
    assert len(plan.to_json()) < 100_000


def test_leaves_that_add_send_one_sum_to_the_spine() -> None:
    # 16 x 400 GB/s below a leaf of 16 servers, and a 32nd of it above: each byte enters and leaves it once.
    fat = {"network": "fat-tree", "leaf_size": 16, "oversubscription": 32}
    plan = plan_by_kind(servers(640, "all", **fat), "all_reduce")
    assert (plan.exact_rate(), plan.exact_bound()) == (200, 200)
    without = plan_by_kind(servers(640, "nvswitch", **fat), "all_reduce")
    # Half of the bytes of a sum and of a copy of 39 leaves enters each of 40.
    assert without.exact_rate() == without.exact_bound() == Fraction(200 * 40, 2 * 39)


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize(("which", "network"), [
    (which, network)
    for which in ("nvswitch", "switch", "all")
    for network in ({}, {"network": "rail-optimised", "oversubscription": 2}, {"network": "fat-tree", "leaf_size": 2})
])  # fmt: skip
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter", "broadcast", "reduce"])
def test_clusters_are_planned_as_well_as_their_lists(
    which: str, network: dict[str, Any], collective: str
) -> None:
    plan = plan_by_kind(servers(3, which, gpus=range(3), **network), collective)
    listed = topoplan.verify(topoplan.plan(plan.cluster.listed(), collective, root=plan.root))
    assert (listed.exact_rate, listed.exact_bound) == (plan.exact_rate(), plan.exact_bound())
    agree(plan)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(24))
def test_the_listed_form_agrees(seed: int) -> None:
    plan = plan_in_network(seed, most=32)
    if plan is not None:
        agree(plan)


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(24, 200))
def test_the_listed_form_of_more_clusters_agrees(seed: int) -> None:
    plan = plan_in_network(seed, most=72)
    if plan is not None:
        agree(plan)


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(40))
def test_no_listed_plan_exceeds_the_bound(seed: int) -> None:
    plan = plan_in_network(seed, most=24)
    if plan is not None:
        listed = topoplan.plan(plan.cluster.listed(), plan.collective, root=plan.root, time_limit=10)
        assert plan.bound >= listed.rate * (1 - 1e-9)


@pytest.mark.parametrize(
    "changes", [pytest.param(80, marks=pytest.mark.thorough), pytest.param(400, marks=pytest.mark.slow)]
)
def test_wrong_files_are_refused(changes: int) -> None:
    rng = random.Random(11)
    plans = [plan for seed in range(30) if (plan := plan_in_network(seed, most=24)) is not None]
    refused = refused_of_changed(plans, changed_switches, rng, changes, lambda read, _: steiner_bound(read))
    assert refused > changes // 4


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("fault", [
    {"without_devices": ["s0.nvswitch0"]},
    {"without_links": ["s0.gpu0-s0.nvswitch0"]},
    {"without_links": ["s3.gpu1-s3.nvswitch0"], "without_devices": ["s0.nvswitch0"]},
])  # fmt: skip
@pytest.mark.parametrize(("which", "network"), [
    ("none", {}), ("nvswitch", {}), ("all", {}), ("all", {"network": "fat-tree", "leaf_size": 2}),
])  # fmt: skip
def test_servers_without_nvlink_are_planned_over_the_network(
    which: str, network: dict[str, Any], fault: dict[str, Any], collective: str
) -> None:
    cluster = servers(4, which, gpus=range(4), **network).with_faults(**fault)
    root = 6 if collective == "broadcast" else None
    plan = plan_by_kind(cluster, collective, root=root, channels="nvlink+network")
    agree(plan)
    listed = topoplan.plan(cluster.listed(), collective, root=root, channels="nvlink+network", time_limit=20)
    assert plan.bound >= listed.rate * (1 - 1e-9)
    if collective != "allreduce":
        # The sums of an allreduce enter and leave a server by one GPU, or by each of its GPUs.
        assert plan.rate == pytest.approx(listed.bound)


def test_a_server_is_entered_once_for_each_part_that_nvlink_connects() -> None:
    # GPU 0 and the other three have two NICs of 50 GB/s each in common: 400 GB/s, of which each byte takes two shares.
    left = servers(400, "all", gpus=range(4)).with_faults(without_links=["s0.gpu0-s0.nvswitch0"])
    plan = plan_by_kind(left, "allreduce", channels="nvlink+network")
    assert (plan.exact_rate(), plan.exact_bound()) == (200, 200)
    # Without NVLink every GPU receives each byte over the network.
    left = servers(400, "all", gpus=range(4)).with_faults(without_devices=["s0.nvswitch0"])
    plan = plan_by_kind(left, "allreduce", channels="nvlink+network")
    assert (plan.exact_rate(), plan.exact_bound()) == (100, 100)


@pytest.mark.parametrize(
    "seeds", [pytest.param(12, marks=pytest.mark.thorough), pytest.param(60, marks=pytest.mark.slow)]
)
def test_wrong_claims_are_refused(seeds: int) -> None:
    plans = [plan for seed in range(seeds) if (plan := plan_in_network(seed, most=40)) is not None]
    for plan in plans:
        for wrong in (1 - 1e-3, 1 + 1e-3):
            for claim in ({"rate": plan.rate * wrong}, {"bound": plan.bound * wrong}):
                with pytest.raises(PlanError, match="claims"):
                    verify_by_kind(replace(plan, **claim))  # type: ignore[arg-type]
    assert len(plans) > seeds // 2


def test_claims_without_the_switches_that_add_are_refused() -> None:
    plan = plan_by_kind(servers(200, "all"), "all_reduce")
    value = json.loads(plan.to_json())
    assert value["cluster"]["network"]["in_network"] is True
    del value["cluster"]["network"]["in_network"]
    with pytest.raises(PlanError, match="claims a rate of 400 GB/s"):
        verify_by_kind(PlanByKind.from_object(value))
    value["cluster"]["network"]["in_network"] = 1
    with pytest.raises(PlanError, match="in_network must be true or false, got 1"):
        PlanByKind.from_object(value)


@pytest.mark.parametrize("seed", range(12))
def test_the_cluster_lists_what_with_in_network_makes_of_its_list(seed: int) -> None:
    cluster = random_in_network(seed, most=64)
    if cluster is None:
        return
    plain = replace(cluster, in_network=False, notes=())
    for which in ("none", "nvswitch", "switch", "all"):
        try:
            made = plain.with_in_network(which).listed()
        except UsageError as error:
            with pytest.raises(UsageError, match=str(error)):
                with_in_network(plain.listed(), which)
            continue
        listed = with_in_network(topoplan.machine.hardware.with_capable(plain.listed()), which)
        assert made.devices == listed.devices
        assert made.notes == listed.notes


def test_networks_that_are_listed_only() -> None:
    groups = {"network": "dragonfly", "group_size": 2, "global_gbps": 100}
    pods = {"network": "fat-tree", "leaf_size": 2, "pod_size": 2}
    for network in (groups, pods):
        plan = plan_by_kind(servers(8, "nvswitch", **network), "all_reduce")
        assert plan.gap == 0
        with pytest.raises(InfeasibleError, match="are planned in a list only"):
            plan_by_kind(servers(8, "all", **network), "all_reduce")
    with pytest.raises(PlanError, match="are planned in a list only"):
        verify_by_kind(replace(plan, cluster=replace(plan.cluster, in_network=True)))


def test_switches_that_the_machine_states_are_used() -> None:
    server = Server(with_in_network(topoplan.load("dgx-h100"), "nvswitch"), count=200)
    stated = cluster_by_kind([server], nic_gbps=800, nic_access="direct")
    plan = plan_by_kind(stated, "all_gather")
    assert plan.exact_rate() == plan_by_kind(servers(200, "nvswitch", 800), "all_gather").exact_rate()
    assert stated.merges
    assert not servers(2, "none").merges


def test_meshes_are_left_to_the_list() -> None:
    axes = {"dp": 200, "tp": 8}
    made = plan_mesh_by_kind(servers(200, "none"), axes)
    with pytest.raises(PlanError, match="a mesh by kind must have switches that neither copy nor add"):
        verify_kind_mesh(replace(made, cluster=servers(200, "nvswitch")))
    with pytest.raises(UsageError, match="a mesh by kind must have switches that neither copy nor add"):
        plan_mesh_by_kind(servers(200, "nvswitch"), axes)


@pytest.mark.parametrize(("gpus", "network"), [
    (8, {}),
    (2, {"network": "dragonfly", "group_size": 2, "global_gbps": 100}),
    (2, {"network": "fat-tree", "leaf_size": 2, "pod_size": 2}),
    pytest.param(
        8, {"network": "torus", "sides": [2, 2], "dimension_nics": [1, 1], "nics": 4}, marks=pytest.mark.thorough
    ),
])  # fmt: skip
def test_an_exchange_passes_such_switches_as_any(gpus: int, network: dict[str, Any]) -> None:
    plan, plain = (
        plan_by_kind(servers(4, which, gpus=range(gpus), **network), "alltoall") for which in ("all", "none")
    )
    report: Verification = verify_by_kind(plan)
    assert report.exact_rate == verify_by_kind(plain).exact_rate == topoplan.verify(plan.listed()).exact_rate
