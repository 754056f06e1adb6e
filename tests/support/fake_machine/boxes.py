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

EDR, HDR, NDR, IDLE = (
    "100 Gb/sec (4X EDR)",
    "200 Gb/sec (4X HDR)",
    "400 Gb/sec (4X NDR)",
    "10 Gb/sec (4X SDR)",
)


def at(bus: int, place: str = "00.0") -> str:
    return f"0000:{bus:02x}:{place}"


def xeon(name: str, model: int, *nodes: str) -> Cpus:
    return Cpus("GenuineIntel", f"Intel(R) Xeon(R) {name}", 6, model, nodes, ((10, 21), (21, 10)))


def switch(bus: int, ids: str, *devices: Pci, first: int = 0, step: int = 4, **link: int) -> Pci:
    """A switch whose upstream port is on a bus and whose downstream ports are on the next one."""
    ports = {at(bus + 1, f"{first + step * i:02x}.0"): device for i, device in enumerate(devices)}
    return pcie_switch(at(bus), ids, ports, **link)


def below(bus: int, numa: int, place: str, ids: str, *devices: Pci, **link: int) -> Root:
    """A host bridge with one root port."""
    return Root(f"0000:{bus:02x}", numa, (Pci(at(bus, place), ids, children=devices, **link),))


# NVIDIA DGX-1: eight GPUs in a hybrid cube mesh, four PLX switches with two GPUs and one NIC each, two Xeons.
#
# Bus ids, chips and NVLink pairs are those of real machines (`nvidia-smi topo -m` of a DGX-1V; NCCL issue 671); which
# of a GPU's links goes where, and the Ethernet and graphics ports, are assumed.

DGX1_GPU_BUS_IDS = tuple(map(at, (0x06, 0x07, 0x0A, 0x0B, 0x85, 0x86, 0x89, 0x8A)))

_QUADS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
_PAIRS = (*_QUADS, *((a + 4, b + 4) for a, b in _QUADS), *((a, a + 4) for a in range(4)))
P100_WIRES = tuple(sorted(_PAIRS))
_DOUBLED = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
V100_WIRES = tuple(sorted((*_PAIRS, *_DOUBLED)))


def _dgx1(name: str, gpu_ids: str, gpus: tuple[Gpu, ...]) -> FakeMachine:
    cards = [Pci(gpu.busid, gpu_ids, GPU_3D, current_generation=int(gpu.pstate == 8)) for gpu in gpus]

    def quarter(root: int, place: str, bus: int, nic: int, first: int) -> Pci:
        """A root port with the switch of two GPUs and a NIC (ConnectX-4, 100 Gb/s)."""
        adapter = Pci(at(nic), "15b3:1013:15b3:0008", INFINIBAND)
        plx = switch(bus, "10b5:8764:10b5:8764", adapter, *cards[first : first + 2], first=4)
        return Pci(at(root, place), "8086:6f04:8086:0000", children=(plx,))

    ports = [Pci(at(1, f"00.{i}"), "8086:1528:8086:0001", ETHERNET, generation=2, width=8) for i in (0, 1)]
    ethernet = Pci(at(0, "01.0"), "8086:6f02:8086:0000", width=8, children=tuple(ports))
    screen = Pci(at(2), "1a03:2000:1a03:2000", "0x030000", generation=0)
    graphics = Pci(at(0, "1c.0"), "8086:8d10:8086:7270", generation=2, width=1, children=(screen,))
    first = (quarter(0, "02.0", 0x03, 0x05, 0), quarter(0, "03.0", 0x08, 0x0C, 2))
    second = (quarter(0x80, "02.0", 0x82, 0x84, 4), quarter(0x80, "03.0", 0x87, 0x8B, 6))
    roots = (Root("0000:00", 0, (ethernet, *first, graphics)), Root("0000:80", 1, second))
    rdma = [
        Nic(at(bus), f"mlx5_{n}", EDR, interface=f"ib{n}", megabits=100000)
        for n, bus in enumerate((0x05, 0x0C, 0x84, 0x8B))
    ]
    nics = (
        *rdma,
        Nic("0000:01:00.0", interface="eno1", megabits=10000),
        Nic("0000:01:00.1", interface="eno2", up=False),
        Nic("", interface="docker0", megabits=-1, up=False),
        Nic("", interface="lo"),
    )
    cpus = xeon("CPU E5-2698 v4 @ 2.20GHz", 79, "0-19,40-59", "20-39,60-79")
    return FakeMachine(name, cpus, roots, gpus, nics, p2p_across_sockets=False)


