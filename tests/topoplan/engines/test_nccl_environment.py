"""NCCL's environment between servers: what a shell gets from the file, and warnings that follow from the cables."""

from __future__ import annotations

import os
import subprocess
from itertools import combinations

import pytest

import topoplan
from topoplan import Cable, Server, Topology, UsageError
from topoplan.engines.registry import export_machine, export_plan
from topoplan.machine.topology import Device, facts
from topoplan.reading.load import load_text

BOX = Topology("box", (Device("gpu0", "gpu", "s0"),), ())
ALL_FUNCTIONS = "=rocep1s0f0,roceP2p1s0f0,rocep1s0f1,roceP2p1s0f1"


def sourced(text: str, server: str = "s0") -> dict[str, str]:
    """Return the variables that a shell has exported after it has read the file."""
    shell = subprocess.run(
        ["/bin/sh", "-eu", "-c", f"{text}\nenv"],
        env={"PATH": os.environ["PATH"], "TOPOPLAN_SERVER": server},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not shell.stderr
    lines = (line.partition("=") for line in shell.stdout.splitlines())
    return {name: value for name, _, value in lines if name.startswith("NCCL_")}


def cabled(size: int, *cables: str) -> Topology:
    """Boxes with cables such as ``0:p0-1:p1``."""
    wires = [Cable(*(f"s{end}" for end in one.split("-")), 200) for one in cables]
    return topoplan.cluster([Server(BOX, count=size)], network="cables", cables=wires)


ROUTED = {
    "NCCL_IB_HCA": ALL_FUNCTIONS,
    "NCCL_IB_MERGE_NICS": "0",
    "NCCL_IB_SUBNET_AWARE_ROUTING": "1",
    "NCCL_CROSS_NIC": "1",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_SOCKET_IFNAME": "=enP7s7",
}
SPARKS = {
    "dgx-spark-x2": {
        "NCCL_IB_HCA": "=rocep1s0f0,roceP2p1s0f0",
        "NCCL_IB_MERGE_NICS": "1",
        "NCCL_SOCKET_IFNAME": "=enP7s7",
    },
    "dgx-spark-x3": ROUTED,
    "dgx-spark-x4": ROUTED,
    "dgx-spark-x4-switch": {
        "NCCL_IB_HCA": ALL_FUNCTIONS,
        "NCCL_IB_MERGE_NICS": "1",
        "NCCL_IB_SUBNET_AWARE_ROUTING": "0",
        "NCCL_CROSS_NIC": "2",
        "NCCL_SOCKET_IFNAME": "=enP7s7",
    },
}


@pytest.mark.parametrize("name", SPARKS)
def test_a_shell_gets_the_settings_of_cabled_and_switched_sparks(name: str) -> None:
    """Pair, triangle, ring and star: as people run them, and every setting has its reason above it."""
    text = export_machine(name, "nccl-env").text
    assert sourced(text) == SPARKS[name]
    lines = [line.strip() for line in text.splitlines()]
    assert all(
        lines[place - 1].startswith("# ") for place, line in enumerate(lines) if line.startswith("export ")
    )


def test_each_server_gets_its_own_ports() -> None:
    """The second Spark of a pair has its cable in port 1; a plan and --server say the same."""
    machine = topoplan.load("dgx-spark-x2")
    text = export_plan(topoplan.plan(machine), "nccl-env").text
    assert text == export_machine(machine, "nccl-env").text
    assert sourced(text, "s1")["NCCL_IB_HCA"] == "=rocep1s0f1,roceP2p1s0f1"
    alone = export_machine(machine, "nccl-env", server="s1").text
    assert "case" not in alone
    assert sourced(alone) == sourced(text, "s1")


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ("dgx-spark-x2", None),
        ("dgx-spark-x3", None),
        ("dgx-spark-x4", "ring of 4, because its double binary tree joins s0 and s2, s1 and s3, which"),
        ("dgx-spark-x4-switch", None),
        ("dgx-spark-x6", "ring of 6, because its double binary tree joins"),
        ("chain", "these 3 cabled servers, because its ring joins s0 and s2, which no cable joins"),
        ("mesh", None),
    ],
)
def test_warns_where_nccls_ring_or_trees_lack_a_cable(machine: str, says: str | None) -> None:
    """A warning, and the settings all the same; a full mesh has every cable."""
    made = {
        "chain": lambda: cabled(3, "0:p0-1:p1", "1:p0-2:p1"),
        "mesh": lambda: cabled(4, *(f"{i}:to{j}-{j}:from{i}" for i, j in combinations(range(4), 2))),
    }
    exported = export_machine(made[machine]() if machine in made else machine, "nccl-env")
    warned = [note for note in exported.notes if "stock NCCL cannot start" in note]
    assert bool(warned) == (says is not None)
    assert says is None or says in warned[0]
    assert all(f"# {note}" in exported.text for note in exported.notes)
    assert sourced(exported.text)


