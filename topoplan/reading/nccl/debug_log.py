"""Parse a log of NCCL_DEBUG=INFO: ranks, rings, trees, transports, settings, fallbacks.

Lines are ``host:pid:tid [device] NCCL INFO …`` of all ranks together, in any order; lines without that prefix are
distinguished by the launcher's label and ``[device]``. The forms are those of NCCL 2.4 to 2.30:

    ncclCommInitRank comm 0x… rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 7000 commId 0x… - Init START
    Channel 00/24 :    0   1   2   3                    a ring, from rank 0 on; printed by rank 0, cut at 128 columns
    Ring 00 : 7 -> 0 -> 1                               of each rank, its neighbours in a ring
    Trees [0] 1/-1/-1->0->-1 [1] …                      of each rank, its children and parent in every channel
    Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read      and SHM/direct/direct, NET/IB/0/GDRDMA, NET/Socket/0
    AllReduce: 1048576 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}

A rank's lines belong to the communicator that its process began last. Releases before 2.19 print the ``comm`` line at
the end alone (Init COMPLETE), so the lines before it belong to it; later ones print it first too (Init START), and
connect after Init COMPLETE. The number of ranks is that of the ``comm`` line or of a whole ring, and unknown
otherwise.

`topoplan.operate.compare.nccl_debug_run` interprets the log on a machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from topoplan.machine.host_topology import plain_bus_id
from topoplan.reading.nccl.perf_text import ENDLESS, LoggedRank, log_lines, split_label

ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
"""NCCL's algorithms by their numbers, as its tuner plugin names them."""

PROTOCOLS = ("ll", "ll128", "simple")
"""NCCL's protocols by their numbers."""

_LEVEL = re.compile(r"NCCL (INFO|WARN) ?")
_PROCESS = re.compile(r"(\d{1,10}):\d{1,10}")
_HOST = re.compile(r"[^\w.-]")
_VERSION = re.compile(r"\bNCCL version (\d{1,4}\.\d{1,4}\.\d{1,4}[\w.+-]{0,40})")
_RANK = re.compile(
    r"\bcomm (0x[0-9a-f]{1,16}) (?:localRank \d+ )?rank (\d+) nranks (\d+) cudaDev (\d+)(?: nvmlDev (\d+))?"
    r"(?: busId ([0-9a-f]{1,16}))?"
)
_COMM_ID = re.compile(r"\bcommId (0x[0-9a-f]{1,16})")
_RING = re.compile(r"Channel (\d+)/(\d+) :(?= )")
_NEIGHBOURS = re.compile(r"Ring (\d+) : (\d+) -> (\d+) -> (\d+)")
_TREE = re.compile(r"\[(\d+)\] (-?\d+)/(-?\d+)/(-?\d+)->(-?\d+)->(-?\d+)")
_EDGE = re.compile(
    r"(?:Channel|Ring) (\d+)(?:/\d+)? : (\d+)(?:\[[0-9a-f]{1,16}\])? -> (\d+)(?:\[[0-9a-f]{1,16}\])?"
    r"(?: \[(?:send|receive)\])? via (?=\S)"
)
_CHANNELS = re.compile(r"(\d+) coll channels(?:, \d+ collnet channels)?(?:, (\d+) nvls channels)?")
_SETTING = re.compile(r"\b(NCCL_\w{1,80}) set (?:by environment )?to (\S{1,200})")
_CHOICE = re.compile(r"(\w{1,40}): (\d+) Bytes -> Algo (\w{1,40}) proto (\w{1,40})")
_STATEMENTS = (
    ("no ib device", re.compile(r"NET/IB ?: No device found")),
    ("p2p disabled", re.compile(r"P2P is disabled between")),
    ("p2p failed", re.compile(r"Could not enable P2P between|peer query failed between")),
    ("p2p failed", re.compile(r"Check P2P Type intraNodeP2pSupport 0")),
    ("no gdr", re.compile(r"GPU Direct RDMA Disabled for HCA (\d+)")),
    ("nvls", re.compile(r"NVLS multicast support is available")),
    ("no nvls", re.compile(r"NVLS multicast support is not available")),
    ("network", re.compile(r"Using network (\S+)")),
)


