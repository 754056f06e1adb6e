"""Trees of a broadcast or reduce on a torus of servers: templates on a small torus, and the rule that stretches them.

A server, or host, has ports that are cabled to those of its neighbours. The sample is a torus of the same hosts with
shorter sides. In a dimension of n hosts and m of the sample, coordinates count from the root: host 0 of the sample
stands for the root's, host 1 for those from 1 to n - m + 1, and host i above 1 for that at n - m + i. So the hosts of a
*block*, a product of such ranges, stand behind one host of the sample.

A host is entered in the direction in which the sample's is: from its own neighbour in the opposite direction, which is
in the same block or in the block of the sample's parent. Walking back in this direction leaves the block at its end,
towards the parent's block. As the sample's tree leads to its root without a cycle, so does the stretched one. The links
into all hosts of a block, and inside them, carry what the sample's link carries.

A host of several GPUs is entered once, and its tree leads on from there. The links inside it on the way out to the next
host differ along a block: a host inside sends on to its like, and one at an end to the next block (`stretched_loads`).

A broadcast is bounded by cuts (Edmonds 1973). The hosts that differ in some dimensions only are a *line*. All data
enters one that the root is not on: over its hosts times the ports of a host in the other dimensions. A smallest cut is
a line, as that of a Cayley digraph is a coset of a subgroup (Hamidoune, European Journal of Combinatorics 5, 1984), and
the line along the subgroup's own ports is at least as small. The sample has the least sides, 3 or more, with which its
lines bound the rate as those of the whole torus.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from math import prod

from topoplan.errors import InfeasibleError
from topoplan.machine.cluster_by_kind import ClusterByKind, ClusterSample
from topoplan.machine.fabric import Fabric
from topoplan.machine.torus import Offset, Torus
from topoplan.plans.loads import edge_links
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.units import exact

LEAST_SIDE = 3
"""Hosts of the sample in a dimension of as many or more, so that ahead and back lead to different ones."""

MOST_BLOCKS = 1024
"""Hosts of a sample up to which a torus is planned: some seconds."""


@dataclass(frozen=True, slots=True)
class TorusTree:
    """A tree of one part of the buffer on the ranks of the sample; ``stages`` is one broadcast or reduce."""

    share: Fraction
    stages: tuple[Stage, ...]


def servers_fault(cluster: ClusterByKind) -> str | None:
    """Return why a broadcast or reduce is not planned by kind on a torus of servers; None if it is."""
    kinds = len({kind for kind, _ in cluster.runs})
    if kinds > 1:
        return f"a broadcast or reduce on a torus is planned by kind on equal servers, got {kinds} kinds"
    if min(port_rates(cluster)) <= 0:
        return "a server of a torus must have ports in every dimension"
    return None


def port_rates(cluster: ClusterByKind) -> tuple[Fraction, ...]:
    """Return the GB/s that enter a server in each dimension of a torus, over the ports ahead and back together."""
    torus, near = cluster.network.torus, cluster.sample(1)
    found = [Fraction(0)] * len(torus.sides)
    for link in near.topology.links:
        ends = [near.numbers[near.server_of(end)] for end in (link.src, link.dst)]
        if ends[1] == 0 and ends[0] != 0:
            dimension = next(one for one, steps in enumerate(torus.between(*ends)) if steps)
            found[dimension] += exact(link.bandwidth)
    return tuple(found)


def line_rate(sides: Sequence[int], rates: Sequence[Fraction], along: Sequence[int]) -> Fraction:
    """Return the GB/s that enter a line along some dimensions, of hosts with ``rates`` in each dimension."""
    return prod(sides[one] for one in along) * sum(
        (rate for one, rate in enumerate(rates) if one not in along), Fraction(0)
    )


def narrowest_line(sides: Sequence[int], rates: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the dimensions of the line that the least bandwidth enters, the shortest one if several are."""
    many = range(len(sides))
    lines = (along for length in many for along in combinations(many, length))
    return min(lines, key=lambda along: line_rate(sides, rates, along))


def sample_sides(cluster: ClusterByKind) -> tuple[int, ...]:
    """Return the sides of the sample; InfeasibleError if it has more than `MOST_BLOCKS` hosts."""
    whole, rates = cluster.network.torus.sides, port_rates(cluster)
    least = line_rate(whole, rates, narrowest_line(whole, rates))
    sides = [min(LEAST_SIDE, side) for side in whole]
    while line_rate(sides, rates, line := narrowest_line(sides, rates)) < least:
        shorter = [one for one in line if sides[one] < whole[one]]
        sides[min(shorter, key=lambda one: sides[one])] += 1
        if prod(sides) > MOST_BLOCKS:
            break
    if prod(sides) > MOST_BLOCKS:
        raise InfeasibleError(
            f"a broadcast or reduce on a torus by kind needs a sample of at most {MOST_BLOCKS:,} hosts, got "
            f"{prod(sides):,} or more, as its ports differ in bandwidth; plan the listed cluster instead"
        )
    return tuple(sides)


