"""What NCCL says of a communicator under NCCL_DEBUG=INFO: ranks, rings, trees, transports, settings, what fell back.

Lines are ``host:pid:tid [device] NCCL INFO …`` of all ranks together, in any order. A rank's lines belong to the
communicator that its process last began on that device. The forms are those of NCCL 2.10 to 2.30; of older ones the
ways between ranks are read:

    ncclCommInitRank comm 0x… rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 7000 commId 0x… - Init START
    Channel 00/24 :    0   1   2   3                    a ring, from rank 0 on; printed by rank 0, cut at 128 columns
    Ring 00 : 7 -> 0 -> 1                               of each rank, its neighbours in a ring
    Trees [0] 1/-1/-1->0->-1 [1] …                      of each rank, its children and parent in every channel
    Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read      and SHM/direct/direct, NET/IB/0/GDRDMA, NET/Socket/0
    AllReduce: 1048576 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}

What these mean on a machine is `topoplan.compare.nccl_run`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from topoplan.formats.nccl_logs.perf_runs import ENDLESS, LoggedRank
from topoplan.hosts.host import plain_bus_id

ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
"""NCCL's algorithms by their numbers, as its tuner plugin names them."""

PROTOCOLS = ("ll", "ll128", "simple")
"""Its protocols by their numbers."""

