"""Machines that work, with the bus ids and chips of real ones: DGX-1, DGX-2, DGX A100, DGX H100 and others."""

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

# NVIDIA DGX-1: eight GPUs in a hybrid cube mesh, four PLX switches with two GPUs and one NIC each, two Xeons.
#
# Bus ids, chips and NVLink pairs are those of real machines (`nvidia-smi topo -m` of a DGX-1V; NCCL issue 671); which
# of a GPU's links goes where, and the Ethernet and graphics ports, are assumed.

DGX1_GPU_BUS_IDS = tuple(f"0000:{bus}:00.0" for bus in ("06", "07", "0a", "0b", "85", "86", "89", "8a"))

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

_DGX1_PLX = "10b5:8764:10b5:8764"
_DGX1_ROOT_PORT = "8086:6f04:8086:0000"


def cube_mesh_links(wires: tuple[tuple[int, int], ...], megabytes: int) -> list[tuple[Nvlink, ...]]:
    """Links of each GPU, in the order of the GPUs that they lead to; two wires of a pair are two links."""
    ends: list[list[int]] = [[] for _ in DGX1_GPU_BUS_IDS]
    for a, b in wires:
        ends[a].append(b)
        ends[b].append(a)
    return [tuple(Nvlink(DGX1_GPU_BUS_IDS[far], "gpu", megabytes) for far in sorted(row)) for row in ends]


def _quarter(root_port: str, upstream: str, ports: str, nic: str, gpus: list[Pci]) -> Pci:
    """A root port with the switch of two GPUs and a NIC (ConnectX-4, 100 Gb/s)."""
    adapter = Pci(f"0000:{nic}:00.0", "15b3:1013:15b3:0008", INFINIBAND)
    below = {f"0000:{ports}:{4 + 4 * i:02x}.0": device for i, device in enumerate((adapter, *gpus))}
    return Pci(root_port, _DGX1_ROOT_PORT, children=(pcie_switch(f"0000:{upstream}:00.0", _DGX1_PLX, below),))


