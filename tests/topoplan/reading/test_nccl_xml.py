"""NCCL's and RCCL's topology XML: real files, known machines, NCCL's own rules, and every kind of bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.machine_links import bundles, speeds, wire_rates
from tests.support.nccl_texts import (
    BRIDGE,
    GPU,
    HIDDEN,
    NIC,
    NVSWITCH,
    ROME,
    bus,
    cpu,
    element,
    gpu_pci,
    machine,
    nic_pci,
    nvlink,
    only,
    pair,
    pci,
    system,
)
from tests.support.refusals import refused
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.topology import facts
from topoplan.reading.nccl.topology_elements import (
    DEEPEST,
    LARGEST_TEXT,
    LONGEST_VALUE,
    MOST_ATTRIBUTES,
    MOST_CPUS,
    MOST_ELEMENTS,
    XmlElement,
    parse_xml,
)
from topoplan.reading.nccl.topology_xml import parse_nccl_xml

# file: GPUs, XGMI links, GB/s of one, NICs, CPUs, AllReduce in GB/s and its channel
REAL = {
    "ncv4-topo": (4, 0, None, 1, 4, 8.0, "pcie"),
    "ndv2-topo": (8, 0, None, 1, 2, 10.0, "pcie"),
    "ndv4-topo": (8, 0, None, 8, 4, 96 / 7, "pcie"),
    "p4d-24xl-topo": (8, 0, None, 4, 2, 48 / 7, "pcie"),
    "topo_16p1h": (16, 56, 36.0, 8, 4, 864 / 7, "nvlink"),
    "topo_3p_pcie": (3, 0, None, 1, 2, 16.0, "pcie"),
    "topo_4p2h": (8, 8, 24.0, 1, 1, 48 / 7, "pcie"),
    "topo_4p3l_2h": (8, 12, 24.0, 1, 4, 96 / 7, "pcie"),
    "topo_4p3l_n4": (8, 12, 24.0, 1, 7, 96 / 7, "pcie"),
    "topo_8p1h": (8, 26, 36.0, 4, 2, 120.0, "nvlink"),
    "topo_8p1h_4": (8, 26, 36.0, 8, 2, 120.0, "nvlink"),
    "topo_8p6l_1nic": (8, 24, 24.0, 1, 2, 576 / 7, "nvlink"),
    "topo_8p6l_5nic": (8, 24, 24.0, 5, 2, 576 / 7, "nvlink"),
    "topo_8p_90a_1": (8, 12, 36.0, 1, 3, 432 / 7, "nvlink"),
    "topo_8p_942vm": (8, 28, 48.0, 8, 2, 192.0, "nvlink"),
    "topo_8p_pcie_2nic": (8, 0, None, 2, 1, 48 / 7, "pcie"),
    "topo_8p_rome_4nics": (8, 12, 24.0, 4, 4, 96 / 7, "pcie"),
    "topo_8p_rome_n4": (8, 8, 24.0, 1, 7, 96 / 7, "pcie"),
    "topo_8p_ts1": (8, 8, 24.0, 2, 4, 96 / 7, "pcie"),
    "topo_8p_ts1_n4_2": (8, 8, 24.0, 2, 8, 96 / 7, "pcie"),
}

REFUSED = {
    "g5.48xl-topo": "the file does not state which of its 9 pci elements are GPUs, since 9 of them have no class",
    "ncv4-graph": "line 1: graphs: this is an NCCL graph file",
}

DGX_1V = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2}
DGX_1V |= {(2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2}


def real_file(machines_dir: Path, name: str) -> Path:
    """A file of either folder."""
    return next(path for path in machines_dir.glob("[nr]ccl-xml/*.xml") if path.stem == name)


@pytest.mark.parametrize("name", sorted(REAL))
def test_real_files_are_read_and_plan_at_the_optimum(name: str, machines_dir: Path) -> None:
    """GPUs, links, rates, NICs and CPUs are those of the machine, and its AllReduce is proved optimal."""
    gpus, links, rate, nics, cpus, allreduce, channel = REAL[name]
    topology = topoplan.load(real_file(machines_dir, name))
    kinds = [device.kind for device in topology.devices]
    assert (len(topology.gpus), kinds.count("nic"), kinds.count("cpu")) == (gpus, nics, cpus)
    assert sum(count for count, _ in bundles(topology).values()) == 2 * links
    assert wire_rates(topology) == ({rate} if rate else set())
    plan = topoplan.plan(topology, "allreduce")
    if channel == "pcie" and links:  # islands, which PCIe joins
        assert (plan.channels, topoplan.verify(plan).optimal) == (("all",), True)
        assert plan.rate >= allreduce * (1 - 1e-12)
        plan = topoplan.plan(topology, "allreduce", channels="pcie")
    assert plan.channels == (channel,)
    assert plan.rate == pytest.approx(allreduce, rel=1e-12)
    assert topoplan.verify(plan).optimal


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_real_files_without_a_machine_are_refused(name: str, machines_dir: Path) -> None:
    """One line says what the file is, or what is missing."""
    path = real_file(machines_dir, name)
    with refused(TopologyError, begins=f"{path}: {REFUSED[name]}"):
        topoplan.load(path)


def test_every_real_file_is_in_the_tables_above(machines_dir: Path) -> None:
    assert {path.stem for path in machines_dir.glob("[nr]ccl-xml/*.xml")} == {*REAL, *REFUSED}


def test_a_dgx_1v_has_the_librarys_links_at_nccls_rate() -> None:
    """20 GB/s for an NVLink where the library has the nominal 25; the PCIe tree is the same."""
    topology = parse_nccl_xml(machine(8, DGX_1V))
    library = topoplan.load("dgx-1v")
    assert bundles(topology) == {ends: (count, count * 20.0) for ends, (count, _) in bundles(library).items()}
    gpus_up = {ends: rate for ends, rate in speeds(library, "pcie").items() if "nic" not in "".join(ends)}
    assert speeds(topology, "pcie") == gpus_up
    assert speeds(topology, "sys") == {("cpu0", "cpu1"): 6.0, ("cpu1", "cpu0"): 6.0}
    assert not topology.notes


def test_a_switched_machine_has_one_switch() -> None:
    """Hidden far ends and several switch chips are the same switch, with all links of a GPU."""
    hidden = parse_nccl_xml(machine(8, {}, switched=18, sm=90))
    chips = [nvlink(f"0000:{0xC0 + i:02x}:00.0", count, NVSWITCH) for i, count in enumerate((5, 4, 4, 5))]
    seen = parse_nccl_xml(pair(*chips, other=chips, sm=90))
    for topology in (hidden, seen):
        assert set(bundles(topology).values()) == {(18, 370.8)}
        assert {dst for src, dst in bundles(topology) if src.startswith("gpu")} == {"nvswitch0"}


def test_version_2_with_xgmi_is_the_same_machine() -> None:
    """RCCL writes xgmi for nvlink, and an architecture where sm is the number of compute units."""
    ours = parse_nccl_xml(pair(nvlink(bus(1), 2), other=[nvlink(bus(0), 2)]))
    links = [nvlink(bus(1 - i), 2, tag="xgmi") for i in (0, 1)]
    amd = {"sm": 104, "gcn": "910"}
    gpus = [gpu_pci(i, links[i], place={"class": "0x120000"}, **amd) for i in (0, 1)]
    theirs = parse_nccl_xml(only(*gpus, version=2))
    assert bundles(ours) == {("gpu0", "gpu1"): (2, 40.0), ("gpu1", "gpu0"): (2, 40.0)}
    assert bundles(theirs) == {("gpu0", "gpu1"): (2, 72.0), ("gpu1", "gpu0"): (2, 72.0)}
    assert theirs.device("gpu0").facts == facts(gcn="gfx90a")
    assert ours.device("gpu0").facts == facts(sm=70)
    assert speeds(ours, "pcie") == speeds(theirs, "pcie")


def test_a_bus_id_is_read_in_any_spelling() -> None:
    """Drivers print longer domains, capitals, and no function."""
    for target in ("00000000:07:00.0", "0000:07:00", "0000:7:0.0", "0000:07:00.0 "):
        topology = parse_nccl_xml(pair(nvlink(target.upper(), 1), other=[nvlink(bus(0), 1)]))
        assert ("gpu0", "gpu1") in bundles(topology)


def test_white_space_comments_declaration_and_mark_change_nothing() -> None:
    text = machine(4, {(0, 1): 2}, nics=1)
    dressed = text.replace("\n", "\r\n  ").replace('"', "'")
    start = '\ufeff\n<?xml version="1.0"?>\n<!-- <gpu/> -->\n'
    assert parse_nccl_xml(start + dressed) == parse_nccl_xml(text)


SM_RATES = {
    60: 18.0,
    61: 18.0,
    70: 20.0,
    75: 20.0,
    80: 20.0,
    86: 12.0,
    89: 20.0,
    90: 20.6,
    100: 40.1,
    120: 40.1,
}
SM_RATES |= {30: 20.0}
GCN_RATES = {"906": 24.0, "gfx908": 24.0, "910": 36.0, "gfx90a": 36.0, "gfx942": 48.0}


def test_the_generation_gives_the_rate_of_a_link() -> None:
    """NCCL's ``ncclTopoNVLinkBw`` and RCCL's ``ncclTopoXGMISpeed``; three links have exactly three times the rate."""
    for sm, rate in SM_RATES.items():
        three = parse_nccl_xml(pair(nvlink(bus(1), 3), sm=sm))
        assert bundles(three)["gpu0", "gpu1"] == (3, round(3 * rate, 6))
    for gcn, rate in GCN_RATES.items():
        xgmi = parse_nccl_xml(pair(nvlink(bus(1), 1, tag="xgmi"), gcn=gcn))
        assert bundles(xgmi)["gpu0", "gpu1"] == (1, rate)


@pytest.mark.parametrize(
    ("speed", "width", "rate", "noted"),
    [
        ("2.5 GT/s", 16, 3.0, False),
        ("5 GT/s", 16, 6.0, False),
        ("8.0 GT/s PCIe", 16, 12.0, False),
        ("16 GT/s", 16, 24.0, False),
        ("16.0 GT/s PCIe", 8, 12.0, False),
        ("32.0 GT/s PCIe", 16, 48.0, False),
        ("64.0 GT/s PCIe", 16, 96.0, False),
        ("", 0, 12.0, True),
        ("Unknown speed", 16, 12.0, True),
        ("16 GT/s", 0, 24.0, True),
        ("16 GT/s", 255, 24.0, True),
        (None, None, 12.0, True),
    ],
)
def test_pcie_counts_as_in_nccl(speed: str | None, width: int | None, rate: float, noted: bool) -> None:
    """Texts of old and new kernels; generation 3 and 16 lanes where nothing is stated, with a note that names it."""
    topology = parse_nccl_xml(only(gpu_pci(0, place={"link_speed": speed, "link_width": width})))
    assert speeds(topology, "pcie")["gpu0", "cpu0"] == rate
    assert [bus(0) in note for note in topology.notes if "link_speed" in note] == [True] * noted


@pytest.mark.parametrize(
    ("processor", "rate"),
    [
        ({"modelid": "-5"}, 6.0),  # NCCL compares signed numbers
        ({"modelid": "79"}, 6.0),
        ({"modelid": "85"}, 10.0),
        ({"modelid": "143"}, 22.0),
        ({"modelid": "207"}, 40.0),
        (ROME, 16.0),
        ({"arch": "ppc64", "vendor": None, "familyid": None, "modelid": None}, 32.0),
        ({"arch": "arm64", "vendor": None}, 6.0),
        ({"vendor": "CentaurHauls", "familyid": "7", "modelid": "91"}, 9.0),
    ],
)
def test_the_processor_gives_the_rate_between_cpus(processor: dict[str, str | None], rate: float) -> None:
    """NCCL's ``ncclTopoGetInterCpuBw``, each direction by its own end."""
    topology = parse_nccl_xml(system(cpu(0, gpu_pci(0), **processor), cpu(1, gpu_pci(1))))
    assert speeds(topology, "sys") == {("cpu0", "cpu1"): rate, ("cpu1", "cpu0"): 6.0}
    assert not topology.notes


