"""Trees of a torus of servers by kind: templates on a server and its neighbours, the rule of their images, and loads.

A template goes through the dimensions in its own order, as dimension-ordered routing does. The server of the root sends
along the first dimension, so many steps ahead and so many back, which together reach every other server of its ring
once. All of these servers send along the second dimension, and so on. So a server forwards in the direction in which it
was entered, and begins all later dimensions.

The stages of a template are trees on the ranks of server 0 and of some of its neighbours (`ClusterByKind.sample`): the
edges inside server 0 are those of the root's server. The edges into and inside a neighbour are those of every server
that is entered in its direction, moved there. The images have the root on each server in turn: image x is the template
moved by the coordinates of server x. Every link of a class is a translation of every other, so all carry the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

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
