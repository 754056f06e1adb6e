"""The library's machines with NVIDIA GPUs: DGX servers, cloud instances and a box without NVLink."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from topoplan.hosts.link_rates import (
    A100,
    B200,
    H100,
    P100,
    PCIE_X16,
    PEER_ACCESS,
    SOCKET,
    UNKNOWN,
    V100,
)
from topoplan.machines.boxes import (
    PCIE_SOURCE,
    HostSide,
    direct_box,
    hybrid_cube_mesh,
    nvswitch_box,
    switches,
)
from topoplan.topology import Topology

SKYLAKE = SOCKET["Skylake to Ice Lake"]

NVLINK_SOURCE = (
    "NVLink: NVIDIA white papers, per link and direction 20 (P100), 25 (V100, A100, H100), 50 (B200)"
)

_DGX_1_SWITCHES = switches([[f"gpu{2 * i}", f"gpu{2 * i + 1}", f"nic{i}"] for i in range(4)], cpus=2)
_DGX_1_SHAPE = "shape: NVIDIA DGX-1 system architecture white paper and its nvidia-smi topo -m"


def dgx_1p() -> Topology:
    """NVIDIA DGX-1 with 8 P100: 16 NVLinks, four for each GPU."""
    host = HostSide(_DGX_1_SWITCHES, P100.pcie, P100.socket, "Xeon E5-2698 v4", "ConnectX-4 100 Gb/s")
    source = (
        f"{NVLINK_SOURCE}; {PCIE_SOURCE}, BDW_QPI_BW 6.0 (Blink, MLSys 2020, figure 15, measured 5.4 for "
        f"PCIe rings); {_DGX_1_SHAPE}"
    )
    return direct_box("dgx-1p", host, gpu=P100, gpus=8, pairs=hybrid_cube_mesh(), source=source)


def dgx_1v() -> Topology:
    """NVIDIA DGX-1 with 8 V100: 24 NVLinks, six for each GPU, eight pairs doubled."""
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
    """NVIDIA DGX-2: 16 V100 with 6 NVLinks each to 12 NVSwitch chips; two levels of PCIe switches."""
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
    """NVIDIA DGX A100: 8 A100 with 12 NVLinks each; a PCIe switch for two GPUs and two NICs."""
    groups = [[f"gpu{2 * i}", f"gpu{2 * i + 1}", f"nic{2 * i}", f"nic{2 * i + 1}"] for i in range(4)]
    host = HostSide(switches(groups, cpus=2), A100.pcie, A100.socket, "EPYC 7742", "ConnectX-6 200 Gb/s")
    source = (
        f"{NVLINK_SOURCE}; {PCIE_SOURCE}, AMD_BW 16; PCIe shape: NVIDIA/nccl issue 1505, sub-switches of one "
        "chip flattened as NCCL does, the four NUMA nodes of a socket taken as one CPU"
    )
    return nvswitch_box("dgx-a100", host, gpu=A100, gpus=8, source=source)


_OWN_SWITCH = switches([[f"gpu{i}", f"nic{i}"] for i in range(8)], cpus=2)


def dgx_h100() -> Topology:
    """NVIDIA DGX H100: 8 H100 with 18 NVLinks each; every GPU shares a PCIe switch with its NIC."""
    host = HostSide(_OWN_SWITCH, H100.pcie, H100.socket, "Xeon Platinum 8480C", "ConnectX-7 400 Gb/s")
    source = (
        f"{NVLINK_SOURCE}; {PCIE_SOURCE}, SRP_QPI_BW 22; PCIe shape: HGX boards of NVIDIA/nccl issue 1264 "
        "and bytedance/flux issue 14 (each GPU is PIX or PXB to one NIC only); NVLink SHARP is not used"
    )
    return nvswitch_box("dgx-h100", host, gpu=H100, gpus=8, source=source)


def dgx_b200() -> Topology:
    """NVIDIA DGX B200: 8 B200 with 18 NVLinks each; every GPU shares a PCIe switch with its NIC."""
    host = HostSide(_OWN_SWITCH, B200.pcie, B200.socket, "Xeon Platinum 8570", "ConnectX-7 400 Gb/s")
    source = (
        f"{NVLINK_SOURCE}; {PCIE_SOURCE}, ERP_QPI_BW 40; PCIe shape: vllm-project/vllm issue 16336 "
        "(each GPU is PXB to one NIC only); NVLink SHARP is not used"
    )
    return nvswitch_box("dgx-b200", host, gpu=B200, gpus=8, source=source)


def v100x4() -> Topology:
    """Four V100 as AWS rents them (p3.8xlarge): one quad of the DGX-1V's mesh, on one CPU."""
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
    """Eight GPUs without NVLink: one PCIe switch of generation 4 for four GPUs on each of two CPUs."""
    parents = switches([["gpu0", "gpu1", "gpu2", "gpu3", "nic0"], [f"gpu{i}" for i in range(4, 8)]], cpus=2)
    host = HostSide(parents, PCIE_X16[4], SKYLAKE, "Xeon, Ice Lake, 36 cores", "mlx5")
    source = f"{PCIE_SOURCE}, SKL_QPI_BW 10; shape: NVIDIA/nccl-tests issue 307"
    notes = [
        "assumes that GPUs reach each other over PCIe; GeForce drivers stage through host memory instead"
    ]
    return direct_box("pcie-x8", host, gpu=UNKNOWN, gpus=8, pairs={}, source=source, notes=notes)


def nvlink_x4() -> Topology:
    """Four A100 with four NVLinks to each other, two on each CPU at root ports of their own."""
    parents = {"gpu0": "cpu0", "gpu1": "cpu0", "nic0": "cpu0", "gpu2": "cpu1", "gpu3": "cpu1"}
    host = HostSide(parents, A100.pcie, SKYLAKE, "Xeon, Ice Lake, 24 cores", "mlx5")
    pairs = dict.fromkeys(combinations(range(4), 2), 4)
    source = (
        f"{NVLINK_SOURCE}; {PCIE_SOURCE}, SKL_QPI_BW 10; shape: nvidia-smi topo -m of node della-i16g1, "
        "Princeton Research Computing"
    )
    return direct_box("nvlink-x4", host, gpu=A100, gpus=4, pairs=pairs, source=source)
