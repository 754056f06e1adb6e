"""Trees by kind that enter servers at some of their GPUs, and bounds by dual ascent: known answers, and the list's."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

import topoplan
from tests.support.kind_clusters import changed_file, drawn_plan, refused_of_changed
from tests.topoplan.plans.test_plan_by_kind import agree
from topoplan import (
    ClusterByKind,
    PlanByKind,
    PlanError,
    Server,
    TopoplanError,
    cluster_by_kind,
    plan,
    plan_by_kind,
)
from topoplan.plans.certificates.kind_lengths import CLASS_LENGTHS, DUAL_ASCENT
from topoplan.plans.verify_by_kind import verify_by_kind
from topoplan.solve.packing.kind_composition import KindPacking

COLLECTIVES = ("broadcast", "reduce", "broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter")


def fast_nics(servers: int) -> ClusterByKind:
    """Return servers whose four NICs carry 400 GB/s together, and every GPU's NVLinks half as much."""
    return cluster_by_kind([Server("v100x4", count=servers)], nic_gbps=800, nics=4)


def random_fast_nics(seed: int) -> ClusterByKind | None:
    """Return two to six servers of at most 40 GPUs, often with faster NICs than NVLinks; None if none fits."""
    rng = random.Random(f"fast NICs {seed}")
    servers = [
        Server(
            rng.choice(["v100x4", "v100x4", "nvlink-x4", "dgx-1v", "dgx-1p", "pcie-x8"]),
            list(range(rng.choice([2, 3, 4]))) if rng.random() < 0.5 else None,
            count=rng.randint(2, 4),
        )
        for _ in range(rng.choice([1, 1, 2]))
    ]
    network = rng.choice(["switch", "switch", "rail-optimised", "rail-optimised", "fat-tree", "dragonfly"])
    more: dict[str, Any] = {}
    if network == "fat-tree":
        more = {"leaf_size": rng.randint(1, 3), "oversubscription": rng.choice([None, 2, 3.5])}
    elif network == "dragonfly":
        more = {"group_size": rng.randint(1, 3), "global_gbps": rng.choice([400, 3200])}
    try:
        found = cluster_by_kind(
            servers,
            nic_gbps=rng.choice([400, 800, 1600, 3200]),
            nics=rng.choice([None, 1, 2, 4]),
            nic_access=rng.choice(["direct", "direct", "direct", "pcie"]),
            network=network,
            **more,
        )
    except TopoplanError:
        return None
    return found if found.servers > 1 and found.size <= 40 else None


def random_plan_of_fast_nics(seed: int) -> PlanByKind | None:
    """Return a plan of a collective on such a cluster; None if it cannot be planned by kind."""
    return drawn_plan(random_fast_nics(seed), seed, COLLECTIVES)


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_trees_enter_a_server_at_several_gpus_where_nics_are_faster_than_nvlink(collective: str) -> None:
    """With one edge into each server, or one into each GPU, half of this rate was the most."""
    made = plan_by_kind(fast_nics(4), collective)
    assert made.exact_rate() == made.exact_bound() == 200
    assert made.proof == DUAL_ASCENT
    agree(made)
    listed = plan(made.cluster.listed(), collective)
    assert (listed.rate, listed.bound) == (200, 200)


def test_trees_enter_the_server_of_the_root_again() -> None:
    cluster = cluster_by_kind([Server("nvlink-x4", [0, 1, 2], count=3)], nic_gbps=3200, nic_access="direct")
    made = plan_by_kind(cluster, "broadcast")
    assert made.exact_rate() == made.exact_bound() == Fraction(1000, 3)
    servers = made.sample.servers_of(made.fabric.ranks)
    root = servers[made.sample_root or 0]
    edges = [edge for template in made.templates for stage in template.stages for edge in stage.edges]
    assert any(servers[edge.parent] != root == servers[edge.child] for edge in edges)
    agree(made)


