"""What the NVIDIA driver says of the GPUs: identity, NVLinks, PCIe link, and what each pair may do.

Read through NVML (nvidia-ml-py). The order is NVML's, by PCI bus id, which need not be CUDA's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import combinations

from topoplan.errors import ProbeError
from topoplan.probing.answers import INSTEAD, Answers
from topoplan.probing.driver_links import DriverLink, read_links, remote_bus_id

_P2P_READ, _P2P_NVLINK = 0, 2
_NODE_WORDS = 16
"""Words of 64 NUMA nodes that the driver is given to fill: Linux has no more than 1024 nodes."""
_ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_P2P_STATUS = (
    "",
    "chipset not supported",
    "GPU not supported",
    "I/O hub topology not supported",
    "disabled by a registry key",
    "not supported",
    "unknown",
)


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """One GPU; None and empty where the driver did not answer.

    Parameters
    ----------
    index : int
        NVML's number.
    busid, name, uuid : str
    sm : int or None
        Compute capability, 70 for 7.0.
    links : tuple of DriverLink
        Those that exist, up or not.
    links_told : bool
        Whether the driver failed no question about them.
    generation, most_generation, width, most_width : int or None
        PCIe: current and largest possible.
    idle : bool
        The GPU is in a power-saving state, in which the PCIe generation drops.
    numa : int or None
        NUMA node of its CPU.
    mig : tuple of str or None
        UUIDs of its MIG instances if MIG mode is on, else None.
    c2c : float
        GB/s per direction to its CPU over chip-to-chip links.
    fabric : str
        What keeps it out of the NVLink fabric, empty if nothing does.
    """

    index: int
    busid: str
    name: str
    uuid: str
    sm: int | None
    links: tuple[DriverLink, ...]
    links_told: bool
    generation: int | None
    most_generation: int | None
    width: int | None
    most_width: int | None
    idle: bool
    numa: int | None
    mig: tuple[str, ...] | None
    c2c: float
    fabric: str


@dataclass(frozen=True, slots=True)
class Driver:
    """What the driver says of a machine.

    Parameters
    ----------
    version : str
    gpus : tuple of DriverGpu
    refused_nvlink, refused : dict of (int, int) to str
        Pairs of GPUs, lower index first, whose peer-to-peer access over NVLink, or at all, is refused, and why.
    ancestors : dict of (int, int) to str
        Code of each pair as in ``nvidia-smi topo -m``, NVLinks left aside.
    notes : tuple of str
    """

    version: str
    gpus: tuple[DriverGpu, ...]
    refused_nvlink: dict[tuple[int, int], str]
    refused: dict[tuple[int, int], str]
    ancestors: dict[tuple[int, int], str]
    notes: tuple[str, ...]


def read_driver() -> Driver:
    """Ask the driver everything.

    Raises
    ------
    ProbeError
        No nvidia-ml-py, no driver, or no GPU.
    """
    with Answers() as answers:
        count = answers.ask("DeviceGetCount", kind=int)
        if not count:
            raise ProbeError(
                f"the NVIDIA driver is there but shows no GPU; look at the container's devices and lspci, {INSTEAD}"
            )
        handles = {}
        lost = []
        for index in range(count):
            handle = answers.ask("DeviceGetHandleByIndex", index, kind=object)
            busid = None if handle is None else _bus_id(answers, handle)
            if busid is None:
                lost.append(index)
            else:
                handles[index] = (handle, busid)
        if not handles:
            raise ProbeError(
                f"the NVIDIA driver shows {count} GPUs, but none of them answers; see nvidia-smi, {INSTEAD}"
            )
        gpus = tuple(_gpu(answers, index, *held) for index, held in handles.items())
        pairs = {pair: (handles[pair[0]][0], handles[pair[1]][0]) for pair in combinations(handles, 2)}
        ancestors = {
            pair: answers.ask("DeviceGetTopologyCommonAncestor", *ends, kind=int)
            for pair, ends in pairs.items()
        }
        refused_nvlink = _refused(answers, pairs, _P2P_NVLINK)
        refused = _refused(answers, pairs, _P2P_READ)
        version = answers.ask("SystemGetDriverVersion", kind=str) or ""
    gone = tuple(f"warning: GPU {index} does not answer; it is left out" for index in lost)
    return Driver(
        version,
        gpus,
        refused_nvlink,
        refused,
        {pair: _ANCESTORS[code] for pair, code in ancestors.items() if code in _ANCESTORS},
        (*gone, *answers.note()),
    )


def _refused(
    answers: Answers, pairs: dict[tuple[int, int], tuple[object, object]], capability: int
) -> dict[tuple[int, int], str]:
    """Pairs for which the driver says no, with its reason, in either direction."""
    refused = {}
    for pair, (first, second) in pairs.items():
        for ends in ((first, second), (second, first)):
            status = answers.ask("DeviceGetP2PStatus", *ends, capability, kind=int)
            if status and pair not in refused:
                refused[pair] = _P2P_STATUS[min(status, len(_P2P_STATUS) - 1)]
    return refused


def _bus_id(answers: Answers, handle: object) -> str | None:
    info = answers.ask("DeviceGetPciInfo", handle, kind=object)
    return (remote_bus_id(info) or None) if info is not None else None


def _gpu(answers: Answers, index: int, handle: object, busid: str) -> DriverGpu:
    capability = _pair(answers.ask("DeviceGetCudaComputeCapability", handle, kind=object))
    links, told = read_links(answers, handle)
    state = answers.ask("DeviceGetPerformanceState", handle, kind=int)
    return DriverGpu(
        index=index,
        busid=busid,
        name=answers.ask("DeviceGetName", handle, kind=str) or "",
        uuid=answers.ask("DeviceGetUUID", handle, kind=str) or "",
        sm=None if capability is None else 10 * capability[0] + capability[1],
        links=links,
        links_told=told,
        generation=answers.ask("DeviceGetCurrPcieLinkGeneration", handle, kind=int),
        most_generation=answers.ask("DeviceGetMaxPcieLinkGeneration", handle, kind=int),
        width=answers.ask("DeviceGetCurrPcieLinkWidth", handle, kind=int),
        most_width=answers.ask("DeviceGetMaxPcieLinkWidth", handle, kind=int),
        idle=state is None or state > 0,
        numa=_numa_node(answers, handle),
        mig=_mig(answers, handle),
        c2c=_chip_to_chip(answers, handle),
        fabric=fabric_state(answers, handle),
    )


def _numa_node(answers: Answers, handle: object) -> int | None:
    """The NUMA node nearest to a GPU, None where it is not one; NVML's NumaNodeId is that of the GPU's own memory."""
    scope = answers.nvml.NVML_AFFINITY_SCOPE_NODE
    answer = answers.ask("DeviceGetMemoryAffinity", handle, _NODE_WORDS, scope, kind=object, newer=True)
    words: list[int] = [] if answer is None else list(answer)  # type: ignore[call-overload]
    nodes = [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    return nodes[0] if len(nodes) == 1 else None


def _pair(answer: object) -> tuple[int, int] | None:
    """Two numbers, which NVML's Python binding gives as a tuple or as a list."""
    if isinstance(answer, (tuple, list)) and len(answer) == 2:
        return int(answer[0]), int(answer[1])
    return None


