"""NVIDIA DGX-2: sixteen V100 on two boards of six NVSwitches, behind two levels of PLX switches.

Bus ids of GPUs and NICs and their nearness are those of real machines (`nvidia-smi topo -m`, nccl-tests issue 78); bus
ids of bridges and NVSwitches are assumed. Each GPU has one NVLink to each NVSwitch of its board.
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

# Host bridge, then per leaf switch its GPU, NIC, GPU.
_GROUPS = (
    ("2e", ("34", "35", "36"), ("39", "3a", "3b")),
    ("51", ("57", "58", "59"), ("5c", "5d", "5e")),
    ("b1", ("b7", "b8", "b9"), ("bc", "bd", "be")),
    ("da", ("e0", "e1", "e2"), ("e5", "e6", "e7")),
)
GPU_BUS_IDS = tuple(f"0000:{leaf[i]}:00.0" for group in _GROUPS for leaf in group[1:] for i in (0, 2))
SWITCH_BUS_IDS = tuple(tuple(f"0000:{bus}{digit}:00.0" for digit in range(3, 9)) for bus in ("6", "c"))

_PLX = "10b5:9797:10b5:9797"
_ROOT_PORT = "8086:2030:8086:0000"


def _bus(text: str, step: int) -> str:
    return f"0000:{int(text, 16) + step:02x}"


def _leaf(buses: tuple[str, ...]) -> Pci:
    """A switch with GPU, NIC (ConnectX-5, 100 Gb/s), GPU."""
    devices = [
        Pci(f"0000:{buses[0]}:00.0", "10de:1db8:10de:12d9", GPU_3D),
        Pci(f"0000:{buses[1]}:00.0", "15b3:1017:15b3:0008", INFINIBAND),
        Pci(f"0000:{buses[2]}:00.0", "10de:1db8:10de:12d9", GPU_3D),
    ]
    ports = {f"{_bus(buses[0], -1)}:{4 * i:02x}.0": device for i, device in enumerate(devices)}
    return pcie_switch(f"{_bus(buses[0], -2)}:00.0", _PLX, ports)


def _group(number: int, root: str, *leaves: tuple[str, ...]) -> Root:
    ports = {f"{_bus(root, 3)}:{4 * i:02x}.0": _leaf(leaf) for i, leaf in enumerate(leaves)}
    upper = pcie_switch(f"{_bus(root, 2)}:00.0", _PLX, ports)
    return Root(f"0000:{root}", number // 2, (Pci(f"0000:{root}:00.0", _ROOT_PORT, children=(upper,)),))


def _board(number: int, root: str) -> Root:
    """The NVSwitches of one board."""
    switches = {
        f"{_bus(root, 2)}:{4 * i:02x}.0": Pci(busid, "10de:1ac2:10de:1272", NVSWITCH, width=4)
        for i, busid in enumerate(SWITCH_BUS_IDS[number])
    }
    below = pcie_switch(f"{_bus(root, 1)}:00.0", _PLX, switches, width=4)
    return Root(f"0000:{root}", number, (Pci(f"0000:{root}:00.0", _ROOT_PORT, width=4, children=(below,)),))


def dgx2() -> FakeMachine:
    """All sixteen GPUs, eight NICs beside them and one with two Ethernet ports at the second socket."""
    cpus = Cpus(
        vendor="GenuineIntel",
        name="Intel(R) Xeon(R) Platinum 8168 CPU @ 2.70GHz",
        family=6,
        model=85,
        nodes=("0-23,48-71", "24-47,72-95"),
        distances=((10, 21), (21, 10)),
    )
    storage = tuple(Pci(f"0000:86:00.{port}", "15b3:1017:15b3:0008", ETHERNET) for port in (0, 1))
    roots = (
        *(_group(number, *group) for number, group in enumerate(_GROUPS[:2])),
        _board(0, "60"),
        Root("0000:85", 1, (Pci("0000:85:00.0", _ROOT_PORT, children=storage),)),
        *(_group(number + 2, *group) for number, group in enumerate(_GROUPS[2:])),
        _board(1, "c0"),
    )
    gpus = tuple(
        Gpu(
            busid,
            "Tesla V100-SXM3-32GB",
            (7, 0),
            2,
            tuple(Nvlink(switch, "switch", 25781) for switch in SWITCH_BUS_IDS[number // 8]),
        )
        for number, busid in enumerate(GPU_BUS_IDS)
    )
    buses = [f"0000:{leaf[1]}:00.0" for group in _GROUPS for leaf in group[1:]]
    buses[4:4] = ["0000:86:00.0", "0000:86:00.1"]
    nics = tuple(
        Nic(
            busid,
            f"mlx5_{n}",
            "100 Gb/sec (4X EDR)",
            "Ethernet" if n in (4, 5) else "InfiniBand",
            f"enp134s0f{n - 4}" if n in (4, 5) else f"ib{n}",
            100000,
        )
        for n, busid in enumerate(buses)
    )
    return FakeMachine("dgx2", cpus, roots, gpus, nics)