def test_given_rates_replace_the_files_and_nccls() -> None:
    text = machine(4, {(0, 1): 2, (2, 3): 2}).replace('link_speed="8 GT/s"', 'link_speed=""')
    topology = parse_nccl_xml(text, nvlink_gbps=25, pcie_gbps=11, socket_gbps=9)
    assert wire_rates(topology) == {25.0}
    assert set(speeds(topology, "pcie").values()) == {11.0}
    assert set(speeds(topology, "sys").values()) == {9.0}
    assert not topology.notes
    for option in ("nvlink_gbps", "pcie_gbps", "socket_gbps"):
        with pytest.raises(UsageError, match=f"{option} must be .*, got 0"):
            parse_nccl_xml(text, **{option: 0})


@pytest.mark.parametrize(
    ("target", "tclass", "end", "note"),
    [
        (bus(1), GPU, "gpu1", ""),
        (bus(1), "0x038000", "gpu1", ""),
        (bus(1), "0x120000", "gpu1", ""),
        (bus(1), "", "gpu1", ""),
        (bus(1), None, "gpu1", ""),
        (bus(1), "0xffffff", "gpu1", ""),
        (HIDDEN, NVSWITCH, "nvswitch0", ""),
        (HIDDEN, GPU, "nvswitch0", ""),
        (HIDDEN, "0x068001", "cpu0", ""),
        (f"{HIDDEN}.0", None, "nvswitch0", ""),
        ("0000:c0:00.0", NVSWITCH, "nvswitch0", ""),
        ("0000:c0:00.0", "0x088000", "nvswitch0", "of unknown class; taken as an NVSwitch"),
        (None, None, "nvswitch0", "to no target of unknown class"),
        ("0004:04:00.0", "0x068001", "cpu0", ""),
        (bus(0), GPU, None, "gpu0: 2 NVLinks to itself"),
        ("0000:aa:00.0", GPU, None, "gpu0: 2 NVLinks to 0000:aa:00.0, which is none of the GPUs"),
        ("nonsense", GPU, None, "gpu0: 2 NVLinks to nonsense, which is none of the GPUs"),
    ],
)
def test_far_ends_of_bundles(target: str | None, tclass: str | None, end: str | None, note: str) -> None:
    """A GPU, the switch, seen or hidden, the CPU of the GPU, or nothing, which is said."""
    link = element("nvlink", target=target, count=2, tclass=tclass)
    topology = parse_nccl_xml(pair(link))
    assert [dst for src, dst in bundles(topology) if src == "gpu0"] == ([end] if end else [])
    notes = [found for found in topology.notes if "one direction" not in found and "stands for" not in found]
    assert len(notes) == (1 if note else 0)
    assert all(note in found for found in notes)