def _dgx1_roots(gpu_ids: str, idle: tuple[int, ...]) -> tuple[Root, ...]:
    gpus = [
        Pci(busid, gpu_ids, GPU_3D, current_generation=1 if number in idle else 0)
        for number, busid in enumerate(DGX1_GPU_BUS_IDS)
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


def _dgx1_nics() -> tuple[Nic, ...]:
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
    return FakeMachine(
        name, XEON_E5, _dgx1_roots(gpu_ids, idle), gpus, _dgx1_nics(), p2p_across_sockets=False
    )


def dgx1p() -> FakeMachine:
    """DGX-1 with P100: one NVLink for each of 16 pairs, which the driver says run at 19.179 GB/s."""
    rows = cube_mesh_links(P100_WIRES, 19179)
    gpus = tuple(
        Gpu(busid, "Tesla P100-SXM2-16GB", (6, 0), 1, links)
        for busid, links in zip(DGX1_GPU_BUS_IDS, rows, strict=True)
    )
    return _dgx1("dgx1p", "10de:15f9:10de:116b", gpus)


def dgx1v() -> FakeMachine:
    """DGX-1 with V100: 24 NVLinks on the same pairs, 8 of them doubled; GPUs 4 to 7 are idle (PCIe generation 1)."""
    rows = cube_mesh_links(V100_WIRES, 25781)
    gpus = tuple(
        Gpu(busid, "Tesla V100-SXM2-32GB", (7, 0), 2, links, pstate=8 if number > 3 else 0)
        for number, (busid, links) in enumerate(zip(DGX1_GPU_BUS_IDS, rows, strict=True))
    )
    return _dgx1("dgx1v", "10de:1db5:10de:1249", gpus)


# NVIDIA DGX-2: sixteen V100 on two boards of six NVSwitches, behind two levels of PLX switches.
#
# Bus ids of GPUs and NICs and their nearness are those of real machines (`nvidia-smi topo -m`, nccl-tests issue 78);
# bus ids of bridges and NVSwitches are assumed. Each GPU has one NVLink to each NVSwitch of its board.

# Host bridge, then per leaf switch its GPU, NIC, GPU.
_GROUPS = (
    ("2e", ("34", "35", "36"), ("39", "3a", "3b")),
    ("51", ("57", "58", "59"), ("5c", "5d", "5e")),
    ("b1", ("b7", "b8", "b9"), ("bc", "bd", "be")),
    ("da", ("e0", "e1", "e2"), ("e5", "e6", "e7")),
)
DGX2_GPU_BUS_IDS = tuple(f"0000:{leaf[i]}:00.0" for group in _GROUPS for leaf in group[1:] for i in (0, 2))
DGX2_SWITCH_BUS_IDS = tuple(tuple(f"0000:{bus}{digit}:00.0" for digit in range(3, 9)) for bus in ("6", "c"))

_DGX2_PLX = "10b5:9797:10b5:9797"
_DGX2_ROOT_PORT = "8086:2030:8086:0000"


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
    return pcie_switch(f"{_bus(buses[0], -2)}:00.0", _DGX2_PLX, ports)


def _dgx2_group(number: int, root: str, *leaves: tuple[str, ...]) -> Root:
    ports = {f"{_bus(root, 3)}:{4 * i:02x}.0": _leaf(leaf) for i, leaf in enumerate(leaves)}
    upper = pcie_switch(f"{_bus(root, 2)}:00.0", _DGX2_PLX, ports)
    return Root(f"0000:{root}", number // 2, (Pci(f"0000:{root}:00.0", _DGX2_ROOT_PORT, children=(upper,)),))


def _board(number: int, root: str) -> Root:
    switches = {
        f"{_bus(root, 2)}:{4 * i:02x}.0": Pci(busid, "10de:1ac2:10de:1272", NVSWITCH, width=4)
        for i, busid in enumerate(DGX2_SWITCH_BUS_IDS[number])
    }
    below = pcie_switch(f"{_bus(root, 1)}:00.0", _DGX2_PLX, switches, width=4)
    return Root(
        f"0000:{root}", number, (Pci(f"0000:{root}:00.0", _DGX2_ROOT_PORT, width=4, children=(below,)),)
    )


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
        *(_dgx2_group(number, *group) for number, group in enumerate(_GROUPS[:2])),
        _board(0, "60"),
        Root("0000:85", 1, (Pci("0000:85:00.0", _DGX2_ROOT_PORT, children=storage),)),
        *(_dgx2_group(number + 2, *group) for number, group in enumerate(_GROUPS[2:])),
        _board(1, "c0"),
    )
    gpus = tuple(
        Gpu(
            busid,
            "Tesla V100-SXM3-32GB",
            (7, 0),
            2,
            tuple(Nvlink(switch, "switch", 25781) for switch in DGX2_SWITCH_BUS_IDS[number // 8]),
        )
        for number, busid in enumerate(DGX2_GPU_BUS_IDS)
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


# NVIDIA DGX A100: eight A100 on six NVSwitches, four groups of two GPUs and two NICs, eight NUMA nodes of two EPYC.
#
# The arrangement is that of NCCL issue 1505: three levels of one Broadcom switch chip above a GPU, two above a NIC, all
# under one switch for a group. Bus ids of the lower ports are assumed.

DGX_A100_GPU_BUS_IDS = tuple(f"0000:{bus}:00.0" for bus in ("07", "0f", "47", "4e", "87", "90", "b7", "bd"))
DGX_A100_SWITCH_BUS_IDS = tuple(f"0000:c{digit}:00.0" for digit in range(4, 10))

_DGX_A100_CHIP = "1000:c010:1000:a096"
_DGX_A100_ROOT_PORT = "1022:1483:1022:1453"


def _numa_cpus() -> Cpus:
    nodes = tuple(f"{16 * n}-{16 * n + 15},{16 * n + 128}-{16 * n + 143}" for n in range(8))
    distances = tuple(
        tuple(10 if a == b else 12 if a // 4 == b // 4 else 32 for b in range(8)) for a in range(8)
    )
    return Cpus("AuthenticAMD", "AMD EPYC 7742 64-Core Processor", 23, 49, nodes, distances)


EPYC_7742 = _numa_cpus()


def _gpu(busid: str) -> Pci:
    return Pci(busid, "10de:20b0:10de:134f", GPU_3D, generation=4)


def _dgx_a100_nic(busid: str) -> Pci:
    return Pci(busid, "15b3:101b:15b3:0007", INFINIBAND, generation=4)


def _over(bus: int, device: Pci, *more: Pci) -> Pci:
    """A switch whose upstream port is on a bus and whose downstream ports are on the next one."""
    ports = {f"0000:{bus + 1:02x}:{4 * i:02x}.0": below for i, below in enumerate((device, *more))}
    return pcie_switch(f"0000:{bus:02x}:00.0", _DGX_A100_CHIP, ports, generation=4)


def _dgx_a100_group(root: str, numa: int, gpus: tuple[str, ...], nics: tuple[str, str], *more: Pci) -> Root:
    first, second = (int(gpu[5:7], 16) for gpu in gpus)
    near, far = (int(nic[5:7], 16) for nic in nics)
    top = int(root[5:7], 16) + 1
    pair = _over(near - 2, _dgx_a100_nic(nics[0]), _over(second - 2, _gpu(gpus[1])))
    below = (
        _over(top + 2, _over(first - 2, _gpu(gpus[0]))),
        pair,
        _over(far - 2, _dgx_a100_nic(nics[1])),
        *more,
    )
    return Root(
        root, numa, (Pci(f"{root}:01.1", _DGX_A100_ROOT_PORT, generation=4, children=(_over(top, *below),)),)
    )


def _two_ports(root: str, numa: int, bus: str) -> Root:
    ports = tuple(
        Pci(
            f"0000:{bus}:00.{port}", "15b3:101b:15b3:0009", INFINIBAND if not port else ETHERNET, generation=4
        )
        for port in (0, 1)
    )
    return Root(root, numa, (Pci(f"{root}:03.1", _DGX_A100_ROOT_PORT, generation=4, children=ports),))


def _dgx_a100_roots() -> tuple[Root, ...]:
    switches = [
        Pci(busid, "10de:1af1:10de:0000", NVSWITCH, generation=2, width=4)
        for busid in DGX_A100_SWITCH_BUS_IDS
    ]
    gpus = DGX_A100_GPU_BUS_IDS
    return (
        _dgx_a100_group("0000:00", 3, gpus[0:2], ("0000:0c:00.0", "0000:12:00.0")),
        _dgx_a100_group("0000:40", 1, gpus[2:4], ("0000:4b:00.0", "0000:54:00.0")),
        _two_ports("0000:60", 0, "61"),
        _dgx_a100_group("0000:80", 7, gpus[4:6], ("0000:8d:00.0", "0000:94:00.0")),
        _dgx_a100_group("0000:b0", 5, gpus[6:8], ("0000:ba:00.0", "0000:cc:00.0"), _over(0xC2, *switches)),
        _two_ports("0000:e0", 4, "e1"),
    )


def _dgx_a100_nics() -> tuple[Nic, ...]:
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
    links = tuple(Nvlink(switch, "switch", 25000) for switch in DGX_A100_SWITCH_BUS_IDS for _ in range(2))
    gpus = tuple(
        Gpu(busid, "NVIDIA A100-SXM4-40GB", (8, 0), 4, links, mig=(0, 0, 7)) for busid in DGX_A100_GPU_BUS_IDS
    )
    return FakeMachine("dgx_a100", EPYC_7742, _dgx_a100_roots(), gpus, _dgx_a100_nics())


# NVIDIA DGX H100: eight H100 on four NVSwitches, each sharing a PCIe switch with one 400 Gb/s NIC; two Xeons.
#
# Bus ids of GPUs, NICs and NVSwitches are those of real machines, and so are the numbers of NVLinks from a GPU to each
# NVSwitch (5, 5, 4, 4; `nvidia-smi nvlink -R`, NCCL issue 1182); bus ids of bridges are assumed.

# Bus of each GPU; its NIC is three below.
_GPU_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
DGX_H100_GPU_BUS_IDS = tuple(f"0000:{bus:02x}:00.0" for bus in _GPU_BUSES)
DGX_H100_SWITCH_BUS_IDS = tuple(f"0000:0{digit}:00.0" for digit in range(5, 9))
# The NVSwitch (0 to 3) that each link of GPU 0 leads to; the next GPU's are those shifted by one.
_FAR = (2, 2, 1, 1, 2, 2, 1, 1, 0, 0, 2, 1, 3, 3, 0, 0, 3, 3)
# Device functions: NICs of the GPUs and two for storage, in the order of the RDMA adapters.
_NICS = ("18.0", "29.0", "29.1", "40.0", "4f.0", "5e.0", "9a.0", "aa.0", "aa.1", "c0.0", "ce.0", "dc.0")

_DGX_H100_CHIP = "1000:c030:1000:100b"
_DGX_H100_ROOT_PORT = "8086:352a:8086:0000"
XEON_8480 = Cpus(
    vendor="GenuineIntel",
    name="Intel(R) Xeon(R) Platinum 8480C",
    family=6,
    model=0x8F,
    nodes=("0-55,112-167", "56-111,168-223"),
    distances=((10, 21), (21, 10)),
)


def _pair(number: int, bus: int) -> Root:
    """A GPU and its NIC on one switch, which has a host bridge of its own."""
    nic = Pci(f"0000:{bus - 3:02x}:00.0", "15b3:1021:15b3:0023", INFINIBAND, generation=5)
    gpu = Pci(DGX_H100_GPU_BUS_IDS[number], "10de:2330:10de:16c1", GPU_3D, generation=5)
    ports = {f"0000:{bus - 4:02x}:00.0": nic, f"0000:{bus - 4:02x}:01.0": gpu}
    switch = pcie_switch(f"0000:{bus - 5:02x}:00.0", _DGX_H100_CHIP, ports, generation=5)
    root = f"0000:{bus - 6:02x}"
    return Root(
        root, number // 4, (Pci(f"{root}:01.0", _DGX_H100_ROOT_PORT, generation=5, children=(switch,)),)
    )


def _storage(root: str, numa: int, bus: str) -> Root:
    ports = tuple(
        Pci(f"0000:{bus}:00.{port}", "15b3:1021:15b3:0026", ETHERNET, generation=5) for port in (0, 1)
    )
    return Root(
        f"0000:{root}", numa, (Pci(f"0000:{root}:01.0", _DGX_H100_ROOT_PORT, generation=5, children=ports),)
    )


def _switches() -> Root:
    ports = {
        f"0000:04:{i:02x}.0": Pci(busid, "10de:22a3:10de:1796", NVSWITCH, generation=2, width=2)
        for i, busid in enumerate(DGX_H100_SWITCH_BUS_IDS)
    }
    bridge = pcie_switch("0000:03:00.0", "1000:02b2:1000:0000", ports, generation=4, width=2)
    return Root(
        "0000:00", 0, (Pci("0000:00:01.0", _DGX_H100_ROOT_PORT, generation=4, width=2, children=(bridge,)),)
    )


def _dgx_h100_nic(number: int, place: str) -> Nic:
    bus, function = place.split(".")
    ethernet = bus in ("29", "aa")
    return Nic(
        f"0000:{bus}:00.{function}",
        f"mlx5_{number}",
        "400 Gb/sec (4X NDR)",
        "Ethernet" if ethernet else "InfiniBand",
        f"enp{int(bus, 16)}s0f{function}np{function}" if ethernet else f"ibp{int(bus, 16)}s0",
        None if function == "1" else 400000,
        function == "0",
    )


def dgx_h100() -> FakeMachine:
    """The whole machine; its fabric manager has finished."""
    gpus = tuple(
        Gpu(
            busid,
            "NVIDIA H100 80GB HBM3",
            (9, 0),
            6,
            tuple(Nvlink(DGX_H100_SWITCH_BUS_IDS[(far + number) % 4], "switch", 26562) for far in _FAR),
            fabric=(3, 0, 0, 0x1AA, 1),
            mig=(0, 0, 7),
        )
        for number, busid in enumerate(DGX_H100_GPU_BUS_IDS)
    )
    pairs = [_pair(number, bus) for number, bus in enumerate(_GPU_BUSES)]
    roots = (_switches(), *pairs[:4], _storage("26", 0, "29"), *pairs[4:], _storage("a7", 1, "aa"))
    nics = tuple(_dgx_h100_nic(number, place) for number, place in enumerate(_NICS))
    return FakeMachine("dgx_h100", XEON_8480, roots, gpus, nics)


# Machines of other makes: a box without NVLink, a Grace Hopper superchip, and a cloud machine that hides its switches.
#
# Their parts are real ones; their bus ids are assumed, but for the cloud machine's: those of an AWS p4d.24xlarge.

_OTHER_BOXES_CHIP = "1000:c010:1000:a096"


def pcie_box() -> FakeMachine:
    """Eight L40S (no NVLink), four behind each of two switches, with a 100 Gb/s Ethernet NIC (RoCE) beside them."""
    cpus = Cpus(
        vendor="GenuineIntel",
        name="Intel(R) Xeon(R) Gold 6430",
        family=6,
        model=0x8F,
        nodes=("0-31,64-95", "32-63,96-127"),
        distances=((10, 21), (21, 10)),
    )
    roots, gpus, nics = [], [], []
    for numa, bus in ((0, 0x15), (1, 0x95)):
        devices = [
            Pci(f"0000:{bus + 3 + i:02x}:00.0", "10de:26b9:10de:1851", GPU_3D, generation=4) for i in range(4)
        ]
        nic = Pci(f"0000:{bus + 7:02x}:00.0", "15b3:101d:15b3:0016", ETHERNET, generation=4)
        ports = {f"0000:{bus + 2:02x}:{4 * i:02x}.0": device for i, device in enumerate((*devices, nic))}
        switch = pcie_switch(f"0000:{bus + 1:02x}:00.0", _OTHER_BOXES_CHIP, ports, generation=4)
        port = Pci(f"0000:{bus:02x}:01.0", "8086:352a:8086:0000", generation=5, children=(switch,))
        roots.append(Root(f"0000:{bus:02x}", numa, (port,)))
        gpus += [Gpu(device.busid, "NVIDIA L40S", (8, 9)) for device in devices]
        interface = f"enp{bus + 7}s0np0"
        nics.append(Nic(nic.busid, f"mlx5_{numa}", "100 Gb/sec (4X EDR)", "Ethernet", interface, 100000))
    return FakeMachine("pcie_box", cpus, tuple(roots), tuple(gpus), tuple(nics))


def grace_hopper() -> FakeMachine:
    """One GH200: ten C2C links to its CPU, 18 NVLinks that lead nowhere, and a NUMA node of GPU memory without CPUs."""
    cpus = Cpus("ARM", "", 0x41, 0xD4F, ("0-71", ""), ((10, 80), (80, 10)))
    root_port = "10de:22b8:10de:0000"
    gpu = Pci("0009:01:00.0", "10de:2342:10de:16eb", GPU_3D, generation=4)
    nic = Pci("0000:01:00.0", "15b3:1021:15b3:0023", INFINIBAND, generation=5)
    roots = (
        Root("0000:00", 0, (Pci("0000:00:00.0", "10de:22b1:10de:0000", generation=5, children=(nic,)),)),
        Root("0009:00", 0, (Pci("0009:00:00.0", root_port, generation=4, children=(gpu,)),)),
    )
    dark = tuple(Nvlink("0000:00:00.0", "unknown", 0, up=False) for _ in range(18))
    gpus = (
        Gpu(
            gpu.busid,
            "NVIDIA GH200 480GB",
            (9, 0),
            6,
            dark,
            c2c_links=10,
            mig=(0, 0, 7),
            memory_node=1,
        ),
    )
    nics = (Nic(nic.busid, "mlx5_0", "400 Gb/sec (4X NDR)", "InfiniBand", "ibp1s0", 400000),)
    return FakeMachine("grace_hopper", cpus, roots, gpus, nics, driver="550.54.15")


def hidden_switch() -> FakeMachine:
    """Eight A100 in a virtual machine: NVLinks end at FFFFFFF:FFFF:FF.0, the hypervisor tells no PCIe speeds.

    GPUs and NICs hang on the host bridges without any PCIe bridge, and the GPUs' NUMA nodes are not told.
    """
    cpus = Cpus(
        vendor="GenuineIntel",
        name="Intel(R) Xeon(R) Platinum 8275CL CPU @ 3.00GHz",
        family=6,
        model=85,
        nodes=("0-23,48-71", "24-47,72-95"),
        distances=((10, 21), (21, 10)),
    )
    links = tuple(Nvlink("hidden", "unknown", 25000) for _ in range(12))
    roots, gpus, nics = [], [], []
    for number, bus in enumerate(("0000:10", "0000:20", "0000:90", "0000:a0")):
        nic = Pci(f"{bus}:1b.0", "1d0f:efa0:1d0f:efa0", ETHERNET, generation=0)
        pair = tuple(Pci(f"{bus}:1{place}.0", "10de:20b0:10de:134f", GPU_3D, generation=0) for place in "cd")
        roots.append(Root(bus, -1, (nic, *pair)))
        gpus += [Gpu(pci.busid, "NVIDIA A100-SXM4-40GB", (8, 0), 4, links) for pci in pair]
        adapter = f"rdmap{int(bus[5:], 16)}s27"
        nics.append(Nic(nic.busid, adapter, "100 Gb/sec (4X EDR)", "Ethernet", f"ens{number}", -1))
    return FakeMachine("hidden_switch", cpus, tuple(roots), tuple(gpus), tuple(nics))
