"""NVIDIA DGX H100: eight H100 on four NVSwitches, each sharing a PCIe switch with one 400 Gb/s NIC; two Xeons.

Bus ids of GPUs, NICs and NVSwitches are those of real machines, and so are the numbers of NVLinks from a GPU to each
NVSwitch (5, 5, 4, 4; `nvidia-smi nvlink -R`, NCCL issue 1182); bus ids of bridges are assumed.
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

# Bus of each GPU; its NIC is three below.
_GPU_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
GPU_BUS_IDS = tuple(f"0000:{bus:02x}:00.0" for bus in _GPU_BUSES)
SWITCH_BUS_IDS = tuple(f"0000:0{digit}:00.0" for digit in range(5, 9))
# The NVSwitch (0 to 3) that each link of GPU 0 leads to; the next GPU's are those shifted by one.
_FAR = (2, 2, 1, 1, 2, 2, 1, 1, 0, 0, 2, 1, 3, 3, 0, 0, 3, 3)
# Device functions: NICs of the GPUs and two for storage, in the order of the RDMA adapters.
_NICS = ("18.0", "29.0", "29.1", "40.0", "4f.0", "5e.0", "9a.0", "aa.0", "aa.1", "c0.0", "ce.0", "dc.0")

_CHIP = "1000:c030:1000:100b"
_ROOT_PORT = "8086:352a:8086:0000"
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
    gpu = Pci(GPU_BUS_IDS[number], "10de:2330:10de:16c1", GPU_3D, generation=5)
    ports = {f"0000:{bus - 4:02x}:00.0": nic, f"0000:{bus - 4:02x}:01.0": gpu}
    switch = pcie_switch(f"0000:{bus - 5:02x}:00.0", _CHIP, ports, generation=5)
    root = f"0000:{bus - 6:02x}"
    return Root(root, number // 4, (Pci(f"{root}:01.0", _ROOT_PORT, generation=5, children=(switch,)),))


def _storage(root: str, numa: int, bus: str) -> Root:
    ports = tuple(
        Pci(f"0000:{bus}:00.{port}", "15b3:1021:15b3:0026", ETHERNET, generation=5) for port in (0, 1)
    )
    return Root(f"0000:{root}", numa, (Pci(f"0000:{root}:01.0", _ROOT_PORT, generation=5, children=ports),))


def _switches() -> Root:
    ports = {
        f"0000:04:{i:02x}.0": Pci(busid, "10de:22a3:10de:1796", NVSWITCH, generation=2, width=2)
        for i, busid in enumerate(SWITCH_BUS_IDS)
    }
    bridge = pcie_switch("0000:03:00.0", "1000:02b2:1000:0000", ports, generation=4, width=2)
    return Root("0000:00", 0, (Pci("0000:00:01.0", _ROOT_PORT, generation=4, width=2, children=(bridge,)),))


def _nic(number: int, place: str) -> Nic:
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
            tuple(Nvlink(SWITCH_BUS_IDS[(far + number) % 4], "switch", 26562) for far in _FAR),
            fabric=(3, 0, 0, 0x1AA, 1),
            mig=(0, 0, 7),
        )
        for number, busid in enumerate(GPU_BUS_IDS)
    )
    pairs = [_pair(number, bus) for number, bus in enumerate(_GPU_BUSES)]
    roots = (_switches(), *pairs[:4], _storage("26", 0, "29"), *pairs[4:], _storage("a7", 1, "aa"))
    nics = tuple(_nic(number, place) for number, place in enumerate(_NICS))
    return FakeMachine("dgx_h100", XEON_8480, roots, gpus, nics)
