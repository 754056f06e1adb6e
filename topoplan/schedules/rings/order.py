"""The order in which rings visit ranks: on shared switches the one that loads links least, across servers by rails.

For up to eight ranks every order is tried: least (load / capacity) on the worst link, then fewest link
crossings, then the lowest order. Beyond, the depth-first order of the machine is compared with the plain rank
order; on a tree of switches a depth-first order crosses every link at most once in each direction, which no
order can beat. A hop never passes another rank; where neither order can do without, the orders of
`hamiltonian_cycles` are taken.

Across servers rings lie as ring libraries lay them: each enters and leaves every server once, over NICs of its own.
Ring c enters server s at its door c + a(s) and leaves it at door c + a(s + 1), numbers modulo the doors of the server,
with a = 0, 1, 0, 1, …, and 2 at last where the number of servers is odd. Doors are the GPUs with a way out of their
server that passes no other GPU: all of them, or those with a NIC. So a server receives on the rail on which the
one before it sends, and all rings together use every NIC once in each direction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from topoplan.fabric.fabric import Fabric
from topoplan.schedules.rings.forest import LogicalRing
from topoplan.schedules.rings.hamiltonian_cycles import disjoint_rings
from topoplan.schedules.rings.routes import Links, Routes

LARGEST_EXACT = 8
"""Most ranks for which every order is tried."""

LARGEST_SEARCHED = 64
"""Most ranks for which an order is searched where neither of the two simple ones has all its routes."""


def order_is_exact(fabric: Fabric) -> bool:
    """True when `single_ring` tries every order."""
    return fabric.size <= LARGEST_EXACT


def single_ring(fabric: Fabric) -> LogicalRing | None:
    """One ring over shortest routes (widest among equally short ones), in the order that loads links least.

    None where every order has a hop without a route.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.plans import Fabric
    >>> ring = single_ring(Fabric(topoplan.load("dgx-1v").subset([0, 2, 4, 6]), ("pcie",)))
    >>> ring.order
    (0, 1, 2, 3)
    """
    routes = Routes(fabric)
    order = _best_order(fabric, routes)
    if order is None:
        return None
    hops = tuple(_found(routes.shortest(*pair, fabric.capacity)) for pair in _pairs(order))
    return LogicalRing(_weight(hops, list(fabric.capacity)), order, hops)


def switched_rings(fabric: Fabric, routes: Routes) -> tuple[LogicalRing, ...]:
    """Rings that together fill the ports of switches: one order, and one ring for each plane of switches.

    A single switch gives one ring at the full port rate. Where ranks are wired to several switches, rings
    are peeled off, each over the routes with most capacity left, until a hop has none. Empty where every
    order has a hop without a route.
    """
    order = _best_order(fabric, routes)
    if order is None:
        return ()
    # Longer ways count too where the short ones are full.
    find = routes.widest if fabric.size <= LARGEST_SEARCHED else routes.shortest
    left = list(fabric.capacity)
    rings: list[LogicalRing] = []
    while True:
        hops = tuple(_found(find(*pair, left)) for pair in _pairs(order))
        weight = _weight(hops, left)
        if weight == 0:
            return tuple(rings)
        rings.append(LogicalRing(weight, order, hops))
        for hop in hops:
            for number in hop:
                left[number] -= weight


def _pairs(order: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(order, order[1:] + order[:1], strict=True))


def _weight(hops: tuple[Links, ...], left: list[Fraction]) -> Fraction:
    crossed = Counter(number for hop in hops for number in hop)
    return min(left[number] / times for number, times in crossed.items())


def _found(links: Links | None) -> Links:
    assert links is not None, "orders are chosen among those with a route for every hop"
    return links


def _best_order(fabric: Fabric, routes: Routes) -> tuple[int, ...] | None:
    orders = [order for order in _candidate_orders(fabric, routes) if _joined(order, routes)]
    if not orders:
        return None
    load = _loads(fabric, routes, np.array(orders, dtype=np.int64))
    worst = (load / np.array([float(c) for c in fabric.capacity])).max(axis=1)
    return orders[int(np.lexsort((load.sum(axis=1), worst))[0])]


def _joined(order: tuple[int, ...], routes: Routes) -> bool:
    return all(routes.joined(*pair) for pair in _pairs(order))


def _loads(fabric: Fabric, routes: Routes, orders: NDArray[np.int64]) -> NDArray[np.int64]:
    """(orders, links): how often a ring in each order crosses each link."""
    pairs = np.stack((orders, np.roll(orders, -1, axis=1)), axis=2).reshape(-1, 2)
    hops, hop_of_place = np.unique(pairs, axis=0, return_inverse=True)
    crossing = np.zeros((len(hops), len(fabric.links)), dtype=np.int64)
    for number, (tail, head) in enumerate(hops.tolist()):
        crossing[number, list(_found(routes.shortest(tail, head, fabric.capacity)))] = 1
    load = np.zeros((len(orders), len(fabric.links)), dtype=np.int64)
    for place in hop_of_place.reshape(orders.shape).T:
        load += crossing[place]
    return load


def _candidate_orders(fabric: Fabric, routes: Routes) -> list[tuple[int, ...]]:
    size = fabric.size
    if order_is_exact(fabric):
        return [(0, *rest) for rest in permutations(range(1, size))]
    orders = [tuple(range(size)), _depth_first_order(fabric)]
    if size <= LARGEST_SEARCHED and not any(_joined(order, routes) for order in orders):
        lanes = [[int(u != v and routes.joined(u, v)) for v in range(size)] for u in range(size)]
        orders = list(disjoint_rings(lanes).rings)
    return orders


def _depth_first_order(fabric: Fabric) -> tuple[int, ...]:
    """Ranks as a depth-first walk from rank 0 meets them, links between sockets last."""
    onward: dict[int, list[tuple[bool, int]]] = {}
    for link, (src, dst) in zip(fabric.links, fabric.ends, strict=True):
        onward.setdefault(src, []).append((link.channel == "sys", dst))
    seen: dict[int, None] = {}
    pending = [0]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen[node] = None
            pending.extend(dst for _, dst in sorted(onward.get(node, ()), reverse=True))
    return tuple(node for node in seen if node < fabric.size)


MOST_STEPS = 10_000
"""Steps after which a walk through the GPUs of a server is given up."""

Joined = Callable[[int, int], bool]


def server_rings(fabric: Fabric, routes: Routes) -> tuple[LogicalRing, ...]:
    """As many such rings as the capacity of the links allows, one for each GPU with a way out of its server at most.

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

    doors = [
        [rank for rank in ranks if any(routes.shortest(rank, head, fabric.capacity) for head in following)]
        or ranks
        for ranks, following in zip(servers, servers[1:] + servers[:1], strict=True)
    ]
    left = list(fabric.capacity)
    rings = []
    for first in range(max(len(ranks) for ranks in doors)):
        order = _order(servers, doors, first, inside)
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


def _order(
    servers: list[list[int]], doors: list[list[int]], first: int, inside: Joined
) -> tuple[int, ...] | None:
    """All ranks, entering and leaving every server at two of its doors: ranks with a way out of it."""
    shifts = [number % 2 for number in range(len(servers))]
    if len(servers) % 2:
        shifts[-1] = 2
    order: list[int] = []
    for ranks, ports, enters, leaves in zip(servers, doors, shifts, shifts[1:] + shifts[:1], strict=True):
        start, end = ((first + shift) % len(ports) for shift in (enters, leaves))
        if start == end:
            # two doors and an odd number of servers
            end = (start + 1) % len(ports)
        walk = _walk(ranks, ports[start], ports[end], inside)
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
