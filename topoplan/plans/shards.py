"""The shards of a plan: trees with routes, stages of one tree each, and shards that are images of a few templates.

The order of the shards gives their places in the buffer (`shard_bounds`), with aligned borders; shares stay exact. On a
machine with symmetries (permutations that map wires to wires of equal bandwidth) a tree and all its images load the
machine evenly, so a plan for a thousand GPUs is one or two trees and two permutations. `ImageShards` behaves as the
tuple of all shards and makes each on request; loads and checks need the templates alone.

If the links were measured, no two of one bandwidth, the images of a template have parts of their own (`ImageParts`):
trees through slow links carry less.

If a template with |O| images crosses the links of an orbit L of links x times, each link of L is crossed |O| x / |L|
times: the sum over all images does not change under the symmetries, hence is equal on all of L.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError
from topoplan.machine.fabric import Fabric
from topoplan.machine.permutation_groups import LARGEST_TABLE, Elements, all_elements
from topoplan.plans.file_values import (
    check_known,
    read_fraction,
    read_list,
    read_object,
    read_text,
    read_texts,
    read_whole,
)
from topoplan.units import check_whole, name_ranges, shown

OPERATIONS = ("reduce", "broadcast", "gather")
"""Operations of a stage; data runs towards the root in a reduce, and away from it in the others."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One edge of a tree between two ranks.

    ``route`` has the devices from parent to child, both included, which data of a reduce stage passes backwards;
    ``channel`` is that of its links: nvlink, pcie or network.
    """

    parent: int
    child: int
    route: tuple[str, ...]
    channel: str

    def to_object(self) -> list[object]:
        return [self.parent, self.child, list(self.route), self.channel]

    @staticmethod
    def from_object(item: object, where: str) -> Edge:
        """Read a row of a plan file; PlanError names the value of a wrong type."""
        if not isinstance(item, list) or len(item) != 4:
            raise PlanError(f"{where}: an edge must be [parent, child, route, channel], not {item!r}"[:200])
        return Edge(
            read_whole(item[0], f"{where}: parent"),
            read_whole(item[1], f"{where}: child"),
            read_texts(item[2], f"{where}: route"),
            read_text(item[3], f"{where}: channel"),
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """One tree, on which the shard's elements move, or the largest of them as entries of index and value.

    ``op`` is reduce (data runs from child to parent), broadcast (from parent to child), or gather: the root's elements
    or chosen entries run to all ranks of the tree, which add them to their own. Consecutive gathers of a shard are one
    exchange: every root sends its state from before anything arrived. Of elements, only roots that receive from all add
    them up; other ranks forward, and a broadcast gives them the total. ``entries`` is the bytes of entries that cross
    an edge for each byte of the shard; None for elements. In a reduce of entries every parent adds up the arriving ones
    and forwards as many, the largest.
    """

    op: str
    root: int
    edges: tuple[Edge, ...]
    entries: Fraction | None = None

    @property
    def weight(self) -> Fraction:
        """Bytes that cross an edge for each byte of the shard."""
        return Fraction(1) if self.entries is None else self.entries

    @property
    def kind(self) -> str:
        """The kind by which `topoplan.plans.structure` groups stages that run together."""
        if self.entries is None:
            return "exchange" if self.op == "gather" else "elements"
        return {"gather": "gather", "reduce": "merge", "broadcast": "spread"}[self.op]

    @property
    def height(self) -> int:
        """Edges on the longest path from the root; PlanError if the root does not reach an edge."""
        return max(self.depths().values())

    def check_ranks(self, size: int) -> None:
        """Raise PlanError if a rank is not below ``size``."""
        for rank in (self.root, *(end for edge in self.edges for end in (edge.parent, edge.child))):
            if not 0 <= rank < size:
                raise PlanError(f"is out of range 0 to {size - 1}", rank=rank)

    def depths(self) -> dict[int, int]:
        """Return the depth of every rank in the tree, the root's 0; PlanError if the edges are not a tree."""
        depth = {self.root: 0}
        for parent, child in ((edge.parent, edge.child) for edge in self.top_down()):
            depth[child] = depth[parent] + 1
        return depth

    def top_down(self) -> tuple[Edge, ...]:
        """Return the edges in breadth-first order from the root, siblings in ascending rank.

        PlanError if a rank has two parents or the root has one, or the root does not reach an edge.
        """
        last, seen = self.root, {self.root}
        for edge in self.edges:
            if edge.parent != last or edge.child in seen:
                break
            last = edge.child
            seen.add(last)
        else:  # the edges are a path from the root, in order
            return self.edges
        children: dict[int, list[Edge]] = {}
        seen = {self.root}
        for edge in self.edges:
            if edge.child in seen:
                fault = "is the root and has a parent" if edge.child == self.root else "has two parents"
                raise PlanError(f"rank {edge.child} {fault} in a {self.op} tree", rank=edge.child)
            seen.add(edge.child)
            children.setdefault(edge.parent, []).append(edge)
        order: list[Edge] = []
        frontier = [self.root]
        for rank in frontier:
            for edge in sorted(children.pop(rank, []), key=lambda e: e.child):
                order.append(edge)
                frontier.append(edge.child)
        if children:
            stray = min(children)
            raise PlanError(
                f"rank {stray} is a parent but the root {self.root} does not reach it", rank=stray
            )
        return tuple(order)

    def to_object(self) -> dict[str, object]:
        return {
            "op": self.op,
            "root": self.root,
            **({} if self.entries is None else {"entries": str(self.entries)}),
            "edges": [edge.to_object() for edge in self.edges],
        }

    @staticmethod
    def from_object(item: object, where: str) -> Stage:
        """Read the JSON object of a plan file; PlanError names a key that is missing or of a wrong type."""
        value = read_object(item, where)
        check_known(value, ("op", "root", "entries", "edges"), where)
        edges = read_list(value.get("edges"), f"{where}: edges")
        return Stage(
            edges=tuple(Edge.from_object(edge, where) for edge in edges),
            op=read_text(value.get("op"), f"{where}: op"),
            root=read_whole(value.get("root"), f"{where}: root"),
            entries=read_fraction(value["entries"], f"{where}: entries") if "entries" in value else None,
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of the buffer: its exact share and its trees, in order."""

    share: Fraction
    stages: tuple[Stage, ...]

    @property
    def depth(self) -> int:
        """Tree edges in sequence; if ranks exchange, the trees of one operation run in parallel."""
        runs = groupby(self.stages, key=lambda stage: (stage.op, stage.entries))
        heights = [[stage.height for stage in run] for _, run in runs]
        beside = any(stage.entries is not None or stage.op == "gather" for stage in self.stages)
        return sum(max(run) if beside else sum(run) for run in heights)

    def to_object(self) -> dict[str, object]:
        return {"share": str(self.share), "stages": [stage.to_object() for stage in self.stages]}

    @staticmethod
    def from_object(item: object, number: int) -> Shard:
        """Read the JSON object of shard ``number``; PlanError names a key that is missing or of a wrong type."""
        where = f"shard {number}"
        value = read_object(item, where)
        check_known(value, ("share", "stages"), where)
        share = read_fraction(value.get("share"), f"{where}: share")
        stages = read_list(value.get("stages"), f"{where}: stages")
        read = (Stage.from_object(stage, f"{where}, stage {place}") for place, stage in enumerate(stages))
        return Shard(share, tuple(read))


ALIGNMENT = 16
"""Borders of shards and chunks are multiples of so many elements, thus of at least as many bytes in every dtype: NCCL
and kernels copy 16 bytes at a time if addresses are multiples of 16, and else far fewer."""


def shard_bounds(shares: Iterable[Fraction], count: int, *, blocks: int = 1) -> list[int]:
    """Return the element offsets of the shards in a buffer: shard i is ``[bounds[i], bounds[i + 1])``.

    Cumulative shares are rounded down to multiples of `ALIGNMENT`, counted from the start of the block, and blocks end
    at their exact ends. So any count is divided without gap or overlap, no shard is `ALIGNMENT` elements away from its
    share, and shards of small buffers may be empty.

    ``shares`` add up to 1, and to 1 / ``blocks`` in every block; ``count`` is a multiple of ``blocks``, one for each
    rank in allgather and reduce_scatter, and else 1. In a rank's own array, of one block, shards start on multiples of
    `ALIGNMENT`; in the gathered one they do if the block length is such a multiple.

    >>> shard_bounds([Fraction(1, 3)] * 3, 100)
    [0, 32, 64, 100]
    >>> shard_bounds([Fraction(1, 4)] * 4, 100, blocks=2)
    [0, 16, 50, 66, 100]
    """
    check_whole("count", count)
    bounds = [0]
    total = Fraction(0)
    for share in shares:
        total += share
        bounds.append(aligned_end(total.numerator, total.denominator, count, blocks=blocks))
    return bounds


def aligned_end(parts: int, unit: int, count: int, *, blocks: int) -> int:
    """Return the bound of `shard_bounds` after ``parts`` of ``unit`` equal parts of the buffer."""
    block, rest = divmod(parts * blocks, unit)
    inside = rest * (count // blocks) // unit
    return block * (count // blocks) + inside // ALIGNMENT * ALIGNMENT


def bracket_notation(names: Sequence[str], stage: Stage, *, longest: int | None = None) -> str:
    """Return a tree in brackets, ``>`` or ``<`` in the direction of the data, leaves first; ``longest`` cuts it.

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7])
    >>> bracket_notation(plan.ranks, plan.shards[0].stages[1]), bracket_notation(plan.ranks, plan.shards[0].stages[0])
    ('gpu4>(gpu7 gpu5>gpu1)', 'gpu4<(gpu7 gpu5<gpu1)')
    >>> star = topoplan.one_hop_plan(topoplan.load("dgx-2")).shards[0].stages[1]
    >>> bracket_notation([f"gpu{i}" for i in range(16)], star)
    'gpu0>gpu1-15'
    """
    arrow = "<" if stage.op == "reduce" else ">"
    children: dict[int, list[int]] = {}
    edges = stage.top_down()
    for edge in edges:
        children.setdefault(edge.parent, []).append(edge.child)
    below: dict[int, str] = {}
    for rank in dict.fromkeys(edge.parent for edge in reversed(edges)):
        leaves = name_ranges(names[child] for child in children[rank] if child not in below)
        parts = [*leaves, *(f"{names[child]}{below[child]}" for child in children[rank] if child in below)]
        text = " ".join(parts)
        below[rank] = f"{arrow}({text})" if len(parts) > 1 else f"{arrow}{text}"
    text = f"{names[stage.root]}{below.get(stage.root, '')}"
    if longest is None or len(text) <= longest:
        return text
    end = f" … ({len(edges)} edges)"
    return text[: longest - len(end)].rsplit(" ", 1)[0] + end


MOST_SYMMETRIC_ELEMENTS = 1 << 16
"""Most permutations that the symmetries of a plan may generate; the planner uses at most four per rank."""

MOST_SYMMETRIES = 64
"""Most symmetries that a plan may list; the planner uses a handful."""


MOST_UNITS = 1 << 40
"""Most parts into which a plan whose images have parts of their own divides the buffer: sums of them stay exact."""


@dataclass(frozen=True, slots=True)
class ImageParts:
    """The images of every template that carry data, and how many of ``unit`` equal parts of the buffer each carries.

    ``elements`` has for each template the numbers of some elements of the group (see `ImageShards.elements`),
    ascending; ``parts`` has a whole number above 0 for each of them.

    PlanError unless all that holds, the parts are at most ``unit`` together, and ``unit`` is at most `MOST_UNITS`.
    """

    unit: int
    elements: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not 0 < self.unit <= MOST_UNITS:
            raise PlanError(f"the unit of parts must be from 1 to {MOST_UNITS}, got {self.unit}")
        if len(self.elements) != len(self.parts):
            raise PlanError(f"{len(self.elements)} lists of images have {len(self.parts)} lists of parts")
        for number, (elements, parts) in enumerate(zip(self.elements, self.parts, strict=True)):
            if len(elements) != len(parts) or not elements:
                raise PlanError(f"has {len(elements)} images and {len(parts)} parts", shard=number)
            if elements[0] < 0 or any(one >= other for one, other in pairwise(elements)):
                raise PlanError("numbers of images must ascend from 0 or more", shard=number)
            if min(parts) < 1:
                raise PlanError(f"the part of an image must be 1 or more, got {min(parts)}", shard=number)
        total = sum(map(sum, self.parts))
        if total > self.unit:
            raise PlanError(f"the parts of all images add up to {total}, above their unit, {self.unit}")

    def share(self, number: int) -> Fraction:
        """Return the mean share of the images of a template, which the template states."""
        return Fraction(sum(self.parts[number]), self.unit * len(self.parts[number]))

    def to_object(self) -> dict[str, object]:
        images = [
            {"elements": list(elements), "parts": list(parts)}
            for elements, parts in zip(self.elements, self.parts, strict=True)
        ]
        return {"unit": self.unit, "images": images}

    @staticmethod
    def from_object(item: object) -> ImageParts:
        """Read the JSON object of a plan file; PlanError names a key that is missing or of a wrong type."""
        value = read_object(item, "parts")
        check_known(value, ("unit", "images"), "parts")
        found: dict[str, list[tuple[int, ...]]] = {"elements": [], "parts": []}
        for number, one in enumerate(read_list(value.get("images"), "parts: images")):
            where = f"parts of shard {number}"
            row = read_object(one, where)
            check_known(row, tuple(found), where)
            for key, lists in found.items():
                numbers = read_list(row.get(key), f"{where}: {key}")
                lists.append(tuple(read_whole(each, f"{where}: {key}") for each in numbers))
        return ImageParts(
            read_whole(value.get("unit"), "parts: unit"), tuple(found["elements"]), tuple(found["parts"])
        )


@dataclass(frozen=True)
class ImageShards(Sequence[Shard]):
    """Distinct images of template shards under a group of symmetries, in the order of their roots.

    ``nodes`` are device names, the ``ranks`` ranks first (see `Fabric.nodes`). ``generators`` permute their positions,
    ranks to ranks, and generate the group. Without ``parts`` all images are shards, each with the share of its
    template; with them only the images in ``parts``, and a template states the mean share of its images.

    PlanError if there are too many symmetries or not as many lists of parts as templates; on first use, if one is not a
    permutation that maps ranks to ranks, their group is too large to list, a template names an unknown rank, or the
    parts name an element that the group does not have.

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
    parts: ImageParts | None = None

    def __post_init__(self) -> None:
        if self.parts is not None and len(self.parts.elements) != len(self.templates):
            raise PlanError(
                f"parts of {len(self.parts.elements)} shards do not fit the {len(self.templates)} that are listed"
            )
        if len(self.generators) > MOST_SYMMETRIES:
            raise PlanError(
                f"{len(self.generators)} symmetries are more than the {MOST_SYMMETRIES} that a plan may list"
            )

    @cached_property
    def elements(self) -> Elements:
        """The group, one permutation of the nodes to a row, the identity first."""
        size = len(self.nodes)
        for generator in self.generators:
            if sorted(generator) != list(range(size)) or max(generator[: self.ranks]) >= self.ranks:
                raise PlanError("a symmetry must be a permutation of the devices that maps ranks to ranks")
        if not self.generators:
            return np.arange(size, dtype=np.int32)[None, :]
        limit = MOST_SYMMETRIC_ELEMENTS
        elements = all_elements([np.array(generator) for generator in self.generators], limit)
        if elements is None:
            most = min(limit, LARGEST_TABLE // size)
            raise PlanError(
                f"the symmetries generate more than {most} permutations of {size} devices; list fewer of them"
            )
        return elements

    @cached_property
    def _listed(self) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[int, ...]]:
        """Template and element of every shard in order, and the number of images of every template."""
        rows: list[tuple[int, int, int]] = []
        counts = []
        for number, template in enumerate(self.templates):
            chosen = self.images[number]
            roots = self.elements[:, owner_of(template)].tolist()
            rows += [(roots[element], number, element) for element in chosen]
            counts.append(len(chosen))
        rows.sort()
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return table[:, 1], table[:, 2], tuple(counts)

    @cached_property
    def images(self) -> tuple[Sequence[int], ...]:
        """For each template the numbers of the elements that make its images, ascending."""
        found: list[Sequence[int]] = []
        for number, template in enumerate(self.templates):
            self._check_ends(template, number)
            if self.parts is not None:
                found.append(self.parts.elements[number])
                if found[-1][-1] >= len(self.elements):
                    raise PlanError(
                        f"image {found[-1][-1]} does not exist: the symmetries generate {len(self.elements)} "
                        "permutations",
                        shard=number,
                    )
                continue
            roots = set(self.elements[:, owner_of(template)].tolist())
            several = len(roots) < len(self.elements)
            found.append(self._distinct(template, number) if several else range(len(self.elements)))
        return tuple(found)

    def _check_ends(self, template: Shard, number: int) -> None:
        """Raise PlanError for unknown ranks in a template: its images are looked up by these numbers."""
        if not template.stages:
            raise PlanError("has no stage", shard=number)
        for position, stage in enumerate(template.stages):
            try:
                stage.check_ranks(self.ranks)
            except PlanError as error:
                raise error.within(number, position) from None

    def _distinct(self, template: Shard, number: int) -> list[int]:
        """Return the first element for each distinct image of a template.

        An image is identified by its rows of numbers, one for each root and each edge, sorted, since an element may
        list them in another order. For example, the star 0>1, 0>2 under the swap of ranks 1 and 2: its edges (child,
        parent) are [1, 0] and [2, 0], those of the image [2, 0] and [1, 0]; sorted they are equal: the star is its only
        image.
        """
        size = len(self.nodes)
        longest = max((len(edge.route) for stage in template.stages for edge in stage.edges), default=0)
        channels = sorted({edge.channel for stage in template.stages for edge in stage.edges})
        lines: list[list[int]] = []
        for position, stage in enumerate(template.stages):
            # Stages and channels have numbers that no permutation moves: positions beyond the devices.
            first = size + 1 + position
            lines.append([first, stage.root, stage.root, size, *[size] * longest])
            for edge in stage.edges:
                try:
                    route = [self._position[name] for name in edge.route]
                except KeyError as error:
                    raise PlanError(
                        f"crosses {error}, which is not a device of this plan", shard=number
                    ) from None
                channel = size + 1 + len(template.stages) + channels.index(edge.channel)
                rest = [size] * (longest - len(route))
                lines.append([first, edge.child, edge.parent, channel, *route, *rest])
        table = np.array(lines, dtype=np.int64)
        still = np.arange(size, size + 1 + len(template.stages) + len(channels), dtype=np.int32)
        known: set[bytes] = set()
        chosen = []
        for number_of_element in range(len(self.elements)):
            image = np.concatenate((self.elements[number_of_element], still))[table]
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
        image = self.elements[element[number]].tolist()
        names = {name: self.nodes[place] for name, place in zip(self.nodes, image, strict=True)}
        moved = moved_shard(self.templates[which[number]], image, names)
        if self.parts is None:
            return moved
        return replace(moved, share=Fraction(self._part_of[which[number], element[number]], self.parts.unit))

    @cached_property
    def _part_of(self) -> dict[tuple[int, int], int]:
        """Parts of the buffer by template and element."""
        assert self.parts is not None, "images without parts have the share of their template"
        lists = zip(self.parts.elements, self.parts.parts, strict=True)
        return {
            (number, element): part
            for number, (elements, parts) in enumerate(lists)
            for element, part in zip(elements, parts, strict=True)
        }

    def __iter__(self) -> Iterator[Shard]:
        return (self[number] for number in range(len(self)))

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.nodes)}

    def to_object(self) -> list[dict[str, str]]:
        """Return the JSON value of a plan file: every symmetry as its moved devices with their images."""
        return [
            {self.nodes[place]: self.nodes[image] for place, image in enumerate(generator) if place != image}
            for generator in self.generators
        ]

    @staticmethod
    def from_object(
        item: object, templates: Sequence[Shard], fabric: Fabric, parts: ImageParts | None = None
    ) -> ImageShards:
        """Return images of the templates under the symmetries that `to_object` wrote.

        PlanError if a value is of a wrong type, or names an unknown device.
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
        return ImageShards(fabric.nodes, fabric.size, tuple(generators), tuple(templates), parts)


def moved_shard(shard: Shard, vertices: Sequence[int], names: Mapping[str, str]) -> Shard:
    """Return the shard on other ranks and devices: vertex i becomes ``vertices[i]``, a device ``names[device]``."""

    def moved(edge: Edge) -> Edge:
        route = tuple(names[device] for device in edge.route)
        return Edge(vertices[edge.parent], vertices[edge.child], route, edge.channel)

    stages = []
    for stage in shard.stages:
        edges = tuple(moved(edge) for edge in stage.edges)
        there = Stage(stage.op, vertices[stage.root], edges, stage.entries)
        stages.append(replace(there, edges=there.top_down()))
    return Shard(shard.share, tuple(stages))


LEAST_ENTRIES, MOST_ENTRIES = Fraction(1, 10**9), 10**6
"""Range of the bytes of entries for each byte of a shard."""


def check_entries(entries: Fraction) -> None:
    """Raise PlanError if a size of entries is not between `LEAST_ENTRIES` and `MOST_ENTRIES`."""
    if not LEAST_ENTRIES <= entries <= MOST_ENTRIES:
        raise PlanError(
            f"{shown(entries)} bytes of entries for a byte of the shard must be from {float(LEAST_ENTRIES):g} to "
            f"{MOST_ENTRIES}"
        )


def path_ends(shard: Shard) -> tuple[int, int]:
    """Return source and destination of a shard of an all-to-all; PlanError if its tree is not a path."""
    if len(shard.stages) != 1 or shard.stages[0].op != "broadcast" or shard.stages[0].entries is not None:
        raise PlanError(
            "must have one stage, a broadcast of elements, along which a block of an alltoall goes"
        )
    stage = shard.stages[0]
    at = stage.root
    for edge in stage.top_down():
        if edge.parent != at:
            raise PlanError(f"branches at rank {edge.parent}; a block of an alltoall takes a path")
        at = edge.child
    return stage.root, at


def shard_counts(shards: Sequence[Shard]) -> tuple[tuple[Shard, int], ...]:
    """Return the shards from which all others follow by symmetry, each with the number of shards that it represents."""
    if isinstance(shards, ImageShards):
        return tuple(zip(shards.templates, shards.counts, strict=True))
    return tuple((shard, 1) for shard in shards)


def owner_of(shard: Shard) -> int:
    """Return the rank that orders images: the root of a last reduce stage, else of the first stage."""
    last = shard.stages[-1]
    return last.root if last.op == "reduce" else shard.stages[0].root
