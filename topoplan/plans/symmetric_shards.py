"""Shards that are images of a few under symmetries of the machine: how large plans stay small.

A cluster of equal servers looks the same after its servers are rotated, and so does an NVSwitch box after its GPUs
are. A tree and all its images under such symmetries (permutations that take wires to wires, whatever was measured on
them) load the machine evenly, so a plan for a thousand GPUs is one or two trees and two permutations. `ImageShards`
behaves as the tuple of all shards and makes each when it is asked for; loads and checks need the templates alone.

With |O| images of a template that crosses the links of an orbit L of links x times, each link of L is crossed
|O| x / |L| times: the sum over all images does not change under the symmetries, hence is equal on all of L.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import overload

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.json_values import read_list, read_object, read_text
from topoplan.plans.tree import Edge, Shard, Stage
from topoplan.symmetry.permutation_groups import LARGEST_TABLE, group_elements

MOST_ELEMENTS = 1 << 16
"""Most permutations that the symmetries of a plan may generate; the planner uses four for each rank at most."""

MOST_SYMMETRIES = 64
"""Most symmetries that a plan may list; the planner uses a handful."""


@dataclass(frozen=True)
class ImageShards(Sequence[Shard]):
    """All distinct images of template shards under a group of symmetries, in the order of their roots.

    Parameters
    ----------
    nodes : tuple of str
        Device names, the ranks first (see `Fabric.nodes`); a permutation speaks of their positions.
    ranks : int
        Number of ranks.
    generators : tuple of tuple of int
        Permutations of the nodes that generate the group; ranks go to ranks.
    templates : tuple of Shard
        Each image has the share of its template.

    Raises
    ------
    PlanError
        Too many symmetries. On first use: one is no permutation that keeps ranks ranks, their group is too large to
        list, or a template names what is no rank.

    Examples
    --------
    >>> from fractions import Fraction
    >>> star = Stage("broadcast", 0, (Edge(0, 1, ("a", "b"), "nvlink"),))
    >>> both = ImageShards(("a", "b"), 2, ((1, 0),), (Shard(Fraction(1, 2), (star,)),))
    >>> len(both), both[1].stages[0].edges[0].route
    (2, ('b', 'a'))
    """

    nodes: tuple[str, ...]
    ranks: int
    generators: tuple[tuple[int, ...], ...]
    templates: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if len(self.generators) > MOST_SYMMETRIES:
            raise PlanError(
                f"{len(self.generators)} symmetries are more than the {MOST_SYMMETRIES} that a plan may list"
            )

    @cached_property
    def elements(self) -> NDArray[np.int32]:
        """The group, one permutation of the nodes to a row, the identity first."""
        size = len(self.nodes)
        for generator in self.generators:
            if sorted(generator) != list(range(size)) or max(generator[: self.ranks]) >= self.ranks:
                raise PlanError("a symmetry is no permutation of the devices that takes ranks to ranks")
        if not self.generators:
            return np.arange(size, dtype=np.int32)[None, :]
        limit = min(MOST_ELEMENTS, LARGEST_TABLE // size)
        elements = group_elements([np.array(generator) for generator in self.generators], limit)
        if elements is None:
            raise PlanError(
                f"the symmetries generate more than {limit} permutations of {size} devices; list fewer of them"
            )
        return elements

    @cached_property
    def _listed(self) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[int, ...]]:
        """Template and element of every shard in order, and the number of images of every template."""
        rows: list[tuple[int, int, int]] = []
        counts = []
        for number, template in enumerate(self.templates):
            self._check_ends(template, number)
            roots = self.elements[:, owner_of(template)].tolist()
            chosen = self._distinct(template, number) if len(set(roots)) < len(roots) else range(len(roots))
            rows += [(roots[element], number, element) for element in chosen]
            counts.append(len(chosen))
        rows.sort()
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return table[:, 1], table[:, 2], tuple(counts)

    def _check_ends(self, template: Shard, number: int) -> None:
        """Every rank that a template names must be one: its images are looked up by these numbers."""
        if not template.stages:
            raise PlanError("has no stage", shard=number)
        for position, stage in enumerate(template.stages):
            try:
                stage.check_ranks(self.ranks)
            except PlanError as error:
                raise error.within(number, position) from None

    def _distinct(self, template: Shard, number: int) -> list[int]:
        """Elements that take a template to different shards: the first one for each of them.

        An image is told by its rows of numbers, one for each root and each edge, sorted, since an element may list them
        in another order. For example, the star 0>1, 0>2 under the swap of ranks 1 and 2: its edges (child, parent) are
        [1, 0] and [2, 0], those of the image [2, 0] and [1, 0]; sorted they are the same: the star is its only image.
        """
        size = len(self.nodes)
        longest = max((len(edge.route) for stage in template.stages for edge in stage.edges), default=0)
        channels = sorted({edge.channel for stage in template.stages for edge in stage.edges})
        lines: list[list[int]] = []
        for position, stage in enumerate(template.stages):
            # Stages and channels are told apart by numbers that no permutation moves: positions beyond the devices.
            first = size + 1 + position
            lines.append([first, stage.root, stage.root, size, *[size] * longest])
            for edge in stage.edges:
                try:
                    route = [self._position[name] for name in edge.route]
                except KeyError as error:
                    raise PlanError(
                        f"crosses {error}, which is no device of this plan", shard=number
                    ) from None
                channel = size + 1 + len(template.stages) + channels.index(edge.channel)
                rest = [size] * (longest - len(route))
                lines.append([first, edge.child, edge.parent, channel, *route, *rest])
        table = np.array(lines, dtype=np.int64)
        still = np.arange(size, size + 1 + len(template.stages) + len(channels), dtype=np.int32)
        known: set[bytes] = set()
        chosen = []
        for number_of_element, element in enumerate(self.elements):
            image = np.concatenate((element, still))[table]
            image = image[np.lexsort((image[:, 1], image[:, 0]))]
            key = blake2b(image.tobytes(), digest_size=16).digest()
            if key not in known:
                known.add(key)
                chosen.append(number_of_element)
        return chosen

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of distinct images of every template."""
        return self._listed[2]

    def __len__(self) -> int:
        return len(self._listed[0])

    @overload
    def __getitem__(self, number: int) -> Shard: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[Shard, ...]: ...

    def __getitem__(self, number: int | slice) -> Shard | tuple[Shard, ...]:
        if isinstance(number, slice):
            return tuple(self[i] for i in range(*number.indices(len(self))))
        which, element, _ = self._listed
        return self._image(self.templates[which[number]], self.elements[element[number]])

    def __iter__(self) -> Iterator[Shard]:
        return (self[number] for number in range(len(self)))

    def _image(self, shard: Shard, element: NDArray[np.int32]) -> Shard:
        names = {name: self.nodes[image] for name, image in zip(self.nodes, element.tolist(), strict=True)}
        return moved_shard(shard, element.tolist(), names)

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.nodes)}

    def to_object(self) -> list[dict[str, str]]:
        """The JSON value of a plan file: every symmetry as the devices that it moves, with their images."""
        return [
            {self.nodes[place]: self.nodes[image] for place, image in enumerate(generator) if place != image}
            for generator in self.generators
        ]

    @staticmethod
    def from_object(item: object, templates: Sequence[Shard], fabric: Fabric) -> ImageShards:
        """All images of the templates under the symmetries that `to_object` wrote.

        Raises
        ------
        PlanError
            A value is of a wrong type, or names what is no device of the plan.
        """
        position = {name: number for number, name in enumerate(fabric.nodes)}
        generators = []
        for number, moves in enumerate(read_list(item, "symmetry")):
            where = f"symmetry {number}"
            image = list(range(len(fabric.nodes)))
            for name, there in read_object(moves, where).items():
                if name not in position or read_text(there, where) not in position:
                    raise PlanError(
                        f"{where} moves {name!r} to {there!r}; both must be devices of the plan"[:200]
                    )
                image[position[name]] = position[str(there)]
            generators.append(tuple(image))
        return ImageShards(fabric.nodes, fabric.size, tuple(generators), tuple(templates))


