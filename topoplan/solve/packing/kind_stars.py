"""Search for the cheapest tree between the servers of a cluster by kind, the column of its packing program.

It is priced on the sample: the cheapest local root in each cell for each centre; for each leaf the cheaper of a star to
all its servers and an entry that sends to the others; for each pod without the centre the cheaper of stars to its
leaves and an entry that sends to them. What the roles are is said by `topoplan.plans.kind_templates`.

`KindStars.spanning` finds the cheapest of all trees with given roles, which may enter a server, and the root's too, at
some of its GPUs: an arborescence over the ranks of the sample, whose edges cost as much as their child stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from topoplan.machine.cluster_by_kind import ClusterSample, ServerPlace
from topoplan.machine.fabric_structure import FabricServers
from topoplan.plans.kind_templates import (
    KindTemplate,
    LeafGroups,
    centre_allowed,
    entry_allowed,
    needed_shifts,
    represented,
)
from topoplan.plans.minimum_trees import UNREACHABLE, cheapest_arborescence


@dataclass(frozen=True, slots=True)
class Join:
    """How one rank reaches the ranks of servers: edges (parent, child), and local roots above the tree of their server.

    ``cost`` counts every edge, and every tree below a local root, once for each server that is represented.
    """

    cost: int
    edges: tuple[tuple[int, int], ...]
    roots: tuple[int, ...]

    @staticmethod
    def of(cost: int, parts: Sequence[Join]) -> Join:
        """Return the parts as one, at their cost together."""
        edges = (edge for part in parts for edge in part.edges)
        return Join(cost, tuple(edges), tuple(root for part in parts for root in part.roots))


class _Roles(NamedTuple):
    """The roles of servers of the sample, as in `KindTemplate`."""

    root: int
    centre: int
    entries: tuple[int, ...] = ()
    pod_entries: tuple[int, ...] = ()


class _Way(NamedTuple):
    """A way to servers during the search: its cost, parts, and the roles with the entries of these parts."""

    cost: int
    parts: tuple[Join, ...]
    roles: _Roles


@dataclass(frozen=True, slots=True)
class Star:
    """A tree between servers on the sample, without the tree below its root."""

    roles: _Roles
    join: Join

    def template(self, sample: ClusterSample) -> KindTemplate:
        """Return the roles as a template without stages, of share 1."""
        root, centre, entries, pod_entries = self.roles
        shifts = needed_shifts(sample, *self.roles)
        return KindTemplate(Fraction(1), root, centre, entries, shifts, (), pod_entries)


@dataclass(frozen=True)
class StarCosts:
    """Costs of trees under lengths: ``near[u, v]`` of an edge, ``inside`` of the tree over a server from each rank.

    ``ways`` are known cheapest ways from a rank to a server, and ``through`` those to a leaf through its entry, by the
    servers for which each of its servers stands.
    """

    near: NDArray[np.int64]
    inside: NDArray[np.int64]
    ways: dict[tuple[int, int], Join] = field(default_factory=dict)
    through: dict[tuple[int, tuple[tuple[int, int], ...]], Join] = field(default_factory=dict)


class KindStars:
    """Searches for the cheapest tree between servers, from each rank of one server of each cell.

    ``most_images`` limits the images of a tree, None for any number; ``left_out`` says whether that ruled out a tree.
    ``roots_are_centres`` leaves out trees with a centre beside the root.
    """

    def __init__(self, sample: ClusterSample, servers: FabricServers) -> None:
        self.sample = sample
        self.cells, self.places = sample.cluster.cells, sample.places
        self.members: list[list[int]] = [each.tolist() for each in servers.members]
        self.home: list[int] = servers.of_rank.tolist()
        self._at = {place: number for number, place in enumerate(self.places)}
        self._leaf = [sample.leaf_of(server) for server in range(len(self.places))]
        self._pod = [sample.pod_of(server) for server in range(len(self.places))]
        self._stands: dict[_Roles, dict[int, int]] = {}
        self._shared: dict[_Roles, list[tuple[list[int], bool]]] = {}
        self._beside: dict[tuple[_Roles, int], tuple[tuple[int, int], ...]] = {}
        self._spanned: dict[_Roles, tuple[list[int], NDArray[np.bool_], NDArray[np.object_]]] = {}
        self._permitted: dict[tuple[_Roles, int], bool] = {}
        self.most_images: int | None = None
        self.left_out = False
        self.roots_are_centres = False

    def at(self, cell: int, leaf: int, position: int) -> int:
        """Return the server of the sample at a place."""
        return self._at[ServerPlace(cell, leaf, position)]

    def stands(self, roles: _Roles) -> dict[int, int]:
        """Return how many servers each server of the sample stands for."""
        if roles not in self._stands:
            root, centre, entries, pod_entries = roles
            template = KindTemplate(Fraction(0), root, centre, entries, 1, (), pod_entries)
            self._stands[roles] = represented(self.sample, template)
        return self._stands[roles]

    @staticmethod
    def alone(root: int) -> _Roles:
        """Return the roles of a tree in which the root's server alone sends to others."""
        return _Roles(root, root)

    def roles(self, costs: StarCosts, root: int, rank: int) -> list[_Roles]:
        """Return for every centre the roles without entries, and with those of its cheapest star."""
        found: dict[_Roles, None] = {}
        for centre in self.centres(root):
            found.setdefault(_Roles(root, centre))
            star = self.star(costs, root, rank, centre)
            if star is not None:
                found.setdefault(star.roles)
        return list(found)

    def spanning(self, near: NDArray[np.int64], roles: _Roles, rank: int) -> Join | None:
        """Return the cheapest of all trees with these roles from a rank of the root's server, as edges alone.

        ``near[u, v]`` is the cost of an edge. None if the tree does not reach some rank.
        """
        if roles not in self._spanned:
            stands = self.stands(roles)
            servers = sorted(stands)
            may = np.array([[self._may_send(roles, one, to) for one in servers] for to in servers])
            ranks = [member for server in servers for member in self.members[server]]
            place = np.array([servers.index(self.home[one]) for one in ranks])
            times = np.array([stands[self.home[one]] for one in ranks], dtype=object)
            self._spanned[roles] = ranks, may[np.ix_(place, place)], times
        ranks, allowed, times = self._spanned[roles]
        cost = near[np.ix_(ranks, ranks)].T.astype(object) * times[:, None]
        none = int(UNREACHABLE) * int(times.max())
        cost[~(allowed & (near[np.ix_(ranks, ranks)].T < UNREACHABLE))] = none
        rows: list[list[int]] = cost.tolist()
        parents = cheapest_arborescence(rows, ranks.index(rank))
        edges = [(up, child) for child, up in enumerate(parents) if up >= 0]
        price = sum(rows[child][up] for up, child in edges)
        if price >= none:
            return None
        return Join(price, tuple((ranks[up], ranks[child]) for up, child in edges), ())

    def _may_send(self, roles: _Roles, sender: int, server: int) -> bool:
        """Return whether a server may send to another: root and centre to all, entries to their leaf or pod."""
        if sender in (server, roles.root, roles.centre):
            return True
        if sender in roles.pod_entries and self._pod[sender] == self._pod[server]:
            return True
        return sender in roles.entries and self._leaf[sender] == self._leaf[server]

    def _few(self, roles: _Roles) -> bool:
        """Return whether trees with these roles have at most ``most_images`` images."""
        if self.most_images is None:
            return True
        servers = self.cells[self.places[roles.root].cell].servers
        few = servers * needed_shifts(self.sample, *roles) <= self.most_images
        self.left_out = self.left_out or not few
        return few

    def _allowed(self, roles: _Roles, entry: int) -> bool:
        """Return whether the last one of the entries may be one beside the others."""
        if (roles, entry) not in self._permitted:
            allowed = entry_allowed(self.sample, roles.root, roles.centre, entry, roles.pod_entries)
            self._permitted[roles, entry] = allowed
        return self._permitted[roles, entry] and self._few(roles)

    def centres(self, root: int) -> Iterator[int]:
        """Yield a server of the sample for every relation of a centre to the root, the root itself first."""
        return (centre for centre in self._centres(root) if self._few(_Roles(root, centre)))

    def _centres(self, root: int) -> Iterator[int]:
        yield root
        if self.roots_are_centres:
            return
        here = self.places[root]
        home = self.cells[here.cell]
        for number, cell in enumerate(self.cells):
            if cell.leaf_class != home.leaf_class:
                if centre_allowed(self.sample, root, self.at(number, 0, 0)):
                    yield self.at(number, 0, 0)
                continue
            if number != here.cell or cell.count > 1:
                yield self.at(number, here.leaf, int(number == here.cell))
            if cell.leaves_in_pod > 1:
                yield self.at(number, 1, 0)
            if cell.pods > 1:
                yield self.at(number, cell.leaves_in_pod, 0)

    def joined(self, costs: StarCosts, tail: int, server: int) -> Join:
        """Return the cheapest way from a rank to all ranks of a server: one local root, or an edge to each rank."""
        if (tail, server) not in costs.ways:
            costs.ways[tail, server] = self._joined(costs, tail, server)
        return costs.ways[tail, server]

    def _joined(self, costs: StarCosts, tail: int, server: int) -> Join:
        members = self.members[server]
        place = self.members[self.home[tail]].index(tail)
        order = [members[(place + step) % len(members)] for step in range(len(members))]
        best = min(order, key=lambda rank: costs.near[tail, rank] + costs.inside[rank])
        one = Join(int(costs.near[tail, best] + costs.inside[best]), ((tail, best),), (best,))
        every = sum(int(costs.near[tail, rank]) for rank in members)
        if every < one.cost:
            return Join(every, tuple((tail, rank) for rank in members), ())
        return one

    def star(
        self, costs: StarCosts, root: int, rank: int, centre: int, limit: int = int(UNREACHABLE)
    ) -> Star | None:
        """Return the cheapest tree between servers from a centre.

        ``rank`` is the centre's rank if the centre is the root; else the data comes from the best rank of the root's
        server to the best one of the centre. None if some server is out of reach, or no tree costs less than ``limit``.
        """
        if centre == root:
            return self._from(costs, root, rank, root, rank, limit)
        best: Star | None = None
        for middle in self.members[centre]:
            gateway = min(self.members[root], key=lambda one: (costs.near[one, middle], one))
            start = int(costs.near[gateway, middle] + costs.inside[middle])
            if start >= limit:
                continue
            found = self._from(costs, root, gateway, centre, middle, limit - start)
            if found is not None and (best is None or found.join.cost + start < best.join.cost):
                limit = found.join.cost + start
                first = Join(start, ((gateway, middle),), (middle,))
                best = Star(found.roles, Join.of(limit, (first, found.join)))
        return best

    def cheapest(self, costs: StarCosts, root: int) -> Star | None:
        """Return the cheapest tree between servers, from any rank of the root's server or through any centre."""
        best: Star | None = None
        for centre in self.centres(root):
            # A centre elsewhere has its data from the best rank, so one start is enough.
            for rank in self.members[root] if centre == root else self.members[root][:1]:
                limit = int(UNREACHABLE) if best is None else best.join.cost
                star = self.star(costs, root, rank, centre, limit)
                if star is not None and (best is None or star.join.cost < best.join.cost):
                    best = star
        return best

    def _from(
        self, costs: StarCosts, root: int, gateway: int, centre: int, rank: int, limit: int
    ) -> Star | None:
        # All trees are looked at while some may have too many images, as ``left_out`` says whether one does.
        limit = limit if self.most_images is None else int(UNREACHABLE)
        way = _Way(0, (), _Roles(root, centre))
        pods: dict[tuple[int, int], list[tuple[list[int], bool]]] = {}
        for leaf in self._leaves(way.roles):
            pods.setdefault(self._pod[leaf[0][0]], []).append(leaf)
        for pod, leaves in pods.items():
            # The root's gateway may send too, to its own leaf and, if the centre is in another pod, to its own pod.
            both = (rank, gateway) if gateway != rank and pod == self._pod[root] else (rank,)
            apart = pod != self._pod[centre]
            best = way
            for servers, shared in leaves:
                beside = apart or self._leaf[servers[0]] == self._leaf[root]
                best = self._to_leaf(costs, both if beside else (rank,), best, servers, shared)
            for entry in (server for servers, _ in leaves for server in servers) if apart else ():
                best = self._through(costs, both, way, entry, best)
            way = best
            if way.cost >= limit:
                return None
        return Star(way.roles, Join.of(way.cost, way.parts))

    def _leaves(self, roles: _Roles) -> list[tuple[list[int], bool]]:
        """Return the servers without a role by their leaves, the centre's first, and whether an entry may serve it."""
        if roles not in self._shared:
            stands = self.stands(roles)
            groups = LeafGroups(self.sample, roles.root, roles.centre, roles.pod_entries)
            marked = {roles.root, roles.centre, *roles.entries}
            middle = {self._leaf[one] for one in (roles.centre, *roles.entries)}
            found: dict[tuple[int, int], list[int]] = {}
            others = [server for server in stands if server not in marked]
            for server in sorted(others, key=lambda one: self._leaf[one] != self._leaf[roles.centre]):
                found.setdefault(self._leaf[server], []).append(server)
            self._shared[roles] = [
                (
                    servers,
                    leaf not in middle
                    and (
                        len(servers) > 1
                        or stands[servers[0]] > groups.size(self.cells[self.places[servers[0]].cell], leaf[1])
                    ),
                )
                for leaf, servers in found.items()
            ]
        return self._shared[roles]

    def _to_leaf(
        self, costs: StarCosts, senders: Sequence[int], way: _Way, servers: Sequence[int], shared: bool
    ) -> _Way:
        """Return a way with the cheapest one to a leaf: a star, or through an entry if that is cheaper.

        ``shared`` says whether an entry may serve it.
        """
        stands = self.stands(way.roles)
        star = [self._nearest(costs, senders, server) for server in servers]
        cost = sum(one.cost * stands[server] for one, server in zip(star, servers, strict=True))
        best: tuple[Join, _Roles] | None = None
        for entry in servers if shared else ():
            made = way.roles._replace(entries=(*way.roles.entries, entry))
            if self._allowed(made, entry):
                leaf = self._leaf_of(made, entry)
                for sender in senders:
                    entered = self._entered(costs, sender, leaf)
                    if entered.cost < cost:
                        cost, best = entered.cost, (entered, made)
        if best is None:
            return _Way(way.cost + cost, (*way.parts, *star), way.roles)
        return _Way(way.cost + cost, (*way.parts, best[0]), best[1])

    def _leaf_of(self, roles: _Roles, entry: int) -> tuple[tuple[int, int], ...]:
        """Return the servers of an entry's leaf, itself first, with the number that each stands for."""
        if (roles, entry) not in self._beside:
            stands, leaf = self.stands(roles), self._leaf[entry]
            marked = (*roles.entries, roles.root, roles.centre)
            self._beside[roles, entry] = (
                (entry, stands[entry]),
                *(
                    (server, count)
                    for server, count in stands.items()
                    if self._leaf[server] == leaf and server not in marked
                ),
            )
        return self._beside[roles, entry]

    def _nearest(self, costs: StarCosts, senders: Sequence[int], server: int) -> Join:
        best = self.joined(costs, senders[0], server)
        for sender in senders[1:]:
            other = self.joined(costs, sender, server)
            best = other if other.cost < best.cost else best
        return best

    def _entered(self, costs: StarCosts, sender: int, leaf: tuple[tuple[int, int], ...]) -> Join:
        """Return the cheapest way to a leaf through its first server, which sends to the others."""
        if (sender, leaf) not in costs.through:
            (entry, count), *rest = leaf
            found: list[tuple[int, int]] = []
            for local in self.members[entry]:
                below = sum(self.joined(costs, local, server).cost * number for server, number in rest)
                found.append((int(costs.near[sender, local] + costs.inside[local]) * count + below, local))
            cost, local = min(found, key=lambda one: one[0])
            parts = (self.joined(costs, local, server) for server, _ in rest)
            costs.through[sender, leaf] = Join.of(cost, (Join(0, ((sender, local),), (local,)), *parts))
        return costs.through[sender, leaf]

    def _through(
        self, costs: StarCosts, senders: Sequence[int], before: _Way, entry: int, best: _Way
    ) -> _Way:
        """Return the cheaper of a known way with the leaves of a pod, and one through an entry of the pod."""
        roles = before.roles
        made = roles._replace(entries=(*roles.entries, entry), pod_entries=(*roles.pod_entries, entry))
        if not self._allowed(made, entry):
            return best
        count = self.stands(made)[entry]
        leaves = [leaf for leaf in self._leaves(made) if self._pod[leaf[0][0]] == self._pod[entry]]
        for local in self.members[entry]:
            sender = min(senders, key=lambda one: costs.near[one, local])
            cost = int(costs.near[sender, local] + costs.inside[local]) * count
            first = Join(cost, ((sender, local),), (local,))
            way = _Way(before.cost + cost, (*before.parts, first), made)
            for servers, shared in leaves:
                if way.cost >= best.cost:
                    break
                way = self._to_leaf(costs, (local, *senders), way, servers, shared)
            if way.cost < best.cost:
                best = way
        return best
