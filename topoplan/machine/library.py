"""Generate the machines of the library, and write them to files.

Boxes are those of `topoplan.machine.small_machines`, which also has the machines that people build themselves. An AMD
package holds two dies (GCDs), and each die is a GPU; there the channel names nvlink and pcie mean the links between
dies and the path to the CPU.

A test checks that the files in ``topologies/`` equal the generated ones. To write them again::

    python -c "from topoplan.machine.library import write_library; write_library('topologies')"
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from topoplan.machine.hardware import (
    A100,
    B200,
    H100,
    P100,
    PCIE_X16,
    PEER_ACCESS,
    SOCKET,
    UNKNOWN,
    V100,
    GpuGeneration,
)
from topoplan.machine.host_topology import both_ways
from topoplan.machine.small_machines import (
    PCIE_SOURCE,
    SERVER,
    SMALL_MACHINES,
    HostSide,
    direct_box,
    hybrid_cube_mesh,
    nvswitch_box,
    switches,
)
from topoplan.machine.topology import Device, Topology

SKYLAKE = SOCKET["Skylake to Ice Lake"]

NVLINK_SOURCE = (
    "NVLink: NVIDIA white papers, per link and direction 20 (P100), 25 (V100, A100, H100), 50 (B200)"
)

_DGX_1_SWITCHES = switches([[f"gpu{2 * i}", f"gpu{2 * i + 1}", f"nic{i}"] for i in range(4)], cpus=2)
_DGX_1_SHAPE = "shape: NVIDIA DGX-1 system architecture white paper and its nvidia-smi topo -m"


def dgx_1p() -> Topology:
    """Return the NVIDIA DGX-1 with 8 P100: 16 NVLinks, four for each GPU."""
    host = HostSide(_DGX_1_SWITCHES, P100.pcie, P100.socket, "Xeon E5-2698 v4", "ConnectX-4 100 Gb/s")
    source = (
        f"{NVLINK_SOURCE}; {PCIE_SOURCE}, BDW_QPI_BW 6.0 (Blink, MLSys 2020, figure 15, measured 5.4 for "
        f"PCIe rings); {_DGX_1_SHAPE}"
    )
    return direct_box("dgx-1p", host, gpu=P100, gpus=8, pairs=hybrid_cube_mesh(), source=source)


def dgx_1v() -> Topology:
    """Return the NVIDIA DGX-1 with 8 V100: 24 NVLinks, six for each GPU, eight pairs doubled."""
    host = HostSide(_DGX_1_SWITCHES, V100.pcie, V100.socket, "Xeon E5-2698 v4", "ConnectX-4 100 Gb/s")
    pairs = hybrid_cube_mesh([(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)])
    source = (
        f"{NVLINK_SOURCE}; {PCIE_SOURCE}, QPI_WIDTH 8 of older releases, which agrees with Blink, MLSys "
        "2020: AllReduce over PCIe rings of 3, 4, 5 GPUs at 5.99, 5.46, 4.92 GB/s (figure 16) is 8.0, 8.2, "
        "7.9 GB/s on the wire, broadcast (figure 14) 8.6; peer access: fitted to figure 26 there, taken as "
        f"broadcasts of 500 MB; {_DGX_1_SHAPE}"
    )
    box = direct_box("dgx-1v", host, gpu=V100, gpus=8, pairs=pairs, source=source)
    return replace(box, peer_access=PEER_ACCESS)


def dgx_2() -> Topology:
    """Return the NVIDIA DGX-2: 16 V100 with 6 NVLinks each to 12 NVSwitch chips; two levels of PCIe switches."""
    parents: dict[str, str] = {}
    for quad in range(4):
        upper = f"pcie{3 * quad}"
        parents[upper] = f"cpu{quad // 2}"
        for side in range(2):
            first, leaf = 4 * quad + 2 * side, f"pcie{3 * quad + 1 + side}"
            parents[leaf] = upper
            parents |= dict.fromkeys((f"gpu{first}", f"gpu{first + 1}", f"nic{2 * quad + side}"), leaf)
    host = HostSide(parents, V100.pcie, SKYLAKE, "Xeon Platinum 8168", "ConnectX-5 100 Gb/s")
    source = f"{NVLINK_SOURCE}; {PCIE_SOURCE}, SKL_QPI_BW 10; PCIe shape: NVIDIA/nccl-tests issue 78"
    return nvswitch_box("dgx-2", host, gpu=V100, gpus=16, source=source)


def dgx_a100() -> Topology:
    """Return the NVIDIA DGX A100: 8 A100 with 12 NVLinks each; a PCIe switch for two GPUs and two NICs."""
    groups = [[f"gpu{2 * i}", f"gpu{2 * i + 1}", f"nic{2 * i}", f"nic{2 * i + 1}"] for i in range(4)]
    host = HostSide(switches(groups, cpus=2), A100.pcie, A100.socket, "EPYC 7742", "ConnectX-6 200 Gb/s")
    source = (
        f"{NVLINK_SOURCE}; {PCIE_SOURCE}, AMD_BW 16; PCIe shape: NVIDIA/nccl issue 1505, sub-switches of one "
        "chip flattened as NCCL does, the four NUMA nodes of a socket taken as one CPU"
    )
    return nvswitch_box("dgx-a100", host, gpu=A100, gpus=8, source=source)


_OWN_SWITCH = switches([[f"gpu{i}", f"nic{i}"] for i in range(8)], cpus=2)


def dgx_h100() -> Topology:
    """Return the NVIDIA DGX H100: 8 H100 with 18 NVLinks each; every GPU shares a PCIe switch with its NIC."""
    host = HostSide(_OWN_SWITCH, H100.pcie, H100.socket, "Xeon Platinum 8480C", "ConnectX-7 400 Gb/s")
    source = (
        f"{NVLINK_SOURCE}; {PCIE_SOURCE}, SRP_QPI_BW 22; PCIe shape: HGX boards of NVIDIA/nccl issue 1264 "
        "and bytedance/flux issue 14 (each GPU is PIX or PXB to one NIC only); NVLink SHARP is not used"
    )
    return nvswitch_box("dgx-h100", host, gpu=H100, gpus=8, source=source)


def dgx_b200() -> Topology:
    """Return the NVIDIA DGX B200: 8 B200 with 18 NVLinks each; every GPU shares a PCIe switch with its NIC."""
    host = HostSide(_OWN_SWITCH, B200.pcie, B200.socket, "Xeon Platinum 8570", "ConnectX-7 400 Gb/s")
    source = (
        f"{NVLINK_SOURCE}; {PCIE_SOURCE}, ERP_QPI_BW 40; PCIe shape: vllm-project/vllm issue 16336 "
        "(each GPU is PXB to one NIC only); NVLink SHARP is not used"
    )
    return nvswitch_box("dgx-b200", host, gpu=B200, gpus=8, source=source)


PCIE_6 = 2 * PCIE_X16[5]
"""GB/s of a 16-lane PCIe link of generation 6, doubled as NCCL doubles each generation."""

SHARP_SOURCE = "NVLink SHARP, in NVSwitch from the third generation on, is not used unless it is asked for"


def dgx_b300() -> Topology:
    """Return the NVIDIA DGX B300: 8 B300 with 18 NVLinks each; every GPU shares a PCIe switch with its NIC."""
    host = HostSide(_OWN_SWITCH, PCIE_6, B200.socket, "Xeon 6776P", "ConnectX-8 800 Gb/s", 800)
    source = (
        f"NVLink: 50 GB/s per link and direction, 1.8 TB/s per GPU both ways, and NICs: NVIDIA DGX B300 datasheet; "
        f"{PCIE_SOURCE}, generation 6 twice that, ERP_QPI_BW 40; PCIe shape: as DGX B200, each GPU behind the switch "
        f"of its ConnectX-8; {SHARP_SOURCE}"
    )
    return nvswitch_box("dgx-b300", host, gpu=replace(B200, name="B300"), gpus=8, source=source)


def _rack(name: str, gpu: GpuGeneration, host: HostSide, source: str) -> Topology:
    """Return 18 trays of two Grace CPUs with two GPUs each, all 72 GPUs on one NVLink domain; trays share no PCIe."""
    box = nvswitch_box(name, host, gpu=gpu, gpus=72, source=source)
    links = [
        replace(link, channel="c2c", bandwidth=C2C)
        if link.channel == "pcie" and {link.src[:3], link.dst[:3]} == {"gpu", "cpu"}
        else link
        for link in box.links
    ]
    for tray in range(18):
        links += both_ways(f"cpu{2 * tray}", f"cpu{2 * tray + 1}", "sys", ARM)
    return replace(box, links=tuple(links))


ARM = 6.0
"""GB/s between two CPUs of a tray, as NCCL counts it for ARM."""

C2C = 225.0
"""GB/s per direction between a Blackwell GPU and its Grace CPU: half of NVLink-C2C's 900 GB/s both ways."""

