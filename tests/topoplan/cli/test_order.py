"""``topoplan order``: its table, its files, its JSON, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkout import Done
from tests.topoplan.cli.conftest import Told
from topoplan.errors import UsageError
from topoplan.operate.launch_files import RankPlacement, hostfile, usage

CONF = "SwitchName=leaf1 Nodes=n[1,3]\nSwitchName=leaf2 Nodes=n[2,4]\nSwitchName=top Switches=leaf[1-2]\n"


@pytest.fixture
def wires(tmp_path: Path) -> str:
    """Four hosts on two leaves, described by Slurm."""
    path = tmp_path / "topology.conf"
    path.write_text(CONF)
    return f"{path} --server v100x4 --nic-bandwidth 100Gb/s --oversubscription 4"


def test_the_table_says_before_after_and_what_is_proved(done: Done, wires: str) -> None:
    said = done(f"order {wires}").splitlines()
    assert said[0].startswith(
        "all_reduce on topology, 16 ranks on 4 hosts, over NVLink and the network: this order makes the ring 2.00x"
    )
    assert "ring         provably optimal: no ring of any order exceeds busbw 6.25 GB/s" in said
    assert "hosts        n[1,3,2,4]" in said
    ring = next(line for line in said if line.startswith("ring ")).split()
    assert ring[1:] == ["1.66667", "3.125", "3.33333", "6.25", "2.00x"]
    assert max(len(line) for line in said) <= 120


def test_files_of_launchers(done: Done, wires: str, tmp_path: Path) -> None:
    said = done(f"order {wires} --format rankfile")
    assert said.splitlines()[:5] == [f"rank {r}=n1 slot={r}" for r in range(4)] + ["rank 4=n3 slot=0"]
    hosts = (1, 3, 2, 4)
    assert done(f"order {wires} --format hostfile") == "".join(f"n{host} slots=4\n" for host in hosts)
    place = tmp_path / "hosts"
    said = done(f"order {wires} --format slurm -o {place}")
    assert place.read_text() == "".join(f"n{host}\n" * 4 for host in hosts)
    assert f"SLURM_HOSTFILE={place} srun --nodelist=n[1,3,2,4] --distribution=arbitrary" in said
    apart = [RankPlacement("a", 0), RankPlacement("b", 0), RankPlacement("a", 1)]
    with pytest.raises(UsageError, match="ranks of a host must be contiguous"):
        hostfile(apart)
    assert usage("slurm", apart, "f") == ("SLURM_HOSTFILE=f srun --nodelist=a,b --distribution=arbitrary",)


def test_the_hosts_of_a_job_are_a_list_or_a_file(done: Done, told: Told, wires: str, tmp_path: Path) -> None:
    found = told(f"order {wires} --hosts n[4,1-3]")
    assert found["given"]["nodes"] == ["n4", "n1", "n2", "n3"]
    assert sorted(found["nodes"][:2]) in (["n1", "n3"], ["n2", "n4"])
    place = tmp_path / "job"
    place.write_text("# the job\nn4 slots=4\nn4\nn2\n")
    assert told(f"order {wires} --hosts {place} --format json")["nodes"] == ["n4", "n2"]
    pair = "v100x4 --servers 2 --nic-bandwidth 100Gb/s --hosts a,b"
    assert done(f"order {pair} --format hostfile") == "a slots=4\nb slots=4\n"


def test_json_has_orders_rates_bound_and_proof(told: Told, wires: str) -> None:
    found = told(f"order {wires}")
    assert found["order"] == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    assert (found["gpus"][4], found["nodes"]) == ("n3.gpu0", ["n1", "n3", "n2", "n4"])
    before, after = found["before"], found["after"]
    assert (before["ring"]["busbw"], after["ring"]["busbw"]) == (3.125, 6.25)
    assert after["ring"]["busbw"] == pytest.approx(after["ring"]["algbw"] * 2 * 15 / 16)
    assert (before["between_switches"], after["between_switches"]) == (8, 4)
    assert (found["optimal"], found["proof"], found["bound"]["busbw"]) == (True, "bound", 6.25)
    assert after["tree"]["algbw"] >= before["tree"]["algbw"]


def test_a_mesh_says_where_each_axis_lies(done: Done, told: Told) -> None:
    machine = "dgx-h100 --servers 2 --nic-bandwidth 400Gb/s --gpus 0-2,8-10"
    asked = f"order {machine} --mesh tp=3,dp=2 --axes tp=10,dp=1"
    said = done(asked)
    assert "levels       3 in a server x 2 across; the table has the extent of every axis on each" in said
    assert "dp           2 across: rings alone 48 GB/s;" in said
    assert "tp           3 in a server: rings alone 337.5 GB/s, busbw 450 GB/s" in said
    found = told(asked)
    after = found["after"]
    assert (after["lies"], found["order"][:4]) == ({"tp": [3, 1], "dp": [1, 2]}, [0, 8, 1, 9])
    assert after["together"]["tp"]["algbw"] == 10 * after["together"]["dp"]["algbw"]
    assert after["trees_optimal"] is True


def test_the_preset_of_megatron_puts_tp_inside_servers_and_the_others_across(told: Told) -> None:
    """However the mesh is written; one axis alone needs no weight."""
    asked = "order dgx-h100 --servers 4 --nic-bandwidth 400Gb/s --preset megatron --mesh"
    for mesh in ("dp=4,tp=8", "tp=8,dp=4"):
        found = told(f"{asked} {mesh}")
        assert found["weights"] == {name: {"dp": "1", "tp": "40"}[name] for name in found["mesh"]}
        assert found["after"]["lies"] == {"dp": [1, 4], "tp": [8, 1]}
    assert told(f"{asked} pp=2,dp=2,tp=8")["after"]["lies"]["tp"] == [8, 1]
    assert told("order dgx-1v --mesh dp=8")["weights"] == {"dp": "1"}


def test_a_rack_in_blocks_keeps_the_hosts_of_a_domain_together(told: Told, tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(
        "- topology: racks\n  block:\n    block_sizes: [2]\n    blocks:\n"
        "    - block: r1\n      nodes: t[1,3]\n    - block: r2\n      nodes: t[2,4]\n"
    )
    found = told(f"order {path} --server gb200-nvl72 --nic-access direct --hosts t[1-4]")
    assert found["given"]["nodes"] == ["t1", "t2", "t3", "t4"]
    assert found["nodes"] == ["t1", "t3", "t2", "t4"]
    # 2 trays of 4 NICs of 50 GB/s a domain, which four hops share as given, and one in this order.
    assert (found["before"]["ring"]["busbw"], found["after"]["ring"]["busbw"]) == (200, 400)
    assert [rank["slot"] for rank in found["ranks"][:5]] == [0, 1, 2, 3, 0]