_LINE = re.compile(r"(\S+?):(\d+):\d+(?: \[(\d+)\])?(?: \S+:\d+)?(?: \(\w+\))? NCCL (INFO|WARN) ?(.*)$")
_VERSION = re.compile(r"\bNCCL version (\d+\.\d+\.\d+\S*)")
_RANK = re.compile(
    r"comm (0x[0-9a-f]+) (?:localRank \d+ )?rank (\d+) nranks (\d+) cudaDev (\d+)(?: nvmlDev (\d+))?"
    r"(?: busId ([0-9a-f]+))?(?:.*?commId (0x[0-9a-f]+))?"
)
_RING = re.compile(r"^Channel (\d+)/(\d+) :((?: +\d+)+)( *\.*)\s*$")
_NEIGHBOURS = re.compile(r"^Ring (\d+) : (\d+) -> (\d+) -> (\d+)")
_TREE = re.compile(r"\[(\d+)\] (-?\d+)/(-?\d+)/(-?\d+)->(-?\d+)->(-?\d+)")
_EDGE = re.compile(
    r"^(?:Channel|Ring) (\d+)(?:/\d+)? : (\d+)(?:\[[0-9a-f]+\])? -> (\d+)(?:\[[0-9a-f]+\])?"
    r"(?: \[(?:send|receive)\])? via (.+?)\s*$"
)
_CHANNELS = re.compile(r"(\d+) coll channels(?:, \d+ collnet channels)?(?:, (\d+) nvls channels)?")
_SETTING = re.compile(r"(NCCL_\w+) set (?:by environment )?to (\S+?)\.?$")
_CHOICE = re.compile(r"^(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)")
_TOLD = (
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
class Told:
    """Something that NCCL says in words.

    Parameters
    ----------
    kind : str
        no ib device, p2p disabled, p2p failed, no gdr, nvls, no nvls, network (its name is the text) or warning.
    line : int
        Of its first mention.
    text : str
    """

    kind: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Connection:
    """What joins two ranks, from the first to the second.

    Parameters
    ----------
    source, target : int
    via : str
        As NCCL prints it, such as P2P/CUMEM/read.
    line : int
    """

    source: int
    target: int
    via: str
    line: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What NCCL chose for one call: its function, bytes, algorithm and protocol (`ALGORITHMS`, `PROTOCOLS`)."""

    function: str
    size: int
    algorithm: str
    protocol: str


@dataclass(slots=True)
class Communicator:
    """What is said of one communicator.

    Parameters
    ----------
    line : int
    size : int
        Ranks.
    ranks : dict of int to LoggedRank
        Those that say where they run.
    rings : dict of int to tuple of int
        By channel; whole ones, from any rank on.
    trees : dict of int to dict of int to int
        By channel the parent of every rank that has one.
    leaves : dict of int to dict of int to tuple of int
        By channel the children of every rank that was heard.
    connections : dict of Connection to int
        And over how many channels.
    channels, nvls_channels : int or None
    choices : list of Choice
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
    choices: list[Choice] = field(default_factory=list)
    next_of: dict[int, dict[int, int]] = field(default_factory=dict)

    def joined(self) -> Iterator[tuple[Connection, int]]:
        """Every connection and the number of its channels, in the order of the ranks."""
        for (source, target, via), (line, channels) in sorted(self.connections.items()):
            yield Connection(source, target, via, line), len(channels)

    def close_rings(self) -> None:
        """Rings that only their ranks told, from 0 on, as far as all of them did."""
        for channel, following in self.next_of.items():
            if channel in self.rings or len(following) < self.size:
                continue
            order, rank = [0], following.get(0, 0)
            while rank and len(order) <= self.size and rank in following:
                order.append(rank)
                rank = following[rank]
            if rank == 0 and len(order) == self.size:
                self.rings[channel] = tuple(order)


@dataclass(frozen=True, slots=True)
class NcclLog:
    """All that NCCL says in a text.

    Parameters
    ----------
    version : str
        Empty where it says none.
    settings : tuple of (str, str)
        What the environment sets.
    told : tuple of Told
        Each kind and text once.
    communicators : tuple of Communicator
        Largest first.
    """

    version: str
    settings: tuple[tuple[str, str], ...]
    told: tuple[Told, ...]
    communicators: tuple[Communicator, ...]


def parse_nccl_log(text: str) -> NcclLog | None:
    """What NCCL says in a text; None where it says nothing.

    Examples
    --------
    >>> log = parse_nccl_log('''node1:7:8 [0] NCCL INFO NCCL version 2.21.5+cuda12.4
    ... node1:7:8 [0] NCCL INFO Channel 00/02 :    0   1   3   2
    ... node1:7:8 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
    ... node1:7:9 [1] NCCL INFO Channel 00/0 : 1[1] -> 3[3] via SHM/direct/direct
    ... ''')
    >>> log.version, log.communicators[0].rings, [one.via for one, _ in log.communicators[0].joined()]
    ('2.21.5+cuda12.4', {0: (0, 1, 3, 2)}, ['P2P/CUMEM', 'SHM/direct/direct'])
    """
    version = ""
    settings: dict[str, str] = {}
    told: dict[tuple[str, str], Told] = {}
    known: dict[str, Communicator] = {}
    current: dict[tuple[str, str, str], Communicator] = {}
    heard = False
    for number, raw in enumerate(text.splitlines(), 1):
        stated = _VERSION.search(raw)
        if stated and not version:
            version = stated[1]
        match = _LINE.search(raw)
        if match is None or ENDLESS.search(raw):
            continue
        heard = True
        host, process, device, level, words = match.groups()
        place = (host, process, device or "")
        started = _RANK.search(words)
        if started:
            identity = started[7] or f"{started[3]} ranks"
            current[place] = known.setdefault(identity, Communicator(number, int(started[3])))
            _add_rank(current[place], host, started)
            continue
        setting = _SETTING.search(words)
        if setting:
            settings.setdefault(setting[1], setting[2])
            continue
        for kind, pattern in _TOLD:
            found = pattern.search(words)
            if found:
                name = found[1] if kind == "network" else words.strip()
                told.setdefault((kind, name), Told(kind, number, name))
                break
        else:
            if level == "WARN":
                told.setdefault(("warning", words), Told("warning", number, words.strip()))
                continue
            one = current.get(place)
            if one is None:
                one = current[place] = known.setdefault("", Communicator(number, 0))
            _add_words(one, number, words)
    if not heard:
        return None
    meant = [
        one for one in known.values() if one.ranks or one.rings or one.connections or one.trees or one.choices
    ]
    for one in meant:
        if not one.size:
            one.size = 1 + max(
                (rank for pair in one.connections for rank in pair[:2]),
                default=max((max(ring) for ring in one.rings.values()), default=0),
            )
        one.close_rings()
    meant.sort(key=lambda one: (-one.size, one.line))
    return NcclLog(version, tuple(sorted(settings.items())), tuple(told.values()), tuple(meant))


def _add_rank(one: Communicator, host: str, found: re.Match[str]) -> None:
    rank = int(found[2])
    digits = f"{int(found[6] or '0', 16):09x}"
    busid = plain_bus_id(f"{digits[:-5]}:{digits[-5:-3]}:{digits[-3:-1]}.{digits[-1]}") if found[6] else ""
    one.ranks.setdefault(rank, LoggedRank(rank, 0, host, int(found[5] or found[4]), busid))


def _add_words(one: Communicator, number: int, words: str) -> None:
    """Take a line of one communicator."""
    edge = _EDGE.match(words)
    if edge:
        channel, source, target, via = int(edge[1]), int(edge[2]), int(edge[3]), edge[4]
        _, channels = one.connections.setdefault((source, target, via), (number, set()))
        channels.add(channel)
        return
    ring = _RING.match(words)
    if ring:
        order = tuple(int(rank) for rank in ring[3].split())
        one.channels = one.channels or int(ring[2])
        if not ring[4].strip() and len(set(order)) == len(order) and (not one.size or len(order) == one.size):
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
        made = Choice(choice[1], int(choice[2]), algorithm, protocol)
        if made not in one.choices:
            one.choices.append(made)


def _name(text: str, names: tuple[str, ...]) -> str:
    """An algorithm or protocol, of which older releases print the number."""
    number = int(text) if text.isdecimal() else None
    return text.lower() if number is None or number >= len(names) else names[number]


def via_kind(via: str) -> str:
    """P2P, SHM, NET/IB, NET/Socket or another network by its name.

    Examples
    --------
    >>> [via_kind(text) for text in ("P2P/CUMEM/read", "direct shared memory", "NET/IB/0(3)/GDRDMA")]
    ['P2P', 'SHM', 'NET/IB']
    """
    if via.startswith("NET/"):
        return "/".join(via.split("/")[:2])
    return "SHM" if "shared memory" in via else via.split("/")[0]
