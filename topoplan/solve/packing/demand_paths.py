"""Route the demand of an all-to-all among many ranks in milliseconds: fill the links of a cut, exactly.

The demand that crosses a cut around a rank or a server bounds the rate. Every block of the demand is a few pieces, each
on one path; a link's load is that of the pieces that cross it.

1. Pieces take shortest paths, source by source, under lengths that grow with the loads of the pieces before.
2. Pieces on links that are too full for the lowest of these bounds move to links with room, in parts if needed. Between
   servers they reach NICs of other GPUs, as FAST balances a server's traffic (arXiv 2505.09764), on either side.

If ranks share switches, the bound is mostly reached, and the plan is optimal. Other fabrics need the
linear program of `topoplan.solve.packing.all_to_all`. Loads are whole numbers, and lengths take products and quotients
only, so that all machines find the same paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topoplan.machine.fabric import Fabric
from topoplan.plans.certificates.certificate import Cut
from topoplan.plans.certificates.exchange import DemandMatrix
from topoplan.solve.packing.flow_packing import Path
from topoplan.solve.search_control import Deadline

Whole = NDArray[np.int64]
Real = NDArray[np.float64]

SOURCE_PARTS = 8
"""Parts of the sources that are routed one after another; the lengths in between know the loads so far."""

PIECES = 32
"""A piece takes at most one part in so many of the least time on its narrowest link."""

MOVES = 4096
"""Searches for paths off the links that are too full, at most."""

MOST_STATES = 8192
"""States of the graph of routes up to which the links between them are a table: 256 MB."""

_EXACT = 1 << 52
"""Sums of amounts up to this are exact in floating point."""

_EIGHTH_POWER = 3
"""Squares that raise how full a link is to the power by which its length grows."""

_EMPTY = 1 / 16
"""Length of an empty link beside that of a full one, of the same capacity."""


@dataclass(frozen=True, slots=True)
class FilledCut:
    """Paths of all blocks of a demand that take no longer than the demand over a cut."""

    cut: Cut
    router: PieceRouter

    def paths(self) -> Iterator[tuple[Path, Fraction]]:
        """Yield the nodes of each path and its part of the block, in the order of the shards of a plan."""
        return self.router.paths()

    def loads(self, buffer: Fraction) -> list[Fraction]:
        """Return the load of each link in buffers of so many units of the demand, by the paths that cross it."""
        whole = self.router.crossed().tolist()
        unit = buffer * self.router.scale
        exact = {amount: amount / unit for amount in set(whole)}
        return [exact[amount] for amount in whole]


def fill_cut(
    fabric: Fabric, demand: DemandMatrix, *, slack: Fraction = Fraction(0), deadline: Deadline
) -> FilledCut | None:
    """Return paths that take the least time over the slowest cut, or ``slack`` of it more; None if none are found.

    Complexity: a search for shortest paths from each rank, and one for each group of pieces that moves.
    """
    if len(fabric.route_graph.nodes) > MOST_STATES:
        return None
    least, cut = slowest_cut(fabric, demand)
    budgets = [least * capacity for capacity in fabric.capacity]
    total = sum(map(sum, demand))
    scale = lcm(*(budget.denominator for budget in budgets))
    if total * scale > _EXACT:
        # Rounded budgets: the bound is missed by less than one unit on a link.
        scale = _EXACT // total
    if scale == 0:
        return None
    router = PieceRouter(FlowGraph(fabric), demand, scale)
    if not router.route(float(least) * scale):
        return None
    most = total * scale  # a link carries no piece twice
    whole = [min(-(-budget.numerator * scale // budget.denominator), most) for budget in budgets]
    longer = [min(int(budget * scale * (1 + slack)), most) for budget in budgets]
    for limits in (whole, longer) if slack else (whole,):
        if router.fit(np.array(limits, dtype=np.int64), deadline):
            return FilledCut(cut, router)
    return None


def slowest_cut(fabric: Fabric, demand: DemandMatrix) -> tuple[Fraction, Cut]:
    """Return the most time that the demand takes over a cut, in units of demand per GB/s, and the cut.

    The cuts are around every rank and every server, both ways; the first of equals is taken.
    """
    unit = lcm(*(capacity.denominator for capacity in fabric.capacity))
    capacity = [int(each * unit) for each in fabric.capacity]
    server_of = {device.name: device.server for device in fabric.topology.devices}
    home = [server_of[name] for name in fabric.nodes]
    rank_of = [node if node < fabric.size else -1 for node in range(len(fabric.nodes))]
    amounts: Any = np.array(demand, dtype=object)
    found: list[tuple[Fraction, list[int] | list[str], int | str, bool]] = []
    for label in (rank_of, home) if len(set(home[: fabric.size])) > 1 else (rank_of,):
        links: tuple[dict[int | str, int], ...] = ({}, {})
        for (src, dst), width in zip(fabric.ends, capacity, strict=True):
            if label[src] != label[dst]:
                for place, end in enumerate((label[src], label[dst])):
                    links[place][end] = links[place].get(end, 0) + width
        names = list(dict.fromkeys(label[: fabric.size]))
        number = {name: at for at, name in enumerate(names)}
        group = np.array([number[name] for name in label[: fabric.size]])
        moved = np.nonzero((amounts > 0) & (group[:, None] != group))
        for place, entering in enumerate((False, True)):
            ends, first = np.unique(group[moved[place]], return_index=True)
            needed: Any = np.zeros(len(names), dtype=object)
            np.add.at(needed, group[moved[place]], amounts[moved])
            for end in ends[np.argsort(first)].tolist():
                time = Fraction(needed[end] * unit, links[place][names[end]])
                found.append((time, label, names[end], entering))
    least, groups, inside, entering = max(found, key=lambda each: each[0])
    side = (name for name, other in zip(fabric.nodes, groups, strict=True) if (other == inside) != entering)
    return least, Cut(tuple(side))


class FlowGraph:
    """The graph of routes of a fabric as arrays, for searches from many ranks at once.

    Helpers are left out: data that passes one would need a tree of its own.
    """

    def __init__(self, fabric: Fabric) -> None:
        graph = fabric.route_graph
        self.size, self.states = fabric.size, len(graph.nodes)
        self.nodes = graph.nodes
        ends, links = np.array(graph.ends, dtype=np.int64), np.array(graph.links, dtype=np.int64)
        kept = ~((ends >= fabric.size) & (ends < len(fabric.vertices))).any(axis=1)
        ends, links = ends[kept], links[kept]
        self.capacity = np.array([float(each) for each in fabric.capacity])
        self.none = len(self.capacity)  # stands for no link
        self.heads = np.array([*(head for _, head in fabric.ends), -1], dtype=np.int64)
        self._link = np.full((self.states, self.states), self.none, dtype=np.int32)
        self._link[ends[:, 0], ends[:, 1]] = links
        self.between = dict(zip(map(tuple, ends.tolist()), links.tolist(), strict=True))
        self._graphs: list[Any] = [None, None]  # of scipy, whose lengths change
        self._ways = [self._by_tail(ends[:, place], ends[:, 1 - place], links) for place in (0, 1)]

    def _by_tail(self, tails: Whole, heads: Whole, links: Whole) -> tuple[Whole, Whole, Whole]:
        """Return links and heads in the order of the tails, and where each tail begins."""
        order = np.lexsort((heads, tails))
        return links[order], heads[order], np.searchsorted(tails[order], np.arange(self.states + 1))

    def trees(self, lengths: Real, roots: Whole, *, backwards: bool = False) -> NDArray[np.int32]:
        """Return the state before each one on the shortest paths from some ranks, of shape (roots, states).

        ``lengths`` of links are above 0, and infinite for links that are not crossed. If ``backwards``, the paths lead
        to the ranks, and the states are those after each one. A negative number stands for none.
        """
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import dijkstra

        links, heads, begins = self._ways[backwards]
        if self._graphs[backwards] is None:
            self._graphs[backwards] = csr_array((lengths[links], heads, begins), (self.states, self.states))
        graph = self._graphs[backwards]
        graph.data = lengths[links]
        found: NDArray[np.int32] = dijkstra(graph, indices=roots, return_predecessors=True)[1]
        return found

    def walks(self, tree: NDArray[np.int32], place: Whole, roots: Whole, ends: Whole) -> Whole:
        """Return the states from roots to ends, a row for each; a state that is repeated fills the row up.

        ``place`` are the rows of ``tree`` of the roots. Rows of ends out of reach have one state, repeated.
        """
        found = [ends]
        while True:
            there = tree[place, found[-1]].astype(np.int64)
            there = np.where((found[-1] == roots) | (there < 0), found[-1], there)
            if (there == found[-1]).all():
                break
            found.append(there)
        rows: Whole = np.stack(found[::-1], axis=1)
        rows[rows[:, 0] != roots] = roots[rows[:, 0] != roots, None]
        return rows

    def links(self, states: Whole) -> NDArray[np.int32]:
        """Return the links between successive states, `none` between equal ones."""
        found: NDArray[np.int32] = self._link[states[..., :-1], states[..., 1:]]
        return found


class PieceRouter:
    """The pieces of a demand, the links of their paths, and the loads of the links.

    ``scale`` is the load of one unit of the demand.
    """

    def __init__(self, graph: FlowGraph, demand: DemandMatrix, scale: int) -> None:
        amounts = np.array(demand, dtype=np.int64) * scale
        self.stays = np.flatnonzero(np.diagonal(amounts))
        np.fill_diagonal(amounts, 0)
        self.graph, self.scale = graph, scale
        self.whole = amounts
        self.source, self.destination = np.nonzero(amounts)
        self.amount = amounts[self.source, self.destination]
        self.states = np.stack([self.source, self.source], axis=1)
        self.links = graph.links(self.states)
        self.load = np.zeros(graph.none, dtype=np.int64)

    def time(self) -> float:
        """Return the time of the fullest link, in units of load per GB/s."""
        return float((self.load / self.graph.capacity).max())

    def route(self, least: float) -> bool:
        """Put all pieces on shortest paths, part after part of the sources; return whether every path exists.

        ``least`` is a time that no routing is below.
        """
        graph, sources = self.graph, np.unique(self.source)
        for first in range(min(SOURCE_PARTS, len(sources))):
            roots = sources[first::SOURCE_PARTS]
            pieces = np.flatnonzero(np.isin(self.source, roots))
            used = self.load / graph.capacity / max(least, self.time())
            tree = graph.trees(_lengths(used, graph.capacity), roots)
            own = self.source[pieces]
            states = graph.walks(tree, np.searchsorted(roots, own), own, self.destination[pieces])
            if (states[:, -1] != self.destination[pieces]).any():
                return False
            self._put(pieces, states)
            self.load += self.crossed(pieces)
        self._divide(least)
        return True

    def _put(self, pieces: Whole, states: Whole) -> None:
        """Put pieces on paths; the loads are the caller's."""
        if states.shape[1] > self.states.shape[1]:
            self.states = _widened(self.states, states.shape[1])
            self.links = self.graph.links(self.states)
        rows = _widened(states, self.states.shape[1])
        self.states[pieces] = rows
        self.links[pieces] = self.graph.links(rows)

    def _divide(self, least: float) -> None:
        """Divide the pieces that take long on their narrowest link."""
        narrowest = np.append(self.graph.capacity, np.inf)[self.links].min(axis=1)
        parts = np.ceil(self.amount / narrowest * (PIECES / least)).astype(np.int64)
        parts = np.clip(np.minimum(parts, self.amount), 1, PIECES)
        each = np.repeat(np.arange(len(parts)), parts)
        number = np.arange(len(each)) - (np.cumsum(parts) - parts)[each]
        amount, of = self.amount[each], parts[each]
        self.amount = amount * (number + 1) // of - amount * number // of
        self.source, self.destination = self.source[each], self.destination[each]
        self.states, self.links = self.states[each], self.links[each]

    def fit(self, budgets: Whole, deadline: Deadline) -> bool:
        """Move pieces off the links whose load exceeds a budget, to links with room; return whether none is left."""
        failed: set[tuple[int, bool, int]] = set()
        for _ in range(MOVES):
            over = (self.load - budgets) / self.graph.capacity
            full = int(over.argmax())
            if over[full] <= 0:
                return True
            members = np.flatnonzero((self.links == full).any(axis=1))
            groups = (group for group in self._groups(members) if (full, *group) not in failed)
            group = next(groups, None)
            if group is None or deadline.over():
                return False
            if not self._move(full, members, *group, room=budgets - self.load):
                failed.add((full, *group))
        return False

    def _groups(self, members: Whole) -> list[tuple[bool, int]]:
        """Return the ranks at which pieces end (True) or begin, by their sums from the largest on."""
        found = []
        for backwards, ranks in ((True, self.destination), (False, self.source)):
            sums = np.bincount(ranks[members], self.amount[members])
            found += [(-sums[rank], not backwards, rank) for rank in np.flatnonzero(sums).tolist()]
        return [(not forwards, rank) for _, forwards, rank in sorted(found)]

    def _move(self, full: int, members: Whole, backwards: bool, root: int, *, room: Whole) -> bool:
        """Move pieces that end (``backwards``) or begin at a rank off a link; return whether any moved.

        A piece leaves its path as late before the link as it can, or comes back to it as early behind the link, and
        only the links between need room.
        """
        graph = self.graph
        own = self.destination if backwards else self.source
        members = members[own[members] == root]
        members = members[np.lexsort((members, -self.amount[members]))]
        lengths = _lengths(self.load / np.maximum(self.load + room, 1), graph.capacity)
        found = graph.trees(np.where(room > 0, lengths, np.inf), np.array([root]), backwards=backwards)
        tree, free = found[0].tolist(), room.tolist()
        moved, parts = False, []
        for piece in members.tolist():
            if free[full] >= 0:
                break
            states, before = self.states[piece].tolist(), self.links[piece].tolist()
            at, amount = before.index(full), int(self.amount[piece])
            known, last = (states, at) if backwards else (states[::-1], len(states) - 2 - at)
            part = 0
            for path in _rejoined(tree, root, known, last):
                row = path if backwards else path[::-1]
                after = [graph.between[ends] for ends in pairwise(row)]
                fresh = [link for link in after if link not in before]
                part = min(amount, -free[full], *[free[link] for link in fresh])
                if part > 0:
                    break
            if part <= 0:
                continue
            gone = {link for link in before if link != graph.none and link not in after}
            for links, change in ((sorted(gone), -part), (sorted(set(fresh)), part)):
                self.load[links] += change
                for link in links:
                    free[link] -= change
            if part == amount:
                self._put(np.array([piece]), np.array([row]))
            else:
                self.amount[piece] -= part
                parts.append((piece, part, np.array(row)))
            moved = True
        if parts:
            self._add(parts)
        return moved

    def _add(self, parts: Sequence[tuple[int, int, Whole]]) -> None:
        """Add pieces that were cut off others: from which, how much, and the states of the new path."""
        of = np.array([piece for piece, _, _ in parts])
        count = len(self.amount)
        self.amount = np.append(self.amount, [amount for _, amount, _ in parts])
        self.source = np.append(self.source, self.source[of])
        self.destination = np.append(self.destination, self.destination[of])
        self.states = np.concatenate([self.states, self.states[of]])
        self.links = np.concatenate([self.links, self.links[of]])
        for number, (_, _, row) in enumerate(parts):
            self._put(np.array([count + number]), row[None, :])

    def crossed(self, pieces: Whole | slice = slice(None)) -> Whole:
        """Return the sum of the pieces that cross each link, of all or of some."""
        links = self.links[pieces]
        weights = np.repeat(self.amount[pieces], links.shape[1])
        return np.bincount(links.ravel(), weights, self.graph.none + 1)[:-1].astype(np.int64)

    def paths(self) -> Iterator[tuple[Path, Fraction]]:
        """Yield the nodes of each path and its part of the block, blocks that stay on their rank included.

        They are in the order of destination and source, those of a block with the largest part first.
        """
        none, stays = self.graph.none, self.stays
        links = np.pad(self.links, ((0, len(stays)), (0, 0)), constant_values=none)
        links = np.take_along_axis(links, np.argsort(links == none, axis=1, kind="stable"), axis=1)
        ends = np.stack([np.append(self.destination, stays), np.append(self.source, stays)], axis=1)
        rows, amount = np.hstack([ends, links]), np.append(self.amount, np.ones_like(stays))
        order = np.lexsort(rows.T[::-1])
        rows = rows[order]
        begins = np.flatnonzero(np.append(True, (rows[1:] != rows[:-1]).any(axis=1)))
        rows, amount = rows[begins], np.add.reduceat(amount[order], begins)
        nodes, lengths = self.graph.heads[rows[:, 2:]], (rows[:, 2:] != none).sum(axis=1)
        order = np.lexsort([*nodes.T[::-1], lengths, -amount, rows[:, 1], rows[:, 0]])
        whole = self.whole[rows[:, 1], rows[:, 0]]
        parts = np.where(rows[:, 0] == rows[:, 1], amount, whole)
        every = Fraction(1)
        columns = (rows[:, 1], nodes, lengths, amount, parts)
        for source, path, length, one, of in zip(*(each[order].tolist() for each in columns), strict=True):
            yield (source, *path[:length]), every if one == of else Fraction(one, of)


def _widened(states: Whole, width: int) -> Whole:
    """Return rows of states of some width, in which the last state is repeated."""
    rows = np.empty((len(states), width), dtype=np.int64)
    rows[:, : states.shape[1]] = states
    rows[:, states.shape[1] :] = states[:, -1:]
    return rows


def _rejoined(tree: Sequence[int], root: int, states: Sequence[int], last: int) -> Iterator[list[int]]:
    """Yield paths to a root that leave a known one at position ``last``, or before, from the latest on.

    ``tree`` has the state after each one on its way to the root, negative if there is none.
    """
    for place in range(last, -1, -1):
        if states[place] != root and tree[states[place]] >= 0:
            path = list(dict.fromkeys(states[: place + 1]))
            while path[-1] != root:
                after = tree[path[-1]]
                path = path[: path.index(after) + 1] if after in path else [*path, after]
            yield path


def _lengths(used: Real, capacity: Real) -> Real:
    """Return lengths that grow with how full links are, by products, which all machines round alike."""
    for _ in range(_EIGHTH_POWER):
        used = used * used
    lengths: Real = (used + _EMPTY) / capacity
    return lengths
