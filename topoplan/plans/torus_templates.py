"""Trees of a torus of servers by kind: templates on a server and its neighbours, the rule of their images, and loads.

A template goes through the dimensions in its own order, as dimension-ordered routing does. The server of the root sends
along the first dimension, so many steps ahead and so many back, which together reach every other server of its ring
once. All of these servers send along the second dimension, and so on. So a server forwards in the direction in which it
was entered, and begins all later dimensions.

The stages of a template are trees on the ranks of server 0 and of some of its neighbours (`ClusterByKind.sample`): the
edges inside server 0 are those of the root's server. The edges into and inside a neighbour are those of every server
that is entered in its direction, moved there. The images have the root on each server in turn: image x is the template
moved by the coordinates of server x. Every link of a class is a translation of every other, so all carry the same.

A template of an all-to-all (`TorusPaths`) is such a tree from one GPU of server 0, with the blocks on each edge. Every
other rank has its block along the path from the root to it. The images have the root on each server in turn. So a
source sends to a destination over the dimensions in the order of the arms, ahead or back as the arms say, and templates
of one source share the blocks of all of its destinations.

An edge carries the blocks of all ranks that are reached over it. These are counted from the last arm back. Let w be the
blocks that each GPU of a server must have, for itself and for the later arms, and let A be the matrix that moves blocks
from the GPUs of a server to those of the server before it, from which it is entered in some direction. Then a server s
steps before the end of an arm must have the sum of A^i w over i from 0 to s, and the servers of the arm of S steps
together the sum of (S - i) A^i w over i below S. Both sums are found by doubling, so the cost grows with the logarithm
of the sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError
from topoplan.machine.cluster_by_kind import ClusterSample
from topoplan.machine.fabric import Fabric
from topoplan.machine.torus import Direction, Torus
from topoplan.plans.file_values import read_list, read_whole
from topoplan.plans.shards import Edge, Shard, Stage


@dataclass(frozen=True, slots=True)
class Arm:
    """The servers of a ring on both sides of one of them: a dimension, and steps ahead and back."""

    dimension: int
    ahead: int
    back: int

    @property
    def directions(self) -> list[tuple[Direction, int]]:
        """The directions in which there is a step, with the number of steps."""
        both = ((Direction(self.dimension, 1), self.ahead), (Direction(self.dimension, -1), self.back))
        return [(direction, steps) for direction, steps in both if steps]


@dataclass(frozen=True, slots=True)
class TorusTemplate:
    """Trees of one part of the buffer of a torus of servers.

    ``share`` is the part of all images together, ``arms`` the dimensions in their order. ``stages`` are trees on the
    ranks of the sample.
    """

    share: Fraction
    arms: tuple[Arm, ...]
    stages: tuple[Stage, ...]


def entered_servers(torus: Torus, arms: Sequence[Arm]) -> dict[Direction, int]:
    """Return how many servers of an image are entered in each direction, by the arms of a template."""
    found: dict[Direction, int] = {}
    rings = 1
    for arm in arms:
        found |= {direction: rings * steps for direction, steps in arm.directions}
        rings *= torus.sides[arm.dimension]
    return found


def represented_in_torus(sample: ClusterSample, arms: Sequence[Arm]) -> dict[int, int]:
    """Return how many servers each server of the sample stands for in an image: server 0 for that of the root."""
    torus = sample.cluster.network.torus
    place = {number: server for server, number in enumerate(sample.numbers)}
    found = {place[0]: 1}
    for direction, count in entered_servers(torus, arms).items():
        found[place[torus.server(torus.offset(direction))]] = count
    return found


def arms_object(arms: Sequence[Arm]) -> list[object]:
    """Return the JSON rows of arms."""
    return [[arm.dimension, arm.ahead, arm.back] for arm in arms]


def arms_from_object(item: object, torus: Torus, where: str) -> tuple[Arm, ...]:
    """Read such rows; PlanError unless each dimension has one, and the steps reach every server of its ring once."""
    arms = []
    for row in read_list(item, f"{where}: arms"):
        numbers = [read_whole(one, f"{where}: arms") for one in read_list(row, f"{where}: an arm")]
        if len(numbers) != 3:
            raise PlanError(
                f"{where}: an arm must be [dimension, steps ahead, steps back], got {row!r}"[:200]
            )
        arms.append(Arm(*numbers))
    if sorted(arm.dimension for arm in arms) != list(range(len(torus.sides))):
        raise PlanError(f"{where}: each of {len(torus.sides)} dimensions must have one arm")
    for arm in arms:
        if min(arm.ahead, arm.back) < 0 or arm.ahead + arm.back != torus.sides[arm.dimension] - 1:
            raise PlanError(
                f"{where}: steps ahead and back in dimension {arm.dimension} must be 0 or more and add up to "
                f"{torus.sides[arm.dimension] - 1}, got {arm.ahead} and {arm.back}"
            )
    return tuple(arms)


@dataclass(frozen=True)
class TorusImages:
    """The images of one template as shards of the whole torus, made on request: one for each server."""

    sample: ClusterSample
    fabric: Fabric
    template: TorusTemplate

    @property
    def torus(self) -> Torus:
        """The servers by their coordinates."""
        return self.sample.cluster.network.torus

    @property
    def count(self) -> int:
        """Number of images."""
        return self.torus.servers

    @property
    def edges(self) -> int:
        """Number of edges of one image."""
        return (self.sample.cluster.size - 1) * len(self.template.stages)

    @property
    def share_each(self) -> Fraction:
        """Fraction of the buffer that one image carries."""
        return self.template.share / self.count

    @cached_property
    def _home(self) -> list[int]:
        return self.sample.servers_of(self.fabric.ranks)

    @cached_property
    def _stands(self) -> dict[int, int]:
        return represented_in_torus(self.sample, self.template.arms)

    def load(self, edge: Edge) -> Fraction:
        """Return what the images of one edge carry together: bytes for each byte of the buffer."""
        return self.template.share * self._stands[self._home[edge.child]]

    def steps(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Yield for each server of an image its server of the sample, itself, and the one that it is entered from.

        The root's server comes first, entered from itself, and every server comes behind the one that it is entered
        from.
        """
        torus = self.torus
        place = {one: server for server, one in enumerate(self.sample.numbers)}
        yield place[0], number, number
        reached = [number]
        for arm in self.template.arms:
            starts = list(reached)
            for direction, steps in arm.directions:
                offset = torus.offset(direction)
                entered = place[torus.server(offset)]
                for start in starts:
                    before = start
                    for _ in range(steps):
                        server = torus.moved(before, offset)
                        yield entered, server, before
                        reached.append(server)
                        before = server

    def shard(self, number: int) -> Shard:
        """Return one image as a shard of the whole torus, with its part of the share."""
        cluster, sample, home = self.sample.cluster, self.sample, self._home
        each = cluster.gpus_of_kind[cluster.cells[0].kind]
        first = {server: home.index(server) for server in range(len(sample.numbers))}
        found = list(self.steps(number))
        stages = []
        for stage in self.template.stages:
            into: dict[int, list[Edge]] = {}
            for edge in stage.edges:
                into.setdefault(home[edge.child], []).append(edge)
            edges = []
            for entered, server, before in found:
                for edge in into.get(entered, ()):
                    at = {0: before, sample.numbers[entered]: server}
                    parent = sample.numbers[home[edge.parent]]
                    edges.append(
                        Edge(
                            at[parent] * each + edge.parent - first[home[edge.parent]],
                            server * each + edge.child - first[entered],
                            tuple(_moved_name(device, at) for device in edge.route),
                            edge.channel,
                        )
                    )
            root = number * each + stage.root - first[home[stage.root]]
            made = Stage(stage.op, root, tuple(edges))
            stages.append(Stage(made.op, made.root, made.top_down()))
        return Shard(self.share_each, tuple(stages))

    @property
    def height(self) -> int:
        """Edges on the longest path from the root of an image to a rank, over all stages."""
        return max(self._stage_height(stage) for stage in self.template.stages)

    def _stage_height(self, stage: Stage) -> int:
        """Return the height of one stage of an image.

        The depth of each rank of a server depends only on the directions that led there. The greatest depths of all
        ranks of any server that is entered so follow one from the other, step by step.
        """
        sample, home, torus = self.sample, self._home, self.torus
        place = {one: server for server, one in enumerate(sample.numbers)}
        first = {server: home.index(server) for server in range(len(sample.numbers))}
        into: dict[int, list[tuple[int, int, bool]]] = {}
        for edge in stage.top_down():
            own, above = home[edge.child], home[edge.parent]
            into.setdefault(own, []).append(
                (edge.parent - first[above], edge.child - first[own], above != own)
            )
        ranks = sum(one == place[0] for one in home)

        def depths(server: int, before: Sequence[int]) -> list[int]:
            found = list(before) if server == place[0] else [0] * ranks
            for parent, child, other in into.get(server, ()):
                found[child] = (before if other else found)[parent] + 1
            return found

        deepest = depths(place[0], [0] * ranks)
        for arm in self.template.arms:
            starts, best = deepest, list(deepest)
            for direction, steps in arm.directions:
                server, here = place[torus.server(torus.offset(direction))], starts
                for _ in range(steps):
                    here = depths(server, here)
                    best = list(map(max, best, here))
            deepest = best
        return max(deepest)


