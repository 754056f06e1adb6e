"""``topoplan order``: its table, its files, its JSON, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkout import Done
from topoplan.errors import UsageError
from topoplan.operate.launch_files import RankPlacement, hostfile, usage

CONF = "SwitchName=leaf1 Nodes=n[1,3]\nSwitchName=leaf2 Nodes=n[2,4]\nSwitchName=top Switches=leaf[1-2]\n"
WIRES = ("--server", "v100x4", "--nic-bandwidth", "100Gb/s", "--oversubscription", "4")


@pytest.fixture
def conf(tmp_path: Path) -> str:
    path = tmp_path / "topology.conf"
    path.write_text(CONF)
    return str(path)


def test_the_table_says_before_after_and_what_is_proved(done: Done, conf: str) -> None:
    said = done("order", conf, *WIRES).splitlines()
    assert said[0].startswith(
        "all_reduce on topology, 16 ranks on 4 hosts, over NVLink and the network: this order makes the ring 2.00x"
    )
    assert "ring         provably optimal: no ring of any order exceeds busbw 6.25 GB/s" in said
    assert "hosts        n[1,3,2,4]" in said
    ring = next(line for line in said if line.startswith("ring ")).split()
    assert ring[1:] == ["1.66667", "3.125", "3.33333", "6.25", "2.00x"]
    assert max(len(line) for line in said) <= 120


def test_files_of_launchers(done: Done, conf: str, tmp_path: Path) -> None:
    said = done("order", conf, *WIRES, "--format", "rankfile")
    assert said.splitlines()[:5] == [f"rank {r}=n1 slot={r}" for r in range(4)] + ["rank 4=n3 slot=0"]
    assert done("order", conf, *WIRES, "--format", "hostfile") == "".join(
        f"n{h} slots=4\n" for h in (1, 3, 2, 4)
    )
    place = tmp_path / "hosts"
    said = done("order", conf, *WIRES, "--format", "slurm", "-o", str(place))
    assert place.read_text() == "".join(f"n{host}\n" * 4 for host in (1, 3, 2, 4))
    assert f"SLURM_HOSTFILE={place} srun --nodelist=n[1,3,2,4] --distribution=arbitrary" in said


def test_the_hosts_of_a_job_are_a_list_or_a_file(done: Done, conf: str, tmp_path: Path) -> None:
    told = json.loads(done("order", conf, *WIRES, "--hosts", "n[4,1-3]", "--json"))
    assert told["given"]["nodes"] == ["n4", "n1", "n2", "n3"]
    assert sorted(told["nodes"][:2]) in (["n1", "n3"], ["n2", "n4"])
    place = tmp_path / "job"
    place.write_text("# the job\nn4 slots=4\nn4\nn2\n")
    told = json.loads(done("order", conf, *WIRES, "--hosts", str(place), "--format", "json"))
    assert told["nodes"] == ["n4", "n2"]
    said = done(
        "order",
        "v100x4",
        "--servers",
        "2",
        "--nic-bandwidth",
        "100Gb/s",
        "--hosts",
        "a,b",
        "--format",
        "hostfile",
    )
    assert said == "a slots=4\nb slots=4\n"


def test_json_has_orders_rates_bound_and_proof(done: Done, conf: str) -> None:
    told = json.loads(done("order", conf, *WIRES, "--json"))
    assert told["order"] == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    assert told["gpus"][4] == "n3.gpu0"
    assert told["nodes"] == ["n1", "n3", "n2", "n4"]
    assert (told["before"]["ring"]["busbw"], told["after"]["ring"]["busbw"]) == (3.125, 6.25)
    assert told["after"]["ring"]["busbw"] == pytest.approx(told["after"]["ring"]["algbw"] * 2 * 15 / 16)
    assert (told["before"]["between_switches"], told["after"]["between_switches"]) == (8, 4)
    assert (told["optimal"], told["proof"], told["bound"]["busbw"]) == (True, "bound", 6.25)
    assert told["after"]["tree"]["algbw"] >= told["before"]["tree"]["algbw"]


def test_a_mesh_says_where_each_axis_lies(done: Done) -> None:
    asked = (
        "dgx-h100",
        "--servers",
        "2",
        "--nic-bandwidth",
        "400Gb/s",
        "--gpus",
        "0-2,8-10",
        "--mesh",
        "tp=3,dp=2",
    )
    said = done("order", *asked, "--axes", "tp=10,dp=1")
    assert "levels       3 in a server x 2 across; the table has the extent of every axis on each" in said
    assert "dp           2 across: rings alone 48 GB/s;" in said
    assert "tp           3 in a server: rings alone 337.5 GB/s, busbw 450 GB/s" in said
    told = json.loads(done("order", *asked, "--axes", "tp=10,dp=1", "--json"))
    assert told["after"]["lies"] == {"tp": [3, 1], "dp": [1, 2]}
    assert told["order"][:4] == [0, 8, 1, 9]
    assert told["after"]["together"]["tp"]["algbw"] == 10 * told["after"]["together"]["dp"]["algbw"]
    assert told["after"]["trees_optimal"] is True


def test_the_preset_of_megatron_puts_tp_inside_servers_and_the_others_across(
    done: Done,
) -> None:
    """However the mesh is written; one axis alone needs no weight."""
    asked = (
        "dgx-h100",
        "--servers",
        "4",
        "--nic-bandwidth",
        "400Gb/s",
        "--preset",
        "megatron",
        "--json",
        "--mesh",
    )
    for mesh in ("dp=4,tp=8", "tp=8,dp=4"):
        told = json.loads(done("order", *asked, mesh))
        assert told["weights"] == {name: {"dp": "1", "tp": "40"}[name] for name in told["mesh"]}
        assert told["after"]["lies"] == {"dp": [1, 4], "tp": [8, 1]}
    told = json.loads(done("order", *asked, "pp=2,dp=2,tp=8"))
    assert told["after"]["lies"]["tp"] == [8, 1]
    assert json.loads(done("order", "dgx-1v", "--mesh", "dp=8", "--json"))["weights"] == {"dp": "1"}


def test_a_rack_in_blocks_keeps_the_hosts_of_a_domain_together(done: Done, tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(
        "- topology: racks\n  block:\n    block_sizes: [2]\n    blocks:\n"
        "    - block: r1\n      nodes: t[1,3]\n    - block: r2\n      nodes: t[2,4]\n"
    )
    asked = (str(path), "--server", "gb200-nvl72", "--nic-access", "direct")
    told = json.loads(done("order", *asked, "--hosts", "t[1-4]", "--json"))
    assert told["given"]["nodes"] == ["t1", "t2", "t3", "t4"]
    assert told["nodes"] == ["t1", "t3", "t2", "t4"]
    # 2 trays of 4 NICs of 50 GB/s a domain, which four hops share as given, and one in this order.
    assert (told["before"]["ring"]["busbw"], told["after"]["ring"]["busbw"]) == (200, 400)
    assert [rank["slot"] for rank in told["ranks"][:5]] == [0, 1, 2, 3, 0]


def test_a_hostfile_cannot_say_that_ranks_of_a_host_are_apart() -> None:
    apart = [RankPlacement("a", 0), RankPlacement("b", 0), RankPlacement("a", 1)]
    with pytest.raises(UsageError, match="ranks of a host must be contiguous"):
        hostfile(apart)
    assert usage("slurm", apart, "f") == ("SLURM_HOSTFILE=f srun --nodelist=a,b --distribution=arbitrary",)