@dataclass(frozen=True, slots=True)
class LogStatement:
    """A statement that NCCL prints in words, at its first line.

    Kinds: no ib device, p2p disabled, p2p failed, no gdr, nvls, no nvls, network (its name is the text), warning.
    """

    kind: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class RankConnection:
    """Transport from one rank to another; ``via`` is as NCCL prints it, such as P2P/CUMEM/read."""

    source: int
    target: int
    via: str
    line: int


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """NCCL's choice for one call: its function, bytes, algorithm and protocol (`ALGORITHMS`, `PROTOCOLS`)."""

    function: str
    size: int
    algorithm: str
    protocol: str


@dataclass(slots=True)
class LoggedCommunicator:
    """One communicator of a log.

    ``size`` is the number of ranks, 0 if unknown. By channel, ``rings`` holds whole rings from any rank on, ``trees``
    the parent of every rank that has one, and ``leaves`` the children of every rank that printed them.
    """

    line: int
    size: int
    ranks: dict[int, LoggedRank] = field(default_factory=dict)
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    trees: dict[int, dict[int, int]] = field(default_factory=dict)
    leaves: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    connections: dict[tuple[int, int, str], tuple[int, set[int]]] = field(default_factory=dict)
    channels: int | None = None
    nvls_channels: int | None = None
    choices: list[AlgorithmChoice] = field(default_factory=list)
    next_of: dict[int, dict[int, int]] = field(default_factory=dict)

    def joined(self) -> Iterator[tuple[RankConnection, int]]:
        """Yield every connection and the number of its channels, in the order of the ranks."""
        for (source, target, via), (line, channels) in sorted(self.connections.items()):
            yield RankConnection(source, target, via, line), len(channels)

    def close_rings(self) -> None:
        """Add the rings, from 0 on, of which every rank printed its neighbours."""
        for channel, following in self.next_of.items():
            if channel in self.rings or len(following) < max(self.size, 1):
                continue
            order, rank = [0], following.get(0, 0)
            while rank and len(order) <= self.size and rank in following:
                order.append(rank)
                rank = following[rank]
            if rank == 0 and len(order) == self.size:
                self.rings[channel] = tuple(order)


@dataclass(frozen=True, slots=True)
class NcclLog:
    """NCCL's statements in a text.

    ``version`` is the first of ``versions``, empty if none is printed; ``settings`` are those of the environment;
    ``statements`` has each kind and text once; ``communicators`` come largest first.
    """

    version: str
    settings: tuple[tuple[str, str], ...]
    statements: tuple[LogStatement, ...]
    communicators: tuple[LoggedCommunicator, ...]
    versions: tuple[str, ...] = ()


@dataclass(slots=True)
class _Process:
    """State of a process on one device while the log is parsed.

    ``current`` is the communicator that it began or completed last. ``begins``: it prints Init START, so that later
    lines belong to ``current``. ``waiting`` are lines of the communicator that it completes next.
    """

    current: LoggedCommunicator | None = None
    begins: bool = False
    waiting: list[tuple[int, str]] = field(default_factory=list)


_Place = tuple[str, str, str]
"""Host, process (or the launcher's label) and device of a line; host and device are empty if it has none."""


def parse_nccl_log(text: str) -> NcclLog | None:
    """Return NCCL's statements in a text; None if it has none."""
    versions: dict[str, None] = {}
    settings: dict[str, str] = {}
    statements: dict[tuple[str, str], LogStatement] = {}
    known = _LoggedCommunicators()
    hosts: set[str] = set()
    found_any = False
    cut = 0 if text.endswith("\n") else text.count("\n") + 1
    for number, line in log_lines(text):
        if "NCCL version " in line:
            versions |= dict.fromkeys(found[1] for found in _VERSION.finditer(line))
        for place, level, words in _log_messages(line, hosts):
            found_any = True
            if ENDLESS.search(words):
                continue
            started = _RANK.search(words)
            if started:
                known.start(place, number, words, started)
                continue
            setting = _SETTING.search(words)
            if setting:
                settings.setdefault(setting[1], setting[2].removesuffix("."))
                continue
            for kind, pattern in _STATEMENTS:
                found = pattern.search(words)
                if found:
                    name = found[1] if kind == "network" else words
                    statements.setdefault((kind, name), LogStatement(kind, number, name))
                    break
            else:
                if level == "WARN":
                    statements.setdefault(("warning", words), LogStatement("warning", number, words))
                else:
                    known.add(place, number, words)
    if not found_any:
        return None
    return NcclLog(
        next(iter(versions), ""),
        tuple(sorted(settings.items())),
        tuple(statements.values()),
        known.closed(cut),
        tuple(versions),
    )


_MOST_JOINED = 64
"""Largest number of lines that may have run into one."""