def _cube_mesh(wires: tuple[tuple[int, int], ...], megabytes: int) -> list[tuple[Nvlink, ...]]:
    """Links of each GPU, in the order of the GPUs that they lead to; two wires of a pair are two links."""
    ends: list[list[int]] = [[] for _ in DGX1_GPU_BUS_IDS]
    for a, b in wires:
        ends[a].append(b)
        ends[b].append(a)
    return [tuple(Nvlink(DGX1_GPU_BUS_IDS[far], "gpu", megabytes) for far in sorted(row)) for row in ends]


def dgx1p() -> FakeMachine:
    """DGX-1 with P100: one NVLink for each of 16 pairs, which the driver says run at 19.179 GB/s."""
    rows = zip(DGX1_GPU_BUS_IDS, _cube_mesh(P100_WIRES, 19179), strict=True)
    gpus = tuple(Gpu(busid, "Tesla P100-SXM2-16GB", (6, 0), 1, links) for busid, links in rows)
    return _dgx1("dgx1p", "10de:15f9:10de:116b", gpus)


def dgx1v() -> FakeMachine:
    """DGX-1 with V100: 24 NVLinks on the same pairs, 8 of them doubled; GPUs 4 to 7 are idle (PCIe generation 1)."""
    rows = enumerate(zip(DGX1_GPU_BUS_IDS, _cube_mesh(V100_WIRES, 25781), strict=True))
    gpus = tuple(
        Gpu(busid, "Tesla V100-SXM2-32GB", (7, 0), 2, links, pstate=8 if number > 3 else 0)
        for number, (busid, links) in rows
    )
    return _dgx1("dgx1v", "10de:1db5:10de:1249", gpus)


# NVIDIA DGX-2: sixteen V100 on two boards of six NVSwitches, behind two levels of PLX switches.
#
# Bus ids of GPUs and NICs and their nearness are those of real machines (`nvidia-smi topo -m`, nccl-tests issue 78);
# bus ids of bridges and NVSwitches are assumed. Each GPU has one NVLink to each NVSwitch of its board.

# Host bridge, then the bus of the first GPU below each of its leaf switches, which a NIC and a GPU follow.
_GROUPS = ((0x2E, (0x34, 0x39)), (0x51, (0x57, 0x5C)), (0xB1, (0xB7, 0xBC)), (0xDA, (0xE0, 0xE5)))


