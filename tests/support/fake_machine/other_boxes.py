"""Machines of other makes: a box without NVLink, a Grace Hopper superchip, and a cloud machine that hides its switches.

Their parts are real ones; their bus ids are assumed, but for the cloud machine's: those of an AWS p4d.24xlarge.
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

_CHIP = "1000:c010:1000:a096"


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
        switch = pcie_switch(f"0000:{bus + 1:02x}:00.0", _CHIP, ports, generation=4)
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
