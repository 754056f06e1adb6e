"""Find routes between ranks on demand: the widest by remaining capacity, or the least loaded so far.

A route passes no third rank. Two GPUs may have as many routes as pairs of NICs, or more than can be listed, so
routes are not listed: the links of the shortest ones are kept layer by layer, and the widest is found on them from
the far end. A large cluster has a million pairs of ranks, and a ring needs a route for a thousand of them.

`LeastLoaded` routes tree edges one after another. Two ranks may have several routes (planes of switches, parallel
rails), and a rank several possible parents. An edge takes the route whose fullest link stays emptiest, in bytes for
each byte of the buffer over GB/s; among equals the one with the fewest links, then the first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from copy import copy
from fractions import Fraction
from math import lcm

from topoplan.errors import InfeasibleError
from topoplan.machine.fabric import Arc, Fabric
from topoplan.plans.shards import Edge

Links = tuple[int, ...]

Layer = tuple[tuple[int, int, int], ...]
"""The links that shortest routes cross after the same number of others, as (link, its source, its destination).

Source and destination are states of the fabric's graph of routes."""


def edge_along(fabric: Fabric, op: str, parent: int, child: int, links: Links) -> Edge:
    """Return an edge of a tree whose data crosses these links, in this order."""
    start = child if op == "reduce" else parent
    route = (fabric.vertices[start], *(fabric.links[number].dst for number in links))
    return Edge(parent, child, route[::-1] if op == "reduce" else route, fabric.channel_of(links))


class DirectRoutes:
    """The routes of a fabric."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._leaving = fabric.route_graph.leaving()
        self._entering = fabric.route_graph.entering()
        self._known: dict[tuple[int, int], tuple[Layer, ...]] = {}

    def joined(self, tail: int, head: int) -> bool:
        """Return whether a route leads from one rank to the other."""
        return bool(self.layers(tail, head))

    def layers(self, tail: int, head: int) -> tuple[Layer, ...]:
        """Return the links of all routes of fewest links, in the order of crossing; () without a route."""
        if (tail, head) not in self._known:
            self._known[tail, head] = self._search(tail, head)
        return self._known[tail, head]

    def shortest(self, tail: int, head: int, width: Sequence[Fraction]) -> Links | None:
        """Return the route of fewest links with the widest narrowest link, the first by its links among equals.

        ``width`` gives the remaining capacity of each link, or any other measure.
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
        """Return each link's part of data striped over all routes of fewest links; {} without a route.

        Each node divides its data in proportion to the widths of the onward routes, given a width of every link.
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
        """Return the route with the widest narrowest link, among equals that of fewest links, then the first.

        Two searches start at the head: one for the width, as Dijkstra's with the narrowest link in place of the sum,
        and one for the fewest links over links at least as wide.
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
        """Return whether a route that is followed back from the head may continue from a node."""
        return node == head or (node != tail and node >= self._fabric.size)

    def _search(self, tail: int, head: int) -> tuple[Layer, ...]:
        behind, length = self._met(tail, head)
        known = max(behind.values())
        layers: list[Layer] = []
        nodes = {tail}
        for depth in range(1, length + 1):
            rest = length - depth
            # Near the head only nodes at the exact distance; before that, any switch.
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
        """Return the links from nodes near the head to it, and the length of a shortest route; 0 without a route.

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
    """Return for every layer the width of the widest route to the head from each node where the layer begins."""
    onward: list[dict[int, Fraction]] = []
    for layer in reversed(layers):
        reach: dict[int, Fraction] = {}
        for number, src, dst in layer:
            wide = min(width[number], onward[-1][dst]) if onward else width[number]
            if src not in reach or wide > reach[src]:
                reach[src] = wide
        onward.append(reach)
    return onward[::-1]


class LeastLoaded:
    """Chooses routes on a fabric and remembers their loads.

    DGX-1V has two NVLinks from GPU 0 to 3 and one from 1 to 3: the first two bytes go over the wide link.

    >>> import topoplan
    >>> routes = LeastLoaded(Fabric(topoplan.load("dgx-1v"), ("nvlink",)))
    >>> [routes.edge("broadcast", (0, 1), 3, Fraction(1)).parent for _ in range(3)]
    [0, 0, 1]
    """

    def __init__(self, fabric: Fabric) -> None:
        self._arcs: dict[tuple[int, int], list[Arc]] = {}
        for arc in fabric.arcs:
            self._arcs.setdefault((arc.tail, arc.head), []).append(arc)
        self._fabric = fabric
        self._routes = DirectRoutes(fabric)
        self._load = [Fraction(0)] * len(fabric.links)
        self._share = Fraction(0)
        self._unit = 1
        self._room: list[int] = []
        whole = lcm(*(capacity.numerator for capacity in fabric.capacity))
        self._slowness = [int(whole / capacity) for capacity in fabric.capacity]

    def emptied(self) -> LeastLoaded:
        """Return another one on the same fabric without loads."""
        other = copy(self)
        other._load = [Fraction(0)] * len(self._load)
        other._share, other._room = Fraction(0), []
        return other

    def joined(self, tail: int, head: int) -> bool:
        """Return whether a route leads from one rank to the other without passing a third."""
        return (tail, head) in self._arcs

    def edge(self, op: str, parents: Iterable[int], child: int, share: Fraction) -> Edge:
        """Return the edge of a reduce or broadcast tree to a child from one of the parents.

        InfeasibleError if none of them is `joined` with the child in the direction of the data.
        """
        parents = tuple(parents)
        down = op == "broadcast"
        pairs = [(parent, child) if down else (child, parent) for parent in parents]
        choices = [arc for pair in pairs for arc in self._arcs.get(pair, ())]
        if not choices:
            ranks = self._fabric.ranks
            names = " or ".join(ranks[parent] for parent in parents)
            raise InfeasibleError(
                f"no wire leads {'from' if down else 'to'} {names} {'to' if down else 'from'} {ranks[child]} but "
                "through another GPU; use a schedule without that hop, or other channels"
            )
        if not self._fabric.lists_every_route:
            room = self._room_for(share)
            searched = [self._routes.widest(*pair, room) for pair in pairs if self.joined(*pair)]
            choices = [self._fabric.arc(links) for links in searched if links is not None]
        best = (
            choices[0]
            if len(choices) == 1
            else min(choices, key=lambda arc: (self._fullest(arc, share), arc.hops))
        )
        for number in best.links:
            self._load[number] += share
            if self._room:
                self._room[number] = self._room_of(number)
        if down:
            return Edge(best.tail, child, best.route, best.channel)
        return Edge(best.head, child, best.route[::-1], best.channel)

    def _room_for(self, share: Fraction) -> list[int]:
        """Return the free capacity of every link under another share, cached for the next edge.

        Values are negative whole numbers in the order of capacity over load, which compare faster than fractions.
        """
        if share != self._share or not self._room:
            self._share = share
            self._unit = lcm(share.denominator, *(load.denominator for load in self._load))
            self._room = [self._room_of(number) for number in range(len(self._load))]
        return self._room

    def _room_of(self, number: int) -> int:
        return -int((self._load[number] + self._share) * self._unit) * self._slowness[number]

    def _fullest(self, arc: Arc, share: Fraction) -> Fraction:
        return max((self._load[number] + share) / self._fabric.capacity[number] for number in arc.links)