def _log_messages(line: str, hosts: set[str]) -> Iterator[tuple[_Place, str, str]]:
    """Yield place, level and words of every message in a line, several if lines of several processes ran into one.

    ``hosts`` that began a line so far show the end of the words before such a host.
    """
    found = list(islice(_LEVEL.finditer(line), _MOST_JOINED))
    start = 0
    for number, level in enumerate(found):
        place, _ = _place(line[start : level.start()], hosts if number else None)
        if not number and place[0]:
            hosts.add(place[0])
        start = level.end()
        words = line[start : found[number + 1].start() if number + 1 < len(found) else len(line)]
        if number + 1 < len(found):
            words = words[: len(words) - _place(words, hosts)[1]]
        yield place, level[1], words.strip()


def _place(prefix: str, hosts: set[str] | None) -> tuple[_Place, int]:
    """Return the origin that a prefix ends with, and its length in characters; ``hosts`` as for `_log_messages`."""
    part = prefix[-600:]
    tokens = part.split()
    device, length = "", len(tokens)
    while tokens and length - len(tokens) < 4:
        token = tokens.pop()
        whole = token.rsplit(":", 2)
        if len(whole) == 3 and _PROCESS.fullmatch(f"{whole[1]}:{whole[2]}"):
            host = _HOST.split(whole[0])[-1]
            if hosts:
                host = max((known for known in hosts if host.endswith(known)), key=len, default=host)
            return (host, whole[1], device), len(part) - part.rindex(token) - whole[0].rindex(host)
        if (
            token.startswith("[")
            and token[1:-1].lstrip("-").isdecimal()
            and token.endswith("]")
            and not device
        ):
            device = token[1:-1]
        elif not (":" in token or (token.startswith("(") and token.endswith(")"))):
            break
    labels, _ = split_label(part.lstrip() + "NCCL")
    return ("", labels, device), 0


class _LoggedCommunicators:
    """The communicators of a log while it is parsed."""

    def __init__(self) -> None:
        self._known: dict[str, LoggedCommunicator] = {}
        self._of_size: dict[int, list[tuple[LoggedCommunicator, set[_Place]]]] = {}
        self._begun: dict[tuple[_Place, str, int], LoggedCommunicator] = {}
        self._processes: dict[_Place, _Process] = {}
        self._apart: list[LoggedCommunicator] = []

    def start(self, place: _Place, number: int, words: str, found: re.Match[str]) -> None:
        """Apply a line that names a rank of a communicator."""
        process = self._processes.setdefault(place, _Process())
        begins = "START" in words
        process.begins = process.begins or begins
        one = self._identified(place, number, words, found, begins=begins)
        if not process.begins:
            for line, waiting in process.waiting:
                _add_words(one, line, waiting)
            process.waiting.clear()
        process.current = one
        _add_rank(one, place[0], found)

    def _identified(
        self, place: _Place, number: int, words: str, found: re.Match[str], *, begins: bool
    ) -> LoggedCommunicator:
        """Return the communicator of a line by its commId, else by its size, without this rank or process."""
        rank, size = int(found[2]), int(found[3])
        identity = _COMM_ID.search(words, found.end())
        if identity:
            return self._known.setdefault(identity[1], LoggedCommunicator(number, size))
        key = (place, found[1], rank)
        if not begins and key in self._begun:
            return self._begun.pop(key)
        same = self._of_size.setdefault(size, [])
        for one, places in same:
            if rank not in one.ranks and not (place[0] and place in places):
                break
        else:
            one, places = LoggedCommunicator(number, size), set()
            same.append((one, places))
            self._apart.append(one)
        places.add(place)
        if begins:
            self._begun[key] = one
        return one

    def add(self, place: _Place, number: int, words: str) -> None:
        """Apply a line of a communicator that is begun, or that is completed later."""
        if not words.startswith(_WORDS_OF_ONE) and " coll channels" not in words and not _CHOICE.match(words):
            return
        process = self._processes.setdefault(place, _Process())
        if process.current is not None and (process.begins or _CHOICE.match(words)):
            _add_words(process.current, number, words)
        else:
            process.waiting.append((number, words))

    def closed(self, cut: int) -> tuple[LoggedCommunicator, ...]:
        """Return all communicators, largest first; lines without one belong to the only one, or to one more.

        ``cut`` is the number of a last line without line break: a ring there may lack ranks.
        """
        named = [*self._known.values(), *self._apart]
        rest: LoggedCommunicator | None = None
        for process in self._processes.values():
            for number, words in process.waiting:
                one = process.current
                if one is None or _ring(words) or words.startswith("Trees "):
                    one = named[0] if len(named) == 1 and _largest_rank(words) < named[0].size else None
                if one is None and number == cut and _ring(words):
                    continue
                if one is None:
                    rest = one = rest or LoggedCommunicator(number, 0)
                _add_words(one, number, words)
        if rest:
            named.append(rest)
            lengths = Counter(map(len, rest.rings.values()))
            rest.size = max(lengths, key=lambda length: (lengths[length], length), default=0)
            rest.rings = {c: ring for c, ring in rest.rings.items() if len(ring) == rest.size}
        meant = [
            one for one in named if one.ranks or one.rings or one.connections or one.trees or one.choices
        ]
        for one in meant:
            one.close_rings()
        return tuple(sorted(meant, key=lambda one: (-one.size, one.line)))