def test_a_lost_cable_makes_a_triangle_a_chain() -> None:
    """The port of the lost cable is left out, and NCCL's ring lacks an edge."""
    exported = export_machine(topoplan.load("dgx-spark-x3").remove_links(["s0-s1"]), "nccl-env")
    assert sourced(exported.text)["NCCL_IB_HCA"] == "=rocep1s0f1,roceP2p1s0f1"
    assert any("its ring joins s0 and s1" in note for note in exported.notes)


def test_names_cables_between_ports_of_one_number() -> None:
    """On servers with several neighbours; a pair may join any ports."""
    crossed = cabled(3, "0:p0-1:p0", "1:p1-2:p0", "2:p1-0:p1")
    warned = [note for note in export_machine(crossed, "nccl-env").notes if "should join port 0" in note]
    assert [note.split()[2] for note in warned] == ["s0:p0-s1:p0", "s0:p1-s2:p1"]
    assert not export_machine(cabled(2, "0:p0-1:p0"), "nccl-env").notes


def test_rails_keep_their_number_and_unnamed_nics_are_listed() -> None:
    """A DGX H100 has no adapter names; with names they are taken exactly."""
    server = Server("dgx-h100", count=2)
    rails = topoplan.cluster([server], nic_gbps=400, network="rail-optimised")
    text = export_machine(rails, "nccl-env").text
    assert sourced(text)["NCCL_CROSS_NIC"] == "0"
    assert "NCCL_IB_HCA is not set: it takes nic0-7" in text
    assert sourced(export_machine(topoplan.cluster([server], nic_gbps=400), "nccl-env").text) == {
        "NCCL_CROSS_NIC": "2",
        "NCCL_IB_SUBNET_AWARE_ROUTING": "0",
    }


def test_far_nics_are_left_out() -> None:
    """The file names the NICs that the plan uses, and no others."""
    nics = tuple(Device(f"nic{i}", "nic", "s0", facts=facts(adapter=f"mlx5_{i}")) for i in range(2))
    box = Topology("box", (*BOX.devices, *nics), ())
    made = topoplan.cluster([Server(box, count=2)], nic_gbps=200, nics="^mlx5_0")
    assert sourced(export_machine(made, "nccl-env").text)["NCCL_IB_HCA"] == "=mlx5_1"


def test_two_servers_of_eight_numa_nodes_use_their_four_near_nics() -> None:
    """Form of NVIDIA/nccl issue 1435: 96 GB/s, 180 of bus bandwidth, by default and with the near NICs by name."""
    numa, near = (3, 3, 1, 1, 7, 7, 5, 5), (1, 1, 0, 0, 5, 5, 2, 2)
    heads = [*(f"GPU{i}" for i in range(8)), *(f"NIC{i}" for i in range(6)), "CPU Affinity", "NUMA Affinity"]
    rows = ["\t".join(["", *heads])]
    for i in range(8):
        cells = ["X" if i == j else "NV12" for j in range(8)]
        cells += ["PXB" if near[i] == nic else "SYS" for nic in range(6)]
        rows.append("\t".join([f"GPU{i}", *cells, f"{8 * numa[i]}-{8 * numa[i] + 7}", str(numa[i])]))
    legend = "NIC Legend:\n\n" + "\n".join(f"  NIC{i}: mlx5_{i}" for i in range(6))
    box = load_text("\n".join(rows) + f"\n\n{legend}\n")
    for nics in (None, "mlx5_0,mlx5_1,mlx5_2,mlx5_5", "^mlx5_3,mlx5_4"):
        made = topoplan.cluster([Server(box, count=2)], nic_gbps=200, nics=nics)
        plan = topoplan.plan(made)
        assert (plan.rate, plan.busbw) == (96.0, 180.0)
        assert sourced(export_plan(plan, "nccl-env").text)["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1,mlx5_2,mlx5_5"
        assert any(note.startswith("NICs used: ") and "left out" in note for note in made.notes)


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ("dgx-h100", "needs a machine of several servers, got dgx-h100 with one; add --servers N"),
        ("mac-tb5-x4", "needs GPUs that NCCL or RCCL drives, got s0.gpu0, Apple M3 Ultra"),
    ],
)
def test_refuses_machines_without_nccl_between_servers(machine: str, says: str) -> None:
    """One server, and GPUs of another maker; a server that is not there."""
    with pytest.raises(UsageError, match=says):
        export_machine(machine, "nccl-env")
    with pytest.raises(UsageError, match="has no server 's9' with GPUs; it has s0, s1"):
        export_machine("dgx-spark-x2", "nccl-env", server="s9")
