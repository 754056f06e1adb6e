"""All fake machines by name, and those with something amiss: dead wires, refused access, failing calls, no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import product

from tests.support.fake_machine import boxes
from tests.support.fake_machine.boxes import DGX1_GPU_BUS_IDS, dgx1v, dgx_a100
from tests.support.fake_machine.description import FakeMachine, Gpu
from tests.support.fake_machine.nvml_text import CHIPSET_NOT_SUPPORTED, DISABLED_BY_KEY

HALF_SPEED = 12890

_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _UNKNOWN = 3, 13, 999

_ABOUT_GPUS = (
    "Name UUID MinorNumber CudaComputeCapability CurrPcieLinkGeneration CurrPcieLinkWidth MaxPcieLinkGeneration "
    "MaxPcieLinkWidth PerformanceState CpuAffinity TopologyCommonAncestor P2PStatus FieldValues MigMode "
    "GpuFabricInfo C2cModeInfoV MemoryAffinity NumaNodeId"
)
_ABOUT_LINKS = "Version Capability RemoteDeviceType RemotePciInfo State"


def _spoilt(gpu: Gpu, far: str, *, megabytes: int) -> Gpu:
    """A GPU whose first link to another has a new speed; 0: it is down."""
    index = next(index for index, link in enumerate(gpu.links) if link.remote == far)
    links = list(gpu.links)
    links[index] = replace(links[index], megabytes=megabytes, up=megabytes > 0)
    return replace(gpu, links=tuple(links))


def dead_nvlinks() -> FakeMachine:
    """A DGX-1V of which one of the two wires 0-3 is down, and one of the two wires 5-6 runs at half speed."""
    machine = dgx1v()
    gpus = list(machine.gpus)
    for a, b in ((0, 3), (3, 0)):
        gpus[a] = _spoilt(gpus[a], DGX1_GPU_BUS_IDS[b], megabytes=0)
    for a, b in ((5, 6), (6, 5)):
        gpus[a] = _spoilt(gpus[a], DGX1_GPU_BUS_IDS[b], megabytes=HALF_SPEED)
    return replace(machine, name="dead_nvlinks", gpus=tuple(gpus))


def refused_p2p() -> FakeMachine:
    """A DGX-1V whose driver refuses peer access between GPUs 0 and 1, which share a wire, and 0 and 5, which do not."""
    refused = ((0, 1, DISABLED_BY_KEY), (0, 5, CHIPSET_NOT_SUPPORTED))
    return replace(dgx1v(), name="refused_p2p", refused=refused)


def one_mig() -> FakeMachine:
    """A DGX A100 with GPU 3 cut into two MIG instances: its NVLinks are down, and it has no peers."""
    machine = dgx_a100()
    gpus = list(machine.gpus)
    gpus[3] = replace(
        gpus[3],
        links=tuple(replace(link, up=False) for link in gpus[3].links),
        mig=(1, 1, 7),
        instances=("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA A100-SXM4-40GB MIG 4g.20gb"),
    )
    return replace(machine, name="one_mig", gpus=tuple(gpus))


def _mix(what: str) -> int:
    """The same number for the same text in every run and process."""
    return int.from_bytes(sha256(what.encode()).digest()[:4])


def refusals(seed: int) -> Iterator[str]:
    """Rules for the calls that fail: each function for each GPU, or for each link, with probability one half.

    Function, GPU and link decide by a checksum, which also chooses between NotSupported, Unknown and FunctionNotFound;
    so no list of what fails is needed to repeat it. How many GPUs there are, and their handles and bus ids, are
    always told.
    """
    cases = [(f"nvmlDeviceGet{what}", f"{gpu}") for what in _ABOUT_GPUS.split() for gpu in range(8)]
    every = product(_ABOUT_LINKS.split(), range(8), range(6))
    cases += [(f"nvmlDeviceGetNvLink{what}", f"{gpu} {link}") for what, gpu, link in every]
    for function, where in cases:
        number = _mix(f"{seed} {function} {where}")
        if number % 2:
            code = (_NOT_SUPPORTED, _UNKNOWN, _FUNCTION_NOT_FOUND)[number // 2 % 3]
            yield f"{function} {code} {where}"


def half_failing(seed: int = 1) -> FakeMachine:
    """A DGX-1V where about half of all calls fail (`refusals`), and of sysfs a file of each GPU, NIC and node."""
    machine = dgx1v()
    files = ("max_link_speed", "max_link_width", "current_link_speed", "numa_node", "class")
    broken: dict[bool, list[str]] = {True: [], False: []}
    for number, (busid, (root, chain)) in enumerate(sorted(machine.places().items())):
        path = "/".join((f"devices/pci{root.bus}", *(pci.busid for pci in chain)))
        # A device whose class is not told is none: that happens to a bridge, not to a GPU or NIC.
        names = files if chain[-1].children else files[:4]
        broken[_mix(f"{seed} {busid}") % 2 == 0].append(f"{path}/{names[number % len(names)]}")
    unreadable = (*broken[True], "devices/system/node/node1/cpulist", "class/infiniband/mlx5_1/ports/1/rate")
    absent = (*broken[False], "class/infiniband/mlx5_2/ports/1/state", "class/net/eno1/operstate")
    rules = tuple(refusals(seed))
    return replace(machine, name="half_failing", rules=rules, unreadable=unreadable, absent=absent)


def no_gpu() -> FakeMachine:
    """A server with the driver installed, and not one GPU."""
    machine = dgx1v()
    roots = tuple(
        replace(root, children=tuple(port for port in root.children if port.busid == "0000:00:01.0"))
        for root in machine.roots
    )
    nics = tuple(nic for nic in machine.nics if not nic.adapter)
    return replace(machine, name="no_gpu", roots=roots, gpus=(), nics=nics)


def no_driver() -> FakeMachine:
    """A DGX-1V without NVIDIA's driver: the GPUs are on the PCIe bus, and the library is missing."""
    return replace(dgx1v(), name="no_driver", driver="", library="none")


def old_driver() -> FakeMachine:
    """A DGX-1V with a driver whose library lacks the newer functions altogether."""
    return replace(dgx1v(), name="old_driver", driver="418.67", cuda=10010, library="old")


def lost_gpu() -> FakeMachine:
    """A DGX A100 whose GPU 5 has fallen off the bus: all that is asked about it answers GpuIsLost."""
    return replace(dgx_a100(), name="lost_gpu", rules=("nvmlDevice* 15 5",))


def driver_not_loaded() -> FakeMachine:
    """A DGX-1V with the library, but without the kernel module."""
    return replace(dgx1v(), name="driver_not_loaded", driver="", rules=("nvmlInitWithFlags 9",))


_BOXES = (boxes.dgx1p, dgx1v, boxes.dgx2, dgx_a100, boxes.dgx_h100, boxes.pcie_box)
_AMISS = (
    dead_nvlinks,
    refused_p2p,
    half_failing,
    one_mig,
    lost_gpu,
    no_gpu,
    no_driver,
    driver_not_loaded,
    old_driver,
)
MACHINES: dict[str, Callable[[], FakeMachine]] = {
    machine.__name__: machine for machine in (*_BOXES, *_AMISS, boxes.grace_hopper, boxes.hidden_switch)
}
