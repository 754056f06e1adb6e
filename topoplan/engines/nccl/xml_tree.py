"""Fit one server into the PCIe tree of NCCL's topology file, and write the XML that NCCL's parser accepts.

The file has no place for a device with two paths to a CPU, a GPU joined to a NIC, links that are missing or slower in
one direction, and CPUs that are not all joined: each is refused in one line that names the link. Parts that the rest
does not need are left out with a note: networks, and devices below no CPU that carry nothing between GPUs. NCCL knows
one NVSwitch: several are combined if every GPU is on all of them.

The parser (``xmlGetNode`` and its callers in NCCL, ``src/graph/xml.cc`` and ``xml.h``) wants one space before each
attribute, no tab outside a value, no XML declaration, at most 16 attributes, names and values below 255 bytes, and a
limited number of elements. It decodes no entities, so values that NCCL compares (bus ids, classes, names of network
devices) must not need any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from topoplan.errors import UsageError
from topoplan.machine.topology import Link, Topology
from topoplan.reading.nccl.topology_elements import XmlElement
from topoplan.units import listed, summed

_CLIMBING = {"gpu", "nic", "pcie"}


@dataclass(frozen=True, slots=True)
class NcclHostTree:
    """The PCIe side of a server.

    ``children`` are the devices directly below a CPU or switch, in the order of the topology. ``bandwidth`` is in GB/s
    per direction to the parent in ``above``, ``socket`` in GB/s from every CPU to any other one, empty for a single
    CPU. ``notes`` list omissions.
    """

    children: dict[str, tuple[str, ...]]
    above: dict[str, str]
    bandwidth: dict[str, float]
    socket: dict[str, float]
    notes: tuple[str, ...]

    def cpu_of(self, name: str) -> str:
        while name in self.above:
            name = self.above[name]
        return name


def host_tree(topology: Topology) -> NcclHostTree:
    """Return the PCIe tree and the CPUs of one server; raise for a device or link that has no place in the file.

    >>> import topoplan
    >>> tree = host_tree(topoplan.load("dgx-1v"))
    >>> tree.children["cpu0"], tree.children["pcie0"], tree.socket
    (('pcie0', 'pcie1'), ('gpu0', 'gpu1', 'nic0'), {'cpu0': 8.0, 'cpu1': 8.0})
    """
    kind = {device.name: device.kind for device in topology.devices}
    wires = _full_duplex(link for link in topology.links if link.channel == "pcie")
    near: dict[str, list[str]] = {name: [] for name in kind}
    for src, dst in wires:
        near[src].append(dst)
    order = {name: place for place, name in enumerate(kind)}
    cpus = [name for name in kind if kind[name] == "cpu"]
    above: dict[str, str] = {}
    children: dict[str, tuple[str, ...]] = {}
    reached = list(cpus)
    for name in reached:
        below = sorted((other for other in near[name] if other != above.get(name)), key=order.__getitem__)
        for other in below:
            if kind[name] in ("gpu", "nic"):
                raise UsageError(
                    f"{name} is joined to {other} by PCIe, and NCCL's file has no devices below a {kind[name]}; take "
                    "the link out with --without-link"
                )
            if other in above or kind[other] not in _CLIMBING:
                raise UsageError(
                    f"{name} and {other}: PCIe is not a tree below one CPU each, as in NCCL's file; take a link out "
                    "with --without-link"
                )
            above[other] = name
        children[name] = tuple(below)
        reached += below
    for name in topology.gpus:
        if name not in above:
            raise UsageError(
                f"{name} has no PCIe path to a CPU, and NCCL's file has every GPU below a CPU; state the links of "
                "channel pcie"
            )
    kept = _with_ends(children, above, kind)
    return NcclHostTree(
        {name: tuple(child for child in below if child in kept) for name, below in children.items()},
        {name: parent for name, parent in above.items() if name in kept},
        {name: wires[name, parent].bandwidth for name, parent in above.items() if name in kept},
        _sockets(topology, cpus),
        _omitted_devices(topology, kept | set(cpus)),
    )


def _full_duplex(links: Iterable[Link]) -> dict[tuple[str, str], Link]:
    """Return links by their ends; raise if the reverse direction is missing or has another rate."""
    wires = {(link.src, link.dst): link for link in links}
    for (src, dst), link in wires.items():
        back = wires.get((dst, src))
        if back is None or back.bandwidth != link.bandwidth:
            other = "none" if back is None else f"{back.bandwidth:g}"
            raise UsageError(
                f"{src}->{dst} ({link.channel}) has {link.bandwidth:g} GB/s and {other} back, and NCCL's file has one "
                "figure for both directions; make them equal with --slow-link, or take the link out with --without-link"
            )
    return wires


def _with_ends(children: dict[str, tuple[str, ...]], above: dict[str, str], kind: dict[str, str]) -> set[str]:
    """Return GPUs, NICs and the switches above them; a switch without either limits nothing."""
    kept = {name for name in above if kind[name] in ("gpu", "nic")}
    for name in reversed(list(children)):
        if name in above and kept.intersection(children[name]):
            kept.add(name)
    return kept


def _sockets(topology: Topology, cpus: list[str]) -> dict[str, float]:
    """Return the GB/s from each CPU to the others."""
    rates: dict[str, set[float]] = {name: set() for name in cpus}
    joined = set()
    for link in topology.links:
        if link.channel == "sys":
            if link.src not in rates or link.dst not in rates:
                raise UsageError(
                    f"{link.src}->{link.dst} (sys) does not join two CPUs, and NCCL's file has no place for it; take "
                    "it out with --without-link"
                )
            rates[link.src].add(link.bandwidth)
            joined.add((link.src, link.dst))
    for src in cpus:
        for dst in cpus:
            if src != dst and (src, dst) not in joined:
                raise UsageError(
                    f"{src} and {dst} are not joined, and NCCL joins every two CPUs; export a server whose CPUs are"
                )
        if len(rates[src]) > 1:
            figures = ", ".join(f"{rate:g}" for rate in sorted(rates[src]))
            raise UsageError(
                f"{src} reaches other CPUs at {figures} GB/s, and NCCL's file has one figure for all; make them equal "
                "with --slow-link"
            )
    return {name: next(iter(found)) for name, found in rates.items() if found}


def _omitted_devices(topology: Topology, kept: set[str]) -> tuple[str, ...]:
    out = [device for device in topology.devices if device.name not in kept and device.kind != "nvswitch"]
    network = sum(link.channel == "network" for link in topology.links)
    wires = (link for link in topology.links if link.channel in ("pcie", "sys"))
    several = [f"{link.src}->{link.dst}" for link in wires if link.count > 1]
    notes = []
    if network:
        notes.append(
            f"the network is left out ({network} links): NCCL's file describes one server up to its NICs"
        )
    if out:
        notes.append(
            f"left out, below no CPU or above no GPU or NIC: {listed(device.name for device in out)}"
        )
    if several:
        notes.append(
            f"numbers of wires have no place on PCIe and between CPUs: {listed(several)} count as one"
        )
    return tuple(notes)


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """The links that one GPU lists: to other GPUs, the NVSwitch, or its own CPU.

    A bundle from GPU to GPU is listed at both ends, so its two directions may differ; a bundle to the switch or to a
    CPU is listed once and counts for both. ``nvlinks`` hold the far end (a GPU, a CPU, or empty for the NVSwitch), the
    links, and GB/s per direction of all of them; ``c2c`` leads to its CPU, in whole MB/s for each wire.
    """

    nvlinks: tuple[tuple[str, int, float], ...]
    c2c: Link | None


def gpu_links(topology: Topology, tree: NcclHostTree) -> tuple[dict[str, GpuLinks], tuple[str, ...]]:
    """Return the links that each GPU lists, by name, and notes; raise for one that has no place in the file."""
    kind = {device.name: device.kind for device in topology.devices}
    links = {(link.src, link.dst): link for link in topology.links if link.channel == "nvlink"}
    c2c = {(link.src, link.dst): link for link in topology.links if link.channel == "c2c"}
    for known in (links, c2c):
        for (src, dst), link in known.items():
            _check_ends(kind, tree, link, known.get((dst, src)))
    found = {}
    switches: dict[str, list[str]] = {}
    for gpu in topology.gpus:
        direct = [(dst, link) for (src, dst), link in links.items() if src == gpu and kind[dst] != "nvswitch"]
        switched = [link for (src, dst), link in links.items() if src == gpu and kind[dst] == "nvswitch"]
        listed_ends = [(dst, link.count, link.bandwidth) for dst, link in direct]
        if switched:
            switches[gpu] = sorted(link.dst for link in switched)
            bandwidth = summed(link.bandwidth for link in switched)
            listed_ends.append(("", sum(link.count for link in switched), bandwidth))
        up = [link for (src, _), link in c2c.items() if src == gpu]
        found[gpu] = GpuLinks(tuple(listed_ends), up[0] if up else None)
    return found, _switch_notes(topology, switches)


def _check_ends(kind: dict[str, str], tree: NcclHostTree, link: Link, back: Link | None) -> None:
    ends = f"{link.src}->{link.dst} ({link.channel})"
    if back is None:
        raise UsageError(
            f"{ends} has no reverse direction, and NCCL takes no link of one direction; take it out with --without-link"
        )
    gpu, other = (link.src, link.dst) if kind[link.src] == "gpu" else (link.dst, link.src)
    wanted = ("cpu",) if link.channel == "c2c" else ("gpu", "nvswitch", "cpu")
    if kind[gpu] != "gpu" or kind[other] not in wanted:
        raise UsageError(
            f"{ends} joins a {kind[link.src]} and a {kind[link.dst]}; NCCL's file has no place for it"
        )
    if kind[other] == "cpu" and tree.cpu_of(gpu) != other:
        raise UsageError(f"{ends}: NCCL's file knows only the CPU above a GPU on PCIe, {tree.cpu_of(gpu)}")
    if kind[other] != "gpu" and (back.bandwidth, back.count) != (link.bandwidth, link.count):
        raise UsageError(
            f"{ends} has {link.count} links of together {link.bandwidth:g} GB/s and {back.count} of {back.bandwidth:g} "
            "back, and NCCL's file has one figure for both directions; make them equal with --slow-link"
        )


def _switch_notes(topology: Topology, switches: dict[str, list[str]]) -> tuple[str, ...]:
    known = [device for device in topology.devices if device.kind == "nvswitch"]
    used = sorted({name for names in switches.values() for name in names})
    for gpu, names in switches.items():
        if names != used:
            raise UsageError(
                f"{gpu} is on {', '.join(names)} but other GPUs are on {', '.join(used)}, and NCCL knows one NVSwitch; "
                "choose GPUs that share theirs with --gpus"
            )
    notes = []
    if len(used) > 1:
        notes.append(f"{listed(used)} are one NVSwitch in the file, as NCCL has one")
    able = [device.name for device in known if device.multicast or device.reduce]
    if able:
        notes.append(f"{listed(able)} can copy or add, which the file cannot say")
    spare = [device.name for device in known if device.name not in used]
    if spare:
        notes.append(f"left out, since no GPU is on it: {listed(spare)}")
    return tuple(notes)


MAX_VALUE_BYTES = 253
"""Bytes of a value: with its closing quote it must stay below MAX_STR_LEN - 1."""

MAX_ATTRIBUTES = 13
"""NCCL keeps 16 and reserves three for its own, such as ``keep`` and ``host_hash``."""

_NO_CHARACTER = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ENTITIES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "\t": "&#9;", "\n": "&#10;", "\r": "&#13;"}
)


def nccl_xml(root: XmlElement, comments: Sequence[str] = ()) -> str:
    """Return the text of a file: comments, one to a line, then the element; raise for values that do not fit.

    >>> cpu = XmlElement("cpu", {"numaid": "0"})
    >>> print(nccl_xml(XmlElement("system", {"version": "1"}, (cpu,)), ["a -- b"]), end="")
    <!-- a - - b -->
    <system version="1">
      <cpu numaid="0"/>
    </system>
    """
    lines = [f"<!-- {_comment_text(comment)} -->" for comment in comments]
    return "\n".join((*lines, *_lines(root, ""))) + "\n"


def _lines(element: XmlElement, indent: str) -> Iterator[str]:
    if len(element.attributes) > MAX_ATTRIBUTES:
        raise UsageError(
            f"<{element.name}> has {len(element.attributes)} attributes, and NCCL reads 16 with its own; state less"
        )
    words = (element.name, *(_attribute(element, *pair) for pair in element.attributes.items()))
    start = f"{indent}<{' '.join(words)}"
    if not element.children:
        yield f"{start}/>"
        return
    yield f"{start}>"
    for child in element.children:
        yield from _lines(child, indent + "  ")
    yield f"{indent}</{element.name}>"


def _attribute(element: XmlElement, key: str, value: str) -> str:
    if _NO_CHARACTER.search(value):
        raise UsageError(
            f"<{element.name}> {key} {value[:40]!r} holds a character that XML does not allow; rename it"
        )
    text = value.translate(_ENTITIES)
    if len(text.encode()) > MAX_VALUE_BYTES:
        raise UsageError(
            f"<{element.name}> {key} {value[:40]!r}… is {len(text.encode())} bytes long, and NCCL reads "
            f"{MAX_VALUE_BYTES}; shorten it"
        )
    return f'{key}="{text}"'


def _comment_text(comment: str) -> str:
    """Return a comment in one line, without the two characters that would end it."""
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in comment).split())
    return words.replace("--", "- -").replace("--", "- -").removesuffix("-").rstrip()
