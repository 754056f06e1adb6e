"""``topoplan check``: verdict, JSON, exit status; ``plan`` warns of the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import topoplan
from tests.support.checkout import Done, Run
from tests.support.damaged_machines import as_text, read_library
from tests.support.fake_machine.fixtures import Installer
from tests.support.matrices import uniform_matrix
from tests.topoplan.cli.conftest import Told
from topoplan.errors import UsageError
from topoplan.operate.diagnosis import diagnose


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """The matrix of a DGX-1V with one doubled link gone and one halved: four of eight GPUs are hurt."""
    machine = read_library("dgx-1v")
    machine["links"] = [link for link in machine["links"] if {link["src"], link["dst"]} != {"gpu0", "gpu3"}]
    for link in machine["links"]:
        if {link["src"], link["dst"]} == {"gpu1", "gpu5"}:
            link["count"], link["bandwidth"] = 1, 25.0
    path = tmp_path / "broken.txt"
    path.write_text(as_text(machine))
    return str(path)


def faults_of(found: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return [(fault["kind"], fault["devices"]) for fault in found["faults"]]


def test_faults_are_named_with_their_cost(broken: str, told: Told) -> None:
    """75 GB/s where a whole DGX-1V does 85.71; a dead doubled link alone leaves 78.57, a halved one 82.14."""
    found = told(f"check {broken}", status=1)
    assert (found["healthy"], found["resembles"]) == (False, "dgx-1v")
    assert faults_of(found) == [("link missing", ["gpu0", "gpu3"]), ("link missing", ["gpu1", "gpu5"])]
    assert found["faults"][1]["is"] == "1 NVLink of 25 GB/s"
    assert found["faults"][1]["should_be"] == "2 NVLinks of 25 GB/s"
    costs = [fault["cost"]["allreduce"] for fault in found["faults"]]
    assert [cost["now"] for cost in costs] == pytest.approx([75, 75])
    assert [cost["healthy"] for cost in costs] == pytest.approx([600 / 7] * 2)
    assert [cost["alone"] for cost in costs] == pytest.approx([550 / 7, 575 / 7])


def test_the_text_says_it_in_lines_that_fit(run: Run) -> None:
    """Four A100 with half the wires between two of them."""
    slow = topoplan.slow_links("nvlink-x4", {"gpu0-gpu1": 50}).to_json()
    status, out, _ = run("check - --collective allgather", stdin=slow)
    lines = out.splitlines()
    assert status == 1
    assert lines == [
        "nvlink-x4, 4 GPUs: 1 fault",
        "compared     with nvlink-x4",
        "all_reduce   183.333 GB/s, busbw 275 GB/s; without the faults 200 GB/s, busbw 300 GB/s",
        "all_gather   333.333 GB/s, busbw 250 GB/s; without the faults 400 GB/s, busbw 300 GB/s",
        "",
        "kind       devices    is                      should be             all_reduce with it  all_gather with it",
        "link slow  gpu0-gpu1  4 NVLinks of 12.5 GB/s  4 NVLinks of 25 GB/s             183.333             333.333",
        "",
        "next steps   1. gpu0-gpu1: nvidia-smi nvlink --errorcounters counts replays; topoplan pairs measures the link",
        "             2. until then topoplan plan plans around the faults",
        "exit status  1: a fault costs bandwidth or cannot be rated (0: none does, 2: bad input)",
        "notes: 1; --notes prints it",
    ]
    assert max(map(len, lines)) <= 120


def test_a_healthy_machine_and_an_allocation_of_it(done: Done) -> None:
    healthy = "dgx-1v, 8 GPUs: healthy\ncompared     with dgx-1v\n\nnext step    nothing to do\n"
    assert done("check dgx-1v") == healthy
    part = done("check -", stdin=topoplan.load("dgx-1v").subset([1, 4, 5, 7]).to_json())
    assert part.splitlines()[1] == "compared     with dgx-1v, of which 4 of 8 GPUs are here"
    with pytest.raises(UsageError, match="collective 'foo' is unknown"):
        topoplan.check("dgx-1v", "foo")


def test_a_fault_that_costs_nothing_is_named_and_not_wrong(done: Done, told: Told) -> None:
    """A GPU that states another NUMA node than the CPU above it is a remark: exit status 0."""
    machine = read_library("dgx-1v")
    nodes = {"cpu0": 0, "cpu1": 1, "gpu0": 1}
    for device in machine["devices"]:
        device.update({"numa": nodes[device["name"]]} if device["name"] in nodes else {})
    text = json.dumps(machine)
    head = "dgx-1v, 8 GPUs: 1 fault that costs no bandwidth"
    assert done("check -", stdin=text).splitlines()[0] == head
    found = told("check -", stdin=text)
    (fault,) = found["faults"]
    assert (found["healthy"], fault["wrong"], fault["rated"]) == (False, False, True)


def test_links_that_are_all_slow_by_options_are_compared_with_the_machine_before(told: Told) -> None:
    slow = [f"gpu{gpu}-nvswitch0" for gpu in range(8)]
    found = told(f"check dgx-a100 {' '.join(f'--slow-link {link}=3' for link in slow)}", status=1)
    assert faults_of(found) == [("link slow", link.split("-")) for link in slow]
    assert (found["healthy"], told("check dgx-a100")["faults"]) == (False, [])


def test_a_nic_that_a_server_of_a_cluster_lost_is_a_fault(told: Told) -> None:
    cluster = "check dgx-h100 --servers 2 --nic-bandwidth 400Gb/s"
    assert faults_of(told(f"{cluster} --without-device s0.nic1", status=1)) == [("NIC missing", ["s0.nic1"])]
    assert told(f"{cluster} --without-gpu 3")["faults"] == []


@pytest.mark.parametrize(("name", "link"), [("dgx-1v", "pcie0-gpu0"), ("dgx-h100", "gpu3-pcie3")])
def test_a_slow_pcie_link_that_no_rated_plan_crosses_is_wrong(run: Run, name: str, link: str) -> None:
    """An all_reduce over NVLink says nothing about a card at 3 GB/s: not rated, exit status 1."""
    slow = topoplan.slow_links(name, {link: 3})
    status, out, _ = run("check -", stdin=slow.to_json())
    assert (status, out.splitlines()[0]) == (1, f"{name}, 8 GPUs: 1 fault")
    assert "LnkSta" in out
    assert "not rated" in out
    found = topoplan.check(slow)
    assert (found.ok, found.to_dict()["healthy"]) == (False, False)
    assert (found.rows[0]["wrong"], found.rows[0]["rated"]) == (True, False)


def test_a_slow_pcie_link_is_rated_if_plans_cross_it() -> None:
    (row,) = topoplan.check(topoplan.slow_links("pcie-x8", {"gpu0-pcie0": 3})).rows
    assert (row["kind"], row["rated"], row["wrong"]) == ("PCIe slow", True, True)


def test_plan_warns_of_what_hurts_the_allocation_and_json_has_it_in_its_notes(
    broken: str, done: Done, told: Told
) -> None:
    """Below the verdict; not of what was taken out on request."""
    dead = "gpu0-gpu3: no NVLink, should be 2 NVLinks of 25 GB/s"
    halved = "gpu1-gpu5: 1 NVLink of 25 GB/s, should be 2 NVLinks of 25 GB/s"
    for asked, warned in (
        (broken, [dead, halved]),
        (f"{broken} --gpus 0-3", [dead]),
        (f"{broken} --gpus 4-7", []),
        (f"{broken} --bound-only", [dead, halved]),
        ("dgx-1v --without-link gpu0-gpu3", []),
    ):
        lines = done(f"plan {asked}").splitlines()
        assert lines[0].startswith("all_reduce on ")
        assert [line for line in lines if line.startswith("warning: ")] == [
            f"warning: {one}" for one in warned
        ]
    assert told(f"plan {broken}")["notes"][0] == f"warning: {dead}"


def test_gpus_in_mig_mode_are_planned_through_the_host(told: Told) -> None:
    """Eight GPUs on two PCIe switches: 10 GB/s with peer access; every byte of seven copies up an uplink else."""
    machine = read_library("pcie-x8")
    for device in machine["devices"]:
        if device["kind"] == "gpu":
            device["facts"] = {"mig": "MIG-a,MIG-b"}
    text = json.dumps(machine)
    whole = topoplan.load(text)
    assert topoplan.load(whole.to_json()) == whole
    assert topoplan.plan(whole).rate == pytest.approx(48 / 14)
    (fault,) = told("check -", status=1, stdin=text)["faults"]
    assert (fault["kind"], len(fault["devices"])) == ("MIG", 8)
    assert fault["cost"]["allreduce"]["healthy"] == pytest.approx(10)


def test_this_machine_is_checked_without_a_name(
    fake_here: Installer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: Told
) -> None:
    """A probed DGX-1V with a dead and a slow NVLink, of which the driver's own words are notes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fake_here("dead_nvlinks")
    found = told("check", status=1)
    assert faults_of(found) == [("link missing", ["gpu0", "gpu3"]), ("link slow", ["gpu5", "gpu6"])]
    assert "warning: gpu0: NVLink 2 of 6 is down" in found["notes"]


