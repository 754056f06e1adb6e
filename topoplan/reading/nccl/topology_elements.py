"""Parse the elements of NCCL's topology file: XML, attributes as NCCL reads them, CPUs, PCIe tree.

Machine descriptions need elements and attributes only. Document type declarations are refused, and with them entities
(a few lines of entities can expand to gigabytes, or name a file to read); size, depth and number of elements are
limited. Text between elements is refused, as NCCL refuses it. Namespaces and processing instructions have no meaning
here.

The exporter states more than NCCL knows (``bandwidth``, ``name``, ``model``, ``socket``), and lists in ``assumed``
the attributes that it had to invent because NCCL needs them: these say nothing about the machine. Attributes that
NCCL ignores silently get a note.

The kind of a ``pci`` element follows from its children, then from the beginning of its class, as in NCCL
(``kvDictPciClass`` in ``src/graph/topo.cc``) and RCCL, which adds 0x120000. A class that neither knows is a switch,
as for NCCL; at the end of a branch such a device can be anything, and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

from topoplan.errors import TopologyError
from topoplan.machine.hardware import (
    CPU_VENDORS,
    UNKNOWN_WIDTH,
    lane_bandwidth,
    pcie_bandwidth,
    socket_bandwidth,
)
from topoplan.machine.host_topology import HostCpu, PciDevice, bus_id, number_spans
from topoplan.machine.topology import FASTEST, SLOWEST, facts
from topoplan.units import listed

LARGEST_TEXT = 16_000_000
"""Bytes of text that are parsed."""

DEEPEST = 64
"""Nesting depth of elements."""

MOST_ELEMENTS = 65_536
"""Largest number of elements in a text."""

MOST_ATTRIBUTES = 64
"""Largest number of attributes of one element; NCCL keeps 16."""

LONGEST_VALUE = 4_096
"""Characters of an attribute; NCCL keeps 255."""

_CUT = tuple(
    expat.errors.codes[fault]
    for fault in (
        expat.errors.XML_ERROR_NO_ELEMENTS,
        expat.errors.XML_ERROR_UNCLOSED_TOKEN,
        expat.errors.XML_ERROR_PARTIAL_CHAR,
    )
)
"""Faults of a truncated text."""


@dataclass(frozen=True, slots=True)
class XmlElement:
    """An element of an XML text; ``line`` counts from 1, and is 0 in a text to be written."""

    name: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    children: tuple[XmlElement, ...] = ()
    line: int = 0

    @property
    def size(self) -> int:
        return 1 + sum(child.size for child in self.children)

    def all(self, *names: str) -> tuple[XmlElement, ...]:
        return tuple(child for child in self.children if child.name in names)


def parse_xml(text: str) -> XmlElement:
    """Return the root element of a text; a declaration, a byte order mark and comments may precede it.

    A TopologyError names the line at which the text is not well-formed, or exceeds a limit.
    """
    content = text.removeprefix("\ufeff").encode(errors="replace")
    if len(content) > LARGEST_TEXT:
        raise TopologyError(
            f"the XML text has {len(content)} bytes, more than {LARGEST_TEXT}; a machine needs far fewer"
        )
    # An editor may have left white space before a declaration, which XML forbids.
    rest = content.lstrip()
    builder = _XmlTreeBuilder(content[: len(content) - len(rest)].count(b"\n"))
    try:
        builder.parser.Parse(rest, True)
    except expat.ExpatError as error:
        inside = f", inside <{builder.open[-1][0][:40]}>" if builder.open else ""
        fault = (
            "ends too early"
            if error.code in _CUT
            else f"is not well-formed ({expat.ErrorString(error.code) or 'invalid'})"
        )
        raise TopologyError(
            f"line {error.lineno + builder.skipped}: the XML text {fault}{inside}; give the whole file"
        ) from None
    return builder.root


class _XmlTreeBuilder:
    """Handlers of the parser, and the elements that are open: name, line, attributes and children so far.

    ``skipped`` is the number of lines before the parsed part.
    """

    def __init__(self, skipped: int) -> None:
        self.skipped = skipped
        # Text is decoded already, whatever encoding a declaration names.
        self.parser = expat.ParserCreate("utf-8")
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters
        self.parser.StartDoctypeDeclHandler = self._declaration
        self.open: list[tuple[str, int, dict[str, str], list[XmlElement]]] = []
        self.elements = 0
        self.root: XmlElement

    def _refuse(self, fault: str) -> NoReturn:
        raise TopologyError(f"line {self._line()}: {fault}")

    def _line(self) -> int:
        return self.parser.CurrentLineNumber + self.skipped

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self.elements += 1
        if len(self.open) == DEEPEST:
            self._refuse(f"elements are nested more than {DEEPEST} deep; no machine needs that")
        if self.elements > MOST_ELEMENTS:
            self._refuse(f"more than {MOST_ELEMENTS} elements; a machine needs far fewer")
        if len(attributes) > MOST_ATTRIBUTES:
            self._refuse(f"an element has more than {MOST_ATTRIBUTES} attributes; NCCL knows 16")
        if len(name) > LONGEST_VALUE or not name.isprintable():
            self._refuse("the name of an element is too long or cannot be printed")
        for key, value in attributes.items():
            if len(key) + len(value) > LONGEST_VALUE or not (key + value).isprintable():
                self._refuse(
                    f"{name[:40]} {key[:40]!r} is longer than {LONGEST_VALUE} characters or cannot be printed"
                )
        self.open.append((name, self._line(), attributes, []))

    def _end(self, _: str) -> None:
        name, line, attributes, children = self.open.pop()
        element = XmlElement(name, attributes, tuple(children), line)
        if self.open:
            self.open[-1][3].append(element)
        else:
            self.root = element

    def _characters(self, text: str) -> None:
        if text.strip():
            self._refuse(
                f"text {text.strip()[:20]!r} between elements; only elements and attributes are read"
            )

    def _declaration(self, *_: object) -> None:
        self._refuse("document type declarations and entities are refused; leave out <!DOCTYPE …>")


_NUMBER = re.compile(r"\s*([+-]?)(?:0x([0-9a-f]+)|([0-9]+))", re.IGNORECASE)
_LONGEST_NUMBER = 18


@dataclass(frozen=True, slots=True)
class GivenRates:
    """Bandwidths that a user gave, in GB/s per direction, in place of a file's or NCCL's.

    They are of one NVLink or XGMI link, of every PCIe link, and between CPUs.
    """

    nvlink: float | None = None
    pcie: float | None = None
    socket: float | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """Assumptions and omissions with their places, in order of first appearance."""

    _places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, finding: str, place: str = "") -> None:
        """Add a place of a finding."""
        self._places.setdefault(finding, []).append(place)

    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"{finding}: {listed(dict.fromkeys(places))}" if any(places) else finding
            for finding, places in self._places.items()
        )


def stated(element: XmlElement, attribute: str) -> str:
    """Return an attribute's statement about the machine; empty if it is absent, or listed as assumed."""
    if attribute in element.attributes.get("assumed", "").split():
        return ""
    return element.attributes.get(attribute, "")