RANKS = "--gpus count the GPUs of the file from 0"
NUMBERED = "numbered by bus id"
IN_PARTS = [element("gpu", dev=0, sm=100, rank=i, gdr=1, mlopart=i) for i in (0, 1)]
FUSED = [nic_pci("0000:41:00.0", "mlx5_0", None), nic_pci("0000:42:00.0", "mlx5_0+mlx5_1", 0, 200_000)]
PORTS = [nic_pci(f"0000:41:00.{i}", f"mlx5_{i}", i) for i in (0, 1)]
BELOW_GPU = gpu_pci(0).replace("</pci>", f"{pci('0000:55:00.0')}\n</pci>")
LINKED = pci("0000:80:00.0", gpu_pci(0), gpu_pci(1), element("pcilink", target="0000:90:00.0"), device=BRIDGE)

UNCLASSED = pci("0000:80:00.0", gpu_pci(0), gpu_pci(1), device="0x088000")
BOTH = [bus(0), bus(1)]
HERE = f": {bus(0)}, {bus(1)}"

NOTED: dict[str, tuple[str, list[str], list[str]]] = {
    "an unknown processor": (
        system(cpu(0, gpu_pci(0)), cpu(1, gpu_pci(1), arch="x86_64", vendor="Other")),
        BOTH,
        ["not stated; 6 GB/s between CPUs taken (--socket-bandwidth sets it): cpu 1"],
    ),
    **{
        f"{count or 'no'} NVLinks": (
            only(gpu_pci(0, element("nvlink", target=bus(1), count=count, tclass=GPU)), gpu_pci(1)),
            BOTH,
            [f"nvlink without a count above 0; left out: {bus(0)}"],
        )
        for count in ("0", "-3", "many", "")
    },
    "no compute capability": (
        pair(nvlink(bus(1), 1), other=[nvlink(bus(0), 1)], sm=None),
        BOTH,
        [f"sm is not stated; 20 GB/s taken for an NVLink (--nvlink-bandwidth sets it){HERE}"],
    ),
    **{
        f"a second GPU numbered {second}": (
            only(gpu_pci(3, dev=0), gpu_pci(1, dev=second)),
            [bus(1), bus(3)],
            [NUMBERED],
        )
        for second in (None, 0, "x", -1)
    },
    "any order": (only(gpu_pci(0, dev=1, rank=0), gpu_pci(1, dev=0, rank=1)), BOTH[::-1], []),
    "gaps": (only(gpu_pci(4), gpu_pci(5)), [bus(4), bus(5)], [RANKS]),
    "GPUs by class alone": (
        only(pci(bus(0)), pci(bus(1), device="0x030000"), pci("0000:40:00.0", device=NIC)),
        [*BOTH, "0000:40:00.0"],
        [NUMBERED, f"NVLinks are not known; --merge adds them from another description{HERE}"],
    ),
    "one GPU without rank": (
        only(gpu_pci(0), gpu_pci(1, rank=None)),
        BOTH,
        [f"has no rank, so that NCCL leaves the GPU out; kept: {bus(1)}"],
    ),
    "all GPUs without rank": (only(gpu_pci(0, rank=None), gpu_pci(1, rank=None)), BOTH, []),
    "a divided GPU": (only(pci(bus(0), *IN_PARTS)), [bus(0)], ["divided into several gpu elements"]),
    "a net without dev": (only(gpu_pci(0), *FUSED), [bus(0), "0000:42:00.0"], ["without dev"]),
    "two functions of a NIC": (only(gpu_pci(0), *PORTS), [bus(0), "0000:41:00.0"], ["several functions"]),
    "no mask": (
        only(gpu_pci(0)).replace("numaid", 'affinity="all" numaid'),
        [bus(0)],
        ["affinity is not a mask such as 00000000,000fffff; left out: cpu 0"],
    ),
    "unknown classes": (
        only(UNCLASSED, pci("0000:90:00.0", device="0x010802")),
        BOTH,
        [
            "class is unknown or not stated; taken as a PCIe switch, as NCCL does: 0000:80:00.0",
            "class is unknown or not stated; left out: 0000:90:00.0",
        ],
    ),
    "what NCCL passes over": (
        system(cpu(0, BELOW_GPU, element("gpu"), element("fan")), element("rack")),
        [bus(0)],
        [
            "has pci elements below it although it is not a switch; left out, as NCCL does",
            "gpu inside cpu is unknown; skipped, as NCCL does",
            "fan inside cpu is unknown; skipped, as NCCL does",
            "rack inside system is unknown; skipped, as NCCL does",
        ],
    ),
    "joined switches": (only(LINKED), BOTH, ["pcilink joins two PCIe switches in NCCL"]),
    "a NIC of no speed": (
        only(gpu_pci(0), nic_pci("0000:42:00.0", "mlx5_0", 0, -1)),
        [bus(0), "0000:42:00.0"],
        ["speed of a NIC is not above 0; 10 Gb/s taken, as NCCL does: mlx5_0"],
    ),
}