SOUND = ("dgx1p", "dgx1v", "dgx2", "dgx_a100", "dgx_h100", "pcie_box", "hidden_switch")
AMISS = {
    "one_mig": ["MIG"],
    "lost_gpu": ["told", "told"],
    "refused_p2p": ["link missing", "no peer access"],
}
"""MIG mode, a GPU that does not answer, and a link that may not be used."""


@pytest.mark.thorough
@pytest.mark.parametrize("machine", [*SOUND, *AMISS])
def test_probed_machines(
    machine: str, fake_here: Installer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fake_here(machine)
    assert [fault.kind for fault in diagnose(topoplan.probe()).faults] == AMISS.get(machine, [])


def test_an_assumed_rate_names_the_machines_that_have_another(tmp_path: Path, done: Done, told: Told) -> None:
    """NV18 between four GPUs without names; with --nvlink-bandwidth or their names nothing is assumed."""
    path = tmp_path / "tray.txt"
    path.write_text(uniform_matrix(4, "NV18"))
    (line,) = (line for line in done(f"check {path}").splitlines() if line.startswith("NVLink rate"))
    assert "assumed 25 GB/s; dgx-b200, dgx-b300, gb200-nvl72, gb300-nvl72 have as many of 50 GB/s" in line
    assert "pass --nvlink-bandwidth, or give the output of nvidia-smi -L" in line
    found = told(f"check {path}")
    assert (found["resembles"], found["assumed_nvlink_rate"]) == ("dgx-h100", 25.0)
    assert found["equal_but_for_rate"][0] == {"machine": "dgx-b200", "nvlink_rate": 50.0}
    given = told(f"check {path} --nvlink-bandwidth 50GB/s")
    assert (given["resembles"], given["assumed_nvlink_rate"]) == ("dgx-b200", None)
    path.write_text("GPU 0,1,2,3: NVIDIA GB300\n" + uniform_matrix(4, "NV18"))
    assert "NVLink rate" not in done(f"check {path}")
    assert told(f"check {path}")["resembles"] == "gb300-nvl72"
