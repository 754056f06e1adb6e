"""Find the identities by which NCCL knows devices: GPU numbers, PCI bus ids, NUMA nodes, CPU models.

``dev`` is the index of NVML and nvidia-smi, neither the rank in a communicator nor the number under
CUDA_VISIBLE_DEVICES. If all GPUs of a server are called ``gpu<n>`` (or ``<server>.gpu<n>``), n is that index, also for
an allocation; otherwise GPUs are counted in their order.

NCCL needs bus ids. They may be given as ``nvidia-smi --query-gpu=index,pci.bus_id --format=csv`` lists them, with or
without head, columns in any order. Invented ones lie in PCI domain ffff, as in the files of AWS and Azure: switches on
bus ff, GPUs on bus 00, NICs on bus 80; the function is 0, because NCCL keeps the two lowest bits of a GPU's bus id for
itself. A CPU without a NUMA node has that of the GPUs and NICs below it if these agree, else the lowest free number.

Architecture, vendor, family and model of a CPU give NCCL the rate between sockets. Facts come first, then the model's
text, then the processor with the nearest rate in NCCL. Family and model are those of NCCL's files, which join the base
and the extended field of CPUID by bits: EPYC of generation 2 is family 143 there, 23 in the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from topoplan.engines.nccl.xml_tree import NcclHostTree
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.hardware import socket_bandwidth
from topoplan.machine.host_topology import bus_id, plain_bus_id
from topoplan.machine.topology import Device, Topology

_INTEL, _AMD = "GenuineIntel", "AuthenticAMD"
_MODELS = (
    (r"v3\b|Haswell", _INTEL, 6, 63),
    (r"E[57]-\d{4} ?v4|Broadwell", _INTEL, 6, 79),
    (r"v2\b|Ivy Bridge", _INTEL, 6, 62),
    (r"(Platinum|Gold|Silver|Bronze) \d[12]\d\d|Skylake|Cascade Lake", _INTEL, 6, 85),
    (r"(Platinum|Gold|Silver) \d3\d\d|Ice Lake", _INTEL, 6, 106),
    (r"(Platinum|Gold|Silver|Bronze) \d4\d\d|Sapphire Rapids", _INTEL, 6, 143),
    (r"(Platinum|Gold|Silver|Bronze) \d5\d\d|Emerald Rapids", _INTEL, 6, 207),
    (r"EPYC 7\w\w1\b|Naples|Zen 1\b", _AMD, 143, 1),
    (r"EPYC 7\w\w2\b|Rome|Zen 2\b", _AMD, 143, 49),
    (r"EPYC 7A53|Trento", _AMD, 175, 48),
    (r"EPYC 7\w\w3X?\b|Milan|Zen 3\b", _AMD, 175, 1),
    (r"EPYC [89]\w\w4[A-Z]?\b|Genoa|Bergamo|Zen 4\b", _AMD, 175, 17),
    (r"EPYC 9\w\w5[A-Z]?\b|Turin|Zen 5\b", _AMD, 191, 2),
)
"""Patterns of model texts, the most specific first; the first match counts."""

_BY_RATE = ((_INTEL, 6, 79), (_INTEL, 6, 85), (_AMD, 143, 49), (_INTEL, 6, 143), (_INTEL, 6, 207))
_OTHER_ARCHITECTURES = (
    (r"POWER ?[89]|ppc64", "ppc64"),
    (r"Grace|Neoverse|Altra|ThunderX|Graviton|arm64", "arm64"),
)


@dataclass(frozen=True, slots=True)
class CpuIdentity:
    """Attributes of a ``cpu`` element, the names of invented ones, and the rate between two such sockets.

    ``vendor``, ``familyid`` and ``modelid`` follow ``arch`` if they are known or NCCL needs them. ``rate`` is in GB/s,
    as NCCL counts.
    """

    attributes: tuple[tuple[str, str], ...]
    invented: tuple[str, ...]
    rate: float


def cpu_identity(cpu: Device, socket: float | None) -> CpuIdentity:
    """Return the identity of a CPU; ``socket`` is GB/s per direction to other CPUs, None for a single CPU.

    >>> found = cpu_identity(Device("cpu0", "cpu", model="Xeon E5-2698 v4"), 8.0)
    >>> found.attributes, found.rate
    ((('arch', 'x86_64'), ('vendor', 'GenuineIntel'), ('familyid', '6'), ('modelid', '79')), 6.0)
    >>> cpu_identity(Device("cpu0", "cpu"), 15.0).attributes[1]
    ('vendor', 'AuthenticAMD')
    """
    stated = {
        "arch": cpu.fact("arch"),
        "vendor": cpu.fact("vendor"),
        "familyid": cpu.fact("family"),
        "modelid": cpu.fact("model"),
    }
    stated = {key: value for key, value in stated.items() if value}
    others = (arch for name, arch in _OTHER_ARCHITECTURES if re.search(name, cpu.model))
    arch = stated.get("arch") or next(others, "x86_64")
    wanted = {"arch": arch}
    if arch == "x86_64":
        vendor, family, model = _processor(cpu.model, stated.get("vendor"), socket)
        wanted |= {"vendor": vendor, "familyid": str(family), "modelid": str(model)}
    wanted |= stated
    family, model = (_decimal_number(wanted.get(key, "0")) for key in ("familyid", "modelid"))
    rate = socket_bandwidth(wanted["arch"], wanted.get("vendor", ""), family, model)
    return CpuIdentity(tuple(wanted.items()), tuple(key for key in wanted if key not in stated), rate)


def _processor(text: str, vendor: str | None, socket: float | None) -> tuple[str, int, int]:
    """Return vendor, family and model by the model's text, else those of nearest rate, of this vendor if it has any."""
    for pattern, maker, family, model in _MODELS:
        if re.search(pattern, text) and vendor in (None, maker):
            return maker, family, model
    choices = [choice for choice in _BY_RATE if vendor in (None, choice[0])] or [(vendor or _INTEL, 6, 85)]
    if socket is None:
        return choices[0]
    return min(choices, key=lambda choice: abs(socket_bandwidth("x86_64", *choice) - socket))


