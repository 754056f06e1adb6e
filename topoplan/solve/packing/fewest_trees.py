"""Reduce the number of trees of a packing: at the same rate, or within a threshold of it.

Vertices: the optimal face (`column_generation.cheapest_vertex`) is searched for a packing of few trees. Candidates
are the cheapest trees under the certificate's lengths, since no other tree is in any optimal packing. The search
ends early if the number of trees meets a lower bound that the certificate implies.

Peeling takes one tree at a time with the largest weight that leaves the rest optimal. If the best packing of
capacities c is worth R, a tree T may carry w exactly if the rest, c - w T, is still worth R - w; Newton's method on the
weakest cut or partition of the rest finds the largest w. It serves broadcast, reduce, and allreduce on direct
symmetric links.

Integer programming (Blink 3.2.1) follows multiplicative weights: every tree gets a whole multiple of a unit: 0 or 1
times one link's bandwidth; below (1 - threshold) of the rate any whole number; then a half, a third, … of a link.
On the first unit that reaches the threshold the largest rate is taken, and for it the lowest trees.

Disjoint trees of limited height (`disjoint_trees`): every tree has a unit of bandwidth of each of its links. Of all
trees at once, level by level, each rank joins as many as it can. A tree and a unit of a link into the rank are matched
if the link starts at a rank above it in the tree. No link leads into two ranks, so a rank's matching leaves those of
others as they are. A tree that a later matching moves to another link keeps its depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import gcd, inf

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError
from topoplan.solve.cuts_and_partitions import smallest_cut, weakest_partition
from topoplan.solve.packing.column_generation import RANDOM_WALKS, VERTEX_WORK, ColumnGeneration
from topoplan.solve.packing.packing_program import Packing, Pricing, TreeColumn, length_of
from topoplan.solve.search_control import Deadline, RandomStream

COLUMN_POOL = 200
"""Trees to search for, apart from the trees that the packing already knows."""
MOST_STALE = 16
"""Rounds without a new tree after which the search for trees ends."""
PEELINGS = 6
PEELING_CANDIDATES = 8
_NOISE = 1000


def with_few_trees(master: ColumnGeneration, lengths: list[int]) -> dict[TreeColumn, Fraction]:
    """Return weights of an optimal packing with few trees, from column generation at the optimal value.

    Under ``lengths``, one per row, every tree of an optimal packing is a cheapest one.
    """
    best = master.weights()
    least = fewest_possible(master.packing, lengths)
    if len(best) <= least or master.program.work > VERTEX_WORK or master.deadline.over():
        return best
    random = RandomStream(0)
    master.add(_tight_columns(master, lengths, random))
    return master.fewer_trees(random, least=least, walks=RANDOM_WALKS)


def fewest_possible(packing: Packing, lengths: list[int]) -> int:
    """Return a number of trees below which no packing can fill every row that has a length.

    With lengths 0 and 1 each optimal tree crosses exactly ``L`` of the rows of length 1, and all of them are full, so
    rows / L trees are needed.
    """
    positive = [y for y in lengths if y]
    if not positive or len(set(positive)) > 1:
        return packing.owners
    unit = [int(bool(y)) for y in lengths]
    if packing.shared:
        return packing.owners
    crossed = min(length_of(tree, unit) for tree in Pricing(packing).cheapest(unit).values())
    return -(-len(positive) // crossed) if crossed else 1


def _tight_columns(master: ColumnGeneration, lengths: list[int], random: RandomStream) -> list[TreeColumn]:
    """Return columns that are cheapest under the lengths, found by breaking ties at random."""
    packing, pricing = master.packing, master.pricing
    top = max(lengths)
    # The noise of a whole column must stay below one unit of length.
    unit = _NOISE * 4 * packing.fabric.size * max(arc.hops for arc in packing.fabric.arcs)
    if top * unit >= 1 << 30:
        return []
    cheapest = {place: length_of(tree, lengths) for place, tree in pricing.cheapest(lengths).items()}
    if not packing.shared:
        cheapest = dict.fromkeys(cheapest, min(cheapest.values()))
    found: set[TreeColumn] = set()
    stale = 0
    widths = sorted(set(packing.limits))[-4:]
    for turn in range(-(-COLUMN_POOL // len(packing.roots))):
        # Trees over wide links can carry much: in turn, links narrower than each width come last among equals.
        narrow = np.array(packing.limits) < widths[turn % len(widths)]
        noise = random.whole(len(lengths), _NOISE) + 2 * _NOISE * narrow
        noisy = [y * unit + int(z) for y, z in zip(lengths, noise, strict=True)]
        before = len(found)
        for place, tree in pricing.cheapest(noisy).items():
            if length_of(tree, lengths) == cheapest[place]:
                found.add(tree)
        stale = stale + 1 if len(found) == before else 0
        if stale == MOST_STALE or len(found) >= COLUMN_POOL or master.deadline.over():
            break
    return sorted(found, key=lambda tree: tree.order)


@dataclass(frozen=True)
class Peeler:
    """Peels packings of one problem."""

    packing: Packing

    def peel(
        self, target: Fraction, stream: RandomStream, *, fewer_than: int
    ) -> dict[TreeColumn, Fraction] | None:
        """Make one pass: return weights of an optimal packing with fewer trees than asked, or None.

        ``target`` is the optimal value in the packing's units.
        """
        rest = [Fraction(c) for c in self.packing.limits]
        value = target
        chosen: dict[TreeColumn, Fraction] = {}
        while value > 0:
            if len(chosen) + 1 >= fewer_than:
                return None
            best: tuple[Fraction, TreeColumn] | None = None
            for column in self._candidates(rest, stream):
                weight = self._largest_weight(rest, value, column)
                if best is None or weight > best[0]:
                    best = (weight, column)
            if best is None or best[0] <= 0:
                return None
            weight, column = best
            chosen[column] = chosen.get(column, Fraction(0)) + weight
            value -= weight
            rest = self._without(rest, column, weight)
        return chosen

    def _without(self, rest: list[Fraction], column: TreeColumn, weight: Fraction) -> list[Fraction]:
        return [c - weight * times for c, times in zip(rest, column.usage, strict=True)]

    def _largest_weight(self, rest: list[Fraction], value: Fraction, column: TreeColumn) -> Fraction:
        usage = column.usage
        weight: Fraction = min(value, *(c / times for c, times in zip(rest, usage, strict=True) if times))
        while weight > 0:
            crossing, needed = self._weakest(self._without(rest, column, weight))
            capacity = sum((c * y for c, y in zip(rest, crossing, strict=True)), Fraction(0))
            crossed = sum(times * y for times, y in zip(usage, crossing, strict=True))
            if capacity - weight * crossed >= needed * (value - weight):
                return weight
            weight = (capacity - needed * value) / (crossed - needed)
        return weight

    def _weakest(self, rest: list[Fraction]) -> tuple[list[int], int]:
        """Return the rows across the weakest cut or partition of the rest, and how many of them a tree crosses."""
        packing, fabric = self.packing, self.packing.fabric
        scale = int(np.lcm.reduce([c.denominator for c in rest], dtype=object))
        whole = [int(c * scale) for c in rest]
        capacity = [whole[row] for row in packing.orbits.row_of_link.tolist()]
        crossing = [0] * len(rest)
        if packing.folded:
            parts = weakest_partition(fabric, capacity)
            part_of = {rank: number for number, part in enumerate(parts) for rank in part}
            for (s, d), row in zip(fabric.ends, packing.orbits.row_of_link.tolist(), strict=True):
                crossing[row] = int(part_of[s] != part_of[d])
            return crossing, len(parts) - 1
        assert packing.root is not None, "broadcast and reduce have a root"
        forward = packing.collective == "broadcast"
        side = smallest_cut(fabric, capacity, packing.root, forward=forward)
        for (s, d), row in zip(fabric.ends, packing.orbits.row_of_link.tolist(), strict=True):
            crossing[row] = int((s in side and d not in side) if forward else (s not in side and d in side))
        return crossing, 1

    def _candidates(self, rest: list[Fraction], stream: RandomStream) -> list[TreeColumn]:
        """Return trees that cross the weakest cut least often, over links with capacity left, wide ones first."""
        crossing, _ = self._weakest(rest)
        widths = sorted({c for c in rest if c > 0}, reverse=True)
        pricing = Pricing(self.packing)
        unit = 8 * _NOISE * self.packing.fabric.size
        found: list[TreeColumn] = []
        for turn in range(PEELING_CANDIDATES):
            width = widths[turn % min(3, len(widths))]
            noise: NDArray[np.int64] = stream.whole(len(rest), _NOISE)
            lengths = [
                unit * (64 if c == 0 else y) + int(z) + (4 * _NOISE if c < width else 0)
                for c, y, z in zip(rest, crossing, noise, strict=True)
            ]
            priced = pricing.cheapest(lengths).values()
            if priced:
                column = min(priced, key=lambda each: (length_of(each, lengths), each.order))
                if column not in found:
                    found.append(column)
        return [c for c in found if all(r > 0 for r, t in zip(rest, c.usage, strict=True) if t)]


def fewest_peeled(
    packing: Packing, target: Fraction, *, fewer_than: int, deadline: Deadline
) -> dict[TreeColumn, Fraction] | None:
    """Return weights of the optimal packing of fewest trees among some peelings; None if all have as many as asked.

    No peeling starts after ``deadline``.
    """
    best: dict[TreeColumn, Fraction] | None = None
    # Flows alone must give the value of the rest.
    if packing.folded or (packing.collective in ("broadcast", "reduce") and packing.fabric.direct):
        peeler, stream = Peeler(packing), RandomStream(1)
        for _ in range(PEELINGS):
            if deadline.over():
                break
            found = peeler.peel(target, stream, fewer_than=fewer_than)
            if found is not None:
                best, fewer_than = found, len(found)
    return best


FINEST_UNIT = 16
"""Smallest unit tried: one link's bandwidth divided by this."""