_RACK_SOURCE = (
    "NVLink: 18 links of 50 GB/s per direction for each GPU, 130 TB/s in the domain both ways, NVLink-C2C 900 GB/s "
    "both ways for two GPUs, 18 trays of 2 Grace CPUs and 4 GPUs"
)


def gb200_nvl72() -> Topology:
    """Return the NVIDIA GB200 NVL72: 72 B200 in one NVLink domain, each with a NIC on the PCIe of its Grace CPU."""
    parents = {f"{kind}{i}": f"cpu{i // 2}" for i in range(72) for kind in ("gpu", "nic")}
    host = HostSide(parents, PCIE_X16[5], 0.0, "Grace", "ConnectX-7 400 Gb/s", 400)
    source = f"{_RACK_SOURCE}: NVIDIA GB200 NVL72 datasheet; {PCIE_SOURCE}, ARM_BW 6; {SHARP_SOURCE}"
    return _rack("gb200-nvl72", replace(B200, name="GB200"), host, source)


def gb300_nvl72() -> Topology:
    """Return the NVIDIA GB300 NVL72: 72 B300, each with a ConnectX-8 NIC whose PCIe switch holds the GPU."""
    parents: dict[str, str] = {}
    for i in range(72):
        parents |= {f"pcie{i}": f"cpu{i // 2}", f"gpu{i}": f"pcie{i}", f"nic{i}": f"pcie{i}"}
    host = HostSide(parents, PCIE_6, 0.0, "Grace", "ConnectX-8 800 Gb/s", 800)
    source = (
        f"{_RACK_SOURCE}: NVIDIA GB300 NVL72 datasheet; {PCIE_SOURCE}, generation 6 twice that, ARM_BW 6; PCIe "
        f"shape: each GPU behind the switch of its ConnectX-8; NVLink-C2C is left out; {SHARP_SOURCE}"
    )
    return _rack("gb300-nvl72", replace(B200, name="GB300"), host, source)


