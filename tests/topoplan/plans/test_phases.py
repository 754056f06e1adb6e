"""What each phase of a plan over servers could sustain alone, and the bottleneck; also on the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from topoplan.cli.main import main
from topoplan.machine.cluster import cluster, nvswitch_cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Device, Link, Topology
from topoplan.plans.shards import Edge, ImageShards, Shard, Stage
from topoplan.plans.structure import phases

V100S = topoplan.load("dgx-1v")


def pair(gbps: float) -> Topology:
    """Two DGX-1V with 3 and 5 GPUs and one NIC each that all GPUs reach."""
    servers = [Server(V100S, [4, 5, 7]), Server(V100S, [1, 2, 4, 5, 7])]
    return cluster(servers, nic_gbps=gbps, nics=1, nic_access="direct")


@pytest.mark.parametrize(
    ("gbps", "between", "bottleneck"),
    [
        (40, 5.0, "between servers"),
        (100, 12.5, "between servers"),
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


def test_phases_of_a_plan_by_hand() -> None:
    """Two servers of two GPUs; each shard crosses 20 GB/s wires once each way inside and 6 GB/s ports between."""
    plan = topoplan.three_phase(nvswitch_cluster(2, gpus=2, nvlink=20.0, nic=6.0))
    found = phases(plan)
    assert found is not None
    assert found.reduce.rate == found.broadcast.rate == 40.0
    assert found.inside.rate == 20.0
    assert (found.between.rate, plan.rate, found.bottleneck) == (12.0, 12.0, "between servers")


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
    two = cluster([Server(topoplan.load("pcie-x8"), [0, 1], count=2)], nic_gbps=400)
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
    """A broadcast reduces nothing; servers of one GPU do nothing inside."""
    assert phases(topoplan.plan(V100S)) is None
    found = phases(topoplan.three_phase(nvswitch_cluster(3, gpus=1, rails=1), "broadcast"))
    assert found is not None
    assert (found.reduce.rate, found.broadcast.rate, found.between.full != ()) == (math.inf, math.inf, True)
    alone = found.to_object()["alone"]
    assert isinstance(alone, dict)
    assert alone["reduce inside servers"] is None


# On the command line

TWO = ("plan", "dgx-1v", "--servers", "2", "--nic-gbps", "40", "--method", "three-phase")


def test_plan_prints_phases_and_bottleneck(capsys: pytest.CaptureFixture[str]) -> None:
    """Under the trees of any plan over several servers, and not under others."""
    assert main(TWO) == 0
    out = capsys.readouterr().out
    assert "(three-phase)" in out
    assert "phase                     GB/s alone  full links" in out
    assert "between servers                   20  s0.nic0.tx>switch0 " in out
    assert "bottleneck: between servers\n" in out
    assert main(["plan", "dgx-1v", "--gpus", "0,1"]) == 0
    assert "bottleneck:" not in capsys.readouterr().out


def test_plan_json_has_phases(capsys: pytest.CaptureFixture[str]) -> None:
    """GB/s of each phase alone, beside the guaranteed keys."""
    assert main([*TWO, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["method"] == "three-phase"
    assert made["phases"]["alone"]["between servers"] == made["rate"] == 20.0
    assert made["phases"]["bottleneck"] == "between servers"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dgx-1v"], "three phases need GPUs on two servers or more, and all 8 are on"),
        (["dgx-1v", "--order", "trees"], "--order belongs to --method exact"),
        (["dgx-1v", "--sizes", "1KB:1GB"], "--method does not go with --sizes"),
    ],
)
def test_what_does_not_go_with_three_phases_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr, exit 2."""
    assert main(["plan", *arguments, "--method", "three-phase"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
