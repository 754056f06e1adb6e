"""Rings across servers as ring libraries lay them: each enters and leaves every server once, over NICs of its own.

Ring c enters server s at its GPU c + a(s) and leaves it at GPU c + a(s + 1), numbers modulo the GPUs of the server,
with a = 0, 1, 0, 1, …, and 2 at last where the number of servers is odd. So a server receives on the rail on which the
one before it sends, and all rings together use every NIC once in each direction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import cache

from topoplan.fabric.fabric import Fabric
from topoplan.schedules.rings.forest import LogicalRing
from topoplan.schedules.rings.routes import Links, Routes

MOST_STEPS = 10_000
"""Steps after which a walk through the GPUs of a server is given up."""

Joined = Callable[[int, int], bool]


def server_rings(fabric: Fabric, routes: Routes) -> tuple[LogicalRing, ...]:
    """As many such rings as the capacity of the links allows, one for each number of a GPU at most.

    Empty where all ranks are in one server, or no such ring has a route for every hop.

    Examples
    --------
    >>> import topoplan
    >>> fabric = Fabric(topoplan.nvswitch_cluster(2, gpus=4), ("nvlink", "network"))
    >>> for ring in server_rings(fabric, Routes(fabric)):
    ...     print(ring.weight, *(fabric.ranks[rank] for rank in ring.order))
    25 s0.gpu0 s0.gpu2 s0.gpu3 s0.gpu1 s1.gpu1 s1.gpu2 s1.gpu3 s1.gpu0
    25 s0.gpu1 s0.gpu3 s0.gpu0 s0.gpu2 s1.gpu2 s1.gpu3 s1.gpu0 s1.gpu1
    25 s0.gpu2 s0.gpu0 s0.gpu1 s0.gpu3 s1.gpu3 s1.gpu0 s1.gpu1 s1.gpu2
    25 s0.gpu3 s0.gpu1 s0.gpu2 s0.gpu0 s1.gpu0 s1.gpu1 s1.gpu2 s1.gpu3
    """
    members: dict[str, list[int]] = {}
    for rank, name in enumerate(fabric.ranks):
        members.setdefault(fabric.topology.device(name).server, []).append(rank)
    servers = list(members.values())
    if len(servers) < 2:
        return ()

    off_network = [Fraction(link.channel != "network") for link in fabric.links]

    @cache
    def inside(tail: int, head: int) -> bool:
        """True where a rank reaches another of its server without the network."""
        links = routes.shortest(tail, head, off_network)
        return links is not None and all(off_network[link] for link in links)

    left = list(fabric.capacity)
    rings = []
    for first in range(max(len(ranks) for ranks in servers)):
        order = _order(servers, first, inside)
        hops = None if order is None else _hops(order, routes, left)
        if order is None or hops is None:
            continue
        crossed = Counter(link for hop in hops for link in hop)
        weight = min(left[link] / times for link, times in crossed.items())
        if weight > 0:
            rings.append(LogicalRing(weight, order, hops))
            for link, times in crossed.items():
                left[link] -= weight * times
    return tuple(rings)


def _order(servers: list[list[int]], first: int, inside: Joined) -> tuple[int, ...] | None:
    shifts = [number % 2 for number in range(len(servers))]
    if len(servers) % 2:
        shifts[-1] = 2
    order: list[int] = []
    for ranks, enters, leaves in zip(servers, shifts, shifts[1:] + shifts[:1], strict=True):
        walk = _walk(
            ranks, ranks[(first + enters) % len(ranks)], ranks[(first + leaves) % len(ranks)], inside
        )
        if walk is None:
            return None
        order += walk
    return tuple(order)


def _walk(ranks: list[int], start: int, end: int, inside: Joined) -> list[int] | None:
    """All ranks of a server from ``start`` to ``end``, in the order of their numbers where routes allow it."""
    if len(ranks) == 1:
        return [start]
    if start == end:
        return None
    place = ranks.index(start)
    turned = [rank for rank in ranks[place:] + ranks[:place] if rank not in (start, end)]
    steps = 0
    path = [start]
    # Depth first: of every rank on the path, those that are still to be tried after it.
    pending = [iter(turned if turned else [end])]
    while pending:
        steps += 1
        if steps > MOST_STEPS:
            return None
        following = next(pending[-1], None)
        if following is None:
            pending.pop()
            path.pop()
        elif following not in path and inside(path[-1], following):
            path.append(following)
            if len(path) == len(ranks):
                return path
            pending.append(iter(turned if len(path) < len(ranks) - 1 else [end]))
    return None


def _hops(order: tuple[int, ...], routes: Routes, left: list[Fraction]) -> tuple[Links, ...] | None:
    """For every hop the shortest route with most capacity left."""
    hops = []
    for tail, head in zip(order, order[1:] + order[:1], strict=True):
        links = routes.shortest(tail, head, left)
        if links is None:
            return None
        hops.append(links)
    return tuple(hops)
