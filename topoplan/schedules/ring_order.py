"""The order in which one ring visits ranks that share switches: the order that loads shared links least.

For up to eight ranks every order is tried: least (load / capacity) on the worst link, then fewest link
crossings, then the lowest order. Beyond, the depth-first order of the machine is compared with the plain rank
order; on a tree of switches a depth-first order crosses every link at most once in each direction, which no
order can beat. A hop never passes another rank; where neither order can do without, the orders of
`ring_search` are taken.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from topoplan.plans.fabric import Arc, Fabric
from topoplan.schedules.ring_forest import LogicalRing
from topoplan.schedules.ring_search import disjoint_rings

LARGEST_EXACT = 8
"""Most ranks for which every order is tried."""


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
    routes = _shortest_routes(fabric)
    order = _best_order(fabric, routes)
    if order is None:
        return None
    hops = tuple(routes[pair].links for pair in _pairs(order))
    return LogicalRing(_weight(hops, list(fabric.capacity)), order, hops)


def switched_rings(fabric: Fabric) -> tuple[LogicalRing, ...]:
    """Rings that together fill the ports of switches: one order, and one ring for each plane of switches.

    A single switch gives one ring at the full port rate. Where ranks are wired to several switches, rings
    are peeled off, each over the routes with most capacity left, until a hop has none. Empty where every
    order has a hop without a route.
    """
    choices: dict[tuple[int, int], list[Arc]] = {}
    for arc in fabric.arcs:
        choices.setdefault((arc.tail, arc.head), []).append(arc)
    order = _best_order(fabric, _shortest_routes(fabric))
    left = list(fabric.capacity)
    rings: list[LogicalRing] = []
    while order is not None:
        widest = [
            max(choices[pair], key=lambda arc: (min(left[number] for number in arc.links), -len(arc.links)))
            for pair in _pairs(order)
        ]
        hops = tuple(arc.links for arc in widest)
        weight = _weight(hops, left)
        if weight == 0:
            break
        rings.append(LogicalRing(weight, order, hops))
        for hop in hops:
            for number in hop:
                left[number] -= weight
    return tuple(rings)


def _pairs(order: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(order, order[1:] + order[:1], strict=True))


def _weight(hops: tuple[tuple[int, ...], ...], left: list[Fraction]) -> Fraction:
    crossed = [number for hop in hops for number in hop]
    return min(left[number] / crossed.count(number) for number in set(crossed))


def _shortest_routes(fabric: Fabric) -> dict[tuple[int, int], Arc]:
    best: dict[tuple[int, int], Arc] = {}
    widths: dict[tuple[int, int], Fraction] = {}
    for arc in fabric.arcs:
        width = min(fabric.capacity[number] for number in arc.links)
        pair = (arc.tail, arc.head)
        if pair not in best or (-len(arc.links), width) > (-len(best[pair].links), widths[pair]):
            best[pair], widths[pair] = arc, width
    return best


def _best_order(fabric: Fabric, routes: dict[tuple[int, int], Arc]) -> tuple[int, ...] | None:
    size = fabric.size
    crossing: NDArray[np.int64] = np.zeros((size, size, len(fabric.links)), dtype=np.int64)
    for (tail, head), arc in routes.items():
        crossing[tail, head, list(arc.links)] = 1
    joined: NDArray[np.bool_] = crossing.sum(axis=2) > 0
    orders = _candidate_orders(fabric, joined)
    following = np.roll(orders, -1, axis=1)
    orders = orders[joined[orders, following].all(axis=1)]
    if not len(orders):
        return None
    load = np.zeros((len(orders), len(fabric.links)), dtype=np.int64)
    for i in range(size):
        load += crossing[orders[:, i], orders[:, (i + 1) % size]]
    worst = (load / np.array([float(c) for c in fabric.capacity])).max(axis=1)
    best = np.lexsort((load.sum(axis=1), worst))[0]
    return tuple(int(rank) for rank in orders[best])


def _candidate_orders(fabric: Fabric, joined: NDArray[np.bool_]) -> NDArray[np.int64]:
    size = fabric.size
    if order_is_exact(fabric):
        return np.array([(0, *rest) for rest in permutations(range(1, size))], dtype=np.int64)
    orders = [tuple(range(size)), _depth_first_order(fabric)]
    if not any(all(joined[u, v] for u, v in _pairs(order)) for order in orders):
        orders = list(disjoint_rings(joined.astype(int).tolist()).rings)
    return np.array(orders, dtype=np.int64).reshape(len(orders), size)


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
