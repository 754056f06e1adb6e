"""Regular networks by parameters: ``bcube:4,2``, ``torus:3,3``, ``fat-tree:4``; ``@10`` makes each port 10 GB/s.

A host is one GPU with its network ports. Hosts are numbered by their digits, the first dimension in the highest place.

- ``bcube:N,K``: N^K hosts of K ports and K N^(K-1) switches of N; the switch of level l joins the hosts that differ
  in digit l alone (Guo et al., "BCube", SIGCOMM 2009).
- ``torus:A,B,…``: A B … hosts, each with a port to both neighbours in every dimension; in a dimension of two both
  ports lead to the same host.
- ``fat-tree:K``: K^3 / 4 hosts on switches of K ports in K pods (Al-Fares et al., SIGCOMM 2008).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product

from topoplan.errors import UsageError
from topoplan.topology import Device, Link, Topology

PORT = 12.5
"""GB/s of a port where none is given: 100 Gb/s."""

MOST_HOSTS, LONGEST_NUMBER = 4096, 9
"""Most hosts of a network, and digits of the longest number in its name: more is a slip of the keyboard."""

_NAME = re.compile(r"(?P<kind>[a-z-]+):(?P<numbers>[0-9]+(,[0-9]+)*)(@(?P<port>[0-9]+(\.[0-9]+)?))?")


def bcube(ports: int, levels: int, *, gbps: float = PORT) -> Topology:
    """A BCube of ``ports ** levels`` hosts; ``gbps`` is GB/s of a port and direction.

    Raises
    ------
    UsageError
        Fewer than two ports of a switch, no level, too many hosts.

    Examples
    --------
    >>> machine = bcube(4, 2)
    >>> len(machine.gpus), len(machine.devices) - len(machine.gpus)
    (16, 8)
    """
    if ports < 2 or levels < 1:
        raise UsageError(
            f"bcube:{ports},{levels} is none; give switches of 2 ports or more, and 1 level or more"
        )
    hosts = _hosts(f"bcube:{ports},{levels}", [ports] * min(levels, MOST_HOSTS))
    wires = []
    for level in range(levels):
        for number, digits in enumerate(hosts):
            others = [digit for place, digit in enumerate(digits) if place != levels - 1 - level]
            switch = sum(digit * ports**place for place, digit in enumerate(reversed(others)))
            wires.append((f"gpu{number}", f"level{level}-switch{switch}", 1))
    return _network(f"bcube:{ports},{levels}", len(hosts), wires, gbps)


def torus(*sides: int, gbps: float = PORT) -> Topology:
    """A torus of hosts; ``gbps`` is GB/s of a port and direction.

    Raises
    ------
    UsageError
        A side below two, too many hosts.

    Examples
    --------
    >>> machine = torus(2, 3)
    >>> len(machine.gpus), sorted({link.count for link in machine.links})
    (6, [1, 2])
    """
    name = "torus:" + ",".join(map(str, sides))
    if not sides or min(sides) < 2:
        raise UsageError(f"{name[:60]} is none; give sides of 2 or more")
    hosts = _hosts(name, sides)
    place = {digits: number for number, digits in enumerate(hosts)}
    wires = []
    for digits, number in place.items():
        for dimension, side in enumerate(sides):
            if side == 2 and digits[dimension] == 1:
                continue
            ahead = (digits[dimension] + 1) % side
            other = place[(*digits[:dimension], ahead, *digits[dimension + 1 :])]
            wires.append((f"gpu{number}", f"gpu{other}", 2 if side == 2 else 1))
    return _network(name, len(hosts), wires, gbps)


def fat_tree(ports: int, *, gbps: float = PORT) -> Topology:
    """A fat tree of ``ports ** 3 / 4`` hosts; ``gbps`` is GB/s of a port and direction.

    Raises
    ------
    UsageError
        Ports that are odd or fewer than two, too many hosts.

    Examples
    --------
    >>> machine = fat_tree(4)
    >>> len(machine.gpus), len(machine.devices) - len(machine.gpus)
    (16, 20)
    """
    name = f"fat-tree:{ports}"
    if ports < 2 or ports % 2:
        raise UsageError(f"{name} is none; give switches an even number of ports, 2 or more")
    half = ports // 2
    count = len(_hosts(name, [ports, half, half]))
    wires = [(f"gpu{host}", f"edge{host // half}", 1) for host in range(count)]
    for pod, edge, upper in product(range(ports), range(half), range(half)):
        wires.append((f"edge{pod * half + edge}", f"aggregation{pod * half + upper}", 1))
        wires.append((f"aggregation{pod * half + edge}", f"core{edge * half + upper}", 1))
    return _network(name, count, wires, gbps)


def _hosts(name: str, sides: Sequence[int]) -> list[tuple[int, ...]]:
    count = 1
    for side in sides:
        count *= side
        if count > MOST_HOSTS:
            raise UsageError(f"{name[:60]} has more than {MOST_HOSTS} hosts; choose smaller numbers")
    return list(product(*map(range, sides)))


def _network(name: str, hosts: int, wires: Sequence[tuple[str, str, int]], gbps: float) -> Topology:
    """Hosts, the switches that wires name, in their order, and both directions of every wire."""
    gpus = [Device(f"gpu{number}", "gpu", server=f"host{number}") for number in range(hosts)]
    names = {end: None for a, b, _ in wires for end in (a, b) if not end.startswith("gpu")}
    links = [
        Link(src, dst, "network", gbps * count, count=count)
        for a, b, count in wires
        for src, dst in ((a, b), (b, a))
    ]
    source = f"made by its parameters, {gbps:g} GB/s for each port"
    return Topology(name, (*gpus, *(Device(one, "switch") for one in names)), tuple(links), source=source)


_KINDS: dict[str, tuple[int | None, Callable[..., Topology]]] = {
    "bcube": (2, bcube),
    "torus": (None, torus),
    "fat-tree": (1, fat_tree),
}

FORMS = ("bcube:N,K", "torus:A,B,…", "fat-tree:K")
"""How names with parameters are written; ``@GB/s`` after them is a port's bandwidth."""


def fabric_named(name: str) -> Topology | None:
    """The network of a name with parameters; None where it is no such name.

    Raises
    ------
    UsageError
        An unknown kind, a wrong number of parameters, or parameters of no network.

    Examples
    --------
    >>> fabric_named("torus:3,3@10").links[0].bandwidth
    10.0
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    texts = [*found["numbers"].split(","), (found["port"] or "").split(".")[0]]
    if max(map(len, texts)) > LONGEST_NUMBER:
        raise UsageError(
            f"{name[:60]} has a number of more than {LONGEST_NUMBER} digits; choose smaller numbers"
        )
    numbers = [int(number) for number in found["numbers"].split(",")]
    wanted, make = _KINDS.get(found["kind"], (-1, torus))
    if wanted is not None and wanted != len(numbers):
        raise UsageError(
            f"no network is written {name[:60]!r}; use {', '.join(FORMS)}, with @10 for ports of 10 GB/s"
        )
    port = float(found["port"]) if found["port"] else PORT
    if not port:
        raise UsageError(f"{name[:60]}: ports of 0 GB/s carry nothing; give more")
    return make(*numbers, gbps=port)
