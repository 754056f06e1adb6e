"""Build a server of GPUs joined by direct links or by an NVSwitch, and state the library's small machines.

NVLink figures are nominal, PCIe and socket figures effective (see `topoplan.machine.hardware`). A server has the PCIe
side behind its GPUs. A NIC has its plug but no network, which is not part of one server.

The small machines are boxes without NVSwitch from PCIe slots, and servers cabled to one another. Their rates are GB/s
of a copy in one direction, as people measured them on such machines; each source names the report, an issue or pull
request as project#number. A Mac's cable and a Spark's port are nominal. The servers ``dgx-spark`` and ``mac-tb5`` are
for clusters of your own (`topoplan.machine.cables`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from topoplan.machine.cables import Cable
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.hardware import A100, GA102, UNKNOWN, V100, GpuGeneration, nvswitch_capable
from topoplan.machine.host_topology import STRIPED, both_ways, cpus_of, host_links
from topoplan.machine.topology import Device, Link, Topology, facts
from topoplan.units import several

SERVER = "s0"

PCIE_SOURCE = (
    "PCIe: effective, NCCL src/graph/topo.cc kvDictPciGen: x16 of generation 3, 4, 5 is 12, 24, 48 GB/s; "
    "sockets: NCCL src/graph/topo.h"
)


@dataclass(frozen=True, slots=True)
class HostSide:
    """Switches, CPUs and NICs of a box.

    ``parents`` map child to parent; the roots are the CPUs. ``pcie`` and ``socket`` are in GB/s per direction, ``cpu``
    and ``nic`` are models. ``gigabits`` is the Gb/s of each NIC if all machines of this name have the same, for
    clusters of them.
    """

    parents: Mapping[str, str]
    pcie: float
    socket: float
    cpu: str
    nic: str = ""
    gigabits: int | None = None

    def devices(self) -> tuple[Device, ...]:
        """Return switches, CPUs and NICs, in this order."""
        switches = [Device(name, "pcie", SERVER) for name in self.parents if name.startswith("pcie")]
        cpus = [Device(name, "cpu", SERVER, model=self.cpu) for name in cpus_of(self.parents)]
        nics = [
            Device(name, "nic", SERVER, model=self.nic, facts=facts(gigabits=self.gigabits))
            for name in self.parents
            if name.startswith("nic")
        ]
        return (*switches, *cpus, *nics)

    def links(self) -> tuple[Link, ...]:
        """Return their links and those of the GPUs to them."""
        return host_links(self.parents, pcie=self.pcie, socket=self.socket)


def switches(members: Sequence[Sequence[str]], *, cpus: int) -> dict[str, str]:
    """Return the parents of a box with one PCIe switch for each group of members, divided evenly among the CPUs."""
    parents: dict[str, str] = {}
    for i, group in enumerate(members):
        parents[f"pcie{i}"] = f"cpu{i * cpus // len(members)}"
        parents |= dict.fromkeys(group, f"pcie{i}")
    return parents


def hybrid_cube_mesh(doubled: Sequence[tuple[int, int]] = ()) -> dict[tuple[int, int], int]:
    """Return the NVLinks of each connected pair of a DGX-1's 8 GPUs; ``doubled`` pairs have two.

    They are two quads, fully connected, and four links across.
    """
    quads = [(i + q, j + q) for q in (0, 4) for i in range(4) for j in range(i + 1, 4)]
    return {pair: 1 + (pair in doubled) for pair in [*quads, *((i, i + 4) for i in range(4))]}


def direct_box(
    name: str,
    host: HostSide,
    *,
    gpu: GpuGeneration,
    gpus: int,
    pairs: Mapping[tuple[int, int], int],
    source: str,
    notes: Sequence[str] = (),
) -> Topology:
    """Return a server whose GPUs are joined by direct links; ``pairs`` has the links of each connected pair.

    An empty ``pairs`` makes a PCIe-only box. ``source`` is that of the figures.
    """
    wires = [
        link
        for (i, j), count in pairs.items()
        for link in both_ways(f"gpu{i}", f"gpu{j}", "nvlink", several(count, gpu.nvlink), count=count)
    ]
    devices = (*(Device(f"gpu{i}", "gpu", SERVER, model=gpu.name) for i in range(gpus)), *host.devices())
    return Topology(name, devices, (*wires, *host.links()), tuple(notes), source)


def nvswitch_box(name: str, host: HostSide, *, gpu: GpuGeneration, gpus: int, source: str) -> Topology:
    """Return a server whose GPUs have all NVLinks to NVSwitch chips, which one device ``nvswitch0`` represents."""
    wires = [
        link
        for i in range(gpus)
        for link in both_ways(
            f"gpu{i}", "nvswitch0", "nvlink", several(gpu.links, gpu.nvlink), count=gpu.links
        )
    ]
    every = [Device(f"gpu{i}", "gpu", SERVER, model=gpu.name) for i in range(gpus)]
    devices = (
        *every,
        Device("nvswitch0", "nvswitch", SERVER, model="NVSwitch", capable=nvswitch_capable(every)),
        *host.devices(),
    )
    return Topology(name, devices, (*wires, *host.links()), (STRIPED,), source)


SPARK_PORT, SPARK_LINK = 200.0, 25.0
"""Gb/s of a QSFP port of a DGX Spark, and GB/s of both PCIe links behind its two ports together."""

THUNDERBOLT_5 = 80.0
"""Gb/s of a Thunderbolt 5 cable in each direction."""


def dgx_spark() -> Topology:
    """Return an NVIDIA DGX Spark: a GB10, and a ConnectX-7 whose two ports share two PCIe links of four lanes."""
    ports = [
        Device(
            f"p{port}",
            "nic",
            SERVER,
            model="ConnectX-7 200 Gb/s",
            facts=facts(
                adapter=f"rocep1s0f{port}",
                functions=f"rocep1s0f{port},roceP2p1s0f{port}",
                gigabits=f"{SPARK_PORT:g}",
            ),
        )
        for port in range(2)
    ]
    return Topology(
        "dgx-spark",
        (
            Device("gpu0", "gpu", SERVER, model="NVIDIA GB10"),
            Device("pcie0", "pcie", SERVER),
            Device("cpu0", "cpu", SERVER, model="Grace, 20 cores", facts=facts(management="enP7s7")),
            *ports,
        ),
        (
            *both_ways("gpu0", "cpu0", "c2c", 300.0),
            *both_ways("cpu0", "pcie0", "pcie", SPARK_LINK),
            *both_ways("pcie0", "p0", "pcie", SPARK_LINK),
            *both_ways("pcie0", "p1", "pcie", SPARK_LINK),
        ),
        ("pcie0 stands for both PCIe links of the NIC: 25 GB/s out and 25 GB/s in, however many cables",),
        "PCIe: two Gen5 x4 links of 100 Gb/s each behind both ports, 189.9 Gb/s = 23.7 GB/s over one cable with both "
        "functions, dgx-spark-playbooks README; 160 to 198 Gb/s over two ports by TCP, servethehome.com; "
        "NVLink-C2C 600 GB/s both ways, NVIDIA GB10",
    )


def mac_tb5() -> Topology:
    """Return an Apple computer with Thunderbolt 5 ports, of any names, and one GPU."""
    return Topology(
        "mac-tb5",
        (Device("gpu0", "gpu", SERVER, model="Apple M3 Ultra"),),
        (),
        (),
        "Thunderbolt 5: 80 Gb/s = 10 GB/s per cable and direction; RDMA, 7.1 GB/s measured at 1 MiB and 9.1 at 16 MiB, "
        "pytorch#181087; six ports at most, exo#1293",
    )


def _cabled(name: str, server: Topology, size: int, cables: Sequence[Cable], source: str) -> Topology:
    made = cluster([Server(server, count=size)], network="cables", cables=cables, name=name)
    return replace(made, source=f"{server.source}; {source}")


def dgx_spark_pair() -> Topology:
    """Return two DGX Sparks with one cable; a second one adds nothing."""
    cables = [Cable("s0:p0", "s1:p1", SPARK_PORT)]
    return _cabled("dgx-spark-x2", dgx_spark(), 2, cables, "NCCL 23.7 GB/s, dgx-spark-playbooks#103")


def dgx_spark_ring(size: int, source: str) -> Topology:
    """Return DGX Sparks in a ring, port 0 of each with port 1 of the next."""
    cables = [Cable(f"s{i}:p0", f"s{(i + 1) % size}:p1", SPARK_PORT) for i in range(size)]
    return _cabled(f"dgx-spark-x{size}", dgx_spark(), size, cables, source)


def dgx_spark_star() -> Topology:
    """Return four DGX Sparks on a switch, with both ports."""
    made = cluster([Server(dgx_spark(), count=4)], nic_gbps=SPARK_PORT, name="dgx-spark-x4-switch")
    return replace(made, source=f"{made.source}; a switch for four, b12x#295")


def mac_tb5_mesh(size: int) -> Topology:
    """Return Macs of which each has a cable to every other."""
    free = [iter(range(size)) for _ in range(size)]
    cables = [
        Cable(f"s{i}:tb{next(free[i])}", f"s{j}:tb{next(free[j])}", THUNDERBOLT_5)
        for i, j in combinations(range(size), 2)
    ]
    return _cabled(f"mac-tb5-x{size}", mac_tb5(), size, cables, "mesh: MLX, JACCL's mesh of up to 8")


def mac_tb5_ring(size: int) -> Topology:
    """Return Macs in a ring, in the order of the ranks."""
    cables = [Cable(f"s{i}:tb0", f"s{(i + 1) % size}:tb1", THUNDERBOLT_5) for i in range(size)]
    return _cabled(f"mac-tb5-ring-x{size}", mac_tb5(), size, cables, "ring: MLX, JACCL's ring")


RTX_PRO_6000 = replace(UNKNOWN, name="RTX PRO 6000 Blackwell", pcie=52.0)
RTX_5090 = replace(UNKNOWN, name="GeForce RTX 5090", pcie=50.0)


def _islands(name: str, gpu: GpuGeneration, groups: int, host: HostSide, source: str) -> Topology:
    return direct_box(name, host, gpu=gpu, gpus=4 * groups, pairs={}, source=source)


def _in_fours(groups: int, *, cpus: int, pcie: float, socket: float, cpu: str = "") -> HostSide:
    """Return the host of a box with four GPUs on each PCIe switch."""
    return HostSide(
        switches([[f"gpu{4 * i + j}" for j in range(4)] for i in range(groups)], cpus=cpus), pcie, socket, cpu
    )


def rtx_pro_6000(groups: int) -> Topology:
    """Return RTX PRO 6000 Blackwell, four on each PCIe switch; two switches are on two sockets, else on one."""
    host = _in_fours(groups, cpus=2 if groups == 2 else 1, pcie=52.0, socket=40.0)
    name = "rtx-pro-6000-x4" if groups == 1 else f"rtx-pro-6000-{groups}x4"
    source = (
        "PCIe: x16 Gen5 to a switch and from it upwards, 52 GB/s as peers read; peers write at 2.6 GB/s there, "
        "topoplan calibrate measures it; shape: b12x#139, #131"
    )
    return _islands(
        name, RTX_PRO_6000, groups, host, source + ("; 40 GB/s across sockets" if groups == 2 else "")
    )


def a800_pcie() -> Topology:
    """Return eight A800 PCIe, four on the PCIe switch of each socket."""
    source = "PCIe: x16 Gen4, 25 GB/s, 18 GB/s across sockets; shape: PIX in fours, vllm#50941, #50576"
    host = _in_fours(2, cpus=2, pcie=25.0, socket=18.0)
    return _islands("a800-pcie-2x4", replace(A100, name="A800 PCIe"), 2, host, source)


def v100_plx() -> Topology:
    """Return four V100 PCIe on one PCIe switch."""
    source = (
        "PCIe: x16 Gen3, 12 GB/s; shape: one PLX switch; kernels that read peers never end, sglang-V100#2"
    )
    return _islands(
        "v100-plx-x4", replace(V100, name="V100 PCIe"), 1, _in_fours(1, cpus=1, pcie=12.0, socket=0.0), source
    )


def _on_sockets(gpus: int, *, pcie: float, socket: float, cpu: str = "", cpus: int = 2) -> HostSide:
    """Return the host of a box whose GPUs are at root ports of their own, divided evenly among the CPUs."""
    return HostSide({f"gpu{i}": f"cpu{i * cpus // gpus}" for i in range(gpus)}, pcie, socket, cpu)


_RTX_5090_SOURCE = (
    "PCIe: x16 Gen5 each, 2 sockets EPYC, aikitoria open-gpu-kernel-modules README: writes 55.6 to 56.6 GB/s with "
    "peers, copies 43 GB/s without and 57 GB/s both ways together; 64 GB/s across sockets"
)


def rtx_5090(*, peers: bool) -> Topology:
    """Return eight RTX 5090 on two sockets, with the driver that gives them peer access, or without."""
    rate = 55.6 if peers else 43.0
    host = _on_sockets(8, pcie=rate, socket=64.0, cpu="EPYC")
    name = "rtx5090-x8" if peers else "rtx5090-x8-nopeer"
    box = direct_box(name, host, gpu=RTX_5090, gpus=8, pairs={}, source=_RTX_5090_SOURCE)
    if peers:
        return replace(box, notes=("peer access needs a patched driver; without it: rtx5090-x8-nopeer",))
    return replace(
        box,
        devices=tuple(
            replace(one, facts=facts(peer_access="none")) if one.kind == "gpu" else one for one in box.devices
        ),
        links=tuple(replace(link, shared=57.0) if link.channel == "pcie" else link for link in box.links),
    )


def rtx_3090_bridges() -> Topology:
    """Return four RTX 3090 in two bridged pairs."""
    host = _on_sockets(4, pcie=25.0, socket=0.0, cpus=1)
    source = (
        "NVLink: 4 links of 14.0625 GB/s per bridge and direction; PCIe: x16 Gen4, 25 GB/s with peers, which need a "
        "patched driver; pairs and PCIe together since aikitoria#18"
    )
    pairs = {(0, 1): 4, (2, 3): 4}
    return direct_box("rtx3090-bridges-x4", host, gpu=GA102, gpus=4, pairs=pairs, source=source)


def a100_pcie_bridges() -> Topology:
    """Return eight A100 PCIe in four bridged pairs, two on each socket."""
    host = _on_sockets(8, pcie=25.0, socket=18.0)
    source = (
        "NVLink: NV12 = 300 GB/s in a pair; PCIe: x16 Gen4, 25 GB/s, 18 GB/s across sockets; nccl-tests#178"
    )
    pairs = {(2 * i, 2 * i + 1): 12 for i in range(4)}
    gpu = replace(A100, name="A100 PCIe")
    return direct_box("a100-pcie-bridges-x8", host, gpu=gpu, gpus=8, pairs=pairs, source=source)


def mi60_hive() -> Topology:
    """Return four AMD MI60 in a hive, a ring of Infinity Fabric links."""
    gpu = GpuGeneration("MI60", links=2, nvlink=46.0, pcie=24.0, socket=0.0)
    source = (
        "Infinity Fabric: 92 GB/s per link both ways, 46 GB/s in one direction, two links each in a ring, ROCm issue "
        "2499; PCIe: x16 Gen4, 24 GB/s as NCCL counts it"
    )
    pairs = {(0, 1): 1, (1, 2): 1, (2, 3): 1, (0, 3): 1}
    box = direct_box(
        "mi60-hive-x4",
        _on_sockets(4, pcie=24.0, socket=0.0, cpus=1),
        gpu=gpu,
        gpus=4,
        pairs=pairs,
        source=source,
    )
    return replace(box, notes=("nvlink names the channel between GPUs: here it is AMD Infinity Fabric",))


SMALL_MACHINES: dict[str, Callable[[], Topology]] = {
    "a100-pcie-bridges-x8": a100_pcie_bridges,
    "a800-pcie-2x4": a800_pcie,
    "dgx-spark": dgx_spark,
    "dgx-spark-x2": dgx_spark_pair,
    "dgx-spark-x3": partial(dgx_spark_ring, 3, "triangle: all_gather 21 GB/s, spark-vllm-docker#252"),
    "dgx-spark-x4": partial(dgx_spark_ring, 4, "ring: DeepSeek-v4.1-Flash-DGX-Sparks#19"),
    "dgx-spark-x4-switch": dgx_spark_star,
    "dgx-spark-x6": partial(dgx_spark_ring, 6, "ring of six: in development at sparkring"),
    "mac-tb5": mac_tb5,
    **{f"mac-tb5-ring-x{size}": partial(mac_tb5_ring, size) for size in (4, 5, 6)},
    **{f"mac-tb5-x{size}": partial(mac_tb5_mesh, size) for size in (4, 5, 6)},
    "mi60-hive-x4": mi60_hive,
    "rtx-pro-6000-2x4": partial(rtx_pro_6000, 2),
    "rtx-pro-6000-4x4": partial(rtx_pro_6000, 4),
    "rtx-pro-6000-x4": partial(rtx_pro_6000, 1),
    "rtx3090-bridges-x4": rtx_3090_bridges,
    "rtx5090-x8": partial(rtx_5090, peers=True),
    "rtx5090-x8-nopeer": partial(rtx_5090, peers=False),
    "v100-plx-x4": v100_plx,
}
"""Generator of each small machine."""
