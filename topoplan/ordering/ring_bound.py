"""A bus bandwidth that no ring exceeds, whatever the order of its ranks.

A ring enters and leaves every set of ranks at least once, with everything that it moves. So it is not faster than

- a maximum flow out of any set of ranks, or into it: here single ranks, servers, and groups of servers near each other;
- the ports of a server shared by all its ranks, or else the best hop inside it;
- the width at which hops as wide still join all ranks, in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations
from math import lcm

from topoplan.bounds.maximum_flow import FlowNetwork
from topoplan.ordering.hop_loads import HopLoads

MOST_RANKS, MOST_SERVERS = 128, 32
"""Up to which the hops between any two are looked at."""


def ring_bound(hops: HopLoads, groups: Sequence[Sequence[int]] = ()) -> Fraction:
    """GB/s of bus bandwidth that the ring in no order exceeds.

    Parameters
    ----------
    hops : HopLoads
    groups : sequence of sequences of int
        Sets of servers whose way out is looked at, besides the links that leave each server.

    Examples
    --------
    >>> import topoplan
    >>> float(ring_bound(HopLoads(topoplan.load("dgx-1v"))))
    50.0
    """
    several = len(hops.servers) > 1
    limits: list[Fraction] = []
    if hops.size <= MOST_RANKS:
        limits += _by_hops(hops)
    if several:
        if hops.size > MOST_RANKS and len(hops.servers) <= MOST_SERVERS:
            limits += _by_server_hops(hops)
        limits += _by_ports(hops)
        cuts = dict.fromkeys(frozenset(group) for group in groups)
        limits += _by_flows(hops, [cut for cut in cuts if 1 < len(cut) < len(hops.servers)])
    elif hops.size <= MOST_RANKS:
        limits += _by_rank_flows(hops)
    return min(limits, default=Fraction(0))


def _by_hops(hops: HopLoads) -> list[Fraction]:
    """The widest threshold at which hops as wide join all ranks, both ways, and enter and leave each."""
    rates = [
        [hops.rate(hops.hop(tail, head)) if tail != head else Fraction(0) for head in range(hops.size)]
        for tail in range(hops.size)
    ]
    return [_joining(rates)] if hops.size > 1 else []


def _by_server_hops(hops: HopLoads) -> list[Fraction]:
    count = len(hops.servers)
    rates = [
        [hops.rate(hops.ways.between(tail, head)) if tail != head else Fraction(0) for head in range(count)]
        for tail in range(count)
    ]
    return [_joining(rates)]


def _joining(rates: Sequence[Sequence[Fraction]]) -> Fraction:
    """The largest rate such that hops of that rate or more lead from everywhere to everywhere."""
    known = sorted({rate for row in rates for rate in row if rate})
    low, high = 0, len(known)
    while low < high:
        middle = (low + high + 1) // 2
        if _strong(rates, known[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return known[low - 1] if low else Fraction(0)


def _strong(rates: Sequence[Sequence[Fraction]], least: Fraction) -> bool:
    size = len(rates)
    for onward in (rates, [list(column) for column in zip(*rates, strict=True)]):
        reached, frontier = {0}, [0]
        for node in frontier:
            for other in range(size):
                if onward[node][other] >= least and other not in reached:
                    reached.add(other)
                    frontier.append(other)
        if len(reached) < size:
            return False
    return True


def _by_rank_flows(hops: HopLoads) -> list[Fraction]:
    """Flows over all links of a server, from the first rank to each other one and back."""
    position = {device.name: number for number, device in enumerate(hops.topology.devices)}
    scale = lcm(*(capacity.denominator for capacity in hops.capacity))
    network = FlowNetwork(
        len(position),
        (
            (position[link.src], position[link.dst], int(capacity * scale))
            for link, capacity in zip(hops.links, hops.capacity, strict=True)
        ),
    )
    ranks = [position[name] for name in hops.fabric.ranks]
    return [
        Fraction(network.maximum(*pair), scale)
        for other in ranks[1:]
        for pair in ((ranks[0], other), (other, ranks[0]))
    ]


MOST_HOPS = 20_000
"""Hops inside servers that are looked at."""


def _by_ports(hops: HopLoads) -> list[Fraction]:
    """What leaves each server together, and what enters it; and that a rank that does not leave has a hop inside.

    Of m ranks all leave their server, so that its ports carry m hops, or one of them has a hop inside: the ring is no
    faster than an m-th of the ports, or than the best hop inside and the ports.
    """
    home = {device.name: device.server for device in hops.topology.devices}
    out, into = (dict.fromkeys(hops.names, Fraction(0)) for _ in range(2))
    for link, capacity in zip(hops.links, hops.capacity, strict=True):
        if home[link.src] != home[link.dst]:
            if home[link.src] in out:
                out[home[link.src]] += capacity
            if home[link.dst] in into:
                into[home[link.dst]] += capacity
    limits = [*out.values(), *into.values()]
    if sum(len(ranks) ** 2 for ranks in hops.servers) <= MOST_HOPS:
        for name, ranks in zip(hops.names, hops.servers, strict=True):
            inside = max((hops.rate(hops.hop(*pair)) for pair in permutations(ranks, 2)), default=None)
            if inside is not None:
                limits += [max(min(ports, inside), ports / len(ranks)) for ports in (out[name], into[name])]
    return limits


def _by_flows(hops: HopLoads, cuts: Sequence[frozenset[int]]) -> list[Fraction]:
    """Flows between servers out of sets of them and into these, each server as one point."""
    home = {device.name: device.server for device in hops.topology.devices}
    place = {name: number for number, name in enumerate(hops.names)}
    ends: dict[str, int] = {}
    for device, server in home.items():
        key = server if server in place else f" {device}"
        ends[device] = place.setdefault(key, len(place))
    widths: dict[tuple[int, int], Fraction] = {}
    for link, capacity in zip(hops.links, hops.capacity, strict=True):
        pair = (ends[link.src], ends[link.dst])
        if pair[0] != pair[1]:
            widths[pair] = widths.get(pair, Fraction(0)) + capacity
    scale = lcm(*(width.denominator for width in widths.values()))
    arcs = [(tail, head, int(width * scale)) for (tail, head), width in widths.items()]
    everything = sum(capacity for _, _, capacity in arcs)
    size = len(place)
    limits = []
    for cut in cuts:
        joints = [
            (size if server in cut else server, server if server in cut else size + 1, everything)
            for server in range(len(hops.names))
        ]
        out = FlowNetwork(size + 2, arcs + joints).maximum(size, size + 1)
        turned = [(head, tail, capacity) for tail, head, capacity in arcs]
        into = FlowNetwork(size + 2, turned + joints).maximum(size, size + 1)
        limits += [Fraction(out, scale), Fraction(into, scale)]
    return limits