@pytest.mark.parametrize("name", NOTED)
def test_what_nccl_guesses_or_leaves_out_is_noted(name: str) -> None:
    """The GPUs and NICs that are left, by bus id in their order, and one note for each thing."""
    text, busids, notes = NOTED[name]
    topology = parse_nccl_xml(text)
    assert [d.busid for d in topology.devices if d.kind in ("gpu", "nic") and d.busid] == busids
    assert len(topology.notes) == len(notes)
    assert all(part in note for part, note in zip(notes, topology.notes, strict=True)), topology.notes


def test_a_chip_to_chip_link_leads_to_the_cpu() -> None:
    """NCCL states MB/s of one link."""
    topology = parse_nccl_xml(only(gpu_pci(0, element("c2c", bw=40_000, count=10))))
    assert speeds(topology, "c2c") == {("gpu0", "cpu0"): 400.0, ("cpu0", "gpu0"): 400.0}
    dead = parse_nccl_xml(only(gpu_pci(0, element("c2c", bw=40_000, count=0))))
    assert not speeds(dead, "c2c")
    assert sum("c2c without a bw and count" in note for note in dead.notes) == 1


def test_nics_state_adapter_and_speed() -> None:
    """In the order of dev; Mb/s become Gb/s; two ports share a PCIe link and are one NIC, as NCCL counts."""
    nics = [nic_pci("0000:41:00.0", "mlx5_1", 1, 400_000), nic_pci("0000:42:00.0", "mlx5_0", 0, 10_000)]
    for below, found in (
        (nics, [facts(adapter="mlx5_0", gigabits=10), facts(adapter="mlx5_1", gigabits=400)]),
        (PORTS, [facts(adapter="mlx5_0+mlx5_1", gigabits=200)]),
    ):
        topology = parse_nccl_xml(only(gpu_pci(0), *below))
        assert [device.facts for device in topology.devices if device.kind == "nic"] == found