@pytest.mark.parametrize("network", ["switch", "rail-optimised"])
def test_bounds_by_dual_ascent_hold_where_sets_of_whole_servers_prove_nothing(network: str) -> None:
    """The NIC of a server is at one CPU, whose link with the CPU of half of its GPUs carries 10 GB/s."""
    cluster = cluster_by_kind(
        [Server("pcie-x8", count=4)], nic_gbps=1600, nics=1, nic_access="pcie", network=network
    )
    made = plan_by_kind(cluster, "broadcast")
    assert made.exact_rate() == made.exact_bound() == 10
    assert made.proof == DUAL_ASCENT
    with pytest.raises(PlanError, match="prove nothing: a forest may have length 0"):
        verify_by_kind(replace(made, proof=CLASS_LENGTHS))
    assert topoplan.verify(made.listed()).exact_bound == 10


@pytest.mark.parametrize("servers", [320, 2500])
def test_the_rate_of_many_servers_is_that_of_few(servers: int) -> None:
    made = plan_by_kind(fast_nics(servers), "broadcast")
    report = verify_by_kind(made)
    assert report.exact_rate == report.exact_bound == 200
    assert len(made.to_json()) < 50_000


def test_a_plan_without_a_gap_keeps_its_trees_and_its_kind_of_certificate() -> None:
    made = plan_by_kind(fast_nics(4), "all_reduce")
    packing = KindPacking(made.cluster, "allreduce", root=None, channels="auto", progress=None)
    assert made.to_json() == packing.best_plan(None).to_json()
    assert made.proof == CLASS_LENGTHS


def test_faults_of_the_certificate_are_named() -> None:
    made = plan_by_kind(fast_nics(4), "broadcast")
    value = made.to_object()
    certificate = value["certificate"]
    assert isinstance(certificate, dict)
    certificate["kind"] = "class-lengths-by-eye"
    with pytest.raises(PlanError, match="must be class-lengths or class-lengths-dual-ascent, got"):
        PlanByKind.from_object(value)
    exchange = plan_by_kind(fast_nics(4), "alltoall")
    with pytest.raises(PlanError, match="must be of trees outside a torus, got alltoall"):
        verify_by_kind(replace(exchange, proof=DUAL_ASCENT))
    copying = plan_by_kind(
        cluster_by_kind([Server("dgx-h100", count=2)], nic_gbps=400).with_in_network("all"), "all_gather"
    )
    with pytest.raises(PlanError, match="must have no switches that copy or add"):
        verify_by_kind(replace(copying, proof=DUAL_ASCENT))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(1, 17))
def test_rates_are_those_of_the_list_and_bounds_are_above_them(seed: int) -> None:
    bound_is_not_below_the_listed_rate(seed)


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(17, 160))
def test_rates_of_more_clusters_are_those_of_the_list(seed: int) -> None:
    bound_is_not_below_the_listed_rate(seed)


def bound_is_not_below_the_listed_rate(seed: int) -> None:
    made = random_plan_of_fast_nics(seed)
    if made is None:
        return
    agree(made)
    if made.proof == DUAL_ASCENT or made.gap:
        listed = plan(made.cluster.listed(), made.collective, root=made.root)
        rate = topoplan.verify(listed).exact_rate
        assert rate is not None
        assert rate <= made.exact_bound()
        if not made.gap:
            assert listed.rate <= made.rate * (1 + 1e-9)


def changed_proof(rng: random.Random, value: dict[str, Any]) -> dict[str, Any]:
    """Return the object of a plan file after `changed_file`, with many lengths or the other kind of certificate."""
    value = copy.deepcopy(value) if rng.random() < 0.7 else changed_file(rng, value)
    certificate = value["certificate"]
    for row in certificate["lengths"]:
        if rng.random() < 0.5:
            row[2] = str(Fraction(rng.randint(0, 12), rng.randint(1, 3)))
    if rng.random() < 0.3:
        certificate["kind"] = rng.choice([CLASS_LENGTHS, DUAL_ASCENT])
    return value


@pytest.mark.thorough
def test_bounds_of_wrong_certificates_are_not_below_the_list() -> None:
    # Broadcasts, reduces and allreduces of small clusters whose certificates are by dual ascent.
    drawn = [random_plan_of_fast_nics(seed) for seed in (12, 34, 36, 48, 49)]
    plans = [made for made in drawn if made is not None and made.proof == DUAL_ASCENT]
    assert {made.collective for made in plans} == {"broadcast", "reduce", "allreduce"}
    rng = random.Random(11)
    refused_of_changed(plans, changed_proof, rng, 80, lambda _, listed: listed.exact_bound)
