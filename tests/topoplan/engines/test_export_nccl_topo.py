"""Machines as NCCL topology files: NCCL can read them, and reading them back gives the machine again."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import topoplan
from tests.support.kind_clusters import random_cluster, random_dragonfly, random_three_levels
from tests.support.listings import MACHINES, each
from tests.support.nccl_rules import Rejected, nccl_links, read_as_nccl
from tests.support.nccl_texts import BRIDGE, bus, cpu, element, gpu_pci, nic_pci, nvlink, pci, system
from topoplan import ClusterByKind, Device, Link, Topology, UsageError
from topoplan.engines.exported import Exported
from topoplan.engines.nccl.identities import cpu_identity
from topoplan.engines.nccl.topology_file import MAX_ELEMENTS, nccl_topo_xml
from topoplan.engines.registry import export_machine, export_plan
from topoplan.machine.faults_by_kind import named_servers
from topoplan.machine.hardware import (
    LANE_RATES,
    counted_bandwidth,
    gpu_identity,
    nearest_pcie,
    socket_bandwidth,
)
from topoplan.machine.topology import facts

EXPORTED = (
    *("dgx-1p", "dgx-1v", "dgx-2", "dgx-a100", "dgx-h100", "dgx-b200"),
    *("v100x4", "pcie-x8", "nvlink-x4", "mi250"),
)

REAL = sorted(path for folder in ("nccl-xml", "rccl-xml") for path in (MACHINES / folder).glob("*topo*.xml"))
EACH_REAL = pytest.mark.parametrize("path", each(REAL))


def dumped() -> str:
    """Two NUMA nodes as NCCL writes them: facts, a slow slot, a NIC on PCIe and one on a CPU."""
    chip = 'vendor="0x10de" device="0x1db5" subsystem_vendor="0x10de" subsystem_device="0x1249"'
    fast = gpu_pci(0, nvlink(bus(1), 2), nvlink(bus(2), 1)).replace("<pci ", f"<pci {chip} ")
    narrow = gpu_pci(1, nvlink(bus(0), 2), place={"link_width": 8})
    slow = gpu_pci(2, nvlink(bus(0), 1), place={"link_speed": "16.0 GT/s PCIe", "link_width": 4})
    switch = pci("0000:14:00.0", fast, narrow, nic_pci("0000:1a:00.0", "mlx5_0", 0), device=BRIDGE)
    ethernet = element("nic", element("net", name="eth0", dev=1, speed=25000, port=0))
    return system(cpu(0, switch, affinity="000fffff"), cpu(1, slow, ethernet, affinity="ff,fff00000"))


def same(first: Topology, second: Topology) -> None:
    """Equal in GPUs and their order, and in all devices and links."""
    assert first.gpus == second.gpus
    devices, others = ({device.name: device for device in one.devices} for one in (first, second))
    assert devices == others
    assert set(first.links) == set(second.links)
    assert first.peer_access == second.peer_access


def named(
    exported: Exported, links: dict[tuple[str, str, str], Fraction]
) -> dict[tuple[str, str, str], Fraction]:
    """Links by names of devices in place of bus ids and NUMA nodes."""
    system = ElementTree.fromstring(exported.text)
    names = {pci.attrib["busid"]: pci.attrib["name"] for pci in system.iter("pci")}
    names |= {f"cpu {cpu.attrib['numaid']}": cpu.attrib["name"] for cpu in system.iter("cpu")}
    names["nvs"] = "nvswitch0"
    return {(names[src], names[dst], kind): rate for (src, dst, kind), rate in links.items()}


@pytest.mark.sampled
@pytest.mark.parametrize("name", EXPORTED)
def test_a_library_machine_comes_back_from_its_file(name: str) -> None:
    """Invented values are unset again; NCCL's arithmetic gives the machine's links, and rates of PCIe exactly."""
    machine = topoplan.load(name)
    exported = nccl_topo_xml(machine)
    same(topoplan.load(exported.text), machine)
    found = named(exported, nccl_links(read_as_nccl(exported.text)))
    kind = {"nvlink": "nvl", "pcie": "pci", "sys": "sys"}
    assert set(found) == {(link.src, link.dst, kind[link.channel]) for link in machine.links}
    for link in machine.links:
        if link.channel == "pcie":
            assert found[link.src, link.dst, "pci"] == Fraction(link.bandwidth)


@pytest.mark.parametrize("gpus", [[1, 4, 5, 7], [6]])
def test_an_allocation_keeps_the_numbers_of_its_gpus(gpus: list[int]) -> None:
    """``dev`` and the names are those of the whole machine; the ranks are those of the allocation."""
    part = topoplan.load("dgx-1v").subset(gpus)
    text = nccl_topo_xml(part).text
    found = [gpu.attrib for gpu in ElementTree.fromstring(text).iter("gpu")]
    assert [(int(gpu["dev"]), int(gpu["rank"])) for gpu in found] == [
        (gpu, rank) for rank, gpu in enumerate(gpus)
    ]
    assert topoplan.load(text).gpus == part.gpus
    if gpus == [6]:
        made = export_plan(topoplan.plan("dgx-1v", gpus=gpus), "nccl-topo")
        assert made == export_machine(part, "nccl-topo")


def test_what_was_read_from_xml_is_read_from_our_file_again() -> None:
    """Facts, affinity, NICs with and without a place on PCIe, and slow slots survive both ways."""
    machine = topoplan.load(dumped())
    assert machine.device("gpu0").fact("pci") == "10de:1db5:10de:1249"
    exported = nccl_topo_xml(machine)
    same(topoplan.load(exported.text), machine)
    assert not any("bus ids" in note for note in exported.notes)


@EACH_REAL
def test_a_real_machine_is_read_from_our_file_again(path: Path) -> None:
    """Of Azure, AWS and RCCL; the rules accept the files of these, or their verdict on ours would prove nothing."""
    read_as_nccl(path.read_text(encoding="utf-8"), most_nodes=8192)
    try:
        machine = topoplan.load(str(path))
    except topoplan.TopologyError as error:
        pytest.skip(f"not readable alone: {error}")
    exported = nccl_topo_xml(machine)
    same(topoplan.load(exported.text), machine)
    nccl_links(read_as_nccl(exported.text))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('<a b="1" c="2"/>', '<a b="1"  c="2"/>'),
        ('<a b="1"/>', '<a b="1" />x'),
        ('<a b="1"></a>', '<a b="1"></b>'),
        ("<!-- x --><a/>", '<?xml version="1.0"?><a/>'),
        (f'<a b="{"x" * 253}"/>', f'<a b="{"x" * 254}"/>'),
    ],
)
def test_the_rules_reject_what_nccl_cannot_read(good: str, bad: str) -> None:
    """Two spaces between attributes, text, a wrong closing tag, an XML declaration, a value that is too long."""
    read_as_nccl(good)
    with pytest.raises(Rejected):
        read_as_nccl(bad)


def test_known_rates_of_a_dgx_1v() -> None:
    """20 GB/s for an NVLink of a V100, 12 for PCIe of generation 3, 6 between sockets of a Xeon E5 v4.

    For AMD: version 2, xgmi in place of nvlink, and the architecture, from which RCCL takes 36 GB/s a link.
    """
    exported = nccl_topo_xml(topoplan.load("dgx-1v"))
    found = named(exported, nccl_links(read_as_nccl(exported.text)))
    known = {
        ("gpu0", "gpu1", "nvl"): 20,
        ("gpu0", "gpu3", "nvl"): 40,
        ("gpu0", "pcie0", "pci"): 12,
        ("cpu0", "cpu1", "sys"): 6,
    }
    assert {ends: found[ends] for ends in known} == known
    assert sum(rate for (_, _, kind), rate in found.items() if kind == "nvl") == 48 * 20
    assert any("20 GB/s for an NVLink" in note and "states 25" in note for note in exported.notes)
    exported = nccl_topo_xml(topoplan.load("mi250"))
    assert '<system version="2"' in exported.text
    assert "<nvlink" not in exported.text
    assert named(exported, nccl_links(read_as_nccl(exported.text)))["gpu0", "gpu1", "nvl"] == 4 * 36


def test_nothing_is_left_that_only_some_ranks_of_nccl_would_find_out() -> None:
    """NCCL 2.30 made four CPUs and eight switches of these two and four, as ranks filled in what was missing.

    It happens where network devices are named; elsewhere every rank looks up every NIC, and finds out the same.
    """
    machine = topoplan.load("dgx-1v")
    settled = {"cpu": ["affinity"], "0x060400": ["vendor", "device", "subsystem_vendor", "subsystem_device"]}
    for known in (facts(adapter="mlx5_0"), facts(gigabits=100)):
        devices = tuple(
            replace(device, facts=known) if device.name == "nic0" else device for device in machine.devices
        )
        exported = nccl_topo_xml(replace(machine, devices=devices))
        same(topoplan.load(exported.text), replace(machine, devices=devices))
        for node in ElementTree.fromstring(exported.text).iter():
            for key in settled.get(node.attrib.get("class", node.tag), ()):
                assert node.attrib.get(key) == ("" if known == facts(adapter="mlx5_0") else None)


def test_an_unknown_gpu_is_left_to_the_driver() -> None:
    """NCCL asks it for a missing ``sm``; a wrong one would set the rate of NVLink and how NCCL reads over it."""
    exported = nccl_topo_xml(topoplan.load("pcie-x8"))
    assert "sm=" not in exported.text
    assert any(note.startswith("sm is left to the driver") for note in exported.notes)
    assert not any("for an NVLink" in note for note in exported.notes)
    assert any(note.startswith("NCCL asks the driver for NVLinks of gpu0") for note in exported.notes)


SM = {
    "P100": 60,
    "Tesla V100-SXM2-32GB": 70,
    "NVIDIA A100-SXM4-80GB": 80,
    "NVIDIA A10G": 86,
    "NVIDIA GeForce RTX 3090": 86,
    "NVIDIA RTX A6000": 86,
    "NVIDIA RTX 6000 Ada Generation": 89,
    "NVIDIA GeForce RTX 4090": 89,
    "NVIDIA L40S": 89,
    "NVIDIA H100 80GB HBM3": 90,
    "NVIDIA B200": 100,
    "Tesla T4": 75,
}
PROCESSORS = {
    "Xeon E5-2698 v4": ("GenuineIntel", 6, 79),
    "Xeon Platinum 8168": ("GenuineIntel", 6, 85),
    "Intel(R) Xeon(R) Platinum 8275CL": ("GenuineIntel", 6, 85),
    "Xeon, Ice Lake, 36 cores": ("GenuineIntel", 6, 106),
    "Xeon Platinum 8480C": ("GenuineIntel", 6, 143),
    "Xeon Platinum 8570": ("GenuineIntel", 6, 207),
    "AMD EPYC 7742 64-Core Processor": ("AuthenticAMD", 143, 49),
    "AMD EPYC 7V13": ("AuthenticAMD", 175, 1),
    "AMD EPYC 9654": ("AuthenticAMD", 175, 17),
}


def test_identities_follow_from_models() -> None:
    for model, sm in SM.items():
        found = gpu_identity(Device("gpu0", "gpu", model=model), amd=False)
        assert (found.attributes, found.invented, found.guessed) == ((("sm", str(sm)),), ("sm",), False)
    stated = gpu_identity(Device("gpu0", "gpu", model="P100", facts=facts(sm=53)), amd=False)
    assert (stated.attributes, stated.invented) == ((("sm", "53"),), ())
    for model, (vendor, family, number) in PROCESSORS.items():
        attributes = dict(cpu_identity(Device("cpu0", "cpu", model=model), 100.0).attributes)
        wanted = {"vendor": vendor, "familyid": str(family), "modelid": str(number)}
        assert attributes == {"arch": "x86_64", **wanted}


@given(st.floats(min_value=1, max_value=100))
def test_of_an_unknown_processor_the_rate_is_nearest(rate: float) -> None:
    """No other processor that NCCL knows is nearer to what the machine states between its sockets."""
    found = cpu_identity(Device("cpu0", "cpu"), rate)
    known = [socket_bandwidth("x86_64", "GenuineIntel", 6, model) for model in (79, 85, 143, 207)]
    assert abs(found.rate - rate) == min(abs(own - rate) for own in (*known, 16.0))


@given(st.sampled_from(sorted(LANE_RATES)), st.integers(min_value=1, max_value=16))
def test_what_pcie_can_have_is_met_exactly(speed: str, lanes: int) -> None:
    bandwidth = counted_bandwidth(speed, lanes)
    assert counted_bandwidth(*nearest_pcie(float(bandwidth))) == bandwidth


def small(*links: Link, devices: tuple[Device, ...] = ()) -> Topology:
    """Two GPUs on one CPU, and what is added."""
    base = [Device("gpu0", "gpu", "s0"), Device("gpu1", "gpu", "s0"), Device("cpu0", "cpu", "s0")]
    plugs = [Link(*ends, "pcie", 12.0) for gpu in ("gpu0", "gpu1") for ends in ((gpu, "cpu0"), ("cpu0", gpu))]
    return Topology("small", (*base, *devices), (*plugs, *links))


def both(first: str, second: str, channel: str, bandwidth: float, count: int = 1) -> tuple[Link, Link]:
    return Link(first, second, channel, bandwidth, count), Link(second, first, channel, bandwidth, count)


def without(machine: Topology, *pairs: tuple[str, str]) -> Topology:
    return replace(machine, links=tuple(link for link in machine.links if (link.src, link.dst) not in pairs))


CPU1 = Device("cpu1", "cpu", "s0")


def changed(machine: Topology, kind: str, **fields: Any) -> Topology:
    devices = (replace(one, **fields) if one.kind == kind else one for one in machine.devices)
    return replace(machine, devices=tuple(devices))


SMALL = small()
TWO_CPUS = small(*both("cpu0", "cpu1", "sys", 10.0), devices=(CPU1,))
THREE_CPUS = small(
    *both("cpu0", "cpu1", "sys", 10.0),
    *both("cpu0", "cpu2", "sys", 5.0),
    *both("cpu1", "cpu2", "sys", 10.0),
    devices=(CPU1, Device("cpu2", "cpu", "s0")),
)
TWO_SWITCHES = small(
    *(link for i in (0, 1) for link in both(f"gpu{i}", f"nvswitch{i}", "nvlink", 50.0)),
    devices=tuple(Device(f"nvswitch{i}", "nvswitch", "s0") for i in (0, 1)),
)


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (topoplan.load("mi250x"), "gpu1 is joined to nic0 by PCIe"),
        (small(Link("gpu0", "gpu1", "nvlink", 25.0)), "gpu0->gpu1 (nvlink) has no reverse direction"),
        (without(SMALL, ("cpu0", "gpu1")), "gpu1->cpu0 (pcie) has 12 GB/s and none back"),
        (topoplan.slow_links(SMALL, {"gpu1->cpu0": 3.0}), "(pcie) has 3 GB/s and 12 back"),
        (without(SMALL, ("cpu0", "gpu1"), ("gpu1", "cpu0")), "gpu1 has no PCIe path to a CPU"),
        (small(devices=(CPU1,)), "cpu0 and cpu1 are not joined"),
        (THREE_CPUS, "cpu0 reaches other CPUs at 5, 10 GB/s"),
        (small(*both("gpu0", "cpu1", "pcie", 12.0), devices=(CPU1,)), "PCIe is not a tree below one CPU"),
        (TWO_SWITCHES, "NCCL knows one NVSwitch"),
        (topoplan.nvswitch_cluster(2, gpus=4), "choose one with --server, for example --server s0"),
        (Topology("none", (Device("cpu0", "cpu"),), ()), "none has no GPU"),
        (replace(SMALL, name="x" * 300), "is 300 bytes long, and NCCL reads 253"),
        (replace(SMALL, name="a\x01"), "a character that XML does not allow"),
        (changed(TWO_CPUS, "cpu", numa=0), "cpu0 and cpu1 are both NUMA node 0"),
        (changed(SMALL, "gpu", busid="0000:01:00.0"), "gpu0 and gpu1 both state bus id 0000:01:00.0"),
    ],
)
def test_refuses_what_the_file_cannot_hold(machine: Topology, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        nccl_topo_xml(machine)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_machine_beyond_nccls_limit_is_refused() -> None:
    """A full mesh of 16 GPUs has 240 NVLink ends; 14 still fit below 256 elements."""

    def mesh(size: int) -> Topology:
        names = [f"gpu{i}" for i in range(size)]
        wires = [Link(a, b, "nvlink", 20.0) for a in names for b in names if a != b]
        plugs = [link for name in names for link in both(name, "cpu0", "pcie", 12.0)]
        return Topology("mesh", (*(Device(n, "gpu") for n in names), Device("cpu0", "cpu")), (*wires, *plugs))

    assert read_as_nccl(nccl_topo_xml(mesh(14)).text).size == 2 + 14 * 2 + 14 * 13
    with pytest.raises(UsageError, match=f"takes 274 elements, and NCCL reads {MAX_ELEMENTS}"):
        nccl_topo_xml(mesh(16))


def test_one_server_of_a_cluster() -> None:
    cluster = topoplan.load("pcie-x8")
    assert nccl_topo_xml(cluster, server="s0").text == nccl_topo_xml(cluster).text
    two = topoplan.cluster([topoplan.Server(cluster, count=2)], nic_gbps=100)
    exported = nccl_topo_xml(two, server="s1")
    assert topoplan.load(exported.text).gpus == tuple(f"s1.gpu{i}" for i in range(8))
    with pytest.raises(UsageError, match="has no server 's7'; it has s0, s1"):
        nccl_topo_xml(two, server="s7")


def test_what_is_left_out_is_said() -> None:
    """Latencies, switches that copy, facts without a place, NICs on no CPU: a note for each."""
    switch = Device("nvswitch0", "nvswitch", "s0", model="NVSwitch", multicast=True)
    wires = (link for i in (0, 1) for link in both(f"gpu{i}", "nvswitch0", "nvlink", 50.0, 2))
    machine = changed(
        small(*wires, devices=(switch, Device("nic0", "nic", "s0"))), "gpu", facts=facts(uuid="GPU-1")
    )
    links = tuple(replace(link, latency=1e-6) if link.src == "gpu0" else link for link in machine.links)
    notes = "\n".join(nccl_topo_xml(replace(machine, links=links)).notes)
    for said in ("latency: gpu0->cpu0", "fact uuid: gpu0", "copy or add", "nic0"):
        assert said in notes


def test_a_file_says_its_notes_itself() -> None:
    """As comments at the top, which NCCL skips: two hyphens in a name would end them early."""
    machine = replace(topoplan.load("v100x4"), name="a -- b -->")
    exported = nccl_topo_xml(machine)
    assert exported.text.startswith("<!-- topoplan: NCCL topology of a - - b - ->, for NCCL_TOPO_FILE -->\n")
    assert [f"<!-- {note} -->" for note in exported.notes] == exported.text.splitlines()[
        1 : 1 + len(exported.notes)
    ]
    assert read_as_nccl(exported.text).name == "system"
    assert topoplan.load(exported.text).name == "a -- b -->"


def test_networks_are_numbered_over_all_nics_where_one_has_several() -> None:
    machine = topoplan.load("dgx-1v")
    adapters = {"nic0": "mlx5_0+mlx5_1", "nic1": "mlx5_2"}
    devices = tuple(
        replace(device, facts=facts(adapter=adapters[device.name])) if device.name in adapters else device
        for device in machine.devices
    )
    root = ElementTree.fromstring(nccl_topo_xml(replace(machine, devices=devices)).text)
    numbers = {net.attrib["name"]: int(net.attrib["dev"]) for net in root.iter("net") if "name" in net.attrib}
    assert numbers == {"mlx5_0": 0, "mlx5_1": 1, "mlx5_2": 2}


@pytest.mark.sampled
@pytest.mark.parametrize("make", [random_cluster, random_dragonfly, random_three_levels])
@pytest.mark.parametrize("seed", range(30))
def test_a_server_beside_one_of_each_kind_has_the_file_of_the_listed_cluster(
    make: Callable[..., ClusterByKind | None], seed: int
) -> None:
    cluster = make(seed, most=200)
    if cluster is None:
        return
    name = f"s{random.Random(seed).randrange(cluster.servers)}"
    beside = named_servers(cluster, (f"{name}.",)).topology
    listed, few = (export_machine(one, "nccl-topo", server=name) for one in (cluster.listed(), beside))
    assert (few.text, few.notes) == (listed.text, listed.notes)
