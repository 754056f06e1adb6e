"""The machine library: files equal their generators, known links and rates, a PCIe side that connects."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import networkx
import pytest

import topoplan
from tests.support.machine_links import bundles, wire_rates
from tests.support.small_machines import CABLED
from topoplan.machine import hardware
from topoplan.machine.fabric import Fabric
from topoplan.machine.library import LIBRARY, write_library
from topoplan.machine.routing import staged, unstaged
from topoplan.machine.small_machines import SMALL_MACHINES
from topoplan.machine.topology import Device, Topology
from topoplan.machine.topology_json import parse_topology_json
from topoplan.reading.load import library, library_path, load

NAMES = sorted(LIBRARY)

RACKS = ["gb200-nvl72", "gb300-nvl72"]

DGX_1_PAIRS = ["01", "02", "03", "12", "13", "23", "45", "46", "47", "56", "57", "67", "04", "15", "26", "37"]
DGX_1V_DOUBLED = ["03", "04", "12", "15", "23", "47", "56", "67"]


def nvlink_pairs(machine: Topology) -> dict[frozenset[str], int]:
    return {frozenset(ends): count for ends, (count, _) in bundles(machine).items()}


def named(pairs: list[str]) -> set[frozenset[str]]:
    return {frozenset(f"gpu{digit}" for digit in pair) for pair in pairs}


def ends_of(pairs: dict[frozenset[str], int]) -> Counter[str]:
    """The number of NVLinks of each GPU."""
    return Counter(gpu for pair, count in pairs.items() for gpu in pair for _ in range(count))


def test_each_file_is_what_its_generator_makes(tmp_path: Path) -> None:
    """The names are those of the generators; read back, a file is the generated machine, written again the same."""
    assert list(library()) == NAMES
    assert len(NAMES) == 40
    written = {path.name: path.read_text(encoding="utf-8") for path in write_library(tmp_path)}
    for name in NAMES:
        text = (library_path() / f"{name}.json").read_text(encoding="utf-8")
        assert parse_topology_json(text) == LIBRARY[name]()
        assert written[f"{name}.json"] == text


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CABLED])
def test_each_machine_is_connected_and_names_its_sources(name: str) -> None:
    """No cut separates two GPUs on PCIe or on NVLink, and wires have equal directions."""
    machine = load(name)
    channels = (
        ["pcie"]
        if name == "pcie-x8" or name in SMALL_MACHINES
        else ["nvlink"]
        if name in RACKS
        else ["pcie", "nvlink"]
    )
    for channel in channels:
        fabric = Fabric(machine, (channel,))
        assert fabric.unreachable() == ()
        assert fabric.symmetric or machine.half_duplex
    assert machine.name == name
    assert machine.servers == ("s0",)
    assert "GB/s" in machine.source
    assert all(device.server for device in machine.devices)
    assert name != "pcie-x8" or {link.channel for link in machine.links} == {"pcie", "sys"}


def test_dgx_1_has_the_sixteen_links_of_the_design() -> None:
    """Two fully connected quads and four links across, 20 GB/s each; a DGX-1V doubles eight, 25 GB/s each."""
    for name, rate, per_gpu, doubled in (("dgx-1p", 20.0, 4, []), ("dgx-1v", 25.0, 6, DGX_1V_DOUBLED)):
        machine = load(name)
        pairs = nvlink_pairs(machine)
        assert set(pairs) == named(DGX_1_PAIRS)
        assert {pair for pair, count in pairs.items() if count == 2} == named(doubled)
        assert wire_rates(machine) == {rate}
        assert ends_of(pairs) == {f"gpu{i}": per_gpu for i in range(8)}


@pytest.mark.parametrize(
    ("names", "gpus", "links", "rate"),
    [
        (("dgx-2",), 16, 6, 150.0),
        (("dgx-a100", "p4d.24xlarge"), 8, 12, 300.0),
        (("dgx-h100", "p5.48xlarge"), 8, 18, 450.0),
        (("dgx-b200", "dgx-b300"), 8, 18, 900.0),
        (RACKS, 72, 18, 900.0),
    ],
)
def test_nvswitch_boxes_have_one_switch_and_the_known_rate(
    names: tuple[str, ...], gpus: int, links: int, rate: float
) -> None:
    """Each GPU has all its links to ``nvswitch0``, at the rate per GPU and direction that NVIDIA names."""
    for name in names:
        up = {src: found for (src, dst), found in bundles(load(name)).items() if dst == "nvswitch0"}
        assert up == {f"gpu{i}": (links, rate) for i in range(gpus)}


def test_two_gpus_and_a_nic_share_each_switch_of_a_dgx_1() -> None:
    """Four PCIe switches, two on each CPU, and one link between the CPUs in each direction."""
    for name in ("dgx-1p", "dgx-1v"):
        machine = load(name)
        wires = {(link.src, link.dst) for link in machine.links}
        assert {(f"gpu{i}", f"pcie{i // 2}") for i in range(8)} <= wires
        assert {(f"nic{i}", f"pcie{i}") for i in range(4)} <= wires
        assert {(f"pcie{i}", f"cpu{i // 2}") for i in range(4)} <= wires
        assert list(bundles(machine, "sys")) == [("cpu0", "cpu1"), ("cpu1", "cpu0")]


def test_the_trays_of_a_rack_share_nvlink_alone() -> None:
    """Two CPUs with two GPUs and two NICs each in a tray, and nothing but NVLink between trays."""
    for name in RACKS:
        machine = load(name)
        graph = networkx.Graph()
        graph.add_nodes_from(device.name for device in machine.devices if device.kind != "nvswitch")
        graph.add_edges_from((link.src, link.dst) for link in machine.links if link.channel != "nvlink")
        kinds = [Counter(one.rstrip("0123456789") for one in p) for p in networkx.connected_components(graph)]
        assert len(kinds) == 18
        assert {(kind["gpu"], kind["nic"]) for kind in kinds} == {(4, 4)}


def test_meshes_of_amd_use_all_ports() -> None:
    """MI300X: a full mesh of seven links of 64 GB/s for each GPU, so 64 * 56 / 14 GB/s of allreduce.

    MI250X: links to other dies, one to the CPU and, on odd dies, one to a NIC: eight ports in all. MI250: seven links
    to other dies and four of them to the twin; a die has three or four neighbours, since packages are wired unlike.
    """
    pairs = nvlink_pairs(load("mi300x"))
    assert len(pairs) == 28
    assert set(pairs.values()) == {1}
    assert topoplan.plan("mi300x").rate == topoplan.plan("mi300x").bound == 256.0
    ports = Counter[str]()
    for link in load("mi250x").links:
        ports[link.src] += link.count
    assert {gpu: ports[gpu] for gpu in load("mi250x").gpus} == {f"gpu{i}": 8 for i in range(8)}
    pairs = nvlink_pairs(load("mi250"))
    assert ends_of(pairs) == {f"gpu{i}": 7 for i in range(16)}
    twins = {frozenset({f"gpu{2 * i}", f"gpu{2 * i + 1}"}) for i in range(8)}
    assert {pair for pair, count in pairs.items() if count == 4} == twins
    assert set(Counter(gpu for pair in pairs for gpu in pair).values()) == {3, 4}


@pytest.mark.parametrize(("name", "nics", "shared"), [("p4d.24xlarge", 4, 2), ("p5.48xlarge", 32, 1)])
def test_the_nics_of_cloud_servers_are_on_the_switches_of_their_gpus(
    name: str, nics: int, shared: int
) -> None:
    """So many NICs of 100 Gb/s, and so many GPUs on the PCIe switch of each."""
    machine = load(name)
    above = {link.src: link.dst for link in machine.links if link.channel == "pcie" and link.src[:3] != "pci"}
    found = [device for device in machine.devices if device.kind == "nic"]
    assert len(found) == nics
    assert {nic.fact("gigabits") for nic in found} == {"100"}
    for nic in found:
        assert sum(above.get(gpu) == above[nic.name] for gpu in machine.gpus) == shared


def test_nvswitches_say_from_the_third_generation_on_that_they_could_copy_and_add() -> None:
    able = {"dgx-h100", "dgx-b200", "dgx-b300", "gb200-nvl72", "gb300-nvl72", "p5.48xlarge"}
    for name in NAMES:
        machine = load(name)
        said = {device.name: device.capable for device in machine.devices if device.capable}
        assert said == ({"nvswitch0": ("multicast", "reduce")} if name in able else {})
        assert not any(device.multicast or device.reduce for device in machine.devices)
    made = topoplan.plan("dgx-h100", gpus=[0, 1, 2])
    assert "capable" not in made.to_json()
    assert load(made.topology.to_json()) == made.topology


def test_mi250_is_the_machine_of_the_known_answers(fabrics_dir: Path) -> None:
    """Another description of it, numbered differently, has the same graph of the same rates."""
    graphs = []
    for machine in (load("mi250"), load(str(fabrics_dir / "mi250-x1.json"))):
        graphs.append(networkx.Graph())
        graphs[-1].add_edges_from((*ends, {"rate": rate}) for ends, (_, rate) in bundles(machine).items())
    assert networkx.is_isomorphic(*graphs, edge_match=lambda one, other: one == other)


def gpu_of(model: str) -> Device:
    return Device("gpu0", "gpu", model=model)


def test_figures_of_hardware_by_its_names() -> None:
    generations = [hardware.generation_of(sm) for sm in (70, 75, 103, 52)]
    assert generations == [hardware.V100, hardware.V100, hardware.B200, None]
    models = ("Tesla V100-SXM2-16GB", "NVIDIA H100 80GB HBM3", "A6000", "GPU")
    assert [hardware.compute_capability(model) for model in models] == [70, 90, 86, None]
    lanes = ("16 GT/s", "16.0 GT/s PCIe", "Unknown speed")
    assert [hardware.lane_bandwidth(text) for text in lanes] == [1.5, 1.5, None]
    slots = (("8 GT/s", 16), ("16.0 GT/s PCIe", 8), ("", 0))
    assert [hardware.pcie_bandwidth(*slot) for slot in slots] == [12.0] * 3
    assert [hardware.nvlink_bandwidth(sm) for sm in (70, 86, 89, 120)] == [20.0, 12.0, 20.0, 40.1]
    assert [hardware.xgmi_bandwidth(gcn) for gcn in ("gfx942", "910", "908")] == [48.0, 36.0, 24.0]
    nearest = [hardware.nearest_pcie(bandwidth) for bandwidth in (12.0, 36.0, 5.4)]
    assert nearest == [("8 GT/s", 16), ("32 GT/s", 12), ("5 GT/s", 14)]
    assert hardware.socket_bandwidth("x86_64", "AuthenticAMD", 23, 49) == 16.0


def test_identity_of_a_gpu_by_its_model_and_number_of_nvlinks() -> None:
    assert hardware.gpu_identity(gpu_of("MI250 GCD"), amd=True).attributes == (
        ("sm", "104"),
        ("gcn", "gfx90a"),
        ("arch", "38911"),
    )
    assert [hardware.is_amd([gpu_of(model)]) for model in ("MI250 GCD", "A100")] == [True, False]
    known = [
        hardware.known_capability(gpu_of(model), links) for model, links in (("H20", 0), ("", 18), ("", 8))
    ]
    assert known == [90, 90, None]
    assert hardware.nvswitch_capable([gpu_of("")]) == ()
    bare = load("dgx-h100").settled()
    assert hardware.with_capable(bare).device("nvswitch0").capable == ("multicast", "reduce")
    assert hardware.with_capable(load("dgx-a100")) == load("dgx-a100")


def test_a_machine_without_staging_is_the_one_before_it() -> None:
    assert unstaged(staged(load("pcie-x8"))) == load("pcie-x8")
