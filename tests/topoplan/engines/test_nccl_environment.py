"""NCCL's environment for several servers: NICs by name, rails, cables without a switch, and what cannot start."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Run
from tests.support.refusals import refused
from topoplan.engines.nccl.environment_file import nccl_environment
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology

MATRIX = """\
\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tPXB\tSYS\t0-31\t0
GPU1\tNV12\t X \tSYS\tPXB\t32-63\t1
NIC0\tPXB\tSYS\t X \tSYS
NIC1\tSYS\tPXB\tSYS\tX
"""
LEGEND = "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_3\n"


def exports(text: str) -> dict[str, str]:
    lines = [line.strip().removeprefix("export ") for line in text.splitlines() if "export " in line]
    return dict(line.split("=", 1) for line in lines)


def two_nics(
    text: str = MATRIX + LEGEND, *, count: int = 3, nics: str | int | None = None, kind: str = "switch"
) -> Topology:
    server = topoplan.Server(topoplan.load(text), count=count, nics=nics)
    return topoplan.cluster([server], nic_gbps=200, network=kind)


def test_a_switch_needs_the_names_alone() -> None:
    assert exports(nccl_environment(two_nics()).text) == {"NCCL_IB_HCA": "'=mlx5_0,mlx5_3'"}
    assert exports(nccl_environment(two_nics(nics="^mlx5_0")).text) == {"NCCL_IB_HCA": "'=mlx5_3'"}


def test_a_ring_stays_on_its_rail_if_no_switch_joins_the_rails() -> None:
    assert exports(nccl_environment(two_nics(kind="rail-optimised")).text)["NCCL_CROSS_NIC"] == "0"


def test_nics_without_names_are_left_to_the_user() -> None:
    made = nccl_environment(two_nics(MATRIX))
    assert not exports(made.text)
    assert "name the adapters of nic0, nic1" in made.text
    assert made.notes == ("NCCL_IB_HCA is left out: NICs of s0, s1, s2 have no adapter names",)


def test_a_pair_of_sparks_is_named_port_by_port(tmp_path: Path) -> None:
    """The file is one for both; bash sets what belongs to the named server, and any other name is told."""
    file = tmp_path / "env.sh"
    file.write_text(nccl_environment(topoplan.load("dgx-spark-x2")).text, encoding="utf-8")
    for server, port in (("s0", 0), ("s1", 1)):
        script = f'source {file} {server}; echo "$NCCL_IB_HCA $NCCL_IB_MERGE_NICS $NCCL_SOCKET_IFNAME"'
        told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert told.stdout == f"=rocep1s0f{port},roceP2p1s0f{port} 1 enP7s7\n"
    told = subprocess.run(["bash", "-c", f"source {file}"], capture_output=True, text=True, check=True)
    assert told.stderr == "name a server: s0 s1\n"


def test_a_triangle_routes_by_subnets_and_starts() -> None:
    made = nccl_environment(topoplan.load("dgx-spark-x3"), "s1")
    found = exports(made.text)
    assert found["NCCL_IB_HCA"] == "'=rocep1s0f0,roceP2p1s0f0,rocep1s0f1,roceP2p1s0f1'"
    assert {key: found[key] for key in found if key != "NCCL_IB_HCA"} == {
        "NCCL_IB_MERGE_NICS": "0",
        "NCCL_IB_SUBNET_AWARE_ROUTING": "1",
        "NCCL_CROSS_NIC": "1",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_SOCKET_IFNAME": "enP7s7",
    }
    assert not made.notes
    assert (
        "s1:p0-s2:p1: a subnet each for rocep1s0f0 with rocep1s0f1, roceP2p1s0f0 with roceP2p1s0f1"
        in made.text
    )


@pytest.mark.parametrize(
    ("name", "pairs"), [("dgx-spark-x4", "s0-s2, s1-s3"), ("dgx-spark-x6", "s0-s4, s1-s3, s1-s5, s2-s4")]
)
def test_a_larger_ring_cannot_start(name: str, pairs: str) -> None:
    (note,) = nccl_environment(topoplan.load(name)).notes
    assert f"its trees join {pairs}, which no cable joins" in note


def test_a_star_of_sparks_needs_no_subnets() -> None:
    made = nccl_environment(topoplan.load("dgx-spark-x4-switch"))
    assert not made.notes
    assert set(exports(made.text)) == {"NCCL_IB_HCA"}


def test_equal_ports_at_both_ends_are_told() -> None:
    spark = topoplan.load("dgx-spark")
    cables = [topoplan.Cable("s0:p0", "s1:p0", 200), topoplan.Cable("s1:p1", "s2:p0", 200)]
    made = topoplan.cluster([topoplan.Server(spark, count=3)], network="cables", cables=cables)
    notes = nccl_environment(made).notes
    assert [("ring join s0-s2" in note, "got s0:p0-s1:p0" in note) for note in notes] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize(
    ("name", "server", "words"),
    [
        ("dgx-a100", None, "has one server"),
        ("dgx-spark-x3", "s7", "has no server s7; choose one of s0, s1, s2"),
        ("mac-tb5-x4", None, "NCCL runs on GPUs of NVIDIA and AMD, got Apple M3 Ultra"),
    ],
)
def test_machines_without_such_an_environment(name: str, server: str | None, words: str) -> None:
    with refused(UsageError, words):
        nccl_environment(topoplan.load(name), server)


def test_the_command_takes_a_plan(tmp_path: Path, run: Run) -> None:
    (tmp_path / "topo.txt").write_text(MATRIX + LEGEND, encoding="utf-8")
    plan, file = str(tmp_path / "plan.json"), tmp_path / "env.sh"
    assert (
        run("plan", str(tmp_path / "topo.txt"), "--servers", "2", "--nic-bandwidth", "200Gb/s", "-o", plan)[0]
        == 0
    )
    status, out, _ = run("export", plan, "--to", "nccl-env", "-o", str(file))
    assert (status, f"source {file}" in out) == (0, True)
    assert exports(file.read_text(encoding="utf-8")) == {"NCCL_IB_HCA": "'=mlx5_0,mlx5_3'"}