_WORDS_OF_ONE = ("Channel ", "Ring ", "Trees ")
"""Beginnings of lines of one communicator, besides those of channels and choices."""


def _ring(words: str) -> re.Match[str] | None:
    """Match the beginning of a line that lists the ranks of a ring."""
    return None if " -> " in words else _RING.match(words)


def _largest_rank(words: str) -> int:
    """Return the largest rank that a ring, a tree or a connection names."""
    edge, ring = _EDGE.match(words), _ring(words)
    if edge:
        return max(int(edge[2]), int(edge[3]))
    if ring:
        return max((int(rank) for rank in words[ring.end() :].split() if rank.isdecimal()), default=0)
    return max((int(found[5]) for found in _TREE.finditer(words)), default=0)


def _add_rank(one: LoggedCommunicator, host: str, found: re.Match[str]) -> None:
    rank = int(found[2])
    digits = f"{int(found[6] or '0', 16):09x}"
    busid = plain_bus_id(f"{digits[:-5]}:{digits[-5:-3]}:{digits[-3:-1]}.{digits[-1]}") if found[6] else ""
    one.ranks.setdefault(rank, LoggedRank(rank, 0, host, int(found[5] or found[4]), busid))


def _add_words(one: LoggedCommunicator, number: int, words: str) -> None:
    """Apply a line of one communicator."""
    edge = _EDGE.match(words)
    if edge:
        channel, source, target, via = int(edge[1]), int(edge[2]), int(edge[3]), words[edge.end() :][:200]
        _, channels = one.connections.setdefault((source, target, via), (number, set()))
        channels.add(channel)
        return
    ring = _ring(words)
    if ring:
        listed = words[ring.end() :].split()
        one.channels = one.channels or int(ring[2])
        order = tuple(int(rank) for rank in listed if rank.isdecimal())
        # NCCL cuts a line of many ranks, and ends it with dots
        if (
            len(listed) == len(order)
            and set(order) == set(range(len(order)))
            and (not one.size or len(order) == one.size)
        ):
            one.rings[int(ring[1])] = order
        return
    neighbours = _NEIGHBOURS.match(words)
    if neighbours:
        one.next_of.setdefault(int(neighbours[1]), {})[int(neighbours[3])] = int(neighbours[4])
        return
    if words.startswith("Trees "):
        for found in _TREE.finditer(words):
            channel, rank, parent = int(found[1]), int(found[5]), int(found[6])
            if parent >= 0:
                one.trees.setdefault(channel, {})[rank] = parent
            below = tuple(int(child) for child in found.group(2, 3, 4) if int(child) >= 0)
            one.leaves.setdefault(channel, {})[rank] = below
        return
    count = _CHANNELS.search(words)
    if count:
        one.channels = int(count[1])
        one.nvls_channels = int(count[2]) if count[2] else one.nvls_channels
        return
    choice = _CHOICE.match(words)
    if choice:
        algorithm, protocol = _name(choice[3], ALGORITHMS), _name(choice[4], PROTOCOLS)
        made = AlgorithmChoice(choice[1], int(choice[2]), algorithm, protocol)
        if made not in one.choices:
            one.choices.append(made)


def _name(text: str, names: tuple[str, ...]) -> str:
    """Return the name of an algorithm or protocol; older releases print its number."""
    number = int(text) if text.isdecimal() else None
    return text.lower() if number is None or number >= len(names) else names[number]


def via_kind(via: str) -> str:
    """Return P2P, SHM, NET/IB, NET/Socket or another network by its name."""
    if via.startswith("NET/"):
        return "/".join(via.split("/")[:2])
    return "SHM" if "shared memory" in via else via.split("/")[0]