def needed(element: XmlElement, attribute: str) -> str:
    """Return an attribute without which NCCL fails too; raise if it is absent."""
    value = element.attributes.get(attribute)
    if value is None:
        raise TopologyError(
            f"line {element.line}: {element.name} has no attribute {attribute}; NCCL needs it too, add it"
        )
    return value


def needed_bus_id(element: XmlElement) -> str:
    """Return the attribute ``busid`` as the kernel writes it; raise if it is absent or not a bus id."""
    text = needed(element, "busid")
    try:
        return bus_id(text)
    except TopologyError as error:
        raise TopologyError(f"line {element.line}: {element.name} busid {error}") from None


def whole_number(element: XmlElement, attribute: str) -> int | None:
    """Return the whole number at the beginning of an attribute, decimal or 0x…; None if it does not begin with one."""
    match = _NUMBER.match(element.attributes.get(attribute, ""))
    if not match:
        return None
    sign, hexadecimal, decimal = match.groups()
    digits = hexadecimal or decimal
    if len(digits) > _LONGEST_NUMBER:
        raise TopologyError(
            f"line {element.line}: {element.name} {attribute} {digits[:_LONGEST_NUMBER]}… is too large"
        )
    return int(sign + digits, 16 if hexadecimal else 10)


def stated_rate(element: XmlElement, attribute: str) -> float | None:
    """Return the GB/s per direction in an attribute that only our exporter writes; None if it is absent."""
    text = stated(element, attribute)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not SLOWEST <= value <= FASTEST:
        raise TopologyError(
            f"line {element.line}: {element.name} {attribute} {text[:40]!r} must be a number of GB/s from {SLOWEST:g} "
            f"to {FASTEST:g}"
        )
    return value