def test_the_ports_of_a_nic_on_a_cpu_add_up_as_they_are_written() -> None:
    """Three times 25.781 GB/s are 77.343, where floats make it 77.34299999999999."""
    nets = [element("net", name="bond0", dev=i, speed=25_000, bandwidth=25.781) for i in range(3)]
    topology = parse_nccl_xml(only(gpu_pci(0), element("nic", *nets)))
    assert speeds(topology, "pcie")["nic0", "cpu0"] == 77.343


def test_cpus_state_what_they_are() -> None:
    """The affinity mask becomes a list as the kernel writes it."""
    topology = parse_nccl_xml(only(gpu_pci(0)).replace("numaid", 'affinity="00000f00,800fffff" numaid'))
    assert topology.device("cpu0").facts == facts(
        arch="x86_64", vendor="GenuineIntel", family=6, model=79, cpus="0-19,31,40-43"
    )
    assert topology.device("cpu0").numa == topology.device("gpu0").numa == 0


@pytest.mark.parametrize("device", ["0x060400", "0x080100"])
def test_bridges_are_switches(device: str) -> None:
    """0x080100 is the data-direct port of a NIC."""
    topology = parse_nccl_xml(only(pci("0000:80:00.0", gpu_pci(0), gpu_pci(1), device=device)))
    assert speeds(topology, "pcie")["gpu0", "pcie0"] == 12.0
    assert not topology.notes


