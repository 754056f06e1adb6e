"""NVIDIA DGX A100: eight A100 on six NVSwitches, four groups of two GPUs and two NICs, eight NUMA nodes of two EPYC.

The arrangement is that of NCCL issue 1505: three levels of one Broadcom switch chip above a GPU, two above a NIC, all
under one switch for a group. Bus ids of the lower ports are assumed.
"""

from __future__ import annotations

from tests.support.fake_machine.description import (
    ETHERNET,
    GPU_3D,
    INFINIBAND,
    NVSWITCH,
    Cpus,
    FakeMachine,
    Gpu,
    Nic,
    Nvlink,
    Pci,
    Root,
    pcie_switch,
)

GPU_BUS_IDS = tuple(f"0000:{bus}:00.0" for bus in ("07", "0f", "47", "4e", "87", "90", "b7", "bd"))
SWITCH_BUS_IDS = tuple(f"0000:c{digit}:00.0" for digit in range(4, 10))

_CHIP = "1000:c010:1000:a096"
_ROOT_PORT = "1022:1483:1022:1453"


def _numa_cpus() -> Cpus:
    nodes = tuple(f"{16 * n}-{16 * n + 15},{16 * n + 128}-{16 * n + 143}" for n in range(8))
    distances = tuple(
        tuple(10 if a == b else 12 if a // 4 == b // 4 else 32 for b in range(8)) for a in range(8)
    )
    return Cpus("AuthenticAMD", "AMD EPYC 7742 64-Core Processor", 23, 49, nodes, distances)


EPYC_7742 = _numa_cpus()


def _gpu(busid: str) -> Pci:
    return Pci(busid, "10de:20b0:10de:134f", GPU_3D, generation=4)


def _nic(busid: str) -> Pci:
    return Pci(busid, "15b3:101b:15b3:0007", INFINIBAND, generation=4)


def _over(bus: int, device: Pci, *more: Pci) -> Pci:
    """A switch whose upstream port is on a bus and whose downstream ports are on the next one."""
    ports = {f"0000:{bus + 1:02x}:{4 * i:02x}.0": below for i, below in enumerate((device, *more))}
    return pcie_switch(f"0000:{bus:02x}:00.0", _CHIP, ports, generation=4)


def _group(root: str, numa: int, gpus: tuple[str, ...], nics: tuple[str, str], *more: Pci) -> Root:
    first, second = (int(gpu[5:7], 16) for gpu in gpus)
    near, far = (int(nic[5:7], 16) for nic in nics)
    top = int(root[5:7], 16) + 1
    pair = _over(near - 2, _nic(nics[0]), _over(second - 2, _gpu(gpus[1])))
    below = (_over(top + 2, _over(first - 2, _gpu(gpus[0]))), pair, _over(far - 2, _nic(nics[1])), *more)
    return Root(root, numa, (Pci(f"{root}:01.1", _ROOT_PORT, generation=4, children=(_over(top, *below),)),))


def _two_ports(root: str, numa: int, bus: str) -> Root:
    ports = tuple(
        Pci(
            f"0000:{bus}:00.{port}", "15b3:101b:15b3:0009", INFINIBAND if not port else ETHERNET, generation=4
        )
        for port in (0, 1)
    )
    return Root(root, numa, (Pci(f"{root}:03.1", _ROOT_PORT, generation=4, children=ports),))


def _roots() -> tuple[Root, ...]:
    switches = [
        Pci(busid, "10de:1af1:10de:0000", NVSWITCH, generation=2, width=4) for busid in SWITCH_BUS_IDS
    ]
    gpus = GPU_BUS_IDS
    return (
        _group("0000:00", 3, gpus[0:2], ("0000:0c:00.0", "0000:12:00.0")),
        _group("0000:40", 1, gpus[2:4], ("0000:4b:00.0", "0000:54:00.0")),
        _two_ports("0000:60", 0, "61"),
        _group("0000:80", 7, gpus[4:6], ("0000:8d:00.0", "0000:94:00.0")),
        _group("0000:b0", 5, gpus[6:8], ("0000:ba:00.0", "0000:cc:00.0"), _over(0xC2, *switches)),
        _two_ports("0000:e0", 4, "e1"),
    )


def _nics() -> tuple[Nic, ...]:
    """Eight at 200 Gb/s beside the GPUs; one more in use, and three ports that nothing is plugged into."""
    fast, idle = "200 Gb/sec (4X HDR)", "10 Gb/sec (4X SDR)"
    rows = (
        ("0c:00.0", fast),
        ("12:00.0", fast),
        ("4b:00.0", fast),
        ("54:00.0", fast),
        ("61:00.0", fast),
        ("61:00.1", idle),
        ("8d:00.0", fast),
        ("94:00.0", fast),
        ("ba:00.0", fast),
        ("cc:00.0", fast),
        ("e1:00.0", idle),
        ("e1:00.1", idle),
    )
    return tuple(
        Nic(
            f"0000:{busid}",
            f"mlx5_{n}",
            rate,
            "Ethernet" if busid.endswith(".1") else "InfiniBand",
            f"enp{n}s0f1np1" if busid.endswith(".1") else f"ib{n}",
            200000 if rate == fast else None,
            rate == fast,
        )
        for n, (busid, rate) in enumerate(rows)
    )


def dgx_a100() -> FakeMachine:
    """The whole machine: two NVLinks from each GPU to each NVSwitch."""
    links = tuple(Nvlink(switch, "switch", 25000) for switch in SWITCH_BUS_IDS for _ in range(2))
    gpus = tuple(
        Gpu(busid, "NVIDIA A100-SXM4-40GB", (8, 0), 4, links, mig=(0, 0, 7)) for busid in GPU_BUS_IDS
    )
    return FakeMachine("dgx_a100", EPYC_7742, _roots(), gpus, _nics())
