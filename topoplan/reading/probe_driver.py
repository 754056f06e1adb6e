"""Query the NVIDIA driver through NVML: identity, NVLinks and PCIe link of GPUs, peer access of pairs.

Queries go through nvidia-ml-py. The order is NVML's, by PCI bus id, which may differ from CUDA's.

Each function of NVML can answer NotSupported, Unknown or FunctionNotFound on its own, by GPU, driver and container.
Such a failure is None to the caller, and is counted; the probe reports the failures at its end. Only a driver that
cannot be reached at all is an error.

NVML refuses a number beyond the last link, but the number of links is known only if the driver reports it. So all
numbers are queried, and links exist up to the last one for which any call succeeds.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from types import ModuleType
from typing import TypeVar

from topoplan.errors import ProbeError, TopologyError
from topoplan.machine.host_topology import bus_id

Value = TypeVar("Value")

PROBE_ALTERNATIVES = (
    "or give a machine instead: a library name (topoplan list), a file, "
    "or nvidia-smi topo -m | topoplan plan -"
)

_UNSUPPORTED = ("NVMLError_InvalidArgument", "NVMLError_NotSupported", "NVMLError_NotFound")


class NvmlSession:
    """An open connection to NVML; use as a context manager.

    ``nvml`` is ``pynvml`` of nvidia-ml-py, for its constants. ``unanswered`` counts failed calls by function and kind
    of error, without NotSupported, InvalidArgument and NotFound: they say that the hardware lacks the feature.
    ``failures`` counts those other than a missing function: the driver knows the function and fails to answer.
    """

    def __init__(self) -> None:
        self.nvml = _load()
        self.unanswered: Counter[tuple[str, str]] = Counter()
        self.failures = 0

    def __enter__(self) -> NvmlSession:
        """Open the connection; ProbeError if no driver answers."""
        try:
            self.nvml.nvmlInit()
        except self.nvml.NVMLError as error:
            raise ProbeError(_no_driver(type(error).__name__, str(error))) from None
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.nvml.nvmlShutdown()
        except self.nvml.NVMLError as error:
            self.unanswered["nvmlShutdown", type(error).__name__] += 1

    def ask(self, function: str, *arguments: object, kind: type[Value], newer: bool = False) -> Value | None:
        """Return the result of ``nvml<function>``; None if it failed or is of another kind.

        ``newer`` marks a feature of newer GPUs: a driver that is too old to know the function hides nothing.
        """
        try:
            answer = getattr(self.nvml, f"nvml{function}")(*arguments)
        except (self.nvml.NVMLError, AttributeError, UnicodeError) as error:
            name = type(error).__name__
            if name not in _UNSUPPORTED and not (newer and name == "NVMLError_FunctionNotFound"):
                self.unanswered[function, name.removeprefix("NVMLError_")] += 1
                self.failures += name != "NVMLError_FunctionNotFound"
            return None
        return answer if isinstance(answer, kind) else None

    def field(self, device: object, field: int, scope: int = 0) -> int | None:
        """Return a field value of a device, such as the speed of one link; None if it has none."""
        values = self.ask("DeviceGetFieldValues", device, [(field, scope)], kind=object)
        if values is None:
            return None
        value = values[0]  # type: ignore[index]
        if value.nvmlReturn != self.nvml.NVML_SUCCESS:
            return None
        names = {
            self.nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
            self.nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
            self.nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
            self.nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        }
        name = names.get(value.valueType)
        return int(getattr(value.value, name)) if name else None

    def note(self) -> tuple[str, ...]:
        """Return one line for all calls that failed, if any did."""
        if not self.unanswered:
            return ()
        calls = [
            f"{function} ({error}{f', {times} times' if times > 1 else ''})"
            for (function, error), times in sorted(self.unanswered.items())
        ]
        more = f" and {len(calls) - 6} more" if len(calls) > 6 else ""
        return (f"warning: the driver did not answer {', '.join(calls[:6])}{more}; the values are assumed",)


def _load() -> ModuleType:
    try:
        import pynvml
    except ImportError:
        raise ProbeError(
            f"the probe needs nvidia-ml-py: pip install nvidia-ml-py; {PROBE_ALTERNATIVES}"
        ) from None
    module: ModuleType = pynvml
    if not hasattr(module, "nvmlDeviceGetHandleByIndex"):
        raise ProbeError(
            "the module pynvml here is not nvidia-ml-py's: pip uninstall pynvml, then pip install nvidia-ml-py"
        )
    return module


def _no_driver(kind: str, message: str) -> str:
    if kind == "NVMLError_LibraryNotFound":
        cause = "no NVIDIA driver is installed here (libnvidia-ml.so.1 is not found); install it"
    elif kind == "NVMLError_DriverNotLoaded":
        cause = "the NVIDIA driver is installed but not loaded; load it (modprobe nvidia) and see dmesg"
    elif kind == "NVMLError_LibRmVersionMismatch":
        cause = "the NVIDIA driver and its library differ in version; reboot, or install one version of both"
    elif kind == "NVMLError_NoPermission":
        cause = "the NVIDIA driver may not be used by this user; run with access to /dev/nvidia*"
    else:
        cause = f"the NVIDIA driver does not answer ({message.strip()}); see nvidia-smi"
    return f"{cause}, {PROBE_ALTERNATIVES}"


MOST_LINKS = 36
"""Links that are queried of a GPU that does not state their number."""

_UP = (1, 2)
"""Active, and asleep until there is traffic; 3, of newer drivers, is a link that is up and may carry none."""

_FAR_ENDS = {0: "gpu", 1: "cpu", 2: "nvswitch"}


@dataclass(frozen=True, slots=True)
class DriverLink:
    """One NVLink of a GPU; None if the driver did not answer.

    ``peer_to_peer``: it may carry traffic between GPUs. ``version`` is NVML's enumeration: 1 is NVLink 1.0, 2 and 3 are
    2.x, 4 and 5 are 3.x, 6 is 4.0, 7 is 5.0, 8 is 6.0. ``speed`` is in GB/s per direction. ``remote`` is the bus id of
    the far end, empty if it is hidden; ``end`` is gpu, cpu or nvswitch.
    """

    number: int
    active: bool | None
    peer_to_peer: bool | None
    version: int | None
    speed: float | None
    remote: str | None
    end: str | None


def read_links(answers: NvmlSession, handle: object) -> tuple[tuple[DriverLink, ...], bool]:
    """Return the links that exist, in the order of their numbers without gaps, and whether every query succeeded."""
    nvml = answers.nvml
    failures = answers.failures
    count = answers.field(handle, nvml.NVML_FI_DEV_NVLINK_LINK_COUNT)
    common = (answers.field(handle, nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON) or 0) / 1000 or None
    links: list[DriverLink] = []
    existing = 0
    for number in range(MOST_LINKS if count is None else count):
        state = answers.ask("DeviceGetNvLinkState", handle, number, kind=int)
        if state is None:
            state = answers.field(handle, nvml.NVML_FI_DEV_NVLINK_GET_STATE, number)
        info = answers.ask("DeviceGetNvLinkRemotePciInfo", handle, number, kind=object)
        version = answers.ask("DeviceGetNvLinkVersion", handle, number, kind=int)
        allowed = answers.ask(
            "DeviceGetNvLinkCapability", handle, number, nvml.NVML_NVLINK_CAP_P2P_SUPPORTED, kind=int
        )
        kind = answers.ask("DeviceGetNvLinkRemoteDeviceType", handle, number, kind=int, newer=True)
        speed = _speed(answers, handle, number)
        answered = any(answer is not None for answer in (state, info, version, allowed, kind, speed))
        if answered or count is not None:
            existing = number + 1
        links.append(
            DriverLink(
                number=number,
                active=None if state is None else state in _UP,
                peer_to_peer=None if allowed is None else bool(allowed),
                version=version or None,
                speed=speed or common,
                remote=None if info is None else remote_bus_id(info),
                end=None if kind is None else _FAR_ENDS.get(kind),
            )
        )
    return tuple(links[:existing]), answers.failures == failures


def remote_bus_id(info: object) -> str:
    """Return the bus id in NVML's PCI info; empty for a hidden device: ``FFFFFFF:FFFF:FF`` or nothing."""
    text = getattr(info, "busId", "")
    text = text.decode("ascii", "replace") if isinstance(text, bytes) else str(text)
    try:
        return bus_id(text)
    except TopologyError:
        return ""


