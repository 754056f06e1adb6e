"""Find one rank's rows in the images of a template of a torus of servers, for all images at once.

Image x has its root on server x (`topoplan.plans.torus_templates`). So the offset of a server from server x says how it
is entered: in the last arm of the template in whose dimension the offset is not 0, ahead if it is at most the steps
ahead. It sends on in the same direction if steps are left, and along all later arms. Edges are those of the sample at
each server that is entered so, moved there.

A rank has its own data before a stage unless it has added or received some in an earlier one.

Trees of one root (`topoplan.plans.torus_trees`) have one image, and one edge into each host.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from collectives.tables.template_part import EdgeRows, Flags, Numbers, RowKinds
from topoplan.machine.fabric import edge_channels
from topoplan.machine.torus import Direction
from topoplan.plans.kind_images import local_numbers
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.shards import Edge, Stage
from topoplan.plans.torus_templates import Arm, TorusTemplate
from topoplan.plans.torus_trees import TorusTree, TorusTreeImages

_NO_RANK = np.iinfo(np.int64).max


class TorusTemplatePart:
    """Rows of one rank in the images of one template of a torus."""

    def __init__(self, plan: PlanByKind, template: TorusTemplate, rank: int) -> None:
        self.template, self.rank, self.channels = template, rank, edge_channels(plan.channels)
        torus = plan.cluster.network.torus
        self.sides = np.array(torus.sides, dtype=np.int64)[:, None]
        self.count, self.each = torus.servers, plan.size // torus.servers
        self.home = plan.sample.servers_of(plan.fabric.ranks)
        self.local = local_numbers(self.home)
        self.server, self.gpu = divmod(rank, self.each)
        numbers = plan.sample.numbers
        self.ahead = {
            place: np.array(torus.between(0, number), dtype=np.int64)[:, None]
            for place, number in enumerate(numbers)
        }
        place = {number: one for one, number in enumerate(numbers)}
        self.origin = place[0]
        self.arms: list[tuple[Arm, int, int]] = []
        for arm in template.arms:
            ahead, back = (torus.offset(Direction(arm.dimension, step)) for step in (1, -1))
            self.arms.append((arm, place[torus.server(ahead)], place[torus.server(back)]))
        self.roots = self._coordinates(np.arange(self.count, dtype=np.int64))

    def _coordinates(self, servers: Numbers) -> Numbers:
        """Return coordinates of servers, (dimensions, M) int64."""
        return np.array(np.unravel_index(servers, tuple(self.sides[:, 0].tolist())), dtype=np.int64)

    def _rank(self, at: Numbers, gpu: int) -> Numbers:
        """Return the rank of a GPU on servers at some coordinates."""
        found: Numbers = np.ravel_multi_index(tuple(at), tuple(self.sides[:, 0].tolist()))
        return found * self.each + gpu

    def owners(self, collective: str) -> Numbers:
        """Return the rank by which the images are ordered."""
        stage = self.template.stages[-1 if collective == "reduce_scatter" else 0]
        return np.arange(self.count, dtype=np.int64) * self.each + self.local[stage.root]

    def rows(self, shard: NDArray[np.int32], kinds: RowKinds) -> Iterator[EdgeRows]:
        """Yield the rows of each edge, given the shard of every image."""
        here = np.broadcast_to(self._coordinates(np.array([self.server])), self.roots.shape)
        for number, stage in enumerate(self.template.stages):
            up = stage.op == "reduce"
            for edge, image, parent_at, child_at, is_child in self._edges(stage, here):
                parent, child = (
                    self._rank(at, self.local[end])
                    for at, end in ((parent_at, edge.parent), (child_at, edge.child))
                )
                parent_fresh = ~self._written(number, image, parent_at, self.local[edge.parent])
                if up:
                    lowest = self._lowest_child(stage, image, parent_at, self.local[edge.parent])
                    parent_fresh &= (parent == self.rank) | (child == lowest)
                else:
                    parent_fresh &= parent == image * self.each + self.local[stage.root]
                child_gpu = self.local[edge.child]
                child_fresh = ~self._written(number, image, child_at, child_gpu)
                child_fresh &= self._lowest_child(stage, image, child_at, child_gpu) == _NO_RANK
                yield kinds.of_edge(
                    shard[image],
                    parent if is_child else child,
                    stage=number,
                    channel=self.channels.index(edge.channel),
                    add=up,
                    is_child=is_child,
                    parent_fresh=parent_fresh,
                    child_fresh=child_fresh,
                )

    def _edges(self, stage: Stage, here: Numbers) -> Iterator[tuple[Edge, Numbers, Numbers, Numbers, bool]]:
        """Yield edges at the rank: images, coordinates of parent and child, and whether the rank is the child."""
        every = np.arange(self.count, dtype=np.int64)
        entered, _ = self._entered(every, here)
        for edge in stage.edges:
            own = self.home[edge.child]
            step = self.ahead[own] if self.home[edge.parent] != own else np.zeros_like(self.sides)
            if self.local[edge.child] == self.gpu:
                image = np.flatnonzero(entered == own)
                at = here[:, image]
                yield edge, image, (at - step) % self.sides, at, True
            if self.local[edge.parent] == self.gpu:
                image = np.flatnonzero(self._leads(edge, every, here))
                at = here[:, image]
                yield edge, image, at, (at + step) % self.sides, False

    def _entered(self, image: Numbers, at: Numbers) -> tuple[Numbers, Numbers]:
        """Return the server of the sample as which servers are entered, and the number of the arm, -1 for the root."""
        offset = (at - self.roots[:, image]) % self.sides
        place = np.full(len(image), self.origin, dtype=np.int64)
        last = np.full(len(image), -1, dtype=np.int64)
        for number, (arm, ahead, back) in enumerate(self.arms):
            steps = offset[arm.dimension]
            entered = np.where(steps <= arm.ahead, ahead, back)
            place, last = np.where(steps > 0, entered, place), np.where(steps > 0, number, last)
        return place, last

    def _leads(self, edge: Edge, image: Numbers, at: Numbers) -> Flags:
        """Return whether servers have the edge from their parent's GPU: inside, or to a server beyond."""
        own = self.home[edge.child]
        entered, last = self._entered(image, at)
        if self.home[edge.parent] == own:
            inside: Flags = entered == own
            return inside
        offset = (at - self.roots[:, image]) % self.sides
        found = np.zeros(len(image), dtype=np.bool_)
        for number, (arm, ahead, back) in enumerate(self.arms):
            steps, side = offset[arm.dimension], int(self.sides[arm.dimension, 0])
            if own == ahead and arm.ahead:
                found |= (number > last) | ((number == last) & (steps < arm.ahead))
            if own == back and arm.back:
                further = (steps > arm.ahead) & (side - steps < arm.back)
                found |= (number > last) | ((number == last) & further)
        return found

    def _lowest_child(self, stage: Stage, image: Numbers, at: Numbers, gpu: int) -> Numbers:
        """Return the lowest child of a GPU of servers; the highest number for none."""
        lowest = np.full(len(image), _NO_RANK, dtype=np.int64)
        for edge in stage.edges:
            if self.local[edge.parent] == gpu:
                own = self.home[edge.child]
                step = self.ahead[own] if self.home[edge.parent] != own else np.zeros_like(self.sides)
                child = self._rank((at + step) % self.sides, self.local[edge.child])
                lowest = np.where(self._leads(edge, image, at), np.minimum(lowest, child), lowest)
        return lowest

    def _written(self, number: int, image: Numbers, at: Numbers, gpu: int) -> Flags:
        """Return whether a GPU of servers has added or received data in an earlier stage."""
        found = np.zeros(len(image), dtype=np.bool_)
        for stage in self.template.stages[:number]:
            if stage.op == "reduce":
                found |= self._lowest_child(stage, image, at, gpu) < _NO_RANK
            else:
                found |= self._rank(at, gpu) != image * self.each + self.local[stage.root]
        return found