def rooted_sample(cluster: ClusterByKind) -> ClusterSample:
    """Return the small torus on which trees of a root stand, that on ``s0``; InfeasibleError if there is none."""
    fault = servers_fault(cluster)
    if fault is not None:
        raise InfeasibleError(f"{fault}; plan the listed cluster instead")
    sides = sample_sides(cluster)
    network = replace(cluster.network, sides=sides)
    small = replace(cluster, runs=((cluster.runs[0][0], prod(sides)),), network=network)
    numbers = tuple(range(small.servers))
    return ClusterSample(small, small.listed(), tuple(map(small.place, numbers)), numbers)


@dataclass(frozen=True)
class TorusTreeImages:
    """The tree of one template as a shard of the whole torus, made on request."""

    cluster: ClusterByKind
    root: int
    sample: ClusterSample
    fabric: Fabric
    template: TorusTree

    @property
    def count(self) -> int:
        """Number of images."""
        return 1

    @property
    def edges(self) -> int:
        """Number of edges of the tree."""
        return self.cluster.size - 1

    @property
    def share_each(self) -> Fraction:
        """Fraction of the buffer that the tree carries."""
        return self.template.share

    def load(self, edge: Edge) -> Fraction:
        """Return what all links for which that of an edge stands carry together: bytes for each byte of the buffer."""
        small, whole = self._small, self.cluster.network.torus
        host = self.sample.numbers[self.sample.server_of(self.fabric.ranks[edge.child])]
        hosts = prod(
            side - fewer + 1 if at == 1 else 1
            for at, side, fewer in zip(small.coordinates(host), whole.sides, small.sides, strict=True)
        )
        return self.template.share * hosts

    @property
    def _small(self) -> Torus:
        return self.sample.cluster.network.torus

    @cached_property
    def _each(self) -> int:
        """GPUs of a server."""
        return self.fabric.size // self.sample.cluster.servers

    @cached_property
    def _into(self) -> dict[int, Edge]:
        """The edge into each rank of the sample but the root."""
        (stage,) = self.template.stages
        return {edge.child: edge for edge in stage.edges}

    @cached_property
    def _entries(self) -> dict[int, tuple[Offset, Edge]]:
        """For each server of the sample but the root's its offset from its parent, and the edge into it."""
        found: dict[int, tuple[Offset, Edge]] = {}
        for edge in self._into.values():
            ends = edge.parent // self._each, edge.child // self._each
            if ends[0] != ends[1]:
                found[ends[1]] = self._small.between(*ends), edge
        return found

    @cached_property
    def _inside(self) -> dict[int, list[int]]:
        """The children of each rank of the sample in its own server."""
        found: dict[int, list[int]] = {}
        for edge in self._into.values():
            if edge.parent // self._each == edge.child // self._each:
                found.setdefault(edge.parent, []).append(edge.child)
        return found

    def _stands(self, server: int) -> int:
        """Return the server of the sample that stands for one of the whole torus."""
        whole = self.cluster.network.torus
        here = whole.between(self.root // self._each, server)
        return self._small.server(_block(here, whole.sides, self._small.sides))

    def edge_into(self, rank: int) -> Edge | None:
        """Return the edge into a rank of the whole torus; None for the root."""
        if rank == self.root:
            return None
        each, whole = self._each, self.cluster.network.torus
        server, gpu = divmod(rank, each)
        at = self._stands(server)
        edge = self._into[at * each + gpu]
        above = edge.parent // each
        parent = server
        if above != at:
            # From 2 steps ahead on it is one back.
            offset = self._small.between(above, at)
            parent = whole.moved(server, [-ahead if ahead < 2 else 1 for ahead in offset])
        numbers = {f"s{above}": parent, f"s{at}": server}
        parts = (name.partition(".") for name in edge.route)
        names = tuple(f"s{numbers[head]}.{tail}" for head, _, tail in parts)
        return Edge(parent * each + edge.parent % each, rank, names, edge.channel)

    def edges_from(self, rank: int) -> list[Edge]:
        """Return the edges from a rank to its children, ascending."""
        torus, each = self.cluster.network.torus, self._each
        server, gpu = divmod(rank, each)
        children = [
            server * each + one % each for one in self._inside.get(self._stands(server) * each + gpu, ())
        ]
        for near in {torus.moved(server, torus.offset(one)) for one in torus.directions}:
            at = self._stands(near)
            if at in self._entries:
                children.append(near * each + self._entries[at][1].child % each)
        edges = (self.edge_into(one) for one in sorted(children))
        return [edge for edge in edges if edge is not None and edge.parent == rank]

    def shard(self, number: int) -> Shard:
        """Return the tree as a shard of the whole torus; its number is 0."""
        (stage,) = self.template.stages
        every = (self.edge_into(rank) for rank in range(self.cluster.size))
        made = Stage(stage.op, self.root, tuple(edge for edge in every if edge is not None))
        return Shard(self.share_each, (Stage(made.op, made.root, made.top_down()),))

    @property
    def height(self) -> int:
        """Edges on the longest path from the root to a rank.

        The way back from a server passes the blocks that the sample's does. It first passes a dimension from wherever
        the server is, and later from the end at which it came out.
        """
        whole, small, each = self.cluster.network.torus.sides, self._small, self._each
        (stage,) = self.template.stages
        entries, best, deep = self._entries, 0, dict.fromkeys(range(self.fabric.size), 0)
        for edge in stage.top_down():
            if edge.parent // each == edge.child // each:
                deep[edge.child] = deep[edge.parent] + 1
        for host in range(self.sample.cluster.servers):
            at, steps = host, max(deep[host * each + gpu] for gpu in range(each))
            # Whether the way stands at the end of its block that is farthest ahead; None for the host's own place.
            farthest: list[bool | None] = [None] * len(whole)
            while at in entries:
                offset, edge = entries[at]
                dimension = next(one for one, ahead in enumerate(offset) if ahead)
                ahead = offset[dimension] == 1
                long = small.coordinates(at)[dimension] == 1 and farthest[dimension] in (None, ahead)
                many = whole[dimension] - small.sides[dimension] + 1 if long else 1
                steps += many + (many - 1) * deep[at * each + edge.parent % each] + deep[edge.parent]
                farthest[dimension] = ahead
                at = edge.parent // each
            best = max(best, steps)
        return best


def stretched_loads(
    sample: ClusterSample, fabric: Fabric, whole: Torus, trees: Iterable[TorusTree]
) -> list[Fraction]:
    """Return for each link of the sample the most that a link for which it stands carries.

    Units are bytes for each byte of the buffer. The sides of the sample may be shorter than those of ``whole``.
    """
    small = sample.cluster.network.torus
    home = [sample.numbers[one] for one in sample.servers_of(fabric.ranks)]
    server = {name: sample.numbers[sample.server_of(name)] for name in fabric.nodes}
    found = [Fraction(0)] * len(fabric.links)
    # By link, dimension, whether ahead, and whether to a host of the same block.
    leaving: dict[tuple[int, int, bool, bool], Fraction] = {}

    def leaves(link: int, dimension: int, ahead: bool, like: bool, share: Fraction) -> None:
        key = link, dimension, ahead, like
        leaving[key] = leaving.get(key, Fraction(0)) + share

    for tree in trees:
        for stage in tree.stages:
            for edge in stage.edges:
                ends = home[edge.parent], home[edge.child]
                for link in edge_links(edge, stage.op, fabric):
                    src, dst = fabric.links[link].src, fabric.links[link].dst
                    if ends[0] == ends[1] or not server[src] == server[dst] == ends[0]:
                        found[link] += tree.share
                        continue
                    offset = small.between(*ends)
                    dimension = next(one for one, steps in enumerate(offset) if steps)
                    ahead = offset[dimension] == 1
                    leaves(link, dimension, ahead, False, tree.share)
                    src, dst = (f"s{ends[1]}.{name.partition('.')[2]}" for name in (src, dst))
                    leaves(fabric.link_index[src, dst], dimension, ahead, True, tree.share)
    for link, dimension in sorted({key[:2] for key in leaving}):
        at = small.coordinates(server[fabric.links[link].src])[dimension]
        many = whole.sides[dimension] - small.sides[dimension] + 1 if at == 1 else 1
        found[link] += max(
            sum((leaving.get((link, dimension, *one), Fraction(0)) for one in both), Fraction(0))
            for both in _neighbours_alike(many)
        )
    return found


def _neighbours_alike(hosts: int) -> list[tuple[tuple[bool, bool], tuple[bool, bool]]]:
    """Return, for the places in a block of so many hosts along a dimension, whether the next hosts are in it.

    Each place has the pairs (ahead, in the block) of both directions.
    """
    places = {(one < hosts - 1, one > 0) for one in range(min(hosts, 3))}
    return [((True, ahead), (False, back)) for ahead, back in sorted(places)]


def _block(place: Sequence[int], sides: Sequence[int], small: Sequence[int]) -> list[int]:
    """Return the coordinates of the sample's host that stands for that at a place from the root."""
    return [
        min(one, 1) if one <= side - fewer + 1 else one - side + fewer
        for one, side, fewer in zip(place, sides, small, strict=True)
    ]
