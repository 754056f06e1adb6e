"""One machine from two descriptions: NVLinks of one, PCIe of the other; in Python and on the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.checkout import Run
from tests.support.nccl_texts import BRIDGE, NIC, bus, cpu, gpu_pci, machine, nvlink, only, pair, pci, system
from tests.support.refusals import refused
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.topology import Link, Topology
from topoplan.reading.nccl.topology_xml import parse_nccl_xml
from topoplan.reading.pcie_tree import merge_nvlink

MATRIX = "\tGPU0\tGPU1\nGPU0\t X \tNV2\nGPU1\tNV2\t X \n"


def part(topology: Topology, *, nvlink: bool) -> set[Link]:
    """The links over NVLink, or all others."""
    return {link for link in topology.links if (link.channel == "nvlink") is nvlink}


def pcie_only(gpus: int) -> str:
    """GPUs by class alone, two to a switch with a NIC, as cloud machines describe themselves."""
    switches = [
        pci(
            f"ffff:ff:{i + 1:02x}.0",
            *(pci(bus(number)) for number in (i, i + 1)),
            pci(f"0000:{0xA0 + i:02x}:00.0", device=NIC),
            device=BRIDGE,
        )
        for i in range(0, gpus, 2)
    ]
    return system(*(cpu(i, *switches[i::2]) for i in (0, 1)))


def test_nvlinks_come_from_one_and_all_else_from_the_other() -> None:
    """The switch comes with them; a machine that could use PCIe only reaches the optimum over NVLink."""
    base, dgx = parse_nccl_xml(pcie_only(8)), topoplan.load("dgx-a100")
    merged = merge_nvlink(base, dgx)
    assert part(merged, nvlink=True) == part(dgx, nvlink=True)
    assert part(merged, nvlink=False) == part(base, nvlink=False)
    assert [device.name for device in merged.devices if device.kind == "nvswitch"] == ["nvswitch0"]
    assert [device.busid for device in merged.devices[:8]] == [bus(i) for i in range(8)]
    assert {device.model for device in merged.devices[:8]} == {"A100"}
    assert topoplan.plan(merged, "allreduce").rate == topoplan.plan(dgx, "allreduce").rate
    over_pcie = topoplan.plan(merged, "allreduce", channels="pcie")
    assert over_pcie.rate == pytest.approx(topoplan.plan(base, "allreduce").rate)


def test_notes_go_with_what_they_speak_of() -> None:
    """A hint at --merge is gone, and PCIe of the other description is nobody's business."""
    merged = merge_nvlink(parse_nccl_xml(pcie_only(2)), topoplan.load(MATRIX))
    assert merged.notes == (
        "GPUs are numbered by bus id, as the driver counts: dev is not stated, or occurs twice",
        "GPU not printed, assumed V100: NVLink 25 GB/s per link and direction; set --nvlink-bandwidth",
        "NVLinks from nvidia-smi, GPUs matched by number",
    )
    assert "NVLinks from nvidia-smi: nvidia-smi topo -m" in merged.source


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(4)))
def test_gpus_are_matched_by_bus_id_where_both_state_it(order: list[int]) -> None:
    text = machine(4, {(0, 1): 1, (1, 2): 2, (2, 3): 3})
    numbered = text
    for i, number in enumerate(order):
        numbered = numbered.replace(f'dev="{i}"', f'dev="x{number}"')
    other = parse_nccl_xml(numbered.replace('dev="x', 'dev="'))
    base = parse_nccl_xml(text)
    merged = merge_nvlink(base, other)
    assert set(merged.links) == set(base.links)
    assert merged.notes[0].endswith("matched by bus id")