def p4d() -> Topology:
    """Return the AWS p4d.24xlarge: 8 A100 on NVSwitch, a NIC of 100 Gb/s for two of them."""
    groups = [[f"gpu{2 * i}", f"gpu{2 * i + 1}", f"nic{i}"] for i in range(4)]
    host = HostSide(switches(groups, cpus=2), A100.pcie, SKYLAKE, "Xeon Platinum 8275CL", "EFA 100 Gb/s", 100)
    source = (
        f"{NVLINK_SOURCE}; {PCIE_SOURCE}, SKL_QPI_BW 10; NICs: 4 x 100 Gb/s, AWS, Amazon EC2 P4 instances; PCIe shape: "
        "aws-ofi-nccl, topology/p4d-24xl-topo.xml"
    )
    return nvswitch_box("p4d.24xlarge", host, gpu=A100, gpus=8, source=source)


def p5() -> Topology:
    """Return the AWS p5.48xlarge: 8 H100 on NVSwitch, each with four NICs of 100 Gb/s on its PCIe switch."""
    groups = [[f"gpu{i}", *(f"nic{4 * i + j}" for j in range(4))] for i in range(8)]
    host = HostSide(switches(groups, cpus=2), H100.pcie, A100.socket, "EPYC 7R13", "EFA 100 Gb/s", 100)
    source = (
        f"{NVLINK_SOURCE}; {PCIE_SOURCE}, AMD_BW 16; NICs: 32 x 100 Gb/s, AWS, Amazon EC2 P5 instances; PCIe shape: "
        f"aws-ofi-nccl, topology/p5.48xl-topo.xml; {SHARP_SOURCE}"
    )
    return nvswitch_box("p5.48xlarge", host, gpu=H100, gpus=8, source=source)


