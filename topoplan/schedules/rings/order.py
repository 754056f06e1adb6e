"""The order in which one ring visits ranks that share switches: the order that loads shared links least.

For up to eight ranks every order is tried: least (load / capacity) on the worst link, then fewest link
crossings, then the lowest order. Beyond, the depth-first order of the machine is compared with the plain rank
order; on a tree of switches a depth-first order crosses every link at most once in each direction, which no
order can beat. A hop never passes another rank; where neither order can do without, the orders of
`search` are taken.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from topoplan.fabric.fabric import Fabric
from topoplan.schedules.rings.forest import LogicalRing
from topoplan.schedules.rings.routes import Links, Routes
from topoplan.schedules.rings.search import disjoint_rings

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