def twice(text: str) -> str:
    return text.replace(bus(1), bus(0))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (twice(pair()), f"line 6: pci busid {bus(0)} occurs twice, first in line 3; a bus id names one"),
        (pair().replace(f'busid="{bus(0)}" ', ""), "line 3: pci has no attribute busid"),
        (pair().replace(bus(0), "07:00.0"), "line 3: pci busid '07:00.0' is not a PCI bus id such as"),
        (pair(element("nvlink", target=bus(1), tclass=GPU)), "line 5: nvlink has no attribute count"),
        (pair(element("nvlink", count=1, tclass=GPU)), "line 5: nvlink has no attribute target"),
        (pair(nvlink(bus(1), 10**30)), "line 5: nvlink count 100000000000000000… is too large"),
        (pair(element("c2c", count=1)), "line 5: c2c has no attribute bw"),
        (pair(nvlink(bus(1), 1, bandwidth="fast")), "line 5: nvlink bandwidth 'fast' must be a number of"),
        (pair(nvlink(bus(1), 1, bandwidth="inf")), "line 5: nvlink bandwidth 'inf' must be a number of GB/s"),
        (pair().replace('numaid="0" ', ""), "line 2: cpu has no attribute numaid"),
        (pair().replace('numaid="0"', 'numaid="x"'), "line 2: cpu numaid must be a NUMA node from -1 to"),
        (system(cpu(0, gpu_pci(0)), cpu(0)), "line 7: cpu numaid 0 occurs twice, first in line 2"),
        (
            system(cpu(0, gpu_pci(0), host_hash="0x1"), cpu(1, host_hash="0x2")),
            "line 7: cpu host_hash '0x2' is of another host than line 2; keep the cpu elements of one",
        ),
        (system(*(cpu(i) for i in range(MOST_CPUS + 1))), f"{MOST_CPUS + 1} cpu elements are more than the"),
        (only(gpu_pci(0), nic_pci("0:1:0", "e", 0, 10**10)), "line 8: net speed 10000000000 Mb/s is above"),
        (only(), "the file has no GPU: no pci element is below a cpu"),
        (only(pci("0:1:0", device=NIC)), "the file has no GPU: none of its 1 pci elements has class 0x03"),
        (only(pci("0:1:0", **{"class": None})), "the file does not state which of its 1 pci elements are"),
        (pair().replace('version="1"', 'version="3"'), "line 1: system version '3' is unknown; use 1"),
        (pair().replace(' version="1"', ""), "line 1: system has no attribute version"),
        ("<graphs version='1'/>", "line 1: graphs: this is an NCCL graph file"),
        ("<algo/>", "line 1: algo: this is an MSCCL algorithm"),
        ("<html/>", "line 1: the outermost element is html, but system in a topology file of NCCL"),
        (pair()[:-1], "line 10: the XML text ends too early, inside"),
        (pair()[: pair().index("gdr")], "line 4: the XML text ends too early, inside"),
        *(
            (
                pair().replace("<system ", f'<system peer_access="{times}" '),
                f"line 1: system peer_access must list GPUs and seconds such as 8:0.0037, got '{times}'",
            )
            for times in ("8", "8:fast", "8:0.1:2", "x:0.1")
        ),
    ],
)
def test_what_stops_nccl_is_one_line_with_element_and_attribute(text: str, says: str) -> None:
    with refused(TopologyError, begins=says):
        parse_nccl_xml(text)