def v100x4() -> Topology:
    """Return four V100 as AWS rents them (p3.8xlarge): one quad of the DGX-1V's mesh, on one CPU."""
    parents = switches([["gpu0", "gpu1"], ["gpu2", "gpu3"]], cpus=1)
    host = HostSide(parents, V100.pcie, V100.socket, "Xeon E5-2686 v4")
    pairs = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 2}
    source = (
        f"{NVLINK_SOURCE}; NVLink shape: nvidia-smi topo -m of AWS p3.8xlarge; {PCIE_SOURCE}; PCIe shape: "
        "not visible in the virtual machine, taken from the half DGX-1V that it is, as is the time of switching "
        "peer access; its NIC is left out"
    )
    box = direct_box("v100x4", host, gpu=V100, gpus=4, pairs=pairs, source=source)
    return replace(box, peer_access=((4, PEER_ACCESS[0][1]),))


def pcie_x8() -> Topology:
    """Return eight GPUs without NVLink: one PCIe switch of generation 4 for four GPUs on each of two CPUs."""
    parents = switches([["gpu0", "gpu1", "gpu2", "gpu3", "nic0"], [f"gpu{i}" for i in range(4, 8)]], cpus=2)
    host = HostSide(parents, PCIE_X16[4], SKYLAKE, "Xeon, Ice Lake, 36 cores", "mlx5")
    source = f"{PCIE_SOURCE}, SKL_QPI_BW 10; shape: NVIDIA/nccl-tests issue 307"
    notes = [
        "assumes that GPUs reach each other over PCIe; GeForce drivers stage through host memory instead"
    ]
    return direct_box("pcie-x8", host, gpu=UNKNOWN, gpus=8, pairs={}, source=source, notes=notes)


def nvlink_x4() -> Topology:
    """Return four A100 with four NVLinks to each other, two on each CPU at root ports of their own."""
    parents = {"gpu0": "cpu0", "gpu1": "cpu0", "nic0": "cpu0", "gpu2": "cpu1", "gpu3": "cpu1"}
    host = HostSide(parents, A100.pcie, SKYLAKE, "Xeon, Ice Lake, 24 cores", "mlx5")
    pairs = dict.fromkeys(combinations(range(4), 2), 4)
    source = (
        f"{NVLINK_SOURCE}; {PCIE_SOURCE}, SKL_QPI_BW 10; shape: nvidia-smi topo -m of node della-i16g1, "
        "Princeton Research Computing"
    )
    return direct_box("nvlink-x4", host, gpu=A100, gpus=4, pairs=pairs, source=source)


FABRIC_SOURCE = "Infinity Fabric: 50 GB/s per link and direction, ROCm documentation, MI250 microarchitecture"


def mi250() -> Topology:
    """Return a server with 16 dies (GCDs) of 8 AMD MI250 without a switch: 7 links a die, unevenly to 3 or 4 others."""
    pairs = (
        dict.fromkeys([(2 * i, 2 * i + 1) for i in range(8)], 4)
        | dict.fromkeys([(0, 4), (3, 7), (8, 12), (11, 15)], 2)
        | dict.fromkeys([(0, 2), (1, 2), (1, 3), (1, 5), (2, 6), (4, 12), (5, 13), (5, 14)], 1)
        | dict.fromkeys([(6, 13), (6, 14), (7, 15), (8, 10), (9, 10), (9, 11), (9, 13), (10, 14)], 1)
    )
    die = GpuGeneration("MI250 GCD", links=7, nvlink=50.0, pcie=PCIE_X16[4] / 2, socket=SOCKET["Zen 1 to 2"])
    groups = [[*(f"gpu{4 * i + j}" for j in range(4)), f"nic{2 * i}", f"nic{2 * i + 1}"] for i in range(4)]
    host = HostSide(switches(groups, cpus=2), PCIE_X16[4], die.socket, "EPYC, Zen 2", "ConnectX-6 200 Gb/s")
    source = (
        f"{FABRIC_SOURCE}; links and PCIe shape: RCCL, tools/topo_expl/models/topo_16p1h.xml, sub-switches of one "
        f"chip flattened as NCCL does, the two NUMA nodes of a socket taken as one CPU; {PCIE_SOURCE}, AMD_BW 16; "
        "a die has 8 lanes"
    )
    box = direct_box("mi250", host, gpu=die, gpus=16, pairs=pairs, source=source)
    return replace(
        box,
        links=tuple(
            replace(link, bandwidth=die.pcie)
            if link.channel == "pcie" and "gpu" in link.src + link.dst
            else link
            for link in box.links
        ),
        notes=("nvlink names the channel between GPUs: here it is AMD Infinity Fabric",),
    )


