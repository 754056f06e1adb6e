"""Which switches copy and add: by the file, or as ``--in-network`` decides; what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Run
from topoplan import Plan, Topology, TopologyError, UsageError
from topoplan.machine.hardware import with_capable
from topoplan.machine.topology import facts
from topoplan.machine.variants import IN_NETWORK_CHOICES, with_all_capabilities, with_in_network
from topoplan.solve.upper_bound import in_network_bound


@pytest.mark.parametrize("which", sorted(IN_NETWORK_CHOICES))
def test_switches_of_the_kinds_asked_for_copy_and_add_and_no_others(which: str) -> None:
    """Two DGX H100 behind one switch; an explicit choice overrides what stands in the file."""
    machine = topoplan.cluster([topoplan.Server("dgx-h100", count=2)], nic_gbps=400)
    for start in (machine, with_in_network(machine, "all")):
        made = with_in_network(start, which)
        on = {device.kind for device in made.devices if device.multicast and device.reduce}
        assert on == set(IN_NETWORK_CHOICES[which])
        assert {device.kind for device in made.devices if device.multicast or device.reduce} == on
    assert with_all_capabilities(machine).device("s0.nvswitch0").reduce
    assert not with_all_capabilities(machine).device("switch0").reduce
    assert with_all_capabilities(with_all_capabilities(machine)) == with_all_capabilities(machine)


def test_a_switch_that_does_not_say_that_it_could_leaves_a_note() -> None:
    """NVSwitch of the first generation, and switches of networks."""
    assert with_in_network("dgx-h100", "nvswitch").notes == topoplan.load("dgx-h100").notes
    assert with_in_network("dgx-2", "nvswitch").notes[-1] == (
        "assumed to copy and add, though the machine does not say so: nvswitch0"
    )


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(
        UsageError, match="in-network 'sharp' is unknown; use one of none, nvswitch, switch, all"
    ):
        with_in_network("dgx-h100", "sharp")
    for ask in (with_in_network, lambda name, which: topoplan.plan(name, in_network=which)):
        with pytest.raises(UsageError, match="dgx-1v has no nvswitch that could copy and add"):
            ask("dgx-1v", "nvswitch")
    text = (
        topoplan.load("dgx-h100")
        .to_json()
        .replace('"capable": ["multicast", "reduce"]', '"capable": ["fly"]')
    )
    with pytest.raises(
        TopologyError, match=r"device nvswitch0: capable \['fly'\] must list some of multicast, reduce"
    ):
        topoplan.load(text)


def test_the_option_decides_for_plan_and_compare(run: Run) -> None:
    """450 GB/s with the switch, 257.143 without, which is the default and the same plan as ever."""
    rates = {
        which: json.loads(run("plan", "dgx-h100", "--in-network", which, "--json")[1])["rate"]
        for which in ("none", "nvswitch", "all")
    }
    assert rates == {"none": pytest.approx(1800 / 7), "nvswitch": 450.0, "all": 450.0}
    assert run("plan", "dgx-h100", "--in-network", "none", "-o", "-") == run("plan", "dgx-h100", "-o", "-")
    row = json.loads(run("compare", "dgx-h100", "--in-network", "nvswitch", "--json")[1])["rows"][0]
    assert (row["trees"], row["nccl"], row["nccl_kind"], row["in_network"]) == (450.0, 450.0, "nvls", None)
    status, out, err = run("plan", "dgx-h100", "--in-network", "switch")
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_both_optima_are_told_where_the_machine_could_add_and_the_plan_does_not(run: Run) -> None:
    row = json.loads(run("compare", "dgx-h100", "--json")[1])["rows"][0]
    assert (row["trees"], row["in_network"]) == (pytest.approx(1800 / 7), 450.0)
    assert (
        "in-network   450 GB/s, busbw 787.5 GB/s if switches add, as NVLS does (--in-network nvswitch plans it)"
        in run("compare", "dgx-h100")[1]
    )
    lines = run("compare", "dgx-h100", "--all-allocations", "--gpu-counts", "8", "--all")[1].splitlines()
    head, line = lines[9:11]  # of the second table
    assert (head.split()[-1], line.split()[-1]) == ("in-network", "450.00")
    assert len(head) == len(line)
    assert json.loads(run("compare", "dgx-a100", "--json")[1])["rows"][0]["in_network"] is None


def test_both_rates_of_nvls_are_told(run: Run) -> None:
    """A root that keeps its own part outside the switch, and B N / (N + 1) where multimem takes the whole team."""
    name, rate, team = "dgx-h100", 450.0, 400.0
    made = topoplan.plan(name, in_network="nvswitch")
    assert (made.rate, made.team_wide) == (rate, team)
    plain = topoplan.plan(name, in_network="none")
    assert plain.team_wide == plain.rate == topoplan.plan(name).rate
    assert (
        f"NVLS         {rate:g} GB/s if each root keeps its own part outside NVSwitch; {team:g} GB/s"
        in run("plan", name, "--in-network", "nvswitch")[1]
    )
    assert json.loads(run("plan", name, "--in-network", "nvswitch", "--json")[1])["team_wide"] == team
    assert "team_wide" not in json.loads(run("plan", name, "--json")[1])


def bare(machine: Topology, *, model: str = "", sm: str = "") -> Topology:
    """The machine as one writes it down who says nothing of its NVSwitches, with what is said of its GPUs."""
    devices = (
        replace(one, model=model, facts=facts(sm=sm)) if one.kind == "gpu" else replace(one, capable=())
        for one in machine.devices
    )
    return replace(machine, devices=tuple(devices))


@pytest.mark.parametrize(
    ("name", "gpu", "able"),
    [
        ("dgx-h100", {}, True),  # 18 NVLinks
        ("dgx-b200", {"sm": "100"}, True),
        ("dgx-a100", {"model": "NVIDIA H800"}, True),
        ("dgx-a100", {"model": "NVIDIA A800-SXM4-80GB"}, False),
        ("dgx-2", {}, False),
    ],
)
def test_nvswitches_are_marked_by_the_generation_of_their_gpus(
    name: str, gpu: dict[str, str], able: bool
) -> None:
    """One by one and in clusters; topology JSON is read as it stands, and its bound is no false one all the same."""
    machine = bare(topoplan.load(name), **gpu)
    cluster = topoplan.cluster([topoplan.Server(machine, count=2)], nic_gbps=400)
    for one in map(with_capable, (machine, cluster)):
        switches = [device for device in one.devices if device.kind == "nvswitch"]
        assert switches
        assert all(device.capable == (("multicast", "reduce") if able else ()) for device in switches)
    assert topoplan.load(machine.to_json()) == topoplan.load(machine.to_networkx()) == machine
    assert (in_network_bound(topoplan.plan(machine)) is not None) is able


def test_every_line_of_a_bound_says_what_in_network_reduction_could_do(run: Run, tmp_path: Path) -> None:
    """Also of a plan file, whose machine states models and not what its switches could do."""
    words = "at most 450 GB/s, busbw 787.5 GB/s with in-network reduction"
    path = tmp_path / "plan.json"
    for command in (
        ("plan", "dgx-h100", "-o", str(path)),
        ("plan", "dgx-h100", "--bound-only"),
        ("plan", "dgx-h100", "--sizes", "1MB"),
        ("verify", str(path)),
        ("recommend", "dgx-h100", "--count", "8"),
    ):
        assert words in run(*command)[1], command
    for command in (("plan", "dgx-h100"), ("plan", "dgx-h100", "--bound-only"), ("verify", str(path))):
        assert json.loads(run(*command, "--json")[1])["in_network_bound"] == 450.0
    for command in (("plan", "dgx-h100", "--in-network", "nvswitch"), ("plan", "dgx-a100")):
        assert "in-network reduction" not in run(*command)[1]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("which", "collective", "rate"),
    [("nvswitch", "allgather", 1600 / 3), ("all", "allgather", 1600 / 3), ("switch", "allreduce", 275.0)],
)
def test_bounds_of_clusters_with_switches_that_copy_and_add_are_tight(
    which: str, collective: str, rate: float
) -> None:
    """Two DGX H100 with 400 Gb/s: a server's GPUs take in 8 x 450 + 400 GB/s; cuts alone say 800 and 400."""
    machine = topoplan.cluster([topoplan.Server("dgx-h100", count=2)], nic_gbps=400, nic_access="direct")
    made = topoplan.plan(machine, collective, in_network=which)
    report = topoplan.verify(Plan.from_json(made.to_json()))
    assert report.optimal
    assert made.certificate.kind == "steiner"
    assert made.rate == pytest.approx(rate, rel=1e-12)
    if which == "nvswitch":
        assert in_network_bound(made) is None, "its switches do all that they could"
