"""What NCCL's own reader accepts, rebuilt from its rules character by character and attribute by attribute.

Independent of the exporter and of topoplan's reader: the parser is a state machine over bytes, as ``src/graph/xml.cc``
of NCCL is, and rates are computed from the attributes that ``src/graph/topo.cc`` looks at.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction

LONGEST = 254  # MAX_STR_LEN - 1: a name or value with the character behind it stays below this

MOST_ATTRIBUTES, MOST_CHILDREN = 16, 128
"""NCCL ignores attributes beyond; older releases refuse more children."""


class Rejected(Exception):
    """NCCL would give up, or read something else than what is written."""


@dataclass
class Node:
    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)

    @property
    def size(self) -> int:
        return 1 + sum(child.size for child in self.children)

    def all(self, name: str) -> list[Node]:
        return [child for child in self.children if child.name == name]

    def need(self, *keys: str) -> list[str]:
        for key in keys:
            if key not in self.attributes:
                raise Rejected(f"{self.name} has no {key}")
        return [self.attributes[key] for key in keys]


class _Reader:
    def __init__(self, text: str, most_nodes: int) -> None:
        self.bytes = text.encode()
        self.place = 0
        self.most_nodes = most_nodes
        self.nodes = 0

    def char(self) -> str:
        if self.place == len(self.bytes):
            raise Rejected("unexpected end of file")
        self.place += 1
        return chr(self.bytes[self.place - 1])

    def value(self) -> tuple[str, str]:
        quote = self.char()
        if quote not in "\"'":
            raise Rejected("a value without quotes")
        letters = ""
        while (letter := self.char()) != quote:
            letters += letter
            if len(letters) >= LONGEST:
                raise Rejected(f"value {letters[:20]} is too long")
        return letters, self.char()

    def token(self, *, with_value: bool) -> tuple[str, str, str]:
        letters = ""
        while (letter := self.char()) not in " >/\n\r":
            if letter == "=":
                if not with_value:
                    raise Rejected(f"a value behind {letters}")
                return (letters, *self.value())
            letters += letter
            if len(letters) >= LONGEST:
                raise Rejected(f"name {letters[:20]} is too long")
        return letters, "", letter

    def node(self) -> tuple[str, Node] | None:
        while self.place < len(self.bytes) and chr(self.bytes[self.place]) in " \n\r":
            self.place += 1
        if self.place == len(self.bytes):
            return None
        if self.char() != "<":
            raise Rejected("something that is no element")
        name, _, last = self.token(with_value=False)
        if name.startswith("!--"):
            end = f"...{name[3:]}{last}"[-3:]
            while end != "-->":
                end = end[1:] + self.char()
            return self.node()
        if not name and last == "/":
            name, _, last = self.token(with_value=False)
            if last != ">":
                raise Rejected(f"{last!r} behind a closing {name}")
            return "close", Node(name)
        found = Node(name)
        while last == " ":
            key, value, last = self.token(with_value=True)
            if not key or key in found.attributes:
                raise Rejected(f"attribute {key!r} of {name} is empty or there twice")
            found.attributes[key] = value
        if len(found.attributes) > MOST_ATTRIBUTES:
            raise Rejected(f"{name} has {len(found.attributes)} attributes")
        kind = "open"
        if last == "/":
            kind = "single"
            _, _, last = self.token(with_value=False)
        if last != ">":
            raise Rejected(f"{last!r} behind {name}")
        return kind, found

    def below(self, parent: Node | None) -> list[Node]:
        found: list[Node] = []
        while True:
            if self.nodes >= self.most_nodes:
                raise Rejected(f"more than {self.most_nodes - 1} elements")
            following = self.node()
            if following is None:
                if parent:
                    raise Rejected(f"{parent.name} is not closed")
                return found
            kind, node = following
            if kind == "close":
                if not parent or node.name != parent.name:
                    raise Rejected(f"{node.name} closes {parent.name if parent else 'nothing'}")
                return found
            self.nodes += 1
            found.append(node)
            if len(found) > MOST_CHILDREN:
                raise Rejected("too many children")
            if kind == "open":
                node.children = self.below(node)


def read_as_nccl(text: str, *, most_nodes: int = 256) -> Node:
    """The outermost element, or Rejected."""
    found = _Reader(text, most_nodes).below(None)
    if len(found) != 1:
        raise Rejected(f"{len(found)} outermost elements")
    return found[0]


LANES = {
    "2.5 GT/s": 15,
    "5 GT/s": 30,
    "8 GT/s": 60,
    "16 GT/s": 120,
    "32 GT/s": 240,
    "5.0 GT/s PCIe": 30,
    "8.0 GT/s PCIe": 60,
    "16.0 GT/s PCIe": 120,
    "32.0 GT/s PCIe": 240,
    "64.0 GT/s PCIe": 480,
}
NVLINK = ((100, "40.1"), (90, "20.6"), (87, "20"), (86, "12"), (70, "20"), (60, "18"))
XGMI = (("gfx90a", 36), ("gfx94", 48), ("", 24))


def nccl_links(system: Node) -> dict[tuple[str, str, str], Fraction]:
    """Links that NCCL (version 1) or RCCL (version 2) makes of a topology file: bus ids or NUMA nodes, kind, GB/s."""
    (version,) = system.need("version")
    if version not in ("1", "2"):
        raise Rejected(f"version {version}")
    reader = _Links(amd=version == "2")
    for cpu in system.children:
        reader.cpu(cpu)
    reader.sockets()
    for busid, gpu, cpu_name in reader.gpus:
        reader.nvlinks(busid, gpu, cpu_name)
    return dict(reader.links)


class _Links:
    def __init__(self, *, amd: bool) -> None:
        self.amd = amd
        self.links: dict[tuple[str, str, str], Fraction] = defaultdict(Fraction)
        self.gpus: list[tuple[str, Node, str]] = []
        self.cpus: dict[str, Fraction] = {}
        self.busids: set[str] = set()

    def both(self, first: str, second: str, kind: str, rate: Fraction) -> None:
        self.links[first, second, kind] += rate
        self.links[second, first, kind] += rate

    def cpu(self, cpu: Node) -> None:
        if cpu.name != "cpu":
            raise Rejected(f"{cpu.name} inside system")
        number, arch = cpu.need("numaid", "arch")
        name = f"cpu {int(number, 0)}"
        if name in self.cpus:
            raise Rejected(f"{name} is there twice")
        rate = {"arm64": 6, "ppc64": 32}.get(arch)
        if rate is None:
            vendor, family, model = cpu.need("vendor", "familyid", "modelid")
            if arch != "x86_64" or vendor not in ("GenuineIntel", "AuthenticAMD"):
                raise Rejected(f"{arch} of {vendor}")
            intel = next(
                rate for least, rate in ((0xCF, 40), (0x8F, 22), (0x55, 10), (0, 6)) if int(model) >= least
            )
            rate = 16 if vendor == "AuthenticAMD" else intel if int(family) == 6 else 6
        self.cpus[name] = Fraction(rate)
        for child in cpu.children:
            if child.name == "pci":
                self.pci(child, name, name)
            elif child.name == "nic":
                for net in child.all("net"):
                    net.need("name", "dev")
            else:
                raise Rejected(f"{child.name} inside cpu")

    def pci(self, pci: Node, parent: str, cpu: str) -> None:
        busid, kind, speed, width = pci.need("busid", "class", "link_speed", "link_width")
        if len(busid) != 12 or [busid[i] for i in (4, 7, 10)] != [":", ":", "."] or busid in self.busids:
            raise Rejected(f"bus id {busid}")
        self.busids.add(busid)
        self.both(busid, parent, "pci", Fraction(int(width) * LANES[speed], 80))
        if kind.startswith("0x03"):
            (gpu,) = pci.children
            # Of a GPU without ``sm`` NCCL asks the driver.
            gpu.need("dev", "rank", "gdr", *(["sm", "gcn", "arch"] if self.amd else []))
            # Newer releases keep the two lowest bits of a GPU's bus id for themselves.
            if gpu.name != "gpu" or int(busid[-1], 16) & 3:
                raise Rejected(f"GPU at {busid}")
            self.gpus.append((busid, gpu, cpu))
        elif kind.startswith("0x02"):
            for nic in pci.children:
                for net in nic.all("net"):
                    net.need("name", "dev")
        elif kind == "0x060400":
            for child in pci.children:
                self.pci(child, busid, cpu)
        else:
            raise Rejected(f"class {kind}")

    def sockets(self) -> None:
        for first, rate in self.cpus.items():
            for second in self.cpus:
                if first != second:
                    self.links[first, second, "sys"] += rate

    def nvlinks(self, busid: str, gpu: Node, cpu: str) -> None:
        known = {name for name, _, _ in self.gpus}
        for link in gpu.children:
            if link.name == "c2c":
                bandwidth, count = link.need("bw", "count")
                self.both(busid, cpu, "c2c", Fraction(int(bandwidth) * int(count), 1000))
                continue
            if link.name != ("xgmi" if self.amd else "nvlink"):
                raise Rejected(f"{link.name} inside gpu")
            target, count, kind = link.need("target", "count", "tclass")
            if self.amd:
                one = Fraction(next(rate for start, rate in XGMI if gpu.attributes["gcn"].startswith(start)))
            else:
                sm = int(gpu.need("sm")[0])
                one = Fraction(next(rate for least, rate in NVLINK if sm >= least))
            rate = int(count) * one
            if kind.startswith("0x03"):
                if target not in known:
                    raise Rejected(f"no GPU at {target}")
                self.links[busid, target, "nvl"] += rate
            else:
                self.both(busid, {"0x068000": "nvs", "0x068001": cpu}[kind], "nvl", rate)


PATHS = ("LOC", "NVL", "NVB", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")


def nccl_channels(graphs: Node, devs: set[int]) -> dict[int, list[list[int]]]:
    """Channels of every graph of a graph file as NCCL loads them, as numbers ``dev``, by id of the graph."""
    if graphs.name != "graphs" or graphs.need("version") != ["1"]:
        raise Rejected("no graph file")
    found = {}
    for graph in graphs.children:
        keys = ("id", "pattern", "crossnic", "nchannels", "speedintra", "speedinter", "samechannels")
        identity, pattern, _, count, speed, _, _ = graph.need(*keys)
        kinds = graph.need("typeintra", "typeinter")
        if pattern != {"0": "4", "1": "1"}[identity] or any(kind not in PATHS for kind in kinds):
            raise Rejected(f"graph {identity} with pattern {pattern}, {kinds}")
        channels = [
            [int(gpu.need("dev")[0], 16) for gpu in channel.all("gpu")] for channel in graph.all("channel")
        ]
        if len(channels) != int(count) or len(channels) > 16 or float(speed) <= 0:
            raise Rejected(f"graph {identity}: {count} channels of {speed} GB/s, {len(channels)} listed")
        if any(sorted(channel) != sorted(devs) for channel in channels):
            raise Rejected(f"graph {identity}: a channel leaves a GPU out, or has it twice")
        found[int(identity)] = channels
    return found
