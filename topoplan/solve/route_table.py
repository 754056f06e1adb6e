"""Compute shortest routes between all ranks from a few, under lengths that a group of symmetries keeps.

Lengths that are equal on every orbit of links look the same from every rank of an orbit of ranks. One search from
one rank of each orbit gives the distances and routes of all: those of rank g(r) are the images under g of those of
rank r. Without symmetries that is one search from every rank.

All searches relax all links together (Bellman 1958) until nothing changes, which takes as many steps as the longest
route has links: few, since other ranks do not forward. Among equally long routes the one of fewest links is taken,
then the one whose last device is nearest, then the one whose last device comes first, as in Dijkstra's search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import link_orbits
from topoplan.machine.permutation_groups import (
    LARGEST_TABLE,
    CommutingGroup,
    Elements,
    all_elements,
    components,
    orbits,
)
from topoplan.machine.topology import physical_memory
from topoplan.plans.minimum_trees import UNREACHABLE
from topoplan.units import format_size

BYTES_PER_PAIR = 60
"""Memory that packing takes for every pair of ranks: at least the amount that was measured with 8192."""


MOST_IN_TABLES = 2048
"""Ranks up to which distances stand in a table of all pairs."""

FEW_JOINED = 32
"""Distances of more ranks are kept by pair if routes join at most one pair in so many."""


@dataclass(frozen=True)
class FabricOrbits:
    """A fabric's ranks and links up to the symmetries of a group.

    ``generators`` are automorphisms, as permutations of `Fabric.nodes`; none for no symmetry. ``folded`` counts both
    directions of a wire as one orbit, for trees that are used both ways. No route passes the first ``ends_of_routes``
    ranks; None stands for all ranks.
    """

    fabric: Fabric
    generators: tuple[tuple[int, ...], ...] = ()
    folded: bool = False
    ends_of_routes: int | None = None

    @cached_property
    def _arrays(self) -> list[NDArray[np.int64]]:
        return [np.array(generator, dtype=np.int64) for generator in self.generators]

    @cached_property
    def elements(self) -> Elements:
        """(order, nodes) int32: all elements of the group, the identity first."""
        size = len(self.fabric.nodes)
        if not self.generators:
            return np.arange(size, dtype=np.int32)[None, :]
        found = all_elements(self._arrays, max(self.fabric.size, LARGEST_TABLE // size))
        assert found is not None, "symmetries are chosen so that their group can be listed"
        return found

    @cached_property
    def rank_orbit(self) -> NDArray[np.int64]:
        """(N,) int64: the first rank of the orbit of every rank."""
        size = self.fabric.size
        return np.asarray(orbits(len(self.fabric.nodes), self._arrays)[:size], dtype=np.int64)

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of every orbit."""
        return tuple(np.unique(self.rank_orbit).tolist())

    @cached_property
    def rank_counts(self) -> tuple[int, ...]:
        """Number of ranks in every orbit, in the order of `first_ranks`."""
        return tuple(np.unique(self.rank_orbit, return_counts=True)[1].tolist())

    @cached_property
    def row_of_link(self) -> NDArray[np.int64]:
        """(links,) int64: the orbit of every link, numbered from 0 in the order of their first links."""
        labels = link_orbits(self.fabric, self._arrays)
        if self.folded:
            number = {ends: place for place, ends in enumerate(self.fabric.ends)}
            backwards = np.array([number[d, s] for s, d in self.fabric.ends])
            labels = components(len(labels), labels, labels[backwards])[labels]
        return np.asarray(np.unique(labels, return_inverse=True)[1], dtype=np.int64)

    @cached_property
    def row_counts(self) -> NDArray[np.int64]:
        """(rows,) int64: number of links in every orbit."""
        return np.bincount(self.row_of_link)

    @cached_property
    def tails(self) -> NDArray[np.int64]:
        """(arcs,) int64: the source state of every arc of the fabric's graph of routes."""
        return np.array([src for src, _ in self.fabric.route_graph.ends], dtype=np.int64)

    @cached_property
    def search(self) -> ShortestRoutes:
        closed = self.fabric.size if self.ends_of_routes is None else self.ends_of_routes
        graph = self.fabric.route_graph
        ends = np.array(graph.ends, dtype=np.int64).reshape(-1, 2)
        return ShortestRoutes(ends, ranks=closed, nodes=len(graph.nodes))

    @cached_property
    def link_of_arc(self) -> NDArray[np.int64]:
        """(arcs,) int64: the link that every arc of the fabric's graph of routes crosses."""
        return np.array(self.fabric.route_graph.links, dtype=np.int64)

    @cached_property
    def mover(self) -> NDArray[np.int64]:
        """(N,) int64: an element that takes the first rank of its orbit to this rank."""
        mover = np.full(self.fabric.size, -1, dtype=np.int64)
        for first in self.first_ranks:
            images = self.elements[:, first]
            ranks, numbers = np.unique(images, return_index=True)
            mover[ranks] = numbers
        return mover

    @cached_property
    def seen_from_first(self) -> NDArray[np.int64]:
        """(N, N) int64: entry [u, v] is the rank that looks from the first rank of u's orbit as v does from u.

        This is the first table that grows with the square of the ranks: memory is estimated before it is made.
        """
        size = self.fabric.size
        check_pairs(size)
        table = np.empty((size, size), dtype=np.int64)
        columns = np.arange(size)
        for row, element in zip(table, self.mover.tolist(), strict=True):
            row[self.elements[element, :size]] = columns
        return table

    def seen(self, tails: NDArray[np.int64], heads: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each pair the rank that looks from the first rank of the tail's orbit as the head does from it."""
        elements = self.elements
        if isinstance(elements, CommutingGroup):
            return elements.preimages(self.mover[tails], heads).astype(np.int64)
        return self.seen_from_first[tails, heads]

    def spread(self, distance: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N, N) int64: distances between all ranks from those of the first ranks, (first ranks, N) with -1 for none.

        Entries are `UNREACHABLE` if no route exists, and on the diagonal.
        """
        table = np.where(distance < 0, UNREACHABLE, distance)
        table[np.arange(len(table)), self.first_ranks] = UNREACHABLE
        place = np.searchsorted(self.first_ranks, self.rank_orbit)
        return np.asarray(table[place[:, None], self.seen_from_first])


def arcs_to(
    state: int, last: Sequence[int] | NDArray[np.int32], ends: Sequence[tuple[int, int]] | NDArray[np.int64]
) -> list[int]:
    """Return the arcs of the shortest route to a state: ``last`` has the last arc to every state, -1 at its start."""
    found: list[int] = []
    while (arc := int(last[state])) >= 0:
        found.append(arc)
        state = int(ends[arc][0])
    return found[::-1]


def check_pairs(size: int) -> None:
    """Raise UsageError if the memory is too small for tables of all pairs of ranks."""
    needed, allowed = BYTES_PER_PAIR * size * size, physical_memory() // 2
    if needed > allowed:
        raise UsageError(
            f"packing trees of {size:,} GPUs takes about {format_size(needed)} of memory; this machine can give "
            f"{format_size(allowed)}; choose fewer GPUs"
        )


@dataclass(frozen=True, eq=False)
class SparseCosts:
    """Costs between the few pairs of ``size`` ranks that routes join, ascending by head and then by tail."""

    size: int
    tails: NDArray[np.int64]
    heads: NDArray[np.int64]
    costs: NDArray[np.int64]

    @staticmethod
    def of(
        size: int, tails: NDArray[np.int64], heads: NDArray[np.int64], costs: NDArray[np.int64]
    ) -> SparseCosts:
        """Return these costs in order; the pairs differ."""
        order = np.lexsort((tails, heads))
        return SparseCosts(size, tails[order], heads[order], costs[order])

    @cached_property
    def T(self) -> SparseCosts:
        """The costs of the ways back, named as those of an array."""
        return SparseCosts.of(self.size, self.heads, self.tails, self.costs)

    @property
    def symmetric(self) -> bool:
        """Whether every cost equals that of the way back."""
        back = self.T
        mine, theirs = (self.tails, self.heads, self.costs), (back.tails, back.heads, back.costs)
        return all(map(np.array_equal, mine, theirs))

    def __len__(self) -> int:
        return self.size

    def table(self) -> NDArray[np.int64]:
        """(size, size) int64: all costs, `UNREACHABLE` if no route joins a pair; UsageError if that is too large."""
        check_pairs(self.size)
        table = np.full((self.size, self.size), UNREACHABLE, dtype=np.int64)
        table[self.tails, self.heads] = self.costs
        return table


class RankRoutes(Protocol):
    """One route from rank to rank, for the edges of trees."""

    def usage(
        self, tails: NDArray[np.int64], heads: NDArray[np.int64], tree: NDArray[np.int64], trees: int
    ) -> NDArray[np.int64]:
        """(trees, rows) int64: crossings of each orbit of links by the routes from tails to heads, in every tree.

        ``tree`` gives for each route the number of its tree, below ``trees``.
        """
        ...

    def routes(self, tails: Sequence[int], heads: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the links of the route between each two ranks, as numbers of the fabric's links."""
        ...


@dataclass(frozen=True)
class DirectLinks:
    """Routes of one link each between ranks that links join; every link is a row."""

    fabric: Fabric

    def usage(
        self, tails: NDArray[np.int64], heads: NDArray[np.int64], tree: NDArray[np.int64], trees: int
    ) -> NDArray[np.int64]:
        # See `RankRoutes`.
        usage = np.zeros((trees, len(self.fabric.links)), dtype=np.int64)
        routes = self.routes(tails.tolist(), heads.tolist())
        np.add.at(usage, (tree, np.array(routes, dtype=np.int64).ravel()), 1)
        return usage

    def routes(self, tails: Sequence[int], heads: Sequence[int]) -> list[tuple[int, ...]]:
        # See `RankRoutes`.
        return [(self.fabric.link_between[pair],) for pair in zip(tails, heads, strict=True)]


@dataclass(frozen=True)
class RouteTable:
    """Routes between all ranks that are shortest under one length, 0 or more, for every orbit of links."""

    orbits: FabricOrbits
    lengths: tuple[int, ...]

    @cached_property
    def _routes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """From each first rank: distance to every state (-1 if unreachable), and the last arc of the route there."""
        groups = self.orbits
        lengths = np.array(self.lengths, dtype=np.int64)[groups.row_of_link[groups.link_of_arc]]
        return groups.search(lengths, np.array(groups.first_ranks))

    @cached_property
    def cost(self) -> NDArray[np.int64]:
        """(N, N) int64: distance from rank to rank; `UNREACHABLE` if no route exists."""
        groups = self.orbits
        return groups.spread(self._routes[0][:, : groups.fabric.size])

    @cached_property
    def costs(self) -> NDArray[np.int64] | SparseCosts:
        """The same, or the few pairs of many ranks that routes join."""
        size = self.orbits.fabric.size
        distance = self._routes[0][:, :size]
        few = size > MOST_IN_TABLES and np.count_nonzero(distance >= 0) * FEW_JOINED <= distance.size
        return self._joined(distance) if few else self.cost

    def _joined(self, distance: NDArray[np.int64]) -> SparseCosts:
        groups, size = self.orbits, self.orbits.fabric.size
        tails, heads, costs = [], [], []
        for place, first in enumerate(groups.first_ranks):
            ranks = np.flatnonzero(groups.rank_orbit == first)
            for rank in np.flatnonzero(distance[place] >= 0).tolist():
                if rank != first:
                    tails.append(ranks)
                    heads.append(groups.elements[groups.mover[ranks], rank].astype(np.int64))
                    costs.append(np.full(len(ranks), distance[place, rank]))
        return SparseCosts.of(size, *map(np.concatenate, (tails, heads, costs)))

    def usage(
        self, tails: NDArray[np.int64], heads: NDArray[np.int64], tree: NDArray[np.int64], trees: int
    ) -> NDArray[np.int64]:
        groups = self.orbits
        place = np.searchsorted(groups.first_ranks, groups.rank_orbit[tails])
        rows = len(self.lengths)
        crossed = [
            rows * tree[routes] + groups.row_of_link[groups.link_of_arc[arcs]]
            for routes, arcs in self._steps(place, groups.seen(tails, heads))
        ]
        counted = np.bincount(np.concatenate([*crossed, np.zeros(0, dtype=np.int64)]), minlength=rows * trees)
        return counted.reshape(trees, rows)

    def route(self, tail: int, head: int) -> tuple[int, ...]:
        return self.routes([tail], [head])[0]

    def routes(self, tails: Sequence[int], heads: Sequence[int]) -> list[tuple[int, ...]]:
        groups, fabric = self.orbits, self.orbits.fabric
        if not groups.generators:
            return [tuple(self._links(tail, head)) for tail, head in zip(tails, heads, strict=True)]
        source = np.array(tails, dtype=np.int64)
        alike = groups.rank_orbit[source] * fabric.size + groups.seen(source, np.array(heads, dtype=np.int64))
        order = np.argsort(alike, kind="stable")
        found: list[tuple[int, ...]] = [()] * len(order)
        for places in np.split(order, np.flatnonzero(np.diff(alike[order])) + 1):
            path = self._links(*divmod(int(alike[places[0]]), fabric.size))
            ends = np.array([fabric.ends[number] for number in path], dtype=np.int64).ravel()
            movers = groups.mover[source[places]]
            images = groups.elements[movers[:, None], ends].reshape(len(places), -1, 2)
            for place, image in zip(places.tolist(), images.tolist(), strict=True):
                found[place] = tuple(fabric.link_between[pair[0], pair[1]] for pair in image)
        return found

    @cached_property
    def _last_links(self) -> dict[int, list[int]]:
        """From each first rank, the last arc of the route to every state."""
        return dict(zip(self.orbits.first_ranks, self._routes[1].tolist(), strict=True))

    def _links(self, first: int, rank: int) -> Sequence[int]:
        """Return the links of the route from a first rank to a rank."""
        graph = self.orbits.fabric.route_graph
        return [graph.links[arc] for arc in arcs_to(rank, self._last_links[first], graph.ends)]

    def _steps(
        self, place: NDArray[np.int64], states: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
        """Walk many routes back at once: yield at each step the unfinished ones and their arcs.

        ``place`` is each route's first rank, by position, and ``states`` its end.
        """
        via, tails = self._routes[1], self.orbits.tails
        routes = np.arange(len(states))
        while True:
            arcs = via[place[routes], states]
            on = arcs >= 0
            routes, arcs = routes[on], arcs[on]
            if not routes.size:
                return
            yield routes, arcs
            states = tails[arcs]


LONGEST = 1 << 31
"""Largest length of a link."""

_FAR = np.int64(1) << 61
_CACHED_PAIRS = 1 << 17
"""Starts times links of one part of a search."""

_HOPS = 16
"""Bits in which links are counted below the length."""


class ShortestRoutes:
    """Searches for routes over one set of links.

    ``ends``, of shape (links, 2), are source and destination of every link; no two links join the same nodes. Nodes
    below ``ranks`` are ranks; a route passes only through other nodes.
    """

    def __init__(self, ends: NDArray[np.int64], *, ranks: int, nodes: int) -> None:
        self._nodes = nodes
        self._order = np.lexsort((ends[:, 0], ends[:, 1]))
        self._tails, self._heads = ends[self._order].T
        self._entered, self._first = np.unique(self._heads, return_index=True)
        self._forwards = self._tails >= ranks
        self._keys = self._heads * nodes + self._tails

    def __call__(
        self, lengths: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return distances from some ranks to all nodes, and the last links of the routes there.

        ``lengths`` are from 0 to `LONGEST`; ``starts`` are ranks. Both results have shape (starts, nodes), with -1 if
        no route leads to the node.
        """
        if not self._forwards.any():
            return self._links(lengths, starts)
        # Starts are searched by parts whose tables fit into the processor's cache.
        part = max(1, _CACHED_PAIRS // len(self._order))
        if len(starts) > part:
            found = [self(lengths, starts[at : at + part]) for at in range(0, len(starts), part)]
            return np.concatenate([one for one, _ in found]), np.concatenate([one for _, one in found])
        nodes, tails, heads = self._nodes, self._tails, self._heads
        entered, first = self._entered, self._first
        weights = (lengths[self._order] << _HOPS) + 1
        passes = self._forwards | (tails == starts[:, None])
        reach = np.full((len(starts), nodes), _FAR)
        reach[np.arange(len(starts)), starts] = 0
        while True:
            through = np.where(passes, reach[:, tails], _FAR) + weights
            nearest = np.minimum.reduceat(through, first, axis=1)
            before = reach[:, entered]
            if not (nearest < before).any():
                break
            reach[:, entered] = np.minimum(before, nearest)
        none = np.iinfo(np.int64).max
        last = np.where(through == reach[:, heads], reach[:, tails] * nodes + tails, none)
        chosen = np.minimum.reduceat(last, first, axis=1)
        place = np.searchsorted(self._keys, entered * nodes + chosen % nodes)
        number = self._order[np.minimum(place, len(self._order) - 1)]
        via = np.full(reach.shape, -1, dtype=np.int32)
        via[:, entered] = np.where(chosen < none, number, -1)
        return np.where(reach < _FAR, reach >> _HOPS, -1), via

    def _links(
        self, lengths: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Search a graph in which no node forwards, so that every route is one link."""
        distance = np.full((len(starts), self._nodes), -1, dtype=np.int64)
        via = distance.astype(np.int32)
        place, link = np.nonzero(self._tails == starts[:, None])
        distance[place, self._heads[link]] = lengths[self._order[link]]
        via[place, self._heads[link]] = self._order[link]
        distance[np.arange(len(starts)), starts] = 0
        return distance, via