_ASSUMED = -1_000_000
"""Added to an invented number: nodes keep their order and stay apart, but count as unknown."""

MOST_NODES = 1024
"""Largest number of a NUMA node."""

MOST_CPUS = 256
"""NUMA nodes of a server; NCCL takes no more."""


def cpu_number(cpu: XmlElement) -> int:
    """Return the NUMA node; below zero if it is not known."""
    text = needed(cpu, "numaid")
    number = whole_number(cpu, "numaid")
    if number is None or not -1 <= number <= MOST_NODES:
        raise TopologyError(
            f"line {cpu.line}: cpu numaid must be a NUMA node from -1 to {MOST_NODES}, got {text[:40]!r}"
        )
    return number if stated(cpu, "numaid") else number + _ASSUMED


def host_cpus(system: XmlElement, rates: GivenRates, findings: Findings) -> tuple[HostCpu, ...]:
    """Return the NUMA nodes of one host, in ascending order."""
    elements: dict[int, XmlElement] = {}
    hashes: dict[str, XmlElement] = {}
    for cpu in system.all("cpu"):
        number = cpu_number(cpu)
        hashes.setdefault(cpu.attributes.get("host_hash", "").strip().lower(), cpu)
        if len(hashes) > 1:
            raise TopologyError(
                f"line {cpu.line}: cpu host_hash {cpu.attributes.get('host_hash', '')[:40]!r} is of another host than "
                f"line {next(iter(hashes.values())).line}; keep the cpu elements of one host"
            )
        if number in elements:
            raise TopologyError(
                f"line {cpu.line}: cpu numaid {needed(cpu, 'numaid')} occurs twice, first in line "
                f"{elements[number].line}; a NUMA node is one cpu element"
            )
        elements[number] = cpu
    if len(elements) > MOST_CPUS:
        raise TopologyError(f"{len(elements)} cpu elements are more than the {MOST_CPUS} that NCCL takes")
    several = len(elements) > 1
    return tuple(
        _host_cpu(number, elements[number], rates, findings, several=several) for number in sorted(elements)
    )


def _host_cpu(
    number: int, cpu: XmlElement, rates: GivenRates, findings: Findings, *, several: bool
) -> HostCpu:
    arch, vendor = cpu.attributes.get("arch", ""), cpu.attributes.get("vendor", "")
    family, model = whole_number(cpu, "familyid"), whole_number(cpu, "modelid")
    socket = rates.socket or stated_rate(cpu, "socket")
    if socket is None:
        socket = socket_bandwidth(arch, vendor, family or 0, model or 0)
        unknown = arch not in ("x86_64", "arm64", "ppc64") or (
            arch == "x86_64" and (vendor not in CPU_VENDORS or (vendor != "AuthenticAMD" and model is None))
        )
        if unknown and several:
            findings.add(
                f"the processor is unknown or not stated; {socket:g} GB/s between CPUs taken (--socket-bandwidth sets "
                "it)",
                f"cpu {needed(cpu, 'numaid')}",
            )
    return HostCpu(
        number,
        socket,
        stated(cpu, "model"),
        facts(
            arch=stated(cpu, "arch"),
            vendor=stated(cpu, "vendor"),
            family=family if stated(cpu, "familyid") else None,
            model=model if stated(cpu, "modelid") else None,
            cpus=_cpu_list(cpu, findings),
        ),
        stated(cpu, "name"),
    )


def _cpu_list(cpu: XmlElement, findings: Findings) -> str:
    """Return logical CPUs such as 0-19,40-59 from hexadecimal words of 32 bits, the highest first."""
    text = stated(cpu, "affinity")
    try:
        words = [int(word, 16) for word in text.split(",")] if text else []
    except ValueError:
        words = [-1]
    if not all(0 <= word < 1 << 32 for word in words):
        findings.add(
            "affinity is not a mask such as 00000000,000fffff; left out", f"cpu {needed(cpu, 'numaid')}"
        )
        return ""
    return number_spans(
        32 * i + bit for i, word in enumerate(reversed(words)) for bit in range(32) if word >> bit & 1
    )


CLASSES = {
    "0x060400": "bridge",
    "0x080100": "bridge",
    "0x068000": "nvswitch",
    "0x068001": "cpu",
    "0x03": "gpu",
    "0x02": "nic",
    "0x120000": "gpu",
}
"""Kinds of devices by the beginning of their PCI class; the first match counts."""

