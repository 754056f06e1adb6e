"""Rings whose hops may be relayed through other ranks: the best mix of closed tours over any path.

A closed tour visits every rank and comes back; each hop takes a shortest path under the current prices. The
mix of tours with the highest total weight W that the links carry is a packing program, solved exactly with
columns made on demand: the dual prices of the links make a distance table, and the shortest tour in it either
is the next column or proves the mix optimal. AllReduce then runs at W N / (2 (N - 1)). The shortest tour is
found by dynamic programming over subsets (Held and Karp 1962) up to nine ranks, beyond by nearest neighbour
and moving segments (Or 1976), which proves nothing; there only a full cut does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction

from topoplan.bounds.cuts_and_partitions import best_bound, whole_capacities
from topoplan.errors import InfeasibleError
from topoplan.fabric.fabric import Fabric, channel_words
from topoplan.schedules.rings.forest import LogicalRing
from topoplan.simplex.exact_simplex import PackingSimplex

LARGEST_EXACT = 9
"""Most ranks for which the shortest tour is found exactly."""

COLUMN_LIMIT = 300
"""Most tours generated before the mix is taken as it is; a tenth of it where local search finds them."""

_LOCAL_STARTS = 4

Path = tuple[int, ...]
"""Links from one rank to another."""

Tour = tuple[tuple[int, ...], tuple[Path, ...]]
"""Order of the ranks, and the path of each hop."""


def shortest_route(fabric: Fabric, tail: int, head: int) -> Path:
    """Links from one rank to another: through switches only where that is possible, else through other ranks.

    Fewest links first, then the lowest link indices.

    Raises
    ------
    InfeasibleError
        No path leads there; carries the cut.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.plans import Fabric
    >>> fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    >>> [fabric.links[number].dst for number in shortest_route(fabric, 0, 5)]
    ['gpu1', 'gpu5']
    """
    for arc in fabric.arcs:
        if (arc.tail, arc.head) == (tail, head):
            return arc.links
    reached = _shortest_paths(fabric, [1] * len(fabric.links), tail)
    if head not in reached:
        raise InfeasibleError(
            f"no path over {channel_words(fabric.channels)} leads from {fabric.nodes[tail]} to {fabric.nodes[head]}; "
            "use a schedule without that hop, or other channels",
            cut=fabric.devices_of(reached),
        )
    return reached[head][1]


def relay_rings(fabric: Fabric, seeds: Sequence[LogicalRing] = ()) -> tuple[tuple[LogicalRing, ...], bool]:
    """The best mix of relaying rings, and whether it is proved that no mix is better.

    Parameters
    ----------
    fabric : Fabric
        All ranks connected, at least two.
    seeds : sequence of LogicalRing
        Rings to start from; the mix is never worse than they are together.

    Returns
    -------
    rings : tuple of LogicalRing
        Weights in GB/s, exact.
    proved : bool

    Examples
    --------
    Three GPUs in a line: the one tour crosses every wire once in each direction.

    >>> import topoplan
    >>> from topoplan.plans import Fabric
    >>> rings, proved = relay_rings(Fabric(topoplan.load("dgx-1v").subset([3, 5, 7]), ("nvlink",)))
    >>> [str(ring.weight) for ring in rings], rings[0].order, proved
    (['25'], (0, 2, 1), True)
    """
    capacity, scale = whole_capacities(fabric)
    limit = _cut_limit(fabric, scale)
    exact = fabric.size <= LARGEST_EXACT
    most = len(seeds) + (COLUMN_LIMIT if exact else COLUMN_LIMIT // 10)
    heaviest = max(capacity)
    tours = [(ring.order, ring.hops) for ring in seeds]
    tours.append(_shortest_tour(fabric, [heaviest // c for c in capacity])[1])
    program = PackingSimplex(capacity)
    program.add([_crossings(fabric, hops) for _, hops in tours], [1] * len(tours))
    while True:
        program.optimise()
        proved = program.value == limit
        if proved or len(tours) >= most:
            break
        prices, unit = program.duals()
        length, tour = _shortest_tour(fabric, prices)
        if length >= unit:
            proved = exact
            break
        tours.append(tour)
        program.add([_crossings(fabric, tour[1])], [1])
    mix = _fewer_tours(fabric, capacity, [hops for _, hops in tours], program.solution(), program.value)
    return tuple(LogicalRing(weight / scale, *tours[number]) for number, weight in mix.items()), proved


def _cut_limit(fabric: Fabric, scale: int) -> Fraction:
    """Capacity of the smallest cut between ranks: a tour leaves and enters every set of ranks at least once."""
    return scale * min(
        best_bound(fabric, collective, 0).bound(fabric, collective, 0)
        for collective in ("broadcast", "reduce")
    )


def _crossings(fabric: Fabric, hops: Sequence[Path]) -> list[int]:
    count = [0] * len(fabric.links)
    for hop in hops:
        for number in hop:
            count[number] += 1
    return count


def _fewer_tours(
    fabric: Fabric,
    capacity: list[int],
    tours: list[tuple[Path, ...]],
    mix: dict[int, Fraction],
    value: Fraction,
) -> dict[int, Fraction]:
    """Drop tours one by one, lightest first, while the others still reach the value."""
    columns = [_crossings(fabric, hops) for hops in tours]
    kept = list(range(len(tours)))
    for number in sorted(mix, key=lambda n: (mix[n], n)):
        rest = [other for other in kept if other != number]
        if not rest or number not in mix:
            continue
        program = PackingSimplex(capacity)
        program.add([columns[other] for other in rest], [1] * len(rest))
        program.optimise(target=value)
        if program.value >= value and len(program.solution()) < len(mix):
            mix = {rest[position]: weight for position, weight in program.solution().items()}
            kept = rest
    return mix


def _shortest_tour(fabric: Fabric, length: Sequence[int]) -> tuple[int, Tour]:
    """Length, order and hops of the shortest closed tour found under the lengths of links."""
    paths = [_shortest_paths(fabric, length, rank) for rank in range(fabric.size)]
    distance = [[row[head][0] for head in range(fabric.size)] for row in paths]
    order = _held_karp(distance) if fabric.size <= LARGEST_EXACT else _local_search(distance)
    pairs = list(zip(order, order[1:] + order[:1], strict=True))
    hops = tuple(paths[tail][head][1] for tail, head in pairs)
    return sum(distance[tail][head] for tail, head in pairs), (order, hops)


def _shortest_paths(fabric: Fabric, length: Sequence[int], start: int) -> dict[int, tuple[int, Path]]:
    """Distance and links of a shortest path to every state of the graph of routes.

    Least length first, then fewest links, then lowest indices.
    """
    leaving = fabric.route_graph.leaving()
    done: dict[int, tuple[int, Path]] = {}
    heap: list[tuple[int, int, Path, int]] = [(0, 0, (), start)]
    while heap:
        reach, count, path, node = heapq.heappop(heap)
        if node not in done:
            done[node] = (reach, path)
            for number, dst in leaving[node]:
                if dst not in done:
                    heapq.heappush(heap, (reach + length[number], count + 1, (*path, number), dst))
    return done


def _held_karp(distance: list[list[int]]) -> tuple[int, ...]:
    """The shortest closed tour from vertex 0, exactly: N² 2^N steps."""
    size = len(distance)
    best: dict[tuple[int, int], tuple[int, int]] = {(1 << v, v): (distance[0][v], 0) for v in range(1, size)}
    everything = (1 << size) - 2
    for visited in range(2, everything + 1, 2):
        if visited & (visited - 1) == 0:
            continue
        members = [v for v in range(1, size) if visited >> v & 1]
        for v in members:
            before = visited ^ (1 << v)
            best[visited, v] = min((best[before, u][0] + distance[u][v], u) for u in members if u != v)
    last = min(range(1, size), key=lambda v: (best[everything, v][0] + distance[v][0], v))
    order = []
    visited = everything
    while visited:
        order.append(last)
        visited, last = visited ^ (1 << last), best[visited, last][1]
    return (0, *reversed(order))


def _local_search(distance: list[list[int]]) -> tuple[int, ...]:
    """A short closed tour: nearest neighbour from a few starts, then moves of segments of up to three."""
    size = len(distance)
    found = []
    for start in range(min(size, _LOCAL_STARTS)):
        tour = [start]
        rest = set(range(size)) - {start}
        while rest:
            tour.append(min(rest, key=lambda v: (distance[tour[-1]][v], v)))
            rest.remove(tour[-1])
        while _move_segment(distance, tour):
            pass
        length = sum(distance[u][v] for u, v in zip(tour, tour[1:] + tour[:1], strict=True))
        zero = tour.index(0)
        found.append((length, (*tour[zero:], *tour[:zero])))
    return min(found)[1]


def _move_segment(distance: list[list[int]], tour: list[int]) -> bool:
    """Move one segment to a better place, in place; False when no move shortens the tour."""
    size = len(tour)
    for span in (1, 2, 3):
        for start in range(size):
            turned = tour[start:] + tour[:start]
            segment, rest = turned[:span], turned[span:]
            gain = (
                distance[rest[-1]][segment[0]] + distance[segment[-1]][rest[0]] - distance[rest[-1]][rest[0]]
            )
            for place in range(1, len(rest)):
                before, after = rest[place - 1], rest[place]
                cost = distance[before][segment[0]] + distance[segment[-1]][after] - distance[before][after]
                if cost < gain:
                    tour[:] = rest[:place] + segment + rest[place:]
                    return True
    return False