def _moved_name(device: str, at: dict[int, int]) -> str:
    """Return a device's name on the server to which that of the sample is moved."""
    head, _, tail = device.partition(".")
    return f"s{at[int(head[1:])]}.{tail}"


Blocks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TorusPaths(TorusTemplate):
    """Paths from a GPU of a torus of servers to all other ranks, along the edges of a tree.

    ``share`` is the part of all blocks of all sources together that the images carry, and ``stages`` one broadcast.
    """


def blocks_on_edges(sample: ClusterSample, home: Sequence[int], template: TorusPaths) -> list[int]:
    """Return how many blocks of one image cross each edge of the template, on all servers for which it stands.

    ``home`` is the server of the sample of every rank. PlanError unless the edges are one tree that reaches
    every rank of the servers that the arms enter, from themselves or from server 0.
    """
    torus = sample.cluster.network.torus
    place = {number: server for server, number in enumerate(sample.numbers)}
    if len(template.stages) != 1:
        raise PlanError(f"paths of a torus must have one stage, got {len(template.stages)}")
    (stage,) = template.stages
    entered = represented_in_torus(sample, template.arms)
    outside = (edge for edge in stage.edges if home[edge.parent] not in (home[edge.child], place[0]))
    reached = {rank for rank, one in enumerate(home) if one in entered}
    if home[stage.root] != place[0] or stage.depths().keys() != reached or any(outside):
        raise PlanError("the tree of paths must reach each rank once, from its own server or from s0")
    ranks = {server: [rank for rank, one in enumerate(home) if one == server] for server in place.values()}
    first = {server: members[0] for server, members in ranks.items()}
    edges = {edge.child: edge for edge in stage.edges}
    gpus = len(ranks[place[0]])

    def before(server: int) -> Blocks:
        """Return the matrix that moves blocks to the server before, from whose GPU each is entered."""
        found = np.zeros((gpus, gpus), dtype=np.int64)
        for rank in ranks[server]:
            edge = edges[rank]
            while home[edge.parent] == server:
                edge = edges[edge.parent]
            found[edge.parent - first[place[0]], rank - first[server]] = 1
        return found

    wanted = np.ones(gpus, dtype=np.int64)
    every: dict[int, Blocks] = {}
    rings = torus.servers
    for arm in reversed(template.arms):
        rings //= torus.sides[arm.dimension]
        due = wanted
        for direction, steps in arm.directions:
            server = place[torus.server(torus.offset(direction))]
            moved = before(server)
            plain, weighted = _power_sums(moved, steps)
            every[server] = rings * ((steps * plain - weighted) @ wanted)
            due = due + moved @ plain @ wanted
        wanted = due
    every[place[0]] = wanted
    carried = dict.fromkeys(edges, 0)
    for server, blocks in every.items():
        for rank, many in zip(ranks[server], blocks.tolist(), strict=True):
            at = rank
            while at in edges and home[at] == server:
                carried[at] += many
                at = edges[at].parent
    return [carried[edge.child] for edge in stage.edges]