def mi250x() -> Topology:
    """Return a Frontier node: 8 dies (GCDs) of 4 AMD MI250X, joined by 1, 2 or 4 Infinity Fabric links each."""
    pairs = (
        dict.fromkeys([(0, 1), (2, 3), (4, 5), (6, 7)], 4)
        | dict.fromkeys([(0, 6), (2, 4)], 2)
        | dict.fromkeys([(0, 2), (1, 3), (1, 5), (3, 7), (4, 6), (5, 7)], 1)
    )
    die = GpuGeneration("MI250X GCD", links=8, nvlink=50.0, pcie=36.0, socket=0.0)
    host = HostSide({f"gpu{i}": "cpu0" for i in range(8)}, die.pcie, die.socket, "EPYC 7A53")
    source = (
        f"{FABRIC_SOURCE}; 4 links in a package, 2 or 1 between packages, 36 GB/s to the CPU: OLCF Frontier User "
        "Guide; "
        "neighbours from RCCL, tools/topo_expl/models/topo_8p_90a_1.xml; 0-1 has 4, 0-6 has 2, 0-2 has 1: "
        "Pearson, arXiv 2302.14827; other counts from the eight ports of a die (even: 4+2+1 and the CPU; "
        "odd: 4+1+1, the CPU and a NIC, at PCIe generation 4 x16, effective 24 GB/s)"
    )
    notes = [
        "nvlink and pcie name the channels between GPUs and to the CPU: here both are AMD Infinity Fabric"
    ]
    box = direct_box("mi250x", host, gpu=die, gpus=8, pairs=pairs, source=source, notes=notes)
    nics = [Device(f"nic{i}", "nic", SERVER, model="Slingshot 200 Gb/s") for i in range(4)]
    plugs = [link for i in range(4) for link in both_ways(f"nic{i}", f"gpu{2 * i + 1}", "pcie", PCIE_X16[4])]
    return replace(box, devices=(*box.devices, *nics), links=(*box.links, *plugs))


def mi300x() -> Topology:
    """Return a server with 8 AMD MI300X, a link of Infinity Fabric from each to every other."""
    gpu = GpuGeneration("MI300X", links=7, nvlink=64.0, pcie=PCIE_X16[5], socket=SOCKET["Zen 1 to 2"])
    host = HostSide(_OWN_SWITCH, gpu.pcie, gpu.socket, "EPYC 9654", "ConnectX-7 400 Gb/s")
    source = (
        "Infinity Fabric: 64 GB/s per link and direction, 896 GB/s both ways to seven others, AMD Instinct MI300X "
        f"platform data sheet; {PCIE_SOURCE}, AMD_BW 16; PCIe shape: a NIC and a GPU on each switch, ROCm "
        "documentation, MI300X system optimisation"
    )
    notes = ["nvlink names the channel between GPUs: here it is AMD Infinity Fabric"]
    pairs = dict.fromkeys(combinations(range(8), 2), 1)
    return direct_box("mi300x", host, gpu=gpu, gpus=8, pairs=pairs, source=source, notes=notes)


LIBRARY = {
    "dgx-1p": dgx_1p,
    "dgx-1v": dgx_1v,
    "dgx-2": dgx_2,
    "dgx-a100": dgx_a100,
    "dgx-b200": dgx_b200,
    "dgx-b300": dgx_b300,
    "dgx-h100": dgx_h100,
    "gb200-nvl72": gb200_nvl72,
    "gb300-nvl72": gb300_nvl72,
    "mi250": mi250,
    "mi250x": mi250x,
    "mi300x": mi300x,
    "nvlink-x4": nvlink_x4,
    "p4d.24xlarge": p4d,
    "p5.48xlarge": p5,
    "pcie-x8": pcie_x8,
    "v100x4": v100x4,
    **SMALL_MACHINES,
}
"""Generator of each machine of the library."""


def write_library(folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write every machine of the library as ``<name>.json`` and return the paths."""
    paths = []
    for name, generate in LIBRARY.items():
        path = Path(folder) / f"{name}.json"
        path.write_text(generate().to_json(), encoding="utf-8")
        paths.append(path)
    return tuple(paths)