def moved_shard(shard: Shard, vertices: Sequence[int], names: Mapping[str, str]) -> Shard:
    """The shard on other ranks and devices: vertex i becomes ``vertices[i]``, a device what ``names`` has for it."""

    def moved(edge: Edge) -> Edge:
        route = tuple(names[device] for device in edge.route)
        return Edge(vertices[edge.parent], vertices[edge.child], route, edge.channel)

    stages = []
    for stage in shard.stages:
        edges = tuple(moved(edge) for edge in stage.edges)
        there = Stage(stage.op, vertices[stage.root], edges, stage.entries)
        stages.append(replace(there, edges=there.top_down()))
    return Shard(shard.share, tuple(stages))


def shard_counts(shards: Sequence[Shard]) -> tuple[tuple[Shard, int], ...]:
    """Shards from which all others follow by symmetry, each with the number of shards that it stands for.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "broadcast", gpus=[4, 7])
    >>> [count for _, count in shard_counts(plan.shards)]
    [1]
    """
    if isinstance(shards, ImageShards):
        return tuple(zip(shards.templates, shards.counts, strict=True))
    return tuple((shard, 1) for shard in shards)


def owner_of(shard: Shard) -> int:
    """The rank by which images are ordered: where the last stage reduces to, or else where the first one starts."""
    last = shard.stages[-1]
    return last.root if last.op == "reduce" else shard.stages[0].root