MOST_CANDIDATES = 200
"""Trees that the search chooses from, the heaviest ones of the packing."""

MOST_BRANCHING_NODES = 100
"""Branch-and-bound nodes for each program: a limit that is the same on every machine."""


def minimise_trees(
    packing: Packing,
    weights: Mapping[TreeColumn, Fraction],
    *,
    rate: Fraction,
    threshold: float = 0.05,
    deadline: Deadline | None = None,
) -> dict[TreeColumn, Fraction] | None:
    """Return whole multiples of a unit as weights of a few of the given trees; None if no unit reaches the threshold.

    ``rate``, which lies between the packing's and its bound, and the weights are in the packing's units (1 /
    `Packing.scale` GB/s). ``threshold``, from 0 to below 1, is the part of the rate that may be given up. The smallest
    unit is a link's `FINEST_UNIT`-th. The search ends at ``deadline``.
    """
    deadline = deadline or Deadline(None)
    if not 0 <= threshold < 1:
        raise UsageError(f"threshold {threshold} must be 0 or more and below 1, for example 0.05")
    columns = _heaviest(packing, weights)
    # One link's bandwidth: the common divisor of all capacities, or the smallest if that is too fine.
    unit = reduce(gcd, packing.limits)
    if max(packing.limits) > 64 * unit:
        unit = min(packing.limits)
    needed = rate * (1 - Fraction(repr(threshold)))
    for divisor in range(1, FINEST_UNIT + 1):
        most = int(rate * divisor / unit / packing.owners) * packing.owners
        if most * Fraction(unit, divisor) < needed:
            continue
        for literal in (True, False) if divisor == 1 else (False,):
            if deadline.over():
                return None
            counts = _whole_packing(
                packing, columns, Fraction(unit, divisor), literal=literal, seconds=deadline.left
            )
            if counts is not None and int(counts.sum()) * Fraction(unit, divisor) >= needed:
                return {
                    column: int(n) * Fraction(unit, divisor)
                    for column, n in zip(columns, counts, strict=True)
                    if n
                }
    deadline.over()
    return None


