"""Clusters and broken machines on the command line: what is built, what is said, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Done
from tests.topoplan.cli.conftest import Told
from topoplan.machine.cluster import cluster, nvswitch_cluster
from topoplan.machine.cluster_network import Server

V100S = topoplan.load("dgx-1v")
TWO = "--servers 2 --nic-bandwidth 100Gb/s"


def test_every_option_reaches_the_builder(done: Done) -> None:
    network = "--nics 2 --rails 1 --network rail-optimised --oversubscription 2 --nic-access direct"
    out = done(f"show dgx-1v --json --servers 3 --nic-bandwidth 40Gb/s {network}")
    assert topoplan.load(out) == cluster(
        [Server(V100S, count=3)],
        nic_gbps=40,
        nics=2,
        network="rail-optimised",
        rails=1,
        oversubscription=2,
        nic_access="direct",
        name="3 x dgx-1v",
    )
    tree = done(f"show dgx-1v --json {TWO} --network fat-tree --leaf-size 1")
    assert topoplan.load(tree).device("leaf1").kind == "switch"


def test_gpus_are_numbered_through_all_servers(told: Told) -> None:
    """The NIC of each server serves those that are used; an idle server keeps its place; one is a cluster too."""
    plan = told(f"plan dgx-1v {TWO} --gpus 0-2,11-15 --nics 1")
    assert plan["ranks"] == ["s0.gpu0", "s0.gpu1", "s0.gpu2", *(f"s1.gpu{i}" for i in range(3, 8))]
    assert (plan["rate"], plan["bound"], plan["channels"]) == (12.0, 12.0, ["nvlink", "network"])
    three = told("plan dgx-1v --servers 3 --nic-bandwidth 100Gb/s --gpus 0,23")
    assert three["ranks"] == ["s0.gpu0", "s2.gpu7"]
    one = told("plan dgx-1v --servers 1 --nic-bandwidth 100Gb/s --gpus 1,4,5,7")
    assert (one["rate"], one["channels"]) == (50.0, ["nvlink"])


def test_pcie_and_network_together(told: Told) -> None:
    """Of machines without NVLink, by themselves and when asked for."""
    for channels in ("", "--channels pcie+network"):
        plan = told(f"plan pcie-x8 {TWO} --gpus 0,1,8 {channels}")
        assert (plan["channels"], plan["rate"]) == (["pcie", "network"], 12.5)


@pytest.mark.parametrize(
    ("machine", "rate"),
    [(f"dgx-1v {TWO} --gpus 0,1,8,9", 12), ("dgx-1v --slow-link gpu0-gpu1=5 --gpus 0,1", 5)],
)
def test_compare_and_simulate_take_the_same_options(told: Told, machine: str, rate: float) -> None:
    compared, simulated = told(f"compare {machine}"), told(f"simulate {machine} --sizes 1MB")
    assert compared["rows"][0]["trees"] == simulated["plan"]["rate"] == rate
    assert compared["machine"] == simulated["machine"]


def cluster_file(path: Path, servers: list[dict[str, object]], **network: object) -> str:
    value = {"format": "topoplan.cluster/1", "name": "two", "servers": servers}
    path.write_text(json.dumps({**value, "network": {"nics": 1, **network}}))
    return str(path)


def test_a_cluster_file(done: Done, told: Told, tmp_path: Path) -> None:
    """It is TOPO for every command, its machines are found beside it, and it may have helpers."""
    (tmp_path / "box.json").write_text(V100S.to_json())
    servers: list[dict[str, object]] = [
        {"machine": "box.json", "gpus": "0-2"},
        {"machine": "dgx-1v", "gpus": "3-7"},
    ]
    file = cluster_file(tmp_path / "two.json", servers, nic_gbps=40)
    assert told(f"plan {file}")["rate"] == 5
    assert done(f"simulate {file} --sizes 1MB").startswith("all_reduce on two, 8 GPUs")
    assert done(f"compare {file}").startswith("all_reduce on two, 8 GPUs (")
    assert done(f"show {file}").startswith("two: ")
    four: list[dict[str, object]] = [{"machine": "nvlink-x4", "count": 4}]
    file = cluster_file(tmp_path / "helped.json", four, nic_gbps=80, helpers=2)
    assert "algbw        8.33333 GB/s" in done(f"plan {file}")


@pytest.mark.thorough
def test_show_of_many_servers_shows_one(done: Done, tmp_path: Path) -> None:
    """128 GPUs: no line is longer than a screen but the source, and the figure is drawn; each NIC counts once."""
    figure = tmp_path / "cluster.png"
    network = "--network fat-tree --leaf-size 4"
    out = done(f"show dgx-a100 --servers 16 --nic-bandwidth 200Gb/s {network} --all --plot {figure}")
    lines = [line for line in out.splitlines() if not line.startswith(("source", "note"))]
    assert max(len(line) for line in lines) <= 120
    assert "servers: s0 (shown for 16 equivalent servers, up to s15)" in lines
    assert "devices: 128 gpu, 16 nvswitch, 64 pcie, 32 cpu, 128 nic, 5 switch" in lines
    assert figure.stat().st_size > 10_000
    out = done(f"show dgx-1v {TWO} --plot {tmp_path}/pair.png --all")
    head = "2 x dgx-1v: 16 V100 GPUs, 2 servers, 8 NICs; 24 network links of 12 GB/s, 48 NVLinks"
    assert out.startswith(head)
    assert "devices: 16 gpu, 8 pcie, 4 cpu, 8 nic, 1 switch\n" in out


def test_gpus_of_a_broken_machine_keep_their_numbers(done: Done, told: Told) -> None:
    """Without GPU 5 the others are still 6 and 7, on --gpus, on --root and in tables."""
    plan = told("plan dgx-1v --without-gpu 5")
    assert plan["ranks"] == [f"gpu{i}" for i in (0, 1, 2, 3, 4, 6, 7)]
    assert "taken out: gpu5" in plan["notes"]
    out = done("plan dgx-1v --without-gpu 5 --gpus 4,6,7 --root 6 --collective reduce")
    assert out.startswith("reduce to gpu6 on dgx-1v, 3 GPUs (gpu4,6,7)")
    (row,) = told("compare dgx-1v --without-gpu 0,5 --all-allocations --gpu-counts 6")["rows"]
    assert row["gpus"] == [1, 2, 3, 4, 6, 7]
    assert len(told("show dgx-1v --without-gpu 5")["devices"]) == 17


def test_options_of_faults_repeat_and_join(done: Done) -> None:
    """On a cluster: a dead GPU, a dead NIC, a dead port, a slow one."""
    dead = "--without-gpu 3 --without-gpu 8-9 --without-device s0.nic3 --without-link s0.nic2-switch0"
    slow = "--slow-link s0.nic1-switch0=2.5 --slow-link 's1.gpu2->s1.gpu3=7'"
    made = topoplan.load(done(f"show dgx-1v {TWO} --json {dead} {slow}"))
    speeds = {(link.src, link.dst): link.bandwidth for link in made.links}
    assert len(made.gpus) == 13
    assert {"s0.gpu3", "s1.gpu0", "s1.gpu1"}.isdisjoint(made.gpus)
    assert (speeds["s0.nic1.tx", "switch0"], speeds["switch0", "s0.nic1.rx"]) == (2.5, 2.5)
    assert (speeds["s1.gpu2", "s1.gpu3"], speeds["s1.gpu3", "s1.gpu2"]) == (7, 50)
    assert not {("s0.nic2.tx", "switch0"), ("s0.nic3.tx", "switch0")} & set(speeds)


def test_bad_topology_files_are_refused(refused: Done) -> None:
    """A cluster of clusters, a NIC of zero bandwidth, a switch without ports, servers that no link joins."""
    whole = nvswitch_cluster(2, gpus=2, rails=1).to_json()
    assert "has a network of its own" in refused(f"plan - {TWO}", stdin=whole)
    links = json.loads(whole)["links"]
    for kept, says in (
        ([{**link, "bandwidth": 0} for link in links], "bandwidth 0 must be a number of GB/s"),
        (
            [one for one in links if "rail0" not in (one["src"], one["dst"])],
            "rail0 is a switch without ports",
        ),
        ([one for one in links if one["src"] != "rail0"], "nothing leaves the cut {s0.gpu0, s0.gpu1"),
    ):
        assert says in refused("plan -", stdin=json.dumps({**json.loads(whole), "links": kept}))


FORTY = "dgx-h100 --servers 40 --nic-bandwidth 400Gb/s"


def test_faults_of_a_large_cluster_keep_it_planned_by_kind(told: Told) -> None:
    """The numbers on the command line are those of the whole cluster; ranks are the GPUs that remain."""
    faults = "--slow-link s5.gpu0-s5.nvswitch0=200GB/s --without-device s7.nic3 --without-gpu 1,16-23"
    plan = told(f"plan {FORTY} {faults} --collective broadcast --root 24")
    assert (plan["gpus"], plan["root"], plan["method"]) == (311, 15, "by-kind")
    assert plan["templates"][0]["root"] == "s3"
    assert [note for note in plan["notes"] if "taken out" in note or "slowed" in note] == [
        "slowed: s5.gpu0-s5.nvswitch0 to 200 GB/s",
        "taken out: s7.nic3",
        "taken out: s0.gpu1, " + ", ".join(f"s2.gpu{gpu}" for gpu in range(8)),
    ]


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ("--without-gpu 3 --slow-link s0.gpu3-s0.nvswitch0=1GB/s", "that --without-gpu 3 takes out"),
        ("--without-gpu 3 --collective reduce --root 3", "root 3 is named by --without-gpu"),
        ("--without-device s41.nic0", "has servers s0 to s39"),
        ("--without-gpu 8-15 --list s1", "s1 has no GPU"),
    ],
)
def test_refused_faults_of_a_large_cluster(refused: Done, faults: str, words: str) -> None:
    assert words in refused(f"plan {FORTY} {faults}")


@pytest.mark.thorough
def test_single_failures_of_a_large_cluster(told: Told, done: Done, refused: Done) -> None:
    book = told(f"plan {FORTY} --survive 1")
    assert (book["number"], book["classes"], book["without_plan"]) == (1641, 7, 1)
    assert book["number"] == sum(row["failures"] for row in book["failures"])
    assert "must have a link into the network" in book["failures"][0]["none"]
    assert "s0.nic0" in done(f"plan {FORTY} --survive 1 --csv")
    assert "without link s0.gpu0-s0.nvswitch0" in done(f"plan {FORTY} --survive 1").splitlines()[0]
    assert "-o must be without --survive" in refused(f"plan {FORTY} --survive 1 -o plans.json")