def _power_sums(matrix: Blocks, count: int) -> tuple[Blocks, Blocks]:
    """Return the sums of A^i, and of i A^i, over i below a count of 1 or more, by doubling."""
    one = np.eye(len(matrix), dtype=np.int64)
    power, plain, weighted, done = matrix, one, 0 * one, 1
    for bit in bin(count)[3:]:
        weighted = weighted + power @ (weighted + done * plain)
        plain = plain + power @ plain
        power, done = power @ power, 2 * done
        if bit == "1":
            plain, weighted = plain + power, weighted + done * power
            power, done = power @ matrix, done + 1
    return plain, weighted


@dataclass(frozen=True)
class TorusPathImages(TorusImages):
    """The images of one template of paths as shards of the whole torus, made on request: one for each pair of ranks."""

    template: TorusPaths
    _trees: dict[int, dict[int, Edge]] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """Number of images."""
        return self.torus.servers * (self.sample.cluster.size - 1)

    @property
    def edges(self) -> int:
        """Number of edges of one image, on average and rounded up."""
        return -(-sum(self._blocks) // (self.sample.cluster.size - 1))

    @property
    def share_each(self) -> Fraction:
        """Fraction of a rank's buffer that one image carries."""
        return self.template.share / self.torus.servers

    @cached_property
    def _blocks(self) -> list[int]:
        return blocks_on_edges(self.sample, self._home, self.template)

    @cached_property
    def _blocks_of(self) -> dict[Edge, int]:
        return dict(zip(self.template.stages[0].edges, self._blocks, strict=True))

    def load(self, edge: Edge) -> Fraction:
        """Return what the images of one edge carry together: bytes for each byte of the buffer."""
        return self.template.share * self._blocks_of[edge]

    def shard(self, number: int) -> Shard:
        """Return one image as a shard of the whole torus, with its part of a rank's buffer."""
        server, place = divmod(number, self.sample.cluster.size - 1)
        if server not in self._trees:
            # Paths of one source are asked for in sequence.
            self._trees.clear()
            (tree,) = TorusImages.shard(self, server).stages
            self._trees[server] = {edge.child: edge for edge in tree.edges}
        above = self._trees[server]
        (stage,) = self.template.stages
        each = self.sample.cluster.size // self.torus.servers
        source = server * each + stage.root - self._home.index(self._home[stage.root])
        at = place + (place >= source)
        path = []
        while at != source:
            path.append(above[at])
            at = above[at].parent
        return Shard(self.share_each, (Stage(stage.op, source, tuple(path[::-1])),))