def _decimal_number(text: str) -> int:
    """Return a number as NCCL parses it, 0 if the text is not one."""
    try:
        return int(text, 0)
    except ValueError:
        return 0


MAX_LOGICAL_CPUS = 8192


def cpu_mask(cpus: str) -> str:
    """Return a list such as 0-19,40-59 as a mask: hexadecimal words of 32 bits, the highest first; empty for none.

    >>> cpu_mask("0-19,40-59"), cpu_mask("")
    ('0fffff00,000fffff', '')
    """
    mask = 0
    for span in cpus.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", span)
        if not match:
            return ""
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < MAX_LOGICAL_CPUS:
            return ""
        mask |= (1 << last + 1) - (1 << first)
    words = -(-mask.bit_length() // 32)
    return ",".join(f"{mask >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(range(words)))


_NUMBERED = re.compile(r"(?:.*\.)?gpu([0-9]{1,4})")


def gpu_numbers(names: Sequence[str]) -> dict[str, int]:
    """Return the number of each GPU of one server by name."""
    matches = [_NUMBERED.fullmatch(name) for name in names]
    numbers = [int(match[1]) for match in matches if match]
    if len(set(numbers)) == len(names):
        return dict(zip(names, numbers, strict=True))
    return {name: number for number, name in enumerate(names)}


_FIRST_BUS = {"pcie": 0xFF, "gpu": 0x00, "nic": 0x80}
_BUSES = {"pcie": 1, "gpu": 0x80, "nic": 0x7F}
_PLACES = 32


def bus_ids(devices: Sequence[Device]) -> tuple[dict[str, str], frozenset[str]]:
    """Return the bus id of every GPU, NIC and PCIe switch by name, and the names for which it is invented.

    >>> gpus = [Device("gpu0", "gpu"), Device("gpu1", "gpu", busid="00000000:07:00.0")]
    >>> ids, invented = bus_ids([*gpus, Device("pcie0", "pcie")])
    >>> sorted(ids.items()), sorted(invented)
    ([('gpu0', 'ffff:00:01.0'), ('gpu1', '0000:07:00.0'), ('pcie0', 'ffff:ff:01.0')], ['gpu0', 'pcie0'])
    """
    found = {device.name: bus_id(device.busid) for device in devices if device.busid}
    taken: dict[str, str] = {}
    for name, busid in found.items():
        if busid in taken:
            raise UsageError(f"{taken[busid]} and {name} both state bus id {busid}; give each its own")
        taken[busid] = name
    invented = []
    for kind, first in _FIRST_BUS.items():
        # Bus 1 up to its place 31, as the switches of those files start at ff:01.0.
        places = iter(range(1, _BUSES[kind] * _PLACES))
        for device in devices:
            if device.kind != kind or device.busid:
                continue
            free = (f"ffff:{first + place // _PLACES:02x}:{place % _PLACES:02x}.0" for place in places)
            chosen = next((busid for busid in free if busid not in taken), "")
            if not chosen:
                raise UsageError(f"{device.name} has no bus id, and no more can be invented; state its busid")
            found[device.name] = chosen
            taken[chosen] = device.name
            invented.append(device.name)
    return found, frozenset(invented)


def numa_nodes(machine: Topology, tree: NcclHostTree) -> tuple[dict[str, int], frozenset[str]]:
    """Return the number of every CPU's NUMA node by name, and the CPUs for which it is invented."""
    cpus = [device for device in machine.devices if device.kind == "cpu"]
    taken: dict[int, str] = {}
    for cpu in cpus:
        if cpu.numa is not None:
            if cpu.numa in taken:
                raise UsageError(
                    f"{taken[cpu.numa]} and {cpu.name} are both NUMA node {cpu.numa}, and NCCL's file has one CPU for "
                    "a node; number them apart"
                )
            taken[cpu.numa] = cpu.name
    below: dict[str, set[int]] = {}
    for device in machine.devices:
        if device.name in tree.above and device.numa is not None:
            below.setdefault(tree.cpu_of(device.name), set()).add(device.numa)
    for cpu in cpus:
        numbers = below.get(cpu.name, set())
        if cpu.name not in taken.values() and len(numbers) == 1 and not numbers <= set(taken):
            taken[min(numbers)] = cpu.name
    known = frozenset(taken.values())
    free = iter([number for number in range(len(cpus) + len(taken)) if number not in taken])
    nodes = {name: number for number, name in taken.items()}
    nodes |= {cpu.name: next(free) for cpu in cpus if cpu.name not in known}
    return nodes, frozenset(cpu.name for cpu in cpus) - known


BUS_ID_QUERY = "nvidia-smi --query-gpu=index,pci.bus_id --format=csv"

_HEADS = {"index": "index", "pci.bus_id": "bus id", "gpu_bus_id": "bus id"}


def parse_bus_ids(text: str) -> dict[int, str]:
    """Return the bus id of each GPU by its index, as the kernel writes it; a UsageError names the line.

    >>> parse_bus_ids("index, pci.bus_id\\n0, 00000000:07:00.0\\n1, 00000000:0A:00.0\\n")
    {0: '0000:07:00.0', 1: '0000:0a:00.0'}
    """
    rows = [
        (number, [cell.strip() for cell in line.split(",")])
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    ]
    places = {"index": 0, "bus id": 1}
    if rows and not any(cell[:1].isdigit() for cell in rows[0][1]):
        places = {
            _HEADS[cell.lower()]: place for place, cell in enumerate(rows[0][1]) if cell.lower() in _HEADS
        }
        if len(places) < 2:
            raise UsageError(
                f"bus ids: the head {', '.join(rows[0][1])[:60]!r} lacks index or pci.bus_id; give {BUS_ID_QUERY}"
            )
        rows = rows[1:]
    if not rows:
        raise UsageError(f"bus ids: no GPU is listed; give {BUS_ID_QUERY}")
    found: dict[int, str] = {}
    for number, cells in rows:
        if len(cells) <= max(places.values()):
            raise UsageError(
                f"bus ids, line {number}: {', '.join(cells)[:60]!r} has no index and bus id; give {BUS_ID_QUERY}"
            )
        index, busid = cells[places["index"]], cells[places["bus id"]]
        if not re.fullmatch("[0-9]{1,4}", index):
            raise UsageError(f"bus ids, line {number}: {index[:60]!r} is not an index of a GPU")
        try:
            known = bus_id(busid)
        except TopologyError:
            raise UsageError(
                f"bus ids, line {number}: {busid[:60]!r} is not a bus id such as 00000000:07:00.0"
            ) from None
        if int(index) in found:
            raise UsageError(f"bus ids, line {number}: index {index} occurs twice")
        if known in found.values():
            raise UsageError(f"bus ids, line {number}: bus id {known} occurs twice")
        found[int(index)] = known
    return found


def with_bus_ids(topology: Topology, bus_ids: dict[int, str]) -> Topology:
    """Return a machine of one server with these bus ids of its GPUs; entries of other GPUs are skipped."""
    numbers = gpu_numbers(topology.gpus)
    missing = [name for name, number in numbers.items() if number not in bus_ids]
    if missing:
        raise UsageError(
            f"bus ids: index {numbers[missing[0]]} is missing, which is {missing[0]}"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
        )
    devices = []
    for device in topology.devices:
        given = bus_ids[numbers[device.name]] if device.name in numbers else ""
        if given and device.busid and plain_bus_id(device.busid) != given:
            raise UsageError(
                f"bus ids: {device.name} states {device.busid} already, and index {numbers[device.name]} is {given}; "
                "is the list of another machine?"
            )
        devices.append(replace(device, busid=given) if given and not device.busid else device)
    return replace(topology, devices=tuple(devices))
