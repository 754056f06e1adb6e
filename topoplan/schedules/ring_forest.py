"""Build ring schedules as forests: chains of a directed ring, one for each shard, and the best mix of relayed rings.

With N ranks a chain follows the ring over N - 1 of its N hops. AllReduce has a shard for each ring and rank: reduced
along the chain that ends at the rank, broadcast along the one that starts there, so every hop carries 2 (N - 1) / N
bytes for each byte of the buffer. A thousand ranks would have millions of edges: large rings are stored as a few
chains and the symmetries of the machine (from server to server, from NIC to NIC) that map every hop of a ring to a
hop.

A relayed ring is a closed tour whose hops may pass other ranks. The mix of tours with the highest total weight W
that the links carry is a packing program, solved exactly by column generation: the shortest tour under the dual
prices is the next column or proves optimality, and AllReduce runs at W N / (2 (N - 1)). The shortest tour is exact
up to nine ranks (Held and Karp 1962); beyond, nearest neighbour and moved segments (Or 1976) prove nothing, and only
a full cut does.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from topoplan.errors import InfeasibleError
from topoplan.machine.fabric import Fabric, channel_words
from topoplan.machine.fabric_structure import labelled_graph_of
from topoplan.machine.permutation_groups import Integers, components
from topoplan.plans.plan import ROOTED
from topoplan.plans.shards import Edge, ImageShards, Shard, Stage
from topoplan.schedules.hamiltonian_cycles import ring_hops
from topoplan.schedules.routes import edge_along
from topoplan.solve.cuts_and_partitions import best_bound, whole_capacities
from topoplan.solve.simplex.exact_simplex import PackingSimplex
from topoplan.solve.symmetry.automorphisms import PermutationExtender


@dataclass(frozen=True, slots=True)
class LogicalRing:
    """One directed ring over all ranks.

    Parameters
    ----------
    weight : Fraction
        GB/s that the ring may use on every link each time it crosses it; shares are in proportion.
    order : tuple of int
        Ranks along the ring.
    hops : tuple of tuples of int
        Links that hop i, from ``order[i]`` to the next, crosses, as indices into the fabric's links.
    """

    weight: Fraction
    order: tuple[int, ...]
    hops: tuple[tuple[int, ...], ...]


def ring_shards(
    rings: Sequence[LogicalRing],
    fabric: Fabric,
    *,
    collective: str,
    root: int | None,
    wanted: Collection[tuple[int, int]] | None = None,
) -> tuple[Shard, ...]:
    """Return the forest of a collective over rings that share the buffer in proportion to their weights.

    AllReduce has rings x N shards, broadcast and reduce one per ring, allgather and reduce-scatter one per ring for
    each owner, in the order of owners. Of the unrooted ones ``wanted`` selects shards by number of the ring and owner;
    None takes all.
    """
    total = sum((ring.weight for ring in rings), Fraction(0))
    chains = [(_Chains(ring, fabric), ring.weight / total) for ring in rings]
    numbered = list(enumerate(chains))
    if collective == "allreduce":
        return tuple(
            Shard(share / fabric.size, (chain.into(rank), chain.out_of(rank)))
            for number, (chain, share) in numbered
            for rank in range(fabric.size)
            if wanted is None or (number, rank) in wanted
        )
    if collective in ("broadcast", "reduce"):
        assert root is not None, "broadcast and reduce have a root"
        return tuple(Shard(share, (chain.stage(collective, root),)) for chain, share in chains)
    op = "broadcast" if collective == "allgather" else "reduce"
    return tuple(
        Shard(share / fabric.size, (chain.stage(op, owner),))
        for owner in range(fabric.size)
        for number, (chain, share) in numbered
        if wanted is None or (number, owner) in wanted
    )


class _Chains:
    """The chains of one ring, out of every rank and into it."""

    def __init__(self, ring: LogicalRing, fabric: Fabric) -> None:
        self._position = {rank: i for i, rank in enumerate(ring.order)}
        self._forward: list[Edge] = []
        self._backward: list[Edge] = []
        for (tail, head), links in zip(ring_hops(ring.order), ring.hops, strict=True):
            self._forward.append(edge_along(fabric, "broadcast", tail, head, links))
            self._backward.append(edge_along(fabric, "reduce", head, tail, links))

    def stage(self, op: str, root: int) -> Stage:
        return self.out_of(root) if op == "broadcast" else self.into(root)

    def out_of(self, rank: int) -> Stage:
        start, size = self._position[rank], len(self._forward)
        return Stage("broadcast", rank, tuple(self._forward[(start + i) % size] for i in range(size - 1)))

    def into(self, rank: int) -> Stage:
        end, size = self._position[rank], len(self._backward)
        return Stage("reduce", rank, tuple(self._backward[(end - i) % size] for i in range(1, size)))


MOST_EDGES = 20_000
"""Tree edges up to which all chains are listed."""

TOO_MANY_EDGES = 4_000_000
"""Tree edges above which rings without symmetry are refused: their plan would take gigabytes."""

MOST_TRIED = 12
"""Rotations that are tried, and rings that are tried as images of the first one."""


def ring_forest(
    rings: Sequence[LogicalRing], fabric: Fabric, *, collective: str, root: int | None
) -> Sequence[Shard]:
    """Return `ring_shards`, compact if the rings are large and the machine has symmetries that keep them.

    InfeasibleError if it has none, and the chains are too many to be listed.
    """
    size = fabric.size
    edges = len(rings) * (2 if collective == "allreduce" else 1) * size * (size - 1)
    if collective in ROOTED or edges <= MOST_EDGES:
        return ring_shards(rings, fabric, collective=collective, root=root)
    moves = _moves(rings, fabric)
    if not moves:
        if edges > TOO_MANY_EDGES:
            raise InfeasibleError(
                f"{len(rings)} rings of {size} GPUs have {edges} edges, and no symmetry of the machine maps them to "
                "each other; name fewer GPUs"
            )
        return ring_shards(rings, fabric, collective=collective, root=root)
    chains = len(rings) * size
    orbit = components(
        chains, np.tile(np.arange(chains), len(moves)), np.concatenate([m.chains for m in moves])
    )
    first = np.flatnonzero(orbit == np.arange(chains)).tolist()
    wanted = [(chain // size, rings[chain // size].order[chain % size]) for chain in first]
    templates = ring_shards(rings, fabric, collective=collective, root=root, wanted=frozenset(wanted))
    return ImageShards(fabric.nodes, size, tuple(move.nodes for move in moves), templates)


@dataclass(frozen=True, slots=True)
class _Move:
    """A symmetry of the machine that keeps a set of rings.

    ``chains``, of shape (rings x N,), maps the chain from place i of ring r, number r N + i. For rings 0 1 2 3 and
    3 2 1 0 the rotation of ranks 0 > 1 > 2 > 3 > 0 takes

        chain     0 1 2 3   4 5 6 7
        out of    0 1 2 3   3 2 1 0    (rank)
        to chain  1 2 3 0   7 4 5 6    out of ranks 1 2 3 0 and 0 3 2 1
    """

    nodes: tuple[int, ...]
    chains: Integers


def _moves(rings: Sequence[LogicalRing], fabric: Fabric) -> list[_Move]:
    """Return the shortest rotation of the rings, and a symmetry that takes the first ring to another, if they exist."""
    size = fabric.size
    order = np.array(rings[0].order)
    others = [np.array(ring.order) for ring in rings[1:] if ring.order != rings[0].order]
    labels = labelled_graph_of(fabric).link_labels
    kinds = [labels[list(hop)].tolist() for hop in rings[0].hops]
    turns = [turn for turn in range(1, size // 2 + 1) if size % turn == 0]
    likely = [np.roll(order, -turn) for turn in turns if kinds[turn:] + kinds[:turn] == kinds]
    extender = PermutationExtender(labelled_graph_of(fabric)) if likely or others else None
    found = []
    for images in (likely[:MOST_TRIED], others[:MOST_TRIED]):
        for image in images:
            assert extender is not None
            move = _move(rings, order, image, extender)
            if move is not None:
                found.append(move)
                break
    return found


def _move(
    rings: Sequence[LogicalRing], order: Integers, image: Integers, extender: PermutationExtender
) -> _Move | None:
    """Return the symmetry that takes one order of the ranks to another and keeps all rings, if it exists."""
    ranks = np.empty_like(order)
    ranks[order] = image
    symmetry = extender.extend(ranks)
    if symmetry is None:
        return None
    size = len(order)
    chains = np.empty((len(rings), size), dtype=np.int64)
    for r, ring in enumerate(rings):
        moved = [
            (int(ranks[tail]), tuple(symmetry.links[list(hop)].tolist()))
            for tail, hop in zip(ring.order, ring.hops, strict=True)
        ]
        target = next((t for t, other in enumerate(rings) if _runs_along(other, moved)), None)
        if target is None or rings[target].weight != ring.weight:
            return None
        begin = rings[target].order.index(moved[0][0])
        chains[r] = target * size + (begin + np.arange(size)) % size
    return _Move(tuple(symmetry.nodes.tolist()), chains.reshape(-1))


def _runs_along(ring: LogicalRing, hops: Sequence[tuple[int, tuple[int, ...]]]) -> bool:
    """Return whether a ring has these hops, each given by its tail and links, in this order."""
    place = ring.order.index(hops[0][0])
    own = list(zip(ring.order, ring.hops, strict=True))
    return own[place:] + own[:place] == hops


LARGEST_EXACT = 9
"""Most ranks for which the shortest tour is found exactly."""

COLUMN_LIMIT = 300
"""Most tours generated; a tenth of it if local search finds them."""

_LOCAL_STARTS = 4

Path = tuple[int, ...]
"""Links from one rank to another."""

Tour = tuple[tuple[int, ...], tuple[Path, ...]]
"""Order of the ranks, and the path of each hop."""


def shortest_route(fabric: Fabric, tail: int, head: int) -> Path:
    """Return the links from one rank to another: through switches only if possible, else through other ranks.

    The route has fewest links, then the lowest link indices. InfeasibleError, with the cut, if none exists.
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
    """Return the best mix of relaying rings, with exact weights, and whether it is proved that no mix is better.

    The ranks are connected, two at least. The mix is never worse than the ``seeds`` together.

    Three GPUs in a line: the one tour crosses every wire once in each direction.

    >>> import topoplan
    >>> from topoplan.machine.fabric import Fabric
    >>> rings, proved = relay_rings(Fabric(topoplan.load("dgx-1v").subset([3, 5, 7]), ("nvlink",)))
    >>> [str(ring.weight) for ring in rings], rings[0].order, proved
    (['25'], (0, 2, 1), True)
    """
    capacity, scale = whole_capacities(fabric)
    # A tour leaves and enters every set of ranks at least once, so the smallest cut limits the mix.
    cuts = [best_bound(fabric, one, 0).bound(fabric, one, 0) for one in ("broadcast", "reduce")]
    limit = scale * min(cuts)
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
    """Return length, order and hops of the shortest closed tour found under the lengths of links."""
    paths = [_shortest_paths(fabric, length, rank) for rank in range(fabric.size)]
    distance = [[row[head][0] for head in range(fabric.size)] for row in paths]
    order = _held_karp(distance) if fabric.size <= LARGEST_EXACT else _local_search(distance)
    hops = tuple(paths[tail][head][1] for tail, head in ring_hops(order))
    return sum(distance[tail][head] for tail, head in ring_hops(order)), (order, hops)


def _shortest_paths(fabric: Fabric, length: Sequence[int], start: int) -> dict[int, tuple[int, Path]]:
    """Return distance and links of a shortest path to every state of the graph of routes.

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
    """Return the shortest closed tour from vertex 0, exactly, in N² 2^N steps."""
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
    """Return a short closed tour: nearest neighbour from a few starts, then moves of segments of up to three."""
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
        length = sum(distance[u][v] for u, v in ring_hops(tour))
        zero = tour.index(0)
        found.append((length, (*tour[zero:], *tour[:zero])))
    return min(found)[1]


def _move_segment(distance: list[list[int]], tour: list[int]) -> bool:
    """Move one segment to a better place, in place; return False if no move shortens the tour."""
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