MOST_LANES = 64
"""Lanes of a PCIe link, four of 16 that NCCL joins; the kernel writes 255 for an unknown number."""

_ASSUMED_LINK = (
    "link_speed or link_width is not stated; PCIe of generation 3 or "
    f"{UNKNOWN_WIDTH} lanes taken for it, as NCCL does (--pcie-bandwidth sets the rate)"
)


@dataclass(frozen=True, slots=True)
class PciNode:
    """A ``pci`` element."""

    device: PciDevice
    element: XmlElement


def device_kind(pci_class: str) -> str:
    """Return the kind of a PCI class, as in `CLASSES`; empty for an unknown one."""
    return next((kind for start, kind in CLASSES.items() if pci_class.lower().startswith(start)), "")


def pci_nodes(
    system: XmlElement, rates: GivenRates, findings: Findings, *, gpu_ids: Collection[str] = ()
) -> tuple[PciNode, ...]:
    """Return all ``pci`` elements of a system, a bridge before the elements below it; ``findings`` takes the notes.

    ``gpu_ids`` are bus ids that are known from elsewhere to be those of GPUs, for elements that state no class.
    """
    reader = _PciReader(rates, findings, frozenset(gpu_ids))
    return tuple(
        node
        for cpu in system.all("cpu")
        for pci in cpu.all("pci")
        for node in reader.walk(pci, "", cpu_number(cpu))
    )


@dataclass(frozen=True, slots=True)
class _PciReader:
    rates: GivenRates
    findings: Findings
    gpu_ids: frozenset[str]
    lines: dict[str, int] = field(default_factory=dict)

    def walk(self, pci: XmlElement, parent: str, cpu: int) -> Iterator[PciNode]:
        busid = needed_bus_id(pci)
        if busid in self.lines:
            raise TopologyError(
                f"line {pci.line}: pci busid {busid} occurs twice, first in line {self.lines[busid]}; "
                "a bus id names one device of a server"
            )
        self.lines[busid] = pci.line
        kind = self._kind(pci, busid)
        device = PciDevice(
            busid,
            kind,
            parent,
            cpu,
            self._bandwidth(pci, busid) if kind in ("bridge", "gpu", "nic") else 0.0,
            chip=_chip(pci),
            name=stated(pci, "name"),
            model=stated(pci, "model"),
        )
        yield PciNode(device, pci)
        below = pci.all("pci")
        if kind == "bridge":
            for child in below:
                yield from self.walk(child, busid, cpu)
        elif below:
            self.findings.add(
                "has pci elements below it although it is not a switch; left out, as NCCL does", busid
            )

    def _kind(self, pci: XmlElement, busid: str) -> str:
        known = device_kind(pci.attributes.get("class", ""))
        if pci.all("gpu"):
            if known != "gpu":
                self.findings.add("has a gpu element but not the class of a GPU; taken as a GPU", busid)
            return "gpu"
        if pci.all("nic"):
            return "nic"
        if known:
            return "other" if known == "cpu" else known
        if "class" not in pci.attributes and busid in self.gpu_ids:
            return "gpu"
        if pci.all("pci"):
            self.findings.add("class is unknown or not stated; taken as a PCIe switch, as NCCL does", busid)
            return "bridge"
        self.findings.add("class is unknown or not stated; left out", busid)
        return "other"

    def _bandwidth(self, pci: XmlElement, busid: str) -> float:
        exact = stated_rate(pci, "bandwidth")
        if self.rates.pcie is not None or exact is not None:
            return self.rates.pcie or exact or 0.0
        speed = pci.attributes.get("link_speed", "")
        width = whole_number(pci, "link_width") or 0
        if not 0 < width <= MOST_LANES:
            width = 0
        if not width or lane_bandwidth(speed) is None:
            self.findings.add(_ASSUMED_LINK, busid)
        return pcie_bandwidth(speed, width)


def _chip(pci: XmlElement) -> str:
    """Return the fact ``pci``; empty unless vendor and device are stated."""
    ids = []
    for attribute in ("vendor", "device", "subsystem_vendor", "subsystem_device"):
        number = whole_number(pci, attribute) if stated(pci, attribute) else None
        ids.append(0 if number is None or not 0 <= number <= 0xFFFF else number)
    return ":".join(f"{number:04x}" for number in ids) if ids[0] and ids[1] else ""