def test_merging_a_machine_with_itself_changes_only_notes_and_source() -> None:
    for name in ("dgx-1v", "dgx-h100", "mi250"):
        topology = topoplan.load(name)
        merged = merge_nvlink(topology, topology)
        assert set(merged.links) == set(topology.links)
        assert set(merged.devices) == set(topology.devices)
        assert merged.gpus == topology.gpus
        assert merged.peer_access == topology.peer_access
        assert f"the NVLinks that {name} itself states are replaced" in merged.notes


def test_an_nvlink_to_a_cpu_leads_to_the_cpu_of_the_gpu() -> None:
    """As on POWER9; the other description may name its CPUs as it likes."""
    to_cpu = nvlink("0004:04:00.0", 3, "0x068001")
    other = parse_nccl_xml(system(cpu(8, gpu_pci(0, to_cpu), gpu_pci(1, to_cpu))))
    base = parse_nccl_xml(system(cpu(0, gpu_pci(0)), cpu(1, gpu_pci(1))))
    merged = merge_nvlink(base, other)
    assert {(link.src, link.dst) for link in part(merged, nvlink=True)} == {
        *(("gpu0", "cpu0"), ("cpu0", "gpu0"), ("gpu1", "cpu1"), ("cpu1", "gpu1"))
    }


def test_a_contradiction_about_pcie_is_noted() -> None:
    """GPUs that share a switch in one description and no CPU in the other."""
    together = parse_nccl_xml(only(pci("0000:80:00.0", gpu_pci(0), gpu_pci(1), device=BRIDGE)))
    apart = parse_nccl_xml(system(cpu(0, gpu_pci(0)), cpu(1, gpu_pci(1))))
    for base, other in ((together, apart), (apart, together)):
        assert merge_nvlink(base, other).notes[-1] == (
            "PCIe of nccl-xml is kept, but nccl-xml contradicts it: gpu0-gpu1 share a switch in one of them and are on "
            "different CPUs in the other"
        )
    assert not any("contradicts" in note for note in merge_nvlink(apart, topoplan.load(MATRIX)).notes)


def test_devices_without_class_are_gpus_where_the_other_description_has_gpus(tmp_path: Path) -> None:
    """The bus ids of topology JSON tell which of the devices are GPUs."""
    path = tmp_path / "probed.json"
    path.write_text(parse_nccl_xml(pair(nvlink(bus(1), 4), other=[nvlink(bus(0), 4)])).to_json())
    bare = only(*(pci(bus(i), **{"class": None}) for i in range(3)))
    topology = topoplan.load(bare, merge=path)
    assert [device.busid for device in topology.devices if device.kind == "gpu"] == [bus(0), bus(1)]
    assert sum(link.count for link in part(topology, nvlink=True)) == 8
    assert f"class is unknown or not stated; left out: {bus(2)}" in topology.notes
    with pytest.raises(TopologyError, match="none of them is at the bus id of a GPU of --merge"):
        topoplan.load(bare.replace("0000:0", "0001:0"), merge=path)


def test_nothing_to_merge_is_said() -> None:
    merged = merge_nvlink(topoplan.load("dgx-1v"), topoplan.load("pcie-x8"))
    assert not part(merged, nvlink=True)
    assert "NVLinks from pcie-x8, GPUs matched by number; it states none" in merged.notes


def test_given_rates_go_to_the_description_that_they_speak_of(tmp_path: Path) -> None:
    """NVLink to the second, PCIe and sockets to the first."""
    path = tmp_path / "matrix.txt"
    path.write_text(MATRIX)
    topology = topoplan.load(pair(), merge=path, nvlink_gbps=22, pcie_gbps=11)
    assert {link.bandwidth for link in part(topology, nvlink=True)} == {44.0}
    assert {link.bandwidth for link in part(topology, nvlink=False)} == {11.0}
    with refused(UsageError, "dgx-1v: topology JSON states its own bandwidths; leave out nvlink_gbps"):
        topoplan.load(pcie_only(8), merge="dgx-1v", nvlink_gbps=22)


