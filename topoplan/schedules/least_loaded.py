"""Routes for tree edges that are chosen one after another, each where the links are least full so far.

Between two ranks there may be several routes (planes of switches, parallel rails), and a rank may hang below
several parents. An edge takes the one whose fullest link stays emptiest, in bytes for each byte of the buffer and
GB/s; of equals the one with the fewest links, then the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from fractions import Fraction
from math import lcm

from topoplan.errors import InfeasibleError
from topoplan.fabric.fabric import Arc, Fabric
from topoplan.plans.tree import Edge
from topoplan.schedules.rings.routes import Routes


class LeastLoaded:
    """Chooses routes on a fabric and remembers what they carry.

    Parameters
    ----------
    fabric : Fabric

    Examples
    --------
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
        self._routes = Routes(fabric)
        self._load = [Fraction(0)] * len(fabric.links)
        self._share = Fraction(0)
        self._unit = 1
        self._room: list[int] = []
        whole = lcm(*(capacity.numerator for capacity in fabric.capacity))
        self._slowness = [int(whole / capacity) for capacity in fabric.capacity]

    def emptied(self) -> LeastLoaded:
        """Another one on the same fabric, that carries nothing yet."""
        other = copy(self)
        other._load = [Fraction(0)] * len(self._load)
        other._share, other._room = Fraction(0), []
        return other

    def joined(self, tail: int, head: int) -> bool:
        """True where a route leads from one rank to the other without passing a third."""
        return (tail, head) in self._arcs

    def edge(self, op: str, parents: Iterable[int], child: int, share: Fraction) -> Edge:
        """The edge of a reduce or broadcast tree that hangs a child below one of the parents.

        Raises
        ------
        InfeasibleError
            None of them is `joined` with the child in the direction of the data.
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
        best = min(choices, key=lambda arc: (self._fullest(arc, share), arc.hops))
        for number in best.links:
            self._load[number] += share
            if self._room:
                self._room[number] = self._room_of(number)
        if down:
            return Edge(best.tail, child, best.route, best.channel)
        return Edge(best.head, child, best.route[::-1], best.channel)

    def _room_for(self, share: Fraction) -> list[int]:
        """How little every link would be filled by another share; kept for the next edge, which often has as much.

        Negative whole numbers in the order of capacity over load, which compare faster than fractions.
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
