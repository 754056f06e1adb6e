"""Made-up outputs of tools that people run beside a machine: matrices, trees, files of cables and reports of jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import topoplan
from tests.support.text_readers import Reader, decoded, explained
from topoplan.operate.calibration.calibrated_topology import calibrated
from topoplan.operate.calibration.pair_results import measured_rates
from topoplan.reading.load import load_text
from topoplan.reading.nccl.perf_json import parse_perf_runs

TOPO = """\
\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity
GPU0\t X \tPHB\tPHB\tPHB\t0-15
GPU1\tPHB\t X \tPHB\tPHB\t0-15
NIC0\tPHB\tPHB\t X \tPHB
NIC1\tPHB\tPHB\tPHB\t X

NIC Legend:

  NIC0: rocep1s0f0
  NIC1: roceP2p1s0f1
"""

ACCESS = "\tGPU0\tGPU1\nGPU0\tX\tCNS\nGPU1\tCNS\tX\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"

PORTS = "rocep1s0f0 port 1 ==> enp1s0f0np0 (Down)\nroceP2p1s0f1 port 1 ==> enP2p1s0f1np1 (Up)\n"

P2P = """\
[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]
Device: 0, NVIDIA RTX A, pciBusID: 3, pciDeviceID: 0, pciDomainID:0
Device: 1, NVIDIA RTX A, pciBusID: 4, pciDeviceID: 0, pciDomainID:0
P2P Connectivity Matrix
     D\\D     0     1
     0\t     1     1
     1\t     1     1
Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)
   D\\D     0      1
     0 812.10  11.20
     1  11.10 813.00
Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
   D\\D     0      1
     0 900.00  51.20
     1   2.60 901.00
Unidirectional P2P=Enabled Bandwidth (P2P Reads) Matrix (GB/s)
   D\\D     0      1
     0 900.00  50.10
     1  49.90 901.00
Bidirectional P2P=Enabled Bandwidth Matrix (GB/s)
   D\\D     0      1
     0 900.00  99.90
     1  99.80 901.00
P2P=Enabled Latency (P2P Writes) Matrix (us)
   GPU     0      1
     0   1.50   1.30
     1   1.40   1.50
"""

NVBANDWIDTH = """\
nvbandwidth Version: v0.8
node1
Device 0: NVIDIA A (00000000:03:00)
Device 1: NVIDIA A (00000000:04:00)

Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0     55.30     55.20

SUM host_to_device_memcpy_ce 110.50

Running device_to_device_memcpy_read_ce.
memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0       N/A     41.00
 1     40.00       N/A

SUM device_to_device_memcpy_read_ce 81.00

Running device_to_device_memcpy_write_ce.
memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)
           0         1
 0       N/A      2.60
 1     39.00       N/A

SUM device_to_device_memcpy_write_ce 41.60

Running device_to_device_bidirectional_memcpy_read_ce.
Waived:
"""


def nvbandwidth_json(*tests: dict[str, object]) -> str:
    return json.dumps({"nvbandwidth": {"version": "v0.8", "testcases": list(tests)}}, indent=1)


READ = {
    "name": "device_to_device_memcpy_read_ce",
    "status": "Passed",
    "bandwidth_description": "memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)",
    "bandwidth_matrix": [["N/A", "41"], ["40", "N/A"]],
    "sum": 81,
}


def pci_block(
    busid: str,
    what: str,
    *,
    most: tuple[str, int] | None = None,
    now: tuple[str, int] | None = None,
    buses: tuple[str, str] | None = None,
) -> str:
    """Return the lines of a device in ``lspci -vv``: rates in GT/s and lanes, at most and now; buses below a bridge."""
    lines = [f"{busid} {what}", "\tNUMA node: 0"]
    if buses:
        lines.append(f"\tBus: primary=00, secondary={buses[0]}, subordinate={buses[1]}, sec-latency=0")
    for name, pair in (("Cap", most), ("Sta", now or most)):
        if pair:
            lines.append(f"\t\tLnk{name}:\tSpeed {pair[0]}GT/s, Width x{pair[1]}")
    return "\n".join(lines) + "\n\n"


GEN5 = ("32", 16)
LSPCI = "".join(
    (
        pci_block("00:01.0", "PCI bridge: Intel Root Port (rev 11)", most=GEN5, buses=("01", "05")),
        pci_block("01:00.0", "PCI bridge: Broadcom / LSI PEX890xx", most=GEN5, buses=("02", "05")),
        pci_block(
            "02:00.0", "PCI bridge: Broadcom / LSI PEX890xx", most=GEN5, now=("2.5", 16), buses=("03", "03")
        ),
        pci_block(
            "02:01.0", "PCI bridge: Broadcom / LSI PEX890xx", most=GEN5, now=("32", 8), buses=("04", "04")
        ),
        pci_block("02:02.0", "PCI bridge: Broadcom / LSI PEX890xx", most=GEN5, buses=("05", "05")),
        pci_block(
            "03:00.0", "3D controller: NVIDIA Corporation GB202 [RTX A] (rev a1)", most=GEN5, now=("2.5", 16)
        ),
        pci_block(
            "04:00.0", "3D controller: NVIDIA Corporation GB202 [RTX A] (rev a1)", most=GEN5, now=("32", 8)
        ),
        pci_block("05:00.0", "Infiniband controller: Mellanox Technologies MT2910 [ConnectX-7]", most=GEN5),
        pci_block("06:00.0", "VGA compatible controller: ASPEED Technology, Inc. ASPEED Graphics Family"),
    )
)

LSPCI_TREE = r"""-+-[0000:80]-+-00.0  Intel Corporation Device 09a2
 |           \-01.0-[81]----00.0  NVIDIA Corporation GH100 [H100 PCIe]
 \-[0000:00]-+-00.0  Intel Corporation Device 09a2
             +-01.0-[01-05]----00.0-[02-05]--+-00.0-[03]----00.0  NVIDIA Corporation GH100 [H100 PCIe]
             |                               +-01.0-[04]--+-00.0  NVIDIA Corporation GA102 [GeForce RTX 3090]
             |                               |            \-00.1  NVIDIA Corporation GA102 Audio Controller
             |                               \-02.0-[05]----00.0  Mellanox Technologies MT2910 Family [ConnectX-7]
             \-1f.0  Intel Corporation Device 1b81