def test_load_recognises_xml_and_names_the_machine_after_its_file(tmp_path: Path) -> None:
    """Unless the file states a name; errors begin with the file's."""
    path = tmp_path / "node7.txt"
    path.write_text(pair())
    assert topoplan.load(path).name == "node7"
    path.write_text(pair().replace("version", 'name="DGX" version'))
    assert topoplan.load(path).name == "DGX"
    assert topoplan.load(pair()).name == "nccl-xml"
    path.write_text(twice(pair()))
    with pytest.raises(TopologyError, match=f"node7.txt: line 6: pci busid {bus(0)} occurs twice"):
        topoplan.load(path)


BOMB = '<!DOCTYPE lolz [<!ENTITY a "lol"><!ENTITY b "&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;">]><system>&c;</system>'
EXTERNAL = '<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]>\n<system version="&x;"/>'
MANY = " ".join(f"b{i}=''" for i in range(MOST_ATTRIBUTES + 1))


def test_elements_attributes_and_lines_are_read() -> None:
    """Comments, declarations, byte order marks and white space leave no trace."""
    start = "\ufeff\n<?xml version='1.0' encoding='utf-16'?>\n<!-- a -->"
    text = f"{start}<a b='1' c=\"&lt;\">\n <d/><!-- - -->\n <e></e>\n</a>\n"
    assert parse_xml(text) == XmlElement(
        "a", {"b": "1", "c": "<"}, (XmlElement("d", line=4), XmlElement("e", line=5)), 3
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "line 1: document type declarations and entities are refused"),
        (EXTERNAL, "line 1: document type declarations and entities are refused"),
        ('\n<a>\n<b c="&x;"/></a>', "line 3: the XML text is not well-formed (undefined entity)"),
        ("<a>\n<b>\n", "line 3: the XML text ends too early, inside <b>; give the whole file"),
        ("<a>\n<b c='1", "line 2: the XML text ends too early, inside <a>; give the whole file"),
        ("<a>\n<b></a>", "line 2: the XML text is not well-formed (mismatched tag), inside <b>"),
        ("<a/><a/>", "line 1: the XML text is not well-formed (junk after document element)"),
        ("<a>\nhello</a>", "line 2: text 'hello' between elements"),
        ("<a b='1' b='2'/>", "line 1: the XML text is not well-formed (duplicate attribute)"),
        ("<a" * 3, "line 1: the XML text is not well-formed"),
        ("", "line 1: the XML text ends too early; give the whole file"),
        ("<a b='&#10;'/>", "line 1: a 'b' is longer than 4096 characters or cannot be printed"),
        (f"<a b='{'x' * LONGEST_VALUE}'/>", "line 1: a 'b' is longer than 4096 characters"),
        (f"<a{'b' * LONGEST_VALUE}/>", "line 1: the name of an element is too long"),
        ("\n<a>" * (DEEPEST + 1), f"line {DEEPEST + 2}: elements are nested more than {DEEPEST} deep"),
        ("<a>" + "<b/>" * MOST_ELEMENTS, f"line 1: more than {MOST_ELEMENTS} elements"),
        (f"<a {MANY}/>", f"line 1: an element has more than {MOST_ATTRIBUTES} attributes"),
        ("<a>" + " " * LARGEST_TEXT + "</a>", f"the XML text has {LARGEST_TEXT + 7} bytes"),
    ],
)
def test_what_is_no_plain_xml_is_refused_in_one_line(text: str, says: str) -> None:
    """Entity bombs and external entities, truncated and endless texts: the line says where."""
    with refused(TopologyError, begins=says):
        parse_xml(text)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from("<>/='\"!-[]&;ab \n?\x00\ud800ü"), max_size=60))
def test_any_text_is_a_tree_or_one_line(text: str) -> None:
    try:
        root = parse_xml(text)
    except TopologyError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert 1 <= root.line <= 1 + text.count("\n")
        assert f"<{root.name}" in text
