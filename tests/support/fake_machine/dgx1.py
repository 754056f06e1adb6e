"""NVIDIA DGX-1: eight GPUs in a hybrid cube mesh, four PLX switches with two GPUs and one NIC each, two Xeons.

Bus ids, chips and NVLink pairs are those of real machines (`nvidia-smi topo -m` of a DGX-1V; NCCL issue 671); which
of a GPU's links goes where, and the Ethernet and graphics ports, are assumed.
"""

from __future__ import annotations

from tests.support.fake_machine.description import (
    ETHERNET,
    GPU_3D,
    INFINIBAND,
    Cpus,
    FakeMachine,
    Gpu,
    Nic,
    Nvlink,
    Pci,
    Root,
    pcie_switch,
)

GPU_BUS_IDS = tuple(f"0000:{bus}:00.0" for bus in ("06", "07", "0a", "0b", "85", "86", "89", "8a"))

_QUADS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
_PAIRS = (*_QUADS, *((a + 4, b + 4) for a, b in _QUADS), *((a, a + 4) for a in range(4)))
P100_WIRES = tuple(sorted(_PAIRS))
_DOUBLED = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
V100_WIRES = tuple(sorted((*_PAIRS, *_DOUBLED)))

XEON_E5 = Cpus(
    vendor="GenuineIntel",
    name="Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz",
    family=6,
    model=79,
    nodes=("0-19,40-59", "20-39,60-79"),
    distances=((10, 21), (21, 10)),
)

_PLX = "10b5:8764:10b5:8764"
_ROOT_PORT = "8086:6f04:8086:0000"


def cube_mesh_links(wires: tuple[tuple[int, int], ...], megabytes: int) -> list[tuple[Nvlink, ...]]:
    """Links of each GPU, in the order of the GPUs that they lead to; two wires of a pair are two links."""
    ends: list[list[int]] = [[] for _ in GPU_BUS_IDS]
    for a, b in wires:
        ends[a].append(b)
        ends[b].append(a)
    return [tuple(Nvlink(GPU_BUS_IDS[far], "gpu", megabytes) for far in sorted(row)) for row in ends]


def _quarter(root_port: str, upstream: str, ports: str, nic: str, gpus: list[Pci]) -> Pci:
    """A root port with the switch of two GPUs and a NIC (ConnectX-4, 100 Gb/s)."""
    adapter = Pci(f"0000:{nic}:00.0", "15b3:1013:15b3:0008", INFINIBAND)
    below = {f"0000:{ports}:{4 + 4 * i:02x}.0": device for i, device in enumerate((adapter, *gpus))}
    return Pci(root_port, _ROOT_PORT, children=(pcie_switch(f"0000:{upstream}:00.0", _PLX, below),))


def _roots(gpu_ids: str, idle: tuple[int, ...]) -> tuple[Root, ...]:
    gpus = [
        Pci(busid, gpu_ids, GPU_3D, current_generation=1 if number in idle else 0)
        for number, busid in enumerate(GPU_BUS_IDS)
    ]
    ethernet = Pci(
        "0000:00:01.0",
        "8086:6f02:8086:0000",
        width=8,
        children=tuple(
            Pci(f"0000:01:00.{port}", "8086:1528:8086:0001", ETHERNET, generation=2, width=8)
            for port in (0, 1)
        ),
    )
    graphics = Pci(
        "0000:00:1c.0",
        "8086:8d10:8086:7270",
        generation=2,
        width=1,
        children=(Pci("0000:02:00.0", "1a03:2000:1a03:2000", "0x030000", generation=0),),
    )
    return (
        Root(
            "0000:00",
            0,
            (
                ethernet,
                _quarter("0000:00:02.0", "03", "04", "05", gpus[0:2]),
                _quarter("0000:00:03.0", "08", "09", "0c", gpus[2:4]),
                graphics,
            ),
        ),
        Root(
            "0000:80",
            1,
            (
                _quarter("0000:80:02.0", "82", "83", "84", gpus[4:6]),
                _quarter("0000:80:03.0", "87", "88", "8b", gpus[6:8]),
            ),
        ),
    )


def _nics() -> tuple[Nic, ...]:
    rdma = tuple(
        Nic(f"0000:{bus}:00.0", f"mlx5_{n}", "100 Gb/sec (4X EDR)", interface=f"ib{n}", megabits=100000)
        for n, bus in enumerate(("05", "0c", "84", "8b"))
    )
    return (
        *rdma,
        Nic("0000:01:00.0", interface="eno1", megabits=10000),
        Nic("0000:01:00.1", interface="eno2", up=False),
        Nic("", interface="docker0", megabits=-1, up=False),
        Nic("", interface="lo"),
    )


def _dgx1(name: str, gpu_ids: str, gpus: tuple[Gpu, ...]) -> FakeMachine:
    idle = tuple(number for number, gpu in enumerate(gpus) if gpu.pstate == 8)
    return FakeMachine(name, XEON_E5, _roots(gpu_ids, idle), gpus, _nics(), p2p_across_sockets=False)


def dgx1p() -> FakeMachine:
    """DGX-1 with P100: one NVLink for each of 16 pairs, which the driver says run at 19.179 GB/s."""
    rows = cube_mesh_links(P100_WIRES, 19179)
    gpus = tuple(
        Gpu(busid, "Tesla P100-SXM2-16GB", (6, 0), 1, links)
        for busid, links in zip(GPU_BUS_IDS, rows, strict=True)
    )
    return _dgx1("dgx1p", "10de:15f9:10de:116b", gpus)


def dgx1v() -> FakeMachine:
    """DGX-1 with V100: 24 NVLinks on the same pairs, 8 of them doubled; GPUs 4 to 7 are idle (PCIe generation 1)."""
    rows = cube_mesh_links(V100_WIRES, 25781)
    gpus = tuple(
        Gpu(busid, "Tesla V100-SXM2-32GB", (7, 0), 2, links, pstate=8 if number > 3 else 0)
        for number, (busid, links) in enumerate(zip(GPU_BUS_IDS, rows, strict=True))
    )
    return _dgx1("dgx1v", "10de:1db5:10de:1249", gpus)