class TorusTreePart:
    """Rows of one rank in a tree of one root of a torus."""

    count = 1

    def __init__(self, plan: PlanByKind, template: TorusTree, rank: int) -> None:
        assert plan.root is not None, "a broadcast or reduce has a root"
        self.template, self.rank, self.root = template, rank, plan.root
        self.channels = edge_channels(plan.channels)
        self.images = TorusTreeImages(plan.cluster, plan.root, plan.sample, plan.fabric, template)

    def owners(self, collective: str) -> Numbers:
        """Return the rank by which the image is ordered."""
        return np.array([self.root], dtype=np.int64)

    def rows(self, shard: NDArray[np.int32], kinds: RowKinds) -> Iterator[EdgeRows]:
        """Yield the row of each edge at the rank, given the shard of the tree."""
        up = self.template.stages[0].op == "reduce"
        own, above = self.images.edges_from(self.rank), self.images.edge_into(self.rank)
        for edge in [*own, *([] if above is None else [above])]:
            lowest = self.images.edges_from(edge.parent)[0].child
            yield kinds.of_edge(
                shard,
                edge.parent if edge is above else edge.child,
                stage=0,
                channel=self.channels.index(edge.channel),
                add=up,
                is_child=edge is above,
                parent_fresh=(edge.parent == self.rank or edge.child == lowest)
                if up
                else edge.parent == self.root,
                child_fresh=not self.images.edges_from(edge.child),
            )
