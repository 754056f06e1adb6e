"""The all-to-all of a torus of servers by kind: templates of paths along trees, the blocks on each edge, and images.

A template is a tree from one GPU of server 0, as in `topoplan.plans.torus_templates`. Every other rank has its block
along the path from the root to it. The images have the root on each server in turn. So a source sends to a destination
over the dimensions in the order of the arms, ahead or back as the arms say, and templates of one source share the
blocks of all of its destinations.

An edge carries the blocks of all ranks that are reached over it. These are counted from the last arm back. Let w be the
blocks that each GPU of a server must have, for itself and for the later arms, and let A be the matrix that moves blocks
from the GPUs of a server to those of the server before it, from which it is entered in some direction. Then a server s
steps before the end of an arm must have the sum of A^i w over i from 0 to s, and the servers of the arm of S steps
together the sum of (S - i) A^i w over i below S. Both sums are found by doubling, so the cost grows with the logarithm
of the sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError
from topoplan.machine.cluster_by_kind import ClusterSample
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.plans.torus_templates import TorusImages, TorusTemplate, represented_in_torus

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