def test_descriptions_of_different_machines_are_refused() -> None:
    """By number of GPUs, by bus id, by number of servers, and where a link has no place."""
    box = parse_nccl_xml(pair())
    moved = replace(box, devices=(replace(box.devices[0], busid="0009:09:00.0"), *box.devices[1:]))
    two = topoplan.cluster([topoplan.Server("v100x4", count=2)], nic_gbps=100)
    nowhere = replace(box, links=tuple(link for link in box.links if link.channel != "pcie"))
    to_cpu = parse_nccl_xml(pair(nvlink("0004:04:00.0", 3, "0x068001")))
    servers = "has 2 servers, and --merge joins two descriptions of one"
    for base, other, says in (
        (box, topoplan.load("dgx-1v"), "has 2 GPUs and dgx-1v has 8; --merge joins two descriptions of one"),
        (box, moved, f"gpu0 of nccl-xml is at bus id {bus(0)}, where nccl-xml has no GPU"),
        (two, two, servers),
        (topoplan.load("v100x4"), two, servers),
        (nowhere, to_cpu, "has an NVLink gpu0->cpu0, which has no place in nccl-xml"),
    ):
        with refused(UsageError, says):
            merge_nvlink(base, other)


@pytest.mark.thorough
def test_the_command_line_merges(tmp_path: Path, run: Run) -> None:
    """Every command that takes TOPO takes --merge and --socket-bandwidth; a plan file has settled them."""
    path, plan = str(tmp_path / "cloud.xml"), str(tmp_path / "plan.json")
    Path(path).write_text(pcie_only(8))
    socket = ("--socket-bandwidth", "9GB/s")
    merge = ("--merge", "dgx-1v", *socket)
    for words, says in (
        (("plan", path, *merge, "--notes", "-o", plan), "all_reduce on cloud, 8 GPUs"),
        (("plan", path, *merge, "--notes"), "algbw 85.7143 GB/s"),
        (("plan", path, *merge, "--notes"), "note: NVLinks from dgx-1v, GPUs matched by number"),
        (("show", path, *merge, "--all"), "cpu0 <-> cpu1 sys 1 9"),
        (("simulate", path, *merge, "--sizes", "1MB"), "on cloud"),
    ):
        status, out, _ = run(*words)
        assert (status, says in " ".join(out.split())) == (0, True)
    for words, says in (
        (("simulate", plan, "--merge", "dgx-1v"), "--merge does not go with a plan file"),
        (("simulate", plan, *socket), "--socket-bandwidth does not go with a plan file"),
        (("plan", path, "--merge", "dgx-2"), "cloud has 8 GPUs and dgx-2 has 16"),
        (("plan", "dgx-1v", *socket), "topology JSON states its own bandwidths; leave out socket_gbps"),
        (("plan", "-", "--merge", "-"), "stdin is read once; give a file to all but one of TOPO, --merge"),
    ):
        status, _, error = run(*words, stdin=MATRIX)
        assert (status, error.count("\n"), says in error) == (2, 1, True)
    with pytest.raises(UsageError, match="stdin holds one description; give --merge a file"):
        topoplan.load("-", merge="-")


def test_real_cloud_files_reach_the_optimum_with_the_librarys_nvlinks(machines_dir: Path) -> None:
    """Azure's NDv2 is a DGX-1V inside, its NDv4 and Amazon's p4d are eight A100 on NVSwitch."""
    for name, library, rate in (
        ("ndv2-topo", "dgx-1v", 600 / 7),
        ("ndv4-topo", "dgx-a100", 1200 / 7),
        ("p4d-24xl-topo", "dgx-a100", 1200 / 7),
    ):
        topology = topoplan.load(machines_dir / "nccl-xml" / f"{name}.xml", merge=library)
        plan = topoplan.plan(topology, "allreduce")
        assert plan.channels == ("nvlink",)
        assert plan.rate == pytest.approx(rate, rel=1e-12)
        assert topoplan.verify(plan).optimal
