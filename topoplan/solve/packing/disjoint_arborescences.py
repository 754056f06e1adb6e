"""Pack a broadcast on links between ranks with as many disjoint trees as the smallest cut has links.

A link of several units of bandwidth counts as so many links. Edmonds (1973): if every rank has k disjoint paths from
the root, k disjoint spanning arborescences exist. They are found one after the other (Lovász 1976): a tree takes a link
from u to v if the rest still has enough disjoint paths from the root to every rank; only sets of ranks that hold v and
not u lose a link, so one flow from the root and u to v decides. The first trees are low and the last ones take what is
left; then two trees exchange the links into a rank, wherever that lowers more than it raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from topoplan.solve.search_control import Deadline

POWER = 8
"""The exchanges lower the sum of this power of all depths: the tallest trees first."""


def disjoint_arborescences(
    size: int,
    units: Mapping[tuple[int, int], int],
    root: int,
    count: int,
    *,
    deadline: Deadline | None = None,
) -> list[list[int]] | None:
    """Return the parents, -1 for the root, of ``count`` disjoint trees of links; None if there are not as many.

    ``units`` gives for each link, by tail and head, how many trees may take it. After the deadline trees are not
    lowered further.

    >>> ring = {(u, v): 1 for u in range(4) for v in ((u + 1) % 4, (u - 1) % 4)}
    >>> disjoint_arborescences(4, ring, 0, 2)
    [[-1, 0, 1, 2], [-1, 2, 3, 0]]
    """
    links = _Links(size, units)
    trees = []
    for left in reversed(range(count)):
        tree = _grown(links, root, left)
        if tree is None:
            return None
        trees.append(tree)
    return _lowered(trees, root, deadline) if trees else trees


class _Links:
    """The units of bandwidth that no tree has taken."""

    def __init__(self, size: int, units: Mapping[tuple[int, int], int]) -> None:
        self.free = dict(units)
        self.heads: list[list[int]] = [[] for _ in range(size)]
        self.tails: list[list[int]] = [[] for _ in range(size)]
        for tail, head in sorted(units):
            self.heads[tail].append(head)
            self.tails[head].append(tail)

    def paths(self, sources: tuple[int, int], sink: int, count: int) -> bool:
        """Return whether as many disjoint paths lead from the sources to the sink."""
        flow: dict[tuple[int, int], int] = {}
        return all(self._augmented(flow, sources, sink) for _ in range(count))

    def _augmented(self, flow: dict[tuple[int, int], int], sources: tuple[int, int], sink: int) -> bool:
        """Add one path to the flow; it is searched from the sink, around which the other paths end."""
        following = {sink: -1}
        waiting = deque([sink])
        while waiting:
            rank = waiting.popleft()
            reached = [tail for tail in self.tails[rank] if self.free[tail, rank] > flow.get((tail, rank), 0)]
            reached += [head for head in self.heads[rank] if flow.get((rank, head), 0) > 0]
            for other in reached:
                if other in following:
                    continue
                following[other] = rank
                if other in sources:
                    self._push(flow, following, other)
                    return True
                waiting.append(other)
        return False

    @staticmethod
    def _push(flow: dict[tuple[int, int], int], following: Mapping[int, int], rank: int) -> None:
        while (after := following[rank]) >= 0:
            if flow.get((after, rank), 0) > 0:
                flow[after, rank] -= 1
            else:
                flow[rank, after] = flow.get((rank, after), 0) + 1
            rank = after


def _grown(links: _Links, root: int, left: int) -> list[int] | None:
    """Return the parents of a tree, as low as it gets, whose links leave as many more trees; None for none."""
    size = len(links.heads)
    parent = [-1] * size
    depth = {root: 0}
    while len(depth) < size:
        before = len(depth)
        for tail in sorted(depth, key=lambda rank: depth[rank]):
            for head in links.heads[tail]:
                free = head not in depth and links.free[tail, head] > 0
                if free and (not left or links.paths((root, tail), head, left + 1)):
                    links.free[tail, head] -= 1
                    parent[head], depth[head] = tail, depth[tail] + 1
        if len(depth) == before:
            return None
    return parent


class _Tree:
    """A tree whose ranks change their parents."""

    def __init__(self, parent: list[int], root: int) -> None:
        self.parent = parent
        self.children: list[set[int]] = [set() for _ in parent]
        for child, above in enumerate(parent):
            if above >= 0:
                self.children[above].add(child)
        self.depth = [0] * len(parent)
        for rank in self.below(root):
            if rank != root:
                self.depth[rank] = self.depth[parent[rank]] + 1

    def below(self, rank: int) -> list[int]:
        """Return the rank and all ranks below it, parents before children."""
        found = [rank]
        for each in found:
            found.extend(self.children[each])
        return found

    def is_below(self, rank: int, other: int) -> bool:
        """Return whether ``rank`` is ``other`` or below it."""
        while self.depth[rank] > self.depth[other]:
            rank = self.parent[rank]
        return rank == other

    def gain(self, rank: int, parent: int) -> int:
        """Return by how much the sum of the powers of depths falls if the rank moves below another parent."""
        down = self.depth[parent] + 1 - self.depth[rank]
        depths = [self.depth[each] for each in self.below(rank)]
        return sum(depth**POWER - (depth + down) ** POWER for depth in depths)

    def move(self, rank: int, parent: int) -> None:
        """Put a rank, with all below it, below another parent."""
        down = self.depth[parent] + 1 - self.depth[rank]
        for each in self.below(rank):
            self.depth[each] += down
        self.children[self.parent[rank]].remove(rank)
        self.children[parent].add(rank)
        self.parent[rank] = parent


def _lowered(parents: Sequence[list[int]], root: int, deadline: Deadline | None) -> list[list[int]]:
    """Return disjoint trees after exchanges of the links into one rank, until none lowers them."""
    trees = [_Tree(parent, root) for parent in parents]
    ranks = [rank for rank in range(len(parents[0])) if rank != root]
    changed = True
    while changed and not (deadline is not None and deadline.over()):
        changed = False
        for rank in sorted(ranks, key=lambda rank: -max(tree.depth[rank] for tree in trees)):
            for number, first in enumerate(trees):
                for second in trees[:number]:
                    changed |= _exchanged(first, second, rank)
    return [tree.parent for tree in trees]


def _exchanged(first: _Tree, second: _Tree, rank: int) -> bool:
    """Exchange the parents of a rank in two trees if that lowers them; return whether it did."""
    here, there = first.parent[rank], second.parent[rank]
    lower = first.depth[there] < first.depth[here] or second.depth[here] < second.depth[there]
    if not lower or first.is_below(there, rank) or second.is_below(here, rank):
        return False
    if first.gain(rank, there) + second.gain(rank, here) <= 0:
        return False
    first.move(rank, there)
    second.move(rank, here)
    return True
