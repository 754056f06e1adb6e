"""Shortest routes between the ranks that a ring visits one after another, found when they are asked for.

A large cluster has a million pairs of ranks, and a ring needs a route for a thousand of them.
"""

from __future__ import annotations

from topoplan.fabric.fabric import ROUTES_PER_PAIR, Fabric

Links = tuple[int, ...]


class Routes:
    """The shortest routes of a fabric.

    Parameters
    ----------
    fabric : Fabric

    Examples
    --------
    >>> import topoplan
    >>> routes = Routes(Fabric(topoplan.load("dgx-2"), ("nvlink",)))
    >>> routes.between(0, 5), routes.widest(0, 5)
    (((0, 11),), (0, 11))
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._leaving: list[list[tuple[int, int]]] = [[] for _ in fabric.nodes]
        self._entering: list[list[tuple[int, int]]] = [[] for _ in fabric.nodes]
        for number, (src, dst) in enumerate(fabric.ends):
            self._leaving[src].append((number, dst))
            self._entering[dst].append((number, src))
        self._known: dict[tuple[int, int], tuple[Links, ...]] = {}

    def between(self, tail: int, head: int) -> tuple[Links, ...]:
        """The routes of fewest links, as links in the order in which they are crossed; at most `ROUTES_PER_PAIR`."""
        if (tail, head) not in self._known:
            self._known[tail, head] = self._search(tail, head)
        return self._known[tail, head]

    def widest(self, tail: int, head: int) -> Links | None:
        """Of them the one whose narrowest link is widest; None where there is no route."""
        capacity = self._fabric.capacity
        return max(
            self.between(tail, head), key=lambda links: min(capacity[link] for link in links), default=None
        )

    def _search(self, tail: int, head: int) -> tuple[Links, ...]:
        behind, length = self._met(tail, head)
        if not length:
            return ()
        known = max(behind.values())
        ways: dict[int, int] = {}
        level: list[tuple[int, Links]] = [(tail, ())]
        for depth in range(1, length + 1):
            rest = length - depth
            following = []
            for node, path in level:
                for number, dst in self._leaving[node]:
                    # Near the head only what is as near as it must be; before that, any switch.
                    if behind.get(dst, known + 1) == rest or (rest > known and dst >= self._fabric.size):
                        ways[dst] = ways.get(dst, 0) + 1
                        if ways[dst] <= ROUTES_PER_PAIR:
                            following.append((dst, (*path, number)))
            level = following
        return tuple(path for _, path in level)

    def _met(self, tail: int, head: int) -> tuple[dict[int, int], int]:
        """How many links before the head nodes near it are, and how many a shortest route has; 0 without a route.

        Searches from both ends meet, the narrower one taking the next step: a network switch has many neighbours.
        """
        size = self._fabric.size
        ahead, behind = {tail: 0}, {head: 0}
        front, back = [tail], [head]
        while front and back:
            forward = len(front) <= len(back)
            reached, other = (ahead, behind) if forward else (behind, ahead)
            table = self._leaving if forward else self._entering
            fresh = []
            for node in front if forward else back:
                for _, near in table[node]:
                    if near not in reached and (near >= size or near in other):
                        reached[near] = reached[node] + 1
                        fresh.append(near)
            front, back = (fresh, back) if forward else (front, fresh)
            met = [ahead[node] + behind[node] for node in fresh if node in other]
            if met:
                return behind, min(met)
        return behind, 0
