"""Pack trees for an allgather or reduce-scatter whose ranks own blocks of different lengths.

    maximise f, subject to   sum of x(T) usage(T, L) <= capacity(L),   sum of x(T) over the trees of rank r = f b(r),

where b(r) is the block of rank r: the packing program of equal blocks with other right-hand sides. Trees of all roots
share the links, so a long block takes links that short ones leave free. By Edmonds' theorem on disjoint branchings
(1973) the optimum on direct links is that of the slowest cut, over which each block passes once (`least_time`).

If ranks share a switch, or equal servers a network, trees over hubs reach that cut or nearly, without the program
(`HubTrees`). They are tried first among more ranks than heights have exact tables for.

The plan is one of equal blocks in form: shards of a rank add up to 1 / N of the buffer, in the proportions of its
packing, and rate and certificate are those of equal blocks. What it is for is the time of the given ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise, permutations
from math import lcm
from typing import NamedTuple

import numpy as np

from topoplan.machine.fabric import Fabric
from topoplan.plans.build import build_plan
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.solve.packing.column_generation import ColumnGeneration
from topoplan.solve.packing.demand_paths import FlowGraph
from topoplan.solve.packing.exact import at_lowest_height
from topoplan.solve.packing.packing_program import Packing, Pricing, has_exact_tables
from topoplan.solve.search_control import RandomStream

MOST_PACKED = 16
"""Ranks up to which trees are packed by a linear program: up to 2 s, and 3 s with 32 on four servers."""

NEARLY_LEAST = (Fraction(41, 40), Fraction(21, 20), Fraction(9, 8))
"""Times in which trees over hubs are tried among more ranks, beside the least time, if that does not suffice."""

LONG = 1000
"""Longest links that a link from a rank is longer than others in the search for routes, which leave one rank each."""

WALKS = 4
"""Walks along the optimal face in the search for fewer trees, among few ranks."""


@dataclass(frozen=True)
class BlockPacking(Packing):
    """The packing problem of an allgather or reduce-scatter in which rank r owns ``blocks[r]``, 0 or more."""

    blocks: tuple[int, ...] = ()

    @cached_property
    def roots(self) -> tuple[int, ...]:
        return tuple(rank for rank, block in enumerate(self.blocks) if block)

    @cached_property
    def root_counts(self) -> tuple[int, ...]:
        return tuple(self.blocks[rank] for rank in self.roots)

    @property
    def uneven(self) -> bool:
        return len(set(self.root_counts)) > 1

    @property
    def rate_of_one(self) -> Fraction:
        return Fraction(sum(self.blocks))


def can_plan_blocks(even: Plan) -> bool:
    """Return whether `plan_blocks` takes a plan: its switches only forward, and it has one choice of links."""
    fabric = Fabric(even.topology, even.channels)
    plain = not fabric.split and not fabric.helpers and not fabric.in_network
    return plain and not even.sparse and fabric.size > 1


def plan_blocks(even: Plan, blocks: Sequence[int]) -> Plan:
    """Return the plan that moves blocks of these lengths in the least time, on the links of one of equal blocks.

    Parameters
    ----------
    even : Plan
        Plan of an allgather or reduce-scatter. Ranks without a block keep its trees.
    blocks : sequence of int
        Length of the block of each rank in any unit, 0 or more, not all 0.

    Returns
    -------
    Plan
        Valid for equal blocks too, with the bound of ``even``. Up to 16 ranks its time for ``blocks`` is the least one,
        and up to 8 its trees are the lowest that reach it. Among more ranks it takes at most an eighth more than
        `least_time`, or is ``even`` if trees over hubs do not reach that.

    Notes
    -----
    Trees over hubs take 0.1 s for 64 GPUs on eight servers. Exact column generation over the roots with a block takes
    50 ms for the 8 GPUs of a DGX-1V, and up to 2 s for 16 on two servers.

    Examples
    --------
    Rank 0 of a DGX-1V has ten times the bytes of the others, and its six NVLinks bring them out by more trees:

    >>> import topoplan
    >>> even = topoplan.plan("dgx-1v", "allgather")
    >>> made = plan_blocks(even, (10, *(1,) * 7))
    >>> [sum(shard.stages[0].root == 0 for shard in plan.shards) for plan in (even, made)]
    [4, 10]
    """
    fabric = Fabric(even.topology, even.channels)
    least = least_time(fabric, even.collective, blocks)
    made: Sequence[Shard] | None = None
    if not has_exact_tables(fabric) and not fabric.direct:
        nearly = NEARLY_LEAST if fabric.size > MOST_PACKED else ()
        made = _by_hubs(fabric, even.collective, blocks, (least, *(least * part for part in nearly)))
    if made is None and fabric.size > MOST_PACKED:
        return even
    of_rank: list[list[Shard]] = [[] for _ in blocks]
    for shard in made or _packed(fabric, even.collective, blocks, least):
        of_rank[shard.stages[0].root].append(shard)
    for shard in even.shards:
        if not blocks[shard.stages[0].root]:
            of_rank[shard.stages[0].root].append(shard)
    return build_plan(
        fabric,
        even.collective,
        root=None,
        shards=[shard for shards in of_rank for shard in shards],
        certificate=even.certificate,
        schedule="trees",
        method="exact",
        notes=(f"packed for blocks in the proportions {', '.join(map(str, blocks))}",),
    )


def _packed(fabric: Fabric, collective: str, blocks: Sequence[int], least: Fraction) -> Sequence[Shard]:
    """Return the shards of an optimal packing."""
    packing = BlockPacking(fabric, collective, None, (), tuple(blocks))
    generation = ColumnGeneration(Pricing(packing))
    generation.run(sum(blocks) / least * packing.scale)
    if not has_exact_tables(fabric):
        return packing.shards(generation.weights())
    generation = at_lowest_height(generation, generation.value, None)
    return packing.shards(generation.fewer_trees(RandomStream(0), least=len(packing.roots), walks=WALKS))


def _by_hubs(
    fabric: Fabric, collective: str, blocks: Sequence[int], times: Sequence[Fraction]
) -> Sequence[Shard] | None:
    """Return the shards of trees over hubs that take at most the first of some times that suffices; None if none do."""
    servers = _grouped(_servers(fabric), fabric.size)
    groups = [servers] if len(servers) == 1 else [servers, [list(range(fabric.size))]]
    known = [
        HubTrees(fabric, collective, blocks, one) for one in groups if len({len(ranks) for ranks in one}) == 1
    ]
    made = (trees.shards(time) for time in times for trees in known)
    return next((shards for shards in made if shards is not None), None)


def least_time(fabric: Fabric, collective: str, blocks: Sequence[int]) -> Fraction:
    """Return a lower bound of the time of blocks by any plan, in their unit per GB/s.

    It is that of the slowest cut around a rank or a server, in either direction.

    In an allgather, each block of one side of a cut passes it once; in a reduce-scatter, the sum of each block that a
    rank of the other side owns does. Switches and helpers on the way change nothing in that.

    >>> import topoplan
    >>> fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    >>> [least_time(fabric, one, (10, *(1,) * 7)) for one in ("allgather", "reduce_scatter")]
    [Fraction(8, 75), Fraction(8, 75)]
    """
    whole, least = sum(blocks), Fraction(0)
    of_ranks = [name if node < fabric.size else "" for node, name in enumerate(fabric.nodes)]
    for label in (of_ranks, _servers(fabric)):
        groups = _grouped(label, fabric.size)
        if len(groups) < 2:
            continue
        for ranks, (out, back) in zip(groups, _widths(fabric, collective, label), strict=True):
            own = sum(blocks[rank] for rank in ranks)
            least = max(least, own / out, (whole - own) / back)
    return least


def _servers(fabric: Fabric) -> list[str]:
    """Return the server of each node."""
    server_of = {device.name: device.server for device in fabric.topology.devices}
    return [server_of[name] for name in fabric.nodes]


def _grouped(label: Sequence[str], size: int) -> list[list[int]]:
    """Return the ranks of each label, in the order of their first ones."""
    groups: dict[str, list[int]] = {}
    for rank in range(size):
        groups.setdefault(label[rank], []).append(rank)
    return [*groups.values()]


def _widths(fabric: Fabric, collective: str, label: Sequence[str]) -> list[tuple[Fraction, Fraction]]:
    """Return the GB/s from each label of ranks and back, in the direction of the blocks of an allgather."""
    leaving, entering = dict.fromkeys(label, Fraction(0)), dict.fromkeys(label, Fraction(0))
    for (source, destination), width in zip(fabric.ends, fabric.capacity, strict=True):
        if label[source] != label[destination]:
            leaving[label[source]] += width
            entering[label[destination]] += width
    out, back = (leaving, entering) if collective == "allgather" else (entering, leaving)
    return [(out[name], back[name]) for name in dict.fromkeys(label[: fabric.size])]


class HubTree(NamedTuple):
    """A tree by its root, the place of the hub in the root's server, and where it enters other servers.

    ``server`` is the number of the first one, of which ``place`` is the hub for the others; that of the root stands for
    none, and all other servers are entered from the root's.
    """

    root: int
    hub: int
    place: int
    server: int


class HubTrees:
    """Trees of at most four edges in height that spread blocks over hubs, in the time of the slowest cut or nearly.

    A rank sends a part of its block to one rank of its server, which sends it to the others and to a rank of another
    server; from there it enters the third ones, at the same place, and in each that rank sends it to the others.

    A rank with a block b sends b + (k - 2) z + (k - 1) e to the k ranks of its server, if it is a hub for z of their
    blocks, and e enters by it. A server with blocks w sends w + (m - 2) y to m servers if it is a hub for y. In the
    time T of the cut there is room for y = (T c - w) / (m - 2) at a width c, and the sum of all y suffices if T is the
    time in which the emptiest server is filled. On one switch the same holds for ranks. Loads are added up and compared
    with T, so no plan depends on these sums.

    ``collective`` is allgather or reduce_scatter, whose trees lead the other way. ``groups`` are the ranks of each
    server, equally many, or all ranks as one group.
    """

    def __init__(
        self, fabric: Fabric, collective: str, blocks: Sequence[int], groups: Sequence[Sequence[int]]
    ) -> None:
        self.fabric, self.collective, self.blocks, self.groups = fabric, collective, blocks, groups
        self.forwards = collective == "allgather"
        self._routes: dict[tuple[int, int], tuple[int, ...]] = {}
        self._edges: dict[tuple[int, int], Edge] = {}
        graph = FlowGraph(fabric)
        self._states = graph.nodes
        self._before: dict[int, list[int]] = {}
        used = np.zeros(graph.none)
        of_ranks = np.array([source < fabric.size for source, _ in fabric.ends])
        for same in zip(*groups, strict=True):
            # routes between servers avoid the NICs that ranks at other places take
            lengths = (1 + used) / graph.capacity
            lengths[of_ranks] += LONG * lengths.max()  # no route passes a rank
            found = graph.trees(lengths, np.array(same)).tolist()
            self._before |= dict(zip(same, found, strict=True))
            routes = [self.route(*ends) for ends in permutations(same, 2)]
            crossed = {fabric.link_between[link] for nodes in routes for link in pairwise(nodes)}
            used[sorted(crossed)] += 1

    def route(self, parent: int, child: int) -> tuple[int, ...]:
        """Return the nodes of the shortest route of data on an edge, from its source; empty if it passes a rank."""
        ends = (parent, child) if self.forwards else (child, parent)
        if ends not in self._routes:
            before, states = self._before[ends[0]], [ends[1]]
            while states[-1] != ends[0] and before[states[-1]] >= 0:
                states.append(before[states[-1]])
            nodes = tuple([self._states[state] for state in reversed(states)])
            whole = nodes[0] == ends[0] and all(node >= self.fabric.size for node in nodes[1:-1])
            self._routes[ends] = nodes if whole else ()
        return self._routes[ends]

    def edge(self, parent: int, child: int) -> Edge:
        """Return the edge on the shortest route."""
        if (parent, child) not in self._edges:
            nodes = self.route(parent, child)
            channel = self.fabric.channel_of([self.fabric.link_between[ends] for ends in pairwise(nodes)])
            names = [self.fabric.nodes[node] for node in (nodes if self.forwards else nodes[::-1])]
            self._edges[parent, child] = Edge(parent, child, tuple(names), channel)
        return self._edges[parent, child]

    def amounts(self, time: Fraction) -> dict[HubTree, Fraction]:
        """Return how much of the blocks each tree takes; the sum of those of a root is its block."""
        groups, count = self.groups, len(self.groups)
        owned = [Fraction(sum(self.blocks[rank] for rank in ranks)) for ranks in groups]
        entered: list[list[tuple[int, Fraction]]] = [[(place, own)] for place, own in enumerate(owned)]
        if count > 2:
            widths = [out for out, _ in _widths(self.fabric, self.collective, _servers(self.fabric))]
            room = [(time * out - own) / (count - 2) for out, own in zip(widths, owned, strict=True)]
            emptiest = sorted(range(count), key=lambda place: (owned[place], place))
            spread = _poured(Fraction(sum(self.blocks)), [room[place] for place in emptiest])
            by_server = [Fraction(0)] * count
            for place, amount in zip(emptiest, spread, strict=True):
                by_server[place] = amount
            entered = _divided(owned, by_server, [[place] for place in range(count)])
        found = {}
        for number, ranks in enumerate(groups):
            if not owned[number]:
                continue
            size, parts = len(ranks), self._parts(ranks, owned[number], time)
            ways = [(place, server) for place in range(size) for server, _ in entered[number]]
            room = [amount / size for _ in range(size) for _, amount in entered[number]]
            same = [[at for at, (place, _) in enumerate(ways) if place == hub] for hub in range(size)]
            by_hub = (
                _divided(parts, room, same) if count > 1 else [[(hub, parts[hub])] for hub in range(size)]
            )
            trees = [(hub, *ways[at], amount) for hub, shares in enumerate(by_hub) for at, amount in shares]
            own = [[at for at, tree in enumerate(trees) if tree[0] == hub] for hub in range(size)]
            blocks = [Fraction(self.blocks[rank]) for rank in ranks]
            for rank, shares in zip(ranks, _divided(blocks, [tree[3] for tree in trees], own), strict=True):
                for at, amount in shares:
                    hub, place, server, _ = trees[at]
                    found[HubTree(rank, hub, place, server)] = amount
        return found

    def _parts(self, ranks: Sequence[int], owned: Fraction, time: Fraction) -> list[Fraction]:
        """Return how much of its server's blocks each rank is a hub for: as equal as its links inside leave room."""
        size = len(ranks)
        enters = (sum(self.blocks) - owned) / size
        if size < 3:
            return [owned / size] * size
        room = []
        for rank in ranks:
            ports = {
                self.route(rank, other)[:2] if self.forwards else self.route(rank, other)[-2:]
                for other in ranks
            }
            width = sum(
                (self.fabric.capacity[self.fabric.link_between[port]] for port in ports if len(port) == 2),
                Fraction(0),
            )
            room.append((time * width - self.blocks[rank] - (size - 1) * enters) / (size - 2))
        return _levelled(owned, room)

    def edges(self, tree: HubTree) -> list[tuple[int, int]]:
        """Return the edges of a tree as parent and child, from the root down."""
        groups = self.groups
        home = next(number for number, ranks in enumerate(groups) if tree.root in ranks)
        at = groups[home][tree.hub]
        entries = {number: ranks[tree.place] for number, ranks in enumerate(groups) if number != home}
        first = entries.get(tree.server, at)
        found = [(tree.root, at)] if at != tree.root else []
        found += [(at, rank) for rank in groups[home] if rank not in (at, tree.root)]
        found += [(at, first)] if first != at else []
        found += [(first, rank) for number, rank in entries.items() if number != tree.server]
        found += [
            (entry, rank) for number, entry in entries.items() for rank in groups[number] if rank != entry
        ]
        return found

    def shards(self, time: Fraction) -> list[Shard] | None:
        """Return the shards of all roots with a block, that take at most this time; None if these take longer."""
        amounts = self.amounts(time)
        trees = {tree: self.edges(tree) for tree in amounts}
        unit = lcm(*(amount.denominator for amount in amounts.values()))
        crossed: dict[tuple[int, int], int] = {}
        for tree, edges in trees.items():
            whole = amounts[tree].numerator * (unit // amounts[tree].denominator)
            for ends in edges:
                crossed[ends] = crossed.get(ends, 0) + whole
        loads = [0] * len(self.fabric.links)
        for ends, amount in crossed.items():
            nodes = self.route(*ends)
            if not nodes:
                return None
            for link in pairwise(nodes):
                loads[self.fabric.link_between[link]] += amount
        if any(load > time * width * unit for load, width in zip(loads, self.fabric.capacity, strict=True)):
            return None
        operation = "broadcast" if self.forwards else "reduce"
        found = []
        for tree in sorted(amounts, key=lambda tree: (tree.root, -amounts[tree], tree)):
            drawn = Stage(operation, tree.root, tuple([self.edge(*ends) for ends in trees[tree]]))
            share = amounts[tree] / (self.blocks[tree.root] * self.fabric.size)
            found.append(Shard(share, (replace(drawn, edges=drawn.top_down()),)))
        return found


def _poured(amount: Fraction, room: Sequence[Fraction]) -> list[Fraction]:
    """Return how an amount fills some rooms one after another; they grow alike if it does not fit."""
    room = [max(each, Fraction(0)) for each in room]
    whole = sum(room)
    if whole < amount:
        return [each * amount / whole if whole else amount / len(room) for each in room]
    found = []
    for each in room:
        found.append(min(each, amount))
        amount -= found[-1]
    return found


def _levelled(amount: Fraction, room: Sequence[Fraction]) -> list[Fraction]:
    """Return how an amount fills some rooms to one level, below their own limits; they grow alike if it does not."""
    found = [Fraction(0)] * len(room)
    if sum(max(each, Fraction(0)) for each in room) < amount:
        return _poured(amount, room)
    order = sorted(range(len(room)), key=lambda place: (room[place], place))
    for number, place in enumerate(order):
        found[place] = min(max(room[place], Fraction(0)), amount / (len(room) - number))
        amount -= found[place]
    return found


def _divided(
    amounts: Sequence[Fraction], room: Sequence[Fraction], own: Sequence[Sequence[int]]
) -> list[list[tuple[int, Fraction]]]:
    """Return for each amount the places that it takes, first its own ones, and how much; sums must be equal."""
    left, free = list(amounts), list(room)
    found: list[list[tuple[int, Fraction]]] = [[] for _ in amounts]
    for stage in (own, [range(len(room))] * len(amounts)):
        for number, places in enumerate(stage):
            for place in places:
                part = min(left[number], free[place])
                if part > 0:
                    found[number].append((place, part))
                    left[number] -= part
                    free[place] -= part
    return [_joined(parts) for parts in found]


def _joined(parts: Sequence[tuple[int, Fraction]]) -> list[tuple[int, Fraction]]:
    sums: dict[int, Fraction] = {}
    for place, part in parts:
        sums[place] = sums.get(place, Fraction(0)) + part
    return [*sums.items()]