def _heaviest(packing: Packing, weights: Mapping[TreeColumn, Fraction]) -> list[TreeColumn]:
    """Return the columns of largest weight, equally many of every group: the others would only slow the search."""
    ordered = sorted(weights, key=lambda column: (-weights[column], column.order))
    kept: dict[int, list[TreeColumn]] = {}
    for column in ordered:
        members = kept.setdefault(packing.owner(column), [])
        if len(members) < MOST_CANDIDATES // packing.owners:
            members.append(column)
    return sorted((each for members in kept.values() for each in members), key=lambda each: each.order)


def _whole_packing(
    packing: Packing, columns: list[TreeColumn], unit: Fraction, *, literal: bool, seconds: float | None
) -> NDArray[np.int64] | None:
    """Return whole numbers of units for each column, as many in all as fit, low trees first; None after ``seconds``."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    usage = np.array([column.usage for column in columns], dtype=np.float64).T
    room = np.array([int(c / unit) for c in packing.limits], dtype=np.float64)
    heights = np.array([column.height for column in columns], dtype=np.float64)
    constraints = [LinearConstraint(usage, -np.inf, room)]
    if packing.shared:
        members = np.zeros((packing.owners, len(columns)))
        for number, column in enumerate(columns):
            members[packing.owner(column), number] = 1
        constraints.append(LinearConstraint(members[1:] - members[:1], 0, 0))
    # A tree counts 1, less a little for its height: never enough to give up a whole tree.
    most = float(room.sum()) * packing.fabric.size + 1
    result = milp(
        -1 + heights / (2 * most),
        integrality=np.ones(len(columns), dtype=np.int64),
        bounds=Bounds(0, 1 if literal else np.inf),
        constraints=constraints,
        options={"node_limit": MOST_BRANCHING_NODES, "time_limit": inf if seconds is None else seconds},
    )
    if result.x is None:
        return None
    return np.rint(result.x).astype(np.int64)


DISJOINT_TRIES = 12
"""Random orders of trees and links that are tried for each number of them."""

MOST_DISJOINT = 32
"""Most trees that are grown together."""


def disjoint_trees(packing: Packing, height: int, *, above: int = 0) -> dict[TreeColumn, Fraction] | None:
    """Return weights of one unit each of trees of at most ``height`` edges; None if no more than ``above`` are found.

    ``packing`` is of a broadcast or reduce on direct links, without symmetries. A unit is the common divisor of all
    capacities, or the smallest if that is too fine. O(tries x trees x (trees + units) x links), and no proof that more
    trees do not exist.
    """
    fabric, (root,) = packing.fabric, packing.roots
    unit = reduce(gcd, packing.limits)
    if max(packing.limits) > MOST_DISJOINT * unit:
        unit = min(packing.limits)
    outward = packing.collective == "broadcast"
    room: dict[tuple[int, int], int] = {}
    for (src, dst), limit in zip(fabric.ends, packing.limits, strict=True):
        ends = (src, dst) if outward else (dst, src)
        room[ends] = max(limit // unit, room.get(ends, 0))
    sources: list[list[int]] = [[] for _ in fabric.ranks]
    for (near, far), units in sorted(room.items()):
        sources[far] += [near] * min(units, MOST_DISJOINT)
    most = min([MOST_DISJOINT, *(len(each) for rank, each in enumerate(sources) if rank != root)])
    found: list[list[int]] = []
    for count in range(above + 1, most + 1):
        random = RandomStream(count)
        tries = (_grown(sources, root, count, height, random) for _ in range(DISJOINT_TRIES))
        more = next((trees for trees in tries if trees), None)
        if more is None:
            break
        found = more
    if not found:
        return None
    parents = [(root, (), tree) if outward else (root, tree, ()) for tree in found]
    weights: dict[TreeColumn, Fraction] = {}
    for column in packing.trees(parents, packing.routes([1] * len(packing.limits))):
        weights[column] = weights.get(column, Fraction(0)) + 1
    return weights


def _grown(
    sources: Sequence[Sequence[int]], root: int, count: int, height: int, random: RandomStream
) -> list[list[int]]:
    """Return the parents of every rank in each of ``count`` trees, -1 for the root; nothing if some rank stays out.

    ``sources`` has for every rank the ranks from which a unit leads to it, once for each unit.
    """
    size = len(sources)
    depth = [[0 if rank == root else height + 1 for rank in range(size)] for _ in range(count)]
    chosen: list[dict[int, int]] = [{} for _ in range(size)]  # of every rank: unit -> tree
    left = [size - 1] * count
    for level in range(1, height + 1):
        joined: list[tuple[int, int]] = []
        noise = random.whole(count * size, size).tolist()
        for rank in range(size):
            if rank == root:
                continue
            waiting = [tree for tree in range(count) if depth[tree][rank] > height]
            waiting.sort(key=lambda tree: (-left[tree], noise[tree * size + rank], tree))
            first = noise[rank] % len(sources[rank])
            order = [*range(first, len(sources[rank])), *range(first)]
            for tree in waiting:
                if _join(tree, rank, level, sources[rank], order, depth, chosen[rank], set()):
                    joined.append((tree, rank))
                    left[tree] -= 1
        for tree, rank in joined:
            depth[tree][rank] = level
    if any(left):
        return []
    parents = [[-1] * size for _ in range(count)]
    for rank, units in enumerate(chosen):
        for unit, tree in units.items():
            parents[tree][rank] = sources[rank][unit]
    return parents


def _join(
    tree: int,
    rank: int,
    level: int,
    sources: Sequence[int],
    order: Sequence[int],
    depth: Sequence[Sequence[int]],
    chosen: dict[int, int],
    seen: set[int],
) -> bool:
    """Give the tree a unit into a rank, and other units to trees that had it before; return whether that is possible.

    The rank keeps its depth in every tree, and takes ``level`` if it is new there.
    """
    below = min(level, depth[tree][rank])
    for unit in order:
        if unit in seen or depth[tree][sources[unit]] >= below:
            continue
        seen.add(unit)
        if unit not in chosen or _join(chosen[unit], rank, level, sources, order, depth, chosen, seen):
            chosen[unit] = tree
            return True
    return False
