"""Machines of 10 to 16 GPUs without a plan behind them: several switches, odd ports, servers that differ, dead wires.

Every random machine follows from a seed alone, so that a failure can be named and repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from random import Random

import topoplan
from topoplan.machine.cluster import nvswitch_cluster
from topoplan.machine.topology import Device, Link, Topology

Wires = dict[tuple[str, str], float]


def measured(pick: Random) -> float:
    """A bandwidth such as 47.3186: all nearly alike, so that many links limit a plan at once."""
    return pick.randint(420_000, 500_000) / 10_000


def whole(pick: Random) -> float:
    return float(pick.choice([5, 10, 12, 20, 25, 25, 50, 50]))


def _machine(size: int, switches: int, wires: Wires) -> Topology:
    devices = [Device(f"gpu{i}", "gpu") for i in range(size)]
    devices += [Device(f"sw{i}", "nvswitch") for i in range(switches)]
    links = tuple(Link(a, b, "nvlink", c) for (a, b), c in wires.items())
    return Topology("irregular", tuple(devices), links)


def _both(pick: Random, wires: Wires, a: str, b: str, width: Callable[[Random], float]) -> None:
    wires[a, b] = wires[b, a] = width(pick)
    if pick.random() < 0.3:
        wires[b, a] = width(pick)


def switched(pick: Random) -> Topology:
    """GPUs on one or two of several switches, ports of different width each way."""
    size, switches = pick.randint(10, 14), pick.randint(2, 4)
    wires: Wires = {}
    for i in range(size):
        for j in sorted(pick.sample(range(switches), pick.randint(1, 2))):
            _both(pick, wires, f"gpu{i}", f"sw{j}", whole)
    for a, b in combinations(range(switches), 2):
        _both(pick, wires, f"sw{a}", f"sw{b}", whole)
    return _machine(size, switches, wires)


def ports(pick: Random) -> Topology:
    """One or two switches that every GPU is on, with ports of its own width each way."""
    size, switches = pick.randint(10, 14), pick.randint(1, 2)
    wires: Wires = {}
    for i in range(size):
        for j in range(switches):
            wires[f"gpu{i}", f"sw{j}"] = measured(pick)
            wires[f"sw{j}", f"gpu{i}"] = measured(pick)
    return _machine(size, switches, wires)


def two_levels(pick: Random) -> Topology:
    """Leaf switches on two spines, measured bandwidths."""
    size, leaves = pick.randint(10, 14), 3
    wires: Wires = {}
    for i in range(size):
        _both(pick, wires, f"gpu{i}", f"sw{i % leaves}", measured)
    for leaf in range(leaves):
        for spine in (leaves, leaves + 1):
            _both(pick, wires, f"sw{leaf}", f"sw{spine}", measured)
    return _machine(size, leaves + 2, wires)


def mesh(pick: Random) -> Topology:
    """Direct links of measured bandwidth, the same both ways."""
    size = pick.randint(10, 14)
    wires: Wires = {}
    for step in (1, *pick.sample(range(2, size // 2), pick.randint(1, 2))):
        for i in range(size):
            a, b = f"gpu{i}", f"gpu{(i + step) % size}"
            wires[a, b] = wires[b, a] = measured(pick)
    for _ in range(2):
        a, b = (f"gpu{i}" for i in pick.sample(range(size), 2))
        wires[a, b] = wires[b, a] = measured(pick)
    return _machine(size, 0, wires)


def one_way(pick: Random) -> Topology:
    """A ring in one direction and some directed links across it."""
    size = pick.randint(10, 14)
    width = pick.choice([whole, measured])
    wires: Wires = {(f"gpu{i}", f"gpu{(i + 1) % size}"): width(pick) for i in range(size)}
    for _ in range(2 * size):
        a, b = pick.sample(range(size), 2)
        wires[f"gpu{a}", f"gpu{b}"] = width(pick)
    return _machine(size, 0, wires)


def mixed(pick: Random) -> Topology:
    """Direct links beside two switches, measured bandwidths."""
    size = pick.randint(10, 14)
    wires: Wires = {}
    for i in range(size):
        _both(pick, wires, f"gpu{i}", f"sw{i % 2}", measured)
    _both(pick, wires, "sw0", "sw1", measured)
    for a, b in combinations(range(size), 2):
        if pick.random() < 0.15:
            _both(pick, wires, f"gpu{a}", f"gpu{b}", measured)
    return _machine(size, 2, wires)


def servers(pick: Random) -> Topology:
    """3 + 5, 8 + 4 or 5 + 4 + 3 GPUs on NVSwitches with NICs on rails; some NICs dead, some slow."""
    counts = pick.choice([(3, 5), (8, 4), (5, 4, 3), (6, 6), (7, 3)])
    most = max(counts)
    chosen = [most * server + i for server, count in enumerate(counts) for i in range(count)]
    whole_cluster = nvswitch_cluster(len(counts), gpus=most, rails=pick.choice([1, 2]), oversubscription=2)
    part = whole_cluster.subset(chosen)
    nics = sorted({link.src for link in part.links if ".nic" in link.src and link.dst.startswith("rail")})
    used = {link.dst for link in part.links if link.src in part.gpus}
    nics = [nic for nic in nics if nic in used]
    part = topoplan.without_devices(part, pick.sample(nics, pick.randint(0, 2)))
    wires = sorted(
        f"{link.src}->{link.dst}"
        for link in part.links
        if {link.src, link.dst} & set(part.gpus) and link.bandwidth > 20
    )
    return topoplan.slow_links(part, {wire: measured(pick) / 8 for wire in pick.sample(wires, 3)})


def cubes(pick: Random) -> Topology:
    """Two DGX-1V with 5 to 7 GPUs each and fewer NICs than GPUs, a wire of NVLink slowed."""
    box = topoplan.load("dgx-1v")
    pair = topoplan.cluster(
        [topoplan.Server(box, sorted(pick.sample(range(8), pick.randint(5, 7)))) for _ in range(2)],
        nic_gbps=pick.choice([40.0, 100.0, 400.0]),
        nics=pick.choice([1, 2, 4]),
        network="switch",
    )
    wires = sorted(f"{link.src}-{link.dst}" for link in pair.links if link.channel == "nvlink")
    return topoplan.slow_links(pair, {pick.choice(wires): 9.4321})


MI250_WIRES = {
    200: "0-1 2-3 4-5 6-7 8-9 10-11 12-13 14-15",
    100: "0-4 3-7 8-12 11-15",
    50: "0-8 1-5 1-9 1-10 2-6 2-9 2-10 3-11 4-6 5-6 5-7 9-13 10-14 12-14 13-14 13-15",
}
"""GB/s of the direct links between the 16 halves of a server of eight MI250."""


def mi250() -> Topology:
    """Direct links of three widths, and five hops from end to end."""
    wires: Wires = {}
    for width, pairs in MI250_WIRES.items():
        for a, b in (pair.split("-") for pair in pairs.split()):
            wires[f"gpu{a}", f"gpu{b}"] = wires[f"gpu{b}", f"gpu{a}"] = float(width)
    return _machine(16, 0, wires)


KINDS: dict[str, Callable[[Random], Topology]] = {
    made.__name__: made for made in (switched, ports, two_levels, mesh, one_way, mixed, servers, cubes)
}


def irregular(kind: str, seed: int) -> Topology:
    return KINDS[kind](Random(f"{kind} {seed}"))