def _mig(answers: Answers, handle: object) -> tuple[str, ...] | None:
    """UUIDs of the MIG instances; None if MIG mode is off or unknown."""
    mode = _pair(answers.ask("DeviceGetMigMode", handle, kind=object, newer=True))
    if not mode or not mode[0]:
        return None
    most = answers.ask("DeviceGetMaxMigDeviceCount", handle, kind=int) or 0
    instances = [answers.ask("DeviceGetMigDeviceHandleByIndex", handle, i, kind=object) for i in range(most)]
    uuids = [
        answers.ask("DeviceGetUUID", instance, kind=str) for instance in instances if instance is not None
    ]
    return tuple(uuid for uuid in uuids if uuid)


def _chip_to_chip(answers: Answers, handle: object) -> float:
    nvml = answers.nvml
    links = answers.field(handle, nvml.NVML_FI_DEV_C2C_LINK_COUNT) or 0
    up = [i for i in range(links) if answers.field(handle, nvml.NVML_FI_DEV_C2C_LINK_GET_STATUS, i)]
    return sum(answers.field(handle, nvml.NVML_FI_DEV_C2C_LINK_GET_MAX_BW, i) or 0 for i in up) / 1000


_STATES = {1: "registration has not started", 2: "registration is in progress"}


def fabric_state(answers: Answers, handle: object) -> str:
    """What keeps the GPU out of the fabric; empty if it is in, if there is none, or if the driver does not say."""
    for function, structure in (
        ("DeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfoV_t"),
        ("DeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
    ):
        make = getattr(answers.nvml, structure, None)
        if make is None:
            continue
        info = make()
        if answers.ask(function, handle, ctypes.byref(info), kind=object, newer=True) is not None:
            if info.state == answers.nvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status:
                return f"registration failed with status {info.status}"
            return _STATES.get(info.state, "")
    return ""