def _speed(answers: NvmlSession, handle: object, number: int) -> float | None:
    """Return the GB/s of a link, from the field of newer drivers or from those of older ones."""
    nvml = answers.nvml
    older = getattr(nvml, f"NVML_FI_DEV_NVLINK_SPEED_MBPS_L{number}", None)
    fields = [(nvml.NVML_FI_DEV_NVLINK_GET_SPEED, number), *([(older, 0)] if older else [])]
    for field, scope in fields:
        megabytes = answers.field(handle, field, scope)
        if megabytes:
            return megabytes / 1000
    return None


_P2P_READ, _P2P_NVLINK = 0, 2
_NODE_WORDS = 16
"""Words of 64 NUMA nodes that the driver is given to fill: Linux has at most 1024 nodes."""
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
    """One GPU; None and empty if the driver did not answer.

    ``index`` is NVML's number, ``sm`` 70 for compute capability 7.0. ``links`` exist, up or not;
    ``links_complete``: no query about them failed. ``generation`` and ``width`` are of PCIe, now and at most; ``idle``
    is a power-saving state, in which the generation drops. ``mig`` lists UUIDs of instances, None if MIG mode is off.
    ``c2c`` is in GB/s per direction to its CPU over chip-to-chip links. ``fabric`` is the reason that keeps it out of
    the NVLink fabric, empty if it is in.
    """

    index: int
    busid: str
    name: str
    uuid: str
    sm: int | None
    links: tuple[DriverLink, ...]
    links_complete: bool
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
    """The driver's description of a machine.

    ``refused_nvlink`` and ``refused`` hold pairs of GPUs, lower index first, whose peer-to-peer access over NVLink, or
    at all, is refused, with the reason. ``ancestors`` are codes as in ``nvidia-smi topo -m``, NVLinks left aside.
    """

    version: str
    gpus: tuple[DriverGpu, ...]
    refused_nvlink: dict[tuple[int, int], str]
    refused: dict[tuple[int, int], str]
    ancestors: dict[tuple[int, int], str]
    notes: tuple[str, ...]


