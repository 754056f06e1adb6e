"""Find one rank's edges in the images of a template of a plan by kind, for all images at once.

For every edge of the template the rank may be parent or child, as its server stands for one of the sample's. The other
end, and whether the rank is the lowest child of its parent, follow from the places of root, centre and entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.fabric import edge_channels
from topoplan.plans.kind_images import local_numbers
from topoplan.plans.kind_templates import (
    KindTemplate,
    beside_root,
    centre_of,
    entry_of,
    image_count,
    leaf_groups,
    represented,
)
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.shards import Edge, Stage

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]


def first_ranks(cluster: ClusterByKind) -> list[Numbers]:
    """Return the first rank of every server of each cell: leaf by position."""
    gpus = np.repeat(
        np.array([cluster.gpus_of_kind[kind] for kind, _ in cluster.runs]),
        np.array([count for _, count in cluster.runs]),
    )
    first = np.cumsum(gpus) - gpus
    found = []
    for cell in cluster.cells:
        leaves = []
        for leaf in range(cell.leaves):
            runs = cluster.leaf_runs(cluster.leaf_number(cell.leaf_class, leaf))
            leaves.append(
                np.concatenate([first[run.start : run.stop] for kind, run in runs if kind == cell.kind])
            )
        found.append(np.array(leaves, dtype=np.int64))
    return found


class _Reach(NamedTuple):
    """The servers at one end of an edge: in one leaf, in one pod, or anywhere."""

    leaf: Numbers | int | None = None
    pod: Numbers | int | None = None


_ANYWHERE = _Reach()

_NONE = np.zeros(0, dtype=np.int64)


class EdgeRows(NamedTuple):
    """Rows of a rank on one edge of a template, in several images.

    - ``shard``: (M,) int32; ``peer``: the other rank, (M,) int32 or one
    - ``kind``: what `RowKinds` says of the row, (M,) uint16 or one
    - ``stage``, whether the rank ``sends``, and whether it ``is_child``: the same for all

    A peer is one number only if no shard is repeated.
    """

    shard: NDArray[np.int32]
    peer: NDArray[np.int32] | int
    kind: NDArray[np.uint16] | int
    stage: int
    sends: bool
    is_child: bool

    def taken(self, flags: Flags) -> EdgeRows:
        """Return some of the rows."""
        peer = self.peer if isinstance(self.peer, int) else self.peer[flags]
        kind = self.kind if isinstance(self.kind, int) else self.kind[flags]
        return self._replace(shard=self.shard[flags], peer=peer, kind=kind)

    def columns(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint16]]:
        """Return shard, peer and kind of each row."""
        shape = self.shard.shape
        return (
            self.shard,
            np.broadcast_to(np.asarray(self.peer, dtype=np.int32), shape),
            np.broadcast_to(np.asarray(self.kind, dtype=np.uint16), shape),
        )


class RowKinds(NamedTuple):
    """The facts that many rows of a rank share, as one number: 10 bytes say all of a row.

    A kind is ((stage * channels + channel) * 2 + sends) * 8 + add * 4 + source_fresh * 2 + destination_fresh.
    """

    stages: int
    channels: int

    def of_edge(
        self,
        shard: NDArray[np.int32],
        peer: Numbers | int,
        *,
        stage: int,
        channel: int,
        add: bool,
        is_child: bool,
        parent_fresh: Flags | bool,
        child_fresh: Flags | bool,
    ) -> EdgeRows:
        """Return the rows of a rank that is child or parent on an edge."""
        source_fresh, destination_fresh = (child_fresh, parent_fresh) if add else (parent_fresh, False)
        sends = is_child == add
        kind: NDArray[np.uint16] | int = ((stage * self.channels + channel) * 2 + sends) * 8 + add * 4
        for flag, value in ((source_fresh, 2), (destination_fresh, 1)):
            kind = kind + flag * value if isinstance(flag, bool) else kind + flag * np.uint16(value)
        other = peer if isinstance(peer, int) else peer.astype(np.int32)
        return EdgeRows(shard, other, kind, stage, sends, is_child)

    def table(self) -> dict[str, NDArray[Any]]:
        """Return each fact by kind, (K,) arrays of the dtypes of a transfer table."""
        kind = np.arange(self.stages * self.channels * 16)
        ends = kind // 16
        return {
            "stage": (ends // self.channels).astype(np.int32),
            "channel": (ends % self.channels).astype(np.int8),
            "sends": kind // 8 % 2 > 0,
            "add": kind // 4 % 2 > 0,
            "source_fresh": kind // 2 % 2 > 0,
            "destination_fresh": kind % 2 > 0,
        }


class TemplatePart:
    """Rows of one rank in the images of one template, whose roles have ``places``."""

    def __init__(self, plan: PlanByKind, template: KindTemplate, places: RolePlaces, rank: int) -> None:
        self.template, self.places, self.rank = template, places, rank
        self.channels = edge_channels(plan.channels)
        self.count = places.count
        self.home = plan.sample.servers_of(plan.fabric.ranks)
        self.local = local_numbers(self.home)
        self.gpu = rank - places.own

    def owners(self, collective: str) -> Numbers:
        """Return the rank by which the images are ordered."""
        stage = self.template.stages[-1 if collective == "reduce_scatter" else 0]
        return self.places.roots + self.local[stage.root]

    def rows(self, shard: NDArray[np.int32], kinds: RowKinds) -> Iterator[EdgeRows]:
        """Yield the rows of each edge, given the shard of every image."""
        written: set[int] = set()
        for number, stage in enumerate(self.template.stages):
            parents = {edge.parent for edge in stage.edges}
            for edge in stage.edges:
                up = stage.op == "reduce"
                parent_fresh = edge.parent not in written and (up or edge.parent == stage.root)
                for image, peer, is_child, lowest in self.ends(stage, edge, ordered=up and parent_fresh):
                    yield kinds.of_edge(
                        shard[image],
                        peer,
                        stage=number,
                        channel=self.channels.index(edge.channel),
                        add=up,
                        is_child=is_child,
                        parent_fresh=lowest & parent_fresh,
                        child_fresh=edge.child not in written and edge.child not in parents,
                    )
            written |= parents if stage.op == "reduce" else {edge.child for edge in stage.edges}

    def ends(
        self, stage: Stage, edge: Edge, *, ordered: bool
    ) -> Iterator[tuple[Numbers, Numbers | int, bool, Flags | bool]]:
        """Yield image, other end, whether the rank is the child, and whether it is the lowest child of its parent.

        The last is looked up only if ``ordered`` and only for the rank's own parent.
        """
        places, above, below = self.places, self.home[edge.parent], self.home[edge.child]
        if above != below and places.stands[above] > 1 and above not in self.template.marked:
            raise PlanError("a server without a role of its own sends to another server")
        if self.local[edge.child] == self.gpu and len(image := places.images.get(below, _NONE)):
            lowest: Flags | bool = True
            if ordered:
                for other in stage.edges:
                    if other.parent == edge.parent:
                        child = places.lowest_below(above, below, self.home[other.child])
                        lowest = lowest & (child + self.local[other.child] >= self.rank)
            yield image, places.above(above, below) + self.local[edge.parent], True, lowest
        if self.local[edge.parent] == self.gpu and len(image := places.images.get(above, _NONE)):
            if above == below:
                yield image, places.own + self.local[edge.child], False, True
                return
            which, first = places.below(above, below)
            yield image[which], first + self.local[edge.child], False, True


class RolePlaces:
    """Places of the servers with roles of a template in all its images, as seen from the server of a rank.

    Templates that differ in the GPUs of their edges alone have the same places. Servers are returned as their first
    ranks; ``own`` is that of the rank's server.
    """

    def __init__(self, plan: PlanByKind, template: KindTemplate, first: list[Numbers], rank: int) -> None:
        self.template, self.sample, self.first = template, plan.sample, first
        self.count = image_count(plan.sample, template)
        self.stands = represented(plan.sample, template)
        cluster = plan.cluster
        self.cells, self.places = cluster.cells, plan.sample.places
        server, gpu = cluster.server_of(rank)
        self.place, self.own = cluster.place(server), rank - gpu
        # Leaf and position of the root, the centre, and (the leaf counted in its pod) the entries, of every image.
        number = np.arange(self.count, dtype=np.int64)
        cell = self.cells[self.places[template.root].cell]
        self.leaf, self.position = np.divmod(number // template.shifts, cell.count)
        self.centre_leaf, self.centre_position = centre_of(
            plan.sample, template, self.leaf, self.position, number
        )
        self.groups = leaf_groups(plan.sample, template)
        self.entered = {
            entry: entry_of(plan.sample, template, entry, self.leaf, self.position, number)
            for entry in template.entries
        }
        self._above: dict[tuple[int, int], tuple[Numbers, Numbers]] = {}
        self._lowest: dict[tuple[int, int, int], Numbers] = {}

    @cached_property
    def roots(self) -> Numbers:
        """The root's server of every image."""
        return self.first[self.places[self.template.root].cell][self.leaf, self.position]

    @cached_property
    def images(self) -> dict[int, Numbers]:
        """The images in which the rank's server is one of those for which each server of the sample stands."""
        every = np.arange(self.count)
        leaf, position = (np.full(self.count, value) for value in (self.place.leaf, self.place.position))
        return {
            server: np.flatnonzero(self.belongs(server, every, leaf, position))
            for server in self.stands
            if self.places[server].cell == self.place.cell
        }

    def above(self, above: int, below: int) -> Numbers:
        """Return the server above the rank's in the images in which that is ``below``."""
        leaf, position = self._one_above(above, below)
        return self.first[self.places[above].cell][leaf, position]

    def _one_above(self, above: int, below: int) -> tuple[Numbers, Numbers]:
        """Return leaf and position of the server above the rank's."""
        if (above, below) not in self._above:
            image = self.images[below]
            self._above[above, below] = (
                (np.full(len(image), self.place.leaf), np.full(len(image), self.place.position))
                if above == below
                else self.lowest(above, image, self.reach(above, below, below, self.place.leaf))
            )
        return self._above[above, below]

    def lowest_below(self, above: int, below: int, other: int) -> Numbers:
        """Return the lowest server for which ``other`` stands below that above the rank's."""
        if (above, below, other) not in self._lowest:
            leaf, position = self._one_above(above, below)
            if other != above:
                leaf, position = self.lowest(other, self.images[below], self.reach(above, other, above, leaf))
            self._lowest[above, below, other] = self.first[self.places[other].cell][leaf, position]
        return self._lowest[above, below, other]

    def below(self, above: int, below: int) -> tuple[NDArray[np.intp], Numbers]:
        """Return the servers below the rank's where that is ``above``: index into its images, and the server."""
        reach = self.reach(above, below, above, self.place.leaf)
        which, leaf, position = self.members(below, self.images[above], reach)
        return which, self.first[self.places[below].cell][leaf, position]

    def reach(self, above: int, below: int, known: int, leaf: Numbers | int) -> _Reach:
        """Return where the other end of an edge between two servers is, given the leaf of the known one.

        It is anywhere if the upper one is alone, else in the leaf if both share one, else in the pod.
        """
        if self.stands[above] == 1:
            return _ANYWHERE
        if self.sample.leaf_of(above) == self.sample.leaf_of(below):
            return _Reach(leaf=leaf)
        return _Reach(pod=leaf // self.cells[self.places[known].cell].leaves_in_pod)

    def held(self, cell: int, image: Numbers, leaf: Numbers) -> Flags:
        """Return whether leaves of a cell's class hold root or centre."""
        leaf_class, template = self.cells[cell].leaf_class, self.template
        found: Flags = np.zeros(np.broadcast(image, leaf).shape, dtype=np.bool_)
        for server, at in ((template.root, self.leaf), (template.centre, self.centre_leaf)):
            if self.cells[self.places[server].cell].leaf_class == leaf_class:
                found |= at[image] == leaf
        return found

    def grouped(self, server: int, image: Numbers, leaf: Numbers) -> Flags:
        """Return whether leaves without root and centre are in pods placed like that of a server of the sample."""
        cell, template = self.cells[self.places[server].cell], self.template
        found = ~self.held(self.places[server].cell, image, leaf)
        entry = self.groups.entry_beside(cell, self.places[server].leaf)
        if entry is not None:
            beside = self.entered[entry][0][image] == leaf % cell.leaves_in_pod
            found = found & (beside if self.groups.entered(server) is not None else ~beside)
        pods = {self.sample.pod_of(one): one for one in (template.centre, template.root)}
        one = pods.pop(self.sample.pod_of(server), None)
        if one is not None:
            there: Flags = found & (self.pod(one)[image] == leaf // cell.leaves_in_pod)
            return there
        for (pod_class, _), one in pods.items():
            if pod_class == cell.pod_class:
                found = found & (self.pod(one)[image] != leaf // cell.leaves_in_pod)
        return found

    def pod(self, server: int) -> Numbers:
        """Return the pod of root or centre in every image."""
        leaf = self.leaf if server == self.template.root else self.centre_leaf
        return leaf // self.cells[self.places[server].cell].leaves_in_pod

    def marked_at(self, server: int, image: Numbers, leaf: Numbers) -> tuple[Numbers, Flags]:
        """Return the position of a marked server in leaves of its class, and whether it has one there."""
        template = self.template
        if server == template.root:
            return self.position[image], self.leaf[image] == leaf
        if server == template.centre:
            return self.centre_position[image], self.centre_leaf[image] == leaf
        near = beside_root(self.sample, template, server)
        there: Flags = self.leaf[image] == leaf if near else self.grouped(server, image, leaf)
        return self.entered[server][1][image], there

    def belongs(self, server: int, image: Numbers, leaf: Numbers, position: Numbers) -> Flags:
        """Return whether a server of the sample stands for places of its cell."""
        if server in self.template.marked:
            at, there = self.marked_at(server, image, leaf)
            here: Flags = there & (at == position)
            return here
        cell = self.places[server].cell
        slot = self.slot(server)
        found: Flags = self.grouped(server, image, leaf) if slot is None else slot[image] == leaf
        for marked in self.template.marked:
            if self.places[marked].cell == cell:
                at, there = self.marked_at(marked, image, leaf)
                found = found & ~(there & (at == position))
        return found

    def first_pod(self, server: int, image: Numbers) -> Numbers:
        """Return the first pod of leaves for which a server of the sample stands."""
        template, (pod_class, _) = self.template, self.sample.pod_of(server)
        pods = {self.sample.pod_of(one): one for one in (template.centre, template.root)}
        own = pods.get(self.sample.pod_of(server))
        if own is not None:
            return self.pod(own)[image]
        found = np.zeros(len(image), dtype=np.int64)
        held = [self.pod(one)[image] for (of, _), one in pods.items() if of == pod_class]
        for _ in held:
            found = found + np.any([one == found for one in held], axis=0)
        return found

    def slot(self, server: int) -> Numbers | None:
        """Return the leaf of a server of the sample, which root or centre has in every image, or None."""
        at, template = self.sample.leaf_of(server), self.template
        if at == self.sample.leaf_of(template.centre):
            return self.centre_leaf
        return self.leaf if at == self.sample.leaf_of(template.root) else None

    def alone(self, server: int) -> Numbers | None:
        """Return the only leaf with servers for which one of the sample stands, by image, or None for several."""
        if server == self.template.root:
            return self.leaf
        return self.slot(server)

    def members(
        self, server: int, image: Numbers, reach: _Reach
    ) -> tuple[NDArray[np.intp], Numbers, Numbers]:
        """Return the places for which a server of the sample stands: index into ``image``, leaf, position."""
        cell = self.cells[self.places[server].cell]
        alone = self.alone(server)
        if reach.leaf is not None:
            leaf = np.full((len(image), 1), reach.leaf)
        elif alone is not None:
            leaf = alone[image][:, None]
        else:
            size = cell.leaves_in_pod
            first, leaves = (0, cell.leaves) if reach.pod is None else (reach.pod * size, size)
            leaf = np.tile(first + np.arange(leaves), (len(image), 1))
        if server in self.template.marked:
            position, there = self.marked_at(server, image[:, None], leaf)
            which, column = np.nonzero(there)
            return which, leaf[which, column], np.broadcast_to(position, leaf.shape)[which, column]
        positions = np.arange(cell.count)
        there = self.belongs(server, image[:, None, None], leaf[:, :, None], positions)
        which, column, position = np.nonzero(np.broadcast_to(there, (*leaf.shape, cell.count)))
        return which, leaf[which, column], position

    def lowest(self, server: int, image: Numbers, reach: _Reach) -> tuple[Numbers, Numbers]:
        """Return leaf and position of the lowest server for which one of the sample stands in each image."""
        number = self.places[server].cell
        cell, alone = self.cells[number], self.alone(server)
        if reach.leaf is not None:
            leaf = np.broadcast_to(reach.leaf, image.shape)
        elif alone is not None:
            leaf = alone[image]
        else:
            pod = self.first_pod(server, image) if reach.pod is None else reach.pod
            leaf = np.broadcast_to(pod * cell.leaves_in_pod, image.shape)
            entry = self.groups.entry_beside(cell, self.places[server].leaf)
            if entry is not None and self.groups.entered(server) is not None:
                leaf = leaf + self.entered[entry][0][image]
            else:
                for _ in range(2):
                    taken = self.held(number, image, leaf)
                    if entry is not None:
                        taken |= self.entered[entry][0][image] == leaf % cell.leaves_in_pod
                    leaf = leaf + taken
        if server in self.template.marked:
            return leaf, self.marked_at(server, image, leaf)[0]
        position = np.zeros(len(image), dtype=np.int64)
        for _ in self.template.marked:
            position = position + ~self.belongs(server, image, leaf, position)
        return leaf, position
