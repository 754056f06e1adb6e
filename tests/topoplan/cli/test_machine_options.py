"""Clusters and broken machines on the command line: what is built, what is said, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Done
from topoplan.machine.cluster import cluster, nvswitch_cluster
from topoplan.machine.cluster_network import Server

V100S = topoplan.load("dgx-1v")
TWO = ("--servers", "2", "--nic-bandwidth", "100Gb/s")


class TestClusters:
    """``--servers`` and what goes with it."""

    def test_show_json_is_the_cluster(self, done: Done) -> None:
        """Every option reaches the builder."""
        out = done(
            *(
                "show",
                "dgx-1v",
                "--json",
                "--servers",
                "3",
                "--nic-bandwidth",
                "40Gb/s",
                "--nics",
                "2",
                "--rails",
                "1",
            ),
            *("--network", "rail-optimised", "--oversubscription", "2", "--nic-access", "direct"),
        )
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
        tree = done("show", "dgx-1v", "--json", *TWO, "--network", "fat-tree", "--leaf-size", "1")
        assert "leaf1" in topoplan.load(tree).device("leaf1").name

    def test_blinks_three_and_five_gpus(self, done: Done) -> None:
        """--gpus numbers the GPUs of the whole cluster, and the one NIC of each server serves those that are used."""
        out = done("plan", "dgx-1v", *TWO, "--gpus", "0-2,11-15", "--nics", "1", "--json")
        plan = json.loads(out)
        assert plan["ranks"] == ["s0.gpu0", "s0.gpu1", "s0.gpu2", *(f"s1.gpu{i}" for i in range(3, 8))]
        assert (plan["rate"], plan["bound"]) == (12.0, 12.0)
        assert plan["channels"] == ["nvlink", "network"]

    def test_one_server_is_a_cluster_too(self, done: Done) -> None:
        """It plans as the machine does."""
        out = done(
            "plan", "dgx-1v", "--servers", "1", "--nic-bandwidth", "100Gb/s", "--gpus", "1,4,5,7", "--json"
        )
        assert (json.loads(out)["rate"], json.loads(out)["channels"]) == (50.0, ["nvlink"])

    def test_a_server_without_used_gpus_keeps_its_place(self, done: Done) -> None:
        """Of three servers the middle one is idle."""
        out = done(
            "plan", "dgx-1v", "--servers", "3", "--nic-bandwidth", "100Gb/s", "--gpus", "0,23", "--json"
        )
        assert json.loads(out)["ranks"] == ["s0.gpu0", "s2.gpu7"]

    def test_pcie_and_network_together(self, done: Done) -> None:
        """Of machines without NVLink, by themselves and when asked for."""
        options = ("plan", "pcie-x8", *TWO, "--gpus", "0,1,8", "--json")
        automatic, asked = (
            json.loads(done(*options, *more)) for more in ((), ("--channels", "pcie+network"))
        )
        assert automatic["channels"] == asked["channels"] == ["pcie", "network"]
        assert automatic["rate"] == asked["rate"] == 12.5

    def test_compare_and_simulate_take_the_same_options(self, done: Done) -> None:
        """Rates of the plan."""
        options = ("dgx-1v", *TWO, "--gpus", "0,1,8,9", "--json")
        compared = json.loads(done("compare", *options))
        simulated = json.loads(done("simulate", *options, "--sizes", "1MB"))
        assert compared["rows"][0]["trees"] == simulated["plan"]["rate"] == 12
        assert compared["machine"] == simulated["machine"] == "2 x dgx-1v"

    def test_a_cluster_file(self, done: Done, tmp_path: Path) -> None:
        """Is TOPO for every command, and its machines are found beside it."""
        (tmp_path / "box.json").write_text(V100S.to_json())
        file = tmp_path / "two.json"
        servers = [{"machine": "box.json", "gpus": "0-2"}, {"machine": "dgx-1v", "gpus": "3-7"}]
        network = {"nic_gbps": 40, "nics": 1}
        file.write_text(
            json.dumps(
                {"format": "topoplan.cluster/1", "name": "two", "servers": servers, "network": network}
            )
        )
        assert json.loads(done("plan", str(file), "--json"))["rate"] == 5
        assert done("simulate", str(file), "--sizes", "1MB").startswith("all_reduce on two, 8 GPUs")
        assert done("compare", str(file)).startswith("all_reduce on two, 8 GPUs (")
        assert done("show", str(file)).startswith("two: ")

    @pytest.mark.thorough
    def test_show_of_many_servers_shows_one(self, done: Done, tmp_path: Path) -> None:
        """128 GPUs: no line is longer than a screen but the source, and the figure is drawn."""
        figure = tmp_path / "cluster.png"
        options = ("--servers", "16", "--nic-bandwidth", "200Gb/s", "--plot", str(figure), "--all")
        out = done("show", "dgx-a100", *options, "--network", "fat-tree", "--leaf-size", "4")
        lines = [line for line in out.splitlines() if not line.startswith(("source", "note"))]
        assert max(len(line) for line in lines) <= 120
        assert "servers: s0 (shown for 16 equivalent servers, up to s15)" in lines
        assert "devices: 128 gpu, 16 nvswitch, 64 pcie, 32 cpu, 128 nic, 5 switch" in lines
        assert figure.stat().st_size > 10_000

    @pytest.mark.thorough
    def test_show_counts_a_nic_once(self, done: Done, tmp_path: Path) -> None:
        """16 GPUs of two DGX-1V: eight NICs, though each is two devices, and 24 network wires."""
        out = done("show", "dgx-1v", *TWO, "--plot", str(tmp_path / "pair.png"), "--all")
        assert out.startswith(
            "2 x dgx-1v: 16 V100 GPUs, 2 servers, 8 NICs; 24 network links of 12 GB/s, 48 NVLinks"
        )
        assert "devices: 16 gpu, 8 pcie, 4 cpu, 8 nic, 1 switch\n" in out


class TestBroken:
    """``--without-link`` and its kind."""

    def test_gpus_keep_their_numbers(self, done: Done) -> None:
        """Without GPU 5 the others are still 6 and 7, on --gpus, on --root and in tables."""
        plan = json.loads(done("plan", "dgx-1v", "--without-gpu", "5", "--json"))
        assert plan["ranks"] == [f"gpu{i}" for i in (0, 1, 2, 3, 4, 6, 7)]
        assert "taken out: gpu5" in plan["notes"]
        out = done(
            "plan", "dgx-1v", "--without-gpu", "5", "--gpus", "4,6,7", "--root", "6", "--collective", "reduce"
        )
        assert out.startswith("reduce to gpu6 on dgx-1v, 3 GPUs (gpu4,6,7)")
        rows = json.loads(
            done(
                "compare",
                "dgx-1v",
                "--without-gpu",
                "0,5",
                "--all-allocations",
                "--gpu-counts",
                "6",
                "--json",
            )
        )["rows"]
        assert [row["gpus"] for row in rows] == [[1, 2, 3, 4, 6, 7]]
        assert len(json.loads(done("show", "dgx-1v", "--without-gpu", "5", "--json"))["devices"]) == 17

    def test_options_repeat_and_join(self, done: Done) -> None:
        """On a cluster: a dead GPU, a dead NIC, a dead port, a slow one."""
        out = done(
            *("show", "dgx-1v", *TWO, "--json", "--without-gpu", "3", "--without-gpu", "8-9"),
            *("--without-device", "s0.nic3", "--without-link", "s0.nic2-switch0"),
            *("--slow-link", "s0.nic1-switch0=2.5", "--slow-link", "s1.gpu2->s1.gpu3=7"),
        )
        made = topoplan.load(out)
        speeds = {(link.src, link.dst): link.bandwidth for link in made.links}
        assert len(made.gpus) == 13
        assert {"s0.gpu3", "s1.gpu0", "s1.gpu1"}.isdisjoint(made.gpus)
        assert (speeds["s0.nic1.tx", "switch0"], speeds["switch0", "s0.nic1.rx"]) == (2.5, 2.5)
        assert (speeds["s1.gpu2", "s1.gpu3"], speeds["s1.gpu3", "s1.gpu2"]) == (7, 50)
        assert not {("s0.nic2.tx", "switch0"), ("s0.nic3.tx", "switch0")} & set(speeds)

    def test_simulate_and_compare_take_them(self, done: Done) -> None:
        """Both see the weaker machine."""
        options = ("dgx-1v", "--slow-link", "gpu0-gpu1=5", "--gpus", "0,1", "--json")
        assert json.loads(done("simulate", *options, "--sizes", "1MB"))["plan"]["rate"] == 5
        assert json.loads(done("compare", *options))["rows"][0]["trees"] == 5


def test_a_cluster_of_clusters_is_refused(refused: Done, tmp_path: Path) -> None:
    """TOPO has a network already."""
    file = tmp_path / "cluster.json"
    file.write_text(nvswitch_cluster(2, gpus=2).to_json())
    assert "has a network of its own" in refused("plan", str(file), *TWO)


def test_bad_topology_files_are_refused(refused: Done, tmp_path: Path) -> None:
    """A NIC of zero bandwidth, a switch without ports, servers that no link joins."""
    good = json.loads(nvswitch_cluster(2, gpus=2, rails=1).to_json())
    file = tmp_path / "bad.json"
    for links, says in (
        ([{**link, "bandwidth": 0} for link in good["links"]], "bandwidth 0 must be a number of GB/s"),
        (
            [link for link in good["links"] if "rail0" not in (link["src"], link["dst"])],
            "rail0 is a switch without ports",
        ),
        (
            [link for link in good["links"] if link["src"] != "rail0"],
            "nothing leaves the cut {s0.gpu0, s0.gpu1",
        ),
    ):
        file.write_text(json.dumps({**good, "links": links}))
        assert says in refused("plan", str(file))


def test_a_cluster_file_may_have_helpers(done: Done, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    network = {"nic_gbps": 80, "nics": 1, "helpers": 2}
    servers = [{"machine": "nvlink-x4", "count": 4}]
    path.write_text(
        json.dumps({"format": "topoplan.cluster/1", "name": "x", "servers": servers, "network": network})
    )
    assert "algbw        8.33333 GB/s" in done("plan", str(path))