def dgx2() -> FakeMachine:
    """All sixteen GPUs, eight NICs beside them and one with two Ethernet ports at the second socket."""
    plx, root_port = "10b5:9797:10b5:9797", "8086:2030:8086:0000"
    boards = [[at(16 * digit + i) for i in range(3, 9)] for digit in (6, 0xC)]
    gpu_buses = [leaf + i for _, leaves in _GROUPS for leaf in leaves for i in (0, 2)]

    def leaf(bus: int) -> Pci:
        """A switch with GPU, NIC (ConnectX-5, 100 Gb/s), GPU."""
        first, second = (Pci(at(bus + i), "10de:1db8:10de:12d9", GPU_3D) for i in (0, 2))
        return switch(bus - 2, plx, first, Pci(at(bus + 1), "15b3:1017:15b3:0008", INFINIBAND), second)

    groups = [
        below(bus, number // 2, "00.0", root_port, switch(bus + 2, plx, *map(leaf, leaves)))
        for number, (bus, leaves) in enumerate(_GROUPS)
    ]
    first, second = (
        below(
            bus,
            number,
            "00.0",
            root_port,
            switch(
                bus + 1,
                plx,
                *(Pci(busid, "10de:1ac2:10de:1272", NVSWITCH, width=4) for busid in board),
                width=4,
            ),
            width=4,
        )
        for number, (bus, board) in enumerate(zip((0x60, 0xC0), boards, strict=True))
    )
    storage = [Pci(at(0x86, f"00.{port}"), "15b3:1017:15b3:0008", ETHERNET) for port in (0, 1)]
    roots = (*groups[:2], first, below(0x85, 1, "00.0", root_port, *storage), *groups[2:], second)
    gpus = tuple(
        Gpu(
            *(at(bus), "Tesla V100-SXM3-32GB", (7, 0), 2),
            tuple(Nvlink(busid, "switch", 25781) for busid in boards[number // 8]),
        )
        for number, bus in enumerate(gpu_buses)
    )
    adapters = [at(leaf + 1) for _, leaves in _GROUPS for leaf in leaves]
    adapters[4:4] = ["0000:86:00.0", "0000:86:00.1"]
    nics = tuple(
        Nic(busid, f"mlx5_{n}", EDR, "Ethernet", f"enp134s0f{n - 4}", 100000)
        if n in (4, 5)
        else Nic(busid, f"mlx5_{n}", EDR, "InfiniBand", f"ib{n}", 100000)
        for n, busid in enumerate(adapters)
    )
    cpus = xeon("Platinum 8168 CPU @ 2.70GHz", 85, "0-23,48-71", "24-47,72-95")
    return FakeMachine("dgx2", cpus, roots, gpus, nics)


# NVIDIA DGX A100: eight A100 on six NVSwitches, four groups of two GPUs and two NICs, eight NUMA nodes of two EPYC.
#
# The arrangement is that of NCCL issue 1505: three levels of one Broadcom switch chip above a GPU, two above a NIC, all
# under one switch for a group. Bus ids of the lower ports are assumed.


def dgx_a100() -> FakeMachine:
    """The whole machine: two NVLinks from each GPU to each NVSwitch."""
    chip, root_port, adapter = "1000:c010:1000:a096", "1022:1483:1022:1453", "15b3:101b:15b3:0007"
    switches = [at(bus) for bus in range(0xC4, 0xCA)]
    fabric = [Pci(busid, "10de:1af1:10de:0000", NVSWITCH, generation=2, width=4) for busid in switches]

    def over(bus: int, *devices: Pci) -> Pci:
        return switch(bus, chip, *devices, generation=4)

    def group(root: int, numa: int, first: int, second: int, near: int, far: int, *more: Pci) -> Root:
        """Two GPUs and two NICs, the first of which is beside the second GPU."""
        one, other = (Pci(at(bus), "10de:20b0:10de:134f", GPU_3D, generation=4) for bus in (first, second))
        beside, apart = (Pci(at(bus), adapter, INFINIBAND, generation=4) for bus in (near, far))
        parts = (over(root + 3, over(first - 2, one)), over(near - 2, beside, over(second - 2, other)))
        whole = over(root + 1, *parts, over(far - 2, apart), *more)
        return below(root, numa, "01.1", root_port, whole, generation=4)

    def two_ports(root: int, numa: int) -> Root:
        kinds = enumerate((INFINIBAND, ETHERNET))
        ports = (Pci(at(root + 1, f"00.{i}"), "15b3:101b:15b3:0009", kind, generation=4) for i, kind in kinds)
        return below(root, numa, "03.1", root_port, *ports, generation=4)

    roots = (
        group(0x00, 3, 0x07, 0x0F, 0x0C, 0x12),
        group(0x40, 1, 0x47, 0x4E, 0x4B, 0x54),
        two_ports(0x60, 0),
        group(0x80, 7, 0x87, 0x90, 0x8D, 0x94),
        group(0xB0, 5, 0xB7, 0xBD, 0xBA, 0xCC, over(0xC2, *fabric)),
        two_ports(0xE0, 4),
    )
    links = tuple(Nvlink(busid, "switch", 25000) for busid in switches for _ in range(2))
    gpus = tuple(
        Gpu(at(bus), "NVIDIA A100-SXM4-40GB", (8, 0), 4, links, mig=(0, 0, 7))
        for bus in (0x07, 0x0F, 0x47, 0x4E, 0x87, 0x90, 0xB7, 0xBD)
    )
    # eight at 200 Gb/s beside the GPUs; one more in use, and three ports that nothing is plugged into
    places = "0c:00.0 12:00.0 4b:00.0 54:00.0 61:00.0 61:00.1 8d:00.0 94:00.0 ba:00.0 cc:00.0 e1:00.0 e1:00.1"
    nics = []
    for n, place in enumerate(places.split()):
        used = n not in (5, 10, 11)
        ethernet = place.endswith(".1")
        kind = ("Ethernet", f"enp{n}s0f1np1") if ethernet else ("InfiniBand", f"ib{n}")
        nics.append(
            Nic(f"0000:{place}", f"mlx5_{n}", HDR if used else IDLE, *kind, 200000 if used else None, used)
        )
    nodes = tuple(f"{16 * n}-{16 * n + 15},{16 * n + 128}-{16 * n + 143}" for n in range(8))
    distances = tuple(
        tuple(10 if a == b else 12 if a // 4 == b // 4 else 32 for b in range(8)) for a in range(8)
    )
    cpus = Cpus("AuthenticAMD", "AMD EPYC 7742 64-Core Processor", 23, 49, nodes, distances)
    return FakeMachine("dgx_a100", cpus, roots, gpus, tuple(nics))


# NVIDIA DGX H100: eight H100 on four NVSwitches, each sharing a PCIe switch with one 400 Gb/s NIC; two Xeons.
#
# Bus ids of GPUs, NICs and NVSwitches are those of real machines, and so are the numbers of NVLinks from a GPU to each
# NVSwitch (5, 5, 4, 4; `nvidia-smi nvlink -R`, NCCL issue 1182); bus ids of bridges are assumed.

# Bus of each GPU; its NIC is three below.
_GPU_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
# The NVSwitch (0 to 3) that each link of GPU 0 leads to; the next GPU's are those shifted by one.
_FAR = (2, 2, 1, 1, 2, 2, 1, 1, 0, 0, 2, 1, 3, 3, 0, 0, 3, 3)


def dgx_h100() -> FakeMachine:
    """The whole machine; its fabric manager has finished."""
    root_port, switches = "8086:352a:8086:0000", [at(bus) for bus in range(5, 9)]

    def pair(number: int, bus: int) -> Root:
        """A GPU and its NIC on one switch, which has a host bridge of its own."""
        nic = Pci(at(bus - 3), "15b3:1021:15b3:0023", INFINIBAND, generation=5)
        gpu = Pci(at(bus), "10de:2330:10de:16c1", GPU_3D, generation=5)
        chip = switch(bus - 5, "1000:c030:1000:100b", nic, gpu, step=1, generation=5)
        return below(bus - 6, number // 4, "01.0", root_port, chip, generation=5)

    def storage(root: int, numa: int, bus: int) -> Root:
        ports = (Pci(at(bus, f"00.{i}"), "15b3:1021:15b3:0026", ETHERNET, generation=5) for i in (0, 1))
        return below(root, numa, "01.0", root_port, *ports, generation=5)

    fabric = [Pci(busid, "10de:22a3:10de:1796", NVSWITCH, generation=2, width=2) for busid in switches]
    bridge = switch(3, "1000:02b2:1000:0000", *fabric, step=1, generation=4, width=2)
    pairs = [pair(number, bus) for number, bus in enumerate(_GPU_BUSES)]
    first = below(0, 0, "01.0", root_port, bridge, generation=4, width=2)
    roots = (first, *pairs[:4], storage(0x26, 0, 0x29), *pairs[4:], storage(0xA7, 1, 0xAA))
    gpus = tuple(
        Gpu(
            *(at(bus), "NVIDIA H100 80GB HBM3", (9, 0), 6),
            tuple(Nvlink(switches[(far + number) % 4], "switch", 26562) for far in _FAR),
            fabric=(3, 0, 0, 0x1AA, 1),
            mig=(0, 0, 7),
        )
        for number, bus in enumerate(_GPU_BUSES)
    )
    nics = []
    places = "18.0 29.0 29.1 40.0 4f.0 5e.0 9a.0 aa.0 aa.1 c0.0 ce.0 dc.0"
    for n, place in enumerate(places.split()):
        bus, function = int(place[:2], 16), place[3:]
        ethernet = bus in (0x29, 0xAA)  # two for storage
        kind = (
            ("Ethernet", f"enp{bus}s0f{function}np{function}") if ethernet else ("InfiniBand", f"ibp{bus}s0")
        )
        speed = (None, False) if function == "1" else (400000, True)
        nics.append(Nic(at(bus, f"00.{function}"), f"mlx5_{n}", NDR, *kind, *speed))
    cpus = xeon("Platinum 8480C", 0x8F, "0-55,112-167", "56-111,168-223")
    return FakeMachine("dgx_h100", cpus, roots, gpus, tuple(nics))


# Machines of other makes: a box without NVLink, a Grace Hopper superchip, and a cloud machine that hides its switches.
#
# Their parts are real ones; their bus ids are assumed, but for the cloud machine's: those of an AWS p4d.24xlarge.


def pcie_box() -> FakeMachine:
    """Eight L40S (no NVLink), four behind each of two switches, with a 100 Gb/s Ethernet NIC (RoCE) beside them."""
    roots, gpus, nics = [], [], []
    for numa, bus in enumerate((0x15, 0x95)):
        cards = [Pci(at(bus + 3 + i), "10de:26b9:10de:1851", GPU_3D, generation=4) for i in range(4)]
        nic = Pci(at(bus + 7), "15b3:101d:15b3:0016", ETHERNET, generation=4)
        chip = switch(bus + 1, "1000:c010:1000:a096", *cards, nic, generation=4)
        roots.append(below(bus, numa, "01.0", "8086:352a:8086:0000", chip, generation=5))
        gpus += [Gpu(card.busid, "NVIDIA L40S", (8, 9)) for card in cards]
        nics.append(Nic(nic.busid, f"mlx5_{numa}", EDR, "Ethernet", f"enp{bus + 7}s0np0", 100000))
    cpus = xeon("Gold 6430", 0x8F, "0-31,64-95", "32-63,96-127")
    return FakeMachine("pcie_box", cpus, tuple(roots), tuple(gpus), tuple(nics))


def grace_hopper() -> FakeMachine:
    """One GH200: ten C2C links to its CPU, 18 NVLinks that lead nowhere, and a NUMA node of GPU memory without CPUs."""
    cpus = Cpus("ARM", "", 0x41, 0xD4F, ("0-71", ""), ((10, 80), (80, 10)))
    card = Pci("0009:01:00.0", "10de:2342:10de:16eb", GPU_3D, generation=4)
    nic = Pci(at(1), "15b3:1021:15b3:0023", INFINIBAND, generation=5)
    port = Pci("0009:00:00.0", "10de:22b8:10de:0000", generation=4, children=(card,))
    roots = (below(0, 0, "00.0", "10de:22b1:10de:0000", nic, generation=5), Root("0009:00", 0, (port,)))
    dark = (Nvlink(at(0), "unknown", 0, up=False),) * 18
    gpu = Gpu(card.busid, "NVIDIA GH200 480GB", (9, 0), 6, dark, c2c_links=10, mig=(0, 0, 7), memory_node=1)
    nics = (Nic(nic.busid, "mlx5_0", NDR, "InfiniBand", "ibp1s0", 400000),)
    return FakeMachine("grace_hopper", cpus, roots, (gpu,), nics, driver="550.54.15")


def hidden_switch() -> FakeMachine:
    """Eight A100 in a virtual machine: NVLinks end at FFFFFFF:FFFF:FF.0, the hypervisor tells no PCIe speeds.

    GPUs and NICs hang on the host bridges without any PCIe bridge, and the GPUs' NUMA nodes are not told.
    """
    links = (Nvlink("hidden", "unknown", 25000),) * 12
    roots, gpus, nics = [], [], []
    for number, bus in enumerate((0x10, 0x20, 0x90, 0xA0)):
        nic = Pci(at(bus, "1b.0"), "1d0f:efa0:1d0f:efa0", ETHERNET, generation=0)
        cards = [Pci(at(bus, f"1{place}.0"), "10de:20b0:10de:134f", GPU_3D, generation=0) for place in "cd"]
        roots.append(Root(f"0000:{bus:02x}", -1, (nic, *cards)))
        gpus += [Gpu(card.busid, "NVIDIA A100-SXM4-40GB", (8, 0), 4, links) for card in cards]
        nics.append(Nic(nic.busid, f"rdmap{bus}s27", EDR, "Ethernet", f"ens{number}", -1))
    cpus = xeon("Platinum 8275CL CPU @ 3.00GHz", 85, "0-23,48-71", "24-47,72-95")
    return FakeMachine("hidden_switch", cpus, tuple(roots), tuple(gpus), tuple(nics))