"""


def _package(node: int, devices: str) -> str:
    return (
        f'<object type="Package" os_index="{node}"><object type="NUMANode" os_index="{node}"/>\n'
        f'<object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="0000:[{node * 8}0-{node * 8}5]">\n{devices}'
        "</object></object>\n"
    )


def _bridged(bridge: str, device: str) -> str:
    return (
        f'<object type="Bridge" bridge_type="1-1" pci_busid="{bridge}" pci_type="0604 [8086:352a] [0000:0000] 04" '
        f'pci_link_speed="63.015385">\n{device}</object>\n'
    )


LSTOPO = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology version="2.0">\n'
    '<object type="Machine" os_index="0">\n'
    + _package(
        0,
        _bridged(
            "0000:00:01.0",
            '<object type="PCIDev" pci_busid="0000:01:00.0" pci_type="0302 [10de:2bb1] [10de:204b] a1" '
            'pci_link_speed="31.507692">\n<object type="OSDev" name="cuda0" osdev_type="5">'
            '<info name="GPUModel" value="NVIDIA A"/></object></object>\n',
        ),
    )
    + _package(
        1,
        _bridged(
            "0000:80:01.0",
            '<object type="PCIDev" pci_busid="0000:81:00.0" pci_type="0302 [10de:2bb1] [10de:204b] a1" '
            'pci_link_speed="4.000000"/>\n',
        )
        + _bridged(
            "0000:80:02.0",
            '<object type="PCIDev" pci_busid="0000:82:00.0" pci_type="0207 [15b3:1021] [15b3:0041] 00" '
            'pci_link_speed="63.015385">\n<object type="OSDev" name="mlx5_0" osdev_type="3"/></object>\n',
        ),
    )
    + "</object>\n</topology>\n"
)


def amd_link(gpu: int, peer: int, busids: Sequence[str]) -> dict[str, object]:
    same = gpu == peer
    return {
        "gpu": peer,
        "bdf": busids[peer],
        "weight": 0 if same else 15,
        "link_status": "ENABLED",
        "link_type": "SELF" if same else "XGMI",
        "num_hops": 0 if same else 1,
        "bandwidth": "N/A" if same else "50000-100000",
    }


BUS_IDS = ("0000:05:00.0", "0000:15:00.0")
AMD_SMI = json.dumps(
    [{"gpu": i, "bdf": BUS_IDS[i], "links": [amd_link(i, j, BUS_IDS) for j in (0, 1)]} for i in (0, 1)],
    indent=1,
)
ROCM_SMI = json.dumps(
    {
        "system": {
            "(Topology) Weight between DRM devices 0 and 1": "40",
            "(Topology) Hops between DRM devices 0 and 1": "2",
            "(Topology) Link type between DRM devices 0 and 1": "PCIE",
        },
        "card0": {"(Topology) Numa Node": "0", "(Topology) Numa Affinity": "0"},
        "card1": {"(Topology) Numa Node": "0", "(Topology) Numa Affinity": "0"},
    },
    indent=1,
)

DEVICES = (
    '[[null, "rdma_en3", null], ["rdma_en2", null, ["rdma_en4", "rdma_en5"]],\n'
    ' [null, ["rdma_en6", "rdma_en3"], null]]\n'
)
HOSTS = json.dumps(
    {
        "backend": "jaccl",
        "envs": ["MLX_METAL_FAST_SYNCH=1"],
        "hosts": [
            {"ssh": "mac1", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en3"]},
            {"ssh": "mac2", "ips": [], "rdma": ["rdma_en2", None]},
        ],
    },
    indent=1,
)

RCCL_CSV = (
    "numCycle,collective,ranks,rankspernode,gpusperrank,size,type,redop,inplace,time,algbw,busbw,#wrong\n"
    '0,"AllReduce",1,8,8,1,1048576,"float","sum",0,55.66,18.84,32.97,"0"\n'
    '0,"AllReduce",1,8,8,1,1048576,"float","sum",1,55.00,19.07,33.37,"0"\n'
)


def record(rank: int, number: int, time: int, *, coll: str = "AllReduce", nbytes: int = 1 << 24) -> str:
    """Return the Inspector's line of one operation of one of 8 ranks; the time is in microseconds."""
    return json.dumps(
        {
            "header": {"id": "0x1f", "comm_name": "unknown", "rank": rank, "n_ranks": 8, "nnodes": 1},
            "metadata": {"inspector_output_format_version": "v4.0", "hostname": "node1", "pid": 7},
            "coll_perf": {
                "coll": coll,
                "coll_sn": number,
                "coll_msg_size_bytes": nbytes,
                "coll_exec_time_us": time,
                "coll_timing_source": "kernel_gpu",
                "coll_algobw_gbs": nbytes / time / 1e3,
                "coll_busbw_gbs": 1.75 * nbytes / time / 1e3,
            },
        }
    )


