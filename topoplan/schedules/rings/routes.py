"""Routes between ranks that pass no third, found when they are asked for, by what their links have left.

Between two GPUs there may be as many routes as pairs of NICs, or more than can be listed. So none are: the links that
the shortest ones cross are kept, layer by layer, and the widest is found on them from the far end. A large cluster has
a million pairs of ranks, and a ring needs a route for a thousand of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction

from topoplan.fabric.fabric import Fabric

Links = tuple[int, ...]

Layer = tuple[tuple[int, int, int], ...]
"""The links that shortest routes cross after the same number of others, as (link, its source, its destination).

Source and destination are states of the fabric's graph of routes."""


class Routes:
    """The routes of a fabric.

    Parameters
    ----------
    fabric : Fabric

    Examples
    --------
    >>> import topoplan
    >>> fabric = Fabric(topoplan.load("dgx-2"), ("nvlink",))
    >>> routes = Routes(fabric)
    >>> routes.shortest(0, 5, fabric.capacity), routes.widest(0, 5, fabric.capacity)
    ((0, 11), (0, 11))
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._leaving = fabric.route_graph.leaving()
        self._entering = fabric.route_graph.entering()
        self._known: dict[tuple[int, int], tuple[Layer, ...]] = {}

    def joined(self, tail: int, head: int) -> bool:
        """True where a route leads from one rank to the other."""
        return bool(self.layers(tail, head))

    def layers(self, tail: int, head: int) -> tuple[Layer, ...]:
        """The links of all routes of fewest links, in the order in which they are crossed; () without a route."""
        if (tail, head) not in self._known:
            self._known[tail, head] = self._search(tail, head)
        return self._known[tail, head]

    def shortest(self, tail: int, head: int, width: Sequence[Fraction]) -> Links | None:
        """Of the routes of fewest links the one whose narrowest link is widest, of equals the first by its links.

        Parameters
        ----------
        width : sequence of Fraction, one per link
            What the links have left, or any other measure.
        """
        layers = self.layers(tail, head)
        if not layers:
            return None
        onward = _onward(layers, width)
        widest = onward[0][tail]
        path: list[int] = []
        node = tail
        for layer, beyond in zip(layers, (*onward[1:], {head: widest}), strict=True):
            number, node = next(
                (number, dst)
                for number, src, dst in layer
                if src == node and width[number] >= widest and beyond[dst] >= widest
            )
            path.append(number)
        return tuple(path)

    def stripes(self, tail: int, head: int, width: Sequence[Fraction]) -> dict[int, Fraction]:
        """What part of the data each link carries that is striped over all routes of fewest links; {} without one.

        Each node divides what it has in proportion to how wide the routes onward are, given a width of every link.
        """
        layers = self.layers(tail, head)
        onward = _onward(layers, width)
        part: dict[int, Fraction] = {}
        there = {tail: Fraction(1)}
        for layer, begun, beyond in zip(layers, onward, (*onward[1:], None), strict=False):
            weight = {
                number: width[number] if beyond is None else min(width[number], beyond[dst])
                for number, _, dst in layer
            }
            total = dict.fromkeys(begun, Fraction(0))
            for number, src, _ in layer:
                total[src] += weight[number]
            arrived: dict[int, Fraction] = {}
            for number, src, dst in layer:
                carried = there[src] * weight[number] / total[src]
                part[number] = part.get(number, Fraction(0)) + carried
                arrived[dst] = arrived.get(dst, Fraction(0)) + carried
            there = arrived
        return part

    def widest(self, tail: int, head: int, width: Sequence[Fraction] | Sequence[int]) -> Links | None:
        """Of all routes the one whose narrowest link is widest, of equals that of fewest links, then the first.

        Two searches from the head: one for the width, as Dijkstra's with the narrowest link in place of the sum, and
        one for the fewest links over what is as wide.
        """
        reach: dict[int, Fraction | int] = {}
        count = 0
        heap: list[tuple[Fraction | int, int, int]] = [(-max(width, default=0), 0, head)]
        while heap and tail not in reach:
            narrowest, _, node = heapq.heappop(heap)
            if node in reach:
                continue
            reach[node] = -narrowest
            for number, src in self._entering[node] if self._passes(node, tail, head) else ():
                if src not in reach:
                    count += 1
                    heapq.heappush(heap, (max(narrowest, -width[number]), count, src))
        if tail not in reach:
            return None
        least = reach[tail]
        behind = {head: 0}
        order = [head]
        for node in order:
            for number, src in self._entering[node] if self._passes(node, tail, head) else ():
                if src not in behind and width[number] >= least:
                    behind[src] = behind[node] + 1
                    order.append(src)
        path: list[int] = []
        node = tail
        while node != head:
            number, node = next(
                (number, dst)
                for number, dst in self._leaving[node]
                if behind.get(dst) == behind[node] - 1
                and width[number] >= least
                and (dst == head or dst >= self._fabric.size)
            )
            path.append(number)
        return tuple(path)

    def _passes(self, node: int, tail: int, head: int) -> bool:
        """True where a route that is followed back from the head may go on from a node."""
        return node == head or (node != tail and node >= self._fabric.size)

    def _search(self, tail: int, head: int) -> tuple[Layer, ...]:
        behind, length = self._met(tail, head)
        known = max(behind.values())
        layers: list[Layer] = []
        nodes = {tail}
        for depth in range(1, length + 1):
            rest = length - depth
            # Near the head only what is as near as it must be; before that, any switch.
            layer = tuple(
                (number, node, dst)
                for node in sorted(nodes)
                for number, dst in self._leaving[node]
                if behind.get(dst) == rest or (rest > known and dst >= self._fabric.size)
            )
            layers.append(layer)
            nodes = {dst for _, _, dst in layer}
        for place in range(length - 1, 0, -1):
            begun = {src for _, src, _ in layers[place]}
            layers[place - 1] = tuple(link for link in layers[place - 1] if link[2] in begun)
        return tuple(layers)

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


def _onward(layers: Sequence[Layer], width: Sequence[Fraction]) -> list[dict[int, Fraction]]:
    """For every layer, how wide the widest way to the head is from each node where the layer begins."""
    onward: list[dict[int, Fraction]] = []
    for layer in reversed(layers):
        reach: dict[int, Fraction] = {}
        for number, src, dst in layer:
            wide = min(width[number], onward[-1][dst]) if onward else width[number]
            if src not in reach or wide > reach[src]:
                reach[src] = wide
        onward.append(reach)
    return onward[::-1]