def read_driver() -> Driver:
    """Query the driver; a ProbeError says that nvidia-ml-py, the driver or a GPU is missing."""
    with NvmlSession() as answers:
        count = answers.ask("DeviceGetCount", kind=int)
        if not count:
            raise ProbeError(
                "the NVIDIA driver is loaded but shows no GPU; look at the container's devices and lspci, "
                f"{PROBE_ALTERNATIVES}"
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
                f"the NVIDIA driver shows {count} GPUs, but none of them answers; see nvidia-smi, {PROBE_ALTERNATIVES}"
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
    answers: NvmlSession, pairs: dict[tuple[int, int], tuple[object, object]], capability: int
) -> dict[tuple[int, int], str]:
    """Return the pairs for which the driver refuses access in either direction, with its reason."""
    refused = {}
    for pair, (first, second) in pairs.items():
        for ends in ((first, second), (second, first)):
            status = answers.ask("DeviceGetP2PStatus", *ends, capability, kind=int)
            if status and pair not in refused:
                refused[pair] = _P2P_STATUS[min(status, len(_P2P_STATUS) - 1)]
    return refused


def _bus_id(answers: NvmlSession, handle: object) -> str | None:
    info = answers.ask("DeviceGetPciInfo", handle, kind=object)
    return (remote_bus_id(info) or None) if info is not None else None


def _gpu(answers: NvmlSession, index: int, handle: object, busid: str) -> DriverGpu:
    capability = _pair(answers.ask("DeviceGetCudaComputeCapability", handle, kind=object))
    links, complete = read_links(answers, handle)
    state = answers.ask("DeviceGetPerformanceState", handle, kind=int)
    return DriverGpu(
        index=index,
        busid=busid,
        name=answers.ask("DeviceGetName", handle, kind=str) or "",
        uuid=answers.ask("DeviceGetUUID", handle, kind=str) or "",
        sm=None if capability is None else 10 * capability[0] + capability[1],
        links=links,
        links_complete=complete,
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


def _numa_node(answers: NvmlSession, handle: object) -> int | None:
    """Return the NUMA node nearest to a GPU, None unless it is one; NVML's NumaNodeId is of the GPU's own memory."""
    scope = answers.nvml.NVML_AFFINITY_SCOPE_NODE
    answer = answers.ask("DeviceGetMemoryAffinity", handle, _NODE_WORDS, scope, kind=object, newer=True)
    words: list[int] = [] if answer is None else list(answer)  # type: ignore[call-overload]
    nodes = [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    return nodes[0] if len(nodes) == 1 else None


def _pair(answer: object) -> tuple[int, int] | None:
    """Return two numbers, which NVML's Python binding gives as a tuple or as a list."""
    if isinstance(answer, (tuple, list)) and len(answer) == 2:
        return int(answer[0]), int(answer[1])
    return None


def _mig(answers: NvmlSession, handle: object) -> tuple[str, ...] | None:
    """Return the UUIDs of the MIG instances; None if MIG mode is off or unknown."""
    mode = _pair(answers.ask("DeviceGetMigMode", handle, kind=object, newer=True))
    if not mode or not mode[0]:
        return None
    most = answers.ask("DeviceGetMaxMigDeviceCount", handle, kind=int) or 0
    instances = [answers.ask("DeviceGetMigDeviceHandleByIndex", handle, i, kind=object) for i in range(most)]
    uuids = [
        answers.ask("DeviceGetUUID", instance, kind=str) for instance in instances if instance is not None
    ]
    return tuple(uuid for uuid in uuids if uuid)


def _chip_to_chip(answers: NvmlSession, handle: object) -> float:
    nvml = answers.nvml
    links = answers.field(handle, nvml.NVML_FI_DEV_C2C_LINK_COUNT) or 0
    up = [i for i in range(links) if answers.field(handle, nvml.NVML_FI_DEV_C2C_LINK_GET_STATUS, i)]
    return sum(answers.field(handle, nvml.NVML_FI_DEV_C2C_LINK_GET_MAX_BW, i) or 0 for i in up) / 1000


_STATES = {1: "registration has not started", 2: "registration is in progress"}


def fabric_state(answers: NvmlSession, handle: object) -> str:
    """Return the reason that keeps the GPU out of the fabric; empty if it is in, or the driver states none."""
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
