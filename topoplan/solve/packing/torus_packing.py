"""Pack trees of a torus of equal servers by kind, on one server and its neighbours.

A column of the program (`topoplan.solve.packing.kind_program`) is a template (`topoplan.plans.torus_templates`). Under
lengths of the classes of links, entering a server and reaching its GPUs costs c(d) in direction d, whatever server it
is: that is a cheapest arborescence from the GPUs of the server before. An arm of dimension k, of n servers, costs its
steps in both directions; let a be that cost. In an order of dimensions every arm is repeated on all servers of the
earlier ones, so by exchange of neighbours the cheapest order is that of falling a / (n - 1).

With one GPU in each server and links as fast in both directions, this is the greedy algorithm for the bases of a
graphic matroid, and the packing is optimal for any sides and rates. Steps are even on both sides first; arms of other
splits are tried only if these miss the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import InfeasibleError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Device, Link, Topology
from topoplan.machine.torus import Direction
from topoplan.plans.build import stage_order
from topoplan.plans.certificates.kind_lengths import IN_TORUS
from topoplan.plans.kind_templates import ClassCrossings
from topoplan.plans.minimum_trees import UNREACHABLE, cheapest_arborescence
from topoplan.plans.plan import collective_name
from topoplan.plans.shards import Edge, Stage
from topoplan.plans.torus_templates import Arm, TorusTemplate
from topoplan.solve.packing.kind_program import Proof, Solution, TemplateColumn, TreeProgram
from topoplan.solve.packing.packing_program import rounded_lengths
from topoplan.solve.route_table import arcs_to
from topoplan.solve.symmetry.symmetry_search import find_symmetry

STARS, EVEN = 1, 2
"""Heights that stand for arms with as many steps on both sides, or one more on one of them; with `STARS` a server is
also entered at one GPU, which sends to all others, or at each GPU."""


def check_torus(cluster: ClusterByKind, collective: str) -> None:
    """Raise InfeasibleError unless a collective is planned by kind on a torus."""
    if collective not in IN_TORUS:
        names = ", ".join(map(collective_name, IN_TORUS))
        raise InfeasibleError(
            f"plans of a torus by kind are of {names}, got {collective_name(collective)}; plan the listed cluster "
            "instead"
        )
    if cluster.cells[0].servers != cluster.servers:
        raise InfeasibleError(
            f"the servers of a torus must be equal in a plan by kind, got {len(cluster.kinds)} kinds; plan the listed "
            "cluster instead"
        )


class TorusPacking(TreeProgram):
    """Column generation of trees in a torus; the height is `STARS`, `EVEN`, or None for trees and arms of any form."""

    def inner_symmetries(self) -> list[NDArray[np.int64]]:
        """Return permutations of the devices of a server that keep its cables, on all servers of the sample at once."""
        cluster, fabric = self.sample.cluster, self.fabric
        if cluster.gpus_of_kind[cluster.cells[0].kind] < 2:
            return []
        kind = cluster.kinds[cluster.cells[0].kind]
        cables = [f"cable{port.number}" for port in kind.ports]
        wires = [
            link
            for port, cable in zip(kind.ports, cables, strict=True)
            for link in (
                Link(port.sender, cable, "network", port.out),
                Link(cable, port.receiver, "network", port.back),
            )
            if link.bandwidth
        ]
        devices = (
            *(replace(device, server="s0") for device in kind.devices),
            *(Device(one, "switch") for one in cables),
        )
        alone = Fabric(Topology("one server", devices, (*kind.links, *wires)).settled(), fabric.channels)
        place = {name: number for number, name in enumerate(fabric.nodes)}
        found = []
        for each in find_symmetry(alone):
            moved = {name: alone.nodes[image] for name, image in zip(alone.nodes, each, strict=True)}
            if any(moved.get(cable, cable) != cable for cable in cables):
                continue
            lifted = []
            for name in fabric.nodes:
                server, _, device = name.partition(".")
                lifted.append(place.get(f"{server}.{moved.get(device, device)}", -1))
            permutation = np.array(lifted, dtype=np.int64)
            if self._keeps_links(permutation):
                found.append(permutation)
        return found

    def _keeps_links(self, permutation: NDArray[np.int64]) -> bool:
        """Return whether a permutation maps every link to one as fast."""
        nodes, index, capacity = self.fabric.nodes, self.fabric.link_index, self.fabric.capacity
        if sorted(permutation.tolist()) != list(range(len(nodes))):
            return False
        image = {name: nodes[place] for name, place in zip(nodes, permutation.tolist(), strict=True)}
        for (src, dst), number in index.items():
            other = index.get((image[src], image[dst]))
            if other is None or capacity[other] != capacity[number]:
                return False
        return True

    def plain_lengths(self) -> Iterator[list[int]]:
        """Yield lengths of 1 for the links into, or out of, GPUs and servers, and for cables of some dimensions."""
        torus, links = self.sample.cluster.network.torus, self.fabric.links
        ranks = set(self.fabric.ranks)
        server = {device.name: device.server for device in self.fabric.topology.devices}
        cables: dict[int, set[int]] = {}
        gpus: tuple[set[int], set[int]] = (set(), set())
        for link, row in zip(links, self.rows, strict=True):
            if server[link.src] != server[link.dst]:
                ends = [int(server[end][1:]) for end in (link.src, link.dst)]
                dimension = next(one for one, steps in enumerate(torus.between(*ends)) if steps)
                cables.setdefault(dimension, set()).add(row)
            else:
                gpus[0].update({row} if link.dst in ranks else ())
                gpus[1].update({row} if link.src in ranks else ())
        for chosen in product((False, True), repeat=len(cables)):
            crossed: set[int] = set()
            for (_, rows), taken in zip(sorted(cables.items()), chosen, strict=True):
                crossed |= rows if taken else set()
            for inner in (set[int](), *gpus):
                if crossed or inner:
                    yield [int(row in crossed | inner) for row in range(len(self.counts))]

    def lowest(self, root: int | None, every: Iterable[Sequence[int]]) -> Proof | None:
        """Return the lowest bound of some lengths, and of their sums with those of the ways back.

        An all_reduce backwards is one too. So if links are as fast both ways, best lengths are equal both ways, but
        those of a program need not be.
        """
        index = self.fabric.link_index
        back = [0] * len(self.counts)
        for (src, dst), link in index.items():
            back[self.rows[link]] = self.rows[index.get((dst, src), link)]
        both = (
            each
            for lengths in every
            for each in (lengths, [one + lengths[other] for one, other in zip(lengths, back, strict=True)])
        )
        return super().lowest(root, both)

    def heights(self, solution: Solution[TemplateColumn]) -> Iterable[int]:
        return (STARS, EVEN)

    def cheapest(self, lengths: Sequence[int], height: int | None) -> list[TemplateColumn]:
        pricing = _Pricing(self, rounded_lengths(lengths), stars=height == STARS)
        arms = pricing.arms(even=height is not None)
        crossings = ClassCrossings(self.sample, self.fabric, self.rows)
        found = []
        for rank, _ in self.owners:
            template = TorusTemplate(Fraction(1), arms, pricing.stages(rank, arms))
            usage = crossings.of(template)
            found.append(
                TemplateColumn(rank, tuple(usage.get(row, 0) for row in range(len(self.counts))), template)
            )
        return found


class TorusRoutes:
    """Shortest routes between ranks of server 0 and its neighbours, under lengths of the rows."""

    def __init__(self, program: TorusPacking, lengths: Sequence[int]) -> None:
        self.program = program
        self.torus = program.sample.cluster.network.torus
        orbits, fabric = program.orbits, program.fabric
        of_link = np.array(lengths, dtype=np.int64)[program.rows]
        distance, self._last = orbits.search(of_link[orbits.link_of_arc], np.arange(fabric.size))
        self._reach: NDArray[np.int64] = np.where(distance < 0, UNREACHABLE, distance)[:, : fabric.size]
        self._place = {number: server for server, number in enumerate(program.sample.numbers)}

    def cost(self, op: str, parent: int, child: int) -> int:
        """Return the length of the route of an edge, `UNREACHABLE` or more if it has none."""
        tail, head = (parent, child) if op == "broadcast" else (child, parent)
        return int(self._reach[tail, head])

    def members(self, direction: Direction | None) -> list[int]:
        """Return the ranks of server 0, or of its neighbour in a direction."""
        number = 0 if direction is None else self.torus.server(self.torus.offset(direction))
        return self.program.members[self._place[number]]

    def edge(self, op: str, parent: int, child: int) -> Edge:
        """Return the edge along a shortest route."""
        tail, head = (parent, child) if op == "broadcast" else (child, parent)
        fabric, graph = self.program.fabric, self.program.fabric.route_graph
        arcs = arcs_to(head, self._last[tail], graph.ends)
        arc = fabric.arc(tuple([graph.links[one] for one in arcs]))
        route = arc.route if op == "broadcast" else arc.route[::-1]
        return Edge(parent, child, route, arc.channel)


class _Pricing(TorusRoutes):
    """Cheapest trees inside server 0 and into its neighbours."""

    def __init__(self, program: TorusPacking, lengths: Sequence[int], *, stars: bool) -> None:
        super().__init__(program, lengths)
        self.stars = stars
        self.order = stage_order(program.collective)
        self.costs: dict[Direction, int] = {}
        self._parents: dict[tuple[str, Direction], list[tuple[int, int]]] = {}
        for op, direction in product(self.order, self.torus.directions):
            pairs = self._into(op, direction)
            self._parents[op, direction] = pairs
            cost = sum(self.cost(op, parent, child) for parent, child in pairs)
            self.costs[direction] = min(self.costs.get(direction, 0) + cost, int(UNREACHABLE))

    def _into(self, op: str, direction: Direction) -> list[tuple[int, int]]:
        """Return parent and child of the edges of a cheapest arborescence from server 0 over a neighbour."""
        home, there = self.members(None), self.members(direction)
        nearest = self._nearest(op, home, there)
        rows = [
            [self.cost(op, above, child) for child, above in zip(there, nearest, strict=True)],
            *([self.cost(op, parent, child) for child in there] for parent in there),
        ]
        size = len(there) + 1
        if self.stars:
            entered = range(size - 1)
            each = sum(rows[0])
            costs = [rows[0][one] + sum(rows[one + 1][:one] + rows[one + 1][one + 1 :]) for one in entered]
            if each < min(costs):
                return list(zip(nearest, there, strict=True))
            entry = costs.index(min(costs))
            return [
                (nearest[one] if one == entry else there[entry], child) for one, child in enumerate(there)
            ]
        # One row for each head; vertex 0 stands for server 0.
        cost = [[int(UNREACHABLE)] * size]
        cost += [[rows[tail][head] for tail in range(size)] for head in range(size - 1)]
        parents = cheapest_arborescence(cost, 0)
        return [
            (nearest[child] if above == 0 else there[above - 1], there[child])
            for child, above in enumerate(parents[1:])
        ]

    def _nearest(self, op: str, home: Sequence[int], there: Sequence[int]) -> list[int]:
        """Return for each rank of a neighbour the first of the nearest ranks of server 0."""
        costs = [[self.cost(op, rank, child) for rank in home] for child in there]
        return [home[row.index(min(row))] for row in costs]

    def arms(self, *, even: bool) -> tuple[Arm, ...]:
        """Return the cheapest arms and order; ``even`` allows only one step more on one side than on the other."""
        found: list[tuple[Fraction, int, Arm]] = []
        for dimension, side in enumerate(self.torus.sides):
            ahead, back = (self.costs[Direction(dimension, step)] for step in (1, -1))
            if min(ahead, back) >= UNREACHABLE:
                raise InfeasibleError(
                    f"a server reaches none of its neighbours in dimension {dimension}; plan the listed cluster instead"
                )
            less, more = (side - 1) // 2, side // 2
            splits = [(more, less), (less, more), *([] if even else [(side - 1, 0), (0, side - 1)])]
            best = min(splits, key=lambda split: split[0] * ahead + split[1] * back)
            cost = best[0] * ahead + best[1] * back
            found.append((-Fraction(cost, side - 1), dimension, Arm(dimension, *best)))
        return tuple(arm for _, _, arm in sorted(found, key=lambda one: one[:2]))

    def stages(self, rank: int, arms: Sequence[Arm]) -> tuple[Stage, ...]:
        """Return the trees of a root on server 0 with some arms."""
        stages = []
        home = self.members(None)
        for op in self.order:
            cost = [[self.cost(op, tail, head) for tail in home] for head in home]
            at = home.index(rank)
            star = [-1 if one == at else at for one in range(len(home))]
            parents = star if self.stars else cheapest_arborescence(cost, at)
            pairs = [(home[above], child) for child, above in zip(home, parents, strict=True) if above >= 0]
            for arm in arms:
                for direction, _ in arm.directions:
                    pairs += self._parents[op, direction]
            if any(self.cost(op, *pair) >= UNREACHABLE for pair in pairs):
                raise InfeasibleError(
                    "trees of a torus by kind need links inside a server that connect its GPUs; plan the listed "
                    "cluster instead"
                )
            edges = tuple(self.edge(op, parent, child) for parent, child in pairs)
            stages.append(Stage(op, rank, Stage(op, rank, edges).top_down()))
        return tuple(stages)
