"""Plan rings, the baseline of packed trees, in the best order of ranks: over NVLink, over PCIe, or with relayed hops.

NCCL up to 2.7 fell back to PCIe for lack of an NVLink ring, and Blink compares with that; NCCL relays through one
GPU between two since 2.8. The kind of ring decides a comparison, so every plan states it.

Up to eight ranks on shared switches all orders are tried: least (load / capacity) on the worst link, then fewest
link crossings, then the lowest order. Beyond, the depth-first order of the machine competes with the rank order; on
a tree of switches it crosses every link at most once in each direction, which is optimal. A hop never passes another
rank; if both orders need that, the orders of `hamiltonian_cycles` are taken. Across servers the rings are those of
NCCL's channels (`topoplan.schedules.server_rings`), or one order of all ranks if a hop between servers has no route.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.topology import Topology, TopologyLike
from topoplan.plans.build import Allocation, timed, trivial_plan
from topoplan.plans.plan import Plan
from topoplan.schedules.hamiltonian_cycles import (
    NODE_LIMIT,
    disjoint_rings,
    ring_hops,
    ring_limit,
    step_limit,
)
from topoplan.schedules.ring_forest import LogicalRing, relay_rings, ring_forest
from topoplan.schedules.routes import DirectRoutes, Links
from topoplan.schedules.server_rings import server_rings
from topoplan.solve.cuts_and_partitions import bounded_plan
from topoplan.units import counted

LARGEST_EXACT = 8
"""Most ranks for which every order is tried."""

LARGEST_SEARCHED = 64
"""Most ranks for which an order is searched if neither of the two simple ones has all its routes."""


def order_is_exact(fabric: Fabric) -> bool:
    """Return whether `single_ring` tries every order."""
    return fabric.size <= LARGEST_EXACT


def single_ring(fabric: Fabric) -> LogicalRing | None:
    """Return one ring over shortest routes (the widest among equals), in the order that loads links least.

    None if every order has a hop without a route.

    >>> import topoplan
    >>> from topoplan.machine.fabric import Fabric
    >>> ring = single_ring(Fabric(topoplan.load("dgx-1v").subset([0, 2, 4, 6]), ("pcie",)))
    >>> ring.order
    (0, 1, 2, 3)
    """
    routes = DirectRoutes(fabric)
    order = _best_order(fabric, routes)
    if order is None:
        return None
    hops = tuple(_found(routes.shortest(*pair, fabric.capacity)) for pair in ring_hops(order))
    return _claimed(order, hops, list(fabric.capacity))


def switched_rings(fabric: Fabric, routes: DirectRoutes) -> tuple[LogicalRing, ...]:
    """Return rings that together fill the ports of switches: one order, and one ring for each plane of switches.

    A single switch gives one ring at the full port rate. If ranks are wired to several switches, rings are peeled off,
    each over the routes with most remaining capacity, until a hop has none. Empty if every order has a hop without a
    route.
    """
    order = _best_order(fabric, routes)
    if order is None:
        return ()
    # Longer routes count too if the short ones are full.
    find = routes.widest if fabric.size <= LARGEST_SEARCHED else routes.shortest
    left = list(fabric.capacity)
    rings: list[LogicalRing] = []
    while True:
        hops = tuple(_found(find(*pair, left)) for pair in ring_hops(order))
        ring = _claimed(order, hops, left)
        if ring is None:
            return tuple(rings)
        rings.append(ring)


def _claimed(order: tuple[int, ...], hops: tuple[Links, ...], left: list[Fraction]) -> LogicalRing | None:
    """Return a ring with all the weight that its links have left, and subtract it there; None if they have none."""
    crossed = Counter(number for hop in hops for number in hop)
    weight = min(left[number] / times for number, times in crossed.items())
    for number, times in crossed.items():
        left[number] -= weight * times
    return LogicalRing(weight, order, hops) if weight else None


def _found(links: Links | None) -> Links:
    assert links is not None, "orders are chosen among those with a route for every hop"
    return links


def _best_order(fabric: Fabric, routes: DirectRoutes) -> tuple[int, ...] | None:
    candidates = [order for order in _candidate_orders(fabric, routes) if len(order) == fabric.size]
    if not candidates:
        return None
    orders = np.array(candidates, dtype=np.int64)
    # a hop is one number, by which numpy sorts faster than by rows
    numbers, places = np.unique(orders * fabric.size + np.roll(orders, -1, axis=1), return_inverse=True)
    hops = [divmod(number, fabric.size) for number in numbers.tolist()]
    hop_of_place = places.reshape(orders.shape)
    found = [routes.shortest(tail, head, fabric.capacity) for tail, head in hops]
    joined = np.array([hop is not None for hop in found])[hop_of_place].all(axis=1)
    if not joined.any():
        return None
    load = _loads(found, len(fabric.links), hop_of_place[joined])
    worst = (load / np.array([float(c) for c in fabric.capacity])).max(axis=1)
    best = orders[joined][int(np.lexsort((load.sum(axis=1), worst))[0])]
    return tuple(best.tolist())


def _joined(order: tuple[int, ...], routes: DirectRoutes) -> bool:
    return all(routes.joined(*pair) for pair in ring_hops(order))


def _loads(hops: Sequence[Links | None], links: int, orders: NDArray[np.int64]) -> NDArray[np.int64]:
    """(orders, links): crossings of each link by a ring in each order of hops."""
    crossing = np.zeros((len(hops), links), dtype=np.int64)
    for number, hop in enumerate(hops):
        crossing[number, list(hop or ())] = 1
    load = np.zeros((len(orders), links), dtype=np.int64)
    for place in orders.T:
        load += crossing[place]
    return load


def _candidate_orders(fabric: Fabric, routes: DirectRoutes) -> list[tuple[int, ...]]:
    size = fabric.size
    if order_is_exact(fabric):
        return [(0, *rest) for rest in permutations(range(1, size))]
    orders = [tuple(range(size)), _depth_first_order(fabric)]
    if size <= LARGEST_SEARCHED and not any(_joined(order, routes) for order in orders):
        lanes = [[int(u != v and routes.joined(u, v)) for v in range(size)] for u in range(size)]
        orders = list(disjoint_rings(lanes).rings)
    return orders


def _depth_first_order(fabric: Fabric) -> tuple[int, ...]:
    """Return ranks in the order of a depth-first walk from rank 0, links between sockets last."""
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


RING_KINDS = ("auto", "nvlink", "pcie", "relay")


@timed
def ring_plan(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    kind: str = "auto",
) -> Plan:
    """Return the ring schedule of a collective.

    Parameters
    ----------
    topology, gpus, root
        As for `topoplan.plan`.
    collective : str
        allreduce, broadcast, reduce, allgather or reduce_scatter.
    kind : str
        ``nvlink``: as many link-disjoint directed rings over direct NVLinks as exist, by exact search; a ring takes one
        wire of each link it crosses. If wires differ in speed, the speed at which rings x speed is largest is chosen,
        and a wire of twice that speed has room for two rings. Two GPUs have one ring, there and back, per wire. Behind
        an NVSwitch one logical ring at the full port rate is the equivalent (one per plane of switches).
        ``pcie``: one ring over PCIe in the order that loads shared links least.
        ``relay``: the best mix of rings over NVLink whose hops may pass through other GPUs.
        ``auto``: nvlink if such a ring exists, else pcie. Across servers the rings of NCCL's channels, which enter
        every server once and leave it over a NIC of a channel (`topoplan.schedules.server_rings`); one order of all
        ranks if the NICs do not join the servers so.

    Returns
    -------
    Plan
        ``schedule`` is "nvlink ring", "pcie ring", "relay ring", or across servers "network ring". Rate and bound hold
        for that channel only. Notes give the number of rings and whether the search was exhaustive.

    Raises
    ------
    UsageError
        As `topoplan.plan`; an unknown kind.
    InfeasibleError
        No such ring exists.

    See Also
    --------
    topoplan.plan_from_rings, topoplan.compare

    Examples
    --------
    DGX-1V with links of 25 GB/s: six rings, 6 x 25 x 8 / 14 GB/s. Blink's GPUs 1, 4, 5, 7 have none.

    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> round(ring_plan(machine).rate, 3), ring_plan(machine, "broadcast").rate
    (85.714, 150.0)
    >>> ring_plan(machine, gpus=[1, 4, 5, 7]).schedule
    'pcie ring'
    >>> round(ring_plan(machine, gpus=[1, 4, 5, 7], kind="relay").rate, 3)
    33.333
    """
    asked = Allocation.of(topology, collective, gpus=gpus, root=root)
    collective = asked.collective
    if kind not in RING_KINDS:
        raise UsageError(f"ring kind {kind!r} is unknown; use one of {', '.join(RING_KINDS)}")
    if len(asked.gpus) == 1:
        fabric = Fabric(asked.topology, ("nvlink",))
        return trivial_plan(fabric, collective, root=asked.root, method="ring")
    find = {"auto": _automatic, "nvlink": _over_nvlink, "pcie": _over_pcie, "relay": _relayed}[kind]
    found = find(asked.topology)
    shards = ring_forest(found.rings, found.fabric, collective=collective, root=asked.root)
    return bounded_plan(
        found.fabric, collective, shards, found.schedule, root=asked.root, method="ring", notes=found.notes
    )


@dataclass(frozen=True, slots=True)
class _FoundRings:
    """Rings on a fabric, and notes on them."""

    fabric: Fabric
    schedule: str
    rings: tuple[LogicalRing, ...]
    notes: tuple[str, ...]


def _automatic(allocation: Topology) -> _FoundRings:
    fabric = usable_fabric(allocation)
    if fabric.union:
        fabric = _connected(allocation, "pcie", "rings do not run over both; try kind nvlink")
    if fabric.channels == ("pcie",):
        return _on_pcie(fabric, "NVLink does not connect the allocation, so the ring runs over PCIe")
    rings, note = _nvlink_rings(fabric)
    if rings:
        kind = "network ring" if "network" in fabric.channels else "nvlink ring"
        return _FoundRings(fabric, kind, rings, (note,))
    pcie = _connected(allocation, "pcie", f"{note}; try kind relay")
    return _on_pcie(pcie, f"{note}, so the ring runs over PCIe")


def _over_nvlink(allocation: Topology) -> _FoundRings:
    fabric = _connected(allocation, "nvlink", "try kind pcie")
    rings, note = _nvlink_rings(fabric)
    if not rings:
        raise InfeasibleError(f"{note} on {', '.join(allocation.gpus)}; try kind relay or pcie")
    return _FoundRings(fabric, "nvlink ring", rings, (note,))


def _over_pcie(allocation: Topology) -> _FoundRings:
    return _on_pcie(_connected(allocation, "pcie", "try kind nvlink or relay"))


def _relayed(allocation: Topology) -> _FoundRings:
    fabric = _connected(allocation, "nvlink", "try kind pcie")
    seeds, _ = _nvlink_rings(fabric)
    rings, proved = relay_rings(fabric, seeds)
    claim = "proved: no mix of rings is better" if proved else "found by local search: a better mix may exist"
    tours = f"a mix of {len(rings)} relaying rings" if len(rings) > 1 else "one relaying ring"
    return _FoundRings(fabric, "relay ring", rings, (f"{tours}, {claim}",))


def _connected(allocation: Topology, channel: str, remedy: str) -> Fabric:
    fabric = Fabric(allocation, (channel,))
    cut = fabric.unreachable()
    if cut:
        wires = {"nvlink": "NVLink", "pcie": "PCIe"}[channel]
        raise InfeasibleError(f"no {wires} path leaves the cut {{{', '.join(cut)}}}; {remedy}", cut=cut)
    return fabric


def _on_pcie(fabric: Fabric, *notes: str) -> _FoundRings:
    found = single_ring(fabric)
    if found is None:
        raise InfeasibleError(
            f"no PCIe ring joins {', '.join(fabric.ranks)}: some hop would pass another GPU"
        )
    how = "the best of all orders" if order_is_exact(fabric) else "depth-first or plain order of the GPUs"
    order = " ".join(fabric.ranks[rank] for rank in found.order)
    return _FoundRings(fabric, "pcie ring", (found,), (*notes, f"one ring over PCIe: {order} ({how})"))


def _nvlink_rings(fabric: Fabric) -> tuple[tuple[LogicalRing, ...], str]:
    """Return the rings, and a note on them or on their absence."""
    if not fabric.direct:
        routes = DirectRoutes(fabric)
        across = server_rings(fabric, routes)
        if across:
            number = "one ring" if len(across) == 1 else f"{len(across)} rings"
            return across, f"{number} that enter every server once; other orders may give faster ones"
        rings = switched_rings(fabric, routes)
        if not rings:
            return (), "no NVLink ring exists (some hop would pass another GPU)"
        if (
            not all(any(ends < fabric.size for ends in pair) for pair in fabric.ends)
            or len(fabric.channels) > 1
        ):
            number = "one ring" if len(rings) == 1 else f"{len(rings)} rings in one order of the GPUs"
            return rings, f"{number} over several switches or servers; other orders may give faster ones"
        number = "a single logical ring" if len(rings) == 1 else f"{len(rings)} logical rings, one per plane,"
        return rings, f"{number} over the NVSwitch: every hop crosses it, at the rate of the ports"
    orders, speed, exhaustive = _fastest_rings(fabric)
    proof = "the search was exhaustive"
    if not exhaustive:
        proof = (
            f"the search stopped at {step_limit(fabric.size)} paths or {NODE_LIMIT} packings, more may exist"
        )
    if not orders:
        return (), f"no NVLink ring {'exists' if exhaustive else 'was found'} ({proof})"
    index = {ends: position for position, ends in enumerate(fabric.ends)}
    rings = tuple(
        LogicalRing(speed, order, tuple((index[hop],) for hop in ring_hops(order))) for order in orders
    )
    number = counted(len(rings), "link-disjoint NVLink ring")
    return rings, f"{number} of {float(speed):g} GB/s; {proof}"


def _fastest_rings(fabric: Fabric) -> tuple[tuple[tuple[int, ...], ...], Fraction, bool]:
    """Return orders of the disjoint rings of largest total speed, each ring's GB/s, and whether it is proved."""
    wires = [c / link.count for c, link in zip(fabric.capacity, fabric.links, strict=True)]
    best: tuple[tuple[int, ...], ...] = ()
    speed, exhaustive = Fraction(0), True
    for candidate in sorted(set(wires), reverse=True):
        lanes = [[0] * fabric.size for _ in range(fabric.size)]
        for (src, dst), link, wire in zip(fabric.ends, fabric.links, wires, strict=True):
            lanes[src][dst] = link.count * (wire // candidate)
        if ring_limit(lanes) * candidate > len(best) * speed:
            search = disjoint_rings(lanes)
            exhaustive = exhaustive and search.exhaustive
            if len(search.rings) * candidate > len(best) * speed:
                best, speed = search.rings, candidate
    return best, speed, exhaustive