INSPECTOR = "\n".join(
    record(rank, number, 400 + 30 * (rank ^ number)) for number in (1, 2, 3) for rank in range(8)
)


def ras_rank(rank: int, count: int) -> dict[str, object]:
    return {
        "rank": rank,
        "host": f"node{rank // 2}",
        "pid": 100 + rank,
        "cuda_dev": rank % 2,
        "nvml_dev": rank % 2,
        "status": {"init_state": 0, "async_error": 0, "finalize_called": False, "abort_flag": False},
        "collective_counts": {"AllReduce": count, "AllGather": 3},
    }


def ras(counts: Sequence[int], missing: int = 1) -> str:
    """Return a report of RAS on one communicator: ranks with their counts of all-reduce, then unresponsive ones."""
    lost = [
        ras_rank(rank, 0)
        | {"status": {"unresponsive": True, "considered_dead": False}, "collective_counts": {}}
        for rank in range(len(counts), len(counts) + missing)
    ]
    return json.dumps(
        {
            "nccl_version": "2.30.7",
            "communicators_count": 1,
            "communicators": [
                {
                    "hash": "0x1f",
                    "size": len(counts) + missing,
                    "ranks": [ras_rank(rank, count) for rank, count in enumerate(counts)],
                    "missing_ranks": lost,
                }
            ],
            "ras": {"collection_time_sec": 0.1, "timeouts_count": 0},
        },
        indent=1,
    )


def _calibrated(text: str) -> object:
    machine = topoplan.load(TOPO)
    return calibrated(machine, measured_rates(decoded(text), machine), date="2026-11-28")


def _beside(text: str) -> object:
    """Read a text that adds to a machine."""
    return topoplan.load(TOPO, merge=decoded(text) + "\n\n")


def explained_logs() -> tuple[Reader, ...]:
    """Return readers of logs that go through the whole of ``topoplan explain``."""
    return (
        Reader("rccl-tests CSV, explained", (RCCL_CSV,), explained("mi300x")),
        Reader("Inspector, explained", (INSPECTOR,), explained("dgx-1v")),
    )


def tool_readers() -> tuple[Reader, ...]:
    machine = partial(Reader, read=lambda text: load_text(decoded(text), "file", "file"))
    return (
        Reader("nvidia-smi topo -p2p", (ACCESS, TOPO + "\n" + ACCESS), _beside),
        Reader("ibdev2netdev", (PORTS,), _beside),
        Reader("p2pBandwidthLatencyTest", (P2P,), _calibrated),
        Reader("nvbandwidth", (NVBANDWIDTH,), _calibrated),
        Reader("nvbandwidth JSON", (nvbandwidth_json(READ),), _calibrated),
        machine("lspci -vv", (LSPCI,)),
        machine("lspci -tv", (LSPCI_TREE,)),
        machine("lstopo XML", (LSTOPO,)),
        machine("amd-smi and rocm-smi JSON", (AMD_SMI, ROCM_SMI)),
        machine("JACCL", (DEVICES, HOSTS)),
        Reader("rccl-tests CSV", (RCCL_CSV,), lambda text: parse_perf_runs(decoded(text))),
        Reader("Inspector", (INSPECTOR,), lambda text: parse_perf_runs(decoded(text))),
        Reader("RAS", (ras((7, 7, 5)),), explained()),
    )
